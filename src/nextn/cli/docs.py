"""`nextn docs` shows the pages of the documentation, which come with the package."""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from nextn.cli.screen import echo
from nextn.errors import ConfigError
from nextn.text_format import some

_PACKAGE = Path(__file__).parents[1]
_FIRST = ("index", "tutorials/first-hour")


def docs(
    topic: Annotated[
        str | None, typer.Argument(help="Name of a page, such as reference/measure, or its last part; none: list all.")
    ] = None,
) -> None:
    """Show a page of the documentation, or list all pages.

    Examples: `nextn docs`, `nextn docs low-acceptance`, `nextn docs reference/measure | less`.
    """
    pages = _pages()
    if topic is None:
        for name, path in pages.items():
            echo(f"{name:<40}{_title(path)}".rstrip())
    else:
        echo(pages[_matching(topic, list(pages))].read_text(encoding="utf-8").rstrip())


def _pages() -> dict[str, Path]:
    """Return the pages by name, the first ones to read first."""
    folder = _PACKAGE / "pages"  # of a wheel
    if not folder.exists():
        folder = _PACKAGE.parents[1] / "docs"  # of the sources
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.md")}
    if not found:
        raise ConfigError(f"{folder}: no documentation; install nextn again, or read docs/ of its sources")
    return {name: found[name] for name in sorted(found, key=lambda name: (name not in _FIRST, name))}


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "")


def _matching(topic: str, names: list[str]) -> str:
    """Return the page of this name, or with this last part. Raises ConfigError if there is none, or several."""
    wanted = topic.removesuffix(".md").removeprefix("docs/").strip("/")
    if wanted in names:
        return wanted
    same = [name for name in names if name.endswith(f"/{wanted}")]
    if len(same) == 1:
        return same[0]
    close = same or get_close_matches(wanted, [*names, *(name.split("/")[-1] for name in names)])
    hint = f"did you mean {some(close)}?" if close else "`nextn docs` lists all pages"
    raise ConfigError(f"no page {topic!r}: {hint}")
