"""nextn: Multi-Token Prediction heads for PyTorch. Public names are resolved on first use, so importing is cheap."""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "Acceptance": "acceptance",
    "Head": "head",
    "HeadSettings": "beside",
    "JointTask": "tasks",
    "KeepHead": "keep",
    "Model": "model",
    "Result": "text",
    "Sampling": "sampling",
    "Settings": "decode",
    "StandaloneHead": "head",
    "TrainConfig": "train_config",
    "Trainer": "train",
    "convert": "relayout",
    "eos_tokens": "text",
    "extract": "relayout",
    "generate": "text",
    "keep_head": "keep",
    "load": "model",
    "mtp_loss": "loss",
    "restore": "graft",
    "rounds": "decode",
    "stream": "text",
    "trace": "tracer",
    "train_head": "hook",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'nextn' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"nextn.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
