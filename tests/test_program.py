"""Replays: memory in the arena, which all share, torch operations between native ones, outputs valid until the next."""

import gc

import pytest
import torch
from replays import Replayed

from nextn.runtime.native import program
from nextn.runtime.native.abi import load
from nextn.runtime.native.memory import _RESERVED, Scratch
from nextn.runtime.native.trace import Trace, Untraceable
from nextn.runtime.native.weight_packing import PackedWeights

SIZE = 1024


def test_a_long_chain_runs_in_little_memory(monkeypatch):
    """A tensor's memory is reused after its last use: 60 tensors need the memory of a few."""
    arenas = []

    class Kept(program._Arena):
        def __init__(self, *args):
            super().__init__(*args)
            arenas.append(self)

    monkeypatch.setattr(program, "_Arena", Kept)

    def chain(x):
        first = state = x * 2
        for step in range(30):
            state = (state + step).tanh() + 0.01 * x
        return state - first

    made = Replayed(chain, [torch.zeros(SIZE)])
    given = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(made(given)[0], chain(given), rtol=1e-5, atol=1e-5)
    assert arenas[0]._memory.nbytes <= 6 * SIZE * 4


def test_live_tensors_never_share_memory():
    """All of many sizes are read again at the end."""

    def function(x):
        parts = [x[: 3 + 7 * at] * (at + 1) for at in range(20)]
        dead = [(part + 1).exp() for part in parts]
        return [part.sum() + other.amax() for part, other in zip(parts, dead, strict=True)]

    made = Replayed(function, [torch.zeros(200)])
    given = torch.linspace(-1, 1, 200)
    torch.testing.assert_close(made(given), function(given), rtol=1e-5, atol=1e-5)


def test_outputs_are_valid_until_the_next_run():
    """Also an early one, an input that is handed through, and a view."""

    def function(x):
        early = x + 1
        late = early
        for _ in range(10):
            late = late * 0.5 + 1
        return early, x, early[1:], late

    made = Replayed(function, [torch.zeros(64)])
    given = torch.arange(64.0)
    one = made(given)
    for actual, wanted in zip(one, function(given), strict=True):
        torch.testing.assert_close(actual, wanted)
    again = made(given * 3)
    assert all(before is after for before, after in zip(one, again, strict=True))
    assert [out[1].item() for out in again[:3]] == [4.0, 3.0, 7.0]


def test_operations_left_to_torch_run_in_their_place():
    """In the order of the recording, with results of several tensors, and in place."""

    def function(x):
        ranked, order = (x * 2).sort(dim=0)
        total = ranked.cumsum(0)
        total.cumsum_(0)
        return total + 1, order * 2

    made = Replayed(function, [torch.zeros(16)])
    given = torch.randn(16, generator=torch.Generator().manual_seed(2))
    for actual, wanted in zip(made(given), function(given), strict=True):
        torch.testing.assert_close(actual, wanted)
    assert made.replay.torch_ops == ["aten.sort.default", "aten.cumsum_.default"]


def test_a_kernel_that_refuses_leaves_the_operation_to_torch():
    """fp64 has no kernel at all."""
    made = Replayed(lambda x: (x + 1).double().sqrt().float() * 2, [torch.zeros(8)])
    torch.testing.assert_close(made(torch.full((8,), 3.0))[0], torch.full((8,), 4.0))
    assert made.replay.torch_ops == ["aten._to_copy.default", "aten.sqrt.default", "aten._to_copy.default"]


def test_a_native_op_that_no_kernel_takes_is_refused_while_recording():
    """There is no torch operation to fall back to."""
    x, out = torch.zeros(8), torch.empty(3)
    trace = Trace([x])

    def run():
        trace.add_native("softmax", [out, x], outs=1)
        return [out]

    with pytest.raises(Untraceable, match=r"no native softmax for torch.float32 \(3,\), torch.float32 \(8,\)"):
        program.Replay.of(load(), trace, run, PackedWeights(load()))


def test_constants_outlive_the_recording():
    """The replay itself keeps what it reads, also the memory of a parameter that has got another one."""
    table = torch.nn.Parameter(torch.ones(3, 8))

    def made():
        weight, bias = torch.full((4, 8), 2.0), torch.full((4,), 5.0)

        def function(ids):
            return torch.addmm(bias, torch.nn.functional.embedding(ids, table), weight.t()) * (bias - 4)

        return Replayed(function, [torch.zeros(2, dtype=torch.int64)])

    kept = made()
    kept.trace = None
    table.data = torch.zeros(3, 8)
    gc.collect()
    _fill = [torch.full(shape, -1.0) for shape in ((4, 8), (3, 8)) for _ in range(50)]
    assert kept(torch.tensor([0, 2]))[0].tolist() == [[21.0] * 4] * 2


def test_replays_take_turns_in_one_scratch():
    """Of different sizes, the larger recorded last: no more memory than it takes, and no trace of the other one."""
    scratch, made = Scratch(), []
    for size in (5, 40):
        x = torch.zeros(size)

        def run(x=x):
            state = x + 1
            return [state, (state * 2).exp() + state]

        made.append((x, program.Replay.of(load(), Trace([x]), run, PackedWeights(load()), scratch)))
    for turn in range(3):
        for x, replay in made:
            x.fill_(turn / 4)
            replay.run()
            state = x + 1
            torch.testing.assert_close(replay.outputs, [state, (state * 2).exp() + state])
    assert len({replay.outputs[0].untyped_storage().data_ptr() for _, replay in made}) == 1
    assert scratch.take(8).data_ptr() == made[0][1].outputs[0].untyped_storage().data_ptr()
    large = scratch.take(2**27)
    assert len(large) == 2**27
    assert large.data_ptr() % 64 == 0


def test_the_same_memory_again():
    scratch = Scratch()
    first, second = scratch.take(100), scratch.take(10)
    assert first.data_ptr() == second.data_ptr()
    assert first.data_ptr() % 64 == 0
    assert (len(first), len(second)) == (100, 10)


def test_larger_memory_leaves_the_old_one_be():
    """A replay recorded earlier keeps the memory that it was given."""
    scratch = Scratch()
    old = scratch.take(100)
    old.fill_(7)
    new = scratch.take(_RESERVED + 1)
    new.fill_(1)
    assert old.tolist() == [7] * 100
    assert scratch.take(100).data_ptr() == new.data_ptr()
