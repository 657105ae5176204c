"""Check the answers to the exercises of the course.

    python docs/course/check.py            all
    python docs/course/check.py 3          the third
    python docs/course/check.py 3 --hint   a hint; --hint 2 and --hint 3 say more

Each check compares your function with finite differences or with the op of the repository, on random data. Where the
numbers are wrong, it names the first wrong entry and, if they are those of a usual slip, the slip.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge import Param, Stash, get_backend
from tinyforge.contract import ContractError
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.gradcheck import TOLERANCE, check, check_op
from tinyforge.infer.sampling import Sampling, probabilities
from tinyforge.kernel import override
from tinyforge.op import Op
from tinyforge.ops import Attention, CrossEntropy, Linear, RMSNorm, Softmax
from tinyforge.ops.softmax import softmax_bwd, softmax_fwd
from tinyforge.optim.adamw import AdamWConfig, adamw_, step_rates
from tinyforge.params import with_buffer

COURSE = Path(__file__).resolve().parent
EXERCISES = COURSE / "exercises"
FP64 = get_backend("numpy", "fp64", workers=1)
EXACT, FLOAT32 = 1e-10, 3e-6
"""Errors, relative to the largest entry: of an answer in float64, and of one that computes in float32 inside."""
TABLE = "docs/gradcheck.md#what-a-fault-looks-like"
Faults = Mapping[str, Any]
"""What a slip gives, by a sentence that names it."""
EXPLAINED = {
    "could not be broadcast": "shapes are compared from the last axis on: (3, 5) and (3,) do not fit, (3, 1) does, "
    "and a sum with keepdims=True keeps its axis; np.split cuts the first axis unless it is given axis=-1",
    "mismatch in its core dimension": "in a @ b the last axis of a must be as long as b's last but one; a.T turns all "
    "axes around, a.swapaxes(-1, -2) the last two",
    "not aligned": "in np.dot(a, b) the last axis of a must be as long as b's last but one",
    "non-broadcastable output": "what is added in place has more axes, or longer ones, than the array: sum the extra "
    "axes first; a linear map folds the leading ones into one with reshape(-1, width)",
    'no operator "': "a stored T may be bf16, which has no arithmetic: read it with widen(x[i]), write it with "
    "narrow(result, dx[i])",
    "argument: 'stash'": "each backward takes two arguments, (d, stash)",
    "truth value of an array": "Python's max and if take one number; np.maximum and np.where go entry by entry",
    "more than one instance of overloaded function": "max takes two numbers of one type: write A(0), not 0",
    "is ambiguous": "max takes two numbers of one type: write A(0), not 0",
}
"""What NumPy's and Python's messages mean here."""
RULES = {
    "untouched": "your function raises an error, or writes into an array that it was given",
    "inference": "your function gives another result the second time: it keeps something between calls",
    "gradients": "the result must have the shape and the dtype of the input, and be linear in dy",
    "stash": "each record is popped once, by the op that pushed it; nothing is kept elsewhere",
    "accumulation": "the gradient of a parameter is added, with +=",
    "strides": "arrays may be transposed, reversed or have gaps: use no .data, no .strides and no reshape in place",
    "precision": "compute in the dtype of the input: no rounding, no float32 in between",
}
"""What the rules of tinyforge/contract.py mean for an answer."""


class Report:
    """What there is to say of an answer that is right: notes, and the parts that this machine cannot check."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.notes: list[str] = []
        self.unchecked: list[str] = []

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def call(self, function: Any, *given: Any, into: Sequence[int] = ()) -> Any:
        """function(*given) on copies; notes an array that it changes. Those at the places `into` are to be changed."""
        names = function.__code__.co_varnames if hasattr(function, "__code__") else ()
        names = names[1:] if hasattr(function, "__self__") else names
        passed = [a.copy() if isinstance(a, np.ndarray) and i not in into else a for i, a in enumerate(given)]
        try:
            with np.errstate(all="ignore"):  # said in words where the result is not finite
                result = function(*passed)
        except Exception as error:
            shapes = (f"{name} {a.shape}" for name, a in zip(names, given, strict=False) if isinstance(a, np.ndarray))
            if said := ", ".join(shapes):
                error.add_note(f"it was given {said}")
            raise
        for i, (a, b) in enumerate(zip(given, passed, strict=True)):
            if a is not b and not np.array_equal(a, b, equal_nan=True):
                name = names[i] if i < len(names) else f"argument {i + 1}"
                self.note(f"it writes into `{name}`, which other code may still read: work on `{name}.copy()`")
        return result

    def near(self, what: str, got: Any, expected: Any, faults: Faults | None = None, after: str = "") -> None:
        """Raises AssertionError with the first wrong entry and the slip that gives such numbers. after: says when."""
        expected = np.asarray(expected)
        assert got is not None, f"{what}: the function returned None; does it end with `return`?"
        if isinstance(got, tuple):
            raise AssertionError(f"{what}: got a tuple of {len(got)}, expected one array of shape {expected.shape}")
        got = np.asarray(got)
        if got.shape != expected.shape:
            turned = "; it is transposed" if got.ndim > 1 and got.shape == expected.shape[::-1] else ""
            raise AssertionError(f"{what}: got shape {got.shape}, expected {expected.shape}{turned}")
        largest = float(np.abs(expected).max(initial=0.0))
        with np.errstate(invalid="ignore"):
            errors = np.abs(got - expected) / (largest or 1.0)
        error = float(errors.max(initial=0.0))
        if error <= EXACT:
            return
        if error <= FLOAT32:
            self.note("its numbers are in float32 somewhere; that does for training, a gradient check needs float64")
            return
        wrong = ~(errors <= FLOAT32)  # NaN is wrong too
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        place = f"{what}[{', '.join(map(str, first))}]" if first else what
        size = max(abs(float(expected[first])), abs(float(got[first])))  # the larger one, as in gradcheck
        kind, off = ("relative", 1 / size) if expected[first] and np.isfinite(size) else ("absolute", 1.0)
        raise AssertionError(
            f"{place}{after}: got {got[first]:.6g}, expected {expected[first]:.6g}; "
            f"{kind} error {abs(got[first] - expected[first]) * off:.1e}"
            + (f", {wrong.sum()} of {wrong.size} entries are wrong" if wrong.size > 1 else "")
            + cause(got, expected, faults or {})
            + "".join(f".\n  Also, {note}" for note in self.notes)
        )


