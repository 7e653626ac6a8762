"""The captured verdict against `Judge`: padded shapes, rows of any number of drafts, the same numbers."""

import pytest
import torch
from replays import taped

from nextn.fast.verdicts import _KEPT, CapturedJudge
from nextn.sampling import Judge, Sampling, law

VOCAB = 11


def drawn(limits, seed, sampling):
    """logits, q, drafts and uniforms of rows with so many drafts."""
    generator = torch.Generator().manual_seed(seed)
    width = max(limits)
    logits = torch.randn(len(limits), width + 1, VOCAB, generator=generator)
    q = law(logits[:, :-1] + torch.randn(len(limits), width, VOCAB, generator=generator), sampling) if width else None
    drafts = [[] for _ in limits]
    for row, limit in enumerate(limits):
        if limit:
            drafts[row] = torch.multinomial(q[row, :limit], 1, generator=generator)[:, 0].tolist()
    return logits, q, drafts, [torch.rand(n + 1, generator=generator).tolist() for n in limits]


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_k=5, min_p=0.1), Sampling(1.0, top_p=0.9)])
def test_says_what_the_judge_says(sampling, block):
    """What one round leaves behind a row's last draft must not tell in the next."""
    made = []
    judge = CapturedJudge(sampling, block=block, record=lambda *run: made.append(1) or taped(*run), known={})
    plain = Judge(sampling, block=block)
    seen = set()
    for seed, limits in enumerate([(3, 0, 2), (1, 1, 1), (0, 0, 0), (3, 3, 3), (2,), (0, 5, 1)] * 4):
        given = drawn(limits, seed, sampling)
        found = judge(*given)
        assert found == plain(*given)
        seen |= {kept for kept, _ in found}
    assert seen >= {0, 1, 2, 3}
    assert len(made) == (0 if sampling.top_p < 1 else 3)  # of 4 rows, and 4, 1, 8 columns


def test_only_so_many_are_kept():
    known = {}
    for place in range(_KEPT + 2):
        CapturedJudge(Sampling(1 + place), block=True, record=taped, known=known)(*drawn((1,), 0, Sampling(1.0)))
    assert len(known) == 2
