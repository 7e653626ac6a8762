"""The native backend's self-check: its states and logits beside those of the model's modules in float32, on 64 tokens.

A model may do something that no recording captures, and a kernel may read packed weights wrongly. The modules use the
values that weights have after packing, so what is left is the rounding of activations. What that does to the states
depends on the model: where bf16 costs torch's own modules a tenth of them, as in random models with recurrent layers, a
fixed bound refuses a backend that is nearer to float32 than torch. So the bound is relative to what torch's rounding
makes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nextn.cache.family_caches import TrunkKV
from nextn.cache.kv_cache import KVCache
from nextn.checkpoint.mapped_memory import released_after_use
from nextn.model.deferred_init import Options
from nextn.model.head import Head
from nextn.model.packed_experts import weights_with_codes
from nextn.model.packed_linear import StoredFp8
from nextn.model.trunk import Trunk
from nextn.runtime.native.kv_buffers import KVBuffers
from nextn.runtime.native.session import NativeHead
from nextn.runtime.native.stored_codes import unsupported
from nextn.runtime.native.trace import Untraceable
from nextn.runtime.native.weight_packing import PackedWeights

# Shaped like prefills, baseline steps and verifications: several of each, as in bf16 a near-tie of a MoE router may
# send single tokens to another expert.
BLOCK_SIZES: tuple[int, ...] = (26, 1, 3, 1, 3, 1, 3, 26)
_LM_HEAD_ROWS = 4096  # of which logits are compared, at most
# Errors relative to the norm of the states that need no comparison: far above accumulated rounding, far below the error
# of a wrong position.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02}
_SIXTEEN_BITS_TOLERANCE = 5e-3  # with activations and scales of sixteen bits, beside weights of few bits
_CACHE_TOLERANCE = 0.05  # with keys and values of eight bits, which the modules have not
# By bits: the modules have what a checkpoint stores in codes as it is, where the native backend rounds it.
_ROUNDED_TOLERANCE = {8: 0.1, 7: 0.1, 4: 1.1}
_MAX_ERROR_RATIO = 2.0  # of the native error to that of torch's modules; it is below 1 where all is right
_PRODUCTS = frozenset(
    (
        *(functional.linear, functional.grouped_mm, torch._grouped_mm, torch.einsum, torch.addmm, torch.baddbmm),
        *(torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
    )
)
_TrunkCaches = tuple[KVCache | None, KVBuffers]  # in torch, and native
_WIDENED = _PRODUCTS | {functional.conv1d, functional.layer_norm, functional.scaled_dot_product_attention}


class WithPackedValues(TorchFunctionMode):
    """While open, matrix products of this thread take dequantized packed weights and compute in float32.

    Weights are widened one at a time as they are used, so it takes no second copy of them. Embeddings give float32, so
    do products, and what torch promotes by itself follows. Where experts or a convolution cast what they take to the
    dtype of their weights, it is rounded, as in the recording.
    """

    def __init__(self, modules: Iterable[nn.Module], weights: PackedWeights | None, *, is_wide: bool = True) -> None:
        """Note the parameters of modules whose passes will run, and what packs them; None: values are as stored.

        Unless `is_wide`, only the values of rounded weights change, not the dtype of anything.
        """
        super().__init__()
        parameters = [parameter for module in modules for parameter in module.parameters()]
        self._storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._weights, self._is_wide = weights, is_wide

    def __torch_function__(
        self, func: Callable[..., Tensor], types: object, args: Sequence[Any] = (), kwargs: Options | None = None
    ) -> object:
        options = kwargs or {}
        if func in _WIDENED:
            values = self._factor if func in _PRODUCTS else self._widened
            return func(*map(values, args), **{name: values(value) for name, value in options.items()})
        result = func(*args, **options)
        if func is not functional.embedding:
            return result
        is_rounded = self._weights is not None and self._weights.packs_embedding(args[1])
        return self.rows(args[1], result) if is_rounded else self._widened(result)

    def rows(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Return the values of rows [..., K] of a weight."""
        found = None if self._weights is None else self._weights.rounded(weight, rows)
        widened: Tensor = self._widened(rows)
        return widened if found is None else found.to(widened.dtype)

    def _factor(self, value: object) -> object:
        if not isinstance(value, Tensor) or value.untyped_storage().data_ptr() not in self._storages:
            return self._widened(value)
        # Experts are multiplied as views [E, K, N].
        is_transposed = value.ndim > 1 and value.stride(-1) != 1
        weight = value.transpose(-1, -2) if is_transposed else value
        values = self.rows(weight, weight)
        return values.transpose(-1, -2) if is_transposed else values

    def _widened(self, value: Any) -> Any:
        narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4
        return value.float() if narrow and self._is_wide else value


