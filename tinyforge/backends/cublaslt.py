"""Matrix products that add a bias or a whole array, one or many at a time, by cuBLASLt, which comes with cuBLAS and
which CuPy does not wrap.

cuBLAS can only add to the output: the array would have to be copied there first and read again, two passes over memory.
cuBLASLt reads it in place, adds it while the sums are in registers, and rounds once.

A product is described once for each shape and alignment: what to compute, the layout of the arrays, the algorithm that
the library's heuristics rank first. The choice depends on nothing else, so a run gives the same bits every time.
Source: the cuBLAS manual, "Using the cuBLASLt API"; names and numbers as in cublasLt.h.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from cupy.cuda import device, get_current_stream

from tinyforge.backends.cublas import (
    COMPUTE_32F,
    COMPUTE_64F,
    COMPUTE_TF32,
    FLOAT32,
    FLOAT64,
    NO,
    ONE,
    TRANSPOSE,
    ZERO,
    check_status,
    leading,
    load_library,
    type_code,
)
from tinyforge.kernel import Array, pointer

# cublasLtMatmulDescAttributes_t, cublasLtEpilogue_t, cublasLtMatrixLayoutAttribute_t,
# cublasLtMatmulPreferenceAttributes_t
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_EPILOGUE_NONE, _EPILOGUE_BIAS = 1, 4
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_MIN_ALIGNMENT_A, _MIN_ALIGNMENT_B, _MIN_ALIGNMENT_C, _MIN_ALIGNMENT_D = 5, 6, 7, 8
_NOT_SUPPORTED = 15  # cublasStatus_t

_Handle = ctypes.c_void_p
_Layout = tuple[tuple[int, ...], int, int]  # of a matrix: its shape, the distance between rows, the address's alignment


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def _library() -> Any:
    integer, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    return load_library(
        "cublasLt",
        {
            "cublasLtMatmulDescCreate": (pointer, integer, integer),
            "cublasLtMatmulDescSetAttribute": (_Handle, integer, pointer, size),
            "cublasLtMatrixLayoutCreate": (pointer, integer, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
            "cublasLtMatrixLayoutSetAttribute": (_Handle, integer, pointer, size),
            "cublasLtMatmulPreferenceCreate": (pointer,),
            "cublasLtMatmulPreferenceSetAttribute": (_Handle, integer, pointer, size),
            "cublasLtMatmulPreferenceDestroy": (_Handle,),
            "cublasLtMatmulAlgoGetHeuristic": (_Handle,) * 7 + (integer, pointer, pointer),
            "cublasLtMatmul": (
                *(_Handle, _Handle),
                *(pointer, pointer, _Handle, pointer, _Handle),  # alpha and the factors
                *(pointer, pointer, _Handle, pointer, _Handle),  # beta, what is added, the result
                *(pointer, pointer, size, pointer),
            ),
        },
    )


def _call(name: str, *arguments: Any, may: int = 0) -> int:
    """Call a function of the library. Raises unless it returns success, or the status `may`."""
    status: int = getattr(_library(), name)(*arguments)
    if status != may:
        check_status(name, status)
    return status


def _create(name: str, *arguments: int) -> _Handle:
    handle = _Handle()
    _call(name, ctypes.byref(handle), *arguments)
    return handle


def _set(name: str, handle: _Handle, attribute: int, value: Any) -> None:
    _call(name, handle, attribute, ctypes.byref(value), ctypes.sizeof(value))


@cache
def _described(
    arrays: tuple[_Layout, ...], transpose: tuple[bool, bool], batch: int, epilogue: int, dtype: np.dtype, *on: int
) -> tuple[Any, ...] | None:
    """(description, layouts of a, b, add and out, algorithm) of out = a b + add in cuBLAS's order, with the bias where
    the epilogue says so, or None if the library has no algorithm for it. arrays: a, b, add and out as they lie.
    transpose: a and b. batch: how many of each there are, without gaps one after the other. on: `_compute_and_gpu`."""
    (transpose_a, transpose_b), (compute, _) = transpose, on
    description = _create("cublasLtMatmulDescCreate", compute, type_code(FLOAT64 if dtype == FLOAT64 else FLOAT32))
    # Column-major, as in cublas.gemm: the factors swap places and each keeps its own flag.
    flags = (_TRANSA, TRANSPOSE if transpose_b else NO), (_TRANSB, TRANSPOSE if transpose_a else NO)
    for attribute, value in (*flags, (_EPILOGUE, epilogue)):
        _set("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.c_int(value))
    layouts = [_create("cublasLtMatrixLayoutCreate", type_code(dtype), *shape[::-1], step) for shape, step, _ in arrays]
    if batch > 1:
        for layout, ((rows, columns), _, _) in zip(layouts, arrays, strict=True):
            _set("cublasLtMatrixLayoutSetAttribute", layout, _BATCH_COUNT, ctypes.c_int32(batch))
            _set("cublasLtMatrixLayoutSetAttribute", layout, _BATCH_STRIDE, ctypes.c_int64(rows * columns))
    a, b, add, out = layouts
    preference = _create("cublasLtMatmulPreferenceCreate")
    expected = (_MIN_ALIGNMENT_B, _MIN_ALIGNMENT_A, _MIN_ALIGNMENT_C, _MIN_ALIGNMENT_D)
    for attribute, (_, _, alignment) in zip(expected, arrays, strict=True):
        _set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.c_uint32(alignment))
    found, count = _Heuristic(), ctypes.c_int()
    arguments = (description, b, a, add, out, preference, 1, ctypes.byref(found), ctypes.byref(count))
    _call("cublasLtMatmulAlgoGetHeuristic", device.get_cublas_handle(), *arguments, may=_NOT_SUPPORTED)
    _call("cublasLtMatmulPreferenceDestroy", preference)
    # The default preference allows no workspace, so the memory forecast need not count one.
    return (description, a, b, add, out, found) if count.value and found.state == 0 else None


def _alignment(x: Array, stride: int = 0) -> int:
    """The largest power of two that divides the address, and the stride to those after it; at most 256."""
    address: int = pointer(x) | stride
    return min(address & -address, 256)


def gemm_plus(
    a: Array, b: Array, out: Array, *, bias: Array | None = None, add: Array | None = None, tf32: bool = False
) -> bool:
    """out = a b^T + bias + add, and True; or False, with nothing done, where cuBLASLt has no algorithm for it (float64;
    rows or a bias at odd addresses).

    a: (m, k), b: (n, k), out and add: (m, n), bias: (n,), of one dtype, their rows contiguous. tf32: as for `gemm`.
    """
    if a.dtype.name == "float64" or (bias is not None and _alignment(bias) < 16):
        return False
    (m, k), n = a.shape, len(b)
    added = out if add is None else add
    shapes = ((b, (n, k)), (out, (m, n)), (added, (m, n)), *(() if bias is None else ((bias, (n,)),)))
    for x, shape in shapes:
        if x.dtype != a.dtype or x.shape != shape:
            raise ValueError(f"gemm_plus: {x.dtype} {x.shape} with {a.dtype} {a.shape}, expected {shape}")
    arrays = (a, b, added, out)
    layouts = tuple([(x.shape, leading(x), _alignment(x)) for x in arrays])
    epilogue = _EPILOGUE_NONE if bias is None else _EPILOGUE_BIAS
    described = _described(layouts, (False, True), 1, epilogue, a.dtype, *_compute_and_gpu(a, tf32))
    if described is None:
        return False
    if bias is not None:
        _set("cublasLtMatmulDescSetAttribute", described[0], _BIAS_POINTER, ctypes.c_void_p(pointer(bias)))
    _multiply(described, arrays, ONE[FLOAT32], (ZERO if add is None else ONE)[FLOAT32])
    return True


def gemm_batched(
    a: Array,
    b: Array,
    out: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale: float = 1.0,
    add: Array | None = None,
    keep: float = 1.0,
    tf32: bool = False,
) -> bool:
    """out[i] = scale a[i] b[i] + keep add[i] for all i, and True; or False, with nothing done, where cuBLASLt has no
    algorithm for it.

    a, b, add and out: (N, rows, columns) without gaps, of one dtype; out is none of the others. Either factor is
    transposed by flag. tf32: as for `gemm`.
    """
    arrays = (a, b, out if add is None else add, out)
    (count, *left), (many, *right) = a.shape, b.shape
    (m, k), (depth, n) = left[::-1] if transpose_a else left, right[::-1] if transpose_b else right
    fits = depth == k and many == count and arrays[2].shape == out.shape == (count, m, n)
    if not fits or any(x.dtype != a.dtype or not x.flags.c_contiguous for x in arrays):
        raise ValueError(f"gemm_batched: {', '.join(f'{x.dtype} {x.shape}' for x in arrays)}")
    layouts = tuple([(x.shape[1:], x.shape[2], _alignment(x, x.shape[1] * x.strides[1])) for x in arrays])
    on = _compute_and_gpu(a, tf32)
    described = _described(layouts, (transpose_a, transpose_b), count, _EPILOGUE_NONE, a.dtype, *on)
    if described is None:
        return False
    # Read before the call returns.
    numbers = np.array([scale, 0.0 if add is None else keep], FLOAT64 if a.dtype == FLOAT64 else FLOAT32)
    _multiply(described, arrays, numbers.ctypes.data, numbers[1:].ctypes.data)
    return True


def _compute_and_gpu(a: Any, tf32: bool) -> tuple[int, int]:
    """How a product of such factors is computed, and the device's number."""
    single = COMPUTE_TF32 if tf32 and a.dtype == FLOAT32 else COMPUTE_32F
    return COMPUTE_64F if a.dtype == FLOAT64 else single, a.device.id


def _multiply(described: tuple[Any, ...], arrays: tuple[Array, ...], alpha: int, beta: int) -> None:
    """alpha, beta: addresses of numbers in the precision of sums."""
    description, layout_a, layout_b, layout_add, layout_out, found = described
    a, b, add, out = (pointer(x) for x in arrays)
    factors, result = (alpha, b, layout_b, a, layout_a), (beta, add, layout_add, out, layout_out)
    how = ctypes.byref(found.algorithm), None, 0, get_current_stream().ptr
    _call("cublasLtMatmul", device.get_cublas_handle(), description, *factors, *result, *how)
