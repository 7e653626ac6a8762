"""How many distinct experts a block of consecutive positions needs, counted while a trunk runs over texts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nextn.errors import ConfigError
from nextn.evaluate.teacher_forced import ReferenceText
from nextn.model.trunk import Trunk

Sums = list[list[int]]  # [texts][m - 1]: distinct experts, summed over a text's blocks of m positions


class ExpertRouting:
    """Distinct routed experts of blocks of 1..max_positions new tokens, per layer and text.

    A block of m positions is what a round of K = m - 1 drafts verifies if all of them are the text's own tokens.
    """

    def __init__(self, num_experts: Mapping[int, int], max_positions: int) -> None:
        """num_experts: Routed experts that are stored, by trunk layer; choices beyond them load nothing."""
        self.num_experts, self.max_positions = dict(num_experts), max_positions
        self.texts: tuple[ReferenceText, ...] = ()
        self._sums: dict[int, Sums] = {}
        self._tokens = torch.empty(0, 0, dtype=torch.long)  # of the current pass

    @contextmanager
    def watch(self, trunk: Trunk, texts: Sequence[ReferenceText]) -> Iterator[None]:
        """While open, count what passes over rows that begin with one of the texts choose; a repeated pass replaces.

        Raises ConfigError for a layer whose experts are not a module of their own.
        """
        self.texts, self._sums = tuple(texts), {index: [[] for _ in texts] for index in self.num_experts}
        hooks = [trunk.embedding.register_forward_pre_hook(self._start_pass)]
        try:
            for index in self.num_experts:
                layer = trunk.decoder.layers[index]
                parts = [part for name, part in layer.named_modules() if name.rpartition(".")[2] == "experts"]
                if len(parts) != 1:
                    raise ConfigError(
                        f"layer {index} has {len(parts)} modules of routed experts, so which ones a token takes cannot "
                        "be counted; expected one"
                    )
                hooks.append(parts[0].register_forward_pre_hook(partial(self._count, index)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def counts(self, index: int) -> Sums | None:
        """Return what was counted in a layer; None for one without routed experts."""
        return self._sums.get(index)

    def restore(self, index: int, counts: Any) -> None:
        """Take the `counts` of a layer that an earlier process ran."""
        if index in self.num_experts:
            self._sums[index] = counts

    def distinct(self, temperature: float) -> dict[int, list[float]]:
        """Return the mean number of distinct experts of a block of m = 1, 2, ... positions, by layer.

        Sizes that no text of this temperature is long enough for are left out.
        """
        chosen = [place for place, text in enumerate(self.texts) if text.temperature == temperature]
        lengths = [len(self.texts[place].new) for place in chosen]
        blocks = [sum(max(0, length - size) for length in lengths) for size in range(self.max_positions)]
        return {
            index: [sum(sums[place][size] for place in chosen) / num for size, num in enumerate(blocks) if num]
            for index, sums in self._sums.items()
        }

    def _start_pass(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._tokens = args[0]
        rows = self._tokens.tolist()
        self._places = [
            (row, place)
            for place, text in enumerate(self.texts)
            for row, tokens in enumerate(rows)
            if tuple(tokens[: len(text.tokens)]) == text.tokens
        ]

    def _count(self, index: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        chosen = args[1].view(*self._tokens.shape, -1)
        for row, place in self._places:
            text = self.texts[place]
            new = chosen[row, len(text.prompt) : len(text.tokens)]
            self._sums[index][place] = sum_distinct(new, self.num_experts[index], self.max_positions)


def sum_distinct(chosen: Tensor, num_experts: int, max_positions: int) -> list[int]:
    """Return for m = 1..max_positions the distinct experts of m consecutive positions, summed over all such blocks.

    chosen [T, k]: the experts of each position; those from num_experts on do not count.
    """
    used = torch.zeros(len(chosen), num_experts + 1, dtype=torch.bool, device=chosen.device)
    used = used.scatter_(1, chosen.clamp(max=num_experts), True)[:, :num_experts]
    union, sums = used, []
    for size in range(1, max_positions + 1):
        sums.append(int(union.sum()))
        union = union[:-1] | used[size:]
    return sums
