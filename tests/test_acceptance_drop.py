"""Two measurements compared: a drop that counts, one that is noise, and records that cannot be compared."""

import copy
import json
import random

import pytest
from quick import loop

from nextn.errors import ConfigError
from nextn.evaluate.acceptance_drop import (
    FALSE_ALARMS,
    AcceptanceChange,
    baseline_note,
    check_number,
    check_settings,
    read_record,
)


def record(rate=0.8, width=0.01, texts=24, **changes):
    figures = {
        "temperature": 0.0, "rule": "greedy", "num_speculative_tokens": 1, "domain": "all", "num_texts": texts,
        "acceptance": [rate], "interval_95": [[rate - width, rate + width]],
        "mean_acceptance_length": {"value": 1 + rate, "low": 1 + rate - width, "high": 1 + rate + width},
    }  # fmt: skip
    settings = {"num_speculative_tokens": 1, "temperatures": [0.0], "max_tokens": 48, "backend": "torch"}
    counts = {"0": {"num": texts, "repetitive": []}}
    record = {"figures": [figures], "hashes": {"prompts": "a"}, "settings": settings, "texts": counts}
    return record | {"perfect_head": {}} | changes


def sampled(rate, ceiling, **changes):
    """A record of rule argmax at temperature 1, beside a greedy one whose texts all repeat themselves."""
    whole = record(rate)
    figures = whole["figures"][0] | {"temperature": 1.0, "rule": "argmax"}
    best = {
        "acceptance": [ceiling], "interval_95": [[ceiling - 0.02, ceiling + 0.02]],
        "mean_acceptance_length": {"value": 1 + ceiling, "low": 0.98 + ceiling, "high": 1.02 + ceiling},
    }  # fmt: skip
    texts = {"0": {"num": 24, "repetitive": list(range(24))}, "1": {"num": 24, "repetitive": [3]}}
    return whole | {"figures": [whole["figures"][0], figures], "texts": texts, "perfect_head": {"1": best}} | changes


def drops(baseline, now, *, source="old.json", limit=0.05):
    return AcceptanceChange.of(baseline, now, source=source, limit=limit).drops


def test_drops():
    """By hand; the interval of the drop has the errors of both, and a gate counts what is above both."""
    rate, length = drops(record(), record(0.72))
    assert (rate.figure, length.figure) == ("a_1", "AL")
    assert rate.value == pytest.approx(0.1)
    assert length.value == pytest.approx(0.08 / 1.8)
    assert rate.half_width == pytest.approx(3.6 / 1.9**2 * ((0.01 / 0.8) ** 2 + (0.01 / 0.72) ** 2) ** 0.5)
    assert rate.change.value == pytest.approx(-0.1)
    assert rate.change.low < -0.1 < rate.change.high < 0
    assert rate.exceeds(0.05)
    assert not rate.exceeds(0.11)
    noisy = drops(record(width=0.08), record(0.74, width=0.08))[0]
    assert noisy.value > 0.05
    assert not noisy.exceeds(0.05)
    assert noisy.texts_needed(0.05) > 24 * 6
    assert rate.texts_needed(0.05) == 24
    assert drops(record(), record(0.9))[0].value < 0


def by_text(*texts, head="h"):
    """A record with (drafted, accepted) of each text; texts that differ much have a wide interval."""
    drafted, accepted = (sum(each[side] for each in texts) for side in (0, 1))
    counts = {str(index): [[drafted], [accepted]] for index, (drafted, accepted) in enumerate(texts)}
    hashes = {"prompts": "a", "head": head, "trunk": "t"}
    return record(accepted / drafted, 0.2, len(texts), by_text={"0": {"greedy": counts}}, hashes=hashes)


