"""Random operations on any family's checkpoint: audit says what was done, fixes bring back bytes, verbs agree.

NEXTN_OPERATIONS=2000 runs that many; the seed of a failure is in its name's place in the message.
"""

import os
import re
import shutil

import pytest
from artifacts import LAYOUTS, publish
from operations import SOUND, head_names, read, run
from support_record import record
from test_restore import no_waiting_for_disks

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.edit.reindex import reindex
from nextn.errors import NextnError

_ = no_waiting_for_disks  # a fixture
FAMILIES = sorted(LAYOUTS)
FAILED = (28, 98, 219, 282, 694, 956)
FEW, MANY = 24, int(os.environ.get("NEXTN_OPERATIONS", "400"))


def check(seed: int, folder) -> None:
    """One run: two copies, of which one is changed."""
    name = FAMILIES[seed % len(FAMILIES)]
    whole, changed = publish(folder / "whole", name), folder / "changed"
    shutil.copytree(whole, changed)
    before = read(whole)
    done, expected = run(changed, seed)
    said = f"seed {seed}, {name}: {', '.join(done)}"
    found = {each.rule for each in audit(Checkpoint.open(changed)).findings if each.severity != "note"}
    allowed = frozenset().union(*expected)
    assert found <= allowed, f"{said}: {found} where {set(allowed)} was done"
    for rules in expected:
        assert rules == SOUND or "" in rules or rules & found, f"{said}: {found}, and nothing of {set(rules)}"
    if found and found <= {"index", "side-file"}:
        reindex(changed)
        for each in audit(Checkpoint.open(changed)).findings:  # a file beside a model without an index
            for name in re.findall(r"^Move (\S+) to another folder", each.fix):
                (changed / name).unlink()
        assert audit(Checkpoint.open(changed)).clean or "experts-form" in allowed, said
    if not found & {"names-foreign", "tied-differs"}:
        force = "head-absent" not in found
        try:
            nextn.restore(changed, whole, force=force)
        except NextnError as error:
            raise AssertionError(f"{said}: restore refuses: {error}") from error
        after, head = read(changed), set(head_names(whole))
        for each in head:
            assert (after[each].dtype, after[each].data) == (before[each].dtype, before[each].data), f"{said}: {each}"
        report = audit(Checkpoint.open(changed))
        assert report.clean, f"{said}: after restore {[each.rule for each in report.findings]}"
        lost = (before.keys() & head) - after.keys()
        assert not lost, f"{said}: lost {lost}"


@pytest.mark.more
def test_some(tmp_path):
    """A few seeds of each kind, and those that failed once."""
    for seed in (*range(FEW), *FAILED):
        check(seed, tmp_path / str(seed))


@pytest.mark.slow
def test_many(tmp_path):
    for seed in range(MANY):
        check(seed, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))
    for place, name in enumerate(FAMILIES):
        record("operations", name, {"runs": len(range(place, MANY, len(FAMILIES))), "first_seed": place})
