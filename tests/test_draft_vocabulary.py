"""The list by a slow count; exactness by enumeration; what cannot be a list."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from distributions import TOKENWISE, continued, emitted, in_blocks, random_distributions, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.data.corpus import Corpus
from nextn.errors import ConfigError
from nextn.settings import Sampling
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.speculative.sampling import to_probs
from nextn.speculative.verification import accept_block


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


def test_the_option(here, tmp_path):
    """Drafts of few tokens and the same text; wrong values that are guessed at."""
    file = tmp_path / "text.txt"
    file.write_text("def f(x):\n    return x\n")
    arguments = ["generate", SHIPPED, "def f(", "--max-tokens", 8, "--backend", "torch", "--dtype", "float32", "--json"]
    plain = json.loads(here(*arguments)[1])
    few = json.loads(here(*arguments, "--draft-vocab", f"{file}:1")[1])
    assert (few["text"], sum(few["num_accepted_tokens_per_pos"])) == (plain["text"], 0)
    assert sum(plain["num_accepted_tokens_per_pos"]) > 0
    for wrong in ("few:8", str(file), f"{file}:0", f"{file}:few", f"{file}:999"):
        code, _, err = here(*arguments, "--draft-vocab", wrong)
        assert code == 2
        assert "draft-vocab" in err or "size = 999" in err
