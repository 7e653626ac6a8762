"""Write the tables of docs/benchmarks/engines.md from bench/results/engines.json, which `make test-engines` writes, and
smollm2-engines.json, -curve.json and -clients.json, which published.py, curves.py and clients.py of bench/ write.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from generated import write

HERE = Path(__file__).parent
PAGE = HERE / "benchmarks" / "engines.md"
RESULTS = HERE.parent / "bench" / "results"
Record = Mapping[str, Any]


def records() -> Record:
    """Return both records as one."""
    published = json.loads((RESULTS / "smollm2-engines.json").read_text())
    sections = {
        "published": published["engines"],
        "diagnosed": published["diagnose"]["rows"],
        "live": published["live"],
    }
    for name in ("curve", "clients"):
        sections[name] = json.loads((RESULTS / f"smollm2-{name}.json").read_text())
    sections["loads"] = sections["advice"] = json.loads((RESULTS / "smollm2-loads.json").read_text())["engines"]
    return json.loads((RESULTS / "engines.json").read_text()) | sections


def page(text: str, record: Record) -> str:
    """Return the page with every table regenerated; a table is between `<!-- NAME -->` and `<!-- / -->`."""

    def regenerated(mark: re.Match[str]) -> str:
        return f"<!-- {mark[1]} -->\n" + "\n".join(_table(mark[1], record)) + "\n<!-- / -->"

    return re.sub(r"<!-- ([a-z]+) -->\n.*?<!-- / -->", regenerated, text, flags=re.S)


def _table(name: str, record: Record) -> Iterator[str]:
    if name in COMPARED and record.get(name):
        yield from compared(record[name])
    elif name == "versions" or record.get(name):
        yield from TABLES[name](record)
    else:
        yield "Not run yet."


def modules(record: Record) -> Iterator[str]:
    yield from compared({f"{key} MTP layers": each for key, each in record["modules"].items()})


def versions(record: Record) -> Iterator[str]:
    """The dates and tables of each version that was run."""
    runs: dict[str, list[tuple[str, str]]] = {}
    for section in (*COMPARED, "modules"):
        for each in record.get(section, {}).values():
            cell = ", ".join(f"{name} {version}" for name, version in each["versions"].items())
            runs.setdefault(cell, []).append((each["date"], section))
    yield "| versions | tables | dates |"
    yield "|---|---|---|"
    for cell, found in sorted(runs.items()):
        dates, sections = sorted({date for date, _ in found}), dict.fromkeys(TITLES[section] for _, section in found)
        yield f"| {cell} | {', '.join(sections)} | {', '.join(dates)} |"


def faults(record: Record) -> Iterator[str]:
    yield "| injected fault | what was done | engine, K = 3 | audit | measure, and its probe | diagnose |"
    yield "|---|---|---|---|---|---|"
    for key, each in sorted(record["faults"].items()):
        engine = f"refuses: {each['refused']}" if "refused" in each else _rates(each["engine"])
        rules = ", ".join(f"`{rule}`" for rule in each["audit"]) or "clean"
        measured = f"{_rates(each['measure']['rates'])}: {each['probe']['summary']}" if "probe" in each else ""
        named = ", ".join(f"`{name}`" for name in each.get("diagnose", ()))
        yield f"| {key} | {each['does']} | {_cell(engine)} | {rules} | {_cell(measured)} | {named} |"


def diagnosed(record: Record) -> Iterator[str]:
    yield "| head | decoded by | rounds, accepted by depth | named, in so many trials |"
    yield "|---|---|---|---|"
    for key, each in record["diagnosed"].items():
        name, _, engine = key.partition(" ")
        named = ", ".join(f"`{cause}` {count}" for cause, count in each["named"].items())
        yield f"| {'intact' if name == 'no-fault' else f'`{name}`'} | {engine} | {each['counts']} | {named} |"


def compared(results: Mapping[str, Record]) -> Iterator[str]:
    yield "| | K | same texts as nextn | engine: a_1..a_K | nextn | inside 95 % | same counts | with its convention |"
    yield "|---|---|---|---|---|---|---|---|"
    for key, each in results.items():
        for row in each["by_drafts"]:
            cells = [
                key,
                row["drafts"],
                f"{row['identical']}/{each['prompts']}",
                _rates(row["engine"]),
                _rates(row["ours"]),
                "yes" if row["inside"] else "no",
                "yes" if row["same_counts"] else f"{row['counts']}, nextn {row['row_counts']}",
                "yes" if row["same_under_convention"] else f"{row['convention_counts']}",
            ]
            yield "| " + " | ".join(map(str, cells)) + " |"


def curve(record: Record) -> Iterator[str]:
    found = record["curve"]
    ks = range(1, 1 + max(row["num_speculative_tokens"] for row in found["humaneval"]["figures"]))
    yield f"| AL, {found['tokens']} tokens per answer | texts | {' | '.join(f'K = {k}' for k in ks)} | finding |"
    yield f"|---|---|{'---|' * (len(ks) + 1)}"
    for data, name in (("humaneval", "HumanEval"), ("questions", "questions")):
        for each in found[data]["curves"]:
            key = (each["temperature"], each["rule"], each["domain"])
            rows = [row for row in found[data]["figures"] if (row["temperature"], row["rule"], row["domain"]) == key]
            cells = map(_length, rows)
            at = "greedy" if not key[0] else f"T = {key[0]:g}, argmax"
            saturated = {"saturates": f"saturates at K = {each['saturated_at']}", "increases": "does not saturate"}
            finding = saturated.get(each["outcome"], "inconclusive")
            domain = "" if key[2] == "all" else f", {key[2]}"
            yield f"| {name}{domain}, {at} | {rows[-1]['num_texts']} | {' | '.join(cells)} | {finding} |"
    if "llama.cpp" in found:
        rows = found["llama.cpp"]["by_drafts"]
        yield from beside({row["num_speculative_tokens"]: row for row in rows}, ks)


def live(record: Record) -> Iterator[str]:
    """What commands of nextn took against each engine's servers, and what they found."""
    yield "| engine | command | processor time, s | wall time, s | peak memory, MB | result | prompts, tokens, date |"
    yield "|---|---|---|---|---|---|---|"
    for engine, each in record["live"].items():
        about = f"{each['prompts']}, {each['tokens']}, {each['date'][:10]}"
        for command, row in each["commands"].items():
            figures = f"{row['cpu_s']:.0f} | {row['wall_s']:.0f} | {row['peak_mb']:,}"
            yield f"| {engine} | `{command}` | {figures} | {_found(row)} | {about} |"


