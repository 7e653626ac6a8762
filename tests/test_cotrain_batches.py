"""What a fine-tune's batch means to a head: which tokens are labels, and which belong together."""

from types import SimpleNamespace

import pytest
import torch
from quick import loop
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from nextn.errors import ConfigError
from nextn.train.cotrain import longest_document, must_mask, targets_of


def ids(*values):
    return torch.tensor([list(values)])


def test_labels_are_those_of_the_trunk():
    """An assistant's tokens count, those of the user and padding do not, whatever their labels say."""
    labels, attention = ids(-100, -100, 3, 4, 5, 9), ids(1, 1, 1, 1, 1, 0)
    targets = targets_of({"input_ids": ids(1, 2, 3, 4, 5, 9), "labels": labels, "attention_mask": attention})
    assert targets.labels(0).tolist() == [[-100, 3, 4, 5, -100, -100]]
    assert targets.labels(2).tolist() == [[4, 5, -100, -100]]


def test_the_longest_document_is_no_padding():
    """Equal numbers in two rows are two documents."""
    assert longest_document(torch.tensor([[0, 0, 1, 1, 1, -1, -1, -1, -1], [1, 1, 0, 0, -1, -1, -1, -1, -1]])) == 3
    assert longest_document(torch.full((1, 4), -1)) == 0


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
        ({"labels": ids(2, 3, -100)}, "labels are shifted"),
        ({"labels": ids(1, 2)}, r"\(1, 3\) and \(1, 2\)"),
        ({"input_ids": torch.tensor([1, 2, 3])}, r"\(3,\) and \(1, 3\)"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "0 for padding"),
    ],
)
def test_other_batches_are_refused(changes, reason):
    batch = {"input_ids": ids(1, 2, 3), "labels": ids(1, 2, 3), "attention_mask": ids(1, 1, 1)} | changes
    with pytest.raises(ConfigError, match=reason):
        targets_of({key: value for key, value in batch.items() if value is not None})


DOCUMENTS = [[0, 0, 0, 1, 1, 2, 2, 2]]
NUMBERS = ids(1, 1, 1, 2, 2, 3, 3, 3)
BLOCKS = (NUMBERS[0][:, None] == NUMBERS[0]).tril()[None, None]
ENDS = torch.tensor([0, 3, 5, 8], dtype=torch.int32)
MARKINGS = {
    "position_ids": ids(0, 1, 2, 0, 1, 0, 1, 2),
    "position_ids of four dimensions": ids(0, 1, 2, 0, 1, 0, 1, 2).expand(4, 1, 8),
    "text_position_ids": ids(0, 1, 2, 0, 1, 0, 1, 2),
    "position_ids that start at 2": ids(2, 3, 4, 2, 3, 2, 3, 4),
    "attention_mask": NUMBERS,
    "attention_mask of floats": NUMBERS.float(),
    "attention_mask of blocks": BLOCKS,
    "attention_mask of additive blocks": torch.zeros(1, 1, 8, 8).masked_fill(~BLOCKS, torch.finfo(torch.float32).min),
    "attention_mask of infinite blocks": torch.zeros(1, 1, 8, 8).masked_fill(~BLOCKS, float("-inf")),
    "cu_seq_lens_q": ENDS,
    "cu_seq_lens_k": ENDS[None],
    "cu_seqlens": ENDS.tolist(),
    "seq_idx": (NUMBERS - 1).int(),
    "seq_lengths": [[3, 2, 3]],
    "packed_seq_lengths": torch.tensor([3, 2, 3], dtype=torch.int32),
    "position_ids of one dimension": ids(0, 1, 2, 0, 1, 0, 1, 2)[0],
    "seq_idx of one dimension": NUMBERS[0],
    "input_pos": ids(0, 1, 2, 0, 1, 0, 1, 2),
    "flash_attn_kwargs": SimpleNamespace(cu_seqlens_q=ENDS, max_seqlen_q=3),
    "packed_seq_params": {"cu_seqlens_q": torch.tensor([0, 1, 2, 4]), "cu_seqlens_q_padded": ENDS},
}


