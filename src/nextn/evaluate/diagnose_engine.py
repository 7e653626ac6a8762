"""`diagnose`: read or drive an engine, and compare what it counted with the head's reference."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from nextn.audit_rules import audit
from nextn.checkpoint.base_model import base_model
from nextn.checkpoint.checkpoint import as_checkpoint
from nextn.engines.client import Budget, Limits
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint
from nextn.engines.run_settings import with_settings
from nextn.evaluate.diagnose import Diagnosis
from nextn.evaluate.engine_counters import check_temperatures, counted_so_far, flag_texts
from nextn.evaluate.engine_probe import documented_faults, engine_priors
from nextn.evaluate.engine_run import EngineObservation, count_retokenized, diverged_text_share, drive_engine
from nextn.evaluate.faults import FAULTS, NOTHING, TEMPLATE, expectation, expectations
from nextn.evaluate.hypotheses import ExpectedCounts, engine_depth, observed_counts
from nextn.evaluate.observed_case import ObservedCase
from nextn.evaluate.reference import open_model, reference_acceptance
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.reference_texts import check_thinking
from nextn.evaluate.workload import Prompt, PromptSource, ReferencePlan, take_prompts
from nextn.model.model import Model

_ANY_ACCEPTED = 0.005  # accepted drafts per round that no rounding of a log makes of none

Step = Callable[..., None]
MeasureAnswers = Callable[[Sequence[EngineObservation], ReferencePlan], ReferenceReport]


def diagnose(
    model: str | Path | Model,
    engine: str,
    prompts: PromptSource = None,
    plan: ReferencePlan | None = None,
    *,
    drive: bool = False,
    num_speculative_tokens: int | None = None,
    flags: str | None = None,
    own_template: bool = False,
    max_seconds: float = 900.0,
    timeout: float = 120.0,
    source: str = "",
    head: str | Path | None = None,
) -> Diagnosis:
    """Name the most likely causes of an engine's low acceptance, from its own counters and the checkpoint.

    Args:
        model: The checkpoint that the engine serves, as a folder, hub id or `tiny`, or loaded.
        engine: Address of a running engine, or a file with its metrics, log or JSON counters; with `#MODEL` at its end
            if the engine serves several.
        prompts: Of the reference, as for `measure`; with `drive`, the first turn of each is sent to the engine.
        plan: How to measure the reference; None: greedy. Its K is replaced by the engine's.
        drive: Send the prompts to the engine and read its counters; otherwise, read what it counted so far.
        num_speculative_tokens: K; None: from the engine's counters or `flags`, if they show it.
        flags: The engine's command line and environment, or a file with them: K, and settings that force acceptance.
        own_template: With `drive`, send text through the engine's own chat template.
        max_seconds: Seconds that all requests to the engine may take.
        timeout: Seconds that one request may take.
        source: The checkpoint that a loaded model came from; without it, none is audited.
        head: The checkpoint that the head comes from, if another one.

    Returns:
        The causes, the likeliest first, and what to do about those that are named.

    Raises:
        ConfigError: There is no head, or the prompts, the plan or the counters cannot be used.
        EngineError: The engine does not answer, or counts no drafts.
        CheckpointError: The checkpoint cannot be read.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("metrics.txt").write_text(  # of a running engine: its address, such as localhost:8000
        ...     "vllm:spec_decode_num_drafts_total 500\\n"
        ...     "vllm:spec_decode_num_draft_tokens_total 1000\\n"
        ...     "vllm:spec_decode_num_accepted_tokens_total 20\\n"
        ... )
        >>> plan = nextn.ReferencePlan(temperatures=(0.0,), max_tokens=8, backend="torch")
        >>> found = nextn.diagnose("tiny", "metrics.txt", ["def add(a, b):"], plan)
        >>> found.has_no_fault, len(found.causes) > 10
        (False, True)
    """
    plan = plan or ReferencePlan(temperatures=(0.0,), rule="ratio")
    texts, origin = take_prompts(prompts)
    budget = Budget(Limits(seconds=max_seconds, answer_s=timeout))
    target: Endpoint | Counters
    if drive:
        texts = [replace(prompt, later=()) for prompt in texts]
        target = Endpoint.open(engine, budget, chat=own_template)
    else:
        check_temperatures(plan)
        target = counted_so_far(engine, budget, num_speculative_tokens, flags)
    loaded, source = open_model(model, source, head)
    notes = audit_lines(source, head) if source else []
    observed = observe(loaded, target, texts, plan)
    found = compare(loaded, observed, texts, plan, num_speculative_tokens, flags=flags, source=source, notes=notes)
    base = base_model(as_checkpoint(source)) if source else None
    return replace(found, reference=replace(found.reference, prompts_source=origin, base_model=base))


def observe(
    model: Model,
    target: Endpoint | Counters,
    prompts: Sequence[Prompt],
    plan: ReferencePlan,
    *,
    on_answer: Step = lambda: None,
    folder: Path | None = None,
) -> list[EngineObservation]:
    """Return what an engine counted so far, or what it counts while it is asked the prompts, see `drive_engine`."""
    check_thinking(model, plan)
    if isinstance(target, Counters):
        return [EngineObservation(plan.temperatures[0], target)]
    return drive_engine(target, model, prompts, plan, on_answer=on_answer, folder=folder)


def compare(
    model: Model,
    observed: Sequence[EngineObservation],
    prompts: Sequence[Prompt],
    plan: ReferencePlan,
    num_speculative_tokens: int | None,
    *,
    flags: str | None = None,
    source: str = "",
    notes: Sequence[str] = (),
    measure_answers: MeasureAnswers | None = None,
    on_text: Step = lambda num_texts=1: None,
    on_fault: Step = lambda: None,
    keep_interrupted: bool = False,
) -> Diagnosis:
    """Compare what an engine counted with the head's reference, and with every fault that the head can have.

    The plan's K is replaced by the engine's, by its counters and flags, its temperatures by those of the observations,
    whose indices are of these prompts. `measure_answers` measures the reference on the engine's answers, for a model
    that cannot generate. `on_text` is called with the number of texts that were decoded, and for each that was
    scored. keep_interrupted: Return what is known if Ctrl-C stops the comparison with faults. Raises ConfigError
    without a head, or if counters contradict K; EngineError for counters without figures.
    """
    texts = flag_texts(flags)
    observed = [replace(each, counters=with_settings(each.counters, texts)) for each in observed]
    plan = observed_plan(observed, plan, num_speculative_tokens)
    counts = [observed_counts(each.counters, plan.num_speculative_tokens) for each in observed]
    if measure_answers is None:
        reference = reference_acceptance(model, prompts, plan, on_text=on_text, on_score=on_text)
    else:
        reference = measure_answers(observed, plan)
    other_plan = _other_template(model, prompts, plan) if observed[0].prompt_indices is None else None
    other = None if other_plan is None else lambda: reference_acceptance(model, prompts, other_plan)
    expected, untested = _hypotheses(reference, model, other, on_fault=on_fault, keep_interrupted=keep_interrupted)
    if any(each.acceptance_length > 1 + _ANY_ACCEPTED for each in counts):
        expected = {t: [each for each in causes if each.name != NOTHING] for t, causes in expected.items()}
    cases = [
        ObservedCase(
            each,
            counted,
            _on_prompts(expected[each.temperature], reference, each),
            diverged_text_share(each, reference),
            count_retokenized(each, reference),
            plan.rule,
        )
        for each, counted in zip(observed, counts, strict=True)
    ]
    engine = observed[0].counters.engine
    priors, documented = engine_priors(model.family, engine), documented_faults(model.family, engine)
    reference = replace(reference, source=source)
    return Diagnosis(source, reference, tuple(cases), tuple(notes), priors, documented, untested)


def _hypotheses(
    reference: ReferenceReport,
    model: Model,
    other_template: Callable[[], ReferenceReport] | None,
    *,
    on_fault: Step,
    keep_interrupted: bool,
) -> tuple[dict[float, list[ExpectedCounts]], tuple[str, ...]]:
    """Return the hypotheses by temperature, and the names of those that an interrupt left out."""
    expected: dict[float, list[ExpectedCounts]] = {}
    untested = [*(fault.name for fault in FAULTS), *([TEMPLATE] if other_template else [])]

    def next_fault() -> None:
        untested.pop(0)
        on_fault()

    try:
        expected = expectations(reference, model, on_fault=next_fault, found=expected)
        if other_template is not None:
            other = other_template()
            for temperature, hypotheses in expected.items():
                hypotheses.append(expectation(TEMPLATE, other, temperature))
        untested.clear()
    except KeyboardInterrupt:
        if not keep_interrupted or len(expected) < len(reference.generated):
            raise
    known = min(map(len, expected.values()), default=0)  # of the last one, an interrupt may leave only a part
    return {temperature: hypotheses[:known] for temperature, hypotheses in expected.items()}, tuple(untested)


def audit_lines(source: str, head: str | Path | None) -> list[str]:
    """Return the errors and warnings that `audit` finds in the checkpoint and its head, one line each."""
    findings = audit(source, head=head).findings
    return [f"audit: {each.severity}, {each.rule}: {each.found}" for each in findings if each.severity != "note"]


def observed_plan(
    observations: Sequence[EngineObservation], plan: ReferencePlan, num_speculative_tokens: int | None
) -> ReferencePlan:
    """Return the plan with the temperatures of the observations and the engine's K; raises as `engine_depth`."""
    k = engine_depth([each.counters for each in observations], num_speculative_tokens)
    return replace(plan, num_speculative_tokens=k, temperatures=tuple(each.temperature for each in observations))


def _other_template(model: Model, prompts: Sequence[Prompt], plan: ReferencePlan) -> ReferencePlan | None:
    """The plan with the chat template turned off if it was applied, else on.

    None if the tokenizer has no template, or prompts are token ids, or conversations, which always take one.
    """
    has_template = model.tokenizer is not None and bool(model.tokenizer.chat_template)
    if not has_template or any(prompt.later or not isinstance(prompt.text, str) for prompt in prompts):
        return None
    is_applied = plan.chat is not False  # None applies it too, as there is one
    return replace(plan, chat=not is_applied, thinking=None)


def _on_prompts(
    expected: Sequence[ExpectedCounts], reference: ReferenceReport, observation: EngineObservation
) -> tuple[ExpectedCounts, ...]:
    """The hypotheses over the engine's prompts; repetitive texts count only where the engine counted them too."""
    indices = observation.prompt_indices
    if indices is None:
        indices = tuple(sorted(reference.text_indices(observation.temperature)))
    return tuple(each.select(indices) for each in expected)
