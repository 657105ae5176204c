"""Gradient checking: every hand-written backward against finite differences of its forward.

    python -m tinyforge.gradcheck                 the whole ledger: tinyforge's ops, then every registered model
    python -m tinyforge.gradcheck mypackage.ops   the ops of a module of your own
    python -m tinyforge.gradcheck --op RMSNorm    one op
    python -m tinyforge.gradcheck --json FILE     the same as JSON

Method. The outputs y of an op are reduced to a scalar, L = sum(u * y), with a random upstream gradient u; never
L = y.sum(), whose gradient is 0 for a softmax. For each input and parameter x and a random unit vector d, the
derivative of L along d is computed twice: as <dL/dx, d> from backward, and by the five-point stencil

    (L(x - 2hd) - 8 L(x - hd) + 8 L(x + hd) - L(x + 2hd)) / 12h

whose error is of order h^4. In float64 with h = 3e-4 the two agree to about 1e-11 when backward is right. The
relative error is their difference over max(|analytic|, |numeric|, ||dL/dx|| / sqrt(size of x)). The last term is the
expected size along a random direction: it avoids dividing by nearly 0 when d happens to be orthogonal to the gradient.

Every forward runs with `Stash(noise=Stream(7, "gradcheck"))`, so that every run draws the same random numbers. A loss
whose backward also takes one upstream number per head (`Op.per_head`) is checked both ways.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tinyforge.backends import Backend, get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.kernel import Array
from tinyforge.op import Op, Stash
from tinyforge.registry import models
from tinyforge.report import add_json_flag, check_before, write_json
from tinyforge.rng import Stream

TOLERANCE = 1e-8
DIRECTIONS = 3
STEP = 3e-4


@dataclass(frozen=True)
class Row:
    """One line of the ledger: the worst relative error of one input or parameter of an op over its cases."""

    op: str
    name: str
    cases: int
    error: float


def directional_error(
    loss: Callable[[], float],
    x: Array,
    grad: Array,
    rng: np.random.Generator,
    asarray: Callable[[np.ndarray], Array] = np.asarray,
) -> float:
    """The worst relative error of `grad` along DIRECTIONS random directions. `loss` reads x, which is restored.

    asarray: copies a direction to the device of x.
    """
    start, worst = x.copy(), 0.0
    typical = float(np.sqrt((grad * grad).sum() / max(grad.size, 1)))
    for _ in range(DIRECTIONS):
        drawn = np.asarray(rng.normal(size=x.shape))
        direction = asarray(drawn / max(float(np.sqrt((drawn * drawn).sum())), 1e-300))
        values = []
        for multiple in (-2, -1, 1, 2):
            x[...] = start + (multiple * STEP) * direction
            values.append(loss())
        x[...] = start
        numeric = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * STEP)
        analytic = float((grad * direction).sum())
        scale = max(abs(numeric), abs(analytic), typical)
        error = 0.0 if scale < 1e-12 else abs(numeric - analytic) / scale
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


def check(op: Op, inputs: Sequence[Any], rng: np.random.Generator) -> dict[str, float]:
    """The relative error for each floating-point input ("input 0", ...) and each parameter (by name) of one case."""
    shapes = [y.shape for y in _outputs(op, inputs, _noisy_stash())]
    errors = _check(op, inputs, shapes, rng)
    if op.per_head:
        for name, error in _check(op, inputs, [shape[-1:] for shape in shapes], rng).items():
            errors[name] = max(errors[name], error)
    return errors


def _noisy_stash() -> Stash:
    return Stash(noise=Stream(7, "gradcheck"))


def _outputs(op: Op, inputs: Sequence[Any], stash: Stash) -> tuple[Array, ...]:
    result = op.forward(*inputs, stash=stash)
    return result if isinstance(result, tuple) else (result,)


def _check(
    op: Op, inputs: Sequence[Any], upstream_shapes: Sequence[tuple[int, ...]], rng: np.random.Generator
) -> dict[str, float]:
    """`check` with upstream gradients of these shapes, which broadcast to those of the outputs."""
    asarray = op.backend.asarray
    upstream = tuple(asarray(np.asarray(rng.normal(size=shape))) for shape in upstream_shapes)

    def loss() -> float:
        found = _outputs(op, inputs, _noisy_stash())
        return float(sum((u * y).sum() for u, y in zip(upstream, found, strict=True)))

    learned = [p for p in op.params() if not p.frozen]
    for p in learned:
        p.grad[...] = 0
    stash = _noisy_stash()
    _outputs(op, inputs, stash)
    grads = op.backward(upstream[0] if len(upstream) == 1 else upstream, stash)
    if len(stash):
        raise RuntimeError(f"{op.name}: backward left {len(stash)} records on the stash")
    if isinstance(grads, list):
        raise TypeError(f"{op.name}: backward returned a list; return a tuple, with a gradient for each input")
    if not isinstance(grads, tuple):
        grads = (grads,) + (None,) * (len(inputs) - 1)  # the rest are ids or targets
    if len(grads) != len(inputs):
        raise RuntimeError(
            f"{op.name}: backward returned {len(grads)} gradients for {len(inputs)} inputs; return one for each, None "
            "for integers"
        )
    errors = {}
    for i, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
        if x.dtype.kind == "f":
            if grad is None:
                raise RuntimeError(f"{op.name}: backward returned no gradient for input {i}")
            errors[f"input {i}"] = directional_error(loss, x, grad, rng, asarray)
    for p in learned:
        errors[p.name] = directional_error(loss, p.value, p.grad, rng, asarray)
    return errors


def check_op(kind: type[Op], backend: Backend, seed: int = 0) -> list[Row]:
    """All cases of one op (or model) class: a row per input and parameter with the worst error over its cases. Raises
    UserError where there is nothing to check."""
    rng = np.random.default_rng(seed)
    worst: dict[str, tuple[int, float]] = {}
    for op, inputs in kind.cases(backend, rng):
        for name, error in check(op, inputs, rng).items():
            cases, previous = worst.get(name, (0, 0.0))
            worst[name] = (cases + 1, max(previous, error))
    if not worst:
        raise UserError(
            f"{kind.__name__}: its cases have no parameter and no floating-point input, so no gradient was "
            "checked; yield some from `cases`"
        )
    return [Row(kind.__name__, name, *entry) for name, entry in worst.items()]


def ops_of(module: str) -> list[type[Op]]:
    """The ops of a module: its tuple `ALL` if it has one, else the ops that it defines. Raises UserError if none."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"cannot import {module}: {error}; run from the folder that holds it") from error
    listed = getattr(found, "ALL", None)
    if listed is None:
        defined = [v for v in vars(found).values() if isinstance(v, type) and issubclass(v, Op)]
        listed = [kind for kind in defined if kind.__module__ == module]
    if not listed:
        raise UserError(f"{module} defines no op to check; name a module with subclasses of tinyforge.Op")
    return list(listed)


