"""A measurement in the forms in which other tools write acceptance, so that theirs and ours can be compared.

The forms are those of vLLM's `--per-request-spec-decode-metrics detailed`, AIPerf (`SpecDecodeAcceptanceRecord`, and
the matrix of `aiperf speed-bench-report`), speculators' scripts/evaluate (`acceptance.csv`) and InferenceX
(golden_al_distribution). `engines.counter_formats` reads all but InferenceX's, and `published_curves` that.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nextn import __version__
from nextn.errors import ConfigError
from nextn.evaluate.published_curves import ENGINE
from nextn.evaluate.workload import by_domain
from nextn.stats.acceptance import length_of_drafts

if TYPE_CHECKING:
    from nextn.evaluate.reference_report import ReferenceReport

FORMATS = ("vllm", "aiperf", "aiperf-report", "speculators", "inferencex")
_FROM_ROUNDS = ("vllm", "aiperf", "aiperf-report", "speculators")
Steps = Sequence[tuple[int, int]]  # (num_drafted, num_accepted) of each round


def exchange_text(report: "ReferenceReport", form: str, *, source: str, prompts: str) -> str:
    """Return the measurement as another tool writes it; raise ConfigError as `check_form`.

    The report is of one temperature; above 0, decoded by rule `argmax`, which is how the engines of these tools accept.
    """
    check_form(form, report.plan.temperatures, decoded=bool(report.generated[report.plan.temperatures[0]].steps))
    name = re.sub(r"[^\w.-]+", "-", source.rstrip("/").rpartition("/")[2]) or "model"
    if form == "inferencex":
        return _inferencex(report, name, prompts)
    if form == "aiperf-report":
        return _matrix(report, name)
    if form == "speculators":
        return _speculators(report)
    records = _aiperf_records(report) if form == "aiperf" else _vllm_records(report)
    return "".join(f"{json.dumps(record)}\n" for record in records)


def check_form(form: str, temperatures: Sequence[float], *, decoded: bool) -> None:
    """Raise ConfigError for an unknown form, several temperatures, or a form of rounds that are not `decoded`."""
    if form not in FORMATS:
        raise ConfigError(f"--format {form}; expected one of {', '.join(FORMATS)}")
    if len(temperatures) != 1:
        raise ConfigError(f"--format {form} is of one temperature: give it, such as --temperatures 1")
    if form in _FROM_ROUNDS and not decoded:
        message = f"--format {form} takes decoded rounds, and given texts have none; leave --texts and --engine out"
        raise ConfigError(message)


def inferencex_note(report: "ReferenceReport", category: object) -> str | None:
    """Return how the measurement differs from InferenceX's; None if it does not."""
    plan = report.plan
    if category == "coding" and (plan.max_tokens, plan.num_speculative_tokens) == (4096, 8) and plan.temperatures[0]:
        return None
    return (
        "InferenceX collects AL on the category coding of SPEED-Bench with 4096 tokens per answer, K = 1 to 8 and the "
        f"model's own sampling; here category {category or 'all'}, {plan.max_tokens} tokens, K to "
        f"{plan.num_speculative_tokens}, temperature {plan.temperatures[0]:g}: not comparable"
    )


