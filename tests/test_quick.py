"""What `make test` leaves out, it says, and `make test-more` or `make test-slow` runs it."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from quick import REPRESENTATIVES, case, each_once, families, loop, others_slow, too_many
from tiny import CONFIGS

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def test_one():
    pass

@pytest.mark.more
def test_more():
    pass

@pytest.mark.one_case
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2, 3, 4])
def test_cases(number):
    pass

@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3])
def test_numbers(number):
    pass

@pytest.mark.gpu
@pytest.mark.slow
def test_elsewhere():
    pass
"""


def recipes():
    """Makefile target -> the expression of its pytest's markers."""
    text = (ROOT / "Makefile").read_text()
    shared = re.search(r"^HERE := (.*)$", text, re.MULTILINE)[1]
    found = re.findall(r"^([a-z-]+): .*\n\t.*pytest -m (\w+|\"[^\"]*\")", text, re.MULTILINE)
    return {target: expression.strip('"').replace("$(HERE)", shared) for target, expression in found}


def test_functions_with_too_many_cases_are_named():
    names = [f"tests/test_x.py::test_sizes[{size}]" for size in range(9)]
    assert too_many(names) == ["tests/test_x.py::test_sizes"]
    broken = {
        file: [f"tests/{file}::test_broken[{size}]" for size in range(9)] for file in ("test_x.py", "test_verify.py")
    }
    assert too_many(broken["test_x.py"]) == ["tests/test_x.py::test_broken"]
    assert too_many(names[1:]) == too_many(broken["test_verify.py"]) == []


def test_every_marker_is_run_by_a_target():
    """`make test`, `test-more` and `test-slow` differ by their markers alone; others have their own targets."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    names = {each.partition(":")[0] for each in declared}
    quick, more, slow = (set(recipes()[target].split(" and ")) for target in ("test", "test-more", "test-slow"))
    assert quick - more == {"not more"}
    assert more - quick == {"more"}
    assert (more - slow, slow - more) == ({"more", "not slow"}, {"slow"})
    assert {each.removeprefix("not ") for each in quick} == names - {"one_case"}
    for each in declared:
        target = re.search(r"\(make (.*)\)", each)[1]
        assert f"\n{target}: " in (ROOT / "Makefile").read_text(), each
    for file, targets in (
        (".ci/run", ("test", "test-more")),
        (".github/workflows/ci.yml", ("test", "test-more", "test-slow")),
    ):
        commands = (ROOT / file).read_text()
        assert all(re.search(rf"make {target}$", commands, re.MULTILINE) for target in targets), file


@pytest.mark.more
@pytest.mark.parametrize(
    ("markers", "processes", "passed", "said"),
    [
        ("not more and not slow", ("-p", "xdist", "-n", "2"), 2, [("3", "more"), ("3", "slow")]),
        ("not slow", (), 5, [("3", "slow")]),
        ("slow and not gpu", (), 3, []),
    ],
)
def test_what_is_left_out_is_reported(markers, processes, passed, said, tmp_path):
    """Of the tests that each target runs, also where other processes left them out."""
    (tmp_path / "test_numbers.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "quick",
        *processes,
        "--rootdir",
        tmp_path,
        "-m",
        markers,
        tmp_path,
    ]
    env = {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)
    assert f"{passed} passed" in done.stdout, done.stdout + done.stderr
    reported = re.findall(r"^(\d+) tests were left out; `make test-(\w+)` runs them$", done.stdout, re.MULTILINE)
    assert reported == said


def test_representatives_are_families():
    assert set(CONFIGS) >= REPRESENTATIVES
    marked = families(CONFIGS)
    assert {each.values[0] for each in marked if not each.marks} == REPRESENTATIVES
    assert [each.values for each in families([("exaone_moe", 2), ("mellum", 1)])] == [("exaone_moe", 2), ("mellum", 1)]


def test_each_value_is_once_in_a_quick_case():
    marked = each_once("ab", [(1, 2), (3, 4), (5, 6)], [None])
    quick = [each.values for each in marked if not each.marks]
    assert quick == [("a", 1, 2, None), ("a", 5, 6, None), ("b", 3, 4, None)]
    assert len(marked) == 6


def test_a_loop_shows_every_case_that_fails():
    seen = []

    @loop("a, b", [(1, 1), (1, 2), (2, 3)])
    @loop("c", "xy")
    def test(fixture, a, b, c):
        seen.append((fixture, a, b, c))
        assert a == b
        if c == "y":
            pytest.fail("no")

    assert list(inspect.signature(test).parameters) == ["fixture"]
    with pytest.raises(BaseExceptionGroup, match="3 of 3 cases") as caught:
        test(fixture=0)
    assert len(seen) == 6
    first, second, _ = caught.value.exceptions
    assert [len(first.exceptions), len(second.exceptions)] == [1, 2]
    assert second.__notes__ == ["case: {'a': 1, 'b': 2}"]
    with pytest.raises(AssertionError, match="takes no"):
        loop("d", [1])(test)


def test_a_case_that_is_skipped_hides_no_other():
    def test(act):
        act()

    def fail():
        raise ValueError

    with pytest.raises(BaseExceptionGroup, match="2 of 3 cases"):
        loop("act", [fail, pytest.skip, fail])(test)()
    seen = []
    with pytest.raises(pytest.skip.Exception):
        loop("act", [pytest.skip, lambda: seen.append(1)])(test)()
    assert seen == [1]


def test_names_that_are_no_cases_are_refused():
    with pytest.raises(AssertionError, match="'c'"):
        others_slow(["a", "b"], "c")
    with pytest.raises(AssertionError, match="no case"):
        families(["mellum"])
    assert not case(1, quick=True).marks
    assert [mark.name for mark in case(1, quick=False).marks] == ["slow"]
