"""`nextn train`: trunk and head from scratch, or a head on a frozen trunk."""

import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from nextn.cli.common import AsJson, Device, ModelOptions, check_device, expanded, shipped_option, writable_folder
from nextn.cli.progress import say_doing
from nextn.cli.train_common import check_options, export_head, merge_settings, with_layout
from nextn.cli.train_run import DEFAULT_RECIPE, print_result, train_head, train_joint
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.train.run_options import RunOptions

_FILES = ("config", "set_")  # options whose settings are merged
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
        Option(help=f"Named workload that sets the defaults. Default: {DEFAULT_RECIPE}.", rich_help_panel=_JOINT),
    ] = None
    model: Annotated[
        Path | None, Option(help="config.json (transformers format) of a trunk to build.", rich_help_panel=_JOINT)
    ] = None
    freeze_trunk: Annotated[
        bool, _head_option("--freeze-trunk", help="Train only the head, on the frozen trunk of --from.")
    ] = False
    trunk: Annotated[
        str | None, _head_option("--from", help="Trunk: checkpoint folder or hub id.", callback=shipped_option)
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
        Path,
        Argument(help="Run folder: checkpoints, metrics.jsonl, and `model` at the end.", callback=writable_folder),
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
        (train_head if options.freeze_trunk else train_joint)(out, options, ranks, resume=resume, as_json=as_json)


def _finished(out: Path, options: "RunOptions", result: dict[str, Any], *, as_json: bool) -> None:
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
