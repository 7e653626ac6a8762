"""`nextn advise --offload-bandwidth`: bytes from the headers, v(m) by hand, and the command, streamed and loaded."""

import json

import pytest
from tiny import FIXTURES, build, prompt

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.cli.offload import parse_bandwidth
from nextn.errors import ConfigError
from nextn.evaluate import given_texts, reference_texts
from nextn.evaluate.offloading import StoredWeights
from nextn.evaluate.workload import ReferencePlan
from nextn.model.model import Model

pytestmark = pytest.mark.usefixtures("own_cache")
RATE = ("--offload-bandwidth", "1MB/s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of three layers, two with 8 experts, of which a token takes 2."""
    path = tmp_path_factory.mktemp("advice") / "model"
    build("glm4_moe", n_routed_experts=8, num_hidden_layers=3).save(path)
    return path


@pytest.fixture(scope="module")
def answers(folder):
    """Its own greedy answers, as records."""
    plan, prompts = (
        ReferencePlan(num_speculative_tokens=3, max_tokens=24, backend="torch"),
        [prompt(5, seed=n) for n in range(4)],
    )
    texts = reference_texts.generate_texts(Model.load(folder), prompts, plan, 0.0).texts
    path = folder.parent / "answers.jsonl"
    path.write_text("".join(json.dumps({"prompt": text.prompt, "tokens": text.new}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("name", ["glm4_moe", "inkling", "longcat_flash", "qwen3_next"])
def test_bytes_of_the_files(name, tmp_path):
    """Experts and all else add up to the files, less the embedding and the norms outside of layers."""
    model = build(name)
    model.save(tmp_path / "model", copies=False)
    inventory = Inventory.of(Checkpoint.open(tmp_path / "model"))
    weights = StoredWeights.of(inventory, inventory)
    lm_head = inventory.checkpoint.info(inventory.shared["output"]).nbytes
    experts = sum(each.num_experts * each.num_bytes for each in weights.experts.values())
    assert {each.num_experts for each in weights.experts.values()} == {4}
    layers = sum(value.nbytes for value in model.trunk.decoder.layers.state_dict().values())
    assert experts + weights.trunk_bytes == pytest.approx(layers + lm_head, rel=0.01)
    own = sum(value.nbytes for value in model.head.state_dict().values())
    drafted = weights.draft_bytes - lm_head + 4 * weights.draft_expert_bytes
    assert drafted * model.head.num_modules == pytest.approx(own, rel=0.01)


def advise(here, *options):
    code, out, err = here("advise", "-k", 3, "--max-tokens", 24, *RATE, "--json", *options)
    assert code == 0, err
    return json.loads(out)


def test_streamed_advice_is_the_loaded_one(folder, answers, here):
    """v(m) is bytes over rates; the K that pays is that of the formula; both ways give the same record."""
    options = (folder, "--texts", answers, "--temperatures", 0, "--dtype", "float32", "--memory-bandwidth", "2MB/s")
    streamed, loaded = advise(here, *options, "--stream"), advise(here, *options)
    assert streamed.pop("stream")["num_resumed"] == 0
    assert streamed.pop("machine").keys() == loaded.pop("machine").keys()
    assert streamed == loaded
    experts, weights = streamed["experts"][0], streamed["weights"]
    assert experts["distinct"][0] == 2 < experts["distinct"][1] < experts["distinct"][3] <= 8
    by_layer = zip(experts["by_layer"].values(), weights["experts"].values(), strict=True)
    num_bytes = [sum(row) for row in zip(*([n * e["num_bytes"] for n in row] for row, e in by_layer), strict=True)]
    assert experts["offloaded_bytes"] == pytest.approx(num_bytes)
    steps = [weights["trunk_bytes"] / 2e6 + size / 1e6 for size in num_bytes]
    assert streamed["costs"][0]["v"] == pytest.approx([step / steps[0] for step in steps])
    draft = weights["draft_bytes"] / 2e6 + 2 * weights["draft_expert_bytes"] / 1e6
    assert streamed["costs"][0]["c"] == pytest.approx(draft / steps[0])
    one = streamed["forecasts"][0]["by_num_speculative_tokens"][0]
    rate = streamed["measured"][0]["acceptance"][0]
    assert one["speedup"] == pytest.approx((1 + rate) / ((steps[1] + draft) / steps[0]))


@pytest.mark.slow
def test_interrupted_advice_resumes(folder, answers, here, monkeypatch, tmp_path):
    """The routing of layers that an earlier process ran is kept with their states; `measure` has another folder."""
    real = given_texts.whole_text_outputs
    options = (folder, "--texts", answers, "--temperatures", 0, "--stream", "--states", tmp_path / "states")

    def interrupted(trunk, texts, *, on_layer, **rest):
        def stop(progress):
            on_layer(progress)
            if progress.index == 1:  # the first layer with experts
                raise KeyboardInterrupt

        return real(trunk, texts, on_layer=stop, **rest)

    monkeypatch.setattr(given_texts, "whole_text_outputs", interrupted)
    assert here("advise", "-k", 3, "--offload-bandwidth", "1MB/s", *options)[0] == 130
    monkeypatch.setattr(given_texts, "whole_text_outputs", real)
    resumed, again = advise(here, *options), advise(here, *options[:-2])
    assert (resumed.pop("stream")["num_resumed"], again.pop("stream")["num_resumed"]) == (2, 0)
    assert resumed.pop("machine").keys() == again.pop("machine").keys()
    assert resumed == again
    code, out, _ = here("measure", "-k", 3, "--max-tokens", 24, "--json", *options)
    assert code == 0
    assert json.loads(out)["stream"]["num_resumed"] == 0


def test_generated_texts_in_words(folder, here, tmp_path):
    """Without texts the loaded model continues the prompts, at every temperature; the table and one file."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": {ids}}}\n' for ids in (prompt(8, seed=1), prompt(8, seed=2))))
    options = ("--prompts", prompts, "-k", 2, "--max-tokens", 16, "--out", tmp_path / "out")
    code, out, err = here("advise", folder, *options, "--offload-bandwidth", "1MB/s")
    assert code == 0, err
    for words in ("T=0 distinct experts of 8", "T=1 v(m)", "m=3", "at 0.001 GB/s", "GB/s: ", "ms per baseline step"):
        assert words in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"advice.json", "costs.png"}
    assert json.loads((tmp_path / "out" / "advice.json").read_text())["experts"][1]["temperature"] == 1


def test_bandwidths():
    assert parse_bandwidth("--x", "12GB/s") == 12e9
    assert parse_bandwidth("--x", "1.5 MiB/s") == 1.5 * 2**20
    for text in ("12", "12GB", "0GB/s", "fast", "-1GB/s", "12Gb/s"):
        with pytest.raises(ConfigError, match=rf"--x '{text}'; expected a rate above 0 with its unit"):
            parse_bandwidth("--x", text)


def test_bad_input(folder, answers, here):
    for options, message in (
        ((folder, "--texts", answers), "--texts: only with --offload-bandwidth"),
        ((FIXTURES / "qwen", "--texts", answers, "--offload-bandwidth", "1GB/s"), "is dense"),
        ((folder, "--stream", "--offload-bandwidth", "1GB/s"), "cannot generate the texts"),
        ((folder, "--offload-bandwidth", "quick"), "--offload-bandwidth 'quick'"),
    ):
        code, _, err = here("advise", *options)
        assert code == 2
        assert message in " ".join(err.split()), err
