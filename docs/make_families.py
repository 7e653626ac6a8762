"""Writes docs/families.md from the rows of `nextn.families` and from what the tests say they cover. Needs no torch."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from nextn.families import ENGINES, Engine, Family, rows
from nextn.families.rows import EVERYWHERE

HERE = Path(__file__).parent
PAGE = HERE / "families.md"
TESTS = HERE.parent / "tests"

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "transformers": "transformers"}
SUPPORT = {
    "runs": "runs", "loads": "reads, no graph", "ignores": "skips", "drops": "loses", "refuses": "refuses",
    "absent": "unknown",
}  # fmt: skip
STAGES = {
    "post": "after the final norm", "pre": "before the final norm",
    "streams": "as residual streams, before they are collapsed",
}  # fmt: skip
ORDERS = {
    "recursive": "one module is applied again and again, or module k in turn: each eats the state of the one before",
    "chained": "depth k has module k - 1, which eats the state that the module before it gave",
    "unchained": "depth k has module k - 1, and every one eats the trunk's state",
}
FACTS = {
    "concat": {"embedding_first": "[embedding, hidden]", "hidden_first": "[hidden, embedding]"},
    "gain": {"w": "the stored gain multiplies", "1+w": "the stored w means a gain of 1 + w"},
    "position0": {"keep": "as any other", "zero": "the embedding of position 0 is zeroed"},
    "experts": {
        "split": "one by one", "fused": "all in two tensors, gate_up_proj [E, 2I, H] and down_proj [E, H, I]",
        "stacked": "all in three tensors [E, out, in]: gate, up and down apart",
    },
}  # fmt: skip
MISSING = {
    "raises": "raises", "unquantised": "raises, if the checkpoint is unquantised",
    "module": "raises, if unquantised or a whole module is missing", "silent": "says nothing", "unknown": "not known",
}  # fmt: skip

INTRO = """\
# Families

How each published model stores and computes its MTP head (the extra layers that guess tokens after the next one), what
four inference engines do with it, and what `nextn` does. For those who publish checkpoints or serve them: most heads
that draft badly are a file that lacks a tensor, or an engine that reads one in another way than the authors.

This page is made by `make docs` from `src/nextn/families/rows.py`; change it there.

## Words

- **trunk**: the model itself. **head**: all that was added for MTP. **module**: one step of the head; there may be
  several. **depth** k: how far a module looks; depth 1 guesses the token after the next one.
- A module takes a **pair**: the embedding of token t+1 and the trunk's **hidden** state of token t. Each is normed,
  both are joined by a **projection**, a **block** (a decoder layer or several) follows, then a **final norm**, and the
  **output** head gives logits. What the module hands to the next depth is the **recycled** state.
- A **copy** is the trunk's embedding or output head, stored again inside the module with equal values. A module may
  also have one of its own there, with other values.
- A **role** is what a tensor is for, whatever its name: `token_norm`, `hidden_norm`, `projection`, `block`,
  `final_norm`, `embedding`, `output`, and what one family alone has.
- In names, `{layer}` counts on from the trunk's layers (61 for a trunk of 61), `{module}` counts from 0.

## What nextn does

- **audit**, **restore**: reads the family's checkpoints by name and shape, finds what is wrong, and puts a lost head
  back. Every family has a synthetic checkpoint in its published layout, which the tests audit.
- **run**: computes trunk and head, so it can train the head and decode with it. Where it does not, the family's section
  says why.
- **trained in tests**: a tiny model of the family is trained, decodes without changing the trunk's output, and is saved
  and loaded again, in the tests.
- **checked against**: an engine whose own code gave the same logits in the tests, at every depth, to 1e-5 in fp32; for
  Inkling and Step once the facts in which transformers differs are switched to its choice.
