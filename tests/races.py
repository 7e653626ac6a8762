"""Several processes at work on one folder, started at one moment."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

# How many rounds an attack has: few in the suite, hundreds by hand.
ROUNDS = int(os.environ.get("NEXTN_ATTACKS", "5"))


def race(jobs: Sequence[Callable[[], object]], folder: Path) -> list[str]:
    """Run each job in a process of its own -> what each ended with: "" or its error. folder: for the answers."""
    folder.mkdir(parents=True, exist_ok=True)
    wait, start = os.pipe()
    children = [_forked(job, folder / str(number), wait, start) for number, job in enumerate(jobs)]
    os.close(wait)
    os.close(start)  # all read the end of the pipe at once
    for child in children:
        os.waitpid(child, 0)
    return [_read(folder / str(number)) for number in range(len(jobs))]


def _read(answer: Path) -> str:
    """Taken away, so that no later race finds it."""
    text = answer.read_text() if answer.exists() else "died"
    answer.unlink(missing_ok=True)
    return text


def _forked(job: Callable[[], object], answer: Path, wait: int, start: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.close(start)
        os.read(wait, 1)
        job()
        answer.write_text("")
    except BaseException as error:
        answer.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)
