"""The ctypes interface of the runtime: refused calls, errors, lifetimes, structures like the compiled library's."""

import ctypes
import gc
import inspect
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled import compiled

from nextn.errors import ConfigError
from nextn.runtime.native import abi, draft_chain, rounds
from nextn.runtime.native.abi import STRUCTURES, Program, Runtime, View, check_layouts, load


@pytest.mark.slow
def test_a_library_that_gets_no_tiles(monkeypatch):
    library = load().library
    refused = type("Library", (), {"nextn_ready": lambda self: 1})()
    monkeypatch.setattr(abi, "open_library", lambda path: refused)
    with pytest.raises(ConfigError, match="tile registers"):
        load.__wrapped__()
    assert library.nextn_ready() == 0


def test_a_library_that_cannot_be_loaded(monkeypatch, tmp_path):
    """Whole, but for another machine."""
    foreign = tmp_path / "foreign.so"
    foreign.write_text("for another machine")
    monkeypatch.setattr(abi, "build_library", lambda sources, cache: foreign)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*foreign\.so.*delete .* to rebuild it"):
        load.__wrapped__()


@pytest.mark.parametrize(
    ("op", "tensors"),
    [
        ("nosuch", [torch.zeros(2), torch.zeros(2)]),
        ("neg", [torch.zeros(2), torch.zeros(3)]),
        ("neg", [torch.zeros(2)]),
        ("neg", [torch.zeros(2).double(), torch.zeros(2).double()]),
        ("neg", [torch.zeros([1] * 7), torch.zeros([1] * 7)]),
    ],
    ids=["name", "shape", "count", "dtype", "dims"],
)
def test_refused(op, tensors):
    """By a call, with what was asked for; by a program, which stays as it was."""
    with pytest.raises(ConfigError, match=f"native op '{op}' does not support .*{tensors[0].dtype}"):
        load().call(op, tensors)
    program, out = Program(load()), torch.zeros(2)
    assert program.add("neg", [out, torch.ones(2)])
    assert not program.add(op, tensors)
    program.run()
    assert out.tolist() == [-1.0, -1.0]


def test_weights_of_other_types_are_not_packed():
    with pytest.raises(ConfigError, match=r"do not support torch\.float16 weights"):
        load().pack(torch.zeros(4, 4, dtype=torch.float16))


def test_views_say_where_and_how_a_tensor_lies():
    tensor = torch.zeros(3, 4, 5, dtype=torch.bfloat16)[1:, ::2].transpose(0, 2)
    view = View.of(tensor.expand(7, 5, 2, 2))
    assert (view.data, view.type, view.ndim) == (tensor.data_ptr(), 1, 4)
    assert (list(view.size), list(view.stride)) == ([7, 5, 2, 2, 0, 0], [0, 1, 10, 20, 0, 0])


def test_calls_run_in_order():
    one, two, three = torch.ones(4), torch.zeros(4), torch.zeros(4)
    program = Program(load())
    for out, source, addend in ((two, one, 2.0), (three, two, 3.0), (one, three, 4.0)):
        assert program.add("add", [out, source], (), (addend, 1.0))
    program.run()
    program.run()
    assert [out[0].item() for out in (two, three, one)] == [12.0, 15.0, 19.0]


def test_a_program_keeps_its_tensors():
    """Freed memory under a program would be read, and written."""
    program, source = Program(load()), torch.ones(1000)
    freed = weakref.ref(source.untyped_storage())
    assert program.add("neg", [torch.empty(1000), source])
    del source
    gc.collect()
    assert freed() is not None
    program.run()
    del program
    gc.collect()
    assert freed() is None


def test_an_empty_program_stops_nobody():
    """A program without calls that the team takes for its end: the next one would never start."""
    team = Runtime(load().library, 2)
    x, out = torch.randn(4, 1000), torch.zeros(4, 1000)
    Program(team).run()
    program = Program(team)
    assert program.add("silu", [out, x])
    for _ in range(3):
        program.run()
    torch.testing.assert_close(out, torch.nn.functional.silu(x))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """The runtime with the ops of meeting.cpp, which show when workers pass a barrier."""
    return compiled(Path(__file__).parent / "meeting.cpp", flags=("-DNEXTN_TEST_CLOCK",))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 8])
