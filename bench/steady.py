"""Held-out prompts that a recipe's model continues without repetition, for `nextn bench` and `peers.py`.

Small models tend to repeat themselves in greedy decoding, and repetitive text is easy to draft; the benchmarks leave
it out, and of 24 prompts hardly one may remain. This tries many prompts and writes those whose greedy text does not
repeat.

    python bench/steady.py runs/code/model runs/code/steady.jsonl
"""

import argparse
import json
from pathlib import Path

from nextn.checkpoint.safetensors_file import atomic
from nextn.data.degeneracy import degeneracy
from nextn.data.sources import load_corpora
from nextn.decoding.rounds import rounds
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import Settings
from nextn.train.recipes import held_out_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--asked", type=int, default=200)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    model = Model.load(args.model)
    engine, selected, num_tried = backend_for(model), [], 0
    assert model.tokenizer is not None
    _, held_out = load_corpora([], model.tokenizer)
    for prompt in held_out_prompts(held_out, count=args.asked, seed=1):
        if len(selected) == args.count:
            break
        num_tried, text = num_tried + 1, []
        for each in rounds(
            engine.trunk, engine.head, [prompt], Settings(num_speculative_tokens=8, max_tokens=args.max_tokens)
        ):
            text += each.rows[0].emitted
        selected += [prompt] if not degeneracy(text).is_degenerate else []
    with atomic(args.out) as target:
        for prompt in selected:
            target.write((json.dumps({"prompt": prompt, "domain": "held-out"}) + "\n").encode())
    print(f"{len(selected)} of {num_tried} prompts continue without repetition")


if __name__ == "__main__":
    main()
