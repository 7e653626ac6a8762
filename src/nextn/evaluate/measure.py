"""`measure`: the acceptance that a checkpoint's head should reach, with what identifies the checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.evaluate.decoding_costs import Machine
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.reference_report import ReferenceReport, checkpoint_hashes
from nextn.evaluate.workload import PromptSource, ReferencePlan, take_prompts
from nextn.model.model import Model
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.settings import WEIGHT_BITS


def measure(
    model: str | Path | Model,
    prompts: PromptSource = None,
    plan: ReferencePlan | None = None,
    *,
    source: str = "",
    head: str | Path | None = None,
    on_text: Callable[[], None] = lambda: None,
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
        on_text: Called after each text.

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
    loaded, source = open_model(model, source, head)
    report = replace(reference_acceptance(loaded, texts, plan, on_text=on_text), prompts_source=origin)
    return with_checkpoint(report, loaded, source, head=head)


def open_model(model: str | Path | Model, source: str, head: str | Path | None) -> tuple[Model, str]:
    """Return a model with a head, and the name of its checkpoint; one that is loaded already as it is."""
    return (model, source) if isinstance(model, Model) else (Model.load(model, head=head, device="auto"), str(model))


def with_checkpoint(
    report: ReferenceReport, model: Model, source: str, *, head: str | Path | None = None
) -> ReferenceReport:
    """Add the checkpoint's name and hashes (none without a name), and this machine."""
    hashes = checkpoint_hashes(stored_in(model, source), head=head) if source else {}
    machine = Machine.of(model, weight_bits=WEIGHT_BITS[model.trunk.weights])
    return replace(report, source=source, hashes=hashes, machine=machine)


def stored_in(model: Model, source: str) -> str | Checkpoint:
    """Return the checkpoint of a streamed trunk, whose downloaded tensors need no second download; else the source."""
    return model.trunk.checkpoint if isinstance(model.trunk, StreamedTrunk) else source
