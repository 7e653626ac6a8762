"""The synthetic layouts are the real ones: transformers loads their trunks, our own models write their names."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from artifacts import HEADS, LAYOUTS, H, _blocks, bf16, e4m3, load_json, publish
from parts import LAYERS
from quick import families, loop
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from nextn.audit_rules.tensor_values import decode
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import write_json
from nextn.family_table import by_name, rows
from nextn.model.model import Model

_EYES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
    "out_hidden_size": H,
}  # fmt: skip
# What transformers reads as a vision-language model alone: wrapper of the names, parts of the config beside the text's.
COMPOSITES: dict[str, tuple[str, dict[str, dict[str, object] | str | int]]] = {
    "glm4v_moe": ("model.language_model.", {"vision_config": _EYES}),
    "glm_ocr": ("model.language_model.", {"vision_config": _EYES}),
    "exaone4_5": ("model.language_model.", {
        "vision_config": _EYES | {"num_key_value_heads": 2, "fullatt_block_indexes": [0]},
        "text_config": {"model_type": "exaone4"},
    }),
    "glm5_next": ("model.language_model.", {"vision_config": _EYES}),
    "inkling": ("", {"vision_config": {"patch_size": 4, "num_hidden_layers": 4}}),
    "minimax_m3": ("language_model.", {"vision_config": _EYES, "projector_hidden_size": 16}),
    "step3p5": ("", {"model_type": "step3p7", "vision_config": _EYES | {"max_position_embeddings": 16}}),
}  # fmt: skip
ELSE = re.compile("vision|visual|audio|projector|patch_merge")  # what no layout has
KNOWN = [name for name in LAYOUTS if name in COMPOSITES or LAYOUTS[name].config["model_type"] in CONFIG_MAPPING]
FP8 = [row.name for row in rows() if row.fp8]


def readable(folder: Path, name: str) -> Checkpoint:
    """The family's checkpoint in fp32, with a config that transformers' own class takes."""
    wrapper, others = COMPOSITES.get(name, ("", {}))
    publish(folder, name, wrapper=wrapper, dtype="F32")
    config = load_json(folder / "config.json")
    if others:
        whole = config if "text_config" in config else {"text_config": config}
        text = whole["text_config"] | others.get("text_config", {})
        write_json(folder / "config.json", whole | others | {"text_config": text})
    return Checkpoint.open(folder)


def test_every_family():
    """A family added without a layout would be tested nowhere."""
    assert list(LAYOUTS) == [row.name for row in rows()]


@pytest.mark.parametrize("name", families(KNOWN))
def test_trunk_loads_in_transformers(name, tmp_path):
    """A trunk tensor misnamed, mis-shaped, missing or invented: transformers' own class and renamings judge."""
    readable(tmp_path, name)
    kind = type(AutoConfig.from_pretrained(tmp_path))
    causal = AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    auto = AutoModelForImageTextToText if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else causal
    _, info = auto.from_pretrained(tmp_path, output_loading_info=True, ignore_mismatched_sizes=True)
    assert [each for each in info["missing_keys"] if not ELSE.search(each)] == []
    # LongCat: transformers counts the experts that compute nothing among the rows of gate_up_proj, too.
    known = {"longcat_flash": {f"model.layers.{index}.mlp.experts.gate_up_proj" for index in range(LAYERS)}}
    assert {key for key, *_ in info["mismatched_keys"]} == known.get(name, set())
    family = by_name(name)
    trunk = [each for each in info["unexpected_keys"] if family.canonical(each, LAYERS) is None]
    assert trunk == ["lm_head.weight"] * (auto is AutoModel)


@pytest.mark.one_case
@pytest.mark.parametrize("name", [row.name for row in rows() if row.runs and row.name in KNOWN])
def test_names_that_our_models_write(name, tmp_path):
    """A model of the layout's config saves other names or shapes than the layout has, in trunk or head."""
    published = readable(tmp_path / "a", name)
    Model.build(published.config, num_modules=1).save(tmp_path / "b")
    ours = Checkpoint.open(tmp_path / "b").tensors
    shapes = {each: info.shape for each, info in published.tensors.items()}
    assert {each: info.shape for each, info in ours.items() if not ELSE.search(each)} == shapes


def numbers(checkpoint, name) -> np.ndarray:
    info = checkpoint.info(name)
    return decode(checkpoint.read_bytes(name), info.dtype).reshape(info.shape)


