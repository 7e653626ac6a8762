"""verify: passes on a correct engine and our server, and fails in the check of the property that an engine breaks."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fake_engine import no_key  # noqa: F401
from http_serving import Serving, serving
from quick import loop, others_slow

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.engines.answers import AnswerToken, EngineAnswer, EngineRequest, TopLogprob
from nextn.engines.check_result import CheckResult
from nextn.engines.client import Budget, Limits
from nextn.engines.endpoint import Endpoint
from nextn.errors import BudgetError, ConfigError, EngineError
from nextn.evaluate.workload import Prompt, read_prompts
from nextn.model.model import Model
from nextn.serve.engine import ServingEngine
from nextn.serve.options import EngineOptions
from nextn.verify_checks import CHECKS, VerifyReport, VerifySettings, run_checks
from nextn.verify_checks.counter_checks import logprobs
from nextn.verify_checks.format_checks import SCHEMA, max_tokens, misfit
from nextn.verify_checks.session import VerifySession

SMALL = VerifySettings(max_tokens=24, samples=64, sampled_prompts=2, sampled_tokens=6, context=600)
PROMPTS = read_prompts()[::2]


@pytest.fixture
def run(engine):
    """Checks of an engine with these faults, alone or against a correct one -> by name."""

    def checked(*faults, names=(), alone=False, against=(), budget=None, prompts=PROMPTS, settings=SMALL, **options):
        budget = budget or Budget(Limits(answer_s=2, wait_s=0.6))
        target = Endpoint.open(engine(*faults, **options).url, budget)
        size = {"context": options["context"]} if "context" in options else {}
        reference = (
            None if alone else Endpoint.open(engine(*against, drafts="drafts-too" in against, **size).url, budget)
        )
        return {check.name: check for check in run_checks(target, reference, prompts, settings, names=names)}

    return checked


def outcomes(found):
    return {name: check.outcome for name, check in found.items()}


@pytest.mark.more
def test_a_correct_engine_passes(run):
    """All checks, and each says how much it looked at."""
    found = run()
    assert outcomes(found) == dict.fromkeys(CHECKS, "passed")
    assert "8 of 8 texts identical, 192 tokens compared" in found["greedy"].evidence
    assert "48 decoded tokens" in found["replay"].evidence
    assert "prompt tokens came from the cache" in found["prefix-cache"].evidence
    assert "512 prompt tokens of 600, MTP on against off" in found["long-context"].evidence
    assert "9 tests of 64 against 64 texts" in found["sampled-distribution"].evidence
    assert "a_1 0.75" in found["mtp-on"].evidence
    assert not any(check.advice for check in found.values())
    json.dumps([check.figures for check in found.values()])


def test_one_endpoint(run):
    """What takes two is said to be untold, and all else passes."""
    found = outcomes(run(alone=True))
    assert found.pop("sampled-distribution") == "inconclusive"
    assert set(found.values()) == {"passed"}


def test_contexts_of_several_lengths(run):
    """A fault beyond some length shows in the prompts of that length alone; short prompts are left out."""
    for context, sizes, identical in ((4400, "4312, 1012", 1), (3940, "3852", 0)):
        settings = replace(SMALL, context=context)
        (found,) = run("wrong-when-long", names=["long-context"], settings=settings, context=context).values()
        assert (found.outcome, found.figures["identical"]) == ("failed", identical)
        assert found.figures["faults"][0]["prompt"] == 0
        assert f"{sizes} prompt tokens of {context}, MTP on against off" in found.evidence


def test_rounding_is_no_finding(run):
    """Another kernel's rounding: texts part at level tokens, which is counted and told."""
    found = run("rounding", names=["greedy", "logprobs", "replay"])
    assert outcomes(found) == {"greedy": "passed", "logprobs": "passed", "replay": "passed"}
    figures = found["greedy"].figures
    assert len(figures["tie_gaps"]) >= 4
    assert max(figures["tie_gaps"]) < 0.02
    assert "diverge at near-ties (gaps 0.0" in found["greedy"].evidence


