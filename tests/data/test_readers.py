"""Packed files, tables, web pages, WARC, PDF and Word become documents; damaged and hostile ones are refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import resource
import signal
import zipfile
from pathlib import Path

import duckdb
import pytest

from tests.data.conftest import fault_of
from tinyforge.data import local, readers
from tinyforge.data.local import main, make_source, read_documents
from tinyforge.data.source import read_source

STORY = "The lighthouse keeper of the island walked down to the harbour every morning, and the boats waited for him. "
PAGE = (
    "<html><head><title>A page &amp; more</title></head><body><nav><a href='/'>Home</a> <a href='/a'>About us</a></nav>"
    f"<article><h1>The keeper</h1><p>{STORY}</p><p>Then {STORY}</p><p>At last {STORY}</p></article>"
    "<footer>Copyright. All rights reserved. Imprint.</footer></body></html>"
)
ROWS = [{"text": f"text {n}", "id": f"own-{n}"} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(content: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(content))


def source_of(path: Path, *inputs: Path, column: str = "text") -> dict[str, str]:
    source = make_source(path / "out", inputs, column=column)
    found = duckdb.sql(f"SELECT id, text FROM read_parquet({[str(p) for p in source.parquet]})").fetchall()
    assert len(dict(found)) == len(found)
    return dict(found)


def refused(path: Path, name: str, content: bytes) -> str:
    """Why a file is refused whole, next to one that is not."""
    (path / "good.txt").write_text("good")
    (path / name).write_bytes(content)
    assert main([str(path / "good.txt"), str(path / name), "--out", str(path / "out")]) == 1
    source = read_source(path / "out")
    assert source.documents >= 1
    assert source.refused[-1].record.startswith(name)
    assert "\n" not in source.refused[-1].reason
    return source.refused[-1].reason


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.ndjson.gz"])
def test_packed_lines_are_read_with_the_ids_of_their_records(tmp_path: Path, name: str) -> None:
    pack = zstd if name.endswith(".zst") else gzip.compress
    # Two members, or frames: tools append them.
    (tmp_path / name).write_bytes(pack(LINES[:40]) + pack(LINES[40:]))
    assert source_of(tmp_path, tmp_path / name) == {f"own-{n}": f"text {n}" for n in range(3)}
    assert read_documents([tmp_path / name]) == [f"text {n}" for n in range(3)]


def test_an_id_that_stands_twice_gets_the_name_of_its_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(LINES + LINES[: LINES.index(b"\n") + 1])
    found = source_of(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert list(found)[:5] == ["own-0", "own-1", "own-2", "a.jsonl:own-0", "b.jsonl:own-0"]
    assert list(found)[-1] == "b.jsonl:own-0:2"


def test_a_path_into_structs_of_parquet_and_json(tmp_path: Path) -> None:
    table, lines = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    duckdb.sql(f"COPY (SELECT 7 AS id, {{'text': 'row'}} AS page) TO '{table}' (FORMAT parquet)")
    lines.write_text('{"page": {"text": "line"}}\n')
    assert source_of(tmp_path, table, lines, column="page.text") == {"7": "row", "b.jsonl:1": "line"}
    duckdb.sql(f"COPY (SELECT 1 AS number) TO '{tmp_path}/c.parquet' (FORMAT parquet)")
    assert "expected a column 'page.text' of strings" in fault_of(
        make_source, tmp_path / "o", [tmp_path / "c.parquet"], column="page.text"
    )


def test_tables_by_the_name_of_their_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeffbody,id\n"one, ""two""\nthree",x\nfour,y\n')
    (tmp_path / "b.tsv").write_text("id\tbody\n1\tfive\n")
    found = source_of(tmp_path, tmp_path / "a.csv", tmp_path / "b.tsv", column="body")
    assert found == {"x": 'one, "two"\nthree', "y": "four", "1": "five"}
    assert "got the columns ['a', 'b'], expected 'text'" in refused(tmp_path, "c.csv", b"a,b\n1,2\n")
    assert "malformed csv" in refused(tmp_path, "d.csv", b'text\n"open')
    assert "got byte 0xe9" in refused(tmp_path, "e.csv", b"text\ncaf\xe9\n")


@pytest.mark.parametrize("mark", [";", "\t", "|", ","])
@pytest.mark.parametrize("declared", [False, True])
def test_the_head_line_tells_what_separates_the_cells(tmp_path: Path, mark: str, declared: bool) -> None:
    rows = [["id", "text", "note, or not"], ["x", 'one; two, "three" | four\tfive\nsix', "1,5"], ["y", "seven", ""]]
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=mark).writerows(rows)
    # Excel writes such a line, and needs it where its language's separator is another.
    (tmp_path / "a.csv").write_text(f"sep={mark}\r\n" * declared + file.getvalue(), newline="")
    assert source_of(tmp_path, tmp_path / "a.csv") == {"x": rows[1][1], "y": "seven"}


def test_a_declared_separator_that_is_rare(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sep=^\nid^text\nx^one, two; three\n")
    assert source_of(tmp_path, tmp_path / "a.csv") == {"x": "one, two; three"}


def test_no_part_of_a_text_with_commas_is_lost_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none, two, three\nfour\n")
    assert main([str(tmp_path / "a.csv"), "--out", str(tmp_path / "out")]) == 1
    [refusal] = read_source(tmp_path / "out").refused
    assert refusal.record == "a.csv:0"
    assert refusal.reason == "got 3 cells, expected 1; quote text with separators in it"


def test_a_line_that_is_too_long_is_refused_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_BYTES", 100)
    long = b'{"text": "' + b"word " * 70 + b'"}\n'
    fits = json.dumps({"text": "a" * 87}).encode() + b"\n"
    assert len(fits) == 100
    (tmp_path / "a.jsonl").write_bytes(long + fits + b'{"text": "after"}\n')
    assert main([str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == 1
    source = read_source(tmp_path / "out")
    assert [(r.record, r.reason) for r in source.refused] == [("a.jsonl:1", "more than 100 bytes in a line; split it")]
    assert source.documents == 2


def test_a_table_in_utf_16_is_named(tmp_path: Path) -> None:
    content = "text;id\none;1\n".encode("utf-16")
    assert "pass --encoding utf-16" in refused(tmp_path, "a.csv", content)
    assert make_source(tmp_path / "o", [tmp_path / "a.csv"], encoding="utf-16").documents == 1


def test_a_quotation_mark_separates_no_cells(tmp_path: Path) -> None:
    assert "got the columns ['sep=\"'], expected 'text'" in refused(tmp_path, "a.csv", b'sep="\ntext\none\n')


def test_a_line_that_is_no_row_of_a_table_ends_its_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_BYTES", 1000)
    assert "a line of more than 1,000 characters" in refused(tmp_path, "a.csv", b"text\n" + b"word " * 300)


def test_the_main_text_of_a_page(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura")
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b.htm.gz").write_bytes(gzip.compress(PAGE.encode()))
    (text, other) = source_of(tmp_path, tmp_path / "a.html", tmp_path / "b.htm.gz").values()
    assert text.count(STORY[4:].strip()) == 3 == other.count(STORY[4:].strip())
    assert not any(word in text for word in ("Home", "About us", "Imprint", "<"))
    assert duckdb.sql(f"SELECT DISTINCT title FROM '{tmp_path}/out/*.parquet'").fetchall() == [("A page & more",)]


def warc_of(pages: list[tuple[str, str, bytes]], packed: bool) -> bytes:
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    file = io.BytesIO()
    writer = WARCWriter(file, gzip=packed)
    writer.write_record(writer.create_warcinfo_record("a.warc", {"software": "test"}))
    for url, kind, content in pages:
        headers = [("Content-Type", kind)]
        if kind.endswith("gzip"):
            headers, content = [("Content-Type", "text/html"), ("Content-Encoding", "gzip")], gzip.compress(content)
        http = StatusAndHeaders("200 OK", headers, protocol="HTTP/1.1")
        record = writer.create_warc_record(url, "response", payload=io.BytesIO(content), http_headers=http)
        record.rec_headers.replace_header("WARC-Record-ID", f"<urn:uuid:{url[-1]}>")
        writer.write_record(record)
    return file.getvalue()


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.warc.zst"])
def test_the_pages_of_a_warc_file(tmp_path: Path, name: str) -> None:
    for package in ("warcio", "zstandard", "trafilatura"):
        pytest.importorskip(package)
    german = PAGE.replace("keeper</h1>", "Wärter</h1>").encode("latin-1")
    pages = [
        ("http://host/1", "text/html; charset=utf-8", PAGE.encode()),
        ("http://host/2", "image/png", b"\x89PNG"),
        ("http://host/3", "text/html; charset=iso-8859-1", german),
        ("http://host/4", "text/html; gzip", PAGE.encode()),
    ]
    content = warc_of(pages, name.endswith(".gz"))
    (tmp_path / name).write_bytes(zstd(content) if name.endswith(".zst") else content)
    found = source_of(tmp_path, tmp_path / name)
    assert list(found) == ["1", "3", "4"]
    assert all(STORY.strip() in text for text in found.values()) and "Wärter" in found["3"]
    urls = duckdb.sql(f"SELECT url FROM '{tmp_path}/out/*.parquet' ORDER BY url").fetchall()
    assert urls == [("http://host/1",), ("http://host/3",), ("http://host/4",)]


def test_the_texts_of_a_wet_file_as_common_crawl_names_it(tmp_path: Path) -> None:
    pytest.importorskip("warcio")
    body = STORY.encode()
    head = "WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://host/1\r\nWARC-Record-ID: <urn:uuid:1>\r\n"
    record = f"{head}Content-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body + b"\r\n\r\n"
    (tmp_path / "CC-MAIN-1.warc.wet.gz").write_bytes(gzip.compress(record))
    assert source_of(tmp_path, tmp_path / "CC-MAIN-1.warc.wet.gz") == {"1": STORY}
    assert "without their text" in refused(tmp_path, "CC-MAIN-1.warc.wat.gz", gzip.compress(record))


def test_word_and_pdf(tmp_path: Path) -> None:
    docx = pytest.importorskip("docx")
    pypdf = pytest.importorskip("pypdf")
    document = docx.Document()
    document.add_paragraph("Before the table.")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "left", "right"
    document.add_paragraph("After it.")
    document.save(str(tmp_path / "a.docx"))
    assert source_of(tmp_path, tmp_path / "a.docx") == {"a.docx": "Before the table.\nleft | right\nAfter it."}
    assert "without a password" in refused(tmp_path, "b.docx", b"\xd0\xcf\x11\xe0" + bytes(600))
    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(tmp_path / "scan.pdf")
    assert "a PDF without text" in refused(tmp_path, "b.pdf", (tmp_path / "scan.pdf").read_bytes())
    pyplot = pytest.importorskip("matplotlib.figure")
    figure = pyplot.Figure()
    figure.text(0.1, 0.5, "A sentence on a page.")
    figure.savefig(tmp_path / "c.pdf")
    assert "A sentence on a page." in source_of(tmp_path, tmp_path / "c.pdf")["c.pdf"]


CONTAINER = '<container><rootfiles><rootfile full-path="O/b.opf" media-type="x"/></rootfiles></container>'
PACKAGE = """<?xml version="1.0"?><opf:package xmlns:opf="http://www.idpf.org/2007/opf"><opf:manifest>
<opf:item id="two" href="t%20wo.xhtml"/><opf:item id="one" href="text/../one.xhtml"/>
<opf:item id="nav" href="nav.xhtml" properties="nav"/></opf:manifest>
<opf:spine><opf:itemref idref="nav"/><opf:itemref idref="one"/><opf:itemref idref="two"/></opf:spine></opf:package>"""


def book(**more: bytes) -> bytes:
    chapter = "<html><head><title>no</title><style>p {{}}</style></head><body>{}</body></html>"
    files = {
        "META-INF/container.xml": CONTAINER.encode(),
        "O/b.opf": PACKAGE.encode(),
        "O/t wo.xhtml": chapter.format("<pre>a = 1\n  b = 2</pre><p>The<br/>end.</p><script>no</script>").encode(),
        "O/one.xhtml": chapter.format("<h1>One</h1>\n<p>Fish &amp;\n <i>ch</i>ips.</p><p>More.</p>").encode("utf-16"),
        "O/nav.xhtml": chapter.format("<nav>Contents</nav>").encode(),
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (files | more).items():
            archive.writestr(name, content)
    return file.getvalue()


def test_the_chapters_of_an_epub_in_the_order_of_its_spine(tmp_path: Path) -> None:
    (tmp_path / "a.epub").write_bytes(book())
    text = "One\n\nFish & chips.\n\nMore.\n\na = 1\nb = 2\n\nThe\nend."
    assert source_of(tmp_path, tmp_path / "a.epub") == {"a.epub": text} and read_documents([tmp_path / "a.epub"]) == [
        text
    ]
    protection = b'<enc:CipherReference URI="O/one.xhtml"/>'
    assert "protected" in refused(tmp_path, "b.epub", book(**{"META-INF/encryption.xml": protection}))
    assert "O/other.opf" in refused(
        tmp_path, "c.epub", book(**{"META-INF/container.xml": b'<rootfile full-path="O/other.opf"/>'})
    )
    assert "not a readable zip" in refused(tmp_path, "d.epub", b"PK")
    assert "is empty" in refused(tmp_path, "e.epub", book(**{"O/b.opf": b"<package/>"}))
    assert "do not trust" in refused(tmp_path, "f.epub", bomb_of(book()))


def bomb_of(archive: bytes) -> bytes:
    file = io.BytesIO(archive)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("bomb.xml", b"a" * (30 << 20))
    return file.getvalue()


def test_a_damaged_pdf_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pypdf")
    assert "not a readable PDF" in refused(tmp_path, "a.pdf", b"%PDF-1.7\n")
    assert "marker" not in capfd.readouterr().err


def test_a_pdf_that_takes_for_ever_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pypdf = pytest.importorskip("pypdf")

    def hang(page: object) -> str:
        while True:
            try:
                sum(range(1000))
            except Exception:  # as libraries have it
                continue

    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(tmp_path / "x.pdf")
    before = signal.getsignal(signal.SIGVTALRM)
    monkeypatch.setattr(pypdf.PageObject, "extract_text", hang)
    monkeypatch.setattr(readers, "PDF_SECONDS", 0.2)
    monkeypatch.setattr(readers, "PDF_PAGE_SECONDS", 0.1)
    assert "takes too long" in refused(tmp_path, "a.pdf", (tmp_path / "x.pdf").read_bytes())
    assert signal.getsignal(signal.SIGVTALRM) is before and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


@pytest.mark.parametrize("name", ["a.mobi", "a.epub.gz", "a.xlsx", "a.tar", "a.tar.gz", "a.parquet.gz", "a.zip.zst"])
def test_a_format_that_is_not_read_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    reason = refused(tmp_path, name, b"PK")
    assert name.split(".")[1] in reason and any(word in reason for word in ("convert", "export", "unpack"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.warc.gz", "a.warc.zst", "a.txt.gz", "a.txt.zst"])
def test_a_file_that_is_cut_off_or_damaged_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    pytest.importorskip("warcio")
    pack = zstd if name.endswith(".zst") else gzip.compress
    text = "".join(json.dumps({"text": f"{n * 7919 % 10007} {n}"}) + "\n" for n in range(3000)).encode()
    content = pack(warc_of([("http://host/1", "text/html", text)], False) if ".warc" in name else text)
    damaged = content[:200] + bytes(byte ^ 0x55 for byte in content[200:260]) + content[260:]
    for broken in (content[: len(content) // 2], damaged, b"not packed"):
        assert "damaged or incomplete" in refused(tmp_path, name, broken)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.warc.gz"])
def test_what_stands_before_a_cut_is_kept(tmp_path: Path, name: str) -> None:
    pytest.importorskip("warcio")
    if ".warc" in name:
        content = warc_of([(f"http://host/{n}", "text/html", PAGE.encode()) for n in range(3)], True)[:-100]
    else:
        texts = [random.Random(n).randbytes(1000).hex() for n in range(3)]
        lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
        content = b"".join((zstd if ".zst" in name else gzip.compress)(line) for line in lines)[:-100]
    (tmp_path / name).write_bytes(content)
    source = make_source(tmp_path / "out", [tmp_path / name])
    assert source.documents == 2 and [refusal.record for refusal in source.refused] == [name]


def test_a_bomb_takes_little_memory(tmp_path: Path) -> None:
    docx = pytest.importorskip("docx")
    zeros = b"a" * (300 << 20)
    packed = {"a.txt.gz": gzip.compress(zeros, 1), "b.txt.zst": zstd(zeros)}
    document = io.BytesIO()
    docx.Document().save(document)
    bomb = io.BytesIO(document.getvalue())
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/media/bomb.xml", zeros)
    del zeros
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, content in packed.items():
        assert "split it" in refused(tmp_path, name, content)
    assert "do not trust this archive" in refused(tmp_path, "c.docx", bomb.getvalue())
    assert f"{readers.PAGE_BYTES:,}" in refused(tmp_path, "d.html", b"<p>word</p>" * (9 << 20))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
