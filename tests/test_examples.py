"""The examples run, on a small trained checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_keep_head(fixture_folder, tmp_path):
    """A fine-tune, in full or merged from LoRA, that comes out without its head."""
    command = [sys.executable, EXAMPLES / "keep_head.py", fixture_folder / "qwen", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 of 1 modules, clean") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer_head", "sft_head"])
def test_head_beside_a_fine_tune(name, tmp_path):
    """transformers' and TRL's trainers, the latter with LoRA: the head is trained, logged and saved with the model."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tokens a round" in done.stdout
    assert "head_loss_3" in done.stdout
    assert "1 of 1 modules, clean" in done.stdout
    assert bool(list(tmp_path.glob("run/**/events.*"))) == (name == "trainer_head")
