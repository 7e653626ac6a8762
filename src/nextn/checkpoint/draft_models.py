"""Draft models that are no MTP head: checkpoints of their own, and stages inside a model's checkpoint.

Recognized by architectures and fields of config.json and by tensor names. Read in vLLM 0.33.0 (model_executor/models/
registry.py, config/speculative.py, models/deepseek_v4/nvidia/dspark.py), SGLang 0.5.23 (models, arg_groups/
speculative_hook.py), llama.cpp (common/speculative.cpp, conversion/) and transformers 5.23; the names inside
DeepSeek-V4-Flash-0731 are those that vllm#41834 and mlx-vlm#2095 print.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from nextn.text_format import counted, joined, some

Config = Mapping[str, object]
_MAX_NAMES = 5000  # of a draft model of its own: larger ones say by their architecture what they are
_MAX_NAME = 200  # characters of a name from a file


@dataclass(frozen=True)
class DraftModel:
    """One kind of draft model, and the engines that run it: name -> how it is asked for."""

    name: str
    what: str
    architectures: str  # pattern of config.json's architectures of a checkpoint of its own
    engines: Mapping[str, str]
    fields: tuple[str, ...] = ()  # of config.json, of which any one marks a checkpoint of its own
    names: tuple[str, ...] = ()  # patterns, each of which one of the tensors of a checkpoint of its own has
    gguf: tuple[str, ...] = ()  # llama.cpp's architectures

    @property
    def run_by(self) -> str:
        """Who runs it, as a clause."""
        ways = [f"{engine} ({how})" if how else engine for engine, how in self.engines.items()]
        if not ways:
            return "None of vLLM, SGLang and llama.cpp runs it"
        return f"{joined(ways)} {'runs' if len(ways) == 1 else 'run'} it"

    @property
    def sentence(self) -> str:
        """What a checkpoint of its own is, and what to do."""
        return f"this is {self.what}; nextn does not train, measure or convert it. {self.run_by}, beside its trunk."


DSPARK = DraftModel(
    "DSpark", "a DSpark draft model, which drafts blocks and corrects them by a Markov head",
    r"DSpark",
    {"vLLM": "method dspark", "SGLang": "--speculative-algorithm DSPARK",
     "llama.cpp": "--spec-type draft-dspark, from a GGUF of the draft model"},
    names=(r"(?:model\.)?markov_head\.",),
)  # fmt: skip
MEDUSA = DraftModel(
    "Medusa", "a set of Medusa heads, which predict without each other's tokens", r"(?i:medusa)", {},
    fields=("medusa_num_heads",), names=(r"(?:model\.)?medusa_heads?\.|\d+\.0\.linear\.weight",),
)  # fmt: skip
DRAFT_MODELS: tuple[DraftModel, ...] = (
    DraftModel(
        "Gemma4Assistant", "a Gemma 4 assistant as llama.cpp stores it", r"(?!)",
        {"llama.cpp": "--spec-type draft-mtp"}, gguf=("gemma4-assistant", "gemma4_assistant", "gemma4_mtp"),
    ),
    DSPARK,
    DraftModel(
        "DFlash", "a DFlash draft model, which drafts blocks by diffusion",
        r"DFlash|MuseGlimmerAssistantModel|LiLiCorrDraftModel",
        {"vLLM": "method dflash", "SGLang": "--speculative-algorithm DFLASH", "llama.cpp": "--spec-type draft-dflash"},
        fields=("dflash_config",), names=(r"fc\.weight", r"hidden_norm\.weight"), gguf=("dflash",),
    ),
    DraftModel(
        "P-EAGLE", "a P-EAGLE draft model, an EAGLE-3 model that drafts all tokens at once", r"(?i:p[-_]?eagle)",
        {"vLLM": "method eagle3 with parallel_drafting"}, names=(r"(?:model\.)?mask_hidden",),
    ),
    DraftModel(
        "EAGLE-3", "an EAGLE draft model, which takes hidden states of one or several of the trunk's layers",
        r"^(?:Eagle3?(?!_|\d)(?!\w*ConditionalGeneration)|EAGLE)|Eagle3?$|Eagle3DraftModel|Eagle3Speculator",
        {"vLLM": "method eagle or eagle3", "SGLang": "--speculative-algorithm EAGLE or EAGLE3",
         "llama.cpp": "--spec-type draft-eagle3"},
        names=(r"(?:model\.)?midlayer\.",), gguf=("eagle3",),
    ),
    MEDUSA,
    DraftModel(
        "mlx-vlm", "an MTP head that mlx-vlm split off its model, with names and norm weights of its own; for other "
        "engines, take the head of that model", r"(?!)",
        {"mlx-vlm": "--draft-model"}, names=(r"(?:model\.)?(?:pre_fc_norm_hidden|hnorm)\.weight",),
    ),
    DraftModel(
        "speculators", "a draft model in the layout of the speculators library", r"(?!)", {"vLLM": ""},
        fields=("speculators_model_type", "speculators_config"),
    ),
)  # fmt: skip

# What only DSpark's stages have, and what only an MTP module has; both are stored as `mtp.<number>.`.
_STAGE = re.compile(r"(?P<root>(?:.{1,60}\.)?mtp\.\d{1,6})\.(?P<rest>.+)")
_DSPARK_PART = re.compile(r"(?:main_proj|main_norm|markov_head|confidence_head)\b")
_MTP_PART = re.compile(r"(?:enorm|hnorm|e_proj|h_proj|eh_proj|fc|pre_fc_norm_\w+)\b")
_ALONE = ((DSPARK, re.compile(r"(?:.{1,60}\.)?mtp_dspark\.")), (MEDUSA, re.compile(r"(?:model\.)?medusa_heads?\.")))


@dataclass(frozen=True)
class StoredDraftModel:
    """A draft model inside a model's checkpoint, or one that only config.json declares."""

    kind: DraftModel
    names: frozenset[str]  # its tensors
    counted: bool = False  # the config's number of modules may be that of its stages
    fields: str = ""  # of config.json, that declare it

    @property
    def found(self) -> str:
        """What it is and where, as a clause."""
        if not self.names:
            return f"config.json declares {self.kind.what}, of which no tensor is stored"
        return f"{counted(len(self.names), 'tensor')}, such as {some(sorted(self.names), 2)}, are {self.kind.what}"

    @property
    def has_heads_names(self) -> bool:
        """Whether it is stored as `mtp.<number>.`, where other models have MTP modules."""
        return any(map(_STAGE.fullmatch, self.names))

    @property
    def refusal(self) -> str:
        """Why there is no MTP head to work with."""
        return f"no MTP head: {self.found}; {self.kind.run_by}. nextn neither reads, trains nor replaces it."