def known_ops(modules: Sequence[str] = ()) -> list[type[Op]]:
    """The ops of these modules; by default those of tinyforge and every registered model."""
    if modules:
        return [kind for module in modules for kind in ops_of(module)]
    return [*ops_of("tinyforge.ops"), *(spec.build for spec in models().values())]  # type: ignore[list-item]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tinyforge.gradcheck", description="Check every hand-written gradient in float64.")
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="MODULE",
        help="whose ops are checked (default: tinyforge.ops and every registered model)",
    )
    parser.add_argument("--op", metavar="NAME", help="only this op or model (default: all)")
    parser.add_argument("--backend", default="numpy", help="backend whose kernels are checked (default: numpy)")
    parser.add_argument("--device", type=int, help="number of the GPU (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of inputs and directions (default: 0)")
    add_json_flag(parser)
    args = parser.parse_args(argv)
    check_before(args.json)

    chosen = known_ops(args.modules)
    if args.op:
        names = [kind.__name__ for kind in chosen]
        chosen = [kind for kind in chosen if kind.__name__.lower() == args.op.lower()]
        if not chosen:
            raise UserError(f"no op is called {args.op!r}; known: {', '.join(names)}")
    backend = get_backend(args.backend, "fp64", workers=1, device=args.device)
    rows: list[Row] = []
    table = sys.stderr if args.json == "-" else sys.stdout
    print(f"{'op':<20} {'with respect to':<26} {'cases':>5}  worst relative error", file=table)
    for kind in chosen:
        for row in check_op(kind, backend, args.seed):
            rows.append(row)
            flag = "" if row.error <= TOLERANCE else f"  ABOVE {TOLERANCE:g}"
            print(f"{row.op:<20} {row.name:<26} {row.cases:>5}  {row.error:.1e}{flag}", file=table, flush=True)
    worst = max(row.error for row in rows)
    total = sum(max(r.cases for r in rows if r.op == kind.__name__) for kind in chosen)
    summary = {"worst": worst, "tolerance": TOLERANCE, "directions": DIRECTIONS, "rows": [asdict(r) for r in rows]}
    write_json(summary, args.json)
    print(f"worst relative error {worst:.1e} over {len(chosen)} ops, {total} cases", file=table)
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
