"""Measurements in the forms of other tools: read back, and by the rules that those tools check."""

import csv
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from tiny import FIXTURES, refrain

from nextn.engines.counter_formats import read
from nextn.engines.csv_formats import read_matrix, table_reader
from nextn.errors import ConfigError, EngineError
from nextn.evaluate.exchange import FORMATS, check_form, exchange_text, inferencex_note, request_record
from nextn.evaluate.published_curves import read_curves
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.workload import Prompt, ReferencePlan

PLAN = ReferencePlan(num_speculative_tokens=3, temperatures=(0.0,), max_tokens=24, backend="torch")
WORDS = "mine, 4 prompts"
SOURCE = {"source": "mine", "category": None, "num": 4}
PROMPTS = [Prompt(tuple(row.tolist()), "xy"[place % 2]) for place, row in enumerate(refrain(4, 33, seed=10**6))]


@pytest.fixture(scope="module")
def report(trained):
    return reference_acceptance(trained["glm_two"], PROMPTS, PLAN)


def text(report, form):
    return exchange_text(report, form, source="org/My Model", prompts=WORDS)


def counted(report):
    """(rounds, drafts, accepted, accepted by position) that the decoder counted."""
    steps = [step for steps in report.generated[0.0].steps for step in steps]
    positions = tuple(sum(accepted > at for _, accepted in steps) for at in range(3))
    return len(steps), sum(step[0] for step in steps), sum(positions), positions


def test_counts_come_back(report):
    """What is written is read as an engine's counts, and is what was decoded."""
    rounds, drafts, accepted, positions = counted(report)
    assert rounds == report.generated[0.0].pooled.num_rounds
    for form in ("vllm", "aiperf", "speculators"):
        found = read(text(report, form))
        assert (found.num_drafts, found.draft_tokens, found.accepted) == (rounds, drafts, accepted), form
        assert found.per_position == positions, form
        assert found.k == 3


def test_records_of_requests(report):
    """The identities that AIPerf checks: sums of histogram and steps; K + 1 buckets in vLLM's dense form."""
    vllm, aiperf = ([json.loads(line) for line in text(report, form).splitlines()] for form in ("vllm", "aiperf"))
    assert [each["category"] for each in vllm] == ["x", "y", "x", "y"]
    for dense, neutral, new in zip(vllm, aiperf, report.generated[0.0].texts, strict=True):
        one, other = dense["metrics"]["speculative_decoding"], neutral["spec_decode_acceptance"]
        assert len(one["acceptance_histogram"]) == one["num_spec_tokens"] + 1 == 4
        for record, histogram in (
            (one, dict(enumerate(one["acceptance_histogram"]))),
            (other, {int(count): rounds for count, rounds in other["acceptance_histogram"].items()}),
        ):
            assert sum(histogram.values()) == record["num_spec_steps"] == len(record["per_step_accepted"])
            accepted = sum(count * rounds for count, rounds in histogram.items())
            assert accepted == record["num_accepted_draft_tokens"] == sum(record["per_step_accepted"])
            assert sum(record["per_step_drafted"]) == record["num_draft_tokens"]
            assert record["mean_acceptance_length"] == 1 + accepted / record["num_spec_steps"]
        assert (other["engine"], other["completion_tokens"]) == ("nextn", len(new.new))
        assert 0 not in other["acceptance_histogram"].values()
    none = request_record((), 3)
    assert (none["mean_acceptance_length"], none["acceptance_histogram"]) == (1.0, [0, 0, 0, 0])
    assert "per_step_accepted" not in none


@pytest.mark.slow
def test_aiperf_reads_its_forms(report, tmp_path):
    """By AIPerf's own model, its adapter for vLLM's record, and the function that writes its matrix."""
    reason = "pip install --no-deps aiperf: nothing else checks its reading"
    models = pytest.importorskip("aiperf.common.models", reason=reason)
    adapter = pytest.importorskip("aiperf.spec_decode.vllm_adapter", reason=reason).VLLMSpecDecodeAdapter
    matrix = pytest.importorskip("aiperf.analysis.speed_bench_report", reason=reason)
    for neutral, dense in zip(text(report, "aiperf").splitlines(), text(report, "vllm").splitlines(), strict=True):
        record = models.SpecDecodeAcceptanceRecord.model_validate(json.loads(neutral)["spec_decode_acceptance"])
        answer = SimpleNamespace(spec_decode_stats=json.loads(dense)["metrics"]["speculative_decoding"], usage=None)
        ours = {"engine", "completion_tokens"}
        assert adapter.adapt([answer]).model_dump(exclude=ours) == record.model_dump(exclude=ours)
    ((name, *lengths),) = [row for row in csv.reader(io.StringIO(text(report, "aiperf-report"))) if row[0] != "Model"]
    by_category = dict(zip("xy", map(float, lengths), strict=False))
    matrix.write_csv({name: by_category}, matrix.detect_columns({name: by_category}), tmp_path / "matrix.csv")
    assert read_matrix((tmp_path / "matrix.csv").read_text(), "") == {name: by_category}
    rows = [row.split(",")[:-1] for row in (tmp_path / "matrix.csv").read_text().splitlines()]
    assert rows == [row.split(",")[:-1] for row in text(report, "aiperf-report").splitlines()]  # the mean: of rounded


def test_tables(report):
    rows = list(csv.DictReader(io.StringIO(text(report, "speculators"))))
    assert [row["subset"] for row in rows] == ["x", "y"]
    assert float(rows[0]["acceptance_length"]) == pytest.approx(
        1 + sum(float(rows[0][f"acceptance_at_pos_{at}"]) for at in range(3))
    )
    header, row = csv.reader(io.StringIO(text(report, "aiperf-report")))
    assert header == ["Model", "x", "y", "Overall"]
    assert row[0] == "My-Model"
    assert float(row[1]) == pytest.approx(float(rows[0]["acceptance_length"]), abs=0.005)
    assert float(row[3]) == pytest.approx(sum(map(float, row[1:3])) / 2, abs=0.01)


