"""The contract of `tinyforge/op.py`, held against the cases of an op: everything but the values of its gradients.

`violations(kind, backend)` yields a sentence for each rule that an op breaks, beginning with the rule's name:

    inference      forward gives the same bits with and without a stash, and each time
    untouched      forward and backward write to no input, no parameter, no `dy`, to nothing that they have returned,
                   and to no state of the process: np.random, random, np.seterr
    gradients      backward returns a gradient of the shape and dtype of each floating-point input, None for integers;
                   it is linear in `dy`
    stash          backward pops what forward has pushed, no more and no less; what it needs is kept there alone
    accumulation   parameter gradients are added (+=), into the memory that they have
    frozen         a frozen parameter gets no gradient, and all else stays as it was
    strides        inputs and `dy` may have gaps, be transposed, or be read backwards; `dy` may repeat a row
    precision      the backend's dtype throughout; the other precisions agree with float64
    memory         arrays without memory have the shapes and dtypes of the real ones, and as much is saved
    parameters     `params()` lists every parameter that the op holds
    cases          there are some with more than one row
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from tinyforge.backends import Backend, get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.model import Model
from tinyforge.op import Op, Owner, Param, Stash
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream

Arrays = tuple[Array, ...]


class ContractError(UserError):
    """An op that breaks a rule of the contract. The message names the op and each rule."""


def outputs_of(op: Op, inputs: Sequence[Any], stash: Stash | None = None) -> Arrays:
    """What forward returns, as a tuple. Raises ContractError for anything but arrays."""
    result = op.forward(*inputs, stash=stash)
    found = result if isinstance(result, tuple) else (result,)
    for y in found:
        if not (hasattr(y, "dtype") and hasattr(y, "shape")):
            raise ContractError(
                f"gradients: forward returned {type(y).__name__}; return an array, or a tuple of arrays"
            )
    return found


def gradients_of(inputs: Sequence[Any], grads: Any) -> tuple[Any, ...]:
    """What backward returned, as a tuple with an entry for each input. Raises ContractError where it cannot be that."""
    if isinstance(grads, list):
        raise ContractError("gradients: backward returned a list; return a tuple, with a gradient for each input")
    if not isinstance(grads, tuple):
        grads = (grads,) + (None,) * (len(inputs) - 1)  # the rest are ids or targets
    if len(grads) != len(inputs):
        raise ContractError(
            f"gradients: backward returned {len(grads)} gradients for {len(inputs)} inputs; return one for each, None "
            "for integers"
        )
    for i, (x, dx) in enumerate(zip(inputs, grads, strict=True)):
        if x.dtype.kind in "iub" and dx is not None:
            raise ContractError(f"gradients: backward returned a gradient for input {i}, whose numbers are integers")
        if x.dtype.kind not in "iub" and dx is None:
            raise ContractError(f"gradients: backward returned no gradient for input {i}")
        if dx is not None and (dx.shape, dx.dtype) != (x.shape, x.dtype):
            raise ContractError(
                f"gradients: that of input {i} is {dx.dtype} {dx.shape}, expected {x.dtype} {x.shape} as the input"
            )
    return grads


def violations(kind: type[Op], backend: Backend, seed: int = 0) -> Iterator[str]:
    """A sentence for each rule that an op breaks: the first time that one of its cases shows it."""
    said: set[str] = set()
    rows, takes_inputs = 0, False  # without inputs there are no rows
    for op, inputs in kind.cases(backend, np.random.default_rng(seed)):
        if not isinstance(inputs, tuple | list):
            raise ContractError(
                f"{kind.__name__}: cases: one yields {type(inputs).__name__} for the inputs; yield a tuple: op, (x,)"
            )
        rows, takes_inputs = max(rows, *(_rows(x) for x in inputs), 0), takes_inputs or bool(inputs)
        for sentence in _of_case(op, inputs, np.random.default_rng(seed)):
            if (rule := sentence.split(":")[0]) not in said:
                said.add(rule)
                yield sentence
    if rows < 2 and takes_inputs:
        yield "cases: none has two rows; yield one, since some faults show only between rows"
    if not said and backend.precision.name == "fp64":
        yield from _other_precisions(kind, backend, seed)
        if backend.name == "numpy":
            yield from _memory(kind, backend, seed)


def fewer_rows(op: Op, inputs: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The inputs with one row less, and with one alone, if all have as many: even numbers become odd ones. Without
    those for which forward raises an error."""
    rows = {x.shape[0] if x.shape else 0 for x in inputs}
    for count in {1, max(rows) - 1} if len(rows) == 1 and max(rows) > 1 else ():
        fewer = tuple(x[:count].copy() for x in inputs)
        if _accepts(op, fewer):
            yield fewer


