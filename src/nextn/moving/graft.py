"""Put a head back into a checkpoint that lost it, byte for byte; add the copies of shared tensors that engines want.

Knows names, shapes and configs, never values; what cannot be told from headers is `audit`'s matter.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from nextn.checkpoints.checkpoint import CONFIG, Checkpoint, opened
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.provenance import Provenance, staged_head, trained_with, trunk_fingerprint
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.families import ENGINES, Family, by_config, by_name, lookup
from nextn.moving.fit import ABOUT_HEAD, absent, listed_nowhere, quantised_without, refuse_misfit
from nextn.moving.links import refuse_links
from nextn.moving.staging import (
    Files,
    Piece,
    Plan,
    Progress,
    changes,
    divide,
    execute,
    index_document,
    into_new_folder,
    quiet,
    visible,
    with_config,
)
from nextn.words import some


def restore(
    target: str | Path,
    base: "str | Path | Checkpoint | None" = None,
    *,
    out: str | Path | None = None,
    aliases: str | None = None,
    family: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    trained_by: str | None = None,
    follow_links: bool = False,
    on_bytes: Progress = quiet,
) -> Plan:
    """Give the folder `target` the head of `base` -> what was (or with `dry_run`, would be) done.

    out: a new folder that gets everything; without it, `target` itself. aliases: an engine, whose missing copies of
    embedding and output are written from the target's own trunk. family: the row's name, where model_type has none.
    force: replace a whole head; take one of another vocabulary. trained_by: the run that made `base` just now, for the
    record, which then tells of a training. follow_links: links that lead out of a checkpoint's folder are followed,
    not refused; those of a hub cache always are.

    Of a hub base only the head and samples of the trunk are read. Copies are not taken from `base`: every engine can
    use the trunk's, which may have been fine-tuned. Raises CheckpointError, FamilyError or ConfigError with the reason
    where the head does not fit; the target is then as it was, as it is after any failure.
    """
    if base is None and aliases is None:
        raise ConfigError("nothing to restore: give a base that has the head, or an engine that wants copies")
    row = by_name(family) if family else None
    there = _target(target, row)
    here = None if base is None else _base(base, there, row)
    for each in (there, here):
        if each is not None:
            refuse_links(each.checkpoint, follow=follow_links)
    plan = replace(_plan(there, here, aliases, force=force), follow_links=follow_links)
    plan = plan if out is None else into_new_folder(plan, out)
    if not dry_run and plan.pieces:
        seal = None if here is None else partial(_seal, there=there, here=here, plan=plan, trained_by=trained_by)
        execute(plan, seal=seal, on_bytes=on_bytes)
    return plan


def _target(path: str | Path, family: Family | None) -> Inventory:
    """What loaders see of the target: a head in a file that the index does not name is lost, too."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{path}: not a folder. A head is put into a local folder; download a hub model first.")
    inventory = Inventory.of(visible(Checkpoint.open(folder)), family=family)
    lost = listed_nowhere(inventory, head=False)
    if lost:
        raise CheckpointError(
            f"{path}: {len(lost)} tensors of the trunk are in the index and in no file, such as {some(lost[:1])}. "
            "Complete the target first."
        )
    return inventory


def _base(place: "str | Path | Checkpoint", there: Inventory, family: Family | None) -> Inventory:
    """The base's head; a side file without a config is read by the target's, which promises nothing for it."""
    checkpoint = opened(place)
    bare = not checkpoint.config
    family = family or (there.family if bare else by_config(checkpoint.config))
    if family.name != there.family.name:
        raise FamilyError(
            f"{checkpoint.path}: a head of family {family.name}, the target is {there.family.name}. "
            f"Where both compute the same, `nextn convert --to {there.family.name}` first."
        )
    config = there.checkpoint.config if bare else checkpoint.config
    here = Inventory.of(replace(checkpoint, config=config), family=family)
    here = replace(here, promised=0) if bare else here
    if not here.own:
        raise CheckpointError(f"{checkpoint.path}: holds no head of family {family.name}. Take the published model.")
    if lost := absent(here):
        raise CheckpointError(
            f"{checkpoint.path}: its head is partial, without {some(lost, 5)}. "
            "Take a base with a whole head, such as the published model."
        )
    return here


def _plan(there: Inventory, here: Inventory | None, engine: str | None, *, force: bool) -> Plan:
    family, checkpoint = there.family, there.checkpoint
    fresh: dict[str, Piece] = {}
    gone: set[str] = set()
    notes: list[str] = []
    count = there.promised
    if here is not None:
        _refuse_whole(there, here, force=force)
        notes += refuse_misfit(there, here, force=force)
        gone = there.spellings(there.own)
        fresh = {there.published(name): Piece(here.checkpoint, here.stored[name]) for name in here.own}
        count = len(here.modules)
    if engine is not None:
        copies = _copies(there, count, engine, notes)
        gone |= {name for canonical, name in there.copies.items() if there.published(canonical) in copies}
        fresh |= copies
    elif here is not None and here.copies:
        size = sum(here.checkpoint.tensors[name].nbytes for name in here.copies.values())
        notes.append(
            f"left out: the base's copies of {' and '.join(family.copies)} inside the modules ({size:,} bytes), as "
            "engines take the trunk's. --add-aliases ENGINE writes them from the target's trunk"
        )
    documents = _configs(there, here, fresh, count) if here is not None else {}
    files = divide(checkpoint, gone, fresh) if fresh else Files({}, None)
    documents |= index_document(files, checkpoint)
    told = changes(checkpoint, documents)
    return Plan(checkpoint, Path(checkpoint.path), family.name, files, documents, changes=told, notes=tuple(notes))


