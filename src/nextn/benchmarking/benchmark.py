"""Plain and MTP decoding in turn over the same prompts -> runs -> figures -> one record.

Texts are decoded one by one; what a reader must know to trust a figure (loops, short texts, other output) is beside it.
"""

import statistics
from collections.abc import Callable, Sequence

from nextn.benchmarking.cost import Machine, measured_costs
from nextn.benchmarking.plan import Plan
from nextn.benchmarking.report import Report
from nextn.benchmarking.runs import Run, runs
from nextn.benchmarking.workload import Prompt
from nextn.model import Model


def measured(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    source: str = "",
    on_run: Callable[[Run], None] = lambda run: None,
) -> Report:
    """Decode by the plan, then measure the costs at the length that the texts had on average. Raises ConfigError."""
    log = []
    for run in runs(model, prompts, plan):
        log.append(run)
        on_run(run)
    lengths = [len(prompts[run.prompt].tokens(model, chat=plan.chat)) + len(run.tokens) // 2 for run in log]
    room = (model.trunk.max_length or max(lengths) * 2) - plan.drafts[-1] - 1
    context = min(round(statistics.mean(lengths)), room)
    costs = measured_costs(model, drafts=plan.drafts[-1], context=context, path=plan.path)
    engine, shortlist = model.engine(plan.path), model.head.shortlist if model.head else None
    machine = Machine.of(model, head_bits=engine.head_bits)
    return Report(source, plan, tuple(prompts), tuple(log), costs, machine, engine.reason, shortlist)
