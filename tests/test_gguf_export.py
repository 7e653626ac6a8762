"""A trunk and its head in one GGUF: every tensor, what the metadata says, the tokenizer, and what is refused."""

import json
import shutil
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bpe_tokenizers import SPLITS, bpe_tokenizer
from gguf import GGUFReader
from quick import loop
from safetensors.torch import load_file, save_file
from test_separate_head import LLAMA31, SETTINGS, TEXT, build, start, tokens
from tiny import build as tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nextn.audit_rules.gguf import audit_gguf
from nextn.checkpoint import checkpoint as checkpoint_module
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import open_head, trunk_family
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.edit.export import export
from nextn.edit.gguf_export import write_gguf
from nextn.edit.gguf_import import convert_gguf
from nextn.edit.gguf_tokenizer import copy_tokenizer
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table.engine_versions import RUN
from nextn.model.model import Model
from nextn.train.head_run import prepare_head_run

EQUAL = {"atol": 0, "rtol": 0}
LAYOUTS = {"llama-3.1": "step35", "qwen2": "step35", "qwen3": None, "mistral": "step35", "llama": "mimo"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with trunks, and beside each a head after three steps: TRUNK-head."""
    root = tmp_path_factory.mktemp("made")
    (root / "text.txt").write_text(TEXT)
    for name, layout in LAYOUTS.items():
        build(root / name, name, **({"sliding_window": 24} if name == "mistral" else {}))
        run = prepare_head_run(
            root / f"{name}-run", start(root / name, layout), data=[root / "text.txt"], settings=SETTINGS
        )
        list(run.trainer.run())
        run.write(head_only=True).parent.rename(root / f"{name}-head")
    return root


def written(made, name, folder, **options):
    return GGUFReader(export(made / f"{name}-head", folder / f"{name}.gguf", "llama.cpp", **options).path)


def value(reader, key):
    return reader.fields[key].contents()


def data(reader, name):
    return next(each for each in reader.tensors if each.name == name).data


BLOCK = {"attn_norm": "input_layernorm", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}


@pytest.mark.more
@pytest.mark.parametrize(("name", "arch"), [("llama-3.1", "step35"), ("qwen3", "hy_v3")])
def test_all_tensors_of_trunk_and_head(name, arch, made, tmp_path):
    """Bit for bit, with llama.cpp's names, and nothing else; the audit of the file finds nothing."""
    reader = written(made, name, tmp_path)
    trunk = load_file(made / name / "model.safetensors")
    head = load_file(made / f"{name}-head" / "head.safetensors")
    expected = {"token_embd.weight": trunk["model.embed_tokens.weight"], "output.weight": trunk["lm_head.weight"]}
    expected |= {f"blk.0.{own}.weight": trunk[f"model.layers.0.{path}.weight"] for own, path in BLOCK.items()}
    expected |= {f"blk.2.{own}.weight": head[f"model.layers.2.{path}.weight"] for own, path in BLOCK.items()}
    for own in ("eh_proj", "enorm", "hnorm"):
        expected[f"blk.2.nextn.{own}.weight"] = head[f"model.layers.2.{own}.weight"]
    expected["blk.2.nextn.shared_head_norm.weight"] = head["model.layers.2.shared_head.norm.weight"]
    for own, tensor in expected.items():
        assert np.array_equal(data(reader, own), tensor.numpy()), own
    assert len(reader.tensors) == len(trunk) + len(head) + (name == "llama-3.1")  # and rope_freqs
    assert value(reader, "general.architecture") == arch
    assert audit_gguf(tmp_path / f"{name}.gguf").clean


def test_what_the_metadata_says(made, tmp_path):
    """Sizes from transformers' config, the head's block counted, and step35's layer with a window without a limit."""
    reader = written(made, "llama-3.1", tmp_path)
    expected = {
        "block_count": 3, "nextn_predict_layers": 1, "embedding_length": 64, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 16, "rope.dimension_count": 32,
        "rope.dimension_count_swa": 16, "rope.freq_base": 500000.0, "rope.freq_base_swa": 500000.0,
        "attention.sliding_window": 1 << 24, "attention.sliding_window_pattern": [False, False, True],
    }  # fmt: skip
    assert {key: value(reader, f"step35.{key}") for key in expected} == expected
    assert value(reader, "step35.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    windowed = written(made, "mistral", tmp_path)
    assert value(windowed, "step35.attention.sliding_window") == 24
    assert value(windowed, "step35.attention.sliding_window_pattern") == [True, True, True]
    dense = written(made, "qwen3", tmp_path)
    assert (value(dense, "hy_v3.rope.dimension_count"), value(dense, "hy_v3.attention.value_length")) == (32, 32)
    assert "hy_v3.attention.sliding_window" not in dense.fields


def test_frequencies_of_llama_31(made, tmp_path):
    """llama.cpp divides by the quotients of unscaled and scaled frequencies; the head has the unscaled ones."""
    model = Model.load(made / "llama-3.1", head=made / "llama-3.1-head")
    unscaled = 1 / LLAMA31["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.trunk.config, "cpu")
    factors = torch.tensor(data(written(made, "llama-3.1", tmp_path), "rope_freqs.weight"))
    torch.testing.assert_close(factors, unscaled / scaled)
    assert len(set(factors.tolist())) > 2
    torch.testing.assert_close(model.head._source[0].decoder.rotary_emb.inv_freq, unscaled)
    torch.testing.assert_close(model.trunk.decoder.rotary_emb.inv_freq, scaled)


@pytest.mark.more
def test_norms_and_biases_are_widened_whatever_the_size_of_a_chunk(made, tmp_path, monkeypatch):
    """From bfloat16 and float16; matrices stay as they are."""
    for name, dtype, kind in (("bf16", torch.bfloat16, "BF16"), ("f16", torch.float16, "F16")):
        folder = shutil.copytree(made / "qwen2", tmp_path / name)
        narrow = {key: each.to(dtype) for key, each in load_file(folder / "model.safetensors").items()}
        save_file(narrow, folder / "model.safetensors")
        monkeypatch.setattr(checkpoint_module, "CHUNK", 34)
        write_gguf(*_inventories(folder, made / "qwen2-head"), folder / "out.gguf")
        reader = GGUFReader(folder / "out.gguf")
        by_name = {each.name: each for each in reader.tensors}
        assert by_name["blk.1.attn_q.weight"].tensor_type.name == kind
        stored = narrow["model.layers.1.self_attn.q_proj.weight"]
        assert by_name["blk.1.attn_q.weight"].data.tobytes() == stored.view(torch.uint8).numpy().tobytes()
        for own, path in (
            ("attn_q.bias", "self_attn.q_proj.bias"),
            ("ffn_norm.weight", "post_attention_layernorm.weight"),
        ):
            assert np.array_equal(data(reader, f"blk.1.{own}"), narrow[f"model.layers.1.{path}"].float().numpy())
        assert value(reader, "general.file_type") == {"BF16": 32, "F16": 1}[kind]


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["llama-3.1", "qwen2", "mistral", "qwen3"])
def test_a_bfloat16_trunk_comes_back_with_equal_logits(name, made, tmp_path):
    """Through step35's or hy_v3's layout and our reader: in bfloat16 bit for bit, and in float32."""
    trunk, path = shutil.copytree(made / name, tmp_path / "trunk"), tmp_path / "trunk" / "model.safetensors"
    save_file({key: each.bfloat16() for key, each in load_file(path).items()}, path, {"format": "pt"})
    _edit(trunk / "config.json", dtype="bfloat16")
    write_gguf(*_inventories(trunk, made / f"{name}-head"), tmp_path / "out.gguf")
    convert_gguf(tmp_path / "out.gguf", tmp_path / "back")
    ids = torch.randint(0, 250, (2, 60), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32):
        models = [Model.load(each, need_head=False, skip_head=True, dtype=dtype) for each in (trunk, tmp_path / "back")]
        with torch.no_grad():
            one, other = (model.trunk.logits(model.trunk(ids).final_hidden) for model in models)
        assert one.dtype == torch.float32
        torch.testing.assert_close(other, one, **({"atol": 1e-6, "rtol": 0} if dtype == torch.float32 else EQUAL))


def test_a_tied_trunk_stores_its_lm_head_where_the_graph_needs_it(made, tmp_path):
    for name, count in (("qwen2", 1), ("qwen3", 0)):  # step35.cpp needs it, hy-v3.cpp takes token_embd
        trunk = build(tmp_path / name, name, tie_word_embeddings=True)
        write_gguf(*_inventories(trunk, made / f"{name}-head"), tmp_path / f"{name}.gguf")
        reader = GGUFReader(tmp_path / f"{name}.gguf")
        outputs = [each for each in reader.tensors if each.name == "output.weight"]
        assert len(outputs) == count
        assert all(np.array_equal(each.data, data(reader, "token_embd.weight")) for each in outputs)


@pytest.mark.more
def test_a_head_in_step35s_layout_decodes_the_trunks_text(made):
    """It takes the state before the final norm, and gives the next depth its own before its norm."""
    for name in ("llama-3.1", "qwen2", "mistral"):
        model = Model.load(made / name, head=made / f"{name}-head")
        assert (model.family.name, model.family.hidden, model.family.next_hidden) == ("step35_draft", "pre", "pre")
        assert tokens(model, "torch", 3) == tokens(model, "native", 3) == tokens(model, "torch", 0)
        assert model.notes == ()


def glm4_moe(folder, *, modules=1, dtype=torch.float32, **changes):
    """A random GLM-4.5 with its head, whose one-dimensional tensors all differ."""
    sizes = {"vocab_size": 264, "attention_bias": True, "use_qk_norm": True}
    model = tiny_model("glm4_moe", modules=modules, **sizes | changes)
    for name, values in chain(*(part.state_dict().items() for part in (model.trunk.model, model.head))):
        if values.ndim == 1:
            torch.nn.init.uniform_(values, *((0.0, 0.5) if name.endswith("bias") else (0.5, 1.5)))
    model.save(folder, dtype=dtype)
    byte_tokenizer().save_pretrained(folder)
    return folder


def weights(folder):
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def test_experts_are_stacked_and_routers_widened(tmp_path, monkeypatch):
    """Of GLM-4.5 with its head inside, in bfloat16, whatever the size of a chunk; the audit finds nothing."""
    stored = weights(glm4_moe(tmp_path / "glm", dtype=torch.bfloat16))
    monkeypatch.setattr(checkpoint_module, "CHUNK", 34)
    made = export(tmp_path / "glm", tmp_path / "glm.gguf", "llama.cpp", num_speculative_tokens=2)
    reader = GGUFReader(made.path)
    for index, name in product((1, 2), ("gate", "up", "down")):
        stem = f"model.layers.{index}.mlp"
        experts = torch.stack([stored[f"{stem}.experts.{each}.{name}_proj.weight"] for each in range(4)])
        assert data(reader, f"blk.{index}.ffn_{name}_exps.weight").tobytes() == _bytes(experts)
        shared = data(reader, f"blk.{index}.ffn_{name}_shexp.weight")
        assert shared.tobytes() == _bytes(stored[f"{stem}.shared_experts.{name}_proj.weight"])
    for own, path in (("ffn_gate_inp.weight", "gate.weight"), ("exp_probs_b.bias", "gate.e_score_correction_bias")):
        for index in (1, 2):
            found = data(reader, f"blk.{index}.{own}")
            assert np.array_equal(found, stored[f"model.layers.{index}.mlp.{path}"].float().numpy())
    assert made.command[3:] == ("--spec-type", "draft-mtp", "--spec-draft-n-max", "2", "--metrics")
    assert audit_gguf(made.path).clean


def _bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_what_the_metadata_of_experts_says(tmp_path):
    shape = {"first_k_dense_replace": 2, "num_hidden_layers": 3, "n_group": 2, "topk_group": 1, "n_shared_experts": 2,
             "norm_topk_prob": False, "routed_scaling_factor": 2.5}  # fmt: skip
    reader = GGUFReader(export(glm4_moe(tmp_path / "glm", **shape), tmp_path / "glm.gguf", "llama.cpp").path)
    expected = {
        "block_count": 4, "nextn_predict_layers": 1, "leading_dense_block_count": 2, "expert_count": 4,
        "expert_used_count": 2, "expert_shared_count": 2, "expert_feed_forward_length": 16, "expert_group_count": 2,
        "expert_group_used_count": 1, "expert_gating_func": 2, "expert_weights_scale": 2.5,
        "expert_weights_norm": False, "feed_forward_length": 64, "attention.key_length": 8, "rope.dimension_count": 4,
    }  # fmt: skip
    assert {key: value(reader, f"glm4moe.{key}") for key in expected} == expected
    assert value(reader, "general.architecture") == "glm4moe"


@pytest.mark.parametrize("split", SPLITS)
def test_the_tokenizer_and_its_split(split, made, tmp_path):
    """Tokens by id with their types, merges, special tokens and template; of the split, llama.cpp's name."""
    trunk = shutil.copytree(made / "qwen3", tmp_path / "trunk")
    tokenizer = bpe_tokenizer(split)
    tokenizer.save_pretrained(trunk)
    reader = written(made, "qwen3", tmp_path, trunk=trunk)
    assert value(reader, "tokenizer.ggml.pre") == split
    listed = value(reader, "tokenizer.ggml.tokens")
    assert len(listed) == 264
    assert {token: listed[id] for token, id in tokenizer.get_vocab().items()} == {t: t for t in tokenizer.get_vocab()}
    types = value(reader, "tokenizer.ggml.token_type")
    names = ["a", "<|bos|>", "<think>"]
    assert [types[tokenizer.convert_tokens_to_ids(each)] for each in names] == [1, 3, 4]
    assert (listed[263], types[263]) == ("[PAD263]", 5)
    assert value(reader, "tokenizer.ggml.bos_token_id") == tokenizer.bos_token_id
    assert value(reader, "tokenizer.ggml.add_bos_token") is (split == "llama-bpe")
    assert value(reader, "tokenizer.chat_template") == tokenizer.chat_template


def test_another_tokenizer_comes_from_a_gguf(made, tmp_path):
    """Copied as it is; one of another size is none of this model."""
    trunk = shutil.copytree(made / "qwen3", tmp_path / "trunk")
    bpe_tokenizer("llama-bpe").save_pretrained(trunk)
    first = written(made, "qwen3", tmp_path, trunk=trunk)
    spec = json.loads((trunk / "tokenizer.json").read_text())
    spec["pre_tokenizer"] = {"type": "Whitespace"}
    (trunk / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "again").mkdir()
    with pytest.raises(ConfigError, match=r"--vocab-only --outfile vocab.gguf`, and give that file.*--tokenizer"):
        written(made, "qwen3", tmp_path / "again", trunk=trunk)
    again = written(made, "qwen3", tmp_path / "again", trunk=trunk, tokenizer=tmp_path / "qwen3.gguf")
    keys = [name for name in first.fields if name.startswith("tokenizer.")]
    assert len(keys) > 8
    assert {key: value(again, key) for key in keys} == {key: value(first, key) for key in keys}
    assert [each.types for key, each in again.fields.items() if key in keys] == [
        first.fields[key].types for key in keys
    ]
    with pytest.raises(ConfigError, match="it has 264 tokens, the model 300"):
        copy_tokenizer(None, tmp_path / "qwen3.gguf", 300)
    with pytest.raises(ConfigError, match="not a GGUF file with a tokenizer"):
        copy_tokenizer(None, trunk / "config.json", 264)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "a bias of o_proj": ("llama-3.1", {"attention_bias": True}, CheckpointError, r"has no .*o_proj\.bias"),
    "a bias of the MLP": ("llama-3.1", {"mlp_bias": True}, CheckpointError, r"has no .*mlp\..*bias"),
    "YaRN": ("qwen2", {"rope_parameters": YARN}, FamilyError, r"type yarn: step35\.cpp:456"),
    "an activation": ("qwen2", {"hidden_act": "gelu"}, FamilyError, "activation gelu"),
    "a quantized trunk": ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, FamilyError, "quantized: export"),
    "scaled rotary embeddings in hy_v3": ("qwen3", {"rope_parameters": LLAMA31}, FamilyError, "loads no rope_freqs"),
    "a window in hy_v3": (
        "qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
        FamilyError, "245 alone",
    ),
    "a window with scaled rotary embeddings": (
        "mistral", {"sliding_window": 8, "rope_parameters": LLAMA31}, FamilyError, "without scaled rotary"
    ),
    "no q_norm for hy_v3": ("qwen3", {"model_type": "qwen2"}, FamilyError, r"hy-v3\.cpp:56 .*--layout step35"),
    "another model": ("llama-3.1", {"model_type": "gemma"}, FamilyError, "gemma is not one of llama, mistral"),
}  # fmt: skip


