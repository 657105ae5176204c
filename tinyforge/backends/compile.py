"""From a .cu file to a kernel: find it, specialise it by macros, compile it at first use.

A kernel is written once, over macros such as SCALAR (double, float, bf16) and VEC (elements of a 16-byte access), and
compiled by NVRTC for each combination that is asked for:

    load("ops/rmsnorm.cu", "rmsnorm_fwd", SCALAR="float", VEC=4)

A relative name is a file of this package. A kernel of your own is named by its full path, and may include both headers
that lie next to it and those of this package:

    load(Path(__file__).with_name("mine.cu"), "mine_fwd", SCALAR="float")

The combinations in use are listed in variants.py, so that all of them can be compiled ahead of time, and without a
GPU, to see that they build and how many registers they take.

CuPy caches compiled kernels on disk (~/.cupy/kernel_cache), under a hash of the source text. Headers
(`#include "ops/common.cuh"`) are pasted into that text, so a change in one of them changes the hash.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tinyforge.backends.variants import VARIANTS, Macros
from tinyforge.errors import UserError

FOLDERS = ("ops", "optim", "parallel", "infer/cuda")
INSTALL = 'pip install "cupy-cuda13x[ctk]" ml_dtypes'
OPTIONS = ("-std=c++17",)

_INCLUDE = re.compile(r'^#include "([\w/.]+\.cuh)"$', re.MULTILINE)

File = str | Path  # relative to the package, or the full path of a file outside it


class KernelError(RuntimeError):
    """A kernel that does not compile. The message names the file and the macros and has NVRTC's log."""


def kernel_files() -> list[str]:
    """Every .cu of the package, e.g. "ops/rmsnorm.cu"."""
    root = files("tinyforge")
    return sorted(f"{d}/{f.name}" for d in FOLDERS for f in root.joinpath(d).iterdir() if f.name.endswith(".cu"))


@cache
def read(file: File) -> str:
    """The text of a .cu file, headers pasted in; #line directives keep error positions right. Raises KernelError."""
    path = Path(file) if Path(file).is_absolute() else files("tinyforge").joinpath(str(file))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise KernelError(
            f"{_shown(file)} does not exist; a kernel outside tinyforge is named by its full path, "
            'Path(__file__).with_name("name.cu")'
        ) from error

    def paste(found: re.Match[str]) -> str:
        line = text.count("\n", 0, found.start()) + 2
        beside = Path(file).parent / found[1]
        header: File = beside if beside.is_absolute() and beside.is_file() else found[1]
        return f'#line 1 "{_shown(header)}"\n{read(header)}\n#line {line} "{_shown(file)}"'

    return _INCLUDE.sub(paste, text)


def _shown(file: File) -> str:
    """The file as messages name it."""
    return str(file) if Path(file).is_absolute() else f"tinyforge/{file}"


@cache
def specialise(file: File, macros: tuple[tuple[str, int | str], ...]) -> str:
    """The text that is compiled: the macros as #define lines, then the file."""
    defines = "".join(f"#define {name} {value}\n" for name, value in macros)
    return f'{defines}#line 1 "{_shown(file)}"\n{read(file)}'


def constant(file: File, name: str) -> int:
    """The number after `#define name` in a file: a launcher reads its kernel's constants instead of repeating them."""
    found = re.search(rf"^#define {name} (\d+)", read(file), re.MULTILINE)
    if found is None:
        raise KernelError(f"{_shown(file)} has no line `#define {name} <number>`")
    return int(found[1])


on_load: Callable[[str, float], None] | None = None
"""Called with each kernel that `load` has made ready and the seconds it took: a few milliseconds from CuPy's cache on
disk, about a second to compile. For progress displays."""


@cache
def load(
    file: File, entry: str, shared_bytes: int = 0, *, arch: str = "", cooperative: bool = False, **macros: int | str
) -> Any:
    """The kernel `entry` of a .cu file, as a cupy.RawKernel; compiled on the first call.

    shared_bytes: the dynamic shared memory of its launches; by default 48 KB, static shared memory included. arch:
    compile for this architecture, e.g. "sm_90a" for its special features, instead of the device's own. cooperative:
    the blocks wait for each other, so launching more than the device runs at once is an error.
    """
    import cupy

    start = time.perf_counter()
    code = specialise(file, tuple(sorted(macros.items())))
    options = OPTIONS + ((f"-arch={arch}",) if arch else ())
    kernel = cupy.RawKernel(code, entry, options=options, enable_cooperative_groups=cooperative)
    try:
        kernel.compile()
        # CuPy shares one function among kernels of the same text: never lower the limit that another launch has set.
        if shared_bytes > kernel.max_dynamic_shared_size_bytes:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"{describe(file, macros)} does not compile:\n{error.get_message()}") from error
    except RuntimeError as error:
        if "nvrtc" in str(error).lower() and "load" in str(error).lower():
            raise UserError(f"NVRTC, CUDA's runtime compiler, is not found: {INSTALL}") from error
        raise KernelError(f"{describe(file, macros)}, kernel {entry}: {error}") from error
    if on_load is not None:
        on_load(f"{entry} of {describe(file, macros)}", time.perf_counter() - start)
    return kernel


def describe(file: File, macros: Macros) -> str:
    """ "tinyforge/ops/rmsnorm.cu with SCALAR=float VEC=4"."""
    return f"{_shown(file)} with {' '.join(f'{k}={v}' for k, v in macros.items()) or 'no macros'}"


def warm_up() -> int:
    """Compile every variant for this device now; returns how many. TINYFORGE_WARMUP=1 does it at start-up."""
    import cupy

    count, capability = 0, cupy.cuda.Device().compute_capability
    for file, variants in VARIANTS.items():
        for variant in variants:
            macros, arch = _without_arch(variant)
            if arch in ("", f"sm_{capability}a"):
                options = OPTIONS + ((f"-arch={arch}",) if arch else ())
                cupy.RawModule(code=specialise(file, tuple(sorted(macros.items()))), options=options).compile()
                count += 1
    return count


def _without_arch(variant: Macros) -> tuple[dict[str, int | str], str]:
    """The macros of a variant, and its architecture, "" for any."""
    macros = dict(variant)
    return macros, str(macros.pop("arch", ""))


def warm_up_wanted() -> bool:
    return os.environ.get("TINYFORGE_WARMUP", "") not in ("", "0")


def compile_to_cubin(file: File, macros: Macros, arch: str) -> str:
    """Compile for `arch` ("sm_80") without a GPU; returns the log, with each kernel's registers and spills. A file that
    the package does not have is looked for in the current folder."""
    from cupy_backends.cuda.libs import nvrtc

    if not files("tinyforge").joinpath(str(file)).is_file() and Path(file).is_file():
        file = Path(file).absolute()
    macros, own_arch = _without_arch(macros)
    arch = own_arch or arch
    code = specialise(file, tuple(sorted(macros.items())))
    # The options of CuPy, and the report of the assembler.
    options = (*OPTIONS, f"-arch={arch}", "-ftz=true", "--ptxas-options=-v", f"-I{_headers()}")
    program = nvrtc.createProgram(code, str(file), (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelError(f"{describe(file, macros)} does not compile for {arch}:\n{log}") from error
        return nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def _headers() -> str:
    """The folder of CUDA's own headers, such as cuda_bf16.h."""
    from cuda import pathfinder

    return pathfinder.find_nvidia_header_directory("cudart") or "."
