"""Indexes that do not lead to the files' tensors: audit names them, one command mends them, no edit loses by them."""

import json
import re
import shutil

import pytest
from artifacts import publish
from operations import read
from quick import loop
from stored import in_one_file
from test_convert import tensors
from test_restore import bytes_of, lost, own_names, take, without

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import INDEX, SINGLE, Checkpoint
from nextn.checkpoint.file_index import file_index
from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors
from nextn.edit.reindex import reindex
from nextn.errors import CheckpointError, ConfigError

NAME = "qwen3_5"


def rewrite(folder, change):
    """Change the weight_map of an index."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = change(index["weight_map"])
    write_json(folder / INDEX, index)


def resharded(folder):
    """The index of another upload, with five files instead of two."""
    publish(folder, NAME, shards=2)
    rewrite(
        folder,
        lambda table: {name: f"model-{1 + place % 5:05d}-of-00005.safetensors" for place, name in enumerate(table)},
    )


def head_alone(folder):
    publish(folder, NAME, shards=2, side_file="model-mtp.safetensors")
    rewrite(folder, lambda table: dict.fromkeys(own_names(NAME), "model-mtp.safetensors"))


def half(folder):
    """An index generator whose pattern misses a shard."""
    publish(folder, NAME, shards=3)
    rewrite(folder, lambda table: {name: file for name, file in table.items() if "00002" not in file})


def side_file(folder):
    publish(folder, NAME, shards=2, side_file="model-mtp-of-00005.safetensors")


def head_in_a_listed_file(folder):
    publish(folder, NAME, shards=2)
    rewrite(folder, lambda table: {name: file for name, file in table.items() if name not in own_names(NAME)})


def swapped(folder):
    """Each tensor in the next file."""
    publish(folder, NAME, shards=2)
    files = sorted({*json.loads((folder / INDEX).read_text())["weight_map"].values()})
    rewrite(folder, lambda table: {name: files[(files.index(file) + 1) % 2] for name, file in table.items()})


def index_lost(folder):
    publish(folder, NAME, shards=2)
    (folder / INDEX).unlink()


def beside_a_single_file(folder):
    """The head's file was added to a model of one file."""
    publish(folder, NAME, side_file="model-mtp.safetensors")


def nothing_listed(folder):
    """An empty index, and the head in a file of its own."""
    publish(folder, NAME, shards=2, side_file="model-mtp.safetensors")
    rewrite(folder, lambda table: {})


def another_name(folder):
    """One file, under a name that transformers does not open without an index."""
    publish(folder, NAME)
    (folder / SINGLE).rename(folder / "model.fp16.safetensors")


def vision_apart(folder):
    """The file of the vision model, as llm-compressor names it, beside an index of the text model's."""
    visual = {"model.visual.patch_embed.proj.weight": RawTensor("BF16", (4, 3), bytes(24))}
    publish(folder, NAME, shards=2, wrapper="model.language_model.", config={"vision_config": {"depth": 1}})
    write_safetensors(folder / "model_visual.safetensors", visual)


def norm_apart(folder):
    """A file for each layer, as AirLLM writes them, and one for the final norm."""
    publish(folder, NAME)
    table = read(folder)
    (folder / SINGLE).unlink()
    write_safetensors(folder / "model.norm.safetensors", {name: table.pop(name) for name in ["model.norm.weight"]})
    write_safetensors(folder / "model.layers.0.safetensors", table)


BROKEN = [resharded, head_alone, half, side_file, head_in_a_listed_file, swapped, index_lost, beside_a_single_file,
          nothing_listed, another_name, vision_apart, norm_apart]  # fmt: skip


# What lies beside sound shards: name, seed of its values, as (severity, words).
SECOND_COPIES = {
    "consolidated.safetensors": ((0, "note", "vLLM .* reads it"), (7, "warning", "other values.*vLLM .* reads it")),
    "model-00001-of-00003 (1).safetensors": (
        (0, "note", "equal values"),
        (7, "warning", "llama.cpp's converter reads"),
    ),
    SINGLE: ((0, "note", "equal values"), (7, "warning", "transformers opens it before any index")),
}


