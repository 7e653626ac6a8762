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

    advice: what to do about it. Exactly one of these is set: keys: of `variants`, the first that a head has is the
    fault. variant: one that is no convention. contract: of decoding. rule: of acceptance, at a temperature.
    """

    name: str
    does: str
    signature: str
    issues: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    variant: Variant | None = None
    contract: Mapping[str, object] = field(default_factory=dict)
    rule: str = ""
    advice: str = ""


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


_KEEP = "leave the head in bf16 (or 8 bits); it is a few per cent of the weights"

# fmt: off
FAULTS: tuple[Fault, ...] = (
    Fault(
        "head-unset", "the head's tensors are absent or not mapped, and keep an initial value",
        "about 0 at every depth, AL 1.0; no error",
        ("vllm-project/vllm#35548", "vllm-project/vllm#43459", "huggingface/transformers#46129",
         "vllm-project/vllm#37667"),
        variant=Variant("head-unset", "the head with initial values", change=_unset),
        advice="look for the head's tensors among those that the loader skipped or initialised; `nextn audit` "
               "says which names it expects",
    ),
    Fault(
        "gain-less", "norm gains are one too small: w read for 1 + w",
        "0 to 7 %; the text's token ranks near the bottom of the vocabulary; shapes are right",
        ("waybarrios/vllm-mlx#400", "jundot/omlx#1507", "youssofal/MTPLX#511", "ml-explore/mlx-lm#1442"),
        keys=("gain:all:-1",),
        advice="add one to the gains when loading (or let the norm do so), in the head as in the trunk; `nextn "
               "measure --probe` says which reading the weights want",
    ),
    Fault(
        "gain-more", "norm gains are one too large: 1 + w read for w, or 1 added twice",
        "from harmless to 0 %, by the size of the gains",
        ("jundot/omlx#3750", "youssofal/MTPLX#306"),
        keys=("gain:all:+1",),
        advice="add one once: either the converter or the norm, not both",
    ),
    Fault(
        "halves-swapped", "token and hidden state enter the projection in the other order", "about 0 at every depth",
        ("ml-explore/mlx-lm#1469",), keys=("concat",),
        advice="exchange the halves of the projection's input, or the halves of its weight in the converter",
    ),
    Fault(
        "wrong-hidden", "the head eats the state before the final norm, or behind it, where it wants the other",
        "a few points at depth 1, far more beyond; sometimes nothing",
        ("ggml-org/llama.cpp#24025", "waybarrios/vllm-mlx#657"), keys=("hidden",),
        advice="give the head the trunk's state from the other side of the final norm",
    ),
    Fault(
        "recycled-wrong", "the state handed on is the one before the head's norm, or behind it",
        "depth 1 as it should be, depth 2 and beyond low",
        ("vllm-project/vllm#46075", "ROCm/ATOM#1742", "ikawrakow/ik_llama.cpp#1815"), keys=("recycled",),
        advice="hand on the head's state from the other side of its own norm",
    ),
    Fault(
        "no-prefill", "the prompt is not run through the head, whose cache begins behind it",
        "4 to 20 points less at every depth, most where text repeats the prompt",
        ("ml-explore/mlx-lm#990", "jundot/omlx#2402", "ohdearquant/lattice#1364"), keys=("prefill",),
        advice="run the prompt through the head, with the trunk's states, before the first draft; also behind "
               "a prefix-cache hit",
    ),
    Fault(
        "no-rerun", "kept columns stay as drafted, with states that the head made up",
        "little where all drafts stand, more where some do", ("charlie12345/ROCmFPX#15",),
        contract={"rerun": False},
        advice="after verification run the kept columns again through the head with the trunk's states",
    ),
    Fault("pair-shifted", "the hidden state is the one of the column before", "about 0 at every depth",
          keys=("offset:-1",),
        advice="pair the state of column i with the token of column i + 1",
    ),
    Fault(
        "one-module", "several modules loaded as the first", "depth 1 as it should be, depth 2 and beyond low",
        ("sgl-project/sglang#25368", "vllm-project/vllm#52688"), keys=("order:first",),
        advice="load each module and run depth k on module k",
    ),
    Fault("modules-permuted", "modules stand at other depths than they were trained for", "low from depth 1 on",
          keys=("order:2-1", "order:3-2-1"),
        advice="sort the modules by their layer number, not by its text",
    ),
    Fault(
        "own-output-lost", "the trunk's output head in place of the head's own", "97 to 4 % where the two differ",
        ("vllm-project/vllm#38493",), keys=("own:output",),
        advice="load the head's own output head; do not tie it to the trunk's",
    ),
    Fault("position0", "the first column's token zeroed where it is not, or kept where it is",
          "nothing, or a few points on short prompts", keys=("position0",),
        advice="follow the family's row in the first column (`nextn measure --probe` says what the weights want)",
    ),
    Fault(
        "head-quantised", "the head's matrices at 4 bits, rounded to the nearest",
        "0 to 4 %, or a few points; the head in bf16 brings it back",
        ("kekzl/imp#1428", "JustVugg/colibri#8", "waybarrios/vllm-mlx#471", "IST-DASLab/GSQ#11"),
        variant=Variant("head-quantised", "the head at 4 bits", change=partial(_rounded, 4)),
        advice=_KEEP,
    ),
    Fault(
        "head-2-bit", "the head's matrices at 2 bits, rounded to the nearest", "low at every depth, not 0",
        variant=Variant("head-2-bit", "the head at 2 bits", change=partial(_rounded, 2)),
        advice=_KEEP,
    ),
    Fault(
        "exact-match", "a drawn draft is kept only if the trunk draws the same token",
        "right at temperature 0, low above",
        ("jundot/omlx#3370", "ml-explore/mlx-lm#1085", "vllm-project/vllm#41044"), rule="match",
        advice="keep a draft with min(1, p/q), or draft the argmax; comparing two samples throws drafts away",
    ),
    Fault("argmax-drafts", "the head's argmax is drafted at a temperature: lossless, and lower where laws are flat",
          "right at temperature 0, lower above", rule="argmax",
        advice="nothing is wrong; sampled drafts with p/q keep more where laws are flat",
    ),
)
# fmt: on
