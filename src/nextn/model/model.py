"""A trunk with its head and tokenizer: build, load strictly, save in the family's published layout."""

import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nextn.checkpoint.checkpoint import Checkpoint, as_checkpoint, write_index
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import is_foreign, open_head, trained_length, trunk_family
from nextn.checkpoint.quantized_weights import fp8_section, quantize_tensors
from nextn.checkpoint.safetensors_file import read_header, write_json, write_safetensors, write_tensors
from nextn.checkpoint.snapshot import folder_of, in_parts, on_disk
from nextn.checkpoint.staging_folder import atomic_folder
from nextn.checkpoint.tensors import TensorReader
from nextn.devices import resolve_device
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table import Family, by_config, find, generic
from nextn.model.deferred_init import DeferredInit
from nextn.model.head import Head
from nextn.model.load_head import cast, head_tensors, load_tensors, meta_head
from nextn.model.load_trunk import check_runs, deferred_trunk, load_trunk, streamed_trunk
from nextn.model.packed_experts import dequantize, packed_parts
from nextn.model.text_interface import tokenizer_in
from nextn.model.trunk import Trunk
from nextn.text_format import counted, some


@dataclass
class Model:
    """A trunk with its head and tokenizer.

    Attributes:
        trunk: The target model.
        head: The MTP layers; None if it was loaded without.
        family: The published convention that the head follows.
        tokenizer: None if the checkpoint has none.
        notes: Remarks of loading, such as a stored copy that differs from the trunk's tensor.
        trained_length: Tokens of the sequences that the head was trained on; None if unknown.

    Example:
        >>> model = nextn.load("tiny")
        >>> model.family.name, model.trunk.vocab_size, model.trained_length
        ('qwen3_5', 264, 256)
    """

    trunk: Trunk
    head: Head | None
    family: Family = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = None
    notes: tuple[str, ...] = ()
    trained_length: int | None = None
    # What computes parameters that are on the meta device, for processes that each keep a part of every parameter.
    deferred: DeferredInit | None = field(default=None, repr=False, compare=False)
    # Backends by name, filled and renewed by `runtime.backend.backend_for`.
    backends: dict[str, object] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        config: Mapping[str, object],
        *,
        num_modules: int = 1,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "Model":
        """Build a freshly initialized model from a transformers config, a dict with `model_type`."""
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"config is {config!r:.80}; expected a dict with `model_type` (`nextn.load` reads a folder)"
            )
        family = _check_runs(by_config(config))
        if family.max_modules is not None and num_modules > family.max_modules:
            raise ConfigError(f"num_modules = {num_modules}; {family.name}: expected 1 to {family.max_modules}")
        trunk = Trunk.from_config(config, stage=family.hidden, dtype=dtype)
        return cls(trunk, Head(family, trunk, num_modules=num_modules), family, tokenizer)

    @classmethod
    def load(
        cls,
        source: str | Path | Checkpoint,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        need_head: bool = True,
        skip_head: bool = False,
        stream: bool = False,
        defer: bool = False,
        head: str | Path | None = None,
    ) -> "Model":
        """Load a model.

        Args:
            source: A checkpoint folder, a .safetensors file next to its config.json, a hub id ("org/name", or
                "org/name@revision"), of which only the needed files are downloaded, `tiny`, or an open checkpoint.
            dtype: None: as stored. Of weights in fp8 and of 4 and 8 bits, linear layers keep the codes, which the
                native backend decodes with, see `dequantize`.
            device: Of trunk and head, see `resolve_device`.
            need_head: If False, accept a checkpoint without a head.
            skip_head: Load the trunk only, whether or not there is a head.
            stream: Do not load the trunk's decoder layers; the trunk is a `StreamedTrunk`, which reads each of them
                when it runs texts. The files must stay as they are. Of a hub id, tensors are downloaded when they are
                needed, and forgotten after use.
            defer: Do not load the trunk's decoder layers yet; the trunk is a `DeferredTrunk`, whose files must stay.
            head: Use the head of this checkpoint instead: a folder, a .safetensors file next to its config.json, or a
                hub id.

        Returns:
            The model, whose tensors are on the device.

        Raises:
            CheckpointError: listing every head tensor that is missing, unexpected, mis-shaped, stored twice, not
                readable as numbers or non-finite.
            FamilyError: for a model type that is not supported.
            ConfigError: for a device that is not available.

        Example:
            >>> model = nextn.load("tiny")  # the checkpoint that comes with the package
            >>> nextn.load("tiny", skip_head=True).head is None
            True
        """
        torch_device = resolve_device(device)
        checkpoint = as_checkpoint(source)
        inventory = _inventory(checkpoint, need_head=need_head and not skip_head and head is None)
        if inventory.is_head_alone and not checkpoint.pickled:
            raise CheckpointError(f"{checkpoint.path}: a head alone; give its trunk, and this head with --head")
        beside = None if head is None else open_head(head, inventory)
        with_head, family = not skip_head and bool(inventory.declared and inventory.stored), inventory.family
        if stream:
            inventory = in_parts(inventory)
        inventory = on_disk(inventory)
        folder = folder_of(inventory.checkpoint)
        with ExitStack() as files:
            weights = TensorReader(inventory)
            if not stream and not defer:
                files.enter_context(weights)
            trunk, notes = (streamed_trunk if stream else deferred_trunk if defer else load_trunk)(weights, dtype)
            loaded: Head | None = None
            of_trunk = weights
            if beside is not None:
                family = beside.family
                trunk.stage = family.hidden
                if is_foreign(beside, inventory):
                    notes.append(f"{beside.checkpoint.path}: its head was trained on another trunk; it may accept less")
                weights = files.enter_context(TensorReader(beside))
            if beside is not None or with_head:
                loaded = meta_head(weights.inventory, trunk)
                weights.download(weights.inventory.stored.values())
                notes += load_tensors(loaded, weights, split_experts=stream, keep_codes=not stream)
            if any(packed_parts(*filter(None, (trunk, loaded)))):
                files.pop_all()  # the layers read them
        length = trained_length(beside or inventory)
        tokenizer = tokenizer_in(folder, trunk.vocab_size, notes)
        model = cls(trunk, loaded, family, tokenizer, tuple(notes), length).to(torch_device)
        check_runs(of_trunk, trunk)
        return model

    def length_note(self, num_positions: int, *, what: str = "texts reach") -> str | None:
        """Return a note if texts of `num_positions` tokens are longer than what the head was trained on, else None."""
        if self.trained_length is None or num_positions <= self.trained_length:
            return None
        return (
            f"{what} {num_positions} tokens, and nextn.json says that training saw sequences of "
            f"{self.trained_length}: beyond those, fewer drafts may be accepted, and the text may be poor if the trunk "
            "was trained with the head; use shorter prompts or fewer new tokens, or train on longer sequences (length)"
        )

    def to(self, device: torch.device) -> "Model":
        """Move trunk and head to the device; return this model. Quantized weights stay so on CPUs only."""
        if device.type != "cpu":
            self.dequantize()
        self.trunk.to(device)
        if self.head is not None:
            self.head.to(device)
        return self

    def dequantize(self) -> "Model":
        """Replace layers that keep the codes of a quantized checkpoint by linear layers; return this model.

        Needed before the trunk or the head is trained, and much faster for repeated passes in torch, at the memory of
        the unquantized weights.
        """
        for part in filter(None, (self.trunk, self.head)):
            dequantize(part)
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
        """Write a checkpoint folder in the family's published layout atomically; an old one is replaced.

        Args:
            folder: Where to.
            dtype: Cast to it while writing; None: as is.
            fp8: Quantize what the family's fp8 release does, in blocks with scales.
            copies: Store embedding and lm_head again inside each MTP layer where the family does.
            extra: Called with the staging folder to write more files.

        Raises:
            CheckpointError: if the folder cannot be written.
            FamilyError: for fp8 where the family publishes none.
        """
        if fp8 and self.family.fp8 is None:
            raise FamilyError(f"{self.family.name} has no published fp8 layout; save it in bfloat16")
        with atomic_folder(Path(folder)) as staging:
            self._write(staging, dtype, copies)
            if fp8:
                _quantize(staging, self.family, self.trunk.num_layers)
            if extra is not None:
                extra(staging)

    def _write(self, folder: Path, dtype: torch.dtype | None, copies: bool) -> None:
        if self.family.separate:
            raise FamilyError(f"{self.family.title}: it is stored beside the trunk, not with it; see `write_head`")
        model = self.trunk.model
        # Cast tensor by tensor: the model in memory is not changed.
        state: dict[str, Tensor] = {}
        # By memory address: tied tensors stay tied and are stored once.
        casts: dict[tuple[int, torch.Size], Tensor] = {}
        for name, value in model.state_dict().items():
            target = None if self.trunk.keeps_fp32(name) else dtype
            state[name] = casts.setdefault((value.data_ptr(), value.shape), cast(value, target))
        model.save_pretrained(folder, state_dict=state)
        for shard in folder.glob("*.safetensors"):  # which the library lets only the owner read
            shard.chmod((folder / "config.json").stat().st_mode)
        if self.family.trunk_renames:
            _rename(folder, self.family.trunk_name)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        if self.head is not None:
            wrapper = self.family.wrapper(Checkpoint.open(folder).tensors)
            _add_shard(folder, head_tensors(self.head, copies, dtype=dtype, wrapper=wrapper))
        config: Mapping[str, object] = Checkpoint.open(folder).config
        if self.head is not None or self.family.counted_in(config):
            config = self.family.with_count(config, self.head.num_modules if self.head else 0)
        write_json(folder / "config.json", _with_dtype(config, dtype or model.dtype))


