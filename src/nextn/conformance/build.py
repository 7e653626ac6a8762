"""Build a canary: train a tiny trunk and its head together, and record what an engine must count on them.

The record is computed in float32 on the torch backend from the files as written: greedy texts with their gaps, and the
accepted drafts of every K, rule and fault. Above temperature 0, one pass over all prompts is one sample: engines get
the same prompts, so differences between prompts are no noise between expected and observed counts. Given a text, the
distribution of the accepted drafts is known (`teacher_forced`), so no draft is sampled.
"""

import hashlib
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from nextn import __version__
from nextn.checkpoint.safetensors_file import write_json
from nextn.conformance.canary_model import documents, prompts, shape_of
from nextn.conformance.record import FILE, FORMAT, RecordedReading
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus, encoder, eos_id
from nextn.decoding.generate import generate
from nextn.decoding.records import Event
from nextn.decoding.rounds import rounds
from nextn.devices import resolve_device, torch_threads
from nextn.errors import ConfigError
from nextn.evaluate.conventions import Variant, apply_variants
from nextn.evaluate.faults import FAULTS, Fault, measure_under_fault
from nextn.evaluate.reference import reference_acceptance, rescore
from nextn.evaluate.reference_report import ReferenceReport, checkpoint_hashes, hash_prompts
from nextn.evaluate.teacher_forced import (
    RULES,
    ReferenceText,
    ScoredText,
    engine_round_counts,
    score_texts,
    trunk_outputs,
)
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.family_table import ENGINES, deviations
from nextn.model.model import Model
from nextn.settings import Contract, Sampling, Settings
from nextn.stats.intervals import proportion
from nextn.train.config import TrainConfig
from nextn.train.distributed import Ranks
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer
from nextn.train.metrics import Record

MAX_K = 4  # the largest number of draft tokens per round
# A round that begins before the last token drafts beyond it: this many more tokens are decoded.
_EXTRA_TOKENS = MAX_K + 1
TIE = 0.25  # nats between the two likeliest tokens up to which rounding may choose either
# Canaries are certain of their text: at temperature 1 the shares of first drafts that the rules accept differ by 0 to 8
# points, which hundreds of texts do not resolve; at 2, the highest that OpenAI's interface allows, by 11 to 33.
TEMPERATURE = 2.0
PASSES = 16
# How the last round of a text drafts: as many tokens as any other, or no more than remain.
ENDINGS = ("whole", "cut")
_DIGITS = 3
_VECTOR_ROUNDS = 4

DEFINITIONS = {
    "tokens": "greedy continuation by the trunk alone; the first max_tokens are compared, the others are what the last "
    "round's drafts are verified against",
    "gaps": "log-probability of each of those tokens less that of the second likeliest, in nats",
    "close": f"positions of tokens whose gap is {TIE} or less: rounding may change the text from there on",
    "rounds": "per K and prompt, a digit per round: how many of its K drafts are accepted. The first round follows the "
    "first new token, each emits its accepted drafts and a bonus token, the last is the one that reaches token "
    "max_tokens. An engine that drafts no more than remain truncates the last one",
    "looping": "greedy texts that are repetitive, on which most faults are hidden",
    "sampled": "texts sampled at `temperature`, in several passes over the prompts. acceptance: of each rule, "
    "conditional, at the largest K, 95 % intervals. counts: per K and pass, the expected number of rounds that "
    "accepted every shallower draft (offered), and this one, too (kept). whole: the last round of a text drafts as "
    "many tokens as any other; cut: no more than remain",
}


