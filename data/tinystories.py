"""TinyStories: two million short stories in the words of a small child.

    python -m data.tinystories --out stories                                       # 2.2 GB, written by GPT-4
    python -m data.tinystories --out stories --files TinyStoriesV2-GPT4-valid.txt    # 22 MB
    python -m data.tinystories --out stories TinyStories-valid.txt                  # from a local file

The text files contain stories that are each followed by <|endoftext|>; the parquet files have one per row. A story
becomes a document unchanged, except for blank lines around it. A parquet row that is longer than any story holds many
stories whose separators were lost: it is cut where a story begins.

TinyStories: Eldan and Li, "TinyStories: How Small Can Language Models Be and Still Speak Coherent English?" (2023).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tinyforge.data.download import Downloader
from tinyforge.data.files import MAX_BYTES, locked
from tinyforge.data.hub import HOST, Published, file_url, list_files
from tinyforge.data.local import BadRecord, read_rows
from tinyforge.data.source import Document, Refusal, Source, SourceWriter, read_source, report
from tinyforge.errors import Parser, UserError, run_command

REPOSITORY = "roneneldan/TinyStories"
FILE = "TinyStoriesV2-GPT4-train.txt"
LICENCE = "CDLA-Sharing-1.0"
SEPARATOR = b"<|endoftext|>"
CHUNK = 1 << 20
LONGEST = 20_000  # characters; the longest story has some 4,000
GLUED = 4_000  # characters of a piece of such a row: a longer one is likely two stories
_OPENING = re.compile(r"(?:Once(?: upon| there|,)|There once|Long,? (?:long )?ago|The End|End of [Ss]tory)\b")


def make_source(
    out: Path,
    inputs: Sequence[Path] = (),
    files: Sequence[str] | None = None,
    base_url: str = HOST,
    downloader: Downloader | None = None,
) -> Source:
    """Turn stories into the source folder `out`.

    inputs: text and parquet files as they are published. If given, nothing is downloaded.
    files:  of the repository, to download into `out`/raw. None: `FILE`, whose published size and SHA-256 are checked.

    Stories that are not text are listed in `refused` of the result. Raises UserError for a file that is missing, cannot
    be downloaded or has another layout than the published ones, if there is no story at all, and if the disk is full or
    not writable; an older source in `out` is then unchanged.
    """
    from tqdm import tqdm

    for path in inputs:
        if not path.is_file():
            raise UserError(f"{path}: no such file; check the path, relative to {Path.cwd()}")
    with locked(out), SourceWriter(out, "tinystories", LICENCE) as writer:
        if inputs:
            found = [(path.name, path) for path in inputs]
        else:
            found = _fetch(out / "raw", files, base_url, downloader or Downloader())
        for url, path in found:
            try:
                for item in tqdm(read_stories(path), desc=path.name, unit=" stories", unit_scale=True, disable=None):
                    writer.add(item)
            except BadRecord as fault:
                raise UserError(f"{path}: {fault}") from None
            writer.add_file(url, path)
        if not writer.documents:
            raise UserError(
                f"{found[0][1]}: no story in it; expected text with {SEPARATOR.decode()} between the stories"
            )
    return read_source(out)


def _fetch(raw: Path, names: Sequence[str] | None, base_url: str, downloader: Downloader) -> list[tuple[str, Path]]:
    if names is None:
        listed = list_files(downloader, base_url, REPOSITORY, "", raw)
        published = [file for file in listed if file.path == FILE]
        if not published:
            others = ", ".join(file.path for file in listed if file.path.endswith((".txt", ".parquet")))
            raise UserError(f"{FILE}: not in {REPOSITORY} at {base_url}, which has {others or 'none'}; name --files")
    else:
        published = [Published(name, file_url(base_url, REPOSITORY, name)) for name in dict.fromkeys(names)]
    return [
        (file.url, downloader.fetch(file.url, raw / Path(file.path).name, file.bytes, file.sha256).path)
        for file in published
    ]


def read_stories(path: Path) -> Iterator[Document | Refusal]:
    """Each story of a published file, by number (from 0); BadRecord for a file with another layout."""
    if path.suffix == ".parquet":
        for row_number, row in read_rows(path, "text"):
            if len(story := row["text"].strip()) > LONGEST:
                for number, piece in enumerate(cut_apart(story)):
                    yield Document(id=f"{path.name}:{row_number}.{number}", text=f"{piece}\n")
            elif story:
                yield Document(id=f"{path.name}:{row_number}", text=f"{story}\n")
        return
    number = 0
    for raw in _pieces(path):
        record = f"{path.name}:{number}"
        try:
            story = raw.decode().replace("\r\n", "\n").removeprefix("\ufeff").strip()
        except UnicodeDecodeError as error:
            yield Refusal(record, f"got byte 0x{raw[error.start]:02x}, expected UTF-8 text")
        else:
            if not story:
                continue  # after the last separator
            yield Document(id=record, text=f"{story}\n")
        number += 1


def cut_apart(text: str) -> list[str]:
    """The stories of a text that lost its separators, without those that cannot be told apart.

    A story begins at a paragraph that opens like one. If paragraphs are separated by blank lines, but more than one
    break in twenty is a single line end, those separate the stories. The first and the last piece may be incomplete and
    are left out, and so is a piece that is too long for one story.
    """
    breaks = [len(found) for found in re.findall(r"\n+", text)]
    single = 0.05 < breaks.count(1) / max(1, len(breaks)) < 0.5
    stories: list[list[str]] = [[]]
    for paragraph in re.split(r"(?<=\n)\n+" if single else r"\n+", text):
        for number, line in enumerate(part for part in paragraph.split("\n") if part.strip()):
            if (single and number) or _OPENING.match(line):
                stories.append([])
            stories[-1].append(line.strip())
    whole = ("\n".join(lines) for lines in stories[1:-1])
    return [story for story in whole if 200 < len(story) <= GLUED]


def _pieces(path: Path) -> Iterator[bytes]:
    """The pieces between the separators, without reading the whole file into memory."""
    rest = b""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            *pieces, rest = (rest + chunk).split(SEPARATOR)
            yield from pieces
            if len(rest) > MAX_BYTES:
                raise BadRecord(f"{MAX_BYTES:,} bytes without {SEPARATOR.decode()}; is it one of TinyStories' files?")
    yield rest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m data.tinystories", description=__doc__)
    parser.add_argument(
        "inputs", nargs="*", type=Path, metavar="FILE", help="local copies of published files (default: download)"
    )
    parser.flag("--out", Path, "folder for the source", required=True, metavar="DIR")
    parser.add_argument("--files", nargs="+", metavar="PATH", help=f"of the repository {REPOSITORY} (default {FILE})")
    parser.flag("--base-url", HOST, "a mirror", metavar="URL")
    args = parser.parse_args(arguments)
    if args.inputs and args.files:
        raise UserError(
            f"{args.inputs[0]}: got files and --files, expected one or the other; local files are not downloaded"
        )
    source = make_source(args.out, args.inputs, args.files, args.base_url)
    return report(source, "story", "stories")


if __name__ == "__main__":
    run_command(main)
