"""The demo: decode a published or the shipped model without and with its MTP head; then train a new head for it."""

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
from nextn.stats.acceptance import Acceptance
from nextn.train.evaluation import HeldOutAcceptance
from nextn.train.head_run import StartingPoint, prepare_head_run
from nextn.train.metrics import Evaluation, HeadRecord, Record
from nextn.train.self_generated import read_prompts as answered_prompts

_PROMPT_TOKENS, _MAX_TOKENS, _MIN_TOKENS = 96, 160, 32
_NUM_TEXTS = 6  # of held-out code
_MIN_TEXTS = 3  # that are not degenerate: figures of fewer say little of the model
_DECODE_S, _PUBLISHED_S, _TRAINED_S = 8.0, 45.0, 15.0  # seconds of decoding one model with one backend
# Small steps, so that slow machines take enough of them. Evaluations are not part of the time budget.
_TRAINING = {
    "batch_size": 2, "length": _PROMPT_TOKENS + _MAX_TOKENS, "optimizer": "muon", "matrix_lr": 0.005,
    "loss_vocab": 8192, "save_every": 0, "eval_every": 0,
}  # fmt: skip

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
    max_tokens: int  # of each text
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
class Demonstration:
    """A model, its prompts as text, and what it decoded of as many of them as there was time for."""

    checkpoint: Path
    head: Path | None  # None: the checkpoint's own
    prompts: tuple[str, ...]
    decoded: DecodedModel
    detokenize: Callable[[list[int]], str]


@dataclass(frozen=True)
class TrainedHead:
    """A new head for the trunk of a checkpoint, in a folder of its own.

    Attributes:
        folder: Of the head.
        steps: Of training.
        heldout: Acceptance on code that it was not trained on, by teacher forcing.
        held_out: That code.
        seconds: Of the last session, with preparations and evaluation.
    """

    folder: Path
    steps: int
    heldout: HeldOutAcceptance
    held_out: Corpus
    seconds: float

    def as_record(self) -> dict[str, object]:
        """Return the record for report.json."""
        return {"steps": self.steps, "heldout": self.heldout.as_record(), "train_s": self.seconds}


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
    max_tokens: int | None = None,
    min_prompts: int = 2,
    clock: Clock = time.perf_counter,
) -> DecodedModel:
    """Decode prompts one by one, each without and with drafts in turn, so that other load affects both equally.

    With a time budget of `seconds`, the length of the texts (short enough for `min_prompts`) and the number of prompts
    follow from it; at least one is decoded. The creation of the backend does not count. With `max_tokens`, it is the
    length of all texts.
    """
    decoder = backend_for(model, backend)
    # More than one are no faster in torch at this size, and far slower on a busy machine.
    threads = 1 if decoder.name == "torch" else torch.get_num_threads()
    k, pairs = num_speculative_tokens, list[list[DecodedPair]]()
    settings = Settings(num_speculative_tokens=k, max_tokens=_MIN_TOKENS, eos=eos_tokens(model))
    with torch_threads(threads):
        # The first decoding warms the backend up; the second one is measured. Neither ends before its last token.
        decode_pair(decoder, texts[0], replace(settings, eos=()))
        rate = decode_side(decoder, texts[:1], replace(settings, eos=(), num_speculative_tokens=0)).tokens_per_s
        # Four texts a prompt.
        num_tokens = max_tokens or int(min(_MAX_TOKENS, max(_MIN_TOKENS, rate * seconds / (4 * min_prompts))))
        settings = replace(settings, max_tokens=num_tokens)
        temperatures = (settings, replace(settings, sampling=Sampling(temperature=1.0)))
        started = clock()
        for text in texts:
            if pairs and clock() - started >= seconds:
                break
            pairs.append([decode_pair(decoder, text, each) for each in temperatures])
    greedy, sampled = map(DecodedPair.join, zip(*pairs, strict=True))
    prompts = tuple(map(tuple, texts[: len(pairs)]))
    return DecodedModel(prompts, greedy, sampled, num_tokens, k, decoder.name, decoder.reason, threads)


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
) -> Demonstration:
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
    shown = tuple(str(each.text) for each in read_prompts(prompts))
    return Demonstration(checkpoint, SHIPPED_HEAD, shown, decoded, detokenize)


def decode_shipped(
    folder: Path,
    *,
    num_speculative_tokens: int,
    seconds: float = _DECODE_S,
    on_build: Callable[[], None] = lambda: None,
) -> Iterator[Demonstration]:
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
        yield Demonstration(folder / "model", None, tuple(_of_bytes(text) for text in texts), result, _of_bytes)
    write_json(folder / "report.json", {name: result.as_record() for name, result in results.items()})


def _of_bytes(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def train_demo(
    folder: Path,
    checkpoint: Path,
    *,
    num_speculative_tokens: int,
    minutes: float,
    on_record: Callable[[Record | Evaluation], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainedHead | None:
    """Train a new head on a checkpoint's frozen trunk for some minutes in `folder`, on Python's standard library.

    Return None if it was stopped; the next call resumes it.
    """
    started = time.perf_counter()
    settings = _TRAINING | {"minutes": minutes, "depths": num_speculative_tokens}
    run = prepare_head_run(folder, StartingPoint(checkpoint, fresh=True), data=(), settings=settings)
    run.trainer.resume()
    evaluated: HeadRecord | None = None
    for record in run.trainer.run(should_stop, on_evaluation=on_record):
        on_record(record)
        evaluated = record if isinstance(record, HeadRecord) else evaluated
    if not run.trainer.is_over:
        return None
    assert evaluated is not None  # after the last step
    head = run.write(head_only=True).parent
    return TrainedHead(head, evaluated.step, evaluated.heldout, run.held_out, time.perf_counter() - started)


def decode_trained(trained: TrainedHead, example: Demonstration) -> tuple[Demonstration, Demonstration]:
    """Continue held-out code with the trained head and with the example's own; write report.json beside the former.

    Both continue the same prompts, by as many tokens: those that there was time for with the trained head.
    """
    prompts = sample_prompts(trained.held_out, count=_NUM_TEXTS, length=_PROMPT_TOKENS, seed=1)
    texts = [prompt.tolist() for prompt in prompts]
    k = example.decoded.num_speculative_tokens

    def decode(head: Path | None, seconds: float, num_prompts: int, max_tokens: int | None) -> Demonstration:
        decoded = decode_model(
            load_for(example.checkpoint, head=head), texts[:num_prompts], num_speculative_tokens=k, seconds=seconds,
            max_tokens=max_tokens, min_prompts=num_prompts,
        )  # fmt: skip
        return replace(example, head=head, prompts=tuple(map(example.detokenize, texts)), decoded=decoded)

    new = decode(trained.folder, _TRAINED_S, len(texts), None)
    own = decode(example.head, inf, len(new.decoded.prompts), new.decoded.max_tokens)
    write_json(trained.folder.parent / "report.json", new.decoded.as_record() | trained.as_record())
    return new, own
