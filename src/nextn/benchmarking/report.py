"""What a bench found: figures by temperature, K and domain, what to say against them, the JSON record."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from nextn.benchmarking.cost import Machine
from nextn.benchmarking.plan import ADAPTIVE, Plan
from nextn.benchmarking.runs import Run
from nextn.benchmarking.workload import Prompt, by_domain
from nextn.corpus.loops import TELLING, cautions, degeneracy
from nextn.figures import acceptance
from nextn.figures.acceptance import Acceptance
from nextn.figures.speedup import DEFINITION, Costs, Spread, expected_speedup
from nextn.shortlist import Shortlist

DEFINITIONS = {
    "drafts": "K; -1: as many as pay in each round (policy.Adaptive), at most the largest K",
    "tokens_per_s": "new tokens per second of one prompt, prefill and first token left out; median and quartiles",
    "speedup": "tokens/s of MTP over plain decoding of the same prompt in the same turn; median and quartiles",
    "acceptance": acceptance.DEFINITION + "; 95 % Wilson intervals",
    "expected_speedup": DEFINITION + "; here o = 0, with the AL that was measured at this K",
    "achieved": "speedup / expected_speedup",
    "overhead": "o: seconds per round over those of plain decoding of the same prompt in the same turn, median, "
    "- v(K+1) - K c; re-runs of kept columns and host work are in it",
    "share": "of the wall time behind the prefill: drafting, verifying, and everything outside the two (host)",
    "bytes_per_token": "weights read per new token: (trunk's pass + K draft steps) / AL",
    "bandwidth_used": "bytes_per_token * tokens_per_s / the bandwidth of a copy on this machine, measured in this run; "
    "weights that stay in a cache can take it beyond 1",
    "looping": "prompts one of whose texts is a loop (loops.degeneracy), at this temperature: left out of the figures",
    "only_loops": "every one of these texts loops, so that none could be left out: the figures say nothing",
    "short": f"prompts with a text of fewer than {TELLING} tokens, in which loops cannot be told for sure",
    "draft_vocab": "tokens that the head drafts from, and the share of the emitted ones outside, which it cannot draft",
    "identical": "greedy texts with MTP that equal plain decoding's; below float32, near-ties may differ",
    "peak_memory": "bytes: resident peak of the process on a CPU, the allocator's peak on a GPU",
}


@dataclass(frozen=True)
class Figures:
    """What one K did at one temperature, over a domain's prompts or all; loops are left out, if there is more."""

    temperature: float
    drafts: int
    domain: str
    only_loops: bool
    tokens_per_s: Spread
    speedup: Spread
    acceptance: Acceptance
    share: dict[str, float]
    expected: float
    overhead: float
    bytes_per_token: float
    bandwidth_used: float

    def as_record(self) -> dict[str, object]:
        """What goes into JSON reports; `DEFINITIONS` says what each number is."""
        kept = {name: value for name, value in self.acceptance.as_record().items() if name != "definition"}
        numbers = {
            "expected_speedup": self.expected,
            "achieved": self.speedup.median / self.expected,
            "overhead": self.overhead,
            "bytes_per_token": self.bytes_per_token,
            "bandwidth_used": self.bandwidth_used,
        }
        return {
            "temperature": self.temperature,
            "drafts": self.drafts,
            "domain": self.domain,
            "only_loops": self.only_loops,
            "tokens_per_s": self.tokens_per_s.as_record(),
            "speedup": self.speedup.as_record(),
            **kept,
            "share": self.share,
            **{name: value if value == value else None for name, value in numbers.items()},
        }


