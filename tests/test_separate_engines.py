"""Heads for unchanged trunks of models without a family, trained here and run by real engines.

`make test-engines`. vLLM runs the draft that `nextn export` writes beside the trunk, llama.cpp the file that it writes
of both; what they saw is put into the JSON file that NEXTN_ENGINES_OUT names.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines.referee import Ours, compared, counts_of
from test_real_engines import KS, NEAR, TOKENS, agrees, bench, put  # noqa: F401  (fixtures)

from nextn.audit_rules import audit
from nextn.audit_rules.gguf import audit_gguf
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.conformance import build, canary_model
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus, encoder, eos_id
from nextn.decoding.generate import generate
from nextn.edit.adopt import adopt
from nextn.edit.export import export
from nextn.evaluate.conventions import Variant
from nextn.model.model import Model
from nextn.settings import Settings
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
TRUNKS = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA31},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    # Heads of 128 where hidden_size / heads, which the draft has, is 64.
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
}
STEPS, HEAD_STEPS = 300, 150
MIN_RATE = 0.15  # of the first draft; a head that learned nothing has about 0


def trained_trunk(folder, name):
    """A small trunk that has learned the canaries' language, as transformers saves it: without any head."""
    tokenizer = byte_tokenizer()
    texts = canary_model.documents(2048, 4 * build._CONFIG.length - 1, seed=0)
    corpus = Corpus.from_texts(texts, encoder(tokenizer), eos_id(tokenizer))
    torch.manual_seed(0)
    shape = {**canary_model._SIZES, "num_attention_heads": 2, **TRUNKS[name]}
    model = Model.build({**shape, "num_mtp_layers": 1}, tokenizer=tokenizer)
    build.spread_norm_weights(model, 0)  # so that the states before and after the final norm are far apart
    config = replace(build._CONFIG, steps=STEPS, depths=0, matrix_lr=0.006)
    with tempfile.TemporaryDirectory() as run:
        for _ in Trainer(JointTask(model, corpus, config), out=Path(run)).run():
            pass
    del model.trunk.model.config.num_mtp_layers
    model.trunk.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained_head(run, trunk, *options):
    """`nextn train --init-head` on the trunk's own language; returns what it wrote."""
    text = run.with_suffix(".jsonl")
    lines = (json.dumps({"text": each}) for _, each in canary_model.documents(512, 255, seed=5))
    text.write_text("\n".join(lines))
    settings = [f"steps={HEAD_STEPS}", "batch_size=16", "length=64", "depths=4", "eval_every=0", "dtype=float32"]
    command = ["train", str(run), "--freeze-trunk", "--from", str(trunk), "--init-head", "--data", str(text), "--json"]
    command += [*options, *(part for each in settings for part in ("--set", each))]
    done = subprocess.run([sys.executable, "-m", "nextn", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return Path(json.loads(done.stdout)["model"])


PROMPTS = [tuple(each.encode()) for each in canary_model.prompts(16, seed=0)]


@pytest.fixture(scope="module", params=TRUNKS)
def trunk(request, tmp_path_factory):
    return trained_trunk(tmp_path_factory.mktemp("trunks") / request.param, request.param)


def test_vllm_runs_the_draft_beside_the_unchanged_trunk(trunk, bench, put, tmp_path):  # noqa: F811
    """Same texts for K = 0 to 4, and counts equal to ours; with the state before the final norm ours are others."""
    draft = trained_head(tmp_path / "run", trunk, "--layout", "mimo").parent
    made = export(draft, tmp_path / "draft", "vllm", num_speculative_tokens=3)
    assert audit(Checkpoint.open(made.path)).clean
    speculative, overrides = (json.loads(made.command[made.command.index(each) + 1]) for each in
                              ("--speculative-config", "--hf-overrides"))  # fmt: skip
    ours = Ours.of(str(trunk), PROMPTS, tokens=TOKENS, num_speculative_tokens=max(KS), head=made.path)
    options = {"draft": speculative["model"], "overrides": overrides}
    served = bench.served("vllm", trunk, ours.prompts, KS, TOKENS, **options)
    record = compared(ours, "vllm", served.plain, served.seen)
    wrong = ours.scores([Variant("hidden", "before the final norm", facts={"hidden": "pre"})])
    others = [counts_of(ours.counts(wrong, k, overruns=True), k) for k in KS]
    put("drafts", trunk.name, {"versions": served.versions, "overrides": overrides, **record, "prenorm_counts": others})
    agrees(record)
    theirs = [row["counts"] for row in record["by_drafts"]]
    assert record["by_drafts"][0]["engine"][0] > MIN_RATE, "a head that learned nothing proves nothing"
    assert all(a != b for a, b in zip(theirs, others, strict=True))


def test_transformers_runs_the_head_inside(trunk, bench, put, tmp_path):  # noqa: F811
    """`use_mtp` with one more line: same texts, and counts equal to ours."""
    head = trained_head(tmp_path / "run", trunk, "--head-only").parent
    made = export(head, tmp_path / "model", "transformers")
    ours = Ours.of(str(made.path), PROMPTS, tokens=TOKENS, num_speculative_tokens=1)
    served = bench.served("transformers", made.path, ours.prompts, (1,), TOKENS)
    record = compared(ours, "transformers", served.plain, served.seen)
    put("inside", trunk.name, {"versions": served.versions, **record})
    agrees(record)
    assert record["by_drafts"][0]["engine"][0] > MIN_RATE


# What a GGUF takes: the trunk's state after the final norm in hy_v3's layout, before it in step35's.
LAYOUTS = {"llama": ("step35",), "qwen2": ("step35",), "qwen3": ("step35", None)}
OTHER_STATE = {"pre": "post", "post": "pre"}


def test_llamacpp_runs_trunk_and_head_in_one_file(trunk, bench, put, tmp_path):  # noqa: F811
    """Same texts for K = 0 to 4, and counts equal to ours; with the state on the norm's other side ours are others."""
    for layout in LAYOUTS[trunk.name]:
        options = ("--head-only",) if layout is None else ("--layout", layout)
        head = trained_head(tmp_path / f"run-{layout}", trunk, *options).parent
        made = export(head, tmp_path / f"{layout}.gguf", "llama.cpp")
        assert audit_gguf(made.path).clean
        ours = Ours.of(str(trunk), PROMPTS, tokens=TOKENS, num_speculative_tokens=max(KS), head=head)
        served = bench.served("llama.cpp", trunk, ours.prompts, KS, TOKENS, gguf=made.path)
        record = compared(ours, "llama.cpp", served.plain, served.seen)
        hidden = OTHER_STATE[ours.model.family.hidden]
        wrong = ours.scores([Variant("hidden", hidden, facts={"hidden": hidden})], leads=True)
        others = [counts_of(ours.counts(wrong, k, overruns=False), k) for k in KS]
        put("gguf", f"{trunk.name} {layout or 'hy_v3'}", {"versions": served.versions, "flags": served.flags, **record,
                                                          "other_state_counts": others})  # fmt: skip
        agrees(record)
        theirs = [row["counts"] for row in record["by_drafts"]]
        assert record["by_drafts"][0]["engine"][0] > MIN_RATE
        assert all(a != b for a, b in zip(theirs, others, strict=True))


ADOPTED = {"vllm": KS, "transformers": (1,), "llama.cpp": KS}


@pytest.fixture(scope="module")
def adopted(trunk, tmp_path_factory):
    """The trunk in GLM-4.5's layout, with a head that was trained in it."""
    folder = tmp_path_factory.mktemp("adopted")
    adopt(trunk, folder / "trunk")
    model = trained_head(folder / "run", folder / "trunk").rename(folder / trunk.name)
    assert audit(Checkpoint.open(model)).clean
    return model


@pytest.mark.parametrize("engine", ADOPTED)
def test_one_checkpoint_in_every_engine(engine, trunk, adopted, bench, put):  # noqa: F811
    """Texts of the trunk that was adopted, and our counts but for near ties; llama.cpp has not Llama 3.1's rope."""
    ours = Ours.of(str(adopted), PROMPTS, tokens=TOKENS, num_speculative_tokens=max(ADOPTED[engine]))
    plain = Model.load(trunk, dtype=torch.float32, need_head=False)
    settings = Settings(num_speculative_tokens=0, max_tokens=TOKENS)
    texts = [tuple(each.tokens) for each in generate(plain, [*map(list, PROMPTS)], settings, backend="torch")]
    assert ours.texts == texts
    served = bench.served(engine, adopted, ours.prompts, ADOPTED[engine], TOKENS)
    record = compared(ours, engine, served.plain, served.seen)
    put("adopted", f"{trunk.name} {engine}", {"versions": served.versions, **record})
    if (trunk.name, engine) == ("llama", "llama.cpp"):
        assert any(each["gap"] > NEAR for each in record["plain"]["gaps"])
        return
    agrees(record, most_flipped=2)
    assert record["by_drafts"][0]["engine"][0] > MIN_RATE
