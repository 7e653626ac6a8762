"""csrc/vectors.h and what is written with it: the same values on every kind of processor, and sources that all of them
compile."""

import itertools
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from compiled import made_once
from packed import random_k_quant
from quick import others_slow
from reference_products import grouped_linear, kquant_linear

import nextn.runtime.native
from nextn.checkpoint.gguf_file import BLOCK_TYPES, K_QUANTS
from nextn.runtime.native.abi import load
from nextn.runtime.native.grouped import (
    GroupedFormat,
    GroupedWeight,
    KQuantFormat,
    quantize_groups,
)

SOURCES = Path(nextn.runtime.native.__file__).parent / "csrc"
FLAGS = ["-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-I", str(SOURCES)]
IS_X86 = platform.machine() == "x86_64"
# Registers of 16, 32 and 64 bytes, these with products of bf16, and tiles. Compiled everywhere; what this machine lacks
# does not run here.
KINDS = ["x86-64", "x86-64-v3", "skylake-avx512", "cooperlake", "sapphirerapids"] if IS_X86 else ["native"]
FLAG_OF = {"x86-64": "sse2", "x86-64-v3": "avx2", "skylake-avx512": "avx512f", "cooperlake": "avx512_bf16"}

PROGRAM = """
#include <cstdio>
#include "attention_lanes.h"
#include "sixteen.h"
using namespace nextn;

int main() {
  float in[48];
  uint16_t halves[16];
  if (fread(in, 4, 48, stdin) != 48) return 1;
  const Sixteen a = sixteen(in), b = sixteen(in + 16), c = sixteen(in + 32);
  float out[12][16] = {};
  put(halves, a);
  put(out[0], sixteen(halves));
  put(out[1], rounded<uint16_t>(a));
  put(out[2], chosen(a > b, a, b));
  put(out[3], larger(a, b));
  put(out[4], product(a, b) + c);
  put(out[5], rotated(a, 5));
  put(out[6], floats_of(bits_of(a) & 0x7FFFFFFF));
  put(out[7], (a + b) * c - a / b);
  put(out[8], fused(a, b, c));
  put(out[9], exp2_of(a));
  put(out[10], silu_of(a));
  const Lanes four[4] = {a, b, c, a * b};
  for (int i = 0; i < 4; ++i) out[11][i] = lane_sum(four[i]);
  return fwrite(out, 4, 12 * 16, stdout) != 12 * 16;
}
"""


QUANTIZED_PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "rounded.h"
using namespace nextn;

nextn::Op::Op(const char*, Select) {}  // nothing is looked up by name

