"""Structured output: compile a JSON schema, a regular expression or a Lark grammar into masks over the vocabulary.

llguidance does the parsing. Its matchers are rolled back after drafts, and a compiled grammar is copied for each
sequence, which costs microseconds. Compilation and each mask are bounded by llguidance's own limits on work (lexer
fuel, grammar size, items per step), not by a clock, so that the same schema is accepted on every machine; this module
adds limits on the schema itself, because the time to compile grows with the square of the members of one object.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nextn.bounded_json import loads
from nextn.errors import ConfigError
from nextn.serve.request import GrammarState
from nextn.text_format import install_command

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

_MAX_GRAMMAR = 16_384  # characters of a request's own grammar, whose schemas and rules no other limit bounds
# Between two JSON tokens: nothing, a space, or a new line with its indentation. Without a bound, small models emit
# nothing else.
JSON_WHITESPACE = r"( |\r?\n[ \t]{0,24})?"


@dataclass(frozen=True)
class JsonSchema:
    """Text that is a JSON value and validates against the schema, a JSON text."""

    schema: str


@dataclass(frozen=True)
class Regex:
    """Text that a regular expression (Rust's `regex` syntax, no look-around) matches as a whole."""

    pattern: str


@dataclass(frozen=True)
class Lark:
    """Text of a context-free grammar in llguidance's variant of Lark."""

    grammar: str


GrammarSpec = JsonSchema | Regex | Lark
JSON_OBJECT = JsonSchema('{"type": "object"}')


# Bounds on what a request may ask to compile, which keep compilation below a second.
_MAX_CHARS = 65_536  # of the schema or grammar
_MAX_PATTERN = 4_096  # characters of a regular expression, with whose square the time grows
_MAX_DEPTH = 32  # nested objects and arrays of a schema
_MAX_ITEMS, _MAX_PROPERTIES = 1_000, 250  # of one array of a schema, such as an enum; of one object
_MAX_CACHED = 64  # compiled grammars that are kept, least recently used first to go


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the most recent ones. Any thread may use it.

    The tokenizer is a fast one of transformers: byte-level, or SentencePiece with byte fallback. Ids below `vocab_size`
    that it does not have are never allowed, and `eos_ids` (default: its EOS) only where the grammar may end. Raises
    ConfigError if llguidance is not installed, or cannot use the tokenizer.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", vocab_size: int, *, eos_ids: Sequence[int] | None = None
    ) -> None:
        eos = [tokenizer.eos_token_id] if eos_ids is None else list(eos_ids)
        self._tokenizer = _read_tokenizer(tokenizer, vocab_size, eos)
        self._after_end = torch.zeros(vocab_size, dtype=torch.bool)
        self._after_end[eos] = True
        self._cache: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Callable[[], GrammarState]:
        """Compile a grammar, or find it in the cache; return a function that makes a sequence's first state.

        Raises ConfigError for a grammar that is invalid, unsupported, too large, or that no text fulfills.
        """
        self._matcher(spec)
        return partial(self._first_state, spec)

    def _first_state(self, spec: GrammarSpec) -> GrammarState:
        matcher = self._matcher(spec)
        return _MatcherState(matcher.deep_copy(), self._after_end, partial(self._forget, spec, matcher))

    def _matcher(self, spec: GrammarSpec) -> "LLMatcher":
        with self._lock:
            matcher = self._cache.get(spec)
            if matcher is not None:
                self._cache.move_to_end(spec)
        if matcher is None:
            matcher = self._compile(spec)  # outside the lock: other requests need not wait
            with self._lock:
                self._cache[spec] = matcher
                if len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
        return matcher

    def _forget(self, spec: GrammarSpec, matcher: "LLMatcher") -> None:
        """Compile this grammar again next time: copies share a lexer, and one that reached a limit stays so."""
        with self._lock:
            if self._cache.get(spec) is matcher:
                del self._cache[spec]

    def _compile(self, spec: GrammarSpec) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        # Tighter for regular expressions: with the defaults, one mask of a hostile one takes up to 1.3 s. More items
        # per step: 250 optional properties and a vocabulary of 152,000 need more than the default of 50,000.
        limits = LLParserLimits(
            step_lexer_fuel=50_000, max_lexer_states=50_000, step_max_items=400_000, verbose_errors=False
        )
        matcher = LLMatcher(self._tokenizer, _grammar_text(spec), log_level=0, limits=limits)
        if matcher.is_error():
            raise ConfigError(f"{_title(spec)} cannot be used: {_reason(matcher)}")
        # Some errors, such as a $ref to itself, appear only with the first mask.
        if not np.frombuffer(matcher.compute_bitmask(), np.uint8).any() or matcher.is_error():
            raise ConfigError(f"{_title(spec)} cannot be used: no text fulfills it, or it is too complex")
        return matcher


