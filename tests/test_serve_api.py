"""The API of `nextn serve`, as the `openai` client uses it: a real engine on a tiny model, and a scripted one."""

import asyncio
import json
from dataclasses import replace
from datetime import datetime

import httpx2
import openai
import pytest
import torch
from chats import chatty
from http_serving import error_of, events, serving, wait_for
from scripted_engine import EOS, TEXT, ScriptedEngine

import nextn
from nextn.checkpoint.checkpoint import SHIPPED
from nextn.decoding.generate import generate
from nextn.engines.answers import EngineRequest
from nextn.engines.ask import counters_in_answers
from nextn.engines.client import Budget
from nextn.engines.endpoint import Endpoint
from nextn.model.model import Model
from nextn.serve.api import create_app
from nextn.serve.engine import ServingEngine
from nextn.serve.options import EngineOptions, ServerOptions
from nextn.serve.request_model import parse_request
from nextn.serve.schemas import ChatRequest
from nextn.settings import Settings

PROMPT = "def add("


@pytest.fixture(scope="module")
def model():
    # In bfloat16, torch rounds sums by the number of rows, so a near tie may end another way beside other sequences.
    loaded = Model.load(SHIPPED, dtype=torch.float32)
    return replace(loaded, tokenizer=chatty())


@pytest.fixture(scope="module")
def server(model):
    engine = ServingEngine(
        model, EngineOptions("torch", max_num_seqs=4, max_model_len=256, num_speculative_tokens=3, warmup=False)
    )
    with serving(engine, model) as server:
        yield server


@pytest.fixture(scope="module")
def scripted(model):
    with serving(ScriptedEngine(), model, reference_rates=(0.9, 0.5)) as server:
        yield server


@pytest.fixture(scope="module")
def scripted_client(scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def text(model):
    """What the model says without a server."""
    (result,) = generate(model, [PROMPT], Settings(num_speculative_tokens=3, max_tokens=24), backend="torch")
    return result.text


def test_completion_is_what_the_model_says(client, text):
    """Of a text, and of its token ids."""
    ids = list(PROMPT.encode())
    for prompt in (PROMPT, ids):
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=24, temperature=0, extra_body={"return_token_ids": True}
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (text, "length")
        assert (choice.prompt_token_ids, bytes(choice.token_ids).decode()) == (ids, text)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 24)
        assert answer.usage.total_tokens == len(PROMPT) + 24
        assert (answer.object, answer.model) == ("text_completion", "tiny")


def test_stops_end_the_text(client, text):
    """Before a stop string and a stop token, neither of which is shown."""
    stop, token = text[7:11], text.encode()[6]
    for fields, end in (({"stop": [stop]}, stop), ({"extra_body": {"stop_token_ids": [token]}}, chr(token))):
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, **fields)
        found = answer.choices[0]
        assert (found.text, found.finish_reason) == (text[: text.index(end)], "stop"), fields


def test_streamed_completion_is_the_same(client, text):
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


@pytest.mark.more
def test_usage_in_every_event(client):
    """As vLLM's clients ask for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == 24


@pytest.mark.more
def test_several_prompts_with_several_choices(client, text):
    prompts = [PROMPT, "class "]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=24, temperature=0)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] == text
    assert texts[2] == texts[3] != text
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 4 * 24


@pytest.mark.more
def test_the_same_seed_gives_the_same_text(client):
    def texts(seed, n=2):
        answer = client.completions.create(model="tiny", prompt="class ", n=n, max_tokens=9, temperature=1, seed=seed)
        return [choice.text for choice in answer.choices]

    first = texts(5)
    assert texts(5) == first
    assert first[0] != first[1]
    assert texts(2**63 - 1) == texts(2**63 - 1) != first
    assert texts(-7, n=1) == texts(-7, n=1)


@pytest.mark.more
def test_chat(client, model):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12, temperature=0)
    prompt = "<s>Be brief.<u>Hi<a>"
    (expected,) = generate(model, [prompt], Settings(num_speculative_tokens=3, max_tokens=12), backend="torch")
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)
    stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected.text


def test_fields_of_other_servers(server, client, model):
    """A token limit of -1, the assistant's message continued, thinking; HEAD and the version."""
    messages = [{"role": "user", "content": "an adder"}, {"role": "assistant", "content": PROMPT}]
    more = {"continue_final_message": True, "return_token_ids": True, "reasoning_effort": "none"}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=-1, temperature=0, stop=["\n"], extra_body=more
    )
    assert model.tokenizer.decode(answer.choices[0].prompt_token_ids).endswith(PROMPT)
    assert answer.system_fingerprint == f"nextn-{nextn.__version__}"
    completion = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, extra_body={"max_completion_tokens": 3}
    )
    assert completion.usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        client.chat.completions.create(model="tiny", messages=messages[:1], extra_body={"continue_final_message": True})
    assert httpx2.get(f"{server.url}/version").json() == {"version": nextn.__version__}
    assert httpx2.head(f"{server.url}/health").status_code == 200


