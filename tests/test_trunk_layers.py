"""trunk_layers: what one layer of the trunk has and no other like it."""

from artifacts import LAYOUTS, publish
from quick import loop
from test_audit import findings

from nextn.checkpoint.safetensors_file import RawTensor

EXTRA = {
    "a matrix": "self_attn.extra_proj.weight", "in a module": "linear_attn.extra.weight", "a module": "adapter.weight",
    "a vector": "steering_vector",
}  # fmt: skip


@loop("part", EXTRA.values(), ids=EXTRA)
def test_a_part_of_one_layer_alone(part, tmp_path):
    """Engines fail at a name that no other layer has; what all layers of a type have is theirs."""
    trunk, layers = LAYOUTS["qwen3_5"].trunk, 8
    config = {"num_hidden_layers": layers, "layer_types": ["linear_attention", "full_attention"] * 4}

    def grown(table, extra):
        for index in range(2, layers):
            for path in trunk[index % 2]:
                table[f"model.layers.{index}.{path}"] = table[f"model.layers.{index % 2}.{path}"]
        at = [index for index in range(layers) if (index % 2 == 1) == part.startswith("self_attn")]
        for index in at[1:2] if extra == "one" else at:
            table[f"model.layers.{index}.{part}"] = RawTensor("BF16", (2, 2), bytes(8))

    found = findings(publish(tmp_path / "one", "qwen3_5", config=config, change=lambda table: grown(table, "one")))
    assert [(each.rule, each.severity) for each in found] == [("names-unknown", "warning")]
    assert part.removesuffix(".weight") in found[0].place
    every = findings(publish(tmp_path / "every", "qwen3_5", config=config, change=lambda table: grown(table, "every")))
    assert "names-unknown" not in {each.rule for each in every}
