"""`python -m nextn`: the same as the `nextn` command; torchrun starts its processes so."""

import os
import sys

from nextn.cli import main


def leave(code: int | None) -> None:
    """End the process at once, with what sys.exit(code) would end it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if "TORCHELASTIC_RUN_ID" not in os.environ or isinstance(end.code, str):
            raise
        # All is written; behind the interpreter's end a library's thread aborts a process now and then ("terminate
        # called without an active exception", once in 14 runs of two, torch 2.13): torchrun would call the run failed.
        leave(end.code)
