"""Single sentences of a corpus, as a source of its own: each sentence is a document.

    python -m data.sentences corpus gutenberg=30MB tinystories=8MB simple=20MB --out sentences
    python -m data.corpus sentences --filters data/sentences.sql --val-share 0 --out sentences-corpus
    python -m data.shards --corpus sentences-corpus --tokenizer shards/tokenizer.json --out sentences-shards
    python recipes/pretrain.py --data shards sentences-shards --mix gutenberg=0.4 simple=0.4 sentences=0.2 ...

Documents are long, so what a model learns of beginnings is mostly how articles begin. With an eighth to a quarter of
its text in single sentences it learns more grammar from as many tokens (docs/results/fast.md#single-sentences). They
come from the training text alone, so held-out text stays unseen.

A sentence ends in ".", "!" or "?" before a capital letter, but not after an initial or a title such as "Mr.". It has
4 to 40 words, begins with a capital, closes its parentheses and holds no quotation mark: speech is taken out of its
marks, and left out where they end inside the sentence. Each occurs once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from tinyforge.data.files import locked, parse_bytes
from tinyforge.data.parquet import connect, escape_glob, reading
from tinyforge.data.shards import CORPUS, CorpusSource, read_corpus
from tinyforge.data.source import Document, Source, SourceWriter, read_source, report
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.rng import Stream

FILTERS = Path(__file__).with_suffix(".sql")
FEWEST, MOST = 4, 40  # words
WRAPPED = range(50, 101)  # characters of a line that was broken to fit a page
_SHORT = ("[A-Z]", "Mr", "Mrs", "Ms", "Dr", "Prof", "St", "Jr", "Sr", "No", "vs", r"e\.g", r"i\.e")
_NOT_SHORT = "".join(rf"(?<!\b{word}\.)" for word in _SHORT)
_STOP = re.compile(rf"(?<=[.!?]){_NOT_SHORT}[\"”’)]*\s+[\"“‘(]*")
_SPEECH = re.compile(r"[\"“”‘]|[,.!?]['’]")
_MARKS = "\"“”‘’'()[]* \t"


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of a text."""
    for piece in (piece for paragraph in _paragraphs(text) for piece in _cut(paragraph)):
        sentence = " ".join(piece.replace("_", "").strip(_MARKS).split())
        if (
            FEWEST <= sentence.count(" ") + 1 <= MOST
            and sentence[0].isupper()
            and sentence[-1] in ".!?"
            and not sentence.isupper()
            and sentence.count("(") == sentence.count(")")
            and not _SPEECH.search(sentence)
        ):
            yield sentence


def _cut(paragraph: str) -> Iterator[str]:
    """Pieces that end where a sentence does."""
    begin = 0
    for stop in _STOP.finditer(paragraph):
        if paragraph[stop.end() : stop.end() + 1].isupper():
            yield paragraph[begin : stop.end()]
            begin = stop.end()
    yield paragraph[begin:]


def _paragraphs(text: str) -> list[str]:
    """The lines of a text, joined where a line was broken to fit a page: it has that length, and no stop at its end."""
    found: list[list[str]] = []
    goes_on = False
    for line in map(str.rstrip, text.split("\n")):
        if goes_on and line:
            found[-1].append(line)
        else:
            found.append([line])
        goes_on = len(line) in WRAPPED and line[-1] not in '.!?"”’:'
    return list(map(" ".join, found))


def make_source(out: Path, corpus: Path, sizes: Mapping[str, int]) -> Source:
    """The source folder `out` of sentences from the training text of `corpus`, in random order.

    sizes: about how many bytes of sentences to take of each source, by its name; all that it has if those are fewer.
    Raises UserError for a folder that is no corpus, for a source that it lacks, and for one that has no sentence.
    """
    if out.resolve() == corpus.resolve():
        raise UserError(f"--out is {out}, the corpus itself; name another folder")
    found = {source.name: source for source in read_corpus(corpus).sources}
    taken: list[str] = []
    known: set[bytes] = set()
    for name, size in sizes.items():
        if name not in found:
            raise UserError(f"{corpus}: no source {name!r} in it; it has {', '.join(found)}")
        room, before = size, len(taken)
        for text in _texts(found[name], size):
            for sentence in sentences_of(text):
                key = blake2b(sentence.lower().encode(), digest_size=8).digest()
                if key not in known:
                    known.add(key)
                    taken.append(sentence)
                    room -= len(sentence.encode())
            if room <= 0:
                break
        if len(taken) == before:
            raise UserError(f"{corpus}: no sentence in the training text of {name}; leave it out")
    licence = "; ".join(dict.fromkeys(found[name].licence for name in sizes))
    with locked(out), SourceWriter(out, "sentences", licence) as writer:
        for number in Stream(0, "sentences").permutation(len(taken)):
            writer.add(Document(str(number), taken[number]))
        writer.add_file(CORPUS, corpus / CORPUS)
    return read_source(out)


def _texts(source: CorpusSource, size: int) -> Iterator[str]:
    """Training documents in a random order: at least one, and no more than begin within four times `size` bytes."""
    if not source.documents["train"]:
        return
    paths = [escape_glob(path) for path in source.files["train"]]
    with connect() as connection, reading(source.files["train"][0], "make the corpus again"):
        # The window is over ids and lengths alone, so texts in memory are bounded by what is asked for.
        query = """
            WITH drawn AS (
                SELECT id, sum(strlen(text)) OVER (ORDER BY md5(id)) - strlen(text) AS before FROM read_parquet($paths)
            )
            SELECT text FROM read_parquet($paths) JOIN drawn USING (id) WHERE before < $most ORDER BY before
        """
        found = connection.execute(query, {"paths": paths, "most": 4 * size})
        while rows := found.fetchmany(1000):
            yield from (text for (text,) in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m data.sentences", description=__doc__)
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="a folder made by data.corpus")
    what = "a source of the corpus, and how much of it to take, as web=20MB"
    parser.add_argument("sizes", nargs="+", metavar="SOURCE=BYTES", help=what)
    parser.flag("--out", Path, "folder for the source", required=True, metavar="DIR")
    args = parser.parse_args(arguments)
    pairs = [item.rpartition("=") for item in args.sizes]
    if wrong := next((item for item, (name, _, _) in zip(args.sizes, pairs, strict=True) if not name), ""):
        raise UserError(f"got {wrong!r}, expected a source of the corpus and bytes, as web=20MB")
    sizes = {name: parse_bytes(size, name) for name, _, size in pairs}
    if len(sizes) < len(pairs):
        raise UserError(f"got {' '.join(args.sizes)}, expected each source once")
    flags = f"--filters {shlex.quote(str(FILTERS))} --val-share 0 --out {shlex.quote(f'{args.out}-corpus')}"
    return report(make_source(args.out, args.corpus, sizes), "sentence", flags=flags)


if __name__ == "__main__":
    run_command(main)
