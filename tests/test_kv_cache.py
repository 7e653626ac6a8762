"""Caches, also of all draft chains at once: what is committed is as if never provisional, per sequence."""

import pytest
import torch
from quick import REPRESENTATIVES, families, loop
from tiny import BUILDS, CONFIGS, build
from transformers.cache_utils import DynamicCache

from nextn.cache.attention_layer import AttentionLayer, Starts, write_each, write_indexed
from nextn.cache.kv_cache import CACHE_ARGUMENT, KVCache
from nextn.cache.rollout_cache import chain_mask
from nextn.errors import ConfigError, RollbackError
from nextn.model.layer_types import LayerType
from nextn.model.trunk import Trunk
from nextn.runtime.torch_backend import TorchHead

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


def slow(head, tokens, hidden, depths):
    """The slow twin: for each column, caches filled up to it, then the recursion over the text's own tokens."""
    length, modules = tokens.shape[1], head.num_modules
    outs = [[] for _ in range(depths)]
    for column in range(length - depths):
        cache, states = None, hidden[:, : column + 1]
        for depth in range(1, min(depths, modules) + 1):
            cache = head.cache(len(tokens))
            step = head.step(depth - 1, tokens[:, depth : column + 1 + depth], states, cache=cache)
            cache.commit([column + 1] * len(tokens))
            states = step.next_hidden if head.uses_next_hidden(depth + 1) else states
            outs[depth - 1].append(head.logits(depth - 1, step.final_hidden[:, -1]))
        if depths > modules:
            chain = TorchHead(head).recursion(cache, step.next_hidden[:, -1])
            for depth in range(modules + 1, depths + 1):
                outs[depth - 1].append(chain.step(tokens[:, column + depth].tolist()).logits)
    return torch.stack([torch.stack(each, dim=1) for each in outs], dim=2)


def rollout(head, tokens, hidden, depths, documents=None):
    columns = tokens.shape[1] - depths
    states = head.rollout_hidden(tokens, hidden, depths, documents=documents)
    logits = [head.logits(head.layer_index(depth), state[:, :columns]) for depth, state in enumerate(states, start=1)]
    return torch.stack(logits, dim=2)


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "modules"), families(BUILDS))
def test_equals_the_decoders_caches(name, modules):
    """Every depth of every chain: fp32, 1e-4; a head that keeps more than keys refuses."""
    head = build(name, modules=modules).head
    tokens, hidden = torch.randint(0, 64, (2, 11)), torch.randn(2, 11, *head.trunk.hidden_shape)
    if not head.can_rollout:
        with pytest.raises(ConfigError, match="cannot compute rollouts"):
            head.rollout_hidden(tokens, hidden, 2)
        return
    with torch.no_grad():
        fast = rollout(head, tokens, hidden, modules + 3)
        torch.testing.assert_close(fast, slow(head, tokens, hidden, modules + 3), atol=1e-4, rtol=1e-4)


@pytest.mark.more
def test_most_families_unroll():
    """The refusal is for heads with state of other kinds, not the common case."""
    assert sum(build(name, modules=modules).head.can_rollout for name, modules in BUILDS) > len(BUILDS) / 2


def test_own_keys_are_something_else():
    """Beyond the last MTP layer `teacher_forced_hidden` attends to other positions than decoding and rollouts do."""
    head = build("glm4_moe", modules=1).head
    tokens, hidden = torch.randint(0, 64, (1, 9)), torch.randn(1, 9, *head.trunk.hidden_shape)
    with torch.no_grad():
        own, chain = head.teacher_forced_hidden(tokens, hidden, 3), head.rollout_hidden(tokens, hidden, 3)
    torch.testing.assert_close(own[0], chain[0], atol=1e-5, rtol=1e-5)
    assert (own[1] - chain[1]).abs().max() > 1e-3


def test_documents_stay_apart():
    """Two documents in a row give what each gives alone, where the tokens of a chain are of one document."""
    head = build("glm4_moe", modules=1).head
    tokens, hidden = torch.randint(0, 64, (1, 16)), torch.randn(1, 16, *head.trunk.hidden_shape)
    documents = torch.tensor([[0] * 7 + [1] * 9])
    with torch.no_grad():
        joint = rollout(head, tokens, hidden, 3, documents)
        first, second = (rollout(head, tokens[:, part], hidden[:, part], 3) for part in (slice(0, 7), slice(7, 16)))
    torch.testing.assert_close(joint[:, :4], first, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(joint[:, 7:], second, atol=1e-5, rtol=1e-5)


def test_gradient_reaches_the_keys_of_all_depths():
    """The loss of depth 3 alone moves the hidden states of older columns, through the keys of depth 1."""
    head = build("glm4_moe", modules=1).head
    tokens, hidden = torch.randint(0, 64, (1, 9)), torch.randn(1, 9, *head.trunk.hidden_shape, requires_grad=True)
    head.rollout_hidden(tokens, hidden, 3)[-1][:, -1].sum().backward()
    assert (hidden.grad[0, :6].abs().amax(-1) > 0).all()
    assert not hidden.grad[0, 6:].any()


def test_mask_of_a_window():
    """Depth 3 of chains over 6 columns, 3 visible: the chain's own columns count against the window."""
    mask = chain_mask(6, 1, 3, window=3)[0, 0]
    assert mask.shape == (3, 5 + 4 + 3)
    # Chain 2 is at position 4 and sees 2, 3, 4: column 2 of depth 1, then its own depths 2 and 3.
    assert mask[2].nonzero()[:, 0].tolist() == [2, 5 + 2, 9 + 2]
    assert chain_mask(6, 1, 3)[0, 0, 2].nonzero()[:, 0].tolist() == [0, 1, 2, 7, 11]
