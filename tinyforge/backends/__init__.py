"""Backends: where arrays live and which function runs under each kernel's name.

A backend is an array module (`xp`), a dtype policy and one table from kernel names to functions. An op names the
kernels it needs when it is built, and `bind` refuses there and then what the backend lacks. The same name has the
same signature on every backend; a second backend is a second column of the table, and no op, model or recipe changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tinyforge.errors import UserError


@dataclass(frozen=True)
class Precision:
    """How numbers are kept: `storage` for activations and gradients, on the backends named."""

    name: str
    storage: str
    backends: tuple[str, ...]
    meaning: str


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp64", "float64", ("numpy",), "float64 everywhere: for checking"),
        Precision("fp32", "float32", ("numpy",), "float32 everywhere"),
    )
}

KERNELS: dict[str, dict[str, Callable[..., Any]]] = {"numpy": {}}
"""The table: KERNELS[backend][kernel name] is the function. Filled by the decorators in the ops' own files."""


class Backend:
    """An array module, a precision and a column of the kernel table.

    workers: how many shards of a batch may run at once (processes on a CPU, one on a GPU).
    """

    name: str
    xp: Any
    recomputes: bool = False
    """Whether models make cheap activations again in backward instead of keeping them: for a GPU's small memory."""

    def __init__(self, precision: str, workers: int) -> None:
        policy = PRECISIONS.get(precision)
        if policy is None or self.name not in policy.backends:
            known = ", ".join(p.name for p in PRECISIONS.values() if self.name in p.backends)
            raise UserError(f"precision {precision!r} is not available on backend {self.name}; use one of: {known}")
        self.precision = policy
        self.dtype = np.dtype(policy.storage)
        self.workers = workers

    def bind(self, owner: str, names: tuple[str, ...]) -> SimpleNamespace:
        """The kernels called `names`; an op with no kernel on this backend learns it here, when it is built."""
        table = KERNELS[self.name]
        missing = [n for n in names if n not in table]
        if missing:
            raise UserError(f"{owner}: backend {self.name} has no kernel {', '.join(missing)}; use --backend numpy")
        return SimpleNamespace(**{n: table[n] for n in names})

    def empty(self, shape: tuple[int, ...]) -> Any:
        return self.xp.empty(shape, self.dtype)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.xp.zeros(shape, self.dtype)

    def shared_zeros(self, shape: tuple[int, ...]) -> Any:
        """Zeros that the backend's workers see too: for parameters and gradients."""
        return self.zeros(shape)

    def asarray(self, array: Any) -> Any:
        """`array` on this backend: floats in its dtype, integers as int32."""
        kind = np.asarray(array).dtype.kind
        return self.xp.asarray(array, dtype=self.dtype if kind == "f" else np.int32)

    def to_numpy(self, array: Any) -> np.ndarray:
        raise NotImplementedError

    def map(self, function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        """function over items on `workers` threads; results in the order of the items."""
        raise NotImplementedError


def kernel(backend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: enter a function in the table under its own name."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        for other, table in KERNELS.items():
            if name in table and inspect.signature(table[name]) != inspect.signature(function):
                raise TypeError(f"kernel {name}: {backend} and {other} disagree on its signature")
        KERNELS[backend][name] = function
        return function

    return enter


@contextmanager
def override(backend: str, **replacements: Callable[..., Any]) -> Iterator[None]:
    """Replace kernels for ops built inside the block: how tests seed faults that the gradient checker must catch."""
    table = KERNELS[backend]
    saved = {name: table[name] for name in replacements}
    table.update(replacements)
    try:
        yield
    finally:
        table.update(saved)


def get_backend(name: str = "auto", precision: str = "fp32", workers: int | None = None) -> Backend:
    """The backend called `name`; `auto` takes the best that this machine has."""
    from tinyforge.backends.numpy_backend import NumpyBackend

    if name in ("auto", "numpy"):
        return NumpyBackend(precision, workers)
    raise UserError(f"unknown backend {name!r}; known: auto, numpy")
