"""Files: atomic writes that survive a crash, locks, and safe reading of text and JSON."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError

LOCK = ".lock"
MOST_BYTES = 64 << 20  # of a text or JSON file that is read whole
MOST_DIGITS = 20  # of a whole number in JSON: 64 bits need no more
MORE_DIGITS = 40  # in tokenizer_config.json, where a model_max_length of 31 digits means that there is none
MOST_DEPTH = 100  # of JSON's objects and lists; deeper nesting leads to a RecursionError somewhere
GET_AGAIN = "get or make the file again"
JSON_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on disk. Windows cannot do it for folders."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """os.replace. Windows refuses it while another program, such as a virus scanner, has the file open: there it is
    retried for a second."""
    for seconds in (0.01, 0.1, 0.9) if sys.platform == "win32" else ():
        try:
            return os.replace(source, target)
        except PermissionError:
            time.sleep(seconds)
    os.replace(source, target)


_writer = ""


def write_as(name: str) -> None:
    """From now on `written_whole` uses temporary names of this process alone. Of two machines that write the same file
    of a shared folder at the same time, the last one wins, and the file is whole."""
    global _writer
    _writer = f"{name}-"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path next to `path`; it is synced to disk and renamed to `path` when the block ends well.

    The block may write the file by any means. After an error the old file stays and the temporary one is removed; one
    left by a killed run is overwritten. A link is replaced by the file. Raises OSError, also if `path` is a folder or
    a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "a folder or a device is there")
    partial = path.with_name(f".partial-{_writer}{path.name}")
    try:
        yield partial
        sync(partial)
        replace(partial, path)
        sync(path.parent)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all; as `written_whole`."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def folder_written_whole(path: Path) -> Iterator[Path]:
    """`written_whole` of a folder, with the folders above it. The block syncs its files; on an error all is removed."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
        partial.mkdir(parents=True)
        yield partial
        sync(partial)
        replace(partial, path)
        sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


