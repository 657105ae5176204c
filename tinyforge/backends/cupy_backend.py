"""The CuPy backend: arrays in the memory of one GPU, kernels of our own in CUDA (the .cu files next to the ops).

A kernel is launched by a function with the same name and arguments as its NumPy body, in a file next to the op:
`ops/rmsnorm_cuda.py` launches `ops/rmsnorm.cu`. Here is what they share: the storage type as a macro, how wide an
access may be, how many blocks a launch takes. Launches return at once; nothing here waits for the device except
`to_numpy`. Importing this module needs CuPy; making a `CupyBackend` needs a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.compile import INSTALL, load, warm_up, warm_up_wanted
from tinyforge.backends.cublas import gemm, use_processors
from tinyforge.errors import UserError
from tinyforge.kernel import Array, pointer

if TYPE_CHECKING:
    from tinyforge.backends.graphs import Graphs

FLOAT64 = np.dtype(np.float64)
_SCALARS = {"float64": "double", "float32": "float", "bfloat16": "bf16"}
_MAX_BLOCKS = 2**31 - 1


def new(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """An uninitialised array. A launch costs Python about ten microseconds, and cupy.empty would add to that."""
    return cupy.ndarray(shape, dtype)


@cache
def scalar(dtype: np.dtype) -> str:
    """The macro SCALAR for arrays of this dtype."""
    name = _SCALARS.get(dtype.name)
    if name is None:
        raise TypeError(f"no kernel for arrays of {dtype}; use float64, float32 or bfloat16")
    return name


def contiguous(x: Array) -> Array:
    """x itself, or a C-contiguous copy: kernels get an address and no strides."""
    return x if x.flags.c_contiguous else cupy.ascontiguousarray(x)


def or_null(x: Array | None) -> Any:
    """x, or the null pointer."""
    return np.uintp(0) if x is None else x


def key_arguments(key: Any) -> tuple[Any, np.uint32, np.uint32]:
    """The arguments of a kernel that draws random numbers: the address of the key's words, and the words themselves
    where that is null."""
    if isinstance(key, tuple):
        return np.uintp(0), np.uint32(key[0]), np.uint32(key[1])
    return key, np.uint32(0), np.uint32(0)


def vector(width: int, *arrays: Array) -> int:
    """Elements of a 16-byte access if rows of `width` and all addresses allow it, else 1. First array: storage."""
    count = 16 // arrays[0].itemsize
    return count if width % count == 0 and all(pointer(a) % 16 == 0 for a in arrays) else 1


def blocks(threads: int, per_block: int = 256) -> tuple[int]:
    """The grid for so many threads."""
    if threads > _MAX_BLOCKS:
        raise ValueError(f"{threads} threads in one launch, at most {_MAX_BLOCKS}; use a smaller batch")
    return (-(-threads // per_block),)


@cache
def processors() -> int:
    """Multiprocessors of the device."""
    return cupy.cuda.Device().attributes["MultiProcessorCount"]


_spared = 0


def free_processors() -> int:
    """Multiprocessors that a persistent kernel may fill: all but those that `CupyBackend.spare` leaves to others."""
    return processors() - _spared


@cache
def has_wgmma() -> bool:
    """Whether the device is a Hopper: kernels for sm_90a run there and nowhere else."""
    return bool(cupy.cuda.Device().compute_capability == "90")


@cache
def shared_limit(resident: int = 1) -> int:
    """Bytes of shared memory that a block may use if `resident` of them are to run on a multiprocessor at a time."""
    device = cupy.cuda.Device().attributes
    each = device["MaxSharedMemoryPerMultiprocessor"] // resident - device["ReservedSharedMemoryPerBlock"]
    return int(min(device["MaxSharedMemoryPerBlockOptin"], each))


def add_columns(out: Array, second: Array | None, partial: Array, third: Array | None = None) -> None:
    """out += the sum over the rows of partial, in a fixed order; columns past out's size go to `second`, and the last
    ones to `third`, if given."""
    count, columns = partial.shape
    launch = load("ops/columns.cu", "add_columns", SCALAR=scalar(partial.dtype))
    numbers = map(np.int32, (count, columns, out.size, columns - (0 if third is None else third.size)))
    launch(blocks(columns, 32), (32, 32), (out, or_null(second), or_null(third), partial, *numbers))


class CupyBackend(Backend):
    """CuPy arrays on the GPU number `device` (as CUDA counts the visible ones), used by this process alone."""

    name = "cupy"
    xp = cupy
    read_every = 10
    repeats = False  # set by `graphs.Graphs` while it captures launches that will be replayed with other data

    def __init__(self, precision: str = "fp32", device: int | None = None) -> None:
        super().__init__(precision, workers=1)
        if importlib.util.find_spec("ml_dtypes") is None:
            raise UserError("backend cupy: the package ml_dtypes is missing; pip install ml_dtypes")
        self.device = cupy.cuda.Device(_usable_device(device))
        self.device.use()
        if self.fp8 and not has_wgmma():
            raise UserError(
                f"--precision fp8 needs a Hopper GPU (compute capability 9.0), and GPU {self.device.id} has "
                f"{'.'.join(self.device.compute_capability)}; use --precision bf16"
            )
        self.blocks = 4 * processors()
        if warm_up_wanted():
            warm_up()

    @property
    def tf32(self) -> bool:
        """Whether products of float32 may round their factors to TF32."""
        return self.precision.name == "tf32"

    def asarray(self, array: Any, dtype: np.dtype | None = None) -> Array:
        """See `Backend`; a NumPy array is copied through pinned memory, without waiting for the device."""
        if not isinstance(array, cupy.ndarray):
            array = np.asarray(array)
            self._check_upload(array)
        if dtype is None:
            dtype = self.dtype if array.dtype.kind in "fV" else np.dtype(np.int32)  # bf16 is of kind V
        return cupy.asarray(array.astype(dtype, copy=False))

    def put(self, array: Any, values: np.ndarray) -> None:
        self._check_upload(values)
        # CUDA copies what is in pageable memory before the call returns, so the caller may overwrite it at once.
        if array.shape != values.shape or array.dtype != values.dtype or not array.flags.c_contiguous:
            raise ValueError(f"put: {values.dtype} {values.shape} into {array.dtype} {array.shape}; expected the same")
        array.data.copy_from_host_async(values.ctypes.data, values.nbytes)

    def _check_upload(self, array: np.ndarray) -> None:
        if self.repeats:
            raise UserError(
                f"--cuda-graph: the step uploads {array.dtype} of shape {array.shape}, which a graph cannot repeat; "
                "use --cuda-graph off"
            )

    def to_numpy(self, array: Any) -> np.ndarray:
        """A NumPy array; bf16 as float32, which holds it exactly. Waits for the device."""
        host = cupy.asnumpy(array)
        return host.astype(np.float32) if host.dtype.name == "bfloat16" else host

    def synchronize(self) -> None:
        self.device.synchronize()

    def spare(self, count: int) -> None:
        """A kernel with one block per multiprocessor divides the work before it starts. If another kernel holds a few
        multiprocessors, the blocks that find no room start when the first ones end, and the kernel takes twice as long.

        With another number cuBLAS may sum in another order, and reductions have more or fewer partial sums; our own
        matrix products keep the same bits. The setting belongs to the process, not to this backend.
        """
        global _spared
        if count != _spared:
            _spared = count
            use_processors(free_processors() if count else 0)

    def describe(self) -> str:
        """The device, for people: "NVIDIA H200 (GPU 0), 140 GiB, CUDA 13.0"."""
        properties = cupy.cuda.runtime.getDeviceProperties(self.device.id)
        return (
            f"{properties['name'].decode()} (GPU {self.device.id}), {properties['totalGlobalMem'] / 2**30:.0f} GiB, "
            f"CUDA {_version(cupy.cuda.runtime.runtimeGetVersion())}"
        )

    def matmul_peak(self, size: int = 8192, rounds: int = 3) -> float:
        a = self.asarray(np.random.default_rng(0).standard_normal((size, size), np.float32))
        out = self.empty(a.shape)
        return self.peak_of(lambda: gemm(a, a, out, tf32=self.tf32), size, rounds, repeats=5)

    def energy(self) -> float | None:
        """NVML's counter, of the whole device, updated about ten times a second."""
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        bus = cupy.cuda.runtime.deviceGetPCIBusId(self.device.id).encode()
        faults = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(device))
            or nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules))
        )
        return None if faults else millijoules.value / 1e3

    def graphs(self) -> Graphs:
        from tinyforge.backends.graphs import Graphs

        return Graphs(self)

    def memory(self) -> dict[str, int]:
        """Bytes: `used` by arrays now, `held` by the pools (their peak and fragmentation), `free` and `total`."""
        free, total = cupy.cuda.runtime.memGetInfo()
        held = sum(pool.total_bytes() for pool in pools())
        return {"used": used_bytes(), "held": held, "free": free, "total": total}


