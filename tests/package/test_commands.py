"""The command `tinyforge`: every subcommand is its module's, and completion knows what the modules take."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_import import fresh_import
from tinyforge import commands
from tinyforge.errors import UserError

ROOT = Path(__file__).parents[2]
NAMES = [" ".join(words) for words in commands.present()]


def test_the_table_is_whole() -> None:
    assert {" ".join(words) for words in commands.MODULES} | {"completion"} == set(commands.SUMMARIES)
    assert {"train", "sft", "chat", "convert", "doctor", "gradcheck", "data corpus"} <= set(NAMES)
    missing = [m for w, m in commands.MODULES.items() if w[0] == "data" and not commands.module_of(w)]
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_a_command_is_its_module(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = tuple(name.split())
    module = importlib.import_module(commands.module_of(words) or "")
    shown = []
    for run in (lambda: commands.main([*words, "--help"]), lambda: module.main(["--help"])):
        with pytest.raises(SystemExit) as left:
            run()
        assert left.value.code == 0
        shown.append(capsys.readouterr().out.partition("\n\n")[2])
    assert shown[0] == shown[1] != ""


def test_flags_reach_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["gradcheck", "--op", "Softmax"]) == 0
    assert "Softmax" in capsys.readouterr().out
    with pytest.raises(UserError, match="unrecognized arguments: --nonsense"):
        commands.main(["doctor", "--nonsense"])


def test_help_is_printed_without_what_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == commands.main(["--help"]) == commands.main(["data"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    _, loaded = fresh_import(
        "tinyforge.commands, tinyforge.registry; tinyforge.commands.usage()",
        "duckdb",
        "models",
        "matplotlib",
        "tinyforge.train",
        "tinyforge.infer",
    )
    assert loaded == "[]"


def test_a_command_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(commands.MODULES, ("chat",), "tests.package.wants_absent")
    with pytest.raises(UserError, match="needs the package absent_package; pip install absent_package"):
        commands.main(["chat"])


# --- completion


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    found = {}
    for shell in commands.SHELLS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert commands.main(["completion", shell]) == 0
        found[shell] = printed.getvalue()
    return found


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("tinyforge tr", {"train"}),
        ("tinyforge data lo", {"local"}),
        ("tinyforge chat --pr", {"--prompt", "--precision"}),
        ("tinyforge data shards --corp", {"--corpus"}),
        ("tinyforge text tr", {"train"}),
        ("tinyforge completion f", {"fish"}),
        ("tinyforge nonsense --x", set()),
    ],
)
def test_bash_completes(line: str, wanted: set[str], scripts: dict[str, str]) -> None:
    words = " ".join(f"'{word}'" for word in line.split())
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(line.split()) - 1}; _tinyforge"
    program = f"{scripts['bash']}\n{asked}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == wanted


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_read_their_script(shell: str, scripts: dict[str, str], tmp_path: Path) -> None:
    assert "--prompt" in scripts[shell] or "-l prompt" in scripts[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(scripts[shell], encoding="utf-8")
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


# --- what setup.py relies on


def test_models_and_data_are_imported_by_name() -> None:
    """`import data.local` would bind `data`, a name that a wheel does not have."""
    files = [f for folder in ("tinyforge", "models", "data", "recipes") for f in (ROOT / folder).rglob("*.py")]
    plain = re.compile(r"^\s*import (?:models|data|recipes)\b", re.MULTILINE)
    found = [str(file) for file in files if plain.search(file.read_text(encoding="utf-8"))]
    assert len(files) > 100 and found == []
