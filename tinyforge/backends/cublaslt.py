"""Matrix products that add a bias or a whole array, by cuBLASLt, which comes with cuBLAS and which CuPy does not wrap.

cuBLAS can only add what already stands in the output: it would have to be written there first and read again, two
passes over memory. cuBLASLt adds it while the sums are in registers, from where it lies, and rounds once.

A product is described once for each shape and alignment: what to compute, the layout of the arrays, the algorithm that
the library's heuristics put first. The choice depends on nothing else, so that a run gives the same bits every time.
Source: the cuBLAS manual, "Using the cuBLASLt API"; names and numbers as in cublasLt.h.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from cupy.cuda import device, get_current_stream

from tinyforge.backends.cublas import COMPUTE_32F, COMPUTE_TF32, FLOAT32, NO, ONE, TRANSPOSE, ZERO, leading, type_code
from tinyforge.kernel import Array

# cublasLtMatmulDescAttributes_t, cublasLtEpilogue_t, cublasLtMatmulPreferenceAttributes_t
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_EPILOGUE_NONE, _EPILOGUE_BIAS = 1, 4
_MIN_ALIGNMENT_A, _MIN_ALIGNMENT_B, _MIN_ALIGNMENT_C, _MIN_ALIGNMENT_D = 5, 6, 7, 8
_NOT_SUPPORTED = 15  # cublasStatus_t

_Handle = ctypes.c_void_p


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
    from cuda.pathfinder import load_nvidia_dynamic_lib  # which CuPy finds its own libraries by

    library = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    integer, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    for name, arguments in {
        "cublasLtMatmulDescCreate": (pointer, integer, integer),
        "cublasLtMatmulDescSetAttribute": (_Handle, integer, pointer, size),
        "cublasLtMatrixLayoutCreate": (pointer, integer, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
        "cublasLtMatmulPreferenceCreate": (pointer,),
        "cublasLtMatmulPreferenceSetAttribute": (_Handle, integer, pointer, size),
        "cublasLtMatmulPreferenceDestroy": (_Handle,),
        "cublasLtMatmulAlgoGetHeuristic": (_Handle,) * 7 + (integer, pointer, pointer),
        "cublasLtMatmul": (_Handle, _Handle, pointer, pointer, _Handle, pointer, _Handle, pointer, pointer, _Handle,
                           pointer, _Handle, pointer, pointer, size, pointer),
    }.items():  # fmt: skip
        getattr(library, name).argtypes = arguments
    return library


def _call(name: str, *arguments: Any, may: int = 0) -> int:
    """Call a function of the library. Raises unless it returns success, or the status `may`."""
    status: int = getattr(_library(), name)(*arguments)
    if status not in (0, may):
        raise RuntimeError(f"{name} returned status {status}; cublasStatus_t in cublas_api.h says what it means")
    return status


def _create(name: str, *arguments: int) -> _Handle:
    handle = _Handle()
    _call(name, ctypes.byref(handle), *arguments)
    return handle


def _set(name: str, handle: _Handle, attribute: int, value: Any) -> None:
    _call(name, handle, attribute, ctypes.byref(value), ctypes.sizeof(value))


@cache
def _described(m: int, n: int, k: int, epilogue: int, steps: tuple[int, ...], alignments: tuple[int, ...], code: int,
               compute: int, gpu: int) -> tuple[Any, ...] | None:  # fmt: skip
    """(description, layouts of a, b, add and out, algorithm) of out = a b^T + add in cuBLAS's order, with the bias
    where the epilogue says so, or None where the library has no algorithm for it. steps: distances between rows of a,
    b, add and out; alignments: of their addresses."""
    description = _create("cublasLtMatmulDescCreate", compute, type_code(FLOAT32))
    for attribute, value in ((_TRANSA, TRANSPOSE), (_TRANSB, NO), (_EPILOGUE, epilogue)):
        _set("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.c_int(value))
    # Column-major: a row-major matrix is its transpose, so out^T (n, m) = b (n, k) a^T (k, m), b given as (k, n).
    shapes = ((k, m), (k, n), (n, m), (n, m))
    layouts = [_create("cublasLtMatrixLayoutCreate", code, *s, step) for s, step in zip(shapes, steps, strict=True)]
    a, b, add, out = layouts
    preference = _create("cublasLtMatmulPreferenceCreate")
    wanted = (_MIN_ALIGNMENT_B, _MIN_ALIGNMENT_A, _MIN_ALIGNMENT_C, _MIN_ALIGNMENT_D)
    for attribute, alignment in zip(wanted, alignments, strict=True):
        _set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.c_uint32(alignment))
    found, count = _Heuristic(), ctypes.c_int()
    arguments = (description, b, a, add, out, preference, 1, ctypes.byref(found), ctypes.byref(count))
    _call("cublasLtMatmulAlgoGetHeuristic", device.get_cublas_handle(), *arguments, may=_NOT_SUPPORTED)
    _call("cublasLtMatmulPreferenceDestroy", preference)
    # The default preference allows no workspace: nothing that the memory forecast would have to know of.
    return (description, a, b, add, out, found) if count.value and found.state == 0 else None


def _alignment(x: Array) -> int:
    """The largest power of two that divides the address, at most 256."""
    address: int = x.data.ptr
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
            raise ValueError(f"gemm_plus: {x.dtype} {x.shape} with {a.dtype} {a.shape}, wants {shape}")
    arrays = (a, b, added, out)
    compute = COMPUTE_TF32 if tf32 and a.dtype == FLOAT32 else COMPUTE_32F
    described = _described(m, n, k, _EPILOGUE_NONE if bias is None else _EPILOGUE_BIAS, tuple(map(leading, arrays)),
                           tuple(map(_alignment, arrays)), type_code(a.dtype), compute, out.device.id)  # fmt: skip
    if described is None:
        return False
    description, layout_a, layout_b, layout_add, layout_out, found = described
    if bias is not None:
        _set("cublasLtMatmulDescSetAttribute", description, _BIAS_POINTER, ctypes.c_void_p(bias.data.ptr))
    _call(
        "cublasLtMatmul", device.get_cublas_handle(), description, ONE[FLOAT32], b.data.ptr, layout_b, a.data.ptr,
        layout_a, (ZERO if add is None else ONE)[FLOAT32], added.data.ptr, layout_add, out.data.ptr, layout_out,
        ctypes.byref(found.algorithm), None, 0, get_current_stream().ptr,
    )  # fmt: skip
    return True
