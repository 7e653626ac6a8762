"""Write what follows from the code: pages of commands, Python API, faults, draft counts and layers, and a stub."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated import DOCS, ROOT, replace_part, table, write
from typer.main import get_command

import nextn
from nextn.cli import app
from nextn.engines.csv_formats import CSV_READERS
from nextn.engines.json_formats import JSON_READERS
from nextn.engines.log_formats import LOG_FORMATS
from nextn.engines.metrics_formats import METRICS_COUNTED
from nextn.engines.named_counts import NAMED_COUNTED, NAMED_FORMAT
from nextn.engines.run_settings import OVERRIDES
from nextn.evaluate.faults import FAULTS, OTHER_CAUSES

sys.path.insert(0, str(ROOT / "tests"))

from test_layers import LAYERS, PACKAGE

REFERENCE = DOCS / "reference"
ARCHITECTURE = DOCS / "developers" / "architecture.md"
CLI = """\
# Command line

Exit codes of every command: 0 done, 1 findings (of `audit`, `measure`, `diagnose`, `verify` and `canary check`, and
of `train` if the head got worse), 2 usage error, 3 if the data cannot decide (`diagnose`, and `measure` beside another
measurement), 130 Ctrl-C, 141 if the reader of a pipe has closed it.

`nextn COMMAND --help` prints the same as this page, which `make docs` generates.
"""
PYTHON = """\
# Python API

The public names are those of `nextn.__all__`; this page has all of them. They are resolved on first use, so `import
nextn` is cheap. Everything else in the package may change between minor releases. The lines with
`:::` are filled in when the site is built (`make site`); `help(nextn.generate)` prints the same text. Every name has an
example that runs as it is: `tiny` is the checkpoint that comes with the package.

```python
import nextn

model = nextn.load("tiny")  # or a folder, or a hub id
result = nextn.generate(model, ["def add("], nextn.Settings(num_speculative_tokens=4, max_tokens=32))[0]
print(result.text, result.acceptance.length, result.acceptance.rates)
print(nextn.audit("tiny").clean, nextn.measure(model, ["class Stack:"]).figures(0.0).rates)
```

Functions that check return a report and print nothing; its `to_dict()` is what the command of that name prints with
`--json`. A mistake in what they are given raises a `nextn.NextnError`.
"""
GROUPS = {
    "Check": ("audit", "AuditReport", "Finding", "families", "KnownFamilies", "measure", "ReferencePlan",
              "ReferenceReport", "AcceptanceFigures", "Estimate", "NextnError"),
    "Check engines": ("verify", "VerifySettings", "VerifyReport", "CheckResult", "diagnose", "Diagnosis"),
    "Load and decode": ("load", "Model", "Head", "generate", "stream", "rounds", "trace", "Settings", "Sampling",
                        "Result", "Acceptance", "eos_tokens"),
    "Keep, restore, convert": ("keep_head", "KeepHead", "restore", "convert", "extract", "quantize"),
    "Train": ("train_head", "save_head", "load_head", "new_head", "CotrainLoss", "DetachedTrunk",
              "targets_of", "HeadSettings", "mtp_loss", "Targets", "StandaloneHead", "Trainer", "TrainConfig",
              "JointTask", "Corpus"),
}  # fmt: skip
ALIASES = {"load": "### load\n\n`nextn.load` is [`Model.load`](#nextn.model.model.Model.load).\n"}
STUB = "__version__: str\n__all__: list[str]\n_HOME: dict[str, str]\n"
FAULT_INTRO = """\
# Faults

The faults that `nextn diagnose` knows. Each can be injected into the decoder, so its acceptance on a given head is
computed: `diagnose` compares an engine's counters with these figures ([details](diagnose.md)). No fault changes the
text, because the trunk (the target model) verifies every draft. The linked threads are public reports of the fault,
which may be fixed by now.
"""
OTHERS_INTRO = """\
## Causes that are not injected

