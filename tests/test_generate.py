"""Text in, text out: streaming, stop strings, results; incremental detokenization against decoding everything."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import build
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.decoding.generate import encode, eos_tokens, generate, stream
from nextn.decoding.text_stream import Detokenizer, TextStream
from nextn.errors import ConfigError
from nextn.settings import Settings
from nextn.speculative.draft_vocabulary import DraftVocabulary

WORDS = ["▁", "▁▁", "▁the", "the", "▁naïve", "▁✓", "🙂", "日", "\n", ".", "<end>", "e", "n", "▁<"]


@pytest.fixture(scope="module")
def model():
    made = build("glm4_moe", vocab_size=264)
    made.tokenizer = byte_tokenizer()
    return made


@pytest.mark.more
def test_stream_adds_up_to_generate(model):
    """The pieces of a stream are the whole text, for each row of a batch."""
    settings = Settings(num_speculative_tokens=3, max_tokens=24)
    results = generate(model, ["def f(", "x"], settings)
    pieces = ["", ""]
    for chunk in stream(model, ["def f(", "x"], settings):
        pieces[chunk.row] += chunk.text
    assert pieces == [result.text for result in results]
    assert all(len(result.tokens) == 24 and result.finish == "length" for result in results)


@pytest.mark.more
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


@pytest.mark.more
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
    made.tokenizer = model.tokenizer  # whose own ends a text as well, as in vLLM
    assert eos_tokens(made) == (3, 4, 257)
    torch.manual_seed(0)


@pytest.mark.more
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_draft_vocabulary_changes_the_drafts_and_not_the_text(trained, backend):
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


def pieces(decoder, *, byte_fallback):
    """A SentencePiece-style vocabulary: specials, bytes, words; ids in this order."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    vocabulary = {token: id for id, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *WORDS])}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=byte_fallback, unk_token="<unk>"))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def llama():
    strip = decoders.Strip(content=" ", left=1, right=0)
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    return pieces(decoders.Sequence(chain), byte_fallback=True)


def gemma():
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return pieces(decoders.Sequence(chain), byte_fallback=True)


def wordpiece():
    words = ["[UNK]", "play", "##ing", "the", "##s", ",", "日"]
    backend = Tokenizer(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def suffixes():
    words = ["<unk>", "the</w>", "th", "e</w>", "</w>", "日</w>", "n"]
    backend = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, [], unk_token="<unk>"))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


MADE = {
    "byte-level": byte_tokenizer(),
    "llama": llama(),
    "gemma": gemma(),
    "metaspace": pieces(decoders.Metaspace(), byte_fallback=False),
    "metaspace, first word only": pieces(decoders.Metaspace(prepend_scheme="first"), byte_fallback=False),
    "wordpiece": wordpiece(),
    "suffixes": suffixes(),
    "pattern": pieces(decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()]), byte_fallback=False),
}
for each in MADE.values():
    each.add_tokens(
        [AddedToken("<tool>", special=True), AddedToken(" é ", special=False), AddedToken("日本", special=False)]
    )


def everything(tokenizer, tokens, *, skip=False):
    return tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def ids(tokenizer):
    """Ids of all kinds, also such as no token has; few of them, so that runs and repetitions are frequent."""
    top = max(tokenizer.get_vocab().values())
    some = st.integers(0, top + 2)
    few = st.lists(some, min_size=1, max_size=6)
    return few.flatmap(lambda chosen: st.lists(st.sampled_from(chosen) | some, max_size=60))


class Everything:
    """The slow twin of `TextStream`: all tokens are decoded again at each question."""

    def __init__(self, tokenizer, stops):
        self.tokenizer, self.stops = tokenizer, stops

    def stop_after(self, tokens):
        counts = range(1, len(tokens) + 1)
        return next((n for n in counts if any(s in everything(self.tokenizer, tokens[:n]) for s in self.stops)), None)

    def text(self, tokens):
        text = everything(self.tokenizer, tokens)
        return text[: min((text.find(stop) for stop in self.stops if stop in text), default=len(text))]


@pytest.mark.one_case
@pytest.mark.parametrize("skip", [False, True], ids=["all", "specials skipped"])
@pytest.mark.parametrize("name", MADE)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_pieces_are_the_whole(name, skip, data):
    """After each round, what is certain and what is pending is the text of all tokens so far."""
    tokenizer = MADE[name]
    tokens, size = data.draw(ids(tokenizer)), data.draw(st.integers(1, 7))
    made, certain = Detokenizer(tokenizer, skip_special_tokens=skip), ""
    for end in range(size, len(tokens) + size, size):
        part, whole = tokens[end - size : end], everything(tokenizer, tokens[:end], skip=skip)
        assert certain + made.peek(part) == whole
        certain += made.push(part)
        assert certain + made.pending == whole


