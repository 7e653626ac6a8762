"""Report what each engine would do with this head: tensors that it misses, replaces, or never reads.

The facts about engines come from the family's row; one that affects only some setups is a note.
"""

import shlex
from collections.abc import Iterator
from itertools import islice

from nextn.audit_rules.findings import ENGINES, ROLES, Finding, aliases, convert, engines, restore, verb
from nextn.audit_rules.tensor_values import same_values
from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.expert_forms import expert_path
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import GENERIC
from nextn.checkpoint.quantization import split_name, storage
from nextn.edit.adopt import MODEL_TYPES, engines_after_adopting
from nextn.edit.compatibility import lone_experts
from nextn.family_table import READS_FUSED, READS_SPLIT, EngineSupport, Support, by_name, lookup, rows
from nextn.family_table.config_fields import levels
from nextn.text_format import joined, some

IDS = (
    "trunk-missing", "tied-differs", "shared-missing",
    "copy-differs", "own-head-overwritten", "layer-index", "too-many-modules",
    "single-expert", "experts-form", "engine-loads", "engine-ignores", "engine-drops", "engine-refuses",
    "engine-absent", "not-run",
)  # fmt: skip
_UNSUPPORTED: dict[Support, tuple[str, str]] = {
    "loads": ("store", "the head and cannot run it"),
    "ignores": ("skip", "the head on load"),
    "drops": ("lose", "the head at conversion"),
    "refuses": ("refuse", "the model or its head"),
    "absent": ("lack", "this family"),
}


def trunk_missing(inventory: Inventory) -> Iterator[Finding]:
    """Report an embedding or lm_head of the trunk, which the head uses, that is not under the name engines look for."""
    pickled = inventory.checkpoint.pickled
    if not (inventory.layers or pickled):
        return  # a head alone
    if len(inventory.layers) < inventory.num_layers:
        lost = list(islice((i for i in range(inventory.num_layers) if i not in inventory.layers), 4))
        count = inventory.num_layers - len(inventory.layers)
        yield Finding(
            "trunk-missing", "error", f"{CONFIG}: num_hidden_layers",
            f"Of {inventory.num_layers} trunk layers {count} {'is' if count == 1 else 'are'} in no file: "
            f"{some([str(index) for index in lost])}{' and more' if count > len(lost) else ''}.",
            "Every layer that the config declares.", pickled or "Download or save the trunk again.",
        )  # fmt: skip
        if pickled:
            return
    for role, path in inventory.family.trunk.items():
        tied = role == "output" and lookup(inventory.checkpoint.config, "tie_word_embeddings") is not False
        if role in inventory.shared or tied or storage(inventory.checkpoint.tensors, path) is not None:
            continue
        elsewhere = sorted(_known_names(role) & inventory.checkpoint.tensors.keys())
        instead = f"; {some(elsewhere)} is stored, a name of another family" if elsewhere else ""
        yield Finding(
            "trunk-missing", "error", f"{path}.weight",
            f"The {ROLES[role]} shared with the head is not stored as {path}.weight{instead}: {_runners(inventory)}",
            f"{path}.weight in a file of the checkpoint.",
            f"Rename {elsewhere[0]} to {path}.weight." if elsewhere
            else f"Set tie_word_embeddings to true in {CONFIG}." if role == "output" and any(_ties(inventory))
            else "Download or save the trunk again.",
        )  # fmt: skip


def tied_differs(inventory: Inventory) -> Iterator[Finding]:
    """Report a config that ties embedding and lm_head of a checkpoint that stores another lm_head."""
    embedding, output = (inventory.shared.get(role) for role in ("embedding", "output"))
    if any(_ties(inventory)) and embedding and output and not same_values(inventory.checkpoint, embedding, output):
        yield Finding(
            "tied-differs", "error", f"{CONFIG}: tie_word_embeddings",
            f"tie_word_embeddings is true, and {output} differs from {embedding}: engines drop it, and trunk and head "
            "predict with the embedding.",
            f"tie_word_embeddings = false, or no {output}.",
            f"Set tie_word_embeddings to false in {CONFIG} if the lm_head was trained; else remove {output}.",
        )  # fmt: skip


def _ties(inventory: Inventory) -> Iterator[bool]:
    """Yield for each level of the config whether it ties embedding and lm_head."""
    for level in levels(inventory.checkpoint.config):
        yield level.get("tie_word_embeddings") is True


