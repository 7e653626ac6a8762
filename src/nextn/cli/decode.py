"""`nextn generate` decodes one prompt with MTP; `nextn trace` shows its rounds token by token as a table.

Also the options that other decoding commands share: sampling, and drafting from a part of the vocabulary.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from nextn.cli.common import AsJson, Chat, MaxTokens, NumCopyTokens, NumSpeculativeTokens, expanded, use_chat
from nextn.cli.model_options import ModelOptions
from nextn.cli.screen import (
    Marks,
    console,
    echo,
    figures_table,
    plain,
    print_json,
    print_note,
    print_notes,
    print_table,
    read_stdin,
)
from nextn.errors import ConfigError
from nextn.settings import Sampling, Settings

if TYPE_CHECKING:
    from nextn.decoding.records import Round
    from nextn.model.model import Model
    from nextn.speculative.draft_policy import DraftLength

_MIN_REPETITIVE = 64  # tokens; a shorter text may repeat a few of them without being degenerate


@dataclass(frozen=True)
class DecodingOptions:
    """The options of commands that decode texts."""

    num_speculative_tokens: NumSpeculativeTokens = 4
    num_copy_tokens: NumCopyTokens = 0
    max_tokens: MaxTokens = 256
    temperature: Annotated[float, Option(help="0 = greedy.")] = 0.0
    top_k: Annotated[int, Option(help="0 = off.")] = 0
    top_p: Annotated[float, Option(help="1 = off.")] = 1.0
    seed: int = 0

    @property
    def settings(self) -> Settings:
        """Raises ConfigError for a value that cannot be used."""
        return Settings(
            num_speculative_tokens=self.num_speculative_tokens,
            num_copy_tokens=self.num_copy_tokens,
            sampling=Sampling(self.temperature, self.top_k, self.top_p),
            max_tokens=self.max_tokens,
            seed=self.seed,
        )


@dataclass(frozen=True)
class DraftVocabularyOptions:
    """The options of commands that can draft from a part of the vocabulary."""

    draft_vocab: Annotated[
        str | None,
        Option(
            metavar="FILE[:N]",
            help="Draft only from the N most frequent tokens of a text file, which is similar to the text that will be "
            "generated. Default of N: the number that is fastest.",
        ),
    ] = None

    def read(self) -> "DraftableText":
        """Read the text. Raises ConfigError."""
        if self.draft_vocab is None:
            return DraftableText(None, None)
        found = re.fullmatch(r"(.+):([0-9]{1,9})", self.draft_vocab)
        file, size = (found[1], int(found[2])) if found else (self.draft_vocab, None)
        if size == 0:
            raise ConfigError(f"--draft-vocab {self.draft_vocab}; expected at least 1 token after the colon")
        try:
            return DraftableText(size, Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--draft-vocab {self.draft_vocab}: not a readable text: {error}") from error


@expanded("exact_head")
def generate(
    *,
    prompt: Annotated[str, Argument(help="Text to continue or question to answer; - reads standard input.")],
    decoding: DecodingOptions,
    adaptive: Annotated[
        bool, Option("--adaptive", help="Draft as many tokens per round as pay off, -k at most.")
    ] = False,
    vocabulary: DraftVocabularyOptions,
    options: ModelOptions,
    chat: Chat = None,
    as_json: AsJson = False,
) -> None:
    """Decode one prompt with MTP. Text of rounds that accepted drafts is green, or in brackets without colors."""
    settings = decoding.settings
    options = options.prepared(need_head=settings.num_speculative_tokens > 0)
    text = read_stdin() if prompt == "-" else prompt
    draftable, k = vocabulary.read(), settings.num_speculative_tokens
    loaded = options.load(need_head=k > 0)
    draftable.apply(loaded, num_speculative_tokens=k, backend=options.backend)
    length = None
    if adaptive:
        from nextn.evaluate.decoding_costs import adaptive_length

        copies = settings.num_copy_tokens
        length = adaptive_length(loaded, limit=k, num_copy_tokens=copies, backend=options.backend)
    request = _Request(text, settings, use_chat(loaded, chat), options.backend, length)
    if as_json:
        print_json(_record(loaded, request))
    else:
        _show(loaded, request)


@expanded("dtype", "exact_head", "backend", "weights", "threads", "kv_cache_dtype", "device_map")
def trace(
    *,
    prompt: Annotated[str, Argument(help="A short prompt: each of its tokens becomes a line.")],
    num_speculative_tokens: NumSpeculativeTokens = 3,
    max_tokens: MaxTokens = 12,
    chat: Chat = None,
    options: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Show which token and hidden state are at which position: in prefill, draft, verify and refresh, by round."""
    from dataclasses import asdict

    settings = Settings(num_speculative_tokens=num_speculative_tokens, max_tokens=max_tokens)
    options = replace(options, dtype="float32").prepared(need_head=num_speculative_tokens > 0)
    from nextn.decoding.generate import encode
    from nextn.decoding.trace import trace as traced

    loaded = options.load(need_head=num_speculative_tokens > 0, in_torch=True)
    rows = list(traced(loaded, encode(loaded, prompt, chat=use_chat(loaded, chat)), settings))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    titles = ("round", "phase", "by", "position", "token", "hidden state", "result")
    table = figures_table(*titles, left=set(titles) - {"round", "position"})
    styles = {"draft": "yellow", "verify": "cyan", "refresh": "magenta"}
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.round != row.round:
            table.add_section()
        cells = (str(row.round), row.phase, row.by, str(row.position), row.token, row.hidden, row.gives)
        table.add_row(*map(plain, cells), style=styles.get(row.phase))
    print_table(table)


