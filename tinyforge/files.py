"""Files: whole or not at all, on the disk for good, and what is in them."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Windows cannot do it for folders."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a path beside `path` to write to; synced to disk and renamed to `path` when the block ends well.

    The file is written with whatever means, so it is opened once more to be synced. After an error before the renaming
    the old file stays, and the one beside it goes; what a killed run has left of it is written over. A link is replaced
    by the file. Raises OSError, also where `path` is a folder or a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "a folder or a device is there")
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all; as `written_whole`."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
