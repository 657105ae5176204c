"""Matrix products on the GPU: by a kernel of our own where a measurement says that it is faster, else by cuBLAS.

Ours (ops/gemm_hopper.cu) takes bf16 on a Hopper. Which of its variants to use for which product, or that cuBLAS is
faster, was measured once for each shape by bench/gemm.py, and lies in gemm_table.json by the name of the GPU. A product
that is not in the table goes to cuBLAS: another GPU, another shape, another precision. So the choice depends on the
shape alone, and a run gives the same bits every time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import cupy
import numpy as np

from tinyforge.backends import cublas
from tinyforge.backends.compile import constant, load, variants
from tinyforge.backends.cublas import FLOAT32, leading
from tinyforge.backends.cupy_backend import blocks, new, processors, scalar, vector
from tinyforge.backends.tensor_map import distances, encoded
from tinyforge.kernel import Array

FILE, PLAIN, TABLE = "ops/gemm_hopper.cu", "ops/gemm.cu", "gemm_table.json"
DEPTH, THREADS, LINE, BARRIERS = (constant(FILE, name) for name in ("DEPTH", "THREADS", "LINE", "BARRIERS"))
SIDE = constant(PLAIN, "SIDE")
MOST_BLOCKS = 1024  # of the plain kernel

# Whether a product transposes its factors, for those that a model and its gradient have: x W^T, dy W, dy^T x.
PRODUCTS = {(False, True): "FORWARD", (False, False): "INPUT", (True, False): "WEIGHT"}

on_choice: Callable[[str, int, int, int, Variant | None], None] | None = None
"""Called with every product of bf16: (product, m, n, k) and the variant, None being cuBLAS."""


def announce(say: Callable[[str], object]) -> None:
    """Say from now on which kernel makes each product of bf16, once for each shape."""
    seen = set()

    def once(product: str, m: int, n: int, k: int, variant: Variant | None) -> None:
        if (product, m, n, k) not in seen:
            seen.add((product, m, n, k))
            say(f"{product} {m} x {n} over {k}: {variant or 'cuBLAS'}")

    global on_choice
    on_choice = once


@dataclass(frozen=True)
class Variant:
    """A way to compute a product with ops/gemm_hopper.cu: macros of the kernel, and arguments of its launch.

    rows, columns: of a tile. stages: of the ring of buffers. pingpong: each of the two multiplying warpgroups has
    tiles of its own. cluster: blocks that share their copies. band: rows of tiles that blocks work on at a time.
    splits: parts of the sum, of a WEIGHT product alone.
    """

    rows: int
    columns: int
    stages: int
    pingpong: int
    cluster: int
    band: int = 8
    splits: int = 1

    def __str__(self) -> str:
        schedule = "ping-pong" if self.pingpong else "cooperative"
        return (f"{self.rows} x {self.columns} {schedule}, {self.stages} stages, cluster {self.cluster}, "
                f"band {self.band}, splits {self.splits}")  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.rows + self.columns) * LINE + BARRIERS


def compiled() -> list[Variant]:
    """The variants that the head of the kernel's file lists, each once, with the default band and splits."""
    names = ("ROWS", "COLUMNS", "STAGES", "PINGPONG", "CLUSTER")
    return list(dict.fromkeys(Variant(*(int(macros[n]) for n in names)) for macros in variants(FILE)))


def gemm(a: Array, b: Array, out: Array | None = None, *, transpose_a: bool = False, transpose_b: bool = False,
         accumulate: bool = False, tf32: bool = False, scale: float = 1.0) -> Array:  # fmt: skip
    """As cublas.gemm: out = scale a b, or out += scale a b."""
    product = PRODUCTS.get((transpose_a, transpose_b)) if scale == 1.0 and a.dtype.name == "bfloat16" else None
    if product is not None:
        (m, k), n = a.shape[::-1] if transpose_a else a.shape, b.shape[0 if transpose_b else 1]
        variant = _table().get((product, m, n, k))
        made = None if variant is None else hopper(variant, a, b, out, product, accumulate=accumulate)
        if on_choice is not None:
            on_choice(product, m, n, k, None if made is None else variant)
        if made is not None:
            return made
    return cublas.gemm(a, b, out, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate, tf32=tf32,
                       scale=scale)  # fmt: skip


def hopper(
    variant: Variant, a: Array, b: Array, out: Array | None, product: str, *, accumulate: bool = False
) -> Array | None:
    """out = a b^T, the factors lying as `product` has them, or None, with nothing done, where the kernel cannot take
    them: it wants bf16, rows that begin at 16 bytes, columns by eights, and adds in float32 alone."""
    if out is None:
        if product == "WEIGHT":  # it would be in bf16
            return None
        out = new((len(a), b.shape[product == "INPUT"]), a.dtype)
    plan = _plan(variant, product, accumulate, *((x.dtype, x.shape, x.strides) for x in (a, b, out)))
    places = a.data.ptr, b.data.ptr, out.data.ptr
    if plan is None or any(place % 16 for place in places):
        return None
    maps = (encoded(place, *known) for place, known in zip(places, plan.maps, strict=False))
    parts = out if plan.splits == 1 else new((plan.splits, *out.shape), FLOAT32)
    plan.kernel(plan.grid, (THREADS,), (parts, *maps, *plan.numbers), shared_mem=variant.shared_bytes)
    if parts is not out:
        _add_parts(out, parts, accumulate)
    return out


