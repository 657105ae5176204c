"""Files on this machine: written whole or not at all, and archives that are read without trusting them.

with written_whole(Path("out.json")) as beside:      # out.json appears when the block has ended well
    beside.write_text("...")
for member in zip_members(Path("books.zip")):        # nothing is ever unpacked to the disk
    member.read()
"""

from __future__ import annotations

import errno
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tinyforge.files
from tinyforge.errors import UserError

MAX_BYTES = 64 << 20  # of one file that is read as a whole; the largest novels have 4 MB
MAX_RATIO = 100  # unpacked to packed; text packs 3 to 5 times, a zip bomb 1000

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_fault(path: Path, error: OSError) -> UserError:
    """The one line for a write that the system refused: what is wrong with the disk, and what to do."""
    if error.errno in _FULL:
        return UserError(f"{path}: the disk is full; make room and run again, what is whole is kept")
    if error.errno in _DENIED:
        return UserError(f"{path}: may not be written ({error.strerror}); name another --out, or mend its permissions")
    return UserError(f"{path}: cannot be written ({error.strerror or error}); check --out")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """As `tinyforge.files.written_whole`; raises UserError where the system refuses to write."""
    try:
        with tinyforge.files.written_whole(path) as beside:
            yield beside
    except OSError as error:
        raise write_fault(path, error) from None


def write_json(path: Path, value: Any) -> None:
    """`value` as indented UTF-8 JSON in a file that is whole or absent."""
    with written_whole(path) as beside:
        beside.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def make_folder(path: Path) -> None:
    """Make a folder and those above it; UserError, naming --out, if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be made ({error.strerror}); name a folder") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As `tinyforge.files.locked`; raises UserError if another run holds the folder, or where it cannot be made."""
    make_folder(folder)
    with ExitStack() as held:
        try:
            held.enter_context(tinyforge.files.locked(folder))
        except BlockingIOError:
            raise UserError(f"{folder}: another run is writing there; wait for it, or name another --out") from None
        except OSError as error:
            raise write_fault(folder, error) from None
        yield


# --- reading ---------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> bytes:
    """A file's bytes; UserError if it cannot be read or is larger than MAX_BYTES."""
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UserError(f"{path}: {size:,} bytes, wanted {MAX_BYTES:,} at most; split it")
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder; check the path, relative to {Path.cwd()}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def escape_glob(path: Path) -> str:
    """A path for DuckDB, which expands `*`, `?` and `[`: a class of one character stands for that character alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in str(path))


def files_in(folder: Path) -> Iterator[Path]:
    """The files under a folder in sorted order, without hidden ones and what is in hidden folders."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


@dataclass(frozen=True)
class Member:
    """A file in a zip archive."""

    archive: Path
    info: zipfile.ZipInfo

    @property
    def name(self) -> str:
        return self.info.filename

    def read(self) -> bytes:
        """Its bytes, compared with the archive's checksum; UserError if it is damaged, or encrypted."""
        try:
            with zipfile.ZipFile(self.archive) as archive, archive.open(self.info) as file:
                return file.read(MAX_BYTES)  # zipfile stops at the size that is declared
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.archive}: member {self.name!r} is damaged or is not the {self.info.file_size:,} bytes it says "
                f"({reason}); get the archive again"
            ) from None
        except (RuntimeError, NotImplementedError) as error:  # encrypted, or an unknown compression
            raise UserError(
                f"{self.archive}: member {self.name!r} cannot be unpacked ({error}); unpack it yourself"
            ) from None
        except OSError as error:
            raise UserError(f"{self.archive}: cannot be read ({error.strerror}); check its permissions") from None


def zip_members(path: Path) -> list[Member]:
    """The files in a zip archive, in its order, without hidden ones and the folders that macOS adds.

    An archive is refused as a whole, by a UserError, if it is damaged or has a member whose path leads out of the
    folder or that says it unpacks to too much.
    """
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
    visible = (m for m in members if not any(p.startswith((".", "__MACOSX")) for p in PurePosixPath(m.filename).parts))
    return [Member(path, member) for member in visible]
