"""What config.json says of the trunk's layers, against the tensors that are there."""

from artifacts import publish
from quick import loop

import nextn
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory


@loop(
    ("family", "field", "value"),
    [
        ("glm4_moe", "use_qk_norm", False),
        ("glm4_moe", "attention_bias", False),
        ("deepseek_v3", "attention_bias", True),
        ("glm4_moe", "first_k_dense_replace", 2),
        ("glm4_moe_lite", "mlp_layer_types", ["sparse", "sparse"]),
        ("mimo_v2", "moe_layer_freq", [1, 1]),
        ("qwen3_next", "mlp_only_layers", [1]),
        ("qwen3_next", "decoder_sparse_step", 2),
        ("qwen3_5", "layer_types", ["linear_attention"]),
        ("qwen3_5", "attn_output_gate", False),
        ("deepseek_v3", "q_lora_rank", None),
        ("glm4_moe", "n_shared_experts", 0),
        ("glm4_moe", "n_shared_experts", 2),
        ("deepseek_v3", "qk_rope_head_dim", 16),
        ("qwen3_next", "linear_num_key_heads", 7),
        ("glm4_moe", "num_experts_per_tok", 9),
        ("nemotron_h", "hybrid_override_pattern", "M|*/*E"),  # Megatron's: stages, and the head's layers
    ],
)
def test_a_claim_that_no_tensor_supports(family, field, value, tmp_path):
    """Clean although loaders refuse the weights, or one finding for each matrix of one wrong number."""
    found = nextn.audit(publish(tmp_path, family, config={field: value})).findings
    assert [(each.rule, field in each.found) for each in found if each.severity != "note"] == [
        ("config-contradicts", True)
    ]


def test_layers_of_a_pattern_of_megatron(tmp_path):
    config = {"num_hidden_layers": None, "hybrid_override_pattern": "M|*/*E"}
    assert Inventory.of(Checkpoint.open(publish(tmp_path, "nemotron_h", config=config))).num_layers == 2


def test_norms_without_weights(tmp_path):
    """Llama 4 has use_qk_norm, and norms of queries and keys without weights; other types are not known better."""
    config = {"model_type": "llama4_text", "num_mtp_layers": 1, "use_qk_norm": True}
    found = nextn.audit(publish(tmp_path, "mimo", config=config)).findings
    assert "use_qk_norm" not in "".join(each.found for each in found)