def test_thinking_is_a_variable_of_the_template():
    messages = [{"role": "user", "content": "why"}]
    for fields, variables in (
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, {"enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"enable_thinking": False, "x": 1},
        ),
    ):
        assert parse_request(ChatRequest, {"messages": messages, **fields}).template_variables == variables


def test_models(client):
    assert [entry.id for entry in client.models.list()] == ["tiny"]
    entry = client.models.retrieve("tiny")
    assert entry.max_model_len == 256
    assert (entry.type, entry.display_name) == ("model", "tiny")  # as Anthropic's client reads it
    assert datetime.fromisoformat(entry.created_at).timestamp() == entry.created
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_tokenize_and_detokenize(server):
    def post(path, body):
        status, _, data = server.post(path, body)
        assert status == 200
        return json.loads(data)

    tokens = post("/tokenize", {"prompt": "Hé", "return_token_strs": True})
    assert tokens == {"count": 3, "max_model_len": 256, "tokens": [72, 195, 169], "token_strs": ["H", "Ã", "©"]}
    assert post("/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "Hé"}
    # llama.cpp's names, as `nextn verify` sends them to every engine.
    assert post("/tokenize", {"content": "a", "add_special": True, "model": "tiny"})["tokens"] == [97]
    chat = post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert bytes(chat["tokens"]) == b"<u>a<a>"


def test_rounds_and_metrics_of_a_stream(server, text):
    """What the page shows: every token by how it came, and the acceptance of the whole."""
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": True, "num_speculative_tokens": 2}
    status, _, data = server.post("/v1/completions", body | {"stream_options": {"include_rounds": True}})
    assert status == 200
    *chunks, last = events(data)
    rounds = [one for chunk in chunks for one in chunk["choices"][0]["rounds"]]
    assert rounds[0]["drafts"] == []
    for one in rounds:
        assert one["tokens"][: one["num_accepted"]] == one["drafts"][: len(one["tokens"])][: one["num_accepted"]]
        assert len(one["texts"]) == len(one["tokens"])
        assert len(one["draft_texts"]) == len(one["drafts"]) <= 2
    assert "".join(part for one in rounds for part in one["texts"]) == text
    elapsed = [chunk["choices"][0]["elapsed_s"] for chunk in chunks]
    assert elapsed == sorted(elapsed)
    assert elapsed[0] == 0 < elapsed[-1]
    drafted = [one for one in rounds if one["drafts"]]
    metrics = last["metrics"]["spec_decode"]
    assert metrics["num_drafts"] == len(drafted) > 3
    assert metrics["num_draft_tokens"] == sum(len(one["drafts"]) for one in drafted)
    assert metrics["num_accepted_tokens"] == sum(one["num_accepted"] for one in drafted)
    assert metrics["num_accepted_tokens_per_pos"][0] == sum(one["num_accepted"] > 0 for one in drafted)
    assert sum(metrics["acceptance_histogram"]) == len(drafted)
    assert metrics["mean_acceptance_length"] == 1 + metrics["num_accepted_tokens"] / len(drafted)
    assert last["usage"]["completion_tokens"] == 24


def test_plain_decoding_by_request(server):
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "num_speculative_tokens": 0, "return_metrics": True}
    document = json.loads(server.post("/v1/completions", body)[2])
    assert document["metrics"]["spec_decode"]["num_drafts"] == 0
    assert document["metrics"]["spec_decode"]["mean_acceptance_length"] is None
    # vLLM's form of a request without drafts; load generators refuse null there.
    assert document["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [0],
        "num_draft_tokens": 0,
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_spec_tokens": 0,
    }