def repeated_ids(op: Op, inputs: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The inputs with the integers of the first row in each, if all have as many rows and forward raises no error."""
    rows = {x.shape[0] if x.shape else 0 for x in inputs}
    if len(rows) == 1 and max(rows) > 1 and any(x.dtype.kind in "iu" for x in inputs):
        repeated = tuple(x[[0] * len(x)] if x.dtype.kind in "iu" else x.copy() for x in inputs)
        if _accepts(op, repeated):
            yield repeated


def _accepts(op: Op, inputs: Sequence[Any]) -> bool:
    try:
        op.forward(*[x.copy() for x in inputs])
    except Exception:  # a case that the op does not claim to have
        return False
    return True


def _rows(x: Array) -> int:
    """The length of the first axis; that of a vector is its size."""
    return int(x.shape[0]) if x.shape else 1


@dataclass(frozen=True)
class _Run:
    """Copies on the host of what one forward and backward gave."""

    outputs: list[np.ndarray]
    inputs: list[np.ndarray | None]
    params: dict[str, np.ndarray]

    def all(self) -> list[np.ndarray]:
        return [*self.outputs, *self.kept(), *self.params.values()]

    def kept(self) -> list[np.ndarray]:
        """The gradients of the inputs that have one."""
        return [dx for dx in self.inputs if dx is not None]


class _Case:
    """One case of an op, run in different ways."""

    def __init__(self, op: Op, inputs: Sequence[Any], rng: np.random.Generator) -> None:
        self.op, self.inputs, self.host = op, inputs, op.backend.to_numpy
        self.broken: set[str] = set()
        self.values = self.copies([p.value for p in op.params()])  # before anything has run: a write may be idempotent
        self.upstream = tuple(op.backend.asarray(rng.normal(size=y.shape), y.dtype) for y in self.forward(Stash()))

    def learned(self) -> list[Param]:
        return [p for p in self.op.params() if not p.frozen]

    def copies(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        return [np.array(self.host(a)) for a in arrays]

    def forward(self, stash: Stash | None = None, inputs: Sequence[Any] | None = None) -> Arrays:
        """On copies: an op that writes to its inputs breaks one rule, not all."""
        return outputs_of(self.op, [x.copy() for x in self.inputs] if inputs is None else inputs, stash)

    def backward(self, stash: Stash, dy: Sequence[Any] | None = None) -> tuple[Any, ...]:
        dy = [d.copy() for d in self.upstream] if dy is None else dy
        return gradients_of(self.inputs, self.op.backward(dy[0] if len(dy) == 1 else tuple(dy), stash))

    def run(
        self, inputs: Sequence[Any] | None = None, dy: Sequence[Any] | None = None, noise: Stream | None = None
    ) -> _Run:
        """Forward and backward with gradients that start at 0."""
        for p in self.learned():
            p.grad[...] = 0
        stash = Stash(noise)
        outputs = self.copies(self.forward(stash, inputs))
        dx = self.backward(stash, dy)
        grads = {p.name: np.array(self.host(p.grad)) for p in self.learned()}
        return _Run(outputs, [None if d is None else np.array(self.host(d)) for d in dx], grads)

    def same(self, a: Sequence[Any], b: Sequence[Any]) -> bool:
        """Bitwise on NumPy; elsewhere to rounding, since another order of summation is allowed."""
        if self.op.backend.name == "numpy":
            return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
        return self.near(a, b)

    def near(self, a: Sequence[Any], b: Sequence[Any], tolerance: float = 1e-11) -> bool:
        return all(_distance(x, y) <= tolerance for x, y in zip(a, b, strict=True))


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest number expected or to 1; infinite for NaN and other shapes."""
    if found.shape != expected.shape:
        return np.inf
    if not found.size:
        return 0.0
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    difference = float(np.abs(found - expected).max()) / max(1.0, float(np.abs(expected).max()))
    return difference if np.isfinite(difference) else np.inf


def _of_case(op: Op, inputs: Sequence[Any], rng: np.random.Generator) -> Iterator[str]:
    """The rules on one case. An error that the op raises ends them, and is a sentence too."""
    hidden = [p.name for p in _held(op) if p not in op.params()]
    if hidden:
        yield f"parameters: the op holds {', '.join(hidden)}, which params() does not list"
    rule = "forward"
    before = _global_state()
    try:
        case = _Case(op, inputs, rng)
        for rule, check in _CHECKS.items():
            for what in check(case, rng):
                case.broken.add(rule)
                yield f"{rule}: {what}"
    except ContractError as error:
        yield str(error)
    except NotImplementedError:  # nothing to check yet
        raise
    except Exception as error:
        shapes = ", ".join(str(x.shape) for x in inputs)
        yield f"{rule}: {_WHERE.get(rule, 'a pass')} raises {type(error).__name__} for inputs of {shapes}: {error}"
    for what, state in _global_state().items():
        if state != before[what]:
            yield f"untouched: a pass changes {what}, which is everyone's"


def _global_state() -> dict[str, str]:
    state = {"np.random's state": np.random.get_state(), "random's state": random.getstate(), "np.seterr": np.geterr()}
    return {what: repr(found) for what, found in state.items()}


def _held(op: Op) -> list[Param]:
    """Every Param that can be reached from the attributes of an op, through other objects and containers."""
    found: dict[int, Param] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, Param):
            found[id(value)] = value
        elif id(value) not in seen and not isinstance(value, (Backend, type, ModuleType)):
            seen.add(id(value))
            if isinstance(value, (list, tuple, set, frozenset)):
                parts = list(value)
            else:
                parts = list((value if isinstance(value, dict) else getattr(value, "__dict__", {})).values())
            for part in parts:
                visit(part)

    visit(op)
    return list(found.values())


