"""`nextn diagnose` from the shell: tables, JSON, exit codes, and one clear line for each thing that is not there."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from decoding_engine import BY_NAME, faulty
from fake_engine import FakeEngine
from quick import case
from served import ServedModel
from tiny import FIXTURES, refrain
from typer.testing import CliRunner

import nextn
from nextn.cli import app
from nextn.cli.diagnose import _show_diagnosis
from nextn.engines.ask import read_counters
from nextn.engines.client import Budget
from nextn.engines.counter_formats import read
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint
from nextn.errors import NextnError
from nextn.evaluate import given_texts, streaming_plan
from nextn.evaluate.diagnose import Diagnosis
from nextn.evaluate.engine_run import EngineObservation, _store_observation, _stored_observation, ask_prompts
from nextn.evaluate.hypotheses import ExpectedCounts, ObservedCounts
from nextn.evaluate.observed_case import ObservedCase
from nextn.evaluate.workload import ReferencePlan
from nextn.settings import Contract

LOG = (
    "INFO [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 2.04, Accepted throughput: 20.0 tokens/s, "
    "Drafted throughput: 60.0 tokens/s, Accepted: 312 tokens, Drafted: 900 tokens, Per-position acceptance rate: {}, "
    "Avg Draft acceptance rate: 34.7%\n"
)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": row.tolist()}) + "\n" for row in refrain(8, 33, seed=10**6)))
    return path


@pytest.fixture
def serve():
    running = []

    def started(*faults, kind=FakeEngine, **settings):
        running.append(kind(*faults, **settings))
        return running[-1].url

    started.running = running
    yield started
    for each in running:
        each.stop()


def test_counts_without_a_model(tmp_path):
    """One line of a log: what it counts, whether that alone is a finding, and what to do next."""
    log = tmp_path / "engine.log"
    llama = "draft acceptance rate = {} (    {} accepted /   144 generated)"
    for text, code, words, *more in (
        (
            LOG.format("0.600, 0.300, 0.140"),
            3,
            "K = 3; 300 rounds with drafts; 312 of 900 draft tokens accepted (34.7%)",
        ),
        (llama.format(0.01389, 2), 3, "the engine does not report K: give -k"),
        (llama.format(0.01389, 2), 1, "at most 14.0% of the first drafts", "-k", "3"),
        ("draft acceptance rate = 0.0 (    0 accepted /   4 generated)", 3, "not compared"),
        (
            '{"num_drafts": 100, "draft_tokens": 1600, "accepted": 150, "per_position": [80, 40, 20, 10]}',
            3,
            "a_1 = 0.80",
        ),
        ("draft acceptance rate = 1.2 (   12 accepted /    10 generated)", 3, "12 of 10 draft tokens", "-k", "3"),
        (
            "[2026-11-20 08:12:44 TP0] Decode batch. accept len: 1.02, cuda graph: True",
            3,
            "mean acceptance length 1.02",
        ),
        (f"{llama.format(0.9, 130)}\nSGLANG_SIMULATE_ACC_LEN=3", 1, "not the head's own, by"),
    ):
        log.write_text(text)
        args = ["diagnose", "--engine", str(log), *more]
        done = CliRunner().invoke(app, args, env={"COLUMNS": "300"})
        found = done.exit_code, words in done.output, "nextn audit MODEL" in done.output
        assert found == (code, True, True), done.output
        record = json.loads(CliRunner().invoke(app, [*args, "--json", "--out", str(tmp_path / "o.json")]).output)
        assert record["outcome"] == ("failed" if code == 1 else "inconclusive")
        again, first = read(json.dumps(record)), read(log)
        assert (again.draft_tokens, again.mean_length, again.overrides) == (
            first.draft_tokens, first.mean_length, first.overrides,
        )  # fmt: skip
        assert json.loads((tmp_path / "o.json").read_text()) == record
    for option, words in (
        (["--drive"], "--drive: only with MODEL"),
        (["--temperatures", "1", "--rule", "argmax"], "--temperatures, --rule: only with MODEL"),
        (["-k", "5"], "-k 5, but the engine's counters are for K = 3"),
    ):
        log.write_text(LOG.format("0.600, 0.300, 0.140"))
        refused = CliRunner().invoke(app, ["diagnose", "--engine", str(log), *option])
        assert words in str(refused.exception)


def run(engine, prompts, *more, code=None):
    args = ["diagnose", FIXTURES / "glm", "--engine", engine, "--prompts", prompts, "--max-tokens", 20]
    args += ["--backend", "torch", "--dtype", "float32", "--temperatures", "0", *more]
    result = CliRunner().invoke(app, [str(each) for each in args])
    assert code is None or result.exit_code == code, result.output + str(result.exception)
    return result


LLAMA_CPP = "slot print_timing: id  0 | task 0 | draft acceptance rate = 0.00000 (    0 accepted /   120 generated)\n"


def test_k_is_needed_before_the_model_is_loaded(tmp_path, prompts, monkeypatch):
    log = tmp_path / "engine.log"
    log.write_text(LLAMA_CPP)
    with monkeypatch.context() as patch:
        patch.setattr(nextn.Model, "load", lambda *_, **__: pytest.fail("loaded"))
        assert "give -k" in str(run(log, prompts).exception)
        with pytest.raises(NextnError, match="give -k"):
            nextn.diagnose("tiny", str(log))
    for how in (("-k", 2), ("--flags", "llama-server --spec-draft-n-max 2")):
        result = run(log, prompts, *how, code=1)
        assert "findings  nothing-accepted or head-unset" in result.stdout


@pytest.mark.more
def test_a_log(tmp_path, prompts):
    """As a table and as JSON; the file that --out names holds what --json prints."""
    log = tmp_path / "engine.log"
    log.write_text(LOG.format("0.690, 0.440, 0.250"))
    said = run(log, prompts, code=1).stdout
    assert "findings  wrong-hidden" in said
    assert "known in  ggml-org/llama.cpp#24025" in said
    assert "to do" in said
    assert "--drive" in said
    record = json.loads(run(log, prompts, "--json", "--out", tmp_path / "out.json", code=1).stdout)
    assert record == json.loads((tmp_path / "out.json").read_text())
    assert record["named"][0] == "wrong-hidden"
    assert record["settings"]["num_speculative_tokens"] == 3


@pytest.mark.slow
def test_driving_a_running_engine(serve, prompts, trained):
    url = serve(kind=ServedModel, model=trained["glm"])
    said = run(url, prompts, "--drive", code=0).stdout
    assert "no findings  the engine shows what this head should give" in said
    assert "would not show" in said
    plan = ReferencePlan(temperatures=(0.0,), max_tokens=20, rule="ratio", backend="torch")
    found = nextn.diagnose(trained["glm"], url, prompts, plan, drive=True)
    assert (found.outcome, found.to_dict()["cases"][0]["prompts"]) == ("passed", 8)
    assert (found.audit_notes, found.reference.prompts_source["num"]) == ((), 8)


@pytest.mark.slow
def test_what_it_says_to_do_followed(tmp_path, serve, prompts, trained):
    """--drive, which a log needs; then the advice names what is wrong in the engine, and without it nothing is said."""
    log = tmp_path / "engine.log"
    log.write_text(LOG.format("0.690, 0.440, 0.250"))
    assert "HOST:PORT --drive" in run(log, prompts, code=1).stdout
    for fault in ("no-prefill", "inputs-swapped"):
        model, contract = faulty(trained["glm"], fault)
        url = serve(kind=ServedModel, model=model, contract=contract)
        said = run(url, prompts, "--drive", code=1).stdout
        assert BY_NAME[fault].advice in " ".join(said.split())
        assert "HOST:PORT --drive" not in said
    url = serve(kind=ServedModel, model=trained["glm"], contract=Contract())
    assert "no findings" in run(url, prompts, "--drive", code=0).stdout


@pytest.mark.parametrize(
    ("contract", "temperature", "named"),
    [
        case(Contract(), 0, "no-fault", quick=False),
        case(Contract(prefill=False), 0, "no-prefill", quick=True),
        case(Contract(prefill=False), 1, "no-prefill", quick=False),
    ],
)
@pytest.mark.slow
def test_streamed_trunk(contract, temperature, named, serve, prompts, trained, tmp_path):
    """The reference is of the engine's own answers; it names what the loaded one names, but for faults of decoding."""
    options = ("--drive", "--json", "--states", tmp_path / "states", "--temperatures", temperature, "--rule", "ratio")
    records = []
    for more in ((), ("--stream",)):
        url = serve(kind=ServedModel, model=trained["glm"], contract=contract)
        records.append(json.loads(run(url, prompts, *options, *more, code=int(named != "no-fault")).stdout))
    loaded, streamed = records
    assert loaded["named"] == streamed["named"] == [named]
    by_name = [{each["name"]: each for each in record["causes"]} for record in records]
    assert by_name[0].keys() - by_name[1].keys() == {"stale-head-cache"}
    assert [record["cases"][0]["diverged_share"] for record in records] == [temperature, 0]
    if not temperature:
        for name, cause in by_name[1].items():
            for figure in ("mean_acceptance_length", "p_value", "log_likelihood"):
                assert cause[figure] == pytest.approx(by_name[0][name][figure], rel=1e-3), (name, figure)
    assert any("stale-head-cache" in note for note in streamed["notes"])
    assert list((tmp_path / "states").rglob("states.json"))


