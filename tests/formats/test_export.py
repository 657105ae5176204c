"""A model to give away: its weights and its card."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.data import training
from tinyforge.errors import UserError
from tinyforge.formats import convert, load
from tinyforge.recipes import pretrain, sft

TINY = ["--set", "dim=16", "heads=2", "kv_heads=1", "layers=1", "hidden=8", "context=64", "vocab=300"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained and a fine-tuned run of a few steps, and the fine-tuned one exported to `small`."""
    path = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "BUILT_IN_DOCUMENTS", 400)  # of 40,000: a tenth of a second instead of ten
        patch.setattr(training, "HELD_OUT_DOCUMENTS", 20)
        patch.setattr(sft, "BUILT_IN_RECORDS", 300)
        make_runs(path)
    return path


def make_runs(path: Path) -> None:
    common = ["--steps", "3", "--batch-size", "2", "--workers", "1", "--seed", "7"]
    assert pretrain.main([*TINY, *common, "--out", str(path / "pretrain")]) == 0
    assert sft.main([*common, "--base", str(path / "pretrain"), "--out", str(path / "sft"), "--card"]) == 0
    give_away(path / "sft", path / "small")


def give_away(run: Path, out: Path) -> None:
    assert convert.main([str(run), str(out), "--format", "tinyforge", "--dtype", "bf16"]) == 0


def test_the_weights_are_those_of_the_run_rounded(runs: Path) -> None:
    exact, rounded = (checkpoint.load(runs / name).weights for name in ("sft", "small"))
    assert exact.keys() == rounded.keys()
    for name, value in exact.items():
        assert rounded[name].dtype == np.float32
        assert np.all(np.abs(rounded[name] - value) <= np.abs(value) * 2**-8)
        assert not rounded[name].view(np.uint32).astype(np.uint32).__and__(0xFFFF).any()
    full = (checkpoint.latest(runs / "sft") / "model.safetensors").stat().st_size
    assert (runs / "small" / "model.safetensors").stat().st_size < 0.6 * full
    assert not (runs / "small" / "optimizer.safetensors").exists()
    assert load(runs / "small", get_backend("numpy", "fp32", workers=1)).meta["kind"] == "sft"


def test_the_card_tells_the_run(runs: Path) -> None:
    text = (runs / "small" / "README.md").read_text()
    assert text.startswith("---\nlicense: mit\n")
    assert "python recipes/pretrain.py --steps 3 --batch-size 2" in text and "--set dim=16" in text
    assert "python recipes/sft.py" in text and "--lr 0.002" in text and "--mix" not in text
    for step in ("pretrain", "sft"):
        digest = checkpoint.load(runs / step).meta["data_hash"]
        assert f"seed 7, data SHA-256 `{digest[:16]}`" in text
    assert re.search(r"\| exact match, all \| \d+\.\d% \|", text)
    assert "small world of `data/world.py`" in text
    assert str(runs) not in text


def test_the_card_may_be_edited(runs: Path, tmp_path: Path) -> None:
    given = shutil.copytree(runs / "small", tmp_path / "given")
    (given / "README.md").write_text("# Ours\n", encoding="utf-8")
    assert checkpoint.load(given).meta["kind"] == "sft"
    (given / "README.md").unlink()
    assert checkpoint.load(given).weights.keys() == checkpoint.load(runs / "small").weights.keys()


def test_a_folder_that_is_there_is_not_replaced(runs: Path) -> None:
    with pytest.raises(UserError, match="small exists already; remove it, or choose another name"):
        give_away(runs / "sft", runs / "small")


def test_it_cannot_be_trained_on(runs: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*optimizer\.safetensors"):
        checkpoint.load(runs / "small").optimizer()
