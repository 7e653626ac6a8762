"""Fuzz restore, convert and extract: a mutated checkpoint leads to a result or to a NextnError.

NEXTN_ATTACKS: number of mutants; each goes through every command. A failure leaves the folders byte for byte unchanged.
"""

import json
import os
import random
from pathlib import Path

import pytest
from artifacts import publish
from test_audit_fuzz import FAMILIES, mutated, serial
from test_restore import lost, no_waiting_for_disks, snapshot

import nextn
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.errors import CheckpointError, ConfigError, FamilyError

_ = serial, no_waiting_for_disks  # fixtures
MUTANTS = int(os.environ.get("NEXTN_ATTACKS", "60"))
FORMS = (None, "shards", "side-file", "single-file")
TOKENIZER = '{"model": {"vocab": {"a": 1, "b": 2}}, "added_tokens": [{"id": 3}]}'


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> list[dict[str, Path]]:
    """Of each family: a whole checkpoint of two shards, also in fp8 where there is one, and one that lost its head."""
    found = []
    for name in FAMILIES:
        for fp8 in (False, name in ("deepseek_v3", "qwen3_5")):
            root = tmp_path_factory.mktemp(name)
            folders = {
                "whole": publish(root / "whole", name, shards=2, fp8=fp8),
                "lost": lost(root / "lost", name, shards=2, fp8=fp8),
            }
            for folder in folders.values():
                (folder / "tokenizer.json").write_text(TOKENIZER)
            found.append(folders)
    return found


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def attempts(rng: random.Random, folders: dict[str, Path], root: Path):
    """(verb, what it reads, what it may make, call), each over a mutant of its own folder."""
    whole, lost = (snapshot(folders[name]) for name in ("whole", "lost"))
    target = write(root / "target", mutated(rng, lost))
    yield "restore into", target, None, lambda: nextn.restore(target, folders["whole"], force=rng.random() < 0.3)
    base, good = write(root / "base", mutated(rng, whole)), write(root / "good", lost)
    yield "restore from", good, None, lambda: nextn.restore(good, base, force=rng.random() < 0.3)
    source = write(root / "source", mutated(rng, rng.choice((whole, lost))))
    out, form = root / "out", rng.choice(FORMS)
    norm_weight = rng.choice((None, None, "add-1", "subtract-1"))
    yield "convert", source, out, lambda: nextn.convert(source, out, form=form, norm_weight=norm_weight)
    head = root / "head" / "head.safetensors"
    yield "extract", base, head, lambda: nextn.extract(base, head)


def run(call):
    try:
        return call()
    except (CheckpointError, ConfigError, FamilyError) as error:
        return error


def one_case(number: int, folders: dict[str, Path], root: Path) -> list[str]:
    outcomes = []
    for verb, read, out, call in attempts(random.Random(number), folders, root):
        place, before = f"case {number}: {verb}", snapshot(root)
        try:
            result = run(call)
        except BaseException as error:
            raise AssertionError(place) from error
        if isinstance(result, Exception):
            assert snapshot(root) == before, place
            assert len(str(result)) < 3000, place
            str(result).encode()
        else:
            json.dumps(result.as_record(), ensure_ascii=False).encode()
            "\n".join((*result.changes, *result.notes)).encode()
            Checkpoint.open(out or read)
        assert not list(root.rglob(".*")), place
        outcomes.append(f"{verb}: {'error' if isinstance(result, Exception) else 'done'}")
    return outcomes


@pytest.mark.more
def test_unrecognized_tensors(originals, tmp_path):
    """A traceback, or a folder that is changed by what failed; the case's number is its seed."""
    outcomes: dict[str, int] = {}
    for number in range(MUTANTS):
        root = tmp_path / str(number)
        for outcome in one_case(number, random.Random(number).choice(originals), root):
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert len(outcomes) == 8, outcomes  # each way out is taken
    print(outcomes)
