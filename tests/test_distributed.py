"""Two processes are one: losses, norms, figures and parameters; checkpoints that any number of processes reads."""

import json
import shutil
from pathlib import Path

import pytest
import rank_jobs
import torch
from pairs import Pair
from quick import case, others_slow
from tiny import CONFIGS, build

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import SHIPPED, Checkpoint
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.train.distributed import ALONE, Ranks, processes


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    subject = Pair(tmp_path_factory.mktemp("pair") / "store")
    yield subject
    subject.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A checkpoint with layers of two kinds in float32, whose states are not rounded before lm_head."""
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    build("qwen3_5", vocab_size=512).save(folder, dtype=torch.float32)
    for path in SHIPPED.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


SIZES = {"hidden_size": 256, "moe_intermediate_size": 512, "n_routed_experts": 8, "num_hidden_layers": 24}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint whose trunk is much larger than what allocators keep, and the bytes of its last layer and trunk."""
    folder = tmp_path_factory.mktemp("large") / "model"
    build("glm4_moe", **SIZES, vocab_size=512).save(folder, dtype=torch.bfloat16)
    for path in SHIPPED.glob("tokenizer*"):
        shutil.copy(path, folder)
    with torch.device("meta"):
        layers = Model.build(json.loads((folder / "config.json").read_text())).trunk.decoder.layers
    layers.to(torch.bfloat16)
    return folder, *(sum(value.nbytes for value in each.parameters()) for each in (layers[-1], layers))


def close(one, two, tolerance=1e-5):
    for left, right in zip(one, two, strict=True):
        assert left == pytest.approx(right, abs=tolerance, rel=tolerance)


def same(one, two, tolerance=1e-5):
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=tolerance, rtol=0, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        case({"name": "glm4_moe", "modules": 2, "checkpoint_layers": True}, 1e-5, quick=False),
        case({"name": "cohere2_moe"}, 1e-5, quick=False),
        ({"name": "glm4_moe", "accumulate": 2}, 1e-5),
        # Muon's products are made in bfloat16, whose rounding makes more of a last bit.
        case({"name": "qwen3_5", "optimizer": "muon"}, 5e-3, quick=False),
        case({"name": "glm4_moe", "dtype": "bfloat16"}, 2e-2, quick=False),
    ],
    ids=["two modules", "tied", "accumulated", "muon", "bfloat16"],
)
def test_two_processes_equal_one(settings, tolerance, pair, tmp_path):
    """Losses, gradient norms and held-out figures of each step, and the parameters after the last; the processes have
    different numbers of labels. Two that accumulate are one that does not."""
    lines, parameters, _ = rank_jobs.train(ALONE, tmp_path / "one", settings | {"accumulate": 1})
    (first, cut, _), (second, _, _) = pair.run(rank_jobs.train, tmp_path / "two", settings)
    assert first == second
    close(lines, first, tolerance)
    same(parameters, cut, tolerance)


def test_each_keeps_its_part(pair, tmp_path):
    """Half of everything, and a tied weight once."""
    (first, total, tied), (second, _, _) = pair.run(rank_jobs.held, tmp_path)
    assert tied
    assert first + second == total
    assert max(first, second) < 0.55 * total


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from /proc")
@pytest.mark.slow
def test_memory_of_a_process(pair, large):
    """A process holds its share, two layers, and what allocators and threads keep; not the trunk, of 24 layers."""
    model, layer, trunk = large
    for peak, share in pair.run(rank_jobs.peak_of_loading, model):
        assert share < peak < share + 2 * layer + 20e6 < 0.8 * trunk
    for peak, share in pair.run(rank_jobs.peak_of_loading, model, True):  # which has no part of the trunk
        assert share < peak < share + 2 * layer + 20e6 < 0.3 * trunk


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from /proc")
@pytest.mark.slow
def test_memory_of_a_process_with_a_fresh_head(pair, large, tmp_path):
    """Nor while a new head is made of the trunk's layers."""
    model, layer, trunk = large
    (tmp_path / "text.txt").write_text("def f(x): return x\n" * 400)
    for peak, share in pair.run(rank_jobs.peak_of_fresh_head, tmp_path / "run", model):
        assert share < peak < share + 2 * layer + 20e6 < 0.8 * trunk


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from /proc")
@pytest.mark.slow
def test_memory_of_a_process_that_trains_from_scratch(pair, tmp_path):
    """Its share and two layers, while trunk and head get their initial values."""
    config = new_model(tmp_path, "glm4_moe", **SIZES)
    with torch.device("meta"):
        layers = Model.build(json.loads(config.read_text())).trunk.decoder.layers
    layer, trunk = (sum(value.nbytes for value in each.parameters()) for each in (layers[-1], layers))
    for peak, share in pair.run(rank_jobs.peak_of_joint_training, tmp_path / "run", config):
        assert share < peak < share + 2 * layer + 20e6 < 0.8 * trunk


