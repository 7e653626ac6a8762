"""Initialize a fresh head from copies of the trunk's own layers, so that training starts from a sane state.

A layer is a copy of one of the trunk's. At position i it gets the embedding of token i + 1 and the trunk's state at i,
and should do what the original does at i + 1. So the projection is the ridge regression from the two to the original's
input at i + 1, each position's divided by its RMS. The plain sum of the two would, with tied embeddings, predict token
i + 1 itself.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nextn.errors import ConfigError, FamilyError, require_type
from nextn.family_table import Family
from nextn.model.deferred_init import DeferredInit
from nextn.model.head import Head, MTPLayer
from nextn.model.layer_states import LayerProgress
from nextn.model.layer_types import LayerType
from nextn.model.model import live_trunk
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.model.trunk import Trunk
from nextn.train.layer_inputs import measure_layers

_NOISE = 0.02
# Projections that write into the residual stream, by their last name in transformers' layers.
_OUTPUT_PROJECTIONS = re.compile(
    r"(^|\.)(o_proj|o_b_proj|down_proj|out_proj|c_proj|w2|dense|dense_4h_to_h|fc2)(\.weight|\.bias)?$"
)
# The norm of Llama's layers in front of the MLP, whose name says what it comes after.
_BEFORE_MLP = "post_attention_layernorm"
_RIDGE = 0.03  # of the inputs' mean square; from 0.01 to 0.1, held-out loss hardly changed


def init_head(
    family: Family,
    trunk: Trunk,
    tokens: Tensor,
    *,
    num_modules: int = 1,
    folder: Path | None = None,
    on_layer: Callable[[LayerProgress], None] = lambda progress: None,
    deferred: DeferredInit | None = None,
) -> tuple[Head, list[str]]:
    """Build a head for a trunk from the trunk's parameters; return it, and notes on what has no counterpart.

    Each part of an MTP layer is copied from the last trunk layer with the same structure. The projection is fitted to
    the input that this layer had in the trunk, see `fit_projection`; where a head has several streams, it adds the
    normalized embedding and state. This input, and the projections that write into the residual stream, are divided by
    the root of its RMS: the layer then computes the same function, with weights of a size that learning rates are made
    for. The final norm is the trunk's, and so are the embedding and lm_head if the family's modules have their own.

    `tokens` [B, T] is a text on which the layers are measured and the projection is fitted: some thousand tokens.
    `folder` is of the states of a streamed trunk, see `StreamedTrunk.read_layers`. `deferred` leaves the head's
    parameters on the meta device. Raises ConfigError if the family allows fewer modules, FamilyError if the trunk's
    layers cannot be those of a head.
    """
    if family.max_modules is not None and num_modules > family.max_modules:
        raise ConfigError(f"modules = {num_modules}; {family.name} allows at most {family.max_modules}")
    with _layer_errors(family, trunk), deferred.building() if deferred else nullcontext():
        head = Head(family, trunk, num_modules=num_modules)
    modules, notes = cast(Sequence[MTPLayer], head.stack), list[str]()
    sources: list[list[dict[str, int]]] = []
    with torch.no_grad(), deferred or nullcontext():
        for module in modules:
            copied = [_copy_layer(*pair, trunk, family) for pair in zip(module.layers, module.layer_types, strict=True)]
            sources.append([parts for parts, _ in copied])
            notes += [note for _, layer_notes in copied for note in layer_notes]
    originals = [max(parts[0].values()) for parts in sources]
    stream_rms, inputs, states = measure_layers(trunk, tokens, {*originals}, folder, on_layer)
    with torch.no_grad(), deferred or nullcontext():
        for number, (module, parts, original) in enumerate(zip(modules, sources, originals, strict=True)):
            scale = _scale_block(module, parts, stream_rms, original, family)
            _init_input_projection(module, family, scale)
            if can_fit(module, states, inputs[original]):
                fit_projection(head, number, tokens, states, inputs[original], scale)
            _copy_shared(module, trunk)
    if deferred is None or not _is_known(family):
        computed = deferred.computed(head.stack[0]) if deferred else nullcontext()
        with torch.no_grad(), _layer_errors(family, trunk), computed:
            head.teacher_forced_hidden(tokens, states, 1)
    return head, list(dict.fromkeys(notes))


def new_head(model: PreTrainedModel, tokens: Tensor, *, num_modules: int = 1, trunk_class: type[Trunk] = Trunk) -> Head:
    """Make a head for a transformers model from its own layers, as `nextn train --init-head` does, in its dtype.

    A part that no layer of the model has is initialized at random, and a warning names it.

    Args:
        model: The model, of a family, whose head it has, or of another class with decoder layers as Llama's.
        tokens: [B, T] int64 of text like that of training, some thousand: the projection is fitted to them.
        num_modules: Number of MTP layers.
        trunk_class: Of the trunk that is made around the model, such as `DetachedTrunk`.

    Returns:
        The head, on the model's device.

    Raises:
        ConfigError: The family has fewer MTP layers, or the arguments are of another type or shape.
        FamilyError: The model's layers cannot be those of a head.

    Example:
        >>> import torch
        >>> model = nextn.load("tiny").trunk.model  # a transformers model
        >>> nextn.new_head(model, torch.randint(0, 256, (2, 64))).num_modules
        1
    """
    require_type("model", model, PreTrainedModel, "a transformers model, such as nextn.load(...).trunk.model")
    require_type("tokens", tokens, Tensor, "a [B, T] int64 tensor of token ids")
    family, trunk = live_trunk(model, trunk_class=trunk_class, generic_too=True)
    size = trunk.vocab_size
    if tokens.dim() != 2 or not tokens.numel() or tokens.min() < 0 or tokens.max() >= size:
        raise ConfigError(f"tokens: {list(tokens.shape)}; expected [B, T] token ids below the vocabulary's {size}")
    head, notes = init_head(family, trunk, tokens[:, : trunk.max_length].to(trunk.device), num_modules=num_modules)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return head


def _is_known(family: Family) -> bool:
    """Whether the family says which decoder layers its heads have."""
    return bool(family.model_types or family.layer_model)


@contextmanager
def _layer_errors(family: Family, trunk: Trunk) -> Iterator[None]:
    """Explain that decoder layers of this class take other arguments than those of the known families."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        if _is_known(family):
            raise
        raise FamilyError(
            f"a decoder layer of model_type {trunk.config.model_type} cannot be the block of a head: "
            f"{type(error).__name__}: {error}. --layout mimo makes it of a Qwen2 layer"
        ) from error


