"""What each rule of acceptance keeps of drafts above temperature 0, over a canary's prompts drawn again and again.

A pass over all prompts is one draw: engines are asked the same prompts, so prompts that differ from each other are no
noise between what is expected and what is seen. Given a text the law of what is kept is known (`columns`), so no draft
is drawn.
"""

from collections.abc import Sequence

from nextn.decode import Settings
from nextn.figures.estimate import share
from nextn.measuring.columns import RULES, Scored, Text, counted, scored, states
from nextn.measuring.faults import FAULTS
from nextn.model import Model
from nextn.sampling import Sampling
from nextn.text import generate

# Canaries are sure of their text: of first drafts the rules keep shares that differ by 0 to 8 points at 1, where
# hundreds of texts do not tell them apart, and by 11 to 33 at 2. It is the highest that OpenAI's interface allows.
TEMPERATURE = 2.0
PASSES = 16
# How the last round of a text drafts: as many as any, or no more than are missing.
ENDINGS = ("whole", "cut")
_DIGITS = 3


def sampled(
    model: Model, prompts: Sequence[Sequence[int]], temperature: float, *, tokens: int, drafts: int, seed: int
) -> dict[str, object]:
    """The record of texts of `tokens` new tokens, which do not end before; drafts: the largest K."""
    count = len(prompts)
    asked = [tuple(each) for each in prompts] * PASSES
    beyond = tokens + drafts + 1  # what a last round drafts beyond the end is judged against
    settings = Settings(drafts=0, sampling=Sampling(temperature), max_tokens=beyond, eos=(), seed=seed)
    drawn = generate(model, asked, settings, path="plain")
    texts = [Text(prompt, each.tokens, temperature) for prompt, each in zip(asked, drawn, strict=True)]
    found = list(scored(model, texts, states(model.trunk, texts), drafts))
    passes = [found[start : start + count] for start in range(0, len(found), count)]
    rules = [_told(rule, passes, tokens, drafts) for rule in RULES if rule != "greedy"]
    return {"temperature": temperature, "rules": rules}


def _told(rule: str, passes: Sequence[Sequence[Scored]], tokens: int, drafts: int) -> dict[str, object]:
    fault = next((each for each in FAULTS if each.rule == rule), None)
    counts = {
        str(k): {ending: _counted(rule, passes, tokens, k, ending) for ending in ENDINGS} for k in range(1, drafts + 1)
    }
    offered, kept = (list(zip(*rows, strict=True)) for rows in counts[str(drafts)]["whole"].values())
    return {
        "name": rule,
        "says": RULES[rule] if fault is None else fault.does,
        "fault": "" if fault is None else fault.name,
        "issues": [] if fault is None else list(fault.issues),
        "acceptance": [share(*each).as_record() for each in zip(kept, offered, strict=True)],
        "counts": counts,
    }


def _counted(
    rule: str, passes: Sequence[Sequence[Scored]], tokens: int, drafts: int, ending: str
) -> dict[str, list[list[float]]]:
    """offered, kept: [passes][drafts]."""
    # A round begins behind new token s while one is missing; cut, while there is also one to draft before the last.
    rooms = [drafts] * (tokens - 1) if ending == "whole" else list(range(tokens - 2, 0, -1))
    survivals = [text.survivals[rule] for texts in passes for text in texts]
    sums = [each.unflatten(0, (len(passes), -1)).sum(1) for each in counted(survivals, rooms, drafts)]
    return dict(zip(("offered", "kept"), [_rounded(each.tolist()) for each in sums], strict=True))


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(value, _DIGITS) for value in row] for row in rows]
