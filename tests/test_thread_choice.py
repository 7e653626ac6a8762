"""The threads of steps on a CPU: one where the machine is busy, and as before once the run is over."""

from contextlib import suppress

import pytest
import torch

from nextn.train.loop import ThreadChoice, chosen_threads


@pytest.mark.parametrize(
    ("speeds", "threads"), [((1, 7, 8, 9), [3, 3]), ((1, 7, 2, 9), [3, 1]), ((1, 7, 8, 3, 9), [3, 3, 1])]
)
def test_the_faster_number_of_threads_is_used(speeds, threads):
    """On a busy machine several threads are slower than one."""
    before, used = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        choice = ThreadChoice()
        for speed in speeds:
            used.append(torch.get_num_threads())
            choice.update(speed)
    finally:
        torch.set_num_threads(before)
    assert used == [1, 1, *threads]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_number_is_restored(enabled):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with suppress(KeyboardInterrupt), chosen_threads(enabled=enabled) as choose:
            assert torch.get_num_threads() == (1 if enabled else 3)
            for speed in (1, 7, 2):
                choose(speed)
            assert torch.get_num_threads() == (1 if enabled else 3)
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
