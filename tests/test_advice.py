"""Advice from hand-made costs and acceptances, and both measuring verbs on a fixture."""

import json
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny import FIXTURES
from typer.testing import CliRunner

from nextn.cli import app
from nextn.cli.bench import _show_advice, serving
from nextn.edit.convert import extract
from nextn.errors import NextnError
from nextn.evaluate import advice, decoding_costs
from nextn.evaluate.advice import REPETITIVE, Advice, forecast
from nextn.evaluate.decoding_costs import Machine
from nextn.stats import plots
from nextn.stats.acceptance import Acceptance
from nextn.stats.speedup import Costs, Spread, expected_speedup


def costs(v, c):
    return Costs(1, 64, tuple(Spread(each, each, each, 1) for each in v), Spread(c, c, c, 1))


def drafted(*rates, num_drafted=1000):
    kept = tuple(round(rate * num_drafted) for rate in rates)
    return Acceptance((num_drafted,) * len(rates), kept, num_drafted, num_drafted)


def test_mtp_that_pays():
    """Not the best K; an interval that leaves out the value; an overhead that is not taken off."""
    found = forecast(drafted(0.9, 0.8, 0.1), costs([1, 1.1, 1.2, 1.9], 0.1), temperature=0.0, overhead=0.2)
    assert [choice.num_speculative_tokens for choice in found.choices] == [1, 2, 3]
    assert found.best.num_speculative_tokens == 2
    assert found.best.speedup == pytest.approx((1 + 0.9 + 0.72) / (1.2 + 0.2 + 0.2))
    assert found.best.interval[0] < found.best.speedup < found.best.interval[1]
    assert found.pays
    assert found.summary.startswith("turn it on: 1.64 x expected")
    assert found.as_record()["best_num_speculative_tokens"] == 2


def test_how_to_serve_it(here, tmp_path):
    """The command prints another engine's; nothing is said where MTP is to be left off."""
    faster, slower = (forecast(drafted(rate), costs([1, 1.1], 0.1), temperature=0.0) for rate in (0.9, 0.01))
    line, costs_of = serving("tiny", None, [slower, faster])
    assert "K = 1 is best at nextn's own costs" in costs_of  # an engine's rounds cost something else
    assert "--against" in costs_of
    _, other = re.findall("`nextn (.+?)`", line)
    code, out, _ = here(*other.split())
    assert (code, '"num_speculative_tokens": 1' in out) == (0, True)
    assert serving("tiny", None, [slower]) == []
    shutil.copytree(FIXTURES / "qwen", tmp_path / "model")
    extract(tmp_path / "model", tmp_path / "head.safetensors")
    line, _ = serving(str(tmp_path / "model"), str(tmp_path / "head.safetensors"), [faster])
    _, *commands = re.findall("`nextn (.+?)`", line)  # to put the head into its model, and to serve that
    assert [(each.split()[0], here(*each.split())[0]) for each in commands] == [("restore", 0), ("serve", 0)]
    line, _ = serving("my model", "x", [faster])
    assert line.startswith("serve it: `nextn serve 'my model' --head x` chooses K by the load; x: neither a folder")


def test_mtp_that_costs():
    """An honest no: with the acceptance it would take, or that none is enough."""
    found = forecast(drafted(0.3, 0.3), costs([1, 1.4, 2.0], 0.2), temperature=0.0)
    assert not found.pays
    assert found.best.num_speculative_tokens == 1
    assert found.summary.startswith("leave it off here: 0.81 x expected")
    assert found.summary.endswith("at K = 1; it pays from an acceptance of 0.60 on, and has 0.30")
    assert found.as_record()["best_num_speculative_tokens"] == 0
    dear = forecast(drafted(0.99), costs([1, 1.9], 0.5), temperature=0.0)
    assert "no acceptance makes it pay" in dear.summary


