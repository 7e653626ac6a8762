"""Caches of prompt prefixes that several requests share: blocks of positions in a radix tree, least recently used first
out.

A block is what a prefill left in the caches of trunk and head, so that a prompt which continues from blocks gets the
same states as one that is processed from its beginning in the same chunks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nextn.cache.kv_cache import CacheBlock, KVCache
from nextn.runtime.backend import Backend
from nextn.runtime.native.kv_buffers import KVBuffers
from nextn.serve.served_batch import ServedBatch

# The order of cached positions within 32 is up to the native kernels: blocks start and end at multiples of it.
_TILE = 32
_BLOCK = 64  # positions
_RECURRENT_BLOCK = 256  # longer, since a block of a recurrent trunk has its whole state

_Key = tuple[int | str, ...]  # the tokens of a block; those of a first block after the request's salt


def has_blocks(backend: Backend) -> bool:
    """Return whether a sequence can continue exactly from copied blocks of the backend's caches.

    This excludes, in torch, attention that caches more than keys and values, and heads with recurrent layers, because
    at the end of a block the head is behind the trunk.
    """
    head = backend.head
    heads = [] if head is None else [head.cache(1)]
    is_exact = all(cache.has_blocks and not cache.is_recurrent for cache in heads)
    return backend.trunk.cache(1).has_blocks and is_exact


def _num_bytes(block: CacheBlock) -> int:
    return sum(tensor.nbytes for layer in block for tensor in layer)


@dataclass(frozen=True, eq=False)
class PrefixBlock:
    """The contents of the caches for one block of positions that follows all blocks before it."""

    trunk: CacheBlock
    # Of each MTP layer, from 32 positions before the block, which could not be final earlier. None if the head has not
    # processed the block.
    heads: tuple[CacheBlock, ...] | None
    # The trunk's states at all positions if heads is None, else at the last ones, which the head can process only once
    # the next tokens are known.
    states: Tensor

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + sum(map(_num_bytes, [self.trunk, *(self.heads or ())]))


@dataclass(eq=False)
class _Node:
    block: PrefixBlock | None  # None: the root
    parent: "_Node | None" = None
    key: "_Key" = ()
    children: dict["_Key", "_Node"] = field(default_factory=dict)


class PrefixCache:
    """Blocks of prompts, in at most `max_bytes`."""

    def __init__(self, max_bytes: int, *, block_size: int = _BLOCK, block_bytes: int = 1) -> None:
        """Create an empty cache. block_size: Positions per block, a multiple of 32."""
        self.block_size, self.max_bytes, self.nbytes = block_size, max_bytes, 0
        self._block_bytes, self.max_positions = block_bytes, max_bytes // block_bytes * block_size
        self.num_queries = self.num_hits = 0  # prompt tokens looked up, and found
        self._roots = _Node(None), _Node(None)  # of prompts that the head has not seen, and of those that it has
        # Least recently used first. Ancestors are used after their descendants, so the first is always a leaf.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    @classmethod
    def of(cls, backend: Backend, max_bytes: int) -> "PrefixCache | None":
        """Return a prefix cache for this backend; None where blocks cannot be copied exactly, or for 0 bytes."""
        if not max_bytes or not has_blocks(backend):
            return None
        trunk, *heads = sized_caches(backend)
        size = _RECURRENT_BLOCK if trunk.is_recurrent else _BLOCK
        per_head = sum(cache.bytes_per_position for cache in heads)
        block_bytes = trunk.bytes_per_position * size + _num_bytes(trunk.read_block(0, 0)) + per_head * (size + _TILE)
        return cls(max_bytes, block_size=size, block_bytes=block_bytes)

    def emptied(self) -> "PrefixCache":
        """Return an empty cache of the same sizes."""
        return PrefixCache(self.max_bytes, block_size=self.block_size, block_bytes=self._block_bytes)

    @property
    def num_positions(self) -> int:
        return len(self._nodes) * self.block_size

    def restore(self, batch: ServedBatch) -> int:
        """Fill the caches of a batch of one new sequence with the longest cached prefix; return its length.

        The prefix never includes the last token, whose output is needed.
        """
        (sequence,) = batch.sequences
        nodes = self._match(self._root(batch), sequence.tokens[:-1], sequence.request.cache_salt)
        self.num_queries += len(sequence.tokens)
        self.num_hits += len(nodes) * self.block_size
        if not nodes:
            return 0
        states: list[Tensor] = []
        for index, node in enumerate(nodes):
            assert node.block is not None
            start, end = index * self.block_size, (index + 1) * self.block_size
            batch.cache.write_block(start, end, node.block.trunk)
            if batch.drafter is not None and node.block.heads is not None:
                for cache, layers in zip(batch.drafter.caches, node.block.heads, strict=True):
                    cache.write_block(max(0, start - _TILE), end, layers)
                states = []  # the head has processed them
            states.append(node.block.states)
        batch.resume_prefill(end, [torch.cat(states)])
        return end

    def store(self, batch: ServedBatch) -> None:
        """Store the block that ends where the prefill of a batch of one sequence is, if any; complete stored ones."""
        (sequence,), end, size = batch.sequences, batch.num_prefilled, self.block_size
        root, salt = self._root(batch), sequence.request.cache_salt
        known = self._match(root, sequence.tokens[:end], salt)
        parent = known[-1] if known else root
        self._touch(parent)
        if not all(self._complete(node, batch, index * size, keep=parent) for index, node in enumerate(known)):
            return
        # A block is stored only if it ends here and all blocks before it are still in the cache.
        if end > len(sequence.tokens) or end != (len(known) + 1) * size:
            return
        block, key = self._read(batch, end), self._key(sequence.tokens, end - size, salt)
        if block is not None and self._make_room(block.nbytes, keep=parent):
            parent.children[key] = node = _Node(block, parent, key)
            self._nodes[node] = None
            self.nbytes += block.nbytes
            self._touch(node)

    def _read(self, batch: ServedBatch, end: int) -> PrefixBlock | None:
        """Copy the block that ends where the prefill is; None if the head has processed only a part of it."""
        start, drafter = end - self.block_size, batch.drafter
        heads, states = self._read_heads(batch, start), torch.empty(0) if drafter is None else batch.tails[0]
        if heads is None:
            assert drafter is not None
            states = drafter.pending[0][-self.block_size :].clone()
            if len(states) < self.block_size:
                return None
        return PrefixBlock(batch.cache.read_block(start, end), heads, states)

    def _read_heads(self, batch: ServedBatch, start: int) -> tuple[CacheBlock, ...] | None:
        """Copy the MTP layers' part of the block from `start`; None if they have not processed it."""
        if batch.drafter is None:
            return ()
        caches, end = batch.drafter.caches, start + self.block_size
        if caches[-1].lengths[0] < end - len(caches):
            return None
        return tuple(cache.read_block(max(0, start - _TILE), end) for cache in caches)

    def _complete(self, node: _Node, batch: ServedBatch, start: int, *, keep: _Node) -> bool:
        """Add the head's part, from the batch's caches, to a stored block from `start` that lacks it.

        A block without that part must not be followed by one with it: return False if there is not enough memory.
        """
        block = node.block
        assert block is not None
        if block.heads is not None or (heads := self._read_heads(batch, start)) is None:
            return True
        completed = PrefixBlock(block.trunk, heads, block.states[-len(heads) :].clone())
        if not self._make_room(completed.nbytes - block.nbytes, keep=keep):
            return False
        node.block = completed
        self.nbytes += completed.nbytes - block.nbytes
        return True

    def _root(self, batch: ServedBatch) -> _Node:
        return self._roots[batch.drafter is not None]

    def _key(self, tokens: Sequence[int], start: int, salt: str) -> _Key:
        block = tuple(tokens[start : start + self.block_size])
        return block if start else (salt, *block)

    def _match(self, node: _Node, tokens: Sequence[int], salt: str) -> list[_Node]:
        """Find the nodes of the longest cached prefix of whole blocks below a root."""
        nodes = []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            child = node.children.get(self._key(tokens, start, salt))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def _touch(self, node: _Node) -> None:
        """Mark a node and its ancestors as used, the ancestors last."""
        current: _Node | None = node
        while current is not None and current.block is not None:
            self._nodes.move_to_end(current)
            current = current.parent

    def _make_room(self, nbytes: int, *, keep: _Node) -> bool:
        """Evict blocks, but not `keep`, which was used last; return whether a block of this size then fits."""
        if nbytes > self.max_bytes:
            return False
        while self.nbytes + nbytes > self.max_bytes:
            node = next(iter(self._nodes))
            if node.children or node is keep:
                return False
            assert node.parent is not None
            assert node.block is not None
            del self._nodes[node], node.parent.children[node.key]
            self.nbytes -= node.block.nbytes
        return True


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
