"""What engines count of their drafts: names and log lines as they print them, differences, conditional acceptance."""

import io
import json

import pytest

from nextn.engines.client import Budget
from nextn.engines.counter_formats import read
from nextn.engines.counters import (
    ADDED,
    FIRST_TOKENS,
    ROUNDED,
    SHORTER,
    Counters,
    Series,
    fill_in_derived,
    parse_series,
    sum_counters,
    sum_series,
)
from nextn.engines.json_formats import from_json
from nextn.engines.log_reader import read_log
from nextn.engines.metrics_formats import from_metrics, prefix_hits, without_first_tokens
from nextn.errors import ConfigError, EngineError
from nextn.evaluate.engine_counters import read_engine_counters

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 1e+02
vllm:spec_decode_num_drafts_total{engine="0",model_name="b"} 7.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 200
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a"} 200
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 120
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="a"} 130
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 80
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a",position="0"} 90
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 40
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a",position="1"} 40
vllm:prefix_cache_hits_total{engine="0",model_name="a"} 64
"""


def test_vllm_metrics(tmp_path):
    """Summed over engines, one model of two; per position without condition -> conditional with intervals."""
    found = from_metrics(VLLM, model="a")
    assert (found.engine, found.num_drafts, found.draft_tokens, found.accepted) == ("vLLM", 200, 400, 250)
    assert (found.per_position, found.since) == ((170, 80), 1.7e9)
    figures = found.acceptance()
    assert (figures.num_drafted, figures.num_accepted) == ((200, 170), (170, 80))
    assert figures.rates == (0.85, 80 / 170)
    assert figures.length == 1 + 250 / 200
    low, high = figures.intervals()[1]
    assert low < 80 / 170 < high
    assert from_metrics(VLLM).num_drafts == 207
    assert prefix_hits(VLLM, model="a") == 64
    assert read(VLLM, model="a") == found
    (file := tmp_path / "metrics.txt").write_text(VLLM)
    assert read_engine_counters(f"{file}#a", Budget()) == found != read_engine_counters(str(file), Budget())


@pytest.mark.parametrize("name", ["m#1.csv", "#1#.csv", "m.csv"])
def test_names_of_files_and_models_may_have_a_number_sign(name, tmp_path):
    (file := tmp_path / name).write_text("Model,x,Overall\norg/a,2.00,2.00\nb#1,1.50,1.50\n")
    lengths = [read_engine_counters(f"{file}#{model}", Budget()).length for model in ("org/a", "b#1")]
    assert lengths == [2.0, 1.5]
    with pytest.raises(EngineError, match="of several models"):
        read_engine_counters(str(file), Budget())


@pytest.mark.parametrize(
    "text",
    [
        "MTP: 31 accepted / 50 drafted\n",
        '{"timings": {"draft_n": 78, "draft_n_accepted": 60}}',
        '{"log": "MTP: 31 accepted / 50 drafted"}\n',
        "subset,num_drafts,num_draft_tokens,num_accepted_tokens,acceptance_length\nx,12,12,6,1.5\n",
    ],
)
def test_a_model_of_a_text_that_names_none_is_refused(text):
    assert read(text).accepted
    with pytest.raises(ConfigError, match="the text#no-such-model: it names no model"):
        read(text, model="no-such-model")


def test_unknown_model():
    with pytest.raises(EngineError, match="no model_name 'c'; they have a, b"):
        from_metrics(VLLM, model="c")


def test_llama_metrics():
    text = """llamacpp:spec_decode_num_draft_tokens_total 30
llamacpp:spec_decode_num_accepted_tokens_total 18
llamacpp:spec_decode_num_drafts_total 10
llamacpp:prompt_tokens_cached_total 11
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 6
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 3
"""
    found = from_metrics(text, model="whatever")  # llama.cpp has no model_name
    assert found == Counters("llama.cpp", 10, 30, 18, (9, 6, 3))
    assert prefix_hits(text) == 11


def test_sglang_metrics():
    """It counts rounds and tokens; the first token of a request belongs to no round, which is noted."""
    text = """sglang:spec_accept_length{tp_rank="0"} 2.5
