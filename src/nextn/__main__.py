"""`python -m nextn`: the same as the `nextn` command."""

from nextn.cli import main

main()
