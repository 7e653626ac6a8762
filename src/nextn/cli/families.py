"""`nextn families`: published models whose heads nextn knows, what it does with each, and which engines run them; and
`nextn docs`, the pages of the documentation, which come with the package.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson
from nextn.cli.screen import echo, plain, print_json, print_unwrapped
from nextn.errors import ConfigError, FamilyError
from nextn.text_format import some

if TYPE_CHECKING:
    from rich.table import Table

    from nextn.families import Family
_FILES = "audit, restore, convert"


def families(
    search: Annotated[
        list[str] | None, typer.Argument(help="Words of a model's name or model_type, such as GLM 5.3. Default: all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the published models whose MTP heads are known: layout, what works, and the engines that run them."""
    from nextn.families import search as search_families

    words = " ".join(search or [])
    found, without = search_families(words)
    if not found and not without:
        raise FamilyError(
            f"{words}: no known model has this name; `nextn families` lists all, and `nextn audit` of the checkpoint "
            "says what its tensors look like"
        )
    if as_json:
        print_json({"families": [_record(row) for row in found], "withheld": [each.title for each in without]})
        return
    if found:
        print_unwrapped(_table(found))
    for each in without:
        print_unwrapped(plain(f"{each.title} ({', '.join(each.model_types)}): {each.sentence}"))


def _works(row: "Family") -> str:
    if row.trunk_kv:
        return "audit, measure, decode in torch"
    return f"{_FILES}, measure, train, decode" if row.runs else _FILES


def _record(row: "Family") -> dict[str, object]:
    return {
        "name": row.name,
        "title": row.title,
        "models": row.models,
        "model_types": row.model_types,
        "layout": row.names["block"],
        "works": _works(row).split(", "),
        "why_not_run": row.cannot_run,
        "engines": {name: engine.support for name, engine in row.engines.items()},
    }


def _table(found: "Sequence[Family]") -> "Table":
    from rich.table import Table

    from nextn.audit.findings import engines

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("family", "models", "layout", "works", "engines that run it"):
        table.add_column(title, overflow="fold")
    for row in found:
        names = "; ".join([row.title, *([", ".join(row.models)] if row.models else [])])
        table.add_row(*map(plain, (row.name, names, row.names["block"], _works(row), engines(row.runners))))
    return table


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
