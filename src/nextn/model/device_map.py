"""Decoder layers on several devices, in host memory or on disk, through the hooks of accelerate.

Embedding, final norm, lm_head and the MTP head stay on the trunk's own device: they are also used outside of the
model's forward, where hooks do not reach. A layer on another GPU runs there; one in host memory or on disk runs on the
trunk's device, which gets its weights for each pass. Every layer returns its output on the trunk's device.
"""

import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from nextn.bounded_json import read_json
from nextn.devices import available_bytes, resolve_device
from nextn.errors import ConfigError
from nextn.model.streamed_trunk import DeferredTrunk
from nextn.model.trunk import Trunk
from nextn.text_format import install_command

_DISK = "disk"
_HOST = torch.device("cpu")
_SHARE = 0.9  # of free memory that `auto` fills; the rest is for KV caches and activations
_EXPECTED = "expected auto, devices such as cuda:0,cuda:1,cpu,disk, or a .json file of module names and devices"


def check_accelerate() -> None:
    """Raise ConfigError if accelerate is not installed."""
    if find_spec("accelerate") is None:
        raise ConfigError(f"--device-map needs accelerate: {install_command('accelerate')}")


def spread_layers(trunk: Trunk, device_map: str, folder: Path) -> str:
    """Load the decoder layers of a deferred trunk, each to its place by the map, and return a summary.

    `auto` fills the GPUs of the trunk's type in order, then host memory, then the disk. A list of devices and `disk`,
    separated by commas, takes the layers in order and in equal shares. A .json file has names of modules, or beginnings
    of such, and their devices, as accelerate writes them. Layers on disk are written to a new folder in `folder`, which
    is removed with the trunk.

    Raises ConfigError for a map that does not fit the trunk, a device that is not available, a trunk that can only be
    loaded as a whole, or a disk without enough space; CheckpointError if a layer cannot be read.
    """
    check_accelerate()
    if not isinstance(trunk, DeferredTrunk):
        raise ConfigError(f"device_map = {device_map!r}: layers of this quantization format are not read one by one")
    from accelerate.utils import OffloadedWeightsLoader

    places, own, stem = layer_places(trunk, device_map), trunk.device, _layers_name(trunk)
    on_disk = [layer for layer, place in zip(trunk.decoder.layers, places, strict=True) if place == _DISK]
    offload = _offload_folder(trunk, on_disk, folder) if on_disk else folder
    host: dict[str, Tensor] = {}
    index: dict[str, object] = {}  # of the files in the folder; both are filled below
    trunk.offloaded = OffloadedWeightsLoader(host, offload, index)
    devices = [_HOST if isinstance(place, str) else place for place in places]
    for number, (layer, place) in enumerate(zip(trunk.loaded_layers(devices), places, strict=True)):
        tensors = {f"{stem}.{number}.{name}": value.detach() for name, value in layer.named_parameters()}
        if place == _DISK:
            _write(tensors, offload, index)
        elif place == _HOST != own:
            host.update(tensors)
        else:
            if place != own:
                _run_on(place, layer, trunk)
            continue
        _run_offloaded(f"{stem}.{number}", layer, trunk)
    trunk.close()
    trunk.layer_places = tuple(map(str, places))
    counts = Counter(trunk.layer_places)
    return ", ".join(f"{count} on {place}" for place, count in counts.items()) + (f" ({offload})" if on_disk else "")


