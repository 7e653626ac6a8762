"""transformers' own MTP as an oracle: the same checkpoint, the same logits at every depth, the same text."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import build, decode, prompt
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

# For docs/reference/support.md: whose own code gave our logits. Step (below) and Inkling (test_blocks.py): after the
# facts where transformers differs, named there, are switched to its choice.
CHECKED = {
    "deepseek_v3": ("transformers",),
    "glm4_moe": ("transformers",),
    "mellum": ("transformers",),
    "inkling": ("transformers",),
    "step3p5": ("transformers",),
}
FAMILIES = [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1), ("glm4_moe", 2), ("mellum", 1)]
# What transformers' Step-3.7 does otherwise: it feeds and recycles states after the norm, and reads all depths with the
# trunk's output head; every other engine, and our row, has states before the norm and an output head per module. It
# also gives a sliding module the heads of full attention, where the others give it those of the sliding layers: hence
# a trunk below in which both have as many.
STEP = {"hidden": "post", "next_hidden": "post", "own": ()}


def theirs(folder, trunk, monkeypatch):
    """transformers' trunk of a checkpoint of ours, fit for `use_mtp`.

    It finds the head by patterns of tensors to ignore, which name layer 61 for DeepSeek-V3 and layers 46 and 92 for
    GLM-4.5: the depths of the released trunks. A tiny trunk's head stands at another layer, so the pattern is widened.
    """
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("text_config", config)
    inner["num_mtp_layers"] = inner.get("num_nextn_predict_layers") or inner["num_mtp_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    kind, places = type(trunk.model), "|".join(str(trunk.num_layers + index) for index in range(4))
    patterns = [*(kind._keys_to_ignore_on_load_unexpected or []), rf"model\.layers\.({places})\."]
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", patterns)
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def their_logits(model, text, modules):
    """transformers' MTP over a whole text -> logits [T-D, D, V], each depth eating the text's own tokens."""
    ids = torch.tensor([text])
    with torch.inference_mode():
        mtp = MtpModel.from_pretrained(model)
        states = model.get_decoder()(input_ids=ids).last_hidden_state
        cache, out = MtpCache(config=model.config.get_mtp_config()), []
        for depth in range(1, modules + 1):
            columns = len(text) - modules
            head_input, positions = ids[:, depth : depth + columns], torch.arange(depth, depth + columns)[None]
            states = mtp.forward_layer(depth - 1, states[:, :columns], positions, cache, input_ids=head_input)
            out.append(mtp._project_to_logits(states))
    return torch.stack(out, dim=2)[0]


def our_logits(model, text, modules):
    ids = torch.tensor([text])
    with torch.inference_mode():
        return model.head(ids, model.trunk(ids).head_input, depths=modules)[0]


def test_the_page_names_what_is_checked():
    """A family taken out of these tests and left in the table."""
    assert {name for name, _ in FAMILIES} | {"inkling", "step3p5"} == set(CHECKED)


@pytest.mark.parametrize(("name", "modules"), FAMILIES)
def test_logits_equal_theirs_at_every_depth(name, modules, tmp_path, monkeypatch):
    """Catches a wrong half of the projection, norm, state, shift, window or rotary kind: to 1e-5 in fp32.

    transformers counts a pair at the position of its token, we at that of its state: with RoPE it makes no difference.
    """
    model = build(name, modules=modules, initializer_range=0.1)
    model.save(tmp_path / "model")
    oracle, text = theirs(tmp_path / "model", model.trunk, monkeypatch), prompt(24)
    wanted = their_logits(oracle, text, modules)
    torch.testing.assert_close(our_logits(model, text, modules), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize(("name", "modules"), FAMILIES)
def test_greedy_text_equals_theirs(name, modules, tmp_path, monkeypatch):
    """`generate(use_mtp=True)` and our decoder write the same text, which is that of the trunk alone."""
    model = build(name, modules=modules)
    model.save(tmp_path / "model")
    oracle, start = theirs(tmp_path / "model", model.trunk, monkeypatch), prompt(9)
    out = oracle.generate(torch.tensor([start]), use_mtp=True, do_sample=False, max_new_tokens=12, eos_token_id=None)
    text = decode(model, [start], num_speculative_tokens=modules, max_tokens=12)[0][0]
    assert out[0, len(start) :].tolist() == text


@pytest.mark.more
def test_step_differs_in_known_facts_only(tmp_path, monkeypatch):
    """Step-3.7 by our row is not what transformers computes; with the facts above switched, it is, to 1e-5.

    Catches any other difference: gain, window, rotary kind, stacked experts, the order of the modules.
    """
    model = build("step3p5", modules=3, initializer_range=0.1, num_sliding_attention_heads=4)
    model.save(tmp_path / "model")
    rename_norms(tmp_path / "model")
    text = prompt(24)
    oracle = theirs(tmp_path / "model", model.trunk, monkeypatch)
    wanted = their_logits(oracle, text, 3)
    assert (our_logits(model, text, 3) - wanted).abs().max() > 1e-2
    family = replace(model.family, **STEP)
    model.trunk.stage, model.head.family = family.hidden, family
    for module in model.head.stack:
        module.family = family
    torch.testing.assert_close(our_logits(model, text, 3), wanted, atol=1e-5, rtol=1e-5)


def rename_norms(folder):
    """transformers finds `shared_head.norm`, not the published `transformer.shared_head.norm`."""
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace(".transformer.shared_head", ".shared_head"))
    for shard in folder.glob("*.safetensors"):
        tensors = {name.replace(".transformer.shared_head", ".shared_head"): v for name, v in load_file(shard).items()}
        save_file(tensors, shard, metadata={"format": "pt"})
