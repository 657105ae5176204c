"""Kernels: named functions over arrays, each with a NumPy body and an implementation on every other backend.

    @kernel                                 # in ops/rmsnorm.py: the NumPy body; the name becomes a Kernel
    def rmsnorm_fwd(x: Array, weight: Array, eps: float) -> tuple[Array, Array]: ...

    rmsnorm_fwd.on("meta")(lambda x: ...)   # next to it: what the CUDA launcher allocates

    @rmsnorm.rmsnorm_fwd.on("cupy")         # in ops/rmsnorm_cuda.py: the CUDA launcher
    def rmsnorm_fwd(x, weight, eps): ...

    class RMSNorm(Op):                      # an op names its kernels and calls them on its own backend
        fwd = rmsnorm_fwd
        ...
        y, rstd = self.fwd(x, self.weight.value, self.eps)

Calls are typed as the body is: mypy checks the arguments and the result of `self.fwd(...)`.

All implementations take the same arguments in the same order: outputs, accumulators, inputs, saved, sizes, scalars.
On "meta", where nothing is computed, a function may name only the arguments that it reads; a kernel whose results are
like its first array needs none (`backends.meta.derived`). An implementation that
depends on its backend (its precision, say) takes it as the keyword-only argument `backend`, with a default in the body;
`bind` supplies it. If a kernel has no CuPy implementation, the module next to its body, `<module>_cuda`, is imported to
find one: a custom op works the same way, in your own package. A NumPy backend that is `compiled` takes a kernel's
"numba" implementation, if the module `compiled` of the body's package has one, and the body if not.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar, overload

import numpy as np

from tinyforge.errors import UserError

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
else:
    Array = Any
"""numpy.ndarray, cupy.ndarray or a meta array; ops work with each of them. To mypy it is NumPy's."""


def pointer(array: Any) -> int:
    """The address of a CuPy array in device memory."""
    return array.data.ptr


P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_NEIGHBOURS = {"cupy": "_cuda", "webgpu": "_webgpu"}  # what the neighbour module's name ends with
COMPILED = "numba"
"""Of a NumPy backend's compiled implementations."""


class Bindable(Protocol):
    """The part of a backend that a kernel needs."""

    name: str


class Kernel(Generic[P, R]):
    """One function by name. Calling it runs the NumPy body; `bind` gives the implementation for a backend.

    As a class attribute of an op (`fwd = rmsnorm_fwd`), it is the implementation on the op's backend: `self.fwd(...)`.
    """

    def __init__(self, body: Callable[P, R]) -> None:
        self.body = body
        self.name = body.__name__
        self.__name__, self.__module__, self.__wrapped__ = body.__name__, body.__module__, body
        self.__signature__ = inspect.signature(body)
        written = str(self.__signature__).replace("'", "")
        self.__doc__ = f"{self.name}{written}\n\n{inspect.getdoc(body) or ''}".strip()  # what help() shows
        self._implementations: dict[str, Callable[..., Any]] = {"numpy": body}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.body(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> Kernel[P, R]: ...
    @overload
    def __get__(self, instance: Kernels, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: Kernels | None, owner: type) -> Kernel[P, R] | Callable[P, R]:
        """Reached on the class alone: `bind_kernels` sets the implementation on the instance."""
        if instance is None:
            return self
        raise RuntimeError(f"{owner.__name__}: kernel {self.name} is not bound; call super().__init__ first")

    def __repr__(self) -> str:
        return f"<kernel {self.name} on {', '.join(self.backends())}>"

    def on(self, backend: str) -> Callable[[F], F]:
        """Decorator: the implementation on `backend`. Raises TypeError unless it takes the body's arguments ("meta":
        some of them); a keyword-only `backend` may come on top."""

        def register(function: F) -> F:
            mine, theirs = _arguments(self.body), _arguments(function)
            if mine == theirs or theirs == ["*arrays"]:  # what several kernels share
                self._implementations[backend] = function
            elif backend == "meta" and set(theirs) <= set(mine):
                self._implementations[backend] = self._given_what_it_reads(function)
            else:
                raise TypeError(
                    f"kernel {self.name}: on {backend} it takes ({', '.join(theirs)}), on numpy ({', '.join(mine)}); "
                    "give both the same arguments"
                )
            return function

        return register

    def _given_what_it_reads(self, function: Callable[..., R]) -> Callable[P, R]:
        """`function`, called with all of the body's arguments and with `backend`."""
        body, read = inspect.signature(self.body), inspect.signature(function).parameters

        def allocate(*args: Any, backend: Any = None, **named: Any) -> R:
            given = {**body.bind_partial(*args, **named).arguments, "backend": backend}
            return function(**{name: given[name] for name in read})

        return allocate

    def backends(self) -> list[str]:
        """The backends that have this kernel; its neighbour module is searched too where it can be imported."""
        for backend in _NEIGHBOURS:
            try:
                self._import_neighbour(backend)
            except ImportError:  # CuPy is not installed
                continue
        return sorted({*self._implementations} - {COMPILED})

    def bind(self, backend: Bindable, owner: str = "") -> Callable[P, R]:
        """The implementation on `backend`. Raises UserError if there is none. owner: the op that asks."""
        name = backend.name
        if getattr(backend, "compiled", False):
            self._import_neighbour(COMPILED)
            name = COMPILED if COMPILED in self._implementations else name
        self._import_neighbour(name)
        function = self._implementations.get(name)
        if function is None and hasattr(backend, "derived"):
            function = backend.derived(self.body)
        if function is None:
            fix = f'use --backend numpy, or write one: @{self.name}.on("{backend.name}")'
            if backend.name in _NEIGHBOURS:
                fix += f" in {self.body.__module__}{_NEIGHBOURS[backend.name]}"
            raise UserError(
                f"{owner + ': ' if owner else ''}kernel {self.name} has no implementation on backend {backend.name}, "
                f"only on {', '.join(self.backends())}; {fix}"
            )
        return partial(function, backend=backend) if _takes_backend(function) else function

    def _import_neighbour(self, backend: str) -> None:
        """Import the neighbour module that may hold the implementation."""
        if backend in self._implementations or backend not in (*_NEIGHBOURS, COMPILED):
            return
        package, _, _ = self.body.__module__.rpartition(".")
        if backend == COMPILED and not package:  # of a script
            return
        module = f"{package}.compiled" if backend == COMPILED else self.body.__module__ + _NEIGHBOURS[backend]
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)