def loads(record: Record) -> Iterator[str]:
    """What `nextn advise` measured and printed for each engine, by streams."""
    yield (
        "| engine | K | tokens per answer | streams | requests | tokens/s without | with MTP "
        "| speedup (quartiles) | AL | a round costs | best K |"
    )
    yield f"|{'---|' * 11}"
    for engine, each in record["loads"].items():
        for row in each["forecasts"]:
            speed, (plain, drafted) = row["speedup"], row["middle_repeat"]
            speedup = f"{speed['median']:.2f} ({speed['low']:.2f}-{speed['high']:.2f})"
            costs = f"{row['mean_acceptance_length']:.2f} | {row['round_cost']:.2f}"
            best, k = row["best_num_speculative_tokens"], each["num_speculative_tokens"]
            advised = f"{best}, estimated" if best not in (0, k) else best or "off"
            asked = f"{k} | {each['tokens']} | {row['batch']} | {each['requests'][str(row['batch'])]}"
            yield f"| {engine} | {asked} | {plain:.0f} | {drafted:.0f} | {speedup} | {costs} | {advised} |"


def advice(record: Record) -> Iterator[str]:
    yield "| engine | advice | as the engine takes it | date |"
    yield "|---|---|---|---|"
    for engine, each in record["loads"].items():
        settings = ", ".join(f"`{value}`" for value in each["settings"].values())
        yield f"| {engine} | {each['summary']} | {_cell(settings)} | {each['date'][:10]} |"


