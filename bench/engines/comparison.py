"""Which engine runs when, and what the answers say: turns, figures, one record. Starts nothing and measures nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from engines.protocol import Answer

from nextn.benchmarking.plan import rotated
from nextn.corpus.loops import TELLING, degeneracy
from nextn.figures.speedup import Spread

# (prompt and common text, our next token, theirs) -> our logit less that of their token.
Gap = Callable[[Sequence[int], int, int], float]
DEFINITIONS = {
    "tokens_per_s": "new tokens per second of one text, from the prefill's token to the last one, by the engine's own "
    "clock; median and quartiles",
    "ratio": "tokens_per_s over that of nextn's plain decoding of the same prompt in the same turn; median, quartiles",
    "request_tokens_per_s": "new tokens per second of the whole request, by the driver's clock: prefill, start of the "
    "request and transport are in it; median and quartiles",
    "acceptance_length": "tokens per trunk pass behind the prefill: 1 + kept / rounds; null for plain decoding",
    "kept_share": "drafts kept of those drafted; null for plain decoding",
    "identical": "texts that equal nextn's plain greedy text, of `texts`; bfloat16 engines part at near-ties",
    "differences": "first difference per prompt: its place in the text, and `gap`: how far nextn's token is above the "
    "peer's in the trunk's float32 logits there; a few hundredths are a near-tie, more is an error",
    "looping": "prompts one of whose texts is a loop, in any engine: left out of all figures",
    "short": f"prompts with a text of fewer than {TELLING} tokens, in which loops cannot be told for sure",
    "only_loops": "every prompt loops, so that none could be left out: the figures say nothing",
    "idle_cpu": "processor seconds per second that a worker uses while it has no request",
}


@dataclass(frozen=True)
class Setting:
    """One way to decode. variant: the dtype, or how the engine is run. fixed: K is set when the engine starts."""

    engine: str
    variant: str
    drafts: int
    fixed: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine} {self.variant}, {f'K = {self.drafts}' if self.drafts else 'plain'}"

    @property
    def worker(self) -> tuple[str, str, int | None]:
        """Settings that share it share a process."""
        return self.engine, self.variant, self.drafts if self.fixed else None


def settings(drafts: Sequence[int], *, modules: int) -> list[Setting]:
    """Ours first. drafts: every K but 0. transformers drafts with each of the head's modules once."""
    every = [0, *drafts]
    return [
        *(Setting("nextn", "bfloat16", k) for k in every),
        *(Setting("transformers", dtype, k) for dtype in ("bfloat16", "float32") for k in (0, modules)),
        *(Setting("vllm", how, k, fixed=True) for how in ("eager", "compiled") for k in every),
        *(Setting("llama.cpp", "bfloat16", k, fixed=True) for k in every),
    ]


def turns(places: Sequence[Setting], num_prompts: int, repeats: int) -> Iterator[tuple[int, int, list[Setting]]]:
    """(repeat, prompt, settings in the order of this turn): the one that goes first moves on with every turn."""
    for turn in range(repeats * num_prompts):
        repeat, prompt = divmod(turn, num_prompts)
        yield repeat, prompt, rotated(places, turn)


@dataclass(frozen=True)
class Run:
    """One prompt decoded once. wall_s: of the whole request, by the driver's clock."""

    setting: Setting
    prompt: int
    repeat: int
    answer: Answer = field(repr=False)
    wall_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """None where the prefill's token was the last."""
        return (len(self.answer.tokens) - 1) / self.answer.seconds if len(self.answer.tokens) > 1 else None


@dataclass(frozen=True)
class Report:
    """settings: those that ran to the end; runs: theirs. reference: our plain decoding."""

    prompts: tuple[tuple[int, ...], ...]
    domains: tuple[str, ...]
    eos: tuple[int, ...]
    settings: tuple[Setting, ...]
    runs: tuple[Run, ...] = field(repr=False)
    reference: Setting = Setting("nextn", "bfloat16", 0)

    @cached_property
    def looping(self) -> list[int]:
        return sorted({run.prompt for run in self.runs if degeneracy(self.text(run)).looping})

    @cached_property
    def short(self) -> list[int]:
        return sorted({run.prompt for run in self.runs if len(self.text(run)) < TELLING})

    @property
    def only_loops(self) -> bool:
        return len(self.looping) == len(self.prompts)

    def text(self, run: Run) -> list[int]:
        """Up to its end: some engines give the token that ends it, others do not."""
        tokens = run.answer.tokens
        return tokens[: next((place for place, token in enumerate(tokens) if token in self.eos), len(tokens))]

    def figures(self, setting: Setting, gap: Gap | None = None) -> dict[str, object]:
        """Over the prompts that do not loop; over all where each one does. Differences are of all prompts."""
        told = [run for run in self._of(setting) if self.only_loops or run.prompt not in self.looping]
        twins = {(run.prompt, run.repeat): run.tokens_per_s for run in self._of(self.reference)}
        speeds = [(run.tokens_per_s, twins.get((run.prompt, run.repeat))) for run in told]
        rounds, drafted, kept = (
            sum(getattr(run.answer, name) for run in told) for name in ("rounds", "drafted", "kept")
        )
        first = [run for run in self._of(setting) if run.repeat == 0]
        differences = [found for run in first if (found := self._difference(run, gap)) is not None]
        return {
            "engine": setting.engine,
            "variant": setting.variant,
            "drafts": setting.drafts,
            "tokens_per_s": Spread.of([speed for speed, _ in speeds if speed]).as_record(),
            "ratio": Spread.of([speed / twin for speed, twin in speeds if speed and twin]).as_record(),
            "request_tokens_per_s": Spread.of([len(run.answer.tokens) / run.wall_s for run in told]).as_record(),
            "acceptance_length": 1 + kept / rounds if setting.drafts and rounds else None,
            "kept_share": kept / drafted if drafted else None,
            "identical": len(first) - len(differences),
            "texts": len(first),
            "differences": differences,
        }

    def as_record(
        self, *, unavailable: Mapping[str, str], workers: Mapping[str, object], gap: Gap | None = None
    ) -> dict[str, object]:
        """The JSON document, but for what the driver knows: machine, checkpoint, plan."""
        return {
            "definitions": DEFINITIONS,
            "prompts": {
                "domains": list(self.domains),
                "looping": self.looping,
                "short": self.short,
                "only_loops": self.only_loops,
            },
            "workers": dict(workers),
            "figures": [self.figures(setting, gap) for setting in self.settings],
            "unavailable": dict(unavailable),
        }

    def _of(self, setting: Setting) -> list[Run]:
        return [run for run in self.runs if run.setting == setting]

    def _difference(self, run: Run, gap: Gap | None) -> dict[str, object] | None:
        """Where a text leaves ours; None where it does not. A text that ends where the other goes on leaves it, too."""
        ours = {each.prompt: self.text(each) for each in self._of(self.reference) if each.repeat == 0}.get(run.prompt)
        theirs = self.text(run)
        if ours is None or ours == theirs:
            return None
        pairs = zip(ours, theirs, strict=False)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        found: dict[str, object] = {"prompt": run.prompt, "place": place, "of": len(ours), "gap": None}
        if gap is not None and place < min(len(ours), len(theirs)):
            found["gap"] = gap([*self.prompts[run.prompt], *ours[:place]], ours[place], theirs[place])
        return found
