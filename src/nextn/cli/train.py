"""`nextn train`: trunk and head from scratch, or a head on a frozen trunk."""

import os
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from nextn.bounded_json import JsonDict
from nextn.cli.common import (
    SOURCES,
    AsJson,
    Device,
    check_device,
    expanded,
    follows_links,
    shipped_option,
    stop_flag,
    writable_folder,
)
from nextn.cli.model_options import ModelOptions
from nextn.cli.progress import progress_bars, say_doing
from nextn.cli.screen import print_note, print_notes, print_result
from nextn.cli.streaming import show_init_layers, stream_for_training
from nextn.cli.train_common import (
    check_options,
    check_run,
    export_head,
    merge_settings,
    progress,
    say_stopped,
    show_curve,
    with_layout,
)
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

_FILES = ("config", "set_")  # options whose settings are merged
_DEFAULT_RECIPE = "demo"
_JOINT = "Trunk and head from scratch"
_head_option = partial(Option, rich_help_panel="A head on a frozen trunk")


@dataclass(frozen=True)
class TrainOptions:
    """The options of a run, which its folder keeps for `--resume`."""

    data: Annotated[
        list[str] | None,
        Option(
            help="Text files, folders, .jsonl, .parquet, or a data set as org/name[:config][:split]; repeatable. "
            "Default: Python's standard library."
        ),
    ] = None
    all_tokens: Annotated[
        bool, Option("--all-tokens", help="Also train on prompts and user turns, not only on answers.")
    ] = False
    tokenizer: Annotated[Path | None, Option(help="Folder of a tokenizer. Default: bytes, or the trunk's own.")] = None
    config: Annotated[Path | None, Option(help="JSON file with training settings; the documentation lists them.")] = (
        None
    )
    set_: Annotated[
        list[str] | None, Option("--set", help="KEY=VALUE, overrides the defaults and --config; repeatable.")
    ] = None
    device: Device = "auto"
    recipe: Annotated[
        str | None,
        Option(help=f"Named workload that sets the defaults. Default: {_DEFAULT_RECIPE}.", rich_help_panel=_JOINT),
    ] = None
    model: Annotated[
        Path | None, Option(help="config.json (transformers format) of a trunk to build.", rich_help_panel=_JOINT)
    ] = None
    freeze_trunk: Annotated[
        bool, _head_option("--freeze-trunk", help="Train only the head, on the frozen trunk of --from.")
    ] = False
    trunk: Annotated[
        str | None, _head_option("--from", help=f"Trunk: checkpoint folder, {SOURCES}", callback=shipped_option)
    ] = None
    head: Annotated[
        str | None,
        _head_option(help="Start from the head in this file instead of the checkpoint's own.", callback=shipped_option),
    ] = None
    init_head: Annotated[
        bool, _head_option("--init-head", help="Start from a new head, initialized from the trunk's last layers.")
    ] = False
    layout: Annotated[
        str | None,
        _head_option(
            help="mimo: a new head that vLLM and SGLang run as a separate draft model. step35: one for llama.cpp. "
            "Default: the layout of the trunk's family, or one layer of the trunk's own class."
        ),
    ] = None
    head_only: Annotated[bool, _head_option("--head-only", help="Write OUT/head/head.safetensors, no model.")] = False
    on_policy: Annotated[
        bool,
        _head_option(
            "--on-policy",
            help="Declare that all of --data, not only files of `nextn answer`, was sampled from this trunk at the "
            "settings' temperature.",
        ),
    ] = False
    export: Annotated[
        str | None,
        _head_option(
            metavar="ENGINE",
            help="vllm, sglang, transformers or llama.cpp: write OUT/export for it at the end, as `nextn export` does, "
            "and print the serve command. Sets --layout of a new head, if it is not given.",
        ),
    ] = None
    allow_worse: Annotated[
        bool, _head_option("--allow-worse", help="Save the head even if held-out acceptance dropped.")
    ] = False
    curve: Annotated[
        bool, _head_option("--curve", help="At the end, report mean acceptance lengths for K = 1 to 8.")
    ] = False
    stream: Annotated[
        bool,
        _head_option(
            "--stream",
            help="Read the trunk layer by layer, once, to cache its hidden states; it need not fit into memory.",
        ),
    ] = False

    @property
    def run(self) -> "RunOptions":
        """Raises ConfigError for settings that cannot be read."""
        from nextn.train.run_options import RunOptions

        given = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in _FILES}
        given |= {name: str(value) for name, value in given.items() if isinstance(value, Path)}
        given |= {"data": tuple(self.data or ()), "device": None if self.device == "auto" else self.device}
        return RunOptions.of(merge_settings(self.config, self.set_ or []), **given)


