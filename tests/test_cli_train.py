"""`nextn train --freeze-trunk`: options that go together, what is said and written, exit codes."""

import json
import shutil
from dataclasses import replace
from functools import partial, partialmethod

import pytest
import torch
from chats import chatty, said
from packed import Case, quantize_folder
from quick import each_once, loop, others_slow
from safetensors.torch import load_file, save_file
from stored import tensors_of
from tiny import build

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.model.model import Model
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.train.config import TrainConfig
from nextn.train.head_task import HeadTask
from nextn.train.run_options import RunOptions

SMALL = [
    *("--set", "steps=3", "--set", "batch_size=2", "--set", "length=32", "--set", "depths=2"),
    *("--set", "eval_batches=1", "--set", "dtype=float32", "--set", "eval_every=2", "--set", "warmup=0"),
]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a model, texts, and what no head can be trained on."""
    folder = tmp_path_factory.mktemp("given")
    model = build("glm4_moe", vocab_size=264, initializer_range=0.02, max_position_embeddings=128)
    for name, tokenizer in (("model", chatty()), ("unmarked", chatty(marked=False)), ("wordless", None)):
        model.tokenizer = tokenizer
        model.save(folder / name)
    model.tokenizer, model.head = byte_tokenizer(), None
    model.save(folder / "headless")
    unknown = shutil.copytree(folder / "headless", folder / "unknown") / "config.json"
    unknown.write_text(json.dumps(json.loads(unknown.read_text()) | {"model_type": "llama"}))
    build("qwen3_5", vocab_size=264).save(folder / "other")
    (folder / "text").mkdir()
    for name in "abc":
        (folder / "text" / f"{name}.txt").write_text(f"{name} is a letter, and so on. " * 40)
    (folder / "empty").mkdir()
    (folder / "empty.jsonl").touch()
    (folder / "short.txt").write_text("hello\n" * 3)
    (folder / "few.txt").write_text("hello you\n" * 30)
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 20)
    (folder / "list.json").write_text("[1]")
    records = {
        "chats": {"messages": said(("user", "hi"), ("assistant", "yes " * 60))},
        "users": {"messages": said(("user", "hi"))},
        "wild": {"prompt": [1, 2, 3], "tokens": [5, 6, 9999] * 20},
        "columns": {"question": "why?"},
    }
    for name, record in records.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(record) + "\n") * 20)
    (folder / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    return folder


@pytest.fixture
def nextn(here):
    return partial(here, "train")


@pytest.mark.more
def test_a_head_is_trained_on_a_packed_trunk(given, tmp_path, nextn):
    """The trunk stays as it is, and the head is written and declared unquantized."""
    shutil.copytree(given / "model", tmp_path / "packed")
    quantize_folder(tmp_path / "packed", Case("pack-quantized", 8, 0), is_random=False)
    how = ["--freeze-trunk", "--from", tmp_path / "packed", "--data", given / "text", *SMALL, "--allow-worse"]
    code, _, err = nextn(tmp_path / "run", *how)
    assert code == 0, err
    old, new = tensors_of(tmp_path / "packed"), tensors_of(tmp_path / "run" / "model")
    trunk = [name for name in old if ".layers.2." not in name]
    assert all(torch.equal(old[name], new[name]) for name in trunk)
    assert any(name.endswith("weight_packed") for name in trunk)
    assert new["model.layers.2.self_attn.q_proj.weight"].is_floating_point()
    findings = audit(Checkpoint.open(tmp_path / "run" / "model")).findings
    assert not [finding for finding in findings if finding.severity == "error"]
    assert Model.load(tmp_path / "run" / "model").head is not None


def test_a_resumed_run_may_turn_off_what_it_wrote():
    """`--set tensorboard=false`, which is not the same as leaving it out."""
    given = (RunOptions(tensorboard=each) for each in (False, None))
    assert [RunOptions(tensorboard=True).resumed(each).tensorboard for each in given] == [False, True]


@pytest.mark.more
def test_a_head_is_trained_and_its_figures_printed(given, tmp_path, nextn):
    how = ["--freeze-trunk", "--from", given / "model", "--data", given / "text", *SMALL, "--set", "accumulate=2"]
    code, out, err = nextn(tmp_path, *how, "--json", "--allow-worse", "--curve")
    assert (code, err) == (0, "")
    reported = json.loads(out)
    assert [len(point["greedy"]["acceptance"]) for point in reported["curve"]] == [*range(1, 9)]
    assert reported["curve"][1]["score"] == pytest.approx(reported["best"]["score"])
    assert reported["model"] == str(tmp_path / "model")
    assert reported["best"]["greedy"]["AL"] >= 1
    assert reported["baseline"]["kv"] == "decode"
    assert Model.load(tmp_path / "model").head is not None
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1, 2, 2, 3, 3]
    code, _, err = nextn(tmp_path, *how)
    assert code == 2
    importing, error = err.splitlines()  # before anything is loaded
    assert importing == "importing torch and transformers ..."
    assert "holds a run already; use --resume" in error


def test_a_fresh_head_alone(given, tmp_path, nextn):
    how = ["--freeze-trunk", "--from", given / "model", "--data", given / "text", "--init-head", "--head-only", *SMALL]
    code, out, err = nextn(tmp_path, *how, "--curve")
    assert code == 0, err
    assert "wrote" in out
    assert "held-out greedy" in err
    rows = [line.split() for line in err[err.index("greedy AL") :].splitlines()[1:]]
    assert [row[0] for row in rows if row] == [str(count) for count in range(1, 9)]
    assert (tmp_path / "head" / "head.safetensors").exists()
    assert not (tmp_path / "model").exists()


def test_a_worse_head_is_exit_code_1(given, tmp_path, nextn):
    """A head that has its trunk's distribution, trained on the labels of a text that the trunk does not know."""
    model = Model.load(given / "model")
    with torch.no_grad():
        # Both say token 7 whatever they read: the trunk by its output head, the head through it.
        for norm in (model.trunk.final_norm, model.head.stack[0].final_norm):
            norm.weight.fill_(0.0)
            norm.weight[0] = 1.0
        model.trunk.output.weight.zero_()
        model.trunk.output.weight[7, 0], model.trunk.output.weight[9, 0] = 20.0, -20.0
        for layer in (model.trunk.decoder.layers[-1], model.head.stack[0].layers[0]):
            layer.mlp.shared_experts.down_proj.weight.zero_()
        model.trunk.embedding.weight[:, 0] = 50.0
        model.head.stack[0].projection.weight.zero_()
        model.head.stack[0].projection.weight[0, 0] = 50.0
    model.save(tmp_path / "model")
    how = ["--freeze-trunk", "--from", tmp_path / "model", "--data", given / "text", *SMALL, "--set", "lr=0.5"]
    how += ["--set", "objective=ce", "--set", "steps=8", "--set", "eval_every=4"]
    code, _, err = nextn(tmp_path / "run", *how)
    assert code == 1, err
    assert "worse than the one it started from" in err
    assert not (tmp_path / "run" / "model").exists()


