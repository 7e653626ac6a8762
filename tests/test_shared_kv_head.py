"""Heads that read the trunk's keys and values: Gemma 4 assistants against transformers' own."""

import json
import shutil
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from assistants import SIZES, WINDOW, build, marked_texts, multimodal, reference, train
from decoding_engine import answered, faulty
from quick import others_slow
from safetensors.torch import load_file, save_file
from scheduled import Answers, alone, scheduler_of
from scipy.stats import chisquare
from tiny import decode, refrains
from transformers import AutoConfig, DynamicCache, Gemma4ForConditionalGeneration, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from nextn.audit_rules import audit, audit_checkpoint
from nextn.cache.kv_cache import CACHE_ARGUMENT
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import trunk_family
from nextn.decoding.drafter import Drafter
from nextn.decoding.rounds import rounds
from nextn.edit.convert import extract
from nextn.edit.export import export
from nextn.engines.counters import sum_counters
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.evaluate.conventions import apply_variants, variants
from nextn.evaluate.diagnose_engine import compare
from nextn.evaluate.engine_run import EngineObservation
from nextn.evaluate.faults import FAULTS, fault_variant, measure_under_fault
from nextn.evaluate.likelihoods import NO_FAULT
from nextn.evaluate.probe import is_compatible
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.family_table import by_name, deviations
from nextn.model.model import Model
from nextn.runtime.backend import make_backend
from nextn.serve.request import GenerationRequest
from nextn.settings import Contract, Sampling, Settings
from nextn.speculative.sampling import to_probs
from nextn.train.config import HeadConfig
from nextn.train.head_run import HeadRun
from nextn.train.head_task import HeadTask
from nextn.train.loop import Trainer

DEPTHS = 4
KINDS = ({}, {"num_speculative_tokens": 0}, {"sampling": Sampling(temperature=1.0)}, {"frequency_penalty": 0.5},
         {"logprobs": 2})  # fmt: skip


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
    own = trunk.config.layer_types[: trunk.config.num_hidden_layers - trunk.config.num_kv_shared_layers]
    last = {name: cache.layers[index] for index, name in enumerate(own)}
    keys = {name: (layer.keys, layer.values) for name, layer in last.items()}
    out, position = [], torch.tensor([[start + 1]])
    for depth in range(1, depths + 1):
        embedded = trunk.get_input_embeddings()(tokens[:, start + depth : start + depth + 1])
        step = assistant(
            inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=position, shared_kv_states=keys,
            attention_mask=torch.ones(1, start + 2, dtype=torch.long),
        )  # fmt: skip
        out, hidden = [*out, step.logits[0, 0]], step.last_hidden_state
    return torch.stack(out)


@pytest.mark.more
@pytest.mark.parametrize("size", SIZES)
def test_logits_are_those_of_transformers(folders, size):
    """In double precision, as some of these trunks amplify the rounding of float32; torch has no experts in it."""
    (trunk, path), tokens = folders[size], text(3 * WINDOW)
    dtype, atol = (torch.float32, 2e-4) if "num_experts" in SIZES[size][0] else (torch.float64, 1e-9)
    model, assistant = Model.load(trunk, head=path, dtype=dtype), load_reference(path).to(dtype)
    with torch.no_grad():
        hidden = model.trunk(tokens).head_input
        states = model.head.rollout_hidden(tokens, hidden, DEPTHS)
        ours = [model.head.logits(0, each)[0] for each in states]
    for start in (0, 3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3):
        theirs = chain(model, assistant, tokens, start, DEPTHS)
        for depth, logits in enumerate(ours):
            drafted = logits[start].isfinite()  # transformers puts tokens outside of the best groups below all others
            assert int(drafted.sum()) == (36 if SIZES[size][1] else 96)
            torch.testing.assert_close(logits[start][drafted], theirs[depth][drafted], rtol=0, atol=atol)
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


