"""graft: a lost head comes back byte for byte, or the target stays as it was and the reason is said."""

import os
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from artifacts import LAYERS, LAYOUTS, load_json, publish, tensors
from quick import families, loop, others_slow
from races import ROUNDS, race
from test_audit import as_mlx
from test_checkpoint_quantization import SECTIONS
from test_remote import Hub

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import CONFIG, INDEX, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import Provenance, head_fingerprint, open_head, trunk_fingerprint
from nextn.checkpoint.quantization import QuantConfig
from nextn.checkpoint.safetensors_file import RawTensor, write_json
from nextn.edit import execute
from nextn.edit.compatibility import absent
from nextn.edit.plan import _differences, visible
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table import by_name, rows


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """Thousands of small files; that bytes are synced before a rename is test_checkpoint's to see."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def take(folder) -> Inventory:
    return Inventory.of(Checkpoint.open(folder))


def lost(folder, name, **options):
    """A fine-tune (other values in the trunk) that lost its head."""
    return publish(folder, name, **{"seed": 1, "change": without(name)} | options)


def bytes_of(folder, names=None) -> dict[str, tuple]:
    """Name -> dtype, shape, bytes, as a loader that follows the index finds them."""
    checkpoint = visible(Checkpoint.open(folder))
    return {name: (info.dtype, info.shape, checkpoint.sources[info.file].read(info.begin, info.end))
            for name, info in checkpoint.tensors.items() if names is None or name in names}  # fmt: skip


def snapshot(folder) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def own_names(name, modules=1) -> set[str]:
    family = by_name(name)
    return {each for each in tensors(name, modules=modules, copies=False)
            if family.canonical(each, LAYERS) is not None}  # fmt: skip


FP8 = [name for name in LAYOUTS if by_name(name).fp8 is not None]


# One file or three: by turns, and both for the layouts that have most in them.
@pytest.mark.parametrize(
    ("name", "shards"),
    families(
        [(name, 1 + 2 * (place % 2)) for place, name in enumerate(LAYOUTS)] + [("deepseek_v3", 3), ("qwen3_5_moe", 3)]
    ),
)
def test_restored(name, shards, tmp_path):
    """A tensor of another name, value or place; a trunk that is not the target's any more."""
    base = publish(tmp_path / "base", name)
    target = lost(tmp_path / "target", name, shards=shards)
    before = bytes_of(target)
    nextn.restore(target, base)
    whole = take(target)
    assert (whole.declared, absent(whole), whole.checkpoint.problems, whole.checkpoint.unindexed) == (1, [], (), ())
    after = bytes_of(target)
    assert {each: after[each] for each in before} == before
    # In DeepSeek-V4 alone, some versions of an engine need copies of the trunk's tensors, too: see below.
    copies = set(whole.copies.values())
    assert bool(copies) == (name == "deepseek_v4")
    assert {each: after[each] for each in after.keys() - copies} == before | bytes_of(base, own_names(name))
    assert audit(whole.checkpoint).clean
    record = Provenance.read(whole.checkpoint)
    assert record is not None
    assert record.head == head_fingerprint(whole) == head_fingerprint(take(base))
    assert (record.trained_with, record.beside) == (trunk_fingerprint(take(base)), trunk_fingerprint(whole))


@pytest.mark.one_case
@pytest.mark.parametrize("name", FP8)
def test_fp8_head_into_fp8_target(name, tmp_path):
    """Scales that stay behind make every weight of the head wrong."""
    base = publish(tmp_path / "base", name, fp8=True)
    target = lost(tmp_path / "target", name, fp8=True)
    nextn.restore(target, base)
    head = set(take(base).stored.values()) - set(take(base).copies.values())
    assert any("scale" in each for each in head)
    assert bytes_of(target, head) == bytes_of(base, head)


def test_other_depth_and_wrapper(tmp_path):
    """The head's layer is counted from the target's trunk, and its names get the target's prefix."""
    base = publish(tmp_path / "base", "kimi_k3")

    def prune(table):
        without("kimi_k3")(table)
        for each in [each for each in table if ".layers.1." in each]:
            del table[each]

    shallow = publish(
        tmp_path / "target", "kimi_k3", wrapper="language_model.", change=prune,
        config={"model_type": "kimi_k3", "num_hidden_layers": 1},
    )  # fmt: skip
    nextn.restore(shallow, base)
    assert take(shallow).stored["0.projection.weight"] == "language_model.model.layers.1.eh_proj.weight"
    assert head_fingerprint(take(shallow)) == head_fingerprint(take(base))


def test_modules_and_silent_config(tmp_path):
    """Several modules come back as several, and a config that forgot them says so again, in its text part."""
    base = publish(tmp_path / "base", "mimo_v2", modules=3)
    target = lost(tmp_path / "target", "mimo_v2", modules=3, config={"num_nextn_predict_layers": 0})
    plan = nextn.restore(target, base)
    assert take(target).modules == (0, 1, 2)
    assert plan.changes == ("config.json: num_nextn_predict_layers: 0 -> 3",)


def test_what_the_config_says_of_the_head(tmp_path):
    """A field that engines build the head by, dropped by whoever saved the target."""
    base = publish(tmp_path / "base", "inkling", config={"chain_mtp": True})
    target = lost(tmp_path / "target", "inkling")
    nextn.restore(target, base)
    assert load_json(target / CONFIG)["chain_mtp"] is True


