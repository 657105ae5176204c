"""The kernels of `CompiledDecoder`, compiled by numba: `build` gives their machine code.

Only a first use on a machine imports this module; see decoder_compiled.py. All memory is the caller's: kernels take the
addresses of arrays, allocate nothing, raise nothing, and call nothing but exp of float64.

A product adds up each dot product in the order that `dots` fixes, whatever the number of rows. All else is computed for
one position at a time. So a position's bits depend neither on the number of other positions nor on their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tinyforge.infer.cpu_code import NAME, machine

ROWS, OUTPUTS = 4, 6
"""Rows of x, or one, that a tile of weights is multiplied with together, and weight rows of a tile."""
PREFETCH = OUTPUTS
"""Weight rows ahead of a product's that it asks memory for. Codes then arrive twice as fast."""
FAST = {"reassoc", "contract", "nsz", "arcp"}
KINDS = {"int8": types.int8, "uint8": types.uint8, "float32": types.float32, "float64": types.float64}
VECTOR_BYTES = 64
"""Of the numbers that are multiplied together. Where registers are smaller, LLVM takes several."""


def _cast(target: types.Type) -> Any:
    """An address as a pointer to `target`."""

    @intrinsic
    def cast(_: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(target)(types.intp), emit

    return cast


@intrinsic
def at(_: Any, pointer: Any, offset: Any) -> Any:
    """pointer + offset, in items."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), emit


@intrinsic
def power(_: Any, exponent: Any) -> Any:
    """2^exponent in float32, for -126 to 127."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], ir.Constant(ir.IntType(32), 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return types.float32(types.int32), emit


def _widen(builder: Any, codes: Any, vector: bool, weight: types.Type, real: Any) -> Any:
    """Codes, one or a vector, as numbers of the type `real`."""
    if weight in (types.float32, types.float64):
        return codes
    lanes = codes.type.count if vector else 1

    def of(item: Any) -> Any:
        return ir.VectorType(item, lanes) if vector else item

    def constant(item: Any, value: Any) -> Any:
        return ir.Constant(of(item), [value] * lanes if vector else value)

    word, single = ir.IntType(32), ir.FloatType()
    if weight is types.int8:
        return builder.sitofp(builder.sext(codes, of(word)), of(real))
    # e4m3: exponent and mantissa move to float32's places, and the bias of the exponent from 7 to 127. Below 2^-6 a
    # number has no leading 1: it gets one, as 2^-6 + m 2^-9, and 2^-6 is subtracted, which is exact.
    wide = builder.zext(codes, of(word))
    low = builder.and_(wide, constant(word, 127))
    small = builder.icmp_unsigned("<", low, constant(word, 8))
    bits = builder.add(builder.shl(low, constant(word, 20)), constant(word, 120 << 23))
    bits = builder.select(small, builder.add(bits, constant(word, 1 << 23)), bits)
    size = builder.bitcast(bits, of(single))
    size = builder.select(small, builder.fsub(size, constant(single, 2.0**-6)), size)
    sign = builder.shl(builder.and_(wide, constant(word, 128)), constant(word, 24))
    found = builder.bitcast(builder.or_(builder.bitcast(size, of(word)), sign), of(single))
    return found if real == single else builder.fpext(found, of(real))


def _dots(rows: int, outputs: int, weight: types.Type, real: types.Type) -> Any:
    """dots(w, x, n, out, stride): out[r stride + o] = sum over i < n of w[o n + i] x[r n + i], for r < rows and
    o < outputs. Lane l of a vector adds up i = l, l + lanes, ...; then halves of the vector are added; then the rest.
    """

    @intrinsic
    def dots(_: Any, w: Any, x: Any, n: Any, out: Any, stride: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, x, n, out, stride = args
            number, index = context.get_value_type(real), n.type
            lanes = VECTOR_BYTES // (real.bitwidth // 8)
            vector, codes = ir.VectorType(number, lanes), ir.VectorType(context.get_value_type(weight), lanes)
            suffix = f"f{real.bitwidth}"
            fma, fma_1 = (
                cgutils.get_or_insert_function(builder.module, ir.FunctionType(of, [of] * 3), f"llvm.fmuladd.{name}")
                for of, name in ((vector, f"v{lanes}{suffix}"), (number, suffix))
            )

            def load(base: Any, row: int, j: Any, item: Any) -> Any:
                place = builder.gep(base, [builder.add(builder.mul(n, index(row)), j)])
                size = item.element if isinstance(item, ir.VectorType) else item
                align = 1 if size == ir.IntType(8) else real.bitwidth // 8
                return builder.load(builder.bitcast(place, item.as_pointer()), align=align)

            def prefetch(place: Any) -> None:
                byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
                kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
                fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
                builder.call(fetch, [builder.bitcast(place, byte), flag(0), flag(3), flag(1)])

            pairs = [(o, r) for o in range(outputs) for r in range(rows)]
            sums = {pair: cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * lanes)) for pair in pairs}
            rest = {pair: cgutils.alloca_once_value(builder, ir.Constant(number, 0.0)) for pair in pairs}
            whole = builder.sdiv(n, index(lanes))
            for places, count, item, code, multiply in (
                (sums, whole, vector, codes, fma),
                (rest, builder.srem(n, index(lanes)), number, codes.element, fma_1),
            ):
                with cgutils.for_range(builder, count, intp=index) as loop:
                    j = loop.index
                    if item is vector:
                        j = builder.mul(j, index(lanes))
                    else:
                        j = builder.add(j, builder.mul(whole, index(lanes)))
                    xs = [load(x, r, j, item) for r in range(rows)]
                    for o in range(outputs):
                        if item is vector:
                            prefetch(builder.gep(w, [builder.add(builder.mul(n, index(o + PREFETCH)), j)]))
                        numbers = _widen(builder, load(w, o, j, code), item is vector, weight, number)
                        for r in range(rows):
                            place = places[o, r]
                            builder.store(builder.call(multiply, [numbers, xs[r], builder.load(place)]), place)
            for o, r in pairs:
                found, size = builder.load(sums[o, r]), lanes
                while size > 1:
                    size //= 2
                    parts = list(range(size)), list(range(size, 2 * size))
                    chosen = ir.VectorType(ir.IntType(32), size)
                    unused = ir.Constant(found.type, ir.Undefined)
                    halves = [builder.shuffle_vector(found, unused, ir.Constant(chosen, part)) for part in parts]
                    found = builder.fadd(*halves)
                total = builder.fadd(builder.extract_element(found, ir.IntType(32)(0)), builder.load(rest[o, r]))
                builder.store(total, builder.gep(out, [builder.add(builder.mul(stride, index(r)), index(o))]))
            return context.get_dummy_value()

        return types.void(w, x, types.intp, out, types.intp), emit

    return njit(lambda w, x, n, out, stride: dots(w, x, n, out, stride), inline="never", fastmath=False)


