"""Heads for models that were published without one: inside the checkpoint, or in one of their own beside it."""

import json
from functools import cache

import pytest
import torch
from quick import others_slow
from safetensors.torch import load_file, save_file

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import is_foreign, open_head, trunk_family
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.decoding.generate import generate
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table import by_config, find, generic
from nextn.model.model import Model
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.model.transformers_loading import model_from_config
from nextn.settings import Settings
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.train.config import TrainConfig
from nextn.train.head_run import StartingPoint, prepare_head_run
from nextn.train.joint_task import JointTask

SETTINGS = {"steps": 3, "batch_size": 4, "length": 32, "depths": 2, "eval_batches": 1, "dtype": "float32", "warmup": 0}
TEXT = "a is a letter, and so on. " * 80
SIZES = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.05, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
TRUNKS = {
    "llama": {"model_type": "llama"},
    "llama-3.1": {"model_type": "llama", "rope_parameters": LLAMA31},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True},
    "phi4": {"model_type": "phi3"},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 2.0},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
}


def build(folder, name, **changes):
    """A random trunk with a byte-level tokenizer, as transformers saves it."""
    torch.manual_seed(0)
    model = model_from_config(SIZES | TRUNKS.get(name, {}) | changes, torch.float32)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory, text):
    """made(name, layout): the folders of a trunk and of its head after three steps; made once."""
    root = tmp_path_factory.mktemp("made")

    @cache
    def of(name, layout=None, head_only=False):
        trunk = root / name
        if not trunk.exists():
            build(trunk, name)
        run = prepare_head_run(
            root / f"{name}-{layout}-{head_only}", start(trunk, layout), data=[text], settings=SETTINGS
        )
        list(run.trainer.run())
        written = run.write(head_only=head_only)
        return trunk, written if written.is_dir() else written.parent

    return of


def start(trunk, layout=None, **more):
    return StartingPoint(trunk, fresh=True, layout=layout, **more)


def tokens(model, backend, k):
    settings = Settings(num_speculative_tokens=k, max_tokens=20)
    return [result.tokens for result in generate(model, ["a is", "so"], settings, backend=backend)]


@pytest.mark.more
@pytest.mark.parametrize("name", others_slow(TRUNKS, "llama-3.1", "smollm2", "gemma2"))
def test_any_decoder_gets_a_head(name, made):
    """Made of the trunk's own layer, stored inside: a published layout that decodes the same text in both backends."""
    _, folder = made(name)
    model = Model.load(folder)
    assert (model.family.name, model.head.num_modules) == ("generic", 1)
    assert type(model.head.layers[0]) is type(model.trunk.decoder.layers[0])
    plain = tokens(model, "torch", 0)
    assert tokens(model, "torch", 3) == tokens(model, "native", 3) == plain
    names = {each for each in Checkpoint.open(folder).tensors if each.startswith("model.layers.2.")}
    assert {
        "model.layers.2.eh_proj.weight",
        "model.layers.2.enorm.weight",
        "model.layers.2.shared_head.norm.weight",
    } < names


@pytest.mark.more
@pytest.mark.parametrize(
    "name", others_slow(["llama", "llama-3.1", "mistral", "qwen2", "qwen3", "smollm2"], "llama-3.1", "qwen3")
)
def test_a_draft_in_mimos_layout_beside_the_trunk(name, made):
    """A Qwen2 layer of the trunk's sizes, with biases, and the names and config by which engines know it."""
    trunk, folder = made(name, "mimo")
    model = Model.load(trunk, head=folder)
    assert model.family.name == "mimo_draft"
    assert tokens(model, "torch", 3) == tokens(model, "native", 3) == tokens(model, "torch", 0)
    draft = Checkpoint.open(folder)
    assert (draft.config["architectures"], draft.config["model_type"]) == (["MiMoForCausalLM"], "qwen2")
    assert (draft.config["num_nextn_predict_layers"], draft.config["num_attention_heads"]) == (1, 4)
    assert {f"model.mtp_layers.0.self_attn.{each}_proj.bias" for each in "qkv"} < set(draft.tensors)
    assert not [each for each in draft.tensors if not each.startswith("model.mtp_layers.0.")]
    rope = json.loads((trunk / "config.json").read_text())["rope_parameters"]
    assert draft.config["rope_parameters"] == rope
    frequencies = [part.rotary_emb.inv_freq for part in (model.head._source[0].decoder, model.trunk.decoder)]
    if name != "qwen3":  # whose heads are larger than hidden_size / heads
        torch.testing.assert_close(*frequencies)


