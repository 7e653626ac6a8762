"""Restore the head of a checkpoint that lost it, byte for byte; add the copies of shared tensors that engines need.

It does not look at the head's values, as `audit` does, but compares stored copies with the trunk's tensors.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from nextn.checkpoint.checkpoint import CONFIG, Checkpoint, as_checkpoint
from nextn.checkpoint.expert_forms import split_view
from nextn.checkpoint.foreign_names import foreign, plain_name
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import (
    Provenance,
    staged_head,
    trained_length,
    trained_with,
    trunk_fingerprint,
    with_config_of,
)
from nextn.checkpoint.quantization import QuantConfig, is_mlx
from nextn.edit.compatibility import ABOUT_HEAD, absent, quantized_without, refuse_misfit
from nextn.edit.execute import carry_out
from nextn.edit.links import refuse_links
from nextn.edit.plan import (
    EditPlan,
    Files,
    Piece,
    Progress,
    changes,
    divide,
    index_document,
    quiet,
    visible,
    with_config,
)
from nextn.edit.reindex import side_files, sound
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table import ENGINES, REPEATED_FIELD, Family, by_config, by_name, lookup
from nextn.family_table.config_fields import text_config, text_key
from nextn.text_format import counted, some


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
) -> EditPlan:
    """Write the head of `base` into the folder `target`.

    From a base on the hub, only the head and samples of the trunk are read. Copies of embedding and lm_head are never
    taken from `base`, because the target's trunk may have been fine-tuned. They are written from the target's trunk
    for the engine `aliases`, or if an engine needs the copies of the base. After any failure the target is unchanged.

    Args:
        target: A local checkpoint folder.
        base: A checkpoint that has the head: a folder, .safetensors file, hub id or opened checkpoint.
        out: A new folder for the complete result; by default `target` itself is changed.
        aliases: An engine for which to write missing copies of embedding and lm_head.
        family: Name of the family, for a model_type without one.
        force: Replace a complete head, and tensors that look like a head's but have unknown names; accept a head for
            another vocabulary size.
        dry_run: Write nothing.
        trained_by: The run that just trained `base`; the record then says "train".
        follow_links: Follow links that lead out of a checkpoint's folder. Links of a hub cache are always followed.
        on_bytes: Called with the bytes written so far and in all.

    Returns:
        The plan that was executed, or with `dry_run` would be.

    Raises:
        CheckpointError, FamilyError, ConfigError: The head does not fit; the message has the reasons.

    Example:
        >>> nextn.load("tiny").trunk.model.save_pretrained("lost")  # transformers leaves the head out
        >>> plan = nextn.restore("lost", "tiny")
        >>> nextn.audit("lost").modules
        (0,)
    """
    if base is None and aliases is None:
        raise ConfigError(
            "nothing to restore: give a base with the head (--from), or an engine that needs copies (--add-aliases)"
        )
    row = by_name(family) if family else None
    dst, all_files, repairs = _target(target, row)
    src = None if base is None else _base(base, dst, row)
    for each in (dst, src):
        if each is not None:
            refuse_links(each.checkpoint, follow=follow_links)
    # A head in an unlisted file of the target may be the base itself.
    if src is not None and Path(dst.checkpoint.path) not in (source := Path(src.checkpoint.path), source.parent):
        _refuse_complete(all_files, src, force=force)
    plan = _plan(dst, src, aliases, force=force)
    plan = replace(plan, notes=(*repairs, *_kept(all_files, dst), *plan.notes))
    seal = None if src is None else partial(_seal, dst=dst, src=src, plan=plan, trained_by=trained_by)
    dry_run = dry_run or not plan.pieces
    return carry_out(plan, out, follow_links=follow_links, dry_run=dry_run, seal=seal, on_bytes=on_bytes)


def _target(path: str | Path, family: Family | None) -> tuple[Inventory, Inventory, list[str]]:
    """Return the target as loaders see it, the target with all its files, and notes on what its index lacked.

    A head in a file that is not in the index counts as missing.
    """
    folder = Path(path).expanduser()
    if folder.suffix == ".gguf":
        raise CheckpointError(f"{path}: a GGUF file: restore the head in the checkpoint, and convert that again.")
    if not folder.is_dir():
        raise CheckpointError(f"{path}: not a folder. Only a local folder can be changed; download a hub model first.")
    checkpoint = Checkpoint.open(folder)
    all_files = Inventory.of(checkpoint, family=family)
    all_files.refuse_draft_model(adding=True)
    checkpoint, notes = sound(checkpoint, without=side_files(all_files))
    inventory = Inventory.of(visible(checkpoint), family=family)
    if missing := all_files.trunk_lost:
        index = all_files.checkpoint.index or {}
        files = sorted({index[name] for name in missing})
        raise CheckpointError(
            f"{path}: {len(missing)} tensors of the trunk are in the index and in no file, such as "
            f"{some(missing[:1])}. Download {some(files)} again first."
        )
    return inventory, all_files, notes


def _base(source: "str | Path | Checkpoint", dst: Inventory, family: Family | None) -> Inventory:
    """Return the base's head; a file without a config is read with the target's, ignoring its number of modules."""
    checkpoint = as_checkpoint(source)
    bare = not checkpoint.config
    family = family or (dst.family if bare else by_config(checkpoint.config))
    if family.name != dst.family.name:
        raise FamilyError(
            f"{checkpoint.path}: a head of family {family.name}, the target's is {dst.family.name}. "
            f"Where both compute the same, `nextn convert --to {dst.family.name}` first."
        )
    checkpoint = with_config_of(checkpoint, dst.checkpoint) if bare else checkpoint
    src = Inventory.of(checkpoint, family=family)
    src = replace(src, declared=0) if bare else src
    if not src.own:
        src.refuse_draft_model()
        raise CheckpointError(f"{checkpoint.path}: holds no head of family {family.name}. Use the published model.")
    if missing := absent(src):
        raise CheckpointError(
            f"{checkpoint.path}: its head is partial, without {some(missing, 5)}. "
            "Use a base with a complete head, such as the published model."
        )
    return src


def _plan(dst: Inventory, src: Inventory | None, engine: str | None, *, force: bool) -> EditPlan:
    checkpoint, count = dst.checkpoint, dst.declared
    fresh, gone, notes = dict[str, Piece](), set[str](), list[str]()
    if src is not None:
        notes += _refuse_unfit(dst, src, force=force)
        gone = _replaced(dst, src, force=force)
        fresh = {dst.published(name): Piece(src.checkpoint, src.stored[name]) for name in src.own}
        notes += _notes_on_head(dst, src, gone)
        count = len(src.modules)
        if engine is None and (engine := _skipping_engine(src)) is not None:
            notes.append(
                f"writes copies of the target's tensors into the MTP layers, as the base has: {engine} needs them"
            )
    if engine is not None:
        copies = _copies(dst, count, engine, notes)
        gone |= {name for canonical, name in dst.copies.items()
                 if dst.published(f"{_copy(canonical)}.weight") in copies}  # fmt: skip
        fresh |= copies
    documents: dict[str, Mapping[str, object]] = {}
    if src is not None:
        documents = _configs(dst, src, fresh, count)
        notes += _notes_on_rest(dst, src, has_copies=engine is not None)
    files = divide(checkpoint, gone, fresh) if fresh else Files({}, None)
    documents |= index_document(files, checkpoint)
    path, lines = Path(checkpoint.path), changes(checkpoint, documents)
    return EditPlan(checkpoint, path, dst.family.name, files, documents, changes=lines, notes=tuple(notes))


def _refuse_unfit(dst: Inventory, src: Inventory, *, force: bool) -> Iterator[str]:
    """Yield notes on what does not keep the base's head from the target; raise an error for what does."""
    _refuse_complete(dst, src, force=force)
    _refuse_bare(dst, force=force)
    yield from refuse_misfit(dst, src, force=force)
    family, path = dst.family, dst.checkpoint.path
    for kind, names in foreign(dst.checkpoint.tensors, family.runtime_names):
        are = f"{counted(len(names), 'tensor')} of the target under names of {kind.what}"
        plain = (plain_name(name, family.runtime_names) for name in names)
        if not force and any(name and family.canonical(name, dst.num_layers) for name in plain):
            message = f"{path}: {are}, the head's among them: {kind.remedy} --force writes a head beside them."
            raise CheckpointError(message)
        yield f"{are}, which no loader maps, stay as they are: {kind.remedy}"


