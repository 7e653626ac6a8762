"""The hidden states of a frozen trunk, kept on disk, so that an epoch of training its head does not run the trunk.

Shards of whole batches, each written whole or not at all; read through a memory map. A key beside them says which
trunk, text and batches they belong to.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.random import PCG64, SeedSequence
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nextn.checkpoints.stages import is_full, owned
from nextn.checkpoints.tensor_file import RawTensor, read_header, write_json, write_safetensors
from nextn.corpus.batches import Batch, Batches, shuffled
from nextn.distributed.parallel import ALONE, Ranks
from nextn.errors import CheckpointError, ConfigError
from nextn.training.imprint import imprint
from nextn.trunk import Hidden, Trunk
from nextn.words import changes

KEY, _SHARD = "cache.json", "hidden-"
_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
_GB = 1e9

Form = tuple[torch.dtype, tuple[int, ...]]


class HiddenCache:
    """Batches 0..num_batches-1 of `batches`, and what the trunk makes of them.

    dtype: of the stored states, None = the trunk's own. autocast: the trunk is run under bfloat16 autocast, as training
    does. read: makes the states of a batch, None = the trunk as it is. owner: what the trunk is told from others by,
    None = its `imprint`. limit_gb: the most it may take on disk, in 1e9 bytes. shard_bytes: about the size of a file,
    and of what is in memory while one is made. Raises ConfigError for a folder that holds the states of another trunk,
    text or batching.
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
        read: Callable[[Batch], Hidden] | None = None,
        owner: str | None = None,
        limit_gb: float | None = None,
        shard_bytes: int = 256 * 2**20,
    ) -> None:
        if num_batches < 1 or (limit_gb is not None and limit_gb <= 0):
            raise ConfigError(f"{num_batches=}, {limit_gb=}: expected num_batches >= 1 and a limit above 0")
        self.trunk, self.batches, self.num_batches, self.folder = trunk, batches, num_batches, folder
        self.dtype, self.autocast, self.limit_gb = dtype or trunk.dtype, autocast, limit_gb
        self.owner, self.read = owner or imprint(trunk.model), read or self._run
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(f"hidden states cannot be kept in {self.dtype}; use bfloat16 or float32")
        self._forms = _forms(trunk, batches, self.dtype)
        self._batch_bytes = sum(dtype.itemsize * prod(shape) for dtype, shape in self._forms.values())
        self._per_shard = max(1, shard_bytes // self._batch_bytes)
        self._key = self._identity()
        self._check_key()
        self._order = lru_cache(maxsize=2)(self._drawn)
        self._open = lru_cache(maxsize=16)(_opened)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, on disk; known before any is made."""
        return self.num_batches * self._batch_bytes

    def fill(
        self, should_stop: Callable[[], bool] = lambda: False, *, ranks: Ranks = ALONE
    ) -> Iterator[tuple[int, int]]:
        """Run the trunk for the shards that are not there, or not whole; each process makes every world-th one.

        Yields (batches done, all batches), at first and after each round of all processes. should_stop is asked before
        each; whole shards stay. Raises ConfigError before it starts if the limit or the free space is too small,
        CheckpointError where a file cannot be written, TrainingError where another process is lost.
        """
        lock = owned(self.folder, inside=True) if ranks.is_first else nullcontext()
        with ranks.guarded(), self._rest_named():
            self._check_room(_summed(len(self._todo(ranks)), ranks) * self._batch_bytes)
            with lock:
                yield from self._fill(should_stop, ranks)

    @contextmanager
    def _rest_named(self) -> Iterator[None]:
        """Where the disk is full, say how to go on."""
        try:
            yield
        except CheckpointError as error:
            if not is_full(error):
                raise
            stored = sum(path.stat().st_size for path in self.folder.glob(f"{_SHARD}*"))
            raise CheckpointError(
                f"{error} {max(0, self.nbytes - stored):,} of {self.nbytes:,} bytes of hidden states are missing; the "
                "files that are there are whole. With room for the rest, the same command goes on."
            ) from error

    def _fill(self, should_stop: Callable[[], bool], ranks: Ranks) -> Iterator[tuple[int, int]]:
        todo = self._todo(ranks)
        left = _summed(len(todo), ranks)
        if ranks.is_first:
            self._prepare()
        tensors: dict[str, RawTensor] = {}
        while True:
            yield self.num_batches - left, self.num_batches
            if not left or ranks.any(should_stop()):
                return
            # A process that has nothing left goes along: a pass of a trunk in parts is one of all that hold them.
            index = todo[0] if todo else 0
            made = self._made(index)
            if todo:
                tensors |= {f"{index}.{name}": _raw(value) for name, value in made.items()}
                members = self._members(index // self._per_shard)
                if todo.pop(0) == members[-1]:
                    write_safetensors(self._path(index // self._per_shard), tensors)
                    tensors = {}
            left = _summed(len(todo), ranks)

    def _todo(self, ranks: Ranks) -> list[int]:
        """Batches that this process has to make."""
        own = range(ranks.rank, -(-self.num_batches // self._per_shard), ranks.world)
        return [index for shard in own if not self._is_whole(shard) for index in self._members(shard)]

    def _prepare(self) -> None:
        for torn in self.folder.glob(f".{_SHARD}*.tmp"):  # of a process that was killed
            torn.unlink(missing_ok=True)
        write_json(self.folder / KEY, self._key)

    def batch(self, step: int, *, rank: int = 0, world: int = 1) -> tuple[Batch, Hidden]:
        """Rows rank::world of what step `step` trains on; the states are on the trunk's device, in its dtype.

        Each epoch has all batches once, in an order of its own; a pure function of the step. Raises ConfigError if the
        cache was not filled, CheckpointError for a damaged file.
        """
        epoch, place = divmod(step, self.num_batches)
        index = int(self._order(epoch)[place])
        stored = {name: self._read(index, name)[rank::world] for name in self._forms}
        eaten, normed = (self._state(stored.get(name)) for name in ("eaten", "normed"))
        batch = Batch(stored["tokens"].long(), stored["documents"], stored.get("mask"))
        assert eaten is not None
        return batch, Hidden(eaten * self.trunk.scale if normed is None else normed, eaten)

    def _identity(self) -> dict[str, object]:
        dealt = self.batches
        return {
            "trunk": self.owner,
            "text": dealt.corpus.fingerprint,
            "batch_size": dealt.batch_size,
            "length": dealt.length,
            "seed": dealt.seed,
            "pack": dealt.pack,
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
            stored = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a readable key: {error}; remove the folder, or name another") from error
        for part in ("trunk", "text"):
            if stored.get(part) != self._key[part]:
                raise ConfigError(
                    f"{self.folder} holds the hidden states of another {part}; remove the folder, or name another"
                )
        if told := changes(stored, self._key):
            raise ConfigError(f"{self.folder} was made with {told}; use the same, remove the folder, or name another")

    def _check_room(self, needed: int) -> None:
        what = f"{self.folder}: the hidden states of {self.num_batches} batches take {self.nbytes / _GB:.3g} GB"
        advice = "keep fewer batches, or shorter ones, or store bfloat16"
        if self.limit_gb is not None and self.nbytes > self.limit_gb * _GB:
            raise ConfigError(f"{what}, the limit is {self.limit_gb:.3g} GB; {advice}, or raise the limit")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be written: {error}; choose another folder") from error
        if needed > free:
            raise ConfigError(
                f"{what}, {needed / _GB:.3g} GB of them still to come, and the disk has {free / _GB:.3g} GB left; "
                f"{advice}, or use another disk"
            )

    def _members(self, shard: int) -> range:
        return range(shard * self._per_shard, min((shard + 1) * self._per_shard, self.num_batches))

    def _path(self, shard: int) -> Path:
        return self.folder / f"{_SHARD}{shard:05d}.safetensors"

    def _is_whole(self, shard: int) -> bool:
        if not self._path(shard).exists():
            return False
        try:
            found = {name: info.form for name, info in read_header(self._path(shard)).tensors.items()}
        except CheckpointError:
            return False
        forms = {name: (_NAMES[dtype], shape) for name, (dtype, shape) in self._forms.items()}
        return found == {f"{index}.{name}": form for index in self._members(shard) for name, form in forms.items()}

    @torch.no_grad()
    def _run(self, batch: Batch) -> Hidden:
        tokens, documents = batch.tokens.to(self.trunk.device), batch.documents.to(self.trunk.device)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            return self.trunk(tokens, documents=documents)

    def _made(self, index: int) -> dict[str, Tensor]:
        batch = self.batches.batch(index)
        hidden = self.read(batch)
        found = {"tokens": batch.tokens, "documents": batch.documents, "eaten": hidden.eaten, "normed": hidden.normed}
        found |= {} if batch.mask is None else {"mask": batch.mask}
        return {name: found[name].to("cpu", dtype) for name, (dtype, _) in self._forms.items()}

    def _read(self, index: int, name: str) -> Tensor:
        path = self._path(index // self._per_shard)
        try:
            return self._open(path).get_tensor(f"{index}.{name}")
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is not there: fill the cache before it is read") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; remove it and fill the cache again") from error

    def _state(self, stored: Tensor | None) -> Tensor | None:
        return None if stored is None else stored.to(self.trunk.device, self.trunk.dtype)

    def _drawn(self, epoch: int) -> NDArray[np.int64]:
        return shuffled(PCG64(SeedSequence([self.batches.seed, epoch])), self.num_batches)


def _forms(trunk: Trunk, batches: Batches, dtype: torch.dtype) -> dict[str, Form]:
    """name -> (dtype, shape) of one batch's tensors."""
    rows = (batches.batch_size, batches.length)
    forms: dict[str, Form] = {"tokens": (torch.int32, rows), "documents": (torch.int32, rows)}
    if batches.corpus.mask is not None:
        forms["mask"] = (torch.bool, rows)
    forms["eaten"] = (dtype, (*rows, *trunk.hidden_shape))
    if trunk.stage != "post":  # else the normed state is the eaten one, scaled
        forms["normed"] = (dtype, (*rows, trunk.config.hidden_size))
    return forms


def _summed(count: int, ranks: Ranks) -> int:
    return int(ranks.total(torch.tensor(count, device=ranks.device)))


def _opened(path: Path) -> safe_open:
    return safe_open(path, framework="pt")


def _raw(value: Tensor) -> RawTensor:
    return RawTensor(_NAMES[value.dtype], tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes())
