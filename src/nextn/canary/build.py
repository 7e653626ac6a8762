"""Make a canary: train a tiny trunk and its head together, and write beside them what an engine must count."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from nextn.canary.expected import record
from nextn.canary.kit import FILE
from nextn.canary.language import documents, prompts
from nextn.canary.shapes import shape_of
from nextn.checkpoints.tensor_file import write_json
from nextn.corpus.bytelevel import byte_tokenizer
from nextn.corpus.data import Corpus, encoder, eos_of
from nextn.devices import resolve_device
from nextn.distributed.parallel import Ranks
from nextn.errors import ConfigError
from nextn.model import Model
from nextn.training.metrics import Record
from nextn.training.tasks import JointTask
from nextn.training.train import Trainer
from nextn.training.train_config import TrainConfig

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
_DOCUMENTS, _ROWS = 2048, 4  # texts to learn from, and how many rows each fills
_CHOICE = 3  # prompts for each that is taken
_SPREAD = 0.8  # of the logarithm of a norm's gains at the start
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
    """Train, write the checkpoint into the folder `out` and its record into `out/canary.json`; -> the record.

    On one thread, so that the same call gives the same bytes on a CPU. device: see `resolve_device`. steps: of the
    trunk alone, and of trunk and head; None = the family's. count, tokens: prompts, and new tokens of each. Raises
    ConfigError for a family without a shape, an unknown dtype, or a device that is not there.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r}; expected one of {', '.join(_DTYPES)}")
    place, threads = resolve_device(device), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _trained(family, seed, steps or shape_of(family).steps, on_record, place)
        found: dict[str, object] = {}

        def beside(folder: Path) -> None:
            asked = [list(text.encode()) for text in prompts(_CHOICE * count, seed=seed)]
            found.update(record(folder, asked, count=count, tokens=tokens, seed=seed, device=place))
            write_json(folder / FILE, found)

        model.save(out, dtype=_DTYPES[dtype], extra=beside)
    finally:
        torch.set_num_threads(threads)
    return found


def _trained(
    family: str, seed: int, steps: tuple[int, int], on_record: Callable[[Record], None], device: torch.device
) -> Model:
    shape, tokenizer = shape_of(family), byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(shape.marks)})
    text = documents(_DOCUMENTS, _ROWS * _CONFIG.length - 1, seed=seed)
    corpus = Corpus.from_texts(text, encoder(tokenizer), eos_of(tokenizer))
    torch.manual_seed(seed)
    model = Model.build(shape.config, tokenizer=tokenizer)
    spread_gains(model, seed)
    for depths, count in ((0, steps[0]), (_CONFIG.depths, steps[1])):
        config = replace(_CONFIG, steps=count, depths=depths, seed=seed, matrix_lr=shape.matrix_lr)
        with tempfile.TemporaryDirectory() as folder:
            task = JointTask(model, corpus, config, ranks=Ranks(device=device))
            for each in Trainer(task, out=Path(folder)).run():
                on_record(each)
    return model


@torch.no_grad()
def spread_gains(model: Model, seed: int) -> None:
    """Norm gains start between about 1/5 and 5, as long training leaves them. All at 1, a norm before and a norm behind
    another are nearly the same, and no count could tell which state a head was given."""
    assert model.head is not None
    generator = torch.Generator().manual_seed(seed)
    named = {"final": model.trunk.final_norm.get_parameter("weight"), **dict(model.head.named_parameters())}
    gains = [value for name, value in named.items() if name == "final" or name.endswith("_norm.weight")]
    for gain in (value for value in gains if len(value) == model.trunk.config.hidden_size):
        drawn = torch.randn(gain.shape, generator=generator).mul(_SPREAD).exp()
        gain.copy_(drawn - float(model.family.gain == "1+w"))
