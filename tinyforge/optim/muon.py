"""Muon: orthogonalised momentum for the matrices between hidden layers, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import MetaBackend, empty
from tinyforge.errors import UserError
from tinyforge.kernel import Array, kernel
from tinyforge.op import Param
from tinyforge.optim.adamw import AdamW, AdamWConfig
from tinyforge.params import ParamBuffer

A, B, C = 3.4445, -4.7750, 2.0315
"""The quintic a s + b s^3 + c s^5 that is applied to all singular values at once. It is steep at 0: five steps raise a
small value by 3.4445^5 = 485. Values near 1 move up and down between 0.7 and 1.2, which is orthogonal enough."""
STEPS = 5
EPS = 1e-7
RMS = 0.2
"""Root mean square of an update's elements, in units of the learning rate: about that of AdamW."""
MOST = 1 << 26
"""Elements of the matrices of one shape that are processed at a time: this bounds the memory of a step."""


@dataclass(frozen=True)
class MuonConfig(AdamWConfig):
    """momentum: of the matrices. The other fields are AdamW's; weight decay applies to the matrices too."""

    momentum: float = 0.95


@kernel
def muon_momentum(
    m: Array, grads: Array, starts: Array, rows: int, columns: int, grad_scale: Any, momentum: float
) -> tuple[Array, Array]:
    """Updates the flat m for the matrices of (rows, columns) that begin at `starts`, (N,) int64. Returns the Nesterov
    momentum x, (N, rows, columns) in the dtype of products, and sums of its squares, (N, parts) float64:

        m = momentum m + (1 - momentum) g;   x = momentum m + (1 - momentum) g
    """
    kind, size = m.dtype.type, rows * columns
    x, squares = np.empty((len(starts), rows, columns), m.dtype), np.empty((len(starts), 1))
    for number, start in enumerate(starts.tolist()):
        mine, ahead = m[start : start + size], x[number].reshape(-1)
        np.multiply(grads[start : start + size], kind(grad_scale), out=ahead)
        ahead *= kind(1 - momentum)
        mine *= kind(momentum)
        mine += ahead
        ahead += kind(momentum) * mine
        squares[number] = float(np.dot(ahead, ahead))
    return x, squares


@muon_momentum.on("meta")
def muon_momentum_memory(
    m: Array,
    grads: Array,
    starts: Array,
    rows: int,
    columns: int,
    grad_scale: Any,
    momentum: float,
    *,
    backend: MetaBackend,
) -> tuple[Array, Array]:
    return backend.empty((len(starts), rows, columns)), empty((len(starts), 1), np.float64)