def three(result: Any, names: str) -> list[Any]:
    """result, if it is three things."""
    if isinstance(result, (tuple, list)) and len(result) == 3:
        return list(result)
    if result is None:
        got = "None; does the function end with `return`?"
    elif isinstance(result, (tuple, list)):
        got = f"{len(result)} results"
    else:
        got = f"one array of shape {result.shape}" if isinstance(result, np.ndarray) else type(result).__name__
    raise AssertionError(f"expected three results, `return {names}`: got {got}")


def cause(got: Any, expected: Any, faults: Faults) -> str:
    """The slip that gives these numbers, as the end of a sentence; empty if none is known."""
    for name, other in faults.items():
        other = np.asarray(other)
        same = other.shape == got.shape and np.allclose(got, other, rtol=1e-6, atol=1e-9, equal_nan=True)
        if same and not np.allclose(expected, other):
            return f".\n  {name}"
    if not np.isfinite(got).all():
        return ".\n  NaN or infinity: a division by 0, or exp of a large number"
    if np.allclose(got, -expected):
        return ".\n  the sign is wrong"
    if not np.any(got):
        return ".\n  all of it is 0: was the result written anywhere?"
    if got.ndim > 1 and got.shape[-1] == got.shape[-2] and np.allclose(got, expected.swapaxes(-1, -2)):
        return ".\n  it is transposed"
    factor = float((got * expected).sum() / (expected * expected).sum()) if np.any(expected) else 0.0
    if factor and np.allclose(got, factor * expected):
        return f".\n  all entries are {factor:.4g} times what they should be: a factor, or a mean in place of a sum"
    return ""


def added(
    r: Report, name: str, result: Any, start: Any, mine: Any, gradient: Any, faults: Faults | None = None
) -> None:
    """The gradient of a parameter must have been added to `mine`, which was `start`."""
    if np.array_equal(mine, start):
        returned = isinstance(result, tuple)
        fix = "it was returned instead" if returned else f"`{name} = ...` names a new array"
        raise AssertionError(f"{name}: nothing was added to it; {fix}. Write `{name} += ...`, and return dx alone")
    slips = {f"it was assigned, and {name} held another gradient before: add with `+=`": gradient}
    slips["it was subtracted, and must be added"] = start - gradient
    r.near(name, mine, start + gradient, slips | {k: start + v for k, v in (faults or {}).items()})


def softmax(answer: Any, r: Report) -> None:
    dy, y = r.rng.normal(size=(3, 5)), softmax_fwd(r.rng.normal(size=(3, 5)))
    product = dy * y
    faults = {
        "the sum over the row is missing: this is y * dy": product,
        "the sum lacks the factor y: it is the sum of dy * y": y * (dy - dy.sum(-1, keepdims=True)),
        "the sum runs over the whole array; it is one per row: axis=-1, keepdims=True": y * (dy - product.sum()),
        "the sum runs down the columns; softmax is over the last axis": y * (dy - product.sum(0)),
        "a mean in place of the sum": y * (dy - product.mean(-1, keepdims=True)),
        "the factor y in front of the bracket is missing": dy - product.sum(-1, keepdims=True),
        "the factor y in front of the sum is missing: it multiplies the whole bracket": product
        - product.sum(-1, keepdims=True),
        "dy is missing": y * (1 - y),
        "this is the Jacobian's diagonal, y (1 - y), alone; the other entries count too": product * (1 - y),
    }
    r.near("dx", r.call(answer.softmax_backward, dy, y), y * (dy - product.sum(-1, keepdims=True)), faults)
    for shape in ((2, 3, 8), (5,), (0, 4)):  # any number of axes
        dy, y = r.rng.normal(size=shape), softmax_fwd(r.rng.normal(size=shape))
        expected = y * (dy - (dy * y).sum(-1, keepdims=True))
        try:
            got = r.call(answer.softmax_backward, dy, y)
        except Exception as error:
            error.add_note(f"(..., C) is any number of axes, here {len(shape)}: entry i of each row is y[..., i]")
            raise
        axis = "the sum runs along the second axis; softmax is over the last: axis=-1"
        faults = {axis: y * (dy - (dy * y).sum(1, keepdims=True))} if len(shape) > 2 else {}
        r.near("dx", got, expected, faults, after=f" for dy and y of shape {shape}")
    if not r.notes:  # a ledger is strict about both
        with override(softmax_bwd, "numpy", answer.softmax_backward):
            ledger(check_op(Softmax, FP64))


def ledger(rows: Sequence[Any]) -> None:
    for row in rows:
        assert row.error <= TOLERANCE, (
            f"{row.op}, {row.name}: relative error {row.error:.1e} against finite differences, "
            f"expected at most {TOLERANCE:.0e}"
        )


def linear(answer: Any, r: Report) -> None:
    x, dy, weight = (r.rng.normal(size=shape) for shape in ((2, 3, 5), (2, 3, 4), (4, 5)))
    start, dweight = r.rng.normal(size=(4, 5)), np.einsum("bto,bti->oi", dy, x)
    mine = start.copy()
    result = r.call(answer.linear_backward, mine, dy, x, weight, into=(0,))
    slips = {
        "the sum is over the first batch row alone": dy[0].T @ x[0],
        "only the last batch row was added": dy[1].T @ x[1],
        "it was added twice": 2 * dweight,
        "dy and x were summed before the product: multiply row by row, then sum": dy.sum((0, 1))[:, None]
        * x.sum((0, 1)),
        "a mean over the rows; it is their sum": dweight / 6,
        "reshape(O, -1) does not transpose: fold the rows with reshape(-1, O), then take .T": dy.reshape(4, -1)
        @ x.reshape(-1, 5),
    }
    added(r, "dweight", result, start, mine, dweight, slips)
    r.near("dx", result, dy @ weight, {"this is x": x})
    for leading in ((3,), (2, 1, 3)):  # any number of axes
        x, dy, mine = r.rng.normal(size=(*leading, 5)), r.rng.normal(size=(*leading, 4)), start.copy()
        try:
            result = r.call(answer.linear_backward, mine, dy, x, weight, into=(0,))
        except Exception as error:
            error.add_note(
                f"(..., O) is any number of leading axes, here {len(leading)}: fold them with reshape(-1, O)"
            )
            raise
        after = f" for dy of shape {dy.shape}"
        gradient = dy.reshape(-1, 4).T @ x.reshape(-1, 5)
        slip = (
            "only the first leading axis is summed, and there may be any number: fold all of them with reshape(-1, O)"
        )
        first = {slip: start + (dy.swapaxes(-1, -2) @ x).sum(0)} if len(leading) == 1 else {}
        r.near("dweight", mine, start + gradient, first, after)
        r.near("dx", result, dy @ weight, after=after)


