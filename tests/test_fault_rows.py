"""Each fault can be injected into some trained head, lowers acceptance, and does not change the model."""

import re
from dataclasses import replace

import pytest
import torch
from tiny import refrain
from torch import nn

from nextn.evaluate import reference
from nextn.evaluate.conventions import apply_variants
from nextn.evaluate.faults import FAULTS, _quantize, expectation, expectations, fault_variant, measure_under_fault
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.settings import Contract

PROMPTS = [Prompt(tuple(row.tolist()), "x") for row in refrain(12, 33, seed=10**6)]
PLAN = ReferencePlan(num_speculative_tokens=3, max_tokens=20, backend="torch")
# fault -> the fixture that shows it, and the least AL that it costs there, at temperature 1.
COSTS = {
    "head-unset": ("glm", 2.5),
    "norm-offset-missing": ("qwen", 2.5),
    "inputs-swapped": ("glm", 2.5),
    "wrong-hidden": ("glm", 0.5),
    "wrong-next-hidden": ("glm", 0.1),
    "no-prefill": ("glm", 0.5),
    "pairs-off-by-one": ("glm", 2.5),
    "one-mtp-layer": ("glm_two", 0.3),
    "mtp-layers-permuted": ("glm_two", 0.3),
    "position0": ("glm", 0.1),
    "exact-match": ("glm_two", 0.05),
    "argmax-drafts": ("glm_two", 0.02),
}
# Of heads with an lm_head of their own, and of those without keys of their own (test_shared_kv_head.py).
OTHER_HEADS = {"own-lm-head-lost", "wrong-keys", "window-lost", "window-everywhere", "query-shifted"}


@pytest.fixture(scope="module")
def measured(trained):
    plan = replace(PLAN, temperatures=(1.0,))
    return {name: reference_acceptance(trained[name], PROMPTS, plan) for name in ("glm", "glm_two", "qwen")}


@pytest.mark.more
@pytest.mark.parametrize("name", COSTS)
def test_a_fault_costs_acceptance(name, trained, measured):
    """Compared with the head without fault; acceptance rules with the usual rule."""
    fault = next(each for each in FAULTS if each.name == name)
    fixture, margin = COSTS[name]
    before = {key: value.clone() for key, value in trained[fixture].head.state_dict().items()}
    wrong = measure_under_fault(measured[fixture], trained[fixture], fault)
    right = measured[fixture].figures(1.0)
    assert wrong.figures(1.0, rule=fault.rule or "ratio").length.value < right.length.value - margin
    assert all(torch.equal(value, before[key]) for key, value in trained[fixture].head.state_dict().items())


@pytest.mark.more
def test_all_others_can_be_injected_too(trained, measured):
    """Large norm weights, four bits, decoded again; none for an lm_head that this head does not have."""
    for fault in FAULTS:
        if fault.name not in COSTS:
            found = measure_under_fault(measured["glm"], trained["glm"], fault)
            assert (found is None) == (fault.name in OTHER_HEADS)
            assert found is None or 1 <= found.figures(1.0).length.value <= 4


@pytest.mark.more
def test_faults_share_the_states_of_the_trunk(trained, measured, monkeypatch):
    """The trunk runs over the texts once for each side of its final norm, and each fault is scored as it is alone."""
    passes, run = [], reference.trunk_outputs
    faults = [each for each in FAULTS if each.name in ("wrong-hidden", "no-prefill", "head-quantized")]
    alone = [measure_under_fault(measured["glm"], trained["glm"], each) for each in faults]
    monkeypatch.setattr(reference, "trunk_outputs", lambda *args: passes.append(1) or run(*args))
    together = expectations(measured["glm"], trained["glm"], faults=faults)[1.0][2:]
    assert len(passes) == 2
    for one, found in zip(alone, together, strict=True):
        assert (expectation(found.name, one, 1.0).counts == found.counts).all()


def test_no_refresh_with_several_layers(trained, measured):
    """The last rounds of a text draft fewer tokens than there are MTP layers: the others have nothing to refresh."""
    fault = next(each for each in FAULTS if each.name == "stale-head-cache")
    wrong = measure_under_fault(measured["glm_two"], trained["glm_two"], fault)
    assert 1 < wrong.figures(1.0).length.value < measured["glm_two"].figures(1.0).length.value + 0.2


def parameters(model, fault):
    """Of the head as it is, and under a fault of its weights."""
    found = next(each for each in FAULTS if each.name == fault)
    wrong, _ = apply_variants(model, Contract(), [fault_variant(found, model)])
    return [dict(each.head.named_parameters()) for each in (model, wrong)]


@pytest.mark.parametrize(("fault", "most"), [("head-quantized", 7), ("head-2-bit", 1)])
def test_rounded_rows(fault, most, trained):
    """Multiples of one scale per row, which keeps the largest value; vectors, such as norm weights, are unchanged."""
    right, wrong = parameters(trained["glm"], fault)
    for name, value in right.items():
        if value.ndim == 1:
            assert torch.equal(wrong[name], value)
            continue
        scale = value.abs().amax(-1, keepdim=True) / most
        torch.testing.assert_close(wrong[name], (value / scale).round() * scale)
        assert not wrong[name].requires_grad
    zeros = nn.Linear(2, 2)
    nn.init.zeros_(zeros.weight)
    _quantize(4, zeros)
    assert zeros.weight.abs().max() == 0


def test_a_head_that_was_not_loaded(trained):
    """Initial values: norm weights of 1, small matrices, the same every time."""
    right, wrong = parameters(trained["glm"], "head-unset")
    for name, value in wrong.items():
        assert value.shape == right[name].shape
        assert (value == 1).all() if value.ndim == 1 else 0.01 < value.std() < 0.03
    again = parameters(trained["glm"], "head-unset")[1]
    assert all(torch.equal(value, again[name]) for name, value in wrong.items())


def test_a_fault_of_decoding_is_decoded(trained, measured):
    fault = next(each for each in FAULTS if each.name == "stale-head-cache")
    assert not measure_under_fault(measured["glm"], trained["glm"], fault).contract.refresh


def test_fault_table(trained):
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    for fault in FAULTS:
        assert sum(map(bool, (fault.variant_keys, fault.variant, fault.contract, fault.rule))) == 1
        assert fault.description
        assert fault.signature
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", issue) for issue in fault.issues)
        if fault.variant_keys:
            assert fault.name in OTHER_HEADS or any(fault_variant(fault, trained[each]) for each in ("glm", "glm_two"))
