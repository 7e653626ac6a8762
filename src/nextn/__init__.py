"""nextn: Multi-Token Prediction heads for PyTorch. Public names are resolved on first use, so importing is cheap."""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "Acceptance": "figures.acceptance",
    "Head": "head",
    "HeadSettings": "finetune.beside",
    "JointTask": "training.tasks",
    "KeepHead": "moving.keep",
    "Model": "model",
    "Result": "text",
    "Sampling": "sampling",
    "Settings": "decode",
    "StandaloneHead": "head",
    "Targets": "losses.loss",
    "TrainConfig": "training.train_config",
    "Trainer": "training.train",
    "convert": "moving.relayout",
    "eos_tokens": "text",
    "extract": "moving.relayout",
    "generate": "text",
    "keep_head": "moving.keep",
    "load": "model",
    "mtp_loss": "losses.loss",
    "restore": "moving.graft",
    "rounds": "decode",
    "stream": "text",
    "trace": "benchmarking.tracer",
    "train_head": "finetune.hook",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'nextn' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"nextn.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
