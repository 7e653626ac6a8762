"""Divergence from the model in float32: against a slow twin, on tiny models, on the command line."""

import json
import math

import pytest
import torch
from torch.nn import functional

from nextn.cli.accuracy import accuracy_of
from nextn.cli.model_options import ModelOptions
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.errors import ConfigError
from nextn.evaluate.accuracy import Accuracy, Candidate, Reference, choose_weights, compared_texts, logits_of
from nextn.model.model import Model
from nextn.runtime.backend import backend_for

TEXTS = [[5, 9, 11, 3, 7, 2], [1, 2, 3]]


def slow_figures(reference, candidate, texts):
    """The same figures by torch's own functions, one position at a time."""
    kl, same, ties, surprise = [], [], [], [0.0, 0.0]
    for ours, theirs, text in zip(reference, candidate, texts, strict=True):
        for position, target in enumerate(text[1:]):
            p, q = (each[position].double().log_softmax(-1) for each in (ours, theirs))
            kl.append(float(functional.kl_div(q, p, log_target=True, reduction="sum")))
            same.append(int(p.argmax()) == int(q.argmax()))
            best = theirs[position].sort(descending=True).values
            ties.append(bool(best[0] == best[1]))
            surprise = [total - float(each[target]) for total, each in zip(surprise, (p, q), strict=True)]
    count = len(kl)
    return {
        "positions": count,
        "kl_mean": sum(kl) / count,
        "kl_p99": float(torch.tensor(kl, dtype=torch.float64).quantile(0.99)),
        "same_argmax": sum(same) / count,
        "perplexity_ratio": math.exp((surprise[1] - surprise[0]) / count),
        "perplexity": math.exp(surprise[0] / count),
        "ties": sum(ties) / count,
    }


@pytest.mark.parametrize("block", [1, 2, 64])
def test_figures_equal_those_of_a_slow_twin(block):
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(len(text), 12, generator=generator) for text in TEXTS]
    theirs = [each + 0.3 * torch.randn(each.shape, generator=generator) for each in ours]
    theirs[0][1, 4] = theirs[0][1, 6] = 9.0  # a tie
    reference = Reference(TEXTS, ours, lambda states: states)
    found = reference.compare(lambda text: theirs[TEXTS.index(text)].split(block)).as_record()
    expected = slow_figures(ours, theirs, TEXTS)
    assert expected["ties"] == 1 / 7
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_token_that_the_candidate_rules_out_is_infinitely_far():
    ours = torch.zeros(2, 3)
    theirs = torch.tensor([[0.0, 0.0, -math.inf]]).expand(2, 3)
    found = Reference([[0, 1]], [ours], lambda states: states).compare(lambda text: [theirs])
    assert found.kl_mean == math.inf
    # And one that both rule out counts nothing.
    same = Reference([[0, 1]], [theirs], lambda states: states).compare(lambda text: [theirs])
    assert same.kl_mean == 0


@pytest.mark.parametrize("rows", [[0, 1, 2], [1]], ids=["all", "one"])
def test_a_candidate_of_nan_is_infinitely_far(rows):
    """As weights in float16 that overflow: 0 nats would make them the best of all."""
    ours = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    theirs = ours.clone()
    theirs[rows] = math.nan
    found = Reference([[0, 1, 2, 3]], [ours], lambda states: states).compare(lambda text: [theirs])
    assert (found.kl_mean, found.kl_p99, found.perplexity_ratio) == (math.inf,) * 3
    assert found.as_record() | {"kl_mean": None, "kl_p99": None, "perplexity_ratio": None} == found.as_record()


