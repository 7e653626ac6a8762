"""What a canary's head must do: greedy texts with their gaps, and the rounds of every K, as they should be and under
every fault. All in float32 on torch's plain path, from the files as they were written."""

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from nextn import __version__
from nextn.benchmarking.workload import Prompt
from nextn.canary.kit import FORMAT
from nextn.canary.sampled import TEMPERATURE, sampled
from nextn.canary.vector import vector
from nextn.decode import Settings
from nextn.drafting import Contract
from nextn.families import ENGINES
from nextn.measuring.columns import Scored
from nextn.measuring.faults import FAULTS, Fault, under
from nextn.measuring.measure import Measured, Plan, reference, rescored
from nextn.measuring.record import hashes, prompts_hash
from nextn.measuring.variants import Variant, read_as
from nextn.model import Model
from nextn.text import generate

DRAFTS = 4  # the largest K
# A round that begins before the last token has drafts behind it: so many more tokens are decoded.
_MORE = DRAFTS + 1
TIE = 0.25  # nats between the best two tokens up to which another rounding may choose the other

DEFINITIONS = {
    "tokens": "greedy continuation by the trunk alone; the first max_tokens are compared, the rest is what the last "
    "round's drafts are judged against",
    "gaps": "log-probability of each of those tokens less that of the next best, in nats",
    "close": f"places of tokens whose gap is {TIE} or less: another rounding may choose otherwise from there on",
    "rounds": "per K and prompt, a digit a round: how many of its K drafts stand. The first round follows the first "
    "new token, each keeps its drafts and one token more, the last is the one that reaches token max_tokens. An engine "
    "that drafts no more than is missing cuts the last one",
    "looping": "greedy texts that repeat themselves, on which most faults are hidden",
    "sampled": "texts drawn at `temperature`, in several passes over the prompts. acceptance: of each rule, "
    "conditional, at the largest K, 95 % intervals. counts: per K and pass, how many rounds kept every shallower draft "
    "(offered), and this one, too (kept), as the laws expect. whole: the last round of a text drafts as many as any; "
    "cut: no more than are missing",
}


@dataclass(frozen=True)
class Reading:
    """One way to run the head. name: a fault's, `right`, `rounded` or `engine:NAME`. rounds: K -> of each prompt how
    many drafts each round keeps. issues: public threads. facts: of the row that an engine changes."""

    name: str
    says: str
    rounds: Mapping[int, Sequence[Sequence[int]]]
    issues: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    def as_record(self) -> dict[str, object]:
        digits = {str(k): ["".join(map(str, each)) for each in texts] for k, texts in self.rounds.items()}
        told = {"name": self.name, "says": self.says, "issues": list(self.issues), "facts": list(self.facts)}
        return told | {"rounds": digits}


