"""Lists of modules in a quantization section: how engines read their entries, and which entries leave modules out.

Patterns are untrusted: globs are matched atomically, as fnmatch translates them, so none backtracks; regular
expressions have a budget of processor time, after which the section counts as invalid.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cached_property
from itertools import accumulate
from reprlib import repr as brief

import regex

Section = dict[str, object]

MAX_ENTRIES = 200_000  # an ignore list that names every expert of every layer has about 50,000
MAX_GLOBS = 2_000
MAX_CHARS = 100_000  # of all expressions, or all globs, together
BUDGET = 0.05  # seconds of processor time for one module against all expressions; ordinary ones take microseconds
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # by engines
SPECIAL = frozenset("*+?^$()[]{}|\\")  # what vLLM's inc.py and SGLang's auto_round.py treat as an expression


def strings(section: Mapping[str, object], key: str) -> list[str]:
    """Return the list of strings at `key`, empty where it is absent; lists of lists are flattened once."""
    value = section.get(key)
    if not isinstance(value, list | None):
        raise ValueError(f"{key} is {brief(value)}, it must be a list of module names")
    flat = [item for entry in value or [] for item in (entry if isinstance(entry, list) else [entry])]
    if wrong := [item for item in flat if not isinstance(item, str)]:
        raise ValueError(f"{key} holds {brief(wrong[0])}, it must be a list of module names")
    if len(flat) > MAX_ENTRIES:
        raise ValueError(f"{key} has {len(flat)} entries, at most {MAX_ENTRIES} are read")
    return flat


def table(section: Mapping[str, object], key: str) -> Section:
    """Return the object at `key`, empty where it is absent."""
    value = section.get(key)
    if not isinstance(value, dict | None):
        raise ValueError(f"{key} is {brief(value)}, it must be an object")
    return value or {}


def prefixes(module: str) -> Iterator[str]:
    """Yield the prefixes of a module: `a`, `a.b` and `a.b.c` of `a.b.c`."""
    return accumulate(module.split("."), "{}.{}".format)


class Expressions:
    """Regular expressions in order, each matched at the start of a name, or with `search` anywhere in it."""

    def __init__(self, texts: Iterable[str], *, search: bool = False) -> None:
        if sum(map(len, texts := list(texts))) > MAX_CHARS:
            raise ValueError(f"its expressions have more than {MAX_CHARS} characters")
        try:
            patterns = [regex.compile(text) for text in texts]
        except (regex.error, RecursionError, OverflowError, ValueError) as error:
            raise ValueError(f"it has an invalid regular expression: {error}") from error
        self.matchers = [pattern.search if search else pattern.match for pattern in patterns]

    def first(self, module: str) -> int | None:
        """Return the index of the first that matches; None if none does."""
        end = time.process_time() + BUDGET
        try:
            matches = (match(module, timeout=max(end - time.process_time(), 0)) for match in self.matchers)
            return next((index for index, match in enumerate(matches) if match is not None), None)
        except (TimeoutError, MemoryError) as error:
            what = f"matching its expressions against {brief(module)} takes longer than {BUDGET} s"
            raise ValueError(f"{what}: make them simpler") from error


class Entries:
    """A list of unquantized modules, and the ways in which engines interpret its entries."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.all = entries
        self.names = frozenset(entries)

    @cached_property
    def _globs(self) -> re.Pattern[str]:
        globs = [entry for entry in self.all if not {"*", "?", "["}.isdisjoint(entry)]
        if len(globs) > MAX_GLOBS or sum(map(len, globs)) > MAX_CHARS:
            raise ValueError(f"it has {len(globs)} globs, at most {MAX_GLOBS} of {MAX_CHARS} characters are read")
        return re.compile("|".join(map(translate, globs)) or r"(?!)")

    @cached_property
    def _marked(self) -> Expressions:
        return Expressions(entry[3:] for entry in self.all if entry.startswith("re:"))

    @cached_property
    def _bounded(self) -> Expressions:
        special = (entry for entry in self.all if not SPECIAL.isdisjoint(entry))
        return Expressions(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))" for entry in special)

    # The ways in which engines read a list. Each returns whether the module is left unquantized.

    def exact(self, module: str) -> bool:
        return module in self.names

    def substring(self, module: str) -> bool:
        return any(entry in module for entry in self.all)

    def marked(self, module: str) -> bool:
        """Match complete names, and after "re:" expressions from the start of a name."""
        return module in self.names or self._marked.first(module) is not None

    def marked_or_glob(self, module: str) -> bool:
        return self.marked(module) or self._globs.match(module) is not None

    def component(self, module: str) -> bool:
        return not self.names.isdisjoint([*module.split("."), *prefixes(module)])

    def component_run(self, module: str) -> bool:
        return any(f".{entry}." in f".{module}." for entry in self.all)

    def bounded(self, module: str) -> bool:
        """Match prefixes to a dot, and suffixes: transformers/quantizers/quantizers_utils.py, should_convert_module."""
        return (
            any(prefix in self.names or f"{prefix}." in self.names for prefix in prefixes(module))
            or any(module[at:] in self.names for at in range(len(module)))
            or self._bounded.first(module) is not None
        )

    def substring_or_glob(self, module: str) -> bool:
        return self.substring(module) or self._globs.match(module) is not None

    def component_or_glob(self, module: str) -> bool:
        names = {module, module.removeprefix("language_model."), *module.split(".")}
        return not self.names.isdisjoint(names) or any(map(self._globs.match, names))


def branches(modules: Iterable[str], kept: Collection[str], form: str = "{}") -> Iterator[str]:
    """Yield short prefixes, in `form`, that cover `modules` and nothing of `kept`; or the module's own name."""
    taken = {prefix for module in kept for prefix in prefixes(module)}
    for module in modules:
        branch = next((prefix for prefix in prefixes(module) if prefix not in taken), module)
        yield module if branch == module else form.format(branch)


def quantized(others: Mapping[str, bool]) -> set[str]:
    """Return the modules that are quantized."""
    return {module for module, packed in others.items() if packed}


def with_experts(modules: Iterable[str], kept: Collection[str]) -> Iterator[str]:
    """Yield the names, and those with which vLLM checks all experts at once: `experts`, `experts.0.gate_proj`, ..."""
    for module in modules:
        yield module
        head, separator, tail = module.partition(".experts.")
        if separator:
            yield f"{head}.experts"
            if not tail[:1].isdigit():  # all experts are one tensor
                yield from (f"{head}.experts.0.{name}_proj" for name in ("gate", "up", "down"))


def with_fused(modules: Iterable[str], kept: Collection[str]) -> Iterator[str]:
    """Yield also the names of fused projections, for which SGLang's qwen3_5_mtp.py looks instead of their parts."""
    listed = dict.fromkeys(with_experts(modules, kept))
    yield from listed
    for fused, parts in FUSED.items():
        stems = [name.removesuffix(parts[0]) for name in listed if name.endswith(f".{parts[0]}")]
        yield from (f"{stem}{fused}" for stem in stems if ".experts." not in stem
                    and all(f"{stem}{part}" in listed for part in parts))  # fmt: skip
