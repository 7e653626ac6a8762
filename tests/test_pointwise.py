"""Elementwise native ops against torch: bit for bit where one rounding decides, else within some ulp."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import FLOATS, empty, operand, same, seeds, shapes, values
from quick import loop
from torch import Tensor

from nextn.errors import ConfigError
from nextn.runtime.native.abi import Runtime, load

few = settings(max_examples=25, deadline=None)
DTYPES = (*FLOATS, torch.int64, torch.bool)
# What one fp32 rounding of the exact result leaves, or one of bf16.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return load()


def run(op: str, out: Tensor, *inputs: Tensor, ints: tuple[int, ...] = (), reals: tuple[float, ...] = ()) -> Tensor:
    load().call(op, [out, *inputs], ints, reals)
    return out


EXACT: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {
    "add": (torch.add, (1.0,)),
    "sub": (torch.sub, (1.0,)),
    "mul": (torch.mul, ()),
    "div": (torch.div, ()),
    "minimum": (torch.minimum, ()),
    "maximum": (torch.maximum, ()),
}
COMPARE = {name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


@pytest.mark.one_case
@pytest.mark.parametrize("op", EXACT)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@few
@given(shape=shapes, seed=seeds, special=st.booleans())
def test_arithmetic_is_torch_bit_for_bit(op, dtype, shape, seed, special):
    generator = torch.Generator().manual_seed(seed)
    a, b = (operand(shape, dtype, generator, special) for _ in range(2))
    function, reals = EXACT[op]
    assert same(run(op, empty(shape, dtype, generator), a, b, reals=reals), function(a, b))


@pytest.mark.one_case
@pytest.mark.parametrize("op", [*EXACT, *COMPARE])
@few
@given(shape=shapes, seed=seeds, dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3))
def test_mixed_types_compute_wide_and_round_once(op, shape, seed, dtypes):
    """In fp32 if anything is floating, in int64 else; the out type is asked of the last step only."""
    generator = torch.Generator().manual_seed(seed)
    function, reals = EXACT.get(op) or (COMPARE[op], ())
    wide = torch.float32 if any(dtype.is_floating_point for dtype in dtypes) else torch.int64
    a, b = (operand(shape, dtype, generator) for dtype in dtypes[:2])
    out = empty(shape, dtypes[2], generator)
    if op == "div" and wide is torch.int64:
        with pytest.raises(ConfigError):
            run(op, out, a, b)
        return
    expected = function(a.to(wide), b.to(wide))
    whole = dtypes[2] is torch.int64 and expected.is_floating_point()
    expected = torch.where(expected.isfinite(), expected, 0) if whole else expected
    actual = run(op, out, a, b, reals=reals)
    finite = expected.isfinite() & (b != 0 if op == "div" and whole else True)
    assert same(actual.where(finite, 0), expected.to(dtypes[2]).where(finite, 0))


@pytest.mark.one_case
@pytest.mark.parametrize("op", [*EXACT, *COMPARE])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@few
@given(shape=shapes, seed=seeds, scalar=st.sampled_from((0.3, -2.0, 0.0, 1e-3, math.inf)))
def test_scalar_operands_keep_their_digits(op, dtype, shape, seed, scalar):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, dtype, generator, special=True)
    function, reals = EXACT.get(op) or (COMPARE[op], ())
    expected = function(a.float(), torch.tensor(scalar, dtype=torch.float32))
    actual = run(op, empty(shape, dtype, generator), a, reals=(scalar, *reals))
    assert same(actual, expected.to(dtype))


@few
@given(shape=shapes, seed=seeds, alpha=st.sampled_from((2.0, -0.5, 3.0)))
def test_add_and_sub_scale_their_second_operand(shape, seed, alpha):
    generator = torch.Generator().manual_seed(seed)
    a, b = (operand(shape, torch.bfloat16, generator) for _ in range(2))
    out = empty(shape, torch.bfloat16, generator)
    assert same(run("add", out, a, b, reals=(alpha,)), torch.add(a.double(), b.double(), alpha=alpha).to(out.dtype))
    assert same(run("sub", out, a, reals=(0.25, alpha)), (a.double() - alpha * 0.25).to(out.dtype))


@pytest.mark.parametrize("op", ["bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "remainder"])
@few
@given(shape=shapes, seed=seeds)
def test_whole_number_ops(op, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (operand(shape, torch.int64, generator) for _ in range(2))
    b = torch.where(b == 0, 7, b)
    assert same(run(op, empty(shape, torch.int64, generator), a, b), getattr(torch, op)(a, b))
    if op.startswith("bitwise"):
        a, b = a > 0, b > 0
        assert same(run(op, empty(shape, torch.bool, generator), a, b), getattr(torch, op)(a, b))


@pytest.mark.parametrize("op", ["floor_divide", "remainder"])
@few
@given(shape=shapes, seed=seeds)
def test_float_division_rounds_down(op, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (operand(shape, torch.float32, generator) for _ in range(2))
    assert same(run(op, empty(shape, torch.float32, generator), a, b), getattr(torch, op)(a, b))


def test_division_of_whole_numbers_by_zero_does_not_trap():
    a, zero = torch.tensor([5, -(2**63)]), torch.tensor([0, -1])
    for op in ("floor_divide", "remainder"):
        assert run(op, torch.empty_like(a), a, zero)[0] == 0


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh")},
    **{name: getattr(torch, name) for name in ("neg", "abs", "sign", "relu", "cos", "sin")},
    "silu": lambda x: x * x.sigmoid(),
    "log_sigmoid": F.logsigmoid,
}
ONE_ROUNDING = ("neg", "abs", "sign", "relu", "sqrt", "reciprocal")


@pytest.mark.one_case
@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@few
@given(shape=shapes, seed=seeds)
def test_functions(op, dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, dtype, generator)
    expected = UNARY[op](a.double())
    actual = run(op, empty(shape, dtype, generator), a)
    if op in ONE_ROUNDING:
        assert same(actual, expected.to(dtype))
    near = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=near, atol=near * 1e-1, equal_nan=True)


DEFINED = ("gelu", "softplus", "silu")


@loop("op", [*UNARY, "gelu", "softplus"])
def test_functions_of_special_values(op):
    a = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 200.0, -200.0, 88.7, -103.5, 3e38, -3e38]
    )
    a = a[a.abs() < 1e15] if op in ("sin", "cos") else a
    more = {"gelu": {"ints": (0,)}, "softplus": {"reals": (1.0, 20.0)}}.get(op, {})
    by_definition = {
        "gelu": lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),
        "silu": F.silu,
        "softplus": F.softplus,
    }
    expected = (by_definition.get(op) or UNARY[op])(a)
    actual = run(op, torch.empty_like(a), a, **more)
    assert torch.equal(actual.isnan(), expected.isnan())
    torch.testing.assert_close(actual, expected, rtol=3e-6, atol=1e-45, equal_nan=True)


def test_exp_over_its_whole_range():
    """Within 2 ulp, exactly 0 below the subnormals and inf above the range."""
    x = torch.linspace(-110, 95, 200_001)
    actual, exact = run("exp", torch.empty_like(x), x).double(), x.double().exp()
    normal = (exact > 1.2e-38) & (exact < 3.4e38)
    assert ((actual - exact).abs() / exact)[normal].max() < 2 * 2**-23
    assert (actual[exact > 3.41e38] == math.inf).all()
    assert (actual[exact < 7e-46] == 0).all()


@pytest.mark.parametrize("op", ["sin", "cos"])
def test_angles_of_far_positions(op):
    x = torch.arange(0, 2_000_000, 37).float() * 1.0173
    assert (run(op, torch.empty_like(x), x).double() - UNARY[op](x.double())).abs().max() < 2e-7


@pytest.mark.parametrize("op", ["gelu_erf", "gelu_tanh", "softplus", "softplus_beta"])
@few
@given(shape=shapes, seed=seeds)
def test_functions_with_parameters(op, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, torch.float32, generator)
    name, ints, reals, expected = {
        "gelu_erf": ("gelu", (0,), (), F.gelu(a.double())),
        "gelu_tanh": ("gelu", (1,), (), F.gelu(a.double(), approximate="tanh")),
        "softplus": ("softplus", (), (1.0, 20.0), F.softplus(a.double())),
        "softplus_beta": ("softplus", (), (2.5, 5.0), F.softplus(a.double(), 2.5, 5.0)),
    }[op]
    actual = run(name, empty(shape, torch.float32, generator), a, ints=ints, reals=reals)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=6e-7)  # 1 + erf cancels


@few
@given(shape=shapes, seed=seeds, exponent=st.sampled_from((2.0, 3.0, 0.5, -0.5, 1.0, -1.0, 1.7)))
def test_pow(shape, seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, torch.float32, generator).abs() + 0.1
    actual = run("pow", empty(shape, torch.float32, generator), a, reals=(exponent,))
    torch.testing.assert_close(actual.double(), a.double() ** exponent, rtol=5e-7, atol=0)
    whole = operand(shape, torch.int64, generator)
    assert same(run("pow", empty(shape, torch.int64, generator), whole, reals=(5.0,)), whole**5)


@few
@given(shape=shapes, seed=seeds, dtype=st.sampled_from(DTYPES[:3]))
def test_clamp(shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, dtype, generator, special=True)
    out = empty(shape, dtype, generator)
    assert same(run("clamp", out, a, reals=(-2.0, 3.0)), a.clamp(-2, 3))
    assert same(run("clamp", out, a, reals=(-math.inf, 3.0)), a.clamp(max=3))


@few
@given(shape=shapes, seed=seeds)
def test_bitwise_not(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    for dtype in (torch.int64, torch.bool):
        a = operand(shape, dtype, generator)
        assert same(run("bitwise_not", empty(shape, dtype, generator), a), ~a)


@pytest.mark.one_case
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@few
@given(shape=shapes, seed=seeds, special=st.booleans())
def test_copy_converts_as_torch(source, target, shape, seed, special):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, source, generator, special and target is not torch.int64)
    assert same(run("copy", empty(shape, target, generator), a), a.to(target))


def test_rounding_to_bf16_is_torchs_for_all_upper_halves():
    """Every bf16 with lower halves around the tie."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        a = (upper | lower).view(torch.float32)
        assert same(run("copy", torch.empty_like(a, dtype=torch.bfloat16), a), a.to(torch.bfloat16))


