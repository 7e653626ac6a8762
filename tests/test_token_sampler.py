"""How a served sequence chooses its tokens: against transformers' processors, and the same with and without drafts."""

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from nextn.errors import ConfigError
from nextn.serve.request import GenerationRequest
from nextn.serve.token_sampler import TokenSampler, choose_tokens, verify_drafts
from nextn.settings import Sampling

VOCAB = 40


def logits(*shape, seed=0):
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def request(**options):
    return GenerationRequest(**({"prompt": (1, 2, 3)} | options))


class OnlyEven:
    """A grammar: even tokens, and after 10 nothing but 20."""

    def __init__(self):
        self.last = None

    def allowed(self, drafts):
        masks, last = [], self.last
        for draft in (*drafts, None):
            mask = torch.zeros(VOCAB, dtype=torch.bool)
            mask[torch.arange(0, VOCAB, 2) if last != 10 else torch.tensor([20])] = True
            masks.append(mask)
            if draft is not None and not mask[draft]:
                break
            last = draft
        return masks

    def advance(self, tokens):
        self.last = tokens[-1]


def test_greedy_without_options_is_argmax():
    assert TokenSampler.is_argmax(request())
    for options in (
        {"sampling": Sampling(temperature=1.0)}, {"sampling": Sampling(repetition_penalty=1.1)}, {"logprobs": 0},
        {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"logit_bias": {1: 2.0}}, {"grammar": OnlyEven},
    ):  # fmt: skip
        assert not TokenSampler.is_argmax(request(**options))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_round_equals_single_steps(temperature):
    """Verifying drafts gives what choosing one by one gives, wherever the drafts go wrong."""
    options = {
        "sampling": Sampling(temperature=temperature, top_p=0.9, repetition_penalty=1.2), "seed": 11,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {7: 1.5}, "grammar": OnlyEven,
    }  # fmt: skip
    rows = logits(6)
    single, expected = TokenSampler(request(**options)), []
    for row in rows:
        expected.append(choose_tokens([single], [row], [()])[0])
        single.advance(expected[-1:])
    for right in range(6):
        sampler = TokenSampler(request(**options))
        drafts = [*expected[:right], *([(expected[right] + 2) % VOCAB] if right < 5 else [])]
        assert verify_drafts([sampler], [rows], [drafts])[0] == (min(right, 5), expected[min(right, 5)])


def test_penalties_and_bias():
    row = logits(1)[0]
    sampler = TokenSampler(
        request(
            sampling=Sampling(repetition_penalty=1.5),
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias={9: -3.0},
        )
    )
    sampler.advance([5, 5, 6])
    found = sampler.scores(row, (6,))
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    expected = processors(torch.tensor([[1, 2, 3, 5, 5, 6, 6]]), row[None].clone())[0]
    expected[5] -= 0.5 + 2 * 0.25
    expected[6] -= 0.5 + 2 * 0.25
    expected[9] -= 3.0
    torch.testing.assert_close(found, expected)


def test_grammar_masks_drafts_too():
    sampler = TokenSampler(request(grammar=OnlyEven))
    rows = logits(3)
    rows[:, 10] = 50.0
    assert choose_tokens([sampler], [rows[0]], [()])[0] == 10
    assert choose_tokens([sampler], [rows[1]], [(10,)])[0] == 20
    sampler.advance([10])
    assert choose_tokens([sampler], [rows[1]], [()])[0] == 20


class TooComplex(OnlyEven):
    """Cannot be followed beyond 10, and not at all once that was tried, until it is made anew."""

    broken = False

    def allowed(self, drafts):
        self.broken = self.broken or 10 in drafts
        if self.broken:
            raise ConfigError("too complex")
        return super().allowed(drafts)


def test_drafts_that_make_the_grammar_too_complex_change_nothing():
    """Text that depends on what was drafted; a grammar that lost the tokens before."""
    sampler, rows = TokenSampler(request(grammar=TooComplex)), logits(2)
    rows[:, 11] = 50.0
    sampler.advance([4])
    choose_tokens([sampler], [rows[0]], [(10,)], are_drafts=True)
    assert not sampler.failure
    assert choose_tokens([sampler], [rows[1]], [()])[0] % 2 == 0
    assert sampler._grammar.last == 4
    choose_tokens([sampler], [rows[0]], [(10,)])
    assert sampler.failure == "too complex"


def test_logprobs_are_those_of_the_unmodified_logits():
    row = logits(1)[0]
    sampler = TokenSampler(request(logprobs=3, logit_bias={4: 30.0}))
    found = sampler.logprob(row, choose_tokens([sampler], [row], [()])[0])
    expected = row.log_softmax(-1)
    assert found.token == 4
    assert found.logprob == pytest.approx(float(expected[4]), rel=1e-5)
    assert [token for token, _ in found.top] == expected.topk(3).indices.tolist()


def test_sequences_together_choose_what_they_choose_alone():
    """Parameters in any mixture, sequences at different positions, and one that has a grammar."""
    options = [
        {}, {"sampling": Sampling(temperature=0.8)}, {"sampling": Sampling(temperature=0.8)}, {"grammar": OnlyEven},
        {"sampling": Sampling(temperature=1.2, top_p=0.7)}, {"sampling": Sampling(temperature=1.2, top_p=0.7)},
        {"sampling": Sampling(temperature=0.8), "presence_penalty": 0.5},
    ]  # fmt: skip
    rows, drafted = logits(len(options)), [(1, 2)[: index % 3] for index in range(len(options))]
    drafted[3] = ()
    samplers = [TokenSampler(request(seed=index, **each)) for index, each in enumerate(options)]
    together = choose_tokens(samplers, rows, drafted)
    assert together == [
        choose_tokens([each], [row], [prefix])[0] for each, row, prefix in zip(samplers, rows, drafted, strict=True)
    ]
