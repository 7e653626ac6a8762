"""Slabs: columns survive growth, rows can leave, and headers say where it all stands."""

import pytest
import torch
from replays import fast_of
from tiny import build, decode, prompt

from nextn.fast.native import load
from nextn.fast.slabs import Slabs

SHAPES = [(2, 8, 4), (1, 16, 16)]


def filled(rows: int, columns: int) -> Slabs:
    """Column c of row r, layer l, holds 100 l + 10 r + c."""
    slabs = Slabs(SHAPES, rows, dtype=torch.float32, runtime=load())
    slabs.begin(columns)
    for layer, pair in enumerate(slabs._slabs):
        for slab in pair:
            slab[:, :, :columns] = (
                100 * layer + 10 * torch.arange(rows)[:, None, None, None] + torch.arange(columns)[:, None]
            )
    slabs.keep([columns] * rows)
    return slabs


def check_headers(slabs: Slabs) -> None:
    for header, (keys, values) in zip(slabs.headers.tolist(), slabs._slabs, strict=True):
        assert header == [keys.data_ptr(), values.data_ptr(), keys.shape[2]]
        assert keys.shape[2] == values.shape[2] >= max(slabs.lengths)
        assert all(slab.is_contiguous() for slab in (keys, values))  # the kernel knows no strides


def test_growth_keeps_columns():
    slabs = filled(3, 9)
    before, headers = [[slab[:, :, :9].clone() for slab in pair] for pair in slabs._slabs], slabs.headers.clone()
    slabs.reserve(slabs._slabs[0][0].shape[2])
    assert torch.equal(slabs.headers, headers)
    slabs.begin(slabs._slabs[0][0].shape[2])
    assert slabs._slabs[0][0].shape[2] >= headers[0, 2] + 9
    assert not torch.equal(slabs.headers, headers)
    check_headers(slabs)
    for pair, known in zip(slabs._slabs, before, strict=True):
        for slab, old in zip(pair, known, strict=True):
            assert torch.equal(slab[:, :, :9], old)
            assert not slab[:, :, 9:].any()


def test_room_is_whole_blocks_and_doubles():
    slabs = Slabs(SHAPES, 1, dtype=torch.bfloat16, runtime=load())
    rooms = []
    for columns in (1, 257, 513, 3001):
        slabs.reserve(columns)
        rooms.append(slabs.headers[0, 2].item())
    assert rooms == [256, 512, 1024, 3008]
    assert slabs._slabs[1][1].dtype == torch.bfloat16


def test_rows_leave():
    slabs = filled(3, 5)
    slabs.begin(2)
    slabs.keep([2, 0, 1])
    slabs.select([2, 0])
    assert slabs.lengths == [6, 7]
    check_headers(slabs)
    for layer, (keys, _) in enumerate(slabs._slabs):
        assert keys[:, 0, 4, 0].tolist() == [100 * layer + 24, 100 * layer + 4]


@pytest.mark.parametrize("drafts", [0, 3])
def test_decoding_across_a_growth(drafts):
    """From 250 columns to 274: the slabs of 256 are left behind in the middle of the text."""
    model = build("exaone_moe")
    settings = {"drafts": drafts, "max_tokens": 24}
    texts, log = decode(fast_of(model), [prompt(250)], **settings)
    plain, other = decode(model, [prompt(250)], **settings)
    assert texts == plain
    assert [each.rows for each in log] == [each.rows for each in other]
