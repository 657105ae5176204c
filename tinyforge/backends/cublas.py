"""Matrix products on the GPU: one wrapper for all of them, over the gemmEx that CuPy carries.

cupy.matmul does not take bf16 with more than two axes, cannot accumulate, and cannot write float32 from bf16 factors;
gemmEx can. It takes float64, float32, float32 by TF32 tensor cores (`tf32=True`), and bf16, whose products are exact in
float32 and summed in float32.

CuPy refuses its own gemmEx while a stream is being captured in a graph; cuBLAS does not. `Products` calls the same
function of the same library by ctypes, with a handle and a workspace of its own. The workspace has cuBLAS's default
size, so that the library chooses the same algorithms and the bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import finalize

import cupy
import numpy as np
from cupy.cuda import device
from cupy_backends.cuda.libs import cublas

from tinyforge.kernel import Array, pointer

# cublasOperation_t, cudaDataType_t, cublasComputeType_t, cublasGemmAlgo_t
NO, TRANSPOSE = 0, 1
_TYPES = {"float32": 0, "float64": 1, "bfloat16": 14}


@cache
def type_code(dtype: np.dtype) -> int:
    if dtype.name not in _TYPES:
        raise TypeError(f"gemm: no product of arrays of {dtype}; use float64, float32 or bfloat16")
    return _TYPES[dtype.name]


COMPUTE_32F, COMPUTE_TF32, COMPUTE_64F = 68, 77, 70
_DEFAULT_ALGORITHM = -1

# alpha and beta are read through addresses: the numbers must live as long as the module.
_NUMBERS = np.array([0.0, 1.0], np.float32), np.array([0.0, 1.0], np.float64)
FLOAT32, FLOAT64 = (numbers.dtype for numbers in _NUMBERS)
ZERO, ONE = ({n.dtype: n[i:].ctypes.data for n in _NUMBERS} for i in range(2))


_gemm_ex: Callable[..., object] = cublas.gemmEx  # or that of the `Products` in use


class Products:
    """cublasGemmEx on a stream that may be capturing, with a handle and a workspace of its own.

    Source: the cuBLAS manual, "CUDA Graphs Support" and "cublasSetWorkspace()": while capturing, a library without a
    workspace from the caller would allocate one in the graph.
    """

    def __init__(self) -> None:
        self.handle: int = cublas.create()
        finalize(self, cublas.destroy, self.handle)
        major = int(cupy.cuda.Device().compute_capability[:-1])
        # Not from a pool: like the workspace of CuPy's handle, it is outside of the memory forecast.
        self.workspace = cupy.cuda.Memory(32 << 20 if major >= 9 else 4 << 20)

    def __call__(self, other_handle: int, *arguments: Any) -> None:
        """As cublas.gemmEx; the handle is this one's own."""
        check_status("cublasGemmEx", _library().cublasGemmEx(self.handle, *arguments))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, `gemm` uses this object, on the stream that is current now."""
        global _gemm_ex
        library, before = _library(), _gemm_ex
        check_status("cublasSetStream", library.cublasSetStream_v2(self.handle, cupy.cuda.get_current_stream().ptr))
        # After the stream: setting the stream resets the workspace.
        check_status(
            "cublasSetWorkspace", library.cublasSetWorkspace_v2(self.handle, self.workspace.ptr, self.workspace.size)
        )
        check_status("cublasSetSmCountTarget", library.cublasSetSmCountTarget(self.handle, _processors))
        _gemm_ex = self
        try:
            yield
        finally:
            _gemm_ex = before


def load_library(name: str, functions: Mapping[str, tuple[Any, ...]]) -> Any:
    """One of CUDA's libraries by ctypes, the copy that CuPy uses. functions: the types of their arguments."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    library = ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)
    for function, arguments in functions.items():
        getattr(library, function).argtypes = arguments
    return library