@dataclass(frozen=True)
class Report:
    """All that one bench found; the figures are made from the runs. plain_because: why not on the fast path, if so."""

    source: str
    plan: Plan
    prompts: tuple[Prompt, ...]
    runs: tuple[Run, ...] = field(repr=False)
    costs: Costs
    machine: Machine
    plain_because: str = ""
    shortlist: Shortlist | None = None

    @property
    def outside(self) -> float:
        """The share of emitted tokens that the head cannot draft, as they are not in its shortlist."""
        if self.shortlist is None:
            return 0.0
        inside = set(self.shortlist.ids.tolist())
        emitted = [token for run in self.runs if run.drafts for token in run.tokens]
        return sum(token not in inside for token in emitted) / len(emitted)

    @cached_property
    def looping(self) -> dict[float, set[int]]:
        """temperature -> prompts one of whose texts is a loop."""
        return {
            temperature: {run.prompt for run in self._at(temperature) if degeneracy(run.tokens).looping}
            for temperature in self.plan.temperatures
        }

    @cached_property
    def short(self) -> dict[float, set[int]]:
        """temperature -> prompts one of whose texts is too short to tell whether it loops."""
        return {
            temperature: {run.prompt for run in self._at(temperature) if len(run.tokens) < TELLING}
            for temperature in self.plan.temperatures
        }

    @property
    def identical(self) -> tuple[int, int]:
        """(greedy texts with MTP that equal plain decoding's, all greedy texts with MTP)."""
        greedy = {(run.prompt, run.repeat, run.drafts): run.tokens for run in self._at(0.0)}
        same = [tokens == greedy[prompt, repeat, 0] for (prompt, repeat, drafts), tokens in greedy.items() if drafts]
        return sum(same), len(same)

    @property
    def warnings(self) -> list[str]:
        """Why figures may say less than they seem to."""
        said = []
        for temperature in self.plan.temperatures:
            loops, short = len(self.looping[temperature]), len(self.short[temperature])
            said += cautions(f"temperature {temperature:g}", len(self.prompts), loops=loops, short=short)
        if self.plain_because and self.plan.path == "auto":
            said.append(f"decoded on the plain path: {self.plain_because}")
        if self.shortlist is not None:
            said.append(
                f"drafts come from {len(self.shortlist)} tokens; {self.outside:.1%} of the emitted ones are others: "
                "no more acceptance than that is lost"
            )
        same, texts = self.identical
        if same < texts:
            ties = "" if self.machine.dtype == "float32" else f"; near-ties in {self.machine.dtype} may do that"
            said.append(f"greedy: {texts - same} of {texts} texts differ from plain decoding's{ties}")
        return said

    def figures(self, temperature: float, drafts: int, domain: str = "all") -> Figures:
        """Over the domain's prompts that do not loop; over all of the domain's where each one does."""
        places = self._places(temperature, domain)
        plain, mtp = ([run for run in self._at(temperature, k) if run.prompt in places] for k in (0, drafts))
        twins = {(run.prompt, run.repeat): run for run in plain}
        pairs = [(run, twins[run.prompt, run.repeat]) for run in mtp]
        found = Acceptance.of(each for run in mtp if run.temperature or not run.repeat for each in run.rounds)
        spent = [self.costs.of_round(len(each.rows[0].drafts)) for run in mtp for each in run.rounds[1:]]
        price = statistics.mean(spent) if drafts == ADAPTIVE and spent else self.costs.of_round(max(0, drafts))
        length = _length(mtp) if drafts == ADAPTIVE else found.length if drafts else 1.0
        speed = Spread.of(_known([run.tokens_per_s for run in mtp]))
        drafted = statistics.mean([len(each.rows[0].drafts) for run in mtp for each in run.rounds[1:]] or [0])
        read = (self.machine.step_bytes + drafted * self.machine.draft_bytes) / length
        return Figures(
            temperature=temperature,
            drafts=drafts,
            domain=domain,
            only_loops=places <= self.looping[temperature],
            tokens_per_s=speed,
            speedup=Spread.of(_known([run.tokens_per_s / twin.tokens_per_s for run, twin in pairs])),
            acceptance=found,
            share=_share(mtp),
            expected=length / price,
            overhead=Spread.of(_known([run.round_s / twin.round_s for run, twin in pairs])).median - price,
            bytes_per_token=read,
            bandwidth_used=read * speed.median / self.machine.bandwidth,
        )

    def table(self) -> list[Figures]:
        """Every temperature and K, over all prompts and by domain."""
        domains = ["all", *by_domain(self.prompts)]
        return [self.figures(*key) for key in product(self.plan.temperatures, self.plan.choices, domains)]

    def theory(self, temperature: float) -> list[tuple[int, float]]:
        """(K, expected speed-up) for every K up to the largest, from the a_k of the runs at the largest."""
        rates = self.figures(temperature, self.plan.drafts[-1]).acceptance.rates
        return [(drafts, expected_speedup(self.costs, rates, drafts)) for drafts in range(len(rates) + 1)]

    def as_record(self) -> dict[str, object]:
        """The JSON document."""
        same, texts = self.identical
        counts = {
            f"{temperature:g}": {
                "prompts": len(self.prompts),
                "looping": sorted(self.looping[temperature]),
                "short": sorted(self.short[temperature]),
            }
            for temperature in self.plan.temperatures
        }
        domains = {domain: len(places) for domain, places in by_domain(self.prompts).items()}
        return {
            "model": self.source,
            "definitions": DEFINITIONS,
            "machine": vars(self.machine),
            "plan": vars(self.plan),
            "path": "plain" if self.plain_because else "fast",
            "draft_vocab": None if self.shortlist is None else [len(self.shortlist), self.outside],
            "domains": domains,
            "texts": counts,
            "identical": {"same": same, "texts": texts},
            "warnings": self.warnings,
            "costs": self.costs.as_record(),
            "figures": [each.as_record() for each in self.table()],
            "theory": {f"{temperature:g}": self.theory(temperature) for temperature in self.plan.temperatures},
        }

    def _at(self, temperature: float, drafts: int | None = None) -> list[Run]:
        return [run for run in self.runs if run.temperature == temperature and drafts in (None, run.drafts)]

    def _places(self, temperature: float, domain: str) -> set[int]:
        places = set(range(len(self.prompts)) if domain == "all" else by_domain(self.prompts)[domain])
        return places - self.looping[temperature] or places


def _length(runs: Sequence[Run]) -> float:
    """Tokens per round, rounds without drafts among them; nan without rounds."""
    num = sum(len(run.rounds) - 1 for run in runs)
    return sum(len(run.tokens) - 1 for run in runs) / num if num else float("nan")


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if value == value]


def _share(runs: Sequence[Run]) -> dict[str, float]:
    wall = sum(run.wall_s for run in runs if len(run.rounds) > 1)
    if not wall:
        return {}
    draft, verify = sum(run.draft_s for run in runs) / wall, sum(run.verify_s for run in runs) / wall
    return {"draft": draft, "verify": verify, "host": 1 - draft - verify}