def test_texts_of_the_same_prompts_are_compared_one_by_one():
    """How they differ from each other is no noise."""
    texts = [(100, 90), (100, 40), (100, 70), (100, 20)]
    same = AcceptanceChange.of(by_text(*texts), by_text(*texts), source="old.json", limit=0.05)
    assert [drop.half_width for drop in same.drops] == [0, 0]
    assert same.outcome == "kept"
    other = drops(by_text(*texts), by_text(*texts, head="other"))  # that changed no draft: at most 3 of 220, 3 of 620
    assert [drop.half_width for drop in other] == pytest.approx([3 / 220, 3 / 620])
    fell = [(drafted, round(0.9 * accepted)) for drafted, accepted in texts]
    rate, length = drops(by_text(*texts), by_text(*fell, head="other"))
    assert rate.value == pytest.approx(0.1)
    assert rate.half_width == pytest.approx(3 / 198)
    assert rate.exceeds(0.05)
    assert length.half_width < 0.04
    dead = AcceptanceChange.of(
        by_text(*texts), by_text(*((count, 0) for count, _ in texts), head="other"), source="old.json", limit=0.05
    )
    assert dead.drops[0].half_width == pytest.approx(3 / 220)
    assert [drop.label for drop in dead.fallen] == ["greedy a_1", "greedy AL"]
    json.dumps(dead.as_record(), allow_nan=False)
    uneven = [(100, 80), (100, 50), (100, 50), (100, 18)]
    assert 0.1 < drops(by_text(*texts), by_text(*uneven))[0].half_width < 1
    for older in (record(0.55, 0.2, 4), by_text(texts[0])):  # without counts by text, or of one text
        assert drops(older, by_text(*texts))[0].half_width > 0.2
    broken = by_text(*texts) | {"by_text": {"0": {"greedy": {"0": [[1], ["x"]], "1": [[1], [1]]}}}}
    with pytest.raises(ConfigError, match="not a record of this version"):
        drops(broken, by_text(*texts))


@loop(
    ("change", "says"),
    [
        ({"hashes": {"prompts": "b"}}, "other prompts"),
        ({"hashes": {"prompts": "b"}, "prompts": {"sha256": "of another file"}}, "other prompts"),
        ({"hashes": {"prompts": "b"}, "prompts": {"sha256": "of the file"}}, "tokenizers or chat templates differ"),
        ({"settings": record()["settings"] | {"max_tokens": 64}}, "max_tokens 64 against 48"),
        ({"figures": []}, "no figure has an interval"),
        ({"figures": [{"domain": "all"}]}, "not a record of this version"),
        ({"perfect_head": 1}, "not a record of this version"),
        ({"hashes": 1}, "not a record of this version"),
        ({"figures": 1}, "not a record of this version"),
        ({"settings": []}, "not a record"),
        ({"figures": [record()["figures"][0] | {"acceptance": ["0.8"]}]}, "not a record of this version"),
        ({"figures": record(width=1e999)["figures"]}, "not a record of this version"),
    ],
)
def test_records_that_cannot_be_compared(change, says):
    with pytest.raises(ConfigError, match=says):
        drops(record(**change), record(prompts={"sha256": "of the file"}))
    same = copy.deepcopy(record())
    same["settings"]["backend"] = "native"  # does not change what is measured
    assert drops(same, record())
    check_settings(
        record(), record()["settings"] | {"temperatures": (0.0,)}, source="x"
    )  # a tuple here, a list in JSON


def test_a_figure_of_one_text_is_not_compared():
    one = record()
    one["figures"][0]["interval_95"] = [[None, None]]
    assert [drop.figure for drop in drops(one, record())] == ["AL"]


def test_a_head_of_which_nothing_is_accepted_any_more():
    """On one text, whose AL has no interval."""
    now = record(0.0)
    now["figures"][0]["mean_acceptance_length"] = {"value": 1.0, "low": None, "high": None}
    change = AcceptanceChange.of(record(), now, source="old.json", limit=0.05)
    assert (change.outcome, [drop.figure for drop in change.drops]) == ("fell", ["a_1"])
    assert "a perfect head: inf%" in change.conclusion


def test_improvement():
    """By hand: a head that comes as close to the ceiling as before; a flatter trunk is no reason to train."""
    for before, now, ceilings, improvement, choice in (
        (0.8, 0.4, (0.9, 0.81), 0.72 / 0.4 - 1, "T=1 argmax a_1, T=1 argmax AL; train the head"),
        (0.8, 0.4, (0.9, 0.45), 0.0, "T=1 argmax a_1, T=1 argmax AL; training would raise AL by no more"),
        (0.8, 0.8, (0.9, 0.9), 0.0, "keep the head"),
    ):
        records = (sampled(rate, ceiling) for rate, ceiling in zip((before, now), ceilings, strict=True))
        change = AcceptanceChange.of(*records, source="old.json", limit=0.05)
        assert change.degenerate == (0.0,)
        assert [drop.label for drop in change.drops] == ["T=1 argmax a_1", "T=1 argmax AL"]
        rate, length = (drop.improvement for drop in change.drops)
        assert rate.value == pytest.approx(improvement)
        assert (1 + length.value) * (1 + now) == pytest.approx(1 + now * (1 + improvement))
        assert length.low <= length.value < length.high
        assert choice in change.conclusion
        assert ("keep the head" in change.conclusion) == (change.outcome == "kept")
    alone = record() | {"texts": {"0": {"num": 24, "repetitive": list(range(24))}}}
    nothing = AcceptanceChange.of(alone, alone, source="old.json", limit=0.05)
    assert nothing.drops
    assert nothing.conclusion.startswith("inconclusive: most texts are degenerate")
    assert nothing.conclusion.endswith(", or --temperatures 1")
    fell = AcceptanceChange.of(alone, alone | record(0.4, texts=24) | {"texts": alone["texts"]}, source="o", limit=0.05)
    assert fell.conclusion.startswith("inconclusive, though greedy a_1, greedy AL fell")
    assert nothing.outcome == fell.outcome == "inconclusive"
    both = dict.fromkeys("01", alone["texts"]["0"])
    change = AcceptanceChange.of(*(sampled(0.8, 0.9) | {"texts": both} for _ in "ab"), source="old.json", limit=0.05)
    assert change.conclusion.endswith("use other prompts")  # temperature 1 is among what repeats itself


