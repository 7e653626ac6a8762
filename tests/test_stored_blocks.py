"""Checkpoints that hold blocks of a GGUF file as they are: values, models, experts, audit and edits, bad files."""

import shutil

import pytest
import torch
from packed import block_folder, random_blocks
from quick import each_once, loop, others_slow
from reference_products import kquant_linear
from safetensors.torch import save_file
from stored import in_one_file, set_config, tensors_of
from tiny import build, prompt

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.gguf_blocks import KQuantWeight, take_apart
from nextn.checkpoint.gguf_file import BLOCK_TYPES, K_QUANTS, blocks_name
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.tensors import TensorReader
from nextn.decoding.generate import generate
from nextn.edit.convert import convert, extract
from nextn.edit.quantize import quantize
from nextn.edit.restore import restore
from nextn.errors import CheckpointError
from nextn.family_table import by_name
from nextn.model.model import Model
from nextn.model.packed_experts import PackedExperts, packed_parts
from nextn.model.packed_linear import PackedLinear, StoredIntegers, StoredKQuant, packed_layers
from nextn.runtime.backend import backend_for, unused_codes
from nextn.settings import Settings

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}
EXPERTS = {**WIDE, "moe_intermediate_size": 256}
NAME = "model.layers.0.mlp.up_proj"
TOKENS = torch.tensor([prompt(21)])


def mixed(name):
    """As llama-quantize's Q4_K_M: some matrices of a layer have more bits."""
    return "Q6_K" if ".down_proj" in name or ".v_proj" in name else "Q4_K"


