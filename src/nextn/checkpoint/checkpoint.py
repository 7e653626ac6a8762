"""Checkpoints as bytes: the headers of all files, the index, config.json, and tensors read by range.

Knows neither torch nor heads. A file with an invalid header raises CheckpointError; disagreements between index and
files are only listed in `Checkpoint.problems`, so that an audit can show them all.
"""

import glob
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PureWindowsPath
from reprlib import repr as brief
from typing import Literal

from huggingface_hub import is_offline_mode

from nextn.bounded_json import JsonLimits, check_numbers, parse_json
from nextn.checkpoint.demo_model import SHORT_NAME, demo_model
from nextn.checkpoint.draft_models import standalone
from nextn.checkpoint.other_objects import (
    PICKLES,
    adapter_sentence,
    engine_sentence,
    folder_names,
    inner_models,
    lower_case_sentence,
    pickle_sentence,
    source_sentence,
    training_sentence,
)
from nextn.checkpoint.remote import (
    ByteSource,
    LocalFile,
    cached_folder,
    folder_files,
    map_reads,
    readable,
    repo_files,
    split_hub_id,
)
from nextn.checkpoint.safetensors_file import (
    MAX_TENSORS,
    Header,
    HeaderBudget,
    RawTensor,
    TensorInfo,
    placeholder,
    read_header,
    write_json,
)
from nextn.checkpoint.trained_heads import SIDE_HEAD, RenamedHead, renamed_head, side_head
from nextn.errors import CheckpointError
from nextn.text_format import some

SHIPPED = Path(__file__).parents[1] / "assets" / "tiny"  # the checkpoint in the package, with held-out prompts
SHIPPED_HEAD = SHIPPED.with_name("smollm2-head")  # the head in the package, for `edit.published_model`, with prompts
_NAMES = {"tiny": SHIPPED, SHIPPED_HEAD.name: SHIPPED_HEAD}
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")  # of which a tokenizer has one at least
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The largest published files: configs of 1 MB (lists of unquantized modules), an index of 30 MB, tokenizers of 33 MB
# with 262,144 tokens and 515,000 merges.
CONFIG_LIMITS = JsonLimits(16 * 1024 * 1024, 500_000)
INDEX_LIMITS = JsonLimits(128 * 1024 * 1024, MAX_TENSORS + 1_000)
OTHER_LIMITS = JsonLimits(64 * 1024 * 1024, 4_000_000)
CHUNK = 32 * 1024 * 1024
SAMPLE = 4096


