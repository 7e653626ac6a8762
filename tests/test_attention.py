"""The native op `attend`: against a float64 reference, and bit for bit against itself whatever else is in the call."""

from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from quick import loop, others_slow
from reference_products import round_cached, round_rows
from torch import Tensor

from nextn.errors import ConfigError
from nextn.runtime.native.abi import Runtime, load

# Of float32: what torch itself is off by at 192 channels.
TOLERANCE = {torch.float32: 9e-6, torch.bfloat16: 1e-2}


@cache
def team(threads: int) -> Runtime:
    return Runtime(load().library, threads)


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    dim_k: int = 64
    dim_v: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float = field(default=0.125)
    int8: bool = False  # the buffers


class Buffers:
    """The cache of one layer, filled by the op alone."""

    def __init__(self, shape: Shape, *, batch: int, capacity: int, stale: float = 0.0) -> None:
        self.shape = shape
        dtype, scale_bytes = (torch.int8, 8) if shape.int8 else (shape.dtype, 0)
        stale = min(stale, 100.0) if shape.int8 else stale  # which as bytes of a scale is a large finite number
        self.keys = torch.full((batch, shape.kv_heads, capacity, shape.dim_k + scale_bytes), stale, dtype=dtype)
        self.values = torch.full((batch, shape.kv_heads, capacity, shape.dim_v), -stale, dtype=dtype)
        self.header = torch.tensor([self.keys.data_ptr(), self.values.data_ptr(), capacity])

    def attend(self, block: "Block", starts: Tensor, *, threads: int = 1, op: str = "attention") -> Tensor:
        shape = self.shape
        out = torch.full((*block.q.shape[:3], shape.dim_v), float("nan"), dtype=shape.dtype)
        views = [out, block.q, block.k, block.v, starts, self.header]
        views += [block.sinks] if shape.sinks else []
        team(threads).call(op, views, [int(shape.int8), shape.window], [shape.scale, shape.softcap])
        return out

    def store(self, block: "Block", starts: Tensor, *, threads: int = 1) -> None:
        team(threads).call("store_kv", [block.k, block.v, starts, self.header], [int(self.shape.int8)])


@dataclass
class Block:
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor

    @classmethod
    def random(cls, shape: Shape, *, batch: int, width: int, seed: int = 0) -> "Block":
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, dim: int) -> Tensor:
            # [B, m, heads, dim] as a linear layer leaves it, seen as [B, heads, m, dim]
            drawn = torch.randn(batch, width, heads, dim, generator=generator)
            return drawn.to(shape.dtype).transpose(1, 2)

        q, k = draw(shape.heads, shape.dim_k) * 2, draw(shape.kv_heads, shape.dim_k)
        sinks = torch.randn(shape.heads, generator=generator)
        return cls(q, k, draw(shape.kv_heads, shape.dim_v), sinks.to(shape.dtype))

    def positions(self, begin: int, end: int, rows: slice = slice(None)) -> "Block":
        q, k, v = (x[rows, :, begin:end] for x in (self.q, self.k, self.v))
        return Block(q, k, v, self.sinks)


def reference(block: Block, shape: Shape) -> Tensor:
    """Attention over a sequence from position 0 on, in float64."""
    group = shape.heads // shape.kv_heads
    stored = [round_cached(x) if shape.int8 else x for x in (block.k, block.v)]
    q, k, v = block.q.double(), *(x.double().repeat_interleave(group, 1) for x in stored)
    logits = q @ k.transpose(-1, -2) * shape.scale
    if shape.softcap:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    places = torch.arange(logits.shape[-1])
    behind = places[:, None] - places
    seen = (behind >= 0) & ((behind < shape.window) if shape.window else True)
    logits = logits.masked_fill(~seen, -torch.inf)
    if shape.sinks:
        sinks = block.sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v
    return logits.softmax(-1) @ v


