"""Trunks whose layers are read one at a time: the same bits as in memory, what is loaded so, clear errors."""

import errno
import json
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from quick import families, others_slow
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, FIXTURES, build, prompt

from nextn.checkpoint import remote
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import trunk_fingerprint
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.tensors import TensorReader
from nextn.errors import CheckpointError, ConfigError
from nextn.model import layer_loader, layer_states, load_head, stored_experts, streamed_trunk
from nextn.model.layer_loader import LayerLoader
from nextn.model.layer_states import input_file, remove_states
from nextn.model.model import Model
from nextn.model.stored_experts import find_layout
from nextn.model.trunk import Trunk
from nextn.train.checkpointing import fingerprint, fingerprint_of
from nextn.train.distributed import ALONE, Ranks
from nextn.train.head_run import StartingPoint, load_starting_point

BATCHES = [torch.tensor([prompt(21, seed=1), prompt(21, seed=2)]), torch.tensor([prompt(34, seed=3)])]
TWO = Ranks(0, 2)


def assert_equal(one, other):
    """Equal in bits where torch computes with one thread.

    More threads divide elementwise operations by their number of elements, which a group of experts changes, and the
    last elements of a part are computed one by one, by another exponential.
    """
    bound = 0 if torch.get_num_threads() == 1 else 1e-5
    torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def assert_same(streamed, loaded, batches=BATCHES, **options):
    """The streamed trunk's states are those of the loaded one's passes."""
    got = streamed.trunk.run(batches, **options)
    with torch.inference_mode():
        for output, tokens in zip(got, batches, strict=True):
            expected = loaded.trunk(tokens)
            assert_equal(output.final_hidden, expected.final_hidden)
            assert_equal(output.head_input, expected.head_input)


# Their experts clamp, and then compute silu or a sigmoid over all rows at once. torch takes two vector registers
# at once, 32 numbers with AVX-512, and the rest one by one, by another exponential: narrower rows would differ in bits.
WIDE = {name: {"moe_intermediate_size": 32} for name in ("deepseek_v4", "glm5_next", "hy_v4")}
WIDE["minimax_m3"] = {"intermediate_size": 32}


@pytest.mark.one_case
@pytest.mark.parametrize("name", families(CONFIGS, {"deepseek_v3", "deepseek_v4", "qwen3_5"}))
def test_same_bits_for_every_family(name, tmp_path, monkeypatch):
    """With experts loaded together, and a few at a time: read into place, and converted."""
    for module in (layer_loader, load_head):
        monkeypatch.setattr(module, "_EXPERTS_AT_ONCE", 3)  # of 4, so that there is an incomplete part
    build(name, **WIDE.get(name, {})).save(tmp_path / "model")
    loaded, streamed = Model.load(tmp_path / "model"), Model.load(tmp_path / "model", stream=True)
    assert streamed.notes == loaded.notes
    assert_same(streamed, loaded)
    monkeypatch.setattr(stored_experts, "_MAX_BYTES", 0)
    monkeypatch.setattr(stored_experts, "_GROUP_BYTES", 0)
    assert_same(streamed, loaded)
    assert_same_head(Model.load(tmp_path / "model", stream=True), loaded)
    convert_experts(monkeypatch)
    assert_same(streamed, loaded)
    assert_same_head(Model.load(tmp_path / "model", stream=True), loaded)


def convert_experts(monkeypatch) -> None:
    """No layout is known: experts are converted, as those of unusual layouts are."""
    for module in (layer_loader, load_head):
        monkeypatch.setattr(module, "find_layout", lambda *_: None)


def assert_same_head(streamed, loaded):
    """The head whose experts are loaded when they run computes as the other one."""
    tokens = BATCHES[0]
    with torch.inference_mode():
        states = loaded.trunk(tokens).head_input
        outs = [model.head.teacher_forced_hidden(tokens, states, 2) for model in (streamed, loaded)]
    for pair in zip(*outs, strict=True):
        assert_equal(*pair)


