"""Calls of every op with views and parameters changed at random, one or two at a time: each is refused, or stays within
its tensors.

A view never leaves its tensor, which lies between guards that no call may change. Under AddressSanitizer
(`make test-asan`), where a tensor has no guards but its exact size, and in a debug build, reads are seen as well. What
ops find in memory (lengths, addresses, tokens to verify) is valid: they cannot refuse it.
"""

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.runtime.native.abi import BYTES, FP8, FP8_FLOATS, INT4, INT4_MINIMA, INT8, Q4_K, load

GUARD = 0 if os.environ.get("NEXTN_NATIVE_BUILD") in ("asan", "tsan") else 64  # elements before and after a tensor
MARK = 77
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
INTS = (-(2**62), -1, 0, 1, 2, 3, 31, 33, 2**31, 2**62)
UNARY = [
    "neg",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "abs",
    "sign",
    "silu",
    "sigmoid",
    "tanh",
    "relu",
    "cos",
    "sin",
]
UNARY += ["log_sigmoid", "copy", "log_softmax", "softmax", "cumsum"]
BINARY = [
    "mul",
    "div",
    "minimum",
    "maximum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "floor_divide",
    "remainder",
    "silu_mul",
]
WHOLE = ["mul", "floor_divide", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor"]
REALS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 0.5, 3.0, 1e30, 1e300)


@dataclass
class Call:
    op: str
    tensors: list[Tensor]
    ints: list[int] = field(default_factory=list)
    reals: list[float] = field(default_factory=list)
    keeps: tuple[int, ...] = ()  # parameters that describe memory behind an address, which no op can check
    memory: list[Tensor] = field(default_factory=list)  # behind addresses