def build_record(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    count: int = 16,
    tokens: int = 48,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    device: str | torch.device = "cpu",
) -> dict[str, object]:
    """Compute the JSON document beside the checkpoint `folder`.

    prompts: candidates, of which the `count` with the clearest greedy texts are chosen. tokens: new ones of each text.
    """
    model = Model.load(folder, dtype=torch.float32, device=device)
    chosen = [Prompt(tuple(prompt), "canary") for prompt in _choose(model, prompts, count, tokens)]
    plan = ReferencePlan(MAX_K, (0.0,), tokens + _EXTRA_TOKENS, chat=False, seed=seed, backend="torch")
    report = reference_acceptance(model, chosen, plan)
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}
    return {
        "format": FORMAT,
        "family": model.family.name,
        "seed": seed,
        "versions": {"nextn": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.machine(),
        "definitions": DEFINITIONS,
        "hashes": checkpoint_hashes(str(folder)) | {"files": files, "prompts": hash_prompts(_ids(chosen))},
        "settings": {"drafts": list(range(1, MAX_K + 1)), "max_tokens": tokens, "tie": TIE},
        "prompts": _prompt_records(model, report, tokens),
        "looping": len(report.repetitive[0.0]),
        "readings": [reading.as_record() for reading in compute_readings(model, report, folder)],
        "sampled": sampled_record(model, _ids(chosen), temperature, tokens=tokens, seed=seed),
        "vector": build_vector(model, _ids(chosen)[0], k=3),
    }


def compute_readings(model: Model, report: ReferenceReport, folder: Path | None = None) -> Iterator[RecordedReading]:
    """Yield the right reading, that in bfloat16 (with `folder`), those of every possible fault, and each engine's.

    report: the greedy texts with their scores.
    """
    tokens = report.plan.max_tokens - _EXTRA_TOKENS
    yield RecordedReading("right", "as the family's row says", rounds_of_scores(report.scored[0.0], tokens))
    if folder is not None:
        coarse = rescore(report, Model.load(folder, dtype=torch.bfloat16, device=model.trunk.device), Contract())
        yield RecordedReading("rounded", "right, computed in bfloat16", rounds_of_scores(coarse.scored[0.0], tokens))
    for fault in FAULTS:
        if (rounds := _rounds_with_fault(model, report, fault, tokens)) is not None:
            yield RecordedReading(fault.name, fault.description, rounds, fault.issues)
    for engine in ENGINES:
        if facts := deviations(model.family, engine):
            description = f"as {engine} runs this family: "
            description += ", ".join(f"{name} {value}" for name, value in facts.items())
            variant = Variant(f"engine:{engine}", description, facts=facts)
            scores = rescore(report, *apply_variants(model, Contract(), [variant])).scored[0.0]
            yield RecordedReading(variant.key, description, rounds_of_scores(scores, tokens), facts=tuple(facts))


def rounds_of_scores(texts: Sequence[ScoredText], tokens: int) -> dict[int, list[list[int]]]:
    """Return the accepted drafts of every round by teacher-forced scores: K -> [texts][rounds]."""
    accepted = [text.survivals["greedy"].given[:, 1:].long() for text in texts]
    return {k: [_follow(given[:, :k].sum(1).tolist(), tokens) for given in accepted] for k in range(1, MAX_K + 1)}


def rounds_of_decoding(
    model: Model, prompts: Sequence[Sequence[int]], k: int, contract: Contract, *, tokens: int
) -> list[list[int]]:
    """Return the accepted drafts of every round by decoding, at one K: [prompts][rounds]."""
    settings = Settings(num_speculative_tokens=k, max_tokens=tokens + _EXTRA_TOKENS, eos=(), contract=contract)
    results = generate(model, prompts, settings, backend="torch")
    return [_until([part.num_accepted for part in result.rounds[1:]], tokens) for result in results]


def _follow(accepted: Sequence[int], tokens: int) -> list[int]:
    """accepted[s]: drafts accepted in a round after new token s -> those of consecutive rounds."""
    rounds, start = [], 0
    while start < tokens - 1:
        rounds.append(accepted[start])
        start += accepted[start] + 1
    return rounds


def _until(accepted: Sequence[int], tokens: int) -> list[int]:
    """Rounds up to the one that reaches the last token."""
    rounds, emitted = [], 1
    for num in accepted:
        if emitted >= tokens:
            break
        rounds.append(num)
        emitted += num + 1
    return rounds


def _rounds_with_fault(
    model: Model, report: ReferenceReport, fault: Fault, tokens: int
) -> dict[int, list[list[int]]] | None:
    if fault.rule:
        return None  # of sampled texts
    if fault.contract:
        if model.head is None or model.head.num_modules > 1:
            return None  # several MTP layers refresh their caches in any case, until all tokens are known
        prompts, contract = _ids(report.prompts), Contract(**fault.contract)  # type: ignore[arg-type]
        return {k: rounds_of_decoding(model, prompts, k, contract, tokens=tokens) for k in range(1, MAX_K + 1)}
    faulty = measure_under_fault(report, model, fault)
    return None if faulty is None else rounds_of_scores(faulty.scored[0.0], tokens)


def _choose(model: Model, prompts: Sequence[Sequence[int]], count: int, tokens: int) -> list[Sequence[int]]:
    """The first prompts whose greedy texts do not end and have no near-tie; others where these are too few."""
    settings = Settings(num_speculative_tokens=0, max_tokens=tokens + _EXTRA_TOKENS, eos=())
    texts = [result.tokens for result in generate(model, prompts, settings, backend="torch")]
    eos = model.trunk.config.eos_token_id
    gaps = [_gaps(model, prompt, text)[:tokens] for prompt, text in zip(prompts, texts, strict=True)]
    order = sorted(range(len(prompts)), key=lambda index: (eos in texts[index], min(gaps[index]) <= TIE, index))
    return [prompts[index] for index in sorted(order[:count])]


@torch.inference_mode()
def _gaps(model: Model, prompt: Sequence[int], new: Sequence[int]) -> list[float]:
    """Nats between the two likeliest tokens at each new token."""
    hidden = model.trunk(torch.tensor([[*prompt, *new]]))
    logits = model.trunk.logits(hidden.final_hidden[0, len(prompt) - 1 : -1])
    best = logits.float().topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


def _prompt_records(model: Model, report: ReferenceReport, tokens: int) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for text in report.generated[0.0].texts:
        gaps = _gaps(model, text.prompt, text.new)
        record: dict[str, object] = {
            "text": bytes(text.prompt).decode(errors="replace"),
            "ids": list(text.prompt),
            "tokens": list(text.new),
        }
        close = [position for position, gap in enumerate(gaps[:tokens]) if gap <= TIE]
        records.append(record | {"gaps": [round(gap, 4) for gap in gaps], "close": close})
    return records


def _ids(prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    return [prompt.text for prompt in prompts if not isinstance(prompt.text, str)]


def sampled_record(
    model: Model, prompts: Sequence[Sequence[int]], temperature: float, *, tokens: int, seed: int
) -> dict[str, object]:
    """Return what every acceptance rule accepts in `PASSES` sampled texts of each prompt.

    tokens: new ones of each text, which does not end before.
    """
    count = len(prompts)
    repeated = [tuple(prompt) for prompt in prompts] * PASSES
    max_tokens = tokens + MAX_K + 1  # what a last round drafts beyond the end is verified, too
    sampling = Sampling(temperature)
    settings = Settings(num_speculative_tokens=0, sampling=sampling, max_tokens=max_tokens, eos=(), seed=seed)
    results = generate(model, repeated, settings, backend="torch")
    pairs = zip(repeated, results, strict=True)
    texts = [ReferenceText(prompt, result.tokens, temperature) for prompt, result in pairs]
    scores = list(score_texts(model, texts, trunk_outputs(model.trunk, texts), MAX_K))
    passes = [scores[start : start + count] for start in range(0, len(scores), count)]
    rules = [_rule_record(rule, passes, tokens) for rule in RULES if rule != "greedy"]
    return {"temperature": temperature, "rules": rules}


def _rule_record(rule: str, passes: Sequence[Sequence[ScoredText]], tokens: int) -> dict[str, object]:
    fault = next((fault for fault in FAULTS if fault.rule == rule), None)
    counts = {
        str(k): {ending: _count(rule, passes, tokens, k, ending) for ending in ENDINGS} for k in range(1, MAX_K + 1)
    }
    offered, accepted = (list(zip(*rows, strict=True)) for rows in counts[str(MAX_K)]["whole"].values())
    return {
        "name": rule,
        "says": RULES[rule] if fault is None else fault.description,
        "fault": "" if fault is None else fault.name,
        "issues": [] if fault is None else list(fault.issues),
        "acceptance": [proportion(*pair).as_record() for pair in zip(accepted, offered, strict=True)],
        "counts": counts,
    }


def _count(
    rule: str, passes: Sequence[Sequence[ScoredText]], tokens: int, k: int, ending: str
) -> dict[str, list[list[float]]]:
    """Expected counts of rounds that offered and accepted each depth: [passes][depths]."""
    # A round starts after new token s if one remains; where the last one is cut, if there is also one to draft.
    remaining = [k] * (tokens - 1) if ending == "whole" else list(range(tokens - 2, 0, -1))
    survivals = [text.survivals[rule] for texts in passes for text in texts]
    offered, accepted = (
        part.unflatten(0, (len(passes), -1)).sum(1).tolist() for part in engine_round_counts(survivals, remaining, k)
    )
    return {"offered": _rounded(offered), "kept": _rounded(accepted)}


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(value, _DIGITS) for value in row] for row in rows]