@expanded()
def train(
    *,
    out: Annotated[
        Path, Argument(help="Run folder: checkpoints, metrics.jsonl, and `model` at the end.", callback=writable_folder)
    ],
    options: TrainOptions,
    resume: Annotated[
        bool, Option("--resume", help="Resume from the newest checkpoint in OUT, with the options of its start.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train trunk and MTP head from scratch, or only a head with --freeze-trunk. Ctrl-C saves, --resume continues."""
    _start(out, options.run, resume=resume, as_json=as_json)


def _start(out: Path, given: "RunOptions", *, resume: bool, as_json: bool) -> None:
    """Start a run, or resume one with the options of its start; of a finished run, print the result."""
    from nextn.train.run_options import read_options, read_result

    stored = read_options(out) if resume else None
    options = given if stored is None else stored.resumed(given)
    if resume and (result := read_result(out)) is not None:
        _finished(out, options, result, as_json=as_json)
        return
    _check(options)
    if stored is None:
        options = with_layout(options)
    say_doing("importing torch and transformers", quiet=as_json or os.environ.get("RANK", "0") != "0")
    from nextn.train.distributed import processes

    with processes(options.device or "auto") as ranks:
        (_train_head if options.freeze_trunk else _train_joint)(out, options, ranks, resume=resume, as_json=as_json)


def _finished(out: Path, options: "RunOptions", result: JsonDict, *, as_json: bool) -> None:
    """Print the result of a finished run; export its head, if that is asked for and was not done."""
    from nextn.train.run_options import write_result

    record = result | {"model": str(out / result["model"])}
    message = f"{out} is finished: {record['model']} is its result, and nothing was changed"
    if options.export is not None and "export" not in result:
        check_options(options)
        record["export"], message = export_head(out, out / result["model"], options)
        write_result(out, result | {"export": record["export"]})
    print_result(record, message, as_json=as_json)


def _check(options: "RunOptions") -> None:
    """Raise ConfigError for options that exclude each other and for missing files, before torch is imported."""
    from nextn.data.sources import check_sources

    check_sources(options.data)
    check_device(options.device or "auto")
    for option, path in {"--tokenizer": options.tokenizer, "--model": options.model}.items():
        if path is not None and not Path(path).exists():
            raise ConfigError(f"{option} {path}: no such file or folder")
    if not options.freeze_trunk:
        given = {
            "--from": options.trunk, "--head": options.head, "--init-head": options.init_head or None,
            "--layout": options.layout, "--set trained_parts": options.settings.get("trained_parts"),
            "--head-only": options.head_only or None, "--on-policy": options.on_policy or None,
            "--set cache_gb": options.cache_gb, "--allow-worse": options.allow_worse or None,
            "--curve": options.curve or None, "--stream": options.stream or None, "--export": options.export,
        }  # fmt: skip
        if names := [name for name, value in given.items() if value is not None]:
            need = f"{', '.join(names)} {'needs' if len(names) == 1 else 'need'}"
            raise ConfigError(f"{need} --freeze-trunk, which trains a head for a given model")
        return
    if options.trunk is None:
        raise ConfigError("--freeze-trunk needs a trunk: pass its folder or hub id with --from")
    if options.model is not None or options.recipe is not None:
        raise ConfigError("--model and --recipe build a trunk; with --freeze-trunk, --from names it")
    ModelOptions(options.trunk).check()
    if options.export is not None:
        check_options(options)
    if options.stream and not (options.head_only or Path(options.trunk).exists()):
        raise ConfigError(
            f"--stream: of {options.trunk}, only what is needed is downloaded, so the trained head is written alone; "
            "add --head-only, or download the model, and give its folder"
        )
    if options.head is not None:
        from nextn.checkpoint.checkpoint import Checkpoint

        Checkpoint.open(Path(options.head))


def _train_joint(out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool) -> None:
    from nextn.train.joint_run import prepare_joint_run

    _check_folder(out, ranks, resume=resume)
    say_doing("reading the data", quiet=as_json or not ranks.is_first)
    run = prepare_joint_run(
        out,
        data=options.data,
        recipe=options.recipe or _DEFAULT_RECIPE,
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

    _check_folder(out, ranks, resume=resume)  # again, as another process may have written to it since
    if ranks.is_first and not run.trainer.has_checkpoint():
        write_options(out, options, run.settings)
    tracker = None
    for trainer in run.stages(out / "model"):
        _run_trainer(trainer, out, tensorboard=bool(options.tensorboard), as_json=as_json)
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


def _train_head(out: Path, options: "RunOptions", ranks: "Ranks", *, resume: bool, as_json: bool) -> None:
    _check_folder(out, ranks, resume=resume)
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

    _check_folder(out, ranks, resume=resume)  # again, as another process may have written to it since
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
    _run_trainer(run.trainer, out, tensorboard=bool(options.tensorboard), as_json=as_json, note=run.task.note)
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
        show_layers=partial(show_init_layers, quiet=quiet) if ranks.is_first else hide_layers,
    )


def _fill_cache(cache: "HiddenStateCache", out: Path, ranks: "Ranks", *, quiet: bool) -> None:
    with stop_flag() as stopped, progress_bars(quiet=quiet or not ranks.is_first) as added:
        step = added("hidden states", cache.num_batches)
        for done, total in cache.fill(stopped, ranks=ranks):  # noqa: B007
            step(done=done)
    if done < total:
        say_stopped(out, "the same command", quiet=not ranks.is_first)


def _check_folder(out: Path, ranks: "Ranks", *, resume: bool) -> None:
    from nextn.train.checkpointing import RunFolder

    # Processes restarted by torchrun resume from the last checkpoint, whatever their command line says.
    has_checkpoint = out.exists() and bool(RunFolder(out).checkpoints())
    if resume and not has_checkpoint and not ranks.is_restart:
        raise ConfigError(f"{out} holds no checkpoint to resume from; leave out --resume to start a run")
    if has_checkpoint and not resume and not ranks.is_restart:
        raise ConfigError(f"{out} holds a run already; use --resume to continue it, or another folder")


def _run_trainer(
    trainer: "Trainer",
    out: Path,
    *,
    tensorboard: bool,
    as_json: bool,
    note: "Callable[[Record], str | None]" = lambda record: None,
) -> None:
    """Train to the end, from the last checkpoint if there is one; exit with code 130 if stopped earlier."""
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


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