int main(int, char** words) {
  constexpr int64_t kRows = 13, kN = 70;
  const int64_t type = std::atoi(words[1]), kK = std::atoi(words[2]);
  const int64_t bytes = packed_bytes(type, kN, kK), blocks = pieces(kN, kFewBitsColumns);
  std::vector<float> x(kRows * kK), out(kRows * kN);
  std::vector<char> packed(bytes);
  if (int64_t(fread(packed.data(), 1, bytes, stdin)) != bytes) return 1;
  if (fread(x.data(), 4, x.size(), stdin) != x.size()) return 1;
  const View in{reinterpret_cast<char*>(x.data()), F32, 2, {kRows, kK}, {kK, 1}};
  const View to{reinterpret_cast<char*>(out.data()), F32, 2, {kRows, kN}, {kN, 1}};
  RoundedRows rows;
  Product product{};
  product.x = &in, product.out = &to, product.num_rows = kRows, product.n = kN, product.k = kK;
  product.packed = packed.data(), product.type = type, product.rounded_rows = &rows;
  product.scales = reinterpret_cast<const float*>(packed.data() + blocks * block_bytes(type, kK));
  rows.fill(product);
  (is_kquant(type) ? multiply_kquants : multiply_grouped)(product, 0, blocks);
  return fwrite(out.data(), 4, out.size(), stdout) != out.size();
}
"""


def runs_here(kind: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text().split() if IS_X86 else []
    return kind == "native" or FLAG_OF.get(kind, "amx_bf16") in flags


HERE = [kind for kind in KINDS if runs_here(kind)]


def compiled(*words: object) -> None:
    """Run the compiler; raise with what it said."""
    done = subprocess.run([os.environ.get("CXX", "g++"), *FLAGS, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


def program(text: str, *words: object, sources: Sequence[Path] = ()) -> Path:
    """The program compiled with these options, made once per version of our sources."""

    def make(folder: Path) -> None:
        (folder / "main.cpp").write_text(text)
        compiled(*words, "-o", folder / "main", folder / "main.cpp", *sources)

    return made_once(make, text, *words, *(path.name for path in sources)) / "main"


@pytest.mark.parametrize("kind", others_slow(KINDS))
def test_every_kind_of_processor_compiles(kind):
    """Catches code that only machines without these instructions were tried on."""
    files = [path for path in sorted(SOURCES.glob("*.cpp")) if "#if" in path.read_text()]
    assert len(files) >= 4
    compiled(f"-march={kind}", "-fsyntax-only", *files, SOURCES / "attention_rows.cpp")


@pytest.fixture(scope="module")
def given():
    draws = torch.Generator().manual_seed(0)
    values = 3 * torch.randn(3, 16, generator=draws)
    # Ties between two bf16 values, to even down and up; zeros of both signs; what becomes infinite.
    special = [1.00390625, 1.01171875, -1.00390625, 0.0, -0.0, 3.4e38]
    values[0, : len(special)] = torch.tensor(special)
    return values


@pytest.mark.parametrize("kind", others_slow(HERE, HERE[-1]))
def test_sixteen_at_once_are_sixteen_alone(kind, given):
    main = program(PROGRAM, f"-march={kind}", "-O3")
    output = subprocess.run([main], input=given.numpy().tobytes(), capture_output=True, check=True).stdout
    found = torch.frombuffer(bytearray(output), dtype=torch.float32).reshape(12, 16)
    a, b, c = given
    exact = {
        0: a.bfloat16().float(),
        1: a.bfloat16().float(),
        2: torch.where(a > b, a, b),
        3: torch.where(a > b, a, b),
        4: a * b + c,  # rounds twice, as torch does
        5: a.roll(-5),
        6: a.abs(),
    }
    for place, values in exact.items():
        assert torch.equal(found[place], values), place
        assert torch.equal(found[place].signbit(), values.signbit()), place
    wide = given.double()
    near = {
        7: (wide[0] + wide[1]) * wide[2] - wide[0] / wide[1],
        8: wide[0] * wide[1] + wide[2],
        10: torch.nn.functional.silu(wide[0]),
    }
    for place, values in near.items():
        torch.testing.assert_close(found[place], values.float(), rtol=3e-6, atol=3e-6)
    small = a.abs() < 100  # its range ends at 128
    torch.testing.assert_close(found[9][small].double(), wide[0][small].exp2(), rtol=1e-6, atol=0)
    sums = torch.stack([wide[0], wide[1], wide[2], wide[0] * wide[1]]).sum(1)
    torch.testing.assert_close(found[11][:4], sums.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", others_slow(HERE, HERE[-1]))
def test_no_number_stays_none(kind, given):
    """NaN goes through roundings and choices; the lane beside it is not affected."""
    main = program(PROGRAM, f"-march={kind}", "-O2")
    values = given.clone()
    values[0, 7] = float("nan")
    output = subprocess.run([main], input=values.numpy().tobytes(), capture_output=True, check=True).stdout
    found = torch.frombuffer(bytearray(output), dtype=torch.float32).reshape(12, 16)
    for place in (0, 1, 4, 6, 7, 8, 9, 10):
        assert found[place].isnan().nonzero().tolist() == [[7]], place
    assert found[2][7] == found[3][7] == given[1, 7]


@pytest.fixture(scope="module", params=others_slow(HERE, HERE[0]))
def products(request):
    """The products of rows [13, K] with packed weights [70, K], by the kernels for one kind of processor.

    With it, whether they have the bits of this processor's: if both add products without rounding these first.
    """
    sources = [SOURCES / f"{name}.cpp" for name in ("grouped", "kquants", "rounded")]
    fuses = request.param != "x86-64" or runs_here("x86-64-v3")
    more = ["-mfma"] if fuses and request.param == "x86-64" else []
    main = program(QUANTIZED_PROGRAM, f"-march={request.param}", *more, "-O2", sources=sources)

    def multiply(x, weight_type, packed):
        given = packed.view(torch.uint8).numpy().tobytes() + x.numpy().tobytes()
        command = [main, str(weight_type), str(x.shape[1])]
        output = subprocess.run(command, input=given, capture_output=True, check=True).stdout
        return torch.frombuffer(bytearray(output), dtype=torch.float32).reshape(13, 70)

    return multiply, fuses


def take(size):
    return torch.zeros(size, dtype=torch.bool)


@pytest.mark.slow
def test_products_of_few_bits(products):
    """Of eight and four bits, with the largest codes."""
    (multiply, fuses), draws = products, torch.Generator().manual_seed(0)
    weight, x = torch.randn(70, 300, generator=draws), torch.randn(13, 300, generator=draws)
    weight[3], weight[4], x[5], x[6] = 7.0, -7.0, -9.0, 9.0
    for bits, group in itertools.product((4, 8), (32, 64, 128)):
        quantized, layout = quantize_groups(weight, 4, group, load()), GroupedFormat(bits, group)
        if bits == 8:  # all codes, with zero points at both ends and between
            codes = torch.randint(256, weight.shape, generator=draws, dtype=torch.uint8)
            zeros = torch.randint(256, quantized.zeros.shape, generator=draws, dtype=torch.uint8)
            codes[3], codes[4], zeros[3], zeros[4] = 255, 0, 0, 255
            quantized = GroupedWeight(codes, (quantized.scales / 16).half().float(), zeros)
        found, here = multiply(x, layout.type, packed := layout.pack_rows(quantized, take)), torch.empty(13, 70)
        torch.testing.assert_close(found, grouped_linear(x, quantized), rtol=1e-5, atol=1e-4 if bits == 4 else 1e-3)
        load().call("linear", [here, x, packed], [70, 300, 1, layout.type])
        assert torch.equal(found, here) or not fuses


@pytest.mark.parametrize("kind", K_QUANTS)
def test_products_of_k_quants(kind, products):
    """With the largest codes and factors, too."""
    (multiply, fuses), draws = products, torch.Generator().manual_seed(0)
    weight, x = random_k_quant(kind, 70, 768), torch.randn(13, 768, generator=draws)
    weight.codes[3], weight.codes[4], x[5], x[6] = 2 ** BLOCK_TYPES[kind].bits - 1, 0, -9.0, 9.0
    weight.group_scales[3] = -128 if kind == "Q6_K" else 63
    layout, here = KQuantFormat(kind), torch.empty(13, 70)
    found = multiply(x, layout.type, packed := layout.pack_rows(weight, take))
    expected = kquant_linear(x, weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.std()))
    load().call("linear", [here, x, packed], [70, 768, 1, layout.type])
    assert torch.equal(found, here) or not fuses
