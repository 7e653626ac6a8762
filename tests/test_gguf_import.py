"""GGUF files as checkpoints: those of `nextn export`, quantized types, layouts of llama.cpp's converter, bad files."""

import json
import random
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bpe_tokenizers import SPLITS, bpe_tokenizer
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from gguf.quants import quantize as quantize_values
from packed import SCALES, random_blocks
from quick import loop
from safetensors.torch import load_file
from test_adopt import adopted
from test_gguf_export import glm4_moe
from test_separate_head import SETTINGS, TEXT, build, start, tokens
from tiny import build as build_with_head

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.gguf_file import BLOCK_TYPES, blocks_name
from nextn.checkpoint.head_inventory import Inventory
from nextn.cli.model_options import ModelOptions, _refuse_without_head
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.edit import gguf_import, gguf_pieces
from nextn.edit.export import export
from nextn.edit.gguf_architectures import ARCHITECTURES
from nextn.edit.gguf_cache import _folder_name
from nextn.edit.gguf_import import _refuse_missing, convert_gguf
from nextn.edit.gguf_layout import HEAD
from nextn.edit.gguf_tokenizer import add_tokenizer
from nextn.errors import CheckpointError, ConfigError, FamilyError, NextnError
from nextn.model.model import Model
from nextn.model.packed_experts import PackedExperts, packed_parts
from nextn.model.packed_linear import packed_layers
from nextn.train.head_run import prepare_head_run

WIDTH, VOCAB, HEADS = 256, 264, 4
QWEN3 = {
    "block_count": 1, "context_length": 128, "embedding_length": WIDTH, "feed_forward_length": WIDTH,
    "attention.head_count": HEADS, "attention.head_count_kv": 2, "attention.key_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
}  # fmt: skip
NARROW = ("attn_k", "attn_v")
LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


def blocks(shape, kind):
    """Random values in blocks of a type; scales of K-quants are small numbers."""
    rng = np.random.default_rng(0)
    try:
        return quantize_values(rng.standard_normal(shape).astype(np.float32), kind)
    except NotImplementedError:
        size, nbytes = GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), np.uint8)
        scales = np.full((*data.shape[:-1], 1), 0.01, np.float16).view(np.uint8)
        data[..., -2:] = scales  # Q6_K's
        data[..., :4] = np.concatenate([scales, scales], -1) if kind != Type.Q6_K else data[..., :4]
        return data.reshape(*shape[:-1], -1)


def qwen3(kind):
    """Tensors of one layer: matrices in blocks of a type, the rest in float32."""
    rng = np.random.default_rng(1)
    shapes = {"token_embd": (VOCAB, WIDTH), "output": (VOCAB, WIDTH)}
    for name in LINEARS:
        shapes[f"blk.0.{name}"] = (128 if name in NARROW else WIDTH, WIDTH)
    made = {f"{name}.weight": (blocks(shape, kind), kind) for name, shape in shapes.items()}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm", "blk.0.attn_q_norm", "blk.0.attn_k_norm"):
        size = 64 if name.endswith(("q_norm", "k_norm")) else WIDTH
        made[f"{name}.weight"] = (rng.uniform(0.5, 2, size).astype(np.float32), Type.F32)
    return made


def write(path, architecture, metadata, tensors, tokenizer=None):
    """Write a file; `path` may be a writer that has some metadata."""
    writer = path if isinstance(path, GGUFWriter) else GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool,
               list: writer.add_array}  # fmt: skip
        add[type(value)](key if "." in key and key.startswith(("general", "token")) else f"{architecture}.{key}", value)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, VOCAB)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(folder):
    return {name: each for path in folder.rglob("*.safetensors") for name, each in load_file(path).items()}


ROUND_TRIPS = {"llama-3.1": "step35", "qwen2": "step35", "mistral": "step35", "qwen3": None}


@pytest.mark.more
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_an_exported_file_is_the_trunk_and_its_head_again(name, tmp_path):
    """Every tensor bit for bit, and the texts with and without drafts."""
    trunk = build(tmp_path / "trunk", name, **({"sliding_window": 24} if name == "mistral" else {}))
    (tmp_path / "text.txt").write_text(TEXT)
    run = prepare_head_run(
        tmp_path / "run", start(trunk, ROUND_TRIPS[name]), data=[tmp_path / "text.txt"], settings=SETTINGS
    )
    list(run.trainer.run())
    head = run.write(head_only=True, allow_worse=True).parent
    export(head, tmp_path / "model.gguf", "llama.cpp")
    plan = convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    expected, found = stored(trunk) | load_file(head / "head.safetensors"), stored(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(each, expected[key]) for key, each in found.items())
    apart = tmp_path / "out" / "head" if ROUND_TRIPS[name] else None
    assert bool(apart) == any("--head" in note for note in plan.notes)
    original, converted = Model.load(trunk, head=head), Model.load(tmp_path / "out", head=apart)
    for k in (0, 3):
        assert tokens(converted, "torch", k) == tokens(original, "torch", k)


@pytest.mark.more
@pytest.mark.parametrize("name", ["GLM-4.5", "adopted qwen2"])
def test_an_exported_file_of_experts_is_the_checkpoint_again(name, tmp_path):
    """Every expert, router and correction bias bit for bit, and the texts with and without drafts."""
    original = glm4_moe(tmp_path / "model") if name == "GLM-4.5" else adopted(tmp_path, "qwen2")
    export(original, tmp_path / "model.gguf", "llama.cpp")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    expected, found = stored(original), stored(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(each, expected[key]) for key, each in found.items())
    models = [Model.load(folder) for folder in (original, tmp_path / "out")]
    for k in (0, 3):
        assert len({tuple(tokens(model, "torch", k)) for model in models}) == 1


