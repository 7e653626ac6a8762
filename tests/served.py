"""A trained fixture behind the fake engine's HTTP: it decodes with nextn's own decoder and counts as vLLM does."""

import threading

from fake_engine import FakeEngine

from nextn.decoding.generate import generate
from nextn.settings import Contract, Sampling, Settings


class ServedModel(FakeEngine):
    """contract: what its decoder gets wrong. faults, beside the fake engine's: `reset`, `busy` (others ask, too),
    `other-trunk` (its text is not this model's), `own-template` (it puts a token before each prompt)."""

    def __init__(self, *faults, model, contract=None, num_speculative_tokens=3):
        self.served, self.contract, self.depths = model, contract or Contract(), num_speculative_tokens
        self.rounds, self.places, self.turn = 0, [0] * num_speculative_tokens, threading.Lock()
        if "reset" in faults:
            self.rounds, self.places = 100, [60] * num_speculative_tokens
        super().__init__("no-logprobs", *faults, model="tiny")

    def decode(self, prompt, body, **_):
        settings = Settings(
            num_speculative_tokens=self.depths,
            sampling=Sampling(body["temperature"]),
            block_verification=False,
            max_tokens=body["max_tokens"],
            seed=body.get("seed") or 0,
            contract=self.contract,
        )
        with self.turn:
            (found,) = generate(self.served, [prompt], settings, backend="torch")
            for part in found.rounds:
                if len(part.drafts) == self.depths:  # vLLM drafts K up to the end, and counts what is cut off
                    self.rounds += 1
                    for place in range(part.num_accepted):
                        self.places[place] += 1
            if "busy" in self.faults:
                self.rounds += 50
        out = [(token + 1) % 40 for token in found.tokens] if "other-trunk" in self.faults else found.tokens
        return list(out), [], "length"

    def count(self, num):
        pass

    def metrics(self):
        name = "vllm:spec_decode_num_"
        if "reset" in self.faults and self.num > 5:
            self.rounds, self.places = 1, [0] * self.depths
        label = 'model_name="tiny"'
        rows = [
            f"{name}drafts_total{{{label}}} {self.rounds}",
            f"{name}draft_tokens_total{{{label}}} {self.rounds * self.depths}",
            f"{name}accepted_tokens_total{{{label}}} {sum(self.places)}",
            *(
                f'{name}accepted_tokens_per_pos_total{{{label},position="{place}"}} {count}'
                for place, count in enumerate(self.places)
            ),
        ]
        return "\n".join(["# TYPE vllm:spec_decode_num_drafts counter", *rows, ""])
