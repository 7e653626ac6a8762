"""A trunk without a family in GLM-4.5's layout: the same logits, its head with it, and what is refused."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_separate_head import SETTINGS, TEXT, build, start, tokens
from transformers import AutoModelForCausalLM

from nextn.audit_rules import audit
from nextn.audit_rules.gguf import audit_gguf
from nextn.checkpoint import checkpoint as checkpoint_module
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import Provenance, trunk_fingerprint
from nextn.cli.bench import serving
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.edit.adopt import EXPERTS, adopt, engines_after_adopting, part_width
from nextn.errors import CheckpointError, FamilyError
from nextn.model.model import Model
from nextn.train.head_run import prepare_head_run

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
# Name -> the kind of trunk, and changes of its config. Of 24 and 300 values, parts of the MLP are not equal.
TRUNKS = {
    "llama": ("llama", {"intermediate_size": 300}),
    "llama 3.1": ("llama-3.1", {}),
    "llama, tied, one head of keys": ("smollm2", {"num_key_value_heads": 1}),
    "llama, other heads": ("llama", {"head_dim": 32, "rms_norm_eps": 0.1}),
    "mistral": ("mistral", {"intermediate_size": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
}
IDS = torch.randint(0, 250, (2, 100), generator=torch.Generator().manual_seed(0))


def spread(folder):
    """Give norm weights and biases, which transformers initializes to a constant, values that matter."""
    torch.manual_seed(1)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weights[name] = torch.rand_like(weight) + (0 if name.endswith("bias") else 0.5)
    save_file(weights, path, {"format": "pt"})
    return folder


def in_bfloat16(folder):
    """Store the folder's weights and name their dtype in the config."""
    path = folder / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(path).items()}, path, {"format": "pt"})
    _edit(folder / "config.json", dtype="bfloat16")
    return folder


def trunk_of(folder, kind, **changes):
    return spread(build(folder, kind, **changes))


def logits(folder, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=dtype)
    assert not info["missing_keys"]
    with torch.no_grad():
        return type(model).__name__, model(IDS).logits


@pytest.mark.more
@pytest.mark.parametrize("name", TRUNKS)
def test_logits_are_those_of_the_trunk(name, tmp_path, monkeypatch):
    """Through transformers in float32, to the last bits of sums, whatever the size of a chunk."""
    kind, changes = TRUNKS[name]
    trunk = trunk_of(tmp_path / "trunk", kind, **changes)
    monkeypatch.setattr(checkpoint_module, "CHUNK", 1000)
    monkeypatch.setattr("nextn.edit.adopt.CHUNK", 1000)
    plan = adopt(trunk, tmp_path / "out")
    model_class, theirs = logits(tmp_path / "out")
    assert model_class == "Glm4MoeForCausalLM"
    torch.testing.assert_close(theirs, logits(trunk)[1], atol=2e-6, rtol=0)
    assert [each for each in plan.notes if "llama.cpp" in each] == [*plan.notes[:-1]] * (name == "llama 3.1")
    assert "no head yet" in plan.notes[-1]


@pytest.mark.parametrize("name", ["llama", "llama 3.1", "mistral", "qwen2, tied", "qwen3"])
def test_logits_in_bfloat16_differ_by_rounding(name, tmp_path):
    """The new layout is as far from the trunk's logits in float32 as the trunk itself is in bfloat16."""
    kind, changes = TRUNKS[name]
    trunk = in_bfloat16(trunk_of(tmp_path / "trunk", kind, **changes))
    adopt(trunk, tmp_path / "out")
    exact = logits(trunk)[1]
    own, theirs = (logits(folder, torch.bfloat16)[1].float() - exact for folder in (trunk, tmp_path / "out"))
    assert 0 < own.abs().max() < 0.02 * exact.abs().max()
    assert theirs.norm() < 1.2 * own.norm()
    assert theirs.abs().max() < 2 * own.abs().max()


