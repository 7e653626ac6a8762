"""Reference measurements: against the decoder's own counts, with controls, record and command."""

import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from tiny import FIXTURES, prompt, refrain
from typer.testing import CliRunner

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.cli import app, streaming
from nextn.cli.acceptance import _length, _rows, draw_curves
from nextn.cli.measure import _require
from nextn.cli.progress import progress_bars
from nextn.data.degeneracy import degeneracy
from nextn.errors import ConfigError, NextnError
from nextn.evaluate import reference_texts
from nextn.evaluate.acceptance_curve import AcceptanceFigures
from nextn.evaluate.acceptance_drop import AcceptanceChange
from nextn.evaluate.exchange import exchange_text
from nextn.evaluate.reference import reference_acceptance, rescore
from nextn.evaluate.reference_report import DEFINITIONS, checkpoint_hashes
from nextn.evaluate.reference_texts import Controls
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.model.model import Model
from nextn.settings import Contract

pytestmark = pytest.mark.usefixtures("own_cache")
PROMPTS = [Prompt(tuple(row.tolist()), "xy"[place % 2]) for place, row in enumerate(refrain(8, 33, seed=10**6))]
PLAN = ReferencePlan(num_speculative_tokens=3, max_tokens=32, backend="torch")


@pytest.fixture(scope="module")
def found(trained):
    return {name: reference_acceptance(trained[name], PROMPTS, PLAN) for name in ("glm", "glm_two", "v4")}


@pytest.mark.more
@pytest.mark.parametrize("name", ["glm", "glm_two", "v4"])
def test_figures_are_the_decoders(found, name):
    """Greedy: the same counts; temperature 1: both within the intervals of the other."""
    measured = found[name]
    places, counted = sorted(measured.text_indices(0.0)), measured.generated[0.0].acceptance_per_text
    got = measured.figures(0.0)
    for ours, side in ((got.num_drafted, "num_drafted"), (got.num_accepted, "num_accepted")):
        rows = [[*getattr(counted[place], side), 0, 0, 0] for place in places]  # short texts have fewer depths
        assert ours == tuple(sum(row[k] for row in rows) for k in range(3))
    wide = replace(measured, generated={1.0: measured.generated[1.0]}, plan=replace(PLAN, temperatures=(1.0,)))
    pooled = measured.generated[1.0].pooled
    if measured.text_indices(1.0) == set(range(8)):
        for ours, theirs, (low, high) in zip(
            wide.figures(1.0, rule="block").rates, pooled.rates, pooled.intervals(3.3), strict=True
        ):
            assert low <= ours.value <= high
            assert ours.low - 0.02 <= theirs <= ours.high + 0.02
    assert measured.scoring_pass == "parallel"


@pytest.mark.slow
def test_stepping_measures_the_same(found, trained, monkeypatch):
    """A head that cannot be unrolled, by the same head made to refuse."""
    monkeypatch.setattr(type(trained["glm"].head), "can_rollout", False)
    measured = rescore(found["glm"], trained["glm"], Contract())
    assert measured.scoring_pass == "stepped"
    assert measured.figures(0.0) == found["glm"].figures(0.0)


@pytest.mark.more
def test_texts_are_drafted_by_all_bits_of_the_head(trained, monkeypatch):
    """Else the figure would be of a head that no other engine has."""
    model, seen, real = trained["glm"], [], reference_texts.generate
    monkeypatch.setattr(
        reference_texts,
        "generate",
        lambda model, *args, **kwargs: seen.append(model.head.exact) or real(model, *args, **kwargs),
    )
    reference_texts.generate_texts(model, [[3, 1, 4]], ReferencePlan(num_speculative_tokens=2, max_tokens=4), 0.0)
    assert seen == [True]
    assert not model.head.exact


def test_length_at_every_k(found):
    """AL@K is that of decoding with K drafts, from one decoding with the largest."""
    measured = found["glm_two"]
    model_free = [measured.figures(0.0, k=k) for k in (1, 2, 3)]
    for figures in model_free:
        product, total = 1.0, 1.0
        for rate in figures.rates:
            product *= rate.value
            total += product
        assert figures.length.value == pytest.approx(total)
        assert figures.length.low <= figures.length.value <= figures.length.high
    assert model_free[0].length.value < model_free[1].length.value < model_free[2].length.value