def test_a_trunk_that_caps_its_logits(tmp_path, text):
    """A head trains on the capped logits, and drafts by them from a part of the tokens, too; a trunk does not train."""
    trunk = build(tmp_path / "trunk", "gemma2")
    run = prepare_head_run(tmp_path / "run", start(trunk, None), data=[text], settings=SETTINGS)
    task, batch = run.task, run.task.example(0).batch
    with torch.no_grad():
        states = task.model.trunk(batch.tokens, documents=batch.documents)
        (drafted,) = task.head.rollout_hidden(batch.tokens, states.head_input, 1, documents=batch.documents)
        logits = task.model.trunk.logits(states.final_hidden)[:, 1:], task.head.logits(0, drafted)
        shared = torch.minimum(*(each.softmax(-1) for each in logits)).sum(-1)
        valid = task._targets(batch).labels(1) >= 0
        report = task.loss(task.example(0), 1.0)
    torch.testing.assert_close(report.overlap[0], shared[valid].sum(), rtol=1e-4, atol=0)
    ids = torch.arange(0, 264, 2)
    task.head.draft_vocabulary = DraftVocabulary(ids, 264)
    torch.testing.assert_close(task.head.draft_logits(0, drafted), logits[1][..., ids])
    with pytest.raises(ConfigError, match="loss_vocab = 50"):
        prepare_head_run(tmp_path / "part", start(trunk, None), data=[text], settings=SETTINGS | {"loss_vocab": 50})
    with pytest.raises(FamilyError, match="--freeze-trunk"):
        JointTask(task.model, run.held_out, TrainConfig(steps=1, depths=2))


