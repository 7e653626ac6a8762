"""`nextn train --export`: what is checked before a head is trained, and what is written and printed after it."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.train.head_run import HeadRun
    from nextn.train.run_options import RunOptions

FOLDER = "export"


def check_options(options: "RunOptions") -> None:
    """Raise ConfigError for options that leave nothing to export, or the trunk's revision unknown."""
    from nextn.edit.export import ENGINES

    if options.export not in ENGINES:
        raise ConfigError(f"--export {options.export}; expected {', '.join(ENGINES)}")
    is_local = options.trunk is not None and Path(options.trunk).exists()
    if not is_local and (options.revision is not None or options.stream):
        given = "--stream" if options.stream else f"--revision {options.revision}"
        raise ConfigError(f"--export with {given}: download {options.trunk}, and give its folder with --from")


def with_layout(options: "RunOptions") -> "RunOptions":
    """Return the options with the layout that a new head needs for its engine, where none was given."""
    if options.export is None or not options.init_head or options.layout is not None or options.trunk is None:
        return options
    from nextn.checkpoint.checkpoint import Checkpoint
    from nextn.edit.export import layout_for

    trunk = Checkpoint.open(options.trunk, cache_dir=options.cache_dir, offline=options.offline)
    return replace(options, layout=layout_for(options.export, trunk.config))


def check_run(run: "HeadRun", out: Path, engine: str) -> None:
    """Raise the error that the export of a run's head would end with, and for a folder that is there already."""
    from nextn.edit.export import check_export

    head = run.task.head
    check_export(engine, head.family, run.task.origin, num_modules=len(head.stack))
    if (out / FOLDER).exists():
        raise ConfigError(f"{out / FOLDER} exists; remove it, or start the run in another folder")


def export_head(out: Path, head: Path, options: "RunOptions") -> tuple[dict[str, object], str]:
    """Export a run's head; return what to record and what to print.

    Args:
        out: The run's folder.
        head: What the run wrote.
        options: The run's, with an engine and a trunk.
    """
    from nextn.edit.export import as_text, export

    assert options.export is not None  # the caller made sure
    target = out / FOLDER
    if options.export == "llama.cpp":
        target.mkdir(exist_ok=True)
        target = target / "model.gguf"
    made = export(
        head, target, options.export, trunk=options.trunk, cache_dir=options.cache_dir, offline=options.offline
    )
    return asdict(made) | {"path": str(made.path)}, f"wrote {made.path}\n{as_text(made)}"
