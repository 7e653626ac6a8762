"""Making a canary: files that engines take, a record that holds, the same to the last digit in another process."""

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_docs import DOCS
from tiny import FIXTURES, refrain

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.conformance import build as canary
from nextn.conformance.build import (
    MAX_K,
    PASSES,
    build,
    build_record,
    build_vector,
    rounds_of_decoding,
    rounds_of_scores,
)
from nextn.conformance.canary_model import SHAPES, documents, prompts
from nextn.conformance.record import CLAUSES, FILE, Canary
from nextn.decoding.generate import generate
from nextn.errors import ConfigError
from nextn.evaluate.faults import FAULTS
from nextn.evaluate.teacher_forced import ReferenceText, score_texts, trunk_outputs
from nextn.model.model import Model
from nextn.settings import Contract, Settings

SMALL = {"steps": (3, 3), "count": 2, "tokens": 8}
VECTORS = {"one module": ("glm_one", 4), "two modules": ("glm_two", 5)}


def digest(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(folder).iterdir())}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """built(family): the folder of a short build."""
    root = tmp_path_factory.mktemp("canaries")

    @cache
    def of(family):
        build(root / family, family, **SMALL)
        return root / family

    return of


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.slow
def test_a_canary_is_what_the_family_publishes(family, built):
    """Experts one by one, no finding of `audit`, special tokens, and a vocabulary that fits."""
    model = Model.load(built(family))
    assert model.family.name == family
    names = set(json.loads((built(family) / "model.safetensors.index.json").read_text())["weight_map"])
    if "n_routed_experts" in SHAPES[family].config:
        assert "model.layers.2.mlp.experts.3.down_proj.weight" in names
        assert not any("gate_up_proj" in name for name in names)
    assert set(SHAPES[family].special_tokens) <= set(model.tokenizer.get_added_vocab())
    assert [each for each in audit(Checkpoint.open(built(family))).findings if each.severity == "error"] == []
    assert sum(file.stat().st_size for file in built(family).iterdir()) < 12e6


@pytest.mark.slow
def test_the_same_in_another_process(built, tmp_path):
    """Weights and record, byte for byte; another seed gives others."""
    code = "from nextn.conformance.build import build; from pathlib import Path; "
    code += f"build(Path({str(tmp_path / 'twin')!r}), 'glm4_moe', **{SMALL!r})"
    threads = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=threads)
    assert digest(tmp_path / "twin") == digest(built("glm4_moe"))
    assert list(documents(2, 40, seed=0)) != list(documents(2, 40, seed=1))


@pytest.mark.slow
def test_bfloat16_is_rounded_before_it_is_counted(tmp_path):
    build(tmp_path / "half", "glm4_moe", dtype="bfloat16", **SMALL)
    stored = Model.load(tmp_path / "half").trunk.dtype
    assert stored == torch.bfloat16
    assert Canary.read(tmp_path / "half").family == "glm4_moe"


def test_choices(tmp_path):
    with pytest.raises(ConfigError, match="glm4_moe"):
        build(tmp_path / "no", "llama")
    with pytest.raises(ConfigError, match="float32"):
        build(tmp_path / "no", "glm4_moe", dtype="fp8")


def test_the_language_counts():
    """A word again and again, behind it a digit that goes on."""
    words = prompts(8, seed=3)[-1].split()
    assert len({word[:-1] for word in words[:-1]}) == 1
    digits = [int(word[-1]) for word in words[:-1]]
    assert len({(b - a) % 10 for a, b in pairwise(digits)}) == 1
    assert len(set(map(len, prompts(8, seed=3)))) == 8


@pytest.mark.more
@pytest.mark.parametrize("name", ["glm_one", "glm_two"])
def test_rounds_are_those_of_decoding(name, trained):
    """What is walked from columns equals what the decoder does, at every K, round by round."""
    model, asked, tokens = trained[name], refrain(4, 20, seed=77).tolist(), 20
    texts = [
        ReferenceText(tuple(prompt), each.tokens)
        for prompt, each in zip(asked, generate(model, asked, _plain(tokens), backend="torch"), strict=True)
    ]
    found = rounds_of_scores([*score_texts(model, texts, trunk_outputs(model.trunk, texts), MAX_K)], tokens)
    for k in range(1, MAX_K + 1):
        assert found[k] == rounds_of_decoding(model, asked, k, Contract(), tokens=tokens)


def _plain(tokens):
    return Settings(num_speculative_tokens=0, max_tokens=tokens + MAX_K + 1, eos=())


@pytest.mark.more
def test_gaps_mark_near_ties(trained, tmp_path):
    """Prompts without near ties come first; positions of those that are left are listed."""
    asked = [*refrain(3, 33, seed=5).tolist(), [5] * 9]
    found = build_record(FIXTURES / "glm_one", asked, count=3, tokens=8)
    assert [5] * 9 not in [each["ids"] for each in found["prompts"]] or any(each["close"] for each in found["prompts"])
    for each in found["prompts"]:
        assert len(each["gaps"]) == len(each["tokens"]) == 8 + MAX_K + 1
        assert each["close"] == [place for place, gap in enumerate(each["gaps"][:8]) if gap <= 0.25]


