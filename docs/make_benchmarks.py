"""Write the tables of docs/benchmarks, of copied drafts and in README.md, and the picture of a round."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generated import DOCS, ROOT, replace_part, table, write

PAGE = DOCS / "benchmarks" / "index.md"
CPUS = DOCS / "how-to" / "decode-on-cpus.md"
PICTURE = DOCS / "images" / "rounds.svg"
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
AMX, AVX512, AVX2, ZEN4, ZEN5 = "Xeon (AMX)", "Xeon (AVX-512)", "EPYC (AVX2)", "EPYC (Zen 4)", "EPYC (Zen 5)"


@dataclass(frozen=True)
class Run:
    """One record of `nextn bench`, and the K whose figures are shown; -1 is the adaptive K."""

    title: str
    record: str
    machine: str
    date: str
    temperature: float
    num_speculative_tokens: int


CODE = "recipe code, 27 M"
RUNS = (
    Run(CODE, "code-greedy", ZEN5, "2026-11-23", 0.0, 11),
    Run(CODE, "code-greedy-best", ZEN5, "2026-11-23", 0.0, 11),
    Run(CODE, "code-greedy-least", ZEN5, "2026-11-23", 0.0, 11),
    Run(CODE, "code-greedy", ZEN5, "2026-11-23", 0.0, -1),
    Run(CODE, "code", ZEN5, "2026-11-23", 1.0, 11),
    Run(CODE, "code", ZEN5, "2026-11-23", 1.0, -1),
    Run("16 layers of 256, 11 M", "code-small-greedy", ZEN5, "2026-11-22", 0.0, 8),
    Run("16 layers of 256, 11 M", "code-small", ZEN5, "2026-11-22", 1.0, 9),
    Run("first stage of it, earlier kernels", "code-greedy-amx", AMX, "2026-11-22", 0.0, 15),
    Run("first stage of it, earlier kernels", "code-amx", AMX, "2026-11-22", 1.0, 9),
    Run("recipe hybrid, Qwen3.5's layout", "hybrid", AMX, "2026-11-21", 1.0, 6),
)
PUBLISHED = (
    Run("SmolLM2-135M-Instruct, bf16", "smollm2", AVX2, "2026-11-27", 0.0, 3),
    Run("the same", "smollm2", AVX2, "2026-11-27", 0.7, 3),
    Run("SmolLM2-135M-Instruct, int8", "smollm2-int8", AVX2, "2026-11-27", 0.0, 3),
    Run("SmolLM2-135M-Instruct, bf16", "smollm2-amx", AMX, "2026-11-28", 0.0, 3),
    Run("the same", "smollm2-amx", AMX, "2026-11-28", 0.7, 3),
    Run("SmolLM2-135M-Instruct, bf16", "smollm2-avx512", AVX512, "2026-11-30", 0.0, 3),
    Run("the same", "smollm2-avx512", AVX512, "2026-11-30", 0.7, 3),
    Run("SmolLM2-135M-Instruct, bf16", "smollm2-zen4", ZEN4, "2026-11-30", 0.0, 3),
    Run("the same", "smollm2-zen4", ZEN4, "2026-11-30", 0.7, 3),
    Run("SmolLM2-135M-Instruct, int8", "smollm2-int8-avx512", AVX512, "2026-11-29", 0.0, 3),
)


def record(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def link(name: str) -> str:
    return f"`{name}`"


def figures(run: Run, k: int) -> dict[str, Any]:
    """Return the figures of a run's record over all prompts at this K."""
    for each in record(run.record)["figures"]:
        if (each["temperature"], each["num_speculative_tokens"], each["domain"]) == (run.temperature, k, "all"):
            return dict(each)
    raise KeyError(f"{run.record}: nothing at temperature {run.temperature}, K = {k}")


def speeds(run: Run) -> tuple[str, str, str, str]:
    """Return plain tokens/s, tokens/s with MTP, their ratio, and AL."""
    plain, mtp = figures(run, 0), figures(run, run.num_speculative_tokens)
    rates = (f"{each['tokens_per_s']['median']:,.0f}" for each in (plain, mtp))
    return (*rates, f"{mtp['speedup']['median']:.2f} x", f"{mtp['mean_acceptance_length']:.1f}")  # type: ignore[return-value]


def runs() -> str:
    def line(run: Run) -> tuple[str, ...]:
        k = "adaptive" if run.num_speculative_tokens < 0 else str(run.num_speculative_tokens)
        decoding = "greedy" if not run.temperature else f"T = {run.temperature:g}"
        return (run.title, decoding, k, *speeds(run), f"{run.machine}, {run.date}", link(run.record))

    head = ("model", "decoding", "K", "plain", "MTP", "speedup", "AL", "machine, date", "record")
    return table(head, map(line, (*PUBLISHED, *RUNS)))