`diagnose` names these, too. `nothing-accepted` is left out as soon as one draft was accepted.
"""


def command_page() -> str:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    panels: dict[str, list[tuple[str, Any]]] = {}
    for name, command in commands.items():
        inner = [(f"{name} {sub}", each) for sub, each in getattr(command, "commands", {}).items()]
        panels.setdefault(command.rich_help_panel, []).extend(inner or [(name, command)])
    lines = [CLI]
    for panel, entries in panels.items():
        lines.append(f"## {panel}\n")
        for name, command in entries:
            lines += [f"### nextn {name}\n", f"{_help(command.help)}\n", *_parameters(name, command)]
    return "\n".join(lines).rstrip() + "\n"


def _parameters(name: str, command: Any) -> Iterator[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join([f"nextn {name}", *map(_usage, arguments), "[OPTIONS]" if options else ""])
    yield f"```text\n{usage.strip()}\n```\n"
    if arguments:
        yield table(("argument", "meaning"), ((f"`{_metavar(each)}`", _cell(each.help)) for each in arguments))
    if options:
        yield table(("option", "default", "meaning"), map(_option, options))


def _usage(argument: Any) -> str:
    return _metavar(argument) if argument.required else f"[{_metavar(argument)}]"


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name).upper()


def _option(option: Any) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    no_default = option.is_flag or option.default in (None, "", ())
    return names, "" if no_default else f"`{_plain(option.default)}`", _cell(option.help)


def _plain(default: object) -> str:
    return ", ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def _help(text: str | None) -> str:
    """Return a help text as Markdown: typer marks paragraphs that must not be wrapped with a form feed."""
    return re.sub(r"\b\x08\n?", "", text or "").strip()


def python_page() -> str:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == nextn.__all__, f"not grouped: {set(nextn.__all__) ^ set(grouped)}"
    lines = [PYTHON]
    for title, names in GROUPS.items():
        lines.append(f"## {title}\n")
        lines += [ALIASES.get(name, f"::: nextn.{nextn._HOME[name]}.{name}\n") for name in names]
    return "\n".join(lines).rstrip() + "\n"


def stub() -> str:
    """Return the types of the public names, which are resolved on first use, for type checkers and editors."""
    homes = sorted((home, name) for name, home in nextn._HOME.items())
    names = (f"from nextn.{home} import {name} as {name}\n" for home, name in homes)
    return f'"""Types of the public names. `make docs` writes this file."""\n\n{"".join(names)}\n{STUB}'


def fault_page() -> str:
    rows = ((f"`{each.name}`", _cell(each.description), _cell(each.signature), _links(each.issues)) for each in FAULTS)
    others = ((f"`{each.name}`", _cell(each.evidence), _links(each.issues)) for each in OTHER_CAUSES)
    fixes = ((f"`{each.name}`", _cell(each.advice)) for each in (*FAULTS, *OTHER_CAUSES))
    head = ("fault", "what is wrong", "what it shows", "seen in")
    return "\n".join([
        FAULT_INTRO, table(head, rows), OTHERS_INTRO, table(("cause", "what it means", "seen in"), others),
        "## What to do\n", table(("fault", "advice"), fixes),
    ])  # fmt: skip


def _links(issues: tuple[str, ...]) -> str:
    return ", ".join(f"[{each}](https://github.com/{each.replace('#', '/issues/')})" for each in issues) or "-"


FORMATS_INTRO = """\
# Formats of draft counts

`nextn diagnose --engine FILE` and `nextn canary check --counters FILE` read these formats; this page is generated from
the code that reads them. Prefixes of Docker, Kubernetes, journald, syslog and llama.cpp's router do not matter, and a
log of JSON objects, one per line, is read as the lines in it. JSON is also read inside other text, with an end cut off,
and as Python prints it. Figures of several entries are added, unless they are of
runs with different K; of those that count since the start, the last is taken, of each run. A file with several formats
is read by the first of this page that it has; one that has a length alone is read where no other is there.
Metrics are also read with `_` for the colon, as OpenTelemetry and Ray export them, from AIPerf's
server_metrics_export.json (what was counted during the run), from what vLLM's LLM.get_metrics() prints, and from a
table of Grafana or a query with a column for each series or a row for each value, of which the last is taken. The
version of the engine and K are read from the log or from `--flags` where they are in it. Text that cannot be read is an
error with the nearest format and what it lacks.
"""
OVERRIDES_INTRO = """\
## Settings that decide the acceptance

With these settings, which are looked for in the log and in `--flags`, the engine accepts drafts that the trunk did not
sample, so the text is not the trunk's, or another drafter makes them: the counts say nothing about the head. `diagnose`
names them as `acceptance-overridden`.
"""


def formats_page() -> str:
    """Each format with what its figures count."""
    logs = ((_cell(each.name), _cell(each.counted)) for each in LOG_FORMATS)
    documents = [
        (_cell(name), f"`{key}`", _cell((reader.__doc__ or "").split("\n\n")[0]))
        for name, (key, reader) in JSON_READERS.items()
    ]
    documents.append((NAMED_FORMAT, "names of counts", NAMED_COUNTED))
    tables = ((_cell(name), f"`{line}`", _cell(reader.__doc__ or "")) for name, (line, reader) in CSV_READERS.items())
    settings = ((f"`{each.name}`", each.engine, each.effect) for each in OVERRIDES)
    return "\n".join([
        FORMATS_INTRO,
        "## Logs and printed tables\n", table(("format", "what is counted"), logs),
        "## JSON\n", table(("format", "recognized by", "what is counted"), documents),
        "## Tables with commas\n", table(("format", "first line", "what is counted"), tables),
        "## Metrics\n", table(("engine", "series", "what is counted"), METRICS_COUNTED),
        OVERRIDES_INTRO, table(("setting", "engine", "acceptance is"), settings),
    ])  # fmt: skip


def layers() -> str:
    """Each folder or module of the package with the first sentence of its docstring, from the top layer down."""
    count = len(LAYERS)
    rows = (
        (str(count - above), f"`{name}`", _purpose(name))
        for above, layer in enumerate(reversed(LAYERS))
        for name in layer
    )
    return table(("layer", "module", "what it is"), rows)


def _purpose(name: str) -> str:
    path = PACKAGE / name / "__init__.py"
    path = path if path.exists() else PACKAGE / f"{name}.py"
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return _cell(text.partition(". ")[0].rstrip(".") + ".")


def pages() -> dict[Path, str]:
    return {
        ARCHITECTURE: replace_part(ARCHITECTURE.read_text(), "layers", layers()),
        REFERENCE / "cli.md": command_page(),
        REFERENCE / "python.md": python_page(),
        REFERENCE / "faults.md": fault_page(),
        REFERENCE / "counter-formats.md": formats_page(),
        PACKAGE / "__init__.pyi": stub(),
    }


if __name__ == "__main__":
    write(pages())
