"""GGUF files and llama.cpp: those that nextn wrote in the engine, and those of its own converter as checkpoints."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
from bpe_tokenizers import SPLITS, bpe_tokenizer
from engines import environments
from engines.llama_library import LlamaModel
from engines.starting import Starter
from gguf import GGUFReader
from safetensors.torch import load_file
from test_gguf_export import glm4_moe
from test_separate_head import SETTINGS, TEXT, build, start, tokens
from tiny import build as build_with_head

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.decoding.generate import generate
from nextn.edit.export import export
from nextn.edit.gguf_import import convert_gguf
from nextn.model.model import Model
from nextn.settings import Settings
from nextn.train.head_run import prepare_head_run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 24}
# Name of a trunk -> the kind that it is made of, changes of its config, and the head's layout.
TRUNKS = {
    "llama": ("llama", {}, "step35"),
    "llama 3.1": ("llama-3.1", {}, "step35"),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}, "step35"),
    "mistral": ("mistral", {}, "step35"),
    "mistral, window": ("mistral", WINDOW, "step35"),
    "qwen2": ("qwen2", {}, "step35"),
    "qwen2, window in one layer": ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "step35"),
    "smollm2": ("smollm2", {}, "step35"),
    "qwen3, step35": ("qwen3", {}, "step35"),
    "qwen3": ("qwen3", {}, None),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}, None),
    "qwen3, linear": ("qwen3", {"rope_parameters": LINEAR}, None),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}, None),
}  # fmt: skip
FLAGS = ["-np", "1", "-c", "256", "-t", "1", "-fa", "off", "--no-webui"]
FLAGS += [part for name in ("-ctk", "-ctv", "-ctkd", "-ctvd") for part in (name, "f32")]
NEAR = 1e-5  # of log-probabilities in float32; a wrong frequency, window or norm changes them by more than 1e-3


def trained(folder, kind, changes, layout):
    """A random trunk, and its head after three steps."""
    trunk = build(folder / "trunk", kind, **changes)
    (folder / "text.txt").write_text(TEXT)
    run = prepare_head_run(folder / "run", start(trunk, layout), data=[folder / "text.txt"], settings=SETTINGS)
    list(run.trainer.run())
    return trunk, run.write(head_only=True, allow_worse=True).parent


@contextmanager
def serving(folder, *flags):
    """post(path, body) of a server of that file."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = str(environments.llama_server(environments.default_folder()))
    root = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("w") as log:
        command = [server, "-m", str(folder / "model.gguf"), *FLAGS, *flags, "--port", str(port)]
        child = subprocess.Popen(command, stdout=log, stderr=log)

    def post(path, body):
        request = Request(f"{root}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)

    try:
        for _ in range(600):
            try:
                urlopen(f"{root}/health", timeout=5).close()
                break
            except (URLError, OSError):
                assert child.poll() is None, (folder / "server.log").read_text()[-1000:]
                time.sleep(0.1)
        yield post
    finally:
        child.terminate()
        child.wait()


def asked(post, ids, count, probs=0):
    body = {"prompt": ids, "n_predict": count, "temperature": 0.0, "samplers": ["temperature"], "n_probs": probs}
    return post("/completion", {**body, "return_tokens": True, "cache_prompt": False})


@pytest.mark.parametrize("name", TRUNKS)
def test_probabilities_and_texts_are_ours(name, tmp_path):
    """After prompts of 60 to 99 tokens, the 20 most probable tokens; and greedy texts with drafts."""
    trunk, head = trained(tmp_path, *TRUNKS[name])
    exported = export(head, tmp_path / "model.gguf", "llama.cpp", num_speculative_tokens=3)
    model = Model.load(trunk, head=head)
    ids = torch.randint(0, 250, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.trunk.logits(model.trunk(ids).final_hidden)[0].log_softmax(-1)
    gaps = []
    with serving(tmp_path, *exported.command[3:]) as post:
        for count in range(60, 100):
            # An incomplete character has no probabilities in the answer.
            for each in asked(post, ids[0, :count].tolist(), 1, 20).get("completion_probabilities", ()):
                gaps += [abs(top["logprob"] - expected[count - 1, top["id"]].item()) for top in each["top_logprobs"]]
        texts = [asked(post, list(prompt.encode()), 20) for prompt in ("a is", "so")]
    assert len(gaps) > 400
    assert max(gaps) < NEAR
    assert [tuple(each["tokens"]) for each in texts] == [tuple(each) for each in tokens(model, "torch", 0)]
    assert sum(each["timings"]["draft_n"] for each in texts) > 20


TEXTS = (
    "Hello world, I'VE seen 12345 and 3.14!", "  two  spaces\n\n\ttabs \r\n end ",
    "na\u00efve \u6771\u4eac \U0001f680 caf\u00e9s \u0441\u043b\u043e\u0432\u043e", "<|bos|>a<think>b <|eot|>",
    "CamelCase camelCase HTTPServer don't DON'T", "x=1;y=[2,3]/*c*/ //",
)  # fmt: skip


@pytest.mark.parametrize("split", SPLITS)
def test_tokens_are_those_of_the_tokenizer(split, tmp_path):
    """llama.cpp splits every text as the tokenizer does, and adds a first token where it does."""
    trunk, head = trained(tmp_path, "qwen3", {}, None)
    tokenizer = bpe_tokenizer(split)
    tokenizer.save_pretrained(trunk)
    export(head, tmp_path / "model.gguf", "llama.cpp")
    with serving(tmp_path) as post:
        for text in TEXTS:
            body = {"content": text, "add_special": True, "parse_special": True}
            assert post("/tokenize", body)["tokens"] == tokenizer(text)["input_ids"], text


def converted(checkpoint, folder, dtype):
    """The file of llama.cpp's converter, which imports sentencepiece before it looks for a file of it."""
    (folder / "sentencepiece.py").write_text("SentencePieceProcessor = None")
    source = str(environments.llama_source(environments.default_folder()))
    command = [sys.executable, "bench/engines/to_gguf.py", source, str(checkpoint), str(folder / "theirs.gguf"), dtype]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(folder)})
    return GGUFReader(folder / "theirs.gguf")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_converter_writes_the_same_tokenizer(kind, tmp_path):
    """Key by key, except the name of the split, which it knows of published tokenizers alone."""
    trunk, head = trained(tmp_path, kind, {}, "step35")
    bpe_tokenizer("llama-bpe").save_pretrained(trunk)
    export(head, tmp_path / "model.gguf", "llama.cpp")
    ours, theirs = (
        {name: each.contents() for name, each in reader.fields.items() if name.startswith("tokenizer.")}
        for reader in (GGUFReader(tmp_path / "model.gguf"), converted(trunk, tmp_path, "f32"))
    )
    assert theirs.pop("tokenizer.ggml.pre") == "gpt-2"
    assert ours.pop("tokenizer.ggml.pre") == "llama-bpe"
    assert ours == theirs