@pytest.mark.parametrize("bare", [True, False])
def test_side_file_as_base(bare, tmp_path):
    """A head in mtp.safetensors, with a config beside it or read by the target's; nobody knows with which trunk."""
    base = publish(tmp_path / "base", "glm4_moe", side_file="mtp.safetensors", copies=False)
    file = base / "mtp.safetensors"
    if bare:
        file = tmp_path / "alone.safetensors"
        shutil.copy(base / "mtp.safetensors", file)
    target = lost(tmp_path / "target", "glm4_moe", shards=2)
    nextn.restore(target, file)
    assert head_fingerprint(take(target)) == head_fingerprint(take(base))
    record = Provenance.read(Checkpoint.open(target))
    assert record is not None
    assert record.trained_with == ""
    assert "head-stale" not in {finding.rule for finding in audit(Checkpoint.open(target)).findings}


def test_own_side_file(tmp_path):
    """A head that lies beside the index is lost to every loader, and can come from there."""
    target = publish(tmp_path / "target", "glm4_moe", side_file="mtp.safetensors", shards=2)
    head = head_fingerprint(take(target))
    nextn.restore(target, target / "mtp.safetensors")
    index = load_json(target / INDEX)["weight_map"]
    assert index["model.layers.2.eh_proj.weight"] == "model-mtp.safetensors"
    assert head_fingerprint(take(target)) == head


@pytest.mark.more
@pytest.mark.parametrize("side_file", ["", "mtp.safetensors"])
def test_hub_base(side_file, tmp_path):
    """Of a hub base come the headers, the head and samples of the trunk: not the experts, not a whole layer."""

    def swell(table):
        table["model.layers.0.mlp.experts.9.huge"] = RawTensor("U8", [6_000_000], bytes(6_000_000))

    base = publish(tmp_path / "base", "glm4_moe", change=swell, side_file=side_file)
    hub = Hub({path.name: path.read_bytes() for path in base.iterdir()})
    served = []
    answer = hub.server.RequestHandlerClass.answer
    hub.server.RequestHandlerClass.answer = lambda self, status, headers, body: (
        served.append(len(body)), answer(self, status, headers, body))  # fmt: skip
    try:
        target = lost(tmp_path / "target", "glm4_moe")
        nextn.restore(target, hub.open())
    finally:
        hub.stop()
    assert head_fingerprint(take(target)) == head_fingerprint(take(base))
    assert sum(served) < 1_000_000
    record = Provenance.read(Checkpoint.open(target))
    assert record is not None
    assert (record.source, record.revision) == ("org/model", "0123456789abcdef0123456789abcdef01234567")


def without(name, *parts):
    """Drop head tensors whose names hold one of `parts`; without parts all of the head, copies included."""
    family = by_name(name)

    def change(table):
        head = [each for each in table if family.canonical(each, LAYERS) is not None]
        for each in [each for each in head if not parts or any(part in each for part in parts)]:
            del table[each]

    return change


def fused(table):
    """The head's experts in one tensor, as transformers saves them and no engine reads them."""
    parts = [each for each in table if "layers.2.mlp.experts." in each and "down_proj" in each]
    data = b"".join(table.pop(each).data for each in parts)
    table["model.layers.2.mlp.experts.down_proj"] = RawTensor("BF16", (len(parts), 32, 16), data)


def test_mangled_head_is_replaced(tmp_path):
    """Old tensors that stay in a file which the index names are read by every engine, under names they do not know."""
    base = publish(tmp_path / "base", "glm4_moe", copies=False)
    target = publish(tmp_path / "target", "glm4_moe", seed=1, shards=3, change=fused)
    with pytest.raises(CheckpointError, match="already has a complete head"):
        nextn.restore(target, base)  # fused, which some engines read
    assert any(note.startswith("replaces") for note in nextn.restore(target, base, force=True).notes)
    assert bytes_of(target, own_names("glm4_moe")) == bytes_of(base, own_names("glm4_moe"))
    checkpoint = Checkpoint.open(target)
    assert checkpoint.problems == ()
    assert not [each for each in checkpoint.tensors if each.endswith("experts.down_proj")]
    assert set(load_json(target / INDEX)["weight_map"].values()) == {path.name for path in target.glob("*.safetensors")}


def test_a_layer_that_is_not_counted_wants_force(tmp_path):
    """A decoder layer after the trunk's without anything of a head: it may be the trunk's own, as in stacked models."""
    base = publish(tmp_path / "base", "glm4_moe", copies=False)
    parts = "eh_proj", "enorm", "hnorm", "shared_head", "embed_tokens"
    target = publish(tmp_path / "target", "glm4_moe", seed=1, change=without("glm4_moe", *parts))
    before = snapshot(target)
    with pytest.raises(CheckpointError, match=r"layer 2 .*correct it in config\.json.*--force"):
        nextn.restore(target, base)
    assert snapshot(target) == before
    (finding,) = [each for each in audit(target).findings if each.rule == "head-partial"]
    assert "num_hidden_layers" in finding.fix
    assert "--force" in finding.fix
    nextn.restore(target, base, force=True)
    assert bytes_of(target, own_names("glm4_moe")) == bytes_of(base, own_names("glm4_moe"))