# fmt: off
BROKEN = [
    # fault, alone, check, words
    ("wrong", False, "greedy", "MTP on against off: "),
    ("wrong", False, "greedy", "nats apart"),
    ("wrong", False, "greedy", "; domains: "),
    ("wrong", True, "replay", "differ beyond a near-tie"),
    ("wrong", True, "logprobs", "another token is likelier by"),
    ("wrong-when-long", False, "long-context", "0 of 1 texts identical"),
    ("other-logprobs", True, "logprobs", "the chosen token is not in the list"),
    ("other-logprobs", True, "replay", "log-probabilities of equal tokens differ by up to"),
    ("zero-logprobs", True, "logprobs", "192 of 192 log-probabilities are exactly 0.0"),
    ("untold-drafts", True, "logprobs", "128 of 192 tokens come without a list"),
    ("two-numbers", True, "logprobs", " as the token's own, "),
    ("flat-logprobs", False, "logprobs", "MTP on and off differ by "),
    ("one-more", True, "max-tokens", "max_tokens 1: 2 tokens returned"),
    ("finish", True, "max-tokens", "finish_reason 'done'; expected length or stop"),
    ("stop-leak", True, "stop-strings", "the text contains it"),
    ("stop-late", True, "stop-strings", "the text continues after it"),
    ("stream-loses", True, "streaming", "streamed text differs from character 7 on, twice"),
    ("stream-breaks", True, "streaming", "the stream ends without [DONE]"),
    ("mixed", True, "concurrency", "8 at once against alone: "),
    ("swapped", True, "concurrency", "got the answer to prompt"),
    ("stale-cache", True, "prefix-cache", "warm against cold: 0 of 4 texts identical"),
    ("broken-json", False, "json-schema", "1 of 4 valid: not JSON"),
    ("misfit", False, "json-schema", "'36' is not of type integer"),
    ("broken-json", False, "tool-calls", "1 of 3 valid: not JSON"),
    ("misfit", False, "tool-calls", "'kelvin' is not one of"),
    ("sharp", False, "sampled-distribution", "ranks of later tokens"),
    ("sharp-drafts", False, "sampled-distribution", "only drafted positions differ"),
    ("sharp-drafts", True, "sampled-logprobs", "later tokens: the likeliest was sampled"),
    ("garbage-drafts", True, "sampled-logprobs", "later tokens: one outside the list was sampled"),
    ("hot", True, "temperature", "it seems to be ignored"),
    ("hot-drafts", True, "temperature", "it seems to be ignored"),
    ("warm-drafts", False, "temperature", "MTP on against off at 0.2"),
    ("off", True, "mtp-on", "nothing was drafted in this run"),
    ("http-500", True, "greedy", "the engine failed: "),
    ("hang", True, "greedy", "no complete answer within 0.5 s"),
    ("huge", True, "greedy", "the answer is longer than"),
    ("drop", True, "greedy", "the engine broke off its answer"),
]
# fmt: on


# The first fault that each check finds is enough for a quick run.
FIRST = {each[2]: each for each in reversed(BROKEN)}.values()


@pytest.mark.parametrize(("fault", "alone", "name", "words"), others_slow(BROKEN, *FIRST))
def test_broken(run, fault, alone, name, words):
    faults = ("mixed", "swapped") if fault == "swapped" else (fault,)
    limits = Limits(answer_s=0.5 if fault == "hang" else 5, wait_s=0.6, answer_bytes=1_000_000)
    found = run(*faults, names=[name], alone=alone, budget=Budget(limits))[name]
    assert (found.outcome, words in found.evidence) == ("failed", True), found.evidence
    assert found.advice


def test_what_fails_without_mtp_too_is_not_due_to_it(run):
    """transformers' server leaves stop strings in the text and ends streams without [DONE]."""
    for fault, name in (("stop-leak", "stop-strings"), ("stream-breaks", "streaming")):
        both = run(fault, names=[name], against=[fault])[name]
        assert (both.outcome, both.evidence.split(":")[0]) == ("inconclusive", "the server without MTP fails it, too")
        one = run(fault, names=[name])[name]
        assert one.outcome == "failed"
        assert one.evidence.endswith("(without MTP: passed)")


