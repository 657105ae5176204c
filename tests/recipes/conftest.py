"""What the tests of the recipes share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinyforge.data.answers import exact_match, talk_match
from tinyforge.recipes import dpo, grpo, sft


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The questions after training take longer than that: a tenth says the same of a model of a few steps."""
    for recipe in (dpo, grpo, sft):
        monkeypatch.setattr(recipe, "exact_match", lambda loaded, n, seed: exact_match(loaded, max(n // 10, 10), seed))
    monkeypatch.setattr(sft, "talk_match", lambda loaded, count, seed: talk_match(loaded, count // 5, seed))


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of what a module's `made` has made as the working directory."""
    path = tmp_path / "copy"
    shutil.copytree(made, path)
    monkeypatch.chdir(path)
    yield path
