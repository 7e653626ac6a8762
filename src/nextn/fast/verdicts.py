"""The verdict over the drafts of a round on CUDA graphs: one thing goes to the device and one comes back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nextn.fast.graph import Captured, Recorder
from nextn.fast.still import padded
from nextn.fast.tape import Unrecordable
from nextn.fast.windows import SIZES
from nextn.sampling import Judge, Sampling

_KEPT = 16
# What is known of ways to sample and of shapes, for the judges of all texts; None: cannot be captured.
Verdicts = dict[tuple[object, ...], "_Verdict | None"]


class CapturedJudge(Judge):
    """`Judge` without a penalty, at a temperature above 0."""

    def __init__(self, sampling: Sampling, *, block: bool, record: Recorder, known: Verdicts) -> None:
        super().__init__(sampling, block=block)
        self._record, self._known, self._rows = record, known, 1

    def __call__(
        self,
        logits: Tensor,
        q: Tensor | None,
        drafts: Sequence[Sequence[int]],
        u: Sequence[Sequence[float]],
        *,
        seen: Tensor | None = None,
    ) -> list[tuple[int, int]]:
        """As `Judge`."""
        found = None if logits.shape[1] > SIZES[-1] else self._verdict(logits)
        return super().__call__(logits, q, drafts, u, seen=seen) if found is None else found.run(logits, q, drafts, u)

    def _verdict(self, logits: Tensor) -> "_Verdict | None":
        batch, columns, vocab = logits.shape
        self._rows = max(self._rows, padded(batch))  # rows that leave idle on, as in the passes
        shape = self._rows, next(size for size in SIZES if size >= columns), vocab
        key = (self.sampling, self.block, shape, logits.dtype)
        if key not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            try:
                self._known[key] = _Verdict(Judge(self.sampling, block=self.block), shape, logits, self._record)
            except Unrecordable:
                self._known[key] = None
        return self._known[key]


class _Verdict:
    """One captured verdict over R rows of up to m columns. What stands behind a row's last draft is never looked at.

    numbers [R, 2 m] fp64, one thing so that the host sends it at once: drafts, how many they are, uniforms.
    """

    @torch.inference_mode(False)  # what is made here outlives the caller's mode
    def __init__(self, judge: Judge, shape: tuple[int, int, int], like: Tensor, record: Recorder) -> None:
        rows, self._columns, vocab = shape
        self._judge = judge
        self._logits = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._laws = torch.ones(rows, self._columns - 1, vocab, device=like.device)
        self._numbers = torch.zeros(rows, 2 * self._columns, dtype=torch.float64, device=like.device)
        self._captured = Captured(self._decide, record)

    def run(
        self, logits: Tensor, q: Tensor | None, drafts: Sequence[Sequence[int]], u: Sequence[Sequence[float]]
    ) -> list[tuple[int, int]]:
        told = torch.zeros(self._numbers.shape, dtype=torch.float64)
        for row, (tokens, numbers) in enumerate(zip(drafts, u, strict=True)):
            told[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.float64)
            told[row, self._columns - 1] = len(tokens)
            told[row, self._columns : self._columns + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        self._numbers.copy_(told, non_blocking=True)
        batch, columns = logits.shape[:2]
        self._logits[:batch, :columns] = logits
        if q is not None:
            self._laws[:batch, : q.shape[1]] = q
        (found,) = self._captured.run()
        return [(kept, following) for kept, following in found[:batch].tolist()]

    def _decide(self) -> list[Tensor]:
        drafts, limit, u = self._numbers.split([self._columns - 1, 1, self._columns], dim=1)
        return [self._judge.decide(self._logits, self._laws, drafts.long(), u.float(), limit[:, 0].long())]
