"""Checks of sampled text: one distribution with MTP on and off, that which the engine states, and the temperature's.

The first token comes from prefill; later ones are drafted, then accepted or replaced. They are tested separately: two
sets of texts are compared by permutation, which is exact for small counts, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nextn.engines.answers import AnswerToken, EngineAnswer, EngineRequest
from nextn.engines.check_result import CheckResult
from nextn.engines.endpoint import Endpoint
from nextn.text_format import counted, docs_page
from nextn.verify_checks.session import NUM_LOGPROBS, VerifySession

TokenName = str | int
_CHUNK = 512  # permutations at once: memory stays below a few MB
Table = NDArray[np.float32]  # [texts, distinct names]: how often each text has each name
_ADVICE = (
    "check that acceptance uses the draft's own distribution after the same temperature and filters: "
    f"{docs_page('reference/verify')}"
)
_NO_LOGPROBS = "llama.cpp returns none for drafted tokens (llama.cpp#27972)"
# Seeds of the two endpoints never coincide: equal seeds would give equal texts, and hide a difference.
_SEED_STRIDE = 1_000_003
_OUTSIDE = "outside the list"
_SHARPER = 0.5  # temperature of one side for which the power of other comparisons is reported
_LOW = 0.2  # a temperature at which text is far more certain than at 1
_LOW_SHARE, _LOW_SEEDS = 2, 500_000  # a half of the samples suffices for it; its seeds are others
_SURE = 0.995  # power from which the temperature is called ignored: a correct engine would show it


@dataclass(frozen=True)
class Comparison:
    """A comparison of two sets of texts."""

    statistic: float
    null: NDArray[np.float64]  # the statistic when texts are exchanged at random
    sharpened: NDArray[np.float64]  # the same if one distribution had a lower temperature (powers of shares)
    worst: int  # index of the table where the sets differ most
    distance: float  # total variation there: half the sum of the differences of shares, noise included

    @property
    def p(self) -> float:
        return (1 + int((self.null >= self.statistic - 1e-9).sum())) / (1 + len(self.null))

    def power(self, level: float) -> float:
        """Return the probability of detecting the sharpened distribution by a test of this level."""
        return float((self.sharpened > np.quantile(self.null, 1 - level)).mean())

    def as_record(self, level: float) -> dict[str, object]:
        return {"p": self.p, "power": self.power(level), "position": self.worst, "distance": self.distance}


@dataclass(frozen=True)
class _Test:
    prompt: int | None  # None for all together
    where: str
    comparison: Comparison

    def describe(self) -> str:
        prompts = "all prompts" if self.prompt is None else f"prompt {self.prompt + 1}"
        position = f", most at token {self.comparison.worst + 2}" if self.where == "later" else ""
        p, distance = self.comparison.p, self.comparison.distance
        return f"{prompts}, {self.where} tokens: p {p:.2g}{position}, total variation {distance:.2f}"


def sampled_distribution(session: VerifySession) -> CheckResult:
    """Compare the texts of the two endpoints, prompt by prompt and all together, in three ways.

    The first token; the later tokens by position; and the ranks of the later tokens in the lists of the likeliest,
    which a sharpened or flattened distribution shifts in every context alike.
    """
    settings = session.settings
    if session.against is None:
        return CheckResult(
            "sampled-distribution",
            "inconclusive",
            "it needs a second endpoint: --against URL of the same model without MTP",
        )
    level = settings.false_alarm / (3 * (_num_prompts(session) + 1))
    tests: list[_Test] = []
    for prompt in range(_num_prompts(session)):
        texts = [text for endpoint in session.endpoints for text in _texts(session, endpoint, prompt)]
        for where, tables in _tables(texts, settings.sampled_tokens).items():
            comparison = compare(tables, settings.samples, level=level, seed=settings.seed + prompt)
            tests.append(_Test(prompt, where, comparison))
    for where in dict.fromkeys(test.where for test in tests):
        parts = [test.comparison for test in tests if test.where == where]
        tests += [_Test(None, where, combine(parts))] if len(parts) > 1 else []
    return _result(tests, session, level)


def _tables(texts: Sequence[EngineAnswer], length: int) -> dict[str, list[Table]]:
    """Tables of both endpoints' texts together, so that a name means the same on both sides."""
    name_types = {type(text.names[0]) if text.tokens else None for text in texts if text.names}
    names = [text.names if len(name_types) == 1 else tuple(text.text) for text in texts]
    tables = {"first": position_tables(names, [0]), "later": position_tables(names, range(1, length))}
    if all(token.top_logprobs for text in texts for token in text.tokens) and None not in name_types:
        tables["ranks of later"] = [count_table([[_rank(token) for token in text.tokens[1:]] for text in texts])]
    return {where: group for where, group in tables.items() if all(table.shape[1] for table in group)}


