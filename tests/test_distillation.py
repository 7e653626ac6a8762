"""The losses of a head against plain autograd: values, gradients, memory, edges, and parts of the vocabulary."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import loop
from sizes import Sizes

from nextn.errors import ConfigError
from nextn.losses.chunked import IGNORE, cross_entropy
from nextn.losses.distillation import OBJECTIVES, head_loss
from nextn.losses.divergences import SampledVocabulary, Teacher
from nextn.losses.mtp_loss import Targets

V, H, W, T, D = 11, 5, 7, 8, 3  # W: the trunk's width, which need not be the head's
EXACT = {"atol": 1e-10, "rtol": 0}


def random_batch(seed, *, rows=2, length=T, depths=D, own=False, dtype=torch.float64, vocabulary=V, width=H, trunk=W):
    """Hiddens by depth, output weight(s) and a teacher, all with gradients, plus tokens."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    hiddens = [draw(rows, length - k, width) for k in range(1, depths + 1)]
    weights = [draw(vocabulary, width) for _ in range(depths)] if own else [draw(vocabulary, width)] * depths
    teacher = Teacher(draw(rows, length, trunk), draw(vocabulary, trunk))
    return hiddens, weights, teacher, torch.randint(0, vocabulary, (rows, length), generator=g)


def divergence(objective, lp, lq, nll):
    """The definitions, of log distributions [..., V]; where q is 0 it is outside of the sums."""
    p, q = lp.exp(), lq.exp()
    alpha = torch.minimum(p, q).sum(-1)
    inside = lq > -math.inf
    kl = (p * (lp - lq)).where(inside, 0).sum(-1)
    lam = (-3 * alpha.detach()).exp()
    return alpha, {
        "ce": nll,
        "kl": kl,
        "reverse-kl": (q * (lq - lp)).where(inside, 0).sum(-1),
        "tv": 1 - alpha,
        "lk": -alpha.log(),
        "lk-hybrid": lam * kl + (1 - lam) * (1 - alpha),
        "e2e-tv": 1 - alpha,
    }[objective]


def naive(hiddens, weights, teacher, targets, *, objective, shares, over, scale):
    """Return the total with its graph, and (sums, overlap, match, nll) by depth."""

    def logits(hidden, weight, cap):
        z = hidden @ weight.T
        return (z if cap is None else cap * (z / cap).tanh()) / teacher.temperature

    distributions = logits(teacher.hidden, teacher.weight, teacher.cap).log_softmax(-1).detach()
    survival, total, report = torch.ones(distributions.shape[:2], dtype=distributions.dtype), 0, []
    for k, (hidden, weight) in enumerate(zip(hiddens, weights, strict=True), start=1):
        labels = targets.labels(k)
        valid = labels != IGNORE
        lp, lq = distributions[:, k:], logits(hidden, weight, teacher.head_cap).log_softmax(-1)
        nll = -lq.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        nll = nll.where(valid, 0)
        alpha, value = divergence(objective, lp, lq, nll)
        if objective == "e2e-tv":
            survival = survival[:, : alpha.shape[1]] * alpha.where(valid, 1)
            value = 1 - survival
        match = (lp.argmax(-1) == lq.argmax(-1)) & valid
        report.append(torch.stack([value.where(valid, 0).sum(), alpha.where(valid, 0).sum(), match.sum(), nll.sum()]))
        if valid.any():
            total = total + scale / len(hiddens) * shares[k - 1] * value.where(valid, 0).sum() / over[k - 1]
    return total, torch.stack(report).detach()


def report_of(loss):
    return torch.stack([loss.sums, loss.overlap, loss.match, loss.nll], dim=1)


