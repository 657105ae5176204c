"""Ops that break one rule of the contract each: the checker refuses every one and names the rule.

All are y = x * w (broadcast over rows), right but for one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyforge import gradcheck
from tinyforge.backends import Backend, get_backend
from tinyforge.backends.meta import empty
from tinyforge.contract import ContractError, violations
from tinyforge.gradcheck import TOLERANCE, check_op
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops import IN_FP8, Softmax
from tinyforge.params import with_buffer

FP64 = get_backend("numpy", "fp64", workers=1)


def rows_of(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


class Right(Op):
    """y = x w + b"""

    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (2, 5, 4), (0, 4))

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.weight, self.bias = Param("w", (4,), std=1.0), Param("b", (4,))

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, x)
        return x * self.weight.value + self.bias.value

    def backward(self, dy: Array, stash: Stash) -> Any:
        (x,) = stash.pop(self)
        self.add(dy, x)
        return dy * self.weight.value

    def add(self, dy: Array, x: Array) -> None:
        if self.weight.grad is not None:
            self.weight.grad[...] += rows_of(dy * x).sum(axis=0)
        if self.bias.grad is not None:
            self.bias.grad[...] += rows_of(dy).sum(axis=0)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in cls.shapes:
            yield with_buffer(cls(backend), backend, rng), (backend.asarray(rng.normal(size=shape)),)


def test_the_right_op_passes() -> None:
    assert [row.name for row in check_op(Right, FP64) if row.error <= TOLERANCE] == ["input 0", "w", "b"]


def test_one_op_may_serve_several_cases() -> None:
    class Shared(Right):
        @classmethod
        def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
            op = with_buffer(cls(backend), backend, rng)
            for shape in cls.shapes:
                yield op, (backend.asarray(rng.normal(size=shape)),)

    assert [row.cases for row in check_op(Shared, FP64)] == [3, 3, 3]


WRONG: dict[type[Op], str] = {}


def wrong(message: str) -> Any:
    """Decorator: check_op refuses the op with an error that matches `message`; "error": a row above the tolerance."""

    def add(kind: type[Op]) -> type[Op]:
        WRONG[kind] = message
        return kind

    return add


@wrong("accumulation: the gradient of w is assigned")
class Assigns(Right):
    def add(self, dy: Array, x: Array) -> None:
        super().add(dy, x)
        if self.weight.grad is not None:
            self.weight.grad[...] = rows_of(dy * x).sum(axis=0)


@wrong("accumulation: the gradient of b is assigned")
class AssignsTheSecond(Right):
    def add(self, dy: Array, x: Array) -> None:
        super().add(dy, x)
        if self.bias.grad is not None:
            self.bias.grad[...] = rows_of(dy).sum(axis=0)


@wrong("accumulation: backward replaces the array of w.grad")
class Rebinds(Right):
    def add(self, dy: Array, x: Array) -> None:
        if self.weight.grad is not None:
            self.weight.grad = self.weight.grad + rows_of(dy * x).sum(axis=0)
        if self.bias.grad is not None:
            self.bias.grad[...] += rows_of(dy).sum(axis=0)


@wrong("accumulation: backward does not add its gradient to what w.grad holds")
class Subtracts(Right):
    """Right from zeros, as a gradient that is doubled with each micro-batch is."""

    def add(self, dy: Array, x: Array) -> None:
        if self.weight.grad is not None:
            self.weight.grad[...] = rows_of(dy * x).sum(axis=0) - self.weight.grad
        if self.bias.grad is not None:
            self.bias.grad[...] += rows_of(dy).sum(axis=0)


@wrong("accumulation: grad_with_beta said that w.grad is undefined")
class AddsToUndefined(Right):
    def add(self, dy: Array, x: Array) -> None:
        grad, _ = self.weight.grad_with_beta()
        if grad is not None:
            grad[...] += rows_of(dy * x).sum(axis=0)
        if self.bias.grad is not None:
            self.bias.grad[...] += rows_of(dy).sum(axis=0)


@wrong("error")
class NeverWritten(Right):
    def add(self, dy: Array, x: Array) -> None:
        if self.weight.grad is not None:
            self.weight.grad[...] += rows_of(dy * x).sum(axis=0)


@wrong("untouched: backward writes to dy")
class WritesDy(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        (x,) = stash.pop(self)
        self.add(dy, x)
        dy *= self.weight.value
        return dy


@wrong("untouched: forward writes to input 0")
class WritesX(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, x.copy())
        x *= self.weight.value
        x += self.bias.value
        return x


@wrong("untouched: backward writes to input 0")
class WritesXInBackward(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        (x,) = stash.pop(self)
        self.add(dy, x)
        x[...] = dy
        return dy * self.weight.value


@wrong("untouched: forward writes to parameter w")
class WritesWeights(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        y = super().forward(x, stash)
        self.weight.value[...] *= 1 + 1e-3
        return y


@wrong("untouched: backward writes to output 0")
class WritesItsOutput(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        y = x * self.weight.value + self.bias.value
        if stash is not None:
            stash.push(self, x, y)
        return y

    def backward(self, dy: Array, stash: Stash) -> Any:
        x, y = stash.pop(self)
        self.add(dy, x)
        np.multiply(dy, self.weight.value, out=y)
        return y.copy()


@wrong("untouched: the next pass writes to output 0")
class OneBufferForOutputs(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        y = super().forward(x, stash)
        if vars(self).get("buffer") is None or self.buffer.shape != y.shape or self.buffer.dtype != y.dtype:
            self.buffer = np.empty_like(y)
        self.buffer[...] = y
        return self.buffer


@wrong("untouched: the next pass writes to gradient of input 0")
class OneBufferForGradients(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        dx = super().backward(dy, stash)
        if vars(self).get("buffer") is None or self.buffer.shape != dx.shape or self.buffer.dtype != dx.dtype:
            self.buffer = np.empty_like(dx)
        self.buffer[...] = dx
        return self.buffer


@wrong("stash: after two forward passes backward gives other gradients")
class KeepsItsInputOutsideTheStash(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.x = x
        return super().forward(x, stash)

    def backward(self, dy: Array, stash: Stash) -> Any:
        stash.pop(self)
        self.add(dy, self.x)
        return dy * self.weight.value * np.sign(self.x) * np.sign(self.x)


@wrong("stash: after two forward passes backward gives other gradients")
class KeepsASquareOutsideTheStash(Right):
    """y = x^2 w + b, with x in the op."""

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.x = x
        return super().forward(x * x, stash)

    def backward(self, dy: Array, stash: Stash) -> Any:
        return 2 * self.x * super().backward(dy, stash)


@wrong("stash: backward left 1 records")
class LeavesARecord(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, x)
        return super().forward(x, stash)


@wrong("stash: backward .*popped the record of the caller")
class PopsTwo(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        dx = super().backward(dy, stash)
        if len(stash):
            stash.pop(self)
        return dx


@wrong("stash: backward popped the record of another op")
class DropsAll(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        dx = super().backward(dy, stash)
        stash.drop(0)
        return dx


@wrong("inference: forward without a stash gives another result")
class NoStashDiffers(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        return super().forward(x, stash) if stash is not None else x * 0


@wrong("inference: two forward passes on the same inputs differ")
class Random(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        return super().forward(x, stash) * (1 + 1e-3 * np.random.default_rng().normal())


@wrong("inference: two forward passes with one noise differ")
class RandomInTraining(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        noise = np.random.default_rng().normal() if stash is not None and stash.noise is not None else 0
        return super().forward(x, stash) * (1 + 1e-3 * noise)


@wrong("gradients: a second backward on the same inputs gives other gradients")
class CountsItsCalls(Right):
    calls = 0

    def backward(self, dy: Array, stash: Stash) -> Any:
        self.calls += 1
        return super().backward(dy, stash) / self.calls


@wrong("gradients: that of input 0 is float32")
class NarrowGradient(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy, stash).astype(np.float32)


@wrong(r"gradients: that of input 0 is float64 \(12,\), expected float64 \(3, 4\)")
class FlatGradient(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy, stash).reshape(-1)


@wrong("gradients: forward returned list; return an array")
class ReturnsAList(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Any:
        return [super().forward(x, stash)]


@wrong("gradients: that of input 0 is not finite")
class NotFinite(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy, stash) / 0.0


@wrong("strides: .*gaps")
class Strided(Right):
    """Takes the numbers as they lie in memory."""

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        base = x if x.base is None or x.flags.c_contiguous else x.base.reshape(-1)[: x.size].reshape(x.shape)
        return super().forward(base, stash)


@wrong("precision: forward computes in less than float64")
class Float32Inside(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        return super().forward(x.astype(np.float32).astype(x.dtype), stash)


@wrong("precision: in fp32 forward returns float64")
class Float64Outside(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        return super().forward(x, stash).astype(np.float64)

    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy.astype(self.backend.dtype), stash)


@wrong("precision: in fp32 SavesFloat64 saves float64")
class SavesFloat64(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        y = super().forward(x)
        if stash is not None:
            stash.push(self, x.astype(np.float64))
        return y

    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy, stash).astype(self.backend.dtype)


@wrong("precision: in fp32 output 0 is off")
class OnlyInFloat64(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        y = super().forward(x, stash)
        return y if y.dtype == np.float64 else y * np.float32(1.01)


@wrong("frozen: a pass with frozen parameters raises TypeError")
class FrozenIgnored(Right):
    def add(self, dy: Array, x: Array) -> None:
        self.weight.grad += rows_of(dy * x).sum(axis=0)
        self.bias.grad += rows_of(dy).sum(axis=0)


@wrong("frozen: with w.* frozen the gradients of the inputs are others")
class FrozenMeansNoGradient(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        dx = super().backward(dy, stash)
        return 0 * dx if self.weight.grad is None else dx


@wrong("parameters: the op holds hidden")
class Forgot(Right):
    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.more = [Param("hidden", (4,))]


@wrong("cases: in each the gradient of input 0 is empty or 0")
class OnlyEmpty(Right):
    shapes = ((0, 4), (0, 3, 4))

    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy, stash) * 77


@wrong("cases: in each the gradient of w is empty or 0")
class OnlyZeros(Right):
    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for op, (x,) in super().cases(backend, rng):
            yield op, (0 * x,)


@wrong("cases: none has two rows")
class OneRow(Right):
    """Wrong for more than one."""

    shapes = ((1, 4),)

    def add(self, dy: Array, x: Array) -> None:
        super().add(dy[:1], x[:1])


@wrong("cases: none has a parameter or a floating-point input")
class Unchecked(Op):
    def forward(self, ids: Array, stash: Stash | None = None) -> Array:
        return ids * 1.0

    def backward(self, dy: Array, stash: Stash) -> Any:
        return None

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        yield cls(backend), (backend.asarray(rng.integers(0, 3, 4)),)


@kernel
def half_and_mask(x: Array) -> tuple[Array, Array]:
    return x[..., ::2] * 2, x[..., ::2] > 0


@kernel
def half_bwd(dy: Array, mask: Array) -> Array:
    return np.stack([2 * dy, 0 * dy], axis=-1).reshape(*dy.shape[:-1], -1)


@wrong(r"memory: forward on arrays without memory returns .*\(2, 6\).*, expected .*\(2, 3\)")
class Half(Op):
    """y = 2 x[..., ::2], with no function on "meta" to say that it is smaller."""

    fwd, bwd = half_and_mask, half_bwd

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        y, mask = self.fwd(x)
        if stash is not None:
            stash.push(self, mask)
        return y

    def backward(self, dy: Array, stash: Stash) -> Array:
        return self.bwd(dy, *stash.pop(self))

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        yield cls(backend), (backend.asarray(rng.normal(size=(2, 6))),)


def halved(x: Array, dtype: Any = None) -> Array:
    return empty((*x.shape[:-1], x.shape[-1] // 2), dtype or x.dtype)


@wrong("memory: HalfOfWideMasks saves 48 bytes without memory, 6 in NumPy")
class HalfOfWideMasks(Half):
    @kernel
    def fwd(x: Array) -> tuple[Array, Array]:  # type: ignore[misc]  # noqa: N805
        return half_and_mask(x)

    fwd.on("meta")(lambda x: (halved(x), halved(x)))


@wrong("memory: on arrays without memory, gradients: that of input 0 is float64 .2, 3., expected float64 .2, 6.")
class HalfOfANarrowGradient(Half):
    @kernel
    def fwd(x: Array) -> tuple[Array, Array]:  # type: ignore[misc]  # noqa: N805
        return half_and_mask(x)

    fwd.on("meta")(lambda x: (halved(x), halved(x, bool)))


def test_memory_functions_that_are_right_pass() -> None:
    class HalfOfAll(HalfOfANarrowGradient):
        @kernel
        def bwd(dy: Array, mask: Array) -> Array:  # type: ignore[misc]  # noqa: N805
            return half_bwd(dy, mask)

        bwd.on("meta")(lambda dy: empty((*dy.shape[:-1], 2 * dy.shape[-1]), dy.dtype))

    assert len(check_op(HalfOfAll, FP64)) == 1


@wrong("error")
class OnlyTheFirstRow(Right):
    def add(self, dy: Array, x: Array) -> None:
        super().add(rows_of(dy)[:1], rows_of(x)[:1])


@wrong("error")
class SmallTermLost(Right):
    """A gradient that is 1e-4 of the others and 1 % off."""

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        y = super().forward(x, stash)
        y[..., 0] += 1e-4 * np.sin(x[..., 1])
        return y

    def backward(self, dy: Array, stash: Stash) -> Any:
        (x,) = [saved[0] for _, saved in stash][-1:]
        dx = super().backward(dy, stash)
        dx[..., 1] += 1.01e-4 * np.cos(x[..., 1]) * dy[..., 0]
        return dx


@wrong("strides: .*axes in another order")
class ReadsDyAsItLies(Right):
    def add(self, dy: Array, x: Array) -> None:
        super().add(dy.ravel(order="K").reshape(dy.shape), x)


@wrong("strides: a dy that repeats a row")
class TakesAStrideForALength(Right):
    """A dy that one row is broadcast to is taken for that row."""

    def add(self, dy: Array, x: Array) -> None:
        super().add(dy, x)
        if self.bias.grad is not None and dy.strides[0] == 0 and dy.size:
            self.bias.grad[...] -= rows_of(dy)[1:].sum(axis=0)


@wrong("error")
class TwoRowsAtATime(Right):
    """Right for an even number of rows: the last of an odd one is left out."""

    shapes = ((4, 4), (2, 5, 4))

    def add(self, dy: Array, x: Array) -> None:
        even = rows_of(x).shape[0] // 2 * 2
        super().add(rows_of(dy)[:even], rows_of(x)[:even])


@wrong("error")
class NoBiasForOne(Right):
    """A batch of one is not summed over."""

    def add(self, dy: Array, x: Array) -> None:
        bias = None if self.bias.grad is None else self.bias.grad.copy()
        super().add(dy, x)
        if bias is not None and len(x) == 1:
            self.bias.grad[...] = bias


@wrong("error")
class KeepsItsFirstWeights(Right):
    """Backward uses the weights of the first step."""

    kept = None

    def backward(self, dy: Array, stash: Stash) -> Any:
        (x,) = stash.pop(self)
        self.add(dy, x)
        if self.kept is None:
            self.kept = self.weight.value.copy()
        return dy * self.kept


@wrong("error")
class OnlyForOnes(Right):
    """As if dy were 1 everywhere."""

    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(np.full_like(dy, dy.mean()) if dy.size else dy, stash)


@wrong("gradients: they are not linear in dy")
class Clips(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy.clip(-9, 9), stash)


@wrong("gradients: they are not linear in dy")
class DropsSmallOnes(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(np.where(np.abs(dy) > 1e-5, dy, 0), stash)


@wrong("stash: after two forward passes backward gives other gradients")
class AStackOfItsOwn(Right):
    """The last pass is the first to go back: on one stash, not with a stash each."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.stack: list[Array] = []

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            self.stack.append(x)
        return super().forward(x, stash)

    def backward(self, dy: Array, stash: Stash) -> Any:
        stash.pop(self)
        x = self.stack.pop()
        self.add(dy, x)
        return dy * self.weight.value


