"""Planted faults: acceptance of a trained head must fall by a stated margin, while the output stays right.

That the output stays right is the reason these tests exist: no test of equality can see any of these faults.
"""

import copy
from dataclasses import replace

import pytest
import torch
from quick import others_slow
from tiny import decode, refrain

from nextn.settings import Contract
from nextn.stats.acceptance import Acceptance

PROMPTS = [row.tolist() for row in refrain(32, 33, seed=10**6)]


def figures(model, **settings):
    texts, log = decode(model, PROMPTS, num_speculative_tokens=4, max_tokens=28, **settings)
    return texts, Acceptance.of(log)


def other_facts(model, **facts):
    """The same weights under another row of facts."""
    trunk, head = copy.copy(model.trunk), copy.deepcopy(model.head)
    trunk._modules = model.trunk._modules
    family = replace(model.family, **facts)
    trunk.stage, head.family, head._trunk = family.hidden, family, (trunk,)
    for module in head.stack:
        module.family = family
    return replace(model, trunk=trunk, head=head, family=family)


def other_weights(model, change):
    """A copy whose head was changed in place by `change(head)`."""
    head = copy.deepcopy(model.head)
    head._trunk = model.head._trunk
    with torch.no_grad():
        change(head)
    return replace(model, head=head)


def shift_norm_weights(head):
    # A zero-centered norm weight read as it is, or a plain one read as 1 + w: the effective gain is off by one.
    for name, value in head.named_parameters():
        if "norm" in name:
            value.add_(-1.0 if head.family.norm_weight == "1+w" else 1.0)


def first_twice(head):
    head.stack[1].load_state_dict(head.stack[0].state_dict())


# fault: (fixture, what to plant, AL it must cost). The margins are about half of what was measured.
FAULTS = {
    "prefill-skipped": ("glm", lambda model: (model, {"contract": Contract(prefill=False)}), 1.2),
    "pairs-shifted": ("glm", lambda model: (model, {"contract": Contract(offset=-1)}), 1.7),
    "not-refreshed": ("glm_one", lambda model: (model, {"contract": Contract(refresh=False)}), 0.05),
    "pre-norm-hidden": ("glm", lambda model: (other_facts(model, hidden="pre"), {}), 0.8),
    "inputs-swapped": ("glm", lambda model: (other_facts(model, concat="hidden_first"), {}), 1.7),
    "wrong-next-hidden": ("glm", lambda model: (other_facts(model, next_hidden="pre"), {}), 0.06),
    "norm-1+w-read-as-w": ("qwen", lambda model: (other_weights(model, shift_norm_weights), {}), 1.7),
    "second-loaded-as-first": ("glm_two", lambda model: (other_weights(model, first_twice), {}), 0.7),
}


# Faults of the contract and of inputs cost acceptance in test_fault_rows.py, too.
@pytest.mark.parametrize("fault", others_slow(FAULTS, "not-refreshed", "norm-1+w-read-as-w", "second-loaded-as-first"))
def test_fault_costs_acceptance_and_nothing_else(fault, trained):
    name, plant, margin = FAULTS[fault]
    texts, right = figures(trained[name])
    faulty, settings = plant(trained[name])
    same, wrong = figures(faulty, **settings)
    assert same == texts
    assert wrong.length < right.length - margin, f"{fault}: AL {wrong.length:.2f}, was {right.length:.2f}"


@pytest.mark.parametrize("name", ["glm", "glm_one", "glm_two", "qwen"])
def test_fixtures_are_worth_faulting(name, trained):
    """A fixture with poor acceptance could hide a fault; its text must be the refrain, not a loop of one token."""
    texts, right = figures(trained[name])
    plain, _ = decode(trained[name], PROMPTS, num_speculative_tokens=0, max_tokens=28)
    assert texts == plain
    assert right.length > 1.5
    assert all(len(set(text)) > 3 for text in texts)
