"""A tokenizer of characters: ids as nanoGPT's shakespeare_char has them, and nothing it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tinyforge.errors import UserError
from tinyforge.tokenizers import CharTokenizer, Tokenizer, load_tokenizer

TEXTS = ["First Citizen:\nBefore we proceed", "caf\u00e9 \U0001f600!", "\0\uffff"]
TOKENIZER = CharTokenizer.of(TEXTS, ["<|endoftext|>", "</s>"])


def test_ids_are_the_sorted_characters() -> None:
    """data/shakespeare_char/prepare.py: stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}."""
    places = {character: i for i, character in enumerate(sorted(set("".join(TEXTS))))}
    for text in TEXTS:
        assert TOKENIZER.encode(text) == [places[character] for character in text]
    assert TOKENIZER.vocab_size == len(places) + 2
    assert TOKENIZER.specials == {"<|endoftext|>": len(places), "</s>": len(places) + 1}


def test_text_comes_back() -> None:
    assert [TOKENIZER.decode(TOKENIZER.encode(text)) for text in TEXTS] == TEXTS
    many = list(TOKENIZER.encode_many([*TEXTS, ""]))
    assert [ids.tolist() for ids in many] == [*map(TOKENIZER.encode, TEXTS), []]
    assert {ids.dtype for ids in many} == {np.dtype(np.uint16)}


def test_bytes_are_counted_as_utf_8() -> None:
    for text in TEXTS:
        assert TOKENIZER.byte_lengths[TOKENIZER.encode(text)].sum() == len(text.encode())
    assert TOKENIZER.byte_lengths[list(TOKENIZER.specials.values())].tolist() == [0, 0]


@pytest.mark.parametrize("text", ["Q", "caf\u00ea", "\U0001f601", "<|endoftext|>"])
def test_an_unknown_character_is_one_line(text: str) -> None:
    """A special token's text is ten ordinary characters, of which some are not known here."""
    with pytest.raises(UserError, match="is none of the tokenizer's .* characters; leave it out, or"):
        TOKENIZER.encode(text)


def test_it_is_saved_and_found_again(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(again, CharTokenizer) and again.hash() == TOKENIZER.hash()
    assert again.encode(TEXTS[1]) == TOKENIZER.encode(TEXTS[1])
    assert CharTokenizer.of(TEXTS).hash() != TOKENIZER.hash() != Tokenizer([], ["<|endoftext|>", "</s>"]).hash()


@pytest.mark.parametrize(
    "damage", [{"characters": []}, {"characters": ["ab"]}, {"characters": [1]}, {"specials": None}, {"version": 2}]
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | damage), encoding="utf-8")
    with pytest.raises(UserError, match="tokenizer.json is not a character tokenizer; the file is damaged"):
        load_tokenizer(path)
