"""What a corpus left out, and why: counts, documents with their text, and files to keep them after all.

    python -m data.dropped corpus                                       # every rule: how many documents it dropped
    python -m data.dropped corpus --rule no-sentences --show 20         # 20 of them, chosen by their hash
    python -m data.dropped corpus --rule no-sentences --restore back.jsonl    # all of them, as a source's file

A rule is a filter, `exact-duplicate`, `near-duplicate`, `contaminated` or `evaluation-set`. The text is read from the
source folders, which the catalogue knows by their path from the corpus, and is the text before cleaning.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinyforge.data.corpus_report import catalogue
from tinyforge.data.files import written_whole
from tinyforge.data.parquet import connect, scan
from tinyforge.data.source import read_source
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.invocation import as_typed
from tinyforge.terminal import one_line, printable

SHOWN_CHARACTERS = 600  # of each document
_RULES = "string_split(coalesce(rules, dropped), ',')"


@dataclass(frozen=True)
class Dropped:
    """A document that was dropped. rules: all that fired. passage: of val, or of an evaluation set."""

    source: str
    id: str
    title: str
    url: str
    rules: tuple[str, ...]
    passage: str | None
    text: str


def count_rules(corpus: Path, source: str | None = None) -> list[tuple[str, int, int, int]]:
    """(rule, documents for which it fired, documents for which it alone did, bytes of the first), most first."""
    where, values = ("AND source = ?", (source,)) if source else ("", ())
    with catalogue(corpus) as ask:
        return ask(
            f"SELECT rule, count(*), count(*) FILTER (len(all_rules) = 1), sum(bytes)::BIGINT FROM (SELECT bytes, "
            f"{_RULES} AS all_rules, unnest({_RULES}) AS rule FROM documents WHERE dropped IS NOT NULL {where}) "
            "GROUP BY rule ORDER BY 2 DESC, rule",
            *values,
        )


def read_dropped(corpus: Path, rule: str, source: str | None = None, most: int | None = None) -> Iterator[Dropped]:
    """The documents for which a rule fired: all of them in order, or `most` of them, those of the smallest hashes.

    UserError for a rule that dropped nothing, for a source folder that has moved or was made again, and for a catalogue
    of an older version.
    """
    found = [name for name, *_ in count_rules(corpus, source)]
    if rule not in found:
        raise UserError(f"--rule {rule}: dropped no document; there are {', '.join(found) or 'none'}")
    where, values = f"list_contains({_RULES}, ?)", [rule]
    if source:
        where, values = f"{where} AND source = ?", [rule, source]
    order = "number" if most is None else f"hash, number LIMIT {most}"
    with catalogue(corpus) as ask:
        chosen = ask(
            "SELECT source, file, number, row, start, length, id, title, url, coalesce(rules, dropped), passage, "
            "folder, source_sha256 FROM "
            f"(SELECT * FROM documents WHERE dropped IS NOT NULL AND {where} ORDER BY {order}) "
            "JOIN spans USING (span) JOIN (SELECT name AS source, folder, source_sha256 FROM sources) USING (source) "
            "ORDER BY number",
            *values,
        )
    checked: set[str] = set()
    with connect() as connection:
        for (name, file), of_file in itertools.groupby(chosen, key=lambda row: row[:2]):
            rows = {row[2]: row for row in of_file}
            path, sha256 = corpus / next(iter(rows.values()))[-2], next(iter(rows.values()))[-1]
            if name not in checked and read_source(path).sha256 != sha256:
                raise UserError(f"{path}: was made again since {corpus} was; make the corpus again")
            checked.add(name)
            columns = zip(*(row[2:6] for row in rows.values()), strict=True)
            places = dict(zip(("number", "row", "start", "length"), map(np.array, columns), strict=True))
            connection.register("places", places)
            cursor = connection.execute(
                "SELECT number, substring(file.text, places.start + 1, places.length) "
                f"FROM {scan(path / file)} AS file JOIN places ON file.file_row_number = places.row ORDER BY number"
            )
            while texts := cursor.fetchmany(64):
                for number, text in texts:
                    *_, id_, title, url, rules, passage, _, _ = rows[number]
                    yield Dropped(name, id_, title, url, tuple(rules.split(",")), passage, text)
            connection.unregister("places")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m data.dropped", description=__doc__)
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="a folder made by python -m data.corpus")
    parser.flag("--rule", str, "of these documents (default: count those of every rule)")
    parser.flag("--source", str, "of this source only")
    parser.flag("--show", int, "print N of them (default 10)", 1, metavar="N")
    parser.flag("--restore", Path, "write all of them there, for data.local", metavar="FILE.jsonl")
    args = parser.parse_args(arguments)
    if args.source:
        with catalogue(args.corpus) as ask:
            known = [name for (name,) in ask("SELECT name FROM sources")]
        if args.source not in known:
            raise UserError(f"--source {args.source}: no such source; {args.corpus} has {', '.join(known)}")
    if args.rule is None:
        if args.show is not None or args.restore:
            raise UserError("--show and --restore need --rule; run without them to list the rules")
        counts = count_rules(args.corpus, args.source)
        print(f"{'rule':<22} {'documents':>10} {'by it alone':>11} {'bytes':>15}")
        for rule, documents, alone, size in counts:
            print(f"{rule:<22} {documents:>10,} {alone:>11,} {size:>15,}")
        return 0
    if args.restore:
        if args.show is not None:
            raise UserError("--show prints some documents, --restore writes all of them; give one of the two")
        if args.restore.suffix != ".jsonl":
            raise UserError(f"--restore {args.restore}: expected a name that ends in .jsonl")
        count = 0
        with written_whole(args.restore) as beside, open(beside, "w", encoding="utf-8", newline="\n") as file:
            for found in read_dropped(args.corpus, args.rule, args.source):
                record = {"id": found.id, "title": found.title, "url": found.url, "text": found.text}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
        restored = shlex.quote(str(args.restore))
        print(as_typed(f"{restored}: {count:,} documents; next: python -m data.local --out restored {restored}"))
        return 0
    for found in read_dropped(args.corpus, args.rule, args.source, args.show or 10):
        print(one_line(f"--- {found.source} {found.id} {found.title}: {', '.join(found.rules)}"))
        if found.passage:
            print(one_line(f"    shares: {found.passage[:SHOWN_CHARACTERS]}"))
        rest = len(found.text) - SHOWN_CHARACTERS
        print(printable(found.text[:SHOWN_CHARACTERS]) + (f" ... ({rest:,} more characters)" if rest > 0 else ""))
    return 0


if __name__ == "__main__":
    run_command(main)