def _rank(token: AnswerToken) -> str:
    rank = next((rank for rank, entry in enumerate(token.top_logprobs) if entry.name == token.name), None)
    return _OUTSIDE if rank is None or rank >= NUM_LOGPROBS else str(rank)


def _result(tests: Sequence[_Test], session: VerifySession, level: float) -> CheckResult:
    settings = session.settings
    failures = holm([test.comparison.p for test in tests], settings.false_alarm)
    powers = [test.comparison.power(level) for test in tests]
    power = max([_any([power for test, power in zip(tests, powers, strict=True) if test.prompt is not None]), *powers])
    smallest = min(test.comparison.p for test in tests)
    evidence = f"{counted(len(tests), 'test')} of {settings.samples} against {settings.samples} texts; "
    evidence += f"smallest p {smallest:.2g}, false alarms {settings.false_alarm:g} over all; "
    evidence += f"power {power:.2f} to detect a distribution sharpened to temperature {_SHARPER:g}"
    wrong = [test for test, is_failure in zip(tests, failures, strict=True) if is_failure]
    for test in sorted(wrong, key=lambda test: test.comparison.p)[:4]:
        evidence += f"; {test.describe()}"
    if wrong and all(test.where != "first" for test in wrong):
        evidence += "; only drafted positions differ"
    figures: dict[str, object] = {
        "level": level,
        "tests": [{"prompt": test.prompt, "where": test.where} | test.comparison.as_record(level) for test in tests],
    }
    if wrong:
        return CheckResult("sampled-distribution", "failed", evidence, _ADVICE, figures)
    if power < 0.5:
        return CheckResult(
            "sampled-distribution",
            "inconclusive",
            evidence,
            "use more --samples, or prompts with less certain continuations",
            figures,
        )
    return CheckResult("sampled-distribution", "passed", evidence, "", figures)


def _any(powers: Sequence[float]) -> float:
    """Probability that at least one test detects it."""
    none = 1.0
    for power in powers:
        none *= 1 - power
    return 1 - none


def sampled_calibration(session: VerifySession) -> CheckResult:
    """Check that likeliest and unlisted tokens are sampled as often as the engine's own probabilities state.

    One endpoint is enough. The former show a sharpened distribution, the latter a flattened or garbled one.
    """
    settings = session.settings
    if not session.target.capabilities.logprobs:
        return CheckResult("sampled-logprobs", "inconclusive", "the engine returns no log-probabilities")
    texts = [text for prompt in range(_num_prompts(session)) for text in _texts(session, session.target, prompt)]
    parts = {"first": [text.tokens[:1] for text in texts], "later": [text.tokens[1:] for text in texts]}
    level = settings.false_alarm / (len(parts) * len(_EVENTS))
    results = {
        f"{where} tokens: {name}": calibrate(
            [event(token) for tokens in sequences for token in tokens if token.top_logprobs], level=level
        )
        for where, sequences in parts.items()
        for name, event in _EVENTS.items()
    }
    tested = {name: result for name, result in results.items() if result is not None}
    if not any(name.startswith("later") for name in tested):
        return CheckResult(
            "sampled-logprobs",
            "inconclusive",
            "the text is too certain: hardly any sample could have been another token",
        )
    if any(not token.top_logprobs for text in texts for token in text.tokens):
        evidence = "not all tokens come with log-probabilities"
        return CheckResult("sampled-logprobs", "inconclusive", evidence, _NO_LOGPROBS)
    failures = holm([result.p for result in tested.values()], settings.false_alarm)
    evidence = "; ".join(
        f"{name} was sampled {result.seen} times in {result.num}, {result.expected:.0f} by its stated probability "
        f"(p {result.p:.2g}; {100 * result.smallest:.1f} points would be detected)"
        for name, result in tested.items()
    )
    figures: dict[str, object] = {name: vars(result) for name, result in tested.items()}
    outcome = "failed" if any(failures) else "passed"
    return CheckResult("sampled-logprobs", outcome, evidence, _ADVICE if any(failures) else "", figures)  # type: ignore[arg-type]


