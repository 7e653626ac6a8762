"""Verification of a round's drafts as one native call (csrc/sampling.cpp): probabilities, acceptance, next token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nextn.runtime.native.abi import Program, Runtime
from nextn.runtime.native.memory import Scratch
from nextn.settings import Sampling
from nextn.speculative.verification import Verifier

_MAX_PROGRAMS = 32  # cached; logits and distributions mostly have the addresses of an earlier round


class NativeVerifier(Verifier):
    """`Verifier` for sampling without a repetition penalty at a temperature above 0."""

    def __init__(
        self, runtime: Runtime, sampling: Sampling, *, block_verification: bool, scratch: Scratch | None = None
    ) -> None:
        """`scratch`: memory shared with other verifiers; None for memory of its own."""
        super().__init__(sampling, block_verification=block_verification)
        self._runtime, self._scratch = runtime, scratch or Scratch()
        self._verifications: dict[tuple[object, ...], NativeVerification] = {}

    def __call__(
        self,
        logits: Tensor,
        q: Tensor | None,
        drafts: Sequence[Sequence[int]],
        u: Sequence[Sequence[float]],
        *,
        seen: Tensor | None = None,
    ) -> list[tuple[int, int]]:
        """As `Verifier.__call__`, except for the order of sums."""
        return self.verification(logits, q).run(drafts, u)

    def verification(self, logits: Tensor, q: Tensor | None) -> "NativeVerification":
        """Return the program that verifies drafts with logits and distributions at these addresses."""
        key = tuple(part for tensor in (logits, q) if tensor is not None for part in _address(tensor))
        if key not in self._verifications:
            if len(self._verifications) >= _MAX_PROGRAMS:
                self._verifications.clear()
            self._verifications[key] = NativeVerification.of(
                self._runtime, self._scratch, logits, q, self.sampling, block_verification=self.block_verification
            )
        return self._verifications[key]


@dataclass(frozen=True, eq=False)
class NativeVerification:
    """A program that verifies drafts, with its input and output buffers."""

    program: Program
    num_accepted: Tensor  # [B]
    next_tokens: Tensor  # [B]
    drafts: np.ndarray  # [B, K + 1]
    limits: np.ndarray  # [B]: number of drafts
    u: np.ndarray  # [B, K + 1]

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        scratch: Scratch,
        logits: Tensor,
        q: Tensor | None,
        sampling: Sampling,
        *,
        block_verification: bool,
    ) -> "NativeVerification":
        """Build the program for logits [B, K + 1, V] and q [B, K, V] at fixed addresses."""
        batch_size, num_positions, vocab = logits.shape
        memory = scratch.take(4 * batch_size * (num_positions + 1) * vocab).view(torch.float32)
        p = memory[: batch_size * num_positions * vocab].view(batch_size, num_positions, vocab)
        residual = memory[-batch_size * vocab :].view(batch_size, vocab)
        num_accepted, next_tokens, limits = (torch.zeros(batch_size, dtype=torch.int64) for _ in range(3))
        drafts = torch.zeros(batch_size, num_positions, dtype=torch.int64)
        u = torch.zeros(batch_size, num_positions)
        program, distributions = Program(runtime), torch.zeros(batch_size, 0, vocab) if q is None else q
        reals = [sampling.temperature, sampling.top_p, sampling.min_p]
        assert program.add("to_probs", [p, logits], [sampling.top_k], reals)
        views = [num_accepted, next_tokens, residual, p, distributions, drafts, limits, u]
        assert program.add("verify", views, [int(block_verification)])
        return cls(program, num_accepted, next_tokens, drafts.numpy(), limits.numpy(), u.numpy())

    def run(self, drafts: Sequence[Sequence[int]], u: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
        """Verify drafts and return (num_accepted, next token) of each sequence."""
        for row, (tokens, uniforms) in enumerate(zip(drafts, u, strict=True)):
            self.limits[row] = len(tokens)
            self.drafts[row, : len(tokens)] = tokens
            self.u[row, : len(uniforms)] = uniforms
        self.program.run()
        return list(zip(self.num_accepted.tolist(), self.next_tokens.tolist(), strict=True))


def _address(tensor: Tensor) -> tuple[object, ...]:
    """What identifies a view in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