def cross_entropy(answer: Any, r: Report) -> None:
    logits, dnll = r.rng.normal(size=(6, 7)) * 3, r.rng.normal(size=6)
    targets = np.array([0, 6, -1, 3, -1, 2])
    op, stash = CrossEntropy(FP64), Stash()
    op.forward(logits[:, None], targets[:, None], stash)
    expected = op.backward(dnll[:, None], stash)[0][:, 0]
    p, hit, seen = softmax_fwd(logits), np.eye(7)[targets], (targets >= 0)[:, None]
    p_whole = np.exp(logits) / np.exp(logits).sum()
    each, columns = dnll[:, None], np.isin(np.arange(7), targets)  # -1 is the last column
    whole_columns = "`p[:, targets]` is whole columns: one entry of each row is p[np.arange(N), targets]"
    faults = {
        whole_columns: each * (p - columns) * seen,
        whole_columns + "; and rows whose target is -1 must be 0": each * (p - columns),
        whole_columns + ", and only the rows and columns of real targets": each
        * (p - np.isin(np.arange(7), targets[targets >= 0]))
        * seen,
        "rows whose target is -1 must be 0; here -1 counts as the last token": each * (p - hit),
        "rows whose target is -1 must be 0": each * (p - hit * seen),
        "the 1 of the target is not subtracted": each * p * seen,
        "the 1 of the target is not subtracted, and rows whose target is -1 are not 0": each * p,
        "dnll is missing": (p - hit) * seen,
        "1 is added at the target; it is subtracted": each * (p + hit) * seen,
        "softmax runs over the whole array; it is one per row": each * (p_whole - hit) * seen,
        "the 1 is subtracted after the product with dnll": (each * p - hit) * seen,
        "softmax runs over the rows; it is over the last axis": each * (softmax_fwd(logits.T).T - hit) * seen,
        "the logits were used in place of their softmax": each * (logits - hit) * seen,
        "divided by the number of rows; dnll has that factor already": expected / 6,
    }
    r.near("dlogits", r.call(answer.cross_entropy_backward, dnll, logits, targets), expected, faults)
    for shift in (1000.0, -1000.0):
        got = r.call(answer.cross_entropy_backward, dnll, logits + shift, targets)
        fault = "softmax without the shift: subtract the row's maximum before exp, or exp(1000) overflows"
        assert np.isfinite(got).all(), f"dlogits, all logits moved by {shift:g}: NaN.\n  {fault}"
        r.near("dlogits", got, expected, after=f", all logits moved by {shift:g}")
    got = r.call(answer.cross_entropy_backward, dnll, logits + 1000.0 * np.arange(6)[:, None], targets)
    fault = "subtract the maximum of each row, axis=-1, not that of the whole array"
    assert np.isfinite(got).all(), f"dlogits, row n moved by 1000 n: NaN.\n  {fault}"
    r.near("dlogits", got, expected, after=", row n moved by 1000 n")


def rmsnorm(answer: Any, r: Report) -> None:
    scale = np.array([[3.0], [3.0], [1e-3], [1.0], [30.0]])  # one row so small that eps counts
    x, dy, start = r.rng.normal(size=(5, 8)) * scale, r.rng.normal(size=(5, 8)), r.rng.normal(size=8)
    op = with_buffer(RMSNorm(Param("gain", (8,), std=1.0), FP64), FP64, r.rng)
    gain, eps, stash = op.weight.value, op.eps, Stash()
    op.forward(x, stash)
    op.weight.grad[...] = 0
    expected = op.backward(dy, stash)
    mine, dn, square = start.copy(), dy * gain, (x * x).mean(-1, keepdims=True)
    rstd, bare, whole = 1 / np.sqrt(square + eps), 1 / np.sqrt(square), 1 / np.sqrt(square.mean() + eps)

    def dx(rs: Any, d: Any, power: int = 3) -> Any:
        return rs * d - rs**power * x * (d * x).mean(-1, keepdims=True)

    result = r.call(answer.rmsnorm_backward, mine, dy, gain, x, eps, into=(0,))
    slips = {
        "the factor r is missing: the vector is r x": (dy * x).sum(0),
        "it was summed over everything; there is one sum for each channel: axis=0": (dy * x * rstd).sum(),
        "a sum in place of the mean of squares": (dy * x / np.sqrt(8 * square + eps)).sum(0),
        "the gain is a factor too many": (dn * x * rstd).sum(0),
        "eps is missing": (dy * x * bare).sum(0),
        "eps is outside of the root; it is added to the mean of squares": (dy * x / (np.sqrt(square) + eps)).sum(0),
        "the mean of squares runs over the whole array; it is one per row": (dy * x * whole).sum(0),
        "a mean over the rows; it is their sum": (dy * x * rstd).mean(0),
    }
    added(r, "dgain", result, start, mine, op.weight.grad, slips)
    faults = {
        "r depends on x too: the second term is missing": rstd * dn,
        "the gain is missing": dx(rstd, dy),
        "the gain is missing in the second term": rstd * dn - rstd**3 * x * (dy * x).mean(-1, keepdims=True),
        "a sum in place of the mean": rstd * dn - rstd**3 * x * (dn * x).sum(-1, keepdims=True),
        "r^2 in place of r^3": dx(rstd, dn, 2),
        "r in place of r^3": dx(rstd, dn, 1),
        "the mean runs down the columns; it is one per row: axis=-1": rstd * dn - rstd**3 * x * (dn * x).mean(0),
        "the mean of g x runs over the whole array; it is one per row: axis=-1, keepdims=True": rstd * dn
        - rstd**3 * x * (dn * x).mean(),
        "each entry's own x alone counts here; the mean of g x over the row does": rstd * dn * (1 - (rstd * x) ** 2),
        "this is y, not the gradient": gain * x * rstd,
        "eps is missing": dx(bare, dn),
        "the mean of squares runs over the whole array; it is one per row": dx(whole, dn),
        "eps is outside of the root; it is added to the mean of squares": dx(1 / (np.sqrt(square) + eps), dn),
        "r is the root; it is one over the root": dx(np.sqrt(square + eps), dn),
        "the two terms are added; the second is subtracted": 2 * rstd * dn - dx(rstd, dn),
    }
    r.near("dx", result, expected, faults)


