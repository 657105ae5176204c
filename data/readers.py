"""Files as the web and offices have them: packed lines, tables, web pages, archives of pages, PDF, Word, EPUB.

    with unpacked(Path("web.jsonl.gz")) as file: ...        # .gz and .zst while they are read, never on the disk
    page_of(b"<html>...")  ->  ("title", "text")            # without menus, headers and footers
    for url, id_, raw in responses(file): ...               # the pages of a WARC file

Well-kept packages do the work: trafilatura (pages), warcio, zstandard, pypdf, python-docx. Each is imported when its
format is met; without it the file is refused with the command that installs it. Of the main text of 64 pages
trafilatura finds more than resiliparse and less else (recall 0.90 to 0.86, precision 0.94 to 0.83), in 16 times its
CPU time.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import logging
import posixpath
import re
import signal
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from tinyforge.data.files import MAX_BYTES, Member, zip_members
from tinyforge.errors import UserError
from tinyforge.requirements import needs

PAGE_BYTES = 8 << 20  # of HTML in one piece: its tree takes ten times as much memory
PACKED = (".gz", ".zst")
LINES, TABLES, PAGES = (".jsonl", ".ndjson"), (".csv", ".tsv"), (".html", ".htm", ".xhtml")
WARC, PARQUET, JSON, PDF, WORD, BOOK = ".warc", ".parquet", ".json", ".pdf", ".docx", ".epub"
KNOWN = (*LINES, *TABLES, *PAGES, WARC, PARQUET, JSON, PDF, WORD, BOOK)
# What is not text, and how it becomes text.
UNREAD = {
    (".doc", ".odt", ".rtf", ".mobi"): "convert it to .txt or .docx, for instance with pandoc or LibreOffice",
    (".xls", ".xlsx", ".ods"): "export it as .csv",
    (".ppt", ".pptx"): "export it as .pdf",
    (".wat",): "it has the addresses of pages without their text; take the .warc or .wet file",
    (".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz", ".lz4"): "unpack it, or pack it as .zip, .gz or .zst",
}
_PAGE_KINDS = ("text/html", "application/xhtml+xml")
PDF_SECONDS, PDF_PAGE_SECONDS = 60, 1  # of CPU time: for a document, and more for each page
_OLE = b"\xd0\xcf\x11\xe0"  # begins files of Microsoft Office before 2007, and encrypted ones since
_PIECE = 2048  # packed bytes at a time: a bomb unpacks 32,000 to 1


class BadRecord(Exception):
    """What is wrong with a file or one of its records."""


def kind_of(name: str) -> tuple[str, str]:
    """The format of a file by its name, as a suffix, and the suffix of its packing or "". BadRecord for a format that
    is known and not read."""
    path = Path(name.lower())
    packing = path.suffix if path.suffix in PACKED else ""
    suffix = Path(path.stem).suffix if packing else path.suffix
    suffix = WARC if suffix == ".wet" else suffix  # Common Crawl has NAME.warc.wet.gz
    for suffixes, advice in UNREAD.items():
        if suffix in suffixes:
            raise BadRecord(f"{suffix} is not read; {advice}")
    if packing and suffix in (PARQUET, PDF, WORD, BOOK, ".zip"):
        raise BadRecord(f"is a {suffix} file inside {packing}; unpack it first")
    return suffix, packing


def _package(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise BadRecord(needs("it", package, "data")) from None


class _Unzstd:
    """Reads Zstandard frames. zstandard's own reader ends without an error where the last frame is cut off."""

    def __init__(self, file: IO[bytes], library: Any) -> None:
        self._file, self._library = file, library
        self._frame, self._left, self._packed, self._begun = self._next(), b"", b"", False

    def _next(self) -> Any:
        return self._library.ZstdDecompressor(max_window_size=1 << 27).decompressobj()

    def read(self, size: int) -> bytes:
        while not self._left:
            self._packed = self._packed or self._file.read(_PIECE)
            if not self._packed:
                if self._begun:
                    raise EOFError("its last frame is cut off")
                return b""
            self._left, self._packed, self._begun = self._frame.decompress(self._packed), b"", True
            if self._frame.eof:
                self._packed, self._frame, self._begun = self._frame.unused_data, self._next(), False
        found, self._left = self._left[:size], self._left[size:]
        return found


