"""The report of a reference measurement: figures by temperature, rule, K and domain, as JSON."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import add
from pathlib import Path

from nextn import __version__
from nextn.checkpoint.checkpoint import Checkpoint, as_checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import head_fingerprint, open_head, trunk_family, trunk_fingerprint
from nextn.checkpoint.snapshot import on_disk
from nextn.data.degeneracy import MIN_TOKENS, degeneracy_notes
from nextn.errors import ConfigError
from nextn.evaluate.acceptance_curve import MIN_INCREASE, AcceptanceCurve, AcceptanceFigures, TextCounts
from nextn.evaluate.decoding_costs import Machine
from nextn.evaluate.engine_probe import EngineCheck
from nextn.evaluate.given_texts import TextOrigin, ThinkTokens, part_counts
from nextn.evaluate.published_curves import MeasuredCurve, PublishedCurve, curves_of, fitting_curve
from nextn.evaluate.reference_texts import Controls, GeneratedTexts
from nextn.evaluate.teacher_forced import PERFECT, RULES, ScoredText
from nextn.evaluate.workload import Prompt, ReferencePlan, by_domain, indices_without, prompts_text
from nextn.settings import Contract
from nextn.speculative.copy_drafts import copied_rounds
from nextn.stats.acceptance import DEFINITION
from nextn.stats.intervals import INTERVAL

_FLAT = 0.05  # mean probability of the likeliest token, below that of any trained model
NUM_COPY_TOKENS = 16  # copied tokens of a round, see `ReferenceReport.copies_record`
DEFINITIONS = {
    "acceptance": DEFINITION.partition(";")[0] + "; rounds follow each other through the text as in decoding at this K",
    "mean_acceptance_length": "AL@K = 1 + sum over k <= K of a_1 ... a_k: tokens per round, with the bonus token",
    "interval_95": INTERVAL,
    "by_text": "num_drafted and num_accepted by depth at the largest K, of each text by its number (of a conversation, "
    "its first); by them, measurements of the same prompts are compared text by text",
    "curve": "whether AL still grows with K. increases: by n = 0, 1, ..., how much each draft beyond n adds, as a part "
    f"of AL@n, paired on texts; saturated_at: the smallest n with less than {MIN_INCREASE:.0%} by its interval; "
    "decline: acceptance beyond it less a_1",
    "parts": "figures of the rounds that start in a part of the texts: by tokens in the cache (bands), and before and "
    "after the end of thinking",
    "rule": RULES,
    "perfect_head": "figures by rule argmax of a head that has the trunk's own distribution; by greedy, ratio and "
    "block it has a_k = 1",
    "pass": "parallel: all positions of a text at once; stepped: one by one through the head's caches; decoder: "
    "counted while decoding. The first two use the distribution of acceptance given the text, so no draft is sampled",
    "decoder": "what was counted while the texts were decoded; temperature 0 by rule greedy, else by settings.rule. "
    "Wilson intervals that take rounds as independent",
    "copies": f"the same texts decoded by copies alone (--copy {NUM_COPY_TOKENS} -k 0), each of which is verified",
    "all_positions": "a_1 over all positions alike, to compare the controls with",
    "shifted": "depth 1's argmax against the token after the one that it predicts",
    "shuffled": "a_1 over all positions, with each text's hidden states in random order",
    "chance": "argmax and token equal by accident: the sum over the vocabulary of the products of their frequencies",
    "median_rank": "how many tokens depth 1 ranks above the text's, median; vocab_size tokens in all",
    "repetitive": "repetitive texts (degeneracy.degeneracy): left out, unless all are",
    "short": f"texts of fewer than {MIN_TOKENS} tokens, too short to detect repetition reliably",
    "origin": "of texts that were not generated here. agreement: at temperature 0, share of their tokens that are the "
    "trunk's argmax; excess: above it, by how many nats a token is less likely than those that the trunk would sample",
    "engine": "that wrote the texts: differences of its log-probabilities of a greedy text from the trunk's, nats",
    "stream": "bytes read from the checkpoint; seconds of each layer: waiting for and loading its tensors, running it; "
    "resumed: done by an earlier process",
    "hashes": "head: SHA-256 of its own tensors; trunk: of samples; prompts: of their token ids as JSON",
}


def checkpoint_hashes(source: str | Checkpoint, *, head: str | Path | None = None) -> dict[str, str]:
    """Return fingerprints of a checkpoint's trunk and head (or those of `head`), which identify what was measured."""
    checkpoint = as_checkpoint(source)
    inventory = on_disk(Inventory.of(checkpoint, family=trunk_family(checkpoint)))
    own = inventory if head is None else open_head(head, inventory)
    return {"head": head_fingerprint(own), "trunk": trunk_fingerprint(inventory)}