def attention(answer: Any, r: Report) -> None:
    q, k, v, do = (r.rng.normal(size=(2, 6, 4)) for _ in range(4))
    op, stash = Attention(heads=1, kv_heads=1, backend=FP64), Stash()
    op.forward(np.stack([q, k, v], axis=2), stash)
    expected = np.moveaxis(op.backward(do[:, :, None], stash), 2, 0)
    turned = [a.swapaxes(-1, -2) for a in (q, k, v)]
    p = softmax_fwd(np.where(np.tri(6, dtype=bool), q @ turned[1] / 2, -1e30))
    dp = do @ turned[2]
    ds, bare = softmax_bwd(dp, p), p * dp

    def both(scores: Any, scale: float = 0.5) -> tuple[Any, Any]:
        return scale * scores @ k, scale * scores.swapaxes(-1, -2) @ q

    result = three(r.call(answer.attention_backward, do, q, k, v, p, softmax_bwd), "dq, dk, dv")
    for what, right in zip(("dv", "dq", "dk"), (expected[2], expected[0], expected[1]), strict=True):
        i = ("dq", "dk", "dv").index(what)
        faults = {
            f"this is {name}: the order is dq, dk, dv": other
            for name, other in zip(("dq", "dk", "dv"), expected, strict=True)
            if name != what
        }
        if what == "dv":
            faults |= {"p must be transposed: position t gives to those that it saw": p @ do, "p is missing": do}
            faults["v in place of do"] = p.swapaxes(-1, -2) @ v
        else:
            slips = {
                "the scale 1 / sqrt(D) is missing": both(ds, 1.0),
                "the scale is 1 / D; it is 1 / sqrt(D)": both(ds, 0.25),
                "the gradient of p was used as that of the scores: softmax's backward is missing": both(dp),
                "softmax's backward lacks its sum: this is p * dp": both(bare),
                "softmax's backward sums down the columns; its sum is over the keys, the last axis": both(
                    bare - p * bare.sum(-2, keepdims=True)
                ),
                "softmax's backward sums over the whole array; it has a sum for each row": both(bare - p * bare.sum()),
                "the scores are divided by sqrt(D), not multiplied": both(ds, 2.0),
                "dp must be do @ v transposed; this is its transpose": both(softmax_bwd(dp.swapaxes(-1, -2), p)),
                "softmax's backward got its arguments in the wrong order: it is (dy, y)": both(softmax_bwd(p, dp)),
                "p was used in place of the gradient of the scores": both(p),
            }
            faults |= {name: pair[i] for name, pair in slips.items()}
            across, along = 0.5 * ds.swapaxes(-1, -2) @ k, 0.5 * ds @ q
            faults["the gradient of the scores must be transposed"] = across if i == 0 else along
            faults["q and k are exchanged in the product"] = along if i == 0 else across
        r.near(what, result[i], right, faults)


def rope(answer: Any, r: Report) -> None:
    angles, dy = r.rng.normal(size=(6, 4)), r.rng.normal(size=(6, 8))
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = np.split(dy, 2, axis=-1)

    def joined(first: Any, second: Any) -> Any:
        return np.concatenate([first, second], axis=-1)

    even, odd = dy[:, ::2], dy[:, 1::2]
    pairs = np.stack([even * cos + odd * sin, odd * cos - even * sin], axis=-1).reshape(6, 8)
    faults = {
        "this is forward's rotation; backward turns the other way": joined(a * cos - b * sin, a * sin + b * cos),
        "only the first half is turned back: the sine of the second is subtracted": joined(
            a * cos + b * sin, b * cos + a * sin
        ),
        "only the second half is turned back: the sine of the first is added": joined(
            a * cos - b * sin, b * cos - a * sin
        ),
        "the two halves are exchanged": joined(b * cos - a * sin, a * cos + b * sin),
        "the parts with the sine are missing": joined(a * cos, b * cos),
        "sine and cosine are exchanged": joined(a * sin + b * cos, b * sin - a * cos),
        "the pairs are neighbours here; in this rotation they are half a vector apart": pairs,
        "the pairs are mixed in the result, a1 b1 a2 b2; it has all a's first, then all b's: np.concatenate": np.stack(
            [a * cos + b * sin, b * cos - a * sin], axis=-1
        ).reshape(6, 8),
        "the pairs are entry i and entry i + D/2, not neighbours: dy[:, :D // 2] and dy[:, D // 2:]": joined(
            even * cos + odd * sin, odd * cos - even * sin
        ),
        "dy is not rotated": dy,
        "the sign of the second half is wrong: it is b cos - a sin": joined(a * cos + b * sin, a * sin - b * cos),
        "the second half reads what was just written into the first: copy a and b before": joined(
            a * cos + b * sin, b * cos - (a * cos + b * sin) * sin
        ),
        "cosine and sine are multiplied with, not divided by": joined(a / cos + b / sin, b / cos - a / sin),
    }
    r.near("dx", r.call(answer.rotate_backward, dy, cos, sin), joined(a * cos + b * sin, b * cos - a * sin), faults)


OVERFLOW = "exp of a score overflows: write exp(m1 - m), which is at most 1, not exp(m1) or exp(m1) / exp(m)"


def online_softmax(answer: Any, r: Report) -> None:
    for scale in (1.0, -1.0, 800.0, -800.0):  # the largest score in the last tile, and in the first
        scores, values = np.sort(r.rng.normal(size=12)) * scale, r.rng.normal(size=(12, 3))

        def part(tile: slice, scores: Any = scores, values: Any = values) -> Any:
            m = scores[tile].max()
            weights = np.exp(scores[tile] - m)
            return m, weights.sum(), weights @ values[tile]

        state = part(slice(0, 5))
        for tile, whole in ((slice(5, 6), slice(0, 6)), (slice(6, 12), slice(0, 12))):
            (m1, z1, a1), (m2, z2, a2) = state, part(tile)
            expected = part(whole)
            with np.errstate(all="ignore"):
                f, g = np.exp(m1 - expected[0]), np.exp(m2 - expected[0])
                plain = np.exp(m1) * z1 + np.exp(m2) * z2, np.exp(m1) * a1 + np.exp(m2) * a2
                slips = {
                    f"the {'first' if f < 1 else 'second'} tile is not scaled to the common maximum, as each must be": (
                        z1 + z2,
                        a1 + a2,
                    ),
                    "the factors are exchanged": (g * z1 + f * z2, g * a1 + f * a2),
                    "the factors are upside down: exp(m1 - m), not exp(m - m1)": (z1 / f + z2 / g, a1 / f + a2 / g),
                    "each tile is compared with the other's maximum; compare it with the common one": (
                        np.exp(m1 - m2) * z1 + np.exp(m2 - m1) * z2,
                        np.exp(m1 - m2) * a1 + np.exp(m2 - m1) * a2,
                    ),
                    "exp(m1) alone, without the maximum: it overflows for large scores": plain,
                    "it is divided by z already; that is done once, at the end": (
                        np.float64(1),
                        expected[2] / expected[1],
                    ),
                }
            got = three(r.call(answer.merge, state, part(tile)), "m, z, a")
            largest = {
                "m of the first tile; it must be the larger of the two": m1,
                "m of the second tile; it must be the larger of the two": m2,
                "m1 + m2; it must be the larger of the two": m1 + m2,
                "the mean of m1 and m2; it must be the larger of the two": (m1 + m2) / 2,
            }
            r.near("m", got[0], expected[0], largest)
            if not np.isfinite(got[1]):
                raise AssertionError(f"z: got {got[1]}, expected {expected[1]:.6g}.\n  {OVERFLOW}")
            r.near("z", got[1], expected[1], {name: pair[0] for name, pair in slips.items()})
            r.near("a", got[2], expected[2], {name: pair[1] for name, pair in slips.items()})
            state = tuple(got)


