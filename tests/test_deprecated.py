"""Old names of modules give the modules of today, and say so."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tinyforge.deprecated import RENAMED, new_name


@pytest.mark.parametrize(("old", "new"), [*RENAMED.items(), ("tinyforge.text.bpe", "tinyforge.tokenizers.bpe")])
def test_an_old_name_is_the_new_module(old: str, new: str) -> None:
    module = importlib.import_module(new)
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now; import that") as warned:
        assert importlib.import_module(old) is module
    assert module.__name__ == new and module.__spec__ is not None and module.__spec__.name == new
    assert all(w.filename != "sys" for w in warned)


def test_other_names_are_left_alone() -> None:
    assert new_name("tinyforge.hubs") is None and new_name("tinyforge.formats") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tinyforge.hub.no_such_module")


@pytest.mark.parametrize("name", ["convert", "calibrate"])
def test_a_command_by_its_old_name(name: str) -> None:
    command = [sys.executable, "-m", "tinyforge.hub", name, "--help"]
    assert "usage" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
