"""Build a canary: train a tiny trunk and its head together, and record what an engine must count on them."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from nextn.checkpoint.safetensors_file import write_json
from nextn.conformance.canary_model import documents, prompts, shape_of
from nextn.conformance.expected import build_record
from nextn.conformance.record import FILE
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus, encoder, eos_id
from nextn.devices import resolve_device, torch_threads
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.train.config import TrainConfig
from nextn.train.distributed import Ranks
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer
from nextn.train.metrics import Record

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
