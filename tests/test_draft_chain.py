"""Drafting as one native call against the reference loop: drafts, confidences, distributions, text."""

from types import SimpleNamespace

import pytest
import torch
from quick import case
from replays import PlanPerRound, fast_of
from tiny import FIXTURES, build, prompt, refrain

from nextn.decoding.drafter import Drafter
from nextn.decoding.rounds import rounds
from nextn.model.model import Model
from nextn.runtime.native.draft_chain import NativeDraftChain
from nextn.runtime.native.rounds import NativeRounds
from nextn.runtime.native.session import NativeTrunk
from nextn.settings import Contract, Sampling, Settings
from nextn.speculative.draft_policy import EDGES, DraftLength, FixedLength, RoundPlan
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.speculative.verification import Verifier

LENGTHS = (3, 17, 40)
WARM = Sampling(1.0, top_p=0.95)


class Steep(PlanPerRound):
    """Many bins; chains end at different depths, also before the first draft. It records what it learns."""

    def __init__(self, take: float = 0.3, go: float = 0.35) -> None:
        self.take, self.go, self.learned = take, go, []

    def plan(self) -> RoundPlan:
        table = tuple(0.5 + 0.5 * edge for edge in EDGES)
        return RoundPlan(6, EDGES, table, (self.take,) * 6, (self.go,) * 6)

    def learn(self, confidences, *, num_draft_tokens, num_accepted):
        self.learned.append(([round(each, 5) for each in confidences], num_draft_tokens, num_accepted))


@pytest.fixture(scope="module")
def trained() -> SimpleNamespace:
    return fast_of(Model.load(FIXTURES / "glm_one"))


@pytest.fixture(scope="module")
def random() -> SimpleNamespace:
    return fast_of(build("glm4_moe"))


def forbid(patch, owner, name):
    patch.setattr(owner, name, lambda *_, **__: pytest.fail(f"{owner.__name__}.{name} was called"))


def both(model, prompts, settings, length=None):
    """The results of all rounds by native rounds, which must equal those of the native chain alone, and by the loop."""
    found = []
    for way in ("rounds", "chain", "loop"):
        observer = (lambda event: None) if way == "loop" else None
        lengths = length() if length is not None else None
        with pytest.MonkeyPatch.context() as patch:
            if way == "chain":
                patch.setattr(NativeTrunk, "rounds", lambda *_, **__: None)
            if way == "rounds" and settings.contract == Contract():
                forbid(patch, NativeDraftChain, "run")
                forbid(patch, Verifier, "__call__")
            if way == "loop":
                forbid(patch, NativeDraftChain, "begin")
                forbid(patch, NativeRounds, "run")
            else:
                forbid(patch, Drafter, "_draft_in_torch")
            stream = rounds(model.trunk, model.head, prompts, settings, length=lengths, observer=observer)
            found.append(([each.rows for each in stream], getattr(lengths, "learned", None)))
    whole, native, loop = found
    assert whole == native
    return native, loop


@pytest.mark.more
@pytest.mark.parametrize("lengths", [case((17,), quick=False), case(LENGTHS, quick=True)], ids=["one", "ragged"])
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), WARM, Sampling(0.7, top_k=5, min_p=0.02)])
def test_it_drafts_what_the_loop_drafts(random, sampling, sampled, lengths):
    """Sequences end at different times; the last rounds have fewer tokens remaining."""
    prompts = [prompt(length, seed=length) for length in lengths]
    settings = Settings(
        num_speculative_tokens=4, max_tokens=23, sampling=sampling, sampled_drafts=sampled, eos=(5,), seed=2
    )
    native, loop = both(random, prompts, settings)
    assert native == loop


