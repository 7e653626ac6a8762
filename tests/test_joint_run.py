"""Joint runs: the recipes, the loss of their parts, what each stage makes, how it resumes, and what is refused."""

import json
from itertools import count

import pytest
import torch
from chats import chatty, said
from test_cli import TINY
from tiny import build, refrains

from nextn.data.byte_tokenizer import byte_tokenizer, vocab_size
from nextn.data.corpus import Corpus
from nextn.data.sources import load_corpora
from nextn.errors import ConfigError
from nextn.evaluate.decoding_costs import draft_bytes, step_bytes
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.train.config import TrainConfig
from nextn.train.evaluation import BestTracker
from nextn.train.joint_run import prepare_joint_run
from nextn.train.joint_task import JointTask
from nextn.train.recipes import by_name, held_out_prompts, write_prompts

SMALL = {
    "steps": 3,
    "batch_size": 2,
    "length": 32,
    "depths": 1,
    "compile": False,
    "eval_batches": 1,
    "dtype": "float32",
}
REFINE = {"steps": 4, "depths": 3, "warmup": 0, "eval_every": 0}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "text").mkdir()
    for index in range(24):
        (folder / "text" / f"{index}.txt").write_text(f"line {index} of the text\n" * 40)
    return folder


@pytest.fixture
def of(given, tmp_path):
    """A run in tmp_path/out with some settings changed."""

    def make(**settings):
        files = {"data": [given / "text"], "model": given / "config.json"}
        return prepare_joint_run(tmp_path / "out", recipe="demo", **files, settings=SMALL | settings)

    return make


def went(run, model, *, stop=lambda: False):
    """Run the stages -> (folder, last step) of each that began; the next one begins only where one is over."""
    reported = []
    for trainer in run.stages(model):
        trainer.resume()
        list(trainer.run(stop))
        reported.append((trainer.folder.path.name, trainer.step))
        if not trainer.is_over:
            break
    return reported


def head_of(folder):
    return Model.load(folder).head.state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.more
