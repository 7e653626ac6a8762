"""What the head says at every column of a text, and what decoding makes of it: teacher-forced, and yet exact.

A round that starts at column i knows tokens up to t_{i+1}; depth k is judged against t_{i+k+1}. Drafts that are kept
are the text's own tokens, so all that a round of decoding would see stands in the text. What is kept is random at a
temperature, but its law given the text is known (`RULES`), so no draft need be drawn.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nextn.drafting import Contract
from nextn.errors import ConfigError
from nextn.head import Head
from nextn.model import Model
from nextn.sampling import Sampling, law
from nextn.trunk import Hidden, Trunk

# Given the text x, with r_j = q_j(x_j) / p_j(x_j): the chance that depths 1..k all stand. Law p of the trunk, q of the
# head after the text's own tokens; P(kept and x) / P(x), in which the drafts' law cancels.
RULES = {
    "greedy": "[x_j = argmax q_j] for all j: the text is the trunk's argmax",
    "ratio": "product of min(1, r_j): drafts drawn from q, each judged alone (Leviathan et al. 2023, algorithm 1)",
    "block": "min over j <= k of min(1, r_1 ... r_j): drafts judged together (Sun et al. 2024, algorithm 2)",
    "argmax": "[x_j = argmax q_j] for all j: argmax drafts, kept with p(draft), as by comparison with a sampled token",
    "match": "product of q_j(x_j): drafts drawn from q, kept only if the trunk draws the same token",
}
# Columns of a parallel pass: texts go together up to so many. Starts whose laws are in memory at once.
_COLUMNS, _STARTS = 2048, 128
_SIDES = ("given", "expected")  # of a Survival


@dataclass(frozen=True)
class Text:
    """A prompt and what the trunk went on with. ended: by eos or a full context, not by a number of
    tokens: then a draft of the last token is judged, too."""

    prompt: tuple[int, ...]
    new: tuple[int, ...]
    temperature: float = 0.0
    ended: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.new

    @property
    def rooms(self) -> list[int]:
        """How many drafts are judged at most in a round that starts behind new token s = 0, 1, ...; at least one."""
        last = len(self.new) - (1 if self.ended else 2)
        return [last - start for start in range(last)]


@dataclass(frozen=True, eq=False)
class Survival:
    """given [S, K+1] float64: the chance that depths 1..k all stand in a round from start s, given the text.

    expected [S, K]: the same of depth k, averaged over its token by the trunk's law: less noise, the same mean. Entries
    beyond a start's room count for nothing.
    """

    given: Tensor
    expected: Tensor

    def walked(self, rooms: Sequence[int], drafts: int) -> tuple[list[float], list[float]]:
        """What K = drafts would offer and keep at each depth, rounds following each other through this text.

        A round that keeps j drafts is followed by one j + 1 tokens on. So starts behind kept drafts are rarer, and a
        mean over all columns is something else.
        """
        if not rooms:
            return [0.0] * drafts, [0.0] * drafts
        starts, reach, judged = _begun(self.given[None, :, : drafts + 1], rooms)
        offered, kept = (starts * each * judged for each in (reach[..., :-1], self.expected[:, :drafts]))
        return offered.sum((0, 1)).tolist(), kept.sum((0, 1)).tolist()


def counted(parts: Sequence[Survival], rooms: Sequence[int], drafts: int) -> tuple[Tensor, Tensor]:
    """`walked` of texts with the same rooms, [texts, K] each, as counters tell it that say of positions what was kept
    alone: offered are the rounds that kept every shallower draft, also those that had no room to draft so deep."""
    given, expected = (torch.stack([getattr(each, name)[: len(rooms)] for each in parts]) for name in _SIDES)
    starts, reach, judged = _begun(given[..., : drafts + 1], rooms)
    return (starts * reach[..., :-1]).sum(1), (starts * expected[..., :drafts] * judged).sum(1)


def _begun(given: Tensor, rooms: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """given [B, S, K+1] -> [B, S, 1], the chance that a round begins there; [B, S, K+1], given within the room; [S, K],
    whether a depth is judged."""
    room, depths = torch.tensor(rooms)[:, None], torch.arange(given.shape[-1])
    reach = given * (depths <= room)  # no draft is judged beyond the room
    starts = walk(reach.transpose(1, 2), torch.ones(given.shape[:2], dtype=torch.bool))
    return starts[..., None], reach, depths[:-1] < room


def walk(reach: Tensor, valid: Tensor) -> Tensor:
    """reach [B, K+1, C] float64: the chance that a round from there keeps its first 0..K drafts; valid [B, C]: where
    one may begin -> [B, C], the chance that one does: at the first of each run of valid columns, and behind each round.
    """
    rows, rounds, columns = reach.shape
    ends = reach - torch.cat([reach[:, 1:], reach.new_zeros(rows, 1, columns)], dim=1)
    starts = reach.new_zeros(rows, columns + rounds)
    for column in range(columns):
        here = valid[:, column]
        begins = here & ~valid[:, column - 1] if column else here
        ahead = starts[:, column : column + rounds]
        ahead.copy_(ahead.where(here[:, None], 0.0))  # also of rounds that would reach beyond the gap
        starts[:, column] = torch.where(begins, 1.0, starts[:, column])
        starts[:, column + 1 : column + rounds + 1] += starts[:, column, None] * ends[:, :, column]
    return starts[:, :columns]


@dataclass(frozen=True, eq=False)
class Scored:
    """One text under one reading of the head. drafts, ranks [S]: depth 1's argmax, and how many tokens it likes better
    than the text's. survivals: rule -> Survival."""

    text: Text
    survivals: dict[str, Survival]
    drafts: Tensor
    ranks: Tensor
    rooms: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rooms", self.text.rooms)


