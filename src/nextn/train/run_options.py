"""The command-line options of a run, stored in its folder so that `--resume` does not need them. Does not use torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from nextn.bounded_json import JsonDict, JsonObject, read_json
from nextn.checkpoint.safetensors_file import write_json
from nextn.errors import CheckpointError, ConfigError

FILE = "run.json"
# Options that change how a step is computed or what is reported, but not the result: a resumed run may change them.
_FREE = ("cache_gb", "allow_worse", "curve", "tensorboard", "device", "stream", "export")
# Settings that a resumed run may change: how a step is computed, without an effect on its result, and the time budget.
FREE_SETTINGS = ("accumulate", "checkpoint_layers", "minutes")
_PATHS = ("tokenizer", "model", "trunk", "head")
# Options that are given as settings, with their types.
RUN_SETTINGS: dict[str, tuple[tuple[type, ...], str]] = {
    "modules": ((int,), "a whole number of MTP layers, at least 1"),
    "cache_gb": ((int, float), "a finite number of GB above 0"),
    "tensorboard": ((bool,), "true or false"),
}
_NAMES = {"trunk": "--from"} | {name: f"--set {name}" for name in RUN_SETTINGS}


@dataclass(frozen=True)
class RunOptions:
    """The options of `nextn train`; a default value means that the option was not given. `trunk` is `--from`."""

    data: tuple[str, ...] = ()
    all_tokens: bool = False
    tokenizer: str | None = None
    modules: int | None = None
    settings: JsonObject = field(default_factory=dict)
    recipe: str | None = None
    model: str | None = None
    freeze_trunk: bool = False
    trunk: str | None = None
    head: str | None = None
    init_head: bool = False
    layout: str | None = None
    head_only: bool = False
    on_policy: bool = False
    cache_gb: float | None = None
    allow_worse: bool = False
    curve: bool = False
    tensorboard: bool | None = None
    device: str | None = None
    stream: bool = False
    export: str | None = None

    @classmethod
    def of(cls, settings: JsonObject, **given: object) -> "RunOptions":
        """Return the options that are given, and those among the settings. Raises ConfigError for a wrong type."""
        own = {name: value for name, value in settings.items() if name in RUN_SETTINGS}
        for name, value in own.items():
            types, expected = RUN_SETTINGS[name]
            if type(value) not in types or not (isinstance(value, bool) or 0 < value < math.inf):
                raise ConfigError(f"{name} = {value!r}; expected {expected}")
        others = {name: value for name, value in settings.items() if name not in own}
        return cls(**JsonDict(given | own), settings=others)

    def absolute(self) -> "RunOptions":
        """Return the options with absolute paths; names of data sets and hub ids are unchanged."""
        given = {name: value for name in _PATHS if (value := getattr(self, name)) is not None}
        paths: JsonDict = {name: _absolute(value) for name, value in given.items()}
        return replace(self, data=tuple(map(_absolute, self.data)), **paths)

    def resumed(self, given: "RunOptions") -> "RunOptions":
        """Return these options, updated by the options in `given` that a resumed run may change.

        Raises ConfigError for the first other option or setting that has a different value in `given`.
        """
        given, changed = given.absolute(), JsonDict()
        for name in (option.name for option in fields(self)):
            old, new = getattr(self, name), getattr(given, name)
            if name == "settings" or new == old or new is None or (new in (False, ()) and name not in RUN_SETTINGS):
                continue
            if name not in _FREE:
                raise _disagreement(_NAMES.get(name, f"--{name.replace('_', '-')}"), old, new)
            changed[name] = new
        return replace(self, settings=_merge(self.settings, given.settings, ""), **changed)


def write_options(out: Path, options: RunOptions, settings: Mapping[str, object]) -> None:
    """Store options and all settings in a run's folder, with absolute paths: any working folder can resume it."""
    write_json(out / FILE, asdict(options.absolute()) | {"settings": dict(settings)})


def read_options(out: Path) -> RunOptions | None:
    """Read the options of a run; None if its folder has none."""
    record = _read(out)
    if record is None:
        return None
    known = {option.name for option in fields(RunOptions)}
    values = {name: value for name, value in record.items() if name in known}
    return RunOptions(**values | {"data": tuple(values.get("data", ()))})


def write_result(out: Path, result: Mapping[str, object]) -> None:
    """Record that the run is finished, with its final report."""
    record = _read(out)
    if record is not None:
        write_json(out / FILE, record | {"result": dict(result)})


def read_result(out: Path) -> JsonDict | None:
    """Read the final report of a run; None if it is not finished or its model no longer exists."""
    result: JsonDict | None = (_read(out) or {}).get("result")
    return None if result is None or not (out / result["model"]).exists() else result


def _read(out: Path) -> JsonDict | None:
    try:
        record = read_json(out / FILE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{out / FILE}: not readable: {error}. Remove it, and resume with the options that the run was started with"
        ) from error
    return record if isinstance(record, dict) else {}


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if Path(path).exists() else path


def _merge(old: JsonObject, given: JsonObject, group: str) -> JsonDict:
    merged = dict(old)
    for key, value in given.items():
        known = old.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(known, value, f"{group}{key}.")
        elif key in FREE_SETTINGS:
            merged[key] = value
        elif key not in old:
            raise ConfigError(f"unknown setting {group + key!r}; this run has {', '.join(old)}")
        elif value != known and str(value) != str(known):  # lam may be given as a number
            raise _disagreement(f"--set {group}{key}", known, value)
    return merged


def _disagreement(name: str, old: object, new: object) -> ConfigError:
    return ConfigError(
        f"{name}: the run was started {_shown(old)}, and {json.dumps(new)} is given now. Leave the option out to "
        "resume, or start another run in another folder"
    )


def _shown(value: object) -> str:
    return "without it" if value in (None, False, ()) else f"with {json.dumps(value)}"