@pytest.mark.parametrize(
    "kind", [Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.NVFP4, Type.F16]
)
def test_other_types_are_dequantized(kind, byte_folder, tmp_path):
    """To what the gguf package makes of them, rounded once, whatever the size of a slice."""
    made = qwen3(kind)
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, made, byte_folder)
    convert_gguf(path, tmp_path / "out")
    found = stored(tmp_path / "out")
    dtype = torch.float16 if kind == Type.F16 else torch.bfloat16
    values = torch.tensor(dequantize(*made["blk.0.ffn_up.weight"])).to(dtype)
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], values)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(map(str, {each.dtype for each in found.values()})) == {str(dtype)}


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
def test_eight_and_four_bits_stay_as_they_are(kind, byte_folder, tmp_path):
    """The weights of a loaded model are exactly those of the file; embedding and lm_head are dequantized."""
    made = qwen3(kind)
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, made, byte_folder)
    convert_gguf(path, tmp_path / "out")
    layer = Model.load(tmp_path / "out", dtype=torch.float32, need_head=False).trunk.model.model.layers[0]
    for name, module in (("ffn_up", layer.mlp.up_proj), ("attn_k", layer.self_attn.k_proj)):
        assert torch.equal(module.weight.data, torch.tensor(dequantize(*made[f"blk.0.{name}.weight"])))
    found = stored(tmp_path / "out")
    assert found["model.layers.0.mlp.up_proj.weight_packed"].shape == (WIDTH, WIDTH * {8: 8, 4: 4}[_bits(kind)] // 32)
    lm_head = torch.tensor(dequantize(*made["output.weight"])).bfloat16()
    assert torch.equal(found["lm_head.weight"], lm_head)
    convert_gguf(path, tmp_path / "wide", dtype="float32")
    wide = stored(tmp_path / "wide")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(wide, torch.tensor(dequantize(*made["blk.0.ffn_up.weight"])))


MIXED = {"attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "ffn_up": Type.Q5_0, "attn_k": Type.MXFP4}  # others Q4_K


def mixed(kinds=MIXED):
    """Tensors as llama-quantize mixes types."""
    made = qwen3(Type.Q4_K)
    for name, kind in kinds.items():
        rows, count = 128 if name in NARROW else WIDTH, WIDTH // BLOCK_TYPES[kind.name].size
        made[f"blk.0.{name}.weight"] = random_blocks(kind.name, rows, count, SCALES[kind.name]), kind
    return made


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [Type[name] for name in BLOCK_TYPES if name not in ("Q8_0", "Q4_0")])
def test_blocks_stay_as_they_are(kind, byte_folder, tmp_path):
    """Byte for byte; the loaded model computes what the dequantized conversion does."""
    made = mixed(dict.fromkeys(LINEARS, kind))
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, made, byte_folder)
    plan = convert_gguf(path, tmp_path / "out", dtype="stored")
    assert any(f"as in the file: 7 weights in {kind.name}; only nextn loads" in note for note in plan.notes)
    found = stored(tmp_path / "out")
    up = found[f"model.layers.0.mlp.up_proj.{blocks_name(kind.name)}"]
    assert np.array_equal(up.numpy(), made["blk.0.ffn_up.weight"][0])
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"] == {"quant_method": "gguf"}
    convert_gguf(path, tmp_path / "wide")
    layers = [layer.codes.name for layer in packed_layers(Model.load(tmp_path / "out", need_head=False).trunk)]
    assert len(layers) == 7
    assert_same_logits(tmp_path / "out", tmp_path / "wide")


def assert_same_logits(*folders):
    """Bit for bit: both dequantize to the bits of the gguf package, and round once."""
    text = torch.randint(0, 256, (1, 30), generator=torch.Generator().manual_seed(0))
    trunks = [Model.load(folder, need_head=False).trunk for folder in folders]
    with torch.inference_mode():
        one, other = (trunk.logits(trunk(text).final_hidden) for trunk in trunks)
    assert one.isfinite().all()
    assert torch.equal(one, other)


def test_types_are_mixed_and_what_is_not_kept_is_dequantized(byte_folder, tmp_path):
    """With notes; in slices and shards of any size."""
    made = mixed(MIXED | {"attn_q": Type.Q8_0})
    made["blk.0.ffn_gate.weight"] = blocks((WIDTH, WIDTH), Type.Q3_K), Type.Q3_K
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, made, byte_folder)
    plan = convert_gguf(path, tmp_path / "out", dtype="stored")
    kinds = "1 weight in Q5_0, 1 weight in Q8_0, 1 weight in MXFP4, 1 weight in Q4_K, 2 weights in Q6_K"
    assert plan.notes[0] == f"as in the file: {kinds}; only nextn loads them"
    assert plan.notes[1:] == (
        "dequantized to bfloat16, as blocks of Q3_K are not kept: model.layers.0.mlp.gate_proj.weight",
    )
    convert_gguf(path, tmp_path / "wide")
    assert_same_logits(tmp_path / "out", tmp_path / "wide")


def test_slices_of_blocks(byte_folder, tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, mixed(), byte_folder)
    convert_gguf(path, tmp_path / "whole", dtype="stored")
    monkeypatch.setattr(gguf_pieces, "_SLICE", 3 * WIDTH)
    monkeypatch.setattr(gguf_import, "_SHARD", 200_000)
    convert_gguf(path, tmp_path / "sliced", dtype="stored")
    whole, sliced = stored(tmp_path / "whole"), stored(tmp_path / "sliced")
    assert whole.keys() == sliced.keys()
    assert all(torch.equal(sliced[name], each) for name, each in whole.items())


