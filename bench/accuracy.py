"""How far each way to run a model is from the model in float32.

`python bench/accuracy.py [--model FOLDER] [--widths stored,int8,int4] [--others FOLDER ...] [--out FILE]`

Without --model it is SmolLM2-135M-Instruct (`edit/published_model.py`). The texts: `evaluate/accuracy_texts.py`.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from nextn.edit.published_model import smollm2
from nextn.evaluate.accuracy import Accuracy, Reference, logits_of
from nextn.evaluate.accuracy_texts import compared_texts
from nextn.model.model import Model
from nextn.runtime.backend import backend_for


def candidate(source: str, dtype: str | None, weights: str, backend: str, reference: Reference) -> Accuracy:
    model = Model.load(source, dtype=dtype and getattr(torch, dtype), skip_head=True, need_head=False)
    model.trunk.weights = weights
    return reference.compare(logits_of(backend_for(model, backend).trunk))


def show(rows: dict[str, Accuracy]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "KL mean", "KL p99", "same argmax", "perplexity ratio", "ties"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for name, row in rows.items():
        figures = f"{row.kl_mean:.2e}", f"{row.kl_p99:.2e}", f"{row.same_argmax:.2%}", f"{row.perplexity_ratio:.4f}"
        table.add_row(name, *figures, f"{row.ties:.2%}")
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
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = args.model or str(smollm2())
    model = Model.load(source, dtype=torch.float32, skip_head=True, need_head=False, stream=True)
    texts = compared_texts(model.tokenizer, args.texts, num_tokens=args.tokens)
    reference, rows = Reference.of(model.trunk, texts.tokens), {}
    choices = [(source, args.dtype, width, each) for width in args.widths for each in args.backends]
    choices = [each for each in choices if each[2:] not in (("int8", "torch"), ("int4", "torch"))]
    for path, dtype, width, backend in [*choices, *((other, None, "stored", "native") for other in args.others)]:
        started, name = time.perf_counter(), f"{Path(path).name} {dtype or ''} {width} {backend}"
        rows[name] = candidate(path, dtype, width, backend, reference)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    show(rows)
    if args.out:
        record = {"texts": texts.as_record(), "figures": {name: row.as_record() for name, row in rows.items()}}
        args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
