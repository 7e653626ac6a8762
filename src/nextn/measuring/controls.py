"""Controls beside the figures: shares that ought to be near 0, and what it means where they are not."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nextn.drafting import Contract
from nextn.measuring.columns import Scored, scored
from nextn.model import Model
from nextn.trunk import Hidden

# A control above this share is no control: the texts repeat themselves, or the head does not look at what it is given.
_CONTROL, _LOW = 0.1, 0.2


@dataclass(frozen=True)
class Controls:
    """Shares that ought to be near 0 beside `columns`, which ought not; see `DEFINITIONS`."""

    columns: float
    shifted: float
    shuffled: float
    chance: float
    median_rank: float
    distinct_drafts: int
    vocab_size: int

    @property
    def warnings(self) -> list[str]:
        """What the controls say against the figures, or about why they are low."""
        said = []
        if self.shifted > _CONTROL:
            said.append(
                f"control: {self.shifted:.0%} of the drafts equal the token after the one that they predict (near 0 in "
                f"text that does not repeat itself; {self.chance:.0%} by accident): the texts are easy to draft"
            )
        if self.shuffled > max(_CONTROL, self.columns / 4):
            said.append(
                f"control: {self.shuffled:.0%} are kept with hidden states in random order, {self.columns:.0%} in the "
                "right one: the head hardly looks at them, or the texts are easy to draft"
            )
        if self.columns >= _LOW:
            return said
        if self.distinct_drafts == 1:
            said.append("the head drafts one token, whatever it is given: its weights are not what was trained")
        if self.median_rank > 0.9 * self.vocab_size:
            said.append(
                f"the text's token has median rank {self.median_rank:.0f} of {self.vocab_size} at depth 1, worse than "
                "chance: the signature of norm gains read as w for 1 + w, or the reverse; --probe tries them"
            )
        else:
            said.append(
                f"acceptance is low; the text's token has median rank {self.median_rank:.0f} of {self.vocab_size} at "
                "depth 1; --probe tries other readings of the weights"
            )
        return said


def controlled(
    model: Model, used: Sequence[Scored], hiddens: Sequence[Hidden], rule: str, *, contract: Contract
) -> Controls:
    """The controls of these texts, scored under the contract; hiddens: the trunk's states of each."""
    texts = [each.text for each in used]
    shuffled = [_shuffled(hidden) for hidden in hiddens]
    columns = [
        (draft, *following)
        for each in used
        for draft, *following in zip(each.drafts.tolist(), each.text.new[1:], [*each.text.new[2:], None], strict=False)
    ]
    drafts, tokens = [column[0] for column in columns], [column[1] for column in columns]
    ranks = [rank for each in used for rank in each.ranks.tolist()]
    return Controls(
        columns=_over_columns(used, rule),
        shifted=sum(draft == after for draft, _, after in columns) / max(1, len(columns)),
        shuffled=_over_columns([*scored(model, texts, shuffled, 1, contract=contract)], rule),
        chance=_chance(drafts, tokens),
        median_rank=statistics.median(ranks) if ranks else 0.0,
        distinct_drafts=len(set(drafts)),
        vocab_size=model.trunk.vocab_size,
    )


def _over_columns(found: Sequence[Scored], rule: str) -> float:
    kept = [value for each in found for value in each.survivals[rule].expected[:, 0].tolist()]
    return sum(kept) / max(1, len(kept))


def _shuffled(hidden: Hidden) -> Hidden:
    """The text's states in random order, the prompt's with them: a head that looks at them has nothing left."""
    order = torch.randperm(len(hidden.eaten), generator=torch.Generator().manual_seed(0))
    return Hidden(hidden.normed, hidden.eaten[order.to(hidden.eaten.device)])


def _chance(drafts: Sequence[int], tokens: Sequence[int]) -> float:
    if not drafts or not tokens:
        return 0.0
    counts = [torch.tensor(side).bincount(minlength=max(*drafts, *tokens) + 1).double() for side in (drafts, tokens)]
    return float((counts[0] * counts[1]).sum() / len(drafts) / len(tokens))
