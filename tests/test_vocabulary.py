"""The words of the code: class names are unique, and identifiers are those of the field."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

import nextn

PACKAGE = Path(nextn.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Words that this code used for things that have a name in the field.
_PRIVATE = """
column eat eaten eats fed feeds filling foresee foreseen foretell foretold gain gains graft handed hang hangs imprint
judge judged judges kept law laws lend lends looping loops mend mends pick picks planted promised readout recycled
relayout said says settle settles shortlist slab slabs stand standing stands stood strangers tell telling tells told
tuned undecided untold verdict verdicts
"""
# Identifiers with one of them in another sense: columns of tables and data sets, what a score gains, files and keys
# that are retained, a tensor that stands in for another, methods of libraries, keys of files.
_ORDINARY = """
_KEPT _MIN_GAIN _NUM_KEPT _kept _says_something add_column column control_gains gain gains kept prompt_column stand_in
stand_ins tell
"""
PRIVATE, ORDINARY = frozenset(_PRIVATE.split()), frozenset(_ORDINARY.split())
# Test files that follow the words of the code, too, without exceptions.
TESTS = [
    Path(__file__).with_name(f"test_{name}.py")
    for name in (
        "canary_check", "conformance", "evaluation", "layers", "stats", "teacher_forced", "verify", "verify_checks",
        "vocabulary",
    )
]  # fmt: skip


@pytest.mark.more
def test_public_class_names_are_unique():
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.more
def test_identifiers_are_terms_of_the_field():
    found = []
    for path in [*FILES, *TESTS]:
        text = path.read_text()
        if not any(PRIVATE & set(word.split("_")) for word in set(re.findall(r"\w+", text.lower()))):
            continue  # to tokenize takes longer
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_name = token.type == tokenize.NAME and (path in TESTS or token.string not in ORDINARY)
            if is_name and PRIVATE & set(token.string.lower().strip("_").split("_")):
                found.append(f"{path}:{token.start[0]}: {token.string}")
    assert found == []


@pytest.mark.more
def test_exceptions_are_used():
    """An exception that no file needs any more would let the word come back."""
    unused = set(ORDINARY)
    for path in FILES:
        text = path.read_text()
        if any(word in text for word in unused):
            unused -= {
                token.string
                for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.NAME
            }
    assert unused == set()
