"""The ctypes structures match those of the compiled library."""

import ctypes
import inspect
import re
from types import SimpleNamespace

import pytest

from nextn.errors import ConfigError
from nextn.runtime.native import abi, draft_chain, rounds
from nextn.runtime.native.abi import STRUCTURES, View, check_layouts, load


def library(change=lambda text: text):
    """A library compiled with other structures."""
    text = change(load().library.nextn_layouts().decode())
    return SimpleNamespace(nextn_layouts=text.encode, _name="runtime.so")


def test_the_library_that_is_built_agrees():
    check_layouts(load().library)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("View", "stride 72a", "stride 80a"),
        ("Chain", "temperature 32d", "temperature 32i"),
        ("Batch", "last_tokens 8p", "latest_tokens 8p"),
        ("RoundOutput", "RoundOutput: 64", "RoundOutput: 72"),
        ("Refresh", "starts 24p, states 32p", "states 24p, starts 32p"),
        ("Stages", "Steps: ", "Stages: "),
        ("HeadOutput", ", confidence 24p", ""),
    ],
    ids=["offset", "type", "name", "size", "order", "structure", "field"],
)
def test_one_that_differs_is_refused(name, old, new):
    with pytest.raises(ConfigError, match=rf"structure {name} as \(.*\), this version .* delete runtime.so") as error:
        check_layouts(library(lambda text: text.replace(old, new)))
    assert "\n" not in str(error.value)


def test_a_library_with_other_structures_is_not_loaded(monkeypatch, tmp_path):
    other = library(lambda text: text.replace("View: 120", "View: 128"))
    other.nextn_ready = lambda: 0
    monkeypatch.setattr(abi, "open_library", lambda path: other)
    monkeypatch.setattr(abi, "build_library", lambda *_: tmp_path / "runtime.so")
    with pytest.raises(ConfigError, match="structure View"):
        load.__wrapped__()


def test_all_structures_are_compared():
    """A structure that is not listed would go unchecked."""
    modules = [abi, draft_chain, rounds]
    classes = {each for module in modules for _, each in inspect.getmembers(module, inspect.isclass)}
    assert {each for each in classes if issubclass(each, ctypes.Structure)} == set(STRUCTURES)
    listed = (abi._SOURCES / "layout.cpp").read_text()
    assert set(re.findall(r"layout<(\w+)>", listed)) == {each.__name__.removesuffix("Struct") for each in STRUCTURES}
    sources = [path for path in abi._SOURCES.parent.glob("*.py") if path.name != "abi.py"]
    assert not [path.name for path in sources if "ctypes.Structure" in path.read_text()]


def test_fields_are_where_the_compiler_has_them():
    assert (ctypes.sizeof(View), View.stride.offset) == (120, 72)