@loop("name", MARKINGS)
def test_markings_of_packed_rows(name):
    """By every collator: also beside positions or a mask that do not show documents."""
    tokens = torch.arange(8)[None]
    batch = {"input_ids": tokens, "labels": tokens, name.split()[0]: MARKINGS[name]}
    plain = {"attention_mask": torch.ones_like(tokens), "position_ids": tokens, "max_length_q": 3}
    for more in ({}, plain):
        targets = targets_of(more | batch)
        assert targets.documents.tolist() == DOCUMENTS
        assert targets.counts(2)[1:].tolist() == [2, 0]
        assert targets.labels(0)[0].tolist() == [1, 2, -100, 4, -100, 6, 7, -100]
        assert targets.labels(1)[0].tolist() == [2, -100, -100, -100, -100, 7, -100]


def test_padding_of_packed_rows():
    """A numbered mask ends with 0, boundaries may end before the tokens, and a mask of blocks has empty rows."""
    tokens, numbers = torch.arange(6)[None], ids(1, 1, 2, 2, 0, 0)
    blocks = ((numbers[0][:, None] == numbers[0]) & (numbers[0] != 0)).tril()[None, None]
    for marking in ({"attention_mask": numbers}, {"cu_seq_lens_q": torch.tensor([0, 2, 4])},
                    {"attention_mask": blocks}, {"seq_lengths": [[2, 2]]}):  # fmt: skip
        targets = targets_of({"input_ids": tokens, "labels": tokens} | marking)
        assert targets.documents.tolist() == [[0, 0, 1, 1, -1, -1]]
        assert targets.labels(0).tolist() == [[1, -100, 3, -100, -100, -100]]


def test_numbered_rows_of_axolotl():
    """Positions that do not restart, several rows, and padding on either side."""
    tokens = torch.arange(12).view(2, 6)
    mask = torch.tensor([[1, 1, 2, 3, 3, 0], [0, 1, 1, 1, 2, 2]])
    targets = targets_of({"input_ids": tokens, "labels": tokens, "attention_mask": mask,
                          "position_ids": torch.arange(6).expand(2, 6)})  # fmt: skip
    assert targets.documents.tolist() == [[0, 0, 1, 2, 2, -1], [-1, 0, 0, 0, 1, 1]]


def test_flattened_rows_of_transformers():
    """The collator itself, with and without positions."""
    from transformers import DataCollatorWithFlattening

    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8]}]
    for options in ({"return_flash_attn_kwargs": True}, {"return_seq_idx": True}, {}):
        batch = DataCollatorWithFlattening(return_tensors="pt", **options)(rows)
        for without in ((), ("position_ids",)):
            kept = {name: value for name, value in batch.items() if name not in without}
            if options or not without:
                assert targets_of(kept).documents.tolist() == DOCUMENTS


def test_numbers_of_tokens_by_any_name_are_refused():
    """Of documents: a number that rises now and then. Positions, token types around an image and masks are none."""
    tokens = ids(5, 6, 7, 8, 9, 3)
    for name, value in (
        ("batch_idx", ids(0, 0, 1, 1, 2, -1)),
        ("trajectory_ids", ids(3, 3, 3, 7, 7, 7)),
        ("token_type_ids", ids(0, 0, 0, 1, 1, 1)),
        ("rope_positions", ids(0, 1, 2, 0, 1, 0)),
        ("text_positions", ids(0, 1, 2, 3, 0, 0)),  # the last ones of padding, or of one token
        ("batch_idx", torch.tensor([0, 0, 0, 1, 1, 1])),  # flattened
    ):
        with pytest.raises(ConfigError, match=f"by {name}, which train_head does not know"):
            targets_of({"input_ids": tokens, "labels": tokens, name: value})
        marking = {"position_ids": ids(0, 1, 0, 1, 0, 1)}  # by another marking
        assert targets_of({"input_ids": tokens, "labels": tokens, name: value, **marking}).documents.max() == 2
    for name, value in (
        ("cache_position", torch.arange(6)),
        ("token_type_ids", ids(0, 1, 1, 0, 0, 0)),
        ("token_type_ids", ids(0, 1, 0, 1, 0, 0)),
        ("token_type_ids", ids(0, 0, 0, 0, 0, 0)),
        ("completion_mask", ids(0, 0, 0, 1, 1, 1)),
        ("advantages", torch.tensor([[0.0, 0.0, 0.5, 0.5, 1.0, 1.0]])),
    ):
        targets_of({"input_ids": tokens, "labels": tokens, name: value})


