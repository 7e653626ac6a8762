"""One checkpoint through everything: saved, audited, converted there and back, loaded, and the same to the last bit."""

import pytest
import torch
from tiny import CONFIGS, build, prompt

from nextn.audit import audit
from nextn.checkpoint import Checkpoint
from nextn.families import by_name
from nextn.model import Model
from nextn.relayout import convert

FP8 = [(name, fp8) for name in CONFIGS for fp8 in (False, True) if not fp8 or by_name(name).fp8 is not None]


def tensors(folder) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = Checkpoint.open(folder)
    return {name: (info.dtype, info.shape, found.read_bytes(name)) for name, info in found.tensors.items()}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    tokens = torch.tensor([prompt(12)])
    return model.head(tokens, model.trunk(tokens).eaten)


@pytest.mark.parametrize(("name", "fp8"), FP8)
def test_chain(name, fp8, tmp_path):
    """A step that changes a byte, a finding against what we wrote ourselves, or another head after all of it."""
    model = build(name)
    with torch.no_grad():
        for value in model.head.parameters():  # some start constant, which audit is right to say
            value.add_(0.01 * torch.randn_like(value))
    model.save(tmp_path / "a", dtype=torch.bfloat16, fp8=fp8)
    report = audit(Checkpoint.open(tmp_path / "a"))
    assert report.clean, [finding for finding in report.findings if finding.severity != "note"]
    convert(tmp_path / "a", tmp_path / "b", form="single-file")
    convert(tmp_path / "b", tmp_path / "c", form="shards")
    whole = tensors(tmp_path / "a")
    assert tensors(tmp_path / "b") == whole
    assert tensors(tmp_path / "c") == whole
    first, last = Model.load(tmp_path / "a"), Model.load(tmp_path / "c")
    assert torch.equal(logits(first), logits(last))
