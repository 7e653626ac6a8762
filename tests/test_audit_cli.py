"""`nextn audit`: exit codes, the table, JSON, hub ids, and how little of a large checkpoint it reads."""

import json
import time
from functools import partial

import pytest
from artifacts import load_json, publish
from big import big
from hub import Hub, only_loopback, own_client  # noqa: F401
from huggingface_hub import constants

from nextn.checkpoint import safetensors_file
from nextn.checkpoint.checkpoint import INDEX
from nextn.checkpoint.safetensors_file import RawTensor, write_json
from nextn.cli import build_app


@pytest.fixture
def nextn(here):
    return partial(here, "audit")


@pytest.fixture
def lost(tmp_path):
    """A checkpoint that save_pretrained took the head of."""

    def change(table):
        for name in [each for each in table if each.startswith("mtp.")]:
            del table[name]

    return publish(tmp_path / "lost model", "qwen3_5", change=change)


def test_clean(nextn, tmp_path):
    """Notes alone must not fail a script that checks a release."""
    folder = publish(tmp_path, "qwen3_5")
    code, out, err = nextn(folder)
    assert (code, err) == (0, "")
    assert "engine-ignores" in out
    assert "clean  " in out
    assert "1 MTP layer declared, 1 stored" in " ".join(out.split())
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"mtp_num_hidden_layers"', '"unknown"'))
    assert "1 MTP layer by default, 1 stored" in " ".join(nextn(folder)[1].split())


def test_findings(nextn, lost):
    """A verdict without the place, the fact, the valid state and the command that mends it."""
    code, out, err = nextn(lost)
    assert (code, err) == (1, "")
    for part in ("error", "head-absent", "config.json: mtp_num_hidden_layers", "no tensor of it is stored", "valid",
                 f"nextn restore '{lost}' --from BASE", "not clean", "1 error"):  # fmt: skip
        assert part in out.replace("\n", "") or part in out


def test_json(nextn, lost):
    """A document that a script cannot read, or that says less than the table."""
    code, out, _ = nextn(lost, "--json")
    record = json.loads(out)
    assert code == 1
    assert (record["family"], record["declared"], record["modules"], record["clean"]) == ("qwen3_5", 1, [], False)
    assert set(record["findings"][0]) == {"rule", "severity", "place", "found", "valid", "fix"}
    assert 0 < record["seconds"] < 60


@pytest.mark.more
def test_twenty_thousand_absent_files(nextn, tmp_path):
    """Time that grows with the square of an index, or a table of as many rows; in JSON, all of them."""
    model = publish(tmp_path, "qwen3_5", shards=2)
    index = load_json(model / INDEX)
    index["weight_map"] |= {f"mtp.x{each}": f"absent-{each:06d}.safetensors" for each in range(20_000)}
    write_json(model / INDEX, index)
    started = time.process_time()
    code, out, _ = nextn(model)
    assert time.process_time() - started < 15
    assert (code, out.count("absent-0")) == (1, 150)
    assert "and 19,951 more; --json lists them all" in out
    assert len(json.loads(nextn(model, "--json")[1])["findings"]) == 20_001


def test_ignore(nextn, lost):
    """A rule that is left out must not decide; a misspelt one must not be passed over."""
    assert nextn(lost, "--ignore", "head-absent")[0] == 0
    code, _, err = nextn(lost, "--ignore", "head-abscent")
    assert (code, err) == (2, "error: ignore head-abscent: no such rule; did you mean head-absent?\n")


