"""`nextn measure` on texts that exist: the trunk streamed and loaded give one report; when it streams by itself."""

import json
import re
import shutil

import pytest
from packed import Case, quantize_folder
from tiny import FIXTURES, refrain

from nextn.errors import CheckpointError
from nextn.evaluate import given_texts, reference_texts, streaming_plan
from nextn.evaluate.workload import ReferencePlan
from nextn.model import stored_experts
from nextn.model.model import Model
from nextn.model.streamed_trunk import StreamedTrunk

pytestmark = pytest.mark.usefixtures("own_cache")
GLM = FIXTURES / "glm"


@pytest.fixture(scope="module")
def answers(trained, tmp_path_factory):
    """A file of the model's own answers for each temperature."""
    folder, prompts = tmp_path_factory.mktemp("answers"), refrain(8, 33, seed=10**6).tolist()
    plan = ReferencePlan(num_speculative_tokens=3, max_tokens=24, backend="torch")
    return {
        t: write(folder / f"{t}.jsonl", reference_texts.generate_texts(trained["glm"], prompts, plan, t).texts)
        for t in (0.0, 1.0)
    }


def write(path, texts):
    """As `nextn answer` writes them."""
    header = {"nextn": "answers", "settings": {"sampling": {"temperature": texts[0].temperature}}}
    records = [
        {"prompt": text.prompt, "tokens": text.new, "finish": "eos" if text.ended else "length", "domain": "xy"[i % 2]}
        for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in [header, *records]))
    return path


def measure(here, path, *options, folder=GLM):
    code, out, err = here("measure", folder, "--texts", path, "-k", 3, "--dtype", "float32", "--json", *options)
    assert code == 0, err
    return json.loads(out), err


@pytest.mark.more
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_report_is_the_loaded_one(temperature, answers, here, tmp_path):
    """To the last digit, with controls; and the states are gone from the cache."""
    streamed, err = measure(here, answers[temperature], "--stream")
    loaded, _ = measure(here, answers[temperature])
    assert "the trunk is streamed (--stream): 0.0 GB" in err
    layers = streamed.pop("stream")["layers"]
    assert [layer["index"] for layer in layers] == list(range(Model.load(GLM).trunk.num_layers))
    assert "stream" not in loaded
    assert streamed.pop("machine").keys() == loaded.pop("machine").keys()
    assert streamed == loaded
    assert streamed["origin"][f"{temperature:g}"]["is_own"]
    assert streamed["controls"]["all_positions"] > 0.5
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_figures_are_those_of_decoding(answers, here, trained):
    """Of the same texts, decoded in memory."""
    streamed, _ = measure(here, answers[0.0], "--stream")
    plan = ReferencePlan(num_speculative_tokens=3, max_tokens=24, backend="torch", temperatures=(0.0,))
    decoded = reference_texts.generate_texts(trained["glm"], refrain(8, 33, seed=10**6).tolist(), plan, 0.0)
    figures = next(
        each for each in streamed["figures"] if each["num_speculative_tokens"] == 3 and each["domain"] == "all"
    )
    kept = [sum(each) for each in zip(*(text.num_accepted for text in decoded.acceptance_per_text), strict=True)]
    if figures["num_texts"] == 8:
        assert figures["num_accepted_tokens_per_pos"] == kept


@pytest.mark.more
def test_interrupted_command_resumes(answers, here, monkeypatch, tmp_path):
    """After Ctrl-C in the middle, the same command reads only the layers that are missing; --states keeps them."""
    real = given_texts.full_text_outputs

    def interrupted(trunk, texts, *, on_layer, **options):
        def stop(progress):
            on_layer(progress)
            raise KeyboardInterrupt

        return real(trunk, texts, on_layer=stop, **options)

    monkeypatch.setattr(given_texts, "full_text_outputs", interrupted)
    options = ("--texts", answers[0.0], "--stream", "--states", tmp_path / "states", "--dtype", "float32")
    code, _, err = here("measure", GLM, *options)
    assert code == 130
    assert "the same command resumes" in err
    monkeypatch.undo()
    for num_resumed in (1, Model.load(GLM).trunk.num_layers):
        record, _ = measure(here, answers[0.0], "--stream", "--states", tmp_path / "states")
        assert record["stream"]["num_resumed"] == num_resumed


