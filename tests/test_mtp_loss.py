"""The loss against a double loop over rows, columns and depths, and its chunked gradients against plain autograd."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import loop
from sizes import Sizes

from nextn.errors import ConfigError
from nextn.losses.chunked import IGNORE, SelectedRows, _rows_per_chunk, cross_entropy, tile_rows, weighted_sum
from nextn.losses.mtp_loss import LossReport, Targets, depth_weights, mtp_loss
from nextn.train.config import LambdaSchedule

V, H = 11, 5


def random_batch(seed, *, rows=2, length=7, depths=3, dtype=torch.float64):
    """Hiddens of every depth and the output weight, all with gradients, plus tokens."""
    g = torch.Generator().manual_seed(seed)
    hiddens = [
        torch.randn(rows, max(length - k, 0), H, generator=g, dtype=dtype).requires_grad_() for k in range(depths + 1)
    ]
    weight = torch.randn(V, H, generator=g, dtype=dtype).requires_grad_()
    return hiddens, weight, torch.randint(0, V, (rows, length), generator=g)


def random_rows(seed, *, n=23, dtype=torch.float64, vocabulary=V, width=H):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=g) / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (n,), generator=g)
    labels[::4] = IGNORE
    return hidden, weight, labels, torch.rand(n, generator=g, dtype=torch.float64)


def naive(hidden, weight, labels, row_weights):
    nll = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE, reduction="none")
    return (nll * row_weights).sum(), nll


def brute_force(hiddens, weight, targets, *, lam, shares, denominator):
    """The definition, one label at a time; returns the loss, the sums and the counts."""
    tokens, (rows, length) = targets.tokens.tolist(), targets.tokens.shape
    sums, counts = [], []
    for k, hidden in enumerate(hiddens):
        nll, count = (hidden.sum() + weight.sum()) * 0, 0
        for b in range(rows):
            for i in range(length - k - 1):
                if targets.mask is not None and not targets.mask[b, i + k + 1]:
                    continue
                if targets.documents is not None and len(set(targets.documents[b, i : i + k + 2].tolist())) > 1:
                    continue
                logits = weight @ hidden[b, i]
                nll = nll + logits.logsumexp(0) - logits[tokens[b][i + k + 1]]
                count += 1
        sums.append(nll)
        counts.append(count)
    over = counts if denominator == "valid" else [counts[0]] * len(counts)
    means = [total / n if n else total * 0 for total, n in zip(sums, over, strict=True)]
    depths = len(hiddens) - 1
    extra = sum((w * mean for w, mean in zip(shares, means[1:], strict=True)), means[0] * 0)
    return means[0] + lam / max(depths, 1) * extra, torch.stack(sums), torch.tensor(counts)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_loss_is_the_double_loop(data):
    """Catches a shifted label, one across a document's end, a wrong denominator, weight, lambda or gradient."""
    length, depths = data.draw(st.integers(1, 7)), data.draw(st.integers(0, 3))
    hiddens, weight, tokens = random_batch(data.draw(st.integers(0, 9)), length=length, depths=depths)
    ids = st.lists(st.integers(0, 2), min_size=2 * length, max_size=2 * length).map(torch.tensor)
    documents, mask = data.draw(st.none() | ids), data.draw(st.none() | ids)
    targets = Targets(
        tokens,
        documents=None if documents is None else documents.view(2, length),
        mask=None if mask is None else mask.view(2, length) > 0,
    )
    lam, beta = data.draw(st.sampled_from([0.0, 0.1, 0.7])), data.draw(st.sampled_from([None, 0.6]))
    shares, denominator = depth_weights(depths, beta=beta), data.draw(st.sampled_from(["valid", "tokens"]))
    report = mtp_loss(hiddens, weight, targets, lam=lam, depth_weights=shares, denominator=denominator, chunk=4)
    total, sums, counts = brute_force(hiddens, weight, targets, lam=lam, shares=shares, denominator=denominator)
    torch.testing.assert_close(report.total, total, atol=1e-10, rtol=0)
    torch.testing.assert_close(report.sums, sums.detach(), atol=1e-10, rtol=0)
    assert report.counts.tolist() == counts.tolist() == targets.counts(depths).tolist()
    ours, theirs = (torch.autograd.grad(t, [*hiddens, weight], materialize_grads=True) for t in (report.total, total))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def test_labels_by_hand():
    """Catches an off-by-one in the shift, and a document id that returns being taken for the same document."""
    targets = Targets(
        torch.tensor([[10, 11, 12, 13, 14, 15]]),
        documents=torch.tensor([[1, 1, 1, 2, 1, 1]]),
        mask=torch.tensor([[True, False, True, True, True, True]]),
    )
    x = IGNORE
    assert targets.labels(0).tolist() == [[x, 12, x, x, 15, x]]
    assert targets.labels(1).tolist() == [[12, x, x, x, x]]
    assert Targets(targets.tokens).labels(3).tolist() == [[14, 15, x]]
    assert Targets(targets.tokens).labels(6).shape == Targets(targets.tokens).labels(9).shape == (1, 0)


