"""DuckDB connections, and parquet files by path: what every reader and writer of them shares."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tinyforge.data.files import FULL
from tinyforge.errors import UserError

OPTIONS = "(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 4096)"  # of files that are kept


def connect(path: str = ":memory:", **config: Any) -> Any:
    """A DuckDB connection without a progress bar, which an interactive Python gets otherwise."""
    import duckdb

    connection = duckdb.connect(path, config=config)
    connection.execute("SET enable_progress_bar = false")
    return connection


def quoted(text: object) -> str:
    """A SQL string."""
    return "'" + str(text).replace("'", "''") + "'"


def escape_glob(path: Path) -> str:
    """A path for DuckDB, which expands `*`, `?` and `[`: a class of one character matches that character only."""
    return glob.escape(str(path))


@contextmanager
def reading(path: Path, fix: str, what: str = "parquet file") -> Iterator[None]:
    """Turn DuckDB's errors into a UserError: that the file is not what it should be. fix: what to do."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        reason = str(error).splitlines()[0].replace(escape_glob(path), path.name)
        raise UserError(f"{path}: not a readable {what} ({reason}); {fix}") from None


def scan(path: Path) -> str:
    """SQL: a parquet file with the number of each row. A folder named "text=1" becomes no column."""
    return f"read_parquet({quoted(escape_glob(path))}, file_row_number = true, hive_partitioning = false)"


def rows_of(path: Path) -> int:
    """The number of rows, from the file's footer."""
    with connect() as connection:
        query = "SELECT num_rows FROM parquet_file_metadata($path)"
        return int(connection.execute(query, {"path": escape_glob(path)}).fetchall()[0][0])


def copy_to_parquet(connection: Any, query: str, path: Path) -> None:
    """COPY the rows of `query` to `path`; DuckDB's error for a full disk becomes a UserError."""
    import duckdb

    try:
        connection.execute(f"COPY ({query}) TO {quoted(path)} {OPTIONS}")
    except duckdb.IOException as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        if "No space left" in str(error):
            raise UserError(f"{path}: {FULL}") from None
        if str(path) in str(error) or path.name in str(error):
            reason = " ".join(str(error).split())
            raise UserError(f"{path}: cannot be written ({reason}); check --out") from None
        raise
