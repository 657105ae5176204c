"""Token shards: a corpus as ids on disk, read through memory maps.

    shards/
        tokenizer.json               the tokenizer that made the ids
        books-train-00000.bin ...    ids of a source's split, cut into files of equal length (the last is shorter)
        books-val-00000.bin ...
        manifest.json                counts, licences, SHA-256 of every file; written last: it marks a complete folder

A file is a header of 64 bytes and the ids, all little-endian:

    offset  bytes  field
         0      8  magic, b"TFTOKENS"
         8      4  version, 1
        12      4  bytes per id: 2 (uint16) or 4 (uint32)
        16      8  number of ids in this file
        24      8  position of its first id in the source's split
        32     32  SHA-256 that Tokenizer.hash() gives
        64         ids

A document is its ids and <|endoftext|>; it may begin in one file and end in the next. docs/shards.md has more.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends.workers import cores
from tinyforge.errors import UserError
from tinyforge.files import parse_json, replace, sha256_of, shown, sync, write_whole, writing
from tinyforge.tokenizers.load import load_tokenizer
from tinyforge.tokenizers.vocabulary import TextTokenizer

MAGIC = b"TFTOKENS"
FORMAT = "tinyforge-shards"
VERSION = 1
SPLITS = ("train", "val")
SEPARATOR = "<|endoftext|>"
SHARD_TOKENS = 100_000_000
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

_HEADER = struct.Struct("<8sIIQQ32s")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_CHUNK = 1 << 18  # bytes read at a time; a multiple of an id's
_REMAKE = "make the shards again with python -m data.shards"
_FREE_SPACE = "free some space or fix its permissions, and run the same command again: whole shards are kept"


class Header(NamedTuple):
    """A file's header. first: position of its first id in the whole sequence."""

    bytes_per_id: int
    tokens: int
    first: int
    tokenizer_hash: str


def separator_of(tokenizer: TextTokenizer) -> str:
    """The special token between documents: SEPARATOR; in a published vocabulary without it, the token that every text
    begins with, else </s> or BERT's [SEP]. UserError if there is none of these."""
    texts = {id: text for text, id in tokenizer.specials.items()}
    begins = "" if tokenizer.bos is None else texts[tokenizer.bos]
    found = next((text for text in (SEPARATOR, begins, "</s>", "[SEP]") if text in tokenizer.specials), None)
    if found is None:
        raise UserError(f"the tokenizer has no special token {SEPARATOR}, nor another to end documents; use another")
    return found


