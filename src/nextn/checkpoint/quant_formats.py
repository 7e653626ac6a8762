"""Quantization formats: which modules a section of a config quantizes, and how it lists unquantized ones.

FORMATS has one entry per method; where engines interpret the same entry differently, `covers` is None. Knows no files.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as brief
from typing import NamedTuple

import regex

from nextn.checkpoint.module_lists import (
    SPECIAL,
    Entries,
    Expressions,
    Section,
    branches,
    prefixes,
    quantized,
    strings,
    table,
    with_experts,
    with_fused,
)


class WeightSettings(NamedTuple):
    """How a section says that a module's weight is quantized; None where it does not say."""

    bits: int | None
    group_size: int | None  # of input channels with a common scale; -1: one group per output channel
    symmetric: bool | None
    ordered: bool = False  # groups are no runs of input channels, so that each channel's is stored


def settings_in(
    section: Mapping[str, object], *, bits: Sequence[str] = ("bits",), symmetric: str = "sym"
) -> WeightSettings:
    """Return the settings under these keys of a section; of several, the first that it has."""
    size = next((section[key] for key in ("group_size", "q_group_size") if key in section), None)
    number = next((section[key] for key in bits if key in section), None)
    flag = section.get(symmetric)
    return WeightSettings(
        number if type(number) is int else None,
        size if type(size) is int else None,
        flag if type(flag) is bool else None,
        section.get("desc_act") is True or section.get("actorder") in (True, "group", "dynamic"),
    )


