"""Held-out figures against a plain computation."""

import pytest
import torch
from tiny import build, refrain

from nextn.data.batches import Batch
from nextn.settings import Settings
from nextn.train.evaluation import decoded_figures, teacher_forced_figures


def test_forced_figures_by_hand():
    """Loss, match and overlap equal a loop over columns and depths; conditional rates multiply survivors."""
    model = build("glm4_moe")
    tokens = torch.randint(0, 64, (2, 13))
    batch = Batch(tokens, torch.zeros(2, 13, dtype=torch.int32))
    got = teacher_forced_figures(model, [batch], 2)
    with torch.no_grad():
        hidden = model.trunk(tokens)
        trunk = model.trunk.logits(hidden.final_hidden).double()
        drafts = [
            model.trunk.logits(state).double()
            for state in model.head.teacher_forced_hidden(tokens, hidden.head_input, 2)
        ]
    alive, survived = {"match": [], "overlap": []}, {}
    for row in range(2):
        for column in range(13 - 3):
            match = overlap = 1.0
            for depth in (1, 2):
                p, q = trunk[row, column + depth].softmax(-1), drafts[depth - 1][row, column].softmax(-1)
                match *= float(p.argmax() == q.argmax())
                overlap *= torch.minimum(p, q).sum().item()
                alive["match"].append((depth, match))
                alive["overlap"].append((depth, overlap))
    for name, values in alive.items():
        survived[name] = [20.0, *(sum(value for depth, value in values if depth == k) for k in (1, 2))]
    for name in ("match", "overlap"):
        first, second = survived[name][1] / 20, survived[name][2] / max(survived[name][1], 1e-9)
        assert getattr(got, name) == pytest.approx((first, second), abs=1e-5)
    labels = [tokens[:, depth + 1 :] for depth in range(3)]
    for depth, logits in enumerate([trunk, *drafts]):
        nll = torch.nn.functional.cross_entropy(
            logits[:, : labels[depth].shape[1]].flatten(0, 1), labels[depth].flatten()
        )
        assert got.loss[depth] == pytest.approx(nll.item(), abs=1e-4)


def test_decoded_counts_and_flags_loops(trained):
    """The decoder's figures on the fixture, with the degeneracy check of the texts beside them."""
    prompts = [row.tolist() for row in refrain(4, 33, seed=7)]
    figures = decoded_figures(trained["glm"], prompts, Settings(num_speculative_tokens=3, max_tokens=20))
    assert figures.acceptance.num_rounds > 0
    assert len(figures.checks) == 4
    assert 0 <= figures.repetitive <= 1
