"""The sequences that wait for a place. API requests take turns, whatever the number of their sequences."""

from collections import OrderedDict, deque

from nextn.serve.served_batch import ServedSequence


class WaitingQueue:
    """Sequences in the order in which they get places.

    A request with many choices or prompts must not hold up the others: a new one waits for at most one sequence of each
    request that was there before. The sequences of one request keep their order.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[object, deque[ServedSequence]] = OrderedDict()  # the next one first

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def append(self, sequence: ServedSequence) -> None:
        self._requests.setdefault(_request(sequence), deque()).append(sequence)

    def pop(self) -> ServedSequence:
        """Remove and return the sequence whose turn it is."""
        request, sequences = self._requests.popitem(last=False)
        sequence = sequences.popleft()
        if sequences:
            self._requests[request] = sequences  # behind all others
        return sequence

    def pop_cancelled(self) -> list[ServedSequence]:
        """Remove and return the sequences whose clients went away."""
        cancelled = [each for sequences in self._requests.values() for each in sequences if each.is_cancelled]
        for sequence in cancelled:
            sequences = self._requests[_request(sequence)]
            sequences.remove(sequence)
            if not sequences:
                del self._requests[_request(sequence)]
        return cancelled


def _request(sequence: ServedSequence) -> object:
    parent = sequence.request.parent
    return sequence if parent is None else parent
