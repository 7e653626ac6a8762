"""Counts in texts that hold more than them: lengths beside counts, several runs, the command that was used."""

# ruff: noqa: E501  lines of logs are as long as they are

import json
import time

import pytest
from quick import loop

from nextn.engines.counter_formats import read
from nextn.engines.counters import COPIED, RISING, RISING_AGAIN, RUNS
from nextn.engines.json_formats import WARM_UP
from nextn.engines.named_counts import NAMED_FORMAT, role_of
from nextn.engines.run_settings import overrides_in
from nextn.errors import EngineError

META = {
    "spec_accept_rate": 0.5, "spec_accept_length": 2.5, "spec_num_correct_drafts": 60, "spec_num_proposed_drafts": 120,
    "spec_verify_ct": 40, "spec_correct_drafts_histogram": [8, 12, 12, 8],
}  # fmt: skip
FINISH = """\
[2026-02-05 03:12:31] Finish: obj=GenerateReqInput(rid='oBTZ',
 stream=True, log_metrics=True), out={'text': 'ok',
 'meta_info': {'id': 'oBTZ', 'finish_reason': {'type': 'length', 'length':
 101}, 'completion_tokens': 101, 'spec_accept_rate': 0.5, 'spec_accept_length': 2.5,
 'spec_accept_histogram': [8, 12, 12, 8], 'spec_accept_token_num': 60, 'spec_draft_token_num': 120,
 'spec_verify_ct': 40, 'e2e_latency': 1.51}}
"""
DECODE = "[2026-02-05 03:12:30 TP0] Decode batch, #running-req: 1, #token: 90, accept len: 1.20, accept rate: 0.07, cuda graph: True"
BENCH_VLLM = {"completed": 80, "accept_length": 2.5, "acceptance_rate": 0.5, "num_drafts": 40, "num_draft_tokens": 120,
              "num_accepted_tokens": 60}  # fmt: skip


@loop(
    ("text", "engine", "source"),
    [
        (f"One request with `return_spec_tokens_details`:\n\n```json\n{json.dumps(META)}\n```\n\n| identity | check |\n",
         "SGLang", "SGLang's meta_info"),
        (f"```\n{FINISH}```\n", "SGLang", "SGLang's meta_info"),
        (f"{DECODE}\n{FINISH.replace(chr(10), '')}\n{DECODE}\n", "SGLang", "SGLang's Finish line"),
        (json.dumps(BENCH_VLLM), "an engine", NAMED_FORMAT),
    ],
)  # fmt: skip
def test_counts_are_taken_before_a_length(text, engine, source):
    counters = read(text)
    assert counters.source == source
    assert (counters.engine, counters.num_drafts, counters.draft_tokens, counters.accepted) == (engine, 40, 120, 60)
    assert counters.per_position in ((32, 20, 8), ())


def test_ranks_without_drafts_have_no_length():
    """SGLang's /v1/loads; an idle rank prints 0.0."""
    ranks = [{"dp_rank": rank, "speculative": {"accept_length": length}} for rank, length in enumerate((2.6, 0.0))]
    assert read(json.dumps({"loads": ranks})).mean_length == 2.6
    assert read(json.dumps({"loads": ranks[1:]})).has_drafts is False


@loop(
    ("text", "engine"),
    [
        ("INFO 06-24 09:12:07 [metrics.py:82] SpecDecoding metrics: Draft acceptance rate: 71.4%, Mean acceptance length: "
         "1.71, Accepted: 235 tokens, Drafted: 329 tokens, Per-position acceptance rate: 0.714", "vLLM"),
        ("100%|###| 80/80 [02:05<00:00]\n#questions: 80, Throughput: 152.80 token/s, Acceptance length: 2.44\n", "SGLang"),
    ],
)  # fmt: skip
def test_engines_with_the_same_words(text, engine):
    """vLLM 0.9 has LMDeploy's order; SGLang's scripts of questions have a word of vLLM's table."""
    assert read(text).engine == engine


def test_a_command_above_metrics():
    """MAX's and vLLM's series with what the server was started with."""
    lines = ["drafts_total 100", "draft_tokens_total 300", "accepted_tokens_total 200"]
    metrics = "\n".join(f"vllm:spec_decode_num_{line}" for line in lines)
    (setting,) = read(f"max serve x --use-relaxed-acceptance-for-thinking --num-x 3\n{metrics}\n").overrides
    assert "use-relaxed-acceptance-for-thinking (" in setting
    assert not read(metrics).overrides