@pytest.mark.slow
def test_acceptance_rises_on_a_trained_trunk(tmp_path, text):
    """From a start that copies the trunk's layer to a head that drafts what the trunk says."""
    torch.manual_seed(0)
    model = model_from_config(SIZES | TRUNKS["llama"], torch.float32)
    ids = torch.tensor([byte_tokenizer()(TEXT)["input_ids"][first : first + 48] for first in range(0, 26, 2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "trunk")
    byte_tokenizer().save_pretrained(tmp_path / "trunk")
    settings = SETTINGS | {"steps": 40, "depths": 3}
    for layout in (None, "mimo"):
        run = prepare_head_run(
            tmp_path / f"run-{layout}", start(tmp_path / "trunk", layout), data=[text], settings=settings
        )
        before = run.task.evaluate(0).heldout.greedy.length
        list(run.trainer.run())
        assert run.task.evaluate(40).heldout.greedy.length > max(3, before + 1)


@pytest.mark.more
def test_a_head_alone_goes_beside_its_trunk_and_says_whose_it_is(made, tmp_path, text):
    trunk, head = made("llama", None, True)
    model, inside = Model.load(trunk, head=head), Model.load(made("llama")[1])
    assert [each.tolist() for each in model.head.state_dict().values()] == [
        each.tolist() for each in inside.head.state_dict().values()
    ]
    assert model.notes == ()
    other = build(tmp_path / "other", "llama", initializer_range=0.02)
    inventory = Inventory.of(Checkpoint.open(other), family=trunk_family(Checkpoint.open(other)))
    assert is_foreign(open_head(head, inventory), inventory)
    assert "trained on another trunk" in Model.load(other, head=head).notes[0]
    further = prepare_head_run(tmp_path / "run", StartingPoint(trunk, head), data=[text], settings=SETTINGS)
    list(further.trainer.run())  # from the head that is there
    assert Model.load(further.write(allow_worse=True)).family.name == "generic"


def test_a_head_alone_is_trained_on_beside_a_streamed_trunk(made, tmp_path, text):
    """The trunk is read layer by layer, and gives the states that the loaded one does."""
    trunk, head = made("llama", None, True)
    states = []
    for stream in (False, True):
        run = prepare_head_run(
            tmp_path / f"{stream}", StartingPoint(trunk, head, stream=stream), data=[text], settings=SETTINGS
        )
        assert isinstance(run.task.model.trunk, StreamedTrunk) == stream
        cache = run.task.cached(tmp_path / f"{stream}" / "hidden")
        if stream:
            run.task.stream_trunk(tmp_path / "states", cache, lambda progress: None)
        for _ in cache.fill():
            pass
        states.append(run.task.hidden(run.task.example(0)).final_hidden)
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_what_is_no_head_of_this_trunk_is_refused(made, tmp_path):
    trunk, draft = made("llama", "mimo")
    deeper = build(tmp_path / "deeper", "llama", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"for a trunk of 2 layers, .* has 3"):
        Model.load(deeper, head=draft)
    with pytest.raises(CheckpointError, match="holds no head of family generic"):
        Model.load(trunk, head=trunk)
    with pytest.raises(CheckpointError, match="no MTP head") as error:
        Model.load(_declared(trunk, tmp_path / "declared"))
    assert "--init-head" in str(error.value)
    with pytest.raises(FamilyError, match="a head alone; give its trunk, and this head with --head"):
        Model.load(draft)
    with pytest.raises(FamilyError, match="stored beside the trunk"):
        Model.load(trunk, head=draft).save(tmp_path / "no")
    (tmp_path / "partial").mkdir()
    tensors = load_file(draft / "head.safetensors")
    del tensors["model.mtp_layers.0.self_attn.q_proj.bias"]
    save_file(tensors, tmp_path / "partial" / "head.safetensors")
    (tmp_path / "partial" / "config.json").write_text((draft / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"missing: model.mtp_layers.0.self_attn.q_proj.bias \(64,\)"):
        Model.load(trunk, head=tmp_path / "partial")


def _declared(trunk, folder):
    """The same trunk with a count of modules and none stored."""
    Model.load(trunk, need_head=False).save(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_mtp_layers": 1}))
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "layout", "words"),
    [
        ("olmo", {"model_type": "olmo"}, None, "has no weight"),
        ("neox", {"model_type": "gpt_neox"}, None, "no final norm"),
        ("gemma3", {}, "mimo", "its config has no hidden_act"),
        ("phi4", {"partial_rotary_factor": 0.5}, "mimo", r"it rotates 0\.5 of each head"),
        ("mistral", {"sliding_window": 32}, "mimo", "sliding window"),
        ("llama", {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 4}, "mimo", "no even multiple"),
    ],
)  # fmt: skip
def test_a_trunk_that_cannot_says_why(name, changes, layout, words, tmp_path, text):
    trunk = build(tmp_path / "trunk", name, **changes)
    with pytest.raises(FamilyError, match=words):
        prepare_head_run(tmp_path / "run", start(trunk, layout), data=[text], settings=SETTINGS)


def test_layouts_are_named(tmp_path):
    with pytest.raises(ConfigError, match="--layout eagle; expected mimo"):
        start(tmp_path, "eagle")
    with pytest.raises(ConfigError, match="only for a fresh head"):
        StartingPoint(tmp_path, layout="mimo")


def test_families_of_models_without_one():
    """A model of an unknown type has a head only where it says so; an encoder-decoder model cannot."""
    assert find({"model_type": "llama"}) is None
    assert by_config({"model_type": "llama", "num_mtp_layers": 1}).name == "generic"
    assert by_config({"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}).name == "mimo_draft"
    assert find({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}) is None
    assert generic({"model_type": "gemma3_text"}).norm_weight == "1+w"
    mixed = {"model_type": "x", "layer_types": ["sliding_attention", "full_attention"]}
    assert generic(mixed).block == {"layer_types": ["full_attention"]}
    with pytest.raises(FamilyError, match="'t5' is an encoder-decoder model"):
        generic({"model_type": "t5", "is_encoder_decoder": True})


def test_the_draft_computes_what_engines_do(made):
    """vLLM's mimo_mtp.py, again: zeroed first embedding, [hidden, embedding], next_hidden after the norm."""
    trunk, folder = made("llama-3.1", "mimo")
    model, weights = Model.load(trunk, head=folder), load_file(folder / "head.safetensors")
    weights = {name.removeprefix("model.mtp_layers.0."): value for name, value in weights.items()}
    config = json.loads((folder / "config.json").read_text())
    layer = model_from_config(config | {"num_hidden_layers": 1, "layer_types": None}, torch.float32).model
    block = {name: value for name, value in weights.items() if name.startswith(("self_attn", "mlp", "input_l", "post"))}
    layer.layers[0].load_state_dict(block)
    layer.norm.weight.data = weights["final_layernorm.weight"]

    def norm(states, name):
        return torch.nn.functional.rms_norm(
            states, states.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"]
        )

    ids = torch.tensor([[97, 32, 105, 115, 32, 97, 32]])
    hidden = model.trunk.model.model(ids).last_hidden_state[:, :-1]
    for step in (0, 1):  # the state of the next draft is the one after the final norm
        embedded = model.trunk.embedding.weight[ids[:, 1:]].clone()
        embedded[:, 0] = 0
        inputs = torch.cat([norm(hidden, "hidden_layernorm"), norm(embedded, "token_layernorm")], -1)
        expected = layer(inputs_embeds=inputs @ weights["input_proj.weight"].T).last_hidden_state
        made_here = model.head.step(0, ids[:, 1:], hidden)
        torch.testing.assert_close(made_here.final_hidden, expected, msg=f"step {step}")
        torch.testing.assert_close(made_here.next_hidden, expected)
        hidden = expected