@pytest.mark.more
def test_a_trunk_inside_a_model_with_images(models, folders, tmp_path):
    """As the models are published: the same texts and drafts, and `audit` finds trunk and head of one size."""
    trunk, assistant = folders["E2B"]
    model = Model.load(multimodal(trunk, tmp_path), head=assistant)
    assert isinstance(model.trunk.model, Gemma4ForConditionalGeneration)
    prompts = [text(20, seed=6)[0].tolist()]
    (plain, log), (found, other) = (
        decode(each, prompts, max_tokens=10, num_speculative_tokens=3) for each in (models["E2B"], model)
    )
    assert (found, [each.rows[0].drafts for each in other]) == (plain, [each.rows[0].drafts for each in log])
    checkpoint = Checkpoint.open(tmp_path)
    inventory = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    assert audit_checkpoint(Checkpoint.open(assistant), trunk=inventory).clean
    assert not audit_checkpoint(Checkpoint.open(folders["31B"][1]), trunk=inventory).clean
    assert "--head" in audit(checkpoint).findings[0].fix


def test_a_config_as_published(folders, models, tmp_path):
    """Sizes of full-attention layers under names of their own, where transformers writes the options of each layer."""
    shutil.copytree(folders["31B"][1], tmp_path / "assistant")
    path = tmp_path / "assistant" / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]["per_layer_config"]
    config["text_config"] |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "num_kv_shared_layers": 4}
    path.write_text(json.dumps(config))
    checkpoint = Checkpoint.open(folders["31B"][0])
    inventory = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    assert audit_checkpoint(Checkpoint.open(tmp_path / "assistant"), trunk=inventory).findings == ()
    model = Model.load(checkpoint, head=tmp_path / "assistant")
    assert model.head.read_layers == models["31B"].head.read_layers
    wrong = config | {"text_config": config["text_config"] | {"global_head_dim": 24}}
    path.write_text(json.dumps(wrong))
    found = audit_checkpoint(Checkpoint.open(tmp_path / "assistant"), trunk=inventory).findings
    assert {each.rule for each in found} == {"query-head", "draft-sizes"}
    with pytest.raises(FamilyError, match="head_dim of full_attention is 24"):
        Model.load(checkpoint, head=tmp_path / "assistant")


def test_what_does_not_fit_is_refused(folders, tmp_path):
    trunk, assistant = folders["31B"]
    with pytest.raises(FamilyError, match="--head"):
        Model.load(assistant)
    with pytest.raises(CheckpointError, match="a head alone already"):
        extract(assistant, tmp_path / "head.safetensors")
    with pytest.raises(FamilyError, match="layer by layer"):
        Model.load(trunk, head=assistant, stream=True)
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
    own = json.loads((folders["E2B"][1] / "config.json").read_text())
    wrong = [({"num_centroids": value}, "num_centroids is") for value in (-8, 0, 7)]
    wrong += [({"centroid_intermediate_top_k": value}, "centroid_intermediate_top_k is") for value in (-1, 0, 9)]
    texts = {
        "sliding_window": 0,
        "hidden_size": -8,
        "rope_parameters": {},
        "hidden_activation": "none",
        "pad_token_id": 99,
    }
    wrong += [({"text_config": own["text_config"] | {name: value}}, "") for name, value in texts.items()]
    for changes, words in wrong:
        (uneven / "config.json").write_text(json.dumps(own | changes))
        with pytest.raises(FamilyError, match=rf"config\.json is not one of Gemma 4 assistants: \w+: {words}"):
            Model.load(folders["E2B"][0], head=uneven)
    less = saved("less", config, {n: v for n, v in tensors.items() if n != "post_projection.weight"})
    with pytest.raises(CheckpointError, match=r"missing: post_projection\.weight"):
        Model.load(trunk, head=less)
    config = json.loads((folders["E2B"][1] / "config.json").read_text())
    tensors = load_file(folders["E2B"][1] / "model.safetensors")
    name = "masked_embedding.token_ordering"
    twice = saved("twice", config, tensors | {name: tensors[name].clamp_max(90)})
    with pytest.raises(CheckpointError, match="not an order"):
        Model.load(folders["E2B"][0], head=twice)