def bench(*rates):
    """What `vllm bench serve` prints, of 1,000 rounds."""
    rows = [f"  Position {place}:   {100 * rate:.2f}\n" for place, rate in enumerate(rates)]
    return (
        f"---------------Speculative Decoding---------------\nAcceptance length: {1 + sum(rates):.2f}\nDrafts: 1000\n"
        f"Draft tokens: {1000 * len(rates)}\nAccepted tokens: {1000 * sum(rates):.0f}\nPer-position acceptance (%):\n"
        f"{''.join(rows)}{'=' * 50}\n"
    )


def interval(*rates):
    shares = ", ".join(f"{rate:.3f}" for rate in rates)
    return (
        f"(APIServer pid=1) INFO [metrics.py:101] SpecDecoding metrics: Mean acceptance length: {1 + sum(rates):.2f}, "
        f"Accepted: {100 * sum(rates):.0f} tokens, Drafted: {100 * len(rates)} tokens, Per-position acceptance rate: {shares}\n"
    )


def test_runs_of_another_k_are_not_added():
    for text in (
        f"MTP 1:\n\n{bench(0.8)}\nvs MTP 3:\n\n{bench(0.8, 0.6, 0.4)}",
        2 * interval(0.8) + 2 * interval(0.8, 0.6),
    ):
        with pytest.raises(EngineError, match=r"of runs with K = 1 and [23]; give those of one alone"):
            read(text)
    assert (
        read(2 * interval(0.8) + 2 * interval(0.8, 0.6) + bench(0.8, 0.6)).accepted == 1400
    )  # the run that has a table
    cut = interval(0.8, 0.6).partition(", 0.600")[0]
    assert read(2 * interval(0.8, 0.6) + cut).accepted == 420


ROWS = "  code_python        pred= 192 draft= 180 acc= 146 rate=0.811\n  summarize          pred=  53 draft=  52 acc=  39\n"
SPEC_BENCH = "| task | run | stage | rounds | accepted | rate | a.len | pos accept |\n| {} | 1 | mtp | 759 | 220 | 538/660 | 81% | 3.45 | 90% 80% 73% |\n"


@loop(
    ("text", "num_runs"),
    [
        (f"with the change:\n{bench(0.8)}\nwithout:\n{bench(0.7)}", 2),
        (bench(0.8), 0),
        (f"#7:\n```\n{ROWS}```\nFor reference:\n```\n{ROWS}```\n", 2),
        (ROWS, 0),
        ("no MTP\n  code_python        pred= 192 draft=   0 acc=   0 rate=n/a\nMTP\n" + ROWS, 0),
        ("EAGLE-3:\n#questions: 80, Throughput: 378.57 token/s, Acceptance length: 5.39\n\nEAGLE-2:\n#questions: 80, "
         "Throughput: 230.08 token/s, Acceptance length: 3.76\n", 2),
        ("- `27B-MTP`: same output; 18 draft tokens, 9 accepted.\n- `35B-A3B-MTP`: same output; 10 draft tokens, 3 accepted.", 2),
        (SPEC_BENCH.format("code") + SPEC_BENCH.format("story"), 0),
    ],
)  # fmt: skip
def test_runs_that_are_added_are_noted(text, num_runs):
    """Rows of a table have their names: a run has each once."""
    notes = read(text).notes
    assert [note for note in notes if RUNS in note] == [f"{num_runs} {RUNS}"] * (num_runs > 0)


def test_several_k_in_the_text_are_none():
    command = "llama-server --spec-type draft-mtp --spec-draft-n-max {}\n"
    assert read(command.format(4) + ROWS).k == read(2 * command.format(4) + ROWS).k == 4
    counters = read(command.format(4) + ROWS + command.format(1) + ROWS)
    assert counters.k is None
    assert any("K is set to 4 and 1 in it" in note for note in counters.notes)


ROLES = {
    "accepted": "num_accepted accept_tokens_total acc_draft_tokens spec_num_correct_drafts numAcceptedDraftTokens",
    "rejected": "rejected_tokens reject_draft",
    "drafted": "num_draft_generated draft_tokens_total proposed drafts_proposed_tokens",
    "rounds": "num_drafts draft_rounds_total draft_cycles verify_ct verifier_runs",
    "": "draft accept acc correct reject verifier draft_steps num_draft_calls verify_tokens iterations drafts_tokens",
}


def test_names_of_counts_by_their_words():
    assert {name: role_of(name) for names in ROLES.values() for name in names.split()} == {
        name: role for role, names in ROLES.items() for name in names.split()
    }


