"""Wrong conventions injected into weights, row or contract of trained heads: the probe names exactly these."""

import copy
from dataclasses import replace

import pytest
import torch
from damaged_heads import damaged, stale, undertrained
from quick import others_slow
from tiny import build, forked, refrain

from nextn.errors import ConfigError
from nextn.evaluate.conventions import apply_variants, variants
from nextn.evaluate.probe import ControlScores, ConventionScore, ProbeReport, probe
from nextn.evaluate.reference_texts import generate_texts
from nextn.evaluate.teacher_forced import ReferenceText
from nextn.evaluate.workload import ReferencePlan
from nextn.model.model import Model
from nextn.settings import Contract

PROMPTS = [row.tolist() for row in refrain(12, 33, seed=10**6)]
DEPTHS = 3
FOUR = ("glm", "glm_two", "qwen", "v4")


@pytest.fixture(scope="module")
def texts(trained):
    many = [row.tolist() for row in refrain(24, 33, seed=10**6)]  # glm_two's head is right less often
    return {name: texts_of(trained[name], many if name == "glm_two" else PROMPTS) for name in FOUR}


def texts_of(model, prompts=PROMPTS):
    """Sampled continuations."""
    return generate_texts(model, prompts, ReferencePlan(max_tokens=24, backend="torch"), 1.0).texts


def other_weights(model, change):
    """A copy whose head was changed by `change(head)`; the trunk, and so the texts, do not change."""
    head = copy.deepcopy(model.head, {id(model.trunk): model.trunk})
    with torch.no_grad():
        change(head)
    return replace(model, head=head, backends={})


def norm_weights(by, *roles):
    def change(head):
        for name, value in head.named_parameters():
            if "norm" in name and (not roles or name.split(".")[2] in roles):
                value.add_(by)

    return change


def halves(head):
    for module in head.stack:
        first, second = module.projection.weight.chunk(2, dim=1)
        module.projection.weight.copy_(torch.cat([second, first], dim=1))


def projections(head):
    for module in head.stack:
        first = module.token_projection.weight.clone()
        module.token_projection.weight.copy_(module.hidden_projection.weight)
        module.hidden_projection.weight.copy_(first)


def exchanged(head):
    states = [copy.deepcopy(module.state_dict()) for module in head.stack]
    for module, state in zip(head.stack, reversed(states), strict=True):
        module.load_state_dict(state)


def misread(model, **facts):
    """The weights as they are, under another row."""
    changed, _ = apply_variants(model, Contract(), [])
    changed.trunk.stage = facts.get("hidden", model.family.hidden)
    family = replace(model.family, **facts)
    for part in (changed.head, *changed.head.stack):
        part.family = family
    return replace(changed, family=family)


# fault -> (fixture, how to inject it, contract, key of the variant that undoes it)
INJECTED = {
    "norm weights stored as w - 1": ("glm", lambda m: other_weights(m, norm_weights(-1)), {}, "norm-weight:all:+1"),
    "norm weight stored as 1 + w": (
        "qwen",
        lambda m: other_weights(m, norm_weights(1, "token_norm")),
        {},
        "norm-weight:token_norm:-1",
    ),
    "norm weights read as w": ("qwen", lambda m: other_weights(m, norm_weights(-1)), {}, "norm-weight:all:+1"),
    "one norm weight less": (
        "qwen",
        lambda m: other_weights(m, norm_weights(-1, "hidden_norm")),
        {},
        "norm-weight:hidden_norm:+1",
    ),
    "another norm weight less": (
        "glm",
        lambda m: other_weights(m, norm_weights(-1, "token_norm")),
        {},
        "norm-weight:token_norm:+1",
    ),
    "final norm weight less": (
        "qwen",
        lambda m: other_weights(m, norm_weights(-1, "final_norm")),
        {},
        "norm-weight:final_norm:+1",
    ),
    "halves": ("glm", lambda m: other_weights(m, halves), {}, "concat"),
    "projections": ("v4", lambda m: other_weights(m, projections), {}, "concat"),
    "pre-norm row": ("glm", lambda m: misread(m, hidden="pre"), {}, "hidden"),
    "pre-norm handed on": ("glm", lambda m: misread(m, next_hidden="pre"), {}, "next_hidden"),
    "position 0": ("glm", lambda m: misread(m, position0="zero"), {}, "position0"),
    "no prefill": ("qwen", lambda m: m, {"prefill": False}, "prefill"),
    "offset": ("glm", lambda m: m, {"offset": -1}, "offset:+0"),
    "later offset": ("qwen", lambda m: m, {"offset": 1}, "offset:+0"),
    "module order": ("glm_two", lambda m: other_weights(m, exchanged), {}, "order:2-1"),
    "unchained": ("glm_two", lambda m: misread(m, order="unchained"), {}, "chained"),
}