@pytest.mark.more
def test_fewer_drafts_are_what_decoding_with_fewer_gives(found, trained):
    """Rounds of K = 1 start elsewhere than those of K = 3: figured from the same texts, counted by decoding again."""
    again = reference_acceptance(
        trained["glm_two"], PROMPTS, replace(PLAN, num_speculative_tokens=1, temperatures=(0.0,))
    )
    assert [text.new for text in again.generated[0.0].texts] == [
        text.new for text in found["glm_two"].generated[0.0].texts
    ]
    ours, theirs = found["glm_two"].figures(0.0, k=1), again.figures(0.0)
    assert (ours.num_drafted, ours.num_accepted) == (theirs.num_drafted, theirs.num_accepted)
    assert sum(each.num_drafted[0] for each in again.generated[0.0].acceptance_per_text) >= theirs.num_drafted[0]


@pytest.mark.more
def test_faults_on_the_same_texts(found, trained):
    """A fault rescore is the fault decoded; one that only decoding shows is counted there."""
    fault = Contract(prefill=False)
    ours = rescore(found["glm"], trained["glm"], fault)
    theirs = reference_acceptance(trained["glm"], PROMPTS, PLAN, contract=fault)
    assert ours.figures(0.0).num_accepted == theirs.figures(0.0).num_accepted
    assert ours.figures(0.0).length.value < found["glm"].figures(0.0).length.value - 1
    assert ours.generated[0.0].pooled is None
    right = reference_acceptance(trained["glm_one"], PROMPTS, PLAN)
    stale = reference_acceptance(trained["glm_one"], PROMPTS, PLAN, contract=Contract(refresh=False))
    assert stale.scoring_pass == "decoder"
    assert stale.figures(0.0).length.value < right.figures(0.0).length.value
    assert [each.num_speculative_tokens for each in stale.table()] == [3] * len(stale.table())
    with pytest.raises(ConfigError, match="at K = 3 alone"):
        stale.figures(0.0, k=1)
    later = reference_acceptance(
        trained["glm"], PROMPTS, replace(PLAN, temperatures=(0.0,)), contract=Contract(offset=1)
    )
    assert later.figures(0.0).rates[0].value < 0.5
    assert later.generated[0.0].acceptance_per_text == ()


def test_controls(found):
    """Near 0 where nothing can be known, beside an a_1 near 1."""
    controls = found["glm"].controls
    assert controls.all_positions > 0.9
    assert controls.shifted < 0.1
    assert controls.shuffled < 0.25
    assert 0 < controls.chance < 0.1
    assert controls.median_rank == 0
    assert controls.distinct_drafts > 20
    assert controls.warnings == []


def shift_norm_weights(model, by):
    with torch.no_grad():
        for name, value in model.head.named_parameters():
            if "norm" in name:
                value.add_(by)


@pytest.mark.more
def test_a_wrong_convention_is_noted(trained, tmp_path):
    """Norm weights off by one: acceptance near 0, and a warning that says so."""
    from nextn.model.model import Model

    model = Model.load(FIXTURES / "qwen", dtype=torch.float32)
    shift_norm_weights(model, -1.0)
    measured = reference_acceptance(model, PROMPTS, replace(PLAN, temperatures=(0.0,)))
    assert measured.figures(0.0).rates[0].value < 0.2
    assert any("--probe" in warning for warning in measured.warnings)


CONTROLS = Controls(0.8, 0.0, 0.0, 0.02, 0, 40, 1000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shifted": 0.3}, "easy to draft"),
        ({"shuffled": 0.5}, "hardly uses"),
        ({"all_positions": 0.01, "median_rank": 990}, "typical of norm weights"),
        ({"all_positions": 0.01, "median_rank": 400}, "acceptance is low"),
        ({"all_positions": 0.0, "distinct_drafts": 1}, "drafts one token"),
    ],
)
def test_warnings_of_controls(change, words):
    assert CONTROLS.warnings == []
    assert replace(CONTROLS, shifted=0.11, shuffled=0.4).warnings == []  # where half the text follows from its tokens
    assert any(words in each for each in replace(CONTROLS, **change).warnings)


def test_a_flat_trunk_is_noted(found):
    """Of an untrained model, sampled drafts are accepted whatever the head."""
    torch.manual_seed(7)  # of twelve seeds, three give a trunk just above the limit
    model = Model.build(json.loads((FIXTURES / "qwen" / "config.json").read_text()))
    plan = ReferencePlan(num_speculative_tokens=1, temperatures=(1.0,), max_tokens=6, backend="torch")
    for measured, notes in ((reference_acceptance(model, PROMPTS[:2], plan), 1), (found["glm"], 0)):
        assert len([each for each in measured.warnings if "likeliest token" in each]) == notes


