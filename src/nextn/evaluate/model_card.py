"""A reference measurement as Markdown for a model card."""

from collections.abc import Iterator

from nextn import __version__
from nextn.evaluate.reference_report import AcceptanceFigures, ReferenceReport
from nextn.stats.intervals import Estimate

# Labels of acceptance rules in model cards.
_RULE_LABELS = {
    "greedy": "greedy",
    "ratio": "drafts sampled from the head",
    "block": "drafts sampled, verified jointly",
    "argmax": "the head's argmax drafted",
    "match": "drafts sampled, exact match",
}


def model_card(reference: ReferenceReport, *, command: str = "nextn measure") -> str:
    """Render Markdown for a model card: tables of a_k and AL@k, and what is needed to measure them again."""
    return "\n".join([*_card_lines(reference, command), ""])


def _label(figures: AcceptanceFigures) -> str:
    label = _RULE_LABELS[figures.rule]
    return label if figures.rule == "greedy" else f"temperature {figures.temperature:g}, {label}"


def _card_lines(reference: ReferenceReport, command: str) -> Iterator[str]:
    depths = range(1, reference.plan.num_speculative_tokens + 1)
    yield "### Multi-Token Prediction: acceptance"
    yield ""
    yield from _header(["decoding", *(f"a_{k}" for k in depths), *(f"AL@{k}" for k in depths)])
    for temperature in reference.plan.temperatures:
        for rule in reference.rules(temperature):
            if rule in ("greedy", "ratio", "argmax"):  # those that engines use; the others are in the JSON
                by_k = [reference.figures(temperature, rule=rule, k=k) for k in depths]
                lengths = [f"{figures.length.value:.2f}" for figures in by_k]
                yield _row([_label(by_k[-1]), *map(Estimate.as_text, by_k[-1].rates), *lengths])
    if len(reference.domains) > 1:
        yield ""
        yield from _header(["by domain", "decoding", *(f"a_{k}" for k in depths), f"AL@{depths[-1]}"])
        for domain in reference.domains[1:]:
            for temperature in reference.plan.temperatures:
                figures = reference.figures(temperature, domain=domain)
                yield _row(
                    [domain, _label(figures), *map(Estimate.as_text, figures.rates), f"{figures.length.value:.2f}"]
                )
    yield ""
    yield from _conditions(reference, command)


def _conditions(reference: ReferenceReport, command: str) -> Iterator[str]:
    digests = reference.to_dict()["hashes"]
    assert isinstance(digests, dict)
    hashes = ", ".join(f"{name} `{digest[:12]}`" for name, digest in digests.items())
    is_own = all(origin.is_own for origin in reference.origins.values())
    yield (
        f"a_k: share of depth-k drafts accepted among those whose shallower drafts were all accepted, at K = "
        f"{reference.plan.num_speculative_tokens}, with its 95 % interval. AL@k: tokens per round of k drafts. "
        f"{len(reference.prompts)} prompts, up to {reference.plan.max_tokens} new tokens each, "
        + ("the model's own continuations." if is_own else f"of {reference.text_source}, not the model's own.")
    )
    yield ""
    dtype = f", {reference.machine.dtype}" if reference.machine else ""
    yield f"Measured with nextn {__version__}: `{command}`{dtype}; {hashes}."
    for warning in reference.warnings:
        yield f"- {warning}"


def _header(titles: list[str]) -> Iterator[str]:
    yield _row(titles)
    yield _row(["---", *["---:"] * (len(titles) - 1)])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
