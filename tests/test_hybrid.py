"""Trunks with gated delta rules on the native backend: the torch backend's tokens and drafts; bf16 against itself."""

from functools import cache

import pytest
import torch
from quick import families, others_slow
from replays import fast_of
from test_rounds_decode import oracle
from tiny import build, decode, prompt

from nextn.errors import RollbackError
from nextn.runtime.native.trace_hooks import MAX_RECURRENT_BLOCK

NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
# Shorter than the convolution's history, ends inside the first block, at its end, inside the third.
LENGTHS = (2, 17, MAX_RECURRENT_BLOCK, 2 * MAX_RECURRENT_BLOCK + 9)


@pytest.fixture(scope="module", params=families(NAMES))
def name(request):
    return request.param


@cache
def plain(name):
    return build(name)


@cache
def fast(name, dtype=torch.float32):
    model = build(name)
    for part in (model.trunk, model.head):
        part.to(dtype)
    return fast_of(model)


def drafted(log):
    return [[(part.row, part.drafts, part.num_accepted) for part in each.rows] for each in log]


@pytest.mark.more
@pytest.mark.parametrize("lengths", [LENGTHS[3:], LENGTHS[:1], (9, 2 * MAX_RECURRENT_BLOCK + 9, 17)], ids=str)
@pytest.mark.parametrize("k", others_slow([0, 1, 3, 6], 0, 3))
def test_rounds_equal_plain_rounds(name, lengths, k):
    """Token for token and draft for draft: catches a state, history or count of another sequence or block."""
    prompts = [prompt(length, seed=length) for length in lengths]
    texts, log = decode(fast(name), prompts, num_speculative_tokens=k, max_tokens=20)
    expected, plain_log = decode(plain(name), prompts, num_speculative_tokens=k, max_tokens=20)
    assert texts == expected
    assert drafted(log) == drafted(plain_log)


@pytest.mark.more
@pytest.mark.parametrize("kept", others_slow(range(6), 0, 3, 5))
def test_rejection_at_every_position(name, kept):
    """Each round accepts exactly `kept` of 5 drafts: the state after every position of a block is right."""
    text = decode(plain(name), [prompt(17, seed=17)], num_speculative_tokens=0, max_tokens=20)[0]
    drafter = oracle(text, right=[kept])
    found, log = decode(
        fast(name), [prompt(17, seed=17)], num_speculative_tokens=5, max_tokens=20, make_drafter=drafter
    )
    assert found == text
    parts = [part for each in log for part in each.rows if len(part.drafts) == 5]
    assert parts
    assert all(part.num_accepted == kept for part in parts)


@pytest.mark.more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", others_slow([1, 3, 6], 3))
def test_drafts_never_change_the_text(name, dtype, k):
    """Ragged rows keep different counts, also 0 and all; and no token's arithmetic depends on the window's size: with
    drafts or without, in bf16, too, the text is the same."""
    model, prompts = fast(name, dtype), [prompt(length, seed=length) for length in LENGTHS]
    texts = [decode(model, [each], num_speculative_tokens=0, max_tokens=24)[0][0] for each in prompts]
    assert decode(model, prompts, num_speculative_tokens=k, max_tokens=24)[0] == texts
    drafter = oracle(texts, right=[k, 0, 1, k - 1, 2])
    found, log = decode(model, prompts, num_speculative_tokens=k, max_tokens=24, chunk=13, make_drafter=drafter)
    assert found == texts
    assert {part.num_accepted for each in log for part in each.rows if part.drafts} >= {0, 1}


def states_after(trunk, tokens, windows):
    """The last final hidden states [B, H] after blocks of (positions run, positions that each sequence commits)."""
    cache, ends = trunk.cache(len(tokens)), []
    for width, counts in windows:
        rows = [row[start : start + width] for row, start in zip(tokens, cache.lengths, strict=True)]
        ends = trunk(torch.tensor(rows), cache).final_hidden.clone()
        cache.commit(counts)
    return ends[:, -1], cache


@pytest.mark.more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rejected_position_leaves_no_trace(name, dtype):
    """Bit for bit: a state after a rollback is that of the committed positions, in one block or one by one."""
    trunk, tokens = fast(name, dtype).trunk, [prompt(60, seed=seed) for seed in range(3)]
    put_back, _ = states_after(trunk, tokens, [(9, [5, 0, 9]), (MAX_RECURRENT_BLOCK, [4, 9, 0]), (7, [7] * 3)])
    for row, stand in enumerate((9, 9, 9)):
        alone, _ = states_after(trunk, [tokens[row]], [(1, [1])] * (stand + 7))
        assert torch.equal(put_back[row], alone[0])


def test_rows_leave_with_their_state(name):
    trunk, tokens = fast(name).trunk, [prompt(60, seed=seed) for seed in range(3)]
    with torch.inference_mode():
        _, cache = states_after(trunk, tokens, [(9, [9, 4, 7])])
        cache.select([2, 1])
        found = trunk(torch.tensor([tokens[2][7:12], tokens[1][4:9]]), cache).final_hidden.clone()
        for place, (row, length) in enumerate([(2, 7), (1, 4)]):
            alone, _ = states_after(trunk, [tokens[row]], [(length + 5, [0])])
            assert torch.equal(found[place, -1], alone[0])


def test_what_cannot_be_put_back_is_refused():
    trunk = fast("qwen3_5").trunk
    cache = trunk.cache(1)
    with pytest.raises(RollbackError, match=f"roll back at most {MAX_RECURRENT_BLOCK}"):
        trunk(torch.tensor([prompt(MAX_RECURRENT_BLOCK + 1)]), cache)
    trunk(torch.tensor([prompt(8)]), cache)
    cache.commit([8])
    cache.rollback_to([8])
    with pytest.raises(RollbackError, match="cannot be cropped"):
        cache.rollback_to([7])


@pytest.mark.more
def test_more_drafts_than_a_window_holds():
    """A round drafts as many as can be put back, not all that were asked for."""
    text = decode(plain("qwen3_5"), [prompt(9)], num_speculative_tokens=0, max_tokens=60)[0]
    found, log = decode(fast("qwen3_5"), [prompt(9)], num_speculative_tokens=50, max_tokens=60)
    assert found == text
    assert max(len(part.drafts) for each in log for part in each.rows) == MAX_RECURRENT_BLOCK - 1


@pytest.mark.more
def test_the_plain_path_is_whole_after_a_recording():
    """The replacements of transformers' functions are removed."""
    before = decode(plain("qwen3_5"), [prompt(9)], num_speculative_tokens=2, max_tokens=8)
    fast("qwen3_5").trunk.cache(1)
    after = decode(plain("qwen3_5"), [prompt(9)], num_speculative_tokens=2, max_tokens=8)
    assert before[0] == after[0]
