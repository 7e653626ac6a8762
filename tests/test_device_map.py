"""Decoder layers in host memory and on disk: the same states and texts as in memory; maps and their errors."""

import gc
import json
import sys
from collections import namedtuple

import pytest
import torch
from quick import families
from tiny import CONFIGS, FIXTURES, build, decode, prompt

from nextn.decoding.generate import generate
from nextn.errors import ConfigError
from nextn.model import device_map
from nextn.model.device_map import fill_memory, layer_places, spread_layers
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import Sampling, Settings
from nextn.speculative.draft_vocabulary import DraftVocabulary

CPU, GPUS = torch.device("cpu"), [torch.device("cuda", index) for index in range(2)]
GLM = FIXTURES / "glm"


def spread(folder, where, places="disk", **options):
    model = Model.load(folder, defer=True, **options)
    spread_layers(model.trunk, places, where)
    return model


# LongCat's router uses the weight of a submodule that it does not call.
@pytest.mark.more
@pytest.mark.parametrize("name", families(CONFIGS, {"deepseek_v4", "qwen3_5", "longcat_flash"}))
def test_same_texts_for_every_family(name, tmp_path):
    """All layers on disk, so that each block, mixer and router is run from there; with rollback, in a batch."""
    build(name).save(tmp_path / "model")
    loaded, on_disk = Model.load(tmp_path / "model"), spread(tmp_path / "model", tmp_path)
    assert all(value.is_meta for value in on_disk.trunk.decoder.layers.parameters())
    tokens = torch.tensor([prompt(21, seed=1)])
    with torch.inference_mode():
        outputs = [model.trunk(tokens) for model in (on_disk, loaded)]
    assert torch.equal(outputs[0].final_hidden, outputs[1].final_hidden)
    assert torch.equal(outputs[0].head_input, outputs[1].head_input)
    prompts, sampling = [prompt(7, seed=2), prompt(9, seed=3)], Sampling(1.0)
    texts = [decode(m, prompts, num_speculative_tokens=2, max_tokens=6, sampling=sampling) for m in (on_disk, loaded)]
    assert texts[0][0] == texts[1][0]
    assert [each.rows for each in texts[0][1]] == [each.rows for each in texts[1][1]]


@pytest.mark.more
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
def test_what_is_used_outside_of_forward(changes, tmp_path):
    """Embedding and lm_head, tied or not, and slices of both."""
    build("glm4_moe", **changes).save(tmp_path / "model")
    loaded, on_disk = Model.load(tmp_path / "model"), spread(tmp_path / "model", tmp_path, "cpu,disk")
    tokens, ids = torch.tensor([prompt(5)]), torch.tensor([1, 3, 5])
    assert (on_disk.trunk.output.weight is on_disk.trunk.embedding.weight) == bool(changes)
    assert torch.equal(on_disk.trunk.embed(tokens, raw=True), loaded.trunk.embed(tokens, raw=True))
    assert torch.equal(on_disk.trunk.lm_head, loaded.trunk.lm_head)
    for model in (loaded, on_disk):
        model.head.draft_vocabulary = DraftVocabulary(ids, model.trunk.vocab_size)
    settings = Settings(num_speculative_tokens=3, max_tokens=8)
    texts = [generate(model, [prompt(5)], settings, backend="torch")[0] for model in (on_disk, loaded)]
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].acceptance == texts[1].acceptance


def test_the_native_backend(tmp_path):
    model = spread(GLM, tmp_path, "cpu,disk", dtype=torch.float32)
    assert "a device map places them elsewhere" in backend_for(model).reason
    with pytest.raises(ConfigError, match="the native backend cannot run this model"):
        backend_for(model, "native")