def temperature(session: VerifySession) -> CheckResult:
    """Compare texts at a low temperature with those at 1, and with the second endpoint's at the low one.

    A path that accepts or replaces drafts by probabilities of another temperature gives the first two one distribution,
    or the last two different ones.
    """
    name, level = "temperature", session.settings.false_alarm / 2
    own = _combined(session, [(session.target, _LOW), (session.target, 1.0)], level)
    power = own.power(level)
    evidence = f"temperature {_LOW} against 1: p {own.p:.2g} over all prompts' later tokens"
    figures: dict[str, object] = {"low_against_1": own.as_record(level)}
    if own.p > level:
        detectable = f"; power {power:.2f} to detect the difference"
        if power < _SURE:
            advice = "use more --samples, or prompts with less certain continuations"
            return CheckResult(name, "inconclusive", evidence + detectable, advice, figures)
        return CheckResult(name, "failed", f"{evidence}{detectable}: it seems to be ignored", _ADVICE, figures)
    if session.against is None:
        return CheckResult(name, "passed", evidence, "", figures)
    both = _combined(session, [(endpoint, _LOW) for endpoint in session.endpoints], level)
    evidence += f"; MTP on against off at {_LOW}: p {both.p:.2g}, total variation {both.distance:.2f}"
    figures["on_against_off"] = both.as_record(level)
    differs = both.p <= level
    return CheckResult(name, "failed" if differs else "passed", evidence, _ADVICE if differs else "", figures)


def _combined(session: VerifySession, sides: Sequence[tuple[Endpoint, float]], level: float) -> Comparison:
    """Compare the later tokens of two sets of texts, each of one endpoint at one temperature, over all prompts."""
    parts = []
    for prompt in range(_num_prompts(session)):
        first, second = (_texts(session, endpoint, prompt, temperature=each) for endpoint, each in sides)
        tables = _tables([*first, *second], session.settings.sampled_tokens)
        shifted = tables.get("ranks of later", tables["later"])
        parts.append(compare(shifted, len(first), level=level, seed=session.settings.seed + prompt, sharper=_LOW))
    return combine(parts)


def _likeliest(token: AnswerToken) -> tuple[bool, float]:
    return token.name == token.top_logprobs[0].name, math.exp(min(0.0, token.top_logprobs[0].logprob))


def _outside(token: AnswerToken) -> tuple[bool, float]:
    """vLLM appends the sampled token to the list, after the requested number."""
    listed = sum(math.exp(min(0.0, entry.logprob)) for entry in token.top_logprobs[:NUM_LOGPROBS])
    return _rank(token) == _OUTSIDE, max(0.0, 1 - listed)


_EVENTS = {"the likeliest": _likeliest, f"one {_OUTSIDE}": _outside}


def _num_prompts(session: VerifySession) -> int:
    return min(session.settings.sampled_prompts, len(session.prompts))


