"""Local files: written completely or not at all; and zips from untrusted sources.

with written_whole(Path("out.json")) as beside:      # out.json appears when the block ends without an error
    beside.write_text("...")
for member in zip_members(Path("books.zip")):        # nothing is ever unpacked to disk
    member.read()
"""

from __future__ import annotations

import errno
import json
import lzma
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tinyforge.files
from tinyforge.errors import UserError

MAX_BYTES = 64 << 20  # of a file that is read in one piece; the largest novels have 4 MB
MAX_RATIO = 100  # unpacked to packed; text packs 3 to 5 times, a zip bomb 1000

FULL = "the disk is full; free space and run again, complete files are kept"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_fault(path: Path, error: OSError) -> UserError:
    """The error for a failed write: what is wrong, and what to do."""
    # NumPy's error for a file that it could not write whole has no number.
    if error.errno in _FULL or (error.errno is None and "requested and" in str(error)):
        return UserError(f"{path}: {FULL}")
    if error.errno in _DENIED:
        return UserError(f"{path}: not writable ({error.strerror}); choose another --out, or fix its permissions")
    return UserError(f"{path}: cannot be written ({error.strerror or error}); check --out")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around a write: turns the system's refusal into a UserError."""
    try:
        yield
    except OSError as error:
        raise write_fault(path, error) from None


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """As `tinyforge.files.written_whole`; raises UserError if the system refuses to write."""
    with writing(path), tinyforge.files.written_whole(path) as partial:
        yield partial


def check_writable(path: Path) -> None:
    """Raise UserError now if `written_whole` would after minutes of work: for a missing folder, or one that is not
    writable, or a path that is no file's."""
    with writing(path):
        if path.exists() and not path.is_file():
            raise OSError(errno.EEXIST, "a folder or a device is there")
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def check_name(path: Path) -> None:
    """UserError for a path that is not UTF-8, as one from an old archive may be: DuckDB opens no such path."""
    if not is_utf8(str(path)):
        raise UserError(f"{path}: its name is not UTF-8, so DuckDB cannot open it; rename it")


def is_utf8(name: str) -> bool:
    """Whether a name has no bytes that are not UTF-8, which Python represents as halves of surrogate pairs."""
    return not re.search("[\ud800-\udfff]", name)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON; the file is complete or absent."""
    with written_whole(path) as beside:
        beside.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def make_folder(path: Path) -> None:
    """Make a folder and its parents; UserError, naming --out, if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be created ({error.strerror}); choose another folder") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As `tinyforge.files.locked`; raises UserError if another run holds the folder, or where it cannot be made."""
    check_name(folder)
    with ExitStack() as held:
        try:
            held.enter_context(tinyforge.files.locked(folder, leave_nothing=True))
        except BlockingIOError:
            raise UserError(f"{folder}: another run is writing there; wait for it, or name another --out") from None
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"--out {folder}: is a file, or in one; choose another folder") from None
        except OSError as error:
            raise write_fault(folder, error) from None
        yield


def parse_bytes(text: str, flag: str) -> int:
    """A number of bytes from "250000", "50MB", "1.5 GB" (powers of 1000) or "2GiB" (of 1024). UserError, naming `flag`,
    for anything else."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?) ?([kmgt]?)(i?)b?", text.strip().lower())
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")) if match else 0
    if size < 1:
        raise UserError(f"{flag} is {text!r}, expected bytes such as 500MB or 2GB")
    return size


# --- reading ---------------------------------------------------------------------------------------------------------


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Around a read: turns the system's refusal into a UserError."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder; check the path, relative to {Path.cwd()}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def read_file(path: Path) -> bytes:
    """A file's bytes; UserError if it cannot be read or is larger than MAX_BYTES."""
    with opening(path):
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UserError(f"{path}: {size:,} bytes, expected at most {MAX_BYTES:,}; split it")
        return path.read_bytes()


def files_in(folder: Path) -> Iterator[Path]:
    """The files under a folder in sorted order, without hidden files and folders."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def check_file(path: Path, size: int, sha256: str | None, manifest: str, remedy: str) -> None:
    """UserError unless the file has the size and, if given, the SHA-256 that a manifest lists."""
    if not os.path.isfile(path):  # False for a name that no system takes
        raise UserError(f"{path}: is missing, but {manifest} lists it; {remedy}")
    if (got := path.stat().st_size) != size:
        raise UserError(f"{path}: {got:,} bytes, but {manifest} says {size:,}; {remedy}")
    if sha256 is not None and tinyforge.files.sha256_of(path) != sha256:
        raise UserError(f"{path}: its SHA-256 is not the one in {manifest}, so it was altered; {remedy}")


def name_of(folder: Path) -> str:
    """A folder's own name, also where it is given as "." or ".."."""
    return os.path.basename(os.path.abspath(folder))


@dataclass(frozen=True)
class Member:
    """A file in a zip archive, which stays open as long as any of its members is in use."""

    archive: Path
    info: zipfile.ZipInfo
    opened: zipfile.ZipFile

    @property
    def name(self) -> str:
        return self.info.filename

    def read(self) -> bytes:
        """Its bytes, checked against the archive's checksum; UserError if it is damaged or encrypted."""
        try:
            with opening(self.archive), self.opened.open(self.info) as file:
                return file.read(MAX_BYTES)  # zipfile stops at the declared size
        except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.archive}: member {self.name!r} is damaged, or not of the declared "
                f"{self.info.file_size:,} bytes ({reason}); download the archive again"
            ) from None
        except (RuntimeError, NotImplementedError) as error:  # encrypted, or an unknown compression
            raise UserError(
                f"{self.archive}: member {self.name!r} cannot be unpacked ({error}); unpack it yourself"
            ) from None


def zip_members(path: Path) -> list[Member]:
    """The files in a zip archive, in its order, without hidden ones and the folders that macOS adds.

    Raises UserError, refusing the whole archive, if it is damaged, if a member's path leads out of the folder, or if
    its declared size is too large.
    """
    try:
        with opening(path):
            # Opened once: its directory is read as a whole, and each member's opening would take as long as that.
            archive = zipfile.ZipFile(path)
            members = [member for member in archive.infolist() if not member.filename.endswith("/")]
            packed = path.stat().st_size
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: not a readable zip archive ({error}); download it again") from None
    for member in members:
        name = member.orig_filename.replace("\\", "/")
        if name.startswith("/") or re.match(r"[A-Za-z]:", name) or ".." in PurePosixPath(name).parts:
            raise UserError(
                f"{path}: member {member.orig_filename!r} leads out of its folder; do not trust this archive"
            )
        if member.file_size > MAX_BYTES or member.file_size > MAX_RATIO * max(member.compress_size, 1000):
            raise UserError(
                f"{path}: member {member.filename!r} unpacks from {member.compress_size:,} to {member.file_size:,}, "
                f"expected at most {MAX_BYTES:,} and {MAX_RATIO} times; do not trust this archive"
            )
    total = sum(member.file_size for member in members)
    if total > MAX_RATIO * max(packed, 1000):  # members may share their packed bytes
        raise UserError(
            f"{path}: {packed:,} bytes unpack to {total:,}, expected at most {MAX_RATIO} times; do "
            f"not trust this archive"
        )
    visible = (m for m in members if not any(p.startswith((".", "__MACOSX")) for p in PurePosixPath(m.filename).parts))
    return [Member(path, member, archive) for member in visible]