def test_whole_head_wants_force(tmp_path):
    """A sound head replaced unasked; one of several files removed with what it holds beside the head."""
    base, target = publish(tmp_path / "base", "glm4_moe"), publish(tmp_path / "target", "glm4_moe", seed=1)
    with pytest.raises(CheckpointError, match=r"already has a complete head.*--force"):
        nextn.restore(target, base)
    trunk = trunk_fingerprint(take(target))
    nextn.restore(target, base, force=True)
    assert head_fingerprint(take(target)) == head_fingerprint(take(base))
    assert trunk_fingerprint(take(target)) == trunk
    assert not (target / "model.safetensors").exists()
    nextn.restore(target, publish(tmp_path / "third", "glm4_moe", seed=2), force=True)
    assert sorted(path.name for path in target.glob("*mtp*")) == ["model-mtp-2.safetensors"]
    assert take(target).checkpoint.problems == ()


def wide(table):
    """A norm of 48 numbers beside a trunk of 32."""
    table["model.layers.2.enorm.weight"] = RawTensor("BF16", (48,), bytes(96))


def grown(table):
    """Two tokens more in embedding and output."""
    for each in ("model.embed_tokens.weight", "lm_head.weight"):
        old = table[each]
        table[each] = RawTensor(old.dtype, (66, 32), old.data + old.data[: 2 * 64])