@cache
def _library() -> Any:
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    return load_library(
        "cublas",
        {
            "cublasSetStream_v2": (pointer, pointer),
            "cublasSetWorkspace_v2": (pointer, pointer, ctypes.c_size_t),
            "cublasSetSmCountTarget": (pointer, integer),
            "cublasGemmEx": (
                pointer,
                *(integer,) * 5,
                *(pointer, pointer, integer, integer),
                *(pointer, integer, integer),
                *(pointer, pointer, integer, integer),
                integer,
                integer,
            ),
        },
    )


def check_status(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} returned status {status}; cublasStatus_t in cublas_api.h says what it means")


_processors = 0


def use_processors(count: int) -> None:
    """From now on cuBLAS plans its products for `count` multiprocessors; 0: for all of them."""
    global _processors
    _processors = count
    check_status("cublasSetSmCountTarget", _library().cublasSetSmCountTarget(device.get_cublas_handle(), count))


def gemm(
    a: Array,
    b: Array,
    out: Array | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
    tf32: bool = False,
    scale: float = 1.0,
    keep: float = 1.0,
) -> Array:
    """out = scale a b, or with `accumulate` out = scale a b + keep out; either factor transposed by flag.

    tf32: float32 factors may be rounded to TF32 (10 bits of mantissa).

    a, b: 2-D, of one dtype, their rows contiguous (a slice of columns will do). out: 2-D, that dtype, or float32 for
    bf16 factors; made if not given.
    """
    m, k = a.shape[::-1] if transpose_a else a.shape
    rows_b, n = b.shape[::-1] if transpose_b else b.shape
    if a.dtype != b.dtype or rows_b != k:
        raise ValueError(f"gemm: {a.dtype} {m} x {k} by {b.dtype} {rows_b} x {n}")
    if out is None:
        if accumulate:
            raise ValueError("gemm: nothing to accumulate into; give out=")
        out = cupy.ndarray((m, n), a.dtype)
    elif out.shape != (m, n) or (out.dtype != a.dtype and (type_code(a.dtype), out.dtype) != (14, FLOAT32)):
        raise ValueError(f"gemm: out is {out.dtype} {out.shape}, expected {(m, n)} of {a.dtype}")
    if m == 0 or n == 0:
        return out
    if k == 0:
        if not accumulate:
            out.fill(0)
        return out
    kind = FLOAT64 if a.dtype == FLOAT64 else FLOAT32
    compute = COMPUTE_64F if kind is FLOAT64 else COMPUTE_32F
    if tf32 and a.dtype == FLOAT32:
        compute = COMPUTE_TF32
    alpha, beta = ONE[kind], (ONE if accumulate else ZERO)[kind]
    if scale != 1.0 or keep != 1.0:
        numbers = np.array([scale, keep if accumulate else 0.0], kind)  # alive until gemmEx has read them
        alpha, beta = numbers.ctypes.data, numbers[1:].ctypes.data
    # cuBLAS is column-major. A row-major matrix is its transpose there, and (a b)^T = b^T a^T: the factors swap places
    # and each keeps its own flag.
    _gemm_ex(
        device.get_cublas_handle(),
        TRANSPOSE if transpose_b else NO,
        TRANSPOSE if transpose_a else NO,
        n,
        m,
        k,
        alpha,
        pointer(b),
        type_code(b.dtype),
        leading(b),
        pointer(a),
        type_code(a.dtype),
        leading(a),
        beta,
        pointer(out),
        type_code(out.dtype),
        leading(out),
        compute,
        _DEFAULT_ALGORITHM,
    )
    return out


def leading(x: Array) -> int:
    """The distance between rows, in elements."""
    if x.ndim != 2:
        raise ValueError(f"gemm: an array of {x.ndim} axes, expected 2")
    rows, columns = x.shape
    step, inner = x.strides
    if (columns > 1 and inner != x.itemsize) or (rows > 1 and (step < columns * x.itemsize or step % x.itemsize)):
        raise ValueError(f"gemm: {x.dtype} of shape {x.shape} with strides {x.strides}; rows must be contiguous")
    return step // x.itemsize if rows > 1 else max(1, columns)