@pytest.mark.more
@pytest.mark.parametrize("name", others_slow(["glm4_moe", "cohere2_moe"], "cohere2_moe"))
def test_training_from_scratch(name, pair, tmp_path):
    """Two processes begin with the bits of one, each of which keeps its part of every draw."""
    config = new_model(tmp_path, name)
    parameters, lines = rank_jobs.train_from_scratch(ALONE, tmp_path / "one", config)
    (cut, cut_lines), (_, second) = pair.run(rank_jobs.train_from_scratch, tmp_path / "two", config)
    same(parameters, cut, 0)
    assert cut_lines == second
    close(lines, cut_lines)


def new_model(folder, name, **sizes):
    """The config of a model that the byte tokenizer fits, beside a text."""
    (folder / "text.txt").write_text("".join(f"def number_{index}(): return {index * 7}\n" for index in range(200)))
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name] | {"vocab_size": 512, "initializer_range": 0.05} | sizes))
    return path


def test_a_fresh_head(pair, hybrid, tmp_path):
    """Two processes equal one, whose trunk is in memory when the head is made of it; they begin with its bits."""
    (tmp_path / "text.txt").write_text("".join(f"def number_{index}(): return {index * 7}\n" for index in range(200)))
    lines, initial, parameters = rank_jobs.fresh_head(ALONE, tmp_path / "one", hybrid)
    (cut_lines, cut_initial, cut), (second, *_) = pair.run(rank_jobs.fresh_head, tmp_path / "two", hybrid)
    same(initial, cut_initial, 0)
    assert cut_lines == second
    close(lines, cut_lines)
    same(parameters, cut)


@pytest.mark.parametrize("optimizer", others_slow(["adamw", "muon"], "muon"))
def test_resume_is_exact(optimizer, pair, tmp_path):
    """Two processes stopped after step 2 and started again: the same to the last bit as never stopped."""
    settings = {"optimizer": optimizer, "name": "cohere2_moe"}
    (whole, parameters, _), _ = pair.run(rank_jobs.train, tmp_path / "whole", settings)
    (lines, _, step), _ = pair.run(rank_jobs.train_and_stop, tmp_path / "cut", settings, 2)
    assert step == 2
    (rest, resumed, _), _ = pair.run(rank_jobs.go_on, tmp_path / "cut", settings | {"seed": 1})
    assert lines + rest == whole
    same(parameters, resumed, 0)


@pytest.mark.parametrize("optimizer", others_slow(["adamw", "muon"], "muon"))
@pytest.mark.slow
def test_resume_on_another_number_of_processes(optimizer, pair, tmp_path):
    """A checkpoint of two goes on alone and one of one goes on as two, with the values and moments that it holds."""
    tolerance = 1e-5 if optimizer == "adamw" else 5e-3
    settings = {"optimizer": optimizer, "name": "cohere2_moe"}
    whole, parameters, _ = rank_jobs.train(ALONE, tmp_path / "whole", settings)
    pair.run(rank_jobs.train_and_stop, tmp_path / "two", settings, 2)
    rank_jobs.train(ALONE, tmp_path / "one", settings, until=2)
    alone = rank_jobs.go_on(ALONE, tmp_path / "two", settings | {"seed": 1})
    both, _ = pair.run(rank_jobs.go_on, tmp_path / "one", settings | {"seed": 1})
    for lines, values, step in (alone, both):
        assert step == 4
        close(whole[2:], lines, tolerance)
        same(parameters, values, tolerance)


def test_a_head_on_a_frozen_trunk(pair, tmp_path):
    """Two processes equal one: losses, agreement, norms and the acceptance of each held-out row; stopped and resumed in
    between. The trunk stays as it was, and the head is written beside the trunk's own files."""
    lines, _, parameters = rank_jobs.train_head(ALONE, tmp_path / "one")
    pair.run(rank_jobs.head_until, tmp_path / "two", 2)
    (rest, is_same, cut), (second, _, _) = pair.run(rank_jobs.head_to_the_end, tmp_path / "two")
    assert is_same
    assert rest == second
    close(lines[-len(rest) :], rest)
    same(parameters, cut)
    head = Model.load(tmp_path / "two" / "model").head
    assert all(torch.equal(value, cut[f"head.{name}"].to(value.dtype)) for name, value in head.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"trained_parts": "norms,eh_proj"}], ids=["rows", "head"])
def test_a_head_in_parts(settings, pair, tmp_path):
    """Two processes equal one that takes all rows at once, also where they train some parameters of each layer."""
    lines, _, parameters = rank_jobs.head_with(ALONE, tmp_path / "one", settings | {"accumulate": 1})
    (cut_lines, _, cut), _ = pair.run(rank_jobs.head_with, tmp_path / "two", settings)
    close(lines, cut_lines)
    same(parameters, cut)


