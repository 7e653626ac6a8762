"""What the verbs share: options of one meaning, the console, text that is never taken for markup."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from nextn.model import Model

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
CacheDir = Annotated[Path | None, typer.Option(help="The hub's cache; left out: the usual place.")]
Offline = Annotated[bool, typer.Option("--offline", help="Read a hub id from the cache alone.")]
MaxTokens = Annotated[int, typer.Option(help="New tokens per text at most.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, or auto for as stored.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompts through the chat template.")]
PathName = Annotated[str, typer.Option("--path", help="auto; fast: the native runtime or an error; plain: torch.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def console(*, stderr: bool = False, width: int | None = None) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, width=width)


def plain(text: str, style: str | None = None) -> "Text":
    from rich.text import Text

    return Text(text, style=style or "")


def load_model(model: str, dtype: str, *, need_head: bool) -> "Model":
    """dtype: `float32`, `bfloat16`, or `auto` for as stored."""
    import torch

    from nextn.model import Model

    dtypes = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise ConfigError(f"dtype {dtype!r}; expected one of {', '.join(dtypes)}")
    return Model.load(model, dtype=dtypes[dtype], need_head=need_head)
