"""Targets of a cotrained head, from the batches of transformers' and TRL's trainers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.losses.mtp_loss import IGNORE, Targets

_UNSUPPORTED = ("pixel_values", "inputs_embeds", "input_features", "shift_labels")


def model_inputs(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model's inputs and labels of a batch: of TRL's GRPO, prompts and completions joined, as it joins them.

    Labels are what the policy sampled: not the prompt, nor the results of tools in a completion.
    """
    if "completion_ids" not in batch:
        return batch
    prompt, completion, mask = batch["prompt_ids"], batch["completion_ids"], batch["completion_mask"]
    sampled = (mask * batch.get("tool_mask", 1)).bool()
    return {
        **batch,
        "input_ids": torch.cat([prompt, completion], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], mask], dim=1),
        "labels": torch.cat([torch.full_like(prompt, IGNORE), completion.where(sampled, IGNORE)], dim=1),
    }


def targets_of(inputs: Mapping[str, object]) -> Targets:
    """Convert a batch to targets; documents [B, T] come from restarting positions, -1 where the attention mask is 0.

    The head has the trunk's labels: none where they are -100, nor on padding. Raises ConfigError for a batch with more
    than text, without labels, or with a mask that is not [B, T].
    """
    tokens, labels = inputs.get("input_ids"), inputs.get("labels")
    unsupported = next((name for name in _UNSUPPORTED if inputs.get(name) is not None), None)
    if unsupported is not None or not isinstance(tokens, Tensor) or not isinstance(labels, Tensor):
        names = unsupported or ", ".join(sorted(inputs))
        raise ConfigError(f"a head is trained on batches of text with input_ids and labels; this one has {names}")
    documents = _documents(tokens, inputs.get("position_ids"), inputs.get("attention_mask"))
    mask = (labels != IGNORE) & (documents >= 0)
    return Targets(labels.where(mask, tokens), documents, mask)


def must_mask(documents: Tensor) -> bool:
    """Return whether causal attention would mix documents [B, T]; not if each row is one document, padded right."""
    return not bool(((documents == documents[:, :1]) & (documents >= 0) | _right_padding(documents)).all())


def _right_padding(documents: Tensor) -> Tensor:
    return (documents < 0).flip(1).cumprod(1).flip(1).bool()


def _documents(tokens: Tensor, positions: object, attention: object) -> Tensor:
    documents = torch.zeros_like(tokens)
    if isinstance(positions, Tensor):
        positions = positions[0] if positions.ndim == 3 else positions  # time, height, width: the same for text
        jumps = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1  # as transformers detects packed rows
        documents = jumps.cumsum(-1).expand_as(tokens)
    if not isinstance(attention, Tensor):
        return documents
    if attention.shape != tokens.shape:
        raise ConfigError(
            f"attention_mask is {tuple(attention.shape)}; to train a head it must be {tuple(tokens.shape)}, 0 for "
            "padding"
        )
    return documents.masked_fill(attention == 0, -1)
