"""Times of rounds, measured by an idle server."""

import pytest

from nextn.runtime.backend import backend_for
from nextn.serve.round_costs import measure_round_costs


@pytest.mark.parametrize(("max_model_len", "is_measured"), [(128, True), (8, False)])
def test_short_context(trained, max_model_len, is_measured):
    """Catches a small model whose sequences reach their maximum length before all numbers of drafts are measured."""
    backend = backend_for(trained["glm_two"], "native")
    sizes = {"num_speculative_tokens": 2, "max_model_len": max_model_len}
    times = measure_round_costs(backend, 2, is_argmax=True, **sizes)
    assert (times is not None) == is_measured
    assert times is None or (times.head.keys() == {0, 1, 2} and min(times.head.values()) > 0)


def test_interrupted(trained):
    backend = backend_for(trained["glm_two"], "native")
    sizes = {"num_speculative_tokens": 2, "max_model_len": 512}
    looks = iter([False] * 4)
    assert measure_round_costs(backend, 1, is_argmax=True, is_interrupted=lambda: next(looks, True), **sizes) is None
