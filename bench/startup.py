"""Processor seconds of commands from start to end, and of the imports that they cannot avoid.

`python bench/startup.py --out bench/results/startup.json`. Commands run in turn; figures are medians. `generate` is
16 tokens of the bundled model, whose native runtime is built before; `imports` is torch and the model's transformers
module.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from record import write_record

from nextn.checkpoint.checkpoint import SHIPPED

NEXTN = (sys.executable, "-m", "nextn")
COMMANDS = {
    "help": (*NEXTN, "--help"),
    "audit": (*NEXTN, "audit", str(SHIPPED)),
    "imports": (sys.executable, "-c", "import torch; import transformers.models.qwen3_5.modeling_qwen3_5"),
    "generate": (*NEXTN, "generate", str(SHIPPED), "def add(", "--max-tokens", "16"),
}


def processor_seconds(command: tuple[str, ...]) -> float:
    """Run a command and return its user and system seconds, those of its children included."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, command
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    for command in COMMANDS.values():  # warms caches of files, and builds the native runtime
        processor_seconds(command)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(args.runs):
        for name, command in COMMANDS.items():
            times[name].append(processor_seconds(command))
    ratio = median(own / base for own, base in zip(times["generate"], times["imports"], strict=True))
    record = {
        "processor_s": {name: round(median(each), 2) for name, each in times.items()},
        "generate_over_imports": round(ratio, 2),
    }
    print(record)
    write_record(args.out, record)


if __name__ == "__main__":
    main()
