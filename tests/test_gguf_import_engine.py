"""GGUF files of llama.cpp's own converter and llama-quantize as checkpoints: every tensor, the tokenizer, the texts.

`make test-engines`.
"""

import os
import subprocess
import sys

import pytest
import torch
from engines import environments
from engines.llama_library import LlamaModel
from engines.starting import Starter
from safetensors.torch import load_file
from test_separate_head import build
from tiny import build as build_with_head

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.decoding.generate import generate
from nextn.edit.gguf_import import convert_gguf
from nextn.model.model import Model
from nextn.settings import Settings

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

ROOT = environments.default_folder()
WIDE = {"vocab_size": 264, "hidden_size": 64, "head_dim": 32, "eos_token_id": 257}
PUBLISHED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
# Name -> the trunk that is built, and changes of its config.
TRUNKS = {
    "llama": ("llama", {}),
    "llama 3.2, tied": ("llama", {"rope_parameters": PUBLISHED, "tie_word_embeddings": True, "head_dim": 64}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_moe": (
        "qwen3",
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "norm_topk_prob": True},
    ),
}  # fmt: skip
VALUE_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 32}
HEADS = {
    "glm4_moe": {"attention_bias": True, "use_qk_norm": True},
    "qwen3_5": VALUE_HEADS,
    "qwen3_5_moe": VALUE_HEADS,
    "qwen3_next": {**VALUE_HEADS, "norm_topk_prob": True},
}


def made(name, folder):
    """A random checkpoint with a byte-level tokenizer."""
    if name in TRUNKS:
        kind, changes = TRUNKS[name]
        return build(folder, kind, **changes)
    model = build_with_head(name, **WIDE, **HEADS[name])
    model.save(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def gguf(checkpoint, out, dtype):
    """The file of llama.cpp's converter, which imports sentencepiece before it looks for a file of it."""
    out.with_name("sentencepiece.py").write_text("SentencePieceProcessor = None")
    command = ["bench/engines/to_gguf.py", str(environments.llama_source(ROOT)), str(checkpoint), str(out), dtype]
    environment = {**os.environ, "PYTHONPATH": str(out.parent)}
    subprocess.run([sys.executable, *command], check=True, capture_output=True, env=environment)
    return out


def tensors(folder):
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def texts(folder, k):
    """Greedy texts; a trunk without a head needs none for K = 0."""
    model = Model.load(folder, dtype=torch.float32, need_head=k > 0)
    settings = Settings(num_speculative_tokens=k, max_tokens=24)
    return [each.tokens for each in generate(model, ["a is", "so 12"], settings, backend="torch")]


@pytest.mark.parametrize("name", [*TRUNKS, *HEADS])
def test_a_converted_file_is_the_checkpoint(name, tmp_path):
    """Bit for bit in float32, except for logarithms and norms that the file has with 1 added."""
    original = made(name, tmp_path / "original")
    convert_gguf(gguf(original, tmp_path / "model.gguf", "f32"), tmp_path / "out")
    expected, found = tensors(original), tensors(tmp_path / "out")
    assert found.keys() == {each for each in expected if "inv_freq" not in each}
    for each, tensor in found.items():
        tolerance = 1e-6 if name.startswith(("qwen3_5", "qwen3_next")) and ("norm" in each or "A_log" in each) else 0.0
        torch.testing.assert_close(tensor, expected[each].float(), atol=tolerance, rtol=0, msg=each)
    for k in (0, 3) if name in HEADS else (0,):
        assert texts(tmp_path / "out", k) == texts(original, k)


QUANTIZED = [
    ("glm4_moe", "F32", 1e-5), ("glm4_moe", "Q8_0", 2e-3), ("glm4_moe", "Q6_K", 2e-2), ("glm4_moe", "Q4_K_M", 1e-2),
    ("qwen3_5_moe", "F32", 1e-5), ("qwen3_5_moe", "Q4_K_M", 1e-2), ("qwen3_next", "F32", 1e-5),
    ("qwen3_next", "Q4_K_M", 1e-2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "near"), QUANTIZED)
def test_a_quantized_file_says_what_llama_cpp_says(name, kind, near, tmp_path):
    """KL of its distributions against that of the next position's; llama.cpp rounds activations to eight bits."""
    changes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    changes |= {} if name == "glm4_moe" else {"shared_expert_intermediate_size": 256, "linear_key_head_dim": 32}
    changes |= {} if name == "glm4_moe" else HEADS[name]
    model = build_with_head(name, **{**WIDE, **changes}, initializer_range=0.1)
    model.save(tmp_path / "original")
    byte_tokenizer().save_pretrained(tmp_path / "original")
    file = gguf(tmp_path / "original", tmp_path / "F32.gguf", "f32")
    if kind != "F32":
        file = Starter(ROOT, 1).quantized(file, tmp_path / "model.gguf", kind)
    text = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0))
    engine = LlamaModel(ROOT, file, threads=1, num_speculative_tokens=1)
    theirs = engine.log_probs(text.tolist())
    engine.close()
    for dtype in (None, "stored"):
        convert_gguf(file, tmp_path / f"out {dtype}", dtype=dtype)
        trunk = Model.load(tmp_path / f"out {dtype}", dtype=torch.float32).trunk
        with torch.no_grad():
            ours = trunk.logits(trunk(text[None]).final_hidden)[0].log_softmax(-1)
        divergence, other = ((ours.exp() * (ours - each)).sum(-1).mean() for each in (theirs, theirs.roll(1, 0)))
        assert divergence < near * other, dtype