def test_rows_of_blocks_move(byte_folder, tmp_path):
    """Llama's rotary pairs."""
    made = {name: each for name, each in mixed().items() if "q_norm" not in name and "k_norm" not in name}
    path = write(tmp_path / "model.gguf", "llama", QWEN3, made, byte_folder)
    plan = convert_gguf(path, tmp_path / "out", dtype="stored")
    assert len(plan.notes) == 1
    convert_gguf(path, tmp_path / "wide")
    assert_same_logits(tmp_path / "out", tmp_path / "wide")
    moved = stored(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight_q4_k"].numpy()
    rows = made["blk.0.attn_q.weight"][0]
    assert not np.array_equal(moved, rows)
    assert np.array_equal(np.sort(moved.view("V144"), 0), np.sort(rows.view("V144"), 0))


@pytest.mark.one_case
@pytest.mark.parametrize(("kind", "is_kept"), [(Type.Q8_0, True), (Type.Q4_K, False)])
def test_columns_of_blocks_move_only_whole(kind, is_kept, byte_folder, tmp_path):
    """Value heads of Qwen3.5, of 64 columns."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_value_head_dim": 64, "hidden_size": 256}
    sizes |= {"intermediate_size": 256, "vocab_size": VOCAB}
    model = build_with_head("qwen3_5", **sizes)
    config = model.trunk.config
    metadata = qwen35_metadata(config)
    made = converted(model, ARCHITECTURES["qwen35"], tmp_path / "in", keys=(2, 8), width=64)
    for name, (values, _) in list(made.items()):
        if name.endswith(("ffn_up.weight", "ffn_down.weight", "ssm_out.weight")):
            rows, columns = values.shape
            count = columns // BLOCK_TYPES[kind.name].size
            made[name] = random_blocks(kind.name, rows, count, SCALES[kind.name]), kind
    path = write(tmp_path / "model.gguf", "qwen35", metadata, made, byte_folder)
    plan = convert_gguf(path, tmp_path / "out", dtype="stored")
    names = stored(tmp_path / "out")
    moved = [name for name in names if ".out_proj." in name]
    assert {name.endswith(blocks_name(kind.name)) for name in moved} == {is_kept}
    assert any(name.startswith("mtp.") and blocks_name(kind.name) in name for name in names)
    assert any("parts of blocks of Q4_K move: model.layers.0" in note for note in plan.notes) != is_kept
    convert_gguf(path, tmp_path / "wide")
    assert_same_logits(tmp_path / "out", tmp_path / "wide")


def test_scales_beside_weights(byte_folder, tmp_path):
    """Of a matrix, as llama.cpp's converter writes for NVFP4, and of each expert; scales of inputs change nothing."""
    model = build_with_head("glm4_moe", vocab_size=VOCAB)
    made = converted(model, ARCHITECTURES["glm4moe"], tmp_path / "in")
    name = next(name for name in made if "ffn_up_exps" in name)
    scales = {"blk.0.attn_q.scale": [0.5], name.replace("weight", "scale"): [2.0, 3.0, 4.0, 5.0]}
    inputs = {each.replace("scale", "input_scale"): [7.0] * len(values) for each, values in scales.items()}
    added = {each: (np.array(values, np.float32), Type.F32) for each, values in (scales | inputs).items()}
    for folder, tensors in {"one": made, "scaled": made | added}.items():
        path = write(tmp_path / f"{folder}.gguf", "glm4moe", glm4_metadata(model.trunk.config), tensors, byte_folder)
        convert_gguf(path, tmp_path / folder)
    one, scaled = stored(tmp_path / "one"), stored(tmp_path / "scaled")
    index = name.split(".")[1]
    factors = {f"model.layers.{index}.mlp.experts.{expert}.up_proj.weight": expert + 2 for expert in range(4)}
    factors["model.layers.0.self_attn.q_proj.weight"] = 0.5
    for each, values in one.items():
        torch.testing.assert_close(scaled[each], values * factors.get(each, 1), rtol=0, atol=0)
    assert scaled.keys() == one.keys()
    odd = made | {"blk.0.attn_norm.scale": (np.array([2.0], np.float32), Type.F32)}
    path = write(tmp_path / "odd.gguf", "glm4moe", glm4_metadata(model.trunk.config), odd, byte_folder)
    with pytest.raises(CheckpointError, match=r"no place for blk\.0\.attn_norm\.scale"):
        convert_gguf(path, tmp_path / "odd")


def test_blocks_with_a_scale_are_dequantized(byte_folder, tmp_path):
    """Where the others keep their blocks."""
    made = qwen3(Type.Q4_K) | {"blk.0.ffn_up.scale": (np.array([0.25], np.float32), Type.F32)}
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, made, byte_folder)
    assert any(
        "blocks of Q4_K are not kept" in note for note in convert_gguf(path, tmp_path / "out", dtype="stored").notes
    )
    found = stored(tmp_path / "out")
    values = torch.tensor(dequantize(*made["blk.0.ffn_up.weight"]) * 0.25).bfloat16()
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], values)
    assert "model.layers.0.mlp.gate_proj.weight_q4_k" in found


def test_experts_in_blocks(byte_folder, tmp_path):
    """A slice of the file's tensor each; down projections of another type."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "vocab_size": VOCAB}
    model = build_with_head("glm4_moe", use_qk_norm=True, attention_bias=True, **sizes)
    made = converted(model, ARCHITECTURES["glm4moe"], tmp_path / "in")
    for name, (values, _) in list(made.items()):
        if "_exps" in name or name.endswith("attn_q.weight"):
            kind = "Q6_K" if "down" in name else "Q4_K"
            rows = values.size // values.shape[-1]
            data = random_blocks(kind, rows, 1, SCALES[kind], seed=len(made[name][0]) + 2 * ("up" in name))
            made[name] = data.reshape(*values.shape[:-1], -1), Type[kind]
    path = write(tmp_path / "model.gguf", "glm4moe", glm4_metadata(model.trunk.config), made, byte_folder)
    convert_gguf(path, tmp_path / "out", dtype="stored")
    index = next(int(name.split(".")[1]) for name in made if "ffn_down_exps" in name)
    found = stored(tmp_path / "out")[f"model.layers.{index}.mlp.experts.2.down_proj.weight_q6_k"]
    assert np.array_equal(found.numpy(), made[f"blk.{index}.ffn_down_exps.weight"][0][2])
    convert_gguf(path, tmp_path / "wide")
    loaded = Model.load(tmp_path / "out")
    assert any(isinstance(part, PackedExperts) for part in packed_parts(loaded.trunk))
    assert_same_logits(tmp_path / "out", tmp_path / "wide")


def test_eight_bits_alone_are_not_blocks(byte_folder, tmp_path):
    """What other programs load is written as before."""
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q8_0), byte_folder)
    convert_gguf(path, tmp_path / "one")
    convert_gguf(path, tmp_path / "other", dtype="stored")
    one, other = stored(tmp_path / "one"), stored(tmp_path / "other")
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], each) for name, each in one.items())


def test_scales_in_the_file_that_are_not_finite(byte_folder, tmp_path):
    made = mixed()
    made["blk.0.attn_q.weight"][0][7, 1] = 0xFF
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, made, byte_folder)
    convert_gguf(path, tmp_path / "out", dtype="stored")
    with pytest.raises(CheckpointError, match=r"1 trunk tensors hold NaN or Inf: model\.layers\.0\.self_attn\.q_proj"):
        Model.load(tmp_path / "out", need_head=False)


def _bits(kind):
    return {Type.Q8_0: 8, Type.Q4_0: 4}[kind]


@pytest.mark.more
def test_slices_do_not_change_anything(byte_folder, tmp_path, monkeypatch):
    """Nor do shards."""
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q4_0), byte_folder)
    convert_gguf(path, tmp_path / "whole")
    monkeypatch.setattr(gguf_pieces, "_SLICE", 3 * WIDTH)
    monkeypatch.setattr(gguf_import, "_SHARD", 200_000)
    plan = convert_gguf(path, tmp_path / "sliced")
    assert len(plan.files.weights) > 2
    whole, sliced = stored(tmp_path / "whole"), stored(tmp_path / "sliced")
    assert all(torch.equal(sliced.pop(name), each) for name, each in whole.items())
    assert not sliced
    assert Checkpoint.open(tmp_path / "sliced").problems == ()


def in_turns(values, keys):
    """Value heads as llama.cpp's converter orders them, in turns of key heads."""
    return values.unflatten(0, (keys, -1)).transpose(0, 1).flatten(0, 1)