def build_vector(model: Model, prompt: Sequence[int], *, k: int, num_rounds: int = _VECTOR_ROUNDS) -> dict[str, object]:
    """Return a test vector: prefill and the first rounds of a greedy decode, pass by pass.

    Each pass has who runs (trunk or head), the first position, the tokens from there on, and the hidden states they
    are combined with: `h<i>` is the trunk's of position i, `g<k>` the next_hidden of depth k.
    """
    events: list[Event] = []
    settings = Settings(num_speculative_tokens=k, max_tokens=(k + 1) * num_rounds + 1, eos=())
    records: list[dict[str, object]] = []
    for result in rounds(model.trunk, model.head, [list(prompt)], settings, observer=events.append):
        part = result.rows[0]
        passes = [_pass_record(event) for event in events]
        events.clear()
        records.append(
            {"passes": passes, "drafts": list(part.drafts), "kept": part.num_accepted, "emitted": list(part.emitted)}
        )
        if len(records) > num_rounds:
            break
    return {"prompt": list(prompt), "drafts": k, "rounds": records}


def _pass_record(event: Event) -> dict[str, object]:
    by = "trunk" if event.module is None else f"head[{event.module}]"
    positions = range(event.start, event.start + len(event.tokens))
    hidden = [] if event.module is None else [f"h{i}" if event.hidden == "h" else event.hidden for i in positions]
    return {"phase": event.phase, "by": by, "position": event.start, "tokens": list(event.tokens), "states": hidden}