def _inference(case: _Case, rng: np.random.Generator) -> Iterator[str]:
    kept, again = (case.copies(case.forward(Stash())) for _ in range(2))
    if not case.same(kept, again):
        yield "two forward passes on the same inputs differ"
    elif not case.same(kept, case.copies(case.forward())):
        yield "forward without a stash gives another result than with one"
    noisy = (case.copies(case.forward(Stash(Stream(5, "noise")))) for _ in range(2))
    if not case.same(*noisy):
        yield "two forward passes with one noise differ; take random numbers from stash.key(self, rate) alone"


def _untouched(case: _Case, rng: np.random.Generator) -> Iterator[str]:
    op, stash = case.op, Stash()
    arrays = {
        **{f"input {i}": x for i, x in enumerate(case.inputs)},
        **{f"parameter {p.name}": p.value for p in op.params()},
    }
    before = dict(zip(arrays, [*case.copies(case.inputs), *case.values], strict=True))

    def changed(where: str) -> Iterator[str]:
        for name, copy in before.items():
            if case.host(arrays[name]).tobytes() != copy.tobytes():
                arrays[name][...] = op.backend.xp.asarray(copy)
                yield f"{where} writes to {name}"

    y = case.forward(stash, case.inputs)
    yield from changed("forward")
    dy = tuple(d.copy() for d in case.upstream)
    arrays.update({"dy": dy[0]} if len(dy) == 1 else {f"dy[{i}]": d for i, d in enumerate(dy)})
    arrays.update({f"output {i}, which is the caller's": part for i, part in enumerate(y)})
    before = dict(zip(arrays, case.copies(list(arrays.values())), strict=True))
    dx = case.backward(stash, dy)
    yield from changed("backward")
    arrays = {f"gradient of input {i}, which it returned before": d for i, d in enumerate(dx) if d is not None}
    arrays.update({f"output {i}, which it returned before": part for i, part in enumerate(y)})
    before = dict(zip(arrays, case.copies(list(arrays.values())), strict=True))
    stash = Stash()
    case.forward(stash, _moved(case, rng))
    case.backward(stash, [2 * d for d in case.upstream])
    yield from changed("the next pass")


