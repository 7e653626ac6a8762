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
from nextn.figures.speedup import Costs, expected_length, expected_speedup
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


def read_bandwidth(repeats: int = 7) -> float:
    """Bytes/s of a sum over 512 MB, in all threads; the best, which is what the machine can do."""
    values, best = torch.ones(2**27), 0.0
    for _ in range(repeats):
        started = time.perf_counter()
        values.sum()
        best = max(best, values.nbytes / (time.perf_counter() - started))
    return best


def forced(
    engine: Engine, head: Forced, costs: Costs, rate: float, drafts: int, tokens: int, repeats: int
) -> dict[str, float]:
    prompt = torch.randint(256, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    text, *_ = decoded(engine, prompt, 0, tokens)
    gains, lengths = [], []
    for repeat in range(repeats):
        runs: dict[int, tuple[list[int], float, int]] = {}
        for each in (0, drafts) if repeat % 2 else (drafts, 0):
            head.tell([*prompt, *text], rate, seed=repeat)
            runs[each] = decoded(engine, prompt, each, tokens)
        assert runs[drafts][0] == runs[0][0] == text
        gains.append(runs[0][1] / runs[drafts][1])
        lengths.append((len(text) - 1) / runs[drafts][2])
    length = statistics.mean(lengths)
    predicted = length / costs.of_round(drafts)
    found = {"rate": rate, "drafts": drafts, "acceptance_length": length, "speedup": statistics.median(gains)}
    ideal = expected_speedup(costs, [rate] * drafts, drafts)
    return found | {
        "predicted": predicted,
        "achieved": found["speedup"] / predicted,
        "ideal_length": expected_length([rate] * drafts),
        "ideal_speedup": ideal,
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
    record: dict[str, object] = {
        "parameters": sum(weight.numel() for weight in model.trunk.parameters()),
        "threads": torch.get_num_threads(),
        "step_bytes": step_bytes(model.trunk),
        "read_bandwidth": read_bandwidth(),
    }
    costs = {path: measured_costs(model, drafts=args.drafts, context=256, path=path) for path in ("fast", "plain")}
    record["costs"] = {path: each.as_record() for path, each in costs.items()}
    bound = record["step_bytes"] / record["read_bandwidth"]  # type: ignore[operator]
    record["step_over_bound"] = costs["fast"].steps[0].median / bound
    engine = model.engine("fast")
    head = Forced(engine, args.drafts, 128 + args.tokens)
    choices = [(rate, drafts) for rate in (0.7, 0.9) for drafts in (4, args.drafts)]
    record["forced"] = [forced(engine, head, costs["fast"], *each, args.tokens, args.repeats) for each in choices]
    record["ms_per_token"] = {
        path: contexts(model, path, (512, 2048, 8192), args.repeats) for path in ("fast", "plain")
    }
    print(json.dumps(record, indent=1))
    if args.out:
        write_json(args.out, record)


if __name__ == "__main__":
    main()
