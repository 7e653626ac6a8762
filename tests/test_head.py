"""The head alone: shapes, causality, chaining, sharing, a slow twin; depths that read the keys of the first run."""

import copy
from dataclasses import replace

import pytest
import torch
from quick import families, loop
from tiny import BUILDS, CONFIGS, build, decode, prompt

from nextn.decoding.drafter import Drafter
from nextn.errors import ConfigError
from nextn.evaluate.conventions import apply_variants, variants
from nextn.model.standalone_head import StandaloneHead
from nextn.runtime.backend import make_backend
from nextn.settings import Contract


def slow(head, tokens, hidden, depths):
    """The slow twin of `Head.forward`: every column on its own prefix, one depth after the other."""
    columns = tokens.shape[1] - depths
    out = []
    for column in range(columns):
        states, logits = hidden[:, : column + 1], []
        for depth in range(1, depths + 1):
            step = head.step(head.layer_index(depth), tokens[:, depth : column + 1 + depth], states)
            logits.append(head.logits(head.layer_index(depth), step.final_hidden[:, -1]))
            states = step.next_hidden if head.uses_next_hidden(depth + 1) else states
        out.append(torch.stack(logits, dim=1))
    return torch.stack(out, dim=1)


@pytest.mark.parametrize(("name", "modules"), families(BUILDS))
def test_fast_equals_slow(name, modules):
    """All columns at once give what each column gives alone: fp32, 1e-4."""
    model = build(name, modules=modules)
    tokens, hidden = torch.randint(0, 64, (2, 11)), torch.randn(2, 11, *model.trunk.hidden_shape)
    with torch.no_grad():
        fast = model.head(tokens, hidden, depths=3)
        assert fast.shape == (2, 8, 3, 64)
        torch.testing.assert_close(fast, slow(model.head, tokens, hidden, 3), atol=1e-4, rtol=1e-4)


def test_depths_beyond_the_last_layer_reuse_it():
    assert [build("glm4_moe", modules=2).head.layer_index(depth) for depth in (1, 2, 3, 4)] == [0, 1, 1, 1]


def test_standalone_contract():
    """[B, T-D, D, V] from token ids, with hidden states or its own embeddings; the output head is the embedding."""
    head = StandaloneHead(100, 32, num_modules=3, num_heads=2)
    tokens = torch.randint(0, 100, (2, 20))
    assert head(tokens).shape == (2, 17, 3, 100)
    assert head(tokens, torch.randn(2, 20, 32)).shape == (2, 17, 3, 100)
    assert head(tokens, depths=5).shape == (2, 15, 5, 100)
    assert head.trunk.output.weight is head.embedding.weight
    assert sum(value is head.embedding.weight for value in head.parameters()) == 1
    head(tokens).sum().backward()
    assert all(value.grad is not None for value in head.parameters())


