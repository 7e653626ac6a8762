"""Settings, order of runs, figures and record of the engine comparison. Starts nothing and measures nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from engines.protocol import Answer

from nextn.data.degeneracy import MIN_TOKENS, degeneracy
from nextn.evaluate.workload import rotate
from nextn.stats.speedup import Spread

# (prompt and common text, our next token, theirs) -> logit of our token less that of theirs.
Gap = Callable[[Sequence[int], int, int], float]
DEFINITIONS = {
    "tokens_per_s": "new tokens per second of one text, from the prefill's token to the last one, by the engine's own "
    "clock; median and quartiles",
    "ratio": "tokens_per_s over that of nextn's baseline decoding of the same prompt and turn; median and quartiles",
    "request_tokens_per_s": "new tokens per second of the whole request, by the driver's clock, which includes prefill "
    "and transport; median and quartiles",
    "mean_acceptance_length": "tokens per trunk pass after the prefill: 1 + accepted / rounds; null for the baseline",
    "kept_share": "acceptance rate, accepted / drafted; null for baseline decoding",
    "identical": "texts that equal nextn's greedy baseline text, of `texts`; bfloat16 engines differ at near-ties",
    "differences": "first difference per prompt: its position in the text (`place`), and `gap`: nextn's token's logit "
    "less that of the other engine's, in float32; a few hundredths are a near-tie, more is an error",
    "repetitive": "prompts with a repetitive text, in any engine: left out of all figures",
    "short": f"prompts with a text of fewer than {MIN_TOKENS} tokens, too short to detect repetition reliably",
    "only_repetitive": "every prompt is repetitive, so that none could be left out: the figures say little",
    "idle_cpu": "CPU seconds per second that a worker uses while it has no request",
}


@dataclass(frozen=True)
class Setting:
    """One way to decode; `variant` is the dtype or mode, `fixed` means that K is set when the engine starts."""

    engine: str
    variant: str
    num_speculative_tokens: int
    fixed: bool = False

    @property
    def name(self) -> str:
        decoding = f"K = {self.num_speculative_tokens}" if self.num_speculative_tokens else "plain"
        return f"{self.engine} {self.variant}, {decoding}"

    @property
    def worker(self) -> tuple[str, str, int | None]:
        """Settings with the same value share a process."""
        return self.engine, self.variant, self.num_speculative_tokens if self.fixed else None


def settings(k_values: Sequence[int], *, modules: int, quantized: bool = False) -> list[Setting]:
    """Return all settings, ours first; `k_values` is every K but 0. transformers runs each MTP layer once."""
    all_k = [0, *k_values]
    ours, ggufs = (["int8", "int4"], ["Q8_0", "Q4_K_M"]) if quantized else ([], [])
    return [
        *(Setting("nextn", weights, k) for weights in ("bfloat16", *ours) for k in all_k),
        *(Setting("transformers", dtype, k) for dtype in ("bfloat16", "float32") for k in (0, modules)),
        *(Setting("vllm", how, k, fixed=True) for how in ("eager", "compiled") for k in all_k),
        *(Setting("llama.cpp", kind, k, fixed=True) for kind in ("bfloat16", *ggufs) for k in all_k),
    ]


def turns(settings: Sequence[Setting], num_prompts: int, repeats: int) -> Iterator[tuple[int, int, list[Setting]]]:
    """Yield (repeat, prompt, settings in order); which setting is first changes from turn to turn."""
    for turn in range(repeats * num_prompts):
        repeat, prompt = divmod(turn, num_prompts)
        yield repeat, prompt, rotate(settings, turn)


@dataclass(frozen=True)
class Run:
    """One prompt decoded once; wall_s is of the whole request, by the driver's clock."""

    setting: Setting
    prompt: int
    repeat: int
    answer: Answer = field(repr=False)
    wall_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the prefill; None if the prefill's token was the last."""
        return (len(self.answer.tokens) - 1) / self.answer.seconds if len(self.answer.tokens) > 1 else None


