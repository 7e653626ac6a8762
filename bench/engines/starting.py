"""Starting an engine's worker: its interpreter, environment variables and machine-specific options."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines import environments
from engines.client import Unavailable, Worker

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Starter:
    """Starts workers of the engines built in `root`; limit_s is the time limit of a start."""

    root: Path
    threads: int
    limit_s: float = 900

    def start(self, engine: str, options: Mapping[str, object], *, log: Path) -> Worker:
        """Return a worker that has loaded the engine, with its stderr in `log`. Raises Unavailable with the reason."""
        self.check(engine)
        python = environments.vllm_python(self.root) if engine == "vllm" else Path(sys.executable)
        script = HERE / f"{engine.partition('.')[0]}_worker.py"
        command = [str(python), str(script), json.dumps({**self.machine_options(engine), **options})]
        return Worker(command, log=log, env=self.variables(engine), start_s=self.limit_s)

    def check(self, engine: str) -> None:
        """Raise Unavailable for an engine that is not built."""
        if engine in environments.ENGINES and (reason := environments.missing(self.root, engine)) is not None:
            raise Unavailable(reason)

    def machine_options(self, engine: str) -> dict[str, object]:
        """Return the options that depend on this machine."""
        if engine != "llama.cpp":
            return {}
        return {"server": str(environments.llama_server(self.root)), "threads": self.threads}

    def variables(self, engine: str) -> dict[str, str]:
        """Return the environment variables of the worker."""
        variables = {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        return variables | (environments.vllm_variables(self.root, self.threads) if engine == "vllm" else {})

    def converted(self, checkpoint: Path, out: Path, *, dtype: str = "bf16") -> Path:
        """Convert the checkpoint to GGUF with llama.cpp's own converter. Raises Unavailable with its last line."""
        source = environments.llama_source(self.root)
        command = [sys.executable, str(HERE / "to_gguf.py"), str(source), str(checkpoint), str(out), dtype]
        return _written(command, out, "conversion to GGUF")

    def quantized(self, gguf: Path, out: Path, kind: str) -> Path:
        """Quantize a GGUF with llama.cpp's own llama-quantize. Raises Unavailable with its last line."""
        self.check("llama.cpp")
        command = [str(environments.llama_quantize(self.root)), str(gguf), str(out), kind, str(self.threads)]
        return _written(command, out, f"quantization to {kind}")


def _written(command: list[str], out: Path, what: str) -> Path:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"ended with code {process.returncode}"]
        raise Unavailable(f"{what} failed: {lines[-1]}")
    return out
