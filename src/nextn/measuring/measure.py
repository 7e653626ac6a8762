"""The acceptance that a head should have, from the checkpoint alone: on the trunk's own texts, with controls beside it.

`texts` decodes the prompts once; `columns` scores every column of these texts, so that every K, every rule of
acceptance and every misreading of the head (`rescored`) costs no more decoding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nextn.benchmarking.workload import Prompt
from nextn.drafting import Contract
from nextn.errors import ConfigError
from nextn.measuring.columns import scored, states
from nextn.measuring.controls import Controls, controlled
from nextn.measuring.measured import Measured
from nextn.measuring.plan import Plan
from nextn.measuring.texts import continued, tokens_of
from nextn.model import Model
from nextn.trunk import Hidden

__all__ = ["Measured", "Plan", "reference", "rescored"]


def reference(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    contract: Contract | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> Measured:
    """Decode the prompts at each temperature, then score every column. contract: what to get wrong, see `columns`.

    on_text: called for each text that was decoded. Raises ConfigError for prompts that cannot be used, or no head.
    """
    if model.head is None:
        raise ConfigError("the checkpoint has no head, so there is nothing to measure")
    ids, contract = [tokens_of(model, prompt, plan.chat) for prompt in prompts], contract or Contract()
    drawn = {t: continued(model, ids, plan, t, contract=contract, on_text=on_text) for t in plan.temperatures}
    found = Measured(plan, contract, tuple(prompts), drawn, {}, "decoder", family=model.family.name)
    return rescored(found, model, contract) if contract.rerun else found


def rescored(measured: Measured, model: Model, contract: Contract) -> Measured:
    """The same texts under another reading of the head, which must have the same trunk; its controls with it."""
    hiddens = {t: states(model.trunk, drawn.texts) for t, drawn in measured.drawn.items()}
    found = {
        t: tuple(scored(model, drawn.texts, hiddens[t], measured.plan.drafts, contract=contract))
        for t, drawn in measured.drawn.items()
    }
    drawn = measured.drawn
    if contract != measured.contract:  # the decoder's counts are of the contract that it ran under
        drawn = {t: replace(each, counted=(), pooled=None) for t, each in drawn.items()}
    assert model.head is not None
    how = "parallel" if model.head.can_unroll else "stepped"
    out = replace(measured, contract=contract, drawn=drawn, scored=found, how=how)
    return replace(out, controls=_controls(out, model, hiddens))


def _controls(measured: Measured, model: Model, hiddens: Mapping[float, Sequence[Hidden]]) -> Controls:
    """Over the texts of the first temperature, greedy where there is one."""
    first = measured.plan.temperatures[0]
    found, rule = measured.scored[first], measured.rules(first)[0]
    places = sorted(place for place in measured.places(first) if found[place].rooms)
    used, seen = [found[place] for place in places], [hiddens[first][place] for place in places]
    return controlled(model, used, seen, rule, contract=measured.contract)