other_pools: list[Any] = []
"""The pools of `Graphs` and of NCCL's windows. A plain list: `PeakMemory` goes through it at every allocation."""


def pools() -> list[Any]:
    """CuPy's own pool and the others."""
    return [cupy.get_default_memory_pool(), *other_pools]


def used_bytes() -> int:
    """Bytes used by arrays now, in all pools."""
    return sum(pool.used_bytes() for pool in pools())


class PeakMemory(cupy.cuda.MemoryHook):
    """Inside `with PeakMemory() as peak:`, peak.bytes is the most that arrays have used at once."""

    name = "PeakMemory"

    def __init__(self) -> None:
        super().__init__()
        self.bytes = used_bytes()

    def malloc_postprocess(self, **of_the_allocation: Any) -> None:
        self.bytes = max(self.bytes, used_bytes())


def _usable_device(expected: int | None) -> int:
    """The number of the GPU to use, or a UserError that says what is missing."""
    runtime = cupy.cuda.runtime
    driver, built_for = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        raise UserError("backend cupy: no NVIDIA driver is running here; install one, or use --backend numpy")
    if driver // 1000 < built_for // 1000:
        raise UserError(
            f"backend cupy: this CuPy is built for CUDA {_version(built_for)}, the driver supports "
            f"{_version(driver)}; update the driver, or {INSTALL.replace('13x', f'{driver // 1000}x')}"
        )
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise UserError(f"backend cupy: CUDA finds no GPU ({error}); use --backend numpy") from error
    if count == 0:
        raise UserError("backend cupy: no GPU is visible (see CUDA_VISIBLE_DEVICES); use --backend numpy")
    if expected is not None and not 0 <= expected < count:
        raise UserError(f"--device is {expected}, visible GPUs are 0 to {count - 1}")
    number = expected or 0
    major = runtime.getDeviceProperties(number)["major"]
    if major < 8:
        raise UserError(
            f"backend cupy: GPU {number} has compute capability {major}.x, the kernels want 8.0 (Ampere) or newer; "
            "choose another --device, or use --backend numpy"
        )
    return number


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