def demo() -> str:
    """Figures of `nextn demo`: answers with the head in the package, code with a new head and with that one."""
    found = record("demo")
    new = found["new_head"]
    parts = (
        ("answers", "in the package", found["smollm2"]["native"]),
        ("held-out code", f"new, {new['steps']} steps", new),
        ("held-out code", "in the package", found["own_head"]),
    )
    rows = (
        (
            texts, head, decoding,
            *(f"{each[key][rate]:,.0f}" for rate in ("plain_tokens_per_s", "mtp_tokens_per_s")),
            f"{each[key]['speedup']:.2f} x", f"{each[key]['mean_acceptance_length']:.2f}",
        )
        for texts, head, each in parts
        for key, decoding in (("greedy", "greedy"), ("temperature_1", "T = 1"))
        if "speedup" in each[key]
    )  # fmt: skip
    return table(("texts", "head", "decoding", "plain", "MTP", "speedup", "AL"), rows)


def costs() -> str:
    found = record("decode")
    fast, plain, long = found["costs"]["fast"], found["costs"]["plain"], found["ms_per_token"]
    step = [f"{1000 * each['step_s'][0]['median']:.1f} ms" for each in (fast, plain)]
    verify = [", ".join(f"{each['v'][m - 1]:.2f}" for m in (5, 9, 13)) for each in (fast, plain)]
    contexts = [", ".join(f"{long[name][size]:.1f}" for size in ("512", "2048", "8192")) for name in ("fast", "plain")]
    forced = {each["rate"]: each for each in found["forced"] if each["num_speculative_tokens"] == 4}
    share = f"{100 * min(each['achieved'] for each in forced.values()):.0f} % of the formula"
    gains = ", ".join(f"{forced[rate]['speedup']:.2f} x" for rate in (0.7, 0.9))
    rows = [
        ("one baseline step", *step),
        ("in units of the time that reading its weights takes", f"{found['step_over_bound']:.2f}", ""),
        ("verifying 5, 9, 13 tokens, in baseline steps", *verify),
        ("baseline step at a context of 512, 2,048, 8,192, ms", *contexts),
        ("MTP at forced acceptance 0.7, 0.9 (K = 4)", gains, ""),
        ("the same", share, ""),
    ]  # fmt: skip
    title = f"{found['parameters'] / 1e6:.0f} M parameters, bf16, batch 1"
    return table((title, "native backend", "torch backend"), rows)


def batches() -> str:
    rows = [
        (str(each["batch"]), f"{each['plain']:,.0f}", f"{each['mtp']:,.0f}", f"{each['speedup']:.1f} x")
        for each in record("batches")["batches"]
        if not each["temperature"]
    ]
    return table(("sequences", "plain, tokens/s", "MTP (K = 4), tokens/s", "speedup"), rows)


def peers() -> str:
    """The recipe `code` in other engines, in 16 bits and float32."""
    names = (
        ("nextn, bf16", "nextn", "bfloat16"),
        ("llama.cpp, bf16", "llama.cpp", "bfloat16"),
        ("vLLM on CPUs, compiled, bf16", "vllm", "compiled"),
        ("vLLM on CPUs, eager, bf16", "vllm", "eager"),
        ("transformers `generate`, float32", "transformers", "float32"),
        ("transformers `generate`, bf16", "transformers", "bfloat16"),
    )
    return _engines("peers", names, (1, 2, 4))


def smollm2_peers() -> str:
    """SmolLM2-135M-Instruct with the head in the package, in nextn and llama.cpp."""
    names = (("nextn, bf16", "nextn", "bfloat16"), ("llama.cpp, bf16", "llama.cpp", "bfloat16"))
    return _engines("peers-smollm2", names, (3,))


def quantized_peers() -> str:
    """The recipe `code` with weights of 8 and 4 bits in nextn and llama.cpp."""
    names = [
        (f"nextn, {name}", "nextn", kind) for name, kind in (("bf16", "bfloat16"), ("int8", "int8"), ("int4", "int4"))
    ]
    kinds = (("bf16", "bfloat16"), ("Q8_0", "Q8_0"), ("Q4_K_M", "Q4_K_M"))
    names += [(f"llama.cpp, {name}", "llama.cpp", kind) for name, kind in kinds]
    return _engines("peers-quantized-code", names, (4,))