def _moved(case: _Case, rng: np.random.Generator) -> list[Any]:
    """The inputs, the floating-point ones changed a little."""
    asarray = case.op.backend.asarray
    return [x * 0.99 + asarray(0.01 * rng.normal(size=x.shape)) if x.dtype.kind == "f" else x for x in case.inputs]


def _gradients(case: _Case, rng: np.random.Generator) -> Iterator[str]:
    first = case.run()
    if not case.same(first.all(), case.run().all()):
        yield "a second backward on the same inputs gives other gradients"
    for i, dx in enumerate(first.inputs):
        if dx is not None and not np.isfinite(dx).all():
            yield f"that of input {i} is not finite"
            return
    for scale in (-1024.0, 2.0**-20):  # powers of two round nothing
        found = case.run(dy=[scale * d if d.dtype.kind == "f" else d for d in case.upstream])
        pairs = zip(found.all()[len(found.outputs) :], first.all()[len(first.outputs) :], strict=True)
        if not all(_distance(dx / scale, expected) <= 1e-11 for dx, expected in pairs):
            yield f"they are not linear in dy: {scale:g} dy gives something else than {scale:g} times the gradients"
            return
    whole = first.all()[len(first.outputs) :]
    parts: dict[str, Callable[[Any], Any]] = {"with every second row 0": _odd_rows, "less its mean": _less_mean}
    for what, part in parts.items():
        some = [part(d) if d.dtype.kind == "f" else d for d in case.upstream]
        rest = [d - s if d.dtype.kind == "f" else d for d, s in zip(case.upstream, some, strict=True)]
        grads = [case.run(dy=dy).all()[len(first.outputs) :] for dy in (some, rest)]
        sums = [a + b for a, b in zip(*grads, strict=True)]
        if not case.near(sums, whole, 1e-6):  # what rounds to float32 is seen by its error
            yield f"they are not linear in dy: those of dy {what} and of the rest do not add up to those of dy"
            return


def _odd_rows(d: Any) -> Any:
    rows = d.copy()
    if d.shape:
        rows[::2] = 0
    return rows


def _less_mean(d: Any) -> Any:
    return d - d.mean() if d.size else d.copy()


def _stash(case: _Case, rng: np.random.Generator) -> Iterator[str]:
    stranger, stash = Op(case.op.backend, "the caller"), Stash()
    stash.push(stranger, "record")
    case.forward(stash)
    if next(owner for owner, _ in [*stash, (None, ())]) is not stranger:
        yield "forward takes a record that another op has pushed"
        return
    for p in case.learned():
        p.grad[...] = 0
    dx = [d for d in case.backward(stash) if d is not None]
    found = case.copies([*dx, *(p.grad for p in case.learned())])
    owners = [owner for owner, _ in stash]
    if owners != [stranger]:
        left = len(owners) - (stranger in owners)
        yield f"backward left {left} records" if left else "backward popped the record of another op"
        return
    if case.broken & {"untouched", "gradients", "accumulation"}:
        return
    run = case.run()
    alone = run.all()[len(run.outputs) :]
    if not case.near(found, alone):
        yield "with another op's record on it backward gives other gradients; read what you have pushed alone"
        return
    for fewer in fewer_rows(case.op, case.inputs):
        outputs_of(case.op, fewer, Stash())
        again = case.run()
        if not case.near(again.all(), run.all()):
            yield f"after a forward pass on {_rows(fewer[0])} rows a pass gives other results; keep no state in the op"
            return
    other, twice, one, two = _moved(case, rng), [2 * d for d in case.upstream], Stash(), Stash()
    runs, dys = (case.run(), case.run(other, twice)), (case.upstream, twice)
    sums = [runs[0].params[p.name] + runs[1].params[p.name] for p in case.learned()]
    # The last pass goes back first, as on one stash; and the first one, with a stash each.
    for first, second, (early, late) in ((one, one, (1, 0)), (one, two, (0, 1))):
        for p in case.learned():
            p.grad[...] = 0
        case.forward(first)
        case.forward(second, other)
        case.backward(first, dys[early])
        dx = [d for d in case.backward(second, dys[late]) if d is not None]
        found = case.copies([*dx, *(p.grad for p in case.learned())])
        if not case.near(found, [*(d for d in runs[late].inputs if d is not None), *sums]):
            yield "after two forward passes backward gives other gradients; keep what it needs on the stash alone"
            return