def test_repetitive_texts_are_left_out(found, monkeypatch):
    """Repetitive texts do not count; if all are repetitive, all count, with a warning."""
    measured = found["glm_two"]
    texts = measured.generated[1.0].texts
    loops = {place for place, text in enumerate(texts) if degeneracy(text.new).is_degenerate}
    if loops and loops != set(range(8)):
        assert measured.figures(1.0).num_texts == 8 - len(loops)
        assert any("are left out" in warning for warning in measured.warnings)
    monkeypatch.setattr("nextn.data.degeneracy.Degeneracy.is_degenerate", property(lambda self: True))
    fresh = replace(measured)
    assert fresh.figures(1.0).num_texts == 8
    assert any("every text is degenerate" in warning for warning in fresh.warnings)


@pytest.mark.more
def test_record(found):
    """JSON as the standard has it, with a definition for what is in it, and the same when measured again."""
    record = json.loads(json.dumps(found["glm"].to_dict()), parse_constant=lambda name: pytest.fail(name))
    assert {
        (each["temperature"], each["rule"], each["num_speculative_tokens"], each["domain"])
        for each in record["figures"]
    } == {
        (t, rule, k, domain)
        for t, rules in ((0.0, ["greedy"]), (1.0, ["ratio", "block", "argmax", "match"]))
        for rule in rules
        for k in (1, 2, 3)
        for domain in ("all", "x", "y")
    }
    assert {"acceptance", "mean_acceptance_length", "interval_95", "rule", "pass", "hashes", "shifted"} <= set(
        DEFINITIONS
    )
    curves = {(each["temperature"], each["rule"], each["domain"]): each for each in record["curves"]}
    assert set(curves) >= {(0.0, "greedy", "x"), (1.0, "argmax", "all")}
    assert curves[0.0, "greedy", "all"]["outcome"] in ("saturates", "increases", "inconclusive")
    assert record["parts"] == []  # short texts without tags have one part
    texts = found["glm"].generated[0.0].texts
    used = [texts[index] for index in found["glm"].text_indices(0.0)]
    copies = record["copies"]["0"]
    assert copies["num_rounds"] + copies["num_accepted_tokens"] == sum(len(text.new) - 1 for text in used)
    assert record["settings"]["contract"] == {"prefill": True, "refresh": True, "offset": 0}
    assert len(record["hashes"]["prompts"]) == 64


@pytest.mark.more
def test_it_repeats_to_the_last_digit(found, trained):
    again = reference_acceptance(trained["glm"], PROMPTS, PLAN)
    assert json.dumps(again.to_dict()) == json.dumps(found["glm"].to_dict())


def test_progress_within_a_batch(trained):
    """After each round, and in all the texts; also where one ends early."""
    counted = []
    prompts = [each.text for each in PROMPTS[:2]] * 5
    reference_texts.generate_texts(trained["glm"], prompts, replace(PLAN, max_tokens=4), 0.0, on_text=counted.append)
    assert sum(counted) == pytest.approx(10)
    assert len(counted) > 2
    assert 0 < counted[0] < 8


def test_hashes_are_of_the_weights(tmp_path, trained):
    """The head's hash changes with a head's tensor alone."""
    before = checkpoint_hashes(str(FIXTURES / "glm"))
    model = trained["glm"].__class__.load(FIXTURES / "glm")
    with torch.no_grad():
        model.head.stack[0].projection.weight[0, 0] += 1
    model.save(tmp_path / "changed", copies=False)
    after = checkpoint_hashes(str(tmp_path / "changed"))
    assert after["trunk"] == before["trunk"]
    assert after["head"] != before["head"]


@pytest.mark.parametrize(
    "bad", [{"num_speculative_tokens": 0}, {"max_tokens": 2}, {"temperatures": ()}, {"temperatures": (-1.0,)}]
)
def test_plans_out_of_range(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))[:4]):
        ReferencePlan(**bad)


def run(tmp_path, *options, texts=PROMPTS[:3]):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": each.text, "domain": each.domain}) for each in texts))
    arguments = ["measure", str(FIXTURES / "glm"), "--prompts", str(prompts), "--max-tokens", "12", "-k", "2"]
    return CliRunner().invoke(app, [*arguments, "--backend", "torch", *options])


