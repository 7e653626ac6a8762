"""A head's own state in the layout of the files, and back: nothing is lost, and parts are in their order."""

from types import SimpleNamespace

import torch

from nextn.model.stored_layout import fuse_experts, split_experts, to_runtime_layout, to_stored_layout


def test_experts_round_trip():
    """Fused -> one by one -> fused is the identity, and gate comes before up."""
    state = {
        "0.block.mlp.experts.gate_up_proj": torch.randn(3, 8, 5),
        "0.block.mlp.experts.down_proj": torch.randn(3, 5, 4),
    }
    split = split_experts(state)
    assert torch.equal(split["0.block.mlp.experts.2.up_proj.weight"], state["0.block.mlp.experts.gate_up_proj"][2, 4:])
    again = fuse_experts(split)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], state[key]) for key in state)


def test_gate_and_up_rows_take_turns():
    """The published dense MLP is one tensor: row 0 of the gate, row 0 of the up projection, row 1 of the gate."""
    state = {"0.block.mlp.gate_proj.weight": torch.zeros(3, 2), "0.block.mlp.up_proj.weight": torch.ones(3, 2)}
    family = SimpleNamespace(interleaved_gate_up=("mlp",), separate_gate_up=(), experts="fused")
    stored = to_stored_layout(SimpleNamespace(family=family), state)
    assert stored["0.block.mlp.gate_up_proj.weight"][:, 0].tolist() == [0, 1, 0, 1, 0, 1]
    again = to_runtime_layout(SimpleNamespace(family=family), stored)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
