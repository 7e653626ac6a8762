"""A trunk, its head and its tokenizer as one thing: build, load strictly, save in the family's published layout."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nextn import __version__
from nextn.checkpoint import Checkpoint, read_header, write_index, write_json, write_safetensors
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.families import Family, by_config
from nextn.head import Head
from nextn.layout import deinterleave, fuse_experts, interleave, split_experts
from nextn.trunk import Trunk


@dataclass
class Model:
    """notes: what loading found worth saying that is no error, such as a stored copy that differs from the trunk's."""

    trunk: Trunk
    head: Head | None
    family: Family
    tokenizer: PreTrainedTokenizerBase | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        config: Mapping[str, object],
        *,
        num_modules: int = 1,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "Model":
        """A freshly initialised model of a transformers config (a dict with `model_type`), by the family's rule."""
        family = _runnable(config)
        if family.max_modules is not None and num_modules > family.max_modules:
            raise ConfigError(f"num_modules = {num_modules}; {family.name} has room for {family.max_modules}")
        trunk = Trunk.from_config(config, stage=family.hidden, dtype=dtype)
        return cls(trunk, Head(family, trunk, num_modules=num_modules), family, tokenizer)

    @classmethod
    def load(cls, source: str | Path, *, dtype: torch.dtype | None = None, need_head: bool = True) -> "Model":
        """A checkpoint folder or hub id. dtype None = as stored. need_head=False takes a checkpoint without a head.

        Raises CheckpointError that lists every head tensor that is missing, unexpected, mis-shaped or non-finite,
        FamilyError for a model type without a row.
        """
        folder = _folder(source)
        checkpoint = Checkpoint.open(folder)
        family = _runnable(checkpoint.config)
        trunk = Trunk.from_pretrained(folder, stage=family.hidden, dtype=dtype)
        _check_finite(folder, trunk.model.state_dict())
        count = family.num_modules(checkpoint.config)
        stored = {name for name in checkpoint.tensors if family.canonical(name, trunk.num_layers) is not None}
        head: Head | None = None
        notes: tuple[str, ...] = ()
        if need_head or (count and stored):
            if not count or not stored:
                raise CheckpointError(_absent(folder, family, count, trunk.num_layers))
            head = Head(family, trunk, num_modules=count)
            notes = _fill(head, folder, checkpoint, sorted(stored))
        return cls(trunk, head, family, _tokenizer(folder, trunk), notes)

    def save(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        copies: bool = True,
        extra: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a checkpoint folder in the family's published layout, whole or not at all; an old one is replaced.

        dtype: cast to it on the way out (None = as is). copies: store the shared embedding and output head again inside
        each module where the family does. extra(folder): writes more files, before the folder gets its name. Raises
        CheckpointError if the folder cannot be written.
        """
        folder = Path(folder)
        staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        try:
            staging.mkdir(parents=True)
            self._write(staging, dtype, copies)
            if extra is not None:
                extra(staging)
            _swap(staging, folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written: {error}; nothing was left behind") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _write(self, folder: Path, dtype: torch.dtype | None, copies: bool) -> None:
        model = self.trunk.model
        # Cast tensor by tensor: the model in memory stays as it is.
        keeps = self.trunk.keeps_fp32
        state = {name: _cast(value, None if keeps(name) else dtype) for name, value in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=state)
        if self.family.saved:
            _rename(folder, self.family.trunk_name)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        if self.head is not None:
            _add_shard(folder, head_tensors(self.head, copies, dtype=dtype))
        config = self.family.with_count(Checkpoint.open(folder).config, self.head.num_modules if self.head else 0)
        config["dtype"] = str(dtype or model.dtype).removeprefix("torch.")
        write_json(folder / "config.json", config)


def load(source: str | Path, *, dtype: torch.dtype | None = None, need_head: bool = True) -> Model:
    """`Model.load`: a checkpoint folder or hub id -> trunk, head and tokenizer; strict."""
    return Model.load(source, dtype=dtype, need_head=need_head)


def head_tensors(head: Head, copies: bool = True, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The head's tensors under their published names, experts one by one where the family stores them so.

    dtype: cast to it what does not keep fp32 whatever the model's dtype (None = as is).
    """
    state = {
        name.removeprefix("stack."): _cast(value, None if head.keeps_fp32(name) else dtype)
        for name, value in head.state_dict().items()
    }
    if copies:
        shared = {"embedding": head.trunk.embedding.weight, "output": head.trunk.output.weight}
        for index in range(head.num_modules):
            # clone: safetensors refuses two names for one storage, and the file does hold it twice
            state |= {f"{index}.{role}.weight": _cast(shared[role], dtype).clone() for role in head.family.copies}
    state = split_experts(interleave(state, head.family.interleaved), head.family.experts)
    return {head.published(name): value.contiguous() for name, value in state.items()}


def _fill(head: Head, folder: Path, checkpoint: Checkpoint, stored: list[str]) -> tuple[str, ...]:
    """Load the stored head tensors into `head`, every one accounted for -> notes."""
    wanted = {name: tuple(value.shape) for name, value in head_tensors(head, copies=False).items()}
    copies = {name for name in stored if _role(head, name) in head.family.copies}
    problems = [f"missing: {name} {shape}" for name, shape in wanted.items() if name not in stored]
    for name in stored:
        info = checkpoint.tensors[name]
        if name not in wanted and name not in copies:
            problems.append(f"unexpected: {name} {info.shape}")
        elif name in wanted and info.shape != wanted[name]:
            problems.append(f"mis-shaped: {name} {info.shape}, expected {wanted[name]}")
        elif info.dtype not in ("BF16", "F16", "F32", "F64"):
            problems.append(f"wrong dtype: {name} is {info.dtype}; it cannot be used without its scales")
    tensors = {} if problems else {name: _read(folder, checkpoint, name) for name in stored}
    problems += [f"non-finite: {name}" for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    if problems:
        raise CheckpointError(f"{folder}: the head is not whole, {len(problems)} problems:\n  " + "\n  ".join(problems))
    state = {str(head.family.canonical(name, head.trunk.num_layers)): tensors[name] for name in wanted}
    state = deinterleave(state, head.family.interleaved)
    head.load_state_dict({f"stack.{name}": value for name, value in fuse_experts(state).items()})
    return tuple(note for name in sorted(copies) if (note := _compare(head, name, tensors[name])))


def _compare(head: Head, name: str, copy: Tensor) -> str | None:
    shared = head.trunk.embedding if _role(head, name) == "embedding" else head.trunk.output
    own = shared.weight.detach()
    if copy.shape != own.shape:
        return f"{name} has shape {tuple(copy.shape)}, the trunk's {tuple(own.shape)}; the trunk's is used"
    gap = (copy.to(own.dtype) - own).abs().max().item()
    return f"{name} differs from the trunk's by up to {gap:.3g}; the trunk's is used" if gap else None


def _role(head: Head, name: str) -> str:
    return str(head.family.canonical(name, head.trunk.num_layers)).split(".")[1]


def _read(folder: Path, checkpoint: Checkpoint, name: str) -> Tensor:
    with safe_open(folder / checkpoint.tensors[name].file, framework="pt") as file:
        return file.get_tensor(name)


def _check_finite(folder: Path, state: Mapping[str, Tensor]) -> None:
    bad = [name for name, value in state.items() if value.is_floating_point() and not bool(torch.isfinite(value).all())]
    if bad:
        raise CheckpointError(f"{folder}: {len(bad)} trunk tensors hold NaN or Inf: {', '.join(bad[:8])}")


def _runnable(config: Mapping[str, object]) -> Family:
    family = by_config(config)
    if not family.runs:
        raise FamilyError(family.cannot_run)
    return family


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.detach().to(dtype) if dtype is not None and value.is_floating_point() else value.detach()


def _absent(folder: Path, family: Family, count: int, num_layers: int) -> str:
    where = family.published("0.token_norm.weight", num_layers)
    said = f"config.json promises {count} module(s)" if count else f"config.json has no {family.count_fields[0]}"
    return (
        f"{folder}: no MTP head ({family.name}): {said}, and tensors like {where} are "
        f"{'absent' if count else 'not expected'}. Restore the head from the base model, or decode with drafts = 0"
    )


def _add_shard(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put the head in a last shard of its own and index all shards."""
    shards = sorted(folder.glob("*.safetensors"))
    total = len(shards) + 1
    names = [f"model-{index:05d}-of-{total:05d}.safetensors" for index in range(1, total + 1)]
    for shard, name in zip(shards, names, strict=False):
        shard.rename(folder / name)
    save_file(dict(tensors), folder / names[-1], metadata={"format": "pt", "nextn": __version__})
    _index(folder)


def _rename(folder: Path, name_of: Callable[[str], str]) -> None:
    """Give every tensor of the folder the name that `name_of` says, bytes as they are."""
    checkpoint = Checkpoint.open(folder)
    for file in checkpoint.files:
        names = [name for name, info in checkpoint.tensors.items() if info.file == file]
        raw = {name_of(name): checkpoint.raw(name) for name in names}
        write_safetensors(folder / file, raw, metadata={"format": "pt"})
    _index(folder)


def _index(folder: Path) -> None:
    headers = {path.name: read_header(path).tensors for path in sorted(folder.glob("*.safetensors"))}
    weight_map = {tensor: name for name, header in headers.items() for tensor in header}
    write_index(folder, weight_map, sum(info.nbytes for header in headers.values() for info in header.values()))


def _swap(staging: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    staging.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _folder(source: str | Path) -> Path:
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists() or str(source).count("/") != 1 or str(source).startswith((".", "/")):
        raise CheckpointError(
            f"{source}: not a checkpoint folder; expected a folder with config.json, or a hub id org/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{source}: neither a folder nor a model that the hub hands out: {error}") from error


def _tokenizer(folder: Path, trunk: Trunk) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) > trunk.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {trunk.vocab_size}: "
            "they do not belong together"
        )
    return tokenizer
