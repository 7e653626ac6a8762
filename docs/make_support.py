"""Write the support matrix: docs/reference/support.md, and the summary in README.md.

It holds what the code can do and what was run: the family rows, the families that the tests train, the backend of a
tiny model of each, the engines whose logits the tests compare, and the record of real engines in
bench/results/engines.json.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from generated import DOCS, ROOT, replace_part, table, write

sys.path.insert(0, str(ROOT / "tests"))

import torch
from make_families import NAMES, SUPPORT
from test_oracle import CHECKED
from tiny import CONFIGS

from nextn.family_table import ENGINES, Family, rows, separate_rows
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.serve.engine_commands import FAMILY_FLAGS, SEPARATE_GGUF

PAGE = DOCS / "reference" / "support.md"
SERVE = DOCS / "how-to" / "serve.md"
README = ROOT / "README.md"
RECORD = ROOT / "bench" / "results" / "engines.json"
TESTS = ROOT / "bench" / "results" / "support.json"  # what tests/test_expert_forms.py ran, see support_record
GPU = ROOT / "bench" / "results" / "gpu.json"
# Beside what `nextn serve --print` adds: what SGLang's server arguments say.
_SEVERAL = ("SGLang turns on `--enable-multi-layer-eagle` by itself",)
MORE_FLAGS = {
    "mimo_v2": _SEVERAL,
    "step3p5": _SEVERAL,
    "gigachat3_5": _SEVERAL,
    **{family: (f"{NAMES[engine]}: `{' '.join(flags)}`",) for (engine, family), flags in FAMILY_FLAGS.items()},
    **dict.fromkeys(SEPARATE_GGUF, ("llama.cpp: `convert_hf_to_gguf.py --mtp` writes the head as a GGUF of its own",)),
}


def backends() -> dict[str, str]:
    """Return for each family with a tiny model the reason why it has no native backend; empty where it has one."""
    torch.set_num_threads(1)
    return {name: backend_for(Model.build(config)).reason for name, config in CONFIGS.items()}


def compared() -> dict[str, dict[str, str]]:
    """Return family -> engine -> version, where the engine's counters were compared with ours."""
    found: dict[str, dict[str, str]] = {}
    for key, pair in json.loads(RECORD.read_text())["pairs"].items():
        family, engine = key.split()
        version = pair["versions"].get(engine, "")
        found.setdefault(family, {})[engine.replace(".", "")] = version if version[:1].isdigit() else ""
    return found


def forms(row: Family, ran: dict[str, dict[str, list[str]]]) -> str:
    """Return how many pairs of forms of the experts, of trunk and head, were loaded; "-" without experts."""
    pairs = ran.get("expert forms", {}).get(row.name)
    return "-" if not pairs else f"{len(pairs)} of trunk and head"


def on_gpu() -> str:
    """Return the machine and date of `bench/gpu.py`, whose tests decode with a tiny model of each family."""
    found = json.loads(GPU.read_text())
    assert not found["stages"]["tests"]["failed"]
    return f"{found['machine']['name']}, {found['date']}"


def matrix(reasons: dict[str, str], runs: dict[str, dict[str, str]]) -> str:
    def line(row: Family) -> tuple[str, ...]:
        if row.trunk_kv:  # tests/test_shared_kv_head.py
            title = f"[{row.title}](families/{row.name}.md)"
            return (title, "yes", "-", "yes", "yes, with `--head`", "-", "-", "yes", "transformers", "-")
        engines = ", ".join(f"{NAMES[name]} {version}".strip() for name, version in runs.get(row.name, {}).items())
        native = "no" if not row.runs else f"no: {reasons[row.name]}" if reasons[row.name] else "yes"
        logits = ", ".join(CHECKED.get(row.name, ()))
        run = "yes" if row.runs else "no"
        title = f"[{row.title}](families/{row.name}.md)"
        gpu = "yes" if row.runs else "-"
        return (title, "yes", "yes", run, run, gpu, forms(row, ran), native, logits or "-", engines or "-")

    ran = json.loads(TESTS.read_text())
    gpu = f"decode on one {on_gpu()}"
    head = (
        "family",
        "audit",
        "fix",
        "measure, train",
        "decode",
        gpu,
        "expert forms",
        "native backend",
        "logits",
        "run in",
    )
    return table(head, map(line, (*rows(), *separate_rows())))


def summary(reasons: dict[str, str], runs: dict[str, dict[str, str]]) -> str:
    """The README's table: how many families, where this was run, and what is known about GPUs."""
    running = [row for row in rows() if row.runs]
    native = sum(not reasons[row.name] for row in running)
    engines = [f"{name} on {', '.join(sorted(names))}" for name, names in _by_engine(runs)]
    gpu = f"decoded on one {on_gpu()}"
    lines = [
        ("`audit`, `restore`, `convert`", f"{len(rows())} of {len(rows())}", "synthetic files of each", "not needed"),
        ("`measure`, `train`, `generate` (torch)", f"{len(running)}", "a tiny model of each, on CPUs", gpu),
        ("`generate` (native C++)", f"{native}", "a tiny model of each, on CPUs", "CPU only"),
        ("logits equal to transformers'", f"{len(CHECKED)}", ", ".join(sorted(CHECKED)), "not compared on GPUs"),
        ("draft counts equal to an engine's", f"{len(runs)}", "; ".join(engines), "engines on CPUs; SGLang not run"),
    ]  # fmt: skip
    return table(("what", "families", "tested with", "GPU"), lines)


def serving() -> str:
    """The table of docs/how-to/serve.md: which engines draft with a family's head, and flags beyond the usual ones."""
    runs = compared()

    def line(row: Family) -> tuple[str, ...]:
        words = [
            "yes" if row.engines[each].support == "runs" else SUPPORT[row.engines[each].support] for each in ENGINES
        ]
        ran = ", ".join(NAMES[name] for name in runs.get(row.name, {})) or "-"
        remarks = "; ".join((*MORE_FLAGS.get(row.name, ()), *_limits(row)))
        return (f"[{row.title}](../reference/families/{row.name}.md)", *words, remarks, ran)

    head = ("family", "vLLM", "SGLang", "llama.cpp", "transformers", "more flags, remarks", "run here")
    return table(head, map(line, rows()))


def _limits(row: Family) -> Iterator[str]:
    """Facts of the row that decide about flags or acceptance, for engines that draft with the head."""
    for name, title in NAMES.items():
        engine = row.engines[name]
        if engine.support != "runs":
            continue
        if engine.layers:
            yield f"{title}: trunks of {' or '.join(map(str, engine.layers))} layers"
        if engine.hidden or engine.next_hidden:
            yield f"{title}: passes a different hidden state from the family's; acceptance may be lower"


def _by_engine(runs: dict[str, dict[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for engine, name in NAMES.items():
        families = [family for family, engines in runs.items() if engine in engines]
        if families:
            yield name, families


def pages() -> dict[Path, str]:
    reasons, runs = backends(), compared()
    return {
        SERVE: replace_part(SERVE.read_text(), "serve", serving()),
        PAGE: replace_part(PAGE.read_text(), "matrix", matrix(reasons, runs)),
        README: replace_part(README.read_text(), "support", summary(reasons, runs)),
    }


if __name__ == "__main__":
    write(pages())
