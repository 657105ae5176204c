"""The kernels of compiled.py, for numba.

Only a first use on a machine imports this module; see backends/machine_code.py. All memory is the caller's: kernels
take contiguous arrays, allocate nothing and raise nothing. A row's, and a sequence's, bits do not depend on the others;
only attention's pass for scores in the thousands (LSE_ERROR) is made for a whole batch or not at all.

A linear map goes through the tokens in blocks: backward reads a block of the gradient once, for both of its products,
and SwiGLU or RoPE find a block of the product in the core's cache.

Attention works on panels of queries of one head: a vector register has one number of many queries, so that what is
done for each query (mask, maximum, sum) needs no shuffles, and all products are those of `tile`: numbers of the left
factor, each times a vector of queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from tinyforge.backends.instructions import FAST, Ints, Reals, Words, at, exp_of, njit, tiles_of
from tinyforge.backends.machine_code import PANEL_BYTES, has_wide_vectors
from tinyforge.ops.attention import HIDDEN

BLOCK = 128
"""Tokens, and terms of a sum, of a block of a product."""
LANES = 256
"""Tokens whose softmax over the vocabulary is computed together."""
inner = njit(fastmath=FAST, error_model="numpy")


def kernels_of(real: types.Type) -> list[Callable[..., None]]:
    return [*rows_of(real), *maps_of(real), *attention_of(real)]


def products_of(real: types.Type) -> Any:
    """pack and multiply: a right factor is copied into panels of its columns, in which a tile reads a row after the
    other; a left factor is read where it is."""
    zero, panel = np.float64(0) if real is types.float64 else np.float32(0), PANEL_BYTES * 8 // real.bitwidth
    most = 8 if has_wide_vectors() else 6  # outputs of a tile
    by_rows, one_row = tiles_of(most, real, False), tiles_of(1, real, False)
    by_columns, one_column = tiles_of(most, real, True), tiles_of(1, real, True)

    @inner
    def pack(b: Any, stride: Any, turned: Any, n: Any, k: Any, room: Any) -> None:
        """b: (k, n), or if turned (n, k). Columns beyond n are 0."""
        for start in range(0, n, panel):
            wide, to = min(panel, n - start), at(room, start * k)
            for j in range(0, k, BLOCK):
                end = min(k, j + BLOCK)
                if turned:
                    for i in range(wide):
                        column = at(b, (start + i) * stride)
                        for r in range(j, end):
                            to[r * panel + i] = column[r]
                else:
                    for r in range(j, end):
                        row, here = at(b, r * stride + start), at(to, r * panel)
                        for i in range(wide):
                            here[i] = row[i]
                for i in range(wide, panel):
                    for r in range(j, end):
                        to[r * panel + i] = zero

    @inner
    def copy(x: Any, x_stride: Any, y: Any, y_stride: Any, rows: Any, width: Any) -> None:
        for r in range(rows):
            here, to = at(x, r * x_stride), at(y, r * y_stride)
            for i in range(width):
                to[i] = here[i]

    @inner
    def multiply(
        c: Any, a: Any, stride: Any, turned: Any, packed: Any, rows: Any, n: Any, k: Any, add: Any, room: Any
    ) -> None:
        """c, (rows, n), = a b, or that is added. a: (rows, k), or if turned (k, rows). room: for a tile."""
        for j in range(0, k, BLOCK):
            depth, adds = min(BLOCK, k - j), add or j > 0
            for start in range(0, n, panel):
                wide, right, r = min(panel, n - start), at(packed, start * k + j * panel), 0
                while r < rows:
                    count = most if r + most <= rows else 1
                    into, step = at(c, r * n + start), n
                    if wide < panel:  # the last panel ends beyond c's rows
                        copy(into, n, room, panel, count, wide)
                        into, step = room, panel
                    if turned:
                        left = at(a, j * stride + r)
                        if count == most:
                            by_columns(left, stride, right, depth, into, step, adds)
                        else:
                            one_column(left, stride, right, depth, into, step, adds)
                    else:
                        left = at(a, r * stride + j)
                        if count == most:
                            by_rows(left, stride, right, depth, into, step, adds)
                        else:
                            one_row(left, stride, right, depth, into, step, adds)
                    if wide < panel:
                        copy(room, panel, at(c, r * n + start), n, count, wide)
                    r += count

    return pack, multiply, copy


def maps_of(real: types.Type) -> list[Callable[..., None]]:
    """Linear maps, with what comes before or after them: a block of tokens at a time, which stays in the core's cache.

    room: for the packed factors, each with its last panel filled up, and a tile.
    """
    pack, multiply, copy = products_of(real)
    swiglu_fwd, swiglu_bwd, rope = map(inner, rows_of(real)[:3])
    panel = PANEL_BYTES * 8 // real.bitwidth

    @inner
    def filled(n: Any) -> Any:
        return (n + panel - 1) // panel * panel

    def linear_fwd(
        y: Reals, x: Reals, weight: Reals, add: Reals, adds: int, tokens: int, inputs: int, outputs: int, room: Reals
    ) -> None:
        """add: added to the product if `adds`."""
        rest = at(room, filled(outputs) * inputs)
        pack(weight, inputs, True, outputs, inputs, room)
        for t in range(0, tokens, BLOCK):
            count, out = min(BLOCK, tokens - t), at(y, t * outputs)
            if adds:
                copy(at(add, t * outputs), outputs, out, outputs, count, outputs)
            multiply(out, at(x, t * inputs), inputs, False, room, count, outputs, inputs, adds != 0, rest)

    def linear_rope_fwd(
        y: Reals, x: Reals, weight: Reals, cos: Reals, sin: Reals, tokens: int, inputs: int, times: int, heads: int,
        rotated: int, half: int, room: Reals,
    ) -> None:  # fmt: skip
        outputs = 2 * half * heads
        rest = at(room, filled(outputs) * inputs)
        pack(weight, inputs, True, outputs, inputs, room)
        for t in range(0, tokens, BLOCK):
            count, out = min(BLOCK, tokens - t), at(y, t * outputs)
            multiply(out, at(x, t * inputs), inputs, False, room, count, outputs, inputs, False, rest)
            rope(out, cos, sin, t, count, times, heads, rotated, half)

    def linear_swiglu_fwd(
        gu: Reals, y: Reals, x: Reals, weight: Reals, tokens: int, inputs: int, half: int, room: Reals
    ) -> None:
        rest = at(room, filled(2 * half) * inputs)
        pack(weight, inputs, True, 2 * half, inputs, room)
        for t in range(0, tokens, BLOCK):
            count, both = min(BLOCK, tokens - t), at(gu, 2 * t * half)
            multiply(both, at(x, t * inputs), inputs, False, room, count, 2 * half, inputs, False, rest)
            swiglu_fwd(at(y, t * half), both, count, half)

    def linear_bwd(
        dx: Reals, dweight: Reals, dy: Reals, x: Reals, weight: Reals, adds: int, learns: int, tokens: int,
        inputs: int, outputs: int, room: Reals,
    ) -> None:  # fmt: skip
        """adds: to dx, instead of writing it. learns: add to dweight."""
        packed = at(room, filled(inputs) * outputs)
        rest = at(packed, filled(inputs) * BLOCK)
        pack(weight, inputs, False, inputs, outputs, room)
        for t in range(0, tokens, BLOCK):
            count, d = min(BLOCK, tokens - t), at(dy, t * outputs)
            multiply(at(dx, t * inputs), d, outputs, False, room, count, inputs, outputs, adds != 0, rest)
            if learns:
                pack(at(x, t * inputs), inputs, False, inputs, count, packed)
                multiply(dweight, d, outputs, True, packed, outputs, inputs, count, True, rest)

    def swiglu_linear_bwd(
        dgu: Reals, dweight: Reals, dy: Reals, gu: Reals, weight: Reals, learns: int, tokens: int, half: int,
        outputs: int, room: Reals,
    ) -> None:  # fmt: skip
        packed = at(room, filled(half) * outputs)
        hidden = at(packed, filled(half) * BLOCK)
        rest = at(hidden, half * BLOCK)
        pack(weight, half, False, half, outputs, room)
        for t in range(0, tokens, BLOCK):
            count, d = min(BLOCK, tokens - t), at(dy, t * outputs)
            multiply(hidden, d, outputs, False, room, count, half, outputs, False, rest)  # dh, which becomes h
            swiglu_bwd(at(dgu, 2 * t * half), hidden, at(gu, 2 * t * half), count, half)
            if learns:
                pack(hidden, half, False, half, count, packed)
                multiply(dweight, d, outputs, True, packed, outputs, half, count, True, rest)

    return [linear_fwd, linear_rope_fwd, linear_swiglu_fwd, linear_bwd, swiglu_linear_bwd]


def _largest(x: Any, stride: Any, rows: Any, lanes: Any, top: Any) -> None:
    """The largest number of each column. Four rows together: top is then read and written a quarter as often."""
    for i in range(lanes):
        top[i] = x[i]
    r = 1
    while r + 4 <= rows:
        a, b, c, d = at(x, r * stride), at(x, (r + 1) * stride), at(x, (r + 2) * stride), at(x, (r + 3) * stride)
        for i in range(lanes):
            top[i] = max(top[i], max(max(a[i], b[i]), max(c[i], d[i])))
        r += 4
    while r < rows:
        row = at(x, r * stride)
        for i in range(lanes):
            top[i] = max(top[i], row[i])
        r += 1


def rows_of(real: types.Type) -> list[Callable[..., None]]:
    """The kernels that work on rows."""
    scalar = np.float64 if real is types.float64 else np.float32
    zero, one, exp = scalar(0), scalar(1), exp_of(real)
    largest = inner(_largest)

    def swiglu_fwd(y: Reals, gu: Reals, rows: int, half: int) -> None:
        for r in range(rows):
            out, gate, up = at(y, r * half), at(gu, 2 * r * half), at(gu, (2 * r + 1) * half)
            for i in range(half):
                out[i] = gate[i] * up[i] / (one + exp(-gate[i]))

    def swiglu_bwd(dgu: Reals, dy: Reals, gu: Reals, rows: int, half: int) -> None:
        """dy becomes y."""
        for r in range(rows):
            dgate, dup, both = at(dgu, 2 * r * half), at(dgu, (2 * r + 1) * half), at(dy, r * half)
            gate, up = at(gu, 2 * r * half), at(gu, (2 * r + 1) * half)
            for i in range(half):
                g, u, d = gate[i], up[i], both[i]
                s = one / (one + exp(-g))
                dgate[i] = d * u * s * (one + g * (one - s))
                dup[i] = d * g * s
                both[i] = g * s * u

    def rmsnorm_fwd(y: Reals, rstd: Reals, x: Reals, gain: Reals, rows: int, width: int, eps: float) -> None:
        for r in range(rows):
            out, row, total = at(y, r * width), at(x, r * width), zero
            for i in range(width):
                total += row[i] * row[i]
            rstd[r] = one / math.sqrt(total / scalar(width) + eps)
            for i in range(width):
                out[i] = row[i] * rstd[r] * gain[i]

    def rmsnorm_bwd(
        dx: Reals, sums: Reals, dy: Reals, gain: Reals, inverse: Reals, y: Reals, rstd: Reals, residual: Reals,
        adds: int, rows: int, width: int,
    ) -> None:  # fmt: skip
        """inverse: of the gain. residual: added to dx if `adds`. sums: (8, width), dy y over rows r, r + 8, ..."""
        for r in range(rows):
            d, here, more = at(dy, r * width), at(y, r * width), at(residual, r * width)
            out, total, mean = at(dx, r * width), at(sums, r % 8 * width), zero
            for i in range(width):
                mean += d[i] * here[i]
            mean /= scalar(width)
            for i in range(width):
                total[i] += d[i] * here[i]
            for i in range(width):
                found = (d[i] * gain[i] - here[i] * inverse[i] * mean) * rstd[r]
                out[i] = found + more[i] if adds else found

    def rope(
        x: Reals, cos: Reals, sin: Reals, start: int, rows: int, times: int, heads: int, rotated: int, half: int
    ) -> None:
        """In place. x: (rows, heads, 2 half), of which the first has the number `start`; cos, sin: (times, half), of
        rows 0 to times - 1, and of every `times` rows after them."""
        for r in range(rows):
            time = (start + r) % times * half
            c, s = at(cos, time), at(sin, time)
            for h in range(rotated):
                left = at(x, (r * heads + h) * 2 * half)
                right = at(left, half)
                for i in range(half):
                    a, b = left[i], right[i]
                    left[i] = a * c[i] - b * s[i]
                    right[i] = b * c[i] + a * s[i]

    def softmax_residual(
        z: Reals, nll: Reals, targets: Ints, heads: int, vocab: int, n: int, top: Reals, total: Reals
    ) -> None:
        """As `softmax_residual_`, without a cap. top, total: LANES numbers."""
        for k in range(heads):
            for start in range(0, n, LANES):
                lanes = min(LANES, n - start)
                first = at(z, k * vocab * n + start)
                largest(first, n, vocab, lanes, top)
                for i in range(lanes):
                    token, total[i] = (start + i) * heads + k, zero
                    nll[token] = top[i] - first[max(targets[token], 0) * n + i]
                for v in range(vocab):
                    row = at(first, v * n)
                    for i in range(lanes):
                        row[i] = exp(row[i] - top[i])
                        total[i] += row[i]
                for i in range(lanes):
                    token = (start + i) * heads + k
                    there = targets[token] >= 0
                    nll[token] = nll[token] + math.log(total[i]) if there else zero
                    total[i] = one / total[i] if there else zero
                for v in range(vocab):
                    row = at(first, v * n)
                    for i in range(lanes):
                        row[i] *= total[i]
                for i in range(lanes):
                    v = targets[(start + i) * heads + k]
                    if v >= 0:
                        first[v * n + i] -= one

    def embedding_bwd(dweight: Reals, dy: Reals, ids: Ints, tokens: int, width: int) -> None:
        for t in range(tokens):
            row, d = at(dweight, ids[t] * width), at(dy, t * width)
            for i in range(width):
                row[i] += d[i]

    return [swiglu_fwd, swiglu_bwd, rope, rmsnorm_fwd, rmsnorm_bwd, softmax_residual, embedding_bwd]


def attention_of(real: types.Type) -> list[Callable[..., None]]:
    scalar = np.float64 if real is types.float64 else np.float32
    zero, one, exp, hidden = scalar(0), scalar(1), exp_of(real), scalar(HIDDEN)
    gone = scalar(-700 if real is types.float64 else -87)  # what lies below is 0 after exp, which stops falling there
    panel = PANEL_BYTES * 8 // real.bitwidth  # queries
    pack, multiply, _ = products_of(real)
    largest = inner(_largest)

    @inner
    def turn_in(x: Any, stride: Any, count: Any, dim: Any, scale: Any, out: Any) -> None:
        """out, (dim, panel), = scale x^T; x: (count, dim)."""
        pack(x, stride, True, count, dim, out)
        for i in range(dim * panel):
            out[i] *= scale

    @inner
    def turn_out(x: Any, count: Any, dim: Any, scale: Any, out: Any, stride: Any) -> None:
        """out, (count, dim), = x^T, each row times its own scale; x: (dim, panel)."""
        for d in range(dim):
            row = at(x, d * panel)
            for i in range(count):
                out[i * stride + d] = row[i] * scale[i]

    @inner
    def bounds(low: Any, high: Any) -> Any:
        """The first key that a query of the panel sees, and the first that all see; the same of the ends."""
        first, inside, outside, end = low[0], low[0], high[0], high[0]
        for i in range(panel):
            first, inside = min(first, low[i]), max(inside, low[i])
            outside, end = min(outside, high[i]), max(end, high[i])
        return int(first), int(inside), int(outside), int(end)

    @inner
    def hide(s: Any, low: Any, high: Any, seen: Any) -> None:
        first, inside, outside, end = seen
        for j in range(first, end):
            if j < inside or j >= outside:
                row, place = at(s, (j - first) * panel), scalar(j)
                for i in range(panel):
                    row[i] = row[i] if low[i] <= place < high[i] else hidden

    def attention_fwd(
        out: Reals, lse: Reals, q: Reals, k: Reals, v: Reals, low: Reals, high: Reals, sizes: Words,
        room: Reals, scale: float,
    ) -> None:  # fmt: skip
        """low, high: for each query, and as many more as fill a panel, the first key that it sees and the end. sizes:
        batch, queries, heads, kv heads, dim, panels. strides: of q, k and v, between sequences, positions and heads."""
        batch, queries, heads, kv_heads, dim, panels = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
        strides = at(sizes, 9)
        top, total, turned = room, at(room, panel), at(room, 2 * panel)
        s = at(turned, dim * panel)
        for b in range(batch):
            for h in range(heads):
                of_kv = h // (heads // kv_heads)
                keys = at(k, b * strides[3] + of_kv * strides[5])
                values = at(v, b * strides[6] + of_kv * strides[8])
                for p in range(panels):
                    t, count = p * panel, min(panel, queries - p * panel)
                    lows = at(low, (sizes[7] * b * panels + p) * panel)
                    highs = at(high, (sizes[8] * b * panels + p) * panel)
                    seen = bounds(lows, highs)
                    first, n = seen[0], seen[3] - seen[0]
                    query = at(q, b * strides[0] + t * strides[1] + h * strides[2])
                    turn_in(query, strides[1], count, dim, scale, turned)
                    multiply(s, at(keys, first * strides[4]), strides[4], False, turned, n, panel, dim, False, s)
                    hide(s, lows, highs, seen)
                    largest(s, panel, n, panel, top)
                    for i in range(panel):
                        total[i] = zero
                    for j in range(n):
                        row = at(s, j * panel)
                        for i in range(panel):
                            x = row[i] - top[i]
                            row[i] = zero if x < gone else exp(x)
                            total[i] += row[i]
                    multiply(turned, at(values, first * strides[7]), strides[7], True, s, dim, panel, n, False, s)
                    for i in range(count):
                        lse[(b * heads + h) * queries + t + i] = math.log(total[i]) + top[i]
                    for i in range(panel):
                        total[i] = one / total[i]
                    turn_out(turned, count, dim, total, at(out, ((b * queries + t) * heads + h) * dim), heads * dim)

    def attention_bwd(
        dq: Reals, dk: Reals, dv: Reals, dy: Reals, q: Reals, k: Reals, v: Reals, out: Reals, lse: Reals,
        low: Reals, high: Reals, sizes: Words, room: Reals, scale: float,
    ) -> None:  # fmt: skip
        """strides: also those of dq, dk and dv, after q's, k's and v's. sizes: also whether the rounding of lse is too
        coarse for exp(s - lse), which is then divided by its sums."""
        batch, queries, heads, kv_heads, dim, panels = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
        strides = at(sizes, 9)
        coarse, group, wide = sizes[6], heads // kv_heads, (dim + panel - 1) // panel * panel
        delta, sums, part, scales = room, at(room, panel), at(room, 2 * panel), at(room, 3 * panel)
        turned = at(room, 4 * panel)
        turned_dy, turned_dq = at(turned, dim * panel), at(turned, 2 * dim * panel)
        rows = at(turned, 3 * dim * panel)
        rows_dy = at(rows, wide * panel)
        of_k = at(rows_dy, wide * panel)  # for each panel of columns, `queries` rows
        of_v = at(of_k, wide * queries)
        s = at(of_v, wide * queries)
        ds = at(s, queries * panel)
        for i in range(panel):
            scales[i] = scale
        for b in range(batch):
            for of_kv in range(kv_heads):
                keys = at(k, b * strides[3] + of_kv * strides[5])
                values = at(v, b * strides[6] + of_kv * strides[8])
                for i in range(wide * queries):
                    of_k[i], of_v[i] = zero, zero
                for h in range(of_kv * group, (of_kv + 1) * group):
                    for p in range(panels):
                        t, count = p * panel, min(panel, queries - p * panel)
                        lows = at(low, (sizes[7] * b * panels + p) * panel)
                        highs = at(high, (sizes[8] * b * panels + p) * panel)
                        seen = bounds(lows, highs)
                        first, n = seen[0], seen[3] - seen[0]
                        query = at(q, b * strides[0] + t * strides[1] + h * strides[2])
                        place = ((b * queries + t) * heads + h) * dim
                        grad, result = at(dy, place), at(out, place)
                        turn_in(query, strides[1], count, dim, scale, turned)
                        turn_in(grad, heads * dim, count, dim, one, turned_dy)
                        pack(query, strides[1], False, dim, count, rows)
                        pack(grad, heads * dim, False, dim, count, rows_dy)
                        for i in range(panel):
                            delta[i], sums[i] = zero, zero
                        for i in range(count):
                            total = zero
                            for d in range(dim):
                                total += grad[i * heads * dim + d] * result[i * heads * dim + d]
                            delta[i], sums[i] = total, lse[(b * heads + h) * queries + t + i]
                        multiply(s, at(keys, first * strides[4]), strides[4], False, turned, n, panel, dim, False, s)
                        multiply(
                            ds, at(values, first * strides[7]), strides[7], False, turned_dy, n, panel, dim, False, s
                        )
                        hide(s, lows, highs, seen)
                        for i in range(panel):
                            part[i] = zero if coarse else one
                        if coarse:
                            for j in range(n):
                                row = at(s, j * panel)
                                for i in range(panel):
                                    x = row[i] - sums[i]
                                    part[i] += zero if x < gone else exp(x)
                            for i in range(panel):
                                part[i] = one / part[i]
                        for j in range(n):
                            row, drow = at(s, j * panel), at(ds, j * panel)
                            for i in range(panel):
                                x = row[i] - sums[i]
                                row[i] = zero if x < gone else exp(x) * part[i]
                                drow[i] = row[i] * (drow[i] - delta[i])
                        multiply(turned_dq, at(keys, first * strides[4]), strides[4], True, ds, dim, panel, n, False, s)
                        into = at(dq, b * strides[9] + t * strides[10] + h * strides[11])
                        turn_out(turned_dq, count, dim, scales, into, strides[10])
                        for c in range(0, wide, panel):
                            place = c * queries + first * panel
                            multiply(at(of_k, place), ds, panel, False, at(rows, c * count), n, panel, count, True, s)
                            multiply(at(of_v, place), s, panel, False, at(rows_dy, c * count), n, panel, count, True, s)
                for c in range(0, wide, panel):
                    for j in range(queries):
                        to_k = at(dk, b * strides[12] + j * strides[13] + of_kv * strides[14] + c)
                        to_v = at(dv, b * strides[15] + j * strides[16] + of_kv * strides[17] + c)
                        row_k, row_v = at(of_k, c * queries + j * panel), at(of_v, c * queries + j * panel)
                        for d in range(min(panel, dim - c)):
                            to_k[d], to_v[d] = row_k[d] * scale, row_v[d]

    return [attention_fwd, attention_bwd]