MODEL, TEXT = ["--freeze-trunk", "--from", "@model"], ["--data", "@text"]


def wrong(options, given, out, nextn):
    """Run it -> what it says. It must be one error, with exit code 2, and leave no result."""
    options = [str(given / each[1:]) if str(each).startswith("@") else each for each in options]
    code, _, err = nextn(out, *options)
    assert code == 2, err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert not (out / "model").exists()
    return err


@loop(
    ("options", "words"),
    [
        (["--freeze-trunk"], "--freeze-trunk needs a trunk"),
        (["--from", "@model"], "error: --from needs --freeze-trunk"),
        (["--init-head"], "error: --init-head needs --freeze-trunk"),
        (["--set", "cache_gb=1"], "error: --set cache_gb needs --freeze-trunk"),
        (["--set", "cache_gb=0"], "cache_gb = 0; expected a finite number of GB above 0"),
        (["--set", "modules=0"], "modules = 0; expected a whole number of MTP layers, at least 1"),
        (["--set", "trained_parts=norms"], "error: --set trained_parts needs --freeze-trunk"),
        ([*MODEL, "--recipe", "code"], "--model and --recipe build a trunk"),
        ([*MODEL, "--set", "modules=2"], "modules = 2"),
        ([*MODEL, *TEXT, *SMALL, "--resume"], "holds no checkpoint"),
        ([*MODEL, *TEXT, *SMALL, "--set", "cache_gb=1e-9"], "the limit is 1e-09 GB"),
        ([*MODEL, *TEXT, "--set", "accumulate=3"], "accumulate = 3; expected a divisor of batch_size = 8"),
        (["--freeze-trunk", "--from", "@other", "--tokenizer", "@model", *TEXT, "--init-head", "--set", "modules=3"],
         "modules = 3; qwen3_5 allows at most 1"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(options, words, given, tmp_path, nextn):
    assert words in wrong(options, given, tmp_path / "run", nextn)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/nowhere", "/nowhere"),
        ("@text", "no .safetensors file"),
        ("@unknown", "model_type 'llama' has no known MTP head"),
        ("@headless", "`nextn train --freeze-trunk --init-head` trains one"),
        ("@wordless", "has no tokenizer; give the folder of one with --tokenizer"),
    ],
)
def test_a_trunk_that_cannot_be_used(source, words, given, tmp_path, nextn):
    assert words in wrong(["--freeze-trunk", "--from", source, *TEXT], given, tmp_path / "run", nextn)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("@nothing.safetensors", "neither a folder, a .safetensors file nor a hub id"),
        ("@headless/model.safetensors", "holds no head of family glm4_moe"),
        ("@other", "a head of family qwen3_5, the target's is glm4_moe"),
    ],
)
def test_a_head_that_does_not_fit(head, words, given, tmp_path, nextn):
    assert words in wrong([*MODEL, *TEXT, "--head", head], given, tmp_path / "run", nextn)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("@empty", "the data is empty"),
        ("@empty.jsonl", "the data is empty"),
        ("@nothing.txt", "nothing.txt: no such file or folder; expected text files"),
        ("@latin.txt", "latin.txt: not UTF-8 text"),
        ("@broken.jsonl", "broken.jsonl:2: not JSON"),
        ("@columns.jsonl", 'columns.jsonl:1: its columns are question; expected "text", "messages"'),
        ("@users.jsonl", "no conversation has an assistant turn"),
        ("@wild.jsonl", "token 9999 is not in the model's vocabulary of 264"),
        ("@short.txt", "length=32: the corpus has only 13 tokens; use more text or a smaller length"),
        ("@few.txt", "length=32: the held-out text, 5 % of the data, has only 21 tokens"),
    ],
)
def test_data_that_cannot_be_used(source, words, given, tmp_path, nextn):
    assert words in wrong([*MODEL, *SMALL, "--data", source], given, tmp_path / "run", nextn)