@pytest.mark.one_case
@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def test_same_bits_for_trained_models(name, trained):
    streamed = Model.load(FIXTURES / name, dtype=torch.float32, stream=True)
    assert_same(streamed, trained[name], [tokens % trained[name].trunk.vocab_size for tokens in BATCHES])


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "fp8"),
    others_slow(
        [("deepseek_v4", False), ("qwen3_next", False), ("glm4_moe", True), ("deepseek_v3", True)],
        ("qwen3_next", False),
        ("glm4_moe", True),
    ),
)
def test_same_bits_in_bf16_and_from_fp8(name, fp8, tmp_path, monkeypatch):
    build(name, **WIDE.get(name, {})).save(tmp_path / "model", dtype=torch.bfloat16, fp8=fp8)
    streamed = Model.load(tmp_path / "model", stream=True)
    assert streamed.trunk.dtype == torch.bfloat16
    assert_same(streamed, loaded := Model.load(tmp_path / "model"))
    monkeypatch.setattr(stored_experts, "_MAX_BYTES", 0)
    assert_same(streamed, loaded)
    convert_experts(monkeypatch)
    assert_same(streamed, loaded)


@pytest.fixture
def folder(tmp_path) -> Path:
    build("glm_moe_dsa").save(tmp_path / "model")
    return tmp_path / "model"


def shard(folder: Path) -> Path:
    """The file with the decoder layers."""
    return max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


@pytest.mark.more
def test_states_in_files_have_the_same_bits(folder):
    """Every layer's output is written to a file and read back, tuples with indices included; no file is left."""
    assert_same(Model.load(folder, stream=True), Model.load(folder), max_state_bytes=0)
    assert not list(folder.parent.glob("nextn-states-*"))


@pytest.mark.more
def test_only_one_layer_is_in_memory(folder, monkeypatch):
    """When a layer runs, the parameters of all others are on the meta device; after the pass, all are."""
    trunk = Model.load(folder, stream=True).trunk
    layers, seen = trunk.decoder.layers, []

    def check(module, *_):
        if not any(value.is_meta for value in module.parameters()):
            seen.append([any(not value.is_meta for value in layer.parameters()) for layer in layers])

    for layer in layers:
        layer.register_forward_pre_hook(check)
    trunk.run(BATCHES)
    one_hot = torch.eye(len(layers), dtype=torch.bool)
    assert seen == [alone for alone in one_hot.tolist() for _ in BATCHES]
    assert all(value.is_meta for value in layers.parameters())


@pytest.mark.parametrize("how", ["read", "converted", "fused"])
def test_experts_of_a_layer_are_never_in_memory_together(how, tmp_path, monkeypatch):
    """Whether each expert is stored as a tensor, or one tensor holds all of them."""
    monkeypatch.setattr(stored_experts, "_MAX_BYTES", 0)
    monkeypatch.setattr(stored_experts, "_GROUP_BYTES", 0)
    monkeypatch.setattr(layer_loader, "_EXPERTS_AT_ONCE", 1)
    build("glm4_moe").save(tmp_path / "model")
    if how == "converted":
        convert_experts(monkeypatch)
    elif how == "fused":
        rewrite(shard(tmp_path / "model"), fuse_experts)
    else:  # transformers converts one expert of each layer, to know the layout
        monkeypatch.setattr(LayerLoader, "_converted_groups", None)
    trunk, seen = Model.load(tmp_path / "model", stream=True).trunk, []
    experts_class = type(trunk.decoder.layers[1].mlp.experts)
    real = experts_class.forward
    monkeypatch.setattr(
        experts_class, "forward", lambda self, *args: seen.append(len(self.gate_up_proj)) or real(self, *args)
    )
    trunk.run(BATCHES)
    assert len(seen) > 4
    assert set(seen) == {1}
    assert all(value.is_meta for value in trunk.decoder.layers.parameters())


@pytest.mark.more
@pytest.mark.parametrize("how", ["read", "converted"])
def test_an_expert_with_values_that_are_not_finite(how, folder, monkeypatch):
    monkeypatch.setattr(stored_experts, "_MAX_BYTES", 0)
    if how == "converted":
        convert_experts(monkeypatch)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    rewrite(shard(folder), lambda tensors: tensors[name].view(-1)[5].fill_(float("nan")))
    trunk = Model.load(folder, stream=True).trunk
    message = rf"{name} holds NaN or Inf" if how == "read" else r"layer 1: 1 tensors hold NaN or Inf: .*gate_up_proj"
    with pytest.raises(CheckpointError, match=message):
        trunk.run(BATCHES)
    assert all(value.is_meta for value in trunk.decoder.layers.parameters())


