"""Caches: what is kept is as if never windowed, per row: attention, sliding windows, convolution, recurrence."""

import pytest
import torch
from quick import REPRESENTATIVES, loop
from tiny import CONFIGS, build
from transformers.cache_utils import DynamicCache

from nextn.cache.attention_layer import AttentionLayer, Starts, write_each, write_indexed
from nextn.cache.kv_cache import CACHE_ARGUMENT, KVCache
from nextn.errors import RollbackError
from nextn.model.layer_types import LayerType
from nextn.model.trunk import Trunk

# fp32: chunked and step kernels of a delta net sum in other orders (5e-5 seen); one wrong column is 1e-1 and more.
TOLERANCE = 3e-4

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SLIDING = SIZES | {
    "model_type": "qwen3",
    "head_dim": 8,
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
CONVOLUTION = SIZES | {
    "model_type": "lfm2",
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention"] * 2,
}


def trunks():
    for name in CONFIGS:
        marks = () if name in REPRESENTATIVES else pytest.mark.slow
        yield pytest.param(lambda name=name: build(name).trunk, id=name, marks=marks)
    for name, config in (("sliding", SLIDING), ("convolution", CONVOLUTION)):
        yield pytest.param(lambda config=config: Trunk.from_config(config), id=name)


@pytest.fixture(params=list(trunks()))
def trunk(request):
    torch.manual_seed(0)
    return request.param()


def whole(trunk, tokens):
    """The slow twin: transformers' own cache, one pass, no roll-back -> normed states as `Trunk` hands them on."""
    cache = DynamicCache(config=trunk.model.config)
    return trunk.decoder(input_ids=tokens, use_cache=True, **{CACHE_ARGUMENT: cache}).last_hidden_state * trunk.scale


@pytest.mark.one_case
@loop("counts", [[5, 0, 3], [0, 0, 0], [5, 5, 5], [1, 4, 2]], ids=str)
def test_keep_any_prefix_per_row(trunk, counts):
    """Windows of 5 of which each row keeps another number; what follows equals the whole text in one pass."""
    texts = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        reference = whole(trunk, texts)
        cache = trunk.cache(3)
        trunk(texts[:, :9], cache)
        cache.commit([9, 4, 7])
        for _ in range(4):
            at = list(cache.lengths)
            rejected = torch.stack([texts[row, start : start + 5] for row, start in enumerate(at)])
            for row, count in enumerate(counts):
                rejected[row, count:] = (rejected[row, count:] + 7) % 64  # what is not kept was wrong
            got = trunk(rejected, cache).final_hidden
            for row, count in enumerate(counts):
                wanted = reference[row, at[row] : at[row] + count]
                torch.testing.assert_close(got[row, :count], wanted, atol=TOLERANCE, rtol=0)
            cache.commit(counts)
        assert cache.lengths == [start + 4 * count for start, count in zip([9, 4, 7], counts, strict=True)]


@loop("columns", [1, 6])
def test_keeping_nothing_is_bit_exact(trunk, columns):
    """A window of which nothing stands leaves no trace: the same pass gives the same bits. Of one column, too, where
    Mamba's step writes its state in place."""
    texts = torch.randint(0, 64, (2, 20))
    with torch.inference_mode():
        cache = trunk.cache(2)
        trunk(texts[:, :11], cache)
        cache.commit([11, 11])
        first = trunk(texts[:, 11:14], cache).final_hidden
        cache.commit([0, 0])
        trunk(torch.randint(0, 64, (2, columns)), cache)
        cache.commit([0, 0])
        assert torch.equal(trunk(texts[:, 11:14], cache).final_hidden, first)


def test_select_rows(trunk):
    """Rows that stay keep their own past, in the order asked for."""
    texts = torch.randint(0, 64, (3, 16))
    with torch.inference_mode():
        reference = whole(trunk, texts)
        cache = trunk.cache(3)
        trunk(texts[:, :8], cache)
        cache.commit([8, 5, 8])
        cache.select([2, 1])
        got = trunk(torch.stack([texts[2, 8:11], texts[1, 5:8]]), cache).final_hidden
        torch.testing.assert_close(got[0], reference[2, 8:11], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(got[1], reference[1, 5:8], atol=TOLERANCE, rtol=0)


def test_recurrent_state_cannot_be_truncated():
    cache = build("qwen3_5").trunk.cache(1)
    cache.lengths = [4]
    with pytest.raises(RollbackError, match="commit fewer positions"):
        cache.rollback_to([3])


def test_an_unwatched_recurrent_layer_raises():
    """Without the recording hook the state cannot be put back: that is said, not ignored."""
    trunk = build("qwen3_5").trunk
    with torch.inference_mode():
        cache = trunk.cache(1)
        trunk(torch.zeros(1, 4, dtype=torch.long), cache)
        for layer in cache.layers:
            if hasattr(layer, "_replay"):
                layer._replay = None
        with pytest.raises(RollbackError, match="not recorded"):
            cache.commit([2])


def test_buffers_grow_by_doubling():
    """Appending n columns one by one copies O(n) of them, not O(n^2)."""
    layer = AttentionLayer()
    cache = KVCache([layer], 1)
    buffers = set()
    for _ in range(300):
        cache.begin(1)
        cache.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), 0)
        cache.commit([1])
        buffers.add(layer.keys.data_ptr())
    assert len(buffers) <= 4
    assert layer.keys.shape[2] < 2 * 300


@pytest.mark.parametrize("starts", [[0, 3, 5], [4, 4, 4]])
def test_states_of_all_sequences_are_written_at_once(starts):
    """As sequence by sequence, where every operation waits for its launch."""
    states, buffers = torch.randn(3, 2, 4, 5), [torch.zeros(3, 2, 9, 5) for _ in range(2)]
    write_each(buffers[0], states, starts)
    write_indexed(buffers[1], states, starts)
    assert torch.equal(*buffers)
    assert torch.equal(buffers[0][1, :, starts[1] : starts[1] + 4], states[1])
    shared = Starts(starts)  # of all layers, which may write different numbers of states
    for each in (states + 1, states[:, :, :2]):
        write_each(buffers[0], each, starts)
        write_indexed(buffers[1], each, shared)
        assert torch.equal(*buffers)


def test_layer_kinds_without_exact_roll_back_are_refused():
    config = SLIDING | {"layer_types": ["full_attention"] * 4, "use_sliding_window": False}
    trunk = Trunk.from_config(config)
    trunk.layer_types = [LayerType("full_attention"), LayerType("compressed_sparse_attention")] * 2
    with pytest.raises(RollbackError, match="cannot be rolled back exactly"):
        trunk.cache(1)
