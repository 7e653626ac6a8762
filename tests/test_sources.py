"""Sources of training data: files, folders, records and data sets; the split of held-out text."""

import builtins
import json
from pathlib import Path

import numpy as np
import pytest
from chats import EOS, chatty, said

from nextn.data.batches import Batches
from nextn.data.sources import load_corpora, path_hashes, read_records, split_by_hash
from nextn.errors import ConfigError

RECORDS = [
    {"messages": said(("user", "question"), ("assistant", "answer"))},
    *({"text": f"text number {number}"} for number in range(20)),
    {"prompt": "p", "completion": "c"},
    {"prompt": [1, 2], "tokens": [3, EOS]},
]


def write(path, items=RECORDS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def documents(corpus):
    """{ids: mask} of the documents, eos included."""
    masks = np.ones(corpus.num_tokens, bool) if corpus.mask is None else corpus.mask
    cuts = [slice(start, start + length) for start, length in zip(corpus.starts, corpus.lengths, strict=True)]
    return {tuple(corpus.ids[cut].tolist()): tuple(masks[cut].tolist()) for cut in cuts}


def without(monkeypatch, *names):
    """As if these packages were not installed."""
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] in names:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_all_of_it_and_nothing_twice(tmp_path):
    """Catches records that are lost between the two sides, and masks that do not stay with their tokens."""
    train, held = load_corpora([write(tmp_path / "a.jsonl")], chatty())
    both = documents(train) | documents(held)
    assert len(documents(train)) + len(documents(held)) == len(both) == len(RECORDS)
    assert min(len(documents(train)), len(documents(held))) >= 1
    asked = b"<u>question<a>"
    assert both[(*asked, *b"answer", EOS)] == (False,) * len(asked) + (True,) * 7
    assert both[(*b"text number 7", EOS)] == (True,) * 14
    assert both[(1, 2, 3, EOS)] == (False, False, True, True)
    assert any(name.endswith("a.jsonl:2") for name in (*train.names, *held.names))


def test_parquet_says_the_same_as_json_lines(tmp_path):
    """Catches columns that parquet fills with nulls being taken for there, and rows lost between batches."""
    import pyarrow
    import pyarrow.parquet

    rows = [item for item in RECORDS if "tokens" not in item]  # "prompt" has one type
    names = ("messages", "text", "prompt", "completion")
    table = pyarrow.Table.from_pylist([{name: item.get(name) for name in names} for item in rows])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    pairs = (load_corpora([path], chatty()) for path in (tmp_path / "a.parquet", write(tmp_path / "a.jsonl", rows)))
    (train, held), (other_train, other_held) = pairs
    assert documents(train) == documents(other_train)
    assert documents(held) == documents(other_held)


def test_a_record_stays_on_its_side(tmp_path):
    """Catches a side that hangs on the place: held-out text that is trained on after lines were added or copied."""
    many = [{"text": str(number)} for number in range(200)]
    _, held = load_corpora([write(tmp_path / "a.jsonl", many)], chatty())
    assert 3 < len(documents(held)) < 20
    more = [*({"text": f"another {number}"} for number in range(20)), *many, *many]
    train, held_more = load_corpora([write(tmp_path / "b.jsonl", more)], chatty())
    assert documents(held).keys() <= documents(held_more).keys()
    assert not documents(train).keys() & documents(held_more).keys()


def test_a_folder_of_everything(tmp_path):
    """Texts, records, sources below a folder; hidden and compiled files stay out; a text's side hangs on its name."""
    write(tmp_path / "data" / "in" / "a.jsonl")
    (tmp_path / "data" / ".git").mkdir()
    (tmp_path / "data" / "in" / "__pycache__").mkdir()
    for name in ("b.txt", "in/c.py", ".hidden", ".git/HEAD", "in/__pycache__/c.pyc"):
        (tmp_path / "data" / name).write_text(f"this is {name}")
    train, held = load_corpora([tmp_path / "data"], chatty())
    found = documents(train) | documents(held)
    assert len(found) == len(RECORDS) + 2
    assert {(*b"this is b.txt", EOS), (*b"this is in/c.py", EOS)} <= found.keys()


def test_one_text_alone_is_cut_between_lines(tmp_path):
    """Catches a single file that cannot be trained on, or whose end is in both sides."""
    text = "".join(f"line {number}\n" for number in range(97))
    (tmp_path / "a.txt").write_text(text)
    train, held = load_corpora([tmp_path / "a.txt"], chatty())
    front, back = bytes(train.ids[:-1].tolist()).decode(), bytes(held.ids[:-1].tolist()).decode()
    assert front + back == text
    assert front.endswith("\n")
    assert 0.02 < len(back) / len(text) < 0.1


def test_masks_are_dealt_like_documents(tmp_path):
    """Catches a mask that is cut at another place than the tokens, or that counts padding."""
    train, _ = load_corpora([write(tmp_path / "a.jsonl")], chatty())
    counts = dict(zip(range(train.num_tokens), train.mask.tolist(), strict=True))
    for pack in (True, False):
        numbered = type(train)(np.arange(train.num_tokens), train.starts, train.names, 10**6, None, train.mask)
        batch = Batches(numbered, batch_size=40, length=16, seed=0, pack=pack).batch(0)
        real = batch.documents >= 0
        assert batch.mask[real].tolist() == [counts[token] for token in batch.tokens[real].tolist()]
        assert not batch.mask[~real].any()
        assert batch.label_mask is batch.mask
        assert real.all() == pack


