"""The verb `train`: trunk and head from scratch, or a head on a frozen trunk."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, CacheDir, Device, Offline, Revision, check_device, check_model, stop_flag
from nextn.cli.runs import merged, progress, say_stopped, show_curve
from nextn.cli.screen import echo, print_json, print_note
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.distributed.parallel import Ranks
    from nextn.training.head_runs import HeadRun
    from nextn.training.hidden_cache import HiddenCache
    from nextn.training.joint_runs import JointRun
    from nextn.training.run_options import RunOptions
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
    device: Device = "auto",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest checkpoint in OUT, with the options it was started with."),
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write event files in OUT/tensorboard.")
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option(help=f"Named workload that gives the defaults; left out: {_RECIPE}.", rich_help_panel=_JOINT),
    ] = None,
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
    follow_links: Annotated[
        bool,
        typer.Option(
            "--follow-links",
            help="Take the contents of links that lead out of the folder of --from.",
            rich_help_panel=_HEAD,
        ),
    ] = False,
    revision: Revision = None,
    cache_dir: CacheDir = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Train trunk and MTP head from scratch, or with --freeze-trunk a head alone; Ctrl-C saves, --resume goes on."""
    from nextn.training.run_options import RunOptions, read_options, read_result

    given = RunOptions(
        data=tuple(data or ()),
        all_tokens=all_tokens,
        tokenizer=_text(tokenizer),
        modules=modules,
        settings=merged(config, set_ or []) | ({} if accumulate is None else {"accumulate": accumulate}),
        recipe=recipe,
        model=_text(model),
        freeze_trunk=freeze_trunk,
        trunk=from_,
        head=_text(head),
        init_head=init_head,
        head_only=head_only,
        drawn=drawn,
        revision=revision,
        cache_gb=cache_gb,
        cache_dir=_text(cache_dir),
        offline=offline,
        follow_links=follow_links,
        allow_worse=allow_worse,
        curve=curve,
        tensorboard=tensorboard,
        device=None if device == "auto" else device,
    )
    stored = read_options(out) if resume else None
    options = given if stored is None else stored.resumed(given)
    if resume and (result := read_result(out)) is not None:
        told = result | {"model": str(out / result["model"])}
        _tell(told, f"{out} is finished: {told['model']} is its result, and nothing was changed", as_json=as_json)
        return
    _check(options)
    from nextn.distributed.parallel import processes

    with processes(options.device or "auto") as ranks:
        (_train_head if options.freeze_trunk else _train_joint)(out, options, ranks, resume=resume, as_json=as_json)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _check(options: "RunOptions") -> None:
    """Raise ConfigError, before torch is imported, for options that do not go together and for what is not there."""
    from nextn.corpus.corpus_files import check_sources

    check_sources(options.data)
    check_device(options.device or "auto")
    places = {"--tokenizer": options.tokenizer, "--model": options.model}
    for option, place in places.items():
        if place is not None and not Path(place).exists():
            raise ConfigError(f"{option} {place}: no such file or folder")
    if not options.freeze_trunk:
        of_heads = (options.trunk, options.head, options.cache_gb)
        flags = (options.init_head, options.head_only, options.drawn, options.allow_worse, options.curve)
        if any(each is not None for each in of_heads) or any(flags):
            raise ConfigError(
                "--from, --head, --init-head, --head-only, --drawn, --cache-gb, --allow-worse, --curve go with "
                "--freeze-trunk"
            )
        return
    if options.trunk is None:
        raise ConfigError("--freeze-trunk needs a trunk: give its folder or hub id with --from")
    if options.model is not None or options.recipe is not None:
        raise ConfigError("--model and --recipe build a trunk; with --freeze-trunk it comes --from a checkpoint")
    check_model(options.trunk, "auto")
    if options.head is not None:
        from nextn.checkpoints.checkpoint import Checkpoint

        Checkpoint.open(Path(options.head))


