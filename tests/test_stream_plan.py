"""Does a model fit, and how long does streaming take."""

import pytest
import torch
from packed import Case, quantize_folder
from tiny import build

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.devices import available_bytes
from nextn.evaluate import streaming_plan
from nextn.evaluate.streaming_plan import StreamEstimate, loaded_bytes, reason_to_stream
from nextn.model import stored_experts
from nextn.model.model import Model


def num_bytes(model, dtype):
    values = [*model.trunk.model.state_dict().values(), *model.head.state_dict().values()]
    return sum(value.numel() for value in values) * dtype.itemsize


@pytest.mark.parametrize("fp8", [False, True])
def test_bytes_in_memory(tmp_path, fp8):
    """As stored, fp8 as bf16; in fp32 twice as much."""
    model = build("glm4_moe")
    model.save(tmp_path / "model", dtype=torch.bfloat16, fp8=fp8, copies=False)
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert loaded_bytes(checkpoint, None) == pytest.approx(num_bytes(model, torch.bfloat16), rel=0.02)
    assert loaded_bytes(checkpoint, torch.float32) == pytest.approx(num_bytes(model, torch.float32), rel=0.02)


@pytest.mark.parametrize("case", [Case("gptq"), Case("int-quantized", 8, 0)], ids=str)
def test_packed_weights_in_memory(tmp_path, case):
    """As the bf16 that they are dequantized to, not as the bytes in the file."""
    model = build("glm4_moe")
    model.save(tmp_path / "model", dtype=torch.bfloat16, copies=False)
    quantize_folder(tmp_path / "model", case)
    expected = num_bytes(model, torch.bfloat16)
    assert loaded_bytes(Checkpoint.open(tmp_path / "model"), None) == pytest.approx(expected, rel=0.02)


def test_reason_to_stream(tmp_path, monkeypatch):
    build("glm4_moe").save(tmp_path / "model")
    checkpoint, cpu = Checkpoint.open(tmp_path / "model"), torch.device("cpu")
    needed = loaded_bytes(checkpoint, None)
    for available, is_streamed in ((needed * 2, False), (needed, True), (None, False)):
        monkeypatch.setattr(streaming_plan, "available_bytes", lambda device, available=available: available)
        assert (reason_to_stream(checkpoint, None, cpu) is not None) == is_streamed


def test_available_memory():
    available = available_bytes(torch.device("cpu"))
    assert available is None or 2**20 < available < 2**50


@pytest.mark.more
def test_estimate(tmp_path):
    build("glm4_moe").save(tmp_path / "model")
    model = Model.load(tmp_path / "model", stream=True)
    trunk, estimate = model.trunk, StreamEstimate.of(model.trunk, 1000)
    assert estimate.num_bytes == trunk.num_bytes
    dense = sum(
        value.numel() for name, value in trunk.named_parameters() if "experts." not in name and "embed" not in name
    )
    assert 2000 * dense < estimate.flops < 2 * 1000 * sum(value.numel() for value in trunk.parameters())
    assert min(estimate.bytes_per_s, estimate.flops_per_s) > 1e5
    scored = StreamEstimate.of(trunk, 1000, head=model.head, num_passes=3)
    lm_head = 3 * 2000 * trunk.lm_head.numel()
    assert lm_head < scored.head_flops < lm_head + 3 * 2000 * sum(value.numel() for value in model.head.parameters())
    assert estimate.head_flops == estimate.head_bytes == scored.head_bytes == 0  # its experts are in memory
    size, chosen = trunk.config.moe_intermediate_size * trunk.config.hidden_size, trunk.config.num_experts_per_tok
    assert estimate.expert_flops == 2000 * 3 * size * chosen * (trunk.num_layers - 1)  # the first layer is dense
    assert scored.expert_flops == estimate.expert_flops + 3 * 2000 * 3 * size * chosen
    assert 1e5 < estimate.expert_flops_per_s < float("inf")
    assert StreamEstimate(10**9, 1e12, 1e9, 1e12, 3e12).seconds == 5
    assert str(StreamEstimate(10**9, 2e12, 1e9, 1e12)) == "1.0 GB at 1 GB/s and 2 TFLOP at 1 TFLOP/s: about 0.1 min"
    routed = StreamEstimate(10**9, 2e12, 1e9, 1e12, 3e12, 4e12, 1e11, 2 * 10**9)
    assert routed.seconds == 3 + 1 + 40
    assert str(routed).startswith("3.0 GB at 1 GB/s and 5 TFLOP at 1 TFLOP/s (4 of experts at 0.1): about 0.7 min")


@pytest.mark.more
def test_experts_that_each_pass_of_the_head_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_experts, "_MAX_BYTES", 0)
    build("glm4_moe").save(tmp_path / "model")
    model = Model.load(tmp_path / "model", stream=True)
    estimate = StreamEstimate.of(model.trunk, 1000, head=model.head, num_passes=3)
    experts = [value for name, value in build("glm4_moe").head.named_parameters() if ".experts." in name]
    assert estimate.head_bytes == 3 * sum(value.nbytes for value in experts) > 0
