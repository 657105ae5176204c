"""The parameters of a model: one flat buffer for all of them, and named tensors in and out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.workers import on_all_cores, shared_zeros
from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.op import Op, Param
from tinyforge.quantised import Quantised
from tinyforge.rng import PAIRS, Stream
from tinyforge.tensors import Tensors

AnyOp = TypeVar("AnyOp", bound=Op)

_WORTH_A_PROCESS = 100  # draws of PAIRS pairs of normals: they take about a tenth of a second
_ALIGN = 32  # elements; keeps every view in the flat buffer on a 64-byte boundary, bf16 included


UNPLACED: Any = object()
"""Passed as a buffer's `values`: allocate nothing. A buffer made later gives the parameters their memory."""


class ParamBuffer:
    """All parameters of a model in one flat buffer, all gradients in another: one optimizer call updates everything.

    `values` are the weights as the ops read them; `masters` are the same weights in the precision in which they are
    learned and saved: the same array, except in bf16. Decayed parameters come first, so that weight decay is the slice
    `[:decay_end]`. Passing `values` makes a second model that reads the same weights but owns its gradients: a worker
    of data-parallel training.

    All of this holds for `params`, which are learned. The `frozen` ones lie in a flat array of their own,
    `frozen_values`, in the precision in which the ops read them, and take no other memory. Those for which
    `Param.weights` names a format are kept as codes and scales instead.
    """

    def __init__(
        self, params: Iterable[Param], backend: Backend, values: Array | None = None, frozen_values: Array | None = None
    ) -> None:
        unique = list({id(p): p for p in params}.values())
        names = [p.name for p in unique]
        if len(set(names)) != len(names):
            raise ValueError(f"two parameters share a name: {sorted(n for n in names if names.count(n) > 1)}")
        self.params = sorted((p for p in unique if not p.frozen), key=lambda p: not p.decay)
        self.frozen = [p for p in unique if p.frozen]
        self._slices: dict[str, slice] = {}
        self.decay_end = self._lay_out([p for p in self.params if p.decay])
        size = self._lay_out([p for p in self.params if not p.decay], self.decay_end)
        size_frozen = self._lay_out(p for p in self.frozen if not p.weights)
        self._backend = backend
        if values is UNPLACED:
            return
        self.values = backend.shared_zeros((size,)) if values is None else values
        self.masters = self.values
        if values is None and backend.master_dtype != backend.dtype:
            self.masters = backend.shared_zeros((size,), backend.master_dtype)
        self.grads: Any = backend.shared_zeros((size,), backend.master_dtype)
        self.frozen_values: Any = frozen_values
        if self.frozen and frozen_values is None:
            self.frozen_values = backend.shared_zeros((size_frozen,))
        for p in self.params:
            p.value = self.view(self.values, p)
        self.place_grads(self.grads)
        for p in self.frozen:
            p.grad = None
            p.value = Quantised.zeros(p.weights, p.shape, backend) if p.weights else self.view(self.frozen_values, p)

    def place_grads(self, flat: Array | None) -> None:
        """Move the gradients of all learned parameters to `flat`. With None they have no memory, and reading one is an
        error until they get some again."""
        self.grads = flat
        for p in self.params:
            if flat is not None:
                p.grad = self.view(flat, p)
            else:
                vars(p).pop("_grad", None)

    def clear_grads(self) -> None:
        """Set all gradients to 0. Those that a matrix product writes first (`Param.overwrite_grad`) are marked only:
        the product assigns its result instead of adding it. Call `settle_grads` when backward is over."""
        for p in self.params:
            p.grad_is_zero = p.overwrite_grad
        for where in self._added_to:
            self.grads[where].fill(0)

    def settle_grads(self) -> None:
        """Write the zeros of gradients that are still blank."""
        for p in self.params:
            p.settle()

    @cached_property
    def _added_to(self) -> list[slice]:
        """The parts of the flat gradient that `clear_grads` sets to 0: all but those that a product assigns."""
        bounds = [0]
        for p in self.params:
            if p.overwrite_grad:
                place = self.place(p)
                bounds += [place.start, place.stop]
        bounds.append(self.size)
        return [slice(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if b > a]

    def place_values(self, flat: Array) -> None:
        """Move the weights to `flat`."""
        flat[...] = self.values
        if self.masters is self.values:
            self.masters = flat
        self.values = flat
        for p in self.params:
            p.value = self.view(flat, p)

    def _lay_out(self, params: Iterable[Param], offset: int = 0) -> int:
        """Assign each parameter a slice of a flat array, from `offset` on; returns where the last one ends."""
        for p in params:
            self._slices[p.name] = slice(offset, offset + p.size)
            offset += -(-p.size // _ALIGN) * _ALIGN
        return offset

    @property
    def size(self) -> int:
        """Elements of the flat buffers."""
        return int(self.values.size)

    def view(self, flat: Array, param: Param) -> Array:
        """The part of `flat` (values, gradients or an optimizer moment) that belongs to `param`, in its shape."""
        return flat[self._slices[param.name]].reshape(param.shape)

    def place(self, param: Param) -> slice:
        """Where `param` lies in its flat array."""
        return self._slices[param.name]

    def initialise(self, seed: Stream | int = 0) -> Self:
        """Sample every learned parameter from a stream of its name: adding one changes no other's initial value."""
        stream = Stream(seed, "init") if isinstance(seed, int) else seed
        host = shared_zeros(self.masters.shape, self._backend.master_dtype)
        tasks = []
        for p in self.params:
            self.view(host, p)[...] = p.fill
            tasks += [(p, start) for start in range(0, -(-p.size // 2), PAIRS) if p.std]

        def draw(task: tuple[Param, int]) -> None:
            p, start = task
            values = self.view(host, p).reshape(-1)
            for where, noise in stream.fork(p.name).normal_parts(p.size, [start]):
                values[where] = p.fill + p.std * noise

        on_all_cores(draw, tasks, _WORTH_A_PROCESS)
        self.masters[...] = self._backend.asarray(host, self._backend.master_dtype)
        self.publish()
        return self

    def set_master(self, param: Param, value: Any) -> None:
        """Set a parameter's master weights, or a frozen one's only weights; call `publish` when all are set."""
        if param.weights:
            param.stored[...] = np.asarray(value)
            return
        flat = self.frozen_values if param.frozen else self.masters
        self.view(flat, param)[...] = self._backend.asarray(value, flat.dtype)

    @property
    def masters_elsewhere(self) -> bool:
        """Whether the weights are not arrays in the host's memory."""
        return not isinstance(self.frozen_values if self.frozen else self.masters, np.ndarray)

    def publish(self) -> None:
        """Round the master weights to the values that the ops read."""
        for p in self.frozen:
            if p.weights:
                p.stored.settle()
        if self.masters is not self.values:
            self.values[...] = self.masters

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the ops read them, without master weights and gradients."""
        return sum(p.stored.nbytes for p in (*self.params, *self.frozen))

    @property
    def count(self) -> int:
        """Number of parameters, frozen ones included."""
        return sum(p.size for p in (*self.params, *self.frozen))


def with_buffer(op: AnyOp, backend: Backend, rng: np.random.Generator, std: float = 0.5) -> AnyOp:
    """Give `op`'s parameters a buffer of their own with random values, as `cases` needs them."""
    buffer = ParamBuffer(op.params(), backend)
    for p in (*buffer.params, *buffer.frozen):
        buffer.set_master(p, rng.normal(size=p.shape) * std + p.fill)
    buffer.publish()
    return op


def named(buffer: ParamBuffer, flat: Any, backend: Backend) -> dict[str, np.ndarray]:
    """The parts of a flat array by parameter name, as NumPy copies, for a checkpoint; no frozen parameters."""
    return {p.name: np.array(backend.to_numpy(buffer.view(flat, p))) for p in buffer.params}


def take_weights(buffer: ParamBuffer, base: ParamBuffer, backend: Backend) -> None:
    """Copy from `base` every tensor of equal name and shape, and print those that it lacks, which stay as they are."""
    have, theirs = named(buffer, buffer.masters, backend), named(base, base.masters, backend)
    taken = {name for name, value in have.items() if name in theirs and theirs[name].shape == value.shape}
    load_named(buffer, buffer.masters, have | {name: theirs[name] for name in taken}, backend, Path("base"))
    print(f"weights of the base: {len(taken)} tensors; new: {', '.join(sorted(set(have) - taken)) or 'none'}")


def check_named(
    params: Iterable[Param],
    tensors: Mapping[str, np.ndarray],
    source: Path,
    prefix: str = "",
    expected: Callable[[Param], tuple[int, ...]] = lambda p: p.shape,
) -> None:
    """Raise UserError if a tensor is missing or has another shape than `expected`. Reads no tensor from a file."""
    shape_of = tensors.shape if isinstance(tensors, Tensors) else lambda name: np.shape(tensors[name])
    for p in params:
        shape = shape_of(prefix + p.name) if prefix + p.name in tensors else None
        if shape != expected(p):
            got = "nothing" if shape is None else shape
            raise UserError(f"checkpoint {source}: {prefix + p.name} has {got}, the model expects {expected(p)}")


def load_named(
    buffer: ParamBuffer, flat: Any, tensors: Mapping[str, np.ndarray], backend: Backend, source: Path
) -> None:
    """The reverse of `named`. Raises UserError for missing tensors and wrong shapes."""
    check_named(buffer.params, tensors, source)
    for p in buffer.params:
        buffer.view(flat, p)[...] = backend.asarray(tensors[p.name], flat.dtype)
    if flat is buffer.masters:
        buffer.publish()
