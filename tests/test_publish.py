"""Publishing on a hub: what the card says, what is uploaded in one commit, and what is refused before."""

import json
import shutil

import pytest
import yaml
from hub import Hub, Uploads, only_loopback, own_client  # noqa: F401
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from test_separate_head import SETTINGS, TEXT, build, start

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import SHIPPED, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import head_fingerprint
from nextn.edit.export import export
from nextn.errors import CheckpointError, ConfigError
from nextn.serve.publish import prepare, upload
from nextn.train.head_run import prepare_head_run

RECORD = {
    "nextn": "0.1.0", "hashes": {"trunk": "0908aef2219812"},
    "settings": {"num_speculative_tokens": 2, "max_tokens": 48},
    "domains": {"code": 16, "chat": 8}, "warnings": ["one warning"],
    "figures": [
        {"domain": domain, "num_speculative_tokens": k, "rule": rule, "temperature": 0.0, "acceptance": [0.75, None],
         "interval_95": [[0.7, 0.8], [None, None]], "mean_acceptance_length": {"value": 2.25}}
        for domain, k, rule in (
            ("all", 2, "greedy"), ("all", 1, "greedy"), ("code", 2, "greedy"), ("all", 2, "match")
        )
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A copy of the checkpoint in the package, with figures of its head."""
    copy = shutil.copytree(SHIPPED, tmp_path / "model")
    head = head_fingerprint(Inventory.of(Checkpoint.open(copy)))
    (copy / "acceptance.json").write_text(json.dumps(RECORD | {"hashes": {**RECORD["hashes"], "head": head}}))
    (copy / "README.md").unlink()
    (copy / ".hidden").write_text("no")
    return copy


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub = Hub({})
    Uploads.on(hub)
    yield hub
    hub.stop()


def made(folder, **options):
    return prepare(folder, "org/model", **{"license": "mit", "base_model": "org/base"} | options)


@pytest.mark.more
def test_card(folder):
    """Figures of all domains at the largest K, the conditions, the license, and commands with the hub id."""
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [tiny]\n---\n# Mine\n\nWords.\n")
    card = prepare(folder, "org/model", base_model="org/base").card
    assert 'license: "apache-2.0"\n' in card
    assert 'base_model: "org/base"\n' in card
    assert 'tags: ["tiny", "multi-token-prediction", "speculative-decoding"]\n' in card
    assert "# Mine\n\nWords." in card
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert rows[2:] == ["| greedy | 0.750 (0.70-0.80) |  | 2.25 |"]
    assert "24 prompts, up to 48 new tokens each" in card
    assert "- one warning" in card
    launch = "python -m sglang.launch_server --model-path org/model"
    for command in ("nextn serve org/model", "vllm serve org/model", launch):
        assert f"\n{command}" in card
    assert str(folder) not in card


@pytest.mark.more
def test_a_card_is_renewed_in_place(folder):
    (folder / "README.md").write_text(made(folder).card + "\nMore.\n")
    again = made(folder).card
    assert again.count("## Serve it") == 1
    assert "More." in again


def test_metadata_stays_as_it_was(folder):
    """Also values that mean no, dates, and what YAML cannot be read from."""
    given = "license: mit\ninference: false\nnew_version:\nreleased: 2026-03-04\nextra_gated_fields: {Name: text}\n"
    (folder / "README.md").write_text(f"---\n{given}---\nWords.\n")
    metadata = yaml.safe_load(made(folder).card.split("---")[1])
    assert metadata["inference"] is False
    assert (metadata["released"], metadata["extra_gated_fields"]) == ("2026-03-04", {"Name": "text"})
    assert "new_version" not in metadata
    for broken in ("a: [1", "- a", "\ta: 1"):
        (folder / "README.md").write_text(f"---\n{broken}\n---\nWords.\n")
        with pytest.raises(ConfigError, match=r"README\.md: not a model card.*correct or remove it"):
            made(folder)


@pytest.mark.more
def test_upload_and_audit_of_the_hub_id(folder, hub):
    """One commit with every file bit for bit, large ones by LFS; the repository is private if asked for."""
    (folder / "README.md").write_text("# Mine\n")
    publication = made(folder)
    assert upload(publication, private=True, endpoint=hub.url).endswith(f"/commit/{hub.open().revision}")
    assert hub.created[0] | {"visibility": "private"} == hub.created[0]
    assert hub.commits == 1
    names = {path.name for path in folder.iterdir()} - {".hidden"}
    assert set(hub.files) == names | {"README.md"}
    assert all(hub.files[name] == (folder / name).read_bytes() for name in names - {"README.md"})
    assert hub.files["README.md"].decode() == publication.card
    assert len(hub.large) == 2
    assert audit(hub.open()).clean
    assert made(folder, license="mit").files.keys() == names - {"README.md"}


def test_without_a_token_it_says_what_to_do(folder, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(CheckpointError, match=r"org/model: not uploaded: .*hf auth login"):
        upload(made(folder), endpoint=hub.url)
    assert hub.commits == 0


def test_what_is_not_published(folder):
    with pytest.raises(ConfigError, match="nolicense: expected a hub id"):
        prepare(folder, "nolicense")
    with pytest.raises(ConfigError, match="its license is not known; give --license"):
        made(folder, license=None)
    record = json.loads((folder / "acceptance.json").read_text())
    (folder / "more.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="2 records of"):
        made(folder)
    assert made(folder, measured=folder / "more.json").files
    for path in (folder / "more.json", folder / "acceptance.json"):
        path.write_text(json.dumps(record | {"hashes": {"head": "0" * 64}}))
    with pytest.raises(CheckpointError, match="figures are of another head"):
        made(folder, measured=folder / "more.json")
    (folder / "acceptance.json").unlink()
    (folder / "more.json").unlink()
    with pytest.raises(ConfigError, match=r"no record of .*--out .*acceptance\.json"):
        made(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    save_file({name: each for name, each in load_file(shard).items() if name != "mtp.fc.weight"}, shard)
    with pytest.raises(CheckpointError, match=r"audit finds .*mtp\.fc"):
        made(folder)


def test_a_head_alone(tmp_path):
    """Its card has the commands of a draft beside its base, whose hub id is needed; no folder of this machine."""
    (tmp_path / "text.txt").write_text(TEXT)
    trunk = build(tmp_path / "trunk", "llama")
    run = prepare_head_run(tmp_path / "run", start(trunk, "mimo"), data=[tmp_path / "text.txt"], settings=SETTINGS)
    list(run.trainer.run())
    draft = export(run.write().parent, tmp_path / "draft", "vllm").path
    record = RECORD | {"hashes": {"head": head_fingerprint(Inventory.of(Checkpoint.open(draft)))}}
    (tmp_path / "figures.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="a head alone, and its base_model is not known; give --base-model"):
        made(draft, measured=tmp_path / "figures.json", base_model=None)
    card = made(draft, measured=tmp_path / "figures.json").card
    assert "A head for org/base that drafts tokens" in card
    assert "\nnextn serve org/base --head org/model\n" in card
    assert '\nvllm serve org/base --speculative-config \'{"method": "mtp", "model": "org/model"' in card
    assert str(tmp_path) not in card


def test_command(folder, here):
    code, out, _ = here("push", folder, "org/model", "--license", "mit", "--base-model", "org/base", "--dry-run")
    assert code == 0
    assert out.startswith('---\nlicense: "mit"\n')
    assert [line.split()[1] for line in out.splitlines() if line.endswith(".safetensors")]
