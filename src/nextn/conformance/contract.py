"""What an engine must get right, as clauses with ids as in docs/reference/contract.md. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Clause:
    """One requirement; id and name as in docs/reference/contract.md."""

    id: str
    name: str
    must: str  # the requirement in a sentence
    faults: tuple[str, ...] = ()  # names of `evaluate.faults.FAULTS` that break it, and what `check` itself detects


# fmt: off
CLAUSES: tuple[Clause, ...] = (
    Clause("C1", "pairs", "at position i the head takes the embedding of token i + 1 and the trunk's state of i",
           ("pair-shifted",)),
    Clause("C2", "join", "norms with the family's weights (w or 1 + w), then eh_proj with its inputs in order",
           ("gain-less", "gain-more", "halves-swapped")),
    Clause("C3", "state", "the head takes the trunk's hidden state after or before its final norm, as the family does",
           ("wrong-hidden",)),
    Clause("C4", "positions", "positions increase by one; the first token's embedding is kept or zeroed, as the family "
           "does", ("position0",)),
    Clause("C5", "prefill", "the head runs over all positions of the prompt before the first draft", ("no-prefill",)),
    Clause("C6", "re-run", "at accepted positions the head's cache is refreshed with the trunk's true hidden states",
           ("no-rerun",)),
    Clause("C7", "recycled state", "depth k + 1 takes the hidden state of depth k: after or before the head's norm",
           ("recycled-wrong",)),
    Clause("C8", "rollback", "greedy text equals that of plain decoding: rejected positions leave nothing behind",
           ("other-text",)),
    Clause("C9", "shared tensors", "embedding and lm_head are the trunk's, or the head's own, as the family does",
           ("own-output-lost",)),
    Clause("C10", "missing tensors", "a head tensor that is missing or unexpected is an error, never ignored",
           ("head-unset",)),
    Clause("C11", "several modules", "MTP layer k at depth k, each with its own cache",
           ("one-module", "modules-permuted")),
    Clause("C12", "precision", "the head is computed in no lower precision than it is stored in",
           ("head-quantized", "head-2-bit")),
    Clause("C13", "sampling rule", "above temperature 0 a draft is accepted with probability min(1, p / q), or by a "
           "rule that accepts more", ("exact-match", "argmax-drafts")),
    Clause("C14", "metrics", "rounds, draft tokens and accepted ones by position are counted, and add up to the tokens",
           ("no-counts", "counts-off")),
)
# fmt: on


@dataclass(frozen=True)
class ClauseOutcome:
    """The result for one clause."""

    clause: Clause
    status: str  # held, broken, or untold: inconclusive
    evidence: str
    expected: str = ""  # counts or texts, where broken
    seen: str = ""
    fault: str = ""  # the fault that explains what was seen
    issues: tuple[str, ...] = ()  # public threads where the fault occurred

    def as_record(self) -> dict[str, object]:
        """Return the JSON form."""
        details = {name: getattr(self, name) for name in ("evidence", "expected", "seen", "fault")}
        clause = {"clause": self.clause.id, "name": self.clause.name}
        return {**clause, "said": self.status, **details, "issues": list(self.issues)}


def clause_of(fault: str) -> Clause | None:
    """Return the clause that a fault breaks; None for one that breaks none."""
    return next((clause for clause in CLAUSES if fault in clause.faults), None)
