"""Small byte-level BPE tokenizers with the pre-tokenizers of published models."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

SPLITS = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def bpe_tokenizer(split: str, size: int = 263) -> PreTrainedTokenizerFast:
    """Train on this file: 256 bytes, merges, two special tokens and one added word; Llama's adds its first token."""
    backend = Tokenizer(models.BPE(ignore_merges=split in ("llama-bpe", "tekken")))
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 3, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eot|>")
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if split == "llama-bpe":
        bos = ("<|bos|>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[bos]
        )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "gpt-2":
        return words
    if split == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    pattern = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[split]), behavior="isolated")
    return pre_tokenizers.Sequence([pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