@loop("fault", REFUSED)
def test_a_trunk_that_no_layout_holds(fault, made, tmp_path):
    """By its config, or by a tensor; nothing is written."""
    name, changes, error, words = REFUSED[fault]
    trunk = build(tmp_path / "trunk", name, **{key: each for key, each in changes.items() if key.endswith("_bias")})
    _edit(trunk / "config.json", **changes)
    with pytest.raises(error, match=words):
        write_gguf(*_inventories(trunk, made / f"{name}-head"), tmp_path / "out.gguf")
    assert not [*tmp_path.glob("*out*")]


def _edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _inventories(trunk, head):
    base = Inventory.of(Checkpoint.open(trunk), family=trunk_family(Checkpoint.open(trunk)))
    return base, open_head(head, base)


def test_a_trunk_that_no_layout_holds_is_refused_before_training(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    for name in ("phi4", "gemma3"):
        trunk = build(tmp_path / name, name)
        with pytest.raises(FamilyError, match=r"llama\.cpp's step35 layout cannot hold this trunk: model_type"):
            prepare_head_run(tmp_path / "run", start(trunk, "step35"), data=[tmp_path / "text.txt"], settings=SETTINGS)


def test_what_cannot_be_exported(made, tmp_path):
    with pytest.raises(FamilyError, match=r"bad drafts and no error.*--layout step35"):
        export(made / "llama-head", tmp_path / "out.gguf", "llama.cpp")
    with pytest.raises(FamilyError, match=r"vLLM \S+ runs no head of the trunk's own layers; train with --layout mimo"):
        export(made / "qwen2-head", tmp_path / "out", "vllm")
    with pytest.raises(FamilyError, match="train one without --layout"):
        export(made / "qwen2-head", tmp_path / "out", "transformers")
    with pytest.raises(ConfigError, match=r"expected a new file whose name ends in \.gguf"):
        export(made / "qwen2-head", tmp_path / "out", "llama.cpp")
    with pytest.raises(ConfigError, match=r"--tokenizer vocab\.gguf: only for llama\.cpp"):
        export(made / "llama-head", tmp_path / "out", "vllm", tokenizer=Path("vocab.gguf"))
    base, head = _inventories(made / "qwen3", made / "qwen3-head")
    two = replace(head, stored={**head.stored, "1.projection.weight": head.stored["0.projection.weight"]})
    with pytest.raises(FamilyError, match="2 MTP layers; a GGUF here holds one"):
        write_gguf(base, two, tmp_path / "out.gguf")
    assert not [*tmp_path.glob("*out*")]


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (
            "model.layers.1.mlp.experts.3.up_proj.weight",
            r"blk\.1\.ffn_up_exps.*= 4 experts.*3 are stored, as F32 \[16, 32\]",
        ),
        ("model.layers.2.mlp.gate.weight", r"lack: blk\.2\.ffn_gate_inp\.weight$"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", r"lack: blk\.1\.exp_probs_b\.bias$"),
        ("model.layers.0.mlp.up_proj.weight", r"lack: blk\.0\.ffn_up\.weight$"),
        ("model.layers.1.self_attn.k_proj.bias", r"lack: blk\.1\.attn_k\.bias$"),
        ("model.layers.1.self_attn.q_norm.weight", r"lack: blk\.1\.attn_q_norm\.weight$"),
        ("model.embed_tokens.weight", r"lack: token_embd\.weight$"),
        ("lm_head.weight", r"lack: output\.weight$"),
    ],
)
def test_a_tensor_is_missing(gone, words, tmp_path):
    folder = glm4_moe(tmp_path / "glm")
    _rewrite(folder, gone, lambda values: None)
    with pytest.raises(CheckpointError, match=words):
        export(folder, tmp_path / "out.gguf", "llama.cpp")
    assert not [*tmp_path.glob("*out*")]