def assert_equals_autograd(loss, expected, report, leaves):
    torch.testing.assert_close(loss.total, torch.as_tensor(expected, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(report_of(loss), report, **EXACT)
    ours, theirs = (torch.autograd.grad(each, leaves, materialize_grads=True) for each in (loss.total, expected))
    torch.testing.assert_close(ours, theirs, **EXACT)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_gradients_are_autograd_s(data):
    """Catches a wrong formula, probs, column, document, chain, temperature, weight or denominator in any objective."""
    depths, own = data.draw(st.integers(1, D)), data.draw(st.booleans())
    hiddens, weights, teacher, tokens = random_batch(data.draw(st.integers(0, 99)), depths=depths, own=own)
    caps = [data.draw(st.sampled_from([None, 3.0])) for _ in range(2)]
    teacher = Teacher(teacher.hidden, teacher.weight, data.draw(st.sampled_from([1.0, 0.6])), *caps)
    ids = st.lists(st.integers(0, 2), min_size=2 * T, max_size=2 * T).map(lambda x: torch.tensor(x).view(2, T))
    documents, mask = data.draw(st.none() | ids), data.draw(st.none() | ids)
    targets = Targets(tokens, documents=documents, mask=None if mask is None else mask > 0)
    objective, shares = data.draw(st.sampled_from(OBJECTIVES)), (1.0, 0.0, 0.25)[:depths]
    chosen = data.draw(st.sampled_from(["valid", "tokens", torch.tensor([3, 5, 7])[:depths]]))
    counts = targets.counts(depths).tolist()
    over = {"valid": counts[1:], "tokens": counts[:1] * depths}.get(chosen if isinstance(chosen, str) else "", chosen)
    loss = head_loss(
        hiddens,
        weights if own else weights[0],
        teacher,
        targets,
        objective=objective,
        depth_weights=shares,
        denominator=chosen,
        scale=0.3,
        chunk=data.draw(st.sampled_from([None, 1, 4])),
    )
    assert loss.counts.tolist() == counts[1:]
    expected, report = naive(
        hiddens, weights, teacher, targets, objective=objective, shares=shares, over=over, scale=0.3
    )
    if sum(counts[1:]):
        assert_equals_autograd(loss, expected, report, [*hiddens, *{id(w): w for w in weights}.values()])
    trunk_side = torch.autograd.grad(loss.total, [teacher.hidden, teacher.weight], allow_unused=True)
    assert trunk_side == (None, None)


@loop("objective", OBJECTIVES)
@loop("tile_bytes", [1, 150, 400])
def test_tiles_and_blocks_change_nothing(monkeypatch, objective, tile_bytes):
    """Catches a probs of the wrong column where a tile of rows straddles two blocks of the teacher's probs."""
    hiddens, weights, teacher, tokens = random_batch(1)
    targets = Targets(tokens, mask=torch.rand(2, T, generator=torch.Generator().manual_seed(2)) > 0.3)
    expected, report = naive(
        hiddens, weights, teacher, targets, objective=objective, shares=(1,) * D, over=targets.counts(D)[1:], scale=1
    )
    monkeypatch.setattr("nextn.losses.chunked._tile_bytes", lambda device: tile_bytes)
    loss = head_loss(hiddens, weights[0], teacher, targets, objective=objective)
    assert_equals_autograd(loss, expected, report, [*hiddens, weights[0]])


def test_chain_by_hand():
    """Catches a chain that starts anew at each depth, or that a depth without a label breaks or lengthens."""
    lean = [math.log(3), 0.0]  # the distribution (3/4, 1/4) meets (1/2, 1/2) in 3/4
    teacher = Teacher(torch.zeros(1, 5, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    hiddens = [torch.tensor([[lean] * (5 - k)], dtype=torch.float64).requires_grad_() for k in (1, 2, 3)]
    tokens = torch.zeros(1, 5, dtype=torch.long)
    loss = head_loss(hiddens, teacher.weight, teacher, Targets(tokens), objective="e2e-tv")
    assert loss.counts.tolist() == [3, 2, 1]
    assert loss.sums.tolist() == pytest.approx([3 * (1 - 3 / 4), 2 * (1 - 9 / 16), 1 - 27 / 64])
    assert loss.total.item() == pytest.approx(1 - (3 / 4 + 9 / 16 + 27 / 64) / 3)
    mask = torch.tensor([[True, True, True, False, True]])  # column 0 has depths 1 and 3, column 1 depth 2
    loss = head_loss(hiddens, teacher.weight, teacher, Targets(tokens, mask=mask), objective="e2e-tv")
    assert loss.sums.tolist() == pytest.approx([2 * (1 - 3 / 4), 1 - 3 / 4, 1 - 9 / 16])


@loop("objective", OBJECTIVES[1:])
@loop("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_distributions_have_no_gradient(objective, dtype):
    """Catches ties counted as too low in TV, which moves a head that is perfect, and 0 / 0."""
    _, weights, teacher, tokens = random_batch(5, dtype=dtype, trunk=H)
    states = teacher.hidden.detach().mul(4).round()  # whole numbers: products are exact in any order
    weight = weights[0].detach().mul(2).round()
    hiddens = [states[:, k:].clone().requires_grad_() for k in range(1, D + 1)]
    loss = head_loss(hiddens, weight, Teacher(states, weight), Targets(tokens), objective=objective)
    loss.total.backward()
    assert abs(loss.total.item()) < 1e-6
    assert loss.match.tolist() == loss.counts.tolist()
    tolerance = 1e-5 if objective in ("reverse-kl", "lk-hybrid") else 0  # these round before they take the difference
    assert max(h.grad.abs().max().item() for h in hiddens) <= tolerance


@loop("objective", OBJECTIVES)
@loop("size", [200.0, 1e4, 1e30])
def test_huge_logits_stay_finite(objective, size):
    """Catches p with zeros, an overlap of 0, log 0 and inf - inf: probs that share no token that fp32 can hold."""
    teacher = Teacher(torch.ones(1, 4, 1), torch.tensor([[size], [0.0], [-size]]))
    hiddens = [torch.full((1, 3, 1), -1.0).requires_grad_()]
    loss = head_loss(hiddens, teacher.weight, teacher, Targets(torch.tensor([[0, 1, 2, 0]])), objective=objective)
    loss.total.backward()
    assert math.isfinite(loss.total.item())
    assert torch.isfinite(report_of(loss)).all()
    assert torch.isfinite(hiddens[0].grad).all()
    assert loss.overlap.max() < 1e-6
    if objective == "kl":
        assert loss.total.item() == pytest.approx(2 * size, rel=1e-4)
        assert hiddens[0].grad.sum().item() == pytest.approx(-2 * size, rel=1e-4)


def test_small_overlap_keeps_its_gradient():
    """Catches an eps in -log alpha that silences a head far from its trunk, where TV alone has no gradient left."""
    teacher = Teacher(torch.ones(1, 3, 1), torch.tensor([[40.0], [0.0]]))
    hidden = torch.full((1, 2, 1), -1.0).requires_grad_()
    for objective, pull in (("lk", 20.0), ("tv", 0.0)):  # half of the overlap, 2 exp(-40), is q of token 0
        targets = Targets(torch.zeros(1, 3, dtype=torch.long))
        total = head_loss([hidden], teacher.weight, teacher, targets, objective=objective).total
        assert -torch.autograd.grad(total, hidden)[0].sum().item() == pytest.approx(pull, abs=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nothing_valid_costs_nothing(objective):
    """Catches 0 / 0: rows without a valid label leave loss, report and gradients at 0."""
    hiddens, weights, teacher, tokens = random_batch(7)
    with torch.no_grad():
        teacher.hidden.fill_(math.nan)
    targets = Targets(tokens, mask=torch.zeros(2, T, dtype=torch.bool))
    loss = head_loss(hiddens, weights[0], teacher, targets, objective=objective)
    loss.total.backward()
    assert loss.total == 0
    assert report_of(loss).abs().max() == loss.counts.max() == 0
    assert all(x.grad.abs().max() == 0 for x in (*hiddens, weights[0]))


@loop("objective", OBJECTIVES)
@loop("autocast", [False, True])
def test_bf16_is_close_to_fp32(objective, autocast):
    """Catches sums in bf16 and an autocast that is ignored: value to 1e-3, gradients to 1 %, TV's to 5 %.

    Rounded logits put tokens whose p and q are close on the other side of [q < p].
    """
    dtype = torch.float32 if autocast else torch.bfloat16
    shape = {"rows": 1, "length": 150, "vocabulary": 300, "width": 64, "trunk": 64}
    hiddens, weights, teacher, tokens = random_batch(8, dtype=torch.bfloat16, **shape)
    trunk = teacher.hidden.detach()
    near = [(trunk[:, k:] + h.detach()).to(dtype).requires_grad_() for k, h in enumerate(hiddens, start=1)]
    weight = (weights[0].detach() / 8).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        rounded = Teacher(trunk.to(dtype), weight.detach())
        loss = head_loss(near, weight, rounded, Targets(tokens), objective=objective, chunk=64)
    exact = [x.detach().double().requires_grad_() for x in (*near, weight)]
    whole = Teacher(trunk.double(), weight.detach().double())
    expected = head_loss(exact[:-1], exact[-1], whole, Targets(tokens), objective=objective)
    tolerance = 0.01 if objective in ("ce", "kl", "reverse-kl") else 0.05
    assert loss.total.dtype == loss.sums.dtype == torch.float32
    assert loss.total != expected.total
    torch.testing.assert_close(loss.total.double(), expected.total, atol=0, rtol=1e-3)
    ours = torch.autograd.grad(loss.total, [*near, weight])
    for got, want in zip(ours, torch.autograd.grad(expected.total, exact), strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() < tolerance * want.norm()


@pytest.mark.one_case
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("chunk", "trains_weight"), [(4, True), (4, False), (None, True)])
def test_no_more_logits_than_the_chunk(monkeypatch, objective, chunk, trains_weight):
    """Catches logits or probs of all rows made anywhere, in either pass, and weight gradients nobody asked for."""
    monkeypatch.setattr("nextn.losses.chunked._rows_per_chunk", lambda weight, grad_weight: 6)
    monkeypatch.setattr("nextn.losses.chunked._tile_bytes", lambda device: 4 * V)
    hiddens, weights, teacher, tokens = random_batch(9, rows=3)
    weight = weights[0].detach().requires_grad_(trains_weight)
    frozen = Teacher(teacher.hidden.detach(), teacher.weight.detach())
    with Sizes() as seen:
        head_loss(hiddens, weight, frozen, Targets(tokens), objective=objective, chunk=chunk).total.backward()
    logits = [shape for shape in seen.shapes if V in shape and shape not in {(V, H), (H, V), (V, W), (W, V)}]
    assert max(math.prod(shape) for shape in logits) == (chunk or 6) * V
    assert ((V, H) in seen.shapes) == trains_weight
    assert (weight.grad is not None) == trains_weight


def rows_of_logits(seen):
    """The most rows of anything as wide as the vocabulary."""
    return max(shape[0] for shape in seen.shapes - {(H, V), (W, V)} if shape[1:] == (V,))


@loop("objective", OBJECTIVES)
@loop("chunk", [2, None])
def test_no_more_distributions_than_the_chunk_or_the_text(monkeypatch, objective, chunk):
    """Catches distributions and tiles of as many rows as a cache holds, beside a smaller chunk or text."""
    monkeypatch.setattr("nextn.losses.chunked._tile_bytes", lambda device: 10**6)
    hiddens, weights, teacher, tokens = random_batch(9, rows=3)
    with Sizes() as seen:
        loss = head_loss(hiddens, weights[0].detach(), teacher, Targets(tokens), objective=objective, chunk=chunk)
        loss.total.backward()
    assert rows_of_logits(seen) == (chunk or loss.counts.sum())


@pytest.mark.parametrize("is_recording", [True, False])
def test_passes_of_the_chain(monkeypatch, is_recording):
    """Catches a first pass, for the overlaps alone, that makes gradients as well, and a second one under no_grad."""
    grads, products = [], []
    product = torch.mm
    monkeypatch.setattr("nextn.losses.chunked._add_product", lambda *args: grads.append(1))
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: products.append(1) or product(*args, **kwargs))
    hiddens, weights, teacher, tokens = random_batch(10)
    with torch.set_grad_enabled(is_recording):
        head_loss(hiddens, weights[0], teacher, Targets(tokens), objective="e2e-tv")
    assert (len(grads), len(products)) == ((1, 4) if is_recording else (0, 2))


def test_depths_share_the_teacher_s_distribution(monkeypatch):
    """Catches a distribution made once for each depth, which is the trunk's product and softmax D times over."""
    made = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: made.append(len(args[0])) or product(*args, **kwargs))
    hiddens, weights, teacher, tokens = random_batch(10)
    loss = head_loss([h.detach() for h in hiddens], weights[0].detach(), teacher, Targets(tokens))
    assert sorted(made) == sorted([loss.counts.sum().item(), 2 * (T - 2)])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_grad_makes_no_gradient(objective):
    """Catches an evaluation that pays for gradients: under no_grad none of their shape may be made."""
    hiddens, weights, teacher, tokens = random_batch(11)
    graded = head_loss(hiddens, weights[0], teacher, Targets(tokens), objective=objective)
    with Sizes() as seen, torch.no_grad():
        loss = head_loss(hiddens, weights[0], teacher, Targets(tokens), objective=objective)
    assert not loss.total.requires_grad
    assert tuple(weights[0].shape) not in seen.shapes
    torch.testing.assert_close(loss.total, graded.total.detach())


def test_hard_labels_are_the_training_loss():
    """Catches "ce" drifting from `loss.cross_entropy`, from which the telemetry of scratch training comes."""
    hiddens, weights, teacher, tokens = random_batch(12, depths=1)
    loss = head_loss(hiddens, weights[0], teacher, Targets(tokens), objective="ce")
    total, _ = cross_entropy(hiddens[0].flatten(0, 1), weights[0], Targets(tokens).labels(1).flatten())
    torch.testing.assert_close(loss.sums.sum(), total.detach(), **EXACT)
    torch.testing.assert_close(loss.sums, loss.nll, **EXACT)


@loop(
    ("changes", "says"),
    [
        ({"objective": "js"}, "'js' is unknown. Use one of ce, kl"),
        ({"hiddens": []}, "0 hiddens"),
        ({"hiddens": [torch.zeros(2, T, H)]}, r"depth 1 is \(2, 8, 5\)"),
        ({"weights": [torch.zeros(V, H)] * 2}, "1 hiddens, 2 weights"),
        ({"weights": torch.zeros(V - 1, H)}, "the trunk has 11 tokens"),
        ({"teacher": Teacher(torch.zeros(2, T - 1, H), torch.zeros(V, H))}, "teacher's hidden"),
        ({"teacher": Teacher(torch.zeros(2, T, H), torch.zeros(V, H), 0.0)}, "temperature 0.0"),
        ({"teacher": Teacher(torch.zeros(2, T, H), torch.zeros(V, H), math.inf)}, "temperature inf"),
        ({"depth_weights": (1.0, 1.0)}, "2 depth weights"),
        ({"denominator": "mean"}, "'mean' is unknown"),
        ({"denominator": torch.ones(2)}, "1 numbers are needed"),
        ({"chunk": -1}, "chunk -1"),
    ],
)
def test_bad_calls_are_refused(changes, says):
    """Catches a shifted or broadcast input, and settings that would be ignored."""
    hiddens, weights, teacher, tokens = random_batch(0, depths=1)
    good = {"hiddens": hiddens, "weights": weights[0], "teacher": teacher, "targets": Targets(tokens)}
    with pytest.raises(ConfigError, match=says):
        head_loss(**(good | changes))


def test_every_depth_s_weight_is_looked_at():
    """Catches a deeper output head of another size, which would be read past its end or left in part."""
    hiddens, weights, teacher, tokens = random_batch(0, depths=2, own=True)
    with pytest.raises(ConfigError, match=r"weight is \(10, 5\); the trunk has 11 tokens"):
        head_loss(hiddens, [weights[0], weights[1][1:]], teacher, Targets(tokens))


VOCAB, WIDTH, DEPTHS = 600, 16, 2


def case():
    """A trunk's states, those of a head that resembles it, and tokens that are in neither end of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.8 * torch.randn(VOCAB, WIDTH, generator=generator)
    final = torch.randn(2, 24, WIDTH, generator=generator)
    noise = torch.randn(DEPTHS, 2, 24, WIDTH, generator=generator)
    hiddens = [(0.8 * final + 0.4 * noise[k])[:, k + 1 :].clone().requires_grad_() for k in range(DEPTHS)]
    return weight, final, hiddens, Targets(torch.randint(100, 300, (2, 24), generator=generator))


def sampled_loss(frequent, num_drawn, *, seed=0, temperature=0.8, objective="kl"):
    weight, final, hiddens, targets = case()
    part = SampledVocabulary.of(targets.tokens, frequent, num_drawn, vocab_size=VOCAB, seed=seed)
    inputs, weights = part.inputs([final, *hiddens]), part.weights([weight] * (1 + DEPTHS), temperature)
    assert len({*map(id, weights)}) == 1
    teacher = Teacher(inputs[0], weights[0], temperature)
    loss = head_loss(inputs[1:], weights[1:], teacher, part.targets(targets), objective=objective)
    return loss, torch.autograd.grad(loss.total, hiddens)


def whole_loss(temperature=0.8, objective="kl"):
    weight, final, hiddens, targets = case()
    loss = head_loss(hiddens, weight, Teacher(final, weight, temperature), targets, objective=objective)
    return loss, torch.autograd.grad(loss.total, hiddens)


@loop("objective", ["kl", "tv", "lk-hybrid", "e2e-tv"])
def test_with_every_token_it_is_the_loss_over_the_vocabulary(objective):
    whole, gradients = whole_loss(objective=objective)
    for frequent, num_drawn in ((torch.arange(VOCAB), 0), (torch.arange(50), VOCAB)):
        part, own = sampled_loss(frequent, num_drawn, objective=objective)
        for name in ("total", "sums", "overlap", "nll", "counts", "match"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name))
        torch.testing.assert_close(own, gradients)


def test_sampled_tokens_represent_the_others():
    """Over many draws the loss and its gradient approach those of the vocabulary; without the rest they do not."""
    whole, gradients = whole_loss()
    drawn = [sampled_loss(torch.arange(300), 150, seed=seed) for seed in range(60)]
    loss = torch.stack([each.total for each, _ in drawn]).mean()
    gradient = torch.stack([own[0] for _, own in drawn]).mean(0)
    assert loss.item() == pytest.approx(whole.total.item(), rel=0.03)
    without, own = sampled_loss(torch.arange(300), 0)
    assert abs(without.total - whole.total) > 3 * abs(loss - whole.total)
    assert (gradient - gradients[0]).norm() < 0.3 * (own[0] - gradients[0]).norm()


def test_a_batch_has_one_draw_and_another_batch_another():
    tokens = torch.randint(0, VOCAB, (2, 8))

    def draw(tokens, seed):
        return SampledVocabulary.of(tokens, torch.arange(9), 50, vocab_size=VOCAB, seed=seed).ids

    assert torch.equal(draw(tokens, 0), draw(tokens, 0))
    assert not torch.equal(draw(tokens, 0), draw(tokens, 1))
    assert not torch.equal(draw(tokens, 0), draw(tokens + 1 - (tokens > 99) * 2, 0))