def test_parts_with_common_counts_add_up_to_the_whole():
    """Catches micro-batches being averaged with equal weight although they hold different numbers of labels."""
    hiddens, weight, tokens = random_batch(1, rows=4)
    mask = torch.rand(4, 7, generator=torch.Generator().manual_seed(3)) > torch.tensor([[0.1], [0.9], [0.5], [0.2]])
    whole = mtp_loss(hiddens, weight, Targets(tokens, mask=mask), lam=0.3)
    parts = [Targets(tokens[at], mask=mask[at]) for at in (slice(0, 1), slice(1, 4))]
    counts = sum(part.counts(3) for part in parts)
    first = mtp_loss([h[:1] for h in hiddens], weight, parts[0], lam=0.3, denominator=counts)
    second = mtp_loss([h[1:] for h in hiddens], weight, parts[1], lam=0.3, denominator=counts)
    torch.testing.assert_close(first.total + second.total, whole.total, atol=1e-12, rtol=0)
    torch.testing.assert_close((first.sums + second.sums) / counts, whole.per_depth, atol=1e-12, rtol=0)


def test_depth_without_label_counts_nothing():
    """Catches 0 / 0: a depth whose labels are all masked must leave loss, report and gradients finite."""
    hiddens, weight, tokens = random_batch(2, length=3, depths=3)
    for mask in (None, torch.zeros(2, 3, dtype=torch.bool)):
        report = mtp_loss(hiddens, weight, Targets(tokens, mask=mask), lam=0.3)
        report.total.backward()
        assert report.counts[2:].tolist() == report.per_depth[2:].tolist() == [0, 0]
        assert torch.isfinite(report.total)
        assert all(torch.isfinite(h.grad).all() for h in hiddens)
    assert report.total == 0


def test_output_heads_of_their_own():
    """Catches a depth whose logits are made with another depth's output head, or are lost where one is shared."""
    hiddens, weight, tokens = random_batch(3)
    own = random_batch(4)[1]
    weights, targets = [weight, own, weight, own], Targets(tokens)
    report = mtp_loss(hiddens, weights, targets, lam=0.3)
    parts = [
        brute_force(hiddens, each, targets, lam=0.3, shares=(1,) * 3, denominator="valid") for each in (weight, own)
    ]
    sums = torch.stack([parts[k % 2][1][k] for k in range(4)])
    means = sums / report.counts
    torch.testing.assert_close(report.sums, sums.detach(), atol=1e-10, rtol=0)
    expected = means[0] + 0.1 * means[1:].sum()
    ours, theirs = (torch.autograd.grad(total, [*hiddens, weight, own]) for total in (report.total, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@loop("chunk", [1, 2, 7, 1000, None])
@loop("tile_bytes", [250, 1 << 20])
def test_gradients_are_autograd_s(monkeypatch, chunk, tile_bytes):
    """Catches a wrong softmax gradient, rows lost between chunks or tiles, a gradient not scaled in backward."""
    monkeypatch.setattr("nextn.losses.chunked._tile_bytes", lambda device: tile_bytes)
    hidden, weight, labels, row_weights = random_rows(0)
    total, nll = cross_entropy(hidden, weight, labels, row_weights=row_weights, chunk=chunk)
    expected, expected_nll = naive(hidden, weight, labels, row_weights)
    torch.testing.assert_close((total, nll), (expected, expected_nll.detach()), atol=1e-10, rtol=0)
    assert not nll.requires_grad
    for factor in (1, -2.5):  # twice: backward must leave what it saved as it was
        ours = torch.autograd.grad(total * factor, [hidden, weight], retain_graph=True)
        theirs = torch.autograd.grad(expected * factor, [hidden, weight], retain_graph=True)
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def test_gradients_are_not_differentiated_again():
    """Catches a second derivative that is wrong in silence: the gradients were made as constants."""
    hidden, weight, labels, _ = random_rows(0)
    (gradient,) = torch.autograd.grad(cross_entropy(hidden, weight, labels)[0] ** 2, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1 / 3), (torch.float16, 2.0**16)])
