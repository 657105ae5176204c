"""Single sentences of a corpus: of its training text alone, each once, and a source like any other."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.data.conftest import contents, fault_of
from tests.data.test_corpus import prose, texts_of, write_source
from tinyforge.data.corpus import Settings, build_corpus
from tinyforge.data.sentences import FILTERS, main, make_source, sentences_of
from tinyforge.data.source import Document

TEXT = """THE SECRET GARDEN

When Mary was sent to the old manor to live with her dear
uncle, nobody knew. It was true, too. “Where is Mr. Darcy now?” said she. “I do not know at all.” J. R. Smith came late!
Contents
Yes. Is it so, he said? MY DEAR SIR, WHO ELSE. No one knew that
"""


def test_a_sentence_is_whole_and_of_a_length_to_learn_from() -> None:
    assert list(sentences_of(TEXT)) == [
        "When Mary was sent to the old manor to live with her dear uncle, nobody knew.",
        "It was true, too.",
        "I do not know at all.",
        "J. R. Smith came late!",
        "Is it so, he said?",
    ]
    assert not [*sentences_of(f"{'Too ' * 41}long. " * 3), *sentences_of(""), *sentences_of(" \n\n")]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("‘Go home to bed,’ he said. So she went _home_ again.", ["So she went home again."]),
        (
            "He came late (by bus vs. Bob's car). It was dark (Nobody had a lamp.",
            ["He came late (by bus vs. Bob's car)."],
        ),
        ("Она пришла очень поздно. Это было в среду.", ["Она пришла очень поздно.", "Это было в среду."]),
        ("École was over at noon.\r\nÉmile left us then.  \r\n", ["École was over at noon.", "Émile left us then."]),
        ("She has birds, e.g. Owls, and Martin Jr. too.", ["She has birds, e.g. Owls, and Martin Jr. too."]),
    ],
)
def test_what_a_sentence_is(text: str, sentences: list[str]) -> None:
    assert list(sentences_of(text)) == sentences


def test_a_long_text_takes_time_by_its_length_alone() -> None:
    """A paragraph of a million characters without a stop, and five million in lines that all go on."""
    begun = time.monotonic()
    assert not [*sentences_of("word " * 200_000), *sentences_of(f"{'word ' * 13}and\n" * 70_000)]
    assert time.monotonic() - begun < 5  # 0.3 s; 12 where each line copied those before it


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = random.Random(0)

    def text() -> str:
        return f"{' '.join(f'{prose(rng, 12).strip().capitalize()}.' for _ in range(12))}\nThis one is everywhere.\n"

    for name in ("web", "books"):
        write_source(tmp_path / name, [Document(f"{name}{number}", text()) for number in range(60)])
    build_corpus([tmp_path / "web", tmp_path / "books"], tmp_path / "corpus", Settings(val_share=0.2), workers=1)
    return tmp_path / "corpus"


def test_sentences_are_of_the_training_text_and_each_occurs_once(corpus: Path, tmp_path: Path) -> None:
    source = make_source(tmp_path / "out", corpus, {"books": 10**9, "web": 5_000})
    whole = Settings(val_share=0.0, boilerplate=0, similarity=1.0)
    build_corpus([source.folder], tmp_path / "made", whole, filters=FILTERS, workers=1)
    made = list(texts_of(tmp_path / "made", "train").values())
    assert len(made) == len(set(made)) == source.documents and "This one is everywhere." in made

    def of(split: str, name: str) -> set[str]:
        texts = texts_of(corpus, split).items()
        return {sentence for id_, text in texts if id_.startswith(name) for sentence in sentences_of(text)}

    train, unseen = {name: of("train", name) for name in ("web", "books")}, of("val", "web") | of("val", "books")
    assert train["books"] <= set(made) <= train["web"] | train["books"]
    assert unseen and not unseen & set(made) - {"This one is everywhere."}
    taken = sum(len(text.encode()) for text in set(made) & train["web"] - train["books"])
    assert 4_000 < taken < 8_000  # about what was asked for


def test_a_small_part_of_few_long_documents_has_sentences(tmp_path: Path) -> None:
    rng = random.Random(1)
    long = (" ".join(f"{prose(rng, 12).strip().capitalize()}." for _ in range(400)) for _ in range(4))
    write_source(tmp_path / "web", [Document(str(number), text) for number, text in enumerate(long)])
    build_corpus([tmp_path / "web"], tmp_path / "corpus", Settings(val_share=0.0), workers=1)
    assert make_source(tmp_path / "out", tmp_path / "corpus", {"web": 100}).bytes >= 100


def test_the_same_corpus_has_the_same_sentences(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(corpus), "books=20KB", "web=9999"]
    for name in ("once", "again"):
        assert main([*command, "--out", str(tmp_path / name)]) == 0
    assert f"sentences.sql --val-share 0 --out {tmp_path / 'again'}-corpus" in capsys.readouterr().out
    once, again = (contents(tmp_path / name) for name in ("once", "again"))
    assert {name: data for name, data in once.items() if name.endswith(".parquet")} == {
        name: data for name, data in again.items() if name.endswith(".parquet")
    }


def test_what_is_no_corpus_or_no_source_is_refused(corpus: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert "no source 'wiki' in it; it has " in fault_of(main, [str(corpus), "wiki=1MB", *out])
    assert "is a source; make a corpus of it" in fault_of(main, [str(tmp_path / "web"), "web=1MB", *out])
    assert "expected a source of the corpus and bytes" in fault_of(main, [str(corpus), "web", *out])
    assert "web is 'much', expected bytes" in fault_of(main, [str(corpus), "web=much", *out])
    assert "expected each source once" in fault_of(main, [str(corpus), "web=1MB", "web=2MB", *out])
    assert "the corpus itself" in fault_of(main, [str(corpus), "web=1MB", "--out", str(tmp_path / "x/../corpus")])
    assert not (tmp_path / "out").exists()
    write_source(tmp_path / "web", [Document(str(n), f"the and of to be {n} " * 40) for n in range(9)])
    bare = tmp_path / "bare"
    settings = Settings(val_share=0.0, boilerplate=0)
    build_corpus([tmp_path / "web"], bare, settings, filters=FILTERS, workers=1)
    assert "no sentence in the training text of web" in fault_of(main, [str(bare), "web=1MB", *out])