@pytest.mark.one_case
@pytest.mark.parametrize("temperature", [0, 1])
def test_min_tokens(client, temperature):
    """No stop token before them: without, this text ends at its first `r`."""
    stops = [ord("r"), 2**31 - 1]  # one beyond the vocabulary does nothing
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": temperature, "seed": 3}

    def generated(**extra):
        answer = client.completions.create(
            **options, extra_body={"stop_token_ids": stops, "return_token_ids": True, **extra}
        )
        return answer.choices[0]

    free = generated()
    assert free.finish_reason == "stop"
    first = len(free.token_ids)
    assert free.token_ids[-1] == ord("r")
    longer = generated(min_tokens=first + 4)
    assert ord("r") not in longer.token_ids[: first + 4]
    assert longer.token_ids[: first - 1] == free.token_ids[:-1]
    assert len(longer.token_ids) > first + 4
    assert longer.token_ids == generated(min_tokens=first + 4, num_speculative_tokens=0).token_ids


@pytest.mark.more
def test_our_own_client_reads_answers_and_metrics(server):
    """`nextn verify`, `diagnose` and `measure` use this client for every engine."""
    endpoint = Endpoint.open(server.url, Budget())
    assert endpoint.served.name == "tiny"
    assert endpoint.served.context == 256
    assert endpoint.answer(EngineRequest(PROMPT, 2)).ids
    assert endpoint.capabilities.extra_fields
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_metrics": True}
    document = endpoint.client.json("/v1/completions", body)
    (counters,) = [counters_in_answers([type("Answer", (), {"raw": document})])]
    assert counters.num_drafts == document["metrics"]["spec_decode"]["num_drafts"]
    assert list(counters.per_position) == document["metrics"]["spec_decode"]["num_accepted_tokens_per_pos"]
    assert "nextn:spec_decode_num_drafts_total" in endpoint.metrics()
    endpoint.close()


def test_several_byte_characters_arrive_whole(scripted_client):
    stream = scripted_client.completions.create(model="tiny", prompt="x", max_tokens=48, stream=True)
    parts = [chunk.choices[0].text for chunk in stream]
    assert "".join(parts) == (TEXT * 9).encode()[:48].decode(errors="replace")
    assert not any("\ufffd" in part for part in parts[:-1])