def _engines(name: str, rows: Iterable[tuple[str, str, str]], k_values: Sequence[int]) -> str:
    """Tokens per second of a record of `bench/peers.py`. Rows: title, engine, variant."""
    figures = record(name)["figures"]
    cells = {(each["engine"], each["variant"], each["num_speculative_tokens"]): each for each in figures}
    lines = []
    for title, engine, variant in rows:
        row = [cells.get((engine, variant, k)) for k in (0, *k_values)]
        shown = ["" if each is None else f"{each['tokens_per_s']['median']:,.0f}" for each in row]
        lines.append((title, *shown, "" if row[-1] is None else f"{row[-1]['mean_acceptance_length']:.2f}"))
    head = ("plain", *(f"K = {k}" for k in k_values), f"AL at K = {k_values[-1]}")
    return table(("engine, greedy, batch 1", *head), lines)


def served() -> str:
    """Servers under load: medians over the repeats of `bench/serve.py load`."""
    rows = record("serve")["load"]["rows"]
    keys = dict.fromkeys((row["streams"], row["server"]) for row in rows)

    def line(streams: int, server: str) -> tuple[str, ...]:
        found = [row for row in rows if (row["streams"], row["server"]) == (streams, server)]
        rate = statistics.median(row["tokens_per_s"] for row in found)
        pairs = [
            " / ".join(
                f"{1000 * statistics.median(row[key][part] for row in found):.{digits}f}" for part in ("p50", "p95")
            )
            for key, digits in (("ttft_s", 0), ("per_token_s", 1))
        ]
        return (str(streams), server, f"{rate:,.0f}", *pairs)

    head = ("streams", "server", "tokens/s", "first token, ms, p50 / p95", "per token, ms, p50 / p95")
    return table(head, (line(*key) for key in keys))


def scheduled() -> str:
    """MTP against plain decoding in one scheduler, by `bench/serve.py scheduler`."""

    def line(model: str, rows: Sequence[Mapping[str, Any]], streams: int) -> tuple[str, ...]:
        found = [row for row in rows if row["streams"] == streams]
        ratios = [row["MTP"] / row["plain"] for row in found]
        speeds = [f"{statistics.median(row[name] for row in found):,.0f}" for name in ("plain", "MTP")]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        return (model, str(streams), *speeds, ratio, f"{statistics.mean(row['mean_drafts'] for row in found):.2f}")

    head = ("model", "streams", "plain, tokens/s", "MTP, tokens/s", "ratio, median (least to most)", "drafts a round")
    models = {"SmolLM2": record("serve-smollm2"), "tiny": record("serve-tiny")}
    parts = ((model, found["scheduler"]["rows"]) for model, found in models.items())
    return table(
        head, (line(model, rows, n) for model, rows in parts for n in dict.fromkeys(row["streams"] for row in rows))
    )


def initial() -> str:
    """Greedy AL of new heads by starting values and training steps, by `bench/initial_heads.py`."""
    found = record("initial-heads")
    kinds = {
        "fitted": "last layer, fitted projection",
        "middle": "middle layer, fitted projection",
        "sum": "last layer, sum",
        "state": "last layer, state alone",
        "random": "random",
    }

    steps = (0, 50, 100, 200, 1000)

    def cell(rows: Sequence[Mapping[str, Any]], steps: int) -> str:
        counts = next((row["greedy"] for row in rows if row["step"] == steps), None)
        return f"{counts['AL']:.2f} ± {1.96 * counts['error']:.2f}" if counts else "-"

    rows = (
        (name, label, optimizer, *(cell(variants[kind], count) for count in steps))
        for name, optimizers in found["trunks"].items()
        for optimizer, variants in optimizers.items()
        for kind, label in kinds.items()
        if kind in variants
    )
    return table(("trunk", "starting values", "optimizer", *(f"{count} steps" for count in steps)), rows)


def head_training() -> str:
    """Tokens/s of training a new head on SmolLM2, by `bench/train.py --published`."""
    found = record("train-smollm2")["records"]
    rows = (
        (
            row["dtype"],
            f"{row['loss_vocab'] or 49152:,} tokens",
            "cached" if row["cached"] else "computed",
            f"{row['tokens_per_s']:.0f}",
            f"{found[0]['seconds'] / row['seconds']:.1f}",
            f"{row['share_of_limit']:.0%}",
        )
        for row in found
    )
    head = ("dtype", "loss over", "trunk's states", "tokens/s", "against the first row", "of the arithmetic's limit")
    return table(head, rows)


