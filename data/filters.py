"""Quality filters in SQL: reading a filter file, checking it, and one query that applies it.

    filters = read_filters(Path("data/filters.sql"))
    check_filters(connection, filters)      # UserError that names the filter if its SQL is wrong
    rules_query(filters, "documents")       # SELECT number, rules: the filters that drop it, "too-short,symbols" or ""

The format is explained at the top of data/filters.sql.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyforge.errors import UserError

if TYPE_CHECKING:
    import duckdb

DEFAULT_FILTERS = Path(__file__).with_name("filters.sql")
# The columns that are measured when reading.
MEASURED = {
    "bytes": "BIGINT",
    "words": "BIGINT",
    "letters": "BIGINT",
    "characters": "BIGINT",
    "repeats": "DOUBLE",
    "stops": "DOUBLE",
    "bad_words": "DOUBLE",
    "quality": "DOUBLE",
    "language": "VARCHAR",
    "language_share": "DOUBLE",
}
# All that a filter sees of a document; `text` is the text of the part.
COLUMNS = {
    "number": "BIGINT",
    "source": "VARCHAR",
    "id": "VARCHAR",
    "title": "VARCHAR",
    "url": "VARCHAR",
    "language_score": "DOUBLE",
    **MEASURED,
    "text": "VARCHAR",
}
RESERVED = ("exact-duplicate", "near-duplicate", "contaminated", "evaluation-set")  # other reasons for dropping


@dataclass(frozen=True)
class Filter:
    """A block of the file. kind: "filter" (a boolean, true drops) or "measure" (a name for use in later blocks)."""

    kind: str
    name: str
    sql: str
    explanation: str


def read_filters(path: Path) -> tuple[Filter, ...]:
    """The blocks of a filter file, in order. UserError if it cannot be read or has another format."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; name a filter file such as data/filters.sql") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); name a filter file") from None
    heads = list(re.finditer(r"^-- *(filter|measure): *(.*?) *$", text, re.MULTILINE))
    if not any(head[1] == "filter" for head in heads):
        raise UserError(f"{path}: no line '-- filter: NAME', expected at least one; see data/filters.sql")
    found: dict[str, Filter] = {}
    for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=True):
        kind, name = head[1], head[2]
        expected = r"[a-z][a-z0-9_-]*" if kind == "filter" else r"[a-z][a-z0-9_]*"
        if not re.fullmatch(expected, name) or name in (RESERVED if kind == "filter" else COLUMNS):
            raise UserError(f"{path}: {kind} {name!r}: expected a lower-case name that is not in use; rename it")
        if name in found:
            raise UserError(f"{path}: {kind} {name!r} occurs twice; rename one of them")
        lines = text[head.end() : end].strip().splitlines()
        comment = []
        while lines and lines[0].startswith("--"):
            comment.append(lines.pop(0).lstrip("- "))
        sql = "\n".join(lines).strip().removesuffix(";").strip()
        if not sql:
            raise UserError(f"{path}: {kind} {name!r} has no expression; write one below its comment")
        found[name] = Filter(kind, name, sql, " ".join(comment))
    return tuple(found.values())


def check_filters(connection: duckdb.DuckDBPyConnection, filters: tuple[Filter, ...]) -> None:
    """UserError that names the first block whose SQL DuckDB refuses, or a filter that is not boolean."""
    import duckdb

    empty = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items())
    for index, block in enumerate(filters):
        names = _measures(filters[:index])
        query = f"SELECT ({block.sql}\n) AS value FROM (SELECT *{names} FROM (SELECT {empty} WHERE false))"
        try:
            kind = connection.execute(f"DESCRIBE {query}").fetchall()[0][1]
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{block.kind} {block.name!r}: {reason}; fix its SQL") from None
        if block.kind == "filter" and kind != "BOOLEAN":
            raise UserError(f"filter {block.name!r}: its expression is {kind}, expected BOOLEAN; add a comparison")


def rules_query(filters: tuple[Filter, ...], relation: str) -> str:
    """SQL: `number` and `rules`, the names of all filters that drop the document, with commas between them."""
    # A condition of CASE stops at the first false term of an AND; as a column it would compute every term.
    cases = ", ".join(
        f"CASE WHEN ({block.sql}\n) THEN '{block.name}' END" for block in filters if block.kind == "filter"
    )
    return f"SELECT number, concat_ws(',', {cases}) AS rules FROM (SELECT *{_measures(filters)} FROM {relation})"


def _measures(filters: tuple[Filter, ...]) -> str:
    """Each measure as a column; in DuckDB a column may use those before it."""
    return "".join(f', ({block.sql}\n) AS "{block.name}"' for block in filters if block.kind == "measure")
