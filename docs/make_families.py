"""Write docs/reference/families from the rows of `nextn.family_table`: an index and a page for each. Needs no torch."""

from collections.abc import Iterator
from pathlib import Path

from generated import write

from nextn.audit_rules.findings import ENGINES as NAMES
from nextn.family_table import ENGINES, WITHHELD, EngineSupport, Family, disagreements, rows, separate_rows
from nextn.family_table.engine_versions import VERSIONS, named
from nextn.family_table.rows import EVERYWHERE

HERE = Path(__file__).parent
ROWS = (*rows(), *separate_rows())
FOLDER = HERE / "reference" / "families"

SUPPORT = {
    "runs": "runs", "loads": "reads, no graph", "ignores": "skips", "drops": "drops", "refuses": "refuses",
    "absent": "unknown",
}  # fmt: skip
STAGES = {
    "post": "after the final norm", "pre": "before the final norm",
    "streams": "as residual streams, before they are collapsed",
}  # fmt: skip
ORDERS = {
    "recursive": "one MTP layer is applied repeatedly, or layer k in turn; each takes the state of the previous one",
    "chained": "depth k uses MTP layer k - 1, which takes the state returned by the previous layer",
    "unchained": "depth k uses MTP layer k - 1, and each layer takes the trunk's state",
}
_READS = (
    "those of the trunk's last layer of the same type that stores any; all queries of a round are at the position of"
)
KEYS = {"token": f"{_READS} the pair's token", "hidden": f"{_READS} the pair's hidden state"}
FACTS = {
    "concat": {"embedding_first": "[embedding, hidden]", "hidden_first": "[hidden, embedding]"},
    "norm_weight": {"w": "the multiplier is the stored weight w", "1+w": "the multiplier is 1 + the stored weight w"},
    "position0": {"keep": "like any other", "zero": "the embedding of position 0 is set to zero"},
    "experts": {
        "split": "one tensor per expert and matrix",
        "fused": "two tensors, gate_up_proj [E, 2I, H] and down_proj [E, H, I]",
        "stacked": "three tensors [E, out, in]: gate, up and down",
    },
}  # fmt: skip
MISSING = {
    "raises": "raises", "unquantized": "raises, if the checkpoint is unquantized",
    "module": "raises, if unquantized or a whole MTP layer is missing", "silent": "no error", "unknown": "not known",
}  # fmt: skip

INTRO = """\
# Families

How each published model stores and computes its MTP head (the extra layers that predict tokens after the next one),
what four inference engines do with it, and what `nextn` does. This page is for people who publish or serve checkpoints:
most heads with low acceptance are caused by a missing tensor, or by an engine that reads a tensor differently than the
authors meant.

`nextn families` lists and searches them by the names of published models: `nextn families GLM 5.3`.

`make docs` generates these pages from `src/nextn/family_table/rows.py`. What nextn does with each family, and in which
engines its files were run, is in [the support matrix](../support.md). The facts about engines were read in their code
({engines}), and the tensor names in their loaders. No
released checkpoint was opened.

## Terms

- **trunk**: the target model. **head**: everything that was added for MTP. **MTP layer** (or module): one step of the
  head; there may be several. **depth** k: the k-th draft token of a round; depth 1 predicts the token after the next.
- An MTP layer takes a **pair**: the embedding of token t+1 and the trunk's **hidden** state of token t. Each is
  normalized, the two are combined by a **projection** (eh_proj), then come a **block** (one or more decoder layers) and
  a **final norm**, and the **output** projection (lm_head) computes logits. The hidden state that the layer passes to
  the next depth is the **next hidden** state.
- A **copy** is the trunk's embed_tokens or lm_head, stored again inside the MTP layer with equal values. An MTP layer
  may also have its own, with other values.
- A **role** is the function of a tensor, whatever its name: `token_norm`, `hidden_norm`, `projection`, `block`,
  `final_norm`, `embedding`, `output`, and roles that exist in one family only.
- In names, `{layer}` continues the numbering of the trunk's layers (61 for a trunk of 61), `{module}` counts from 0.
"""


