"""HTTP to servers that are absent, slow, broken or hostile: one clear error each, within bounds."""

import random
import socket
import time
from threading import Lock
from types import SimpleNamespace

import loopback
import pytest
from fake_engine import no_key  # noqa: F401
from quick import loop
from raw_server import serving

from nextn.engines.answers import EngineRequest
from nextn.engines.ask import ask
from nextn.engines.client import Budget, Client, Limits, base_url
from nextn.engines.endpoint import Capabilities, Endpoint, ServedModel, _select_model
from nextn.errors import BudgetError, ConfigError, EngineError

QUICK = Limits(answer_s=0.6, answer_bytes=1_000_000, wait_s=1.0)


def second_answer(made, limits=QUICK):
    """The faults begin behind the probe, as an engine that is down from the start is told earlier."""
    endpoint = Endpoint.open(made.url, Budget(limits))
    return endpoint.answer(EngineRequest("hello", 4))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://a.b/proxy/v1", "https://a.b/proxy"),
        ("http://a.b/", "http://a.b"),
    ],
)
def test_addresses(text, url):
    assert base_url(text) == url


@pytest.mark.parametrize("text", ["ftp://a.b", "http://", "file:///etc/passwd", "8000"])
def test_other_addresses(text):
    with pytest.raises(ConfigError, match="not an HTTP address"):
        base_url(text)


def test_an_address_holds_no_key():
    """A password in an address would be printed with it."""
    with pytest.raises(ConfigError, match="no user, password") as raised:
        base_url("http://me:hunter2@a.b/")
    assert "hunter2" not in str(raised.value)


def test_down():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"nothing answers.*is the engine running"):
            Endpoint.open(url, Budget(QUICK))


def test_https_to_a_server_without_it(engine):
    url = engine().url
    with pytest.raises(EngineError, match=f"give {url}$"):
        Endpoint.open(url.replace("http:", "https:"), Budget(QUICK))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("html", "an HTML page titled 'Log in, please'"),
        ("foreign", "lists no model"),
        ("two-models", "serves one, two: choose one, as in http://.*#one"),
    ],
)
def test_no_engine(engine, fault, words):
    with pytest.raises((EngineError, ConfigError), match=words):
        Endpoint.open(engine(fault).url, Budget(QUICK))


def test_wrong_model(engine):
    with pytest.raises(EngineError, match="has no model 'gpt'; it serves toy"):
        Endpoint.open(f"{engine().url}#gpt", Budget(QUICK))


def test_a_model_without_a_chat_template(engine):
    """The option that sends plain text is named, and works."""
    url = engine("no-chat").url
    with pytest.raises(EngineError, match=r"no chat template .*--no-chat") as raised:
        Endpoint.open(url, Budget(QUICK), chat=True)
    assert raised.value.status == 400
    assert Endpoint.open(url, Budget(QUICK), chat=False).served.name


@loop(
    ("fault", "words", "status"),
    [
        ("hang", "no complete answer within 0.6 s; see its log", None),
        ("drip", "no complete answer within 0.6 s; see its log", None),
        ("huge", "longer than [0-9,]+ bytes", None),
        ("drop", "broke off its answer.*1 of 3 tries", None),
        ("http-500", "HTTP 500: the engine failed; see its log. Its message: it broke", 500),
        ("http-500 Context size has been exceeded.", "HTTP 500: its context is too small.*with a larger one", 500),
        ("http-404", "HTTP 404: not found; check the address", 404),
        ("http-400", "HTTP 400: the engine refuses the request", 400),
        ("http-429", r"HTTP 429: the engine is busy: it broke \(2 of 3 tries\)", 429),
    ],
)
def test_broken(engine, fault, words, status):
    """Each says what and what to do, and none takes longer than its limit by much."""
    started = time.monotonic()
    with pytest.raises(EngineError, match=words) as raised:
        second_answer(engine(fault), Limits(answer_s=0.6, answer_bytes=1_000_000, wait_s=0.6))
    assert raised.value.status == status
    assert time.monotonic() - started < 4


def test_busy_is_asked_again(engine):
    """One 503 must not end a run of hundreds of requests."""
    made = engine("busy-once")
    assert len(second_answer(made).text) == 4
    assert made.num == 3


def test_redirects_are_not_followed():
    """They could take the key to another host."""

    class Away(loopback.Handler):
        def do_GET(self):
            self.give(302, b"", headers={"Location": "http://evil.example/"})

    server = loopback.Loopback().listen(Away)
    with pytest.raises(EngineError, match=r"redirects to http://evil.example/; give that address"):
        Endpoint.open(server.url.removeprefix("http://"), Budget(QUICK))
    server.stop()


def test_key(engine, monkeypatch):
    """The key is sent, comes from the environment, and is in no message, even if the engine repeats it."""
    made = engine("key")
    with pytest.raises(EngineError, match="the environment: set OPENAI_API_KEY"):
        Endpoint.open(made.url, Budget(QUICK))
    monkeypatch.setenv("OPENAI_API_KEY", "wrong-key")
    with pytest.raises(EngineError, match=r"bad key Bearer \*\*\*") as raised:
        Endpoint.open(made.url, Budget(QUICK))
    assert "wrong-key" not in str(raised.value)
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    assert Endpoint.open(made.url, Budget(QUICK)).served.name == "toy"
    monkeypatch.setenv("OPENAI_API_KEY", "two\nlines")
    with pytest.raises(ConfigError, match="no HTTP header can carry") as raised:
        Endpoint.open(made.url, Budget(QUICK))
    assert "two" not in str(raised.value)


