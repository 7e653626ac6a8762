"""The demo: decode a published or the shipped model without and with its MTP head; then train another one."""

import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from math import inf
from pathlib import Path

import torch

from nextn.checkpoint.checkpoint import SHIPPED, SHIPPED_HEAD
from nextn.checkpoint.safetensors_file import write_json
from nextn.data.batches import sample_prompts
from nextn.data.corpus import Corpus
from nextn.data.degeneracy import Degeneracy, degeneracy
from nextn.decoding.generate import eos_tokens
from nextn.decoding.records import Round
from nextn.decoding.rounds import rounds
from nextn.devices import torch_threads
from nextn.edit.published_model import smollm2
from nextn.evaluate.decoding_costs import processor_name
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.runtime.backend import Backend, backend_for
from nextn.runtime.native.abi import build_status
from nextn.settings import Sampling, Settings
from nextn.stats.acceptance import Acceptance, expected_length
from nextn.train.joint_run import prepare_joint_run
from nextn.train.metrics import EvalRecord, Evaluation, Record
from nextn.train.self_generated import read_prompts as answered_prompts

_PROMPT_TOKENS, _MAX_TOKENS, _MIN_TOKENS = 96, 160, 32
_MIN_TEXTS = 3  # that are not degenerate: figures of fewer say little of the model
_AGREEMENT = 0.6  # of the accepted drafts that teacher forcing predicts; half of them are lost by the common faults
_DECODE_S, _PUBLISHED_S = 8.0, 45.0  # seconds of decoding one model with one backend
# As the recipe, but without compilation: a step would take 0.75 of the time, which does not make up for the minute or
# more of compilation in a budget of a few minutes, and it needs a compiler. Half the batch, so that slow machines take
# enough steps. Evaluations are not part of the budget.
_TRAINING = {"compile": False, "batch_size": 8, "save_every": 0, "eval_every": 0}

Clock = Callable[[], float]


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
        return sum(len(tokens) - 1 for tokens in self.tokens) / max(self.seconds, 1e-9)

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

    @classmethod
    def join(cls, pairs: "Sequence[DecodedPair]") -> "DecodedPair":
        """Return the pair of all prompts of several pairs."""
        sides = ((pair.plain.rounds for pair in pairs), (pair.mtp.rounds for pair in pairs))
        return cls(*(DecodedSide(tuple(chain.from_iterable(side))) for side in sides))

    @cached_property
    def checks(self) -> tuple[Degeneracy, ...]:
        """The degeneracy of each prompt's MTP text."""
        return tuple(degeneracy(tokens) for tokens in self.mtp.tokens)

    @property
    def non_degenerate(self) -> list[int]:
        """Prompts whose text is not degenerate; the figures exclude the others, which are easy to draft."""
        return [index for index, check in enumerate(self.checks) if not check.is_degenerate]

    @property
    def is_comparable(self) -> bool:
        """Whether enough texts are left for a conclusion from their figures."""
        return len(self.non_degenerate) >= _MIN_TEXTS

    @property
    def is_repetitive(self) -> bool:
        """Whether so many texts are degenerate that the others are too few for figures."""
        return len(self.non_degenerate) < len(self.checks) and not self.is_comparable

    def figures(self) -> "DecodedPair":
        """Return the pair without degenerate texts, or all of it if every text is degenerate."""
        indices = self.non_degenerate or range(len(self.checks))
        return DecodedPair(self.plain.select(indices), self.mtp.select(indices))

    @property
    def speedup(self) -> float:
        """Wall-clock tokens/s of MTP over baseline decoding by the same code."""
        return self.mtp.tokens_per_s / self.plain.tokens_per_s

    def as_record(self) -> dict[str, object]:
        """Return the record for report.json: the figures without degenerate texts, if enough, and their number."""
        counted: dict[str, object] = {
            "prompts": len(self.checks),
            "repetitive": len(self.checks) - len(self.non_degenerate),
            "speedup_with_repetitive": self.speedup,
        }
        if self.is_repetitive:
            return counted
        pair = self.figures()
        rates = {"plain_tokens_per_s": pair.plain.tokens_per_s, "mtp_tokens_per_s": pair.mtp.tokens_per_s}
        return pair.mtp.acceptance.as_record() | rates | {"speedup": pair.speedup} | counted


@dataclass(frozen=True)
class DecodedModel:
    """A model's prompts decoded greedily and at temperature 1, each without and with drafts."""

    prompts: tuple[tuple[int, ...], ...]
    greedy: DecodedPair
    sampled: DecodedPair
    num_speculative_tokens: int
    backend: str  # `native` or `torch`
    reason: str  # why it is `torch`; empty for `native`
    threads: int

    @property
    def identical(self) -> bool:
        """Whether greedy decoding gives the same tokens with and without MTP, for all prompts."""
        return self.greedy.plain.tokens == self.greedy.mtp.tokens

    def as_record(self) -> dict[str, object]:
        """Return the record for report.json."""
        return {
            "identical_output": self.identical,
            "num_speculative_tokens": self.num_speculative_tokens,
            "backend": self.backend,
            "greedy": self.greedy.as_record(),
            "temperature_1": self.sampled.as_record(),
            "torch": torch.__version__,
            "threads": self.threads,
            "machine": processor_name(),
        }