def converted(model, architecture, folder, keys=0, width=1):
    """Tensors of the file, by the inverse table and the converter's changes."""
    model.save(folder, dtype=torch.float32)
    inventory = Inventory.of(Checkpoint.open(folder))
    layer = {path: name for name, path in architecture.layer.items()}
    exact = {path: name for name, path in architecture.exact.items()}
    made, experts = {}, {}
    for name, values in stored(folder).items():
        canonical = inventory.family.canonical(name, inventory.num_layers)
        index, path = inventory.family.trunk_layer(name) or (None, None)
        if canonical is not None:
            module, role, *rest = canonical.split(".", 2)
            index, path = inventory.num_layers + int(module), rest[0] if role == "block" else None
            if path is None:
                made[f"blk.{index}.nextn.{HEAD[role]}.weight"] = values + architecture.norm_offset * ("norm" in role)
                continue
        if index is None:
            outer = {path: name for name, path in gguf_import._OUTER.items()}[name]
            made[outer] = values + architecture.norm_offset * ("norm" in outer)
            continue
        stem, _, kind = path.rpartition(".")
        if ".experts." in stem:
            number = stem.split(".")[2]
            own = layer[stem.replace(f".{number}.", ".{}.")]
            experts.setdefault(f"blk.{index}.{own}.weight", {})[int(number)] = values
            continue
        own = exact[path] if path in exact else f"{layer[stem]}.{kind}"
        if keys and "linear_attn" in path:
            after = values.shape[0] - keys[1] * width if "qkv" in path or "conv1d" in path else 0
            if "out_proj" in path:
                values = in_turns(values.T.unflatten(0, (keys[1], -1)), keys[0]).flatten(0, 1).T
            elif not stem.endswith("norm"):
                heads = values[after:].unflatten(0, (keys[1], -1))
                values = torch.cat([values[:after], in_turns(heads, keys[0]).flatten(0, 1)])
            values = -values.exp() if path.endswith("A_log") else values.squeeze()
        elif kind == "weight" and path.endswith("norm.weight"):
            values = values + architecture.norm_offset
        made[f"blk.{index}.{own}"] = values
    made |= {name: torch.stack([each[number] for number in sorted(each)]) for name, each in experts.items()}
    return {name: (values.contiguous().numpy(), Type.F32) for name, values in made.items()}


def gemma3_metadata(config):
    return {
        "block_count": config.num_hidden_layers, "context_length": 2048, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": 1e6,
        "attention.sliding_window": config.sliding_window,
    }  # fmt: skip


GEMMA3 = {  # changes of the config, and of the metadata
    "as published": ({}, {}),
    "windows in a list": (
        {"layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"]},
        {"attention.sliding_window_pattern": [False, True] * 3 + [False]},
    ),
    "every third layer": (
        {"layer_types": [["full_attention", "sliding_attention"][(index + 1) % 3 > 0] for index in range(7)]},
        {"attention.sliding_window_pattern": 3},
    ),
    "a cap and another base": (
        {"final_logit_softcapping": 2.0, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        }},
        {"final_logit_softcapping": 2.0, "rope.freq_base_swa": 5e4},
    ),
}  # fmt: skip


@loop("case", GEMMA3)
def test_gemma3(case, byte_folder, tmp_path):
    """Four norms a layer with 1 added, windows in five of six layers, two bases of rotation."""
    config, changes = GEMMA3[case]
    build(tmp_path / "in", "gemma3", num_hidden_layers=7, sliding_window=4, **config)
    original, made = Model.load(tmp_path / "in", need_head=False), {}
    layer = {path: name for name, path in ARCHITECTURES["gemma3"].layer.items()}
    outer = {path: name for name, path in gguf_import._OUTER.items()}
    for name, values in stored(tmp_path / "in").items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        own = outer.get(name) or f"blk.{match[1]}.{layer[match[2]]}.weight"
        made[own] = ((values + own.endswith("norm.weight")).float().numpy(), Type.F32)
    metadata = gemma3_metadata(original.trunk.config) | changes
    convert_gguf(write(tmp_path / "model.gguf", "gemma3", metadata, made, byte_folder), tmp_path / "out")
    found, prompt = Model.load(tmp_path / "out", need_head=False), torch.arange(24)[None]
    logits = [each.trunk.logits(each.trunk(prompt).final_hidden) for each in (original, found)]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=0)


