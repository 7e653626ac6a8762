"""The process that renders chat templates: JSON lines on standard input, one response line each on standard output.

A chat template is an untrusted program. transformers' sandbox keeps it from files and attributes, but not from
loops and long strings, so this process limits its memory and, for each conversation, its time.
"""

import json
import resource
import signal
import sys
from pathlib import Path

MAX_MEMORY = 512 * 1024 * 1024  # bytes of address space beyond those that the imports take
MAX_TEXT = 16 * 1024 * 1024  # characters of one rendered conversation
_MAX_REASON = 500


def main() -> None:
    """Signal readiness with an empty line, then answer requests until standard input ends."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    _write("")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request.pop("seconds"))  # SIGALRM has no handler: it ends the process
        try:
            [text], spans = render_jinja_template(**request)
            if len(text) > MAX_TEXT:
                raise ValueError(f"it renders {len(text):,} characters, at most {MAX_TEXT:,} are allowed")
            response = json.dumps({"text": text, "spans": spans[0] if spans else []})
        except MemoryError:
            response = json.dumps({"error": f"it needs more than {MAX_MEMORY // 2**20} MiB of memory"})
        except Exception as error:  # whatever the template does
            kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "  # raised by the template itself
            response = json.dumps({"error": f"{kind}{str(error)[:_MAX_REASON]}"})
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(response)


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _limit_memory() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    except OSError:  # not Linux, where the limit would not be enforced either
        return
    limit = pages * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