def test_inferencex(report):
    """By mode, or without one directly by K, which are the two forms that InferenceX's scripts look up."""
    expected = {k: round(report.figures(0.0, k=k).length.value, 2) for k in (1, 2, 3)}
    assert yaml.safe_load(text(report, "inferencex")) == {"my-model": expected}
    thinking = replace(report, plan=replace(PLAN, thinking=False))
    assert yaml.safe_load(text(thinking, "inferencex")) == {"my-model": {"thinking_off": expected}}
    assert "not comparable" in inferencex_note(report, None)
    golden = replace(PLAN, num_speculative_tokens=8, max_tokens=4096, temperatures=(1.0,))
    assert inferencex_note(replace(report, plan=golden), "coding") is None


def test_inferencex_is_read_again(report, tmp_path):
    """What is written states the conditions by which it is read: none differs from those here."""
    for mode in (None, True, False):
        here = replace(report, plan=replace(PLAN, thinking=mode), prompts_source=SOURCE)
        (tmp_path / "golden.yaml").write_text(exchange_text(here, "inferencex", source="org/My-Model", prompts=WORDS))
        curves = read_curves(tmp_path / "golden.yaml")
        curve, measured = replace(here, source="org/My-Model").beside(curves)
        assert curve.lengths == {k: round(measured.lengths[k], 2) for k in ("1", "2", "3")}
        expected = ["thinking not stated (here the template's default)"] if mode is None else []
        assert curve.differences(measured) == expected


def test_inferencex_has_no_counts(report):
    for mode in (None, True):
        here = replace(report, plan=replace(PLAN, thinking=mode))
        with pytest.raises(EngineError, match="without counts; to show them beside: measure --baseline"):
            read(text(here, "inferencex"))


def test_aiperf_matrix_is_read_again(report, tmp_path):
    """As an engine's, of which the mean is compared, and beside the measurement by category."""
    rows = list(csv.reader(io.StringIO(text(report, "aiperf-report"))))
    found = read(text(report, "aiperf-report"))
    assert found.length == pytest.approx(float(rows[1][3]), abs=0.01)
    assert f"x {rows[1][1]}, y {rows[1][2]}" in found.notes[0]
    (tmp_path / "matrix.csv").write_text(text(report, "aiperf-report"))
    curve, measured = report.beside(read_curves(tmp_path / "matrix.csv"))
    assert curve.lengths == {"x": float(rows[1][1]), "y": float(rows[1][2])}
    assert set(curve.lengths) <= set(measured.lengths)


def test_matrix_of_several_models():
    table = "Model,coding,math,Overall\r\na,2.00,,2.00\r\nb,1.50,2.50,2.00\r\nempty,,,\r\n"
    for model, length in (("a", 2.0), ("b", 2.0)):
        assert read_matrix(table, "t")[model]
        assert table_reader(table)(table, "t", model).length == length
    with pytest.raises(EngineError, match="of several models; choose one of a, b, as the text#a"):
        read(table)
    with pytest.raises(EngineError, match="several rows of the model b"):
        read_matrix(f"{table}b,3.00,3.00,3.00\r\n", "t")
    with pytest.raises(EngineError, match="nothing in it of the model c"):
        table_reader(table)(table, "t", "c")


def test_a_single_text_has_no_interval(trained, report):
    alone = text(reference_acceptance(trained["glm_two"], PROMPTS[:1], PLAN), "inferencex")
    assert ("# 95 %" in text(report, "inferencex"), "# 95 %" in alone, "nan" in alone) == (True, False, False)


def test_usage_errors(report):
    with pytest.raises(ConfigError, match="expected one of vllm, aiperf"):
        check_form("csv", (0.0,), decoded=True)
    with pytest.raises(ConfigError, match="one temperature"):
        check_form("vllm", (0.0, 1.0), decoded=True)
    with pytest.raises(ConfigError, match="leave --texts and --engine out"):
        check_form("vllm", (0.0,), decoded=False)
    check_form("inferencex", (0.0,), decoded=False)


@pytest.mark.parametrize(
    "change", [("0.5", "1.5"), ("0.5", "x"), ("12,", "-1,"), ("12,", "1e300,"), ("code", "x" * 200_000)]
)
def test_tables_that_are_none(change):
    table = (
        "subset,num_drafts,num_draft_tokens,num_accepted_tokens,acceptance_length,acceptance_at_pos_0\n"
        "code,12,12,6,1.5,0.5\n"
    )
    assert read(table).per_position == (6,)
    with pytest.raises(EngineError, match=r"the text:2: not a row of speculators' acceptance\.csv"):
        read(table.replace(*change))
    with pytest.raises(EngineError, match="without a row"):
        read(table.splitlines()[0] + "\n")


def test_command(here, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": [1, 2, 3, 4, 5]}\n' * 2)
    options = ("--prompts", tmp_path / "p.jsonl", "-k", 2, "--max-tokens", 8, "--backend", "torch")
    for form in FORMATS:
        code, out, err = here("measure", FIXTURES / "glm", *options, "--temperatures", 1, "--format", form)
        assert (code, bool(out)) == (0, True)
        assert ("not comparable" in err) is (form == "inferencex")
    assert here("measure", FIXTURES / "glm", *options, "--format", "vllm")[0] == 2
    assert here("measure", FIXTURES / "glm", *options, "--temperatures", 0, "--format", "vllm", "--json")[0] == 2