def pruned(table):
    """Half of the trunk's experts, as REAP leaves it, without the head."""
    without("glm4_moe")(table)
    for name, old in [*table.items()]:
        if re.search(r"experts\.[23]\.", name):
            del table[name]
        elif re.search(r"mlp\.gate\.", name):
            table[name] = RawTensor(old.dtype, (2, *old.shape[1:]), old.data[: len(old.data) // 2])


# base's layout and options, target's options, error and reason
REFUSED = {
    "no head": ("glm4_moe", {"change": without("glm4_moe")}, {}, CheckpointError, "holds no head"),
    "role": ("glm4_moe", {"change": without("glm4_moe", "eh_proj")}, {}, CheckpointError, "partial.*0.projection"),
    "expert": ("glm4_moe", {"change": without("glm4_moe", "experts.3.")}, {}, CheckpointError, "partial.*expert 3"),
    "count": ("glm4_moe", {"config": {"num_nextn_predict_layers": 2}}, {}, CheckpointError, "partial.*1.token_norm"),
    "family": ("deepseek_v3", {}, {}, FamilyError, "family deepseek_v3, the target's is glm4_moe.*convert"),
    "type": ("glm4_moe", {"config": {"model_type": "llama"}}, {}, FamilyError, "llama"),
    "width": ("glm4_moe", {"change": wide}, {}, CheckpointError, "hidden_size is 48, the target's 32"),
    "heads": ("glm4_moe", {"config": {"num_key_value_heads": 4}}, {}, CheckpointError,
              "num_key_value_heads is 4, the target's 2"),
    "fp8": ("glm4_moe", {"fp8": True}, {}, CheckpointError, "quantized .fp8-block.*no quantization"),
    "vocabulary": ("glm4_moe", {}, {"change": lambda table: (without("glm4_moe")(table), grown(table))},
                   CheckpointError, "vocab_size is 64, the target's 66.*--force"),
    "experts": ("glm4_moe", {}, {"change": pruned, "config": {"n_routed_experts": 2}}, CheckpointError,
                "n_routed_experts is 4, the target's 2. If the trunk's experts were pruned, use --force; then `n"),
    "lm_head": ("glm4_moe", {}, {"change": lambda table: (without("glm4_moe")(table), table.pop("lm_head.weight")),
                                 "config": {"tie_word_embeddings": True}},
                CheckpointError, "target is tied .*without the lm_head.*--force"),
}  # fmt: skip


@loop("case", REFUSED)
def test_refused(case, tmp_path):
    """A head that cannot work beside this trunk is refused with the reason, and nothing is written."""
    name, base, target, error, reason = REFUSED[case]
    base = publish(tmp_path / "base", name, **base)
    target = lost(tmp_path / "target", "glm4_moe", **target)
    before = snapshot(target)
    with pytest.raises(error, match=reason):
        nextn.restore(target, base)
    assert snapshot(target) == before


def test_shape_of_a_block(tmp_path):
    """A side file says nothing of sizes, and configs may be silent; the target's own layers are not."""

    def narrow(table):
        for each in [each for each in table if each.endswith("self_attn.k_proj.weight")]:
            table[each] = RawTensor("BF16", (8, 32), table[each].data[: 8 * 64])

    base = publish(tmp_path / "base", "glm4_moe", side_file="mtp.safetensors", change=narrow)
    shutil.copy(base / "mtp.safetensors", tmp_path / "alone.safetensors")
    target = lost(tmp_path / "target", "glm4_moe")
    with pytest.raises(CheckpointError, match=r"k_proj.weight is \[8, 32\], the target's layers have \[16, 32\]"):
        nextn.restore(target, tmp_path / "alone.safetensors")
    with pytest.raises(CheckpointError, match=r"k_proj.weight is \[8, 32\]"):
        nextn.restore(target, base)


def test_added_tokens(tmp_path):
    """A fine-tune with two more tokens keeps its head if the user says so: the head has no vocabulary of its own."""
    base = publish(tmp_path / "base", "glm4_moe")
    target = lost(tmp_path / "target", "glm4_moe", change=lambda table: (without("glm4_moe")(table), grown(table)))
    plan = nextn.restore(target, base, force=True)
    assert any("another vocabulary" in note for note in plan.notes)
    target = lost(tmp_path / "tied", **REFUSED["lm_head"][2], name="glm4_moe")
    assert any("without the lm_head" in note for note in nextn.restore(target, base, force=True).notes)
    own = publish(tmp_path / "own", "step3p5")
    target = lost(tmp_path / "step", "step3p5", change=lambda table: (without("step3p5")(table), grown(table)))
    with pytest.raises(CheckpointError, match="vocab_size is 64"):
        nextn.restore(target, own, force=True)


def test_a_head_of_all_experts_beside_a_pruned_trunk(tmp_path):
    base, target = (
        publish(tmp_path / "base", "glm4_moe"),
        lost(tmp_path / "target", **REFUSED["experts"][2], name="glm4_moe"),
    )
    assert any("--keep-experts LIST" in note for note in nextn.restore(target, base, force=True).notes)
    nextn.convert(target, tmp_path / "out", keep_experts=[3, 1])
    assert audit(tmp_path / "out").clean


def test_names_of_a_wrapper_are_noted(tmp_path):
    base = publish(tmp_path / "base", "qwen3_5")

    def wrap(table):
        without("qwen3_5")(table)
        for name in [*table]:
            table[f"_orig_mod.{name}"] = table.pop(name)

    target = publish(tmp_path / "target", "qwen3_5", change=wrap)
    (note,) = nextn.restore(target, base).notes
    assert "of the target under names of a wrapper of torch" in note
    record = load_json(target / "nextn.json")
    assert record["beside"] == ""  # no fingerprint of nothing
    write_json(base / "nextn.json", record)  # as if the names were put right
    assert "head-stale" not in {finding.rule for finding in audit(base).findings}


@pytest.mark.parametrize("pattern", ["^", r"^(?=mtp\.)"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_a_head_under_names_of_a_wrapper_is_not_doubled(prefix, pattern, tmp_path):
    """Once its files are renamed as audit says, it would be there twice."""

    def wrap(table):
        for name in [*table]:
            table[re.sub(pattern, prefix, name)] = table.pop(name)

    base, target = publish(tmp_path / "base", "qwen3_5"), publish(tmp_path / "target", "qwen3_5", change=wrap)
    before = sorted(path.name for path in target.iterdir())
    with pytest.raises(CheckpointError, match="the head's among them"):
        nextn.restore(target, base)
    assert sorted(path.name for path in target.iterdir()) == before
    nextn.restore(target, base, force=True)


def test_broken_places(tmp_path):
    """A hub id as target, a trunk with a shard missing, nothing to do, an engine that is none."""
    base = publish(tmp_path / "base", "glm4_moe")
    target = lost(tmp_path / "target", "glm4_moe", shards=3)
    with pytest.raises(CheckpointError, match="not a folder"):
        nextn.restore("org/model", base)
    with pytest.raises(ConfigError, match="nothing to restore"):
        nextn.restore(target)
    with pytest.raises(ConfigError, match="known: vllm"):
        nextn.restore(target, base, aliases="tgi")
    (target / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"in no file.*Download model-00002-of-00003\.safetensors again first"):
        nextn.restore(target, base)


def test_head_shard_deleted(tmp_path):
    """An index that still lists a head whose file is gone is mended."""
    target = publish(tmp_path / "target", "glm4_moe", shards=2, side_file="mtp.safetensors")
    index = load_json(target / INDEX)
    index["weight_map"] |= dict.fromkeys(own_names("glm4_moe"), "mtp.safetensors")
    write_json(target / INDEX, index)
    (target / "mtp.safetensors").unlink()
    nextn.restore(target, publish(tmp_path / "base", "glm4_moe"))
    assert take(target).checkpoint.problems == ()
    assert absent(take(target)) == []


def test_dry_run(tmp_path):
    """The plan names every tensor, its source and the bytes, and nothing is written."""
    base, target = publish(tmp_path / "base", "glm4_moe"), lost(tmp_path / "target", "glm4_moe")
    before = snapshot(target)
    plan = nextn.restore(target, base, dry_run=True)
    assert snapshot(target) == before
    record = plan.as_record()
    assert {move["tensor"] for move in record["moves"]} == own_names("glm4_moe")
    nextn.restore(target, base)
    written = Checkpoint.open(target).headers["model-mtp.safetensors"].tensors
    assert record["bytes"] == sum(info.nbytes for info in written.values())
    assert record["renamed"] == {"model.safetensors": "model-00001-of-00002.safetensors"}


def test_out(tmp_path):
    """A new folder shares the weights and no JSON; the target stays; what lies in subfolders comes along."""
    base, target = publish(tmp_path / "base", "glm4_moe"), lost(tmp_path / "target", "glm4_moe", shards=2)
    (target / "extra").mkdir()
    (target / "extra" / "template.jinja").write_text("{{ messages }}")
    (target / "tokenizer.json").write_text("{}")
    (target / ".cache").mkdir()
    (target / ".cache" / "x").write_text("")
    before = snapshot(target)
    out = tmp_path / "deep" / "out"
    nextn.restore(target, base, out=out)
    assert snapshot(target) == before
    assert absent(take(out)) == []
    first = "model-00001-of-00002.safetensors"
    assert os.path.samefile(out / first, target / first)
    assert not os.path.samefile(out / "tokenizer.json", target / "tokenizer.json")
    assert (out / "extra" / "template.jinja").exists()
    assert not (out / ".cache").exists()
    assert not [path for path in out.parent.iterdir() if path != out]
    with pytest.raises(CheckpointError, match="not empty"):
        nextn.restore(target, base, out=out)


def test_out_of_a_cache(tmp_path, monkeypatch):
    """The hub's cache is links; a new folder must hold the files, also where hard links do not work."""
    base, target = publish(tmp_path / "base", "glm4_moe"), lost(tmp_path / "blobs", "glm4_moe", shards=2)
    links = tmp_path / "snapshots" / "0123abcd"
    links.mkdir(parents=True)
    for path in target.iterdir():
        (links / path.name).symlink_to(Path("..") / ".." / "blobs" / path.name)
    nextn.restore(links, base, out=tmp_path / "linked")
    monkeypatch.setattr(os, "link", refuse("no links here"))
    nextn.restore(links, base, out=tmp_path / "copied")
    for out in (tmp_path / "linked", tmp_path / "copied"):
        assert not any(path.is_symlink() for path in out.iterdir())
        assert absent(take(out)) == []
    before = snapshot(target)
    monkeypatch.undo()
    nextn.restore(links, base)
    assert snapshot(target) == before
    assert absent(take(links)) == []


def refuse(reason):
    def call(*_, **__):
        raise OSError(28, reason)

    return call


class Stop(BaseException):
    """Ctrl-C or a kill."""


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [OSError, Stop])
@pytest.mark.parametrize(("shards", "change"), [(1, None), (3, None), (3, "mangled")])
def test_interrupted(shards, change, kind, tmp_path, monkeypatch):
    """Whichever step of the last moves fails, the target is as it was, and no file of ours is left."""
    base = publish(tmp_path / "base", "glm4_moe")
    broken = fused if change else without("glm4_moe")
    whole = publish(
        tmp_path / "whole", "glm4_moe", seed=1, shards=shards, change=broken, config={"num_nextn_predict_layers": 0}
    )
    steps = failing_steps(monkeypatch, kind)
    for step in range(1, 40):
        target = tmp_path / f"target{step}"
        shutil.copytree(whole, target)
        steps.start(step)
        try:
            nextn.restore(target, base)
        except (CheckpointError, Stop):
            assert snapshot(target) == snapshot(whole), f"step {step}"
        else:
            assert absent(take(target)) == []
            break
    assert step >= 5


class failing_steps:
    """Rename, link and fsync, of which the one with the given number fails, once."""

    def __init__(self, monkeypatch, kind):
        self.left = 0
        for owner, name in ((Path, "replace"), (os, "link"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name), kind))

    def start(self, step):
        self.left = step

    def counted(self, call, kind):
        def counted(*args, **options):
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "No space left on device") if kind is OSError else kind
            return call(*args, **options)

        return counted


@pytest.mark.parametrize("shards", [1, 3])
def test_killed(shards, tmp_path, monkeypatch):
    """Even without the chance to tidy up, every state on the way can be loaded: the trunk whole, the head or none."""
    base = publish(tmp_path / "base", "glm4_moe", copies=False)
    target = lost(tmp_path / "target", "glm4_moe", shards=shards, config={"num_nextn_predict_layers": 0})
    trunk, head, states = bytes_of(target), bytes_of(base, own_names("glm4_moe")), []

    def capture_hidden(call):
        def capture_hidden(*args, **options):
            out = call(*args, **options)
            states.append((bytes_of(target), load_json(target / CONFIG)["num_nextn_predict_layers"]))
            return out

        return capture_hidden

    monkeypatch.setattr(Path, "replace", capture_hidden(Path.replace))
    monkeypatch.setattr(os, "link", capture_hidden(os.link))
    nextn.restore(target, base)
    assert len(states) >= 4
    for found, count in states:
        assert found in (trunk, trunk | head)
        assert count == 1 or found == trunk  # a head that the config does not promise breaks the loading of the trunk


def test_unwritable(tmp_path, monkeypatch):
    """A folder that may not be written to is one clear error."""
    base, target = publish(tmp_path / "base", "glm4_moe"), lost(tmp_path / "target", "glm4_moe")
    monkeypatch.setattr(Path, "mkdir", refuse("Permission denied"))
    with pytest.raises(CheckpointError, match=r"cannot be written.*unchanged"):
        nextn.restore(target, base)


@pytest.mark.more
def test_copies_of_the_trunk(tmp_path):
    """DeepSeek-V4 in vLLM: copies come from the target's own trunk, as the base's are of another."""
    base = publish(tmp_path / "base", "deepseek_v4")
    target = lost(tmp_path / "target", "deepseek_v4")
    plan = nextn.restore(target, base)
    assert any("vllm needs them" in note for note in plan.notes)
    head = head_fingerprint(take(target))
    found = take(target)
    assert set(found.copies) == {"0.embedding.weight", "0.output.weight"}
    assert found.checkpoint.problems == ()
    assert audit(found.checkpoint).clean
    data = found.checkpoint.read_bytes
    assert data(found.copies["0.output.weight"]) == data("head.weight")
    assert data(found.copies["0.embedding.weight"]) == data("embed.weight")
    assert head_fingerprint(found) == head
    before = snapshot(target)
    assert "the target stores them" in nextn.restore(target, aliases="vllm").notes[0]
    assert "uses the trunk's" in nextn.restore(target, aliases="sglang").notes[0]
    assert snapshot(target) == before


def test_copy_that_differs(tmp_path):
    """A copy that was not fine-tuned with the trunk is what one engine embeds with: it becomes the trunk's again."""

    def stale(table):
        old = table["model.layers.2.embed_tokens.weight"]
        table["model.layers.2.embed_tokens.weight"] = RawTensor(old.dtype, old.shape, bytes(len(old.data)))

    target = publish(tmp_path, "glm4_moe", change=stale, shards=2)
    assert "copy-differs" in {each.rule for each in audit(Checkpoint.open(target)).findings}
    nextn.restore(target, aliases="llamacpp")
    assert bytes_of(target) == bytes_of(publish(tmp_path / "sound", "glm4_moe"))
    assert take(target).checkpoint.problems == ()


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "weight.absmax"])
def test_copy_in_codes(scale, tmp_path):
    """A quantizer that takes the copy for another matrix: what audit advises leaves neither codes nor scales."""
    copy = "model.layers.2.shared_head.head"

    def quantized(table):
        shape = table[f"{copy}.weight"].shape
        table[f"{copy}.weight"] = RawTensor("F8_E4M3", shape, bytes([56]) * (shape[0] * shape[1]))
        table[f"{copy}.{scale}"] = RawTensor("F32", (shape[0], 1), bytes(4 * shape[0]))

    base, fresh = publish(tmp_path / "base", "glm4_moe"), tmp_path / "fresh"
    whole = {"base": base if scale == "weight.absmax" else fresh, "force": True}  # absmax alone cannot be read
    for extra in ({"base": base, "force": True}, whole, {"aliases": "llamacpp"}):
        target = publish(fresh, "glm4_moe", change=quantized, shards=2)
        (found,) = (each for each in audit(Checkpoint.open(target)).findings if each.rule == "copy-differs")
        assert (found.place, f"--from {target} --force" in found.fix) == (copy, True)
        nextn.restore(target, **extra)
        left = [name for name in take(target).checkpoint.tensors if name.startswith(copy)]
        assert left == ([] if "base" in extra else [f"{copy}.weight"])
        assert "copy-differs" not in {each.rule for each in audit(Checkpoint.open(target)).findings}
        shutil.rmtree(target)


