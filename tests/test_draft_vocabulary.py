"""Drafts from a part of the vocabulary, and by an lm_head of four bits: exactness, and where they are used."""

from collections import Counter

import numpy as np
import pytest
import torch
from distributions import TOKENWISE, continued, emitted, in_blocks, random_distributions, rng
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Case, quantize_folder
from quick import each_once
from reference_products import grouped_linear
from tiny import CONFIGS, FIXTURES, build, decode, prompt, refrain
from torch import Tensor, nn

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.data.corpus import Corpus
from nextn.errors import ConfigError
from nextn.model.head import Head
from nextn.model.model import Model
from nextn.runtime.backend import backend_for, make_backend
from nextn.runtime.native import lm_head
from nextn.runtime.native.abi import Runtime, load, type_of
from nextn.runtime.native.grouped import EIGHT_BITS, quantize_groups
from nextn.runtime.native.kv_buffers import KVBuffers
from nextn.runtime.native.lm_head import FORMAT, DraftLMHead, has_four_bits
from nextn.runtime.native.session import NativeHead, NativeTrunk
from nextn.runtime.native.weight_packing import PackedWeights
from nextn.settings import Sampling
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.speculative.sampling import Prediction, to_probs
from nextn.speculative.verification import accept_block
from nextn.stats.acceptance import Acceptance


@pytest.mark.more
@given(
    texts=st.lists(st.lists(st.integers(0, 11)), min_size=1).filter(any),
    size=st.integers(2, 12),
    always=st.sets(st.integers(0, 11), max_size=2),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_most_frequent_first(texts, size, always):
    """A count that forgets a text, ties that fall anyhow, special tokens that take no place or are left out."""
    counts = Counter(token for text in texts for token in text)
    rest = sorted(set(range(12)) - always, key=lambda token: (-counts[token], token))
    found = DraftVocabulary.of(texts, size, vocab_size=12, always=always)
    assert found.ids.tolist() == sorted([*always, *rest[: size - len(always)]])
    assert len(found) == size


def test_a_corpus_is_a_text():
    """Ids that numpy packed into 16 bits."""
    corpus = Corpus.from_texts(
        [("a", "aab"), ("b", "c")], lambda texts: [np.frombuffer(t.encode(), "u1") for t in texts], 7
    )
    assert DraftVocabulary.of([corpus.ids], 3, vocab_size=300, always=(200,)).ids.tolist() == [7, 97, 200]


def test_rows_are_what_expand_puts_back():
    """Rows and places of two orders: short logits expanded are the full ones, where the list has them."""
    weight, final_hidden = torch.randn(9, 4, generator=rng(1)), torch.randn(2, 3, 4, generator=rng(2))
    short = DraftVocabulary.of([[7, 7, 2, 5]], 3, vocab_size=9)
    rows = short.rows(weight)
    assert short.rows(rows) is rows
    full, cut = final_hidden @ weight.T, short.expand(final_hidden @ rows.T)
    torch.testing.assert_close(cut[..., short.ids], full[..., [2, 5, 7]])
    assert (cut == -torch.inf).sum() == 2 * 3 * 6


@pytest.mark.parametrize("rule", [TOKENWISE, (accept_block, in_blocks)], ids=["one by one", "block"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.7, 2, 0.9), Sampling(1.0, 4, 1.0, 0.2)])
def test_decoding_stays_exact(rule, sampling):
    """A filter that stumbles over -inf, or a residual that loses the tokens outside."""
    short = DraftVocabulary.of([[3, 3, 1, 0]], 3, vocab_size=5)
    p = [random_distributions(5**j, 5, seed=j) for j in range(3)]
    q = [
        to_probs(short.expand(torch.randn(5**j, 3, generator=rng(j), dtype=torch.float64)), sampling) for j in range(2)
    ]
    assert all((each[:, [2, 4]] == 0).all() for each in q)
    found, _ = emitted(p, q, None, rule=rule)
    torch.testing.assert_close(found, continued(p[0], p[1:]), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("texts", "size", "always", "words"),
    [
        ([[1]], 10, (), "size = 10; expected 1 to 9"),
        ([[1]], 0, (), "size = 0; expected 1"),
        ([[1]], 1, (2, 3), "size = 1; expected 2"),
        ([], 2, (), "no token"),
        ([[], []], 2, (), "no token"),
        ([[1, 9]], 2, (), r"token ids 1\.\.9; expected 0\.\.8"),
        ([[-1]], 2, (), "expected 0"),
        ([[1]], 2, (9,), "always = token ids 9..9; expected ids within 0"),
    ],
)
def test_what_cannot_be_a_list(texts, size, always, words):
    with pytest.raises(ConfigError, match=words):
        DraftVocabulary.of(texts, size, vocab_size=9, always=always)


