"""The options that a run was started with, kept in its folder: `--resume` needs none of them again. Needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nextn.checkpoints.tensor_file import write_json
from nextn.errors import CheckpointError, ConfigError

FILE = "run.json"
# They change how a step is computed or what is reported, not what is learnt: a resumed run may be given others.
_FREE = ("cache_gb", "cache_dir", "offline", "follow_links", "allow_worse", "curve", "tensorboard", "device")
_FREE_SETTINGS = ("accumulate", "checkpoint_layers")
_PATHS = ("tokenizer", "model", "trunk", "head", "cache_dir")
_NAMES = {"trunk": "--from"}


@dataclass(frozen=True)
class RunOptions:
    """The options of `nextn train` by their names; a default means that an option was not given. trunk: `--from`."""

    data: tuple[str, ...] = ()
    all_tokens: bool = False
    tokenizer: str | None = None
    modules: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    model: str | None = None
    freeze_trunk: bool = False
    trunk: str | None = None
    head: str | None = None
    init_head: bool = False
    head_only: bool = False
    drawn: bool = False
    revision: str | None = None
    cache_gb: float | None = None
    cache_dir: str | None = None
    offline: bool = False
    follow_links: bool = False
    allow_worse: bool = False
    curve: bool = False
    tensorboard: bool = False
    device: str | None = None

    def absolute(self) -> "RunOptions":
        """The same with absolute paths. Data sets and hub ids stay as they are."""
        given = {name: value for name in _PATHS if (value := getattr(self, name)) is not None}
        paths: dict[str, Any] = {name: _absolute(value) for name, value in given.items()}
        return replace(self, data=tuple(map(_absolute, self.data)), **paths)

    def resumed(self, given: "RunOptions") -> "RunOptions":
        """These options, with what may change taken from `given`.

        Raises ConfigError for the first option or setting that was given again with another value.
        """
        given, changed = given.absolute(), dict[str, Any]()
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(given, each.name)
            if each.name == "settings" or theirs in (None, False, ()) or theirs == mine:
                continue
            if each.name not in _FREE:
                raise _disagreement(_NAMES.get(each.name, f"--{each.name.replace('_', '-')}"), mine, theirs)
            changed[each.name] = theirs
        return replace(self, settings=_merged(self.settings, given.settings, ""), **changed)


def write_options(out: Path, options: RunOptions, settings: Mapping[str, object]) -> None:
    """Keep the options in a run's folder, with absolute paths: it can be resumed from another working folder.

    settings: all of them, defaults included, as the run uses them.
    """
    write_json(out / FILE, asdict(options.absolute()) | {"settings": dict(settings)})


def read_options(out: Path) -> RunOptions | None:
    """The options of a run; None where its folder has none, as those of nextn 0.13 and older."""
    record = _read(out)
    if record is None:
        return None
    known = {each.name for each in fields(RunOptions)}
    values = {name: value for name, value in record.items() if name in known}
    return RunOptions(**values | {"data": tuple(values.get("data", ()))})


def write_result(out: Path, result: Mapping[str, object]) -> None:
    """Note that the run is finished. result: what its last report says."""
    record = _read(out)
    if record is not None:
        write_json(out / FILE, record | {"result": dict(result)})


def read_result(out: Path) -> dict[str, Any] | None:
    """The last report of a run that is finished and whose model is still there; else None."""
    result: dict[str, Any] | None = (_read(out) or {}).get("result")
    return None if result is None or not (out / result["model"]).exists() else result


def _read(out: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((out / FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{out / FILE}: not readable: {error}. Remove it, and resume with the options that the run was started with"
        ) from error
    return record if isinstance(record, dict) else {}


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if Path(path).exists() else path


def _merged(mine: Mapping[str, Any], given: Mapping[str, Any], group: str) -> dict[str, Any]:
    merged = dict(mine)
    for key, value in given.items():
        known = mine.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(known, value, f"{group}{key}.")
        elif key in _FREE_SETTINGS:
            merged[key] = value
        elif key not in mine:
            raise ConfigError(f"unknown setting {group + key!r}; this run has {', '.join(mine)}")
        elif value != known and str(value) != str(known):  # lam may be given as a number
            raise _disagreement(f"--set {group}{key}", known, value)
    return merged


def _disagreement(name: str, mine: object, given: object) -> ConfigError:
    return ConfigError(
        f"{name}: the run was started with {_shown(mine)}, and {_shown(given)} is given now. Leave the option out to "
        "resume, or start another run in another folder"
    )


def _shown(value: object) -> str:
    return "nothing" if value in (None, False, ()) else json.dumps(value)
