"""The README runs, and its figures are those of the committed records."""

import json
import re
from pathlib import Path

import pytest
from tiny import CONFIGS
from typer.testing import CliRunner

from nextn.cli import app
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.families import rows
from nextn.model.model import Model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run(tmp_path, monkeypatch):
    """Each Python block runs as it is; `demo/model` is a byte-level model with a head, as the demo saves it."""
    config = CONFIGS["glm4_moe"] | {"vocab_size": 264, "max_position_embeddings": 128}
    Model.build(config, tokenizer=byte_tokenizer()).save(tmp_path / "demo" / "model")
    monkeypatch.chdir(tmp_path)
    assert len(blocks("python")) == 2
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize(
    "line", [line for block in blocks("bash") for line in block.splitlines() if line.startswith("nextn ")]
)
def test_commands_exist(line):
    """Every command and option in the README exists."""
    verb, *rest = line.split("#")[0].split()[1:]
    help_text = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"})
    assert help_text.exit_code == 0, line
    for option in (word for word in rest if word.startswith("-") and word != "-"):
        assert option in help_text.output, f"{option} in {line!r}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)`", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def record(name):
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def section(title):
    """The text of a section in one line, whatever its line breaks."""
    return " ".join(re.search(rf"^## {title}\n(.*?)(?=^## )", README, re.MULTILINE | re.DOTALL)[1].split())


def test_figures_are_the_records():
    """The table of the README is what `nextn demo --json` wrote into the committed record."""
    demo = record("demo")["shipped"]["native"]
    for name, title in (("greedy", "greedy, identical output"), ("temperature_1", "temperature 1, same distribution")):
        part = demo[name]
        rates = ", ".join(f"{rate:.2f}" for rate in part["acceptance"])
        speeds = f"{part['plain_tokens_per_s']:.0f} | {part['mtp_tokens_per_s']:.0f} | **{part['speedup']:.2f} x**"
        assert f"| {title} | {speeds} | {part['acceptance_length']:.2f} | {rates} |" in README
    assert demo["identical_output"]


def test_audit_figures_are_the_record():
    """Seconds, memory and bytes of the audit as bench/audit.py last measured them."""
    audit = record("audit")
    hub, folder = audit["hub"], audit["folder"]
    share = f"{100 * hub['share_of_bytes']:.3f} %"
    assert (
        f"| {hub['seconds']:.1f} | {hub['peak_mb']:.0f} MB | {share} of the bytes, {hub['requests']} requests |"
        in README
    )
    assert f"| a local folder | {folder['seconds']:.1f} | {folder['peak_mb']:.0f} MB | |" in README


def bench_figures(name, temperature, drafts):
    """Plain tokens/s, the figures with MTP over all prompts, and the number of prompts behind them."""
    found = record(name)
    plain, mtp = (
        each
        for k in (0, drafts)
        for each in found["figures"]
        if (each["temperature"], each["drafts"], each["domain"]) == (temperature, k, "all")
    )
    texts = found["texts"][f"{temperature:g}"]
    loops = 0 if mtp["only_loops"] else len(texts["looping"])
    return plain["tokens_per_s"]["median"], mtp, texts["prompts"] - loops


def decode_lines():
    """The table of bench/decode.py."""
    found = record("decode")
    fast, plain, long = found["costs"]["fast"], found["costs"]["plain"], found["ms_per_token"]
    step = [1000 * each["step_s"][0]["median"] for each in (fast, plain)]
    verify = [", ".join(f"{each['v'][m - 1]:.2f}" for m in (5, 9, 13)) for each in (fast, plain)]
    contexts = [", ".join(f"{long[path][size]:.1f}" for size in ("512", "2048", "8192")) for path in ("fast", "plain")]
    forced = {each["rate"]: each for each in found["forced"] if each["drafts"] == 4}
    speeds = ", ".join(f"{forced[rate]['speedup']:.2f} x" for rate in (0.7, 0.9))
    share = f"{100 * min(forced[rate]['achieved'] for rate in (0.7, 0.9)):.0f}"
    yield f"{found['parameters'] / 1e6:.0f} M parameters, bf16, two CPU cores, batch 1"
    bound = f"{found['step_over_bound']:.2f} x the time that reading its weights takes"
    yield f"| one step of plain decoding | **{step[0]:.1f} ms**, {bound} | {step[1]:.1f} ms |"
    yield f"| verifying 5, 9, 13 tokens, in plain steps | {verify[0]} | {verify[1]} |"
    yield f"| plain step at a context of 512, 2,048, 8,192 | {contexts[0]} ms | {contexts[1]} ms |"
    yield f"| MTP at forced acceptance 0.7, 0.9 (K = 4) | {speeds} ({share} % of the formula) | |"


