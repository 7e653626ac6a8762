"""A checkpoint's quantization config: which modules it covers, and how to edit it to leave modules unquantized.

Finds and edits the sections in config.json and hf_quant_config.json; `quant_formats` interprets them, and
`stored_format` tells how tensors are really stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as brief
from typing import cast

from nextn.checkpoint.checkpoint import CONFIG, Checkpoint
from nextn.checkpoint.quant_formats import FORMATS, Format, Section, quantized
from nextn.checkpoint.stored_format import stored_modules
from nextn.errors import CheckpointError
from nextn.families import lookup

MODELOPT_FILE = "hf_quant_config.json"
# lm_head and routers: most engines build them unquantized whatever the config says, some follow it.
UNSURE = frozenset({"lm_head", "head", "gate", "router", "shared_expert_gate"})
MAX_NAME = 300


@dataclass(frozen=True, slots=True)
class QuantSection:
    """One section: the object at `keys` in `file`."""

    file: str
    keys: tuple[str, ...]
    method: str
    form: str
    format: Format = field(repr=False)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """The sections of a checkpoint's configs that describe its quantization, at least one, in order of precedence."""

    checkpoint: Checkpoint = field(repr=False)
    sections: tuple[QuantSection, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "QuantConfig | None":
        """Read the sections; None for an unquantized checkpoint, CheckpointError for an invalid section."""
        sections = tuple(_sections(checkpoint))
        return cls(checkpoint, sections) if sections else None

    @property
    def method(self) -> str:
        """The quant_method of the first section."""
        return self.sections[0].method

    @property
    def known(self) -> bool:
        """Whether the methods are supported; `covers` is None for the modules of any other."""
        return all(type(section.format) is not Format for section in self.sections)

    def covers(self, module: str) -> bool | None:
        """Whether an engine that follows the config builds the Linear called `module` quantized.

        None where sections or engines disagree, and for an lm_head or router that the config does not leave out.
        Raises CheckpointError for a pattern that takes too long to match.
        """
        if len(module) > MAX_NAME:
            return None
        answers = {self._covers(section, module) for section in self.sections}
        covered = answers.pop() if len(answers) == 1 else None
        return None if covered and module.rpartition(".")[2] in UNSURE else covered

    def _covers(self, section: QuantSection, module: str) -> bool | None:
        try:
            return section.format.covers(module)
        except ValueError as error:
            raise _fault(self.checkpoint, section.file, error) from error

    def leaving_out(self, modules: Sequence[str]) -> dict[str, dict[str, object]]:
        """Return the edited config files, by name, with which engines build `modules`, and no others, unquantized.

        A shorter name stands for several modules where it is a prefix of no quantized module of the checkpoint.
        Raises CheckpointError where the format cannot express it.
        """
        unquantized = frozenset(modules)
        stored = {name: kind != "plain" for name, kind in stored_modules(self.checkpoint.tensors)}
        others = {name: packed for name, packed in stored.items() if name not in unquantized}
        edited: dict[str, dict[str, object]] = {}
        for old in self.sections:
            if remaining := [module for module in modules if self._covers(old, module) is not False]:
                new = self._without(old, remaining, others)
                config = self.checkpoint.config if old.file == CONFIG else self.checkpoint.read_json(old.file)
                edited[old.file] = _replaced(edited.get(old.file, config), old.keys, new)
        return edited

    def _without(self, old: QuantSection, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        """Return the edited section, after checking how it reads."""
        try:
            section = old.format.without(modules, others)
            new = FORMATS[old.form](section)
            missed = [name for name in modules if new.covers(name) is not False]
            changed = [name for name in quantized(others) if new.covers(name) is not old.format.covers(name)]
            if wrong := missed + changed:
                raise ValueError(f"no entry expresses it without changing {brief(wrong[0])}")
        except ValueError as error:
            what = f"{self.checkpoint.path}: {old.file} ({old.method}) cannot leave {brief(list(modules))}"
            remedy = "Quantize the head as the trunk is, or take a checkpoint of another format"
            raise CheckpointError(f"{what} unquantized: {error}. {remedy}.") from error
        return section


def declared(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return a config's quantization_config, or its text model's, unchanged; empty where there is none."""
    section = lookup(config, "quantization_config")
    return section if isinstance(section, Mapping) else {}


def _fault(checkpoint: Checkpoint, file: str, error: ValueError) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path}: the quantization config in {file} cannot be used: {error}.")


def _replaced(value: object, keys: tuple[str, ...], section: Section) -> dict[str, object]:
    """Return `value` with `section` at `keys`; copies only the objects on the way, as JSON may be nested deeply."""
    inner = cast(dict[str, object], value)
    return inner | {keys[0]: _replaced(inner[keys[0]], keys[1:], section) if keys[1:] else section}


def _sections(checkpoint: Checkpoint) -> Iterator[QuantSection]:
    for file, keys, section in _raw_sections(checkpoint):
        try:
            if not isinstance(section, dict):
                raise ValueError(f"{'.'.join(keys)} is {brief(section)}, it must be an object")
            method = "modelopt" if file == MODELOPT_FILE else _method(keys, section)
            form = method.lower().replace("_", "-")
            if form.startswith("modelopt"):  # modelopt_fp4, ...
                form = "modelopt-file" if file == MODELOPT_FILE else "modelopt"
            if form == "modelopt" and isinstance(inner := section.get("quantization"), dict):
                keys, section, form = (*keys, "quantization"), inner, "modelopt-file"  # as vLLM also reads it
            yield QuantSection(file, keys, method, form, FORMATS.get(form, Format)(section))
        except ValueError as error:
            raise _fault(checkpoint, file, error) from error


def _raw_sections(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[str, ...], object]]:
    """Yield file, keys and value, where vllm/config/model.py and sglang/srt/configs/model_config.py look, and MLX."""
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
