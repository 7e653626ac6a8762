"""What the scripts that write pages share: marked parts of a page, tables, and `--check`."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def write(pages: Mapping[Path, str]) -> None:
    """Write the pages; with `--check` on the command line, exit with 1 and the names of those that would change."""
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(f"{path.relative_to(ROOT)} is stale: run `make docs`" for path in stale) or 0)
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[path])


def replace_part(text: str, name: str, part: str) -> str:
    """Return the page with the text between `<!-- name -->` and `<!-- / -->` replaced."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- / -->)", re.DOTALL)
    changed, count = pattern.subn(lambda found: f"{found[1]}{part.rstrip()}\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"{count} parts with the name {name!r}; expected one")
    return changed


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
