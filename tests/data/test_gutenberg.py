"""Books come out without the licence and with every word of their own; what is doubtful is refused by name."""

from __future__ import annotations

import csv
import errno
import os
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.data.conftest import fault_of
from tinyforge.data import files, gutenberg
from tinyforge.data.download import Downloader, Patience
from tinyforge.data.gutenberg import Book, clean, main
from tinyforge.data.source import Source, read_source
from tinyforge.errors import UserError

HEADER = """The Project Gutenberg EBook of The Lamp, by Ann Author

This eBook is for the use of anyone anywhere at no cost.

Title: The Lamp
       A Tale

Author: Ann Author
        Bo Second

Release Date: May, 2001 [EBook #4321]

Character set encoding: {encoding}

"""
START = "*** START OF THIS PROJECT GUTENBERG EBOOK THE LAMP ***"
END = "*** END OF THIS PROJECT GUTENBERG EBOOK THE LAMP ***"
BOOK = "THE LAMP\n\nby Ann Author\n\n\n  There was a lamp.\n\n\nIt went out.\n\nTHE END\n"
LICENCE = "\n\nUpdated editions ...\n\n*** START: FULL LICENSE ***\n\nProject Gutenberg-tm License\n"
SMALL_PRINT = """**The Project Gutenberg Etext of The Lamp, by Ann Author**

***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***
Why is this "Small Print!" statement here?  You know: lawyers.
"""


def file(body: str = BOOK, start: str = START, end: str = END, encoding: str = "ASCII") -> str:
    return f"{HEADER.format(encoding=encoding)}{start}\n\n\n{body}\n\n{end}\n{LICENCE}"


def reason(text: str | bytes) -> str:
    """Why the file is refused: then there is no body at all."""
    book = clean(text if isinstance(text, bytes) else text.encode())
    assert book.body is None and book.cut == ()
    return book.reason


def test_the_book_and_what_the_header_says_of_it() -> None:
    assert clean(file().encode()) == Book(
        body=BOOK,
        reason="",
        encoding="ascii",
        number=4321,
        title="The Lamp A Tale",
        author="Ann Author, Bo Second",
        cut=("header", "licence"),
    )


@pytest.mark.parametrize(
    "start",
    [
        START,
        "***START OF THE PROJECT GUTENBERG EBOOK THE LAMP***",
        "*** START OF THE PROJECT GUTENBERG EBOOK THE LAMP ***",
        "*** START OF THE PROJECT GUTENBERG EBOOK 4321 ***",
        "*** START OF PROJECT GUTENBERG ETEXT THE LAMP ***",
        "*** Start of this Project Gutenberg E-text, The Lamp",
        "*** START OF THE COPYRIGHTED PROJECT GUTENBERG EBOOK THE LAMP ***",
        "*** START OF THIS PROJECT GUTENBERG EBOOK THE LAMP, OR\nA TALE OF THE LIGHT ***",
        "*** START OF THIS PROJECT GUTENBERG EBOOK THE LAMP,\nOR A TALE\nOF THE LIGHT ***",
        SMALL_PRINT + "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*",
        SMALL_PRINT + "*END THE SMALL PRINT! FOR PUBLIC DOMAIN EBOOKS*Ver.02/11/02*END*",
        f"{SMALL_PRINT}*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n{START}",
    ],
)
def test_every_spelling_of_the_start(start: str) -> None:
    assert clean(file(start=start).encode()).body == BOOK


@pytest.mark.parametrize(
    "end",
    [
        END,
        "***END OF THE PROJECT GUTENBERG EBOOK THE LAMP***",
        "*** END OF PROJECT GUTENBERG ETEXT THE LAMP ***",
        "*** END OF THE COPYRIGHTED PROJECT GUTENBERG EBOOK THE LAMP ***",
        f"End of Project Gutenberg's The Lamp, by Ann Author\n\n{END}",
        f"End of Project Gutenberg\u2019s The Lamp, by Ann Author\n\n{END}",
        f"End of the Project Gutenberg EBook of The Lamp, by\nAnn Author\n\n{END}",
        "End of The Project Gutenberg Etext of The Lamp",
        "The End of the Project Gutenberg Etext The Lamp",
        "This is the end of Project Gutenberg's The Lamp",
        "[End of this Project Gutenberg Etext The Lamp]",
        "Ende dieses Projekt Gutenberg Etextes The Lamp",
        "END OF PROJECT GUTENBERG",
    ],
)
def test_every_spelling_of_the_end(end: str) -> None:
    assert clean(file(end=end).encode()).body == BOOK


