"""WordPiece: against Hugging Face's tokenizers, its files, its training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.tokenizers import WordPiece, load_tokenizer
from tinyforge.tokenizers.huggingface import to_huggingface
from tinyforge.tokenizers.wordpiece import CLS, MASK, PAD, PREFIX, SEP, SPECIALS, UNK, words_of

TEXTS = list(documents("train", 200))
STRANGE = (
    "Caf\xe9 na\xefve \xc5ngstr\xf6m \u0130stanbul \u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03a3",
    "a\tb\r\nc\x0bd\x85e\u2003f\u200bg\xadh\ufffdi\x00j",
    "\u4e2d\u6587 and \u65e5\u672c\u8a9e\u3002 \U00020000x",
    "$5.00+3=8 <a>~`^|",
    "don't stop\u2014now\u2026 \u201cquoted\u201d \xbfqu\xe9?",
    "x" * 101 + " " + "y" * 100,
    "e\u0301 A\u030a \u0e01\u0e34\u0e19",
    "\ufb01ne \u212bngstrom \uff21\uff22",
    "",
    "   ",
    "[MASK] [CLS] [unused1]",
    "\U0001f600 smile \u20ac10",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
)


@pytest.fixture(scope="module", params=[True, False], ids=["lower", "cased"])
def tokenizer(request: pytest.FixtureRequest) -> WordPiece:
    return WordPiece.train([*TEXTS, *STRANGE * 3], 700, lower=request.param)


@pytest.fixture(scope="module")
def peer(tokenizer: WordPiece) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="the peer is Hugging Face's tokenizers")
    return tokenizers.Tokenizer.from_str(json.dumps(to_huggingface(tokenizer)))


def test_ids_are_those_of_tokenizers(tokenizer: WordPiece, peer: Any) -> None:
    peer.encode_special_tokens = True  # text that spells a special token is text here
    for text in (*TEXTS, *STRANGE):
        assert tokenizer.encode(text) == peer.encode(text, add_special_tokens=False).ids, text


def test_random_text_is_cut_alike(tokenizer: WordPiece, peer: Any) -> None:
    peer.encode_special_tokens = True
    rng = random.Random(0)
    blocks = ((0, 0x250), (0x370, 0x530), (0x2000, 0x2070), (0x4E00, 0x4E20))
    alphabet = [chr(code) for block in blocks for code in range(*block)]
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=40))
        assert tokenizer.encode(text) == peer.encode(text, add_special_tokens=False).ids, ascii(text)


def test_a_pair_has_the_ids_that_bert_reads(tokenizer: WordPiece, peer: Any) -> None:
    found = peer.encode("the cat", "sat here")
    first, second = tokenizer.encode("the cat"), tokenizer.encode("sat here")
    cls, sep = tokenizer.specials[CLS], tokenizer.specials[SEP]
    assert found.ids == [cls, *first, sep, *second, sep]
    assert found.type_ids == [0] * (len(first) + 2) + [1] * (len(second) + 1)


def test_files_give_the_same_ids(tokenizer: WordPiece, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "ours.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps(to_huggingface(tokenizer)), encoding="utf-8")
    (tmp_path / "vocab.txt").write_text("\n".join(tokenizer.tokens) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": tokenizer.lower}))
    for name in ("ours.json", "tokenizer.json", "vocab.txt"):
        again = load_tokenizer(tmp_path / name)
        assert again.hash() == tokenizer.hash() and again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0]), name
        assert again.specials == {special: i for i, special in enumerate(SPECIALS)}


def test_words_become_the_longest_pieces() -> None:
    tokens = [*SPECIALS, "un", "a", "affable", "##aff", "##affa", "##able", "##ble", "##b", "."]
    tokenizer = WordPiece(tokens)
    spelt = [tokens[id] for id in tokenizer.encode("Unaffable. unknown affable")]
    assert spelt == ["un", "##affa", "##ble", ".", UNK, "affable"]
    assert tokenizer.decode(tokenizer.encode("unaffable.")) == "unaffable ."
    assert tokenizer.byte_lengths[tokenizer.specials[PAD]] == 0


def test_training_keeps_characters_and_frequent_pieces() -> None:
    tokenizer = WordPiece.train(["low lower lowest newer newest"] * 50, 40)
    assert len(tokenizer.tokens) <= 40 and {"low", "l", "##w", "##st"} <= set(tokenizer.tokens)
    assert tokenizer.tokens[:5] == [PAD, UNK, CLS, SEP, MASK]
    assert WordPiece.train(["low lower"] * 5, 30).hash() == WordPiece.train(["low lower"] * 5, 30).hash()
    # Words that are not in the text, of characters that are: s begins no word there.
    assert all(tokenizer.specials["[UNK]"] not in tokenizer.encode(word) for word in ("nest", "lest", "lor"))
    assert tokenizer.encode("slow") == [tokenizer.specials["[UNK]"]]
    assert any(token.startswith(PREFIX) for token in tokenizer.tokens)


def test_words_are_cut_at_signs_and_spaces() -> None:
    assert words_of("Don't, na\xefve\u4e2dx", lower=True) == ["don", "'", "t", ",", "naive", "\u4e2d", "x"]
    assert words_of("Don't, na\xefve", lower=False) == ["Don", "'", "t", ",", "na\xefve"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", "lacks [MASK]"),
        ("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nthe\n", "has a token twice"),
        ("tokenizer.json", '{"format": "tinyforge-wordpiece", "version": 1, "tokens": [3], "lower": true}', "damaged"),
        ("tokenizer.json", '{"model": {"type": "WordPiece", "vocab": {"a": 1}}}', "expected a BertNormalizer"),
        ("tokenizer.json", '{"model": {"type": "WordPiece", "unk_token": "?"}}', "got model.unk_token '?'"),
    ],
)
def test_a_faulty_file_is_one_line(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path / name)
    assert name in str(caught.value) and said in str(caught.value) and "\n" not in str(caught.value)


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="vocabulary too small for the characters: got vocab_size 6"):
        WordPiece.train(["abc"] * 9, 6)
    with pytest.raises(UserError, match="no text"):
        WordPiece.train([" "], 60)