def recipe_lines():
    """The recipes `code` and `hybrid`, and batches of the former."""
    for title, name, temperature, drafts in (
        ("greedy, K = 11, {} non-repetitive texts", "code-greedy", 0.0, 11),
        ("greedy, adaptive K", "code-greedy", 0.0, -1),
        ("temperature 1, K = 11, {} texts", "code", 1.0, 11),
        ("temperature 1, adaptive K", "code", 1.0, -1),
    ):
        plain, mtp, texts = bench_figures(name, temperature, drafts)
        speeds = f"{plain:.0f} | {mtp['tokens_per_s']['median']:.0f} | **{mtp['speedup']['median']:.2f} x**"
        yield f"| {title.format(texts)} | {speeds} | {mtp['acceptance_length']:.1f} |"
    identical = [record(name)["identical"] for name in ("code", "code-greedy")]
    assert all(each["same"] == each["texts"] for each in identical)
    yield f"All {sum(each['texts'] for each in identical)} greedy texts with MTP are the plain ones, token for token."
    for name, temperature, drafts, where in (
        ("code-greedy-best", 0.0, 11, "greedy"),
        ("code-greedy-least", 0.0, 11, "greedy"),
        ("code-small-greedy", 0.0, 8, "greedy"),
        ("code-small", 1.0, 9, "at temperature 1"),
        ("code-greedy-amx", 0.0, 15, "greedy"),
        ("code-amx", 1.0, 9, "at temperature 1"),
    ):
        plain, mtp, _ = bench_figures(name, temperature, drafts)
        speeds = f"{plain:,.0f} to {mtp['tokens_per_s']['median']:,.0f} tokens/s {where}"
        told = f"{mtp['speedup']['median']:.2f} x at K = {drafts}, AL {mtp['acceptance_length']:.1f}"
        yield f"{speeds} ({told}; `bench/results/{name}.json`)"
    plain, mtp, _ = bench_figures("hybrid", 1.0, 6)
    speeds = f"{mtp['tokens_per_s']['median']:,.0f} against {plain:,.0f} tokens/s"
    yield f"{speeds}, {mtp['speedup']['median']:.2f} x at temperature 1 and K = 6"
    batches = {each["batch"]: each for each in record("batches")["batches"] if not each["temperature"]}
    one, four, eight, sixteen = (f"{batches[size]['speedup']:.1f}" for size in (1, 4, 8, 16))
    assert {each["drafts"] for each in batches.values()} == {4}
    yield f"{one}, {four}, {eight} and {sixteen} x at batches of 1, 4, 8 and 16 (K = 4, greedy;"


def peer_lines():
    """The table of bench/peers.py: tokens/s at K = 0, 1, 2, 4; nothing where an engine cannot."""
    found = record("peers")
    figures = {(each["engine"], each["variant"], each["drafts"]): each for each in found["figures"]}
    yield f"GLM-4.5's layout, 16 layers, {found['parameters'] / 1e6:.0f} M parameters"
    for title, engine, variant in (
        ("nextn, bf16", "nextn", "bfloat16"),
        ("llama.cpp, bf16", "llama.cpp", "bfloat16"),
        ("vLLM on CPUs, compiled, bf16", "vllm", "compiled"),
        ("vLLM on CPUs, eager, bf16", "vllm", "eager"),
        ("transformers `generate`, float32", "transformers", "float32"),
        ("transformers `generate`, bf16", "transformers", "bfloat16"),
    ):
        row = [figures.pop((engine, variant, drafts), None) for drafts in (0, 1, 2, 4)]
        cells = ["" if each is None else f"{each['tokens_per_s']['median']:.0f}" for each in row]
        cells[3] = f"**{cells[3]}**" if engine == "nextn" else cells[3]
        cells.append("" if row[3] is None else f"{row[3]['acceptance_length']:.2f}")
        yield " ".join(f"| {title} | {' | '.join(cells)} |".split())
    assert not figures


# Numbers that are no measurements, or are in no record.
PHRASES = (
    "14 of the 27 families", "C++20", "batch 1", "GLM-4.5's layout, 16 layers", "Qwen3.5's layout",
    "both stages in 27 minutes", "AVX-512 (Zen 5)", "--asked 600 --count 60", "--repeats 11",
    "256 wide, 11 M parameters",
    "K = 1 | K = 2 | K = 4 | AL at K = 4",
)  # fmt: skip


def test_figures_of_speed_are_the_records():
    """Catches a new record that the README does not show, and a figure in the README that is in no record."""
    rest = section("Fast")
    for line in (*decode_lines(), *recipe_lines(), *peer_lines()):
        assert line in rest, line
        rest = rest.replace(line, "")
    for phrase in PHRASES:
        rest = rest.replace(phrase, "")
    assert re.findall(r"\b\d[\d,.]*", rest) == []


def test_families_are_counted():
    """The numbers of families, and of those that run."""
    running = sum(row.runs for row in rows())
    assert f"* **Families**, {len(rows())} of them" in README
    assert f"; {running} of them, those" in README.replace("\n ", "")
