"""Data sets on Hugging Face: list their files, with URLs.

    files = list_files(downloader, "https://huggingface.co", "HuggingFaceFW/fineweb-edu", "sample/10BT", Path("raw"))
        ->  [Published(path="sample/10BT/000_00000.parquet", url="https://huggingface.co/datasets/...", bytes=..., ...)]

A mirror named by `--base-url` has the same two paths: `/api/datasets/REPO/tree/main/FOLDER` for the list, as JSON,
and `/datasets/REPO/resolve/main/FILE` for the files, which may redirect.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tinyforge.data.download import Downloader, check_url
from tinyforge.errors import UserError
from tinyforge.files import json_value

HOST = "https://huggingface.co"


@dataclass(frozen=True)
class Published:
    """A published file, with its size and SHA-256; None if only the name is known."""

    path: str  # within the repository
    url: str
    bytes: int | None = None
    sha256: str | None = None


def file_url(base: str, repository: str, path: str) -> str:
    """The URL of a file of a data set."""
    return check_url(f"{base.rstrip('/')}/datasets/{repository}/resolve/main/{quote(path)}")


def list_files(downloader: Downloader, base: str, repository: str, folder: str, raw: Path) -> list[Published]:
    """The files in one folder ("" for the root) of a data set, sorted by path.

    The list is kept in `raw`, so that a resumed run works on the same files. Raises FetchError if it cannot be
    downloaded, and UserError if it is not a list as Hugging Face sends it.
    """
    url = check_url(f"{base.rstrip('/')}/api/datasets/{repository}/tree/main/{quote(folder)}".rstrip("/"))
    listing = downloader.fetch(url, raw / "files.json")
    try:
        found = [
            Published(
                path=entry["path"],
                url=file_url(base, repository, entry["path"]),
                bytes=entry["size"],
                sha256=entry.get("lfs", {}).get("oid"),  # small files are in git itself, with another kind of hash
            )
            for entry in json_value(listing.path.read_bytes())
            if entry["type"] == "file"
        ]
        if any(type(file.bytes) is not int or not isinstance(file.sha256, str | None) for file in found):
            raise TypeError("a size or a hash of another type")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{url}: not a list of files as Hugging Face sends it ({error!r}); check --base-url, or name --files"
        ) from None
    return sorted(found, key=lambda file: file.path)