@pytest.mark.more
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_thread_reads_on_after_an_error(error, folder, monkeypatch):
    """The thread that reads experts ends with the layer that it reads for, whose parameters are unloaded."""
    monkeypatch.setattr(stored_experts, "_MAX_BYTES", 0)
    monkeypatch.setattr(stored_experts, "_GROUP_BYTES", 0)
    trunk, seen = Model.load(folder, stream=True).trunk, []

    def fail(*_):
        seen.extend(set(threading.enumerate()) - before)
        raise error("stopped")

    monkeypatch.setattr(type(trunk.decoder.layers[1].mlp.experts), "forward", fail)
    before = set(threading.enumerate())
    with pytest.raises(error, match="stopped") as raised:  # `raised` keeps the frames
        trunk.run(BATCHES)
    assert raised.tb is not None
    assert seen
    assert not any(thread.is_alive() for thread in seen)
    assert all(value.is_meta for value in trunk.decoder.layers.parameters())


def test_layout_of_experts():
    """Stored tensors one after the other; anything else, or a doubt, is left to the conversion."""
    gate, up, down = torch.rand(3, 4), torch.rand(3, 4), torch.rand(4, 3)
    stored = {"gate": gate, "up": up, "down": down}
    both = torch.cat([gate, up])
    assert find_layout({"gate_up": both, "down": down}, stored) == {"gate_up": ("gate", "up"), "down": ("down",)}
    assert find_layout({"gate_up": both.flip(0), "down": down}, stored) is None
    assert find_layout({"gate_up": both.T, "down": down}, stored) is None
    assert find_layout({"gate_up": both}, stored) is None
    assert find_layout({"gate_up": torch.cat([gate, gate]), "down": down}, stored | {"up": gate}) is None
    halves = {name: value.bfloat16() for name, value in stored.items()}
    assert find_layout({"gate_up": both.bfloat16(), "down": down.bfloat16()}, stored) is not None
    assert find_layout({"gate_up": both, "down": down}, halves) is None


@pytest.mark.more
def test_experts_of_the_head_stay_in_the_file(tmp_path, monkeypatch):
    """They are checked when the head is loaded."""
    monkeypatch.setattr(stored_experts, "_MAX_BYTES", 0)
    build("glm4_moe").save(tmp_path / "model")
    head = Model.load(tmp_path / "model", stream=True).head
    assert {name for name, value in head.named_parameters() if value.is_meta} == {
        f"stack.0.block.mlp.experts.{role}" for role in ("gate_up_proj", "down_proj")
    }
    path = next(path for path in (tmp_path / "model").glob("*.safetensors") if "layers.2" in str(list(load_file(path))))
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    rewrite(path, lambda tensors: tensors[name].view(-1)[5].fill_(float("inf")))
    with pytest.raises(CheckpointError, match=f"non-finite: {name}"):
        Model.load(tmp_path / "model", stream=True)


def fuse_experts(tensors) -> None:
    prefix = "model.layers.1.mlp.experts"
    parts = {
        role: torch.stack([tensors.pop(f"{prefix}.{index}.{role}_proj.weight") for index in range(4)])
        for role in ("gate", "up", "down")
    }
    tensors[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
    tensors[f"{prefix}.down_proj"] = parts["down"]


@pytest.mark.more
def test_embedding_and_lm_head_are_cast_in_slices(tmp_path, monkeypatch):
    """Of a model that is stored in bf16 and runs in fp32, no cast copy of them is made."""
    monkeypatch.setattr(streamed_trunk, "_VOCAB_ROWS", 24)
    build("glm4_moe").save(tmp_path / "model", dtype=torch.bfloat16)
    options = {"dtype": torch.float32}
    loaded, streamed = Model.load(tmp_path / "model", **options), Model.load(tmp_path / "model", **options, stream=True)
    assert {streamed.trunk.embedding.weight.dtype, streamed.trunk.lm_head.dtype} == {torch.bfloat16}
    assert torch.equal(streamed.trunk.embed(BATCHES[0]), loaded.trunk.embed(BATCHES[0]))
    assert torch.equal(streamed.trunk.embed(BATCHES[0], raw=True), loaded.trunk.embed(BATCHES[0], raw=True))
    states = loaded.trunk(BATCHES[0]).final_hidden.detach()
    assert torch.equal(streamed.trunk.logits(states), loaded.trunk.logits(states).detach())


def test_logits_are_capped_by_an_lm_head_in_another_dtype(tmp_path):
    """As those of NanoChat, whose embedding is a plain module, in float32, by which `nextn accuracy` compares."""
    config = {"model_type": "nanochat", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 4, "final_logit_softcapping": 2.0,
              "initializer_range": 0.5}  # fmt: skip
    Trunk.from_config(config, dtype=torch.bfloat16).model.save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "need_head": False}
    loaded, streamed = Model.load(tmp_path, **options), Model.load(tmp_path, **options, stream=True)
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        logits = streamed.trunk.logits(streamed.trunk.run([tokens])[0].final_hidden)
        assert torch.equal(logits, loaded.trunk.logits(loaded.trunk(tokens).final_hidden))
    assert 1.9 < logits.abs().max() <= 2


