"""Heads as libraries that train them write them, read under the names and with the config of the head's family.

speculators 0.9 (convert/mtp/converter.py, cli/stitch.py) stores a head of Qwen3-Next or Qwen3.5 under names of its own,
with the model's config inside its own; Unsloth 2026.10 (unsloth_zoo, speculative/stitch.py) stores one beside an
adapter, without the prefix of its names. Neither changes values.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SIDE_HEAD = "mtp_head.safetensors"  # Unsloth's file
_SPECULATORS = {
    "input_proj": "fc", "final_layernorm": "norm", "hidden_layernorm": "pre_fc_norm_hidden",
    "token_layernorm": "pre_fc_norm_embedding",
}  # fmt: skip
_SPECULATORS_NAME = re.compile(r"mtp_layers\.0\.((\w+)\..+)")
_WITHOUT_PREFIX = re.compile(r"(?:fc|layers|norm|pre_fc_norm_\w+)\.")


class RenamedHead(NamedTuple):
    """The config of the model that a head is of, and published name -> name in the file, of the head's tensors."""

    config: dict[str, object]
    names: dict[str, str]


def renamed_head(config: dict[str, object], names: Iterable[str], files: Sequence[str]) -> RenamedHead | None:
    """Return how to read a checkpoint that is a head in one of these layouts; None for any other."""
    model = config.get("transformer_layer_config")
    if config.get("speculators_model_type") == "mtp" and isinstance(model, Mapping):
        if not re.match(r"qwen3_(next|5)", str(model.get("model_type"))):
            return None
        matches = {name: match for name in names if (match := _SPECULATORS_NAME.fullmatch(name))}
        return RenamedHead({**model}, {_of_speculators(match): name for name, match in matches.items()})
    if [*files] == [SIDE_HEAD]:  # other families' names are complete
        published = {f"mtp.{name}" if _WITHOUT_PREFIX.match(name) else name: name for name in names}
        return RenamedHead(config, published)
    return None


def _of_speculators(match: re.Match[str]) -> str:
    path, part = match[1], match[2]
    own = _SPECULATORS.get(part)
    return f"mtp.layers.0.{path}" if own is None else f"mtp.{own}{path.removeprefix(part)}"
