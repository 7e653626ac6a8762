"""`nextn families`: published models whose heads nextn knows, what it does with each, and which engines run them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson
from nextn.cli.screen import plain, print_json, print_lines, print_unwrapped
from nextn.errors import FamilyError

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
        print_lines(f"{each.title} ({', '.join(each.model_types)}): {each.sentence}")


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