def test_logprobs_of_completions(scripted_client):
    answer = scripted_client.completions.create(model="tiny", prompt="x", max_tokens=7, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["A", " ", "c", "a", "f", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.token_logprobs == [-0.5] * 7
    assert logprobs.top_logprobs[0] == {"A": -0.5, "a": -1.0}
    assert logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    spelled = scripted_client.completions.create(
        model="tiny", prompt="x", max_tokens=2, logprobs=1, extra_body={"return_tokens_as_token_ids": True}
    )
    assert spelled.choices[0].logprobs.tokens == ["token_id:65", "token_id:32"]
    stream = scripted_client.completions.create(model="tiny", prompt="x", max_tokens=7, logprobs=0, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset] == logprobs.text_offset


@pytest.mark.one_case
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_echo_scores_the_prompt(model, backend):
    """As lm-eval asks for likelihoods: a prompt longer than a block of the prefix cache, twice, and short ones."""
    engine = ServingEngine(model, EngineOptions(backend, max_model_len=256, num_speculative_tokens=3, warmup=False))
    prompts = [list((PROMPT * 20).encode()[:size]) for size in (150, 1, 20)]
    trunk = engine.backend.trunk
    with torch.inference_mode():
        logits = trunk.read(trunk(torch.tensor([prompts[2]]), trunk.cache(1))).logits[0]
    expected = logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(prompts[2])[1:, None])[:, 0].tolist()
    with serving(engine, model) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        options = {"model": "tiny", "prompt": prompts, "temperature": 0, "logprobs": 1, "echo": True}
        first, again, none = (client.completions.create(**options, max_tokens=new).choices for new in (1, 1, 0))
        stream = list(client.completions.create(**options | {"prompt": prompts[0]}, max_tokens=1, stream=True))
        plain = client.completions.create(model="tiny", prompt=PROMPT, echo=True, max_tokens=0, n=2)
    for choice, twice, bare, prompt in zip(first, again, none, prompts, strict=True):
        text, scores = bytes(prompt).decode(), choice.logprobs
        assert choice.text.startswith(text)
        assert (len(choice.text), bare.text) == (len(text) + 1, text)
        assert scores.tokens[:-1] == list(text)
        assert scores.token_logprobs[0] is scores.top_logprobs[0] is None
        assert scores.text_offset == list(range(len(text) + 1))
        tops = [max(top.values()) for top in scores.top_logprobs[1:]]
        assert all(top >= one for top, one in zip(tops, scores.token_logprobs[1:], strict=True))
        assert twice.logprobs == scores
        assert bare.logprobs.token_logprobs == scores.token_logprobs[:-1]
        assert (choice.finish_reason, bare.finish_reason) == ("length", "length")
    assert first[2].logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
    # A token has the same score wherever its prompt is cut into chunks.
    assert first[2].logprobs.token_logprobs[1:20] == pytest.approx(first[0].logprobs.token_logprobs[1:20], abs=1e-4)
    assert "".join(chunk.choices[0].text for chunk in stream) == first[0].text
    scores = [score for chunk in stream for score in chunk.choices[0].logprobs.token_logprobs]
    assert scores == first[0].logprobs.token_logprobs
    assert [choice.text for choice in plain.choices] == [PROMPT] * 2
    assert plain.choices[0].logprobs is None


def test_logprobs_of_chat(scripted_client):
    messages = [{"role": "user", "content": "x"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 7, "logprobs": True, "top_logprobs": 3}
    content = scripted_client.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.token for entry in content][:3] == ["A", " ", "c"]
    assert bytes(byte for entry in content for byte in entry.bytes) == TEXT.encode()[:7]
    assert [other.logprob for other in content[0].top_logprobs] == [-0.5, -1.0, -2.0]
    stream = scripted_client.chat.completions.create(**options, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry.token for part in parts if part for entry in part.content] == [entry.token for entry in content]


def test_every_field_reaches_the_engine(scripted):
    body = {
        "prompt": "x",
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"97": -100, "98": 1.5},
        "seed": 11,
        "stop": "zz",
        "stop_token_ids": [5],
        "num_speculative_tokens": 2,
        "logprobs": 4,
        "cache_salt": "pepper",
    }
    assert scripted.post("/v1/completions", body)[0] == 200
    request = scripted.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert sampling.repetition_penalty == 1.1
    assert (request.presence_penalty, request.frequency_penalty) == (0.5, -0.5)
    assert request.logit_bias == {97: -100.0, 98: 1.5}
    assert (request.seed, request.stop, request.stop_token_ids) == (11, ("zz",), (EOS, 5))
    assert (request.num_speculative_tokens, request.logprobs, request.cache_salt) == (2, 4, "pepper")
    assert (request.prompt, request.max_tokens) == ((120,), 3)
    assert scripted.post("/v1/completions", {"prompt": "x", "skip_special_tokens": True})[0] == 200
    assert scripted.post("/v1/completions", {"prompt": "x", "ignore_eos": True, "top_k": 7})[0] == 200
    request = scripted.engine.requests[-1]
    assert (request.stop_token_ids, request.sampling.top_k, request.max_tokens) == ((), 7, 16)


