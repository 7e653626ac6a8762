"""Real engines on trained tiny checkpoints: they load what is written, say what we say, and count what `measure` says.

`make test-engines`. Each test asserts, and puts what it saw into the JSON file that NEXTN_ENGINES_OUT names.
"""

import hashlib
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch
from engine_faults import INJECTED, plant
from engines import environments
from engines.client import Unavailable
from engines.referee import DEFINITIONS, Ours, compared, counts_of, rates_of
from engines.serving import Bench, Served
from engines.starting import Starter

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.safetensors_file import write_json
from nextn.engines.counters import Counters, sum_counters
from nextn.evaluate import diagnose_engine as diagnosing
from nextn.evaluate.engine_run import EngineObservation
from nextn.evaluate.probe import probe, truncate_texts
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.model.model import Model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

KS, TOKENS, FAULT_K = (1, 2, 3, 4), 48, 3
PAIRS = [
    ("glm4_moe", "vllm"),
    ("deepseek_v3", "vllm"),
    ("glm4_moe", "llama.cpp"),
    ("qwen3_5", "llama.cpp"),
    ("deepseek_v3", "transformers"),
    ("glm4_moe", "transformers"),
]
# vLLM's latent attention for CPUs with AMX takes no float32; its plain one does.
OPTIONS = {("deepseek_v3", "vllm"): {"attention": "CPU_MLA"}}
NEAR = 1e-3  # of logits in float32: another order of sums may choose the other token
ROOT = environments.default_folder()


def canary(family: str, seed: int = 0) -> Path:
    """A trained tiny checkpoint, built once; another shape or language is another folder."""
    from nextn.conformance import build, canary_model, record  # where engines are tested alone

    said = [repr(canary_model.shape_of(family)), *(Path(part.__file__).read_text() for part in (build, canary_model))]
    said.append(str(record.FORMAT))
    folder = ROOT / "canary" / f"{family}-{seed}-{hashlib.sha256(''.join(said).encode()).hexdigest()[:12]}"
    if not (folder / "canary.json").exists():
        build.build(folder, family, seed=seed)
    return folder


def prompts_of(folder: Path) -> list[tuple[int, ...]]:
    from nextn.conformance.record import Canary

    return [each.ids for each in Canary.read(folder).prompts]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The engines. One that is not built fails the tests that need it, and says how to build it."""
    made = Bench(Starter(ROOT, threads=1), tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def put():
    """put(section, key, record) adds to the JSON file, section by section; without a file, nothing is written."""
    out = os.environ.get("NEXTN_ENGINES_OUT")

    def write(section: str, key: str, record: dict) -> None:
        if not out:
            return
        path = Path(out)
        found = json.loads(path.read_text()) if path.exists() else {}
        found |= {"definitions": DEFINITIONS, "tokens": TOKENS}
        found.setdefault(section, {})[key] = {"date": date.today().isoformat(), **record}
        write_json(path, found)

    return write


@pytest.mark.parametrize(("family", "engine"), PAIRS, ids=lambda value: value)
def test_pair(family, engine, bench, put):
    """Loads the files as they are; greedy texts are ours; counts are ours, under the row or the engine's convention."""
    folder = canary(family)
    k_values = (1,) if engine == "transformers" else KS
    ours = Ours.of(str(folder), prompts_of(folder), tokens=TOKENS, num_speculative_tokens=max(k_values))
    more = OPTIONS.get((family, engine), {})
    served = bench.served(engine, folder, ours.prompts, k_values, TOKENS, **more)
    record = compared(ours, engine, served.plain, served.seen)
    put("pairs", f"{family} {engine}", {"versions": served.versions, "flags": served.flags, **record})
    agrees(record)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("modules", [2, 3, 4])
def test_several_modules(family, modules, bench, put, tmp_path):
    """transformers drafts with each module once: heads of the canary's module, several times."""
    folder = canary(family)
    model = Model.load(folder, dtype=torch.float32)
    several = Model.build(model.trunk.config.to_dict(), num_modules=modules, tokenizer=model.tokenizer)
    several.trunk.model.load_state_dict(model.trunk.model.state_dict())
    for module in several.head.stack:
        module.load_state_dict(model.head.stack[0].state_dict())
    several.save(tmp_path / "model", dtype=torch.float32)
    ours = Ours.of(str(tmp_path / "model"), prompts_of(folder), tokens=TOKENS, num_speculative_tokens=modules)
    served = bench.served("transformers", tmp_path / "model", ours.prompts, (modules,), TOKENS)
    record = compared(ours, "transformers", served.plain, served.seen)
    put("modules", f"{family} {modules}", {"versions": served.versions, **record})
    agrees(record)


def agrees(record: dict, *, most_flipped: int = 0) -> None:
    """Equal texts and counts; `most_flipped`: counts that near ties of drafts may change in all depths together."""
    for row in (record["plain"], *record["by_drafts"]):
        assert all(gap["gap"] < NEAR for gap in row["gaps"]), row["gaps"]
        assert row["identical"] == record["prompts"] - len(row["gaps"])
    for row in record["by_drafts"]:
        pairs = zip(row["counts"], row["convention_counts"], strict=True)
        flipped = sum(abs(theirs - ours) for theirs, ours in pairs) if most_flipped else 0
        assert row["same_under_convention"] or 0 < flipped <= most_flipped, (row["counts"], row["convention_counts"])
        assert row["inside"] or record["convention"], "a difference from measure that no convention explains"