def test_an_old_etext_without_any_field() -> None:
    text = (
        f"{SMALL_PRINT}*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\r\n\r\n"
        f"This etext was prepared by Cy Typist, cy@example.org\r\n\r\n{BOOK}\r\n"
        "End of The Project Gutenberg Etext of The Lamp\r\n"
    )
    book = clean(text.encode())
    assert (book.body, book.title, book.author) == (BOOK, "The Lamp", "Ann Author")
    assert book.cut == ("header", "licence", "credits")


@pytest.mark.parametrize(
    "credit",
    [
        "Produced by Cy Typist and Di Reader",
        "Produced by Cy Typist and the Online Distributed\nProofreading Team (This file was\nproduced from images)",
        "E-text prepared by Cy Typist",
        "This eBook was produced by Cy Typist.",
        "Transcribed from the 1897 Dee & Co edition by Cy Typist",
        "Scanned and proofed by Cy Typist",
        "Produced by Cy Typist\n\nHTML version by Di Reader.",
        "An Anonymous Volunteer, and Cy Typist",
        "Note: Please see Project Gutenberg's eBook #17 for\nanother version.",
        "[Transcriber's Note: spelling is kept.]",
        "[Transcriber's Note: spelling is kept.\n\nItalics are in underscores.]",
        "Transcriber's Note: spelling is kept.",
        "TRANSCRIBER\u2019S NOTES\n\nPrinter\u2019s errors are corrected.",
    ],
)
def test_credits_and_notes_before_the_book_go(credit: str) -> None:
    assert clean(file(f"{credit}\n\n\n{BOOK}").encode()).body == BOOK


@pytest.mark.parametrize(
    "note",
    [
        "Typographical errors corrected by the etext transcriber:\n\nteh=> the {pg 3}\n\nlapm=> lamp {pg 9}",
        "Transcriber's Note: page 3, teh changed to the.",
        "[Transcriber's note: one.\n\nAnd two.]",
        "Produced by Cy Typist",
    ],
)
def test_credits_and_notes_after_the_book_go(note: str) -> None:
    assert clean(file(f"{BOOK}\n\n{note}").encode()).body == BOOK


@pytest.mark.parametrize(
    "note",
    [
        "[Project Gutenberg Editor's Note: There is\nanother version]",
        "Note: The Lamp by Author, etext #150",
        "Original Transcriber's Notes:\n\nThis text is a combination\nof etexts.",
    ],
)
def test_notes_on_the_file_within_the_title_page_go(note: str) -> None:
    head, tail = BOOK.split("  There", 1)
    assert clean(file(f"{head}{note}\n\n\n  There{tail}").encode()).body == BOOK


def test_a_line_that_holds_the_title_loses_only_what_is_the_projects() -> None:
    body = "   This is the Project Gutenberg 1.5 release of\n      The Lamp\n\nText.\n"
    assert clean(file(body).encode()).body == "      The Lamp\n\nText.\n"


def test_a_title_above_the_header_is_put_back() -> None:
    text = "The Lamp\n\n" + file("by Ann Author\n\nText.\n").replace("       A Tale\n", "")
    assert clean(text.encode()).body == "The Lamp\n\nby Ann Author\n\nText.\n"


@pytest.mark.parametrize(
    "words",
    [
        "Produced by the sun, the light was gone.",  # in the middle, not at an end
        "He saw the end of the project, and printed it.",
        "Under this pretext he wrote in his note-book.",
        "*** \n\n* * *\n\n***END***",
        "Copyright 1897, in the United States, by Ann Author",
        "Transcriber's notes are dull, said she.\n\nThe lamp agreed.",
        "He had full license to do so.",
        "[Transcriber's note: here a page is missing.]\n\nThe lamp stood still.\n\n[Illustration]",
        "It ended: [Illustration: colophon]",
    ],
)
def test_what_only_looks_like_the_projects_stays(words: str) -> None:
    body = f"One.\n\n{words}\n\nLast.\n"
    assert clean(file(body).encode()).body == body


