"""What is captured: outputs that stand still, inputs put back, and passes that no graph can hold."""

import pytest
import torch
from replays import taped

from nextn.fast.graph import Captured, Watched, called, recorder
from nextn.fast.tape import Unrecordable


@pytest.mark.parametrize("record", [called, taped])
def test_runs_overwrite_the_same_outputs(record):
    given = torch.arange(3.0)
    captured = Captured(lambda: [given * 2, given.sum()], record)
    first = captured.run()
    given += 1
    assert captured.run() is first
    assert first[0].tolist() == [2, 4, 6]
    assert float(first[1]) == 6


@pytest.mark.parametrize("record", [called, taped])
def test_what_is_fed_is_as_before_the_first_run(record):
    """A pass that hands on its own inputs must not have been handed on by being captured."""
    count, total = torch.zeros(1), torch.zeros(4)

    def step():
        total.index_copy_(0, count.long(), count + 1)
        count.add_(1)
        return [count]

    captured = Captured(step, record, fed=[count])
    assert count.tolist() == [0]
    for _ in range(4):
        (out,) = captured.run()
    assert (count.tolist(), out.tolist(), total.tolist()) == ([4], [4], [1, 2, 3, 4])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x[0] > 1 and x,
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.index_put((x > 1,), x[:1]),
        lambda x: torch.repeat_interleave(x, x.long()),
    ],
    ids=["item", "if", "mask", "nonzero", "masked put", "repeats"],
)
def test_what_asks_the_device_for_numbers_is_refused(function):
    x = torch.arange(3.0)
    with pytest.raises(Unrecordable, match="asks the device for numbers"):
        Captured(lambda: [torch.as_tensor(function(x))], called)


@pytest.mark.parametrize("function", [lambda x: x.to("meta"), lambda x: torch.empty(3, device="meta").copy_(x)])
def test_what_moves_between_devices_is_refused(function):
    with Watched(), pytest.raises(Unrecordable, match="between host and device"):
        function(torch.arange(3.0))


def test_what_stays_on_the_device_is_not():
    x = torch.arange(4.0)
    function = lambda: [x[torch.tensor([1, 2])], torch.where(x > 1, x, 0), x.masked_fill(x > 1, 0), x.topk(2)[0]]  # noqa: E731
    assert [out.tolist() for out in Captured(function, called).run()] == [[1, 2], [0, 0, 2, 3], [0, 1, 0, 0], [3, 2]]


def test_made_in_any_mode_and_run_in_any_other():
    given = torch.ones(2)
    with torch.inference_mode():
        captured = Captured(lambda: [given * 2], called)
    (out,) = captured.run()
    with torch.inference_mode():
        captured.run()
    assert not out.is_inference()


def test_cpus_have_no_graphs():
    assert recorder(torch.device("cpu")) is called
