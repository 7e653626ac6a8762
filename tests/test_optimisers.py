"""Which optimiser and weight decay each parameter has, and that their state survives a file."""

import pytest
import torch
from tiny import build

from nextn.errors import CheckpointError
from nextn.training.optimisers import load_state_tensors, optimisers, set_rates, state_tensors
from nextn.training.train_config import TrainConfig


def named(model):
    return {f"head.{name}": value for name, value in model.head.named_parameters()}


def config(**values):
    return TrainConfig(**({"steps": 4, "length": 8, "depths": 1} | values))


def step(each, parameters):
    for value in parameters.values():
        value.grad = torch.ones_like(value) if value.requires_grad else None
    for optimiser in each:
        optimiser.step()


def test_gains_are_not_decayed_and_inner_matrices_go_to_muon():
    parameters = named(build("glm4_moe"))
    names = {id(value): name for name, value in parameters.items()}
    adamw, muon = optimisers(parameters, config(optimizer="muon"))
    decay = {names[id(value)]: group["weight_decay"] for group in adamw.param_groups for value in group["params"]}
    inner = {names[id(value)] for group in muon.param_groups for value in group["params"]}
    assert decay["head.stack.0.token_norm.weight"] == 0
    assert decay["head.stack.0.block.mlp.gate.weight"] == 0.1  # a router's matrix
    assert "head.stack.0.projection.weight" in inner
    assert decay.keys() | inner == {name for name, value in parameters.items() if value.requires_grad}
    assert not decay.keys() & inner


def test_parameters_without_gradient_have_no_optimiser():
    parameters = named(build("glm4_moe"))
    parameters["head.stack.0.projection.weight"].requires_grad_(False)
    each = optimisers(parameters, config())
    stepped = {id(value) for optimiser in each for group in optimiser.param_groups for value in group["params"]}
    assert id(parameters["head.stack.0.projection.weight"]) not in stepped


def test_rates_are_scaled_from_the_first_ones():
    each = optimisers(named(build("glm4_moe")), config(optimizer="muon", lr=1e-3, matrix_lr=0.02))
    set_rates(each, 0.5)
    set_rates(each, 0.5)
    assert [group["lr"] for optimiser in each for group in optimiser.param_groups] == [5e-4, 5e-4, 0.01]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_goes_through_tensors(kind):
    """A second set of optimisers with the first one's tensors makes the same next step."""
    models = [build("glm4_moe"), build("glm4_moe")]
    first, second = (optimisers(named(model), config(optimizer=kind)) for model in models)
    step(first, named(models[0]))
    models[1].head.load_state_dict(models[0].head.state_dict())
    tensors = {name: value.clone() for name, value in state_tensors(first, named(models[0])).items()}
    load_state_tensors(second, named(models[1]), tensors)
    for each, model in zip((first, second), models, strict=True):
        step(each, named(model))
    assert all(
        torch.equal(one, two) for one, two in zip(models[0].head.parameters(), models[1].head.parameters(), strict=True)
    )


def test_what_is_missing_is_named():
    parameters = named(build("glm4_moe"))
    each = optimisers(parameters, config())
    step(each, parameters)
    tensors = state_tensors(each, parameters)
    del tensors["head.stack.0.projection.weight.exp_avg_sq"]
    with pytest.raises(CheckpointError, match=r"1 optimiser tensors .*projection\.weight\.exp_avg_sq"):
        load_state_tensors(each, parameters, tensors)