WEIGHTS = ["stored", "int8", "int4"]
few_bits = pytest.mark.parametrize("weights", WEIGHTS)


@pytest.fixture
def small(monkeypatch):
    """Small vocabularies have four bits, too."""
    monkeypatch.setattr(lm_head, "_LEAST_ROWS", 1)
    monkeypatch.setattr(lm_head, "_LEAST_ROWS_PER_CHANNEL", 0)


def model_of(name: str, weights: str, draft_ids: list[int] | None = None) -> Model:
    # Experts of step3p5 have no native form.
    model = build(name, **({"mlp_layer_types": ["dense", "dense"]} if name == "step3p5" else {}))
    for part in (model.trunk, model.head):
        part.to(torch.bfloat16)
    return prepared(model, weights, draft_ids)


def prepared(model: Model, weights: str, draft_ids: list[int] | None = None) -> Model:
    model.trunk.weights = weights
    if draft_ids is not None:
        model.head.draft_vocabulary = DraftVocabulary(torch.tensor(draft_ids), model.trunk.vocab_size)
    return model


@torch.no_grad()
def twin_logits(head: Head, index: int, final_hidden: Tensor) -> Tensor:
    """`Head.logits` in torch with an lm_head of four bits and activations of sixteen; the two highest are exact."""
    output, vocabulary = head.output(index), head.draft_vocabulary
    rows = output.weight if vocabulary is None else vocabulary.rows(output.weight)
    logits = grouped_linear(final_hidden, quantize_groups(rows, *FORMAT, load())).to(final_hidden.dtype)
    exact = (
        rows
        if head.trunk.weights == "stored"
        else quantize_groups(rows, *EIGHT_BITS, load()).dequantized.to(rows.dtype)
    )
    places = logits.topk(2).indices
    logits.scatter_(-1, places, nn.functional.linear(final_hidden.float(), exact.float()).gather(-1, places).to(logits))
    return logits[..., : head.trunk.vocab_size] if vocabulary is None else vocabulary.expand(logits)


class TwinRecursion:
    """`NativeRecursion` with logits of torch."""

    def __init__(self, head: NativeHead, cache: KVBuffers, state: Tensor) -> None:
        self.head, self.cache, self.state = head, cache, state[:, None].clone()

    def step(self, tokens: list[int]) -> Prediction:
        step = self.head.step(0, torch.tensor(tokens)[:, None], self.state, cache=self.cache)
        self.cache.commit([1] * len(tokens))
        self.state = step.next_hidden.clone()
        return self.head.predict(0, step.final_hidden[:, 0])


@pytest.mark.parametrize(
    ("name", "draft_ids", "weights"),
    each_once(
        ["glm4_moe", "cohere2_moe", "step3p5"], [None, [2, 3, 7, 20, 33]], WEIGHTS
    ),  # untied, tied, the head's own
    ids=str,
)
def test_draft_logits_are_those_of_four_bits(small, name, draft_ids, weights):
    model = model_of(name, weights, draft_ids)
    made = backend_for(model, "native")
    assert made.draft_lm_head_bits == 4
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, expected = made.head.predict(0, states).logits, twin_logits(model.head, 0, states)
    stored = model.head.logits(0, states)
    known = expected.isfinite()
    assert torch.equal(found.isfinite(), known)
    near, far = (
        (each[known].float() - found[known].float()).norm() / found[known].float().norm() for each in (expected, stored)
    )
    assert near < 0.005 < 0.02 < far