def kernel(body: Callable[P, R]) -> Kernel[P, R]:
    """Decorator: make a NumPy function a Kernel."""
    return Kernel(body)


class Kernels:
    """Base of Op, and of other classes whose attributes are kernels. kernels: those of the class and of its bases."""

    kernels: ClassVar[tuple[Kernel[..., Any], ...]] = ()
    _named: ClassVar[tuple[tuple[str, Kernel[..., Any]], ...]] = ()  # the same, each with its attribute's name

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if old := vars(cls).get("kernels"):
            warnings.warn(
                f"{cls.__name__}: name each kernel instead of listing `kernels`: `fwd = {old[0].name}`, called as "
                "`self.fwd(...)` instead of `self.k`",
                DeprecationWarning,
                stacklevel=2,
            )
            for name, value in {**{each.name: each for each in old}, "k": property(lambda op: op)}.items():
                setattr(cls, name, value)
        cls._named = tuple(_attributes(cls))  # once: a model binds the kernels of hundreds of ops
        cls.kernels = tuple(dict.fromkeys(found for _, found in cls._named))

    def bind_kernels(self, backend: Bindable) -> None:
        """Set every kernel attribute to its implementation on `backend`. Raises UserError if one is missing."""
        for name, found in self._named:
            setattr(self, name, found.bind(backend, type(self).__name__))


def _attributes(cls: type) -> list[tuple[str, Kernel[..., Any]]]:
    """The kernels among the attributes of `cls`, each with its attribute's name; bases first."""
    attributes: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        attributes |= vars(base)
    return [(name, found) for name, found in attributes.items() if isinstance(found, Kernel)]


def bind(kernels: Sequence[Kernel[..., Any]], backend: Bindable, owner: str) -> SimpleNamespace:
    """The implementations of `kernels` on `backend`, by name, for tests and benchmarks of many kernels: their calls are
    not typed. Raises UserError if one is missing."""
    return SimpleNamespace(**{k.name: k.bind(backend, owner) for k in kernels})


@contextmanager
def override(target: Kernel[P, R], backend: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a kernel for ops that are built inside the block: tests seed faults with it."""
    target._import_neighbour(backend)
    right = target._implementations[backend]
    target._implementations[backend] = replacement
    try:
        yield
    finally:
        target._implementations[backend] = right


@lru_cache(1024)
def _takes_backend(function: Callable[..., Any]) -> bool:
    found = inspect.signature(function).parameters.get("backend")
    return found is not None and found.kind is found.KEYWORD_ONLY


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Names and defaults of the arguments, without the keyword-only `backend`."""
    return [
        str(p.replace(annotation=p.empty))
        for p in inspect.signature(function).parameters.values()
        if not (p.name == "backend" and p.kind is p.KEYWORD_ONLY)
    ]
