"""Drafts copied from the text, beside the head and without it: tokens per second of the same prompts in turn.

    python bench/copies.py MODEL --head HEAD --prompts humaneval.jsonl --chats chats.jsonl --passages texts.txt
    python bench/copies.py runs/code/model  # of the recipe `code`: it continues held-out code

`adaptive` chooses the numbers of drafts and copies by costs that are measured before each text. Edits repeat code that
the prompt has ("rename this variable"), summaries parts of a text, chats little; open text is a story. A model that
only continues code goes on with held-out files, and with code that its prompt has begun to repeat. Greedy; texts must
be those of plain decoding. Ratios are of wall times after the prefill.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from record import write_record

from nextn.data.batches import sample_prompts
from nextn.data.sources import load_corpora
from nextn.decoding.generate import encode, eos_tokens
from nextn.decoding.rounds import rounds
from nextn.evaluate.decoding_costs import adaptive_length
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import Settings
from nextn.stats.acceptance import Acceptance

EDITS = (
    "Repeat this code exactly as it is:\n\n{}",
    "Add type hints to this function. Answer with the whole code:\n\n{}",
    "Rename the first argument to `value` in this code. Answer with the whole code:\n\n{}",
    "Add a comment before each line of this code. Answer with the whole code:\n\n{}",
)
SUMMARY = "Summarize the following text in a few sentences:\n\n{}"
STORY = "Write a story that begins with this sentence: {}"
EXCERPT, BEGUN = 384, 48  # tokens of an excerpt of code, and of its repetition in the prompt
K, COPIES = 3, 16
WAYS = {"plain": (0, 0), "mtp": (K, 0), "copy": (0, COPIES), "both": (K, COPIES), "adaptive": (K, COPIES)}


def chat_prompts(model: Model, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """The prompts by kind, as token ids, for a model that answers."""
    lines = {path: [json.loads(line)["prompt"] for line in path.read_text().splitlines()] for path in
             (args.prompts, args.chats)}  # fmt: skip
    functions = [prompt.partition("\n\n")[2] for prompt in lines[args.prompts]]
    passages = [each for each in args.passages.read_text().split("\n\n") if len(each) > 400]
    kinds = prompts_of(functions, lines[args.chats], passages, args.count)
    return {kind: [encode(model, prompt, chat=True) for prompt in prompts] for kind, prompts in kinds.items()}


def code_prompts(model: Model, count: int) -> dict[str, list[list[int]]]:
    """The same for a model that continues code: excerpts of held-out files, each also with its first lines after it."""
    assert model.tokenizer is not None
    _, held_out = load_corpora([], model.tokenizer)
    texts = [text.tolist() for text in sample_prompts(held_out, count=2 * count, length=EXCERPT, seed=1)]
    return {"code": texts[:count], "repeated": [text + text[:BEGUN] for text in texts[count:]]}


def prompts_of(functions: list[str], chats: list[str], passages: list[str], count: int) -> dict[str, list[str]]:
    """The prompts by kind."""
    edits = [EDITS[index % len(EDITS)].format(function) for index, function in enumerate(functions[:count])]
    summaries = [SUMMARY.format(passage) for passage in passages[:count]]
    stories = [STORY.format(passage.split(".")[0] + ".") for passage in passages[-count:]]
    return {"edits": edits, "summaries": summaries, "chat": chats[:count], "open": stories}


def run(engine, ids, settings, length=None):
    """The tokens, the rounds and the seconds after the prefill. length: policy that chooses by measured costs."""
    stream = rounds(engine.trunk, engine.head, [ids], settings, length=length)
    log = [next(stream)]
    started = time.perf_counter()
    log += stream
    return [token for each in log for token in each.rows[0].emitted], log, time.perf_counter() - started


def figures(cells: list[dict[str, object]]) -> dict[str, object]:
    """Speed of each way over plain decoding and over MTP, as the median over prompts, and what was accepted."""
    made: dict[str, object] = {"prompts": len(cells), "tokens": sum(cell["tokens"] for cell in cells)}
    for way in WAYS:
        over = {
            base: statistics.median(cell[base]["s"] / cell[way]["s"] for cell in cells) for base in ("plain", "mtp")
        }
        logs = [each for cell in cells for each in cell[way]["log"]]
        made[way] = {
            "over_plain": over["plain"],
            "over_mtp": over["mtp"],
            "tokens_per_round": sum(cell["tokens"] - 1 for cell in cells) / (len(logs) - len(cells)),
            "head": Acceptance.of(logs).as_record(),
            "copies": Acceptance.of(logs, copied=True).as_record(),
            "identical": sum(cell[way]["same"] for cell in cells),
        }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--head")
    parser.add_argument("--prompts", type=Path, help="code after an empty line, one JSON object per line")
    parser.add_argument("--chats", type=Path)
    parser.add_argument("--passages", type=Path, help="texts to summarize, separated by empty lines")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = Model.load(args.model, head=args.head, dtype=getattr(torch, args.dtype))
    engine, eos = backend_for(model), eos_tokens(model)
    kinds = chat_prompts(model, args) if args.prompts else code_prompts(model, args.count)
    cells: dict[str, list[dict[str, object]]] = {kind: [] for kind in kinds}
    for number, kind in [(number, kind) for number in range(args.count) for kind in kinds]:
        if number >= len(kinds[kind]):
            continue
        ids, cell = kinds[kind][number], {}
        ways = list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]
        for way in ways:
            k, copies = WAYS[way]
            settings = Settings(num_speculative_tokens=k, num_copy_tokens=copies, max_tokens=args.max_tokens, eos=eos)
            if not number:
                run(engine, ids, Settings(num_speculative_tokens=k, num_copy_tokens=copies, max_tokens=12))
            length = adaptive_length(model, limit=K, num_copy_tokens=COPIES) if way == "adaptive" else None
            tokens, log, seconds = run(engine, ids, settings, length)
            cell[way] = {"text": tokens, "log": log, "s": seconds}
        plain = cell["plain"]["text"]
        for way in WAYS:
            cell[way]["same"] = cell[way]["text"] == plain
        cell["tokens"] = len(plain)
        cells[kind].append(cell)
        print(kind, len(ids), len(plain), {way: round(cell["plain"]["s"] / cell[way]["s"], 2) for way in WAYS},
              {way: cell[way]["same"] for way in WAYS}, flush=True)  # fmt: skip
        write_record(args.out, record_of(args, cells))
    print(json.dumps(record_of(args, cells), indent=1))


def record_of(args: argparse.Namespace, cells: dict[str, list[dict[str, object]]]) -> dict[str, object]:
    """The record of the prompts so far."""
    return {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "settings": {"num_speculative_tokens": K, "num_copy_tokens": COPIES, "max_tokens": args.max_tokens},
        "kinds": {kind: figures(rows) for kind, rows in cells.items() if rows},
    }


if __name__ == "__main__":
    main()
