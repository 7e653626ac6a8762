"""Teacher-forced chains against the decoder: greedy to the last count, sampled within what chance allows."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tiny import BUILDS, build, prompt, refrain

from nextn.decode import Settings, rounds
from nextn.drafting import Contract
from nextn.errors import ConfigError
from nextn.figures.acceptance import Acceptance
from nextn.figures.estimate import difference
from nextn.measuring import columns
from nextn.measuring.columns import RULES, Text, scored, states
from nextn.sampling import Sampling
from nextn.trunk import Hidden

PROMPTS = [row.tolist() for row in refrain(16, 33, seed=10**6)]
# Rules of sampled decoding -> the decoder's settings for each; it has none for `match`.
SETTINGS = {"ratio": {"block": False}, "block": {}, "argmax": {"block": False, "sampled_drafts": False}}


def decoded(model, prompts, settings, **more):
    """Texts as columns wants them, and each row's own rounds."""
    new, logs, ends = [[] for _ in prompts], [[] for _ in prompts], {}
    for each in rounds(model.trunk, model.head, prompts, settings, **more):
        for part in each.rows:
            new[part.row] += part.emitted
            logs[part.row].append(part)
            ends[part.row] = part.finish
    texts = [
        Text(tuple(p), tuple(n), settings.sampling.temperature, ends[row] in ("eos", "context"))
        for row, (p, n) in enumerate(zip(prompts, new, strict=True))
    ]
    return texts, logs


def counts(logs, drafts):
    """Acceptance over rows; per row offered and kept."""
    each = [Acceptance.of([type("R", (), {"rows": [part]}) for part in log]) for log in logs]
    pad = lambda values: [*values, *[0] * (drafts - len(values))]  # noqa: E731
    return [pad(row.offered) for row in each], [pad(row.kept) for row in each]


def walked(model, texts, drafts, rule, contract=None):
    found = list(scored(model, texts, states(model.trunk, texts), drafts, contract=contract))
    return [each.survivals[rule].walked(each.rooms, drafts) for each in found]


CONTRACTS = [Contract(), Contract(prefill=False), Contract(offset=-1), Contract(prefill=False, offset=-1)]


@pytest.mark.parametrize("drafts", [1, 3, 5])
@pytest.mark.parametrize("name", ["glm", "glm_two", "qwen", "v4"])
@pytest.mark.parametrize("contract", CONTRACTS, ids=["right", "no prefill", "offset", "both"])
def test_greedy_counts_are_the_decoders(name, drafts, contract, trained):
    """Every offered and kept draft of every text, right and with faults; some texts end early."""
    settings = Settings(drafts=drafts, max_tokens=28, contract=contract, eos=(7, 19))
    texts, logs = decoded(trained[name], PROMPTS[:8], settings)
    offered, kept = counts(logs, drafts)
    assert any(text.ended for text in texts)
    assert any(not text.ended for text in texts)
    assert walked(trained[name], texts, drafts, "greedy", contract) == list(zip(offered, kept, strict=True))


def test_context_ends_a_text_too():
    """The last round may draft less: the same counts where the context is full."""
    model = build("glm4_moe", max_position_embeddings=40)
    texts, logs = decoded(model, PROMPTS[:3], Settings(drafts=3, max_tokens=28))
    assert {len(text.tokens) for text in texts} == {40}
    offered, kept = counts(logs, 3)
    assert walked(model, texts, 3, "greedy") == list(zip(offered, kept, strict=True))


@pytest.mark.parametrize("rule", SETTINGS)
@pytest.mark.parametrize("name", ["glm", "glm_two"])
def test_sampled_counts_agree_with_the_decoders(name, rule, trained):
    """At a temperature at which some drafts stand and others do not: no paired difference that 1 in 10,000 has."""
    drafts, many = 3, [row.tolist() for row in refrain(48, 20, seed=5)]
    sampling = Sampling(4.0 if rule != "argmax" else 2.0 if name == "glm" else 1.3)
    settings = Settings(drafts=drafts, max_tokens=30, sampling=sampling, seed=3, **SETTINGS[rule])
    texts, logs = decoded(trained[name], many, settings)
    offered, kept = counts(logs, drafts)
    found = walked(trained[name], texts, drafts, rule)
    survived = 1.0
    for depth in range(drafts):
        for ours, theirs in ((0, offered), (1, kept)):
            gap = difference(
                [each[ours][depth] for each in found],
                [each[depth] for each in theirs],
                [each[0] for each in offered],
                error=1e-4,
            )
            rare = 9 / sum(each[0] for each in offered)  # what no text happened to show has no spread
            assert gap.low - rare <= 0 <= gap.high + rare, (depth, ours, gap)
            assert gap.high - gap.low < 0.2
        survived *= sum(each[depth] for each in kept) / sum(each[depth] for each in offered)
    assert 0.05 < survived < 0.9


