"""Commands that look something up: `nextn families`, the pages of `nextn docs`, and the machine, with `nextn env`."""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nextn.cli.common import AsJson
from nextn.cli.screen import console, echo, plain, print_json, print_lines
from nextn.errors import ConfigError
from nextn.text_format import some

if TYPE_CHECKING:
    from rich.table import Table

    from nextn.family_table import Family

_PACKAGE = Path(__file__).parents[1]
_FIRST = ("index", "tutorials/first-hour")


def families(
    search: Annotated[
        list[str] | None, Argument(help="Words of a model's name or model_type, such as GLM 5.3. Default: all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the published models whose MTP heads are known: layout, what works, and the engines that run them."""
    from nextn.family_table.search import families as search_families

    known = search_families(" ".join(search or []))
    if as_json:
        print_json(known.to_dict())
        return
    if known.families:
        console().print(_table(known.families))
    for each in known.withheld:
        types = f" ({', '.join(each.model_types)})" if each.model_types else ""
        print_lines(f"{each.title}{types}: {each.sentence}")


def _table(found: "Sequence[Family]") -> "Table":
    from rich.table import Table

    from nextn.audit_rules.findings import engines
    from nextn.family_table.search import works

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("family", "models", "layout", "works", "engines that run it"):
        table.add_column(title, overflow="fold")
    for row in found:
        names = "; ".join([row.title, *([", ".join(row.models)] if row.models else [])])
        table.add_row(*map(plain, (row.name, names, row.names["block"], works(row), engines(row.runners))))
    return table


def docs(
    topic: Annotated[
        str | None, Argument(help="Name of a page, such as reference/measure, or its last part; none: list all.")
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
    requested = topic.removesuffix(".md").removeprefix("docs/").strip("/")
    if requested in names:
        return requested
    same = [name for name in names if name.endswith(f"/{requested}")]
    if len(same) == 1:
        return same[0]
    close = same or get_close_matches(requested, [*names, *(name.split("/")[-1] for name in names)])
    hint = f"did you mean {some(close)}?" if close else "`nextn docs` lists all pages"
    raise ConfigError(f"no page {topic!r}: {hint}")


def env(as_json: AsJson = False) -> None:
    """Report versions, processor, memory, GPUs and the decoding backend, for a bug report."""
    from nextn.environment import report

    sections = report()
    if as_json:
        echo(json.dumps(sections))
        return
    for name, value in sections.items():
        for key, cell in _rows(name, value):
            echo(f"{key:<28} {cell}")


def _rows(name: str, value: object) -> list[tuple[str, str]]:
    """One line per leaf of a section, under its dotted name."""
    if isinstance(value, dict):
        return [row for key, inner in value.items() for row in _rows(f"{name}.{key}", inner)]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [row for index, item in enumerate(value) for row in _rows(f"{name}.{index}", item)]
    if isinstance(value, list):
        return [(name, ", ".join(map(str, value)) or "none")]
    if value is None:
        return [(name, "not found")]
    if name.endswith("_bytes") and isinstance(value, int):
        return [(name.removesuffix("_bytes"), f"{value / 2**30:.1f} GiB")]
    return [(name, str(value))]
