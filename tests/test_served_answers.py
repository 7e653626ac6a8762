"""Texts by an engine that serves the model, here our own server: `nextn answer` and `nextn measure` with --engine."""

import json
from dataclasses import replace

import pytest
import torch
from fake_engine import FakeEngine
from http_serving import serving

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.decoding.generate import generate
from nextn.engines.answers import AnswerToken, EngineAnswer
from nextn.engines.client import Budget
from nextn.engines.endpoint import Endpoint
from nextn.errors import ConfigError, EngineError
from nextn.model.model import Model
from nextn.serve.engine import ServingEngine
from nextn.serve.options import EngineOptions
from nextn.settings import Sampling, Settings
from nextn.train.self_generated import is_on_policy, served_answers, to_generated

pytestmark = pytest.mark.usefixtures("own_cache")
PROMPTS = ["def add(", "class Node:\n", "import os\n\n", "for i in range(", "return self.", "if x is None:\n"]


@pytest.fixture(scope="module")
def model():
    return Model.load(SHIPPED, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The same model in fp32, so that greedy texts do not depend on who decodes, and prompts."""
    made = tmp_path_factory.mktemp("served")
    model.save(made / "model")
    (made / "few.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS[:3]))
    (made / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    return made


@pytest.fixture(scope="module")
def server(model):
    options = EngineOptions("torch", max_num_seqs=4, max_model_len=256, num_speculative_tokens=3, warmup=False)
    with serving(ServingEngine(model, options), model) as running:
        yield running


def answer(here, folder, out, url, *options, code=0):
    arguments = ("answer", folder / "model", out, "--prompts", folder / "prompts.jsonl", "--engine", url)
    got, _, err = here(*arguments, "--no-chat", "--temperature", 0, "--max-tokens", 16, *options)
    assert got == code, err
    return err


@pytest.mark.more
def test_greedy_answers_are_those_of_our_decoder(folder, server, model, here, tmp_path):
    out = tmp_path / "answers.jsonl"
    answer(here, folder, out, server.url)
    header, *records = map(json.loads, out.read_text().splitlines())
    assert header["engine"] == "tiny"
    assert header["settings"]["sampling"]["temperature"] == 0
    own = generate(model, PROMPTS, Settings(num_speculative_tokens=3, max_tokens=16), backend="torch")
    assert [tuple(record["tokens"]) for record in records] == [result.tokens for result in own]
    assert [record["text"] for record in records] == [result.text for result in own]
    assert bytes(records[0]["prompt"]).decode() == PROMPTS[0]


@pytest.mark.more
def test_interrupted_run_resumes_and_asks_nothing_twice(server, model, tmp_path, monkeypatch):
    """Answers are written in order; those under way at the interruption are asked again, no others."""
    endpoint = Endpoint.open(server.url, Budget())
    asked, real = [], endpoint.answer
    monkeypatch.setattr(endpoint, "answer", lambda request: asked.append(request.prompt) or real(request))
    prompts, settings = [list(each.encode()) for each in PROMPTS], Settings(0, max_tokens=8, eos=())
    runs = [tmp_path / "cut.jsonl", tmp_path / "whole.jsonl"]

    def run(out, **options):
        return served_answers(endpoint, prompts, settings, out, model.tokenizer, concurrency=1, **options)

    for progress in run(runs[0]):
        if progress.answers == 3:
            break
    assert runs[0].read_text().count("\n") == 4
    asked.clear()
    *_, last = run(runs[0])
    assert [bytes(prompt).decode() for prompt in asked] == PROMPTS[3:]
    assert (last.answers, last.total) == (6, 6)
    list(run(runs[1]))
    assert runs[0].read_bytes() == runs[1].read_bytes()
    assert not [*run(runs[0], should_stop=lambda: pytest.fail("nothing is left to ask"))][1:]
    with pytest.raises(ConfigError, match="the answer to another prompt"):
        list(served_answers(endpoint, prompts[::-1], settings, runs[0], model.tokenizer))
    with pytest.raises(ConfigError, match=r"max_tokens = 8 \(now 9\)"):
        list(served_answers(endpoint, prompts, replace(settings, max_tokens=9), runs[0], model.tokenizer))


@pytest.mark.more
def test_stopped_run_keeps_its_answers(server, model, tmp_path):
    endpoint, seen = Endpoint.open(server.url, Budget()), []
    prompts, settings = [list(each.encode()) for each in PROMPTS], Settings(0, max_tokens=8, eos=())
    out = tmp_path / "a.jsonl"
    for progress in served_answers(
        endpoint, prompts, settings, out, model.tokenizer, concurrency=2, should_stop=lambda: len(seen) > 2
    ):
        seen.append(progress.answers)
    assert seen == [0, 1, 2]
    assert out.read_text().count("\n") == 3


@pytest.mark.parametrize("prompt", [{"prompt_ids": (9, 1)}, {"prompt_ids": (2,)}, {"prompt_tokens": 2}])
def test_engine_that_changes_the_prompt(prompt):
    answer = EngineAnswer("a", "length", (AnswerToken("", ord("a")),), **prompt)
    with pytest.raises(EngineError, match="1 token ids were sent, and the engine read"):
        to_generated(answer, [1], _Bytes(), [], where="x")


def test_engine_with_another_tokenizer(tmp_path):
    """Its token ids are not those of its text."""
    engine = FakeEngine()
    try:
        endpoint, prompts = Endpoint.open(engine.url, Budget()), [list(b"abc")]
        with pytest.raises(EngineError, match="not those of this checkpoint's tokenizer"):
            list(served_answers(endpoint, prompts, Settings(0, max_tokens=4), tmp_path / "a.jsonl", byte_tokenizer()))
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("ids", "finish_reason", "expected", "finish"),
    [
        (b"ab", "length", b"ab", "length"),
        (b"ab", "stop", b"abZ", "eos"),  # the engine leaves out what ended the text
        (b"abZ", "stop", b"abZ", "eos"),
        (None, "length", b"ab", "length"),  # no ids: the text is encoded
        (b"ab\xc3", "length", b"ab\xc3", "length"),  # a character cut in two
    ],
)
def test_ids_and_end_of_an_answer(ids, finish_reason, expected, finish):
    tokens = () if ids is None else tuple(AnswerToken("", token) for token in ids)
    text = "ab" if ids is None else ids.rstrip(b"Z").decode(errors="replace")
    answer = EngineAnswer(text, finish_reason, tokens, prompt_tokens=1)
    got = to_generated(answer, [1], _Bytes(), [ord("Z")], where="x")
    assert (bytes(got.tokens), got.finish) == (expected, finish)


class _Bytes:
    """A tokenizer of bytes whose Z is special."""

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}

    def __len__(self):
        return 256

    def decode(self, ids, *, skip_special_tokens):
        raw = bytes(ids)
        return (raw.replace(b"Z", b"") if skip_special_tokens else raw).decode(errors="replace")


def test_training_takes_the_answers_as_on_policy_only_if_declared(folder, server, model, here, tmp_path):
    out = tmp_path / "a.jsonl"
    arguments = ("answer", folder / "model", out, "--prompts", folder / "prompts.jsonl", "--engine", server.url)
    assert here(*arguments, "--no-chat", "--max-tokens", 4)[0] == 0
    is_own, notes = is_on_policy([out], model.trunk, 1.0)
    assert (is_own, "--on-policy says it is of this trunk" in notes[0]) == (False, True)
    assert is_on_policy([out], model.trunk, 1.0, declared=True) == (True, [])


def measure(here, folder, *options):
    code, out, err = here(
        "measure", folder, "--prompts", folder.parent / "few.jsonl", "--max-tokens", 8, "-k", 1, "--json", *options
    )
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_measuring_on_the_texts_of_an_engine(folder, server, here):
    """Streamed and loaded, greedy and sampled; and it serves this model, by its log-probabilities."""
    options = ("--engine", server.url, "--no-chat")
    streamed, loaded = measure(here, folder / "model", *options, "--stream"), measure(here, folder / "model", *options)
    own = measure(here, folder / "model", "--no-chat", "--temperatures", 0)
    assert streamed["figures"] == loaded["figures"]
    assert {each["temperature"] for each in streamed["figures"]} == {0.0, 1.0}
    assert all(origin["is_own"] for origin in streamed["origin"].values())
    assert streamed["engine"]["is_same"]
    assert streamed["engine"]["max_difference"] < 1e-3
    greedy = [
        [each["num_accepted_tokens_per_pos"] for each in record["figures"] if not each["temperature"]]
        for record in (streamed, own)
    ]
    assert greedy[0] == greedy[1]


def test_engine_that_serves_another_model(folder, server, here, tmp_path, model):
    other = Model.load(folder / "model")
    with torch.no_grad():
        for value in other.trunk.decoder.layers.parameters():
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(0)) * value.std() * 0.3)
    other.save(tmp_path / "model")
    (tmp_path / "few.jsonl").write_text((folder / "few.jsonl").read_text())
    record = measure(here, tmp_path / "model", "--engine", server.url, "--no-chat", "--temperatures", 0, "--stream")
    assert not record["engine"]["is_same"], record["engine"]
    assert "serves another model than this checkpoint" in record["warnings"][0]
    assert any("the text is not the model's own" in warning for warning in record["warnings"])


@pytest.mark.slow
def test_engine_with_new_weights_behind_the_same_name(folder, here, tmp_path):
    """Stored answers are used again until the engine's log-probabilities change; then it is asked again."""
    served = Model.load(folder / "model")
    options = EngineOptions("torch", max_num_seqs=4, max_model_len=256, num_speculative_tokens=3, warmup=False)
    states, texts, notes = tmp_path / "states", [], []
    with serving(ServingEngine(served, options), served) as running:
        for change in (1.0, 1.0, 0.1):
            with torch.no_grad():
                served.trunk.lm_head.mul_(change)
            arguments = ("measure", folder / "model", "--prompts", folder / "few.jsonl", "--max-tokens", 8, "-k", 1)
            arguments = (*arguments, "--engine", running.url, "--no-chat", "--temperatures", 1, "--states", states)
            code, _, err = here(*arguments, "--json")
            assert code == 0, err
            (file,) = states.glob("answers-*/1.jsonl")
            texts.append(file.read_text())
            notes.append("serves other weights than in an earlier run" in " ".join(err.split()))
    assert notes == [False, False, True]
    assert texts[0] == texts[1] != texts[2]


def test_options_that_exclude_each_other(folder, here, tmp_path):
    arguments = ("answer", folder / "model", tmp_path / "a", "--prompts", folder / "prompts.jsonl", "--engine", "x:1")
    code, _, err = here(*arguments, "--top-k", 5)
    assert (code, "--top-k and --top-p" in err) == (2, True)
    code, _, err = here("measure", folder / "model", "--engine", "x:1", "--texts", folder / "prompts.jsonl")
    assert (code, "--texts and --engine" in err) == (2, True)


def test_sampled_answers_have_the_settings_of_the_header(server, tmp_path, model):
    endpoint, sampling = Endpoint.open(server.url, Budget()), Sampling(0.7)
    settings = Settings(0, sampling=sampling, max_tokens=4, seed=3, eos=())
    list(served_answers(endpoint, [[1], [2]], settings, tmp_path / "a.jsonl", model.tokenizer))
    header = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    assert header["settings"]["sampling"]["temperature"] == 0.7