def record(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    count: int = 16,
    tokens: int = 48,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    device: str | torch.device = "cpu",
) -> dict[str, object]:
    """The JSON document beside the checkpoint `folder`. prompts: to choose `count` from, see `_robust`. tokens: new
    ones of each text. temperature: of those that are drawn."""
    model = Model.load(folder, dtype=torch.float32, device=device)
    asked = [Prompt(tuple(each), "canary") for each in _robust(model, prompts, count, tokens)]
    plan = Plan(DRAFTS, (0.0,), tokens + _MORE, chat=False, seed=seed, path="plain")
    measured = reference(model, asked, plan)
    return {
        "format": FORMAT,
        "family": model.family.name,
        "seed": seed,
        "versions": {"nextn": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.machine(),
        "definitions": DEFINITIONS,
        "hashes": hashes(str(folder)) | {"files": _files(folder), "prompts": prompts_hash(_ids(asked))},
        "settings": {"drafts": list(range(1, DRAFTS + 1)), "max_tokens": tokens, "tie": TIE},
        "prompts": _told(model, measured, tokens),
        "looping": len(measured.looping[0.0]),
        "readings": [each.as_record() for each in readings(model, measured, folder)],
        "sampled": sampled(model, _ids(asked), temperature, tokens=tokens, drafts=DRAFTS, seed=seed),
        "vector": vector(model, _ids(asked)[0], drafts=3),
    }


def readings(model: Model, measured: Measured, folder: Path | None = None) -> Iterator[Reading]:
    """As it should be, in bfloat16, under every fault that this head can have, and as each engine is said to do it."""
    tokens = measured.plan.max_tokens - _MORE
    yield Reading("right", "as the family's row says", walked(measured.scored[0.0], tokens))
    if folder is not None:
        coarse = rescored(measured, Model.load(folder, dtype=torch.bfloat16, device=model.trunk.device), Contract())
        yield Reading("rounded", "right, computed in bfloat16", walked(coarse.scored[0.0], tokens))
    for fault in FAULTS:
        if (rounds := _faulty(model, measured, fault, tokens)) is not None:
            yield Reading(fault.name, fault.does, rounds, fault.issues)
    for engine in ENGINES:
        if facts := model.family.conventions(engine):
            says = f"as {engine} runs this family: " + ", ".join(f"{name} {value}" for name, value in facts.items())
            change = Variant(f"engine:{engine}", says, facts=facts)
            found = rescored(measured, *read_as(model, Contract(), [change]))
            yield Reading(change.key, says, walked(found.scored[0.0], tokens), facts=tuple(facts))


def walked(found: Sequence[Scored], tokens: int) -> dict[int, list[list[int]]]:
    """K -> of each text how many drafts every round keeps."""
    stood = [each.survivals["greedy"].given[:, 1:].long() for each in found]
    return {k: [_walk(each[:, :k].sum(1).tolist(), tokens) for each in stood] for k in range(1, DRAFTS + 1)}


def decoded(
    model: Model, prompts: Sequence[Sequence[int]], drafts: int, contract: Contract, *, tokens: int
) -> list[list[int]]:
    """The same from decoding, at one K."""
    settings = Settings(drafts=drafts, max_tokens=tokens + _MORE, eos=(), contract=contract)
    rounds = [[part.kept for part in each.rounds[1:]] for each in generate(model, prompts, settings, path="plain")]
    return [_cut(each, tokens) for each in rounds]


def _walk(stood: Sequence[int], tokens: int) -> list[int]:
    """stood[s]: drafts that stand in a round behind new token s -> those of the rounds that follow each other."""
    out, start = [], 0
    while start < tokens - 1:
        out.append(stood[start])
        start += stood[start] + 1
    return out


def _cut(kept: Sequence[int], tokens: int) -> list[int]:
    """Rounds up to the one that reaches the last token."""
    out, emitted = [], 1
    for each in kept:
        if emitted >= tokens:
            break
        out.append(each)
        emitted += each + 1
    return out


def _faulty(model: Model, measured: Measured, fault: Fault, tokens: int) -> dict[int, list[list[int]]] | None:
    if fault.rule:
        return None  # of sampled texts
    if fault.contract:
        if model.head is None or model.head.num_modules > 1:
            return None  # columns of several modules are run again in any case, until all tokens are known
        prompts, contract = _ids(measured.prompts), Contract(**fault.contract)  # type: ignore[arg-type]
        return {k: decoded(model, prompts, k, contract, tokens=tokens) for k in range(1, DRAFTS + 1)}
    found = under(measured, model, fault)
    return None if found is None else walked(found.scored[0.0], tokens)


def _robust(model: Model, prompts: Sequence[Sequence[int]], count: int, tokens: int) -> list[Sequence[int]]:
    """The first prompts whose greedy texts do not end and have no near tie; where they are too few, others."""
    settings = Settings(drafts=0, max_tokens=tokens + _MORE, eos=())
    texts = [each.tokens for each in generate(model, prompts, settings, path="plain")]
    eos = model.trunk.config.eos_token_id
    gaps = [_gaps(model, prompt, text)[:tokens] for prompt, text in zip(prompts, texts, strict=True)]
    order = sorted(range(len(prompts)), key=lambda at: (eos in texts[at], min(gaps[at]) <= TIE, at))
    return [prompts[at] for at in sorted(order[:count])]


@torch.inference_mode()
def _gaps(model: Model, prompt: Sequence[int], new: Sequence[int]) -> list[float]:
    hidden = model.trunk(torch.tensor([[*prompt, *new]]))
    logits = model.trunk.logits(hidden.normed[0, len(prompt) - 1 : -1])
    best = logits.float().topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


def _told(model: Model, measured: Measured, tokens: int) -> list[dict[str, object]]:
    told: list[dict[str, object]] = []
    for text in measured.drawn[0.0].texts:
        gaps = _gaps(model, text.prompt, text.new)
        said: dict[str, object] = {
            "text": bytes(text.prompt).decode(errors="replace"),
            "ids": list(text.prompt),
            "tokens": list(text.new),
        }
        close = [place for place, gap in enumerate(gaps[:tokens]) if gap <= TIE]
        told.append(said | {"gaps": [round(gap, 4) for gap in gaps], "close": close})
    return told


def _ids(prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    return [prompt.text for prompt in prompts if not isinstance(prompt.text, str)]


def _files(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}