@pytest.mark.more
def test_a_loaded_and_a_streamed_reference_agree_and_few_bits_are_farther(fixture_folder):
    """The model against itself is exact in both backends; fewer bits are farther, and the blocks' size is no matter."""
    folder = fixture_folder / "glm"
    texts = [list(range(40)) + list(range(3, 47)), list(range(7))]
    loaded = Model.load(folder, dtype=torch.float32, skip_head=True, need_head=False)
    streamed = Model.load(folder, dtype=torch.float32, skip_head=True, need_head=False, stream=True)
    references = [Reference.of(model.trunk, texts) for model in (loaded, streamed)]
    divergences = {}
    for weights, backend in (("stored", "torch"), ("stored", "native"), ("int8", "native"), ("int4", "native")):
        loaded.trunk.weights = weights
        found = [each.compare(logits_of(backend_for(loaded, backend).trunk)) for each in references]
        assert found[0].positions == 89
        assert found[0].kl_mean == pytest.approx(found[1].kl_mean, rel=1e-3, abs=1e-9)
        divergences[weights, backend] = found[0].kl_mean
    assert divergences["stored", "torch"] < 1e-9
    assert divergences["stored", "native"] < 1e-9
    assert 1e-6 < divergences["int8", "native"] < divergences["int4", "native"]


def test_what_cannot_be_compared_is_refused(fixture_folder):
    model = Model.load(fixture_folder / "glm", dtype=torch.float32, skip_head=True, need_head=False)
    size = model.trunk.vocab_size
    for texts, part in (
        ([], "no text"),
        ([[1]], "a text of 1 tokens; expected 2 to"),
        ([[1, size]], f"token {size} is not in the model's vocabulary of {size}"),
    ):
        with pytest.raises(ConfigError, match=part):
            Reference.of(model.trunk, texts)
    with pytest.raises(ConfigError, match="one vocabulary"):
        Reference.of(model.trunk, [[1, 2]]).compare(lambda text: [torch.zeros(2, size + 1)])
    half = Model.load(fixture_folder / "glm", dtype=torch.bfloat16, skip_head=True, need_head=False)
    with pytest.raises(ConfigError, match=r"bfloat16; load it with dtype=torch\.float32"):
        Reference.of(half.trunk, [[1, 2]])


def test_texts_are_the_beginnings_of_documents_first(tmp_path):
    tokenizer = byte_tokenizer()
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "abcdef"}\n{"text": "uvwxyz"}\n')
    decoded = [bytes(text).decode() for text in compared_texts(tokenizer, file, num_tokens=9, context=4).tokens]
    assert decoded == ["abcd", "uvwx"]  # one token is left, which no text consists of
    decoded = [bytes(text).decode() for text in compared_texts(tokenizer, file, num_tokens=11, context=4).tokens]
    assert decoded == ["abcd", "uvwx", "ef"]
    built_in = compared_texts(tokenizer, num_tokens=100, context=50)
    assert [len(text) for text in built_in.tokens] == [50, 50]
    assert built_in.source.startswith("pydoc_data.topics of Python 3.")


def test_texts_that_cannot_be_read_say_what_can(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "abcdef"}\n')
    with pytest.raises(ConfigError, match='only records with "prompt" and "tokens"'):
        compared_texts(None, file)
    with pytest.raises(ConfigError, match="give records of token ids"):
        compared_texts(None)
    file.write_text('{"prompt": [1], "tokens": [2, 3]}\n')
    assert compared_texts(None, file).tokens == ((1, 2, 3),)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(ConfigError, match="no text of two tokens"):
        compared_texts(byte_tokenizer(), empty)


def test_the_fewest_bits_within_the_bound_are_chosen(monkeypatch, fixture_folder):
    """Of two widths, fewer bits first; the weights stay as stored if both diverge more."""
    model = Model.load(fixture_folder / "glm", dtype=torch.float32, skip_head=True, need_head=False)
    reference = Reference.of(model.trunk, [[1, 2, 3]])

    def of(model, reference, *, source, backend):
        divergence = {"int4": 0.2, "int8": 0.02}[model.trunk.weights]
        accuracy = Accuracy(1, divergence, divergence, 1, 1, 1, 0)
        return Candidate(source, model.trunk.weights, backend, "float32", 1, accuracy)

    monkeypatch.setattr(Candidate, "of", of)
    for bound, chosen, compared in ((0.3, "int4", 1), (0.1, "int8", 2), (0.01, "stored", 2)):
        found = choose_weights(model, reference, source="tiny", max_kl=bound)
        assert [each.weights for each in found] == ["int4", "int8"][:compared]
        assert model.trunk.weights == chosen