@pytest.mark.slow
def test_parts_leave_the_exchange_to_the_last(pair, tmp_path):
    """Four units are reduced in a step; FSDP reduces one of them twice where there are two parts, not all of them."""
    (whole, _), (parts, _) = (pair.run(rank_jobs.exchanges, tmp_path, count) for count in (1, 2))
    assert whole > 0
    assert parts <= whole + 1


@pytest.mark.more
@pytest.mark.parametrize("filled_by", others_slow([1, 2], 2))
def test_a_head_from_states_on_disk(filled_by, pair, tmp_path):
    """Two processes that read their rows of stored states equal one that does, whoever stored them. One of the two has
    fewer batches to store than the other, and must go along until that has done."""
    lines, _, parameters = rank_jobs.train_head(ALONE, tmp_path / "one", states=tmp_path / "alone")
    states = tmp_path / ("alone" if filled_by == 1 else "together")
    (cut_lines, is_same, cut), (second, _, _) = pair.run(rank_jobs.head_from_states, tmp_path / "two", states)
    assert is_same
    assert cut_lines == second
    close(lines, cut_lines)
    same(parameters, cut)
    names = [path.name for path in sorted(states.iterdir())]
    assert names == ["cache.json", "hidden-00000.safetensors", "hidden-00001.safetensors"]


@pytest.mark.more
@pytest.mark.parametrize("fresh", others_slow([False, True], True))
def test_a_head_of_a_streamed_trunk(fresh, pair, hybrid, tmp_path):
    """Two processes equal one; the first reads the layers, once, and the second takes the states from the folder."""
    (tmp_path / "text.txt").write_text("".join(f"def number_{index}(): return {index * 7}\n" for index in range(200)))
    lines, parameters, layers = rank_jobs.streamed_head(ALONE, tmp_path / "one", hybrid, fresh)
    num_layers = Checkpoint.open(hybrid).config["num_hidden_layers"]
    (cut_lines, cut, first), (second, _, others) = pair.run(rank_jobs.streamed_head, tmp_path / "two", hybrid, fresh)
    assert first == layers == list(range(num_layers)) * (2 if fresh else 1)
    assert others == []
    assert cut_lines == second
    close(lines, cut_lines)
    same(parameters, cut)


def test_work_one_by_one(pair):
    """A process that fails ends the others, which wait for it."""
    (one, first), (other, second) = pair.run(rank_jobs.one_by_one, None)
    assert (one, other) == (0, 1)
    assert first < second
    (one, _), (other, second) = pair.run(rank_jobs.one_by_one, 0)
    assert (one, second) == ("there is no such text", [])
    assert other == "process 0 of 2 ended while the others waited for it"


def test_any_process_stops_all(pair, tmp_path):
    """One process is told to stop; all stop after the same step, and one checkpoint is written, without pickles."""
    reported = pair.run(rank_jobs.train_and_stop, tmp_path, {}, 3, 1)
    assert [step for _, _, step in reported] == [3, 3]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000003"]
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert all(name.endswith((".safetensors", ".json", ".jsonl")) for name in names)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_result_is_the_published_layout(pair, tmp_path):
    parameters, _ = pair.run(rank_jobs.export, tmp_path)
    model = Model.load(tmp_path / "model")
    for name, value in model.trunk.model.named_parameters():
        assert torch.equal(value, parameters[f"trunk.model.{name}"])
    for name, value in model.head.named_parameters():
        assert torch.equal(value, parameters[f"head.{name}"])
    assert not [
        finding for finding in audit(Checkpoint.open(tmp_path / "model")).findings if finding.severity == "error"
    ]


def test_a_bad_loss_of_one_stops_all(pair, tmp_path):
    for said in pair.run(rank_jobs.break_batch, tmp_path):
        assert "the loss of step 0 is nan" in said


@pytest.mark.parametrize(
    ("how", "words"),
    [("lost", "its files are not those that were written"), ("changed", "not a valid safetensors file")],
)
def test_a_damaged_checkpoint(how, words, pair, tmp_path):
    for said in pair.run(rank_jobs.damaged, tmp_path, how):
        assert words in said


def test_rows_that_cannot_be_dealt(pair, tmp_path):
    for said in pair.run(rank_jobs.uneven, tmp_path):
        assert "batch_size = 3 on 2 processes" in said
    Ranks(0, 2).check_batch(8, parts=2)
    with pytest.raises(ConfigError, match=r"batch_size = 6 on 2 processes in 2 parts .* a multiple of 4"):
        Ranks(0, 2).check_batch(6, parts=2)


def test_without_torchrun_nothing_happens(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    values = torch.tensor([3])
    with processes() as ranks:
        assert ranks == Ranks(0, 1)
        assert ranks.total(values) is values
        assert (ranks.any(True), ranks.any(False), ranks.is_first) == (True, False, True)
        ranks.wait()


def test_a_broken_environment(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="RANK is set but LOCAL_RANK"), processes():
        pass
