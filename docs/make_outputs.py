"""Run the commands that the pages show, and write their output into the pages.

A page has blocks between `<!-- output: SCENE -->` and `<!-- / -->`, each a console block whose lines with `$ ` are
commands. All blocks of a scene run in one folder, in the order of the page. `scenes.py` makes that folder.

    python docs/make_outputs.py [--check] [SCENE ...]
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from generated import DOCS, ROOT
from scenes import PORT, SCENES, Scene

BLOCK = re.compile(r"(<!-- output: ([\w-]+) -->\n```console\n)(.*?)(```\n<!-- / -->)", re.DOTALL)
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
WIDTH = 100
# What differs between runs and machines: numbers, hashes, the length of bars and the columns of tables.
# Bars, and the lines of slow machines that take their place (`nextn.cli.progress`): speed, not results.
PROGRESS = re.compile(r"━|^[^:]+ [\d,.]+/[\d,.]+( GB)?(, .*)?$")
VARYING = re.compile(r"\b[0-9a-f]{12,}\b|[0-9][0-9,.]*|\s+|[─━]+")


def page_of(scene: str) -> Path:
    """Return the one page with blocks of this scene."""
    (page,) = (path for path in PAGES if f"<!-- output: {scene} -->" in path.read_text())
    return page


def regenerated(scene: Scene, text: str) -> str:
    """Return the text of a page with the outputs of one scene, run now."""
    with tempfile.TemporaryDirectory() as folder, scene.prepare(Path(folder)) as port:

        def run(found: re.Match[str]) -> str:
            if found[2] != scene.name:
                return found[0]
            return found[1] + "".join(_run(command, Path(folder), port) for command in commands(found[3])) + found[4]

        return BLOCK.sub(run, text)


def commands(block: str) -> Iterator[str]:
    """Yield the commands of a console block; a backslash at the end of a line continues a command."""
    for found in re.finditer(r"^\$ (.*(?:\\\n.*)*)", block, re.MULTILINE):
        yield found[1]


def _run(command: str, folder: Path, port: int) -> str:
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    for name, words in (("nextn", "-m nextn"), ("python", "")):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        tool.chmod(0o755)
    settings = {"COLUMNS": str(WIDTH), "TERM": "dumb", "NO_COLOR": "1", "PATH": f"{tools}:{os.environ['PATH']}"}
    settings |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-c", command.replace(f"localhost:{PORT}", f"localhost:{port}")],
        cwd=folder, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1, 3):  # no findings, findings, undecided
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}")
    shown = done.stdout.replace(f"{folder}/", "").replace(f"localhost:{port}", f"localhost:{PORT}")
    shown = shown.replace(f"127.0.0.1:{port}", f"127.0.0.1:{PORT}")
    lines = [line.rstrip() for line in shown.strip("\n").splitlines() if not PROGRESS.search(line)]
    return f"$ {command}\n" + "".join(f"{line}\n" for line in lines)


def same(page: str, other: str) -> bool:
    """Return whether two texts differ in nothing but what varies between runs."""
    return VARYING.sub("", page) == VARYING.sub("", other)


def main(names: list[str]) -> None:
    stale = []
    for scene in (each for each in SCENES if not names or each.name in names):
        page = page_of(scene.name)
        old = page.read_text()
        new = regenerated(scene, old)
        if "--check" in sys.argv and not same(old, new):
            stale.append(f"{page.relative_to(ROOT)}: the output of {scene.name} is stale: run `make docs`")
        elif "--check" not in sys.argv and not same(old, new):
            page.write_text(new)
    sys.exit("\n".join(stale) or 0)


if __name__ == "__main__":
    main([word for word in sys.argv[1:] if not word.startswith("-")])