def _replaced(dst: Inventory, src: Inventory, *, force: bool) -> set[str]:
    """Return the tensors of the target's own head; by force, also what looks like one and is no layer of a trunk."""
    packed = _packed_copies(dst) if force else set()
    stale = {canonical for canonical in dst.copies if int(canonical.split(".")[0]) not in src.modules}
    unrecognized = {name for name in dst.unrecognized if force and dst.family.trunk_layer(name) is None}
    return dst.spellings({*dst.own, *packed, *stale}) | unrecognized


def _notes_on_head(dst: Inventory, src: Inventory, gone: Collection[str]) -> Iterator[str]:
    """Yield what the head takes the place of, and what of it is not as in the target's other files."""
    if gone:
        yield f"replaces {counted(len(gone), 'tensor')} of the head that was there: {some(sorted(gone))}"
    if dst.family.norm_weight == "1+w" and is_mlx(dst.checkpoint) > is_mlx(src.checkpoint):
        yield (
            "MLX's files store norm weights with 1 added, and the head's stay as in their source: "
            f"`nextn audit {shlex.quote(dst.checkpoint.path)}` names the command that adds it"
        )


def _notes_on_rest(dst: Inventory, src: Inventory, *, has_copies: bool) -> Iterator[str]:
    """Yield which copies of the base are left out, and whether the quantization config could be changed."""
    if src.copies and not has_copies:
        size = sum(src.checkpoint.tensors[name].nbytes for name in src.copies.values())
        yield (
            f"left out: the base's copies of {' and '.join(dst.family.copies)} inside the MTP layers ({size:,} bytes), "
            "as engines use the trunk's. --add-aliases ENGINE writes them from the target's trunk"
        )
    if (quantized := QuantConfig.of(dst.checkpoint)) is not None and not quantized.known:
        yield (
            f"{quantized.method}: nextn does not know how it lists unquantized modules, so its section of {CONFIG} is "
            "as before: whether an engine builds the head unquantized, only loading it shows"
        )