def test_family(nextn, tmp_path):
    """A model of one's own with a known head: judged by the family that --family names."""
    folder = publish(tmp_path, "glm4_moe", config={"model_type": "mine"})
    code, _, err = nextn(folder)
    assert code == 2
    assert "try --family NAME" in err
    assert nextn(folder, "--family", "glm4_moe")[0] == 0
    code, _, err = nextn(folder, "--family", "glm")
    assert (code, "unknown family 'glm'; known: axk2" in err) == (2, True)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"\xff" * 8 + b"{}", "not a valid safetensors file"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("config.json", b"{", "not readable as JSON"),
        ("config.json", b"{}", "config.json is absent or has no model_type"),
        ("pytorch_model.bin", None, "no .safetensors file"),
    ],
)
def test_undecidable_files(name, content, says, nextn, tmp_path):
    """A traceback, or exit code 1, where the files cannot be judged."""
    publish(tmp_path, "glm4_moe")
    if content is None:
        (tmp_path / "model.safetensors").rename(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    code, out, err = nextn(tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
    assert "Traceback" not in err


def _point_at(hub, monkeypatch):
    """As HF_ENDPOINT does."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = publish(tmp_path, "glm4_moe", shards=3)
    hub = Hub({file.name: file.read_bytes() for file in folder.iterdir()})
    _point_at(hub, monkeypatch)
    yield hub
    hub.stop()


def test_all_values_or_samples(nextn, tmp_path):
    """A NaN that is in no sample is found in a folder, unless samples are asked for; the report tells which."""

    def change(table):
        old = table["mtp.layers.0.mlp.up_proj.weight"]
        wide = RawTensor(old.dtype, (64, 4096), b"\xc0\xff" + bytes(range(1, 65)) * 8192)
        table["mtp.layers.0.mlp.up_proj.weight"] = RawTensor(wide.dtype, wide.shape, wide.data[: 64 * 4096 * 2])

    folder = publish(tmp_path, "qwen3_5", change=change)
    code, out, _ = nextn(folder, "--ignore", "shape")
    assert (code, "values-nonfinite" in out, ", all values read" in " ".join(out.split())) == (1, True, True)
    code, out, _ = nextn(folder, "--sample", "--ignore", "shape")
    assert (code, "values-nonfinite" in out, ", values sampled" in " ".join(out.split())) == (0, False, True)
    record = json.loads(nextn(folder, "--json")[1])
    assert (record["values_read"], record["bytes_read"] > 64 * 4096 * 2) == ("all", True)
    record = json.loads(nextn(folder, "--json", "--sample")[1])
    assert (record["values_read"], record["bytes_read"]) == ("samples", 0)


@pytest.mark.more
def test_hub(nextn, hub):
    """A hub id gives another result than the folder, or its revision is not passed on; its values are sampled."""
    code, out, _ = nextn("org/model@v1")
    assert (code, ", values sampled" in " ".join(out.split())) == (0, True)
    assert any(path.endswith("/revision/v1") for path, _ in hub.requests)


@pytest.mark.parametrize(
    ("name", "faults", "says"),
    [
        ("listing", [(401, {})], "HTTP 401: the hub requires a token"),
        ("listing", [(404, {"X-Error-Code": "RepoNotFound"})], "HTTP 404: there is no such repository"),
        ("model-00002-of-00003.safetensors", [(429, {})] * 9, "HTTP 429 (5 of 5 tries)"),
        ("model-00002-of-00003.safetensors", [(429, {"Retry-After": "9999"})], "asks to wait 9999 s"),
        ("model-00002-of-00003.safetensors", ["drop"] * 9, "5 of 5 tries"),
        ("config.json", ["drop"] * 9, "5 of 5 tries"),
    ],
)
def test_hub_fails(name, faults, says, nextn, hub):
    """More than one line, a traceback, or a verdict on half a checkpoint, where the hub does not answer."""
    hub.faults[name] = faults
    code, out, err = nextn("org/model")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert says in err


def test_truncated_header(nextn, hub):
    """An upload that broke off inside the header."""
    name = "model-00002-of-00003.safetensors"
    hub.files[name] = hub.files[name][:200]
    code, _, err = nextn("org/model")
    assert (code, err.count("\n"), "truncated" in err) == (2, 1, True)


def test_a_transient_fault_is_not_reported(nextn, hub):
    """One lost answer must not fail an audit of hundreds of requests."""
    hub.faults |= {"model-00001-of-00003.safetensors": ["drop", (503, {})], "config.json": [(429, {})]}
    assert nextn("org/model")[0] == 0


def test_offline(nextn, hub, monkeypatch):
    """A request while offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, _, err = nextn("org/model")
    assert (code, "hf download org/model" in err, hub.requests) == (2, True, [])


@pytest.mark.more
def test_little_is_read(nextn, monkeypatch):
    """An audit that downloads weights: of 12 shards with 1,000 tensors each, less than 1 % and few requests."""
    monkeypatch.setattr(safetensors_file, "FIRST_READ", 64 * 1024)
    files = big(12)
    hub = Hub(files)
    _point_at(hub, monkeypatch)
    code, out, err = nextn("org/model", "--json")
    hub.stop()
    assert err == ""
    assert json.loads(out)["modules"] == [0]
    given = sum(getattr(content, "given", len(content)) for content in files.values())
    assert given < 0.01 * sum(map(len, files.values()))
    shards = [path for path, _ in hub.requests if path.endswith(".safetensors")]
    assert len(hub.requests) < 150
    assert len(shards) >= 12
    assert code in (0, 1)  # its values are all zero


def test_lines_stay_whole_in_a_pipe(nextn, lost, monkeypatch, capsys):
    """A log is searched by line; a terminal's width is not known there."""
    monkeypatch.delenv("COLUMNS", raising=False)
    with pytest.raises(SystemExit):
        build_app("audit")(["audit", str(lost)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) > 100
