"""Depths beyond the last MTP layer that read the keys of its first run, as in Megatron-LM#6472, and store none."""

from dataclasses import replace

import pytest
import torch
from tiny import build, decode, prompt

from nextn.decoding.drafter import Drafter
from nextn.errors import ConfigError
from nextn.evaluate.conventions import apply_variants, variants
from nextn.runtime.backend import make_backend
from nextn.settings import Contract

NAMES = ("glm4_moe", "deepseek_v3", "qwen3_5", "mellum")  # plain keys, latent ones, a recurrent trunk, a window


def with_shared_keys(model):
    family = replace(model.family, repeated_kv="first")
    model.head.set_family(family)
    return replace(model, family=family)


@pytest.mark.more
@pytest.mark.parametrize("name", NAMES)
def test_decoding_drafts_what_all_chains_at_once_compute(name):
    """The decoder's frozen cache against masks over all positions, for sequences of two lengths in one batch."""
    model, seen = with_shared_keys(build(name, vocab_size=64)), []

    class Watched(Drafter):
        def draft(self, plan, limits, tokens, *args, **options):
            result = super().draft(plan, limits, tokens, *args, **options)
            seen.extend((list(row), drafts) for row, drafts in zip(tokens, result.drafts, strict=True) if drafts)
            return result

    prompts = [prompt(5, seed=1), prompt(18, seed=2)]
    plain, _ = decode(model, prompts, max_tokens=10)
    assert decode(model, prompts, max_tokens=10, num_speculative_tokens=4, make_drafter=Watched)[0] == plain
    for tokens, drafts in seen[:: max(1, len(seen) // 6)]:
        text = torch.tensor([[*tokens, *drafts]])
        with torch.no_grad():
            states = model.head.rollout_hidden(text, model.trunk(text).head_input, len(drafts))
        start = len(tokens) - 2
        logits = [model.head.logits(model.head.layer_index(k + 1), each[0, start]) for k, each in enumerate(states)]
        assert [int(each.argmax()) for each in logits] == drafts


def test_it_concerns_repeated_depths_alone_and_has_gradients():
    model = build("glm4_moe", vocab_size=64)
    text = torch.tensor([prompt(20, seed=3)])
    hidden = model.trunk(text).head_input.detach()
    own = model.head.rollout_hidden(text, hidden, 3)
    (variant,) = [each for each in variants(model, Contract()) if each.key == "repeated-kv"]
    faulty, _ = apply_variants(model, Contract(), [variant])
    first = faulty.head.rollout_hidden(text, hidden, 3)
    assert torch.equal(own[0], first[0])
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(own[1:], first[1:], strict=True))
    forced = faulty.head.teacher_forced_hidden(text, hidden, 3)
    assert all(torch.equal(a, b) for a, b in zip(forced, first, strict=True))
    forced[2].sum().backward()
    assert all(value.grad is not None for name, value in faulty.head.named_parameters() if "k_proj" in name)


def test_native_refuses():
    model = with_shared_keys(build("glm4_moe", vocab_size=64))
    with pytest.raises(ConfigError, match="repeated depths"):
        make_backend(model.trunk, model.head, name="native")


def test_indexed_keys_stay_as_they_are():
    """GLM-5.2's indexer: a repeated depth selects among the first run's keys, and changes neither these nor its own."""
    model = with_shared_keys(build("glm_moe_dsa", vocab_size=64))
    text = torch.tensor([prompt(24, seed=4)])
    with torch.no_grad():
        cache, hidden = model.head.cache(1), model.trunk(text).head_input
        step = model.head.step(0, text[:, 1:], hidden[:, :-1], cache=cache)
        cache.commit([23])
        before = [buffer.clone() for layer in cache.layers for buffer in layer.buffers]
        model.head.repeat(0, text[:, :1], step.next_hidden[:, -1:], cache=cache)
        cache.commit([1])
    assert cache.lengths == [23]
    assert len(before) == 3
    after = [buffer for layer in cache.layers for buffer in layer.buffers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    plain, _ = decode(model, text.tolist(), max_tokens=8)
    assert decode(model, text.tolist(), max_tokens=8, num_speculative_tokens=3)[0] == plain