def stop_after(index):
    def stop(progress):
        if progress.index == index:
            raise KeyboardInterrupt

    return stop


@pytest.mark.more
def test_interrupted_run_resumes_after_the_last_layer(folder, tmp_path):
    """The same bits, each layer read once in all, states that are tuples included."""
    states, progress = tmp_path / "states", []
    with pytest.raises(KeyboardInterrupt):
        Model.load(folder, stream=True).trunk.run(BATCHES, folder=states, on_layer=stop_after(1))
    assert len(list(states.glob("states-0001-*.safetensors"))) == len(list(states.glob("states-*.safetensors"))) == 2
    assert_same(Model.load(folder, stream=True), Model.load(folder), folder=states, on_layer=progress.append)
    assert [(each.index, each.resumed) for each in progress] == [(0, True), (1, True), (2, False)]
    assert_same(Model.load(folder, stream=True), Model.load(folder), folder=states)
    (states / input_file(0)).touch()
    remove_states(states)
    assert not states.exists()


def test_states_of_another_run_are_refused(folder, tmp_path):
    trunk = Model.load(folder, stream=True).trunk
    trunk.run(BATCHES, folder=tmp_path / "states")
    with pytest.raises(ConfigError, match="another texts; give another folder"):
        trunk.run(BATCHES[:1], folder=tmp_path / "states")
    rewrite(shard(folder), lambda tensors: tensors["model.layers.0.self_attn.o_proj.weight"].mul_(2))
    with pytest.raises(ConfigError, match="another checkpoint"):
        Model.load(folder, stream=True).trunk.run(BATCHES, folder=tmp_path / "states")


@pytest.mark.more
def test_states_of_an_edited_trunk_are_refused(folder, tmp_path):
    """One byte that no fingerprint samples; and the config, whose values are not in the weights."""
    before, path = Model.load(folder, stream=True).trunk, shard(folder)
    before.run(BATCHES, folder=tmp_path / "states")
    with path.open("r+b") as file:
        info = before.checkpoint.info("model.layers.1.mlp.experts.0.up_proj.weight")
        file.seek(info.begin)
        byte = file.read(1)
        file.seek(info.begin)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ConfigError, match="another checkpoint"):
        Model.load(folder, stream=True).trunk.run(BATCHES, folder=tmp_path / "states")
    now = Model.load(folder, stream=True).trunk
    sampled = {trunk_fingerprint(Inventory.of(trunk.checkpoint)) for trunk in (before, now)}
    assert len(sampled) == 1
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    edited = Model.load(folder, stream=True).trunk
    identities = [trunk.identity(BATCHES)["checkpoint"] for trunk in (before, now, edited)]
    assert len(set(identities)) == 3


@pytest.mark.more
def test_another_head_keeps_the_states(folder):
    """The time of a file that has nothing of the trunk does not count."""
    before, files = Model.load(folder, stream=True).trunk, sorted(folder.glob("*.safetensors"))
    (head,) = (path for path in files if all("layers.3." in name for name in load_file(path)))
    os.utime(head, (0, 0))
    assert Model.load(folder, stream=True).trunk.identity(BATCHES) == before.identity(BATCHES)
    os.utime(shard(folder), (0, 0))
    assert Model.load(folder, stream=True).trunk.identity(BATCHES) != before.identity(BATCHES)


