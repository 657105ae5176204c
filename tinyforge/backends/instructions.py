"""What kernels for a CPU are made of: functions for numba, some of which emit LLVM's instructions themselves.

Only a first use on a machine imports this module; see machine_code.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tinyforge.backends.machine_code import PANEL_BYTES, has_wide_vectors, machine

njit = partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Without the functions by which Python and C would call: a tenth of the time to compile."""
Reals: TypeAlias = Any
"""A pointer to numbers of a kernel's type."""
Words: TypeAlias = Any
"""To intp."""
Ints: TypeAlias = Any
"""To int32."""
FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Sums in another order, fused multiply-add, and division as a product; NaN and infinity stay."""


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


def fma(builder: Any, item: Any, real: types.Type) -> Any:
    lanes = f"v{item.count}" if isinstance(item, ir.VectorType) else ""
    kind = ir.FunctionType(item, [item] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.{lanes}f{real.bitwidth}")


def zeros(builder: Any, item: Any, pairs: Any) -> dict[Any, Any]:
    """A place for each pair, with 0 in it."""
    zero = [0.0] * item.count if isinstance(item, ir.VectorType) else 0.0
    return {pair: cgutils.alloca_once_value(builder, ir.Constant(item, zero)) for pair in pairs}


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
    """tile(a, stride, b, n, c, step, add): c[o, l] = sum over j < n of a[o, j] b[j, l], or that is added to c, for
    o < outputs and the positions l of a panel. b has rows of a panel, and c rows that are `step` apart; a has rows, or
    by_columns columns, that are `stride` apart. A sum is added up from its first term to its last.
    """
    panel, size = PANEL_BYTES * 8 // real.bitwidth, (64 if has_wide_vectors() else 32) * 8 // real.bitwidth

    @intrinsic
    def tile(_: Any, a: Any, stride: Any, b: Any, n: Any, c: Any, step: Any, add: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, stride, b, n, c, step, add = args
            number, index = context.get_value_type(real), n.type
            vector, word = ir.VectorType(number, size), ir.IntType(32)
            multiply_add = fma(builder, vector, real)
            undefined, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(word, size), [0] * size)

            def place(base: Any, row: Any, step: Any, offset: int) -> Any:
                at = builder.add(builder.mul(row, step), index(offset))
                return builder.bitcast(builder.gep(base, [at]), vector.as_pointer())

            for part in range(0, panel, 2 * size):
                pairs = [(o, part + v) for o in range(outputs) for v in (0, size)]
                sums = zeros(builder, vector, pairs)
                with builder.if_then(add):
                    for (o, v), held in sums.items():
                        builder.store(builder.load(place(c, index(o), step, v), align=4), held)
                with cgutils.for_range(builder, n, intp=index) as loop:
                    j = loop.index
                    right = {v: builder.load(place(b, j, index(panel), v), align=4) for v in (part, part + size)}
                    for o in range(outputs):
                        if by_columns:
                            at = builder.add(builder.mul(j, stride), index(o))
                        else:
                            at = builder.add(builder.mul(stride, index(o)), j)
                        one = builder.insert_element(undefined, builder.load(builder.gep(a, [at])), word(0))
                        left = builder.shuffle_vector(one, undefined, first)
                        for v, numbers in right.items():
                            held = sums[o, v]
                            builder.store(builder.call(multiply_add, [left, numbers, builder.load(held)]), held)
                for (o, v), held in sums.items():
                    builder.store(builder.load(held), place(c, index(o), step, v), align=4)
            return context.get_dummy_value()

        return types.void(a, types.intp, b, types.intp, c, types.intp, types.boolean), emit

    def call(a: Any, stride: Any, b: Any, n: Any, c: Any, step: Any, add: Any) -> None:
        tile(a, stride, b, n, c, step, add)

    return njit(call, inline="never", fastmath=False)


def real_of(name: str) -> types.Type:
    return {"float32": types.float32, "float64": types.float64}[name]


def object_code(functions: dict[str, Any]) -> bytes:
    """Machine code for this CPU, an object file with compiled functions by name."""
    whole = binding.parse_assembly("")
    for name, function in functions.items():
        (text,) = function.inspect_llvm().values()
        module = binding.parse_assembly(text)
        # The function itself; those that it calls have another linkage.
        (found,) = (f for f in module.functions if not f.is_declaration and f.linkage is binding.Linkage.external)
        found.name = name
        whole.link_in(module)
    code: bytes = machine().emit_object(whole)
    return code


def emit(functions: Sequence[Callable[..., None]], real: types.Type) -> bytes:
    """Machine code of functions that are annotated as `machine_code.Library` says. An attribute `fast` of a function
    is numba's fastmath; else FAST."""
    pointer = types.CPointer
    kinds = {"Reals": pointer(real), "Words": pointer(types.intp), "Ints": pointer(types.int32)}
    kinds |= {"int": types.intp, "float": real}
    compiled = {}
    for function in functions:
        signature = tuple(kinds[kind] for name, kind in function.__annotations__.items() if name != "return")
        fast = getattr(function, "fast", FAST)
        compiled[function.__name__] = njit(signature, error_model="numpy", fastmath=fast)(function)
    return object_code(compiled)
