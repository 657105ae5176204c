"""Gradient checking: every hand-written backward against finite differences of its forward, and the contract of ops.

    python -m tinyforge.gradcheck                 the whole ledger: tinyforge's ops, then every registered model
    python -m tinyforge.gradcheck mypackage.ops   the ops of a module of your own
    python -m tinyforge.gradcheck --op RMSNorm    one op
    python -m tinyforge.gradcheck --seeds 20      twenty seeds, from a random one on
    python -m tinyforge.gradcheck --json FILE     the same as JSON

Method. The outputs y of an op are reduced to a scalar, L = sum(u * y), with a random upstream gradient u; never
L = y.sum(), whose gradient is 0 for a softmax. For each input and parameter x and a random unit vector d, the
derivative of L along d is computed twice: as `<dL/dx, d>` from backward, and by the five-point stencil

    (L(x - 2hd) - 8 L(x - hd) + 8 L(x + hd) - L(x + 2hd)) / 12h

whose error is of order h^4. In float64 with h = 3e-4 the two agree to about 1e-11 when backward is right. The
relative error is their difference over the largest of

    |analytic|, |numeric|,
    ||dL/dx|| / sqrt(size of x)    the expected size along a random direction, which may be orthogonal to the gradient
    r / TOLERANCE                  r the rounding error of the stencil: no difference below it is a fault

Where that is above the tolerance, the higher derivatives may be to blame: smaller steps follow while they resolve 1 %
of the gradient, and the smallest error counts. A wrong gradient is wrong with every step.

Refused, with a sentence: an op that breaks the contract (tinyforge/contract.py), and a gradient that is 0, up to
rounding, in every case, since nothing shows that it is right.

Each case of an op is also checked with one row fewer, with one alone, and with the integers of the first row in all,
if all of its inputs have as many rows and forward raises no error, and after a pass with other weights, of which it
must keep nothing.

Every forward runs with `Stash(noise=Stream(7, "gradcheck"))`, so that every run draws the same random numbers. A loss
whose backward also takes one upstream number per head (`Op.per_head`) must give the gradients of an upstream gradient
that has that number at each token.
"""

from __future__ import annotations

import importlib
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge import ops
from tinyforge.backends import Backend, get_backend
from tinyforge.contract import ContractError, fewer_rows, gradients_of, outputs_of, repeated_ids, violations
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.kernel import Array
from tinyforge.model import Model
from tinyforge.op import Op, Param, Stash
from tinyforge.params import ParamBuffer
from tinyforge.registry import models
from tinyforge.report import add_json_flag, check_before, count_of, write_json
from tinyforge.rng import Stream

TOLERANCE = 1e-8
DIRECTIONS = 3
STEPS = (3e-4, 3e-5, 3e-6)
ROUNDING = 8 * 2.0**-53
"""Bound on the rounding error of one evaluation of L, as a fraction of sum |u| max(|y|, 1): some ten operations in a
row, each of which rounds by half a unit in the last place."""
RESOLVED = 1000
"""A gradient is measured if its size is that many rounding errors of the stencil."""


@dataclass(frozen=True)
class Row:
    """One line of the ledger: the worst relative error of one input or parameter of an op over its cases."""

    op: str
    name: str
    cases: int
    error: float


@dataclass(frozen=True)
class Measured:
    """One gradient of one case. error: relative. size: of the derivative along a direction, as a multiple of the
    rounding error of the stencil."""

    error: float
    size: float


def directional_error(
    loss: Callable[[], float],
    x: Array,
    grad: Array,
    rng: np.random.Generator,
    asarray: Callable[[np.ndarray], Array] = np.asarray,
    magnitude: float = 0.0,
) -> float:
    """The worst relative error of `grad` along DIRECTIONS random directions. `loss` reads x, which is restored.

    asarray: copies a direction to the device of x. magnitude: sum of the absolute values of the terms of L; the
    largest |L| where it is not known.
    """
    return _measure(loss, x, grad, rng, asarray, magnitude, DIRECTIONS).error