REMEDIES = {
    errno.ENOSPC: "free some space or choose another place",
    errno.EDQUOT: "free some space or choose another place",
    errno.ENOENT: "make its folder, or choose another place",
    errno.EISDIR: "it is a folder; name a file in it",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextmanager
def writing(what: object, fix: str = "") -> Iterator[None]:
    """Around a write: turns an OSError into a UserError of one line. fix: what to do (default: by the error)."""
    try:
        yield
    except OSError as error:
        remedy = fix or REMEDIES.get(error.errno or 0, "choose another place")
        raise UserError(f"cannot write {what}: {error.strerror or error}; {remedy}") from error


@contextmanager
def locked(folder: Path, leave_nothing: bool = False) -> Iterator[None]:
    """Lock `folder`, created if missing, for this process: two writers would spoil each other's files.

    The lock is released when the process ends, however it ends, and forked children do not inherit it. leave_nothing:
    at the end remove the lock file, and the folders created for it if they are empty. Raises BlockingIOError if the
    folder is locked already, OSError if it cannot be created or written. On a file system without locks this does not
    lock.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            _lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            raise
        # The previous holder may have removed the file between the two calls: then we locked a deleted file.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)
    _locks.add(descriptor)
    try:
        yield
    finally:
        _locks.discard(descriptor)
        if leave_nothing:
            with suppress(OSError):  # Windows removes no open file
                path.unlink()
        os.close(descriptor)
        if leave_nothing:
            with suppress(OSError):  # not empty
                for made in missing:
                    made.rmdir()


_locks: set[int] = set()


def _lock(descriptor: int) -> None:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except PermissionError as error:  # how Windows says that it is held
        raise BlockingIOError(error.errno, error.strerror) from None
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        pass


def _forget_locks() -> None:
    """In a forked child: a lock that it inherited would outlive the process that took it."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- files from elsewhere, whose content is not trusted ------------------------------------------------------


def read_bytes(path: str | Path, what: str, max_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a file. what: names the file's purpose in the error: "the tokenizer".

    Raises UserError if it cannot be read or has more than `max_bytes`; no more than that is read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        cause = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read {what} {path}: {cause}; check the path") from error
    if len(data) > max_bytes:
        raise UserError(f"cannot read {what} {path}: got more than {max_bytes:,} bytes; check the path")
    return data


def read_text(path: str | Path, what: str) -> str:
    """The text of a UTF-8 file, line ends unchanged. Raises UserError as `read_bytes`, and if it is not UTF-8."""
    try:
        return read_bytes(path, what).decode()
    except UnicodeDecodeError as error:
        raise _not_text(path, what, error) from error


def read_json(
    path: str | Path,
    what: str,
    wanted_type: type = dict,
    max_bytes: int = MOST_BYTES,
    fix: str = GET_AGAIN,
    digits: int = MOST_DIGITS,
) -> Any:
    """The value in a JSON file, which must be of `wanted_type` (dict, list, ...). fix: the end of the error message.
    digits: the most that a whole number may have.

    Raises UserError, one line that names the file, if it cannot be read, is larger than `max_bytes`, is not UTF-8, has
    another type, or is refused by `json_value`.
    """
    return parse_json(read_bytes(path, what, max_bytes), path, what, wanted_type, fix, digits=digits)


def parse_json(
    data: bytes,
    path: str | Path,
    what: str,
    wanted_type: type = dict,
    fix: str = GET_AGAIN,
    can_be_written: bool = False,
    digits: int = MOST_DIGITS,
) -> Any:
    """As `read_json`, for the bytes of a file that has been read; `path` is for the error. can_be_written: refuse lone
    surrogates, which JSON can spell as escapes but UTF-8 cannot encode."""
    try:
        content = json_value(data, digits)
        if can_be_written:
            _check_characters(content)
    except UnicodeDecodeError as error:
        raise _not_text(path, what, error) from error
    except ValueError as error:
        cause = str(error)
    else:
        if isinstance(content, wanted_type):
            return content
        cause = f"got {JSON_NAMES[type(content)]}, expected {JSON_NAMES[wanted_type]}"
    raise UserError(f"cannot read {what} {path}: {cause}; {fix}")


def json_value(text: str | bytes, digits: int = MOST_DIGITS) -> Any:
    """The value of a JSON text, after a byte-order mark or none; bytes are UTF-8.

    All JSON from outside is read by this function or `next_json_value`. A fault is a ValueError of one line, never a
    RecursionError or seconds spent in `int`. Raises it for text that is not UTF-8 or not JSON, is nested deeper than
    MOST_DEPTH, or holds a whole number of more than `digits` digits.
    """
    if isinstance(text, bytes):
        data, text = text, text.decode()
    else:
        data = text.encode("utf-8", "surrogatepass")
    start = _BLANKS.match(text, text.startswith("\ufeff")).end()  # type: ignore[union-attr]  # it matches "" too
    try:
        # Python's own reading of numbers is much faster, and safe where no number can be long.
        value, end = next_json_value(text, start, digits if _has_long_number(data) else 0)
        if (rest := _BLANKS.match(text, end).end()) < len(text):  # type: ignore[union-attr]
            raise json.JSONDecodeError("Extra data", text, rest)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON (line {error.lineno}: {error.msg})") from None
    return value


def next_json_value(text: str, start: int, digits: int = MOST_DIGITS) -> tuple[Any, int]:
    """The value that begins at text[start], and where it ends. Raises ValueError as `json_value`; a JSONDecodeError has
    the position of what is not JSON."""
    try:
        value, end = _decoder(digits).raw_decode(text, start)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    values: list[Any] = [value]
    for _ in range(MOST_DEPTH + 1):
        # A published vocabulary has half a million lists of two texts: no loop of Python's over the texts.
        if {dict, list}.isdisjoint(map(type, values)):
            return value, end
        lists = [inner for inner in values if type(inner) is list]
        objects = [inner.values() for inner in values if type(inner) is dict]
        values = list(chain.from_iterable(chain(lists, objects)))
    raise ValueError("it is nested too deeply")


def _check_characters(content: Any) -> None:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds half a character, {ascii(error.object[error.start])}") from None


def shown(value: object, most: int = 60) -> str:
    """A value from a file, for an error message: on one line, at most `most` characters."""
    text = ascii(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _not_text(path: str | Path, what: str, error: UnicodeDecodeError) -> UserError:
    return UserError(f"cannot read {what} {path}: it is not UTF-8 at byte {error.start}; check the path")


@cache
def _decoder(most: int) -> json.JSONDecoder:
    """most: digits; 0 for any number."""
    if not most:
        return json.JSONDecoder()

    def to_int(digits: str) -> int:
        if (count := len(digits.lstrip("-"))) > most:
            raise ValueError(f"got a whole number of {count} digits, expected {most} at most")
        return int(digits)

    return json.JSONDecoder(parse_int=to_int)


def _has_long_number(data: bytes) -> bool:
    """Whether more than MOST_DIGITS digits follow each other anywhere."""
    return b"0" * (MOST_DIGITS + 1) in data.translate(_DIGITS)


_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_BLANKS = re.compile(r"[ \t\n\r]*")
