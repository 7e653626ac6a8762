"""Teacher-forced chains against the decoder: greedy to the last count, sampled within what chance allows."""

import itertools
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from quick import each_once, families, most_of, others_slow
from tiny import BUILDS, MOST, build, prompt, refrain

from nextn.decoding.rounds import rounds
from nextn.errors import ConfigError
from nextn.evaluate import teacher_forced
from nextn.evaluate.teacher_forced import PERFECT, RULES, ReferenceText, score_texts, trunk_outputs
from nextn.model.trunk import TrunkOutput
from nextn.settings import Contract, Sampling, Settings
from nextn.stats.acceptance import Acceptance
from nextn.stats.intervals import paired_difference

PROMPTS = [row.tolist() for row in refrain(16, 33, seed=10**6)]
# Rules of sampled decoding -> the decoder's settings for each; it has none for `match`.
SETTINGS = {
    "ratio": {"block_verification": False},
    "block": {},
    "argmax": {"block_verification": False, "sampled_drafts": False},
}


def decoded(model, prompts, settings, **more):
    """Texts for scoring, and the rounds of each sequence."""
    new, logs, ends = [[] for _ in prompts], [[] for _ in prompts], {}
    for each in rounds(model.trunk, model.head, prompts, settings, **more):
        for part in each.rows:
            new[part.row] += part.emitted
            logs[part.row].append(part)
            ends[part.row] = part.finish
    texts = [
        ReferenceText(tuple(p), tuple(n), settings.sampling.temperature, ends[row] in ("eos", "context"))
        for row, (p, n) in enumerate(zip(prompts, new, strict=True))
    ]
    return texts, logs


def counts(logs, k):
    """(drafted, accepted) by depth of each sequence."""
    each = [Acceptance.of([type("R", (), {"rows": [part]}) for part in log]) for log in logs]
    pad = lambda values: [*values, *[0] * (k - len(values))]  # noqa: E731
    return [pad(row.num_drafted) for row in each], [pad(row.num_accepted) for row in each]


def walked(model, texts, k, rule, contract=None):
    found = list(score_texts(model, texts, trunk_outputs(model.trunk, texts), k, contract=contract))
    return [each.survivals[rule].round_counts(each.remaining, k) for each in found]


CONTRACTS = [Contract(), Contract(prefill=False), Contract(offset=-1), Contract(prefill=False, offset=-1)]


@pytest.mark.one_case
@pytest.mark.parametrize("k", others_slow([1, 3, 5], 3))
@pytest.mark.parametrize(("contract", "name"), each_once(CONTRACTS, ["glm_two", "qwen", "glm", "v4"]), ids=str)
def test_greedy_counts_are_the_decoders(name, k, contract, trained):
    """All drafted and accepted tokens of every text, with and without faults; some texts end early."""
    settings = Settings(num_speculative_tokens=k, max_tokens=28, contract=contract, eos=(7, 19))
    texts, logs = decoded(trained[name], PROMPTS[:8], settings)
    offered, accepted = counts(logs, k)
    assert any(text.ended for text in texts)
    assert any(not text.ended for text in texts)
    assert walked(trained[name], texts, k, "greedy", contract) == list(zip(offered, accepted, strict=True))


def test_context_ends_a_text_too():
    """The last round may draft less: the same counts where the context is full."""
    model = build("glm4_moe", max_position_embeddings=40)
    texts, logs = decoded(model, PROMPTS[:3], Settings(num_speculative_tokens=3, max_tokens=28))
    assert {len(text.tokens) for text in texts} == {40}
    offered, accepted = counts(logs, 3)
    assert walked(model, texts, 3, "greedy") == list(zip(offered, accepted, strict=True))


@pytest.mark.more
@pytest.mark.parametrize(("name", "rule"), each_once(["glm", "glm_two"], SETTINGS))
def test_sampled_counts_agree_with_the_decoders(name, rule, trained):
    """At a temperature at which some drafts are accepted: no paired difference beyond a 1 in 10,000 interval."""
    k, many = 3, [row.tolist() for row in refrain(48, 20, seed=5)]
    sampling = Sampling(4.0 if rule != "argmax" else 2.0 if name == "glm" else 1.3)
    settings = Settings(num_speculative_tokens=k, max_tokens=30, sampling=sampling, seed=3, **SETTINGS[rule])
    texts, logs = decoded(trained[name], many, settings)
    offered, accepted = counts(logs, k)
    found = walked(trained[name], texts, k, rule)
    survived = 1.0
    for depth in range(k):
        for ours, theirs in ((0, offered), (1, accepted)):
            gap = paired_difference(
                [each[ours][depth] for each in found],
                [each[depth] for each in theirs],
                [each[0] for each in offered],
                error=1e-4,
            )
            rare = 9 / sum(each[0] for each in offered)  # what no text happened to show has no spread
            assert gap.low - rare <= 0 <= gap.high + rare, (depth, ours, gap)
            assert gap.high - gap.low < 0.2
        survived *= sum(each[depth] for each in accepted) / sum(each[depth] for each in offered)
    assert 0.05 < survived < 0.9