def block(answer: Any, r: Report) -> None:
    class Checked(Op):
        def __init__(self) -> None:
            super().__init__(FP64)
            self.norm = RMSNorm(Param("gain", (6,), std=1.0), FP64)
            self.down = Linear(Param("down", (6, 6), std=0.5), FP64)

        def params(self) -> list[Param]:
            return [*self.norm.params(), *self.down.params()]

        def forward(self, x: Any, stash: Stash | None = None) -> Any:  # type: ignore[override]
            return x + self.down.forward(self.norm.forward(x, stash), stash)

        def backward(self, dy: Any, stash: Stash) -> Any:
            dx = answer.block_backward(self.norm, self.down, dy, stash)
            left = ", ".join(op.name for op, _ in stash)
            assert not left, f"the stash is not empty: the backward of {left} was never called"
            return dx

    op, x, dy = with_buffer(Checked(), FP64, r.rng), r.rng.normal(size=(4, 6)), r.rng.normal(size=(4, 6))
    stash = Stash()
    op.forward(x, stash)
    dh = op.down.backward(dy, stash)
    inner = op.norm.backward(dh, stash)
    op.forward(x, stash)
    op.down.backward(dy, stash)
    through = op.norm.backward(dy, stash)
    op.forward(x, stash)
    faults = {
        "dy went through the norm too: it takes dh alone, and dy is added to its result": inner + through,
        "dy was added on both sides of the norm: add it once, to the norm's result": dy + inner + through,
        "dh was added too: it is the norm's input here, and only its result counts": dy + dh + inner,
        "the gradient along the stream, dy, is missing": inner,
        "the gradient through the block is missing": dy,
        "the gradient before the norm was added: return the norm's result": dy + dh,
        "dy was added twice": 2 * dy + inner,
        "dh, the gradient inside, was added in place of dy": inner + dh,
        "the block's gradient was added twice": dy + 2 * inner,
        "the stream's gradient is multiplied where it must be added": dy * inner,
    }
    r.near("dx", r.call(op.backward, dy, stash), dy + inner, faults)
    for name, error in check(op, [x], r.rng).items() if not r.notes else ():  # a ledger is strict about dy
        assert error <= TOLERANCE, f"{name}: relative error {error:.1e}, expected at most {TOLERANCE:.0e}"


def adamw(answer: Any, r: Report) -> None:
    config, lr = AdamWConfig(), 0.01
    sizes = np.array([1e-8, 1, 1, 1, 1, 1, 1e3, 1, 1])  # one gradient so small that eps counts
    mine, theirs = list[Any](), list[Any]()
    # First in the middle of a run: at step 1, where m and v are 0, several slips give the same numbers.
    for step in (3, 4, 1, 2, 3, 4):
        if step == 1 or not theirs:
            old = float(step > 1)
            mine = [r.rng.normal(size=9), old * r.rng.normal(size=9) * sizes, old * (r.rng.normal(size=9) * sizes) ** 2]
            theirs = [a.copy() for a in mine]
        grad = r.rng.normal(size=9) * sizes
        w, m, v = (a.copy() for a in theirs)
        first, second = theirs[1:]
        adamw_(theirs[0], theirs[0], first, second, grad, step_rates(step, lr, config)[0], 1.0, config)
        with np.errstate(all="ignore"):
            slips = wrong_adamw(w, m, v, grad, step, lr, config)
        mine = three(r.call(answer.adamw, *mine, grad, step, lr, config, into=(0, 1, 2)), "w, m, v")
        for i in (1, 2, 0):
            faults = {name: values[i] for name, values in slips.items() if values[i] is not None}
            faults |= {f"this is {'wmv'[j]}: the order is w, m, v": theirs[j] for j in range(3) if j != i}
            r.near("wmv"[i], mine[i], theirs[i], faults, after=f" after step {step}")