@dataclass(frozen=True)
class Answers:
    """A chat model's answers."""

    prompts: tuple[str, ...]
    decoded: DecodedModel  # of as many prompts as there was time for
    detokenize: Callable[[list[int]], str]
    checkpoint: Path


@dataclass(frozen=True)
class TrainedModel:
    """A model in `folder/model`, its evaluation at the end of training, and the text that it was not trained on."""

    folder: Path
    evaluation: EvalRecord
    held_out: Corpus
    seconds: float  # of the last session, with preparations and evaluation


@dataclass(frozen=True)
class DemoReport:
    """The results of training a model in the demo and decoding it."""

    trained: TrainedModel
    decoded: DecodedModel
    total_s: float

    @property
    def disagreements(self) -> list[str]:
        """What decoding accepts far less of than training's teacher-forced figures say, one sentence per temperature.

        Drafts on the trunk's own text are easier than on the corpus, so more than expected is no disagreement.
        """
        k, forced = self.decoded.num_speculative_tokens, self.trained.evaluation.forced
        command = f"nextn measure {shlex.quote(str(self.trained.folder / 'model'))}"
        cases = (("greedy", forced.match, self.decoded.greedy), ("temperature 1", forced.overlap, self.decoded.sampled))
        lengths = [
            (label, expected_length(rates[:k]), pair.figures().mtp.acceptance)
            for label, rates, pair in cases
            if pair.is_comparable
        ]
        return [
            f"{label}: training's teacher-forced figures give AL {expected:.2f} at K = {min(k, len(forced.match))}, "
            f"decoding has {decoded.length:.2f}; `{command}` measures the head apart from the decoder"
            for label, expected, decoded in lengths
            if decoded.num_rounds and decoded.length - 1 < _AGREEMENT * (expected - 1)
        ]

    def as_record(self) -> dict[str, object]:
        """Return the record for report.json."""
        forced = self.trained.evaluation.forced
        held_out = {"loss_nats": list(forced.loss), "match": list(forced.match), "overlap": list(forced.overlap)}
        return self.decoded.as_record() | {
            "held_out": held_out | {"definition": forced.definition},
            "steps": self.trained.evaluation.step,
            "disagreements": self.disagreements,
            "train_s": self.trained.seconds,
            "total_s": self.total_s,
        }


def decode_side(backend: Backend, texts: Sequence[Sequence[int]], settings: Settings) -> DecodedSide:
    """Decode prompts one after the other, at batch size 1."""
    return DecodedSide(tuple(tuple(rounds(backend.trunk, backend.head, [text], settings)) for text in texts))


def decode_pair(backend: Backend, text: Sequence[int], settings: Settings) -> DecodedPair:
    """Decode a prompt without drafts, then with them."""
    baseline = replace(settings, num_speculative_tokens=0)
    return DecodedPair(*(decode_side(backend, [text], each) for each in (baseline, settings)))


def decode_model(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    backend: str = "auto",
    seconds: float = inf,
    min_prompts: int = 2,
    clock: Clock = time.perf_counter,
) -> DecodedModel:
    """Decode prompts one by one, each without and with drafts in turn, so that other load affects both equally.

    With a time budget of `seconds`, the length of the texts (short enough for `min_prompts`) and the number of prompts
    follow from it; at least one is decoded. The creation of the backend does not count.
    """
    decoder = backend_for(model, backend)
    # More than one are no faster in torch at this size, and far slower on a busy machine.
    threads = 1 if decoder.name == "torch" else torch.get_num_threads()
    with torch_threads(threads):
        prompts, pairs = _decode_prompts(model, decoder, texts, num_speculative_tokens, seconds, min_prompts, clock)
    greedy, sampled = (DecodedPair.join(each) for each in pairs)
    return DecodedModel(prompts, greedy, sampled, num_speculative_tokens, decoder.name, decoder.reason, threads)


def _decode_prompts(
    model: Model,
    decoder: Backend,
    texts: Sequence[Sequence[int]],
    k: int,
    seconds: float,
    min_prompts: int,
    clock: Clock,
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[DecodedPair, ...]]]:
    """Return the prompts that fit the budget, and their pairs, greedy and at temperature 1."""
    settings = Settings(num_speculative_tokens=k, max_tokens=_MIN_TOKENS, eos=eos_tokens(model))
    # The first decoding warms the backend up; the second one is measured. Neither ends before its last token.
    decode_pair(decoder, texts[0], replace(settings, eos=()))
    rate = decode_side(decoder, texts[:1], replace(settings, eos=(), num_speculative_tokens=0)).tokens_per_s
    # Four texts a prompt.
    num_tokens = int(min(_MAX_TOKENS, max(_MIN_TOKENS, rate * seconds / (4 * min_prompts))))
    greedy = replace(settings, max_tokens=num_tokens)
    temperatures = (greedy, replace(greedy, sampling=Sampling(temperature=1.0)))
    pairs: list[list[DecodedPair]] = []
    started = clock()
    for text in texts:
        if pairs and clock() - started >= seconds:
            break
        pairs.append([decode_pair(decoder, text, each) for each in temperatures])
    return tuple(map(tuple, texts[: len(pairs)])), list(zip(*pairs, strict=True))


