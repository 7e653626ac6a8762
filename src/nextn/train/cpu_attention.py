"""Attention for compiled bfloat16 training on CPUs: one block of queries at a time, as matmuls.

torch's own CPU kernel multiplies small tiles, and takes 2.6 times as long for 512 positions (bench/log.md). Steps that
are not compiled, and arguments that are not supported, use it.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from nextn.model.layer_types import IGNORABLE_ARGUMENTS

CPU_ATTENTION = "nextn_blocks"  # transformers' name of it
_BLOCK = 128  # queries; keys that no query of a block sees are left out of its matmuls


def use_cpu_attention(*modules: nn.Module) -> None:
    """Make layers of these modules that use torch's SDPA use `cpu_attention`.

    Nothing changes if their code does something else by the name of the attention, such as sparse attention by a mask.
    """
    parts = [part for root in modules for part in root.modules()]
    if any(_looks_at_the_name(name) for name in {type(part).__module__ for part in parts}):
        return
    for part in parts:
        config: Any = getattr(part, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = CPU_ATTENTION


@cache
def _looks_at_the_name(module: str) -> bool:
    """Whether a module of transformers compares the name of the attention with that of torch's."""
    is_theirs = module.startswith("transformers.models.")
    return (
        is_theirs and re.search(r"_attn_implementation (?:==|in) ", inspect.getsource(sys.modules[module])) is not None
    )


def cpu_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend, with transformers' interface: [B, H, T, D], [B, Hk, S, D], [B, Hk, S, Dv] -> [B, T, H, Dv].

    attention_mask: [B or 1, 1, T, S] bool, True = visible; None = causal.
    """
    length = query.shape[2]
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else value.dtype
    is_bf16 = query.device.type == "cpu" and dtype is torch.bfloat16
    is_known = all(value is None or name in IGNORABLE_ARGUMENTS for name, value in kwargs.items())
    if torch.compiler.is_compiling():
        if attention_mask is None:
            fits = length == key.shape[2] and getattr(module, "is_causal", True)
        else:
            fits = attention_mask.dtype is torch.bool and attention_mask.shape[1] == 1
        if is_bf16 and is_known and fits and not dropout and length > _BLOCK:
            if attention_mask is None:
                attention_mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
            query, key, value = (states.to(dtype) for states in (query, key, value))
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            out, _ = attend(query * scale, key, value, attention_mask, _BLOCK)
            return out.transpose(1, 2).contiguous(), None
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return out, None


# If the results of the two ops or their memory layouts change, the ops must be renamed: torch caches compiled graphs
# on disk by op name alone, and would reuse them.
@torch.library.custom_op("nextn::attention_in_blocks", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Attend, and return the attention weights for the backward pass.

    The queries [B, H, T, D] of all heads that share a key [B, Hk, S, D] are multiplied with it together, `block`
    queries at a time; the values are [B, Hk, S, Dv], the mask [B or 1, 1, T, S] bool, True = visible.

    Return the output [B, H, T, Dv], and weights [T / block, B Hk, H / Hk * block, S], undefined beyond the keys that a
    block of queries sees.
    """
    out, weights = _empty(query, key, value, mask, block)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    for index, queries, visible in _blocks(mask, block):
        rows = _rows(query, queries, key)
        scores = torch.bmm(rows, _select(keys, visible).mT)
        by_head = scores.view(*key.shape[:2], -1, queries.stop - queries.start, scores.shape[-1])
        by_head.masked_fill_(~_select(mask[:, :, None, queries], visible, -1), torch.finfo(scores.dtype).min)
        weight = weights[index, :, : rows.shape[1], : scores.shape[-1]]
        weight.copy_(scores.softmax(-1))
        out[:, :, queries] = torch.bmm(weight, _select(values, visible)).view_as(out[:, :, queries])
    return out, weights


@attend.register_fake
def _empty(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, block: int) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    out = query.new_empty(batch, heads, length, value.shape[-1])
    return out, query.new_empty(-(-length // block), batch * kv_heads, heads // kv_heads * block, num_keys)


@torch.library.custom_op("nextn::attention_in_blocks_backward", mutates_args=())
def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, weights: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value."""
    grad_query, grad_key, grad_value = _empty_grads(grad, query, key, value, mask, weights, block)
    grad_key.zero_()
    grad_value.zero_()
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    for index, queries, visible in _blocks(mask, block):
        rows, grad_rows, visible_keys = _rows(query, queries, key), _rows(grad, queries, key), _select(keys, visible)
        weight = weights[index, :, : rows.shape[1], : visible_keys.shape[1]]
        _add(grad_value.flatten(0, 1), visible, torch.bmm(weight.mT, grad_rows))
        grad_weight = torch.bmm(grad_rows, _select(values, visible).mT)
        grad_scores = torch._softmax_backward_data(grad_weight, weight, -1, weight.dtype)
        grad_query[:, :, queries] = torch.bmm(grad_scores, visible_keys).view_as(grad_query[:, :, queries])
        _add(grad_key.flatten(0, 1), visible, torch.bmm(grad_scores.mT, rows))
    return grad_query, grad_key, grad_value


@attend_backward.register_fake
def _empty_grads(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, weights: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    # Contiguous, whatever the inputs are: the heads of a key are accumulated as one batch, in place.
    grads = [states.new_empty(states.shape) for states in (query, key, value)]
    return grads[0], grads[1], grads[2]


def _blocks(mask: Tensor, block: int) -> Iterator[tuple[int, slice, slice | Tensor]]:
    """(index of the block, its queries, the keys that any of them sees)"""
    length = mask.shape[2]
    for index, start in enumerate(range(0, length, block)):
        queries = slice(start, min(start + block, length))
        visible = mask[:, :, queries].flatten(0, 2).any(0).nonzero()[:, 0]
        is_prefix = len(visible) == 0 or len(visible) == int(visible[-1]) + 1
        yield index, queries, slice(0, len(visible)) if is_prefix else visible


def _select(states: Tensor, indices: slice | Tensor, dim: int = 1) -> Tensor:
    if isinstance(indices, slice):
        return states.narrow(dim, 0, indices.stop)
    return states.index_select(dim, indices)


def _add(target: Tensor, indices: slice | Tensor, states: Tensor) -> None:
    if isinstance(indices, slice):
        target[:, indices] += states
    else:
        target.index_add_(1, indices, states)


def _rows(states: Tensor, queries: slice, key: Tensor) -> Tensor:
    """[B, H, T, D] -> [B Hk, H / Hk * block, D] of these queries."""
    return states[:, :, queries].reshape(len(states) * key.shape[1], -1, states.shape[-1])


def _save_for_backward(ctx: Any, inputs: Sequence[object], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    return *attend_backward(grad.contiguous(), *ctx.saved_tensors, ctx.block), None, None


attend.register_autograd(_backward, setup_context=_save_for_backward)
AttentionInterface.register(CPU_ATTENTION, cpu_attention)
AttentionMaskInterface.register(CPU_ATTENTION, sdpa_mask)