sglang:spec_verify_calls_total{tp_rank="0"} 40
sglang:generation_tokens_total{tp_rank="0"} 100
"""
    found = from_metrics(text)
    assert (found.engine, found.num_drafts, found.accepted, found.length) == ("SGLang", 40, 60, 2.5)
    assert found.notes == (FIRST_TOKENS,)
    assert found.acceptance().length == 2.5
    older = from_metrics('sglang:spec_accept_length{tp_rank="0"} 2.5\n')
    assert (older.length, older.has_drafts) == (2.5, None)
    assert Counters("x", 199, 0, 0).has_drafts is False
    with pytest.raises(EngineError, match=r"its own acceptance length is 2.50"):
        older.acceptance()


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running 3", "<html>", "python_info 1"])
def test_no_counters(text):
    with pytest.raises(EngineError, match=r"no draft counters|no draft counts"):
        from_metrics(text)


def test_difference():
    before, after = (
        from_metrics(VLLM, model="a"),
        from_metrics(VLLM.replace("100.0", "120.0").replace('"0"} 80', '"0"} 95'), model="a"),
    )
    moved = after.minus(before)
    assert (moved.num_drafts, moved.draft_tokens, moved.accepted, moved.per_position) == (20, 0, 0, (15, 0))


@pytest.mark.parametrize(
    ("old", "new"),
    [('_drafts_total{engine="0",model_name="a"} 100.0', '_drafts_total{engine="0",model_name="a"} 90.0'),
     ('"1"} 40', '"1"} 39'), ("1.7e+09", "1.8e+09")],
)  # fmt: skip
def test_reset_in_mid_run(old, new):
    """A restart sets counters back; one that has caught up since is told by the time that counting began."""
    assert old in VLLM
    with pytest.raises(EngineError, match=r"reset during the run.*measure again"):
        from_metrics(VLLM.replace(old, new), model="a").minus(from_metrics(VLLM, model="a"))


def test_positions_cannot_grow():
    with pytest.raises(EngineError, match="accepted more often than an earlier one"):
        Counters("vLLM", 100, 200, 150, (50, 100))
    Counters("vLLM", 100, 200, 202, (101, 101))  # a reading under load


def test_one_draft_a_round_needs_no_positions():
    assert fill_in_derived(Counters("x", 10, 10, 6)).per_position == (6,)
    assert fill_in_derived(Counters("x", 10, 20, 6)).per_position == ()


def test_shorter_rounds_are_noted():
    """Of the run in question, whatever was before it."""
    assert fill_in_derived(Counters("x", 10, 25, 12, (7, 3, 2))).notes == (SHORTER,)
    assert fill_in_derived(Counters("x", 10, 29, 12, (7, 3, 2))).notes == ()  # the ends of texts
    for before, after, notes in (
        ((1000, 3000, 900, (600, 200, 100)), (1100, 3150, 960, (650, 205, 105)), (SHORTER,)),
        ((1000, 1600, 900, (600, 200, 100)), (2000, 4590, 1900, (1300, 400, 200)), ()),
    ):
        first, last = (fill_in_derived(Counters("x", *counts)) for counts in (before, after))
        assert last.minus(first).notes == notes


def test_prometheus_lines():
    """Labels with escapes, exponents, time stamps; NaN and comments are left out."""
    text = 'a{x="q\\"\\\\n",y="2"} 1e3 1700000000\n# b 1\nb NaN\nc_total{} 2\nc{z="}"} +5\nbroken{\n'
    assert parse_series(text) == [Series("a", {"x": 'q"\\n', "y": "2"}, 1000.0), Series("c_total", {}, 2.0),
                            Series("c", {"z": "}"}, 5.0)]  # fmt: skip
    assert sum_series(parse_series(text), "none", "c") == 7.0
    assert sum_series(parse_series(text), "none") is None


LOGS = {
    "vLLM": (
        "INFO 11-21 [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 2.20, Accepted throughput: 12.00 "
        "tokens/s, Drafted throughput: 20.00 tokens/s, Accepted: 120 tokens, Drafted: 200 tokens, Per-position "
        "acceptance rate: 0.800, 0.400, Avg Draft acceptance rate: 60.0%\n",
        Counters("vLLM", 200, 400, 240, (160, 80), notes=(ROUNDED,)),
    ),
    "llama.cpp": (
        "slot print_timing: id  0 | task 0 | draft acceptance = 0.57500 (   23 accepted /    40 generated), "
        "mean len =  2.15\n",
        Counters("llama.cpp", 40, 80, 46, notes=(ROUNDED,)),
    ),
    "older llama.cpp": (
        "draft acceptance rate = 0.57576 (   19 accepted /    33 generated)\n",
        Counters("llama.cpp", None, 66, 38),
    ),
    "rounds of llama.cpp": (
        "slot x: accepted  2/ 3 draft tokens\nslot x: accepted  0/ 3 draft tokens (restore checkpoint)\n"
        "slot x: accepted  0/ 2 draft tokens\ndraft acceptance = 0.4 ( 2 accepted / 5 generated), mean len = 2.00\n",
        Counters("llama.cpp", 4, 10, 4, (2, 2, 0), (4, 4, 2), notes=(SHORTER,)),
    ),
    "SGLang": (
        "Decode batch. #running-req: 1, #token: 10, token usage: 0.00, accept len: 2.50, accept rate: 0.50\n",
        Counters("SGLang", length=2.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_logs(name):
    """Two intervals are summed; other lines between them do not matter."""
    line, expected = LOGS[name]
    assert read_log(io.StringIO(f"noise\n{line}noise\n{line}")).counters == expected


def test_log_without_drafts():
    assert read_log(io.StringIO("INFO: Uvicorn running\n")).counters is None
    with pytest.raises(EngineError, match="no draft counts in it; nothing in it is of an engine"):
        read("INFO: Uvicorn running\n")


def test_json_of_llama():
    """`timings` wherever they are; the prefill gives the first token."""
    timings = {"predicted_n": 16, "draft_n": 12, "draft_n_accepted": 9}
    found = from_json({"choices": [{"text": "x"}], "timings": timings})
    assert found == Counters("llama.cpp", 6, 12, 9)
    assert from_json([{"timings": timings}] * 2) == Counters("llama.cpp", 12, 24, 18)


def test_json_of_sglang():
    """histogram[k]: rounds that kept k drafts."""
    meta = {"spec_verify_ct": 4, "spec_accept_histogram": [1, 2, 1], "completion_tokens": 8}
    found = from_json({"text": "x", "meta_info": meta})
    assert (found.num_drafts, found.accepted, found.per_position) == (4, 4, (3, 1))
    plain = {"completion_tokens": 64, "spec_verify_ct": 21}  # of prefill 1, and 3 of each round
    line = f"Finish: obj=GenerateReqInput(rid='5'), out={ {'text': 'x', 'meta_info': plain} }"
    for found in (from_json({"meta_info": plain}), from_json([{"meta_info": plain}] * 9), read(line)):
        assert (found.accepted, found.mean_length) == (2 * found.num_drafts, 3.0)


def test_an_interval_without_a_round_has_no_length():
    """An idle rank of SGLang: every round gives a token, so its 0.00 is no acceptance length."""
    line = "Decode batch, #running-req: 1, #token: 9, accept len: {}, accept rate: {}, gen throughput (token/s): 9.1"
    found = read("\n".join(line.format(*each) for each in [("3.00", "0.67")] * 3 + [("0.00", "0.00")]))
    assert (found.length, found.k) == (3.0, 3)
    with pytest.raises(EngineError, match="no draft counts"):
        read(line.format("0.00", "0.00"))


def test_an_engine_without_drafts_shows_no_depth():
    """An idle one: 0 draft tokens are not one in each of 0 rounds."""
    assert read(json.dumps({"accept_length": 0.0})) == Counters("SGLang", 0, 0, 0)
    assert fill_in_derived(Counters("x", 5, 5, 3)).per_position == (3,)


def test_json_of_vllm_bench():
    found = from_json({
        "spec_decode_num_drafts": 100, "spec_decode_draft_tokens": 200, "spec_decode_accepted_tokens": 120,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.4],
    })  # fmt: skip
    assert found == Counters("vLLM", 100, 200, 120, (80, 40))


def test_own_json_round_trip(tmp_path):
    found = from_metrics(VLLM, model="a")
    path = tmp_path / "counters.json"
    path.write_text(json.dumps(found.as_record()))
    notes = found.notes
    assert notes[0].startswith(ADDED)
    assert found.minus(found).notes == ()
    assert read(path) == Counters(
        "vLLM", 200, 400, 250, (170, 80), notes=notes
    )  # summed over one: no start of counting
    path.write_text("\n".join([json.dumps(found.as_record())] * 2))
    assert read(path).num_drafts == 400


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "neither JSON nor lines"),
        ("[1, 2]", "no draft counts"),
        ('{"draft_n": -1}', "draft_n_accepted = None"),
        ('{"per_position_offered": [], "nonsense": 1}', "not a record of counters"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_other_json(text, words):
    with pytest.raises(EngineError, match=words):
        read(text)


def test_absent_file(tmp_path):
    with pytest.raises(EngineError, match="cannot be read"):
        read(tmp_path / "none.log")


def test_sum_of_none():
    assert sum_counters([]) is None
    lengths = [Counters("x", length=2.0), Counters("x", length=3.0)]
    assert sum_counters(lengths).length == 2.5


def test_first_tokens_are_no_drafts():
    """SGLang's generated tokens less its rounds: one of each request came from no round."""
    text = "sglang:spec_verify_calls_total 40\nsglang:generation_tokens_total 100\n"
    found = without_first_tokens(from_metrics(text), 5)
    assert (found.accepted, found.emitted, found.notes) == (55, 95, ())
    assert without_first_tokens(found, 5) == found