def _copy_layer(layer: nn.Module, kind: LayerType, trunk: Trunk, family: Family) -> tuple[dict[str, int], list[str]]:
    """Copy each part from the trunk layer that shares most of its elements, preferring its layer type, then the last.

    Returns part -> index of that layer, and a note on tensors that no layer has.
    """
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in layer.state_dict().items():
        parts[name.partition(".")[0]][name] = value
    others = [_tensors(layer) for layer in trunk.decoder.layers]
    sources, missing = {}, []
    copies: dict[int, list[tuple[Tensor, str]]] = defaultdict(list)
    for part, own in parts.items():
        matches = [_counterparts(own, other, family.parts) for other in others]
        sizes = [sum(own[name].numel() for name in match) for match in matches]
        best = max(
            range(len(matches)), key=lambda index: (sizes[index], trunk.layer_types[index].name == kind.name, index)
        )
        copies[best] += [(own[name], counterpart) for name, counterpart in matches[best].items()]
        sources[part] = best
        missing += [name for name, value in own.items() if name not in matches[best] and value.any()]  # biases are zero
    for index, pairs in copies.items():
        with _loaded_layer(trunk, index) as source:
            tensors = _tensors(source)
            for value, counterpart in pairs:
                value.copy_(_dequantized(source, counterpart, trunk.dtype, tensors[counterpart]))
    more = f" and {len(missing) - 1} more" if missing[1:] else ""
    note = f"no layer of the trunk has the block's {missing[0]}{more}: initialized at random" if missing else ""
    return sources, [note] if note else []


