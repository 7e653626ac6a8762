"""What a model's prompts and texts must fit, which is known without its weights."""

from dataclasses import dataclass

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from nextn.checkpoint.snapshot import small_files
from nextn.errors import ConfigError
from nextn.model.model import Model, read_tokenizer


@dataclass(frozen=True)
class TextInterface:
    """Tokenizer, vocabulary, context and end-of-text tokens of a model."""

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    max_length: int | None
    eos: tuple[int, ...]

    @classmethod
    def of(cls, model: Model) -> "TextInterface":
        """Return that of a model; eos is of its generation config, its config or its tokenizer, in this order."""
        generation = getattr(model.trunk.model, "generation_config", None)
        eos = _first_eos(generation, model.trunk.config, model.tokenizer)
        return cls(model.tokenizer, model.trunk.vocab_size, model.trunk.max_length, eos)

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
        limit = getattr(config, "max_position_embeddings", None)
        return cls(tokenizer, size, limit, _first_eos(generation, config, tokenizer))


def _first_eos(*sources: object) -> tuple[int, ...]:
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
