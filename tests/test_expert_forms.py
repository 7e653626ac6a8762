"""Experts in every form, in trunk and head: the verbs agree, and a head converted there and back is the same bytes."""

from itertools import product

import pytest
import torch
from artifacts import load_json, publish
from layouts import LAYOUTS
from operations import read, store
from quick import families, loop
from support_record import record
from test_convert import tensors
from tiny import CONFIGS, build

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import CONFIG, Checkpoint
from nextn.checkpoint.expert_forms import expert_path
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import RawTensor, write_json
from nextn.errors import CheckpointError
from nextn.model.model import Model

FORMS = ("split", "fused", "stacked")


def form_of(folder):
    return Inventory.of(Checkpoint.open(folder)).family.experts


def has_experts(folder):
    return any(expert_path(each) for each in Inventory.of(Checkpoint.open(folder)).own)


@pytest.mark.more
@pytest.mark.parametrize("name", families(LAYOUTS))
def test_forms_of_published_layouts(name, tmp_path):
    """A head in another form and back: a byte changed, or a form that audit takes for a partial or foreign head."""
    source = publish(tmp_path / "source", name)
    own, before = form_of(source), tensors(source)
    if not has_experts(source):
        return
    for form in FORMS:
        if form == own:
            continue
        nextn.convert(source, tmp_path / form, experts=form)
        found = {each.rule for each in audit(Checkpoint.open(tmp_path / form)).findings if each.severity != "note"}
        assert found <= {"experts-form"}, (form, found)
        assert form_of(tmp_path / form) == form
        nextn.convert(tmp_path / form, tmp_path / f"{form}-back", experts=own)
        assert tensors(tmp_path / f"{form}-back") == before


@pytest.fixture
def released(tmp_path):
    """Qwen3.8-Flash-Next as nvidia released it: experts one by one, the head's in fp8, one entry for all of them."""
    nextn.convert(publish(tmp_path / "fused", "qwen4_exp"), folder := tmp_path / "split", experts="split")
    table = read(folder)
    for name in [each for each in table if each.startswith("mtp.") and ".experts." in each]:
        table |= {name: RawTensor("F8_E4M3", table[name].shape, b"\x3c" * (len(table[name].data) // 2)),
                  f"{name}_scale_inv": RawTensor("F32", (1, 1), bytes(3) + b"\x3f")}  # fmt: skip
    store(folder, table)
    entries = {"mtp.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO", "group_size": 128}}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": entries}
    write_json(folder / CONFIG, load_json(folder / CONFIG) | {"quantization_config": section})
    return folder


def test_engines_that_read_experts_one_by_one(released):
    """MiaAI-Lab/Qwen3.8-Flash-Next-Dual-DGX-Sparks#43: what a release has, and vLLM and SGLang serve, is no fault."""
    assert not {"experts-form", "quantization"} & {each.rule for each in audit(released).findings}


def test_a_head_of_another_form_in_its_place(released):
    """The experts that go are no reason to keep their entry."""
    nextn.restore(released, released.with_name("fused"), force=True)
    assert audit(released).clean
    assert load_json(released / CONFIG)["quantization_config"]["quantized_layers"] == {}


def moes():
    """The families whose tiny model has experts in the head, by the names of a saved one."""
    return [name for name in CONFIGS if name not in ("mimo_v2", "ernie4_5_moe", "exaone4_5", "glm_ocr", "qwen3_5")]


def state(folder):
    """All values of trunk and head, by the names that the running model has."""
    model = Model.load(folder)
    parts = {"trunk": model.trunk.model.state_dict(), "head": model.head.state_dict()}
    return {f"{part} {name}": value for part, values in parts.items() for name, value in values.items()}


@pytest.mark.more
@pytest.mark.parametrize("name", families(moes(), ("qwen3_5_moe", "deepseek_v4")))
def test_every_form_loads(name, tmp_path):
    """Trunk and head in each form, independently: one that does not load, or computes something else."""
    build(name).save(tmp_path / "model")
    if not has_experts(tmp_path / "model"):
        return
    expected = state(tmp_path / "model")
    ran = []
    for trunk, head in product((None, "split", "fused"), FORMS):
        folder = tmp_path / f"{trunk}-{head}"
        try:
            nextn.convert(tmp_path / "model", folder, experts=head, trunk_experts=trunk)
        except nextn.errors.ConfigError:
            continue
        errors = [each for each in audit(Checkpoint.open(folder)).findings if each.severity == "error"]
        if any(each.rule == "experts-form" and "trunk" in each.found for each in errors):
            with pytest.raises(CheckpointError):
                state(folder)
            continue
        got = state(folder)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[each], expected[each]) for each in got), (trunk, head)
        ran.append(f"{trunk or 'as saved'}/{head}")
    record("expert forms", name, ran)


def with_trunk_in(form, folder, seed):
    """A checkpoint whose trunk's experts are in this form."""
    source = publish(folder, "glm4_moe", seed=seed)
    if form == "split":
        return source
    nextn.convert(source, folder / form, trunk_experts=form)
    return folder / form


@loop(("form", "option"), product(("split", "fused"), ("experts", "trunk_experts")))
def test_parts_of_two_copies_are_not_joined(form, option, tmp_path):
    """Half of another copy beside a whole one: the whole one is kept, of head and trunk, and the other form refused."""
    folder, other = with_trunk_in("split", tmp_path / "kept", 0), tmp_path / "other"
    nextn.convert(folder, other, experts="fused", trunk_experts="fused")
    layer = 2 if option == "experts" else 1
    stray = {name: value for name, value in read(other).items() if f".layers.{layer}.mlp.experts.gate_up_proj" in name}
    assert len(stray) == 1
    store(folder, read(folder) | stray)
    if form == "split":
        assert nextn.convert(folder, tmp_path / "out", **{option: form}).notes
        return
    with pytest.raises(CheckpointError, match=f"Keep split, which has all; the others are {next(iter(stray))}"):
        nextn.convert(folder, tmp_path / "out", **{option: form})


@pytest.mark.parametrize(("form", "other"), [("split", "fused"), ("fused", "split")])
def test_the_copy_that_is_kept_of_a_trunk(form, other, tmp_path):
    """The one in the form that is asked for, with its bytes; the other is named."""
    folder = with_trunk_in(form, tmp_path / "kept", 0)
    kept, left = read(folder), read(with_trunk_in(other, tmp_path / "left", 1))
    stray = {name: value for name, value in left.items() if ".layers.1.mlp.experts." in name}
    store(folder, kept | stray)
    plan = nextn.convert(folder, tmp_path / "out", trunk_experts=form)
    found, expected = ({name: bytes(value.data) for name, value in table.items()}
                       for table in (read(tmp_path / "out"), kept))  # fmt: skip
    assert found == expected
    assert any(note.startswith(f"left out: {len(stray)} tensors in another form than {form}") for note in plan.notes)