def test_a_failure_stays_where_it_cannot_be_repeated_without_mtp(engine, monkeypatch):
    """A server without MTP that is down decides nothing, nor does a budget that ends."""
    budget = Budget(Limits(answer_s=2, wait_s=0.6))
    for error in (EngineError("nothing answers"), BudgetError("900 s are used up")):
        target, reference = (Endpoint.open(engine(*faults).url, budget) for faults in (["stop-leak"], []))
        monkeypatch.setattr(reference, "answer", Mock(side_effect=error))
        (check,) = run_checks(target, reference, PROMPTS, SMALL, names=["stop-strings"])
        assert check.outcome == "failed"
        assert check.evidence.endswith(f"(not repeated without MTP: {error})")


def test_what_happens_once_is_no_finding(run):
    """Rounding may change a text between two requests, and a long answer is cut; what comes again is a fault."""
    for fault, name in (("stream-loses-once", "streaming"), ("wordy", "json-schema")):
        assert run(fault, names=[name], alone=True)[name].outcome == "passed"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"name": "a", "age": 1, "color": "red", "member": True}, ""),
        ({"name": "a", "age": True, "color": "red", "member": True}, "True is not of type integer"),
        ({"name": "a", "age": 1, "color": "gray", "member": True}, "is not one of"),
        ({"name": "a" * 21, "age": 1, "color": "red", "member": True}, "is too long"),
        ({"name": "a", "age": 1, "color": "red"}, "has the keys ['age', 'color', 'name']"),
        ({"name": "a", "age": 1, "color": "red", "member": True, "x": 1}, "has the keys"),
        ([], "is not of type object"),
    ],
)
def test_misfit(value, words):
    fault = misfit(value, SCHEMA)
    assert words in fault
    assert bool(fault) == bool(words)


def test_no_draft_is_accepted(run):
    """Text without accepted drafts proves nothing about them, although it is right."""
    found = run("all-rejected", names=["greedy", "mtp-on"], alone=True)
    assert [found[name].outcome for name in ("greedy", "mtp-on")] == ["passed", "inconclusive"]
    assert "nextn diagnose MODEL --engine 'http:" in found["mtp-on"].advice
    assert "a_1 0.00 (0.00 to " in found["mtp-on"].evidence
    assert "nan" not in found["mtp-on"].evidence  # of depths that no round reached


@pytest.mark.more
def test_counters_reset(run):
    """The engine was started anew within the run: part of what was checked ran on another one."""
    found = run("reset", names=["greedy", "replay", "mtp-on"], alone=True)["mtp-on"]
    assert found.outcome == "failed"
    assert "reset during the run" in found.evidence


def test_a_reference_that_drafts(run):
    found = run(names=["greedy", "mtp-on"], against=["drafts-too"])["mtp-on"]
    assert found.outcome == "failed"
    assert "MTP was compared with MTP" in found.evidence


# fmt: off
INCONCLUSIVE = [
    ("no-metrics", "mtp-on", "/metrics: no metrics (HTTP 404); SGLang needs --enable-metrics"),
    ("no-cache", "prefix-cache", "was never hit, so this run proves nothing"),
    ("no-ids", "replay", "the engine returns no token ids"),
    ("no-logprobs", "logprobs", "returns no log-probabilities"),
    ("no-logprobs", "sampled-logprobs", "returns no log-probabilities"),
    ("untold-drafts", "sampled-logprobs", "not all tokens come with log-probabilities"),
    ("no-forms", "json-schema", "not supported: "),
    ("no-forms", "tool-calls", "guided decoding is not supported"),
    ("ignores-forms", "json-schema", "the engine ignores the request"),
    ("cut", "json-schema", "all 4 answers were truncated at 300 tokens"),
    ("http-503", "greedy", "the engine refuses: "),
]
# fmt: on


@loop(("fault", "name", "words"), INCONCLUSIVE)
def test_inconclusive(run, fault, name, words):
    """Neither passed nor failed: an engine that cannot do it is not one that does it wrongly."""
    found = run(fault, names=[name], alone=True)[name]
    assert (found.outcome, words in found.evidence) == ("inconclusive", True), found.evidence


def test_texts_alone(run):
    """Without ids and log-probabilities, characters are compared, and a difference stays without a verdict."""
    same = run("no-ids", "no-logprobs", names=["greedy"], against=["no-ids", "no-logprobs"])["greedy"]
    assert (same.outcome, same.figures["unit"]) == ("passed", "character")
    other = run("no-ids", "no-logprobs", "wrong", names=["greedy"], against=["no-ids", "no-logprobs"])["greedy"]
    assert other.outcome == "inconclusive"
    assert "without log-probabilities it is unknown whether at a near-tie" in other.evidence