def _exp(real: types.Type) -> Callable[[Any], Any]:
    """exp, vectorised in float32: 2^k times a polynomial in the rest, which is at most ln 2 / 2 in size."""
    if real is types.float64:
        return njit(lambda x: math.exp(min(max(x, -700.0), 700.0)))
    f = np.float32
    least, most, log2e, magic = f(-87), f(88), f(1.4426950408889634), f(12582912)
    high, low, one, half = f(0.693359375), f(-2.12194440e-4), f(1), f(0.5)
    c0, c1, c2 = f(1.9875691500e-4), f(1.3981999507e-3), f(8.3334519073e-3)
    c3, c4 = f(4.1665795894e-2), f(1.6666665459e-1)

    @njit(fastmath={"contract"}, error_model="numpy")
    def exp(x: Any) -> Any:
        x = min(max(x, least), most)
        k = (x * log2e + magic) - magic  # to the nearest integer
        x = (x - k * high) - k * low
        p = ((((c0 * x + c1) * x + c2) * x + c3) * x + c4) * x + half
        return ((p * x) * x + x + one) * power(np.int32(k))

    return exp


def functions(weight: types.Type, real: types.Type) -> Any:
    """The pass, as a function for numba."""
    scalar = np.float64 if real is types.float64 else np.float32
    reals, codes, words, singles = _cast(real), _cast(weight), _cast(types.intp), _cast(types.float32)
    one_row, tile, single = (_dots(*of, weight, real) for of in ((1, OUTPUTS), (ROWS, OUTPUTS), (1, 1)))
    quantised = weight in (types.int8, types.uint8)
    exp, zero, one = _exp(real), scalar(0), scalar(1)

    @njit(fastmath=FAST, error_model="numpy")
    def product(w: Any, scales: Any, outputs: Any, n: Any, x: Any, rows: Any, out: Any, part: Any, add: Any) -> None:
        """out, (rows, outputs), = x W^T, or is added to it. part: room for a tile's results."""
        o = 0
        while o < outputs:
            size = OUTPUTS if o + OUTPUTS <= outputs else 1
            r = 0
            while r < rows:
                many = ROWS if r + ROWS <= rows else 1
                here, xs = at(w, o * n), at(x, r * n)
                if size == 1:
                    for i in range(many):
                        single(here, at(xs, i * n), n, at(part, i * OUTPUTS), OUTPUTS)
                elif many == 1:
                    one_row(here, xs, n, part, OUTPUTS)
                else:
                    tile(here, xs, n, part, OUTPUTS)
                for i in range(many):
                    for j in range(size):
                        found = part[i * OUTPUTS + j]
                        if quantised:
                            found *= scales[o + j]
                        place = (r + i) * outputs + o + j
                        out[place] = out[place] + found if add else found
                r += many
            o += size

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
        the cache and the position that it becomes. logits: of the last `answers` rows, (heads, answers, vocab).
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
            product(at(matrix, hidden * dim), at(scales, hidden), hidden, dim, h, rows, up, part, False)
            swiglu(wide, up, rows * hidden)
            product(codes(w[6]), singles(w[7]), dim, hidden, wide, rows, x, part, True)
        last, w = at(x, (rows - answers) * dim), at(weights, 8 * layers)
        for r in range(answers):
            norm(at(last, r * dim), reals(gains[2 * layers]), dim, eps, at(h, r * dim))
        if answers:
            for head in range(sizes[12]):
                matrix, scales = at(codes(w[0]), head * vocab * dim), at(singles(w[1]), head * vocab)
                product(matrix, scales, vocab, dim, h, answers, at(logits, head * answers * vocab), part, False)

    return forward


def build(weight: str, real: str) -> bytes:
    """Machine code for this CPU, an object file with the function `tinyforge_pass`."""
    pointer = types.CPointer(types.intp)
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    forward = njit((pointer, pointer), **options)(functions(KINDS[weight], KINDS[real]))
    (text,) = forward.inspect_llvm().values()
    module = binding.parse_assembly(text)
    # The function itself; those that it calls have another linkage.
    (found,) = (f for f in module.functions if not f.is_declaration and f.linkage is binding.Linkage.external)
    found.name = NAME
    code: bytes = machine().emit_object(module)
    return code