class _MatcherState:
    """A `GrammarState` on a matcher of llguidance.

    EOS never reaches the matcher: where its text cannot go on, it accepts EOS without counting it, and a rollback would
    go one token too far.

    Args:
        matcher: At the first token; this state owns it.
        after_end: The mask after EOS [V]: EOS only.
        on_failure: Called when the grammar becomes too complex to follow.
    """

    def __init__(self, matcher: "LLMatcher", after_end: Tensor, on_failure: Callable[[], None]) -> None:
        self._matcher, self._after_end, self._has_ended = matcher, after_end, False
        self._on_failure = on_failure
        self._masks: dict[tuple[int, ...], Tensor] = {}  # by the drafts since the last token that was emitted

    def allowed(self, drafts: tuple[int, ...]) -> list[Tensor]:
        masks, num_consumed = [self._mask(())], 0
        has_ended = self._has_ended
        for count, draft in enumerate(drafts, start=1):
            if not (0 <= draft < len(masks[-1]) and masks[-1][draft]):
                break
            has_ended = has_ended or bool(self._after_end[draft])
            if has_ended:
                masks.append(self._after_end)
                continue
            self._consume(draft)
            num_consumed += 1
            masks.append(self._mask(drafts[:count]))
        if num_consumed:
            self._matcher.rollback(num_consumed)
        return masks

    def advance(self, tokens: tuple[int, ...]) -> None:
        self._masks = {}
        for token in tokens:
            if self._after_end[token] and (self._has_ended or self._matcher.is_accepting()):
                self._has_ended = True
            else:
                self._consume(token)

    def _consume(self, token: int) -> None:
        if self._has_ended or not self._matcher.consume_token(token):
            reason = _reason(self._matcher) or "the text has ended"
            raise ConfigError(f"token {token} does not follow the grammar: {reason}")

    def _mask(self, drafts: tuple[int, ...]) -> Tensor:
        """The mask after these drafts, which the matcher has consumed."""
        if self._has_ended:
            return self._after_end
        if drafts not in self._masks:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                self._on_failure()
                raise ConfigError(f"the grammar became too complex to follow: {_reason(self._matcher)}")
            unpacked = np.unpackbits(bits, count=len(self._after_end), bitorder="little")
            self._masks[drafts] = torch.from_numpy(unpacked.view(np.bool_))
        return self._masks[drafts]


def json_schema(schema: object) -> JsonSchema:
    """Make the grammar of a schema that was parsed from JSON; raise ConfigError if it is not an object."""
    if not isinstance(schema, dict):
        raise ConfigError(f"JSON schema is {json.dumps(schema)[:40]}; expected an object")
    return JsonSchema(json.dumps(schema, ensure_ascii=False))


def structure(kind: str, value: object) -> GrammarSpec:
    """Make the grammar that a request asks for.

    The value of `json` is a schema or its text, of `json_object` true, of `regex` a pattern, of `choice` a list of
    texts, of `grammar` Lark or GBNF. Raises ConfigError if the text of a schema is not JSON, or a grammar is too long,
    or neither Lark nor GBNF.
    """
    match kind, value:
        case "json", str(text):
            try:
                return json_schema(loads(text))
            except ValueError as error:
                raise ConfigError(f"the JSON schema is not JSON: {error}") from error
        case "json", schema:
            return json_schema(schema)
        case "regex", str(pattern):
            return Regex(pattern)
        case "choice", list(texts):
            return Lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))
        case "grammar", str(text):
            return Lark(_lark(text))
        case _:
            return JSON_OBJECT


