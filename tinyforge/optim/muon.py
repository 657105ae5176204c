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
from tinyforge.optim.adamw import AdamW, AdamWConfig, cautious
from tinyforge.optim.schedules import Rate, pace_of
from tinyforge.params import ParamBuffer

A, B, C = 3.4445, -4.7750, 2.0315
"""The quintic a s + b s^3 + c s^5 that is applied to all singular values at once. It is steep at 0: five steps raise a
small value by 3.4445^5 = 485. Values near 1 move up and down between 0.7 and 1.2, which is orthogonal enough."""
STEPS = 5
SAFETY = 1.01
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
"""The published quintics: each is the best one, in the largest error, for the singular values that the one before it
leaves, from 0.001 to 1 at first. Each is taken of s / SAFETY, as published, so that bf16's rounding leads out of no
interval, and the first one of s / SAFETY^2: there the matrix is divided by SAFETY |x|.

Source: Amsel et al., "The Polar Express: Optimal Matrix Sign Methods and Their Application to the Muon Algorithm"
(2025), Algorithm 1."""
Rounds = tuple[tuple[float, float, float], ...]
COEFFICIENTS: dict[str, Rounds] = {
    "quintic": ((A, B, C),) * STEPS,
    "polar-express": tuple(
        (a / by, b / by**3, c / by**5) for (a, b, c), by in zip(POLAR_EXPRESS, (SAFETY**2, *[SAFETY] * 4), strict=True)
    ),
}
"""a, b, c of each round of `newton_schulz`, by the name that --newton-schulz has for them."""
EPS = 1e-7
RMS = 0.2
"""Root mean square of an update's elements, in units of the learning rate: about that of AdamW."""
MOST = 1 << 26
"""Elements of the matrices of one shape that are processed at a time: this bounds the memory of a step."""


@dataclass(frozen=True)
class MuonConfig(AdamWConfig):
    """momentum: of the matrices. coefficients: a name of `COEFFICIENTS`. normuon: divide the rows of an update by the
    root of their second moment, whose decay is row_beta. The other fields are AdamW's; weight decay applies to the
    matrices too."""

    momentum: float = 0.95
    coefficients: str = "quintic"
    normuon: bool = False
    row_beta: float = 0.95


@kernel
def muon_momentum(
    m: Array, grads: Array, starts: Array, rows: int, columns: int, grad_scale: Any, rates: Array
) -> tuple[Array, Array]:
    """Updates the flat m for the matrices of (rows, columns) that begin at `starts`, (N,) int64. Returns the Nesterov
    momentum x, (N, rows, columns) in the dtype of products, and sums of its squares, (N, parts) float64:

        m = momentum m + (1 - momentum) g;   x = momentum m + (1 - momentum) g

    rates: the last row of `Muon.rates`, with momentum and 1 - momentum.
    """
    kind, size = m.dtype.type, rows * columns
    momentum, rest, _ = rates
    x, squares = np.empty((len(starts), rows, columns), m.dtype), np.empty((len(starts), 1))
    for number, start in enumerate(starts.tolist()):
        mine, ahead = m[start : start + size], x[number].reshape(-1)
        np.multiply(grads[start : start + size], kind(grad_scale), out=ahead)
        ahead *= rest
        mine *= momentum
        mine += ahead
        ahead += momentum * mine
        squares[number] = float(np.dot(ahead, ahead))
    return x, squares


@muon_momentum.on("meta")
def muon_momentum_memory(starts: Array, rows: int, columns: int, *, backend: MetaBackend) -> tuple[Array, Array]:
    return backend.empty((len(starts), rows, columns)), empty((len(starts), 1), np.float64)


@kernel
def newton_schulz(x: Array, squares: Array, rounds: Rounds) -> Array:
    """About U V^T for each x = U S V^T of (N, rows, columns), which is overwritten; squares: from `muon_momentum`.
    Starts from x / |x|, whose singular values are at most 1, and repeats with the (a, b, c) of each of the `rounds`:

        x = a x + (b G + c G^2) x,   G = x x^T      where rows <= columns; else the same of the transpose

    Each singular value s becomes a s + b s^3 + c s^5; U and V stay.
    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); for other rounds
    `POLAR_EXPRESS`.
    """
    kind = x.dtype.type
    for number, norm in enumerate(np.sqrt(squares.sum(axis=1))):
        one = x[number]
        one *= kind(1 / max(norm, EPS))
        wide = one.shape[0] <= one.shape[1]
        for a, b, c in rounds:
            gram = one @ one.T if wide else one.T @ one
            factor = gram @ gram
            factor *= kind(c)
            gram *= kind(b)
            factor += gram
            change = factor @ one if wide else one @ factor
            one *= kind(a)
            one += change
    return x