def test_the_second_stage_trains_the_head_alone(of, tmp_path):
    """Catches a second stage that moves the trunk, starts from another head, or is not what is written."""
    run = of(refine=REFINE)
    assert went(run, tmp_path / "model") == [("out", 3), ("head", 4)]
    joint, made = tmp_path / "out" / "joint", tmp_path / "model"
    assert same(Model.load(joint).trunk.state_dict(), Model.load(made).trunk.state_dict())
    assert same(head_of(joint), run.trainer.task.model.head.state_dict())
    assert not same(head_of(joint), head_of(made))
    assert Model.load(made).tokenizer is not None
    lines = [json.loads(line) for line in (tmp_path / "out" / "head" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 4]
    assert len(lines[1]["loss"]) == 3


@pytest.mark.more
def test_the_second_stage_reads_the_same_batches(of, tmp_path):
    """What its settings do not say is the first stage's; what they say stands."""
    run = of(refine=REFINE | {"length": 24}, seed=5)
    first, second = (trainer.config for trainer in consumed(run, tmp_path / "model"))
    assert (second.batch_size, second.seed, second.dtype, second.compile) == (2, 5, "float32", False)
    assert (first.length, second.length) == (32, 24)


def consumed(run, model):
    for trainer in run.stages(model):
        list(trainer.run())
        yield trainer


@pytest.mark.more
def test_one_stage_writes_no_other_folder(of, tmp_path):
    assert went(of(), tmp_path / "model") == [("out", 3)]
    assert Model.load(tmp_path / "model").head is not None
    assert not (tmp_path / "out" / "joint").exists()


@pytest.mark.parametrize("refine", [None, {"steps": 0}, {}])
def test_left_out(of, refine):
    assert of(refine=refine).refine is None


def test_a_trunk_alone_has_no_head_to_refine(of):
    assert of(refine=REFINE, depths=0).refine is None


@pytest.mark.more
def test_only_the_recipes_own_model_has_its_second_stage(given, tmp_path):
    """Catches steps of the recipe's behind a user's own model that nobody asked for."""

    def second(model=None, **settings):
        text = {"data": [given / "text"], "settings": SMALL | settings}
        return prepare_joint_run(tmp_path / "own", recipe="code", model=model, **text).refine

    assert second() is not None
    assert second(refine=None) is None
    assert second(given / "config.json") is None
    assert second(given / "config.json", refine={"steps": 2}) is not None


@pytest.mark.parametrize(
    ("refine", "words"),
    [
        (7, "refine = 7; expected settings such as refine.steps=300, or null"),
        ({"step": 3}, "unknown setting 'step'"),
        ({"steps": 3, "objective": "l2"}, "objective = 'l2'; expected one of ce, kl"),
        ({"steps": 3, "length": 900}, "length = 900; the model's context holds 256"),
    ],
)
def test_settings_are_refused_before_the_first_stage(of, refine, words):
    with pytest.raises(ConfigError, match=words):
        of(refine=refine)


@pytest.mark.more
def test_a_worse_head_is_not_written(of, tmp_path, monkeypatch):
    """The first stage's head is what is left then, bit for bit."""
    monkeypatch.setattr(BestTracker, "is_worse", True)
    went(of(refine=REFINE), tmp_path / "model")
    assert same(head_of(tmp_path / "out" / "joint"), head_of(tmp_path / "model"))


@pytest.mark.parametrize("stops", [2, 6], ids=["in the first stage", "in the second"])
@pytest.mark.slow
def test_interrupted_in_either_stage(of, tmp_path, stops):
    """What a resumed run writes is what one that nobody stopped writes, to the last bit."""
    asked = count(1)
    began = went(of(refine=REFINE), tmp_path / "model", stop=lambda: next(asked) > stops)
    assert len(began) == (1 if stops == 2 else 2)
    assert not (tmp_path / "model").exists()
    went(of(refine=REFINE), tmp_path / "model")
    (tmp_path / "out").rename(tmp_path / "before")
    went(of(refine=REFINE), tmp_path / "whole")
    resumed, whole = (Model.load(tmp_path / name) for name in ("model", "whole"))
    assert same(resumed.trunk.state_dict(), whole.trunk.state_dict())
    assert same(resumed.head.state_dict(), whole.head.state_dict())


def test_the_command(given, tmp_path, here):
    files = ["--data", given / "text", "--model", given / "config.json"]
    small = [word for key, value in SMALL.items() for word in ("--set", f"{key}={json.dumps(value).strip(chr(34))}")]
    refine = [word for key, value in REFINE.items() for word in ("--set", f"refine.{key}={value}")]
    code, out, err = here("train", tmp_path / "run", *files, *small, *refine, "--json")
    assert code == 0, err
    reported = json.loads(out)
    assert reported["model"] == str(tmp_path / "run" / "model")
    assert reported["best_step"] == 4
    assert len(reported["best"]["greedy"]["acceptance"]) == 3
    code, out, err = here("train", tmp_path / "run", *files, *small, *refine)
    assert code == 2
    assert "holds a run already; use --resume" in err
    code, out, err = here("train", tmp_path / "run", *files, *small, *refine, "--resume")
    assert code == 0, err
    assert f"{tmp_path}/run is finished: {tmp_path}/run/model is its result, and nothing was changed" in out
    code, _, err = here("train", tmp_path / "run", "--resume", "--set", "refine.lr=0.9")
    assert code == 2
    assert "--set refine.lr: the run was started with" in err
    code, _, err = here("train", tmp_path / "other", *files, *small, "--set", "steps.x=1")
    assert code == 2
    assert "--set 'steps.x=1': steps is 3, not a group of settings" in err


CONFIG = TrainConfig(steps=6, batch_size=2, length=24, depths=3, dtype="float32")


@pytest.fixture(scope="module")
def corpus():
    return refrains(12, 60, seed=1)


def task(corpus, config=CONFIG):
    return JointTask(build("glm4_moe", initializer_range=0.02), corpus, config)


def test_shares_of_two_ranks_add_up(corpus):
    """With the counts of both as denominator, totals and gradients of two ranks' rows sum to the whole batch's."""
    subject = task(corpus)
    whole = subject.loss(subject.example(0), 0.3)
    whole.total.backward()
    gradient = subject.named["head.stack.0.projection.weight"].grad.clone()
    shares = [subject.example(0, rank=rank, world=2) for rank in (0, 1)]
    counts = sum(subject.counts(share) for share in shares)
    assert torch.equal(counts, whole.counts)
    subject.model.head.zero_grad()
    parts = [subject.loss(share, 0.3, denominator=counts) for share in shares]
    for part in parts:
        part.total.backward()
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    torch.testing.assert_close(subject.named["head.stack.0.projection.weight"].grad, gradient)


def test_depths_without_a_head(corpus):
    model = build("glm4_moe")
    model.head = None
    with pytest.raises(ConfigError, match="depths = 3, but the model has no head"):
        JointTask(model, corpus, CONFIG)


SIZE = -(-vocab_size(byte_tokenizer()) // 8) * 8


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "share"), [("demo", 0.2), ("tiny", 0.12), ("code", 0.1), ("hybrid", 0.25)])
def test_a_draft_step_reads_little(name, share):
    """What makes drafting pay: the head of `code` reads less than a tenth of what its trunk does."""
    recipe = by_name(name, vocab_size=SIZE)
    model = Model.build(recipe.model, tokenizer=byte_tokenizer())
    assert draft_bytes(model.head) < share * step_bytes(model.trunk)
    assert recipe.train.length < recipe.model["max_position_embeddings"]


