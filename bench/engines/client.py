"""The driver's side of the line: a worker as a child process that answers one request at a time."""

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
    """An engine cannot run, or ran and broke off; the message is the reason."""


class Worker:
    """A child that was asked to load an engine. log: the file that takes its stderr.

    Raises Unavailable, with the engine's own reason, where it does not come up within `start_s`.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, start_s: float = 900
    ) -> None:
        self.log = log
        with log.open("w") as errors:
            # A session of its own, so that children of the worker's can be ended with it.
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
        """The same engine with other options, in the same process. Raises Unavailable; the worker can load again."""
        self._send({"load": dict(options)})
        self.hello = self._greeting(start_s)

    def ask(self, request: Request, *, limit_s: float = 300) -> Answer:
        """Raises Unavailable for an error, an end or no answer."""
        return Answer(**self._told(vars(request), limit_s))

    def metrics(self, *, limit_s: float = 60) -> str:
        """The engine's counters as Prometheus text. Raises Unavailable where it has none."""
        return str(self._told({"metrics": True}, limit_s)["text"])

    def close(self) -> None:
        """Ends the child, and what it started: first by the end of its stdin, then by force."""
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

    def _told(self, asked: Mapping[str, object], limit_s: float) -> dict:
        self._send(asked)
        found = self._answer(limit_s)
        if "error" in found:
            raise Unavailable(str(found["error"]))
        return found

    def _send(self, asked: Mapping[str, object]) -> None:
        assert self.child.stdin is not None
        try:
            self.child.stdin.write((json.dumps(asked) + "\n").encode())
            self.child.stdin.flush()
        except OSError:
            raise Unavailable(self._end()) from None

    def _kill(self) -> None:
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def _answer(self, limit_s: float) -> dict:
        """The next line as JSON."""
        assert self.child.stdout is not None
        ends = time.monotonic() + limit_s
        with selectors.DefaultSelector() as ready:
            ready.register(self.child.stdout, selectors.EVENT_READ)
            while b"\n" not in self.pending:
                if not ready.select(max(0.0, ends - time.monotonic())):
                    self._kill()
                    raise Unavailable(f"no answer within {limit_s:g} s")
                read = os.read(self.child.stdout.fileno(), 1 << 16)
                if not read:
                    raise Unavailable(self._end())
                self.pending += read
        line, _, self.pending = self.pending.partition(b"\n")
        return json.loads(line)

    def _end(self) -> str:
        code = self.child.wait()
        said = self.log.read_text(errors="replace").strip().splitlines()
        return f"ended with code {code}: {said[-1] if said else 'it said nothing'}"


def cpu_seconds(root: int) -> float:
    """Processor seconds that a process and its children have used so far; 0 where the system has no /proc."""
    if not sys.platform.startswith("linux"):
        return 0.0
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    for pid in (root, *_children(root)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def _children(root: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            found += [pid, *_children(pid)]
    return found