@newton_schulz.on("meta")
def newton_schulz_memory(x: Array) -> Array:
    side = min(x.shape[1:])
    _grams = [empty((len(x), side, side), x.dtype) for _ in range(2)]
    return empty(x.shape, x.dtype)


@kernel
def normuon_(v: Array, x: Array, starts: Array, grad_scale: Any, beta: float) -> Array:
    """NorMuon's factors of the rows of an update, (N, rows) in the dtype of v, for x of `newton_schulz`. Updates the
    flat v for the rows, whose moments begin at `starts` for each matrix:

        v_i = beta v_i + (1 - beta) mean_j x_ij^2;   f_i = 1 / (sqrt(v_i) + eps)
        factor_i = 0.2 sqrt(rows columns) f_i / |f x|

    so that the elements of an update keep the root mean square 0.2, and v needs no correction for its start.
    grad_scale: if it is NaN on a device, v does not change.

    Source: Li et al., "NorMuon: Making Muon more efficient and scalable" (2025), Algorithm 1.
    """
    kind, (count, rows, columns) = v.dtype.type, x.shape
    factors = np.empty((count, rows), v.dtype)
    for number, start in enumerate(starts.tolist()):
        squares, moment = np.einsum("ij,ij->i", x[number], x[number]), v[start : start + rows]
        moment *= kind(beta)
        moment += kind(1 - beta) * (squares / kind(columns))
        each = 1 / (np.sqrt(moment) + kind(EPS))
        norm = float(np.sqrt(np.dot(squares, each * each)))
        factors[number] = each * kind(RMS * (rows * columns) ** 0.5 / max(norm, EPS))
    return factors


@normuon_.on("meta")
def normuon_memory(v: Array, x: Array) -> Array:
    _squares = empty(x.shape[:2], np.float64)
    return empty(x.shape[:2], v.dtype)


@kernel
def muon_(
    values: Array,
    masters: Array,
    x: Array,
    starts: Array,
    rates: Array,
    grad_scale: Any,
    scale: float,
    factors: Array | None,
    careful: bool,
) -> None:
    """w = w (1 - lr weight_decay) - lr scale x, in place, for the matrices x, (N, rows, columns), at `starts` of the
    flat masters. values: the masters, rounded; here the same array. rates: the last row but one of `Muon.rates`.
    grad_scale: if it is NaN on a device, nothing changes. factors: of `normuon_`, in place of `scale`. careful: decay
    by `cautious`."""
    kind, size = masters.dtype.type, x[0].size
    rate, _, shrink = rates
    for number, start in enumerate(starts.tolist()):
        w, change = masters[start : start + size], x[number].reshape(-1)
        if factors is None:
            change *= rate * kind(scale)
        else:
            x[number] *= rate * factors[number][:, None]
        w *= cautious(change, w, shrink) if careful else shrink
        w -= change


