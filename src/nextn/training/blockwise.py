"""Attention of compiled training steps in bfloat16 on processors: block by block of queries, as products of matrices.

torch's own kernel for processors multiplies small tiles, and takes 2.6 times as long for 512 columns (docs/log.md).
Steps that are not compiled, float32, and what this does not know go to that one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from nextn.kinds import IDLE

_NAME = "nextn_blocks"
_BLOCK = 128  # queries: what no query of a block sees is left out of its products


def attend_in_blocks(*parts: nn.Module) -> None:
    """From here on, layers of these parts that would take torch's attention attend in blocks where compiled."""
    for part in parts:
        for module in part.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == "sdpa":
                config._attn_implementation = _NAME


def in_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, H, T, D], [B, Hk, C, D], [B, Hk, C, Dv] -> [B, T, H, Dv].

    attention_mask [B or 1, 1, T, C] bool, True = may be seen; None: causal.
    """
    length = query.shape[2]
    known = all(given is None or name in IDLE for name, given in kwargs.items()) and not dropout
    if attention_mask is None:
        is_mask = length == key.shape[2] and getattr(module, "is_causal", True)
    else:
        is_mask = attention_mask.dtype is torch.bool and attention_mask.shape[1] == 1
    fits = is_mask and length > _BLOCK
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else value.dtype
    pays = query.device.type == "cpu" and dtype is torch.bfloat16
    if not (torch.compiler.is_compiling() and pays and known and fits):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask is None:
        attention_mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    query, key, value = (each.to(dtype) for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = attended(query * scale, key, value, attention_mask, _BLOCK)
    return out.transpose(1, 2).contiguous(), None


# Where the results of the two ops change, or how these lie, their names must change, too: torch keeps compiled graphs
# on disk by names alone, and runs them again.
@torch.library.custom_op("nextn::attention_in_blocks", mutates_args=())
def attended(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """query [B, H, T, D], key [B, Hk, C, D], value [B, Hk, C, Dv], seen [B or 1, 1, T, C] bool -> [B, H, T, Dv], and
    weights [T / block, B Hk, H / Hk * block, C], which mean nothing beyond what a block of queries looks at.

    The queries of the heads that share a key go through its products together.
    """
    out, weights = _empty(query, key, value, seen, block)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    for place, columns, sight in _blocks(seen, block):
        rows = _rows(query, columns, key)
        scores = torch.bmm(rows, _taken(keys, sight).mT)
        by_head = scores.view(*key.shape[:2], -1, columns.stop - columns.start, scores.shape[-1])
        by_head.masked_fill_(~_taken(seen[:, :, None, columns], sight, -1), torch.finfo(scores.dtype).min)
        weight = weights[place, :, : rows.shape[1], : scores.shape[-1]]
        weight.copy_(scores.softmax(-1))
        out[:, :, columns] = torch.bmm(weight, _taken(values, sight)).view_as(out[:, :, columns])
    return out, weights


@attended.register_fake
def _empty(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, block: int) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    out = query.new_empty(batch, heads, length, value.shape[-1])
    return out, query.new_empty(-(-length // block), batch * kv_heads, heads // kv_heads * block, columns)


@torch.library.custom_op("nextn::attention_in_blocks_backward", mutates_args=())
def attended_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, weights: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    to_query, to_key, to_value = grads = _empty_grads(grad, query, key, value, seen, weights, block)
    to_key.zero_()
    to_value.zero_()
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    for place, columns, sight in _blocks(seen, block):
        rows, outer, some = _rows(query, columns, key), _rows(grad, columns, key), _taken(keys, sight)
        weight = weights[place, :, : rows.shape[1], : some.shape[1]]
        _add(to_value.flatten(0, 1), sight, torch.bmm(weight.mT, outer))
        to_weight = torch.bmm(outer, _taken(values, sight).mT)
        to_scores = torch._softmax_backward_data(to_weight, weight, -1, weight.dtype)
        to_query[:, :, columns] = torch.bmm(to_scores, some).view_as(to_query[:, :, columns])
        _add(to_key.flatten(0, 1), sight, torch.bmm(to_scores.mT, rows))
    return grads


@attended_backward.register_fake
def _empty_grads(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, weights: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    # Contiguous, whatever the inputs are: heads of a key are added to as one batch, in place.
    fresh = [each.new_empty(each.shape) for each in (query, key, value)]
    return fresh[0], fresh[1], fresh[2]


def _blocks(seen: Tensor, block: int) -> Iterator[tuple[int, slice, slice | Tensor]]:
    """(place, columns of the queries, columns that any of them sees)"""
    length = seen.shape[2]
    for place, start in enumerate(range(0, length, block)):
        columns = slice(start, min(start + block, length))
        sight = seen[:, :, columns].flatten(0, 2).any(0).nonzero()[:, 0]
        is_prefix = len(sight) == 0 or len(sight) == int(sight[-1]) + 1
        yield place, columns, slice(0, len(sight)) if is_prefix else sight


def _taken(states: Tensor, sight: slice | Tensor, dim: int = 1) -> Tensor:
    """These columns of dim `dim`."""
    if isinstance(sight, slice):
        return states.narrow(dim, 0, sight.stop)
    return states.index_select(dim, sight)


def _add(to: Tensor, sight: slice | Tensor, states: Tensor) -> None:
    if isinstance(sight, slice):
        to[:, sight] += states
    else:
        to.index_add_(1, sight, states)


def _rows(states: Tensor, columns: slice, key: Tensor) -> Tensor:
    """[B, H, T, D] -> [B Hk, H / Hk * block, D] of these columns."""
    return states[:, :, columns].reshape(len(states) * key.shape[1], -1, states.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    return *attended_backward(grad.contiguous(), *ctx.saved_tensors, ctx.block), None, None


attended.register_autograd(_backward, setup_context=_keep)
AttentionInterface.register(_NAME, in_blocks)
AttentionMaskInterface.register(_NAME, sdpa_mask)
