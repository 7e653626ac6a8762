"""The verbs that move a head: restore, convert, extract."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, CacheDir, Offline, Revision
from nextn.cli.screen import console, plain, print_json, shortened

if TYPE_CHECKING:
    from nextn.checkpoints.checkpoint import Checkpoint
    from nextn.moving.relayout import Form, Shift
    from nextn.moving.staging import Plan, Progress

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and the bytes; write nothing.")]
FollowLinks = Annotated[
    bool, typer.Option("--follow-links", help="Take the contents of links that lead out of a checkpoint's folder.")
]
_SHOWN = 12


def restore(
    target: Annotated[Path, typer.Argument(help="Folder of the model that lost its head.")],
    base: Annotated[
        str | None, typer.Option("--from", help="Who has the head: folder, .safetensors file or hub id.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the result; left out: in place.")] = None,
    add_aliases: Annotated[
        str | None, typer.Option(help="Engine whose missing copies of embedding and output are written.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="Name of the family, if the config's model_type has none.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a whole head; take added tokens.")] = False,
    revision: Revision = None,
    cache_dir: CacheDir = None,
    offline: Offline = False,
    follow_links: FollowLinks = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Put a lost head back, byte for byte: one new file, index and config; a hub base is read by ranges."""
    from nextn.moving.graft import restore as put_back

    have = None if base is None else _open(base, revision, cache_dir, offline)
    moved = partial(put_back, target, have, out=out, aliases=add_aliases, family=family, force=force)
    _carry_out(moved, follow_links=follow_links, dry_run=dry_run, as_json=as_json)


def convert(
    source: Annotated[str, typer.Argument(help="Folder, .safetensors file or hub id.")],
    out: Annotated[Path, typer.Argument(help="New folder for the result.")],
    to: Annotated[str | None, typer.Option(help="Family whose names the head gets; left out: the model's own.")] = None,
    now: Annotated[
        str | None, typer.Option("--from", help="Family whose names the head has, if they do not tell.")
    ] = None,
    single_file: Annotated[bool, typer.Option("--single-file", help="Everything in model.safetensors.")] = False,
    side_file: Annotated[bool, typer.Option("--side-file", help="The head in mtp.safetensors, not indexed.")] = False,
    shards: Annotated[bool, typer.Option("--shards", help="The head in an indexed file of its own.")] = False,
    gain: Annotated[str | None, typer.Option(help="add-1 or subtract-1: shift the head's norm gains.")] = None,
    revision: Revision = None,
    cache_dir: CacheDir = None,
    offline: Offline = False,
    follow_links: FollowLinks = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Move a head between layouts that compute the same, and between files; dtypes and scales stay bit for bit."""
    from nextn.moving.relayout import convert as move

    form = _form({"single-file": single_file, "side-file": side_file, "shards": shards})
    have = _open(source, revision, cache_dir, offline)
    moved = partial(move, have, out, to=to, now=now, form=form, gain=_gain(gain))
    _carry_out(moved, follow_links=follow_links, dry_run=dry_run, as_json=as_json)


def extract(
    model: Annotated[str, typer.Argument(help="Folder, .safetensors file or hub id.")],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write; a small config.json comes beside it.")],
    copies: Annotated[bool, typer.Option("--copies", help="Also copies of the trunk's embedding and output.")] = False,
    revision: Revision = None,
    cache_dir: CacheDir = None,
    offline: Offline = False,
    follow_links: FollowLinks = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write the head alone into one file, which serves as a base for restore."""
    from nextn.moving.relayout import extract as take_out

    have = _open(model, revision, cache_dir, offline)
    _carry_out(partial(take_out, have, out, copies=copies), follow_links=follow_links, dry_run=dry_run, as_json=as_json)


VERBS = (restore, convert, extract)


def _open(place: str, revision: str | None, cache_dir: Path | None, offline: bool) -> "Checkpoint":
    from nextn.checkpoints.checkpoint import Checkpoint

    return Checkpoint.open(place, revision=revision, cache_dir=cache_dir, offline=offline)


def _form(said: dict[str, bool]) -> "Form | None":
    given = [name for name, is_given in said.items() if is_given]
    if len(given) > 1:
        raise typer.BadParameter(f"--{given[0]} and --{given[1]} exclude each other")
    return given[0] if given else None  # type: ignore[return-value]  # the keys are the forms


def _gain(said: str | None) -> "Shift | None":
    if said not in (None, "add-1", "subtract-1"):
        raise typer.BadParameter(f"--gain {said}; expected add-1 or subtract-1")
    return said  # type: ignore[return-value]  # checked above


def _carry_out(verb: "Callable[..., Plan]", *, follow_links: bool, dry_run: bool, as_json: bool) -> None:
    with _bytes_bar(quiet=as_json or dry_run) as on_bytes:
        plan = verb(follow_links=follow_links, dry_run=dry_run, on_bytes=on_bytes)
    if as_json:
        print_json(plan.as_record() | {"dry_run": dry_run})
        return
    _show(plan, dry_run=dry_run)


def _show(plan: "Plan", *, dry_run: bool) -> None:
    from rich.table import Table

    from nextn.checkpoints.checkpoint import INDEX

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("file", "tensors", "bytes", "from"):
        table.add_column(title, justify="right" if title in ("tensors", "bytes") else "left")
    files, more_files = shortened([*plan.files.weights.items()])
    for file, pieces in files:
        size = sum(piece.info.nbytes for piece in pieces.values())
        places = ", ".join(dict.fromkeys(piece.source.path for piece in pieces.values()))
        table.add_row(*map(plain, (file, f"{len(pieces):,}", f"{size:,}", places)))
    for file in plan.documents:
        table.add_row(*map(plain, (file, "", "", "index" if file == INDEX else "")))
    screen = console()
    screen.print(table)
    moves, more_moves = shortened(
        [f"{old} becomes {new}" for old, new in plan.files.renamed.items()]
        + [f"{file} goes" for file in plan.files.dropped]
    )
    lines = [*plan.changes[:_SHOWN], *([f"and {len(plan.changes) - _SHOWN} more"] if plan.changes[_SHOWN:] else [])]
    lines = [*filter(None, [more_files, *lines, *moves, more_moves]), *(f"note: {note}" for note in plan.notes)]
    verb = "would write" if dry_run else "wrote"
    lines.append(f"{verb} {plan.num_bytes:,} bytes of tensors in {plan.folder}" if plan.pieces else "nothing to write")
    for line in lines:
        screen.print(plain(line), soft_wrap=True)


@contextmanager
def _bytes_bar(*, quiet: bool) -> "Iterator[Progress]":
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console(stderr=True), disable=quiet, transient=True)
    task = bar.add_task("bytes", total=None)

    def update(done: int, total: int) -> None:
        if not bar.live.is_started:  # not before: a bar that was started leaves a blank line above an error
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()