@pytest.fixture(scope="module")
def whole(bench):
    """whole(engine): the canary without a fault; asked once."""
    folder, known = canary("glm4_moe"), {}

    def served(engine: str) -> Served:
        if engine not in known:
            known[engine] = bench.served(engine, folder, prompts_of(folder), (FAULT_K,), TOKENS)
        return known[engine]

    return served


@pytest.mark.parametrize("engine", ["llama.cpp", "vllm"])
@pytest.mark.parametrize("fault", INJECTED, ids=lambda fault: fault.name)
def test_injected_faults(fault, engine, whole, bench, put, tmp_path):
    """A fault in the files shows in an engine's counters, or is refused; what is wrong is named from the outside."""
    folder, bad = canary("glm4_moe"), tmp_path / "bad"
    plant(fault, folder, bad, other=canary("glm4_moe", 1))
    prompts, good = prompts_of(folder), whole(engine)
    record = {"does": fault.description, "drafts": FAULT_K, "good": rates_of(good.seen[0].counts, FAULT_K)}
    try:
        served = bench.served(engine, bad, prompts, (FAULT_K,), TOKENS)
    except Unavailable as reason:
        record["refused"] = str(reason).splitlines()[0][:200]
    else:
        seen = served.seen[0]
        record |= {"engine": rates_of(seen.counts, FAULT_K), "counts": counts_of(seen.counts, FAULT_K)}
        record["identical"] = sum(map(tuple.__eq__, seen.texts, good.plain.texts))
        record["diagnose"] = diagnosed(folder, prompts, seen.counts)
    record["audit"] = [each.rule for each in audit(Checkpoint.open(str(bad))).findings if each.severity != "note"]
    if not fault.rules:
        record["measure"], record["probe"] = looked(bad, prompts)
    put("faults", f"{fault.name} {engine}", record)
    assert record.get("identical", len(prompts)) == len(prompts), "a head can make text slow, never other"
    if fault.cause and engine == "llama.cpp":  # vLLM has a convention of its own on top
        assert record["diagnose"] == [fault.cause]
    if fault.rules:
        assert set(fault.rules) & set(record["audit"])
    if fault.keys:
        assert record["probe"]["preferred"] == list(fault.keys)
    if fault.words:
        assert fault.words in record["probe"]["summary"]


def diagnosed(folder: Path, prompts: list[tuple[int, ...]], counts: tuple[Counters, ...]) -> list[str]:
    """What `nextn diagnose` names from the counters and the whole checkpoint."""
    model = Model.load(folder, dtype=torch.float32)
    plan = ReferencePlan(num_speculative_tokens=FAULT_K, temperatures=(0.0,), max_tokens=TOKENS, backend="torch")
    seen = EngineObservation(0.0, sum_counters(counts), prompt_indices=tuple(range(len(prompts))))
    texts = [Prompt(each, "all") for each in prompts]
    return list(diagnosing.compare(model, [seen], texts, plan, plan.num_speculative_tokens).named)


def looked(folder: Path, prompts: list[tuple[int, ...]]) -> tuple[dict, dict]:
    """What `nextn measure --probe` says."""
    model = Model.load(folder, dtype=torch.float32)
    plan = ReferencePlan(num_speculative_tokens=FAULT_K, temperatures=(0.0, 1.0), max_tokens=TOKENS, backend="torch")
    measured = reference_acceptance(model, [Prompt(each, "all") for each in prompts], plan)
    found = probe(model, truncate_texts(measured.generated[1.0].texts), FAULT_K, pairs=False)
    reported = {
        "rates": [each.as_record()["value"] for each in measured.figures(0.0).rates],
        "warnings": [each for each in measured.warnings if "texts" not in each],
    }
    return reported, {"preferred": list(found.preferred.keys), "summary": found.summary}


def test_head_trained_here(bench, put, tmp_path):
    """`nextn train --freeze-trunk` on the canary's trunk, without its head: clean, and the engines keep what we do."""
    from nextn.conformance import canary_model

    folder, run = canary("glm4_moe"), tmp_path / "run"
    text = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": each}) for _, each in canary_model.documents(512, 255, seed=5))
    text.write_text("\n".join(lines))
    settings = ["steps=200", "batch_size=16", "length=64", "depths=4", "eval_every=0"]
    how = ["--freeze-trunk", "--from", str(folder), "--init-head", "--data", str(text), "--json"]
    how += [part for each in settings for part in ("--set", each)]
    done = subprocess.run([sys.executable, "-m", "nextn", "train", str(run), *how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = audit(Checkpoint.open(str(run / "model")))
    assert report.clean, report.findings
    ours = Ours.of(str(run / "model"), prompts_of(folder), tokens=TOKENS, num_speculative_tokens=max(KS))
    for engine, k_values in (("transformers", (1,)), ("vllm", KS)):
        served = bench.served(engine, run / "model", ours.prompts, k_values, TOKENS)
        record = compared(ours, engine, served.plain, served.seen)
        put("head", engine, {"versions": served.versions, "settings": settings, **record})
        agrees(record)
        assert record["by_drafts"][0]["engine"][0] > 0.3, "a head that learned nothing proves nothing"