VISION = {"vision_config": {"depth": 1}}
# Files beside a vision-language checkpoint that hold a vision model, and are of another layout: (listed, in the file).
OTHER_LAYOUTS = {
    "consolidated.safetensors": ((), ("layers.0.attention.wq.weight", "tok_embeddings.weight", "vision_encoder.a")),
    "vision.safetensors": (("model.visual.a",), ("visual.a",)),
    "mmproj.safetensors": (("vision_tower.b",), ("vision_tower_2.a", "multi_modal_projector.a", "mm_input.a")),
}


@pytest.mark.parametrize("file", OTHER_LAYOUTS)
def test_vision_models_of_other_layouts_stay_unlisted(tmp_path, file):
    """Loaders that follow the index need nothing from them: there is no finding, and a new index leaves them out."""
    listed, held = ({name: RawTensor("BF16", (4, 3), bytes(24)) for name in names} for names in OTHER_LAYOUTS[file])
    folder = publish(tmp_path / "model", NAME, shards=2, wrapper="model.language_model.", config=VISION,
                     change=lambda table: table.update(listed))  # fmt: skip
    write_safetensors(folder / file, held)
    assert [each for each in audit(Checkpoint.open(folder)).findings if each.severity == "error"] == []
    assert not held.keys() & reindexed_names(folder)


@pytest.mark.more
def test_second_copies(tmp_path):
    """A second copy is one finding, whatever its name, and a fault only where a loader gets other values by it."""
    for place, (name, cases) in enumerate(SECOND_COPIES.items()):
        for seed, severity, words in cases:
            folder = publish(tmp_path / f"{place}-{seed}", NAME, shards=3)
            shutil.copyfile(publish(tmp_path / f"{place}-{seed}-copy", NAME, seed=seed) / SINGLE, folder / name)
            (found,) = (each for each in audit(Checkpoint.open(folder)).findings if each.rule == "index")
            assert (found.severity, found.place) == (severity, f"{INDEX}: {name}")
            assert re.search(words, found.found)
            before = tensors(folder)
            nextn.convert(folder, folder.with_suffix(".single"), form="single-file")
            assert tensors(folder.with_suffix(".single")) == before


def test_shards_of_which_the_index_takes_a_part(tmp_path):
    """Those of the original beside quantized ones, for one tensor alone: to remove them would lose it."""
    folder = publish(tmp_path / "model", NAME, shards=2)
    table = read(publish(tmp_path / "original", NAME, seed=7))
    name = "model.layers.0.mlp.down_proj.weight"
    stale = {name: table[name], f"{name}_scale_inv": RawTensor("F32", (1, 1), bytes(4))}
    write_safetensors(folder / "original.safetensors", stale | {"model.visual.a.weight": table["lm_head.weight"]})
    rewrite(folder, lambda table: table | {"model.visual.a.weight": "original.safetensors"})
    (found,) = (each for each in audit(Checkpoint.open(folder)).findings if each.rule == "index")
    assert found.severity == "warning"
    assert "Remove" not in found.fix
    assert f"{name}_scale_inv" not in reindexed_names(folder)


def reindexed_names(folder):
    """What the index that the files imply lists."""
    return file_index(Checkpoint.open(folder)).weight_map


@loop("before, severity", [("", "warning"), ("./", "error")])
def test_files_in_subfolders(before, severity, tmp_path):
    """vLLM and SGLang refuse an index that names them, or pass them over; the fix's command puts them beside it."""
    folder = publish(tmp_path / "model", NAME, shards=2)
    (folder / "mtp").mkdir()
    (folder / "model-00002-of-00002.safetensors").rename(folder / "mtp" / "model-00002-of-00002.safetensors")
    rewrite(
        folder,
        lambda table: {name: f"{before}mtp/{file}" if "00002-" in file else file for name, file in table.items()},
    )
    (found,) = (each for each in audit(Checkpoint.open(folder)).findings if each.severity != "note")
    assert (found.rule, found.severity) == ("index", severity)
    assert found.fix == f"nextn convert {folder} OUT --form single-file"
    nextn.convert(folder, tmp_path / "out", form="single-file")
    assert audit(Checkpoint.open(tmp_path / "out")).clean
    assert tensors(tmp_path / "out") == tensors(folder)