def test_copy_in_the_codes_of_the_trunk(tmp_path):
    """A trunk's lm_head in codes, and a copy of it: each scale is compared with the trunk's, and written with it."""
    copy = "model.layers.2.shared_head.head"

    def quantized(table, factor=1, scale="weight_scale_inv"):
        for name, value, last in (("lm_head", 1, "weight_scale_inv"), (copy, factor, scale)):
            rows, columns = table["lm_head.weight"].shape
            table[f"{name}.weight"] = RawTensor("F8_E4M3", (rows, columns), bytes([56]) * (rows * columns))
            data = np.full((rows, 1), value, np.float32).tobytes()
            table[f"{name}.{last}"] = RawTensor("F32", (rows, 1), data)

    same = publish(tmp_path / "same", "glm4_moe", change=quantized)
    for number, other in enumerate(({}, {"factor": 2}, {"scale": "weight_scale"})):
        target = publish(tmp_path / str(number), "glm4_moe", change=partial(quantized, **other))
        nextn.restore(target, aliases="llamacpp")
        assert bytes_of(target) == bytes_of(same)


def test_fix_names_no_model_with_the_same_fault(tmp_path):
    """A head converted from a model whose projection is quantized: to restore it from there changes nothing."""

    def quantized(table):
        table["model.layers.2.eh_proj.weight_scale"] = RawTensor("F32", (32, 1), bytes(128))
        shape = table["model.layers.2.eh_proj.weight"].shape
        table["model.layers.2.eh_proj.weight"] = RawTensor("F8_E4M3", shape, bytes([56]) * (shape[0] * shape[1]))

    source = publish(tmp_path / "source", "glm4_moe", change=quantized)
    nextn.convert(source, tmp_path / "out", form="side-file")
    (found,) = (each for each in audit(tmp_path / "out").findings if each.place == "model.layers.2.eh_proj")
    assert found.fix.endswith("--from BASE --force")