def text(words: str) -> str:
    """Escape the prose of a row for Markdown."""
    for sign in "*<|":
        words = words.replace(sign, f"\\{sign}")
    return words


def code(*words: str) -> str:
    return ", ".join(f"`{word}`" for word in words)


def table(head: tuple[str, ...], lines: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    yield from ("| " + " | ".join(line) + " |" for line in lines)
    yield ""


def support() -> Iterator[str]:
    yield "## What the engines do"
    yield ""
    yield (
        "**runs**: drafts with the head. **reads, no graph**: loads its tensors but cannot draft with them. **skips**: "
        "ignores the tensors on load. **drops**: the converter leaves them out. **refuses**: raises an error. "
        "**unknown**: no code for the model, or none for its head."
    )
    yield ""
    lines = (
        (f"[{row.title}]({row.name}.md)", *(SUPPORT[row.engines[each].support] for each in ENGINES)) for row in ROWS
    )
    yield from table(("family", *(NAMES[each] for each in ENGINES)), lines)
    yield "For all families:"
    yield ""
    for name in ENGINES:
        yield from (f"- {NAMES[name]}: {text(line)}." for line in EVERYWHERE[name])
    yield ""


def withheld() -> Iterator[str]:
    yield "## Published without one"
    yield ""
    yield (
        "The config of these models may declare MTP layers, and the vendor published none, or another draft, or one "
        "whose code is not public. `nextn audit` says so: nothing was lost, and there is nothing to restore."
    )
    yield ""
    for each in WITHHELD:
        sources = ", ".join(f"[{number}]({source})" for number, source in enumerate(each.sources, 1))
        about = each.instead or code(*each.model_types)
        yield f"- {each.title}: {about} ({sources})."
    yield ""


def section(row: Family) -> Iterator[str]:
    yield f"# {text(row.title)}"
    yield ""
    yield from counted(row)
    yield ""
    yield from stored(row)
    yield from conventions(row)
    yield from engines(row)
    yield from notes(row)


def counted(row: Family) -> Iterator[str]:
    drafts = f"; as a draft {code(*row.draft_types)}" if row.draft_types else ""
    if row.models:
        yield f"- Among its models: {', '.join(row.models)}."
    if row.trunk_types:
        yield f"- Stored in a repository of its own, beside trunks of `model_type` {code(*row.trunk_types)}{drafts}."
    else:
        yield f"- `model_type`: {code(*row.model_types)}{drafts}."
    most = "" if row.max_modules is None else f"; the layout allows at most {row.max_modules}"
    spare = "; above 1, the config states one more than there are" if row.spare_count else ""
    if row.count_fields:
        yield f"- MTP layers: {code(*row.count_fields)}, default {row.default_count}{most}{spare}."
    yield f"- nextn: {'runs it' if row.runs else 'does not run it: ' + text(row.cannot_run)}."


def stored(row: Family) -> Iterator[str]:
    def line(role: str, path: str) -> tuple[str, ...]:
        also = [f"also read: {code(*row.aliases[role])}"] if role in row.aliases else []
        also += ["a copy"] if role in row.copies else ["the MTP layer's own"] if role in row.own else []
        return (f"`{role}`", f"`{path}`", "; ".join(also))

    yield from table(("role", "path", ""), (line(role, path) for role, path in row.names.items()))
    if not row.trunk_kv:
        yield f"- In the trunk: {', '.join(f'{role} `{path}`' for role, path in row.trunk.items())}."
    for field in dict.fromkeys(row.optional.values()) if row.trunk_kv else ():
        roles = [role for role, path in row.optional.items() if path == field]
        yield f"- Only with `{field}` in config.json: {code(*roles)}."
    if row.block_renames:
        pairs = ", ".join(f"`{run}` as `{path}`" for run, path in row.block_renames.items())
        yield f"- Inside the block, published names for those of transformers: {pairs}."
    for wrapper, meant in row.wrappers.items():
        unread = ", which vLLM and SGLang do not read" if wrapper == "model.mtp." else ""
        yield f"- Some checkpoints have `{wrapper}` " + (f"for `{meant}`{unread}." if meant else "before every name.")
    yield f"- Experts, if any: {text(FACTS['experts'][row.experts])}."
    if row.fp8 is not None:
        block = " x ".join(map(str, row.fp8.block))
        yield (
            f"- In fp8, `x.weight` has its scales in `x.{row.fp8.scale}`, one per {block} block; not in fp8: "
            f"{code(*row.fp8.unquantized)}, and norms, routers and biases inside the block."
        )


def conventions(row: Family) -> Iterator[str]:
    joined = (
        "the outputs of two projections are added" if "token_projection" in row.names else FACTS["concat"][row.concat]
    )
    yield f"- eh_proj input order: {joined}."
    yield f"- Hidden state: {STAGES[row.hidden]}. Next hidden state: {STAGES[row.next_hidden]}."
    yield f"- Norms: {FACTS['norm_weight'][row.norm_weight]}. Position 0: {FACTS['position0'][row.position0]}."
    yield f"- Order: {ORDERS[row.order]}."
    if row.trunk_kv:
        yield f"- Keys and values: {KEYS[row.trunk_kv]}."
    yield ""


def engines(row: Family) -> Iterator[str]:
    def line(name: str, engine: EngineSupport) -> tuple[str, ...]:
        where = f"[{SUPPORT[engine.support]}]({engine.source})" if engine.source else SUPPORT[engine.support]
        said = "; ".join(differs(engine)) if engine.support == "runs" else "; ".join(map(text, engine.notes))
        return (NAMES[name], where, said or "-")

    yield from table(("engine", "", "behavior"), (line(name, row.engines[name]) for name in ENGINES))


def differs(engine: EngineSupport) -> Iterator[str]:
    """Facts about an engine that runs the head."""
    if engine.hidden:
        yield f"hidden {STAGES[engine.hidden]}"
    if engine.next_hidden:
        yield f"next hidden state {STAGES[engine.next_hidden]}"
    if engine.position0:
        yield FACTS["position0"][engine.position0]
    if engine.order:
        yield ORDERS[engine.order]
    if engine.trunk_kv:
        yield KEYS[engine.trunk_kv]
    if engine.modules is not None:
        yield f"uses at most {engine.modules} MTP layer{'s' * (engine.modules != 1)}"
    if engine.layers:
        yield f"knows the head only at layer {' or '.join(map(str, engine.layers))}"
    yield (
        f"takes the trunk's {' and '.join(engine.trunk_roles)}"
        if engine.trunk_roles
        else "takes the file's embed_tokens and lm_head"
    )
    yield f"a missing tensor: {MISSING[engine.missing]}"
    if engine.unset:
        yield f"keeps its initial value if the file lacks it inside the MTP layer: {', '.join(engine.unset)}"
    yield from map(text, engine.notes)


def notes(row: Family) -> Iterator[str]:
    for title, lines in (
        ("Differences between engines, and remarks", map(text, disagreements(row))),
        ("Unverified", map(text, row.unverified)),
        ("Sources besides the engines' code", (f"<{source}>" for source in row.sources)),
    ):
        items = list(lines)
        if items:
            yield f"{title}:"
            yield ""
            yield from (f"- {line}" for line in items)
            yield ""


def pages() -> dict[Path, str]:
    """Return the text of every page of the folder."""
    introduction = INTRO.replace("{engines}", ", ".join(map(named, VERSIONS)))
    index = "\n".join([introduction, *support(), *withheld()]).rstrip() + "\n"
    return {FOLDER / "index.md": index} | {FOLDER / f"{row.name}.md": page(row) for row in ROWS}


def page(row: Family) -> str:
    """Return the page of one family."""
    back = "Terms: [families](index.md). What nextn runs and tests: [support matrix](../support.md)."
    return "\n".join([*section(row), back]).rstrip() + "\n"


if __name__ == "__main__":
    write(pages())
