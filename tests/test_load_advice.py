"""K by load: the schedule from hand-made speeds, the engines' syntax, and two servers that are measured."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from typer.testing import CliRunner

from nextn.cli import app
from nextn.cli.bench import show_by_load
from nextn.engines.client import Budget
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint
from nextn.errors import BudgetError, ConfigError, EngineError
from nextn.evaluate import load_advice
from nextn.evaluate.load_advice import LoadAdvice, LoadPoint
from nextn.stats.speedup import Spread

RATES = (0.85, 0.7, 0.6)  # AL 2.802


def point(streams, speedup, low=None, length=2.802, drafts=3.0):
    unknown = Spread.of([])
    return LoadPoint(streams, unknown, unknown, Spread(speedup, low or speedup, speedup, 3), length, drafts)


def advice(*points):
    return LoadAdvice("vLLM", 0.0, RATES, points)


def test_cost_of_a_round_decides_k():
    """A round of three drafts that costs 1.6 plain rounds: each draft 0.2, and K = 3 is what was measured."""
    one = point(1, 2.802 / 1.6)
    assert one.round_cost == pytest.approx(1.6)
    assert one.expected(RATES) == pytest.approx([1, 1.85 / 1.2, (1.85 + 0.595) / 1.4, 2.802 / 1.6])
    assert one.best(RATES) == 3
    assert point(8, 2.802 / 2.4).best(RATES) == 2  # 0.467 a draft: 1.26, 1.265, 1.17
    assert point(32, 0.63).best(RATES) == 0


def test_an_engine_that_accepts_nothing_has_a_record_without_nan():
    """Depths that no round reached have no rate: null, as JSON has no NaN."""
    rates = load_advice._rates(Counters("vLLM", 100, 300, 0, (0, 0, 0)))
    record = LoadAdvice("vLLM", 0.0, rates, (point(1, 0.5, length=1.0),)).as_record()
    assert json.loads(json.dumps(record, allow_nan=False))["acceptance"] == [0.0, None, None]


def test_an_uncertain_speedup_is_none():
    assert point(4, 1.1).best(RATES) > 0
    assert point(4, 1.1, low=0.7).best(RATES) == 0
    assert (
        "at 4 and 8 streams MTP was faster in some passes"
        in advice(point(1, 1.5), point(4, 1.1, low=0.7), point(8, 1.2, low=0.9)).notes[0]
    )


def test_a_round_that_costs_less_than_a_plain_one_has_free_drafts():
    assert point(1, 3.5).expected(RATES) == pytest.approx([1, 1.85, 2.445, 2.802])


@pytest.mark.parametrize(("drafts", "length"), [(3.0, 2.802), (2.75, 2.802), (3.0, 2.6)])
def test_the_measured_k_is_expected_to_be_as_fast_as_measured(drafts, length):
    """Also where the ends of short texts cut rounds short, and where the AL of one load is not that of all."""
    assert point(1, 1.4, drafts=drafts, length=length).expected(RATES)[3] == pytest.approx(1.4)


def test_an_engine_that_chooses_k_itself_is_noted():
    """Two drafts a round that cost 0.6 together are 0.3 each."""
    one = point(1, 2.4 / 1.6, length=2.4, drafts=2.0)
    assert one.expected(RATES)[1] == pytest.approx(1.85 / 1.3)
    assert "drafted 2.0 of 3" in advice(one).notes[0]
    assert not advice(point(1, 1.75)).notes
    assert not advice(point(1, 1.75, drafts=2.85)).notes  # fixed, and cut short at the end of texts


def test_a_k_that_was_not_measured_at_its_load_is_noted():
    """K = 3 was measured at every load, and so was none."""
    (note,) = advice(point(1, 1.75), point(8, 1.2), point(32, 0.63)).notes
    assert "K = 2 at 8 streams: " in note
    assert "rounds of 3 drafts" in note


@pytest.mark.parametrize(("num_prompts", "asked"), [(164, [16, 16, 32]), (8, [8, 8, 32]), (1, [2, 8, 32])])
def test_each_load_asks_sixteen_prompts_or_two_for_each_stream(num_prompts, asked):
    assert [load_advice.num_requests(num_prompts, streams) for streams in (1, 4, 16)] == asked


def test_schedule_takes_the_larger_load_between_two():
    found = advice(point(1, 1.75), point(4, 1.75), point(8, 1.2), point(32, 0.63))
    assert found.schedule == [(1, 4, 3), (5, 8, 2), (9, None, 0)]
    assert "K = 3 at 1 to 4 streams" in found.summary
    assert "off from 9 streams on" in found.summary


def settings(engine, *points):
    return LoadAdvice(engine, 0.0, RATES, points).settings


def test_settings_cover_every_number_of_streams():
    """vLLM wants ranges from 1 without gaps, SGLang the first number of each."""
    points = point(1, 1.75), point(8, 1.2), point(32, 0.63)
    config = json.loads(settings("vLLM", *points)["vLLM"].partition("'")[2].rstrip("'"))
    assert config["num_speculative_tokens"] == 3
    ranges = config["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))
    steps = json.loads(settings("SGLang", *points)["SGLang"].partition("FILE: ")[2])
    assert steps == {"1": {"candidate_steps": [3]}, "2": {"candidate_steps": [2]}, "9": {"candidate_steps": [0]}}
    assert settings("vLLM", point(1, 0.5)) == {}


@pytest.mark.parametrize("engine", ["vLLM", "SGLang", "llama.cpp", "nextn", "LMDeploy"])
def test_settings_are_those_of_the_measured_engine(engine):
    """What a round costs in one engine says nothing of another."""
    assert [*settings(engine, point(1, 1.75))] == ([engine] if engine != "LMDeploy" else [])


def test_an_engine_with_one_k_is_told_for_which_loads_it_is():
    """llama.cpp keeps the K that helps one stream at 32, where it slows down."""
    several = settings("llama.cpp", point(1, 1.75), point(32, 0.63))["llama.cpp"]
    assert several.startswith("--spec-type draft-mtp --spec-draft-n-max 3")
    assert "at 1 stream" in several
    assert settings("llama.cpp", point(1, 0.63), point(32, 1.75))["llama.cpp"].startswith("no --spec-type, ")
    assert "stream" not in settings("llama.cpp", point(1, 1.75), point(32, 1.75))["llama.cpp"]


def run(*arguments):
    return CliRunner().invoke(app, ["advise", *map(str, arguments)], catch_exceptions=False).output


def refusal(*arguments):
    with pytest.raises(ConfigError) as caught:
        run(*arguments)
    return str(caught.value)


def test_two_servers(tmp_path, monkeypatch):
    """Speeds by the clock, acceptance by the counters; the record is read back, and serve takes its K."""
    clock = load_advice._tokens_per_s

    def tokens_per_s(server, *asked):
        """What the clock says of the server with MTP is 1.5 times what it says of the other."""
        clock(server, *asked)
        return 150.0 if server.url == engine.url else 100.0

    monkeypatch.setattr(load_advice, "_tokens_per_s", tokens_per_s)
    engine, plain, off = FakeEngine(), FakeEngine(drafts=False), FakeEngine("off")
    try:
        asked = ("--engine", engine.url, "--max-tokens", 12, "--temperatures", 0, "--batches", "1,2", "--out", tmp_path)
        run("--against", plain.url, *asked)
        assert "this server drafts, too" in refusal("--against", engine.url, *asked)
        assert "counted no drafts" in refusal("--against", plain.url, "--engine", off.url, *asked[2:])
    finally:
        engine.stop()
        plain.stop()
        off.stop()
    record = json.loads((tmp_path / "advice.json").read_text())
    assert [each["batch"] for each in record["forecasts"]] == [1, 2]
    one = record["forecasts"][0]
    assert (one["tokens_per_s"]["num"], one["tokens_per_s"]["median"], one["speedup"]["median"]) == (3, 150, 1.5)
    # Three of four rounds of the engine keep both drafts, the fourth none.
    assert record["acceptance"] == [0.75, 1.0]
    assert (one["mean_acceptance_length"], one["mean_drafts"]) == (2.5, 2.0)
    assert one["round_cost"] == pytest.approx(2.5 / 1.5)
    assert one["best_num_speculative_tokens"] == 2


def test_a_row_has_the_speeds_of_one_repeat(monkeypatch, capsys):
    """Medians of each server alone would show 100 and 100 beside a speedup of 1.25."""
    speeds = {"with": iter([100, 200, 50]), "without": iter([80, 100, 100])}
    monkeypatch.setattr(load_advice, "_tokens_per_s", lambda server, *_: next(speeds[server]))
    counted = SimpleNamespace(gained=lambda **_: Counters("vLLM", 100, 200, 150, (90, 60)))
    monkeypatch.setattr(load_advice, "CounterSpan", lambda *_, **__: counted)
    found = load_advice.measure_loads("with", "without", ["a"], [1])
    (one,) = found.points
    assert one.speedup.median == one.middle[1] / one.middle[0] == 1.25
    monkeypatch.setenv("COLUMNS", "160")
    show_by_load(found)
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["1", "80", "100", "1.25"] in rows


def test_each_temperature_is_shown_when_it_is_measured(monkeypatch):
    """Also in a pipe there is news before; an engine that goes away loses the later ones alone."""
    engine, plain = FakeEngine(), FakeEngine(drafts=False)
    measured, num_answers = load_advice.measure_loads, []

    def measure(*servers, on_answer, temperature, **options):
        if temperature:
            raise EngineError("nothing answers")
        count = lambda: num_answers.append(on_answer())  # noqa: E731
        return measured(*servers, on_answer=count, temperature=temperature, **options)

    monkeypatch.setattr(load_advice, "measure_loads", measure)
    asked = ("--engine", engine.url, "--against", plain.url, "--max-tokens", 12, "--batches", "2")
    done = CliRunner().invoke(app, ["advise", *map(str, asked)])
    engine.stop()
    plain.stop()
    assert "T=1: " in done.stderr
    assert "best K" in done.stdout
    assert isinstance(done.exception, EngineError)
    assert len(num_answers) == load_advice.total_requests(16, [2])


def test_servers_that_measure_their_own_costs_are_waited_for(monkeypatch):
    """Otherwise the idle one takes the processor of the one that is asked. Other engines have no such state."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    engine, plain = FakeEngine("measuring"), FakeEngine(drafts=False)
    servers = [Endpoint.open(each.url, Budget()) for each in (plain, engine)]
    assert list(load_advice.wait_until_measured(servers)) == [engine.url] * 2
    engine.num_asked = 0
    done = CliRunner().invoke(
        app, ["advise", "--engine", engine.url, "--against", plain.url, "--max-tokens", "12", "--batches", "2"]
    )
    assert done.stderr.count(f"{engine.url} measures its own costs first") == 1
    monkeypatch.setattr(load_advice, "_MOST_WAIT_S", -1)
    engine.num_asked = 0
    with pytest.raises(EngineError, match="still measures its own costs"):
        list(load_advice.wait_until_measured(servers))
    engine.stop()
    plain.stop()


def test_a_budget_that_is_used_up_is_no_answer():
    """Unlike an engine without such a document."""

    def fails(error):
        def json(path):
            raise error

        return Endpoint(SimpleNamespace(json=json, url="x"), None, None)

    assert not fails(EngineError("HTTP 404")).is_measuring()
    with pytest.raises(BudgetError):
        fails(BudgetError("used up")).is_measuring()


def test_a_gain_above_al_is_doubted():
    """A round with drafts takes at least as long as one without: the server without MTP was slowed down."""
    (note,) = advice(point(1, 1.75), point(16, 3.1, low=2.9)).notes
    assert "at 16 streams MTP was faster than its AL allows" in note
    assert not advice(point(1, 2.8, low=2.7)).notes


def test_options_that_do_not_go_together():
    for arguments in (
        (),
        ("--against", "localhost:1"),
        ("tiny", "--against", "localhost:1", "--engine", "localhost:2"),
    ):
        assert refusal(*arguments)
