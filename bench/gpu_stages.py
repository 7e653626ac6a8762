"""The stages of `gpu.py`: generators of figures, each written as soon as it is there."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import torch
from scipy.stats import chi2_contingency
from stream import CONFIG, forget, make, write_texts
from torch import Tensor

from nextn.checkpoint.checkpoint import SHIPPED, SHIPPED_HEAD, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.data.corpus import Corpus
from nextn.decoding.rounds import rounds
from nextn.edit.published_model import smollm2
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.model.trunk import TrunkOutput
from nextn.runtime.torch_backend import TorchHead, TorchTrunk
from nextn.settings import Sampling, Settings
from nextn.speculative.sampling import Prediction
from nextn.stats.acceptance import Acceptance
from nextn.train.config import HeadConfig
from nextn.train.distributed import Ranks
from nextn.train.head_task import HeadTask
from nextn.train.loop import Trainer
from nextn.train.metrics import StepRecord

Figures = Iterator[tuple[str, Any]]
REPOSITORY = Path(__file__).resolve().parent.parent
K, ACCEPTED = 3, 0.8  # drafts a round, and the forced probability of each to be accepted


@dataclass(frozen=True)
class Inputs:
    """Where results go, what is read, and how large everything is."""

    out: Path
    rehearse: bool = False
    prompts: Path | None = None
    texts: Path | None = None
    answers: tuple[Path, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        paths = {name: Path(values[name]) if values[name] else None for name in ("prompts", "texts")}
        answers = tuple(map(Path, values["answers"]))
        return cls(Path(values["out"]), values["rehearse"], paths["prompts"], paths["texts"], answers)

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def size(self, real: int, toy: int) -> int:
        return toy if self.rehearse else real

    @cached_property
    def trunk(self) -> Path:
        """The published model; in a rehearsal, the one that comes with the package."""
        return SHIPPED if self.rehearse else smollm2("bfloat16", offline=True)

    def load(self, dtype: torch.dtype) -> Model:
        return Model.load(self.trunk, dtype=dtype, device=self.device, head=None if self.rehearse else SHIPPED_HEAD)

    def chats(self, model: Model, count: int) -> list[list[int]]:
        return [list(prompt.tokens(model, chat=not self.rehearse)) for prompt in read_prompts(self.texts)[:count]]


def command(*arguments: object) -> None:
    """Run nextn; its messages go to the stage's log."""
    subprocess.run([sys.executable, "-m", "nextn", *map(str, arguments)], stdout=subprocess.DEVNULL, check=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def tests(inputs: Inputs) -> Figures:
    """The tests that `make test-gpu` runs; in a rehearsal, some of them on a CPU."""
    chosen = ["-k", "losses or written or frozen or (cpus and glm_two)"] if inputs.rehearse else ["-n", "4"]
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py", "-p", "no:cacheprovider", *chosen]
    environment = os.environ | {"NEXTN_TEST_DEVICE": inputs.device}
    process = subprocess.run(words, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, check=False)
    print(process.stdout[-6000:])
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", process.stdout)}
    yield "counts", counts
    yield "failed", re.findall(r"^(?:FAILED|ERROR) (\S+)", process.stdout, re.MULTILINE)
    if process.returncode:
        raise SystemExit(f"tests: {counts}")


def lossless(inputs: Inputs) -> Figures:
    """Greedy texts with drafts against those without, and the distribution of sampled tokens."""
    for dtype in (torch.float32, torch.bfloat16):
        model = inputs.load(dtype)
        yield str(dtype).removeprefix("torch."), greedy_texts(model, inputs)
    yield "sampled", sampled_tokens(model, inputs)


def decode(model: Model, prompts: Sequence[Sequence[int]], **settings: Any) -> tuple[list[list[int]], Acceptance]:
    log = list(rounds(model.trunk, model.head, prompts, Settings(**settings)))
    texts: list[list[int]] = [[] for _ in prompts]
    for step in log:
        for row in step.rows:
            texts[row.row] += row.emitted
    return texts, Acceptance.of(log)


def greedy_texts(model: Model, inputs: Inputs) -> dict[str, object]:
    """How many texts are the same, and the gap of the best two logits where others part: a near-tie has a small one."""
    prompts, length = inputs.chats(model, inputs.size(32, 2)), inputs.size(128, 8)
    plain, _ = decode(model, prompts, num_speculative_tokens=0, max_tokens=length)
    drafted, acceptance = decode(model, prompts, num_speculative_tokens=K, max_tokens=length)
    gaps = [
        gap(model, [*prompt, *one], next(at for at in range(len(one)) if one[at] != other[at]) + len(prompt))
        for prompt, one, other in zip(prompts, plain, drafted, strict=True)
        if one != other
    ]
    return {
        "texts": len(prompts),
        "tokens": sum(map(len, plain)),
        "same": len(prompts) - len(gaps),
        "gaps_where_others_part": sorted(gaps),
        "acceptance_length": acceptance.length,
    }


@torch.inference_mode()
def gap(model: Model, tokens: Sequence[int], position: int) -> float:
    """The distance of the best two logits of the token at a position."""
    hidden = model.trunk(torch.tensor([tokens[:position]], device=model.trunk.device))
    best = model.trunk.logits(hidden.final_hidden[:, -1:]).float().flatten().topk(2).values
    return float(best[0] - best[1])


def sampled_tokens(model: Model, inputs: Inputs) -> dict[str, object]:
    """Whether the third to fifth tokens of many samples have the same distribution with drafts as without."""
    count = inputs.size(2048, 64)
    prompt = inputs.chats(model, 1)[0]
    samples = [
        decode(model, [prompt] * count, num_speculative_tokens=k, max_tokens=5, sampling=Sampling(1.0), seed=seed)[0]
        for seed, k in enumerate((0, K))
    ]
    results = {}
    for place in (2, 3, 4):
        counts = [Counter(text[place] for text in texts if len(text) > place) for texts in samples]
        test = two_samples(*counts)
        results[f"token_{place + 1}"] = {"degrees": int(test.dof), "p_value": float(test.pvalue)}
    return {"samples": count, **results}


def two_samples(one: Counter[int], other: Counter[int], fewest: int = 10) -> Any:
    """Chi-square test of two samples, for one distribution; tokens seen less than `fewest` times are one."""
    both = one + other
    names = [token for token, count in both.items() if count >= fewest]
    cells = [(one[token], other[token]) for token in names]
    rest = one.total() - sum(each[0] for each in cells), other.total() - sum(each[1] for each in cells)
    return chi2_contingency([*cells, rest] if any(rest) else cells, correction=False)


# Layers, hidden and intermediate size, heads of queries and of keys, head size, vocabulary: Qwen3's of these sizes.
SHAPES = {
    "0.6B": (28, 1024, 3072, 16, 8, 128, 151936),
    "4B": (36, 2560, 9728, 32, 8, 128, 151936),
    "8B": (36, 4096, 12288, 32, 8, 128, 151936),
}
TOY = (2, 64, 128, 4, 2, 16, 512)


def random_model(shape: Sequence[int], inputs: Inputs) -> Model:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config: dict[str, object] = dict(zip((*names, "head_dim", "vocab_size"), shape, strict=True))
    config |= {
        "model_type": "qwen3_5_text", "layer_types": ["full_attention"] * shape[0], "tie_word_embeddings": False,
        "max_position_embeddings": 16384,
    }  # fmt: skip
    with torch.device(inputs.device):
        return Model.build(config, dtype=torch.bfloat16)


class ForcedTrunk(TorchTrunk):
    """A trunk that computes as usual, but whose argmax is the draft with a probability: drafts of random weights."""

    generator = torch.Generator().manual_seed(0)

    def __call__(self, tokens: Tensor, cache: Any) -> TrunkOutput:
        self.block = tokens.tolist()
        return super().__call__(tokens, cache)

    def read(self, hidden: TrunkOutput) -> Prediction:
        predicted = super().read(hidden)
        best = [list(row) for row in predicted.best]
        for row, block in zip(best, self.block, strict=True):
            for place, draft in enumerate(block[1:]):
                is_accepted = torch.rand((), generator=self.generator) < ACCEPTED
                row[place] = draft if is_accepted else (draft + 1) % self.vocab_size
        predicted.best = best
        return predicted


def speed(inputs: Inputs) -> Figures:
    """Plain and MTP decoding of random weights at forced acceptance, against the time to read the weights once."""
    values = torch.ones(inputs.size(2**30, 2**20), device=inputs.device)
    rate = values.nbytes / min(timed(values.sum, inputs.device, 5))
    yield "read_bandwidth", rate
    del values
    for name, shape in SHAPES.items() if not inputs.rehearse else [("toy", TOY)]:
        model = random_model(shape, inputs)
        read = [*model.trunk.decoder.layers.parameters(), model.trunk.lm_head]
        weights_ms = 1e3 * sum(value.nbytes for value in read) / rate
        yield name, decoding_speed(model, inputs) | {"weights_ms": weights_ms}
        del model


def timed(work: Any, device: str, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def decoding_speed(model: Model, inputs: Inputs) -> dict[str, object]:
    """Tokens/s of one sequence and of 16, plain and with K drafts in turn."""
    assert model.head is not None
    trunk, head, length = ForcedTrunk(model.trunk), TorchHead(model.head), inputs.size(48, 8)
    prompt = torch.randint(trunk.vocab_size, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    record: dict[str, object] = {}
    for batch in (1, inputs.size(16, 2)):
        rates: dict[int, list[float]] = {0: [], K: []}
        accepted = Acceptance.of([])
        for turn in range(3):
            for k in (0, K) if turn % 2 else (K, 0):
                stream = rounds(trunk, head, [prompt] * batch, Settings(num_speculative_tokens=k, max_tokens=length))
                next(stream)
                began = time.perf_counter()
                log = list(stream)
                seconds = time.perf_counter() - began
                rates[k] += [sum(len(row.emitted) for step in log for row in step.rows) / seconds] if turn else []
                accepted = Acceptance.of(log) if k else accepted
        plain, mtp = median(rates[0]), median(rates[K])
        record[f"batch_{batch}"] = {
            "plain_tokens_per_s": plain,
            "mtp_tokens_per_s": mtp,
            "speedup": median(two / one for one, two in zip(rates[0], rates[K], strict=True)),
            "step_ms": 1e3 * batch / plain,
            "acceptance_length": accepted.length,
        }
    return record


def answers(inputs: Inputs) -> Figures:
    """`nextn answer`: processes that share the GPU, for a while; what they wrote trains the head."""
    seconds, count = inputs.size(50, 600), inputs.size(6, 1)
    # Caches of a batch of 1,024 take up to 20 GB of this model.
    memory = torch.cuda.mem_get_info()[1] if inputs.device == "cuda" else 0
    batch = inputs.size(1024 if memory > 1e11 else 512, 16)
    source = inputs.prompts or SHIPPED_HEAD / "prompts.jsonl"
    lines, jobs = source.read_text().splitlines(), []
    for part in range(count):
        prompts = inputs.out / f"prompts-{part}.jsonl"
        prompts.write_text("\n".join(lines[part::count][: inputs.size(10**6, 16)]) + "\n")
        arguments = [inputs.trunk, inputs.out / f"answers-{part}.jsonl", "--prompts", prompts, "-k", 0]
        arguments += ["--temperature", 0.7 if part else 0, "--max-tokens", inputs.size(192, 32), "--batch", batch]
        arguments += ["--device", inputs.device, "--dtype", "bfloat16", *(["--no-chat"] if inputs.rehearse else [])]
        jobs.append(subprocess.Popen([sys.executable, "-m", "nextn", "answer", *map(str, arguments)]))
    began = time.time()
    while any(job.poll() is None for job in jobs) and time.time() - began < seconds:
        time.sleep(0.5)
    for job in jobs:
        job.kill()  # whole batches are in the files
        job.wait()
    files = sorted(inputs.out.glob("answers-*.jsonl"))
    tokens = [len(json.loads(line)["tokens"]) for file in files for line in file.read_text().splitlines()[1:]]
    elapsed = max(file.stat().st_mtime for file in files) - began  # at the last whole batch
    yield "processes", count
    yield "answers", len(tokens)
    yield "tokens", sum(tokens)
    yield "seconds", elapsed
    yield "tokens_per_s", sum(tokens) / elapsed


def head(inputs: Inputs) -> Figures:
    """Train a new head of the published model, then measure it where it was not trained."""
    run, data = inputs.out / "head", [*sorted(inputs.out.glob("answers-*.jsonl")), *inputs.answers]
    settings = {"dtype": "bfloat16", "length": 512, "depths": 4, "lr": 2e-3, "batch_size": 64, "loss_vocab": 8192}
    settings |= {"minutes": 1.2, "eval_every": 400, "save_every": 0}
    if inputs.rehearse:
        settings |= {"length": 24, "batch_size": 2, "loss_vocab": 0, "minutes": 0.02, "eval_batches": 1}
    options = ["--freeze-trunk", "--init-head", "--from", inputs.trunk, "--head-only", "--all-tokens", "--json"]
    options += [word for file in data for word in ("--data", file)] + ["--device", inputs.device]
    options += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command("train", run, *options)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [step["tokens_per_s"] for step in steps if "tokens_per_s" in step]
    yield "training", {"steps": steps[-1]["step"], "tokens_per_s": median(rates), "heldout": steps[-1]["heldout"]}
    few = inputs.out / "few.jsonl"
    lines = (inputs.texts or SHIPPED_HEAD / "prompts.jsonl").read_text().splitlines()
    few.write_text("\n".join(lines[: inputs.size(24, 2)]) + "\n")
    measured = inputs.out / "measured.json"
    options = ["--temperatures", 0, "-k", inputs.size(4, 2), "--max-tokens", inputs.size(192, 8)]
    options += ["--dtype", "bfloat16", "--device", inputs.device, "--out", measured, "--prompts", few]
    command("measure", inputs.trunk, "--head", run / "head", *options)
    yield "measured", lengths(json.loads(measured.read_text()))


def lengths(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Mean acceptance lengths by K, with intervals, of all texts."""
    rows = [row for row in record["figures"] if row["domain"] == "all" and row["rule"] in ("greedy", "ratio")]
    return {f"K={row['num_speculative_tokens']}": row["mean_acceptance_length"] for row in rows}


def large_head(inputs: Inputs) -> Figures:
    """Steps of training a head on a trunk of 8 B shape, against the arithmetic that they need."""
    shape = TOY if inputs.rehearse else SHAPES["8B"]
    config = HeadConfig(
        steps=8, batch_size=inputs.size(8, 2), length=inputs.size(2048, 24), depths=2, eval_every=0, save_every=0,
        eval_batches=1, dtype="bfloat16", warmup=1,
    )  # fmt: skip
    model, ids = random_model(shape, inputs), torch.randint(shape[-1], (40 * config.length,)).numpy()
    origin = inputs.out / "origin"  # of a trunk that is in memory only: a head's file names what it belongs to
    random_model(TOY, inputs).save(origin, dtype=torch.bfloat16)
    trunk = sum(value.numel() for value in model.trunk.decoder.layers.parameters())
    assert model.head is not None
    layer, output = sum(value.numel() for value in model.head.parameters()), model.trunk.lm_head.numel()
    corpus = Corpus(ids.astype(np.int32), np.arange(0, len(ids), config.length), ("random",) * 40, 0, None)
    task = HeadTask(
        model,
        corpus,
        config,
        origin=Inventory.of(Checkpoint.open(origin)),
        ranks=Ranks(device=torch.device(inputs.device)),
    )
    if inputs.device == "cuda":
        yield "memory_gb_before", torch.cuda.memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    records = [each for each in Trainer(task, out=inputs.out / "large").run() if isinstance(each, StepRecord)]
    per_token = 2 * (trunk + output) + config.depths * (6 * layer + 4 * output)  # lm_head has no gradient of its own
    yield "tokens_per_s", median(each.tokens_per_s for each in records[2:])
    yield "tokens_per_step", config.batch_size * config.length
    yield "flops_per_token", per_token
    yield "flops_per_s", per_token * median(each.tokens_per_s for each in records[2:])
    if inputs.device == "cuda":
        yield "peak_gb", torch.cuda.max_memory_allocated() / 1e9


def stream(inputs: Inputs) -> Figures:
    """`nextn measure` of a checkpoint with Qwen3-Next's widths and few layers: layer by layer, and whole on the GPU.

    The first reads it from disk, the second what the kernel's cache kept of it.
    """
    folder, texts = inputs.out / "large-checkpoint", inputs.out / "random-texts.jsonl"
    began = time.perf_counter()
    tiny = {"hidden_size": 64, "vocab_size": 512, "moe_intermediate_size": 32} if inputs.rehearse else {}
    make(folder, inputs.size(4, 4), inputs.size(CONFIG["num_experts"], 16), **tiny)
    yield "bytes", sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    yield "write_s", time.perf_counter() - began
    write_texts(texts, tiny.get("vocab_size", CONFIG["vocab_size"]), inputs.size(8, 1))
    options = ["--texts", texts, "--temperatures", 0, "-k", 2, "--device", inputs.device, "--out"]
    forget(folder)
    for name, more in (("streamed", ["--stream", "--states", inputs.out / "states"]), ("whole", [])):
        began, out = time.perf_counter(), inputs.out / f"{name}.json"
        command("measure", folder, *options, out, *more)
        found = json.loads(out.read_text())
        memory = found["machine"]["peak_memory"] / 1e9
        yield name, {"seconds": time.perf_counter() - began, "peak_memory_gb": memory, "stream": found.get("stream")}