def test_requests_are_counted(engine):
    """Two endpoints of one run share the budget; the retry counts, too."""
    budget = Budget()
    Endpoint.open(engine().url, budget)
    Endpoint.open(engine().url, budget)
    assert budget.used == 4


def test_time_is_bounded(engine):
    """A hanging engine ends when the run's time is over, not one answer's."""
    made, budget = engine("hang"), Budget(Limits(answer_s=30, seconds=0.7))
    with pytest.raises(BudgetError, match=r"the limit of 0.7 s is over; raise --max-seconds"):
        Endpoint.open(made.url, budget).answer(EngineRequest("a", 4))
    with pytest.raises(BudgetError):
        Client(made.url, budget).text("/metrics")


@pytest.mark.parametrize("name", ["seconds", "answer_s", "tries"])
def test_limits_above_zero(name):
    with pytest.raises(ConfigError, match=f"limit {name} = 0"):
        Limits(**{name: 0})


@pytest.mark.parametrize("concurrency", [1, 3, 40])
def test_ask(concurrency):
    """Answers keep the requests' order, whichever is first; a failure is raised in its place, and ends the asking."""

    def asked(failure, failing):
        sent, lock = [], Lock()

        def answer(request):
            with lock:
                sent.append(request)
            time.sleep(random.Random(request).random() / 500)
            if request == failing:
                raise failure
            return request

        return ask(SimpleNamespace(answer=answer), range(40), concurrency=concurrency), sent

    assert list(asked(None, None)[0]) == list(range(40))
    for failure in (EngineError("no"), ZeroDivisionError()):  # of the engine, and a bug of ours
        answers, sent = asked(failure, 5)
        assert [next(answers) for _ in range(5)] == list(range(5))
        with pytest.raises(type(failure)):
            next(answers)
        time.sleep(0.02)
        assert len(sent) == 6 if concurrency == 1 else max(sent) <= 5 + 4 * concurrency
    assert list(ask(None, [], concurrency=concurrency)) == []


KEY = "sk-secret/key-0123"
ESCAPED = "sk\\u002dsecret\\/key-0123"
ANSWER = '{"choices": [{"text": "it is KEY", "finish_reason": "KEY", "token_ids": [1]}], "usage": {"KEY": "KEY"}}'
STREAM = 'data: {"choices": [{"text": "sk-sec"}]}\n\n'
STREAM += 'data: {"choices": [{"text": "ret/key-0123 KEY"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("form", [KEY, ESCAPED, "sk%2Dsecret%2fkey%2d0123"])
def test_server_that_repeats_the_key(form, monkeypatch):
    """In a good answer, a stream, its model's name, its metrics, a redirect: it never becomes data of ours."""
    bodies = {
        "/v1/models": '{"data": [{"id": "KEY"}, {"id": "KEY too"}]}',
        "/v1/completions": ANSWER,
        "/tokenize": '{"tokens": ["KEY"]}',
        "/metrics": 'vllm:x{model_name="KEY"} 1',
    }

    def answer(connection, request):
        path = request.split()[1].decode()
        body = STREAM if b'"stream":true' in request else bodies[path]
        data = body.replace("KEY", form).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))

    with serving(answer) as url:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        client = Client(url, Budget(QUICK))
        endpoint = Endpoint(client, ServedModel("m", None), Capabilities(True, True, 4.0))
        said = [endpoint.answer(EngineRequest("a", 4)), endpoint.stream(EngineRequest("a", 4)), endpoint.metrics()]
        assert (said[0].text, said[0].finish_reason, said[0].raw["usage"]) == ("it is ***", "***", {"***": "***"})
        assert said[1].text == "*** ***"
        for ask in (
            lambda: endpoint.tokenize("a"),
            lambda: _select_model(client, None),
            lambda: _select_model(client, "x"),
        ):
            with pytest.raises((EngineError, ConfigError), match=r"\*\*\*") as raised:
                ask()
            said.append(str(raised.value))
        assert "secret" not in "".join(map(repr, said))
        client.close()


@pytest.mark.more
def test_report_holds_no_key(engine, monkeypatch, capsys):
    """`verify --json` of a server whose model has the key's name."""
    from nextn.cli import app

    made = engine(model="sk-secret-0123")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-0123")
    with pytest.raises(SystemExit):
        app(["verify", made.url, "--json", "--check", "greedy"])
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err
    assert "***" in said.out + said.err


@pytest.mark.parametrize("key", ["1", "EMPTY"])
def test_short_keys_are_no_secrets(engine, monkeypatch, key):
    """As vLLM's users give them; figures with that digit are not changed."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert Endpoint.open(engine(model=f"toy {key}").url, Budget(QUICK)).served.name == f"toy {key}"