@dataclass(frozen=True)
class ShardFile:
    """A file in the manifest. bytes, sha256: of the whole file, header included."""

    file: str
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """One split of one source. bytes: of its text in UTF-8; tokens: with the separators; files: in order."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    files: tuple[ShardFile, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_token": round(self.bytes / self.tokens, 4) if self.tokens else None}


@dataclass(frozen=True)
class Source:
    """A source and its splits. inputs: SHA-256 of the files of its text, if the corpus knows them."""

    name: str
    licence: str
    train: Part = field(default_factory=Part)
    val: Part = field(default_factory=Part)
    inputs: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "licence": self.licence,
            **{s: getattr(self, s).to_dict() for s in SPLITS},
            **({"inputs": list(self.inputs)} if self.inputs else {}),
        }


def bytes_per_id(vocab_size: int) -> int:
    """2 where every id fits uint16, else 4."""
    return 2 if vocab_size <= 1 << 16 else 4


def shard_name(source: str, split: str, number: int) -> str:
    return f"{source}-{split}-{number:05d}.bin"


# --- writing ----------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: Any) -> None:
    """Write JSON, whole or not at all."""
    with writing(path, _FREE_SPACE):
        write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


class ShardWriter:
    """Writes a source's split in files of `shard_tokens` ids. A file appears under its name when it is complete.

    kept: the files of an earlier, interrupted run; the next id follows theirs. One document is in memory. Raises
    UserError if a file cannot be written, ValueError for an id outside the tokenizer's vocabulary.
    """

    def __init__(
        self,
        folder: Path,
        source: str,
        split: str,
        tokenizer: TextTokenizer,
        shard_tokens: int = SHARD_TOKENS,
        kept: Sequence[ShardFile] = (),
    ) -> None:
        self.folder, self.source, self.split = folder, source, split
        self.files = list(kept)
        self._vocab_size, self._hash = tokenizer.vocab_size, tokenizer.hash()
        self._width = bytes_per_id(tokenizer.vocab_size)
        self._shard_tokens = shard_tokens
        self._file: Any = None
        self._count = 0

    def append(self, ids: np.ndarray) -> None:
        """The ids of the next document, or of a part of it."""
        if len(ids) and not (0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size):
            raise ValueError(f"ids {ids.min()}..{ids.max()} are outside the vocabulary of {self._vocab_size}")
        ids = ids.astype(_DTYPES[self._width], copy=False)
        with writing(self._path(), _FREE_SPACE):
            while len(ids):
                if self._file is None:
                    self._file = open(self._partial(), "wb", buffering=1 << 20)  # noqa: SIM115
                    self._file.write(bytes(_HEADER.size))
                part = ids[: self._shard_tokens - self._count]
                self._file.write(part.tobytes())
                self._count += len(part)
                ids = ids[len(part) :]
                if self._count == self._shard_tokens:
                    self._finish()

    def close(self) -> tuple[ShardFile, ...]:
        """Finish the last file; returns all of them in order."""
        with writing(self._path(), _FREE_SPACE):
            if self._file is not None:
                self._finish()
        return tuple(self.files)

    def _path(self) -> Path:
        return self.folder / shard_name(self.source, self.split, len(self.files))

    def _partial(self) -> Path:
        return self.folder / f".partial-{self._path().name}"

    def _finish(self) -> None:
        first = sum(f.tokens for f in self.files)
        self._file.seek(0)
        self._file.write(_HEADER.pack(MAGIC, VERSION, self._width, self._count, first, bytes.fromhex(self._hash)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        described = describe(self._partial(), self._path().name)
        replace(self._partial(), self._path())
        sync(self.folder)
        self.files.append(described)
        self._count = 0


def describe(path: Path, name: str | None = None) -> ShardFile:
    """The manifest's entry of a complete file."""
    header = read_header(path)
    return ShardFile(name or path.name, header.tokens, path.stat().st_size, sha256_of(path))


