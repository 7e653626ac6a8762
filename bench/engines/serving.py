"""One checkpoint in one engine in float32, at K = 0 and every other K. Engines that fix K at their start load again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.client import Worker
from engines.referee import Seen, asked
from engines.starting import Starter


@dataclass(frozen=True)
class Served:
    """Runs at K = 0 (`plain`) and every other K (`seen`); versions and flags are those of the last K."""

    plain: Seen
    seen: tuple[Seen, ...]
    versions: dict[str, str]
    flags: dict[str, object]


@dataclass
class Bench:
    """Engines by name, started on first use; `folder` is for logs and GGUF files."""

    starter: Starter
    folder: Path
    context: int = 256

    def __post_init__(self) -> None:
        self.workers: dict[str, Worker] = {}

    def served(
        self,
        engine: str,
        checkpoint: Path,
        prompts: Sequence[tuple[int, ...]],
        k_values: Sequence[int],
        tokens: int,
        gguf: Path | None = None,
        **more: object,
    ) -> Served:
        """Run the prompts at K = 0 and every K of `k_values`; `more` are options of the worker. Raises Unavailable.

        transformers allows only the number of the head's MTP layers. llama.cpp runs `gguf`, or its converter's file.
        """
        gguf = self._converted(checkpoint) if engine == "llama.cpp" and gguf is None else gguf
        seen = []
        for k in (0, *k_values):
            if engine != "transformers" or not k:
                worker = self._loaded(engine, {**self._options(engine, checkpoint, gguf, k), **more})
            seen.append(asked(worker, prompts, k, tokens))
        return Served(seen[0], tuple(seen[1:]), worker.hello["versions"], worker.hello["flags"])

    def close(self) -> None:
        while self.workers:
            self.workers.popitem()[1].close()

    def _loaded(self, engine: str, options: dict[str, object]) -> Worker:
        """In the running process, or a new one."""
        worker = self.workers.get(engine)
        if worker is not None and worker.child.poll() is None:
            worker.load({**self.starter.machine_options(engine), **options}, start_s=self.starter.limit_s)
        else:
            worker = self.workers[engine] = self.starter.start(engine, options, log=self.folder / f"{engine}.log")
        return worker

    def _options(self, engine: str, checkpoint: Path, gguf: Path | None, k: int) -> dict[str, object]:
        if engine == "llama.cpp":
            return {"gguf": str(gguf), "context": self.context, "num_speculative_tokens": k, "exact": True}
        options: dict[str, object] = {"checkpoint": str(checkpoint), "dtype": "float32"}
        if engine == "vllm":
            options |= {"context": self.context, "num_speculative_tokens": k, "eager": True, "counts": True}
        return options

    def _converted(self, checkpoint: Path) -> Path:
        self.starter.check("llama.cpp")
        return self.starter.converted(checkpoint, self.folder / f"{checkpoint.name}.gguf", dtype="f32")