@pytest.mark.parametrize(
    "notice",
    [
        "<<THIS ELECTRONIC VERSION OF THE WORKS IS COPYRIGHT 1990 BY A LIBRARY, AND IS\nPROVIDED BY PROJECT GUTENBERG "
        "ETEXT OF A COLLEGE\n\nWITH PERMISSION. COPIES ARE FOR PERSONAL USE ONLY.>>",
        "Provided to Project\nGutenberg by A. N. Owner, and distributed with permission.",
        "[This part of the Project Gutenberg Etext may not be used commercially.]",
    ],
)
def test_a_notice_that_is_repeated_within_the_book_goes(notice: str) -> None:
    parts = [f"ACT {n}\n\nHe <<said>> that {n} copies were distributed.\n" for n in range(1, 5)]
    book = clean(file(f"\n{notice}\n\n\n".join(parts)).encode())
    assert book.body == "\n".join(parts) and "notice" in book.cut
    assert clean(file("I wrote to Project Gutenberg.\n\nAnd >> so << on.\n").encode()).body


def test_indents_and_blank_lines_within_the_book_stay() -> None:
    body = "      INDENTED\n\n\n\n\nFour above.  \n\tTab.\n\n   * * *\n"
    assert clean(file(body).encode()).body == "      INDENTED\n\n\n\n\nFour above.  \n\tTab.\n\n   * * *\n"


@pytest.mark.parametrize(
    ("codec", "declared", "found"),
    [
        ("utf-8", "UTF-8", "utf-8"),
        ("utf-8-sig", "UTF-8", "utf-8-sig"),
        ("utf-16", "UTF-16", "utf-16"),
        ("latin-1", "ISO-8859-1", "latin-1"),
    ],
)
def test_encodings(codec: str, declared: str, found: str) -> None:
    body = "Café, naïve.\n"
    book = clean(file(body, encoding=declared).encode(codec))
    assert (book.body, book.encoding) == (body, found)


def test_curly_quotes_in_one_byte_are_windows_1252() -> None:
    book = clean(file("\u201cCafé\u201d \u2014 dash\n", encoding="ISO-8859-1").encode("cp1252"))
    assert (book.body, book.encoding) == ("\u201cCafé\u201d \u2014 dash\n", "cp1252")


@pytest.mark.parametrize("end_of_line", ["\r\n", "\r", "\r\r\n"])
def test_line_ends(end_of_line: str) -> None:
    assert clean(file().replace("\n", end_of_line).encode()).body == BOOK


@pytest.mark.parametrize("filler", [" ", "\t", "\r", "\n", "*", " \n", "[", "*** START OF ", "Title:\n "])
def test_odd_files_take_no_longer_than_others(filler: str, takes_less_than: Any) -> None:
    files = [file(filler * 200_000).encode(), (filler * 200_000).encode()]
    takes_less_than(5.0, lambda: [clean(data) for data in files])


def test_a_copyrighted_book_is_marked() -> None:
    text = file().replace("Title:", "** This is a COPYRIGHTED Project Gutenberg eBook, Details Below **\n\nTitle:")
    assert clean(text.encode()).copyrighted and not clean(file().encode()).copyrighted


def test_files_whose_markers_are_in_doubt_are_refused() -> None:
    text = file()
    assert "no START marker" in reason(text.replace(START, ""))
    assert "no END marker" in reason(text.replace(END, ""))
    assert "no END marker" in reason(text[: text.index(END)])
    assert "no END marker" in reason("only words") and "no END marker" in reason("")
    assert "small print has no end" in reason(file(start=SMALL_PRINT))
    assert "before the START" in reason(file(start=END, end=START))
    assert "2 START markers" in reason(file(BOOK + START + "\n" + BOOK))
    assert "2 END markers" in reason(file(BOOK + END + "\n" + BOOK))
    assert "end of another book" in reason(file(f"{BOOK}\nEnd of Project Gutenberg's Vol. 1\n\n{BOOK * 20}"))
    assert "nothing is left" in reason(file(" \n"))
    assert "after the END" in reason(text + "A second book. " * 3000)
    assert "before the START" in reason("A first book. " * 3000 + text)
    assert "has no end" in reason(file(f"[Transcriber's Note: open\n\n{BOOK}"))