def _accumulation(case: _Case, rng: np.random.Generator) -> Iterator[str]:
    first, memory = case.run(), {p.name: p._grad for p in case.learned()}
    start = {p.name: rng.normal(size=p.shape) for p in case.learned()}

    def again(stash: Stash) -> None:
        case.forward(stash)
        case.backward(stash)

    for p in case.learned():
        p.grad[...] = case.op.backend.xp.asarray(start[p.name])
    again(Stash())
    for p in case.learned():
        if p._grad is not memory[p.name] or p._grad.dtype != case.op.backend.master_dtype:
            yield f"backward replaces the array of {p.name}.grad; write into it: grad[...] += ..."
            return
        found, own = case.host(p.grad), first.params[p.name]
        if case.near([found], [own]) and not case.near([found], [own + start[p.name]]):
            yield f"the gradient of {p.name} is assigned; parameter gradients are added: grad += ..."
        elif not case.near([found], [own + start[p.name]]):
            yield f"backward does not add its gradient to what {p.name}.grad holds: grad += ..."
    for p in case.learned():
        p._grad.fill(np.nan)
        p.grad_is_zero = True  # 0, whatever its memory says
    again(Stash())
    for p in case.learned():
        if not case.near([case.host(p.grad)], [first.params[p.name]]):
            yield f"grad_with_beta said that {p.name}.grad is undefined, and not all of it was assigned"


def _frozen(case: _Case, rng: np.random.Generator) -> Iterator[str]:
    """All parameters frozen, then every second."""
    params = case.op.params()
    expected = case.run(noise=Stream(5, "noise"))
    before = [(p.frozen, p._value, vars(p).get("_grad")) for p in params]
    values = [p.value.copy() for p in params]
    try:
        for kept in (0, 1) if case.learned() else ():
            for i, p in enumerate(params):
                p.frozen = not (kept and i % 2)
            ParamBuffer(params, case.op.backend)
            for p, value, (_, stored, _) in zip(params, values, before, strict=True):
                if p.weights:  # codes as they are: not every format makes the same ones of their numbers
                    p.value = stored
                else:
                    p.value[...] = value
            yield from _frozen_like(case, expected)
    finally:
        for p, (frozen, value, grad) in zip(params, before, strict=True):
            p.frozen, p._value, p._grad = frozen, value, grad


def _frozen_like(case: _Case, expected: _Run) -> Iterator[str]:
    found = case.run(noise=Stream(5, "noise"))
    left = {name: grad for name, grad in expected.params.items() if name in found.params}
    names = ", ".join(p.name for p in case.op.params() if p.frozen)
    if not case.near(found.outputs, expected.outputs):
        yield f"with {names} frozen forward gives another result"
    elif not case.near(found.kept(), expected.kept()):
        yield f"with {names} frozen the gradients of the inputs are others"
    elif not case.near([found.params[name] for name in left], list(left.values())):
        yield f"with {names} frozen the gradients of the other parameters are others"
    elif any(p.grad is not None for p in case.op.params() if p.frozen):
        yield f"backward gives {names} a gradient, though frozen"