def test_the_folder_of_layers_on_disk(tmp_path, monkeypatch):
    """It goes with the model; what is in the folder already is never read."""
    model = spread(GLM, tmp_path, "cpu,disk", dtype=torch.bfloat16)
    half = len(model.trunk.decoder.layers) // 2
    layers = list(model.trunk.decoder.layers)[-half:]
    assert model.trunk.layer_places == ("cpu",) * half + ("disk",) * half
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.dat"))
    assert written == sum(value.nbytes for layer in layers for value in layer.parameters())
    del model, layers
    gc.collect()
    assert not list(tmp_path.iterdir())
    full = namedtuple("Usage", "free")(1000)
    monkeypatch.setattr(device_map.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(ConfigError, match=r"0\.0 GB are free, and the layers on disk take .* XDG_CACHE_HOME"):
        spread(GLM, tmp_path)
    with pytest.raises(ConfigError, match=r"glm/config\.json: .* XDG_CACHE_HOME"):
        spread(GLM, GLM / "config.json")


def test_memory_is_filled_in_order():
    """GPUs, then the host, then the disk; a little is left free, and the first device can receive a layer."""
    layers = build("glm4_moe", num_hidden_layers=6).trunk.decoder.layers
    size = max(sum(value.nbytes for value in layer.parameters()) for layer in layers)
    place = lambda *sizes: [str(each) for each in fill_memory(layers, dict(sizes))]  # noqa: E731
    assert place((CPU, 100 * size)) == ["cpu"] * 6
    assert place((GPUS[0], 100 * size), (CPU, 100 * size)) == ["cuda:0"] * 6
    sizes = (GPUS[1], int(3.5 * size)), (GPUS[0], int(4.7 * size)), (CPU, 9 * size)
    assert place(*sizes) == ["cuda:1"] * 2 + ["cuda:0"] * 4
    found = place((GPUS[0], int(3.5 * size)), (CPU, int(3.5 * size)))
    assert found == sorted(found, key=["cuda:0", "cpu", "disk"].index)
    assert set(found) == {"cuda:0", "cpu", "disk"}
    assert found.count("cuda:0") <= 2


def test_auto_takes_the_disk_for_what_does_not_fit(tmp_path, monkeypatch):
    trunk = Model.load(GLM, defer=True).trunk
    monkeypatch.setattr(device_map, "available_bytes", lambda device: 0)
    assert set(layer_places(trunk, "auto")) == {"disk"}
    monkeypatch.setattr(device_map, "available_bytes", lambda device: 10**9)
    assert set(layer_places(trunk, "auto")) == {CPU}
    monkeypatch.setattr(device_map, "available_bytes", lambda device: None)
    with pytest.raises(ConfigError, match="does not say how much memory is free; name the devices"):
        layer_places(trunk, "auto")


def test_maps_of_names(tmp_path):
    """Beginnings of names, the longest first; parts beside the layers where they are anyway."""
    trunk, file = Model.load(GLM, defer=True).trunk, tmp_path / "map.json"
    count = len(trunk.decoder.layers)

    def places(content):
        file.write_text(json.dumps(content))
        return layer_places(trunk, str(file))

    assert places({"": "cpu"}) == [CPU] * count
    assert places({"model": "disk", "model.layers.1": "cpu", "lm_head": "cpu"}) == ["disk", CPU] + ["disk"] * (
        count - 2
    )
    for content, message in [
        ({"model.layers.0": "cpu"}, r"no place for model\.layers\.1"),
        ({"": "cpu", "model.layers.0.mlp": "disk"}, r"'model\.layers\.0\.mlp' is no decoder layer, nor"),
        ({"": "cpu", "transformer.h": "disk"}, "'transformer.h' is no decoder layer, nor a module that has some"),
        ({"model.layers": "cpu", "lm_head": "disk"}, "lm_head on disk; all but the decoder layers is on cpu"),
        ({"": "auto"}, "`auto` cannot be combined with other places"),
        ({"": "tpu"}, "expected auto, devices such as"),
        ({"": 0}, "'cuda:0' is not available"),
        ({"": None}, "expected an object such as"),
        ([], "expected an object such as"),
    ]:
        with pytest.raises(ConfigError, match=message):
            places(content)
    file.write_text("{")
    with pytest.raises(ConfigError, match="expected auto, devices such as"):
        layer_places(trunk, str(file))
    with pytest.raises(ConfigError, match="No such file"):
        layer_places(trunk, "none.json")
    with pytest.raises(ConfigError, match="names 99 places for"):
        layer_places(trunk, ",".join(["cpu"] * 99))
    with pytest.raises(ConfigError, match="cpus"):
        layer_places(trunk, "cpus,disk")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", GLM, "x", "--device-map", "disk", "--backend", "native"), "excludes --backend native"),
        (("measure", GLM, "--device-map", "disk", "--weights", "int8"), "excludes --weights int8"),
        (
            ("measure", GLM, "--device-map", "disk", "--stream", "--texts", __file__),
            "trunk drops each layer",
        ),
        (("answer", GLM, "out.jsonl", "--prompts", __file__, "--device-map", "auto", "--engine", "x"), "no layer is"),
        (("answer", GLM, "out.jsonl", "--prompts", __file__, "--weights", "int8", "--engine", "x"), "no layer is"),
    ],
)
def test_options_that_exclude_each_other(args, message, here):
    code, _, err = here(*args)
    assert code == 2
    assert message in " ".join(err.split())


def test_without_accelerate(here, monkeypatch):
    monkeypatch.setattr(device_map, "find_spec", {**sys.modules, "accelerate": None}.get)
    code, _, err = here("generate", GLM, "x", "--device-map", "disk")
    assert code == 2
    assert "--device-map needs accelerate: pip install 'accelerate>=" in err


@pytest.mark.slow
def test_commands(here, tmp_path, monkeypatch):
    """The same text, answers and figures with a map as without one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n" * 80)
    texts, figures, answers = [], [], []
    for index, given in enumerate(((), ("--device-map", "cpu,disk"))):
        options = ("--dtype", "float32", "--backend", "torch", "--max-tokens", 3, "--json", *given)
        code, out, err = here("generate", "tiny", "def f", *options)
        assert code == 0, err
        assert (f"on disk ({tmp_path}/cache/nextn/offload/layers-" in " ".join(err.split())) == bool(given)
        texts.append((json.loads(out)["text"], json.loads(out)["acceptance"]))
        code, out, err = here("measure", "tiny", "--prompts", tmp_path / "prompts.txt", "-k", 2, *options)
        assert code == 0, err
        figures.append(json.loads(out)["figures"])
        made = tmp_path / f"{index}.jsonl"
        cut = ("--prompts", tmp_path / "prompts.txt", "--count", 2)
        code, _, err = here("answer", "tiny", made, *cut, *options)
        assert code == 0, err
        answers.append(made.read_text())
    assert texts[0] == texts[1]
    assert figures[0] == figures[1]
    assert answers[0] == answers[1]  # also the trunk's fingerprint
    assert answers[0].count("\n") == 3