def test_licence_text_between_the_markers_is_refused_with_its_line() -> None:
    text = file(f"{BOOK}\nThe Project Gutenberg-tm trademark\n\n{BOOK}")
    line = text.splitlines().index("The Project Gutenberg-tm trademark") + 1
    assert f"line {line} (Project Gutenberg-tm)" in reason(text)


def test_bytes_that_are_no_text_are_refused() -> None:
    assert "zero bytes" in reason(b"PK\0\0")
    assert "byte 0xe9" in reason(file("Café\n", encoding="UTF-8").encode("latin-1"))
    assert "not cp1252" in reason(file().encode() + b"\x81")
    assert "utf-8-sig" in reason(b"\xef\xbb\xbf\xff")


# --- local files -----------------------------------------------------------------------------------------------------


def pack(path: Path, **members: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "."), content)
    return path


def fault(*arguments: str | Path) -> str:
    return fault_of(main, [str(argument) for argument in arguments])


def texts(out: Path) -> dict[str, str]:
    """The documents of a source, by id."""
    names = [str(path) for path in read_source(out, verify=True).parquet]
    return dict(duckdb.execute("SELECT id, text FROM read_parquet($1)", [names]).fetchall())


def refused(out: Path) -> dict[str, str]:
    return {refusal.record: refusal.reason for refusal in read_source(out).refused}


def test_files_folders_and_archives_are_cleaned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    books = tmp_path / "books"
    (books / "deep").mkdir(parents=True)
    for place in ("a.txt", "deep/b.txt", ".hidden.txt"):
        (books / place).write_text(file())
    (tmp_path / "c.txt").write_text(file())
    archive = pack(tmp_path / "z.zip", d__txt=file(), picture__png="no text")
    out = books / "out"
    arguments = [str(books), str(tmp_path / "c.txt"), str(archive), "--out", str(out)]
    assert main(arguments) == 0
    (out / "e.txt").write_text(file())
    assert main(arguments) == 0  # what is in --out is no input
    assert texts(out) == dict.fromkeys("abcd", BOOK)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[0] == "4321" and printed[1].endswith("header, licence; ascii")
    assert printed[-2].startswith("4 books") and printed[-2].endswith("0 refused")
    assert printed[-1] == f"next: python -m data.corpus {out} --out corpus"


def test_the_source_says_where_its_books_are_from(tmp_path: Path) -> None:
    archive = pack(tmp_path / "z.zip", a__txt=file())
    assert main([str(archive), "--out", str(tmp_path / "out")]) == 0
    (row,) = duckdb.sql(f"SELECT id, title, url, language_score FROM '{tmp_path}/out/*.parquet'").fetchall()
    assert row == ("a", "The Lamp A Tale", "https://www.gutenberg.org/ebooks/4321", None)
    manifest = (tmp_path / "out" / "source.json").read_text()
    assert '"url": "z.zip: a.txt"' in manifest and str(tmp_path) not in manifest


def test_a_refused_file_is_reported_and_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = pack(tmp_path / "z.zip", a__txt=file(), b__txt=file(end=""))
    assert main([str(archive), "--out", str(tmp_path / "out")]) == 1
    assert list(texts(tmp_path / "out")) == ["a"]
    assert "no END marker" in refused(tmp_path / "out")["z.zip: b.txt"]
    assert "REFUSED: no END marker" in capsys.readouterr().out