@pytest.mark.more
@pytest.mark.parametrize("fault", others_slow(INJECTED, "one norm weight less"))
def test_the_probe_names_the_injected_convention(fault, trained, texts):
    name, inject, contract, wanted = INJECTED[fault]
    found = probe(inject(trained[name]), texts[name], DEPTHS, contract=Contract(**contract), pairs=False)
    assert found.preferred.keys == (wanted,), (found.summary, [each.keys for each in found.ties])
    assert not found.agrees
    assert "the weights fit" in found.summary
    assert found.gain(found.preferred, found.base, found.rule).low > 0


# Heads for which some convention gains by rule ratio, beyond chance.
DAMAGED = [
    ("glm", "zeroed norm", 1),
    ("glm", "copied block", 0),
    ("glm_two", "4 bits", 0),
    ("qwen", "2 bits", 0),
    ("qwen", "shuffled rows", 1),
    ("qwen", "copied block", 0),
    ("v4", "noise of 0.4 std", 0),
    ("v4", "zeroed norm", 0),
]


@pytest.mark.more
@pytest.mark.parametrize(("name", "damage", "seed"), others_slow(DAMAGED, DAMAGED[0]))
def test_no_convention_is_blamed_for_damage(name, damage, seed, trained, texts):
    found = probe(damaged(trained[name], damage, seed), texts[name], DEPTHS, pairs=False)
    assert found.outcome != "other", found.summary
    assert found.preferred == found.base


@pytest.mark.parametrize("steps", others_slow([0, 5], 5))
@pytest.mark.slow
def test_no_convention_is_blamed_for_little_training(steps, trained, texts):
    """A fresh head passes the trunk's state on, so the next position's state seems to be what it wants."""
    language = lambda seed: refrain(32, 64, seed=seed + 1)  # noqa: E731
    ((_, model),) = undertrained(trained["glm"], language, (steps,), depths=2)
    assert probe(model, texts["glm"], DEPTHS, pairs=False).outcome != "other"


@pytest.mark.slow
def test_no_convention_is_blamed_for_a_stale_head(trained):
    model = stale(trained["glm"], lambda seed: forked(32, 64, seed=seed, other=0.15), 5)
    assert probe(model, texts_of(model), DEPTHS, pairs=False).outcome != "other"


@pytest.mark.slow
def test_no_convention_is_blamed_where_the_trunk_is_worse_than_the_head(trained):
    """glm_fork's head knows its language better than its trunk, whose distribution is broad."""
    prompts = [row.tolist() for row in forked(12, 33, seed=10**6)]
    found = probe(trained["glm_fork"], texts_of(trained["glm_fork"], prompts), DEPTHS, pairs=False)
    assert found.outcome != "other", found.summary


@pytest.mark.more
@pytest.mark.parametrize("name", others_slow(FOUR, "glm"))
def test_right_weights_want_their_row(name, trained, texts):
    found = probe(trained[name], texts[name], DEPTHS, pairs=False)
    assert found.agrees, found.summary
    assert "the family's convention is the best" in found.summary
    harmful = {each.keys[0] for each in found.alternatives if found.beats(found.base, each)}
    assert {"concat", "offset:-1", "norm-weight:all:-1"} <= harmful
    assert harmful.isdisjoint({each.keys[0] for each in found.ties})


