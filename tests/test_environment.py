"""The report for bug reports: complete on this machine, and never an error where something is missing."""

import json
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from nextn import __version__, environment
from nextn.runtime.native import abi

SECTIONS = {"nextn", "python", "packages", "extras", "system", "processor", "memory", "gpus", "backend"}


def test_report_of_this_machine(here):
    code, out, _ = here("env", "--json")
    report = json.loads(out)
    assert code == 0
    assert set(report) == SECTIONS
    assert report["nextn"] == __version__
    assert all(isinstance(version, str) for version in report["packages"].values())
    assert report["processor"]["cores"] >= 1
    assert report["processor"]["threads"] == torch.get_num_threads()
    assert report["memory"]["total_bytes"] > 2**28
    assert report["backend"]["name"] in ("native", "torch")
    assert report["backend"]["library"].endswith(".so")


def test_text_has_one_line_for_each_value(here):
    code, out, _ = here("env")
    names = [line.split()[0] for line in out.splitlines()]
    assert code == 0
    assert len(set(names)) == len(names)
    assert {"nextn", "packages.torch", "backend.name", "backend.reason", "memory.total"} <= set(names)


def test_missing_packages_are_reported(monkeypatch, here):
    """Neither torch nor any package's metadata: each section says so, and the command succeeds."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(metadata, "requires", missing)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "nextn.runtime.native.abi")
    report = environment.report()
    assert set(report["packages"].values()) == {None}
    for value in (report["extras"], report["gpus"], report["backend"], report["processor"]["torch_capability"]):
        assert value.startswith("unknown: ")
    code, out, _ = here("env")
    assert code == 0
    assert "not found" in out


def test_an_arm_processor_is_named_by_its_part(monkeypatch):
    """Its /proc/cpuinfo has no model name."""
    text = "Features\t: fp asimd bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **options: text)
    processor = environment.report()["processor"]
    assert processor["name"] == "CPU implementer 0x41, CPU part 0xd0c"
    assert processor["instruction_sets"] == ["asimd", "bf16"]


def test_no_processor_file_and_no_memory(monkeypatch):
    """A system without /proc and sysconf."""
    monkeypatch.setattr(environment.Path, "exists", lambda self: False)
    monkeypatch.delattr(environment.os, "sysconf")
    report = environment.report()
    assert report["processor"]["instruction_sets"] == []
    assert report["memory"].startswith("unknown: ")


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "clang++-99")
    backend = environment.report()["backend"]
    assert (backend["name"], backend["compiler"]) == ("torch", None)
    assert "clang++-99" in backend["reason"]


def test_nothing_is_built(monkeypatch, tmp_path):
    """With an empty cache the report says that the runtime will be built; it does not build it, and leaves no file."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(abi, "build_library", lambda *args: pytest.fail("the report builds"))
    backend = environment.report()["backend"]
    assert not backend["is_built"]
    assert "builds the native runtime" in backend["reason"]
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_cannot_be_loaded(monkeypatch):
    status = abi.load() and abi.build_status()
    monkeypatch.setattr(abi, "status_of", lambda *args: replace(status, library=Path(__file__)))
    backend = environment.report()["backend"]
    assert (backend["name"], backend["is_built"]) == ("torch", True)
    assert "cannot be loaded" in backend["reason"]


def test_a_gpu_is_the_default_device(monkeypatch):
    monkeypatch.setattr("nextn.devices.resolve_device", lambda: torch.device("cuda"))
    backend = environment.report()["backend"]
    assert (backend["device"], backend["name"]) == ("cuda", "torch")
    assert "--device cpu" in backend["reason"]