@torch.inference_mode()
def states(trunk: Trunk, texts: Iterable[Text], *, chunk: int = 512) -> list[Hidden]:
    """The trunk over each text as decoding prefills it: Hidden of [T, H] each."""
    chunk, out = min(chunk, trunk.max_window or chunk), []
    for text in texts:
        cache, parts = trunk.cache(1), []
        tokens = torch.tensor([text.tokens], device=trunk.device)
        for window in tokens.split(chunk, dim=1):
            parts.append(trunk(window, cache))
            cache.keep([window.shape[1]])
        out.append(Hidden(*(torch.cat([getattr(each, name)[0] for each in parts]) for name in ("normed", "eaten"))))
    return out


@torch.inference_mode()
def scored(
    model: Model, texts: Sequence[Text], hiddens: Sequence[Hidden], depths: int, *, contract: Contract | None = None
) -> Iterator[Scored]:
    """The chains of all starts, `depths` deep; hiddens: `states` of the same texts.

    contract: what decoding gets wrong; an offset of +1, which nothing could draft with, can be scored. In one parallel
    pass where `Head.can_unroll`, else column by column through the head's own caches. Raises ConfigError for
    rerun=False: then chains depend on where rounds began.
    """
    contract, head = contract or Contract(), model.head
    if head is None:
        raise ConfigError("the checkpoint has no head, so there is nothing to measure")
    if not contract.rerun:
        raise ConfigError("contract.rerun = False can only be decoded: what a column sees depends on earlier rounds")
    fed = [_fed(text, hidden, contract, head) for text, hidden in zip(texts, hiddens, strict=True)]
    for text, hidden, chains in zip(texts, hiddens, _chains(head, fed, depths), strict=True):
        yield _judged(model, text, chains, hidden.normed, depths)


@dataclass(frozen=True, eq=False)
class _Fed:
    """What the head is given: tokens [T], eaten [T, ...]; `first` is the column of start 0."""

    tokens: Tensor
    eaten: Tensor
    first: int


def _fed(text: Text, hidden: Hidden, contract: Contract, head: Head) -> _Fed:
    tokens, eaten = torch.tensor(text.tokens, device=hidden.eaten.device), hidden.eaten
    if contract.offset:
        moved = torch.zeros_like(eaten)
        if contract.offset < 0:
            moved[1:] = eaten[:-1]
        else:
            moved[:-1] = eaten[1:]
        eaten = moved
    # Without prefill the head's cache begins with the columns that the first round runs.
    cut = 0 if contract.prefill else max(0, len(text.prompt) - head.num_modules)
    return _Fed(tokens[cut:], eaten[cut:], len(text.prompt) - 1 - cut)


def _chains(head: Head, fed: Sequence[_Fed], depths: int) -> Iterator[list[Tensor]]:
    """Per text and depth the normed states [<= S, H] at its starts, as far as the text's tokens go."""
    if not head.can_unroll:
        yield from (_stepped(head, each, depths) for each in fed)
        return
    for group in _groups(fed):
        width = max(depths + 1, *(len(each.tokens) for each in group))
        tokens = pad_sequence([_padded(each.tokens, width) for each in group], batch_first=True)
        eaten = pad_sequence([_padded(each.eaten, width) for each in group], batch_first=True)
        outs = head.unrolled(tokens, eaten, depths)
        for row, each in enumerate(group):
            ends = [len(each.tokens) - depth for depth in range(1, depths + 1)]
            yield [out[row, each.first : max(each.first, end)] for out, end in zip(outs, ends, strict=True)]


def _groups(fed: Sequence[_Fed]) -> Iterator[list[_Fed]]:
    group: list[_Fed] = []
    for each in fed:
        if group and (len(group) + 1) * max(len(other.tokens) for other in [*group, each]) > _COLUMNS:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _padded(values: Tensor, width: int) -> Tensor:
    """Zeros behind [T, ...], up to width: no column before them sees them."""
    return torch.cat([values, values.new_zeros(max(0, width - len(values)), *values.shape[1:])])


