"""Books of Project Gutenberg: the licence and the credits go, the book stays.

    python -m data.gutenberg books.zip 84.txt more/ --out books    # cleaned text, one file a book
    clean(Path("84.txt").read_bytes())  ->  Book(body="Frankenstein; ...", title="Frankenstein", ...)

A file as published is a header, a START marker, the book, an END marker and a licence of some 18 kB, the same in
every file: a model would learn it by heart. Only what is certainly not the book is cut. A file in which that is not
certain (a marker is missing, or licence text is left between them) is refused with a reason, not half cleaned.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from tinyforge.errors import UserError, run_command

MAX_BYTES = 64 << 20  # of one book; the largest novels have 4 MB
MAX_RATIO = 100  # unpacked to packed; text packs 3 to 5 times, a zip bomb 1000


@dataclass(frozen=True)
class Book:
    """What `clean` made of a file: a body, or the reason why there is none."""

    body: str | None  # lines end in "\n"; None if the file was refused
    reason: str  # of the refusal; empty if there is a body
    encoding: str  # the one that was found: ascii, utf-8, utf-8-sig, utf-16, cp1252 or latin-1
    number: int | None = None
    title: str = ""
    author: str = ""  # several are joined by ", "
    copyrighted: bool = False  # the header says so: not in the public domain, distributed with permission
    cut: tuple[str, ...] = ()  # what went, in words


class _Refusal(Exception):
    """Why a file cannot be cleaned."""


# --- the markers -----------------------------------------------------------------------------------------------------

_OWNER = r"(?:the[ ]|this[ ])?(?:copyrighted[ ])?project[ ]gutenberg"
_FLAGS = re.IGNORECASE | re.MULTILINE | re.VERBOSE


def _stars(word: str) -> re.Pattern[str]:
    """A marker in stars; a long title may wrap onto three more lines before the closing stars."""
    wrapped = r"[^\n*]*(?:\n[^\n*]+){1,3}\*{2,}[ \t]*$"
    return re.compile(rf"^[ \t]*\*{{2,}}[ \t]*{word}[ ]of[ ]{_OWNER}(?:{wrapped}|[^\n]*)", _FLAGS)


_START = _stars("start")
_END = _stars("end")
# Until 2004 the licence, "the small print", stood before the book, and its last line is all that marks the start.
_SMALL_PRINT_START = re.compile(r"^[ \t]*\*+[ ]?start[ ]?\**[ ]?the[ ]small[ ]print[^\n]*", _FLAGS)
_SMALL_PRINT_END = re.compile(r"^[ \t]*\*+[ ]?end[ ]?\**[ ]?the[ ]small[ ]print[^\n]*", _FLAGS)
# The last line of those files, and in later ones the line above the END marker.
_LAST_LINE = re.compile(
    rf"^[ \t]*[*\[]*[ ]?(?:(?:this[ ]is[ ])?(?:the[ ])?end[ ]of[ ]{_OWNER}|ende[ ]diese[sr]?[ ]proje[ck]t[ ]gutenberg"
    r"|fin[ ]de[ ]project[ ]gutenberg)\b[^\n]*",
    _FLAGS,
)
_LICENCE = re.compile(
    r"project[ ]gutenberg(?:-tm|\u2122)|gutenberg[ ]literary[ ]archive|project[ ]gutenberg[ ]license"
    r"|the[ ]small[ ]print!"
    rf"|\*[ ]?(?:start|end)[ ]of[ ]{_OWNER}|is[ ]a[ ]copyrighted[ ]project[ ]gutenberg",
    _FLAGS,
)

# --- what stands between the markers and is not the book -------------------------------------------------------------

_MADE = r"(?:produced|prepared|transcribed|scanned|digiti[sz]ed|typed|keyed|proofread|proofed|converted|created)"
_CREDIT = re.compile(
    rf"""^[ \t]*[\[(*_]*(?:
        (?:this[ ])?(?:project[ ]gutenberg[ ])?(?:e-?text|e-?book|file|html[ ]version)[ ](?:was[ ])?(?:first[ ])?
            {_MADE}\b
      | {_MADE}(?:[ ]and[ ]{_MADE})?[ ]by\b
      | transcribed[ ]from[ ]the\b
      | an[ ]anonymous[ ](?:project[ ]gutenberg[ ])?volunteers?\b
      | html[ ]version[ ]by\b
      | \(?this[ ]file[ ]was[ ]produced[ ]from[ ]images\b
      | (?:and[ ])?the[ ](?:project[ ]gutenberg[ ])?online[ ]distributed[ ]proofreading[ ]team\b
      | note:[ ](?=[^\0]*(?:project[ ]gutenberg|\be-?text|\be-?book[ ]\#|archive\.org))
      | (?:project[ ]gutenberg[ ])(?:editor|transcriber|producer)['\u2019]?s?['\u2019]?[ ]note\b
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_RELEASE = re.compile(
    r"^[ \t]*this[ ]is[ ]the[ ]project[ ]gutenberg[ ][^\n]*\b(?:release|edition)[ ]of[ \t]*\n?", _FLAGS
)
_TRANSCRIBER = re.compile(
    r"^[ \t]*[\[(*_=]*(?:transcriber['\u2019]?s?['\u2019]?[ ]notes?[ ]*(?:[]:.*_=-]|$)"
    r"|typographical[ ]errors[ ]corrected[ ]by[ ]the\b)",
    _FLAGS,
)
# A paragraph that speaks of the making of the file, as the paragraphs of a transcriber's note do.
_ABOUT_THE_FILE = re.compile(
    r"=>|->|changed[ ]to|corrected|transcri|typograph|\be-?text|\be-?book|proofread|misprint|printer['\u2019]s[ ]error"
    r"|hyphenation|spelling|punctuation",
    _FLAGS,
)
# Notes on the file itself that stand further on, within the title page and contents.
_EDITOR = re.compile(
    r"^(?:\[project[ ]gutenberg[ ](?:editor|transcriber)[^\]]{,600}\]"
    r"|note:[ ][^\n]*\be-?(?:text|book)[ ]\#\d+[^\n]*$"
    r"|(?:original[ ])?transcriber['\u2019]?s?['\u2019]?[ ]notes?:?[ \t]*\n\s*\n"  # a heading, and one paragraph
    r"(?=(?:[^\n]+\n)*?[^\n]*\be-?texts?\b)[^\n]+(?:\n[^\n]+)*)\n*",
    _FLAGS,
)
_MAX_NOTE = 4000  # characters: a longer run is not taken for a credit or a note
_FRONT = 6000
_MAX_OUTSIDE = 40_000  # before the START and after the END marker; the licence has 19,000


def clean(raw: bytes) -> Book:
    """The book in the bytes of one plain-text file of Project Gutenberg, or the reason why it cannot be had.

    Cut are the header, the licence, and directly inside the markers the production credits and transcriber's
    notes. Title pages, contents, publishers' advertisements and footnotes are the book's and stay.
    """
    try:
        text, encoding = _decode(raw)
    except _Refusal as refusal:
        return Book(None, str(refusal), "")
    text = re.sub(r"\r{0,2}\n|\r", "\n", text)
    header = text
    body: str | None = None
    reason = ""
    cut: list[str] = []
    try:
        start, end = _find_markers(text)
        header = text[:start]
        body, cut = _trim(text[start:end])
        if found := _find_leftover(body):
            line = text.count("\n", 0, text.index(found, start)) + 1
            raise _Refusal(f"licence text, or the end of another book, between the markers: line {line} ({found})")
        if not body.strip():
            raise _Refusal("nothing is left between the markers")
    except _Refusal as refusal:
        body, reason, cut = None, str(refusal), []
        header = header[:4000]
    old_title, old_author = _title_in_first_line(header)
    title = _field(header, "Title", " ") or old_title
    if body is not None:
        cut = ["header", "licence", *cut]
        above = _first_line(header)
        if title and above.casefold() == title.casefold() != _first_line(body).casefold():
            body = f"{above}\n\n{body}"  # its title page begins above the header, and goes on below
            cut.append("(title moved down)")
    number = re.search(r"\[e-?(?:book|text) ?#(\d+)", header, re.IGNORECASE)
    return Book(
        body=body,
        reason=reason,
        encoding=encoding,
        number=int(number[1]) if number else None,
        title=title,
        author=_field(header, "Authors?", ", ") or old_author,
        copyrighted=re.search(r"is a copyrighted project gutenberg", header, re.IGNORECASE) is not None,
        cut=tuple(cut),
    )


def _decode(raw: bytes) -> tuple[str, str]:
    """The text and its encoding. What fails as UTF-8 is Windows-1252 if it uses the range that Latin-1 leaves to
    control characters (curly quotes and dashes are there), and else Latin-1."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        names = ["utf-16"]
    elif b"\0" in raw:
        raise _Refusal("holds zero bytes, so it is no text")
    elif raw.startswith(codecs.BOM_UTF8):
        names = ["utf-8-sig"]
    elif re.search(rb"character set encoding:\s*utf-8", raw[:4000], re.IGNORECASE):
        names = ["ascii", "utf-8"]  # as Latin-1 a damaged UTF-8 file would come out garbled, without an error
    else:
        names = ["ascii", "utf-8", "cp1252" if re.search(rb"[\x80-\x9f]", raw) else "latin-1"]
    for name in names:
        try:
            return raw.decode(name), name
        except UnicodeDecodeError as error:
            fault = f"byte 0x{raw[error.start]:02x} at offset {error.start} is not {name}"
    raise _Refusal(f"cannot be decoded: {fault}")


def _find_markers(text: str) -> tuple[int, int]:
    """Where the book begins and ends. Two markers of a kind are refused: it may be two books in one file."""
    ends = list(_END.finditer(text))
    if not ends:
        ends = list(_LAST_LINE.finditer(text))[-1:]
    if not ends:
        raise _Refusal("no END marker: cut short, or not as Project Gutenberg publishes it")
    if len(ends) > 1:
        raise _Refusal(f"{len(ends)} END markers: more than one book in the file")
    end = ends[0].start()
    starts = list(_START.finditer(text))
    if len(starts) > 1:
        raise _Refusal(f"{len(starts)} START markers: more than one book in the file")
    starts += [match for match in _SMALL_PRINT_END.finditer(text) if match.start() < end]
    if not starts:
        opened = _SMALL_PRINT_START.search(text, 0, end)
        raise _Refusal("the small print has no end" if opened else "no START marker, nor the end of a small print")
    start = max(match.end() for match in starts)
    if start > end:
        raise _Refusal("the END marker comes before the START marker")
    for size, where in ((start, "before the START"), (len(text) - end, "after the END")):
        if size > _MAX_OUTSIDE:
            raise _Refusal(f"{size:,} characters {where} marker, more than any licence: is it a second book?")
    return start, end


def _trim(body: str) -> tuple[str, list[str]]:
    """Cut what stands at the two ends of the body and is not the book; say what it was."""
    begin, cut = _skip_front(body)
    stop = len(body)
    for match in _LAST_LINE.finditer(body, max(begin, stop - 500)):
        stop = match.start()
        cut.append("last line")
        break
    while True:
        stop = begin + len(body[begin:stop].rstrip())
        at = body.rfind("\n\n", begin, stop) + 2
        if at < 2 or stop - at > _MAX_NOTE or not _CREDIT.match(body[at:stop]):
            break
        stop = at
        cut.append("credits")
    for match in _TRANSCRIBER.finditer(body, max(begin, stop - _MAX_NOTE)):
        note = re.split(r"\n[ \t]*\n", body[match.start() : stop].strip())
        bracketed = note[0].startswith("[") and body.find("]", match.start()) == stop - 1
        if bracketed or all(_ABOUT_THE_FILE.search(part) or not part.strip() for part in note[1:]):
            stop = match.start()
            cut.append("transcriber's note")
            break
    text = body[begin:stop]
    if editor := _EDITOR.search(text[:_FRONT]):
        text = text[: editor.start()] + text[editor.end() :]
        cut.append("note on the file")
    lines = text.rstrip().split("\n")
    while lines and not lines[0].strip():
        del lines[0]
    return "".join(f"{line}\n" for line in lines), list(dict.fromkeys(cut))


def _skip_front(body: str) -> tuple[int, list[str]]:
    """Where the book begins behind the paragraphs of credits and notes that follow the START marker."""
    cut: list[str] = []
    begin, heading = 0, False
    for match in re.finditer(r"^[^\n]*\S[^\n]*(?:\n[^\n]*\S[^\n]*)*", body, re.MULTILINE):  # paragraphs
        paragraph = match[0]
        if match.start() < begin:
            continue  # within a bracketed note
        if len(paragraph) > _MAX_NOTE:
            break
        if _CREDIT.match(paragraph):
            cut.append("credits")
        elif _TRANSCRIBER.match(paragraph) or (heading and _ABOUT_THE_FILE.search(paragraph)):
            cut.append("transcriber's note")
        else:
            break
        heading = "\n" not in paragraph and _TRANSCRIBER.match(paragraph) is not None and len(paragraph) < 40
        begin = match.end()
        if paragraph.lstrip().startswith("[") and "]" not in paragraph:
            begin = body.find("]", begin, begin + _MAX_NOTE) + 1
            if not begin:
                raise _Refusal(f"the note that begins with '{paragraph[:30]}' has no end")
    front = len(body) - len(body[begin:].lstrip("\n"))
    if release := _RELEASE.match(body, front):
        cut.append("release line")
        begin = release.end()
    return begin, cut


def _find_leftover(body: str) -> str | None:
    """What is certainly no book's. The two words are looked for first since that is ten times as fast."""
    lowered = body.lower()
    if "gutenberg" not in lowered and "small print" not in lowered:
        return None
    found = _LICENCE.search(body) or _LAST_LINE.search(body)
    return found[0] if found else None


def _field(header: str, name: str, joint: str) -> str:
    """A field of the header; its further lines are indented."""
    match = re.search(rf"^{name}:[ \t]*([^\n]*(?:\n[ \t]+[^\n]+)*)", header, re.MULTILINE | re.IGNORECASE)
    return joint.join(line.strip() for line in match[1].split("\n")) if match else ""


def _title_in_first_line(header: str) -> tuple[str, str]:
    """Title and author where there are no fields: "**The Project Gutenberg Etext of Title, by Author**"."""
    match = re.search(r"project gutenberg(?:['\u2019]s)? (?:e-?(?:text|book)(?: of|,) )?([^\n*]+)", header, re.I)
    title, _, author = match[1].partition(" by ") if match else ("", "", "")
    return title.strip(" .,"), author.strip(" .,")


def _first_line(text: str) -> str:
    return text.lstrip().split("\n", 1)[0].strip()


# --- the command -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file to clean: where it is, for messages, the name of its output, and how to get its bytes."""

    place: str
    name: str
    read: Callable[[], bytes]


def find_sources(path: Path, skip: Path | None = None) -> Iterator[Source]:
    """The .txt files in a folder (without hidden ones, and without the folder `skip`) or a zip, or the one file.

    Nothing is unpacked to the disk. An archive is refused as a whole, by a UserError, if it is damaged or has a
    member whose path leads out of the folder or that says it unpacks to too much.
    """
    if path.is_dir():
        for file in sorted(path.rglob("*.txt")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden and not (skip and skip.resolve() in file.resolve().parents):
                yield Source(str(file), file.stem, partial(_read_file, file))
    elif path.suffix.lower() == ".zip":
        yield from _sources_in_zip(path)
    elif path.exists():
        yield Source(str(path), path.stem, partial(_read_file, path))
    else:
        raise UserError(f"{path}: no such file or folder; check the path, relative to {Path.cwd()}")


def _sources_in_zip(path: Path) -> Iterator[Source]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
        packed = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder; check the path, relative to {Path.cwd()}") from None
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: not a readable zip archive ({error}); get it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    for member in members:
        name = member.orig_filename.replace("\\", "/")
        if name.startswith("/") or re.match(r"[A-Za-z]:", name) or ".." in PurePosixPath(name).parts:
            raise UserError(
                f"{path}: member {member.orig_filename!r} leads out of its folder; do not trust this archive"
            )
        if member.file_size > MAX_BYTES or member.file_size > MAX_RATIO * max(member.compress_size, 1000):
            raise UserError(
                f"{path}: member {member.filename!r} unpacks from {member.compress_size:,} to {member.file_size:,}, "
                f"wanted {MAX_BYTES:,} and {MAX_RATIO} times at most; do not trust this archive"
            )
    total = sum(member.file_size for member in members)
    if total > MAX_RATIO * max(packed, 1000):  # members may share their packed bytes
        raise UserError(
            f"{path}: {packed:,} bytes unpack to {total:,}, wanted {MAX_RATIO} times at most; do not trust this archive"
        )
    for member in members:
        inner = PurePosixPath(member.filename)
        hidden = any(part.startswith((".", "__MACOSX")) for part in inner.parts)
        if inner.suffix.lower() == ".txt" and not hidden:
            yield Source(f"{path}: {member.filename}", inner.stem, partial(_read_member, path, member))


def _read_member(path: Path, member: zipfile.ZipInfo) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            return file.read(MAX_BYTES)  # zipfile stops at the size that is declared, then compares the checksum
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path}: member {member.filename!r} is damaged or is not the {member.file_size:,} bytes it says "
            f"({reason}); get the archive again"
        ) from None
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or an unknown compression
        raise UserError(
            f"{path}: member {member.filename!r} cannot be unpacked ({error}); unpack it yourself"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _read_file(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: {path.stat().st_size:,} bytes, wanted {MAX_BYTES:,} at most; is it one book?")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def write_book(path: Path, body: str) -> None:
    """Write beside `path` and rename, so that a book there is always whole. UserError if it cannot be written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(body.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{path}: the disk is full; make room and run again, whole books are kept") from None
        raise UserError(f"{path}: cannot be written ({error.strerror}); check --out") from None
    finally:
        beside.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data.gutenberg", description="Clean plain-text books of Project Gutenberg."
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="FILE_OR_FOLDER_OR_ZIP")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the cleaned books")
    args = parser.parse_args(arguments)
    out: Path = args.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror}); name a folder") from None
    for path in args.inputs:
        folder = path if path.is_dir() else path.parent
        if path.suffix.lower() != ".zip" and folder.resolve() == out.resolve():
            raise UserError(f"--out {out}: holds the input {path}, which would be overwritten; name another folder")

    print(f"{'number':>6}  {'title':<40}  {'before':>10}  {'after':>10}  what was cut, or why it was refused")
    faults: list[str] = []
    written = refused = before = after = 0
    for source, raw in _read_all(args.inputs, out, faults):
        book = clean(raw)
        if book.body is not None:
            write_book(out / f"{source.name}.txt", book.body)
            written, before, after = written + 1, before + len(raw), after + len(book.body.encode())
        else:
            refused += 1
        print(_row(source, book, len(raw)), flush=True)
    print(
        f"{written} books in {out}, {before:,} bytes before, {after:,} after; "
        f"{refused} refused, {len(faults)} unreadable"
    )
    for fault in faults[:-1]:
        print(f"error: {fault}", file=sys.stderr)
    if faults:
        raise UserError(faults[-1])
    if not written and not refused:
        raise UserError(f"{args.inputs[0]}: no .txt file there; name the books, a folder or a zip of them")
    return 1 if refused else 0


def _read_all(paths: Sequence[Path], out: Path, faults: list[str]) -> Iterator[tuple[Source, bytes]]:
    """Every file that can be read; what is wrong with the others is added to `faults`, and does not stop them."""
    places: dict[str, str] = {}
    for path in paths:
        try:
            sources = list(find_sources(path, skip=out))
        except UserError as error:
            faults.append(str(error))
            continue
        for source in sources:
            if source.name in places:
                faults.append(f"{source.place}: named like {places[source.name]}; rename one or use another --out")
                continue
            places[source.name] = source.place
            try:
                raw = source.read()
            except UserError as error:
                faults.append(str(error))
                continue
            yield source, raw


def _row(source: Source, book: Book, size: int) -> str:
    number = str(book.number) if book.number is not None else "-"
    title = book.title or source.name
    title = "".join(char if char.isprintable() else "?" for char in title)
    title = title if len(title) <= 40 else title[:37] + "..."
    if book.body is None:
        return f"{number:>6}  {title:<40}  {size:>10,}  {'-':>10}  REFUSED: {book.reason} ({source.place})"
    notes = ", ".join(book.cut) + f"; {book.encoding}" + ("; COPYRIGHTED, see its terms" if book.copyrighted else "")
    return f"{number:>6}  {title:<40}  {size:>10,}  {len(book.body.encode()):>10,}  {notes}"


if __name__ == "__main__":
    run_command(main)
