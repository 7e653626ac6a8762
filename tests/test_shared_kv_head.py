"""Heads that read the trunk's keys and values: Gemma 4 assistants against transformers' own."""

import json

import pytest
import torch
from assistants import SIZES, WINDOW, build, reference
from safetensors.torch import load_file, save_file
from tiny import decode
from transformers import AutoConfig, DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from nextn.cache.kv_cache import CACHE_ARGUMENT
from nextn.decoding.drafter import Drafter
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.families import by_name
from nextn.model.model import Model
from nextn.runtime.backend import backend_for, make_backend

DEPTHS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {size: build(size, tmp_path_factory.mktemp("assistants")) for size in SIZES}


@pytest.fixture(scope="module")
def models(folders):
    return {size: Model.load(trunk, head=assistant) for size, (trunk, assistant) in folders.items()}


def load_reference(folder):
    config = AutoConfig.from_pretrained(folder)
    model = reference(config)
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def text(length, seed=0):
    return torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def chain(model, assistant, tokens, start, depths):
    """transformers' logits of a chain of teacher-forced tokens whose first pair has the state of position `start`."""
    trunk, cache = model.trunk.model, DynamicCache()
    hidden = trunk.model(tokens[:, : start + 1], use_cache=True, **{CACHE_ARGUMENT: cache}).last_hidden_state[:, -1:]
    keys = {each.name: (cache.layers[i].keys, cache.layers[i].values) for each, i in model.head.read_layers.items()}
    out, position = [], torch.tensor([[start + 1]])
    for depth in range(1, depths + 1):
        embedded = trunk.get_input_embeddings()(tokens[:, start + depth : start + depth + 1])
        step = assistant(
            inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=position, shared_kv_states=keys,
            attention_mask=torch.ones(1, start + 2, dtype=torch.long),
        )  # fmt: skip
        out, hidden = [*out, step.logits[0, 0]], step.last_hidden_state
    return torch.stack(out)


@pytest.mark.parametrize("size", SIZES)
def test_logits_are_those_of_transformers(models, folders, size):
    model, assistant, tokens = models[size], load_reference(folders[size][1]), text(3 * WINDOW)
    with torch.no_grad():
        hidden = model.trunk(tokens).head_input
        states = model.head.rollout_hidden(tokens, hidden, DEPTHS)
        ours = [model.head.logits(0, each)[0] for each in states]
    for start in (0, 3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3):
        theirs = chain(model, assistant, tokens, start, DEPTHS)
        for depth, logits in enumerate(ours):
            drafted = logits[start].isfinite()  # transformers puts tokens outside of the best groups below all others
            assert int(drafted.sum()) == (36 if SIZES[size][1] else 96)
            torch.testing.assert_close(logits[start][drafted], theirs[depth][drafted], rtol=0, atol=2e-4)
            assert int(logits[start].argmax()) == int(theirs[depth].argmax())


@pytest.mark.parametrize("size", SIZES)
def test_drafts_are_those_of_transformers(models, folders, size):
    """In a batch of sequences of different lengths, each round's drafts continue its text as the assistant does."""
    model, assistant, seen = models[size], load_reference(folders[size][1]), []

    class Watched(Drafter):
        def draft(self, plan, limits, tokens, *args, **options):
            result = super().draft(plan, limits, tokens, *args, **options)
            seen.extend((list(row), drafts) for row, drafts in zip(tokens, result.drafts, strict=True) if drafts)
            return result

    prompts = [text(length, seed=length)[0].tolist() for length in (5, 2 * WINDOW + 1)]
    plain, _ = decode(model, prompts, max_tokens=12)
    found, _ = decode(model, prompts, max_tokens=12, num_speculative_tokens=3, make_drafter=Watched)
    assert found == plain
    assert len(seen) >= 12
    for tokens, drafts in seen[:: len(seen) // 8]:
        continued = torch.tensor([[*tokens, *drafts]])
        logits = chain(model, assistant, continued, len(tokens) - 2, len(drafts))
        assert logits.argmax(-1).tolist() == drafts


@torch.no_grad()
def test_first_drafts_are_those_of_assisted_generation(models, folders):
    """transformers' generator of candidates, which hands over keys of trunks with shared layers only."""
    model, assistant, prompt = models["E2B"], load_reference(folders["E2B"][1]), text(2 * WINDOW + 3, seed=5)
    trunk = model.trunk.model
    outputs = trunk(prompt, output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
    known = torch.cat([prompt, outputs.logits[:, -1:].argmax(-1)], dim=1)
    assistant.generation_config.num_assistant_tokens = 3
    options = GenerationConfig(max_length=100)
    candidates = SinglePositionMultiTokenCandidateGenerator(assistant, trunk.get_input_embeddings(), options)
    found, _ = candidates.get_candidates(known, {"attention_mask": torch.ones_like(known)}, outputs, False, 0)
    _, log = decode(model, prompt.tolist(), max_tokens=8, num_speculative_tokens=3)
    assert list(log[1].rows[0].drafts) == found[0, known.shape[1] :].tolist()


def test_what_does_not_fit_is_refused(folders, tmp_path):
    trunk, assistant = folders["31B"]
    with pytest.raises(FamilyError, match="--head"):
        Model.load(assistant)
    with pytest.raises(FamilyError, match="num_key_value_heads"):
        Model.load(folders["E2B"][0], head=assistant)
    config = json.loads((assistant / "config.json").read_text())
    tensors = load_file(assistant / "model.safetensors")

    def saved(name, config, tensors):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        return tmp_path / name

    wide = saved("wide", config | {"backbone_hidden_size": 40}, tensors)
    with pytest.raises(FamilyError, match="backbone_hidden_size is 40"):
        Model.load(trunk, head=wide)
    strange = saved("strange", config | {"text_config": config["text_config"] | {"num_hidden_layers": "x"}}, tensors)
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        Model.load(trunk, head=strange)
    uneven = saved("uneven", config | {"use_ordered_embeddings": True, "num_centroids": 7}, tensors)
    with pytest.raises(FamilyError, match=r"config\.json is not one of Gemma 4 assistants"):
        Model.load(trunk, head=uneven)
    less = saved("less", config, {n: v for n, v in tensors.items() if n != "post_projection.weight"})
    with pytest.raises(CheckpointError, match=r"missing: post_projection\.weight"):
        Model.load(trunk, head=less)
    config = json.loads((folders["E2B"][1] / "config.json").read_text())
    tensors = load_file(folders["E2B"][1] / "model.safetensors")
    name = "masked_embedding.token_ordering"
    twice = saved("twice", config, tensors | {name: tensors[name].clamp_max(90)})
    with pytest.raises(CheckpointError, match="not an order"):
        Model.load(folders["E2B"][0], head=twice)


def test_the_native_backend_says_why_it_does_not_run_it(models):
    model = models["31B"]
    assert backend_for(model).name == "torch"
    with pytest.raises(ConfigError, match="native backend cannot run"):
        make_backend(model.trunk, model.head, name="native")


def test_the_row_says_which_engines_place_queries_elsewhere():
    assert by_name("gemma4_assistant").conventions("vllm") == {"trunk_kv": "hidden"}