def wrong_adamw(w: Any, m: Any, v: Any, g: Any, step: int, lr: float, config: AdamWConfig) -> dict[str, Any]:
    b1, b2, eps, decay = config.beta1, config.beta2, config.eps, config.weight_decay
    m1, v1 = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    c1, c2 = 1 - b1**step, 1 - b2**step

    def moved(mean: Any, square: Any, shrink: float = lr * decay) -> Any:
        return (1 - shrink) * w - lr * mean / (np.sqrt(square) + eps)

    g2 = g + decay * w
    return {
        "w is the old one": (w, None, None),
        "m is the old one": (None, m, None),
        "v is the old one": (None, None, v),
        "this is gradient descent: g in place of the mean over the root": ((1 - lr * decay) * w - lr * g, None, None),
        "the square of g is missing in v": (None, None, b2 * v + (1 - b2) * g),
        "beta1 and 1 - beta1 are exchanged": (None, (1 - b1) * m + b1 * g, None),
        "beta2 and 1 - beta2 are exchanged": (None, None, (1 - b2) * v + b2 * g * g),
        "the factor 1 - beta1 is missing": (None, b1 * m + g, None),
        "the factor 1 - beta2 is missing": (None, None, b2 * v + g * g),
        "the decay was added to g; it shrinks the weight alone": (None, b1 * m + (1 - b1) * g2, None),
        "m was divided by 1 - beta1^t in place; return m as it was before": (None, m1 / c1, None),
        "v was divided by 1 - beta2^t in place; return v as it was before": (None, None, v1 / c2),
        "the correction of m is missing": (moved(m1, v1 / c2), None, None),
        "the correction of v is missing": (moved(m1 / c1, v1), None, None),
        "both corrections are missing": (moved(m1, v1), None, None),
        "the weight decay is missing": (moved(m1 / c1, v1 / c2, 0.0), None, None),
        "the corrections have a product, 1 - beta * step; it is a power, beta ** step": (
            moved(m1 / (1 - b1 * step), v1 / (1 - b2 * step)),
            None,
            None,
        ),
        "the corrections have no power: 1 - beta^step": (moved(m1 / (1 - b1), v1 / (1 - b2)), None, None),
        "the corrections are one step too late: step counts from 1": (
            moved(m1 / (1 - b1 ** (step + 1)), v1 / (1 - b2 ** (step + 1))),
            None,
            None,
        ),
        "the corrections are one step too early: step counts from 1": (
            moved(m1 / (1 - b1 ** (step - 1)), v1 / (1 - b2 ** (step - 1))) if step > 1 else w * np.nan,
            None,
            None,
        ),
        "the corrections multiply; they divide": (moved(m1 * c1, v1 * c2), None, None),
        "g in place of the mean": (moved(g, v1 / c2), None, None),
        "the step lacks the learning rate": ((1 - lr * decay) * w - (m1 / c1) / (np.sqrt(v1 / c2) + eps), None, None),
        "the decay enlarges the weight: it is 1 - lr decay": (moved(m1 / c1, v1 / c2, -lr * decay), None, None),
        "the decay shrinks the step too; it shrinks the old weight alone": (
            (1 - lr * decay) * (moved(m1 / c1, v1 / c2) + lr * decay * w),
            None,
            None,
        ),
        "the decay lacks the learning rate": (moved(m1 / c1, v1 / c2, decay), None, None),
        "eps is missing": ((1 - lr * decay) * w - lr * (m1 / c1) / np.sqrt(v1 / c2), None, None),
        "eps is under the root; it is added to the root": (
            (1 - lr * decay) * w - lr * (m1 / c1) / np.sqrt(v1 / c2 + eps),
            None,
            None,
        ),
        "the root is missing": ((1 - lr * decay) * w - lr * (m1 / c1) / (v1 / c2 + eps), None, None),
        "the step goes uphill: it is subtracted": (2 * (1 - lr * decay) * w - moved(m1 / c1, v1 / c2), None, None),
    }


def rising_sum(p: Any, top_p: float) -> Any:
    """The distribution of an answer that keeps the tokens of np.argsort(p) while their running sum is at most top_p."""
    order, kept = np.argsort(p), np.zeros_like(p)
    kept[order] = np.where(np.cumsum(p[order]) <= top_p, p[order], 0)
    return kept / kept.sum()


def nucleus(answer: Any, r: Report) -> None:
    cases = [(softmax_fwd(r.rng.normal(size=(1, 20)) * 2)[0], top_p) for top_p in (0.5, 0.1, 0.9, 1.0)]
    for p, top_p in [*cases, (np.array([0.25, 0.5, 0.25 / 2, 0.25 / 2]), 0.75)]:
        expected = probabilities(np.log(p)[None], Sampling(temperature=1.0, top_k=0, top_p=top_p))[0]
        order = np.argsort(-p)
        running = np.cumsum(p[order])
        count = int(np.count_nonzero(expected))

        def first(n: int, order: Any = order, p: Any = p) -> Any:
            cut = np.zeros_like(p)
            cut[order[:n]] = p[order[:n]]
            return cut

        with np.errstate(all="ignore"):
            short = first(int((running <= top_p).sum()))
            below, upward = first(int((running < top_p).sum())), np.zeros_like(p)
            rising = order[::-1][: int(np.searchsorted(np.cumsum(p[order[::-1]]), top_p)) + 1]
            upward[rising] = p[rising]
            fewer = "the token that crosses top_p is missing, as it is with `cumsum <= top_p`"
            faults = {
                fewer: short / short.sum(),
                "the token that reaches top_p is missing, as it is with `cumsum < top_p`": below / below.sum(),
                "one token too many: the nucleus ends with the token that reaches top_p": first(count + 1)
                / first(count + 1).sum(),
                "the tokens left are not divided by their sum": first(count),
                "the result is in the sorted order; each token keeps its place": -np.sort(-expected),
                "the least likely tokens were kept: sort from the most likely one": upward / upward.sum(),
                "tokens were cut by their own p, without a running sum": p
                * (p >= 1 - top_p)
                / (p * (p >= 1 - top_p)).sum(),
                "tokens were cut by their own p, p >= top_p, without a running sum": p
                * (p >= top_p)
                / (p * (p >= top_p)).sum(),
                "nothing was cut": p,
                "nothing was cut, and the tokens are sorted; each keeps its place": p[order],
                "the running sum is over p as it is; sort from the most likely token first": np.where(
                    np.cumsum(p) <= top_p, p, 0
                )
                / np.where(np.cumsum(p) <= top_p, p, 0).sum(),
                "each token that is left has an equal share; it keeps its own, over their sum": (first(count) > 0)
                / count,
                "the running sum is of the least likely tokens first: order = np.argsort(-p)": rising_sum(p, top_p),
                "only the most likely token is left": first(1) / first(1).sum(),
            }
            if running[-1] < top_p:  # np.argmax of no True is 0
                unreached = (
                    f"rounding: the running sum ends at {running[-1]:.17g} and never reaches {top_p}; keep all then"
                )
                faults = {unreached: first(1) / first(1).sum(), **faults}
        got = r.call(answer.nucleus, p.copy(), top_p)
        cut = np.ndim(got) == 1 and len(got) < len(p)
        assert not cut, f"top_p {top_p}: got {len(got)} numbers, expected {len(p)}: tokens outside the nucleus are 0"
        r.near("result", got, expected, faults, after=f" for top_p {top_p}")
    # Of tokens as likely as the last one kept, all may stay, as in the sampler, or as few as are needed.
    for p, fewest in ((np.array([0.3, 0.1, 0.3, 0.3]), 2), (np.array([0.1, 0.5, 0.2, 0.2]), 2), (np.full(4, 0.25), 3)):
        got, top_p = np.asarray(r.call(answer.nucleus, p.copy(), 0.6)), 0.6
        expected = probabilities(np.log(p)[None], Sampling(temperature=1.0, top_k=0, top_p=top_p))[0]
        left: Any = np.where(got > 0, p, 0) if got.shape == p.shape else p
        few = np.array_equal(np.sort(left)[-fewest:], np.sort(p)[-fewest:]) and np.count_nonzero(left) == fewest
        if not (few and np.allclose(got, left / left.sum())):
            r.near("result", got, expected, after=f" for p = {p.tolist()} and top_p {top_p}, where tokens are tied")