def test_a_factor_of_the_loss_is_not_rounded(dtype, factor):
    """Catches a share of micro-batches read as bf16 (0.2 % off), and the first scale of fp16 training read as inf."""
    hidden, weight, labels, row_weights = random_rows(0, dtype=dtype)
    total, _ = cross_entropy(hidden, weight, labels, row_weights=row_weights / 1000)
    once, scaled = (torch.autograd.grad(total * by, [hidden, weight], retain_graph=True) for by in (1, factor))
    for gradient, found in zip(once, scaled, strict=True):
        assert torch.equal(found, (gradient.float() * factor).to(dtype))
        assert torch.isfinite(found).all()


def test_large_logits_stay_finite():
    """Catches a softmax without its maximum taken out, and a likelihood that underflows to -log 0."""
    hidden, weight, labels = torch.tensor([[1.0]]), torch.tensor([[500.0], [-500.0]]), torch.tensor([1])
    assert cross_entropy(hidden, weight, labels)[0] == 1000
    level = torch.full((2, 1), 1e6)
    assert cross_entropy(hidden, level, labels)[0].item() == pytest.approx(math.log(2))


def test_ignored_rows_cost_and_change_nothing():
    """Catches padding that is multiplied (even NaN must not matter), and a row of zeros taken for a label."""
    hidden, weight, labels, row_weights = random_rows(1)
    with torch.no_grad():
        hidden[labels == IGNORE] = math.nan
    total, nll = cross_entropy(hidden, weight, labels, row_weights=row_weights)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(weight.grad).all()
    assert hidden.grad[labels == IGNORE].abs().max() == nll[labels == IGNORE].abs().max() == 0
    nothing, _ = cross_entropy(hidden, weight, torch.full_like(labels, IGNORE))
    assert nothing == 0
    assert torch.autograd.grad(nothing, weight)[0].abs().max() == 0


@pytest.mark.parametrize(("chunk", "trains_weight"), [(4, True), (4, False), (None, True)])
def test_no_more_logits_than_the_chunk(monkeypatch, chunk, trains_weight):
    """Catches logits of all rows being made anywhere, in forward or backward, and weight gradients nobody asked for."""
    monkeypatch.setattr("nextn.losses.chunked._rows_per_chunk", lambda weight, grad_weight: 6)
    hiddens, weight, tokens = random_batch(4, rows=3)
    weight.requires_grad_(trains_weight)
    with Sizes() as seen:
        mtp_loss(hiddens, weight, Targets(tokens), lam=0.3, chunk=chunk).total.backward()
    logits = [shape for shape in seen.shapes if V in shape and shape not in {(V, H), (H, V)}]
    assert max(math.prod(shape) for shape in logits) == (chunk or 6) * V
    assert ((V, H) in seen.shapes) == trains_weight
    assert (weight.grad is not None) == trains_weight