@loop("name", FP8)
def test_fp8(name, tmp_path):
    """A quantized tensor without its scales, a plain role in fp8, values that do not come back, or no config for it."""
    exact = Checkpoint.open(publish(tmp_path / "a", name, dtype="F32"))
    coarse = Checkpoint.open(publish(tmp_path / "b", name, fp8=True))
    family = by_name(name)
    assert coarse.config["quantization_config"]["weight_block_size"] == [128, 128]
    quantized = {each for each, info in coarse.tensors.items() if info.dtype == "F8_E4M3"}
    scales = {f"{each.removesuffix('.weight')}.{family.fp8.scale}" for each in quantized}
    assert set(coarse.tensors) - set(exact.tensors) == scales
    roles = {canonical.split(".")[1] for each in quantized if (canonical := family.canonical(each, LAYERS))}
    assert "block" in roles
    assert not roles & {*family.fp8.unquantized, "token_norm", "hidden_norm", "final_norm"}
    for each in quantized:
        raw, scale, wanted = (numbers(*which) for which in (
            (coarse, each), (coarse, f"{each.removesuffix('.weight')}.{family.fp8.scale}"), (exact, each)))  # fmt: skip
        assert scale.shape == (*raw.shape[:-2], 1, 1)
        np.testing.assert_allclose(raw * scale, wanted, rtol=2**-4, atol=scale.max() * 2**-10)


def test_blocks(tmp_path):
    """Several blocks in a matrix, each with its own scale."""
    data = np.outer(np.repeat([1.0, 100.0, 3.0], [128, 128, 44]), np.repeat([1.0, 7.0], [128, 2])).astype(np.float32)
    table = _blocks(by_name("deepseek_v3"), "a.weight", data)
    assert table["a.weight_scale_inv"].shape == (3, 2)
    scale = np.frombuffer(table["a.weight_scale_inv"].data, "<f4").reshape(3, 2)
    np.testing.assert_allclose(scale, np.outer([1, 100, 3], [1, 7]) / 448, rtol=1e-6)
    assert set(table["a.weight"].data) == {0x7E}  # all values are their block's greatest: 448


def test_encoders_agree_with_torch():
    """Rounding, subnormals, ties and saturation of our bf16 and e4m3, over all magnitudes."""
    rng = np.random.default_rng(0)
    ties = np.array([17, 19, 2.0**-10, 3 * 2.0**-10, 2.0**-6, 0.0, -0.0, 448, 464, 463.9], np.float32)
    wide = rng.standard_normal(20_000).astype(np.float32) * 2.0 ** rng.integers(-14, 10, 20_000).astype(np.float32)
    data = np.concatenate([ties, -ties, wide])
    assert bf16(data) == torch.from_numpy(data).bfloat16().view(torch.int16).numpy().tobytes()
    clipped = torch.from_numpy(data).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert e4m3(data) == clipped.view(torch.uint8).numpy().tobytes()


@loop("name", [row.name for row in rows() if row.wrappers])
def test_wrappers(name, tmp_path):
    """A wrapped checkpoint must give the same inventory as the plain one."""
    plain = Inventory.of(Checkpoint.open(publish(tmp_path / "plain", name)))
    for index, wrapper in enumerate(by_name(name).wrappers):
        found = Inventory.of(Checkpoint.open(publish(tmp_path / str(index), name, wrapper=wrapper)))
        assert found.stored.keys() == plain.stored.keys()
        assert (found.declared, found.unrecognized, set(found.shared)) == (1, (), set(plain.shared))
        assert sorted(found.layers) == sorted(plain.layers)
        assert any(each.startswith(wrapper) for each in found.checkpoint.tensors)


@pytest.mark.parametrize("shards", [1, 3])
def test_side_file(shards, tmp_path):
    """The head in a file of its own, which the index does not name; nothing of it anywhere else."""
    opened = Checkpoint.open(publish(tmp_path, "glm4_moe", side_file="mtp.safetensors", shards=shards))
    whole = Inventory.of(opened)
    assert opened.unindexed == ("mtp.safetensors",)
    assert {opened.info(each).file for each in whole.stored.values()} == {"mtp.safetensors"}
    assert set(whole.stored.values()) == set(opened.headers["mtp.safetensors"].tensors)


def test_copies_and_modules(tmp_path):
    """Copies differ from the trunk's, or all modules hold the same values."""
    opened = Checkpoint.open(publish(tmp_path, "deepseek_v3", modules=2))
    copy = opened.read_bytes("model.layers.3.embed_tokens.weight")
    assert copy == opened.read_bytes("model.embed_tokens.weight")
    first, second = (opened.read_bytes(f"model.layers.{index}.eh_proj.weight") for index in (2, 3))
    assert first != second
    assert opened.info("model.layers.2.self_attn.q_b_proj.weight").shape == (HEADS * 16, H // 2)