@pytest.mark.more
@pytest.mark.parametrize("name", MADE)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_stop_strings_are_found_where_the_slow_twin_finds_them(name, data):
    tokenizer = MADE[name]
    tokens, size = data.draw(ids(tokenizer)), data.draw(st.integers(1, 7))
    stops = data.draw(st.lists(st.sampled_from(["<end>", "the", "\n", " ", "✓ ", "日本", "e", "ee", "nn"]), max_size=3))
    slow, text = Everything(tokenizer, stops), TextStream(tokenizer, stops)
    said = ""
    for end in range(size, len(tokens) + size, size):
        count = text.stop_after(tokens[:end]) if stops else None
        kept = tokens[: end if count is None else count]
        last = count is not None or end >= len(tokens)
        assert count == slow.stop_after(tokens[:end])
        said += text.push(kept[end - size :], (), last=last)
        if last:
            assert said == slow.text(kept)
            return
        assert slow.text(tokens).startswith(said)


def test_a_stop_string_before_an_invalid_byte_is_found():
    """As when the two tokens come in two rounds; together they are two broken characters."""
    newline_and_byte = [MADE["gemma"].convert_tokens_to_ids(piece) for piece in ("<0x0A>", "<0x80>")]
    assert TextStream(MADE["gemma"], ["\n"]).stop_after(newline_and_byte) == 1


def test_characters_and_spaces_arrive_when_they_are_certain():
    """Llama-style: the first space goes, later ones stay; bytes wait for the token that ends their run."""
    tokenizer = MADE["llama"]
    names = ["▁the", "▁the", "<0xE2>", "<0x9C>", "<0x93>", "<0x0A>", "▁", ".", "</s>", "<tool>", "▁the"]
    made = Detokenizer(tokenizer, skip_special_tokens=True)
    said = [made.push([tokenizer.convert_tokens_to_ids(name)]) for name in names]
    assert said == ["the", " the", "", "", "", "", "✓\n ", ".", "", "", " the"]


def test_one_invalid_byte_breaks_its_run():
    """Why bytes wait: what looked like a whole character is none in the text of all tokens."""
    tokenizer = MADE["llama"]
    made, run = Detokenizer(tokenizer), [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in (0x41, 0xFF)]
    assert made.push(run[:1]) == ""
    assert made.pending == "A"
    assert made.push(run[1:]) == ""
    assert made.push([tokenizer.convert_tokens_to_ids(".")]) == "\ufffd\ufffd."


@pytest.mark.parametrize("first", [1, 33, 64])
@pytest.mark.parametrize("tail", [b"\xf0\x9f" * 70, b"\xe6\x97" * 9 + "日本".encode() * 20], ids=["invalid", "mixed"])
def test_many_tokens_of_one_round_before_broken_characters(first, tail):
    """The text of a round is the context of the next one, however many tokens it has, and nothing of it gets lost."""
    tokenizer, tokens = MADE["byte-level"], [ord("e")] * first + list(tail)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(tokens[:first]), *(stream.push([token]) for token in tokens[first:]), stream.pending]
    assert "".join(pieces) == everything(tokenizer, tokens)


@pytest.mark.parametrize("name", ["byte-level", "gemma"])
def test_the_librarys_own_stream_agrees(name):
    tokenizer, text = MADE[name], "naïve ✓ 🙂🙂 日本 the end\n"
    tokens = list(text.encode()) if name == "byte-level" else [3 + byte for byte in text.encode()]
    tokens.append(tokenizer.convert_tokens_to_ids("<tool>"))
    stream, made = DecodeStream(skip_special_tokens=False), Detokenizer(tokenizer)
    theirs = "".join(stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens)
    assert theirs == "".join(made.push([token]) for token in tokens) == f"{text}<tool>"


@pytest.mark.one_case
@pytest.mark.parametrize("stops", [[], ["<end>"]], ids=["no stops", "stops"])
@pytest.mark.parametrize("data", ["naïve ✓ 🙂 ".encode(), b"\xff", b"\xe2\x9c", b"ab", b"<en"])
def test_work_is_linear(monkeypatch, data, stops):
    """Tokens that the tokenizer decodes, per token of the text: as many in a long text as in a short one."""
    tokenizer, counts = byte_tokenizer(), []
    decode = tokenizer.decode

    def counted(tokens, **options):
        counts[-1] += len(tokens)
        return decode(tokens, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    for length in (1000, 4000):
        tokens, text = list(data * length)[:length], TextStream(tokenizer, stops)
        counts.append(0)
        for start in range(0, length, 4):
            if stops:
                assert text.stop_after(tokens[: start + 4]) is None
            text.push(tokens[start : start + 4], (), last=start + 4 == length)
    assert counts[1] < 4.2 * counts[0]
    assert counts[1] < 60 * 4000
