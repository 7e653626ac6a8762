"""The words of the code: class names are unique, and identifiers are those of the field."""

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

import nextn

PACKAGE = Path(nextn.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Words that this code used for things that have a name in the field; CHANGELOG.md lists old and new names.
PRIVATE = frozenset(
    [
        "law",
        "laws",
        "eaten",
        "eats",
        "told",
        "judged",
        "shortlist",
        "strangers",
        "promised",
        "graft",
        "relayout",
        "imprint",
        "foreseen",
        "mend",
        "mends",
        "slab",
        "slabs",
        "recycled",
        "readout",
        "planted",
    ]
)


def test_public_class_names_are_unique():
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_identifiers_are_terms_of_the_field(path):
    names = (
        (token.string, token.start[0])
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.NAME
    )
    found = [f"{name} in line {line}" for name, line in names if PRIVATE & set(name.lower().strip("_").split("_"))]
    assert found == []