@wrong("gradients: a second backward on the same inputs gives other gradients")
class NoisySums(Right):
    """In the last digits, as sums in the order in which threads end."""

    def add(self, dy: Array, x: Array) -> None:
        super().add(dy * (1 + 1e-13 * np.random.default_rng().normal()), x)


@wrong("untouched: a pass changes np.random's state")
class SeedsEveryone(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        np.random.seed(3)  # noqa: NPY002
        return super().forward(x, stash)


@wrong("untouched: a pass changes np.seterr")
class SilencesEveryone(Right):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        np.seterr(under="warn" if np.geterr()["under"] != "warn" else "ignore")
        return super().forward(x, stash)


@wrong("error")
class SumsInFloat32(Right):
    def add(self, dy: Array, x: Array) -> None:
        super().add(dy.astype(np.float32), x.astype(np.float32))


@wrong("untouched: backward writes to input 0")
class WritesToItsStash(Right):
    """What is stashed is the input itself."""

    def backward(self, dy: Array, stash: Stash) -> Any:
        (x,) = [saved[0] for _, saved in stash][-1:]
        dx = super().backward(dy, stash)
        x *= 0.5
        return dx


@wrong("untouched: forward writes to parameter w")
class WritesOnce(Right):
    """The second write changes nothing."""

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        np.abs(self.weight.value, out=self.weight.value)
        return super().forward(x, stash)


@wrong("stash: after a forward pass on . rows a pass gives other results")
class KnowsTheShapeBefore(Right):
    last: Any = None
    before: Any = None

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.before, self.last = self.last, x.shape
        return super().forward(x, stash)

    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy, stash) * (1 if self.before in (None, self.last) else 2)


