"""Whether recurrent layers continue the state that a cache holds: blocks over a cache are compared with one pass."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nextn.cache.kv_cache import KVCache
from nextn.errors import RollbackError

_CHECKED = 4  # positions of a block, of which two show whether a recurrent layer continues its state
_MAX_DIFFERENCE = 0.02  # relative: rounding to bf16 makes less, a state that is left out 0.07 to 0.2


@torch.no_grad()
def check_blocks(
    run: Callable[[Tensor, KVCache], object],
    empty_cache: Callable[[], KVCache],
    mixer: nn.Module | None,
    *,
    name: str,
    vocab_size: int,
) -> None:
    """Raise RollbackError if a recurrent mixer gives another result for a block behind a cached one, as Jamba's does,
    which then begins at an empty state, or if the model takes no cache of ours, as MiniMax.

    Args:
        run: The model over tokens [1, T] and a cache, as a block that is yet to be committed.
        empty_cache: Makes a cache for one sequence.
        mixer: The first one that keeps its state in such caches; None where none does.
        name: Of the model's class, for errors.
        vocab_size: Number of tokens.
    """
    if mixer is None:
        raise RollbackError(f"{name} keeps the states of its recurrent layers outside of caches")
    outputs: list[Tensor] = []
    thread = threading.get_ident()

    def keep(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        if threading.get_ident() == thread:  # other threads may run the model, too
            outputs.append(output[0] if isinstance(output, tuple) else output)

    try:
        with mixer.register_forward_hook(keep):
            for sizes in (2 * _CHECKED, _CHECKED):
                cache = empty_cache()
                for tokens in (torch.arange(2 * _CHECKED)[None] % vocab_size).split(sizes, dim=1):
                    run(tokens, cache)
                    cache.commit([tokens.shape[1]])
    except (TypeError, ValueError) as error:
        raise RollbackError(f"{name} does not run over nextn's caches: {error}") from error
    whole, block = outputs[0][:, _CHECKED:].float(), outputs[-1].float()
    if (block - whole).norm() > _MAX_DIFFERENCE * whole.norm():
        raise RollbackError(
            f"the recurrent layers of {name} ({type(mixer).__name__}) compute a block of several positions behind "
            "cached ones as if nothing was cached; nextn cannot decode with this model"
        )
