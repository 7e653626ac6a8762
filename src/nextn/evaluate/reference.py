"""The acceptance that a head should have, from the checkpoint alone: on texts of the trunk, with controls.

The prompts are decoded once (`reference_texts`) and every position of these texts is scored (`teacher_forced`), so that
every K, every acceptance rule and every wrong convention of the head (`rescore`) needs no more decoding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nextn.decoding.drafter import Contract
from nextn.errors import ConfigError
from nextn.evaluate.reference_plan import ReferencePlan
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.reference_texts import Controls, exact_head, generate_texts, measure_controls, prompt_tokens
from nextn.evaluate.teacher_forced import score_texts, trunk_outputs
from nextn.evaluate.workload import Prompt
from nextn.model.model import Model
from nextn.model.trunk import TrunkOutput
from nextn.runtime.backend import backend_for
from nextn.runtime.protocol import DecodingTrunk

__all__ = ["ReferencePlan", "ReferenceReport", "reference_acceptance", "rescore"]


def reference_acceptance(
    model: Model,
    prompts: Sequence[Prompt],
    plan: ReferencePlan,
    *,
    contract: Contract | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> ReferenceReport:
    """Decode the prompts at each temperature, then score every position.

    `contract` injects faults of decoding; `on_text` is called for each text that was decoded. Raises ConfigError if
    there is no head, or the prompts cannot be used.
    """
    if model.head is None:
        raise ConfigError("the checkpoint has no head, so there is nothing to measure")
    ids, contract = [prompt_tokens(model, prompt, plan.chat) for prompt in prompts], contract or Contract()
    with exact_head(model):  # one backend for the texts and their scores
        generated = {
            temperature: generate_texts(model, ids, plan, temperature, contract=contract, on_text=on_text)
            for temperature in plan.temperatures
        }
        report = ReferenceReport(plan, contract, tuple(prompts), generated, {}, "decoder", family=model.family.name)
        trunk = backend_for(model, plan.backend).trunk
        return rescore(report, model, contract, trunk=trunk) if contract.rerun else report


def rescore(
    reference: ReferenceReport, model: Model, contract: Contract, *, trunk: DecodingTrunk | None = None
) -> ReferenceReport:
    """Score the same texts, and take the controls, with another convention of the head; the trunk must be the same.

    trunk: What runs the model's trunk; None: torch.
    """
    assert model.head is not None
    hiddens = {
        temperature: trunk_outputs(trunk or model.trunk, each.texts)
        for temperature, each in reference.generated.items()
    }
    generated = reference.generated
    scored = {
        temperature: tuple(
            score_texts(model, each.texts, hiddens[temperature], reference.plan.drafts, contract=contract)
        )
        for temperature, each in generated.items()
    }
    if contract != reference.contract:  # the decoder's counts are of the contract that it ran under
        generated = {
            temperature: replace(each, acceptance_per_text=(), pooled=None) for temperature, each in generated.items()
        }
    scoring_pass = "parallel" if model.head.can_rollout else "stepped"
    report = replace(reference, contract=contract, generated=generated, scored=scored, scoring_pass=scoring_pass)
    return replace(report, controls=_controls(report, model, hiddens))


def _controls(reference: ReferenceReport, model: Model, hiddens: Mapping[float, Sequence[TrunkOutput]]) -> Controls:
    """Over the texts of the lowest temperature, greedy if it was measured."""
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
