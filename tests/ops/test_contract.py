"""The contract of `tinyforge/op.py`, held against every case of every op and model.

What an op computes is checked elsewhere (test_values, test_gradcheck); here it is how it behaves: what it
writes to, what it keeps, what it does with strides, sizes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tinyforge import ops
from tinyforge.backends import Backend, get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import UserError
from tinyforge.gradcheck import known_ops
from tinyforge.kernel import Array, Kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream

FP64 = get_backend("numpy", "fp64", workers=1)
FP32 = get_backend("numpy", "fp32", workers=1)
EVERYTHING = (*known_ops(), *ops.IN_FP8)

Arrays = tuple[Array, ...]
Case = tuple[type[Op], int]


def cases(kind: type[Op], backend: Backend = FP64) -> Iterator[tuple[Op, Arrays]]:
    return kind.cases(backend, np.random.default_rng(0))


def every_case(kinds: tuple[type[Op], ...]) -> Iterator[Any]:
    for kind in kinds:
        for i, (_, inputs) in enumerate(cases(kind)):
            yield pytest.param((kind, i), id=f"{kind.__name__}-{'x'.join(map(str, inputs[0].shape))}-{i}")


def build(case: Case, backend: Backend = FP64) -> tuple[Op, Arrays, Arrays]:
    """The op, its inputs, and a random upstream gradient for each of its outputs."""
    kind, index = case
    op, inputs = next(islice(cases(kind, backend), index, None))
    rng = np.random.default_rng(1)
    return op, inputs, tuple(np.asarray(rng.normal(size=y.shape), y.dtype) for y in outputs(op, inputs))


def outputs(op: Op, inputs: Arrays, stash: Stash | None = None) -> Arrays:
    y = op.forward(*inputs, stash=stash)
    return y if isinstance(y, tuple) else (y,)


def gradients(op: Op, inputs: Arrays, dy: Arrays, stash: Stash | None = None) -> list[Array]:
    """Forward, then backward: the gradients of the float inputs. Those of parameters go into `grad`."""
    stash = Stash() if stash is None else stash
    outputs(op, inputs, stash)
    dx = op.backward(dy if len(dy) > 1 else dy[0], stash)
    assert len(stash) == 0, f"{op.name}: backward left records on the stash"
    return [d for d in (dx if isinstance(dx, tuple) else (dx,)) if d is not None]


def learned(op: Op) -> list[Param]:
    return [p for p in op.params() if not p.frozen]


def zero_grads(op: Op) -> None:
    for p in learned(op):
        p.grad[...] = 0


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(params=every_case(EVERYTHING))
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_a_stash_changes_no_bit_of_the_output(case: Case) -> None:
    op, inputs, _ = build(case)
    for kept, dropped in zip(outputs(op, inputs, Stash()), outputs(op, inputs), strict=True):
        assert same_bits(kept, dropped)


def test_nothing_that_was_handed_in_is_written_to(case: Case) -> None:
    op, inputs, dy = build(case)
    given = [*inputs, *dy, *(p.value for p in op.params())]
    copies = [a.copy() for a in given]
    for a in (*inputs, *dy):
        a.flags.writeable = False  # an in-place write raises where it happens
    gradients(op, inputs, dy)
    for a, copy in zip(given, copies, strict=True):
        assert same_bits(a, copy)  # and so shows in the parameters, which stay writeable


def test_a_gradient_for_each_floating_point_input_in_its_shape(case: Case) -> None:
    op, inputs, dy = build(case)
    found = gradients(op, inputs, dy)
    assert [d.shape for d in found] == [x.shape for x in inputs if x.dtype.kind == "f"]
    assert all(p.grad.shape == p.shape for p in learned(op))


def test_parameter_gradients_accumulate(case: Case) -> None:
    op, inputs, dy = build(case)
    zero_grads(op)
    gradients(op, inputs, dy)
    from_zero = [p.grad.copy() for p in learned(op)]
    rng = np.random.default_rng(2)
    before = [rng.normal(size=p.shape) for p in learned(op)]
    for p, start in zip(learned(op), before, strict=True):
        p.grad[...] = start
    gradients(op, inputs, dy)
    for p, start, added in zip(learned(op), before, from_zero, strict=True):
        np.testing.assert_allclose(p.grad, start + added, rtol=1e-12, atol=1e-12, err_msg=p.name)
        p.grad.fill(np.nan)
        p.blank = True  # 0, whatever its memory says
    gradients(op, inputs, dy)
    for p, added in zip(learned(op), from_zero, strict=True):
        np.testing.assert_allclose(p.grad, added, rtol=1e-12, atol=1e-12, err_msg=p.name)


def test_activation_gradients_are_assigned(case: Case) -> None:
    op, inputs, dy = build(case)
    first = [d.copy() for d in gradients(op, inputs, dy)]
    for once, again in zip(first, gradients(op, inputs, dy), strict=True):
        assert same_bits(once, again)


def test_what_is_frozen_is_read_and_gets_no_gradient(case: Case) -> None:
    """All parameters frozen, then every second: the input's gradient is the same, and so is each that is left."""
    op, inputs, dy = build(case)
    zero_grads(op)
    wanted = gradients(op, inputs, dy, Stash(Stream(5, "noise")))
    values = {p.name: (p.value.copy(), None if p.frozen else p.grad.copy()) for p in op.params()}
    for kept in (0, 1):
        for i, p in enumerate(op.params()):
            p.frozen = not (kept and i % 2)
        buffer = ParamBuffer(op.params(), FP64)
        for p in op.params():
            p.value[...] = values[p.name][0]
        assert buffer.grads.size == buffer.values.size < 1 + kept * buffer.count + 32 * len(values)
        for d, w in zip(gradients(op, inputs, dy, Stash(Stream(5, "noise"))), wanted, strict=True):
            np.testing.assert_allclose(d, w, rtol=1e-12, atol=1e-12)
        for p in op.params():
            before = values[p.name][1]
            assert (p.grad is None) == p.frozen
            if not p.frozen and before is not None:
                np.testing.assert_allclose(p.grad, before, rtol=1e-12, atol=1e-12, err_msg=p.name)


