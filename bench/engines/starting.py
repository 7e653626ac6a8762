"""Which process runs an engine: its interpreter, its variables, the options that only this machine knows."""

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
    """root: where the engines are built. limit_s: of a start."""

    root: Path
    threads: int
    limit_s: float = 900

    def start(self, engine: str, options: Mapping[str, object], *, log: Path) -> Worker:
        """A worker that has loaded the engine; log: takes its stderr. Raises Unavailable with the reason."""
        self.check(engine)
        python = environments.vllm_python(self.root) if engine == "vllm" else Path(sys.executable)
        script = HERE / f"{engine.partition('.')[0]}_worker.py"
        command = [str(python), str(script), json.dumps({**self.own(engine), **options})]
        return Worker(command, log=log, env=self.variables(engine), start_s=self.limit_s)

    def check(self, engine: str) -> None:
        """Raises Unavailable for an engine that is not built."""
        if engine in environments.ENGINES and (reason := environments.missing(self.root, engine)) is not None:
            raise Unavailable(reason)

    def own(self, engine: str) -> dict[str, object]:
        """Options that are this machine's."""
        if engine != "llama.cpp":
            return {}
        return {"server": str(environments.llama_server(self.root)), "threads": self.threads}

    def variables(self, engine: str) -> dict[str, str]:
        """Environment variables of the worker."""
        said = {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        return said | (environments.vllm_variables(self.root, self.threads) if engine == "vllm" else {})

    def converted(self, checkpoint: Path, out: Path, *, dtype: str = "bf16") -> Path:
        """The checkpoint as GGUF, by llama.cpp's own converter. Raises Unavailable with its last words."""
        source = environments.llama_source(self.root)
        command = [sys.executable, str(HERE / "to_gguf.py"), str(source), str(checkpoint), str(out), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"]
            raise Unavailable(f"conversion to GGUF failed: {said[-1]}")
        return out
