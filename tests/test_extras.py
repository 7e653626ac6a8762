"""The command that installs an optional package names that package, not one called nextn in some index."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from nextn import text_format
from nextn.text_format import install_command


def test_packages_are_those_of_pyproject():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    packages = tomllib.loads(text)["project"]["optional-dependencies"]
    for extra in ("plot", "gguf", "serve", "data", "accelerate"):
        command = install_command(extra)
        assert command.startswith("pip install ")
        assert sorted(each.strip("'") for each in command.split()[2:]) == sorted(packages[extra])


def test_an_extra_of_others_is_written_out():
    command = install_command("train")
    assert "accelerate" in command
    assert "trl" in command
    assert "nextn" not in command


@pytest.mark.parametrize("missing", [PackageNotFoundError, None])
def test_without_metadata_the_sources_are_named(monkeypatch, missing):
    def fails(name):
        if missing:
            raise missing(name)

    monkeypatch.setattr(text_format, "requires", fails)
    assert "'.[serve]' in the folder of nextn's sources" in install_command("serve")