def _lark(text: str) -> str:
    """A grammar in Lark, translated from GBNF if it is in that."""
    if len(text) > _MAX_GRAMMAR:
        raise ConfigError(f"grammar has {len(text):,} characters; expected at most {_MAX_GRAMMAR:,}")
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises bare ones
        message = f"grammar is neither Lark nor GBNF: {_first_line(str(error)) or 'nested too deep'}"
        raise ConfigError(message) from error


def _read_tokenizer(tokenizer: "PreTrainedTokenizerBase", vocab_size: int, eos: list[int]) -> "LLTokenizer":
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise ConfigError(f"structured output needs llguidance; install it with: {install_command('serve')}") from error
    if not eos or None in eos:
        raise ConfigError("structured output needs a token that ends a sequence; this tokenizer has no eos_token")
    known, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    if (last := max(*eos, *(id for token, id in known.items() if token not in added))) >= vocab_size:
        raise ConfigError(f"the tokenizer has ids up to {last}; expected less than the vocabulary's {vocab_size}")
    try:  # added tokens may be beyond the vocabulary, see `added_tokens_beyond`: masks end before them
        return from_tokenizer(tokenizer, n_vocab=max(vocab_size, 1 + max(known.values())), eos_token=eos)
    except ValueError as error:
        raise ConfigError(
            f"structured output cannot use this tokenizer ({type(tokenizer).__name__}): {_first_line(str(error))}; "
            "expected a fast tokenizer that is byte-level or has byte fallback"
        ) from error


def _grammar_text(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    text = next(iter(vars(spec).values()))
    most = _MAX_PATTERN if isinstance(spec, Regex) else _MAX_CHARS
    if len(text) > most:
        raise ConfigError(f"{_title(spec)} has {len(text):,} characters; expected at most {most:,}")
    match spec:
        case JsonSchema(schema):
            check_schema(json.loads(schema))
            try:
                return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": JSON_WHITESPACE})
            except ValueError as error:  # NaN, Infinity, or a number that no double holds
                raise ConfigError(f"JSON schema cannot be used: {_first_line(str(error))}") from error
        case Regex(pattern):
            return LLMatcher.grammar_from_regex(pattern)
        case Lark(grammar):
            return LLMatcher.grammar_from_lark(grammar)


def check_schema(schema: object) -> None:
    """Raise ConfigError for a schema that is too deep, has too many members in one place, or would not be followed.

    llguidance holds numbers as doubles: of a constant beyond 2**53 it would write another number.
    """
    stack = [(1, schema, False)]
    while stack:
        depth, value, is_constant = stack.pop()
        if is_constant and isinstance(value, int) and not -(2**53) <= value <= 2**53:
            message = f"JSON schema has the constant {value}; expected integers up to 2**53, which doubles hold exactly"
            raise ConfigError(message)
        if not isinstance(value, dict | list):
            continue
        if depth > _MAX_DEPTH:
            raise ConfigError(f"JSON schema is nested more than {_MAX_DEPTH} levels deep")
        most = _MAX_PROPERTIES if isinstance(value, dict) else _MAX_ITEMS
        if len(value) > most:
            kind = "object of {} members" if isinstance(value, dict) else "array of {} items"
            raise ConfigError(f"JSON schema has an {kind.format(f'{len(value):,}')}; expected at most {most:,}")
        members = value.items() if isinstance(value, dict) else ((None, inner) for inner in value)
        stack += ((depth + 1, inner, is_constant or name in ("enum", "const")) for name, inner in members)


def _title(spec: GrammarSpec) -> str:
    return {JsonSchema: "JSON schema", Regex: "regular expression", Lark: "grammar"}[type(spec)]


def _reason(matcher: "LLMatcher") -> str:
    return _first_line(matcher.get_error())


def _first_line(text: str) -> str:
    """The message of llguidance without its dump of the grammar; of a parse error, the line that names the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "<non-verbose/>" not in line]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return ": ".join([*lines[:1], *named]).rstrip(":")
