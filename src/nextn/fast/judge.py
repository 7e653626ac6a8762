"""The verdict over the drafts of a round as one native call (csrc/sampling.cpp): law, judgement and pick."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nextn.fast.native import Program, Runtime
from nextn.fast.scratch import Scratch
from nextn.sampling import Judge, Sampling

_KEPT = 32  # programs; logits and laws mostly stand where they stood in an earlier round


class FastJudge(Judge):
    """`Judge` without a penalty, at a temperature above 0."""

    def __init__(self, runtime: Runtime, sampling: Sampling, *, block: bool, scratch: Scratch | None = None) -> None:
        """scratch: of several judges, None: its own."""
        super().__init__(sampling, block=block)
        self._runtime, self._scratch = runtime, scratch or Scratch()
        self._verdicts: dict[tuple[object, ...], NativeVerdict] = {}

    def __call__(
        self,
        logits: Tensor,
        q: Tensor | None,
        drafts: Sequence[Sequence[int]],
        u: Sequence[Sequence[float]],
        *,
        seen: Tensor | None = None,
    ) -> list[tuple[int, int]]:
        """As `Judge`, but for the order of sums."""
        return self.verdict(logits, q).run(drafts, u)

    def verdict(self, logits: Tensor, q: Tensor | None) -> "NativeVerdict":
        """What judges drafts by logits and laws at these places."""
        where = tuple(part for each in (logits, q) if each is not None for part in _place(each))
        if where not in self._verdicts:
            if len(self._verdicts) >= _KEPT:
                self._verdicts.clear()
            made = NativeVerdict.of(self._runtime, self._scratch, logits, q, self.sampling, block=self.block)
            self._verdicts[where] = made
        return self._verdicts[where]


@dataclass(frozen=True, eq=False)
class NativeVerdict:
    """One program over logits and laws that stand still."""

    program: Program
    kept: Tensor
    following: Tensor
    drafts: np.ndarray
    limits: np.ndarray
    u: np.ndarray

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        scratch: Scratch,
        logits: Tensor,
        q: Tensor | None,
        sampling: Sampling,
        *,
        block: bool,
    ) -> "NativeVerdict":
        rows, columns, vocab = logits.shape
        memory = scratch.take(4 * rows * (columns + 1) * vocab).view(torch.float32)
        p, rest = memory[: rows * columns * vocab].view(rows, columns, vocab), memory[-rows * vocab :].view(rows, vocab)
        kept, following, limits = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
        drafts, u = torch.zeros(rows, columns, dtype=torch.int64), torch.zeros(rows, columns)
        program, laws = Program(runtime), torch.zeros(rows, 0, vocab) if q is None else q
        reals = [sampling.temperature, sampling.top_p, sampling.min_p]
        assert program.add("law", [p, logits], [sampling.top_k], reals)
        assert program.add("judge", [kept, following, rest, p, laws, drafts, limits, u], [int(block)])
        return cls(program, kept, following, drafts.numpy(), limits.numpy(), u.numpy())

    def run(self, drafts: Sequence[Sequence[int]], u: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
        for row, (tokens, numbers) in enumerate(zip(drafts, u, strict=True)):
            self.limits[row] = len(tokens)
            self.drafts[row, : len(tokens)] = tokens
            self.u[row, : len(numbers)] = numbers
        self.program.run()
        return list(zip(self.kept.tolist(), self.following.tolist(), strict=True))


def _place(tensor: Tensor) -> tuple[object, ...]:
    """What views of the same values have in common."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
