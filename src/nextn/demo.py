"""The demo: train a byte-level model with an MTP head, save it, reload it, decode it without and with the head."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from nextn.checkpoint.safetensors_file import write_json
from nextn.data.corpus import Corpus
from nextn.data.degeneracy import Degeneracy, degeneracy
from nextn.data.prompts import sample_prompts
from nextn.decoding.rounds import Round, Settings, rounds
from nextn.evaluate.decoding_costs import processor_name
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.speculative.sampling import Sampling
from nextn.stats.acceptance import Acceptance
from nextn.train.joint_run import joint_run
from nextn.train.metrics import EvalRecord, Record


@dataclass(frozen=True)
class DecodedSide:
    """The held-out prompts decoded at batch size 1, with or without drafts."""

    rounds: tuple[tuple[Round, ...], ...] = field(repr=False)  # of each prompt, the prefill first

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The generated tokens of each prompt."""
        return tuple(tuple(token for step in prompt for token in step.rows[0].emitted) for prompt in self.rounds)

    @property
    def seconds(self) -> float:
        """Wall time without the prefills."""
        return sum(step.draft_s + step.verify_s for prompt in self.rounds for step in prompt[1:])

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, without the prefills."""
        return sum(len(tokens) - 1 for tokens in self.tokens) / self.seconds

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance over all prompts."""
        return Acceptance.of(step for prompt in self.rounds for step in prompt)

    def select(self, indices: Sequence[int]) -> "DecodedSide":
        """Return the figures of some of the prompts."""
        return DecodedSide(tuple(self.rounds[index] for index in indices))


@dataclass(frozen=True)
class DecodedPair:
    """Baseline decoding and MTP with the same sampling settings, prompt by prompt."""

    plain: DecodedSide
    mtp: DecodedSide

    @cached_property
    def checks(self) -> tuple[Degeneracy, ...]:
        """The degeneracy of each prompt's MTP text."""
        return tuple(degeneracy(tokens) for tokens in self.mtp.tokens)

    @property
    def non_degenerate(self) -> list[int]:
        """Prompts whose text is not degenerate; the figures exclude the others, which are easy to draft."""
        return [index for index, check in enumerate(self.checks) if not check.is_degenerate]

    def figures(self) -> "DecodedPair":
        """Return the pair without degenerate texts, or all of it if every text is degenerate."""
        indices = self.non_degenerate or range(len(self.checks))
        return DecodedPair(self.plain.select(indices), self.mtp.select(indices))

    @property
    def speedup(self) -> float:
        """Wall-clock tokens/s of MTP over baseline decoding by the same code."""
        return self.mtp.tokens_per_s / self.plain.tokens_per_s

    def as_record(self) -> dict[str, object]:
        """Return the record for report.json: the figures without degenerate texts, and the number of those."""
        pair = self.figures()
        rates = {"plain_tokens_per_s": pair.plain.tokens_per_s, "mtp_tokens_per_s": pair.mtp.tokens_per_s}
        counts = {"prompts": len(self.checks), "looping": len(self.checks) - len(self.non_degenerate)}
        return (
            pair.mtp.acceptance.as_record()
            | rates
            | {"speedup": pair.speedup, "speedup_with_loops": self.speedup}
            | counts
        )


@dataclass(frozen=True)
class DemoReport:
    """The results of the demo."""

    folder: Path
    prompts: tuple[tuple[int, ...], ...]
    greedy: DecodedPair
    sampled: DecodedPair
    evaluation: EvalRecord
    train_s: float
    total_s: float
    drafts: int

    @property
    def identical(self) -> bool:
        """Whether greedy decoding gives the same tokens with and without MTP, for all prompts."""
        return self.greedy.plain.tokens == self.greedy.mtp.tokens

    def as_record(self) -> dict[str, object]:
        """Return the record for report.json."""
        forced = self.evaluation.forced
        held_out = {"loss_nats": list(forced.loss), "match": list(forced.match), "overlap": list(forced.overlap)}
        return {
            "identical_output": self.identical,
            "drafts": self.drafts,
            "greedy": self.greedy.as_record(),
            "temperature_1": self.sampled.as_record(),
            "held_out": held_out | {"definition": forced.definition},
            "train_s": self.train_s,
            "total_s": self.total_s,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": processor_name(),
        }