@pytest.fixture(scope="module")
def few_texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "ids.jsonl"
    file.write_text('{"prompt": [3, 14, 15], "tokens": [9, 26, 5, 35, 8, 9, 7]}\n' * 3)
    return file


@pytest.mark.more
def test_every_way_is_compared(here, fixture_folder, few_texts, tmp_path):
    """Widths and backends of the model, another form of it, and few bits in torch, which has none, left out."""
    folder, other = fixture_folder / "glm", tmp_path / "rounded"
    assert here("quantize", folder, other, "--weights", "int8", "--group-size", 32)[0] == 0
    args = [folder, other, "--texts", few_texts, "--weights", "stored,int8", "--backend", "native,torch", "--json"]
    code, said, complaint = here("accuracy", *args)
    assert code == 0, complaint
    record = json.loads(said)
    ways = [(each["source"], each["weights"], each["backend"]) for each in record["figures"]]
    three = [("stored", "native"), ("stored", "torch"), ("int8", "native")]
    assert ways == [(str(name), *way) for name in (folder, other) for way in three]
    assert record["texts"]["texts"] == 3
    figures = dict(zip(ways, record["figures"], strict=True))
    assert all(each["positions"] == 27 for each in figures.values())
    assert figures[ways[2]]["kl_mean"] > 2 * figures[ways[0]]["kl_mean"]
    assert figures[ways[2]]["step_bytes"] < figures[ways[0]]["step_bytes"]


def test_the_table_has_a_row_for_each_way(here, fixture_folder, few_texts):
    code, said, complaint = here("accuracy", fixture_folder / "glm", "--texts", few_texts, "--weights", "stored,int4")
    assert code == 0, complaint
    rows = [line.split() for line in said.splitlines()]
    assert [row[:3] for row in rows[1:3]] == [["glm", "bfloat16", "native"], ["glm", "int4", "native"]]
    assert said.splitlines()[-1].startswith(f"27 positions of {few_texts}")


@pytest.mark.more
def test_bench_shows_what_few_bits_cost(here, monkeypatch, tmp_path, own_cache):
    """The bundled model: its speed at 4 bits comes with its divergence."""
    monkeypatch.setattr("nextn.cli.accuracy.TOKENS", 100)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(")
    args = ["--repeats", 1, "--max-tokens", 2, "--temperatures", 0, "--prompts", prompts, "--weights", "int4"]
    code, said, complaint = here("bench", "tiny", "-k", 1, *args)
    assert code == 0, complaint
    assert "beside float32: KL 0.0" in said
    assert "at 99 positions of pydoc_data.topics" in said


def test_weights_of_16_bits_have_no_such_line_and_those_without_tokenizer_a_note(fixture_folder, capsys):
    for folder, weights, note in (("glm", "stored", ""), ("glm", "int8", "as the checkpoint has no tokenizer")):
        options = ModelOptions(str(fixture_folder / folder), weights=weights)
        assert accuracy_of(options.load(need_head=False), options, quiet=True) is None
        assert note in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--weights", "int2"], "--weights 'int2': 'int2'; expected some of stored, int8, int4"),
        (["--backend", "cuda"], "expected some of auto, native, torch"),
        (["--weights", "int8", "--backend", "torch"], "only the native backend"),
        (["--texts", "absent.txt"], "absent.txt"),
        (["absent-folder"], "absent-folder"),
        ([], "give records of token ids"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_cannot_be_compared_is_a_usage_error(here, fixture_folder, args, part):
    code, said, complaint = here("accuracy", fixture_folder / "glm", *args)
    assert code == 2
    assert not said
    assert part in " ".join(complaint.split())