load = Model.load


def load_head(
    source: str | Path | Checkpoint, model: PreTrainedModel | Trunk, *, trunk_class: type[Trunk] = Trunk
) -> Head:
    """Load the head of checkpoint `source` onto a trunk, or one of class `trunk_class` around `model`, in its dtype.

    Args:
        source: A checkpoint folder, .safetensors file, hub id, `tiny` or an open checkpoint.
        model: A transformers model, or a trunk.
        trunk_class: Of the trunk that is made around a transformers model, such as `DetachedTrunk`.

    Returns:
        The head, in the model's dtype and on its device.

    Raises:
        CheckpointError: The head is incomplete, damaged or does not fit the model.
        FamilyError: The model type is not supported.

    Example:
        >>> model = nextn.load("tiny").trunk.model  # a transformers model
        >>> nextn.load_head("tiny", model).num_modules
        1
    """
    inventory = _inventory(as_checkpoint(source), need_head=True)
    trunk = model if isinstance(model, Trunk) else trunk_class(model, stage=inventory.family.hidden)
    return read_head(on_disk(inventory), trunk)


def read_head(inventory: Inventory, trunk: Trunk) -> Head:
    """Load the head of a checkpoint with local or partly downloaded files onto a trunk, as `load_head` does."""
    with TensorReader(inventory) as weights:
        head = meta_head(weights.inventory, trunk)
        weights.download(weights.inventory.stored.values())
        load_tensors(head, weights)
    return head