@pytest.mark.more
def test_a_template_without_marks(given, tmp_path, nextn):
    """Said with the way out, which works."""
    how = ["--freeze-trunk", "--from", "@unmarked", "--data", "@chats.jsonl", *SMALL]
    reported = wrong(how, given, tmp_path / "run", nextn)
    assert "chats.jsonl:1: the tokenizer's chat template does not mark which tokens are the assistant's" in reported
    assert "--all-tokens" in reported
    how[2:5:2] = given / "unmarked", given / "chats.jsonl"
    code, _, err = nextn(tmp_path / "all", *how, "--all-tokens", "--allow-worse")
    assert code == 0, err


@pytest.mark.more
def test_longer_than_the_context(given, tmp_path, nextn):
    """Rows of more tokens than the model was made for are refused; conversations of more are cut, and it is said."""
    reported = wrong([*MODEL, *TEXT, "--set", "length=256"], given, tmp_path / "run", nextn)
    assert "length = 256; the trunk was made for 128 tokens at most" in reported
    how = ["--freeze-trunk", "--from", given / "model", "--data", given / "chats.jsonl", *SMALL, "--allow-worse"]
    code, _, err = nextn(tmp_path, *how)
    assert code == 0, err
    assert "conversations are longer than the model's context of 128 tokens; they are cut into rows" in err


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("steps=many", "steps = 'many'; expected a whole number"),
        ("batch_size=2.5", "batch_size = 2.5; expected a whole number"),
        ("lr=0", "lr = 0; expected 0 < lr < 1"),
        ("clip=-1", "clip = -1; expected a norm of gradients > 0"),
        ("final_lr=-2", "final_lr = -2; expected a share of lr"),
        ("weight_decay=-3", "weight_decay = -3; expected a number >= 0"),
        ("eval_batches=0", "eval_batches = 0; expected a whole number >= 1"),
        ("save_every=-1", "save_every = -1; expected a whole number >= 0"),
        ("compile=3", "compile = 3; expected true or false"),
        ("beta=[1]", "beta = [1]; expected a number or null"),
        ("lam=-1", "lambda values (-1.0,) must be finite and >= 0"),
    ],
)
def test_settings_that_have_no_meaning(setting, words, given, tmp_path, nextn):
    assert words in wrong([*MODEL, *TEXT, *SMALL, "--set", setting], given, tmp_path / "run", nextn)


