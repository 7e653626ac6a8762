"""How far a way to run a model is from the model in float32: the divergence of its next-token distributions.

The reference is kept as final hidden states [T, H] of each text, with the lm_head that reads them: its distributions
are computed again, a few positions at a time, for each candidate. The texts are those of a file, or the
interpreter's own documentation.

`input_squares` says how much each input channel of a trunk's Linears matters for rounding.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from nextn.data.corpus import encoder, read_text
from nextn.data.records import RecordReader
from nextn.data.sources import Source, has_records, read_records
from nextn.edit.quantize import Importance
from nextn.errors import ConfigError
from nextn.evaluate.decoding_costs import step_bytes
from nextn.model.layer_states import LayerProgress
from nextn.model.model import Model
from nextn.model.streamed_trunk import ReadOptions, StreamedTrunk, run_batches
from nextn.model.trunk import Trunk
from nextn.runtime.backend import backend_for
from nextn.runtime.protocols import DecodingTrunk
from nextn.settings import WEIGHT_BITS, WEIGHTS

BLOCK = 64  # positions whose distributions are in memory at once
MAX_KL = 0.01  # nats per token, mean: of `choose_weights`
# From a text [T] to its logits [n, V] in order, of any n that sum to T.
Logits = Callable[[Sequence[int]], Iterable[Tensor]]
CONTEXT = 512  # tokens of a text


@dataclass(frozen=True)
class Accuracy:
    """Next-token distributions of a candidate beside the reference's, over positions whose next token is known."""

    positions: int  # their number
    kl_mean: float  # of KL(reference || candidate), in nats
    kl_p99: float  # the same, its 99th percentile
    same_argmax: float  # share of positions where both have the same most probable token
    perplexity_ratio: float  # the candidate's perplexity over the reference's
    perplexity: float  # the reference's
    ties: float  # share of positions where the candidate's two largest logits are equal

    def __str__(self) -> str:
        return (
            f"KL {self.kl_mean:.2g} nats (99th percentile {self.kl_p99:.2g}), same argmax {self.same_argmax:.1%}, "
            f"perplexity x {self.perplexity_ratio:.4f}, at {self.positions} positions"
        )

    def as_record(self) -> dict[str, object]:
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


class Reference:
    """Texts, and the distributions of a model in float32 at all their positions."""

    def __init__(
        self, texts: Sequence[Sequence[int]], states: Sequence[Tensor], read: Callable[[Tensor], Tensor]
    ) -> None:
        """Keep states [T, H] after the final norm of each text, and what computes logits [n, V] from some of them."""
        self.texts, self._states, self._read = texts, states, read

    @classmethod
    @torch.inference_mode()
    def of(cls, trunk: Trunk, texts: Sequence[Sequence[int]], **options: Unpack[ReadOptions]) -> "Reference":
        """Run each text of two token ids or more through a trunk in float32, whose layers are read once if streamed.

        `options` are those of `StreamedTrunk.run`. Raises ConfigError for another dtype, and for a text that is too
        short, too long or not of the trunk's vocabulary.
        """
        if trunk.dtype != torch.float32:
            raise ConfigError(f"the reference is in {trunk.dtype}; load it with dtype=torch.float32")
        _check_texts(trunk, texts)
        outputs = run_batches(trunk, [torch.tensor([list(text)]) for text in texts], **options)
        return cls(texts, [output.final_hidden[0].clone() for output in outputs], trunk.logits)

    @torch.inference_mode()
    def compare(self, logits: Logits, *, on_position: Callable[[int], None] = lambda count: None) -> Accuracy:
        """Return how far the distributions of a candidate, which `logits` returns for a text in blocks, are from these.

        `on_position` gets the number of positions of each block. Raises ConfigError if the candidate has another
        vocabulary.
        """
        sums = _Sums()
        for text, states in zip(self.texts, self._states, strict=True):
            start = 0
            for block in logits(text):
                reference = self._read(states[start : start + len(block)]).cpu()
                if block.shape != reference.shape:
                    raise ConfigError(
                        f"logits of shape {tuple(block.shape)}, those of the reference are {tuple(reference.shape)}: "
                        "compare models of one vocabulary"
                    )
                start += len(block)
                sums.add(reference, block, torch.tensor(text[start - len(block) + 1 : start + 1]))
                on_position(len(block))
            assert start == len(text), f"{start} positions of {len(text)}"
        return sums.result()


