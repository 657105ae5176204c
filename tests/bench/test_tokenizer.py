"""The benchmark of the tokenizer times nothing before all ids are equal, and says what it found."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench import tokenizer as bench
from tinyforge.errors import UserError
from tinyforge.tokenizers import Tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("tiktoken")

START, END = "*** START OF THE PROJECT GUTENBERG EBOOK X ***", "*** END OF THE PROJECT GUTENBERG EBOOK X ***"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 9))) for _ in range(300)]
    body = "\n".join(" ".join(rng.choices(words, k=10)) for _ in range(60))
    path = tmp_path / "1.txt"
    path.write_text(f"Title: X\n\n{START}\n\n{body}\n\n{END}\nlicence\n", encoding="utf-8")
    return path


@pytest.mark.slow
def test_it_times_every_contender_and_writes_one_json_object(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([str(book), "--vocab-size", "400", "--rounds", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.rstrip("\n") == "\n".join(bench.table(found))
    (text,) = bench.read_texts([book])
    assert found["texts"] == 1 and found["bytes"] == len(text) < book.stat().st_size
    assert found["tokens"] == len(Tokenizer.train([text], 400, progress=False).encode(text))
    assert set(found["parity"].values()) == {True}
    for result in found["results"].values():
        assert len(result["seconds"]) == 2 and result["min_s"] == min(result["seconds"]) > 0
        assert result["mb_per_second"] == pytest.approx(found["bytes"] / result["min_s"] / 1e6)
    seconds = {name: result["min_s"] for name, result in found["results"].items()}
    ratio = found["ratios"]["encoding rate: tinyforge, 1 process / tiktoken"]
    assert ratio == pytest.approx(seconds[bench.TIKTOKEN] / seconds[bench.ENCODE])


def test_other_ids_are_not_timed(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.tiktoken_encoding
    monkeypatch.setattr(bench, "tiktoken_encoding", lambda tokenizer: right(Tokenizer(tokenizer.merges[:-5], [])))
    with pytest.raises(RuntimeError, match="parity: the ids are not equal"):
        bench.measure(bench.read_texts([book]), 400, 1)


def test_faults_are_said_before_the_work(tmp_path: Path, book: Path) -> None:
    for argv, expected in [
        ([str(tmp_path / "none.zip")], "none.zip"),
        ([str(book), "--rounds", "0"], "--rounds is 0, expected 1 or more"),
        ([str(book), "--json", str(tmp_path / "no" / "x")], "in a folder that does not exist"),
    ]:
        with pytest.raises(UserError, match=expected):
            bench.main(argv)
    book.write_text("no markers")
    with pytest.raises(UserError, match="no book there"):
        bench.main([str(book)])