@pytest.mark.slow
def test_two_at_once(trained, texts):
    """Neither alone would do."""
    model = other_weights(misread(trained["glm"], position0="zero"), halves)
    found = probe(model, texts["glm"], 2)
    assert set(found.preferred.keys) == {"position0", "concat"}
    assert found.num_pruned > 50
    assert " and " in found.preferred.description


@pytest.mark.slow
def test_a_second_module_that_was_never_trained(trained, texts):
    """The first MTP layer fits every depth."""

    def untrained(head):
        for value in head.stack[1].parameters():
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * 0.05)

    config = trained["glm"].trunk.config.to_dict() | {"num_nextn_predict_layers": 2}
    model = replace(Model.build(config, num_modules=2), trunk=trained["glm"].trunk)
    model.head._trunk = (trained["glm"].trunk,)
    model.head.stack[0].load_state_dict(trained["glm"].head.stack[0].state_dict())
    model = other_weights(model, untrained)
    found = probe(model, texts["glm"], DEPTHS, pairs=False)
    assert found.preferred.keys in (("order:one",), ("order:first",))


@pytest.mark.slow
def test_a_stored_copy_that_is_the_heads_own(trained, texts):
    """The head's own lm_head, whose weights are the negative of the trunk's."""
    model = other_weights(trained["glm"], lambda head: head.stack[0].final_norm.weight.neg_())
    copies = {"0.output.weight": -model.trunk.output.weight.detach()}
    found = probe(model, texts["glm"], 1, copies=copies, pairs=False)
    assert found.preferred.keys == ("own:output",)
    without = probe(model, texts["glm"], 1, pairs=False)
    assert "no convention works" in without.summary


@pytest.mark.more
def test_no_convention_fits_noise(texts, trained):
    model = replace(build("glm4_moe", vocab_size=48), trunk=trained["glm"].trunk)
    noise = other_weights(trained["glm"], lambda head: [value.normal_(0, 0.05) for value in head.parameters()])
    found = probe(noise, texts["glm"][:8], 2, pairs=False)
    assert "no convention works" in found.summary
    assert model.head is not None


def test_variants_leave_the_model_alone(trained, texts):
    """Copies share every tensor, and the model does not change."""
    model = trained["glm_two"]
    before = {name: value.clone() for name, value in model.head.state_dict().items()}
    stage, family = model.trunk.stage, model.head.family
    size = sum(value.numel() for value in model.head.parameters())
    for variant in variants(model, Contract()):
        changed, _ = apply_variants(model, Contract(), [variant])
        ours = {value.data_ptr() for value in model.head.parameters()}
        new = sum(value.numel() for value in changed.head.parameters() if value.data_ptr() not in ours)
        assert new < size / 10, variant.key
    assert all(torch.equal(value, before[name]) for name, value in model.head.state_dict().items())
    assert (model.trunk.stage, model.head.family) == (stage, family)


@pytest.mark.parametrize(
    "name", others_slow(["qwen4_exp", "step3p5", "mimo_v2", "longcat_flash", "exaone4_5", "hy_v4"], "mimo_v2")
)
def test_every_variant_of_every_kind_of_head_runs(name):
    """Streams, own lm_heads, several MTP layers, stepped heads: all variants are scored."""
    model = build(name, modules=2 if name in ("mimo_v2", "exaone4_5") else 1)
    texts = [ReferenceText((1, 2, 3), (4, 5, 6, 7), 1.0), ReferenceText((3, 2), (9, 8, 7, 6, 5), 1.0)]
    found = probe(model, texts, 2, pairs=False)
    assert len(found.alternatives) == len(variants(model, Contract()))
    assert found.as_record()["comparisons"] == len(found.alternatives)