@torch.inference_mode()
def check(trunk: Trunk, head: Head | None, native: Any) -> None:
    """Compare final states of the trunk and of the head's first layer, and the trunk's logits, with the modules'.

    `native` is the `Backend` of what was recorded. Raises Untraceable if a median over positions is beyond the bound.
    """
    tokens = torch.randint(trunk.vocab_size, (1, sum(BLOCK_SIZES)), generator=torch.Generator().manual_seed(0))
    tolerance, modules = _tolerance(trunk, head, native.weight_bits), [trunk, *([] if head is None else [head])]
    own_cache = trunk.cache(1) if head is not None and head.family.trunk_kv else None
    with released_after_use([*trunk.decoder.layers, *([] if head is None else head.stack)]):
        with WithPackedValues(modules, native.trunk.weights) as values:
            exact = trunk(tokens, own_cache)
        cache, states, logits = native.trunk.cache(1), [], []
        for block in tokens.split(BLOCK_SIZES, dim=1):
            output = native.trunk(block, cache)
            states.append(output.final_hidden.clone())
            logits.append(native.trunk.read(output).logits.clone())
            cache.commit([block.shape[1]])

        def run() -> Tensor:
            with WithPackedValues(modules, native.trunk.weights, is_wide=False):
                return trunk(tokens).final_hidden

        _compare("trunk", exact.final_hidden, states, tolerance, run)
        _compare_logits(trunk, states, logits, values)
        if head is None or native.head is None:
            return
        tolerance = _head_tolerance(head, native.head_bits, tolerance)
        _check_head(tokens, exact.head_input, head, native.head, tolerance, (own_cache, cache))


def _check_head(
    tokens: Tensor, inputs: Tensor, head: Head, native: NativeHead, tolerance: float, trunk_caches: _TrunkCaches
) -> None:
    """Compare the first layer, with the states in `inputs` [1, T, ...] of the trunk.

    trunk_caches: The trunk's after these tokens, in torch, and native, for a head that reads them; else None first.
    """
    of_modules, of_native = trunk_caches
    modules, given = [head, head.trunk], inputs.to(head.trunk.dtype)

    def run(inputs: Tensor = given, *, is_wide: bool = False) -> Tensor:
        with WithPackedValues(modules, native.weights, is_wide=is_wide):
            cache = None if of_modules is None else head.cache(1, of_modules)
            return head.step(0, tokens, inputs, cache=cache).final_hidden

    exact, states, cache = run(inputs, is_wide=True), [], native.cache(1, of_native)
    for layer in () if of_modules is None else native.read_layers:  # the same keys: those of the native trunk differ
        of_native.store(layer, *TrunkKV(of_modules, 1).keys_and_values(layer, tokens.shape[1]))
    for block, part in zip(tokens.split(BLOCK_SIZES, dim=1), given.split(BLOCK_SIZES, dim=1), strict=True):
        states.append(native.step(0, block, part, cache=cache).final_hidden.clone())
        cache.commit([block.shape[1]])
    _compare("head", exact, states, tolerance, run)


def _compare_logits(trunk: Trunk, states: Sequence[Tensor], logits: Sequence[Tensor], values: WithPackedValues) -> None:
    """Compare native logits with those of the same states, for some rows of the lm_head."""
    if type(trunk.output) is not nn.Linear:
        return
    places = torch.arange(0, trunk.vocab_size, -(-trunk.vocab_size // _LM_HEAD_ROWS))
    bias = None if trunk.lm_head_bias is None else trunk.lm_head_bias[places].float()
    rows = values.rows(trunk.output.weight, trunk.output.weight[places])
    exact = functional.linear(torch.cat(list(states), dim=1).float(), rows.float(), bias)
    exact = trunk.capped(exact)
    tolerance = _TOLERANCE[trunk.dtype]  # sixteen bits change a single product by less
    _compare("lm_head", exact, [each[..., places] for each in logits], tolerance)


def _tolerance(trunk: Trunk, head: Head | None, weight_bits: int | None) -> float:
    tolerance = _TOLERANCE[trunk.dtype]
    if trunk.kv_cache_dtype == "int8":
        tolerance = max(tolerance, _CACHE_TOLERANCE)
    kept = {type(each) for weight in weights_with_codes(*filter(None, (trunk, head))) for each in weight.matrices}
    if weight_bits is not None or kept - {StoredFp8}:
        tolerance = max(tolerance, _SIXTEEN_BITS_TOLERANCE)
    if weight_bits is not None and StoredFp8 in kept:
        tolerance = max(tolerance, _ROUNDED_TOLERANCE[weight_bits])
    return tolerance


def _head_tolerance(head: Head, bits: int | None, tolerance: float) -> float:
    """Return that of the head, whose weights the native backend may round where those of the trunk stay."""
    codes = (matrix for weight in weights_with_codes(head) for matrix in weight.matrices)
    return max(tolerance, _ROUNDED_TOLERANCE[bits]) if bits is not None and any(map(unsupported, codes)) else tolerance


def _compare(
    part: str, exact: Tensor, blocks: Sequence[Tensor], tolerance: float, run: Callable[[], Tensor] | None = None
) -> None:
    """Raise Untraceable if the states of blocks of one size are too far from the exact ones.

    run: Returns the states of the modules as they are, whose errors excuse larger ones; only called for those.
    """
    errors = _errors(exact, torch.cat(list(blocks), dim=1))
    beyond = {size: error for size, error in errors.items() if not error <= tolerance}
    own = _errors(exact, run()) if beyond and run is not None else {}
    for size, error in beyond.items():
        if not error <= _MAX_ERROR_RATIO * own.get(size, 0.0):
            beside = f", {own[size]:.2g} in torch" if own else ""
            raise Untraceable(
                f"the recorded {part} differs from the torch backend (relative error {error:.2g} in passes of "
                f"{size}{beside})"
            )


def _errors(exact: Tensor, found: Tensor) -> dict[int, float]:
    """Return the median over the positions in blocks of each size of the error relative to the norm."""
    errors = (exact - found)[0].float().norm(dim=-1) / exact[0].float().norm(dim=-1).clamp_min(1e-6)
    parts = errors.split(BLOCK_SIZES)
    return {size: float(torch.cat([part for part in parts if len(part) == size]).median()) for size in set(BLOCK_SIZES)}
