"""Order of the runs, figures from hand-made rounds, and a complete benchmark of a fixture."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from chats import chatty
from scipy.stats import binomtest
from tiny import build

from nextn.cli.acceptance import show_lengths
from nextn.cli.bench import _show_benchmark
from nextn.decoding.records import Round, SequenceRound
from nextn.decoding.rounds import rounds
from nextn.errors import ConfigError
from nextn.evaluate.benchmark import DEFINITIONS, BenchmarkReport, run_benchmark, with_one_pass
from nextn.evaluate.benchmark_runs import Run, benchmark_runs
from nextn.evaluate.decoding_costs import Machine
from nextn.evaluate.workload import BenchmarkPlan, Prompt
from nextn.settings import Sampling, Settings
from nextn.stats.acceptance import Acceptance
from nextn.stats.speedup import Costs, Spread

COSTS = Costs(1, 64, tuple(Spread(each, each, each, 1) for each in (2.0, 2.2, 2.4)), Spread(0.2, 0.2, 0.2, 1))
MACHINE = Machine("box", 2, 1, {}, "float32", 1e3, step_bytes=100, draft_bytes=10, peak_memory=0)
ONE = (Prompt("a", "x"),)
HONEST = tuple(range(1000))


def run(k, kept, *, prompt=0, temperature=0.0, repeat=0, seconds=1.0, text=HONEST):
    """A run whose rounds take `seconds` of wall time each, a tenth of it for drafts, and accept `kept` drafts each."""
    log, left = [Round((SequenceRound(0, (), 0, (text[0],)),), 0.0, 9.0)], list(text[1:])
    for count in kept:
        emitted = tuple(left.pop(0) for _ in range(count + 1))
        log.append(Round((SequenceRound(0, (7,) * k, count, emitted),), 0.1 * seconds, 0.8 * seconds))
    return Run(prompt, k, temperature, repeat, tuple(log), seconds * len(kept))


def report(*given, prompts=ONE, **plan):
    k_values = tuple({each.num_speculative_tokens for each in given})
    temperatures = tuple(sorted({each.temperature for each in given}))
    return BenchmarkReport("m", BenchmarkPlan(k_values, temperatures, **plan), tuple(prompts), given, COSTS, MACHINE)


def test_every_k_runs_at_every_position():
    """A K that always ran first would find the caches in another state: at each temperature each K runs everywhere."""
    plan = BenchmarkPlan(k_values=(1, 4), repeats=2)
    assert plan.k_values == (0, 1, 4)
    turns = list(plan.order(3))
    assert len({turn[:3] for turn in turns}) == len(turns) == 2 * 3 * 2
    assert sum(len(turn[3]) for turn in turns) == plan.num_runs(3)
    for temperature in plan.temperatures:
        orders = [turn[3] for turn in turns if turn[2] == temperature]
        for place in range(3):
            assert Counter(order[place] for order in orders) == {0: 2, 1: 2, 4: 2}
    pair = [turn[3] for turn in BenchmarkPlan(k_values=(5,), repeats=1).order(2) if turn[2] == 0]
    assert pair == [[0, 5], [5, 0]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"k_values": (0,)}, "at least one of them above 0"),
        ({"k_values": (-1, 2)}, "numbers of drafts"),
        ({"temperatures": (-1.0,)}, "temperature"),
        ({"temperatures": ()}, "expected at least one"),
        ({"repeats": 0}, "repeats = 0"),
        ({"max_tokens": 1}, "max_tokens = 1"),
        ({"num_copy_tokens": -1}, "num_copy_tokens = -1"),
    ],
)
def test_bad_plans(wrong, words):
    """A fault that shows only in the middle of the run."""
    with pytest.raises(ConfigError, match=words):
        BenchmarkPlan(**wrong)


@pytest.mark.more
def test_runs_are_the_decoders(trained):
    """Another seed, temperature or end than the plan's; runs in another order; the warm-up among them."""
    model, plan = trained["qwen"], BenchmarkPlan(k_values=(2,), max_tokens=12, repeats=2, seed=5)
    prompts = [Prompt((3, 1, 4), "x"), Prompt((2, 7), "y")]
    found = list(benchmark_runs(model, prompts, plan))
    wanted = [(r, p, t, k) for r, p, t, order in plan.order(2) for k in order]
    assert [(each.repeat, each.prompt, each.temperature, each.num_speculative_tokens) for each in found] == wanted
    for each in found:
        settings = Settings(
            num_speculative_tokens=each.num_speculative_tokens,
            sampling=Sampling(each.temperature),
            max_tokens=12,
            seed=5 + each.repeat,
        )
        log = rounds(model.trunk, model.head, [prompts[each.prompt].text], settings)
        assert each.tokens == tuple(token for one in log for token in one.rows[0].emitted)
        assert each.wall_s >= each.draft_s + each.verify_s > 0


