"""`Family`: the conventions by which published models store and compute their MTP head. Imports no torch.

The rows are in `rows`; an engine that deviates from a row has an entry in `Family.engines` that says so. Tensor names
are one table: `Family.published` and `Family.canonical` translate between those in a file and those used here.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from reprlib import repr as brief
from typing import Literal

from nextn.errors import FamilyError
from nextn.family_table.config_fields import field_at, lookup, text_config, text_key, with_field
from nextn.family_table.conventions import Embedded, EngineSupport, Fp8, Order, Stage, TrunkKV

# How a file stores a layer's experts, see `checkpoint.expert_forms`.
ExpertForm = Literal["split", "fused", "stacked"]

MAX_COUNT = 1000  # modules; published heads have at most eight
REPEATED_FIELD = "mtp_repeated_kv"  # of config.json: `Family.repeated_kv` of a head that nextn trained


@dataclass(frozen=True)
class Family:
    """How one published model family stores and computes its MTP head. "Module" means MTP layer, as in config files.

    A role is a part of an MTP layer: `token_norm`, `hidden_norm`, `projection` (or `token_projection` and
    `hidden_projection`, which are added), `final_norm`, `block`, `embedding`, `output`, or one of a single family.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    count_fields: tuple[str, ...]  # config fields with the number of modules
    default_count: int
    # Role -> module path in the checkpoint, with `{layer}` (counted on from the trunk's layers) or `{module}` (counted
    # from 0). A path with neither belongs to the whole head and counts as module 0's.
    names: Mapping[str, str]
    sources: tuple[str, ...]  # what was read besides the engines' code
    engines: Mapping[str, EngineSupport]  # engine -> what it does with this head
    concat: Literal["embedding_first", "hidden_first"] = "embedding_first"  # eh_proj input order
    embedded: Embedded = "normed"
    hidden: Stage = "post"
    next_hidden: Stage = "post"
    norm_weight: Literal["w", "1+w"] = "w"
    position0: Literal["keep", "zero"] = "keep"
    order: Order = "recursive"
    projection_bias: str = ""  # the config field that gives the projection a bias
    # How the trunk's config differs for the head's block; a list has one entry for each decoder layer of a module.
    block: Mapping[str, object] = field(default_factory=dict)
    # transformers' path in the decoder layer -> published path in the block; longer paths first, `{expert}` = a number.
    block_renames: Mapping[str, str] = field(default_factory=dict)
    # Path in the trunk's files as transformers writes them -> published path; the first match counts.
    trunk_renames: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)  # role -> config field that must be set for it to exist
    interleaved_gate_up: tuple[str, ...] = ()  # block paths whose gate_proj and up_proj are stored as alternating rows
    separate_gate_up: tuple[str, ...] = ()  # block paths stored separately, and concatenated in transformers
    experts: ExpertForm = "split"  # of the head as published; `Inventory.family` has the form of its file
    max_modules: int | None = None
    spare_count: bool = False  # the config may declare one module more than there are
    own_block: bool = False  # the block's matrices may have other shapes than a trunk layer's
    runtime_names: tuple[str, ...] = ()  # ends of published names that look like those of an engine's memory dump
    trunk_experts: tuple[ExpertForm, ...] = ("split", "fused")  # the forms in which transformers loads the trunk's
    block_lacks: tuple[str, ...] = ()  # prefixes of paths that trunk layers have and the block does not
    block_adds: tuple[str, ...] = ()  # prefixes, with a final dot, that the block has and trunk layers do not
    # Part of a block -> another that every block with it has, where other layers of the trunk do not show it.
    block_pairs: Mapping[str, str] = field(default_factory=dict)
    # Part of a layer, of the trunk or of the block -> another that every layer with it has.
    layer_pairs: Mapping[str, str] = field(default_factory=dict)
    router_bias: str = ""  # path in a layer of the bias that `mlp.gate` has with topk_method noaux_tc; "" for none
    # transformers' model_type whose decoder layer the block is, with the trunk's sizes; "" = the trunk's own layers.
    layer_model: str = ""
    has_scaled_rotary: bool = True  # the block's rotary embeddings are scaled where the trunk's are
    separate: bool = False  # the head is a checkpoint of its own beside the trunk's, never inside it
    # The layers have queries only, at the position of a pair's token or hidden state, and read the keys and values of
    # the trunk's last layers that store any, of their own type; "" = they have keys and values of their own.
    trunk_kv: TrunkKV = ""
    # Keys that depths beyond the last MTP layer attend to. "own": they store their own keys at increasing positions.
    # "first": they store none, and all query the keys of the layer's first run from its position (Megatron-LM#6472).
    repeated_kv: Literal["own", "first"] = "own"
    # Part of a plain residual block -> its path in a trunk layer, where the block is made of such parts.
    parts: Mapping[str, str] = field(default_factory=dict)
    draft_types: tuple[str, ...] = ()
    trunk_types: tuple[str, ...] = ()  # model_types of the trunks beside which a head of its own repository runs
    models: tuple[str, ...] = ()  # other published models of the family, for searches; the title names the first ones
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other spellings, read and never written
    orders: tuple[str, ...] = ()  # roles that hold each token id once, as integers
    own: tuple[str, ...] = ()  # embedding or output, if they are the head's own; otherwise stored ones are copies
    read_only_copies: tuple[str, ...] = ()  # copies that are read and never written
    # Where the trunk keeps embedding and lm_head.
    trunk: Mapping[str, str] = field(default_factory=lambda: {"embedding": "model.embed_tokens", "output": "lm_head"})
    wrappers: Mapping[str, str] = field(default_factory=dict)  # prefix that some checkpoints have -> what it replaces
    text_wrapper: str = ""  # the one that transformers maps in a checkpoint whose config is of text alone
    fp8: Fp8 | None = None
    cannot_run: str = ""  # why `Head` cannot compute it; "" if it can
    remarks: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()  # what none of the sources could settle

    @property
    def runs(self) -> bool:
        """Whether `Head` can compute this head; if not, `cannot_run` has the reason."""
        return not self.cannot_run

    @cached_property
    def copies(self) -> tuple[str, ...]:
        """The roles of the trunk's tensors that the file stores again inside each module."""
        return tuple(role for role in ("embedding", "output") if role in self.names and role not in self.own)

    @property
    def stored_once(self) -> tuple[str, ...]:
        """The roles whose tensor all modules share, if the layout allows several modules."""
        return () if self.max_modules == 1 else tuple(role for role, path in self.names.items() if "{" not in path)

    @property
    def runners(self) -> dict[str, EngineSupport]:
        """The engines that run the head."""
        return {name: engine for name, engine in self.engines.items() if engine.support == "runs"}

    def required(self, module: int) -> frozenset[str]:
        """Return the roles of a complete module, without copies; shared roles belong to module 0."""
        return frozenset(r for r, path in self.names.items() if r not in self.copies and (module == 0 or "{" in path))

    def published(self, name: str, num_layers: int, *, wrapper: str = "") -> str:
        """Return the checkpoint's name for `<module>.<role>[.<rest>]`, behind its wrapper, by the trunk's layers.

        Raises FamilyError if the tensor is a later module's, and the layout stores one for all modules.
        """
        module, role, *rest = name.split(".", 2)
        path = self.names[role].format(module=module, layer=num_layers + int(module))
        if module != "0" and path == self.names[role]:
            raise FamilyError(f"{name}: {self.name} stores {path} once, for all modules")
        if role == "block":
            rest = [_renamed(each, self.block_renames) for each in rest]
        return _wrapped(".".join([path, *rest]), "" if self.has_bare_head else wrapper, self.wrappers)

    @property
    def has_bare_head(self) -> bool:
        """Whether engines skip the head's tensors where their names have a wrapper (qwen3_5_mtp.py in both)."""
        return "model.mtp." in self.wrappers

    def trunk_name(self, name: str) -> str:
        """Return the published name of a trunk tensor that transformers saved under `name`."""
        return _renamed(name, self.trunk_renames).removeprefix(".")

    def canonical(self, name: str, num_layers: int) -> str | None:
        """Invert `published`, with any wrapper; None for a tensor that is not the head's."""
        name = _unwrapped(name, self.wrappers)
        for role, pattern in self._patterns:
            match = pattern.fullmatch(name)
            module = None if match is None else _module_index(match, num_layers)
            if match is not None and module is not None:
                rest = match["rest"]
                if rest and role == "block":
                    rest = _renamed(rest, self._inverse_renames)
                return f"{module}.{role}" + (f".{rest}" if rest else "")
        return None

    def wrapper(self, names: Collection[str]) -> str:
        """Return the prefix of `wrappers` that these names of a checkpoint have; "" if they have none."""
        return next((each for each in self.wrappers if any(name.startswith(each) for name in names)), "")

    def shared_role(self, name: str) -> str | None:
        """Return `embedding` or `output` if the trunk stores it under this name, with any wrapper; else None."""
        name = _unwrapped(name, self.wrappers)
        return next((role for role, path in self.trunk.items() if name == f"{path}.weight"), None)

    def shared_name(self, role: str, *, wrapper: str = "") -> str:
        """Invert `shared_role`; `wrapper` is one of `wrappers`, for a checkpoint whose trunk uses it."""
        return _wrapped(f"{self.trunk[role]}.weight", wrapper, self.wrappers)

    def trunk_layer(self, name: str) -> tuple[int, str] | None:
        """Return layer index and path inside the layer, with any wrapper; None for a tensor outside the layers.

        The layers appended for the head have the indices after the trunk's.
        """
        root = self.trunk["embedding"].rpartition(".")[0]
        match = _layer_pattern(f"{root}.layers" if root else "layers").fullmatch(_unwrapped(name, self.wrappers))
        return (int(match[1]), match[2]) if match else None

    def num_modules(self, config: Mapping[str, object]) -> int:
        """Return how many modules a config.json declares, at its top or in its text model.

        Raises FamilyError for a count that is not an integer or that the family cannot have.
        """
        count = next((lookup(config, path) for path in self.counted_in(config)), self.default_count)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_COUNT:
            where = self.count_field(config)
            raise FamilyError(f"{self.name}: {where} = {brief(count)}; expected a whole number from 0 to {MAX_COUNT}")
        if self.spare_count and count > 1:
            count -= 1
        if self.max_modules is not None and count > self.max_modules:
            most = f"the layout has at most {self.max_modules}; set it to the number that is stored"
            raise FamilyError(f"{self.name}: {self.count_field(config)} declares {count} MTP layers, {most}")
        return count

    def count_field(self, config: Mapping[str, object]) -> str:
        """Return the field that declares the number of modules: the first that the config has, else the family's."""
        return next(iter(self.counted_in(config)), self.count_fields[0])

    def counted_in(self, config: Mapping[str, object]) -> list[str]:
        """Return those of `count_fields` that the config has."""
        return [path for path in self.count_fields if lookup(config, path) is not None]

    def with_count(self, config: Mapping[str, object], count: int) -> dict[str, object]:
        """Return the config with `count` modules declared, in the fields it has, else in the family's first one.

        Also declares keys that repeated depths share.
        """
        count += self.spare_count and count > 1
        out = dict(config)
        for path in self.counted_in(config) or self.count_fields[:1]:
            if text_config(out) and "." not in path and field_at(out, path) is None:
                out[text_key(out)] = with_field(text_config(out), path, count)
            else:
                out = with_field(out, path, count)
        return out if self.repeated_kv == "own" else {**out, REPEATED_FIELD: self.repeated_kv}

    @cached_property
    def _patterns(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """The pattern of each role; the block's last, as in some layouts its path is a prefix of all others."""
        paths = [(role, path) for role, path in self.names.items() if role != "block"]
        paths += [(role, path) for role, others in self.aliases.items() for path in others]
        paths += [(role, path) for role, path in self.names.items() if role == "block"]
        return tuple((role, _pattern(path)) for role, path in paths)

    @cached_property
    def _inverse_renames(self) -> Mapping[str, str]:
        return {stored: run for run, stored in self.block_renames.items()}


def _renamed(path: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        match = _pattern(old).fullmatch(path)
        if match is not None:
            fields = match.groupdict()
            rest = fields.pop("rest")
            return new.format(**fields) + (f".{rest}" if rest else "")
    return path


def _wrapped(name: str, wrapper: str, table: Mapping[str, str]) -> str:
    return wrapper + name.removeprefix(table[wrapper]) if wrapper and name.startswith(table[wrapper]) else name


def _unwrapped(name: str, table: Mapping[str, str]) -> str:
    for _ in range(2):  # a wrapper inside another: model.language_model.mtp.
        wrapper = next((each for each in table if name.startswith(each)), "")
        name = table.get(wrapper, "") + name.removeprefix(wrapper)
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