SHAPES = [
    Shape(),
    Shape(dtype=torch.float32),
    Shape(heads=8, kv_heads=1, dim_k=128, dim_v=128),
    Shape(heads=3, kv_heads=3, dim_k=192, dim_v=128),
    Shape(heads=3, kv_heads=3, dim_k=192, dim_v=128, dtype=torch.float32),
    Shape(heads=6, kv_heads=2, dim_k=32, dim_v=80, window=7),
    Shape(heads=6, kv_heads=2, dim_k=24, dim_v=20, window=7),
    Shape(heads=6, kv_heads=2, dim_k=24, dim_v=20, window=40, sinks=True, dtype=torch.float32),
    Shape(heads=40, kv_heads=2, window=100, sinks=True, softcap=5.0),
    Shape(softcap=5.0, dtype=torch.float32),
    Shape(heads=2, kv_heads=2, window=1),
    Shape(heads=4, kv_heads=2, dim_k=8, dim_v=6),
    Shape(heads=4, kv_heads=2, dim_k=7, dim_v=5, dtype=torch.float32),
]
IDS = [f"{i}-{'bf16' if shape.dtype == torch.bfloat16 else 'fp32'}" for i, shape in enumerate(SHAPES)]
INT8 = [replace(shape, int8=True) for shape in SHAPES if shape.dim_k % 4 == shape.dim_v % 4 == 0]
ALL, ALL_IDS = SHAPES + INT8, IDS + [f"{i}-int8-{shape.dtype}" for i, shape in enumerate(INT8)]


# Kernels differ by dtype, by heads that are whole vectors or not, by window, sinks and softcap: one shape of each.
QUICK = [SHAPES[at] for at in (0, 2, 4, 5, 7, 8, 12)] + [INT8[at] for at in (0, 4, 7)]