@dataclass(frozen=True)
class _Request:
    prompt: str
    settings: Settings
    chat: bool
    backend: str
    length: "DraftLength | None"  # None: fixed

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `generate` and `stream` besides the model."""
        return {
            "prompts": [self.prompt],
            "settings": self.settings,
            "chat": self.chat,
            "backend": self.backend,
            "length": self.length,
        }

    def num_prompt_tokens(self, model: "Model") -> int:
        from nextn.decoding.generate import encode

        return len(encode(model, self.prompt, chat=self.chat))


def _record(model: "Model", request: _Request) -> dict[str, object]:
    from nextn.decoding.generate import generate as decode
    from nextn.runtime.backend import backend_for

    result = decode(model, **request.arguments)[0]
    long = model.length_note(request.num_prompt_tokens(model) + len(result.tokens))
    backend = backend_for(model, request.backend)
    return {
        "text": result.text,
        "tokens": list(result.tokens),
        "finish": result.finish,
        "prefill_s": result.prefill_s,
        "draft_s": result.draft_s,
        "verify_s": result.verify_s,
        "tokens_per_s": result.tokens_per_s,
        "backend": backend.name,
        "runtime": backend.runtime,
        "head_bits": backend.head_bits,
        "draft_lm_head_bits": backend.draft_lm_head_bits,
        "weight_bits": backend.weight_bits,
        "kv_cache_dtype": model.trunk.kv_cache_dtype,
        "notes": [*model.notes, *([long] if long else [])],
        "repetitive": _is_repetitive(result.tokens),
        **result.acceptance.as_record(),
        "copies": result.copy_acceptance.as_record(),
    }


def _show(model: "Model", request: _Request) -> None:
    from nextn.decoding.generate import stream
    from nextn.runtime.backend import backend_for

    screen = console()
    log: list[Round] = []
    print_notes(model.notes)
    marks = Marks.of(screen)
    for chunk in stream(model, **request.arguments, on_round=log.append):
        text = marks.text(chunk.text, accepted=bool(chunk.round.num_accepted))
        screen.print(text, end="", soft_wrap=True, highlight=False)
    backend = backend_for(model, request.backend)
    if backend.reason and request.backend == "auto":
        echo(f"\nnote: decoded by the torch backend: {backend.reason}", err=True)
    tokens = [token for each in log for token in each.rows[0].emitted]
    if long := model.length_note(request.num_prompt_tokens(model) + len(tokens)):
        echo(f"\nnote: {long}", err=True)
    adapted = "" if request.length is None else f"  {request.length.reason} "
    summary = f"{speed(log)} on the {backend.name} backend{adapted}  {acceptance_line(log)}"
    if _is_repetitive(tokens):
        summary += "\nthe text is repetitive, and such text is easy to draft: do not rely on these figures"
    screen.print(plain(f"\n{summary}", style="dim", lines=True), soft_wrap=True)


def speed(log: "Sequence[Round]") -> str:
    """Tokens per second of all rounds after the prefill."""
    seconds = sum(each.draft_s + each.verify_s for each in log[1:])
    tokens = sum(len(each.rows[0].emitted) for each in log[1:])
    return f"{tokens / seconds:.0f} tokens/s" if seconds else "one token"


def acceptance_line(log: "Sequence[Round]") -> str:
    """Mean acceptance length and acceptance per depth of the head's drafts, and the length of copies."""
    from nextn.stats.acceptance import Acceptance

    figures, copies = Acceptance.of(log), Acceptance.of(log, copied=True)
    rates = "  ".join(f"a_{depth} {rate:.2f}" for depth, rate in enumerate(figures.rates, 1) if rate == rate)
    line = f"AL {figures.length:.2f}  {rates}" if figures.num_rounds else "" if copies.num_rounds else "plain decoding"
    if not copies.num_rounds:
        return line
    return f"{line}  copies: AL {copies.length:.2f} in {copies.num_rounds} of {len(log) - 1} rounds".strip()


