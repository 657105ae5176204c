"""Kernels: named functions over arrays, each with a NumPy body and an implementation on every other backend.

    @kernel                                 # in ops/rmsnorm.py: the NumPy body; the name becomes a Kernel
    def rmsnorm_fwd(x: Array, weight: Array, eps: float) -> tuple[Array, Array]: ...

    @rmsnorm_fwd.on("meta")              # beside it: what the CUDA launcher allocates
    def rmsnorm_fwd_memory(x): ...

    @rmsnorm.rmsnorm_fwd.on("cupy")         # in ops/rmsnorm_cuda.py: the CUDA launcher
    def rmsnorm_fwd(x, weight, eps): ...

All implementations take the same arguments in the same order: outputs, accumulators, inputs, saved, sizes, scalars.
On "meta", where nothing is computed, a function may name only the arguments that it reads. An implementation that
depends on its backend (its precision, say) takes it as the keyword-only argument `backend`; `bind` supplies it. If a
kernel has no CuPy implementation, the module beside its body, `<module>_cuda`, is imported to find one: an op of your
own works the same way, in your own package.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from tinyforge.errors import UserError

Array = Any
"""numpy.ndarray, cupy.ndarray or a meta array; ops work with each of them."""

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_NEIGHBOURS = {"cupy": "_cuda"}  # what the neighbour module's name ends with


class Bindable(Protocol):
    """The part of a backend that a kernel needs."""

    name: str


class Kernel(Generic[P, R]):
    """One function by name. Calling it runs the NumPy body; `bind` gives the implementation for a backend."""

    def __init__(self, body: Callable[P, R]) -> None:
        self.body = body
        self.name = body.__name__
        self.__doc__ = body.__doc__
        self._implementations: dict[str, Callable[..., Any]] = {"numpy": body}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.body(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<kernel {self.name} on {', '.join(self.backends())}>"

    def on(self, backend: str) -> Callable[[F], F]:
        """Decorator: the implementation on `backend`. Raises TypeError unless it takes the body's arguments ("meta":
        some of them); a keyword-only `backend` may come on top."""

        def register(function: F) -> F:
            mine, theirs = _arguments(self.body), _arguments(function)
            if mine == theirs:
                self._implementations[backend] = function
            elif backend == "meta" and set(theirs) <= set(mine) and not _wants_backend(function):
                self._implementations[backend] = self._given_what_it_reads(function)
            else:
                raise TypeError(
                    f"kernel {self.name}: on {backend} it takes ({', '.join(theirs)}), on numpy ({', '.join(mine)}); "
                    "give both the same arguments"
                )
            return function

        return register

    def _given_what_it_reads(self, function: Callable[..., R]) -> Callable[P, R]:
        """`function`, called with all of the body's arguments."""
        body, read = inspect.signature(self.body), inspect.signature(function).parameters

        def allocate(*args: P.args, **kwargs: P.kwargs) -> R:
            given = body.bind_partial(*args, **kwargs).arguments  # without `backend`
            return function(**{name: given[name] for name in read})

        return allocate

    def backends(self) -> list[str]:
        """The backends that have this kernel; its neighbour module is searched too where it can be imported."""
        for backend in _NEIGHBOURS:
            try:
                self._look_beside(backend)
            except ImportError:  # CuPy is not installed
                continue
        return sorted(self._implementations)

    def bind(self, backend: Bindable, owner: str = "") -> Callable[P, R]:
        """The implementation on `backend`. Raises UserError if there is none. owner: the op that asks."""
        self._look_beside(backend.name)
        function = self._implementations.get(backend.name)
        if function is None:
            fix = f'use --backend numpy, or write one: @{self.name}.on("{backend.name}")'
            if backend.name in _NEIGHBOURS:
                fix += f" in {self.body.__module__}{_NEIGHBOURS[backend.name]}"
            raise UserError(
                f"{owner + ': ' if owner else ''}kernel {self.name} has no implementation on backend {backend.name}, "
                f"only on {', '.join(self.backends())}; {fix}"
            )
        return partial(function, backend=backend) if _wants_backend(function) else function

    def _look_beside(self, backend: str) -> None:
        """Import the neighbour module that may hold the implementation."""
        if backend in self._implementations or backend not in _NEIGHBOURS:
            return
        module = self.body.__module__ + _NEIGHBOURS[backend]
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)


def kernel(body: Callable[P, R]) -> Kernel[P, R]:
    """Decorator: make a NumPy function a Kernel."""
    return Kernel(body)


def bind(kernels: Sequence[Kernel[..., Any]], backend: Bindable, owner: str) -> SimpleNamespace:
    """The implementations of `kernels` on `backend`, by name. Raises UserError if one is missing."""
    return SimpleNamespace(**{k.name: k.bind(backend, owner) for k in kernels})


@contextmanager
def override(target: Kernel[P, R], backend: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a kernel for ops that are built inside the block: tests seed faults with it."""
    target._look_beside(backend)
    right = target._implementations[backend]
    target._implementations[backend] = replacement
    try:
        yield
    finally:
        target._implementations[backend] = right


def _wants_backend(function: Callable[..., Any]) -> bool:
    found = inspect.signature(function).parameters.get("backend")
    return found is not None and found.kind is found.KEYWORD_ONLY


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Names and defaults of the arguments, without the keyword-only `backend`."""
    return [
        str(p.replace(annotation=p.empty))
        for p in inspect.signature(function).parameters.values()
        if not (p.name == "backend" and p.kind is p.KEYWORD_ONLY)
    ]
