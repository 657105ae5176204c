"""The WebGPU backend: arrays on any GPU that `wgpu` reaches (Metal, Vulkan, DirectX), kernels in WGSL next to the ops.

`ops/rmsnorm.wgsl` holds the kernels, `ops/rmsnorm_webgpu.py` launches them, with the names and arguments of the NumPy
bodies. The same text runs in a browser. A kernel without WGSL runs as its NumPy body on the host: correct, and slow.
Importing this module needs `wgpu`; making a `WebGPUBackend` needs an adapter.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache, lru_cache
from typing import Any

import numpy as np
import wgpu

from tinyforge.backends import Backend
from tinyforge.backends.webgpu_array import HostModule, WebArray, empty, told_on_host, upload
from tinyforge.backends.webgpu_device import Device
from tinyforge.errors import UserError


class WebGPUBackend(Backend):
    """Arrays on one adapter. read_every: as on CuPy, since reading the loss waits for the device."""

    name = "webgpu"
    read_every = 10

    def __init__(self, precision: str = "fp32", device: int | None = None) -> None:
        super().__init__(precision, workers=1)
        adapter = _adapter(device)
        features = [f for f in ("shader-f64", "shader-f16", "subgroup") if f in adapter.features]
        if precision == "fp64" and "shader-f64" not in features:
            raise UserError(
                f"--precision fp64: the adapter {described(adapter)} has no 64-bit floats; use --backend "
                "numpy to check gradients"
            )
        self.device = _device(adapter.info["device"], adapter.info["backend_type"], tuple(features), device or 0)
        self.xp = HostModule(self.device)

    def empty(self, shape: tuple[int, ...]) -> WebArray:
        return empty(self.device, shape, self.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> WebArray:
        made = empty(self.device, shape, self.dtype if dtype is None else dtype)
        made.fill(0)
        return made

    def asarray(self, array: Any, dtype: np.dtype | None = None) -> WebArray:
        if isinstance(array, WebArray):
            return array if dtype is None or array.dtype == dtype else array.astype(dtype)
        array = np.asarray(array)
        if dtype is None:
            dtype = self.dtype if array.dtype.kind == "f" else np.dtype(np.int32)
        return upload(self.device, array.astype(dtype, copy=False))

    def put(self, array: WebArray, values: np.ndarray) -> None:
        array.set(values)

    def to_numpy(self, array: Any) -> np.ndarray:
        return array.get() if isinstance(array, WebArray) else np.asarray(array)

    def synchronize(self) -> None:
        self.device.wait()

    def describe(self) -> str:
        return f"{described(self.device.adapter)}, WebGPU"

    def memory(self) -> dict[str, int]:
        return {"used": self.device.used, "held": self.device.held}

    def matmul_peak(self, size: int = 1024, rounds: int = 3) -> float:
        from tinyforge.backends.webgpu_gemm import gemm

        a: Any = self.asarray(np.random.default_rng(0).standard_normal((size, size), np.float32))
        return self.peak_of(lambda: gemm(a, a), size, rounds)

    derived = staticmethod(told_on_host)


@cache
def adapters() -> list[Any]:
    """The adapters, those that are not software first. OpenGL is left out: it has fewer limits, and needs a display."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # without it Vulkan's loader complains on stderr
    found = [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] != "OpenGL"]
    return sorted(found, key=lambda a: {"DiscreteGPU": 0, "IntegratedGPU": 1}.get(a.info["adapter_type"], 2))


def _adapter(number: int | None) -> Any:
    found = adapters()
    if not found:
        raise UserError(
            "backend webgpu: no adapter is here; install a driver with Vulkan (on Linux without a GPU: apt-get install "
            "mesa-vulkan-drivers), or use --backend numpy"
        )
    if number is not None and not 0 <= number < len(found):
        raise UserError(f"--device is {number}, adapters are 0 to {len(found) - 1}")
    return found[number or 0]


def described(adapter: Any) -> str:
    """An adapter for people: "llvmpipe (LLVM 15.0.6, 256 bits) (Vulkan)"."""
    return f"{adapter.info['device']} ({adapter.info['backend_type']})"


@lru_cache(8)
def _device(name: str, kind: str, features: tuple[str, ...], number: int) -> Device:
    """One device for all backends of a process."""
    return Device(_adapter(number), features)
