"""The check that ends every edit, before anything is moved: what a checkpoint held before, it holds after."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from nextn.checkpoint.checkpoint import SINGLE, Checkpoint
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.safetensors_file import Header, TensorInfo, read_header
from nextn.errors import CheckpointError
from nextn.text_format import some

Forms = Mapping[str, Mapping[str, TensorInfo]]  # new file -> tensor name -> what it should be
_SAMPLE = 4096  # bytes at either end of a copied tensor
_MOST = 2000  # tensors of which these are compared


def check_written(
    folder: Path, stage: Path, expected: Forms, copied: Mapping[str, Mapping[str, Callable[[int, int], bytes]]]
) -> Forms:
    """Compare the new files with what they should hold, and return their headers.

    `copied` has for tensors whose bytes are those of a stored one: new file -> name -> a function that reads some.
    Raises CheckpointError, before the folder is changed.
    """
    headers = {file: read_header(stage / file).tensors for file in expected}
    for file, tensors in expected.items():
        forms = {name: info.form for name, info in headers[file].items()}
        wrong = [name for name, info in tensors.items() if forms.get(name) != info.form]
        wrong += sorted(headers[file].keys() - tensors.keys())
        wrong += _differing(stage / file, headers[file], copied.get(file, {}))
        if wrong:
            message = f"{folder}: not written: {file} would not hold {some(wrong)} as planned. It is unchanged."
            raise CheckpointError(message)
    return headers


def check_complete(
    folder: Path,
    origin: Checkpoint,
    headers: Forms,
    *,
    index: Mapping[str, str] | None,
    renamed: Mapping[str, str],
    dropped: Collection[str],
    gone: Collection[str],
) -> None:
    """Check that every tensor of `origin` but those in `gone` is in the result, and that the index finds those it had.

    Raises CheckpointError, before the folder is changed.
    """
    after: dict[str, Mapping[str, TensorInfo]] = {
        renamed.get(file, file): header.tensors for file, header in origin.headers.items() if file not in dropped
    }
    after |= headers
    forms: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for tensors in after.values():
        for name, info in tensors.items():
            forms.setdefault(name, []).append(info.form)
    lost = [name for name, info in origin.tensors.items() if name not in gone and info.form not in forms.get(name, ())]
    if index is not None:
        lost += [name for name, file in index.items() if name not in after.get(file, {})]
        found = origin.index if origin.index is not None else origin.headers.get(SINGLE, Header({}, {})).tensors
        lost += [name for name in found if name in origin.tensors and name not in gone and name not in index]
    if lost:
        raise CheckpointError(
            f"{folder}: unchanged, as the result would lose {len(set(lost))} tensors: {some(sorted(set(lost)))}. "
            "Please report this."
        )


def _differing(
    path: Path, tensors: Mapping[str, TensorInfo], copied: Mapping[str, Callable[[int, int], bytes]]
) -> Iterator[str]:
    names = sorted(copied)[:: max(1, len(copied) // _MOST)]
    file = LocalFile.at(path, path.name)
    for name in names:
        info = tensors[name]
        for begin in {0, max(0, info.nbytes - _SAMPLE)}:
            end = min(begin + _SAMPLE, info.nbytes)
            if file.read(info.begin + begin, info.begin + end) != copied[name](begin, end):
                yield name
                break