def _strides(case: _Case, rng: np.random.Generator) -> Iterator[str]:
    xp, expected = case.op.backend.xp, case.run()

    def every_second(x: Any) -> Any:
        """x as every second element of a larger array, the gaps NaN (or an id far out of range)."""
        if not x.shape:
            return x
        wide = xp.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan if x.dtype.kind == "f" else 2**30, x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    layouts: dict[str, Callable[[Any], Any]] = {
        "gaps between their numbers": every_second,
        "their axes in another order": lambda x: xp.ascontiguousarray(x.T).T,
        "a negative stride": lambda x: xp.ascontiguousarray(x[::-1])[::-1] if x.shape else x,
    }
    for what, layout in layouts.items():
        found = case.run([layout(x) for x in case.inputs], [layout(d) for d in case.upstream])
        if not case.near(found.all(), expected.all()):
            yield f"inputs and dy with {what} give another result; do not reshape or take the address without a copy"
            return
    repeated = [xp.broadcast_to(d[:1], d.shape) if d.shape else d for d in case.upstream]
    if not case.near(case.run(dy=repeated).all(), case.run(dy=[d.copy() for d in repeated]).all()):
        yield "a dy that repeats a row, with a stride of 0, gives another result"


def _precision(case: _Case, rng: np.random.Generator) -> Iterator[str]:
    """A change of 1e-11 is far below the resolution of float32, and far above that of float64."""
    dtype = case.op.backend.dtype
    y = case.forward(Stash())
    if odd := {str(part.dtype) for part in y if part.dtype.kind == "f" and part.dtype not in (dtype, np.float64)}:
        yield f"forward returns {', '.join(odd)}, expected {dtype}"
    if dtype != np.float64:
        return
    base, run = case.copies(y), case.run()
    for i, (x, dx) in enumerate(zip(case.inputs, run.inputs, strict=True)):
        if dx is None or not x.size or not np.abs(dx).max() > 1e-3:
            continue
        direction = case.op.backend.asarray(np.sign(dx) * max(1.0, float(np.abs(case.host(x)).max())))

        def moves(step: float, i: int = i, x: Any = x, direction: Any = direction) -> bool:
            moved = [*case.inputs[:i], x + step * direction, *case.inputs[i + 1 :]]
            now = case.copies(case.forward(Stash(), moved))
            return any(a.tobytes() != b.tobytes() for a, b in zip(base, now, strict=True))

        if not moves(1e-11) and moves(1e-5):
            yield f"forward computes in less than float64: a change of input {i} by 1e-11 changes nothing"


_CHECKS: dict[str, Callable[[_Case, np.random.Generator], Iterator[str]]] = {
    "untouched": _untouched,
    "inference": _inference,
    "gradients": _gradients,
    "accumulation": _accumulation,
    "stash": _stash,
    "strides": _strides,
    "precision": _precision,
    "frozen": _frozen,
}
_WHERE = {
    "stash": "backward after another op's record",
    "accumulation": "backward on gradients that are not 0",
    "strides": "a pass on arrays with gaps",
    "frozen": "a pass with frozen parameters",
}


class _Lower(Stash):
    """Notes saved float64 arrays: where a precision is doubled without anyone asking for it."""

    found = ""

    def push(self, owner: Owner, *saved: Any) -> None:
        if any(getattr(a, "dtype", None) == np.float64 for a in saved):
            self.found = owner.name
        super().push(owner, *saved)


LOWER = {"numpy": {"fp32": 1e-4}, "cupy": {"fp32": 1e-4, "bf16": 0.1}}
"""The precisions that are compared with float64, and their tolerances, relative to the largest number of an array."""


def _other_precisions(kind: type[Op], backend: Backend, seed: int) -> Iterator[str]:
    """Precisions, and sizes, that the backend refuses are left out."""
    for precision, tolerance in LOWER.get(backend.name, {}).items():
        if precision == "bf16" and issubclass(kind, Model):
            continue  # its errors add up over the layers: tests/gpu compares whole models
        try:
            lower = get_backend(backend.name, precision, workers=1)
            pairs = zip(*(kind.cases(b, np.random.default_rng(seed)) for b in (lower, backend)), strict=True)
            found = (_difference(low, exact, tolerance, np.random.default_rng(seed)) for low, (exact, _) in pairs)
            what = next(filter(None, found), "")
        except ContractError as error:
            what = f"{error}"
        except UserError:
            continue
        if what:
            yield f"precision: in {precision} {what}"
            return