def _texts(session: VerifySession, endpoint: Endpoint, prompt: int, *, temperature: float = 1.0) -> list[EngineAnswer]:
    """`samples` texts, each with its own seed, fewer at the low temperature; requested once."""
    key = (endpoint.address, prompt, temperature)
    if key not in session.sampled:
        settings = session.settings
        offset = 1 + prompt + (0 if endpoint is session.target else _num_prompts(session))
        num, start = settings.samples, settings.seed + _SEED_STRIDE * offset
        if temperature == _LOW:
            num, start = num // _LOW_SHARE, start + _LOW_SEEDS
        step = max(1, len(session.prompts) // _num_prompts(session))  # for prompts of as many domains as there are
        text = session.prompts[prompt * step].text
        requests = [
            EngineRequest(
                text, settings.sampled_tokens, temperature=temperature, seed=start + index, logprobs=NUM_LOGPROBS
            )
            for index in range(num)
        ]
        session.sampled[key] = session.answer_all(endpoint, requests)
    return session.sampled[key]


def combine(parts: Sequence[Comparison]) -> Comparison:
    """Combine several prompts into one test: texts are exchanged within each, and the statistics added up."""
    worst = max(parts, key=lambda part: part.distance)
    return Comparison(
        sum(part.statistic for part in parts),
        np.sum([part.null for part in parts], axis=0),
        np.sum([part.sharpened for part in parts], axis=0),
        worst.worst,
        worst.distance,
    )


def position_tables(texts: Sequence[Sequence[TokenName]], positions: Sequence[int]) -> list[Table]:
    """Return a table per position: which token each text has there; the end of a text counts as a token."""
    return [count_table([[repr(text[at]) if at < len(text) else ""] for text in texts]) for at in positions]


def count_table(texts: Sequence[Sequence[TokenName]]) -> Table:
    """Count how often each text has each name."""
    indices = {name: index for index, name in enumerate(dict.fromkeys(name for text in texts for name in text))}
    table = np.zeros((len(texts), len(indices)), dtype=np.float32)
    for row, text in enumerate(texts):
        for name in text:
            table[row, indices[name]] += 1
    return table


def compare(tables: Sequence[Table], num: int, *, level: float, seed: int, sharper: float = _SHARPER) -> Comparison:
    """Compare the first `num` texts with the others by a permutation test on chi-square, summed over tables.

    Complete texts are exchanged, so neither the tables nor the tokens of a text need be independent. level: of this one
    test; the number of permutations is such that p can fall well below it. sharper: temperature of one side for which
    the power is simulated.
    """
    rng = np.random.default_rng(seed)
    is_first = np.arange(len(tables[0])) < num
    statistics = np.array([_chi_square(table, is_first[None])[0] for table in tables])
    worst = int(statistics.argmax())
    sums = [tables[worst][rows].sum(axis=0) for rows in (is_first, ~is_first)]
    distance = np.abs(sums[0] / max(sums[0].sum(), 1) - sums[1] / max(sums[1].sum(), 1)).sum() / 2
    null = _permuted(tables, num, rounds=max(999, math.ceil(4 / level)), rng=rng)
    return Comparison(
        float(statistics.sum()), null, _sharpened(tables, num, 1 / sharper, rng=rng), worst, float(distance)
    )


def _chi_square(table: Table, labels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Two-sample chi-square per row of labels [rounds, texts]: sum of (o - e)^2 / e over both samples."""
    total = table.sum(axis=0).astype(np.float64)
    share = labels.sum(axis=1, keepdims=True) / labels.shape[1]
    observed = labels.astype(np.float32) @ table
    # (o1 - e1)^2 / e1 + (o2 - e2)^2 / e2 with o2 - e2 = -(o1 - e1).
    sums: NDArray[np.float64] = ((observed - share * total) ** 2 / (share * (1 - share) * total)).sum(axis=1)
    return sums


def _permuted(tables: Sequence[Table], num: int, *, rounds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    sums = []
    for start in range(0, rounds, _CHUNK):
        keys = rng.random((min(_CHUNK, rounds - start), len(tables[0])))
        labels = keys.argsort(axis=1) < num
        sums.append(sum(_chi_square(table, labels) for table in tables))
    return np.concatenate(sums)


def _sharpened(tables: Sequence[Table], num: int, exponent: float, *, rng: np.random.Generator) -> NDArray[np.float64]:
    """Simulate sharpened samples from the pooled shares of each table, as if they were independent."""
    rounds, share = 200, num / len(tables[0])
    sums = np.zeros(rounds)
    for table in tables:
        probs = table.sum(axis=0, dtype=np.float64)
        num_samples, probs = round(probs.sum()), probs / probs.sum()
        ones = rng.multinomial(round(share * num_samples), probs, size=rounds)
        others = rng.multinomial(
            num_samples - round(share * num_samples), probs**exponent / (probs**exponent).sum(), size=rounds
        )
        total = ones + others
        expected = np.maximum(share * (1 - share) * total, 1e-12)
        sums += np.where(total > 0, (ones - share * total) ** 2 / expected, 0).sum(axis=1)
    return sums


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Return which tests fail, with a probability of any false alarm of at most `level` (Holm 1979)."""
    failed = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        failed[index] = True
    return failed


@dataclass(frozen=True)
class ProbabilityCalibration:
    """How often an event was sampled, against its stated probability."""

    num: int  # samples
    seen: int
    expected: float
    p: float  # two-sided
    smallest: float  # excess share of the event that is detected with 80 % power


def calibrate(samples: Sequence[tuple[bool, float]], *, level: float) -> ProbabilityCalibration | None:
    """Test samples (whether the event occurred, its stated probability); None if they are too certain to show anything.

    Samples of one text depend on each other, but each is unbiased given those before it, so the sum is a martingale
    and its variance the sum of p (1 - p).
    """
    variance = sum(prob * (1 - prob) for _, prob in samples)
    if variance < 10:  # too few for the normal approximation
        return None
    seen, expected = sum(occurred for occurred, _ in samples), sum(prob for _, prob in samples)
    score = abs(seen - expected) / math.sqrt(variance)
    normal = NormalDist()
    smallest = (normal.inv_cdf(1 - level / 2) + normal.inv_cdf(0.8)) * math.sqrt(variance) / len(samples)
    return ProbabilityCalibration(len(samples), seen, expected, math.erfc(score / math.sqrt(2)), smallest)