def _train_joint(out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool) -> None:
    from nextn.training.joint_runs import joint_run

    run = joint_run(
        out,
        data=options.data,
        recipe=options.recipe or _RECIPE,
        model=_path(options.model),
        tokenizer=_path(options.tokenizer),
        num_modules=options.modules or 1,
        settings=options.settings,
        all_tokens=options.all_tokens,
        ranks=ranks,
    )
    _notes(run.corpus.notes if ranks.is_first else ())
    with run.trainer.folder.locked(needed=ranks.is_first):
        _run_joint(run, out, options, ranks, resume=resume, as_json=as_json)


def _run_joint(
    run: "JointRun", out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool
) -> None:
    from nextn.training.recipes import write_prompts
    from nextn.training.run_options import write_options, write_result

    _check_folder(run.trainer, out, resume=resume)
    if ranks.is_first and not run.trainer.has_checkpoint():
        write_options(out, options, run.settings)
    standing = None
    for trainer in run.stages(out / "model"):
        _run(trainer, out, tensorboard=options.tensorboard, as_json=as_json)
        standing = trainer.standing
    if ranks.is_first:
        write_prompts(out / "prompts.jsonl", run.held_out)
        told: dict[str, object] = {"model": "model"}
        said = f"wrote {out / 'model'}"
        if standing is not None and standing.best is not None:
            told |= standing.as_record()
            said += f": {standing}" + ("; the first stage's head was kept" if standing.is_worse else "")
        write_result(out, told)
        _tell(told | {"model": str(out / "model")}, said, as_json=as_json)


def _train_head(out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool) -> None:
    run = _head_run(out, options, ranks)
    with run.trainer.folder.locked(needed=ranks.is_first):
        _run_head(run, out, options, ranks, resume=resume, as_json=as_json)


def _run_head(run: "HeadRun", out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool) -> None:
    from nextn.training.recipes import write_prompts
    from nextn.training.run_options import write_options, write_result

    _check_folder(run.trainer, out, resume=resume)
    if ranks.is_first:
        run.need_room(head_only=options.head_only)
    _notes(run.notes if ranks.is_first else ())
    if ranks.is_first and not run.trainer.has_checkpoint():
        write_options(out, options, asdict(run.trainer.config))
    if options.cache_gb is not None:
        _fill(run.task.cached(out / "hidden", options.cache_gb), out, ranks, quiet=as_json)
    _run(run.trainer, out, tensorboard=options.tensorboard, as_json=as_json)
    if ranks.is_first:
        write_prompts(out / "prompts.jsonl", run.held_out)
    points = run.task.curve() if options.curve else []
    if points and ranks.is_first and not as_json:
        show_curve(points)
    made = run.write(head_only=options.head_only, allow_worse=options.allow_worse)
    if not ranks.is_first:
        return
    standing = run.trainer.standing
    said = f"wrote {made}" + ("" if standing.baseline is None else f": {standing}")
    told: dict[str, object] = {"model": str(made.relative_to(out)), **standing.as_record()}
    if points:
        told["curve"] = [point.as_record() for point in points]
    write_result(out, told)
    _tell(told | {"model": str(made)}, said, as_json=as_json)


def _head_run(out: Path, options: "RunOptions", ranks: "Ranks") -> "HeadRun":
    from nextn.training.head_runs import Start, head_run

    assert options.trunk is not None  # `_check` has seen it
    start = Start(
        options.trunk,
        _path(options.head),
        options.init_head,
        options.modules,
        options.revision,
        _path(options.cache_dir),
        options.offline,
        options.follow_links,
    )
    return head_run(
        out,
        start,
        data=options.data,
        settings=options.settings,
        all_tokens=options.all_tokens,
        tokenizer=_path(options.tokenizer),
        drawn=options.drawn,
        ranks=ranks,
    )


def _tell(told: dict[str, object], said: str, *, as_json: bool) -> None:
    if as_json:
        print_json(told)
    else:
        echo(said)


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
        print_note(note)


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
        say_stopped(out, f"nextn train {out} --resume", quiet=not ranks.is_first)
