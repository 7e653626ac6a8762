"""What a fine-tune's batch means to a head beside it: targets and documents, from the inputs that a Trainer hands over.

It knows the keys that transformers' and TRL's collators make; no Trainer, no head.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.losses.loss import IGNORE, Targets

_OTHERS = ("pixel_values", "inputs_embeds", "input_features", "shift_labels")


def targets_of(inputs: Mapping[str, object]) -> Targets:
    """The batch's labels as targets; documents [B, T] from restarting positions, -1 where the attention mask is 0.

    A label counts for the head where it counts for the trunk: not where it is -100, nor on padding. Raises ConfigError
    for a batch that has more than text, no labels, or a mask that is not [B, T].
    """
    tokens, labels = inputs.get("input_ids"), inputs.get("labels")
    other = next((name for name in _OTHERS if inputs.get(name) is not None), None)
    if other is not None or not isinstance(tokens, Tensor) or not isinstance(labels, Tensor):
        reason = f"it has {other}" if other else f"it has {', '.join(sorted(inputs))}"
        raise ConfigError(f"a head is trained on batches of text with input_ids and labels; {reason}")
    documents = _documents(tokens, inputs.get("position_ids"), inputs.get("attention_mask"))
    mask = (labels != IGNORE) & (documents >= 0)
    return Targets(labels.where(mask, tokens), documents, mask)


def must_mask(documents: Tensor) -> bool:
    """Whether causal attention alone would mix documents [B, T]: not where each row is one, padded at its right end."""
    return not bool(((documents == documents[:, :1]) & (documents >= 0) | _right_padding(documents)).all())


def _right_padding(documents: Tensor) -> Tensor:
    return (documents < 0).flip(1).cumprod(1).flip(1).bool()


def _documents(tokens: Tensor, positions: object, attention: object) -> Tensor:
    documents = torch.zeros_like(tokens)
    if isinstance(positions, Tensor):
        positions = positions[0] if positions.ndim == 3 else positions  # time, height, width: text has one in all three
        jumps = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1  # as transformers tells packed rows
        documents = jumps.cumsum(-1).expand_as(tokens)
    if not isinstance(attention, Tensor):
        return documents
    if attention.shape != tokens.shape:
        raise ConfigError(
            f"attention_mask is {tuple(attention.shape)}; beside a head it must be {tuple(tokens.shape)}, 0 for padding"
        )
    return documents.masked_fill(attention == 0, -1)