def _loaded_layer(trunk: Trunk, index: int) -> AbstractContextManager[nn.Module]:
    return trunk.loaded_layer(index) if isinstance(trunk, StreamedTrunk) else nullcontext(trunk.decoder.layers[index])


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a layer; of a matrix in another library's codes, one without values and of its shape."""
    # Layers with adapters (LoRA) keep their own weights under `base_layer`.
    tensors = {name.replace(".base_layer.", "."): value for name, value in layer.state_dict().items()}
    for name, module in layer.named_modules():
        outputs, inputs = (getattr(module, size, None) for size in ("out_features", "in_features"))
        if isinstance(outputs, int) and isinstance(inputs, int):
            weight = tensors.get(f"{name}.weight")
            # fp8's codes have one byte.
            if type(weight) is not Tensor or not weight.is_floating_point() or weight.itemsize == 1:
                tensors[f"{name}.weight"] = torch.empty(outputs, inputs, device="meta")
    return tensors


def _dequantized(layer: nn.Module, name: str, dtype: torch.dtype, value: Tensor) -> Tensor:
    """Return `value`; of a matrix in codes, what its module makes of the identity, whichever library runs it."""
    if not value.is_meta:
        return value
    module = layer.get_submodule(name.rpartition(".")[0])
    device = next((each.device for each in chain(module.parameters(), module.buffers())), None)
    bias = getattr(module, "bias", None)
    transposed: Tensor = module(torch.eye(value.shape[1], dtype=dtype, device=device))
    return (transposed if bias is None else transposed - bias).T


def _post_norms(layer: nn.Module) -> set[str] | None:
    """Return the norms through which attention and MLP write into the residual stream, as they do in some layers.

    None: the two read the stream without a norm (EXAONE 4.5, OLMo 2), so that its RMS matters, or norms have names that
    are not known.
    """
    norms = {name for name, _ in layer.named_children() if name.endswith("norm")}
    after = {name for name in norms if name.startswith("post_")}
    if norms & {"pre_feedforward_layernorm", "pre_mlp_layernorm"}:  # Gemma 2 to 4, AFMoE
        return after
    if after <= {_BEFORE_MLP}:
        return set()
    return after - {_BEFORE_MLP} if "post_self_attn_layernorm" in after else None  # GLM-4, GLM-OCR


def _scale_block(
    module: MTPLayer, sources: Sequence[Mapping[str, int]], stream_rms: Sequence[float], original: int, family: Family
) -> float:
    """Let the block's stream be smaller than its original's, and return the RMS that its input then has."""
    rms = stream_rms[original]
    if any(_post_norms(layer) is None for layer in module.layers):
        return rms
    scale: float = rms**0.5  # on two trunks, heads learn sooner than with 1 or with the RMS itself
    for layer, parts in zip(module.layers, sources, strict=True):
        _scale_outputs(layer, {part: scale / stream_rms[index] for part, index in parts.items()}, family)
    return scale


def _scale_outputs(layer: nn.Module, factors: Mapping[str, float], family: Family) -> None:
    """Multiply what each part of the layer adds to the residual stream by its factor."""
    post_norms, offset = _post_norms(layer), float(family.norm_weight == "1+w")
    for name, value in layer.named_parameters():
        part = name.partition(".")[0]
        if part in (post_norms or ()):
            value.add_(offset).mul_(factors[part]).sub_(offset)
        elif not post_norms and _OUTPUT_PROJECTIONS.search(name):
            value.mul_(factors[part])


def _counterparts(own: Mapping[str, Tensor], other: Mapping[str, Tensor], parts: Mapping[str, str]) -> dict[str, str]:
    """Name -> that of `other` with the same name and shape; parts: other names that a residual block uses."""
    matches = {}
    for name, value in own.items():
        first, _, rest = name.partition(".")
        counterpart = f"{parts[first]}.{rest}" if first in parts else name
        if counterpart in other and other[counterpart].shape == value.shape:
            matches[name] = counterpart
    return matches


def _init_input_projection(module: MTPLayer, family: Family, scale: float) -> None:
    """Make eh_proj add the normalized token and hidden state, times `scale`; small noise breaks their symmetry."""
    for projection in _projections(module):
        projection.weight.normal_(std=_NOISE)
        for block in projection.weight.split(projection.out_features, dim=1):
            block.diagonal().add_(scale)
        if projection.bias is not None:
            projection.bias.zero_()
    for norm in (module.token_norm, module.hidden_norm):
        next(norm.parameters()).fill_(float(family.norm_weight == "w"))


