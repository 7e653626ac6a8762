"""What goes wrong with heads in engines and files, as data: what it does, how it shows, who met it, how to plant it.

Planted on a checkpoint (`under`), a fault gives the acceptance that an engine with it would show on this very head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from nextn.drafting import Contract
from nextn.head import Head
from nextn.measuring.measure import reference, rescored
from nextn.measuring.measured import Measured
from nextn.measuring.variants import Variant, read_as, variants
from nextn.model import Model


@dataclass(frozen=True)
class Fault:
    """One cause of low acceptance. signature: how it shows from the outside. issues: public threads, repository#number.

    keys: of `variants`, the first that a head has is the fault. variant: one that is no convention. contract: of
    decoding. rule: of acceptance, at a temperature. Exactly one of the four is set.
    """

    name: str
    does: str
    signature: str
    issues: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    variant: Variant | None = None
    contract: Mapping[str, object] = field(default_factory=dict)
    rule: str = ""


def planted(fault: Fault, model: Model) -> Variant | None:
    """The reading that is this fault; None where this head cannot have it, or where it is none of the weights."""
    found = {each.key: each for each in variants(model, Contract())}
    return fault.variant or next((found[key] for key in fault.keys if key in found), None)


def under(measured: Measured, model: Model, fault: Fault) -> Measured | None:
    """The measurement under the fault; None where this head cannot have it.

    On the same texts; decoded again where only decoding shows it. For a rule of acceptance the measurement itself,
    whose `figures` take the rule.
    """
    if fault.rule:
        return measured
    if fault.contract:
        return reference(model, measured.prompts, measured.plan, contract=Contract(**fault.contract))  # type: ignore[arg-type]
    reading = planted(fault, model)
    if reading is None:
        return None
    return rescored(measured, *read_as(model, measured.contract, [reading]))


@torch.no_grad()
def _unset(head: Head) -> None:
    """Values of a fresh model in place of what was trained."""
    generator = torch.Generator().manual_seed(0)
    for name, value in list(head.named_parameters()):
        fresh = torch.randn(value.shape, generator=generator) * 0.02
        _put(head, name, fresh.to(value) if value.ndim > 1 else torch.ones_like(value))


@torch.no_grad()
def _rounded(bits: int, head: Head) -> None:
    """Matrices to `bits` bits, one scale a row, to the nearest."""
    for name, value in list(head.named_parameters()):
        if value.ndim > 1:
            scale = (value.float().abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-12)
            _put(head, name, ((value.float() / scale).round() * scale).to(value.dtype))


def _put(head: Head, name: str, value: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(head.get_submodule(path), last, nn.Parameter(value, requires_grad=False))


# fmt: off
FAULTS: tuple[Fault, ...] = (
    Fault(
        "head-unset", "the head's tensors are absent or not mapped, and keep an initial value",
        "about 0 at every depth, AL 1.0; no error",
        ("vllm-project/vllm#35548", "vllm-project/vllm#43459", "huggingface/transformers#46129",
         "vllm-project/vllm#37667"),
        variant=Variant("head-unset", "the head with initial values", change=_unset),
    ),
    Fault(
        "gain-less", "norm gains are one too small: w read for 1 + w",
        "0 to 7 %; the text's token ranks near the bottom of the vocabulary; shapes are right",
        ("waybarrios/vllm-mlx#400", "jundot/omlx#1507", "youssofal/MTPLX#511", "ml-explore/mlx-lm#1442"),
        keys=("gain:all:-1",),
    ),
    Fault(
        "gain-more", "norm gains are one too large: 1 + w read for w, or 1 added twice",
        "from harmless to 0 %, by the size of the gains",
        ("jundot/omlx#3750", "youssofal/MTPLX#306"),
        keys=("gain:all:+1",),
    ),
    Fault(
        "halves-swapped", "token and hidden state enter the projection in the other order", "about 0 at every depth",
        ("ml-explore/mlx-lm#1469",), keys=("concat",),
    ),
    Fault(
        "wrong-hidden", "the head eats the state before the final norm, or behind it, where it wants the other",
        "a few points at depth 1, far more beyond; sometimes nothing",
        ("ggml-org/llama.cpp#24025", "waybarrios/vllm-mlx#657"), keys=("hidden",),
    ),
    Fault(
        "recycled-wrong", "the state handed on is the one before the head's norm, or behind it",
        "depth 1 as it should be, depth 2 and beyond low",
        ("vllm-project/vllm#46075", "ROCm/ATOM#1742", "ikawrakow/ik_llama.cpp#1815"), keys=("recycled",),
    ),
    Fault(
        "no-prefill", "the prompt is not run through the head, whose cache begins behind it",
        "4 to 20 points less at every depth, most where text repeats the prompt",
        ("ml-explore/mlx-lm#990", "jundot/omlx#2402", "ohdearquant/lattice#1364"), keys=("prefill",),
    ),
    Fault(
        "no-rerun", "kept columns stay as drafted, with states that the head made up",
        "little where all drafts stand, more where some do", ("charlie12345/ROCmFPX#15",),
        contract={"rerun": False},
    ),
    Fault("pair-shifted", "the hidden state is the one of the column before", "about 0 at every depth",
          keys=("offset:-1",)),
    Fault(
        "one-module", "several modules loaded as the first", "depth 1 as it should be, depth 2 and beyond low",
        ("sgl-project/sglang#25368", "vllm-project/vllm#52688"), keys=("order:first",),
    ),
    Fault("modules-permuted", "modules stand at other depths than they were trained for", "low from depth 1 on",
          keys=("order:2-1", "order:3-2-1")),
    Fault(
        "own-output-lost", "the trunk's output head in place of the head's own", "97 to 4 % where the two differ",
        ("vllm-project/vllm#38493",), keys=("own:output",),
    ),
    Fault("position0", "the first column's token zeroed where it is not, or kept where it is",
          "nothing, or a few points on short prompts", keys=("position0",)),
    Fault(
        "head-quantised", "the head's matrices at 4 bits, rounded to the nearest",
        "0 to 4 %, or a few points; the head in bf16 brings it back",
        ("kekzl/imp#1428", "JustVugg/colibri#8", "waybarrios/vllm-mlx#471", "IST-DASLab/GSQ#11"),
        variant=Variant("head-quantised", "the head at 4 bits", change=partial(_rounded, 4)),
    ),
    Fault(
        "exact-match", "a drawn draft is kept only if the trunk draws the same token",
        "right at temperature 0, low above",
        ("jundot/omlx#3370", "ml-explore/mlx-lm#1085", "vllm-project/vllm#41044"), rule="match",
    ),
    Fault("argmax-drafts", "the head's argmax is drafted at a temperature: lossless, and lower where laws are flat",
          "right at temperature 0, lower above", rule="argmax"),
)
# fmt: on
