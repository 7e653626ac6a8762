"""Which device a model runs on."""

import torch

from nextn.errors import ConfigError


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """Return the device of a name.

    Args:
        name: `auto` for the first available of cuda, mps and cpu, or a device in torch's spelling, such as `cuda:1`.

    Raises:
        ConfigError: if torch does not know the device or does not find it on this machine.
    """
    if name == "auto":
        return torch.device(next(name for name in ("cuda", "mps", "cpu") if _is_available(torch.device(name))))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device = {name!r}; expected one of {', '.join(_available_names())}") from error
    if not _is_available(device):
        raise ConfigError(
            f"device = {str(device)!r} is not available to torch; expected one of {', '.join(_available_names())}"
        )
    return device


def _is_available(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    try:
        module = torch.get_device_module(device.type)
    except RuntimeError:  # torch was built without it
        return False
    return bool(module.is_available()) and (device.index or 0) < module.device_count()


def _available_names() -> list[str]:
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["auto", *gpus, *(["mps"] if torch.mps.is_available() else []), "cpu"]
