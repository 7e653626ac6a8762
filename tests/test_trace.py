"""What a trace holds (operations that depend on the inputs), and what cannot be recorded."""

import pytest
import torch
from quick import families
from replays import Replayed, fast_of, trace_of
from test_session import RECORDED
from tiny import build, prompt

from nextn.runtime.native import program
from nextn.runtime.native.trace import Trace, Untraceable, aten, record, storage_key


def names(trace: Trace) -> list[str]:
    return [str(entry.func) for entry in trace.entries]


def test_what_depends_on_weights_alone_is_no_entry():
    weight = torch.ones(4)
    trace = trace_of(lambda x: x * (weight.float() + 1).sqrt().cumsum(0), torch.ones(2, 4))
    assert names(trace) == ["aten.mul.Tensor"]
    torch.testing.assert_close(trace.entries[0].args[1], torch.full((4,), 2.0).sqrt().cumsum(0))


def test_constants_meet_inputs_through_what_they_are_written_into():
    """A storage that an input was written into is no constant any more."""

    def function(x):
        out = torch.zeros(2, 4)
        out[:, :2] = x
        return out[:, 2:] + 1

    made = trace_of(function, torch.ones(2, 2))
    assert names(made)[-1] == "aten.add.Tensor"


def test_views_are_the_storage_that_they_view():
    x = torch.ones(2, 4)
    assert storage_key(x) == storage_key(x.t()[1:]) != storage_key(x.clone())


def test_a_constant_that_is_written_into_is_put_back_at_every_run():
    """Without, the second run would add to what the first left."""

    def function(x):
        total = torch.arange(4.0)
        total += x
        return total * 2

    made = Replayed(function, [torch.ones(4)])
    for value in (1.0, 2.0, 2.0):
        assert made(torch.full((4,), value))[0].tolist() == [2 * (at + value) for at in range(4)]
    assert made.replay.torch_ops == []


def test_only_the_part_that_is_written_is_the_inputs():
    """The whole constant is restored, not only the view that was written into."""

    def function(x):
        both = torch.ones(2, 4)
        both[0].mul_(x)
        first = both.sum(0)
        both[1].add_(first)
        return both

    made = Replayed(function, [torch.ones(4)])
    for value in (3.0, 5.0):
        assert made(torch.full((4,), value))[0].tolist() == [[value] * 4, [value + 2] * 4]


def test_a_model_keeps_its_buffers():
    buffer = torch.zeros(4)
    with pytest.raises(Untraceable, match="belongs to the model"):
        trace_of(lambda x: buffer.add_(x), torch.ones(4))
    assert buffer.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum().item() > 0 else -x,
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.unique(),
    ],
    ids=["item", "nonzero", "mask", "masked_select", "unique"],
)
def test_what_depends_on_values_cannot_be_recorded(function):
    with pytest.raises(Untraceable, match="depends on the values"):
        trace_of(function, torch.ones(4))


def test_values_of_constants_may_be_read():
    weight = torch.tensor([0.0, 2.0, 0.0, 3.0])
    trace = trace_of(lambda x: x[..., weight.nonzero()[:, 0].tolist()[0] :] * weight.sum().item(), torch.ones(2, 4))
    assert [entry.args[1] for entry in trace.entries if entry.func is aten.mul.Tensor] == [5.0]


def test_composite_operations_are_taken_apart():
    """Also under decoding's inference mode, in which they would reach the trace undecomposed."""
    x, weight = torch.ones(2, 3, 4), torch.ones(3, 4)
    trace = Trace([x])
    with torch.inference_mode():
        record(lambda: [torch.nn.functional.linear(x, weight)], trace)
    assert "aten.mm.default" in names(trace)
    assert "aten.linear.default" not in names(trace)


def test_native_ops_write_their_first_views():
    x, out = torch.ones(4), torch.empty(4)
    trace = Trace([x])
    with torch.no_grad(), trace:
        trace.add_native("neg", [out, x], outs=1)
        out * 2
    assert names(trace) == ["neg", "aten.mul.Tensor"]
    assert trace.entries[0].outs[0] is out


def forms_of_recordings(name, monkeypatch):
    """Operations of trunk and head, and shape, strides (of more than one element) and dtype of what they return."""
    found, run = [], program.record
    monkeypatch.setattr(program, "record", lambda passes, trace: (run(passes, trace), found.append(trace))[0])
    fast = fast_of(build(name))
    with torch.inference_mode():
        hidden = fast.trunk(torch.tensor([prompt(3), prompt(3, seed=1)]), fast.trunk.cache(2))
        fast.head.step(0, torch.tensor([prompt(3)] * 2), hidden.head_input.clone(), cache=fast.head.cache(2))
    return [
        (
            str(entry.func),
            [
                (out.shape, [step for step, size in zip(out.stride(), out.shape, strict=True) if size > 1], out.dtype)
                for out in entry.outs
            ],
        )
        for each in found
        for entry in each.entries
    ]


@pytest.mark.more
@pytest.mark.parametrize("name", families(RECORDED))
def test_results_that_are_not_computed_have_the_forms_of_computed_ones(name, monkeypatch):
    forms = forms_of_recordings(name, monkeypatch)
    monkeypatch.setattr(Trace, "_uncomputed", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert len(forms) > 50
    assert forms == forms_of_recordings(name, monkeypatch)


def test_nothing_that_depends_on_the_inputs_is_computed():
    """So a recording reads no weights and takes no memory for what it would compute."""
    made = trace_of(lambda x: (x @ torch.ones(4, 4) + 1).softmax(-1).view(8), torch.ones(2, 4))
    assert any(entry.func is aten.mm.default for entry in made.entries)
    for entry in made.entries[:-1]:
        entry.outs[0].fill_(7.0)  # memory of its own, which no later result was read from
    assert (made.entries[-1].outs[0] == 7.0).all()


def test_results_of_numbers_of_another_type_have_another_dtype():
    made = trace_of(lambda x: (x * 1).float() + (x * 1.0) + (x * True).float(), torch.ones(2, 4, dtype=torch.int64))
    dtypes = [entry.outs[0].dtype for entry in made.entries if entry.func is aten.mul.Tensor]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_an_operation_without_a_form_is_computed_of_zeros():
    """Memory that nobody wrote, as an index, would be of no row."""
    library = torch.library.Library("nextn_test", "DEF")
    library.define("rows(Tensor table, Tensor index) -> Tensor")
    library.impl("rows", lambda table, index: table[index].clone(), "CPU")
    made = trace_of(lambda x: torch.ops.nextn_test.rows(torch.ones(3, 5), x + 1), torch.zeros(2, dtype=torch.int64))
    assert made.entries[-1].outs[0].shape == (2, 5)
