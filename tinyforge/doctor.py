"""Check this machine for tinyforge: what is installed, what is missing, and the command that installs it.

    python -m tinyforge.doctor
    python -m tinyforge.doctor --report     with what each GPU of WebGPU computes, to paste into an issue

Exit status 0 when training on the CPU works. A GPU is optional, and so is DuckDB, which only data/ uses.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyforge.backends import WITH_WGSL, automatic
from tinyforge.backends.compile import INSTALL
from tinyforge.backends.machine_code import missing
from tinyforge.backends.numpy_backend import KERNELS, blas_kernels
from tinyforge.backends.workers import cores
from tinyforge.errors import Parser, UserError, first_line, run_command
from tinyforge.requirements import CORE, OLDEST_PYTHON, needs, version_of

OLDEST_COMPUTE = 80  # bf16 tensor cores and asynchronous copies: sm_80, Ampere


@dataclass(frozen=True)
class Finding:
    """One line of the report. ok: None if it is missing but training on the CPU does not need it. fix: what to type."""

    what: str
    found: str
    ok: bool | None = True
    fix: str = ""

    def __str__(self) -> str:
        mark = {True: "ok", False: "MISSING", None: "-"}[self.ok]
        return f"{mark:<8} {self.what:<12} {self.found}" + (f"  ->  {self.fix}" if self.fix else "")


def cpu() -> list[Finding]:
    """Python, NumPy with its BLAS, the packages that training needs, and DuckDB, which only making a corpus needs."""
    python = sys.version_info[:2] >= OLDEST_PYTHON
    expected = ".".join(map(str, OLDEST_PYTHON))
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return [
        Finding("Python", platform.python_version(), python, "" if python else f"install Python {expected} or newer"),
        Finding("NumPy", f"{np.__version__}, BLAS {blas.get('name', 'unknown')} {blas.get('version', '')}".rstrip()),
        *kernels(),
        Finding("cores", f"{cores()}, the default of --workers"),
        *(package_found(package) for package in CORE if package not in ("numpy", "duckdb")),
        compiled_kernels(),
        package_found("duckdb", "DuckDB", "not installed; only the commands in data/ need it", missing=None),
    ]


def compiled_kernels() -> Finding:
    """Whose kernels decode and train on the CPU, and why."""
    reason, _, fix = missing().partition(": ")
    if reason:
        return Finding("CPU kernels", f"NumPy's: {reason}", None, fix)
    return Finding("CPU kernels", f"compiled by numba {version_of('numba')}")


def package_found(
    package: str, title: str = "", without: str = "not installed", missing: bool | None = False
) -> Finding:
    """title: its name here, the package's unless given. without: what it says if the package is missing. missing: `ok`
    then."""
    if version := version_of(package):
        return Finding(title or package, version)
    return Finding(title or package, without, missing, f"pip install {package}")


def kernels() -> list[Finding]:
    """Which CPU OpenBLAS's kernels are for; nothing for another BLAS."""
    found = blas_kernels()
    if not found:
        return []
    if KERNELS not in os.environ:
        return [Finding("BLAS kernels", f"{found}, chosen by OpenBLAS")]
    fix = f"unset {KERNELS}: those that OpenBLAS chooses by the CPU can be twice as fast"
    return [Finding("BLAS kernels", f"{found}, set by {KERNELS}", None, fix)]