def test_no_position_sees_its_future():
    """Changing token j leaves every logit that must not know it bit-equal: depth k at column i eats up to i + k."""
    head = StandaloneHead(50, 16, num_modules=2, num_heads=2)
    tokens = torch.randint(0, 50, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    hidden = torch.randn(1, 12, 16)
    with torch.no_grad():
        before, after = head(tokens, hidden), head(changed, hidden)
    for depth in (1, 2):
        first = 7 - depth
        assert torch.equal(before[:, :first, depth - 1], after[:, :first, depth - 1])
        assert not torch.equal(before[:, first:, depth - 1], after[:, first:, depth - 1])


@pytest.mark.parametrize("sizes", [{"num_heads": 0}, {"hidden_size": 60}, {"hidden_size": 66}, {"hidden_size": 0}])
def test_sizes_of_a_standalone_head(sizes):
    with pytest.raises(ConfigError, match="expected hidden_size to be an even multiple of num_heads"):
        StandaloneHead(**{"vocab_size": 50, "hidden_size": 64} | sizes)


@pytest.mark.more
@loop("name", CONFIGS)
def test_documents_do_not_mix(name):
    """A packed row gives each document the states it gets alone, in the columns whose label is in the document."""
    model = build(name)
    first, second = torch.randint(0, 64, (1, 7)), torch.randint(0, 64, (1, 9))
    tokens = torch.cat([first, second], 1)
    documents = torch.tensor([[0] * 7 + [1] * 9])
    if not model.trunk.can_pack:  # state runs on from document to document: said, not done wrong
        with pytest.raises(ConfigError):
            model.trunk(tokens, documents=documents)
        return
    with torch.no_grad():
        hidden = model.trunk(tokens, documents=documents).head_input
        packed = model.head.teacher_forced_hidden(tokens, hidden, 3, documents=documents)
        for start, part in ((0, first), (7, second)):
            alone = model.head.teacher_forced_hidden(part, model.trunk(part).head_input, 3)
            for depth in range(1, 4):
                columns = part.shape[1] - depth - 1
                got = packed[depth - 1][:, start : start + columns]
                torch.testing.assert_close(got, alone[depth - 1][:, :columns], atol=1e-5, rtol=1e-4)


def test_the_head_owns_no_shared_tensor():
    """Embedding and output head are the trunk's: they are not saved, counted or trained twice."""
    model = build("deepseek_v3")
    shared = {id(value) for value in model.trunk.parameters()}
    assert not [name for name, value in model.head.named_parameters() if id(value) in shared]


def test_what_is_stored_once_is_one():
    """EXAONE-4.5's modules share norms and projection: two copies would drift apart in training and one be lost."""
    head = copy.deepcopy(build("exaone4_5", modules=2).head)
    first, second = head.stack
    assert second.projection is first.projection
    assert second.final_norm is first.final_norm
    assert second.block is not first.block
    assert not [name for name in head.state_dict() if name.startswith("stack.1.") and ".block." not in name]


@pytest.mark.parametrize(("name", "chains"), [("mimo_v2", False), ("step3p5", True)])
def test_order_of_modules(name, chains):
    """Whether depth 2 depends on module 0: fed the other way, it trains and decodes, at a worse acceptance."""
    head = build(name, modules=3).head
    tokens, hidden = torch.randint(0, 64, (1, 9)), torch.randn(1, 9, 32)
    with torch.no_grad():
        before = head(tokens, hidden, depths=4)
        head.stack[0].projection.weight.mul_(-1)
        after = head(tokens, hidden, depths=4)
        assert not torch.equal(before[:, :, 0], after[:, :, 0])
        assert torch.equal(before[:, :, 1:], after[:, :, 1:]) != chains
        head.stack[2].projection.weight.mul_(-1)
        assert not torch.equal(head(tokens, hidden, depths=4)[:, :, 3], after[:, :, 3]), "depth 4 chains on module 2"


@pytest.mark.parametrize(
    ("name", "own"),
    [("glm4_moe", set()), ("step3p5", {"output"}), ("dots3_note", {"embedding"}), ("cohere2_moe", set())],
)
def test_own_embedding_and_output(name, own):
    """The head's own are used where the family has them, the trunk's elsewhere: an engine that mixes them up drafts
    from weights that were trained for something else."""
    model = build(name, tie_word_embeddings=False)
    tokens, hidden = torch.randint(0, 64, (1, 9)), torch.randn(1, 9, 32)
    with torch.no_grad():
        for role in ("embedding", "output"):
            before = model.head(tokens, hidden)
            getattr(model.trunk, role).weight.mul_(-1)
            assert torch.equal(model.head(tokens, hidden), before) == (role in own)


def test_logits_are_scaled_as_the_trunks_are():
    """Cohere2-MoE: the scale leaves greedy drafts as they are, but changes their distribution and the loss."""
    tokens, hidden = torch.randint(0, 64, (1, 9)), torch.randn(1, 9, 32)
    with torch.no_grad():
        scaled, plain = (build("cohere2_moe", logit_scale=each).head(tokens, hidden) for each in (0.25, 1.0))
        torch.testing.assert_close(scaled, plain * 0.25)


def test_no_final_norm_and_a_bias():
    """ERNIE-4.5: the block's raw state is read and recycled; the projection has a bias where the config says so."""
    head = build("ernie4_5_moe").head
    with torch.no_grad():
        step = head.step(0, torch.randint(0, 64, (1, 9)), torch.randn(1, 9, 32))
    assert torch.equal(step.final_hidden, step.next_hidden)
    assert head.stack[0].projection.bias is not None
    assert build("ernie4_5_moe", use_bias=False).head.stack[0].projection.bias is None


@pytest.mark.parametrize("depths", [0, 11])
def test_depths_out_of_range(depths):
    with pytest.raises(ConfigError, match="depths = "):
        build("glm4_moe").head(torch.zeros(1, 11, dtype=torch.long), depths=depths)


def test_a_head_has_modules():
    with pytest.raises(ConfigError, match="num_modules = 0"):
        build("glm4_moe", modules=0)


def test_position_zero_rule():
    """A family that zeroes the first embedding changes column 0 and what sees it, nothing by accident."""
    from dataclasses import replace

    model = build("glm4_moe")
    tokens, hidden = torch.randint(0, 64, (1, 9)), torch.randn(1, 9, 32)
    with torch.no_grad():
        kept = model.head(tokens, hidden, depths=1)
        for module in model.head.stack:
            module.family = replace(model.family, position0="zero")
        zeroed = model.head(tokens, hidden, depths=1)
        tokens[0, 1] = (tokens[0, 1] + 1) % 64
        assert not torch.equal(kept, zeroed)
        assert torch.equal(model.head(tokens, hidden, depths=1), zeroed), "the first pair's token must not matter"


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