def test_fields_that_change_nothing_are_accepted(scripted):
    body = {"prompt": "x", "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    body |= {"seed": None, "stop": None, "echo": False, "best_of": 1, "suffix": "", "logit_bias": None}
    body |= {"verbosity": "low", "timings_per_token": True, "n_probs": 0, "typical_p": 1.0, "xtc_probability": 0}
    samplers = {
        "mirostat": (2, "tau", "eta"),
        "dry": (0.8, "base"),
        "xtc": (0.5, "threshold"),
        "dynatemp": (1, "exponent"),
    }
    for name, (on, *others) in samplers.items():  # their fields say nothing while they are off
        fields = {f"{name}_{other}": 1.5 for other in others}
        switch = {"dry": "dry_multiplier", "xtc": "xtc_probability", "dynatemp": "dynatemp_range"}.get(name, name)
        answers = [scripted.post("/v1/completions", body | fields | {switch: value})[0] for value in (0, on)]
        assert answers == [200, 400], name
    status, headers, _ = scripted.post("/v1/completions", body)
    ignored = "metadata, service_tier, store, suffix, timings_per_token, user, verbosity"
    assert (status, headers["x-ignored-fields"]) == (200, ignored)


def test_tokens_are_bounded_by_the_context(scripted):
    """max_tokens is a limit: a larger one than fits ends at the context, as finish_reason says."""
    body = {"prompt": "x" * 250, "max_tokens": 1000}
    document = json.loads(scripted.post("/v1/completions", body)[2])
    assert document["usage"]["completion_tokens"] == 6
    assert document["choices"][0]["finish_reason"] == "length"


def test_cached_tokens_are_counted_once_per_prompt(scripted_client):
    answer = scripted_client.completions.create(model="tiny", prompt=["abcdef", "ab"], n=3, max_tokens=2)
    assert answer.usage.prompt_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 3 + 1


def test_a_request_beyond_the_trained_length_is_noted_once(model, caplog):
    engine = ServingEngine(
        replace(model, trained_length=20), EngineOptions("torch", max_num_seqs=2, max_model_len=256, warmup=False)
    )
    with serving(engine, model) as server:
        noted = []
        for max_tokens in (4, 40, 40):
            assert (
                server.post("/v1/completions", {"prompt": "abcd", "max_tokens": max_tokens, "ignore_eos": True})[0]
                == 200
            )
            noted.append(caplog.text.count("training saw sequences of 20"))
    assert noted == [0, 1, 1]


def test_a_fault_in_the_engine(model, caplog, monkeypatch):
    """The client hears that it failed, the log why, and the next request is answered."""
    engine = ServingEngine(model, EngineOptions("torch", max_num_seqs=2, max_model_len=256, warmup=False))
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    with serving(engine, model) as server:
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "step", lambda: {}["a key that is not there"])
            status, error = error_of(server.post("/v1/completions", body))
        assert (status, error["code"]) == (500, "generation_failed")
        assert "a key that is not there" in caplog.text
        assert "a key that is not there" not in error["message"]
        assert server.post("/v1/completions", body)[0] == 200


@pytest.mark.more
def test_prefixes_are_shared_under_one_salt(model):
    """What the cache holds of one client's prompts cannot be found out by another one's salt."""
    engine = ServingEngine(model, EngineOptions("native", max_num_seqs=2, max_model_len=256, warmup=False))
    with serving(engine, model) as server:

        def cached(salt):
            body = {"prompt": "def add(a, b):\n" * 10, "max_tokens": 8, "temperature": 0, "cache_salt": salt}
            document = json.loads(server.post("/v1/completions", body)[2])
            return document["usage"]["prompt_tokens_details"]["cached_tokens"], document["choices"][0]["text"]

        answers = [cached(salt) for salt in ("", "", "a", "a", "b")]
    assert [num for num, _ in answers] == [0, 128, 0, 128, 0]
    assert len({text for _, text in answers}) == 1


def test_eos_ends_the_text(model):
    with serving(ScriptedEngine("Yes.", times=1), model) as server:
        body = {"prompt": "x", "max_tokens": 40, "return_token_ids": True}
        (choice,) = json.loads(server.post("/v1/completions", body)[2])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Yes.", "stop")
    assert choice["token_ids"] == [*b"Yes.", EOS]


