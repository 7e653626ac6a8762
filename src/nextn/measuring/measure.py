"""The acceptance that a head should have, from the checkpoint alone: on the trunk's own texts, with controls beside it.

`continued` decodes the prompts once; `columns` scores every column of these texts, so that every K, every rule of
acceptance and every misreading of the head (`rescored`) costs no more decoding.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from nextn import __version__
from nextn.benchmarking.cost import Machine
from nextn.benchmarking.workload import Prompt, by_domain
from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.provenance import head_fingerprint, trunk_fingerprint
from nextn.checkpoints.snapshot import on_disk
from nextn.corpus.data import degeneracy
from nextn.decode import Round, Settings
from nextn.drafting import Contract
from nextn.errors import ConfigError
from nextn.figures.acceptance import DEFINITION, Acceptance
from nextn.figures.estimate import INTERVAL, Estimate, jackknifed, share
from nextn.figures.speedup import expected_length
from nextn.measuring.columns import RULES, Scored, Text, scored, states
from nextn.model import Model
from nextn.sampling import Sampling
from nextn.text import Result, generate
from nextn.trunk import Hidden

# Rows decoded together; below so many tokens loops cannot be told for sure (`Degeneracy.looping`).
_BATCH, _TELLING = 8, 200
# A control above this share is no control: the texts repeat themselves, or the head does not look at what it is given.
_CONTROL, _LOW = 0.1, 0.2

# Rules of acceptance that the decoder has, of those that can be scored (`RULES`).
DECODED = ("block", "ratio", "argmax")

DEFINITIONS = {
    "acceptance": DEFINITION.partition(";")[0] + "; rounds follow each other through the text as in decoding at this K",
    "length": "AL@K = 1 + sum over k <= K of a_1 ... a_k: tokens per round of K drafts, the trunk's own included",
    "interval_95": INTERVAL,
    "rule": RULES,
    "pass": "parallel: every column of a text at once; stepped: one by one through the head's caches; decoder: counted "
    "while decoding. The first two take the law of what is kept, given the text, so no draft is drawn",
    "decoder": "what was counted while the texts were decoded; temperature 0 by rule greedy, else by settings.rule. "
    "Wilson intervals that take rounds as independent",
    "columns": "a_1 over all columns alike, to compare the controls with",
    "shifted": "depth 1's argmax against the token after the one that it predicts",
    "shuffled": "a_1 over all columns, with each text's hidden states in random order",
    "chance": "argmax and token by accident: the sum over the vocabulary of the products of their frequencies",
    "median_rank": "how many tokens depth 1 likes better than the text's, in the median; vocab_size tokens in all",
    "looping": "texts that are loops (data.degeneracy): left out, unless all are",
    "short": f"texts of fewer than {_TELLING} tokens, in which loops cannot be told for sure",
    "hashes": "head: SHA-256 of its own tensors; trunk: of samples; prompts: of their token ids as JSON",
}


@dataclass(frozen=True)
class Plan:
    """drafts: the largest K. max_tokens: of each continuation. chat: through the chat template; None: text, where there
    is a template. path: what the texts are decoded on, see `Model.engine`. rule: of the decoder above temperature 0:
    block, ratio or argmax. Raises ConfigError for values out of range.
    """

    drafts: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    chat: bool | None = None
    seed: int = 0
    path: str = "auto"
    rule: str = "block"

    def __post_init__(self) -> None:
        if self.rule not in DECODED:
            raise ConfigError(
                f"rule {self.rule!r}; expected one of {', '.join(DECODED)}: others are scored, not decoded"
            )
        if self.drafts < 1:
            raise ConfigError(f"drafts = {self.drafts}; expected 1 or more: depth 1 is the least that can be measured")
        if self.max_tokens < 3:
            raise ConfigError(f"max_tokens = {self.max_tokens}; expected 3 or more, or no round has a draft")
        if not self.temperatures:
            raise ConfigError("no temperature was given; expected one at least, such as 0 (greedy)")
        for temperature in self.temperatures:
            Sampling(temperature)
        object.__setattr__(self, "temperatures", tuple(sorted(set(self.temperatures))))


@dataclass(frozen=True, eq=False)
class Drawn:
    """The texts of one temperature, and what the decoder counted in each; none where it did not run as asked."""

    texts: tuple[Text, ...]
    counted: tuple[Acceptance, ...]
    pooled: Acceptance | None


@dataclass(frozen=True)
class Figures:
    """a_1..a_K and AL of rounds of K = drafts over a domain's texts; offered, kept: sums, of chances where sampled."""

    temperature: float
    rule: str
    drafts: int
    domain: str
    num_texts: int
    rates: tuple[Estimate, ...]
    length: Estimate
    offered: tuple[float, ...]
    kept: tuple[float, ...]

    def as_record(self) -> dict[str, object]:
        """What goes into JSON; `DEFINITIONS` says what each number is."""
        named = {name: getattr(self, name) for name in ("temperature", "rule", "drafts", "domain", "num_texts")}
        rates = [each.as_record() for each in self.rates]
        return named | {
            "acceptance": [each["value"] for each in rates],
            "interval_95": [[each["low"], each["high"]] for each in rates],
            "length": self.length.as_record(),
            "offered": list(self.offered),
            "kept": list(self.kept),
        }


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


