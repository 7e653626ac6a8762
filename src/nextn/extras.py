"""Optional packages: how to install those of an extra, however nextn itself was installed."""

import shlex
from importlib.metadata import PackageNotFoundError, requires

_MARKER = "; extra == "  # as in "fastapi>=0.115; extra == 'serve'"; wheels have the extras of others written out


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of an extra.

    It names the packages, not `nextn[extra]`: pip would look for a package of that name in its index, which need not be
    this one.
    """
    try:
        split = [each.partition(_MARKER) for each in requires("nextn") or []]
    except PackageNotFoundError:
        split = []
    packages = [package for package, _, marker in split if marker.strip("'\"") == extra]
    return "pip install " + (shlex.join(packages) if packages else f"'.[{extra}]' in the folder of nextn's sources")