def test_figures_by_hand():
    """Speed, speedup in pairs, time split, expected speedup, overhead and bytes of two prompts."""
    two = (Prompt("a", "x"), Prompt("b", "y"))
    given = [
        run(0, [0] * 12), run(2, [2, 0, 1, 2], seconds=1.5),
        run(0, [0] * 8, prompt=1, seconds=2.0), run(2, [2, 2], prompt=1, seconds=4.0),
    ]  # fmt: skip
    found = report(*given, prompts=two, repeats=1).figures(0.0, 2)
    speeds = [9 / 6, 6 / 8]
    assert found.tokens_per_s.median == pytest.approx(sum(speeds) / 2)
    ratios = [(9 / 6) / 1, (6 / 8) / 0.5]
    assert found.speedup.median == pytest.approx(sum(ratios) / 2)
    assert found.acceptance == Acceptance((6, 5), (5, 4), 6, 15)
    assert found.share == pytest.approx({"draft": 0.1, "verify": 0.8, "host": 0.1})
    assert found.expected_speedup == pytest.approx(2.5 / (1.2 + 2 * 0.1))
    assert found.overhead == pytest.approx((1.5 + 2.0) / 2 - (1.2 + 2 * 0.1))
    assert found.bytes_per_token == pytest.approx((100 + 2 * 10) / 2.5)
    assert found.bandwidth_used == pytest.approx(48 * sum(speeds) / 2 / 1e3)
    assert report(*given, prompts=two, repeats=1).figures(0.0, 2, "y").speedup.median == pytest.approx(1.5)


@pytest.mark.more
def test_copies_are_counted_apart(trained):
    """The head's acceptance with copied drafts in it; a baseline that copies; a speedup expected from other rounds."""
    plan = BenchmarkPlan(k_values=(2,), temperatures=(0.0,), max_tokens=48, repeats=1, num_copy_tokens=8)
    found = run_benchmark(trained["qwen"], [Prompt((3, 1, 4, 1, 5) * 8, "x")], plan)
    plain, mtp = (found.figures(0.0, k) for k in (0, 2))
    rows = [each.rows[0] for run in found.runs if run.num_speculative_tokens for each in run.rounds]
    copied = [row for row in rows if row.copied]
    assert copied
    assert mtp.copied.num_rounds == len(copied)
    assert sum(mtp.copied.num_accepted) == sum(row.num_accepted for row in copied)
    assert mtp.acceptance.num_rounds == len([row for row in rows if row.drafts and not row.copied])
    assert mtp.tokens_per_round == pytest.approx(47 / (len(rows) - 1))
    assert found.identical == (1, 1)
    assert (plain.copied.num_rounds, plain.expected_speedup, plain.tokens_per_round) == (0, 1.0, 1.0)
    assert math.isnan(mtp.expected_speedup)
    records = strict(json.dumps(found.as_record()))["figures"]
    assert [("copied" in each, each["expected_speedup"]) for each in records[::2]] == [(False, 1.0), (True, None)]


def test_plain_decoding_is_the_unit():
    found = report(run(0, [0] * 5), run(1, [1, 1])).figures(0.0, 0)
    assert (found.speedup.median, found.expected_speedup, found.overhead) == (1, 1, 0)
    assert found.bytes_per_token == 100


