"""Machine code for this CPU: the pass of `CompiledDecoder`, from a cache or compiled by numba.

numba takes half a second to import and some seconds to compile, so its result is kept as an object file. llvmlite, the
part of numba that links it, loads in a tenth of that. The file's name has a digest of all that the code depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import sys
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from tinyforge.requirements import what_brings

NAME = "tinyforge_pass"
KEPT = 4
"""Files that are kept of the same types, the newest."""
OLDEST = (0, 62)
"""The first numba whose LLVM has untyped pointers, as the kernels' names of intrinsics take for granted."""
PANEL_BYTES = 128
"""A row of a panel: numbers of as many positions of a prompt, which the kernels take together."""
KEYS_AT_ONCE = 120
"""Keys of a tile of attention for a prompt; a multiple of any tile's outputs."""
_engines: list[Any] = []  # each owns the memory of a function's code


def machine() -> Any:
    """LLVM's description of this CPU."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    return binding.Target.from_default_triple().create_target_machine(cpu, features, opt=3, jit=True)


def has_wide_vectors() -> bool:
    """Whether this CPU has 32 registers of 64 bytes, rather than 16 of 32 or what amounts to them."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("avx512f"))


def folder() -> Path:
    """Where machine code is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else None)
    return (Path(home) if home else Path.home() / ".cache") / "tinyforge" / "kernels"


def missing() -> str:
    """Why no code can be made here; "" where it can."""
    try:
        version = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        return f"numba is not installed: pip install {what_brings('fast')}"
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"numba {version} is too old: pip install --upgrade numba"
    return ""


def _digest(weight: str, real: str) -> str:
    from llvmlite import binding

    source = [
        Path(__file__).with_name(f"cpu_{name}.py").read_bytes() for name in ("instructions", "kernels", "prompts")
    ]
    cpu = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite")]
    return hashlib.sha256(repr((source, cpu, versions, weight, real)).encode()).hexdigest()


def _kept(path: Path) -> bytes:
    """The code in a file, b"" if there is none or it is damaged."""
    with suppress(OSError):
        held = path.read_bytes()
        if hashlib.sha256(held[32:]).digest() == held[:32]:
            return held[32:]
    return b""


def _keep(path: Path, code: bytes) -> None:
    with suppress(OSError):  # no place to write: the next process compiles again
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
        # Of other versions and CPUs: a home may be shared between machines.
        others = sorted(path.parent.glob(f"{path.name.rpartition('-')[0]}-*.o"), key=lambda p: -p.stat().st_mtime_ns)
        for old in others[KEPT:]:
            old.unlink()


@cache
def load(weight: str, real: str) -> Any:
    """The pass for weights and activations of these types, as a function of ctypes: see `cpu_kernels.forward`.

    Raises whatever numba or llvmlite raises where they do not work.
    """
    from llvmlite import binding

    path = folder() / f"{weight}-{real}-{_digest(weight, real)[:32]}.o"
    code = _kept(path)
    if not code:
        from tinyforge.infer.cpu_kernels import build

        code = build(weight, real)
        _keep(path, code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    # numba's own convention: places for a result and an exception, of which there are none, then the arguments.
    run = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4)(engine.get_function_address(NAME))
    unused = (ctypes.c_void_p * 2)()
    return partial(run, unused, ctypes.addressof(unused) + 8)
