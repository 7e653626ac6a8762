"""The demo: train a byte-level model with an MTP head, save it, reload it, decode with the head off and on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from nextn.benchmarking.cost import processor
from nextn.checkpoints.tensor_file import write_json
from nextn.corpus.data import Corpus
from nextn.corpus.loops import Degeneracy, degeneracy
from nextn.corpus.prompts import prompts
from nextn.decode import Round, Settings, rounds
from nextn.figures.acceptance import Acceptance
from nextn.model import Model
from nextn.sampling import Sampling
from nextn.training.joint_runs import joint_run
from nextn.training.metrics import EvalRecord, Record


@dataclass(frozen=True)
class Side:
    """One way of decoding the held-out prompts, batch 1. rounds[i]: of prompt i, the prefill's first."""

    rounds: tuple[tuple[Round, ...], ...] = field(repr=False)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(token for each in row for token in each.rows[0].emitted) for row in self.rounds)

    @property
    def seconds(self) -> float:
        """Wall time without the prefills."""
        return sum(each.draft_s + each.verify_s for row in self.rounds for each in row[1:])

    @property
    def tokens_per_s(self) -> float:
        return sum(len(row) - 1 for row in self.tokens) / self.seconds

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(each for row in self.rounds for each in row)

    def of(self, places: Sequence[int]) -> "Side":
        """The same for some of the prompts."""
        return Side(tuple(self.rounds[place] for place in places))


@dataclass(frozen=True)
class Pair:
    """Plain decoding and MTP under one sampling, prompt by prompt; looping: prompts whose MTP text is a loop."""

    plain: Side
    mtp: Side

    @cached_property
    def checks(self) -> tuple[Degeneracy, ...]:
        return tuple(degeneracy(tokens) for tokens in self.mtp.tokens)

    @property
    def sound(self) -> list[int]:
        """Prompts whose text is no loop. Loops are easy to draft: figures are taken without them."""
        return [place for place, check in enumerate(self.checks) if not check.looping]

    def figures(self) -> "Pair":
        """The pair without the loops; all of it if everything loops."""
        places = self.sound or range(len(self.checks))
        return Pair(self.plain.of(places), self.mtp.of(places))

    @property
    def speedup(self) -> float:
        """Wall-clock tokens/s of MTP over plain decoding through the same code."""
        return self.mtp.tokens_per_s / self.plain.tokens_per_s

    def as_record(self) -> dict[str, object]:
        """What goes into report.json: the figures without the loops, and how many those were."""
        told = self.figures()
        rates = {"plain_tokens_per_s": told.plain.tokens_per_s, "mtp_tokens_per_s": told.mtp.tokens_per_s}
        counts = {"prompts": len(self.checks), "looping": len(self.checks) - len(self.sound)}
        return (
            told.mtp.acceptance.as_record()
            | rates
            | {"speedup": told.speedup, "speedup_with_loops": self.speedup}
            | counts
        )


@dataclass(frozen=True)
class Report:
    """What the demo found. identical: greedy tokens equal with MTP off and on, all prompts."""

    folder: Path
    prompts: tuple[tuple[int, ...], ...]
    greedy: Pair
    sampled: Pair
    evaluation: EvalRecord
    train_s: float
    total_s: float
    drafts: int

    @property
    def identical(self) -> bool:
        return self.greedy.plain.tokens == self.greedy.mtp.tokens

    def as_record(self) -> dict[str, object]:
        """What goes into report.json."""
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
            "machine": processor(),
        }


def train_demo(
    folder: Path, *, on_record: Callable[[Record], None], should_stop: Callable[[], bool]
) -> tuple[EvalRecord, Corpus] | None:
    """Train the recipe `demo` in `folder/run`, the result in `folder/model` -> (held-out figures of what was trained
    together, held-out corpus); None if it was stopped early."""
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


def _loaded(folder: Path) -> Model:
    """In bfloat16 on the fast path, where texts stay plain decoding's; else as stored, as torch's products are slower
    in bfloat16 at this size and may fall to either side of near-ties."""
    model = Model.load(folder, dtype=torch.bfloat16)
    return model if model.engine().path == "fast" else Model.load(folder)


def decode_side(model: Model, texts: Sequence[Sequence[int]], settings: Settings) -> Side:
    """Decode prompts one after the other, batch 1."""
    made = model.engine()
    return Side(tuple(tuple(rounds(made.trunk, made.head, [text], settings)) for text in texts))


def decode_pair(model: Model, texts: Sequence[Sequence[int]], settings: Settings) -> Pair:
    """Plain and MTP in turn, prompt by prompt: other work on the machine hits both alike."""
    sides: tuple[list[tuple[Round, ...]], list[tuple[Round, ...]]] = ([], [])
    for text in texts:
        for side, drafts in zip(sides, (0, settings.drafts), strict=True):
            side += decode_side(model, [text], replace(settings, drafts=drafts)).rounds
    return Pair(*(Side(tuple(side)) for side in sides))


def run_demo(
    folder: Path,
    *,
    drafts: int = 4,
    on_record: Callable[[Record], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> Report | None:
    """The whole demo; None if it was stopped, to be resumed by the next call. Writes model, report.json and metrics."""
    started = time.perf_counter()
    found = train_demo(folder, on_record=on_record, should_stop=should_stop)
    if found is None:
        return None
    (evaluation, held_out), trained = found, time.perf_counter()
    model = _loaded(folder / "model")
    texts = [text[:192].tolist() for text in prompts(held_out, count=12, length=192, seed=0)]
    greedy = Settings(drafts=drafts, max_tokens=160, eos=(held_out.eos,))
    sampled = replace(greedy, sampling=Sampling(temperature=1.0))
    decode_side(model, texts[:1], greedy)  # warm up
    report = Report(
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


def draw(report: Report) -> list[Path]:
    """loss.png, acceptance.png and timeline.png beside the report."""
    import json

    from nextn.figures import plot

    paths = [report.folder / name for name in ("loss.png", "acceptance.png", "timeline.png")]
    lines = (report.folder / "run" / "metrics.jsonl").read_text().splitlines()
    plot.losses(paths[0], [json.loads(line) for line in lines])
    sides = {"greedy": report.greedy, "temperature 1": report.sampled}
    plot.acceptance(paths[1], {label: pair.figures().mtp.acceptance for label, pair in sides.items()})
    first = report.sampled.figures()
    plot.timeline(paths[2], first.plain.rounds[0][1:], first.mtp.rounds[0][1:], num_tokens=48)
    return paths
