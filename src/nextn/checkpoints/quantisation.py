"""What a checkpoint's quantisation config says about a module, and the config that leaves modules unquantised.

Finds the sections (config.json and hf_quant_config.json) and edits them; what the words in a section mean is in
`quantformats`, how tensors are really stored in `storage`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as brief
from typing import cast

from nextn.checkpoints.checkpoint import CONFIG, Checkpoint
from nextn.checkpoints.quantformats import FORMATS, Format, Section, quantised
from nextn.checkpoints.storage import stored_modules
from nextn.errors import CheckpointError
from nextn.families import lookup

MODELOPT_FILE = "hf_quant_config.json"
# Outputs and routers: most engines build them unquantised whatever the config says, some go by it.
UNSURE = frozenset({"lm_head", "head", "gate", "router", "shared_expert_gate"})
MAX_NAME = 300


@dataclass(frozen=True, slots=True)
class Place:
    """One section: the object under `keys` in `file`."""

    file: str
    keys: tuple[str, ...]
    method: str
    form: str
    format: Format = field(repr=False)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The sections of one checkpoint's configs that say how it is quantised, at least one; the first is obeyed first.

    `method` is its quant_method; of a method that is not `known` nothing can be told.
    """

    checkpoint: Checkpoint = field(repr=False)
    places: tuple[Place, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Quantisation | None":
        """None if neither config speaks of quantisation; CheckpointError where what it says has no meaning."""
        places = tuple(_places(checkpoint))
        return cls(checkpoint, places) if places else None

    @property
    def method(self) -> str:
        return self.places[0].method

    @property
    def known(self) -> bool:
        return all(type(place.format) is not Format for place in self.places)

    def covers(self, module: str) -> bool | None:
        """Whether an engine that goes by the config builds the Linear called `module` quantised; None cannot be told.

        That is so where two sections or two engines disagree, and for outputs and routers that are not left out.
        CheckpointError for a pattern that takes too long.
        """
        if len(module) > MAX_NAME:
            return None
        verdicts = {self._asked(place, module) for place in self.places}
        verdict = verdicts.pop() if len(verdicts) == 1 else None
        return None if verdict and module.rpartition(".")[2] in UNSURE else verdict

    def _asked(self, place: Place, module: str) -> bool | None:
        try:
            return place.format.covers(module)
        except ValueError as error:
            raise _fault(self.checkpoint, place.file, error) from error

    def leaving_out(self, modules: Sequence[str]) -> dict[str, dict[str, object]]:
        """The config files that must change, by name, so that engines build `modules` unquantised, and nothing else.

        A shorter name stands for several modules where no quantised module of the checkpoint lies under it.
        CheckpointError where the format cannot say so.
        """
        asked = frozenset(modules)
        stored = {name: kind != "plain" for name, kind in stored_modules(self.checkpoint.tensors)}
        others = {name: packed for name, packed in stored.items() if name not in asked}
        edited: dict[str, dict[str, object]] = {}
        for place in self.places:
            if todo := [module for module in modules if self._asked(place, module) is not False]:
                section = self._without(place, todo, others)
                old = self.checkpoint.config if place.file == CONFIG else self.checkpoint.read_json(place.file)
                edited[place.file] = _replaced(edited.get(place.file, old), place.keys, section)
        return edited

    def _without(self, place: Place, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        """The edited section, read back."""
        try:
            section = place.format.without(modules, others)
            new = FORMATS[place.form](section)
            missed = [name for name in modules if new.covers(name) is not False]
            touched = [name for name in quantised(others) if new.covers(name) is not place.format.covers(name)]
            if wrong := missed + touched:
                raise ValueError(f"no entry says so without saying otherwise of {brief(wrong[0])}")
        except ValueError as error:
            what = f"{self.checkpoint.path}: {place.file} ({place.method}) cannot leave {brief(list(modules))}"
            remedy = "Quantise the head as the trunk is, or take a checkpoint of another format"
            raise CheckpointError(f"{what} unquantised: {error}. {remedy}.") from error
        return section


def declared(config: Mapping[str, object]) -> Mapping[str, object]:
    """A config's own quantization_config, text model included, as it is; empty where there is none."""
    section = lookup(config, "quantization_config")
    return section if isinstance(section, Mapping) else {}


def _fault(checkpoint: Checkpoint, file: str, error: ValueError) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path}: the quantisation config in {file} cannot be used: {error}.")


def _replaced(value: object, keys: tuple[str, ...], section: Section) -> dict[str, object]:
    """`value` with `section` under `keys`: copies along the way, never deep, as JSON may nest as deep as it likes."""
    inner = cast(dict[str, object], value)
    return inner | {keys[0]: _replaced(inner[keys[0]], keys[1:], section) if keys[1:] else section}


def _places(checkpoint: Checkpoint) -> Iterator[Place]:
    for file, keys, section in _sections(checkpoint):
        try:
            if not isinstance(section, dict):
                raise ValueError(f"{'.'.join(keys)} is {brief(section)}, it must be an object")
            method = "modelopt" if file == MODELOPT_FILE else _method(keys, section)
            form = method.lower().replace("_", "-")
            if form.startswith("modelopt"):  # modelopt_fp4, ...
                form = "modelopt-file" if file == MODELOPT_FILE else "modelopt"
            if form == "modelopt" and isinstance(inner := section.get("quantization"), dict):
                keys, section, form = (*keys, "quantization"), inner, "modelopt-file"  # as vLLM also reads it
            yield Place(file, keys, method, form, FORMATS.get(form, Format)(section))
        except ValueError as error:
            raise _fault(checkpoint, file, error) from error


def _sections(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[str, ...], object]]:
    """Where vllm/config/model.py and sglang/srt/configs/model_config.py look; MLX has its own key."""
    text = checkpoint.config.get("text_config")
    for outer, config in (((), checkpoint.config), (("text_config",), text)):
        for key in ("quantization_config", "compression_config"):
            if isinstance(config, Mapping) and config.get(key):
                yield CONFIG, (*outer, key), config[key]
    match checkpoint.config.get("quantization"):
        case {"group_size": _} as section:
            yield CONFIG, ("quantization",), section
    if (own := checkpoint.read_json(MODELOPT_FILE)) and own.get("quantization"):
        yield MODELOPT_FILE, ("quantization",), own["quantization"]


def _method(keys: tuple[str, ...], section: Section) -> str:
    method = section.get("quant_method")
    if method is None:
        guesses = {"compression_config": "compressed-tensors", "load_in_4bit": "bitsandbytes"}
        guesses |= {"load_in_8bit": "bitsandbytes", "quant_algo": "modelopt", "group_size": "mlx"}
        method = next((guess for key, guess in guesses.items() if key in keys or section.get(key)), None)
    if not isinstance(method, str):
        raise ValueError(f"quant_method is {brief(method)}, it must be a string such as fp8 or compressed-tensors")
    return method
