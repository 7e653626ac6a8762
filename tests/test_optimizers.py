"""Optimizers: which parameter gets which, learning rates, state; Muon in float32."""

import pytest
import torch
from tiny import build

from nextn import devices
from nextn.devices import half_precision_pays
from nextn.errors import CheckpointError
from nextn.train.config import TrainConfig
from nextn.train.optimizers import (
    Muon32,
    build_optimizers,
    load_state_tensors,
    orthogonalize,
    set_learning_rates,
    state_tensors,
)


def named(model):
    return {f"head.{name}": value for name, value in model.head.named_parameters()}


def config(**values):
    return TrainConfig(**({"steps": 4, "length": 8, "depths": 1} | values))


def step(each, parameters):
    for value in parameters.values():
        value.grad = torch.ones_like(value) if value.requires_grad else None
    for optimizer in each:
        optimizer.step()


def test_norm_weights_are_not_decayed_and_inner_matrices_go_to_muon():
    parameters = named(build("glm4_moe"))
    names = {id(value): name for name, value in parameters.items()}
    adamw, muon = build_optimizers(parameters, config(optimizer="muon"))
    decay = {names[id(value)]: group["weight_decay"] for group in adamw.param_groups for value in group["params"]}
    inner = {names[id(value)] for group in muon.param_groups for value in group["params"]}
    assert decay["head.stack.0.token_norm.weight"] == 0
    assert decay["head.stack.0.block.mlp.gate.weight"] == 0.1  # a router's matrix
    assert "head.stack.0.projection.weight" in inner
    assert decay.keys() | inner == {name for name, value in parameters.items() if value.requires_grad}
    assert not decay.keys() & inner


@pytest.mark.parametrize(("family", "name"), [("step3p5", "output"), ("dots3_note", "embedding")])
def test_embeddings_and_lm_heads_of_a_head_do_not_go_to_muon(family, name):
    parameters = named(build(family))
    adamw, muon = build_optimizers(parameters, config(optimizer="muon"))
    own = id(parameters[f"head.stack.0.{name}.weight"])
    assert own in {id(value) for group in adamw.param_groups for value in group["params"]}
    assert own not in {id(value) for group in muon.param_groups for value in group["params"]}


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        ("trunk.model.embeddings.weight", False), ("trunk.model.layers.3.mlp.router.classifier.weight", False),
        ("trunk.model.layers.3.mlp.gate_proj.weight", True), ("head.stack.1.hidden_projection.weight", True),
        ("head.stack.1.output.weight", False), ("trunk.model.layers.3.self_attn.output.weight", True),
    ],
)  # fmt: skip
def test_matrices_for_muon(name, is_hidden):
    *_, muon = build_optimizers({name: torch.nn.Parameter(torch.zeros(2, 2))}, config(optimizer="muon"))
    assert isinstance(muon, torch.optim.Muon) is is_hidden


def test_parameters_without_gradient_have_no_optimizer():
    parameters = named(build("glm4_moe"))
    parameters["head.stack.0.projection.weight"].requires_grad_(False)
    each = build_optimizers(parameters, config())
    stepped = {id(value) for optimizer in each for group in optimizer.param_groups for value in group["params"]}
    assert id(parameters["head.stack.0.projection.weight"]) not in stepped


def test_rates_are_scaled_from_the_first_ones():
    each = build_optimizers(named(build("glm4_moe")), config(optimizer="muon", lr=1e-3, matrix_lr=0.02))
    set_learning_rates(each, 0.5)
    set_learning_rates(each, 0.5)
    assert [group["lr"] for optimizer in each for group in optimizer.param_groups] == [5e-4, 5e-4, 0.01]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_goes_through_tensors(kind):
    """A second set of optimizers with the first one's tensors makes the same next step."""
    models = [build("glm4_moe"), build("glm4_moe")]
    first, second = (build_optimizers(named(model), config(optimizer=kind)) for model in models)
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
    each = build_optimizers(parameters, config())
    step(each, parameters)
    tensors = state_tensors(each, parameters)
    del tensors["head.stack.0.projection.weight.exp_avg_sq"]
    with pytest.raises(CheckpointError, match=r"1 optimizer tensors .*projection\.weight\.exp_avg_sq"):
        load_state_tensors(each, parameters, tensors)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_singular_values_come_near_one(shape):
    """Catches a matrix whose directions keep the sizes that they had, and one that is turned."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonalize(matrix)
    assert made.shape == matrix.shape
    sizes = torch.linalg.svdvals(made)
    assert sizes.min() > 0.5
    assert sizes.max() < 1.5
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(made.flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_zeros_stay_zeros():
    assert torch.equal(orthogonalize(torch.zeros(3, 5)), torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_its_steps_are_those_of_torch(shape):
    """Momentum to the last bit; parameters as far as bfloat16 tells."""
    draws = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(shape, generator=draws), torch.randn(5, *shape, generator=draws)
    options = {"lr": 0.03, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    left = torch.nn.Parameter(torch.ones(2, 2))  # has no gradient
    ends, moments = [], []
    for kind in (torch.optim.Muon, Muon32):
        value = torch.nn.Parameter(start.clone())
        optimizer = kind([value, left], **options)
        for gradient in gradients:
            value.grad = gradient.clone()
            optimizer.step()
        ends.append(value.detach())
        moments.append(optimizer.state[value]["momentum_buffer"])
    assert torch.equal(*moments)
    moved = (ends[0] - start).norm()
    assert (ends[0] - ends[1]).norm() < 0.03 * moved
    assert torch.equal(left, torch.ones(2, 2))


@pytest.mark.parametrize(("pays", "kind", "dtype"), [(True, "Muon", "bfloat16"), (False, "Muon32", "float32")])
def test_what_the_machine_multiplies_fast(monkeypatch, pays, kind, dtype):
    """Catches bfloat16 on processors that convert around each product, where training takes ten times as long."""
    for module in ("devices", "train.optimizers"):
        monkeypatch.setattr(f"nextn.{module}.half_precision_pays", lambda device="": pays)
    config = TrainConfig(steps=1, optimizer="muon")
    assert config.dtype == dtype
    made = build_optimizers({"layers.0.weight": torch.nn.Parameter(torch.zeros(4, 4))}, config)
    assert type(made[-1]).__name__ == kind
    assert TrainConfig(steps=1, dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(("seconds", "pays"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
def test_bfloat16_pays_where_it_multiplies_faster(monkeypatch, seconds, pays):
    """Catches a rule by names: of two processors with the same instructions, one may take longer in bfloat16."""
    times = dict(zip((torch.bfloat16, torch.float32), seconds, strict=True))
    monkeypatch.setattr(devices, "matmul_seconds", lambda dtype: times[dtype])
    devices._is_bfloat16_faster.cache_clear()
    try:
        assert half_precision_pays("cpu") == (pays and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    finally:
        devices._is_bfloat16_faster.cache_clear()
    monkeypatch.undo()
    assert devices.matmul_seconds(torch.bfloat16, size=8, repeats=1) > 0
