"""Rounds by part of the text: bands of context, and thinking against answer."""

import torch

from nextn.evaluate.given_texts import part_counts, think_tokens
from nextn.evaluate.teacher_forced import ReferenceText, ScoredText, Survival


class Tokenizer:
    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def get_vocab(self):
        return self.vocabulary


def scored(prompt, new, k=2):
    text = ReferenceText(tuple(prompt), tuple(new))
    generator = torch.Generator().manual_seed(len(new))
    given = (torch.rand(len(text.remaining), k + 1, generator=generator) < 0.6).double().cumprod(1)
    given[:, 0] = 1
    survivals = {"greedy": Survival(given, given[:, 1:])}
    return ScoredText(text, survivals, torch.zeros(0), torch.zeros(0))


def check_sum(found, parts):
    """The parts of one kind hold every round once."""
    whole = found.survivals["greedy"].round_counts(found.remaining, 2)
    for side in (0, 1):
        sums = [sum(part[side][depth] for part in parts.values()) for depth in range(2)]
        torch.testing.assert_close(sums, whole[side])


def test_bands_hold_every_round_once():
    found = scored([1] * 2040, [2] * 30)
    parts = part_counts(found, "greedy", 2, None)
    assert list(parts) == ["context 0-2k", "context 2k-8k"]
    check_sum(found, parts)
    early = found.survivals["greedy"].counts_by_start(found.remaining, 2)[0][:8].sum(0).tolist()
    assert parts["context 0-2k"][0] == early  # eight tokens are written before 2048 are in the cache
    assert list(part_counts(scored([1] * 140_000, [2] * 4), "greedy", 2, None)) == ["context 128k and more"]


def test_thinking_and_answer():
    """Opened by the template or by the model; what is behind the closing tag is the answer."""
    for prompt, new in (([5, 7], [1, 1, 1, 8, 2, 2, 2, 2]), ([5], [7, 1, 1, 8, 2, 2, 2, 2])):
        found = scored(prompt, new)
        parts = {part: each for part, each in part_counts(found, "greedy", 2, (7, 8)).items() if "context" not in part}
        assert list(parts) == ["thinking", "answer"]
        check_sum(found, parts)
        early = found.survivals["greedy"].counts_by_start(found.remaining, 2)[0][:3].sum(0).tolist()
        assert parts["thinking"][0] == early
    assert "thinking" not in part_counts(scored([7, 8], [1, 2, 3, 4]), "greedy", 2, (7, 8))
    assert "answer" not in part_counts(scored([5], [1, 2, 3, 4]), "greedy", 2, None)


def test_tags_that_are_tokens():
    assert think_tokens(Tokenizer({"<think>": 7, "</think>": 8})) == (7, 8)
    assert think_tokens(Tokenizer({"</think>": 8})) is None
    assert think_tokens(None) is None


def test_a_text_without_rounds():
    assert part_counts(scored([1], [2]), "greedy", 2, (7, 8)) == {}
