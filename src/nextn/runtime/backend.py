"""What decoding needs of a backend, and the choice of the one that decodes a model.

There are two: `torch` (torch_backend.py) and `native` (native/session.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nextn.checkpoint.mapped_memory import return_freed_memory
from nextn.errors import ConfigError
from nextn.model.head import Head
from nextn.model.model import Model
from nextn.model.packed_experts import StackedCodes, weights_with_codes
from nextn.model.packed_linear import StoredCodes, StoredFp8
from nextn.model.trunk import Trunk
from nextn.runtime import self_check
from nextn.runtime.native import LOCK
from nextn.runtime.native.abi import load
from nextn.runtime.native.grouped import EIGHT_BITS, FOUR_BITS
from nextn.runtime.native.lm_head import FORMAT, draft_lm_heads
from nextn.runtime.native.session import NativeHead, NativeTrunk
from nextn.runtime.native.stored_codes import notes_on
from nextn.runtime.native.trace import Untraceable
from nextn.runtime.native.weight_packing import SEVEN_BITS, PackedWeights, ReplacedWeight, WeightFormat
from nextn.runtime.protocols import DecodingHead, DecodingTrunk
from nextn.runtime.torch_backend import TorchHead, TorchTrunk
from nextn.settings import BACKENDS, KV_CACHE_DTYPES, WEIGHT_BITS, WEIGHTS

_NUM_COMPARED = 64  # first values of a weight, by which a change is seen
_Formats = list[tuple[Tensor, WeightFormat | None]]


@dataclass(frozen=True, eq=False)
class Backend:
    """Trunk and head as decoding runs them, and what reports say of it."""

    trunk: DecodingTrunk
    head: DecodingHead | None
    reason: str = ""  # why the backend is `torch`; empty for `native`
    runtime: str = "torch"  # what runs the passes, for reports
    head_bits: int | None = None  # bits per weight of the head's matrices; None: as stored
    draft_lm_head_bits: int | None = None  # the same of the lm_head that drafts; None: those of the head
    weight_bits: int | None = None  # the same of the trunk's

    @property
    def name(self) -> str:
        return "torch" if self.reason else "native"


def backend_for(model: Model, name: str = "auto") -> Backend:
    """Return the backend that decodes a model, cached on it and rebuilt after the weights change; see `make_backend`.

    Raises ConfigError if the name is unknown, or `native` cannot run this model.
    """
    state = _state_of(model)
    cached = model.backends.get(name)
    if not isinstance(cached, _CachedBackend) or cached.state != state:
        with LOCK:  # another thread may have built it meanwhile
            cached = model.backends.get(name)
            if not isinstance(cached, _CachedBackend) or cached.state != state:
                backend = make_backend(model.trunk, model.head, name=name)
                if name == "auto" and backend.name == "torch":  # which would dequantize the weights in each pass
                    model.dequantize()
                cached = model.backends[name] = _CachedBackend(_state_of(model), backend)
    return cached.backend


def unused_codes(model: Model) -> list[str]:
    """Return notes on weights of a quantized checkpoint that the native backend does not decode with their codes."""
    weights = weights_with_codes(*filter(None, (model.trunk, model.head)))
    return notes_on(matrix for weight in weights for matrix in weight.matrices)


def _state_of(model: Model) -> list[object]:
    """What a backend is built from."""
    parts = [model.trunk, *([] if model.head is None else [model.head])]
    # Those on the meta device are elsewhere, see `Trunk.layer_places`.
    stored = [tensor for part in parts for tensor in (*part.parameters(), *_stored_buffers(part))]
    return [
        *(_identity(tensor) for tensor in stored if not tensor.is_meta),
        model.trunk.weights,
        model.trunk.kv_cache_dtype,
        None if model.head is None else (model.head.draft_vocabulary, model.head.exact),
    ]


def _stored_buffers(part: nn.Module) -> Iterator[Tensor]:
    """Buffers that a checkpoint has, such as a router's correction bias; a pass may change the others."""
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer


