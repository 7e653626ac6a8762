"""Compare the index with the files: what index-based loaders miss, side files, and tensors stored twice."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from nextn.audit.findings import Finding, Severity, restore, same, verb
from nextn.checkpoint.checkpoint import INDEX, SINGLE, Problem
from nextn.checkpoint.head_inventory import Inventory
from nextn.text_format import counted, some

IDS = ("index", "side-file", "stored-twice")
_SEVERITY: dict[str, Severity] = {
    "missing_file": "error", "missing_tensor": "error", "misplaced": "error", "duplicate": "warning",
    "unlisted": "warning",
}  # fmt: skip
_VALID = {
    "missing_file": "Every file that the index names.",
    "missing_tensor": "Each tensor in the file that the index gives.",
    "misplaced": "Each tensor in the file that the index gives.",
    "duplicate": "Each tensor in one file.",
    "unlisted": "Every tensor of an indexed file in the index: index-based loaders do not see the others.",
}


def index(inventory: Inventory) -> Iterator[Finding]:
    """Report disagreements between index and files, one finding for each file and kind."""
    groups: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    for problem in inventory.checkpoint.problems:
        groups[problem.kind, problem.file].append(problem)
    named = _by_file(inventory.checkpoint.index or {}) if any(kind == "missing_file" for kind, _ in groups) else {}
    for (kind, file), problems in groups.items():
        found = problems[0].message
        if len(problems) > 1:
            found += f"; the same for {counted(len(problems) - 1, 'more tensor')}"
        if heads := sum(_is_head(inventory, problem, named) for problem in problems):
            found += f"; {counted(heads, 'tensor')} of the head among them"
        unread = kind == "duplicate" and not _is_indexed(inventory, problems[0])
        severity = "note" if unread else _SEVERITY[kind]
        yield Finding("index", severity, f"{INDEX}: {file}", f"{found}.", _VALID[kind], _fix(inventory, kind, file))


def side_file(inventory: Inventory) -> Iterator[Finding]:
    """Report files that hold tensors of the head and that index-based loaders do not open."""
    family, checkpoint = inventory.family, inventory.checkpoint
    heads: dict[str, list[str]] = defaultdict(list)
    for name in inventory.stored.values():
        heads[checkpoint.tensors[name].file].append(name)
    for file in (file for file in checkpoint.unindexed if file in heads):
        readers = [name for name, engine in family.engines.items() if any(file in note for note in engine.notes)]
        published = any(file in remark for remark in family.remarks)
        severity: Severity = "note" if published else "warning" if readers else "error"
        read = f"{verb(readers, 'read')} it nevertheless" if readers else "no engine is known to read it nevertheless"
        unnamed = "which the index does not list" if checkpoint.index else f"which no loader opens next to {SINGLE}"
        yield Finding(
            "side-file", severity, file,
            f"{counted(len(heads[file]), 'tensor')} of the head in {file}, {unnamed}; {read}.",
            "As it is: the family is published with this file." if published else f"{file} in the index's weight_map.",
            "Nothing needs to be done." if published else restore(inventory),
        )  # fmt: skip


def stored_twice(inventory: Inventory) -> Iterator[Finding]:
    """Report tensors of the head stored under several names."""
    for names in inventory.duplicates.values():
        equal = all(same(inventory.checkpoint, names[0], other) for other in names[1:])
        yield Finding(
            "stored-twice", "note" if equal else "warning", names[0],
            f"The same tensor of the head is stored as {some(names)}, with {'equal' if equal else 'different'} values.",
            "Only one of them: which one an engine uses depends on its load order.",
            restore(inventory, force=True) if not equal else "Nothing needs to be done.",
        )  # fmt: skip


def _by_file(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    """Return file -> the tensors that the index assigns to it."""
    names_by_file: dict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        names_by_file[file].append(name)
    return names_by_file


def _is_head(inventory: Inventory, problem: Problem, named: Mapping[str, Sequence[str]]) -> bool:
    """Whether the tensor is the head's, or of a missing file any tensor that the index assigns to it."""
    names = named[problem.file] if problem.tensor is None else [problem.tensor]
    return any(name and inventory.family.canonical(name, inventory.num_layers) for name in names)


def _is_indexed(inventory: Inventory, problem: Problem) -> bool:
    """Whether index-based loaders open the file at all."""
    return problem.file not in inventory.checkpoint.unindexed


def _fix(inventory: Inventory, kind: str, file: str) -> str:
    if kind == "missing_file":
        return f"Download {file} again (`hf download`), or run `{restore(inventory)}` if only the head is missing."
    return "Write a new index from the files, or download both again."


RULES = (index, side_file, stored_twice)
