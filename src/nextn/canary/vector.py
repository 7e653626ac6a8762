"""A test vector: which tokens meet which states at which positions, pass by pass, from the decoder's own events."""

from collections.abc import Sequence

from nextn.decode import Event, Settings, rounds
from nextn.model import Model

_ROUNDS = 4


def vector(model: Model, prompt: Sequence[int], *, drafts: int, most: int = _ROUNDS) -> dict[str, object]:
    """The prefill and the first `most` rounds of a greedy decode.

    Each pass: who runs, the first position, the tokens eaten there and on, and the states with them: `h<i>` the trunk's
    of column i, `g<k>` what depth k handed on.
    """
    events: list[Event] = []
    settings = Settings(drafts=drafts, max_tokens=(drafts + 1) * most + 1, eos=())
    out: list[dict[str, object]] = []
    for each in rounds(model.trunk, model.head, [list(prompt)], settings, observer=events.append):
        part = each.rows[0]
        passes = [_pass(event) for event in events]
        events.clear()
        out.append({"passes": passes, "drafts": list(part.drafts), "kept": part.kept, "emitted": list(part.emitted)})
        if len(out) > most:
            break
    return {"prompt": list(prompt), "drafts": drafts, "rounds": out}


def _pass(event: Event) -> dict[str, object]:
    by = "trunk" if event.module is None else f"head[{event.module}]"
    columns = range(event.start, event.start + len(event.tokens))
    states = [] if event.module is None else [f"h{i}" if event.hidden == "h" else event.hidden for i in columns]
    return {"phase": event.phase, "by": by, "position": event.start, "tokens": list(event.tokens), "states": states}