def _measure(
    loss: Callable[[], float],
    x: Array,
    grad: Array,
    rng: np.random.Generator,
    asarray: Callable[[np.ndarray], Array],
    magnitude: float,
    directions: int,
) -> Measured:
    start, worst, size = x.copy(), 0.0, 0.0
    typical = float(np.sqrt((grad * grad).sum() / max(grad.size, 1)))

    def stencil(direction: Array, step: float) -> tuple[float, float]:
        """The derivative along `direction`, and its rounding error."""
        values = []
        for multiple in (-2, -1, 1, 2):
            x[...] = start + (multiple * step) * direction
            values.append(loss())
        x[...] = start
        numeric = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
        return numeric, 1.5 * ROUNDING * max(magnitude, *map(abs, values)) / step

    for _ in range(directions if x.size else 0):
        drawn = np.asarray(rng.normal(size=x.shape))
        direction = asarray(drawn / max(float(np.sqrt((drawn * drawn).sum())), 1e-300))
        analytic = float((grad * direction).sum())
        best = np.inf
        for step in STEPS:
            numeric, rounding = stencil(direction, step)
            scale = max(abs(numeric), abs(analytic), typical)
            if step == STEPS[0]:
                size = max(size, scale / max(rounding, 1e-300))
            elif not rounding < 0.01 * scale:
                break
            difference = abs(numeric - analytic)
            best = min(best, difference / max(scale, 1e-300) if np.isfinite(difference) else np.inf)
            if (floored := difference / max(scale, rounding / TOLERANCE, 1e-300)) <= TOLERANCE:
                best = floored if scale > rounding else 0.0
                break
        worst = max(worst, best)
    return Measured(worst, size)


def check(op: Op, inputs: Sequence[Any], rng: np.random.Generator, directions: int = DIRECTIONS) -> dict[str, float]:
    """The relative error for each floating-point input ("input 0", ...) and each parameter (by name) of one case."""
    return {name: found.error for name, found in measure(op, inputs, rng, directions).items()}


def measure(
    op: Op, inputs: Sequence[Any], rng: np.random.Generator, directions: int = DIRECTIONS
) -> dict[str, Measured]:
    """`check`, with the size of each gradient."""
    _run_with_other_weights(op, inputs)
    asarray = op.backend.asarray
    shapes = [y.shape for y in outputs_of(op, inputs, _noisy_stash())]
    upstream = tuple(asarray(np.asarray(rng.normal(size=shape))) for shape in shapes)

    def loss() -> float:
        found = outputs_of(op, inputs, _noisy_stash())
        return float(sum((u * y).sum() for u, y in zip(upstream, found, strict=True)))

    gradients, magnitude = _gradients(op, inputs, upstream)
    measured = {
        name: _measure(loss, x, grad, rng, asarray, magnitude, directions) for name, (x, grad) in gradients.items()
    }
    if op.per_head:
        numbers = [np.asarray(rng.normal(size=shape[-1:])) for shape in shapes]
        short, _ = _gradients(op, inputs, tuple(map(asarray, numbers)))
        spread = (np.broadcast_to(n, shape).copy() for n, shape in zip(numbers, shapes, strict=True))
        full, magnitude = _gradients(op, inputs, tuple(map(asarray, spread)))
        for name, found in measured.items():
            pair = short[name][1], full[name][1]
            measured[name] = replace(found, error=max(found.error, _difference(*pair, magnitude)))
    return measured


def _difference(found: Array, expected: Array, magnitude: float) -> float:
    """The size of found - expected, relative to that of `expected`, or to what rounding leaves of it."""
    sizes = (float(np.sqrt((x * x).sum())) for x in (found - expected, expected))
    error = next(sizes) / max(next(sizes), magnitude * ROUNDING / TOLERANCE, 1e-300)
    return error if np.isfinite(error) else np.inf


