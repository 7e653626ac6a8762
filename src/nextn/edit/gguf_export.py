"""Write a trunk, and a head that was added to it, into one GGUF for llama.cpp; a chunk of a tensor is in memory."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nextn.bounded_json import JsonDict
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import atomic
from nextn.checkpoint.snapshot import folder_of
from nextn.checkpoint.staging_folder import need_room
from nextn.edit.adopt import full_config
from nextn.edit.gguf_layout import (
    STEP35,
    StoredPart,
    Value,
    common_dtype,
    layout_of,
    metadata,
    parts,
    problems,
    rope_factors,
)
from nextn.edit.gguf_tokenizer import add_tokenizer, copy_tokenizer
from nextn.errors import ConfigError, FamilyError
from nextn.family_table import Family
from nextn.text_format import install_command

if TYPE_CHECKING:
    from gguf import GGUFWriter

_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
_ALIGNMENT = 32  # of each tensor, GGUF's default


def refuse_trunk(checkpoint: Checkpoint, family: Family) -> JsonDict:
    """Return the trunk's config with all defaults, as transformers reads it.

    Raises FamilyError if no graph of llama.cpp computes this trunk and hands over the state that the head takes in.
    """
    config = full_config(checkpoint)
    layout = layout_of(family)
    if listed := [*problems(config, layout)]:
        other = "" if layout == STEP35 else ". Its step35 layout takes heads of `nextn train --layout step35`"
        message = f"{checkpoint.path}: llama.cpp's {layout} layout cannot hold this trunk: {'; '.join(listed)}{other}"
        raise FamilyError(message)
    return config


def refuse_without_gguf() -> None:
    """Raise ConfigError if the gguf package is not installed."""
    if find_spec("gguf") is None:
        raise ConfigError(f"a file for llama.cpp needs the gguf package: {install_command('gguf')}")


def refuse_file(path: Path) -> None:
    """Raise ConfigError if the path is not that of a new .gguf file, or the gguf package is not installed."""
    refuse_without_gguf()
    if path.suffix != ".gguf" or path.exists():
        raise ConfigError(f"{path}: expected a new file whose name ends in .gguf")


def refuse_modules(path: str, count: int) -> None:
    """Raise FamilyError for a head of several modules."""
    if count != 1:
        raise FamilyError(f"{path}: {count} MTP layers; a GGUF here holds one, for all drafts")


def write_gguf(trunk: Inventory, head: Inventory, path: Path, *, tokenizer: Path | None = None) -> None:
    """Write trunk and head (of one module) into the new .gguf file, with another GGUF's tokenizer or the trunk's.

    Raises CheckpointError if llama.cpp's graph has no place for a tensor of the trunk, or the disk is full; ConfigError
    if the file exists or has another suffix, the tokenizer cannot be written, or gguf is not installed; FamilyError if
    no layout holds this trunk with this head.
    """
    refuse_file(path)
    from gguf import GGUFWriter

    refuse_modules(head.checkpoint.path, len(head.modules))
    config, layout = refuse_trunk(trunk.checkpoint, head.family), layout_of(head.family)
    listed = parts(trunk, head, config, layout)
    values = metadata(config, layout, dtype=common_dtype(listed))
    factors = np.array(rope_factors(config), np.float32)
    need_room(path, sum(_num_bytes(each) for each in listed))
    with atomic(path) as file:
        writer = GGUFWriter(file.name, layout)
        _add_values(writer, {"general.name": Path(trunk.checkpoint.path).name, **values})
        if tokenizer is None:
            add_tokenizer(writer, folder_of(trunk.checkpoint), config["vocab_size"])
        else:
            copy_tokenizer(writer, tokenizer, config["vocab_size"])
        _add_infos(writer, listed, factors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        file.seek(0, 2)
        for chunks in (*([[factors.tobytes()]] if factors.size else []), *map(_chunks, listed)):
            file.write(bytes(-file.tell() % _ALIGNMENT))
            for chunk in chunks:
                file.write(chunk)
        file.write(bytes(-file.tell() % _ALIGNMENT))


def _add_values(writer: "GGUFWriter", values: dict[str, Value]) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        list: writer.add_array,
    }  # fmt: skip
    for key, value in values.items():
        adders[type(value)](key, value)


def _add_infos(writer: "GGUFWriter", listed: list[StoredPart], factors: np.ndarray) -> None:
    from gguf import GGMLQuantizationType as Type

    if factors.size:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for each in listed:
        kind = Type.F32 if _is_widened(each) else Type[each.info.dtype]
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), _num_bytes(each), raw_dtype=kind)


def _is_widened(part: StoredPart) -> bool:
    """Whether it is a norm's weight, a bias or a router, which llama.cpp wants in float32."""
    return len(part.info.shape) == 1 or part.name.endswith("ffn_gate_inp.weight")


def _num_bytes(part: StoredPart) -> int:
    info = part.info
    return (info.nbytes // _WIDTHS[info.dtype] * 4 if _is_widened(part) else info.nbytes) * len(part.stored)


def _chunks(part: StoredPart) -> Iterator[bytes]:
    dtype = part.info.dtype
    for chunk in (chunk for name in part.stored for chunk in part.source.chunks(name)):
        if not _is_widened(part) or dtype == "F32":
            yield chunk
        elif dtype == "F16":
            yield np.frombuffer(chunk, "<f2").astype("<f4").tobytes()
        else:
            yield (np.frombuffer(chunk, "<u2").astype("<u4") << 16).tobytes()