@pytest.mark.one_case
@pytest.mark.parametrize("shape", others_slow(ALL, *QUICK), ids=ALL_IDS)
def test_blocks_of_every_width_agree_with_the_reference(shape: Shape) -> None:
    block, buffers, done = Block.random(shape, batch=2, width=700), Buffers(shape, batch=2, capacity=704), 0
    parts = []
    for width in (300, 1, 16, 2, 255, 9, 5, 112):
        parts.append(buffers.attend(block.positions(done, done + width), torch.tensor([done, done])))
        done += width
    torch.testing.assert_close(
        torch.cat(parts, 2).double(), reference(block, shape), atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_buffers_hold_the_codes_and_scales_of_torch(dtype: torch.dtype) -> None:
    shape = Shape(dim_k=36, dim_v=20, dtype=dtype, int8=True)
    block, buffers = Block.random(shape, batch=2, width=40), Buffers(shape, batch=2, capacity=64)
    for x in (block.k, block.v):
        x[:, :, 3], x[:, :, 4], x[:, :, 5] = 0.0, 1e-32, 1e30 * x[:, :, 5]
        x[:, :, 6] = torch.linspace(-127, 127, x.shape[-1])  # halves between two codes
    buffers.store(block, torch.tensor([0, 9]))
    pieces = buffers.keys.unflatten(2, (4, 16)).flatten(-2)
    scales = pieces[..., :128].contiguous().view(torch.float32).unflatten(-1, (2, 16))
    turned = [0, 2, 1, 3]  # the order of four codes
    keys = pieces[..., 128:].unflatten(-1, (-1, 16, 4))[..., turned].transpose(3, 4).flatten(-2).flatten(2, 3)
    values = buffers.values.flatten(2).unflatten(-1, (-1, shape.dim_v, 4))[..., turned].transpose(3, 4).flatten(2, 3)
    for row, start in enumerate((0, 9)):
        for x, codes, of in ((block.k, keys, scales[..., 0, :]), (block.v, values, scales[..., 1, :])):
            expected, expected_scales = round_rows(x[row], x.shape[-1], 127)
            assert torch.equal(codes[row, :, start : start + 40], expected.squeeze(-2).to(torch.int8))
            assert torch.equal(of[row].flatten(1)[:, start : start + 40], expected_scales.squeeze(-1))


@pytest.mark.more
@loop("shape", ALL, ids=ALL_IDS)
def test_a_query_knows_no_other_query_of_its_call(shape: Shape) -> None:
    """One by one, by sixteens, and all at once: the same bits. Two sequences at different positions change nothing."""
    block, total = Block.random(shape, batch=1, width=560), 560
    whole = Buffers(shape, batch=1, capacity=576).attend(block, torch.tensor([0]))
    buffers = Buffers(shape, batch=1, capacity=576, stale=3.0)
    buffers.attend(block.positions(0, 500), torch.tensor([0]))
    for begin, end in [
        (500, 516),
        (516, 517),
        (517, 520),
        (520, 529),
        (529, 530),
        (530, 532),
        (532, 548),
        (548, total),
    ]:
        assert torch.equal(buffers.attend(block.positions(begin, end), torch.tensor([begin])), whole[:, :, begin:end])
    ragged = Block(*(torch.cat([x[:, :, 540:549], x[:, :, 3:12]]) for x in (block.q, block.k, block.v)), block.sinks)
    both = Buffers(shape, batch=2, capacity=576)
    both.attend(Block(*(torch.cat([x, x]) for x in (block.q, block.k, block.v)), block.sinks), torch.tensor([0, 0]))
    out = both.attend(ragged, torch.tensor([540, 3]))
    assert torch.equal(out, torch.cat([whole[:, :, 540:549], whole[:, :, 3:12]]))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sliding_windows_left_edge_does_not_move_the_order_of_sums(dtype: torch.dtype, int8: bool) -> None:
    """A call of 16 starts its sweep up to a block before a call of one does, and both cross several spans."""
    shape = Shape(dtype=dtype, window=700, int8=int8)
    block, total = Block.random(shape, batch=1, width=1300), 1300
    buffers = Buffers(shape, batch=1, capacity=1312)
    buffers.attend(block, torch.tensor([0]))
    for begin in range(1200, total - 16, 16):
        whole = buffers.attend(block.positions(begin, begin + 16), torch.tensor([begin]))
        single = [buffers.attend(block.positions(i, i + 1), torch.tensor([i])) for i in range(begin, begin + 16)]
        assert torch.equal(torch.cat(single, 2), whole)


@pytest.mark.parametrize("shape", [*SHAPES[:3], *SHAPES[6:8], *INT8[:3]], ids=str)
def test_what_stale_positions_hold_does_not_matter(shape: Shape) -> None:
    """After a rollback the positions after the block hold what was rejected."""
    block, outs = Block.random(shape, batch=1, width=44), []
    for stale in (0.0, 1e4, -77.0):
        buffers = Buffers(shape, batch=1, capacity=64, stale=stale)
        outs.append([buffers.attend(block.positions(0, 35), torch.tensor([0]))])
        outs[-1].append(buffers.attend(block.positions(35, 44), torch.tensor([35])))
        outs[-1].append(buffers.attend(block.positions(35, 36), torch.tensor([35])))
    for first, *others in zip(*outs, strict=True):
        assert first.isfinite().all()
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.more
@loop("shape", [SHAPES[0], SHAPES[1], SHAPES[3], SHAPES[8], INT8[0], INT8[3]], ids=str)
@loop("width", [1, 9, 40])
def test_threads_change_no_bit(shape: Shape, width: int) -> None:
    """Where the streams do not divide by the threads, a thread attends to positions that the other wrote."""
    for batch in (1, 3):
        block, outs = Block.random(shape, batch=batch, width=200), []
        for threads in (1, 2):
            buffers = Buffers(shape, batch=batch, capacity=224)
            buffers.attend(block.positions(0, 160), torch.full((batch,), 0), threads=threads)
            outs.append(buffers.attend(block.positions(160, 160 + width), torch.full((batch,), 160), threads=threads))
        assert torch.equal(*outs)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_buffer_grows_by_copying_each_heads_prefix(dtype: torch.dtype, int8: bool) -> None:
    shape = Shape(dtype=dtype, int8=int8)
    block, small, large = (
        Block.random(shape, batch=2, width=70),
        *(Buffers(shape, batch=2, capacity=capacity) for capacity in (64, 96)),
    )
    small.attend(block.positions(0, 60), torch.tensor([0, 0]))
    large.keys[:, :, :64], large.values[:, :, :64] = small.keys, small.values
    out = large.attend(block.positions(60, 70), torch.tensor([60, 60]))
    torch.testing.assert_close(
        out.double(), reference(block, shape)[:, :, 60:], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_a_sink_may_outweigh_everything() -> None:
    shape = Shape(sinks=True, dtype=torch.float32)
    block = Block.random(shape, batch=1, width=5)
    block.sinks[:] = torch.tensor([500.0, -500.0, 0.0, 8.0])
    out = Buffers(shape, batch=1, capacity=32).attend(block, torch.tensor([0]))
    torch.testing.assert_close(out.double(), reference(block, shape), atol=2e-6, rtol=2e-6)
    assert not out[:, 0].any()


def test_out_may_have_any_strides() -> None:
    shape = Shape()
    block = Block.random(shape, batch=1, width=3)
    buffers = Buffers(shape, batch=1, capacity=32)
    out = torch.zeros(1, 64, 3, 4, dtype=shape.dtype).permute(0, 3, 2, 1)
    views = [out, block.q, block.k, block.v, torch.tensor([0]), buffers.header]
    load().call("attention", views, [0, 0], [shape.scale, 0.0])
    assert torch.equal(out, buffers.attend(block, torch.tensor([0])))


@pytest.mark.parametrize(
    "wrong", ["type", "heads", "inner stride", "starts", "scale", "half a pair", "half of four", "buffers"]
)
def test_other_calls_are_refused(wrong: str) -> None:
    dim_k = {"half a pair": 33, "half of four": 66}.get(wrong, 64)
    buffer_type = {"half of four": 1, "buffers": 2}.get(wrong, 0)
    shape = Shape(heads=3, kv_heads=2) if wrong == "heads" else Shape(dim_k=dim_k)
    block, buffers = Block.random(shape, batch=1, width=2), Buffers(shape, batch=1, capacity=32)
    starts = torch.tensor([0, 0] if wrong == "starts" else [0])
    if wrong == "type":
        block.v = block.v.float()
    if wrong == "inner stride":
        block.q = block.q.transpose(-1, -2).contiguous().transpose(-1, -2)
    out = torch.empty(*block.q.shape[:3], 64, dtype=shape.dtype)
    views = [out, block.q, block.k, block.v, starts, buffers.header]
    with pytest.raises(ConfigError, match="attention"):
        load().call("attention", views, [buffer_type, 0], [0.0 if wrong == "scale" else 0.125, 0.0])


@loop("threads", [1, 2])
@loop("shape", ALL, ids=ALL_IDS)
def test_stored_positions_are_read_again(shape: Shape, threads: int) -> None:
    """Bit for bit what wrote them got, with other keys and values in the call, which change nothing."""
    block, starts = Block.random(shape, batch=3, width=50), torch.tensor([0, 7, 33])
    buffers = Buffers(shape, batch=3, capacity=96)
    out = buffers.attend(block, starts, threads=threads)
    block.k, block.v = torch.zeros_like(block.k), torch.zeros_like(block.v)
    for _ in range(2):
        assert torch.equal(buffers.attend(block, starts, threads=threads, op="attend_stored"), out)


@loop("threads", [1, 2])
@loop("shape", ALL, ids=ALL_IDS)
def test_store_leaves_what_attend_leaves(shape: Shape, threads: int) -> None:
    """And what comes later attends to it."""
    block, starts = Block.random(shape, batch=3, width=50), torch.tensor([0, 7, 33])
    buffers = [Buffers(shape, batch=3, capacity=96) for _ in range(2)]
    buffers[0].attend(block.positions(0, 40), starts, threads=threads)
    buffers[1].store(block.positions(0, 40), starts, threads=threads)
    assert torch.equal(buffers[0].keys, buffers[1].keys)
    assert torch.equal(buffers[0].values, buffers[1].values)
    outs = [each.attend(block.positions(40, 50), starts + 40, threads=threads) for each in buffers]
    assert torch.equal(*outs)


def test_store_refuses_what_no_kernel_takes() -> None:
    shape = Shape()
    block, buffers = Block.random(shape, batch=2, width=3), Buffers(shape, batch=2, capacity=32)
    starts = torch.zeros(2, dtype=torch.int64)
    for views in (
        [block.k, block.v[:, :, :2], starts, buffers.header],
        [block.k, block.v.float(), starts, buffers.header],
        [block.k, block.v, starts[:1], buffers.header],
        [block.k, block.v, starts.int(), buffers.header],
        [block.k.transpose(2, 3), block.v, starts, buffers.header],
        [block.k, block.v, starts],
    ):
        with pytest.raises(ConfigError):
            team(1).call("store_kv", views, [0])