def _run_with_other_weights(op: Op, inputs: Sequence[Any]) -> None:
    """A step of training, as it were: what an op keeps of its weights is out of date then."""
    values, stash = [p.value.copy() for p in op.params()], _noisy_stash()
    for p, value in zip(op.params(), values, strict=True):
        p.value[...] = 1.25 * value
    y = outputs_of(op, inputs, stash)
    op.backward(y[0] if len(y) == 1 else y, stash)
    for p, value in zip(op.params(), values, strict=True):
        p.value[...] = value


def _noisy_stash() -> Stash:
    return Stash(noise=Stream(7, "gradcheck"))


def _gradients(
    op: Op, inputs: Sequence[Any], upstream: tuple[Array, ...]
) -> tuple[dict[str, tuple[Array, Array]], float]:
    """What is differentiated and its gradient, by name; and the sum of the absolute values of the terms of L."""
    learned = [p for p in op.params() if not p.frozen]
    for p in learned:
        p.grad[...] = 0
    stash = _noisy_stash()
    outputs = outputs_of(op, inputs, stash)
    magnitude = float(sum((abs(u) * abs(y).clip(1)).sum() for u, y in zip(upstream, outputs, strict=True)))
    grads = gradients_of(inputs, op.backward(upstream[0] if len(upstream) == 1 else upstream, stash))
    if len(stash):
        raise ContractError(f"{op.name}: stash: backward left {len(stash)} records")
    pairs = enumerate(zip(inputs, grads, strict=True))
    of_inputs = {f"input {i}": (x, grad) for i, (x, grad) in pairs if x.dtype.kind == "f"}
    return of_inputs | {p.name: (p.value, p.grad.copy()) for p in learned}, magnitude


@dataclass
class Ledger:
    """What was found of one op. refused: a sentence for each rule that it breaks, and for each row without evidence."""

    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def examine(
    kind: type[Op], backend: Backend, seed: int = 0, directions: int = DIRECTIONS, contract: bool = True
) -> Ledger:
    """All cases of one op (or model) class: a row per input and parameter with the worst error over its cases, and the
    rules that it breaks. contract: check the rules of tinyforge/contract.py too."""
    ledger = Ledger()
    if contract:
        ledger.refused += [f"{kind.__name__}: {sentence}" for sentence in violations(kind, backend, seed)]
    rng = np.random.default_rng(seed)
    found: dict[str, list[Measured]] = {}
    frozen: set[str] = set()
    repeats: dict[str, float] = {}
    try:
        for op, inputs in kind.cases(backend, rng):
            frozen |= {p.name for p in op.params() if p.frozen}
            for name, measured in measure(op, inputs, rng, directions).items():
                found.setdefault(name, []).append(measured)
            if isinstance(op, Model):
                continue
            for fewer in fewer_rows(op, inputs):
                for name, measured in measure(op, fewer, np.random.default_rng(seed), 1).items():
                    if not measured.error <= found[name][-1].error:
                        found[name][-1] = replace(measured, size=found[name][-1].size)
            for repeated in repeated_ids(op, inputs):
                for name, measured in measure(op, repeated, np.random.default_rng(seed), 1).items():
                    if not measured.error <= TOLERANCE >= found[name][-1].error:
                        repeats[name] = measured.error
    except Exception:
        if ledger.refused:  # what it breaks is said already
            return ledger
        raise
    if not found:
        ledger.refused.append(
            f"{kind.__name__}: cases: none has a parameter or a floating-point input, so no gradient was checked; "
            "yield some"
        )
    for name, error in repeats.items():
        ledger.refused.append(
            f"{kind.__name__}: cases: with integers that repeat those of the first row the gradient of {name} is "
            f"off by {error:.0e}; correct it, or let forward raise an error for them"
        )
    if frozen and all(name.startswith("input ") for name in found):
        ledger.refused.append(
            f"{kind.__name__}: cases: every parameter is frozen in each; yield one in which {min(frozen)} is learned"
        )
    for name, of_cases in found.items():
        error = max(m.error for m in of_cases)
        ledger.rows.append(Row(kind.__name__, name, len(of_cases), error))
        if error <= TOLERANCE and max(m.size for m in of_cases) < RESOLVED:
            ledger.refused.append(
                f"{kind.__name__}: cases: in each the gradient of {name} is empty or 0, which shows nothing; yield "
                "one in which it is not"
            )
    return ledger