@pytest.mark.more
@pytest.mark.parametrize(("draft_ids", "weights"), each_once([None, [*range(5, 40)]], WEIGHTS), ids=str)
def test_the_two_best_tokens_are_scored_by_the_lm_head_itself(small, monkeypatch, draft_ids, weights):
    """The best token then is another one for some states. Near ties are left out, as results in bf16 round."""
    model = model_of("glm4_moe", weights, draft_ids)
    head, states = model.head, torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact, made = head.logits(0, states), backend_for(model, "native").head.predict(0, states)
    monkeypatch.setattr(DraftLMHead, "rescore", lambda *given: given[1])
    four_bits = make_backend(model.trunk, head, name="native").head.predict(0, states).logits.float()
    _, last, other = four_bits.topk(3).values.unbind(-1)
    candidates = four_bits.topk(2).indices
    expected = four_bits.scatter(-1, candidates, exact.gather(-1, candidates).float())
    (first, second), best = expected.topk(2).values.unbind(-1), expected.argmax(-1)
    is_clear = (first - second > 0.02 * first.abs()) & (last > other)
    assert torch.equal(torch.tensor(made.best)[is_clear], best[is_clear])
    assert (best != four_bits.argmax(-1))[is_clear].any()


@pytest.mark.more
@pytest.mark.parametrize(("draft_ids", "weights"), each_once([None, [*range(5, 40)]], WEIGHTS), ids=str)
def test_drafts_are_those_of_torch(small, monkeypatch, draft_ids, weights):
    """Of whole rounds, of a native chain, and of a loop that reads torch's logits."""
    model = prepared(Model.load(FIXTURES / "glm_one", dtype=torch.bfloat16), weights, draft_ids)
    made, start = backend_for(model, "native"), refrain(3, 30, seed=4).tolist()
    drafts = []
    for way in ("rounds", "chain", "torch"):
        if way != "rounds":
            monkeypatch.setattr(NativeTrunk, "rounds", lambda *_, **__: None)
        if way == "torch":
            monkeypatch.setattr(NativeHead, "chain", lambda *_, **__: None)
            read = lambda index, states: Prediction(twin_logits(model.head, index, states))  # noqa: E731
            monkeypatch.setattr(made.head, "predict", read)
            monkeypatch.setattr(made.head, "recursion", lambda *args: TwinRecursion(made.head, *args))
        _, log = decode(made, start, num_speculative_tokens=3, max_tokens=24)
        drafts.append([part.drafts for each in log for part in each.rows])
    assert drafts[0] == drafts[1] == drafts[2]
    assert len({token for part in drafts[0] for token in part}) > 5


@pytest.mark.more
@pytest.mark.parametrize(("folder", "weights"), each_once(["glm", "qwen"], WEIGHTS))
def test_text_is_that_without_drafts_and_drafts_are_as_good(small, folder, weights):
    model, start = (
        prepared(Model.load(FIXTURES / folder, dtype=torch.bfloat16), weights),
        refrain(6, 40, seed=9).tolist(),
    )
    made = backend_for(model, "native")
    plain, _ = decode(made, start, num_speculative_tokens=0, max_tokens=32)
    texts, log = decode(made, start, num_speculative_tokens=3, max_tokens=32)
    model.head.exact = True
    others, other_log = decode(backend_for(model, "native"), start, num_speculative_tokens=3, max_tokens=32)
    assert texts == plain == others
    assert Acceptance.of(log).length > max(1.5, 0.9 * Acceptance.of(other_log).length)


