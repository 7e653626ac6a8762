"""Native linear layers: the sums within the bound of fp32, one rounding, and rows that do not depend on each other."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from compiled import compiled
from quick import loop, others_slow
from reference_products import grouped_linear
from torch import Tensor

from nextn.errors import ConfigError
from nextn.runtime.native.abi import BYTES, Runtime, load
from nextn.runtime.native.grouped import GroupedFormat, GroupedWeight, RoundedFormat, quantize_groups
from nextn.runtime.native.memory import HugePages
from nextn.runtime.native.stored_codes import Fp8Format
from nextn.runtime.native.weight_packing import merge_weights, pack_quantized, quantize

SIZES = [1, 5, 16, 33, 100, 256]
RUNTIMES = ["one-thread", "two-threads", "portable"]  # the last is built for this test
ROWS = [1, 2, 15, 16, 17, 33, 70]
TYPES = {torch.float32: 0, torch.bfloat16: 1}
dtypes = pytest.mark.parametrize("dtype", list(TYPES), ids=["f32", "bf16"])


@pytest.fixture(scope="module", params=others_slow(RUNTIMES, "one-thread", "two-threads"))
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    if request.param == "portable":
        return Runtime(compiled(), 2)
    return Runtime(load().library, 1 if request.param == "one-thread" else 2)


# Quantized kernels share columns among workers as the others do: two threads in slow tests.
one_thread = pytest.mark.parametrize("runtime", others_slow(RUNTIMES, "one-thread"), indirect=True)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(
    runtime: Runtime, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    out = x.new_empty(len(x), len(weight)) if out is None else out
    extra = [] if bias is None else [bias]
    runtime.call("linear", [out, x, runtime.pack(weight), *extra], [*weight.shape, 1, TYPES[weight.dtype]])
    return out


def experts(runtime: Runtime, x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.new_full((len(x), weight.shape[1]), 7)
    extra = [] if bias is None else [bias]
    ints = [*weight.shape[1:], TYPES[weight.dtype]]
    runtime.call("expert_linear", [out, x, ids, runtime.pack(weight), *extra], ints)
    return out


def assert_sums(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Each of K fp32 additions and the bias may be wrong by half a unit of the sum of magnitudes; then one rounding."""
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = size * (x.shape[1] + 2) * 2**-24
    if out.dtype == torch.bfloat16:
        bound = bound + (exact.abs() + bound) * 2**-8
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.more
@dtypes
@loop("k", SIZES)
@loop("n", SIZES)
def test_any_size_and_number_of_rows(runtime: Runtime, n: int, k: int, dtype: torch.dtype) -> None:
    weight, x = drawn(n, k, dtype=dtype), drawn(max(ROWS), k, dtype=dtype, seed=1)
    for rows in ROWS:
        assert_sums(linear(runtime, x[:rows], weight), x[:rows], weight)


@dtypes
def test_more_rows_than_the_cache_holds(runtime: Runtime, dtype: torch.dtype) -> None:
    weight, x = drawn(70, 4099, dtype=dtype), drawn(200, 4099, dtype=dtype, seed=1)
    out = linear(runtime, x, weight)
    assert_sums(out, x, weight)
    assert torch.equal(linear(runtime, x[150:151], weight), out[150:151])


@dtypes
def test_strided_rows_and_nothing_beside_them_is_touched(runtime: Runtime, dtype: torch.dtype) -> None:
    weight = drawn(2 * 100, 3 * 64, dtype=dtype)[::2, ::3]
    x = drawn(20, 90, dtype=dtype)[1::2, 13:77]
    frame = torch.full((21, 150), 7, dtype=dtype)
    linear(runtime, x, weight, out=frame[1::2, 30:130])
    assert_sums(frame[1::2, 30:130], x, weight)
    frame[1::2, 30:130] = 7
    assert (frame == 7).all()


