"""Weights of eight and four bits, or KV caches of eight, against those of a checkpoint: speed and, on a trained one,
accuracy.

All are measured in turn, in one process, and times are minima over the turns, as other work on a machine only adds to
them. `python bench/quantized.py MODEL [--prompts FILE] [--out FILE]`

With --llama TYPES, such as BF16,Q8_0,Q4_K_M, llama.cpp measures the same checkpoint in the same turns, in this process:
converted by its own converter and quantized by its own llama-quantize (`python bench/peers.py setup` builds both). With
--same-files, nextn also runs these GGUF files from their codes, and again with its other weights rounded to eight bits.

With --kv-cache, the models differ in `Trunk.kv_cache_dtype`, not in `Trunk.weights`.

With --one-thread, times are one thread's processor time, so that work of other processes is not in them, but what they
leave of caches and memory bandwidth is.

With --draft-vocab N, each model is also measured with drafts from N tokens only. With --add, the run is added to the
runs of FILE, and the ranges over all of them are written anew: other work on a machine moves times from hour to hour.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import eq
from pathlib import Path
from typing import Any

import torch
from engines import environments
from engines.llama_library import LlamaModel
from engines.starting import Starter
from record import origin
from torch import Tensor

from nextn.checkpoint.safetensors_file import write_json
from nextn.decoding.generate import eos_tokens
from nextn.decoding.rounds import rounds
from nextn.edit.gguf_import import STORED, convert_gguf
from nextn.evaluate.decoding_costs import measure_costs, step_bytes, time_passes
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import KV_CACHE_DTYPES, WEIGHTS, Settings
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.stats.speedup import Spread


def loaded(
    source: str,
    dtype: torch.dtype | None,
    *,
    weights: str = "stored",
    kv_cache_dtype: str = "auto",
    draft_tokens: int = 0,
) -> Model:
    model = Model.load(source, dtype=dtype)
    model.trunk.weights, model.trunk.kv_cache_dtype = weights, kv_cache_dtype
    if draft_tokens:  # which tokens they are does not matter for the time of a draft step
        assert model.head is not None
        model.head.draft_vocabulary = DraftVocabulary(torch.arange(draft_tokens), model.trunk.vocab_size)
    return model


Clock = Callable[[], float]
ACCEPTANCE = 0.75  # of each draft, given the ones before, where it is assumed


def speed(
    models: Mapping[str, Model], llamas: Mapping[str, LlamaModel], k: int, context: int, turns: int, clock: Clock
) -> dict[str, object]:
    """Milliseconds of passes over 1, 2, ... positions and of a draft step, and of reading the weights of a step."""
    best: dict[str, list[float]] = {}
    values, reading = torch.ones(2**26), float("inf")

    def note(name: str, steps: Sequence[Spread], draft: Spread) -> None:
        times = [*(step.low for step in steps), draft.low]
        best[name] = [min(pair) for pair in zip(times, best.get(name, times), strict=True)]

    for _ in range(turns):
        for name, model in models.items():
            costs = measure_costs(
                model, num_speculative_tokens=k, context=context, repeats=2, backend="native", clock=clock
            )
            note(name, costs.steps, costs.draft)
        for name, llama in llamas.items():
            llama.prefill(range(1, context + 1))
            note(name, *time_passes(llama, k, repeats=2, clock=clock))
        started = clock()
        values.sum()
        reading = min(reading, (clock() - started) / values.nbytes)
    record: dict[str, object] = {"read_bandwidth": 1 / reading}
    for name, (*steps, draft) in best.items():
        num_bytes = llamas[name].weight_bytes if name in llamas else _step_bytes(models[name])
        record[name] = {
            "step_ms": [1e3 * step for step in steps],
            "v": [step / steps[0] for step in steps],
            "draft_ms": 1e3 * draft,
            "c": draft / steps[0],
            "step_over_reading": steps[0] / (num_bytes * reading),  # of weights
            "forced_tokens_per_s": forced_speed(steps, draft),
        }
    return record


def _step_bytes(model: Model) -> int:
    return step_bytes(model.trunk, backend_for(model, "native").weight_bits)


def forced_speed(steps: Sequence[float], draft: float) -> dict[str, float]:
    """Tokens/s by K from these times, if each draft is accepted with probability ACCEPTANCE; a round is K + 1."""
    speeds = {"0": 1 / steps[0]}
    for k in range(1, len(steps)):
        length = sum(ACCEPTANCE**depth for depth in range(k + 1))
        speeds[str(k)] = length / (steps[k] + k * draft)
    return speeds


@torch.inference_mode()
def log_probs(model: Model, texts: Sequence[Tensor]) -> Tensor:
    """Log-probabilities [positions, V] at all positions of the texts, natively."""
    trunk, parts = backend_for(model, "native").trunk, []
    for text in texts:
        parts.append(trunk.read(trunk(text[None], trunk.cache(1))).logits[0].float().log_softmax(-1))
    return torch.cat(parts)


def accuracy(
    models: Mapping[str, Model], llamas: Mapping[str, LlamaModel], exact: Model, texts: Sequence[Sequence[int]]
) -> dict[str, object]:
    """Compare next-token distributions on the texts: perplexity, and divergence in nats from those of `exact`."""
    pieces = [torch.tensor(text) for text in texts]
    targets = torch.cat([torch.cat([text[1:], torch.tensor([-1])]) for text in pieces])
    known = targets >= 0
    reference = log_probs(exact, pieces)[known]
    record: dict[str, object] = {"positions": int(known.sum())}
    others = {name: log_probs(model, pieces) for name, model in models.items()}
    others |= {name: torch.cat([llama.log_probs(text) for text in texts]) for name, llama in llamas.items()}
    for name, each in [("float32", reference), *((name, each[known]) for name, each in others.items())]:
        divergence = (reference.exp() * (reference - each)).sum(-1)
        record[name] = {
            "perplexity": float((-each.gather(1, targets[known][:, None]).mean()).exp()),
            "kl_mean": float(divergence.mean()),
            "kl_p99": float(divergence.quantile(0.99)),
            "same_argmax": float((reference.argmax(-1) == each.argmax(-1)).float().mean()),
        }
    return record


def texts_of(model: Model, prompts: Sequence[Sequence[int]], k: int, max_tokens: int, clock: Clock) -> dict[str, Any]:
    """Decode greedily: tokens, rounds after the prefill, seconds after it."""
    engine, tokens, num_rounds, seconds = backend_for(model, "native"), [], 0, 0.0
    settings = Settings(num_speculative_tokens=k, max_tokens=max_tokens, eos=tuple(eos_tokens(model)))
    for prompt in prompts:
        stream = rounds(engine.trunk, engine.head, [list(prompt)], settings)
        log = [next(stream)]
        started = clock()
        log += stream
        seconds += clock() - started
        num_rounds += len(log) - 1
        tokens.append([token for each in log for token in each.rows[0].emitted])
    return {"tokens": tokens, "rounds": num_rounds, "seconds": seconds}


def decoding(
    models: dict[str, Model], prompts: Sequence[Sequence[int]], k: int, max_tokens: int, turns: int, clock: Clock
) -> dict[str, object]:
    """Tokens/s with and without drafts, acceptance length, and whether both give the same text."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for _ in range(turns):
        for name, model in models.items():
            for number in (0, k):
                run = texts_of(model, prompts, number, max_tokens, clock)
                if (name, number) not in best or run["seconds"] < best[name, number]["seconds"]:
                    best[name, number] = run
    record: dict[str, object] = {}
    for name in models:
        plain, mtp = best[name, 0], best[name, k]
        assert plain["tokens"] == mtp["tokens"], f"{name}: greedy text with drafts is another one"
        count = sum(len(text) - 1 for text in plain["tokens"])
        record[name] = {
            "plain": count / plain["seconds"],
            "mtp": count / mtp["seconds"],
            "acceptance_length": count / mtp["rounds"],
            "same_texts": sum(map(eq, best[next(iter(models)), 0]["tokens"], plain["tokens"])),
        }
    return record | {"texts": len(prompts)}