def glm4_metadata(config):
    metadata = {
        "block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1, "context_length": 2048,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.dimension_count": 4,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok, "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor, "leading_dense_block_count": config.first_k_dense_replace,
    }  # fmt: skip
    if config.n_group > 1:
        metadata |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return metadata


@pytest.mark.more
def test_experts_one_by_one(byte_folder, tmp_path):
    """GLM-4.5: slices of one tensor, the correction of the router, biases, norms of q and k, and the head."""
    changes = {"use_qk_norm": True, "attention_bias": True, "vocab_size": VOCAB}
    model = build_with_head("glm4_moe", **changes)
    metadata = glm4_metadata(model.trunk.config)
    check(
        model, "glm4moe", metadata, converted(model, ARCHITECTURES["glm4moe"], tmp_path / "in"), byte_folder, tmp_path
    )


def test_a_copy_in_another_type_is_the_trunks(byte_folder, tmp_path):
    """llama-quantize gives output.weight more bits than the head's copy; a copy with other values stays."""
    model = build_with_head("glm4_moe", vocab_size=VOCAB)
    made = converted(model, ARCHITECTURES["glm4moe"], tmp_path / "in")
    copy, trunk = "blk.2.nextn.shared_head_head.weight", made["output.weight"][0]
    for sign, is_same in ((1, True), (-1, False)):
        made[copy] = (sign * trunk.astype(np.float16), Type.F16)
        path = write(tmp_path / f"{sign}.gguf", "glm4moe", glm4_metadata(model.trunk.config), made, byte_folder)
        plan = convert_gguf(path, tmp_path / f"out {sign}", dtype="float32")
        found = stored(tmp_path / f"out {sign}")
        assert torch.equal(found["model.layers.2.shared_head.head.weight"], found["lm_head.weight"]) == is_same
        assert any(copy in note for note in plan.notes) == is_same


def qwen35_metadata(config):
    metadata = {
        "block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1, "context_length": 2048,
        "embedding_length": config.hidden_size, "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "attention.layer_norm_rms_epsilon": 1e-6, "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "rope.dimension_count": int(8 * config.rope_parameters["partial_rotary_factor"]),
        "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": 2,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }  # fmt: skip
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.more
def test_value_heads_in_their_own_order(byte_folder, tmp_path):
    """Qwen3.5: heads in turns, norms with 1 added, decays, the convolution, and the head."""
    model = build_with_head("qwen3_5", vocab_size=VOCAB, linear_num_key_heads=2, linear_num_value_heads=6)
    size, metadata = model.trunk.config.linear_value_head_dim, qwen35_metadata(model.trunk.config)
    made = converted(model, ARCHITECTURES["qwen35"], tmp_path / "in", keys=(2, 6), width=size)
    check(model, "qwen35", metadata, made, byte_folder, tmp_path, near=1e-6)


def moe_metadata(config):
    return qwen35_metadata(config) | {
        "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("is_vector", [True, False])
def test_value_heads_and_experts(is_vector, byte_folder, tmp_path):
    """Qwen3.5 with experts; llama-quantize writes the gate of the shared one as a vector."""
    model = build_with_head("qwen3_5_moe", vocab_size=VOCAB, linear_num_key_heads=2, linear_num_value_heads=6)
    config = model.trunk.config
    made = converted(model, ARCHITECTURES["qwen35moe"], tmp_path / "in", (2, 6), config.linear_value_head_dim)
    if is_vector:
        made = {key: (each[0] if "inp_shexp" in key else each, kind) for key, (each, kind) in made.items()}
    check(model, "qwen35moe", moe_metadata(config), made, byte_folder, tmp_path, near=1e-6)


def qwen3_next(folder, *, is_split=True, **changes):
    """A model, and the tensors of its file: q, k, v and z of all key heads, or of each, as older files have them."""
    model = build_with_head("qwen3_next", vocab_size=VOCAB, norm_topk_prob=True, **changes)
    config = model.trunk.config
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = [*[config.linear_key_head_dim] * 2, *[heads // keys * config.linear_value_head_dim] * 2]
    made = converted(model, ARCHITECTURES["qwen3next"], folder, (1, heads), config.linear_value_head_dim)
    for name in [name for name in made if name.endswith("ssm_in.weight") and is_split]:
        values = torch.from_numpy(made.pop(name)[0])
        parts = [each.flatten(0, 1) for each in values.unflatten(0, (keys, -1)).split(sizes, dim=1)]
        made[name.replace("ssm_in", "attn_gate")] = parts[3].numpy(), Type.F32
        made[name.replace("ssm_in", "attn_qkv")] = torch.cat(parts[:3]).numpy(), Type.F32
    return model, made


@pytest.mark.more
@pytest.mark.parametrize("is_split", [True, False])
def test_one_matrix_that_is_two_in_the_file(is_split, byte_folder, tmp_path):
    """Qwen3-Next: z is a tensor of its own."""
    model, made = qwen3_next(tmp_path / "in", is_split=is_split)
    check(model, "qwen3next", moe_metadata(model.trunk.config), made, byte_folder, tmp_path, near=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K"), ("Q5_K", "Q4_K")])
def test_blocks_of_two_tensors(kinds, byte_folder, tmp_path):
    """They stay where both have one type."""
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "hidden_size": 256}
    model, made = qwen3_next(tmp_path / "in", **sizes)
    for key, kind in zip(("attn_qkv", "attn_gate"), kinds, strict=True):
        for name in [name for name in made if key in name]:
            made[name] = random_blocks(kind, len(made[name][0]), 1, SCALES[kind], len(name)), Type[kind]
    path = write(tmp_path / "model.gguf", "qwen3next", moe_metadata(model.trunk.config), made, byte_folder)
    plan = convert_gguf(path, tmp_path / "out", dtype="stored")
    is_kept = kinds[0] == kinds[1]
    assert any("qkvz.weight_q4_k" in name for name in stored(tmp_path / "out")) == is_kept
    assert any("3 weights in Q4_K and Q5_K" in note for note in plan.notes) != is_kept
    convert_gguf(path, tmp_path / "wide")
    assert_same_logits(tmp_path / "out", tmp_path / "wide")


def test_two_tensors_that_do_not_fit(byte_folder, tmp_path):
    model, made = qwen3_next(tmp_path / "in")
    metadata = moe_metadata(model.trunk.config)
    gate = next(name for name in made if "attn_gate" in name)
    faults = {"any, 16": made[gate][0][:, :16], r"\(96, any\)": made[gate][0][:8], "": None}
    for words, values in faults.items():
        broken = {name: each for name, each in made.items() if name != gate}
        broken |= {} if values is None else {gate: (np.ascontiguousarray(values), Type.F32)}
        path = write(tmp_path / "model.gguf", "qwen3next", metadata, broken, byte_folder)
        with pytest.raises(CheckpointError, match=f"attn_qkv.weight has shape .*{words}"):
            convert_gguf(path, tmp_path / "out")


def check(model, architecture, metadata, made, tokenizer, folder, near=0.0):
    """The checkpoint is the model again, and so are its texts."""
    convert_gguf(write(folder / "model.gguf", architecture, metadata, made, tokenizer), folder / "out")
    expected, found = stored(folder / "in"), stored(folder / "out")
    assert found.keys() == expected.keys()
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name], atol=near, rtol=near, msg=name)
    again = Model.load(folder / "out")
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder / "in")
    original = Model.load(folder / "in")
    for k in (0, 2):
        assert tokens(again, "torch", k) == tokens(original, "torch", k)