@dataclass(frozen=True)
class Report:
    """The runs of the settings that completed; `reference` is our baseline decoding."""

    prompts: tuple[tuple[int, ...], ...]
    domains: tuple[str, ...]
    eos: tuple[int, ...]
    settings: tuple[Setting, ...]
    runs: tuple[Run, ...] = field(repr=False)
    reference: Setting = Setting("nextn", "bfloat16", 0)

    @cached_property
    def repetitive(self) -> list[int]:
        return sorted({run.prompt for run in self.runs if degeneracy(self.text(run)).is_degenerate})

    @cached_property
    def short(self) -> list[int]:
        return sorted({run.prompt for run in self.runs if len(self.text(run)) < MIN_TOKENS})

    @property
    def all_repetitive(self) -> bool:
        return len(self.repetitive) == len(self.prompts)

    def text(self, run: Run) -> list[int]:
        """Return the tokens before eos, as some engines return it and others do not."""
        tokens = run.answer.tokens
        return tokens[: next((index for index, token in enumerate(tokens) if token in self.eos), len(tokens))]

    def figures(self, setting: Setting, gap: Gap | None = None) -> dict[str, object]:
        """Compute figures over the prompts without repetition, or all if none is; differences are over all prompts."""
        used = [run for run in self._of(setting) if self.all_repetitive or run.prompt not in self.repetitive]
        baselines = {(run.prompt, run.repeat): run.tokens_per_s for run in self._of(self.reference)}
        speeds = [(run.tokens_per_s, baselines.get((run.prompt, run.repeat))) for run in used]
        rounds, drafted, accepted = (
            sum(getattr(run.answer, name) for run in used) for name in ("rounds", "drafted", "num_accepted")
        )
        first = [run for run in self._of(setting) if run.repeat == 0]
        differences = [each for run in first if (each := self._difference(run, gap)) is not None]
        return {
            "engine": setting.engine,
            "variant": setting.variant,
            "num_speculative_tokens": setting.num_speculative_tokens,
            "tokens_per_s": Spread.of([speed for speed, _ in speeds if speed]).as_record(),
            "ratio": Spread.of([speed / baseline for speed, baseline in speeds if speed and baseline]).as_record(),
            "request_tokens_per_s": Spread.of([len(run.answer.tokens) / run.wall_s for run in used]).as_record(),
            "mean_acceptance_length": 1 + accepted / rounds if setting.num_speculative_tokens and rounds else None,
            "kept_share": accepted / drafted if drafted else None,
            "identical": len(first) - len(differences),
            "texts": len(first),
            "differences": differences,
        }

    def as_record(
        self, *, unavailable: Mapping[str, str], workers: Mapping[str, object], gap: Gap | None = None
    ) -> dict[str, object]:
        """Return the JSON document without what only the driver knows: machine, checkpoint, plan."""
        return {
            "definitions": DEFINITIONS,
            "prompts": {
                "domains": list(self.domains),
                "repetitive": self.repetitive,
                "short": self.short,
                "only_repetitive": self.all_repetitive,
            },
            "workers": dict(workers),
            "figures": [self.figures(setting, gap) for setting in self.settings],
            "unavailable": dict(unavailable),
        }

    def _of(self, setting: Setting) -> list[Run]:
        return [run for run in self.runs if run.setting == setting]

    def _difference(self, run: Run, gap: Gap | None) -> dict[str, object] | None:
        """Where a text differs from ours; None if it does not. A text that ends earlier differs too."""
        ours = {each.prompt: self.text(each) for each in self._of(self.reference) if each.repeat == 0}.get(run.prompt)
        theirs = self.text(run)
        if ours is None or ours == theirs:
            return None
        pairs = zip(ours, theirs, strict=False)
        index = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        difference: dict[str, object] = {"prompt": run.prompt, "place": index, "of": len(ours), "gap": None}
        if gap is not None and index < min(len(ours), len(theirs)):
            difference["gap"] = gap([*self.prompts[run.prompt], *ours[:index]], ours[index], theirs[index])
        return difference
