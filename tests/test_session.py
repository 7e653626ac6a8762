"""The native backend against torch: states, texts and drafts of every family that can be recorded."""

import copy
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from quick import case, families, loop, others_slow
from replays import fast_of
from tiny import CONFIGS, FIXTURES, MOST, build, decode, prompt, refrain

from nextn.decoding.rounds import rounds
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.runtime.native.program import Replay
from nextn.runtime.native.trace import Untraceable
from nextn.runtime.torch_backend import TorchHead, TorchTrunk
from nextn.settings import Settings
from nextn.speculative.draft_policy import AdaptiveLength, FixedLength
from nextn.stats.acceptance import Acceptance
from nextn.stats.speedup import Costs, Spread

RECORDED = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe",
    "hy_v3",
    "exaone_moe",
    "mellum",
    "cohere2_moe",
    "glm_ocr",
    "exaone4_5",
    "mimo_v2",
    "ernie4_5_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)
# Those that only the torch backend decodes, and why.
PLAIN = {
    "deepseek_v4": "type compressed_sparse_attention",
    "bailing_hybrid": "not the gated delta rule",
    "deepseek_v32": "type indexed_attention",
    "glm_moe_dsa": "type indexed_attention",
    "hy_v4": "type indexed_attention",
    "glm5_next": "type indexed_attention",
    "qwen4_exp": "type linear_attention",
    "step3p5": "depends on the values",
    "minimax_m3": "type minimax_m3_sparse",
    "longcat_flash": "depends on the values",
    "inkling": "type hybrid_sliding",
    "nemotron_h": "delta rule",
    "dots3_note": "type indexed_attention",
}
TRAINED = ("glm", "glm_one", "glm_two", "qwen")
NEAR = {"rtol": 1e-5, "atol": 1e-5}
# Rounding of fp32 in these tiny recurrent trunks: either backend, and a rule in steps, is up to 3e-4 off fp64.
ROUGH = {"rtol": 1e-3, "atol": 1e-3}
LENGTHS = (3, 17, 40)
COSTS = Costs(1, 40, tuple(Spread.of([1 + 0.05 * more]) for more in range(6)), Spread.of([0.05]))


def test_every_family_is_listed():
    assert sorted([*RECORDED, *PLAIN]) == sorted(CONFIGS)


@pytest.mark.more
@loop("name", PLAIN)
def test_what_cannot_be_recorded_says_why(name):
    with pytest.raises(Untraceable, match=PLAIN[name]):
        fast_of(build(name)).trunk.cache(1)


@pytest.fixture(scope="module", params=families(RECORDED))
def pair(request) -> tuple[Model, SimpleNamespace]:
    """A model on both backends."""
    model = build(request.param, modules=MOST[request.param])
    return model, fast_of(model)