def _projections(module: MTPLayer) -> list[nn.Linear]:
    """Return the linear projections of embedding and state: one of both, or one of each."""
    found = (getattr(module, name, None) for name in ("projection", "token_projection", "hidden_projection"))
    return [each for each in found if isinstance(each, nn.Linear)]


def _copy_shared(module: MTPLayer, trunk: Trunk) -> None:
    """Copy what follows the block, and the module's own embedding and lm_head if it has them."""
    pairs: list[tuple[object, object]] = [(module.final_norm, trunk.final_norm)]
    pairs += [(getattr(module, name, None), getattr(trunk, name)) for name in ("embedding", "output")]
    pairs.append((getattr(module, "collapse", None), getattr(trunk.decoder, "hyper_connection_mixer", None)))
    for own, other in pairs:
        if isinstance(own, nn.Module) and isinstance(other, nn.Module):
            state = other.state_dict()
            for name, value in own.state_dict().items():
                if name in state and state[name].shape[1:] == value.shape[1:] and len(state[name]) >= len(value):
                    value.copy_(state[name][: len(value)])  # the trunk's embedding may have padding rows
    mixer = getattr(trunk.decoder, "hc_head", None)
    if mixer is not None and hasattr(module, "collapse_fn"):
        for name in ("fn", "base", "scale"):
            getattr(module, f"collapse_{name}").copy_(getattr(mixer, f"hc_{name}"))


def fit_projection(head: Head, index: int, tokens: Tensor, hidden: Tensor, target: Tensor, scale: float) -> None:
    """Set the projection of MTP layer `index`, whose norms pass normalized values as they are.

    From tokens [B, T] and the trunk's head_input `hidden` [B, T, H], it gives `target` [B, T, H], the input of the
    trunk layer that the block is a copy of, divided to an RMS of `scale`. The layer's parameters may be deferred.
    """
    module = head.stack[index]
    assert isinstance(module, MTPLayer)
    ahead = index + 1 if head.family.order == "unchained" else 1  # else it takes the state of the layer before it
    names = ["token_projection", "hidden_projection"]
    if head.family.concat == "hidden_first":
        names.reverse()
    width = target.shape[-1]
    gram, cross = (torch.zeros(2 * width, size, dtype=torch.float64) for size in (2 * width, width))
    for row, states, original in zip(tokens, hidden, target, strict=True):  # whose products are enough
        embedded = head.trunk.embed(row[None], raw=head.family.embedded == "raw")[0]
        parts = {"token_projection": _normalized(head, embedded)[1 + ahead :]}
        # Position 0 is left out: many trunks have states of another size there.
        parts["hidden_projection"] = _normalized(head, states)[1:-ahead]
        inputs = torch.cat([parts[name] for name in names], dim=-1).double().cpu()
        outputs = original[1 + ahead :].double().cpu()
        outputs *= scale / outputs.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
        gram.addmm_(inputs.T, inputs)
        cross.addmm_(inputs.T, outputs)
    # Least squares with a penalty: the weight [H, N] that maps inputs to outputs.
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean().clamp_min(1e-12))
    weight = torch.cholesky_solve(cross, torch.linalg.cholesky(gram)).T
    blocks = {"projection": weight}
    if not hasattr(module, "projection"):
        blocks = dict(zip(names, weight.split(len(weight), dim=1), strict=True))
    for name, block in blocks.items():
        getattr(module, name).weight.copy_(block)


def can_fit(module: MTPLayer, hidden: Tensor, target: Tensor) -> bool:
    """Whether the projection takes one embedding and one state and returns one; not with several streams."""
    width, projections = target.shape[-1], _projections(module)
    fits = sum(each.in_features for each in projections) == 2 * width
    fits = fits and all(each.out_features == width for each in projections)
    return fits and hidden.ndim == target.ndim == 3 and hidden.shape[-1] == width


def _normalized(head: Head, states: Tensor) -> Tensor:
    normalized: Tensor = head.new_norm().to(states.device, torch.float32)(states.float())
    return normalized
