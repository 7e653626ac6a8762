"""What tools do to a checkpoint, at random: operations on the files of a published layout, and what audit must say.

An operation changes a folder, and returns the rules of which audit must name one; none for an operation that leaves the
checkpoint sound. Some undo themselves: `undo` of an operation's result brings the bytes back.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from artifacts import LAYERS, bf16, inventory_of

import nextn
from nextn.checkpoint.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, write_index
from nextn.checkpoint.expert_forms import expert_path
from nextn.checkpoint.provenance import as_float32
from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors
from nextn.edit.reindex import reindex

Table = dict[str, RawTensor]
Rules = frozenset[str]
SOUND: Rules = frozenset()


def read(folder: Path) -> Table:
    """All tensors, in memory."""
    checkpoint = Checkpoint.open(folder)
    return {name: RawTensor(info.dtype, info.shape, checkpoint.read_bytes(name))
            for name, info in checkpoint.tensors.items()}  # fmt: skip


def store(folder: Path, table: Table, shards: int = 1) -> None:
    """Write the tensors anew, in one file or in several with an index."""
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
    if shards == 1:
        write_safetensors(folder / SINGLE, table, metadata={"format": "pt"})
        return
    names = sorted(table)
    index = {}
    for number in range(shards):
        own = names[number::shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / file, {name: table[name] for name in own}, metadata={"format": "pt"})
        index |= dict.fromkeys(own, file)
    write_index(folder, index, sum(len(value.data) for value in table.values()))  # type: ignore[arg-type]


def head_names(folder: Path) -> list[str]:
    inventory = inventory_of(folder)
    return sorted(inventory.spellings(inventory.own))


def reshard(folder: Path, rng: random.Random) -> Rules:
    store(folder, read(folder), rng.choice([1, 2, 3, 5]))
    return SOUND


def cast(folder: Path, rng: random.Random) -> Rules:
    """Routers in fp32, as transformers saves them."""
    table = read(folder)
    for name in [each for each in table if each.endswith("gate.weight") and table[each].dtype == "BF16"]:
        value = table[name]
        assert isinstance(value.data, bytes)
        table[name] = RawTensor("F32", value.shape, as_float32(value.data, "BF16"))
    store(folder, table)
    return SOUND


def change_form(folder: Path, rng: random.Random) -> Rules:
    """Experts of the head in another form, which some engines may not read."""
    if not any(expert_path(each) for each in inventory_of(folder).own):
        return SOUND
    usual = inventory_of(folder).family.experts
    form = rng.choice([form for form in ("split", "fused") if form != usual] or ["split"])
    out = folder.with_name(f"{folder.name}-{form}")
    nextn.convert(folder, out, experts=form)  # type: ignore[arg-type]
    store(folder, read(out))
    return frozenset({"experts-form", ""})


def drop_index(folder: Path, rng: random.Random) -> Rules:
    store(folder, read(folder), 2)
    (folder / INDEX).unlink()
    return frozenset({"index"})


def stale_index(folder: Path, rng: random.Random) -> Rules:
    table = read(folder)
    store(folder, table, 2)
    write_index(
        folder, {name: f"model-{1 + place % 4:05d}-of-00004.safetensors" for place, name in enumerate(table)}, 0
    )
    return frozenset({"index"})


def short_index(folder: Path, rng: random.Random) -> Rules:
    table = read(folder)
    store(folder, table, 3)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if "00002" not in file}
    write_json(folder / INDEX, index)
    return frozenset({"index", "side-file"})


def strip(folder: Path, rng: random.Random) -> Rules:
    gone = set(head_names(folder)) | set(inventory_of(folder).copies.values())
    store(folder, {name: value for name, value in read(folder).items() if name not in gone})
    return frozenset({"head-absent"})


def lose_one(folder: Path, rng: random.Random) -> Rules:
    """One matrix of the head's block."""
    inventory = inventory_of(folder)
    own = [each for each in inventory.own if ".block." in each]
    block = [inventory.stored[each] for each in own if len(inventory.info(each).shape) > 1]
    gone = rng.choice(block)
    store(folder, {name: value for name, value in read(folder).items() if name != gone})
    return frozenset({"head-partial"})