def test_rules_by_enumeration(trained):
    """Every start, depths 1 and 2, against sums over all drafts of both depths, from the laws themselves."""
    model = trained["glm"]
    text = Text(tuple(PROMPTS[0]), tuple(torch.randint(0, 40, (30,), generator=torch.manual_seed(1)).tolist()), 3.0)
    hidden = states(model.trunk, [text])
    (found,) = scored(model, [text], hidden, 2)
    with torch.no_grad():
        chains = model.head.unrolled(torch.tensor([text.tokens]), hidden[0].eaten[None], 2)
        q1, q2 = ((model.head.logits(0, chain[0]).double() / 3).softmax(-1) for chain in chains)
        p = (model.trunk.logits(hidden[0].normed).double() / 3).softmax(-1)
    low, seen = torch.minimum, set()
    for start in range(len(found.rooms) - 1):
        column, (x1, x2) = len(text.prompt) - 1 + start, text.new[start + 1 : start + 3]
        laws = q1[column], q2[column], p[column + 1], p[column + 2]
        first, both = laws[0][x1] / laws[2][x1], laws[0][x1] / laws[2][x1] * laws[1] / laws[3]
        alone = low(first, torch.tensor(1.0))
        right = float(laws[0].argmax() == x1)
        # depth 1 by the mean over its token; depth 2 given its token, and by the mean.
        wanted = {
            "ratio": (low(laws[2], laws[0]).sum(), alone * low(laws[1] / laws[3], p.new_ones(()))),
            "block": (low(laws[2], laws[0]).sum(), low(alone, both)),
            "argmax": (laws[2][laws[0].argmax()], right * (torch.arange(48) == laws[1].argmax())),
            "match": ((laws[2] * laws[0]).sum(), laws[0][x1] * laws[1]),
        }
        assert set(wanted) | {"greedy"} == set(RULES)
        for rule, (once, twice) in wanted.items():
            survival, close = found.survivals[rule], {"rel": 1e-3, "abs": 1e-5}
            assert survival.expected[start, 0].item() == pytest.approx(float(once), **close), rule
            assert survival.given[start, 2].item() == pytest.approx(float(twice[x2]), **close), rule
            assert survival.expected[start, 1].item() == pytest.approx(float((twice * laws[3]).sum()), **close), rule
        seen.add(bool(abs(wanted["block"][1][x2] - wanted["ratio"][1][x2]) > 1e-3))
        order = laws[0].argsort(descending=True).tolist()
        assert (found.ranks[start].item(), found.drafts[start].item()) == (order.index(x1), order[0])
    assert seen == {True, False}


