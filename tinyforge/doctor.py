"""Check this machine for tinyforge: what is installed, what is missing, and the command that installs it.

    python -m tinyforge.doctor

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

from tinyforge.backends.compile import INSTALL
from tinyforge.backends.numpy_backend import KERNELS, blas_kernels
from tinyforge.backends.workers import cores
from tinyforge.errors import Parser, run_command

OLDEST_PYTHON = (3, 11)
OLDEST_COMPUTE = 80  # bf16 tensor cores and asynchronous copies: sm_80, Ampere
PACKAGES = ("tqdm", "safetensors", "matplotlib")


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


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu() -> list[Finding]:
    """Python, NumPy with its BLAS, the packages that training needs, and DuckDB, which only making a corpus needs."""
    python = sys.version_info[:2] >= OLDEST_PYTHON
    wanted = ".".join(map(str, OLDEST_PYTHON))
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    findings = [
        Finding("Python", platform.python_version(), python, "" if python else f"install Python {wanted} or newer"),
        Finding("NumPy", f"{np.__version__}, BLAS {blas.get('name', 'unknown')} {blas.get('version', '')}".rstrip()),
        *kernels(),
        Finding("cores", f"{cores()}, the default of --workers"),
    ]
    for package in PACKAGES:
        version = version_of(package)
        findings.append(
            Finding(package, version or "not installed", bool(version), "" if version else f"pip install {package}")
        )
    duckdb = version_of("duckdb")
    findings.append(
        Finding(
            "DuckDB",
            duckdb or "not installed; only the commands in data/ need it",
            True if duckdb else None,
            "" if duckdb else "pip install duckdb",
        )
    )
    return findings


def kernels() -> list[Finding]:
    """Which CPU OpenBLAS's kernels are for; nothing for another BLAS."""
    found = blas_kernels()
    if not found:
        return []
    if KERNELS not in os.environ:
        return [Finding("BLAS kernels", f"{found}, chosen by OpenBLAS")]
    return [
        Finding(
            "BLAS kernels",
            f"{found}, set by {KERNELS}",
            None,
            f"unset {KERNELS}: those that OpenBLAS chooses by the CPU can be twice as fast",
        )
    ]


def gpu() -> list[Finding]:
    """CuPy, the driver and the GPUs, as far as each can be asked."""
    builds = sorted(
        name
        for d in importlib.metadata.distributions()
        if (name := (d.metadata["Name"] or "").lower()).startswith("cupy")
    )
    if not builds:
        return [Finding("CuPy", "not installed; only a GPU needs it", None, INSTALL)]
    if len(set(builds)) > 1:
        return [
            Finding(
                "CuPy",
                f"several builds: {', '.join(builds)}",
                False,
                f"pip uninstall {' '.join(builds)}, then {INSTALL}",
            )
        ]
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        return [Finding("CuPy", f"cannot be imported: {reason}", False, f"{INSTALL} again")]
    findings = [Finding("CuPy", f"{cupy.__version__} ({builds[0]})")]
    ml_dtypes = version_of("ml_dtypes")
    findings.append(
        Finding(
            "ml_dtypes",
            ml_dtypes or "not installed; bf16 needs it",
            bool(ml_dtypes),
            "" if ml_dtypes else "pip install ml_dtypes",
        )
    )
    try:
        major, minor = cupy.cuda.nvrtc.getVersion()
        findings.append(Finding("NVRTC", f"{major}.{minor}"))
    except Exception as error:  # the type depends on how CuPy loads the library
        findings.append(
            Finding("NVRTC", f"cannot be loaded: {type(error).__name__}", False, 'pip install "cupy-cuda13x[ctk]"')
        )
    runtime = cupy.cuda.runtime
    try:
        driver, count = runtime.driverGetVersion(), runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return [
            *findings,
            Finding("GPU", f"none that CUDA can use ({error})", None, "install NVIDIA's driver, or train on the CPU"),
        ]
    built = runtime.runtimeGetVersion()
    old = driver < built // 1000 * 1000  # a driver runs every minor version of its own major one
    findings.append(
        Finding(
            "driver",
            f"for CUDA {_dotted(driver)}; CuPy is built for {_dotted(built)}",
            not old,
            "update NVIDIA's driver, or install CuPy for its CUDA" if old else "",
        )
    )
    for i in range(count):
        p = runtime.getDeviceProperties(i)
        compute = p["major"] * 10 + p["minor"]
        name, memory = p["name"].decode(), p["totalGlobalMem"] / (1 << 30)
        young = compute >= OLDEST_COMPUTE
        fix = "" if young else f"bf16 kernels want sm_{OLDEST_COMPUTE}; use --precision fp32"
        findings.append(Finding(f"GPU {i}", f"{name}, {memory:.0f} GiB, sm_{compute}", True if young else None, fix))
    return findings


def _dotted(version: int) -> str:
    """CUDA's 13020 as 13.2."""
    return f"{version // 1000}.{version % 1000 // 10}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tinyforge.doctor", description=(__doc__ or "").split("\n")[0])
    parser.parse_args(argv)
    needed, extra = cpu(), gpu()
    print("\n".join(map(str, [*needed, *extra])))
    works = all(f.ok is not False for f in needed)
    on_gpu = works and all(f.ok for f in extra)
    print(f"\ntraining on the CPU: {'works' if works else 'see above'}; on a GPU: {'works' if on_gpu else 'see above'}")
    return 0 if works else 1


if __name__ == "__main__":
    run_command(main)