@pytest.mark.parametrize(("dtype", "out_type"), [(torch.float32, "f32"), (torch.bfloat16, "auto")])
def test_the_converter_writes_the_same_experts(dtype, out_type, tmp_path):
    """Of GLM-4.5: every tensor with its type, and what the architecture reads of the metadata.

    The converter makes float16 of float32, unless told not to, and writes vocab_size for some tokenizers only.
    """
    glm4_moe(tmp_path / "glm", dtype=dtype, norm_topk_prob=False, routed_scaling_factor=2.5)
    export(tmp_path / "glm", tmp_path / "model.gguf", "llama.cpp")
    files = GGUFReader(tmp_path / "model.gguf"), converted(tmp_path / "glm", tmp_path, out_type)
    ours, theirs = ({each.name: (each.tensor_type, each.data.tobytes()) for each in file.tensors} for file in files)
    assert ours == theirs
    ours, theirs = (
        {name: each.contents() for name, each in file.fields.items() if name.startswith("glm4moe.")} for file in files
    )
    assert ours.pop("glm4moe.vocab_size") == len(
        GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.tokens"].data
    )
    assert ours == theirs


ROOT = environments.default_folder()
WIDE = {"vocab_size": 264, "hidden_size": 64, "head_dim": 32, "eos_token_id": 257}
PUBLISHED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# Name -> the trunk that is built, and changes of its config.
IMPORTED = {
    "llama": ("llama", {}),
    "llama 3.2, tied": ("llama", {"rope_parameters": PUBLISHED, "tie_word_embeddings": True, "head_dim": 64}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}),
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "sliding_window": 16}),
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
    if name in IMPORTED:
        kind, changes = IMPORTED[name]
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


@pytest.mark.parametrize("name", [*IMPORTED, *HEADS])
def test_a_converted_file_is_the_checkpoint(name, tmp_path):
    """Bit for bit in float32, except for logarithms and norms that the file has with 1 added.

    Of Gemma 3, the converter leaves out the embeddings of tokens that the tokenizer has not.
    """
    original = made(name, tmp_path / "original")
    convert_gguf(gguf(original, tmp_path / "model.gguf", "f32"), tmp_path / "out")
    expected, found = tensors(original), tensors(tmp_path / "out")
    assert found.keys() == {each for each in expected if "inv_freq" not in each}
    for each, tensor in found.items():
        is_changed = name.startswith(("qwen3_5", "qwen3_next", "gemma3")) and ("norm" in each or "A_log" in each)
        tolerance = 1e-6 if is_changed else 0.0
        rows = len(tensor) if (name, each) == ("gemma3", "model.embed_tokens.weight") else None
        torch.testing.assert_close(tensor, expected[each][:rows].float(), atol=tolerance, rtol=0, msg=each)
    for k in (0, 3) if name in HEADS else (0,):
        assert texts(tmp_path / "out", k) == texts(original, k)


# Random states of a recurrence depend more on rounded activations than random attention does.
QUANTIZED = [
    ("glm4_moe", "F32", 1e-5), ("glm4_moe", "Q8_0", 2e-3), ("glm4_moe", "Q6_K", 2e-2), ("glm4_moe", "Q4_K_M", 1e-2),
    ("qwen3_5_moe", "F32", 1e-5), ("qwen3_5_moe", "Q4_K_M", 5e-2), ("qwen3_next", "F32", 1e-5),
    ("qwen3_next", "Q4_K_M", 5e-2),
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
