"""What is trained jointly: the loss of parts adds up to the whole's, and settings that do not fit are refused."""

import pytest
import torch
from tiny import build, refrains

from nextn.errors import ConfigError
from nextn.train.config import TrainConfig
from nextn.train.joint_task import JointTask

CONFIG = TrainConfig(steps=6, batch_size=2, length=24, depths=3, dtype="float32")


@pytest.fixture(scope="module")
def corpus():
    return refrains(12, 60, seed=1)


def task(corpus, config=CONFIG):
    return JointTask(build("glm4_moe", initializer_range=0.02), corpus, config)


def test_shares_of_two_ranks_add_up(corpus):
    """With the counts of both as denominator, totals and gradients of two ranks' rows sum to the whole batch's."""
    subject = task(corpus)
    whole = subject.loss(subject.example(0), 0.3)
    whole.total.backward()
    gradient = subject.named["head.stack.0.projection.weight"].grad.clone()
    shares = [subject.example(0, rank=rank, world=2) for rank in (0, 1)]
    counts = sum(subject.counts(share) for share in shares)
    assert torch.equal(counts, whole.counts)
    subject.model.head.zero_grad()
    parts = [subject.loss(share, 0.3, denominator=counts) for share in shares]
    for part in parts:
        part.total.backward()
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    torch.testing.assert_close(subject.named["head.stack.0.projection.weight"].grad, gradient)


def test_depths_without_a_head(corpus):
    model = build("glm4_moe")
    model.head = None
    with pytest.raises(ConfigError, match="depths = 3, but the model has no head"):
        JointTask(model, corpus, CONFIG)