def hash_prompts(prompts: Sequence[Sequence[int | str]]) -> str:
    """Return the SHA-256 of the token ids, equal for measurements with the same prompts; of later turns, texts."""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class ReferenceReport:
    """One measurement of acceptance, from which all figures follow.

    Attributes:
        plan: What was measured.
        contract: Conventions of the head in decoding.
        prompts: With later turns as they were played.
        generated: Texts, with what the decoder counted, by temperature.
        scoring_pass: `parallel`, `stepped` or `decoder`, see `DEFINITIONS`.
        controls: Negative controls; None if nothing was scored.
        source: Name of the checkpoint.
        family: Name of its family.
        hashes: SHA-256 of the head and of samples of the trunk.
        machine: Where it was measured.
        text_source: Of texts that were not generated here.
        origins: Of such texts, by temperature.
        engine: The engine that wrote them.
        stream: What streaming the trunk took, see `streaming_plan.stream_record`.
        num_mtp_layers: Of the head.
        base_model: The model that the checkpoint's files name as the one that it was made from.
        size: Hidden size and decoder layers of the trunk.
        think_tokens: Ids of the opening and the closing tag of thinking.
        prompts_source: Where the prompts came from, see `workload.prompts_record`.

    Example:
        >>> plan = nextn.ReferencePlan(num_speculative_tokens=2, temperatures=(0.0,), max_tokens=8, backend="torch")
        >>> report = nextn.measure("tiny", ["def add(a, b):"], plan)
        >>> report.to_dict()["model"], len(report.figures(0.0, k=1).rates)
        ('tiny', 1)
    """

    plan: ReferencePlan
    contract: Contract
    prompts: tuple[Prompt, ...] = field(repr=False)
    generated: Mapping[float, GeneratedTexts] = field(repr=False)
    scored: Mapping[float, tuple[ScoredText, ...]] = field(repr=False)  # empty for a contract that can only be decoded
    scoring_pass: str
    controls: Controls | None = None
    source: str = ""
    family: str = ""
    hashes: Mapping[str, str] = field(default_factory=dict)
    machine: Machine | None = None
    text_source: str = ""
    origins: Mapping[float, TextOrigin] = field(default_factory=dict)
    engine: EngineCheck | None = None
    stream: Mapping[str, object] | None = None
    num_mtp_layers: int = 1
    base_model: str | None = None
    size: tuple[int, int] | None = None
    think_tokens: ThinkTokens | None = None
    prompts_source: Mapping[str, object] = field(default_factory=dict)

    def figures(
        self, temperature: float, *, rule: str | None = None, k: int | None = None, domain: str = "all"
    ) -> AcceptanceFigures:
        """Compute figures with intervals, by default for the first of `rules(temperature)` and the largest K.

        Raises ConfigError for what was not measured.
        """
        rule, k = rule or self.rules(temperature)[0], k or self.plan.num_speculative_tokens
        used = self._used(temperature, rule, k, domain)
        return AcceptanceFigures.of(used, temperature=temperature, rule=rule, k=k, domain=domain)

    def parts(self, temperature: float, k: int) -> list[AcceptanceFigures]:
        """Compute figures by part of the texts for the first of the rules, if there are several (`given_texts`)."""
        rule, found = self.rules(temperature)[0], dict[str, dict[int, TextCounts]]()
        for index in sorted(self.text_indices(temperature) if temperature in self.scored else ()):
            for part, counts in part_counts(self.scored[temperature][index], rule, k, self.think_tokens).items():
                found.setdefault(part, {})[index] = counts
        groups = [[each for each in found if each.startswith("context") is is_band] for is_band in (True, False)]
        return [
            AcceptanceFigures.of(
                list(self._by_conversation(found[part]).values()), temperature=temperature, rule=rule, k=k, domain=part
            )
            for group in groups
            for part in group
            if len(group) > 1
        ]

    def curve(self, temperature: float, *, rule: str | None = None, domain: str = "all") -> AcceptanceCurve | None:
        """Return AL at every K over a domain's texts; None without rounds, or of fewer than three K."""
        largest, rule = self.plan.num_speculative_tokens, rule or self.rules(temperature)[0]
        if largest < 3 or temperature not in self.scored:
            return None
        by_k = tuple(self._used(temperature, rule, k, domain) for k in range(1, largest + 1))
        has_rounds = any(drafted[0] for drafted, _ in by_k[-1])
        return AcceptanceCurve(by_k, self.num_mtp_layers) if has_rounds else None

    def counts(self, temperature: float, rule: str, k: int) -> list[tuple[list[float], list[float]]]:
        """Return (num_drafted, num_accepted) by depth for each text. Raises ConfigError for what was not measured."""
        largest = self.plan.num_speculative_tokens
        perfect = [PERFECT] if temperature and temperature in self.scored else []
        if rule not in [*self.rules(temperature), *perfect] or not 1 <= k <= largest:
            known = ", ".join(self.rules(temperature))
            raise ConfigError(f"{rule=}, {k=}; expected one of {known}, and 1 <= k <= {largest}")
        if temperature in self.scored:
            key = (temperature, rule, k)
            if key not in self._counts:
                texts = self.scored[temperature]
                self._counts[key] = [each.survivals[rule].round_counts(each.remaining, k) for each in texts]
            return self._counts[key]
        if k != largest:
            raise ConfigError(f"{k=}: this was counted while decoding, at K = {largest} alone")
        counts = self.generated[temperature].acceptance_per_text
        return [(_padded(each.num_drafted, k), _padded(each.num_accepted, k)) for each in counts]

    def _by_conversation(self, counts: Mapping[int, TextCounts]) -> dict[int, TextCounts]:
        """The counts of texts, by index, those of one conversation added: its turns are no independent samples."""
        merged: dict[int, TextCounts] = {}
        first: dict[tuple[bool, int], int] = {}
        for index in sorted(counts):
            conversation = self.prompts[index].conversation
            key = first.setdefault((conversation is not None, index if conversation is None else conversation), index)
            drafted, accepted = counts[index]
            before = merged.get(key, ([0.0] * len(drafted), [0.0] * len(accepted)))
            merged[key] = [*map(add, before[0], drafted)], [*map(add, before[1], accepted)]
        return merged

    def _used(self, temperature: float, rule: str, k: int, domain: str) -> list[TextCounts]:
        return list(self._used_by_text(temperature, rule, k, domain).values())

    def _used_by_text(self, temperature: float, rule: str, k: int, domain: str = "all") -> dict[int, TextCounts]:
        counts = self.counts(temperature, rule, k)
        return self._by_conversation({index: counts[index] for index in self.text_indices(temperature, domain)})

    @cached_property
    def _counts(self) -> dict[tuple[float, str, int], list[tuple[list[float], list[float]]]]:
        return {}

    def rules(self, temperature: float) -> list[str]:
        """Return the acceptance rules with figures, the usual one first. Raises ConfigError as `figures`."""
        if temperature not in self.plan.temperatures:
            measured = ", ".join(f"{each:g}" for each in self.plan.temperatures)
            raise ConfigError(f"temperature {temperature!r:.40} was not measured; expected one of {measured}")
        if temperature in self.scored:
            return ["greedy"] if not temperature else [rule for rule in RULES if rule != "greedy"]
        return [self.plan.rule if temperature else "greedy"]

    @property
    def perfect(self) -> dict[float, AcceptanceFigures]:
        """Temperature -> figures of a perfect head by rule argmax; without 0, where it has every draft accepted."""
        sampled = (each for each in self.plan.temperatures if each and each in self.scored)
        return {each: self.figures(each, rule=PERFECT) for each in sampled}

    @property
    def main_temperature(self) -> float:
        """The lowest temperature at which half the texts or more are not repetitive; the lowest if there is none."""
        usable = (each for each in self.plan.temperatures if not self.is_degenerate(each))
        return next(usable, self.plan.temperatures[0])

    def is_degenerate(self, temperature: float) -> bool:
        """Return whether most texts at this temperature are repetitive."""
        return 2 * len(self.repetitive[temperature]) > len(self.prompts)

    def text_indices(self, temperature: float, domain: str = "all") -> set[int]:
        """Return the domain's texts that are not repetitive, or all of them if every one is."""
        return indices_without(self.repetitive[temperature], self.prompts, domain)

    @cached_property
    def repetitive(self) -> dict[float, set[int]]:
        """Temperature -> indices of repetitive texts."""
        return {temperature: texts.repetitive for temperature, texts in self.generated.items()}

    @property
    def num_positions(self) -> int:
        """The length of the longest text, prompt included, in tokens."""
        return max(len(text.prompt) + len(text.new) for texts in self.generated.values() for text in texts.texts)

    @property
    def domains(self) -> list[str]:
        """ "all", then the domains of the prompts if there are several."""
        return ["all", *by_domain(self.prompts)] if len(by_domain(self.prompts)) > 1 else ["all"]

    def domains_at(self, temperature: float) -> list[str]:
        """Return the domains that are reported beside all texts: not those whose texts are left out as repetitive."""
        repetitive, domains = self.repetitive[temperature], by_domain(self.prompts)
        all_repetitive = len(repetitive) == len(self.prompts)
        return [each for each in self.domains[1:] if all_repetitive or {*domains[each]} - repetitive]

    @property
    def origin_warnings(self) -> list[str]:
        """Reasons to think that the trunk did not write the texts, by temperature."""
        return [f"temperature {key:g}: {warning}" for key, each in self.origins.items() for warning in each.warnings]

    @property
    def warnings(self) -> list[str]:
        """Reasons to trust the figures less."""
        warnings = [*([] if self.engine is None else self.engine.warnings), *self.origin_warnings]
        for temperature, generated in self.generated.items():
            repetitive, num_short = self.repetitive[temperature], len(generated.short)
            warnings += degeneracy_notes(
                temperature, len(generated.texts), degenerate=repetitive, short=num_short, measured=self.generated
            )
        for temperature, perfect in self.perfect.items():
            if temperature and perfect.rates and perfect.rates[0].value < _FLAT:
                warnings.append(
                    f"temperature {temperature:g}: the trunk's likeliest token has a probability of "
                    f"{perfect.rates[0].value:.3f} on average: any head that is as undecided is accepted by the rules "
                    "`ratio` and `block`"
                )
        if len(self.prompts) < 8:
            few = f"{len(self.prompts)} texts: intervals of this few are wide, and assume that texts are similar"
            warnings.append(few)
        return warnings + (self.controls.warnings if self.controls else [])

    def table(self) -> list[AcceptanceFigures]:
        """Compute every temperature, rule and K over all texts and by domain."""
        rows = []
        choices = range(1, self.plan.num_speculative_tokens + 1) if self.scored else [self.plan.num_speculative_tokens]
        for temperature in self.plan.temperatures:
            for rule in self.rules(temperature):
                for domain in ("all", *self.domains_at(temperature)):
                    rows += [self.figures(temperature, rule=rule, k=k, domain=domain) for k in choices]
        return rows

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `nextn measure --json`."""
        texts = self.generated[self.plan.temperatures[0]].texts
        prompts = [prompt.turns or text.prompt for prompt, text in zip(self.prompts, texts, strict=True)]
        record: dict[str, object] = {
            "model": self.source,
            "family": self.family,
            "nextn": __version__,
            "definitions": DEFINITIONS,
            "machine": None if self.machine is None else vars(self.machine),
            "hashes": {**self.hashes, "prompts": hash_prompts(prompts)},
            "settings": asdict(self.plan) | {"contract": vars(self.contract)},
            "pass": self.scoring_pass,
            "domains": {domain: len(indices) for domain, indices in by_domain(self.prompts).items()},
            "texts": {f"{temperature:g}": self._text_counts(temperature) for temperature in self.generated},
            "figures": [figures.as_record() for figures in self.table()],
            "by_text": {
                f"{temperature:g}": {
                    rule: self._used_by_text(temperature, rule, self.plan.num_speculative_tokens)
                    for rule in self.rules(temperature)
                }
                for temperature in self.plan.temperatures
            },
            "curves": self._curve_records(),
            "parts": [
                figures.as_record()
                for temperature in self.scored
                for k in range(1, self.plan.num_speculative_tokens + 1)
                for figures in self.parts(temperature, k)
            ],
            "perfect_head": {f"{temperature:g}": each.as_record() for temperature, each in self.perfect.items()},
            "decoder": {
                f"{temperature:g}": None if texts.pooled is None else texts.pooled.as_record()
                for temperature, texts in self.generated.items()
            },
            "copies": {f"{temperature:g}": self.copies_record(temperature) for temperature in self.generated},
            "controls": self.controls and asdict(self.controls),
            "warnings": self.warnings,
        }
        prompts_record = {"prompts": dict(self.prompts_source)} if self.prompts_source else {}
        return record | self.given_record() | prompts_record | self.published_record()

    def copies_record(self, temperature: float) -> dict[str, object]:
        """Return what copied drafts would gain on the texts of a temperature, for JSON reports."""
        texts = [self.generated[temperature].texts[index] for index in self.text_indices(temperature)]
        return rounds_record([step for text in texts for step in copied_rounds(text.prompt, text.new, NUM_COPY_TOKENS)])

    def given_record(self) -> dict[str, object]:
        """Return what is known of texts that were not generated here, and of a streamed trunk."""
        if not self.text_source:
            return {}
        origins = {f"{temperature:g}": each.as_record() for temperature, each in self.origins.items()}
        record: dict[str, object] = {"text_source": self.text_source, "origin": origins}
        record |= {} if self.engine is None else {"engine": self.engine.as_record()}
        return record if self.stream is None else record | {"stream": dict(self.stream)}

    @property
    def prompts_text(self) -> str:
        """What the prompts are, in words."""
        return prompts_text(self.prompts_source) if self.prompts_source else self.text_source

    def published_record(self) -> dict[str, object]:
        """Return the published curve for JSON reports; empty where none fits."""
        return {} if self.published is None else {"published": self.published[0].as_record(self.published[1])}

    @cached_property
    def published(self) -> tuple[PublishedCurve, MeasuredCurve] | None:
        """The published curve that fits this checkpoint, and the one measured here; None where there is none."""
        return self.beside(curves_of(self._names, self.family, self.size))

    @property
    def _names(self) -> tuple[str, ...]:
        return self.source, self.base_model or ""

    def beside(self, curves: Sequence[PublishedCurve]) -> tuple[PublishedCurve, MeasuredCurve] | None:
        """Return the one of these curves that fits best, and the measured one, of greedy drafts as engines have them.

        None without scores, or where no curve has a K or a category that was measured.
        """
        scored = [temperature for temperature in self.plan.temperatures if temperature in self.scored]
        if not curves or not scored:
            return None
        *_, last = measured = [self._measured_curve(temperature) for temperature in scored]
        comparable = [curve for curve in curves if any(curve.figures(each) for each in measured)]
        if (curve := fitting_curve(comparable, self._names, last)) is None:
            return None
        stated = last.temperature if curve.temperature is None else curve.temperature
        shown = (each for each in measured if curve.figures(each))
        return curve, min(shown, key=lambda each: abs(each.temperature - stated))

    def _measured_curve(self, temperature: float) -> MeasuredCurve:
        rule, largest = "argmax" if temperature else "greedy", self.plan.num_speculative_tokens
        by_k = {str(k): self.figures(temperature, rule=rule, k=k) for k in range(1, largest + 1)}
        domains = self.domains_at(temperature) or [*by_domain(self.prompts)]
        by_category = {each: self.figures(temperature, rule=rule, k=largest, domain=each) for each in domains}
        lengths = {name: each.length.value for name, each in (by_k | by_category).items()}
        return MeasuredCurve(
            name=rule if not temperature else f"T={temperature:g} {rule}",
            lengths={name: length for name, length in lengths.items() if not math.isnan(length)},
            source=self.source,
            precision=None if self.machine is None else self.machine.dtype,
            thinking=self.plan.thinking,
            temperature=temperature,
            prompts=self.prompts_text,
            max_tokens=self.plan.max_tokens,
            num_speculative_tokens=largest,
            rates={name: tuple(rate.value for rate in each.rates) for name, each in by_k.items()},
        )

    def _curve_records(self) -> list[dict[str, object]]:
        """The findings of every rule over all texts, and of the first rule by domain."""
        records = []
        for temperature in self.plan.temperatures:
            rules = self.rules(temperature)
            for rule, domain in [
                *((rule, "all") for rule in rules),
                *((rules[0], d) for d in self.domains_at(temperature)),
            ]:
                if (curve := self.curve(temperature, rule=rule, domain=domain)) is not None:
                    records.append({"temperature": temperature, "rule": rule, "domain": domain} | curve.as_record())
        return records

    def _text_counts(self, temperature: float) -> dict[str, object]:
        texts = self.generated[temperature].texts
        return {
            "num": len(texts),
            "tokens": sum(len(text.new) for text in texts),
            "repetitive": sorted(self.repetitive[temperature]),
            "short": self.generated[temperature].short,
        }


def _padded(counts: Sequence[int], k: int) -> list[float]:
    return [*map(float, counts), *[0.0] * (k - len(counts))]


def rounds_record(steps: Sequence[tuple[int, int]]) -> dict[str, object]:
    """Return the counts of rounds, (num_drafted, num_accepted) each, for JSON records."""
    num_accepted = sum(step[1] for step in steps)
    return {
        "num_rounds": len(steps),
        "num_drafts": sum(step[0] > 0 for step in steps),
        "num_draft_tokens": sum(step[0] for step in steps),
        "num_accepted_tokens": num_accepted,
        "tokens_per_round": 1 + num_accepted / len(steps) if steps else None,
    }