@kernel
def newton_schulz(x: Array, squares: Array) -> Array:
    """About U V^T for each x = U S V^T of (N, rows, columns), which is overwritten; squares: from `muon_momentum`.
    Starts from x / |x|, whose singular values are at most 1, and repeats five times:

        x = a x + (b G + c G^2) x,   G = x x^T      where rows <= columns; else the same of the transpose

    Each singular value s becomes a s + b s^3 + c s^5; U and V stay.
    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    kind = x.dtype.type
    for number, norm in enumerate(np.sqrt(squares.sum(axis=1))):
        one = x[number]
        one *= kind(1 / max(norm, EPS))
        wide = one.shape[0] <= one.shape[1]
        for _ in range(STEPS):
            gram = one @ one.T if wide else one.T @ one
            factor = gram @ gram
            factor *= kind(C)
            gram *= kind(B)
            factor += gram
            change = factor @ one if wide else one @ factor
            one *= kind(A)
            one += change
    return x


@newton_schulz.on("meta")
def newton_schulz_memory(x: Array) -> Array:
    side = min(x.shape[1:])
    _grams = [empty((len(x), side, side), x.dtype) for _ in range(2)]
    return empty(x.shape, x.dtype)


@kernel
def muon_(values: Array, masters: Array, x: Array, starts: Array, rates: Array, grad_scale: Any, scale: float) -> None:
    """w = w (1 - lr weight_decay) - lr scale x, in place, for the matrices x, (N, rows, columns), at `starts` of the
    flat masters. values: the masters, rounded; here the same array. rates: the last row of `Muon.rates`. grad_scale: if
    it is NaN on a device, nothing changes."""
    kind, size = masters.dtype.type, x[0].size
    rate, _, shrink = rates
    for number, start in enumerate(starts.tolist()):
        w, change = masters[start : start + size], x[number].reshape(-1)
        change *= rate * kind(scale)
        w *= shrink
        w -= change


class Muon(AdamW):
    """One step on gradient g of each matrix W, (rows, columns), that a parameter names in `Param.matrices`:

        m = momentum m + (1 - momentum) g
        X = newton_schulz(momentum m + (1 - momentum) g)       about U V^T
        W = W (1 - lr weight_decay) - lr 0.2 sqrt(max(rows, columns)) X

    and AdamW's step for everything else. A matrix has only m, no v. The elements of an orthogonal matrix have root mean
    square 1 / sqrt(max(rows, columns)), so those of an update have 0.2 lr, about as in AdamW: learning rates and weight
    decay that suit AdamW suit Muon too. Maps that are stacked in one array to be one product (queries, keys and values;
    gate and up; experts) each have singular values of their own, so each is made orthogonal by itself.

    Products are bf16 if the backend is, and the matrices of one shape are multiplied together.
    Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
    Scalable for LLM Training" (2025), for the scale and the weight decay.
    """

    momentum = muon_momentum
    orthogonalise = newton_schulz
    update_matrices = muon_
    config: MuonConfig

    def __init__(
        self,
        buffer: ParamBuffer,
        backend: Backend,
        config: MuonConfig | None = None,
        pieces: Sequence[slice] | None = None,
    ) -> None:
        """Raises UserError if no parameter has matrices."""
        if not any(p.matrices for p in buffer.params):
            raise UserError(
                "--optimizer muon: of what is learned here nothing is a matrix between hidden layers; use "
                "--optimizer adamw"
            )
        # Runs of neighbouring AdamW parameters, updated together: start, end, and row of the rates. Concatenated,
        # without the matrices between them, they make up v.
        self._plain: list[tuple[int, int, int]] = []
        starts_of: dict[tuple[int, int], list[int]] = {}  # where the matrices of each shape begin
        ends = [*(buffer.place(p).start for p in buffer.params[1:]), buffer.size]
        for p, end in zip(buffer.params, ends, strict=True):
            start, row = buffer.place(p).start, int(not p.decay)
            for rows in p.matrices:
                starts_of.setdefault((rows, p.shape[-1]), []).append(start)
                start += rows * p.shape[-1]
            if not p.matrices:
                if self._plain and self._plain[-1][1:] == (start, row):
                    start = self._plain.pop()[0]
                self._plain.append((start, end, row))
        super().__init__(buffer, backend, config or MuonConfig(), pieces)
        self._batches: list[tuple[int, int, Array]] = []
        for (rows, columns), starts in starts_of.items():
            parts = min(len(starts), max(backend.workers, -(-len(starts) * rows * columns // MOST)))
            for part in np.array_split(np.array(starts, np.int64), parts):
                self._batches.append((rows, columns, backend.asarray(part, part.dtype)))

    @property
    def moment_sizes(self) -> tuple[int, int]:
        return self.buffer.size, sum(end - start for start, end, _ in self._plain)

    def having(self, what: str) -> list[Param]:
        return [p for p in self.buffer.params if what != "v" or not p.matrices]

    def _view(self, what: str, param: Param) -> Array:
        if what != "v":
            return super()._view(what, param)
        start = self._in_v(self.buffer.place(param).start)
        return self.v[start : start + param.size].reshape(param.shape)

    def _in_v(self, place: int) -> int:
        """The position in v of `place` in the flat buffer."""
        return sum(min(place, end) - start for start, end, _ in self._plain if start < place)

    def rates(self, step: int, lr: float) -> np.ndarray:
        """(3, 3): AdamW's, and lr, 0, 1 - lr weight_decay."""
        return np.vstack([super().rates(step, lr), [lr, 0.0, 1 - lr * self.config.weight_decay]])

    def apply(self, rates: Array, grad_scale: Any) -> None:
        rows = [rates[i] for i in range(3)]
        work: list[Callable[[], None]] = [
            partial(self._orthogonal, *batch, rows[2], grad_scale) for batch in self._batches
        ]
        work += [partial(self._adamw, start, end, rows[row], grad_scale) for start, end, row in self._plain]
        self.backend.map(lambda update: update(), work)

    def _adamw(self, start: int, end: int, rates: Array, grad_scale: Any) -> None:
        b, place = self.buffer, slice(start, end)
        v = self.v[self._in_v(start) : self._in_v(end)]
        self.update(b.values[place], b.masters[place], self.m[place], v, b.grads[place], rates, grad_scale, self.config)

    def _orthogonal(self, rows: int, columns: int, starts: Array, rates: Array, grad_scale: Any) -> None:
        b = self.buffer
        x, squares = self.momentum(self.m, b.grads, starts, rows, columns, grad_scale, self.config.momentum)
        x = self.orthogonalise(x, squares)
        self.update_matrices(b.values, b.masters, x, starts, rates, grad_scale, RMS * max(rows, columns) ** 0.5)
