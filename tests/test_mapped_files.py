"""Mapped weights whose file is truncated."""

import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

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