def every_second(x: Array) -> Array:
    """x as every second element of a larger array, the gaps NaN (or an id far out of range)."""
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan if x.dtype.kind == "f" else 2**30, x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def transposed(x: Array) -> Array:
    return np.ascontiguousarray(x.T).T


def backwards(x: Array) -> Array:
    """x read from its last row to its first: a negative stride."""
    return x[::-1].copy()[::-1]


@pytest.mark.parametrize("layout", [every_second, transposed, backwards], ids=lambda f: f.__name__)
def test_strides_do_not_matter(case: Case, layout: Callable[[Array], Array]) -> None:
    op, inputs, dy = build(case)
    strided_inputs, strided_dy = tuple(map(layout, inputs)), tuple(map(layout, dy))
    zero_grads(op)
    wanted = [*outputs(op, inputs), *gradients(op, inputs, dy), *(p.grad.copy() for p in learned(op))]
    zero_grads(op)
    got = [
        *outputs(op, strided_inputs),
        *gradients(op, strided_inputs, strided_dy),
        *(p.grad.copy() for p in learned(op)),
    ]
    for w, g in zip(wanted, got, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-12, atol=1e-12)


class OnlyFloat32(Stash):
    """Refuses a saved float64 array: where a precision is lost or doubled without anyone asking for it."""

    def push(self, owner: Op, *saved: Any) -> None:
        for a in saved:
            assert getattr(a, "dtype", None) != np.float64, f"{owner.name} saves float64"
        super().push(owner, *saved)


def test_float32_stays_float32(case: Case) -> None:
    op, inputs, dy = build(case, FP32)
    exact, exact_inputs, exact_dy = build(case, FP64)
    zero_grads(op)
    zero_grads(exact)
    got = outputs(op, inputs)
    assert {y.dtype for y in got if y.dtype.kind == "f"} == {np.dtype("float32")}
    dx = gradients(op, inputs, dy, OnlyFloat32())
    assert {d.dtype for d in dx} <= {np.dtype("float32")}
    found = [*got, *dx, *(p.grad for p in learned(op))]
    wanted = [
        *outputs(exact, exact_inputs),
        *gradients(exact, exact_inputs, exact_dy),
        *(p.grad for p in learned(exact)),
    ]
    for f, w in zip(found, wanted, strict=True):
        scale = max(1.0, float(np.abs(w).max(initial=0.0)))
        np.testing.assert_allclose(f, w, rtol=0, atol=1e-4 * scale)


SUMS_OVER_ROWS: dict[type[Op], tuple[int, ...]] = {ops.TopKRouter: (2,), ops.MixtureOfExperts: (1, 2)}
"""Outputs without an axis of rows."""