@pytest.mark.parametrize("copies", [1, 30])
def test_rounds_once_and_to_even(runtime: Runtime, copies: int) -> None:
    """1 + 2^-8 lies between two bf16 values: it goes to the even one, and 2^-20 more goes up."""
    weight = torch.tensor([[1, 0], [1, 1], [1, 1]], dtype=torch.bfloat16).repeat(copies, 1)
    x, bias = torch.tensor([[1, 2**-8]], dtype=torch.bfloat16), torch.tensor([0, 0, 2**-20]).repeat(copies)
    out = linear(runtime, x, weight, bias, torch.empty(1, 3 * copies))
    assert out.tolist() == [[1, 1 + 2**-8, 1 + 2**-8 + 2**-20] * copies]
    assert linear(runtime, x, weight, bias).tolist() == [[1, 1, 1 + 2**-7] * copies]
    assert linear(runtime, x, weight, bias).equal(out.bfloat16())
    weight[:, 0] += 2**-7  # now the lower neighbor is odd
    assert linear(runtime, x, weight).tolist() == [[1 + 2**-7, 1 + 2**-6, 1 + 2**-6] * copies]


@dtypes
@pytest.mark.parametrize("bias_dtype", list(TYPES), ids=["f32-bias", "bf16-bias"])
def test_bias(runtime: Runtime, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    weight, x, bias = drawn(100, 48, dtype=dtype), drawn(19, 48, dtype=dtype, seed=1), drawn(100, dtype=bias_dtype)
    assert_sums(linear(runtime, x, weight, bias), x, weight, bias)
    matrices = torch.stack([weight, -weight])
    out = experts(runtime, x, torch.ones(19, dtype=torch.int64), matrices, torch.stack([bias, bias + 1]))
    assert_sums(out, x, -weight, bias + 1)


@dtypes
@pytest.mark.parametrize("k", [33, 256])
def test_a_row_knows_no_other_row(runtime: Runtime, k: int, dtype: torch.dtype) -> None:
    weight, x = drawn(100, k, dtype=dtype), drawn(max(ROWS), k, dtype=dtype, seed=1)
    alone = torch.cat([linear(runtime, row[None], weight) for row in x])
    other = Runtime(runtime.library, 1)
    for rows in ROWS:
        assert torch.equal(linear(runtime, x[:rows], weight), alone[:rows])
        assert torch.equal(linear(other, x[-rows:], weight), alone[-rows:])


@pytest.mark.more
@dtypes
@loop("k", [33, 256])
@loop("num_experts", [1, 4, 9])
def test_experts_are_linear_layers_bit_for_bit(runtime: Runtime, num_experts: int, k: int, dtype: torch.dtype) -> None:
    """Few rows leave experts without any; many rows give one expert more than a tile."""
    weight, x = drawn(num_experts, 50, k, dtype=dtype), drawn(70, k, dtype=dtype, seed=1)
    ids = torch.randint(num_experts, (70,), generator=torch.Generator().manual_seed(2))
    expected = torch.cat([linear(runtime, x[row : row + 1], weight[ids[row]]) for row in range(70)])
    for rows in (1, 2, 3, 16, 70):
        assert torch.equal(experts(runtime, x[:rows], ids[:rows], weight), expected[:rows])


@dtypes
def test_all_rows_to_one_expert_and_rows_to_none(runtime: Runtime, dtype: torch.dtype) -> None:
    weight, x = drawn(3, 40, 64, dtype=dtype), drawn(40, 64, dtype=dtype, seed=1)
    ids = torch.full((40,), 1)
    assert torch.equal(experts(runtime, x, ids, weight), linear(runtime, x, weight[1]))
    ids[[3, 39]] = torch.tensor([3, -1])
    out = experts(runtime, x, ids, weight)
    assert (out[[3, 39]] == 7).all()
    assert torch.equal(out[:3], linear(runtime, x[:3], weight[1]))


def test_ids_may_be_strided(runtime: Runtime) -> None:
    weight, x = drawn(5, 8, 8, dtype=torch.float32), drawn(6, 8, dtype=torch.float32, seed=1)
    ids = torch.tensor([[4, 0], [3, 0], [2, 0], [1, 0], [0, 1], [4, 1]])
    assert torch.equal(experts(runtime, x, ids[:, 0], weight), experts(runtime, x, ids[:, 0].contiguous(), weight))


@dtypes
@loop("has_bias", [False, True])
@loop("rows", [1, 12, 13, 40])
@loop(("parts", "sizes"), [(1, (200, 7, 33, 64)), (2, (128, 64)), (3, (192, 96, 96))])
def test_layers_of_one_input_are_those_one_by_one(
    runtime: Runtime, parts: int, sizes: tuple[int, ...], dtype: torch.dtype, rows: int, has_bias: bool
) -> None:
    """The workers share all columns, so a layer may be one worker's, or both's, or each have a part of it."""
    x = drawn(rows, 100, dtype=dtype)
    weights = [drawn(n, 100, dtype=dtype, seed=n) for n in sizes]
    biases = [drawn(len(weight), dtype=dtype, seed=9) if has_bias else None for weight in weights]
    outs = [torch.full((rows, len(weight)), 7, dtype=dtype) for weight in weights]
    packed = runtime.pack(merge_weights(weights, parts, runtime.block_columns(TYPES[dtype])))
    views = [*outs, x, packed, *(bias for bias in biases if bias is not None)]
    runtime.call("linear", views, [*map(len, weights), 100, parts, TYPES[dtype]])
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        assert torch.equal(out, linear(runtime, x, weight, bias))


def gated(runtime: Runtime, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate x) * up x of sums in float32, rounded once."""
    halves = [linear(runtime, x, each, out=torch.empty(len(x), len(each))) for each in (gate, up)]
    out = x.new_empty(len(x), len(gate))
    runtime.call("silu_mul", [out, *halves])
    return out


@dtypes
@loop("k", [33, 256])
@loop("n", [1, 16, 40, 100])
def test_gated_layers_are_products_and_a_gate(runtime: Runtime, n: int, k: int, dtype: torch.dtype) -> None:
    """Bit for bit, whatever surrounds the result."""
    pair, x = drawn(2, n, k, dtype=dtype), drawn(max(ROWS), k, dtype=dtype, seed=1)
    packed = runtime.pack(merge_weights(list(pair), -(-n // 16), 16))
    for rows in ROWS:
        frame = torch.full((rows, n + 9), 7, dtype=dtype)
        runtime.call("gated_linear", [frame[:, 4 : n + 4], x[:rows], packed], [n, k, TYPES[dtype]])
        assert torch.equal(frame[:, 4 : n + 4], gated(runtime, x[:rows], *pair))
        frame[:, 4 : n + 4] = 7
        assert (frame == 7).all()


@dtypes
@loop("rows", [1, 3, 70])
def test_gated_experts_are_gated_layers(runtime: Runtime, rows: int, dtype: torch.dtype) -> None:
    """Of a matrix that holds both halves; a row whose expert is none stays."""
    weight, x = drawn(4, 2 * 40, 50, dtype=dtype), drawn(rows, 50, dtype=dtype, seed=1)
    ids = torch.randint(4, (rows,), generator=torch.Generator().manual_seed(2))
    ids[1::5] = -1
    out = torch.full((rows, 40), 7, dtype=dtype)
    packed = runtime.pack(merge_weights(weight.split(40, dim=1), 3, 16))
    runtime.call("gated_expert_linear", [out, x, ids, packed], [40, 50, TYPES[dtype]])
    for row, expert in enumerate(ids.tolist()):
        expected = (
            torch.full_like(out[:1], 7) if expert < 0 else gated(runtime, x[row : row + 1], *weight[expert].split(40))
        )
        assert torch.equal(out[row : row + 1], expected)


def in_bytes(
    runtime: Runtime, x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    out = torch.empty(len(x), len(weight))
    extra = [] if bias is None else [bias]
    packed = pack_quantized(weight, HugePages().take, load()) if packed is None else packed
    runtime.call("linear", [out, x, packed, *extra], [*weight.shape, 1, BYTES])
    return out


def assert_sums_in_bytes(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """As `assert_sums`; what is added up is 128 + 64 larger than the codes, and that is taken off again."""
    codes, scales = quantize(weight)
    exact = x.double() @ codes.double().T * scales
    size = x.double().abs() @ (codes.double().abs() + 2 * 192).T * scales
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert ((out.double() - exact).abs() <= size * (x.shape[1] + 4) * 2**-24).all()


@one_thread
@loop("k", SIZES)
@loop("n", SIZES)
def test_weights_of_a_byte(runtime: Runtime, n: int, k: int) -> None:
    """Any size and number of rows; a row has the same bits in any batch."""
    weight, x = drawn(n, k, dtype=torch.bfloat16), drawn(max(ROWS), k, dtype=torch.bfloat16, seed=1)
    packed = pack_quantized(weight, HugePages().take, load())
    alone = torch.cat([in_bytes(runtime, row[None], weight, packed=packed) for row in x])
    assert_sums_in_bytes(alone, x, weight)
    for rows in ROWS:
        assert torch.equal(in_bytes(runtime, x[:rows], weight, packed=packed), alone[:rows])


@pytest.mark.parametrize("rows", [1, 12, 40])
def test_weights_of_a_byte_wherever_linear_layers_are(runtime: Runtime, rows: int) -> None:
    """With a bias, several of one input, and experts; results in bf16 round once."""
    half = torch.bfloat16
    x, bias = drawn(rows, 100, dtype=half), drawn(50, dtype=half, seed=3)
    weights = drawn(4, 50, 100, dtype=half, seed=1)
    expected = [in_bytes(runtime, x, weight, bias) for weight in weights]
    assert_sums_in_bytes(expected[2], x, weights[2], bias)
    packed = pack_quantized(merge_weights(list(weights), 1, 16), HugePages().take, load())
    outs = [torch.empty(rows, 50, dtype=half) for _ in weights]
    runtime.call("linear", [*outs, x, packed, *[bias] * 4], [50, 50, 50, 50, 100, 1, BYTES])
    for out, alone in zip(outs, expected, strict=True):
        assert torch.equal(out, alone.to(half))
    halves = [in_bytes(runtime, x, weight) for weight in weights[:2]]
    product, alone = torch.empty(rows, 50, dtype=half), torch.empty(rows, 50, dtype=half)
    packed = pack_quantized(merge_weights(list(weights[:2]), 4, 16), HugePages().take, load())
    runtime.call("gated_linear", [product, x, packed], [50, 100, BYTES])
    runtime.call("silu_mul", [alone, *halves])
    assert torch.equal(product, alone)
    ids = torch.randint(4, (rows,), generator=torch.Generator().manual_seed(2))
    out = torch.empty(rows, 50, dtype=half)
    whole = pack_quantized(weights, HugePages().take, load())
    runtime.call("expert_linear", [out, x, ids, whole, bias.expand(4, 50).contiguous()], [50, 100, BYTES])
    assert torch.equal(out, torch.stack([expected[expert][row] for row, expert in enumerate(ids)]).to(half))


class StoredFormat(NamedTuple):
    """Eight bits in groups, as checkpoints may store them: with zero points."""

    group: int

    @property
    def type(self) -> int:
        return GroupedFormat(8, self.group).type

    def quantize(self, weight: Tensor) -> GroupedWeight:
        padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % self.group))
        groups = padded.unflatten(1, (-1, self.group))
        least, largest = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        scales = ((largest - least) / 255).clamp_min(1e-6).half().float()
        zeros = (-least / scales).round().clamp(0, 255)
        codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 255).flatten(1)
        return GroupedWeight(codes[:, : weight.shape[1]].byte(), scales, zeros.byte())

    def pack(self, weight: Tensor, take: Callable[[int], Tensor], _: Runtime) -> Tensor:
        return pack_matrices(self.quantize, GroupedFormat(8, self.group), weight, take)


class MinimaFormat(NamedTuple):
    """Groups of 32 with a minimum, in fp16 as the scale, as GGUF's Q4_1 and Q5_1 have them."""

    bits: int

    @property
    def type(self) -> int:
        return GroupedFormat(self.bits, 32, has_minima=True).type

    def quantize(self, weight: Tensor) -> GroupedWeight:
        groups = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
        minima, most = groups.amin(2).half(), 2**self.bits - 1
        scales = ((groups.amax(2) - minima) / most).clamp_min(1e-6).half().float()
        codes = ((groups - minima[..., None]) / scales[..., None]).round().clamp(0, most).flatten(1)
        return GroupedWeight(codes[:, : weight.shape[1]].byte(), scales, minima)

    def pack(self, weight: Tensor, take: Callable[[int], Tensor], _: Runtime) -> Tensor:
        return pack_matrices(self.quantize, GroupedFormat(self.bits, 32, has_minima=True), weight, take)


def pack_matrices(
    quantize: Callable[[Tensor], GroupedWeight], layout: GroupedFormat, weight: Tensor, take: Callable[[int], Tensor]
) -> Tensor:
    matrices = weight.reshape(-1, *weight.shape[-2:])
    packed = [layout.pack_rows(quantize(each), HugePages().take) for each in matrices]
    memory = take(sum(map(len, packed)))
    memory.view(torch.uint8).copy_(torch.cat([each.view(torch.uint8) for each in packed]))
    return memory


ROUNDED = [RoundedFormat(bits, group) for bits in (4, 8) for group in (32, 64, 128)]
GROUPED = [*ROUNDED, *map(StoredFormat, (32, 64, 128)), *map(MinimaFormat, (4, 8))]
few_bits = pytest.mark.parametrize("fmt", GROUPED, ids=str)
Format = RoundedFormat | StoredFormat | MinimaFormat


def in_groups(fmt: Format, weight: Tensor) -> GroupedWeight:
    return quantize_groups(weight, *fmt, load()) if isinstance(fmt, RoundedFormat) else fmt.quantize(weight)


def rounded_linear(
    runtime: Runtime,
    x: Tensor,
    weight: Tensor,
    fmt: Format,
    dtype: torch.dtype = torch.float32,
    packed: Tensor | None = None,
) -> Tensor:
    out = torch.empty(len(x), len(weight), dtype=dtype)
    packed = fmt.pack(weight, HugePages().take, load()) if packed is None else packed
    runtime.call("linear", [out, x, packed], [*weight.shape, 1, fmt.type])
    return out


@pytest.mark.more
@one_thread
@dtypes
@loop("k", [1, 100, 128, 300])
@loop("fmt", GROUPED)
def test_weights_in_groups(runtime: Runtime, fmt: Format, k: int, dtype: torch.dtype) -> None:
    """Near the product in torch; a row has the same bits in any batch."""
    weight, x = drawn(70, k, dtype=dtype), drawn(64, k, dtype=dtype, seed=1)
    weight[:5] += 3  # zero points that are not in the middle
    x[3] *= 1e4
    x[4], x[5, :50] = 0, 0
    packed = fmt.pack(weight, HugePages().take, load())
    alone = torch.cat([rounded_linear(runtime, row[None], weight, fmt, packed=packed) for row in x])
    quantized = in_groups(fmt, weight)
    size = x.float().abs() @ quantized.dequantized.abs().T
    if k > 64:  # otherwise groups of several sizes are one group
        assert ((alone - grouped_linear(x, quantized)).abs() <= size * 1e-6).all()
    exact = x.double() @ quantized.dequantized.double().T
    bound = x.double().abs().amax(1, keepdim=True) / 65534 * quantized.dequantized.double().abs().sum(1)
    assert ((alone.double() - exact).abs() <= bound * 1.001 + size.double() * 1e-6 + 1e-9).all()
    for rows in (*range(1, 18), 31, 32, 33, 47, 48, 49, 63, 64):
        assert torch.equal(rounded_linear(runtime, x[:rows], weight, fmt, packed=packed), alone[:rows])


@few_bits
def test_the_largest_codes_do_not_overflow(runtime: Runtime, fmt: Format) -> None:
    weight, x = torch.full((40, 300), 7.0), torch.full((13, 300), -3.0)
    weight[1::2] = -7.0
    signs = torch.ones(40)
    signs[1::2] = -1
    assert torch.allclose(rounded_linear(runtime, x, weight, fmt=fmt), (-6300 * signs).expand(13, 40), rtol=1e-4)


@few_bits
def test_a_value_that_is_no_number_is_no_code(runtime: Runtime, fmt: Format) -> None:
    weight, x = drawn(40, 64, dtype=torch.float32), drawn(3, 64, dtype=torch.float32, seed=1)
    x[0, 5], x[1, 6] = float("nan"), float("inf")
    out = rounded_linear(runtime, x, weight, fmt=fmt)
    assert not out[:2].isfinite().any()
    assert out[2].isfinite().all()


@pytest.mark.one_case
@one_thread
@few_bits
@dtypes
@loop("rows", [1, 12, 40])
def test_weights_of_few_bits_wherever_linear_layers_are(
    runtime: Runtime, rows: int, dtype: torch.dtype, fmt: Format
) -> None:
    """Several layers of one input, with a gate, and experts."""
    x, weights = drawn(rows, 100, dtype=dtype), drawn(4, 50, 100, dtype=dtype, seed=1)
    expected = [rounded_linear(runtime, x, weight, fmt, dtype) for weight in weights]
    packed = fmt.pack(merge_weights(list(weights), 1, 32), HugePages().take, load())
    outs = [torch.empty(rows, 50, dtype=dtype) for _ in weights]
    runtime.call("linear", [*outs, x, packed], [50, 50, 50, 50, 100, 1, fmt.type])
    for out, alone in zip(outs, expected, strict=True):
        assert torch.equal(out, alone)
    product, alone = torch.empty(rows, 50, dtype=dtype), torch.empty(rows, 50, dtype=dtype)
    packed = fmt.pack(merge_weights(list(weights[:2]), 4, 16), HugePages().take, load())
    runtime.call("gated_linear", [product, x, packed], [50, 100, fmt.type])
    runtime.call("silu_mul", [alone, *(rounded_linear(runtime, x, each, fmt, torch.float32) for each in weights[:2])])
    assert torch.equal(product, alone)
    ids = torch.randint(4, (rows,), generator=torch.Generator().manual_seed(2))
    out = torch.empty(rows, 50, dtype=dtype)
    whole = fmt.pack(weights, HugePages().take, load())
    runtime.call("expert_linear", [out, x, ids, whole], [50, 100, fmt.type])
    assert torch.equal(out, torch.stack([expected[expert][row] for row, expert in enumerate(ids)]))


@few_bits
@dtypes
def test_rows_of_an_embedding_of_few_bits(dtype: torch.dtype, fmt: Format) -> None:
    weight, ids = drawn(70, 100, dtype=dtype), torch.tensor([0, 69, 33, 70, -1, 0])
    out = torch.empty(6, 100, dtype=dtype)
    packed = fmt.pack(weight, HugePages().take, load())
    table = in_groups(fmt, weight).dequantized.to(dtype)
    load().call("grouped_embedding", [out, packed, ids], [70, 100, fmt.type])
    assert torch.equal(out, torch.cat([table[[0, 69, 33]], torch.zeros(2, 100, dtype=dtype), table[:1]]))
    for views, ints in (
        ([out, packed, ids], [70, 99]),
        ([out, packed, ids], [97, 100]),
        ([out, packed[:-1], ids], [70, 100]),
        ([out, packed, ids.float()], [70, 100]),
        ([out, packed, ids], [70]),
    ):
        with pytest.raises(ConfigError):
            load().call("grouped_embedding", views, [*ints, fmt.type])


def fp8_matrix(n: int, k: int, group: int, seed: int, *, by_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Any finite codes, scales [N, groups], equal in all rows if not `by_row`, and the dequantized weight."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k), generator=generator).byte()
    codes[codes % 128 == 127] = 128  # not NaN, but -0
    scales = torch.rand(n, -(-k // group), generator=generator) * 0.01 + 1e-5
    scales = scales if by_row else scales[:1].repeat(n, 1)
    dense = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(group, 1)[:, :k]
    return codes, scales, dense


@dtypes
@loop("by_row", [False, True])
@loop(("n", "k", "group"), [(1, 1, 32), (100, 300, 128), (64, 48, 32), (192, 100, 64)])
def test_weights_in_fp8_are_the_dequantized_ones_bit_for_bit(
    runtime: Runtime, n: int, k: int, group: int, by_row: bool, dtype: torch.dtype
) -> None:
    """Also with activations in float32 where products with bf16 take these."""
    codes, scales, dense = fp8_matrix(n, k, group, 1, by_row=by_row)
    fmt, bias = Fp8Format(group, dtype), drawn(n, dtype=dtype, seed=3)
    packed = fmt.pack_rows(codes, scales, HugePages().take)
    assert runtime.takes_floats(fmt.type) == runtime.takes_floats(TYPES[dtype])
    for of_rows in {dtype, torch.float32} if runtime.takes_floats(fmt.type) else {dtype}:
        x = drawn(max(ROWS), k, dtype=of_rows, seed=2)
        for rows in [*ROWS, 3, 8, 12, 13]:
            out = torch.full((rows, n), 7, dtype=of_rows)
            runtime.call("linear", [out, x[:rows], packed, bias], [n, k, 1, fmt.type])
            assert torch.equal(out, linear(runtime, x[:rows], dense.to(dtype), bias))


@dtypes
@loop("rows", [1, 12, 40])
@loop("by_row", [False, True])
def test_weights_in_fp8_wherever_linear_layers_are(
    runtime: Runtime, by_row: bool, rows: int, dtype: torch.dtype
) -> None:
    """Several layers of one input, and with a gate."""
    matrices = [fp8_matrix(50, 100, 32, seed, by_row=by_row) for seed in range(4)]
    fmt, x = Fp8Format(32, dtype), drawn(rows, 100, dtype=dtype)
    codes, scales, dense = zip(*matrices, strict=True)
    merged = [merge_weights(each, 1, 32) for each in (codes, scales)]
    outs = [torch.empty(rows, 50, dtype=dtype) for _ in matrices]
    packed = fmt.pack_rows(*merged, HugePages().take)
    runtime.call("linear", [*outs, x, packed], [50, 50, 50, 50, 100, 1, fmt.type])
    for out, weight in zip(outs, dense, strict=True):
        assert torch.equal(out, linear(runtime, x, weight.to(dtype)))
    out, merged = torch.empty(rows, 50, dtype=dtype), [merge_weights(each[:2], 4, 16) for each in (codes, scales)]
    runtime.call("gated_linear", [out, x, fmt.pack_rows(*merged, HugePages().take)], [50, 100, fmt.type])
    assert torch.equal(out, gated(runtime, x, dense[0].to(dtype), dense[1].to(dtype)))


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-110, 2.0**101, 2.0**118])
def test_weights_in_fp8_with_extreme_scales(runtime: Runtime, scale: float) -> None:
    """Some weights are too small to be multiplied as bf16, or infinite; the others have their bits."""
    codes = torch.arange(256).byte().repeat(64, 1)
    codes[codes % 128 == 127] = 0
    scales = torch.full((64, 2), scale)
    dense = (codes.view(torch.float8_e4m3fn).float() * scale).bfloat16()
    x = torch.eye(256).bfloat16()
    packed, out = Fp8Format(128).pack_rows(codes, scales, HugePages().take), torch.empty(256, 64).bfloat16()
    runtime.call("linear", [out, x, packed], [64, 256, 1, Fp8Format(128).type])
    assert torch.equal(out.view(torch.int16), linear(runtime, x, dense).view(torch.int16))


def test_packed_weights_start_at_a_cache_line(runtime: Runtime) -> None:
    assert runtime.pack(torch.ones(3, 5)).data_ptr() % 64 == 0


def test_refuses_what_no_kernel_takes(runtime: Runtime) -> None:
    weight, x = drawn(8, 8, dtype=torch.float32), drawn(2, 8, dtype=torch.float32)
    packed, out = runtime.pack(weight), torch.empty(2, 8)
    both = runtime.pack(merge_weights([weight, weight], 1, 32))
    for views, ints in (
        ([out, x.bfloat16(), packed], [8, 8, 1, 0]),  # another type than the weights
        ([out.long(), x, packed], [8, 8, 1, 0]),
        ([out, x, packed], [8, 8, 1, 3]),  # a type that weights do not have
        ([out, x, packed], [8, 7, 1, 0]),
        ([out[:1], x, packed], [8, 8, 1, 0]),
        ([out, x.T.contiguous().T, packed], [8, 8, 1, 0]),
        ([out, x, packed[:-1]], [8, 8, 1, 0]),
        ([out, x, packed, torch.empty(7)], [8, 8, 1, 0]),
        (
            [out, x, pack_quantized(weight.bfloat16(), HugePages().take, load())],
            [8, 8, 1, BYTES],
        ),  # are for rows of bf16
        ([out, x.bfloat16(), packed], [8, 8, 1, BYTES]),
        ([out, out, x, packed], [8, 8, 8, 1, 0]),  # two layers and the weights of one
        ([out, out, x, both, torch.empty(8)], [8, 8, 8, 1, 0]),
        ([out, out, x, both], [8, 7, 8, 1, 0]),
        ([out, x, packed], [8, 8, 2, 0]),  # parts of no whole blocks, and no parts
        ([out, x, packed], [8, 8, 0, 0]),
    ):
        with pytest.raises(ConfigError):
            runtime.call("linear", views, ints)
    halves, ids = runtime.pack(merge_weights([weight, weight], 1, 16)), torch.zeros(2, dtype=torch.int64)
    for views, ints in (
        ([out, x, packed[:-1]], [8, 8, 0]),
        ([out, x, halves], [8, 7, 0]),
        ([out, x, halves], [7, 8, 0]),
        ([out.long(), x, halves], [8, 8, 0]),
        ([out, x, halves, torch.empty(8)], [8, 8, 0]),
    ):
        with pytest.raises(ConfigError):
            runtime.call("gated_linear", views, ints)
        with pytest.raises(ConfigError):
            runtime.call("gated_expert_linear", [*views[:2], ids, *views[2:]], ints)
    with pytest.raises(ConfigError):
        runtime.pack(weight.double())