def standalone(config: Config, names: Collection[str] = ()) -> DraftModel | None:
    """Return which draft model a checkpoint is of, by its config and tensor names; None for a model."""
    listed = config.get("architectures")
    classes = [str(each)[:_MAX_NAME] for each in listed[:8]] if isinstance(listed, list) else []
    few = names if len(names) <= _MAX_NAMES else ()
    for kind in DRAFT_MODELS:
        if any(re.search(kind.architectures, each) for each in classes) or any(map(config.__contains__, kind.fields)):
            return kind
        if kind.names and all(any(re.match(pattern, name) for name in few) for pattern in kind.names):
            return kind
    return None


def in_gguf(arch: str) -> DraftModel | None:
    """Return which draft model a GGUF file of llama.cpp's architecture `arch` is of."""
    return next((kind for kind in DRAFT_MODELS if arch in kind.gguf), None)


def stored(names: Iterable[str], config: Config) -> StoredDraftModel | None:
    """Return the draft model inside a model's checkpoint, by its tensor names; None if there is none.

    A stage `mtp.<number>.` is DSpark's where the checkpoint has parts that only DSpark has, or config.json its fields,
    and the stage none of an MTP module's norms and projections.
    """
    candidates = [name for name in names if "mtp" in name or "medusa" in name]
    for kind, pattern in _ALONE:
        if own := frozenset(name for name in candidates if pattern.match(name)):
            return StoredDraftModel(kind, own)
    stages = {name: match for name in candidates if (match := _STAGE.fullmatch(name))}
    parts = {name for name, match in stages.items() if _DSPARK_PART.match(match["rest"])}
    fields = [key for key in config if key.startswith("dspark_")]
    if not fields and not parts:
        return None
    heads = {match["root"] for match in stages.values() if _MTP_PART.match(match["rest"])}
    own = frozenset(parts | {name for name, match in stages.items() if match["root"] not in heads})
    return StoredDraftModel(DSPARK, own, counted=not heads, fields=some(fields))
