"""`audit`: check a checkpoint's config, tensors, index, quantization and values.

A rule is a function from an `Inventory` to findings; rules are independent of each other, and none imports torch.
"""

import difflib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

from nextn.audit_rules import (
    absent_head,
    config_claims,
    engines,
    files,
    listed_modules,
    precision,
    router_bias,
    separate,
    shapes,
    structure,
    trunk_layers,
    values,
)
from nextn.audit_rules.findings import SEVERITIES, AuditReport, Finding, Severity, as_sentences
from nextn.audit_rules.layer_reference import LayerReference
from nextn.audit_rules.tensor_values import AllValues, is_local
from nextn.checkpoint.checkpoint import Checkpoint, as_checkpoint
from nextn.checkpoint.foreign_names import plain_name, with_plain_names
from nextn.checkpoint.head_inventory import HEADLIKE, Inventory
from nextn.checkpoint.provenance import open_head, trunk_family
from nextn.checkpoint.quantization import QuantConfig, split_name, stored_modules
from nextn.errors import CheckpointError, ConfigError, FamilyError, NextnError
from nextn.family_table import Family, by_config, by_name, generic, outer_type, rows
from nextn.text_format import counted, some

__all__ = ["IDS", "RULES", "AuditReport", "Finding", "Severity", "audit", "audit_checkpoint"]

Rule = Callable[[Inventory], Iterable[Finding]]
_MODULES = (
    absent_head,
    structure,
    trunk_layers,
    config_claims,
    files,
    shapes,
    engines,
    precision,
    listed_modules,
    separate,
    values,
    router_bias,
)
RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in module.RULES)
IDS: tuple[str, ...] = tuple(rule for module in _MODULES for rule in module.IDS)
_MAX_NAMES = 2000  # to match against every family's layout


def audit(
    source: str | Path | Checkpoint,
    *,
    head: str | Path | None = None,
    family: str | None = None,
    ignore: Collection[str] = (),
    sample: bool = False,
    require_head: bool = False,
) -> AuditReport:
    """Check a checkpoint's MTP head against its config and what engines expect.

    From the hub, only headers and a few small samples are read; from a local checkpoint, also all values of the head.

    Args:
        source: A checkpoint folder, .safetensors or .gguf file, hub id, `tiny` or an opened checkpoint.
        head: A checkpoint whose head is audited, with `source` as its trunk.
        family: Name of the family to assume, instead of the one of the config's model_type.
        ignore: Ids of rules whose findings are left out.
        sample: Read only samples of a local head's values, as for a hub id.
        require_head: Report a checkpoint that neither declares nor stores a head as an error.

    Returns:
        The findings, worst first, and what was read.

    Raises:
        ConfigError: There is no such rule, or `head` is beside a GGUF file.
        FamilyError: No family is known for the model_type; the message names those that the tensor names match.
        CheckpointError: The config does not say where the head begins, or a file cannot be read.

    Example:
        >>> report = nextn.audit("tiny")
        >>> report.clean, report.family, report.values_read
        (True, 'qwen3_5', 'all')
    """
    started = perf_counter()
    _check_rules(ignore)
    with _no_garbage_collection():
        if isinstance(source, str | Path) and str(source).endswith(".gguf"):
            if head is not None:
                raise ConfigError(f"a head beside {source}: a trunk in GGUF; give its safetensors checkpoint")
            from nextn.audit_rules.gguf import audit_gguf  # here, as it imports numpy

            report = audit_gguf(Path(source))
        else:
            checkpoint = as_checkpoint(source)
            row, trunk = by_name(family) if family else None, None
            if head is not None:
                trunk = Inventory.of(checkpoint, family=row or trunk_family(checkpoint))
                beside = open_head(str(head), trunk)
                checkpoint, row = beside.checkpoint, beside.family
            report = audit_checkpoint(checkpoint, family=row, sample=sample, trunk=trunk)
    report = (report.requiring_head() if require_head else report).without(ignore)
    return replace(report, seconds=round(perf_counter() - started, 3))


