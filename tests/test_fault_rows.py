"""Faults as data: each can be planted on some trained head, costs what it says, and leaves the model alone."""

import re
from dataclasses import replace

import pytest
import torch
from tiny import refrain
from torch import nn

from nextn.benchmarking.workload import Prompt
from nextn.drafting import Contract
from nextn.measuring.faults import FAULTS, _rounded, planted, under
from nextn.measuring.measure import Plan, reference
from nextn.measuring.variants import read_as

PROMPTS = [Prompt(tuple(row.tolist()), "x") for row in refrain(12, 33, seed=10**6)]
PLAN = Plan(drafts=3, max_tokens=20, path="plain")
# fault -> the fixture that shows it, and the least AL that it costs there, at temperature 1.
COSTS = {
    "head-unset": ("glm", 2.5),
    "gain-less": ("qwen", 2.5),
    "halves-swapped": ("glm", 2.5),
    "wrong-hidden": ("glm", 0.5),
    "recycled-wrong": ("glm", 0.1),
    "no-prefill": ("glm", 0.5),
    "pair-shifted": ("glm", 2.5),
    "one-module": ("glm_two", 0.3),
    "modules-permuted": ("glm_two", 0.3),
    "position0": ("glm", 0.1),
    "exact-match": ("glm_two", 0.05),
    "argmax-drafts": ("glm_two", 0.02),
}


@pytest.fixture(scope="module")
def measured(trained):
    plan = replace(PLAN, temperatures=(1.0,))
    return {name: reference(trained[name], PROMPTS, plan) for name in ("glm", "glm_two", "qwen")}


@pytest.mark.parametrize("name", COSTS)
def test_a_fault_costs_acceptance(name, trained, measured):
    """Against the right reading; the rows of rules against the usual rule."""
    fault = next(each for each in FAULTS if each.name == name)
    fixture, margin = COSTS[name]
    before = {key: value.clone() for key, value in trained[fixture].head.state_dict().items()}
    wrong = under(measured[fixture], trained[fixture], fault)
    right = measured[fixture].figures(1.0)
    assert wrong.figures(1.0, rule=fault.rule or "ratio").length.value < right.length.value - margin
    assert all(torch.equal(value, before[key]) for key, value in trained[fixture].head.state_dict().items())


def test_all_others_can_be_planted_too(trained, measured):
    """Gains that are large already, four bits, decoded again; none for an output head that this head has not."""
    for fault in FAULTS:
        if fault.name not in COSTS:
            found = under(measured["glm"], trained["glm"], fault)
            assert (found is None) == (fault.name == "own-output-lost")
            assert found is None or 1 <= found.figures(1.0).length.value <= 4


def test_columns_not_run_again_with_several_modules(trained, measured):
    """The last rounds of a text draft fewer tokens than there are modules: those that did not run keep nothing."""
    fault = next(each for each in FAULTS if each.name == "no-rerun")
    wrong = under(measured["glm_two"], trained["glm_two"], fault)
    assert 1 < wrong.figures(1.0).length.value < measured["glm_two"].figures(1.0).length.value + 0.2


def parameters(model, fault):
    """Of the head as it is, and under a fault of its weights."""
    found = next(each for each in FAULTS if each.name == fault)
    wrong, _ = read_as(model, Contract(), [planted(found, model)])
    return [dict(each.head.named_parameters()) for each in (model, wrong)]


@pytest.mark.parametrize(("fault", "most"), [("head-quantised", 7), ("head-2-bit", 1)])
def test_rounded_rows(fault, most, trained):
    """Whole steps of a scale a row, whose largest value stays; vectors, such as gains, are left alone."""
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
    _rounded(4, zeros)
    assert zeros.weight.abs().max() == 0


def test_a_head_that_was_not_loaded(trained):
    """Initial values: gains of one, small matrices, the same every time."""
    right, wrong = parameters(trained["glm"], "head-unset")
    for name, value in wrong.items():
        assert value.shape == right[name].shape
        assert (value == 1).all() if value.ndim == 1 else 0.01 < value.std() < 0.03
    again = parameters(trained["glm"], "head-unset")[1]
    assert all(torch.equal(value, again[name]) for name, value in wrong.items())


def test_a_fault_of_decoding_is_decoded(trained, measured):
    fault = next(each for each in FAULTS if each.name == "no-rerun")
    assert not under(measured["glm"], trained["glm"], fault).contract.rerun


def test_rows_are_whole(trained):
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    for fault in FAULTS:
        assert sum(map(bool, (fault.keys, fault.variant, fault.contract, fault.rule))) == 1
        assert fault.does
        assert fault.signature
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", issue) for issue in fault.issues)
        if fault.keys:
            assert fault.name == "own-output-lost" or any(planted(fault, trained[each]) for each in ("glm", "glm_two"))
