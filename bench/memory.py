"""Memory and time of loading a checkpoint, building its backend and giving the first answer, each in a fresh process.

    python bench/memory.py make 0.8b /tmp/shape-0.8b       # random weights in the shape of a published model
    python bench/memory.py make 4b /tmp/shape-4b --int4    # the same as compressed-tensors W4A16
    python bench/memory.py run /tmp/shape-0.8b --out bench/results/memory.json
    python bench/memory.py run /tmp/shape-0.8b --before ../old/src    # two versions of the package, in turn
    python bench/memory.py run /tmp/shape-4b --weights int8
    python bench/memory.py run /tmp/shape-4b --exact-head

Resident memory is the kernel's VmRSS, which includes the interpreter, torch and transformers; the peak is VmHWM.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

MB = 2**20
# hidden size, intermediate size, layers, value heads of the linear attention, heads, kv heads: text models of Qwen3.5.
SHAPES = {"0.8b": (1024, 3584, 24, 16, 8, 2), "2b": (2048, 6144, 24, 16, 8, 2), "4b": (2560, 9216, 32, 32, 16, 4)}
PERIOD = 4  # layers after which the layer types repeat


def resident(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak so far) in bytes."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def make_int4(shape: str, folder: Path) -> None:
    """Write a checkpoint of random weights of four bits; all periods of layers have the same ones."""
    from nextn.checkpoint.checkpoint import Checkpoint
    from nextn.checkpoint.safetensors_file import write_json, write_safetensors
    from nextn.edit.quantize import quantize

    layers = SHAPES[shape][2]
    with TemporaryDirectory(dir=folder.parent) as path:
        plain, few = Path(path) / "plain", Path(path) / "few"
        make(shape, plain, layers=PERIOD)
        quantize(plain, few, weights="int4")
        shutil.rmtree(plain)
        source = Checkpoint.open(few)
        tensors, ignored = {}, []
        layer_name = re.compile(r"^(model\.layers\.)(\d+)(\..+)$")

        def copies(name: str) -> list[str]:
            match = layer_name.match(name)
            return [f"{match[1]}{i}{match[3]}" for i in range(int(match[2]), layers, PERIOD)] if match else [name]

        for name in source.tensors:
            tensors |= dict.fromkeys(copies(name), source.raw(name))
        section = source.config["quantization_config"]
        ignored = [copy for name in section["ignore"] for copy in copies(name)]
        folder.mkdir()
        write_safetensors(folder / "model.safetensors", tensors)
        types = source.config["layer_types"] * (layers // PERIOD)
        changes = {"num_hidden_layers": layers, "layer_types": types}
        changes["quantization_config"] = section | {"ignore": ignored}
        write_json(folder / "config.json", source.config | changes)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(few / name, folder)


def make(shape: str, folder: Path, *, layers: int | None = None, fp8: bool = False) -> None:
    """Write a checkpoint of random weights, bf16 or fp8, in a published shape, with a byte-level tokenizer."""
    import torch

    from nextn.data.byte_tokenizer import byte_tokenizer
    from nextn.model.model import Model

    hidden, intermediate, all_layers, value_heads, heads, kv_heads = SHAPES[shape]
    layers = layers or all_layers
    rotary = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    config = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 262_144,
        "attn_output_gate": True,
        "rope_parameters": rotary | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    }
    Model.build(config, num_modules=1, tokenizer=byte_tokenizer(), dtype=torch.bfloat16).save(folder, fp8=fp8)


def child(folder: str, k: int, weights: str, exact_head: bool) -> None:
    """Print one JSON line per stage: seconds and processor seconds since the start, and memory."""
    start = time.perf_counter()

    def report(stage: str) -> None:
        seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time()}
        memory = {"resident": resident("VmRSS"), "peak": resident("VmHWM")}
        print(json.dumps({"stage": stage} | seconds | memory), flush=True)

    import nextn
    from nextn.model.model import Model
    from nextn.runtime.backend import backend_for

    report("imports")
    model = Model.load(folder)
    model.trunk.weights, model.head.exact = weights, exact_head
    report("load")
    backend = backend_for(model)
    report(f"{backend.name} backend")
    prompt = [(7 * index) % 1000 for index in range(64)]
    for stage in ("first answer", "second answer"):
        nextn.generate(model, [prompt], nextn.Settings(num_speculative_tokens=k, max_tokens=16))
        report(stage)


def stages(folder: Path, source: Path | None, options: Sequence[str]) -> list[dict[str, object]]:
    """Run `child` in a fresh process, with the package of this environment or of another source tree."""
    environment = os.environ | ({"PYTHONPATH": str(source.resolve())} if source else {})
    command = [sys.executable, __file__, "child", str(folder), *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def read_seconds(folder: Path) -> float:
    """Return the seconds that reading the weights takes, from the page cache if they are in it."""
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.read(16 * MB):
                pass
    return time.perf_counter() - start


def run(folder: Path, before: Path | None, turns: int, options: Sequence[str]) -> dict[str, object]:
    """Run the versions in turn and print a table."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    versions: dict[str, Path | None] = {"now": None} | ({"before": before} if before else {})
    reading, found = [], {name: [] for name in versions}
    for _ in range(turns):
        for name, source in versions.items():
            reading.append(read_seconds(folder))
            found[name].append(stages(folder, source, options))
    print(f"{folder.name}: {size / 1e6:.0f} MB of weights, read in {min(reading):.1f} to {max(reading):.1f} s")
    for name, runs in found.items():
        for rows in zip(*runs, strict=True):
            row = min(rows, key=lambda each: each["seconds"])
            ratios = [f"{row[key] / MB:6.0f} MB ({row[key] / size:.2f} x)" for key in ("resident", "peak")]
            print(f"{name:7} {row['stage']:15} {row['seconds']:6.1f} s  resident {ratios[0]}  peak {ratios[1]}")
    return {"weights_bytes": size, "read_seconds": reading, "stages": found}


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5] == "exact")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    making = actions.add_parser("make")
    making.add_argument("shape", choices=SHAPES)
    making.add_argument("folder", type=Path)
    making.add_argument("--int4", action="store_true", help="Weights of four bits in groups of 128.")
    making.add_argument("--fp8", action="store_true", help="Linears in fp8, in blocks of 128 x 128.")
    running = actions.add_parser("run")
    running.add_argument("folders", type=Path, nargs="+")
    running.add_argument("--before", type=Path, help="src folder of another version of the package")
    running.add_argument("--turns", type=int, default=2)
    running.add_argument("--num-speculative-tokens", "-k", type=int, default=2)
    running.add_argument("--weights", choices=("stored", "int8", "int4"), default="stored")
    running.add_argument("--exact-head", action="store_true")
    running.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.action == "make":
        make_int4(args.shape, args.folder) if args.int4 else make(args.shape, args.folder, fp8=args.fp8)
        return
    from record import write_record  # imports torch

    options = [str(args.num_speculative_tokens), args.weights, "exact" if args.exact_head else "fast"]
    results = {folder.name: run(folder, args.before, args.turns, options) for folder in args.folders}
    write_record(args.out, results)


if __name__ == "__main__":
    main()
