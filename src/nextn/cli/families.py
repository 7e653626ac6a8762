"""`nextn families`: published models whose heads nextn knows, what it does with each, and which engines run them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson
from nextn.cli.screen import console, plain, print_json, print_lines

if TYPE_CHECKING:
    from rich.table import Table

    from nextn.family_table import Family


def families(
    search: Annotated[
        list[str] | None, typer.Argument(help="Words of a model's name or model_type, such as GLM 5.3. Default: all.")
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
        print_lines(f"{each.title} ({', '.join(each.model_types)}): {each.sentence}")


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
