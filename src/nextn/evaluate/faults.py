"""Known faults of heads in engines and files, how to inject them, and the draft counts expected under each.

A fault injected into a checkpoint (`measure_under_fault`) shows the acceptance of an engine with that fault on this
head. All faults are scored on the texts of one reference, so a hard text is hard under every hypothesis.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from nextn.engines.check_result import CheckResult
from nextn.evaluate.conventions import Variant, apply_variants, variants
from nextn.evaluate.hypotheses import ExpectedCounts
from nextn.evaluate.likelihoods import NO_FAULT
from nextn.evaluate.reference import TextStates, reference_acceptance, rescore, text_states
from nextn.evaluate.reference_report import ReferenceReport
from nextn.model.head import Head
from nextn.model.model import Model
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.settings import Contract


@dataclass(frozen=True)
class Fault:
    """One cause of low acceptance. Exactly one of variant_keys, variant, contract and rule is set."""

    name: str
    description: str
    signature: str  # the acceptance that it shows
    issues: tuple[str, ...] = ()  # public threads, repository#number
    variant_keys: tuple[str, ...] = ()  # of `variants`; the first one that a head has is the fault
    variant: Variant | None = None  # a change of the head that is not a convention
    contract: Mapping[str, object] = field(default_factory=dict)  # changed in the decoding contract
    rule: str = ""  # the acceptance rule above temperature 0
    advice: str = ""  # what to do about it


def fault_variant(fault: Fault, model: Model) -> Variant | None:
    """Return the variant that injects this fault; None if this head cannot have it, or it is not in the weights."""
    by_key = {variant.key: variant for variant in variants(model, Contract())}
    return fault.variant or next((by_key[key] for key in fault.variant_keys if key in by_key), None)


def measure_under_fault(
    reference: ReferenceReport, model: Model, fault: Fault, *, hiddens: TextStates | None = None
) -> ReferenceReport | None:
    """Return the reference under the fault; None if this head cannot have it, or a streamed trunk cannot show it.

    The same texts are scored; they are decoded again only for a fault that scoring cannot show. For an acceptance rule
    it is the reference itself, whose `figures` take the rule. `hiddens` are its `text_states`, if known.
    """
    if fault.rule:
        return reference
    if fault.contract:
        if model.head is not None and model.head.family.trunk_kv and "refresh" in fault.contract:
            return None  # there are no keys to compute again
        if isinstance(model.trunk, StreamedTrunk):
            return None
        contract = Contract(**fault.contract)  # type: ignore[arg-type]
        return reference_acceptance(model, reference.prompts, reference.plan, contract=contract)
    variant = fault_variant(fault, model)
    if variant is None:
        return None
    faulty, contract = apply_variants(model, reference.contract, [variant])
    # From another side of the final norm, the head's input differs.
    return rescore(reference, faulty, contract, hiddens=hiddens if faulty.trunk.stage == model.trunk.stage else None)


@torch.no_grad()
def _reinitialize(head: Head) -> None:
    """Replace all trained values by those of a new model."""
    generator = torch.Generator().manual_seed(0)
    for name, value in list(head.named_parameters()):
        initial = torch.randn(value.shape, generator=generator) * 0.02
        _replace(head, name, initial.to(value) if value.ndim > 1 else torch.ones_like(value))


@torch.no_grad()
def _quantize(bits: int, head: Head) -> None:
    """Round matrices to the nearest value of `bits` bits, with one scale per row."""
    for name, value in list(head.named_parameters()):
        if value.ndim > 1:
            scale = (value.float().abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-12)
            _replace(head, name, ((value.float() / scale).round() * scale).to(value.dtype))


def _replace(head: Head, name: str, value: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(head.get_submodule(path), last, nn.Parameter(value, requires_grad=False))


_UNQUANTIZED = "leave the head in bf16 (or 8 bits); it is a few per cent of the weights"

# fmt: off
FAULTS: tuple[Fault, ...] = (
    Fault(
        "head-unset", "the head's tensors are absent or not mapped, and keep an initial value",
        "about 0 at every depth, AL 1.0; no error",
        ("vllm-project/vllm#35548", "vllm-project/vllm#43459", "huggingface/transformers#46129",
         "vllm-project/vllm#37667"),
        variant=Variant("head-unset", "the head with initial values", change=_reinitialize),
        advice="look for the head's tensors among those that the loader skipped or initialized; `nextn audit` "
               "says which names it expects",
    ),
    Fault(
        "norm-offset-missing", "norm weights are one too small: w read for 1 + w",
        "0 to 7 %; the text's token ranks near the bottom of the vocabulary; shapes are right",
        ("waybarrios/vllm-mlx#400", "jundot/omlx#1507", "youssofal/MTPLX#511", "ml-explore/mlx-lm#1442"),
        variant_keys=("norm-weight:all:-1",),
        advice="add one to the norm weights when loading (or let the norm do so), in the head as in the trunk; `nextn "
               "measure --probe` says which convention the weights fit",
    ),
    Fault(
        "norm-offset-added", "norm weights are one too large: 1 + w read for w, or 1 added twice",
        "from harmless to 0 %, depending on the size of the norm weights",
        ("jundot/omlx#3750", "youssofal/MTPLX#306"),
        variant_keys=("norm-weight:all:+1",),
        advice="add one once: either the converter or the norm, not both",
    ),
    Fault(
        "inputs-swapped", "token and hidden state enter eh_proj in the wrong order", "about 0 at every depth",
        ("ml-explore/mlx-lm#1469",), variant_keys=("concat",),
        advice="exchange the halves of eh_proj's input, or the halves of its weight in the converter",
    ),
    Fault(
        "wrong-hidden", "the head takes the trunk's hidden state from the wrong side of the final norm",
        "a few points lower at depth 1, far more beyond; sometimes no difference",
        ("ggml-org/llama.cpp#24025", "waybarrios/vllm-mlx#657"), variant_keys=("hidden",),
        advice="give the head the trunk's hidden state from the other side of the final norm",
    ),
    Fault(
        "wrong-next-hidden", "the state passed to the next draft step is from the wrong side of the head's norm",
        "depth 1 as expected, depth 2 and beyond low",
        ("vllm-project/vllm#46075", "ROCm/ATOM#1742", "ikawrakow/ik_llama.cpp#1815"), variant_keys=("next_hidden",),
        advice="pass on the head's hidden state from the other side of its own norm",
    ),
    Fault(
        "no-prefill", "the prompt is not run through the head, whose KV cache starts after it",
        "4 to 20 points less at every depth, most where text repeats the prompt",
        ("ml-explore/mlx-lm#990", "jundot/omlx#2402", "ohdearquant/lattice#1364"), variant_keys=("prefill",),
        advice="run the prompt through the head, with the trunk's states, before the first draft; also after "
               "a prefix-cache hit",
    ),
    Fault(
        "repeated-keys", "depths beyond the last MTP layer store keys of their own, or read those of its first run, "
        "where the head was trained with the other", "depth 1 as expected, little lower beyond",
        ("NVIDIA/Megatron-LM#6472",), variant_keys=("repeated-kv",),
        advice="share the first run's keys and values over the depths if the head was trained so (GLM-5.2's recipe)",
    ),
    Fault(
        "wrong-keys", "a head without keys of its own reads those of another layer of the trunk",
        "low at every depth", variant_keys=("kv-layer",),
        advice="read the keys and values of the trunk's last layer of the same type that stores any; layers after it "
               "share them",
    ),
    Fault(
        "window-lost", "the head's layers with a sliding window attend to all of the trunk's keys",
        "as expected on short texts, falling beyond the window", variant_keys=("kv-window",),
        advice="mask the keys before the window in the head's sliding layers",
    ),
    Fault(
        "window-everywhere", "the head's layers with full attention see a sliding window of the trunk's keys only",
        "as expected on short texts, falling beyond the window", variant_keys=("kv-narrow",),
        advice="let the head's full-attention layers read the whole cache of the trunk's full-attention layer",
    ),
    Fault(
        "query-shifted", "a head without keys of its own has its queries one position off",
        "little or no difference", variant_keys=("query-position",),
        advice="follow the position of the engine whose acceptance is right; vLLM and SGLang differ from transformers "
               "and llama.cpp by one",
    ),
    Fault(
        "stale-head-cache", "the head's KV cache of accepted positions keeps the states that the head drafted with",
        "little where all drafts are accepted, more where some are", ("charlie12345/ROCmFPX#15",),
        contract={"refresh": False},
        advice="after verification run the accepted positions through the head again with the trunk's states (refresh)",
    ),
    Fault("pairs-off-by-one", "the hidden state is that of the previous position", "about 0 at every depth",
          variant_keys=("offset:-1",),
        advice="pair the state of position i with the token of position i + 1",
    ),
    Fault(
        "one-mtp-layer", "all MTP layers are loaded with the weights of the first",
        "depth 1 as expected, depth 2 and beyond low",
        ("sgl-project/sglang#25368", "vllm-project/vllm#52688"), variant_keys=("order:first",),
        advice="load each MTP layer and run depth k on layer k",
    ),
    Fault("mtp-layers-permuted", "MTP layers run at other depths than they were trained for", "low from depth 1 on",
          variant_keys=("order:2-1", "order:3-2-1"),
        advice="sort the MTP layers by layer number, not alphabetically",
    ),
    Fault(
        "own-lm-head-lost", "the trunk's lm_head in place of the head's own",
        "fell from 97 % to 4 % where the two differ",
        ("vllm-project/vllm#38493",), variant_keys=("own:output",),
        advice="load the head's own lm_head; do not tie it to the trunk's",
    ),
    Fault("position0", "the first position's token is zeroed and should not be, or the reverse",
          "no difference, or a few points on short prompts", variant_keys=("position0",),
        advice="follow the family's convention at position 0 (`nextn measure --probe` says what the weights fit)",
    ),
    Fault(
        "head-quantized", "the head's matrices at 4 bits, rounded to nearest",
        "0 to 4 %, or a few points lower; as expected with the head in bf16",
        ("kekzl/imp#1428", "JustVugg/colibri#8", "waybarrios/vllm-mlx#471", "IST-DASLab/GSQ#11"),
        variant=Variant("head-quantized", "the head at 4 bits", change=partial(_quantize, 4)),
        advice=_UNQUANTIZED,
    ),
    Fault(
        "head-2-bit", "the head's matrices at 2 bits, rounded to nearest", "low at every depth, not 0",
        variant=Variant("head-2-bit", "the head at 2 bits", change=partial(_quantize, 2)),
        advice=_UNQUANTIZED,
    ),
    Fault(
        "exact-match", "a sampled draft is accepted only if the trunk samples the same token",
        "as expected at temperature 0, low above",
        ("jundot/omlx#3370", "ml-explore/mlx-lm#1085", "vllm-project/vllm#41044"), rule="match",
        advice="accept a draft with probability min(1, p/q), or draft the argmax; comparing two samples wastes drafts",
    ),
    Fault("argmax-drafts", "the head's argmax is drafted above temperature 0: lossless, but accepted less",
          "as expected at temperature 0, lower above", rule="argmax",
        advice="nothing is wrong; sampled drafts with min(1, p/q) are accepted more where distributions are flat",
    ),
)


NOTHING, WEIGHTS, CONTEXT, TEMPLATE = "nothing-accepted", "weights", "context-length", "template"
OVERRIDDEN = "acceptance-overridden"


def cause_found(name: str) -> CheckResult:
    """Return what to report about this cause besides its figures."""
    fault = next((each for each in FAULTS if each.name == name), None)
    if fault is None:
        return next(cause for cause in OTHER_CAUSES if cause.name == name)
    return CheckResult(name, "failed", fault.description, fault.advice, issues=fault.issues)


# Causes that are not injected.
OTHER_CAUSES = (
    CheckResult(
        NOTHING,
        "failed",
        "no draft is ever accepted, not even by accident: empty or NaN weights, or drafts that do not reach the "
        "verifier",
        "look for tensors that the loader skipped (`nextn audit` on the same folder), and for NaN in the head's logits",
        issues=("vllm-project/vllm#35548", "vllm-project/vllm#37667"),
    ),
    CheckResult(
        WEIGHTS,
        "failed",
        "the head drafts badly even in the reference: the cause is in the weights, not in the engine",
        "`nextn measure --probe` tries other conventions, `nextn audit` checks the file; else train the head",
    ),
    CheckResult(
        TEMPLATE,
        "failed",
        "prompts with the chat template where the reference has none, or without",
        "ask the engine's chat route, or give the reference --no-chat; then compare again",
        issues=("ROCm/ATOM#609",),
    ),
    CheckResult(
        OVERRIDDEN,
        "failed",
        "a setting of the engine has another drafter in place of the head, or accepts drafts that the trunk did not "
        "sample (the text is then not the trunk's): the counts say nothing about the head",
        "remove the setting, then compare again; forced acceptance is for benchmarks of speed alone",
    ),
    CheckResult(
        CONTEXT,
        "failed",
        "acceptance falls with length: positions, their scaling, or a sliding window that the head does not have",
        "give the head the trunk's RoPE scaling and its full context",
        issues=("vllm-project/vllm#37435", "kekzl/imp#897"),
    ),
)


def expectations(
    reference: ReferenceReport,
    model: Model,
    *,
    faults: Sequence[Fault] = FAULTS,
    on_fault: Callable[[], None] = lambda: None,
    found: dict[float, list[ExpectedCounts]] | None = None,
) -> dict[float, list[ExpectedCounts]]:
    """Return all hypotheses by temperature, `no-fault` first, over all texts, by the plan's K and acceptance rule.

    They are added to `found`, if given, which has the first of them if the run is interrupted.
    """
    hypotheses = {} if found is None else found
    for t in reference.generated:
        hypotheses[t] = [expectation(NO_FAULT, reference, t), _nothing_accepted(reference, t)]
    hiddens = text_states(reference, model)
    for fault in faults:
        faulty = measure_under_fault(reference, model, fault, hiddens=hiddens)
        if faulty is not None:
            for temperature, expected in hypotheses.items():
                rule = fault.rule if temperature else ""  # greedy decoding has one rule
                expected.append(expectation(fault.name, faulty, temperature, rule=rule))
        on_fault()
    return hypotheses


def expectation(name: str, reference: ReferenceReport, temperature: float, *, rule: str = "") -> ExpectedCounts:
    """Return a measurement as a hypothesis, by this acceptance rule or the plan's."""
    rule = rule or (reference.plan.rule if temperature else "greedy")
    counts = reference.counts(temperature, rule, reference.plan.num_speculative_tokens)
    return ExpectedCounts(
        name,
        [num_drafted for num_drafted, _ in counts],
        [num_accepted for _, num_accepted in counts],
        domains=[prompt.domain for prompt in reference.prompts],
        is_expectation=bool(temperature and reference.scored.get(temperature)),
    )


def _nothing_accepted(reference: ReferenceReport, temperature: float) -> ExpectedCounts:
    """A round starts at every position, and accepts nothing."""
    deeper = [0.0] * (reference.plan.num_speculative_tokens - 1)
    num_drafted = [[float(len(text.remaining)), *deeper] for text in reference.generated[temperature].texts]
    domains = [prompt.domain for prompt in reference.prompts]
    return ExpectedCounts(NOTHING, num_drafted, [[0.0, *deeper] for _ in num_drafted], domains=domains)
