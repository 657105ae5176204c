"""Machine code for this CPU: compiled by numba once, kept in the user's cache folder, called by ctypes.

numba takes half a second to import and some seconds to compile, so its result is kept as an object file. llvmlite, the
part of numba that links it, loads in a tenth of that. The file's name has a digest of all that the code depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.requirements import version_of, what_brings

KEPT = 4
"""Files that are kept of the same types, the newest."""
OLDEST = (0, 62)
"""The first numba whose LLVM has untyped pointers, as the kernels' names of intrinsics take for granted."""
PANEL_BYTES = 128
"""A row of a panel: numbers of as many positions, which the kernels take together."""
INSTRUCTIONS = Path(__file__).with_name("instructions.py")
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
    try:
        return (Path(home) if home else Path.home() / ".cache") / "tinyforge" / "kernels"
    except RuntimeError:  # a user without a home, as in a container: nothing is kept
        return Path(os.devnull, "kernels")


def missing() -> str:
    """Why no code can be made here; "" where it can."""
    if (version := version_of("numba")) is None:
        return f"numba is not installed: pip install {what_brings('fast')}"
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"numba {version} is too old: pip install --upgrade numba"
    return ""


def digest(sources: Sequence[Path], *rest: str) -> str:
    """Of the sources of the code, this CPU, the versions of numba and llvmlite, and the rest."""
    from llvmlite import binding

    read = [source.read_bytes() for source in sources]
    cpu = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite")]
    return hashlib.sha256(repr((read, cpu, versions, *rest)).encode()).hexdigest()


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
        with tempfile.TemporaryDirectory(dir=path.parent) as place:  # removed with what a full disk has left in it
            new = Path(place, path.name)
            new.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(new, path)
        # Of other versions and CPUs: a home may be shared between machines.
        others = sorted(path.parent.glob(f"{path.name.rpartition('-')[0]}-*.o"), key=lambda p: -p.stat().st_mtime_ns)
        for old in others[KEPT:]:
            old.unlink()


def link(stem: str, digest: str, build: Callable[[], bytes]) -> Callable[[str], Callable[..., int]]:
    """From a function's name to the function, of the object file that was kept under stem and digest, or is built now
    and kept. The arguments are pointers unless they have a type of ctypes.

    Raises whatever numba or llvmlite raises where they do not work.
    """
    from llvmlite import binding

    path = folder() / f"{stem}-{digest[:32]}.o"
    code = _kept(path)
    if not code:
        code = build()
        _keep(path, code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    # numba's own convention: places for a result and an exception, of which there are none, then the arguments.
    unused = (ctypes.c_void_p * 2)()
    places = ctypes.c_void_p(ctypes.addressof(unused)), ctypes.c_void_p(ctypes.addressof(unused) + 8)
    _engines.append(unused)

    def function(name: str) -> Callable[..., int]:
        return partial(ctypes.CFUNCTYPE(ctypes.c_int32)(engine.get_function_address(name)), *places)

    return function


class Library:
    """The functions of a module of numba's sources, by name, for arrays of float32 and of float64.

    The module's `kernels_of(real)` returns functions whose parameters are annotated with Reals, Words, Ints, int or
    float: arrays of the type `real`, of intp and of int32, an intp, and a number of the type `real`. A call takes
    arrays, of which the first tells the type, and numbers. The function gets an array's address alone: the caller
    passes a contiguous one, or its strides.
    """

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            real = arguments[0].dtype.name
            number = ctypes.c_float if real == "float32" else ctypes.c_double
            self.load(real)(name)(*(_argument(value, number) for value in arguments))

        setattr(self, name, call)
        return call

    @cache  # noqa: B019  libraries live as long as their modules
    def load(self, real: str) -> Callable[[str], Callable[..., int]]:
        """The functions for arrays of this type: from the cache, or compiled, which takes some seconds."""
        spec = importlib.util.find_spec(self.module)
        assert spec is not None and spec.origin is not None
        stem = f"{self.module.removeprefix('tinyforge.').replace('.', '-')}-{real}"

        def build() -> bytes:
            from tinyforge.backends.instructions import emit, real_of

            note = f"compiling {self.module} for {real}, which later runs find on disk; this can take 15 s"
            print(note, file=sys.stderr, flush=True)  # a benchmark's JSON goes to stdout
            code: bytes = emit(importlib.import_module(self.module).kernels_of(real_of(real)), real_of(real))
            return code

        return cache(link(stem, digest([Path(spec.origin), INSTRUCTIONS], real), build))


def _argument(value: Any, number: Any) -> Any:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_ssize_t(value) if isinstance(value, int) else number(value)