@pytest.mark.more
def test_a_dataset_folder_by_its_split(tmp_path, monkeypatch):
    """`datasets` really loads it: a folder with a split behind a colon."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "set" / "train.jsonl", RECORDS[1:5])
    write(tmp_path / "set" / "test.jsonl", RECORDS[5:8])
    rows = list(read_records(f"{tmp_path / 'set'}:test"))
    assert [record for _, record in rows] == RECORDS[5:8]
    assert rows[2][0].endswith("set:test[2]")
    with pytest.raises(ConfigError, match=r"split nonsense\): "):
        list(read_records(f"{tmp_path / 'set'}:nonsense"))


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:test", ("org/name", None, "test")),
        ("org/name:small:test", ("org/name", "small", "test")),
        ("org/name:test[:10%]", ("org/name", None, "test[:10%]")),
    ],
)
def test_what_a_dataset_id_asks_for(source, asked, monkeypatch):
    seen = []

    def load(name, config, *, split):
        seen.append((name, config, split))
        return RECORDS

    monkeypatch.setattr("datasets.load_dataset", load)
    train, held = load_corpora([source], chatty())
    assert seen == [asked]
    assert len(documents(train) | documents(held)) == len(RECORDS)


@pytest.mark.parametrize("source", ["nothing.txt", "some/where.jsonl", "name", "org/name:a:b:c", "in/deep.parquet"])
def test_a_mistyped_file_asks_no_hub(source, monkeypatch):
    """Catches a path that does not exist being looked up as a data set."""
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ConfigError, match=rf"^{source}: no such file or folder; expected text files"):
        load_corpora([source], chatty())


def test_errors_of_datasets_are_reported(monkeypatch):
    def load(*_, **__):
        raise FileNotFoundError("Dataset 'org/name' doesn't exist")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(ConfigError, match=r"org/name: no such file .* cannot load it .*doesn't exist"):
        load_corpora(["org/name"], chatty())


def test_missing_packages_explain_themselves(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    without(monkeypatch, "datasets", "pyarrow")
    for source in (tmp_path / "a.parquet", "org/name"):
        with pytest.raises(ConfigError, match="pip install 'datasets>="):
            load_corpora([source], chatty())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3: not JSON"),
        (b'{"text": "a"}\n[1]\n', r"a\.jsonl:2: a JSON list"),
        (b'{"text": "\xff"}\n', r"a\.jsonl:1: not JSON"),
        (b'{"text": "\\ud83d\\ude00"}\n{"text": "a\\uD83D"}\n', r"a\.jsonl:2: not JSON: .*lone surrogate '.ud83d'"),
        (b'{"body": "a"}\n', r"a\.jsonl:1: its columns are body"),
        (b'{"text": ""}\n', "the data is empty"),
        (b"", "the data is empty"),
        (b'{"prompt": [1], "tokens": []}\n', "no token of the data is a label"),
    ],
)
def test_bad_lines_are_named(content, words, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_corpora([tmp_path / "a.jsonl"], chatty())


def test_bad_parquet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ConfigError, match=r"a\.parquet: not a readable parquet file"):
        load_corpora([tmp_path / "a.parquet"], chatty())


def test_an_empty_folder(tmp_path):
    with pytest.raises(ConfigError, match="the data is empty"):
        load_corpora([tmp_path], chatty())


def test_notes_come_with_the_corpus(tmp_path):
    """Catches long conversations that are cut without a word; nothing of them is lost."""
    path = write(tmp_path / "a.jsonl", [RECORDS[0], *RECORDS[:4]])
    train, held = load_corpora([path], chatty(), context=10)
    assert train.notes[0].startswith("2 of 2 conversations are longer")
    assert held.notes == ()
    whole, _ = load_corpora([path], chatty())
    assert (whole.num_tokens, whole.notes) == (train.num_tokens, ())


def by_name(paths, *, held_out):
    return split_by_hash(paths, path_hashes(paths), held_out=held_out)


def test_split_depends_on_names_alone():
    """Catches a split that depends on the folder, the order, Python's salted hash, or what else is there."""
    names = [f"pkg/m{index}.py" for index in range(400)]
    train, held = by_name([Path("/a", name) for name in names], held_out=0.1)
    assert len(train) + len(held) == 400
    assert 20 < len(held) < 60
    moved = by_name([Path("/b/c", name) for name in reversed(names)], held_out=0.1)
    assert {path.name for path in moved[1]} == {path.name for path in held}
    fewer = by_name([Path("/a", name) for name in names[::2]], held_out=0.1)
    assert fewer[1] == [path for path in held if path in {*fewer[0], *fewer[1]}]
    assert [path.name for path in held[:3]] == ["m3.py", "m10.py", "m14.py"]


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_split_leaves_no_side_empty(share):
    """Catches training on nothing, or a held-out figure over no text, when there are few files."""
    train, held = by_name([Path("a.txt"), Path("b.txt"), Path("c.txt")], held_out=share)
    assert min(len(train), len(held)) == 1


def test_divided_keeps_copies_together():
    """Catches a text that is trained on and held out, and a side that stays empty though it need not."""
    assert split_by_hash("abcd", [0.5, 0.01, 0.7, 0.01], held_out=0.05) == (["a", "c"], ["b", "d"])
    assert split_by_hash("abc", [0.9, 0.9, 0.8], held_out=0.05) == (["a", "b"], ["c"])
    assert split_by_hash("abc", [0.0, 0.0, 0.01], held_out=0.5) == (["c"], ["a", "b"])
    assert split_by_hash("ab", [0.3, 0.3], held_out=0.5) == (["a", "b"], [])
