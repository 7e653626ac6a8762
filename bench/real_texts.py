"""Greedy texts of SmolLM2-135M-Instruct in float32, and how many of their tokens llama.cpp gives in BF16.

    python bench/real_texts.py --engines runs/engines --bf16 SmolLM2-135M-Instruct.BF16.gguf --humaneval HUMANEVAL.jsonl

It writes tests/real_texts.jsonl, to which `make test-real` compares the native backend: a line on the machine, then the
five questions below and the first five "prompt"s of HUMANEVAL.jsonl.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from engines.llama_library import LlamaModel
from record import origin

from nextn.decoding.generate import encode
from nextn.decoding.rounds import rounds
from nextn.edit.published_model import smollm2
from nextn.model.model import Model
from nextn.settings import Settings

QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse.",
    "Explain how a hash table works.",
    "Name three uses of a brick.",
    "What is 17 times 23? Think step by step.",
)
FILE = Path(__file__).resolve().parent.parent / "tests" / "real_texts.jsonl"


def greedy(model: Model, prompts: list[list[int]], length: int) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in prompts]
    for step in rounds(model.trunk, None, prompts, Settings(num_speculative_tokens=0, max_tokens=length)):
        for row in step.rows:
            texts[row.row] += row.emitted
    return texts


@torch.inference_mode()
def gaps(model: Model, prompt: list[int], text: list[int]) -> list[float]:
    """The distance of the two best logits at each token of a text."""
    hidden = model.trunk(torch.tensor([prompt + text[:-1]])).final_hidden[0, len(prompt) - 1 :]
    best = model.trunk.logits(hidden).topk(2).values
    return [round(gap, 4) for gap in (best[:, 0] - best[:, 1]).tolist()]


def num_equal(one: list[int], other: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def llama_text(llama: LlamaModel, prompt: list[int], length: int) -> list[int]:
    llama.prefill(prompt[:-1])
    tokens = prompt[-1:]
    while len(tokens) <= length:
        tokens.append(llama.next_token(tokens[-1]))
    return tokens[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="the folder of `bench/engines`")
    parser.add_argument("--bf16", type=Path, required=True, help="the model as a BF16 file of llama.cpp's quantizer")
    parser.add_argument("--humaneval", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    model = Model.load(smollm2("float32"), dtype=torch.float32, skip_head=True, need_head=False)
    functions = [json.loads(line)["prompt"] for line in args.humaneval.read_text().splitlines()[:5]]
    prompts = [encode(model, text, chat=True) for text in (*QUESTIONS, *functions)]
    llama = LlamaModel(args.engines, args.bf16, threads=torch.get_num_threads(), num_speculative_tokens=0)
    rows: list[dict[str, Any]] = []
    for prompt, text in zip(prompts, greedy(model, prompts, args.tokens), strict=True):
        end = text.index(model.tokenizer.eos_token_id) + 1 if model.tokenizer.eos_token_id in text else len(text)
        other = llama_text(llama, prompt, end)
        row = {"prompt": prompt, "tokens": text[:end], "gaps": gaps(model, prompt, text[:end])}
        rows.append(row | {"num_equal_llama_bf16": num_equal(text[:end], other)})
        print(rows[-1]["num_equal_llama_bf16"], "of", end, repr(model.tokenizer.decode(text[:end])[:60]), flush=True)
    FILE.write_text("".join(json.dumps(row) + "\n" for row in (origin(), *rows)))


if __name__ == "__main__":
    main()