class _Checked(io.RawIOBase):
    """The bytes of a reader, whose faults become BadRecord: a library takes an EOFError for the end."""

    def __init__(self, reader: Any, packing: str, faults: tuple[type[Exception], ...]) -> None:
        # Of a GzipFile `read` loses what it has unpacked before the damage.
        self._read, self._packing, self._faults = getattr(reader, "read1", reader.read), packing, faults

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            found = self._read(len(buffer))
        except self._faults as error:
            what = f"is a damaged or incomplete {self._packing[1:]} file"
            raise BadRecord(f"{what} ({error}); download it again") from None
        buffer[: len(found)] = found
        return len(found)


@contextmanager
def unpacked(path: Path, packing: str = "") -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked by its suffix `packing`. Reading raises BadRecord where they are damaged."""
    with open(path, "rb") as file:
        opened: Any = file
        if packing == ".gz":
            faults = (EOFError, gzip.BadGzipFile, zlib.error)
            opened = io.BufferedReader(_Checked(gzip.GzipFile(fileobj=file), packing, faults), 1 << 16)
        elif packing:
            library = _package("zstandard", "zstandard")
            checked = _Checked(_Unzstd(file, library), packing, (EOFError, library.ZstdError))
            opened = io.BufferedReader(checked, 1 << 16)
        yield opened


def read_piece(file: IO[bytes], most: int = MAX_BYTES) -> bytes:
    """All bytes of a file that becomes one document; BadRecord if there are more than `most`."""
    raw = file.read(most + 1)
    if len(raw) > most:
        raise BadRecord(f"more than {most:,} bytes, which are read in one piece; split it")
    return raw


def table_rows(file: IO[bytes], suffix: str, encoding: str, column: str) -> Iterator[dict[str | Any, Any]]:
    """The rows of a table, as `cut_rows` has them. BadRecord for a malformed one, or if `column` is not among the
    names."""
    text = io.TextIOWrapper(
        file, encoding="utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding, newline=""
    )
    try:
        yield from cut_rows(_bounded(text), suffix, column)
    except csv.Error as error:
        raise BadRecord(f"malformed {suffix[1:]} ({error}); fix it there") from None
    finally:
        text.detach()


def cut_rows(lines: Iterator[str], suffix: str, column: str = "") -> Iterator[dict[str | Any, Any]]:
    """The rows of a table with a head line, by the names there; under None the cells of a row that are too many.
    BadRecord if `column` is not among the names; csv.Error for a malformed table.

    The cells are separated by whatever cuts the head line so that `column` is in it, or without one into the most
    cells, or by what a line `sep=;` names.
    """
    before = csv.field_size_limit(MAX_BYTES)  # of all readers in the process
    try:
        head = next(lines, "")
        declared = re.fullmatch(r"sep=([^\"\r\n])\r?\n?", head)
        separators = declared[1] if declared else "\t,;|" if suffix == ".tsv" else ",;\t|"
        head = next(lines, "") if declared else head
        names = {mark: next(csv.reader([head], delimiter=mark), []) for mark in separators}
        cut = max(separators, key=lambda mark: column in names[mark] if column else len(names[mark]))
        rows = csv.DictReader(itertools.chain([head], lines), delimiter=cut, strict=True)
        if column and (found := rows.fieldnames) and column not in found:
            raise BadRecord(f"got the columns {str(found)[:100]}, expected '{column}'; use data.local --column")
        yield from rows
    finally:
        csv.field_size_limit(before)


def _bounded(text: io.TextIOWrapper) -> Iterator[str]:
    """The lines; BadRecord for one that is too long to be held in memory."""
    while line := text.readline(MAX_BYTES):
        if len(line) == MAX_BYTES:
            raise BadRecord(f"has a line of more than {MAX_BYTES:,} characters; is it a table?")
        yield line


def page_of(raw: bytes, charset: str | None = None) -> tuple[str, str]:
    """The title and the main text of a web page: without its menus, headers and footers."""
    library = _package("trafilatura", "trafilatura")
    if len(raw) > PAGE_BYTES:
        raise BadRecord(f"got {len(raw):,} bytes of HTML, expected at most {PAGE_BYTES:,}; leave it out")
    try:
        tree = library.load_html(raw.decode(charset, "replace") if charset else raw)
    except LookupError:  # a charset that nobody knows
        tree = library.load_html(raw)
    if tree is None:
        raise BadRecord("is not HTML with text")
    title = " ".join((tree.findtext(".//title") or "").split())
    return title, (library.extract(tree, include_comments=False) or "").strip()


def responses(file: IO[bytes]) -> Iterator[tuple[str, str, str | None, bytes | None]]:
    """The URL, the id, the charset and the bytes of each page of a WARC file, or of each text of a WET file, whose
    charset is "text". None in place of more than `PAGE_BYTES`."""
    library = _package("warcio.archiveiterator", "warcio")
    faults = _package("warcio.exceptions", "warcio").ArchiveLoadFailed
    try:
        # Read from the buffer, a record before the damage would be lost.
        for record in library.ArchiveIterator(getattr(file, "raw", file)):
            kind, _, rest = ((record.http_headers and record.http_headers.get_header("Content-Type")) or "").partition(
                ";"
            )
            text = record.rec_type == "conversion"
            if not text and (record.rec_type != "response" or kind.strip().lower() not in _PAGE_KINDS):
                continue
            raw = record.content_stream().read(PAGE_BYTES + 1)
            if len(raw) <= PAGE_BYTES and getattr(record.raw_stream, "limit", False):
                raise EOFError("its last record is cut off")
            found = re.search(r"charset=[\"']?([\w.:-]+)", rest, re.IGNORECASE)
            charset = "text" if text else found and found[1]
            headers = record.rec_headers
            name = re.sub(r"^<?(?:urn:uuid:)?|>$", "", headers.get_header("WARC-Record-ID") or "")
            url = headers.get_header("WARC-Target-URI") or ""
            yield url, name, charset, raw if len(raw) <= PAGE_BYTES else None
    except (faults, EOFError, ValueError, zlib.error) as error:
        reason = " ".join(str(error).split())[:100]
        raise BadRecord(f"is a damaged or incomplete WARC file ({reason}); download it again") from None


class _TooLong(BaseException):
    """The time is over; no handler of a library's own faults catches it."""


