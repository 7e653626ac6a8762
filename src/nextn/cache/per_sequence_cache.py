"""A separate cache for each sequence, behind one interface."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from nextn.cache.kv_cache import KVCache


class PerSequenceCache(KVCache):
    """A separate cache per sequence: for attention that cannot take sequences of different lengths in one pass."""

    def __init__(self, sequences: Sequence[KVCache]) -> None:
        super().__init__([], len(sequences))
        self.sequences = list(sequences)
        self._measure()

    def commit(self, counts: Sequence[int]) -> None:
        for cache, count in zip(self.sequences, counts, strict=True):
            cache.commit([count])
        self._measure()

    def rollback_to(self, lengths: Sequence[int]) -> None:
        for cache, length in zip(self.sequences, lengths, strict=True):
            cache.rollback_to([length])
        self._measure()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        with ExitStack() as stack:
            for cache in self.sequences:
                stack.enter_context(cache.frozen())
            yield

    def select(self, sequences: Sequence[int]) -> None:
        self.sequences = [self.sequences[seq] for seq in sequences]
        self._measure()

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self.sequences)

    @property
    def bytes_per_position(self) -> int:
        return max((cache.bytes_per_position for cache in self.sequences), default=0)

    @property
    def bytes_per_state(self) -> int:
        return max((cache.bytes_per_state for cache in self.sequences), default=0)

    @property
    def compress_rate(self) -> int:
        return max((cache.compress_rate for cache in self.sequences), default=1)

    def limit(self, num_positions: int) -> None:
        for cache in self.sequences:
            cache.limit(num_positions)

    def joined(self, other: KVCache) -> KVCache:
        assert isinstance(other, PerSequenceCache)
        return PerSequenceCache([*self.sequences, *other.sequences])

    def _measure(self) -> None:
        self.lengths = [cache.lengths[0] for cache in self.sequences]
