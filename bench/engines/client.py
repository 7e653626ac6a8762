"""The driver's side of the protocol: a worker as a child process that answers one request at a time."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from engines.protocol import Answer, Request


class Unavailable(Exception):
    """An engine cannot run, or failed while running; the message is the reason."""


class Worker:
    """A child process that has loaded an engine; `log` is the file for its stderr.

    Raises Unavailable, with the engine's own reason, if it is not ready within `start_s`.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, start_s: float = 900
    ) -> None:
        self.log = log
        with log.open("w") as errors:
            # Its own session, so that the worker's children can be killed with it.
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.pending = b""
        try:
            self.hello = self._greeting(start_s)
        except Unavailable:
            self.close()
            raise

    def load(self, options: Mapping[str, object], *, start_s: float = 900) -> None:
        """Load the engine again with other options, in the same process. Raises Unavailable; it can load once more."""
        self._send({"load": dict(options)})
        self.hello = self._greeting(start_s)

    def ask(self, request: Request, *, limit_s: float = 300) -> Answer:
        """Answer one request. Raises Unavailable for an error, an exit or no answer in time."""
        return Answer(**self._exchange(vars(request), limit_s))

    def metrics(self, *, limit_s: float = 60) -> str:
        """Return the engine's counters as Prometheus text. Raises Unavailable if it has none."""
        return str(self._exchange({"metrics": True}, limit_s)["text"])

    def close(self) -> None:
        """End the child and its children: by closing its stdin, then by SIGKILL."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        with suppress(OSError):
            self.child.stdin.close()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self._kill()
        self.child.stdout.close()

    def _greeting(self, start_s: float) -> dict:
        hello = self._answer(start_s)
        if not hello.get("ready"):
            raise Unavailable(str(hello.get("unavailable", f"no greeting but {hello}")))
        return hello

    def _exchange(self, message: Mapping[str, object], limit_s: float) -> dict:
        self._send(message)
        answer = self._answer(limit_s)
        if "error" in answer:
            raise Unavailable(str(answer["error"]))
        return answer

    def _send(self, message: Mapping[str, object]) -> None:
        assert self.child.stdin is not None
        try:
            self.child.stdin.write((json.dumps(message) + "\n").encode())
            self.child.stdin.flush()
        except OSError:
            raise Unavailable(self._exit_reason()) from None

    def _kill(self) -> None:
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def _answer(self, limit_s: float) -> dict:
        """Read the next line as JSON."""
        assert self.child.stdout is not None
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as ready:
            ready.register(self.child.stdout, selectors.EVENT_READ)
            while b"\n" not in self.pending:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    self._kill()
                    raise Unavailable(f"no answer within {limit_s:g} s")
                data = os.read(self.child.stdout.fileno(), 1 << 16)
                if not data:
                    raise Unavailable(self._exit_reason())
                self.pending += data
        line, _, self.pending = self.pending.partition(b"\n")
        return json.loads(line)

    def _exit_reason(self) -> str:
        code = self.child.wait()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"ended with code {code}: {lines[-1] if lines else 'its log is empty'}"


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process and its children so far; 0 if the system has no /proc."""
    if not sys.platform.startswith("linux"):
        return 0.0
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    for pid in (root, *_children(root)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def _children(root: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            children += [pid, *_children(pid)]
    return children
