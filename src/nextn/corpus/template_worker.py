"""The process that renders chat templates: JSON lines on standard input, one answer each on standard output.

A chat template is a program of a stranger's. transformers' sandbox keeps it from files and attributes, but not from
loops and long strings, so this process has a bound on its memory and, for each conversation, on its time.
"""

import json
import resource
import signal
import sys
from pathlib import Path

MAX_MEMORY = 512 * 1024 * 1024  # bytes of address space beyond what the imports take
MAX_TEXT = 16 * 1024 * 1024  # characters of one rendered conversation
_MAX_REASON = 500


def main() -> None:
    """Say that it is ready, then answer requests until standard input ends."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    _say("")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request.pop("seconds"))  # nobody handles SIGALRM: it ends the process
        try:
            [text], spans = render_jinja_template(**request)
            if len(text) > MAX_TEXT:
                raise ValueError(f"it renders {len(text):,} characters, at most {MAX_TEXT:,} are taken")
            answer = json.dumps({"text": text, "spans": spans[0] if spans else []})
        except MemoryError:
            answer = json.dumps({"error": f"it needs more than {MAX_MEMORY // 2**20} MiB of memory"})
        except Exception as error:  # whatever the template does
            kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "  # its own words alone
            answer = json.dumps({"error": f"{kind}{str(error)[:_MAX_REASON]}"})
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(answer)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _limit_memory() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux, where the limit would not hold either
        return
    most = pages * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
