"""`nextn env`: versions, machine and decoding backend, to be pasted into a bug report."""

import json

from nextn.cli.common import AsJson
from nextn.cli.screen import echo


def env(as_json: AsJson = False) -> None:
    """Report versions, processor, memory, GPUs and the decoding backend, for a bug report."""
    from nextn.environment import report

    found = report()
    if as_json:
        echo(json.dumps(found))
        return
    for name, value in found.items():
        for key, cell in _rows(name, value):
            echo(f"{key:<28} {cell}")


def _rows(name: str, value: object) -> list[tuple[str, str]]:
    """One line for each leaf of a section, under its dotted name."""
    if isinstance(value, dict):
        return [row for key, inner in value.items() for row in _rows(f"{name}.{key}", inner)]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [row for index, item in enumerate(value) for row in _rows(f"{name}.{index}", item)]
    if isinstance(value, list):
        return [(name, ", ".join(map(str, value)) or "none")]
    if value is None:
        return [(name, "not found")]
    if name.endswith("_bytes") and isinstance(value, int):
        return [(name.removesuffix("_bytes"), f"{value / 2**30:.1f} GiB")]
    return [(name, str(value))]