def reader(folder, tensors, method="gguf"):
    """A checkpoint of these tensors, by their names after the module's."""
    folder.mkdir(exist_ok=True)
    save_file({f"{NAME}.{name}": value for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    section = {"quantization_config": {"quant_method": method}}
    set_config(folder, model_type="qwen3_5_text", num_hidden_layers=2, **section)
    return TensorReader(Inventory.of(Checkpoint.open(folder), family=by_name("qwen3_5")))


@loop("kind", BLOCK_TYPES)
def test_values_of_every_type(kind, tmp_path):
    rows = torch.from_numpy(random_blocks(kind, 6, 2))
    weights, name = reader(tmp_path, {blocks_name(kind): rows}), f"{NAME}.weight"
    assert weights.names() == [name]
    assert weights.problem(name) is None
    expected = take_apart(rows, kind)
    assert weights.stored(name).shape == expected.codes.shape == (6, 2 * BLOCK_TYPES[kind].size)
    found = weights.integers(name)
    assert isinstance(found, KQuantWeight) == (kind in K_QUANTS)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(weights.read(name), expected.dequantize())
    out = torch.empty(found.codes.shape, dtype=torch.bfloat16)
    weights.read_into(name, out)
    assert torch.equal(out, expected.dequantize().bfloat16())
    assert weights.num_bytes([name]) == weights.fetch([name]) == rows.nbytes


def twins(folder, family, kind_of, **changes):
    """The real weights of blocks, a model that has them in bf16, and the model with the blocks."""
    build(family, **changes).save(folder / "plain", dtype=torch.bfloat16)
    shutil.copytree(folder / "plain", folder / "packed")
    weights = block_folder(folder / "packed", kind_of)
    in_one_file(folder / "plain", lambda table: table.update({name: w.bfloat16() for name, w in weights.items()}))
    return weights, Model.load(folder / "plain"), Model.load(folder / "packed")


def assert_equal_states(model, twin):
    """Of trunk and head, bit for bit."""
    with torch.inference_mode():
        states, expected = model.trunk(TOKENS), twin.trunk(TOKENS)
        assert expected.final_hidden.isfinite().all()
        assert torch.equal(states.final_hidden, expected.final_hidden)
        heads = [each.head.step(0, TOKENS, states.head_input).final_hidden for each in (model, twin)]
    assert torch.equal(*heads)


@pytest.mark.more
@pytest.mark.parametrize("kind", others_slow([*BLOCK_TYPES, "mixed"], "mixed", "Q8_0", "MXFP4", "IQ4_XS"))
def test_torch_computes_with_the_dequantized_weights(kind, tmp_path):
    """Bit for bit, as the checkpoint that holds them in bf16; also streamed. Trunk and head keep their blocks."""
    weights, plain, model = twins(tmp_path, "qwen3_5", mixed if kind == "mixed" else lambda name: kind, **WIDE)
    layers = {layer.codes.name: layer.codes for layer in packed_layers(model.trunk, model.head)}
    assert layers.keys() == weights.keys()
    assert any(name.startswith("mtp.") for name in layers)
    for name, codes in layers.items():
        own = mixed(name) if kind == "mixed" else kind
        assert type(codes) is (StoredKQuant if own in K_QUANTS else StoredIntegers)
        assert torch.equal(codes.dequantize(), weights[name].bfloat16())
    assert_equal_states(model, plain)
    with torch.inference_mode():
        streamed = Model.load(tmp_path / "packed", stream=True).trunk.run([TOKENS])[0]
        assert torch.equal(streamed.final_hidden, plain.trunk(TOKENS).final_hidden)


@pytest.mark.more
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next"])
def test_experts_keep_their_blocks(name, tmp_path):
    """Those of other types than the first ones', too, as llama-quantize mixes them."""
    _, plain, model = twins(tmp_path, name, mixed, **EXPERTS, shared_expert_intermediate_size=256)
    experts = [part for part in packed_parts(model.trunk, model.head) if isinstance(part, PackedExperts)]
    kinds = {(key, matrix.kind) for part in experts for key, each in part.codes.items() for matrix in each.matrices}
    assert kinds == {("gate_up_proj", "Q4_K"), ("down_proj", "Q6_K")}
    assert_equal_states(model, plain)


@pytest.mark.more
def test_experts_of_several_types_in_one_matrix(tmp_path):
    """They are dequantized, as products read gate and up from one matrix."""
    kinds = ["Q4_K", "Q6_K", "Q8_0", "Q5_0"]
    _, plain, model = twins(tmp_path, "glm4_moe", lambda name: kinds[len(name) % 2 + 2 * ("up" in name)], **EXPERTS)
    assert not any(isinstance(part, PackedExperts) for part in packed_parts(model.trunk))
    assert_equal_states(model, plain)
    assert_decodes_natively(model, plain)


def assert_near(model, plain, first_bound):
    """The native states are near those of the other model in torch."""
    backend = backend_for(model, "native")
    with torch.inference_mode():
        near, far = backend.trunk(TOKENS, backend.trunk.cache(1)).final_hidden, plain.trunk(TOKENS).final_hidden
    errors = (near - far).float().norm(dim=-1) / far.float().norm(dim=-1)
    assert errors.median() < 0.05
    assert errors[0, 0] < first_bound


def assert_decodes_natively(model, plain, first_bound=0.5):
    """The states are near those of the other model, and drafts do not change the text."""
    assert_near(model, plain, first_bound)
    texts = [
        generate(model, [prompt(9)], Settings(num_speculative_tokens=k, max_tokens=16), backend="native")[0].tokens
        for k in (0, 3)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 16


@pytest.mark.more
@pytest.mark.parametrize("kind", others_slow([kind for kind in BLOCK_TYPES if kind not in K_QUANTS], "Q8_0", "IQ4_XS"))
def test_the_native_backend_decodes_with_the_codes(kind, tmp_path):
    _, plain, model = twins(tmp_path, "qwen3_5", lambda name: kind, **WIDE)
    assert not unused_codes(model)
    assert_decodes_natively(model, plain)


# The kernels of each kind alone: test_vectors.py.
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*K_QUANTS, "mixed"])
def test_the_native_backend_decodes_with_superblocks(kind, tmp_path, monkeypatch):
    """As torch does with activations that are rounded in the same way, whose errors random minima make large.

    Where position 0 attends to nothing else, only products differ, and both have float32 between them. A model in bf16
    rounds its keys and values, too, and where products with bf16 read bf16, their inputs.
    """
    _, _, model = twins(tmp_path, "qwen3_5", mixed if kind == "mixed" else lambda name: kind, **WIDE)
    wide = Model.load(tmp_path / "packed", dtype=torch.float32)
    assert not unused_codes(model)

    def multiply(layer, states):
        assert layer.bias is None
        return kquant_linear(states, layer.codes.weight()).to(states)

    monkeypatch.setattr(PackedLinear, "forward", multiply)
    assert_near(wide, wide, 1e-3)
    assert_decodes_natively(model, wide, 2**-6)


@pytest.mark.more
def test_what_is_saved_is_dequantized(tmp_path):
    _, plain, model = twins(tmp_path, "qwen3_5", mixed, **WIDE)
    model.save(tmp_path / "saved")
    saved = Model.load(tmp_path / "saved")
    assert not [*packed_layers(saved.trunk, saved.head)]
    assert_equal_states(saved, plain)


KEY = blocks_name("Q4_K")
ROWS = torch.from_numpy(random_blocks("Q4_K", 4, 2))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {KEY: ROWS[:, :-1].contiguous()},
            r"mis-shaped: .*weight_q4_k \(4, 287\), expected rows of blocks of Q4_K, 144",
        ),
        ({KEY: ROWS[0].clone()}, r"mis-shaped: .*weight_q4_k \(288,\), expected rows"),
        ({KEY: ROWS[None].clone()}, r"mis-shaped: .*weight_q4_k \(1, 4, 288\), expected rows"),
        ({KEY: ROWS[:, :0].contiguous()}, r"mis-shaped: .*weight_q4_k \(4, 0\), expected rows"),
        ({KEY: ROWS.view(torch.int8)}, "wrong dtype: .*weight_q4_k is I8; blocks of Q4_K are U8"),
        ({"weight_q2_k": ROWS}, "unsupported: .*weight_q2_k; valid are weight_q4_0, weight_q4_1"),
        ({"weight_packed": ROWS}, "unsupported: .*weight_packed; valid are weight_q4_0"),
    ],
)
def test_bad_tensors(tensors, message, tmp_path):
    """Each names the tensor, what was found and what is valid."""
    weights = reader(tmp_path, tensors)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(weights.problem(f"{NAME}.weight"))