def test_what_the_folder_has(tmp_path):
    """The fields that engines read without a default; an lm_head; other weights as they were; the tokenizer."""
    trunk = trunk_of(tmp_path / "trunk", "qwen2", tie_word_embeddings=True, eos_token_id=7)
    adopt(trunk, tmp_path / "out")
    out, old = Checkpoint.open(tmp_path / "out"), load_file(trunk / "model.safetensors")
    expected = {
        "model_type": "glm4_moe", "head_dim": 16, "attention_bias": True, "use_qk_norm": False, "eos_token_id": 7,
        "partial_rotary_factor": 1.0, "tie_word_embeddings": False, "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": 16,
        "routed_scaling_factor": EXPERTS, "num_nextn_predict_layers": 0, "max_position_embeddings": 512,
    }  # fmt: skip
    assert {key: out.config[key] for key in expected} == expected
    assert out.config["rope_parameters"]["partial_rotary_factor"] == 1
    assert out.read_bytes("lm_head.weight") == out.read_bytes("model.embed_tokens.weight")
    moved = {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert old.keys() - out.tensors.keys() == moved
    for name in old.keys() - moved:
        assert out.read_bytes(name) == old[name].numpy().tobytes(), name
    assert len(out.tensors) == len(old) - 3 + 3 * (EXPERTS + 1) + 2 + 1
    assert out.problems == ()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (trunk / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def trained(folder, trunk, text, **options):
    run = prepare_head_run(folder, start(trunk), data=[text], settings=SETTINGS)
    list(run.trainer.run())
    written = run.write(allow_worse=True, **options)
    return written if written.is_dir() else written.parent


@pytest.mark.more
def test_a_head_is_trained_in_the_new_layout(text, tmp_path):
    """One command from the folder to a clean checkpoint of the family, which decodes the old trunk's text."""
    trunk = trunk_of(tmp_path / "trunk", "qwen3")
    adopt(trunk, tmp_path / "out")
    folder = trained(tmp_path / "run", tmp_path / "out", text)
    model = Model.load(folder)
    assert model.family.name == "glm4_moe"
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    plain = tokens(Model.load(trunk, need_head=False), "torch", 0)
    assert tokens(model, "torch", 3) == tokens(model, "native", 3) == plain
    assert audit(Checkpoint.open(folder)).clean
    router = load_file(folder / "model-mtp.safetensors")["model.layers.2.mlp.gate.weight"]
    assert router.abs().max() > 0  # all experts learn


def adopted(folder, kind, **changes):
    """A random trunk in the new layout, with the head that it got in its own."""
    (folder / "text.txt").write_text(TEXT)
    head = trained(folder / "run", trunk_of(folder / "trunk", kind, **changes), folder / "text.txt")
    adopt(head, folder / "adopted")
    return folder / "adopted"


@pytest.mark.more
@pytest.mark.parametrize(("kind", "inside"), [("llama", True), ("qwen2", False), ("qwen3", False)])
def test_a_head_goes_with_its_trunk(kind, inside, text, tmp_path):
    """Inside the checkpoint or alone: the same logits at two depths, recorded as trained on this trunk."""
    trunk = trunk_of(tmp_path / "trunk", kind)
    head = trained(tmp_path / "run", trunk, text, head_only=not inside)
    source, apart = (head, None) if inside else (trunk, head)
    adopt(source, tmp_path / "out", head=apart)
    old, new = Model.load(source, head=apart), Model.load(tmp_path / "out")
    assert (new.family.name, new.notes) == ("glm4_moe", ())
    with torch.no_grad():
        one, other = (model.head(IDS, model.trunk(IDS).final_hidden, depths=2) for model in (old, new))
    torch.testing.assert_close(other, one, atol=2e-6, rtol=0)
    out = Checkpoint.open(tmp_path / "out")
    record = Provenance.read(out)
    assert (record.made_by, record.trained_with) == ("convert", trunk_fingerprint(Inventory.of(out)))
    assert audit(out).clean


REFUSED = {
    "attention_bias: o_proj": ("llama", {"attention_bias": True}),
    "mlp_bias": ("llama", {"mlp_bias": True}),
    "hidden_act gelu": ("qwen2", {"hidden_act": "gelu"}),
    "sliding_window 8": ("mistral", {"sliding_window": 8}),
    "rope_parameters: rope_type dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "num_hidden_layers 1": ("llama", {"num_hidden_layers": 1}),
    "quantization_config: give": ("llama", {"quantization_config": {"quant_method": "fp8"}}),
    "model_type 'gemma3_text' is not llama": ("gemma3", {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_trunk_that_the_layout_cannot_compute(words, tmp_path):
    """By the field of its config; nothing is written."""
    kind, changes = REFUSED[words]
    trunk = build(tmp_path / "trunk", kind, **{key: each for key, each in changes.items() if key.endswith("_bias")})
    _edit(trunk / "config.json", **changes)
    with pytest.raises(FamilyError, match=f"cannot compute this trunk: {words}"):
        adopt(trunk, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


DAMAGED = {
    r"up_proj\.weight of layer 1 is missing": {"model.layers.1.mlp.up_proj.weight": None},
    r"no place for model\.layers\.0\.self_attn\.o_proj\.bias": {"model.layers.0.self_attn.o_proj.bias": (64,)},
    r"gate_proj\.weight is \[95, 64\], by the config \[96, 64\]": {"model.layers.1.mlp.gate_proj.weight": (95, 64)},
    "the embedding is missing": {"model.embed_tokens.weight": None},
    "the lm_head is missing": {"lm_head.weight": None},
}


@pytest.mark.parametrize("words", DAMAGED)
def test_a_trunk_whose_tensors_are_not_its_configs(words, tmp_path):
    trunk = build(tmp_path / "trunk", "llama")
    weights = load_file(trunk / "model.safetensors")
    for name, shape in DAMAGED[words].items():
        weights.pop(name, None)
        weights |= {} if shape is None else {name: torch.ones(shape)}
    save_file(weights, trunk / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        adopt(trunk, tmp_path / "out")


@pytest.mark.more
def test_other_heads_are_refused(text, tmp_path):
    trunk = trunk_of(tmp_path / "trunk", "qwen2")
    run = prepare_head_run(tmp_path / "mimo", start(trunk, "mimo"), data=[text], settings=SETTINGS)
    list(run.trainer.run())
    with pytest.raises(FamilyError, match=r"1 MTP layers of mimo_draft.*without --layout"):
        adopt(trunk, tmp_path / "out", head=run.write(allow_worse=True).parent)
    head = trained(tmp_path / "run", trunk, text, head_only=True)
    other = trunk_of(tmp_path / "other", "qwen2", initializer_range=0.02)
    with pytest.raises(CheckpointError, match="trained on another trunk"):
        adopt(other, tmp_path / "out", head=head)


@pytest.mark.parametrize(
    ("size", "width"),
    [(14336, 1664), (8960, 1024), (4864, 576), (25600, 3072), (28672, 3328), (96, 16), (300, 48)],
)
def test_widths(size, width):
    """Multiples of a large power of two, with at most a tenth more values where the MLP is not tiny."""
    assert part_width(size) == width


@pytest.mark.parametrize("inside", [True, False])
def test_every_route_to_an_engine_is_named(inside, text, here, tmp_path, monkeypatch):
    """A trained head that an engine does not run as it is goes there in seconds; errors and `audit` say so at once."""
    trunk = trunk_of(tmp_path / "trunk", "llama")
    head = trained(tmp_path / "run", trunk, text, head_only=not inside)
    byte_tokenizer().save_pretrained(trunk)
    byte_tokenizer().save_pretrained(head) if inside else None
    outs = {"vllm": "out", "llama.cpp": "out.gguf"}
    with monkeypatch.context() as patch:
        patch.setattr("nextn.edit.adopt.full_config", None)  # imports transformers: seconds
        found = audit(head) if inside else audit(trunk, head=head)
        here("serve", *((head,) if inside else (trunk, "--head", head)), "--print", "vllm")
    (fix,) = (each.fix for each in found.findings if each.rule == "engine-absent")
    commands = re.findall("`nextn (export .+?)`", fix)
    assert ["--for transformers" in each for each in commands] == [True, False]
    for index, command in enumerate(commands):
        made = tmp_path / f"audited{index}"
        code, out, err = here(*shlex.split(command.replace(" OUT", f" {made}")))
        assert (code, str(made) in out) == (0, True), err
    for engine, name in outs.items():
        code, _, err = here("export", head, tmp_path / name, "--for", engine)
        assert (code, "train --layout" in err or "train with --layout" in err, "--adopt" in err) == (2, True, True), err
        code, _, err = here("serve", *((head,) if inside else (trunk, "--head", head)), "--print", engine, "-k", 2)
        route = f"nextn adopt {head} OUT" if inside else f"nextn export {head} OUT"
        assert (code, route in err) == (2, True)
        if not inside:
            command = re.search("`nextn (export .+?)`", err)[1].replace(" OUT", f" {tmp_path / 'named'}")
            code, out, _ = here(*shlex.split(command))
            assert (code, f" {tmp_path / 'named'}" in out) == (0, True)
            assert re.search(r"tokens\D+2|n-max 2", out)
            if engine == "vllm":  # `nextn advise` prints the same command
                best = SimpleNamespace(pays=True, best=SimpleNamespace(num_speculative_tokens=2))
                line, _ = serving(str(trunk), str(head), [best])
                assert re.search("`nextn export .+?`", line)[0] in err
    code, _, err = here("export", head, tmp_path / "out", "--for", "vllm", "--adopt", "--tokenizer", "m.gguf")
    assert (code, "leave out --tokenizer" in err, (tmp_path / "out").exists()) == (2, True, False)
    assert here("export", head, tmp_path / "out", "--for", "llama.cpp", "--adopt")[0] == 2  # not the name of a file
    code, out, _ = here("export", head, tmp_path / "out", "--for", "vllm", "--adopt")
    assert code == 0
    assert f"vllm serve {tmp_path / 'out'} --speculative-config" in out
    assert (tmp_path / "out" / "config.json").exists()
    code, out, _ = here("export", head, tmp_path / "out.gguf", "--for", "llama.cpp", "--adopt")
    assert (code, f"llama-server -m {tmp_path / 'out.gguf'} " in out) == (0, True)
    assert audit_gguf(tmp_path / "out.gguf").clean
    assert not [*tmp_path.glob(".*")]


@pytest.mark.more
def test_no_route_where_the_engine_computes_another_model(text, tmp_path):
    """llama3's rotary embeddings do not run in llama.cpp in this layout, so its errors do not name it."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    head = trained(tmp_path / "run", trunk_of(tmp_path / "trunk", "llama", rope_parameters=rope), text)
    assert engines_after_adopting(head) == ("vllm", "sglang")
    older = {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_act": None}
    for change, routes in (
        (older, 3),
        ({"mlp_bias": True}, 0),
        ({"sliding_window": 8}, 0),
        ({"model_type": "gpt2"}, 0),
    ):
        config = json.loads((head / "config.json").read_text())
        stated = {name: value for name, value in (config | change).items() if value is not None}
        (head / "config.json").write_text(json.dumps(stated))
        assert len(engines_after_adopting(head)) == routes, change
        (head / "config.json").write_text(json.dumps(config))


def test_command(tmp_path, here):
    trunk = trunk_of(tmp_path / "trunk", "llama")
    code, out, _ = here("adopt", trunk, tmp_path / "out", "--dry-run")
    assert (code, (tmp_path / "out").exists()) == (0, False)
    code, out, _ = here("adopt", trunk, tmp_path / "out")
    assert code == 0
    assert "model_type: 'llama' -> 'glm4_moe'" in out
    assert "note: it has no head yet: `nextn train RUN --freeze-trunk --init-head --from`" in out
    assert here("adopt", trunk, tmp_path / "out")[0] != 0
