"""An on-disk cache of a frozen trunk's hidden states, so that training its head does not run the trunk again.

The shards hold complete batches, are written atomically and read through a memory map. A key file records which
trunk, text and batches they belong to.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.random import PCG64, SeedSequence
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nextn.checkpoint.safetensors_file import RawTensor, read_header, write_json, write_safetensors
from nextn.checkpoint.staging_folder import explain_full_disk, owned, writing
from nextn.checkpoint.tensors import bytes_of
from nextn.data.batches import Batch, Batches, permutation
from nextn.errors import CheckpointError, ConfigError
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.text_format import changes
from nextn.train.checkpointing import fingerprint
from nextn.train.distributed import ALONE, Ranks

KEY, _SHARD = "cache.json", "hidden-"
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32", torch.bool: "BOOL"}
_GB = 1e9

TensorSpec = tuple[torch.dtype, tuple[int, ...]]


class HiddenStateCache:
    """Batches 0..num_batches-1 of `batches`, with the trunk's hidden states in shards in `folder`.

    States are stored in `dtype` (None: the trunk's own), computed by `compute` (None: a forward pass of the trunk),
    under bfloat16 `autocast` if training has it. `owner` identifies the trunk (None: its `fingerprint`). The folder
    takes at most `limit_gb` 1e9 bytes, a file about `shard_bytes`, as does the memory to make one. Raises ConfigError
    for a folder with the states of another trunk, text or batching.
    """

    def __init__(
        self,
        trunk: Trunk,
        batches: Batches,
        num_batches: int,
        folder: Path,
        *,
        dtype: torch.dtype | None = torch.bfloat16,
        autocast: bool = False,
        compute: Callable[[Batch], TrunkOutput] | None = None,
        owner: str | None = None,
        limit_gb: float | None = None,
        shard_bytes: int = 256 * 2**20,
    ) -> None:
        if num_batches < 1 or (limit_gb is not None and limit_gb <= 0):
            raise ConfigError(f"{num_batches=}, {limit_gb=}: expected num_batches >= 1 and a limit above 0")
        self.trunk, self.batches, self.num_batches, self.folder = trunk, batches, num_batches, folder
        self.dtype, self.autocast, self.limit_gb = dtype or trunk.dtype, autocast, limit_gb
        self.owner, self.compute = owner or fingerprint(trunk.model), compute or self._run_trunk
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(f"hidden states cannot be stored in {self.dtype}; use bfloat16 or float32")
        self._specs = _tensor_specs(trunk, batches, self.dtype)
        self._batch_bytes = sum(dtype.itemsize * prod(shape) for dtype, shape in self._specs.values())
        self._per_shard = max(1, shard_bytes // self._batch_bytes)
        self._key = self._identity()
        self._check_key()
        self._order = lru_cache(maxsize=2)(self._sample_order)
        self._open = lru_cache(maxsize=16)(partial(safe_open, framework="pt"))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk, known before any is computed."""
        return self.num_batches * self._batch_bytes

    def fill(
        self, should_stop: Callable[[], bool] = lambda: False, *, ranks: Ranks = ALONE
    ) -> Iterator[tuple[int, int]]:
        """Run the trunk for missing or incomplete shards; each process makes every world-th one.

        Yields (finished batches, all batches), first at the start and then each time all processes finished one.
        should_stop is called before each; complete shards stay. Raises ConfigError at the start if the limit or the
        free space is too small, CheckpointError if a file cannot be written, TrainingError if another process is lost.
        """
        lock = owned(self.folder, inside=True) if ranks.is_first else nullcontext()
        with ranks.guarded(), explain_full_disk(self._full_disk_advice):
            self._check_space(_total(len(self._missing_batches(ranks)), ranks) * self._batch_bytes)
            with lock:
                yield from self._fill(should_stop, ranks)

    def _full_disk_advice(self) -> str:
        stored = sum(path.stat().st_size for path in self.folder.glob(f"{_SHARD}*"))
        return (
            f"{max(0, self.nbytes - stored):,} of {self.nbytes:,} bytes of hidden states are missing; the existing "
            "files are complete. With enough free space, the same command resumes."
        )

    def _fill(self, should_stop: Callable[[], bool], ranks: Ranks) -> Iterator[tuple[int, int]]:
        missing = self._missing_batches(ranks)
        remaining = _total(len(missing), ranks)
        if ranks.is_first:
            for partial_file in self.folder.glob(f".{_SHARD}*.tmp"):  # of a process that was killed
                partial_file.unlink(missing_ok=True)
            write_json(self.folder / KEY, self._key)
        tensors: dict[str, RawTensor] = {}
        while True:
            yield self.num_batches - remaining, self.num_batches
            if not remaining or ranks.any(should_stop()):
                return
            # A process with nothing left still takes part: all processes must run a sharded trunk together.
            index = missing[0] if missing else 0
            values = self._compute_batch(index)
            if missing:
                tensors |= {f"{index}.{name}": _raw(value) for name, value in values.items()}
                members = self._members(index // self._per_shard)
                if missing.pop(0) == members[-1]:
                    write_safetensors(self._path(index // self._per_shard), tensors)
                    tensors = {}
            remaining = _total(len(missing), ranks)

    def _missing_batches(self, ranks: Ranks) -> list[int]:
        own = range(ranks.rank, -(-self.num_batches // self._per_shard), ranks.world)
        return [index for shard in own if not self._is_complete(shard) for index in self._members(shard)]

    def batch(self, step: int, *, rank: int = 0, world: int = 1) -> tuple[Batch, TrunkOutput]:
        """Return rows rank::world of the batch of a step; the states are on the trunk's device, in its dtype.

        Each epoch has every batch once, in its own random order, a pure function of the step. Raises ConfigError if
        the cache was not filled, CheckpointError for a damaged file.
        """
        epoch, position = divmod(step, self.num_batches)
        index = int(self._order(epoch)[position])
        stored = {name: self._read(index, name)[rank::world] for name in self._specs}
        head_input, final_hidden = (self._state(stored.get(name)) for name in ("head_input", "final_hidden"))
        batch = Batch(stored["tokens"].long(), stored["documents"], stored.get("mask"))
        assert head_input is not None
        return batch, TrunkOutput(head_input * self.trunk.scale if final_hidden is None else final_hidden, head_input)

    def _identity(self) -> dict[str, object]:
        return {
            "trunk": self.owner,
            "text": self.batches.corpus.fingerprint,
            "batch_size": self.batches.batch_size,
            "length": self.batches.length,
            "seed": self.batches.seed,
            "pack": self.batches.pack,
            "batches": self.num_batches,
            "dtype": _NAMES[self.dtype],
            "stage": self.trunk.stage,
            "autocast": self.autocast,
            "batches_per_file": self._per_shard,
        }

    def _check_key(self) -> None:
        path = self.folder / KEY
        if not path.exists():
            return
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a readable key: {error}; remove the folder, or give another") from error
        for part in ("trunk", "text"):
            if stored.get(part) != self._key[part]:
                message = f"{self.folder} holds the hidden states of another {part}; remove the folder, or give another"
                raise ConfigError(message)
        if difference := changes(stored, self._key):
            message = f"{self.folder} was made with {difference}; use the same, remove the folder, or give another"
            raise ConfigError(message)

    def _check_space(self, needed: int) -> None:
        what = f"{self.folder}: the hidden states of {self.num_batches} batches take {self.nbytes / _GB:.3g} GB"
        advice = "store fewer or shorter batches, or store bfloat16"
        if self.limit_gb is not None and self.nbytes > self.limit_gb * _GB:
            raise ConfigError(f"{what}, the limit is {self.limit_gb:.3g} GB; {advice}, or raise the limit")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise ConfigError(
                f"{what}, {needed / _GB:.3g} GB of them still missing, and the disk has {free / _GB:.3g} GB left; "
                f"{advice}, or use another disk"
            )

    def _members(self, shard: int) -> range:
        return range(shard * self._per_shard, min((shard + 1) * self._per_shard, self.num_batches))

    def _path(self, shard: int) -> Path:
        return self.folder / f"{_SHARD}{shard:05d}.safetensors"

    def _is_complete(self, shard: int) -> bool:
        if not self._path(shard).exists():
            return False
        try:
            stored = {name: info.form for name, info in read_header(self._path(shard)).tensors.items()}
        except CheckpointError:
            return False
        specs = {name: (_NAMES[dtype], shape) for name, (dtype, shape) in self._specs.items()}
        return stored == {f"{index}.{name}": spec for index in self._members(shard) for name, spec in specs.items()}

    @torch.no_grad()
    def _run_trunk(self, batch: Batch) -> TrunkOutput:
        tokens, documents = batch.tokens.to(self.trunk.device), batch.documents.to(self.trunk.device)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            return self.trunk(tokens, documents=documents)

    def _compute_batch(self, index: int) -> dict[str, Tensor]:
        batch = self.batches.batch(index)
        hidden = self.compute(batch)
        values = {
            "tokens": batch.tokens,
            "documents": batch.documents,
            "head_input": hidden.head_input,
            "final_hidden": hidden.final_hidden,
        }
        values |= {} if batch.mask is None else {"mask": batch.mask}
        return {name: values[name].to("cpu", dtype) for name, (dtype, _) in self._specs.items()}

    def _read(self, index: int, name: str) -> Tensor:
        path = self._path(index // self._per_shard)
        try:
            stored: Tensor = self._open(path).get_tensor(f"{index}.{name}")
            return stored
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist: fill the cache before reading it") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; remove it and fill the cache again") from error

    def _state(self, stored: Tensor | None) -> Tensor | None:
        return None if stored is None else stored.to(self.trunk.device, self.trunk.dtype)

    def _sample_order(self, epoch: int) -> NDArray[np.int64]:
        return permutation(PCG64(SeedSequence([self.batches.seed, epoch])), self.num_batches)


def _tensor_specs(trunk: Trunk, batches: Batches, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The name, dtype and shape of each tensor of one batch."""
    shape = (batches.batch_size, batches.length)
    specs: dict[str, TensorSpec] = {"tokens": (torch.int32, shape), "documents": (torch.int32, shape)}
    if batches.corpus.mask is not None:
        specs["mask"] = (torch.bool, shape)
    specs["head_input"] = (dtype, (*shape, *trunk.hidden_shape))
    if trunk.stage != "post":  # otherwise final_hidden is head_input, scaled
        specs["final_hidden"] = (dtype, (*shape, trunk.config.hidden_size))
    return specs


def _total(count: int, ranks: Ranks) -> int:
    return int(ranks.total(torch.tensor(count, device=ranks.device)))


def _raw(value: Tensor) -> RawTensor:
    return RawTensor(_NAMES[value.dtype], tuple(value.shape), bytes_of(value))