def test_names_of_blocks_under_another_method(tmp_path):
    """Only the method's own names count."""
    assert not reader(tmp_path, {KEY: ROWS, "weight": ROWS.float()}, method="fp8").packed


@pytest.mark.parametrize(
    ("name", "kind", "place"),
    each_once(
        ["model.layers.0.mlp.up_proj", "mtp.layers.0.mlp.up_proj"],
        [("Q4_K", 1), ("Q4_K", 3), ("Q6_K", 209), ("Q8_0", 1), ("IQ4_XS", 1)],
    ),
)
def test_scales_that_are_not_finite(name, kind, place, tmp_path):
    build("qwen3_5", **WIDE).save(tmp_path, dtype=torch.bfloat16)
    block_folder(tmp_path, lambda name: kind)
    key = f"{name}.{blocks_name(kind)}"
    in_one_file(tmp_path, lambda table: table[key][5, place].fill_(0x7E))
    with pytest.raises(CheckpointError, match=rf"(1 trunk tensors hold NaN or Inf|non-finite): {name}"):
        Model.load(tmp_path)


def test_a_trunk_that_cannot_be_read(tmp_path):
    build("qwen3_5", **WIDE).save(tmp_path, dtype=torch.bfloat16)
    block_folder(tmp_path, mixed)
    key = f"{NAME}.{blocks_name('Q4_K')}"
    in_one_file(tmp_path, lambda table: table.update({key: table[key][:, :-1].contiguous()}))
    with pytest.raises(CheckpointError, match=r"trunk cannot be read, 1 problem:\n  mis-shaped: .*weight_q4_k"):
        Model.load(tmp_path)


@pytest.mark.more
def test_audit_and_edits(tmp_path):
    """A head in blocks is clean; it can be replaced by one in bf16 and back, and be extracted; no second rounding."""
    build("qwen3_5", **WIDE).save(tmp_path / "plain", dtype=torch.bfloat16)
    shutil.copytree(tmp_path / "plain", tmp_path / "packed")
    block_folder(tmp_path / "packed", mixed)
    shutil.copytree(tmp_path / "packed", tmp_path / "other")
    rules = lambda folder: {found.rule for found in audit(Checkpoint.open(folder)).findings}  # noqa: E731
    assert rules(tmp_path / "packed") - rules(tmp_path / "plain") <= {"values-unchecked"}
    restore(tmp_path / "other", tmp_path / "plain", force=True)
    mine, base = tensors_of(tmp_path / "other"), tensors_of(tmp_path / "plain")
    heads = [name for name in mine if name.startswith("mtp.")]
    assert all(torch.equal(mine[name], base[name]) for name in heads)
    assert rules(tmp_path / "other") - rules(tmp_path / "plain") == {"head-stale"}
    assert Model.load(tmp_path / "other").head is not None
    convert(tmp_path / "packed", tmp_path / "split", form="side-file")
    split, base = tensors_of(tmp_path / "split"), tensors_of(tmp_path / "packed")
    assert split.keys() == base.keys()
    assert all(torch.equal(split[name], each) for name, each in base.items())
    extract(tmp_path / "packed", tmp_path / "head.safetensors")
    restore(tmp_path / "other", tmp_path / "head.safetensors", force=True)
    mine, base = tensors_of(tmp_path / "other"), tensors_of(tmp_path / "packed")
    assert mine.keys() == base.keys()
    assert all(torch.equal(mine[name], each) for name, each in base.items())
    with pytest.raises(CheckpointError, match=r"already quantized \(gguf\)"):
        quantize(tmp_path / "packed", tmp_path / "out", weights="int4")
    with pytest.raises(CheckpointError, match="its head is quantized"):
        restore(tmp_path / "plain", tmp_path / "packed", force=True)