def test_rules_by_enumeration(trained):
    """Every start, depths 1 and 2, against sums over all drafts of both depths, from the distributions themselves."""
    model = trained["glm"]
    text = ReferenceText(
        tuple(PROMPTS[0]), tuple(torch.randint(0, 40, (30,), generator=torch.manual_seed(1)).tolist()), 3.0
    )
    hidden = trunk_outputs(model.trunk, [text])
    (found,) = score_texts(model, [text], hidden, 2)
    with torch.no_grad():
        chains = model.head.rollout_hidden(torch.tensor([text.tokens]), hidden[0].head_input[None], 2)
        q1, q2 = ((model.head.logits(0, chain[0]).double() / 3).softmax(-1) for chain in chains)
        p = (model.trunk.logits(hidden[0].final_hidden).double() / 3).softmax(-1)
    low, seen = torch.minimum, set()
    for start in range(len(found.remaining) - 1):
        position, (x1, x2) = len(text.prompt) - 1 + start, text.new[start + 1 : start + 3]
        distributions = q1[position], q2[position], p[position + 1], p[position + 2]
        first, both = (
            distributions[0][x1] / distributions[2][x1],
            distributions[0][x1] / distributions[2][x1] * distributions[1] / distributions[3],
        )
        alone = low(first, torch.tensor(1.0))
        right = float(distributions[0].argmax() == x1)
        # depth 1 by the mean over its token; depth 2 given its token, and by the mean.
        wanted = {
            "ratio": (
                low(distributions[2], distributions[0]).sum(),
                alone * low(distributions[1] / distributions[3], p.new_ones(())),
            ),
            "block": (low(distributions[2], distributions[0]).sum(), low(alone, both)),
            "argmax": (
                distributions[2][distributions[0].argmax()],
                right * (torch.arange(48) == distributions[1].argmax()),
            ),
            "match": ((distributions[2] * distributions[0]).sum(), distributions[0][x1] * distributions[1]),
            PERFECT: (
                distributions[2].max(),
                float(distributions[2].argmax() == x1) * (torch.arange(48) == distributions[3].argmax()),
            ),
        }
        assert set(wanted) | {"greedy"} == {*RULES, PERFECT}
        for rule, (once, twice) in wanted.items():
            survival, close = found.survivals[rule], {"rel": 1e-3, "abs": 1e-5}
            assert survival.expected[start, 0].item() == pytest.approx(float(once), **close), rule
            assert survival.given[start, 2].item() == pytest.approx(float(twice[x2]), **close), rule
            assert survival.expected[start, 1].item() == pytest.approx(
                float((twice * distributions[3]).sum()), **close
            ), rule
        seen.add(bool(abs(wanted["block"][1][x2] - wanted["ratio"][1][x2]) > 1e-3))
        order = distributions[0].argsort(descending=True).tolist()
        assert (found.ranks[start].item(), found.drafts[start].item()) == (order.index(x1), order[0])
    assert seen == {True, False}


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "modules"), families(BUILDS, most_of(MOST)))
def test_stepping_is_the_parallel_pass(name, modules, monkeypatch):
    """Where both can be: the same chains, at every start and depth; elsewhere stepping runs at all."""
    model = build(name, modules=modules)
    texts = [ReferenceText(tuple(prompt(5 + row, seed=row)), tuple(prompt(7 + row, seed=9 + row))) for row in range(2)]
    hiddens, seen = trunk_outputs(model.trunk, texts), []
    monkeypatch.setattr(teacher_forced, "_score", lambda model, text, chains, *rest: seen.append(chains))
    list(score_texts(model, texts, hiddens, modules + 2))
    parallel, seen[:] = [*seen], []
    monkeypatch.setattr(type(model.head), "can_rollout", False)
    list(score_texts(model, texts, hiddens, modules + 2))
    assert len(seen) == len(parallel) == 2
    for one, other in zip(parallel, seen, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_later_pair_is_scored(trained):
    """Offset +1, with which no decoder could draft: the state at position i is that of the next position."""
    model = trained["glm"]
    text = ReferenceText(tuple(PROMPTS[0]), tuple(PROMPTS[0][:9]))
    (hidden,) = trunk_outputs(model.trunk, [text])
    moved = type(hidden)(
        hidden.final_hidden, torch.cat([hidden.head_input[1:], torch.zeros_like(hidden.head_input[:1])])
    )
    (given,) = score_texts(model, [text], [hidden], 2, contract=Contract(offset=1))
    (wanted,) = score_texts(model, [text], [moved], 2)
    assert torch.equal(given.ranks, wanted.ranks)
    (right,) = score_texts(model, [text], [hidden], 2)
    assert not torch.equal(given.ranks, right.ranks)


def test_round_start_probs_by_enumeration():
    """Against all combinations of accepted lengths, weighted by their probability."""
    torch.manual_seed(0)
    keep = torch.rand(1, 2, 5, dtype=torch.float64)
    valid = torch.tensor([[True, True, True, True, False]])
    reach = torch.cat([torch.ones(1, 1, 5, dtype=torch.float64), keep.cumprod(1)], dim=1)
    starts = teacher_forced.round_start_probs(reach, valid)
    begins = torch.zeros(5, dtype=torch.float64)
    # One number of accepted drafts, 0 to 2, for each position, whether or not a round starts there.
    for lengths in itertools.product(range(3), repeat=5):
        chance = 1.0
        for position, length in enumerate(lengths):
            first, second = keep[0, :, position].tolist()
            chance *= (1 - first, first * (1 - second), first * second)[length]
        place = 0
        while place < 4:
            begins[place] += chance
            place += lengths[place] + 1
    torch.testing.assert_close(starts[0], begins)


@pytest.mark.parametrize(
    ("valid", "starts"),
    [
        ("110011111", "100010001"),
        ("111001111", "100001000"),
        ("110111111", "100100010"),  # the round from the first position would end after the gap
        ("011111111", "010001000"),
    ],
)
def test_rounds_start_again_after_a_gap(valid, starts):
    """A position where no round can start, such as one of a prompt, ends the rounds before it."""
    able, found = (torch.tensor([[int(each) for each in text]]) for text in (valid, starts))
    assert torch.equal(
        teacher_forced.round_start_probs(torch.ones(1, 4, 9, dtype=torch.float64), able > 0), found.double()
    )


def test_round_counts_by_hand():
    """A start after a certain draft is never reached, one after a draft of probability 1/2 half the time."""
    given = torch.tensor([[1.0, 0.5], [1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    offered, accepted = teacher_forced.Survival(given, given[:, 1:]).round_counts([3, 2, 1], 1)
    # Start 0 always; 1 with probability 1/2, which surely accepts and skips 2; 2 with the other half.
    assert offered == [1 + 0.5 + 0.5]
    assert accepted == [0.5 + 0.5]
    # Accepted counts come from `expected`, round starts from `given`.
    expected = torch.tensor([[0.4], [0.8], [0.2]], dtype=torch.float64)
    offered, accepted = teacher_forced.Survival(given, expected).round_counts([3, 2, 1], 1)
    assert (offered, accepted) == ([2], [pytest.approx(0.4 + 0.5 * 0.8 + 0.5 * 0.2)])


class Narrow:
    """A trunk that takes three positions per pass, and records the block sizes."""

    max_block_size, device = 3, torch.device("cpu")

    def __init__(self):
        self.widths = []

    def cache(self, rows):
        return SimpleNamespace(commit=self.widths.append)

    def pass_context(self):
        return nullcontext()

    def __call__(self, window, cache):
        return TrunkOutput(*[window[..., None].float()] * 2)


def test_outputs_of_a_trunk_with_small_blocks():
    trunk = Narrow()
    (found,) = trunk_outputs(trunk, [ReferenceText((1, 2, 3, 4), (5, 6, 7))])
    assert trunk.widths == [[3], [3], [1]]
    assert found.final_hidden[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_short_texts_and_refusals(trained):
    """One new token leaves nothing to verify; a fault that can only be decoded is refused."""
    model = trained["glm"]
    text = ReferenceText(tuple(PROMPTS[0]), (1,))
    (found,) = score_texts(model, [text], trunk_outputs(model.trunk, [text]), 4)
    assert found.remaining == []
    assert found.survivals["greedy"].round_counts(found.remaining, 4) == ([0.0] * 4, [0.0] * 4)
    with pytest.raises(ConfigError, match="refresh"):
        list(score_texts(model, [text], trunk_outputs(model.trunk, [text]), 1, contract=Contract(refresh=False)))


def test_groups_hold_few_positions(trained, monkeypatch):
    """Texts of many lengths in small groups give what they give alone."""
    model = trained["glm"]
    texts = [ReferenceText(tuple(PROMPTS[row][: 3 + row]), tuple(PROMPTS[row][3 + row : 14 + row])) for row in range(5)]
    hiddens = trunk_outputs(model.trunk, texts)
    whole = [each.ranks.tolist() for each in score_texts(model, texts, hiddens, 3)]
    monkeypatch.setattr(teacher_forced, "_MAX_POSITIONS", 40)
    monkeypatch.setattr(teacher_forced, "_MAX_STARTS", 4)
    assert [each.ranks.tolist() for each in score_texts(model, texts, hiddens, 3)] == whole
    assert Counter(
        map(len, teacher_forced._groups([teacher_forced._HeadInputs(torch.zeros(15), torch.zeros(15), 0)] * 5))
    ) == {2: 2, 1: 1}
