"""Held-out prompts that a recipe's model goes on from without falling into a loop, for `nextn bench` and `peers.py`.

Small models loop in greedy decoding, and loops are easy to draft; the benchmarks leave them out, and of 24 prompts
hardly one may be left. This one asks many prompts and writes those whose greedy text does not loop.

    python bench/steady.py runs/code/model runs/code/steady.jsonl
"""

import argparse
import json
from pathlib import Path

from nextn.checkpoints.tensor_file import atomic
from nextn.corpus.corpus_files import corpora
from nextn.corpus.loops import degeneracy
from nextn.decode import Settings, rounds
from nextn.model import Model
from nextn.training.recipes import held_out_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--asked", type=int, default=200)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    model = Model.load(args.model)
    engine, kept, asked = model.engine(), [], 0
    assert model.tokenizer is not None
    _, held_out = corpora([], model.tokenizer)
    for prompt in held_out_prompts(held_out, count=args.asked, seed=1):
        if len(kept) == args.count:
            break
        asked, text = asked + 1, []
        for each in rounds(engine.trunk, engine.head, [prompt], Settings(drafts=8, max_tokens=args.max_tokens)):
            text += each.rows[0].emitted
        kept += [prompt] if not degeneracy(text).looping else []
    with atomic(args.out) as target:
        for prompt in kept:
            target.write((json.dumps({"prompt": prompt, "domain": "held-out"}) + "\n").encode())
    print(f"{len(kept)} of {asked} prompts go on without a loop")


if __name__ == "__main__":
    main()
