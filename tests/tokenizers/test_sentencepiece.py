"""SentencePiece BPE against the `sentencepiece` package, and llama2.c's file against its own algorithm."""

from __future__ import annotations

import io
import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tokenizers.conftest import ENGLISH, user_error
from tests.tokenizers.test_bpe import generated_text
from tests.tokenizers.test_pieces import random_unicode
from tinyforge.errors import UserError
from tinyforge.tokenizers import SentencePiece, load_tokenizer, pieces, sentencepiece
from tinyforge.tokenizers.chat_templates import TEMPLATES
from tinyforge.tokenizers.sentencepiece import BYTES, SPACE, Spaces, protobuf, read_llama2c, read_model, write_llama2c

TOK512 = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "llama2c" / "tok512.bin"
SPECIALS = {"<unk>": 0, "<s>": 1, "</s>": 2}

# The options of the trainer that change what is done with spaces, and which pieces there are.
KINDS: dict[str, dict[str, Any]] = {
    "as Llama": {},
    "spaces collapsed": {"remove_extra_whitespaces": True},
    "no prefix": {"add_dummy_prefix": False},
    "pieces across words": {"split_by_whitespace": False, "max_sentencepiece_length": 30},
    "rare characters left out": {"character_coverage": 0.98},
}


def train(path: Path, **options: Any) -> Any:
    """A model of the real package, written to `path`."""
    spm = pytest.importorskip("sentencepiece")
    text = generated_text(60_000, seed=5) + "\n  two  spaces   three\n" * 50
    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": 600,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    spm.SentencePieceTrainer.train(sentence_iterator=iter(text.split("\n")), model_writer=model, **(settings | options))
    path.write_bytes(model.getvalue())
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, SentencePiece]:
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    return train(path, **KINDS[request.param]), read_model(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, SentencePiece]:
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    return train(path), read_model(path)


def strings(count: int, seed: int) -> list[str]:
    """Words of the training text and what could be mistaken, with any number of spaces, and random Unicode."""
    rng = random.Random(seed)
    odd = [SPACE, 2 * SPACE, "\n", "\t", "\0", "\x1f", "\x7f", "\u00a0", "\ufeff", "\u0301", "👍🏽"]
    odd += ["中文", "é", "e\u0301", "👩‍👩‍👧", "<s>", "</s>", "<unk>", "<0x41>", "<0x0A>", "1999", "\U0010ffff"]
    words = generated_text(3000, seed=6).split() * 2 + odd * 5
    made = ["", " ", "   ", SPACE, " " + SPACE, "a", "ka" * 3000]
    while len(made) < count:
        if rng.random() < 0.3:
            text = random_unicode(rng, rng.randrange(30))
        else:
            text = "".join(rng.choice(words) + rng.choice(["", " ", " ", "  ", "\n"]) for _ in range(rng.randrange(15)))
        made.append(rng.choice(["", "", " ", "   "]) + text + rng.choice(["", "", " ", "  "]))
    return made


def test_ids_and_text_equal_sentencepiece(pair: tuple[Any, SentencePiece]) -> None:
    theirs, ours = pair
    assert ours.vocab_size == theirs.get_piece_size() and ours.specials == SPECIALS and ours.bos == theirs.bos_id()
    for text in strings(1000, seed=1):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    whole = "\n".join(strings(200, seed=2))
    assert ours.encode(whole) == theirs.encode(whole)


def test_a_long_run_without_a_space_is_not_quadratic(llama: tuple[Any, SentencePiece]) -> None:
    theirs, ours = llama
    letters = "".join(random.Random(7).choices("katorish", k=200_000))
    assert ours.encode(letters) == theirs.encode(letters)


def test_many_texts_on_all_cores(llama: tuple[Any, SentencePiece], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "BATCH", 50_000)
    _, ours = llama
    texts = strings(300, seed=3) + [generated_text(90_000, seed) for seed in range(6)]
    expected = [ours.encode(text) for text in texts]
    for workers in (1, 2):
        arrays = list(ours.encode_many(texts, workers))
        assert all(array.dtype == np.uint16 for array in arrays)
        assert [array.tolist() for array in arrays] == expected


