"""The verb `train`: trunk and head from scratch, or a head on a frozen trunk."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nextn.cli.common import AsJson, CacheDir, Offline, Revision, stop_flag
from nextn.cli.runs import merged, progress, say_stopped, show_curve
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.distributed.parallel import Ranks
    from nextn.training.head_runs import Start
    from nextn.training.hidden_cache import HiddenCache
    from nextn.training.train import Trainer

_RECIPE = "demo"
_JOINT, _HEAD = "Trunk and head from scratch", "A head on a frozen trunk"


def train(
    out: Annotated[Path, typer.Argument(help="Run folder: checkpoints, metrics.jsonl, and `model` at the end.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text files, folders, .jsonl, .parquet, or a data set as org/name[:config][:split]; may be repeated; "
            "left out: the standard library."
        ),
    ] = None,
    all_tokens: Annotated[
        bool, typer.Option("--all-tokens", help="Prompts and users' turns count, too, not only answers.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer; left out: bytes, or the trunk's own.")
    ] = None,
    modules: Annotated[
        int | None, typer.Option(min=1, help="Distinct modules of a new head; depths beyond them reuse the last.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file with training settings (see docs/training.md).")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE over the defaults and --config.")] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(min=1, help="Parts that the batch_size rows of a step pass in: less memory, the same gradient."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in OUT.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write event files in OUT/tensorboard.")
    ] = False,
    recipe: Annotated[
        str, typer.Option(help="Named workload that gives the defaults.", rich_help_panel=_JOINT)
    ] = _RECIPE,
    model: Annotated[
        Path | None,
        typer.Option(help="config.json of a trunk to build, in transformers' format.", rich_help_panel=_JOINT),
    ] = None,
    freeze_trunk: Annotated[
        bool,
        typer.Option("--freeze-trunk", help="Train the head of --from alone.", rich_help_panel=_HEAD),
    ] = False,
    from_: Annotated[
        str | None, typer.Option("--from", help="Folder or hub id of the trunk.", rich_help_panel=_HEAD)
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option(help="Start from the head in this file, not from the trunk's own.", rich_help_panel=_HEAD),
    ] = None,
    init_head: Annotated[
        bool,
        typer.Option("--init-head", help="Start from a new head, made of the trunk's parts.", rich_help_panel=_HEAD),
    ] = False,
    head_only: Annotated[
        bool,
        typer.Option("--head-only", help="Write OUT/head/head.safetensors, no model.", rich_help_panel=_HEAD),
    ] = False,
    drawn: Annotated[
        bool,
        typer.Option(
            "--drawn",
            help="Files in --data that were not made by `nextn answer` hold answers drawn from this trunk, too, at the "
            "temperature of the settings.",
            rich_help_panel=_HEAD,
        ),
    ] = False,
    allow_worse: Annotated[
        bool,
        typer.Option("--allow-worse", help="Write a head that is worse than the first.", rich_help_panel=_HEAD),
    ] = False,
    curve: Annotated[
        bool,
        typer.Option("--curve", help="At the end, tell the acceptance length of 1 to 8 drafts.", rich_help_panel=_HEAD),
    ] = False,
    cache_gb: Annotated[
        float | None,
        typer.Option(
            help="Keep the trunk's hidden states of an epoch in OUT/hidden, in at most that many 1e9 bytes.",
            rich_help_panel=_HEAD,
        ),
    ] = None,
    revision: Revision = None,
    cache_dir: CacheDir = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Train trunk and MTP head from scratch, or with --freeze-trunk a head alone; Ctrl-C saves, --resume goes on."""
    from nextn.distributed.parallel import processes

    settings = merged(config, set_ or []) | ({} if accumulate is None else {"accumulate": accumulate})
    text = {"data": data or [], "all_tokens": all_tokens, "tokenizer": tokenizer}
    how = {"resume": resume, "tensorboard": tensorboard, "as_json": as_json}
    if not freeze_trunk:
        given = (from_ is not None, head is not None, init_head, head_only, drawn, cache_gb is not None, allow_worse)
        if any((*given, curve)):
            raise ConfigError(
                "--from, --head, --init-head, --head-only, --drawn, --cache-gb, --allow-worse, --curve go with "
                "--freeze-trunk"
            )
        with processes() as ranks:
            made: dict[str, Any] = {"recipe": recipe, "model": model, "num_modules": modules or 1, "settings": settings}
            _train_joint(out, {**text, **made, "ranks": ranks}, **how)
        return
    if from_ is None:
        raise ConfigError("--freeze-trunk needs a trunk: give its folder or hub id with --from")
    if model is not None or recipe != _RECIPE:
        raise ConfigError("--model and --recipe build a trunk; with --freeze-trunk it comes --from a checkpoint")
    from nextn.training.head_runs import Start

    start = Start(from_, head, init_head, modules, revision, cache_dir, offline)
    with processes() as ranks:
        made = {"drawn": drawn, "settings": settings, "ranks": ranks}
        _train_head(
            out,
            start,
            {**text, **made},
            cache_gb=cache_gb,
            head_only=head_only,
            allow_worse=allow_worse,
            curve=curve,
            **how,
        )


