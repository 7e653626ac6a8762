"""Which cases of large tests `make test` runs. The others are marked `more` or `slow`.

`make test-more` runs the former, as does CI before a change lands; `make test-slow` the latter.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import pytest

# Cases of one function that `make test` runs; more belong in a `loop`. Each case of these is another path of the code.
MOST_CASES = 8
SEVERAL_PATHS = {
    "second_device_checks.py::test_layers_on_several_devices", "test_audit_values.py::test_sound_layouts",
    "test_gemm.py::test_a_value_that_is_no_number_is_no_code",
    "test_gemm.py::test_rows_of_an_embedding_of_few_bits", "test_gemm.py::test_the_largest_codes_do_not_overflow",
    "test_golden.py::test_results_are_what_they_were",
    "test_rounds_decode.py::test_greedy_equals_plain_in_ragged_batches", "test_verify.py::test_broken",
}  # fmt: skip
# One family of each kind: latent attention, compressed and indexed attention, a hybrid with the gated delta rule, dense
# attention with experts and a sliding window, short convolutions.
REPRESENTATIVES = frozenset({"deepseek_v3", "deepseek_v4", "qwen3_5", "exaone_moe", "inkling"})


def _row(each: object) -> tuple:
    return each if isinstance(each, tuple) else (each,)


def case(*values: object, quick: bool):
    """A set of parameters, marked `slow` unless it is quick."""
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)


def others_slow(cases: Iterable, *quick: object) -> list:
    """Cases of one parameter, or of several as tuples, of which those given again are quick."""
    cases = list(cases)
    assert set(quick) <= set(cases), f"{set(quick) - set(cases)} are no cases"
    return [case(*_row(each), quick=each in quick) for each in cases]


def each_once(*axes: Iterable) -> list:
    """All combinations of the axes' values, of which as few are quick as the longest axis has: each value is in one."""
    values = [list(axis) for axis in axes]
    sizes = [len(axis) for axis in values]
    quick = {tuple(index % size for size in sizes) for index in range(max(sizes))}
    return [
        case(*(part for axis, at in zip(values, place, strict=True) for part in _row(axis[at])), quick=place in quick)
        for place in product(*map(range, sizes))
    ]


def families(cases: Iterable, quick: Iterable = REPRESENTATIVES) -> list:
    """Cases that are or begin with the name of a family, of which the representatives, or given rows, are quick."""
    quick = set(quick)
    marked = [case(*row, quick=row[0] in quick or row in quick) for row in map(_row, cases)]
    assert any(not each.marks for each in marked), "no case is quick"
    return marked


def most_of(counts: Mapping[str, int]) -> set[tuple[str, int]]:
    """The representatives, each with its largest number of modules: a chain of them walks more paths than one."""
    return {(name, counts[name]) for name in REPRESENTATIVES}


@contextmanager
def _own(fixtures: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    own = dict(fixtures)
    with ExitStack() as patches:
        if "monkeypatch" in own:
            own["monkeypatch"] = patches.enter_context(own["monkeypatch"].context())
        if "tmp_path" in own:
            own["tmp_path"] = own["tmp_path"] / str(number)
            own["tmp_path"].mkdir()
        yield own


def loop(names: str | Sequence[str], cases: Iterable, ids: object = None) -> Callable[[Callable], Callable]:
    """As pytest.mark.parametrize, for many cases that take little: one test, which shows every case that fails.

    Fixtures are made once for all of them, but each case has its own tmp_path, and its monkeypatch is undone. ids: not
    used, so that the two can be exchanged.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [
        dict(zip(keys, [each] if isinstance(names, str) and len(keys) == 1 else each, strict=True)) for each in cases
    ]
    assert rows, "no case"

    def decorated(test: Callable) -> Callable:
        @functools.wraps(test)
        def whole(**fixtures: object) -> None:
            failed: list[BaseException] = []
            skipped: list[BaseException] = []
            for number, row in enumerate(rows):
                try:
                    with _own(fixtures, number) as own:
                        test(**own, **row)
                except pytest.skip.Exception as error:
                    skipped.append(error)
                except (Exception, BaseExceptionGroup, pytest.fail.Exception) as error:
                    error.add_note(f"case: {row}")
                    failed.append(error)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(rows)} cases", failed)
            if skipped:  # no case is skipped in silence
                raise skipped[0]

        signature = inspect.signature(test)
        assert set(keys) <= set(signature.parameters), f"{test.__name__} takes no {keys}"
        left = [value for name, value in signature.parameters.items() if name not in keys]
        whole.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return whole

    return decorated


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but the first case of a test that is marked `one_case` as `more`; slow cases do not count."""
    seen = set()
    for item in items:
        if item.get_closest_marker("one_case") and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker("more")
            seen.add(test)
    others = {"more", "slow", "real", *_ELSEWHERE}
    if many := too_many(item.nodeid for item in items if others.isdisjoint(mark.name for mark in item.iter_markers())):
        raise pytest.UsageError(f"more than {MOST_CASES} cases: {', '.join(many)}; put them into a `loop`")


def too_many(names: Iterable[str]) -> list[str]:
    """Return the functions with more cases than a function should have, by the names of the cases."""
    counts = Counter(name.partition("[")[0] for name in names)
    return [
        test for test, count in counts.items() if count > MOST_CASES and test.rpartition("/")[2] not in SEVERAL_PATHS
    ]


_LEFT_OUT = pytest.StashKey[dict[str, int]]()
_ELSEWHERE = ("gpu", "engines", "browser")  # markers of tests that no target of these runs either


def _target(item: pytest.Item) -> str | None:
    names = {mark.name for mark in item.iter_markers()}
    return next((name for name in ("slow", "more") if name in names and names.isdisjoint(_ELSEWHERE)), None)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count tests that `-m "not more and not slow"` leaves out, by the target that runs them."""
    counts = Counter(map(_target, items))
    del counts[None]
    stash = items[0].config.stash
    stash[_LEFT_OUT] = dict(counts + Counter(stash.get(_LEFT_OUT, {})))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Pass the counts on, from a process of pytest-xdist."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Take the counts of a process of pytest-xdist: each collects, and deselects, all tests."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Say what was left out."""
    for name, count in sorted(config.stash.get(_LEFT_OUT, {}).items()):
        if f"not {name}" in config.option.markexpr:
            terminalreporter.write_line(f"{count} tests were left out; `make test-{name}` runs them")