def shared_missing(inventory: Inventory) -> Iterator[Finding]:
    """Report modules without copies of the shared tensors, if an engine would leave its own at initial values."""
    family = inventory.family
    runners = family.runners
    affected = {
        role: [each for each in runners.values() if role in (*each.unset, *each.skips)] for role in family.copies
    }
    lacking = {role: _lacking(inventory, role) for role in family.copies if affected[role] and role in inventory.shared}
    roles = [role for role, modules in lacking.items() if modules]
    if not roles:
        return
    names = [inventory.published(f"{lacking[role][0]}.{role}.weight") for role in roles]
    shared = joined(inventory.shared[role] for role in roles)
    skipped = any(role in engine.skips for role in roles for engine in affected[role])
    only = (
        f"The {joined(ROLES[role] for role in roles)} {'are' if len(roles) > 1 else 'is'} stored as {shared} only, "
        "not inside the MTP layer"
    )
    engine = next(name for name, support in runners.items() if support in affected[roles[0]])
    copies, fix = f"{joined(names)}, equal to {shared}.", aliases(inventory, engine)
    if skipped:
        effects = "; ".join(_unset(name, support, roles) for name, support in runners.items())
        yield Finding("shared-missing", "warning", names[0], f"{only}: {effects}.", copies, fix)
        return
    parallel = f"{ENGINES[engine]} with pipeline parallelism"
    yield Finding(
        "shared-missing", "note", names[0],
        f"{only}: engines use the trunk's, except {parallel}, which drafts from initial values.",
        f"As it is; for {parallel}: {copies}",
        f"Nothing without pipeline parallelism; with it, run `{fix}`.",
    )  # fmt: skip


def copy_differs(inventory: Inventory) -> Iterator[Finding]:
    """Report a module's copy of the embedding or lm_head that differs from the trunk's in a sample of the bytes."""
    packed = list(_packed_copies(inventory))
    yield from packed
    reported = {f"{finding.place}.weight" for finding in packed}
    for canonical, name in inventory.copies.items():
        _, role, *rest = canonical.split(".", 2)
        trunk = inventory.shared.get(role)
        if rest == ["weight"] and trunk and name not in reported and not same_values(inventory.checkpoint, name, trunk):
            yield _differing(inventory, role, name, trunk)


def _packed_copies(inventory: Inventory) -> Iterator[Finding]:
    """Report copies that are stored in another way than the trunk's, such as in 4 bits by a quantizer (AutoRound)."""
    for role in inventory.family.copies:
        parts = [name for canonical, name in inventory.copies.items() if inventory.role(canonical) == role]
        modules = dict.fromkeys(split_name(name, inventory.checkpoint.tensors)[0] for name in parts)
        trunk = inventory.shared.get(role, "").removesuffix(".weight")
        for module in modules:
            kind, own = (storage(inventory.checkpoint.tensors, each) for each in (module, trunk))
            if kind not in (None, "plain") and kind != own:
                yield Finding(
                    "copy-differs", "warning", module,
                    f"The copy of the {ROLES[role]} in the head is stored as {kind}, the trunk's "
                    f"{'unquantized' if own == 'plain' else f'as {own}'}: engines that use the copy draft with other "
                    "values.",
                    f"A copy equal to {trunk}.weight, or none.",
                    f"Run `{restore(inventory, force=True, own=True)}`, which leaves the packed copies out.",
                )  # fmt: skip


def own_head_overwritten(inventory: Inventory) -> Iterator[Finding]:
    """Report an embedding or lm_head of the head's own that an engine replaces with the trunk's."""
    for role in inventory.family.own:
        names = [name for canonical, name in inventory.stored.items() if inventory.role(canonical) == role]
        replacing = [name for name, engine in inventory.family.runners.items() if role in engine.trunk_roles]
        if names and replacing:
            yield Finding(
                "own-head-overwritten", "note", names[0],
                f"Each MTP layer has its own {ROLES[role]}; {verb(replacing, 'use')} the trunk's instead.",
                f"An engine that uses the MTP layer's own: {_others(inventory, replacing)}.",
                f"Expect lower acceptance in {engines(replacing)}, or use another engine.",
            )  # fmt: skip


def layer_index(inventory: Inventory) -> Iterator[Finding]:
    """Report an engine that loads this family's head at fixed layer indices only, none of which is this head's."""
    index = inventory.num_layers
    for name, engine in inventory.family.runners.items():
        if inventory.stored and engine.layers and index not in engine.layers:
            supported = " or ".join(map(str, engine.layers))
            yield Finding(
                "layer-index", "note", f"model.layers.{index}",
                f"{ENGINES[name]} loads this family's head as layer {supported} only; here it is layer {index}.",
                f"A trunk of {supported} layers, or another engine: {_others(inventory, [name])}.",
                "The checkpoint needs no change.",
            )  # fmt: skip