def score(keys, *accepted, ratio=None):
    """A score of eight texts with ten positions each, by both rules alike if `ratio` is not given."""
    return ConventionScore(
        keys,
        " and ".join(keys) or "as is",
        (0.5,),
        {"argmax": accepted * (8 // len(accepted)), "ratio": (ratio or accepted) * (8 // len(ratio or accepted))},
        (10,) * 8,
    )


def test_preferred_convention_by_hand():
    """The fewest changes that the best does not beat; ties are reported."""
    base, good, same = score((), 1.0), score(("a",), 5.0, 5.1), score(("b",), 4.9, 5.1)
    found = ProbeReport(base, (score(("a", "c"), 5.1), good, same), 0, 0.7)
    assert found.preferred == good
    assert found.ties == (same,)
    better = score(("a", "c"), 9.1, 9.0)
    assert ProbeReport(base, (better, good, same), 0, 0.7).preferred == better
    assert ProbeReport(good, (base,), 0, 0.7).agrees is False  # the keys identify the family's convention
    assert ProbeReport(base, (), 0, 0.7).agrees


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        (1.0, 5.0, "other"),  # what sound weights look like under a wrong convention
        (5.3, 5.0, "other"),  # a control that comes near the right one reaches as much
        (5.5, 5.0, "unexplained"),  # a change without meaning is better
        (1.0, 5.3, "other"),
        (1.0, 5.5, "unexplained"),  # not at an optimum by this convention either
    ],
)
def test_controls_by_hand(before, after, outcome):
    base, good = score((), 1.0), score(("a",), 5.0)
    controls = ControlScores(score(("control",), before), score(("a", "control"), after))
    found = ProbeReport(base, (good,), 0, 0.7, {"argmax": controls})
    assert found.outcome == outcome
    assert found.preferred == (good if outcome == "other" else base)
    assert found.agrees is False
    assert found.is_fault == (outcome == "other")
    assert ("no convention explains this" in found.summary) == (outcome == "unexplained")
    record = found.as_record()
    assert (record["outcome"], record["preferred"]) == (outcome, ["a"] if outcome == "other" else [])
    assert record["best"] == {"argmax": ["a"], "ratio": ["a"]}
    assert record["controls"]["argmax"]["gain_before"] == pytest.approx(before / 10 - 0.1)
    assert record["controls"]["argmax"]["gain_after"] == pytest.approx(after / 10 - 0.5)


def test_a_poor_head_by_hand():
    """A gain beyond all controls, to less than a sound head of this trunk has at depth 1."""
    base, good = score((), 1.0), score(("a",), 5.0)
    controls = ControlScores(score(("c",), 1.0), score(("a", "c"), 5.0))
    assert ProbeReport(base, (good,), 0, 0.74, {"argmax": controls}).outcome == "other"
    found = ProbeReport(base, (good,), 0, 0.76, {"argmax": controls})
    assert found.outcome == "unexplained"
    assert "a_1 is 0.50 with it, and 0.76 in a perfect head" in found.summary


def test_rules_by_hand():
    """What only rule ratio shows is named if rule argmax does not contradict, and controls do not explain it."""
    base = score((), 5.0, ratio=(1.0,))
    few, many = (
        ControlScores(score(("c",), 5.0, ratio=(gain,)), score(("a", "c"), 5.0, ratio=(5.0,))) for gain in (2.0, 7.0)
    )
    sharper, worse = score(("a",), 5.0, ratio=(5.0,)), score(("a",), 4.5, ratio=(5.0,))
    found = ProbeReport(base, (sharper,), 0, 0.7, {"ratio": few})
    assert (found.outcome, found.rule, found.preferred) == ("other", "ratio", sharper)
    assert "by rule ratio" in found.summary
    assert ProbeReport(base, (sharper,), 0, 0.7, {"ratio": many}).agrees
    assert ProbeReport(base, (worse,), 0, 0.7, {"ratio": few}).agrees
    low = ProbeReport(score((), 0.5), (score(("a",), 0.9),), 0, 0.7)
    assert (low.outcome, low.is_fault) == ("nothing-works", True)


def test_greedy_texts_are_refused(trained):
    with pytest.raises(ConfigError, match="sampled texts"):
        probe(trained["glm"], [ReferenceText((1,), (2, 3, 4))], 2)
