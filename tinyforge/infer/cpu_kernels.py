"""The kernels of `CompiledDecoder`, compiled by numba: `build` gives their machine code.

Only a first use on a machine imports this module; see decoder_compiled.py. All memory is the caller's: kernels take the
addresses of arrays, allocate nothing, raise nothing, and call nothing but exp of float64.

A product adds up each dot product in the order that `dots` fixes, whatever the number of rows. All else is computed for
one position at a time. So a position's bits depend neither on the number of other positions nor on their values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from tinyforge.backends.instructions import FAST, at, cast_to, exp_of, njit, object_code, real_of
from tinyforge.infer.cpu_code import NAME
from tinyforge.infer.cpu_instructions import OUTPUTS, ROWS, Stored, dots_of, stored_as
from tinyforge.infer.cpu_prompts import prompts_of


def product_of(stored: Stored, real: types.Type) -> Any:
    one_row, tile, single = (dots_of(*of, stored, real) for of in ((1, OUTPUTS), (ROWS, OUTPUTS), (1, 1)))
    row_of, scales_of = stored.row, stored.row_scales
    by_row = stored.codes in (types.int8, types.uint8) and not stored.groups

    @njit(fastmath=FAST, error_model="numpy")
    def product(w: Any, scales: Any, outputs: Any, n: Any, x: Any, rows: Any, out: Any, part: Any, add: Any) -> None:
        """out, (rows, outputs), = x W^T, or is added to it. part: room for a tile's results."""
        o = 0
        while o < outputs:
            size = OUTPUTS if o + OUTPUTS <= outputs else 1
            r = 0
            while r < rows:
                many = ROWS if r + ROWS <= rows else 1
                here, factors, xs = row_of(w, o, n), scales_of(scales, o, n), at(x, r * n)
                if size == 1:
                    for i in range(many):
                        single(here, factors, at(xs, i * n), n, at(part, i * OUTPUTS), OUTPUTS)
                elif many == 1:
                    one_row(here, factors, xs, n, part, OUTPUTS)
                else:
                    tile(here, factors, xs, n, part, OUTPUTS)
                for i in range(many):
                    for j in range(size):
                        found = part[i * OUTPUTS + j]
                        if by_row:
                            found *= factors[j]
                        place = (r + i) * outputs + o + j
                        out[place] = out[place] + found if add else found
                r += many
            o += size

    return product