def test_files_of_settings_and_tokenizers(given, tmp_path, nextn):
    for options, words in (
        (["--config", "@list.json"], "list.json: a JSON list; expected an object of settings"),
        (["--config", "@none.json"], "none.json: not a readable JSON file"),
        (["--set", "steps"], "expected KEY=VALUE"),
        (["--tokenizer", "@text"], "text: no readable tokenizer"),
    ):
        assert words in wrong([*MODEL, *TEXT, *options], given, tmp_path / "run", nextn)


def test_a_number_for_lambda(given):
    """--set lam=0.3 is a number in JSON, "0.3,0.1@50%" a text."""
    assert TrainConfig.from_dict({"steps": 1, "lam": 0.3}).lam == "0.3"


@pytest.mark.more
def test_a_loss_that_is_no_number(given, tmp_path, nextn, monkeypatch):
    """Exit code 1, the batch by its number, what to do; the checkpoint before it goes on."""
    real = HeadTask.loss

    def loss(task, example, lam, **over):
        report = real(task, example, lam, **over)
        steps = len(list(tmp_path.glob("step-*")))
        return replace(report, total=report.total * float("nan")) if steps == 2 else report

    how = ["--freeze-trunk", "--from", given / "model", "--data", given / "text", *SMALL, "--set", "save_every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(HeadTask, "loss", loss)
        code, _, err = nextn(tmp_path, *how)
    assert code == 1
    assert "the loss of step 2 is nan; the cause is batch 2 of seed 0" in err
    assert "try a lower lr" in err
    assert not (tmp_path / "model").exists()
    code, _, err = nextn(tmp_path, *how, "--resume", "--allow-worse")
    assert code == 0, err


def test_a_head_that_is_not_sound_is_named_by_its_file(given, tmp_path, nextn, here):
    """Not by the passing folder in which trunk and head are put together."""
    file = tmp_path / "head" / "mine.safetensors"
    assert here("extract", given / "model", file)[0] == 0
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("enorm.weight"))
    save_file(tensors | {name: tensors[name] * float("nan")}, file)
    err = wrong(["--freeze-trunk", "--from", "@model", "--head", str(file), *TEXT], given, tmp_path / "run", nextn)
    assert f"{file}: the head cannot be loaded" in err
    assert ".start-" not in err


@pytest.fixture
def stopped(given, tmp_path, nextn, monkeypatch):
    """A run that was started from another folder with relative paths, and failed after its second step."""
    real = HeadTask.loss

    def loss(task, example, lam, **over):
        report = real(task, example, lam, **over)
        return replace(report, total=report.total * float("nan")) if len(list(out.glob("step-*"))) == 2 else report

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(HeadTask, "loss", loss)
        patch.chdir(given)
        how = ["--freeze-trunk", "--from", "model", "--data", "text", *SMALL, "--set", "save_every=1", "--allow-worse"]
        assert nextn(out, *how)[0] == 1
    return out