_CONFIG = TrainConfig(
    steps=1,
    batch_size=16,
    length=64,
    depths=2,
    lam="1.0",
    optimizer="muon",
    lr=3e-3,
    warmup=20,
    weight_decay=0.01,
    dtype="float32",
    eval_batches=1,
)
_NUM_DOCUMENTS, _ROWS_PER_DOCUMENT = 2048, 4  # of the training text; rows of `length` tokens
_CANDIDATES = 3  # candidate prompts for each that is chosen
_SPREAD = 0.8  # standard deviation of the logarithm of norm weights at the start
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(
    out: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    steps: tuple[int, int] | None = None,
    count: int = 16,
    tokens: int = 48,
    on_record: Callable[[Record], None] = lambda _: None,
) -> dict[str, object]:
    """Train, write the checkpoint into the folder `out` and its record, which is returned, into `out/canary.json`.

    Runs on one thread, so that the same call gives the same bytes on a CPU. `steps` are of the trunk alone, and of
    trunk and head; None: those of the family. `count` and `tokens` are the prompts of the record and new tokens of
    each. Raises ConfigError for a family without a shape, a dtype other than float32 and bfloat16, or a device that
    does not exist.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r}; expected one of {', '.join(_DTYPES)}")
    torch_device = resolve_device(device)
    with torch_threads(1):
        model = _train(family, seed, steps or shape_of(family).steps, on_record, torch_device)
        record: dict[str, object] = {}

        def write_record(folder: Path) -> None:
            candidates = [list(text.encode()) for text in prompts(_CANDIDATES * count, seed=seed)]
            record.update(build_record(folder, candidates, count=count, tokens=tokens, seed=seed, device=torch_device))
            write_json(folder / FILE, record)

        model.save(out, dtype=_DTYPES[dtype], extra=write_record)
    return record


def _train(
    family: str, seed: int, steps: tuple[int, int], on_record: Callable[[Record], None], device: torch.device
) -> Model:
    shape, tokenizer = shape_of(family), byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(shape.special_tokens)})
    texts = documents(_NUM_DOCUMENTS, _ROWS_PER_DOCUMENT * _CONFIG.length - 1, seed=seed)
    corpus = Corpus.from_texts(texts, encoder(tokenizer), eos_id(tokenizer))
    torch.manual_seed(seed)
    model = Model.build(shape.config, tokenizer=tokenizer)
    spread_norm_weights(model, seed)
    for depths, num_steps in ((0, steps[0]), (_CONFIG.depths, steps[1])):
        config = replace(_CONFIG, steps=num_steps, depths=depths, seed=seed, matrix_lr=shape.matrix_lr)
        with tempfile.TemporaryDirectory() as folder:
            task = JointTask(model, corpus, config, ranks=Ranks(device=device))
            for metrics in Trainer(task, out=Path(folder)).run():
                on_record(metrics)
    return model


@torch.no_grad()
def spread_norm_weights(model: Model, seed: int) -> None:
    """Start norm weights between about 1/5 and 5, as after long training.

    If all were 1, hidden states before and after a norm would be nearly the same, and no count could show which of them
    a head was given.
    """
    assert model.head is not None
    generator = torch.Generator().manual_seed(seed)
    named = {"final": model.trunk.final_norm.get_parameter("weight"), **dict(model.head.named_parameters())}
    norm_weights = [value for name, value in named.items() if name == "final" or name.endswith("_norm.weight")]
    for norm_weight in (value for value in norm_weights if len(value) == model.trunk.config.hidden_size):
        spread = torch.randn(norm_weight.shape, generator=generator).mul(_SPREAD).exp()
        norm_weight.copy_(spread - float(model.family.norm_weight == "1+w"))
