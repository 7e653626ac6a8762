"""The build of the native runtime: builders that are killed, damaged libraries, folders and compilers that fail."""

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick import others_slow
from tiny import build

from nextn.errors import ConfigError
from nextn.runtime import backend
from nextn.runtime.native import abi
from nextn.runtime.native import build as native_build
from nextn.runtime.native.build import build_library, cache_folder, is_intact

SOURCES = 4
BUILDER = "import sys; from pathlib import Path\n"
BUILDER += "from nextn.runtime.native.build import build_library; build_library(*map(Path, sys.argv[1:]))"
BUILDING, WAITING = "building the native runtime (once, about 40 s)", "waiting for another process that builds"


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A stand-in runtime and a slow compiler, which counts its runs in runs.txt and waits while `hold` exists."""
    folder, compiler = tmp_path / "csrc", tmp_path / "compiler"
    folder.mkdir()
    for place in range(SOURCES):
        (folder / f"part{place}.cpp").write_text(f'extern "C" int part{place}() {{ return {place}; }}\n')
    waits = f'while [ -e "{tmp_path}/hold" ]; do sleep 0.05; done'
    compiler.write_text(f'#!/bin/sh\necho run >> "{tmp_path}/runs.txt"\nsleep 0.1\n{waits}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return folder


def start(sources: Path, cache: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", BUILDER, sources, cache], stderr=subprocess.PIPE, text=True)


def works(library: Path) -> bool:
    return is_intact(library) and [getattr(ctypes.CDLL(str(library)), f"part{n}")() for n in range(SOURCES)] == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.slow
def test_builders_that_are_killed(sources, tmp_path):
    """At ten moments, each on the remains of the last: none waits for a dead one, none loads a damaged library."""
    cache = tmp_path / "cache"
    for moment in range(10):
        builder = start(sources, cache)
        assert builder.stderr.readline().startswith(BUILDING)
        time.sleep(0.04 * moment)
        builder.send_signal(signal.SIGKILL if moment % 2 else signal.SIGTERM)
        builder.communicate(timeout=60)
    builder = start(sources, cache)
    builder.communicate(timeout=60)
    assert builder.returncode == 0
    assert works(build_library(sources, cache))
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".lock", ".so"]


@pytest.mark.more
@pytest.mark.parametrize("count", others_slow([2, 8], 2))
def test_builders_at_once(sources, tmp_path, count):
    builders = [start(sources, tmp_path / "cache") for _ in range(count)]
    said = [builder.communicate(timeout=60)[1] for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * count
    assert sum(BUILDING in lines for lines in said) == 1
    assert all(lines.count("\n") == 1 for lines in said if WAITING in lines or BUILDING in lines)
    assert (tmp_path / "runs.txt").read_text().count("run") == SOURCES + 1
    assert works(build_library(sources, tmp_path / "cache"))


@pytest.mark.more
def test_who_comes_during_a_build_says_that_it_waits(sources, tmp_path):
    (tmp_path / "hold").touch()
    first = start(sources, tmp_path / "cache")
    assert first.stderr.readline() == f"{BUILDING} in {tmp_path / 'cache'}\n"
    second = start(sources, tmp_path / "cache")
    assert second.stderr.readline().startswith(WAITING)
    (tmp_path / "hold").unlink()
    for builder in (first, second):
        assert builder.communicate(timeout=60)[1] == ""
        assert builder.returncode == 0


DAMAGES = ["truncated", "empty", "garbage", "one bit", "record", "no record", "gone"]


@pytest.mark.more
@pytest.mark.parametrize("damage", others_slow(DAMAGES, "truncated", "one bit", "record"))
def test_a_damaged_library_is_built_again(sources, tmp_path, damage, caplog):
    library = build_library(sources, tmp_path)
    content, record = library.read_bytes(), library.with_suffix(".json")
    library.unlink()  # not in place: this process may have it loaded
    flipped = content[:100] + bytes([content[100] ^ 1]) + content[101:]
    contents = {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "garbage": b"\0" * len(content),
        "one bit": flipped,
    }
    if damage != "gone":
        library.write_bytes(contents.get(damage, content))
    if damage == "record":
        record.write_text("[]")
    if damage == "no record":
        record.unlink()
    assert not is_intact(library)
    caplog.clear()
    assert works(build_library(sources, tmp_path))
    assert [BUILDING in line for line in caplog.messages] == [True]
    assert works(build_library(sources, tmp_path))
    assert len(caplog.messages) == 1


def test_a_whole_library_needs_neither_compiler_nor_room(sources, tmp_path, monkeypatch):
    """As in a container whose image brings it."""
    library = build_library(sources, tmp_path)
    library.with_suffix(".lock").unlink()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_library(sources, tmp_path) == library
    assert not library.with_suffix(".lock").exists()


def unwritable(tmp_path: Path) -> Path:
    if os.geteuid() == 0:  # may write everywhere but where there is nothing to write on
        return Path("/proc/nextn")
    tmp_path.chmod(0o500)
    return tmp_path / "cache"


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


@pytest.mark.parametrize(
    "folder", [unwritable, a_file, lambda path: a_file(path) / "below", lambda path: path / ("x" * 300)]
)
def test_impossible_folders(sources, tmp_path, folder):
    with pytest.raises(ConfigError, match=r"cannot be stored in .*; set TORCH_EXTENSIONS_DIR to a writable folder"):
        build_library(sources, folder(tmp_path))


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        (
            "no-such-compiler -x",
            "needs the compiler no-such-compiler, which is not on the PATH: install a C\\+\\+20 compiler",
        ),
        ("false", "could not be built: false exited with status 1$"),
        ("'g++ -O2", 'CXX is "\'g\\+\\+ -O2": No closing quotation; expected a compiler'),
        (
            "g++ -include no-such-header.h",
            r"could not be built: g\+\+ exited with status 1: .*no-such-header\.h: No such file",
        ),
        (
            "sh -c 'echo out.s: No space left on device >&2; exit 1'",
            "could not be built: No space left on device in .*cache; free some",
        ),
        ("true", "cannot be stored in"),  # exits with 0 without writing a file
    ],
)
def test_compilers_that_fail(sources, tmp_path, monkeypatch, compiler, words):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ConfigError, match=words):
        build_library(sources, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_without_a_runtime_auto_is_plain(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(a_file(tmp_path)))
    monkeypatch.setattr(backend, "load", abi.load.__wrapped__)
    model = build("mimo_v2")
    engine = backend.make_backend(model.trunk, model.head)
    assert engine.name == "torch"
    assert "cannot be stored in" in engine.reason
    with pytest.raises(ConfigError, match="cannot run this model: the native runtime cannot be stored in"):
        backend.make_backend(model.trunk, model.head, name="native")


@pytest.mark.more
def test_the_instruction_set(sources, tmp_path, monkeypatch):
    """A library of its own for each; the portable ones do not depend on the processor."""
    given = ["", "native", *(["x86-64"] if platform.machine() == "x86_64" else [])]
    libraries = []
    for march in given:
        monkeypatch.setenv("NEXTN_NATIVE_MARCH", march)
        libraries.append(build_library(sources, tmp_path))
        assert works(libraries[-1])
    assert libraries[0] == libraries[1]
    assert len(set(libraries)) == len(libraries) - 1
    monkeypatch.setattr(native_build, "_processor", lambda: "another")
    assert (build_library(sources, tmp_path) in libraries) == (march == "x86-64")


@pytest.mark.parametrize(
    ("machine", "march", "words"),
    [
        (
            "x86_64",
            "x86-64-v3",
            r"'x86-64-v3', and this processor has no abm, avx, .*movbe, popcnt: set x86-64, or unset it",
        ),
        ("x86_64", "x86-64-v9", "'x86-64-v9': it can be native, x86-64, x86-64-v3, or unset for native"),
        ("aarch64", "x86-64", "'x86-64', and this processor is aarch64: unset it"),
    ],
)
def test_instruction_sets_that_are_not_here(sources, tmp_path, monkeypatch, machine, march, words):
    monkeypatch.setenv("NEXTN_NATIVE_MARCH", march)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(native_build, "_processor", lambda: f"{machine} sse2 sse4_2")
    with pytest.raises(ConfigError, match=words):
        build_library(sources, tmp_path)
    assert not (tmp_path / "runs.txt").exists()


@pytest.mark.more
def test_a_build_of_each_kind_is_a_library_of_its_own(sources, tmp_path, monkeypatch):
    """With its flags; what is no source changes nothing."""
    monkeypatch.delenv("NEXTN_NATIVE_BUILD", raising=False)
    libraries = [build_library(sources, tmp_path)]
    (sources / "README.md").write_text("Not compiled.")
    for kind in ("release", "debug"):
        monkeypatch.setenv("NEXTN_NATIVE_BUILD", kind)
        libraries.append(build_library(sources, tmp_path))
        assert works(libraries[-1])
        assert ("-DNEXTN_DEBUG" in native_build._flags()) == (kind == "debug")
    assert libraries[0] == libraries[1] != libraries[2]
    monkeypatch.setenv("NEXTN_NATIVE_BUILD", "fast")
    with pytest.raises(ConfigError, match="'fast': it can be release, bf16, debug, asan, tsan, or unset for release"):
        build_library(sources, tmp_path)


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/nextn")
