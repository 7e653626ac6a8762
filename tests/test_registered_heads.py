"""The next family that an engine or transformers adds is noticed here, where no row covers it."""

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import registered_heads
from registered_heads import LEFT_OUT, RECORD, VERSIONS, misplaced, of_sglang, of_transformers, of_vllm, uncovered

READERS = {"vllm": of_vllm, "sglang": of_sglang}


def registered(engine):
    """Of the installed engine, or else as recorded from the sources of the version that the rows cite."""
    spec = find_spec(engine) if engine in READERS else None
    if spec is not None and spec.origin:
        return READERS[engine](Path(spec.origin).parent)
    return of_transformers() if engine == "transformers" else json.loads(RECORD.read_text())[engine]["architectures"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", LEFT_OUT)
def test_every_head_is_covered(engine):
    found = registered(engine)
    assert len(found) > 10
    assert uncovered(engine, found) == [], "add a row, or say in LEFT_OUT why there is none"


@pytest.mark.parametrize("engine", VERSIONS)
def test_cited_lines_are_those_of_heads(engine):
    """Of engines that are installed in the version that the rows cite."""
    spec = find_spec(engine)
    if spec is None or version(engine) != VERSIONS[engine]:
        pytest.skip(f"needs {engine} {VERSIONS[engine]}")
    assert misplaced(engine, Path(spec.origin).parent) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", LEFT_OUT)
def test_what_is_left_out_is_registered(engine):
    """A reason that outlives its model hides the next one."""
    assert sorted(LEFT_OUT[engine].keys() - registered(engine).keys()) == []


def test_a_new_family_would_be_noticed(monkeypatch):
    """Without its row, or under a new name, an architecture is listed."""
    record = json.loads(RECORD.read_text())["vllm"]["architectures"]
    assert uncovered("vllm", record | {"NewMTPModel": "new_mtp"}) == ["NewMTPModel"]
    rows = [row for row in registered_heads.rows() if row.name != "step5"]
    monkeypatch.setattr(registered_heads, "rows", lambda: rows)
    assert uncovered("vllm", record) == ["Step5MTP"]
