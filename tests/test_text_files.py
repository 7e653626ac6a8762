"""Text files: which of the standard library are read, and in which order."""

import subprocess
from pathlib import Path

import pytest
from corpora import library

from nextn.corpus.text_files import standard_library
from nextn.errors import ConfigError


def test_standard_library():
    """Catches tests, installed packages or build settings in the default corpus, and an order that the disk decides."""
    paths = standard_library()
    root = Path(subprocess.__file__).parent
    names = [path.relative_to(root).as_posix() for path in paths]
    assert names == sorted(names)
    assert {"subprocess.py", "json/decoder.py", "unittest/case.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__", "_bundled"}
    assert not [name for name in names if "_sysconfigdata" in name or "config-" in name]
    size, held = (sum(path.stat().st_size for path in part) for part in (paths, library()[1]))
    assert size > 5e6
    assert 0.02 < held / size < 0.1


def test_library_leaves_out_what_is_not_text(tmp_path, monkeypatch):
    """Catches a source in another encoding that stops the default workload, and tests=True that changes nothing."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "b.py").write_text("b")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "latin.py").write_bytes("# é".encode("latin-1"))
    monkeypatch.setattr("nextn.corpus.text_files.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [path.name for path in standard_library()] == ["a.py"]
    assert [path.name for path in standard_library(tests=True)] == ["a.py", "b.py"]


def test_library_without_sources(tmp_path, monkeypatch):
    """Catches an empty default corpus that is only noticed later."""
    monkeypatch.setattr("nextn.corpus.text_files.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="holds no Python sources"):
        standard_library()
