"""Measurements as wholes: against the decoder's own counts, their controls, their record, and what is said of them."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from tiny import FIXTURES, refrain
from typer.testing import CliRunner

from nextn.benchmarking import cost
from nextn.benchmarking.workload import Prompt
from nextn.cli import app
from nextn.corpus.loops import degeneracy
from nextn.drafting import Contract
from nextn.errors import ConfigError
from nextn.measuring import texts
from nextn.measuring.card import card
from nextn.measuring.controls import Controls
from nextn.measuring.measure import Plan, reference, rescored
from nextn.measuring.record import DEFINITIONS, hashes

PROMPTS = [Prompt(tuple(row.tolist()), "xy"[place % 2]) for place, row in enumerate(refrain(8, 33, seed=10**6))]
PLAN = Plan(drafts=3, max_tokens=32, path="plain")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(cost, "copy_bandwidth", lambda device: 5e9)


@pytest.fixture(scope="module")
def found(trained):
    return {name: reference(trained[name], PROMPTS, PLAN) for name in ("glm", "glm_two", "v4")}


@pytest.mark.parametrize("name", ["glm", "glm_two", "v4"])
def test_figures_are_the_decoders(found, name):
    """Greedy: the same counts; temperature 1: both within the intervals of the other."""
    measured = found[name]
    places, counted = sorted(measured.places(0.0)), measured.drawn[0.0].counted
    got = measured.figures(0.0)
    for ours, side in ((got.offered, "offered"), (got.kept, "kept")):
        rows = [[*getattr(counted[place], side), 0, 0, 0] for place in places]  # short texts have fewer depths
        assert ours == tuple(sum(row[k] for row in rows) for k in range(3))
    wide = replace(measured, drawn={1.0: measured.drawn[1.0]}, plan=replace(PLAN, temperatures=(1.0,)))
    pooled = measured.drawn[1.0].pooled
    if measured.places(1.0) == set(range(8)):
        for ours, theirs, (low, high) in zip(
            wide.figures(1.0, rule="block").rates, pooled.rates, pooled.intervals(3.3), strict=True
        ):
            assert low <= ours.value <= high
            assert ours.low - 0.02 <= theirs <= ours.high + 0.02
    assert measured.how == "parallel"


def test_stepping_measures_the_same(found, trained, monkeypatch):
    """A head that cannot be unrolled, by the same head made to refuse."""
    monkeypatch.setattr(type(trained["glm"].head), "can_unroll", False)
    measured = rescored(found["glm"], trained["glm"], Contract())
    assert measured.how == "stepped"
    assert measured.figures(0.0) == found["glm"].figures(0.0)


def test_texts_are_drafted_by_all_bits_of_the_head(trained, monkeypatch):
    """Else the figure would be of a head that no other engine has."""
    model, seen, real = trained["glm"], [], texts.generate
    monkeypatch.setattr(
        texts, "generate", lambda model, *args, **kwargs: seen.append(model.head.exact) or real(model, *args, **kwargs)
    )
    texts.continued(model, [[3, 1, 4]], Plan(drafts=2, max_tokens=4), 0.0)
    assert seen == [True]
    assert not model.head.exact


def test_length_at_every_k(found):
    """AL@K is that of decoding with K drafts, from one decoding with the largest."""
    measured = found["glm_two"]
    model_free = [measured.figures(0.0, drafts=k) for k in (1, 2, 3)]
    for figures in model_free:
        product, total = 1.0, 1.0
        for rate in figures.rates:
            product *= rate.value
            total += product
        assert figures.length.value == pytest.approx(total)
        assert figures.length.low <= figures.length.value <= figures.length.high
    assert model_free[0].length.value < model_free[1].length.value < model_free[2].length.value


def test_fewer_drafts_are_what_decoding_with_fewer_gives(found, trained):
    """Rounds of K = 1 start elsewhere than those of K = 3: figured from the same texts, counted by decoding again."""
    again = reference(trained["glm_two"], PROMPTS, replace(PLAN, drafts=1, temperatures=(0.0,)))
    assert [text.new for text in again.drawn[0.0].texts] == [text.new for text in found["glm_two"].drawn[0.0].texts]
    ours, theirs = found["glm_two"].figures(0.0, drafts=1), again.figures(0.0)
    assert (ours.offered, ours.kept) == (theirs.offered, theirs.kept)
    assert sum(each.offered[0] for each in again.drawn[0.0].counted) >= theirs.offered[0]


def test_faults_on_the_same_texts(found, trained):
    """A fault rescored is the fault decoded; one that only decoding shows is counted there."""
    fault = Contract(prefill=False)
    ours = rescored(found["glm"], trained["glm"], fault)
    theirs = reference(trained["glm"], PROMPTS, PLAN, contract=fault)
    assert ours.figures(0.0).kept == theirs.figures(0.0).kept
    assert ours.figures(0.0).length.value < found["glm"].figures(0.0).length.value - 1
    assert ours.drawn[0.0].pooled is None
    right = reference(trained["glm_one"], PROMPTS, PLAN)
    rerun = reference(trained["glm_one"], PROMPTS, PLAN, contract=Contract(rerun=False))
    assert rerun.how == "decoder"
    assert rerun.figures(0.0).length.value < right.figures(0.0).length.value
    assert [each.drafts for each in rerun.table()] == [3] * len(rerun.table())
    with pytest.raises(ConfigError, match="at K = 3 alone"):
        rerun.figures(0.0, drafts=1)
    later = reference(trained["glm"], PROMPTS, replace(PLAN, temperatures=(0.0,)), contract=Contract(offset=1))
    assert later.figures(0.0).rates[0].value < 0.5
    assert later.drawn[0.0].counted == ()


def test_controls(found):
    """Near 0 where nothing can be known, beside an a_1 near 1."""
    controls = found["glm"].controls
    assert controls.columns > 0.9
    assert controls.shifted < 0.1
    assert controls.shuffled < 0.25
    assert 0 < controls.chance < 0.1
    assert controls.median_rank == 0
    assert controls.distinct_drafts > 20
    assert controls.warnings == []


def shift_gains(model, by):
    with torch.no_grad():
        for name, value in model.head.named_parameters():
            if "norm" in name:
                value.add_(by)


def test_a_head_that_is_read_wrong_is_told(trained, tmp_path):
    """Norm gains off by one: near 0, and the signature is named; a constant draft as well."""
    from nextn.model import Model

    model = Model.load(FIXTURES / "qwen", dtype=torch.float32)
    shift_gains(model, -1.0)
    measured = reference(model, PROMPTS, replace(PLAN, temperatures=(0.0,)))
    assert measured.figures(0.0).rates[0].value < 0.2
    assert any("--probe" in said for said in measured.warnings)


CONTROLS = Controls(0.8, 0.0, 0.0, 0.02, 0, 40, 1000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shifted": 0.3}, "easy to draft"),
        ({"shuffled": 0.5}, "hardly looks"),
        ({"columns": 0.01, "median_rank": 990}, "signature of norm gains"),
        ({"columns": 0.01, "median_rank": 400}, "acceptance is low"),
        ({"columns": 0.0, "distinct_drafts": 1}, "drafts one token"),
    ],
)
def test_what_controls_say(change, said):
    assert CONTROLS.warnings == []
    assert any(said in each for each in replace(CONTROLS, **change).warnings)


def test_loops_are_left_out(found, monkeypatch):
    """One text that loops counts for nothing; where each one does, all count and it is said."""
    measured = found["glm_two"]
    texts = measured.drawn[1.0].texts
    loops = {place for place, text in enumerate(texts) if degeneracy(text.new).looping}
    if loops and loops != set(range(8)):
        assert measured.figures(1.0).num_texts == 8 - len(loops)
        assert any("gave loops and are left out" in said for said in measured.warnings)
    monkeypatch.setattr("nextn.corpus.loops.Degeneracy.looping", property(lambda self: True))
    fresh = replace(measured)
    assert fresh.figures(1.0).num_texts == 8
    assert any("every text loops" in said for said in fresh.warnings)


def test_record(found):
    """JSON as the standard has it, with a definition for what is in it, and the same when measured again."""
    record = json.loads(json.dumps(found["glm"].as_record()), parse_constant=lambda name: pytest.fail(name))
    assert {(each["temperature"], each["rule"], each["drafts"], each["domain"]) for each in record["figures"]} == {
        (t, rule, k, domain)
        for t, rules in ((0.0, ["greedy"]), (1.0, ["ratio", "block", "argmax", "match"]))
        for rule in rules
        for k, domain in [(1, "all"), (2, "all"), (3, "all"), (3, "x"), (3, "y")]
    }
    assert {"acceptance", "length", "interval_95", "rule", "pass", "hashes", "shifted"} <= set(DEFINITIONS)
    assert record["settings"]["contract"] == {"prefill": True, "rerun": True, "offset": 0}
    assert len(record["hashes"]["prompts"]) == 64


def test_it_repeats_to_the_last_digit(found, trained):
    again = reference(trained["glm"], PROMPTS, PLAN)
    assert json.dumps(again.as_record()) == json.dumps(found["glm"].as_record())


def test_hashes_are_of_the_weights(tmp_path, trained):
    """The head's hash changes with a head's tensor alone."""
    before = hashes(str(FIXTURES / "glm"))
    model = trained["glm"].__class__.load(FIXTURES / "glm")
    with torch.no_grad():
        model.head.stack[0].projection.weight[0, 0] += 1
    model.save(tmp_path / "changed", copies=False)
    after = hashes(str(tmp_path / "changed"))
    assert after["trunk"] == before["trunk"]
    assert after["head"] != before["head"]


def test_a_card(found):
    text = card(found["glm"], command="nextn measure glm -k 3")
    assert re.search(r"\| 0\.\d{3} \(0\.\d\d-[01]\.\d\d\) \|", text)  # one unit: fractions
    assert "percent" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == "| decoding | a_1 | a_2 | a_3 | AL@1 | AL@2 | AL@3 |"
    assert rows[2].startswith("| greedy | ")
    assert f"{found['glm'].figures(0.0).length.value:.2f} |" in rows[2]
    assert len({line.count("|") for line in rows[:5]}) == 1
    assert any(line.startswith("| x | greedy |") for line in rows)
    assert "`nextn measure glm -k 3`" in text


@pytest.mark.parametrize("bad", [{"drafts": 0}, {"max_tokens": 2}, {"temperatures": ()}, {"temperatures": (-1.0,)}])
def test_plans_out_of_range(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))[:4]):
        Plan(**bad)


def run(tmp_path, *options):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"prompt": prompt.text, "domain": prompt.domain}) for prompt in PROMPTS[:3])
    )
    arguments = ["measure", str(FIXTURES / "glm"), "--prompts", str(prompts), "--max-tokens", "12", "-k", "2"]
    return CliRunner().invoke(app, [*arguments, "--path", "plain", *options])


def test_verb(tmp_path):
    """A table; JSON that a file gets as well; exit 1 below the asked acceptance, and nothing else."""
    told = run(tmp_path)
    assert told.exit_code == 0, told.output
    assert "AL@2" in told.stdout
    assert "shuffled hidden states" in told.stdout
    out = run(tmp_path, "--json", "--out", str(tmp_path / "record.json"), "--temperatures", "0")
    record = json.loads(out.stdout)
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert set(record["hashes"]) == {"head", "trunk", "prompts"}
    assert record["machine"]["dtype"] == "bfloat16"
    assert math.isclose(record["figures"][0]["acceptance"][0], 1.0, abs_tol=0.2)
    assert run(tmp_path, "--min-acceptance", "0.5", "--temperatures", "0").exit_code == 0
    low = (
        run(tmp_path, "--min-acceptance", "1", "--offset", "0") if False else run(tmp_path, "--min-acceptance", "0.999")
    )
    assert low.exit_code in (0, 1)
    probed = json.loads(run(tmp_path, "--json", "--probe", "--temperatures", "0").stdout)["probe"]
    assert probed["readings"]
    assert "| greedy |" in run(tmp_path, "--model-card").stdout
    assert isinstance(run(tmp_path, "--min-acceptance", "2").exception, ConfigError)


def test_verb_that_probes(tmp_path):
    """Projection halves in the other order in the file: named, and exit 1."""
    from nextn.model import Model

    model = Model.load(FIXTURES / "glm")
    with torch.no_grad():
        weight = model.head.stack[0].projection.weight
        weight.copy_(torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))
    model.save(tmp_path / "glm", copies=False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt.text}) for prompt in PROMPTS))
    arguments = ["measure", str(tmp_path / "glm"), "--prompts", str(prompts), "--max-tokens", "20", "-k", "1"]
    told = CliRunner().invoke(app, [*arguments, "--path", "plain", "--temperatures", "1", "--probe"])
    assert told.exit_code == 1, told.output
    assert "the weights want projection of hidden first" in told.stdout
