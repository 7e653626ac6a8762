"""Caches of one sequence whose sizes are known before the first request."""

import torch

from nextn.cache.kv_cache import KVCache
from nextn.runtime.backend import Backend
from nextn.runtime.native.kv_buffers import KVBuffers


def sized_caches(backend: Backend) -> list[KVCache]:
    """Return the caches of one sequence, for the trunk and each MTP layer, with known sizes.

    Those of the torch backend know their sizes after a block with enough positions to fill a compressed entry.
    """
    trunk, head = backend.trunk, backend.head
    with torch.inference_mode(), trunk.pass_context():
        caches: list[KVCache] = [trunk.cache(1)]
        caches += [] if head is None else [head.cache(1, caches[0]) for _ in range(head.num_modules)]
        if isinstance(caches[0], KVBuffers):
            return caches
        size = min(trunk.max_length or 2**31, 2 * max(cache.compress_rate for cache in caches))
        tokens = torch.zeros(1, size, dtype=torch.int64)
        states = trunk(tokens, caches[0]).head_input
        for index, cache in enumerate(caches[1:]):
            assert head is not None
            head.step(index, tokens, states, cache=cache)
        for cache in caches:
            cache.commit([size])
    return caches
