"""The classifier of quality, bad words, and what is masked; alone, and in a corpus."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import fault_of
from tests.data.test_corpus import prose, rows, texts_of, write_source
from tinyforge.data import quality
from tinyforge.data.cleaning import masked
from tinyforge.data.corpus import Settings, build_corpus
from tinyforge.data.dedup import Words
from tinyforge.data.source import Document

GOOD = "The river rises in the hills, and the people of the valley have fished it for a thousand years of quiet work."
BAD = "Buy now and save on the best cheap deals, click here to win a free prize with your order today."


def sample(text: str, seed: int, count: int = 150) -> list[str]:
    """Texts of the words of one, and of words that both samples have."""
    rng, words = random.Random(seed), text.split()
    common = [f"word{n}" for n in range(200)]
    return [" ".join(rng.choice(words if rng.random() < 0.2 else common) for _ in range(60)) for _ in range(count)]


def write(path: Path, texts: list[str]) -> Path:
    path.mkdir()
    for index, text in enumerate(texts):
        (path / f"{index:03d}.txt").write_text(text)
    return path


def test_a_classifier_recognises_texts_that_it_has_not_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = write(tmp_path / "good", sample(GOOD, 0)), write(tmp_path / "bad", sample(BAD, 1, 600))
    out = tmp_path / "quality.npz"
    arguments = ["--good", str(good), "--bad", str(bad), "--out", str(out)]
    assert quality.main(arguments) == 0
    before = out.read_bytes()
    assert quality.main(arguments) == 0 and out.read_bytes() == before
    found = quality.load(out)
    unseen = [*sample(GOOD, 2, 40), *sample(BAD, 3, 40)]
    scores = found.scores(Words([*unseen, "", "nothing known"]))
    assert (scores[:40] > 0.5).sum() >= 37 and (scores[40:80] < 0.5).sum() >= 37
    assert np.isfinite(scores).all() and ((scores >= 0) & (scores <= 1)).all()
    # A score does not depend on the texts around it.
    assert found.scores(Words(unseen[5:6]))[0] == pytest.approx(scores[5], abs=1e-12)
    assert "600 texts; held out" in capsys.readouterr().out


def test_what_is_no_sample_or_no_classifier_is_refused(tmp_path: Path) -> None:
    few = write(tmp_path / "few", sample(GOOD, 0, 5))
    out = str(tmp_path / "q.npz")
    many = write(tmp_path / "many", sample(BAD, 1))
    assert "expected 100 or more" in fault_of(quality.main, ["--good", str(few), "--bad", str(many), "--out", out])
    same = write(tmp_path / "same", sample(GOOD, 0, 1) * 150)  # else each would be learned and held out
    assert "--good: 1 texts" in fault_of(quality.main, ["--good", str(same), "--bad", str(many), "--out", out])
    assert "share 150 texts" in fault_of(quality.main, ["--good", str(many), "--bad", str(many), "--out", out])
    for content in (b"", b"PK\3\4", b"\x93NUMPY"):
        (tmp_path / "x.npz").write_bytes(content)
        quality.load.cache_clear()
        assert "not a classifier" in fault_of(quality.load, tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", quality_weights=np.zeros(3, np.float32), bias=0.0)
    assert "not a classifier" in fault_of(quality.load, tmp_path / "y.npz")
    assert "no such file" in fault_of(quality.load, tmp_path / "z.npz")
    (tmp_path / "words.txt").write_text("# a comment\n\n")
    assert "has no words" in fault_of(quality.read_bad_words, tmp_path / "words.txt")


def test_bad_words_and_phrases_by_their_share(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("# a comment\nDarn\nheck of it\n")
    known = quality.read_bad_words(tmp_path / "words.txt")
    texts = ["a darn, DARN b", "the heck of it all", "heck of a darning it", ""]
    assert quality.bad_word_shares(Words(texts), known).tolist() == [0.5, 0.2, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to a.b+c@mail.example.org, please.", "Write to [EMAIL], please."),
        ("From 8.8.8.8 to 192.168.0.1 and version 1.2.3.4.5", "From [IP] to 192.168.0.1 and version 1.2.3.4.5"),
        ("Call +44 20 7946 0958 or (212) 555-0123.", "Call [PHONE] or [PHONE]."),
        ("1-800-555-0199; 212.555.0123", "[PHONE]; [PHONE]"),
        ("In 1914-1918, 3.14159, ISBN 978-3-16-148410-0, 2020-01-15, 1,234,567, 100-200-300", ""),
        (
            "Jürgen: jü@bücher.de, Version 4.2.1.1 and section 8.3.9.3",
            "Jürgen: [EMAIL], Version 4.2.1.1 and section 8.3.9.3",
        ),
        ("邮箱a@b.com或8.8.8.8，电话+86 10 6552 9988。", "邮箱[EMAIL]或[IP]，电话[PHONE]。"),
        ("x@y, @name, a@b.c1, pi@3.14, 10.5.2 and 300.1.2.3", ""),
    ],
)
def test_addresses_and_telephone_numbers_are_masked(text: str, expected: str) -> None:
    assert masked(text)[0] == (expected or text)


def test_a_hostile_text_is_masked_in_linear_time() -> None:
    for piece in ("a.", "1.", "+1 ", "1-", "a@", "(1", "a" * 63 + "."):
        masked(piece * (400_000 // len(piece)))


@pytest.mark.slow
def test_a_corpus_is_masked_and_filtered_when_asked_to(tmp_path: Path) -> None:
    rng = random.Random(0)
    text = [prose(rng, 120) for _ in range(5)]
    (tmp_path / "words.txt").write_text("darn\n")
    quality.save(quality.train(sample(GOOD, 0), sample(BAD, 1))[0], tmp_path / "q.npz")
    documents = [
        Document("mail", f"{text[0]} Write to someone@example.org or +44 20 7946 0958."),
        Document("bad", f"{text[1]} darn darn darn"),
        Document("one", f"{text[2]} " * 2 + "darn"),
        Document("spam", f"{BAD} {text[3]} {BAD.upper()}"),
        Document("fine", f"{GOOD} {text[4]} {GOOD.upper()}"),
    ]
    source = write_source(tmp_path / "s", documents)
    sql = tmp_path / "f.sql"
    sql.write_text("-- filter: bad-words\nbad_words > 0.005;\n-- filter: quality\nquality < 0.2;\n")
    for name, words in (("plain", None), ("asked", tmp_path / "words.txt")):
        settings = Settings(val_share=0.0, mask_pii=name == "asked")
        build_corpus([source], tmp_path / name, settings, sql, workers=1, bad_words=words)
    assert [reason for (reason,) in rows(tmp_path / "plain", "dropped")] == [None] * 5
    assert rows(tmp_path / "plain", "count(bad_words), count(quality)", "") == [(0, 0)]
    assert dict(rows(tmp_path / "asked", "id, dropped"))["bad"] == "bad-words"
    kept = texts_of(tmp_path / "asked", "train")["mail"]
    assert kept.endswith("Write to [EMAIL] or [PHONE].")
    assert "1 [EMAIL], 1 [PHONE]" in (tmp_path / "asked" / "report.md").read_text()
    build_corpus([source], tmp_path / "scored", Settings(val_share=0.0), sql, workers=1, quality=tmp_path / "q.npz")
    scores = dict(rows(tmp_path / "scored", "id, quality"))
    assert scores["spam"] < scores["mail"] < scores["fine"]
