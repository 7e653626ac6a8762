"""The examples run, on a small trained checkpoint."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_keep_head(fixture_folder, tmp_path):
    """A fine-tune, in full or merged from LoRA, that comes out without its head."""
    command = [sys.executable, EXAMPLES / "keep_head.py", fixture_folder / "qwen", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 of 1 modules, clean") == 2
