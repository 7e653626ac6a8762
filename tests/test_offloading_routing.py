"""Distinct experts of blocks: hand-made choices, and every family's, streamed and loaded."""

import pytest
import torch
from quick import families
from tiny import CONFIGS, build, prompt

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.errors import ConfigError
from nextn.evaluate.given_texts import whole_text_outputs
from nextn.evaluate.offloading import ExpertRouting, StoredWeights, sum_distinct
from nextn.evaluate.teacher_forced import ReferenceText
from nextn.model import layer_loader, stored_experts
from nextn.model.model import Model

TEXTS = [
    ReferenceText(tuple(prompt(3, seed=1)), tuple(prompt(9, seed=2))),
    ReferenceText(tuple(prompt(6, seed=3)), tuple(prompt(4, seed=4)), 1.0),
    ReferenceText(tuple(prompt(3, seed=1)), tuple(prompt(9, seed=2)), 1.0),  # the first one's tokens
]


def test_distinct_experts_of_blocks():
    """Unions of consecutive rows; expert 4 of 4 computes nothing, and a token may name one twice."""
    chosen = torch.tensor([[0, 1], [1, 0], [2, 2], [3, 4]])
    # m = 1: 2 + 2 + 1 + 1; m = 2: {0,1}, {0,1,2}, {2,3}; m = 3: {0,1,2}, {0,1,2,3}; m = 4: all; m = 5: no block.
    assert sum_distinct(chosen, 4, 5) == [6, 7, 7, 4, 0]


def brute_force(routing, chosen, index, temperature):
    """Means over all blocks of texts of this temperature, from the choices of each text run alone."""
    means = []
    for size in range(1, routing.max_positions + 1):
        blocks = [
            len({expert for row in rows[start : start + size] for expert in row if expert < routing.num_experts[index]})
            for text, rows in zip(routing.texts, chosen, strict=True)
            if text.temperature == temperature
            for start in range(len(rows) - size + 1)
        ]
        means += [sum(blocks) / len(blocks)] if blocks else []
    return means


MOE = [name for name, config in CONFIGS.items() if "num_experts_per_tok" in config]


@pytest.mark.parametrize("name", families([name for name in CONFIGS if name in MOE], {"deepseek_v4", "glm4_moe"}))
def test_counts_of_every_family(name, tmp_path, monkeypatch):
    """Against each text's choices when it runs alone; loaded and streamed, with experts a few at a time, agree."""
    monkeypatch.setattr(layer_loader, "_EXPERTS_AT_ONCE", 3)
    monkeypatch.setattr(stored_experts, "_MAX_BYTES", 0)
    build(name).save(tmp_path / "model")
    inventory = Inventory.of(Checkpoint.open(tmp_path / "model"))
    weights = StoredWeights.of(inventory, inventory)
    loaded, streamed = Model.load(tmp_path / "model").trunk, Model.load(tmp_path / "model", stream=True).trunk
    routing = ExpertRouting({index: each.num_experts for index, each in weights.experts.items()}, 5)
    with routing.watch(loaded, TEXTS):
        whole_text_outputs(loaded, TEXTS)
    chosen: dict[int, list] = {index: [] for index in routing.num_experts}
    for text in TEXTS:
        for index in chosen:
            part = next(p for n, p in loaded.decoder.layers[index].named_modules() if n.endswith("experts"))
            new = slice(len(text.prompt), None)
            hook = part.register_forward_pre_hook(lambda _, a, i=index, s=new: chosen[i].append(a[1][s].tolist()))
            with torch.inference_mode():
                loaded(torch.tensor([text.tokens]))
            hook.remove()
    by_temperature = {t: routing.distinct(t) for t in (0.0, 1.0)}
    for temperature, layers in by_temperature.items():
        assert {i: brute_force(routing, chosen[i], i, temperature) for i in layers} == layers
    assert all(1 <= row[0] <= row[-1] <= 4 and len(row) == 5 for row in by_temperature[0.0].values())
    observed = {}
    with routing.watch(streamed, TEXTS):
        options = {"on_layer": lambda layer: observed.update({layer.index: layer.observed}), "observe": routing.counts}
        whole_text_outputs(streamed, TEXTS, **options)
    assert {t: routing.distinct(t) for t in (0.0, 1.0)} == by_temperature
    assert {index for index, counts in observed.items() if counts} == set(routing.num_experts)


def test_dense_model_has_no_experts(tmp_path):
    build("qwen3_5").save(tmp_path / "model")
    inventory = Inventory.of(Checkpoint.open(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"qwen3_5\) is dense: it has no routed experts to keep outside of memory"):
        StoredWeights.of(inventory, inventory)


def test_layer_without_a_module_of_experts():
    trunk = build("qwen3_5").trunk
    with pytest.raises(ConfigError, match="layer 1 has 0 modules of routed experts"):
        ExpertRouting({1: 4}, 2).watch(trunk, TEXTS).__enter__()