def gpu() -> list[Finding]:
    """CuPy, the driver and the GPUs, as far as each can be asked."""
    installed = [(d.metadata["Name"] or "").lower() for d in importlib.metadata.distributions()]
    builds = sorted(name for name in installed if name.startswith("cupy"))
    if not builds:
        return [Finding("CuPy", "not installed; only a GPU needs it", None, INSTALL)]
    if len(set(builds)) > 1:
        fix = f"pip uninstall {' '.join(builds)}, then {INSTALL}"
        return [Finding("CuPy", f"several builds: {', '.join(builds)}", False, fix)]
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError as error:
        return [Finding("CuPy", f"cannot be imported: {first_line(error)}", False, f"{INSTALL} again")]
    findings = [Finding("CuPy", f"{cupy.__version__} ({builds[0]})")]
    findings.append(package_found("ml_dtypes", without="not installed; bf16 needs it"))
    try:
        major, minor = cupy.cuda.nvrtc.getVersion()
        findings.append(Finding("NVRTC", f"{major}.{minor}"))
    except Exception as error:  # the type depends on how CuPy loads the library
        cause = f"cannot be loaded: {type(error).__name__}"
        findings.append(Finding("NVRTC", cause, False, 'pip install "cupy-cuda13x[ctk]"'))
    runtime = cupy.cuda.runtime
    try:
        driver, count = runtime.driverGetVersion(), runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        fix = "install NVIDIA's driver, or train on the CPU"
        return [*findings, Finding("GPU", f"none that CUDA can use ({error})", None, fix)]
    built = runtime.runtimeGetVersion()
    old = driver < built // 1000 * 1000  # a driver runs every minor version of its own major one
    versions = f"for CUDA {_dotted(driver)}; CuPy is built for {_dotted(built)}"
    fix = "update NVIDIA's driver, or install CuPy for its CUDA" if old else ""
    findings.append(Finding("driver", versions, not old, fix))
    for i in range(count):
        p = runtime.getDeviceProperties(i)
        compute = p["major"] * 10 + p["minor"]
        name, memory = p["name"].decode(), p["totalGlobalMem"] / (1 << 30)
        young = compute >= OLDEST_COMPUTE
        fix = "" if young else f"bf16 kernels want sm_{OLDEST_COMPUTE}; use --precision fp32"
        findings.append(Finding(f"GPU {i}", f"{name}, {memory:.0f} GiB, sm_{compute}", True if young else None, fix))
    return findings


def webgpu() -> list[Finding]:
    """The adapters of WebGPU: any GPU, or one in software."""
    if version_of("wgpu") is None:
        return [Finding("WebGPU", "not installed; any GPU by --backend webgpu", None, "pip install wgpu")]
    try:
        from tinyforge.backends.webgpu import adapters, described

        found = [described(adapter) for adapter in adapters()]
    except (ImportError, RuntimeError) as error:
        return [Finding("WebGPU", f"wgpu does not load: {error}", None, "pip install --force-reinstall wgpu")]
    if not found:
        return [Finding("WebGPU", "no adapter", None, "install your GPU's driver with Vulkan")]
    return [Finding(f"WebGPU {i}", text) for i, text in enumerate(found)]


def report() -> list[str]:
    """What the adapters are, have and compute: for an issue on hardware that nobody here has."""
    from tinyforge.backends.webgpu import WebGPUBackend, adapters
    from tinyforge.backends.webgpu_gemm import gemm

    lines = [f"tinyforge {version_of('tinyforge')}, wgpu {version_of('wgpu')}, {platform.platform()}"]
    for number, adapter in enumerate(adapters()):
        usable = sorted({"shader-f64", "shader-f16", "subgroup"} & set(adapter.features))
        told = ", ".join(f"{key} {value}" for key, value in adapter.info.items() if value)
        lines.append(f"adapter {number}: {told}; features: {', '.join(usable)}")
        try:
            backend = WebGPUBackend("fp32", number)
            x = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
            device: Any = backend.asarray(x)
            found = backend.to_numpy(gemm(device, device))
            error = float(np.abs(found - x.astype(float) @ x).max())
            lines.append(f"  products: off by {error:.1e} (1e-4 is well), {backend.matmul_peak() / 1e9:,.0f} GFLOP/s")
        except Exception as problem:  # whatever a driver raises is what the report is for
            lines.append(f"  {type(problem).__name__}: {problem}")
    return lines


def _dotted(version: int) -> str:
    """CUDA's 13020 as 13.2."""
    return f"{version // 1000}.{version % 1000 // 10}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tinyforge.doctor", description=(__doc__ or "").split("\n")[0])
    parser.flag("--report", False, "also what the adapters of WebGPU compute, for an issue")
    args = parser.parse_args(argv)
    needed, extra = cpu(), gpu()
    print("\n".join(map(str, [*needed, *extra, *webgpu()])))
    works = all(f.ok is not False for f in needed)
    on_gpu = works and all(f.ok for f in extra)
    print(f"\ntraining on the CPU: {'works' if works else 'see above'}; on a GPU: {'works' if on_gpu else 'see above'}")
    name, why = automatic("fp32", WITH_WGSL[0])
    print(f"--backend auto takes {name} to train a language model: {why}")
    if args.report:
        if version_of("wgpu") is None:
            raise UserError(needs("--report", "wgpu", "webgpu"))
        print("\n```", *report(), "```", sep="\n")
    return 0 if works else 1


if __name__ == "__main__":
    run_command(main)
