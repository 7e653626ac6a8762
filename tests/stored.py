"""A saved checkpoint's tensors, changed and written again: what strict loading is tested on."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


def tensors_of(folder: Path) -> dict:
    """Name -> tensor, of all files."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def in_one_file(folder: Path, change=None) -> Path:
    """Put all tensors, changed by `change(table)`, into one file without an index -> the file."""
    table = {name: value.clone() for name, value in tensors_of(folder).items()}
    if change is not None:
        change(table)
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
    save_file(table, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def set_config(folder: Path, **values) -> None:
    """Change config.json; None takes a key away."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def contents(folder: Path) -> dict[str, object]:
    """File name -> its bytes, or for JSON its value: keys may stand in any order."""
    return {
        path.name: json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()
        for path in folder.iterdir()
    }
