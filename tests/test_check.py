"""csrc/check.h: a debug build ends at the first access outside a view, and says which; a release build has none."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

import nextn.runtime.native

SOURCES = Path(nextn.runtime.native.__file__).parent / "csrc"
PROGRAM = """
#include <cstdlib>
#include "attention_lanes.h"
#include "product.h"
#include "strided.h"
using namespace nextn;

nextn::Op::Op(const char*, Select) {}

int main(int, char** words) {
  alignas(64) static float memory[4096];
  const auto view = [&](int64_t rows, int64_t columns, int64_t step = 1) {
    return View{reinterpret_cast<char*>(memory), F32, 2, {rows, columns}, {columns * step, step}};
  };
  const Worker worker{0, 1, nullptr};
  Call call;
  call.views = {view(4, 8), view(4, 8)};
  NEXTN_CHECKED_OP("tested");
  Product product{};
  product.x = &call.views[0], product.out = &call.views[1], product.num_rows = 4, product.n = 8, product.k = 8;
  switch (std::atoi(words[1])) {
    case 0:
      return element(call.views[0], 4, 0) == nullptr;
    case 1:
      return data<int64_t>(call.views[0]) == nullptr;
    case 2:
      call.views[1].size[0] = 3;
      return each_row<2>(call, worker, [](char* const*) {}), 0;
    case 3:
      call.views[1].size[1] = 7;
      return each_run<2>(call, worker, [](int64_t, char* const*) {}), 0;
    case 4:
      return product.in<float>(4) == nullptr;
    case 5:
      return product.store(0, 8, 16, memory), 0;
    case 6:
      return scratch(5, 1) == nullptr;
    default:
      each_run<2>(call, worker, [](int64_t, char* const*) {});
      return product.in<float>(3) == nullptr || element(call.views[0], 3, 7) == nullptr;
  }
}
"""
WRONG = [
    "dim 0 of 2: index 4 of size 4",
    "elements of 8 bytes in a view of type 0",
    "view 1, dim 0: index 3 of size 3",
    "view 1: 8 elements, 1 apart, from element 24 on, of 31",
    "row 4 of 4 is row 4 of 4",
    "columns from 8 on, 0 of them, of 8",
    "row 5 of 5, of 1 floats",
]


def compiled(folder: Path, *flags: str) -> Path:
    source = folder / "checked.cpp"
    source.write_text(PROGRAM)
    compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-Wno-psabi", f"-I{SOURCES}"]
    subprocess.run([*compiler, *flags, source, "-o", folder / "checked"], check=True)
    return folder / "checked"


@pytest.mark.slow
def test_a_debug_build_ends_at_the_first_access_outside_a_view(tmp_path):
    program = compiled(tmp_path, "-DNEXTN_DEBUG")
    for case, words in enumerate(WRONG):
        ended = subprocess.run([program, str(case)], capture_output=True, text=True)
        assert ended.returncode == -signal.SIGABRT
        assert ended.stderr.startswith(f"nextn: op tested: {words}; not so: ")
    assert subprocess.run([program, str(len(WRONG))]).returncode == 0


@pytest.mark.slow
def test_a_release_build_has_no_checks(tmp_path):
    assert b"not so" not in compiled(tmp_path).read_bytes()
