"""Everything that is to be shown on a GPU, in one command of about eight minutes; --rehearse: at toy size on a CPU.

    python bench/gpu.py --out runs/gpu --prompts PROMPTS.jsonl --answers FOLDER

Each stage is a process with a time budget, whose figures are written to OUT/STAGE.json as soon as each is there; the
next one runs even if it fails. OUT/gpu.json has all of them, with machine and date. `gpu_carry.py` prepares what a
machine without network needs.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import gpu_stages
import torch
import transformers
from gpu_stages import Inputs

from nextn.checkpoint.safetensors_file import write_json


@dataclass(frozen=True)
class Stage:
    """A function of `gpu_stages`, and the seconds after which it is stopped."""

    name: str
    budget_s: int


STAGES = (
    Stage("tests", 100),
    Stage("lossless", 45),
    Stage("answers", 65),
    Stage("head", 150),
    Stage("speed", 80),
    Stage("large_head", 40),
    Stage("stream", 130),
)


def machine(device: str) -> dict[str, Any]:
    record = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device != "cuda":
        return {"name": platform.processor() or platform.machine()} | record
    gpu = torch.cuda.get_device_properties(0)
    return {"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} | record


def run_stage(stage: Stage, inputs: Inputs) -> dict[str, Any]:
    """Run a stage in a process of its own and return what it wrote, and how it ended."""
    file, log = inputs.out / f"{stage.name}.json", inputs.out / f"{stage.name}.log"
    command = [sys.executable, __file__, "--stage", stage.name, "--inputs", json.dumps(asdict(inputs), default=str)]
    file.unlink(missing_ok=True)
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            end = f"exit code {process.wait(stage.budget_s * (20 if inputs.rehearse else 1))}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            end = f"stopped after {stage.budget_s} s"
    if end == "exit code 0":
        end = "complete"
    else:
        end += ": " + (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:300]
    figures = json.loads(file.read_text()) if file.exists() else {}
    return {"end": end, "seconds": round(time.perf_counter() - began, 1)} | figures


def perform(name: str, inputs: Inputs) -> None:
    """Be a stage: write its figures, one after the other."""
    record: dict[str, Any] = {}
    for key, value in getattr(gpu_stages, name)(inputs):
        record[key] = value
        write_json(inputs.out / f"{name}.json", record)
        print(key, json.dumps(value), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--stages", default=",".join(stage.name for stage in STAGES))
    parser.add_argument("--prompts", type=Path, help="prompts to answer in `answers`, .jsonl; default: built-in ones")
    parser.add_argument("--texts", type=Path, help="prompts that measure, .jsonl; default: built-in ones")
    parser.add_argument("--answers", type=Path, nargs="*", default=[], help="more answers to train a head on, .jsonl")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        perform(args.stage, Inputs.of(args.inputs))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    inputs = Inputs(args.out.resolve(), args.rehearse, args.prompts, args.texts, tuple(args.answers))
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": machine(inputs.device),
        "rehearsal": inputs.rehearse,
        "stages": {},
    }
    chosen = args.stages.split(",")
    for stage in [stage for stage in STAGES if stage.name in chosen]:
        record["stages"][stage.name] = result = run_stage(stage, inputs)
        write_json(args.out / "gpu.json", record)
        print(f"{stage.name}: {result['end']} ({result['seconds']} s)", flush=True)
    return int(any(each["end"] != "complete" for each in record["stages"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