def test_damaged_states_are_an_error(folder, tmp_path):
    trunk = Model.load(folder, stream=True).trunk
    trunk.run(BATCHES, folder=tmp_path / "states")
    path = next((tmp_path / "states").glob("states-*-00001.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"00001\.safetensors: missing or damaged"):
        trunk.run(BATCHES, folder=tmp_path / "states")


@pytest.mark.more
def test_full_disk_keeps_the_states_of_complete_layers(folder, tmp_path, monkeypatch):
    real, calls = layer_states.save, []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    monkeypatch.setattr(layer_states, "save", full)
    trunk = Model.load(folder, stream=True).trunk
    with pytest.raises(CheckpointError, match=r"No space left.*complete layers are in .*states; the same command"):
        trunk.run(BATCHES, folder=tmp_path / "states")
    assert_same(Model.load(folder, stream=True), Model.load(folder), folder=tmp_path / "states")


def fail_above(monkeypatch, trunk, num_positions, index=1):
    """One layer, as on a small GPU, has no memory for more positions than these; -> the sizes that it was run with."""
    layer_class, seen = type(trunk.decoder.layers[index]), []
    real = layer_class.forward

    def forward(self, hidden, *args, **kwargs):
        seen.append(tuple(hidden.shape[:2]))
        if self is trunk.decoder.layers[index] and seen[-1][0] * seen[-1][1] > num_positions:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, hidden, *args, **kwargs)

    monkeypatch.setattr(layer_class, "forward", forward)
    return seen


@pytest.mark.one_case
@pytest.mark.parametrize("name", families(CONFIGS, {"deepseek_v3", "deepseek_v4", "qwen3_5"}))
def test_a_device_without_memory_gets_smaller_batches(name, tmp_path, monkeypatch):
    """The states of every family, tuples included, can be taken apart; later layers begin with the smaller size."""
    build(name).save(tmp_path / "model")
    batch = [torch.tensor([prompt(9, seed=seed) for seed in range(5)])]
    expected = Model.load(tmp_path / "model", stream=True).trunk.run(batch)[0]
    trunk = Model.load(tmp_path / "model", stream=True).trunk
    seen = fail_above(monkeypatch, trunk, 20)
    output = trunk.run(batch)[0]
    for name in ("final_hidden", "head_input"):
        torch.testing.assert_close(getattr(output, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    if seen:  # a family whose layers take their states by keyword
        assert seen[:5] == [(5, 9), (5, 9), (2, 9), (2, 9), (1, 9)]
        assert seen[5:8] == [(2, 9), (2, 9), (1, 9)] or len(trunk.decoder.layers) == 2


def test_a_device_without_memory_for_one_text(folder, tmp_path, monkeypatch):
    """One error; the states of complete layers stay, and a device with memory resumes."""
    trunk = Model.load(folder, stream=True).trunk
    fail_above(monkeypatch, trunk, 3)
    message = r"layer 1: cpu has not enough memory for one text of 21 tokens: CUDA out of"
    with pytest.raises(ConfigError, match=message) as failed:
        trunk.run(BATCHES, folder=tmp_path / "states")
    assert "use shorter texts (--max-tokens), or another device (--device). The states of complete" in str(failed.value)
    monkeypatch.undo()
    resumed = []
    Model.load(folder, stream=True).trunk.run(BATCHES, folder=tmp_path / "states", on_layer=resumed.append)
    assert [layer.resumed for layer in resumed][:2] == [True, False]


def test_a_device_without_memory_for_a_layer(folder, monkeypatch):
    def load(*args, **kwargs):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            raise CheckpointError("transformers cannot load the trunk") from error

    monkeypatch.setattr(LayerLoader, "load", load)
    with pytest.raises(ConfigError, match=r"layer 0: cpu has not enough memory for its weights, 0\.0 GB as stored"):
        Model.load(folder, stream=True).trunk.run(BATCHES)


def test_other_errors_are_not_retried(folder, monkeypatch):
    trunk, calls = Model.load(folder, stream=True).trunk, []

    def fail(*args, **kwargs):
        calls.append(args)
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(type(trunk.decoder.layers[0]), "forward", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        trunk.run(BATCHES)
    assert len(calls) == 1


@pytest.mark.more
def test_progress_counts_the_bytes_of_each_layer(folder):
    model, progress = Model.load(folder, stream=True), []
    model.trunk.run(BATCHES, on_layer=progress.append)
    tensors = [(name, tensor) for name, tensor in load_file(shard(folder)).items() if ".layers." in name]
    indices = range(model.trunk.num_layers)
    by_layer = [sum(tensor.nbytes for name, tensor in tensors if f".layers.{index}." in name) for index in indices]
    assert [each.num_bytes for each in progress] == by_layer
    assert model.trunk.num_bytes == sum(by_layer)


def test_single_passes_are_refused(folder):
    with pytest.raises(ConfigError, match="cannot run single passes or generate"):
        Model.load(folder, stream=True).trunk(BATCHES[0])


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_missing_tensor_is_reported_before_anything_runs(folder):
    rewrite(shard(folder), lambda tensors: tensors.pop("model.layers.1.self_attn.o_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing or of another shape: model\.layers\.1\.self_attn\.o_proj"):
        Model.load(folder, stream=True)


@pytest.mark.more
def test_values_that_are_not_finite_are_reported(folder):
    name = "model.layers.1.self_attn.o_proj.weight"
    rewrite(shard(folder), lambda tensors: tensors[name].view(-1)[5].fill_(float("nan")))
    model = Model.load(folder, stream=True)
    with pytest.raises(CheckpointError, match=r"layer 1: 1 tensors hold NaN or Inf: self_attn\.o_proj\.weight"):
        model.trunk.run(BATCHES)


def test_file_truncated_while_streaming_is_an_error(folder):
    """Without the read ahead of the mapped file, the process would end with SIGBUS."""
    model, path = Model.load(folder, stream=True), shard(folder)
    with pytest.raises(CheckpointError, match=path.name):
        model.trunk.run(BATCHES, on_layer=lambda _: os.truncate(path, 1000))


@pytest.mark.parametrize("hints", [True, False])
def test_a_layer_is_read_ahead_once(hints, folder, monkeypatch):
    """The kernel is asked for each byte of a layer; systems without such hints read it."""
    seen = []
    if hints:
        monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: seen.append((begin, begin + size)))
    else:
        monkeypatch.delattr(os, "posix_fadvise")
        real = LocalFile.read_into
        monkeypatch.setattr(
            LocalFile,
            "read_into",
            lambda self, begin, out: seen.append((begin, begin + len(out))) or real(self, begin, out),
        )
    monkeypatch.setattr(remote, "_READ_AHEAD", 1000)
    trunk = Model.load(folder, stream=True).trunk
    names = [name for name in load_file(shard(folder)) if ".layers.1." in name]
    seen.clear()
    assert trunk._weights.fetch(names) == sum(trunk.checkpoint.info(name).nbytes for name in names)
    wanted = sorted((trunk.checkpoint.info(name).begin, trunk.checkpoint.info(name).end) for name in names)
    for begin, end in wanted:
        parts = [(max(first, begin), min(last, end)) for first, last in sorted(seen) if first < end and last > begin]
        assert (parts[0][0], parts[-1][1]) == (begin, end)
        assert all(left[1] == right[0] for left, right in pairwise(parts))


@pytest.mark.more
def test_every_layer_tensor_gives_its_pages_back(folder, monkeypatch):
    """Pages of the mapped file that a layer was copied from stay in the process unless they are released by name."""
    model, released = Model.load(folder, stream=True), set()
    monkeypatch.setattr(TensorReader, "release", lambda self, name: released.add(name))
    model.trunk.run(BATCHES)
    assert released == {name for name in load_file(shard(folder)) if ".layers." in name}


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["glm4_moe", "longcat_flash", "qwen3_next"])
def test_the_same_trunk(name, tmp_path):
    """Its state one layer at a time, and its passes when all layers are loaded."""
    build(name).save(tmp_path / "model")
    loaded, deferred = Model.load(tmp_path / "model").trunk, Model.load(tmp_path / "model", defer=True).trunk
    assert fingerprint_of(deferred.state_items()) == fingerprint(loaded.model)
    assert all(value.is_meta for value in deferred.decoder.layers.parameters())
    assert not any(value.requires_grad for layer in deferred.loaded_layers() for value in layer.parameters())
    deferred.close()
    tokens = torch.tensor([prompt(21, seed=1)])
    with torch.inference_mode():
        assert torch.equal(deferred(tokens).head_input, loaded(tokens).head_input)


@pytest.mark.more
def test_which_start_is_deferred(tmp_path):
    """That of several processes, with the checkpoint's head, that of a file, or a fresh one."""
    build("glm4_moe").save(tmp_path / "model")
    for start in (
        StartingPoint(tmp_path / "model"), StartingPoint(tmp_path / "model", tmp_path / "model"),
        StartingPoint(tmp_path / "model", fresh=True),
    ):  # fmt: skip
        for ranks in (TWO, ALONE):
            model = load_starting_point(start, near=tmp_path, ranks=ranks)[0]
            assert any(value.is_meta for value in model.trunk.decoder.layers.parameters()) == (ranks is TWO)
            assert (model.head is None) == start.fresh


def test_values_that_are_not_finite(tmp_path):
    model = build("glm4_moe")
    with torch.no_grad():
        model.trunk.decoder.layers[1].self_attn.o_proj.weight[0, 0] = float("nan")
    model.save(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"layer 1: 1 tensors hold NaN or Inf: self_attn\.o_proj\.weight"):
        list(Model.load(tmp_path / "model", defer=True).trunk.loaded_layers())