@wrong("stash: with another op's record on it backward gives other gradients")
class CountsTheStash(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        return len(stash) * super().backward(dy, stash)


@wrong("gradients: they are not linear in dy: those of dy with every second row 0")
class WrongAtZeroRows(Right):
    """Those of a masked loss."""

    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy, stash) + (dy == 0).all(axis=-1, keepdims=True)


@wrong("gradients: they are not linear in dy: those of dy less its mean")
class WrongWhereTheSumIsZero(Right):
    def backward(self, dy: Array, stash: Stash) -> Any:
        return super().backward(dy, stash) * (2 if abs(dy.sum()) < 1e-9 else 1)


@wrong("parameters: the op holds hidden")
class HidesInAnObject(Right):
    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.box = SimpleNamespace(hidden={Param("hidden", (4,))})


@wrong("cases: every parameter is frozen in each; yield one in which b is learned")
class AlwaysFrozen(Right):
    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.weight.frozen = self.bias.frozen = True


@wrong("cases: one yields ndarray for the inputs")
class NoTuple(Right):
    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, Any]]:
        for op, (x,) in super().cases(backend, rng):
            yield op, x


@wrong("cases: with integers that repeat those of the first row the gradient of w is off by")
class Lookup(Op):
    """y = w[ids]. Its case hides that ids may repeat."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.weight = Param("w", (4,))

    def forward(self, ids: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, ids)
        return self.weight.value[ids]

    def backward(self, dy: Array, stash: Stash) -> Any:
        (ids,) = stash.pop(self)
        if self.weight.grad is not None:
            self.weight.grad[ids] += dy

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        yield with_buffer(cls(backend), backend, rng), (np.array([3, 1]),)


class CheckedLookup(Lookup):
    """Right: it says what it does not do."""

    def forward(self, ids: Array, stash: Stash | None = None) -> Array:
        if len(set(ids.tolist())) < len(ids):
            raise ValueError("repeated ids")
        return super().forward(ids, stash)


class Masked(Op):
    """Right: a permutation of rows, which one row less is not, and booleans."""

    def forward(self, x: Array, order: Array, keep: Array, stash: Stash | None = None) -> Array:
        if sorted(order.tolist()) != list(range(len(x))):
            raise ValueError("no permutation")
        if stash is not None:
            stash.push(self, order, keep)
        return x[order] * keep[:, None]

    def backward(self, dy: Array, stash: Stash) -> Any:
        order, keep = stash.pop(self)
        return (dy * keep[:, None])[np.argsort(order)], None, None

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        yield cls(backend), (backend.asarray(rng.normal(size=(3, 4))), np.array([1, 2, 0]), np.array([1, 1, 0], bool))


class Constant(Right):
    """Right: a learned array, without any input."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        del self.bias

    def forward(self, stash: Stash | None = None) -> Array:  # type: ignore[override]
        if stash is not None:
            stash.push(self)
        return self.weight.value.copy()

    def backward(self, dy: Array, stash: Stash) -> Any:
        stash.pop(self)
        if self.weight.grad is not None:
            self.weight.grad += dy
        return ()

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        yield with_buffer(cls(backend), backend, rng), ()


