"""What the kernels of `CompiledDecoder` are made of: functions for numba that emit LLVM's instructions themselves.

Only a first use on a machine imports this module; see cpu_code.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tinyforge.backends.instructions import at, fma, njit, zeros
from tinyforge.backends.machine_code import has_wide_vectors
from tinyforge.quantised_groups import GROUP

ROWS, OUTPUTS = 4, 6
"""Rows of x, or one, that a tile of weights is multiplied with together, and weight rows of a tile."""
PREFETCH = OUTPUTS
"""Weight rows ahead of a product's that it asks memory for. Codes then arrive twice as fast."""
VECTOR_BYTES = 64
"""Of the numbers that are multiplied together. Where registers are smaller, LLVM takes several."""


class Stored(NamedTuple):
    """How the weights of products are stored. codes: the type of an item. groups: four bits each, in groups that have a
    scale (`quantised_groups`); else a row of codes has one. row, row_scales: of (w, outputs, n), where the row after
    `outputs` of them begins."""

    codes: types.Type
    groups: bool
    row: Any
    row_scales: Any


def stored_as(kind: str) -> Stored:
    """kind: "int4", or the name of a NumPy type."""
    if kind == "int4":
        row = njit(lambda w, outputs, n: at(w, outputs * (n // 2)))
        return Stored(types.uint8, True, row, njit(lambda s, o, n: at(s, o * (n // GROUP))))
    codes = {"int8": types.int8, "uint8": types.uint8, "float32": types.float32, "float64": types.float64}[kind]
    row = njit(lambda w, outputs, n: at(w, outputs * n))
    return Stored(codes, False, row, njit(lambda s, o, n: at(s, o)))


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


def _sum(builder: Any, found: Any) -> Any:
    """Of a vector's numbers: halves are added, and their halves."""
    size = found.type.count
    while size > 1:
        size //= 2
        parts = list(range(size)), list(range(size, 2 * size))
        chosen, unused = ir.VectorType(ir.IntType(32), size), ir.Constant(found.type, ir.Undefined)
        found = builder.fadd(*(builder.shuffle_vector(found, unused, ir.Constant(chosen, part)) for part in parts))
    return builder.extract_element(found, ir.IntType(32)(0))


def _load(builder: Any, place: Any, item: Any, align: int) -> Any:
    return builder.load(builder.bitcast(place, item.as_pointer()), align=align)


def _prefetch(builder: Any, place: Any) -> None:
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [builder.bitcast(place, byte), flag(0), flag(3), flag(1)])


def dots_of(rows: int, outputs: int, stored: Stored, real: types.Type) -> Any:
    """dots(w, s, x, n, out, stride): out[r stride + o] = sum over i < n of w[o n + i] x[r n + i], for r < rows and
    o < outputs. Lane l of a vector adds up i = l, l + lanes, ...; then halves of the vector are added; then the rest.
    s: the scales of codes in groups, and of these only: a group's sum is multiplied with its scale.
    """
    if stored.groups:
        return _dots_of_groups(rows, outputs, real)
    weight = stored.codes

    @intrinsic
    def dots(_: Any, w: Any, x: Any, n: Any, out: Any, stride: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, x, n, out, stride = args
            number, index = context.get_value_type(real), n.type
            lanes = VECTOR_BYTES // (real.bitwidth // 8)
            vector, codes = ir.VectorType(number, lanes), ir.VectorType(context.get_value_type(weight), lanes)

            def load(base: Any, row: int, j: Any, item: Any) -> Any:
                size = item.element if isinstance(item, ir.VectorType) else item
                align = 1 if size == ir.IntType(8) else real.bitwidth // 8
                return _load(builder, builder.gep(base, [builder.add(builder.mul(n, index(row)), j)]), item, align)

            pairs = [(o, r) for o in range(outputs) for r in range(rows)]
            sums, rest = zeros(builder, vector, pairs), zeros(builder, number, pairs)
            whole = builder.sdiv(n, index(lanes))
            for places, count, item, code in (
                (sums, whole, vector, codes),
                (rest, builder.srem(n, index(lanes)), number, codes.element),
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
                            _prefetch(builder, builder.gep(w, [builder.add(builder.mul(n, index(o + PREFETCH)), j)]))
                        numbers = _widen(builder, load(w, o, j, code), item is vector, weight, number)
                        for r in range(rows):
                            place = places[o, r]
                            found = builder.call(fma(builder, item, real), [numbers, xs[r], builder.load(place)])
                            builder.store(found, place)
            for o, r in pairs:
                total = builder.fadd(_sum(builder, builder.load(sums[o, r])), builder.load(rest[o, r]))
                builder.store(total, builder.gep(out, [builder.add(builder.mul(stride, index(r)), index(o))]))
            return context.get_dummy_value()

        return types.void(w, x, types.intp, out, types.intp), emit

    return njit(lambda w, s, x, n, out, stride: dots(w, x, n, out, stride), inline="never", fastmath=False)


def _dots_of_groups(rows: int, outputs: int, real: types.Type) -> Any:
    """Of codes of four bits. With a table of 16 numbers in a register they are looked up; else a group's sum is
    sum c x - 8 sum x, and the latter serves all outputs."""
    by_table = has_wide_vectors() and real is types.float32

    @intrinsic
    def dots(_: Any, w: Any, s: Any, x: Any, n: Any, out: Any, stride: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, s, x, n, out, stride = args
            number, index, half = context.get_value_type(real), n.type, GROUP // 2
            vector, bytes_ = ir.VectorType(number, half), ir.VectorType(ir.IntType(8), half)
            words = ir.VectorType(ir.IntType(32), half)
            multiply_add, align = fma(builder, vector, real), real.bitwidth // 8
            pairs = [(o, r) for o in range(outputs) for r in range(rows)]
            sums, count = zeros(builder, vector, pairs), builder.sdiv(n, index(GROUP))
            table = ir.Constant(vector, [float(code - 8) for code in range(16)])
            permute = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector, words]), "llvm.x86.avx512.permvar.sf.512"
            )
            with cgutils.for_range(builder, count, intp=index) as loop:
                g, xs = loop.index, []
                for r in range(rows):
                    at = builder.add(builder.mul(n, index(r)), builder.mul(g, index(GROUP)))
                    pair = [
                        _load(builder, builder.gep(x, [builder.add(at, index(i))]), vector, align) for i in (0, half)
                    ]
                    offset = builder.fmul(builder.fadd(*pair), ir.Constant(vector, [0.0 if by_table else -8.0] * half))
                    xs.append((*pair, offset))
                for o in range(outputs):
                    here = builder.mul(builder.add(builder.mul(count, index(o)), g), index(half))
                    ahead = builder.add(here, builder.mul(count, index(3 * PREFETCH * half)))
                    _prefetch(builder, builder.gep(w, [ahead]))
                    codes = builder.zext(_load(builder, builder.gep(w, [here]), bytes_, 1), words)
                    high = builder.lshr(codes, ir.Constant(words, [4] * half))
                    if by_table:  # of the low four bits of each index
                        low, high = (builder.call(permute, [table, index_]) for index_ in (codes, high))
                    else:
                        low = builder.sitofp(builder.and_(codes, ir.Constant(words, [15] * half)), vector)
                        high = builder.sitofp(high, vector)
                    scale = builder.load(builder.gep(s, [builder.add(builder.mul(count, index(o)), g)]))
                    scale = builder.fpext(scale, number) if real is types.float64 else scale
                    undefined, first = ir.Constant(vector, ir.Undefined), ir.Constant(words, [0] * half)
                    scale = builder.insert_element(undefined, scale, ir.IntType(32)(0))
                    scale = builder.shuffle_vector(scale, undefined, first)
                    for r, (lower, upper, offset) in enumerate(xs):
                        found = builder.call(
                            multiply_add, [high, upper, builder.call(multiply_add, [low, lower, offset])]
                        )
                        total = builder.call(multiply_add, [scale, found, builder.load(sums[o, r])])
                        builder.store(total, sums[o, r])
            for o, r in pairs:
                place = builder.gep(out, [builder.add(builder.mul(stride, index(r)), index(o))])
                builder.store(_sum(builder, builder.load(sums[o, r])), place)
            return context.get_dummy_value()

        return types.void(w, s, x, types.intp, out, types.intp), emit

    return njit(lambda w, s, x, n, out, stride: dots(w, s, x, n, out, stride), inline="never", fastmath=False)


def number_of(weight: types.Type, real: types.Type) -> Any:
    """number(code): a code as a number of the type `real`."""

    @intrinsic
    def number(_: Any, code: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _widen(builder, args[0], False, weight, context.get_value_type(real))

        return real(weight), emit

    return njit(lambda code: number(code))