def test_json_as_a_list_of_markdown():
    """With one of the values in bold, as people mark it."""
    names = ("acceptance_rate", "num_drafts", "draft_tokens", "accepted_tokens", "per_position_acceptance_rates")
    values = (
        "58.33333333333333",
        "**1000**",
        "3000",
        "1750",
        "[0.7734306569343066, 0.5692075078206465, 0.40736183524504]",
    )
    text = "MTP is low with **v0.18**:\n" + "".join(
        f'- "spec_decode_{name}": {value}\n' for name, value in zip(names, values, strict=True)
    )
    assert (read(text).num_drafts, read(text).per_position) == (1000, (773, 569, 407))
    assert read(text + text).notes == (f"2 {RUNS}",)
    assert read("ttft: 311.2 ms\ndraft_n_total: 141\ndraft_n_accepted: 93\n").draft_tokens == 141


def test_series_that_were_read_one_by_one():
    """AIPerf's server_metrics_export.jsonl: each line has all series at one time."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    lines = [
        {"timestamp_ns": time, "endpoint_url": "http://a/metrics", "metrics": {
            f"vllm:spec_decode_num_{name}": [{"labels": {"engine": "0"}, "value": value * time}]
            for name, value in zip(names, (100, 300, 160), strict=True)}}
        for time in (1, 2)
    ]  # fmt: skip
    counters = read("\n".join(map(json.dumps, lines)))
    assert (counters.num_drafts, counters.draft_tokens, counters.accepted) == (200, 600, 320)


@loop(
    "prefix",
    ["vllm-decode-7d9f6c5b8-{}x2k9 vllm (APIServer pid=1) ", "llm_vllm.{0}.k3v9b2@node-{0}    | (APIServer pid=1) ",
     "(Server pid=1{0}, ip=10.0.0.5) (APIServer pid=1{0}) "],
)  # fmt: skip
def test_prefixes_name_the_process(prefix):
    """Of stern, of services of Docker, and of Ray, which repeats it."""
    *_others, note = read("".join(prefix.format(place) + interval(0.8).partition(") ")[2] for place in (1, 2))).notes
    assert "2 in all" in note
    assert note.count("pid=1") == 2


def test_a_warm_up_is_left_out():
    """Where a record says that it is one; alone it is read, and said to be one."""
    warm, measured = ({"timings": {"draft_n": drafted, "draft_n_accepted": 3}} for drafted in (30, 40))
    for document in (
        [{"phase": "warmup", **warm}, {"phase": "measured", **measured}],
        [{"warm_up": True, **warm}, {"warm_up": False, **measured}],
        {"warmup_requests": [warm, warm], "requests": [measured]},
    ):
        texts = [json.dumps(document)]
        if isinstance(document, list):  # the same records by line, and in the lines of a log
            texts += [
                "\n".join(map(json.dumps, document)),
                "".join(f"INFO got {json.dumps(each)}\n" for each in document),
            ]
        for text in texts:
            assert (read(text).draft_tokens, read(text).notes) == (40, ()), text
    assert WARM_UP in read(json.dumps([{"phase": "warmup", **warm}])).notes
    lines = [json.dumps({"phase": phase, "drafted": 40, "accepted": 30}) for phase in ("warmup", "measured")]
    with pytest.raises(EngineError, match="of 2 runs, parts or settings"):
        read("\n".join(lines))


def test_blanks_behind_a_setting_cost_little_time():
    start = time.perf_counter()
    assert not overrides_in("SIMULATE_ACC_LEN" + 40_000 * " " + "none")
    assert time.perf_counter() - start < 2


def counts_of(text):
    counters = read(text)
    return counters.num_drafts, counters.draft_tokens, counters.accepted


@loop(
    ("beside", "counts"),
    [
        ({}, None),
        ({"acceptance_rate": 0.25}, (None, 12, 3)),
        ({"mean_acceptance_length": 1.25}, (12, None, 3)),
        ({"k": 1}, (12, 12, 3)),
        ({"k": 3}, None),
        ({"acceptance_rate": 0.083, "k": 3}, (12, None, 3)),  # 3 of 36
        ({"acceptance": 0.25}, (None, 12, 3)),
        ({"tokens_per_step": 1.25}, (12, None, 3)),
        ({"accepted": 0}, (None, 12, 0)),
        ({"draft_tokens": 36}, (12, 36, 3)),
    ],
)
def test_drafts_that_may_be_rounds_or_tokens(beside, counts):
    text = json.dumps({"drafts": 12, "accepted": 3} | beside)
    if counts is None:
        with pytest.raises(EngineError, match="'drafts' beside 'accepted' may be rounds or draft tokens"):
            read(text)
    else:
        assert counts_of(text) == counts


def test_drafts_that_are_rounds_by_the_accepted_ones():
    assert counts_of('{"drafts": 12, "accepted": 13}') == counts_of('{"drafts": 12, "accepted_tokens": 13}')
    assert counts_of('{"num_drafts": 12, "num_accepted_tokens": 3}') == (12, None, 3)


@loop(
    ("text", "rounds"),
    [
        ("[MTP] steps=100 total_draft=300 accepted=200", 100),
        ("MTP: iterations 100, drafted 300, accepted 200", 100),
        ("MTP: drafted 300, accepted 200 in 100 rounds", 100),
        ('{"steps": 100, "total_draft": 300, "total_accepted": 200}', 100),
        ("mtp\ntotal_iterations: 100\ntotal_draft: 300\ntotal_accepted: 200", 100),
        ("MTP num_steps=100 drafted=300 accepted=200", None),  # K
        ("MTP spec steps: 100 drafted=300 accepted=200", None),
        ("[bench] iterations: 5\nMTP K=3 drafted=300 accepted=200", None),  # repeats
        ("MTP steps=3 drafted=300 accepted=200", None),
        ('{"steps": 3, "draft_tokens": 300, "accepted_tokens": 200}', None),
        ("MTP\niterations 100\ndrafted 300\naccepted 200\n", 100),
        ("MTP\ndrafted 300\naccepted 200\nrounds: 100\n", 100),
        ("mtp:   200/300 drafts accepted (66.7%), 3.00 tokens per verify decode (100 decodes for 300 tokens)", 100),
        ("[MTP] acceptance rate 66.67% (200/300 tokens across 100 speculative iterations)", 100),
        ("slot 0 | MTP: drafted 300, accepted 200, 3.00 tokens per cycle (100 verify cycles)", 100),
        ("MTP: drafted 300, accepted 200, 3.00 tokens per cycle", 100),  # by the length
        ("# summary tok/s=9 mtp_drafted=300 mtp_accepted=200 mtp_decodes=100 mtp_draft_s/tok=0.1", 100),
        ("MTP cycles=100 drafted=300 accepted=200 mtp_decodes=300", 100),  # the head's
        ("MTP drafted=300 accepted=200 mtp_decodes=300", None),
        ("MTP drafted=300 accepted=200 drafted_steps=100 mtp_decodes=140", 100),
        ("MTP: drafted=300 accepted=200\n[bench] finished 100 iterations", None),
        ("MTP: drafted=300 accepted=200, 3.0 tokens per cycle", None),  # one decimal shows few
        ("MTP steps=20 emitted=220 drafted=300 accepted=200", 20),  # of more drafts each: all tokens show it
    ],
)
def test_rounds_under_bare_names(text, rounds):
    assert counts_of(text) == (rounds, 300, 200)


@loop(
    "text",
    [
        "ngram: drafted=300 accepted=200",
        "spec (prompt-lookup): accepted 200 / 300 drafted",
        "[pld] drafted=300 accepted=200",
        "speculative n-gram: acceptance 66.7% (200/300)",
        "suffix decoding: drafts 40/50, tokens 90/150",
        "ngram draft acceptance position 1: 40/50\nposition 2: 30/40",
        "mtp+ngram: drafted=300 accepted=200",  # of both
        "ngram_drafted=300 ngram_accepted=200",
        "n_draft = 5\nn_predict = 200\nn_drafted = 300\nt_draft_flat = 1.00 ms\nn_accept = 200\n",
    ],
)
def test_drafts_that_no_head_made(text):
    with pytest.raises(EngineError, match="no head made"):
        read(text)


@loop(
    "text",
    [
        "request for model my-ngram-test: drafted=50 accepted=31",
        "engine stats: pld=0 mtp=1 drafted=50 accepted=31",
        "prompt_lookup_num_tokens=0 drafted=50 accepted=31",
        "spec: drafted=50 accepted=31 ngram_hits=2",
        "no n-gram cache; drafted=50 accepted=31",
        "model=PLD-7B drafted=50 accepted=31",
        "req=suffix-decode-3 drafted=50 accepted=31",
        "mtp rounds=20,accepted=31,drafted=50",
    ],
)
def test_words_that_label_no_counts(text):
    """A name of a model or a setting beside counts says nothing of what drafted."""
    assert counts_of(text)[1:] == (50, 31)


def test_lines_of_a_log_are_no_series():
    """Requests are added; of a series, the last reading would be taken."""
    lines = "mtp rounds=20,accepted=31,drafted=50\nmtp rounds=25,accepted=35,drafted=70\n"
    assert counts_of(lines)[1:] == (120, 66)


def test_the_label_of_an_entry_is_looked_for_near_it(monkeypatch):
    """Else a line of a megabyte would take minutes, as each of its entries would search all of it."""
    seen = []
    monkeypatch.setattr("nextn.engines.log_reader.copier_of", lambda line: seen.append(len(line)) or "")
    read("draft acceptance 62% (31/50) " * 400)
    assert len(seen) == 400
    assert max(seen) < 1200


def test_a_copier_beside_the_head():
    head = "MTP: 31 accepted / 50 drafted"
    assert COPIED in read(f"{head}\nngram: 3 accepted / 4 drafted").notes
    assert COPIED not in read(head).notes
    for text in (
        f"{head}\nngram: 3 accepted / 4 drafted",
        f"n-gram: off, {head}",
        f"{head} (prompt suffix 20)",
        f"ngram: 3 hits | {head}",
    ):
        assert counts_of(text) == (None, 50, 31)


@loop(
    "text",
    [
        "spec: mtp drafted 50 accepted 31, ngram drafted 9 accepted 8",
        "spec: ngram drafted 9 accepted 8, mtp drafted 50 accepted 31",
        "mtp_drafted=50 mtp_accepted=31 ngram_drafted=9 ngram_accepted=8",
    ],
)
def test_counts_of_both_drafters_in_one_line(text):
    assert counts_of(text) == (None, 50, 31)
    assert COPIED in read(text).notes


def test_drafts_that_may_be_copied_among_the_counts():
    line = "slot 0 | MTP: drafted 300, accepted 200, 3.00 tokens per cycle (100 verify cycles)\n"
    notes = read(f"{line}slot 0 | n-gram drafts in 41 of 100 cycles\n").notes
    assert ["n-gram drafts in 41 of 100" in note for note in notes] == [True]
    assert read(f"{line}slot 0 | n-gram drafts in 0 of 100 cycles\n").notes == ()


def test_blocks_of_two_lines_that_follow_each_other():
    """The second line of one and the first of the next are no pair."""
    text = "MTP\ndrafted 300\naccepted 200\ndrafted 100\naccepted 50\n"
    assert counts_of(text) == (None, 400, 250)
    text = "MTP\nsteps 100\ndrafted 300\naccepted 200\nsteps 50\ndrafted 100\naccepted 50\n"
    assert counts_of(text) == (150, 400, 250)


def test_lines_of_several_k_are_not_added():
    one, three = "MTP k={}: 80 accepted / 100 drafted\n", "mtp: drafted 300  accepted 187  k {}\n"
    assert read(one.format(3) + three.format(3)).k == 3
    with pytest.raises(EngineError, match="of runs with K = 1 and 3"):
        read(one.format(1) + three.format(3))


def test_a_box_of_one_run():
    """With the method in brackets before the rate."""
    assert counts_of("│ Speculative Acceptance (MTP) │ 62.0% (31/50, avg len: 2.4) │\n") == (None, 50, 31)


def test_a_label_of_another_drafter():
    counts = "steps=100 draft_tokens=300 accepted=187\n"
    assert len(read(f"[eagle3] {counts}").overrides) == len(read(f"EAGLE-3: spec {counts}").overrides) == 1
    assert not read(f"[mtp] {counts}").overrides


def test_readings_of_two_servers_are_no_series():
    """Each has more than the one before, as a later reading of one server has."""

    def text(*hosts):
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return "".join(
            f"$ curl -s http://{host}:8000/metrics\n"
            + "".join(f"vllm:spec_decode_num_{name}_total {place * 100}\n" for name in names)
            for place, host in enumerate(hosts, 1)
        )

    assert read(text("a", "a")).num_drafts == 200
    with pytest.raises(EngineError, match=r"of several servers \(a:8000, b:8000\)"):
        read(text("a", "b"))


def test_running_totals_of_an_engine_that_was_started_again():
    def lines(*totals):
        return "\n".join(f"spec: drafted={total} accepted={total // 2}" for total in totals)

    totals = (100, 200, 300, 400, 500, 50, 150)
    assert RISING_AGAIN in read(lines(*totals)).notes
    assert RISING_AGAIN not in read(lines(*totals[3:])).notes  # which requests may have, too
    assert RISING in read(lines(*totals[:5])).notes


def test_names_in_capitals():
    assert counts_of("NUM_DRAFTS=100\nNUM_DRAFT_TOKENS=300\nNUM_ACCEPTED_TOKENS=200\n") == (100, 300, 200)
