"""The trunk of a checkpoint: in memory, streamed, or with layers that are loaded one at a time."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nextn.checkpoint.checkpoint import ADAPTER, Checkpoint
from nextn.checkpoint.mapped_memory import release_pages
from nextn.checkpoint.provenance import trunk_identity
from nextn.checkpoint.quantization import is_mlx
from nextn.checkpoint.snapshot import folder_of
from nextn.checkpoint.tensors import READABLE, StoredTensor, TensorReader, is_finite
from nextn.errors import CheckpointError
from nextn.family_table import Family
from nextn.model.layer_loader import LayerLoader
from nextn.model.load_head import trunk_advice, trunk_state
from nextn.model.packed_experts import can_keep_codes, pack_experts, weights_with_codes
from nextn.model.stored_experts import EXPERT
from nextn.model.streamed_trunk import DeferredTrunk, StreamedTrunk
from nextn.model.transformers_loading import reads_quantization, transformers_errors
from nextn.model.trunk import Trunk


def load_trunk(weights: TensorReader, dtype: torch.dtype | None) -> tuple[Trunk, list[str]]:
    """Load the trunk, in dtype, or as stored; return notes with it."""
    checkpoint, family = weights.checkpoint, weights.inventory.family
    state, notes = trunk_state(weights)
    # transformers does not load fp8 here: it needs accelerate, and mistakes a truncated last block for smaller blocks.
    packed = weights.unreadable(state)
    if packed and not (is_mlx(checkpoint) or reads_quantization(weights.method)):
        raise CheckpointError(
            f"{checkpoint.path}: its quantization is {weights.method} ({packed} and others), which neither "
            f"transformers nor nextn reads: {_instead(checkpoint)}"
        )
    folder = folder_of(checkpoint)
    with _loading_reasons(checkpoint, weights, packed):
        if packed:
            trunk = Trunk.from_pretrained(folder, stage=family.hidden, dtype=dtype)
        else:
            state = {_unwrapped(name, family): each for name, each in state.items()}
            kept = {name: each for name, each in state.items() if weights.has_codes(each.name)}
            linear = {name: each for name, each in kept.items() if not EXPERT.search(name)}
            if len(linear) < len(kept):
                trunk = Trunk(_model_with_packed_experts(weights, state, dtype, linear), stage=family.hidden)
            else:
                trunk = Trunk.from_pretrained(folder, state=state, packed=linear, stage=family.hidden, dtype=dtype)
    return trunk, [*notes, *_check_trunk(checkpoint, trunk)]


def check_runs(weights: TensorReader, trunk: Trunk) -> None:
    """Raise CheckpointError if layers that a library packed do not run here, as its kernels lack their sizes."""
    if getattr(trunk.model, "hf_quantizer", None) is None:
        return
    packed = weights.unreadable(trunk_state(weights)[0])
    with (
        _loading_reasons(weights.checkpoint, weights, packed),
        transformers_errors(folder_of(weights.checkpoint), "run"),
        torch.no_grad(),
    ):
        trunk(torch.zeros(1, 2, dtype=torch.long))


def deferred_trunk(weights: TensorReader, dtype: torch.dtype | None) -> tuple[Trunk, list[str]]:
    """Load all but the trunk's decoder layers; of formats that only transformers reads, load the whole trunk."""
    state, notes = trunk_state(weights)
    if weights.unreadable(state):
        return load_trunk(weights, dtype)
    trunk = DeferredTrunk(_layer_loader(weights, state, dtype, {}), weights, stage=weights.inventory.family.hidden)
    return trunk, [*notes, *_check_trunk(weights.checkpoint, trunk)]


def streamed_trunk(weights: TensorReader, dtype: torch.dtype | None) -> tuple[StreamedTrunk, list[str]]:
    """Load all but the trunk's decoder layers, which are read when it runs texts."""
    inventory, checkpoint = weights.inventory, weights.checkpoint
    state, notes = trunk_state(weights)
    if packed := weights.unreadable(state):
        raise CheckpointError(
            f"{checkpoint.path}: its quantization is {weights.method} ({packed} and others), of which single layers "
            f"cannot be read; valid are {READABLE}. Stream the model that was quantized"
        )
    loader = _layer_loader(weights, state, dtype, inventory.shared)
    trunk = StreamedTrunk(loader, weights, stage=inventory.family.hidden, fingerprint=trunk_identity(inventory))
    return trunk, [*notes, *_check_trunk(checkpoint, trunk)]


