"""Two commands that write into one folder: the second is refused at once, and not when the first was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyforge.data import shards
from tinyforge.data.corpus import build_corpus
from tinyforge.data.local import make_source
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.recipes import pretrain

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = (
    "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=96 vocab=280 --batch-size 2 --workers 1 "
    "--data text.txt --out run --steps"
).split()
SHARDS = "--corpus corpus --out shards --vocab-size 280 --workers 1".split()


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def refused_while_the_first_writes(
    first: subprocess.Popen[bytes], there: Path, second: Callable[[], int], takes_less_than: Any
) -> None:
    """`there`: what appears once the first holds the folder."""

    def refused() -> None:
        with pytest.raises(UserError, match="another run is writing there; wait for it, or") as caught:
            second()
        assert "\n" not in str(caught.value)

    try:
        end = time.monotonic() + 60
        while not there.exists():
            assert first.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        takes_less_than(1.0, refused)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()


def test_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_less_than: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n".join(documents("train", 40)), encoding="utf-8")
    endless = start(f"from recipes import pretrain; pretrain.main({[*PRETRAIN, '1000000']})")
    metrics = Path("run/metrics.jsonl")
    refused_while_the_first_writes(endless, metrics, lambda: pretrain.main([*PRETRAIN, "1"]), takes_less_than)
    assert pretrain.main([*PRETRAIN, "1"]) == 0


def test_two_shards_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_less_than: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number, text in enumerate(documents("train", 60)):
        Path("texts", f"{number}.txt").write_text(text * 3, encoding="utf-8")
    source = make_source(Path("source"), [Path("texts")], "w")
    Path("none.sql").write_text("-- filter: none\n-- Nothing.\nSELECT false\n", encoding="utf-8")
    build_corpus([source.folder], Path("corpus"), filters=Path("none.sql"), workers=1)
    slow = "shards._encode = lambda *_: time.sleep(600)"  # with the tokenizer there, and no shard yet
    endless = start(f"import time; from data import shards; {slow}; shards.main({SHARDS})")
    refused_while_the_first_writes(endless, Path("shards/tokenizer.json"), lambda: shards.main(SHARDS), takes_less_than)
    assert shards.main(SHARDS) == 0 and not Path("shards/.lock").exists()
