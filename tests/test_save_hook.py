"""Keeping the head: load -> fine-tune -> save_pretrained no longer loses it, in full and with PEFT."""

import json
import shutil

import peft
import pytest
import torch
from artifacts import inventory_of
from quick import others_slow
from tiny import prompt
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.provenance import Provenance, head_fingerprint
from nextn.edit.save_hook import KeepHead, keep_head
from nextn.errors import CheckpointError
from nextn.model.model import Model


@pytest.fixture(params=others_slow(["glm_one", "qwen"], "qwen"))
def base(request, fixture_folder, tmp_path):
    return shutil.copytree(fixture_folder / request.param, tmp_path / "base")


def assert_kept(folder, base):
    """The head of `base`, bit for bit, beside the trunk of `folder`; nothing for the audit to mend."""
    assert head_fingerprint(inventory_of(folder)) == head_fingerprint(inventory_of(base))
    report = audit(Checkpoint.open(folder))
    assert report.clean, report.findings
    Model.load(folder)


class Phrases(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        tokens = torch.tensor(prompt(16, seed=index, vocab_size=40))
        return {"input_ids": tokens, "labels": tokens}


def trainer(model, out, callbacks) -> Trainer:
    settings = TrainingArguments(
        str(out), max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        learning_rate=1e-3, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    return Trainer(model=model, args=settings, train_dataset=Phrases(), callbacks=callbacks)


def test_without_the_hook_it_is_lost(base, tmp_path):
    """If transformers kept the head by itself, the tests below would prove nothing."""
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "out")
    found = inventory_of(tmp_path / "out")
    assert (found.declared, found.modules) == (1, ())
    assert "head-absent" in {finding.rule for finding in audit(found.checkpoint).findings}


def test_the_base_is_that_of_the_loaded_commit(base, monkeypatch):
    """The head of a later commit beside this one's trunk."""
    model, opened = AutoModelForCausalLM.from_pretrained(base), Checkpoint.open
    asked = []
    monkeypatch.setattr(Checkpoint, "open", lambda source, **_: asked.append(source) or opened(base))
    model.config._name_or_path, model.config._commit_hash = "org/model", "0" * 40
    keep_head(model)
    assert asked[0] == f"org/model@{'0' * 40}"


@pytest.mark.one_case
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_save_pretrained(base, tmp_path, shard):
    """A whole head behind save_pretrained, single file and sharded, twice into one folder."""
    model = AutoModelForCausalLM.from_pretrained(base)
    keep_head(model)
    for _ in range(2):
        model.save_pretrained(tmp_path / "out", max_shard_size=shard)
        assert_kept(tmp_path / "out", base)
        assert len(list((tmp_path / "out").glob("model-mtp*"))) == 1, "the head of the first save is removed"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_saved_over_its_own_source(base):
    """The save overwrites the only copy of the head."""
    before = head_fingerprint(inventory_of(base))
    model = AutoModelForCausalLM.from_pretrained(base)
    keep_head(model)
    keep_head(model)
    for _ in range(2):
        model.save_pretrained(base)
        assert head_fingerprint(inventory_of(base)) == before
    assert [path.name for path in base.parent.iterdir()] == ["base"], "nothing is left beside it"


@pytest.mark.more
def test_trainer(base, tmp_path):
    """Every checkpoint of a Trainer run and its last save hold the head; the record names the stale trunk."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    run = trainer(model, tmp_path / "run", [KeepHead()])
    run.train()
    run.save_model(tmp_path / "final")
    for folder in (tmp_path / "run" / "checkpoint-1", tmp_path / "run" / "checkpoint-2", tmp_path / "final"):
        assert_kept(folder, base)
        record = Provenance.read(Checkpoint.open(folder))
        assert record is not None
        assert record.trained_with != record.beside, "the trunk was trained on"


@pytest.mark.slow
def test_trainer_resumes(base, tmp_path):
    """A checkpoint that holds more than the trunk must still be one that Trainer goes on from, to the same bits."""
    ends = []
    for out, starts in (("whole", [None]), ("parts", [1, None])):
        for stop in starts:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            run = trainer(model, tmp_path / out, [KeepHead(base)])
            run.args.max_steps = stop or 2
            run.args.lr_scheduler_type = "constant"
            run.train(resume_from_checkpoint=(tmp_path / out / "checkpoint-1").exists())
        ends.append(model.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_peft_merge(base, tmp_path):
    """Adapters are saved as they are; the merged model has its head again."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    run = trainer(lora, tmp_path / "run", [KeepHead(base)])
    run.train()
    lora.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))
    merged = lora.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_kept(tmp_path / "merged", base)
    old, new = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (base, tmp_path / "merged"))
    assert [name for name in old if not torch.equal(old[name], new[name])], "the adapters were merged"


def test_other_ranks_write_nothing(base, tmp_path):
    """A second process that writes the same files at the same time destroys them."""
    model = AutoModelForCausalLM.from_pretrained(base)
    keep_head(model)
    model.save_pretrained(tmp_path / "out", is_main_process=False)
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_pushed_with_the_head(base, tmp_path, monkeypatch):
    """push_to_hub=True uploads what is on disk before a hook that runs after it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    keep_head(model)
    pushed = []
    monkeypatch.setattr(type(model), "push_to_hub", lambda self, repo_id, **options: pushed.append((repo_id, options)))
    model.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="org/tuned", token="t")
    assert pushed == [("org/tuned", {"token": "t"})]
    assert_kept(tmp_path / "out", base)


def test_refused_at_once(base, tmp_path):
    """A base without a head found out after three days of training."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "lost")
    with pytest.raises(CheckpointError, match="head"):
        keep_head(model, tmp_path / "lost")
    built = type(model)(model.config)
    built.config._name_or_path = ""
    with pytest.raises(CheckpointError, match="give keep_head the checkpoint"):
        keep_head(built)


def test_config_keeps_its_promise(base, tmp_path):
    """The count in config.json, whichever field transformers drops."""
    model = AutoModelForCausalLM.from_pretrained(base)
    keep_head(model)
    model.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert inventory_of(base).family.num_modules(config) == 1
