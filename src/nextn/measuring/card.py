"""A measurement as a piece of Markdown for a model card: figures, and what someone else needs to get them again."""

from collections.abc import Iterator

from nextn.figures.estimate import Estimate
from nextn.measuring.measured import Figures, Measured

# Rules of acceptance that engines use, in words; the others stay in the JSON.
WORDS = {
    "greedy": "greedy",
    "ratio": "drafts drawn from the head",
    "block": "drafts drawn, judged together",
    "argmax": "the head's argmax drafted",
    "match": "drafts drawn, exact match",
}


def card(measured: Measured, *, command: str = "nextn measure") -> str:
    """Markdown: a table of a_k and AL@k per temperature and rule, one by domain, and the conditions."""
    return "\n".join([*_lines(measured, command), ""])


def named(figures: Figures) -> str:
    """`greedy`, or temperature and rule in words."""
    words = WORDS[figures.rule]
    return words if figures.rule == "greedy" else f"temperature {figures.temperature:g}, {words}"


def _lines(measured: Measured, command: str) -> Iterator[str]:
    depths = range(1, measured.plan.drafts + 1)
    yield "### Multi-Token Prediction: acceptance"
    yield ""
    yield from _header(["decoding", *(f"a_{k}" for k in depths), *(f"AL@{k}" for k in depths)])
    for temperature in measured.plan.temperatures:
        for rule in measured.rules(temperature):
            if rule in ("greedy", "ratio", "argmax"):
                of = [measured.figures(temperature, rule=rule, drafts=k) for k in depths]
                yield _row([named(of[-1]), *map(_share, of[-1].rates), *(f"{each.length.value:.2f}" for each in of)])
    if len(measured.domains) > 1:
        yield ""
        yield from _header(["by domain", "decoding", *(f"a_{k}" for k in depths), f"AL@{depths[-1]}"])
        for domain in measured.domains[1:]:
            for temperature in measured.plan.temperatures:
                of_one = measured.figures(temperature, domain=domain)
                yield _row([domain, named(of_one), *map(_share, of_one.rates), f"{of_one.length.value:.2f}"])
    yield ""
    yield from _conditions(measured, command)


def _conditions(measured: Measured, command: str) -> Iterator[str]:
    record = measured.as_record()
    digests = record["hashes"]
    assert isinstance(digests, dict)
    marks = ", ".join(f"{name} `{digest[:12]}`" for name, digest in digests.items())
    depth = measured.plan.drafts
    yield (
        f"a_k: share of depth-k drafts kept among those whose shallower drafts were all kept, at K = {depth}, with its "
        f"95 % interval. AL@k: tokens per round of k drafts. {len(measured.prompts)} prompts, up to "
        f"{measured.plan.max_tokens} new tokens each, the model's own continuations."
    )
    yield ""
    dtype = f", {measured.machine.dtype}" if measured.machine else ""
    yield f"Measured with nextn {record['nextn']}: `{command}`{dtype}; {marks}."
    for warning in measured.warnings:
        yield f"- {warning}"


def _header(titles: list[str]) -> Iterator[str]:
    yield _row(titles)
    yield _row(["---", *["---:"] * (len(titles) - 1)])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _share(rate: Estimate) -> str:
    return "" if rate.value != rate.value else f"{rate.value:.3f} ({rate.low:.2f}-{rate.high:.2f})"