@dataclass(frozen=True, eq=False)
class Measured:
    """All that one measurement found. scored: temperature -> each text, scored; empty where only decoding can tell."""

    plan: Plan
    contract: Contract
    prompts: tuple[Prompt, ...]
    drawn: Mapping[float, Drawn]
    scored: Mapping[float, tuple[Scored, ...]] = field(repr=False)
    how: str
    controls: Controls | None = None
    source: str = ""
    family: str = ""
    hashes: Mapping[str, str] = field(default_factory=dict)
    machine: Machine | None = None

    def figures(
        self, temperature: float, *, rule: str | None = None, drafts: int | None = None, domain: str = "all"
    ) -> Figures:
        """rule: one of `rules(temperature)`, the first unless given. drafts: K, the largest unless given."""
        rule, drafts = rule or self.rules(temperature)[0], drafts or self.plan.drafts
        counts = self.counts(temperature, rule, drafts)
        used = [counts[place] for place in sorted(self.places(temperature, domain))]
        offered, kept = ([[each[side][k] for each in used] for k in range(drafts)] for side in (0, 1))

        def length(places: Sequence[int]) -> float:
            sums = [[sum(row[place] for place in places) for row in side] for side in zip(offered, kept, strict=True)]
            return expected_length([stood / asked if asked else float("nan") for asked, stood in sums])

        return Figures(
            temperature,
            rule,
            drafts,
            domain,
            len(used),
            tuple(share(stood, asked) for stood, asked in zip(kept, offered, strict=True)),
            jackknifed(length, len(used)),
            tuple(map(sum, offered)),
            tuple(map(sum, kept)),
        )

    def counts(self, temperature: float, rule: str, drafts: int) -> list[tuple[list[float], list[float]]]:
        """(offered, kept) by depth of each text. Raises ConfigError for what was not measured."""
        if rule not in self.rules(temperature) or not 1 <= drafts <= self.plan.drafts:
            known = ", ".join(self.rules(temperature))
            raise ConfigError(f"{rule=}, {drafts=}; expected one of {known}, and 1 <= drafts <= {self.plan.drafts}")
        if temperature in self.scored:
            return [each.survivals[rule].walked(each.rooms, drafts) for each in self.scored[temperature]]
        if drafts != self.plan.drafts:
            raise ConfigError(f"{drafts=}: this was counted while decoding, at K = {self.plan.drafts} alone")
        counted = self.drawn[temperature].counted
        return [(_filled(each.offered, drafts), _filled(each.kept, drafts)) for each in counted]

    def rules(self, temperature: float) -> list[str]:
        """Rules of acceptance that there are figures for, the usual one first."""
        if temperature in self.scored:
            return ["greedy"] if not temperature else [rule for rule in RULES if rule != "greedy"]
        return [self.plan.rule if temperature else "greedy"]

    def places(self, temperature: float, domain: str = "all") -> set[int]:
        """The domain's texts that do not loop; all of them where each one does."""
        places = set(range(len(self.prompts)) if domain == "all" else by_domain(self.prompts)[domain])
        return places - self.looping[temperature] or places

    @cached_property
    def looping(self) -> dict[float, set[int]]:
        return {
            temperature: {place for place, text in enumerate(drawn.texts) if degeneracy(text.new).looping}
            for temperature, drawn in self.drawn.items()
        }

    @property
    def domains(self) -> list[str]:
        return ["all", *by_domain(self.prompts)] if len(by_domain(self.prompts)) > 1 else ["all"]

    @property
    def warnings(self) -> list[str]:
        """Why figures may say less than they seem to."""
        said = []
        for temperature, drawn in self.drawn.items():
            at, total, loops = f"temperature {temperature:g}", len(drawn.texts), len(self.looping[temperature])
            short = sum(len(text.new) < _TELLING for text in drawn.texts)
            if loops == total:
                said.append(f"{at}: every text loops, and loops are easy to draft: these figures say little")
            elif loops:
                said.append(f"{at}: {loops} of {total} texts loop and are left out")
            if short:
                said.append(f"{at}: {short} of {total} texts have fewer than {_TELLING} tokens: loops may be missed")
        if len(self.prompts) < 8:
            said.append(f"{len(self.prompts)} texts: intervals of so few are wide, and rest on their being alike")
        return said + (self.controls.warnings if self.controls else [])

    def table(self) -> list[Figures]:
        """Every temperature, rule and K over all texts; the largest K by domain."""
        out = []
        choices = range(1, self.plan.drafts + 1) if self.scored else [self.plan.drafts]
        for temperature in self.plan.temperatures:
            for rule in self.rules(temperature):
                out += [self.figures(temperature, rule=rule, drafts=drafts) for drafts in choices]
                out += [self.figures(temperature, rule=rule, domain=each) for each in self.domains[1:]]
        return out

    def as_record(self) -> dict[str, object]:
        """The JSON document."""
        return {
            "model": self.source,
            "family": self.family,
            "nextn": __version__,
            "definitions": DEFINITIONS,
            "machine": None if self.machine is None else vars(self.machine),
            "hashes": {**self.hashes, "prompts": prompts_hash([text.prompt for text in self._texts])},
            "settings": vars(self.plan) | {"contract": vars(self.contract)},
            "pass": self.how,
            "domains": {domain: len(places) for domain, places in by_domain(self.prompts).items()},
            "texts": {f"{temperature:g}": self._told(temperature) for temperature in self.drawn},
            "figures": [each.as_record() for each in self.table()],
            "decoder": {
                f"{temperature:g}": None if drawn.pooled is None else drawn.pooled.as_record()
                for temperature, drawn in self.drawn.items()
            },
            "controls": None if self.controls is None else vars(self.controls),
            "warnings": self.warnings,
        }

    @property
    def _texts(self) -> tuple[Text, ...]:
        return self.drawn[self.plan.temperatures[0]].texts

    def _told(self, temperature: float) -> dict[str, object]:
        texts = self.drawn[temperature].texts
        return {
            "num": len(texts),
            "tokens": sum(len(text.new) for text in texts),
            "looping": sorted(self.looping[temperature]),
            "short": [place for place, text in enumerate(texts) if len(text.new) < _TELLING],
        }


