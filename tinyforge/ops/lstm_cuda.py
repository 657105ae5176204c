"""The LSTM on the GPU: a matrix product and a launch of lstm.cu for each position."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import CupyBackend, blocks, contiguous, new, or_null, scalar
from tinyforge.backends.gemm import gemm
from tinyforge.kernel import Array
from tinyforge.ops import lstm

FILE = "ops/lstm.cu"


def _kept(state: Array, fresh: Array | None) -> Array:
    """h or c before the first position, with 0 in rows where a text begins there."""
    return state if fresh is None else state * (fresh[:, :1] == 0).astype(state.dtype)


@lstm.lstm_fwd.on("cupy")
def lstm_fwd(
    gates: Array, h: Array, c: Array, weight: Array, fresh: Array | None, *, backend: CupyBackend
) -> tuple[Array, Array]:
    batch, length, _ = gates.shape
    width = h.shape[1]
    y, cells = (new((batch, length, width), gates.dtype) for _ in range(2))
    if not y.size:
        return y, cells
    fresh = None if fresh is None else contiguous(fresh)
    state, h = _kept(c, fresh).astype(wide(c.dtype), order="C"), _kept(contiguous(h), fresh)
    carried = new((batch, width), gates.dtype)
    launch, sizes = load(FILE, "lstm_step_fwd", SCALAR=scalar(gates.dtype)), (batch, length, width)
    for t in range(length):
        gemm(carried if t else h, weight, gates[:, t], transpose_b=True, accumulate=True, tf32=backend.tf32)
        numbers = map(np.int32, (t, *sizes))
        launch(blocks(batch * width, 128), (128,), (y, cells, carried, gates, state, or_null(fresh), *numbers))
    return y, cells


@lstm.lstm_bwd.on("cupy")
def lstm_bwd(
    dweight: Array | None,
    dy: Array,
    dc: Array | None,
    gates: Array,
    y: Array,
    cells: Array,
    h: Array,
    c: Array,
    weight: Array,
    fresh: Array | None,
    *,
    backend: CupyBackend,
) -> tuple[Array, Array, Array]:
    (batch, length, width), kind = y.shape, wide(y.dtype)
    dgates, dh = new(gates.shape, y.dtype), backend.zeros((batch, width), kind)
    dcells = backend.zeros((batch, width), kind) if dc is None else dc.astype(kind, order="C")
    if not y.size:
        return dgates, dh.astype(y.dtype), dcells.astype(y.dtype)
    dy, first, fresh = contiguous(dy), contiguous(c), None if fresh is None else contiguous(fresh)
    launch, sizes = load(FILE, "lstm_step_bwd", SCALAR=scalar(y.dtype)), (batch, length, width)
    for t in reversed(range(length)):
        numbers = map(np.int32, (t, *sizes))
        arrays = (dgates, dcells, dy, dh, gates, cells, first, or_null(fresh))
        launch(blocks(batch * width, 128), (128,), (*arrays, *numbers))
        gemm(dgates[:, t], weight, dh, tf32=backend.tf32)
    if dweight is None:
        return dgates, _kept(dh, fresh).astype(y.dtype), _kept(dcells, fresh).astype(y.dtype)
    before = new(y.shape, y.dtype)  # each position's h[t-1]
    before[:, 0], before[:, 1:] = h, y[:, :-1]
    if fresh is not None:
        before *= (fresh == 0).astype(y.dtype)[..., None]
    rows = batch * length
    up, before = dgates.reshape(rows, -1), before.reshape(rows, width)
    gemm(up, before, dweight, transpose_a=True, accumulate=True, tf32=backend.tf32)
    return dgates, _kept(dh, fresh).astype(y.dtype), _kept(dcells, fresh).astype(y.dtype)