def _difference(low: tuple[Op, Sequence[Any]], exact: Op, tolerance: float, rng: np.random.Generator) -> str:
    """How a case in a lower precision differs from the same one in float64; empty if it does not."""
    op, host = low[0], low[0].backend.to_numpy
    # A case may make its inputs with NumPy's float64 and leave their precision to the op's backend.
    inputs = [op.backend.asarray(host(x)) if x.dtype == np.float64 else x for x in low[1]]
    for p, q in zip(op.params(), exact.params(), strict=True):
        q.value[...] = exact.backend.asarray(host(p.value).astype(np.float64))
    rounded = [x if x.dtype.kind in "iub" else exact.backend.asarray(host(x).astype(np.float64)) for x in inputs]
    cases = _Case(op, inputs, rng), _Case(exact, rounded, rng)
    cases[1].upstream = tuple(
        exact.backend.xp.asarray(host(d).astype(np.float64) if d.dtype.kind != "i" else host(d))
        for d in cases[0].upstream
    )
    stash = _Lower()
    y = cases[0].forward(stash)
    if odd := [str(part.dtype) for part in y if part.dtype.kind != "i" and part.dtype == np.float64]:
        return f"forward returns {odd[0]}"
    if stash.found:
        return f"{stash.found} saves float64"
    found, expected = (case.run() for case in cases)
    names = (
        *(f"output {i}" for i in range(len(found.outputs))),
        *(f"the gradient of input {i}" for i, dx in enumerate(found.inputs) if dx is not None),
        *(f"the gradient of {name}" for name in found.params),
    )
    for name, a, b in zip(names, found.all(), expected.all(), strict=True):
        if not (distance := _distance(a, b)) <= tolerance:
            return f"{name} is off by {distance:.0e} of the largest number in float64"
    return ""


def _memory(kind: type[Op], backend: Backend, seed: int) -> Iterator[str]:
    """Forward on arrays without memory, by which a step is forecast, next to the real one. An op that cannot run on
    them is no fault here."""
    meta, fix = MetaBackend("fp64"), 'correct the kernel\'s function on "meta" (docs/add-an-op.md)'
    try:
        pairs = zip(*(kind.cases(b, np.random.default_rng(seed)) for b in (backend, meta)), strict=True)
        for (op, inputs), (other, _) in pairs:
            empty, stash, stash_of_meta = (
                [meta.asarray(x, None if x.dtype.kind == "f" else x.dtype) for x in inputs],
                *(Stash(Stream(7, "memory")) for _ in "12"),
            )
            real = [(y.shape, str(y.dtype)) for y in outputs_of(op, inputs, stash)]
            y = outputs_of(other, empty, stash_of_meta)
            if (found := [(part.shape, str(part.dtype)) for part in y]) != real:
                yield f"memory: forward on arrays without memory returns {found}, expected {real}; {fix}"
                return
            for (owner, saved), (_, of_meta) in zip(stash, stash_of_meta, strict=True):
                if (size := _bytes(of_meta)) != (expected := _bytes(saved)):
                    yield f"memory: {owner.name} saves {size} bytes without memory, {expected} in NumPy; {fix}"
                    return
            gradients_of(empty, other.backward(y[0] if len(y) == 1 else y, stash_of_meta))
    except ContractError as error:
        yield f"memory: on arrays without memory, {error}; {fix}"
    except Exception:  # the forecast itself says so, and refuses
        return


def _bytes(saved: Any) -> int:
    """Of all arrays among what a record holds."""
    if isinstance(saved, tuple | list):
        return sum(map(_bytes, saved))
    return int(saved.size * saved.dtype.itemsize) if hasattr(saved, "dtype") else 0
