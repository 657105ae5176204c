"""The command line: what it prints, what it refuses, and that encode and decode are inverse byte for byte."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tinyforge.errors import UserError
from tinyforge.tokenizers import SentencePiece, Tokenizer, command
from tinyforge.tokenizers.command import main
from tinyforge.tokenizers.pieces import PATTERNS
from tinyforge.tokenizers.sentencepiece import BYTES, SPACE

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the cat sat on the mat, the hat and a bat; that the cat\r\n" * 3


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> str:
    path = tmp_path / "tokenizer.json"
    # t+h, th+e, " "+the; the bytes of "👍" stay four tokens.
    Tokenizer([(116, 104), (256, 101), (32, 257)], ["</s>"]).save(path)
    return str(path)


def feed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out.json"
    first.write_bytes(TEXT.encode())
    second.write_bytes("été the été\n".encode())
    assert main(["train", str(first), str(second), "--vocab-size", "270", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}: 270 ids: 256 bytes, 12 merges, 2 special tokens\n"
    assert printed.err == ""  # no progress where standard error is no terminal
    texts = [TEXT, "été the été\n"]  # line ends as they are in the file
    assert Tokenizer.load(out).hash() == Tokenizer.train(texts, 270, progress=False).hash()
    main(["train", str(first), "--vocab-size", "260", "--out", str(out), "--special", "<a>", "--special", "<b>"])
    assert Tokenizer.load(out).specials == {"<a>": 258, "<b>": 259}


def test_encode_and_decode_a_file(tokenizer_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("the the</s>", encoding="utf-8")
    main(["encode", str(text), "--tokenizer", tokenizer_file])
    printed = capsys.readouterr().out
    assert printed == "257 258 60 47 115 62\n"
    text.write_text(printed + "\n259")
    main(["decode", str(text), "--tokenizer", tokenizer_file])
    assert capsys.readouterr().out == "the the</s></s>"


def test_a_large_file_is_read_in_blocks_and_gives_the_same(
    tokenizer_file: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "BLOCK", 7)
    tokenizer = Tokenizer.load(tokenizer_file)
    large, ids, out = tmp_path / "large", tmp_path / "ids.npy", tmp_path / "trained.json"
    rng = random.Random(1)
    for data in (("the 👍 é\r\n  the " * 300).encode(), rng.randbytes(3000), b"the \xe2\x82", b"", b"a" * 1000):
        large.write_bytes(data)
        expected = tokenizer.encode_bytes(data)
        main(["encode", str(large), "--tokenizer", tokenizer_file, "--workers", "2"])
        printed = capfdbinary.readouterr().out
        assert [int(word) for word in printed.split()] == expected
        assert [len(line.split()) for line in printed.splitlines()[:-1]] == [32] * ((len(expected) - 1) // 32)
        main(["encode", str(large), "--tokenizer", tokenizer_file, "--out", str(ids)])
        assert capfdbinary.readouterr().out == f"{ids}: {len(expected)} ids, 2 bytes each\n".encode()
        array = np.load(ids)
        assert array.dtype == np.uint16 and array.tolist() == expected
        main(["decode", str(ids), "--tokenizer", tokenizer_file])
        assert capfdbinary.readouterr().out == data
    text = "the cat sat on the mat, the hat\r\n  and a bat é 👍; that the cat " * 50
    large.write_bytes(text.encode())
    main(["train", str(large), "--vocab-size", "275", "--out", str(out), "--workers", "2"])
    assert Tokenizer.load(out).hash() == Tokenizer.train([text], 275, progress=False).hash()
    large.write_bytes(text.encode() + b"\xe2\x82")
    with pytest.raises(UserError, match=f"large: byte {len(text.encode())} is not UTF-8"):
        main(["train", str(large), "--vocab-size", "275", "--out", str(out)])


def test_a_failed_write_keeps_the_old_ids(tokenizer_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "ids.npy"
    argv = ["encode", "--tokenizer", tokenizer_file, "--out", str(out)]
    feed(b"the the", monkeypatch)
    main(argv)
    before = out.read_bytes()

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    feed(b"the", monkeypatch)
    with pytest.raises(UserError, match="cannot write the ids .*: No space left on device; free some space"):
        main(argv)
    assert out.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ids.npy", "tokenizer.json"]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_any_bytes_through_standard_input(
    tokenizer_file: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for data in (b"", b"\xff\x00\r\n", random.Random(0).randbytes(5000), "the 👍\n".encode()):
        feed(data, monkeypatch)
        main(["encode", "--tokenizer", tokenizer_file])
        ids = capfdbinary.readouterr().out
        assert max(map(len, ids.split(b"\n"))) < 150
        feed(ids, monkeypatch)
        main(["decode", "-", "--tokenizer", tokenizer_file])
        assert capfdbinary.readouterr().out == data


def test_decode_does_not_steer_a_terminal(
    tokenizer_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(b"27 91 50 74 10 240", monkeypatch)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["decode", "--tokenizer", tokenizer_file])
    assert capsys.readouterr().out == "\\x1b[2J\n\\xf0\n"


def test_inspect_without_colour(tokenizer_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "a the the 👍\n", "--tokenizer", tokenizer_file])
    assert capsys.readouterr().out == (
        "15 bytes, 5 pre-tokens, 9 tokens\n"
        "pre-tokens: 'a' ' the' ' the' ' 👍' '\\n'\n"
        "tokens:     'a' ' the' ' the' ' ' '\\xf0' '\\x9f' '\\x91' '\\x8d' '\\n'\n"
        "ids:        97 258 258 32 240 159 145 141 10\n"
        "\n"
        "token 258 ' the' is made by 3 merges, in the order learned:\n"
        "  merge 0: 't' + 'h' -> 'th', id 256\n"
        "  merge 1: 'th' + 'e' -> 'the', id 257\n"
        "  merge 2: ' ' + 'the' -> ' the', id 258\n"
    )


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("256", "token 256 'th' is made by 1 merge, in the order learned:\n  merge 0: 't' + 'h' -> 'th', id 256\n"),
        ("27", "token 27 '\\x1b' is a byte: no merge makes it\n"),
        ("259", "token 259 '</s>' is a special token: no merge makes it\n"),
    ],
)
def test_inspect_a_token(token: str, expected: str, tokenizer_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "", "--token", token, "--tokenizer", tokenizer_file])
    assert capsys.readouterr().out.endswith("\n\n" + expected)
    main(["inspect", "", "--tokenizer", tokenizer_file])
    assert "token " not in capsys.readouterr().out


def test_inspect_in_colour(
    tokenizer_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["inspect", "a the\x1b[2J", "--tokenizer", tokenizer_file])
    lines = capsys.readouterr().out.split("\n")
    a, b, end = "\x1b[30;106m", "\x1b[30;103m", "\x1b[0m"
    assert lines[1] == f"pre-tokens: {a}a{end}{b} the{end}{a}\\x1b[{end}{b}2{end}{a}J{end}"
    assert lines[2].startswith(f"tokens:     {a}a{end}{b} the{end}{a}\\x1b{end}")
    monkeypatch.setenv("NO_COLOR", "1")
    main(["inspect", "a the", "--tokenizer", tokenizer_file])
    assert "\x1b" not in capsys.readouterr().out


def test_faults(tokenizer_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, out = tmp_path / "bad", str(tmp_path / "out.json")
    bad.write_bytes(b"ok \xff")
    use = ["--tokenizer", tokenizer_file]
    train = ["--vocab-size", "260", "--out", out]
    for argv, expected in [
        (["train", str(bad), *train], f"{bad}: byte 3 is not UTF-8"),
        (["train", str(tmp_path / "none"), *train], "none: No such file"),
        (["train", tokenizer_file, "--vocab-size", "9", "--out", out], "got vocab_size 9"),
        (["train", str(bad), "--vocab-size", "260", "--out", str(tmp_path / "no" / "x")], "is not a folder"),
        (["train", tokenizer_file, *train, "--special", ""], "--special is empty"),
        (["encode", str(tmp_path), *use], "Is a directory"),
        (["encode", str(bad), "--tokenizer", str(bad)], "is not UTF-8"),
        (["encode", str(bad), *use, "--out", str(tmp_path / "no" / "x")], "is not a folder"),
        (["encode", str(bad), *use, "--workers", "0"], "workers: got 0, expected 1 or more"),
        (["train", tokenizer_file, *train, "--workers", "-1"], "workers: got -1"),
        (["decode", str(bad), *use], "got 'ok' as id number 1"),
        (["inspect", "a", "--token", "260", *use], "token id 260 is not in the vocabulary"),
        (["inspect", "a", "--token", "-1", *use], "token id -1 is not in the vocabulary"),
    ]:
        with pytest.raises(UserError) as caught:
            main(argv)
        assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not Path(out).exists()
    for ids, expected in [
        (b"1 260", "token id 260"),
        (b"1 -1", "got '-1' as id number 2"),
        (b"\xff", "standard input: got '\\ufffd'"),
        (b"9" * 5000, "as id number 1"),
        (b"1.0", "got '1.0'"),
        (npy(np.array([1, 260])), "token id 260"),
        (npy(np.array([1.0])), "standard input: got 1 dimensions of float64, expected one dimension of whole numbers"),
        (npy(np.array([[1]])), "got 2 dimensions of int64"),
        (npy(np.array([1, 2]))[:-1], "standard input: a damaged .npy file"),
        (npy(np.array([1, 2]))[:20], "standard input: a damaged .npy file"),
    ]:
        feed(ids, monkeypatch)
        with pytest.raises(UserError) as caught:
            main(["decode", *use])
        assert expected in str(caught.value)


def test_tokenizers_of_others(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "BLOCK", 7)
    words = SentencePiece(["<s>", *BYTES, SPACE, "a", f"{SPACE}a"], {"<s>": 0}, 0, merges=[(257, 258)])
    tokens = [*(bytes([byte]) for byte in range(256)), b".\n", b""]
    code = Tokenizer([(46, 10)], {"</s>": 257}, pattern=PATTERNS["qwen2"], tokens=tokens)
    path = tmp_path / "tokenizer.json"
    data = ("a a. \n" + "a.\n" * 50 + "é a\n").encode()
    for tokenizer in (words, code):
        tokenizer.save(path)
        feed(data, monkeypatch)
        main(["encode", "--tokenizer", str(path)])
        ids = capfdbinary.readouterr().out
        assert [int(word) for word in ids.split()] == tokenizer.encode(data.decode())
        feed(ids, monkeypatch)
        main(["decode", "--tokenizer", str(path)])
        assert capfdbinary.readouterr().out == data
        with pytest.raises(UserError, match="inspect: got another program's tokenizer"):
            main(["inspect", "a", "--tokenizer", str(path)])


def test_as_a_module(tokenizer_file: str) -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-m", "tinyforge.tokenizers", *argv, "--tokenizer", tokenizer_file]
        return subprocess.run(command, cwd=ROOT, input="the the", text=True, capture_output=True)

    good, bad = run("encode"), run("decode")
    assert (good.returncode, good.stdout, good.stderr) == (0, "257 258\n", "")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: standard input: got 'the' as id number 1") and bad.stderr.count("\n") == 1