@loop(
    ("marking", "words"),
    [
        ({"segment_ids": ids(1, 1, 2, 2)}, "by segment_ids, which train_head does not know"),
        ({"packing_params": {}}, "by packing_params"),
        ({"seq_idx": ids(1, 1)}, r"seq_idx is \(1, 2\); to train a head it must be \(1, 4\)"),
        ({"position_ids": ids(0, 1)}, r"position_ids is \(1, 2\)"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "not one causal block for each document"),
        ({"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, "not one causal block"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "does not fit 4 tokens"),
        ({"cu_seq_lens_q": torch.tensor([1, 4])}, "does not fit 4 tokens"),
        ({"seq_lengths": [[3, 3]]}, "seq_lengths has 6 tokens in row 0"),
        ({"seq_lengths": [3, 1]}, "no list of lengths"),
    ],
)
def test_markings_that_are_refused(marking, words):
    tokens = torch.arange(4)[None]
    with pytest.raises(ConfigError, match=words):
        targets_of({"input_ids": tokens, "labels": tokens} | marking)


def test_names_that_look_like_markings():
    """Refused by name where they have more than one document a row, unless another marking says where these begin."""
    tokens, positions = torch.arange(4)[None], {"position_ids": ids(0, 1, 0, 1)}
    many = {"packed_seq_lens": [2, 2], "seqlens": torch.tensor([2, 2]), "cumulative_len": [torch.tensor([0, 2, 4])],
            "sub_seq_lens": [[2, 2]], "_packed_seq_ids": ids(1, 1, 2, 2), "sample_ids": ids(0, 0, 1, 1),
            "mask": BLOCKS[:, 0, :4, :4], "boundaries": [0, 2], "sequence_lengths": ids(2, 2), "doc_lens": [2, 2],
            "inputs_segmentation": ids(1, 1, 2, 2), "attn_mask_startend_row_indices": ids(2, 2, 4, 4)[:, None, :, None],
            "attn_bias": torch.zeros(1, 1, 4, 4), "attention_masks": SimpleNamespace(mask_mod=len)}  # fmt: skip
    for name, value in many.items():
        batch = {"input_ids": tokens, "labels": tokens, name: value}
        with pytest.raises(ConfigError, match=f"by {name}, which train_head does not know"):
            targets_of(batch)
        assert targets_of(batch | positions).documents.tolist() == [[0, 0, 1, 1]]
    one = {"seq_len": [4], "sample_ids": [7], "document_ids_": ids(1, 1, 1, 1), "cu_seqlens_padded": [0, 4],
           "max_seqlen": 4, "num_sequences": 1, "loss_mask": ids(0, 1, 1, 1), "token_type_ids": ids(0, 0, 0, 0),
           "lengths": [4], "sample_weights": torch.ones(1, 4), "assistant_masks": ids(0, 1, 0, 1),
           "segment_idx": ids(3, 3, 3, 3)}  # fmt: skip
    assert targets_of({"input_ids": tokens, "labels": tokens} | one).documents.tolist() == [[0, 0, 0, 0]]
