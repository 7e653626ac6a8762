"""Smoke test of an installed wheel: `make wheel` runs it in an environment that holds nothing else.

Args: a checkpoint folder to audit. It must not import the working tree, so it is run with `python -I`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src" / "nextn"
NEXTN = Path(sys.executable).parent / "nextn"


def main(checkpoint: str) -> None:
    import nextn

    package = Path(nextn.__file__).parent
    assert SOURCES not in (package, *package.parents), f"{package} is the working tree, not the wheel"
    wanted = {path.relative_to(SOURCES) for path in SOURCES.rglob("*") if "__pycache__" not in path.parts}
    missing = sorted(str(path) for path in wanted if not (package / path).exists())
    assert not missing, f"not in the wheel: {', '.join(missing)}"
    assert {path.suffix for path in (package / "runtime" / "native" / "csrc").iterdir()} >= {".cpp", ".h"}
    assert (package / "py.typed").exists()
    assert run("--version").strip() == f"nextn {nextn.__version__}"
    assert json.loads(run("env", "--json"))["packages"]["torch"]
    assert json.loads(run("audit", checkpoint, "--json"))
    assert run("docs", "first-hour").startswith("# ")
    demo = json.loads(
        run("demo", "--no-download", "--minutes", "0", "--json", CXX="no-compiler", NEXTN_REAL_MODELS="none")
    )
    assert all(decoded["identical_output"] for decoded in demo["shipped"].values())
    print(f"{package}: {len(wanted)} files, nextn --version, env, audit, docs and demo work")


def run(*args: str, **environment: str) -> str:
    environ = os.environ | environment
    done = subprocess.run([NEXTN, *args], capture_output=True, text=True, timeout=300, check=False, env=environ)
    assert done.returncode == 0, f"nextn {' '.join(args)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1])