def request_record(steps: Steps, k: int) -> dict[str, object]:
    """Return vLLM's `metrics.speculative_decoding` of one request, at its detailed level; k: the configured K."""
    drafted, accepted = sum(step[0] for step in steps), sum(step[1] for step in steps)
    record: dict[str, object] = {
        "mean_acceptance_length": length_of_drafts(accepted, len(steps), no_rounds=1.0),
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [sum(step[1] == count for step in steps) for count in range(k + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": k,
    }
    per_step = {"per_step_accepted": [step[1] for step in steps], "per_step_drafted": [step[0] for step in steps]}
    return record | (per_step if steps else {})


def _requests(report: "ReferenceReport") -> Iterator[tuple[int, str, Steps]]:
    generated = report.generated[report.plan.temperatures[0]]
    for index, (prompt, steps) in enumerate(zip(report.prompts, generated.steps, strict=True)):
        yield index, prompt.domain, steps


def _vllm_records(report: "ReferenceReport") -> Iterator[dict[str, object]]:
    k = report.plan.num_speculative_tokens
    for index, domain, steps in _requests(report):
        yield {"prompt": index, "category": domain, "metrics": {"speculative_decoding": request_record(steps, k)}}


def _aiperf_records(report: "ReferenceReport") -> Iterator[dict[str, object]]:
    """The engine-neutral record: a sparse histogram, and the tokens of the text."""
    k, texts = report.plan.num_speculative_tokens, report.generated[report.plan.temperatures[0]].texts
    for index, domain, steps in _requests(report):
        record = request_record(steps, k)
        counts = ((count, sum(step[1] == count for step in steps)) for count in range(k + 1))
        record |= {
            "engine": "nextn",
            "acceptance_histogram": {str(count): rounds for count, rounds in counts if rounds},
            "completion_tokens": len(texts[index].new),
        }
        yield {"prompt": index, "category": domain, "spec_decode_acceptance": record}


def _matrix(report: "ReferenceReport", name: str) -> str:
    """AL by category, 1 + accepted drafts / rounds, and the mean of them: as AIPerf defines `Overall`."""
    by_category = _steps_by_domain(report)
    lengths = [
        length_of_drafts(sum(accepted for _, accepted in steps), len(steps), no_rounds=1.0)
        for steps in by_category.values()
    ]
    lengths.append(sum(lengths) / len(lengths))
    return _csv([["Model", *by_category, "Overall"], [name, *(f"{length:.2f}" for length in lengths)]])


def _steps_by_domain(report: "ReferenceReport") -> dict[str, list[tuple[int, int]]]:
    steps: dict[str, list[tuple[int, int]]] = {domain: [] for domain in by_domain(report.prompts)}
    for _, domain, part in _requests(report):
        steps[domain] += part
    return steps


def _speculators(report: "ReferenceReport") -> str:
    k = report.plan.num_speculative_tokens
    header = ["subset", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_length"]
    rows: list[list[object]] = [[*header, *(f"acceptance_at_pos_{index}" for index in range(k))]]
    for domain, steps in _steps_by_domain(report).items():
        record, rounds = request_record(steps, k), max(1, len(steps))
        positions = [sum(step[1] > index for step in steps) / rounds for index in range(k)]
        rows.append([
            domain, len(steps), record["num_draft_tokens"], record["num_accepted_draft_tokens"],
            record["mean_acceptance_length"], *positions,
        ])  # fmt: skip
    return _csv(rows)


def _csv(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _inferencex(report: "ReferenceReport", name: str, prompts: str) -> str:
    """The matrix of golden_al_distribution: model, thinking mode, K -> AL with two decimals."""
    temperature = report.plan.temperatures[0]
    rule = "argmax" if temperature else "greedy"
    mode = {True: "thinking_on", False: "thinking_off", None: None}[report.plan.thinking]
    ks = range(1, report.plan.num_speculative_tokens + 1)
    lengths = [report.figures(temperature, rule=rule, k=k).length for k in ks]
    if math.isnan(lengths[0].value):
        raise ConfigError("--format inferencex: no text has a round with drafts; raise --max-tokens, or add --prompts")
    intervals = (f"{k}: {each.low:.2f}-{each.high:.2f}" for k, each in zip(ks, lengths, strict=True))
    sampling = f"temperature: {temperature:g} | top_p: 1 | top_k: 0"
    comments = [
        f"Source: nextn {__version__} measure, from one decoding at K = {ks[-1]}, scored teacher-forced",
        "Acceptance Length (AL): 1 + accepted drafts / verification steps, of steps that draft K tokens",
        f"dataset: {prompts} | {sampling} | output_len: {report.plan.max_tokens}",
        f"{mode or 'thinking'} chat_template_kwargs: {json.dumps(report.plan.template_variables)}",
        *([] if report.machine is None else [f"machine: {report.machine.name} | precision: {report.machine.dtype}"]),
        f"Measured on {name} ({ENGINE}); drafts: argmax",
        *([] if math.isnan(lengths[0].low) else [f"95 %: {', '.join(intervals)}"]),  # none of a single text
        "",
        "key = num_speculative_tokens (MTP level); value = AL",
    ]
    lines = [f"# {' '.join(comment.split())}".rstrip() for comment in comments]
    indent = "    " if mode else "  "
    values = [f"{indent}{k}: {each.value:.2f}" for k, each in zip(ks, lengths, strict=True)]
    # Without a mode, K is directly below the model: the other form that InferenceX's scripts read.
    return "\n".join([*lines, f"{json.dumps(name.lower())}:", *([f"  {mode}:"] if mode else []), *values, ""])