@pytest.mark.parametrize("kind", [CheckedLookup, Masked, Constant])
def test_unusual_ops_that_are_right_pass(kind: type[Op]) -> None:
    assert all(row.error <= TOLERANCE for row in check_op(kind, FP64))


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_op_is_refused_and_the_rule_named(kind: type[Op], capsys: pytest.CaptureFixture[str]) -> None:
    with np.errstate():  # one of them changes it
        if WRONG[kind] == "error":
            assert max(row.error for row in check_op(kind, FP64)) > TOLERANCE
        else:
            with pytest.raises(ContractError, match=f"{kind.__name__}: {WRONG[kind]}"):
                check_op(kind, FP64)


def test_the_command_refuses_them_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gradcheck, "known_ops", lambda modules: [Assigns, Forgot, Right])
    assert gradcheck.main(["here"]) == 1
    out = capsys.readouterr().out
    assert "REFUSED Assigns: accumulation: the gradient of w is assigned" in out
    assert "REFUSED Forgot: parameters: " in out and "Right                w " in out
    assert out.splitlines()[-1].endswith("; 2 sentences of refusal")


@pytest.mark.parametrize("kind", IN_FP8, ids=lambda kind: kind.__name__)
def test_the_ops_in_fp8_keep_the_contract_and_their_faults_show_in_the_ratio(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(violations(kind, FP64)) == []
    pytest.importorskip("ml_dtypes", reason="the formats of --precision fp8 on NumPy")
    assert max(row.error for row in gradcheck.fp8_rows(kind, "numpy")) <= gradcheck.LARGEST_RATIO
    right = kind.backward
    monkeypatch.setattr(kind, "backward", lambda op, dy, stash: right(op, dy, stash) * 1.1)
    assert max(row.error for row in gradcheck.fp8_rows(kind, "numpy")) > gradcheck.LARGEST_RATIO


def test_several_rules_are_said_together() -> None:
    class Both(Assigns, Forgot):
        pass

    with pytest.raises(ContractError, match=r"Both: parameters: .*; Both: accumulation: "):
        check_op(Both, FP64)
    assert list(violations(Softmax, FP64)) == []
