"""Mapped files: their memory is given back, nothing else is lost, and a truncated file ends no process."""

import ctypes
import mmap
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import CONFIGS, prompt
from torch import nn

from nextn.checkpoint.mapped_memory import (
    release_pages,
    released_after_use,
    return_freed_memory,
    slices_released_after_use,
)
from nextn.decoding.generate import generate
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.runtime.native.trace import Trace
from nextn.settings import Settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are only released on Linux")
ROWS, COLUMNS = 8192, 1024
SIZE = ROWS * COLUMNS  # elements, 32 MB: the kernel reads up to 2 MB of a file at once


@pytest.fixture
def stored(tmp_path):
    """A tensor of a mapped file."""
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.arange(SIZE, dtype=torch.float32).view(ROWS, COLUMNS)}, path)
    with safe_open(path, framework="pt") as file:
        yield file.get_tensor("w")


def resident(tensor):
    """Bytes of the tensor's pages that are in this process's page table."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(first * 8)
        entries = torch.frombuffer(bytearray(file.read(tensor.nbytes // mmap.PAGESIZE * 8)), dtype=torch.int64)
    return int((entries < 0).sum()) * mmap.PAGESIZE  # the highest bit says that a page is present


def test_pages_of_a_file_are_given_back_and_read_again(stored):
    total = stored.double().sum()
    assert resident(stored) > 0.9 * stored.nbytes
    assert release_pages([stored]) >= stored.nbytes
    assert resident(stored) < 0.1 * stored.nbytes
    assert stored.double().sum() == total


def test_a_tensor_that_was_written_to_keeps_its_values(stored):
    stored[7, 7] = -1
    assert release_pages([stored]) == 0
    assert stored[7, 7] == -1


def test_a_part_that_was_not_written_to_is_given_back(stored):
    stored[0, 0] = -1
    stored.sum()
    assert release_pages([stored[ROWS // 2 :]]) > 0
    assert resident(stored[ROWS // 2 :]) < 0.1 * stored.nbytes
    assert stored[0, 0] == -1
    assert stored[ROWS // 2, 0] == SIZE // 2


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, lambda n: torch.ones(n).share_memory_()])
def test_other_memory_is_not_lost(make):
    tensor = make(SIZE)
    tensor[3] = 5
    release_pages([tensor, torch.empty(0), tensor[3]])
    assert tensor[3] == 5
    assert tensor.sum() == make(SIZE).sum() + 5 - make(SIZE)[3]


def test_strided_views_cover_their_pages(stored):
    stored.sum()
    release_pages([stored.T[:, ROWS // 4 : ROWS // 2]])
    assert 0.6 * stored.nbytes < resident(stored) < 0.8 * stored.nbytes


def test_slices_are_given_back_one_by_one(stored):
    rows = []
    for start, part in slices_released_after_use(stored, 900):
        rows.append(part.clone())
        assert start == 900 * (len(rows) - 1)
        assert resident(stored) < 0.5 * stored.nbytes
    assert torch.equal(torch.cat(rows), stored)


def test_a_module_gives_its_weights_back_after_it_ran(stored):
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight = nn.Parameter(stored)
    x = torch.ones(1, COLUMNS)
    expected = layer(x)
    with released_after_use([layer]):
        assert torch.equal(layer(x), expected)
        assert resident(stored) < 0.1 * stored.nbytes
    layer(x)
    assert resident(stored) > 0.9 * stored.nbytes


@pytest.mark.more
def test_weights_that_the_native_backend_packed_are_given_back(tmp_path):
    """Loading, recordings and the self-check leave none of them in memory, and they still hold their values."""
    config = CONFIGS["qwen3_5"] | {"intermediate_size": 65536}
    Model.build(config, dtype=torch.bfloat16).save(tmp_path / "model")
    model = Model.load(tmp_path / "model")
    weights = [layer.mlp.down_proj.weight.detach() for layer in model.trunk.decoder.layers]
    assert sum(map(resident, weights)) < 0.3 * sum(weight.nbytes for weight in weights)
    assert backend_for(model).name == "native"
    generate(model, [prompt(9)], Settings(num_speculative_tokens=2, max_tokens=4))
    assert sum(map(resident, weights)) < 0.3 * sum(weight.nbytes for weight in weights)
    assert all(bool(weight.any()) for weight in weights)
    assert sum(map(resident, weights)) > 0.9 * sum(weight.nbytes for weight in weights)


def test_a_recording_takes_no_memory_for_results():
    """Of large passes, all intermediates at once would be many times what the pass itself takes."""
    # Above 32 MiB, glibc's malloc always maps new pages: smaller results may get memory that was used before.
    x, weight = torch.ones(3000, 3000), torch.full((3000, 3000), float("nan"))
    with Trace([x]), torch.no_grad():
        product = x @ weight
        results = [product, torch.nn.functional.embedding(x[0].long(), weight), x @ x.T, (product + 1).softmax(-1)]
    assert [each.shape for each in results] == [(3000, 3000)] * 4
    assert sum(map(resident, results)) < 0.1 * x.nbytes


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc has malloc_trim")
def test_freed_memory_is_returned():
    """180 MB below an allocation that is still in use: the C library would keep it."""

    def process():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    blocks = [bytearray(b"x") * 60_000 for _ in range(3000)]
    last = blocks.pop()
    del blocks
    before = process()
    return_freed_memory()
    assert before - process() > 100e6
    assert len(last) == 60_000


READ = """
import os, sys
from pathlib import Path
from safetensors import safe_open
from nextn.runtime.native.abi import zero_lost_pages
file, survives = Path(sys.argv[1]), sys.argv[2] == "True"
with safe_open(file, "pt") as opened:
    value = opened.get_tensor("value")
if survives:
    assert zero_lost_pages([file])
assert value[0] == 1
os.truncate(file, 4096)
print(int(value[-1]), int(value[0]))
"""


@pytest.mark.more
@pytest.mark.parametrize("survives", [True, False])
def test_a_truncated_file(tmp_path, survives):
    """What is left keeps its values, what is lost is zero; without the call, the process ends."""
    file = tmp_path / "a name with spaces.safetensors"
    save_file({"value": torch.ones(2**18)}, file)
    done = subprocess.run(
        [sys.executable, "-c", READ, file, str(survives)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == ((0, "0 1\n") if survives else (-signal.SIGBUS, "")), done.stderr
