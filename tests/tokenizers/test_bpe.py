"""The tokenizer against slow but obvious references, GPT-2's own ids, and everything a user can get wrong."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tokenizers.conftest import user_error
from tests.tokenizers.test_pieces import GPT2_PATTERN, TRICKY, assigned_text, random_unicode, split_all
from tinyforge.backends.workers import ThreadWorker, worker_pids
from tinyforge.errors import UserError
from tinyforge.tokenizers import Tokenizer, bpe, parallel, pieces
from tinyforge.tokenizers.vocabulary import any_of

ROOT = Path(__file__).resolve().parents[2]
GPT2 = ROOT.parent / "shared" / "data" / "gpt2"
SHAKESPEARE = ROOT.parent / "shared" / "data" / "shakespeare" / "input.txt"


def generated_text(characters: int, seed: int) -> str:
    """Words of random syllables with Zipf's frequencies, among them numbers, signs and other scripts."""
    rng = random.Random(seed)
    syllables = ["ka", "to", "ri", "sh", "en", "lo", "the", "an", "ing", "é", "ß", "лю", "中", "aa"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 5))) for _ in range(2000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    text, size = [], 0
    while size < characters:
        sentence = " ".join(rng.choices(words, weights, k=rng.randint(3, 12)))
        sentence += rng.choice([".", "!\n", " 12 ", f" {rng.randint(0, 9999)}, ", "...  ", "\n\n", " aaaaaaa "])
        text.append(sentence)
        size += len(sentence)
    return "".join(text)


def replace_everywhere(word: tuple[int, ...], pair: tuple[int, int], new: int) -> tuple[int, ...]:
    out: list[int] = []
    at = 0
    while at < len(word):
        found = word[at : at + 2] == pair
        out.append(new if found else word[at])
        at += 2 if found else 1
    return tuple(out)


def reference_merges(text: str, count: int) -> list[tuple[int, int]]:
    """The textbook trainer: before each merge, count every pair again."""
    words = Counter(tuple(piece.encode()) for piece in split_all(text))
    merges: list[tuple[int, int]] = []
    for _ in range(count):
        counts: Counter[tuple[int, int]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                counts[pair] += times
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        words_now: Counter[tuple[int, ...]] = Counter()
        for word, times in words.items():
            words_now[replace_everywhere(word, best, 256 + len(merges)) if best[0] in word else word] += times
        words = words_now
        merges.append(best)
    return merges


def reference_encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The textbook encoder: each merge in turn over the whole piece."""
    ids: list[int] = []
    for piece in split_all(text):
        word = tuple(piece.encode())
        for index, pair in enumerate(tokenizer.merges):
            word = replace_everywhere(word, pair, 256 + index)
        ids += word
    return ids


@pytest.fixture(scope="module")
def text() -> str:
    return generated_text(100_000, seed=0)


@pytest.fixture(scope="module")
def tokenizer(text: str) -> Tokenizer:
    return Tokenizer.train([text], vocab_size=600, progress=False)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    if not (GPT2 / "encoder.json").exists():
        pytest.skip("GPT-2's encoder.json and vocab.bpe are not on this machine")
    return Tokenizer.from_gpt2(GPT2 / "encoder.json", GPT2 / "vocab.bpe")


# --- training


def test_training_equals_the_textbook_trainer(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.merges == reference_merges(text, 600 - 258)


def test_training_to_the_last_pair_where_most_counts_tie() -> None:
    small = generated_text(4000, seed=3)
    expected = reference_merges(small, 10_000)
    assert len(expected) > 300
    assert Tokenizer.train([small], 258 + len(expected), progress=False).merges == expected


def test_training_depends_on_the_texts_and_not_on_their_order(text: str, tokenizer: Tokenizer) -> None:
    lines = text.split("\n")
    forward = Tokenizer.train(lines, 400, progress=False)
    assert Tokenizer.train(reversed(lines), 400, progress=False).hash() == forward.hash()
    assert Tokenizer.train([text], 600, progress=False).hash() == tokenizer.hash()
    assert forward.hash() != tokenizer.hash()


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_training_is_the_same_for_any_number_of_workers(
    workers: int | None, text: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "BATCH", 5000)
    for texts in ([text], text.split("\n")):
        assert Tokenizer.train(iter(texts), 600, progress=False, workers=workers).hash() == tokenizer.hash()


def test_no_token_has_two_digits(text: str, tmp_path: Path) -> None:
    numbered = [f"{text[at : at + 20]} {at} 1984 2001 3{at}" for at in range(0, 6000, 20)]
    trained = Tokenizer.train(numbered, 500, progress=False, single_digits=True)
    pairs = [re.findall(rb"\d", trained.token_bytes(id)) for id in range(500)]
    assert max(map(len, pairs)) == 1
    assert trained.decode(trained.encode("8 + 57 = 65")) == "8 + 57 = 65"
    assert [trained.token_bytes(id) for id in trained.encode(" 1984")] == [b" ", b"1", b"9", b"8", b"4"]
    assert any(
        len(re.findall(rb"\d", t)) > 1
        for t in map(Tokenizer.train(numbered, 500, progress=False).token_bytes, range(500))
    )
    path = tmp_path / "tokenizer.json"
    trained.save(path)
    again = Tokenizer.load(path)
    assert again.hash() == trained.hash() and again.encode("\n".join(numbered)) == trained.encode("\n".join(numbered))


def test_training_on_too_many_pieces_drops_the_rarest(monkeypatch: pytest.MonkeyPatch) -> None:
    common = generated_text(20_000, seed=12)
    rare = " ".join(str(number) for number in range(10_000, 12_000))  # each once
    expected = Tokenizer.train([common], 320, progress=False)
    monkeypatch.setattr(bpe, "COUNTED_PIECES", 1500)
    assert bpe.drop_rarest({b"a": 2, b"b": 1, b"c": 5}) == {b"a": 2, b"b": 1, b"c": 5}
    for workers in (1, 2):
        with_rare = Tokenizer.train([common * 10, rare], 320, progress=False, workers=workers)
        assert with_rare.merges == expected.merges
    assert bpe.drop_rarest({b"%d" % number: number for number in range(2000)}) == {
        b"%d" % number: number for number in range(1250, 2000)
    }


def test_counts_take_64_bits() -> None:
    merges = bpe.learn_merges({b"abc": 3 << 40, b"bc": 1, b"ab": 2}, 5, progress=False)
    assert merges == [(97, 98), (256, 99), (98, 99)]


def test_training_is_the_same_in_another_process() -> None:
    program = (
        "from tinyforge.tokenizers import Tokenizer\n"
        "print(Tokenizer.train(['the cat sat on the mat', 'a hat and a bat'], 270, progress=False).hash())"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env={"PYTHONHASHSEED": seed}, text=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1 and len(hashes.pop().strip()) == 64


def test_progress_goes_to_stderr_and_can_be_switched_off(capfd: pytest.CaptureFixture[str]) -> None:
    Tokenizer.train(["low lower lowest"], 260, progress=False)
    assert capfd.readouterr() == ("", "")
    Tokenizer.train(["low lower lowest"], 260)
    out, err = capfd.readouterr()
    assert out == "" and "learning merges: 100%" in err


# --- encoding and decoding


def test_encoding_equals_the_textbook_encoder(text: str, tokenizer: Tokenizer) -> None:
    sample = text[:5000] + "a" * 101 + generated_text(2000, seed=4).replace(" ", "") + "".join(TRICKY)
    assert tokenizer.encode(sample) == reference_encode(tokenizer, sample)


def test_every_string_comes_back(text: str, tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    strings = [random_unicode(rng, rng.randrange(200)) for _ in range(300)]
    strings += ["", "\x00", "\r\n", "\ufeff", "👩‍👩‍👧‍👦 👍🏽", " " * 1000, "<|endoftext|>", *TRICKY, text]
    for string in strings:
        ids = tokenizer.encode(string)
        assert tokenizer.decode(ids) == string
        assert int(tokenizer.byte_lengths[ids].sum()) == len(string.encode())


def test_every_byte_string_comes_back(tokenizer: Tokenizer) -> None:
    rng = random.Random(6)
    samples = [b"", bytes(range(256)), b"ok \xff\xfe then \xe4\xb8", b"\xed\xa0\x80", "é".encode() + b"\xa9"]
    samples += [rng.randbytes(rng.randrange(300)) for _ in range(300)]
    for data in samples:
        assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data
    assert tokenizer.encode_bytes("naïve 中".encode()) == tokenizer.encode("naïve 中")


def test_lone_surrogates_become_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83d b")) == "a\ufffd b"
    # In one piece with a raw byte, which stays.
    assert tokenizer.decode_bytes(tokenizer.encode("a\udcff\ud83d\udc7f")) == b"a\xff" + 2 * "\ufffd".encode()


def test_half_a_character_decodes_to_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([0xF0, 0x9F, 65]) == "\ufffdA"


def test_specials_are_last_and_never_come_from_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.specials == {"<|endoftext|>": 598, "</s>": 599}
    assert tokenizer.vocab_size == 600 == len(tokenizer.byte_lengths)
    for string in ("<|endoftext|>", "</s>", "a</s> <|endoftext|>\n</s>", "<|endoftext|></s>" * 50):
        ids = tokenizer.encode(string)
        assert max(ids) < 598
        assert tokenizer.decode(ids) == string
    learned = Tokenizer.train(["<|endoftext|></s> " * 100], 270, progress=False)
    assert max(learned.encode("<|endoftext|></s> ")) < 268
    assert tokenizer.decode([598, 104, 105, 599]) == "<|endoftext|>hi</s>"
    assert tokenizer.byte_lengths[[598, 599]].tolist() == [0, 0]


def test_byte_ids_and_token_bytes(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    for index, (left, right) in enumerate(tokenizer.merges):
        assert tokenizer.token_bytes(256 + index) == tokenizer.token_bytes(left) + tokenizer.token_bytes(right)
        assert tokenizer.byte_lengths[256 + index] == len(tokenizer.token_bytes(256 + index))


def test_decode_takes_numpy_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the sheing 12")
    assert tokenizer.decode(np.array(ids, dtype=np.uint16)) == "the sheing 12"


@pytest.mark.parametrize(("limit", "value"), [("TABLE_PIECES", 10), ("TABLE_BYTES", 10)])
def test_a_full_memory_changes_nothing(
    limit: str, value: int, tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = text.split("\n")[:300]
    expected = [tokenizer.encode(line) for line in texts]
    trained = Tokenizer.train(texts, 400, progress=False)
    monkeypatch.setattr(pieces, limit, value)
    monkeypatch.setattr(pieces, "BATCH", 500)
    fresh = Tokenizer(tokenizer.merges, tuple(tokenizer.specials))
    most = 0
    for line, ids in zip(texts, expected, strict=True):
        assert fresh.encode(line) == ids
        most = max(most, len(fresh._encoder.table.pieces))
    assert most < 100 < len(tokenizer._encoder.table.pieces)
    assert Tokenizer.train(texts, 400, progress=False).hash() == trained.hash()


@pytest.mark.parametrize("length", [bpe.LONG - 1, bpe.LONG, 1000])
def test_long_and_short_pieces_are_merged_alike(tokenizer: Tokenizer, length: int) -> None:
    rng = random.Random(10)
    ranks = bpe.PairRanks({pair: 256 + index for index, pair in enumerate(tokenizer.merges)})
    for letters in ("kators", "a", "aak"):
        ids = list("".join(rng.choices(letters, k=length)).encode())
        expected = tuple(ids)
        for index, pair in enumerate(tokenizer.merges):
            expected = replace_everywhere(expected, pair, 256 + index)
        made = range(tokenizer.vocab_size)
        assert bpe.apply_merges(ids, ranks, made) == bpe.apply_merges_by_heap(ids, ranks, made) == list(expected)


def test_a_long_run_without_a_space_is_not_quadratic(tokenizer: Tokenizer) -> None:
    # 300,000 letters are one piece: a scan of the piece per merge would need 342 passes over it.
    letters = "".join(random.Random(7).choices("kators", k=300_000))
    calls = Counter[str]()

    class Counting(bpe.PairRanks):
        def __getitem__(self, pair: tuple[int, int]) -> int:
            calls["get"] += 1
            return super().__getitem__(pair)

    merged = Counting({pair: 256 + index for index, pair in enumerate(tokenizer.merges)})
    ids = bpe.apply_merges(list(letters.encode()), merged, range(tokenizer.vocab_size))
    assert tokenizer.decode(ids) == letters
    assert calls["get"] < 3 * len(letters)


# --- many texts, on all cores


@pytest.fixture
def texts() -> list[str]:
    rng = random.Random(11)
    made = [generated_text(size, seed) for seed, size in enumerate((0, 1, 300, 5000, 20_000, 20))]
    made += [random_unicode(rng, rng.randrange(3000)) for _ in range(20)]
    made += ["", "a\ud800 b", "x\udcff", *TRICKY, "", "'", "s", " ", "x", "a" * 3000]
    rng.shuffle(made)
    return made


@pytest.mark.parametrize("workers", [None, 1, 2, 3])
def test_encode_many_gives_the_ids_of_encode(
    workers: int | None, texts: list[str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [tokenizer.encode(text) for text in texts]
    for size in (100, 5000, pieces.BATCH):
        monkeypatch.setattr(pieces, "BATCH", size)
        found = list(tokenizer.encode_many(iter(texts), workers))
        assert [ids.tolist() for ids in found] == expected
        assert {ids.dtype for ids in found} == {np.dtype(np.uint16)}
    assert list(tokenizer.encode_many([], workers)) == []


def test_threads_give_the_same(texts: list[str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "CAN_FORK", False)
    monkeypatch.setattr(parallel, "Worker", ThreadWorker)
    monkeypatch.setattr(pieces, "BATCH", 1000)
    monkeypatch.setattr(pieces, "SHORT", 500)
    fresh = Tokenizer(tokenizer.merges, tuple(tokenizer.specials))
    assert [ids.tolist() for ids in fresh.encode_many(texts, 4)] == [tokenizer.encode(text) for text in texts]
    assert (
        Tokenizer.train(texts, 400, progress=False, workers=4).merges
        == Tokenizer.train(texts, 400, progress=False, workers=1).merges
    )


def test_threads_may_share_a_tokenizer(text: str, tokenizer: Tokenizer) -> None:
    texts = [text[start : start + 9000] for start in range(0, len(text), 9000)]
    expected = [tokenizer.encode(part) for part in texts]
    fresh = Tokenizer(tokenizer.merges, tuple(tokenizer.specials))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fresh.encode, texts * 5)) == expected * 5


@pytest.mark.parametrize("line", range(1, 10))
def test_an_interrupted_call_leaves_no_wrong_id_behind(line: int, text: str, tokenizer: Tokenizer) -> None:
    """Ctrl-C at many places of the work on one text; the next calls give the ids as if nothing had been."""
    fresh = Tokenizer(tokenizer.merges, tuple(tokenizer.specials))
    lines = 0

    def interrupt(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename in (bpe.__file__, pieces.__file__) and event == "line":
            lines += 1
            if lines % (line * 37) == 0:
                raise KeyboardInterrupt
        return interrupt

    parts = [text[start : start + 3000] for start in range(0, 60_000, 3000)]
    interrupted = 0
    for part in parts:
        sys.settrace(interrupt)
        try:
            fresh.encode(part)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
    assert interrupted
    assert [fresh.encode(part) for part in parts] == [tokenizer.encode(part) for part in parts]


def test_ids_take_32_bits_where_16_do_not_hold_them() -> None:
    pairs = [(left, right) for left in range(256) for right in range(256)]
    small, large = Tokenizer(pairs[: 65_536 - 256], []), Tokenizer(pairs, [])
    assert small.id_dtype == np.uint16 and large.id_dtype == np.uint32
    (ids,) = large.encode_many([b"\xff\xff".decode("utf-8", "surrogateescape")])
    assert ids.dtype == np.uint32 and ids.tolist() == [256 + 65_535]


def test_encode_many_takes_texts_as_they_are_wanted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "BATCH", 1000)
    taken = Counter[str]()

    def endless() -> Iterator[str]:
        while True:
            taken["texts"] += 1
            yield "the cat sat on the mat " * 10

    for workers in (1, 2):
        taken.clear()
        encoded = tokenizer.encode_many(endless(), workers)
        for _ in range(100):
            next(encoded)
        encoded.close()
        assert taken["texts"] < 150
    assert not worker_pids()


# --- parity with GPT-2


def tiktoken_gpt2() -> Any:
    """GPT-2's encoding in tiktoken, put together from the local files: no network."""
    tiktoken = pytest.importorskip("tiktoken")
    spelt = json.loads((GPT2 / "encoder.json").read_text(encoding="utf-8"))
    # The spelling of bytes, from the definition: printable Latin-1 as itself, the others from U+0100 on.
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(hidden)}
    special = {"<|endoftext|>": spelt.pop("<|endoftext|>")}
    ranks = {bytes(byte_of[c] for c in token): id for token, id in spelt.items()}
    return tiktoken.Encoding("gpt2-here", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def test_gpt2_ids_equal_tiktoken(gpt2: Tokenizer) -> None:
    theirs = tiktoken_gpt2()
    assert gpt2.vocab_size == 50257 and gpt2.specials == {"<|endoftext|>": 50256}
    assert all(gpt2.token_bytes(id) == theirs.decode_single_token_bytes(id) for id in range(50257))
    rng = random.Random(8)
    for string in [*TRICKY, generated_text(20_000, seed=9), *(assigned_text(rng, 300) for _ in range(100))]:
        assert gpt2.encode(string) == theirs.encode_ordinary(string)
    if not SHAKESPEARE.exists():
        pytest.skip("all else agrees, but tiny Shakespeare is not on this machine")
    play = SHAKESPEARE.read_text(encoding="utf-8")
    ids = gpt2.encode(play)
    assert ids == theirs.encode_ordinary(play)
    assert gpt2.decode(ids) == play


def test_gpt2_known_ids(gpt2: Tokenizer) -> None:
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("\n") == [198]
    assert gpt2.token_bytes(0) == b"!" and gpt2.token_bytes(220) == b" "


def test_gpt2_survives_saving(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.hash() == gpt2.hash()
    assert again.encode("Hello world") == [15496, 995]


# --- files


def test_save_and_load(tokenizer: Tokenizer, text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again = Tokenizer.load(path)
    assert again.merges == tokenizer.merges and again.specials == tokenizer.specials
    assert again.hash() == tokenizer.hash()
    assert again.encode(text[:2000]) == tokenizer.encode(text[:2000])
    first = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == first
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def test_no_merge_and_no_special_survive_saving(tmp_path: Path) -> None:
    bare = Tokenizer.train(["x"], 256, specials=(), progress=False)
    bare.save(tmp_path / "bare.json")
    assert Tokenizer.load(tmp_path / "bare.json").encode("hé") == list("hé".encode())


def test_hash_sees_merges_specials_and_byte_order() -> None:
    variants = [
        Tokenizer([(97, 98)], ["</s>"]),
        Tokenizer([(97, 99)], ["</s>"]),
        Tokenizer([(97, 98)], ["<s>"]),
        Tokenizer([(97, 98)], ["</s>"], byte_order="gpt2"),
        Tokenizer([(97, 98)], ["</s>"], pattern=pieces.DIGITS),
    ]
    assert len({variant.hash() for variant in variants}) == len(variants)
    assert variants[0].hash() == Tokenizer([(97, 98)], ["</s>"]).hash()


def test_a_failed_save_keeps_the_old_file(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    before = path.read_bytes()

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(UserError, match="cannot write the tokenizer .*No space left on device; free some space"):
        Tokenizer([], ["</s>"]).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


# --- what a user can get wrong


def test_training_faults() -> None:
    message = user_error(lambda: Tokenizer.train(["text"], 257, progress=False))
    assert message.startswith("vocabulary too small for the bytes: got vocab_size 257, expected at least 258")
    assert user_error(lambda: Tokenizer.train([], 300, progress=False)).startswith("no text")
    assert user_error(lambda: Tokenizer.train(["", ""], 300, progress=False)).startswith("no text")
    message = user_error(lambda: Tokenizer.train(["abc abc"], 300, progress=False))
    # a+b, ab+c, " "+abc: then both pieces are one token.
    assert "got 3 possible merges, expected 42; ask for vocab_size 261" in message
    assert Tokenizer.train(["abc abc"], 261, progress=False).encode("abc abc") == [257, 258]
    assert "distinct" in user_error(lambda: Tokenizer.train(["abc"], 258, specials=("a", "a"), progress=False))
    assert "none empty" in user_error(lambda: Tokenizer([], [""]))


@pytest.mark.parametrize("id", [-1, 600, 10**9])
def test_unknown_ids(tokenizer: Tokenizer, id: int) -> None:
    for call in (lambda: tokenizer.token_bytes(id), lambda: tokenizer.decode([104, id])):
        assert user_error(call).startswith(f"token id {id} is not in the vocabulary: expected 0..599")


GOOD = {
    "format": "tinyforge-bpe",
    "version": 1,
    "pattern": "gpt2",
    "byte_order": "plain",
    "specials": ["</s>"],
    "merges": [[97, 98], [256, 99]],
}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff{}", "is not UTF-8 at byte 0"),
        (b'{"format": ', "is not JSON (line 1"),
        (b"[]", "got a list, expected an object"),
        (b"{}", "got format None, expected 'tinyforge-bpe'"),
        (GOOD | {"version": 2}, "got version 2, expected 1"),
        (GOOD | {"pattern": "words"}, "got pattern 'words', expected 'gpt2' or 'digits'"),
        (GOOD | {"pattern": []}, "got pattern [], expected 'gpt2' or 'digits'"),
        (GOOD | {"byte_order": "odd"}, "byte_order 'odd' is none of plain, gpt2"),
        (GOOD | {"byte_order": []}, "byte_order [] is none of"),
        (GOOD | {"specials": "</s>"}, "specials is not a list of texts"),
        (GOOD | {"specials": [1]}, "specials is not a list of texts"),
        (GOOD | {"specials": ["</s>", "</s>"]}, "expected distinct texts"),
        (GOOD | {"merges": None}, "merges is not a list of pairs"),
        (GOOD | {"merges": [[1, 2, 3]]}, "merges is not a list of pairs"),
        (GOOD | {"merges": [[97, True]]}, "merges is not a list of pairs"),
        (GOOD | {"merges": [[97, 256]]}, "tokenizer merge 0: got (97, 256), expected a pair of ids below 256"),
        (GOOD | {"merges": [[-1, 98]]}, "tokenizer merge 0: got (-1, 98)"),
        (GOOD | {"merges": [[97, 98], [97, 98]]}, "tokenizer merge 1: got (97, 98)"),
        # Sixty merges that each double a token: 2^60 bytes.
        (
            GOOD | {"merges": [[97, 97], *([n, n] for n in range(256, 315))]},
            "bytes in all, expected 67,108,864 at most",
        ),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"merges": [[9' + b"9" * 5000 + b", 1]]}", "got a whole number of 5001 digits"),
    ],
)
def test_damaged_files(content: bytes | dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(GOOD))
    assert Tokenizer.load(path).encode("abc") == [257]
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    message = user_error(lambda: Tokenizer.load(path))
    assert expected in message and str(path) in message


def test_missing_files_and_folders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert "No such file" in user_error(lambda: Tokenizer.load(tmp_path / "none.json"))
    assert "Is a directory" in user_error(lambda: Tokenizer.load(tmp_path))
    assert "No such file" in user_error(lambda: tokenizer.save(tmp_path / "no" / "tokenizer.json"))
    (tmp_path / "file").touch()
    assert "Not a directory" in user_error(lambda: tokenizer.save(tmp_path / "file" / "tokenizer.json"))


def test_gpt2_files_that_do_not_fit(tmp_path: Path) -> None:
    encoder, merges = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    spelt = [chr(b) for b in bpe.GPT2_PRINTABLE] + [chr(256 + n) for n in range(256 - len(bpe.GPT2_PRINTABLE))]
    ids = {token: id for id, token in enumerate([*spelt, "ab", "\u0120ab", "<|endoftext|>"])}
    encoder.write_text(json.dumps(ids))
    merges.write_text("#version: 0.2\na b\n\u0120 ab\n", encoding="utf-8")
    good = Tokenizer.from_gpt2(encoder, merges)
    assert good.encode("ab ab") == [256, 257] and good.specials == {"<|endoftext|>": 258}
    assert good.decode([256, 257]) == "ab ab"

    merges.write_text("#version: 0.2\na b\nab xyz\n", encoding="utf-8")
    assert "vocab.bpe line 3: got 'ab xyz'" in user_error(lambda: Tokenizer.from_gpt2(encoder, merges))
    merges.write_text("#version: 0.2\na b\n", encoding="utf-8")
    assert "do not belong together" in user_error(lambda: Tokenizer.from_gpt2(encoder, merges))
    assert "cannot read" in user_error(lambda: Tokenizer.from_gpt2(tmp_path / "none.json", merges))
    encoder.write_text("{")
    assert "is not JSON" in user_error(lambda: Tokenizer.from_gpt2(encoder, merges))


@pytest.mark.slow
def test_many_texts_that_begin_alike_are_one_regular_expression() -> None:
    texts = ["=" * n + ">" for n in range(1, 1201)] + ["=" * n for n in range(1, 1201)] + ["a", "ab"]
    find = re.compile(any_of(texts)).findall
    assert find("=" * 1000 + ">" + "ab" + "=" * 1200 + "x=>") == ["=" * 1000 + ">", "ab", "=" * 1200, "=>"]
