"""Counts in texts that hold more than them: lengths beside counts, several runs, the command that was used."""

# ruff: noqa: E501  lines of logs are as long as they are

import json

from quick import loop

from nextn.engines.counter_formats import read
from nextn.engines.named_counts import NAMED_FORMAT

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
