"""A head in a checkpoint of its own: opening it beside a trunk, and whether it was trained on that trunk. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import trained_with, trunk_fingerprint
from nextn.checkpoint.snapshot import on_disk
from nextn.errors import CheckpointError, FamilyError
from nextn.families import Family, by_name, find, fitted, generic, lookup
from nextn.text_format import some

GENERIC = by_name("generic").name
_ALL = ("vllm", "sglang", "transformers", "llama.cpp")
# A Qwen2 layer's, which both engines create uninitialized, without checking that a file sets them.
_BIASES = tuple(f"0.block.self_attn.{name}_proj.bias" for name in "qkv")
# What a draft's Qwen2 layer is made of: vLLM reads it in the trunk's config, SGLang in the draft's.
LAYER_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
    "hidden_act", "max_position_embeddings", "rope_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class Misfit:
    """Why a separate head is wrong in these engines, or beside this trunk; fields as those of an audit's finding."""

    rule: str
    place: str
    found: str
    valid: str
    fix: str
    engines: tuple[str, ...] = _ALL


def open_head(
    source: str | Path,
    trunk: Inventory,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
) -> Inventory:
    """Return the inventory of a head's checkpoint, with local files, in the layout that it has beside this trunk.

    Args:
        source: A folder, a .safetensors file or a hub id. Without a config.json it is read as the trunk's own family.
        trunk: Of the trunk's checkpoint.
        revision: Of a hub id.
        cache_dir: Of a hub id.
        offline: Of a hub id: use the cache only.

    Raises:
        CheckpointError: It holds no head, or one for another number of trunk layers.
        FamilyError: It is the head of another family than the trunk.
    """
    checkpoint = Checkpoint.open(source, revision=revision, cache_dir=cache_dir, offline=offline)
    checkpoint = checkpoint if checkpoint.config else replace(checkpoint, config=trunk.checkpoint.config)
    head = Inventory.of(checkpoint, family=_family(checkpoint, trunk))
    if not head.own:
        raise CheckpointError(f"{checkpoint.path}: holds no head of family {head.family.name}; `nextn train` makes one")
    if head.num_layers != trunk.num_layers:
        raise CheckpointError(
            f"{checkpoint.path}: its head is for a trunk of {head.num_layers} layers, {trunk.checkpoint.path} has "
            f"{trunk.num_layers}; give the trunk that the head was trained on"
        )
    head = on_disk(head, revision=revision, cache_dir=cache_dir, offline=offline)
    return replace(head, declared=head.declared or len(head.modules))


def is_foreign(head: Inventory, trunk: Inventory) -> bool:
    """Whether the head's record names another trunk than this one."""
    return trained_with(head) not in ("", trunk_fingerprint(trunk))


def misfits(head: Inventory, trunk: Inventory | None) -> Iterator[Misfit]:
    """Yield what is wrong with a separate head, in itself and beside this trunk, if one is given."""
    is_draft = bool(head.family.layer_model)
    if is_draft and (missing := [head.published(name) for name in _BIASES if name not in head.stored]):
        yield Misfit(
            "draft-biases", missing[0],
            f"{some(missing)} {'are' if missing[1:] else 'is'} not stored, and engines leave them at random values.",
            "The biases of q_proj, k_proj and v_proj, which may be zero.",
            "Train it again, or add zeros under these names.", _ALL[:2],
        )  # fmt: skip
    if trunk is None:
        return
    path = trunk.checkpoint.path
    if is_foreign(head, trunk):
        yield Misfit(
            "draft-trunk", head.checkpoint.path, f"It was trained on another trunk than {path}.",
            "The trunk whose fingerprint the head records.", "Train a head on this trunk, from this one with --head.",
        )  # fmt: skip
    configs = head.checkpoint.config, trunk.checkpoint.config
    for name in LAYER_SIZES if is_draft else ():
        own, other = (lookup(config, name) for config in configs)
        if None not in (own, other) and own != other:
            yield Misfit(
                "draft-sizes", f"config.json: {name}", f"{name} is {own}, the trunk's is {other}.",
                "The trunk's, from which vLLM builds the draft's layer.", "Train a head on this trunk.", _ALL[:2],
            )  # fmt: skip
    if is_draft and lookup(trunk.checkpoint.config, "quantization_config") is not None:
        yield Misfit(
            "draft-quantized", f"{path}: quantization_config",
            "The trunk is quantized, and vLLM builds the draft's layer with the trunk's quantization.",
            "An unquantized trunk, or SGLang, which reads the draft's own config.",
            "Serve the unquantized trunk, or use SGLang.", _ALL[:1],
        )  # fmt: skip


def trunk_family(checkpoint: Checkpoint) -> Family:
    """Return the family of a trunk's checkpoint; for a model without one, the generic layout."""
    return find(checkpoint.config) or generic(checkpoint.config)


def _family(checkpoint: Checkpoint, trunk: Inventory) -> Family:
    family = find(checkpoint.config) or trunk.family
    if family.separate or family.name == GENERIC:
        return fitted(family, trunk.checkpoint.config)
    if family.name != trunk.family.name:
        raise FamilyError(
            f"{checkpoint.path}: a head of family {family.name}, {trunk.checkpoint.path} is of {trunk.family.name}; "
            "give a head that was trained on this trunk"
        )
    return family