def guarded(tensor: Tensor) -> Tensor:
    """The tensor as a dense one between guards."""
    whole = torch.full((tensor.numel() + 2 * GUARD,), MARK, dtype=tensor.dtype)
    inside = whole[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return guarded(torch.randn(shape).to(dtype))


def whole(*shape: int, below: int = 1) -> Tensor:
    return guarded(torch.randint(below, shape))


def packed(weight_type: int, n: int, k: int, times: int = 1) -> Tensor:
    return guarded(torch.zeros(load().library.nextn_packed_bytes(weight_type, n, k) * times, dtype=torch.bool))


def elementwise() -> list[Call]:
    shape = (3, 5, 17)
    calls = [Call(op, [floats(*shape), floats(*shape)]) for op in UNARY]
    calls += [Call(op, [floats(*shape) for _ in range(3)]) for op in BINARY]
    calls += [Call(op, [floats(*shape) for _ in range(3)], reals=[1.0]) for op in ("add", "sub")]
    calls += [Call(op, [whole(*shape, below=9) for _ in range(3)]) for op in WHOLE]
    calls += [Call("bitwise_not", [whole(*shape, below=9) for _ in range(2)])]
    calls += [Call("pow", [whole(*shape, below=9) for _ in range(2)], reals=[4.0])]
    calls += [Call("softplus", [floats(*shape), floats(*shape)], reals=[1.0, 20.0])]
    calls += [Call("clamp", [floats(*shape), floats(*shape)], reals=[-1.0, 1.0])]
    calls += [Call("gelu", [floats(*shape), floats(*shape)], [1])]
    calls += [Call("fill", [whole(*shape)], reals=[3.0])]
    mask = guarded(torch.ones(shape, dtype=torch.bool))
    calls += [Call("where", [floats(*shape), mask, floats(*shape), floats(*shape)])]
    calls += [Call("masked_fill", [floats(*shape), floats(*shape), mask], reals=[-math.inf])]
    return calls


def indexed() -> list[Call]:
    return [
        Call("embedding", [floats(4, 33), floats(7, 33), whole(4, below=7)]),
        Call("embedding", [floats(4, 33), floats(7, 33, dtype=torch.bfloat16), whole(4, below=7)]),
        Call("index_select", [floats(3, 4, 5), floats(3, 9, 5), whole(4, below=9)], [1]),
        Call("gather", [floats(3, 4, 5), floats(3, 9, 5), whole(3, 4, 5, below=9)], [1]),
        Call("scatter", [floats(3, 9, 5), whole(3, 4, 5, below=9), floats(3, 4, 5)], [1]),
        Call("scatter_value", [floats(3, 9, 5), whole(3, 4, 5, below=9)], [1], [2.0]),
        Call("topk", [floats(3, 4), whole(3, 4), floats(3, 70)], [4]),
    ]


def rows() -> list[Call]:
    calls = [Call(op, [floats(3), floats(3, 5, 70)], [0b110]) for op in ("sum", "mean", "amax")]
    calls += [Call("argmax", [whole(3, 5), floats(3, 5, 70)]), Call("logsumexp", [floats(3, 5), floats(3, 5, 70)])]
    calls += [Call("confidence", [whole(3, 5), floats(3, 5), floats(3, 5, 70)])]
    calls += [Call("rms_norm", [floats(4, 70), floats(4, 70), floats(70)], reals=[1e-6])]
    calls += [Call("add_rms_norm", [*(floats(4, 70) for _ in range(4)), floats(70)], reals=[1e-6])]
    calls += [Call("native_layer_norm", [floats(4, 70), floats(4, 70), floats(70), floats(70)], reals=[1e-6])]
    calls += [Call("rope", [floats(2, 3, 34) for _ in range(4)])]
    heads = [floats(2, 3, 34), floats(2, 3, 34), floats(2, 3, 16), floats(2, 3, 16), floats(34)]
    halves = [floats(2, 3, 34, dtype=torch.bfloat16), *(guarded(head) for head in heads[1:])]
    calls += [Call("norm_rope", [*heads, *halves], reals=[1e-6, 1e-5])]
    calls += [Call("to_probs", [floats(3, 70), floats(3, 70)], [5], [1.0, 0.9, 0.1])]
    calls += [Call("sample", [whole(3), guarded(torch.rand(3)), guarded(torch.randn(3, 70).abs())])]
    verified = [
        whole(2),
        whole(2),
        floats(2, 70),
        guarded(torch.randn(2, 4, 70).abs()),
        guarded(torch.randn(2, 3, 70).abs()),
        whole(2, 3),
    ]
    return [*calls, Call("verify", [*verified, whole(2), guarded(torch.rand(2, 4))], [1])]


def linear() -> list[Call]:
    n, k, experts = 37, 64, 3
    calls = []
    for weight_type in (0, 1, BYTES, INT4, INT8 + 1, FP8, FP8 + 2, INT4_MINIMA, INT4_MINIMA + 1, FP8_FLOATS + 1):
        dtype = torch.float32 if weight_type in (0, FP8_FLOATS + 1) else torch.bfloat16
        out, x, given = floats(5, n, dtype=dtype), floats(5, k, dtype=dtype), [n, k, weight_type]
        gated = packed(weight_type, 2 * math.ceil(n / 16) * 16, k)
        all_experts, ids = packed(weight_type, n, k, experts), whole(5, below=experts)
        bias = floats(experts, n)
        calls += [Call("linear", [out, x, packed(weight_type, n, k), floats(n)], [n, k, 1, weight_type])]
        calls += [Call("gated_linear", [out, x, gated], given)]
        calls += [Call("expert_linear", [out, x, ids, all_experts, bias], given)]
        calls += [Call("gated_expert_linear", [out, x, ids, guarded(gated.repeat(experts))], given)]
    x, kquant = floats(5, 256), packed(Q4_K, n, 256)
    calls += [Call("linear", [floats(5, n), x, kquant], [n, 256, 1, Q4_K])]
    for weight_type in (INT4, INT8, INT4_MINIMA):
        given = [floats(5, k), packed(weight_type, n, k), whole(5, below=n)]
        calls += [Call("grouped_embedding", given, [n, k, weight_type])]
    return calls


def packing() -> list[Call]:
    n, k = 37, 64
    scaled = [guarded(torch.zeros(48 * k, dtype=torch.bool)), floats(48), floats(n, k, dtype=torch.bfloat16)]
    four = [guarded(torch.zeros(shape, dtype=torch.bool)) for shape in ((n, k), (n, 2))]
    return [
        Call("pack", [packed(0, n, k), floats(n, k)]),
        Call("pack", [packed(1, n, k), floats(n, k, dtype=torch.bfloat16)]),
        Call("pack_bytes", scaled),
        Call("quantize_groups", [four[0], floats(n, 2), four[1], floats(n, k)], [4, 32]),
    ]


def stateful() -> list[Call]:
    batch, heads, kv_heads, width, dim, capacity = 2, 4, 2, 3, 32, 64
    buffers = [torch.zeros(2**20) for _ in range(2)]
    header = guarded(torch.tensor([*(buffer.data_ptr() for buffer in buffers), capacity]))
    queries = [floats(batch, heads, width, dim) for _ in range(2)]
    keys = [floats(batch, kv_heads, width, dim) for _ in range(2)]
    starts, counts, one = whole(batch), whole(batch, below=2), guarded(header[:1])
    attention = [*queries, *keys, starts, header]
    recurrent = [*(floats(batch, width, size, dim) for size in (heads, kv_heads, kv_heads, heads))]
    recurrent += [floats(batch, width, heads), floats(batch, width, heads)]
    conv = [floats(batch, 40, width), floats(batch, 40, width), floats(40, 4), floats(40)]
    calls = [
        Call("attention", attention, [0, 0], [0.1, 0.0]),
        Call("attention", [*attention, floats(heads)], [1, 5], [0.1, 30.0]),
        Call("store_kv", attention[2:], [0]),
        Call("gated_delta_rule", [*recurrent, one], [8, 1], keeps=(0,)),
        Call("causal_conv", [*conv, one], [8, 1], keeps=(0,)),
        Call("commit_state", [counts, one], [8, heads, dim, dim, batch], keeps=(0, 1, 2, 3)),
        Call("commit_history", [counts, one], [8, 4, 40, batch, 0], keeps=(0, 1, 2)),
    ]
    for call in calls:
        call.memory = buffers
    return calls


def reshaped(tensor: Tensor, draw: random.Random) -> Tensor:
    """Another view of the tensor's memory, or of a copy in another type."""
    kind = draw.randrange(6)
    if kind == 0 and tensor.ndim > 1:
        return tensor.transpose(*draw.sample(range(tensor.ndim), 2))
    if kind == 1 and tensor.ndim:
        return tensor[0] if tensor.shape[0] else tensor
    if kind == 2:
        return tensor.unsqueeze(draw.randrange(tensor.ndim + 1))
    if kind == 3:
        return guarded(tensor.to(draw.choice(DTYPES)))
    if tensor.ndim == 0:
        return tensor
    sizes, strides, dim = list(tensor.shape), list(tensor.stride()), draw.randrange(tensor.ndim)
    if kind == 4:
        sizes[dim] = draw.choice((0, 1, sizes[dim] - 1, sizes[dim] + 1, 2 * sizes[dim]))
    else:
        strides[dim] = draw.choice((0, 1, 2 * strides[dim], strides[dim] + 1))
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    fits = (
        min(sizes) >= 0
        and tensor.storage_offset() + reach <= tensor.untyped_storage().nbytes() // tensor.itemsize - GUARD
    )
    return tensor.as_strided(sizes, strides) if fits else tensor


def mutated(call: Call, draw: random.Random) -> Call:
    tensors, ints, reals = list(call.tensors), list(call.ints), list(call.reals)
    for _ in range(draw.choice((1, 1, 2))):
        kind, place = draw.randrange(8), draw.randrange(len(tensors)) if tensors else 0
        if kind < 4 and tensors:
            tensors[place] = reshaped(tensors[place], draw)
        elif kind == 4 and tensors:
            tensors[place] = draw.choice(tensors)
        elif kind == 5:
            tensors = draw.choice((tensors[:-1], [*tensors, tensors[-1]] if tensors else []))
        elif kind == 6 and (free := sorted(set(range(len(ints))) - set(call.keeps))):
            place = draw.choice(free)
            ints[place] = draw.choice((*INTS, ints[place] - 1, ints[place] + 1))
        elif kind == 7 and reals:
            reals[draw.randrange(len(reals))] = draw.choice(REALS)
    return Call(call.op, tensors, ints, reals, call.keeps, call.memory)


def guards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What lies before and after each tensor."""
    storages = [torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()) for tensor in tensors]
    return [part for storage in storages for part in (storage[:GUARD], storage[len(storage) - GUARD :])]


@pytest.mark.more
@pytest.mark.parametrize("calls", [elementwise, indexed, rows, linear, packing, stateful])
def test_mutated_calls_are_refused_or_stay_within_their_tensors(calls: Callable[[], list[Call]]):
    torch.manual_seed(0)
    draw, runtime, num_run, num_refused = random.Random(0), load(), 0, 0
    for call in calls():
        runtime.call(call.op, call.tensors, call.ints, call.reals)  # as it is, it is supported
        for _ in range(60):
            tried = mutated(call, draw)
            try:
                runtime.call(tried.op, tried.tensors, tried.ints, tried.reals)
            except ConfigError:
                num_refused += 1
                continue
            num_run += 1
            marks = [torch.full_like(part, MARK) for part in guards(tried.tensors)]
            said = f"{tried.op} of {[(view.dtype, view.shape, view.stride()) for view in tried.tensors]}, {tried.ints}"
            assert all(map(torch.equal, guards(tried.tensors), marks)), said
    assert num_run > 20
    assert num_refused > 20
