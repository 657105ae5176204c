"""The container that GGUF files are: metadata and tensors by name. What they mean is in `tinyforge.formats.gguf_model`.

    header      "GGUF", version (uint32), number of tensors, number of keys (uint64)
    metadata    key, type (uint32), value; a string is its length (uint64) and UTF-8
    tensors     name, number of dimensions, dimensions (the row's length first), type, offset among the data
    data        each tensor at a multiple of `general.alignment` bytes, 32 where there is no such key

Numbers are little-endian. The gguf package's reader trusts every count in a file, so the header is read here, and each
length is checked against the rest of the file before anything is allocated. The package writes files and packs numbers
into blocks.

Source: the specification in the ggml repository, docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.files import writing, written_whole
from tinyforge.formats import gguf_quants
from tinyforge.formats.weights import Recorded
from tinyforge.quantised_groups import GROUP, quantise_groups
from tinyforge.requirements import needs
from tinyforge.tensors import READ_AT_ONCE, Lazy

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q6_K", "q4_K")
"""Types of stored numbers that are written; every type that the gguf package dequantises is read. q8_0: blocks of a
float16 scale and 32 times 8 bits; q4_0: a scale and 32 times 4 bits; q6_K, q4_K: see `gguf_quants`."""
PLAIN = {"I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}
"""Types without blocks that the package does not read."""

MOST_HEADER = 1 << 28  # bytes of the header; a vocabulary of 256,000 tokens takes about ten million
MOST_KEYS = MOST_TENSORS = 1 << 16
MOST_ITEMS = 1 << 22  # strings in one array
MOST_DIMENSIONS = 4

_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9

DEQUANTISED_AT_ONCE = 1 << 17  # numbers; at twice as many the package takes two to three times the time


def package() -> ModuleType:
    """The gguf package. Raises UserError where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(needs("a GGUF file", "gguf", "gguf")) from error
    return gguf


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor. shape: as in NumPy, the row's length last. dtype: ggml's number for it."""

    file: Path
    shape: tuple[int, ...]
    dtype: int
    start: int
    nbytes: int

    def read(self) -> np.ndarray:
        """The values, dequantised to float32."""
        values = np.empty(self.shape, np.float32)
        self.read_into(values)
        return values

    def read_into(self, out: Any) -> None:
        """Write the values into an array of that shape, or `Quantised`, some rows at a time: the package needs several
        times their memory."""
        gguf = package()
        kind = gguf.GGMLQuantizationType(self.dtype)
        values = out.reshape(-1, self.shape[-1])
        row = self.nbytes // len(values)
        step = max(1, DEQUANTISED_AT_ONCE // self.shape[-1])
        try:
            with open(self.file, "rb") as opened, np.errstate(invalid="ignore"):  # a scale may be infinite
                opened.seek(self.start)
                for at in range(0, len(values), step):
                    part = values[at : at + step]
                    stored = np.fromfile(opened, np.uint8, len(part) * row).reshape(len(part), row)
                    plain = PLAIN.get(kind.name)
                    if plain:
                        part[:] = stored.view(plain)
                    else:  # as one row: the package works on sixteen at a time
                        part[:] = gguf.quants.dequantize(stored.reshape(1, -1), kind).reshape(part.shape)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {self.file}: {error}; it was whole a moment ago") from error


@dataclass(frozen=True)
class Content:
    """A file's content. metadata: numbers, texts, lists of texts, arrays of numbers."""

    metadata: Recorded
    tensors: Mapping[str, Tensor]


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Content:
    """The metadata of a file, and the places of its tensors; no tensor is read.

    Raises UserError, naming the file, if it is damaged, has tensors of a type that the gguf package does not read, or
    is one of several parts.
    """
    try:
        state = path.stat()
        return _read(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error


@lru_cache(maxsize=1)  # weights, tokenizer and template are read one after the other
def _read(path: Path, modified: int, size: int) -> Content:
    gguf = package()
    if size < len(b"GGUF"):
        raise UserError(f"{path} has {size} bytes, a GGUF file at least 24; get it again")
    with open(path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        try:
            metadata = header.metadata()
            tensors = header.tensors()
            alignment = metadata.get("general.alignment", 32)
            if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
                raise ValueError(f"general.alignment is {alignment!r}")
            begin = -(-header.at // alignment) * alignment
        except (ValueError, struct.error) as error:
            raise UserError(f"{path} is damaged, or not a GGUF file ({error}); get it again") from error
    if str(parts := metadata.get("split.count", 0)) not in ("0", "1"):
        raise UserError(f"{path} is one of {parts!s:.40} parts; join them first: llama-gguf-split --merge")
    names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    readable = {"F32", "F16", *PLAIN, *(kind.name for kind in gguf.quants._type_traits)}
    found = {}
    for name, (shape, dtype, offset) in tensors.items():
        if (called := names.get(dtype, f"number {dtype}")) not in readable:
            raise UserError(
                f"{path}: tensor {name} is of type {called}, which the package gguf does not read; "
                "pip install -U gguf, or get the model in another type"
            )
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(dtype)]
        nbytes = math.prod(shape) // block * block_bytes
        if shape[-1] % block:
            raise UserError(
                f"{path}: tensor {name} has rows of {shape[-1]}, {called} has blocks of {block}; get the file again"
            )
        if offset % alignment or begin + offset + nbytes > size:
            raise UserError(
                f"{path}: tensor {name} lies at bytes {begin + offset:,} to {begin + offset + nbytes:,}, "
                f"the file has {size:,}; get it again"
            )
        found[name] = Tensor(path, shape, dtype, begin + offset, nbytes)
    return Content(Recorded(metadata), found)


class _Header:
    """Reads a header from its beginning. Raises ValueError for what is impossible."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.end = data, 0, min(len(data), MOST_HEADER)

    def metadata(self) -> dict[str, Any]:
        if self.take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self.number("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, expected 2 or 3, little-endian")
        self.count = self.limited("tensors", MOST_TENSORS)
        metadata: dict[str, Any] = {}
        for _ in range(self.limited("keys", MOST_KEYS)):
            key = self.string()
            if key in metadata:
                raise ValueError(f"the key {key[:80]} twice")
            metadata[key] = self.value(self.number("<I"))
        return metadata

    def tensors(self) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Shape, type and offset by name."""
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(self.count):
            name, dimensions = self.string(), self.number("<I")
            if name in found or not 1 <= dimensions <= MOST_DIMENSIONS:
                raise ValueError(f"the tensor {name[:80]} twice, or of {dimensions} dimensions")
            shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
            if 0 in shape:
                raise ValueError(f"the tensor {name[:80]} of shape {shape}")
            found[name] = (shape, self.number("<I"), self.number("<Q"))
        return found

    def take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise ValueError(f"{count:,} bytes expected at byte {self.at:,}, {self.end - self.at:,} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def limited(self, what: str, most: int) -> int:
        count = self.number("<Q")
        if count > most:
            raise ValueError(f"{count:,} {what}, at most {most:,} are plausible")
        return count

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """The loop over a vocabulary: nothing in it is called that need not be."""
        found, data, at, unpack = [], self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            length = unpack(data, at)[0] if at + 8 <= self.end else 8
            at += 8
            if length > self.end - at:
                raise ValueError(f"{length:,} bytes expected at byte {at:,}, {max(self.end - at, 0):,} are left")
            found.append(data[at : at + length].decode())
            at += length
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.numbers(kind, 1)[0].item()
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}")
        kind = self.number("<I")
        if kind == _STRING:
            return self.strings(self.limited("strings in one array", MOST_ITEMS))
        if kind not in _NUMBERS:
            raise ValueError(f"an array of type {kind}")
        return self.numbers(kind, self.number("<Q"))

    def numbers(self, kind: int, count: int) -> np.ndarray:
        return np.frombuffer(self.take(count * np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Lazy],
    types: Mapping[str, str],
    others: Callable[[], None] | None = None,
) -> None:
    """Write a file, whole or not at all, with one tensor in memory at a time.

    metadata: whole numbers become uint32 (in lists int32), other numbers float32. types: of TYPES, or any that the
    package writes, by tensor. others(): writes files next to this one, before it appears. Raises UserError where it
    cannot be written.
    """
    gguf = package()
    kinds = {name: gguf.GGMLQuantizationType[types[name].upper()] for name in tensors}
    with writing(path), written_whole(path) as partial:
        writer = gguf.GGUFWriter(partial, architecture)
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for key, value in metadata.items():
            add[type(value)](key, value)
        for name, (shape, _) in tensors.items():
            block, block_bytes = gguf.GGML_QUANT_SIZES[kinds[name]]
            nbytes = math.prod(shape) // block * block_bytes
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kinds[name])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, (_, make) in tensors.items():
                writer.write_tensor_data(_quantised(make(), types[name]))
        finally:
            writer.close()
        if others:
            others()


def _quantised(values: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of a tensor, made some rows at a time."""
    gguf = package()
    rows = np.ascontiguousarray(values, np.float32)
    rows = rows.reshape(-1, rows.shape[-1])

    def make(part: np.ndarray) -> np.ndarray:
        if kind == "q4_0":
            codes, scales = quantise_groups(part)
            halves = scales.astype("<f2").view(np.uint8)
            return np.concatenate([halves.reshape(-1, 2), codes.reshape(-1, GROUP // 2)], 1).reshape(len(part), -1)
        if kind in gguf_quants.TYPES:
            return gguf_quants.quantize(part, kind)
        return gguf.quants.quantize(part, gguf.GGMLQuantizationType[kind.upper()])

    step = max(1, READ_AT_ONCE // rows.shape[-1])
    found = np.concatenate([make(rows[at : at + step]) for at in range(0, len(rows), step)])
    return found.reshape(*values.shape[:-1], -1)