def test_an_unknown_recipe():
    with pytest.raises(ConfigError, match="known: demo, tiny, code, hybrid"):
        by_name("nonsense", vocab_size=SIZE)


def test_prompts_for_bench_are_read_back(tmp_path):
    """What training leaves beside the model is what `nextn bench --prompts` takes."""
    file = tmp_path / "held_out.py"
    file.write_text("".join(f"line {number} of a text\n" for number in range(400)))
    corpus = Corpus.from_files([file], byte_tokenizer())
    write_prompts(tmp_path / "prompts.jsonl", corpus)
    found = read_prompts(tmp_path / "prompts.jsonl")
    assert len(found) == 24
    assert {(len(prompt.text), prompt.domain) for prompt in found} == {(128, "held-out")}


CHATS = [{"messages": said(("user", f"ask {number}"), ("assistant", f"{number} it is"))} for number in range(400)]


def write_chats(path):
    path.write_text("".join(json.dumps(each) + "\n" for each in CHATS))
    return path


@pytest.mark.more
def test_prompts_of_conversations_end_where_the_assistant_begins(tmp_path):
    """Catches held-out figures measured on pieces that no user would send."""
    _, held = load_corpora([write_chats(tmp_path / "a.jsonl")], chatty(), held_out=0.3)
    found = held_out_prompts(held, count=3)
    assert len(found) == 3
    assert all(bytes(prompt).startswith(b"<u>ask") and bytes(prompt).endswith(b"<a>") for prompt in found)


@pytest.mark.more
def test_training_counts_answers_alone(tmp_path):
    """Catches a mask that does not reach the loss: labels of a step are the assistant's tokens, or all with
    all_tokens."""
    chatty().save_pretrained(tmp_path / "tokenizer")
    options = {"data": [str(write_chats(tmp_path / "a.jsonl"))], "recipe": "demo", "tokenizer": tmp_path / "tokenizer"}
    small = {"batch_size": 2, "length": 48, "compile": False, "depths": 1}
    counts = {}
    for all_tokens in (False, True):
        task = prepare_joint_run(tmp_path / "run", **options, settings=small, all_tokens=all_tokens).trainer.task
        example = task.example(0)
        batch = example.batch
        counts[all_tokens] = task.loss(example, lam=1.0).counts.tolist()
        wanted = batch.label_mask[:, 1:] & (batch.documents[:, 1:] == batch.documents[:, :-1])
        assert counts[all_tokens][0] == wanted.sum()
    assert 0 < counts[False][0] < counts[True][0]


def test_rows_longer_than_the_context(tmp_path):
    """Catches a run whose positions the model was not made for."""
    with pytest.raises(ConfigError, match=r"length = 5000; the model's context holds 4096"):
        prepare_joint_run(tmp_path, recipe="demo", settings={"length": 5000})
