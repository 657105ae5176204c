"""README's commands with a Python that has no packages: one line that says what to type, and exit status 1."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tinyforge import requirements

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without packages."""
    where = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(where)], check=True)
    return where / "bin" / "python"


def commands() -> list[list[str]]:
    """The arguments of each `python ...` in README, without its comment."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    found = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("    python ")]
    assert len(found) > 15
    return found


def run(python: Path, *arguments: str, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *arguments], cwd=where, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_every_command_of_readme_says_what_to_install(bare: Path) -> None:
    course = ["docs/course/check.py", "1"], ["docs/course/own_model.py"]
    for arguments in [*commands(), ["-m", "tinyforge"], ["-m", "recipes.grpo"], ["-m", "data.corpus"], *course]:
        done = run(bare, *arguments)
        assert done.returncode == 1 and not done.stdout, arguments
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: numpy, "), (arguments, done.stderr)
        assert f"pip install -e {ROOT}" in done.stderr


def test_a_program_of_its_own_gets_the_usual_error(bare: Path, tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport tinyforge\n", encoding="utf-8")
    done = run(bare, str(program), where=tmp_path)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'numpy'"


def test_an_extra_is_installed_without_the_name_of_another_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PyPI another project has the name tinyforge. A wheel's metadata list the packages, with their bounds."""
    monkeypatch.chdir(ROOT)
    assert requirements.what_brings("gguf", ROOT) == '-e ".[gguf]"'
    monkeypatch.chdir(tmp_path)
    assert requirements.what_brings("gguf", ROOT) == f'-e "{ROOT}[gguf]"'
    listed = ["numpy>=2.0", 'gguf>=0.17 ; extra == "hub"', "wgpu>=0.32; extra == 'webgpu'", 'hub>1; extra == "hubs"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: listed)
    assert requirements.what_brings("hub", tmp_path) == '"gguf>=0.17"'
    assert requirements.what_brings("webgpu", tmp_path) == '"wgpu>=0.32"'
    monkeypatch.chdir(ROOT)
    named = re.compile(r"pip install (-\w+ )*[\"']?tinyforge\b|\btinyforge\[")
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("tinyforge/**/*.py"), *ROOT.glob("data/*.py")]
    assert [page for page in pages if named.search(page.read_text(encoding="utf-8"))] == []


def test_what_to_type_follows_from_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ["numpy", "tqdm"]
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert requirements.install_line(tmp_path, absent).endswith("-m pip install numpy tqdm")  # a wheel
    (tmp_path / "pyproject.toml").touch()
    made = requirements.install_line(tmp_path, absent)
    assert made.endswith("-m venv .venv && . .venv/bin/activate && pip install -e .")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pyvenv.cfg").touch()
    assert requirements.install_line(tmp_path, absent) == ". .venv/bin/activate"


@pytest.mark.parametrize(
    ("package", "command"),
    [("duckdb", "data.local README.md --out OUT"), ("tqdm", "recipes.pretrain --data README.md --steps 2 --out OUT")],
)
def test_a_package_missing_later_is_one_line(package: str, command: str, tmp_path: Path) -> None:
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command.split()]
    program = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = {words!r}; "
        f"runpy.run_module({words[0]!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {package} is not installed for ")