def load_for(folder: Path, backend: str = "auto", *, head: Path | None = None) -> Model:
    """Load in bfloat16 for the native backend, whose texts equal baseline decoding's; in float32 for `torch`.

    At this size, torch's matmuls are slower in bfloat16, and near-ties may be resolved either way.
    """
    if backend != "torch":
        model = Model.load(folder, dtype=torch.bfloat16, head=head)
        if backend_for(model).name == "native":
            return model
    return Model.load(folder, dtype=torch.float32, head=head)


def decode_published(
    folder: Path,
    *,
    num_speculative_tokens: int,
    seconds: float = _PUBLISHED_S,
    offline: bool = False,
    note: Callable[[str], None] = lambda _: None,
    on_build: Callable[[], None] = lambda: None,
) -> Answers:
    """Decode SmolLM2-135M-Instruct's answers to the package's prompts, with the package's head; write a report.

    Raises CheckpointError if the model is not in the user's cache and cannot be downloaded.
    """
    checkpoint = smollm2(offline=offline, note=note)
    if not (build_status().is_built or build_status().missing):
        on_build()
    model = load_for(checkpoint, head=SHIPPED_HEAD)
    prompts = SHIPPED_HEAD / "prompts.jsonl"
    ids, _ = answered_prompts([prompts], model, chat=True)
    k = num_speculative_tokens
    decoded = decode_model(model, ids, num_speculative_tokens=k, seconds=seconds, min_prompts=len(ids))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", {decoded.backend: decoded.as_record()})
    assert model.tokenizer is not None
    detokenize = partial(model.tokenizer.decode, skip_special_tokens=True)
    return Answers(tuple(str(each.text) for each in read_prompts(prompts)), decoded, detokenize, checkpoint)


def decode_shipped(
    folder: Path,
    *,
    num_speculative_tokens: int,
    seconds: float = _DECODE_S,
    on_build: Callable[[], None] = lambda: None,
) -> Iterator[DecodedModel]:
    """Copy the shipped checkpoint to `folder/model`, decode it, and yield the results of each backend; write a report.

    If the native runtime is not built yet, which takes up to a minute, the torch backend decodes first; on_build is
    called before the build. Where the runtime cannot be built, the torch backend is the only one.
    """
    shutil.copytree(SHIPPED, folder / "model", dirs_exist_ok=True, copy_function=shutil.copyfile)
    prompts = read_prompts(folder / "model" / "prompts.jsonl")
    texts = [[*prompt.text][:_PROMPT_TOKENS] for prompt in prompts if not isinstance(prompt.text, str)]
    status, results = build_status(), dict[str, DecodedModel]()
    reason = status.problem or "the native runtime is not built yet"
    if status.missing:
        reason = f"the native runtime cannot be built without {' and '.join(status.missing)}"
    names = ("torch",) if status.missing or status.problem else ("auto",) if status.is_built else ("torch", "auto")
    for name in names:
        if name == "auto" and not status.is_built:
            on_build()
        model = load_for(folder / "model", name)
        k = num_speculative_tokens
        result = decode_model(model, texts, num_speculative_tokens=k, backend=name, seconds=seconds)
        result = replace(result, reason=reason) if name == "torch" else result
        results[result.backend] = result
        yield result
    write_json(folder / "report.json", {name: result.as_record() for name, result in results.items()})


def train_demo(
    folder: Path,
    *,
    minutes: float,
    on_record: Callable[[Record | Evaluation], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainedModel | None:
    """Train the shipped checkpoint's recipe for some minutes in `folder/run` and write the result to `folder/model`.

    Return None if it was stopped; the next call resumes it.
    """
    started = time.perf_counter()
    run = prepare_joint_run(folder / "run", recipe="tiny", settings=_TRAINING | {"minutes": minutes})
    evaluations: list[EvalRecord] = []
    for trainer in run.stages(folder / "model"):
        trainer.resume()
        for record in trainer.run(should_stop, on_evaluation=on_record):
            on_record(record)
            evaluations += [record] if isinstance(record, EvalRecord) else []
        if not trainer.is_over:
            return None
    return TrainedModel(folder, evaluations[-1], run.held_out, time.perf_counter() - started)


def decode_trained(trained: TrainedModel, *, num_speculative_tokens: int) -> DemoReport:
    """Load the trained model, decode it, and write report.json."""
    started = time.perf_counter()
    prompts = sample_prompts(trained.held_out, count=12, length=_PROMPT_TOKENS, seed=0, continuation=0)
    texts = [prompt.tolist() for prompt in prompts]
    decoded = decode_model(
        load_for(trained.folder / "model"), texts, num_speculative_tokens=num_speculative_tokens, seconds=_DECODE_S
    )
    report = DemoReport(trained, decoded, trained.seconds + time.perf_counter() - started)
    write_json(trained.folder / "report.json", report.as_record())
    return report
