"""What an audit returns, and what its rules share: engine names, the commands they propose, and `same`."""

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import Provenance, head_fingerprint
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.errors import CheckpointError
from nextn.text_format import joined

# error: the head will not work in at least one engine. warning: it may not. note: worth knowing, not a fault.
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "transformers": "transformers"}
ROLES = {"embedding": "embedding", "output": "lm_head"}

HEAD_REQUIRED = "head-required"
CONVERT = "Convert the model again with llama.cpp's convert_hf_to_gguf.py, from a checkpoint that `nextn audit` passes."
SMALL_HEAD = 64 * 1024 * 1024  # bytes; a head of this size may be read completely
_BLOCK_BYTES, _NUM_BLOCKS = 4096, 8  # what `same` reads of each tensor


@dataclass(frozen=True)
class Finding:
    """One result of one rule; the field names are keys of `nextn audit --json`.

    Attributes:
        rule: Id, such as `head-absent`.
        severity: `error`: the head will not work in at least one engine; `warning`: it may not; `note`: no fault.
        place: The file, tensor or config field concerned.
        found: A sentence: what is wrong.
        valid: A sentence: what would be valid.
        fix: One command and nothing else, or sentences with commands in backticks.

    Example:
        >>> [finding.severity for finding in nextn.audit("tiny").findings]
        ['note']
    """

    rule: str
    severity: Severity
    place: str
    found: str
    valid: str
    fix: str


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        path: The checkpoint: folder, file or hub id.
        family: Name of the family by which it was audited; the model_type of a model without one.
        declared: Number of MTP layers that the config declares.
        is_default: Whether that is the family's default, of a config without the field.
        modules: Indices of the MTP layers that are stored.
        findings: Worst first.
        values_read: How much of the head's values was read: `all` float tensors of a local head, else `samples`;
            `none` without a head.
        bytes_read: Bytes of the values, where all were read.
        unchecked: Sentences about what no rule looked at.
        title: Published models of the family, in words.
        seconds: Wall time of the audit.

    Example:
        >>> nextn.audit("tiny").to_dict()["clean"]
        True
    """

    path: str
    family: str
    declared: int
    modules: tuple[int, ...]
    findings: tuple[Finding, ...] = field(default=())
    values_read: Literal["all", "samples", "none"] = "none"
    bytes_read: int = 0
    unchecked: tuple[str, ...] = ()
    title: str = ""
    is_default: bool = False
    seconds: float = field(default=0.0, compare=False)

    @property
    def clean(self) -> bool:
        """Whether there is nothing to fix; notes are allowed."""
        return all(finding.severity == "note" for finding in self.findings)

    def without(self, rules: Collection[str]) -> "AuditReport":
        """Return the report without the findings of these rules."""
        return replace(self, findings=tuple(finding for finding in self.findings if finding.rule not in rules))

    def requiring_head(self) -> "AuditReport":
        """Return the report with an error if the checkpoint neither declares nor stores a head."""
        if self.declared or self.modules or any(finding.rule == HEAD_REQUIRED for finding in self.findings):
            return self
        gguf = f"Run `nextn restore` on the checkpoint first. {CONVERT}"
        missing = Finding(
            HEAD_REQUIRED, "error", self.path, "No MTP head is declared, and none is stored.", "A head.",
            gguf if self.path.endswith(".gguf") else f"nextn restore {shlex.quote(self.path)} --from BASE",
        )  # fmt: skip
        return replace(self, findings=(missing, *self.findings))

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `nextn audit --json`."""
        return asdict(self) | {"clean": self.clean}


def engines(names: Iterable[str]) -> str:
    """Join engine names, spelled as their projects spell them."""
    return joined(ENGINES[name] for name in names)


def verb(names: Sequence[str], stem: str) -> str:
    """Return engine names with a verb that agrees in number: `vLLM reads`, `vLLM and SGLang read`."""
    return f"{engines(names)} {stem}{'s' if len(names) == 1 else ''}"


def as_sentences(fix: str) -> str:
    """Return a finding's fix as sentences, also if it is one command."""
    return f"Run `{fix}`." if fix.startswith("nextn ") else fix


def restore(inventory: Inventory, *, force: bool = False, own: bool = False) -> str:
    """Return the command that restores the head from the base model.

    force: it replaces a complete head, by that of another model than the recorded one, if that has this head. own: from
    the checkpoint itself, so that the head keeps its values.
    """
    base = "BASE" if force and is_small(inventory) and source_of_head(inventory) else None
    return inventory.restore_command(force=force, base=_path(inventory) if own else base)


def source_of_head(inventory: Inventory) -> str:
    """Return the recorded model that has this very head; "" if none is known."""
    try:
        record = Provenance.read(inventory.checkpoint)
    except CheckpointError:  # `head_stale` reports it
        return ""
    is_from = record is not None and record.made_by in ("restore", "convert") and is_recorded(inventory, record)
    return record.source if record is not None and is_from else ""


def is_recorded(inventory: Inventory, record: Provenance) -> bool:
    """Whether the head is the one of the record, or too large to be read for that."""
    return not is_small(inventory) or record.head == head_fingerprint(inventory)


def is_small(inventory: Inventory) -> bool:
    """Whether the head can be read completely at little cost: local files, at most SMALL_HEAD bytes."""
    infos = [inventory.info(each) for each in inventory.stored]
    local = all(isinstance(inventory.checkpoint.sources[info.file], LocalFile) for info in infos)
    return local and sum(info.nbytes for info in infos) <= SMALL_HEAD


def aliases(inventory: Inventory, engine: str) -> str:
    """Return the command that copies the trunk's embedding and lm_head into the modules, as `engine` needs them."""
    return f"nextn restore {_path(inventory)} --add-aliases {engine}"


def convert(inventory: Inventory, option: str) -> str:
    """Return the `nextn convert` command with `option`."""
    return f"nextn convert {_path(inventory)} OUT {option}"


def against_base(inventory: Inventory) -> str:
    """Return the command that compares the head's acceptance with that of the base model."""
    return f"nextn measure {_path(inventory)} --against {inventory.base_word}"


def _path(inventory: Inventory) -> str:
    return shlex.quote(inventory.checkpoint.path)


def same(checkpoint: Checkpoint, a: str | TensorInfo, b: str | TensorInfo) -> bool:
    """Compare two tensors by dtype, shape and 8 blocks of 4 KiB spread evenly from the first to the last byte.

    Tensors are given by name, or as a file has them. Those of up to 32 KiB are compared completely; in larger ones a
    difference between the blocks goes unnoticed.
    """
    infos = [each if isinstance(each, TensorInfo) else checkpoint.info(each) for each in (a, b)]
    if infos[0].form != infos[1].form:
        return False
    offsets = _offsets(infos[0].nbytes)
    blocks = checkpoint.read_blocks([(info, offset) for info in infos for offset in offsets], _BLOCK_BYTES)
    return blocks[: len(offsets)] == blocks[len(offsets) :]


def _offsets(nbytes: int) -> list[int]:
    if nbytes <= _NUM_BLOCKS * _BLOCK_BYTES:
        return list(range(0, nbytes, _BLOCK_BYTES))
    return [(nbytes - _BLOCK_BYTES) * index // (_NUM_BLOCKS - 1) for index in range(_NUM_BLOCKS)]
