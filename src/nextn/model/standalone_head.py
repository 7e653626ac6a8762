"""A head without a trunk's checkpoint: MTP for any model that exposes its hidden states."""

from dataclasses import replace

from nextn.errors import ConfigError
from nextn.family_table import by_name
from nextn.model.head import Head
from nextn.model.trunk import Trunk


class StandaloneHead(Head):
    """A head with its own embedding and tied lm_head: MTP for any model that exposes its hidden states.

    Args:
        vocab_size: V.
        hidden_size: H, of the model's hidden states [B, T, H]; an even multiple of num_heads.
        num_modules: MTP layers.
        num_heads: Attention heads of each.
        max_length: Positions of a row.

    Raises:
        ConfigError: The sizes do not fit.

    Example:
        >>> import torch
        >>> head = nextn.StandaloneHead(vocab_size=100, hidden_size=64)
        >>> tokens, hidden = torch.randint(0, 100, (2, 8)), torch.randn(2, 8, 64)
        >>> [tuple(each.shape) for each in head.teacher_forced_hidden(tokens, hidden, 2)]
        [(2, 7, 64), (2, 6, 64)]
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, num_modules: int = 1, num_heads: int = 4, max_length: int = 4096
    ) -> None:
        if num_heads < 1 or hidden_size < 1 or hidden_size % (2 * num_heads):
            raise ConfigError(f"{hidden_size=}, {num_heads=}: expected hidden_size to be an even multiple of num_heads")
        config = {
            "model_type": "qwen3",
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": 4 * hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": hidden_size // num_heads,
            "max_position_embeddings": max_length,
            "tie_word_embeddings": True,
        }
        family = replace(by_name("deepseek_v3"), block={"layer_types": ["full_attention"]})
        super().__init__(family, Trunk.from_config(config), num_modules=num_modules)
        self.embedding = self.trunk.embedding