@pytest.mark.more
def test_sampled_texts_alone(run):
    found = run("no-ids", "no-logprobs", "sharp", names=["sampled-distribution"], against=["no-ids", "no-logprobs"])
    assert found["sampled-distribution"].outcome == "failed"


@pytest.mark.more
def test_gap_from_a_fresh_prompt(run):
    """Where neither answer tells log-probabilities of drafted tokens, the context is asked for again."""
    found = run("untold-drafts", "wrong", names=["greedy"], against=["untold-drafts"])["greedy"]
    assert found.outcome == "failed"
    assert "nats apart" in found.evidence
    ties = run("untold-drafts", "rounding", names=["greedy"], against=["untold-drafts"])["greedy"]
    assert (ties.outcome, len(ties.figures["tie_gaps"]) > 3) == ("passed", True), ties.evidence


def test_cache_hits_by_the_counter(run):
    """An engine that does not tell cached tokens in its answers has a counter of them."""
    found = run("hits-untold", names=["prefix-cache"], alone=True)["prefix-cache"]
    assert found.outcome == "passed"
    assert found.figures["cached_tokens"] > 300


def test_a_strict_engine(run):
    """One that refuses fields beyond OpenAI's is asked without them."""
    found = outcomes(run("strict", names=["greedy", "logprobs", "stop-strings", "replay"], alone=True))
    assert found == {"greedy": "passed", "logprobs": "passed", "stop-strings": "passed", "replay": "inconclusive"}


def test_without_a_chat_template(run):
    """A base model: JSON is asked for by completions; tools need chat."""
    found = outcomes(run("no-chat", names=["json-schema", "tool-calls"], alone=True))
    assert found == {"json-schema": "passed", "tool-calls": "inconclusive"}
    assert run("no-chat", "misfit", names=["json-schema"], alone=True)["json-schema"].outcome == "failed"


def test_certain_text_has_no_power(run):
    """A test that could not have failed must not pass."""
    settings = VerifySettings(max_tokens=8, samples=8, sampled_prompts=1, sampled_tokens=2, context=600)
    found = run(names=["sampled-distribution", "sampled-logprobs"], settings=settings)
    assert outcomes(found) == {"sampled-distribution": "inconclusive", "sampled-logprobs": "inconclusive"}
    assert "power 0." in found["sampled-distribution"].evidence


def test_time_runs_out(run):
    """What was found stands; the rest says that it was not run."""
    found = run(alone=True, budget=Budget(Limits(seconds=90), clock=count().__next__))
    assert list(found) == list(CHECKS)
    assert found["greedy"].outcome == "passed"
    assert "not finished: the limit of 90 s is over" in found["replay"].evidence
    assert "not run: " in found["mtp-on"].evidence
    assert set(outcomes(found).values()) == {"passed", "inconclusive"}


def test_one_prompt_is_asked_several_times_at_once(run):
    """One request alone is no batch."""
    (check,) = run(names=["concurrency"], alone=True, prompts=PROMPTS[:1]).values()
    assert (check.outcome, check.figures["texts"]) == ("passed", SMALL.concurrency)
    assert check.evidence.startswith(f"{SMALL.concurrency} at once against alone")
    wrong = run("mixed", "swapped", names=["concurrency"], alone=True, prompts=PROMPTS[:2])["concurrency"]
    assert wrong.outcome == "failed"
    assert {fault["prompt"] for fault in wrong.figures["faults"]} <= {0, 1}
    assert "got the answer to prompt" in wrong.evidence


LISTED = (TopLogprob("a", 1, -0.1), TopLogprob("b", 2, -3.0))


@pytest.mark.parametrize(
    ("num_listed", "num_counted", "outcome", "words"),
    [(0, 24, "failed", "69 tokens of the answers are missing"),
     (9, 24, "failed", "42 tokens of the answers are missing"),
     (0, None, "inconclusive", "no answer has log-probabilities"), (23, 24, "passed", "69 greedy tokens")],
    ids=["none", "the first of each round", "nothing is known", "all but the end"],
)  # fmt: skip
def test_log_probabilities_that_are_not_there_are_no_pass(num_listed, num_counted, outcome, words):
    tokens = (AnswerToken("a", 1, -0.1, LISTED),) * num_listed
    found = logprobs(session_of(EngineAnswer("a" * 24, "length", tokens, completion_tokens=num_counted)))
    assert (found.outcome, words in found.evidence) == (outcome, True)


