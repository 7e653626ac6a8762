"""A trunk, its head and its tokenizer as one thing: build, load strictly, save in the family's published layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from nextn.checkpoints.checkpoint import OTHER_LIMITS, Checkpoint, write_index
from nextn.checkpoints.fp8 import pack, section
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.snapshot import folder_of, on_disk
from nextn.checkpoints.stages import atomic_folder
from nextn.checkpoints.tensor_file import read_header, write_json, write_safetensors
from nextn.checkpoints.weights import Weights
from nextn.devices import resolve_device
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.families import Family, by_config, find, headless
from nextn.fast.choose import Engine, engine
from nextn.fast.locks import LOCK
from nextn.filling import cast, empty_head, fill, head_tensors, trunk_state
from nextn.head import Head
from nextn.trunk import Trunk

_TRIAL = "A text, 1 \u00e9"


@dataclass
class Model:
    """notes: what loading found worth saying that is no error, such as a stored copy that differs from the trunk's."""

    trunk: Trunk
    head: Head | None
    family: Family
    tokenizer: PreTrainedTokenizerBase | None = None
    notes: tuple[str, ...] = ()
    _engines: dict[str, tuple[object, Engine]] = field(default_factory=dict, repr=False, compare=False)

    def engine(self, path: str = "auto") -> Engine:
        """What this model decodes on, see `fast.choose.engine`; made once, and anew when weights changed or moved.

        Raises ConfigError for a path that is unknown, or `fast` where there is none.
        """
        parts = [self.trunk, *([] if self.head is None else [self.head])]
        weights = [weight for part in parts for weight in part.parameters()]
        state: list[object] = [(id(weight), weight.device, weight._version) for weight in weights]
        state.append(None if self.head is None else (self.head.shortlist, self.head.exact))
        known = self._engines.get(path)
        if known is None or known[0] != state:
            with LOCK:  # another thread may have made it meanwhile
                known = self._engines.get(path)
                if known is None or known[0] != state:
                    known = self._engines[path] = (state, engine(self.trunk, self.head, path=path))
        return known[1]

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
        family = _computed(by_config(config))
        if family.max_modules is not None and num_modules > family.max_modules:
            raise ConfigError(f"num_modules = {num_modules}; {family.name} has room for {family.max_modules}")
        trunk = Trunk.from_config(config, stage=family.hidden, dtype=dtype)
        return cls(trunk, Head(family, trunk, num_modules=num_modules), family, tokenizer)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        offline: bool = False,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        need_head: bool = True,
        skip_head: bool = False,
    ) -> "Model":
        """A checkpoint folder, a .safetensors file with its config.json beside it, or a hub id.

        revision, cache_dir and offline are for hub ids; only the files that are needed are fetched. dtype None = as
        stored; fp8 is multiplied by its scales. device: of trunk and head, see `resolve_device`. need_head=False
        takes a checkpoint without a head; skip_head loads the trunk alone, whatever there is of a head. Raises
        CheckpointError that lists every head tensor that is missing, unexpected, mis-shaped, stored twice, not to be
        read as numbers or non-finite; FamilyError for a model type without a row; ConfigError for a device that is not
        there.
        """
        place = resolve_device(device)
        checkpoint = Checkpoint.open(source, revision=revision, cache_dir=cache_dir, offline=offline)
        inventory = _inventory(checkpoint, need_head=need_head and not skip_head)
        with_head, family = not skip_head and bool(inventory.promised and inventory.stored), inventory.family
        inventory = on_disk(inventory, revision=revision, cache_dir=cache_dir, offline=offline)
        folder = folder_of(inventory.checkpoint)
        with Weights(inventory.checkpoint, family) as weights:
            trunk, notes = _load_trunk(inventory, weights, dtype)
            head: Head | None = None
            if with_head:
                head = empty_head(inventory, trunk)
                notes += fill(head, inventory, weights)
        return cls(trunk, head, family, _tokenizer(folder, trunk), tuple(notes)).to(place)

    def to(self, device: torch.device) -> "Model":
        """This model, with trunk and head on the device."""
        self.trunk.to(device)
        if self.head is not None:
            self.head.to(device)
        return self

    def save(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        fp8: bool = False,
        copies: bool = True,
        extra: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a checkpoint folder in the family's published layout, whole or not at all; an old one is replaced.

        dtype: cast to it on the way out (None = as is). fp8: quantise what the family's fp8 release does, in blocks
        with scales. copies: store the shared embedding and output head again inside each module where the family does.
        extra(folder): writes more files, before the folder gets its name. Raises CheckpointError if the folder cannot
        be written, FamilyError for fp8 where the family publishes none.
        """
        if fp8 and self.family.fp8 is None:
            raise FamilyError(f"{self.family.name} has no published fp8 layout; save it in bfloat16")
        with atomic_folder(Path(folder)) as staging:
            self._write(staging, dtype, copies)
            if fp8:
                _quantise(staging, self.family, self.trunk.num_layers)
            if extra is not None:
                extra(staging)

    def _write(self, folder: Path, dtype: torch.dtype | None, copies: bool) -> None:
        model = self.trunk.model
        # Cast tensor by tensor: the model in memory stays as it is.
        state: dict[str, Tensor] = {}
        # By place in memory: what is tied stays so, and is stored once.
        casts: dict[tuple[int, torch.Size], Tensor] = {}
        for name, value in model.state_dict().items():
            wanted = None if self.trunk.keeps_fp32(name) else dtype
            state[name] = casts.setdefault((value.data_ptr(), value.shape), cast(value, wanted))
        model.save_pretrained(folder, state_dict=state)
        if self.family.saved:
            _rename(folder, self.family.trunk_name)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        if self.head is not None:
            wrapper = self.family.wrapper(Checkpoint.open(folder).tensors)
            _add_shard(folder, head_tensors(self.head, copies, dtype=dtype, wrapper=wrapper))
        config = self.family.with_count(Checkpoint.open(folder).config, self.head.num_modules if self.head else 0)
        write_json(folder / "config.json", _with_dtype(config, dtype or model.dtype))


load = Model.load


def load_head(
    source: str | Path, model: PreTrainedModel, *, revision: str | None = None, made: type[Trunk] = Trunk
) -> Head:
    """The head of the checkpoint `source`, strictly, on a trunk that is `made` of `model`, in the model's dtype.

    Raises CheckpointError where the head is not whole or does not fit the model.
    """
    inventory = _inventory(Checkpoint.open(source, revision=revision), need_head=True)
    inventory = on_disk(inventory, revision=revision)
    with Weights(inventory.checkpoint, inventory.family) as weights:
        head = empty_head(inventory, made(model, stage=inventory.family.hidden))
        fill(head, inventory, weights)
    return head


def live_trunk(model: PreTrainedModel, *, made: type[Trunk] = Trunk) -> tuple[Family, Trunk]:
    """The family of a model in memory, and a trunk that is `made` of it. Raises FamilyError for one without a row."""
    family = _computed(by_config(model.config.to_dict()))
    return family, made(model, stage=family.hidden)


def _inventory(checkpoint: Checkpoint, *, need_head: bool) -> Inventory:
    inventory = Inventory.of(checkpoint, family=_runnable(checkpoint, need_head=need_head))
    if need_head and not (inventory.promised and inventory.stored):
        raise CheckpointError(_absent(inventory))
    return inventory


def _load_trunk(inventory: Inventory, weights: Weights, dtype: torch.dtype | None) -> tuple[Trunk, list[str]]:
    checkpoint, family = inventory.checkpoint, inventory.family
    state, notes = trunk_state(inventory, weights)
    # fp8 is not left to transformers: it needs accelerate, and takes a last block that is cut off for smaller blocks.
    packed = weights.packed(state) if weights.method else None
    folder, given = folder_of(checkpoint), None if packed else state
    try:
        trunk = Trunk.from_pretrained(folder, state=given, stage=family.hidden, dtype=dtype)
    except CheckpointError as error:
        reasons = [problem.message for problem in checkpoint.problems if problem.kind == "missing_file"]
        if packed:
            reasons.append(
                f"its quantisation is {weights.method} ({packed} and others): install what transformers needs for it, "
                f"or load the model that was quantised, in bf16 or fp8; `nextn audit {checkpoint.path}` and "
                "`nextn restore` work on it as it is"
            )
        raise CheckpointError(". ".join([str(error), *reasons])) from error
    _check_finite(checkpoint.path, trunk.model.state_dict())
    kind, whole = trunk.model.config.model_type, checkpoint.config.get("model_type")
    if kind != whole:
        notes.append(f"the text model ({kind}) of {whole} alone is loaded, and would be saved")
    return trunk, notes


def _with_dtype(config: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """The config that says dtype, at its top and wherever a part of it says one."""
    parts = {
        key: _with_dtype(part, dtype) for key, part in config.items() if isinstance(part, dict) and "dtype" in part
    }
    return {**config, **parts, "dtype": str(dtype).removeprefix("torch.")}


def _check_finite(path: str, state: Mapping[str, Tensor]) -> None:
    bad = [name for name, value in state.items() if value.is_floating_point() and not bool(torch.isfinite(value).all())]
    if bad:
        raise CheckpointError(f"{path}: {len(bad)} trunk tensors hold NaN or Inf: {', '.join(bad[:8])}")


def _runnable(checkpoint: Checkpoint, *, need_head: bool) -> Family:
    if not checkpoint.config:
        raise CheckpointError(
            f"{checkpoint.path}: config.json is absent or empty. Put the model's own beside the weights."
        )
    family = find(checkpoint.config)
    if family is None and not need_head:
        return headless(checkpoint.config)
    return _computed(family or by_config(checkpoint.config))


def _computed(family: Family) -> Family:
    if not family.runs:
        raise FamilyError(family.cannot_run)
    return family


def _absent(inventory: Inventory) -> str:
    path, family, count = inventory.checkpoint.path, inventory.family, inventory.promised
    where = inventory.published("0.token_norm.weight")
    said = f"config.json promises {count} module(s)" if count else f"config.json has no {family.count_fields[0]}"
    found = "present" if inventory.stored else "absent"
    other = f"; {inventory.strangers[0]} and others are no names of this family" if inventory.strangers else ""
    return (
        f"{path}: no MTP head ({family.name}): {said}, and tensors like {where} are {found}{other}. "
        f"`nextn audit {path}` says more; `nextn restore {path} --from BASE` puts back the head of the model that this "
        "one was made from; `nextn train --freeze-trunk --init-head` trains one; drafts = 0 decodes without one"
    )


def _quantise(folder: Path, family: Family, num_layers: int) -> None:
    """Rewrite every shard with fp8 weights and their scales, and the index and the config with them."""
    plain = set()
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = pack(load_file(shard), family, num_layers)
        save_file(tensors, folder / "part", metadata={"format": "pt"})
        (folder / "part").replace(shard)  # not in place: what was loaded is still mapped
        matrices = [name for name, value in tensors.items() if value.ndim > 1 and value.itemsize > 1]
        plain |= {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}
    _index(folder)
    write_json(folder / "config.json", Checkpoint.open(folder).config | {"quantization_config": section(plain, family)})


def _rename(folder: Path, name_of: Callable[[str], str]) -> None:
    """Give every tensor of the folder the name that `name_of` says, bytes as they are."""
    checkpoint = Checkpoint.open(folder)
    for file in checkpoint.files:
        names = [name for name, info in checkpoint.tensors.items() if info.file == file]
        raw = {name_of(name): checkpoint.raw(name) for name in names}
        write_safetensors(folder / file, raw, metadata={"format": "pt"})
    _index(folder)


def _add_shard(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put the head in a last shard of its own and index all shards."""
    shards = sorted(folder.glob("*.safetensors"))
    total = len(shards) + 1
    names = [f"model-{index:05d}-of-{total:05d}.safetensors" for index in range(1, total + 1)]
    for shard, name in zip(shards, names, strict=False):
        shard.rename(folder / name)
    save_file(dict(tensors), folder / names[-1], metadata={"format": "pt"})
    _index(folder)


def _index(folder: Path) -> None:
    infos = [info for path in sorted(folder.glob("*.safetensors")) for info in read_header(path).tensors.values()]
    write_index(folder, {info.name: info.file for info in infos}, sum(info.nbytes for info in infos))


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, tried on a short text. Raises ConfigError where there is none that can be used."""
    try:
        for path in sorted(folder.glob("*token*.json")):
            OTHER_LIMITS.check_file(path)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.decode(tokenizer(_TRIAL)["input_ids"])
    except BaseException as error:
        # tokenizers raises nothing narrower than Exception, and a panic of its Rust code is not even that.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"{folder}: no tokenizer that can be read: {reason}; give a folder with tokenizer.json and "
            "tokenizer_config.json"
        ) from error
    return tokenizer


def _tokenizer(folder: Path, trunk: Trunk) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    tokenizer = read_tokenizer(folder)
    if len(tokenizer) > trunk.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {trunk.vocab_size}: "
            "they do not belong together"
        )
    return tokenizer