def functions(weight: str, real: types.Type) -> Any:
    """The pass, as a function for numba."""
    scalar = np.float64 if real is types.float64 else np.float32
    stored, stored_heads = stored_as(weight), stored_as("int8" if weight == "int4" else weight)
    reals, codes, words, singles = map(cast_to, (real, stored.codes, types.intp, types.float32))
    head_codes = cast_to(stored_heads.codes)
    row_of, scales_of, product = stored.row, stored.row_scales, product_of(stored, real)
    head_product = product_of(stored_heads, real) if weight == "int4" else product
    exp, zero, one, prompt = exp_of(real), scalar(0), scalar(1), prompts_of(stored, real)

    @njit(fastmath=FAST, error_model="numpy")
    def norm(x: Any, gain: Any, n: Any, eps: Any, out: Any) -> None:
        total = zero
        for i in range(n):
            total += x[i] * x[i]
        inverse = one / math.sqrt(total / scalar(n) + eps)
        for i in range(n):
            out[i] = x[i] * inverse * gain[i]

    @njit(fastmath=FAST, error_model="numpy")
    def turn(head: Any, cos: Any, sin: Any, half: Any, factor: Any) -> None:
        for i in range(half):
            a, b = head[i] * factor, head[half + i] * factor
            head[i] = a * cos[i] - b * sin[i]
            head[half + i] = b * cos[i] + a * sin[i]

    @njit(fastmath=FAST, error_model="numpy")
    def attend(q: Any, keys: Any, values: Any, count: Any, shape: Any, s: Any, out: Any) -> None:
        """One query head over `count` positions: keys (size, positions), values (positions, width)."""
        size, positions, width = shape
        for t in range(count):
            s[t] = zero
        d = 0
        while d + 4 <= size:
            k0, k1 = at(keys, d * positions), at(keys, (d + 1) * positions)
            k2, k3 = at(k0, 2 * positions), at(k1, 2 * positions)
            q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
            for t in range(count):
                s[t] += q0 * k0[t] + q1 * k1[t] + q2 * k2[t] + q3 * k3[t]
            d += 4
        while d < size:
            k0, q0 = at(keys, d * positions), q[d]
            for t in range(count):
                s[t] += q0 * k0[t]
            d += 1
        top = s[0]
        for t in range(count):
            top = max(top, s[t])
        total = zero
        for t in range(count):
            s[t] = exp(s[t] - top)
            total += s[t]
        for i in range(size):
            out[i] = zero
        t = 0
        while t + 4 <= count:
            v = at(values, t * width)
            p0, p1, p2, p3 = s[t], s[t + 1], s[t + 2], s[t + 3]
            for i in range(size):
                out[i] += p0 * v[i] + p1 * v[width + i] + p2 * v[2 * width + i] + p3 * v[3 * width + i]
            t += 4
        while t < count:
            v, p0 = at(values, t * width), s[t]
            for i in range(size):
                out[i] += p0 * v[i]
            t += 1
        inverse = one / total
        for i in range(size):
            out[i] *= inverse

    @njit(fastmath=FAST, error_model="numpy")
    def swiglu(gate: Any, up: Any, n: Any) -> None:
        for i in range(n):
            gate[i] = gate[i] * up[i] / (one + exp(-gate[i]))

    def forward(sizes: Any, addresses: Any) -> None:
        """Append `rows` positions to the cache. sizes and addresses: in the order of the first lines.

        weights: for each layer, then for the heads, eight addresses: matrix and scales of qkv, out, gate_up, down.
        x: (rows, dim), the embeddings; h, qkv, wide, scores, part: scratch. places, lengths: of each row, its place in
        the cache and the position that it becomes. logits: of the last `answers` rows, (heads, answers, vocab). With
        sizes[13] the positions are of one row, and computed as a prompt's: see cpu_prompts.py.
        """
        rows, dim, hidden, heads, kv_heads, size = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
        layers, vocab, batch, positions, width, answers = sizes[6], sizes[7], sizes[8], sizes[9], sizes[10], sizes[11]
        weights, gains, x, h = words(addresses[0]), words(addresses[1]), reals(addresses[2]), reals(addresses[3])
        qkv, wide, scores, part = reals(addresses[4]), reals(addresses[5]), reals(addresses[6]), reals(addresses[7])
        keys, values, cos, sin = reals(addresses[8]), reals(addresses[9]), reals(addresses[10]), reals(addresses[11])
        places, lengths, logits = words(addresses[12]), words(addresses[13]), reals(addresses[14])
        eps = reals(addresses[15])[0]
        queries, half, group = heads * size, size // 2, heads // kv_heads
        turned, all_heads = heads + kv_heads, heads + 2 * kv_heads
        row_width, factor = all_heads * size, one / math.sqrt(scalar(size))
        of_prompt = sizes[13]
        if of_prompt:
            prompt(sizes, addresses)
            layers = 0
        for layer in range(layers):
            w = at(weights, 8 * layer)
            for r in range(rows):
                norm(at(x, r * dim), reals(gains[2 * layer]), dim, eps, at(h, r * dim))
            product(codes(w[0]), singles(w[1]), row_width, dim, h, rows, qkv, part, False)
            for r in range(rows):
                here, place, cached = at(qkv, r * row_width), lengths[r], layer * batch + places[r]
                for head in range(turned):
                    scale = factor if head < heads else one
                    turn(at(here, head * size), at(cos, place * half), at(sin, place * half), half, scale)
                for head in range(kv_heads):
                    k, v = at(here, (heads + head) * size), at(here, (turned + head) * size)
                    of_head = cached * kv_heads + head
                    key, value = (
                        at(keys, of_head * size * positions + place),
                        at(values, (of_head * positions + place) * width),
                    )
                    for i in range(size):
                        key[i * positions] = k[i]
                        value[i] = v[i]
            for r in range(rows):
                for head in range(heads):
                    of_head = (layer * batch + places[r]) * kv_heads + head // group
                    q, mixed = at(qkv, r * row_width + head * size), at(wide, r * queries + head * size)
                    k, v = at(keys, of_head * size * positions), at(values, of_head * positions * width)
                    attend(q, k, v, lengths[r] + 1, (size, positions, width), scores, mixed)
            product(codes(w[2]), singles(w[3]), dim, queries, wide, rows, x, part, True)
            for r in range(rows):
                norm(at(x, r * dim), reals(gains[2 * layer + 1]), dim, eps, at(h, r * dim))
            up, matrix, scales = at(wide, rows * hidden), codes(w[4]), singles(w[5])
            product(matrix, scales, hidden, dim, h, rows, wide, part, False)
            product(row_of(matrix, hidden, dim), scales_of(scales, hidden, dim), hidden, dim, h, rows, up, part, False)
            swiglu(wide, up, rows * hidden)
            product(codes(w[6]), singles(w[7]), dim, hidden, wide, rows, x, part, True)
        last, layers = at(x, (rows - answers) * dim), sizes[6]
        w = at(weights, 8 * layers)
        for r in range(answers):
            norm(at(last, r * dim), reals(gains[2 * layers]), dim, eps, at(h, r * dim))
        if answers:
            for head in range(sizes[12]):
                table, factors = at(head_codes(w[0]), head * vocab * dim), at(singles(w[1]), head * vocab)
                head_product(table, factors, vocab, dim, h, answers, at(logits, head * answers * vocab), part, False)

    return forward


def build(weight: str, real: str) -> bytes:
    """Machine code for this CPU, an object file with the function `tinyforge_pass`."""
    pointer = types.CPointer(types.intp)
    forward = njit((pointer, pointer), error_model="numpy")(functions(weight, real_of(real)))
    return object_code({NAME: forward})
