"""What people paste: each format in the shape in which it is printed, what a log daemon puts before it, and what is
left out. Shapes are those of public reports and sources, listed in docs/developers/reports.md."""

# ruff: noqa: E501  lines of logs are as long as they are

import gzip
import io
import json
import os
import re
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from quick import loop

from nextn.engines import log_reader
from nextn.engines.counter_formats import _piped, read
from nextn.engines.counters import ADAPTIVE, COPIED, FIRST_TOKENS, MAX_POSITIONS, RISING, ROUNDED, RUNS, SOME_POSITIONS
from nextn.engines.embedded_json import documents
from nextn.engines.json_formats import BONUS_INCLUDED, JSON_READERS
from nextn.engines.log_formats import LOG_FORMATS, NO_MTP, RENAMED, STEPS_WITHOUT_DRAFTS
from nextn.engines.metrics_formats import METRICS_FORMAT, OF_BATCHES, OF_REQUESTS, REPEATED
from nextn.engines.named_counts import from_record, in_lines
from nextn.engines.run_settings import OVERRIDES, head_not_loaded, overrides_in
from nextn.errors import ConfigError, EngineError
from nextn.evaluate.hypotheses import engine_depth, observed_counts

VLLM = (
    "SpecDecoding metrics: Mean acceptance length: 2.71, Accepted throughput: 0.68 tokens/s, Drafted throughput: 0.80 "
    "tokens/s, Accepted: 169 tokens, Drafted: 198 tokens, Per-position acceptance rate: 0.919, 0.788, Avg Draft "
    "acceptance rate: 85.4%"
)
SGLANG = (
    "Decode batch, #running-req: 1, #token: 1203, token usage: 0.01, accept len: {}, accept rate: {}, cuda graph: True, "
    "gen throughput (token/s): 41.4, #queue-req: 0,"
)
BENCH = """\
============ Serving Benchmark Result ============
Successful requests:                     20
---------------Speculative Decoding---------------
Acceptance rate (%):                     73.47
Acceptance length:                       3.20
Drafts:                                  6393
Draft tokens:                            19179
Accepted tokens:                         14090
Per-position acceptance (%):
  Position 0:                            83.42
  Position 1:                            72.91
  Position 2:                            64.07
==================================================
"""
OFFLINE = """\
--------------------------------------------------
total_num_output_tokens: 248291
num_drafts: 74097
num_draft_tokens: 147899
num_accepted_tokens: 141162
mean acceptance length: 2.91
--------------------------------------------------
acceptance at token 0: 0.96
acceptance at token 1: 0.94
"""
STATISTICS = (
    "[45927] 3.05.130.885 I statistics        draft-mtp: #calls(b,g,a) =    1   1099   1099, #gen drafts =   1099, "
    "#acc drafts =   902, #gen tokens =   3297, #acc tokens =  2091, dur(b,g,a) = 0.002, 24847.492, 1.359 ms"
)
NGRAM = STATISTICS.replace("draft-mtp", "ngram-mod").replace("1099", "4")
REQUEST = (
    "0.16.519.195 I slot print_timing: id  0 | task 42 | draft acceptance = 0.66237 (  257 accepted /   388 generated), "
    "mean acceptance length =  3.65, acceptance rate per position = (0.804, 0.701, 0.629, 0.515)"
)
ITERATION = {"iter": 7, "specDecodingStats": {"numDraftTokens": 24, "numAcceptedTokens": 11,
             "numRequestsWithDraftTokens": 8, "acceptanceLength": 2.375, "iterLatencyMS": 0.0}}  # fmt: skip
AIPERF = {
    "metadata": {"x": 1},
    "spec_decode_acceptance": {
        "engine": "vllm", "mean_acceptance_length": 3.18, "draft_acceptance_rate": 0.436,
        "acceptance_histogram": {"0": 34, "1": 22, "2": 19, "3": 16, "4": 15, "5": 22},
        "num_accepted_draft_tokens": 278, "num_draft_tokens": 640, "num_spec_steps": 128, "num_spec_tokens": 5,
    },
}  # fmt: skip


def summary(counters):
    return (counters.engine, counters.num_drafts, counters.draft_tokens, counters.accepted, counters.per_position)