def test_experts_that_differ_in_dtype_are_refused(tmp_path):
    folder = glm4_moe(tmp_path / "glm")
    _rewrite(folder, "model.layers.1.mlp.experts.2.up_proj.weight", torch.Tensor.bfloat16)
    with pytest.raises(CheckpointError, match=r"4 are stored, as BF16 \[16, 32\], F32 \[16, 32\]$"):
        export(folder, tmp_path / "out.gguf", "llama.cpp")


def _rewrite(folder, name, change):
    """Change one tensor, or take it away: None."""
    stored = weights(folder)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    stored[name] = change(stored[name])
    save_file({key: each for key, each in stored.items() if each is not None}, folder / "model.safetensors")


def test_experts_that_the_graph_does_not_compute(tmp_path):
    """By the config, and by the number of MTP layers, of which the graph has one."""
    folder = glm4_moe(tmp_path / "glm")
    _edit(folder / "config.json", rope_parameters=LLAMA31)
    with pytest.raises(
        FamilyError, match=r"glm4moe layout.*glm4-moe\.cpp:211 .*trunk that was adopted.*--layout step35"
    ):
        export(folder, tmp_path / "out.gguf", "llama.cpp")
    with pytest.raises(FamilyError, match="2 MTP layers; a GGUF here holds one"):
        export(glm4_moe(tmp_path / "two", modules=2), tmp_path / "out.gguf", "llama.cpp")
    with pytest.raises(FamilyError, match=r"family glm4_moe: it is served as it is: `nextn serve .* --print vllm`"):
        export(folder, tmp_path / "out", "vllm")
    with pytest.raises(FamilyError, match=r"family glm4_moe: load the model as it is.*use_mtp"):  # not in --print
        export(folder, tmp_path / "out", "transformers")