@pytest.mark.parametrize(("name", "modules"), BUILDS)
def test_stepping_is_the_parallel_pass(name, modules, monkeypatch):
    """Where both can be: the same chains, at every start and depth; elsewhere stepping runs at all."""
    model = build(name, modules=modules)
    texts = [Text(tuple(prompt(5 + row, seed=row)), tuple(prompt(7 + row, seed=9 + row))) for row in range(2)]
    hiddens, seen = states(model.trunk, texts), []
    monkeypatch.setattr(columns, "_judged", lambda model, text, chains, *rest: seen.append(chains))
    list(scored(model, texts, hiddens, modules + 2))
    parallel, seen[:] = [*seen], []
    monkeypatch.setattr(type(model.head), "can_unroll", False)
    list(scored(model, texts, hiddens, modules + 2))
    assert len(seen) == len(parallel) == 2
    for one, other in zip(parallel, seen, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_later_pair_is_scored(trained):
    """Offset +1, which nothing could draft with: the state at column i is the next column's."""
    model = trained["glm"]
    text = Text(tuple(PROMPTS[0]), tuple(PROMPTS[0][:9]))
    (hidden,) = states(model.trunk, [text])
    moved = type(hidden)(hidden.normed, torch.cat([hidden.eaten[1:], torch.zeros_like(hidden.eaten[:1])]))
    (given,) = scored(model, [text], [hidden], 2, contract=Contract(offset=1))
    (wanted,) = scored(model, [text], [moved], 2)
    assert torch.equal(given.ranks, wanted.ranks)
    (right,) = scored(model, [text], [hidden], 2)
    assert not torch.equal(given.ranks, right.ranks)


def test_walk_is_the_law_of_rounds():
    """Against all ways to keep and reject, weighed: where rounds begin, and what each is expected to give."""
    torch.manual_seed(0)
    keep = torch.rand(1, 2, 5, dtype=torch.float64)
    valid = torch.tensor([[True, True, True, True, False]])
    reach = torch.cat([torch.ones(1, 1, 5, dtype=torch.float64), keep.cumprod(1)], dim=1)
    starts = columns.walk(reach, valid)
    begins = torch.zeros(5, dtype=torch.float64)
    # One number of kept drafts, 0 to 2, for each column, whether or not a round begins there.
    for lengths in itertools.product(range(3), repeat=5):
        chance = 1.0
        for column, length in enumerate(lengths):
            first, second = keep[0, :, column].tolist()
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
        ("110111111", "100100010"),  # the round from the first column would end behind the gap
        ("011111111", "010001000"),
    ],
)
def test_rounds_begin_anew_behind_a_gap(valid, starts):
    """A column that cannot begin a round, such as one of a prompt, ends the rounds before it."""
    able, found = (torch.tensor([[int(each) for each in text]]) for text in (valid, starts))
    assert torch.equal(columns.walk(torch.ones(1, 4, 9, dtype=torch.float64), able > 0), found.double())


def test_walk_by_hand():
    """Rounds follow kept drafts: the start behind a kept draft is never visited, one behind a doubtful one half."""
    given = torch.tensor([[1.0, 0.5], [1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    offered, kept = columns.Survival(given, given[:, 1:]).walked([3, 2, 1], 1)
    # Start 0 always; 1 with chance a half, which keeps for sure and skips 2; 2 by the other half.
    assert offered == [1 + 0.5 + 0.5]
    assert kept == [0.5 + 0.5]
    # What is expected is counted, what is given is walked.
    expected = torch.tensor([[0.4], [0.8], [0.2]], dtype=torch.float64)
    offered, kept = columns.Survival(given, expected).walked([3, 2, 1], 1)
    assert (offered, kept) == ([2], [pytest.approx(0.4 + 0.5 * 0.8 + 0.5 * 0.2)])


class Narrow:
    """A trunk that takes three columns at a time, and says what it is given."""

    max_window, device = 3, torch.device("cpu")

    def __init__(self):
        self.widths = []

    def cache(self, rows):
        return SimpleNamespace(keep=self.widths.append)

    def __call__(self, window, cache):
        return Hidden(*[window[..., None].float()] * 2)


def test_states_of_a_trunk_with_narrow_windows():
    trunk = Narrow()
    (found,) = states(trunk, [Text((1, 2, 3, 4), (5, 6, 7))])
    assert trunk.widths == [[3], [3], [1]]
    assert found.normed[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_short_texts_and_refusals(trained):
    """One new token leaves nothing to judge; a fault that only decoding shows is named."""
    model = trained["glm"]
    text = Text(tuple(PROMPTS[0]), (1,))
    (found,) = scored(model, [text], states(model.trunk, [text]), 4)
    assert found.rooms == []
    assert found.survivals["greedy"].walked(found.rooms, 4) == ([0.0] * 4, [0.0] * 4)
    with pytest.raises(ConfigError, match="rerun"):
        list(scored(model, [text], states(model.trunk, [text]), 1, contract=Contract(rerun=False)))


def test_groups_hold_few_columns(trained, monkeypatch):
    """Texts of many lengths in small groups give what they give alone."""
    model = trained["glm"]
    texts = [Text(tuple(PROMPTS[row][: 3 + row]), tuple(PROMPTS[row][3 + row : 14 + row])) for row in range(5)]
    hiddens = states(model.trunk, texts)
    whole = [each.ranks.tolist() for each in scored(model, texts, hiddens, 3)]
    monkeypatch.setattr(columns, "_COLUMNS", 40)
    monkeypatch.setattr(columns, "_STARTS", 4)
    assert [each.ranks.tolist() for each in scored(model, texts, hiddens, 3)] == whole
    assert Counter(map(len, columns._groups([columns._Fed(torch.zeros(15), torch.zeros(15), 0)] * 5))) == {2: 2, 1: 1}
