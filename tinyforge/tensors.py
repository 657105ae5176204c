"""Tensors in safetensors files, read and written one at a time.

A file has the length of its header (8 bytes, little-endian), the header (JSON: type, shape and place of each tensor),
and the tensors' bytes. Nothing in it is executed.

A tensor W of type I8 holds codes c. Next to it, `W_scale` (F32) has one scale per row: W[..., i] = s[..., 0] c[..., i].
The name and the shape of the scales are those of the compressed-tensors library. Only W is seen by readers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.files import json_value, written_whole

MOST_HEADER = 100 << 20  # bytes, as in the safetensors library

_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1"}
_NAMES = {"f32": "F32", "bf16": "BF16", "f64": "F64", "i8": "I8"}
DTYPES = ("f32", "bf16")
"""For exported models; checkpoints may have f64 and I8 with scales too, and F16 can be read."""
CALLED = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "int8": "int8, with a float32 scale for each row of a matrix",
}
"""The types in the sentence of a model card."""
SCALE = "_scale"
READ_AT_ONCE = 1 << 18  # numbers

Lazy = tuple[tuple[int, ...], Callable[[], np.ndarray]]
"""A tensor's shape, and a function that makes it, so that only one tensor is in memory at a time."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in a file. dtype: its name there. scale: the scales of the codes in a tensor of type I8."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without the scales; for an unknown type one a number."""
        return math.prod(self.shape) * np.dtype(_STORED.get(self.dtype, "u1")).itemsize

    def read(self) -> np.ndarray:
        """The tensor as float32, or as float64 if it is stored so; both are exact. Codes times their scales are rounded
        to float32."""
        values = np.empty(self.shape, np.float64 if self.dtype == "F64" else np.float32)
        self.read_into(values)
        return values

    def read_into(self, out: Any) -> None:
        """Write the values into an array of that shape, or `Quantised`, some rows at a time."""
        if self.dtype not in _STORED:
            raise UserError(f"{self.file}: {self.name} is of type {self.dtype}; supported: {', '.join(_STORED)}")
        *lead, columns = self.shape or (1,)
        rows, step = math.prod(lead), max(1, READ_AT_ONCE // max(1, columns))
        values = out.reshape(rows, columns)
        scales = self._scales().reshape(rows, 1) if self.dtype == "I8" else None
        counts = (min(step, rows - at) * columns for at in range(0, rows, step))
        for at, stored in zip(range(0, rows, step), self._stored(_STORED[self.dtype], counts), strict=True):
            part = values[at : at + step]
            if self.dtype == "BF16":
                stored = (stored.astype(np.uint32) << 16).view(np.float32)
            stored = stored.reshape(len(part), columns)
            if scales is not None:
                stored = np.multiply(stored, scales[at : at + step], dtype=np.float32)
            part[:] = stored

    def read_bytes(self) -> np.ndarray:
        """The stored bytes of a tensor of type U8."""
        if self.dtype != "U8":
            raise UserError(f"{self.file}: {self.name} is of type {self.dtype}, expected U8; get the files again")
        (found,) = self._stored("u1", [self.nbytes])
        return found.reshape(self.shape)

    def _stored(self, kind: str, counts: Iterable[int]) -> Iterator[np.ndarray]:
        """The numbers in the file, so many at a time."""
        try:
            with open(self.file, "rb") as opened:
                opened.seek(self.start)
                for count in counts:
                    found = np.fromfile(opened, kind, count)
                    if found.size != count:
                        raise UserError(
                            f"cannot read {self.file}: it ends within {self.name}; it was whole a moment ago"
                        )
                    yield found
        except OSError as error:
            raise UserError(f"cannot read {self.file}: {error.strerror}; it was there a moment ago") from error

    def _scales(self) -> np.ndarray:
        """The scales of codes, (..., 1). UserError if they are missing, are of another type or shape, or not finite."""
        expected, scale = (*self.shape[:-1], 1), self.scale
        got = f"of {scale.dtype} and shape {scale.shape}" if scale else "missing"
        if scale and (scale.dtype, scale.shape) == ("F32", expected):
            if np.isfinite(scales := scale.read()).all():
                return scales
            got = "not finite"
        raise UserError(
            f"{self.file}: {self.name} is of type I8, and its scales, {self.name}{SCALE}, are {got}; "
            f"expected finite F32 of shape {expected}; get the file again"
        )


def writer_of(read: Callable[[], np.ndarray]) -> Callable[[Any], None] | None:
    """The function that writes what `read` returns into an array, or `Quantised`, piece by piece, where `read` is a
    method of a tensor that has one."""
    return getattr(getattr(read, "__self__", None), "read_into", None)


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of several files by name; each is read on access, and none is kept."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Reads the headers only. Raises UserError as `read_header`, and if two files have the same tensor."""
        self._found: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in read_header(file).items():
                if name in self._found:
                    raise UserError(f"{file} and {self._found[name].file} both have {name}; get them again")
                self._found[name] = tensor

    def __getitem__(self, name: str) -> np.ndarray:
        return self._found[name].read()

    def readers(self) -> dict[str, Callable[[], np.ndarray]]:
        return {name: tensor.read for name, tensor in self._found.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    @property
    def dtype(self) -> str:
        """The type of the largest tensor, a key of CALLED if it can be read."""
        largest = max(self._found.values(), key=lambda tensor: math.prod(tensor.shape))
        return "int8" if largest.dtype == "I8" else largest.dtype.lower()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None if there is no such tensor."""
        return self._found[name].shape if name in self._found else None


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; none is read. Scales are part of the tensor that they belong to. Raises UserError,
    naming the file, if it is damaged."""
    return with_scales(read_entries(file))


def read_entries(file: Path) -> dict[str, Tensor]:
    """`read_header`, with scales as tensors of their own: another file may have their codes."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json_value(opened.read(length))
        header.pop("__metadata__", None)
        found = {name: _tensor(name, file, entry, 8 + length) for name, entry in header.items()}
        for name, tensor in found.items():
            end = tensor.start + tensor.nbytes
            if end > size:
                raise ValueError(f"{name} ends at byte {end} of {size}")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged, or not a safetensors file ({error}); get it again") from error
    return found


def with_scales(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, each with its scales if it has any; these are left out."""
    found = dict(found)
    coded = {name: name + SCALE for name, tensor in found.items() if tensor.dtype == "I8"}
    scales = {name: found.pop(scale) for name, scale in coded.items() if scale in found}
    return found | {name: replace(found[name], scale=scale) for name, scale in scales.items() if name in found}


def _tensor(name: str, file: Path, entry: dict[str, Any], base: int) -> Tensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name} has shape {shape} at {begin} to {end}")
    dtype = entry["dtype"]
    if dtype in _STORED and end - begin != math.prod(shape) * np.dtype(_STORED[dtype]).itemsize:
        raise ValueError(f"{name} has shape {shape} of {dtype} in {end - begin} bytes")
    return Tensor(name, file, dtype, shape, base + begin)


def write(file: Path, tensors: Mapping[str, Lazy], dtype: str) -> None:
    """Write a file atomically, with one tensor in memory at a time.

    dtype: one of DTYPES; bf16 rounds to nearest, ties to even. Raises OSError.
    """
    with written_whole(file) as partial, open(partial, "wb") as out:
        for part in chunks(tensors, dtype):
            out.write(part)


def chunks(tensors: Mapping[str, Lazy], dtype: str | Mapping[str, str]) -> Iterator[bytes]:
    """The bytes of a file: its header, then one tensor after the other. dtype: for all, or by name."""
    dtypes = dict.fromkeys(tensors, dtype) if isinstance(dtype, str) else dtype
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, _) in tensors.items():
        kind = _NAMES[dtypes[name]]
        end = offset + math.prod(shape) * np.dtype(_STORED[kind]).itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for name, (_, make) in tensors.items():
        yield encoded(make(), dtypes[name]).tobytes()


def encoded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x in the file's dtype: C-contiguous, little-endian."""
    if dtype != "bf16":
        return np.ascontiguousarray(x, _STORED[_NAMES[dtype]])
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    # Rounding must not turn a NaN into an infinity: it becomes a quiet NaN with its upper half.
    return np.where(np.isnan(x), (bits >> 16) | np.uint32(0x40), rounded).astype("<u2")