def test_the_improvement_is_of_the_rule_that_fell():
    """Another rule may have more to gain, which is no reason to train for a server of this one."""
    records = []
    for greedy, argmax in ((0.5, 0.8), (0.3, 0.7)):
        each = sampled(argmax, 0.9)
        records.append(each | record(greedy, 0.4) | {"perfect_head": each["perfect_head"]})
        records[-1]["figures"].append(each["figures"][1])
    change = AcceptanceChange.of(*records, source="old.json", limit=0.05)
    assert {drop.rule for drop in change.fallen} == {"argmax"}
    assert max(change.drops, key=lambda drop: drop.improvement.value).rule == "greedy"
    assert change.most_trainable.label == "T=1 argmax AL"
    assert all(f"{drop.label} +{drop.improvement.value:.1%} (" in change.conclusion for drop in change.drops[1::2])


def test_a_deep_draft_alone_is_no_reason_to_train():
    """AL, and so the speed, hardly falls with it."""
    before, now = record(), record()
    for each, deep in ((before, 0.5), (now, 0.4)):
        figures = each["figures"][0]
        figures["num_speculative_tokens"] = each["settings"]["num_speculative_tokens"] = 2
        figures["acceptance"].append(deep)
        figures["interval_95"].append([deep - 0.01, deep + 0.01])
        figures["mean_acceptance_length"] = {"value": 1.9 + deep / 10, "low": 1.9, "high": 2.0}
    change = AcceptanceChange.of(before, now, source="old.json", limit=0.05)
    assert change.outcome == "fell"  # a gate sees it
    assert "greedy a_2; training would raise AL by no more than 5.0%" in change.conclusion
    assert "keep the head" not in change.conclusion


def test_conclusion():
    """Names what fell, the improvement by training, and how many texts would show a drop of the limit."""
    fell = AcceptanceChange.of(record(width=0.2), record(0.4, width=0.01), source="old.json", limit=0.05)
    assert [drop.label for drop in fell.fallen] == ["greedy a_1", "greedy AL"]
    assert "greedy a_1, greedy AL; train the head: expected greedy AL +28.6% (14.3% to 42.9%;" in fell.conclusion
    assert "too few" not in fell.conclusion  # what is decided needs no more texts
    assert [each["fell"] for each in fell.as_record()["figures"]] == [True, True]
    dead = AcceptanceChange.of(record(), record(0.0), source="old.json", limit=0.05).as_record()["figures"]
    assert dead[0]["expected_improvement"] is None
    kept = AcceptanceChange.of(record(), record(), source="old.json", limit=0.05)
    assert "keep the head: no drop exceeds both 5.0% and the noise" in kept.conclusion
    assert (fell.outcome, kept.outcome, kept.as_record()["outcome"]) == ("fell", "kept", "kept")
    unknown = AcceptanceChange.of(record(width=0.3), record(width=0.3), source="old.json", limit=0.05)
    assert (unknown.outcome, unknown.conclusion[:12]) == ("inconclusive", "inconclusive")
    assert "24 texts are too few" in unknown.conclusion
    assert unknown.conclusion.endswith(f"about {unknown.drops[1].texts_needed(0.05)} texts would, of more --prompts")


def test_a_baseline_of_too_few_texts_is_noted():
    """By what a comparison of other texts would say; not of texts that repeat themselves, which say little."""
    noisy = record(width=0.3, by_text={"0": {"greedy": {"0": [[9], [8]], "1": [[9], [8]]}}})
    needed = AcceptanceChange.of(record(width=0.3), record(width=0.3), source="old.json", limit=0.05).drops[1]
    assert f"about {needed.texts_needed(0.05)} texts would" in baseline_note(noisy, 0.05)
    assert not baseline_note(record(), 0.05)
    assert not baseline_note(noisy | {"texts": {"0": {"num": 24, "repetitive": list(range(24))}}}, 0.05)
    single = record(texts=1)
    single["figures"][0]["interval_95"] = [[None, None]]
    single["figures"][0]["mean_acceptance_length"] |= {"low": None, "high": None}
    assert "more prompts" in baseline_note(single, 0.05)