@pytest.mark.more
def test_shard_deleted_in_mid_stream(answers, here, monkeypatch, tmp_path):
    """One error with the file, exit code 2; with the file back, the same command resumes."""
    model, states = tmp_path / "model", tmp_path / "states"
    shutil.copytree(GLM, model)
    victim = max(model.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    real = StreamedTrunk._run_layer

    def delete(self, index, *args):
        victim.unlink(missing_ok=True)
        return real(self, index, *args)

    monkeypatch.setattr(StreamedTrunk, "_run_layer", delete)
    options = ("--dtype", "float32", "--stream", "--states", states)
    code, _, err = here("measure", model, "--texts", answers[0.0], "-k", 3, *options)
    assert code == CheckpointError.exit_code == 2
    assert err.count("error: ") == 1
    assert str(victim) in "".join(err.split())
    assert "the same command resumes" in " ".join(err.split())
    monkeypatch.undo()
    shutil.copy2(GLM / victim.name, victim)
    assert measure(here, answers[0.0], *options, folder=model)[0]["stream"]["num_resumed"] == 1


@pytest.mark.more
def test_packed_layers_are_streamed(answers, here, tmp_path):
    """Weights of eight bits, trunk and head: the loaded model's figures, near those of the original."""
    shutil.copytree(GLM, tmp_path / "packed")
    quantize_folder(tmp_path / "packed", Case("pack-quantized", 8, 0), is_random=False)
    loaded, streamed, original = (
        measure(here, answers[0.0], *options, folder=folder)[0]["figures"]
        for options, folder in (
            (("--no-stream",), tmp_path / "packed"),
            (("--stream",), tmp_path / "packed"),
            ((), GLM),
        )
    )
    assert streamed == loaded
    accepted = [figures[-1]["num_accepted_tokens_per_pos"][0] for figures in (loaded, original)]
    assert accepted[0] == pytest.approx(accepted[1], rel=0.05)


@pytest.mark.more
def test_streams_by_itself_what_does_not_fit(answers, here, monkeypatch):
    """With the reason; never what fits, and not with --no-stream."""
    assert "stream" not in measure(here, answers[0.0])[0]
    monkeypatch.setattr(streaming_plan, "available_bytes", lambda device: 100_000)
    record, err = measure(here, answers[0.0])
    assert record["stream"]["num_bytes"] > 0
    assert "the trunk is streamed (the model takes 0.0 GB, and 0.0 GB are available): " in err
    assert "stream" not in measure(here, answers[0.0], "--no-stream")[0]
    code, _, err = here("measure", GLM)
    assert code == 2
    assert "cannot generate the texts to measure on: name a served copy of the model with --engine" in err


@pytest.mark.slow
def test_probe_of_a_streamed_trunk(answers, here, tmp_path, monkeypatch):
    """The trunk is streamed once; its states before and after the norm are recalled."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(answers[1.0].read_text().splitlines(keepends=True)[:3]))
    options = ("measure", GLM, "--texts", few, "-k", 1, "--max-tokens", 12, "--dtype", "float32", "--json", "--probe")
    _, loaded, _ = here(*options)
    monkeypatch.setattr(stored_experts, "_MAX_BYTES", 0)  # conventions also change a head whose experts are in files
    _, streamed, _ = here(*options, "--stream")
    outcomes = [json.loads(each)["probe"] for each in (streamed, loaded)]
    assert outcomes[0]["outcome"] == outcomes[1]["outcome"] == "family"
    scores = [
        {tuple(each["keys"]): each["accepted_per_position"] for each in outcome["readings"]} for outcome in outcomes
    ]
    shared = scores[0].keys() & scores[1].keys()
    assert {("hidden",), ("next_hidden",)} & shared
    assert all(scores[0][keys] == pytest.approx(scores[1][keys], abs=1e-4) for keys in shared)
    code, _, err = here("measure", GLM, "--texts", answers[0.0], "--stream", "--probe")
    assert code == 2
    assert "give --texts of a temperature above 0" in err


def test_bad_texts(answers, here, tmp_path):
    plain = tmp_path / "texts.jsonl"
    plain.write_text('{"prompt": [1, 2], "tokens": [3, 4, 5, 6]}\n')
    for options, message in (
        ((plain,), "does not say at which temperature its texts were sampled"),
        ((answers[1.0], "--temperatures", 0), "the texts of .* were sampled at 1; leave it out"),
        ((answers[1.0], "--temperatures", "0,1"), "its texts are of one temperature"),
        ((tmp_path / "none.jsonl",), "no such file"),
    ):
        code, _, err = here("measure", GLM, "--texts", *options)
        assert code == 2
        assert re.search(message, " ".join(err.split())), err