class _Sums:
    """What `Accuracy` is computed from, gathered over blocks of positions."""

    def __init__(self) -> None:
        self.divergences: list[Tensor] = []
        self.same, self.ties, self.log_ratio, self.surprise = 0, 0, 0.0, 0.0

    def add(self, reference: Tensor, candidate: Tensor, targets: Tensor) -> None:
        """Compare logits [n, V] at the positions that have a next token: the first of them, as many as `targets`."""
        count = len(targets)
        # In float64: divergences down to 1e-7 are sums of differences of float32 numbers around 10.
        ours, theirs = (logits[:count].double().log_softmax(-1) for logits in (reference, candidate))
        terms = (ours.exp() * (ours - theirs)).masked_fill(ours == -math.inf, 0.0)
        self.divergences.append(terms.nan_to_num(math.inf, posinf=math.inf).sum(-1))  # NaN agrees with nothing
        best = candidate[:count].float().topk(2, dim=-1).values
        self.ties += int((best[:, 0] == best[:, 1]).sum())
        self.same += int((ours.argmax(-1) == candidate[:count].argmax(-1)).sum())
        surprises = [-float(each.gather(-1, targets[:, None]).sum()) for each in (ours, theirs)]
        self.surprise += surprises[0]
        self.log_ratio += surprises[1] - surprises[0]

    def result(self) -> Accuracy:
        divergences = torch.cat(self.divergences)
        count = len(divergences)
        return Accuracy(
            count,
            float(divergences.mean()),
            float(divergences.quantile(0.99).nan_to_num(math.inf)),  # between two infinite ones
            self.same / count,
            _exp(self.log_ratio / count),
            _exp(self.surprise / count),
            self.ties / count,
        )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def logits_of(trunk: DecodingTrunk) -> Logits:
    """Return the logits of a backend's trunk, read as decoding reads them, from blocks of positions over its cache."""
    size = min(BLOCK, trunk.max_block_size or BLOCK)

    def logits(text: Sequence[int]) -> Iterator[Tensor]:
        tokens, cache = torch.tensor([list(text)]), trunk.cache(1)
        for block in tokens.split(size, dim=1):
            with trunk.pass_context():
                result = trunk.read(trunk(block, cache)).logits[0].to("cpu", copy=True)
                cache.commit([block.shape[1]])
            yield result

    return logits


@dataclass(frozen=True)
class Candidate:
    """One way to run the model, and its accuracy."""

    source: str
    weights: str  # one of `WEIGHTS`
    backend: str  # that ran it: native or torch
    dtype: str
    step_bytes: int  # of weights that a step of one token reads
    accuracy: Accuracy

    @classmethod
    def of(
        cls,
        model: Model,
        reference: Reference,
        *,
        source: str,
        backend: str = "auto",
        on_position: Callable[[int], None] = lambda count: None,
    ) -> "Candidate":
        """Compare a loaded model, with its `Trunk.weights`, in a backend (see `backend_for`).

        Raises ConfigError: The backend cannot run it, or as `Reference.compare`.
        """
        engine, trunk = backend_for(model, backend), model.trunk
        accuracy = reference.compare(logits_of(engine.trunk), on_position=on_position)
        dtype, num_bytes = str(trunk.dtype).removeprefix("torch."), step_bytes(trunk, engine.weight_bits)
        return cls(source, trunk.weights, engine.name, dtype, num_bytes, accuracy)

    def as_record(self) -> dict[str, object]:
        own = {name: value for name, value in vars(self).items() if name != "accuracy"}
        return own | self.accuracy.as_record()


def choose_weights(model: Model, reference: Reference, *, source: str, max_kl: float = MAX_KL) -> list[Candidate]:
    """Set `Trunk.weights` to the fewest bits, which are the fastest, with a mean divergence of at most `max_kl` nats.

    Return what was compared, from the fewest bits on; the last one is what was chosen, unless it diverges more: then
    the weights are `stored`.
    """
    found: list[Candidate] = []
    for _, weights in sorted((bits, name) for name, bits in WEIGHT_BITS.items() if bits):
        model.trunk.weights = weights
        found.append(Candidate.of(model, reference, source=source, backend="native"))
        if found[-1].accuracy.kl_mean <= max_kl:
            return found
    model.trunk.weights = WEIGHTS[0]
    return found


def _check_texts(trunk: Trunk, texts: Sequence[Sequence[int]]) -> None:
    limit = trunk.max_length
    for text in texts:
        if len(text) < 2 or (limit is not None and len(text) > limit):
            message = f"a text of {len(text)} tokens; expected 2 to {limit or 'any number'}, the model's context"
            raise ConfigError(message)
        if max(text) >= trunk.vocab_size or min(text) < 0:
            wrong = next(token for token in text if not 0 <= token < trunk.vocab_size)
            raise ConfigError(f"token {wrong} is not in the model's vocabulary of {trunk.vocab_size}")
    if not texts:
        raise ConfigError("there is no text to compare on; expected at least one of two tokens")