def too_many_modules(inventory: Inventory) -> Iterator[Finding]:
    """Report engines that use fewer modules than are stored."""
    count = len(inventory.modules)
    limits = {name: engine.modules for name, engine in inventory.family.runners.items()}
    fewer = {name: limit for name, limit in limits.items() if limit and limit < count}
    if fewer:
        usage = joined(f"{ENGINES[name]} uses {limit}" for name, limit in fewer.items())
        yield Finding(
            "too-many-modules", "note", f"{CONFIG}: {inventory.family.count_fields[0]}",
            f"{count} MTP layers are stored; {usage}, and applies it again at later depths.",
            f"An engine that runs them all: {_others(inventory, [*fewer])}.",
            "The checkpoint needs no change; expect lower acceptance at the later depths.",
        )  # fmt: skip


def single_expert(inventory: Inventory) -> Iterator[Finding]:
    """Report groups of experts that have one expert each, which routers that take two of a group cannot run."""
    if reason := lone_experts(inventory.family, inventory.checkpoint.config):
        yield Finding(
            "single-expert", "error", f"{CONFIG}: n_group", f"{reason}.", "At least two experts in each group.",
            "Convert the model again with fewer groups, or with its one expert cut into several along its width.",
        )  # fmt: skip


def experts_form(inventory: Inventory) -> Iterator[Finding]:
    """Report engines that run the family's head and do not read the form in which its experts are stored.

    Of the trunk's experts, report a form that transformers, and so nextn, does not load.
    """
    yield from _trunk_form(inventory)
    form, name = inventory.family.experts, inventory.family.name
    usual = by_name(name).experts
    experts = [tensor for canonical, tensor in inventory.stored.items() if expert_path(canonical) is not None]
    runners = [each for each in inventory.family.runners if each in READS_FUSED]
    also = {"fused": READS_FUSED, "split": READS_SPLIT}.get(form, {})
    unread = [each for each in runners if name not in also.get(each, ())]
    if experts and form != usual and unread:
        all_of_them = unread == runners
        yield Finding(
            "experts-form", "error" if all_of_them else "warning", experts[0],
            f"The head's experts are {form}, as {experts[0]}; {verb(unread, 'read')} them {usual} alone.",
            f"The {usual} form, in which the family is published." if all_of_them
            else f"The {usual} form, or another engine: {_others(inventory, unread)}.",
            convert(inventory, f"--experts {usual}"),
        )  # fmt: skip


def _trunk_form(inventory: Inventory) -> Iterator[Finding]:
    running, forms = inventory.running_paths, inventory.family.trunk_experts
    for layer in inventory.layers.values():
        # MLX's convolutions are [channels, width, 1], others' [channels, 1, width].
        if any(
            info.dtype == "U32" or (path.endswith("conv1d.weight") and info.shape[-1:] == (1,))
            for path, info in layer.items()
        ):
            yield Finding(
                "engine-loads", "note", "the trunk",
                "Its weights are in MLX's layout: mlx-lm, mlx-vlm and what is built on them load it, no other "
                "engine and not nextn.",
                "An engine on MLX.",
                "For others, take the model that was converted.",
            )  # fmt: skip
            return
        for path, info in layer.items():
            if (found := expert_path(running[path])) is not None and found.form not in forms:
                yield Finding(
                    "experts-form", "error", info.name,
                    f"The trunk's experts are {found.form}, as {info.name}; transformers and nextn load them "
                    f"{' or '.join(forms)} alone.",
                    f"The {forms[0]} form.", convert(inventory, f"--trunk-experts {forms[0]}"),
                )  # fmt: skip
                return


def engine_support(inventory: Inventory, *, trunk: Inventory | None = None) -> Iterator[Finding]:
    """Report engines that do not run this family's head at all, and whether Nextn does not."""
    if inventory.stored and not inventory.family.runs:
        yield Finding(
            "not-run", "note", inventory.family.name,
            f"Nextn audits, restores and converts its files, and does not run it: {inventory.family.cannot_run}.",
            f"An engine that runs it: {_others(inventory, [])}.", "The checkpoint needs no change.",
        )  # fmt: skip
    for support, (stem, what) in _UNSUPPORTED.items():
        names = [name for name, engine in inventory.family.engines.items() if engine.support == support]
        if names and inventory.stored:
            notes = [note for name in names for note in inventory.family.engines[name].notes]
            yield Finding(
                f"engine-{support}", "note", inventory.family.name,
                f"{verb(names, stem)} {what}{': ' if notes else ''}{'; '.join(dict.fromkeys(notes))}.",
                f"An engine that runs it: {_others(inventory, names)}.",
                f"The checkpoint needs no change.{_adoption(inventory, trunk)}",
            )  # fmt: skip


