"""Families: how each published model stores and computes its MTP head, as rows of cited facts. Imports no torch.

A row decides nothing in silence: an engine that does otherwise has the difference in its entry, and `disagreements`
lists them all. Tensor names are one table, read in both directions by `Family.published` and `Family.canonical`.
The rows are in `rows`, look-ups in the package itself.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from reprlib import repr as brief
from typing import Literal

from nextn.errors import FamilyError

# A hidden state: after or before the final norm, or a hyper-connection model's residual streams, not yet collapsed.
Stage = Literal["post", "pre", "streams"]
# What a module eats of a token: what the trunk's layers eat, or the embedding before the norm that some trunks give it.
Embedded = Literal["normed", "raw"]
# One module again and again; distinct modules that each eat the last one's state, or that all eat the trunk's.
Order = Literal["recursive", "chained", "unchained"]
# Runs the head; reads it and has no graph for it; skips it on load; loses it at conversion; refuses; does not know it.
Support = Literal["runs", "loads", "ignores", "drops", "refuses", "absent"]
# A missing head tensor is an error; is one in an unquantised checkpoint; the same, and a module that is wholly gone is
# always one; keeps an initial value, unsaid; is not known to do either.
Missing = Literal["raises", "unquantised", "module", "silent", "unknown"]

ENGINES = ("vllm", "sglang", "llamacpp", "transformers")
MAX_COUNT = 1000  # modules; published heads have at most eight
_FACTS = ("embedded", "hidden", "recycled", "position0", "order")


@dataclass(frozen=True)
class Engine:
    """What one engine does with a family's head; None = as the row says.

    trunks: roles for which it takes the trunk's tensor, whatever the file holds. unset: roles that keep an initial
    value in a file that lacks them inside the module (vLLM: if it is pipeline-parallel). skips: roles whose tensor at
    the trunk's place its head loader skips, so that a version which does not hand over the trunk's leaves them unset.
    plain: roles that it builds unquantised, whatever the config says. layers: the only layer indices that it knows for
    the head. modules: how many it uses at most; None = all.
    """

    support: Support
    source: str
    embedded: Embedded | None = None
    hidden: Stage | None = None
    recycled: Stage | None = None
    position0: Literal["keep", "zero"] | None = None
    order: Order | None = None
    trunks: tuple[str, ...] = ("embedding", "output")
    missing: Missing = "unknown"
    unset: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    modules: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fp8:
    """How a family publishes fp8: `<name>.weight` has its scales in `<name>.<scale>`, one a block, multiplied.

    plain: roles that stay in the model's own dtype, as norms, routers and biases inside the block always do.
    """

    scale: str = "weight_scale_inv"
    block: tuple[int, int] = (128, 128)
    plain: tuple[str, ...] = ("token_norm", "hidden_norm", "projection", "final_norm", "embedding", "output")


@dataclass(frozen=True)
class Family:
    """One published convention.

    names: role -> module path in the checkpoint, with `{layer}` (counted on from the trunk's layers) or `{module}`
    (counted from 0); a path with neither belongs to the whole head and counts as module 0's. Roles are `token_norm`,
    `hidden_norm`, `projection` (or `token_projection` and `hidden_projection`, whose results are added), `final_norm`,
    `block`, where the file stores them `embedding` and `output`, and what one family alone has.
    aliases: other spellings, read and never written. inside: transformers' path in the decoder layer -> the published
    one in the block, longer paths first, with `{expert}` for a number. saved: path in the trunk's files as transformers
    writes them -> the published one, if that is another, first match first. optional: role -> the config's field
    without which a head does not have it. interleaved: paths in the block whose `gate_proj` and `up_proj` are stored as
    one, a row of each in turn. joined: those where the file has them apart, and transformers one under the other. own:
    stored roles that are the head's own; the others of embedding and output are copies. unwritten: copies that are read
    and never written. trunk: where the trunk keeps embedding and output. wrappers: leading path that some checkpoints
    have -> what it stands for. spare_count: the config may promise one module more than there are. own_block: the block
    has not the tensors of a trunk layer. parts: what a plain residual block has -> its path in a layer of the trunk,
    where the block is made of such parts. projection_bias: the config's field that gives the projection a bias. block:
    how the trunk's config differs for the head's block; a list has one entry for each decoder layer of a module.
    cannot_run: why `Head` does not compute it. sources: what was read beside the engines' code. unverified: what none
    of it could settle.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    count_fields: tuple[str, ...]
    default_count: int
    names: Mapping[str, str]
    sources: tuple[str, ...]
    engines: Mapping[str, Engine]
    concat: Literal["embedding_first", "hidden_first"] = "embedding_first"
    embedded: Embedded = "normed"
    hidden: Stage = "post"
    recycled: Stage = "post"
    gain: Literal["w", "1+w"] = "w"
    position0: Literal["keep", "zero"] = "keep"
    order: Order = "recursive"
    projection_bias: str = ""
    block: Mapping[str, object] = field(default_factory=dict)
    inside: Mapping[str, str] = field(default_factory=dict)
    saved: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    interleaved: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    experts: Literal["split", "fused", "stacked"] = "split"
    max_modules: int | None = None
    spare_count: bool = False
    own_block: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    draft_types: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    trunk: Mapping[str, str] = field(default_factory=lambda: {"embedding": "model.embed_tokens", "output": "lm_head"})
    wrappers: Mapping[str, str] = field(default_factory=dict)
    fp8: Fp8 | None = None
    cannot_run: str = ""
    remarks: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether `Head` computes it; if not, `cannot_run` says why."""
        return not self.cannot_run

    @cached_property
    def copies(self) -> tuple[str, ...]:
        """Roles of shared tensors that the file stores again inside each module."""
        return tuple(role for role in ("embedding", "output") if role in self.names and role not in self.own)

    @property
    def once(self) -> tuple[str, ...]:
        """Roles of which the layout has one tensor for all modules, if it has room for several."""
        return () if self.max_modules == 1 else tuple(role for role, path in self.names.items() if "{" not in path)

    @property
    def runners(self) -> dict[str, Engine]:
        """The engines that run the head."""
        return {name: engine for name, engine in self.engines.items() if engine.support == "runs"}

    def required(self, module: int) -> frozenset[str]:
        """The roles of a whole module, copies aside; what all modules share counts as the first's."""
        return frozenset(r for r, path in self.names.items() if r not in self.copies and (module == 0 or "{" in path))

    @property
    def disagreements(self) -> tuple[str, ...]:
        """Where engines that run the head differ from this row or from each other, and what else must be said."""
        return (*(line for fact in _FACTS for line in self._differing(fact)), *self._overruled(), *self.remarks)

    def conventions(self, engine: str) -> dict[str, object]:
        """Facts of this row that the engine is documented to take otherwise, as it takes them."""
        told = {fact: getattr(self.engines[engine], fact) for fact in _FACTS}
        return {fact: value for fact, value in told.items() if value not in (None, getattr(self, fact))}

    def published(self, name: str, num_layers: int, *, wrapper: str = "") -> str:
        """Tensor name in the checkpoint of canonical `<module>.<role>[.<rest>]`; num_layers = the trunk's layers.

        wrapper: one of `wrappers`, for a checkpoint that uses it. Raises FamilyError for a second module's tensor where
        the layout has a place for one.
        """
        module, role, *rest = name.split(".", 2)
        path = self.names[role].format(module=module, layer=num_layers + int(module))
        if module != "0" and path == self.names[role]:
            raise FamilyError(f"{name}: {self.name} stores {path} once, for all modules")
        if role == "block":
            rest = [_renamed(each, self.inside) for each in rest]
        return _wrapped(".".join([path, *rest]), wrapper, self.wrappers)

    def trunk_name(self, name: str) -> str:
        """Published name of a tensor of the trunk that transformers saved under `name`."""
        return _renamed(name, self.saved).removeprefix(".")

    def canonical(self, name: str, num_layers: int) -> str | None:
        """Inverse of `published`, whatever the wrapper; None for a tensor that is not the head's."""
        name = _unwrapped(name, self.wrappers)
        for role, pattern in self._patterns:
            match = pattern.fullmatch(name)
            module = None if match is None else _module_index(match, num_layers)
            if match is not None and module is not None:
                rest = match["rest"]
                if rest and role == "block":
                    rest = _renamed(rest, self._outside)
                return f"{module}.{role}" + (f".{rest}" if rest else "")
        return None

    def wrapper(self, names: Collection[str]) -> str:
        """The one of `wrappers` that these names of a checkpoint have, or none: an empty path."""
        return next((each for each in self.wrappers if any(name.startswith(each) for name in names)), "")

    def shared_role(self, name: str) -> str | None:
        """`embedding` or `output` if that is what the trunk keeps under this tensor name, whatever the wrapper."""
        name = _unwrapped(name, self.wrappers)
        return next((role for role, path in self.trunk.items() if name == f"{path}.weight"), None)

    def shared_name(self, role: str, *, wrapper: str = "") -> str:
        """Inverse of `shared_role`; wrapper: one of `wrappers`, for a checkpoint whose trunk uses it."""
        return _wrapped(f"{self.trunk[role]}.weight", wrapper, self.wrappers)

    def trunk_layer(self, name: str) -> tuple[int, str] | None:
        """Index and path inside the layer, if that is what a tensor of this name is, whatever the wrapper.

        The layers appended for the head count on from the trunk's.
        """
        root = self.trunk["embedding"].rpartition(".")[0]
        match = _layer_pattern(f"{root}.layers" if root else "layers").fullmatch(_unwrapped(name, self.wrappers))
        return (int(match[1]), match[2]) if match else None

    def num_modules(self, config: Mapping[str, object]) -> int:
        """How many modules a checkpoint's config.json promises; fields are looked up in `text_config`, too.

        Raises FamilyError for a count that is not a whole number or that the family cannot have.
        """
        count = next((lookup(config, path) for path in self.counted_in(config)), self.default_count)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_COUNT:
            raise FamilyError(
                f"{self.name}: {self.count_fields[0]} = {brief(count)}; expected a whole number from 0 to {MAX_COUNT}"
            )
        if self.spare_count and count > 1:
            count -= 1
        if self.max_modules is not None and count > self.max_modules:
            raise FamilyError(f"{self.name}: {count} modules promised, but the layout has room for {self.max_modules}")
        return count

    def counted_in(self, config: Mapping[str, object]) -> list[str]:
        """Those of `count_fields` that the config has."""
        return [path for path in self.count_fields if lookup(config, path) is not None]

    def with_count(self, config: Mapping[str, object], count: int) -> dict[str, object]:
        """The config that promises `count` modules: in the fields that say so now, else in the family's first one."""
        count += self.spare_count and count > 1
        out = dict(config)
        for path in self.counted_in(config) or self.count_fields[:1]:
            inner = out.get("text_config")
            if isinstance(inner, Mapping) and "." not in path and _at(out, path) is None:
                out["text_config"] = _with(inner, path, count)
            else:
                out = _with(out, path, count)
        return out

    @cached_property
    def _patterns(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """The block last: in some layouts all other names lie under its path."""
        paths = [(role, path) for role, path in self.names.items() if role != "block"]
        paths += [(role, path) for role, others in self.aliases.items() for path in others]
        paths += [(role, path) for role, path in self.names.items() if role == "block"]
        return tuple((role, _pattern(path)) for role, path in paths)

    @cached_property
    def _outside(self) -> Mapping[str, str]:
        return {stored: run for run, stored in self.inside.items()}

    def _differing(self, fact: str) -> Iterator[str]:
        mine = getattr(self, fact)
        says: dict[str, list[str]] = {}
        for name, engine in self.runners.items():
            says.setdefault(getattr(engine, fact) or mine, []).append(name)
        if set(says) - {mine}:
            yield f"{fact}: " + "; ".join(f"{value} in {', '.join(names)}" for value, names in says.items())

    def _overruled(self) -> Iterator[str]:
        for role in self.own:
            names = [name for name, engine in self.runners.items() if role in engine.trunks]
            if names:
                yield f"{role}: stored for each module, but {', '.join(names)} uses the trunk's"


def _at(config: Mapping[str, object], path: str) -> object:
    value: object = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def lookup(config: Mapping[str, object], path: str) -> object:
    """The value at a dotted path of a config.json, at its top or in `text_config`; None where there is none."""
    inner = config.get("text_config")
    found = _at(config, path)
    return _at(inner, path) if found is None and isinstance(inner, Mapping) else found


def lookup_count(config: Mapping[str, object], path: str) -> int | None:
    """The same where it is a whole number above 0; None for anything else."""
    value = lookup(config, path)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _with(config: Mapping[str, object], path: str, value: object) -> dict[str, object]:
    key, _, rest = path.partition(".")
    inner = config.get(key)
    return {**config, key: _with(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}


def _renamed(path: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        match = _pattern(old).fullmatch(path)
        if match is not None:
            places = match.groupdict()
            rest = places.pop("rest")
            return new.format(**places) + (f".{rest}" if rest else "")
    return path


def _wrapped(name: str, wrapper: str, table: Mapping[str, str]) -> str:
    return wrapper + name.removeprefix(table[wrapper]) if wrapper and name.startswith(table[wrapper]) else name


def _unwrapped(name: str, table: Mapping[str, str]) -> str:
    for wrapper, meant in table.items():
        if name.startswith(wrapper):
            return meant + name.removeprefix(wrapper)
    return name


@cache
def _pattern(template: str) -> re.Pattern[str]:
    path = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d{1,6})", re.escape(template))
    return re.compile(path + r"(?:\.(?P<rest>.+))?", re.ASCII)


@cache
def _layer_pattern(root: str) -> re.Pattern[str]:
    return re.compile(re.escape(root) + r"\.(\d{1,6})\.(.+)")


def _module_index(match: re.Match[str], num_layers: int) -> int | None:
    groups = match.groupdict()
    if "layer" in groups:
        index = int(groups["layer"]) - num_layers
        return index if index >= 0 else None
    return int(groups["module"]) if "module" in groups else 0