@loop("before", ["./", "/home/user/model/", ".\\", "D:\\model\\"])
def test_an_index_of_paths(before, tmp_path):
    """vLLM compares them with the names in the folder (filter_duplicate_safetensors_files) and finds no weights."""
    folder = publish(tmp_path, NAME, shards=2)
    rewrite(folder, lambda table: {name: f"{before}{file}" for name, file in table.items()})
    (found,) = (each for each in audit(Checkpoint.open(folder)).findings if each.severity != "note")
    assert (found.rule, found.severity, found.fix) == ("index", "error", f"nextn convert {folder} --reindex")
    reindex(folder)
    assert audit(Checkpoint.open(folder)).clean
    assert nothing_to_write(folder)


@loop("before", ["./", "/home/user/model/", "D:\\model\\", ""])
def test_a_file_that_is_absent_stays_in_the_index(before, tmp_path):
    """Its names in the index alone say that the model has more: it is to be fetched before the index is written."""
    folder = publish(tmp_path / "model", NAME, shards=3)
    left_out = " " if before else "00003-"  # without paths, another fault that a new index fixes
    rewrite(folder, lambda table: {name: f"{before}{file}" for name, file in table.items() if left_out not in file})
    (gone,) = folder.glob("model-00001-*")
    gone.rename(tmp_path / gone.name)
    found = [each for each in audit(Checkpoint.open(folder)).findings if each.rule in ("index", "side-file")]
    assert {each.severity for each in found} == {"error"}
    assert len(found) == 2
    assert all(each.fix.startswith(f"Download {gone.name} again") for each in found)
    index = (folder / INDEX).read_bytes()
    with pytest.raises(CheckpointError, match=f"download {gone.name} again"):
        reindex(folder)
    assert (folder / INDEX).read_bytes() == index
    (tmp_path / gone.name).rename(gone)
    reindex(folder)
    assert audit(Checkpoint.open(folder)).clean


LAYER = "model.layers.0"
BESIDE = {
    "steering vectors": ("steering.safetensors", [LAYER, "model.layers.1"]),
    "vectors in layers": ("steering.safetensors", [f"{LAYER}.steering_vector", "model.layers.2.steering_vector"]),
    "statistics": ("act.safetensors", [f"{LAYER}.self_attn.q_proj"]),
    "an adapter": ("adapter_model.safetensors", [f"base_model.model.{LAYER}.self_attn.q_proj.lora_A.weight"]),
    "an adapter under another name": ("lora.safetensors", [f"{LAYER}.mlp.up_proj.lora_A.weight", "mtp.fc.lora_a"]),
    "an adapter that trained the head whole": (
        "adapter_model.safetensors",
        ["base_model.model.mtp.fc.weight", f"base_model.model.{LAYER}.q.lora_A.weight"],
    ),
    "an adapter of norms": (
        "adapter_model.safetensors",
        [f"base_model.model.{LAYER}.input_layernorm.ln_tuning_layers.weight"],
    ),
    "a prompt": ("adapter_model.safetensors", ["prompt_embeddings"]),
    "pooling": ("dense.safetensors", ["linear.weight"]),
}


@loop("file, names", BESIDE.values(), ids=BESIDE)
def test_files_that_are_used_beside_a_model(file, names, tmp_path):
    """They are neither missing from an index nor parts of head or trunk; without an index, vLLM reads them as well."""
    extra = {name: RawTensor("BF16", (4,), bytes(8)) for name in names}
    folder = publish(tmp_path / "indexed", NAME, shards=2)
    write_safetensors(folder / file, extra)
    assert audit(Checkpoint.open(folder)).clean
    assert not {*names} & {*reindexed_names(folder)}
    assert nothing_to_write(folder)
    single = publish(tmp_path / "single", NAME)
    write_safetensors(single / file, extra)
    (found,) = (each for each in audit(Checkpoint.open(single)).findings if each.severity != "note")
    assert (found.rule, found.severity, found.place) == ("index", "warning", file)


def test_an_adapter_beside_a_model(tmp_path):
    """transformers 5.23's from_pretrained applies it, engines do not."""
    folder = publish(tmp_path, NAME, shards=2)
    weight = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": RawTensor("BF16", (4,), bytes(8))}
    write_safetensors(folder / "adapter_model.safetensors", weight)
    write_json(folder / "adapter_config.json", {"peft_type": "LORA"})
    (found,) = (each for each in audit(Checkpoint.open(folder)).findings if each.severity != "note")
    assert (found.rule, found.severity, found.place) == ("index", "warning", "adapter_config.json")


