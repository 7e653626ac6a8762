"""Tokenize conversations through a tokenizer's chat template; no other module renders one.

Templates are rendered in a child process (`template_worker`), which starts at the first conversation and is reused.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from math import prod
from threading import Lock
from typing import TYPE_CHECKING

from nextn.data.template_worker import MAX_MEMORY
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SECONDS = 10.0  # for one conversation
THINK_TAGS = ("<think>", "</think>")  # around the reasoning of an answer
MAX_GROWTH = 1000  # characters for one; published normalizers and decoders: at most 8
MAX_TEMPLATE = 1024 * 1024  # characters; published templates have at most 30,000


@contextmanager
def tokenizer_failures() -> Iterator[None]:
    """Turn a failure inside the tokenizer, such as a regex that backtracks for ever, into a ConfigError.

    A panic of its Rust code is not even an Exception, and would end a thread of the server.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = next(iter(str(error).splitlines()), "no reason")[:200]
        raise ConfigError(
            f"the tokenizer failed on this text: {reason}; its pre_tokenizer or normalizer in tokenizer.json cannot "
            "handle it: use the tokenizer of the published model"
        ) from error


def check_growth(document: object) -> None:
    """Raise ValueError if the normalizer or decoder of a tokenizer.json can make a text very much longer.

    The tokenizer has no limit of its own, and a text that fills the memory ends the process.
    """
    for field in ("normalizer", "decoder"):
        growth = _growth(document.get(field) if isinstance(document, dict) else None)
        if growth > MAX_GROWTH:
            message = f"its {field} can make a text {growth:.3g} times as long, at most {MAX_GROWTH} are allowed"
            raise ValueError(message)


def _growth(step: object) -> float:
    """Return the most characters that a step writes for one that it reads."""
    match step:
        case {"type": "Sequence", "normalizers": list(steps)} | {"type": "Sequence", "decoders": list(steps)}:
            return prod(map(_growth, steps))
        case {"type": "Replace", "pattern": dict(pattern), "content": str(content)}:
            exact = pattern.get("String")
            if exact:
                return max(1, len(content) / len(exact))
            # An expression may match an empty text, before each character.
            return max(1, len(content) + _matches_nothing(pattern))
        case {"type": "Prepend", "prepend": str(text)}:
            return max(1, len(text))
    return 1


def _matches_nothing(pattern: Mapping[str, object]) -> bool:
    try:
        return re.match(str(pattern.get("Regex") or ""), "") is not None
    except re.error:  # of a syntax that Python lacks
        return True


def apply_chat_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Sequence[object] | None = None,
    add_generation_prompt: bool = False,
    assistant_mask: bool = False,
    variables: Mapping[str, object] | None = None,
    seconds: float = MAX_SECONDS,
) -> tuple[list[int], list[bool]]:
    """Render a conversation and tokenize it, as the tokenizer's own `apply_chat_template` does.

    With `assistant_mask`, also return which tokens are the assistant's, by the template's `{% generation %}` blocks;
    else an empty mask. `add_generation_prompt` appends the tokens that open the assistant's next turn. `variables` are
    further ones of the template, such as `enable_thinking`. Raises ConfigError if the template rejects the
    conversation, is not a valid template, or exceeds a limit, as that of `seconds`.
    """
    try:
        if not messages:
            raise ValueError("it has no messages")
        template = tokenizer.get_chat_template(None, tools)
        if not isinstance(template, str) or len(template) > MAX_TEMPLATE:
            raise ValueError(f"expected a text of at most {MAX_TEMPLATE:,} characters, not {_shown(template)}")
        fixed = {
            **tokenizer.special_tokens_map,
            "chat_template": template,
            "conversations": [[{k: v for k, v in message.items() if v is not None} for message in messages]],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "return_assistant_tokens_mask": assistant_mask,
        }
        if taken := (variables or {}).keys() & {*fixed, "messages", "self"}:
            raise ValueError(f"its variables cannot include {', '.join(sorted(taken))}")
        text, spans = _worker(os.getpid()).render({**(variables or {}), **fixed}, seconds)
        with tokenizer_failures():
            encoded = tokenizer(text, add_special_tokens=False)
        ids = list(encoded["input_ids"])
        mask = [False] * len(ids) if assistant_mask else []
        for begin, end in spans:
            first, last = encoded.char_to_token(begin), encoded.char_to_token(end - 1)
            if first is not None:
                stop = len(ids) if last is None else last + 1
                mask[first:stop] = [True] * (stop - first)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the chat template refuses this conversation: {error}") from error
    return ids, mask


class _Worker:
    """The child process; started at first use, and restarted if it ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, request: Mapping[str, object], seconds: float) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text and the character spans that are the assistant's. Raises ValueError."""
        line = json.dumps({**request, "seconds": seconds}, default=_placeholder).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _start_process()
            response = _exchange(self._process, line)
        if not response:
            code = self._process.wait()
            if code == -signal.SIGALRM:
                raise ValueError(f"it takes more than {seconds:g} s for one conversation")
            raise ValueError(f"its process ended with {code}; it may use {MAX_MEMORY // 2**20} MiB of memory")
        values = json.loads(response)
        if "error" in values:
            raise ValueError(values["error"])
        return values["text"], values["spans"]


@cache
def _worker(pid: int) -> _Worker:
    """The worker of this process: a forked child must not share the pipes of its parent."""
    return _Worker()


def _start_process() -> "subprocess.Popen[bytes]":
    # One thread per library: the stacks of idle threads count towards the memory limit.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "nextn.data.template_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,  # so that Ctrl-C reaches only this process, which may finish its conversations
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"\n":
        raise ValueError(f"the rendering process did not start: it ended with {process.wait()}")
    return process


def _exchange(process: "subprocess.Popen[bytes]", line: bytes) -> bytes:
    """Send one request and return the response; empty if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
        return process.stdout.readline()
    except BaseException:  # after an interrupt, the pending response must not be read as that of a later request
        process.kill()
        process.wait()
        raise


def _placeholder(value: object) -> str:
    """Stand-in for a value that JSON cannot represent, such as an image."""
    return f"<{type(value).__name__}>"


def _shown(value: object) -> str:
    return f"{len(value):,} characters" if isinstance(value, str) else type(value).__name__
