"""Books of Project Gutenberg: downloaded, with the licence and the credits removed.

    python -m data.gutenberg --out books                             # the classics listed in data/gutenberg.csv
    python -m data.gutenberg --out books --numbers 84 1342           # by number
    python -m data.gutenberg --out books books.zip 84.txt more/      # from local files, without a download
    clean(Path("84.txt").read_bytes())  ->  Book(body="Frankenstein; ...", title="Frankenstein", ...)

A published file is a header, a START marker, the book, an END marker and a licence of about 18 kB. The licence is the
same in every file, so a model would memorise it. Only text that is certainly not part of the book is cut. A file in
which this is uncertain (a marker is missing, or licence text remains between them) is refused with a reason.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from tinyforge.data.download import Downloader, FetchError, Job, check_url
from tinyforge.data.files import files_in, locked, name_of, read_file, zip_members
from tinyforge.data.source import Document, Source, SourceWriter, read_source, reason_of, report
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.report import count_of
from tinyforge.terminal import one_line

LIST = Path(__file__).with_name("gutenberg.csv")
# The mirrors are Project Gutenberg's own, for programs; the web site is for people and comes last.
MIRRORS = ("https://gutenberg.pglaf.org", "https://aleph.gutenberg.org", "https://www.gutenberg.org")
LICENCE = "public domain in the USA; without Project Gutenberg's name and licence"


@dataclass(frozen=True)
class Book:
    """The result of `clean`: a body, or the reason why there is none."""

    body: str | None  # lines end in "\n"; None if the file was refused
    reason: str  # of the refusal; empty if there is a body
    encoding: str  # detected: ascii, utf-8, utf-8-sig, utf-16, cp1252 or latin-1
    number: int | None = None
    title: str = ""
    author: str = ""  # several are joined by ", "
    copyrighted: bool = False  # the header says so: not in the public domain, distributed with permission
    cut: tuple[str, ...] = ()  # what was cut


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
# Until 2004 the licence, "the small print", came before the book, and its last line is the only start marker.
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

# --- between the markers, but not part of the book --------------------------------------------------------------------

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
# A paragraph about how the file was made, as in a transcriber's note.
_ABOUT_THE_FILE = re.compile(
    r"=>|->|changed[ ]to|corrected|transcri|typograph|\be-?text|\be-?book|proofread|misprint|printer['\u2019]s[ ]error"
    r"|hyphenation|spelling|punctuation",
    _FLAGS,
)
# Notes on the file itself that come later, within the title page and contents.
_EDITOR = re.compile(
    r"^(?:\[project[ ]gutenberg[ ](?:editor|transcriber)[^\]]{,600}\]"
    r"|note:[ ][^\n]*\be-?(?:text|book)[ ]\#\d+[^\n]*$"
    r"|(?:original[ ])?transcriber['\u2019]?s?['\u2019]?[ ]notes?:?[ \t]*\n\s*\n"  # a heading, and one paragraph
    r"(?=(?:[^\n]+\n)*?[^\n]*\be-?texts?\b)[^\n]+(?:\n[^\n]+)*)\n*",
    _FLAGS,
)
# Notices of the permission to publish, which old etexts repeat between the parts of the book, in angle brackets or not.
_RIGHTS = re.compile(
    r"copyright|permission|distributed|commercial|personal[ ]use|machine[ ]readable|download|membership|e-?text[ ]of"
    r"|public[ ]domain|royalt|small[ ]print|donat",
    _FLAGS,
)
_MAX_NOTE = 4000  # characters: a longer paragraph is not a credit or a note
_FRONT = 6000
_MAX_OUTSIDE = 40_000  # before the START and after the END marker; the licence has 19,000


def clean(raw: bytes) -> Book:
    """Extract the book from the bytes of a plain-text file of Project Gutenberg, or say why that is impossible.

    The header and the licence are cut, and directly inside the markers the production credits and transcriber's
    notes. Title pages, contents, publishers' advertisements and footnotes belong to the book and stay.
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
            body = f"{above}\n\n{body}"  # its title page begins above the header and continues below
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
    """The text and its encoding. If UTF-8 fails, it is Windows-1252 if it uses the range that Latin-1 reserves for
    control characters (curly quotes and dashes are there), else Latin-1."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        names = ["utf-16"]
    elif b"\0" in raw:
        raise _Refusal("contains zero bytes, so it is not text")
    elif raw.startswith(codecs.BOM_UTF8):
        names = ["utf-8-sig"]
    elif re.search(rb"character set encoding:\s*utf-8", raw[:4000], re.IGNORECASE):
        names = ["ascii", "utf-8"]  # as Latin-1 a damaged UTF-8 file would be garbled without an error
    else:
        names = ["ascii", "utf-8", "cp1252" if re.search(rb"[\x80-\x9f]", raw) else "latin-1"]
    for name in names:
        try:
            return raw.decode(name), name
        except UnicodeDecodeError as error:
            fault = f"byte 0x{raw[error.start]:02x} at offset {error.start} is not {name}"
    raise _Refusal(f"cannot be decoded: {fault}")


def _find_markers(text: str) -> tuple[int, int]:
    """Where the book begins and ends. Two markers of a kind are refused: the file may hold two books."""
    ends = list(_END.finditer(text))
    if not ends:
        ends = list(_LAST_LINE.finditer(text))[-1:]
    if not ends:
        raise _Refusal("no END marker: truncated, or not a file as Project Gutenberg publishes it")
    if len(ends) > 1:
        raise _Refusal(f"{len(ends)} END markers: more than one book in the file")
    end = ends[0].start()
    starts = list(_START.finditer(text))
    if len(starts) > 1:
        raise _Refusal(f"{len(starts)} START markers: more than one book in the file")
    starts += [match for match in _SMALL_PRINT_END.finditer(text) if match.start() < end]
    if not starts:
        opened = _SMALL_PRINT_START.search(text, 0, end)
        raise _Refusal("the small print has no end" if opened else "no START marker and no end of the small print")
    start = max(match.end() for match in starts)
    if start > end:
        raise _Refusal("the END marker comes before the START marker")
    for size, where in ((start, "before the START"), (len(text) - end, "after the END")):
        if size > _MAX_OUTSIDE:
            raise _Refusal(f"{size:,} characters {where} marker, more than any licence has: is it a second book?")
    return start, end


def _trim(body: str) -> tuple[str, list[str]]:
    """Cut what is not part of the book at both ends of the body; returns the text and what was cut."""
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
    text, notices = _cut_notices(text)
    cut += ["notice"] * notices
    lines = text.rstrip().split("\n")
    while lines and not lines[0].strip():
        del lines[0]
    return "".join(f"{line}\n" for line in lines), list(dict.fromkeys(cut))


def _skip_front(body: str) -> tuple[int, list[str]]:
    """Where the book begins after the paragraphs of credits and notes that follow the START marker."""
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


def _cut_notices(text: str) -> tuple[str, int]:
    """The text without notices about its publication by the Project, and their number: paragraphs, or what stands in
    double angle brackets."""
    kept, end, count = [], 0, 0
    for match in re.finditer(r"project\s+gutenberg", text, re.IGNORECASE):
        at = match.start()
        if at < end:
            continue
        opened = text.rfind("<<", max(0, at - _MAX_NOTE), at)
        closed = text.find(">>", at, at + _MAX_NOTE) + 2
        if opened > text.rfind(">>", 0, at) and closed > 1:
            begin, stop = opened, closed
        else:
            begin = max(end, text.rfind("\n\n", 0, at) + 2)
            stop = (text.find("\n\n", at) + 1 or len(text) + 1) - 1
        notice = text[begin:stop]
        if len(notice) <= _MAX_NOTE and _RIGHTS.search(re.sub(r"\s+", " ", notice)):
            kept.append(text[end:begin])
            end, count = len(text) - len(text[stop:].lstrip("\n")), count + 1
    return "".join([*kept, text[end:]]), count


def _find_leftover(body: str) -> str | None:
    """Text that is certainly not part of a book. Searching two words first is ten times as fast."""
    lowered = body.lower()
    if "gutenberg" not in lowered and "small print" not in lowered:
        return None
    found = _LICENCE.search(body) or _LAST_LINE.search(body)
    return found[0] if found else None


def _field(header: str, name: str, joint: str) -> str:
    """A field of the header; its continuation lines are indented."""
    match = re.search(rf"^{name}:[ \t]*([^\n]*(?:\n[ \t]+[^\n]+)*)", header, re.MULTILINE | re.IGNORECASE)
    return joint.join(line.strip() for line in match[1].split("\n")) if match else ""


def _title_in_first_line(header: str) -> tuple[str, str]:
    """Title and author where there are no fields: "**The Project Gutenberg Etext of Title, by Author**"."""
    match = re.search(r"project gutenberg(?:['\u2019]s)? (?:e-?(?:text|book)(?: of|,) )?([^\n*]+)", header, re.I)
    title, _, author = match[1].partition(" by ") if match else ("", "", "")
    return title.strip(" .,"), author.strip(" .,")


def _first_line(text: str) -> str:
    return text.lstrip().split("\n", 1)[0].strip()


# --- from files to a source ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A file to clean: what to call it, the id of its document, and how to read its bytes."""

    place: str
    name: str
    read: Callable[[], bytes]
    url: str | None = None  # where it was fetched from
    number: int | None = None  # the requested one


