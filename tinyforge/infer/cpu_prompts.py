"""The kernels of `CompiledDecoder` for prompts: many positions of one row, a panel of them at a time.

A panel holds an activation of PANEL_BYTES of positions, (width, positions): a vector register has one feature of many
positions. Each position is thus computed as if it were alone, in an order that does not depend on the others, and all
products, attention's included, are those of `tile`: numbers of the left factor, each times a vector of positions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from tinyforge.backends.instructions import FAST, at, cast_to, exp_of, njit, tiles_of
from tinyforge.backends.machine_code import PANEL_BYTES, has_wide_vectors
from tinyforge.infer.cpu_code import KEYS_AT_ONCE
from tinyforge.infer.cpu_instructions import Stored, number_of
from tinyforge.quantised_groups import GROUP


def prompts_of(stored: Stored, real: types.Type) -> Any:
    """The layers of a pass over a prompt, as a function for numba: `cpu_kernels.forward` has the arguments."""
    scalar = np.float64 if real is types.float64 else np.float32
    reals, codes, words, singles = map(cast_to, (real, stored.codes, types.intp, types.float32))
    row_of, scales_of = stored.row, stored.row_scales
    quantised = stored.codes in (types.int8, types.uint8)
    exp, number, zero, one, least = exp_of(real), number_of(stored.codes, real), scalar(0), scalar(1), scalar(-1e30)
    wide = PANEL_BYTES * 8 // real.bitwidth  # positions of a panel
    most = 8 if has_wide_vectors() else 6  # outputs of a tile
    by_rows, one_row = tiles_of(most, real, False), tiles_of(1, real, False)
    by_columns, one_column = tiles_of(most, real, True), tiles_of(1, real, True)
    flags: dict[str, Any] = {"fastmath": FAST, "error_model": "numpy"}
    pad = 16 if quantised else 0  # rows a power of two apart would compete for a few cache sets

    @njit(**flags)
    def decoded(w: Any, scales: Any, outputs: Any, n: Any, room: Any) -> Any:
        for i in range(outputs):
            scale, row, code = scalar(scales[i]), at(room, i * (n + pad)), at(w, i * n)
            for j in range(n):
                row[j] = number(code[j]) * scale
        return room

    @njit(**flags)
    def decoded_groups(w: Any, scales: Any, outputs: Any, n: Any, room: Any) -> Any:
        for i in range(outputs):
            for g in range(n // GROUP):
                here = at(room, i * (n + pad) + g * GROUP)
                scale, code = scalar(scales[i * (n // GROUP) + g]), at(w, i * (n // 2) + g * (GROUP // 2))
                for j in range(GROUP // 2):
                    byte = np.int32(code[j])
                    here[j] = scalar((byte & 15) - 8) * scale
                    here[GROUP // 2 + j] = scalar((byte >> 4) - 8) * scale
        return room

    if stored.groups:
        decoded = decoded_groups
    numbers = decoded if quantised else njit(lambda w, scales, outputs, n, room: w)

    @njit(**flags)
    def product(w: Any, scales: Any, outputs: Any, n: Any, b: Any, panels: Any, out: Any, add: Any, room: Any) -> None:
        """W times each of the panels (a first and a last one) of b, into out or added to it. room: for a tile's
        decoded rows."""
        o = 0
        while o < outputs:
            size = most if o + most <= outputs else 1
            left = numbers(row_of(w, o, n), scales_of(scales, o, n), size, n, room)
            for p in range(panels[0], panels[1]):
                right, to = at(b, p * n * wide), at(out, (p * outputs + o) * wide)
                if size == most:
                    by_rows(left, n + pad, right, n, to, wide, add)
                else:
                    one_row(left, n + pad, right, n, to, wide, add)
            o += size

    @njit(**flags)
    def norm(x: Any, gain: Any, n: Any, eps: Any, out: Any, sums: Any) -> None:
        for i in range(wide):
            sums[i] = zero
        for j in range(n):
            row = at(x, j * wide)
            for i in range(wide):
                sums[i] += row[i] * row[i]
        for i in range(wide):
            sums[i] = one / math.sqrt(sums[i] / scalar(n) + eps)
        for j in range(n):
            row, to, factor = at(x, j * wide), at(out, j * wide), gain[j]
            for i in range(wide):
                to[i] = row[i] * sums[i] * factor

    @njit(**flags)
    def turn(head: Any, cos: Any, sin: Any, half: Any, factor: Any) -> None:
        for j in range(half):
            upper, lower, c, s = at(head, j * wide), at(head, (half + j) * wide), at(cos, j * wide), at(sin, j * wide)
            for i in range(wide):
                a, b = upper[i] * factor, lower[i] * factor
                upper[i] = a * c[i] - b * s[i]
                lower[i] = b * c[i] + a * s[i]

    @njit(**flags)
    def attend(q: Any, keys: Any, values: Any, first: Any, end: Any, shape: Any, room: Any, out: Any) -> None:
        """A panel of queries of one head, the first of them position `first`, over the keys before `end`: a tile of
        keys after the other, with the sums so far scaled anew where a larger score comes."""
        size, positions, width = shape
        s, top = room, at(room, KEYS_AT_ONCE * wide)
        total, scale = at(top, wide), at(top, 2 * wide)
        for i in range(wide):
            top[i], total[i] = least, zero
        for j in range(size * wide):
            out[j] = zero
        begin = 0
        while begin < end:
            count = min(KEYS_AT_ONCE, end - begin)
            t = 0
            while t < count:  # up to a tile's end: the cache has room, and what follows a prompt is masked
                by_columns(at(keys, begin + t), positions, q, size, at(s, t * wide), wide, False)
                t += most
            masked = begin + count > first + 1
            for t in range(count):
                row, position = at(s, t * wide), begin + t - first
                if masked:
                    for i in range(wide):
                        row[i] = row[i] if position <= i else least
                for i in range(wide):
                    scale[i] = max(top[i], row[i]) if t == 0 else max(scale[i], row[i])
            for i in range(wide):
                new = scale[i]
                scale[i] = exp(top[i] - new)
                top[i] = new
                total[i] *= scale[i]
            for t in range(count):
                row, position = at(s, t * wide), begin + t - first
                for i in range(wide):
                    row[i] = exp(row[i] - top[i])
                if masked:
                    for i in range(wide):
                        row[i] = row[i] if position <= i else zero
                for i in range(wide):
                    total[i] += row[i]
            for j in range(size):
                row = at(out, j * wide)
                for i in range(wide):
                    row[i] *= scale[i]
            v, j = at(values, begin * width), 0
            while j + most <= size:
                by_columns(at(v, j), width, s, count, at(out, j * wide), wide, True)
                j += most
            while j < size:
                one_column(at(v, j), width, s, count, at(out, j * wide), wide, True)
                j += 1
            begin += count
        for i in range(wide):
            total[i] = one / total[i]
        for j in range(size):
            row = at(out, j * wide)
            for i in range(wide):
                row[i] *= total[i]

    @njit(**flags)
    def swiglu(gate: Any, up: Any, n: Any) -> None:
        for i in range(n):
            gate[i] = gate[i] * up[i] / (one + exp(-gate[i]))

    def prompt(sizes: Any, addresses: Any) -> None:
        """Append `rows` positions to one row of the cache. x: (rows, dim); on return its last `answers` rows are what
        the last layer gives, which other positions do not compute beyond their keys and values."""
        rows, dim, hidden, heads, kv_heads, size = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
        layers, batch, positions, width, answers = sizes[6], sizes[8], sizes[9], sizes[10], sizes[11]
        weights, gains, given, h = words(addresses[0]), words(addresses[1]), reals(addresses[2]), reals(addresses[3])
        qkv, mlp = reals(addresses[4]), reals(addresses[5])
        keys, values, cos, sin = reals(addresses[8]), reals(addresses[9]), reals(addresses[10]), reals(addresses[11])
        place, past, eps = words(addresses[12])[0], words(addresses[13])[0], reals(addresses[15])[0]
        x, room = reals(addresses[16]), reals(addresses[17])
        queries, half, group = heads * size, size // 2, heads // kv_heads
        turned, all_heads = heads + kv_heads, heads + 2 * kv_heads
        row_width, factor, panels = all_heads * size, one / math.sqrt(scalar(size)), (rows + wide - 1) // wide
        cosines = at(room, most * (max(dim, hidden, queries) + 16) + (KEYS_AT_ONCE + 3 + most) * wide)
        sines, shape = at(cosines, panels * half * wide), (size, positions, width)
        for p in range(panels):
            for i in range(wide):
                r = p * wide + i
                for j in range(dim):
                    x[(p * dim + j) * wide + i] = given[r * dim + j] if r < rows else zero
                here = min(past + r, past + rows - 1) * half
                for j in range(half):
                    cosines[(p * half + j) * wide + i] = cos[here + j]
                    sines[(p * half + j) * wide + i] = sin[here + j]
        for layer in range(layers):
            w, cached = at(weights, 8 * layer), (layer * batch + place) * kv_heads
            for p in range(panels):
                norm(at(x, p * dim * wide), reals(gains[2 * layer]), dim, eps, at(h, p * dim * wide), room)
            product(codes(w[0]), singles(w[1]), row_width, dim, h, (0, panels), qkv, False, room)
            for p in range(panels):
                here = at(qkv, p * row_width * wide)
                c, s = at(cosines, p * half * wide), at(sines, p * half * wide)
                for head in range(turned):
                    turn(at(here, head * size * wide), c, s, half, factor if head < heads else one)
                count, first = min(wide, rows - p * wide), past + p * wide
                for head in range(kv_heads):
                    k, v = at(here, (heads + head) * size * wide), at(here, (turned + head) * size * wide)
                    key = at(keys, (cached + head) * size * positions + first)
                    value = at(values, ((cached + head) * positions + first) * width)
                    for j in range(size):
                        for i in range(count):
                            key[j * positions + i] = k[j * wide + i]
                            value[i * width + j] = v[j * wide + i]
            needed = 0, panels
            if layer == layers - 1:  # those with an answer
                needed = (rows - answers) // wide if answers else panels, panels
            for p in range(needed[0], panels):
                first = past + p * wide
                for head in range(heads):
                    of_head, q = cached + head // group, at(qkv, (p * all_heads + head) * size * wide)
                    k, v = at(keys, of_head * size * positions), at(values, of_head * positions * width)
                    out = at(mlp, (p * heads + head) * size * wide)
                    attend(q, k, v, first, min(first + wide, past + rows), shape, room, out)
            product(codes(w[2]), singles(w[3]), dim, queries, mlp, needed, x, True, room)
            for p in range(needed[0], panels):
                norm(at(x, p * dim * wide), reals(gains[2 * layer + 1]), dim, eps, at(h, p * dim * wide), room)
            up, matrix, scales = at(mlp, panels * hidden * wide), codes(w[4]), singles(w[5])
            product(matrix, scales, hidden, dim, h, needed, mlp, False, room)
            product(
                row_of(matrix, hidden, dim), scales_of(scales, hidden, dim), hidden, dim, h, needed, up, False, room
            )
            done = needed[0] * hidden * wide
            swiglu(at(mlp, done), at(up, done), (panels - needed[0]) * hidden * wide)
            product(codes(w[6]), singles(w[7]), dim, hidden, mlp, needed, x, True, room)
        for r in range(rows - answers, rows):
            for j in range(dim):
                given[r * dim + j] = x[(r // wide * dim + j) * wide + r % wide]

    return njit(**flags)(prompt)
