"""Launches selective_scan.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import add_columns, blocks, contiguous, new, or_null, scalar, shared_limit
from tinyforge.errors import UserError
from tinyforge.kernel import Array, pointer
from tinyforge.ops import selective_scan
from tinyforge.ops.causal_conv_cuda import sums_or_scratch, with_pitch
from tinyforge.ops.selective_scan import CHANNELS, tiles
from tinyforge.ops.selective_scan_plan import FILE, QUARTERS, THREADS, backward_bytes, forward_bytes, states_a_lane


def _with_pitches(*arrays: Array) -> tuple[list[Array], list[Any]]:
    """The arrays in a layout that kernels can read, and the pitch of each."""
    found = [with_pitch(a) for a in arrays]
    return [a for a, _ in found], [np.int32(pitch) for _, pitch in found]


def _macros(u: Array, states: int, pitches: list[Any], *arrays: Array) -> dict[str, Any]:
    """The kernels' macros. VEC: 4 if four channels, and a lane's states, can be read at once."""
    per = states_a_lane(states)
    fits = u.shape[2] % 4 == 0 and states == QUARTERS * per and not any(pitch % 4 for pitch in pitches)
    aligned = all(pointer(a) % min(16, 4 * a.itemsize) == 0 for a in arrays)
    return {"SCALAR": scalar(u.dtype), "PER": per, "VEC": 4 if fits and aligned else 1}


def _within_limit(shared: int, what: str, states: int, kind: np.dtype) -> int:
    if shared > (room := shared_limit()):
        raise UserError(
            f"SelectiveScan: {what} with states of {states} in {kind} takes {shared} bytes of shared memory, the "
            f"GPU has {room}; use a smaller state, or another precision"
        )
    return shared


@selective_scan.selective_scan_fwd.on("cupy")
def selective_scan_fwd(
    state: Array | None,
    u: Array,
    delta: Array,
    b: Array,
    c: Array,
    z: Array,
    a_log: Array,
    skip: Array,
    bias: Array,
    keep: bool,
) -> tuple[Array, Array | None]:
    (batch, length, channels), states = u.shape, a_log.shape[1]
    inputs, pitches = _with_pitches(u, delta, b, c, z)
    y = new(u.shape, u.dtype)
    kept = new((batch, tiles(length), channels, states), wide(u.dtype)) if keep else None
    if y.size:
        macros = _macros(u, states, pitches, *inputs, y, *(() if state is None else (state,)))
        kind = wide(u.dtype)
        shared = _within_limit(forward_bytes(states, kind.itemsize), "forward", states, kind)
        launch = load(FILE, "selective_scan_fwd", shared, **macros)
        sizes = map(np.int32, (length, channels, states))
        grid, arrays = (-(-channels // CHANNELS), batch), (y, or_null(kept), or_null(state), *inputs, a_log, skip, bias)
        launch(grid, (THREADS,), (*arrays, *sizes, *pitches), shared_mem=shared)
    return y, kept


@selective_scan.selective_scan_bwd.on("cupy")
def selective_scan_bwd(
    dz: Array | None,
    da_log: Array | None,
    dskip: Array | None,
    dbias: Array | None,
    dy: Array,
    u: Array,
    delta: Array,
    b: Array,
    c: Array,
    z: Array,
    a_log: Array,
    skip: Array,
    bias: Array,
    kept: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    (batch, length, channels), states = u.shape, a_log.shape[1]
    du, ddelta, db, dc = (new(a.shape, u.dtype) for a in (u, u, b, c))
    out = new(z.shape, u.dtype) if dz is None else dz
    if not du.size:
        return du, ddelta, db, dc, out
    inputs, pitches = _with_pitches(u, delta, b, c, z)
    written, out_pitch = with_pitch(out)
    dy, kind = contiguous(dy), kept.dtype
    shared = _within_limit(backward_bytes(states, kind.itemsize), "backward", states, kind)
    columns = -(-channels // CHANNELS)
    parts = new((2, columns, *b.shape), kind)
    da_parts, vector_parts = new((batch, channels * states), kind), new((batch, 2 * channels), kind)
    macros = _macros(u, states, [*pitches, out_pitch], *inputs, dy, written)
    launch = load(FILE, "selective_scan_bwd", shared, **macros)
    sizes = map(np.int32, (length, channels, states))
    outputs = (du, ddelta, written, parts, da_parts, vector_parts)
    arrays = (*outputs, dy, *inputs, a_log, skip, bias, kept)
    launch((columns, batch), (THREADS,), (*arrays, *sizes, *pitches, np.int32(out_pitch)), shared_mem=shared)
    load(FILE, "selective_scan_sum", **macros)(
        blocks(2 * b.size, THREADS), (THREADS,), (db, dc, parts, np.int64(b.size), np.int32(columns))
    )
    add_columns(sums_or_scratch(da_log, a_log), None, da_parts)
    add_columns(sums_or_scratch(dskip, skip), sums_or_scratch(dbias, bias), vector_parts)
    if written is not out:
        out[...] = written
    return du, ddelta, db, dc, out