def test_repetitive_texts_are_left_out_and_reported():
    """A prompt that is repetitive at one K is left out at all, but only at that temperature."""
    loop = (1,) * 1000
    two = (Prompt("a", "x"), Prompt("b", "x"))
    given = [
        run(0, [0] * 18), run(1, [1] * 9, seconds=0.5),
        run(0, [0] * 18, prompt=1), run(1, [1] * 9, prompt=1, text=loop),
        run(0, [0] * 300, temperature=1.0), run(1, [1] * 300, temperature=1.0),
        run(0, [0] * 300, prompt=1, temperature=1.0), run(1, [0] * 300, prompt=1, temperature=1.0),
    ]  # fmt: skip
    found = report(*given, prompts=two, repeats=1)
    assert found.repetitive == {0.0: {1}, 1.0: set()}
    assert found.short == {0.0: {0, 1}, 1.0: set()}
    assert found.figures(0.0, 1).tokens_per_s.num == 1
    assert not found.figures(0.0, 1).all_repetitive
    assert found.figures(1.0, 1).acceptance.rates == (0.5,)
    assert any("prompt 2" in warning and "degenerate" in warning for warning in found.warnings)
    assert any("below 200 tokens" in warning for warning in found.warnings)
    assert any("1 of 2 texts differ" in warning for warning in found.warnings)
    assert found.identical == (1, 2)


def test_only_repetitive_texts_are_reported():
    """Figures of repetitive texts alone carry a warning."""
    found = report(run(0, [0] * 9, text=(1,) * 99), run(1, [1] * 9, text=(1,) * 99))
    assert found.figures(0.0, 1).tokens_per_s.num == 1
    assert found.figures(0.0, 1).all_repetitive
    assert any("every text is degenerate" in warning for warning in found.warnings)


def test_a_greedy_text_counts_once():
    """The same text again makes no interval narrower; other samples do."""
    given = [run(k, [k] * 9, repeat=repeat, temperature=t) for k in (0, 1) for repeat in (0, 1) for t in (0.0, 1.0)]
    found = report(*given, repeats=2)
    assert found.figures(0.0, 1).acceptance.num_drafted == (9,)
    assert found.figures(1.0, 1).acceptance.num_drafted == (18,)
    copies = [Round((SequenceRound(0, (7,), 1, (1, 2), copied=True),), 0.1, 0.8)]
    with_copies = [replace(each, rounds=(*each.rounds, *copies)) for each in given if each.num_speculative_tokens]
    plain = [each for each in given if not each.num_speculative_tokens]
    found = report(*plain, *with_copies, repeats=2)
    assert [found.figures(t, 1).copied.num_rounds for t in (0.0, 1.0)] == [1, 2]


@pytest.mark.parametrize(("seconds", "ratio"), [(1.0, "0.50"), (4.0, "2.00"), (1.7, None), (2.4, None)])
def test_plain_steps_of_texts_and_costs_are_compared(seconds, ratio):
    """The unit of `expected` is a step of 2 s; the texts' own steps took another time, or nearly the same."""
    found = report(run(0, [0] * 5, seconds=seconds), run(1, [1, 1]))
    warnings = [warning for warning in found.warnings if "cost curve" in warning]
    assert len(warnings) == (ratio is not None)
    assert all(f"`expected` is {ratio} x" in warning for warning in warnings)
    assert found.as_record()["plain_step"] == {"texts_s": pytest.approx(seconds), "costs_s": 2.0}


@pytest.mark.parametrize(("kept", "offered"), [(0, 7), (3, 9), (48, 50), (5, 5)])
def test_intervals_are_wilsons(kept, offered):
    """A normal interval instead would exceed 0..1 and have no width at the ends."""
    wanted = binomtest(kept, offered).proportion_ci(method="wilson")
    found = Acceptance((offered,), (kept,), offered, offered + kept).intervals()[0]
    assert found == pytest.approx((wanted.low, wanted.high), abs=1e-4)


