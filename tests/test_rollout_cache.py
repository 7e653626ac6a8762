"""Unrolled passes: the chains of all columns at once give what the decoder's own caches and recursion give."""

import pytest
import torch
from quick import families
from tiny import BUILDS, build

from nextn.cache.rollout_cache import chain_mask
from nextn.errors import ConfigError
from nextn.runtime.torch_backend import TorchHead


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
    # Chain 2 stands at position 4 and sees 2, 3, 4: column 2 of depth 1, then its own depths 2 and 3.
    assert mask[2].nonzero()[:, 0].tolist() == [2, 5 + 2, 9 + 2]
    assert chain_mask(6, 1, 3)[0, 0, 2].nonzero()[:, 0].tolist() == [0, 1, 2, 7, 11]
