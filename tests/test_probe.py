"""Conventions planted in weights, row or contract of trained heads: the probe names each of them, and nothing else."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny import build, refrain

from nextn.drafting import Contract
from nextn.errors import ConfigError
from nextn.measuring.columns import Text
from nextn.measuring.measure import Plan
from nextn.measuring.probe import Probed, Tried, probe
from nextn.measuring.texts import continued
from nextn.measuring.variants import read_as, variants
from nextn.model import Model

PROMPTS = [row.tolist() for row in refrain(24, 33, seed=10**6)]
DEPTHS = 3


@pytest.fixture(scope="module")
def texts(trained):
    plan = Plan(max_tokens=24, path="plain")
    return {name: continued(trained[name], PROMPTS, plan, 1.0).texts for name in ("glm", "glm_two", "qwen", "v4")}


def other_weights(model, change):
    """A copy whose head was changed in place by `change(head)`; the trunk, and so the texts, stay."""
    head = copy.deepcopy(model.head, {id(model.trunk): model.trunk})
    with torch.no_grad():
        change(head)
    return replace(model, head=head, _engines={})


def gains(by, *roles):
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
    changed, _ = read_as(model, Contract(), [])
    changed.trunk.stage = facts.get("hidden", model.family.hidden)
    family = replace(model.family, **facts)
    for part in (changed.head, *changed.head.stack):
        part.family = family
    return replace(changed, family=family)


# what is planted: (fixture, how, the contract, the reading that undoes it)
PLANTED = {
    "gains stored as w - 1": ("glm", lambda m: other_weights(m, gains(-1)), {}, "gain:all:+1"),
    "gain stored as 1 + w": ("qwen", lambda m: other_weights(m, gains(1, "token_norm")), {}, "gain:token_norm:-1"),
    "gains read as w": ("qwen", lambda m: other_weights(m, gains(-1)), {}, "gain:all:+1"),
    "one gain less": ("qwen", lambda m: other_weights(m, gains(-1, "hidden_norm")), {}, "gain:hidden_norm:+1"),
    "another gain less": ("glm", lambda m: other_weights(m, gains(-1, "token_norm")), {}, "gain:token_norm:+1"),
    "final gain less": ("qwen", lambda m: other_weights(m, gains(-1, "final_norm")), {}, "gain:final_norm:+1"),
    "halves": ("glm", lambda m: other_weights(m, halves), {}, "concat"),
    "projections": ("v4", lambda m: other_weights(m, projections), {}, "concat"),
    "pre-norm row": ("glm", lambda m: misread(m, hidden="pre"), {}, "hidden"),
    "pre-norm handed on": ("glm", lambda m: misread(m, recycled="pre"), {}, "recycled"),
    "position 0": ("glm", lambda m: misread(m, position0="zero"), {}, "position0"),
    "no prefill": ("qwen", lambda m: m, {"prefill": False}, "prefill"),
    "offset": ("glm", lambda m: m, {"offset": -1}, "offset:+0"),
    "later offset": ("qwen", lambda m: m, {"offset": 1}, "offset:+0"),
    "module order": ("glm_two", lambda m: other_weights(m, exchanged), {}, "order:2-1"),
    "unchained": ("glm_two", lambda m: misread(m, order="unchained"), {}, "chained"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_probe_names_what_was_planted(planted, trained, texts):
    name, plant, contract, wanted = PLANTED[planted]
    found = probe(plant(trained[name]), texts[name], DEPTHS, contract=Contract(**contract), pairs=False)
    assert found.wanted.keys == (wanted,), (found.words, [each.keys for each in found.ties])
    assert not found.agrees
    assert "the weights want" in found.words
    assert found.over(found.wanted, found.base).low > 0


@pytest.mark.parametrize("name", ["glm", "glm_two", "qwen", "v4"])
def test_right_weights_want_their_row(name, trained, texts):
    found = probe(trained[name], texts[name], DEPTHS, pairs=False)
    assert found.agrees, found.words
    assert "the family's reading is the best" in found.words
    harmful = {each.keys[0] for each in found.tried if found.beats(found.base, each)}
    assert {"concat", "offset:-1", "gain:all:-1"} <= harmful
    assert harmful.isdisjoint({each.keys[0] for each in found.ties})


def test_two_at_once(trained, texts):
    """Neither alone would do."""
    model = other_weights(misread(trained["glm"], position0="zero"), halves)
    found = probe(model, texts["glm"], 2)
    assert set(found.wanted.keys) == {"position0", "concat"}
    assert found.partial > 50
    assert " and " in found.wanted.says


def test_a_second_module_that_was_never_trained(trained, texts):
    """Every depth wants the first."""

    def untrained(head):
        for value in head.stack[1].parameters():
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * 0.05)

    config = trained["glm"].trunk.config.to_dict() | {"num_nextn_predict_layers": 2}
    model = replace(Model.build(config, num_modules=2), trunk=trained["glm"].trunk)
    model.head._trunk = (trained["glm"].trunk,)
    model.head.stack[0].load_state_dict(trained["glm"].head.stack[0].state_dict())
    model = other_weights(model, untrained)
    found = probe(model, texts["glm"], DEPTHS, pairs=False)
    assert found.wanted.keys in (("order:one",), ("order:first",))


def test_a_stored_copy_that_is_the_heads_own(trained, texts):
    """An output head of the head's own, of which the trunk's is the opposite."""
    model = other_weights(trained["glm"], lambda head: head.stack[0].final_norm.weight.neg_())
    copies = {"0.output.weight": -model.trunk.output.weight.detach()}
    found = probe(model, texts["glm"], 1, copies=copies, pairs=False)
    assert found.wanted.keys == ("own:output",)
    without = probe(model, texts["glm"], 1, pairs=False)
    assert "no reading works" in without.words


def test_no_reading_helps_noise(texts, trained):
    model = replace(build("glm4_moe", vocab_size=48), trunk=trained["glm"].trunk)
    noise = other_weights(trained["glm"], lambda head: [value.normal_(0, 0.05) for value in head.parameters()])
    found = probe(noise, texts["glm"][:8], 2, pairs=False)
    assert "no reading works" in found.words
    assert model.head is not None


def test_variants_leave_the_model_alone(trained, texts):
    """Copies share every tensor, and the model reads as before."""
    model = trained["glm_two"]
    before = {name: value.clone() for name, value in model.head.state_dict().items()}
    stage, family = model.trunk.stage, model.head.family
    size = sum(value.numel() for value in model.head.parameters())
    for variant in variants(model, Contract()):
        changed, _ = read_as(model, Contract(), [variant])
        ours = {value.data_ptr() for value in model.head.parameters()}
        new = sum(value.numel() for value in changed.head.parameters() if value.data_ptr() not in ours)
        assert new < size / 10, variant.key
    assert all(torch.equal(value, before[name]) for name, value in model.head.state_dict().items())
    assert (model.trunk.stage, model.head.family) == (stage, family)


@pytest.mark.parametrize("name", ["qwen4_exp", "step3p5", "mimo_v2", "longcat_flash", "exaone4_5", "hy_v4"])
def test_every_variant_of_every_kind_of_head_runs(name):
    """Streams, own output heads, several modules, stepped heads: all readings are scored."""
    model = build(name, modules=2 if name in ("mimo_v2", "exaone4_5") else 1)
    texts = [Text((1, 2, 3), (4, 5, 6, 7), 1.0), Text((3, 2), (9, 8, 7, 6, 5), 1.0)]
    found = probe(model, texts, 2, pairs=False)
    assert len(found.tried) == len(variants(model, Contract()))
    assert found.as_record()["comparisons"] == len(found.tried)


def test_verdicts_by_hand():
    """The fewest changes that the best does not beat; a tie is told as one."""
    base = Tried((), "as is", (0.1,), (1.0,) * 8, (10,) * 8)
    good = Tried(("a",), "a", (0.5,), (5.0, 5.1) * 4, (10,) * 8)
    same = Tried(("b",), "b", (0.5,), (4.9, 5.1) * 4, (10,) * 8)
    both = Tried(("a", "c"), "a and c", (0.5,), (5.1, 5.1) * 4, (10,) * 8)
    found = Probed(base, (both, good, same), 0)
    assert found.wanted == good
    assert found.ties == (same,)
    better = Tried(("a", "c"), "a and c", (0.9,), (9.1, 9.0) * 4, (10,) * 8)
    assert Probed(base, (better, good, same), 0).wanted == better
    assert Probed(good, (base,), 0).agrees is False  # keys tell which one is the family's
    assert Probed(base, (), 0).agrees


def test_greedy_texts_are_refused(trained):
    with pytest.raises(ConfigError, match="sampled texts"):
        probe(trained["glm"], [Text((1,), (2, 3, 4))], 2)
