"""What the kernels of `CompiledDecoder` are made of: functions for numba that emit LLVM's instructions themselves.

Only a first use on a machine imports this module; see cpu_code.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tinyforge.infer.cpu_code import PANEL_BYTES, has_wide_vectors
from tinyforge.quantised_groups import GROUP

ROWS, OUTPUTS = 4, 6
"""Rows of x, or one, that a tile of weights is multiplied with together, and weight rows of a tile."""
PREFETCH = OUTPUTS
"""Weight rows ahead of a product's that it asks memory for. Codes then arrive twice as fast."""
VECTOR_BYTES = 64
"""Of the numbers that are multiplied together. Where registers are smaller, LLVM takes several."""
njit = partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Without the functions by which Python and C would call: a tenth of the time to compile."""


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


def cast_to(target: types.Type) -> Any:
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


def _fma(builder: Any, item: Any, real: types.Type) -> Any:
    lanes = f"v{item.count}" if isinstance(item, ir.VectorType) else ""
    kind = ir.FunctionType(item, [item] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.{lanes}f{real.bitwidth}")


def _zeros(builder: Any, item: Any, pairs: Any) -> dict[Any, Any]:
    """A place for each pair, with 0 in it."""
    zero = [0.0] * item.count if isinstance(item, ir.VectorType) else 0.0
    return {pair: cgutils.alloca_once_value(builder, ir.Constant(item, zero)) for pair in pairs}


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
            sums, rest = _zeros(builder, vector, pairs), _zeros(builder, number, pairs)
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
                            found = builder.call(_fma(builder, item, real), [numbers, xs[r], builder.load(place)])
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
            fma, align = _fma(builder, vector, real), real.bitwidth // 8
            pairs = [(o, r) for o in range(outputs) for r in range(rows)]
            sums, count = _zeros(builder, vector, pairs), builder.sdiv(n, index(GROUP))
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
                        found = builder.call(fma, [high, upper, builder.call(fma, [low, lower, offset])])
                        builder.store(builder.call(fma, [scale, found, builder.load(sums[o, r])]), sums[o, r])
            for o, r in pairs:
                place = builder.gep(out, [builder.add(builder.mul(stride, index(r)), index(o))])
                builder.store(_sum(builder, builder.load(sums[o, r])), place)
            return context.get_dummy_value()

        return types.void(w, s, x, types.intp, out, types.intp), emit

    return njit(lambda w, s, x, n, out, stride: dots(w, s, x, n, out, stride), inline="never", fastmath=False)


def exp_of(real: types.Type) -> Callable[[Any], Any]:
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


def tiles_of(outputs: int, real: types.Type, by_columns: bool) -> Any:
    """tile(a, stride, b, n, c, add): c[o, l] = sum over j < n of a[o, j] b[j, l], or that is added to c, for
    o < outputs and the positions l of a panel. b and c have rows of a panel; a has rows, or by_columns columns, that
    are `stride` apart. A sum is added up from its first term to its last.
    """
    panel, size = PANEL_BYTES * 8 // real.bitwidth, (64 if has_wide_vectors() else 32) * 8 // real.bitwidth

    @intrinsic
    def tile(_: Any, a: Any, stride: Any, b: Any, n: Any, c: Any, add: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, stride, b, n, c, add = args
            number, index = context.get_value_type(real), n.type
            vector, word = ir.VectorType(number, size), ir.IntType(32)
            fma = _fma(builder, vector, real)
            undefined, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(word, size), [0] * size)

            def place(base: Any, row: Any, offset: int) -> Any:
                at = builder.add(builder.mul(row, index(panel)), index(offset))
                return builder.bitcast(builder.gep(base, [at]), vector.as_pointer())

            for part in range(0, panel, 2 * size):
                pairs = [(o, part + v) for o in range(outputs) for v in (0, size)]
                sums = _zeros(builder, vector, pairs)
                with builder.if_then(add):
                    for (o, v), held in sums.items():
                        builder.store(builder.load(place(c, index(o), v), align=4), held)
                with cgutils.for_range(builder, n, intp=index) as loop:
                    j = loop.index
                    right = {v: builder.load(place(b, j, v), align=4) for v in (part, part + size)}
                    for o in range(outputs):
                        if by_columns:
                            at = builder.add(builder.mul(j, stride), index(o))
                        else:
                            at = builder.add(builder.mul(stride, index(o)), j)
                        one = builder.insert_element(undefined, builder.load(builder.gep(a, [at])), word(0))
                        left = builder.shuffle_vector(one, undefined, first)
                        for v, numbers in right.items():
                            held = sums[o, v]
                            builder.store(builder.call(fma, [left, numbers, builder.load(held)]), held)
                for (o, v), held in sums.items():
                    builder.store(builder.load(held), place(c, index(o), v), align=4)
            return context.get_dummy_value()

        return types.void(a, types.intp, b, types.intp, c, types.boolean), emit

    return njit(lambda a, stride, b, n, c, add: tile(a, stride, b, n, c, add), inline="never", fastmath=False)


def number_of(weight: types.Type, real: types.Type) -> Any:
    """number(code): a code as a number of the type `real`."""

    @intrinsic
    def number(_: Any, code: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _widen(builder, args[0], False, weight, context.get_value_type(real))

        return real(weight), emit

    return njit(lambda code: number(code))
