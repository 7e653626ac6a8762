"""relayout: a head moved there and back is the same bytes; layouts that compute otherwise are refused."""

import os
import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from artifacts import LAYERS, LAYOUTS, bf16, load_json, publish
from quick import families, others_slow
from races import ROUNDS, race
from test_checkpoint_quantization import GROUPS
from test_restore import bytes_of, lost, no_waiting_for_disks, own_names, snapshot, take, without, without_layer_1
from tiny import build

import nextn
from nextn.audit_rules.tensor_values import decode
from nextn.checkpoint.checkpoint import CONFIG, INDEX, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import Provenance, as_float32, head_fingerprint, trunk_fingerprint
from nextn.checkpoint.safetensors_file import RawTensor, write_safetensors
from nextn.edit.compatibility import absent
from nextn.edit.find_head import layout_differences
from nextn.edit.norm_shift import is_norm_weight, shift_fn
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table import by_name

_ = no_waiting_for_disks  # a fixture
FORMS = ("shards", "side-file", "single-file")
# Of the layouts that compute the same as `name`, one of each way to name things.
MOVES = [
    (name, other)
    for name in LAYOUTS
    for other in ("deepseek_v3", "mellum", "bailing_hybrid", "hy_v3")
    if by_name(name).names != by_name(other).names
    and by_name(name).experts == by_name(other).experts
    and not layout_differences(by_name(name), by_name(other), 1)
]


def tensors(folder) -> dict[str, tuple]:
    """Name -> dtype, shape, bytes, of every file, indexed or not."""
    checkpoint = Checkpoint.open(folder)
    return {name: (info.dtype, info.shape, checkpoint.read_bytes(name)) for name, info in checkpoint.tensors.items()}


def numbers(folder, name) -> np.ndarray:
    checkpoint = Checkpoint.open(folder)
    return decode(checkpoint.read_bytes(name), checkpoint.info(name).dtype)


@pytest.mark.more
@pytest.mark.parametrize("name", families(LAYOUTS))
def test_forms(name, tmp_path):
    """Shards, side file, single file and back: a tensor lost, renamed or changed on the way."""
    source = publish(tmp_path / "source", name, shards=3)
    before, last = tensors(source), source
    for form in ("side-file", "single-file", "shards"):
        nextn.convert(last, tmp_path / form, form=form)
        last = tmp_path / form
        assert tensors(last) == before, form
        assert absent(take(last)) == []
    assert take(last).checkpoint.problems == ()


@pytest.mark.more
def test_what_forms_look_like(tmp_path):
    """A side file that the index names, or an index beside a single file, is read otherwise than asked."""
    source = publish(tmp_path / "source", "glm4_moe", shards=2)
    for form in FORMS:
        nextn.convert(source, tmp_path / form, form=form)
    head = own_names("glm4_moe")
    side = tmp_path / "side-file"
    assert not head & load_json(side / INDEX)["weight_map"].keys()
    assert head <= Checkpoint.open(side).headers["mtp.safetensors"].tensors.keys()
    assert sorted(path.name for path in (tmp_path / "single-file").iterdir()) == [
        CONFIG,
        "model.safetensors",
        "nextn.json",
    ]
    shards = tmp_path / "shards"
    assert {load_json(shards / INDEX)["weight_map"][each] for each in head} == {"model-mtp.safetensors"}
    first = "model-00001-of-00002.safetensors"
    assert os.path.samefile(shards / first, source / first)


@pytest.mark.more
@pytest.mark.parametrize("name", families(name for name in LAYOUTS if by_name(name).fp8))
def test_fp8_forms(name, tmp_path):
    """Scales stay beside what they scale."""
    source = publish(tmp_path / "source", name, fp8=True)
    nextn.convert(source, tmp_path / "side", form="side-file")
    nextn.convert(tmp_path / "side", tmp_path / "back", form="single-file")
    assert tensors(tmp_path / "back") == tensors(source)
    assert load_json(tmp_path / "back" / CONFIG) == load_json(source / CONFIG)


