"""What a corpus left out: every rule that fired, the documents, and the way back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.data.conftest import fault_of
from tests.data.test_corpus import prose, rows, write_source
from tinyforge.data.corpus import Settings, build_corpus
from tinyforge.data.dropped import count_rules, main, read_dropped
from tinyforge.data.local import make_source
from tinyforge.data.source import Document

MENU = "Home\nAbout\nNews\nLogin\n" * 8
LONG = "A heading of the page that is too long for its words\n\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = random.Random(0)
    text = prose(rng, 300)
    documents = [Document("good", text, "Good"), Document("menu", MENU), Document("short", "# # # # # A few words.")]
    documents += [Document("copy", text), Document("book", "x " * 2000 + prose(rng, 900))]
    source = write_source(tmp_path / "s", documents)
    build_corpus([source], tmp_path / "out", Settings(val_share=0.0, max_bytes=4096, boilerplate=0), workers=1)
    return tmp_path / "out"


def test_every_rule_that_fires_is_recorded_and_the_first_is_the_reason(corpus: Path) -> None:
    found = {id_: (dropped, rules) for id_, dropped, rules in rows(corpus, "id, dropped, rules")}
    assert found["good"] == (None, None) and found["copy"] == ("exact-duplicate", None)
    dropped, rules = found["short"]
    assert dropped == rules.split(",")[0] == "too-short" and {"symbols", "no-sentences"} <= set(rules.split(","))
    counts = {rule: (documents, alone) for rule, documents, alone, _ in count_rules(corpus)}
    assert counts["exact-duplicate"] == (1, 1)
    assert counts["too-short"] == (2, 0) and counts["symbols"][0] == 1
    assert {rule for rule, *_ in count_rules(corpus, "s")} == counts.keys() and count_rules(corpus, "other") == []


def test_dropped_documents_are_shown_and_restored(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(corpus)]) == 0
    assert "too-short" in capsys.readouterr().out
    assert main([str(corpus), "--rule", "symbols", "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "short" in shown and "too-short, few-letters, symbols" in shown and "# # # # # A few words." in shown
    back = tmp_path / "back.jsonl"
    assert main([str(corpus), "--rule", "repeated-phrases", "--restore", str(back)]) == 0
    made = make_source(tmp_path / "restored", [back])
    expected = {d.id: d.text for d in read_dropped(corpus, "repeated-phrases")}
    assert made.documents == len(expected) >= 2 and expected["menu"] == MENU
    assert any(id_.startswith("book#") and text.startswith("x x") for id_, text in expected.items())


def test_what_cannot_be_shown_is_refused(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there are" in fault_of(list, read_dropped(corpus, "language"))
    assert "need --rule" in fault_of(main, [str(corpus), "--show", "3"])
    both = ["--rule", "symbols", "--show", "3", "--restore", str(tmp_path / "back.jsonl")]
    assert "give one of the two" in fault_of(main, [str(corpus), *both])
    assert "--source t: no such source; " in fault_of(main, [str(corpus), "--source", "t"])
    capsys.readouterr()
    assert "no such file" in fault_of(main, [str(tmp_path / "s")]) and not capsys.readouterr().out
    write_source(tmp_path / "s", [Document("other", MENU)])
    assert "was made again" in fault_of(list, read_dropped(corpus, "too-short"))
