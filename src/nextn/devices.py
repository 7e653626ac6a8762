"""Which device a model runs on."""

import torch

from nextn.errors import ConfigError


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """Return the device that a name means.

    Args:
        name: `auto` for the first of cuda, mps and cpu that is there, or a device in torch's spelling, such as
            `cuda:1`.

    Raises:
        ConfigError: if torch does not know the device or does not see it on this machine.
    """
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if _is_there(torch.device(kind))))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device = {name!r}; expected one of {', '.join(_known())}") from error
    if not _is_there(device):
        raise ConfigError(f"device = {str(device)!r} is not there for torch; expected one of {', '.join(_known())}")
    return device


def _is_there(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    try:
        module = torch.get_device_module(device.type)
    except RuntimeError:  # torch was built without it
        return False
    return bool(module.is_available()) and (device.index or 0) < module.device_count()


def _known() -> list[str]:
    kinds = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["auto", *kinds, *(["mps"] if torch.mps.is_available() else []), "cpu"]
