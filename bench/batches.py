"""Batches and long prompts: tokens/s of a batch with and without MTP, prefill time by chunk size and of a ragged batch.

The sequences of a batch end together (no eos), so that the batch size is constant.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path

import torch
from record import write_record

from nextn.decoding.rounds import rounds
from nextn.evaluate.decoding_costs import Machine
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.runtime.backend import Backend, backend_for
from nextn.settings import Sampling, Settings
from nextn.stats.acceptance import Acceptance

RAGGED = [48, 138, 10, 111, 57, 17, 203, 162, 77, 57, 200, 42, 140, 52, 56, 106]


def decoded(engine: Backend, prompts: Sequence[Sequence[int]], settings: Settings) -> tuple[float, Acceptance]:
    """Return tokens/s of all sequences together after the prefill, and the acceptance."""
    stream = rounds(engine.trunk, engine.head, prompts, settings)
    next(stream)
    started = time.perf_counter()
    log = list(stream)
    seconds = time.perf_counter() - started
    return sum(len(part.emitted) for each in log for part in each.rows) / seconds, Acceptance.of(log)


def batches(engine: Backend, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> list[dict[str, object]]:
    records = []
    for temperature in (0.0, 1.0):
        for size in args.batches:
            rows = list(islice(cycle(prompts), size))
            speeds: dict[int, list[float]] = {0: [], args.num_speculative_tokens: []}
            length = 1.0
            for turn in range(args.repeats + 1):  # the first turn is a warm-up
                for k in (0, args.num_speculative_tokens) if turn % 2 else (args.num_speculative_tokens, 0):
                    settings = Settings(
                        num_speculative_tokens=k,
                        max_tokens=args.tokens,
                        sampling=Sampling(temperature),
                        eos=(),
                        seed=turn,
                    )
                    speed, acceptance = decoded(engine, rows, settings)
                    length = acceptance.length if k else length
                    speeds[k] += [speed] if turn else []
            plain, mtp = (statistics.median(each) for each in speeds.values())
            speedup = statistics.median(after / before for before, after in zip(*speeds.values(), strict=True))
            row = {
                "temperature": temperature,
                "batch": size,
                "num_speculative_tokens": args.num_speculative_tokens,
                "mean_acceptance_length": length,
            }
            records.append(row | {"plain": plain, "mtp": mtp, "speedup": speedup})
            print(f"T {temperature:.0f}  B {size:2d}  plain {plain:7.0f}  MTP {mtp:7.0f} tokens/s = {speedup:.2f} x")
    return records


def prefills(engine: Backend, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> list[dict[str, float]]:
    text = list(islice(cycle(token for prompt in prompts for token in prompt), args.prompt))
    records = []
    for chunk in args.chunks:
        times = []
        for _ in range(args.repeats + 1):
            started = time.perf_counter()
            next(
                rounds(
                    engine.trunk,
                    engine.head,
                    [text],
                    Settings(num_speculative_tokens=args.num_speculative_tokens, chunk=chunk, eos=()),
                )
            )
            times.append(time.perf_counter() - started)
        seconds = statistics.median(times[1:])
        records.append({"prompt": len(text), "chunk": chunk, "seconds": seconds})
        rate = len(text) / seconds
        print(f"prompt of {len(text)}, chunks of {chunk:4d}: {1e3 * seconds:6.0f} ms = {rate:,.0f} tokens/s")
    return records


def ragged(engine: Backend, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> dict[str, object]:
    """Prefill prompts of several lengths, and in turn as many of the longest length, which is what padding costs."""
    tokens = cycle(token for prompt in prompts for token in prompt)
    batch = [list(islice(tokens, length)) for length in args.ragged]
    padded = [list(islice(tokens, max(args.ragged))) for _ in batch]
    settings, times = Settings(num_speculative_tokens=0, eos=()), {"ragged": [], "padded": []}
    for _ in range(args.repeats + 1):  # the first turn is a warm-up
        for kind, rows in (("ragged", batch), ("padded", padded)):
            started = time.perf_counter()
            next(rounds(engine.trunk, None, rows, settings))
            times[kind].append(time.perf_counter() - started)
    seconds = {kind: statistics.median(each[1:]) for kind, each in times.items()}
    print(
        f"{len(batch)} prompts, {sum(args.ragged)} tokens: {seconds['ragged']:.2f} s, padded {seconds['padded']:.2f} s"
    )
    return {"lengths": args.ragged, "seconds": seconds["ragged"], "padded_seconds": seconds["padded"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--chunks", type=int, nargs="*", default=[32, 128, 512, 2048])
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--ragged", type=int, nargs="+", default=RAGGED, help="lengths of the prompts of one batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    needs_head = bool(args.batches or args.chunks)
    model = Model.load(args.model, dtype=getattr(torch, args.dtype), need_head=needs_head)
    engine = backend_for(model, args.backend)
    prompts = [list(prompt.text) for prompt in read_prompts(args.prompts)]
    machine = asdict(Machine.of(model, engine))
    record = {"backend": engine.name, "machine": machine, "definition": __doc__}
    record |= {"batches": batches(engine, prompts, args), "prefills": prefills(engine, prompts, args)}
    record["ragged"] = ragged(engine, prompts, args)
    write_record(args.out, record)


if __name__ == "__main__":
    main()