def check_op(kind: type[Op], backend: Backend, seed: int = 0) -> list[Row]:
    """The rows of `examine`. Raises ContractError, with all of its sentences, for an op that is refused."""
    ledger = examine(kind, backend, seed)
    if ledger.refused:
        raise ContractError("; ".join(ledger.refused))
    return ledger.rows


EXPECTED_IN_FP8 = 0.058
"""Relative error of a product of e4m3 and e5m2 numbers: rounding errors spread evenly have root mean squares of 0.026
and 0.052."""
LARGEST_RATIO = 1.25


def fp8_rows(kind: Any, backend: str, device: int | None = None, seed: int = 0) -> list[Row]:
    """For an op with products in FP8: its results and gradients against those of `kind.reference`, in the precision of
    the master weights on NumPy and in bf16 on a GPU. `error` is the norm of the difference over all cases, relative to
    that of the reference, as a multiple of EXPECTED_IN_FP8: at most LARGEST_RATIO is right.
    """
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    low = get_backend(backend, "fp8", workers=1, device=device)
    high = get_backend(backend, "bf16" if backend == "cupy" else "fp32", workers=1, device=device)
    rng = np.random.default_rng(seed)
    for op, inputs in kind.cases(low, rng):
        (weight,) = op.params()
        reference = kind.reference(Param(weight.name, weight.shape), high)
        ParamBuffer(reference.params(), high)
        reference.weight.value[...] = weight.value
        upstream = None
        results = []
        for one in (op, reference):
            stash = Stash()
            (weight,) = one.params()
            weight.grad[...] = 0
            y = one.forward(*inputs, stash=stash)
            upstream = low.asarray(rng.normal(size=y.shape)) if upstream is None else upstream
            dx = one.backward(upstream, stash)
            results.append([np.asarray(low.to_numpy(a), np.float64) for a in (y, dx, weight.grad)])
        for name, *pair in zip(("output", "input 0", weight.name), *results, strict=True):
            found.setdefault(name, []).append((pair[0], pair[1]))
    rows = []
    for name, pairs in found.items():
        norms = [
            np.sqrt(sum(float((part**2).sum()) for part in parts))
            for parts in ([a - b for a, b in pairs], [b for _, b in pairs])
        ]
        rows.append(Row(kind.__name__, name, len(pairs), float(norms[0] / norms[1] / EXPECTED_IN_FP8)))
    return rows


