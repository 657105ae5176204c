"""Op, Param, Stash: the three things that everything else here is made of.

There is no graph and no tape. An `Op` computes forward and has a backward written by hand next to it. What backward
needs, forward pushes on a `Stash`; a model's backward is its forward read upwards, so records come off in reverse.

One rule for gradients, everywhere: parameter gradients are accumulated (`+=`), activation gradients are assigned
(`=`), and backward never writes to the `dy` that it was given. `tests/ops/test_contract.py` enforces it for all ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from tinyforge.backends import Backend
from tinyforge.rng import Stream

Array = Any  # numpy.ndarray or cupy.ndarray: the ops do not care which

_ALIGN = 32  # elements; keeps every view in the flat buffer on a 64-byte boundary, bf16 included


class Param:
    """A named tensor to be learned: `value` and its `grad`, views into the flat buffer of the model's `ParamBuffer`.

    The initial value is `fill + std * N(0, 1)`: `std=0.02` for a matrix, `fill=1` for a norm's gain.
    `decay` says whether AdamW's weight decay applies.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], *, std: float = 0.0, fill: float = 0.0, decay: bool = True
    ) -> None:
        self.name = name
        self.shape = shape
        self.std = std
        self.fill = fill
        self.decay = decay
        self.value: Array = None
        self.grad: Array = None

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __repr__(self) -> str:
        return f"Param({self.name}, {self.shape})"


class ParamBuffer:
    """All parameters of a model in one flat buffer, all gradients in another: one optimizer call updates everything.

    `values` are the weights as the ops read them; `masters` are the same in the precision in which they are learned
    and saved: the same array, except in bf16. Decayed parameters come first, so that weight decay is the slice
    `[:decay_end]`. Handing in `values` makes a second model that reads the same weights but owns its gradients: a
    worker of data-parallel training.
    """

    def __init__(self, params: Iterable[Param], backend: Backend, values: Array = None) -> None:
        unique = list({id(p): p for p in params}.values())
        names = [p.name for p in unique]
        if len(set(names)) != len(names):
            raise ValueError(f"two parameters share a name: {sorted(n for n in names if names.count(n) > 1)}")
        self.params = sorted(unique, key=lambda p: not p.decay)
        offset = 0
        self._slices: dict[str, slice] = {}
        self.decay_end = 0
        for p in self.params:
            self._slices[p.name] = slice(offset, offset + p.size)
            offset += -(-p.size // _ALIGN) * _ALIGN
            if p.decay:
                self.decay_end = offset
        self._backend = backend
        self.values = backend.shared_zeros((offset,)) if values is None else values
        self.masters = self.values
        if values is None and backend.master_dtype != backend.dtype:
            self.masters = backend.shared_zeros((offset,), backend.master_dtype)
        self.grads = backend.shared_zeros((offset,), backend.master_dtype)
        for p in self.params:
            p.value, p.grad = self.view(self.values, p), self.view(self.grads, p)

    def view(self, flat: Array, param: Param) -> Array:
        """The part of `flat` (values, gradients or an optimizer moment) that belongs to `param`, in its shape."""
        return flat[self._slices[param.name]].reshape(param.shape)

    def initialise(self, stream: Stream) -> None:
        """Fill every value from its own named stream: adding a parameter never changes another's start."""
        for p in self.params:
            noise = stream.fork(p.name).normal(p.shape) if p.std else 0.0
            self.set_master(p, p.fill + p.std * noise)
        self.publish()

    def set_master(self, param: Param, value: Any) -> None:
        """Give a parameter's master weights another value; `publish` when all are set."""
        self.view(self.masters, param)[...] = self._backend.asarray(value, self._backend.master_dtype)

    def publish(self) -> None:
        """Round the master weights to the values that the ops read."""
        if self.masters is not self.values:
            self.values[...] = self.masters

    @property
    def count(self) -> int:
        return sum(p.size for p in self.params)


class Stash:
    """What forward saved for backward: a last-in first-out list of records, each consumed once, by its owner."""

    def __init__(self) -> None:
        self._records: list[tuple[Op, tuple[Any, ...]]] = []

    def push(self, owner: Op, *saved: Any) -> None:
        self._records.append((owner, saved))

    def pop(self, owner: Op) -> tuple[Any, ...]:
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

    def __len__(self) -> int:
        return len(self._records)


class Op:
    """One differentiable operation. Subclasses list the `kernels` they call and write forward and backward.

    `forward(*inputs, stash=None)`: without a stash it is inference: the same bits, nothing kept.
    `backward(dy, stash)`: returns the gradient of each input (None for integer inputs), adds to the parameters' `grad`.
    """

    kernels: ClassVar[tuple[str, ...]] = ()

    def __init__(self, backend: Backend, name: str = "") -> None:
        self.backend = backend
        self.name = name or type(self).__name__
        self.k = backend.bind(type(self).__name__, self.kernels)

    def forward(self, *inputs: Any, stash: Stash | None = None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, dy: Any, stash: Stash) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no backward")

    def params(self) -> list[Param]:
        """Each Param once, also when tied."""
        return []

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        """The gradient-check hook: yields (op, inputs) with random data, edge cases included."""
        raise NotImplementedError(f"{cls.__name__} has no gradient-check cases")


def with_buffer(op: Op, backend: Backend, rng: np.random.Generator, std: float = 0.5) -> Op:
    """Give `op`'s parameters a buffer of their own with random values: what `cases` needs before a check."""
    buffer = ParamBuffer(op.params(), backend)
    for p in buffer.params:
        buffer.set_master(p, rng.normal(size=p.shape) * std + p.fill)
    buffer.publish()
    return op