def _refuse_whole(there: Inventory, here: Inventory, *, force: bool) -> None:
    """A head is whole if it has every part of the base's, in whatever form; mangled ones have other parts."""
    mine, theirs = ({_part(name) for name in each.own} for each in (here, there))
    if not force and mine <= theirs:
        raise CheckpointError(
            f"{there.checkpoint.path}: has a whole head already ({len(there.modules)} modules). --force replaces it."
        )


def _part(canonical: str) -> str:
    """A tensor's module: `0.block.mlp.down_proj` of its `.weight`; a bare parameter stands for itself."""
    return canonical.rpartition(".")[0] if canonical.count(".") > 1 else canonical


def _copies(there: Inventory, count: int, engine: str, notes: list[str]) -> dict[str, Piece]:
    """Copies of the trunk's tensors that the engine would leave at initial values, and stored ones that differ."""
    family = there.family
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r}; known: {', '.join(ENGINES)}")
    unset = {*family.engines[engine].unset, *family.engines[engine].skips}
    wanted = [role for role in family.copies if role in unset]
    modules = {role: range(count) if "{" in family.names[role] else range(min(count, 1)) for role in wanted}
    lacking = {f"{index}.{role}.weight": role for role in wanted for index in modules[role]}
    lacking = {name: role for name, role in lacking.items() if name not in there.stored}
    differing = {name: there.role(name) for name in there.copies if _differs(there, name)}
    if not lacking and not differing:
        takes = f"it takes the trunk's {' and '.join(family.copies) or 'tensors'}"
        notes.append(f"no copies to add for {engine}: {'the target stores them' if wanted else takes}")
    return {
        there.published(name): Piece(there.checkpoint, _trunk_tensor(there, role))
        for name, role in {**lacking, **differing}.items()
    }


def _differs(there: Inventory, copy: str) -> bool:
    """Whether a copy is not the trunk's tensor, bit for bit."""
    trunk = there.checkpoint.info(_trunk_tensor(there, there.role(copy)))
    return not there.checkpoint.same(there.info(copy), trunk)


def _trunk_tensor(there: Inventory, role: str) -> str:
    tied = role == "output" and lookup(there.checkpoint.config, "tie_word_embeddings")
    name = there.shared.get(role) or (there.shared.get("embedding") if tied else None)
    if name is None:
        raise CheckpointError(f"{there.checkpoint.path}: has no {there.family.trunk[role]}.weight to copy.")
    return name


def _configs(
    there: Inventory, here: Inventory, fresh: Mapping[str, Piece], count: int
) -> dict[str, Mapping[str, object]]:
    """The JSON files that must change so that engines look for the head and read it as it is stored."""
    edited = quantised_without(there, here, fresh)
    config: Mapping[str, object] = edited.pop(CONFIG, there.checkpoint.config)
    counted = there.family.count_fields if there.family.counted_in(config) else ()
    config = _with_fields(config, here.checkpoint.config, counted)
    if there.family.num_modules(config) != count:
        config = there.family.with_count(config, count)
    return {**edited, **with_config(there.checkpoint, config)}


def _with_fields(
    config: Mapping[str, object], base: Mapping[str, object], fields: Collection[str]
) -> dict[str, object]:
    """`config` with what `base` says of the head by name, where `config` says nothing; `fields` aside."""
    text = base.get("text_config")
    inner, outer = (text, base) if isinstance(text, Mapping) else (base, {})
    nested = config.get("text_config")
    new = [
        {key: value for key, value in part.items()
         if ABOUT_HEAD.search(key) and key not in fields and lookup(config, key) is None}
        for part in (outer, inner)
    ]  # fmt: skip
    if isinstance(nested, Mapping) and new[1]:
        return {**config, **new[0], "text_config": {**nested, **new[1]}}
    return {**config, **new[0], **new[1]}


def _seal(stage: Path, there: Inventory, here: Inventory, plan: Plan, trained_by: str | None) -> None:
    config = plan.documents.get(CONFIG, there.checkpoint.config)
    Provenance(
        staged_head(stage, config, there.family), trained_with(here), trunk_fingerprint(there),
        trained_by or here.checkpoint.path, here.checkpoint.revision, "train" if trained_by else "restore",
    ).write(stage)  # fmt: skip