"""


def literal(file: str, name: str) -> ast.expr | None:
    """What a test file assigns to `name`, unevaluated: the tests import torch, this page must not."""
    path = TESTS / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(getattr(each, "id", "") == name for each in targets):
            return node.value
    return None


def trained() -> frozenset[str]:
    """Families with a tiny model, which every test of training, decoding and saving runs over."""
    table = literal("tiny.py", "CONFIGS")
    assert isinstance(table, ast.Dict), "tests/tiny.py: CONFIGS must be a dict display"
    return frozenset(ast.literal_eval(key) for key in table.keys if key is not None)


def checked() -> Mapping[str, tuple[str, ...]]:
    """Family -> engines, as tests/test_oracle.py has them; none before there is such a file."""
    table = literal("test_oracle.py", "CHECKED")
    return {} if table is None else ast.literal_eval(table)


def text(words: str) -> str:
    """Prose of a row as Markdown."""
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


def matrix() -> Iterator[str]:
    known, oracles = trained(), checked()

    def line(row: Family) -> tuple[str, ...]:
        engines = ", ".join(NAMES[each] for each in oracles.get(row.name, ()))
        runs = "yes" if row.runs else "no"
        return (f"[{row.title}](#{row.name})", "yes", "yes", runs, "yes" if row.name in known else "no", engines or "-")

    head = ("family", "audit", "restore", "run", "trained in tests", "checked against")
    yield from table(head, (line(row) for row in rows()))


def support() -> Iterator[str]:
    yield "## What the engines do"
    yield ""
    yield (
        "**runs**: drafts with the head. **reads, no graph**: loads its tensors and cannot draft with them. **skips**: "
        "ignores the tensors on load. **loses**: the converter leaves them out. **refuses**: says no. **unknown**: no "
        "code for the model, or none for its head."
    )
    yield ""
    lines = (
        (f"[{row.title}](#{row.name})", *(SUPPORT[row.engines[each].support] for each in ENGINES)) for row in rows()
    )
    yield from table(("family", *(NAMES[each] for each in ENGINES)), lines)
    yield "Whatever the family:"
    yield ""
    for name in ENGINES:
        yield from (f"- {NAMES[name]}: {text(line)}." for line in EVERYWHERE[name])
    yield ""


def section(row: Family) -> Iterator[str]:
    yield f'<a id="{row.name}"></a>'
    yield ""
    yield f"## {text(row.title)}"
    yield ""
    yield from counted(row)
    yield ""
    yield from stored(row)
    yield from conventions(row)
    yield from engines(row)
    yield from notes(row)


def counted(row: Family) -> Iterator[str]:
    drafts = f"; as a draft {code(*row.draft_types)}" if row.draft_types else ""
    yield f"- `model_type`: {code(*row.model_types)}{drafts}."
    most = "" if row.max_modules is None else f"; the layout has room for {row.max_modules}"
    spare = "; above 1, the config says one more than there are" if row.spare_count else ""
    yield f"- Modules: {code(*row.count_fields)}, {row.default_count} where the config is silent{most}{spare}."
    yield f"- nextn: {'runs it' if row.runs else 'does not run it: ' + text(row.cannot_run)}."


def stored(row: Family) -> Iterator[str]:
    def line(role: str, path: str) -> tuple[str, ...]:
        also = [f"also read: {code(*row.aliases[role])}"] if role in row.aliases else []
        also += ["a copy"] if role in row.copies else ["the module's own"] if role in row.own else []
        return (f"`{role}`", f"`{path}`", "; ".join(also))

    yield from table(("role", "module path", ""), (line(role, path) for role, path in row.names.items()))
    trunk = ", ".join(f"{role} `{path}`" for role, path in row.trunk.items())
    yield f"- In the trunk: {trunk}."
    if row.inside:
        pairs = ", ".join(f"`{run}` as `{path}`" for run, path in row.inside.items())
        yield f"- Inside the block, what transformers calls {pairs}."
    for wrapper, meant in row.wrappers.items():
        yield f"- Some checkpoints have `{wrapper}` " + (f"for `{meant}`." if meant else "before every name.")
    yield f"- Experts, where there are any: {text(FACTS['experts'][row.experts])}."
    if row.fp8 is not None:
        block = " x ".join(map(str, row.fp8.block))
        yield (
            f"- In fp8, `x.weight` has its scales in `x.{row.fp8.scale}`, one for {block} values; not in fp8: "
            f"{code(*row.fp8.plain)}, and norms, routers and biases inside the block."
        )


def conventions(row: Family) -> Iterator[str]:
    joined = (
        "the results of two projections are added" if "token_projection" in row.names else FACTS["concat"][row.concat]
    )
    yield f"- Joined: {joined}."
    yield f"- Hidden: {STAGES[row.hidden]}. Recycled: {STAGES[row.recycled]}."
    yield f"- Norms: {FACTS['gain'][row.gain]}. Position 0: {FACTS['position0'][row.position0]}."
    yield f"- Order: {ORDERS[row.order]}."
    yield ""


def engines(row: Family) -> Iterator[str]:
    def line(name: str, engine: Engine) -> tuple[str, ...]:
        where = f"[{SUPPORT[engine.support]}]({engine.source})" if engine.source else SUPPORT[engine.support]
        said = "; ".join(differs(engine)) if engine.support == "runs" else "; ".join(map(text, engine.notes))
        return (NAMES[name], where, said or "-")

    yield from table(("engine", "", "what it does"), (line(name, row.engines[name]) for name in ENGINES))


def differs(engine: Engine) -> Iterator[str]:
    """What is to be known of an engine that runs the head."""
    if engine.hidden:
        yield f"hidden {STAGES[engine.hidden]}"
    if engine.recycled:
        yield f"recycles {STAGES[engine.recycled]}"
    if engine.position0:
        yield FACTS["position0"][engine.position0]
    if engine.order:
        yield ORDERS[engine.order]
    if engine.modules is not None:
        yield f"uses at most {engine.modules} module{'s' * (engine.modules != 1)}"
    if engine.layers:
        yield f"knows the head at layer {' or '.join(map(str, engine.layers))} alone"
    yield (
        f"takes the trunk's {' and '.join(engine.trunks)}" if engine.trunks else "takes the file's embedding and output"
    )
    yield f"a missing tensor: {MISSING[engine.missing]}"
    if engine.unset:
        yield f"left at its initial value where the file lacks it inside the module: {', '.join(engine.unset)}"
    yield from map(text, engine.notes)


def notes(row: Family) -> Iterator[str]:
    for title, lines in (
        ("Where engines differ, and what else to know", map(text, row.disagreements)),
        ("Not settled", map(text, row.unverified)),
        ("Read beside the engines' code", (f"<{source}>" for source in row.sources)),
    ):
        found = list(lines)
        if found:
            yield f"{title}:"
            yield ""
            yield from (f"- {line}" for line in found)
            yield ""


def page() -> str:
    lines = [INTRO, *matrix(), *support(), *(line for row in rows() for line in section(row))]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
