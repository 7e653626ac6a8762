"""Text in, text out: streaming, stop strings, unfinished characters, results."""

from collections import Counter

import pytest
import torch
from tiny import build

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.decoding.generate import TextStream, encode, eos_tokens, generate, stream
from nextn.errors import ConfigError
from nextn.settings import Settings
from nextn.speculative.draft_vocabulary import DraftVocabulary


@pytest.fixture(scope="module")
def model():
    made = build("glm4_moe", vocab_size=264)
    made.tokenizer = byte_tokenizer()
    return made


def test_stream_adds_up_to_generate(model):
    """The pieces of a stream are the whole text, for each row of a batch."""
    settings = Settings(num_speculative_tokens=3, max_tokens=24)
    results = generate(model, ["def f(", "x"], settings)
    pieces = ["", ""]
    for chunk in stream(model, ["def f(", "x"], settings):
        pieces[chunk.row] += chunk.text
    assert pieces == [result.text for result in results]
    assert all(len(result.tokens) == 24 and result.finish == "length" for result in results)


def test_drafts_do_not_change_the_text(model):
    plain, mtp = (generate(model, ["abc"], Settings(num_speculative_tokens=k, max_tokens=20))[0] for k in (0, 4))
    assert plain.text == mtp.text
    assert plain.acceptance.num_rounds == 0
    assert mtp.acceptance.num_rounds == sum(bool(part.drafts) for part in mtp.rounds)


def scripted(tokens, stops, size):
    """What TextStream says when tokens arrive `size` at a time."""
    text, said = TextStream(byte_tokenizer(), stops), []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        said.append(text.push(part, (), last=start + size >= len(tokens)))
    return said


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_come_whole(size):
    """A character of several bytes is held back until it is whole; nothing is said twice or lost."""
    text = "naïve ✓ 🙂 end"
    said = scripted(list(text.encode()), [], size)
    assert "".join(said) == text
    assert not any("\ufffd" in part for part in said)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_stop_strings_never_show(size):
    """The text ends before the stop string, also when it arrives in pieces; a mere beginning of it is said later."""
    said = scripted(list(b"one <en two <end> three"), ["<end>"], size)
    assert "".join(said) == "one <en two "
    assert "".join(scripted(list(b"one <en"), ["<end>"], size)) == "one <en"


def test_stop_counts_tokens_exactly():
    """stop_after names the first token count whose text holds a stop string."""
    text = TextStream(byte_tokenizer(), ["\n\n", "zz"])
    assert text.stop_after(list(b"ab")) is None
    assert text.stop_after(list(b"ab\n\ncdzz")) == 4


def test_stop_string_ends_the_row(model):
    settings = Settings(num_speculative_tokens=4, max_tokens=40)
    whole = generate(model, ["abc"], settings)[0]
    stop = whole.text[5:7]
    result = generate(model, ["abc"], settings, stop=[stop])[0]
    assert result.finish == "stop"
    assert result.text == whole.text[: whole.text.index(stop)]
    assert len(result.tokens) < 40


def test_bad_requests(model):
    with pytest.raises(ConfigError, match="stop string is empty"):
        generate(model, ["a"], Settings(), stop=[""])
    with pytest.raises(ConfigError, match="prompt 0 is empty"):
        generate(model, [""], Settings())
    with pytest.raises(ConfigError, match="no chat template"):
        generate(model, ["a"], Settings(), chat=True)
    with pytest.raises(ConfigError, match="no tokenizer"):
        generate(build("glm4_moe"), ["a"], Settings())


def test_the_checkpoints_eos_ends_a_text(model):
    """Without eos in the settings the checkpoint's own ends the text, and is not shown; eos = () ignores it."""
    whole = generate(model, ["abc"], Settings(num_speculative_tokens=2, max_tokens=12, eos=()))[0]
    config = model.trunk.model.generation_config
    config.eos_token_id, before = whole.tokens[4], config.eos_token_id
    try:
        result = generate(model, ["abc"], Settings(num_speculative_tokens=2, max_tokens=12))[0]
    finally:
        config.eos_token_id = before
    assert result.finish == "eos"
    assert result.tokens == whole.tokens[: whole.tokens.index(whole.tokens[4]) + 1]


def test_ids_need_no_tokenizer():
    result = generate(build("glm4_moe"), [[1, 2, 3]], Settings(max_tokens=5))[0]
    assert len(result.tokens) == 5
    assert result.text == ""


def test_chat_template(model):
    model.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    try:
        assert bytes(encode(model, "hi", chat=True)) == b"<user>hi<assistant>"
    finally:
        model.tokenizer.chat_template = None


def test_eos_comes_from_the_checkpoint(model):
    assert eos_tokens(model) == (257,)
    made = build("glm4_moe")
    made.trunk.model.generation_config.eos_token_id = [3, 4]
    assert eos_tokens(made) == (3, 4)
    torch.manual_seed(0)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_shortlist_changes_the_drafts_and_not_the_text(trained, backend):
    """Tokens outside are never drafted; the trunk says them all the same."""
    model = trained["glm"]
    settings = Settings(num_speculative_tokens=3, max_tokens=40)
    whole = generate(model, [[3, 1, 4]], settings, backend=backend)[0]
    ids = sorted(Counter(whole.tokens).most_common(2))
    model.head.draft_vocabulary = DraftVocabulary(torch.tensor([token for token, _ in ids]), model.trunk.vocab_size)
    try:
        short = generate(model, [[3, 1, 4]], settings, backend=backend)[0]
    finally:
        model.head.draft_vocabulary = None
    drafts = {token for part in short.rounds for token in part.drafts}
    assert short.tokens == whole.tokens
    assert drafts <= {token for token, _ in ids}
    assert short.acceptance.length < whole.acceptance.length


def test_special_tokens_are_left_out():
    """In the middle of a text, and as its end."""
    tokenizer = byte_tokenizer()
    for skip, expected in ((True, "ab"), (False, f"a{tokenizer.eos_token}b{tokenizer.eos_token}")):
        text = TextStream(tokenizer, (), skip_special_tokens=skip)
        tokens = [ord("a"), tokenizer.eos_token_id, ord("b"), tokenizer.eos_token_id]
        assert "".join(text.push([token], (), last=index == 3) for index, token in enumerate(tokens)) == expected