def test_verb(tmp_path):
    """A table; JSON that a file gets as well; exit 1 below the asked acceptance, and nothing else."""
    strange = [Prompt(tuple(prompt(12, seed=seed, vocab_size=40)), "x") for seed in range(3)]
    result = run(tmp_path, "--min-acceptance", "1", texts=strange)
    assert result.exit_code == 1, result.output
    assert "AL@2" in result.stdout
    assert re.search(r"greedy +\d\.\d\d \(\d\.\d\d-\d\.\d\d\)", result.stdout)
    assert "shuffled hidden states" in result.stdout
    greedy = ("--json", "--temperatures", "0", "--min-acceptance", "0.5", "--probe")
    figure = tmp_path / "curve.svg"
    out = run(tmp_path, *greedy, "--out", str(tmp_path / "record.json"), "--figure", str(figure))
    assert out.exit_code == 0, out.output
    assert "tokens per round" in figure.read_text()
    (tmp_path / "folder.png").mkdir()
    for bad in ("curve.txt", "nowhere/curve.png", "folder.png"):
        assert "--figure" in str(run(tmp_path, "--figure", str(tmp_path / bad)).exception)
    record = json.loads(out.stdout)
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert set(record["hashes"]) == {"head", "trunk", "prompts"}
    assert record["machine"]["dtype"] == "bfloat16"
    assert math.isclose(record["figures"][0]["acceptance"][0], 1.0, abs_tol=0.2)
    assert record["probe"]["readings"]
    assert isinstance(run(tmp_path, "--min-acceptance", "2").exception, ConfigError)


def test_the_exit_code_says_what_a_comparison_found(tmp_path, monkeypatch):
    greedy, record = ("--temperatures", "0", "--max-tokens", "8"), tmp_path / "record.json"
    assert run(tmp_path, *greedy, "--out", str(record)).exit_code == 0
    codes = {}
    for outcome in ("kept", "fell", "inconclusive"):
        monkeypatch.setattr(AcceptanceChange, "outcome", outcome)
        codes[outcome] = run(tmp_path, *greedy, "--baseline", str(record)).exit_code
    assert codes == {"kept": 0, "fell": 1, "inconclusive": 3}
    document = json.loads(record.read_text())
    document["prompts"]["num"] += 1
    record.write_text(json.dumps(document))
    monkeypatch.setattr("nextn.cli.measure.measure_acceptance", None)  # not called
    found = run(tmp_path, *greedy, "--baseline", str(record)).exception
    assert isinstance(found, ConfigError)
    assert f"measured on {document['prompts']['num']} prompts" in str(found)


def test_the_first_measurement_says_how_many_texts_a_gate_needs(tmp_path):
    strange = [Prompt(tuple(prompt(12, seed=seed, vocab_size=40)), "x") for seed in range(3)]
    sampled = ("--temperatures", "1", "--out", str(tmp_path / "record.json"))
    assert "as a --baseline" in run(tmp_path, *sampled, texts=strange).stderr
    assert "as a --baseline" not in run(tmp_path, *sampled[:2], texts=strange).stderr


