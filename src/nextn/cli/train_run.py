"""The run of `nextn train`, from options to the written result: trunk and head jointly, or a head alone."""

import shlex
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nextn.cli.common import follows_links, stop_flag
from nextn.cli.progress import progress_bars, say_doing
from nextn.cli.screen import echo, print_json, print_note, print_notes
from nextn.cli.streaming import show_init_layers, stream_for_training
from nextn.cli.train_common import check_run, export_head, progress, say_stopped, show_curve
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.train.distributed import Ranks
    from nextn.train.evaluation import HeldOutAcceptance
    from nextn.train.head_run import HeadRun
    from nextn.train.head_task import HeadTask
    from nextn.train.hidden_cache import HiddenStateCache
    from nextn.train.joint_run import JointRun
    from nextn.train.loop import Trainer
    from nextn.train.metrics import Record
    from nextn.train.run_options import RunOptions

DEFAULT_RECIPE = "demo"


def train_joint(out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool) -> None:
    """Train trunk and head from scratch, and write and print the result."""
    from nextn.train.joint_run import prepare_joint_run

    say_doing("reading the data", quiet=as_json or not ranks.is_first)
    run = prepare_joint_run(
        out,
        data=options.data,
        recipe=options.recipe or DEFAULT_RECIPE,
        model=_path(options.model),
        tokenizer=_path(options.tokenizer),
        num_modules=options.modules or 1,
        settings=options.settings,
        all_tokens=options.all_tokens,
        ranks=ranks,
    )
    print_notes(run.corpus.notes if ranks.is_first else ())
    with run.trainer.folder.locked(needed=ranks.is_first):
        _run_joint(run, out, options, ranks, resume=resume, as_json=as_json)


def _run_joint(
    run: "JointRun", out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool
) -> None:
    from nextn.train.recipes import write_prompts
    from nextn.train.run_options import write_options, write_result

    _check_folder(run.trainer, out, resume=resume)
    if ranks.is_first and not run.trainer.has_checkpoint():
        write_options(out, options, run.settings)
    tracker = None
    for trainer in run.stages(out / "model"):
        _run_trainer(trainer, out, tensorboard=options.tensorboard, as_json=as_json)
        tracker = trainer.best_tracker
    if ranks.is_first:
        write_prompts(out / "prompts.jsonl", run.held_out)
        record: dict[str, object] = {"model": "model"}
        message = f"wrote {out / 'model'}"
        if tracker is not None and tracker.best is not None:
            record |= tracker.as_record()
            message += f": {tracker}" + ("; the first stage's head was kept" if tracker.is_worse else "")
        write_result(out, record)
        print_result(record | {"model": str(out / "model")}, message, as_json=as_json)


def train_head(out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool) -> None:
    """Train a head on a frozen trunk, write and print the result, and export it if that is asked for."""
    run = _prepare_head(out, options, ranks, quiet=as_json)
    if options.export is not None:
        check_run(run, out, options.export)
    with run.trainer.folder.locked(needed=ranks.is_first):
        _run_head(run, out, options, ranks, resume=resume, as_json=as_json)


def _run_head(run: "HeadRun", out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool) -> None:
    from nextn.model.layer_states import remove_states
    from nextn.train.head_run import INIT_STATES
    from nextn.train.recipes import write_prompts
    from nextn.train.run_options import write_options, write_result

    _check_folder(run.trainer, out, resume=resume)
    if ranks.is_first:
        run.check_disk_space(head_only=options.head_only)
    print_notes(run.notes if ranks.is_first else ())
    if ranks.is_first and not run.trainer.has_checkpoint():
        write_options(out, options, asdict(run.trainer.config))
    if options.cache_gb is not None or options.stream:
        cache = run.task.cached(out / "hidden", options.cache_gb)
        if options.stream:
            stream_for_training(run.task, cache, out / "states", quiet=as_json)
        _fill_cache(cache, out, ranks, quiet=as_json)
    _run_trainer(run.trainer, out, tensorboard=options.tensorboard, as_json=as_json, note=run.task.note)
    if ranks.is_first:
        write_prompts(out / "prompts.jsonl", run.held_out)
    points = _curve(run.task, quiet=as_json or not ranks.is_first) if options.curve else []
    if points and ranks.is_first and not as_json:
        show_curve(points)
    written = run.write(head_only=options.head_only, allow_worse=options.allow_worse)
    if not ranks.is_first:
        return
    for name in ("states", INIT_STATES):
        remove_states(out / name)
    tracker = run.trainer.best_tracker
    message = f"wrote {written}" + ("" if tracker.baseline is None else f": {tracker}")
    record: dict[str, object] = {"model": str(written.relative_to(out)), **tracker.as_record()}
    if points:
        record["curve"] = [point.as_record() for point in points]
    write_result(out, record)
    if options.export is not None:
        record["export"], text = export_head(out, written, options)
        write_result(out, record)
        message = f"{message}\n{text}"
    print_result(record | {"model": str(written)}, message, as_json=as_json)