def test_a_copyrighted_book_is_left_out_unless_asked_for(tmp_path: Path) -> None:
    mine = file().replace("Title:", "** This is a COPYRIGHTED Project Gutenberg eBook, Details Below **\n\nTitle:")
    archive = pack(tmp_path / "z.zip", a__txt=file(), b__txt=mine)
    arguments = [str(archive), "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert "--keep-copyrighted" in refused(tmp_path / "out")["z.zip: b.txt"]
    assert main([*arguments, "--keep-copyrighted"]) == 0
    assert texts(tmp_path / "out") == {"a": BOOK, "b": BOOK}


def test_a_fault_in_one_input_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(file())
    assert main([str(tmp_path / "no.txt"), str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 1
    assert texts(tmp_path / "out") == {"a": BOOK}
    assert "no such file" in refused(tmp_path / "out")["no.txt"]


def test_two_inputs_of_one_name_are_not_confused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(file())
    archive = pack(tmp_path / "z.zip", a__txt=file("Another.\n"))
    assert main([str(tmp_path / "a.txt"), str(archive), "--out", str(tmp_path / "out")]) == 1
    assert texts(tmp_path / "out") == {"a": BOOK}
    assert "has the name of a.txt" in refused(tmp_path / "out")["z.zip: a.txt"]


def test_a_fault_is_one_line_and_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data.gutenberg", str(tmp_path / "no.txt"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no book in 1 file; the first, no.txt: no such file")
    assert done.stderr.count("\n") == 1


def test_archives_that_are_none_or_damaged(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    (tmp_path / "words.zip").write_text("only words")
    assert "words.zip: not a readable zip archive" in fault(tmp_path / "words.zip", *out)
    assert "no.zip: no such file" in fault(tmp_path / "no.zip", *out)
    assert "no .txt file there" in fault(pack(tmp_path / "empty.zip"), *out)
    archive = pack(tmp_path / "flipped.zip", a__txt=file())
    raw = bytearray(archive.read_bytes())
    raw[60] ^= 0xFF
    archive.write_bytes(raw)
    assert "member 'a.txt' is damaged" in fault(archive, *out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../a.txt", "b/../../a.txt", "/a.txt", "..\\a.txt", "C:\\a.txt"])
def test_a_path_that_climbs_out_of_the_archive(tmp_path: Path, name: str) -> None:
    archive = pack(tmp_path / "z.zip", good__txt=file())
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(zipfile.ZipInfo(name), file())
    message = fault(archive, "--out", tmp_path / "deep" / "out")
    assert "leads out of its folder" in message and repr(name) in message
    assert not (tmp_path / "deep").exists()


def test_a_zip_bomb_is_refused_by_ratio_by_size_and_by_what_it_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--out", tmp_path / "out")
    bomb = pack(tmp_path / "bomb.zip", a__txt="0" * 5_000_000)
    assert "and 100 times" in fault(bomb, *out)

    # The directory says 100 bytes where 5,000,000 come out.
    raw = bytearray(bomb.read_bytes())
    entry = raw.rindex(b"PK\x01\x02")
    raw[entry + 24 : entry + 28] = struct.pack("<I", 100)
    bomb.write_bytes(raw)
    assert "not of the declared 100 bytes" in fault(bomb, *out)

    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    big = pack(tmp_path / "big.zip", a__txt=file(BOOK * 30))
    assert "expected at most 1,000" in fault(big, *out)
    (tmp_path / "big.txt").write_text(file(BOOK * 30))
    assert "expected at most 1,000" in fault(tmp_path / "big.txt", *out)


def test_members_that_share_their_packed_bytes_are_counted_together(tmp_path: Path) -> None:
    archive = tmp_path / "z.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("a.txt", "0" * 90_000)
        for number in range(400):
            info = zipfile.ZipInfo.__new__(zipfile.ZipInfo)
            for slot in zipfile.ZipInfo.__slots__:
                if hasattr(opened.filelist[0], slot):
                    setattr(info, slot, getattr(opened.filelist[0], slot))
            info.filename = f"{number}.txt"
            opened.filelist.append(info)
    assert "bytes unpack to" in fault(archive, "--out", tmp_path / "out")


def test_an_encrypted_member(tmp_path: Path) -> None:
    archive = pack(tmp_path / "z.zip", a__txt=file())
    raw = bytearray(archive.read_bytes())
    raw[6] |= 1
    raw[raw.rindex(b"PK\x01\x02") + 8] |= 1
    archive.write_bytes(raw)
    assert "cannot be unpacked" in fault(archive, "--out", tmp_path / "out")


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a.txt").write_text(file())
    monkeypatch.setattr(os, "fsync", full)
    assert "the disk is full" in fault(tmp_path / "a.txt", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(file())
    assert "--out" in fault(tmp_path / "a.txt", "--out", tmp_path / "a.txt")


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(file())
    with files.locked(tmp_path / "out"):
        assert "another run is writing there" in fault(tmp_path / "a.txt", "--out", tmp_path / "out")
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 0


def test_files_and_numbers_do_not_go_together(tmp_path: Path) -> None:
    assert "expected one or the other" in fault("a.txt", "--numbers", "84", "--out", tmp_path)
    assert "--numbers 0: expected 1 or more" in fault("--numbers", "84", "0", "--out", tmp_path)


# --- books from a host -----------------------------------------------------------------------------------------------

QUICK = Patience(timeout=2.0, attempts=2, backoff=0.01, gap=0.0)


def numbered(number: int, body: str = BOOK) -> bytes:
    return file(body).replace("#4321", f"#{number}").encode()


def fetch(out: Path, *hosts: Any, numbers: Sequence[int] = (84,)) -> Source:
    downloader = Downloader(QUICK)
    return gutenberg.make_source(out, numbers=numbers, base_urls=[h.url for h in hosts], downloader=downloader)


def test_the_list_has_some_hundred_classics() -> None:
    with open(gutenberg.LIST, encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    numbers = [int(row["number"]) for row in rows]
    assert 95 <= len(numbers) <= 105 and numbers == sorted(set(numbers)) == gutenberg.listed_numbers()
    assert all(row["title"].strip() and row["author"].strip() for row in rows)


@pytest.mark.parametrize(
    "path",
    [
        "/cache/epub/84/pg84.txt",
        "/files/84/84-0.txt",
        "/files/84/84-8.txt",
        "/files/84/84.txt",
        "/8/84/84-0.txt",
        "/8/84/84.txt",
    ],
)
def test_a_book_is_found_where_hosts_have_it(tmp_path: Path, host: Any, path: str) -> None:
    host.files[path] = numbered(84)
    source = fetch(tmp_path, host)
    assert texts(tmp_path) == {"84": BOOK} and not source.refused
    assert (tmp_path / "raw" / "84.txt").read_bytes() == numbered(84)
    assert f'"url": "{host.url}{path}"' in (tmp_path / "source.json").read_text()


def test_the_folders_of_mirrors_are_digits() -> None:
    assert "https://m/1/3/4/1342/1342-0.txt" in gutenberg.book_urls("https://m/", 1342)
    assert "https://m/0/5/5.txt" in gutenberg.book_urls("https://m", 5)


def test_mirrors_are_tried_in_turn_and_a_missing_book_is_counted(tmp_path: Path, new_host: Any, faults: Any) -> None:
    first, second = new_host(), new_host()
    first.files["/cache/epub/84/pg84.txt"] = numbered(84)
    first.faults["/cache/epub/85/pg85.txt"] = [faults.status(503)] * 2
    second.files["/cache/epub/85/pg85.txt"] = numbered(85)
    source = fetch(tmp_path, first, second, numbers=[86, 85, 84])
    assert list(texts(tmp_path)) == ["85", "84"]
    (missing,) = source.refused
    assert missing.record == "86.txt" and "HTTP 404" in missing.reason and "13 more URLs" in missing.reason
    first.files["/cache/epub/86/pg86.txt"] = numbered(86)
    seen = len(first.log) + len(second.log)
    assert list(texts(fetch(tmp_path, first, second, numbers=[86, 85, 84]).folder)) == ["86", "85", "84"]
    assert len(first.log) + len(second.log) == seen + 1  # only the one that was missing


def test_another_book_under_the_number_is_refused(tmp_path: Path, host: Any) -> None:
    host.files["/cache/epub/84/pg84.txt"] = numbered(48)
    host.files["/cache/epub/85/pg85.txt"] = numbered(85)
    assert fetch(tmp_path, host, numbers=[84, 85]).refused[0].reason == "is number 48, expected 84"


def test_no_book_at_all_is_an_error_and_leaves_the_older_source(tmp_path: Path, host: Any) -> None:
    host.files["/cache/epub/84/pg84.txt"] = numbered(84)
    fetch(tmp_path, host)
    with pytest.raises(UserError, match="no book in 1 file; the first, 99.txt: could not be downloaded"):
        fetch(tmp_path, host, numbers=[99])
    assert texts(tmp_path) == {"84": BOOK}


def test_a_bad_base_url_is_refused(tmp_path: Path) -> None:
    assert "'htp://x/cache" in fault("--out", tmp_path, "--base-url", "htp://x")


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path: Path, host: Any) -> None:
    numbers = range(100, 112)
    for number in numbers:
        host.files[f"/cache/epub/{number}/pg{number}.txt"] = numbered(number, f"Book {number}.\n" + BOOK * 400)
    host.check_kills("data.gutenberg", ["--numbers", *map(str, numbers)], tmp_path, pace=0.02, seed=5)


# --- real books ------------------------------------------------------------------------------------------------------

ARCHIVE = Path(__file__).parents[3] / "shared" / "data" / "gutenberg.zip"
# Number of the file, first words, last words.
BODIES = [
    ("11", "ALICE’S ADVENTURES IN WONDERLAND Lewis", "the happy summer days. THE END"),
    ("16", "PETER PAN [PETER AND WENDY]", "and innocent and heartless. THE END"),
    ("18", "The Federalist Papers FEDERALIST. No.", '"The Rise of Arts and Sciences."'),
    ("36", "The War of the Worlds", "has counted me, among the dead."),
    ("45", "ANNE OF GREEN GABLES By", "with the world,’” whispered Anne softly."),
    ("55", "The Wonderful Wizard of Oz", 'glad to be at home again!"'),
    ("74", "THE ADVENTURES OF TOM SAWYER", "part of their lives at present."),
    ("76", "ADVENTURES OF HUCKLEBERRY FINN (Tom", "THE END. YOURS TRULY, _HUCK FINN_."),
    ("84", "Frankenstein; or, the Modern Prometheus", "and lost in darkness and distance."),
    ("98", "A TALE OF TWO CITIES", "to than I have ever known.”"),
    ("113", "THE SECRET GARDEN by Frances", "boy in Yorkshire—Master Colin! THE END"),
    ("120", "TREASURE ISLAND by Robert Louis", "“Pieces of eight! Pieces of eight!”"),
    ("132", "SUN TZU ON THE ART", '2. [2] "Marshal Turenne," p. 311.'),
    ("135", "LES MISÉRABLES By Victor Hugo", "night comes when day is gone.]"),
    ("145", "Middlemarch By George Eliot New", "life, and rest in unvisited tombs."),
    ("157", "DADDY-LONG-LEGS by JEAN WEBSTER Copyright", "it funny that I know how?"),
    ("158", "EMMA By Jane Austen VOLUME", "perfect happiness of the union. FINIS"),
    ("174", "The Picture of Dorian Gray", "that they recognized who it was."),
    ("205", "WALDEN, and ON THE DUTY", "imagined, but not yet anywhere seen."),
    ("289", "THE WIND IN THE WILLOWS", "failed to have its full effect."),
    ("345-8", "DRACULA DRACULA _by_ Bram Stoker", "& DUNLAP, _Publishers_, NEW YORK * * * * *"),
    ("345", "DRACULA DRACULA _by_ Bram Stoker", "& DUNLAP, _Publishers_, NEW YORK * * * * *"),
    ("514", "LITTLE WOMEN by Louisa May", 'you a greater happiness than this!"'),
    ("834", "MEMOIRS OF SHERLOCK HOLMES by", "man whom I have ever known."),
    ("996", "DON QUIXOTE Complete by Miguel", 'doomed to fall for ever. Farewell."'),
    ("1184", "THE COUNT OF MONTE CRISTO", "“‘_Wait and hope_ (Fac et spera)!’”"),
    ("1260", "JANE EYRE AN AUTOBIOGRAPHY BY", "respond,--'Amen; even so come, Lord Jesus!'\""),
    ("1342", "PRIDE AND PREJUDICE By Jane", "been the means of uniting them."),
    ("1400", "GREAT EXPECTATIONS [1867 Edition] by", "shadow of another parting from her."),
    ("1497", "THE REPUBLIC By Plato Translated", "years which we have been describing."),
    ("1661", "THE ADVENTURES OF SHERLOCK HOLMES", "she has met with considerable success."),
    ("2554", "CRIME AND PUNISHMENT By Fyodor", "but our present story is ended."),
    ("2600", "WAR AND PEACE By Leo", "of which we are not conscious."),
    ("2701", "MOBY-DICK; or, THE WHALE. By", "missing children, only found another orphan."),
    ("2814", "DUBLINERS By James Joyce Contents", "all the living and the dead."),
    ("5200", "Copyright (C) 2002 David Wyllie.", "and stretch out her young body."),
    ("6130", "The Iliad of Homer Translated", 'termination of "Paradise Lost" somewhat similar.'),
    ("7213", "MY LIFE AND WORK By", "place in life, the right to"),
]
MAX_CUT_LINES = 20  # of credits and notes between the markers, in the book with the longest list of corrections


@cache
def real_books() -> dict[str, tuple[str, Book]]:
    with zipfile.ZipFile(ARCHIVE) as archive:
        files = {name.removesuffix(".txt"): archive.read(name) for name in archive.namelist()}
    books = {name: clean(raw) for name, raw in files.items()}
    return {name: (files[name].decode(book.encoding), book) for name, book in books.items()}


@pytest.mark.slow
@pytest.mark.skipif(not ARCHIVE.exists(), reason="the 38 real books (shared/data/gutenberg.zip next to the repository)")
def test_the_real_books_are_all_in_the_table() -> None:
    assert sorted(real_books()) == sorted(name for name, _, _ in BODIES) and len(BODIES) == 38


@pytest.mark.slow
@pytest.mark.skipif(not ARCHIVE.exists(), reason="the 38 real books (shared/data/gutenberg.zip next to the repository)")
@pytest.mark.parametrize(("name", "first", "last"), BODIES)
def test_nothing_of_a_real_book_is_lost(name: str, first: str, last: str) -> None:
    published, book = real_books()[name]
    assert book.body is not None, book.reason
    words = book.body.split()
    assert " ".join(words).startswith(first) and " ".join(words).endswith(last)
    assert str(book.number) == name.removesuffix("-8") and book.title and book.author
    for trace in ("Project Gutenberg-tm", "Project Gutenberg License", "PROJECT GUTENBERG EBOOK", "Produced by "):
        assert trace not in book.body
    # All lines are the published ones, in their order, and hardly any between the markers is missing.
    lines = [line.rstrip("\r") for line in published.split("\n")]
    rest = iter(line.rstrip() for line in lines)
    assert all(line.rstrip() in rest for line in book.body.splitlines())
    marks = [i for i, line in enumerate(lines) if re.match(r"\*\*\* ?(START|END) OF", line)]
    inside = sum(1 for line in lines[marks[0] + 1 : marks[1]] if line.strip())
    assert inside - sum(1 for line in book.body.splitlines() if line.strip()) <= MAX_CUT_LINES


@pytest.mark.slow
@pytest.mark.skipif(not ARCHIVE.exists(), reason="the 38 real books (shared/data/gutenberg.zip next to the repository)")
def test_the_real_archive_becomes_a_source(tmp_path: Path) -> None:
    source = gutenberg.make_source(tmp_path, [ARCHIVE])
    assert texts(tmp_path) == {name: book.body for name, (_, book) in real_books().items() if not book.copyrighted}
    assert {refusal.record for refusal in source.refused} == {"gutenberg.zip: 16.txt", "gutenberg.zip: 5200.txt"}