@dataclass(frozen=True)
class Plan:
    """What a launch needs and arrays of the same shapes and strides share; a look-up is quicker than all that."""

    kernel: Any
    grid: tuple[int]
    numbers: tuple[np.int32, ...]
    maps: tuple[tuple[Any, ...], ...]  # of a and b: what `encoded` takes behind the address
    splits: int


Described = tuple[np.dtype, tuple[int, ...], tuple[int, ...]]  # dtype, shape, strides


@lru_cache(1024)
def _plan(variant: Variant, product: str, accumulate: bool, *arrays: Described) -> Plan | None:
    """None where the kernel cannot take them."""
    (kind, a, a_strides), (b_kind, b, b_strides), (result, out, out_strides) = arrays
    across_a, across_b = product == "WEIGHT", product != "FORWARD"
    (m, k), n = a[::-1] if across_a else a, b[1 if across_b else 0]
    if out != (m, n) or b != ((k, n) if across_b else (n, k)):
        raise ValueError(f"gemm: {product} of {a} and {b} into {out}")
    rows = [distances((1, *shape), (0, *steps), 2) for shape, steps in ((a, a_strides), (b, b_strides))]
    stride = out_strides[0] // result.itemsize if m > 1 else n
    fits = (
        kind.name == b_kind.name == "bfloat16" and result == (FLOAT32 if across_a else kind) and min(m, n, k) > 0
        and n % 8 == 0 and stride >= n and stride % 8 == 0 and out_strides[1] == result.itemsize
        and (across_a or not accumulate) and None not in rows
    )  # fmt: skip
    if not fits:
        return None
    splits = min(variant.splits, -(-k // DEPTH)) if across_a else 1
    boxes = (DEPTH if across_a else variant.rows), (DEPTH if across_b else variant.columns) // variant.cluster
    units = -(-m // (variant.rows * variant.cluster)) * -(-n // variant.columns) * splits
    kernel = load(
        FILE, "gemm_hopper", variant.shared_bytes, arch="sm_90a", SCALAR="bf16", PRODUCT=product, ROWS=variant.rows,
        COLUMNS=variant.columns, STAGES=variant.stages, PINGPONG=variant.pingpong, CLUSTER=variant.cluster,
    )  # fmt: skip
    numbers = (m, n, k, stride if splits == 1 else n, variant.band, splits, accumulate and splits == 1)
    return Plan(
        kernel, (variant.cluster * min(processors() // variant.cluster, units),), tuple(map(np.int32, numbers)),
        tuple(((1, *shape), row, (1, lines, DEPTH)) for shape, row, lines in zip((a, b), rows, boxes, strict=True)),
        splits,
    )  # fmt: skip


def _add_parts(out: Array, parts: Array, accumulate: bool) -> None:
    """out = the sum over the first axis of parts, or out += it, in order."""
    splits, rows, columns = parts.shape
    vec = vector(columns, parts, out) if leading(out) % 4 == 0 else 1
    launch = load(PLAIN, "gemm_sum", SCALAR=scalar(out.dtype), RESULT=scalar(out.dtype), VEC=vec)
    sizes = map(np.uint32, (rows * columns // vec, columns // vec, leading(out) // vec))
    launch(blocks(rows * columns // vec), (256,), (out, parts, *sizes, np.int32(splits), np.int32(accumulate)))


def gemm_naive(
    a: Array, b: Array, out: Array, product: str, *, accumulate: bool = False, splits: int = 1, band: int = 8
) -> Array:
    """What `hopper` computes, one number a thread, for any precision, shape and distance between rows."""
    across_a, across_b = product == "WEIGHT", product != "FORWARD"
    (rows, depth), columns = a.shape[::-1] if across_a else a.shape, b.shape[1 if across_b else 0]
    splits = min(splits, -(-depth // DEPTH))
    sums = np.dtype(np.float64) if out.dtype == np.float64 else FLOAT32
    parts = new((splits, rows, columns) if splits > 1 else (1,), sums)
    macros: dict[str, int | str] = {"SCALAR": scalar(a.dtype), "RESULT": scalar(out.dtype), "VEC": 1}
    ways = [(1, leading(x)) if across else (leading(x), 1) for x, across in ((a, across_a), (b, across_b))]
    sizes = map(np.int32, (rows, columns, depth, leading(out), band, splits, DEPTH, accumulate))
    tiles = -(-rows // SIDE) * -(-columns // SIDE) * splits
    launch = load(PLAIN, "gemm_naive", **macros)
    launch((min(tiles, MOST_BLOCKS),), (SIDE * SIDE,), (out, parts, a, b, *ways[0], *ways[1], *sizes))
    if splits > 1:
        launch = load(PLAIN, "gemm_sum", **macros)
        counts = map(np.uint32, (rows * columns, columns, leading(out)))
        launch(blocks(rows * columns), (256,), (out, parts, *counts, np.int32(splits), np.int32(accumulate)))
    return out


@cache
def _table() -> dict[tuple[str, int, int, int], Variant]:
    """What was measured on a GPU of this name."""
    device = cupy.cuda.runtime.getDevice()
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    return parsed(json.loads(files("tinyforge.backends").joinpath(TABLE).read_text("utf-8")).get(name, {}))


def parsed(rows: dict[str, list[int]]) -> dict[tuple[str, int, int, int], Variant]:
    """A table for lookup, from {"FORWARD m n k": the numbers of a Variant}."""
    found = {}
    for name, numbers in rows.items():
        product, m, n, k = name.split()
        found[product, int(m), int(n), int(k)] = Variant(*numbers)
    return found