def ops_of(module: str) -> list[type[Op]]:
    """The ops of a module: its tuple `ALL` if it has one, else the ops that it defines. Raises UserError if none."""
    if not all(map(str.isidentifier, module.split("."))) or module.endswith(".py"):
        name = Path(module).stem if Path(module).stem.isidentifier() else "mypackage.ops"
        raise UserError(f"{module} is no module's name; write it as `import` does, e.g. {name}")
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
    return [*ops.ALL, *(spec.build for spec in models().values())]  # type: ignore[list-item]


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tinyforge.gradcheck",
        description="Check every hand-written gradient in float64, and the contract of ops.",
    )
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="MODULE",
        help="whose ops are checked (default: tinyforge.ops and every registered model)",
    )
    parser.flag("--op", str, "only this op or model (default: all)", metavar="NAME")
    parser.flag("--backend", "numpy", "backend whose kernels are checked")
    parser.flag("--device", int, "number of the GPU (default: 0)")
    parser.flag("--seed", int, "first seed of inputs and directions (default: a random one, printed)")
    parser.flag("--seeds", int, "number of seeds, counted up from the first (default: 3; 1 with --seed)", metavar="N")
    add_json_flag(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    check_before(args.json)
    number = args.seeds if args.seeds is not None else 3 if args.seed is None else 1
    first = secrets.randbelow(10**6) if args.seed is None else args.seed
    if number < 1 or first < 0:
        raise UserError(f"--seed {first} --seeds {number}: expected a seed of at least 0, and at least one")

    chosen = known_ops(args.modules)
    rounded = [] if args.modules else list(ops.IN_FP8)
    if args.op:
        names = [kind.__name__ for kind in (*chosen, *rounded)]
        chosen, rounded = ([k for k in kinds if k.__name__.lower() == args.op.lower()] for kinds in (chosen, rounded))
        if not chosen and not rounded:
            raise UserError(f"no op is called {args.op!r}; known: {', '.join(names)}")
    backend = get_backend(args.backend, "fp64", workers=1, device=args.device)
    seeds = range(first, first + number)
    rows: list[Row] = []
    refused: list[str] = []
    table = sys.stderr if args.json == "-" else sys.stdout
    directions = -(-DIRECTIONS // number)
    spoken = f"seed {first}" if number == 1 else f"seeds {first} to {seeds[-1]}"
    print(f"{'op':<20} {'with respect to':<26} {'cases':>5}  worst relative error, {spoken}", file=table)
    for kind in chosen:
        merged: dict[str, Row] = {}
        for seed in seeds:
            ledger = examine(kind, backend, seed, directions, contract=seed == first)
            refused += [sentence for sentence in ledger.refused if sentence not in refused]
            for row in ledger.rows:
                merged[row.name] = max(row, merged.get(row.name, row), key=lambda r: r.error)
            if ledger.refused and not ledger.rows:  # a case raises; so it would with the other seeds
                break
        rows += merged.values()
        for row in merged.values():
            flag = "" if row.error <= TOLERANCE else f"  ABOVE {TOLERANCE:g}"
            print(f"{row.op:<20} {row.name:<26} {row.cases:>5}  {row.error:.1e}{flag}", file=table, flush=True)
        for sentence in refused:
            if sentence.startswith(f"{kind.__name__}: "):
                print(f"REFUSED {sentence}", file=table, flush=True)
    total = sum(max((r.cases for r in rows if r.op == kind.__name__), default=0) for kind in chosen)
    ratios = _print_fp8(rounded, args, first, table)
    worst = max((row.error for row in rows), default=0.0)
    summary = {
        "worst": worst,
        "tolerance": TOLERANCE,
        "directions": directions,
        "seeds": list(seeds),
        "rows": [asdict(r) for r in rows],
        "refused": refused,
        "fp8": [asdict(r) for r in ratios],
    }
    write_json(summary, args.json)
    more = f"; {count_of(len(refused), 'sentence')} of refusal" if refused else ""
    print(
        f"worst relative error {worst:.1e} over {count_of(len(chosen), 'op')}, {total} cases, {spoken}{more}",
        file=table,
    )
    return 0 if worst <= TOLERANCE and not refused and all(r.error <= LARGEST_RATIO for r in ratios) else 1


def _print_fp8(kinds: Sequence[Any], args: Any, seed: int, table: Any) -> list[Row]:
    """The rows of the ops with products in FP8, printed; none where this machine has no FP8."""
    rows: list[Row] = []
    for kind in kinds:
        try:
            rows += fp8_rows(kind, args.backend, args.device, seed)
        except UserError as error:
            print(f"{kind.__name__} is not checked: {error}", file=table)
    if rows:
        print(f"{'op in FP8':<20} {'compared':<26} {'cases':>5}  error, as a multiple of that of rounding", file=table)
    for row in rows:
        flag = "" if row.error <= LARGEST_RATIO else f"  ABOVE {LARGEST_RATIO:g}"
        print(f"{row.op:<20} {row.name:<26} {row.cases:>5}  {row.error:.2f}{flag}", file=table)
    return rows


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