@pytest.mark.more
@pytest.mark.parametrize("lengths", [(17,), (17, 9)], ids=["one", "ragged"])
@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_a_draft_vocabulary_stays_native(sampling, lengths):
    """Drafts that leave the native chain, or that are places in the vocabulary instead of tokens."""
    model = build("glm4_moe")
    ids = torch.tensor([2, 3, 7, 20, 33])
    model.head.draft_vocabulary = DraftVocabulary(ids, model.trunk.vocab_size)
    native, loop = both(
        fast_of(model),
        [prompt(length, seed=length) for length in lengths],
        Settings(num_speculative_tokens=3, max_tokens=23, sampling=sampling),
    )
    assert native == loop
    drafts = {token for rows in native[0] for part in rows for token in part.drafts}
    assert len(drafts) > 1
    assert drafts <= set(ids.tolist())


@pytest.mark.more
@pytest.mark.parametrize("sampling", [Sampling(), WARM])
@pytest.mark.parametrize(
    "length",
    [
        case(Steep, quick=True),
        case(lambda: Steep(0.5, 0.2), quick=False),
        case(lambda: FixedLength(6, 0.6), quick=True),
        case(lambda: FixedLength(3), quick=False),
    ],
)
def test_it_ends_where_the_plan_ends(trained, length: type[DraftLength], sampling):
    """By the confidence of each row, before a draft is sampled; the policy learns the same as from the loop."""
    prompts = [*refrain(3, 30, seed=4).tolist(), prompt(9, vocab_size=40)]
    native, loop = both(trained, prompts, Settings(num_speculative_tokens=6, max_tokens=30, sampling=sampling), length)
    assert native == loop
    depths = {len(part.drafts) for rows in native[0] for part in rows}
    assert len(depths) > 2


def test_it_keeps_drafts(trained):
    settings = Settings(num_speculative_tokens=6, max_tokens=40, sampling=Sampling(1.0))
    native, _ = both(trained, refrain(4, 40, seed=9).tolist(), settings)
    parts = [part for rows in native[0] for part in rows if part.drafts]
    assert sum(part.num_accepted for part in parts) > len(parts)


@pytest.mark.parametrize("contract", [Contract(refresh=False), Contract(prefill=False), Contract(offset=-1)])
def test_faults_can_be_injected(trained, contract):
    native, loop = both(
        trained, refrain(2, 30, seed=1).tolist(), Settings(num_speculative_tokens=4, max_tokens=24, contract=contract)
    )
    assert native == loop


@pytest.mark.slow
def test_a_plan_that_grows(random):
    """A plan with more drafts than the last one, and buffers that grow in the middle of a text."""

    class Growing(PlanPerRound):
        number = 0

        def plan(self):
            self.number += 1
            return FixedLength(self.number).plan()

    settings = Settings(num_speculative_tokens=60, max_tokens=150, sampling=Sampling(1.0))
    native, loop = both(random, [prompt(200), prompt(3)], settings, Growing)
    assert native == loop
    assert max(len(part.drafts) for rows in native[0] for part in rows) > 20


def test_others_take_the_loop(random):
    """A penalty, which looks at each draft; several modules."""
    two = fast_of(build("glm4_moe", modules=2))
    for model, sampling in ((random, Sampling(1.0, repetition_penalty=1.3)), (two, Sampling(1.0))):
        head = model.head
        assert head.chain(head.cache(1), sampling, sampled=True) is None


@torch.inference_mode()
def test_distributions_are_what_drafts_were_sampled_from(random):
    head = random.head
    cache = head.cache(1)
    chain = head.chain(cache, WARM, sampled=True)
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    uniforms = [[0.1, 0.5, 0.9]]
    drafts, confidences, num_steps = chain.run(
        [[1, 2, 3, 4, 5]], states, FixedLength(3).plan(), limits=[3], uniforms=uniforms
    )
    assert (num_steps, len(drafts[0]), confidences) == (3, 3, [[1.0] * 3])
    assert cache.lengths == [7]
    distributions = chain.distributions[:3, 0]
    torch.testing.assert_close(distributions.sum(-1), torch.ones(3))
    for probs, token, u in zip(distributions, drafts[0], uniforms[0], strict=True):
        assert probs[:token].sum() <= u + 1e-6
        assert probs[: token + 1].sum() >= u - 1e-6
