"""Optional packages: how to install those of an extra, however nextn itself was installed."""

import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires

# "fastapi>=0.115; extra == 'serve'", as wheels write it, and an extra that consists of others.
_MARKER, _OTHERS = "; extra == ", "nextn["


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of an extra.

    It names the packages, not `nextn[extra]`: pip would look for a package of that name in its index, which need not be
    this one.
    """
    try:
        packages = list(_packages(extra, requires("nextn") or []))
    except PackageNotFoundError:
        packages = []
    return "pip install " + (shlex.join(packages) if packages else f"'.[{extra}]' in the folder of nextn's sources")


def _packages(extra: str, requirements: list[str]) -> Iterator[str]:
    for requirement in requirements:
        package, _, marker = requirement.partition(_MARKER)
        if marker.strip("'\"") != extra:
            continue
        if package.startswith(_OTHERS):
            for other in package.removeprefix(_OTHERS).rstrip("]").split(","):
                yield from _packages(other, requirements)
        else:
            yield package
