"""What the tests of the recipes share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of what a module's `made` has made as the working directory."""
    path = tmp_path / "copy"
    shutil.copytree(made, path)
    monkeypatch.chdir(path)
    yield path
