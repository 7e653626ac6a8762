"""Whether two tensors have the same bytes, from a few windows of each: an answer for the price of a few small reads."""

from nextn.checkpoints.checkpoint import Checkpoint

SIZE = 4096  # bytes
COUNT = 8


def same(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Whether two tensors agree in dtype, shape and COUNT windows spread from the first to the last byte.

    Tensors of up to COUNT windows are compared whole. A difference that lies between windows is not seen.
    """
    infos = checkpoint.info(a), checkpoint.info(b)
    if infos[0].form != infos[1].form:
        return False
    places = _begins(infos[0].nbytes)
    read = checkpoint.windows([(info, at) for info in infos for at in places], SIZE)
    return read[: len(places)] == read[len(places) :]


def _begins(nbytes: int) -> list[int]:
    if nbytes <= COUNT * SIZE:
        return list(range(0, nbytes, SIZE))
    return [(nbytes - SIZE) * place // (COUNT - 1) for place in range(COUNT)]