def test_another_tokenizer_is_said_before_the_second_measurement(tmp_path, monkeypatch):
    """Rates of other tokens do not compare. An error of the other checkpoint names it."""
    other = tmp_path / "other"
    shutil.copytree(SHIPPED, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["d"] = ids["d"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "prompts.txt").write_text("def add(\n\nclass Stack:\n")
    decoded = []
    monkeypatch.setattr(streaming, "progress_bars", lambda **_: decoded.append(1) or progress_bars(quiet=True))
    arguments = ["measure", str(SHIPPED), "--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "4", "-k", "1"]
    run = partial(CliRunner().invoke, app, catch_exceptions=False)
    with pytest.raises(ConfigError, match="2 of 2 prompts are other tokens"):
        run([*arguments, "--temperatures", "1", "--against", str(other)])
    assert len(decoded) == 1
    with pytest.raises(NextnError, match="--against org/nothing: "):
        run([*arguments, "--against", "org/nothing"])


def test_a_folder_without_a_tokenizer_is_refused_before_the_other_is_measured(tmp_path, monkeypatch):
    """`model.save_pretrained` writes none."""
    tuned = tmp_path / "tuned"
    shutil.copytree(SHIPPED, tuned, ignore=shutil.ignore_patterns("tokenizer*"))
    monkeypatch.setattr(streaming, "progress_bars", lambda **_: pytest.fail("measured"))
    run = partial(CliRunner().invoke, app, catch_exceptions=False)
    for one, other in ((tuned, SHIPPED), (SHIPPED, tuned)):
        with pytest.raises(ConfigError, match=f"{tuned} has no tokenizer.*tokenizer.json"):
            run(["measure", str(one), "--against", str(other)])


@pytest.mark.slow
def test_verb_that_probes(tmp_path):
    """Projection halves in the other order in the file: named, and exit 1."""
    from nextn.model.model import Model

    model = Model.load(FIXTURES / "glm")
    with torch.no_grad():
        weight = model.head.stack[0].projection.weight
        weight.copy_(torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))
    model.save(tmp_path / "glm", copies=False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": each.text}) for each in PROMPTS))
    arguments = ["measure", str(tmp_path / "glm"), "--prompts", str(prompts), "--max-tokens", "20", "-k", "1"]
    result = CliRunner().invoke(app, [*arguments, "--backend", "torch", "--temperatures", "1", "--probe"])
    assert result.exit_code == 1, result.output
    assert "the weights fit projection of hidden first" in result.stdout


def test_texts_that_end_at_once_have_no_acceptance_length(trained):
    """1.00 would say that no draft was accepted, and there was none."""
    none = AcceptanceFigures.of([([0.0] * 3, [0.0] * 3)] * 2, temperature=0.0, rule="greedy", k=3, domain="all")
    two = [([4.0, 4.0], [4.0, 4.0]), ([4.0, 0.0], [0.0, 0.0])]  # every draft accepted, and none
    wide = AcceptanceFigures.of(two, temperature=0.0, rule="greedy", k=2, domain="all").length
    assert (wide.low, wide.value, wide.high) == (1.0, 2.0, 3.0)
    rejected = AcceptanceFigures.of([([4.0, 0, 0], [0.0] * 3)] * 2, temperature=0.0, rule="greedy", k=3, domain="all")
    assert none.as_record()["mean_acceptance_length"] == {"value": None, "low": None, "high": None}
    assert (_length(none), _length(rejected)[:4], rejected.length.value) == ("-", "1.00", 1.0)
    report = reference_acceptance(trained["glm"], [Prompt((1, 2), "x")], ReferencePlan(3, (0.0,), 8, backend="torch"))
    text = replace(report.scored[0.0][0].text, new=(3, 4))
    ended = replace(report.scored[0.0][0], text=text)
    empty = replace(report, scored={0.0: (ended,)})
    assert report.curve(0.0) is not None
    assert empty.curve(0.0) is None
    with pytest.raises(ConfigError, match="no text has a round"):
        exchange_text(empty, "inferencex", source="x", prompts="x")


def test_the_picture_has_every_row(monkeypatch):
    """Domains and the perfect head have a row at each temperature, under one name in the table."""
    drawn = {}
    monkeypatch.setattr("nextn.stats.plots.curves", lambda path, rows: drawn.update(rows))
    texts = [Prompt(tuple(prompt(12, seed=seed, vocab_size=40)), "xy"[seed % 2]) for seed in range(4)]
    plan = ReferencePlan(2, (0.5, 1.0), 12, backend="torch")
    report = reference_acceptance(Model.load(str(FIXTURES / "glm")), texts, plan)
    draw_curves(report, Path("curve.png"))
    rows = [row for temperature in plan.temperatures for row in _rows(report, temperature)]
    assert {"T=0.5 ratio, x", "T=1 ratio, x", "T=0.5 argmax, perfect head", "T=1 argmax, perfect head"} <= drawn.keys()
    assert [[each.value for each in lengths] for lengths in drawn.values()] == [
        [each.length.value for each in by_k] for _, by_k, _ in rows
    ]


def test_repetitive_texts_decide_no_threshold(capsys):
    """They are easy to draft, for a damaged head, too: neither a pass nor a finding."""
    report = SimpleNamespace(main_temperature=0.0, is_degenerate=lambda temperature: temperature == 0)
    with pytest.raises(typer.Exit) as ended:
        _require(report, 0.9)
    assert ended.value.exit_code == 3
    assert "cannot decide" in capsys.readouterr().err