def _found(row: Record) -> str:
    if "named" in row:
        return ", ".join(f"`{name}`" for name in row["named"]) or "nothing known"
    if "checks" in row:
        outcomes = Counter(row["checks"].values())
        failed = ", ".join(f"`{name}`" for name, outcome in row["checks"].items() if outcome == "failed")
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
        return f"{counts}: {failed}" if failed else counts
    return _rates(row["acceptance"])


def clients(record: Record) -> Iterator[str]:
    """AL, rounds and accepted drafts by data set and K of each client; what is outside our interval is marked."""
    data_sets = record["clients"]["data_sets"]
    names = list(dict.fromkeys(name for found in data_sets.values() for name in found["clients"]))
    yield f"| prompts | K | nextn: AL | rounds, accepted | {' | | '.join(f'{name}: AL' for name in names)} | |"
    yield f"|---|---|---|---|{'---|---|' * len(names)}"
    for data_set, found in data_sets.items():
        rows: dict[int, dict[str, Record]] = {}
        for name, each in found["clients"].items():
            for row in each:
                rows.setdefault(row["num_speculative_tokens"], {})[name] = row
        for k, by_name in sorted(rows.items()):
            first = next(iter(by_name.values()))
            ours = f"{_interval(first['nextn'])} | {_counts(first['nextn_counts'])}"
            cells = (_client(by_name[name]) if name in by_name else " | " for name in names)
            yield f"| {found['prompts']['num']} of {data_set} | {k} | {ours} | {' | '.join(cells)} |"


def _client(row: Record) -> str:
    outside = "" if row["inside"] else ", outside"
    return f"{row['mean_acceptance_length']:.2f}{outside} | {_counts(row)}"


def _counts(row: Record) -> str:
    return f"{row['num_drafts']}, {row['accepted']}"


def _interval(length: Record) -> str:
    return f"{length['value']:.2f} ({length['low']:.2f}-{length['high']:.2f})"


def _length(row: Record) -> str:
    """AL with its interval within what it can be."""
    length, most = row["mean_acceptance_length"], row["num_speculative_tokens"] + 1
    return f"{length['value']:.2f} ({max(1, length['low']):.2f}-{min(most, length['high']):.2f})"


def beside(rows: Mapping[int, Record], ks: Sequence[int]) -> Iterator[str]:
    """The engine's AL at each K that it ran, and how much it is above ours."""
    num_texts = next(iter(rows.values()))["num_texts"]
    engine = (f"{rows[k]['engine']:.2f}" if k in rows else "" for k in ks)
    yield f"| llama.cpp, HumanEval, greedy | {num_texts} | {' | '.join(engine)} | |"
    found = {k: row["difference"] for k, row in rows.items()}
    cells = {k: f"{each['value']:+.2f} ({each['low']:+.2f} to {each['high']:+.2f})" for k, each in found.items()}
    yield f"| less nextn, paired on texts | {num_texts} | {' | '.join(cells.get(k, '') for k in ks)} | |"


def _rates(rates: list[float | None]) -> str:
    return ", ".join("-" if rate is None else f"{rate:.2f}" for rate in rates)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# Sections of the record that make one table each.
TITLES = {
    "pairs": "engines and families", "head": "a head trained here", "drafts": "separate drafts in vLLM",
    "gguf": "files for llama.cpp", "inside": "heads in transformers", "adopted": "one checkpoint for all engines",
    "published": "a published model", "modules": "several MTP layers",
}  # fmt: skip
COMPARED = ("pairs", "head", "drafts", "gguf", "inside", "adopted", "published")
TABLES = {"modules": modules, "versions": versions, "faults": faults, "diagnosed": diagnosed, "curve": curve,
          "clients": clients, "live": live, "loads": loads, "advice": advice}  # fmt: skip


def pages() -> dict[Path, str]:
    return {PAGE: page(PAGE.read_text(), records())}


if __name__ == "__main__":
    write(pages())