@contextmanager
def _cpu_limit() -> Iterator[Any]:
    """Yields a function that takes the seconds of CPU time until `_TooLong` is raised, and again each second, in
    case that it is caught. Without effect on Windows, and in other threads than the first."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield lambda seconds: None
        return

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def pdf_text(raw: bytes) -> str:
    """The text of a PDF, page after page; BadRecord for a scan without text, and for one that takes too long."""
    pypdf = _package("pypdf", "pypdf")
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what it mends in a file, on many lines
    try:
        with _cpu_limit() as limit:
            limit(PDF_SECONDS)
            reader = pypdf.PdfReader(io.BytesIO(raw))
            limit(PDF_SECONDS + PDF_PAGE_SECONDS * len(reader.pages))
            text = "\n\n".join(filter(str.strip, (page.extract_text() for page in reader.pages)))
    except _TooLong:
        raise BadRecord("is a PDF that takes too long to read; print it to a new PDF, or leave it out") from None
    except Exception as error:  # pypdf raises whatever Python does for a damaged file
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise BadRecord(f"not a readable PDF ({reason}); save it again, or leave it out") from None
    if not text:
        raise BadRecord(
            "is a PDF without text, such as a scan; recognise its letters first, for instance with ocrmypdf"
        )
    return text


def _word_part(part: Any) -> str:
    """A paragraph, or a table with a line for each row."""
    if hasattr(part, "text"):
        return str(part.text)
    return "\n".join(" | ".join(cell.text for cell in row.cells) for row in part.rows)


def word_text(path: Path) -> str:
    """The paragraphs and tables of a Word document, in order."""
    docx = _package("docx", "python-docx")
    with open(path, "rb") as file:
        if file.read(4) == _OLE:
            raise BadRecord("is an encrypted document, or an old .doc; save it as .docx without a password")
    try:
        zip_members(path)  # refuses a bomb
        parts = docx.Document(str(path)).iter_inner_content()
        return "\n".join(map(_word_part, parts))
    except UserError as error:
        raise BadRecord(str(error).partition(": ")[2]) from None
    except (KeyError, ValueError, zipfile.BadZipFile, zlib.error, SyntaxError, docx.opc.exceptions.OpcError) as error:
        raise BadRecord(f"not a readable Word document ({' '.join(str(error).split())[:100]}); save it again") from None


_BLOCKS = frozenset(
    "address article aside blockquote body br dd div dl dt figcaption figure footer h1 h2 h3 h4 h5 h6 header hr li nav "
    "ol p pre section table td th tr ul".split()
)
_UNSEEN = frozenset(("head", "rt", "script", "style", "title"))  # rt: how a character is read


class _Tags(HTMLParser):
    """The tags of a file, without their prefixes, and its text with an empty line between blocks."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self._pieces: list[str] = []
        self._unseen = self._pre = 0
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        tag = tag.rpartition(":")[2]
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._unseen += tag in _UNSEEN
        self._pre += tag == "pre"
        if tag in _BLOCKS:
            self._pieces.append("\0" if tag in ("br", "td", "th") else "\0\0")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        tag = tag.rpartition(":")[2]
        self._unseen -= tag in _UNSEEN and self._unseen > 0
        self._pre -= tag == "pre" and self._pre > 0
        if tag in _BLOCKS and tag not in ("br", "td", "th"):
            self._pieces.append("\0\0")

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            data = data.replace("\0", "")
            self._pieces.append(data.replace("\n", "\0") if self._pre else data)

    @property
    def text(self) -> str:
        joined = re.sub(r" ?(\0+) ?", r"\1", re.sub(r"[ \t\r\n]+", " ", "".join(self._pieces)))
        return re.sub(r"\0+", lambda found: "\n" if len(found[0]) == 1 else "\n\n", joined).strip()


