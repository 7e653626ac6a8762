"""The fast path against the plain one on a model that is larger than the caches: step times against what reading the
weights takes, the cost curve v(m), the price of context, and MTP at forced acceptance against its prediction.

The weights are random, so the head's own drafts would not stand: drafts are the right tokens with a given probability.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nextn.benchmarking.cost import measured_costs, step_bytes
from nextn.checkpoints.tensor_file import write_json
from nextn.decode import Settings, prepare, rounds
from nextn.fast.choose import Engine
from nextn.fast.passes import SIZES
from nextn.figures.speedup import expected_length, expected_speedup
from nextn.model import Model


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
    """The head does all its work, and then drafts the right token of a text with probability `rate`: behind its
    step stands one op that puts it in the place of the argmax. Rounds are native, as those of any decode."""

    def __init__(self, engine: Engine, drafts: int, room: int) -> None:
        """drafts: of a round. room: for so many tokens of a text."""
        self.table = torch.zeros(room + SIZES[-1], dtype=torch.int64)
        prepare(engine.trunk, engine.head, 1, drafts, fixed=True)
        ((inputs, step),) = engine.head._chained._replays.values()
        # Column i predicts token i + 2; the chain's starts have moved on to column i + 1 by then.
        assert step.program.add("index_select", [step.outputs[1], self.table[1:], inputs.starts], [0])

    def tell(self, text: Sequence[int], rate: float, seed: int) -> None:
        """What is right. The same place of the text is drafted the same way again."""
        right = torch.rand(len(text), generator=torch.Generator().manual_seed(seed)) < rate
        tokens = torch.tensor(text)
        self.table[: len(text)] = torch.where(right, tokens, (tokens + 1) % 256)


def decoded(engine: Engine, prompt: list[int], drafts: int, tokens: int) -> tuple[list[int], float, int]:
    """-> tokens, seconds behind the prefill, rounds."""
    stream = rounds(engine.trunk, engine.head, [prompt], Settings(drafts=drafts, max_tokens=tokens))
    log = [next(stream)]
    started = time.perf_counter()
    log += stream
    return [token for each in log for token in each.rows[0].emitted], time.perf_counter() - started, len(log) - 1


def bound(engine: Engine, weights: int, repeats: int) -> dict[str, float]:
    """A step at 256 columns in turn with a sum over 512 MB, as memory's pace changes on a shared machine.

    weights: bytes that a step reads. read_bandwidth: bytes/s of the sums, all threads. step_over_bound: steps by what
    sums take for as many bytes, turn by turn. Medians."""
    values, cache = torch.ones(2**27), engine.trunk.cache(1)
    bandwidths, shares = [], []
    with torch.inference_mode():
        engine.trunk(torch.zeros(1, 256, dtype=torch.int64), cache)
        cache.keep([256])
        for _ in range(4 * repeats):
            bandwidths.append(values.nbytes / timed(values.sum, 1))
            shares.append(timed(lambda: step(engine, cache), 1) * bandwidths[-1] / weights)
    return {"read_bandwidth": statistics.median(bandwidths), "step_over_bound": statistics.median(shares)}


def forced(model: Model, head: Forced, rate: float, drafts: int, tokens: int, repeats: int) -> dict[str, float]:
    """The speed-up against what costs and acceptance length of the same turn predict. Medians; lengths: means."""
    engine = model.engine("fast")
    prompt = torch.randint(256, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    text, *_ = decoded(engine, prompt, 0, tokens)
    gains, lengths, predicted, ideal = [], [], [], []
    for repeat in range(repeats):
        costs = measured_costs(model, drafts=drafts, context=256, repeats=3, path="fast")
        runs: dict[int, tuple[list[int], float, int]] = {}
        for each in (0, drafts) if repeat % 2 else (drafts, 0):
            head.tell([*prompt, *text], rate, seed=repeat)
            runs[each] = decoded(engine, prompt, each, tokens)
        assert runs[drafts][0] == runs[0][0] == text
        gains.append(runs[0][1] / runs[drafts][1])
        lengths.append((len(text) - 1) / runs[drafts][2])
        predicted.append(lengths[-1] / costs.of_round(drafts))
        ideal.append(expected_speedup(costs, [rate] * drafts, drafts))
    return {
        "rate": rate,
        "drafts": drafts,
        "acceptance_length": statistics.mean(lengths),
        "speedup": statistics.median(gains),
        "predicted": statistics.median(predicted),
        "achieved": statistics.median(gain / each for gain, each in zip(gains, predicted, strict=True)),
        "ideal_length": expected_length([rate] * drafts),
        "ideal_speedup": statistics.median(ideal),
    }


def contexts(model: Model, path: str, columns: Sequence[int], repeats: int) -> dict[int, float]:
    """Milliseconds per plain token at each context, the median of single steps."""
    engine, found = model.engine(path), {}
    cache = engine.trunk.cache(1)
    tokens = torch.randint(256, (1, max(columns)), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        for before, context in zip((0, *columns), columns, strict=False):
            for start in range(before, context, 512):
                part = tokens[:, start : min(context, start + 512)]
                engine.trunk(part, cache)
                cache.keep([part.shape[1]])
            found[context] = 1e3 * timed(lambda: step(engine, cache), repeats)
    return found


def step(engine: Engine, cache: object) -> None:
    engine.trunk.predict(engine.trunk(torch.zeros(1, 1, dtype=torch.int64), cache).normed).best  # noqa: B018
    cache.keep([0])


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
    parser.add_argument("--drafts", type=int, default=12)
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
    costs = {path: measured_costs(model, drafts=args.drafts, context=256, path=path) for path in ("fast", "plain")}
    record["costs"] = {path: each.as_record() for path, each in costs.items()}
    engine = model.engine("fast")
    record |= bound(engine, weights, args.repeats)
    head = Forced(engine, args.drafts, 128 + args.tokens)
    choices = [(rate, drafts) for rate in (0.7, 0.9) for drafts in (4, args.drafts)]
    record["forced"] = [forced(model, head, *each, args.tokens, args.repeats) for each in choices]
    record["ms_per_token"] = {
        path: contexts(model, path, (512, 2048, 8192), args.repeats) for path in ("fast", "plain")
    }
    print(json.dumps(record, indent=1))
    if args.out:
        write_json(args.out, record)


if __name__ == "__main__":
    main()
