"""`python -m nextn`: the same as the `nextn` command; torchrun starts its processes this way."""

import os
import sys


def main() -> None:
    """Run the command line; Ctrl-C while its modules are loaded is no traceback either."""
    try:
        from nextn.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()


def leave(code: int | None) -> None:
    """End the process at once, with the exit code of sys.exit(code)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if "TORCHELASTIC_RUN_ID" not in os.environ or isinstance(end.code, str):
            raise
        # Everything is written. At interpreter exit, a library's thread sometimes aborts the process ("terminate called
        # without an active exception", once in 14 runs of two, torch 2.13), which torchrun would report as a failure.
        leave(end.code)
