"""What a fine-tune's batch means to a head: which tokens are labels, and which belong together."""

import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from nextn.errors import ConfigError
from nextn.train.cotrain import must_mask, targets_of


def ids(*values):
    return torch.tensor([list(values)])


def test_labels_are_those_of_the_trunk():
    """An assistant's tokens count, those of the user and padding do not, whatever their labels say."""
    labels, attention = ids(-100, -100, 3, 4, 5, 9), ids(1, 1, 1, 1, 1, 0)
    targets = targets_of({"input_ids": ids(1, 2, 3, 4, 5, 9), "labels": labels, "attention_mask": attention})
    assert targets.labels(0).tolist() == [[-100, 3, 4, 5, -100, -100]]
    assert targets.labels(2).tolist() == [[4, 5, -100, -100]]


def test_labels_may_be_other_tokens():
    targets = targets_of({"input_ids": ids(1, 2, 3), "labels": ids(1, 7, -100)})
    assert targets.labels(0).tolist() == [[7, -100, -100]]


def test_packed_rows_of_trl():
    """As its collator makes them: no label of one document is seen from another, at any depth."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8, 9]}])
    targets = targets_of(batch)
    assert targets.documents.diff().ne(0).tolist() == [[False, False, True, False, True, False, False, False]]
    assert targets.labels(0).tolist() == [[2, 3, -100, 5, -100, 7, 8, 9, -100]]
    assert targets.labels(1).tolist() == [[3, -100, -100, -100, -100, 8, 9, -100]]
    assert must_mask(targets.documents)


@pytest.mark.parametrize(
    ("documents", "masked"),
    [
        ([[0, 0, 0], [0, 0, -1]], False),
        ([[0, 0, 0], [-1, -1, -1]], False),
        ([[3, 3, -1]], False),
        ([[-1, 0, 0]], True),
        ([[0, -1, 0]], True),
        ([[0, 0, 1]], True),
    ],
)
def test_where_causal_attention_is_enough(documents, masked):
    assert must_mask(torch.tensor(documents)) is masked


def test_positions_in_three_dimensions():
    """Time, height and width of a text are one count; those of one row may serve all."""
    positions = ids(0, 1, 2, 0, 1).expand(3, 1, 5)
    tokens = torch.ones(2, 5, dtype=torch.long)
    targets = targets_of({"input_ids": tokens, "labels": tokens, "position_ids": positions})
    assert targets.documents.diff().ne(0).tolist() == [[False, False, True, False]] * 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": None}, "this one has attention_mask, input_ids"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values"),
        ({"shift_labels": ids(2, 3, -100)}, "shift_labels"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "0 for padding"),
    ],
)
def test_other_batches_are_refused(changes, reason):
    batch = {"input_ids": ids(1, 2, 3), "labels": ids(1, 2, 3), "attention_mask": ids(1, 1, 1)} | changes
    with pytest.raises(ConfigError, match=reason):
        targets_of({key: value for key, value in batch.items() if value is not None})
