"""The acceptance that a head should reach, from the checkpoint alone: on the trunk's own texts, with controls.

The prompts are decoded once (`reference_texts`), then every position of these texts is scored (`teacher_forced`). From
the scores follow the figures of every K and acceptance rule. Other conventions of the head are scored by `rescore`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nextn.checkpoint.base_model import base_model
from nextn.checkpoint.checkpoint import Checkpoint, as_checkpoint
from nextn.errors import ConfigError, require_type
from nextn.evaluate.decoding_costs import Machine
from nextn.evaluate.given_texts import GivenTexts, text_origin, think_tokens
from nextn.evaluate.reference_report import ReferenceReport, checkpoint_hashes
from nextn.evaluate.reference_texts import (
    Controls,
    GeneratedTexts,
    check_thinking,
    exact_head,
    generate_texts,
    measure_controls,
    play_turns,
    prompt_tokens,
)
from nextn.evaluate.teacher_forced import ScoredText, score_texts, trunk_outputs
from nextn.evaluate.workload import Prompt, PromptSource, ReferencePlan, take_prompts
from nextn.model.model import Model
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.model.trunk import TrunkOutput
from nextn.runtime.backend import backend_for
from nextn.settings import Contract

TextStates = Mapping[float, Sequence[TrunkOutput]]  # the trunk's, of each text, by temperature


def reference_acceptance(
    model: Model,
    prompts: Sequence[Prompt],
    plan: ReferencePlan,
    *,
    contract: Contract | None = None,
    on_text: Callable[[float], None] = lambda num_texts: None,
    on_score: Callable[[], None] = lambda: None,
) -> ReferenceReport:
    """Decode the prompts at each temperature, then score every position.

    `contract` injects faults of decoding. `on_text` is called after each round with what it decoded, in texts,
    `on_score` after each text that was scored. Raises ConfigError if there is no head, or the prompts cannot be used.
    """
    if model.head is None:
        raise ConfigError("the checkpoint has no head, so there is nothing to measure")
    check_thinking(model, plan)
    contract = contract or Contract()
    with exact_head(model):
        prompts = play_turns(model, prompts, plan)
        ids = [prompt_tokens(model, prompt, plan) for prompt in prompts]
        generated = {
            temperature: generate_texts(model, ids, plan, temperature, contract=contract, on_text=on_text)
            for temperature in plan.temperatures
        }
    return reference_of_texts(model, prompts, generated, plan, contract=contract, on_score=on_score)


def reference_of_texts(
    model: Model,
    prompts: Sequence[Prompt],
    generated: Mapping[float, GeneratedTexts],
    plan: ReferencePlan,
    *,
    contract: Contract | None = None,
    on_score: Callable[[], None] = lambda: None,
) -> ReferenceReport:
    """Score texts that the model generated from the prompts, by temperature.

    With contract.refresh = False, the report has no scores. Arguments are those of `reference_acceptance`.
    """
    contract = contract or Contract()
    report = _unscored(model, plan, contract, prompts, generated, "decoder")
    if not contract.refresh:
        return report
    with exact_head(model):  # with the backend that decoded the texts
        trunk = backend_for(model, plan.backend).trunk
        hiddens = {temperature: trunk_outputs(trunk, each.texts) for temperature, each in generated.items()}
    return rescore(report, model, contract, hiddens=hiddens, on_score=on_score)


def acceptance_on_texts(
    model: Model,
    given: Sequence[GivenTexts],
    outputs: Sequence[Sequence[TrunkOutput]],
    plan: ReferencePlan,
    *,
    on_score: Callable[[], None] = lambda: None,
) -> ReferenceReport:
    """Score given texts, of which each item of `given` has those of one temperature, all of them equally many.

    `outputs` are their `full_text_outputs`. Raises ConfigError if there is no head.
    """
    by_temperature = {each.texts[0].temperature: each for each in given}
    plan = replace(plan, temperatures=tuple(by_temperature))
    first = by_temperature[plan.temperatures[0]]
    prompts = tuple(Prompt(text.prompt, domain) for text, domain in zip(first.texts, first.domains, strict=True))
    generated = {temperature: GeneratedTexts(each.texts, (), None) for temperature, each in by_temperature.items()}
    hiddens = dict(zip(by_temperature, outputs, strict=True))
    report = replace(
        _unscored(model, plan, Contract(), prompts, generated, "parallel"),
        text_source=", ".join(dict.fromkeys(each.source for each in given)),
        origins={t: text_origin(model.trunk, each.texts, hiddens[t]) for t, each in by_temperature.items()},
    )
    return rescore(report, model, Contract(), hiddens=hiddens, on_score=on_score)


def _unscored(
    model: Model,
    plan: ReferencePlan,
    contract: Contract,
    prompts: Sequence[Prompt],
    generated: Mapping[float, GeneratedTexts],
    scoring_pass: str,
) -> ReferenceReport:
    report = ReferenceReport(plan, contract, tuple(prompts), generated, {}, scoring_pass, family=model.family.name)
    layers = 1 if model.head is None else model.head.num_modules
    size = model.trunk.config.hidden_size, model.trunk.num_layers
    return replace(report, num_mtp_layers=layers, size=size, think_tokens=think_tokens(model.tokenizer))


def text_states(reference: ReferenceReport, model: Model) -> TextStates:
    """Return the trunk's states of the reference's texts, computed with torch."""
    return {temperature: trunk_outputs(model.trunk, each.texts) for temperature, each in reference.generated.items()}


def rescore(
    reference: ReferenceReport,
    model: Model,
    contract: Contract,
    *,
    hiddens: TextStates | None = None,
    on_score: Callable[[], None] = lambda: None,
) -> ReferenceReport:
    """Score the reference's texts again, with controls, under another convention of the head and the same trunk.

    Pass the `text_states` as `hiddens` for several conventions: on a large trunk they take longer than the scores.
    """
    assert model.head is not None
    hiddens = hiddens or text_states(reference, model)
    generated = reference.generated
    largest, scored = reference.plan.num_speculative_tokens, dict[float, tuple[ScoredText, ...]]()
    for temperature, each in generated.items():
        scores = []
        for score in score_texts(model, each.texts, hiddens[temperature], largest, contract=contract):
            scores.append(score)
            on_score()
        scored[temperature] = tuple(scores)
    if contract != reference.contract:  # the decoder's counts are those of the other contract
        generated = {
            temperature: replace(each, acceptance_per_text=(), pooled=None, steps=())
            for temperature, each in generated.items()
        }
    scoring_pass = "parallel" if model.head.can_rollout else "stepped"
    report = replace(reference, contract=contract, generated=generated, scored=scored, scoring_pass=scoring_pass)
    return replace(report, controls=_controls(report, model, hiddens))


def _controls(reference: ReferenceReport, model: Model, hiddens: TextStates) -> Controls:
    """Measure the controls on the texts of the lowest temperature, greedy if it was measured."""
    temperature = reference.plan.temperatures[0]
    texts, rule = reference.scored[temperature], reference.rules(temperature)[0]
    indices = sorted(index for index in reference.text_indices(temperature) if texts[index].remaining)
    return measure_controls(
        model,
        [texts[index] for index in indices],
        [hiddens[temperature][index] for index in indices],
        rule,
        contract=reference.contract,
    )


def measure(
    model: str | Path | Model,
    prompts: PromptSource = None,
    plan: ReferencePlan | None = None,
    *,
    source: str = "",
    head: str | Path | None = None,
    on_text: Callable[[float], None] = lambda num_texts: None,
    on_score: Callable[[], None] = lambda: None,
) -> ReferenceReport:
    """Measure the acceptance per depth that a head should reach, with intervals and negative controls.

    The model continues the prompts, and every position of these texts is scored.

    Args:
        model: A checkpoint folder, hub id or `tiny`, which is loaded onto the best device, or a loaded model.
        prompts: A file or benchmark, as `--prompts` takes them; texts or lists of token ids; None: the built-in ones.
        plan: How to measure; None: K up to 4, at temperatures 0 and 1.
        source: The checkpoint that a loaded model came from, for the report's hashes; leave it out if the model in
            memory was changed.
        head: The checkpoint that the head comes from, if another one.
        on_text: Called after each round with what it decoded, in texts: their number in all.
        on_score: Called for each text that was scored.

    Returns:
        All figures, at every K, by acceptance rule and by domain.

    Raises:
        ConfigError: There is no head, or the prompts or the plan cannot be used.
        CheckpointError: The checkpoint cannot be read.
        FamilyError: The model type is not supported.

    Example:
        >>> plan = nextn.ReferencePlan(num_speculative_tokens=2, temperatures=(0.0,), max_tokens=8, backend="torch")
        >>> report = nextn.measure("tiny", ["def add(a, b):", "import os"], plan)
        >>> 0 <= report.figures(0.0).rates[0].value <= 1
        True
    """
    texts, origin = take_prompts(prompts)
    plan = plan or ReferencePlan()
    require_type("plan", plan, ReferencePlan, "nextn.ReferencePlan(...)")
    loaded, source = open_model(model, source, head)
    report = reference_acceptance(loaded, texts, plan, on_text=on_text, on_score=on_score)
    report = replace(report, prompts_source=origin)
    return with_checkpoint(report, loaded, source, head=head)


def open_model(model: str | Path | Model, source: str, head: str | Path | None) -> tuple[Model, str]:
    """Load the model unless it is loaded; return it with the name of its checkpoint."""
    require_type("model", model, (str, Path, Model), "a folder, a hub id, or what nextn.load returns")
    return (model, source) if isinstance(model, Model) else (Model.load(model, head=head, device="auto"), str(model))


def with_checkpoint(
    report: ReferenceReport, model: Model, source: str, *, head: str | Path | None = None
) -> ReferenceReport:
    """Return the report with the checkpoint's names and hashes (none without a name), and this machine."""
    report = replace(report, source=source, machine=Machine.of(model))
    if not source:
        return report
    stored = as_checkpoint(stored_in(model, source))
    return replace(report, hashes=checkpoint_hashes(stored, head=head), base_model=base_model(stored))


def stored_in(model: Model, source: str) -> str | Checkpoint:
    """Return the checkpoint of a streamed trunk, so that its tensors are not downloaded again; else the source."""
    return model.trunk.checkpoint if isinstance(model.trunk, StreamedTrunk) else source