class Format:
    """One parsed section of a config.

    Attributes:
        lists_modules: Whether the section says which modules are quantized; if not, the stored tensors alone do.
    """

    lists_modules = True

    def __init__(self, section: Section) -> None:
        self.section = section
        self.covers("model.layers.0.mlp.experts.0.up_proj")  # parses everything, so that errors show here

    @property
    def by_files(self) -> bool:
        """Whether vLLM takes the modules from the files, as the list is empty: maybe_update_config of its methods."""
        return False

    def covers(self, module: str) -> bool | None:
        """Whether engines build the Linear called `module` quantized; None if unknown."""
        return None

    def settings(self, module: str) -> WeightSettings:
        """Return the settings of the weight of `module`, if it is quantized."""
        return settings_in(self.section)

    def without(self, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        """Return the section with `modules` left out; ValueError if the format cannot express it.

        `others` are the other matrices of the checkpoint, True if quantized, in which case they must not be left out.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Lists:
    """How a method lists unquantized modules."""

    keys: tuple[str, ...]  # in the section
    readers: tuple[Callable[[Entries, str], bool], ...]  # how engines match an entry
    write: Callable[[Iterable[str], Collection[str]], Iterable[str]]
    # Whether transformers leaves out lm_head, and what else is outside the layers, while the first key is null
    # (quantizers/base.py, get_modules_to_not_convert): with an entry it no longer does.
    has_default: bool = False


class Listed(Format):
    """A method with a list of unquantized modules."""

    def __init__(self, section: Section, lists: Lists) -> None:
        self.lists = lists
        self.entries = Entries([entry for key in lists.keys for entry in strings(section, key)])
        super().__init__(section)

    def covers(self, module: str) -> bool | None:
        answers = {reader(self.entries, module) for reader in self.lists.readers}
        return not answers.pop() if len(answers) == 1 else None

    def without(self, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        present = [key for key in self.lists.keys if self.section.get(key) is not None]
        written = dict.fromkeys(self.lists.write(modules, quantized(others)))
        if self.lists.has_default and not present:
            written = dict.fromkeys([*_left_out_by_default(others), *written])
        new = [entry for entry in written if entry not in self.entries.names]
        return self.section | {key: [*strings(self.section, key), *new] for key in present or self.lists.keys[:1]}


def _left_out_by_default(others: Mapping[str, bool]) -> Iterator[str]:
    """Yield the modules outside decoder layers that are stored unquantized, and lm_head, which may be tied."""
    if not others.get("lm_head"):
        yield "lm_head"
    yield from (name for name, packed in others.items() if not packed and re.search(r"\.\d+(\.|$)", name) is None)


class Awq(Listed):
    """With an empty list, vLLM leaves out what the files hold unpacked; with the first entry it no longer does."""

    @property
    def by_files(self) -> bool:
        return not self.entries.all

    def settings(self, module: str) -> WeightSettings:
        return settings_in(self.section, bits=("bits", "w_bit"))

    def without(self, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        kept = quantized(others)
        plain = [] if self.entries.all else [name for name in others if name not in kept]
        plain = [name for name in plain if not any(name in module for module in kept)]
        return super().without([*modules, *plain], others)


class CompressedTensors(Listed):
    """The list is `ignore`; a group of config_groups is a scheme with its targets, or the targets of a named scheme."""

    def covers(self, module: str) -> bool | None:
        return super().covers(module) if self.targets.marked(module) or "Linear" in self.targets.names else False

    @cached_property
    def targets(self) -> Entries:
        groups = table(self.section, "config_groups")
        schemes = [group for group in groups.values() if isinstance(group, dict) and group.get("weights") is not None]
        bare = [entry for key, group in groups.items() if not isinstance(group, dict) for entry in strings(groups, key)]
        return Entries([*bare, *(entry for scheme in schemes for entry in strings(scheme, "targets"))])

    @cached_property
    def schemes(self) -> list[tuple[Entries, Section]]:
        """Targets and `weights` of each group."""
        groups = [group for group in table(self.section, "config_groups").values() if isinstance(group, dict)]
        return [(Entries(strings(group, "targets")), table(group, "weights")) for group in groups]

    def weights(self, module: str) -> Section:
        """Return the scheme of the module's weight."""
        # Targets that name the module come before those that name its class: compressed_tensors/utils/match.py.
        named = [weights for targets, weights in self.schemes if targets.marked(module)]
        of_class = [weights for targets, weights in self.schemes if "Linear" in targets.names]
        return next(iter(named + of_class), {})

    def settings(self, module: str) -> WeightSettings:
        weights = self.weights(module)
        settings = settings_in(weights, bits=("num_bits",), symmetric="symmetric")
        return settings._replace(group_size=-1) if weights.get("strategy") in ("channel", "tensor") else settings


class ModelOpt(Listed):
    """A quant_algo of null quantizes only the KV cache; MIXED_PRECISION quantizes what quantized_layers lists."""

    def covers(self, module: str) -> bool | None:
        algorithm = self.section.get("quant_algo")
        if not isinstance(algorithm, str | None):
            raise ValueError(f"quant_algo is {brief(algorithm)}, it must be a string")
        if algorithm is None or (self._mixed and not self._named(module)):
            return False
        return super().covers(module)

    @property
    def _mixed(self) -> bool:
        return str(self.section.get("quant_algo")).upper() == "MIXED_PRECISION"

    def algorithm(self, module: str) -> str:
        """Return the name of the algorithm for the module, with MIXED_PRECISION that of its entry."""
        layers = table(self.section, "quantized_layers")
        entries = [table(layers, name) for name in self._named(module)] if self._mixed else [self.section]
        return str(entries[-1].get("quant_algo")).upper() if entries else ""

    def _named(self, module: str) -> list[str]:
        layers = table(self.section, "quantized_layers")
        return [prefix for prefix in prefixes(module) if prefix in layers]

    def without(self, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        if not self._mixed:
            return super().without(modules, others)
        gone = {name for module in modules for name in self._named(module)}
        layers = table(self.section, "quantized_layers")
        return self.section | {"quantized_layers": {name: layers[name] for name in layers if name not in gone}}


class Mxfp4(Listed):
    """Only experts are quantized; vLLM reads no list (mxfp4.py), transformers does (integrations/mxfp4.py)."""

    def covers(self, module: str) -> bool | None:
        if "experts" not in module.split("."):
            return False
        return None if super().covers(module) is False else True

    def without(self, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        raise ValueError("mxfp4 has no list that vLLM reads: it quantizes all experts")


class TorchAo(Listed):
    """quant_type can have a setting for each module; then `covers` is None."""

    def covers(self, module: str) -> bool | None:
        kind = table(table(self.section, "quant_type"), "default").get("_type")
        return None if kind in ("FqnToConfig", "ModuleFqnToConfig") else super().covers(module)


class Gptq(Format):
    """`dynamic` maps expressions to settings; the first match applies, and with a "-:" prefix leaves the module out.

    vllm/model_executor/layers/quantization/utils/gptq_utils.py; GPTQModel, gptqmodel/quantization/config.py.
    """

    @cached_property
    def rules(self) -> Expressions:
        return Expressions(rule.removeprefix("-:").removeprefix("+:") for rule in table(self.section, "dynamic"))

    @cached_property
    def blocks(self) -> list[str]:
        return strings(self.section, "modules_in_block_to_quantize")

    @property
    def by_files(self) -> bool:
        return not self.blocks

    def covers(self, module: str) -> bool | None:
        index = self.rules.first(module)
        if index is not None and list(table(self.section, "dynamic"))[index].startswith("-:"):
            return False
        return not self.blocks or any(block in module for block in self.blocks)

    def settings(self, module: str) -> WeightSettings:
        index, rules = self.rules.first(module), table(self.section, "dynamic")
        return settings_in(self.section | ({} if index is None else table(rules, list(rules)[index])))

    def without(self, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        new = (f"-:{regex.escape(name)}" for name in branches(modules, quantized(others), "{}."))
        rules: Section = {f"{rule}.*" if rule.endswith(r"\.") else f"{rule}$": {} for rule in new}
        return self.section | {"dynamic": {**rules, **table(self.section, "dynamic")}}


class AutoRound(Format):
    """extra_config has settings by complete name, then by expression; else the blocks to quantize decide.

    vllm/model_executor/layers/quantization/inc.py; an entry with a complete name and without bits leaves it out.
    """

    @cached_property
    def rules(self) -> tuple[list[str], Expressions]:
        names = [name for name in table(self.section, "extra_config") if not SPECIAL.isdisjoint(name)]
        return names, Expressions(names, search=True)

    def covers(self, module: str) -> bool | None:
        for name in (module, f"model.{module}"):
            if name in table(self.section, "extra_config"):
                return self._bits(name, absent=16) < 16
        names, expressions = self.rules
        in_block = not self.blocks or module.startswith(self.blocks)
        index = expressions.first(module)
        return in_block if index is None else self._bits(names[index], absent=4 if in_block else 16) < 16

    def settings(self, module: str) -> WeightSettings:
        extra = table(self.section, "extra_config")
        names, expressions = self.rules
        index = expressions.first(module)
        name = next(
            (name for name in (module, f"model.{module}") if name in extra), "" if index is None else names[index]
        )
        return settings_in(self.section | table(extra, name))

    def _bits(self, name: str, *, absent: int) -> float:
        bits = table(table(self.section, "extra_config"), name).get("bits", absent)
        if not isinstance(bits, int | float):
            raise ValueError(f"extra_config of {brief(name)} has {brief(bits)} bits, it must be a number")
        return bits

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        keys = (key for key in ("block_name_to_quantize", "to_quant_block_names") if self.section.get(key))
        value = self.section[key] if (key := next(keys, "")) else None
        return tuple(value.split(",") if isinstance(value, str) else strings(self.section, key))

    def without(self, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        settings = {module: {"bits": 16, "data_type": "float"} for module in modules}
        return self.section | {"extra_config": {**table(self.section, "extra_config"), **settings}}


class Mlx(Format):
    """A module may have its own settings, or false; else its tensors decide. mlx_lm/utils.py, load_model."""

    def covers(self, module: str) -> bool | None:
        return bool(self.section[module]) if module in self.section else None

    def settings(self, module: str) -> WeightSettings:
        return settings_in(self._entry(module))

    def mode(self, module: str) -> str:
        """Return how its codes are scaled; "affine", the default, alone has biases."""
        return str(self._entry(module).get("mode", "affine"))

    def _entry(self, module: str) -> Section:
        # Loaders put the prefix before names without it, and look under the result.
        own = self.section.get(module, self.section.get(f"language_model.{module}"))
        return own if isinstance(own, dict) else self.section

    def without(self, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        return self.section | dict.fromkeys(modules, False)


class ModelSlim(Format):
    """Each tensor has an entry, FLOAT or a method. vllm-ascend stops at a Linear without one."""

    def covers(self, module: str) -> bool | None:
        return self.section.get(f"{module}.weight") != "FLOAT"

    def settings(self, module: str) -> WeightSettings:
        # vllm_ascend/quantization/methods: only these scale a row of the codes and do not use the offset.
        method, known = self.section.get(f"{module}.weight"), ("W8A8", "W8A8_DYNAMIC", "W8A8_MIX")
        if method not in known:
            raise ValueError(f"unsupported: {module}.weight is {brief(method)}; valid are {', '.join(known)}")
        return WeightSettings(8, -1, symmetric=True)

    def without(self, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        return self.section | {f"{module}.weight": "FLOAT" for module in modules}


class Unlisted(Format):
    """A method whose tensors alone say what is quantized, as blocks of a GGUF file, or one that nextn does not know."""

    lists_modules = False


def _names(modules: Iterable[str], kept: Collection[str]) -> Iterable[str]:
    return modules


def _dotted(modules: Iterable[str], kept: Collection[str]) -> Iterable[str]:
    return branches(modules, kept, "{}.")  # with a dot, as layers.6 is a substring of layers.61


def _globbed(modules: Iterable[str], kept: Collection[str]) -> Iterable[str]:
    return branches(modules, kept, "{}.*")


# Files of vllm/model_executor/layers/quantization/ and sglang/srt/layers/quantization/; `bounded` is transformers.
_CONVERT = ("modules_to_not_convert",)
# compressed_tensors/utils.py, should_ignore_layer; compressed-tensors' own utils/match.py reads the same.
_COMPRESSED = Lists(("ignore",), (Entries.marked,), with_fused)
# fp8.py matches complete names in both engines, from either list.
_FP8 = Lists((*_CONVERT, "ignored_layers"), (Entries.exact, Entries.bounded), _names, has_default=True)
# auto_awq.py: is_layer_skipped with skip_with_substr.
_AWQ = Lists(_CONVERT, (Entries.substring,), _dotted)
# modelopt.py and modelopt_quant.py, is_layer_excluded; config.json says ignore, hf_quant_config.json exclude_modules.
_MODELOPT = Lists(("ignore",), (Entries.substring_or_glob, Entries.component_or_glob), _globbed)
_MODELOPT_FILE = Lists(("exclude_modules",), _MODELOPT.readers, _globbed)
# quark/utils.py; Quark itself writes globs.
_QUARK = Lists(("exclude",), (Entries.marked, Entries.marked_or_glob), with_experts)
_BNB = Lists(
    ("llm_int8_skip_modules",), (Entries.component, Entries.bounded), branches, has_default=True
)  # bitsandbytes.py, is_layer_skipped_bnb
_TORCHAO = Lists(
    _CONVERT, (Entries.component_run, Entries.bounded), branches, has_default=True
)  # torchao.py, should_skip
_MXFP4 = Lists(_CONVERT, (Entries.bounded,), _names)
# transformers 5.23, quantizers/: methods whose list only transformers reads, and that it also applies on load.
TRANSFORMERS_METHODS = ("bitnet", "eetq", "higgs", "metal", "nvfp4", "quanto", "sinq", "spqr", "vptq")
_TRANSFORMERS = Lists(_CONVERT, (Entries.bounded,), _names, has_default=True)

FORMATS: dict[str, Callable[[Section], Format]] = {
    "compressed-tensors": lambda section: CompressedTensors(section, _COMPRESSED),
    **dict.fromkeys(("fp8", "mxfp8", "fbgemm-fp8"), lambda section: Listed(section, _FP8)),
    "awq": lambda section: Awq(section, _AWQ),
    "modelopt": lambda section: ModelOpt(section, _MODELOPT),
    "modelopt-file": lambda section: ModelOpt(section, _MODELOPT_FILE),
    "quark": lambda section: Listed(section, _QUARK),
    "bitsandbytes": lambda section: Listed(section, _BNB),
    "torchao": lambda section: TorchAo(section, _TORCHAO),
    "mxfp4": lambda section: Mxfp4(section, _MXFP4),
    **dict.fromkeys(TRANSFORMERS_METHODS, lambda section: Listed(section, _TRANSFORMERS)),
    "gptq": Gptq,
    "gguf": Unlisted,
    "mlx": Mlx,
    "modelslim": ModelSlim,
    **dict.fromkeys(("auto-round", "intel/auto-round"), AutoRound),
}
