"""Standing: which evaluation is the best, when training ends, and what is worse than noise explains."""

import json

import pytest

from nextn.training.standing import Standing
from nextn.training.telemetry import Counts, Foreseen


def figures(*lengths):
    """An evaluation over as many rows of text, each of ten rounds of these lengths; its score is their mean."""
    emitted = tuple(10.0 * length for length in lengths)
    counts = Counts((1.0,), (0.5,), emitted, (10.0,) * len(lengths))
    return Foreseen(counts, counts, 100, "decode", 1.0)


def stood(*scores, patience=0, baseline=None):
    """After evaluations with these scores, behind 10, 20, ... steps."""
    standing = Standing(patience)
    if baseline is not None:
        standing.see(0, baseline)
    for place, score in enumerate(scores, 1):
        standing.see(10 * place, figures(score, score))
    return standing


def test_the_best_is_kept():
    """Catches a later one that takes the place of a better, and one as good that does: the earlier one stays."""
    standing = Standing()
    assert [standing.see(step, figures(score)) for step, score in ((10, 1.5), (20, 1.4), (30, 1.5), (40, 1.6))] == [
        True, False, False, True,
    ]  # fmt: skip
    assert (standing.best_step, standing.best.score, standing.since) == (40, 1.6, 0)
    standing = stood(1.5, 1.4, 1.5)
    assert (standing.best_step, standing.since) == (10, 2)


def test_what_training_started_from_is_no_result():
    """Catches a baseline that is taken for the best head, which would then never be written."""
    standing = Standing(patience=1)
    assert not standing.see(0, figures(9.0))
    assert (standing.best, standing.since, standing.is_done) == (None, 0, False)
    assert standing.see(10, figures(1.0))
    assert standing.baseline.score == 9.0


def test_patience():
    """Catches an end one evaluation too early or too late, and patience 0 that ends at once."""
    assert [stood(1.5, *[1.4] * more, patience=2).is_done for more in range(4)] == [False, False, True, True]
    assert not stood(1.5, 1.4, 1.4, 1.45, 1.6, patience=3).is_done
    assert not stood(1.5, *[1.4] * 50).is_done


def test_the_best_step_seen_again_is_not_a_worse_one():
    """A run that resumes at its best checkpoint evaluates it again; that is no lost evaluation."""
    standing = stood(1.5, 1.6)
    standing.see(20, figures(1.6, 1.6))
    assert standing.since == 0
    standing.see(30, figures(1.6, 1.6))
    assert standing.since == 1


@pytest.mark.parametrize(
    ("trained", "worse"),
    [((1.0, 1.2, 1.1, 1.3), True), ((1.9, 1.6, 1.5, 1.8), False), ((2.5, 2.6, 2.7, 2.8), False)],
    ids=["all rows", "within noise", "better"],
)
def test_worse_is_beyond_noise(trained, worse):
    baseline = figures(1.8, 1.7, 1.6, 1.9)
    standing = Standing()
    standing.see(0, baseline)
    assert not standing.is_worse
    standing.see(10, figures(*trained))
    assert standing.is_worse == worse
    alone = Standing()
    alone.see(10, figures(*trained))
    assert not alone.is_worse


def test_in_words():
    """Both scores, and twice the standard error of their difference: rows differ by 0.2 and 0.4, so 0.1 is one."""
    assert str(stood(1.5)) == "no head to compare with"
    standing = Standing()
    standing.see(0, figures(1.4, 1.6))
    assert str(standing) == "no head to compare with"
    standing.see(10, figures(1.6, 2.0))
    assert str(standing) == "acceptance length 1.800, was 1.500, +-0.200 on held-out text"


def test_state_and_record():
    """A checkpoint's JSON gives the same standing back; the record names what a reader looks for."""
    standing = stood(1.5, 1.4, patience=3, baseline=figures(1.2, 1.4))
    again = Standing(patience=3)
    again.load_state(json.loads(json.dumps(standing.as_state())))
    assert again == standing
    empty = Standing(patience=3)
    empty.load_state(json.loads(json.dumps(Standing().as_state())))
    assert empty == Standing(patience=3)
    record = standing.as_record()
    assert (record["baseline"]["score"], record["best"]["score"], record["best_step"]) == (1.3, 1.5, 10)
    assert Standing().as_record() == {"baseline": None, "best": None, "best_step": 0}
