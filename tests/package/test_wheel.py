"""What `pip install .` brings: a wheel with everything in it, under one name, that works far from the repository."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tinyforge.invocation import as_typed

ROOT = Path(__file__).parents[2]
SOURCES = ("tinyforge", "models", "data", "recipes")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed; the extra dev has it")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python recipes/pretrain.py --out x", "tinyforge train --out x"),
        ("use recipes/classify.py, or", "use tinyforge classify, or"),
        ("python -m tinyforge.formats convert A B", "tinyforge convert A B"),
        ("python -m tinyforge.formats average A B C", "tinyforge average A B C"),
        ("python recipes/calibrate.py A B --data C", "tinyforge calibrate A B --data C"),
        ("python -m tinyforge.tokenizers train", "tinyforge text train"),
        ("python -m models list", "tinyforge models list"),
        ("python -m data.corpus report", "tinyforge data corpus report"),
        ("python -m data.corpus_report", "python -m data.corpus_report"),
        ("from data to shards", "from data to shards"),
    ],
)
def test_commands_as_typed_where_a_wheel_is_installed(line: str, expected: str) -> None:
    assert as_typed(line, in_checkout=False) == expected
    assert as_typed(line, in_checkout=True) == line


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as pip does where there is no wheel: what the sdist lacks is missing here."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools.__version__} is too old to build with, expected 77")
    work = tmp_path_factory.mktemp("build")
    tree, unpacked = work / "tree", work / "unpacked"
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    build("sdist", tree, work)
    (archive,) = work.glob("*.tar.gz")
    shutil.unpack_archive(archive, unpacked, filter="data")
    (source,) = unpacked.iterdir()
    build("wheel", source, work)
    (found,) = work.glob("*.whl")
    return found


def build(kind: str, tree: Path, out: Path) -> None:
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_wheel_is_the_repository_byte_for_byte(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    found = {}
    for folder in SOURCES:
        for file in (ROOT / folder).rglob("*"):
            path = file.relative_to(ROOT)
            if file.is_file() and "__pycache__" not in path.parts and path.suffix != ".sh":
                found[(path if folder == "tinyforge" else Path("tinyforge", path)).as_posix()] = file.read_bytes()
    assert packed.keys() == found.keys()
    assert [name for name in packed if packed[name] != found[name]] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the folders of an environment have other names")
def test_an_environment_far_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Empty but for the wheel and, by a .pth file, the packages that it depends on. A folder `data` and a module
    `models` of the user's own lie where the commands run."""
    venv, here = tmp_path / "venv", tmp_path / "here"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    for name in ("data/notes", "models"):
        (here / name).mkdir(parents=True)
    (here / "models/__init__.py").write_text("raise SystemExit('the models of the user')")
    start = "import sys; from tinyforge.cli import run; sys.argv[0] = 'tinyforge'; run()"

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    # -P as for the script that pip writes: the folder where one works is not on the path.
    python = (str(venv / "bin/python"), "-P", "-c", start)

    def tinyforge(*arguments: str) -> str:
        command = [*python, *arguments]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "training on the CPU: works" in tinyforge("doctor")
    question = ("--prompt", "How much is 13 plus 2?")
    answer = tinyforge("chat", "--checkpoint", "small", *question)
    assert "15" in answer
    bundled = site / "tinyforge/models/nanoeuler/small"
    assert (bundled.parent / "storyteller/generation_config.json").is_file()
    tinyforge("convert", str(bundled), "copy", "--format", "tinyforge")
    assert tinyforge("chat", "--checkpoint", "copy", *question) == answer
    tinyforge("convert", "small", "hf")
    assert (here / "hf/model.safetensors").is_file()
    out = tinyforge("train", "--steps", "2", "--set", "layers=1", "--out", "run", "--workers", "1", "--card")
    assert "next: tinyforge sft --base run" in out
    card = (here / "run/README.md").read_text(encoding="utf-8")
    assert "    tinyforge train --" in card and "Text, by `tinyforge train`" in card
    assert "recipes/" not in card and "python -m" not in card
    assert "gpt2" in tinyforge("models", "list")
    tinyforge("gradcheck", "--op", "Softmax")
    page = here / "page.html"
    tinyforge("board", "run", "--export", str(page))
    assert "<html" in page.read_text(encoding="utf-8")
    if importlib.util.find_spec("starlette") and importlib.util.find_spec("uvicorn"):
        command = [*python, "serve", "--checkpoint", "small", "--port", "0"]
        with subprocess.Popen(
            command, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as server:
            try:
                lines = []
                for line in server.stdout or ():
                    lines.append(line)
                    if found := re.search(r"http://[\d.]+:\d+", line):
                        for path in ("/health", "/"):
                            with urllib.request.urlopen(found[0] + path, timeout=20) as answered:
                                assert answered.status == 200
                        break
                else:
                    raise AssertionError("".join(lines))
            finally:
                server.terminate()


def test_the_workflows_pin_every_action_and_publish_what_passed() -> None:
    """A tag of an action can be moved; and a site is deployed only with a wheel that was tried."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; the extra docs has it")

    read = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")}
    for name, text in read.items():
        used = re.findall(r"uses: (.*)", text)
        loose = [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+.*", one)]
        assert used and not loose, (name, loose)
    release = yaml.safe_load(read["release.yml"])
    jobs = release["jobs"]
    assert release["permissions"] == {"contents": "read"}
    assert {name for name, job in jobs.items() if "permissions" in job} == {"deploy-site", "publish"}
    assert all({"try", "site"} <= set(jobs[name]["needs"]) for name in ("deploy-site", "publish"))
