"""The `torch` backend: trunk and head as transformers wrote them, on any device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nextn.cache.kv_cache import KVCache
from nextn.model.head import Head, HeadStep
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.runtime.protocols import RoundsStart
from nextn.settings import Sampling
from nextn.speculative.sampling import Prediction
from nextn.speculative.verification import Verifier

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TorchTrunk:
    """A `DecodingTrunk` that runs the trunk's modules as they are."""

    max_block_size: int | None = None
    records_passes = False

    def __init__(self, module: Trunk) -> None:
        self.module = module
        self.vocab_size, self.max_length, self.hidden_shape = module.vocab_size, module.max_length, module.hidden_shape
        self.dtype, self.device = module.dtype, module.device

    def __call__(self, tokens: Tensor, cache: KVCache) -> TrunkOutput:
        output: TrunkOutput = self.module(tokens, cache)
        return output

    def cache(self, batch_size: int) -> KVCache:
        return self.module.cache(batch_size)

    def predict(self, final_hidden: Tensor) -> Prediction:
        return Prediction(self.module.logits(final_hidden))

    def read(self, hidden: TrunkOutput) -> Prediction:
        return self.predict(hidden.final_hidden)

    def prepare(self, batch_size: int, block_sizes: Sequence[int], *, exact: bool) -> None:
        """Do nothing: any block runs at once."""

    def verifier(self, sampling: Sampling, *, block_verification: bool) -> Verifier:
        return Verifier(sampling, block_verification=block_verification)

    def rounds(self, cache: KVCache, sampling: Sampling, start: RoundsStart, *, block_verification: bool) -> None:
        """Return None: rounds run in Python."""

    def pass_context(self) -> AbstractContextManager[None]:
        """A context in which several threads may run the modules, with all threads of torch.

        On CUDA devices attention does not use cuDNN, which plans anew for each number of keys: 2.5 ms for each layer.
        """
        return sdpa_kernel(_KERNELS) if self.device.type == "cuda" else nullcontext()


class TorchHead:
    """A `DecodingHead` that runs the head's modules as they are."""

    def __init__(self, module: Head) -> None:
        self.mtp_head = module
        self.num_modules = module.num_modules

    def layer_index(self, depth: int) -> int:
        return self.mtp_head.layer_index(depth)

    def uses_next_hidden(self, depth: int) -> bool:
        return self.mtp_head.uses_next_hidden(depth)

    def cache(self, batch_size: int, trunk_cache: KVCache | None = None) -> KVCache:
        return self.mtp_head.cache(batch_size, trunk_cache)

    def step(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: KVCache) -> HeadStep:
        return self.mtp_head.step(index, tokens, hidden, cache=cache)

    def refresh(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: KVCache) -> None:
        self.mtp_head.refresh(index, tokens, hidden, cache=cache)

    def predict(self, index: int, final_hidden: Tensor) -> Prediction:
        return Prediction(self.mtp_head.logits(index, final_hidden))

    def prepare(self, batch_size: int, block_sizes: Sequence[int]) -> None:
        """Do nothing: any block runs at once."""

    def chain(self, cache: KVCache, sampling: Sampling, *, sampled: bool) -> None:
        """Return None: drafts are chained in Python."""

    def recursion(self, cache: KVCache, state: Tensor) -> "TorchRecursion":
        return TorchRecursion(self.mtp_head, cache, state)


class TorchRecursion:
    """The last MTP layer step by step: each step takes the newest draft and the next_hidden of the step before."""

    def __init__(self, head: Head, cache: KVCache, state: Tensor) -> None:
        self._head, self._cache, self._state = head, cache, state

    def step(self, tokens: Sequence[int]) -> Prediction:
        index = self._head.num_modules - 1
        inputs = torch.tensor(tokens, device=self._state.device)[:, None]
        step = self._head.repeat(index, inputs, self._state[:, None], cache=self._cache)
        self._cache.commit([1] * len(tokens))
        self._state = step.next_hidden[:, 0]
        return Prediction(self._head.logits(index, step.final_hidden[:, 0]))
