"""Inventory: the config's promise against the tensors, by module and role."""

import pytest
from artifacts import LAYERS, LAYOUTS, publish
from quick import loop

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.errors import CheckpointError, FamilyError


def take(folder) -> Inventory:
    return Inventory.of(Checkpoint.open(folder))


@loop("name", LAYOUTS)
def test_every_tensor_has_its_place(name, tmp_path):
    """A head tensor taken for the trunk's, or one of the trunk's for the head's."""
    found = take(publish(tmp_path, name))
    assert (found.declared, found.modules, found.unrecognized, found.duplicates) == (1, (0,), (), {})
    assert set(found.family.names) - set(found.family.read_only_copies) <= {found.role(each) for each in found.stored}
    assert set(found.shared) == ({"embedding"} if LAYOUTS[name].tied else {"embedding", "output"})
    assert sorted(found.layers) == list(range(LAYERS))
    others = len(LAYOUTS[name].extra) + bool(LAYOUTS[name].norm)
    count = len(found.stored) + len(found.shared) + sum(map(len, found.layers.values())) + others
    assert count == len(found.checkpoint.tensors)


def test_unrecognized_tensors(tmp_path):
    """A head that the family does not know must not pass for a trunk without one."""

    def rename(table):
        for name in [each for each in table if each.startswith("mtp.")]:
            table["nextn." + name.removeprefix("mtp.")] = table.pop(name)

    found = take(publish(tmp_path, "qwen3_5", change=rename))
    assert not found.stored
    assert "nextn.fc.weight" in found.unrecognized


def test_aliases_and_spellings(tmp_path):
    """A tensor under two spellings is told, and the published one counts."""

    def double(table):
        table["model.layers.2.shared_head.norm.weight"] = table["model.layers.2.transformer.shared_head.norm.weight"]

    found = take(publish(tmp_path, "step3p5", change=double))
    assert len(found.duplicates["0.final_norm.weight"]) == 2
    assert found.stored["0.final_norm.weight"] == "model.layers.2.transformer.shared_head.norm.weight"


def test_wrapped_names(tmp_path):
    """Vision-language checkpoints put the same head behind a prefix; the vision tower's layers are not the trunk's."""

    def wrap(table):
        for name in [each for each in table if each.startswith("model.")]:
            table["model.language_model." + name.removeprefix("model.")] = table.pop(name)
        table["model.visual.layers.40.norm.weight"] = table["mtp.norm.weight"]

    found = take(publish(tmp_path, "qwen3_5", change=wrap))
    assert sorted(found.layers) == [0, 1]
    assert found.unrecognized == ()
    assert found.shared["embedding"] == "model.language_model.embed_tokens.weight"


def test_undecidable_checkpoints(tmp_path):
    """No layer count, or a type without a row: an error that says what is missing."""
    for count, found in ((None, "none"), (-3, "num_hidden_layers = -3"), (0, "num_hidden_layers = 0")):
        folder = publish(tmp_path / str(count), "glm4_moe", config={"num_hidden_layers": count})
        words = f"num_hidden_layers, an integer of 1 or more, is needed .* config.json has {found}"
        with pytest.raises(CheckpointError, match=words):
            take(folder)
    with pytest.raises(FamilyError, match="llama"):
        take(publish(tmp_path / "b", "glm4_moe", config={"model_type": "llama"}))
