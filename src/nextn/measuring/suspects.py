"""What a checkpoint's head would show if all were right, and under every fault that it can have: `Expected` of each.

All faults are scored on the texts of one reference, so what is hard in these texts is hard under every hypothesis.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nextn.measuring.causes import FINE
from nextn.measuring.faults import FAULTS, Fault, under
from nextn.measuring.hypotheses import Expected
from nextn.measuring.measure import Measured
from nextn.model import Model

NOTHING, WEIGHTS, CONTEXT, TEMPLATE = "nothing-kept", "weights", "context-length", "template"


@dataclass(frozen=True)
class Suspect:
    """What is known of a cause beside its figures."""

    name: str
    does: str
    advice: str
    issues: tuple[str, ...] = ()


def suspect(name: str) -> Suspect:
    """By the name of a cause."""
    found = next((each for each in FAULTS if each.name == name), None)
    return _OWN[name] if found is None else Suspect(name, found.does, found.advice, found.issues)


_OWN = {
    FINE: Suspect(FINE, "the engine does what this head allows", ""),
    NOTHING: Suspect(
        NOTHING,
        "no draft is ever kept, not even by accident: empty or NaN weights, or drafts that do not reach the verifier",
        "look for tensors that the loader skipped (`nextn audit` on the same folder), and for NaN in the head's logits",
        ("vllm-project/vllm#35548", "vllm-project/vllm#37667"),
    ),
    WEIGHTS: Suspect(
        WEIGHTS,
        "the head drafts badly where all is right: the weights, not the engine",
        "`nextn measure --probe` tries other readings, `nextn audit` looks at the file; else train the head",
    ),
    TEMPLATE: Suspect(
        TEMPLATE,
        "prompts with the chat template where the reference has none, or without",
        "ask the engine's chat route, or give the reference --no-chat; then compare again",
        ("ROCm/ATOM#609",),
    ),
    CONTEXT: Suspect(
        CONTEXT,
        "acceptance falls with length: positions, their scaling, or a window that the head does not have",
        "give the head the trunk's RoPE scaling and its whole context",
        ("vllm-project/vllm#37435", "kekzl/imp#897"),
    ),
}


def expectations(
    measured: Measured,
    model: Model,
    *,
    faults: Sequence[Fault] = FAULTS,
    on_fault: Callable[[], None] = lambda: None,
) -> Mapping[float, list[Expected]]:
    """temperature -> every hypothesis, "fine" first, over all texts, at K = plan.drafts and by the plan's rule of
    acceptance. on_fault: called for each."""
    found = {t: [expectation(FINE, measured, t), _nothing(measured, t)] for t in measured.drawn}
    for fault in faults:
        wrong = under(measured, model, fault)
        if wrong is not None:
            for temperature, hypotheses in found.items():
                rule = fault.rule if temperature else ""  # greedy decoding has one rule
                hypotheses.append(expectation(fault.name, wrong, temperature, rule=rule))
        on_fault()
    return found


def expectation(name: str, measured: Measured, temperature: float, *, rule: str = "") -> Expected:
    """The measurement as a hypothesis. rule: of acceptance, if not the plan's."""
    counts = measured.counts(temperature, rule or usual(measured, temperature), measured.plan.drafts)
    return Expected(
        name,
        [offered for offered, _ in counts],
        [kept for _, kept in counts],
        domains=[prompt.domain for prompt in measured.prompts],
        chances=bool(temperature and measured.scored.get(temperature)),
    )


def usual(measured: Measured, temperature: float) -> str:
    """The rule of acceptance that the engine is taken to have."""
    return measured.plan.rule if temperature else "greedy"


def _nothing(measured: Measured, temperature: float) -> Expected:
    """Every column begins a round, and keeps nothing."""
    rest = [0.0] * (measured.plan.drafts - 1)
    offered = [[float(len(text.rooms)), *rest] for text in measured.drawn[temperature].texts]
    domains = [prompt.domain for prompt in measured.prompts]
    return Expected(NOTHING, offered, [[0.0] * measured.plan.drafts for _ in offered], domains=domains)