@loop("name", [row.name for row in rows() if row.engines["vllm"].unset])
def test_copies_with_the_head(name, tmp_path):
    """Both at once, wherever a family has a place for copies."""
    base = publish(tmp_path / "base", name, copies=False)
    target = lost(tmp_path / "target", name)
    nextn.restore(target, base, aliases="vllm")
    unset = [role for role in by_name(name).engines["vllm"].unset if role in by_name(name).copies]
    assert {take(target).role(each) for each in take(target).copies} == set(unset)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
@pytest.mark.parametrize("form", SECTIONS)
def test_quantized_target(form, name, tmp_path):
    """A bf16 head that the config covers is read as packed numbers, or never loaded."""
    base = publish(tmp_path / "base", name)
    target = lost(tmp_path / "target", name, config={"quantization_config": SECTIONS[form]}, change=packed(name))
    nextn.restore(target, base)
    quantization = QuantConfig.of(Checkpoint.open(target))
    head = bytes_of(target, own_names(name))
    linears = [each.removesuffix(".weight") for each, (_, shape, _) in head.items() if len(shape) > 1]
    assert [quantization.covers(each) for each in linears] == [False] * len(linears)
    assert head == bytes_of(base, own_names(name))


def test_unknown_quantization(tmp_path):
    """A section whose words are not known is kept as it is, and that is said; a refusal would be a dead end."""
    base = publish(tmp_path / "base", "glm4_moe")
    target = lost(tmp_path / "target", "glm4_moe", config={"quantization_config": {"quant_method": "exotic"}})
    section = Checkpoint.open(target).config["quantization_config"]
    assert any(note.startswith("exotic: ") for note in nextn.restore(target, base).notes)
    assert Checkpoint.open(target).config["quantization_config"] == section