def audits() -> str:
    found = record("audit")
    hub, folder = found["hub"], found["folder"]
    share = f"{100 * hub['share_of_bytes']:.3f} % of the bytes, {hub['requests']} requests"
    rows = [
        ("a hub id, 50 ms per request", f"{hub['seconds']:.1f}", f"{hub['peak_mb']:.0f} MB", share),
        ("a local folder", f"{folder['seconds']:.1f}", f"{folder['peak_mb']:.0f} MB", ""),
    ]
    return table(("audit of 163 shards x 1,000 tensors (1.2 TB)", "seconds", "peak memory", "read"), rows)


def gpu() -> str:
    """What `bench/gpu.py` showed."""
    found = record("gpu")
    machine, stages = found["machine"], found["stages"]
    exact, half, sampled = (stages["lossless"][part] for part in ("float32", "bfloat16", "sampled"))
    p_values = ", ".join(f"{sampled[f'token_{place}']['p_value']:.2f}" for place in (3, 4, 5))
    answers, training, large = stages["answers"], stages["head"]["training"], stages["large_head"]
    streamed, whole = stages["stream"]["streamed"], stages["stream"]["whole"]
    rows = [
        ("`make test-gpu`", f"{stages['tests']['counts']['passed']} passed, {len(stages['tests']['failed'])} failed"),
        ("SmolLM2 and its head, greedy, K = 3: texts of 128 tokens that equal plain decoding's",
         f"{exact['same']} of {exact['texts']} in float32, {half['same']} of {half['texts']} in bfloat16"),
        (f"{sampled['samples']:,} samples at T = 1 with drafts against as many without: p of tokens 3, 4, 5", p_values),
        (f"`nextn answer`, {answers['processes']} processes of {answers['batch']:,} sequences",
         f"{answers['tokens_per_s']:,} tokens/s"),
        ("training a head on SmolLM2, 64 x 512 tokens a step", f"{training['tokens_per_s']:,} tokens/s"),
        ("training a head on a trunk of Qwen3-8B's shape, 8 x 2,048 tokens a step",
         f"{large['tokens_per_s']:,.0f} tokens/s, {large['flops_per_s'] / 1e12:.0f} TFLOP/s, "
         f"{large['peak_gb']:.0f} GB, of which {large['memory_gb_before']:.0f} GB trunk and head"),
        *(
            (f"decoding at Qwen3-{size}'s shape, random weights, drafts accepted with probability 0.8, K = 3",
             f"{found['batch_1']['step_ms']:.0f} ms a token plain ({found['weights_ms']:.1f} ms to read the weights), "
             f"AL {found['batch_1']['acceptance_length']:.2f}, {found['batch_1']['speedup']:.2f} x; "
             f"16 sequences: AL {found['batch_16']['acceptance_length']:.2f}, {found['batch_16']['speedup']:.2f} x")
            for size, found in stages["speed"].items() if size.endswith("B")
        ),
        (f"`measure` of {stages['stream']['bytes'] / 1e9:.0f} GB, Qwen3-Next's widths, 4 layers",
         f"`--stream`, from disk: {streamed['seconds']:.0f} s, {streamed['peak_memory_gb']:.0f} GB of host memory; "
         f"whole on the GPU, files in the kernel's cache: {whole['seconds']:.0f} s"),
    ]  # fmt: skip
    title = f"{machine['name']}, {found['date']}, PyTorch {machine['torch']}, transformers {machine['transformers']}"
    return table((title, ""), rows)


def summary() -> str:
    """The README's table: a published model."""

    def line(run: Run) -> tuple[str, ...]:
        decoding = "greedy" if not run.temperature else f"temperature {run.temperature:g}"
        return (f"{run.title}, {decoding}, K = {run.num_speculative_tokens}", run.machine, *speeds(run))

    head = ("model", "CPU", "plain, tokens/s", "MTP, tokens/s", "speedup", "AL, tokens per round")
    return table(head, map(line, PUBLISHED))