def own_op(answer: Any, r: Report) -> None:
    squared_relu(answer, r)
    kernel(Path(answer.__file__).with_suffix(".cu"), r)


def squared_relu(answer: Any, r: Report) -> None:
    x, dy = r.rng.normal(size=(2, 3, 9)), r.rng.normal(size=(2, 3, 9))
    up = np.maximum(x, 0)
    faults = {
        "x must be cut at 0: the gradient is 0 where x is negative": 2 * dy * x,
        "the step of max is there, its value is not: 2 max(x, 0), not 2 [x > 0]": 2 * dy * (x > 0),
        "this is the gradient of max(x, 0), not of its square": dy * (x > 0),
        "dy is missing": 2 * up,
        "the square was kept: its derivative is 2 max(x, 0)": 2 * dy * up**2,
        "the square was kept, and the 2 is missing": dy * up**2,
        "|x| in place of max(x, 0)": 2 * dy * np.abs(x),
    }
    body: Any = getattr(answer.squared_relu_bwd, "body", answer.squared_relu_bwd)
    r.near("dx", r.call(body, dy, x), 2 * dy * up, faults)
    if not r.notes:  # a ledger is strict about both
        ledger(check_op(answer.SquaredReLU, FP64))


def kernel(file: Path, r: Report) -> None:
    """Compile the kernel for every precision where CuPy is; run it on the GPU, or on the CPU, a thread at a time."""
    text = file.read_text(encoding="utf-8")
    assert "#error" not in text and 'extern "C"' in text, f"{file.name}: the op is right; its kernel is not written yet"
    compiled = compile_all(file)
    ran = run_on_gpu(file, r) or run_on_cpu(text, r)
    if not compiled:
        r.unchecked.append(
            'whether the kernel compiles for a GPU: pip install "cupy-cuda13x[ctk]" ml_dtypes (no GPU is needed)'
        )
    if not ran:
        r.unchecked.append("what the kernel computes: install a C++ compiler (c++), or run this where there is a GPU")


def compile_all(file: Path) -> bool:
    from tinyforge.backends.compile import KernelError, compile_to_cubin

    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError):
        return False
    for scalar in ("double", "float", "bf16"):
        try:
            compile_to_cubin(file, {"SCALAR": scalar}, "sm_80")
        except KernelError as error:  # without the compiler's list of the operators that do not fit either
            kept = re.sub(r"^[^\n]*: note #.*?\n\s*\^\n", "", str(error), flags=re.MULTILINE | re.DOTALL)
            raise AssertionError(kept) from None
    return True


TOTAL, ROOM = 1000, 4 * 256
"""Elements of the test, and threads: the last 24 have none."""


def judge(r: Report, where: str, dx: Any, dy: Any, x: Any) -> None:
    """dx has ROOM elements that were NaN."""
    outside = int(np.count_nonzero(~np.isnan(dx[TOTAL:])))
    assert not outside, f"the kernel on the {where} wrote past the end, {outside} elements: `if (i >= total) return;`"
    missing = int(np.count_nonzero(np.isnan(dx[:TOTAL])))
    assert not missing, f"the kernel on the {where} left {missing} of {TOTAL} elements unwritten"
    up = np.maximum(x, 0)[:TOTAL]
    faults = {
        "x must be cut at 0": 2 * (dy * x)[:TOTAL],
        "dy is missing": 2 * up,
        "this is y, not its gradient": up * up,
    }
    r.near(f"the kernel's dx on the {where}", dx[:TOTAL], 2 * dy[:TOTAL] * up, faults)


