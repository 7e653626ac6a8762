"""Captured passes against the plain path, replayed as a CUDA graph replays: the same operations on the same memory."""

import pytest
import torch
from replays import captured_of, taped
from tiny import CONFIGS, MOST, build, decode, prompt, refrain

from nextn.decode import Settings, rounds
from nextn.errors import ConfigError
from nextn.fast import choose
from nextn.fast.captured import CapturedHead, CapturedTrunk
from nextn.figures.acceptance import Acceptance
from nextn.policy import Fixed
from nextn.sampling import Sampling
from nextn.shortlist import Shortlist

CAPTURED = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "hy_v3",
    "exaone_moe",
    "mellum",
    "cohere2_moe",
    "deepseek_v32",
    "glm_moe_dsa",
    "hy_v4",
    "minimax_m3",
    "glm_ocr",
    "exaone4_5",
    "mimo_v2",
    "dots3_note",
    "ernie4_5_moe",
)
# Those that stay on the plain path, and why.
PLAIN = {
    "deepseek_v4": "kind compressed_sparse_attention",
    "qwen3_next": "kind linear_attention",
    "qwen3_5": "kind linear_attention",
    "qwen3_5_moe": "kind linear_attention",
    "bailing_hybrid": "kind linear_attention",
    "glm5_next": "kind linear_attention",
    "qwen4_exp": "kind linear_attention",
    "nemotron_h": "kind linear_attention",
    "inkling": "kind hybrid_sliding",
    "step3p5": "asks the device for numbers",  # experts of its own, in a loop
    "longcat_flash": "asks the device for numbers",
}
NEAR = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = (3, 17, 40)