def _adoption(inventory: Inventory, trunk: Inventory | None) -> str:
    """Return sentences with the commands that write what transformers and, where a layout fits, other engines run."""
    if inventory.family.name != GENERIC:
        return ""
    own, base, condition = shlex.quote(inventory.checkpoint.path), "", ""
    if inventory.layers:
        routes = engines_after_adopting(inventory.checkpoint)
    elif trunk is not None:
        base = f" --model {shlex.quote(trunk.checkpoint.path)}"
        routes = engines_after_adopting(trunk.checkpoint, inventory.checkpoint.path)
    else:
        base, condition = " --model TRUNK", ", if that layout can hold the trunk"
        routes = ("vllm", "sglang", "llama.cpp") if inventory.checkpoint.config.get("model_type") in MODEL_TYPES else ()
    first = f" For transformers, `nextn export {own} OUT{base} --for transformers` writes a folder and prints the code."
    if not routes:
        return first
    command = f"nextn export {own} OUT{base} --for {routes[0]} --adopt"
    names = engines(each.replace(".", "") for each in routes)
    return f"{first} `{command}` writes trunk and head in GLM-4.5's layout for {names}{condition}."


def _differing(inventory: Inventory, role: str, name: str, trunk: str) -> Finding:
    a, b = (inventory.checkpoint.tensors[each] for each in (name, trunk))
    what = f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}" if a.form != b.form else "in its values"
    copy_users = [each for each, engine in inventory.family.runners.items() if role not in engine.trunk_roles]
    trunk_users = [each for each, engine in inventory.family.runners.items() if role in engine.trunk_roles]
    groups = ((copy_users, "the copy"), (trunk_users, "the trunk's"))
    users = "; ".join(f"{verb(names, 'use')} {which}" for names, which in groups if names)
    return Finding(
        "copy-differs", "warning", name,
        f"{name} differs from {trunk}: {what}; {users or 'no engine runs this head'}.",
        f"A copy equal to {trunk}: the head was trained with one {ROLES[role]}.",
        aliases(inventory, next(iter(copy_users or trunk_users), "vllm")),
    )  # fmt: skip


def _known_names(role: str) -> set[str]:
    return {
        f"{wrapper}{row.trunk[role].removeprefix(path)}.weight"
        for row in rows()
        for wrapper, path in {"": "", **row.wrappers}.items()
    }


def _lacking(inventory: Inventory, role: str) -> list[int]:
    stored = {int(key.split(".")[0]) for key in inventory.copies if inventory.role(key) == role}
    stored_once = "{" not in inventory.family.names[role]
    return [module for module in inventory.modules if module not in stored and not (stored_once and module)]


def _unset(name: str, engine: EngineSupport, roles: list[str]) -> str:
    if any(role in engine.skips for role in roles):
        versions = f"{ENGINES[name]} versions that do not share the trunk's weights"
        return f"{versions} draft from initial values, without an error"
    return f"{ENGINES[name]} uses the trunk's"


def _runners(inventory: Inventory) -> str:
    outcomes = {
        "raises": ("fail", "to load"), "unquantized": ("fail", "to load, unless the checkpoint is quantized"),
        "module": ("leave", "it at its initial value"),
        "silent": ("leave", "it at its initial value, without an error"),
        "unknown": ("leave", "it at its initial value, or fail to load"),
    }  # fmt: skip
    lines = []
    for missing, (stem, what) in outcomes.items():
        names = [name for name, engine in inventory.family.runners.items() if engine.missing == missing]
        if names:
            lines.append(f"{verb(names, stem)} {what}")
    return "; ".join(lines) + "." if lines else "no engine runs this head."


def _others(inventory: Inventory, names: list[str]) -> str:
    rest = [name for name in inventory.family.runners if name not in names]
    return engines(rest) if rest else "none known"


RULES = (
    trunk_missing, tied_differs, shared_missing, copy_differs, own_head_overwritten, layer_index, too_many_modules,
    single_expert, experts_form, engine_support,
)  # fmt: skip