def contents(folder):
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.more
def test_resume_takes_everything_from_the_folder(stopped, given, nextn):
    """No option is needed, what agrees may be given again, and a finished run is left as it is."""
    assert nextn(stopped, "--resume", "--set", "lr=0.001", "--set", "lam=1.0", "--set", "accumulate=2")[0] == 0
    steps = [json.loads(line).get("loss") and json.loads(line)["step"] for line in (stopped / "metrics.jsonl").open()]
    assert [step for step in steps if step] == [1, 2, 3]
    before = contents(stopped)
    code, out, _ = nextn(stopped, "--resume")
    assert code == 0
    assert f"{stopped} is finished: {stopped / 'model'} is its result, and nothing was changed" in out
    code, out, _ = nextn(stopped, "--resume", "--from", given / "model", "--json")
    assert (code, json.loads(out)["model"]) == (0, str(stopped / "model"))
    assert contents(stopped) == before


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "lr=0.5"], "--set lr: the run was started with 0.001, and 0.5 is given now"),
        (["--set", "stepz=4"], "unknown setting 'stepz'"),
        (["--from", "org/other"], '/model", and "org/other" is given now'),
        (["--init-head"], "--init-head: the run was started without it, and true is given now"),
        (["--data", "more"], '/text"], and ["more"] is given now'),
        (["--recipe", "demo"], "--recipe: the run was started without it"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_disagree_with_the_run(options, said, stopped, nextn):
    before = contents(stopped)
    code, _, err = nextn(stopped, "--resume", *options)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert contents(stopped) == before


def test_a_damaged_record_of_options(stopped, nextn):
    (stopped / "run.json").write_text("{")
    code, _, err = nextn(stopped, "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert "resume with the options that the run was started with" in err


@pytest.mark.more
@pytest.mark.parametrize(("dtype", "is_new"), each_once(["float32", "bfloat16"], [True, False]))
def test_streamed_trunk_trains_the_same_head(given, tmp_path, here, monkeypatch, dtype, is_new):
    """The trunk is read once, layer by layer: the same cache of hidden states and the same head, bit for bit."""
    how = ["--freeze-trunk", "--from", given / "model", "--data", given / "text", *SMALL, "--head-only"]
    how += ["--set", f"dtype={dtype}", "--set", "lr=0.5", "--allow-worse", *(["--init-head"] if is_new else [])]
    code, _, complaint = here("train", tmp_path / "loaded", *how, "--set", "cache_gb=1")
    assert code == 0, complaint
    layers, real = [], StreamedTrunk._loaded
    monkeypatch.setattr(StreamedTrunk, "_loaded", lambda self, index: layers.append(index) or real(self, index))
    code, _, complaint = here("train", tmp_path / "streamed", *how, "--stream")
    assert code == 0, complaint
    assert "the trunk is streamed (--stream)" in complaint
    assert layers == [0, 1] * (2 if is_new else 1)
    assert ("the trunk is streamed twice" in complaint) == is_new
    heads, caches = (
        [load_file(next((tmp_path / run).glob(pattern))) for run in ("loaded", "streamed")]
        for pattern in ("head/*.safetensors", "hidden/*.safetensors")
    )
    for one, other in (heads, caches):
        assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    assert not list((tmp_path / "streamed").glob("states*"))


@pytest.mark.more
def test_streamed_training_resumes(given, tmp_path, here, monkeypatch):
    """Interrupted while the trunk is read, and while the head trains: no layer is read twice."""
    how = ["--freeze-trunk", "--from", given / "model", "--data", given / "text", *SMALL, "--head-only", "--stream"]
    layers, real = [], StreamedTrunk._loaded
    monkeypatch.setattr(StreamedTrunk, "_loaded", lambda self, index: layers.append(index) or real(self, index))
    with monkeypatch.context() as patch:
        patch.setattr(HeadTask, "stream_trunk", partialmethod(interrupted, HeadTask.stream_trunk))
        assert here("train", tmp_path / "run", *how, "--allow-worse")[0] == 130
    assert layers == [0]
    assert here("train", tmp_path / "run", *how, "--allow-worse")[0] == 0
    assert layers == [0, 1]


def interrupted(self, real, folder, cache, on_layer):
    def stop(progress):
        raise KeyboardInterrupt

    return real(self, folder, cache, stop)


@pytest.mark.parametrize("num_done", others_slow([1, 2], 1))
def test_making_a_head_of_a_streamed_trunk_resumes(given, tmp_path, here, monkeypatch, num_done):
    """Of a checkpoint without a head; the layers that an interrupted run has done are not run again."""
    how = ["--freeze-trunk", "--from", given / "headless", "--data", given / "text", *SMALL, "--head-only"]
    how += ["--init-head", "--allow-worse"]
    assert here("train", tmp_path / "loaded", *how, "--set", "cache_gb=1")[0] == 0
    layers, real = [], StreamedTrunk._loaded

    def load(self, index):
        layers.append(index)
        if len(layers) == num_done + 1:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(StreamedTrunk, "_loaded", load)
    assert here("train", tmp_path / "run", *how, "--stream")[0] == 130
    assert here("train", tmp_path / "run", *how, "--stream")[0] == 0
    assert layers[num_done + 1 :] == [0, 1, 0, 1][num_done:]
    heads = [load_file(next((tmp_path / run).glob("head/*.safetensors"))) for run in ("loaded", "run")]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0].keys() | heads[1].keys())
