"""`nextn measure --stream` of a model that does not fit: memory, time against disk and arithmetic, kill and resume.

    python bench/stream.py make /tmp/large                 # random weights, Qwen3-Next's widths, 8 layers: 31 GB
    python bench/stream.py run /tmp/large --out bench/results/stream.json
    python bench/stream.py make /tmp/small --layers 4 --experts 128
    python bench/stream.py hub /tmp/small --out bench/results/stream_hub.json  # from a hub: 50 ms a request, 200 MB/s
    python bench/stream.py plan bench/results/stream.json  # a model of 671 B from these rates

Each run is a process of its own; the kernel's file cache is emptied of the checkpoint before each. Peak memory is the
kernel's VmHWM, which includes pages of mapped files.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}
TEXTS, PROMPT, NEW = 8, 50, 200  # 2,000 tokens
DELAY, RATE = 0.05, 200e6  # of a hub: seconds a request, and bytes per second in all
# DeepSeek-V3: weights of its trunk, bytes of its fp8 checkpoint, weights that a token passes, hidden size.
PLAN = {"weights": 671e9, "bytes": 688e9, "active": 37e9, "hidden": 7168}


def make(folder: Path, num_layers: int, num_experts: int, **sizes: int) -> None:
    """Write a checkpoint of random bf16 weights, a shard per layer, holding no more than one tensor in memory."""
    import torch

    from nextn.checkpoint.checkpoint import write_index
    from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors
    from nextn.model.load_head import head_tensors
    from nextn.model.model import Model

    config = CONFIG | {"num_hidden_layers": num_layers, "num_experts": num_experts} | sizes
    with torch.device("meta"):
        model = Model.build(config, dtype=torch.bfloat16)
    shapes = {name: tuple(value.shape) for name, value in head_tensors(model.head, copies=False).items()}
    for name, value in model.trunk.model.state_dict().items():
        shapes |= dict(_stored(name, tuple(value.shape)))
    pool = (torch.randn(2**25 + 4099, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def values(shape: tuple[int, ...], offset: int) -> Iterator[bytes]:
        count = torch.Size(shape).numel()
        for start in range(0, count, 2**22):
            begin = (offset + start) % (len(pool) - 2**22)
            yield pool[begin : begin + min(2**22, count - start)].view(torch.uint8).numpy().tobytes()

    folder.mkdir(parents=True)
    shards: dict[str, list[str]] = {}
    for name in shapes:
        part = name.split(".layers.")[1].split(".")[0] if name.startswith("model.layers.") else "other"
        shards.setdefault("mtp" if name.startswith("mtp.") else part, []).append(name)
    files = {}
    for part, names in shards.items():
        file = f"model-{part}.safetensors"
        raw = {
            name: RawTensor("BF16", shapes[name], lambda name=name, i=i: values(shapes[name], 7919 * i))
            for i, name in enumerate(names)
        }
        write_safetensors(folder / file, raw, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    write_index(folder, files, sum(2 * torch.Size(shape).numel() for shape in shapes.values()))
    stored = json.loads(json.dumps(model.trunk.model.config.to_diff_dict(), default=str))
    write_json(folder / "config.json", model.family.with_count(stored, 1) | {"dtype": "bfloat16"})


def _stored(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Published names: one tensor per expert, gate and up separate."""
    for index in range(shape[0]) if ".experts." in name else ():
        prefix = f"{name.rpartition('.')[0]}.{index}"
        if name.endswith("gate_up_proj"):
            yield f"{prefix}.gate_proj.weight", (shape[1] // 2, shape[2])
            yield f"{prefix}.up_proj.weight", (shape[1] // 2, shape[2])
        else:
            yield f"{prefix}.down_proj.weight", shape[1:]
    if ".experts." not in name:
        yield name, shape


def write_texts(path: Path, vocab_size: int = CONFIG["vocab_size"], count: int = TEXTS) -> None:
    """Write texts of random tokens: the time does not depend on them."""
    import random

    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            ids = [generator.randrange(vocab_size) for _ in range(PROMPT + NEW)]
            file.write(json.dumps({"prompt": ids[:PROMPT], "tokens": ids[PROMPT:]}) + "\n")


def forget(folder: Path) -> None:
    """Drop the checkpoint from the kernel's file cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(folder: Path, texts: Path, states: Path, out: Path, *, name: str = "", threads: int = 1) -> subprocess.Popen:
    forget(folder)
    options = ["--texts", texts, "--temperatures", "0", "-k", "2", "--stream", "--states", states, "--out", out]
    command = [sys.executable, "-m", "nextn", "measure", name or folder, *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": str(threads)})


def watch(process: subprocess.Popen, kill_when: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Wait for a process, or kill it. Returns seconds, of the processor, too, and peak memory."""
    began, peak, before = time.perf_counter(), 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max(peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
        except (OSError, TypeError):
            pass
        if kill_when():
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(0.05)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - began, "cpu_seconds": cpu, "peak_memory": peak, "code": process.returncode}


def run(folder: Path, work: Path) -> dict[str, object]:
    """Measure with one thread, with two, and with one thread killed in the middle and resumed."""
    work.mkdir(parents=True, exist_ok=True)
    texts = work / "texts.jsonl"
    write_texts(texts)
    one, two = (_whole(folder, texts, work, threads) for threads in (1, 2))
    states, out = work / "states", work / "resumed.json"
    middle = json.loads((folder / "config.json").read_text())["num_hidden_layers"] // 2
    is_half_done = lambda: any(states.glob(f"*/states-{middle:04d}-*"))  # noqa: E731
    killed = watch(start(folder, texts, states, out), kill_when=is_half_done)
    resumed = watch(start(folder, texts, states, out))
    record, figures = json.loads(out.read_text()), one.pop("figures")
    return {
        "tokens": TEXTS * (PROMPT + NEW),
        "bytes_of_checkpoint": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        **one,
        "two_threads": {name: value for name, value in two.items() if name not in ("figures", "machine")},
        "killed": killed,
        "resumed": resumed | {"layers_resumed": record["stream"]["num_resumed"], "load": os.getloadavg()},
        "same_figures": record["figures"] == figures,
    }


def _whole(folder: Path, texts: Path, work: Path, threads: int) -> dict[str, Any]:
    """A command without interruption."""
    states, out, load_before = work / f"states-{threads}", work / f"whole-{threads}.json", os.getloadavg()
    whole = watch(start(folder, texts, states, out, threads=threads))
    record = json.loads(out.read_text())
    stream, estimate = record["stream"], record["stream"]["estimate"]
    arithmetic = [estimate["flops"] / estimate["flops_per_s"], estimate["head_flops"] / estimate["flops_per_s"]]
    reading = estimate["num_bytes"] / estimate["bytes_per_s"]
    return {
        "whole": whole,
        "estimate": estimate,
        "seconds_of_layers": stream["seconds"],
        "ratio_of_layers": stream["seconds"] / (reading + arithmetic[0]),
        "ratio_to_rates": whole["seconds"] / (reading + sum(arithmetic)),
        "ratio_of_command": whole["seconds"] / estimate["seconds"],
        "layers": stream["layers"],
        "load": [load_before, os.getloadavg()],
        "machine": {key: record["machine"][key] for key in ("name", "cores", "threads", "versions", "dtype")},
        "figures": record["figures"],
    }


def run_from_hub(folder: Path, work: Path) -> dict[str, object]:
    """Measure a hub id once, from a hub on the loopback."""
    from slow_hub import SlowHub

    work.mkdir(parents=True, exist_ok=True)
    texts, out, hub = work / "texts.jsonl", work / "hub.json", SlowHub(folder, DELAY, RATE)
    write_texts(texts)
    os.environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(work / "cache"), "HF_HUB_DISABLE_XET": "1"}
    load_before = os.getloadavg()
    process, disk = start(folder, texts, work / "states-hub", out, name="org/model"), 0

    def look() -> bool:
        nonlocal disk
        files = [path for path in (work / "cache").rglob("model-*.safetensors") if path.exists()]
        disk = max(disk, sum(path.stat().st_blocks * 512 for path in files))
        return False

    whole = watch(process, kill_when=look)
    record, size = json.loads(out.read_text()), sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {
        "delay_s": DELAY,
        "rate": RATE,
        "tokens": TEXTS * (PROMPT + NEW),
        "bytes_of_checkpoint": size,
        "bytes_sent": hub.num_bytes,
        "ratio_of_bytes": hub.num_bytes / size,
        "num_requests": hub.num_requests,
        "whole": whole,
        "seconds_at_the_rate": size / RATE,
        "peak_disk": disk,
        "seconds_of_layers": record["stream"]["seconds"],
        "layers": record["stream"]["layers"],
        "load": [load_before, os.getloadavg()],
    }


def plan(record: dict) -> None:
    """Print what DeepSeek-V3 would take at these rates, for 2,000 and for 100,000 tokens.

    Reading, converting and running its layers is taken to cost as much per weight as here; then come fp8's scales,
    whose rate is measured now, and the arithmetic of further tokens. The disk must hold the checkpoint.
    """
    rates, num_weights = record["estimate"], sum(layer["num_bytes"] for layer in record["layers"]) / 2
    layers, scales = (
        PLAN["weights"] * record["seconds_of_layers"] / num_weights,
        PLAN["weights"] / dequantization_rate(),
    )
    for tokens in (2_000, 100_000):
        more = 2 * PLAN["active"] * max(0, tokens - record["tokens"]) / rates["flops_per_s"]
        hours = {"layers": layers, "fp8": scales, "further arithmetic": more}
        parts = ", ".join(f"{name} {seconds / 3600:.1f} h" for name, seconds in hours.items())
        disk, states = PLAN["bytes"] / rates["bytes_per_s"] / 3600, tokens * PLAN["hidden"] * 2 / 1e9
        print(f"{tokens:,} tokens: {sum(hours.values()) / 3600:.1f} h ({parts})")
        print(f"  {PLAN['bytes'] / 1e9:.0f} GB read, {disk:.1f} h at the disk's rate; hidden states {states:.2f} GB")


def dequantization_rate() -> float:
    """Return how many fp8 weights are dequantized per second of a processor, in blocks, to bf16."""
    import torch

    from nextn.checkpoint import quantized_weights

    weight, scale, best = torch.ones(2048, 7168).to(torch.float8_e4m3fn), torch.ones(16, 56), float("inf")
    for _ in range(8):
        began = time.thread_time()
        quantized_weights.dequantize_fp8(weight, scale, (128, 128)).to(torch.bfloat16)
        best = min(best, time.thread_time() - began)
    return weight.numel() / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make_parser = commands.add_parser("make")
    make_parser.add_argument("folder", type=Path)
    make_parser.add_argument("--layers", type=int, default=8)
    make_parser.add_argument("--experts", type=int, default=CONFIG["num_experts"])
    for name in ("run", "hub"):
        run_parser = commands.add_parser(name)
        run_parser.add_argument("folder", type=Path)
        run_parser.add_argument("--work", type=Path, default=Path("/tmp/nextn-stream"))
        run_parser.add_argument("--out", type=Path)
    commands.add_parser("plan").add_argument("record", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.folder, arguments.layers, arguments.experts)
    elif arguments.command == "plan":
        plan(json.loads(arguments.record.read_text()))
    else:
        from record import write_record  # imports torch

        record = (run if arguments.command == "run" else run_from_hub)(arguments.folder, arguments.work)
        print(json.dumps(record, indent=2))
        write_record(arguments.out, record)


if __name__ == "__main__":
    main()