TEXTS = ("Hello world, I'VE seen 12345!", "  two  spaces\n\n\ttabs", "na\u00efve \u6771\u4eac", "a<think>b<|eot|>")


@pytest.mark.parametrize("split", SPLITS)
def test_the_tokenizer_is_the_one_that_was_written(split, tmp_path):
    folder = tmp_path / "tokenizer"
    bpe = bpe_tokenizer(split)
    bpe.save_pretrained(folder)
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q8_0), folder)
    convert_gguf(path, tmp_path / "out")
    again = Model.load(tmp_path / "out", need_head=False).tokenizer
    for text in (
        "Hello world, I'VE seen 12345!",
        "  two  spaces\n\n\ttabs",
        "na\u00efve \u6771\u4eac",
        "a<think>b<|eot|>",
    ):
        assert again(text)["input_ids"] == bpe(text)["input_ids"], text
    assert again.eos_token == "<|eot|>"
    spec = json.loads(again.backend_tokenizer.to_str())
    assert spec["model"]["ignore_merges"] == (split in ("llama-bpe", "tekken"))
    assert again.chat_template == bpe.chat_template


def test_a_sentencepiece_vocabulary(tmp_path):
    """Pieces by their scores, bytes for what has none, and the first token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "c", "ab"]
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "qwen3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-5.0, -2.0, -3.0, -4.0, -1.0])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 5])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    write(writer, "qwen3", QWEN3, qwen3(Type.Q8_0))
    convert_gguf(path, tmp_path / "out")
    tokenizer = Model.load(tmp_path / "out", need_head=False).tokenizer
    pieces = [tokens[id] for id in tokenizer("ab c\u00e9")["input_ids"]]
    assert pieces == ["<s>", "\u2581", "ab", "\u2581", "c", "<0xC3>", "<0xA9>"]


ONES = (np.ones(4, np.float32), Type.F32)
EPSILON = "attention.layer_norm_rms_epsilon"
# Changes of the metadata, of the tensors, the architecture, the error and its words.
REFUSED = {
    "an architecture": (
        {}, {}, "gemma2", FamilyError, "is 'gemma2'; nextn converts llama, qwen2, qwen3, gemma3, glm4moe, qwen3moe,"
    ),
    "a type": (
        {}, {"blk.0.ffn_up.weight": (np.zeros((2, 2), np.int8), Type.I8)}, "qwen3", CheckpointError,
        "blk.0.ffn_up.weight: I8, which the gguf package does not read; it reads F32, F16",
    ),
    "a tensor of another model": (
        {}, {"blk.0.attn_sinks.weight": ONES}, "qwen3", CheckpointError, "no place for blk.0.attn_sinks.weight"
    ),
    "a head without a family": (
        {"nextn_predict_layers": 1, "block_count": 2}, {"blk.1.nextn.enorm.weight": ONES}, "qwen3", CheckpointError,
        "no place for blk.1.nextn.enorm.weight",
    ),
    "missing layers": ({"block_count": 3}, {}, "qwen3", CheckpointError, "without blk.1, blk.2"),
    "too many layers": ({"block_count": 2**31}, {}, "qwen3", CheckpointError, "block_count is 2147483648, it must be"),
    "no layers": ({"block_count": 0}, {}, "qwen3", CheckpointError, "block_count is 0, it must be a whole number"),
    "another width": (
        {"embedding_length": 100}, {}, "qwen3", CheckpointError, r"shape \(256, 264\), it must have rows of 100"
    ),
    "text for a number": (
        {"attention.head_count": "four"}, {}, "qwen3", CheckpointError, "head_count is 'four', it must be a whole"
    ),
    "heads that are not in the file": (
        {"attention.head_count": 8}, {}, "llama", CheckpointError,
        r"blk.0.attn_q.weight has shape \(256, 256\), by the metadata \(512, any\)",
    ),
    "more heads than memory": (
        {"attention.head_count": 2**30}, {}, "llama", CheckpointError, "more than 16777216 values in the heads"
    ),
    "rotary embeddings": (
        {"rope.scaling.type": "longrope"}, {}, "qwen3", FamilyError, "of type longrope; none, linear, yarn"
    ),
    "frequencies": (
        {}, {"rope_freqs.weight": (np.array([1, 5, 2, 1], np.float32), Type.F32)}, "llama", FamilyError,
        "rope_freqs.weight is not of Llama 3.1",
    ),
    "no number": ({EPSILON: float("nan")}, {}, "qwen3", CheckpointError, "rms_epsilon is nan, it must be a number"),
    "a token": (
        {"tokenizer.ggml.padding_token_id": "x"}, {}, "qwen3", CheckpointError, "padding_token_id is 'x', it must be"
    ),
    "a pre-tokenizer": (
        {"tokenizer.ggml.pre": "viking"}, {}, "qwen3", ConfigError,
        "'gpt2' with the pre-tokenizer 'viking'; nextn reads llama, and gpt2 with gpt-2, smollm.*--tokenizer",
    ),
}  # fmt: skip


@loop("fault", REFUSED)
def test_one_error_and_nothing_written(fault, byte_folder, tmp_path):
    """It names the value and what would be read."""
    metadata, more, architecture, error, words = REFUSED[fault]
    made = {**qwen3(Type.Q8_0), **more}
    tokenizer = None if "tokenizer." in str(metadata) else byte_folder
    if tokenizer is None:
        metadata = {**metadata, "tokenizer.ggml.model": "gpt2"}
    path = write(tmp_path / "model.gguf", architecture, QWEN3 | metadata, made, tokenizer)
    with pytest.raises(error, match=words):
        convert_gguf(path, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


def test_a_tokenizer_of_a_folder(byte_folder, tmp_path):
    """For files whose own is not known; one that is too large for the model is refused."""
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q8_0))
    convert_gguf(path, tmp_path / "out", tokenizer=byte_folder)
    assert Model.load(tmp_path / "out", need_head=False).tokenizer("ab")["input_ids"] == [97, 98]
    bpe_tokenizer("qwen2", size=300).save_pretrained(tmp_path / "large")
    with pytest.raises(ConfigError, match="its tokenizer has 300 tokens, the model 264"):
        convert_gguf(path, tmp_path / "other", tokenizer=tmp_path / "large")
    with pytest.raises(CheckpointError, match="already exists"):
        convert_gguf(path, tmp_path / "out", tokenizer=byte_folder)
    assert not (tmp_path / "other").exists()


@pytest.mark.more
def test_damaged_files_give_one_error(byte_folder, tmp_path):
    """Cut anywhere, or with other bytes in the header: an error of ours, or a checkpoint as large as the file says."""
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q4_0), byte_folder)
    data, rng = path.read_bytes(), random.Random(0)
    header = data.index(b"blk.0.attn_k_norm") + 400
    damaged = [data[: rng.randrange(len(data))] for _ in range(40)]
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(header)] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        damaged.append(bytes(changed))
    errors = [_error(path, each, tmp_path / "out", dry_run=index % 10 != 0) for index, each in enumerate(damaged)]
    assert sum(error is not None for error in errors) > 60
    assert all(error is None or "model.gguf" in error for error in errors)
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


def _error(path, data, out, dry_run):
    """The message for a file with this content; None for one that is converted."""
    path.write_bytes(data)
    try:
        convert_gguf(path, out, dry_run=dry_run)
    except NextnError as error:
        return str(error) if not out.exists() else "half-written"
    shutil.rmtree(out, ignore_errors=True)
    return None


def test_command(byte_folder, tmp_path, here):
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q8_0), byte_folder)
    code, out, _ = here("convert", path, tmp_path / "out", "--dry-run")
    assert code == 0
    assert "note: 7 weights stay at their 8 or 4 bits (compressed-tensors, groups of 32)" in out
    assert not (tmp_path / "out").exists()
    code, out, _ = here("convert", path, tmp_path / "out", "--dtype", "float16", "--json")
    assert code == 0
    assert {each["dtype"] for each in json.loads(out)["moves"]} == {"F16"}
    write(path, "qwen3", QWEN3, mixed(), byte_folder)
    code, out, _ = here("convert", path, tmp_path / "kept", "--dtype", "stored")
    assert code == 0
    assert "note: as in the file: 1 weight in Q5_0, 1 weight in MXFP4, 3 weights in Q4_K, 2 weights in Q6_K" in out
    assert here("convert", path, tmp_path / "other", "--to", "qwen3_next")[0] == 2
    assert here("convert", path, tmp_path / "other", "--dtype", "int8")[0] == 2
    assert here("convert", tmp_path / "out", tmp_path / "other", "--dtype", "float16")[0] == 2


@pytest.fixture
def gguf_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nextn" / "gguf"


def _entries(cache):
    return sorted(each.name for each in cache.iterdir()) if cache.exists() else []


def _generated(here, source):
    """The tokens that a command writes for a model, and its notes."""
    code, out, notes = here("generate", source, "abc", "-k", "0", "--max-tokens", "8", "--no-chat", "--json")
    assert code == 0
    return json.loads(out)["tokens"], notes


def test_a_command_loads_a_file_and_converts_it_once(byte_folder, tmp_path, here, gguf_cache):
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q8_0), byte_folder)
    plan = convert_gguf(path, tmp_path / "out")
    expected, _ = _generated(here, tmp_path / "out")
    found, notes = _generated(here, path)
    (folder,) = _entries(gguf_cache)
    assert found == expected
    assert f"note: converting {path} to {gguf_cache / folder}, once: {plan.num_bytes:,} bytes" in notes
    again, notes = _generated(here, path)
    assert again == expected
    assert "converting" not in notes
    tensors = qwen3(Type.Q8_0)
    tensors["output.weight"] = (-tensors["output.weight"][0].astype(np.int16) % 256).astype(np.uint8), Type.Q8_0
    write(path, "qwen3", QWEN3, tensors, byte_folder)
    changed, notes = _generated(here, path)
    assert changed != expected
    assert "converting" in notes
    assert len(_entries(gguf_cache)) == 2
    code, _, said = here("generate", path, "abc", "--no-chat")
    named = f"{path}: model_type 'qwen3' has no known MTP head" in said
    assert (code, named, "-k 0" in said, f"{folder}: " in said, "BASE" in said) == (2, True, True, False, False)
    assert ModelOptions(str(tmp_path / "out"), _gguf=str(path)).prepared()._gguf is None  # of another model


def test_a_gguf_file_of_a_family_that_lacks_the_head_can_have_it_from_the_base(byte_folder, tmp_path, here, gguf_cache):
    """It is refused before it is converted, which takes minutes for a large one."""
    path = write(tmp_path / "model.gguf", "glm4moe", {"block_count": 1}, qwen3(Type.Q8_0), byte_folder)
    with pytest.raises(CheckpointError, match=r"holds no MTP head.*--from BASE"):
        _refuse_without_head(str(path))
    for command in (("generate", path, "a"), ("measure", path), ("bench", path), ("chat", path), ("serve", path)):
        code, _, err = here(*command)
        assert (code, "holds no MTP head" in err, "converting" in err) == (2, True, False), command
    assert not _entries(gguf_cache)


@pytest.mark.more
def test_the_command_for_a_folder_that_has_only_a_gguf(byte_folder, tmp_path, here):
    (tmp_path / "only").mkdir()
    write(tmp_path / "only" / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q8_0), byte_folder)
    code, _, said = here("generate", tmp_path / "only", "abc", "-k", "0", "--no-chat")
    assert code == 2
    command = re.search("`nextn (convert .+?) OUT`", said)[1].split()
    assert here(*command, tmp_path / "out")[0] == 0
    assert _generated(here, tmp_path / "out")[0]


def test_a_command_decodes_the_blocks_of_a_file(byte_folder, tmp_path, here, gguf_cache):
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, mixed(), byte_folder)
    convert_gguf(path, tmp_path / "out", dtype="stored")
    expected, _ = _generated(here, tmp_path / "out")
    found, notes = _generated(here, path)
    assert found == expected
    assert "note: as in the file: 1 weight in Q5_0, 1 weight in MXFP4, 3 weights in Q4_K, 2 weights in Q6_K" in notes
    (folder,) = _entries(gguf_cache)
    assert stored(gguf_cache / folder).keys() == stored(tmp_path / "out").keys()


def exported(folder, kind):
    """A file of `nextn export` with a head in step35's layout."""
    (folder / "text.txt").write_text(TEXT)
    begin = start(build(folder / "trunk", kind), "step35")
    run = prepare_head_run(folder / "run", begin, data=[folder / "text.txt"], settings=SETTINGS)
    list(run.trainer.run())
    export(run.write(head_only=True, allow_worse=True).parent, folder / "model.gguf", "llama.cpp")
    return folder / "model.gguf"


