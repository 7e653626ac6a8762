"""Parts of a concatenation are written where it wants them, where nobody can tell."""

import pytest
import torch
from fusions import both

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def shared(x):
    part = x + 1
    return torch.cat((x * 2, part), dim=-1), part


def twice(x):
    part = x + 1
    return torch.cat((part, part), dim=-1)


# -> the ops that are left
SPELLED = {
    "parts of the last dim": (lambda x: torch.cat((x + 1, -x, x * x), dim=-1), ["add", "neg", "mul"]),
    "parts of another dim": (lambda x: torch.cat((x + 1, x * x), dim=1), ["add", "mul"]),
    "a part that was there": (lambda x: torch.cat((x + 1, x), dim=-1), ["add", "copy"]),
    "a part that is kept": (shared, ["add", "mul", "copy"]),
    "the same part twice": (twice, ["add", "copy", "copy"]),
}


@TYPES
@pytest.mark.parametrize("name", SPELLED)
def test_parts_are_written_in_place(name, dtype):
    function, ops = SPELLED[name]
    assert sorted(both(function, dtype).ops) == sorted(ops)


def test_a_place_that_is_read_before_the_copy_is_not_written_early():
    def function(x):
        place = x * 2
        part = x + 1
        total = place.sum()
        place.copy_(part)
        return place + total

    assert both(function, torch.float32).ops.count("copy") == 1


def test_a_copy_to_another_type_stays():
    assert both(lambda x: torch.cat(((x + 1).bfloat16(), (x * 2).bfloat16()), dim=-1), torch.float32).ops.count("copy")
