"""Exports read by the real `tiktoken`, rank files read back, and all that must be refused."""

from __future__ import annotations

import base64
import random
import unicodedata
from functools import cache
from pathlib import Path

import pytest

from tests.tokenizers.conftest import ENGLISH, user_error
from tinyforge.tokenizers import Tokenizer, bpe
from tinyforge.tokenizers.tiktoken import from_tiktoken, to_tiktoken

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SHAKESPEARE = SHARED / "shakespeare" / "input.txt"


@cache
def texts() -> list[str]:
    """English, and random characters known to this Python: what a newer Unicode assigns, a newer library knows."""
    rng = random.Random(0)
    planes = [(0, 0x80), (0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x30000)]
    out = [ENGLISH, "", " ", "</s>", "<|endoftext|></s>", "a" * 3000, "abcab" * 500]
    for _ in range(30):
        characters = [chr(rng.randrange(*rng.choice(planes))) for _ in range(120)]
        known = [c for c in characters if unicodedata.category(c) not in ("Cn", "Co", "Cs")]
        out.append("".join(c + rng.choice(["", "", "", " ", "  ", "\n", "'s", "\u00a0"]) for c in known))
        out.append("".join(f"a{c}1{c}.{c}'{c} {c}\n{c}" for c in known))
    words = ENGLISH.split()
    out += [" ".join(rng.choices(words, k=50)) for _ in range(20)]
    if SHAKESPEARE.exists():
        out.append(SHAKESPEARE.read_text(encoding="utf-8")[:20_000])
    return out


# --- tiktoken


def test_tiktoken_reads_our_export(vocabulary: Tokenizer, tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    load = pytest.importorskip("tiktoken.load")
    path = tmp_path / "ours.tiktoken"
    path.write_text("".join(to_tiktoken(vocabulary)))
    theirs = tiktoken.Encoding(
        "ours",
        pat_str=vocabulary.merging.pattern.published,
        mergeable_ranks=load.load_tiktoken_bpe(str(path)),
        special_tokens=vocabulary.specials,
    )
    assert theirs.n_vocab == vocabulary.vocab_size
    for text in texts():
        ids = vocabulary.encode(text)
        assert theirs.encode_ordinary(text) == ids
        assert theirs.decode(ids) == text
    for text, id in vocabulary.specials.items():
        assert theirs.decode([id]) == text
    # Bytes that are no text, as one piece: there the pattern has no say.
    order, merged = (bpe.BYTE_ORDERS[vocabulary.byte_order or ""], vocabulary.merging)
    rng = random.Random(1)
    for alphabet in (range(256), b"abc", "中é👍 e".encode()):
        for length in [*range(1, 60), 200, 1000]:
            data = bytes(rng.choices(alphabet, k=length))
            ids = bpe.apply_merges([order.index(byte) for byte in data], merged.ranks, merged.made)
            assert theirs._encode_single_piece(data) == ids
            assert theirs.decode_bytes(vocabulary.encode_bytes(data)) == data
    assert from_tiktoken(path, vocabulary.specials, vocabulary.merging.pattern).hash() == vocabulary.hash()


def test_tiktoken_lines(tmp_path: Path) -> None:
    lines = to_tiktoken(Tokenizer([(97, 98)], ["</s>"]))
    assert len(lines) == 257 and lines[97] == "YQ== 97\n" and lines[256] == "YWI= 256\n"
    path = tmp_path / "ranks"
    path.write_text("\r\n".join(line.strip() for line in reversed(lines)))  # any order, any line end
    again = from_tiktoken(path, ["</s>"])
    assert again.merges == [(97, 98)] and again.specials == {"</s>": 257}


# --- what a format cannot express


def test_exports_that_are_refused() -> None:
    # "abc" in two ways.
    twice = Tokenizer([(97, 98), (98, 99), (256, 99), (97, 257)], [])
    assert "token 259 b'abc', whose bytes encode to [258]" in user_error(lambda: to_tiktoken(twice))
    # Here "abc" is a + bc, since bc goes first; tiktoken would join the two.
    unreachable = Tokenizer([(98, 99), (97, 98), (257, 99)], [])
    assert unreachable.encode("abc") == [97, 256]
    assert "token 258 b'abc', whose bytes encode to [97, 256]" in user_error(lambda: to_tiktoken(unreachable))


def ranks(tokens: list[bytes]) -> list[str]:
    return [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]


BYTES = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "got 0 ranks"),
        (ranks(BYTES[:9]), "got 9 ranks without rank 9"),
        (["YQ=="], "line 1: got 'YQ==', expected a token in base64 and its rank"),
        (["Y!== 1"], "line 1: got 'Y!== 1'"),
        (["YQ== one"], "line 1"),
        (["é 1"], "line 1"),
        (["YQ== -1"], "line 1: got b'a' with rank -1"),
        ([*ranks(BYTES), "YWI= 255"], "line 257: got b'ab' with rank 255"),
        ([*ranks(BYTES), "YQ== 256"], "line 257: got b'a' with rank 256"),
        ([*ranks(BYTES), "YWI= 257"], "without rank 256"),
        (ranks([*reversed(BYTES)]), "for the byte 0x00"),
        (ranks([*BYTES, b"abc"]), "line 257: got b'abc', which is 3 tokens of lower rank, expected 2"),
        (ranks([*BYTES, b"ab", b".\n"]), "line 258: got b'.\\n', which the pattern gpt2 splits"),
    ],
)
def test_rank_files_that_are_refused(lines: list[str], expected: str, tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    path.write_text("\n".join(lines), encoding="utf-8")
    message = user_error(lambda: from_tiktoken(path))
    assert expected in message and str(path) in message


def test_rank_files_and_specials(tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    path.write_text("\n".join(ranks([*BYTES, b"'r", b"'re", b"\n\n"])))
    assert from_tiktoken(path).encode("we're\n\n") == [119, 101, 257, 258]
    assert "expected distinct texts" in user_error(lambda: from_tiktoken(path, ["a", "a"]))
    assert "cannot read" in user_error(lambda: from_tiktoken(tmp_path / "none"))
