"""Op, Param, Stash: the three things that everything else here is made of.

There is no graph and no tape. An `Op` computes forward and has a backward written by hand next to it. Forward pushes
what backward needs on a `Stash`; a model's backward is its forward read upwards, so records come off in reverse.

One rule for gradients, everywhere: parameter gradients are accumulated (`+=`), activation gradients are assigned
(`=`), and backward never writes to the `dy` that it was given. `tests/ops/test_contract.py` enforces it for all ops.
`Param.grad_with_beta` saves a product from adding to zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, Kernels
from tinyforge.rng import Stream

Key = Any
"""The key of a random stream: two numbers, or an array of two uint32 that kernels read from device memory."""


Cases = Iterator[tuple["Op", tuple[Any, ...]]]
"""For the gradient check: ops with their memory, each with the inputs of its forward."""


class Param:
    """A named tensor to be learned: `value` and its `grad`, views into the flat buffer of the model's `ParamBuffer`.

    Both exist once the buffer does; reading them earlier raises RuntimeError. `ParamBuffer.initialise` sets the value
    to `fill + std * N(0, 1)`: `std=0.02` for an embedding, `fill=1` for a norm's gain, `fill=0` for a bias. With
    neither, std is 1 / sqrt(n), where n is the product of all axes but the first, or the length of a vector: the
    outputs of a linear map then have the scale of its inputs. `decay`: whether AdamW's weight decay applies.

    frozen: set before the buffer is made. A frozen parameter is read but never learned: its `grad` is None, which tells
    an op's backward to skip that product, and it has no master weights and no moments.

    matrices: for parameters that map one hidden layer to the next, the number of rows of each matrix stacked in it
    (with the leading axes folded): Muon makes the update of each orthogonal. An integer n means n matrices of equal
    height. Empty for all else: embeddings, heads, norms, vectors.

    weights: for a frozen parameter, set before the buffer is made: the one-byte format it is kept in, see quantised.py;
    "packed" once a decoder has its memory. `value` is then computed from `stored` on every read.

    arrive: set while the value is in flight from other ranks; calling it makes the device wait for the value.

    overwrite_grad: set by ops that take the gradient by `grad_with_beta`.
    grad_is_zero: the gradient is 0 but the zeros are not written yet, see `ParamBuffer.clear_grads`. Reading `grad`
        writes them.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        std: float | None = None,
        fill: float | None = None,
        decay: bool = True,
        matrices: Sequence[int] | int = (),
    ) -> None:
        if isinstance(matrices, int):
            matrices = (math.prod(shape[:-1]) // max(1, matrices),) * matrices
        if matrices and sum(matrices) != math.prod(shape[:-1]):
            raise ValueError(f"Param {name}: matrices of {matrices} rows, and the shape is {shape}")
        self.name = name
        self.shape = shape
        self.matrices = tuple(matrices)
        if std is None:
            std = 0.0 if fill is not None else max(1, math.prod(shape[1:] if len(shape) > 1 else shape)) ** -0.5
        self.std = std
        self.fill = fill or 0.0
        self.decay = decay
        self.frozen = False
        self.weights = ""
        self.arrive: Callable[[], None] | None = None
        self.overwrite_grad = False
        self.grad_is_zero = False

    @property
    def grad(self) -> Array:
        self.settle()
        return self._grad

    @grad.setter
    def grad(self, grad: Array | None) -> None:
        self._grad: Any = grad  # None: frozen

    @grad.deleter
    def grad(self) -> None:
        del self._grad

    def grad_with_beta(self) -> tuple[Array, bool]:
        """The gradient, and whether to add to it. If not, its memory is undefined and the caller must write all of it:
        a matrix product that assigns needs no zeros and reads nothing."""
        blank, self.grad_is_zero = self.grad_is_zero, False
        return self._grad, not blank

    def settle(self) -> None:
        """Write the zeros of a blank gradient."""
        if self.grad_is_zero:
            self.grad_is_zero = False
            self._grad.fill(0)

    @property
    def value(self) -> Array:
        if self.arrive is not None:
            self.arrive()
        return self._value.values() if self.weights else self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value: Any = value  # an array, or `Quantised`

    @property
    def stored(self) -> Any:
        """The value as it is stored: an array, or `Quantised`, its codes and scales."""
        return self._value if self.weights else self.value

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that are not set.
        if name in ("_value", "_grad"):
            raise RuntimeError(
                f"Param {self.name} has no {name.removeprefix('_')} yet: give the model's parameters memory with "
                "ParamBuffer(op.params(), backend), or a single op with with_buffer(op, backend, rng)"
            )
        raise AttributeError(f"Param has no attribute {name!r}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"Param({self.name}, {self.shape})"


class Owner(Protocol):
    """Whoever saves in a stash: an op, or a part of a model that is none."""

    name: str


class Stash:
    """Records that forward saves for backward: a last-in first-out list, each consumed once, by its owner.

    first: the gradient of the stream before the first layer, as far as backward has come: later layers read it too.
    noise: the stream that a training pass draws from: an op's dropout uses `stash.noise.fork(op.name)`, see `key`.
    None: nothing is random, and the result has the same bits with and without a stash.
    """

    def __init__(self, noise: Stream | None = None) -> None:
        self.noise = noise
        self.first: Any = None
        self._records: list[tuple[Owner, tuple[Any, ...]]] = []

    def push(self, owner: Owner, *saved: Any) -> None:
        self._records.append((owner, saved))

    def pop(self, owner: Owner) -> tuple[Any, ...]:
        if not self._records:
            raise RuntimeError(
                f"{owner.name} pops an empty stash: its forward ran without a stash, or its backward ran twice"
            )
        pushed_by, saved = self._records.pop()
        if pushed_by is not owner:
            raise RuntimeError(
                f"{owner.name} popped the record of {pushed_by.name}: backward must visit the ops in the "
                "reverse order of forward"
            )
        return saved

    def drop(self, length: int) -> None:
        """Drop all records but the first `length`: their forward will be rerun before their backward."""
        del self._records[length:]

    def key(self, owner: Owner, rate: float) -> Key | None:
        """The key of `owner`'s dropout stream; None if it drops nothing."""
        return self.noise.fork(owner.name).key if self.noise and rate else None

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[tuple[Owner, tuple[Any, ...]]]:
        """The records, each with its owner, in the order of forward; none is consumed."""
        return iter(self._records)


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that raises TypeError for what is no Param, or no backend, where it is annotated as one: a size
    there would fail much later, and elsewhere."""
    of_init = signature(init)
    found = {
        name: re.fullmatch(r"(Param|Backend)( \| None)?", str(p.annotation)) for name, p in of_init.parameters.items()
    }
    expected = {
        name: ({"Param": Param, "Backend": Backend}[kind[1]], *[type(None)] * bool(kind[2]))
        for name, kind in found.items()
        if kind
    }

    @wraps(init)
    def checked(self: Op, *args: Any, **named: Any) -> None:
        try:
            given = of_init.bind_partial(self, *args, **named).arguments
        except TypeError:
            given = {}  # init says what is wrong
        for name, kinds in expected.items():
            if name in given and not isinstance(given[name], kinds):
                value, kind = given[name], kinds[0].__name__
                got = f"{value!r}" if isinstance(value, int | float | str) else f"of type {type(value).__name__}"
                made = f"tinyforge.Param({name!r}, shape)" if kind == "Param" else "tinyforge.get_backend()"
                called = ", ".join(f"{p.name}: {p.annotation}" for p in list(of_init.parameters.values())[1:])
                op = type(self).__name__
                raise TypeError(f"{op}: {name} is {got}, expected a {kind} such as {made}; call it as {op}({called})")
        init(self, *args, **named)

    return checked if expected else init


class Op(Kernels):
    """One differentiable operation. Subclasses name the kernels that they call (`fwd = swiglu_fwd`) and write forward
    and backward. Building an op binds its kernels to the backend, and raises UserError if one is missing there.

    `forward(*inputs, stash=None)`: saves what backward needs, by `save`; without a stash this is inference: the same
    bits, nothing kept.
    `backward(dy, stash)`: returns the gradient of each input, a tuple if there are several (None for integer inputs),
    and adds to each parameter's `grad`, unless that is None: the parameter is frozen.

    adds: True for maps whose forward takes `add`, an array that the product adds to its result.
    per_head: True for losses whose backward also takes dy of shape (K,), one number per head for all tokens, in place
    of dy of the output's shape.
    """

    per_head: ClassVar[bool] = False
    adds: bool = False

    @_checked
    def __init__(self, backend: Backend, name: str = "") -> None:
        self.backend = backend
        self.name = name or type(self).__name__
        self.bind_kernels(backend)

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]

    def forward(self, *inputs: Any, stash: Stash | None = None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, dy: Any, stash: Stash) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no backward")

    def save(self, stash: Stash | None, *saved: Any) -> None:
        """Push a record on the stash, if there is one."""
        if stash is not None:
            stash.push(self, *saved)

    def expect(self, x: Array, width: int | None = None, *, shape: tuple[int, ...] | None = None) -> None:
        """Raise TypeError for what is no array, for one of integers, and for a float64 array where the backend's dtype
        is narrower, in which NumPy would go on in float64; ValueError unless the last axis has `width` entries, and
        the array this shape. The device is not asked."""
        dtype = getattr(x, "dtype", None)
        if dtype is None or dtype.kind in "iub" or (dtype == np.float64 and self.backend.dtype != np.float64):
            raise TypeError(
                f"{self.name}: an input of {type(x).__name__ if dtype is None else dtype}, expected an array of "
                f"{self.backend.dtype.name}; convert it with backend.asarray(x, backend.dtype)"
            )
        if width is not None and x.shape[-1:] != (width,):
            raise ValueError(f"{self.name}: an input of shape {x.shape}, expected (..., {width})")
        if shape is not None and x.shape != shape:
            raise ValueError(f"{self.name}: an input of shape {x.shape}, expected {shape}")

    def expect_ids(self, ids: Array, rows: int, lowest: int = 0) -> None:
        """Raise TypeError for what is no array of integers, IndexError for ids below `lowest` or of `rows` and more.
        The values of ids on a GPU are not read: that would wait for the device."""
        dtype = getattr(ids, "dtype", None)
        if dtype is None or dtype.kind not in "iu":
            given = type(ids).__name__ if dtype is None else dtype
            raise TypeError(f"{self.name}: ids of {given}, expected an array of integers, as by backend.asarray(ids)")
        if self.backend.name == "numpy" and ids.size and not (ids.min() >= lowest and ids.max() < rows):
            where = np.unravel_index(np.argmax((ids < lowest) | (ids >= rows)), ids.shape)
            place = ", ".join(map(str, where))
            raise IndexError(f"{self.name}: id {ids[where]} at [{place}], expected {lowest} to {rows - 1}")

    def params(self) -> list[Param]:
        """Each Param once, even when tied; by default the attributes that are Params, in the order they were set."""
        return list(dict.fromkeys(p for p in vars(self).values() if isinstance(p, Param)))

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        """For the gradient check: yields (op, inputs) with random data, edge cases included."""
        raise NotImplementedError(f"{cls.__name__} has no gradient-check cases")


Recompute = Literal["", "norms", "blocks"]
"""The parts that a model recomputes in backward instead of keeping them: none, its norms, or whole blocks."""


class WithKeywords(Op):
    """Wraps an op for gradient-check cases, where inputs have no names: its last inputs become keywords of forward.

    keywords: for each keyword, the function that makes its value from the input.
    """

    def __init__(self, op: Op, **keywords: Callable[[Array], Any]) -> None:
        super().__init__(op.backend, op.name)
        self.op, self.keywords = op, keywords
        self.per_head = op.per_head  # type: ignore[misc]

    def forward(self, *inputs: Any, stash: Stash | None = None) -> Any:
        count = len(inputs) - len(self.keywords)
        made = {name: make(x) for (name, make), x in zip(self.keywords.items(), inputs[count:], strict=True)}
        return self.op.forward(*inputs[:count], stash=stash, **made)

    def backward(self, dy: Any, stash: Stash) -> Any:
        return self.op.backward(dy, stash)

    def params(self) -> list[Param]:
        return self.op.params()