def test_streamed_trunk_and_an_engine_of_another_model(serve, prompts, trained, tmp_path):
    url = serve("other-trunk", kind=ServedModel, model=trained["glm"])
    record = json.loads(run(url, prompts, "--drive", "--stream", "--json", "--states", tmp_path / "states").stdout)
    (note,) = (note for note in record["notes"] if "not the model's own" in note)
    assert note.endswith("the engine has other weights, or a quantized trunk")


class Unseeded(ServedModel):
    """Whose samples never come twice."""

    def decode(self, prompt, body, **options):
        return super().decode(prompt, body | {"seed": len(self.requests)}, **options)


@pytest.mark.slow
def test_interrupted_streaming_resumes_with_the_same_answers(serve, prompts, trained, tmp_path, monkeypatch):
    """Also sampled ones: nothing is asked twice, so that the states are of the texts; the next run asks anew."""
    url, served = serve(kind=Unseeded, model=trained["glm"]), []
    real = given_texts.full_text_outputs

    def interrupted(trunk, texts, *, on_layer, **options):
        def stop(progress):
            on_layer(progress)
            raise KeyboardInterrupt

        return real(trunk, texts, on_layer=stop, **options)

    options = ("--drive", "--stream", "--json", "--states", tmp_path / "states", "--temperatures", "0,1")
    options = (*options, "--max-tokens", 8)
    with monkeypatch.context() as patch:
        patch.setattr(given_texts, "full_text_outputs", interrupted)
        assert run(url, prompts, *options).exit_code == 130
    (folder,) = (tmp_path / "states").glob("diagnose-*")
    served.append(serve.running[0].num)
    streamed = []
    monkeypatch.setattr(streaming_plan, "stream_record", lambda layers, _: streamed.append(list(layers)) or {})
    result = run(url, prompts, *options)
    assert json.loads(result.stdout)["cases"][0]["prompts"] == 8
    served.append(serve.running[0].num)
    assert [layer.resumed for layer in streamed[0]] == [True, *[False] * (len(streamed[0]) - 1)]
    assert served[1] - served[0] <= 4  # what the engine can do, and its weights
    assert not folder.exists()
    run(url, prompts, *options)
    assert serve.running[0].num - served[1] >= 16


