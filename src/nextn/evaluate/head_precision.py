"""With how few bits may a head be stored: its acceptance, at each number of bits, beside the quantized trunk.

Also how much each input channel of a trunk's Linears matters for rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from nextn.checkpoint.checkpoint import Checkpoint, as_checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import trunk_family
from nextn.checkpoint.quantized_weights import round_to_nearest
from nextn.checkpoint.staging_folder import staged
from nextn.edit.plan import EditPlan, Progress, new_folder, quiet
from nextn.edit.quantize import GROUP_SIZE, Importance, Rounding, is_head_linear, quantize
from nextn.errors import ConfigError
from nextn.evaluate.conventions import Variant, apply_variants
from nextn.evaluate.reference import decoded_reference, rescore
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.model.head import Head
from nextn.model.layer_states import LayerProgress
from nextn.model.load_head import change_stored
from nextn.model.model import Model
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.settings import Contract

HEAD_BITS = (16, 8, 4)
MAX_LOSS = 0.01  # of the acceptance length
TOKENS = 4096  # of the texts, by default


@dataclass(frozen=True)
class HeadPrecision:
    """Mean acceptance length of greedy rounds with the head at each number of bits, on the same texts."""

    lengths: dict[int, float]

    @property
    def bits(self) -> int:
        """The lowest number of bits that costs less than `MAX_LOSS` of the length at 16."""
        return min(bits for bits, length in self.lengths.items() if length > (1 - MAX_LOSS) * self.lengths[16])


def measure_head_bits(
    model: Model,
    prompts: Sequence[Prompt],
    plan: ReferencePlan,
    *,
    group_size: int = GROUP_SIZE,
    on_text: Callable[[], None] = lambda: None,
) -> HeadPrecision:
    """Decode the prompts once, and score the head as it is and rounded to fewer bits. Raises ConfigError without one.

    plan: Its lowest temperature and largest K count.
    """
    report, hiddens = decoded_reference(model, prompts, plan, on_text=on_text)
    lengths = {}
    for bits in HEAD_BITS:
        changes = []
        if bits < 16:
            change = partial(_round_head, Rounding.of(bits, group_size))
            changes = [Variant(f"head:{bits}", f"head of {bits} bits", change=change)]
        variant, _ = apply_variants(model, Contract(), changes)
        scored = rescore(report, variant, Contract(), hiddens=hiddens)
        lengths[bits] = scored.figures(plan.temperatures[0]).length.value
    return HeadPrecision(lengths)


def quantize_measured(
    source: str | Path | Checkpoint,
    out: Path,
    prompts: Sequence[Prompt],
    plan: ReferencePlan,
    *,
    weights: str,
    group_size: int = GROUP_SIZE,
    importance: Importance | None = None,
    follow_links: bool = False,
    on_bytes: Progress = quiet,
    on_text: Callable[[], None] = lambda: None,
) -> tuple[EditPlan, HeadPrecision]:
    """Quantize as `quantize` does, with the head at the bits that `measure_head_bits` finds.

    The checkpoint is written with the head at 16 bits beside `out`, measured, and written again if fewer bits suffice.
    Raises ConfigError for one without a head.
    """
    checkpoint = as_checkpoint(source)
    if not Inventory.of(checkpoint, family=trunk_family(checkpoint)).stored:
        raise ConfigError(f"{checkpoint.path}: there is no head to measure; leave out --head-bits auto")
    write = partial(
        quantize, checkpoint, weights=weights, group_size=group_size, importance=importance, on_bytes=on_bytes
    )
    folder = new_folder(out)
    with staged(folder) as stage:
        first = write(out=stage / "new", follow_links=follow_links)
        precision = measure_head_bits(
            Model.load(first.folder).dequantize(), prompts, plan, group_size=group_size, on_text=on_text
        )
        if precision.bits == 16:
            first.folder.rename(folder)
            return replace(first, folder=folder), precision
    return write(out=folder, follow_links=follow_links, head_bits=precision.bits), precision


@torch.no_grad()
def _round_head(rounding: Rounding, head: Head) -> None:
    """Round what `quantize` rounds of a head, to the values that its files would hold."""

    def rounded(canonical: str, weight: Tensor) -> Tensor:
        if not (is_head_linear(canonical) and weight.ndim == 2 and rounding.fits(weight.shape[1])):
            return weight
        quantized = round_to_nearest(weight.detach(), rounding.bits, rounding.group_size or weight.shape[1])
        return quantized.dequantize().to(weight.dtype)

    change_stored(head, rounded)


@torch.inference_mode()
def input_squares(
    trunk: StreamedTrunk,
    texts: Sequence[Sequence[int]],
    *,
    on_layer: Callable[[LayerProgress], None] = lambda progress: None,
) -> Importance:
    """Run each text through a streamed trunk, and return the mean square [K] of the inputs of every Linear.

    A Linear of experts that are stacked, or that no token reaches, has none.
    """
    sums: dict[tuple[int, str], Tensor] = {}
    counts: dict[tuple[int, str], int] = {}

    def note(key: tuple[int, str], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].detach().flatten(0, -2).float()
        sums[key] = sums.get(key, 0) + rows.square().sum(0)
        counts[key] = counts.get(key, 0) + len(rows)

    hooks = [
        part.register_forward_pre_hook(partial(note, (index, f"{name}.weight")))
        for index, layer in enumerate(trunk.decoder.layers)
        for name, part in layer.named_modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        trunk.read_layers([torch.tensor([list(text)]) for text in texts], on_layer=on_layer)
    finally:
        for hook in hooks:
            hook.remove()
    return {key: total / counts[key] for key, total in sums.items() if counts[key]}
