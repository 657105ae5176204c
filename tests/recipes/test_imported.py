"""Recipes on models of others: llama2.c's stories260K is measured as it is, and fine-tuned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinyforge.backends import get_backend
from tinyforge.formats import load
from tinyforge.recipes import evaluate, sft

MODEL = Path(__file__).resolve().parents[3] / "shared/data/llama2c/stories260K.bin"
pytestmark = pytest.mark.skipif(not MODEL.is_file(), reason=f"{MODEL} is not there")
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. "
)


def test_it_is_measured_as_it_is(tmp_path: Path) -> None:
    """A story in the words that it learned from costs less than one bit for each byte."""
    (tmp_path / "stories.txt").write_text(STORY * 60, encoding="utf-8")
    flags = ["--data", str(tmp_path / "stories.txt"), "--sentences", "5", "--backend", "numpy"]
    assert evaluate.main(["--checkpoint", str(MODEL), *flags, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["parameters"] == 260_032 and 0.0 < found["text"]["bits_per_byte"] < 1.0


@pytest.mark.slow
def test_it_is_fine_tuned_with_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "BUILT_IN_RECORDS", 300)
    monkeypatch.setattr(sft, "HELD_OUT_RECORDS", 20)
    flags = ["--steps", "2", "--batch-size", "2", "--workers", "1", "--out", str(tmp_path / "sft"), "--card"]
    assert sft.main(["--base", str(MODEL), *flags]) == 0
    found = load(tmp_path / "sft", get_backend("numpy", "fp32", workers=1))
    assert found.meta["kind"] == "sft" and found.model.buffer.count == 260_032
    card = (tmp_path / "sft" / "README.md").read_text(encoding="utf-8")
    assert "python recipes/sft.py" in card and "recipes/pretrain.py" not in card
