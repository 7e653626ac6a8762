"""Texts that exist: their continuation, parts and engine, limits, and whether the trunk can have written them."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chats import chatty, said
from quick import loop
from tiny import refrain

from nextn.errors import ConfigError
from nextn.evaluate.engine_probe import EngineFolder, EngineProbe
from nextn.evaluate.given_texts import TextOrigin, full_text_outputs, part_counts, read_texts, text_origin, think_tokens
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.teacher_forced import ReferenceText, ScoredText, Survival


@pytest.fixture
def trunk(trained):
    return trained["glm"].trunk


def records(tmp_path, *lines, name="texts.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_answers_say_their_temperature_and_how_they_ended(trunk, tmp_path):
    header = {"nextn": "answers", "settings": {"sampling": {"temperature": 0.7}}}
    answers = [{"prompt": [1, 2], "tokens": [3, 4, 5, 6], "finish": finish} for finish in ("eos", "length")]
    path = records(tmp_path, header, *answers, {"prompt": [1], "tokens": [*range(20)], "finish": "eos", "domain": "d"})
    given = read_texts(path, trunk, None, max_tokens=8)
    assert given.texts[0] == ReferenceText((1, 2), (3, 4, 5, 6), 0.7, ended=True)
    assert not given.texts[1].ended
    assert given.texts[2] == ReferenceText((1,), tuple(range(8)), 0.7)  # cut, so it has not ended
    assert given.domains == ("own", "own", "d")
    assert given.num_tokens == 6 + 6 + 9


def test_last_turn_of_a_conversation_is_the_continuation(trained, tmp_path):
    """And all of a plain text but its first token."""
    tokenizer, trunk = chatty(), _Wide(trained["glm"].trunk)
    chat = {"messages": said(("user", "one"), ("assistant", "first"), ("user", "two"), ("assistant", "second"))}
    given = read_texts(records(tmp_path, chat, {"text": "plain"}), trunk, tokenizer, temperature=1.0)
    assert tokenizer.decode(given.texts[0].new).startswith("second")
    assert "first" in tokenizer.decode(given.texts[0].prompt)
    assert given.texts[1] == ReferenceText((ord("p"),), tuple(b"lain"), 1.0)
    (tmp_path / "a.txt").write_text("some text")
    assert len(read_texts(tmp_path / "a.txt", trunk, tokenizer, temperature=1.0).texts[0].new) == 8


def test_a_continuation_of_no_prompt_begins_after_its_first_token(trunk, tmp_path):
    """Nothing predicts that one; such records are texts of a base model, or of an empty prompt."""
    given = read_texts(records(tmp_path, {"prompt": [], "tokens": [3, 4, 5, 6]}), trunk, None, temperature=0.0)
    assert given.texts == (ReferenceText((3,), (4, 5, 6), 0.0),)
    assert text_origin(trunk, given.texts, full_text_outputs(trunk, given.texts)).num_tokens == 3


class _Wide:
    """A vocabulary of bytes."""

    def __init__(self, trunk):
        self.vocab_size, self.max_length = 264, trunk.max_length


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": [1], "tokens": [3, 4, 99]}, "token 99 is not in the model's vocabulary of 48"),
        ({"text": "abc"}, "the checkpoint has no tokenizer"),
        ({"prompt": [1], "tokens": [3, 4]}, "none of its 1 texts has three new tokens"),
    ],
)
def test_texts_that_cannot_be_used(trunk, tmp_path, record, message):
    with pytest.raises(ConfigError, match=message):
        read_texts(records(tmp_path, record), trunk, None, temperature=0.0)


def test_own_and_foreign_text_are_distinguished(trained):
    """By greedy agreement, and by the likelihood of sampled text."""
    trunk, prompts = trained["glm"].trunk, refrain(8, 33, seed=5).tolist()
    generator = torch.Generator().manual_seed(0)
    texts = {"greedy": [], "sampled": [], "random": []}
    for prompt in prompts:
        rows = {name: list(prompt) for name in texts}
        for _ in range(24):
            for name, row in rows.items():
                logits = trunk.logits(trunk(torch.tensor([row])).final_hidden[0, -1]).detach()
                probs = logits.softmax(-1) if name == "sampled" else torch.ones(trunk.vocab_size)
                chosen = logits.argmax() if name == "greedy" else torch.multinomial(probs, 1, generator=generator)[0]
                row.append(int(chosen))
        for name, row in rows.items():
            new = tuple(row[len(prompt) :])
            texts[name].append(ReferenceText(tuple(prompt), new, 0.0 if name == "greedy" else 1.0))
    origins = {name: text_origin(trunk, each, full_text_outputs(trunk, each)) for name, each in texts.items()}
    assert origins["greedy"].agreement == 1.0
    assert abs(origins["sampled"].excess) < 4 * origins["sampled"].error
    assert origins["random"].excess > 1
    assert [origins[name].is_own for name in texts] == [True, True, False]
    assert "nats less likely" in origins["random"].warnings[0]
    foreign = [ReferenceText(text.prompt, text.new) for text in texts["random"]]
    assert text_origin(trunk, foreign, full_text_outputs(trunk, foreign)).agreement < 0.5
    assert not origins["greedy"].warnings


def test_a_report_names_the_temperature_whose_text_is_foreign():
    origins = {0.0: TextOrigin(100, 1.0, None, None), 0.5: TextOrigin(100, None, 2.0, 0.1)}
    (warning,) = ReferenceReport.origin_warnings.fget(SimpleNamespace(origins=origins))
    assert "temperature 0.5" in warning


def test_threshold_of_sampled_text():
    """Four standard errors, or a twentieth of a nat where there is so much text that these are less."""
    assert TextOrigin(100, None, 0.3, 0.1).is_own
    assert not TextOrigin(100, None, 0.5, 0.1).is_own
    assert TextOrigin(10**6, None, 0.04, 0.001).is_own
    assert not TextOrigin(10**6, None, 0.06, 0.001).is_own
    assert math.isclose(TextOrigin(5, None, 0.2, 0.1).as_record()["excess"], 0.2)


class Tokenizer:
    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def get_vocab(self):
        return self.vocabulary


def scored(prompt, new, k=2):
    text = ReferenceText(tuple(prompt), tuple(new))
    generator = torch.Generator().manual_seed(len(new))
    given = (torch.rand(len(text.remaining), k + 1, generator=generator) < 0.6).double().cumprod(1)
    given[:, 0] = 1
    survivals = {"greedy": Survival(given, given[:, 1:])}
    return ScoredText(text, survivals, torch.zeros(0), torch.zeros(0))


def check_sum(found, parts):
    """The parts of one kind hold every round once."""
    whole = found.survivals["greedy"].round_counts(found.remaining, 2)
    for side in (0, 1):
        sums = [sum(part[side][depth] for part in parts.values()) for depth in range(2)]
        torch.testing.assert_close(sums, whole[side])


def test_bands_hold_every_round_once():
    found = scored([1] * 2040, [2] * 30)
    parts = part_counts(found, "greedy", 2, None)
    assert list(parts) == ["context 0-2k", "context 2k-8k"]
    check_sum(found, parts)
    early = found.survivals["greedy"].counts_by_start(found.remaining, 2)[0][:8].sum(0).tolist()
    assert parts["context 0-2k"][0] == early  # eight tokens are written before 2048 are in the cache
    assert list(part_counts(scored([1] * 140_000, [2] * 4), "greedy", 2, None)) == ["context 128k and more"]


def test_thinking_and_answer():
    """Opened by the template or by the model; what is behind the closing tag is the answer."""
    for prompt, new in (([5, 7], [1, 1, 1, 8, 2, 2, 2, 2]), ([5], [7, 1, 1, 8, 2, 2, 2, 2])):
        found = scored(prompt, new)
        parts = {part: each for part, each in part_counts(found, "greedy", 2, (7, 8)).items() if "context" not in part}
        assert list(parts) == ["thinking", "answer"]
        check_sum(found, parts)
        early = found.survivals["greedy"].counts_by_start(found.remaining, 2)[0][:3].sum(0).tolist()
        assert parts["thinking"][0] == early
    assert "thinking" not in part_counts(scored([7, 8], [1, 2, 3, 4]), "greedy", 2, (7, 8))
    assert "answer" not in part_counts(scored([5], [1, 2, 3, 4]), "greedy", 2, None)


def test_tags_that_are_tokens():
    assert think_tokens(Tokenizer({"<think>": 7, "</think>": 8})) == (7, 8)
    assert think_tokens(Tokenizer({"</think>": 8})) is None
    assert think_tokens(None) is None


def test_a_text_without_rounds():
    assert part_counts(scored([1], [2]), "greedy", 2, (7, 8)) == {}


PROBE = EngineProbe((1, 2), "abc", tuple(range(10, 20)), tuple(-0.1 * place for place in range(10)))


def shifted(amount, **changes):
    return replace(PROBE, logprobs=tuple(value + amount for value in PROBE.logprobs), **changes)


@loop(
    ("other", "is_same"),
    [
        (PROBE, True),
        (shifted(0.01), True),  # another batch
        (shifted(0.05), False),
        (replace(PROBE, prompt=(1, 3)), False),
        (shifted(0.01, ids=(*range(10, 18), 5, 6)), True),  # parted at a near tie
        (replace(PROBE, ids=(*range(10, 18), 5, 6), logprobs=(*PROBE.logprobs[:8], -1.4, -0.1)), False),  # not near
        (shifted(0.0, ids=(*range(10, 14), *range(50, 56))), False),  # too early to say
        (replace(PROBE, ids=PROBE.ids[:8], logprobs=PROBE.logprobs[:8]), False),  # ended early
        (EngineProbe((1, 2), "abc"), False),
    ],
)
def test_same_weights(other, is_same):
    assert PROBE.is_same_as(other) is other.is_same_as(PROBE) is is_same


def test_texts_are_compared_where_there_are_no_log_probabilities():
    one = EngineProbe((1, 2), "abc")
    assert one.is_same_as(EngineProbe((1, 2), "abc"))
    assert not one.is_same_as(EngineProbe((1, 2), "abd"))


def test_answers_of_other_weights_are_removed(tmp_path):
    folder = EngineFolder(tmp_path / "answers", PROBE)
    (folder.path / "0.jsonl").write_text("{}")
    again = EngineFolder(tmp_path / "answers", shifted(0.01))
    assert (again.was_cleared, again.probe) == (False, PROBE)  # so that the texts, and the states of them, are the same
    assert (folder.path / "0.jsonl").exists()
    other = EngineFolder(tmp_path / "answers", shifted(0.05))
    assert (other.was_cleared, other.probe) == (True, shifted(0.05))
    assert [path.name for path in folder.path.iterdir()] == ["probe.json"]
    assert EngineFolder(tmp_path / "answers", shifted(0.05)).probe == shifted(0.05)


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"prompt": 1, "ids": 2, "logprobs": 3, "text": ""})])
def test_answers_without_a_readable_probe_are_removed(text, tmp_path):
    (tmp_path / "probe.json").write_text(text)
    (tmp_path / "0.jsonl").write_text("{}")
    assert EngineFolder(tmp_path, PROBE).probe == PROBE
    assert not (tmp_path / "0.jsonl").exists()
