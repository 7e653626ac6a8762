"""How far each way to run a model is from the model in float32, and how fast it is.

`python bench/accuracy.py [--model FOLDER] [--widths stored,int8,int4] [--others FOLDER ...] [--out FILE]`

Without --model it is SmolLM2-135M-Instruct (`edit/published_model.py`). The texts: `evaluate/accuracy.py`.
With --llama, llama.cpp runs these GGUF files on the same tokens, in this process. With --turns, passes over 1, 5 and 9
positions are timed, all ways in turn; times are minima of one thread's processor time, so --threads is 1.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from engines import environments
from engines.llama_library import LlamaModel
from record import write_record
from rich.console import Console
from rich.table import Table

from nextn.edit.published_model import smollm2
from nextn.evaluate.accuracy import Accuracy, Reference, compared_texts, logits_of
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.runtime.protocols import DecodingTrunk

POSITIONS = (1, 5, 9)
CONTEXT = 256  # positions before a timed pass


def loaded(source: str, dtype: str | None, weights: str, backend: str) -> DecodingTrunk:
    model = Model.load(source, dtype=dtype and getattr(torch, dtype), skip_head=True, need_head=False)
    model.trunk.weights = weights
    return backend_for(model, backend).trunk


def passes_of(trunk: DecodingTrunk) -> Callable[[int], object]:
    """Passes over positions after a filled cache, which leave it as it was."""
    cache, tokens = trunk.cache(1), torch.arange(1, CONTEXT + 1)[None]
    for block in tokens.split(min(CONTEXT, trunk.max_block_size or CONTEXT), dim=1):
        trunk(block, cache)
        cache.commit([block.shape[1]])

    def run(num_positions: int) -> object:
        with trunk.pass_context():
            best = trunk.read(trunk(tokens[:, :num_positions], cache)).best
            cache.commit([0])
        return best

    return run


@torch.inference_mode()
def speed(ways: Mapping[str, Callable[[int], object]], turns: int) -> dict[str, list[float]]:
    """Return milliseconds of passes over `POSITIONS`, the least of all turns, each after another of its kind."""
    best: dict[str, list[float]] = {}
    for _ in range(turns):
        for name, run in ways.items():
            times = []
            for num_positions in POSITIONS:
                run(num_positions)
                samples = []
                for _ in range(3):
                    started = time.thread_time()
                    run(num_positions)
                    samples.append(1e3 * (time.thread_time() - started))
                times.append(min(samples))
            best[name] = [min(pair) for pair in zip(times, best.get(name, times), strict=True)]
    return best


def show(rows: dict[str, Accuracy], times: Mapping[str, list[float]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "KL mean", "KL p99", "same argmax", "perplexity ratio", "ties", "passes, ms"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for name, row in rows.items():
        figures = f"{row.kl_mean:.2e}", f"{row.kl_p99:.2e}", f"{row.same_argmax:.2%}", f"{row.perplexity_ratio:.4f}"
        table.add_row(name, *figures, f"{row.ties:.2%}", " ".join(f"{each:.2f}" for each in times.get(name, ())))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint folder; default: SmolLM2-135M-Instruct in bfloat16")
    parser.add_argument("--widths", type=lambda text: text.split(","), default=["stored", "int8", "int4"])
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["native"])
    parser.add_argument("--others", nargs="*", default=[], help="folders of the same model, compared as stored")
    parser.add_argument("--dtype", default="bfloat16", help="of the candidates of the model itself")
    parser.add_argument("--texts", help="a file, instead of Python's documentation")
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--llama", nargs="*", type=Path, default=[], help="GGUF files of the same model for llama.cpp")
    parser.add_argument("--engines", type=Path, default=environments.default_folder(), help="where llama.cpp is built")
    parser.add_argument("--turns", type=int, default=0, help="time passes in so many turns, with --threads 1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.turns and args.threads != 1:
        parser.error(f"--turns {args.turns} times one thread: add --threads 1")
    torch.set_num_threads(args.threads)
    source = args.model or str(smollm2())
    model = Model.load(source, dtype=torch.float32, skip_head=True, need_head=False, stream=True)
    texts = compared_texts(model.tokenizer, args.texts, num_tokens=args.tokens)
    reference, rows = Reference.of(model.trunk, texts.tokens), {}
    choices = [(source, args.dtype, width, each) for width in args.widths for each in args.backends]
    choices = [each for each in choices if each[2:] not in (("int8", "torch"), ("int4", "torch"))]
    ways: dict[str, Callable[[int], object]] = {}
    for path, dtype, width, backend in [*choices, *((other, None, "stored", "native") for other in args.others)]:
        started, name = time.perf_counter(), f"{Path(path).name} {dtype or ''} {width} {backend}"
        trunk = loaded(path, dtype, width, backend)
        rows[name] = reference.compare(logits_of(trunk))
        ways |= {name: passes_of(trunk)} if args.turns else {}
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    for file in args.llama:
        llama = LlamaModel(args.engines, file, threads=args.threads, num_speculative_tokens=0)
        name = f"llama.cpp {file.name}"
        rows[name] = reference.compare(lambda text, llama=llama: [llama.log_probs(text)])
        llama.prefill(range(1, CONTEXT + 1))
        ways[name] = llama.verify
    times = speed(ways, args.turns) if args.turns else {}
    show(rows, times)
    if args.out:
        figures = {name: row.as_record() | {"pass_ms": times.get(name)} for name, row in rows.items()}
        record = {
            "model": Path(source).name, "texts": texts.as_record(), "load": os.getloadavg(), "positions": POSITIONS,
            "figures": figures,
        }  # fmt: skip
        write_record(args.out, record)


if __name__ == "__main__":
    main()
