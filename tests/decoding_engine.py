"""Our own decoder as an engine: texts and counters of a canary's prompts, in Python or behind a loopback server.

Counts as vLLM does where `whole`: the last round drafts as many tokens as any, also beyond the text's end.
"""

import json
from contextlib import contextmanager, nullcontext

import loopback
import torch

from nextn.conformance.build import MAX_K
from nextn.conformance.engine_run import ConformanceRun, SampledRun
from nextn.decoding.generate import generate
from nextn.engines.counters import Counters, fill_in_derived, sum_counters
from nextn.evaluate.conventions import apply_variants
from nextn.evaluate.faults import FAULTS, fault_variant
from nextn.runtime.backend import backend_for
from nextn.settings import Contract, Sampling, Settings
from nextn.speculative.sampling import sample_at, to_probs
from nextn.speculative.verification import Verifier

BY_NAME = {fault.name: fault for fault in FAULTS}


def faulty(model, name):
    """-> (model, contract) under a fault; None where this head cannot have it."""
    fault = BY_NAME[name]
    if fault.contract:
        return (model, Contract(**fault.contract)) if model.head.num_modules == 1 else None
    reading = fault_variant(fault, model)
    return None if reading is None else apply_variants(model, Contract(), [reading])


def answered(model, contract, prompts, k, tokens, *, whole=False, rule="block", temperature=0.0, seed=0):
    """Of each prompt its new tokens, and counters. rule: of acceptance, above temperature 0."""
    settings = Settings(
        num_speculative_tokens=k,
        max_tokens=tokens + whole * (MAX_K + 1),
        eos=(),
        contract=contract,
        sampling=Sampling(temperature),
        seed=seed or 0,
        block_verification=rule == "block",
        sampled_drafts=rule != "argmax",
    )
    with _matching(model) if rule == "match" and temperature else nullcontext():
        return [_cut(each, k, tokens) for each in generate(model, prompts, settings, backend="torch")]


class _Matching(Verifier):
    """A draft stands only if the trunk, too, draws it."""

    def decide(self, logits, q, drafts, u, limit, *, seen=None):
        drawn = sample_at(to_probs(logits, self.sampling), u)
        stands = (drawn[:, :-1] == drafts) & (torch.arange(drafts.shape[1]) < limit[:, None])
        kept = stands.long().cumprod(-1).sum(-1)
        return torch.stack([kept, drawn.gather(1, kept[:, None])[:, 0]], dim=1)


@contextmanager
def _matching(model):
    trunk = backend_for(model, "torch").trunk
    trunk.verifier = lambda sampling, *, block_verification: _Matching(sampling, block_verification=block_verification)
    try:
        yield
    finally:
        del trunk.verifier


def _cut(result, k, tokens):
    rounds, emitted = [], 1
    for part in result.rounds[1:]:
        if emitted < tokens:
            rounds.append(part)
            emitted += len(part.emitted)
    kept = [part.num_accepted for part in rounds if part.drafts]
    positions = tuple(sum(each > place for each in kept) for place in range(k))
    drafted = sum(len(part.drafts) for part in rounds)
    return result.tokens[:tokens], Counters("ours", len(kept), drafted, sum(kept), positions)


def seen(model, contract, canary, k, *, whole=False):
    found = answered(model, contract, [each.ids for each in canary.prompts], k, canary.max_tokens, whole=whole)
    return ConformanceRun(tuple(text for text, _ in found), tuple(((at,), each) for at, (_, each) in enumerate(found)))


def drawn(model, canary, k, rule, *, passes=8, whole=True, seed=1):
    """Of texts above temperature 0."""
    prompts, count = [each.ids for each in canary.prompts] * passes, len(canary.prompts)
    how = {"rule": rule, "whole": whole, "temperature": canary.sampled.temperature, "seed": seed}
    found = answered(model, Contract(), prompts, k, canary.max_tokens, **how)
    texts = [text for text, _ in found]
    passed = tuple(tuple(texts[start : start + count]) for start in range(0, len(texts), count))
    return SampledRun(passed, fill_in_derived(sum_counters(counters for _, counters in found)))


class Server(loopback.Loopback):
    """OpenAI's completions of token ids over `answered`, one at a time; vLLM's counters at /metrics."""

    def __init__(
        self,
        model,
        contract=None,
        *,
        num_speculative_tokens=3,
        metrics=True,
        wrong=False,
        rule="block",
        seeds=True,
        whole=True,
    ):
        self.model, self.contract, self.num_speculative_tokens = model, contract or Contract(), num_speculative_tokens
        self.rule, self.seeds, self.whole = rule, seeds, whole
        self.metrics, self.wrong, self.total, self.asked = metrics, wrong, [0, 0, 0, *[0] * num_speculative_tokens], []
        self.listen(_Handler, engine=self)

    def complete(self, body):
        prompt = body["prompt"]
        self.asked.append(body)
        if isinstance(prompt, str):  # the question that finds out what the engine tells
            return [0] * body["max_tokens"]
        how = {"temperature": body["temperature"], "seed": body.get("seed") if self.seeds else 0}
        how |= {"rule": self.rule, "whole": self.whole}
        ((text, found),) = answered(
            self.model, self.contract, [prompt], self.num_speculative_tokens, body["max_tokens"], **how
        )
        news = [found.num_drafts, found.draft_tokens, found.accepted, *found.per_position]
        self.total = [old + new for old, new in zip(self.total, news, strict=True)]
        return [*text[:5], (text[5] + 1) % 40, *text[6:]] if self.wrong else list(text)

    def counted(self):
        names = ("drafts", "draft_tokens", "accepted_tokens")
        lines = [f"vllm:spec_decode_num_{name}_total {value}" for name, value in zip(names, self.total, strict=False)]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {value}'
            for place, value in enumerate(self.total[3:])
        ]
        return "\n".join(["# TYPE vllm:spec_decode_num_drafts counter", *lines, ""])


class _Handler(loopback.Handler):
    engine: Server

    def do_GET(self):
        if self.path == "/v1/models":
            self.give(200, json.dumps({"data": [{"id": "canary"}]}).encode())
        elif self.engine.metrics:
            self.give(200, self.engine.counted().encode())
        else:
            self.give(404, b"{}")

    def do_POST(self):
        tokens = self.engine.complete(self.read_json())
        choice = {"text": "?", "token_ids": tokens, "finish_reason": "length", "index": 0}
        self.give(200, json.dumps({"choices": [choice], "usage": {"prompt_tokens": 1}}).encode())