def packed(name):
    """Drop the head, and store the trunk's projections in fp8 with one scale each."""

    def change(table):
        without(name)(table)
        for each in [each for each in table if each.endswith("_proj.weight")]:
            shape = table[each].shape
            table[each] = RawTensor("F8_E4M3", shape, bytes(shape[0] * shape[1]))
            table[each + "_scale"] = RawTensor("F32", (), bytes(4))

    return change


def test_a_head_elsewhere_is_replaced_with_its_copies(tmp_path):
    """Those of embedding and output, too, which would be counted as one more MTP layer."""

    def renamed(table):
        without_layer_1(table)
        for name in [each for each in table if each.startswith("model.layers.2.")]:
            table[name.replace("layers.2.", "layers.1.")] = table.pop(name)

    config = {"num_hidden_layers": 1}
    base = publish(tmp_path / "base", "glm4_moe", config=config, change=renamed)
    target = publish(tmp_path / "target", "glm4_moe", config=config, change=without_layer_1)
    assert take(target).modules == (1,)
    nextn.restore(target, base)
    assert (take(target).modules, take(target).unrecognized) == ((0,), ())


def without_layer_1(table):
    for name in [each for each in table if each.startswith("model.layers.1.")]:
        del table[name]


def test_lists_get_the_entries_of_the_head(tmp_path):
    """Exports cut the lists of layers to the trunk's, and engines look the head's entries up by number."""
    lists = {"layer_types": ["full_attention", *["sliding_attention"] * 4], "rope_theta": [5e6, 1e4, 1e4, 1e4, 1e4]}
    base = publish(tmp_path / "base", "step3p5", modules=3, config=lists)
    own = {"layer_types": lists["layer_types"][:2], "rope_theta": [1e6, 1e4], "eos_token_id": [2, 3, 4]}
    target = lost(tmp_path / "target", "step3p5", modules=3, config=own)
    nextn.restore(target, base)
    config = load_json(target / CONFIG)
    assert {key: config[key] for key in own} == own | {
        "layer_types": lists["layer_types"], "rope_theta": [1e6, 1e4, 1e4, 1e4, 1e4]
    }  # fmt: skip
    write_json(target / CONFIG, {"text_config": {**config, **own}, "model_type": "step3p7"})
    (found,) = (each for each in audit(Checkpoint.open(target)).findings if each.severity != "note")
    assert (found.rule, found.place) == ("config-contradicts", "config.json: layer_types")
    nextn.restore(target, base, force=True)
    assert load_json(target / CONFIG)["text_config"]["layer_types"] == lists["layer_types"]
    assert audit(Checkpoint.open(target)).clean


def test_a_record_beside_names_of_other_programs(tmp_path):
    """What is recorded is of the names that are stored: their kind is the one finding."""
    base = publish(tmp_path / "base", "glm4_moe_lite")
    target = publish(tmp_path / "target", "glm4_moe_lite", change=partial(as_mlx, layers=(0, 1)))
    nextn.restore(target, base, force=True)
    found = [each.rule for each in audit(Checkpoint.open(target)).findings if each.severity != "note"]
    assert found == ["names-foreign"]


def test_fp8_head_elsewhere(tmp_path):
    """Bytes of one scheme under the config of another would be read as garbage."""
    base = publish(tmp_path / "base", "glm4_moe", fp8=True)
    section = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]}}, "ignore": []}
    target = lost(tmp_path / "a", "glm4_moe", config={"quantization_config": section}, change=packed("glm4_moe"))
    with pytest.raises(CheckpointError, match="the target stores no fp8-block"):
        nextn.restore(target, base)
    said = load_json(base / CONFIG)["quantization_config"]
    other = lost(
        tmp_path / "b", "glm4_moe", fp8=True, config={"quantization_config": said | {"weight_block_size": [64, 64]}}
    )
    with pytest.raises(CheckpointError, match="weight_block_size"):
        nextn.restore(other, base)


def test_provenance_goes_on(tmp_path):
    """A head that was restored before remembers the trunk that it was trained with."""
    base, middle = publish(tmp_path / "base", "glm4_moe"), lost(tmp_path / "middle", "glm4_moe")
    nextn.restore(middle, base)
    last = lost(tmp_path / "last", "glm4_moe", seed=2)
    nextn.restore(last, middle)
    record = Provenance.read(Checkpoint.open(last))
    assert record is not None
    assert record.trained_with == trunk_fingerprint(take(base))
    assert record.beside == trunk_fingerprint(take(last))


def test_a_list_is_described_by_its_changes():
    """Two long lists side by side, both cut short, in which nobody finds the difference."""
    before, after = {"ignore": ["lm_head", "a"], "bits": 4}, {"ignore": ["a", "b", "c", "d", "e"], "bits": 4}
    reported = _differences({"quantization_config": before}, {"quantization_config": after})
    assert list(reported) == ["quantization_config.ignore: - lm_head; + b, c, d and 1 more"]
    assert list(_differences({"bits": [1, 2]}, {"bits": [2, 1]})) == ["bits: [1, 2] -> [2, 1]"]