def _identity(weight: Tensor) -> tuple[object, ...]:
    """Return what changes when a weight does. Changes through `.data` have no version: a new tensor has another
    address, and values written in place show in the first ones, which cost one page of a mapped file."""
    size = min(_NUM_COMPARED, weight.untyped_storage().nbytes() // weight.itemsize - weight.storage_offset())
    is_read = weight.device.type == "cpu"  # elsewhere, no backend keeps a copy
    first = weight.detach().as_strided((size,), (1,)).view(torch.uint8).numpy().tobytes() if is_read else b""
    return id(weight), weight.device, weight.dtype, weight.data_ptr(), weight._version, first


def _torch_backend(trunk: Trunk, head: Head | None, reason: str) -> Backend:
    """Return the `torch` backend of a trunk and its head. reason: why it is not `native`."""
    return Backend(TorchTrunk(trunk), None if head is None else TorchHead(head), reason)


def make_backend(trunk: Trunk, head: Head | None, *, name: str = "auto") -> Backend:
    """Build the backend that decodes a trunk and its head, if it has one. Several threads may share it.

    `torch` runs the modules as they are. `native` runs the C++ runtime, on CPUs only; it keeps a packed copy of the
    weights and must be rebuilt after they change or move. `auto` is `native` where that is possible. Raises ConfigError
    if the name is unknown, `native` cannot run this model, or `torch` would run one whose `Trunk.weights` or
    `Trunk.kv_cache_dtype` only `native` has.
    """
    choices = (
        ("backend", name, BACKENDS),
        ("weights", trunk.weights, WEIGHTS),
        ("kv_cache_dtype", trunk.kv_cache_dtype, KV_CACHE_DTYPES),
    )
    for kind, value, known in choices:
        if value not in known:
            raise ConfigError(f"{kind} = {value!r}; expected one of {', '.join(known)}")
    native_only = [f"{kind} = {value!r}" for kind, value, known in choices[1:] if value != known[0]]
    if name == "torch" and native_only:
        raise ConfigError(f"only the native backend has {' and '.join(native_only)}; use backend native or auto")
    if name == "torch":
        return _torch_backend(trunk, head, "the torch backend was requested")
    try:
        with LOCK:
            return _checked_native(trunk, head)
    except (ConfigError, Untraceable) as error:
        if name == "native":
            raise ConfigError(f"the native backend cannot run this model: {error}; use torch or auto") from error
        if native_only:
            raise ConfigError(
                f"only the native backend has {' and '.join(native_only)}, and it cannot run this model: {error}; "
                "use weights stored and kv_cache_dtype auto"
            ) from error
        return _torch_backend(trunk, head, str(error))


@dataclass(frozen=True)
class _CachedBackend:
    """A backend and the state of the weights that it was built from."""

    state: list[object]
    backend: Backend


def _checked_native(trunk: Trunk, head: Head | None) -> Backend:
    if trunk.layer_places:
        raise Untraceable("the native runtime has all layers in memory, and a device map places them elsewhere")
    if trunk.device.type != "cpu":
        raise Untraceable(f"the native runtime runs on CPUs, the model is on {trunk.device}")
    if head is not None and head.family.repeated_kv != "own":
        raise Untraceable("the native runtime gives repeated depths keys of their own, and this head's have none")
    if (quantizer := getattr(trunk.model, "hf_quantizer", None)) is not None:
        method = getattr(quantizer.quantization_config, "quant_method", "quantization")
        message = f"its weights are loaded by {getattr(method, 'value', method)}, whose layers have no native form"
        raise Untraceable(message)
    backend = _build_native(trunk, head)
    self_check.check(trunk, head, backend)
    return_freed_memory()
    return backend


@torch.inference_mode(False)  # the tensors created here outlive the caller's inference mode
def _build_native(trunk: Trunk, head: Head | None) -> Backend:
    if trunk.dtype not in (torch.float32, torch.bfloat16):
        message = f"the native runtime does not support {trunk.dtype}, only float32 and bfloat16: load the model as one"
        raise Untraceable(message)
    runtime = load()
    weight_bits = WEIGHT_BITS[trunk.weights]
    codes = [*weights_with_codes(*filter(None, (trunk, head)))]
    lm_heads = [] if head is None else draft_lm_heads(head)
    formats: _Formats = [(each.memory, FORMAT) for each in lm_heads]
    replaced: list[ReplacedWeight] = [*codes, *lm_heads]
    if weight_bits is None:
        weights = PackedWeights(runtime, formats=formats, replaced=replaced)
    else:
        formats += _few_bits(trunk, head, codes)
        weights = PackedWeights(runtime, EIGHT_BITS, trunk.dtype, formats, replaced)
    native_trunk = NativeTrunk(trunk, runtime, weights)
    if head is None:
        return Backend(native_trunk, None, runtime="native code", weight_bits=weight_bits)
    quantizes = weight_bits is None and not head.exact and trunk.dtype == torch.bfloat16
    quantizes = quantizes and runtime.has_bf16_pair_products
    head_weights = PackedWeights(runtime, SEVEN_BITS, formats=formats, replaced=replaced) if quantizes else weights
    return Backend(
        native_trunk,
        NativeHead(head, native_trunk, runtime, head_weights, own_lm_head=quantizes, lm_heads=lm_heads),
        runtime="native code",
        head_bits=SEVEN_BITS.bits if quantizes else weight_bits and EIGHT_BITS.bits,
        draft_lm_head_bits=FORMAT.bits if lm_heads else None,
        weight_bits=weight_bits,
    )


def _few_bits(trunk: Trunk, head: Head | None, codes: Sequence[StoredCodes | StackedCodes]) -> _Formats:
    """Return the formats of weights beside eight bits, which linear layers, experts and embeddings have.

    Other matrices, such as a router's, are kept. With int4, only the layers of the trunk have four bits
    (bench/log.md). Weights of four and eight bits keep their codes; those in fp8 are rounded as others are.
    """
    modules = [module for part in (trunk, head) if part is not None for module in part.modules()]
    others = [module for module in modules if not isinstance(module, (nn.Linear, nn.Embedding))]
    formats: _Formats = [
        (weight, None) for module in others for weight in module.parameters(recurse=False) if weight.ndim == 2
    ]
    if trunk.weights == "int4":
        linear = [module.weight for module in trunk.decoder.layers.modules() if type(module) is nn.Linear]
        experts = [weight for weight in trunk.decoder.layers.parameters() if weight.ndim == 3]
        formats += [(weight, FOUR_BITS) for weight in [*linear, *experts]]
    of_trunk = {id(each) for each in weights_with_codes(trunk.decoder.layers) if trunk.weights == "int4"}
    fp8 = [each for each in codes if any(isinstance(matrix, StoredFp8) for matrix in each.matrices)]
    return formats + [(each.memory, FOUR_BITS if id(each) in of_trunk else EIGHT_BITS) for each in fp8]
