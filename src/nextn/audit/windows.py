"""Whether two tensors have the same bytes, from a few windows of each: an answer for the price of a few small reads."""

from concurrent.futures import ThreadPoolExecutor

from nextn.checkpoint import WORKERS, Checkpoint
from nextn.tensor_file import TensorInfo

SIZE = 4096  # bytes
COUNT = 8


def same(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Whether two tensors agree in dtype, shape and COUNT windows spread from the first to the last byte.

    Tensors of up to COUNT windows are compared whole. A difference that lies between windows is not seen.
    """
    infos = checkpoint.info(a), checkpoint.info(b)
    if infos[0].form != infos[1].form:
        return False
    with ThreadPoolExecutor(WORKERS) as pool:
        halves = [[pool.submit(_read, checkpoint, info, at) for at in _begins(info.nbytes)] for info in infos]
        return all(one.result() == other.result() for one, other in zip(*halves, strict=True))


def _begins(nbytes: int) -> list[int]:
    if nbytes <= COUNT * SIZE:
        return list(range(0, nbytes, SIZE))
    return [(nbytes - SIZE) * place // (COUNT - 1) for place in range(COUNT)]


def _read(checkpoint: Checkpoint, info: TensorInfo, at: int) -> bytes:
    begin = info.begin + at
    return checkpoint.sources[info.file].read(begin, min(begin + SIZE, info.end))
