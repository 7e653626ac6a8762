"""Which texts count as drawn from the trunk: what stored answers say of themselves, and what is made of it."""

import pytest
from tiny import build

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.errors import ConfigError
from nextn.settings import Sampling, Settings
from nextn.train.head_run import StartingPoint, prepare_head_run
from nextn.train.self_generated import generate_answers, is_on_policy


@pytest.fixture(scope="module")
def model():
    made = build("glm4_moe", vocab_size=264, initializer_range=0.02)
    made.tokenizer = byte_tokenizer()
    return made


@pytest.fixture(scope="module")
def stored(model, tmp_path_factory):
    """Files of answers: drawn at 1, at 0.5, from the most likely alone, greedy; and one that says nothing."""
    folder = tmp_path_factory.mktemp("answers")
    asked = [list(f"prompt {number}".encode()) for number in range(6)]
    distributions = {"one": Sampling(1.0), "half": Sampling(0.5), "top": Sampling(1.0, top_p=0.9), "greedy": Sampling()}
    for name, probs in distributions.items():
        settings = Settings(num_speculative_tokens=2, sampling=probs, max_tokens=24)
        list(generate_answers(model, asked, settings, folder / f"{name}.jsonl", batch_size=3, backend="torch"))
    (folder / "bare.jsonl").write_bytes((folder / "one.jsonl").read_bytes().partition(b"\n")[2])
    (folder / "text.txt").write_text("some text\n")
    return folder


def checked(model, stored, *names, temperature=1.0, **how):
    return is_on_policy([stored / name for name in names], model.trunk, temperature, **how)


@pytest.mark.more
def test_answers_at_the_temperature_are_drawn(model, stored):
    assert checked(model, stored, "one.jsonl") == (True, [])
    assert checked(model, stored, "half.jsonl", temperature=0.5) == (True, [])
    assert checked(model, stored, "bare.jsonl") == (False, [])
    assert checked(model, stored, "bare.jsonl", declared=True) == (True, [])
    assert checked(model, stored, "one.jsonl", "bare.jsonl", declared=True) == (True, [])
    assert is_on_policy([], model.trunk, 1.0) == (False, [])


@pytest.mark.parametrize("other", ["bare.jsonl", "text.txt"])
def test_other_text_among_them(other, model, stored):
    """Held-out text is of both, so the rule is that of any text."""
    assert checked(model, stored, "one.jsonl", other) == (False, [])


def test_prompts_that_count_were_not_drawn(model, stored):
    assert checked(model, stored, "one.jsonl", all_tokens=True) == (False, [])
    with pytest.raises(ConfigError, match="--on-policy and --all-tokens"):
        checked(model, stored, "one.jsonl", all_tokens=True, declared=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("half.jsonl", r"half\.jsonl: answers sampled with temperature = 0\.5 \(now 1\.0\)"),
        ("top.jsonl", r"top\.jsonl: answers sampled with top_p = 0\.9 \(now 1\.0\)"),
        ("greedy.jsonl", r"greedy\.jsonl: greedy answers"),
    ],
)
def test_another_distribution_is_reported(name, words, model, stored):
    on_policy, notes = checked(model, stored, "one.jsonl", name)
    assert not on_policy
    assert len(notes) == 1
    with pytest.raises(ConfigError, match=f"--on-policy: .*{words}"):
        checked(model, stored, name, declared=True)


def test_another_trunk_is_reported(stored):
    other = build("glm4_moe", vocab_size=264, initializer_range=0.02, seed=1)
    on_policy, (note,) = checked(other, stored, "one.jsonl")
    assert not on_policy
    assert "one.jsonl: answers of another trunk" in note
    assert "uses 1 - TV" in note


@pytest.mark.more
def test_a_run_reads_it_from_the_file(model, stored, tmp_path):
    """From folder to figures: the trunk that is loaded again is the one that answered."""
    model.save(tmp_path / "model")
    settings = {"steps": 1, "batch_size": 2, "length": 16, "depths": 2, "dtype": "float32", "eval_batches": 1}

    def run(name, **how):
        return prepare_head_run(
            tmp_path / "run", StartingPoint(tmp_path / "model"), data=[stored / name], settings=settings, **how
        )

    made = run("one.jsonl")
    assert made.task.on_policy
    assert made.notes == ()
    assert not run("bare.jsonl").task.on_policy
    assert run("bare.jsonl", on_policy=True).task.on_policy
    greedy = run("greedy.jsonl")
    assert not greedy.task.on_policy
    assert "greedy answers" in greedy.notes[0]
    other = build("glm4_moe", vocab_size=264, initializer_range=0.02, seed=1)
    other.tokenizer = model.tokenizer
    other.save(tmp_path / "model")
    assert "another trunk" in run("one.jsonl").notes[0]
