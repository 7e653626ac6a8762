"""A function over tensors that stand still, run once under watch, then captured as a CUDA graph and replayed.

On other devices a replay is a call: the same code without the capture, which is what tests without a GPU run.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nextn.fast.tape import Unrecordable, is_data_dependent

aten = torch.ops.aten
Function = Callable[[], Iterable[Tensor]]
# (what is captured, which runs without outputs; puts back what a run changed of its own inputs) -> a replay
Recorder = Callable[[Callable[[], None], Callable[[], None]], Callable[[], None]]

_WARM = 2  # runs before a capture, in which libraries choose kernels and take workspaces
_MASKED = (aten.index_put.default, aten.index_put_.default)
_MOVES = (aten._to_copy.default, aten.copy_.default)


class Watched(TorchDispatchMode):
    """While open, raises Unrecordable where a pass waits for a device's numbers or brings it some of the host's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Values that are put where a mask is true are counted on the host first.
        masked = func in _MASKED and is_data_dependent(aten.index.Tensor, args)
        if masked or is_data_dependent(func, args):
            raise Unrecordable(f"the pass asks the device for numbers ({func})")
        out = func(*args, **(kwargs or {}))
        if func in _MOVES and len({each.device for each in (*args[:2], out) if isinstance(each, Tensor)}) > 1:
            raise Unrecordable(f"the pass moves values between host and device ({func})")
        return out


class Captured:
    """outputs: what the function returned, in tensors that every run overwrites.

    fed: what it changes of its own inputs, put back after the runs that only prepare. Raises Unrecordable.
    """

    @torch.inference_mode(False)  # what is made here outlives the caller's mode
    @torch.no_grad()
    def __init__(self, function: Function, record: Recorder, *, fed: Sequence[Tensor] = ()) -> None:
        self._function = function
        saved = [tensor.clone() for tensor in fed]

        def put_back() -> None:
            for tensor, value in zip(fed, saved, strict=True):
                tensor.copy_(value)

        with Watched():
            outs = list(function())
        put_back()
        # Beside the graph's own memory, which other graphs write as well.
        self.outputs = [torch.empty(out.shape, dtype=out.dtype, device=out.device) for out in outs]
        self._replay = record(self._run, put_back)

    def run(self) -> list[Tensor]:
        self._replay()
        return self.outputs

    @torch.no_grad()
    def _run(self) -> None:
        for place, out in zip(self.outputs, self._function(), strict=True):
            place.copy_(out)


def called(run: Callable[[], None], put_back: Callable[[], None]) -> Callable[[], None]:
    """The recorder of devices without graphs."""
    return run


class Graphs:
    """The recorder of a CUDA device. All graphs share one pool of memory, as none needs another's to last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None], put_back: Callable[[], None]) -> Callable[[], None]:
        """Raises Unrecordable where CUDA refuses."""
        with torch.cuda.device(self._device):
            try:
                self._warm(run, put_back)
                graph = torch.cuda.CUDAGraph()
                # Threads of the caller may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    run()
            except RuntimeError as error:
                raise Unrecordable(f"CUDA cannot capture the pass: {str(error).splitlines()[0]}") from error
        return graph.replay

    def _warm(self, run: Callable[[], None], put_back: Callable[[], None]) -> None:
        """On a stream beside the caller's, as captures are."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                run()
                put_back()
        current.wait_stream(stream)


def recorder(device: torch.device) -> Recorder:
    return Graphs(device) if device.type == "cuda" else called