@pytest.mark.more
@torch.inference_mode()
def test_states_and_logits(pair):
    """Blocks with and without padding, after blocks of which a part was rolled back."""
    model, fast = pair
    torch_trunk, torch_head = TorchTrunk(model.trunk), TorchHead(model.head)
    caches, head_caches = (
        [each.cache(2) for each in paths] for paths in ((torch_trunk, fast.trunk), (torch_head, fast.head))
    )
    near = ROUGH if any(kind.is_recurrent for kind in model.trunk.layer_types) else NEAR
    for width in (9, 1, 3, 1):
        tokens = torch.tensor([prompt(width, seed=width), prompt(width, seed=width + 1)])
        hidden = [trunk(tokens, cache) for trunk, cache in zip((torch_trunk, fast.trunk), caches, strict=True)]
        torch.testing.assert_close(hidden[1].final_hidden, hidden[0].final_hidden, **near)
        torch.testing.assert_close(hidden[1].head_input, hidden[0].head_input, **near)
        logits = [
            trunk.predict(each.final_hidden) for trunk, each in zip((torch_trunk, fast.trunk), hidden, strict=True)
        ]
        compare(logits, near)
        head_input = hidden[0].head_input.clone()
        steps = [
            head.step(0, tokens, head_input, cache=cache)
            for head, cache in zip((torch_head, fast.head), head_caches, strict=True)
        ]
        torch.testing.assert_close(steps[1].final_hidden, steps[0].final_hidden, **NEAR)
        torch.testing.assert_close(steps[1].next_hidden, steps[0].next_hidden, **NEAR)
        compare(
            [head.predict(0, each.final_hidden) for head, each in zip((torch_head, fast.head), steps, strict=True)],
            near,
        )
        for cache in (*caches, *head_caches):
            cache.commit([width, (width + 1) // 2])


def compare(predictions, near=NEAR) -> None:
    plain, fast = predictions
    torch.testing.assert_close(fast.logits, plain.logits, **near)
    assert fast.best == plain.best
    torch.testing.assert_close(torch.tensor(fast.confidence), torch.tensor(plain.confidence), **near)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("k", "lengths"),
    [case(k, each, quick=(k, each) in ((0, (17,)), (3, LENGTHS))) for k in (0, 3) for each in ((17,), LENGTHS)],
    ids=str,
)
def test_texts_and_drafts(pair, lengths, k):
    """Also what is drafted, which the text does not show; rows end at different times and leave."""
    model, fast = pair
    prompts = [prompt(length, seed=length) for length in lengths]
    texts, log = decode(fast, prompts, num_speculative_tokens=k, max_tokens=10)
    plain, other = decode(model, prompts, num_speculative_tokens=k, max_tokens=10)
    assert texts == plain
    assert [each.rows for each in log] == [each.rows for each in other]


@pytest.mark.more
@pytest.mark.parametrize("name", families(RECORDED))
def test_bf16_rounds_say_what_plain_steps_say(name):
    """A position's bits do not depend on the block size, so near-ties are decided the same way."""
    model = build(name, modules=MOST[name])
    for part in (model.trunk, model.head):
        part.to(torch.bfloat16)
    fast = fast_of(model)
    start = [prompt(21)]
    assert (
        decode(fast, start, num_speculative_tokens=3, max_tokens=24)[0]
        == decode(fast, start, num_speculative_tokens=0, max_tokens=24)[0]
    )


@pytest.mark.more
@pytest.mark.parametrize("name", others_slow(TRAINED, "glm_two", "qwen"))
def test_acceptance_of_trained_heads(name, trained):
    model = trained[name]
    prompts = refrain(6, 40, seed=9).tolist()
    fast, plain = (decode(each, prompts, num_speculative_tokens=3, max_tokens=32) for each in (fast_of(model), model))
    assert fast[0] == plain[0]
    assert Acceptance.of(fast[1]) == Acceptance.of(plain[1])
    assert Acceptance.of(fast[1]).length > 1.5


@pytest.mark.more
@pytest.mark.parametrize("name", others_slow(TRAINED, "glm_one", "qwen"))
def test_trained_bf16_rounds_say_what_plain_steps_say(name):
    fast = fast_of(Model.load(FIXTURES / name, dtype=torch.bfloat16))
    start = refrain(1, 40, seed=9).tolist()
    texts, log = decode(fast, start, num_speculative_tokens=3, max_tokens=32)
    assert texts == decode(fast, start, num_speculative_tokens=0, max_tokens=32)[0]
    assert Acceptance.of(log).length > 1.5


@pytest.mark.more
def test_blocks_larger_than_the_largest_recording():
    """Run in pieces of 128 positions: states, and the drafts that they lead to."""
    model = build("glm4_moe")
    fast = fast_of(model)
    with torch.inference_mode():
        tokens = torch.tensor([prompt(300, seed=seed) for seed in (1, 2)])
        plain, found = model.trunk(tokens, model.trunk.cache(2)), fast.trunk(tokens, fast.trunk.cache(2))
        torch.testing.assert_close(found.head_input, plain.head_input, **NEAR)
    prompts = [prompt(length, seed=length) for length in (150, 290)]
    (texts, log), (wanted, other) = (
        decode(each, prompts, num_speculative_tokens=3, max_tokens=6) for each in (fast, model)
    )
    assert texts == wanted
    assert [each.rows for each in log] == [each.rows for each in other]


def test_a_chain_can_be_led_elsewhere():
    """A recursion feeds itself its argmax tokens, and takes others if the caller sampled others."""
    model = build("glm4_moe")
    fast = fast_of(copy.copy(model))
    state = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        chains = [head.recursion(head.cache(2), state) for head in (TorchHead(model.head), fast.head)]
        best = [5, 9]
        for drawn in (None, None, [7, 1], None, None):
            guesses = [chain.step(drawn or best) for chain in chains]
            compare(guesses)
            best = guesses[0].best


@pytest.mark.more
def test_a_chain_longer_than_the_buffers():
    """Buffers that grow in the middle of a chain: the next draft step must not write to the old ones."""
    model = build("glm4_moe")
    fast = backend_for(model, "native")
    settings = Settings(num_speculative_tokens=100, max_tokens=104)
    first = [
        [each.rows for each in islice(rounds(trunk, head, [prompt(200)], settings), 4)]
        for trunk, head in ((model.trunk, model.head), (fast.trunk, fast.head))
    ]
    assert len(first[0][1][0].drafts) == 100
    assert first[0] == first[1]


@pytest.mark.more
@pytest.mark.parametrize(
    ("length", "modules"),
    [
        case(FixedLength(5), 1, quick=False),
        (FixedLength(5), 2),
        case(FixedLength(5, 0.3), 1, quick=False),
        (AdaptiveLength(COSTS), 1),
    ],
)
def test_no_round_waits_for_a_recording(length, modules, monkeypatch):
    """All sizes are recorded once the prompt is processed, also the smaller ones of the last rounds."""
    model = fast_of(build("glm4_moe", modules=modules))
    made, recorded = [], Replay.of.__func__

    def noted(cls, *args, **options):
        made.append(1)
        return recorded(cls, *args, **options)

    monkeypatch.setattr(Replay, "of", classmethod(noted))
    stream = rounds(
        model.trunk, model.head, [prompt(40)], Settings(num_speculative_tokens=5, max_tokens=30), length=length
    )
    next(stream)
    before = len(made)
    log = list(stream)
    assert before
    assert len(made) == before
    assert len({len(part.drafts) for each in log for part in each.rows}) > 1


@pytest.mark.more
def test_a_block_runs_on_an_existing_replay():
    """A small block on a larger one's replay, but not on one for prompts."""
    trunk = fast_of(build("glm4_moe")).trunk
    trunk.prepare(1, [6], exact=True)
    size = lambda width: trunk._passes.replay(1, width)[0].tokens.shape[1]  # noqa: E731
    assert [size(width) for width in (1, 2, 6, 30, 40)] == [6, 6, 6, 32, 64]
    trunk.prepare(1, [1, 4], exact=True)
    assert [size(width) for width in (1, 2, 4, 5, 7)] == [1, 4, 4, 6, 7]
    trunk.prepare(1, [4, 8], exact=False)
    assert [size(width) for width in (4, 5, 7, 8)] == [4, 5, 7, 9]


def test_blocks_of_many_sequences_are_hardly_padded():
    """Padding costs there: a block of one draft for 8 sequences would take as long as one of four drafts."""
    trunk = fast_of(build("glm4_moe")).trunk
    trunk.prepare(8, [5], exact=True)
    assert [trunk._passes.replay(8, width)[0].tokens.shape[1] for width in (1, 2, 3, 4, 5)] == [1, 2, 3, 5, 5]


def test_sizes_share_their_memory():
    """Intermediate tensors, and weights that are computed as the model runs: a router's in float32."""
    model = build("glm4_moe")
    for part in (model.trunk, model.head):
        part.to(torch.bfloat16)
    trunk = fast_of(model).trunk
    passes, packed = trunk._passes, []
    for width in (1, 5, 3):
        passes.replay(1, width)
        packed.append(len(passes._weights._by_address))
    assert len({replay.outputs[0].untyped_storage().data_ptr() for _, replay in passes._replays.values()}) == 1
    assert packed[0] == packed[2] > 0