@pytest.mark.parametrize("kind", ops.ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row(kind: type[Op], rows: int) -> None:
    """Cutting the first axis cuts the result; no rows add nothing to the parameters. Sums over rows stay as long."""
    if kind is ops.RouterLosses:
        pytest.skip("its inputs have no rows, they are sums over them")
    op, inputs, dy = build((kind, 0))
    cut = tuple(x[:rows] for x in inputs)
    sums = SUMS_OVER_ROWS.get(kind, ())
    for i, (whole, part) in enumerate(zip(outputs(op, inputs), outputs(op, cut), strict=True)):
        assert part.shape == (whole if i in sums else whole[:rows]).shape
        if i not in sums:
            np.testing.assert_allclose(part, whole[:rows], rtol=1e-12, atol=1e-12)
    zero_grads(op)
    dx = gradients(op, cut, tuple(d if i in sums else d[:rows] for i, d in enumerate(dy)))
    assert [d.shape for d in dx] == [x.shape for x in cut if x.dtype.kind == "f"]
    assert all(np.isfinite(d).all() for d in dx)
    for p in learned(op):
        assert bool(p.grad.any()) == (rows > 0), p.name


@pytest.mark.parametrize("kind", ops.ALL, ids=lambda kind: kind.__name__)
def test_records_belong_to_the_op_that_pushed_them(kind: type[Op]) -> None:
    op, inputs, dy = build((kind, 0))
    stranger = ops.Softmax(FP64, "stranger")
    stash = Stash()
    outputs(op, inputs, stash)
    stranger.forward(np.ones((2, 3)), stash=stash)
    with pytest.raises(RuntimeError, match=f"{op.name} popped the record of stranger"):
        op.backward(dy if len(dy) > 1 else dy[0], stash)


def test_an_empty_stash_cannot_be_popped(case: Case) -> None:
    op, inputs, dy = build(case)
    stash = Stash()
    with pytest.raises(RuntimeError, match="pops an empty stash"):
        op.backward(dy if len(dy) > 1 else dy[0], stash)
    gradients(op, inputs, dy, stash)
    with pytest.raises(RuntimeError, match="pops an empty stash"):  # a record is consumed once
        op.backward(dy if len(dy) > 1 else dy[0], stash)


def test_tying_is_handing_one_param_to_two_ops() -> None:
    table = Param("table", (5, 3))
    embedding, linear = ops.Embedding(table, FP64), ops.Linear(table, FP64)
    buffer = ParamBuffer([*embedding.params(), *linear.params()], FP64)
    assert buffer.params == [table] and buffer.count == 15
    table.value[...] = np.arange(15.0).reshape(5, 3)
    ids, dy, stash = np.array([4, 0, 4]), np.ones((3, 5)), Stash()
    x = embedding.forward(ids, stash)
    linear.forward(x, stash)
    embedding.backward(linear.backward(dy, stash), stash)
    wanted = np.tile(x.sum(axis=0), (5, 1))
    wanted[0] += table.value.sum(axis=0)
    wanted[4] += 2 * table.value.sum(axis=0)
    np.testing.assert_allclose(table.grad, wanted, rtol=1e-15)


def test_two_params_may_not_share_a_name() -> None:
    with pytest.raises(ValueError, match="share a name.*'w'"):
        ParamBuffer([Param("w", (2,)), Param("w", (2,))], FP64)


def test_a_missing_kernel_is_said_when_the_op_is_built() -> None:
    def unwritten_fwd(x: Array) -> Array:
        return x

    class Unwritten(Op):
        kernels = (Kernel(unwritten_fwd),)

    with pytest.raises(
        UserError, match="Unwritten: kernel unwritten_fwd has no implementation on backend meta, only on numpy; "
    ):
        Unwritten(MetaBackend("fp32"))


def test_a_parameter_without_memory_says_what_is_missing() -> None:
    op, stash = ops.Linear(Param("weight", (2, 3)), FP64), Stash()
    with pytest.raises(RuntimeError, match=r"Param weight has no value yet: .*ParamBuffer\(op.params\(\), backend\)"):
        op.forward(np.ones((1, 3)), stash)
    with pytest.raises(AttributeError, match="no attribute 'gradient'"):
        op.weight.gradient  # noqa: B018


@pytest.mark.parametrize("kind", [k for k in EVERYTHING if k.per_head], ids=lambda kind: kind.__name__)
def test_one_upstream_number_for_all_tokens_is_the_same_as_it_for_each(kind: type[Op]) -> None:
    """The fast path of the losses and the general one."""
    for index in range(len([*cases(kind)])):
        op, inputs, (dy, *terms) = build((kind, index))  # terms: of a model that adds some to the loss
        shared = dy.reshape(-1, dy.shape[-1])[0]
        found = []
        for upstream in (shared, np.broadcast_to(shared, dy.shape)):
            zero_grads(op)
            found.append([*gradients(op, inputs, (upstream, *terms)), *(p.grad.copy() for p in learned(op))])
        for fast, general in zip(*found, strict=True):
            np.testing.assert_allclose(fast, general, rtol=1e-10, atol=1e-12)


def test_noise_is_drawn_by_the_name_of_the_op() -> None:
    """Two dropouts of a model draw masks of their own; the same noise gives the same masks again."""
    x = np.ones((20, 30))
    first, second = ops.Dropout(0.5, FP64, "first"), ops.Dropout(0.5, FP64, "second")
    masks = [op.forward(x, Stash(Stream(3, "noise"))) for op in (first, second, first)]
    assert np.array_equal(masks[0], masks[2]) and not np.array_equal(masks[0], masks[1])