def run_on_gpu(file: Path, r: Report) -> bool:
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):
        return False
    from tinyforge.backends.compile import load

    x, dy = r.rng.normal(size=ROOM), r.rng.normal(size=ROOM)
    dx = cupy.full(ROOM, np.nan)
    launch = load(file, "squared_relu_bwd", SCALAR="double")
    launch((ROOM // 256,), (256,), (dx, cupy.asarray(dy), cupy.asarray(x), np.uint32(TOTAL)))
    judge(r, "GPU", dx.get(), dy, x)
    return True


# What the exercise's kernel needs of CUDA and of ops/common.cuh, in plain C++.
HOST = """
typedef unsigned int u32;
struct Index { u32 x = 0, y = 0, z = 0; };
static Index threadIdx, blockIdx, blockDim, gridDim;
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SCALAR double
template <class T> using Wide = T;
static double widen(double x) { return x; }
static void narrow(double x, double &to) { to = x; }
template <class T> static T larger(T a, T b) { return a > b ? a : b; }
// CUDA's overloads of max: with double and int none fits better than the others.
static double max(double a, double b) { return larger(a, b); }
static double max(double a, float b) { return larger<double>(a, b); }
static double max(float a, double b) { return larger<double>(a, b); }
static float max(float a, float b) { return larger(a, b); }
static int max(int a, int b) { return larger(a, b); }
static u32 max(u32 a, u32 b) { return larger(a, b); }
static double fmax(double a, double b) { return a > b ? a : b; }
"""
LOOP = """
extern "C" void run(double *dx, const double *dy, const double *x, u32 total, u32 blocks) {
    blockDim.x = 256, gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++) squared_relu_bwd(dx, dy, x, total);
}
"""


def run_on_cpu(text: str, r: Report) -> bool:
    """Run the kernel's text as C++, one thread after another. False where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return False
    x, dy, dx = r.rng.normal(size=ROOM), r.rng.normal(size=ROOM), np.full(ROOM, np.nan)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        body = text.replace("#include", "//")
        source.write_text(f'{HOST}\n#line 1 "e11_own_op.cu"\n{body}\n{LOOP}', encoding="utf-8")
        command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"the kernel does not compile:\n{done.stderr}"
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (dx, dy, x)]
        ctypes.CDLL(str(library)).run(*pointers, ctypes.c_uint(TOTAL), ctypes.c_uint(ROOM // 256))
    judge(r, "CPU", dx, dy, x)
    r.note("the kernel ran on the CPU, a thread at a time; that shows its results and bounds, not a race of threads")
    return True


def own_model(answer: Any, r: Report) -> None:
    model = load_answer("own_model", COURSE)
    solved = SimpleNamespace(
        **{f: getattr(load_answer(name, model.SOLUTIONS), f) for name, f in list(model.WRITTEN.items())[:-1]}
    )
    solved.model_backward = answer.model_backward
    net = model.Model(solved, vocab=5, width=8, layers=2, heads=2, room=6)
    ids, targets = r.rng.integers(0, 5, (2, 2, 6))
    dnll, stash = r.rng.normal(size=(2, 6)), Stash()
    net.forward(ids, targets, stash)
    net.grads[...] = start = r.rng.normal(size=net.grads.shape)  # gradients are added to those of earlier batches
    r.call(answer.model_backward, net, dnll, stash)
    left = [op.name for op, _ in stash]
    named = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if left[3:] else "")
    assert not left, f"the stash is not empty: the backward of {named} was never called"
    got, weights = net.grads - start, net.weights.copy()
    slip, token = "", "; each token has its own upstream gradient, dnll as it is"
    stream = "a block's backward has the stream's part already: d = block.backward(d, stash), without adding d"
    for what, given in {
        stream: dnll,
        "each block got the same d: it must get what the block after it returned": dnll,
        "the blocks' results are not used: each block got the same d, and the embedding too": dnll,
        "dnll was divided by its size; it has that factor already": dnll / dnll.size,
        f"the mean of dnll was used{token}": np.full(dnll.shape, dnll.mean()),
        f"the sum of dnll was used{token}": np.full(dnll.shape, dnll.sum()),
        f"ones in place of dnll{token}": np.ones(dnll.shape),
    }.items():
        net.grads[...] = 0.0
        net.forward(ids, targets, stash)
        d = last = net.norm.backward(net.head.backward(net.loss.backward(given, stash), stash), stash)
        for part in reversed(net.blocks):
            d = part.backward(last if "same d" in what else d, stash) + (d if what == stream else 0)
        net.embedding.backward(last if "not used" in what else d, stash)
        if np.allclose(got, net.grads):
            slip = f".\n  {what}"
    for name, (view, _) in net.params.items():
        first = (view.ctypes.data - net.weights.ctypes.data) // 8
        place = slice(first, first + view.size)
        move = np.zeros_like(weights)
        move[place] = r.rng.normal(size=view.size)
        move /= np.linalg.norm(move)
        values = []
        for h in (-2e-4, -1e-4, 1e-4, 2e-4):
            net.weights[...] = weights + h * move
            values.append(float((net.forward(ids, targets, Stash()) * dnll).sum()))
        net.weights[...] = weights
        slope = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / 12e-4
        assert np.any(got[place]), f"{name}: its gradient is 0. Was the backward of its op called?"
        error = abs(float(got @ move) - slope) / max(abs(slope), float(np.linalg.norm(got[place])) / view.size**0.5)
        wrong_sign = ".\n  the sign is wrong" if np.isclose(float(got @ move), -slope) else ""
        assert error < 1e-7, (
            f"{name}: along a random direction backward says {got @ move:.6g}, finite differences {slope:.6g}; "
            f"error {error:.1e}, relative to the gradient's usual size{wrong_sign or slip}"
        )


CHECKS: dict[str, Callable[[Any, Report], None]] = {
    "e01_softmax": softmax,
    "e02_linear": linear,
    "e03_cross_entropy": cross_entropy,
    "e04_rmsnorm": rmsnorm,
    "e05_attention": attention,
    "e06_rope": rope,
    "e07_online_softmax": online_softmax,
    "e08_block": block,
    "e09_adamw": adamw,
    "e10_nucleus": nucleus,
    "e11_own_op": own_op,
    "e12_own_model": own_model,
}


def load_answer(name: str, folder: Path = EXERCISES) -> Any:
    file = folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"course_{name}", file)
    assert spec is not None and spec.loader is not None, f"{file} is not there"
    answer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answer)
    return answer


def examine(name: str, folder: Path = EXERCISES) -> Report:
    """Raises AssertionError, or what the answer raises, where it is wrong."""
    report = Report()
    CHECKS[name](load_answer(name, folder), report)
    return report


def line_of(error: BaseException, file: Path) -> str:
    """Where in the learner's file an exception came from; empty if it is not from there."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]
    return f", line {frames[-1].lineno}, `{frames[-1].line}`" if frames else ""


def explain(error: BaseException) -> None:
    for part, text in EXPLAINED.items():
        if part in str(error):
            print(f"  {text}")


def show(name: str, folder: Path = EXERCISES) -> bool:
    """Print what there is to say of an answer; whether it is right."""
    try:
        report = examine(name, folder)
    except NotImplementedError:
        print(f"{name}: not written yet; it is docs/course/exercises/{name}.py")
        return False
    except ContractError as error:  # its rules are the library's; the course does not teach them
        print(f"{name}: right in a first test, but not where the library's own check tries it: {error}")
        for rule, meaning in RULES.items():
            if f"{rule}: " in str(error):
                print(f"  {rule}: {meaning}")
        return False
    except AssertionError as error:
        number = int(name[1:3])
        print(f"{name}: {error}")
        explain(error)
        print(f"  a hint: python docs/course/check.py {number} --hint; what errors mean: {TABLE}")
        return False
    except Exception as error:  # whatever a learner's code raises
        print(f"{name}{line_of(error, folder / f'{name}.py')}: {type(error).__name__}: {error}")
        explain(error)
        hint = f"a hint: python docs/course/check.py {int(name[1:3])} --hint"
        print("  " + "; ".join([*getattr(error, "__notes__", ()), hint]))
        return False
    print(f"{name}: {'right in what was checked' if report.unchecked else 'right'}")
    for text in report.notes:
        print(f"  note: {text}")
    for text in report.unchecked:
        print(f"  not checked: {text}")
    return not report.unchecked


def main(argv: Sequence[str] | None = None) -> int:
    names = list(CHECKS)
    parser = Parser(prog="python docs/course/check.py", description="Check the answers to the exercises of the course.")
    parser.add_argument("lessons", nargs="*", type=int, metavar="LESSON", help=f"1 to {len(names)} (default: all)")
    parser.add_argument("--hint", nargs="?", type=int, const=1, choices=(1, 2, 3), help="print a hint; 3 says most")
    args = parser.parse_args(argv)
    lessons = args.lessons or range(1, len(names) + 1)
    if wrong := [n for n in lessons if not 1 <= n <= len(names)]:
        raise UserError(f"there is no lesson {wrong[0]}; lessons are 1 to {len(names)}")
    if args.hint:
        hints = load_answer("hints", COURSE).HINTS
        for n in lessons:
            print(f"{names[n - 1]}: {hints[names[n - 1]][args.hint - 1]}")
        return 0
    return int(not all([show(names[n - 1]) for n in lessons]))


if __name__ == "__main__":
    run_command(main)