def test_a_client_that_leaves_cancels_its_generation(model):
    engine = ScriptedEngine(round_s=0.01)
    with serving(engine, model) as server:
        for stream in (True, False):
            body = json.dumps({"prompt": "x", "max_tokens": 250, "n": 2, "stream": stream}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with server.connect() as connection:
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                wait_for(lambda: len(engine.running) == 2)
                if stream:
                    assert connection.recv(1000)
            wait_for(lambda: not engine.running)
        assert engine.cancelled == 4


@pytest.mark.parametrize("sends_body", [True, False])
def test_a_client_that_leaves_at_once(model, sends_body, caplog):
    """Before its stream has begun, and in the middle of its body: no generation is left, and no fault is logged."""
    engine = ScriptedEngine(round_s=0.02)
    app = create_app(engine, model, ServerOptions("tiny", 100_000))
    body = json.dumps({"prompt": "x", "max_tokens": 90_000, "stream": True}).encode()
    arriving = [{"type": "http.request", "body": body, "more_body": not sends_body}]

    async def receive():
        return arriving.pop() if arriving else {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(0.1)  # as where the connection is slow

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
    scope |= {"query_string": b"", "headers": headers, "asgi": {"spec_version": "2.3"}, "http_version": "1.1"}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert len(engine.requests) == sends_body
    wait_for(lambda: not engine.running)
    assert not caplog.records


def test_recorded_conversations_are_accepted(scripted):
    """Fields of OpenAI's answers, of joined streams and of other clients, which say nothing to a model."""
    user = {"role": "user", "content": "x"}
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    read = call["function"] | {"parsed_arguments": {"n": 1}}  # as OpenAI's client returns it for `strict` tools
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    output = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    conversations = (
        [user, {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None}, user],
        [user, {"role": "assistant", "content": "", "tool_calls": [call]}, user],
        [user, {"role": "assistant", "content": "", "parsed": None, "tool_calls": [call | {"function": read}]}, user],
        [user, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, user],
        [{"role": "user", "content": [part]}],
        [user | {"cache_control": {"type": "ephemeral"}}],
        [user, {"role": "assistant", "content": [output]}, user],
    )  # fmt: skip
    for messages in conversations:
        answer = scripted.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        assert answer[0] == 200, (messages, answer[2])


def test_ignored_fields_are_named(scripted):
    """Those that say nothing to a model; what would change the answer is refused, also in a message."""

    def ask(fields, **message):
        answer = scripted.post("/v1/chat/completions", {"messages": [user | message], "max_tokens": 2, **fields})
        return answer[0], answer[1].get("x-ignored-fields")

    user = {"role": "user", "content": "x"}
    assert ask({}) == (200, None)
    assert ask({"user": "me", "plugins": [], "web": None}) == (200, "plugins, user")
    assert ask({"stream": True, "stream_options": {"include_obfuscation": False}}) == (200, None)
    assert ask({}, annotations=[], cache_control={}) == (200, "messages.annotations, messages.cache_control")
    assert ask({}, **{"a\r\nb: c": 1, "é": 2}) == (200, "2 others")
    assert len(ask({}, **{f"x{count}": 1 for count in range(3000)})[1]) < 1000
    for answer in (ask({"wisdom": 1, "user": "me"}), ask({"temprature": 0}), ask({}, prefix=True)):
        assert answer[0] == 400


def test_health(scripted):
    status, _, data = scripted.get("/health")
    assert status == 200
    assert json.loads(data) | {"version": ""} == {
        "status": "ok",
        "version": "",
        "model": "tiny",
        "max_model_len": 256,
        "chat": True,
        "num_running": 0,
        "num_waiting": 0,
        "cache": {"positions": 10, "max_positions": 100},
        "prefix_cache": {"positions": 5, "max_positions": 50, "queries": 40, "hits": 8},
        "num_speculative_tokens": 16,
        "cost_curve": [1.0, 1.1],
        "draft_cost": 0.2,
        "is_measuring": False,
        "reference": [0.9, 0.5],
    }


def test_page(scripted, monkeypatch, tmp_path):
    """Whatever the page holds, it can load nothing and talk to this server only."""
    monkeypatch.setattr("nextn.serve.api.files", lambda package: tmp_path)
    status, error = error_of(scripted.get("/"))
    assert (status, error["code"]) == (404, "not_found")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("<title>é</title>", encoding="utf-8")
    status, headers, data = scripted.get("/")
    assert (status, data.decode()) == (200, "<title>é</title>")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["content-type"] == "text/html; charset=utf-8"