def test_answers_before_a_restart_of_the_engine_are_not_used(serve, prompts, trained, tmp_path):
    """Its counters began anew, so it may run at other settings."""
    url = serve(kind=ServedModel, model=trained["glm"])
    endpoint, (text,) = Endpoint.open(url, Budget()), refrain(1, 33, seed=10**6).tolist()
    observation = ask_prompts(endpoint, [tuple(text)], [0], 0.0, 8)
    assert observation.answers[0].ids
    for lead, expected in ((0, observation), (1, None)):
        totals = read_counters(endpoint)
        totals = replace(totals, num_drafts=totals.num_drafts + lead)
        _store_observation(tmp_path / "observed.json", observation, totals)
        assert _stored_observation(tmp_path / "observed.json", endpoint) == expected
    (tmp_path / "observed.json").write_text("{}")
    with pytest.raises(NextnError, match="not readable: 'totals'; remove it"):
        _stored_observation(tmp_path / "observed.json", endpoint)


def test_streamed_trunk_cannot_generate(serve, prompts, tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("draft acceptance = 0.5 (2 accepted / 4 generated), mean len = 2.0\n")
    for engine, more in ((str(log), ("-k", "2")), (serve(), ("--drive", "--own-template"))):
        error = run(engine, prompts, "--stream", *more).exception
        assert "so the texts are the engine's answers to prompts of token ids: add --drive" in str(error)


def test_counters_of_a_running_engine_as_they_are(serve, prompts, trained):
    """Without --drive nothing is asked of it but its metrics; none yet are none."""
    url = serve(kind=ServedModel, model=trained["glm"])
    error = run(url, prompts).exception
    assert "counts no round that drafted" in str(error)


@pytest.mark.parametrize(
    ("faults", "model", "more", "reported"),
    [
        (["no-metrics"], "", [], "no metrics"),
        (["html"], "", [], "no metrics"),
        (["html"], "", ["--drive"], "an HTML page"),
        ([], "#other", [], "no model_name 'other'"),
        ([], "#other", ["--drive"], "has no model 'other'"),
        (["two-models"], "", ["--drive"], "choose one, as in"),
        (["key"], "", ["--drive"], "it requires a key"),
    ],
)
def test_what_an_engine_may_lack(serve, prompts, faults, model, more, reported):
    error = run(f"{serve(*faults)}{model}", prompts, *more).exception
    assert isinstance(error, NextnError)
    assert error.exit_code == 2
    assert reported in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "more", "reported"),
    [
        ("nothing of drafts\n", [], "no draft counts"),
        ("Decode batch. #running-req: 1, accept len: 1.90, gen throughput\n", [], "give -k"),
        (LOG.format("0.690, 0.440, 0.250"), ["-k", "4"], "are for K = 3"),
        (LOG.format("0.690, 0.440, 0.250"), ["-k", "0"], "num_speculative_tokens = 0; expected 1 to 256"),
        (LOG.format("0.690, 0.440, 0.250"), ["--temperatures", "0,1"], "of one temperature"),
        (LOG.format("0.690, 0.440, 0.250"), ["--rule", "match"], "expected one of block"),
    ],
)
def test_what_a_file_may_lack(tmp_path, prompts, text, more, reported):
    log = tmp_path / "engine.log"
    log.write_text(text)
    error = run(log, prompts, *more).exception
    assert isinstance(error, NextnError)
    assert error.exit_code == 2
    assert reported in str(error)


