"""What an engine must get right, as clauses with ids: what `check` and docs/contract.md share. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Clause:
    """id, name: as in docs/contract.md. must: in a sentence. faults: names of `measuring.faults.FAULTS` that break it,
    and what `check` itself sees."""

    id: str
    name: str
    must: str
    faults: tuple[str, ...] = ()


# fmt: off
CLAUSES: tuple[Clause, ...] = (
    Clause("C1", "pairs", "column i of the head eats the embedding of token i + 1 and the trunk's state of column i",
           ("pair-shifted",)),
    Clause("C2", "join", "norms with the family's gains (w or 1 + w), then the projection with its halves in order",
           ("gain-less", "gain-more", "halves-swapped")),
    Clause("C3", "state", "the state eaten is the trunk's after or before its final norm, as the family's row says",
           ("wrong-hidden",)),
    Clause("C4", "positions", "positions go on by one; the first column's token is kept or zeroed as the row says",
           ("position0",)),
    Clause("C5", "prefill", "the head runs over every pair of the prompt before the first draft", ("no-prefill",)),
    Clause("C6", "re-run", "kept columns run through the head again with the trunk's true states", ("no-rerun",)),
    Clause("C7", "recycled state", "depth k + 1 eats the state that depth k hands on: after or before the head's norm",
           ("recycled-wrong",)),
    Clause("C8", "rollback", "greedy text is that of plain decoding: rejected columns leave nothing behind",
           ("other-text",)),
    Clause("C9", "shared tensors", "embedding and output head are the trunk's, or the head's own where the row says so",
           ("own-output-lost",)),
    Clause("C10", "missing tensors", "a head tensor that is absent, or has no place, is an error and not a guess",
           ("head-unset",)),
    Clause("C11", "several modules", "module k at depth k, each with a cache of its own",
           ("one-module", "modules-permuted")),
    Clause("C12", "precision", "the head is computed no coarser than it is stored", ("head-quantised", "head-2-bit")),
    Clause("C13", "sampling rule", "above temperature 0 a draft is kept with min(1, p / q), or by a rule that keeps "
           "more", ("exact-match", "argmax-drafts")),
    Clause("C14", "metrics", "rounds, drafted tokens and kept drafts by position are counted, and add up to the tokens",
           ("no-counts", "counts-off")),
)
# fmt: on


@dataclass(frozen=True)
class Outcome:
    """One clause. said: held, broken or untold. expected, seen: where broken. fault, issues: what fits, and where it
    was met before."""

    clause: Clause
    said: str
    evidence: str
    expected: str = ""
    seen: str = ""
    fault: str = ""
    issues: tuple[str, ...] = ()

    def as_record(self) -> dict[str, object]:
        told = {name: getattr(self, name) for name in ("said", "evidence", "expected", "seen", "fault")}
        return {"clause": self.clause.id, "name": self.clause.name, **told, "issues": list(self.issues)}


def clause_of(fault: str) -> Clause | None:
    """The clause that a fault breaks; None for one that breaks none."""
    return next((clause for clause in CLAUSES if fault in clause.faults), None)
