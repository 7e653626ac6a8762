"""The library as the golden files see it: plain numbers and lists under neutral names.

A rename in the library changes this file and neither the golden files nor `test_golden.py`. Prose and timings are left
out, since sentences may be rewritten and seconds differ.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tiny import FIXTURES, forked, refrain
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.decoding.generate import Result, generate
from nextn.decoding.trace import TraceRow, trace
from nextn.evaluate import benchmark, decoding_costs
from nextn.evaluate.acceptance_curve import AcceptanceFigures
from nextn.evaluate.benchmark import BenchmarkPlan as BenchPlan
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.workload import Prompt
from nextn.evaluate.workload import ReferencePlan as MeasurePlan
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import Sampling, Settings
from nextn.stats.speedup import Costs, Spread

Golden = dict[str, Any]

NAMES = tuple(sorted(folder.name for folder in FIXTURES.iterdir()))
_BACKENDS = {"torch": "torch", "native": "auto"}  # neutral name -> the library's
_LENGTHS = (20, 9, 33)  # tokens of the three prompts


def sections(name: str, model: Model) -> dict[str, Callable[[], Golden]]:
    """Section of the fixture's golden file -> what computes it. model: the fixture in float32."""
    return {
        "decode": lambda: _decode(name, model),
        "text": lambda: _text(name, model),
        "measure": lambda: _measure(name, model),
        "audit": lambda: _audit(name),
        "trace": lambda: _trace(name, model),
        "bench": lambda: _bench(name, model),
    }


def _prompts(name: str, count: int, length: int) -> list[list[int]]:
    """Token ids in the language that the fixture speaks."""
    speak = forked if name.endswith("_fork") else refrain
    return speak(count, length, seed=10**6).tolist()


def _decode(name: str, model: Model) -> Golden:
    """Both backends at K = 0 and 4, greedy and at T = 1, over a batch of three prompts of different lengths."""
    prompts = [prompt[:length] for prompt, length in zip(_prompts(name, 3, max(_LENGTHS)), _LENGTHS, strict=True)]
    found: Golden = {}
    for backend, path in _BACKENDS.items():
        chosen = backend_for(model, path).name
        for temperature in (0.0, 1.0):
            for k in (0, 4):
                settings = Settings(num_speculative_tokens=k, sampling=Sampling(temperature), max_tokens=24, seed=7)
                results = generate(model, prompts, settings, backend=path)
                found[f"{backend} T={temperature:g} K={k}"] = {
                    "chosen": chosen,
                    "sequences": [_sequence(result) for result in results],
                }
    return found


def _sequence(result: Result) -> Golden:
    """Rounds include the one of the prefill, which drafts nothing."""
    return {
        "tokens": list(result.tokens),
        "finish": result.finish,
        "num_rounds": len(result.rounds),
        "drafted": [len(part.drafts) for part in result.rounds],
        "accepted": [part.num_accepted for part in result.rounds],
    }