def index_json(weight_map: Mapping[str, str], total_size: int) -> dict[str, object]:
    """Return the content of an index file; `total_size` is the bytes of all tensors."""
    return {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write `index_json` to its file."""
    write_json(folder / INDEX, index_json(weight_map, total_size))


def shipped_path(source: str | Path) -> str | Path:
    """Return the path of what the package or `nextn demo` has under this name, unless a file has it; else the source.

    Raises CheckpointError if the demo has not prepared its model.
    """
    name = str(source)
    if name not in {SHORT_NAME, *_NAMES} or Path(source).exists():
        return source
    return demo_model() if name == SHORT_NAME else _NAMES[name]


@dataclass(frozen=True, slots=True)
class Problem:
    """One disagreement between the index and the files; `file` is the file concerned."""

    kind: Literal["missing_file", "missing_tensor", "misplaced", "duplicate", "unlisted", "path"]
    file: str
    tensor: str | None
    message: str


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The files of one checkpoint, with headers, config and index read; tensors are read on demand.

    Where two files hold a tensor of the same name, the index decides which is in `tensors`, else model.safetensors
    comes first, else the first file by name.
    """

    path: str
    config: dict[str, object] = field(repr=False)
    index: dict[str, str] | None = field(repr=False)
    headers: dict[str, Header] = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)
    problems: tuple[Problem, ...] = field(repr=False)
    sources: Mapping[str, ByteSource] = field(repr=False)  # all files by name
    revision: str | None = None  # the commit of a hub checkpoint
    ref: str | None = None  # the branch, tag or commit that was asked for; None: the default one
    # Name in `tensors` -> name in the file, where these differ: of a head in the layout of a library that trains heads.
    stored_names: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path_or_id: str | Path, *, token: str | None = None, endpoint: str | None = None) -> "Checkpoint":
        """Open a folder, a .safetensors file (with the config.json next to it, if any), a hub id "org/name" or `tiny`.

        A hub id may end with "@" and a branch, tag or commit. Of a hub checkpoint only headers, config and index are
        fetched, and nothing is stored; files in the hub's cache are read there, and with HF_HUB_OFFLINE=1 no others.
        Token and endpoint are those of huggingface_hub by default. Raises CheckpointError for a damaged header or JSON
        file, or without a safetensors file.
        """
        path = Path(shipped_path(path_or_id)).expanduser()
        with readable(path):
            if path.is_dir():
                return _assemble(str(path), folder_files(path))
            if path.is_file() and path.suffix == ".safetensors":
                _refuse_shard(path)
                names = (CONFIG, ADAPTER) if path.name.startswith("adapter") else (CONFIG,)
                files = [file for file in (path, *map(path.with_name, names)) if file.is_file()]
                return _assemble(str(path), {file.name: LocalFile.at(file, file.name) for file in files})
            if path.suffix == ".gguf":
                message = f"{path_or_id}: {_conversion(str(path_or_id)) if path.exists() else 'no such file'}"
                raise CheckpointError(message)
            named = None if path.exists() or isinstance(path_or_id, Path) else split_hub_id(path_or_id)
            if named is None:
                raise CheckpointError(source_sentence(str(path_or_id)))
        hub_id, ref = named
        try:
            if is_offline_mode():
                folder = cached_folder(hub_id, ref)
                sources, commit = folder_files(folder), folder.name
            else:
                sources, commit = repo_files(hub_id, ref, token=token, endpoint=endpoint)
        except CheckpointError as error:
            message = f"{error} (There is no folder {hub_id} here, so it was taken as a hub id.)"
            raise CheckpointError(message) from error
        return replace(_assemble(hub_id, sources, ref), revision=commit, ref=ref)

    @property
    def files(self) -> tuple[str, ...]:
        """The safetensors files, by name."""
        return tuple(self.headers)

    @property
    def unindexed(self) -> tuple[str, ...]:
        """Files that loaders do not open, as they are not in the index or, without one, not model.safetensors."""
        if self.index is None and SINGLE not in self.headers:
            return ()
        named = {SINGLE} if self.index is None else set(self.index.values())
        return tuple(file for file in self.headers if file not in named)

    @property
    def pickled(self) -> str:
        """What to do with the weights that other files than safetensors hold; "" if there are none."""
        names = [name for name in self.sources if name.startswith("pytorch_model") and name.endswith(PICKLES)]
        return f"Its weights are in {pickle_sentence(names)}" if names else ""

    def info(self, name: str) -> TensorInfo:
        """Return the tensor called `name`; CheckpointError if there is none."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor {name!r}; it has {some(self.tensors)}.")
        return self.tensors[name]

    def chunks(self, tensor: str | TensorInfo, size: int | None = None) -> Iterator[bytes]:
        """Yield the tensor's bytes in order, at most `size` (default: CHUNK) at a time."""
        size = size or CHUNK
        info = self.info(tensor) if isinstance(tensor, str) else tensor
        source = self.sources[info.file]
        for begin in range(info.begin, info.end, size):
            yield source.read(begin, min(begin + size, info.end))

    def raw(self, name: str) -> RawTensor:
        """Return the tensor as `write_safetensors` takes it; its bytes are read when they are written."""
        info = self.info(name)
        return RawTensor(info.dtype, info.shape, lambda: self.chunks(name))

    def same(self, a: TensorInfo, b: TensorInfo) -> bool:
        """Whether two stored tensors are equal in dtype, shape and every bit."""
        return a.form == b.form and all(x == y for x, y in zip(self.chunks(a), self.chunks(b), strict=True))

    def samples(self, names: Sequence[str], size: int = SAMPLE) -> list[bytes]:
        """Read the middle `size` bytes of each tensor, or all of a smaller one; in parallel."""
        infos = [self.info(name) for name in names]
        # Multiples of 16 bytes, the widest element, so that no element is cut.
        return self.read_blocks([(info, max(0, info.nbytes - size) // 2 // 16 * 16) for info in infos], size)

    def read_blocks(self, offsets: Sequence[tuple[TensorInfo, int]], size: int) -> list[bytes]:
        """Read at most `size` bytes from each byte offset in a tensor, in parallel."""

        def read(offset: tuple[TensorInfo, int]) -> bytes:
            info, begin = offset[0], offset[0].begin + offset[1]
            return self.sources[info.file].read(begin, min(begin + size, info.end))

        return map_reads(read, offsets, self.sources.values())

    def read_bytes(self, name: str) -> bytes:
        return b"".join(self.chunks(name))

    def read_json(self, name: str) -> dict[str, object] | None:
        """Read another JSON file of the checkpoint, such as hf_quant_config.json; None where it is absent."""
        return _load_json(self.sources[name], OTHER_LIMITS) if name in self.sources else None


def as_checkpoint(source: str | Path | Checkpoint) -> Checkpoint:
    """Return `source`, opened if it is a path or hub id."""
    return source if isinstance(source, Checkpoint) else Checkpoint.open(source)


def _refuse_shard(path: Path) -> None:
    """Raise for one of the numbered files of a model, which has a part of its tensors."""
    others = path.parent.glob(re.sub(r"-\d+(-of-\d+)$", r"-*\1", glob.escape(path.stem)) + path.suffix)
    if path.with_name(INDEX).is_file() and any(other.name != path.name for other in others):
        raise CheckpointError(f"{path}: one of several files of a model: give its folder, {path.parent}.")


def _assemble(path: str, sources: Mapping[str, ByteSource], ref: str | None = None) -> Checkpoint:
    stored = _weight_map(sources[INDEX]) if INDEX in sources else None
    index = None if stored is None else {name: _plain_path(file, sources) for name, file in stored.items()}
    named = set(index.values()) if index else set()
    # Files such as ._model.safetensors are resource forks that macOS leaves behind.
    files = [n for n in sorted(sources) if n.endswith(".safetensors") and (n in named or not re.search(r"^\.|/", n))]
    if ADAPTER in sources and (CONFIG not in sources or (files and all(name.startswith("adapter") for name in files))):
        beside = side_head(sources[SIDE_HEAD], path, ref) if SIDE_HEAD in sources else ()
        raise CheckpointError(f"{path}: {adapter_sentence(_load_json(sources[ADAPTER], CONFIG_LIMITS), *beside)}")
    if not files:
        is_local = Path(path).is_dir()
        names = [*sources, *(folder_names(Path(path)) if is_local else ())]
        if is_local and not _is_model(list(sources)) and (inner := inner_models(Path(path))):
            newest = f", the newest of {len(inner)} models in it" if inner[1:] else ""
            raise CheckpointError(f"{path}: no .safetensors file of its own: give {inner[0]}{newest}.")
        if sentence := training_sentence(names):
            raise CheckpointError(f"{path}: {sentence}")
        raise CheckpointError(f"{path}: no .safetensors file. {_advice(path, list(sources))}")
    headers = _read_headers([sources[name] for name in files])
    tensors, problems = _reconcile(headers, index)
    problems += [Problem("path", file, None, f"The index names {file}, which is not the name of a file")
                 for file in sorted({*(stored or {}).values()} - named)]  # fmt: skip
    config = _load_json(sources[CONFIG], CONFIG_LIMITS) if CONFIG in sources else {}
    if sentence := engine_sentence(config, files):
        raise CheckpointError(f"{path}: {sentence}")
    try:
        check_numbers(config)
    except ValueError as error:
        raise CheckpointError(f"{sources[CONFIG]}: {error}.") from error
    checkpoint = Checkpoint(path, config, index, headers, tensors, tuple(problems), sources)
    try:
        head = renamed_head(config, dict.fromkeys([*tensors, *(index or ())]), {*files, *named})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if head is not None:
        return _published(checkpoint, head)
    others = {*checkpoint.unindexed}  # files beside a model's, which may be of a draft model
    if (found := standalone(config, [name for name, info in tensors.items() if info.file not in others])) is not None:
        raise CheckpointError(f"{path}: {found.sentence}")
    return checkpoint


def _published(checkpoint: Checkpoint, head: RenamedHead) -> Checkpoint:
    """Return a head alone under its family's names and with its model's config, without tensors of the trunk."""
    published = {stored: name for name, stored in head.names.items()}
    infos = {name: replace(checkpoint.tensors[stored], name=name)
             for name, stored in head.names.items() if stored in checkpoint.tensors}  # fmt: skip
    headers = {
        file: replace(header, tensors={name: info for name, info in infos.items() if info.file == file})
        for file, header in checkpoint.headers.items()
    }
    own = checkpoint.index
    index = None if own is None else {published[name]: file for name, file in own.items() if name in published}
    problems = tuple(
        replace(each, tensor=published.get(each.tensor or "", each.tensor)) for each in checkpoint.problems
    )
    sources = dict(checkpoint.sources)
    if head.config is not checkpoint.config:
        sources.pop(CONFIG)  # an edit writes the model's
    return replace(checkpoint, config=head.config, index=index, headers=headers, tensors=infos, problems=problems,
                   sources=sources, stored_names=head.names)  # fmt: skip


def _is_model(names: Sequence[str]) -> bool:
    """Whether a folder with these files is a model, if with files missing or in other formats."""
    state = r"(?:training_args|optimizer|scheduler|rng_state).*"  # a trainer's pickles
    pickled = CONFIG in names and any(name.endswith(PICKLES) and not re.fullmatch(state, name) for name in names)
    return INDEX in names or pickled or any(name.endswith(".gguf") for name in names)


def _advice(path: str, names: Sequence[str]) -> str:
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        file = shlex.quote(str(Path(path) / ggufs[0]))
        which = "that file" if len(ggufs) == 1 else "one of them"
        return f"It has {', '.join(ggufs[:3])}: give {which}, or what `nextn convert {file} OUT` writes."
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return f"It has {pickle_sentence(pickles)}"
    if INDEX in names:
        return f"The files that {INDEX} names are missing: the download or copy is incomplete. Get them as well."
    if sentence := lower_case_sentence(names):
        return f"It has {sentence}"
    what = "config or tokenizer without weights: " if {CONFIG, "tokenizer.json"} & set(names) else ""
    return f"It has {what}{', '.join(names[:5]) or 'no files'}. Give the folder or hub id that holds the weights."


def _conversion(gguf: str) -> str:
    command = f"nextn convert {shlex.quote(gguf)} OUT"
    return f"a GGUF file is converted first: `{command}` writes a checkpoint folder; give OUT instead."


def _read_headers(sources: Sequence[ByteSource]) -> dict[str, Header]:
    """Read all headers. All damaged local files are named at once; the first remote failure ends the reading."""
    budget = HeaderBudget()

    def read(source: ByteSource) -> Header | CheckpointError:
        try:
            return read_header(source, budget)
        except CheckpointError as error:
            if isinstance(source, LocalFile):
                return error
            raise

    headers: dict[str, Header] = {}
    failures: list[CheckpointError] = []
    for source, result in zip(sources, map_reads(read, sources, sources), strict=True):
        if isinstance(result, CheckpointError):
            failures.append(result)
        else:
            headers[source.name] = result
    if failures:
        raise CheckpointError("\n".join(map(str, failures))) from failures[0]
    return headers


def _weight_map(source: ByteSource) -> dict[str, str]:
    remedy = "Download it again, or remove it, after which `nextn convert FOLDER --reindex` writes one from the files."
    weight_map = _load_json(source, INDEX_LIMITS, remedy).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(
            f"{source}: weight_map is {brief(weight_map)}, it must map tensor names to file names. {remedy}"
        )
    return weight_map


def _plain_path(file: str, names: Collection[str]) -> str:
    """Return the name of the file here that an index means by a path such as ./NAME, or by one of another machine."""
    path = file.replace("\\", "/")
    name = path.rpartition("/")[2] or file
    if PureWindowsPath(file).root:
        return name
    below = path.removeprefix("./") if path.startswith("./") else file
    return name if below != file and below not in names and name in names else below


def _reconcile(
    headers: Mapping[str, Header], index: Mapping[str, str] | None
) -> tuple[dict[str, TensorInfo], list[Problem]]:
    problems: list[Problem] = []
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(headers, key=lambda file: file != SINGLE):  # the one that loaders open without an index
        for name, info in headers[file].tensors.items():
            first = tensors.setdefault(name, info)
            if first is not info:
                problems.append(Problem("duplicate", file, name, f"{name} is in {first.file} and in {file}"))
                if index and index.get(name) == file:
                    tensors[name] = info
    if index is not None:
        problems += _against_index(tensors, index, set(headers))
    return tensors, problems


def _against_index(tensors: Mapping[str, TensorInfo], index: Mapping[str, str], files: set[str]) -> Iterator[Problem]:
    named = Counter(index.values())
    for file in sorted(named.keys() - files):
        yield Problem("missing_file", file, None, f"The index puts {named[file]} tensors in {file}, which is absent")
    for name, file in index.items():
        info = tensors.get(name)
        if info is None and file in files:
            yield Problem("missing_tensor", file, name, f"The index puts {name} in {file}, which does not hold it")
        elif info is not None and info.file != file:
            yield Problem("misplaced", info.file, name, f"The index puts {name} in {file}, it is in {info.file}")
    for name, info in tensors.items():
        if info.file in named and name not in index:
            yield Problem("unlisted", info.file, name, f"{info.file} holds {name}, which the index does not list")


def _load_json(source: ByteSource, limits: JsonLimits, remedy: str = "Download or save it again.") -> dict[str, object]:
    data = b""
    try:
        data, size = source.start(limits.num_bytes)
        limits.check_size(size)
        value = parse_json(data, limits)
    except ValueError as error:
        cause = placeholder(data) or ("it is empty" if not data.strip() else error)
        raise CheckpointError(f"{source}: not readable as JSON: {cause}. {remedy}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: holds {brief(value)}, it must be a JSON object. {remedy}")
    return value
