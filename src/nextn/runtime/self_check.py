"""The native backend's self-check: its states beside those of the model's modules in float32, on a short text.

A model may do something that no recording captures. What rounding does to the states depends on the model: where bf16
costs torch's own modules a tenth of them, as in random models with recurrent layers, a fixed bound refuses a backend
that is nearer to float32 than torch. So the bound is relative to what torch's rounding makes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nextn.checkpoint.mapped_memory import released_after_use
from nextn.model.head import Head
from nextn.model.packed_experts import weights_with_codes
from nextn.model.packed_linear import StoredFp8
from nextn.model.trunk import Trunk
from nextn.runtime.native.trace import Untraceable

# Shaped like prefills, baseline steps and verifications: several of each, as in bf16 a near-tie of a MoE router may
# send single tokens to another expert.
BLOCK_SIZES = (26, 1, 3, 1, 3, 1, 3, 26)
# Errors relative to the norm of the states that need no comparison: far above accumulated rounding, far below the error
# of a wrong position.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02}
_QUANTIZED_TOLERANCE = {8: 0.3, 7: 0.1, 4: 1.1}  # by bits; the reference has weights as they are stored
_FACTOR = 2.0  # times the error of torch's modules; that of the native backend is below half of it


class InFloat32(TorchFunctionMode):
    """While open, this thread's passes of a module compute in float32, whatever the dtype of its weights.

    Weights are widened one at a time as they are used, so it takes no second copy of them. Embeddings give float32, so
    do products, and what torch promotes by itself follows. Where experts or a convolution cast what they take to the
    dtype of their weights, it is rounded, as in the recording.
    """

    _WIDENED = frozenset(
        (
            *(functional.linear, functional.conv1d, functional.layer_norm, functional.scaled_dot_product_attention),
            *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, functional.grouped_mm),
            *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
        )
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func in self._WIDENED:
            return func(*map(_widened, args), **{name: _widened(value) for name, value in options.items()})
        result = func(*args, **options)
        return _widened(result) if func is functional.embedding else result


def _widened(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4
    return value.float() if narrow else value


@torch.inference_mode()
def check(trunk: Trunk, head: Head | None, native: Any) -> None:
    """Compare the final states of the trunk and of the head's first layer with those of the modules in float32.

    native: The `Backend` of what was recorded. Raises Untraceable if a median over positions is beyond the bound.
    """
    tokens = torch.randint(trunk.vocab_size, (1, sum(BLOCK_SIZES)), generator=torch.Generator().manual_seed(0))
    tolerances = [_tolerance(trunk, head, bits) for bits in (native.weight_bits, native.head_bits)]
    with released_after_use([*trunk.decoder.layers, *([] if head is None else head.stack)]):
        with InFloat32():
            exact = trunk(tokens)
            exact_step = None if head is None else head.step(0, tokens, exact.head_input)
        cache, states = native.trunk.cache(1), []
        for block in tokens.split(BLOCK_SIZES, dim=1):
            states.append(native.trunk(block, cache).final_hidden.clone())
            cache.commit([block.shape[1]])
        _compare("trunk", exact.final_hidden, states, tolerances[0], lambda: trunk(tokens).final_hidden)
        if head is None or native.head is None or exact_step is None:
            return
        inputs, states, cache = exact.head_input.to(trunk.dtype), [], native.head.cache(1)
        for block, given in zip(tokens.split(BLOCK_SIZES, dim=1), inputs.split(BLOCK_SIZES, dim=1), strict=True):
            states.append(native.head.step(0, block, given, cache=cache).final_hidden.clone())
            cache.commit([block.shape[1]])
        _compare(
            "head", exact_step.final_hidden, states, tolerances[1], lambda: head.step(0, tokens, inputs).final_hidden
        )


def _tolerance(trunk: Trunk, head: Head | None, bits: int | None) -> float:
    tolerance = _TOLERANCE[trunk.dtype] if bits is None else _QUANTIZED_TOLERANCE[bits]
    kept = (matrix for weight in weights_with_codes(*filter(None, (trunk, head))) for matrix in weight.matrices)
    if any(not isinstance(codes, StoredFp8) for codes in kept) or trunk.kv_cache_dtype == "int8":  # eight bits, too
        tolerance = max(tolerance, _QUANTIZED_TOLERANCE[8])
    return tolerance


def _compare(part: str, exact: Tensor, blocks: Sequence[Tensor], tolerance: float, run: Callable[[], Tensor]) -> None:
    """Raise Untraceable if the states of blocks of one size are too far from the exact ones.

    run: Returns the states of the modules as they are; only called if the tolerance is exceeded.
    """
    errors = _errors(exact, torch.cat(list(blocks), dim=1))
    beyond = {size: error for size, error in errors.items() if not error <= tolerance}
    own = _errors(exact, run()) if beyond else {}
    for size, error in beyond.items():
        if not error <= _FACTOR * own[size]:
            raise Untraceable(
                f"the recorded {part} differs from the torch backend (relative error {error:.2g} in passes of {size}, "
                f"{own[size]:.2g} in torch)"
            )


def _errors(exact: Tensor, found: Tensor) -> dict[int, float]:
    """Return the median over the positions in blocks of each size of the error relative to the norm."""
    errors = (exact - found)[0].float().norm(dim=-1) / exact[0].float().norm(dim=-1).clamp_min(1e-6)
    parts = errors.split(BLOCK_SIZES)
    return {size: float(torch.cat([part for part in parts if len(part) == size]).median()) for size in set(BLOCK_SIZES)}
