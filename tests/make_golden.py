"""Writes tests/golden: `PYTHONPATH=src python tests/make_golden.py [NAME ...]`, a few seconds.

The files say what the library computes, by fixture. They are made anew only where a change of results is meant, and
the reason belongs in the commit.
"""

import argparse
import json
import math
from pathlib import Path

import golden_adapter
import torch
from tiny import FIXTURES

from nextn.model.model import Model

GOLDEN = Path(__file__).parent / "golden"
_WIDTH = 118


def plain(value: object) -> object:
    """As JSON holds it: lists, and null for nan."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def dumped(value: object, indent: int = 0) -> str:
    """JSON with each value that fits on one line on one line."""
    line = json.dumps(value)
    if len(line) + indent <= _WIDTH or not isinstance(value, dict | list):
        return line
    inner, outer = "\n" + " " * (indent + 1), "\n" + " " * indent
    if isinstance(value, list):
        return "[" + inner + f",{inner}".join(dumped(each, indent + 1) for each in value) + outer + "]"
    parts = [f"{json.dumps(key)}: {dumped(each, indent + 1)}" for key, each in value.items()]
    return "{" + inner + f",{inner}".join(parts) + outer + "}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(golden_adapter.NAMES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    GOLDEN.mkdir(exist_ok=True)
    for name in args.names:
        model = Model.load(FIXTURES / name, dtype=torch.float32)
        found = {section: plain(compute()) for section, compute in golden_adapter.sections(name, model).items()}
        (GOLDEN / f"{name}.json").write_text(dumped(found) + "\n")


if __name__ == "__main__":
    main()