def test_limits_without_counts_are_no_pass():
    found = max_tokens(session_of(EngineAnswer("a" * 24, "length")))
    assert (found.outcome, found.evidence) == ("inconclusive", "no answer says how many tokens it has (usage)")
    assert max_tokens(session_of(EngineAnswer("a", "stop", completion_tokens=1))).outcome == "passed"


def session_of(answer):
    """A session whose engine gives one answer to everything."""
    target = SimpleNamespace(capabilities=SimpleNamespace(logprobs=True), answer=lambda request: answer)
    request = EngineRequest("x", 24)
    return SimpleNamespace(
        settings=SMALL, target=target, against=None, prompts=PROMPTS[:3], greedy=lambda endpoint: [answer] * 3,
        greedy_request=lambda prompt: request,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "outcome"),
    [((), "inconclusive"), (("inconclusive",), "inconclusive"), (("inconclusive", "passed"), "passed"),
     (("passed", "failed"), "failed")],
)  # fmt: skip
def test_the_outcome_of_a_run(found, outcome):
    """It passed only if a check did."""
    report = VerifyReport("url", "toy", None, tuple(CheckResult("x", each, "") for each in found))
    assert (report.outcome, report.to_dict()["outcome"]) == (outcome, outcome)


def test_usage(engine):
    budget = Budget()
    endpoint = Endpoint.open(engine().url, budget)
    with pytest.raises(ConfigError, match=r"no check greed; known: greedy, "):
        next(run_checks(endpoint, None, PROMPTS, SMALL, names=["greed"]))
    with pytest.raises(ConfigError, match="is the endpoint under test; give the one without MTP"):
        next(run_checks(endpoint, endpoint, PROMPTS, SMALL))


def test_two_models_of_one_server(engine):
    """One with MTP and one without, at one URL: their counts and texts are kept apart."""
    url, budget = engine("two-models").url, Budget(Limits(answer_s=2, wait_s=0.6))
    one, two = (Endpoint.open(f"{url}#{name}", budget) for name in ("one", "two"))
    (check,) = run_checks(one, two, PROMPTS, SMALL, names=["greedy"])
    assert (check.name, check.outcome) == ("greedy", "passed")
    session = VerifySession(one, two, PROMPTS, SMALL)
    assert len(session.counters) == 2
    assert session.greedy(one) is not session.greedy(two)
    assert session.without_mtp(two).greedy(two) is session.greedy(two)  # it is not asked again


def test_an_engine_that_lists_no_model(engine):
    """It may load the model that a request names."""
    url, budget = engine("no-models").url, Budget(Limits(answer_s=2, wait_s=0.6))
    assert Endpoint.open(f"{url}#any", budget).served.name == "any"
    with pytest.raises(EngineError, match=r"lists no model; .*#MODEL"):
        Endpoint.open(url, budget)


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 0), ("samples", 1), ("false_alarm", 0.9), ("tie_gap", -1.0), ("concurrency", 1)]
)
def test_settings(name, value):
    with pytest.raises(ConfigError, match=name):
        VerifySettings(**{name: value})


def test_prompts_of_ids(run):
    """Token ids of a .jsonl file go to the engine as they are."""
    found = run(names=["greedy", "replay", "prefix-cache"], alone=True, prompts=[Prompt((3, 1, 4, 1, 5), "ids")])
    assert outcomes(found) == {"greedy": "passed", "replay": "passed", "prefix-cache": "passed"}


@pytest.fixture
def nextn(here):
    return partial(here, "verify", columns=300)


@pytest.mark.more
def test_command_passes(nextn, engine):
    code, out, err = nextn(
        engine().url, "--against", engine(drafts=False).url, "--check", "greedy", "--check", "mtp-on"
    )
    assert (code, err) == (0, "")
    assert "MTP on against off: 16 of 16 texts identical" in out
    assert "no findings  toy at http://127.0.0.1:" in out
    assert "2 passed" in out


