"""Commands that edit checkpoints: restore, convert, extract, adopt, quantize."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from nextn.cli.common import (
    SOURCES,
    AsJson,
    CheckpointName,
    expanded,
    follows_links,
    open_checkpoint,
    shipped_option,
    shipped_path,
)
from nextn.cli.progress import progress_bars
from nextn.cli.screen import figures_table, plain, print_json, print_lines, print_table, shortened
from nextn.errors import ConfigError
from nextn.family_table.spec import ExpertForm

if TYPE_CHECKING:
    from nextn.checkpoint.checkpoint import Checkpoint
    from nextn.edit.plan import EditPlan, Progress
    from nextn.edit.quantize import Importance

Form = Literal["single-file", "side-file", "shards"]

DryRun = Annotated[bool, Option("--dry-run", help="Show the plan and the bytes; write nothing.")]


def restore(
    *,
    target: Annotated[Path, Argument(help="Folder of the model that lost its head.")],
    base: Annotated[
        str | None,
        Option(
            "--from",
            help=f"Source of the head: folder, .safetensors file, {SOURCES}",
            callback=shipped_option,
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="New folder for the result. Default: in place.")] = None,
    add_aliases: Annotated[
        str | None, Option(help="Engine for which to write the missing copies of embed_tokens and lm_head.")
    ] = None,
    family: Annotated[str | None, Option(help="Family, if the config's model_type does not name one.")] = None,
    force: Annotated[
        bool,
        Option(
            "--force", help="Replace a complete head; accept one for another vocabulary or lm_head, or of more experts."
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Restore a lost head, byte for byte. From a hub, only the head is downloaded."""
    from nextn.edit.restore import restore as restore_head

    source = None if base is None else open_checkpoint(base)
    edit = partial(restore_head, target, source, out=out, aliases=add_aliases, family=family, force=force)
    _run(edit, dry_run=dry_run, as_json=as_json)


@dataclass(frozen=True)
class HeadChanges:
    """How a converted head differs from the one that is stored."""

    to: Annotated[str | None, Option(help="Family whose names the head gets. Default: the model's own.")] = None
    now: Annotated[str | None, Option("--from", help="Family whose names the head has, if they are ambiguous.")] = None
    form: Annotated[
        Form | None,
        Option(
            help="single-file: everything in model.safetensors. side-file: the head in mtp.safetensors, not in the "
            "index. shards: the head in an indexed file of its own."
        ),
    ] = None
    experts: Annotated[
        ExpertForm | None, Option(help="split, fused or stacked: the form in which the head's experts are stored.")
    ] = None
    trunk_experts: Annotated[ExpertForm | None, Option(help="The form in which the trunk's experts are stored.")] = None
    keep_experts: Annotated[
        str | None,
        Option(
            help="Numbers of the head's experts to keep, joined by commas, or a .json file with a list: for a trunk "
            "whose experts were pruned."
        ),
    ] = None
    norm_weights: Annotated[
        str | None,
        Option(
            help="add-1, subtract-1, add-2 or subtract-2: shift the head's RMSNorm weights. After a colon: the names "
            "of those to shift, joined by commas."
        ),
    ] = None

    def convert(self, source: str, out: Path) -> "Callable[..., EditPlan]":
        """Return the edit that makes these changes. Raises ConfigError for a list of experts that cannot be read."""
        from nextn.edit.convert import convert as convert_head
        from nextn.edit.expert_pieces import read_expert_list

        kept = None if self.keep_experts is None else read_expert_list(self.keep_experts)
        return partial(
            convert_head, open_checkpoint(source), out, to=self.to, now=self.now, form=self.form,
            norm_weight=self.norm_weights, experts=self.experts, trunk_experts=self.trunk_experts, keep_experts=kept,
        )  # fmt: skip