def _text(name: str, model: Model) -> Golden:
    """Detokenized texts, with characters of several tokens and broken ones, and a stop string."""
    spoken = replace(model, tokenizer=_tokenizer(model.trunk.vocab_size))
    prompts = _prompts(name, 2, 17)
    settings = Settings(num_speculative_tokens=3, max_tokens=24)
    whole = [result.text for result in generate(spoken, prompts, settings, backend="torch")]
    stop = next(iter(re.findall(r"[^\ufffd]{2}", whole[0][6:])))
    stopped = generate(spoken, prompts, settings, backend="torch", stop=[stop])
    return {
        "texts": whole,
        "stop": stop,
        "stopped": [[result.text, len(result.tokens), result.finish] for result in stopped],
    }


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: letters, and bytes of characters of two and three bytes."""
    letters = [*range(ord("a"), ord("z") + 1), *b" .,!?"]
    pieces = [0xC3, 0xA9, 0xA8, 0xE2, 0x82, 0xAC, 0x84]
    chosen = (letters + pieces * vocab_size)[: vocab_size - 1]
    spelled = {byte: _spelled(byte) for byte in set(chosen)}
    vocabulary = {spelled[byte]: place for place, byte in enumerate(dict.fromkeys(chosen))}
    for place in range(len(vocabulary), vocab_size):
        vocabulary[f"<{place}>"] = place
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _spelled(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return chr(byte) if byte in printable else chr(256 + sum(other not in printable for other in range(byte)))


def _measure(name: str, model: Model) -> Golden:
    """The figures of `nextn measure`, its controls, and what the decoder counted."""
    prompts = [Prompt(tuple(row), "xy"[place % 2]) for place, row in enumerate(_prompts(name, 4, 33))]
    found = reference_acceptance(model, prompts, MeasurePlan(num_speculative_tokens=3, max_tokens=24, backend="torch"))
    controls = found.controls
    assert controls is not None
    return {
        "how": {"parallel": "at once", "stepped": "in steps"}[found.scoring_pass],
        "figures": [_figures(row) for row in found.table()],
        "controls": {
            "all": controls.all_positions,
            "shifted": controls.shifted,
            "shuffled": controls.shuffled,
            "chance": controls.chance,
            "median_rank": controls.median_rank,
            "distinct": controls.distinct_drafts,
        },
        "decoder": {
            f"{temperature:g}": [
                drawn.pooled.num_drafted,
                drawn.pooled.num_accepted,
                drawn.pooled.num_rounds,
                drawn.pooled.emitted,
            ]
            for temperature, drawn in found.generated.items()
            if drawn.pooled is not None
        },
        "num_warnings": len(found.warnings),
    }


def _figures(row: AcceptanceFigures) -> Golden:
    return {
        "of": [row.temperature, row.rule, row.num_speculative_tokens, row.domain, row.num_texts],
        "rates": [[rate.value, rate.low, rate.high] for rate in row.rates],
        "length": [row.length.value, row.length.low, row.length.high],
        "offered": list(row.num_drafted),
        "accepted": list(row.num_accepted),
    }


def _audit(name: str) -> Golden:
    """The report of `nextn audit` of the fixture as it is and without one of the head's tensors."""
    checkpoint = Checkpoint.open(FIXTURES / name)
    stored = Inventory.of(checkpoint).stored
    lost = min(stored.values())
    broken = replace(checkpoint, tensors={key: info for key, info in checkpoint.tensors.items() if key != lost})
    found: Golden = {}
    for label, each in (("whole", checkpoint), (f"without {lost}", broken)):
        report = audit(each)
        found[label] = {
            "family": report.family,
            "heads": [report.declared, list(report.modules)],
            "clean": report.clean,
            "findings": [[finding.severity, finding.rule] for finding in report.findings],
        }
    return found


def _trace(name: str, model: Model) -> Golden:
    """The rows of `nextn trace`: of what each yields, the numbers alone."""
    rows = trace(model, _prompts(name, 1, 9)[0], Settings(num_speculative_tokens=3, max_tokens=9))
    return {"rows": [_row(row) for row in rows]}


def _row(row: TraceRow) -> str:
    yields = " ".join(re.findall(r"\d+", row.gives))
    return f"{row.round} {row.phase} {row.by} {row.position} {row.token} {row.hidden} : {yields}"


def _bench(name: str, model: Model) -> Golden:
    """What `nextn bench` reports beside times, with costs of a round that are given."""
    prompts = [Prompt(tuple(row), "xy"[place % 2]) for place, row in enumerate(_prompts(name, 2, 33))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding_costs, "copy_bandwidth", lambda device: 1e9)
        patch.setattr(benchmark, "measure_costs", _costs)
        report = benchmark.run_benchmark(
            model, prompts, BenchPlan(k_values=(2,), max_tokens=16, repeats=1, backend="torch")
        )
    return {
        "figures": [
            {
                "of": [row.temperature, row.num_speculative_tokens, row.domain, row.all_repetitive],
                "counts": [row.acceptance.num_drafted, row.acceptance.num_accepted, row.acceptance.num_rounds],
                "emitted": row.acceptance.emitted,
                "bytes_per_token": row.bytes_per_token,
                "expected": row.expected_speedup,
            }
            for row in report.table()
        ],
        "texts": [[run.prompt, run.num_speculative_tokens, run.temperature, *run.tokens] for run in report.runs],
        "identical": list(report.identical),
        "looping": {f"{temperature:g}": sorted(places) for temperature, places in report.repetitive.items()},
        "bytes": [report.machine.step_bytes, report.machine.draft_bytes],
        "context": report.costs.context,
    }


def _costs(model: Model, *, num_speculative_tokens: int, context: int, backend: str, min_s: float) -> Costs:
    """As `measure_costs`, without a clock: each further token in a verification costs a tenth of a baseline step."""
    steps = [Spread.of([1 + more / 10]) for more in range(num_speculative_tokens + 1)]
    return Costs(1, context, tuple(steps), Spread.of([0.25]))