def picture() -> str:
    """Plain decoding and MTP over the same time, to scale: K = 4 of the recipe `code`."""
    run, k, num_steps = RUNS[0], 4, 12
    found, costs_ = figures(run, k), record(run.record)["costs"]
    length = found["mean_acceptance_length"]
    draft, verify = k * costs_["c"], costs_["v"][k]
    whole = length / found["speedup"]["median"]  # a round in baseline steps, as measured
    left, unit, height = 120, 54, 34
    parts = []

    def box(x: float, y: int, width: float, color: str, label: str = "") -> None:
        size = f'width="{unit * width - 1.5:.1f}" height="{height}"'
        parts.append(f'<rect x="{left + unit * x:.1f}" y="{y}" {size} fill="{color}"/>')
        if label:
            middle = left + unit * (x + width / 2)
            parts.append(f'<text x="{middle:.1f}" y="{y + 22}" text-anchor="middle" fill="#ffffff">{label}</text>')

    for index in range(num_steps):
        box(index, 40, 1, "#7b8794", "1")
    rounds = int(num_steps / whole)
    for index in range(rounds):
        start = index * whole
        box(start, 120, draft, "#d9822b")
        box(start + draft, 120, verify, "#2b6cb0", f"{length:.1f}")
        box(start + draft + verify, 120, whole - draft - verify, "#cbd2d9")
    texts = [
        (left - 12, 62, "end", "plain"),
        (left - 12, 142, "end", f"MTP, K = {k}"),
        (left, 28, "start", f"{num_steps} trunk passes, 1 token each: {num_steps} tokens"),
        (
            left,
            108,
            "start",
            f"{rounds} rounds, {length:.1f} tokens each: {rounds * length:.0f} tokens in the same time",
        ),
    ]
    parts += [f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>' for x, y, anchor, words in texts]
    legend = (
        ("#d9822b", "4 draft steps of the head"),
        ("#2b6cb0", "trunk verifies 5 tokens"),
        ("#cbd2d9", "other work"),
    )
    for index, (color, words) in enumerate(legend):
        x = left + 205 * index
        parts.append(f'<rect x="{x}" y="178" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="189">{words}</text>')
    note = f"To scale: 27 M parameters, greedy, two cores of an {run.machine}, {run.date}"
    parts.append(f'<text x="{left}" y="214" font-size="11" fill="#616e7c">{note}</text>')
    body = "\n".join(parts)
    width = left + unit * num_steps + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 224" width="{width}" height="224" '
        'font-family="sans-serif" font-size="13" fill="#1f2933" role="img">\n'
        "<title>Plain decoding and MTP decoding over the same time</title>\n"
        f'<rect width="{width}" height="224" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


PARTS = {
    "runs": runs,
    "demo": demo,
    "costs": costs,
    "batches": batches,
    "peers": peers,
    "smollm2_peers": smollm2_peers,
    "quantized_peers": quantized_peers,
    "served": served,
    "scheduled": scheduled,
    "audits": audits,
    "gpu": gpu,
}
HEADS = PAGE.with_name("heads.md")


KINDS = {
    "edits": "edits", "summaries": "summaries", "chat": "chats", "open": "stories",
    "code": "excerpts of code, recipe `code`", "repeated": "excerpts begun again, recipe `code`",
}  # fmt: skip


def copied() -> str:
    """Tokens per round and speed with copied drafts, by kind of prompt."""
    rows = []
    for kind, each in (record("copies")["kinds"] | record("copies-code")["kinds"]).items():
        rounds = [f"{each[way]['tokens_per_round']:.2f}" for way in ("mtp", "copy", "both")]
        speeds = [f"{each[way]['over_plain']:.2f}" for way in ("mtp", "both", "adaptive")]
        against = [f"{each[way]['over_mtp']:.2f}" for way in ("both", "adaptive")]
        rows.append((f"{each['prompts']} {KINDS[kind]}", *rounds, *speeds, *against))
    head = (
        "prompts",
        "tokens per round, MTP",
        "copies alone",
        "both",
        "speed of MTP",
        "of both",
        "of both, `--adaptive`",
        "both against MTP",
        "`--adaptive` against MTP",
    )
    return table(head, rows)


def ngrams() -> str:
    """Tokens per round by the rules of other engines, by kind of prompt."""
    ways = {
        "head": "MTP", "head or copy": "MTP and copies", "copy": "copies alone",
        "vLLM ngram": "vLLM's `ngram` (2 to 5 tokens, K = 16)", "llama.cpp ngram-simple": "llama.cpp's `ngram-simple`",
    }  # fmt: skip
    rows = (
        (f"{each['prompts']} {KINDS[kind]}", *(f"{each[way]['tokens_per_round']:.2f}" for way in ways))
        for kind, each in record("ngrams")["kinds"].items()
    )
    return table(("prompts", *ways.values()), rows)


def pages() -> dict[Path, str]:
    page = PAGE.read_text()
    for name, part in PARTS.items():
        page = replace_part(page, name, part())
    cpus = replace_part(replace_part(CPUS.read_text(), "copies", copied()), "ngrams", ngrams())
    heads = replace_part(HEADS.read_text(), "initial", initial())
    heads = replace_part(heads, "head_training", head_training())
    readme = replace_part(README.read_text(), "speeds", summary())
    return {PAGE: page, HEADS: heads, CPUS: cpus, README: readme, PICTURE: picture()}


if __name__ == "__main__":
    write(pages())
