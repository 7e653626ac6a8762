"""Index against files: what a loader that follows the index misses, side files, and tensors stored twice."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from nextn.audit.finding import Finding, Severity
from nextn.audit.windows import same
from nextn.audit.words import restore, verb
from nextn.checkpoints.checkpoint import INDEX, SINGLE, Problem
from nextn.checkpoints.inventory import Inventory
from nextn.words import counted, some

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
    "unlisted": "Every tensor of an indexed file in the index: loaders that go by it take the others for absent.",
}


def index(inventory: Inventory) -> Iterator[Finding]:
    """Index and files disagree; one finding for each file and kind of disagreement."""
    groups: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    for problem in inventory.checkpoint.problems:
        groups[problem.kind, problem.file].append(problem)
    named = _by_file(inventory.checkpoint.index or {}) if any(kind == "missing_file" for kind, _ in groups) else {}
    for (kind, file), problems in groups.items():
        found = problems[0].message
        if len(problems) > 1:
            found += f", and {counted(len(problems) - 1, 'tensor')} more likewise"
        if heads := sum(_is_head(inventory, problem, named) for problem in problems):
            found += f"; {counted(heads, 'tensor')} of the head among them"
        aside = kind == "duplicate" and not _followed(inventory, problems[0])
        severity = "note" if aside else _SEVERITY[kind]
        yield Finding("index", severity, f"{INDEX}: {file}", f"{found}.", _VALID[kind], _mend(inventory, kind, file))


def side_file(inventory: Inventory) -> Iterator[Finding]:
    """A file that holds tensors of the head and that loaders which follow the index do not open."""
    family, checkpoint = inventory.family, inventory.checkpoint
    heads: dict[str, list[str]] = defaultdict(list)
    for name in inventory.stored.values():
        heads[checkpoint.tensors[name].file].append(name)
    for file in (each for each in checkpoint.unindexed if each in heads):
        readers = [name for name, engine in family.engines.items() if any(file in note for note in engine.notes)]
        published = any(file in remark for remark in family.remarks)
        severity: Severity = "note" if published else "warning" if readers else "error"
        read = f"{verb(readers, 'read')} it all the same" if readers else "no engine is known to read it all the same"
        unnamed = "which the index does not name" if checkpoint.index else f"which no loader opens beside {SINGLE}"
        yield Finding(
            "side-file", severity, file,
            f"{counted(len(heads[file]), 'tensor')} of the head lie in {file}, {unnamed}; {read}.",
            "So: this family is published with such a file." if published else f"{file} in the index's weight_map.",
            "Nothing needs to be done." if published else restore(inventory),
        )  # fmt: skip


def stored_twice(inventory: Inventory) -> Iterator[Finding]:
    """One tensor of the head under several names."""
    for names in inventory.twice.values():
        equal = all(same(inventory.checkpoint, names[0], other) for other in names[1:])
        yield Finding(
            "stored-twice", "note" if equal else "warning", names[0],
            f"The same part of the head is stored as {some(names)}, with {'equal' if equal else 'different'} values.",
            "One of them: which one an engine reads depends on its order.",
            restore(inventory, whole=True) if not equal else "Nothing needs to be done.",
        )  # fmt: skip


def _by_file(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    """File -> the tensors that the index puts in it."""
    named: dict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        named[file].append(name)
    return named


def _is_head(inventory: Inventory, problem: Problem, named: Mapping[str, Sequence[str]]) -> bool:
    """Whether the tensor, or of a missing file any that the index puts there, is the head's."""
    names = named[problem.file] if problem.tensor is None else [problem.tensor]
    return any(name and inventory.family.canonical(name, inventory.num_layers) for name in names)


def _followed(inventory: Inventory, problem: Problem) -> bool:
    """Whether loaders that follow the index open the file at all; they do not see a copy in another."""
    return problem.file not in inventory.checkpoint.unindexed


def _mend(inventory: Inventory, kind: str, file: str) -> str:
    if kind == "missing_file":
        return f"Fetch {file} again (`hf download`), or run `{restore(inventory)}` if only the head is lost."
    return "Write the index anew from the files, or fetch both again."


RULES = (index, side_file, stored_twice)