def fixes(inventory: Inventory, *, unless: str = "", restoring: bool = True) -> str:
    """Return what the audit's errors say to do, each once, as sentences; nothing if there are none, or one `unless`.

    restoring: Also to restore the head.
    """
    try:  # the files as they are: a loader's inventory has its own view of quantized tensors
        found = audit_checkpoint(Checkpoint.open(inventory.checkpoint.path), family=inventory.family).findings
    except NextnError:
        return ""
    errors = (each.fix for each in found if each.severity == "error" and (restoring or "nextn restore" not in each.fix))
    advice = dict.fromkeys(map(as_sentences, errors))
    return "" if any(each.rule == unless for each in found) else " ".join(advice)


def _check_rules(rules: Collection[str]) -> None:
    for rule in rules:
        if rule not in IDS:
            near = difflib.get_close_matches(rule, IDS, n=1)
            meant = f"did you mean {near[0]}?" if near else f"known: {', '.join(IDS)}"
            raise ConfigError(f"ignore {rule}: no such rule; {meant}")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: over hundreds of thousands of live entries it takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def audit_checkpoint(
    checkpoint: Checkpoint, *, family: Family | None = None, sample: bool = False, trunk: Inventory | None = None
) -> AuditReport:
    """Run every rule on an opened checkpoint, or on its head beside `trunk`, and raise as `audit`.

    `family` overrides that of the config's model_type. With `sample`, only samples of local values are read.
    """
    family = family or _family(checkpoint)
    if family is None:
        return _without_family(checkpoint)
    stored = Inventory.of(checkpoint, family=family)
    kinds = structure.foreign_names(stored)
    foreign = {name for _, names in kinds for name in names}
    # These tensors are audited under the names that they should have, so that one cause gives one finding.
    plain = with_plain_names(checkpoint, family.runtime_names) if foreign else checkpoint
    inventory = Inventory.of(plain, family=family) if foreign else stored
    all_values = AllValues.of(inventory) if inventory.modules and not sample and is_local(inventory) else None
    alike = shapes.comparable(inventory)
    # Which engines run the family says nothing about a head whose names they do not map.
    unmapped = inventory.modules != stored.modules
    bound: dict[Rule, Rule] = {
        structure.structure: lambda _: structure.structure(alike),
        shapes.shape: lambda _: shapes.shape(alike),
        values.values: partial(values.values, all_values=all_values),
        # A record is of the names that are stored.
        values.head_stale: lambda _: values.head_stale(inventory if unmapped else stored),
        separate.separate: partial(separate.separate, trunk=trunk),
        engines.engine_support: partial(engines.engine_support, trunk=trunk),
    }
    rules = [bound.get(rule, rule) for rule in RULES if not (unmapped and rule is engines.engine_support)]
    hidden = _hidden(inventory, foreign)
    findings = [*structure.names_foreign(checkpoint.path, kinds)] + [
        finding for rule in rules for finding in rule(inventory) if finding.rule not in hidden
    ]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return AuditReport(
        checkpoint.path,
        inventory.family.name,
        inventory.declared,
        inventory.modules,
        tuple(findings),
        values_read="none" if not inventory.modules else "samples" if all_values is None else "all",
        bytes_read=0 if all_values is None else all_values.num_bytes,
        unchecked=tuple(_unchecked(inventory, trunk=trunk)),
        title=inventory.family.title,
        is_default=inventory.declared > 0 and not inventory.family.counted_in(checkpoint.config),
    )


def _hidden(inventory: Inventory, foreign: Collection[str]) -> set[str]:
    """Return the rules whose findings would be of names that are a finding already, as of running programs."""
    nameless = [name for name in foreign if plain_name(name) is None]
    hidden = {"trunk-partial"} if nameless else set[str]()
    if any(map(HEADLIKE.search, nameless)) or (nameless and not inventory.layers):
        hidden |= {"head-absent", "head-elsewhere", "head-partial"}
    return hidden | ({"trunk-missing", "trunk-partial"} if trunk_layers.names_in_memory(inventory) else set())


def _family(checkpoint: Checkpoint) -> Family | None:
    """Return the checkpoint's family; None for an unknown model_type whose tensor names match no family's layout."""
    try:
        return by_config(checkpoint.config)
    except FamilyError as error:
        names = list(checkpoint.tensors)[-_MAX_NAMES:]
        foreign = any(plain_name(name) != name for name in names)  # which `_without_family` names
        named = (row for row in rows() if any(_is_norm(row.canonical(name, 0)) for name in names))
        matches = [] if foreign else [row.name for row in named]
        if not matches and isinstance(checkpoint.config.get("model_type"), str):
            return None
        if not matches:
            raise
        message = f"{error}. Its tensor names match the layout of {', '.join(matches)}: try --family NAME."
        raise FamilyError(message) from error


