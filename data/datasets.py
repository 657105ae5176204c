"""Data sets of the Hugging Face hub by name: hf://datasets/owner/name, with @REVISION and a path or pattern after it.

    python -m data.local --out mine hf://datasets/owner/name
    python -m data.local --out mine 'hf://datasets/owner/name@v1/data/train-*.parquet' --column body

huggingface_hub downloads into its cache (HF_HOME), with its token (HF_TOKEN), its mirror (HF_ENDPOINT) and offline mode
(HF_HUB_OFFLINE=1). Only files that data.local reads are downloaded, never a program.
"""

from __future__ import annotations

import glob
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from tinyforge.data.readers import KNOWN, BadRecord, kind_of
from tinyforge.errors import UserError
from tinyforge.formats import hub

# As a path: it has lost one of its slashes.
_NAME = re.compile(r"hf:/datasets/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<path>.+))?")
_TEXTS = (".txt", ".zip")
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "corpus.json", "manifest.json", "tokenizer.json")


def is_dataset(path: Path) -> bool:
    """Whether an input is the name of a data set on the hub."""
    return path.as_posix().startswith("hf:/")


def fetch_dataset(path: Path) -> list[tuple[str, Path]]:
    """The files of a data set: the name of each, owner/name/FILE, and where it is in the hub's cache.

    Raises UserError for a name of another form, for what `hub.explained` explains, and without a file that is read.
    """
    found = _NAME.fullmatch(path.as_posix())
    if not found:
        raise UserError(f"{path}: not a data set's name, expected hf://datasets/OWNER/NAME[@REVISION][/PATH]")
    name, pattern = found["name"], (found["path"] or "").rstrip("/")
    library = hub.package()
    with hub.explained(f"datasets/{name}"):
        offline = library.constants.HF_HUB_OFFLINE
        options = {"repo_type": "dataset", "revision": found["revision"]}
        if offline:
            folder = Path(library.snapshot_download(name, local_files_only=True, **options))
            names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        else:
            described = library.HfApi().dataset_info(name, revision=found["revision"])
            names = [sibling.rfilename for sibling in described.siblings or ()]
        chosen = sorted(file for file in names if _is_read(file) and _matches(file, pattern))
        if not chosen:
            raise UserError(
                f"hf://datasets/{name}: no file that is read{f' matches {pattern}' if pattern else ''} among "
                f"{', '.join(sorted(names)[:5]) or 'none'}{', ...' if len(names) > 5 else ''}"
            )
        if not offline:
            options["revision"] = described.sha
            folder = Path(
                library.snapshot_download(name, allow_patterns=[glob.escape(file) for file in chosen], **options)
            )
    return [(f"{name}/{file}", folder / file) for file in chosen]


def _is_read(name: str) -> bool:
    path = PurePosixPath(name)
    try:
        suffix, _ = kind_of(name)
    except BadRecord:
        return False
    return suffix in (*KNOWN, *_TEXTS) and path.name not in _NOT_DATA and not path.name.startswith(".")


def _matches(name: str, pattern: str) -> bool:
    return not pattern or fnmatchcase(name, pattern) or name.startswith(f"{pattern}/")