def live_trunk(
    model: PreTrainedModel, *, trunk_class: type[Trunk] = Trunk, generic_too: bool = False
) -> tuple[Family, Trunk]:
    """Return the family of a model in memory and a trunk around it. Raises FamilyError for an unsupported model.

    generic_too: A model without a family gets the generic one, whose head is of the model's own layers.
    """
    config = model.config.to_dict()
    family = _check_runs(generic(config) if generic_too and find(config) is None else by_config(config))
    return family, trunk_class(model, stage=family.hidden)


def _inventory(checkpoint: Checkpoint, *, need_head: bool) -> Inventory:
    inventory = Inventory.of(checkpoint, family=_runnable(checkpoint, need_head=need_head))
    if need_head and not (inventory.declared and inventory.stored):
        inventory.refuse_draft_model()
        raise CheckpointError(_missing_head_message(inventory))
    return inventory


def _with_dtype(config: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Set dtype in a config, at the top level and in every section that has one."""
    parts = {
        key: _with_dtype(part, dtype) for key, part in config.items() if isinstance(part, dict) and "dtype" in part
    }
    return {**config, **parts, "dtype": str(dtype).removeprefix("torch.")}


def _runnable(checkpoint: Checkpoint, *, need_head: bool) -> Family:
    if not checkpoint.config:
        message = f"{checkpoint.path}: config.json is absent or empty. Put the model's own beside the weights."
        raise CheckpointError(message)
    family = by_config(checkpoint.config) if need_head else trunk_family(checkpoint)
    if family.separate:
        raise FamilyError(f"{checkpoint.path}: a head alone; give its trunk, and this head with --head")
    return _check_runs(family)


def _check_runs(family: Family) -> Family:
    if not family.runs:
        raise FamilyError(
            f"{family.title} ({family.name}) cannot be run: {family.cannot_run}. "
            "Its files can be audited, restored and converted."
        )
    return family


def _missing_head_message(inventory: Inventory) -> str:
    from nextn.audit_rules import fixes  # here, as it imports all rules

    path, family, count = inventory.checkpoint.path, inventory.family, inventory.declared
    example = inventory.published("0.token_norm.weight")
    declared = f"config.json declares {counted(count, 'MTP layer') if count else f'no {family.count_fields[0]}'}"
    if count and not family.counted_in(inventory.checkpoint.config):
        declared = f"config.json has no {family.count_fields[0]}, whose default is {count}"
    stored = "present" if inventory.stored else "absent"
    other = f"; {inventory.unrecognized[0]} and others are not names of this family" if inventory.unrecognized else ""
    if inventory.stored:
        fix = inventory.declaration(len(inventory.modules))
    elif missing := [problem.file for problem in inventory.checkpoint.problems if problem.kind == "missing_file"]:
        listed = any(family.canonical(name, inventory.num_layers) for name in inventory.checkpoint.index or {})
        command = f"`{inventory.restore_command()}`"
        more = f"; then run {command}" if not listed else f", or run {command}" * (not inventory.trunk_lost)
        fix = f"Download {some(missing)}, which the index names, again{more};"
    elif not (fix := fixes(inventory, unless="head-absent")):
        fix = (
            f"`{inventory.restore_command()}` restores the head of the model that this one was made from; `nextn "
            "train --freeze-trunk --init-head` trains one;"
        )
    return (
        f"{path}: no MTP head ({family.name}): {declared}, and tensors like {example} are {stored}{other}. "
        f"`nextn audit {shlex.quote(path)}` shows details. {fix} num_speculative_tokens = 0 (-k 0) decodes without one"
    )


def _quantize(folder: Path, family: Family, num_layers: int) -> None:
    """Rewrite every shard with fp8 weights and their scales, and the index and the config with them."""
    plain = set()
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = quantize_tensors(load_file(shard), family, num_layers)
        write_tensors(shard, tensors, {"format": "pt"})
        matrices = [name for name, value in tensors.items() if value.ndim > 1 and value.itemsize > 1]
        plain |= {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}
    _index(folder)
    write_json(
        folder / "config.json", Checkpoint.open(folder).config | {"quantization_config": fp8_section(plain, family)}
    )


def _rename(folder: Path, name_of: Callable[[str], str]) -> None:
    """Rename every tensor of the folder by `name_of`, without changing its bytes."""
    checkpoint = Checkpoint.open(folder)
    for file in checkpoint.files:
        names = [name for name, info in checkpoint.tensors.items() if info.file == file]
        raw = {name_of(name): checkpoint.raw(name) for name in names}
        write_safetensors(folder / file, raw, metadata={"format": "pt"})
    _index(folder)


def _add_shard(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the head as a separate last shard and index all shards."""
    shards = sorted(folder.glob("*.safetensors"))
    total = len(shards) + 1
    names = [f"model-{index:05d}-of-{total:05d}.safetensors" for index in range(1, total + 1)]
    for shard, name in zip(shards, names, strict=False):
        shard.rename(folder / name)
    write_tensors(folder / names[-1], dict(tensors), {"format": "pt"})
    _index(folder)


def _index(folder: Path) -> None:
    infos = [info for path in sorted(folder.glob("*.safetensors")) for info in read_header(path).tensors.values()]
    write_index(folder, {info.name: info.file for info in infos}, sum(info.nbytes for info in infos))