def _stepped(head: Head, fed: _Fed, depths: int) -> list[Tensor]:
    """The same by the decoder's own calls: caches filled up to each column, then a chain that is dropped again."""
    modules, length = min(head.num_modules, depths), len(fed.tokens)
    tokens, caches = _padded(fed.tokens, length + depths), [head.cache(1) for _ in range(modules)]
    outs: list[list[Tensor]] = [[] for _ in range(depths)]
    for start, end in [(0, fed.first)] * bool(fed.first) + [(i, i + 1) for i in range(fed.first, length - 1)]:
        given = fed.eaten[None, start:end]
        for depth in range(1, modules + 1):
            step = head.step(depth - 1, tokens[None, start + depth : end + depth], given, cache=caches[depth - 1])
            caches[depth - 1].keep([end - start])
            given = step.recycled if head.eats_recycled(depth + 1) else given
            outs[depth - 1].append(step.normed[0])
        if start < fed.first:
            outs = [[] for _ in range(depths)]
            continue
        for depth in range(modules + 1, depths + 1):
            step = head.step(modules - 1, tokens[None, start + depth : end + depth], step.recycled, cache=caches[-1])
            caches[-1].keep([1])
            outs[depth - 1].append(step.normed[0])
        caches[-1].truncate([end])
    ends = [length - depth - fed.first for depth in range(1, depths + 1)]
    return [torch.cat(out)[: max(0, end)] for out, end in zip(outs, ends, strict=True)]


def _judged(model: Model, text: Text, chains: Sequence[Tensor], normed: Tensor, depths: int) -> Scored:
    """Each start's chain against the text and, at a temperature, the trunk's laws."""
    count, place = len(text.rooms), len(text.prompt)
    truth = torch.tensor(text.new, device=normed.device)
    rules = ["greedy"] if not text.temperature else [rule for rule in RULES if rule != "greedy"]
    given = {rule: torch.ones(count, depths + 1, dtype=torch.float64) for rule in rules}
    expected = {rule: torch.zeros(count, depths, dtype=torch.float64) for rule in rules}
    best, ranks, worth = torch.zeros(2, count, dtype=torch.long), None, torch.ones(count, dtype=torch.float64)
    drafts, ranks = best
    for depth, start in ((k, s) for k in range(1, depths + 1) for s in range(0, max(0, count - k + 1), _STARTS)):
        here = slice(start, min(start + _STARTS, count - depth + 1))
        logits = _logits(model, depth, chains[depth - 1][here])
        target = truth[here.start + depth : here.stop + depth]
        if depth == 1:
            drafts[here] = logits.argmax(-1).cpu()
            ranks[here] = (logits > logits.gather(-1, target[:, None])).sum(-1).cpu()
        trunk = normed[place + here.start - 1 + depth : place + here.stop - 1 + depth] if text.temperature else None
        laws = None if trunk is None else _laws(model, trunk, logits, text.temperature)
        before = {rule: given[rule][here, depth - 1] for rule in rules}
        now, mean, worth[here] = _stand(before, worth[here], logits, laws, target)
        for rule in rules:
            given[rule][here, depth], expected[rule][here, depth - 1] = now[rule], mean[rule]
    return Scored(text, {rule: Survival(given[rule], expected[rule]) for rule in rules}, drafts, ranks)


def _logits(model: Model, depth: int, state: Tensor) -> Tensor:
    assert model.head is not None
    return model.head.logits(model.head.module(depth), state).float()


def _laws(model: Model, normed: Tensor, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """p and q, [S, V] each."""
    sampling = Sampling(temperature)
    return law(model.trunk.logits(normed), sampling), law(logits, sampling)


def _stand(
    before: dict[str, Tensor], worth: Tensor, logits: Tensor, laws: tuple[Tensor, Tensor] | None, target: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """One depth of `RULES` -> (given, expected, worth r_1 ... r_k). before: given of the depth before."""
    right = (logits.argmax(-1) == target).cpu().double()
    if laws is None:
        now = {rule: chance * right for rule, chance in before.items()}
        return now, now, worth
    p, q = laws
    at, best = target[:, None], logits.argmax(-1, keepdim=True)
    drawn, wanted = (each.gather(-1, at)[:, 0].cpu().double() for each in (q, p))
    ratio = drawn / wanted.clamp_min(torch.finfo(torch.float32).tiny)
    now = {
        "ratio": before["ratio"] * ratio.clamp_max(1),
        "block": torch.minimum(before["block"], worth * ratio),
        "argmax": before["argmax"] * right,
        "match": before["match"] * drawn,
    }
    scale = [each[:, None].to(q) for each in (worth, before["block"])]
    mean = {
        "ratio": before["ratio"] * torch.minimum(p, q).sum(-1).cpu().double(),
        "block": torch.minimum(scale[0] * q, scale[1] * p).sum(-1).cpu().double(),
        "argmax": before["argmax"] * p.gather(-1, best)[:, 0].cpu().double(),
        "match": before["match"] * (p * q).sum(-1).cpu().double(),
    }
    return now, mean, worth * ratio