def train_demo(
    folder: Path, *, on_record: Callable[[Record], None], should_stop: Callable[[], bool]
) -> tuple[EvalRecord, Corpus] | None:
    """Train the recipe `demo` in `folder/run` and write the result to `folder/model`.

    Returns the held-out figures of joint training and the held-out corpus; None if it was stopped early.
    """
    run = joint_run(folder / "run", recipe="demo", settings={})
    figures: list[EvalRecord] = []
    for trainer in run.stages(folder / "model"):
        trainer.resume()
        for record in trainer.run(should_stop):
            on_record(record)
            figures += [record] if isinstance(record, EvalRecord) else []
        if not trainer.is_over:
            return None
    return figures[-1], run.held_out


def _load(folder: Path) -> Model:
    """Load in bfloat16 for the native backend, whose texts equal baseline decoding's; else in the stored dtype.

    At this size, torch's matmuls are slower in bfloat16, and near-ties may be resolved either way.
    """
    model = Model.load(folder, dtype=torch.bfloat16)
    return model if backend_for(model).name == "native" else Model.load(folder)


def decode_side(model: Model, texts: Sequence[Sequence[int]], settings: Settings) -> DecodedSide:
    """Decode prompts one after the other, at batch size 1."""
    backend = backend_for(model)
    return DecodedSide(tuple(tuple(rounds(backend.trunk, backend.head, [text], settings)) for text in texts))


def decode_pair(model: Model, texts: Sequence[Sequence[int]], settings: Settings) -> DecodedPair:
    """Alternate baseline and MTP decoding prompt by prompt, so that other load on the machine affects both equally."""
    sides: tuple[list[tuple[Round, ...]], list[tuple[Round, ...]]] = ([], [])
    for text in texts:
        for side, drafts in zip(sides, (0, settings.drafts), strict=True):
            side += decode_side(model, [text], replace(settings, drafts=drafts)).rounds
    return DecodedPair(*(DecodedSide(tuple(side)) for side in sides))


def run_demo(
    folder: Path,
    *,
    drafts: int = 4,
    on_record: Callable[[Record], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> DemoReport | None:
    """Run the demo and write model, report.json and metrics; None if it was stopped, to be resumed by the next call."""
    started = time.perf_counter()
    result = train_demo(folder, on_record=on_record, should_stop=should_stop)
    if result is None:
        return None
    (evaluation, held_out), trained = result, time.perf_counter()
    model = _load(folder / "model")
    texts = [text[:192].tolist() for text in sample_prompts(held_out, count=12, length=192, seed=0)]
    greedy = Settings(drafts=drafts, max_tokens=160, eos=(held_out.eos,))
    sampled = replace(greedy, sampling=Sampling(temperature=1.0))
    decode_side(model, texts[:1], greedy)  # warm up
    report = DemoReport(
        folder=folder,
        prompts=tuple(map(tuple, texts)),
        greedy=decode_pair(model, texts, greedy),
        sampled=decode_pair(model, texts, sampled),
        evaluation=evaluation,
        train_s=trained - started,
        total_s=time.perf_counter() - started,
        drafts=drafts,
    )
    write_json(folder / "report.json", report.as_record())
    return report


def plot_report(report: DemoReport) -> list[Path]:
    """Plot loss.png, acceptance.png and timeline.png next to the report, and return their paths."""
    import json

    from nextn.stats import plots

    paths = [report.folder / name for name in ("loss.png", "acceptance.png", "timeline.png")]
    lines = (report.folder / "run" / "metrics.jsonl").read_text().splitlines()
    plots.losses(paths[0], [json.loads(line) for line in lines])
    sides = {"greedy": report.greedy, "temperature 1": report.sampled}
    plots.acceptance(paths[1], {label: pair.figures().mtp.acceptance for label, pair in sides.items()})
    first = report.sampled.figures()
    plots.timeline(paths[2], first.plain.rounds[0][1:], first.mtp.rounds[0][1:], num_tokens=48)
    return paths
