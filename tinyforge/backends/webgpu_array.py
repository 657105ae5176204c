"""Arrays of the WebGPU backend, and launches of kernels on them.

An array is a view of a buffer, as NumPy's. `launch` binds arrays to the names that a .wgsl file declares.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tinyforge.backends.webgpu_device import DIMENSIONS, KEPT, REAL, Block, Device, pipeline_of

# --- arrays -----------------------------------------------------------------------------------------------------------


class WebArray(NDArrayOperatorsMixin):
    """An array in a buffer: a view with an offset `at` and strides, both in elements, as NumPy's.

    It has the part of NumPy's interface that ops, models and the optimizers use between kernels. Arithmetic runs on the
    device for the types in REAL, and on the host for others.
    """

    __hash__ = object.__hash__

    def __init__(self, block: Block, shape: Sequence[int], dtype: Any, at: int = 0, strides: Any = None) -> None:
        self.block, self.shape, self.dtype, self.at = block, tuple(shape), np.dtype(dtype), at
        self.strides = contiguous_strides(self.shape) if strides is None else tuple(strides)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def flags(self) -> Any:
        own = contiguous_strides(self.shape)
        same = all(a == b or n == 1 for a, b, n in zip(self.strides, own, self.shape, strict=True))
        return SimpleNamespace(c_contiguous=same or not self.size)

    @property
    def T(self) -> WebArray:  # noqa: N802  as NumPy's
        return WebArray(self.block, self.shape[::-1], self.dtype, self.at, self.strides[::-1])

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"WebArray({self.get()!r})"

    # views

    def reshape(self, *shape: Any) -> WebArray:
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
        known = math.prod(n for n in shape if n != -1)
        shape = tuple(self.size // max(known, 1) if n == -1 else int(n) for n in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        if self.flags.c_contiguous:
            return WebArray(self.block, shape, self.dtype, self.at)
        # A view where NumPy makes one: it may be written to.
        strides = reshaped_strides(self.shape, self.strides, shape)
        if strides is not None:
            return WebArray(self.block, shape, self.dtype, self.at, strides)
        return WebArray(self.copy().block, shape, self.dtype)

    def transpose(self, *axes: int) -> WebArray:
        shape, strides = ([x[a] for a in axes] for x in (self.shape, self.strides))
        return WebArray(self.block, shape, self.dtype, self.at, strides)

    def swapaxes(self, one: int, two: int) -> WebArray:
        axes = list(range(self.ndim))
        axes[one], axes[two] = axes[two], axes[one]
        return self.transpose(*axes)

    def __getitem__(self, where: Any) -> WebArray:
        where = where if isinstance(where, tuple) else (where,)
        if any(isinstance(w, np.ndarray | WebArray | list) for w in where):
            return self._like(self.get()[tuple(w.get() if isinstance(w, WebArray) else w for w in where)])
        if Ellipsis in where:
            cut = where.index(Ellipsis)
            gap = self.ndim - sum(w is not None for w in where) + 1
            where = (*where[:cut], *[slice(None)] * gap, *where[cut + 1 :])
        shape, strides, at, axis = [], [], self.at, 0
        for w in where:
            if w is None:
                shape.append(1)
                strides.append(0)
                continue
            n, stride = self.shape[axis], self.strides[axis]
            axis += 1
            if isinstance(w, slice):
                start, stop, step = w.indices(n)
                count = len(range(start, stop, step))
                shape.append(count)
                strides.append(stride * step)
                at += start * stride if count else 0
            else:
                if not -n <= w < n:
                    raise IndexError(f"index {w} is out of range for an axis of {n}")
                at += (int(w) % n) * stride
        if axis > self.ndim:
            raise IndexError(f"too many indices for an array of shape {self.shape}")
        rest = slice(axis, None)
        return WebArray(self.block, (*shape, *self.shape[rest]), self.dtype, at, (*strides, *self.strides[rest]))

    # writing

    def __setitem__(self, where: Any, value: Any) -> None:
        target = self if where is Ellipsis else self[where]
        if target is not self and target.block is not self.block:
            host = self.get()
            host[where.get() if isinstance(where, WebArray) else where] = getattr(value, "get", lambda: value)()
            self.set(host)
            return
        if isinstance(value, WebArray):
            elementwise(target, None, value, "copy")
        elif np.ndim(value) == 0:
            target.fill(value)
        else:
            target.set(np.broadcast_to(np.asarray(value), target.shape))

    def fill(self, value: Any) -> None:
        if self.dtype.name in REAL:
            elementwise(self, None, value, "copy")
        else:
            self.set(np.full(self.shape, value, self.dtype))

    def set(self, host: np.ndarray) -> None:
        """Copy an array of the host's of this shape into it."""
        host = np.ascontiguousarray(host, self.dtype)
        if not self.size:
            return
        at, end = self.at * self.itemsize, self.at * self.itemsize + host.nbytes
        if self.flags.c_contiguous and at % 4 == 0 and (end % 4 == 0 or end == self.block.size):
            self.block.device.write(self.block, at, padded(host))
        elif self.dtype.name in REAL:
            elementwise(self, None, upload(self.block.device, host), "copy")
        else:  # bytes that share a word with others
            whole = WebArray(self.block, (self.block.size // self.itemsize,), self.dtype)
            flat = whole.get()
            strides = [s * self.itemsize for s in self.strides]
            np.lib.stride_tricks.as_strided(flat[self.at :], self.shape, strides)[...] = host
            whole.set(flat)

    # reading

    def _host(self) -> tuple[np.ndarray, np.ndarray]:
        """The buffer's numbers from the first to the last of this array, copied to the host, and the array in them."""
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        at, count = (self.at + low) * self.itemsize, (high - low + 1) * self.itemsize
        flat = np.array(self.block.device.read(self.block, at, count)).view(self.dtype)
        strides = [s * self.itemsize for s in self.strides]
        return flat, np.lib.stride_tricks.as_strided(flat[-low:], self.shape, strides)

    def get(self) -> np.ndarray:
        """A copy on the host; waits for the device."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        return self._host()[1].copy()

    def tolist(self) -> Any:
        return self.get().tolist()

    def item(self) -> Any:
        return self.get().item()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    # computing

    def _like(self, host: Any) -> WebArray:
        return upload(self.block.device, np.asarray(host))

    def copy(self) -> WebArray:
        made = empty(self.block.device, self.shape, self.dtype)
        count = self.nbytes
        if self.flags.c_contiguous and self.at * self.itemsize % 4 == 0 and count % 4 == 0:
            if count:
                self.block.device.copy(self.block, self.at * self.itemsize, made.block, 0, count)
        elif self.dtype.name in REAL:
            elementwise(made, None, self, "copy")
        else:
            made.set(self.get())
        return made

    def astype(self, dtype: Any, copy: bool = True) -> WebArray:
        if not copy and self.dtype == dtype:
            return self
        made = empty(self.block.device, self.shape, dtype)
        elementwise(made, None, self, "copy")
        return made

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        """NumPy's operators: on the device what `elementwise` has, else on the host. Comparisons give int32 for NumPy's
        bool, which no kernel reads; `&`, `|` and `~` combine them."""
        if method != "__call__" or options or not all(isinstance(x, WebArray) for x in out):
            return NotImplemented
        if ufunc is np.negative:
            return self * -1.0
        arrays = [x for x in inputs if isinstance(x, WebArray | np.ndarray)]
        if ufunc.__name__ not in OPERATIONS:
            host = [x.get() if isinstance(x, WebArray) else x for x in inputs]
            found = self._like(LOGICAL.get(ufunc, ufunc)(*host))
            if not out:
                return found
            out[0][...] = found
            return out[0]
        shape = np.broadcast_shapes(*map(np.shape, inputs))
        kind = np.result_type(*(x.dtype for x in arrays))
        made = out[0] if out else empty(self.block.device, shape, kind)
        left, right = (self._like(x.astype(made.dtype)) if isinstance(x, np.ndarray) else x for x in inputs)
        if not isinstance(left, WebArray):
            made.fill(left)
            left = made
        elementwise(made, left, right, ufunc.__name__)
        return made

    def _reduced(self, name: str, *args: Any, **named: Any) -> Any:
        found = getattr(self.get(), name)(*args, **named)
        return self._like(found) if isinstance(found, np.ndarray) else found

    def __getattr__(self, name: str) -> Any:
        # Reductions and comparisons are computed on the host: kernels have their own.
        if name in ("sum", "mean", "max", "min", "any", "all", "argmax", "clip"):
            return partial(self._reduced, name)
        raise AttributeError(f"an array of the webgpu backend has no {name!r}; use backend.to_numpy(x)")


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def reshaped_strides(shape: Sequence[int], strides: Sequence[int], to: Sequence[int]) -> list[int] | None:
    """The strides of a view of another shape, of as many elements, one or more; None where only a copy has it."""
    old = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
    found: list[int] = []
    while old:
        count, taken, given, end = old[0][0], 1, to[len(found)], len(found) + 1
        while count != given:  # as few axes as have the same size before and after
            if given < count:
                given *= to[end]
                end += 1
            else:
                count *= old[taken][0]
                taken += 1
        if any(a[1] != b[0] * b[1] for a, b in zip(old[: taken - 1], old[1:taken], strict=True)):
            return None
        step = old[taken - 1][1]
        found += [step * own for own in contiguous_strides(to[len(found) : end])]
        old = old[taken:]
    return found + [1] * (len(to) - len(found))


def empty(device: Device, shape: Sequence[int], dtype: Any) -> WebArray:
    """An uninitialised array."""
    dtype = np.dtype(dtype)
    return WebArray(Block(device, math.prod(shape) * dtype.itemsize), shape, dtype)


def new(like: Any, shape: Sequence[int]) -> Any:
    """An uninitialised array on the device of `like`, of its dtype."""
    return empty(like.block.device, shape, like.dtype)


def upload(device: Device, host: np.ndarray) -> WebArray:
    host = np.asarray(host)
    if host.dtype == bool:
        host = host.astype(np.int32)
    made = empty(device, host.shape, host.dtype)
    if host.nbytes:
        data = padded(host)
        device.write(made.block, 0, data)
        made.block.host = data.copy() if data.size <= KEPT else None
    return made


def padded(host: np.ndarray) -> np.ndarray:
    """Its bytes, with zeros up to a multiple of the four that WebGPU writes."""
    data = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    return np.concatenate([data, np.zeros(-data.size % 4, np.uint8)]) if data.size % 4 else data


def upload_like(like: Any, host: np.ndarray) -> Any:
    """An array of the host's on the device of `like`."""
    return upload(like.block.device, host)


def host_of(x: Any) -> np.ndarray:
    """A copy on the host; waits for the device unless the array was uploaded and is small."""
    found: np.ndarray = x.get()
    return found


def contiguous(x: Any) -> Any:
    """x itself, or a C-contiguous copy."""
    return x if x.flags.c_contiguous else x.copy()


OPERATIONS = ("copy", "add", "subtract", "multiply", "divide")
LOGICAL: dict[Any, Any] = {np.bitwise_and: np.logical_and, np.bitwise_or: np.logical_or, np.invert: np.logical_not}
"""The operators `&`, `|` and `~` for masks of int32."""


def elementwise(out: WebArray, a: WebArray | None, b: WebArray | float, name: str) -> None:
    """out = a (operation) b, or out = b for "copy", with NumPy's broadcasting; `a` may be `out`."""
    if not out.size:
        return
    kinds = [REAL.get(x.dtype.name) for x in (out, a, b) if isinstance(x, WebArray)]
    device = out.block.device
    if None in kinds or ("f64" in kinds and "shader-f64" not in device.features):
        host = [x.get() if isinstance(x, WebArray) else x for x in (a, b)]
        result: Any = host[1] if name == "copy" else getattr(np, name)(*host)
        out.set(np.broadcast_to(result, out.shape))
        return
    if isinstance(a, WebArray) and a is not out and a.block is out.block:
        a = a.copy()
    if isinstance(b, WebArray) and b.block is out.block:
        b = b.copy()
    operands = [out, a if isinstance(a, WebArray) else out, b if isinstance(b, WebArray) else out]
    steps = [broadcast_strides(x, out.shape) for x in operands]
    dims = merged(out.shape, steps)
    if len(dims) > DIMENSIONS:
        raise ValueError(f"elementwise: {len(dims)} dimensions after merging, at most {DIMENSIONS}")
    dims += [(1, 0, 0, 0)] * (DIMENSIONS - len(dims))
    at = [x.at for x in operands]
    scalar = 0.0 if isinstance(b, WebArray) else float(b)
    types = {"Y": kinds[0], "A": REAL[operands[1].dtype.name], "B": REAL[operands[2].dtype.name]}
    integers = [out.size, *at, *(n for dim in dims for n in dim)]
    arrays = {"y": whole(out), "a": whole(a) if a is not out and isinstance(a, WebArray) else None}
    arrays["b"] = whole(b) if isinstance(b, WebArray) else None
    launch(
        "backends/elementwise.wgsl",
        "apply",
        groups(out.size),
        arrays,
        (scalar, *integers),
        {"OPERATION": OPERATIONS.index(name), "IN_PLACE": a is out, "SCALAR": not isinstance(b, WebArray)},
        aliases={"real": "f64" if "f64" in kinds else "f32", **{k: str(v) for k, v in types.items()}},
    )


def whole(x: Any) -> WebArray:
    """The buffer that x is a view of, as a flat array: a kernel that gets strides adds x's offset itself."""
    return WebArray(x.block, (x.block.size // x.itemsize,), x.dtype)


def broadcast_strides(x: WebArray, shape: Sequence[int]) -> list[int]:
    lead = len(shape) - x.ndim
    return [0] * lead + [0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]


def merged(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """(size, strides of each operand) by dimension, the last first, with neighbours merged where all strides allow."""
    dims: list[list[int]] = []
    for axis in reversed(range(len(shape))):
        n, strides = shape[axis], [s[axis] for s in steps]
        if n == 1:
            continue
        if dims and all(s == dims[-1][0] * d for s, d in zip(strides, dims[-1][1:], strict=True)):
            dims[-1][0] *= n
        else:
            dims.append([n, *strides])
    return [tuple(d) for d in dims]


# --- launches ---------------------------------------------------------------------------------------------------------


def launch(
    file: str,
    entry: str,
    grid: Sequence[int],
    arrays: Mapping[str, Any],
    numbers: Sequence[Any] = (),
    flags: Mapping[str, float] = MappingProxyType({}),
    *,
    constants: Mapping[str, int] = MappingProxyType({}),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Launch `entry` of a .wgsl file.

    arrays: by the names that the file declares; the first one's dtype is `real` there, unless `aliases` say another. A
    None stands for an array that one of the `flags`, the file's `override` constants, makes the kernel leave alone.
    numbers: the fields of its `struct Sizes`. constants: written before its text, for sizes of arrays in registers.

    WebGPU allows no array to be written and read under two names. Where an input shares its buffer with an output, a
    copy of it is read; where an array does not begin at the device's alignment, a copy is used and written back.
    """
    first = next(array for array in arrays.values() if array is not None)
    device = first.block.device
    if 0 in grid:
        return
    given = {name: nothing(device, number) if x is None else x for number, (name, x) in enumerate(arrays.items())}
    types = {"real": REAL[first.dtype.name], **aliases}
    macros = tuple(f"alias {name} = {kind};" for name, kind in types.items())
    macros += tuple(f"const {name} = {value}u;" for name, value in constants.items())
    pipeline = pipeline_of(device, file, entry, tuple(given), macros, tuple(sorted(flags.items())))
    written = [array.block for array, writes in zip(given.values(), pipeline.writes, strict=True) if writes]
    for block in written:
        block.host = None
    bound: list[tuple[Block, int, int]] = []
    back: list[tuple[WebArray, WebArray]] = []
    for (name, array), writes in zip(given.items(), pipeline.writes, strict=True):
        if not array.flags.c_contiguous:
            raise ValueError(f"{entry}: {name} is a strided view; pass a contiguous array")
        shared = written.count(array.block) > (1 if writes else 0)
        if shared or array.at * array.dtype.itemsize % device.alignment:
            copied = array.copy()
            if writes:
                back.append((array, copied))
            array = copied
        bound.append((array.block, array.at * array.dtype.itemsize if array.size else 0, array.nbytes))
    device.launch(pipeline, bound, pipeline.pack(numbers), (*grid, 1, 1)[:3])
    for array, copied in back:
        array[...] = copied


def groups(threads: int, per_group: int = 256) -> tuple[int, int]:
    """The grid for so many threads, in two dimensions: a dimension ends at 65,535. See `index` in the .wgsl files."""
    count = -(-threads // per_group)
    across = min(count, 32768)
    return across, -(-count // across) if count else 0


@lru_cache(64)
def nothing(device: Device, number: int) -> WebArray:
    """An array to bind where there is none: one for each place, since two places may not write to the same."""
    return upload(device, np.zeros(2, np.float32))


# --- kernels without WGSL ---------------------------------------------------------------------------------------------


class HostModule:
    """NumPy's functions for arrays of this backend: what models and objectives call between kernels, on the host."""

    ascontiguousarray = staticmethod(contiguous)

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        return on_host(found, self._device) if callable(found) else found


def on_host(body: Callable[..., Any], device: Device | None = None) -> Callable[..., Any]:
    """The NumPy body of a kernel on copies of its arrays; what it writes is copied back. device: for a function that
    may be given no array of this backend."""

    def run(*args: Any, **named: Any) -> Any:
        taken: list[tuple[WebArray, np.ndarray, np.ndarray]] = []

        def down(x: Any) -> Any:
            if isinstance(x, WebArray):
                host = x.get()
                taken.append((x, host, host.copy()))
                return host
            return type(x)(map(down, x)) if type(x) in (tuple, list) else x

        given, more = [down(x) for x in args], {name: down(x) for name, x in named.items()}
        at = device or taken[0][0].block.device

        def up(x: Any) -> Any:
            if isinstance(x, np.ndarray):
                same = next((array for array, host, _ in taken if host is x), None)
                return upload(at, x) if same is None else same
            return type(x)(map(up, x)) if type(x) in (tuple, list) else x

        result = body(*given, **more)
        for array, host, before in taken:
            if host.tobytes() != before.tobytes():
                array.set(host)
        return up(result)

    return run


_told: set[str] = set()


def told_on_host(body: Callable[..., Any]) -> Callable[..., Any]:
    """`on_host`, which says once for each kernel that it runs there."""
    run = on_host(body)

    def tell(*args: Any, **named: Any) -> Any:
        if body.__name__ not in _told:
            _told.add(body.__name__)
            print(f"webgpu: {body.__name__} has no WGSL yet: it runs on the host", file=sys.stderr)
        return run(*args, **named)

    return tell