def test_there_are_moves():
    """The pairs below must not be none."""
    assert len(MOVES) >= 20


@pytest.mark.more
@pytest.mark.parametrize(("name", "other"), families(MOVES))
def test_there_and_back(name, other, tmp_path):
    """Names of another layout and back: the same tensors, and on the way names that the other layout knows."""
    source = publish(tmp_path / "source", name, copies=False)
    nextn.convert(source, tmp_path / "there", to=other)
    head = [each for each in tensors(tmp_path / "there") if by_name(other).canonical(each, LAYERS) is not None]
    assert len(head) == len(own_names(name))
    nextn.convert(tmp_path / "there", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(source)
    assert load_json(tmp_path / "back" / CONFIG) == load_json(source / CONFIG)


def test_copies_without_a_place(tmp_path):
    """Copies that the other layout has no name for are left out, and that is said."""
    plan = nextn.convert(publish(tmp_path / "source", "deepseek_v3"), tmp_path / "out", to="bailing_moe_v2")
    assert len([note for note in plan.notes if note.startswith("left out")]) == 2


def test_refused(tmp_path):
    """Layouts of another computation, and what cannot be converted."""
    source = publish(tmp_path / "source", "glm4_moe")
    with pytest.raises(FamilyError, match=r"norm_weight is 'w' against '1\+w'.*subtract-1"):
        nextn.convert(source, tmp_path / "out", to="qwen3_next")
    with pytest.raises(FamilyError, match=r"concat is 'embedding_first' against 'hidden_first'"):
        nextn.convert(source, tmp_path / "out", to="mimo")
    with pytest.raises(FamilyError, match=r"final_norm"):
        nextn.convert(source, tmp_path / "out", to="ernie4_5_moe")
    with pytest.raises(ConfigError, match="nothing to convert"):
        nextn.convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds no head"):
        nextn.convert(lost(tmp_path / "lost", "glm4_moe"), tmp_path / "out", to="mellum")
    partial = publish(tmp_path / "partial", "glm4_moe", change=without("glm4_moe", "eh_proj"))
    with pytest.raises(CheckpointError, match=r"partial, without 0.projection"):
        nextn.convert(partial, tmp_path / "out", to="mellum")
    two = publish(tmp_path / "two", "glm4_moe", modules=2)
    with pytest.raises(FamilyError, match="2 modules, at most 1"):
        nextn.convert(two, tmp_path / "out", to="mellum")
    with pytest.raises(CheckpointError, match="not empty"):
        nextn.convert(source, tmp_path / "two", form="shards")
    assert not (tmp_path / "out").exists()


def test_head_elsewhere(tmp_path):
    """A head that somebody saved under another layout's names gets the family's own, and the config's promise."""

    def foreign(table):
        for each in [each for each in table if each.startswith("model.layers.2.")]:
            path = each.removeprefix("model.layers.2.")
            roles = {
                "enorm": "pre_fc_norm_embedding",
                "hnorm": "pre_fc_norm_hidden",
                "eh_proj": "fc",
                "shared_head.norm": "norm",
            }
            stem = next(
                (f"mtp.{new}" + path.removeprefix(old) for old, new in roles.items() if path.startswith(old)), ""
            )
            table[stem or f"mtp.layers.0.{path}"] = table.pop(each)

    options = {"copies": False, "config": {"num_nextn_predict_layers": 0}}
    source = publish(tmp_path / "source", "glm4_moe", change=foreign, **options)
    nextn.convert(source, tmp_path / "out")
    found = take(tmp_path / "out")
    assert (found.declared, absent(found), found.unrecognized) == (1, [], ())
    assert head_fingerprint(found) == head_fingerprint(take(publish(tmp_path / "whole", "glm4_moe")))


def test_a_head_behind_layers_that_were_removed(tmp_path):
    """The trunk has one layer less, and the head is where it was: it is moved, and keeps its values and copies."""
    whole = take(publish(tmp_path / "whole", "glm4_moe"))
    options = {"config": {"num_hidden_layers": 1}, "change": without_layer_1}
    source = publish(tmp_path / "source", "glm4_moe", **options)
    (fix,) = [each.fix for each in nextn.audit(source).findings if each.rule == "head-elsewhere"]
    assert fix == f"nextn convert {source} OUT --to glm4_moe"
    nextn.convert(source, tmp_path / "out")
    found = take(tmp_path / "out")
    assert (found.num_layers, found.modules, absent(found), found.unrecognized) == (1, (0,), [], ())
    assert head_fingerprint(found) == head_fingerprint(whole)
    assert found.copies.keys() == whole.copies.keys()


LLAMA_CPP = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


@pytest.mark.parametrize("shift", [0, 1])
def test_llama_cpp_names(shift, tmp_path):
    """A head renamed as for a GGUF file, norm weights as before or shifted: the fix of audit is enough."""

    def rename(table):
        for name in [each for each in table if each.startswith("mtp.")]:
            value, path = table.pop(name), name.removeprefix("mtp.").removesuffix(".weight")
            if shift and "norm" in name:
                value = RawTensor("F32", value.shape, shift_fn("F32", shift)(as_float32(value.data, value.dtype)))
            own = path.removeprefix("layers.0.") if path.startswith("layers.") else LLAMA_CPP[path]
            table[f"model.layers.{LAYERS}.{own}.weight"] = value

    source = publish(tmp_path / "source", "qwen3_5", change=rename)
    (finding,) = [each for each in nextn.audit(source).findings if each.severity != "note"]
    assert finding.fix == f"nextn convert {source} OUT --to qwen3_5"
    nextn.convert(source, tmp_path / "out", to="qwen3_5")
    assert nextn.audit(tmp_path / "out").clean
    sound = publish(tmp_path / "sound", "qwen3_5")
    name = "mtp.pre_fc_norm_hidden.weight"
    assert np.allclose(numbers(tmp_path / "out", name), numbers(sound, name), atol=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("name", ["qwen3_5", "step3p5"])
def test_norm_weight_shift(name, dtype, tmp_path):
    """Gains stored as 1 + w where w belongs: every norm of the head, nothing of the trunk, rounded once."""
    sound = publish(tmp_path / "sound", name, dtype=dtype)
    norm_weights = {each.name for each in map(take(sound).info, take(sound).stored) if "norm" in each.name}

    def mangle(table):
        for each in norm_weights:
            old = table[each]
            table[each] = RawTensor(dtype, old.shape, shift_fn(dtype, 1.0)(old.data))

    mangled = publish(tmp_path / "mangled", name, dtype=dtype, change=mangle)
    plan = nextn.convert(mangled, tmp_path / "mended", norm_weight="subtract-1")
    was, now = tensors(sound), tensors(tmp_path / "mended")
    assert {each for each in was if was[each] != now[each]} <= norm_weights
    for each in norm_weights:
        old, new = (numbers(folder, each) for folder in (sound, tmp_path / "mended"))
        assert np.abs(old - new).max() <= (2**-8 if dtype == "BF16" else 2**-24)
    assert f"{len(norm_weights)} norm weights" in plan.notes[-1]
    record = Provenance.read(Checkpoint.open(tmp_path / "mended"))
    assert record is not None
    assert record.head == head_fingerprint(take(tmp_path / "mended"))
    nextn.convert(tmp_path / "mended", tmp_path / "again", norm_weight="add-1")
    assert tensors(tmp_path / "again") == tensors(mangled)  # what was rounded once is exact from then on


def test_shifted_norm_weights_are_rounded_to_nearest_even():
    """Halves go to the even neighbor, and -1 from [0.5, 2] is exact."""
    near = np.array([2**-8, 3 * 2**-8, 2**-9, -1.0], np.float32)  # 1 + 2^-8 lies between 1 and 1 + 2^-7
    wide = np.array([1.0, 1 + 2**-6, 1.0, 0.0], np.float32)
    assert shift_fn("BF16", 1.0)(bf16(near)) == bf16(wide)
    every = np.arange(0x3F00, 0x4001, dtype="<u2")  # 0.5 to 2
    there = shift_fn("BF16", -1.0)(every.tobytes())
    assert shift_fn("BF16", 1.0)(there) == every.tobytes()
    assert shift_fn("F16", 1.0)(np.float16([0.5]).tobytes()) == np.float16([1.5]).tobytes()
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        shift_fn("F8_E4M3", 1.0)


def test_a_norm_weight_shift_bridges_layouts(tmp_path):
    """A head of w for w into a layout of w for 1 + w: names and gains change together."""
    source = publish(tmp_path / "source", "glm4_moe", copies=False)
    nextn.convert(source, tmp_path / "out", to="qwen3_next", norm_weight="subtract-1")
    table = tensors(tmp_path / "out")
    old = numbers(source, "model.layers.2.enorm.weight")
    assert np.array_equal(numbers(tmp_path / "out", "mtp.pre_fc_norm_embedding.weight"), old - 1)
    assert "mtp.fc.weight" in table


def _all_norms(value):
    """A `change` for `publish`: the first value of each norm of the head, which others are near 1."""

    def change(table):
        for name in [each for each in table if each.startswith("model.layers.2.") and "norm" in each]:
            old = table[name]
            width = len(old.data) // int(np.prod(old.shape))
            first = bf16(np.float32([value])) if width == 2 else np.float32([value]).tobytes()
            table[name] = RawTensor(old.dtype, old.shape, first + old.data[width:])

    return change


@pytest.mark.parametrize(
    ("value", "dtype", "lost"),
    [(0.3007, "BF16", ""), (0.302, "BF16", "0.6%"), (0.0103, "BF16", "13"), (0.0103, "F32", ""), (0.0, "BF16", ""),
     (258.0, "BF16", "0.4%"), (256.0, "BF16", "")],
)  # fmt: skip
def test_weights_that_would_lose_bits_are_refused(value, dtype, lost, tmp_path):
    """bf16 holds w - 1 in steps of 2^-8 where w is below 0.5: odd multiples of 2^-9 move; nothing is written."""
    source = publish(tmp_path / "source", "glm4_moe", copies=False, dtype=dtype, change=_all_norms(value))
    convert = partial(nextn.convert, source, tmp_path / "out", to="qwen3_next", norm_weight="subtract-1")
    if lost:
        with pytest.raises(CheckpointError, match=rf"would change model\.layers\.2\..*, by up to {lost}.*layout that"):
            convert()
        assert not (tmp_path / "out").exists()
        return
    assert convert().notes[-1].endswith("without loss")
    name = "mtp.pre_fc_norm_embedding.weight"
    first = numbers(source, "model.layers.2.enorm.weight")
    assert np.abs(numbers(tmp_path / "out", name) + 1 - first).max() <= (0 if dtype == "BF16" else 2**-24)


@pytest.mark.one_case
@pytest.mark.parametrize("name", LAYOUTS)
def test_norm_weights_are_those_of_norms(name, tmp_path):
    """A bias, a router's correction or a sink shifted by one is a ruined head."""
    inventory = take(publish(tmp_path, name))
    found = {each for each in inventory.stored if is_norm_weight(each)}
    assert {each for each in inventory.stored if each.endswith("_norm.weight")} <= found
    assert not [each for each in found if each.endswith("bias") or "norm" not in each]
    assert {len(inventory.info(each).shape) for each in found} == {1}


@pytest.mark.parametrize("name", families(LAYOUTS))
def test_extracted_head_is_a_base(name, tmp_path):
    """The head alone, then put back into a headless trunk: nothing lost, and the record says which trunk it knew."""
    source = publish(tmp_path / "source", name, shards=2)
    file = tmp_path / "head" / "head.safetensors"
    nextn.extract(source, file)
    assert tensors(file) == bytes_of(source, own_names(name))
    target = lost(tmp_path / "target", name)
    nextn.restore(target, file)
    assert head_fingerprint(take(target)) == head_fingerprint(take(source))
    record = Provenance.read(Checkpoint.open(target))
    assert record is not None
    assert record.trained_with == trunk_fingerprint(take(source))
    assert take(file).declared == 1


@pytest.mark.more
def test_extract(tmp_path):
    """No copies; a header that says where it came from; no other model's config overwritten."""
    source = publish(tmp_path / "source", "glm4_moe", fp8=True)
    before = snapshot(source)
    nextn.extract(source, tmp_path / "a" / "head.safetensors")
    header = Checkpoint.open(tmp_path / "a" / "head.safetensors").headers["head.safetensors"]
    assert header.metadata["family"] == "glm4_moe"
    assert len(header.tensors) == len(take(source).own)
    nextn.extract(source, tmp_path / "a" / "again.safetensors")
    with pytest.raises(ConfigError, match="does not exist yet"):
        nextn.extract(source, tmp_path / "a" / "head.safetensors")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        nextn.extract(publish(tmp_path / "q", "qwen3_5"), tmp_path / "a" / "other.safetensors")
    plan = nextn.extract(source, tmp_path / "b" / "head.safetensors", dry_run=True)
    assert plan.num_bytes > 0
    assert not (tmp_path / "b").exists()
    assert snapshot(source) == before
    target = lost(tmp_path / "target", "glm4_moe", fp8=True)
    nextn.restore(target, tmp_path / "a" / "head.safetensors")
    assert absent(take(target)) == []


@pytest.mark.more
def test_head_alone_changes_family(tmp_path):
    """A head file converted to another layout is a base for that family's models."""
    nextn.extract(publish(tmp_path / "source", "glm4_moe"), tmp_path / "head" / "head.safetensors")
    nextn.convert(tmp_path / "head" / "head.safetensors", tmp_path / "other", to="mellum", form="single-file")
    config = load_json(tmp_path / "other" / CONFIG)
    assert (config["model_type"], config["num_hidden_layers"]) == ("mellum", LAYERS)
    assert absent(take(tmp_path / "other")) == []
    assert take(tmp_path / "other").family.name == "mellum"


def test_quantized_names(tmp_path):
    """A quantized trunk's config must leave the head out under its new names, too."""
    section = {"quant_method": "compressed-tensors", "config_groups": GROUPS,
               "ignore": ["lm_head", "re:.*layers\\.2\\..*"]}  # fmt: skip
    source = publish(tmp_path / "source", "glm4_moe", copies=False, config={"quantization_config": section})
    nextn.convert(source, tmp_path / "out", to="mellum")
    ignored = load_json(tmp_path / "out" / CONFIG)["quantization_config"]["ignore"]
    assert any("mtp" in each for each in ignored)


def test_dry_run(tmp_path):
    """A dry run that leaves a folder behind would make the real one refuse."""
    source = publish(tmp_path / "source", "glm4_moe", shards=2)
    plan = nextn.convert(source, tmp_path / "out", form="side-file", dry_run=True)
    assert not (tmp_path / "out").exists()
    assert plan.num_bytes > 0


def test_consolidated_copy_stays_aside(tmp_path):
    """A second copy of the weights that no index names must not take the place of the first."""
    source = publish(tmp_path / "source", "glm4_moe")
    shutil.copy(
        publish(tmp_path / "old", "glm4_moe", seed=3) / "model.safetensors", source / "consolidated.safetensors"
    )
    sound = publish(tmp_path / "sound", "glm4_moe")
    nextn.convert(source, tmp_path / "out", form="single-file")
    assert bytes_of(tmp_path / "out") == bytes_of(sound)


@pytest.mark.more
@pytest.mark.parametrize("verb", others_slow(["convert", "extract"], "extract"))
def test_at_once(verb, tmp_path):
    """Two processes with one target: one writes it, the other says so; both from different heads, none mixed."""
    models = [publish(tmp_path / name, "glm4_moe", seed=seed) for name, seed in (("a", 1), ("b", 2))]
    for number in range(ROUNDS):
        out = tmp_path / f"out{number}" / "head.safetensors"
        how = {"form": "side-file"} if verb == "convert" else {}
        ends = race([partial(getattr(nextn, verb), model, out, **how) for model in models], tmp_path / "answers")
        assert ends.count("") == 1
        reported = next(end for end in ends if end)
        assert re.search(
            "another process is changing|already exists|does not exist yet|just now|after they were", reported
        ), reported
        nextn.convert(models[ends.index("")], tmp_path / f"alone{number}", form="side-file")
        made = tensors(out if verb == "convert" else out.parent)
        assert made.items() <= tensors(tmp_path / f"alone{number}").items()
        assert not list(out.parent.glob(".*"))


def linked(tmp_path):
    """A stranger's folder with links to a private file and to private weights."""
    private, source = publish(tmp_path / "private", "glm4_moe"), publish(tmp_path / "source", "glm4_moe")
    (private / "id_rsa").write_text("secret")
    (source / "notes.txt").symlink_to(private / "id_rsa")
    (source / "extra").mkdir()
    (source / "extra" / "more.safetensors").symlink_to(private / "model.safetensors")
    return private, source


@pytest.mark.parametrize("verb", ["convert", "extract", "restore", "base"])
def test_links_out_of_the_folder(verb, tmp_path):
    """Refused by name, with where they lead; what is followed on demand is there."""
    private, source = linked(tmp_path)
    target = publish(tmp_path / "target", "glm4_moe")
    calls = {
        "convert": partial(nextn.convert, source, tmp_path / "out", form="side-file"),
        "extract": partial(nextn.extract, source, tmp_path / "out" / "head.safetensors"),
        "restore": partial(nextn.restore, source, target, out=tmp_path / "out", force=True),
        "base": partial(nextn.restore, target, source, out=tmp_path / "out", force=True),
    }
    with pytest.raises(
        CheckpointError, match=r"links lead out .*more\.safetensors, notes\.txt .*NEXTN_FOLLOW_LINKS=1"
    ) as no:
        calls[verb]()
    assert str(private) in str(no.value)
    assert not (tmp_path / "out").exists()
    calls[verb](follow_links=True)
    if verb in ("convert", "restore"):
        assert (tmp_path / "out" / "notes.txt").read_text() == "secret"


def test_links_inside_and_a_linked_folder(tmp_path):
    """A link to another file of the folder is one of its files; so is all, where the folder itself is a link."""
    source = publish(tmp_path / "source", "glm4_moe")
    (source / "b.json").write_text("{}")
    (source / "a.json").symlink_to("b.json")
    (tmp_path / "link").symlink_to(source)
    nextn.convert(tmp_path / "link", tmp_path / "out", form="side-file")
    assert (tmp_path / "out" / "a.json").read_text() == "{}"
    file = tmp_path / "head.safetensors"
    file.symlink_to(source / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    nextn.extract(file, tmp_path / "own" / "head.safetensors")  # named itself
    (tmp_path / "snapshots" / "0a1b").mkdir(parents=True)
    (tmp_path / "blobs").symlink_to(source)  # no folder of a cache's own
    for path in source.iterdir():
        (tmp_path / "snapshots" / "0a1b" / path.name).symlink_to(f"../../blobs/{path.name}")
    with pytest.raises(CheckpointError, match="links lead out"):
        nextn.convert(tmp_path / "snapshots" / "0a1b", tmp_path / "out2", form="side-file")


def test_special_files(tmp_path):
    """A pipe is never read: refused by name where its name is one that is read, else left out by name."""
    source = publish(tmp_path / "source", "glm4_moe")
    os.mkfifo(source / "pipe")
    (source / "broken").symlink_to("nowhere")
    plan = nextn.convert(source, tmp_path / "out", form="side-file")
    assert plan.notes == ("left out, as neither regular files nor folders: broken, pipe",)
    assert not {"pipe", "broken"} & {path.name for path in (tmp_path / "out").iterdir()}
    (tmp_path / "here").mkdir()
    os.mkfifo(tmp_path / "here" / "config.json")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        nextn.extract(source, tmp_path / "here" / "head.safetensors")
    os.mkfifo(source / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a pipe, socket or device"):
        nextn.convert(source, tmp_path / "out2", form="side-file")


def test_a_tensor_with_the_name_of_a_layer(tmp_path):
    """Catches a traceback, where the head's layer is a tensor itself and not a path to some."""

    def change(table):
        table[f"model.layers.{LAYERS}"] = RawTensor("U8", (1,), b"1")

    source = publish(tmp_path / "source", "glm4_moe", change=change)
    nextn.extract(source, tmp_path / "head.safetensors")
    assert "model.layers.2" in Checkpoint.open(tmp_path / "head.safetensors").tensors


@pytest.mark.more
def test_experts_in_several_forms(tmp_path):
    """A head of which each form has a part becomes one form, with every byte; modules may differ in their form."""
    source = publish(tmp_path / "source", "glm4_moe", modules=2)
    before = tensors(source)
    nextn.convert(source, tmp_path / "fused", experts="fused")
    fused = tensors(tmp_path / "fused")
    gate_up, module = "model.layers.2.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts."
    for place, chosen in enumerate(({gate_up}, {name for name in fused if name.startswith(module)})):
        gone = {name for name in before if name.startswith(module) == bool(place) and ".experts." in name
                and name.startswith("model.layers.2" if not place else module)
                and (place or not name.endswith("down_proj.weight"))}  # fmt: skip
        mixed = shutil.copytree(source, tmp_path / f"mixed{place}")
        table = {name: value for name, value in before.items() if name not in gone} | {
            each: fused[each] for each in chosen
        }
        write_safetensors(mixed / "model.safetensors", {name: RawTensor(*value) for name, value in table.items()})
        nextn.convert(mixed, tmp_path / f"split{place}", experts="split")
        assert tensors(tmp_path / f"split{place}") == before
        nextn.convert(mixed, tmp_path / f"fused{place}", experts="fused")
        assert tensors(tmp_path / f"fused{place}") == fused


def test_experts_stored_twice_and_in_two_forms(tmp_path):
    """The ones in the other form are left out, under both of their names."""
    source = publish(tmp_path / "source", "qwen3_next")
    nextn.convert(source, tmp_path / "fused", experts="fused")
    split, fused = tensors(source), tensors(tmp_path / "fused")
    twice = {f"model.{name}": value for name, value in split.items() if name.startswith("mtp.") and ".experts." in name}
    assert twice
    write_safetensors(
        source / "model.safetensors", {name: RawTensor(*value) for name, value in (fused | split | twice).items()}
    )
    nextn.convert(source, tmp_path / "out", experts="fused")
    assert tensors(tmp_path / "out") == fused


@pytest.mark.parametrize("name", ["glm4_moe", "step3p5"])
def test_layers_under_another_path(name, tmp_path):
    """Numbered from 0 as in Megatron's exports, not after the trunk's: the fix keeps the head."""
    base = publish(tmp_path / "base", name)
    renamed = publish(tmp_path / "renamed", name, change=under_another_path)
    (finding,) = [each for each in nextn.audit(renamed).findings if each.severity == "error"]
    assert finding.fix == f"nextn convert {renamed} OUT --to {name}"
    nextn.convert(renamed, tmp_path / "out", to=name)
    assert tensors(tmp_path / "out") == tensors(base)


def under_another_path(table):
    for key in [key for key in table if key.startswith(f"model.layers.{LAYERS}.")]:
        table[key.replace(f"model.layers.{LAYERS}.", "mtp.layers.0.")] = table.pop(key)


def test_modules_of_other_types_are_complete(tmp_path):
    """By mtp_mlp_layer_types, one module is dense and two have experts: neither lacks what the other has."""
    build("step3p5", modules=3).save(tmp_path / "model")
    head = Inventory.of(Checkpoint.open(tmp_path / "model"))
    assert absent(head) == []
    lost = {key: name for key, name in head.stored.items() if key != "2.block.self_attn.q_proj.weight"}
    assert absent(replace(head, stored=lost)) == ["2.block.self_attn.q_proj.weight"]