@pytest.mark.more
def test_a_head_of_its_own_layout_is_used(tmp_path, here, gguf_cache):
    exported(tmp_path, "qwen2")
    code, out, notes = here("generate", tmp_path / "model.gguf", "abc", "-k", "2", "--max-tokens", "8", "--json")
    assert code == 0, notes
    assert json.loads(out)["num_drafts"]


@pytest.mark.more
def test_reports_name_the_file_and_not_its_folder_in_the_cache(tmp_path, here, gguf_cache):
    """Also where it holds a head of its own layout, which the conversion stores apart."""
    path = exported(tmp_path, "llama")
    (tmp_path / "prompts.txt").write_text("a is a letter\n\nand so on")
    (tmp_path / "engine.log").write_text("MTP: 31 accepted / 50 drafted\n")
    few = ("--prompts", tmp_path / "prompts.txt", "--max-tokens", 8, "--temperatures", 0, "-k", 1)
    for command in (
        ["accuracy", path, "--weights", "stored", "--texts", tmp_path / "text.txt"],
        ["measure", path, "--json", *few],
        ["advise", path, "--json", "--batches", 1, "--contexts", 32, *few],
        ["diagnose", path, "--json", "--engine", tmp_path / "engine.log", *few],
    ):
        code, out, err = here(*command)
        assert code in (0, 1), err
        assert "model.gguf" in out, command
        assert str(gguf_cache) not in out