def test_command_finds(nextn, engine):
    code, out, _ = nextn(engine("one-more").url, "--check", "max-tokens", "--json")
    record = json.loads(out)
    assert (code, record["outcome"], record["complete"], record["model"]) == (1, "failed", True, "toy")
    assert record["checks"][0]["outcome"] == "failed"
    code, out, _ = nextn(engine("one-more").url, "--check", "max-tokens")
    assert code == 1
    assert "findings  toy" in out
    assert "to do  " in out


def test_strict_command_fails_on_an_inconclusive_check(nextn, engine):
    """sampled-distribution needs a second endpoint."""
    args = (engine().url, "--check", "max-tokens", "--check", "sampled-distribution")
    code, out, _ = nextn(*args, "--strict", "--json")
    assert (code, [check["outcome"] for check in json.loads(out)["checks"]]) == (1, ["passed", "inconclusive"])
    assert nextn(*args)[0] == 0
    assert nextn(*args[:3], "--strict")[0] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["http://127.0.0.1:9"], "nothing answers"),
        (["ftp://x"], "not an HTTP address"),
        (["http://127.0.0.1:9", "--max-seconds", "0"], "limit seconds = 0"),
        (["http://127.0.0.1:9", "--samples", "1"], "samples = 1; expected a whole number >= 8"),
    ],
)
def test_command_usage(nextn, args, words):
    """One line, exit 2, no traceback."""
    code, out, err = nextn(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_each_result_is_printed_as_soon_as_it_is_known(nextn, engine, monkeypatch):
    def first(session):
        return CheckResult("greedy", "passed", "all the same")

    def second(session):
        sys.stdout.flush()
        return CheckResult("replay", "passed", f"printed {'all the same' in sys.stdout.buffer.getvalue().decode()}")

    monkeypatch.setitem(CHECKS, "greedy", first)
    monkeypatch.setitem(CHECKS, "replay", second)
    _, out, _ = nextn(engine().url, "--check", "greedy", "--check", "replay")
    assert [line.split() for line in out.splitlines()[:2]] == [
        ["passed", "greedy", "all", "the", "same"],
        ["passed", "replay", "printed", "True"],
    ]


@pytest.mark.more
def test_interrupt_reports_what_was_found(nextn, engine, monkeypatch):
    def interrupted(session):
        raise KeyboardInterrupt

    monkeypatch.setitem(CHECKS, "replay", interrupted)
    code, out, _ = nextn(engine().url, "--check", "greedy", "--check", "replay")
    assert code == 130
    assert "requested twice: 16 of 16" in out
    assert "interrupted: the remaining checks were not run" in out
    assert nextn(engine("one-more").url, "--check", "max-tokens", "--check", "replay", "--json")[0] == 1


def test_an_engine_cannot_move_the_cursor(nextn, engine):
    code, out, _ = nextn(engine(model="a\x1b[2J[bold]").url, "--check", "max-tokens")
    assert (code, "\x1b[2J" in out, r"a\x1b[2J[bold]" in out) == (0, False, True)


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or () %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@contextmanager
def served(model: Model, num_speculative_tokens: int) -> Iterator[Serving]:
    options = EngineOptions(
        "native",
        max_num_seqs=8,
        max_model_len=1024,
        cache_gb=0.5,
        num_speculative_tokens=num_speculative_tokens,
        warmup=False,
    )
    engine = ServingEngine(model, options)
    try:
        with serving(engine, model, max_model_len=1024, tool_call_parser="hermes") as server:
            yield server
    finally:
        engine.close(grace_s=1)


@pytest.mark.slow
def test_every_check_passes(here):
    model = Model.load(SHIPPED)
    model.tokenizer.chat_template = TEMPLATE
    plain = replace(model, head=None)
    with ExitStack() as stack:
        mtp, baseline = (stack.enter_context(served(*each)) for each in ((model, 4), (plain, 0)))
        code, out, err = here("verify", mtp.url, "--against", baseline.url, "--context", 1024, "--strict", "--json")
    record = json.loads(out)
    assert code == 0, (err, record)
    assert {each["name"]: each["outcome"] for each in record["checks"]} == dict.fromkeys(CHECKS, "passed")