def _model_with_packed_experts(
    weights: TensorReader,
    state: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
    packed: Mapping[str, StoredTensor],
) -> PreTrainedModel:
    """Load a model layer by layer; experts that cannot keep their codes are dequantized."""
    loader, device = _layer_loader(weights, state, dtype, {}, packed), torch.device("cpu")
    layers, packed_experts = loader.model.get_decoder().layers, []
    for index, layer in enumerate(layers):
        loader.load(index, device, experts=False)
        if not loader.lacks_experts(index):
            continue
        stored = loader.stored_experts(index)
        paths = {name.rpartition(".")[0] for name in stored.layout} if stored is not None else set()
        path = paths.pop() if len(paths) == 1 else ""
        if stored is not None and path and can_keep_codes(layer.get_submodule(path), stored):
            packed_experts.append((layer, path, stored))
        else:
            loader.load(index, device)
    # Not before all layers are loaded: transformers asks for the state of the whole model, which would dequantize them.
    for layer, path, stored in packed_experts:
        pack_experts(layer, path, stored)
    if not (others := loader.stand_ins.install(layers)):
        return loader.model
    del loader, layers, layer, packed_experts
    fewer = {name: stored for name, stored in packed.items() if stored not in others}
    return _model_with_packed_experts(weights, state, dtype, fewer)


def _layer_loader(
    weights: TensorReader,
    state: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
    vocabulary: Mapping[str, str],
    packed: Mapping[str, StoredTensor] = {},
) -> LayerLoader:
    inventory, checkpoint = weights.inventory, weights.checkpoint

    def layer_of(name: str) -> int | None:
        layer = inventory.family.trunk_layer(name)
        return layer[0] if layer is not None and layer[0] < inventory.num_layers else None

    state = {_unwrapped(name, inventory.family): each for name, each in state.items()}
    vocabulary = {role: _unwrapped(name, inventory.family) for role, name in vocabulary.items()}
    weights.download(tensor.name for name, tensor in state.items() if layer_of(name) is None)
    with _loading_reasons(checkpoint, weights, None):
        return LayerLoader(folder_of(checkpoint), state, dtype, layer_of, vocabulary=vocabulary, packed=packed)


def _unwrapped(name: str, family: Family) -> str:
    """Return the name without the wrapper of MLX and of older transformers, which transformers 5 does not map.

    It maps that of families which are published with no other one.
    """
    return name.removeprefix("language_model.") if len(family.wrappers) > 1 else name


@contextmanager
def _loading_reasons(checkpoint: Checkpoint, weights: TensorReader, packed: str | None) -> Iterator[None]:
    """Add to a CheckpointError what is known of its reasons."""
    try:
        yield
    except CheckpointError as error:
        reasons = [problem.message for problem in checkpoint.problems if problem.kind == "missing_file"]
        reasons += filter(None, [checkpoint.pickled])
        if is_mlx(checkpoint):
            reasons.append(
                "its weights are in MLX's layout, which mlx-lm and mlx-vlm load, and neither transformers nor nextn: "
                "give the model that was converted; `nextn audit` reads such files"
            )
        elif packed:
            reasons.append(
                f"its quantization is {weights.method} ({packed} and others): install what transformers needs for it, "
                f"or {_instead(checkpoint)}"
            )
        reasons = reasons or [trunk_advice(weights.inventory)]
        raise CheckpointError(". ".join(filter(None, [str(error), *reasons]))) from error


def _instead(checkpoint: Checkpoint) -> str:
    path = shlex.quote(checkpoint.path)
    return (
        "load the model that was quantized, in bf16 or fp8; "
        f"`nextn audit {path}` and `nextn restore` work on it as it is"
    )


def _check_trunk(checkpoint: Checkpoint, trunk: Trunk) -> list[str]:
    """Return notes on a loaded trunk. Raises CheckpointError for values that are not finite."""
    values = chain(trunk.model.named_parameters(), trunk.model.named_buffers())
    codes = (matrix for weight in weights_with_codes(trunk.model) for matrix in weight.matrices)
    scales = ((matrix.name, matrix.scales()) for matrix in codes)
    _check_finite(checkpoint.path, chain(values, scales))
    loaded_type, model_type = trunk.model.config.model_type, checkpoint.config.get("model_type")
    notes = [f"{ADAPTER}: the adapter beside the model is not applied; PEFT's `merge_and_unload` merges it"]
    notes = notes if ADAPTER in checkpoint.sources else []
    if loaded_type != model_type:
        notes.append(f"only the text model ({loaded_type}) of {model_type} is loaded, and would be saved")
    return notes


def _check_finite(path: str, state: Iterable[tuple[str, Tensor]]) -> None:
    bad = []
    for name, value in state:
        bad += [name] if value.is_floating_point() and not value.is_meta and not is_finite(value) else []
        if type(value.detach()) is Tensor:
            release_pages([value])
    if bad:
        raise CheckpointError(f"{path}: {len(bad)} trunk tensors hold NaN or Inf: {', '.join(bad[:8])}")