def test_every_family_is_told():
    assert sorted([*CAPTURED, *PLAIN]) == sorted(CONFIGS)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Chosen as on a CUDA device, where a replay is a call."""
    monkeypatch.setattr(choose, "_native", choose._captured)


@pytest.mark.parametrize("name", PLAIN)
def test_what_cannot_be_captured_is_plain_and_says_why(name, as_on_cuda):
    model = build(name)
    made = model.engine()
    assert (made.path, made.trunk, made.head, made.runtime) == ("plain", model.trunk, model.head, "torch")
    assert PLAIN[name] in made.reason
    with pytest.raises(ConfigError, match=f"no fast path: .*{PLAIN[name]}"):
        model.engine("fast")


def test_chosen_where_it_can(as_on_cuda):
    model = build("glm4_moe")
    made = model.engine()
    assert (made.path, type(made.trunk), type(made.head)) == ("fast", CapturedTrunk, CapturedHead)
    assert made.runtime == "CUDA graphs"
    assert model.engine("plain").trunk is model.trunk


def test_a_pass_that_says_something_else_is_not_used(as_on_cuda, monkeypatch):
    right = CapturedTrunk._pass
    monkeypatch.setattr(CapturedTrunk, "_pass", lambda *args: [out.roll(1, -1) for out in right(*args)])
    assert "the trunk recorded says something else" in build("glm4_moe").engine().reason


@pytest.fixture(scope="module", params=CAPTURED)
def pair(request):
    """A model on both paths."""
    model = build(request.param, modules=MOST[request.param])
    return model, captured_of(model)


@torch.inference_mode()
def test_states_and_predictions(pair):
    """Rows of different lengths, windows that are padded and that are not, columns that are taken back."""
    model, fast = pair
    caches, head_caches = ([path.cache(3), other.cache(3)] for path, other in zip(*map(parts, pair), strict=True))
    for columns in (9, 1, 3, 1, 5):
        tokens = torch.tensor([prompt(columns, seed=columns + row) for row in range(3)])
        one, other = model.trunk(tokens, caches[0]), fast.trunk(tokens, caches[1])
        torch.testing.assert_close(other.normed, one.normed, **NEAR)
        torch.testing.assert_close(other.eaten, one.eaten, **NEAR)
        compare(model.trunk.read(one), fast.trunk.read(other))
        steps = [
            head.step(0, tokens, one.eaten, cache=cache) for head, cache in zip(heads(pair), head_caches, strict=True)
        ]
        torch.testing.assert_close(steps[1].recycled, steps[0].recycled, **NEAR)
        compare(*(head.predict(0, each.normed) for head, each in zip(heads(pair), steps, strict=True)))
        for cache in (*caches, *head_caches):
            cache.keep([columns, (columns + 1) // 2, 0 if columns == 3 else 1])


def parts(model):
    return model.trunk, model.head


def heads(pair):
    return pair[0].head, pair[1].head


def compare(plain, fast, near=NEAR) -> None:
    torch.testing.assert_close(fast.logits, plain.logits, **near)
    assert fast.best == plain.best
    torch.testing.assert_close(torch.tensor(fast.confidence), torch.tensor(plain.confidence), **near)


def same(model, fast, prompts, **settings):
    """Texts, drafts and what was kept, on both paths."""
    texts, log = decode(fast, prompts, **settings)
    plain, other = decode(model, prompts, **settings)
    assert texts == plain
    assert [each.rows for each in log] == [each.rows for each in other]
    return log


def test_texts_and_drafts(pair):
    """Rows that end at different times and leave; heads that chain on and that are asked each depth."""
    same(*pair, [prompt(length, seed=length) for length in LENGTHS], drafts=3, max_tokens=7)


@pytest.fixture(scope="module")
def glm():
    model = build("glm4_moe")
    return model, captured_of(model)


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("lengths", [(40, 3), (70, 5, 5, 9, 30)], ids=["two", "five"])
def test_batches(glm, lengths, drafts):
    same(*glm, [prompt(length, seed=length) for length in lengths], drafts=drafts, max_tokens=9)


@pytest.mark.parametrize(
    ("sampling", "how"),
    [
        (Sampling(1.0), {}),
        (Sampling(0.7, top_k=9, min_p=0.02), {"block": False}),
        (Sampling(1.0), {"sampled_drafts": False}),
        (Sampling(1.0, top_p=0.8), {}),  # off a GPU asks how many tokens to sort, which is not captured
        (Sampling(1.0, repetition_penalty=1.3), {}),
    ],
)
def test_sampling_takes_the_same_numbers(trained, sampling, how):
    model, prompts = trained["glm_one"], refrain(2, 30, seed=3).tolist()
    log = same(model, captured_of(model), prompts, drafts=3, max_tokens=14, sampling=sampling, **how)
    assert Acceptance.of(log).length > 1.2


@pytest.mark.parametrize("modules", [1, 3])
def test_drafts_that_end_where_the_head_is_unsure(modules):
    model = build("glm4_moe", modules=modules)
    fast, prompts = captured_of(model), [prompt(20), prompt(9)]
    logs = [
        [each.rows for each in rounds(*parts(path), prompts, Settings(drafts=5, max_tokens=12), length=Fixed(5, 0.12))]
        for path in (model, fast)
    ]
    assert logs[0] == logs[1]
    assert len({len(part.drafts) for rows in logs[0] for part in rows}) > 1


@torch.inference_mode()
@pytest.mark.parametrize("kept", range(6))
def test_every_place_to_roll_back_to(glm, kept):
    caches = [path.trunk.cache(2) for path in glm]
    for columns, counts in ((12, [12, 7]), (5, [kept, 5 - kept]), (3, [3, 3])):
        tokens = torch.tensor([prompt(columns, seed=kept), prompt(columns, seed=kept + 9)])
        one, other = (path.trunk(tokens, cache) for path, cache in zip(glm, caches, strict=True))
        torch.testing.assert_close(other.normed, one.normed, **NEAR)
        for cache in caches:
            cache.keep(counts)
    for cache in caches:
        cache.truncate([9, kept + 1])
    one, other = (path.trunk(tokens, cache) for path, cache in zip(glm, caches, strict=True))
    torch.testing.assert_close(other.normed, one.normed, **NEAR)


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("length", [59, 62, 64])
def test_caches_that_grow(length, modules):
    """In a prompt, in a verification, in the middle of a chain: what stands moves, and passes are captured anew."""
    model = build("glm4_moe", modules=modules)
    same(model, captured_of(model), [prompt(length), prompt(5)], drafts=4, max_tokens=12)


def test_a_chain_longer_than_the_cache():
    model = build("glm4_moe")
    settings = Settings(drafts=90, max_tokens=94)
    streams = [rounds(*parts(path), [prompt(50)], settings) for path in (model, captured_of(model))]
    for _ in range(3):
        plain, fast = map(next, streams)
        assert plain.rows == fast.rows


def test_a_chain_can_be_led_elsewhere(glm):
    """A recursion feeds itself its best tokens, takes others where the caller drew others, and outlasts a growth."""
    state = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        chains = [head.recursion(head.cache(3), state) for head in heads(glm)]
        best = [5, 9, 2]
        for step in range(70):
            guesses = [chain.step([7, 1, 1] if step in (3, 64) else best) for chain in chains]
            compare(*guesses, near={"rtol": 1e-3, "atol": 5e-4})  # each step adds its roundings
            best = guesses[0].best


def test_what_was_captured_serves_the_next_text():
    """Also one of other rows and with other random numbers; nothing is captured after the first round."""
    made = []
    model = build("glm4_moe")
    fast = captured_of(model, columns=256, record=lambda *run: made.append(1) or taped(*run))
    for sampling in (Sampling(), Sampling(1.0)):
        settings = Settings(drafts=3, max_tokens=14, sampling=sampling)
        stream = rounds(*parts(fast), [prompt(20), prompt(30)], settings)
        next(stream)
        before = len(made)
        list(stream)
        assert len(made) == before + (not sampling.greedy)  # the verdict over drafts
        before = len(made)
        list(rounds(*parts(fast), [prompt(25, seed=1), prompt(9, seed=2)], settings))
        assert len(made) == before


def test_texts_at_the_same_time_do_not_meet(glm):
    model, fast = glm
    starts = [prompt(12, seed=1)], [prompt(15, seed=2)]
    streams = [rounds(*parts(fast), start, Settings(drafts=3, max_tokens=10)) for start in starts]
    texts = [[], []]
    for each in zip(*streams, strict=False):
        assert not torch.is_inference_mode_enabled()
        for text, found in zip(texts, each, strict=True):
            text += found.rows[0].emitted
    for text, start in zip(texts, starts, strict=True):
        assert text == decode(model, start, drafts=3, max_tokens=10)[0][0][: len(text)]


def test_a_shortlist(glm):
    model = build("glm4_moe")
    model.head.shortlist = Shortlist(torch.arange(0, 64, 3), 64)
    log = same(model, captured_of(model), [prompt(12)], drafts=3, max_tokens=10)
    assert {draft % 3 for each in log for draft in each.rows[0].drafts} == {0}


@pytest.mark.parametrize("name", ["glm", "glm_one", "glm_two"])
def test_acceptance_of_trained_heads(name, trained):
    log = same(trained[name], captured_of(trained[name]), refrain(4, 40, seed=9).tolist(), drafts=3, max_tokens=24)
    assert Acceptance.of(log).length > 1.5