def listed_numbers() -> list[int]:
    """The numbers of the classics in data/gutenberg.csv."""
    with open(LIST, encoding="utf-8", newline="") as file:
        return [int(row["number"]) for row in csv.DictReader(file)]


def book_urls(base: str, number: int) -> list[str]:
    """Where a book may be on a host, best first: the generated UTF-8 file, then the posted files.

    `files/` is the layout of www.gutenberg.org; mirrors have one folder per digit for the posted files (`1/3/4/1342`).
    """
    digits = "/".join(str(number)[:-1]) or "0"
    posted = [f"{number}-0.txt", f"{number}-8.txt", f"{number}.txt"]
    folders = [f"files/{number}", f"{digits}/{number}"]
    paths = [f"cache/epub/{number}/pg{number}.txt", *(f"{folder}/{name}" for folder in folders for name in posted)]
    return [check_url(f"{base.rstrip('/')}/{path}") for path in paths]


def make_source(
    out: Path,
    inputs: Sequence[Path] = (),
    numbers: Sequence[int] | None = None,
    base_urls: Sequence[str] = MIRRORS,
    keep_copyrighted: bool = False,
    downloader: Downloader | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Source:
    """Clean books into the source folder `out`.

    inputs:    .txt files, folders of them and zip archives. If given, nothing is downloaded.
    numbers:   of the books to fetch into `out`/raw; None for those of data/gutenberg.csv.
    base_urls: hosts to fetch from, tried in turn for each book.
    say:       called with the lines of a table, one per file.

    A book that cannot be downloaded, read or cleaned is listed in `refused` of the result, with the reason; so is one
    that is under copyright according to its header, unless `keep_copyrighted`. Raises UserError if there is no book at
    all, for a bad URL, and if the disk is full or not writable; an older source in `out` is then unchanged.
    """
    with locked(out), SourceWriter(out, "gutenberg", LICENCE) as writer:
        if inputs:
            entries = _local(inputs, out, writer)
        else:
            numbers = listed_numbers() if numbers is None else list(dict.fromkeys(numbers))
            entries = _fetched(numbers, base_urls, out / "raw", downloader or Downloader(), writer)
        say(f"{'number':>6}  {'title':<40}  {'before':>10}  {'after':>10}  what was cut, or why it was refused")
        for entry in entries:
            try:
                raw = entry.read()
            except UserError as fault:
                writer.refuse(entry.place, reason_of(fault))
                continue
            book = clean(raw)
            writer.add_input(entry.url or entry.place, len(raw), hashlib.sha256(raw).hexdigest())
            if reason := _why_not(entry, book, keep_copyrighted):
                writer.refuse(entry.place, reason)
            else:
                assert book.body is not None
                page = f"https://www.gutenberg.org/ebooks/{book.number}" if book.number is not None else ""
                writer.add(Document(id=entry.name, text=book.body, title=book.title, url=page))
            say(_row(entry, book, len(raw), reason))
        if not writer.documents:
            raise UserError(_nothing(inputs, writer))
    return read_source(out)


def _why_not(entry: Entry, book: Book, keep_copyrighted: bool) -> str:
    if book.body is None:
        return book.reason
    if entry.number is not None and book.number not in (None, entry.number):
        return f"is number {book.number}, expected {entry.number}"
    if book.copyrighted and not keep_copyrighted:
        return "its header says that it is under copyright; read its terms, and pass --keep-copyrighted to keep it"
    return ""


def _nothing(inputs: Sequence[Path], writer: SourceWriter) -> str:
    if not writer.refused:
        return f"{inputs[0]}: no .txt file there; name the books, a folder or a zip of them"
    first = writer.refused[0]
    return f"no book in {count_of(len(writer.refused), 'file')}; the first, {first.record}: {first.reason}"


def _fetched(
    numbers: Sequence[int], base_urls: Sequence[str], raw: Path, downloader: Downloader, writer: SourceWriter
) -> Iterator[Entry]:
    jobs = [
        Job(tuple(url for base in base_urls for url in book_urls(base, number)), raw / f"{number}.txt")
        for number in numbers
    ]
    for number, job, fetched in zip(numbers, jobs, downloader.fetch_all(jobs), strict=True):
        if isinstance(fetched, FetchError):
            writer.refuse(job.path.name, reason_of(fetched))
        else:
            yield Entry(job.path.name, str(number), partial(read_file, job.path), fetched.url, number)


def _local(inputs: Sequence[Path], out: Path, writer: SourceWriter) -> Iterator[Entry]:
    """Every file under the inputs. A bad input is counted as refused and does not stop the others."""
    places: dict[str, str] = {}
    for path in inputs:
        try:
            entries = list(find_entries(path, skip=out))
        except UserError as fault:
            writer.refuse(path.name, reason_of(fault))
            continue
        for entry in entries:
            if entry.name in places:
                writer.refuse(entry.place, f"has the name of {places[entry.name]}; rename one, or use another --out")
                continue
            places[entry.name] = entry.place
            yield entry


def find_entries(path: Path, skip: Path | None = None) -> Iterator[Entry]:
    """The .txt files in a folder (without hidden ones, and without the folder `skip`) or a zip, or the one file.

    Nothing is unpacked to disk. UserError for an archive that is damaged or not to be trusted.
    """
    if path.is_dir():
        for file in files_in(path):
            if file.suffix.lower() == ".txt" and not (skip and skip.resolve() in file.resolve().parents):
                place = f"{name_of(path)}/{file.relative_to(path).as_posix()}"
                yield Entry(place, file.stem, partial(read_file, file))
    elif path.suffix.lower() == ".zip":
        for member in zip_members(path):
            inner = PurePosixPath(member.name)
            if inner.suffix.lower() == ".txt":
                yield Entry(f"{path.name}: {member.name}", inner.stem, member.read)
    else:
        yield Entry(path.name, path.stem, partial(read_file, path))


def _row(entry: Entry, book: Book, size: int, reason: str) -> str:
    number = str(book.number) if book.number is not None else "-"
    title = book.title or entry.name
    title = title if len(title) <= 40 else title[:37] + "..."
    if reason:
        return f"{number:>6}  {title:<40}  {size:>10,}  {'-':>10}  REFUSED: {reason} ({entry.place})"
    assert book.body is not None
    notes = ", ".join(book.cut) + f"; {book.encoding}" + ("; COPYRIGHTED, see its terms" if book.copyrighted else "")
    return f"{number:>6}  {title:<40}  {size:>10,}  {len(book.body.encode()):>10,}  {notes}"


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m data.gutenberg", description=__doc__)
    parser.add_argument(
        "inputs", nargs="*", type=Path, metavar="FILE_OR_FOLDER_OR_ZIP", help="books to clean (default: download them)"
    )
    parser.flag("--out", Path, "folder for the source", required=True, metavar="DIR")
    parser.flag("--numbers", [], "books to download (default: data/gutenberg.csv)", type=int, metavar="N")
    mirrors = f"a mirror; may be repeated (default: {', '.join(MIRRORS)})"
    parser.flag("--base-url", [], mirrors, action="append", metavar="URL")
    parser.flag("--keep-copyrighted", False, "keep books that are under copyright; read their terms")
    args = parser.parse_args(arguments)
    if args.inputs and (args.numbers or args.base_url):
        raise UserError(
            f"{args.inputs[0]}: got files and --numbers or --base-url, expected one or the other; for files nothing is "
            "downloaded"
        )
    if args.numbers and min(args.numbers) < 1:
        raise UserError(f"--numbers {min(args.numbers)}: expected 1 or more; a book's number is in its URL")
    source = make_source(
        args.out,
        args.inputs,
        args.numbers or None,
        args.base_url or MIRRORS,
        args.keep_copyrighted,
        say=lambda line: print(one_line(line), flush=True),
    )
    return report(source, "book")


if __name__ == "__main__":
    run_command(main)
