"""KV buffers: contents survive growth, sequences can be removed, and headers hold the addresses."""

import pytest
import torch
from replays import fast_of
from tiny import build, decode, prompt

from nextn.runtime.native.abi import load
from nextn.runtime.native.kv_buffers import KVBuffers

SHAPES = [(2, 8, 4), (1, 16, 16)]


def filled(rows: int, columns: int) -> KVBuffers:
    """Position c of sequence r, layer l, holds 100 l + 10 r + c."""
    buffers = KVBuffers(SHAPES, rows, dtype=torch.float32, runtime=load())
    buffers.begin(columns)
    for layer, pair in enumerate(buffers._buffers):
        for buffer in pair:
            buffer[:, :, :columns] = (
                100 * layer + 10 * torch.arange(rows)[:, None, None, None] + torch.arange(columns)[:, None]
            )
    buffers.commit([columns] * rows)
    return buffers


def check_headers(buffers: KVBuffers) -> None:
    for header, (keys, values) in zip(buffers.headers.tolist(), buffers._buffers, strict=True):
        assert header == [keys.data_ptr(), values.data_ptr(), keys.shape[2]]
        assert keys.shape[2] == values.shape[2] >= max(buffers.lengths)
        assert all(buffer.is_contiguous() for buffer in (keys, values))  # the kernel knows no strides


def test_growth_keeps_contents():
    buffers = filled(3, 9)
    before, headers = (
        [[buffer[:, :, :9].clone() for buffer in pair] for pair in buffers._buffers],
        buffers.headers.clone(),
    )
    buffers.reserve(buffers._buffers[0][0].shape[2])
    assert torch.equal(buffers.headers, headers)
    buffers.begin(buffers._buffers[0][0].shape[2])
    assert buffers._buffers[0][0].shape[2] >= headers[0, 2] + 9
    assert not torch.equal(buffers.headers, headers)
    check_headers(buffers)
    for pair, known in zip(buffers._buffers, before, strict=True):
        for buffer, old in zip(pair, known, strict=True):
            assert torch.equal(buffer[:, :, :9], old)
            assert not buffer[:, :, 9:].any()


def test_capacity_is_whole_blocks_and_doubles():
    buffers = KVBuffers(SHAPES, 1, dtype=torch.bfloat16, runtime=load())
    capacities = []
    for columns in (1, 257, 513, 3001):
        buffers.reserve(columns)
        capacities.append(buffers.headers[0, 2].item())
    assert capacities == [256, 512, 1024, 3008]
    assert buffers._buffers[1][1].dtype == torch.bfloat16


def test_sequences_are_removed():
    buffers = filled(3, 5)
    buffers.begin(2)
    buffers.commit([2, 0, 1])
    buffers.select([2, 0])
    assert buffers.lengths == [6, 7]
    check_headers(buffers)
    for layer, (keys, _) in enumerate(buffers._buffers):
        assert keys[:, 0, 4, 0].tolist() == [100 * layer + 24, 100 * layer + 4]


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_growth_between_two_blocks_changes_no_bit(kind):
    model = build("exaone_moe")
    model.trunk.kv_cache_dtype = kind
    trunk, tokens, found = fast_of(model).trunk, torch.tensor([prompt(274)]), []
    for reserved in (1, 300):
        cache = trunk.cache(1)
        cache.reserve(reserved)
        for block in tokens.split((250, 24), 1):
            states = trunk(block, cache).final_hidden.clone()
            cache.commit([block.shape[1]])
        found.append(states)
        held = sum(buffer.nbytes for pair in cache._buffers for buffer in pair)
        assert held == cache.bytes_per_position * cache.headers[0, 2]
    assert torch.equal(*found)


@pytest.mark.one_case
@pytest.mark.parametrize("k", [0, 3])
def test_decoding_across_a_growth(k):
    """From 250 positions to 274: the buffers grow beyond 256 in the middle of the text."""
    model = build("exaone_moe")
    settings = {"num_speculative_tokens": k, "max_tokens": 24}
    texts, log = decode(fast_of(model), [prompt(250)], **settings)
    plain, other = decode(model, [prompt(250)], **settings)
    assert texts == plain
    assert [each.rows for each in log] == [each.rows for each in other]