# Name -> text, and (engine, rounds, draft tokens, accepted, per position).
TEXTS = {
    "vLLM 0.30": ("(APIServer pid=347228) INFO 08-04 20:51:08 [metrics.py:120] " + VLLM,
                  ("vLLM", 99, 198, 169, (91, 78))),
    "vLLM 0.33, with more fields between": (
        VLLM.replace("198 tokens,", "198 tokens, Rejected: 29 tokens, Effective tokens/forward: 2.71, Proposer latency: "
                     "0.1 s,"), ("vLLM", 99, 198, 169, (91, 78))),
    "vLLM, wrapped when pasted": (VLLM.replace(", A", ",\nA").replace(", P", ",\nP"), ("vLLM", 99, 198, 169, (91, 78))),
    "vLLM without positions": (VLLM.replace("Per-position acceptance rate: 0.919, 0.788, ", ""),
                               ("vLLM", 99, 198, 169, ())),
    "vLLM 0.6": ("INFO 10-16 19:05:47 metrics.py:367] Speculative metrics: Draft acceptance rate: 0.642, System "
                 "efficiency: 0.598, Number of speculative tokens: 3, Number of accepted tokens: 8547, Number of draft "
                 "tokens: 13311, Number of emitted tokens: 10616.", ("vLLM", 4437, 13311, 6179, ())),
    "bench serve": (BENCH, ("vLLM", 6393, 19179, 14090, (5333, 4661, 4096))),
    "bench serve, cut": (BENCH.split("  Position 2")[0], ("vLLM", 6393, 19179, 14090, (5333, 4661, 4096))),
    "bench serve, cut more": (BENCH.split("  Position 1")[0], ("vLLM", 6393, 19179, 14090, ())),
    "bench serve, twice": (BENCH * 2, ("vLLM", 12786, 38358, 28180, (10666, 9322, 8192))),
    "bench serve without counts": ("Acceptance rate (%): 68.81\nAcceptance length: 3.06\nPer-position acceptance (%):\n"
                                   "Position 0: 76.56\nPosition 1: 68.76\nPosition 2: 61.10\n",
                                   ("vLLM", None, None, None, ())),
    "offline": (OFFLINE, ("vLLM", 74097, 147899, 141162, (71133, 69651))),
    "llama.cpp 2026-06": (REQUEST, ("llama.cpp", 97, 388, 257, (78, 68, 61, 50))),
    "llama.cpp's router": ("[54447] 0.11.873.131 I slot print_timing: id  0 | task 0 | draft acceptance = 0.84783 (   39 "
                           "accepted /    46 generated), mean len =  2.70\n", ("llama.cpp", 23, 46, 39, ())),
    "llama.cpp's statistics": (STATISTICS, ("llama.cpp", 1099, 3297, 2091, ())),
    "llama.cpp's statistics of two drafters": (f"{NGRAM}\n{STATISTICS}", ("llama.cpp", 1099, 3297, 2091, ())),
    "llama.cpp's statistics grow": ("\n".join(STATISTICS.replace("1099", each) for each in ("400", "900", "1099")),
                                    ("llama.cpp", 1099, 3297, 2091, ())),
    "llama.cpp's statistics of two runs": (f"{STATISTICS}\n{STATISTICS.replace('3297', '2500')}",
                                           ("llama.cpp", 2198, 5797, 4182, ())),
    "llama.cpp's statistics with rates": (
        "spec common_specu: statistics        draft-mtp: #calls(b,g,a) =    1    200    200, #gen drafts =    200, #acc "
        "drafts =   170, #gen tokens =    399, #acc tokens =   311, #mean acc len = 2.55, #acc rate/pos = (0.850, "
        "0.705), dur(b,g,a) = 0.004, 1.73, 0.465 ms", ("llama.cpp", 200, 399, 311, (170, 141))),
    "ik_llama.cpp's statistics": ("statistics mtp: #calls(b,g,a) = 1 81 66, #gen drafts = 81, #acc drafts = 66, #gen "
                                  "tokens = 162, #acc tokens = 120, dur(b,g,a) = 1.0, 2.0, 3.0 ms",
                                  ("llama.cpp", 81, 162, 120, (66, 54))),
    "speculative-simple": ("n_draft   = 3\nn_predict = 128\nn_drafted = 150\nn_accept  = 90\naccept    = 60.000%\n",
                           ("llama.cpp", None, 150, 90, ())),
    "SGLang": (f"[2026-10-02 11:22:33 TP0] {SGLANG.format('2.50', '0.50')}\n", ("SGLang", None, None, None, ())),
    "SGLang with DP": (f"[2026-10-02 11:22:33 DP3 TP3] {SGLANG.format('2.50', '0.50')}\n",
                       ("SGLang", None, None, None, ())),
    "SGLang's benchmark": ("Concurrency:                             1.00\nAccept length:                           3.09"
                           "\n------End-to-End Latency------\n", ("SGLang", None, None, None, ())),
    "TensorRT-LLM's iterations": ("\n".join([json.dumps(ITERATION)] * 2), ("TensorRT-LLM", 16, 48, 22, ())),
    "TensorRT-LLM's iterations as Python": (f"[07/01] iteration {ITERATION}\n", ("TensorRT-LLM", 8, 24, 11, ())),
    "TensorRT-LLM's ranks": ("\n".join(json.dumps(ITERATION | {"attentionDpRank": rank}) for rank in range(4)),
                             ("TensorRT-LLM", 8, 24, 11, ())),
    "AIPerf's records": ("\n".join([json.dumps(AIPERF)] * 2), ("vLLM", 256, 1280, 556, (188, 144, 106, 74, 44))),
    "AIPerf's aggregate": (json.dumps({"pooled_spec_decode_acceptance_histogram": {"0": 6400, "1": 4608, "2": 3840}}),
                           ("an engine under AIPerf", 14848, None, 12288, (8448, 3840))),
    "AIPerf's console": ("│  Token-Weighted Acceptance Length │   3.20 │   N/A │\n",
                         ("an engine under AIPerf", None, None, None, ())),
    "TensorRT-LLM's console": ("Mean Avg Decoded Tokens per Iter:        2.74\nMedian Avg Decoded Tokens per Iter: 2.8\n",
                               ("TensorRT-LLM", None, None, None, ())),
    "mlx-vlm": (json.dumps({"timings": {"predicted_n": 111, "draft_kind": "mtp", "draft_rounds": 30, "draft_n": 90,
                                        "draft_n_accepted": 81}}), ("mlx-vlm", 30, 90, 81, ())),
    "mlx-vlm, a short answer": (json.dumps({"timings": {"predicted_n": 2, "draft_rounds": 1, "draft_n": 7,
                                                        "draft_n_accepted": 6}}), ("mlx-vlm", 1, 7, 6, ())),
    "llama.cpp's timings": (json.dumps({"timings": {"predicted_n": 100, "draft_n": 78, "draft_n_accepted": 60}}),
                            ("llama.cpp", 39, 78, 60, (0,) * 0)),
    "llama.cpp's speed_bench.py": (json.dumps({
        "completed_samples": 2, "failed_samples": 1, "selected_samples": 3, "config": {"bench": "qualitative", "osl": 48},
        "results": [
            {"id": "he-0", "ok": True, "turns": 1, "completion_tokens": 48, "draft_n": 27, "draft_n_accepted": 19},
            {"id": "he-1", "ok": True, "turns": 2, "completion_tokens": 96, "draft_n": 54, "draft_n_accepted": 38},
            {"id": "he-2", "ok": False, "turns": 1, "completion_tokens": 0, "draft_n": 0, "draft_n_accepted": 0},
        ],
        "summary": [{"category": "overall", "draft_n": 81, "accepted": 57, "accept_rate": 57 / 81}],
    }), ("llama.cpp", 81, 81, 57, (57,))),
    "llama.cpp's timings, one draft a round, none in the last": (
        json.dumps({"timings": {"predicted_n": 100, "draft_n": 54, "draft_n_accepted": 44}}),
        ("llama.cpp", 54, 54, 44, (44,)),
    ),
    "timings with bonus tokens": (json.dumps({"timings": {"predicted_n": 100, "draft_n": 78, "draft_n_accepted": 99}})
                                  .replace("78", "120"), ("llama.cpp", None, 120, None, ())),
    "ik_llama.cpp's timings": (
        json.dumps({"timings": {"draft_n": 70, "draft_n_accepted": 40, "draft_by_depth": [
            {"depth": 1, "draft_n": 40, "draft_n_accepted": 25}, {"depth": 2, "draft_n": 30, "draft_n_accepted": 15}]}}),
        ("llama.cpp", 40, 70, 40, (25, 15))),
    "MTPLX": (json.dumps({"accepted_by_depth": [260, 232, 195], "drafted_by_depth": [295, 295, 295],
                          "generated_tokens": 1024}), ("MTPLX", 295, 885, 687, (260, 232, 195))),
    "SGLang's answer": (json.dumps({"meta_info": {"completion_tokens": 1024, "spec_num_correct_drafts": 800,
                        "spec_num_proposed_drafts": 1600, "spec_verify_ct": 200}}), ("SGLang", 200, 1600, 800, ())),
    "SGLang's result": (json.dumps({"backend": "sglang", "accept_length": 2.34}), ("SGLang", None, None, None, ())),
    "vLLM 0.8.3": ("SpecDecoding metrics: Draft acceptance rate: 85.4%, Accepted: 169 tokens, Drafted: 198 tokens",
                   ("vLLM", None, 198, 169, ())),
    "vLLM before the first draft": ("SpecDecoding metrics: Mean acceptance length: nan, Accepted: 0 tokens, Drafted: 0 "
                                    "tokens, Avg Draft acceptance rate: nan%", ("vLLM", None, 0, 0, ())),
    "TokenSpeed": ("[ts] [2026-07-24 20:53:48,415  ATTN TP RANK 0] - INFO - Decode batch. #running-req: 2, gen "
                   "throughput (token/s): 539.35, avg_accept_len: 1.90, accept_rate: 0.30, #queue-req: 0",
                   ("TokenSpeed", None, None, None, ())),
    "SGLang's Finish line": (
        "[2025-10-02 23:42:16] Finish: obj=GenerateReqInput(rid='5'), out={'meta_info': {'completion_tokens': 200, "
        "'spec_accept_rate': 0.5, 'spec_accept_token_num': 120, 'spec_draft_token_num': 240, 'spec_verify_ct': 80}}",
        ("SGLang", 80, 240, 120, ())),
    "SGLang's server info": (json.dumps({"internal_states": [{"avg_spec_accept_length": 2.34}]}),
                             ("SGLang", None, None, None, ())),
    "LM Studio": (json.dumps({"stats": {"total_draft_tokens_count": 120, "accepted_draft_tokens_count": 60}}),
                  ("LM Studio", None, 120, 60, ())),
    "llama.cpp's mtp-bench.py": (
        "  code_python        pred= 192 draft= 144 acc= 118 rate=0.819 tok/s=13.3\n"
        "  explain_concept    pred= 100 draft=   0 acc=   0 rate=n/a tok/s=12.8\n", ("llama.cpp", 73, 144, 118, ())),
    "ik_llama.cpp's llama-spec-bench": (
        "| task | stage | runs | tok/s mean/std | rate mean/std | a.len mean/std |\n|---|---|---|---|---|---|\n"
        "| code | mtp   |    5 |     37.42/1.48 |  92.15%/1.84% |      3.76/0.06 |\n",
        ("ik_llama.cpp", None, None, None, ())),
    "ik_llama.cpp's llama-spec-bench, a row for each run": (
        "| task     | run | stage   |  tokens | stop  | time(s) |   tok/s | rounds |    accepted |    rate |  a.len | pos accept |\n"
        "| code     |   1 | mtp     |     400 | eog   |   6.068 |   65.58 |    100 |     240/300 |  80.00% |   3.40 | 90.0% 80.0% 70.0% |\n",
        ("ik_llama.cpp", 100, 300, 240, (90, 80, 70))),
    "two names, before the counts": ("x\nspeculative: 1,230 accepted / 2,000 drafted (61.5%), 40 t/s\n",
                                     ("an engine", None, 2000, 1230, ())),
    "two names, after the counts": ("[mtp] step 60 drafted=50 accepted=31 rate=62.0%\nMTP: drafted 24, accepted 0 (0.0 %) k=2\n",
                                    ("an engine", None, 74, 31, ())),
    "two names, accepted first": ("mtp_generate: done rounds=80 accepted=120 total_draft=240\n", ("an engine", 80, 240, 120, ())),
    "two names, on two lines": ("- cycles=35\n- drafted=35\n- accepted_drafts=29\n- emitted=64\n", ("an engine", 35, 35, 29, (29,))),
    "two names, in other JSON": (json.dumps({"n_requests": 2, "total_draft": 331, "total_draft_accepted": 215}, indent=1),
                                 ("an engine", None, 331, 215, ())),
    "rejected drafts": ('{"accepted_draft_tokens": 41, "rejected_draft_tokens": 49}', ("an engine", None, 90, 41, ())),
    "one name behind two counts": ("MTP active, 112/141 accepted draft tokens, 108.27 tok/s\nspeculative: 8/9 draft tokens accepted\n",
                                   ("an engine", None, 150, 120, ())),
    "two counts in brackets": ("0.80 acceptance (120 of 150 drafts)\n", ("an engine", None, 150, 120, ())),
    "a file before the counts": ("spec_decode.py: acceptance: 31/50\n", ("an engine", None, 50, 31, ())),
    "one name before two counts": ("Accepted draft tokens: 120 / 150\nmtp accept_rate=57.0% accepted=171/300\n",
                                   ("an engine", None, 450, 291, ())),
    "another engine": ("MTP ACTIVE (draft=3)\nspeculation: 1.60 tokens/forward | MTP acceptance 20% (3/15)\n",
                       ("an engine", None, 15, 3, ())),
    "oMLX": ("INFO MTP[3] accept=117/387 (30.2%) depth[d1=90/129,d2=20/90,d3=7/20]\n",
             ("oMLX", 129, 387, 117, (90, 20, 7))),
    "vLLM 0.8.0": ("INFO [metrics.py:50] Speculative metrics: Draft acceptance rate: 0.500, Number of accepted tokens: "
                   "33, Number of draft tokens: 66, \n", ("vLLM", None, 66, 33, ())),
    "ATOM": ("".join(
        f"[MTP Stats{name}] Average toks/fwd: 1.80, Accepted/Total Draft tokens: {4 * rounds // 5}/{2 * rounds}, Acceptance "
        "rate: 40.00%, Accepted tokens distribution: {0: '40.00%', 1: '40.00%', 2: '20.00%'}\n"
        for name, rounds in ((" Interval", 50), ("         ", 50), (" Interval", 50), ("         ", 100), (" Interval", 50))),
        ("ATOM", 100, 200, 80, (60, 20))),
    "oMLX, a finished request": ("MTP[0] finish=length tokens=150 cycles=148 accept=0/148 (0.0%)\n  emits[init=2]\n",
                                ("oMLX", 148, 148, 0, (0,))),
    "oMLX, several drafts a cycle": ("MTP[0] finish=length tokens=10 cycles=2 tok/cycle=5.00 accept=6/8 (75.0%)\n",
                                     ("oMLX", 2, 8, 6, ())),
    "oMLX, cycles without a draft": ("MTP[0] cycles=60 accept=100/148 (67.6%) depth[d1=45/50 d2=35/49 d3=20/49]\n",
                                     ("oMLX", 50, 148, 100, (45, 35, 20))),
    "mlxcel's diagnostics": ("INFO MTP round-loop diagnostics block_size=6 adaptive=true rounds=44 proposed_tokens=130\n"
                             "  acceptance_rate=0.5846153846153846\n  emitted_per_verify=2.70454545\n",
                             ("mlxcel", 44, 130, 76, ())),
    "mlc-llm's metrics": (json.dumps({"spec_decode": {"draft_count": [99, 99, 90], "accept_count": [99, 80, 50]}}),
                          ("mlc-llm", 99, 189, 130, (80, 50))),
    "another engine, in words": ("[mtp] accepted 312 of 400 drafts\n", ("an engine", None, 400, 312, ())),
    "a draft layer": ("draft layer 1: 31 accepted, 19 rejected\n", ("an engine", None, 50, 31, ())),
    "vllm-mlx's status": (json.dumps({"mtp": {"effective_draft_tokens": 1, "attempts": 400, "accepted": 310}}),
                          ("vllm-mlx", 400, 400, 310, (310,))),
    "vllm-mlx's answer": (json.dumps({"metadata": {"mtp_drafts": 150, "mtp_accepted": 120}}), ("vllm-mlx", None, 150, 120, ())),
    "vLLM, cut before the last position": (VLLM.split(", 0.788")[0], ("vLLM", 99, 198, 169, (91, 78))),
    "vMLX": ("".join(
        f"[NativeMTP] depth=3{active} verifyCalls=13 outputTokens=32 acceptedByDepth={by} bonus=4 rejected=9 "
        "prefixCommit=13 avgCommittedPerVerify=2.46 avgAcceptP=0.000\n"
        for active, by in ((" activeDepth=3", "0:4,1:3,2:2,3:4"), ("", "none"))), ("vMLX", 13, 39, 19, (9, 6, 4))),
    "oMLX's stats of a request": (
        "2026-09-13 09:12:11,000 - omlx.scheduler - INFO - [-] - vlm_mtp stats: request=2da900bb finish=stop rounds=500 "
        "accepted=707/1000 (70.7%)\n   tokens_per_round=2.41 emitted=1206 block_size=3\n", ("oMLX", 500, 1000, 707, ())),
    "trtllm-bench": ("-- Acceptance Length Details ----\n\n[AL] MINIMUM: 1.90\n[AL] MAXIMUM: 3.10\n[AL] AVERAGE: 2.55\n",
                     ("TensorRT-LLM", None, None, None, ())),
    "trtllm-bench's report": (json.dumps({"decoding_stats": {"mode": "MTP", "acceptance_length_percentiles":
                              {"p50": 2.5, "average": 2.55}}}), ("TensorRT-LLM", None, None, None, ())),
    "FastDeploy": (json.dumps({"choices": [{"speculate_metrics": {
        "accepted_tokens": 162, "rejected_tokens": 154, "accept_ratio": 0.51, "average_accept_length": 2.05,
        "accepted_tokens_per_head": [79, 51, 23, 9], "accept_ratio_per_head": [0.65, 0.45, 0.39]}}]}),
        ("FastDeploy", 79, 237, 83, (51, 23, 9))),
    "vLLM, cut before the first figures": (VLLM.partition("Mean acceptance ")[2], ("vLLM", 99, 198, 169, (91, 78))),
    "vLLM, two figures of a line": ("- Mean acceptance length: 2.10 tokens per step\n- Per-position acceptance rate: 71%, "
                                    "39%\n", ("vLLM", None, None, None, ())),
    "LMDeploy": (
        "[2026-08-21 10:11:12 DP0] Avg thr (in/out): 10.0 / 55.1 tokens/s, KV cache: 1.2%, SpecDecoding metrics: Draft "
        "acceptance rate: 56.67%, Mean acceptance length: 2.70, Accepted: 170 tokens, Drafted: 300 tokens, Per-position "
        "acceptance rate: 0.800, 0.600, 0.300\n", ("LMDeploy", 100, 300, 170, (80, 60, 30))),
    "LMDeploy's statistics": (
        "SpeculativeDecodingStats(num_spec_tokens=3, num_drafts=100, num_draft_tokens=300, num_accepted_tokens=170, "
        "draft_acceptance_rate=56.67%, mean_acceptance_length=2.70, per_position_acceptance_rate=0.800, 0.600, 0.300)\n",
        ("LMDeploy", 100, 300, 170, (80, 60, 30))),
    "SGLang's send_one": (
        "+-------------+--------+------------+-----------------+\n| Latency (s) | Tokens | Acc Length | Speed (token/s) |\n"
        "+-------------+--------+------------+-----------------+\n|    3.749    |  512   |   2.000    |     136.74      |\n",
        ("SGLang", 256, None, 255, ())),
    "a trainer's rollouts": ("step:12 - actor/entropy:0.31 - rollout/spec_accept_rate:0.46 - rollout/spec_accept_length:2.38\n"
                             "perf 1: {'rollout/spec_accept_rate': 0.45, 'rollout/spec_accept_length': 2.35}\n",
                             ("a trainer's rollouts", None, None, None, ())),
    "a trainer's steps in JSON": ("\n".join(json.dumps({"step": 1, "data": {"rollout/spec_accept_length": length}}) for length in (None, 2.38)),
                                  ("a trainer's rollouts", None, None, None, ())),
    "mlx-vlm's rows": ("| `Qwen3.5-4B-4bit` | 4 | 1200 | 2.20 accepted/round, 73.5% drafted, avg draft 3.00 | 1.32x |\n",
                       ("mlx-vlm", None, None, None, ())),
    "rounds of a fork of llama.cpp": ("\n".join(
        json.dumps({"step": step, "seq": 0, "n_draft": 3, "n_accepted": accepted, "pmin_drop": 0, "pos": [{"i": 0}]})
        for step, accepted in enumerate((2, 3, 0))), ("llama.cpp", 3, 9, 5, (2, 2, 1))),
    "SGLang's counts, of which a trainer found two": (json.dumps({
        "spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 100, "completion_token_num": 190}),
        ("SGLang", 100, None, 89, ())),
    "drafts and tokens": ("drafts 266/302, tokens 696/906\n", ("an engine", 302, 906, 696, ())),
    "a line for each position": ("position 1: 133/191\nposition 2: 80/191\n", ("an engine", 191, 382, 213, (133, 80))),
    "a line for each position that was reached": ("pos\nposition 0: 133/191\nposition 1: 80/133\n",
                                                  ("an engine", 191, None, 213, (133, 80))),
    "Ollama, one depth": (
        'time=2026-11-03T10:12:47.101+01:00 level=INFO source=speculate_stats.go:64 msg="speculative decode stats" '
        "iterations=90 drafted=270 accepted=153 acceptance=0.57 avg_draft=3.00 max_draft=3 avg_accepted=1.70 "
        'depth_over_time="3.0/3 3.0/3"\n', ("Ollama", 90, 270, 153, ())),
    "Ollama, before 0.34": (
        'level=INFO source=speculate.go:230 msg="speculative decode stats" drafted=270 accepted=153 acceptance=0.5666 '
        "iterations=90 avg_draft=3 avg_accepted=1.7 mismatches=60 all_accepted=30 max_draft=3 draft_schedule=constant\n",
        ("Ollama", 90, 270, 153, ())),
    "Ollama, an adapted depth": (
        'msg="speculative decode stats" iterations=90 drafted=120 accepted=80 acceptance=0.67 avg_draft=1.33 max_draft=4 '
        'avg_accepted=0.89 depth_over_time="0.0/0 2.1/4"\n', ("Ollama", 90, 120, 80, ())),
    "mlxcel": ("[MTP acceptance: rounds=80 proposed=240 accepted=150 mean accepted length=2.875 rate=0.625 block=4..4 "
               "probe_rounds=0]\n", ("mlxcel", 80, 240, 150, ())),
    "LightLLM": (
        "INFO 11-03 10:00:00 [manager.py:540] lightllm_req_id:8 first_token_cost:120.1ms total_cost_time:3000.2ms,"
        "out_token_counter:2563 mean_per_token_cost_time: 11.2ms mtp_accepted_token_num:1563 mtp_total_verify_steps:1000 "
        "mtp_total_verify_tokens:3000 mtp_avg_token_per_step:2.56 mtp_avg_accepted_tokens_per_step:1.56\n",
        ("LightLLM", 1000, None, 1563, ())),
    "LightLLM, before it printed counts": (
        "lightllm_req_id:8 total_cost_time:3000.2ms,out_token_counter:256 prompt_cache_ratio:0.0 "
        "mtp_avg_token_per_step:2.5600000000000001 \n", ("LightLLM", 100, None, 156, ())),
    "SkyRL's steps": (
        "INFO | step:12 {'vllm/train/draft_num_draft_tokens': 200.0, 'vllm/train/draft_num_accepted_tokens': 150.0, "
        "'vllm/train/draft_acceptance_rate': 0.75, 'vllm/train/draft_mean_acceptance_length': 2.5, "
        "'vllm/train/draft_acceptance_rate_pos_1': 0.9, 'vllm/train/draft_acceptance_rate_pos_2': 0.6}\n",
        ("a trainer's rollouts", 100, 200, 150, (90, 60))),
    "SkyRL's steps in JSON": (json.dumps({
        "vllm/draft_num_draft_tokens": 200, "vllm/draft_num_accepted_tokens": 150, "policy/loss": 0.1,
        "vllm/draft_acceptance_rate_pos_1": 0.9, "vllm/draft_acceptance_rate_pos_2": 0.6}),
        ("a trainer's rollouts", 100, 200, 150, (90, 60))),
    "mlx-swift-lm": (json.dumps({"generationTokenCount": 64, "proposedDraftTokens": 120, "acceptedDraftTokens": 44}),
                     ("mlx-swift-lm", None, 120, 44, ())),
    "tabbyAPI": (json.dumps({"usage": {"completion_tokens": 150, "completion_tokens_details": {
        "accepted_prediction_tokens": 88, "rejected_prediction_tokens": 31}}}), ("tabbyAPI", None, 119, 88, ())),
    "timings beside a usage of zeros": (json.dumps({
        "usage": {"completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}},
        "timings": {"draft_n": 78, "draft_n_accepted": 60, "predicted_n": 100}}), ("llama.cpp", 39, 78, 60, ())),
    "two counts with a tag each": ("[MTP] Total drafted tokens: 300\n[MTP] Total accepted tokens: 180\n",
                                   ("an engine", None, 300, 180, ())),
    "two counts in a table": ("Draft tokens proposed:                     3086\nDraft tokens accepted:                 "
                              "    1784\n", ("an engine", None, 3086, 1784, ())),
    "a rate, then two counts": ("[mtp] acceptance rate = 0.613 (368/600 draft tokens)\n", ("an engine", None, 600, 368, ())),
    "counts with commas": ("MTP acceptance: 2,723 of 4,338 draft tokens (63%).\n", ("an engine", None, 4338, 2723, ())),
    "proposed tokens": (json.dumps({"mtp_proposed_tokens": 10000, "mtp_accepted_tokens": 6200}),
                        ("an engine", None, 10000, 6200, ())),
    "vLLM, shares alone": ("Per-position acceptance rate: 0.844, 0.599, 0.385, 0.271\nAvg Draft acceptance rate: 52.5%\n",
                           ("vLLM", None, None, None, ())),
    "vLLM, cut at both ends": (VLLM[60:220], ("vLLM", 99, 198, 169, (91, 78))),
    "a bench in Markdown": ("| Metric | Value |\n|---|---|\n| Acceptance length | 2.50 |\n| Drafts | 100 |\n| Draft tokens | 300 |\n"
                            "| Accepted tokens | 150 |\n", ("vLLM", 100, 300, 150, ())),
    "a bench in HTML": ("".join(
        f"<tr><td>{name}:</td><td>{value}</td></tr>" for name, value in (
            ("Acceptance length", 2.5), ("Drafts", 100), ("Draft tokens", 300), ("Accepted tokens", 150))),
        ("vLLM", 100, 300, 150, ())),
    "a bench in bullets": ("- **Acceptance length:** 2.50\n- **Drafts:** 100\n- **Draft tokens:** `300`\n- Accepted tokens: 150\n",
                           ("vLLM", 100, 300, 150, ())),
    "a script under the names of metrics": (json.dumps({
        "spec_decode_num_drafts": 100, "spec_decode_num_draft_tokens": 300, "spec_decode_num_accepted_tokens": 150,
        "spec_decode_acceptance_rate_per_pos": [0.8, 0.5, 0.2]}), ("vLLM", 100, 300, 150, (80, 50, 20))),
    "an object of Python": ("SpecStats(num_drafts=100, num_draft_tokens=300, num_accepted_tokens=150, accepted_per_pos=[80, 50, 20])\n",
                            ("an engine", 100, 300, 150, (80, 50, 20))),
    "a setting for each line": ("vllm.spec_decode.num_drafts.count: 100\nvllm.spec_decode.num_draft_tokens.count: 300\n"
                                "vllm.spec_decode.num_accepted_tokens.count: 150\n", ("an engine", 100, 300, 150, ())),
    "JSON in a field of JSON": (json.dumps({"log": json.dumps({"timings": {"predicted_n": 100, "draft_n": 78, "draft_n_accepted": 60}})}),
                                ("llama.cpp", 39, 78, 60, ())),
    "mistral.rs": ("2026-10-01T10:00:00Z  INFO mistralrs_core::engine::logger: Throughput (T/s) 120.53, Prefix cache hitrate "
                   "0.00%, MTP accept 61.3% (len 2.84), 1 running, 0 waiting\n", ("mistral.rs", None, None, None, ())),
    "mlx-serve": ("  [spec-stats] mode=mtp attempts=105 accepts=150 avg_per_round=1.43 per_draft_pct=71.4% depth=2 drafted=210 "
                  "ext_rounds=0 runtime_disabled=false\n", ("mlx-serve", 105, 210, 150, ())),
    "mlx-serve, at a prompt": ("Decode (mtp): 3200ms (256 tokens, 80.000 tok/s; mtp accept=75/105 attempts, avg 0.71 "
                               "tokens/attempt)\n", ("mlx-serve", 105, None, 75, ())),
    "mlx-vlm, a text": ("Speculative decoding: 2.84 accepted tokens/round (1.84 accepted drafts/round, 61.3% of drafted, avg "
                        "draft 3.00) over 200 rounds\n", ("mlx-vlm", 200, 600, 368, ())),
    "mlx-vlm, a text without draft lengths": ("Speculative decoding: 2.84 accepted tokens over 200 rounds\n",
                                              ("mlx-vlm", 200, None, 368, ())),
    "tabbyAPI's log": ("INFO:  Metrics (ID: 1f2e): 512 tokens generated in 10.2 seconds (Queue: 0.0 s, Process: 0 cached tokens "
                       "and 120 new tokens at 900.1 T/s, Generate: 51.2 T/s, Context: 120 tokens, Draft: 310 / 480 tokens accepted "
                       "(64.58%)) \n", ("an engine", None, 480, 310, ())),
    "exllamav3": (" - Generate: 512 tokens at 51.20 t/s - Draft: 1,310 / 1,480 accepted (88.51%)\n",
                  ("an engine", None, 1480, 1310, ())),
    "draft tokens first": ("draft: 600 tokens, 368 accepted (61.33%)\n", ("an engine", None, 600, 368, ())),
    "a report": ("Mean Acceptance Length: 2.84 tokens\nTotal Accepted Tokens: 368\nTotal Draft Tokens: 600\n",
                 ("an engine", None, 600, 368, ())),
    "signs of Chinese text": (VLLM.replace(": ", "\uff1a").replace(", ", "\uff0c"), ("vLLM", 99, 198, 169, (91, 78))),
    "a test of SGLang": ("[Oracle] avg_spec_accept_length = 2.34\n", ("SGLang", None, None, None, ())),
    "a stream": ('data: {"choices": []}\n\ndata: {"choices": [], "timings": {"draft_n": 78, "draft_n_accepted": 60, '
                 '"predicted_n": 100}}\n\ndata: [DONE]\n', ("llama.cpp", 39, 78, 60, ())),
}  # fmt: skip


@loop("name", TEXTS)
def test_formats(name):
    text, expected = TEXTS[name]
    counters = read(text)
    assert summary(counters) == expected
    assert counters.source


@loop("first", [0, 1])
def test_tables_by_position_that_follow_each_other(first, monkeypatch):
    """With a heading, without, and where the text is read in pieces; a row that is missing is refused."""
    one, other = (
        "".join(f"Position {first + index}: {count}/100\n" for index, count in enumerate(counts))
        for counts in ((80, 60), (70, 50))
    )
    for text in (one + other, f"Run A\n{one}{other}", f"{one}Run B\n{other}", (one + other).replace("\n", "\n\n")):
        assert summary(read(text)) == ("an engine", 200, 400, 260, (150, 110))
    monkeypatch.setattr(log_reader, "_CHUNK", 2**14)
    for shift in range(0, len(one), 4):
        counters = log_reader.read_log(io.StringIO("-" * shift + "\n" + (one + other) * 1000), general=True).counters
        assert (counters.num_drafts, counters.per_position) == (200_000, (150_000, 110_000))
    with pytest.raises(EngineError, match="a table by position has the positions"):
        read(f"{one}{other}Position {first + 3}: 20/100\n")


@loop("key", ["spec_accept_length", "rollout/spec_accept_length", "spec_accept_length/mean"])
@loop("write", [json.dumps, str, lambda step: " - ".join(f"{key}:{value}" for key, value in step.items())])
def test_rollouts_of_trainers(key, write):
    """By any of the names, as JSON, as a Python dict and as words; a step of 0.0 is one that drafted nothing."""
    steps = [write({"step": step, key: length, f"{key.removesuffix('/mean')}/max": 4.0})
             for step, length in enumerate((2.0, 0.0, 3.0))]  # fmt: skip
    assert (read("\n".join(steps)).length, read("\n".join(steps)).notes) == (2.5, (STEPS_WITHOUT_DRAFTS,))
    assert read(steps[1]).has_drafts is False


def test_drafts_whose_acceptance_is_not_shown_are_refused():
    for rest in ({}, {"mtp_accepted": None}):
        with pytest.raises(EngineError, match="mtp_accepted = None; expected a whole number"):
            read(json.dumps({"metadata": {"mtp_drafts": 150} | rest}))
        assert read(json.dumps({"metadata": {"mtp_drafts": 0} | rest})).accepted == 0


def test_several_drafters_of_llama_cpp():
    """Its rounds and requests name no drafter: the head's own statistics are read where they are, else a note says so."""
    flags = "llama-server --spec-type draft-mtp,ngram-mod\n"
    rounds = "slot update_slots: id 0 | task 1 | accepted 64/64 draft tokens\n" * 9
    own = STATISTICS.replace("3297", "99").replace("2091", "60")
    assert "ngram-mod" in read(flags + rounds).notes[-1]
    assert (read(flags + rounds + own).accepted, read(flags + rounds + own).notes) == (60, read(own).notes)
    assert not any("drafters" in note for note in read(rounds + flags.replace(",ngram-mod", "")).notes)


@loop("drafted", [40, 400])
def test_intervals_without_an_accepted_draft_among_others(drafted):
    """Of many draft tokens: what is different in these decides, as beyond a drafter's own limit of the context."""
    line = (
        VLLM.replace("169", "0")
        .replace("198", str(drafted))
        .replace("2.71", "1.00")
        .replace("0.919, 0.788", "0.0, 0.0")
    )
    notes = [note for note in read(f"{VLLM}\n{line}\n{line}\n").notes if "accepted no draft" in note]
    assert notes == (["2 of 3 entries accepted no draft, the others 85%: compare their requests (length of context, "
                      "sampling, time); a wrong head accepts few in all"] if drafted > 50 else [])  # fmt: skip
    assert read(f"{line}\n{line}\n").notes == read(line).notes


def test_copied_drafts_are_noted():
    """`nextn serve --copy` counts them apart; without a copy there is nothing to say."""
    drafts = METRICS["vLLM 0.30"][0].replace("vllm:", "nextn:")
    some, none, more = (read(f"{drafts}nextn:copy_num_drafts_total {count}\n") for count in (7, 0, 9))
    assert (some.notes, none.notes) == ((f"7 {COPIED}",), ())
    assert [each.minus(some).notes for each in (some, more)] == [(), (f"9 {COPIED}",)]


def test_notes_say_what_is_missing():
    assert read(TEXTS["bench serve, cut more"][0]).notes == (ROUNDED, SOME_POSITIONS)
    assert read(TEXTS["timings with bonus tokens"][0]).notes == (BONUS_INCLUDED,)
    rising = "MTP total: 81 accepted / 99 drafted\n"
    assert read(rising + rising.replace("81", "90").replace("99", "130")).notes == (f"2 {RUNS}", RISING)
    assert read(rising + rising).notes == (f"2 {RUNS}",)
    assert read(rising).notes == ()
    counts = ((90, 99), (40, 50), (50, 60), (55, 70))  # the second is less: these are of intervals
    text = "".join(f"MTP total: {kept} accepted / {drafted} drafted\n" for kept, drafted in counts)
    assert read(text).notes == (f"4 {RUNS}",)
    old, counted = (TEXTS[f"LightLLM{more}"][0] for more in (", before it printed counts", ""))
    assert (read(old.replace("2.56", "1.0")).notes, read(counted).notes) == ((NO_MTP,), ())
    assert RISING not in read(f"{VLLM}\n{VLLM.replace('169', '269').replace('198', '298')}\n").notes
    for length, notes in (("1.0", (RENAMED,)), ("2.0", ())):
        assert read(f"step:1 - rollout/spec_accept_length:{length}\n").notes == notes
    both = read(f"{BENCH}\n{VLLM}\n")
    assert both.num_drafts == 6393
    assert any("vLLM's SpecDecoding metrics" in note and "not added" in note for note in both.notes)


METRICS = {
    "vLLM 0.30": ('# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.\n'
                  'vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 100.0\n'
                  'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 200.0\n'
                  'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 120.0\n'
                  'vllm:spec_decode_num_rejected_tokens_total{engine="0",model_name="a"} 80.0\n'
                  'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 80.0\n'
                  'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 40.0\n',
                  ("vLLM", 100, 200, 120, (80, 40))),
    "through OpenTelemetry": ("vllm_spec_decode_num_drafts_total 100\nvllm_spec_decode_num_draft_tokens_total 200\n"
                              "vllm_spec_decode_num_accepted_tokens_total 120\n", ("vLLM", 100, 200, 120, ())),
    "another engine's": ("# TYPE tensorfold:spec_decode_num_drafts_total counter\n"
                         "tensorfold:spec_decode_num_drafts_total 10\ntensorfold:spec_decode_num_draft_tokens_total 30\n"
                         "tensorfold:spec_decode_num_accepted_tokens_total 12\n", ("tensorfold", 10, 30, 12, ())),
    "TensorRT-LLM": ('trtllm_spec_decode_num_draft_tokens_total{engine_type="unified",model_name="m"} 300.0\n'
                     'trtllm_spec_decode_num_accepted_tokens_total{engine_type="unified",model_name="m"} 150.0\n'
                     'trtllm_spec_decode_acceptance_length{engine_type="unified",model_name="m"} 2.5\n',
                     ("TensorRT-LLM", None, 300, 150, ())),
    "ATOM": ('atom:mtp_draft_tokens_total 30\natom:mtp_accepted_tokens_total 12\n'
             'atom:mtp_decode_steps_total{accepted_tokens="0"} 3\natom:mtp_decode_steps_total{accepted_tokens="1"} 2\n'
             'atom:mtp_decode_steps_total{accepted_tokens="2"} 5\n', ("ATOM", 10, 30, 12, (7, 5))),
    "text-generation-inference": ('# TYPE tgi_request_skipped_tokens histogram\n'
                                  'tgi_request_skipped_tokens_bucket{le="0"} 40\ntgi_request_skipped_tokens_sum 90\n'
                                  'tgi_request_skipped_tokens_count 100\n',
                                  ("text-generation-inference", 100, None, 90, ())),
    "Ray's": ('ray_vllm_spec_decode_num_drafts_total{WorkerId="a"} 100\nray_vllm_spec_decode_num_draft_tokens_total'
              '{WorkerId="a"} 200\nray_vllm_spec_decode_num_accepted_tokens_total{WorkerId="a"} 120\n',
              ("vLLM", 100, 200, 120, ())),
    "a column of Grafana's export for each series": (
        '"Time","{__name__=""vllm:spec_decode_num_drafts_total"", engine=""0""}",'
        '"{__name__=""vllm:spec_decode_num_draft_tokens_total"", engine=""0""}",'
        '"{__name__=""vllm:spec_decode_num_accepted_tokens_total"", engine=""0""}"\n'
        "1790841600000,60,120,70\n1790841660000,100,200,120\n1790841720000,,,\n", ("vLLM", 100, 200, 120, ())),
    "the same with bare names and another separator": (
        "Time;vllm:spec_decode_num_drafts_total;vllm:spec_decode_num_draft_tokens_total;"
        "vllm:spec_decode_num_accepted_tokens_total\r\n2026-10-01 10:00:00;100;200;120\r\n", ("vLLM", 100, 200, 120, ())),
    "a row for each value": ('"Time","Metric","Value"\n' + "".join(
        f'{minute},"vllm:spec_decode_num_{name}_total{{engine=""{engine}""}}",{minute * count}\n'
        for minute in (1, 2) for engine in (0, 1) for name, count in (("drafts", 25), ("draft_tokens", 50), ("accepted_tokens", 30))),
        ("vLLM", 100, 200, 120, ())),
    "copied from Prometheus' page": ('    vllm:spec_decode_num_drafts_total{engine="0"} | 100\n'
                                     '    vllm:spec_decode_num_draft_tokens_total{engine="0"} | 200\n'
                                     '    vllm:spec_decode_num_accepted_tokens_total{engine="0"} | 120\n',
                                     ("vLLM", 100, 200, 120, ())),
    "Rapid-MLX, whose attempts are draft tokens": (
        'rapid_mlx_spec_decode_attempts_total{method="mtp"} 200\nrapid_mlx_spec_decode_accepts_total{method="mtp"} 150\n',
        ("Rapid-MLX", None, 200, 150, ())),
    "xLLM's": ("speculative_num_drafts_total 100\nspeculative_num_draft_tokens_total 200\nspeculative_num_accepted_tokens_total "
               '120\nspeculative_num_committed_tokens_total 220\nspeculative_num_accepted_tokens_per_pos{position="0"} 80\n'
               'speculative_num_accepted_tokens_per_pos{position="1"} 40\n', ("an engine", 100, 200, 120, (80, 40))),
    "xLLM's /vars": ("server_request_in_total : 12\nspeculative_num_accepted_tokens_total : 120\n"
                     "speculative_num_draft_tokens_total : 200\n", ("an engine", None, 200, 120, ())),
    "mistral.rs'": ("mistralrs_speculative_drafts_total 100\nmistralrs_speculative_draft_tokens_proposed_total 200\n"
                    "mistralrs_speculative_draft_tokens_accepted_total 120\n", ("mistralrs", 100, 200, 120, ())),
    "words in another order": ('gateway:draft_tokens_total 7\nhalogen:draft_tokens_total{gpu="0"} 300\nhalogen:draft_tokens_total{gpu="1"} 34\n'
                               "halogen:draft_tokens_accepted_total 282\n", ("halogen", None, 334, 282, ())),
    "words in another order, of llama.cpp": ("llamacpp:draft_tokens_total 334\nllamacpp:draft_tokens_accepted_total 282\n",
                                             ("llamacpp", None, 334, 282, ())),
    "another label of positions": ("".join(
        f"llamacpp:spec_decode_num_{name}_total{label} {value}\n" for name, label, value in (
            ("drafts", "", 100), ("draft_tokens", "", 200), ("accepted_tokens", "", 120),
            ("accepted_tokens_per_pos", '{pos="0"}', 80), ("accepted_tokens_per_pos", '{pos="1"}', 40))),
        ("llama.cpp", 100, 200, 120, (80, 40))),
    "a fork of llama.cpp": ("llamacpp:n_drafted_total 400\nllamacpp:n_drafted_accepted_total 260\n"
                            "llamacpp:tokens_predicted_total 500\n", ("llama.cpp", None, 400, 260, ())),
}  # fmt: skip


PRINTED = (
    "[Counter(name='vllm:spec_decode_num_drafts', labels={'model_name': 'm', 'engine': '0'}, value=100), "
    "Counter(name='vllm:spec_decode_num_draft_tokens', labels={'model_name': 'm', 'engine': '0'}, value=200), "
    "Counter(name='vllm:spec_decode_num_accepted_tokens', labels={'model_name': 'm', 'engine': '0'}, value=120), "
    "Vector(name='vllm:spec_decode_num_accepted_tokens_per_pos', labels={'model_name': 'm', 'engine': '0'}, values=[80, 40])]"
)


def test_metrics_as_people_copy_them():
    """Printed by LLM.get_metrics(), by `grep -n`, with headers of HTTP, with exemplars and times of creation."""
    text, expected = METRICS["vLLM 0.30"]
    numbered = "".join(f"{number}:{line}\n" for number, line in enumerate(text.splitlines(), 120))
    exemplars = text.replace(".0\n", '.0 # {trace_id="a"} 1.0 1.7e9\n')
    created = text + 'vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="a"} 1.7e+09\n# EOF\n'
    for pasted in (PRINTED, PRINTED.replace("), ", ")\n"), numbered, exemplars, created,
                   f"< HTTP/1.1 200 OK\n< accept: */*\n{text}"):  # fmt: skip
        assert summary(read(pasted)) == expected
    with pytest.raises(EngineError, match="no model_name 'b'"):
        read(PRINTED, model="b")


def test_readings_of_metrics_one_after_another():
    """Counters include what an earlier reading of the same server has; those of several servers are refused."""
    text, expected = METRICS["vLLM 0.30"]
    earlier = text.replace(" 100.0", " 50.0").replace(" 200.0", " 100.0").replace(" 120.0", " 60.0")
    earlier = earlier.replace(" 80.0", " 40.0").replace(" 40.0\n", " 20.0\n")
    others = [f"vllm:spec_decode_mean_accepted_tokens 0.{tenth}\nvllm:spec_decode_num_drafts_created 1.{tenth}e9\n"
              for tenth in (6, 5)]  # of an interval, and a time: no counters  # fmt: skip
    found = read(f"{earlier}{others[0]}{text}{others[1]}")
    assert (summary(found), found.notes) == (expected, (REPEATED,))
    assert REPEATED not in read(f"{text}vllm:num_requests_running 2\nvllm:num_requests_running 1\n").notes
    with pytest.raises(EngineError, match="is 100, then 50: readings of several servers"):
        read(f"{text}\n{earlier}")


def test_series_in_json_over_time():
    """Prometheus' answer for a range, Grafana's frames, promtool's text: the last value."""
    counts = {"drafts": (50, 100), "draft_tokens": (100, 200), "accepted_tokens": (70, 120)}
    names = {f"vllm:spec_decode_num_{name}_total": values for name, values in counts.items()}
    matrix = [{"metric": {"__name__": name, "engine": "0"}, "values": [[1.0, str(first)], [2.0, str(last)]]}
              for name, (first, last) in names.items()]  # fmt: skip
    frames = [{"schema": {"fields": [{"name": "Time"}, {"name": "Value", "labels": {"__name__": name, "engine": "0"}}]},
               "data": {"values": [[1, 2, 3], [*values, None]]}} for name, values in names.items()]  # fmt: skip
    lines = "".join(f'{name}{{engine="0"}} => {last} @[1790841600.123]\n' for name, (_, last) in names.items())
    named = [{"schema": {"fields": [{"name": "Empty"}, {"name": name}]}, "data": {"values": [[None], [*values, None]]}}
             for name, values in names.items()]  # fmt: skip
    matrix.append({"metric": {}, "values": [[1.0, "7"]]})  # of a sum
    for text in (json.dumps({"data": {"result": matrix}}), json.dumps({"results": {"A": {"frames": frames}}}),
                 json.dumps({"results": {"A": {"frames": named}}}), lines):  # fmt: skip
        assert summary(read(text)) == ("vLLM", 100, 200, 120, ())


@loop(
    "part",
    [
        lambda timings, is_last: {"id": "chatcmpl-1", "choices": [{"delta": {}}], "timings": timings},
        lambda timings, is_last: {"content": "a", "stop": is_last, "timings": timings},
        lambda timings, is_last: {
            "text": "a",
            "meta_info": {
                "id": "r",
                "spec_verify_ct": 39,
                "spec_accept_token_num": 60,
                "spec_draft_token_num": timings["draft_n"],
            },
        },
    ],
)
def test_later_parts_of_a_stream_include_the_earlier_ones(part):
    steps = [(10, 6, 5), (50, 39, 30), (100, 78, 60)]
    parts = [part(dict(zip(("predicted_n", "draft_n", "draft_n_accepted"), step, strict=True)), step == steps[-1])
             for step in steps]  # fmt: skip
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in parts) + "data: [DONE]\n"
    assert summary(read(stream))[1:4] == (39, 78, 60)
    other = json.dumps(parts[-1]).replace("chatcmpl-1", "chatcmpl-2").replace('"r"', '"s"')
    assert read(f"{json.dumps(parts[-1])}\n{other}\n").accepted == 120
    assert read(stream.replace("data: [DONE]", "") * 2).accepted == (120 if "stop" in other else 60)


@loop(
    ("text", "engine", "length", "k", "note"),
    [
        ('lightllm_request_mtp_avg_token_per_step_bucket{le="1.0"} 0\nlightllm_request_mtp_avg_token_per_step_sum 51.2\n'
         "lightllm_request_mtp_avg_token_per_step_count 20\n", "LightLLM", 2.56, None, OF_REQUESTS),
        ("".join(f'maxserve_spec_decode_acceptance_rate_per_position_percent_{part}{{position="{place}",model="{model}"}} {value}\n'
                 for model, totals in (("a", (900, 700)), ("b", (700, 300))) for place, total in enumerate(totals)
                 for part, value in (("sum", total), ("count", 10))), "MAX", 2.3, 2, OF_BATCHES),
    ],
)  # fmt: skip
def test_histograms_of_lengths_and_shares(text, engine, length, k, note):
    counters = read(text)
    assert (counters.engine, round(counters.length, 9), counters.k, counters.notes) == (engine, length, k, (note,))


NAMED = {
    "a script": {"position_ids": [0, 1, 2], "drafts": 100, "draft_tokens": 300, "accepted_tokens": 150, "accepted_per_pos": [80, 50, 20]},
    "shares by position": {"k": 3, "draft_iterations": 100, "draft_tokens": 300, "accepted_tokens": 150,
                           "acceptance_rate_by_position": [0.8, 0.5, 0.2]},
    "NeMo-RL's step": {"train/loss": 0.1, "vllm/spec_num_drafts": 100.0, "vllm/spec_num_draft_tokens": 300.0,
                       "vllm/spec_num_accepted_tokens": 150.0, "vllm/target_acceptance_rate_pos_0": 0.9, "vllm/spec_acceptance_rate-pos-1": 0.8,
                       "vllm/spec_acceptance_rate-pos-2": 0.5, "vllm/spec_acceptance_rate-pos-3": 0.2},
    "RTP-LLM's aux_info": {"aux_info": {"iter_count": 101, "speculative_draft_rounds": 100,
                                        "speculative_accepted_tokens_per_pos": [80, 50, 20]}},
    "of several drafters": {"mtp_rounds": 100, "mtp_draft_tokens": 300, "mtp_draft_tokens_accepted": 150, "draft_tokens": 400,
                            "draft_tokens_accepted": 240, "mtp_accepted_per_pos": [80, 50, 20]},
    "positions by number": {"speculative_decoding": {"rounds": 100, "accepted_tokens": 150, "acceptance_rate_per_position": {
        "0": 0.8, "1": 0.5, "2": 0.2}}},
    "rejected ones": {"mtp": {"verifier_runs": 100, "accepted_tokens": 150, "rejected_tokens": 150,
                              "accepted_per_position": [80, 50, 20]}},
}  # fmt: skip


@loop("name", NAMED)
@loop("write", [json.dumps, str, lambda record: f"$ curl -s localhost | jq\n{json.dumps(record, indent=1)}\nDone\n",
                lambda record: f"INFO stats {record!s} at 10:00\n"])  # fmt: skip
def test_counts_by_name(name, write):
    """Of JSON and of Python, alone and inside other text."""
    counters = read(write(NAMED[name]))
    assert (counters.engine, counters.num_drafts, counters.accepted) == ("an engine", 100, 150)
    assert counters.draft_tokens in (300, None)
    assert (counters.per_position, counters.k) == ((80, 50, 20), 3)


def test_counts_by_name_of_several_objects():
    """Items of a list are requests, and are added; a total beside them is not added to them."""
    requests = [{"draft_n_accepted": 30, "drafted": 40}, {"draft_n_accepted": 9, "drafted": 40}]
    total = {"draft_n_accepted": 39, "drafted": 80}
    for document in (requests, {"requests": requests}, {"requests": requests, "all": total}):
        assert summary(read(json.dumps(document))) == ("an engine", None, 80, 39, ())
    lines = "\n".join(json.dumps({"tokens": {"draft_acc_tokens": 30, "draft_tokens": 40}}) for _ in range(2))
    assert summary(read(lines)) == ("an engine", None, 80, 60, ())
    with pytest.raises(EngineError, match="of 2 runs, parts or settings"):
        read(json.dumps([each | {"model": str(place)} for place, each in enumerate(requests)]))
    for other in ({"draft_n_accepted": 39, "drafted": 70}, {"draft_n_accepted": 38, "drafted": 80}):
        with pytest.raises(EngineError, match="of 3 runs, parts or settings"):
            read(json.dumps({"requests": requests, "all": other}))
    counts = [
        {"spec_draft_tokens": 40, "accepted": 30},
        {"spec_draft_tokens": 20, "accepted": 9},
    ]  # which are no settings
    assert summary(read(json.dumps(counts))) == ("an engine", None, 60, 39, ())


def test_totals_that_rise_are_noted():
    """In JSON lines, as in lines of text."""
    for counts, is_rising in (((100, 200, 300), True), ((100, 90, 300), False), ((100, 100, 100), False)):
        lines = [json.dumps({"timestamp": i, "drafted": n, "accepted": n // 2}) for i, n in enumerate(counts)]
        assert (RISING in read("\n".join(lines)).notes) == is_rising
    falling = [json.dumps({"drafted": 100 * i, "accepted": 90 // i}) for i in (1, 2, 3)]
    assert RISING not in read("\n".join(falling)).notes


@loop(
    "name",
    ["K", "Depth", "spec_tokens", "num_draft", "numSpeculativeTokens", "mtp_depth", "Temperature", "draft_model"],
)
def test_counts_of_several_settings_are_not_added(name):
    lines = [json.dumps({name: value, "drafted": 100 * value, "accepted": 60}) for value in (1, 2)]
    with pytest.raises(EngineError, match="of 2 runs, parts or settings"):
        read("\n".join(lines))


def test_streams_whose_parts_alternate():
    counts = [("a", 30, 10), ("b", 30, 10), ("a", 60, 20), ("b", 60, 20)]
    lines = [json.dumps({"id": name, "drafted": drafted, "accepted": kept}) for name, drafted, kept in counts]
    known = [
        json.dumps({"id": name, "timings": {"draft_n": drafted, "draft_n_accepted": kept}})
        for name, drafted, kept in counts
    ]
    for each in (lines, known):
        found = read("\n".join([*each, json.dumps({"id": "a", "done": True})]))
        assert (found.draft_tokens, found.accepted) == (120, 40)


def test_a_stream_without_an_end_before_another():
    """Of answers without an id: a document between them ends the first."""
    part = json.dumps({"content": "a", "stop": False, "timings": {"draft_n": 30, "draft_n_accepted": 10}})
    found = read(f"{part}\n{json.dumps({'model': 'm'})}\n{part}\n")
    assert (found.draft_tokens, found.accepted) == (60, 20)


def test_many_counts_by_name_cost_little_time():
    items = [{"drafted": 4, "accepted": place % 4} for place in range(8000)]
    begin = time.process_time()
    with pytest.raises(EngineError, match="of 16,000 runs"):
        read(json.dumps({"parts": {"requests": items}, "rest": items}))
    assert time.process_time() - begin < 3


@loop(
    ("record", "counts"),
    [
        ({"num_drafts": 100, "num_accepted_tokens": 280, "mean_acceptance_length": 2.8}, (100, 180)),
        ({"num_drafts": 100, "num_accepted_tokens": 180, "mean_acceptance_length": 2.8}, (100, 180)),
        ({"num_drafts": 100, "draft_tokens": 300, "accepted": 180, "mean_acceptance_length": 1.8}, None),
        ({"num_drafts": 100, "draft_tokens": 300, "accepted": 180, "mean_acceptance_length": 3.9}, (None, 180)),
        ({"drafted": 100, "accepted": 62, "acceptance_rate": 0.31}, None),
        ({"drafted": 100, "accepted": 62, "acceptance_rate": 62.0}, (None, 62)),
        ({"rounds": 3, "k": 3, "draft_tokens": 300, "accepted_tokens": 180}, (None, 180)),
        ({"drafts": 0, "draft_tokens": 300, "accepted": 180}, (None, 180)),
        ({"drafts": 0, "draft_tokens": 0, "accepted": 0}, (0, 0)),
        ({"rounds": 400, "draft_tokens": 300, "accepted": 180}, (None, 180)),
        ({"rounds": 30, "k": 3, "draft_tokens": 300, "accepted_tokens": 60}, (None, 60)),
        ({"draft_rounds": 100, "accepted_per_pos": [80, 50, 20], "mean_acceptance_length": 2.5}, (100, 150)),
        ({"rounds": 100, "draft_tokens": 300, "accepted": 180, "acceptance_rate": 0.6}, (100, 180)),
        (
            {"rounds": 100, "draft_tokens": 300, "accepted": 180, "acceptance_rate": 0.7},
            (100, 180),
        ),  # with bonus tokens
        ({"drafted": 100, "accepted": 62, "acceptance_rate": 0.64}, (None, 62)),
        ({"drafted": 4, "accepted": 3, "acceptance_rate": 0.6}, (None, 3)),
    ],
)
def test_counts_are_compared_with_the_figures_beside_them(record, counts):
    """A length, a rate and K in the same object."""
    if counts is None:
        with pytest.raises(EngineError, match="contradict"):
            read(json.dumps(record))
    else:
        found = read(json.dumps(record))
        assert (found.num_drafts, found.accepted) == counts


def test_a_gauge_is_not_compared_with_counters_of_metrics():
    gauge = "mistralrs_spec_acceptance_rate 0.1\n"
    assert summary(read(METRICS["mistral.rs'"][0] + gauge)) == METRICS["mistral.rs'"][1]


MANY = MAX_POSITIONS + 1


@loop(
    ("fields", "positions"),
    [
        ({"accepted_per_pos": [0.8, 0.9, 0.9]}, ()),  # conditional shares
        ({"accepted_per_pos": [100, None, 50]}, ()),
        ({"accepted_per_pos": {"p50": 80, "p90": 50, "p99": 20}}, ()),
        ({"draft_tokens": 5000, "accepted_tokens": MANY, "accepted_per_pos": [1] * MANY}, ()),
        ({"acceptance_rate_pos_1": 0.9, "acceptance_rate_pos_3": 0.6}, ()),
        ({"acceptance_rate_pos_2": 0.9, "acceptance_rate_pos_3": 0.6}, ()),
        ({"draft_tokens_pos_1": 100, "draft_tokens_pos_2": 50}, ()),
        ({"accepted_per_pos": [80.0, 50.0, 20.0]}, (80, 50, 20)),
        ({"accepted_per_pos": [0.8, 0.5, 0.19]}, (80, 50, 19)),  # rounded
        ({"drafts": 2, "draft_tokens": 6, "accepted_tokens": 2, "accepted_per_pos": [1, 1, 0]}, (1, 1, 0)),
    ],
)
def test_positions_are_those_of_the_counts(fields, positions):
    """Others, and those whose sum contradicts the accepted tokens, are left out."""
    counts = {"drafts": 100, "draft_tokens": 300, "accepted_tokens": 150}
    assert read(json.dumps(counts | fields)).per_position == positions


# Behind the fields of a dict: what only Python writes.
PYTHON = ", 'a': <Req>, 'b': np.float64(1.5), 'c': (1, None), 'd': nan, 'e': True, 'f': {3: 1}, 'g': 'it\\'s',}"
TIMINGS = {"prompt_n": 1, "predicted_n": 100, "draft_n": 78, "draft_n_accepted": 60}


def test_objects_in_other_text():
    """Of engines with a format: after a prompt, as Python prints them, with the beginning or the end cut off."""
    pretty = json.dumps({"timings": TIMINGS}, indent=2)
    cut = pretty.partition('"predicted_n"')
    for text in (f"$ curl -d '{{}}' localhost | jq .\n{pretty}\n", str(TIMINGS), f"it's {{x}} {TIMINGS}, don't\n",
                 f"{{note {TIMINGS}}}", str(TIMINGS)[:-1] + PYTHON, cut[1] + cut[2], pretty.rstrip("}\n "), pretty.rstrip("}\n ") + ',\n "index":'):  # fmt: skip
        assert summary(read(text)) == ("llama.cpp", 39, 78, 60, ())
    heads = "speculate_metrics={'accepted_tokens': 162, 'rejected_tokens': 154, 'accepted_tokens_per_head': [79, 51, 23, 9]}"
    assert summary(read(heads)) == ("FastDeploy", 79, 237, 83, (51, 23, 9))
    stats = (
        "{'internal_states': [{'avg_spec_accept_length': 2.34, 'req': <Req>, 'x': np.float64(1.5), 'y': (1, None)}]}"
    )
    assert read(stats).length == 2.34


@loop("name", METRICS)
def test_metrics(name):
    text, expected = METRICS[name]
    counters = read(text)
    assert summary(counters) == expected
    assert counters.source == METRICS_FORMAT


def test_sglang_metrics_without_the_colon():
    """As OpenTelemetry and Ray export them."""
    for prefix in ("sglang_", "ray_sglang_", "ray_serve_sglang_"):
        counters = read(f'{prefix}spec_accept_length{{tp_rank="0"}} 2.5\n{prefix}gen_throughput 41.4\n')
        assert (counters.engine, counters.length) == ("SGLang", 2.5)


def test_a_table_of_logs_is_none_of_series():
    log = f'timestamp,message\n1,"num_spec_tokens=2"\n2,"(APIServer pid=1) {VLLM}"\n'
    assert summary(read(log)) == summary(read(VLLM))


def test_sglang_metrics_of_several_ranks_show_k():
    text = 'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:spec_num_steps{tp_rank="0"} 3\n'
    assert read(text).k == 3
    text += "sglang:spec_verify_calls_total 40\nsglang:generation_tokens_total 100\n"
    assert read(text).notes == (FIRST_TOKENS,)


def as_bytes(line):
    """A record of journald whose text has colors."""
    return json.dumps({"MESSAGE": [*f"\x1b[32m{line}\x1b[0m".encode()], "_PID": "7"})


def test_numbers_of_other_locales():
    """Decimal commas, and separators of thousands: read as what they are, or not at all."""
    expected, tenfold = (
        summary(read(BENCH)),
        summary(read(VLLM.replace("169 tok", "1690 tok").replace("198 tok", "1980 tok"))),
    )
    for separator in (",", ".", "'", "’", " ", "\u00a0", "\u202f"):
        large = BENCH.replace("6393", f"6{separator}393").replace("19179", f"19{separator}179").replace(
            "14090", f"14{separator}090")  # fmt: skip
        assert summary(read(large)) == expected, separator
        line = VLLM.replace("169 tok", f"1{separator}690 tok").replace("198 tok", f"1{separator}980 tok")
        assert summary(read(line)) == tenfold, separator
    assert summary(read(BENCH.replace(".", ","))) == expected
    assert summary(read(VLLM.replace("2.71", "2,71").replace("0.919, 0.788", "0,919, 0,788"))) == summary(read(VLLM))
    assert read(SGLANG.format("2,50", "0,50")).length == 2.5
    assert read(BENCH.replace("6393", "6,39")).num_drafts == 6393  # by the rates, as it is no count
    for separator in ("; ", ";", " "):
        assert summary(read(VLLM.replace("0.919, 0.788", f"0,919{separator}0,788"))) == summary(read(VLLM))
    with pytest.raises(EngineError, match="lacks 'Accepted'"):
        read(VLLM.replace("169 tok", "16.9 tok"))


def test_a_pipe_is_read_whole_or_refused(tmp_path, monkeypatch):
    """As of `<(zcat engine.log.gz)`: the counts of its beginning alone would be another run's."""
    monkeypatch.setattr("nextn.engines.counter_formats._MAX_PARSED", 2**20)
    entry = f"{VLLM}\n"
    for count, is_refused in ((3, False), (2**21 // len(entry), True)):
        pipe = tmp_path / f"pipe {count}"
        os.mkfifo(pipe)
        writer = threading.Thread(target=_write_all, args=(pipe, entry * count))
        writer.start()
        if is_refused:
            with pytest.raises(EngineError, match="at most 1 MiB are read; write it to a file"):
                read(pipe)
        else:
            assert read(pipe) == read(entry * count)
        writer.join()


def test_a_log_that_is_followed_is_read_until_it_is_interrupted():
    """`docker logs -f NAME | nextn diagnose --engine -` ends by Ctrl-C, which loses nothing."""

    def followed(*parts):
        given = iter(parts)

        def read1(_):
            part = next(given, None)
            if part is None:
                raise KeyboardInterrupt
            return part

        return SimpleNamespace(encoding="utf-8-sig", buffer=SimpleNamespace(read1=read1))

    line = f"{VLLM}\n".encode()
    text, note = _piped(followed(line[:20], line[20:], line))
    assert text == f"{VLLM}\n" * 2
    assert "so far" in note[0]
    assert _piped(followed(line, b"")) == (f"{VLLM}\n", ())
    with pytest.raises(KeyboardInterrupt):
        _piped(followed())


def _write_all(pipe, text):
    with suppress(BrokenPipeError):
        pipe.write_text(text)


def test_files_as_other_systems_write_them(tmp_path):
    """UTF-16 of PowerShell with and without its mark, marks before JSON and metrics; compressed files are named."""
    path, (name, _) = tmp_path / "log", METRICS["through OpenTelemetry"]
    timings = json.dumps({"timings": {"predicted_n": 100, "draft_n": 78, "draft_n_accepted": 60}})
    for text in (VLLM, name, timings):
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"):
            path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
            assert summary(read(path)) == summary(read(text)), encoding
    for content, words in ((b"", "empty"), (gzip.compress(VLLM.encode()), "compressed; unpack it first")):
        path.write_bytes(content)
        with pytest.raises(EngineError, match=words):
            read(path)


def test_colors_between_the_figures():
    for color in ("\x1b[1;32m{}\x1b[0m", "^[[32m{}^[[0m"):
        assert summary(read(VLLM.replace("169", color.format(169)))) == summary(read(VLLM))


def test_metrics_that_are_not_known():
    """They are no sign that MTP is off."""
    with pytest.raises(EngineError, match="spec_decode_attempts_total"):
        read("other_mlx:spec_decode_attempts_total 1304\nother_mlx:spec_decode_accepts_total 1111\n")


SGLANG_LINE = "Decode batch. #running-req: 1, accept len: 2.84, accept rate: 0.61\n"


@loop(
    ("lines", "log", "engine"),
    [
        ("speculative_num_steps = 3\nspeculative_num_draft_tokens = 4\n", SGLANG_LINE, "SGLang"),
        ("speculative_num_steps 3\n", SGLANG_LINE, "SGLang"),
        ("speculative_num_steps : 3\nspeculative_num_draft_tokens : 4\n", SGLANG_LINE, "SGLang"),
        ("speculative_acceptance_threshold 1.0\n", SGLANG_LINE, "SGLang"),
        ("spec_accepted_models of 3 servers\n", "position 1: 40/50\n", "an engine"),
        ("sglang_1  | starting\n", "position 1: 40/50\n", "an engine"),
        ("INFO:root starting\n", SGLANG_LINE, "SGLang"),
        ("spec_num_tokens set to 3 by user\n", f"{VLLM}\n", "vLLM"),
        ("speculative_num_accepted_tokens_total of 3\n", f"{VLLM}\n", "vLLM"),
    ],
)
def test_lines_of_a_log_that_look_like_metrics(lines, log, engine):
    """The log after them is read."""
    counters, alone = read(lines + log), read(log)
    assert counters.engine == engine
    assert (counters.length, counters.num_drafts, counters.accepted) == (alone.length, alone.num_drafts, alone.accepted)
    with pytest.raises(ConfigError):
        read(lines + log, model="m")


def test_settings_of_a_log_with_a_line_like_metrics():
    assert read(f"INFO:root starting\n--speculative-num-draft-tokens 4\n{SGLANG.format('1.00', '0.00')}").k == 3


def test_long_names_are_no_metrics_and_cost_no_time():
    begin = time.process_time()
    with pytest.raises(EngineError):
        read("spec_drafts" * 20_000)
    assert time.process_time() - begin < 5


def test_a_long_log_with_a_line_like_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr("nextn.engines.counter_formats._MAX_PARSED", 100)
    (tmp_path / "log").write_text("INFO:root starting\n" * 9 + SGLANG_LINE)
    assert read(tmp_path / "log").length == 2.84
    (tmp_path / "log").write_text(METRICS["vLLM 0.30"][0])
    with pytest.raises(EngineError, match="larger than"):
        read(tmp_path / "log")


@loop(
    "text",
    [
        "Measuring MTP acceptance:  31%|███▏ | 5/16 [00:10<00:22, 2.01s/it]\n",
        "Draft model accepted, loading checkpoint shards 3/15\n",
        "speculative config accepted: tp rank 0/8\n",
        "mtp accept: layer 61/61 loaded\n",
        "MTP drafts accepted on GPU 1/2\n",
        "spec_decode accept path /data/1/2\n",
        "spec_decode accept at /1/2\n",
        "MTP acceptance report 11/24/2026\n",
        "mtp acceptance of prompt 3/16\n",
        json.dumps({"runs": [{"k": k, "draft_tokens": 40 * k, "accepted_tokens": 30} for k in (1, 3)]}),
        json.dumps({name: {"draft_tokens": 40, "accepted_tokens": 30} for name in ("greedy", "sampled")}),
        json.dumps({"mtp": {"accepted_tokens": 90, "draft_tokens": 40}}),
        json.dumps([{"tokens": {"draft_tokens": -1, "draft_acc_tokens": -1, "output_tokens": 200}}]),
        json.dumps({"orders": {"accepted": 30, "rejected": 9}}),
        "Decode (pld): 3200ms (256 tokens, 80.000 tok/s; pld accept=75/105 attempts, avg 0.71 tokens/attempt)\n",
        "mtp accept=31/50 rounds\n",
        "MTP device connected: accepted 3/5 files\n",
        "[spec-stats] mode=dspark attempts=105 accepts=150 avg_per_round=1.43 depth=2 drafted=210\n",
        "vllm:spec_decode_num_accepted_tokens_total 85\nvllm:spec_decode_num_draft_tokens_total 133\n",
        "pld_spec_draft_tokens_total 500\npld_spec_draft_tokens_accepted_total 300\n",
        "lightllm_request_mtp_avg_token_per_step_count 20\n",
        "".join(
            f'maxserve_spec_decode_acceptance_rate_per_position_{part}{{position="0"}} 0\n' for part in ("sum", "count")
        ),
        json.dumps(
            {
                "num_drafts": 100,
                "num_accepted_tokens": 180,
                "mean_acceptance_length": 1.8,
                "accepted_per_pos": [80, 60, 40],
            }
        ),
        json.dumps({"num_drafts": 100, "num_accepted_tokens": 60, "mean_acceptance_length": 0.6}),
        json.dumps({"draft_rounds": 3, "k": 3, "accepted_tokens": 180}),
        json.dumps({"draft_rounds": 100, "acceptance_rate_by_position": [0.8, 0.5, 0.2]}),
        "spec_suffix_decode_draft_tokens_total 500\nspec_suffix_decode_draft_tokens_accepted_total 300\n",
        "smtp: accepted 12 of 30 recipients\n",
        "mtp drafted=4 accepted=3 | total drafted=400 accepted=250\n",
        "mtp unaccepted=19 drafted=50\n",
        "The patch was accepted: 3/5 reviewers; draft v2\n",
        "draft PR: 3 accepted, 4 rejected\n",
        "MTP acceptance at step 3/16\n",
        "draft acceptance after epoch 3/16\n",
        "draft accept path 1/2\n",
        "loan acceptance (3 of 5 drafts)\n",
        "accepted (3/5 drafts)\n",
        "mtp accepted=0.625 drafted=1.000\n",
        "drafts 10/302, tokens 696/906\n",
        json.dumps({"mtp_prompt_lookup": {"proposals": 39, "drafted": 1032, "accepted": 783}}),
        "spec ngram: drafted=50 accepted=31\n",
        json.dumps(
            {"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}}}
        ),
        "position 2: 80/191\nposition 3: 20/191\n",
        "draft_num_accepted_tokens=15 draft_num_draft_tokens=20 draft_num_accepted_tokens=16 draft_num_draft_tokens=22\n",
    ],
)
def test_counts_that_are_not_clear_are_not_read(text):
    with pytest.raises(EngineError):
        read(text)


def test_names_that_contradict_each_other():
    """Nothing is read by name: two counts of one kind, positions that rise, and drafts of another kind."""
    record = {"drafts": 100, "draft_tokens": 300, "accepted": 150}
    for other in ({"drafted": 400}, {"accepted_per_pos": [20, 50, 80]}):
        assert from_record(record | other) is None
    assert in_lines("drafts: 100\naccepted: 150\n") is None
    lines = "".join(f"{name}: {count}\n" for name, count in record.items())
    assert in_lines(lines).num_drafts == 100
    for other in ("ngram_accepted_per_pos: [80, 50, 20]", "draft_tokens: 400"):
        assert in_lines(f"{lines}{other}\n") is None


def test_counts_of_steps_with_sorted_keys():
    """Accepted tokens before the drafted ones: those of a line, not of the next one."""
    steps = ((20, 15), (22, 16), (23, 10))
    lines = (f"step draft_num_accepted_tokens=1{kept} draft_num_draft_tokens=1{all_}\n" for all_, kept in steps)
    found = read("".join(lines))
    assert (found.draft_tokens, found.accepted) == (365, 341)


@loop(
    "text",
    [
        "MTP: drafted=50 accepted=31\n[info] ngram: off\n",
        "Engram: MTP: 31 accepted / 50 drafted\n",
        "MTP (ngram lookup disabled): 31 accepted / 50 drafted\n",
    ],
)
def test_a_word_beside_the_counts_is_not_their_drafter(text):
    found = read(text)
    assert (found.draft_tokens, found.accepted) == (50, 31)


def test_no_counts_of_a_connection():
    with pytest.raises(EngineError):
        read("speculative decoding: off\nAccepted connection from 10.0.0.1/24\n")


def test_pasted_in_other_ways():
    """Broken by a terminal, with tabs, as a list of records, two entries on one line, of journald with colors."""
    once, twice = summary(read(VLLM)), summary(read(f"{VLLM}\n{VLLM}"))
    for width in (37, 80):
        pieces = [VLLM[place : place + width] for place in range(0, len(VLLM), width)]
        for line_break in ("\n", "\n    ", "\n> ", "\r\n"):
            assert summary(read(line_break.join(pieces))) == once, (width, line_break)
    assert summary(read(VLLM.replace(" ", "\t"))) == summary(read(VLLM.replace(" ", "\u00a0"))) == once
    assert summary(read(f"{VLLM} {VLLM}")) == twice
    assert summary(read(as_bytes(VLLM) + "\n" + as_bytes(VLLM))) == twice
    loki = {"data": {"result": [{"stream": {"app": "x"}, "values": [["169", VLLM], ["170", VLLM]]}]}}
    for records in ([{"message": VLLM}] * 2, [{"jsonPayload": {"message": VLLM}, "labels": {"a": "b"}}] * 2, loki):
        for indent in (None, 2):
            assert summary(read(json.dumps(records, indent=indent))) == twice
    assert summary(read("\n".join(json.dumps({"log": line}) for line in ("{x", VLLM)))) == once


def test_two_engines_in_one_file():
    """The one that is not read is named."""
    for first, second in (
        (VLLM, REQUEST),
        (SGLANG.format("2.50", "0.50"), REQUEST),
        (VLLM, SGLANG.format("2.5", "0.5")),
    ):
        assert any("also there, and not added" in note for note in read(f"{first}\n{second}\n").notes)
        assert any("also there, and not added" in note for note in read(f"{second}\n{first}\n").notes)


def statistics(rounds, accepted):
    line = STATISTICS.replace("=  2091", f"= {accepted}").replace("=   902", f"= {min(rounds, accepted)}")
    return line.replace("3297", str(3 * rounds)).replace("=   1099", f"= {rounds}").partition("] ")[2]


@loop("size", [None, 700])
@loop(
    ("first", "second"),
    [
        ("[53409] {}", "[53410] {}"),
        ("(APIServer pid=7) INFO {}", "(APIServer pid=8) INFO {}"),
        ("[2025-05-31 18:31:21 DP0 TP0] {}", "[2025-05-31 18:31:21 DP1 TP1] {}"),
        ("(pid=7) Engine 000: idle\n(pid=7) {}", "(pid=7) Engine 001: idle\n(pid=7) {}"),
        ("llama-1  | {}", "llama-2  | {}"),
        ("d3.log:{}", "d4.log:{}"),
        ("[pod/llm-0/server] {}", "[pod/llm-1/server] {}"),
        ("Jul 20 18:11:49 host-a vllm[11]: {}", "Jul 20 18:11:49 host-a vllm[12]: {}"),
    ],
)
def test_processes_of_one_log_are_counted_apart(first, second, size, monkeypatch):
    """Each has its own totals since the start; a log is read in pieces."""
    if size is not None:
        monkeypatch.setattr("nextn.engines.log_reader._CHUNK", size)
        monkeypatch.setattr("nextn.engines.log_reader._MAX_ENTRY", size // 2)
    lines = [
        shape.format(statistics(*counts))
        for count in range(1, 9)
        for shape, counts in ((first, (100 * count, 150 * count)), (second, (10 * count, count)))
    ]
    counters = read("\n".join(lines))
    assert (counters.num_drafts, counters.accepted) == (880, 1208)
    (note,) = counters.notes
    assert "2 in all" in note
    assert "1.10" in note
    assert "2.50" in note


def test_processes_that_share_a_line():
    lines = f"(Worker_DP0 pid=7) INFO {VLLM}(Worker_DP1 pid=8) INFO {VLLM.replace('169', '150')}\n\n"
    counters = read(lines)
    assert counters.accepted == 319
    assert ["2 in all" in note and "pid=7)" in note and "pid=8)" in note for note in counters.notes][-1]
    assert not any("in all" in note for note in read(f"(pid=7) {VLLM} {VLLM}").notes)


def test_requests_whose_length_shows_no_rounds():
    """1.00 is a length of any number of rounds: the others, or K, say how many."""
    request = REQUEST.partition(", mean")[0] + ", mean len =  3.65"
    rejected = "slot print_timing: id 0 | task 9 | draft acceptance = 0.00000 (    0 accepted /    40 generated), mean len = 1.00"
    counters = read(f"{request}\n{rejected}\n")
    assert summary(counters) == ("llama.cpp", 107, 428, 257, ())
    assert any("estimated" in note for note in counters.notes)
    assert read(f"{rejected}\n").num_drafts is None
    few = ("slot print_timing: id 0 | task 9 | draft acceptance = 0.00158 (    1 accepted /   633 generated), mean "
           "acceptance length =  1.00, acceptance rate per position = (0.005, 0.000, 0.000)")  # fmt: skip
    assert summary(read(f"{few}\n")) == ("llama.cpp", 211, 633, 1, (1, 0, 0))
    assert read(f"{request}\n{few}\n").per_position == ()  # the first is not read
    assert read(f"{REQUEST}\n{few}\n").num_drafts == 97 + 211


def test_a_length_of_one_is_no_contradiction():
    line = "SpecDecoding metrics: Mean acceptance length: 1.00, Accepted: 1 tokens, Drafted: 900 tokens\n"
    assert read(line).accepted == 1
    with pytest.raises(EngineError):
        read(line.replace("1 tokens, D", "90 tokens, D"))


def test_a_restart_is_seen_by_any_count_that_fell():
    counters = read(f"{statistics(100, 160)}\n{statistics(120, 20)}\n")
    assert (counters.num_drafts, counters.accepted, counters.notes) == (220, 180, (f"2 {RUNS}",))


def test_an_answer_of_prometheus():
    """The query API's JSON, as metrics."""
    names = {"drafts": 100, "draft_tokens": 200, "accepted_tokens": 120}
    result = [{"metric": {"__name__": f"vllm:spec_decode_num_{name}_total", "pod": 'a"b'}, "value": [1.5, str(value)]}
              for name, value in names.items()]  # fmt: skip
    counters = read(json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}))
    assert summary(counters) == ("vLLM", 100, 200, 120, ())


def exported(**totals):
    """AIPerf's server_metrics_export.json, of two servers."""
    series = {
        f"vllm:spec_decode_num_{name}": {
            "type": "counter",
            "series": [{"endpoint_url": f"http://a:800{engine}/metrics", "labels": {"engine": "0"},
                        "stats": {"avg": 9.0, "total": total / 2}} for engine in (0, 1)],
        }
        for name, total in totals.items()
    }  # fmt: skip
    return {"aiperf_version": "0.13.0", "metrics": series, "warmup_metrics": {"vllm:spec_decode_num_drafts": {}}}


def test_metrics_that_aiperf_exports():
    """The increase of counters during the run, without its warm-up; of gauges the mean."""
    counters = read(json.dumps(exported(drafts=100.0, draft_tokens=200.0, accepted_tokens=120.0)))
    assert summary(counters) == ("vLLM", 100, 200, 120, ())
    gauge = {"metrics": {"sglang:spec_accept_length": {"series": [{"stats": {"avg": 2.5, "min": 2.0}}]}}}
    assert read(json.dumps(gauge)).length == 2.5
    for broken in ({"metrics": {"a": 1}}, {"metrics": {"a": {"series": [1, {"stats": 2}]}}}, {"metrics": []}):
        with pytest.raises(EngineError, match="no draft counts"):
            read(json.dumps(broken))


PREFIXES = {
    "plain": "{}",
    "Docker": "engine-1  | {}",
    "Docker, a service of an engine's name": "sglang_server_1  | {}",
    "journald": "Oct 01 10:00:00 host vllm[4711]: {}",
    "Kubernetes": "2026-10-01T10:00:00.000000000Z stderr F {}",
    "kubectl --prefix": "[pod/engine-0/vllm] {}",
    "syslog": "<14>1 2026-10-01T10:00:00Z host vllm 1 - - {}",
    "color": "\x1b[1;36m(EngineCore_DP0 pid=7)\x1b[0;0m {}",
    "rank": "[rank0]: {}",
}


@loop("prefix", PREFIXES)
def test_prefixes(prefix):
    """What a container or a log daemon puts before each line changes nothing, also where it looks like JSON."""
    for text in (VLLM, SGLANG.format("2.50", "0.50"), BENCH, OFFLINE, STATISTICS, REQUEST):
        lines = "".join(PREFIXES[prefix].format(line) + "\n" for line in text.splitlines())
        assert summary(read(lines)) == summary(read(text))


RECORDS = {
    "Docker": lambda line: {"log": line + "\n", "stream": "stderr", "time": "2026-10-01T10:00:00Z"},
    "Python": lambda line: {"level": "INFO", "message": line, "logger": "vllm"},
    "journald": lambda line: {"_PID": "7", "MESSAGE": line, "PRIORITY": "6"},
    "Google Cloud": lambda line: {"jsonPayload": {"message": line}, "severity": "INFO"},
    "Loki": lambda line: {"labels": {"app": "x"}, "line": line},
    "another key": lambda line: {"ts": "1", "what": {"was": {"said": line}}},
}


@pytest.mark.parametrize("record", RECORDS)
def test_structured_logs(record):
    for text in (VLLM, SGLANG.format("2.50", "0.50"), BENCH, REQUEST):
        lines = [json.dumps(RECORDS[record](line)) for line in text.splitlines()]
        for pasted in ("\n".join(lines), "starting\n" + "\n".join(lines), "\n".join([*lines, '{"log": "cut'])):
            assert summary(read(pasted)) == summary(read(text))


@pytest.mark.parametrize(
    ("pairs", "k"),
    [
        ([("3.24", "0.56")], 4),  # (AL - 1) / K, fits no other
        ([("2.50", "0.50")], None),  # K = 3 of recent versions, or 4 of older ones
        ([("2.50", "0.50"), ("3.10", "0.70")], 3),
        ([("2.50", "0.50"), ("3.10", "0.62")], 4),
        ([("1.00", "0.00")], None),
    ],
)
def test_k_of_sglang(pairs, k):
    assert read("\n".join(f"[2026-10-02 11:22:33 TP0] {SGLANG.format(*pair)}" for pair in pairs)).k == k


@loop(
    ("line", "version", "k"),
    [
        ("(EngineCore pid=1) INFO [core.py:93] Initializing a V1 LLM engine (v0.30.1) with config: model='x', "
         "speculative_config=SpeculativeConfig(method='mtp', model='x', num_spec_tokens=3)", "0.30.1", 3),
        ("INFO [utils.py:233] non-default args: {'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 2}}",
         "", 2),
        ("server_args=ServerArgs(model_path='x', speculative_num_steps=3, speculative_num_draft_tokens=4)", "", 3),
        ("build: 10444 (037f2f344) with Clang\nllama-server --spec-type draft-mtp --spec-draft-n-max 5",
         "10444 (037f2f344)", 5),
        ("PyTorch version: 2.6.0\nPython version: 3.12.3\nvLLM Version: 0.8.5\nnum_speculative_tokens: 3", "0.8.5", 3),
        ("srv | main: version: 6541 (abcdef12)\n--draft-max 4", "6541 (abcdef12)", 4),
        ("[TensorRT-LLM] TensorRT LLM version: 1.4.0rc1\nspeculative_config:\n  max_draft_len: 3", "1.4.0rc1", 3),
        ("python -m mlx_vlm.server --draft-block-size 8", "", 7),
        ('2026-07-01 ecs/vllm/3f0c1b2a9d args: ["--speculative-num-steps", "2"]', "", 2),
        ("lmdeploy serve api_server x \\\n--speculative-algorithm deepseek_mtp --speculative-num-draft-tokens 3", "", 3),
        ("python -m sglang.launch_server --speculative-num-draft-tokens 4", "", 3),
    ],
)  # fmt: skip
def test_version_and_k_of_a_log(line, version, k):
    counters = read(f"{line}\n{SGLANG.format('1.00', '0.00')}\n")
    assert (counters.version, counters.k) == (version, k)
    assert engine_depth([counters], None) == k


FORCED = [
    '--speculative-config \'{"method":"mtp","rejection_sample_method":"synthetic","synthetic_acceptance_length":3.12}\'',
    "SpeculativeConfig(method='mtp', rejection_sample_method='synthetic')",
    'SPEC="{\\"rejection_sample_method\\":\\"synthetic\\",\\"synthetic_acceptance_length\\":3.1}"',
    "synthetic_acceptance_rates: [0.9, 0.8]",
    "export SGLANG_SIMULATE_ACC_LEN=2.78 SGLANG_SIMULATE_ACC_METHOD=match-expected",
    "SGLANG_SIMULATE_ACC_LEN: '3.24'",
    "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=1.78 trtllm-serve x",
    'ATOM_ARGS="--spec-decode-acceptance-length 3.78"',
    "spec_decode_acceptance_length: 3.78\n",
    "use_relaxed_acceptance_for_thinking: true\nrelaxed_topk: 10",
    "--speculative-accept-threshold-single 0.3",
    "ServerArgs(speculative_accept_threshold_acc=0.5)",
    "--spec-decoding-acceptance-method typical_acceptance_sampler",
    "MLX_SERVE_MTP_TYPICAL=0.09",
    "mtplx serve --typical-threshold 0.3",
    "mtplx serve --cascade-threshold=0.2",
    "llama-server --draft-p-accept 0.15",
    "SpeculativeConfig(method='eagle3', num_spec_tokens=3)",
    "--speculative-algorithm NGRAM",
    "--speculative-algorithm SUFFIX",
    "LLAMA_ARG_SPEC_SYNTH_LEN=2.5 llama-server",
    "--spec-synth-rates 0.9,0.7",
    "0.07.1 I spec common_specu: synthetic acceptance: n_max = 3, mean length = 2.500000, rates = [0.8, 0.5, 0.2]",
    "--spec-type draft-eagle3,ngram-mod",
    "0.06.9 I statistics     draft-eagle3: #calls(b,g,a) = 1 87 87",
    '- name: SGLANG_SIMULATE_ACC_LEN\n  value: "2.5"',
    'args: ["--spec-type", "draft-mtp", "--spec-synth-len", "2.5"]',
    'args:\n- "--spec-decode-acceptance-length"\n- "3.78"',
    '--speculative-config \'{"method":"mtp","relaxed_thinking":true,"relax_ratio":0.5}\'',
    "export ATOM_ENABLE_RELAXED_MTP=1",
    "vllm-mlx serve x --enable-mtp --mtp-optimistic\n$ curl localhost",
    "max serve --use-relaxed-acceptance-for-thinking --relaxed-topk 10",
    "RejectionSampler config: block_verify=False, entropy_verify=True, posterior_threshold=0.95",
    "SPECULATIVE_RELAXATION_FACTOR = 0.100000",
    '{"method": "mtp", "accept_policy": "accept_all"}',
    "--typical-acceptance --port 1",
    "--mtp-lossy-accept=on --port 1",
    'args: ["--mtp-optimistic", "--port", "1"]',
    "--no-relaxed-acceptance false --typical-acceptance true",
    "ServerArgs(disable_lossy_verify=False, port=1)",
    "--disable-relaxed-mtp=false",
]
NOT_FORCED = [
    "--typical-acceptance false --port 1",
    "--mtp-lossy-accept=off",
    'args: ["--typical-acceptance", "off", "--port", "1"]',
    "args:\n- --typical-acceptance\n- 'false'",
    "--no-relaxed-acceptance --disable-typical-acceptance\n",
    "disable_lossy_verify=true, verify_lossy_disabled=1, skip_relaxed_verify=1",
    "without_relaxed_acceptance: true",
    "typical_acceptance_rate: 0.82 lossy_accept_rate=0.1",
    "typical_accept_length = 2.4, relaxed_accept_ratio: 0.5",
    "ServerArgs(speculative_accept_threshold_single=1.0, speculative_accept_threshold_acc=1.0)",
    "SGLANG_SIMULATE_ACC_LEN=-1",
    "SGLANG_SIMULATE_ACC_LEN: 0",
    "rejection_sample_method='standard', synthetic_acceptance_length=None",
    "rejection_sample_method=block",
    "RejectionSampler config: block_verify=True, entropy_verify=False, posterior_threshold=0.95",
    '{"mtp_optimistic": false, "relaxed_topk": 10, "typical_p": 0.9, "accept_policy": "normal"} --mtp-typical 0',
    "[batched] slot serial: lossy-accept\n- typical acceptance, 0.75\n(method, ngram)",
    "llama-server --draft-p-accept 1.0",
    "use_relaxed_acceptance_for_thinking=False",
    "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=0",
    '{"method": "mtp"} --speculative-algorithm EAGLE --spec-type ngram-mod,draft-mtp --spec-type none',
    "statistics ngram-mod: #calls = 11\nstatistics draft-mtp: #calls = 11",
    json.dumps(
        {"spec_decode_num_drafts": 5, "spec_decode_acceptance_length": 2.8, "spec_decode_acceptance_rate": 50.0}
    ),
]


def test_forced_and_relaxed_acceptance():
    for text in FORCED:
        assert overrides_in(text), text
        assert read(f"{text}\n{VLLM}\n").overrides == overrides_in(text)
    assert any(" = 2.500000 (llama.cpp" in setting for text in FORCED for setting in overrides_in(text))
    for text in NOT_FORCED:
        assert overrides_in(text) == (), text
    assert {each.effect for each in OVERRIDES} == {"forced", "relaxed", "another drafter's"}


def test_lines_that_ray_leaves_out():
    """Lines that differ in their figures alone: of other servers, whose counts are missing."""
    line = f"(EngineCore pid=12, ip=10.0.0.5) {VLLM} [repeated 3x across cluster]"
    reading = read(f"{line}\n{line} (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable it)\n")
    assert reading.draft_tokens == 2 * read(VLLM).draft_tokens
    assert any("6 similar lines" in note for note in reading.notes)
    for other in ("", "loading weights took 3 s [repeated 7x across cluster]\n"):
        assert not any("similar lines" in note for note in read(f"{other}{VLLM}").notes)


@pytest.mark.parametrize(
    "name", ["no-accept" + "_relaxed" * 8000, "accept" + "_relaxed" * 8000, "typical-" * 8000 + "accept"]
)
def test_long_names_of_settings_cost_little_time(name):
    begin = time.process_time()
    assert overrides_in(f"{name} false\n{name * 9}") == ()
    assert time.process_time() - begin < 2


NOT_LOADED = [
    "ValueError: MTP speculative decoding layer 78 weights missing from checkpoint. The checkpoint may have been quantized",
    "ValueError: Following weights were not initialized from checkpoint: {'model.layers.16.hnorm.weight'}",
    "KeyError: 'layers.0.mlp.experts.w2_weight'",
    '  File "vllm/model_executor/models/qwen3_next_mtp.py", line 217, in load_weights\nAssertionError',
    "W llama_init_from_model: context type MTP requested but model doesn't contain MTP layers",
    "MTP speculative stage requested, but the server was not started with MTP support",
    "(config declares mtp heads but checkpoint ships no mtp.* weights; MTPModule attachment skipped)",
    "MTP head present in this checkpoint but not loaded (speculative.mtp_k=0)",
    "Parameter model.layers.0.self_attn.q_proj.weight not found in params_dict",
    "Parameter model.layers.46.shared_head.head.weight not found in params_dict",
    "WARN `--speculative` requested but no MTP weights loaded",
    "Config declares MTP layers but the weight files contain neither mtp.* tensors nor native nextn layers.",
    "load_model: NOT loaded: model.layers.48.eh_proj.weight_scale",
]
NO_MODEL = [
    "missing tensor 'blk.64.ssm_conv1d.weight'",
    "tensor 'blk.40.attn_qkv.weight' not found",
    "wrong number of tensors; expected",
    "layer 40 missing attn_qkv/attn_gate projections",
    "tensor mtp.0.ffn_gate_inp.weight has type f32, expected",
    "KeyError: 'model.layers.30.self_attn.q_proj.weight'",
    "tensor not found: layers.64.linear_attn.in_proj_qkv.weight",
]
NO_FAULT = [
    "INFO failed to load the tokenizer", "KeyError: 'mode'", "MTP head loaded; vision tower not used", "MTP on",
    "INFO mtp prefix cache not loaded from disk", "lora adapter not loaded; mtp on", "ships no telemetry. nextn on",
    "Parameter layers.3.mlp.experts.w13_bias.weight not found in params_dict, skip loading",
    "".join(f"Parameter layers.{layer}.mlp.w13.weight not found in params_dict\n" for layer in (0, 1)),
]  # fmt: skip


def test_a_head_that_the_engine_did_not_load():
    """Its own line is quoted, in place of counts or beside them."""
    for line in NOT_LOADED:
        with pytest.raises(EngineError) as error:
            read(f"INFO starting\n{line}\nINFO done\n")
        assert repr(line.strip().partition("\n")[0]) in str(error.value), line
        assert any("nextn audit" in note for note in read(f"{line}\n{SGLANG.format('1.00', '0.00')}\n").notes), line
    assert not any(map(head_not_loaded, [*NO_FAULT, *(text for text, _ in TEXTS.values())]))
    assert len(head_not_loaded("x" * 9999 + NOT_LOADED[0] + "y" * 9999)) < 300


def test_a_model_that_the_engine_did_not_load():
    for fault in NO_MODEL:
        with pytest.raises(EngineError, match=f"may not have loaded the model: .*{re.escape(fault)}"):
            read(f"main: loading model\nerror loading model: {fault} 1194, got 1178\nfailed to load model\n")
        assert read(f"{fault}\nMTP accepted 29/35\n").accepted == 29


@loop(
    ("text", "words"),
    [
        ("SpecDecoding metrics: Mean acceptance length: 2.71, Accepted\n", "vLLM's SpecDecoding metrics, which lacks"),
        ("[2026-10-02 11:22:33 TP0] Decode batch, #running-req: 1, gen throughput (token/s): 41.4\n",
         "SGLang's Decode batch, which lacks 'accept len'"),
        ("slot print_timing: draft acceptance = 0.5\n", "llama.cpp's draft acceptance, which lacks"),
        ("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n", "they are of vllm, and vllm:spec_decode"),
        ("sglang:gen_throughput 54.6\n", "they are of sglang, and sglang:spec_accept_length"),
        ("I spec       accept: adaptive n : 1 -> 2 (seq 0, n_draft=1, n_accepted=1)\n", "adaptive depth, which lacks"),
        ("Generate:20.00s (25.00T/s)\n(Draft Results - Success:397, Failure:63)\n",
         "KoboldCpp's draft results, which lacks 'rounds that accepted all drafts'"),
        ("MTP: accepted 120, drafted 80\n", "'MTP: accepted 120, drafted 80' is not read"),
        ("96 tok/sec, 82.0% draft tokens accepted\n", "'96 tok/sec, 82.0% draft tokens accepted' is not read"),
        ("24 drafted 10 accepted 5 times\n", "is not read"),
        ("| **Draft Rate** | 49% (15,102 / 30,784) | **81%** (8,433 / 10,362) |\n| tokens | 3.4 |\n", "nothing in it"),
        ("MTP on. requests accepted 200 / 300\n", "is not read"),
        ("HTTP: 12 accepted, 30 rejected\n", "is not read"),
        ("Position 0: 82.10\nAccepted tokens: 5\n", "nearest: table of vllm bench serve"),
        ("| version | draft acceptance |\n| 0.34 | 0.94 |\n", "nearest: llama.cpp's draft acceptance"),
        ("`mean_accept_len = 2.769`\n", "'`mean_accept_len = 2.769`' is not read"),
        ('{"promptTokens": 5, "totalTokens": 9}', "nothing in it"),
        ("Hello\n", "nothing in it is of an engine's drafts"),
        ('{"a": 1}\n{"a": 2}\n', "nothing in it is of an engine's drafts"),
        ('{"a": 1}', "nothing in it is of an engine's drafts"),
        (json.dumps({"timings": {"draft_n": 5, "draft_n_accepted": 9}}), "impossible"),
        (json.dumps({"timings": {"draft_n": 5}}), "nearest: timings of llama.cpp"),
    ],
)  # fmt: skip
def test_the_nearest_format_is_named(text, words):
    with pytest.raises(EngineError) as error:
        read(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_each_format_is_documented():
    names = [each.name for each in LOG_FORMATS] + list(JSON_READERS)
    assert len(set(names)) == len(names)
    assert all(each.counted and each.literal for each in LOG_FORMATS)
    read_from = {read(text).source for text, _ in TEXTS.values()}
    assert read_from >= {each.name for each in LOG_FORMATS} - {
        "llama.cpp's rounds (trace output)",
        "llama.cpp's changes of an adaptive depth",
        "KoboldCpp's draft results",
    }


def test_no_rounds_are_derived_from_k_where_the_engine_adapts_it():
    requests = "slot print_timing: draft acceptance = 0.6 (60 accepted / 100 generated)\n"
    assert observed_counts(read(requests), 4).rounds == 25
    with pytest.raises(EngineError, match="adapts how many tokens a round drafts, and counts no rounds"):
        observed_counts(read(f"llama-server --spec-draft-adaptive-min 1\n{requests}"), 4)
    adapted, fixed = (read(TEXTS[f"Ollama, {name}"][0]) for name in ("an adapted depth", "one depth"))
    assert observed_counts(adapted, 4).acceptance_length == pytest.approx(1 + 80 / 90)
    assert (ADAPTIVE in adapted.notes, ADAPTIVE in fixed.notes) == (True, False)


def test_counts_with_bonus_tokens_are_compared_by_length():
    counters = read(TEXTS["timings with bonus tokens"][0])
    assert observed_counts(counters, 3).acceptance_length == 99 / 40


@pytest.mark.parametrize(("depth", "counts"), [("3", "999999999:1"), ("999999999999999", "0:5")])
def test_a_depth_from_a_log_is_bounded(depth, counts):
    """A line of a log that would take all memory."""
    with pytest.raises(EngineError, match="depth above"):
        read(f"[NativeMTP] depth={depth} acceptedByDepth={counts}\n")


def test_what_is_read_in_the_start_of_a_log_alone_is_noted(tmp_path):
    """Of forms that no engine has for itself; those of engines are read to the end."""
    row, filler = "position 1: 40/50\n", "a line of the log\n" * 70_000
    for name, text, is_whole in (("short", row, True), ("long", row + filler, False)):
        (tmp_path / name).write_text(text)
        counters = read(tmp_path / name)
        assert (counters.num_drafts, counters.accepted) == (50, 40)
        assert any("1 MiB" in note for note in counters.notes) != is_whole


def test_objects_behind_the_limits_are_noted(monkeypatch):
    """Counts of the first ones alone are not shown as those of all."""
    line = f"INFO stats {NAMED['a script']}\n"
    assert not any("left out" in note for note in read(line).notes)
    assert any("left out" in note for note in read(line + "a line of the log\n" * 70_000).notes)
    with monkeypatch.context() as limit:
        limit.setattr("nextn.engines.embedded_json._MAX_FAILED", 5)  # characters in brackets that are no object
        assert documents("{x} {y} {z} {'a': 1}") == ([], False)
    monkeypatch.setattr("nextn.engines.embedded_json.MAX_DOCUMENTS", 2)
    for number in (2, 3):
        counters = read(line * number)
        assert counters.num_drafts == 200
        assert any("left out" in note for note in counters.notes) == (number == 3)


def test_counts_of_copied_drafts_are_no_heads():
    """By the drafter that the lines name; `prompt` alone names none."""
    counts = "drafts: 100\ndraft tokens: 300\naccepted tokens: 180\n"
    assert read(counts).num_drafts == 100
    for method in ("prompt lookup", "ngram", "prompt_lookup", "suffix"):
        with pytest.raises(EngineError, match=method):
            read(f"method: {method}\n{counts}")
    for line in ("prompts: 5\nmethod: mtp", "type: copywriting", "datatype: copy"):
        assert read(f"{line}\n{counts}").num_drafts == 100
    record = {"by_prompt": [{"drafted": 40, "accepted": 30}, {"drafted": 40, "accepted": 9}]}
    assert summary(read(json.dumps(record))) == ("an engine", None, 80, 39, ())


HEADER, ROW = "task,num_drafts,num_draft_tokens,num_accepted_tokens", "a,100,200,120"
TWO = f"{HEADER}\nb,40,80,70\na,60,120,50\n"
MARKDOWN = "| Drafts | Draft tokens | Accepted |\n|---|---:|---|\n| 100 | 200 | 120 |\n"
TABLES = {
    "commas": f"{HEADER}\n{ROW}\n",
    "tabs": f"{HEADER}\nhi; you,100,200,120\n".replace(",", "\t").replace(";", ","),
    "rows are added": TWO,
    **{f"a row named {name}": f"{TWO}{name},100,200,120\n" for name in ("total", "Total (2)", "Total:", "Grand Total")},
    "a row of totals and one of means": f"{TWO}mean,50,100,60\ntotal,100,200,120\n",
    "a row of totals alone": f"{HEADER}\ntotal,100,200,120\n",
    "quoted": '"num_drafts";"num_draft_tokens";"num_accepted_tokens"\n"100";"200";"120"\n',
    "a comma in a prompt": f'{HEADER}\n"Sum, of all numbers from 1 to 9",40,80,70\n"a poem,\nshort",60,120,50\n',
    "a comma in a name": '"task, K",num_drafts,num_draft_tokens,num_accepted_tokens\na,100,200,120.0\n',
    "Markdown": MARKDOWN,
    "a title before": f"Results of run 5\n\n{MARKDOWN}",
    "a comment before": f"# run 5, K=2\n{TWO}",
    "text after": f"{TWO}\nDone in 3 s\nBye, now\n",
    "a box": "┏━━━━┳━━━┓\n┃ Drafts ┃ Draft tokens ┃ Accepted ┃\n┡━━━━╇━━━┩\n│ 100 │ 200 │ 120 │\n└────┴───┘\n",
}
START = "task,drafted,accepted\na,100,80\n"
REFUSED_TABLES = {
    "runs of two K": ("k,num_drafts,num_draft_tokens,num_accepted_tokens\n1,100,100,80\n2,100,200,120\n", "settings"),
    **{name: (f"{name},drafted,accepted\na,100,80\nb,100,60\n", "settings") for name in ("checkpoint", "run", "engine")},
    "a short row": (f"{HEADER}\n{ROW}\nb,50\n", ":3: a row of 2 cells"),
    "no drafted tokens": ("run,num_accepted_tokens\na,120\n", "no draft counts"),
    "no draft tokens": ("author,drafts,accepted\nAnn,12,3\n", "no draft counts"),
    "shares": ("task,drafted,accepted %\na,100,80\n", "no draft counts"),
    **{f"a row {row}": (f"{START}{row}\n", ":3: the counts")
       for row in ("b,1e5,3e4", "b,-,-", "b,,", "b,100,180", "b,4.0,1.8", "task,drafted,accepted")},
    "a row without rounds": (f"{TWO}c,-,40,30\n", ":4: the counts"),
    "a first row": ("task,drafted,accepted\na,-,-\n", ":2: the counts"),
    "columns of two runs": ("drafted,accepted,drafted,accepted\n100,80,100,60\n", ":2: the counts"),
    "a table below": (f"{START}Then:\nb,100,60\n", "several tables"),
    **{f"a row named {name}": (f"{START}b,300,30\n{name},200,55\n", "totals, statistics")
       for name in ("all", "Mean", "std", "min", "max", "Average of 2", "Total", "warmup")},
    "totals of parts": ("part,task,drafted,accepted\nx,a,9,8\nx,total,9,8\ny,b,3,1\ny,total,3,1\n", "totals"),
    "copied drafts": ("task,method,drafted,accepted\na,ngram,100,80\n", "copied"),
    "a long table": (START + "a,100,80\n" * 10_000, ":10002: more than"),
}  # fmt: skip


@loop("text", TABLES.values(), ids=TABLES)
def test_tables_with_a_column_for_each_count(text):
    found = read(text)
    assert (found.num_drafts, found.draft_tokens, found.accepted) == (100, 200, 120)


@loop(("text", "words"), REFUSED_TABLES.values(), ids=REFUSED_TABLES)
def test_tables_that_are_not_of_one_run(text, words):
    with pytest.raises(EngineError, match=words):
        read(text)


def test_what_is_noted_of_a_table():
    """That rows are added, and settings by which the counts are not the head's."""
    assert read("| task | drafted | accepted |\n| a | 100 | 80 |\n| b | 10,000 | 3,000 |\n").accepted == 3080
    assert (read(TWO).notes, read(TABLES["commas"]).notes) == ((f"2 {RUNS}",), ())
    found = read("task,method,num_speculative_tokens,drafted,accepted\na,eagle3,2,100,80\n")
    assert (found.k, len(found.overrides)) == (2, 1)


def test_a_line_whose_tag_says_what_is_counted():
    """Names that are of any rejection sampling, behind a tag of speculative decoding, with rounds."""
    found = read("INFO [spec] rounds=100 proposed=200 accepted=120 alpha=0.600\n")
    assert (found.num_drafts, found.draft_tokens, found.accepted) == (100, 200, 120)