def _is_repetitive(tokens: "Sequence[int]") -> bool:
    from nextn.data.degeneracy import degeneracy

    return len(tokens) >= _MIN_REPETITIVE and degeneracy(tokens).is_degenerate


@dataclass(frozen=True)
class DraftableText:
    """The text whose `size` most frequent tokens are drafted."""

    size: int | None  # None: the number that is fastest
    text: str | None  # None: all tokens are drafted

    def apply(self, model: "Model", *, num_speculative_tokens: int, backend: str = "auto") -> None:
        """Restrict what the head drafts from. Raises ConfigError if that is impossible.

        num_speculative_tokens: The largest K that will be used.
        """
        if self.text is None:
            return
        from nextn.decoding.generate import encode, eos_tokens

        if model.head is None or not num_speculative_tokens:
            raise ConfigError("--draft-vocab: nothing is drafted, as the model has no head or K is 0")
        tokens, always = encode(model, self.text), eos_tokens(model)
        if self.size is None:
            self._choose(model, tokens, always, num_speculative_tokens, backend)
            return
        from nextn.speculative.draft_vocabulary import DraftVocabulary

        vocab_size = model.trunk.vocab_size
        model.head.draft_vocabulary = DraftVocabulary.of([tokens], self.size, vocab_size=vocab_size, always=always)

    def _choose(self, model: "Model", tokens: list[int], always: tuple[int, ...], k: int, backend: str) -> None:
        from nextn.evaluate.draft_vocabulary_size import choose_draft_vocabulary

        choice = choose_draft_vocabulary(model, tokens, num_speculative_tokens=k, always=always, backend=backend)
        complete = choice.estimates[-1]
        if choice.vocabulary is None:
            print_note(f"--draft-vocab: all {complete.size} tokens, as no smaller number is faster here")
            return
        print_note(
            f"--draft-vocab: {len(choice.vocabulary)} of {complete.size} tokens; {choice.speedup:.2f} x plain "
            f"decoding expected, {complete.speedup:.2f} x with all"
        )