@loop("shards", [1, 2])
def test_files_that_vllm_reads_alone(shards, tmp_path):
    """With consolidated*.safetensors in a folder, vLLM opens no other file, and finds no head (default_loader)."""
    folder = publish(tmp_path / "model", NAME, shards=shards)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    file = "consolidated.00.safetensors"
    write_safetensors(folder / file, {"layers.0.attention.wq.weight": RawTensor("BF16", (4,), bytes(8))})
    (found,) = (each for each in audit(Checkpoint.open(folder)).findings if each.severity != "note")
    assert (found.rule, found.severity, found.place) == ("index", "warning", file)
    assert not {"layers.0.attention.wq.weight"} & {*reindexed_names(folder)}
    assert nothing_to_write(folder)
    write_safetensors(copy / file, read(copy))
    assert audit(Checkpoint.open(copy)).clean


def test_listed_files_that_vllm_reads_alone(tmp_path):
    """The head is in a shard of another name: one file for all fixes it."""
    folder = publish(tmp_path / "model", NAME, shards=2, side_file="mtp.safetensors")
    for file in folder.glob("model-*"):
        file.rename(file.with_name(file.name.replace("model", "consolidated")))
    rewrite(folder, lambda table: {name: file.replace("model", "consolidated") for name, file in table.items()} |
            dict.fromkeys(own_names(NAME), "mtp.safetensors"))  # fmt: skip
    (found,) = (each for each in audit(Checkpoint.open(folder)).findings if each.severity != "note")
    assert (found.rule, found.fix) == ("index", f"nextn convert {folder} OUT --form single-file")
    nextn.convert(folder, tmp_path / "out", form="single-file")
    assert audit(Checkpoint.open(tmp_path / "out")).clean


@loop("shards", [1, 2])
@loop("file", ["adapter_model.safetensors", "adapter_mtp.safetensors"])
def test_a_head_in_a_file_that_is_named_as_an_adapter(file, shards, tmp_path):
    """Its tensors say what a file is: the head is there, and the command of the finding lists it."""
    folder = publish(tmp_path, NAME, side_file=file, shards=shards)
    (found,) = (each for each in audit(Checkpoint.open(folder)).findings if each.severity != "note")
    assert (found.rule, found.severity) == ("side-file", "error")
    assert found.fix == f"nextn convert {folder} --reindex"
    reindex(folder)
    assert audit(Checkpoint.open(folder)).clean


@loop("name", ["model.layers.0.self_attn.k_scale", "model.layers.0.mlp.experts.gate_up_proj"])
def test_parameters_in_a_file_beside_a_model_are_missed(name, tmp_path):
    folder = publish(tmp_path, NAME, shards=2)
    write_safetensors(folder / "more.safetensors", {name: RawTensor("BF16", (4,), bytes(8))})
    assert "more.safetensors" in {reindexed_names(folder).get(name)}


@pytest.mark.one_case
@pytest.mark.parametrize("broken", BROKEN)
def test_reindex(broken, tmp_path):
    """Not reported, reported twice, not mended by the command that the finding names, or a byte changed by it."""
    broken(tmp_path / "model")
    before = tensors(tmp_path / "model")
    found = [each for each in audit(Checkpoint.open(tmp_path / "model")).findings if each.severity != "note"]
    assert [each.rule for each in found] in (["index"], ["side-file"])
    assert found[0].fix == f"nextn convert {tmp_path / 'model'} --reindex"
    plan = reindex(tmp_path / "model")
    assert bytes_of(tmp_path / "model") == tensors(tmp_path / "model") == before
    assert not plan.files.weights
    report = audit(Checkpoint.open(tmp_path / "model"))
    assert report.clean, report.findings
    assert nothing_to_write(tmp_path / "model")


@pytest.mark.one_case
@pytest.mark.parametrize("broken", BROKEN)
def test_edits_lose_nothing(broken, tmp_path):
    """An edit that takes the index's word for what the checkpoint holds."""
    broken(tmp_path / "model")
    before = tensors(tmp_path / "model")
    nextn.convert(tmp_path / "model", tmp_path / "single", form="single-file")
    assert tensors(tmp_path / "single") == before
    base = publish(tmp_path / "base", NAME, seed=5)
    shutil.copytree(tmp_path / "model", tmp_path / "kept")
    with pytest.raises(CheckpointError, match="already has a complete head"):
        nextn.restore(tmp_path / "kept", base)
    assert tensors(tmp_path / "kept") == before
    nextn.restore(tmp_path / "kept", base, force=True)
    head = bytes_of(base, own_names(NAME))
    assert bytes_of(tmp_path / "kept") == before | head


