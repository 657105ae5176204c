"""AdamW with decoupled weight decay, and the global gradient norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, Kernels, kernel
from tinyforge.op import Param
from tinyforge.optim.groups import group_of
from tinyforge.optim.schedules import Rate, pace_of
from tinyforge.params import ParamBuffer

CHUNK = 1 << 17
"""Elements updated at a time on NumPy. Six arrays of this size exceed a core's own cache, but fewer, longer passes
release the interpreter lock less often, and with two threads that matters more."""


@dataclass(frozen=True)
class AdamWConfig:
    """beta1, beta2: decay of the moments. eps: added to the root of the second one. weight_decay: per unit of lr.
    cautious: decay only the weights that the update moves towards 0. group_rates: factors of lr by group, see
    `groups.GROUPS`; 1 for a group that is left out. Weight decay stays per unit of lr itself."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    cautious: bool = False
    group_rates: tuple[tuple[str, float], ...] = ()


@kernel
def adamw_(
    values: Array, masters: Array, m: Array, v: Array, grads: Array, rates: Array, grad_scale: Any, config: Any
) -> None:
    """Updates values, masters, m, v in place; all flat and of one size. values: masters, rounded; here the same array.
    rates: a row of `step_rates`, on the device, so that a launch has the same arguments in every step."""
    kind = masters.dtype.type
    rate, root, shrink = rates
    g, scratch = np.empty(CHUNK, masters.dtype), np.empty(CHUNK, masters.dtype)
    for start in range(0, masters.size, CHUNK):
        w, m1, m2 = masters[start : start + CHUNK], m[start : start + CHUNK], v[start : start + CHUNK]
        a, b = g[: w.size], scratch[: w.size]
        np.multiply(grads[start : start + CHUNK], kind(grad_scale), out=a)
        m1 *= kind(config.beta1)
        np.multiply(a, kind(1 - config.beta1), out=b)
        m1 += b
        m2 *= kind(config.beta2)
        a *= a
        a *= kind(1 - config.beta2)
        m2 += a
        np.sqrt(m2, out=a)
        a *= root
        a += kind(config.eps)
        np.divide(m1, a, out=a)
        a *= rate
        w *= cautious(a, w, shrink) if config.cautious else shrink
        w -= a


def cautious(change: Array, weights: Array, shrink: Any) -> Array:
    """The factor of each weight in cautious weight decay: `shrink` where change w >= 0, that is where w - change moves
    w towards 0, and 1 elsewhere.

    Source: Chen et al., "Cautious Weight Decay" (2025); the mask is that of Liang et al., "Cautious Optimizers" (2024).
    """
    return np.where(change * weights >= 0, shrink, weights.dtype.type(1))


@kernel
def square_sums(sums: Array, grads: Array, bounds: Array) -> None:
    """Writes sums, (pieces, parts) float64: each row adds up to the sum of squares of grads[start:stop], where bounds,
    (pieces, 2) int64, has the row's start and stop."""
    sums[...] = 0
    for row, (start, stop) in zip(sums, bounds.tolist(), strict=True):
        parts = (grads[i : min(i + CHUNK, stop)] for i in range(start, stop, CHUNK))
        row[0] = sum(float(np.dot(part, part)) for part in parts)


@kernel
def clip_factor(sums: Array, previous: Any, limit: float) -> tuple[Any, Any]:
    """The norm and the factor of `AdamW.clip`. sums: of squares; previous: the previous step's factor."""
    norm = float(np.sqrt(sum(sums.tolist())))
    return norm, clip_scale(norm, limit)


@clip_factor.on("meta")
def clip_factor_memory() -> tuple[Any, Any]:
    state = empty((2,), np.float64)
    return state[0], state[1]


def step_rates(step: int, lr: Rate, config: AdamWConfig, factor: float = 1.0) -> np.ndarray:
    """(2, 3): factor lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), 1 - lr weight_decay; and the same without decay."""
    pace = pace_of(lr)
    rate, root = factor * pace.lr / (1 - config.beta1**step), (1 - config.beta2**step) ** -0.5
    return np.array([[rate, root, pace.shrink(config.weight_decay)], [rate, root, 1.0]])


def clip_scale(norm: float, limit: float) -> float:
    """min(1, limit / norm), the factor that brings a gradient within `limit`; limit 0 means no clipping."""
    return min(1.0, limit / norm) if limit > 0 and norm > 0 else 1.0


