"""Texts that exist: which tokens are the continuation, limits, and whether the trunk can have written them."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from chats import chatty, said
from tiny import refrain

from nextn.errors import ConfigError
from nextn.evaluate.given_texts import TextOrigin, full_text_outputs, read_texts, text_origin
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.teacher_forced import ReferenceText


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