def test_gaps_are_those_of_the_next_best(trained):
    """Of each new token to the trunk's second choice, in its own column."""
    model, prompt = trained["glm_one"], refrain(1, 12, seed=5)[0].tolist()
    ((*new,),) = [each.tokens for each in generate(model, [prompt], _plain(4), backend="torch")]
    found = canary._gaps(model, prompt, new)
    assert len(found) == len(new)
    for place, (token, gap) in enumerate(zip(new, found, strict=True)):
        probs = model.trunk.logits(model.trunk(torch.tensor([prompt + new[:place]])).final_hidden)[0, -1].log_softmax(
            -1
        )
        others = probs[torch.arange(len(probs)) != token]
        assert gap == pytest.approx((probs[token] - others.max()).item(), abs=1e-4)


@pytest.mark.parametrize(("count", "chosen"), [(2, "cd"), (3, "bcd"), (4, "abcd")])
def test_prompts_of_sure_texts_come_first(monkeypatch, count, chosen):
    """Those that end, then those with a near tie among the tokens that count, are left out; the order stays."""
    texts = {"a": (1, 9, 1), "b": (1, 2, 3), "c": (1, 2, 3), "d": (1, 2, 3)}
    gaps = {"a": [1.0, 1.0, 1.0], "b": [1.0, 0.25, 1.0], "c": [1.0, 1.0, 0.0], "d": [1.0, 1.0, 1.0]}
    model = SimpleNamespace(trunk=SimpleNamespace(config=SimpleNamespace(eos_token_id=9)))
    monkeypatch.setattr(
        canary, "generate", lambda _, asked, *__, **___: [SimpleNamespace(tokens=texts[x]) for x in asked]
    )
    monkeypatch.setattr(canary, "_gaps", lambda _, prompt, __: gaps[prompt])
    assert "".join(canary._choose(model, list(texts), count, 2)) == chosen


@pytest.mark.more
def test_what_a_record_holds(monkeypatch):
    """Every reading has rounds at every K; near ties of the tokens that count; the second load is the coarse one."""
    loaded, load = [], Model.load
    monkeypatch.setattr(Model, "load", lambda *at, dtype, **how: loaded.append(dtype) or load(*at, dtype=dtype, **how))
    monkeypatch.setattr(canary, "_gaps", lambda *_: [1.0, 1.0, 0.25, 0.26, *[0.0] * (MAX_K + 1)])
    found = build_record(FIXTURES / "glm_one", refrain(2, 20, seed=5).tolist(), count=2, tokens=4)
    assert [each["close"] for each in found["prompts"]] == [[2], [2]]
    assert loaded == [torch.float32, torch.bfloat16]
    assert {tuple(each["rounds"]) for each in found["readings"]} == {("1", "2", "3", "4")}
    assert "stale-head-cache" in {each["name"] for each in found["readings"]}
    assert {each["name"] for each in found["sampled"]["rules"]} == {"ratio", "block", "argmax", "match"}


def vectors(trained):
    return {
        title: build_vector(trained[name], refrain(1, 8, seed=seed)[0].tolist(), k=3, num_rounds=2)
        for title, (name, seed) in VECTORS.items()
    }


def test_vectors_of_the_contract_are_fresh(trained):
    """docs/reference/contract.json is what the decoder does, and the page's tables hold its numbers."""
    found = vectors(trained)
    assert json.loads((DOCS / "reference" / "contract.json").read_text()) == found
    page = (DOCS / "reference" / "contract.md").read_text()
    for each in found.values():
        for step in each["rounds"]:
            for one in step["passes"]:
                assert f"| {' '.join(map(str, one['tokens']))} |" in page
            if step["drafts"]:
                assert f"accepts {step['kept']}, emits {' '.join(map(str, step['emitted']))} |" in page


def test_every_clause_is_explained():
    """The page and the code name the same clauses, in the same order, and the page has each one's public threads."""
    page = (DOCS / "reference" / "contract.md").read_text()
    assert re.findall(r"^## (C\d+) (.+)$", page, re.M) == [(clause.id, clause.name) for clause in CLAUSES]
    parts = {part.split(" ", 1)[0]: part for part in page.split("\n## ")[1:]}
    for fault in FAULTS:
        clause = next(clause for clause in CLAUSES if fault.name in clause.faults)
        assert any(issue in parts[clause.id] for issue in fault.issues) or not fault.issues


def test_rules_of_acceptance_are_recorded(built):
    """For each K and ending: block keeps no less than min(1, p/q), a comparison of two samples keeps less."""
    found = {each.name: each for each in Canary.read(built("glm4_moe")).sampled.rules}
    assert {name: each.fault for name, each in found.items()} == {
        "ratio": "", "block": "", "argmax": "argmax-drafts", "match": "exact-match"
    }  # fmt: skip
    for k, ending in ((k, ending) for k in range(1, MAX_K + 1) for ending in ("whole", "cut")):
        accepted = {name: sum(map(sum, each.counts[k][ending][1])) for name, each in found.items()}
        assert accepted["match"] < 0.9 * accepted["ratio"] <= 0.9 * accepted["block"] * (1 + 1e-6)
        offered = found["ratio"].counts[k][ending][0]
        assert len(offered) == PASSES
        assert {len(row) for row in offered} == {k}


@pytest.mark.more
def test_readings_have_no_torch(built):
    """An engine's author needs the record and nothing heavy."""
    code = "import sys; from pathlib import Path; import nextn.conformance.check\n"
    code += "from nextn.conformance.record import Canary; "
    code += f"Canary.read(Path({str(built('glm4_moe'))!r})); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert replace(Canary.read(built("glm4_moe") / FILE), folder="x").family == "glm4_moe"
