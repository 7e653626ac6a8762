"""The README is short, and its Python runs. Commands, links, tables and outputs: test_docs.py."""

import re
from pathlib import Path

import pytest
from tiny import CONFIGS

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.model.model import Model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.more
def test_python_blocks_run(tmp_path, monkeypatch):
    """Each Python block runs as it is; `demo/model` is a byte-level model with a head, as the demo saves it."""
    config = CONFIGS["glm4_moe"] | {"vocab_size": 264, "max_position_embeddings": 128}
    Model.build(config, tokenizer=byte_tokenizer()).save(tmp_path / "demo" / "model")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, "README.md", "exec"), {})


def test_readme_is_short():
    """What is longer belongs into docs."""
    assert len(README.splitlines()) <= 150