def _train_joint(out: Path, run: dict[str, Any], *, resume: bool, tensorboard: bool, as_json: bool) -> None:
    from nextn.training.joint_runs import joint_run
    from nextn.training.recipes import write_prompts

    made = joint_run(out, **run)
    is_first, standing = made.trainer.ranks.is_first, None
    _notes(made.corpus.notes if is_first else ())
    _check_folder(made.trainer, out, resume=resume)
    for trainer in made.stages(out / "model"):
        _run(trainer, out, tensorboard=tensorboard, as_json=as_json)
        standing = trainer.standing
    if is_first:
        write_prompts(out / "prompts.jsonl", made.held_out)
        told: dict[str, object] = {"model": str(out / "model")}
        said = f"wrote {out / 'model'}"
        if standing is not None and standing.best is not None:
            told |= standing.as_record()
            said += f": {standing}" + ("; the first stage's head was kept" if standing.is_worse else "")
        typer.echo(json.dumps(told) if as_json else said)


def _train_head(
    out: Path,
    start: "Start",
    text: dict[str, Any],
    *,
    cache_gb: float | None,
    resume: bool,
    tensorboard: bool,
    head_only: bool,
    allow_worse: bool,
    curve: bool,
    as_json: bool,
) -> None:
    from nextn.training.head_runs import head_run
    from nextn.training.recipes import write_prompts

    run = head_run(out, start, **text)
    ranks = run.trainer.ranks
    _check_folder(run.trainer, out, resume=resume)
    _notes(run.notes if ranks.is_first else ())
    if cache_gb is not None:
        _fill(run.task.cached(out / "hidden", cache_gb), out, ranks, quiet=as_json)
    _run(run.trainer, out, tensorboard=tensorboard, as_json=as_json)
    if ranks.is_first:
        write_prompts(out / "prompts.jsonl", run.held_out)
    points = run.task.curve() if curve else []
    if points and ranks.is_first and not as_json:
        show_curve(points)
    made = run.write(head_only=head_only, allow_worse=allow_worse)
    if not ranks.is_first:
        return
    standing = run.trainer.standing
    said = f"wrote {made}" + ("" if standing.baseline is None else f": {standing}")
    told: dict[str, object] = {"model": str(made), **standing.as_record()}
    if points:
        told["curve"] = [point.as_record() for point in points]
    typer.echo(json.dumps(told) if as_json else said)


def _fill(cache: "HiddenCache", out: Path, ranks: "Ranks", *, quiet: bool) -> None:
    from rich.progress import track

    with stop_flag() as stopped:
        rounds, hidden = cache.fill(stopped, ranks=ranks), quiet or not ranks.is_first
        told = list(track(rounds, "hidden states", total=cache.num_batches + 1, disable=hidden))
    done, total = told[-1]
    if done < total:
        say_stopped(out, "the same command", quiet=not ranks.is_first)


def _notes(notes: Iterable[str]) -> None:
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _check_folder(trainer: "Trainer", out: Path, *, resume: bool) -> None:
    # Processes that torchrun has started again go on from the last checkpoint, whatever they were called with.
    found, is_restart = trainer.has_checkpoint(), trainer.ranks.is_restart
    if resume and not found and not is_restart:
        raise ConfigError(f"{out} holds no checkpoint to resume from; leave --resume out to start")
    if found and not resume and not is_restart:
        raise ConfigError(f"{out} holds a run already; use --resume to go on with it, or another folder")


def _run(trainer: "Trainer", out: Path, *, tensorboard: bool, as_json: bool) -> None:
    """Train to the end, from the last checkpoint if there is one; exits with code 130 where it was stopped before.

    out: the run's folder, as the user knows it.
    """
    from nextn.training.writers import event_log

    ranks, folder = trainer.ranks, trainer.folder.path
    trainer.resume()
    events = event_log(folder / "tensorboard" if tensorboard and ranks.is_first else None, step=trainer.step)
    with stop_flag() as stopped, progress(quiet=as_json or not ranks.is_first) as on_record, events as log:
        for record in trainer.run(stopped):
            on_record(record)
            log(record)
    if not trainer.is_over:
        say_stopped(out, f"nextn train {out} --resume (with the same options)", quiet=not ranks.is_first)
