"""A fresh head for the model of a Trainer: made of the trunk's parts, as `training.init_head` makes it."""

import warnings
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from nextn.errors import ConfigError
from nextn.head import Head
from nextn.model import live_trunk
from nextn.training.init_head import init_head
from nextn.trunk import Trunk

# Of the data, to measure the trunk's residual stream on.
_ROWS, _TOKENS = 8, 256


def fresh_head(trainer: Trainer, model: PreTrainedModel, *, num_modules: int, made: type[Trunk]) -> Head:
    """A head of `num_modules` modules on a trunk that is `made` of `model`; warns of parts that it has no pattern for.

    Raises ConfigError for more modules than the family has room for, or a Trainer without training data.
    """
    family, trunk = live_trunk(model, made=made)
    tokens = _text(trainer)[:, : trunk.max_length].to(trunk.device)
    head, notes = init_head(family, trunk, tokens, num_modules=num_modules)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return head


def _text(trainer: Trainer) -> Tensor:
    """[1, T] tokens of the first rows of the training data."""
    rows = [] if trainer.train_dataset is None else list(islice(trainer.train_dataset, _ROWS))
    if not rows:
        raise ConfigError("a fresh head is fitted to its trunk on some text: give the Trainer a train_dataset first")
    ids = [row["input_ids"] for row in rows] if "input_ids" in rows[0] else trainer.data_collator(rows)["input_ids"]
    return torch.cat([torch.as_tensor(each).flatten() for each in ids])[None, :_TOKENS]
