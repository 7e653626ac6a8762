"""Pictures: where they can be written, and how many rows they take."""

import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from nextn.errors import ConfigError
from nextn.stats import plots
from nextn.stats.intervals import Estimate


@pytest.mark.more
def test_a_home_that_cannot_be_written_is_no_warning(tmp_path):
    """For matplotlib, which takes a temporary folder for its cache there."""
    code = "from nextn.stats import plots; from nextn.stats.intervals import Estimate; "
    code += "plots.curves(plots.Path('a.png'), {'all': [Estimate(1.5, 1.2, 1.8)]})"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MPL", "XDG_"))}
    env |= {"HOME": os.devnull, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert (done.stderr, done.returncode, (tmp_path / "a.png").exists()) == ("", 0, True)


def test_more_rows_than_colors(tmp_path):
    plots.curves(tmp_path / "a.png", {str(row): [Estimate(1.5, 1.2, 1.8)] for row in range(30)})
    assert (tmp_path / "a.png").exists()


def test_a_figure_on_a_full_disk(tmp_path, monkeypatch):
    """The picture that is there stays, and nothing half-written is left."""
    draw = partial(plots.curves, tmp_path / "a.png", {"all": [Estimate(1.5, 1.2, 1.8)]})
    draw()
    before = (tmp_path / "a.png").read_bytes()

    def full(figure, path):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(ConfigError, match=r"a\.png: cannot be written: No space left"):
        draw()
    assert [each.read_bytes() for each in tmp_path.iterdir() if each.is_file()] == [before]