@pytest.mark.parametrize(
    ("vocabulary", "width", "dtype", "trains_weight", "rows"),
    [
        (1 << 16, 64, torch.float32, False, 256),
        (1 << 16, 64, torch.bfloat16, False, 512),
        (1 << 16, 4096, torch.float32, False, 256),
        (1 << 16, 4096, torch.float32, True, 1024),
        (1 << 16, 64, torch.float32, True, 256),
        (1 << 25, 1, torch.float32, True, 1),
        (1 << 25, 1, torch.float32, False, 1),
    ],
)
def test_rows_of_a_chunk(vocabulary, width, dtype, trains_weight, rows):
    """64 MiB of logits, or a quarter of a weight gradient; a row at least, which may be larger than both."""
    weight = torch.empty(vocabulary, width, dtype=dtype, device="meta")
    assert _rows_per_chunk(weight, weight if trains_weight else None) == rows
    assert tile_rows(1 << 25, dtype, torch.device("cpu")) == 1


def test_a_chunk_is_widened_by_tiles():
    """Catches fp32 logits of a whole bf16 chunk, which would take twice the memory that the chunk was to bound."""
    hidden, weight, *_ = random_rows(0, dtype=torch.bfloat16)
    seen = []

    def objective(logits, rows, wants_grad):
        seen.append((logits.dtype, len(logits), logits.untyped_storage().nbytes()))
        return logits[:, :1].clone(), logits

    work = SelectedRows(torch.arange(12), torch.ones(12, 1), objective, chunk=6, tile=2)
    weighted_sum(hidden, weight, work)
    assert seen == [(torch.float32, 2, 2 * V * 4)] * 6


def test_frozen_hidden_still_trains_the_weight():
    """Catches the weight's gradient being tied to the hidden's."""
    hidden, weight, labels, row_weights = random_rows(5)
    total, _ = cross_entropy(hidden.detach(), weight, labels, row_weights=row_weights)
    expected, _ = naive(hidden, weight, labels, row_weights)
    torch.testing.assert_close(torch.autograd.grad(total, weight), torch.autograd.grad(expected, weight))


def test_no_grad_makes_no_gradient():
    """Catches an evaluation that pays for gradients: under no_grad nothing of their shape may be made."""
    hidden, weight, labels, _ = random_rows(6)
    with Sizes() as seen, torch.no_grad():
        total, nll = cross_entropy(hidden, weight, labels)
    assert not total.requires_grad
    assert not {tuple(weight.shape), tuple(hidden.shape)} & seen.shapes
    torch.testing.assert_close(total, naive(hidden, weight, labels, 1)[0].detach())
    torch.testing.assert_close(total, nll.sum())


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_close_to_fp32(autocast):
    """Catches a scalar summed in bf16 (torch's own chunked loss is 6 % off): value to 1e-3, gradients to 1 %."""
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden, weight, labels, _ = random_rows(7, n=700, dtype=torch.bfloat16, vocabulary=600, width=64)
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    row_weights = torch.full((700,), 1 / 525)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        total, nll = cross_entropy(hidden, weight, labels, row_weights=row_weights, chunk=64)
    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    expected, _ = naive(*exact, labels, row_weights)
    assert total.dtype == nll.dtype == torch.float32
    assert abs(total.item() - expected.item()) < 1e-3
    ours, theirs = torch.autograd.grad(total, [hidden, weight]), torch.autograd.grad(expected, exact)
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == dtype
        assert (got.float() - want).norm() < 0.01 * want.norm()


