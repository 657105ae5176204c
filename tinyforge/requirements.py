"""The packages that every command needs, and what to type where one is missing.

Imports the standard library alone."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

from tinyforge.invocation import ROOT

OLDEST_PYTHON = (3, 11)
CORE = ("numpy", "duckdb", "tqdm", "safetensors", "matplotlib")


def missing() -> list[str]:
    return [package for package in CORE if importlib.util.find_spec(package) is None]


def check(root: Path) -> None:
    """Stop a command of this project, with one line and exit status 1, where Python is too old or NumPy is missing.

    root: the folder that holds the package. The other packages are imported where they are used, and reported there
    (`errors.run_command`). A program that only imports tinyforge gets Python's own ModuleNotFoundError.
    """
    if not _is_command(root):
        return
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        _stop(f"this is Python {sys.version.split()[0]}, expected {oldest} or newer; run the command with a newer one")
    if importlib.util.find_spec("numpy") is None:
        _stop(not_installed(missing(), root))


def not_installed(absent: list[str], root: Path) -> str:
    """The message for packages that are not installed, which ends with what to type."""
    names = " and ".join(filter(None, (", ".join(absent[:-1]), absent[-1])))
    verb = "is" if len(absent) == 1 else "are"
    return f"{names} {verb} not installed for {sys.executable}; type: {install_line(root, absent)}"


def version_of(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    from importlib import metadata  # takes as long as a third of NumPy

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def needs(what: str, package: str, extra: str) -> str:
    """The message for a package of one of tinyforge's extras. what: that which is not possible without it."""
    return f"{what} needs the package {package}; run pip install {what_brings(extra)}"


def what_brings(extra: str, root: Path = ROOT) -> str:
    """The arguments of pip that install an extra: the checkout's, or the extra's packages. Never the name tinyforge,
    which belongs to another project on PyPI."""
    if (root / "pyproject.toml").exists():
        return f'-e "{"." if root == Path.cwd() else root}[{extra}]"'
    from importlib import metadata

    listed = (line.partition(";") for line in metadata.requires("tinyforge") or ())
    own = re.compile(rf"extra == ['\"]{extra}['\"]")
    return " ".join(f'"{package.strip()}"' for package, _, condition in listed if own.search(condition))


def install_line(root: Path, absent: list[str]) -> str:
    """What to type: activate the checkout's environment, make one, or install into the environment that runs now."""
    if not (root / "pyproject.toml").exists():
        return f"{sys.executable} -m pip install {' '.join(absent)}"
    if sys.prefix != sys.base_prefix:
        return f"pip install -e {root}"
    activate = ".venv\\Scripts\\activate" if os.name == "nt" else ". .venv/bin/activate"
    if (root / ".venv" / "pyvenv.cfg").exists():
        return activate
    return f"{Path(sys.executable).name} -m venv .venv && {activate} && pip install -e ."


def _is_command(root: Path) -> bool:
    """Whether Python was started for a command of this project: `-m tinyforge.chat`, `recipes/sft.py`, `tinyforge`."""
    started = sys.argv[0] if sys.argv else ""
    if started == "-m":  # Python is still looking for the module
        return True
    if started.endswith(".py"):
        return root in Path(os.path.abspath(started)).parents
    return Path(started).name == "tinyforge"


def _stop(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)