class AdamW(Kernels):
    """One step t = 1, 2, ... on gradient g (already scaled by `grad_scale`):

        m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
        w = w (1 - lr weight_decay)            (matrices only: `Param.decay`)
        w = w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    With `AdamWConfig.cautious`, the second line is for the weights whose sign is that of the third line's update, see
    `cautious`; with `AdamWConfig.group_rates`, the third line's lr is multiplied by the factor of the weight's group.

    Source: Kingma and Ba, "Adam" (2015); Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
    """

    update = adamw_
    sum_squares = square_sums
    clip_by = clip_factor

    def __init__(
        self,
        buffer: ParamBuffer,
        backend: Backend,
        config: AdamWConfig | None = None,
        pieces: Sequence[slice] | None = None,
    ) -> None:
        """pieces: slices of the flat gradient whose squares are summed one by one; by default one slice. factor: the
        last result of `clip`."""
        self.buffer = buffer
        self.backend = backend
        self.config = config or AdamWConfig()
        self._factors, self._plain = self._rows_of_rates()
        self.m, self.v = (backend.zeros((size,), backend.master_dtype) for size in self.moment_sizes)
        self.step_count = 0
        self.bind_kernels(backend)
        pieces = pieces or [slice(0, buffer.values.size)]
        bounds = np.array([(piece.start, piece.stop) for piece in pieces], np.int64)
        self._bounds = backend.asarray(bounds, bounds.dtype)
        self._sums: Any = None
        self._known = range(0)
        self.factor: Any = 1.0

    def _rows_of_rates(self) -> tuple[list[float], list[tuple[int, int, int]]]:
        """The factors of lr that differ, 1 first; and runs of neighbouring parameters without Muon's matrices that are
        updated alike: start, end, and row of the rates, which is 2 n with decay and 2 n + 1 without for factor n."""
        buffer, factor_of = self.buffer, dict(self.config.group_rates)
        factors, runs = [1.0], list[tuple[int, int, int]]()
        ends = [*(buffer.place(p).start for p in buffer.params[1:]), buffer.size]
        for p, end in zip(buffer.params, ends, strict=True):
            start, factor = buffer.place(p).start, factor_of.get(group_of(p), 1.0)
            if factor not in factors:
                factors.append(factor)
            row = 2 * factors.index(factor) + (not p.decay)
            if self.orthogonal(p):
                continue
            if runs and runs[-1][1:] == (start, row):
                start = runs.pop()[0]
            runs.append((start, end, row))
        return factors, runs

    def orthogonal(self, param: Param) -> bool:
        """Whether the parameter's update is not AdamW's: for Muon."""
        return False

    @property
    def moment_sizes(self) -> tuple[int, int]:
        """Elements of m and v that this optimizer updates."""
        return self.buffer.size, self.buffer.size

    def having(self, what: str) -> list[Param]:
        """The parameters that have a tensor `what`; see `tensors`."""
        return self.buffer.params

    def shape_of(self, what: str, param: Param) -> tuple[int, ...]:
        """The shape of a parameter's tensor `what`."""
        return param.shape

    def clip(self, limit: float) -> tuple[Any, Any]:
        """The gradient's norm, and the factor for `step` that brings it within `limit` (0: no limit).

        On a GPU both are numbers in device memory: reading them waits for the device, `step` does not. There, from the
        first norm that is not finite on, the factor is NaN, and a step with it changes nothing: a late read of the norm
        finds the weights as they were before that step.
        """
        norm, self.factor = self.clip_by(self._squares().reshape(-1), self.factor, limit)
        return norm, self.factor

    def know(self, pieces: range) -> None:
        """The gradients of these pieces are final: sum their squares now, and the others' in `clip`. An empty range
        discards earlier sums: a new step begins."""
        self._sums, self._known = None, pieces
        if pieces:
            self._sums = self._new_sums()
            self._square(pieces)

    def _new_sums(self) -> Array:
        pieces, blocks = len(self._bounds), self.backend.blocks  # with many pieces, each needs fewer blocks
        return self.backend.zeros((pieces, min(blocks, -(-8 * blocks // pieces))), np.dtype(np.float64))

    def _square(self, pieces: range) -> None:
        rows = slice(pieces.start, pieces.stop)
        if pieces:
            self.sum_squares(self._sums[rows], self._grads, self._bounds[rows])

    def _squares(self) -> Array:
        """The sums of all pieces."""
        known, count = self._known, len(self._bounds)
        self._sums = self._new_sums() if self._sums is None else self._sums
        for rest in (range(known.start), range(known.stop, count)):
            self._square(rest)
        sums, self._sums, self._known = self._sums, None, range(0)
        return sums

    @property
    def _grads(self) -> Array:
        """The flat gradient that the pieces are slices of."""
        return self.buffer.grads

    def owned(self, what: str = "masters") -> list[Param]:
        """The parameters whose tensors this rank writes to a checkpoint."""
        return self.having(what)

    def tensors(self, what: str) -> Iterator[np.ndarray]:
        """The masters ("masters") or a moment ("m" or "v") of the parameters `owned`, one after the other. Where the
        state is sharded, all ranks iterate together."""
        for p in self.owned(what):
            yield np.array(self.backend.to_numpy(self._view(what, p)))

    def take(self, what: str, param: Param, tensor: Array) -> None:
        """The reverse of `tensors`, for any parameter; call `buffer.publish` when all masters are set."""
        self._view(what, param)[...] = tensor

    def settle(self) -> None:
        """Wait for weights that are still in flight from other ranks."""

    def _view(self, what: str, param: Param) -> Array:
        return self.buffer.view(self.buffer.masters if what == "masters" else getattr(self, what), param)

    def rates(self, step: int, lr: Rate) -> np.ndarray:
        """The numbers that change from step to step: `step_rates` of each factor."""
        return np.vstack([step_rates(step, lr, self.config, factor) for factor in self._factors])

    def count_step(self, lr: Rate) -> np.ndarray:
        """Count a step and return its `rates`."""
        self.step_count += 1
        return self.rates(self.step_count, lr)

    def next_rates(self, lr: Rate) -> Array:
        """As `count_step`, on the backend."""
        return self.backend.asarray(self.count_step(lr), self.backend.master_dtype)

    def step(self, lr: Rate, grad_scale: Any = 1.0) -> None:
        self.apply(self.next_rates(lr), grad_scale)

    def apply(self, rates: Array, grad_scale: Any) -> None:
        """Take a step with the rates of `next_rates`."""
        halves = self.backend.workers
        cuts = [
            (slice(start + (end - start) * i // halves, start + (end - start) * (i + 1) // halves), row)
            for start, end, row in self._plain
            for i in range(halves)
        ]
        self.backend.map(lambda cut: self._adamw(cut[0], self.v[cut[0]], rates[cut[1]], grad_scale), cuts)

    def _adamw(self, place: slice, v: Array, rates: Array, grad_scale: Any) -> None:
        b = self.buffer
        self.update(b.values[place], b.masters[place], self.m[place], v, b.grads[place], rates, grad_scale, self.config)
