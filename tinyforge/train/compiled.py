"""The choice of a training run's kernels on a CPU: those that numba compiles, or NumPy's."""

from __future__ import annotations

import sys
from importlib import import_module

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.machine_code import missing
from tinyforge.errors import UserError, first_line

CHOICES = "auto", "numba", "numpy"
PACKAGES = "tinyforge.ops", "tinyforge.optim"


def choose_kernels(backend: Backend, asked: str) -> str:
    """Make a NumPy backend `compiled`, or not; returns "numba" or "numpy", and `asked` for another backend.

    `auto` takes numba for float32 where it is installed and works: its result does not depend on what the cache holds,
    so that a run can be repeated. The code is loaded here, before workers are forked. Raises UserError if numba is
    asked for, as by --resume of a run that has used it, and cannot be used.
    """
    if backend.name != "numpy" or asked == "numpy":
        return asked
    reason = missing() or ("" if asked == "numba" or backend.precision.name == "fp32" else "fp32 alone is compiled")
    if not reason:
        try:
            for package in PACKAGES:
                import_module(f"{package}.compiled").library.load(np.dtype(backend.dtype).name)
        except Exception as error:  # numba's and LLVM's own, for a NumPy or a CPU that they do not know
            reason = f"numba fails: {first_line(error)}"
            if asked == "auto":
                print(f"note: training with NumPy's kernels: {reason}", file=sys.stderr)
    if reason and asked == "numba":
        raise UserError(
            f"--cpu-kernels numba: {reason}; or use --cpu-kernels numpy, whose results differ in their last bits"
        )
    backend.compiled = not reason  # type: ignore[attr-defined]
    return "numpy" if reason else "numba"
