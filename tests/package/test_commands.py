"""The command `tinyforge`: every subcommand is its module's, and completion knows what the modules take."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from tests.test_import import fresh_import
from tinyforge import cli
from tinyforge.errors import UserError
from tinyforge.invocation import as_typed

ROOT = Path(__file__).parents[2]
NAMES = [" ".join(words) for words in cli.present()]


def test_the_table_is_whole() -> None:
    assert {" ".join(words) for words in cli.MODULES} | {"completion"} == set(cli.SUMMARIES)
    assert {"train", "sft", "chat", "convert", "doctor", "gradcheck", "data corpus"} <= set(NAMES)
    missing = [m for w, m in cli.MODULES.items() if w[0] == "data" and not cli.module_of(w)]
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_a_command_is_its_module(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = tuple(name.split())
    module = importlib.import_module(cli.module_of(words) or "")
    shown = []
    for run in (lambda: cli.main([*words, "--help"]), lambda: module.main(["--help"])):
        with pytest.raises(SystemExit) as left:
            run()
        assert left.value.code == 0
        shown.append(capsys.readouterr().out.partition("\n\n")[2])
    assert shown[0] == as_typed(shown[1], in_checkout=False) != ""


def test_a_refusal_names_the_command_that_was_typed() -> None:
    with pytest.raises(UserError, match="see tinyforge models --help"):
        cli.main(["models"])
    with pytest.raises(UserError, match="see python -m models --help"):
        importlib.import_module("tinyforge.zoo.command").main([])


def test_flags_reach_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gradcheck", "--op", "Softmax"]) == 0
    assert "Softmax" in capsys.readouterr().out
    with pytest.raises(UserError, match="unrecognized arguments: --nonsense"):
        cli.main(["doctor", "--nonsense"])


def test_help_is_printed_without_what_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.main(["--help"]) == cli.main(["data"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    _, loaded = fresh_import(
        "tinyforge.cli, tinyforge.registry; tinyforge.cli.usage()",
        "duckdb",
        "models",
        "matplotlib",
        "tinyforge.train",
        "tinyforge.infer",
    )
    assert loaded == "[]"


def test_a_command_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.MODULES, ("chat",), "tests.package.wants_absent")
    with pytest.raises(UserError, match="needs the package absent_package; pip install absent_package"):
        cli.main(["chat"])


def test_an_example_is_named_where_only_the_wheel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "module_of", lambda words: None)
    with pytest.raises(UserError, match=r"it is an example of the repository, examples/storyteller/stories\.py"):
        cli.main(["data", "stories"])


# --- one source


def test_everything_imports_by_the_name_that_a_wheel_has() -> None:
    """A wheel has no package `data`: it is `tinyforge.data` in a checkout too."""
    files = [
        f
        for folder in ("tinyforge", "models", "data", "recipes", "bench", "examples")
        for f in (ROOT / folder).rglob("*.py")
    ]
    plain = re.compile(r"^\s*(?:import|from) (?:models|data|recipes)\b", re.MULTILINE)
    found = [str(file) for file in files if plain.search(file.read_text(encoding="utf-8"))]
    assert len(files) > 100 and found == []


@pytest.mark.skipif(sys.platform == "win32", reason="git makes no links there unless it is told to")
def test_links_are_links() -> None:
    """An editor that writes through a temporary file turns a link into a copy, whose root would be another folder."""
    links = ["tinyforge/models", "tinyforge/recipes", "tinyforge/data"]
    folders = ("bench", "docs/course", "docs/pictures", "examples/storyteller", "tests/gpu", "tests/parallel")
    links += [f"{folder}/checkout.py" for folder in folders]
    assert [link for link in links if not (ROOT / link).is_symlink()] == []
