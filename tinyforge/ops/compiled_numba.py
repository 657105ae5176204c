"""The kernels of compiled.py, for numba.

Only a first use on a machine imports this module; see backends/machine_code.py. All memory is the caller's: kernels
take contiguous arrays, allocate nothing and raise nothing. A row's, and a sequence's, bits do not depend on the others.

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

LANES = 256
"""Tokens whose softmax over the vocabulary is computed together."""


def kernels_of(real: types.Type) -> list[Callable[..., None]]:
    return [*rows_of(real), *attention_of(real)]


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
    largest = njit(fastmath=FAST, error_model="numpy")(_largest)

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

    def rope(x: Reals, cos: Reals, sin: Reals, rows: int, times: int, heads: int, rotated: int, half: int) -> None:
        """In place. x: (rows, heads, 2 half); cos, sin: (times, half), of rows 0 to times - 1, and of every `times`
        rows after them."""
        for r in range(rows):
            c, s = at(cos, r % times * half), at(sin, r % times * half)
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

    return [swiglu_fwd, swiglu_bwd, rmsnorm_fwd, rmsnorm_bwd, rope, softmax_residual, embedding_bwd]


def attention_of(real: types.Type) -> list[Callable[..., None]]:
    scalar = np.float64 if real is types.float64 else np.float32
    zero, one, exp, hidden = scalar(0), scalar(1), exp_of(real), scalar(HIDDEN)
    gone = scalar(-700 if real is types.float64 else -87)  # what lies below is 0 after exp, which stops falling there
    panel = PANEL_BYTES * 8 // real.bitwidth  # queries
    most = 8 if has_wide_vectors() else 6  # outputs of a tile
    by_rows, one_row = tiles_of(most, real, False), tiles_of(1, real, False)
    by_columns, one_column = tiles_of(most, real, True), tiles_of(1, real, True)
    inner = njit(fastmath=FAST, error_model="numpy")
    largest = inner(_largest)

    @inner
    def rows_product(a: Any, stride: Any, b: Any, n: Any, c: Any, rows: Any, add: Any) -> None:
        """c, rows of a panel, = a b, or that is added; a: (rows, n), b: n rows of a panel."""
        r = 0
        while r + most <= rows:
            by_rows(at(a, r * stride), stride, b, n, at(c, r * panel), add)
            r += most
        while r < rows:
            one_row(at(a, r * stride), stride, b, n, at(c, r * panel), add)
            r += 1

    @inner
    def columns_product(a: Any, stride: Any, b: Any, n: Any, c: Any, columns: Any) -> None:
        """c, `columns` rows of a panel, = a^T b; a: (n, columns), b: n rows of a panel."""
        r = 0
        while r + most <= columns:
            by_columns(at(a, r), stride, b, n, at(c, r * panel), False)
            r += most
        while r < columns:
            one_column(at(a, r), stride, b, n, at(c, r * panel), False)
            r += 1

    @inner
    def turn_in(x: Any, stride: Any, count: Any, dim: Any, scale: Any, out: Any) -> None:
        """out, (dim, panel), = scale x^T; x: (count, dim). What lies beyond `count` is 0."""
        for i in range(panel):
            row, there = at(x, i * stride), dim if i < count else 0
            for d in range(there):
                out[d * panel + i] = row[d] * scale
            for d in range(there, dim):
                out[d * panel + i] = zero

    @inner
    def turn_out(x: Any, count: Any, dim: Any, scale: Any, out: Any, stride: Any) -> None:
        """out, (count, dim), = x^T, each row times its own scale; x: (dim, panel)."""
        for d in range(dim):
            row = at(x, d * panel)
            for i in range(count):
                out[i * stride + d] = row[i] * scale[i]

    @inner
    def copy_rows(x: Any, stride: Any, count: Any, dim: Any, scale: Any, out: Any) -> None:
        """out, for each panel of x's columns its rows, = scale x; x: (count, dim). What lies beyond is 0."""
        for start in range(0, dim, panel):
            wide = min(panel, dim - start)
            for i in range(panel):
                row, there = at(out, (start + i) * panel), wide if i < count else 0
                for d in range(there):
                    row[d] = x[i * stride + start + d] * scale
                for d in range(there, panel):
                    row[d] = zero

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
                    rows_product(at(keys, first * strides[4]), strides[4], turned, dim, s, n, False)
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
                    columns_product(at(values, first * strides[7]), strides[7], s, n, turned, dim)
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
                        copy_rows(query, strides[1], count, dim, scale, rows)
                        copy_rows(grad, heads * dim, count, dim, one, rows_dy)
                        for i in range(panel):
                            delta[i], sums[i] = zero, zero
                        for i in range(count):
                            total = zero
                            for d in range(dim):
                                total += grad[i * heads * dim + d] * result[i * heads * dim + d]
                            delta[i], sums[i] = total, lse[(b * heads + h) * queries + t + i]
                        rows_product(at(keys, first * strides[4]), strides[4], turned, dim, s, n, False)
                        rows_product(at(values, first * strides[7]), strides[7], turned_dy, dim, ds, n, False)
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
                        columns_product(at(keys, first * strides[4]), strides[4], ds, n, turned_dq, dim)
                        into = at(dq, b * strides[9] + t * strides[10] + h * strides[11])
                        turn_out(turned_dq, count, dim, scales, into, strides[10])
                        for c in range(0, wide, panel):
                            place = c * queries + first * panel
                            rows_product(ds, panel, at(rows, c * panel), count, at(of_k, place), n, True)
                            rows_product(s, panel, at(rows_dy, c * panel), count, at(of_v, place), n, True)
                for c in range(0, wide, panel):
                    for j in range(queries):
                        to_k = at(dk, b * strides[12] + j * strides[13] + of_kv * strides[14] + c)
                        to_v = at(dv, b * strides[15] + j * strides[16] + of_kv * strides[17] + c)
                        row_k, row_v = at(of_k, c * queries + j * panel), at(of_v, c * queries + j * panel)
                        for d in range(min(panel, dim - c)):
                            to_k[d], to_v[d] = row_k[d], row_v[d]

    return [attention_fwd, attention_bwd]