def test_one_expert_is_refused_for_every_engine(tmp_path):
    """Its routers take two of a group; a file that somebody wrote all the same is reported."""
    shape = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    folder = glm4_moe(tmp_path / "glm", **shape)
    path = export(folder, tmp_path / "two.gguf", "llama.cpp").path
    assert audit_gguf(path).clean
    _edit(folder / "config.json", n_routed_experts=1)
    for engine, out in (("llama.cpp", "out.gguf"), ("vllm", "out"), ("sglang", "out"), ("transformers", "out")):
        with pytest.raises(FamilyError, match=r"1 routed expert in 1 group: .*llama-model\.cpp:1365"):
            export(folder, tmp_path / out, engine)
    data, key = path.read_bytes(), b"glm4moe.expert_count"
    assert data.count(key) == 1
    at = data.index(key) + len(key) + 4  # behind the type
    path.write_bytes(data[:at] + (1).to_bytes(4, "little") + data[at + 4 :])
    (finding,) = (each for each in audit_gguf(path).findings if each.rule == "single-expert")
    assert finding.severity == "error"
    assert finding.found == "1 routed expert in 1 group: llama.cpp does not load the file."


def test_command(made, tmp_path, here):
    code, out, _ = here("export", made / "qwen2-head", tmp_path / "out.gguf", "--for", "llama.cpp", "-k", "4")
    assert code == 0
    assert out.startswith(f"# llama.cpp {RUN['llama.cpp']} was run with two-layer models by llama-server")
    assert out.splitlines()[-1] == (
        f"llama-server -m {tmp_path}/out.gguf --spec-type draft-mtp --spec-draft-n-max 4 --swa-full --metrics"
    )
    assert here("audit", tmp_path / "out.gguf")[0] == 0
    assert here("export", made / "qwen2-head", tmp_path / "out.gguf", "--for", "llama.cpp")[0] == 2