def _refuse_complete(dst: Inventory, src: Inventory, *, force: bool) -> None:
    """Raise CheckpointError if the target has every part of the base's head, in whatever form it is stored."""
    src_parts, dst_parts = (
        {_part(path) for name in inventory.own for path, _ in split_view(name, inventory.info(name))}
        for inventory in (src, dst)
    )
    if not force and src_parts <= dst_parts:
        files = {dst.checkpoint.tensors[name].file for name in dst.stored.values()} & set(dst.checkpoint.unindexed)
        where = (
            f", in {some(sorted(files))}, which the index does not list: `nextn convert --reindex` lists it"
            if files
            else ""
        )
        raise CheckpointError(
            f"{dst.checkpoint.path}: already has a complete head ({counted(len(dst.modules), 'MTP layer')}){where}. "
            "--force replaces it."
        )


def _refuse_bare(dst: Inventory, *, force: bool) -> None:
    """Raise CheckpointError for a decoder layer after the trunk's that has nothing of a head."""
    if dst.bare_blocks and not force:
        layer = dst.num_layers + dst.bare_blocks[0]
        raise CheckpointError(
            f"{dst.checkpoint.path}: layer {layer} has none of the parts of a head, so it may be a layer of the trunk "
            f"that num_hidden_layers ({dst.num_layers}) does not count: correct it in {CONFIG}. If it is what is left "
            "of the head, --force replaces it."
        )


def _kept(all_files: Inventory, dst: Inventory) -> list[str]:
    """Return a note if tensors of a head are in files that the index does not list, and stay there."""
    files = {all_files.info(canonical).file for canonical in all_files.stored}
    unlisted = some(sorted(files & set(dst.checkpoint.unindexed)))
    return [f"another head stays, unlisted, in {unlisted}: `nextn convert --reindex` lists it"] if unlisted else []


def _part(canonical: str) -> str:
    """Return the name without its last part (`0.block.mlp.down_proj` of a weight), or that of a bare parameter."""
    return canonical.rpartition(".")[0] if canonical.count(".") > 1 else canonical


def _skipping_engine(src: Inventory) -> str | None:
    """Return an engine that would draft from initial values without the copies of trunk tensors that the base has."""
    copied = {src.role(name) for name in src.copies}
    return next((name for name, engine in src.family.runners.items() if copied & {*engine.skips}), None)


def _packed_copies(dst: Inventory) -> set[str]:
    """Return the names of the copies that are stored with scales or as codes, their weights among them."""
    packed = {_copy(canonical) for canonical in dst.copies if _copy(canonical) + ".weight" != canonical}
    return {canonical for canonical in dst.copies if _copy(canonical) in packed}


def _copy(canonical: str) -> str:
    """Return the module and the role of a tensor of a copy, as in `0.output`."""
    return ".".join(canonical.split(".", 2)[:2])