def test_restore_on_a_stale_index(tmp_path):
    """The trunk is in files that the index does not name: it stays, and the note says that it is listed now."""
    target = lost(tmp_path / "target", NAME, shards=2)
    rewrite(
        target,
        lambda table: {name: f"model-{1 + place % 5:05d}-of-00005.safetensors" for place, name in enumerate(table)},
    )
    before, base = tensors(target), publish(tmp_path / "base", NAME)
    plan = nextn.restore(target, base)
    assert any("are listed" in note for note in plan.notes)
    assert bytes_of(target) == before | bytes_of(base, own_names(NAME))
    assert audit(Checkpoint.open(target)).clean


def test_files_that_are_not_the_models(tmp_path):
    """An adapter, the same tensors under other names, and a second copy beside the shards: not listed, and not lost."""
    folder = publish(tmp_path / "model", NAME, shards=2)
    shutil.copyfile(folder / "model-00001-of-00002.safetensors", folder / "backup.safetensors")
    adapter = publish(tmp_path / "adapter", NAME, change=lambda table: [
        table.update({f"base_model.model.{name}.lora_A.weight": table.pop(name)}) for name in [*table]])  # fmt: skip
    shutil.copyfile(adapter / SINGLE, folder / "adapter_model.safetensors")
    original = publish(tmp_path / "original", NAME, change=lambda table: [
        table.update({f"tok.{place}": table.pop(name)}) for place, name in enumerate([*table])])  # fmt: skip
    shutil.copyfile(original / SINGLE, folder / "consolidated.safetensors")
    (folder / INDEX).unlink()
    plan = reindex(folder)
    assert set(json.loads((folder / INDEX).read_text())["weight_map"].values()) == {
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}  # fmt: skip
    assert any("adapter_model.safetensors, backup.safetensors, consolidated.safetensors" in note for note in plan.notes)
    assert (folder / "adapter_model.safetensors").exists()


def test_layers_that_no_file_holds(tmp_path):
    """Half of the trunk was never downloaded, and the index does not say so."""
    publish(tmp_path, NAME, change=lambda table: [table.pop(name) for name in [*table] if ".layers.1." in name])
    (found,) = (each for each in audit(Checkpoint.open(tmp_path)).findings if each.severity == "error")
    assert (found.rule, found.found) == ("trunk-missing", "Of 2 trunk layers 1 is in no file: 1.")


def nothing_to_write(folder):
    """Writing a sound index again changes no file, and says so."""
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    plan = reindex(folder)
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    return before == after and any("nothing to index" in note for note in plan.notes) and not plan.documents


def test_headless_has_nothing_to_index(tmp_path):
    """A sound index is left alone."""
    publish(tmp_path, NAME, shards=2, change=without(NAME))
    assert nothing_to_write(tmp_path)
    with pytest.raises(ConfigError, match="nothing to index"):
        reindex(tmp_path, tmp_path.with_name("other"))
    in_one_file(tmp_path)
    assert nothing_to_write(tmp_path)
    assert take(tmp_path).checkpoint.problems == ()


def test_files_of_two_uploads(tmp_path):
    """An index of a new upload, half of whose files are there, beside those of an old one: no edit mixes them."""
    folder, new = (
        publish(tmp_path / "old", "glm4_moe", shards=3),
        publish(tmp_path / "new", "glm4_moe", shards=4, seed=1),
    )
    for name in ("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors", INDEX):
        shutil.copy(new / name, folder / name)
    (finding,) = [each for each in audit(folder).findings if each.rule == "index" and each.severity == "error"]
    assert finding.fix.startswith("Download model-00003-of-00004.safetensors, model-00004-of-00004.safetensors again")
    before = bytes_of(folder)
    for edit in (lambda: reindex(folder), lambda: nextn.restore(folder, new, force=True)):
        with pytest.raises(CheckpointError, match=r"two uploads.*: download model-00003-of-00004"):
            edit()
    assert bytes_of(folder) == before