def test_the_memory_of_words_begins_anew(llama: tuple[Any, SentencePiece], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = llama
    text = generated_text(20_000, seed=8)
    ours._words.clear()
    assert ours.encode(text) == theirs.encode(text)
    remembered = len(ours._words)
    monkeypatch.setattr(sentencepiece, "CACHED_CHARACTERS", 200)
    ours._words.clear()
    ours._words.room = 0
    assert ours.encode(text) == theirs.encode(text)
    assert len(ours._words) < 20 < remembered


def test_lengths_specials_and_raw_bytes(llama: tuple[Any, SentencePiece]) -> None:
    _, ours = llama
    for text in strings(200, seed=4):
        ids = ours.encode(text)
        assert not set(ids) & set(SPECIALS.values())  # also for a text that spells them
        assert ours.byte_lengths[ids].sum() == len(text.replace(SPACE, " ").encode()) + bool(text)
    assert ours.byte_lengths[[0, 1, 2]].tolist() == [0, 0, 0]
    data = bytes(range(256))
    assert ours.decode_bytes(ours.encode(data.decode("utf-8", "surrogateescape"))) == data
    assert ours.decode(ours.encode("a\ud83d\udcff")) == "a\ufffd\ufffd"
    with pytest.raises(UserError, match="token id 9999 is not in the vocabulary"):
        ours.decode([5, 9999])


def test_the_space_before_a_text(llama: tuple[Any, SentencePiece]) -> None:
    _, ours = llama
    start, middle = ours.encode("the"), ours.encode("the", "text")
    assert start == ours.encode("the", "special") == ours.encode(" the", "text") != middle
    assert ours.decode(start) == ours.decode(middle) == ours.decode(middle, "text") == "the"
    assert ours.decode(start, "text") == " the"
    assert ours.decode([1, *start]) == "<s>the" and ours.decode([]) == ""
    # In a chat: after a special token there is a space, in the middle of text there is none.
    ids = TEMPLATES["zephyr"].encode(ours, [("the", "the"), ("the", None)])
    eos = SPECIALS["</s>"]
    after_reply = [eos, *ours.encode("\n<|user|>\nthe"), eos, *ours.encode("\n<|assistant|>\n")]
    expected = [1, *ours.encode("<|user|>\nthe"), eos, *ours.encode("\n<|assistant|>\n"), *middle, *after_reply]
    assert ids == expected


# --- files


def test_save_and_load(pair: tuple[Any, SentencePiece], tmp_path: Path) -> None:
    _, ours = pair
    path = tmp_path / "tokenizer.json"
    ours.save(path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, SentencePiece) and again.hash() == ours.hash() and again.spaces == ours.spaces
    for text in strings(100, seed=5):
        assert again.encode(text) == ours.encode(text)
    first = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == first


def tiny(texts: list[str], scores: list[float] | None = None, **options: Any) -> SentencePiece:
    every = ["<unk>", "<s>", "</s>", *BYTES, *texts]
    return SentencePiece(
        every, SPECIALS, 1, scores=[0.0] * 259 + (scores or [-float(i) for i in range(len(texts))]), **options
    )


def test_hash_sees_all_that_decides_the_ids() -> None:
    variants = [
        tiny(["a", "b", "ab"]),
        tiny(["a", "b", "ba"]),
        tiny(["a", "b", "ab"], [-1.0, -2.0, -3.5]),
        tiny(["a", "b", "ab"], spaces=Spaces(prefix="never")),
        SentencePiece(["<unk>", "<s>", "</s>", *BYTES, "a", "b", "ab"], SPECIALS, None, merges=[(259, 260)]),
        SentencePiece(["<unk>", "<s>", "</s>", *BYTES, "a", "b", "ab"], SPECIALS, 1, merges=[(259, 260)]),
    ]
    assert len({variant.hash() for variant in variants}) == len(variants)
    assert variants[0].hash() == tiny(["a", "b", "ab"]).hash()


def test_merges_by_pairs_survive_saving(tmp_path: Path) -> None:
    every = ["<unk>", "<s>", "</s>", *BYTES, SPACE, "a", "aa", "aaa"]
    made = SentencePiece(every, SPECIALS, 1, merges=[(260, 260), (260, 261)], spaces=Spaces(prefix="first"))
    assert made.encode("aaaa", "text") == [261, 261] and made.encode("aaa", "text") == [261, 260]
    made.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.hash() == made.hash() and again.encode("aaa") == [259, 261, 260]


def llama2c_encode(data: bytes, text: str) -> list[int]:
    """As run.c of llama2.c: the best pair of neighbours again and again, with the vocabulary as the file has it."""
    vocab, scores, at = [], [], 4
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        vocab.append(data[at + 8 : at + 8 + length])
        scores.append(score)
        at += 8 + length
    ids = {token: id for id, token in reversed(list(enumerate(vocab)))}
    tokens = [ids[b" "]] if text else []
    for character in text:
        spelt = character.encode()
        tokens += [ids[spelt]] if spelt in ids else [byte + 3 for byte in spelt]
    while True:
        pairs = [(vocab[a] + vocab[b], i) for i, (a, b) in enumerate(zip(tokens, tokens[1:], strict=False))]
        best = max(((scores[ids[joint]], -i) for joint, i in pairs if joint in ids), default=None)
        if best is None:
            return tokens
        at = -best[1]
        tokens[at : at + 2] = [ids[vocab[tokens[at]] + vocab[tokens[at + 1]]]]


def test_tok512_of_llama2c(tmp_path: Path) -> None:
    if not TOK512.exists():
        pytest.skip(f"{TOK512} is not on this machine")
    tokenizer = read_llama2c(TOK512)
    assert tokenizer.vocab_size == 512 and tokenizer.specials == SPECIALS and tokenizer.bos == 1
    assert tokenizer.encode("Once upon a time") == [403, 407, 261, 378]
    data = TOK512.read_bytes()
    for text in [*strings(400, seed=9), "Lily's mom said, \"Let's go to the park.\"\n"]:
        if SPACE not in text and len(text) < 1000:  # run.c knows no U+2581
            ids = tokenizer.encode(text)
            assert ids == llama2c_encode(data, text)
            assert tokenizer.decode(ids) == text
    write_llama2c(tokenizer, tmp_path / "again.bin")
    assert (tmp_path / "again.bin").read_bytes() == data
    assert load_tokenizer(tmp_path / "again.bin").hash() == tokenizer.hash()


def test_llama2c_file_of_a_trained_model(llama: tuple[Any, SentencePiece], tmp_path: Path) -> None:
    theirs, ours = llama
    path = tmp_path / "tokenizer.bin"
    write_llama2c(ours, path)
    data = path.read_bytes()
    # As llama2.c's own tokenizer.py exports it.
    tokens = [theirs.id_to_piece(id).replace(SPACE, " ").encode() for id in range(theirs.get_piece_size())]
    tokens[1], tokens[2] = b"\n<s>\n", b"\n</s>\n"
    expected = struct.pack("I", max(map(len, tokens)))
    for id, token in enumerate(tokens):
        expected += struct.pack("fI", theirs.get_score(id), len(token)) + token
    assert data == expected
    again = read_llama2c(path)
    for text in strings(200, seed=10):
        assert again.encode(text) == theirs.encode(text)
    assert again.hash() == ours.hash()


def test_what_llama2c_cannot_hold(tmp_path: Path) -> None:
    merges = SentencePiece(["<unk>", "<s>", "</s>", *BYTES, "a", "aa"], SPECIALS, 1, merges=[(259, 259)])
    path = tmp_path / "tokenizer.bin"
    for tokenizer in (merges, tiny(["a"], spaces=Spaces(collapsed=True))):
        assert "llama2.c's format has" in user_error(lambda t=tokenizer: write_llama2c(t, path))
        assert not path.exists()
    assert "No such file" in user_error(lambda: write_llama2c(tiny(["a"]), tmp_path / "no" / "tokenizer.bin"))


def entry(token: bytes, score: float = 0.0, length: int | None = None) -> bytes:
    return struct.pack("<fi", score, len(token) if length is None else length) + token


HEAD = struct.pack("<i", 7) + b"".join(map(entry, [b"<unk>", b"\n<s>\n", b"\n</s>\n"]))
GOOD = HEAD + b"".join(entry(byte.encode()) for byte in BYTES)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "fewer than 3 tokens"),
        (b"\1\0\0\0", "fewer than 3 tokens"),
        (GOOD + b"\0", "at token 259"),
        (GOOD + entry(b"ab", -1.0)[:-1], "got the length 2 at token 259"),
        (GOOD + entry(b"ab", -1.0, 2**31 - 1), "got the length 2147483647"),
        (GOOD + entry(b"ab", -1.0, -9), "got the length -9"),
        (GOOD + entry(b"\xff"), "can't decode"),
        (GOOD + entry(b""), "token 259: got 0 characters, expected 1 to 256"),
        (GOOD + entry(b"a" * 2000, -1.0), "token 259: got 2000 characters"),
        (GOOD + 2 * entry(b"a"), "token 260: got 'a', which is token 259 too"),
        (GOOD + entry(b"a") + entry(b"ab", float("inf")), "got the score inf"),
        (GOOD + entry(b"a") + entry(b"aa", float("nan")), "got the score nan"),
        (HEAD, "there is no token <0x00>"),
    ],
)
def test_damaged_llama2c_files(data: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(GOOD)
    assert read_llama2c(path).encode("a", "text") == [3 + 97]
    path.write_bytes(data)
    message = user_error(lambda: load_tokenizer(path))
    assert expected in message and str(path) in message


def content_of(tokenizer: SentencePiece) -> dict[str, Any]:
    return json.loads(json.dumps(tokenizer._content()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "got version 2, expected 1"),
        ({"pieces": None}, "pieces is not a list"),
        ({"pieces": ["a"]}, "pieces is not a list of texts with their scores"),
        ({"pieces": [["a", 1]]}, "pieces is not a list of texts with their scores"),
        ({"pieces": [[1, 1.0]]}, "pieces is not a list of texts"),
        ({"merges": 1}, "merges is not a list of pairs"),
        ({"merges": [[1, 2, 3]]}, "merges is not a list of pairs"),
        ({"merges": [[259, 259]], "pieces": [*BYTES, "a"], "specials": {}, "bos": None}, "got the ids 259 and"),
        ({"merges": [[256, 256]], "pieces": [*BYTES, "a"], "specials": {}, "bos": None}, "'aa' which is not a token"),
        ({"specials": []}, "specials does not map texts to ids"),
        ({"specials": {"<s>": "1"}}, "specials does not map texts to ids"),
        ({"specials": {"<s>": 999}}, "specials does not map texts to ids"),
        ({"bos": -1}, "is not the id of a special token"),
        ({"bos": True}, "is not the id of a special token"),
        ({"spaces": None}, "got None as spaces"),
        ({"spaces": {"prefix": "maybe", "doubled": True, "collapsed": False, "split": False}}, "as spaces"),
        ({"spaces": {"prefix": "always", "doubled": 1, "collapsed": False, "split": False}}, "as spaces"),
    ],
)
def test_damaged_files(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    good = content_of(tiny(["a", "b", "ab"]))
    path.write_text(json.dumps(good))
    assert load_tokenizer(path).encode("ab", "text") == [261]
    path.write_text(json.dumps(good | change))
    message = user_error(lambda: load_tokenizer(path))
    assert expected in message and str(path) in message


def test_models_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    for options, expected in [
        ({"model_type": "unigram"}, "got model type 1, expected 2 (BPE)"),
        ({"normalization_rule_name": "nmt_nfkc"}, "got a normalisation of characters"),
        ({"byte_fallback": False}, "there is no token <0x00>"),
        ({"treat_whitespace_as_suffix": True}, "got spaces after words"),
    ]:
        train(path, **options)
        message = user_error(lambda: load_tokenizer(path))
        assert expected in message and str(path) in message


def test_damaged_models(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    train(path)
    data = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        at = rng.randrange(len(data))
        damaged = data[:at] if rng.random() < 0.5 else data[:at] + rng.randbytes(3) + data[at + 3 :]
        path.write_bytes(damaged)
        try:
            load_tokenizer(path).encode("the")
        except UserError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            refused += 1
    assert refused > 100


def test_wire_format() -> None:
    assert list(protobuf(b"\x08\x96\x01\x12\x03abc\x1d\0\0\0\0\x21" + bytes(8))) == [
        (1, 150),
        (2, b"abc"),
        (3, bytes(4)),
        (4, bytes(8)),
    ]
    for damaged in (b"\x08", b"\x08" + b"\xff" * 11, b"\x12\x04abc", b"\x0b", b"\x1d\0\0"):
        with pytest.raises(ValueError, match="byte"):
            list(protobuf(damaged))


def test_folders(tmp_path: Path) -> None:
    assert "no tokenizer there" in user_error(lambda: load_tokenizer(tmp_path))
    (tmp_path / "tokenizer.bin").write_bytes(GOOD)
    assert load_tokenizer(tmp_path).vocab_size == 259
    assert "cannot read" in user_error(lambda: load_tokenizer(tmp_path / "none.json"))


def test_equal_scores_are_joined_from_the_left_and_user_defined_tokens_split_off(tmp_path: Path) -> None:
    """As in the sentencepiece package, whose model gets equal scores here."""
    pytest.importorskip("sentencepiece")
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    path, rng = tmp_path / "tokenizer.model", random.Random(3)
    train(path, user_defined_symbols=["<x>", "ab ", "<xy>"])
    model = sentencepiece_model_pb2.ModelProto()
    for equal in (False, True):
        model.ParseFromString(path.read_bytes())
        for piece in model.pieces:
            piece.score = float(round(piece.score / 7)) if equal and piece.type == 1 else piece.score
        path.write_bytes(model.SerializeToString())
        theirs, ours = SentencePieceProcessor(model_file=str(path)), load_tokenizer(path)
        ours.save(tmp_path / "saved.json")
        again = load_tokenizer(tmp_path / "saved.json")
        pieces = ["<x>", "ab ", "<xy>", "<xyz>", " ", "  ", "aaaa", *ENGLISH.split()]
        for _ in range(300):
            text = "".join(rng.choices(pieces, k=rng.randrange(12)))
            ids = theirs.encode(text)
            assert ours.encode(text) == ids == again.encode(text), text
            assert ours.decode(ids) == theirs.decode(ids)
    assert len(set(ours.scores)) < len(ours.scores) / 2 and ours.user_defined.keys() == {"<x>", "ab ", "<xy>"}
