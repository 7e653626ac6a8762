"""The native backend against torch on a model larger than the processor's caches.

Measures step times against the time to read the weights, the cost curve v(m), the cost of context, and MTP at a forced
acceptance against its prediction. The weights are random, so the head's own drafts would be rejected: drafts are
replaced by the correct tokens with a given probability.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from record import write_record

from nextn.cache.kv_cache import KVCache
from nextn.decoding.rounds import prepare, rounds
from nextn.evaluate.decoding_costs import measure_costs, step_bytes
from nextn.model.model import Model
from nextn.runtime.backend import Backend, backend_for
from nextn.runtime.native.passes import BLOCK_SIZES
from nextn.settings import Settings
from nextn.stats.acceptance import expected_length
from nextn.stats.speedup import expected_speedup


def shape(layers: int, hidden: int, vocab_size: int) -> dict[str, object]:
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    }


class Forced:
    """A head that computes as usual, but drafts the correct token of a known text with probability `rate`.

    One operation after its step replaces the argmax. Rounds are native, as in any decode.
    """

    def __init__(self, engine: Backend, k: int, max_tokens: int) -> None:
        """k: draft tokens per round. max_tokens: length of the longest text."""
        self.table = torch.zeros(max_tokens + BLOCK_SIZES[-1], dtype=torch.int64)
        prepare(engine.trunk, engine.head, 1, k, fixed=True)
        ((inputs, step),) = engine.head._step_passes._replays.values()
        # Position i predicts token i + 2; the chain's starts have moved on to position i + 1 by then.
        assert step.program.add("index_select", [step.outputs[1], self.table[1:], inputs.starts], [0])

    def set_text(self, text: Sequence[int], rate: float, seed: int) -> None:
        """Set the correct tokens. A position is drafted the same way every time."""
        correct = torch.rand(len(text), generator=torch.Generator().manual_seed(seed)) < rate
        tokens = torch.tensor(text)
        self.table[: len(text)] = torch.where(correct, tokens, (tokens + 1) % 256)


def decoded(engine: Backend, prompt: list[int], k: int, tokens: int) -> tuple[list[int], float, int]:
    """Return the tokens, the seconds after the prefill, and the number of rounds."""
    stream = rounds(engine.trunk, engine.head, [prompt], Settings(num_speculative_tokens=k, max_tokens=tokens))
    log = [next(stream)]
    started = time.perf_counter()
    log += stream
    return [token for each in log for token in each.rows[0].emitted], time.perf_counter() - started, len(log) - 1


def bound(engine: Backend, weights: int, repeats: int) -> dict[str, float]:
    """Time a step at context 256 in turn with a sum over 512 MB, as bandwidth varies on a shared machine.

    weights: Bytes that a step reads. Returns medians of read_bandwidth (bytes/s of the sums, all threads) and of
    step_over_bound (step time over the time of a sum over as many bytes, in the same turn).
    """
    values, cache = torch.ones(2**27), engine.trunk.cache(1)
    bandwidths, shares = [], []
    with torch.inference_mode():
        engine.trunk(torch.zeros(1, 256, dtype=torch.int64), cache)
        cache.commit([256])
        for _ in range(4 * repeats):
            bandwidths.append(values.nbytes / timed(values.sum, 1))
            shares.append(timed(lambda: step(engine, cache), 1) * bandwidths[-1] / weights)
    return {"read_bandwidth": statistics.median(bandwidths), "step_over_bound": statistics.median(shares)}


def forced(model: Model, head: Forced, rate: float, k: int, tokens: int, repeats: int) -> dict[str, float]:
    """Compare the speedup with what costs and acceptance length of the same turn predict: medians; mean lengths."""
    engine = backend_for(model, "native")
    prompt = torch.randint(256, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    text, *_ = decoded(engine, prompt, 0, tokens)
    speedups, lengths, predicted, ideal = [], [], [], []
    for repeat in range(repeats):
        costs = measure_costs(model, num_speculative_tokens=k, context=256, repeats=3, backend="native")
        runs: dict[int, tuple[list[int], float, int]] = {}
        for each in (0, k) if repeat % 2 else (k, 0):
            head.set_text([*prompt, *text], rate, seed=repeat)
            runs[each] = decoded(engine, prompt, each, tokens)
        assert runs[k][0] == runs[0][0] == text
        speedups.append(runs[0][1] / runs[k][1])
        lengths.append((len(text) - 1) / runs[k][2])
        predicted.append(lengths[-1] / costs.round_cost(k))
        ideal.append(expected_speedup(costs, [rate] * k, k))
    return {
        "rate": rate,
        "num_speculative_tokens": k,
        "mean_acceptance_length": statistics.mean(lengths),
        "speedup": statistics.median(speedups),
        "predicted": statistics.median(predicted),
        "achieved": statistics.median(
            measured / expected for measured, expected in zip(speedups, predicted, strict=True)
        ),
        "ideal_length": expected_length([rate] * k),
        "ideal_speedup": statistics.median(ideal),
    }


def contexts(model: Model, backend: str, sizes: Sequence[int], repeats: int) -> dict[int, float]:
    """Return milliseconds per token of baseline decoding at each context, the median of single steps."""
    engine, times = backend_for(model, backend), {}
    cache = engine.trunk.cache(1)
    tokens = torch.randint(256, (1, max(sizes)), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        for before, context in zip((0, *sizes), sizes, strict=False):
            for start in range(before, context, 512):
                part = tokens[:, start : min(context, start + 512)]
                engine.trunk(part, cache)
                cache.commit([part.shape[1]])
            times[context] = 1e3 * timed(lambda: step(engine, cache), repeats)
    return times


def step(engine: Backend, cache: KVCache) -> None:
    engine.trunk.predict(engine.trunk(torch.zeros(1, 1, dtype=torch.int64), cache).final_hidden).best  # noqa: B018
    cache.commit([0])


def timed(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model.build(shape(args.layers, args.hidden, args.vocab), dtype=torch.bfloat16)
    weights = step_bytes(model.trunk)
    record: dict[str, object] = {
        "parameters": sum(weight.numel() for weight in model.trunk.parameters()),
        "threads": torch.get_num_threads(),
        "step_bytes": weights,
    }
    costs = {
        name: measure_costs(model, num_speculative_tokens=args.num_speculative_tokens, context=256, backend=name)
        for name in ("native", "torch")
    }
    record["costs"] = {name: each.as_record() for name, each in costs.items()}
    engine = backend_for(model, "native")
    record |= bound(engine, weights, args.repeats)
    head = Forced(engine, args.num_speculative_tokens, 128 + args.tokens)
    choices = [(rate, k) for rate in (0.7, 0.9) for k in (4, args.num_speculative_tokens)]
    record["forced"] = [forced(model, head, *each, args.tokens, args.repeats) for each in choices]
    record["ms_per_token"] = {
        name: contexts(model, name, (512, 2048, 8192), args.repeats) for name in ("native", "torch")
    }
    print(json.dumps(record, indent=1))
    write_record(args.out, record)


if __name__ == "__main__":
    main()
