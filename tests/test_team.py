"""The team of threads and its barrier under ThreadSanitizer, in a program that is instrumented as a whole."""

import os
import subprocess
from pathlib import Path

import pytest

import nextn.runtime.native

SOURCES = Path(nextn.runtime.native.__file__).parent / "csrc"
RACE = 66  # exit code of a program in which ThreadSanitizer found something


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("team") / "team"
    flags = ["-std=c++20", "-O1", "-g1", "-DNEXTN_DEBUG", "-fsanitize=thread", "-pthread", f"-I{SOURCES}"]
    sources = [SOURCES / "runtime.cpp", Path(__file__).parent / "team.cpp"]
    subprocess.run([os.environ.get("CXX", "g++"), *flags, *sources, "-o", path], check=True)
    return path


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    options = {"TSAN_OPTIONS": f"halt_on_error=1:exitcode={RACE}", "LD_PRELOAD": ""}
    return subprocess.run([program, *words], env=os.environ | options, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_team_orders_all_memory(program):
    completed = run(program)
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.mark.slow
def test_the_sanitizer_sees_what_the_team_does_not_order(program):
    """Calls that are sharded, and yet share memory."""
    completed = run(program, "race")
    assert completed.returncode == RACE
    assert "data race" in completed.stderr