def test_a_head_that_is_never_accepted_has_a_record_without_nan():
    counts = Acceptance((10, 0, 0), (0, 0, 0), 10, 10)
    record = forecast(counts, costs([1, 1.4, 2.0, 2.5], 0.2), temperature=0.0).as_record()
    assert json.loads(json.dumps(record, allow_nan=False))["acceptance"] == [0.0, None, None]


def test_few_rounds_show_no_speedup():
    """A lucky result of ten rounds must not be reported as a gain."""
    few = forecast(drafted(0.6, num_drafted=10), costs([1, 1.3], 0.2), temperature=1.0)
    assert few.best.speedup > 1 > few.best.interval[0]
    assert not few.pays
    assert "may not be faster" in few.summary
    assert forecast(drafted(0.6, num_drafted=10000), costs([1, 1.3], 0.2), temperature=1.0).pays


def test_repetitive_texts_give_no_advice():
    """Repetitive text is easy to draft, so it does not justify turning MTP on."""
    found = forecast(drafted(0.99), costs([1, 1.1], 0.1), temperature=0.0, doubt=REPETITIVE)
    assert found.best.interval[0] > 1
    assert not found.pays
    assert found.summary.startswith("leave it off until measured on other prompts: every text is repetitive")


def test_no_round_no_forecast():
    with pytest.raises(NextnError, match="no text was long enough"):
        forecast(Acceptance((), (), 0, 0), costs([1, 1], 0.1), temperature=0.0)