def unmerged(folder: Path, rng: random.Random) -> Rules:
    table = read(folder)
    name = rng.choice([each for each in head_names(folder) if each.endswith(".weight") and len(table[each].shape) == 2])
    stem = name.removesuffix(".weight")
    table[f"{stem}.base_layer.weight"] = table.pop(name)
    table[f"{stem}.lora_A.default.weight"] = RawTensor("BF16", (2, 2), bf16(np.ones((2, 2), "f4")))
    store(folder, table)
    return frozenset({"names-foreign"})


def wrapped(folder: Path, rng: random.Random) -> Rules:
    prefix = rng.choice(["_orig_mod.", "module.", "base_model.model."])
    store(folder, {prefix + name: value for name, value in read(folder).items()})
    return frozenset({"names-foreign"})


def foreign_tensor(folder: Path, rng: random.Random) -> Rules:
    """A name that no layer has, inside the head's block."""
    table, inventory = read(folder), inventory_of(folder)
    stem = inventory.family.names["block"].format(module=0, layer=LAYERS)
    table[f"{stem}.mixture_of_nothing.weight"] = RawTensor("BF16", (4,), bf16(np.ones(4, "f4")))
    store(folder, table)
    return frozenset({"names-unknown"})


def foreign_file(folder: Path, rng: random.Random) -> Rules:
    """An adapter beside the model's files, which loaders without an index open, too."""
    weight = RawTensor("BF16", (2, 2), bf16(np.ones((2, 2), "f4")))
    write_safetensors(folder / "adapter_model.safetensors", {"base_model.model.layers.0.q_proj.lora_A.weight": weight})
    return frozenset({"index", ""})


def untie(folder: Path, rng: random.Random) -> Rules:
    """A config that ties what the file stores apart."""
    config = json.loads((folder / CONFIG).read_text())
    stored = inventory_of(folder).shared
    part = config.get("text_config", config)
    part["tie_word_embeddings"] = True
    config["tie_word_embeddings"] = True
    write_json(folder / CONFIG, config)
    return frozenset({"tied-differs"}) if {"embedding", "output"} <= stored.keys() else SOUND


def quantize_part(folder: Path, rng: random.Random) -> Rules:
    """One matrix of the head in fp8, and no scale."""
    table, inventory = read(folder), inventory_of(folder)
    own = [each for each in inventory.own if ".block." in each and each.endswith("_proj.weight")]
    block = [inventory.stored[each] for each in own if inventory.info(each).dtype == "BF16"]
    if not block:
        return SOUND
    name = rng.choice(sorted(block))
    size = int(np.prod(table[name].shape))
    table[name] = RawTensor("F8_E4M3", table[name].shape, bytes(np.random.default_rng(0).integers(1, 60, size, "u1")))
    store(folder, table)
    return frozenset({"scale-missing"})


OPERATIONS: tuple[Callable[[Path, random.Random], Rules], ...] = (
    reshard, cast, change_form, drop_index, stale_index, short_index, strip, lose_one, unmerged, wrapped,
    foreign_tensor, foreign_file, untie, quantize_part,
)  # fmt: skip
# After these nothing else is done: they leave names or files on which others would do something else than they say.
LAST = (drop_index, stale_index, short_index, strip, lose_one, unmerged, wrapped, foreign_tensor, foreign_file, untie,
        quantize_part)  # fmt: skip


def run(folder: Path, seed: int) -> tuple[list[str], list[Rules]]:
    """Apply one to three operations; return their names, and the rules that audit must name."""
    rng, names, expected = random.Random(seed), [], []
    for _ in range(rng.randint(1, 3)):
        operation = rng.choice(OPERATIONS)
        names.append(operation.__name__)
        expected.append(operation(folder, rng))
        if operation in LAST:
            break
    return names, expected


def mended(folder: Path) -> bool:
    """Whether `reindex` mends the folder."""
    try:
        reindex(folder)
    except nextn.errors.ConfigError:
        return False
    return True