@dataclass(frozen=True)
class ComparedTexts:
    """Texts as token ids, each of a few hundred, and where they are from."""

    tokens: tuple[tuple[int, ...], ...]
    source: str

    def as_record(self) -> dict[str, object]:
        """Return what says whether two figures are of the same texts."""
        digest = sha256(repr(self.tokens).encode()).hexdigest()
        return {"source": self.source, "texts": len(self.tokens), "tokens": self.num_tokens, "sha256": digest}

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


def compared_texts(
    tokenizer: PreTrainedTokenizerBase | None,
    source: Source | None = None,
    *,
    num_tokens: int = 3 * CONTEXT,
    context: int = CONTEXT,
) -> ComparedTexts:
    """Cut documents into texts of `context` tokens: first the beginning of each document, then what follows it.

    Without a source they are `pydoc_data.topics`, the prose of Python's documentation that `help()` shows, its longest
    topics first. A token that the tokenizer begins every text with, does. Raises ConfigError for a source that cannot
    be read or has no text of two tokens, and for text without a tokenizer.
    """
    name = f"pydoc_data.topics of Python {sys.version.split()[0]}" if source is None else str(source)
    start = [] if tokenizer is None else list(tokenizer("")["input_ids"])[:1]
    size, texts, left = context - len(start), list[tuple[int, ...]](), num_tokens
    documents = _enough(_documents(tokenizer, source), num_tokens, size)
    rounds = zip_longest(*([ids[at : at + size] for at in range(0, len(ids), size)] for ids in documents))
    for piece in chain.from_iterable(rounds):
        text = (*start, *(piece or ()))[:left]
        if piece and len(text) > 1:
            texts.append(text)
            left -= len(text)
    if not texts:
        raise ConfigError(f"{name}: no text of two tokens, which a distribution and its next token need")
    return ComparedTexts(tuple(texts), name)


def _enough(documents: Iterable[Sequence[int]], num_tokens: int, size: int) -> Iterator[Sequence[int]]:
    """Yield documents until their beginnings are enough, so that no large data set is read as a whole."""
    for ids in documents:
        yield ids
        num_tokens -= min(size, len(ids))
        if num_tokens <= 0:
            return


def _documents(tokenizer: PreTrainedTokenizerBase | None, source: Source | None) -> Iterator[Sequence[int]]:
    if source is not None and has_records(source):
        reader = RecordReader(tokenizer)  # records of token ids need none
        for location, record in read_records(source):
            yield [int(token) for token in reader.document(record, location).ids]
        return
    if tokenizer is None:
        raise ConfigError(
            'the checkpoint has no tokenizer: give records of token ids, as {"prompt": [3, 14], "tokens": [15]}, or '
            "add tokenizer.json to its folder"
        )
    encode = encoder(tokenizer)
    for text in _topics() if source is None else [read_text(Path(source))]:
        yield [int(token) for token in encode([text])[0]]


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this interpreter has no pydoc_data, the built-in text; give one with --texts") from error
    return sorted(topics.values(), key=len, reverse=True)


TOKENS = 4096  # of the texts, by default


@torch.inference_mode()
def input_squares(
    trunk: StreamedTrunk,
    texts: Sequence[Sequence[int]],
    *,
    on_layer: Callable[[LayerProgress], None] = lambda progress: None,
) -> Importance:
    """Run each text through a streamed trunk, and return the mean square [K] of the inputs of every Linear.

    A Linear of experts that are stacked, or that no token reaches, has none.
    """
    sums: dict[tuple[int, str], Tensor] = {}
    counts: dict[tuple[int, str], int] = {}

    def note(key: tuple[int, str], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].detach().flatten(0, -2).float()
        sums[key] = sums.get(key, 0) + rows.square().sum(0)
        counts[key] = counts.get(key, 0) + len(rows)

    with ExitStack() as hooks:
        for index, layer in enumerate(trunk.decoder.layers):
            for name, part in layer.named_modules():
                if isinstance(part, nn.Linear):
                    hook = part.register_forward_pre_hook(partial(note, (index, f"{name}.weight")))
                    hooks.enter_context(hook)
        trunk.read_layers([torch.tensor([list(text)]) for text in texts], on_layer=on_layer)
    return {key: total / counts[key] for key, total in sums.items() if counts[key]}