def test_autocast_multiplies_in_bf16():
    """Catches autocast being ignored, which would cost an fp32 product (7 times slower with AMX)."""
    hidden, weight, labels, _ = random_rows(8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, _ = cross_entropy(hidden, weight, labels)
    same, _ = cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
    assert rounded == same != cross_entropy(hidden, weight, labels)[0]


def test_autocast_leaves_fp64_alone():
    """Catches fp64, in which gradients are checked, being rounded to bf16 under autocast; a wide weight counts, too."""
    hidden, weight, labels, _ = random_rows(8)
    exact, _ = cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cross_entropy(hidden, weight, labels)[0] == exact
    total, nll = cross_entropy(hidden.detach().float(), weight, labels)
    assert total.dtype == nll.dtype == torch.float64


def test_frozen_bf16_weight_under_an_fp32_head():
    """Catches mixed dtypes being refused, or the head's fp32 hidden being rounded to the trunk's bf16."""
    hidden, weight, labels, _ = random_rows(9, dtype=torch.float32)
    weight = weight.detach().bfloat16()
    total, _ = cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(total, naive(hidden, weight.float(), labels, 1)[0])


def test_depth_weights():
    """Catches beta weights that are not normalized to D, so that lambda changes its meaning."""
    assert depth_weights(3) == (1.0, 1.0, 1.0)
    assert depth_weights(2, beta=0.5) == pytest.approx((4 / 3, 2 / 3))
    assert depth_weights(2, beta=1) == (1.0, 1.0)
    assert depth_weights(0, beta=0.6) == ()


@pytest.mark.parametrize("beta", [0, 1.5, math.nan])
def test_bad_depth_weights(beta):
    """Catches a weight that would silently blow up, flip or drop a depth."""
    with pytest.raises(ConfigError, match="beta"):
        depth_weights(2, beta=beta)


@pytest.mark.parametrize(
    ("text", "tokens", "value"),
    [
        ("0.3", 0, 0.3),
        ("0.3", 10**15, 0.3),
        ("0.3,0.1@10e12", 10**13 - 1, 0.3),
        ("0.3,0.1@10e12", 10**13, 0.1),
        ("0.3@0, 0.1@67%, 0@900", 669, 0.3),
        ("0.3@0, 0.1@67%, 0@900", 670, 0.1),
        ("0.3@0, 0.1@67%, 0@900", 2000, 0.0),
        ("0.3, 0.1@33.3%", 332, 0.3),  # 33.3 / 100 * 1000 = 332.99999999999994
    ],
)
def test_lambda_schedule(text, tokens, value):
    """Catches a step taken one token early or late, and a share of the run read as a count."""
    assert LambdaSchedule.parse(text, total=1000).at(tokens) == value


@loop(
    "bad",
    [
        "",
        "x",
        "0.3,",
        "0.3@",
        "-0.1",
        "nan",
        "inf",
        "0.3@5",
        "0.3,0.1",
        "0.3,0.2@9,0.1@9",
        "0.3,0.1@nan",
        "0.3,0.1@inf",
        "0.3,0.1@x%",
    ],
)
def test_bad_lambda_schedule(bad):
    """Catches a typing mistake that would train with another lambda."""
    with pytest.raises(ConfigError, match="lambda"):
        LambdaSchedule.parse(bad, total=1000)


def test_share_needs_a_total():
    """Catches a percentage of nothing being taken as token 0."""
    with pytest.raises(ConfigError, match="unknown length"):
        LambdaSchedule.parse("0.3,0.1@67%")


def loss_of(**changes: object) -> LossReport:
    hiddens, weight, tokens = random_batch(0, depths=1)
    settings = {"hiddens": hiddens, "weight": weight, "targets": Targets(tokens), "lam": 0.3}
    return mtp_loss(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hiddens": [torch.zeros(2, 7, H)] * 2}, r"depth 1 is \(2, 7, 5\)"),
        ({"depth_weights": (1.0, 1.0)}, "2 depth weights for 1 depths"),
        ({"denominator": "mean"}, "'mean' is unknown"),
        ({"denominator": torch.ones(3)}, "2 numbers are needed"),
        ({"chunk": 0}, "chunk 0"),
        ({"weight": [torch.zeros(9, H)]}, "1 lm_head weights for 2 hiddens"),
        ({"weight": [torch.zeros(9, H)] * 3}, "3 lm_head weights for 2 hiddens"),
        ({"hiddens": []}, "for 0 hiddens"),
    ],
)
def test_bad_calls_are_refused(changes, says):
    """Catches a hidden one column too long (a shifted loss) and settings that would be broadcast or ignored."""
    with pytest.raises(ConfigError, match=says):
        loss_of(**changes)


def test_bad_targets_are_refused():
    """Catches a mask of one row broadcast over the batch, a mask of ids, and labels cut short."""
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match="documents"):
        Targets(tokens, documents=tokens[:1])
    with pytest.raises(ConfigError, match="bool"):
        Targets(tokens, mask=tokens)
    with pytest.raises(ConfigError, match="one number per row"):
        cross_entropy(torch.zeros(3, H), torch.zeros(V, H), torch.zeros(2, dtype=torch.long))
