"""Heads as libraries that train them write them, read under the names and with the config of the head's family.

speculators 0.9 (convert/mtp/converter.py, cli/stitch.py) stores a head of Qwen3-Next or Qwen3.5 under names of its own,
with the model's config inside its own; Unsloth 2026.10 (unsloth_zoo, speculative/stitch.py) stores one beside an
adapter, without the prefix of its names. Neither changes values.
"""

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from nextn.checkpoint.remote import ByteSource, LocalFile
from nextn.errors import CheckpointError
from nextn.text_format import some

SIDE_HEAD = "mtp_head.safetensors"  # Unsloth's file
_SPECULATORS = {
    "input_proj": "fc", "final_layernorm": "norm", "hidden_layernorm": "pre_fc_norm_hidden",
    "token_layernorm": "pre_fc_norm_embedding",
}  # fmt: skip
_SPECULATORS_NAME = re.compile(r"mtp_layers\.0\.((\w+)\..+)")
_OF_VERIFIER = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"}  # copies of the trunk's
_WITHOUT_PREFIX = re.compile(r"(?:fc|layers|norm|pre_fc_norm_\w+)\.")


class RenamedHead(NamedTuple):
    """The config of the model that a head is of, and published name -> name in the file, of its tensors."""

    config: dict[str, object]
    names: dict[str, str]


def renamed_head(config: dict[str, object], names: Iterable[str], files: Collection[str]) -> RenamedHead | None:
    """Return how to read a checkpoint that is a head in one of these layouts; None for any other.

    names, files: Those that are stored, and those of the index. Raises CheckpointError for more than one MTP layer in
    speculators' layout, which has one, and for two tensors of one published name.
    """
    model = config.get("transformer_layer_config")
    if config.get("speculators_model_type") == "mtp" and isinstance(model, Mapping):
        if not re.match(r"qwen3_(next|5)", str(model.get("model_type"))):
            return None
        own = [name for name in names if name not in _OF_VERIFIER]
        _refuse_layers(config.get("num_nextn_predict_layers", 1), own)
        return RenamedHead({**model}, _by_published(_of_speculators, own))
    if {*files} == {SIDE_HEAD}:
        return RenamedHead(config, _by_published(_of_unsloth, names))
    return None


def side_head(source: ByteSource, repo: str, ref: str | None = None) -> tuple[str, str]:
    """Return Unsloth's file as a word of a command, and what comes before that: it is downloaded, if it is on the hub.

    No hub id leads to one file of a repository.
    """
    if isinstance(source, LocalFile):
        return shlex.quote(str(source)), ""
    pinned = f" --revision {shlex.quote(ref)}" if ref else ""
    return f"DIR/{SIDE_HEAD}", f"`hf download {repo} {SIDE_HEAD}{pinned} --local-dir DIR`, then "


def _refuse_layers(declared: object, names: Iterable[str]) -> None:
    """Raise for what would be left of a head of several layers."""
    others = [name for name in names if re.match(r"mtp_layers\.(?!0\.)", name)]
    if others or declared != 1:
        found = f"it has {some(others)}" if others else f"num_nextn_predict_layers is {json.dumps(declared):.40}"
        raise CheckpointError(f"nextn reads a head of speculators with one MTP layer, mtp_layers.0; {found}.")


def _by_published(rename: Callable[[str], str], names: Iterable[str]) -> dict[str, str]:
    """Return published name -> stored name."""
    found: dict[str, str] = {}
    for name in names:
        if (other := found.setdefault(rename(name), name)) != name:
            raise CheckpointError(f"{other} and {name} are both {rename(name)} in a model: remove one of them.")
    return found


def _of_speculators(name: str) -> str:
    """Return the published name; that of a tensor which speculators does not write stays, for an audit to report."""
    if (match := _SPECULATORS_NAME.fullmatch(name)) is None:
        return name
    path, part = match[1], match[2]
    own = _SPECULATORS.get(part)
    return f"mtp.layers.0.{path}" if own is None else f"mtp.{own}{path.removeprefix(part)}"


def _of_unsloth(name: str) -> str:
    return f"mtp.{name}" if _WITHOUT_PREFIX.match(name) else name  # other families' names are complete