def _without_family(checkpoint: Checkpoint) -> AuditReport:
    """Audit a model of a type without a known head: its files, and whether any tensor looks like a head's."""
    inventory = Inventory.of(checkpoint, family=replace(generic(checkpoint.config), default_count=0))
    names = [*inventory.stored.values(), *inventory.unrecognized]
    model_type = str(checkpoint.config["model_type"])[:80]
    found = [
        *structure.names_foreign(checkpoint.path, structure.foreign_names(inventory)),
        *files.index(inventory),
        *absent_head.draft_model(inventory),
    ]
    if names:
        found.append(absent_head.foreign_head(model_type, names))
    elif inventory.draft_model is None:
        found.append(absent_head.withheld_head(inventory) or absent_head.no_head(model_type, checkpoint.config))
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    left = ("everything but names and files, as there is no head",)
    return AuditReport(checkpoint.path, model_type, 0, (), tuple(found), unchecked=left)


def _is_norm(canonical: str | None) -> bool:
    return canonical is not None and canonical.split(".")[1] in ("token_norm", "hidden_norm")


def _unchecked(inventory: Inventory, *, trunk: Inventory | None = None) -> Iterator[str]:
    """Yield what of a checkpoint, or of its head beside this trunk, was not checked: a clean report says no more."""
    if not inventory.layers and inventory.family.trunk_kv:
        yield "the values of the trunk, whose keys this head reads"
    elif not inventory.layers:
        missing = "the trunk, of which no layer is stored, and " if trunk is None else ""
        yield f"{missing}what the trunk's layers say about the head's names and shapes"
    elif inventory.stored and all(LayerReference(inventory).compare(module).layer < 0 for module in inventory.modules):
        yield "the names inside the head's block, as the trunk is incomplete"
    other = inventory.draft_model
    if other is not None and other.names:
        yield f"the {counted(len(other.names), 'tensor')} of the {other.kind.name} draft model"
    others = _others(inventory)
    if others:
        yield f"{counted(len(others), 'tensor')} outside the trunk's layers and the head, such as {some(others[:2])}"
    elif inventory.layers:
        for part in ("vision_config", "audio_config"):
            if inventory.checkpoint.config.get(part):
                yield f"the model of {part}, of which no tensor is stored"
    if outer := outer_type(inventory.checkpoint.config):
        yield f"whether engines run this head inside a model of type {outer:.80}, which nextn does not know"
    if method := _unknown_method(inventory):
        yield f"which modules {method} quantizes, as nextn does not know this method"
    stored = [name for name in inventory.stored if inventory.role(name) not in inventory.family.orders]
    head = {name: inventory.checkpoint.tensors[name] for name in inventory.spellings(stored)}
    if packed := sorted({kind for _, kind in stored_modules(head)} - {"plain", "fp8-block", "fp8-tensor"}):
        yield f"the values of the head's packed matrices ({', '.join(packed)})"


def _others(inventory: Inventory) -> list[str]:
    """Return the tensors that are neither the head's, nor in a trunk layer, nor shared with the head."""
    known = inventory.spellings(inventory.stored) | set(inventory.shared.values()) | set(inventory.unrecognized)
    known |= set() if inventory.draft_model is None else inventory.draft_model.names
    known |= {info.name for layer in inventory.layers.values() for info in layer.values()}
    tensors = inventory.checkpoint.tensors
    parts = {split_name(name, tensors)[0] for name in inventory.shared.values()}  # and of packed ones, scales
    names = (name for name in tensors if name not in known and not name.endswith(trunk_layers.FINAL_NORMS))
    return [name for name in names if split_name(name, tensors)[0] not in parts]


def _unknown_method(inventory: Inventory) -> str:
    try:
        config = QuantConfig.of(inventory.checkpoint)
    except CheckpointError:  # `precision` reports it
        return ""
    return "" if config is None or config.known else config.method