def reference(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    contract: Contract | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> Measured:
    """Decode the prompts at each temperature, then score every column. contract: what to get wrong, see `columns`.

    on_text: called for each text that was decoded. Raises ConfigError for prompts that cannot be used, or no head.
    """
    if model.head is None:
        raise ConfigError("the checkpoint has no head, so there is nothing to measure")
    ids, contract = [prompt_tokens(model, prompt, plan.chat) for prompt in prompts], contract or Contract()
    drawn = {t: continued(model, ids, plan, t, contract=contract, on_text=on_text) for t in plan.temperatures}
    found = Measured(plan, contract, tuple(prompts), drawn, {}, "decoder", family=model.family.name)
    return rescored(found, model, contract) if contract.rerun else found


def rescored(measured: Measured, model: Model, contract: Contract) -> Measured:
    """The same texts under another reading of the head, which must have the same trunk; its controls with it."""
    hiddens = {t: states(model.trunk, drawn.texts) for t, drawn in measured.drawn.items()}
    found = {
        t: tuple(scored(model, drawn.texts, hiddens[t], measured.plan.drafts, contract=contract))
        for t, drawn in measured.drawn.items()
    }
    drawn = measured.drawn
    if contract != measured.contract:  # the decoder's counts are of the contract that it ran under
        drawn = {t: replace(each, counted=(), pooled=None) for t, each in drawn.items()}
    assert model.head is not None
    how = "parallel" if model.head.can_unroll else "stepped"
    out = replace(measured, contract=contract, drawn=drawn, scored=found, how=how)
    return replace(out, controls=_controls(out, model, hiddens[measured.plan.temperatures[0]]))


def continued(
    model: Model,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    temperature: float,
    *,
    contract: Contract | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> Drawn:
    """What the trunk goes on with, decoded with the head (it is lossless), and the counts of that decoding."""
    contract = contract or Contract()
    is_drafted = contract.offset <= 0  # nothing could draft with a later state
    results: list[Result] = []
    for start in range(0, len(prompts), _BATCH):
        settings = Settings(
            drafts=plan.drafts,
            sampling=Sampling(temperature),
            max_tokens=plan.max_tokens,
            seed=plan.seed + start,
            contract=contract if is_drafted else Contract(),
            block=plan.rule == "block",
            sampled_drafts=plan.rule != "argmax",
        )
        batch = prompts[start : start + _BATCH]
        results += generate(model, batch, settings, path=plan.path)
        for _ in batch:
            on_text()
    texts = tuple(
        Text(tuple(prompt), each.tokens, temperature, each.finish in ("eos", "context"))
        for prompt, each in zip(prompts, results, strict=True)
    )
    if not is_drafted:
        return Drawn(texts, (), None)
    pooled = Acceptance.of(Round((part,), 0.0, 0.0) for each in results for part in each.rounds)
    return Drawn(texts, tuple(each.acceptance for each in results), pooled)


def hashes(source: str) -> dict[str, str]:
    """Fingerprints of the head and the trunk of a checkpoint: what the figures are of."""
    inventory = on_disk(Inventory.of(Checkpoint.open(source)))
    return {"head": head_fingerprint(inventory), "trunk": trunk_fingerprint(inventory)}


def prompts_hash(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the token ids: whether two measurements asked the same."""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()


def _filled(counts: Sequence[int], drafts: int) -> list[float]:
    return [*map(float, counts), *[0.0] * (drafts - len(counts))]


def prompt_tokens(model: Model, prompt: Prompt, chat: bool | None) -> tuple[int, ...]:
    """Token ids of a prompt. chat: see `Plan`. Raises ConfigError for text without a tokenizer."""
    if chat is None:
        chat = bool(model.tokenizer is not None and model.tokenizer.chat_template)
    return prompt.tokens(model, chat=chat)


def _controls(measured: Measured, model: Model, hiddens: Sequence[Hidden]) -> Controls:
    """Over the texts of the first temperature, greedy where there is one."""
    temperature = measured.plan.temperatures[0]
    rule, found = measured.rules(temperature)[0], measured.scored[temperature]
    places = sorted(place for place in measured.places(temperature) if found[place].rooms)
    used = [found[place] for place in places]
    texts = [each.text for each in used]
    shuffled = [_shuffled(hiddens[place]) for place in places]
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
        shuffled=_over_columns([*scored(model, texts, shuffled, 1, contract=measured.contract)], rule),
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
