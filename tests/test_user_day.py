"""Jobs of a user, as scripts of commands: the sentences that lead from one command to the next, and where it ends.

The other two are elsewhere: a head that goes to an engine in `test_adopt`, a head of one's own loop in `test_grpo`.
"""

import json
import re
import shlex

import pytest
from safetensors.torch import load_file, save_file

import nextn
from nextn.checkpoint.checkpoint import SHIPPED

LOG = (
    "SpecDecoding metrics: Mean acceptance length: 1.01, Accepted throughput: 1.0 tokens/s, Drafted throughput: 99.0 "
    "tokens/s, Accepted: 12 tokens, Drafted: 1200 tokens, Per-position acceptance rate: 0.020, 0.005, "
    "Avg Draft acceptance rate: 1.0%\n"
)


@pytest.fixture
def tuned(tmp_path):
    """The bundled model as a fine-tune leaves it: the trunk alone, with the config that declares a head."""
    folder = tmp_path / "tuned"
    folder.mkdir()
    tensors = {}
    for file in sorted(SHIPPED.glob("*.safetensors")):
        tensors |= {name: value for name, value in load_file(file).items() if not name.startswith("mtp.")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((SHIPPED / name).read_bytes())
    return folder


@pytest.fixture
def prompts(tmp_path):
    lines = (SHIPPED / "prompts.jsonl").read_text().splitlines(keepends=True)[:6]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(lines))
    return path


def test_a_lost_head(tuned, here):
    """Audit names the command, restore takes the name of the bundled model, and audit is clean after it."""
    code, out, _ = here("audit", tuned)
    command = re.search(r"nextn restore \S+ --from BASE", out)[0]
    assert code == 1
    assert here(*shlex.split(command.replace("BASE", "tiny"))[1:])[0] == 0
    code, out, _ = here("audit", tuned, "--require-head", "--json")
    assert (code, json.loads(out)["modules"]) == (0, [0])


def test_a_gate_in_ci(tuned, prompts, tmp_path, here):
    """A lost head, undeclared too, is an error; the same head passes the gate, and other prompts are refused."""
    config = json.loads((tuned / "config.json").read_text()) | {"mtp_num_hidden_layers": 0}
    (tuned / "config.json").write_text(json.dumps(config))
    assert here("audit", tuned)[0] == 0
    assert here("audit", tuned, "--require-head")[0] == 1
    how = ("measure", "tiny", "-k", 1, "--temperatures", 0, "--max-tokens", 24, "--dtype", "float32")
    how += ("--backend", "torch")
    assert here(*how, "--prompts", prompts, "--out", tmp_path / "measure.json")[0] == 0
    code, out, _ = here(*how, "--prompts", prompts, "--baseline", tmp_path)  # the folder of the record
    assert (code, "keep the head" in out) == (0, True)
    record = json.loads((tmp_path / "measure.json").read_text())
    for figures in record["figures"]:
        figures["acceptance"], figures["interval_95"] = [2.0], [[1.99, 2.01]]
    (tmp_path / "better.json").write_text(json.dumps(record))
    code, out, _ = here(*how, "--prompts", prompts, "--baseline", tmp_path / "better.json")
    assert (code, "fell by more than 5.0%" in out) == (1, True)
    prompts.write_text('{"text": "def other("}\n')
    code, _, err = here(*how, "--prompts", prompts, "--baseline", tmp_path)
    assert (code, "other prompts" in err) == (2, True)


@pytest.mark.slow
def test_no_acceptance(prompts, tmp_path, here):
    """Twelve accepted drafts exclude "no draft is ever accepted"; the headline has its odds and what it assumes."""
    (tmp_path / "vllm.log").write_text(LOG)
    prompts.write_text("".join((SHIPPED / "prompts.jsonl").read_text().splitlines(keepends=True)[:8]))
    how = ("--prompts", prompts, "--max-tokens", 48, "--backend", "torch")
    code, out, _ = here("diagnose", "tiny", "--engine", tmp_path / "vllm.log", *how)
    assert code == 1
    assert "nothing-kept" not in out
    assert "if the engine is greedy" in out
    assert out.index("1. the engine serves this folder") < out.index("--drive")


def test_from_python():
    """Results are pooled by the public class."""
    model = nextn.load(SHIPPED)
    settings = nextn.Settings(num_speculative_tokens=2, max_tokens=8)
    results = nextn.generate(model, ["def add(", "import "], settings)
    assert nextn.Acceptance.of(results).num_drafted[0] == sum(each.acceptance.num_drafted[0] for each in results)
