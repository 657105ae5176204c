"""All the real text at hand, and much that is no text: the ids of the compiled tokenizers, and the same bytes back.

These take minutes, so they are marked slow.
"""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizers.test_bpe import GPT2, reference_merges, tiktoken_gpt2
from tests.tokenizers.test_pieces import assigned_text, split_all
from tinyforge.data.gutenberg import find_entries
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.pieces import to_utf8

pytestmark = pytest.mark.slow
SHARED = GPT2.parent


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.from_gpt2(shared("gpt2/encoder.json"), shared("gpt2/vocab.bpe"))


@pytest.fixture(scope="module")
def theirs(gpt2: Tokenizer) -> Any:
    return tiktoken_gpt2()


def books() -> Iterator[str]:
    for entry in find_entries(shared("gutenberg.zip")):
        yield entry.read().decode("utf-8", "replace")  # as published, with its licence and its line ends


def web() -> Iterator[str]:
    duckdb = pytest.importorskip("duckdb")
    files = str(shared("web") / "*.parquet")
    for (text,) in duckdb.connect().execute("select text from read_parquet(?)", [files]).fetchall():
        yield text


def instructions() -> Iterator[str]:
    with zipfile.ZipFile(shared("instruct/alpaca.zip")) as archive:
        for name in archive.namelist():
            text = archive.read(name).decode()
            yield text
            for record in json.loads(text):
                yield from record.values()


def preferences() -> Iterator[str]:
    yield shared("preference/pairs.json").read_text(encoding="utf-8")


def shakespeare() -> Iterator[str]:
    yield shared("shakespeare/input.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("source", [books, web, instructions, preferences, shakespeare])
def test_gpt2_ids_over_real_text(source: Any, gpt2: Tokenizer, theirs: Any) -> None:
    texts = list(source())
    assert texts
    for text, ids in zip(texts, gpt2.encode_many(texts), strict=True):
        assert ids.tolist() == theirs.encode_ordinary(text)
        assert gpt2.decode_bytes(ids.tolist()) == text.encode()


def test_gpt2_ids_of_ten_thousand_random_strings(gpt2: Tokenizer, theirs: Any) -> None:
    rng = random.Random(20)
    texts = [assigned_text(rng, rng.randrange(1, 200)) for _ in range(10_000)]
    expected = [theirs.encode_ordinary(text) for text in texts]
    assert [gpt2.encode(text) for text in texts] == expected
    assert [ids.tolist() for ids in gpt2.encode_many(texts)] == expected
    assert [gpt2.decode(ids) for ids in expected] == texts


def test_gpt2_ids_of_random_bytes(gpt2: Tokenizer, theirs: Any) -> None:
    """tiktoken encodes text only: bytes are compared piece by piece."""
    rng = random.Random(21)
    for _ in range(2000):
        data = rng.randbytes(rng.randrange(200))
        ids = gpt2.encode_bytes(data)
        pieces = map(to_utf8, split_all(data.decode("utf-8", "surrogateescape")))
        assert ids == [id for piece in pieces for id in theirs._encode_single_piece(piece)]
        assert gpt2.decode_bytes(ids) == data


def test_training_on_a_book_equals_the_textbook_trainer() -> None:
    sample = next(book for book in books() if len(book) > 400_000)[100_000:300_000]
    assert Tokenizer.train([sample], 1000, progress=False).merges == reference_merges(sample, 1000 - 258)