def _curve(task: "HeadTask", *, quiet: bool) -> "list[HeldOutAcceptance]":
    from nextn.train.head_task import MAX_CURVE_DEPTHS

    with progress_bars(quiet=quiet) as added:
        return task.curve(on_point=added("acceptance by K", MAX_CURVE_DEPTHS))


def _prepare_head(out: Path, options: "RunOptions", ranks: "Ranks", *, quiet: bool) -> "HeadRun":
    from nextn.train.head_run import StartingPoint, hide_layers, prepare_head_run

    assert options.trunk is not None  # `_check` made sure
    say_doing(f"loading {options.trunk} and the data", quiet=quiet or not ranks.is_first)
    start = StartingPoint(
        options.trunk,
        head=_path(options.head),
        fresh=options.init_head,
        num_modules=options.modules,
        layout=options.layout,
        follow_links=follows_links(),
        stream=options.stream,
    )
    return prepare_head_run(
        out,
        start,
        data=options.data,
        settings=options.settings,
        all_tokens=options.all_tokens,
        tokenizer=_path(options.tokenizer),
        on_policy=options.on_policy,
        ranks=ranks,
        show_layers=partial(show_init_layers, quiet=quiet) if options.stream and ranks.is_first else hide_layers,
    )


def _fill_cache(cache: "HiddenStateCache", out: Path, ranks: "Ranks", *, quiet: bool) -> None:
    with stop_flag() as stopped, progress_bars(quiet=quiet or not ranks.is_first) as added:
        step = added("hidden states", cache.num_batches)
        for done, total in cache.fill(stopped, ranks=ranks):  # noqa: B007
            step(done=done)
    if done < total:
        say_stopped(out, "the same command", quiet=not ranks.is_first)


def _check_folder(trainer: "Trainer", out: Path, *, resume: bool) -> None:
    # Processes restarted by torchrun resume from the last checkpoint, whatever their command line says.
    has_checkpoint, is_restart = trainer.has_checkpoint(), trainer.ranks.is_restart
    if resume and not has_checkpoint and not is_restart:
        raise ConfigError(f"{out} holds no checkpoint to resume from; leave out --resume to start a run")
    if has_checkpoint and not resume and not is_restart:
        raise ConfigError(f"{out} holds a run already; use --resume to continue it, or another folder")


def _run_trainer(
    trainer: "Trainer",
    out: Path,
    *,
    tensorboard: bool,
    as_json: bool,
    note: "Callable[[Record], str | None]" = lambda record: None,
) -> None:
    """Train to the end, from the last checkpoint if there is one; exit with code 130 if stopped earlier.

    note: Returns a remark on a record, or None.
    """
    from nextn.train.metrics import event_log

    ranks, folder = trainer.ranks, trainer.folder.path
    trainer.resume()
    events = event_log(folder / "tensorboard" if tensorboard and ranks.is_first else None, step=trainer.step)
    with stop_flag() as stopped, progress(quiet=as_json or not ranks.is_first) as on_record, events as log:
        for record in trainer.run(stopped, on_evaluation=on_record):
            on_record(record)
            log(record)
            if (remark := note(record)) is not None and ranks.is_first:
                print_note(remark)
    if not trainer.is_over:
        say_stopped(out, f"nextn train {shlex.quote(str(out))} --resume", quiet=not ranks.is_first)


def print_result(record: dict[str, object], message: str, *, as_json: bool) -> None:
    """Print the result of a run."""
    if as_json:
        print_json(record)
    else:
        echo(message)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