@pytest.mark.more
@pytest.mark.parametrize("size", others_slow([2, 5], 2))
def test_at_once(size, tmp_path):
    """One of several processes restores; the others write nothing and say that another one is at work."""
    base, whole = publish(tmp_path / "base", "glm4_moe", copies=False), {}
    head = bytes_of(base, own_names("glm4_moe"))
    for shards in (1, 3):
        whole[shards] = lost(tmp_path / f"whole{shards}", "glm4_moe", shards=shards)
    for number in range(ROUNDS):
        lost_one = whole[(1, 3)[number % 2]]
        target = tmp_path / "target"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(lost_one, target)
        ends = race([partial(nextn.restore, target, base)] * size, tmp_path / "answers")
        assert ends.count("") == 1
        assert all(re.search("nother process is|already has a complete head", end) for end in ends if end), ends
        assert bytes_of(target) == bytes_of(lost_one) | head
        assert not list(target.glob(".*"))


def test_only_its_own_files_are_taken_back(tmp_path, monkeypatch):
    """A file that another program wrote in the meantime stays, whichever step it makes fail."""
    base, target = publish(tmp_path / "base", "glm4_moe"), lost(tmp_path / "target", "glm4_moe")
    before, link = snapshot(target), os.link
    others = [target / name for name in ("model-00001-of-00002.safetensors", "model-mtp.safetensors")]

    def late(*args, **options):
        for path in others:
            path.write_text("another program's")
        return refuse("File exists")() if options.pop("fail", False) else link(*args, **options)

    monkeypatch.setattr(os, "link", partial(late, fail=True))
    with pytest.raises(CheckpointError, match="cannot be written"):
        nextn.restore(target, base)
    assert snapshot(target) == before | {path.name: b"another program's" for path in others}


def test_target_that_changed_after_the_plan(tmp_path, monkeypatch):
    """A base that changes while it is read, or a target that another program changes, is not mixed with the plan."""
    for changed in ("base", "target"):
        folders = tmp_path / changed
        base, target = publish(folders / "base", "glm4_moe"), lost(folders / "target", "glm4_moe")
        write = execute.write_safetensors

        def late(*args, into=folders / changed, write=write, **options):
            write(*args, **options)
            for path in into.glob("*.safetensors"):
                path.write_bytes(path.read_bytes())

        monkeypatch.setattr(execute, "write_safetensors", late)
        before = snapshot(target)
        with pytest.raises(CheckpointError, match=f"files changed after they were read: {folders / changed}"):
            nextn.restore(target, base)
        assert snapshot(target) == before
        monkeypatch.undo()


@pytest.mark.more
def test_killed_for_good(tmp_path, monkeypatch):
    """After a kill at any of the last moves, the next run removes what is left and puts the head back."""
    base, whole = publish(tmp_path / "base", "glm4_moe", copies=False), lost(tmp_path / "whole", "glm4_moe", shards=3)
    both = bytes_of(whole) | bytes_of(base, own_names("glm4_moe"))

    def killed_at(step):
        steps = failing_steps(pytest.MonkeyPatch(), Stop)
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: os._exit(0))  # the first thing that tidying up does
        monkeypatch.setattr(execute, "_undo", lambda *_: os._exit(0))
        steps.start(step)
        nextn.restore(target, base)

    for step in range(1, 12):
        target = tmp_path / f"target{step}"
        shutil.copytree(whole, target)
        race([partial(killed_at, step)], tmp_path / "answers")
        assert (target / ".nextn-stage").exists()
        assert bytes_of(target) in (bytes_of(whole), both)
        nextn.restore(target, base, force=True)
        assert bytes_of(target) == both
        assert not list(target.glob(".*"))


def test_no_room(tmp_path, monkeypatch):
    """Refused before anything is written; weights that cannot be linked into a new folder count."""
    base, target = publish(tmp_path / "base", "glm4_moe"), lost(tmp_path / "target", "glm4_moe")
    size, before = nextn.restore(target, base, dry_run=True).num_bytes, snapshot(target)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 7))
    with pytest.raises(CheckpointError, match=f"{size:,} bytes .* {size - 7:,} left, 7 too few"):
        nextn.restore(target, base)
    monkeypatch.setattr(execute, "_can_link", lambda *_: False)
    with pytest.raises(CheckpointError, match="too few") as found:
        nextn.restore(target, base, out=tmp_path / "out")
    copied = sum((target / name).stat().st_size for name in ("model.safetensors", "config.json"))
    assert f"{size + copied:,} bytes" in str(found.value)
    assert snapshot(target) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own", ["own", "first"])
def test_a_file_alone_keeps_what_its_repeated_depths_read(own, tmp_path):
    """The setting is in the file's header, as its config.json may stay behind; the target's does not count."""
    source = publish(tmp_path / "source", "glm4_moe", config={"mtp_repeated_kv": own})
    nextn.extract(source, tmp_path / "head.safetensors")
    (tmp_path / "config.json").unlink()
    for index, before in enumerate(({}, {"mtp_repeated_kv": "first"})):
        target = publish(tmp_path / str(index), "glm4_moe", config=before, change=without("glm4_moe"))
        nextn.restore(target, tmp_path / "head.safetensors")
        assert take(target).family.repeated_kv == own
    trunk = publish(tmp_path / "trunk", "glm4_moe", change=without("glm4_moe"))
    assert open_head(tmp_path / "head.safetensors", take(trunk)).checkpoint.config["mtp_repeated_kv"] == own