class Muon(AdamW):
    """One step on gradient g of each matrix W, (rows, columns), that a parameter names in `Param.matrices`:

        m = momentum m + (1 - momentum) g
        X = newton_schulz(momentum m + (1 - momentum) g)       about U V^T
        W = W (1 - lr weight_decay) - lr 0.2 sqrt(max(rows, columns)) X

    and AdamW's step for everything else. A matrix has only m, no v. The elements of an orthogonal matrix have root mean
    square 1 / sqrt(max(rows, columns)), so those of an update have 0.2 lr, about as in AdamW: learning rates and weight
    decay that suit AdamW suit Muon too. Maps that are stacked in one array to be one product (queries, keys and values;
    gate and up; experts) each have singular values of their own, so each is orthogonalised separately.

    With `MuonConfig.normuon` each row of X is divided by the root of its second moment, before it is scaled to the same
    root mean square: `normuon_`. `MuonConfig.coefficients` chooses the polynomials. A step can have a momentum of its
    own, `Pace.momentum`. Weight decay can be cautious, as AdamW's.

    Products are bf16 if the backend is, and the matrices of one shape are multiplied together.
    Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
    Scalable for LLM Training" (2025), for the scale and the weight decay.
    """

    momentum = muon_momentum
    orthogonalise = newton_schulz
    normalise_rows = normuon_
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
        # v: the concatenated runs of AdamW's parameters, and then the moments of rows, a parameter at a time.
        self._rows_in_v: dict[str, int] = {}
        self._rows = 0
        starts_of: dict[tuple[int, int], list[tuple[int, int]]] = {}  # of each shape, in the buffer and among the rows
        for p in buffer.params:
            start, row = buffer.place(p).start, self._rows
            for rows in p.matrices:
                starts_of.setdefault((rows, p.shape[-1]), []).append((start, row))
                start, row = start + rows * p.shape[-1], row + rows
            if p.matrices:
                self._rows_in_v[p.name], self._rows = self._rows, row
        super().__init__(buffer, backend, config or MuonConfig(), pieces)
        self._plain_in_v = sum(end - start for start, end, _ in self._plain)
        self._batches: list[tuple[int, int, Array, Array]] = []
        for (rows, columns), starts in starts_of.items():
            parts = min(len(starts), max(backend.workers, -(-len(starts) * rows * columns // MOST)))
            for part in np.array_split(np.array(starts, np.int64), parts):
                places, in_v = part[:, 0].copy(), part[:, 1] + self._plain_in_v
                self._batches.append((rows, columns, *(backend.asarray(a, a.dtype) for a in (places, in_v))))

    def orthogonal(self, param: Param) -> bool:
        return bool(param.matrices)

    @property
    def moment_sizes(self) -> tuple[int, int]:
        plain = sum(end - start for start, end, _ in self._plain)
        return self.buffer.size, plain + (self._rows if self.config.normuon else 0)

    def having(self, what: str) -> list[Param]:
        return [p for p in self.buffer.params if what != "v" or self.config.normuon or not p.matrices]

    def shape_of(self, what: str, param: Param) -> tuple[int, ...]:
        """Of a matrix v has a number for each row."""
        return param.shape[:-1] if what == "v" and param.matrices else param.shape

    def _view(self, what: str, param: Param) -> Array:
        if what != "v":
            return super()._view(what, param)
        shape = self.shape_of(what, param)
        start = self._in_v(self.buffer.place(param).start)
        if param.matrices:
            start = self._plain_in_v + self._rows_in_v[param.name]
        return self.v[start : start + int(np.prod(shape))].reshape(shape)

    def _in_v(self, place: int) -> int:
        """The position in v of `place` in the flat buffer."""
        return sum(min(place, end) - start for start, end, _ in self._plain if start < place)

    def rates(self, step: int, lr: Rate) -> np.ndarray:
        """AdamW's rows, and two more: lr of the matrices, 0, 1 - lr weight_decay; and momentum, 1 - momentum, 0."""
        config, pace = self.config, pace_of(lr)
        momentum = config.momentum if pace.momentum is None else pace.momentum
        rate = pace.lr * dict(config.group_rates).get("matrices", 1.0)
        own = [[rate, 0.0, pace.shrink(config.weight_decay)], [momentum, 1 - momentum, 0.0]]
        return np.vstack([super().rates(step, lr), own])

    def apply(self, rates: Array, grad_scale: Any) -> None:
        rows = [rates[i] for i in range(2 * len(self._factors) + 2)]
        work: list[Callable[[], None]] = [
            partial(self._orthogonal, *batch, rates=rows[-2], momentum=rows[-1], grad_scale=grad_scale)
            for batch in self._batches
        ]
        for start, end, row in self._plain:
            v = self.v[self._in_v(start) : self._in_v(end)]
            work.append(partial(self._adamw, slice(start, end), v, rows[row], grad_scale))
        self.backend.map(lambda update: update(), work)

    def _orthogonal(
        self, rows: int, columns: int, starts: Array, in_v: Array, rates: Array, momentum: Array, grad_scale: Any
    ) -> None:
        b, config = self.buffer, self.config
        x, squares = self.momentum(self.m, b.grads, starts, rows, columns, grad_scale, momentum)
        x = self.orthogonalise(x, squares, COEFFICIENTS[config.coefficients])
        factors = self.normalise_rows(self.v, x, in_v, grad_scale, config.row_beta) if config.normuon else None
        scale = RMS * max(rows, columns) ** 0.5
        self.update_matrices(b.values, b.masters, x, starts, rates, grad_scale, scale, factors, config.cautious)
