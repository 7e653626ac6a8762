"""What a piece of code allocates."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Sizes(TorchDispatchMode):
    """Records the shape of every tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {
            tuple(t.shape) for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)
        }
        return out
