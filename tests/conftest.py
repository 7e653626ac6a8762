"""Fixtures of several test files.

One torch thread unless NEXTN_TEST_THREADS says more: tiny models are faster so, and two processes share the cores.
"""

import atexit
import gc
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fake_engine import FakeEngine
from tiny import FIXTURES

from nextn.cli import main
from nextn.errors import ConfigError
from nextn.evaluate import decoding_costs
from nextn.model.model import Model
from nextn.runtime.native.build import cache_folder

pytest_plugins = ["quick"]
_THREADS = os.environ.get("NEXTN_TEST_THREADS", "1")
torch.set_num_threads(int(_THREADS))
os.environ["OMP_NUM_THREADS"] = _THREADS  # of processes that tests start
try:
    cache_folder().mkdir(parents=True, exist_ok=True)
except (OSError, ConfigError):  # no home, or none that can be written to: the native runtime is built elsewhere
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="nextn-tests-")  # also of pytest-xdist's processes
    atexit.register(shutil.rmtree, os.environ["TORCH_EXTENSIONS_DIR"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Let the garbage collector skip what imports and collection have made: it took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # models and recordings are made of many objects that stay


@pytest.fixture(scope="session")
def fixture_folder() -> Path:
    return FIXTURES


class Trained(dict):
    """Name of a trained fixture -> the model, loaded when it is first asked for."""

    def __missing__(self, name: str) -> Model:
        return self.setdefault(name, Model.load(FIXTURES / name, dtype=torch.float32))


@pytest.fixture(scope="session")
def trained() -> Trained:
    """The trained fixtures, in fp32. Shared: a test that changes a model changes a copy."""
    return Trained()


@pytest.fixture(scope="session", autouse=True)
def fixed_bandwidth():
    """Of the machine, instead of copying 256 MiB."""
    with patch.object(decoding_costs, "copy_bandwidth", lambda device: 5e9):
        yield


@pytest.fixture
def own_cache(monkeypatch, tmp_path) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def here(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process, as one of its own imports torch -> exit code, stdout, stderr."""

    def call(*args, columns=160):
        monkeypatch.setattr(sys, "argv", ["nextn", *map(str, args)])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def command() -> Callable[..., tuple[int, str, str]]:
    """As `here`, for fixtures of a module."""

    def call(*args):
        out, err = io.StringIO(), io.StringIO()
        given = patch.object(sys, "argv", ["nextn", *map(str, args)]), patch.dict(os.environ, COLUMNS="160")
        with given[0], given[1], redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, out.getvalue(), err.getvalue()

    return call


@pytest.fixture
def engine():
    """Makes fake engines, and stops them."""
    made = []

    def make(*faults, **options):
        made.append(FakeEngine(*faults, **options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's own client of the `server` of a module."""
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