def bytes_per_position(model: Model) -> int:
    """Of the KV caches of the trunk and of all MTP layers."""
    engine = backend_for(model, "native")
    heads = 0 if engine.head is None else engine.head.num_modules
    caches = [engine.trunk.cache(1), *(engine.head.cache(1) for _ in range(heads))]
    return sum(cache.bytes_per_position for cache in caches)


def ggufs(args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Convert the checkpoint once and quantize that file to the other types; files that are there are used."""
    starter, files = Starter(args.engines, os.cpu_count() or 1), {}
    for kind in dict.fromkeys(["BF16", *args.llama]):
        files[kind] = folder / f"{kind}.gguf"
        if files[kind].exists():
            continue
        if kind == "BF16":
            starter.check("llama.cpp")
            starter.converted(Path(args.model), files[kind])
        else:
            starter.quantized(files["BF16"], files[kind], kind)
    return {kind: files[kind] for kind in args.llama}


def of_ggufs(files: Mapping[str, Path], folder: Path) -> dict[str, Model]:
    """Convert the files with their codes; checkpoints that are there are used."""
    models = {}
    for kind, file in files.items():
        if not (out := folder / f"{kind}-codes").exists():
            convert_gguf(file, out, dtype=STORED)
        models[f"nextn {kind}"] = loaded(str(out), None)
        models[f"nextn {kind}, else int8"] = loaded(str(out), None, weights="int8")
    return models


def measured(
    args: argparse.Namespace, llamas: Mapping[str, LlamaModel], same: Mapping[str, Model], clock: Clock
) -> dict[str, object]:
    dtype = getattr(torch, args.dtype) if args.dtype else None
    changed, choices = ("kv_cache_dtype", KV_CACHE_DTYPES) if args.kv_cache else ("weights", WEIGHTS)
    models = {choice: loaded(args.model, dtype, **{changed: choice}) for choice in choices} | same
    first = next(iter(models.values()))
    trunk = first.trunk
    record: dict[str, object] = {
        "model": args.name or Path(args.model).name,
        "parameters": sum(weight.numel() for weight in trunk.parameters()),
        "dtype": str(trunk.dtype).removeprefix("torch."),
        "changed": changed,
        "bytes_per_position": {name: bytes_per_position(model) for name, model in models.items()},
        "context": args.context,
        **origin(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "threads": args.threads,
        "clock": "processor time of the thread" if args.one_thread else "wall time",
        "acceptance": ACCEPTANCE,
        "llama_weight_bytes": {name: llama.weight_bytes for name, llama in llamas.items()},
    }
    if args.prompts:
        texts = [prompt.tokens(first) for prompt in read_prompts(args.prompts)]
        exact = loaded(args.model, torch.float32)
        record["accuracy"] = accuracy(models, llamas, exact, texts)
        record["decoding"] = decoding(models, texts, args.decoding_k, args.tokens, args.turns, clock)
    for choice in choices if args.draft_vocab else ():
        name = f"{choice}, {args.draft_vocab} draft tokens"
        models[name] = loaded(args.model, dtype, draft_tokens=args.draft_vocab, **{changed: choice})
    record["speed"] = speed(models, llamas, args.num_speculative_tokens, args.context, args.turns, clock)
    record["load_after"] = [round(load, 1) for load in os.getloadavg()]
    return record


def with_run(file: Path, run: dict[str, Any]) -> dict[str, object]:
    """Return the runs of a record with one more, and the lowest and highest figures of each model of the last one."""
    runs = [*(json.loads(file.read_text())["runs"] if file.exists() else []), run]
    ranges = {}
    for name in [name for name, figures in run["speed"].items() if isinstance(figures, dict)]:
        speeds = [each["speed"] for each in runs if name in each["speed"]]
        figures = {
            "step_ms": [speed[name]["step_ms"][0] for speed in speeds],
            **{f"v({m})": [speed[name]["v"][m - 1] for speed in speeds] for m in (5, 9)},
            **{key: [speed[name][key] for speed in speeds] for key in ("draft_ms", "c", "step_over_reading")},
            "plain_tokens_per_s": [speed[name]["forced_tokens_per_s"]["0"] for speed in speeds],
            "mtp_tokens_per_s": [max(speed[name]["forced_tokens_per_s"].values()) for speed in speeds],
        }
        ranges[name] = {"runs": len(speeds)} | {key: [min(values), max(values)] for key, values in figures.items()}
    return {"ranges": ranges, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--name", help="what the record calls the model")
    parser.add_argument(
        "--prompts", type=Path, help="Held-out texts of a trained checkpoint: adds accuracy and decoding."
    )
    parser.add_argument("--kv-cache", action="store_true", help="compare KV caches instead of weights")
    parser.add_argument("--context", type=int, default=256, help="positions that passes are timed after")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=11)
    parser.add_argument("--decoding-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one-thread", action="store_true")
    parser.add_argument("--llama", type=lambda text: text.split(","), default=[], help="GGUF types, comma-separated")
    parser.add_argument("--same-files", action="store_true", help="nextn runs the GGUF files, too")
    parser.add_argument("--gguf", type=Path, help="folder to keep the GGUF files in, BF16.gguf and so on")
    parser.add_argument("--engines", type=Path, default=environments.default_folder(), help="where llama.cpp is built")
    parser.add_argument("--draft-vocab", type=int, default=0, help="measure drafts from this many tokens, too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="add this run to those in --out (at least 8 draft tokens)")
    args = parser.parse_args()
    clock: Clock = time.thread_time if args.one_thread else time.perf_counter
    args.threads = 1 if args.one_thread else args.threads
    torch.set_num_threads(args.threads)
    with ExitStack() as stack:
        llamas, same = {}, {}
        if args.llama:
            folder = args.gguf or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            files = ggufs(args, folder)
            same = of_ggufs(files, folder) if args.same_files else {}
            for kind, file in files.items():
                llama = LlamaModel(
                    args.engines, file, threads=args.threads, num_speculative_tokens=args.num_speculative_tokens
                )
                llamas[f"llama.cpp {kind}"] = llama
                stack.callback(llama.close)
        record = measured(args, llamas, same, clock)
    print(json.dumps(record, indent=1))
    if args.out:
        write_json(args.out, with_run(args.out, record) if args.add else record)


if __name__ == "__main__":
    main()