def write_manifest(folder: Path, tokenizer: TextTokenizer, sources: Sequence[Source], settings: dict[str, Any]) -> None:
    """Write the manifest, last: it marks the folder as complete. The same shards give the same bytes."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer_hash": tokenizer.hash(),
        "vocab_size": tokenizer.vocab_size,
        "bytes_per_id": bytes_per_id(tokenizer.vocab_size),
        "sources": [source.to_dict() for source in sources],
        "settings": settings,
    }
    write_json(folder / MANIFEST, content)


# --- reading ----------------------------------------------------------------------------------------------------------


class TokenSequence:
    """One source's split as a single sequence of ids over its files.

    Slices (step 1) are NumPy arrays of uint16 or uint32: within a file a view of the memory map, across files a copy.
    Nothing is read before it is used.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._parts = [_map_ids(path) for path in paths]
        self._starts = list(accumulate(map(len, self._parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError(f"a TokenSequence is sliced in steps of 1, got {step}")
        if stop <= start:
            return np.empty(0, self._parts[0].dtype if self._parts else np.uint16)
        index = bisect_right(self._starts, start) - 1
        pieces = []
        while start < stop:
            begin, end = self._starts[index], min(stop, self._starts[index + 1])
            pieces.append(self._parts[index][start - begin : end - begin])
            start, index = end, index + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _map_ids(path: Path) -> np.ndarray:
    header = read_header(path)
    with open(path, "rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        # Windows are read in random order: with a corpus larger than memory, read-ahead would fetch a hundred times
        # what is used.
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, _DTYPES[header.bytes_per_id], header.tokens, _HEADER.size)


def read_header(path: Path) -> Header:
    """The header of a file. UserError for a file that is not a shard, of another version, or of the wrong length."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            head = f.read(_HEADER.size)
    except FileNotFoundError:
        raise UserError(f"{path}: the shard is missing; copy it here again, or {_REMAKE}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix its permissions") from None
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise UserError(f"{path}: got {head[:8]!r} at its start, expected {MAGIC!r}: not a token shard; {_REMAKE}")
    _, version, width, count, first, digest = _HEADER.unpack(head)
    if version != VERSION or width not in _DTYPES:
        raise UserError(
            f"{path}: got version {version} with {width} bytes per id, expected version {VERSION} "
            f"with 2 or 4; {_REMAKE}"
        )
    if size != _HEADER.size + width * count:
        raise UserError(
            f"{path}: got {size:,} bytes, expected {_HEADER.size + width * count:,} for its {count:,} ids; the file is "
            f"truncated or damaged: copy it again, or {_REMAKE}"
        )
    return Header(width, count, first, digest.hex())


def is_shard_folder(path: Path) -> bool:
    """Whether a folder has a manifest, or shards without one, as after an interrupted run."""
    return (path / MANIFEST).is_file() or any(path.glob("*-[0-9][0-9][0-9][0-9][0-9].bin"))


class Shards:
    """One or more folders of token shards with one tokenizer. A source found in several folders is one sequence.

    sources: by name, in the order of the folders. Raises UserError, naming the file, for an incomplete folder, a
    manifest of another version, a file that is missing, truncated or changed, and a second tokenizer.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        """Reads manifests, tokenizers and headers; `verify` reads everything."""
        self._files: dict[tuple[str, str], list[tuple[Path, ShardFile]]] = {}
        self.sources: dict[str, Source] = {}
        digests = []
        first: Path | None = None
        for folder in folders:
            raw, manifest = _read_manifest(folder)
            digests.append(hashlib.sha256(raw).hexdigest())
            if digests.count(digests[-1]) > 1:
                raise UserError(f"--data: {folder} has the manifest of a folder named before it; name each folder once")
            tokenizer = load_tokenizer(folder / TOKENIZER)
            tokenizer_hash = tokenizer.hash()
            if tokenizer_hash != manifest["tokenizer_hash"]:
                raise UserError(
                    f"{folder / TOKENIZER}: got the tokenizer {tokenizer_hash[:12]}..., the manifest says "
                    f"{manifest['tokenizer_hash'][:12]}...; copy the folder's own tokenizer.json again, or {_REMAKE}"
                )
            if first is None:
                self.tokenizer, self._tokenizer_hash, first = tokenizer, tokenizer_hash, folder
            elif tokenizer_hash != self._tokenizer_hash:
                raise UserError(
                    f"{folder}: its shards were made with another tokenizer than those of {first}; make them again "
                    f"with python -m data.shards --tokenizer {first / TOKENIZER}"
                )
            for source in manifest["sources"]:
                self._add(folder, _source(folder, source))
        if not any(source.train.tokens for source in self.sources.values()):
            raise UserError(f"--data: {', '.join(map(str, folders))}: no ids to train on; {_REMAKE} from more text")
        self.hash = digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def sequence(self, source: str, split: str) -> TokenSequence:
        """The ids of a source's split ("train" or "val"); empty where it has none."""
        return TokenSequence([path for path, _ in self._files.get((source, split), [])])

    def verify(self, progress: bool = False) -> None:
        """Read every file, and check its SHA-256 against the manifest and its ids against the vocabulary.

        Nothing is remembered between runs: a core checks some 1 GB per second, so 10^9 tokens take two seconds, and
        afterwards the pages that training reads are in memory.
        """
        from tqdm import tqdm

        files = [file for files in self._files.values() for file in files]
        vocab_size, total = self.tokenizer.vocab_size, sum(entry.bytes for _, entry in files)
        bar = tqdm(total=total, desc="checking shards", unit="B", unit_scale=True, disable=not progress, leave=False)
        with bar, ThreadPoolExecutor(cores()) as pool:
            for size in pool.map(lambda file: _verify_file(file[0], file[1], vocab_size), files):
                bar.update(size)

    def _add(self, folder: Path, source: Source) -> None:
        for split in SPLITS:
            position = 0
            for entry in getattr(source, split).files:
                path = folder / entry.file
                header = read_header(path)
                if header.tokenizer_hash != self._tokenizer_hash:
                    raise UserError(
                        f"{path}: made with the tokenizer {header.tokenizer_hash[:12]}..., the folder's is "
                        f"{self._tokenizer_hash[:12]}...; {_REMAKE}"
                    )
                got = Header(bytes_per_id(self.tokenizer.vocab_size), entry.tokens, position, header.tokenizer_hash)
                if header != got or path.stat().st_size != entry.bytes:
                    raise UserError(
                        f"{path}: got {header.tokens:,} ids from position {header.first:,}, the manifest says "
                        f"{entry.tokens:,} from {position:,}; copy the file again, or {_REMAKE}"
                    )
                position += entry.tokens
                self._files.setdefault((source.name, split), []).append((path, entry))
        known = self.sources.get(source.name)
        if known is not None:
            licences = (known.licence,) if known.licence == source.licence else (known.licence, source.licence)
            source = Source(
                source.name,
                "; ".join(licences),
                _joined(known.train, source.train),
                _joined(known.val, source.val),
                (*known.inputs, *source.inputs),
            )
        self.sources[source.name] = source


def open_shards(folders: Sequence[Path], progress: bool = False) -> Shards:
    """The shards of one or more folders, with every file verified."""
    shards = Shards(folders)
    shards.verify(progress)
    return shards


def _verify_file(path: Path, entry: ShardFile, vocab_size: int) -> int:
    """Check a file's hash and ids, in one pass as the corpus may be larger than memory; returns its size."""
    digest, largest = hashlib.sha256(), 0
    with open(path, "rb") as f:
        digest.update(f.read(_HEADER.size))
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
            largest = max(largest, int(np.frombuffer(chunk, _DTYPES[bytes_per_id(vocab_size)]).max()))
    if digest.hexdigest() != entry.sha256:
        raise UserError(
            f"{path}: got SHA-256 {digest.hexdigest()[:12]}..., the manifest says {entry.sha256[:12]}...; the file is "
            f"changed or damaged: copy it again, or {_REMAKE}"
        )
    if largest >= vocab_size:
        raise UserError(f"{path}: got the id {largest}, expected ids below {vocab_size}, the tokenizer's; {_REMAKE}")
    return entry.bytes


def _joined(a: Part, b: Part) -> Part:
    return Part(a.documents + b.documents, a.tokens + b.tokens, a.bytes + b.bytes, a.files + b.files)


def _read_manifest(folder: Path) -> tuple[bytes, dict[str, Any]]:
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}), and without it a folder of shards is incomplete; run "
            "python -m data.shards again, it continues where it stopped"
        ) from None
    content = parse_json(raw, path, "the manifest")
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        if (got := content.get(key)) != expected:
            raise UserError(f"{path}: got {key} {got!r}, this program reads {expected!r}; {_REMAKE}")
    if not isinstance(content.get("tokenizer_hash"), str) or not isinstance(content.get("sources"), list):
        raise UserError(f"{path}: has no tokenizer_hash or no list of sources; copy it again, or {_REMAKE}")
    return raw, content


def _source(folder: Path, entry: Any) -> Source:
    """A source in the manifest; every field is checked, as a manifest can be edited."""
    try:
        parts: dict[str, Part] = {}
        for split in SPLITS:
            given = entry[split]
            files = tuple(
                ShardFile(str(f["file"]), int(f["tokens"]), int(f["bytes"]), str(f["sha256"])) for f in given["files"]
            )
            parts[split] = Part(int(given["documents"]), int(given["tokens"]), int(given["bytes"]), files)
            if sum(f.tokens for f in files) != parts[split].tokens:
                raise ValueError(f"the tokens of the files of {split} do not add up")
            if any(Path(f.file).name != f.file for f in files):
                raise ValueError("a file outside the folder")
        if not (name := str(entry["name"])).isprintable():
            raise ValueError(f"its name is {shown(name)}")
        inputs = tuple(map(str, entry.get("inputs", ())))
        return Source(name, str(entry["licence"]), parts["train"], parts["val"], inputs)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{folder / MANIFEST}: a source's entry is damaged ({error}); copy the file again, or {_REMAKE}"
        ) from None