def book_text(path: Path) -> str:
    """The text of an EPUB's chapters, in the order of its spine; BadRecord for one that is damaged or protected."""
    try:
        members = {member.name: member for member in zip_members(path)}
        package = _named(_tags_of(members, "META-INF/container.xml"), "rootfile")[0]["full-path"]
        tags = _tags_of(members, package)
        items = {found["id"]: found for found in _named(tags, "item") if {"id", "href"} <= found.keys()}
        spine = [items[found["idref"]] for found in _named(tags, "itemref") if found.get("idref") in items]
        spine = [found for found in spine if "nav" not in found.get("properties", "").split()]
        folder = posixpath.dirname(package)
        chapters = [posixpath.normpath(posixpath.join(folder, unquote(found["href"]))) for found in spine]
        protected = {found.get("uri") for found in _named(_tags_of(members, _ENCRYPTION), "cipherreference")}
        if protected & set(chapters):
            raise BadRecord("is a protected EPUB; get it without protection, or leave it out")
        texts = [_Tags(_decoded(members[name])).text for name in chapters if name in members]
    except UserError as error:
        raise BadRecord(str(error).partition(": ")[2]) from None
    except (KeyError, IndexError, AssertionError) as error:
        raise BadRecord(f"not a readable EPUB (nothing at {str(error)[:60]}); convert it to .txt") from None
    return "\n\n".join(filter(None, texts))


_ENCRYPTION = "META-INF/encryption.xml"


def _tags_of(members: dict[str, Member], name: str) -> list[tuple[str, dict[str, str]]]:
    return [] if name == _ENCRYPTION and name not in members else _Tags(_decoded(members[name])).tags


def _named(tags: list[tuple[str, dict[str, str]]], name: str) -> list[dict[str, str]]:
    return [attributes for tag, attributes in tags if tag == name]


def _decoded(member: Member) -> str:
    """EPUB's files are UTF-8 or UTF-16."""
    raw = member.read()
    return raw.decode("utf-16" if raw[:2] in (b"\xfe\xff", b"\xff\xfe") else "utf-8-sig", "replace")