def reference(num_speculative_tokens):
    plan = ReferencePlan(num_speculative_tokens)
    return SimpleNamespace(plan=plan, origin_warnings=[], stream=None, domains=(), published_record=dict)


def table_columns(diagnosis, monkeypatch):
    """Title -> cells of the table that is shown."""
    tables = []
    monkeypatch.setitem(_show_diagnosis.__globals__, "print_table", tables.append)
    _show_diagnosis(diagnosis)
    return [(str(column.header), [*map(str, column.cells)]) for column in tables[0].columns]


def test_the_table_has_the_group_that_is_not_distinguished_and_marks_priors(monkeypatch, capsys):
    """Rows of the group are shown however many causes are likelier; a prior that a likelihood contains is beside it."""
    rates = {"no-fault": 0.8, "head-unset": 0.1, "inputs-swapped": 0.1, "no-prefill": 0.24, "wrong-hidden": 0.12}
    rates |= dict.fromkeys(["exact-match", "pairs-off-by-one", "head-2-bit", "position0"], 0.22)
    expected = tuple(ExpectedCounts(name, [[40.0]] * 9, [[40 * rate]] * 9) for name, rate in rates.items())
    observation, counts = EngineObservation(0.0, Counters("vLLM"), (0,)), ObservedCounts((40,), (4,))
    seen = ObservedCase(observation, counts, expected, 1.0, 0)
    diagnosis = Diagnosis("x", reference(1), (seen,), priors={"inputs-swapped": 0.05, "wrong-hidden": 0.05})
    columns = table_columns(diagnosis, monkeypatch)
    marks = dict(zip(columns[0][1], columns[-1][1], strict=True))
    assert {name: mark for name, mark in marks.items() if mark} == dict.fromkeys(
        ("inputs-swapped", "wrong-hidden"), "prior x0.05, not distinguished"
    )
    assert list(marks)[-3:] == ["inputs-swapped", "wrong-hidden", "no-fault"]
    assert "\nthese counts do not distinguish them from: inputs-swapped, wrong-hidden\n" in capsys.readouterr().out


def test_a_case_with_fewer_depths_than_k(monkeypatch):
    """Its AL is in the column of the others, not in that of a depth."""
    seen = EngineObservation(0.0, Counters("vLLM"), (0,))
    fine = ExpectedCounts("no-fault", [[9.0, 6.0, 4.0]] * 5, [[6.0, 4.0, 2.0]] * 5)
    cases = tuple(
        ObservedCase(seen, ObservedCounts(drafted, accepted), (fine,), 1.0, 0)
        for drafted, accepted in (((90, 60, 40), (60, 40, 20)), ((90, 60), (60, 40)))
    )
    diagnosis = Diagnosis("x", reference(3), cases)
    columns = dict(table_columns(diagnosis, monkeypatch))
    assert columns["a_3"][:2] == ["0.500", ""]
    assert columns["AL"][:2] == ["2.33", "2.11"]


@pytest.mark.more
def test_neither_file_nor_engine(prompts):
    assert "no such file, and not an address" in str(run("engine.log", prompts).exception)
    assert "nothing answers" in str(run("localhost:9", prompts).exception)
    assert "nothing answers" in str(run("localhost:9", prompts, "--drive").exception)


def test_an_engine_that_was_not_named(tmp_path):
    """A log, or an address, in the place of the model is what --engine should name; else other commands are."""
    log = tmp_path / "engine.log"
    log.write_text(LLAMA_CPP)
    for given, command in (
        ([str(log)], f"`nextn diagnose --engine {log}`"),
        (["localhost:9"], "`nextn diagnose --engine localhost:9`"),
        (["tiny"], "`nextn audit "),
        ([], "`nextn measure MODEL`"),
    ):
        assert command in str(CliRunner().invoke(app, ["diagnose", *given]).exception)
