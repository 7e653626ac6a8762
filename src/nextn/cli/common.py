"""What the verbs share: options of one meaning, the console, text that is never taken for markup."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr)


def plain(text: str, style: str | None = None) -> "Text":
    from rich.text import Text

    return Text(text, style=style or "")