@dataclass(frozen=True)
class GgufOptions:
    """How a GGUF file becomes a checkpoint."""

    dtype: Annotated[
        str | None,
        Option(
            help="For a .gguf file: float32, float16 or bfloat16 for all weights, packed or not; or stored: quantized "
            "weights of decoder layers stay as they are in the file, and only nextn loads the folder."
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        Option(help="For a .gguf file: folder with its tokenizer, if nextn cannot read the one in the file."),
    ] = None


@expanded()
def convert(
    *,
    source: Annotated[
        str,
        Argument(
            help=f"Folder, .safetensors or .gguf file, {SOURCES}",
            callback=shipped_path,
        ),
    ],
    out: Annotated[
        Path | None, Argument(help="New folder for the result. With --reindex alone: the folder itself is changed.")
    ] = None,
    changes: HeadChanges,
    gguf: GgufOptions,
    reindex: Annotated[
        bool, Option("--reindex", help="Write the index that the files imply; no tensor changes.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert a head between equivalent layouts and between files, bit for bit; or a GGUF file to a checkpoint."""
    if reindex:
        _refuse("--reindex changes the index alone; run it first, then convert with", changes, gguf)
        from nextn.edit.reindex import reindex as write_index

        _run(partial(write_index, open_checkpoint(source), out), dry_run=dry_run, as_json=as_json)
        return
    if out is None:
        message = "OUT is missing: give a new folder for the result; only --reindex changes the folder itself"
        raise typer.BadParameter(message)
    if Path(source).suffix != ".gguf":
        _refuse(f"{source}: convert keeps dtype and tokenizer as they are; only for a .gguf file give", gguf)
        _run(changes.convert(source, out), dry_run=dry_run, as_json=as_json)
        return
    message = "a .gguf file is converted to the model's own names, in indexed files: convert it first, then the folder"
    _refuse(f"{message} with", changes)
    from nextn.edit.gguf_import import convert_gguf

    with _bytes_bar(quiet=as_json or dry_run) as on_bytes:
        plan = convert_gguf(Path(source), out, **asdict(gguf), dry_run=dry_run, on_bytes=on_bytes)
    _report(plan, dry_run=dry_run, as_json=as_json)


def extract(
    model: CheckpointName,
    out: Annotated[Path, Argument(help="The .safetensors file to write, with a small config.json next to it.")],
    as_json: AsJson = False,
) -> None:
    """Write the head alone to one file, from which it can be restored."""
    from nextn.edit.convert import extract as extract_head

    _run(partial(extract_head, open_checkpoint(model), out), dry_run=False, as_json=as_json)


def adopt(
    *,
    model: CheckpointName,
    out: Annotated[Path, Argument(help="New folder for the result.")],
    head: Annotated[
        str | None,
        Option(
            help="A head of the trunk's own layer, stored alone. Default: the one in the model.",
            callback=shipped_option,
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write a model without an MTP family (Llama, Mistral, Qwen2, Qwen3) in GLM-4.5's layout, which engines run."""
    from nextn.edit.adopt import adopt as adopt_model

    _run(partial(adopt_model, open_checkpoint(model), out, head=head), dry_run=dry_run, as_json=as_json)


def quantize(
    *,
    model: CheckpointName,
    out: Annotated[Path, Argument(help="New folder for the result.")],
    weights: Annotated[
        str,
        Option(
            help="int8: one scale per output channel. w8a8: the same, with activations of 8 bits per token in engines "
            "(vLLM on CPUs). int4: one scale per group. q4_1: blocks of GGUF, for nextn."
        ),
    ],
    group_size: Annotated[int, Option(help="Input channels of a group of int4.")] = 32,
    calibrate: Annotated[
        str | None,
        Option(help="File of text or records, or a data set, on whose activations int4 or q4_1 is to err least."),
    ] = None,
    head_bits: Annotated[int, Option(help="Bits of the head: 16 (unchanged), 8 or 4.")] = 16,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write a model with decoder layers of 4 or 8 bits, rounded to nearest (compressed-tensors or GGUF's blocks)."""
    from nextn.edit.quantize import quantize as quantize_model

    if calibrate is not None and weights not in ("int4", "q4_1"):
        raise ConfigError(
            f"--calibrate changes the scales of int4 and q4_1, not of {weights}; give one of these or leave it out"
        )
    checkpoint = open_checkpoint(model)
    importance = None if calibrate is None or dry_run else _importance(checkpoint, calibrate, quiet=as_json)
    edit = partial(
        quantize_model, checkpoint, out, weights=weights, group_size=group_size, head_bits=head_bits,
        importance=importance,
    )  # fmt: skip
    _run(edit, dry_run=dry_run, as_json=as_json)


def _importance(checkpoint: "Checkpoint", source: str, *, quiet: bool) -> "Importance":
    """Run a calibration text through the model, of which one layer is in memory at a time."""
    from nextn.data.sources import check_sources
    from nextn.evaluate.accuracy import TOKENS, compared_texts, input_squares
    from nextn.model.model import Model
    from nextn.model.streamed_trunk import StreamedTrunk

    check_sources([source])
    loaded = Model.load(checkpoint, skip_head=True, need_head=False, stream=True)
    texts = compared_texts(loaded.tokenizer, source, num_tokens=TOKENS)
    assert isinstance(loaded.trunk, StreamedTrunk)
    with progress_bars(quiet=quiet) as progress:
        step = progress("layers on the calibration text", loaded.trunk.num_layers)
        return input_squares(loaded.trunk, texts.tokens, on_layer=lambda _: step())


def _refuse(reason: str, *groups: HeadChanges | GgufOptions) -> None:
    """Raise ConfigError with `reason` and the options of the groups that were given, if there are any."""
    given = [name for group in groups for name, value in asdict(group).items() if value is not None]
    if given:
        names = [f"--{'from' if name == 'now' else name.replace('_', '-')}" for name in given]
        raise ConfigError(f"{reason} {', '.join(names)}")


def _run(edit: "Callable[..., EditPlan]", *, dry_run: bool, as_json: bool) -> None:
    with _bytes_bar(quiet=as_json or dry_run) as on_bytes:
        plan = edit(follow_links=follows_links(), dry_run=dry_run, on_bytes=on_bytes)
    _report(plan, dry_run=dry_run, as_json=as_json)


def _report(plan: "EditPlan", *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json(plan.as_record() | {"dry_run": dry_run})
    else:
        _show(plan, dry_run=dry_run)


def _show(plan: "EditPlan", *, dry_run: bool) -> None:
    from nextn.checkpoint.checkpoint import INDEX

    table = figures_table("file", "tensors", "bytes", "from", left=("file", "from"), no_wrap=False)
    files, more_files = shortened([*plan.files.weights.items()])
    for file, pieces in files:
        size = sum(piece.info.nbytes for piece in pieces.values())
        sources = ", ".join(dict.fromkeys(piece.source.path for piece in pieces.values()))
        table.add_row(*map(plain, (file, f"{len(pieces):,}", f"{size:,}", sources)))
    for file in plan.documents:
        table.add_row(*map(plain, (file, "", "", "index" if file == INDEX else "")))
    if table.rows:
        print_table(table)
    renamed, dropped = "is renamed to", "is removed"
    if plan.new_folder:
        renamed, dropped = "is copied as", "is not copied, as its tensors are written anew"
    moves, more_moves = shortened(
        [f"{old} {renamed} {new}" for old, new in plan.files.renamed.items()]
        + [f"{file} {dropped}" for file in plan.files.dropped]
    )
    changes, more_changes = shortened(plan.changes, 12)
    lines = list(filter(None, [more_files, *changes, more_changes, *moves, more_moves]))
    lines += [f"note: {note}" for note in plan.notes]
    verb = "would write" if dry_run else "wrote"
    what = f"{plan.num_bytes:,} bytes of tensors" if plan.pieces else "no tensors, but the files above,"
    unchanged = f"; {plan.origin.path} is not changed" if plan.new_folder else ""
    lines.append(f"{verb} {what} in {plan.folder}{unchanged}" if plan.pieces or plan.documents else "nothing to write")
    print_lines(*lines)


@contextmanager
def _bytes_bar(*, quiet: bool) -> "Iterator[Progress]":
    with progress_bars(quiet=quiet) as added:
        step = added("written", None, in_gb=True)
        yield lambda done, total: step(done=done, total=total)
