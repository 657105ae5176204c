"""Backends: where arrays live, in which precision, and what the device can tell about itself.

A backend is an array module (`xp`) and a dtype policy. A kernel knows its own implementation on each backend, see
`tinyforge/kernel.py`; nothing here knows an op.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tinyforge.backends.workers import cpu_model
from tinyforge.errors import UserError, first_line
from tinyforge.report import count_of
from tinyforge.requirements import needs


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training step, and the backends that support it.

    storage: of activations, their gradients, and the weights as the ops read them. master: of the weights that the
    optimizer updates, its moments, parameter gradients, and row statistics that ops save.
    """

    name: str
    storage: str
    master: str
    backends: tuple[str, ...]
    meaning: str


IN_FP8 = "with some products of the blocks in FP8; NumPy rounds to FP8 in the same places and computes in float32"
PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp64", "float64", "float64", ("numpy", "cupy", "webgpu"), "float64 everywhere: for checking"),
        Precision("fp32", "float32", "float32", ("numpy", "cupy", "webgpu"), "float32 everywhere"),
        Precision("tf32", "float32", "float32", ("cupy",), "float32, matrix products by TF32 tensor cores"),
        Precision("bf16", "bfloat16", "float32", ("cupy",), "bf16 storage, sums and master weights in float32"),
        Precision("fp8", "bfloat16", "float32", ("numpy", "cupy"), f"as bf16, {IN_FP8}"),
    )
}


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype of that name; bfloat16 comes from ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise UserError("precisions bf16 and fp8 need the package ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(bfloat16)


def fp8_dtype(name: str) -> np.dtype:
    """float8_e4m3fn or float8_e5m2, of ml_dtypes."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise UserError("precision fp8 needs the package ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, name))


@cache
def wide(dtype: np.dtype) -> np.dtype:
    """The dtype of sums over arrays of `dtype`, and of row statistics: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


class Backend:
    """An array module and a precision.

    dtype, master_dtype: see `Precision`. workers: how many shards of a batch may run at once (processes on a CPU, one
    on a GPU). read_every: steps between two reads of the loss; each read waits for the device. blocks: partial sums of
    a reduction over a large array. group: the ranks that compute together, each with a backend of its own
    (`tinyforge.parallel.Group`); None for this process and its workers.
    """

    name: str
    xp: Any
    read_every: int = 1
    blocks: int = 1
    group: Any = None

    def __init__(self, precision: str, workers: int) -> None:
        policy = PRECISIONS.get(precision)
        if policy is None or self.name not in policy.backends:
            known = ", ".join(p.name for p in PRECISIONS.values() if self.name in p.backends)
            if policy:
                known += f", or --backend {policy.backends[0]}"
            raise UserError(f"precision {precision!r} is not available on backend {self.name}; use one of: {known}")
        self.precision = policy
        self.dtype, self.master_dtype = dtype_of(policy.storage), dtype_of(policy.master)
        self.workers = workers

    @property
    def fp8(self) -> bool:
        """Whether models use the ops with products in FP8 (ops/fp8_linear.py)."""
        return self.precision.name == "fp8"

    def empty(self, shape: tuple[int, ...]) -> Any:
        return self.xp.empty(shape, self.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> Any:
        return self.xp.zeros(shape, self.dtype if dtype is None else dtype)

    def shared_zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> Any:
        """Zeros that the backend's workers see too: for parameters and gradients."""
        return self.zeros(shape, dtype)

    def asarray(self, array: Any, dtype: np.dtype | None = None) -> Any:
        """`array` on this backend: as `dtype`, by default floats in the backend's and integers as int32."""
        if dtype is None:
            dtype = self.dtype if np.asarray(array).dtype.kind == "f" else np.dtype(np.int32)
        return self.xp.asarray(array, dtype=dtype)

    def put(self, array: Any, values: np.ndarray) -> None:
        """Copy a few kilobytes into a contiguous array of this backend, of the same dtype, without waiting for the
        device."""
        array[...] = values

    def table(self, shape: tuple[int, ...], make: Callable[[], np.ndarray]) -> Any:
        """make(), an array of that shape, in the master dtype. The meta backend does not call it."""
        return self.asarray(make(), self.master_dtype)

    def describe(self) -> str:
        """The device, for people."""
        return f"{cpu_model()}, {count_of(self.workers, 'worker')} (one a core unless --workers)"

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""

    def spare(self, count: int) -> None:
        """From now on leave `count` of a GPU's multiprocessors to kernels that run concurrently with the ops'."""

    def memory(self) -> dict[str, int]:
        """Bytes of the device's memory: used, held, free, total; empty for a device without memory of its own."""
        return {}

    def energy(self) -> float | None:
        """Joules that the device has used since an arbitrary start; None if it has no counter."""
        return None

    def graphs(self) -> Any:
        """Captures a function's launches, see `backends/graphs.py`. Raises UserError on a backend without launches."""
        raise UserError(
            f"--cuda-graph makes a CUDA graph of the step, and the backend is {self.name}; use --cuda-graph off"
        )

    def matmul_peak(self) -> float:
        """FLOP/s of large matrix products of random numbers, the best of a few rounds: measured, not looked up."""
        raise NotImplementedError

    def peak_of(self, product: Callable[[], Any], size: int, rounds: int, repeats: int = 1) -> float:
        """FLOP/s of a product of square matrices, the best of some rounds of `repeats` products each."""
        best = float("inf")
        for _ in range(rounds):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                product()
            self.synchronize()
            best = min(best, (time.perf_counter() - start) / repeats)
        return 2 * size**3 / best

    def to_numpy(self, array: Any) -> np.ndarray:
        raise NotImplementedError

    def map(self, function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        """function over items on `workers` threads, or one after the other; results in the order of the items."""
        return [function(item) for item in items]


def get_backend(
    name: str = "auto", precision: str = "fp32", workers: int | None = None, device: int | None = None
) -> Backend:
    """The backend called `name`; `auto` takes a GPU that CuPy finds. Recipes take one of WebGPU too: `automatic`.

    workers: for NumPy. device: the number of the GPU, for CuPy.
    """
    from tinyforge.backends.numpy_backend import NumpyBackend

    if name not in ("auto", "numpy", "cupy", "webgpu"):
        raise UserError(f"unknown backend {name!r}; known: auto, numpy, cupy, webgpu")
    if name == "auto":
        name = "cupy" if gpu_is_there() else "numpy"
    if name == "numpy":
        if device is not None:
            raise UserError(f"--device {device} is the number of a GPU, and the backend is numpy; leave out --device")
        return NumpyBackend(precision, workers)
    if name == "webgpu":
        return _webgpu(precision, device)
    if importlib.util.find_spec("cupy") is None:
        raise UserError(
            'backend cupy: CuPy is not installed; pip install "cupy-cuda13x[ctk]" ml_dtypes, or use --backend numpy'
        )
    try:
        from tinyforge.backends.cupy_backend import CupyBackend
    except ImportError as error:
        cause = first_line(error)
        raise UserError(
            f'backend cupy: CuPy does not load ({cause}); pip install --force-reinstall "cupy-cuda13x[ctk]", or use '
            "--backend numpy"
        ) from error
    return CupyBackend(precision, device)


def _webgpu(precision: str, device: int | None) -> Backend:
    if importlib.util.find_spec("wgpu") is None:
        raise UserError(f"{needs('backend webgpu', 'wgpu', 'webgpu')}, or use --backend numpy")
    from tinyforge.backends.webgpu import WebGPUBackend

    return WebGPUBackend(precision, device)


WITH_WGSL = ("nanoeuler", "gpt2", "llama")
"""Models whose every kernel is written for WebGPU; those of others would run on the host, one by one."""


def automatic(precision: str, model: str, ranks: int = 1) -> tuple[str, str]:
    """The backend that a run with `--backend auto` takes, and why. Never raises: it must work on any machine."""
    if gpu_is_there():
        return "cupy", "CuPy finds a GPU"
    if precision != "fp32" or model not in WITH_WGSL or ranks > 1 or importlib.util.find_spec("wgpu") is None:
        return "numpy", "CuPy finds no GPU"
    try:
        from tinyforge.backends.webgpu import adapters

        real = [adapter for adapter in adapters() if adapter.info["adapter_type"] in ("DiscreteGPU", "IntegratedGPU")]
    except Exception:  # a wgpu that does not load
        real = []
    return ("webgpu", "WebGPU finds a GPU") if real else ("numpy", "neither CuPy nor WebGPU finds a GPU")


def gpu_is_there() -> bool:
    """Whether CuPy is installed and finds a GPU. Never raises: `auto` must work on any machine."""
    return gpu_count() > 0


def gpu_count() -> int:
    """The number of GPUs that CuPy finds; 0 if it is not installed or does not load. --backend cupy says which."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # a CuPy that does not load, a driver that is too old
        return 0
