"""`nextn audit` of 163 shards with 1,000 tensors each: from a hub that takes 50 ms per request, and from a folder.

The checkpoint is DeepSeek-V3's layout with zeros for weights (see tests/big.py), the hub is a server on the loopback.
A second checkpoint has a head of 4 GB with random values, in bf16 and in fp8, of which a local audit reads all. "cold":
after the system was asked to drop the file from its cache. `python bench/audit.py --out bench/results/audit.json`.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from big import INNER, H, Sparse, big, layer, write
from hub import Hub
from record import write_record

from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors

SHARDS, DELAY = 163, 0.05
HEAD_BYTES = 4_000_000_000
TARGETS = {"hub": {"seconds": 10.0, "peak_mb": 300.0, "share_of_bytes": 0.01}, "folder": {"seconds": 3.0}}


def audited(model: str, env: dict[str, str], *options: str) -> dict[str, float]:
    """Return wall and CPU seconds of the process, start of Python included, and its peak memory."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "nextn", "audit", model, "--json", *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
    report = json.loads(child.stdout.read() if child.stdout else b"")
    _, status, usage = os.wait4(child.pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1)
    assert report["modules"] == [0]
    seconds, cpu_s = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
    return {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "peak_mb": round(usage.ru_maxrss / 1024, 1)}


def write_head(folder: Path, dtype: str) -> Path:
    """Write a checkpoint of one trunk layer and a head of HEAD_BYTES with random values; return its one file."""
    normal = np.random.default_rng(0).standard_normal(2**18).astype("<f4")
    narrow = (normal.view("<u4") >> 16).astype("<u2")
    blocks = {"F32": normal.tobytes(), "BF16": narrow.tobytes(), "F8_E4M3": (narrow & 0x77).astype("u1").tobytes()}
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1}

    def tensor(dtype: str, shape: tuple[int, ...]) -> RawTensor:
        block, size = blocks[dtype], math.prod(shape) * sizes[dtype]
        pieces = (block[: size - begin] for begin in range(0, size, len(block)))
        return RawTensor(dtype, shape, lambda: pieces)

    table: dict[str, RawTensor] = {}
    for index, experts in enumerate((2, HEAD_BYTES // (3 * H * INNER * sizes[dtype]))):
        for path, stored, shape in layer(experts):
            if "scale" not in path or dtype == "F8_E4M3":
                table[f"model.layers.{index}.{path}"] = tensor(dtype if stored == "F8_E4M3" else stored, shape)
    for path, shape in {"enorm": (H,), "hnorm": (H,), "shared_head.norm": (H,), "eh_proj": (H, 2 * H)}.items():
        table[f"model.layers.1.{path}.weight"] = tensor("BF16", shape)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", table)
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "hidden_size": H, "num_nextn_predict_layers": 1}
    write_json(folder / "config.json", config)
    return folder / "model.safetensors"


def measured_head(folder: Path, dtype: str) -> dict[str, object]:
    """Audit such a checkpoint with all values read, from the cache and from the disk, and with samples."""
    file = write_head(folder, dtype)
    env, runs = dict(os.environ), {}
    for name, options in (("all", ()), ("cold", ()), ("samples", ("--sample",))):
        if name == "cold":
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        times = [audited(str(folder), env, *options) for _ in range(1 if name == "cold" else 3)]
        runs[name] = min(times, key=lambda run: run["seconds"])
    size = file.stat().st_size
    overhead = runs["samples"]["seconds"]
    speeds = {name: round(size / 1e9 / (runs[name]["seconds"] - overhead), 2) for name in ("all", "cold")}
    file.unlink()
    return {"bytes": size, **runs, "gb_per_s_beyond_samples": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    files = big(SHARDS)
    total = sum(map(len, files.values()))
    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(files)
        hub.delay = DELAY
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "0"}
        record: dict[str, object] = {"shards": SHARDS, "bytes": total, "delay_s": DELAY, "targets": TARGETS}
        over_http = audited("org/model", env)
        served = sum(file.given if isinstance(file, Sparse) else len(file) for file in files.values())
        record["hub"] = over_http | {"requests": len(hub.requests), "share_of_bytes": round(served / total, 6)}
        hub.stop()
        write(Path(folder) / "model", files)
        # With --sample: in files without blocks on disk, all values would be read at the speed of no disk.
        runs = (audited(f"{folder}/model", env, "--sample") for _ in range(3))
        record["folder"] = min(runs, key=lambda run: run["seconds"])
        head = {dtype: measured_head(Path(folder) / dtype, dtype) for dtype in ("BF16", "F8_E4M3")}
        record["head"] = head
    print(json.dumps(record, indent=2))
    write_record(args.out, record)


if __name__ == "__main__":
    main()