def unchanged(rng, depths, num_texts):
    """A record of a head whose rates differ from text to text, as those of real texts do."""
    texts = {}
    for index in range(num_texts):
        rate, drafted, accepted = rng.betavariate(6, 4), [0] * depths, [0] * depths
        for _ in range(40):
            for depth in range(depths):
                drafted[depth] += 1
                if rng.random() > rate:
                    break
                accepted[depth] += 1
        texts[str(index)] = [drafted, accepted]
    drafted, accepted = (
        [sum(each[side][depth] for each in texts.values()) for depth in range(depths)] for side in (0, 1)
    )
    rates = [some / every for some, every in zip(accepted, drafted, strict=True)]
    length = {"value": 1 + sum(accepted) / drafted[0], "low": 1.0, "high": 3.0}
    whole = record(texts=num_texts, by_text={"0": {"greedy": texts}}, hashes={"prompts": "a", "head": rng.random()})
    whole["settings"]["num_speculative_tokens"] = whole["figures"][0]["num_speculative_tokens"] = depths
    whole["figures"][0] |= {"acceptance": rates, "interval_95": [[0.0, 1.0]] * depths}
    whole["figures"][0] |= {"mean_acceptance_length": length}
    return whole


def test_a_gate_rarely_fails_where_nothing_changed():
    """At most FALSE_ALARMS of the runs, though each figure by itself would in 2.5 % of them."""
    rng, runs, alarms, unwidened = random.Random(0), 400, 0, 0
    for _ in range(runs):
        change = AcceptanceChange.of(*(unchanged(rng, 5, 16) for _ in "ab"), source="old.json", limit=1e-6)
        alarms += change.outcome == "fell"
        unwidened += any(drop.symmetric > drop.half_width for drop in change.drops)
    assert alarms / runs < FALSE_ALARMS
    assert unwidened / runs > FALSE_ALARMS
    assert len(change.drops) == 6


def test_few_texts_decide_nothing():
    """Two texts that changed alike have a small spread by chance; the same weights change nothing at all."""
    texts = [(100, 90), (100, 88), (100, 91), (100, 89)]
    worse = [(drafted, accepted // 2) for drafted, accepted in texts]
    for now in (worse, [(100, 90), (100, 87), (100, 91), (100, 89)]):
        change = AcceptanceChange.of(by_text(*texts), by_text(*now, head="other"), source="old.json", limit=0.05)
        assert change.outcome == "inconclusive"
        assert "greedy a_1 is of 4 texts without repetition, and 5 or more" in change.conclusion
    one_more = ((*texts, (100, 90)), (*worse, (100, 45)))
    assert AcceptanceChange.of(*(by_text(*each) for each in one_more), source="old.json", limit=0.05).outcome == "fell"
    assert "of 4 texts" in baseline_note(by_text(*texts), 0.05)


def test_another_head_of_the_same_trunk_is_put_back():
    """Training would be the long way round."""
    texts = [(100, 90), (100, 88), (100, 91), (100, 89), (100, 85)]
    worse = by_text(*((drafted, accepted // 2) for drafted, accepted in texts), head="other")
    said = AcceptanceChange.of(by_text(*texts), worse, source="old.json", limit=0.05).conclusion
    assert "put the earlier one back (nextn restore MODEL --from BASE --force)" in said
    worse["hashes"]["trunk"] = "another"
    said = AcceptanceChange.of(by_text(*texts), worse, source="old.json", limit=0.05).conclusion
    assert "nextn restore" not in said


def test_a_baseline_of_another_number_of_prompts_is_refused_at_once():
    check_number({"prompts": {"num": 4}}, 4, source="x")
    check_number({}, 4, source="x")  # older
    with pytest.raises(ConfigError, match="measured on 4 prompts, not these 8"):
        check_number({"prompts": {"num": 4}}, 8, source="x")


def test_read_record(tmp_path):
    (tmp_path / "measure.json").write_text(json.dumps(record()))
    assert read_record(tmp_path) == read_record(tmp_path / "measure.json") == record()
    for text, says in (("{", "not JSON"), ("[]", "not a record"), (None, "cannot be read")):
        (tmp_path / "measure.json").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "measure.json").write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_record(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "measure.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=f"to compare with a checkpoint: --against {tmp_path}"):
        read_record(tmp_path)