@pytest.mark.more
@few_bits
def test_only_drafts_read_the_four_bits(small, monkeypatch, weights):
    """Not the verification, nor the embedding, which is tied to the lm_head here."""
    model = model_of("cohere2_moe", weights)
    assert model.trunk.embedding.weight is model.trunk.output.weight
    tokens, states = torch.tensor([prompt(9)]), torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for least in (1, 10**9):
        monkeypatch.setattr(lm_head, "_LEAST_ROWS", least)
        made = make_backend(model.trunk, model.head, name="native")
        with torch.no_grad():
            hidden = made.trunk(tokens, made.trunk.cache(1))
            step = made.head.step(0, tokens, states.bfloat16(), cache=made.head.cache(1)).final_hidden
            each = [hidden.final_hidden, made.trunk.read(hidden).logits, made.trunk.predict(step).logits, step]
            found.append([value.clone() for value in (*each, made.head.predict(0, step).logits)])
    for near, far in zip(*(each[:-1] for each in found), strict=True):
        assert torch.equal(near, far)
    assert not torch.equal(found[0][-1], found[1][-1])


@pytest.mark.more
def test_the_lm_head_of_drafts_is_packed_in_four_bits_alone(small, monkeypatch):
    """In bf16, it takes the place of the copy in seven bits."""
    monkeypatch.setattr(Runtime, "has_bf16_pair_products", True)
    packed: list[tuple[torch.Size, int]] = []
    pack = PackedWeights.pack

    def noted(self, weights, *args):
        made = pack(self, weights, *args)
        packed.extend((weight.shape, made.type) for weight in weights)
        return made

    monkeypatch.setattr(PackedWeights, "pack", noted)
    model = model_of("glm4_moe", "stored")
    made = backend_for(model, "native")
    decode(made, [prompt(9)], num_speculative_tokens=3, max_tokens=9)
    types = {kind for shape, kind in packed if shape == model.trunk.output.weight.shape}
    assert types == {type_of(torch.bfloat16), FORMAT.type}
    assert (made.head_bits, made.draft_lm_head_bits) == (7, 4)


@pytest.mark.more
@few_bits
def test_a_quantized_checkpoint_drafts_by_four_bits(small, tmp_path, weights):
    build("qwen3_5").save(tmp_path, dtype=torch.bfloat16)
    quantize_folder(tmp_path, Case("pack-quantized", 4, 32), is_random=False)
    model, start = prepared(Model.load(tmp_path), weights), [prompt(9)]
    made = backend_for(model, "native")
    assert made.draft_lm_head_bits == 4
    texts, _ = decode(made, start, num_speculative_tokens=3, max_tokens=16)
    assert texts == decode(made, start, num_speculative_tokens=0, max_tokens=16)[0]


def test_the_two_best_are_capped_as_the_others(small):
    output = nn.Linear(8, 12, bias=False)
    states, logits = torch.randn(2, 8), torch.zeros(2, 12)
    made = DraftLMHead.of(output, None).rescore(logits, states, lambda exact: 2 * torch.tanh(exact))
    places = made.nonzero(as_tuple=True)
    torch.testing.assert_close(made[places], 2 * torch.tanh(output(states)[places]))


@pytest.mark.more
def test_four_bits_are_for_large_vocabularies_and_rounded_weights():
    rows = 4096
    model = Model.build(CONFIGS["glm4_moe"] | {"vocab_size": rows}, dtype=torch.bfloat16)
    head = model.head
    assert has_four_bits(head)
    assert not has_four_bits(head, rows - 1)
    head.draft_vocabulary = DraftVocabulary(torch.arange(100), rows)
    assert not has_four_bits(head)
    assert has_four_bits(head, rows)
    head.draft_vocabulary, head.exact = None, True
    assert not has_four_bits(head)
    wide = Model.build(CONFIGS["glm4_moe"] | {"vocab_size": rows})
    assert not has_four_bits(wide.head), "a head in float32 drafts with all bits"
    wide.trunk.weights = "int8"
    assert has_four_bits(wide.head)
    assert backend_for(wide, "native").draft_lm_head_bits == 4
    assert not has_four_bits(build("glm4_moe").head)


@pytest.mark.more
def test_small_vocabularies_keep_what_they_have():
    model = Model.load(FIXTURES / "glm", dtype=torch.bfloat16)
    for weights in ("stored", "int8", "int4"):
        assert backend_for(prepared(model, weights), "native").draft_lm_head_bits is None
    assert not has_four_bits(Model.load(SHIPPED).head)