def _copies(dst: Inventory, count: int, engine: str, notes: list[str]) -> dict[str, Piece]:
    """Return the copies of trunk tensors to write: those that the engine leaves unset, and stored ones that differ."""
    family = dst.family
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r}; known: {', '.join(ENGINES)}")
    unset = {*family.engines[engine].unset, *family.engines[engine].skips}
    roles = [role for role in family.copies if role in unset]
    modules = {role: range(count) if "{" in family.names[role] else range(min(count, 1)) for role in roles}
    lacking = {f"{index}.{role}": role for role in roles for index in modules[role]}
    lacking = {copy: role for copy, role in lacking.items() if f"{copy}.weight" not in dst.stored}
    differing = {_copy(name): dst.role(name) for name in dst.copies if _differs(dst, name)}
    if not lacking and not differing:
        reason = f"it uses the trunk's {' and '.join(family.copies) or 'tensors'}"
        notes.append(f"no copies to add for {engine}: {'the target stores them' if roles else reason}")
    return {
        dst.published(f"{copy}.{part}"): Piece(dst.checkpoint, name)
        for copy, role in {**lacking, **differing}.items()
        for part, name in _trunk_parts(dst, role).items()
    }


def _differs(dst: Inventory, copy: str) -> bool:
    """Whether a tensor of a copy differs from the trunk's in any bit, or the trunk has none, as of another format."""
    trunk = _trunk_parts(dst, dst.role(copy)).get(copy.removeprefix(f"{_copy(copy)}."))
    return trunk is None or not dst.checkpoint.same(dst.info(copy), dst.checkpoint.info(trunk))


def _trunk_parts(dst: Inventory, role: str) -> dict[str, str]:
    """Return the trunk's tensors of a role by the end of their names: `weight`, and its scales where it is in codes."""
    module = _trunk_tensor(dst, role).removesuffix("weight")
    return {name.removeprefix(module): name for name in dst.checkpoint.tensors if name.startswith(module)}


def _trunk_tensor(dst: Inventory, role: str) -> str:
    tied = role == "output" and lookup(dst.checkpoint.config, "tie_word_embeddings")
    name = dst.shared.get(role) or (dst.shared.get("embedding") if tied else None)
    if name is None:
        raise CheckpointError(f"{dst.checkpoint.path}: has no {dst.family.trunk[role]}.weight to copy.")
    return name


def _configs(dst: Inventory, src: Inventory, fresh: Mapping[str, Piece], count: int) -> dict[str, Mapping[str, object]]:
    """Return the JSON files to change so that engines find the head and read it as it is stored."""
    edited = quantized_without(dst, src, fresh)
    config: Mapping[str, object] = edited.pop(CONFIG, dst.checkpoint.config)
    count_fields = dst.family.count_fields if dst.family.counted_in(config) else ()
    config = _with_fields(config, src.checkpoint.config, count_fields)
    config = _with_entries(config, src.checkpoint.config, dst.num_layers, count)
    if dst.family.num_modules(config) != count:
        config = dst.family.with_count(config, count)
    repeated = lookup(src.checkpoint.config, REPEATED_FIELD)
    if lookup(config, REPEATED_FIELD) != repeated:  # that of the head that was here before
        config = {**config, REPEATED_FIELD: repeated or "own"}
    return {**edited, **with_config(dst.checkpoint, config)}


def _with_fields(
    config: Mapping[str, object], base: Mapping[str, object], fields: Collection[str]
) -> dict[str, object]:
    """Return `config` with the head's fields of `base` that it lacks, except `fields`."""
    inner, outer = (text_config(base), base) if text_config(base) else (base, {})
    nested = text_config(config)
    new = [
        {key: value for key, value in part.items()
         if ABOUT_HEAD.search(key) and key not in fields and lookup(config, key) is None}
        for part in (outer, inner)
    ]  # fmt: skip
    if nested and new[1]:
        return {**config, **new[0], text_key(config): {**nested, **new[1]}}
    return {**config, **new[0], **new[1]}


def _with_entries(
    config: Mapping[str, object], base: Mapping[str, object], num_layers: int, count: int
) -> dict[str, object]:
    """Return `config` with the head's entries of the base's lists of layers where it has the trunk's alone."""
    inner, key = text_config(config), text_key(config)
    level = inner if inner else config
    more = {
        field: [*entries, *all_entries[num_layers:]]
        for field, entries in level.items()
        if isinstance(entries, list) and len(entries) == num_layers
        and isinstance(all_entries := lookup(base, field), list) and len(all_entries) == num_layers + count
    }  # fmt: skip
    return {**config, key: {**inner, **more}} if inner else {**config, **more}


def _seal(stage: Path, dst: Inventory, src: Inventory, plan: EditPlan, trained_by: str | None) -> None:
    config = plan.documents.get(CONFIG, dst.checkpoint.config)
    Provenance(
        staged_head(stage, config, dst.family), trained_with(src), trunk_fingerprint(dst),
        trained_by or src.checkpoint.path, src.checkpoint.revision, "train" if trained_by else "restore",
        trained_length=trained_length(src),
    ).write(stage)  # fmt: skip
