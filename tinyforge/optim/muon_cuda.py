"""Launches muon.cu, and the products between its kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tinyforge.backends.compile import constant, load
from tinyforge.backends.cublas import gemm
from tinyforge.backends.cublaslt import gemm_batched
from tinyforge.backends.cupy_backend import FLOAT64, CupyBackend, blocks, new, scalar
from tinyforge.kernel import Array, pointer
from tinyforge.optim import muon
from tinyforge.optim.adamw_cuda import on_device

FILE = "optim/muon.cu"
PARTS = constant(FILE, "PARTS")


def _vectors(size: int) -> tuple[int, np.int32]:
    """The macro VEC, and the number of vectors in a matrix of `size` elements. A parameter begins at a multiple of 32
    elements, and its matrices at multiples of `size` after that."""
    vec = 4 if size % 4 == 0 else 1
    return vec, np.int32(size // vec)


@muon.muon_momentum.on("cupy")
def muon_momentum(
    m: Array,
    grads: Array,
    starts: Array,
    rows: int,
    columns: int,
    grad_scale: Any,
    rates: Array,
    *,
    backend: CupyBackend,
) -> tuple[Array, Array]:
    vec, vectors = _vectors(rows * columns)
    parts = min(PARTS, blocks(int(vectors))[0])
    x, squares = new((len(starts), rows, columns), backend.dtype), new((len(starts), parts), FLOAT64)
    launch = load(FILE, "muon_momentum", SCALAR=scalar(x.dtype), VEC=vec)
    arrays = (x, squares, m, grads, starts, on_device(grad_scale), rates)
    launch((parts, len(starts)), (256,), (*arrays, vectors))
    return x, squares


@muon.newton_schulz.on("cupy")
def newton_schulz(x: Array, squares: Array, rounds: muon.Rounds, *, backend: CupyBackend) -> Array:
    count, rows, columns = x.shape
    vec, vectors = _vectors(rows * columns)
    launch = load(FILE, "muon_scale", SCALAR=scalar(x.dtype), VEC=vec)
    launch(
        (*blocks(int(vectors)), count), (256,), (x, squares, np.int32(squares.shape[1]), vectors, np.float64(muon.EPS))
    )
    wide, side = rows <= columns, min(rows, columns)
    gram, factor, other = new((count, side, side), x.dtype), new((count, side, side), x.dtype), new(x.shape, x.dtype)
    product = partial(_product, tf32=backend.tf32)
    for a, b, c in rounds:
        product(x, x, gram, transpose_a=not wide, transpose_b=wide)
        product(gram, gram, factor, scale=c, add=gram, keep=b)
        product(*((factor, x) if wide else (x, factor)), other, add=x, keep=a)
        x, other = other, x
    return x


def _product(
    a: Array,
    b: Array,
    out: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale: float = 1.0,
    add: Array | None = None,
    keep: float = 1.0,
    tf32: bool = False,
) -> None:
    """As `gemm_batched`; one by one if that has no algorithm."""
    options: dict[str, Any] = {"transpose_a": transpose_a, "transpose_b": transpose_b, "scale": scale}
    options |= {"keep": keep, "tf32": tf32}
    if gemm_batched(a, b, out, add=add, **options):
        return
    if add is not None:
        out[...] = add
    for one, other, result in zip(a, b, out, strict=True):
        gemm(one, other, result, accumulate=add is not None, **options)


@muon.normuon_.on("cupy")
def normuon_(v: Array, x: Array, starts: Array, grad_scale: Any, beta: float) -> Array:
    count, rows, columns = x.shape
    kind, clip = v.dtype.type, on_device(grad_scale)
    factors, squares = new((count, rows), v.dtype), new((count, rows), FLOAT64)
    launch = load(FILE, "normuon_rows", SCALAR=scalar(x.dtype), VEC=1)
    numbers = (np.int32(columns), kind(beta), kind(muon.EPS))
    launch((rows, count), (256,), (factors, squares, v, x, starts, clip, *numbers))
    launch = load(FILE, "normuon_factors", SCALAR=scalar(x.dtype), VEC=1)
    numbers = (np.int32(rows), np.float64(muon.RMS * (rows * columns) ** 0.5), np.float64(muon.EPS))
    launch((count,), (256,), (factors, squares, clip, *numbers))
    return factors


@muon.muon_.on("cupy")
def muon_(
    values: Array,
    masters: Array,
    x: Array,
    starts: Array,
    rates: Array,
    grad_scale: Any,
    scale: float,
    factors: Array | None,
    careful: bool,
) -> None:
    vec, vectors = _vectors(x[0].size)
    rounded = np.uintp(0) if pointer(values) == pointer(masters) else values
    options = {name: 1 for name, on in (("NORMUON", factors is not None), ("CAUTIOUS", careful)) if on}
    launch = load(FILE, "muon_update", SCALAR=scalar(x.dtype), VEC=vec, **options)
    by_row = np.uintp(0) if factors is None else factors
    arrays = (rounded, masters, x, starts, rates, on_device(grad_scale), by_row)
    numbers = (vectors, np.int32(x.shape[2]), masters.dtype.type(scale))
    launch((*blocks(int(vectors)), len(x)), (256,), (*arrays, *numbers))