def strict(text):
    """JSON as the standard has it: without NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_text_of_one_token_is_no_number(capsys):
    """0 / 0 in a record and in the table, where the model ends every text at once."""
    ended = report(run(0, []), run(2, []))
    record = strict(json.dumps(ended.as_record()))
    _show_benchmark(replace(ended, machine=replace(ended.machine, versions={"torch": "2"})))
    assert "nan" not in capsys.readouterr().out
    assert {each["tokens_per_s"]["median"] for each in record["figures"]} == {None}
    assert record["plain_step"]["texts_s"] is None


@pytest.mark.more
def test_benchmark_of_a_fixture(trained):
    """Greedy texts equal those of baseline decoding, and the record defines every number."""
    seen = []
    plan = BenchmarkPlan(k_values=(1, 3), max_tokens=24, repeats=1)
    prompts = [Prompt((3, 1, 4), "x"), Prompt((2, 7), "y")]
    found = run_benchmark(trained["qwen"], prompts, plan, source="qwen", on_run=seen.append)
    assert len(seen) == plan.num_runs(2) == 12
    assert found.identical == (4, 4)
    assert found.costs.max_speculative_tokens == 3
    record = strict(json.dumps(found.as_record()))
    assert {(each["temperature"], each["num_speculative_tokens"], each["domain"]) for each in record["figures"]} == {
        (t, k, d) for t in (0, 1) for k in (0, 1, 3) for d in ("all", "x", "y")
    }
    others = {"temperature", "domain", "interval_95", "mean_acceptance_length", "num_drafts"}
    others |= {"num_draft_tokens_per_pos", "num_accepted_tokens_per_pos"}
    assert all(set(each) <= others | set(DEFINITIONS) for each in record["figures"])
    assert set(record) == {
        "model", "definitions", "machine", "plan", "backend", "domains", "texts", "identical", "warnings", "costs",
        "plain_step", "figures", "theory", "draft_vocab",
    }  # fmt: skip
    assert {"cores", "threads", "versions", "dtype", "bandwidth", "peak_memory"} <= set(record["machine"])
    assert [k for k, _ in record["theory"]["0"]] == [0, 1, 2, 3]


@pytest.mark.more
def test_one_pass_over_the_texts_accepts_what_decoding_accepts(trained, capsys):
    """The curve is of the same texts, at every K; a decoder that accepts less is a finding."""
    plan = BenchmarkPlan(k_values=(1, 3), temperatures=(1.0, 0.0), max_tokens=24, repeats=2)
    prompts = [Prompt((3, 1, 4), "x"), Prompt((2, 7), "y")]
    found = with_one_pass(run_benchmark(trained["qwen"], prompts, plan), trained["qwen"])
    assert found.one_pass is not None
    for k in (1, 3):
        decoded, scored = found.figures(0.0, k).acceptance, found.one_pass.figures(0.0, k=k)
        assert [rate.value for rate in scored.rates] == pytest.approx(decoded.rates)
    show_lengths(found.one_pass, rule="block")
    labels = [line.split("  ")[0] or line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert labels[1:7] == ["greedy", "x", "y", "T=1 block", "x", "y"]
    assert found.one_pass_note is None
    record = strict(json.dumps(found.as_record()))["one_pass"]
    assert {each["num_speculative_tokens"] for each in record["figures"]} == {1, 2, 3}
    rejecting = tuple(
        replace(run, rounds=tuple(Round((replace(r.rows[0], num_accepted=0),), 0.0, 0.0) for r in run.rounds))
        for run in found.runs
    )
    worse = replace(found, runs=rejecting)
    assert worse.one_pass_note
    assert worse.one_pass_note in worse.warnings
    assert replace(worse, plan=replace(plan, num_copy_tokens=4)).one_pass_note is None  # rounds of copies are left out


def test_prompts_are_rendered_in_the_mode_asked_for():
    """The texts of each mode are the decoder's for prompts of that mode, in both of a benchmark's passes."""
    tokenizer, model = chatty(), build("glm4_moe", vocab_size=264)
    tokenizer.chat_template += "{% if enable_thinking %}T{% endif %}"
    model.tokenizer = tokenizer
    prompt, seen = Prompt("a", "x"), []
    for mode in (True, False):
        plan = BenchmarkPlan((1,), (0.0,), max_tokens=6, repeats=1, chat=True, thinking=mode, backend="torch")
        found = with_one_pass(run_benchmark(model, [prompt], plan), model)
        ids = list(prompt.tokens(model, chat=True)) + tokenizer("T")["input_ids"] * mode
        log = list(rounds(model.trunk, None, [ids], Settings(num_speculative_tokens=0, max_tokens=6)))
        assert list(found.runs[0].tokens) == [each.rows[0].emitted[0] for each in log]
        assert found.num_positions(model) == len(ids) + 6
        assert found.as_record()["plan"]["thinking"] is mode
        assert found.one_pass.plan.thinking is mode
        seen.append(found.one_pass_note)
    assert seen == [None, None]  # both passes accept the same