@few
@given(shape=shapes, seed=seeds, dtype=st.sampled_from(DTYPES))
def test_fill_where_and_masked_fill(shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    condition = operand(shape, torch.bool, generator)
    a, b = (operand(shape, dtype, generator, special=True) for _ in range(2))
    out = empty(shape, dtype, generator)
    assert same(run("where", out, condition, a, b), torch.where(condition, a, b))
    assert same(run("masked_fill", out, a, condition, reals=(3.0,)), a.masked_fill(condition, 3))
    if dtype.is_floating_point:
        assert same(run("masked_fill", out, a, condition, reals=(-math.inf,)), a.masked_fill(condition, -math.inf))
    assert same(run("fill", out, reals=(0.5,)), torch.full_like(out, 0.5 if dtype is not torch.int64 else 0))


def test_large_whole_numbers_do_not_pass_through_floats():
    a = torch.tensor([2**62 + 1, -(2**62) - 1, 2**53 + 1])
    for op in ("copy", "neg"):
        assert same(run(op, torch.empty_like(a), a), a if op == "copy" else -a)
    one = torch.ones_like(a)
    assert torch.equal(run("add", torch.empty_like(a), a, one, reals=(1.0,)), a + 1)
    assert torch.equal(run("where", torch.empty_like(a), a > 0, a, one), torch.where(a > 0, a, one))


def test_in_place():
    a = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = F.silu(a) * a
    run("mul", a, run("silu", torch.empty_like(a), a), a)
    assert same(a, expected)


@loop("op", ["silu", "exp", "tanh", "log_sigmoid", "cos"])
@loop("dtype", FLOATS, ids=str)
def test_a_value_does_not_depend_on_its_place(op, dtype):
    """Vector bodies, tails, strided and converted runs give the same bits."""
    a = values((16, 67), dtype, torch.Generator().manual_seed(1))
    whole = run(op, torch.empty_like(a), a)
    column = run(op, torch.empty_like(a.T).T, a)
    single = torch.stack([run(op, torch.empty(1, dtype=dtype), a[row, 5:6])[0] for row in range(16)])
    assert torch.equal(column, whole)
    assert torch.equal(single, whole[:, 5])


def test_shares_of_all_workers_cover_large_tensors():
    team = Runtime(load().library, 3)
    a = torch.randn(5, 40_000, generator=torch.Generator().manual_seed(2))
    out = torch.empty_like(a)
    team.call("add", [out, a, a[:1].expand(5, -1)], reals=[1.0])
    assert torch.equal(out, a + a[:1])
    out = torch.empty(40_000, 5).T
    team.call("copy", [out, a])
    assert torch.equal(out, a)


@loop(
    ("op", "shapes", "reals"),
    [
        ("add", [(2, 3), (2, 3), (3,)], [1.0]),
        ("add", [(2, 3), (2, 3), (2, 3)], []),
        ("mul", [(2, 3), (2, 4)], [1.0]),
        ("mul", [(2, 3)], [1.0]),
        ("exp", [(2, 3), (3, 2)], []),
        ("where", [(2,), (2,), (2,)], []),
        ("bitwise_and", [(2,), (2,), (2,)], []),
        ("clamp", [(2,), (2,)], [1.0]),
        ("gelu", [(2,), (2,)], []),
    ],
)
def test_refused(runtime, op, shapes, reals):
    with pytest.raises(ConfigError, match=op):
        runtime.call(op, [torch.zeros(shape) for shape in shapes], [], reals)