def layer_places(trunk: Trunk, device_map: str) -> list[torch.device | str]:
    """Return the device of each decoder layer, or "disk"; see `spread_layers`."""
    layers = trunk.decoder.layers
    if device_map == "auto":
        return fill_memory(layers, _free_bytes(trunk.device))
    if device_map.endswith(".json"):
        names = _read_map(device_map, trunk)
    else:
        listed = device_map.split(",")
        names = [listed[index * len(listed) // len(layers)] for index in range(len(layers))]
        if len(listed) > len(layers):
            message = f"device_map = {device_map!r} names {len(listed)} places for {len(layers)} decoder layers"
            raise ConfigError(message)
    return [_place(name, device_map) for name in names]


def fill_memory(layers: nn.ModuleList, free_bytes: Mapping[torch.device, int]) -> list[torch.device | str]:
    """Return the place of each layer where devices are filled in order and the disk takes what is left.

    free_bytes: Of each device, GPUs first; the first one has room to receive a layer from host memory or disk.
    """
    from accelerate import infer_auto_device_map

    keys: dict[int | str, torch.device] = {
        device.type if device.type in ("cpu", "mps") else index: device for index, device in enumerate(free_bytes)
    }
    found = infer_auto_device_map(
        layers,
        max_memory={key: int(free_bytes[device] * _SHARE) for key, device in keys.items()},
        no_split_module_classes=[*{type(layer).__name__ for layer in layers}],
        clean_result=False,
    )
    return [keys.get(found[str(index)], _DISK) for index in range(len(layers))]


def _free_bytes(own: torch.device) -> dict[torch.device, int]:
    """Free memory of the trunk's device, of others of its type, and of the host, in this order."""
    host = available_bytes(_HOST)
    if host is None:
        raise ConfigError("device_map = 'auto': this system does not say how much memory is free; name the devices")
    if own.type in ("cpu", "mps"):  # whose memory is the host's
        return {own: host}
    module = torch.get_device_module(own.type)
    others = [torch.device(own.type, index) for index in range(module.device_count())]
    devices = [own, *(device for device in others if device != own)]
    return {device: module.mem_get_info(device)[0] for device in devices} | {_HOST: host}


def _place(name: str, device_map: str) -> torch.device | str:
    if name == _DISK:
        return name
    try:
        if name == "auto":
            raise ConfigError("`auto` cannot be combined with other places")
        return resolve_device(name)
    except ConfigError as error:
        raise ConfigError(f"device_map = {device_map!r}; {_EXPECTED}. {error}") from error


def _read_map(path: str, trunk: Trunk) -> list[str]:
    """Return the place of each decoder layer by a file. Raises ConfigError."""
    try:
        content = read_json(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"device_map = {path!r}: {error}; {_EXPECTED}") from error
    if not isinstance(content, dict) or not all(type(place) in (str, int) for place in content.values()):
        raise ConfigError(f'device_map = {path!r}; expected an object such as {{"model.layers.0": "cpu"}}')
    given = {name: place if isinstance(place, str) else f"cuda:{place}" for name, place in content.items()}
    modules, stem = dict(trunk.model.named_modules()), _layers_name(trunk)
    layers = [f"{stem}.{index}" for index in range(len(trunk.decoder.layers))]
    nearest = {name: max((key for key in given if _is_in(name, key)), key=len, default=None) for name in layers}
    missing = [name for name, key in nearest.items() if key is None]
    if missing:
        raise ConfigError(f"device_map = {path!r}: no place for {', '.join(missing)}")
    for key in given.keys() - set(nearest.values()):
        if key not in modules or any(key.startswith(f"{name}.") for name in layers):
            raise ConfigError(f"device_map = {path!r}: {key!r} is no decoder layer, nor a module that has some")
        if not _is_in(stem, key) and _place(given[key], path) != trunk.device:
            raise ConfigError(
                f"device_map = {path!r}: {key} on {given[key]}; all but the decoder layers is on {trunk.device}, which "
                "--device names"
            )
    return [given[key] for key in nearest.values() if key is not None]


def _layers_name(trunk: Trunk) -> str:
    return str(next(name for name, part in trunk.model.named_modules() if part is trunk.decoder.layers))


def _is_in(name: str, key: str) -> bool:
    return not key or f"{name}.".startswith(f"{key}.")


def _offload_folder(trunk: Trunk, layers: Sequence[nn.Module], folder: Path) -> Path:
    """Make a folder for the weights of these layers that is removed with the trunk, or when the process ends."""
    num_bytes = sum(value.nbytes for layer in layers for value in layer.parameters())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Mapped files are written: without space, the process would die of SIGBUS.
        if (free := shutil.disk_usage(folder).free) < num_bytes:
            raise ConfigError(
                f"{folder}: {free / 1e9:.1f} GB are free, and the layers on disk take {num_bytes / 1e9:.1f} GB; name "
                "another folder with XDG_CACHE_HOME"
            )
        made = Path(tempfile.mkdtemp(prefix="layers-", dir=folder))
    except OSError as error:
        raise ConfigError(f"{folder}: {error}; name another folder with XDG_CACHE_HOME") from error
    weakref.finalize(trunk, shutil.rmtree, made, ignore_errors=True)
    return made


def _write(tensors: Mapping[str, Tensor], folder: Path, index: dict[str, object]) -> None:
    from accelerate.utils import offload_weight

    try:
        for name, value in tensors.items():
            offload_weight(value, name, folder, index)
    except OSError as error:
        raise ConfigError(f"{folder}: {error}; name another folder with XDG_CACHE_HOME") from error


def _run_offloaded(name: str, layer: nn.Module, trunk: DeferredTrunk) -> None:
    """Drop the parameters of a layer; its blocks take them from `offloaded` to the trunk's device while they run.

    Whole blocks, as mixers use weights of their submodules without calling these; and not the layer, as the mixer of a
    recurrent layer also runs alone, see `RecurrentLayer`.
    """
    from accelerate.hooks import attach_align_device_hook

    attach_align_device_hook(
        layer,
        execution_device=trunk.device,
        offload=True,
        weights_map=trunk.offloaded,
        module_name=name,
        skip_keys=trunk.model._skip_keys_device_placement,
        preload_module_classes=[*set(_block_classes(layer))],
    )


def _block_classes(module: nn.Module) -> Iterator[str]:
    for part in module.children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):  # which nobody calls
            yield from _block_classes(part)
        else:
            yield type(part).__name__


def _run_on(device: torch.device | str, layer: nn.Module, trunk: Trunk) -> None:
    """Move a layer's inputs to its device, and its output back to the device of its inputs."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    skipped = trunk.model._skip_keys_device_placement
    add_hook_to_module(layer, AlignDevicesHook(device, io_same_device=True, place_submodules=True, skip_keys=skipped))