def test_a_barrier_between_calls(library, threads):
    """No worker passes a barrier before the last one arrives: it would read what another has not written yet."""
    runtime = Runtime(library, threads)
    stamps, missed = (torch.zeros(threads, dtype=torch.int64) for _ in range(2))
    program = Program(runtime)
    for late in range(threads):
        assert program.add("come_late", [stamps, missed], [late, late + 1, 20])
        assert program.add("all_came", [stamps, missed], [late + 1])
    program.run()
    assert missed.tolist() == [0] * threads


@pytest.mark.slow
def test_one_worker_runs_alone_while_another_is_not_scheduled(library):
    """Where the caller mostly waits, the next runs are its own; after a while all workers take part again."""
    runtime = Runtime(library, 2)
    stamps = torch.zeros(2, dtype=torch.int64)

    def run(late, stamp, after_ms=0):
        library.pass_time(after_ms)
        program = Program(runtime)
        assert program.add("stall", [stamps], [late, stamp])
        program.run()
        return stamps.tolist()

    assert run(late=1, stamp=1) == [1, 1]  # the caller waited for 20 ms
    assert run(late=-1, stamp=2) == [2, 1]
    assert run(late=-1, stamp=3, after_ms=200) == [3, 3]
    runtime = Runtime(library, 2)
    assert run(late=0, stamp=4) == [4, 4]  # the caller itself was slow: it would be no faster alone
    assert run(late=-1, stamp=5) == [5, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "shards"), [(2, 2), (2, 4), (4, 4), (2, 3), (3, 4), (4, 2)])
def test_sharded_calls_need_no_barrier(library, threads, shards):
    """If the workers share the shards evenly; otherwise there is a barrier as between any two calls."""
    runtime = Runtime(library, threads)
    stamps, missed = (torch.zeros(threads, dtype=torch.int64) for _ in range(2))
    program = Program(runtime)
    wait_ms = 20 if shards % threads else 10_000  # the first waits until the others, which may not, have gone on
    assert program.add("come_late", [stamps, missed], [0, 1, wait_ms])
    assert program.add("all_came", [stamps, missed], [1], num_shards=shards)
    program.run()
    assert bool(missed[1:].all()) == (shards % threads == 0)
    assert missed[0] == 0 or shards % threads == 0


def other_library(change=lambda text: text):
    """A library compiled with other structures."""
    text = change(load().library.nextn_layouts().decode())
    return SimpleNamespace(nextn_layouts=text.encode, _name="runtime.so")


def test_the_library_that_is_built_agrees():
    check_layouts(load().library)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("View", "stride 72a", "stride 80a"),
        ("Chain", "temperature 32d", "temperature 32i"),
        ("Batch", "last_tokens 8p", "latest_tokens 8p"),
        ("RoundOutput", "RoundOutput: 64", "RoundOutput: 72"),
        ("Refresh", "starts 24p, states 32p", "states 24p, starts 32p"),
        ("Stages", "Steps: ", "Stages: "),
        ("HeadOutput", ", confidence 24p", ""),
    ],
    ids=["offset", "type", "name", "size", "order", "structure", "field"],
)
def test_one_that_differs_is_refused(name, old, new):
    with pytest.raises(ConfigError, match=rf"structure {name} as \(.*\), this version .* delete runtime.so") as error:
        check_layouts(other_library(lambda text: text.replace(old, new)))
    assert "\n" not in str(error.value)


def test_a_library_with_other_structures_is_not_loaded(monkeypatch, tmp_path):
    other = other_library(lambda text: text.replace("View: 120", "View: 128"))
    other.nextn_ready = lambda: 0
    monkeypatch.setattr(abi, "open_library", lambda path: other)
    monkeypatch.setattr(abi, "build_library", lambda *_: tmp_path / "runtime.so")
    with pytest.raises(ConfigError, match="structure View"):
        load.__wrapped__()


def test_all_structures_are_compared():
    """A structure that is not listed would go unchecked."""
    modules = [abi, draft_chain, rounds]
    classes = {each for module in modules for _, each in inspect.getmembers(module, inspect.isclass)}
    assert {each for each in classes if issubclass(each, ctypes.Structure)} == set(STRUCTURES)
    listed = (abi._SOURCES / "layout.cpp").read_text()
    assert set(re.findall(r"layout<(\w+)>", listed)) == {each.__name__.removesuffix("Struct") for each in STRUCTURES}
    sources = [path for path in abi._SOURCES.parent.glob("*.py") if path.name != "abi.py"]
    assert not [path.name for path in sources if "ctypes.Structure" in path.read_text()]


def test_fields_are_where_the_compiler_has_them():
    assert (ctypes.sizeof(View), View.stride.offset) == (120, 72)
