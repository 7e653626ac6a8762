"""Text of a model: its tokenizer, and the tokens that end a text."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from nextn.bounded_json import parse_json, token_id
from nextn.checkpoint.checkpoint import OTHER_LIMITS, TOKENIZER_FILES
from nextn.checkpoint.snapshot import small_files
from nextn.data.chat_template import check_growth
from nextn.errors import CheckpointError, ConfigError
from nextn.model.layer_types import context_length
from nextn.model.trunk import Trunk
from nextn.text_format import some

_SAMPLE_TEXT = "A text, 1 \u00e9"


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder and try it on a short text. Raises ConfigError if there is no usable one."""
    try:
        for path in sorted(folder.glob("*token*.json")):
            OTHER_LIMITS.check_file(path)
        if (path := folder / "tokenizer.json").is_file():
            check_growth(parse_json(path.read_bytes(), OTHER_LIMITS))
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.decode(tokenizer(_SAMPLE_TEXT)["input_ids"])
    except BaseException as error:
        # tokenizers raises nothing narrower than Exception, and a panic of its Rust code is not even that.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"{folder}: no readable tokenizer: {reason}; pass a folder with tokenizer.json and tokenizer_config.json"
        ) from error
    return tokenizer


def added_tokens_beyond(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[str]:
    """Return the added tokens that a vocabulary has no rows for, such as a fine-tune's padding or Gemma 3's image.

    Raises CheckpointError if it lacks other tokens: it is that of another model.
    """
    added = [token for token, id in tokenizer.get_added_vocab().items() if id >= vocab_size]
    if len(tokenizer) - len(added) > vocab_size or tokenizer.eos_token in added:
        raise CheckpointError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {vocab_size}: use the tokenizer of "
            "this model"
        )
    return added


def tokenizer_in(folder: Path, vocab_size: int, notes: list[str]) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer in a folder, if there is one; add notes. Raises CheckpointError for that of another model."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    tokenizer = read_tokenizer(folder)
    try:
        added = added_tokens_beyond(tokenizer, vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    if added:
        notes.append(
            f"the model's vocabulary of {vocab_size} lacks {some(added)}, added to its tokenizer: text with them "
            "is refused"
        )
    return tokenizer


@dataclass(frozen=True)
class TextInterface:
    """Tokenizer, vocabulary, context and end-of-text tokens of a model."""

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    max_length: int | None
    eos: tuple[int, ...]

    @classmethod
    def of(cls, trunk: Trunk, tokenizer: PreTrainedTokenizerBase | None) -> "TextInterface":
        """Return that of a model; eos is as `eos_tokens` says."""
        eos = _eos_of(getattr(trunk.model, "generation_config", None), trunk.config, tokenizer)
        return cls(tokenizer, trunk.vocab_size, trunk.max_length, eos)

    @classmethod
    def read(cls, source: str) -> "TextInterface":
        """Read that of a checkpoint folder or hub id. Raises ConfigError for an unusable tokenizer or config."""
        folder = small_files(source)
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config(decoder=True)
            has_generation = (folder / "generation_config.json").is_file()
            generation = GenerationConfig.from_pretrained(folder) if has_generation else None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source}: its config cannot be read: {error}") from error
        tokenizer, size = read_tokenizer(folder), getattr(config, "unpadded_vocab_size", None) or config.vocab_size
        return cls(tokenizer, size, context_length(config), _eos_of(generation, config, tokenizer))


def _eos_of(generation: object, config: object, tokenizer: object) -> tuple[int, ...]:
    # The tokenizer's ends a text, too, as in vLLM: a fine-tune for chats is often saved with its base's other files.
    configured = next((each for each in (generation, config) if getattr(each, "eos_token_id", None) is not None), None)
    ids = (token for source in (configured, tokenizer) for token in _eos_in(source))
    return tuple(dict.fromkeys(ids))


def _eos_in(source: object) -> list[int]:
    ids = getattr(source, "eos_token_id", None)
    try:
        return [token_id(each) for each in (ids if isinstance(ids, list | tuple) else [ids]) if each not in (None, -1)]
    except ValueError as error:
        raise ConfigError(f"eos_token_id of {type(source).__name__}: {error}, or a list of such") from error