def test_audit(folders, tmp_path):
    """Clean as published; each absent, additional and mis-shaped tensor, and another size's trunk, is reported."""
    for size, (trunk, assistant) in folders.items():
        inventory = Inventory.of(Checkpoint.open(trunk), family=trunk_family(Checkpoint.open(trunk)))
        report = audit_checkpoint(Checkpoint.open(assistant), trunk=inventory)
        assert (report.clean, report.modules, report.findings) == (True, (0,), ()), size
    other = audit_checkpoint(Checkpoint.open(folders["31B"][1]), trunk=Inventory.of(Checkpoint.open(folders["E2B"][0]),
                  family=trunk_family(Checkpoint.open(folders["E2B"][0]))))  # fmt: skip
    assert [each.rule for each in other.findings] == ["draft-sizes"]
    tensors = load_file(folders["E2B"][1] / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors.pop("model.layers.2.self_attn.q_norm.weight")
    tensors["post_projection.weight"] = tensors["post_projection.weight"][:30].contiguous()
    tensors["strange.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["E2B"][1] / "config.json").read_bytes())
    found = [(each.rule, each.place) for each in audit(Checkpoint.open(tmp_path)).findings]
    assert found == [
        ("query-head", "model.layers.2.self_attn.q_norm.weight"),
        ("query-head", "model.layers.1.self_attn.k_proj.weight"),
        ("query-head", "post_projection.weight"),
        ("names-unknown", "strange.weight"),
    ]
    assert "--head" in audit(Checkpoint.open(folders["E2B"][0])).findings[0].fix


def test_documents_of_one_row_do_not_meet(models):
    """Keys, positions and windows of packed texts are those of each text alone."""
    model, tokens = models["31B"], text(30)
    documents = torch.tensor([[0] * 13 + [1] * 17])
    with torch.no_grad():
        hidden = model.trunk(tokens, documents=documents).head_input
        packed = model.head.rollout_hidden(tokens, hidden, 3, documents=documents)
        for start, end in ((0, 13), (13, 30)):
            part = tokens[:, start:end]
            alone = model.head.rollout_hidden(part, model.trunk(part).head_input, 3)
            for depth, (ours, theirs) in enumerate(zip(packed, alone, strict=True), start=1):
                torch.testing.assert_close(ours[:, start : end - depth], theirs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("size", ["31B", pytest.param("E2B", marks=pytest.mark.slow)])
def test_training_and_what_it_writes(folders, tmp_path, size):
    """Distilled on the trunk's capped distribution: longer drafts, in the layout that transformers loads."""
    trunk, assistant = folders[size]
    model, checkpoint = Model.load(trunk, head=assistant), Checkpoint.open(trunk)
    origin = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    corpus = refrains(24, 60, seed=1, eos=47)
    config = HeadConfig(steps=25, batch_size=4, length=24, depths=3, lr=1e-2, dtype="float32", eval_every=0)
    task = HeadTask(model, corpus, config, origin=origin)
    trainer = Trainer(task, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="read the trunk's keys already"):
        HeadTask(model, corpus, replace(config, kv="first"), origin=origin)
    before = task.evaluate(0).heldout.score
    list(trainer.run())
    assert task.evaluate(25).heldout.score > before + (0.1 if size == "31B" else 0)
    written = HeadRun(trainer, task, corpus, ()).write().parent
    assert json.loads((written / "config.json").read_text()) == json.loads((assistant / "config.json").read_text())
    assert audit_checkpoint(Checkpoint.open(written), trunk=origin).findings == ()
    assert load_file(written / "model.safetensors").keys() == load_file(assistant / "model.safetensors").keys()
    made = export(written, tmp_path / "draft", "vllm", num_speculative_tokens=2)
    assert json.loads(made.command[-1]) == {
        "method": "mtp", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2
    }  # fmt: skip
    assert str(tmp_path) not in str(next(iter(Checkpoint.open(made.path).headers.values())).metadata)
    with pytest.raises(FamilyError, match="convert_hf_to_gguf"):
        export(written, tmp_path / "draft.gguf", "llama.cpp")
    again, reference = Model.load(trunk, head=made.path), load_reference(made.path)
    tokens = text(20, seed=8)
    with torch.no_grad():
        states = again.head.rollout_hidden(tokens, again.trunk(tokens).head_input, 3)
    theirs = chain(again, reference, tokens, 9, 3)
    ours = torch.stack([again.head.logits(0, each[0, 9]) for each in states])
    torch.testing.assert_close(ours[ours.isfinite()], theirs[ours.isfinite()], rtol=0, atol=1e-3)


def decoded(backend, prompts, **settings):
    """Texts, and each sequence's drafts of each round."""
    texts, drafts = [[] for _ in prompts], [[] for _ in prompts]
    for each in rounds(backend.trunk, backend.head, prompts, Settings(max_tokens=24, eos=(), **settings)):
        for one in each.rows:
            texts[one.row] += one.emitted
            drafts[one.row].append((one.drafts, one.num_accepted))
    return texts, drafts


@pytest.mark.parametrize("size", others_slow(SIZES, "E2B"))
def test_in_native_code(models, size):
    """In a batch, drafts and texts are torch's, and greedy texts those without drafts: in one call a round, in Python
    between the drafts, and sampled (from flat distributions, of which most drafts are accepted)."""
    model, sampling = models[size], Sampling(temperature=8.0)
    prompts = [text(length, seed=length)[0].tolist() for length in (5, 2 * WINDOW + 1)]
    native, torchs = (make_backend(model.trunk, model.head, name=name) for name in ("native", "torch"))
    plain, _ = decoded(native, prompts, num_speculative_tokens=0)
    assert native.head.chain(native.head.cache(2, native.trunk.cache(2)), Sampling(), sampled=False) is not None
    greedy = decoded(native, prompts, num_speculative_tokens=3)
    assert greedy[0] == plain
    assert greedy == decoded(torchs, prompts, num_speculative_tokens=3)
    options = {"num_speculative_tokens": 3, "sampling": sampling, "sampled_drafts": True}
    sampled = decoded(native, prompts, **options)
    assert sampled == decoded(torchs, prompts, **options)
    assert sum(accepted for row in sampled[1] for _, accepted in row) > 12
    native.head.chain = lambda *args, **options: None
    assert decoded(native, prompts, num_speculative_tokens=3) == greedy


def test_native_bf16_and_int8_keys(folders):
    """Greedy texts with drafts are those without, also where the keys that the head reads have eight bits."""
    model, prompts = Model.load(folders["31B"][0], head=folders["31B"][1], dtype=torch.bfloat16), text(20).tolist()
    for model.trunk.kv_cache_dtype in ("auto", "int8"):
        backend = make_backend(model.trunk, model.head, name="native")
        plain, found = (decoded(backend, prompts, num_speculative_tokens=k) for k in (0, 3))
        assert found[0] == plain[0]
        assert all(drafts for drafts, _ in found[1][0][1:-1])


def test_the_row_says_which_engines_place_queries_elsewhere():
    assert deviations(by_name("gemma4_assistant"), "vllm") == {"trunk_kv": "hidden"}


def test_sampled_texts_follow_the_trunk(tmp_path):
    """Chi-square of texts over a vocabulary of 3 against probabilities from the trunk's capped logits alone."""
    trunk, assistant = build("31B", tmp_path, vocab_size=3, final_logit_softcapping=1.5, pad_token_id=None,
                             bos_token_id=None, eos_token_id=None)  # fmt: skip
    model, start, count, sampling = Model.load(trunk, head=assistant), [1, 2, 0], 2000, Sampling(temperature=0.8)
    texts, log = decode(
        model, [start] * count, num_speculative_tokens=2, max_tokens=4, sampling=sampling, seed=3, sampled_drafts=True
    )
    every = [list(text) for text in product(range(3), repeat=4)]
    with torch.inference_mode():
        known = torch.tensor([[*start, *text] for text in every])
        logits = model.trunk.model(known[:, :-1]).logits[:, 2:]  # of transformers, which caps them
        probability = to_probs(logits.float(), sampling).gather(-1, known[:, 3:, None])[..., 0].prod(-1)
    found = [sum(text == each for text in texts) for each in every]
    assert probability.sum().item() == pytest.approx(1, abs=1e-4)
    wanted = probability.double().numpy() / probability.double().sum().item() * count
    assert chisquare(found, wanted).pvalue > 1e-3
    assert sum(part.num_accepted for each in log for part in each.rows) > 100  # else nothing was verified


@pytest.mark.more
def test_a_server_gives_what_each_request_gets_alone(models):
    """Neighbors, every kind of request, and prefixes that are in the cache change neither text nor drafts."""
    model, shared = models["E2B"], text(200, seed=2)[0].tolist()
    requests = {
        index: GenerationRequest(prompt=(*shared[: (150, 20, 140)[index % 3]], 3 + index), max_tokens=5 + index, **kind)
        for index, kind in enumerate(KINDS)
    }
    running = Answers(scheduler_of(model, max_model_len=250, max_num_seqs=3, prefix_bytes=10**8))
    found = running.run({index * 4: [(index, request)] for index, request in requests.items()})
    assert running.scheduler.prefix_cache.num_hits >= 64
    assert found == alone(model, requests, max_model_len=250)


def test_variants_change_what_is_drafted_and_no_text(models):
    """Each fault of its own kind: other logits, and the trunk's text."""
    model, tokens = models["26B-A4B"], text(4 * WINDOW, seed=4)
    with torch.no_grad():
        hidden = model.trunk(tokens).head_input
        right = model.head.logits(0, model.head.rollout_hidden(tokens, hidden, 2)[1])
    plain, _ = decode(model, tokens[:, :20].tolist(), max_tokens=8)
    own = {each.key: each for each in variants(model, Contract()) if not each.key.startswith(("norm-weight", "offset"))}
    assert own.keys() == {"concat", "hidden", "query-position", "kv-layer", "kv-window", "kv-narrow"}
    for variant in own.values():
        faulty, _ = apply_variants(model, Contract(), [variant])
        if variant.key != "hidden":  # which gets another state from the trunk
            with torch.no_grad():
                wrong = faulty.head.logits(0, faulty.head.rollout_hidden(tokens, hidden, 2)[1])
            assert (wrong - right)[:, -1].abs().max() > 1e-3, variant.key
        assert decode(faulty, tokens[:, :20].tolist(), max_tokens=8, num_speculative_tokens=3)[0] == plain
    assert model.head.windows != faulty.head.windows
    for pair in combinations(own.values(), 2):  # as the probe applies them
        assert not is_compatible(*pair) or apply_variants(model, Contract(), pair)
    injected = [each.name for each in FAULTS if each.variant_keys and fault_variant(each, model)]
    assert {"inputs-swapped", "wrong-keys", "window-lost", "window-everywhere", "query-shifted"} <= set(injected)


@pytest.mark.slow
def test_measured_acceptance_and_its_faults(folders):
    """A trained pair: the scores of all positions agree with rounds, and `diagnose` names each fault of this kind of
    head from what a decoder with it counts."""
    model = Model.load(folders["31B"][0], head=folders["31B"][1])
    train(model, 250)
    rows = marked_texts(8, 14, torch.Generator().manual_seed(9)).tolist()
    prompts = [Prompt(tuple(row), "x") for row in rows]
    plan = ReferencePlan(num_speculative_tokens=3, temperatures=(1.0,), max_tokens=40, chat=False)
    reference = reference_acceptance(model, prompts, plan)
    assert reference.figures(1.0, rule="ratio").length.value > 2
    drafted = {each.name: measure_under_fault(reference, model, each) for each in FAULTS if not each.rule}
    lengths = {name: found.figures(1.0, rule="ratio").length.value for name, found in drafted.items() if found}
    assert max(lengths["wrong-keys"], lengths["inputs-swapped"], lengths["head-unset"]) < 1.5
    assert {"stale-head-cache", "no-prefill", "position0", "wrong-next-hidden"}.isdisjoint(lengths)
    greedy = replace(plan, temperatures=(0.0,), max_tokens=41, rule="ratio")
    for name in ("", "wrong-keys", "window-lost", "window-everywhere", "inputs-swapped"):
        engine, contract = faulty(model, name) if name else (model, Contract())
        parts = answered(engine, contract, [prompt.text for prompt in prompts], 3, 41, whole=True)
        seen = EngineObservation(0.0, sum_counters(each for _, each in parts), tuple(range(len(prompts))))
        found = compare(model, [seen], prompts, greedy, greedy.num_speculative_tokens)
        # A wrong window changes the last tokens of these texts only. Where those are too few, the report says so.
        is_named = found.named[0] == (name or NO_FAULT)
        assert is_named or (name.startswith("window") and name in found.undetectable), (name, found.summary)
