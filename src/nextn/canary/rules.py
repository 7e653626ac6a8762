"""Which rule of acceptance an engine has above temperature 0: its counts of drawn texts, by likelihood. No torch.

The hypotheses are the rules of the canary's record, the likelihoods those of `measuring.causes`: a text of theirs is a
pass over all prompts here.
"""

import math
from collections.abc import Sequence

from nextn.canary.contract import Clause, Outcome
from nextn.canary.drive import Drawn
from nextn.canary.kit import Canary, Rule
from nextn.engines.counters import Counters
from nextn.errors import EngineError
from nextn.measuring.causes import NAMED, UNFIT, Cause, named, ranked
from nextn.measuring.hypotheses import Expected, Observed, observation

# The last round of a text may be cut; where rounds are shorter than this share of K, it is not that alone.
_WHOLE = 0.8


def judged(clause: Clause, canary: Canary, drafts: int, drawn: Drawn) -> Outcome:
    """Held: the counts are those of a rule that the clause allows; broken: of one that it does not; untold where that
    cannot be said. drafts: K."""
    if drawn.counters is None:
        return Outcome(clause, "untold", drawn.without or "the engine tells no counts")
    if found := _unlike(canary, drawn):
        return Outcome(clause, "untold", found)
    try:
        observed = observation(drawn.counters, drafts, whole=_WHOLE)
    except EngineError as error:
        return Outcome(clause, "untold", f"at temperature {canary.sampled.temperature:g}: {error}")
    expected = hypotheses(canary.sampled.rules, drawn.counters, observed, drafts)
    causes = ranked(observed, expected)
    return _said(clause, canary, observed, causes)


def hypotheses(rules: Sequence[Rule], counters: Counters, observed: Observed, drafts: int) -> list[Expected]:
    """What each rule gives in these counts. An AL is of all rounds, and of the drafts that a text had room for."""
    cut = counters.draft_tokens is not None and counters.draft_tokens < drafts * (counters.drafts or 0)
    found = []
    for rule in rules:
        offered, kept = rule.counts[drafts]["cut" if cut else "whole"]
        if not observed.offered:
            offered, kept = rule.counts[drafts]["whole"][0], rule.counts[drafts]["cut"][1]
        found.append(Expected(rule.name, offered, kept, chances=True))
    return found


def _unlike(canary: Canary, drawn: Drawn) -> str:
    """Why the texts are not what was asked for; "" where they are."""
    heat, texts = f"{canary.sampled.temperature:g}", [text for texts in drawn.texts for text in texts]
    alike = [len(set(of_prompt)) == 1 for of_prompt in zip(*drawn.texts, strict=True)]
    greedy = [each.tokens[: canary.max_tokens] for each in canary.prompts]
    if all(alike) and (len(drawn.texts) > 1 or list(drawn.texts[0]) == greedy):
        return f"the same texts at every seed: the engine does not sample at temperature {heat}, or takes no seed"
    short = sum(len(text) < canary.max_tokens for text in texts)
    if short:
        return (
            f"{short} of {len(texts)} texts at temperature {heat} end before token {canary.max_tokens}: the engine "
            "must go on behind an end of text (ignore_eos)"
        )
    return ""


def _said(clause: Clause, canary: Canary, observed: Observed, causes: Sequence[Cause]) -> Outcome:
    rules = {each.name: each for each in canary.sampled.rules}
    held, wrong = ([each for each in causes if bool(rules[each.name].fault) is bad] for bad in (False, True))
    best, rival = causes[0], (held if rules[causes[0].name].fault else wrong)[0]
    seen = _figures(observed.rates, observed.al)
    if best.misfit < UNFIT:
        return _unknown(clause, observed, held)
    odds = f"{best.times(rival)} likelier than with {rules[rival.name].fault or rival.name}"
    if best.over(rival) < NAMED:
        either = " and ".join(sorted(rules[each.name].fault or each.name for each in (best, rival)))
        return Outcome(clause, "untold", f"{either} cannot be told apart in so many rounds ({seen}): raise --passes")
    if not rules[best.name].fault:
        return Outcome(clause, "held", f"counts as with {best.name}, {odds}: {seen}; expected {_expected(best)}")
    like = [rules[name] for name in named(causes) if rules[name].fault]
    names, says = (" or ".join(getattr(each, what) for each in like) for what in ("fault", "says"))
    issues = tuple(dict.fromkeys(issue for each in like for issue in each.issues))
    evidence = f"counts as with {names} ({says}), {odds}"
    return Outcome(clause, "broken", evidence, _expected(held[0]), seen, names, issues)


def _unknown(clause: Clause, observed: Observed, held: Sequence[Cause]) -> Outcome:
    """No rule fits. One that keeps less than all that the clause allows breaks it; one that keeps more may lose the law
    of the text, which counts do not show."""
    least, seen = min(held, key=lambda each: each.length), _figures(observed.rates, observed.al)
    if observed.al < least.length:
        evidence = f"keeps less than {least.name}, and not as any rule that is known here"
        return Outcome(clause, "broken", evidence, _expected(least), seen, "unknown-rule")
    evidence = f"the counts are those of no rule that is known here: {seen}; {least.name} gives {_expected(least)}"
    return Outcome(clause, "untold", f"{evidence}. `nextn verify` says whether the texts have the law of the trunk")


def _expected(cause: Cause) -> str:
    return _figures(cause.rates, cause.length)


def _figures(rates: Sequence[float], al: float) -> str:
    """rates: of each depth, nan where nothing was offered; none where an engine counts no positions."""
    told = " ".join("-" if math.isnan(rate) else f"{rate:.2f}" for rate in rates)
    return f"{'a_k ' + told + ', ' if told else ''}AL {al:.2f}"