def test_an_error_leaves_nothing_in_the_cache(byte_folder, tmp_path, here, gguf_cache, monkeypatch):
    (tmp_path / "text.gguf").write_text("not a model")
    write(tmp_path / "other.gguf", "mamba", QWEN3, qwen3(Type.Q8_0), byte_folder)
    write(tmp_path / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q8_0), byte_folder)
    for name, words in {"text.gguf": "not a valid GGUF file", "other.gguf": "mamba"}.items():
        code, _, error = here("generate", tmp_path / name, "abc")
        assert code == 2
        assert words in error
        assert not _entries(gguf_cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    code, _, error = here("generate", tmp_path / "model.gguf", "abc", "-k", "0")
    assert code == 2
    assert "not enough disk space" in error
    assert not _entries(gguf_cache)


@pytest.mark.more
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, None])
def test_an_interrupted_conversion_is_not_used(interruption, byte_folder, tmp_path, here, gguf_cache, monkeypatch):
    """Also of a process that was killed, which leaves its hidden folder until the next conversion."""
    path = write(tmp_path / "model.gguf", "qwen3", QWEN3, qwen3(Type.Q8_0), byte_folder)
    if interruption is None:
        (gguf_cache / ".killed-0.nextn-stage" / "new").mkdir(parents=True)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(gguf_import, "write_tokenizer", raises(interruption))
            assert here("generate", path, "abc", "-k", "0")[0] == 130
        assert not _entries(gguf_cache)
    assert "converting" in _generated(here, path)[1]
    assert len(_entries(gguf_cache)) == 1


def raises(error):
    def call(*args, **options):
        raise error

    return call


def test_split_models_have_one_folder(tmp_path):
    """Whichever file is given; a change of any is noticed."""
    files = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for file in files:
        file.write_bytes(b"GGUF")
    names = {_folder_name(file, "1") for file in files}
    files[1].write_bytes(b"GGUF.")
    names.add(_folder_name(files[0], "1"))
    assert len(names) == 2
    assert _folder_name(files[0], "2") not in names


def test_a_head_alone_is_named():
    """As llama.cpp takes one beside a model: with the trunk's embedding, and no block of the trunk."""
    file = SimpleNamespace(
        path="mtp-x.gguf", tensors=dict.fromkeys(("blk.64.nextn.eh_proj.weight", "token_embd.weight"))
    )
    with pytest.raises(CheckpointError, match="this is an MTP head alone, without its trunk"):
        _refuse_missing(file, {"num_hidden_layers": 64})
    file.tensors["blk.0.attn_q.weight"] = None
    with pytest.raises(CheckpointError, match="Download or convert the file again"):
        _refuse_missing(file, {"num_hidden_layers": 64})
