"""`nextn audit` of 163 shards with 1,000 tensors each: from a hub that takes 50 ms per request, and from a folder.

The checkpoint is DeepSeek-V3's layout with zeros for weights (see tests/big.py), the hub is a server on the loopback.
`python bench/audit.py --out audit.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from big import Sparse, big, write
from hub import Hub

SHARDS, DELAY = 163, 0.05
TARGETS = {"hub": {"seconds": 10.0, "peak_mb": 300.0, "share_of_bytes": 0.01}, "folder": {"seconds": 3.0}}


def audited(model: str, env: dict[str, str]) -> dict[str, float]:
    """Return wall and CPU seconds of the process, start of Python included, and its peak memory."""
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "nextn", "audit", model, "--json"], stdout=subprocess.PIPE, env=env)
    report = json.loads(child.stdout.read() if child.stdout else b"")
    _, status, usage = os.wait4(child.pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1)
    assert report["modules"] == [0]
    seconds, cpu_s = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
    return {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "peak_mb": round(usage.ru_maxrss / 1024, 1)}


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
        record["folder"] = min((audited(f"{folder}/model", env) for _ in range(3)), key=lambda run: run["seconds"])
    print(json.dumps(record, indent=2))
    if args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