@pytest.fixture
def prompts(tmp_path):
    """Token ids for a model without a tokenizer."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [3, 1, 4, 1], "domain": "x"}\n{"prompt": [2, 7], "domain": "y"}\n')
    return path


def nextn(*args):
    return CliRunner().invoke(app, [*map(str, args)], env={"COLUMNS": "200"})


@pytest.mark.more
def test_advise_says_yes_or_no(prompts, tmp_path):
    """Every batch size and context has its forecast; at the largest K it equals what was measured."""
    args = ["advise", FIXTURES / "qwen", "--prompts", prompts, "-k", 2, "--max-tokens", 24, "--batches", "1,2"]
    done = nextn(*args, "--contexts", "16,40", "--json", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert json.loads((tmp_path / "out" / "advice.json").read_text()) == record
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"advice.json"}
    cells = [(each["temperature"], each["batch"], each["context"]) for each in record["forecasts"]]
    assert cells == [(t, b, c) for t in (0, 1) for c in (16, 40) for b in (1, 2)]
    assert record["summary"] == record["forecasts"][0]["summary"]
    assert record["pays"] == record["summary"].startswith("turn it on")
    one = record["costs"][0]
    again = costs(one["v"], one["c"])
    overhead = max(0.0, record["measured"][0]["overhead"])
    for choice in record["forecasts"][0]["by_num_speculative_tokens"]:
        rates = record["measured"][0]["acceptance"]
        wanted = expected_speedup(again, rates, choice["num_speculative_tokens"], overhead=overhead)
        assert choice["speedup"] == pytest.approx(wanted)


def test_costs_of_the_texts_are_measured_once(monkeypatch):
    """Two cost curves of one batch size and context would disagree."""
    measured = costs([1, 1.2, 1.5], 0.1)
    report = SimpleNamespace(costs=measured, plan=SimpleNamespace(temperatures=()))
    monkeypatch.setattr(advice, "run_benchmark", lambda *_, **__: report)
    monkeypatch.setattr(advice, "check_sizes", lambda *_, **__: None)
    monkeypatch.setattr(advice, "_other_costs", lambda *_: None)
    monkeypatch.setattr(advice, "measure_costs", lambda model, **how: replace(measured, batch=how["batch"]))
    plan = SimpleNamespace(k_values=(0, 2), backend="auto")
    found = advice.advise(None, (), plan, batches=(1, 2)).costs
    assert found[0] is measured
    assert found[1].batch == 2


def test_what_is_best_at_other_batch_sizes_is_said():
    figures = SimpleNamespace(acceptance=drafted(0.9), temperature=0.0, overhead=0.0, all_repetitive=False)
    plan = SimpleNamespace(k_values=(1,), temperatures=(0.0,))
    report = SimpleNamespace(figures=lambda temperature, k: figures, plan=plan, step_note=None)
    sizes = [replace(costs([1, v], 0.1), batch=batch) for batch, v in ((1, 1.2), (2, 1.3), (8, 3.0))]
    found = Advice(report, tuple(sizes))
    assert found.by_batch(found.forecasts[0]) == "at other batch sizes: K = 1 at 2, off at 8"
    alone = Advice(report, (sizes[0], replace(sizes[0], context=99)))
    assert alone.by_batch(alone.forecasts[0]) is None


def test_a_busy_machine_is_noted(monkeypatch):
    machine = Machine("", 2, 2, {}, "", 1.0, 1, 1, 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert replace(machine, load=2.9).busy_note is None
    assert "10.2 on 2 cores" in replace(machine, load=10.2).busy_note


def test_advise_in_words(prompts):
    done = nextn("advise", FIXTURES / "qwen", "--prompts", prompts, "-k", 2, "--max-tokens", 24, "--batches", 1)
    assert done.exit_code == 0, done.output
    assert "greedy: turn it on" in done.output or "greedy: leave it off" in done.output
    assert re.search(r"K = 2 was run: \d\.\d\d x measured, \d\.\d\d x expected", done.output)
    assert "break-even" in done.output
    assert re.search(
        r"with --weights int8: \d+\.\d\d x without MTP, \d+\.\d\d x at K = [12]; its text differs", done.output
    )


def test_other_weights(prompts, monkeypatch):
    """Their speed is in the unit of the others: half the time of every pass is twice the speed of each."""
    stored, k = costs([1, 1.2, 1.5], 0.1), 2
    half = replace(stored, steps=tuple(Spread(*(each.median / 2,) * 3, 1) for each in stored.steps),
                   draft=Spread(0.05, 0.05, 0.05, 1))  # fmt: skip
    report = SimpleNamespace(
        figures=lambda temperature, k: SimpleNamespace(
            acceptance=drafted(0.9, 0.5), temperature=temperature, overhead=0.2, all_repetitive=False
        ),
        plan=SimpleNamespace(k_values=(k,), temperatures=(0.0,)),
        step_note=None,
    )
    found = Advice(report, (stored,), half)
    (each,) = found.headlines
    without, best, chosen = found.other_speeds(each)
    rates, overhead = each.rates, 0.4  # the same seconds are twice as many of the shorter steps
    wanted = {k: 2 * expected_speedup(half, rates, k, overhead=overhead) for k in (1, 2)}
    assert (without, best) == (pytest.approx(2), pytest.approx(max(wanted.values())))
    assert wanted[chosen] == pytest.approx(best)
    stored_best = f"MTP with the stored weights ({each.best.speedup:.2f} x at K = {each.best.num_speculative_tokens})"
    assert found.other_summary(each).endswith(f". Even without MTP, int8 (2.00 x) is faster than {stored_best}")
    assert Advice(report, (stored,), stored).other_summary(each).endswith("; its text differs")  # as fast as plain
    assert Advice(report, (stored,)).other_speeds(each) is None
    assert each.pays
    report.step_note = "it took twice as long"
    (each,) = Advice(report, (stored,)).headlines
    assert (each.pays, each.summary.partition(":")[0]) == (False, "leave it off until measured again")
    seen = []
    model = SimpleNamespace(trunk=SimpleNamespace(weights="stored"))
    monkeypatch.setattr(advice, "backend_for", lambda *_: SimpleNamespace(name="native"))
    monkeypatch.setattr(advice, "step_bytes", lambda trunk, bits=None: bits or 16)
    monkeypatch.setattr(advice, "measure_costs", lambda model, **how: seen.append((model.trunk.weights, how)) or half)
    assert advice._other_costs(model, SimpleNamespace(backend="auto", k_values=(k,)), stored) is half
    assert [weights for weights, _ in seen] == ["int8"]
    assert model.trunk.weights == "stored"
    monkeypatch.setattr(advice, "step_bytes", lambda trunk, bits=None: 16)
    assert advice._other_costs(model, SimpleNamespace(backend="auto", k_values=(k,)), stored) is None


def test_the_table_shows_the_best_k_with_its_interval(monkeypatch, capsys):
    """The table shows K, its expected speedup, and "off" if it may not be faster: not "best K 0" next to 1.72 x."""
    few = forecast(drafted(0.6, num_drafted=10), costs([1, 1.3], 0.2), temperature=1.0)
    figures = SimpleNamespace(num_speculative_tokens=1, speedup=Spread(1.5, 1.4, 1.6, 3))
    report = SimpleNamespace(figures=lambda *_: figures, plan=SimpleNamespace(k_values=(1,)), warnings=[])
    monkeypatch.setenv("COLUMNS", "160")
    _show_advice(
        SimpleNamespace(
            forecasts=[few], headlines=[few], report=report, other_summary=lambda _: None, by_batch=lambda _: None
        )
    )
    titles, row, verification = capsys.readouterr().out.splitlines()
    assert titles.split()[-9:] == ["best", "K", "speedup", "95", "%", "MTP", "AL", "acceptance", "break-even"]
    low, high = few.best.interval
    assert low < 1 < few.best.speedup
    assert row.split()[-7:-1] == ["1", f"{few.best.speedup:.2f}", f"{low:.2f}-{high:.2f}", "off", "1.60", "0.60"]
    assert "leave it off here, as it may not be faster" in verification
    assert "which includes a slowdown" in verification


def test_bench_as_text_and_files(prompts, tmp_path):
    args = ["bench", FIXTURES / "qwen", "--prompts", prompts, "-k", "1,2", "--max-tokens", 16, "--repeats", 1]
    done = nextn(*args, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for words in ("speedup", "greedy, x", "temperature 1, y", "v(m) 1.00", "GB/s", "note: "):
        assert words in done.output
    names = {"bench.json", "speedup.png", "curve.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


@pytest.mark.more
@pytest.mark.parametrize("where", ["measuring", "writing"])
def test_interrupted_leaves_nothing(prompts, tmp_path, monkeypatch, where):
    """Ctrl-C while it measures, or between two files: exit code 130, and the folder is as it was."""

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bench.json").write_text("old")
    monkeypatch.setattr(*((decoding_costs, "copy_bandwidth") if where == "measuring" else (plots, "speedups")), stop)
    args = ["bench", FIXTURES / "qwen", "--prompts", prompts, "-k", "1", "--max-tokens", 4, "--repeats", 1]
    assert nextn(*args, "--out", tmp_path / "out").exit_code == 130
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bench.json"]
    assert (tmp_path / "out" / "bench.json").read_text() == "old"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["bench", FIXTURES / "qwen"], "no tokenizer"),
        (["bench", FIXTURES / "qwen", "-k", "0"], "at least one of them above 0"),
        (["bench", FIXTURES / "qwen", "--out", "/proc/nextn"], "--out /proc/nextn: cannot create this folder"),
        (["advise", FIXTURES / "qwen", "-k", "0"], "at least one of them above 0"),
        (["advise", FIXTURES / "qwen", "--prompts", "P", "--contexts", "9999"], "do not fit the model's"),
    ],
    ids=str,
)
def test_bad_input(args, words, prompts):
    """A mistake that ends in a traceback."""
    short = ["--max-tokens", "4"] if "P" in args else []
    done = nextn(*(prompts if arg == "P" else arg for arg in args), *short)
    assert isinstance(done.exception, NextnError)
    assert words in str(done.exception)
