"""How the memory for caches is divided: the memory of a sequence, and the maximum length of sequences."""

import math

from nextn.errors import ConfigError
from nextn.runtime.backend import Backend
from nextn.serve.options import EngineOptions
from nextn.serve.prefix_cache import has_blocks, sized_caches
from nextn.serve.scheduler import SchedulerLimits

_PREFIX_SHARE = 0.25  # of the cache memory, if there is a prefix cache
_DEFAULT_LENGTH = 4096  # positions per sequence, if neither the model nor the memory sets a limit


def limits_within(backend: Backend, options: EngineOptions) -> SchedulerLimits:
    """Divide the memory for caches. Raises ConfigError if it is too small."""
    total, most = int(options.cache_gb * 1e9), backend.trunk.max_length or 2**31
    per_position, per_sequence = bytes_per_sequence(backend)
    k = 0 if backend.head is None else options.num_speculative_tokens
    prefix_bytes = int(total * _prefix_share(backend))
    padding = _padding(backend, options)
    available = (total - prefix_bytes) // _rows(options) - per_sequence
    fitting = available // per_position - padding if per_position else most if available >= 0 else 0
    length = min(options.max_model_len or backend.trunk.max_length or _DEFAULT_LENGTH, most, fitting)
    if length < max(2, options.max_model_len or 2):
        raise ConfigError(
            f"{options.max_num_seqs} sequences of {options.max_model_len or 2} positions do not fit "
            f"{options.cache_gb:g} GB of caches and the model's context; {max(0, length)} positions would: use "
            "--cache-gb, --max-num-seqs or --max-model-len"
        )
    return SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_model_len=length,
        num_speculative_tokens=k,
        num_copy_tokens=options.num_copy_tokens,
        adaptive=options.adaptive,
        prefix_bytes=prefix_bytes,
        cache_bytes=total - prefix_bytes,
    )


def reduced_context_note(backend: Backend, options: EngineOptions, length: int) -> str | None:
    """Say that sequences of `length` positions are shorter than the model's context, and what holds all of it."""
    whole = options.max_model_len or backend.trunk.max_length or length
    if length >= whole:
        return None
    per_position, per_sequence = bytes_per_sequence(backend)
    sequence = (whole + _padding(backend, options)) * per_position + per_sequence
    needed = _rows(options) * sequence / (1 - _prefix_share(backend)) / 1e9
    return (
        f"{options.cache_gb:g} GB of caches hold {options.max_num_seqs} sequences of {length} tokens, the model's "
        f"context is {whole}: --cache-gb {math.ceil(100 * needed) / 100:g} holds it, or fewer --max-num-seqs"
    )


def _prefix_share(backend: Backend) -> float:
    return _PREFIX_SHARE if has_blocks(backend) else 0.0


def _padding(backend: Backend, options: EngineOptions) -> int:
    """A sequence that no longer drafts is padded to the drafts of others. Native buffers are not written there."""
    k = 0 if backend.head is None else options.num_speculative_tokens
    return 0 if backend.name == "native" else max(k, options.num_copy_tokens) + 1


def _rows(options: EngineOptions) -> int:
    """A sequence is in two caches while it joins a batch."""
    return options.max_num_seqs + 1


def bytes_per_sequence(backend: Backend) -> tuple[int, int]:
    """Return the bytes per position, and per sequence whatever its length, of the caches of trunk and MTP layers."""
    caches = sized_caches(backend)
    return sum(cache.bytes_per_position for cache in caches), sum(cache.bytes_per_state for cache in caches)
