"""What one measurement found: figures by temperature, rule, K and domain, what to say against them, the JSON record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nextn import __version__
from nextn.benchmarking.cost import Machine
from nextn.benchmarking.workload import Prompt, by_domain
from nextn.corpus.loops import cautions
from nextn.drafting import Contract
from nextn.errors import ConfigError
from nextn.figures.estimate import Estimate, jackknifed, share
from nextn.figures.speedup import expected_length
from nextn.measuring.columns import RULES, Scored, Text
from nextn.measuring.controls import Controls
from nextn.measuring.plan import Plan
from nextn.measuring.record import DEFINITIONS, prompts_hash
from nextn.measuring.texts import Drawn


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
        return ["block" if temperature else "greedy"]

    def places(self, temperature: float, domain: str = "all") -> set[int]:
        """The domain's texts that do not loop; all of them where each one does."""
        places = set(range(len(self.prompts)) if domain == "all" else by_domain(self.prompts)[domain])
        return places - self.looping[temperature] or places

    @cached_property
    def looping(self) -> dict[float, set[int]]:
        return {temperature: drawn.looping for temperature, drawn in self.drawn.items()}

    @property
    def domains(self) -> list[str]:
        return ["all", *by_domain(self.prompts)] if len(by_domain(self.prompts)) > 1 else ["all"]

    @property
    def warnings(self) -> list[str]:
        """Why figures may say less than they seem to."""
        said = []
        for temperature, drawn in self.drawn.items():
            loops, short = len(self.looping[temperature]), len(drawn.short)
            said += cautions(f"temperature {temperature:g}", len(drawn.texts), loops=loops, short=short)
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
            "short": self.drawn[temperature].short,
        }


def _filled(counts: Sequence[int], drafts: int) -> list[float]:
    return [*map(float, counts), *[0.0] * (drafts - len(counts))]
