"""The contract of `tinyforge/op.py`.

The checker proves the rules (tinyforge/contract.py, in test_gradcheck); here is what it does not see: batches cut to no
row and to one, tied parameters, messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tinyforge import ops
from tinyforge.backends import get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import UserError
from tinyforge.gradcheck import known_ops
from tinyforge.kernel import Array, Kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.rng import Stream

FP64 = get_backend("numpy", "fp64", workers=1)
EVERYTHING = (*known_ops(), *ops.IN_FP8)

Arrays = tuple[Array, ...]


def build(kind: type[Op], index: int = 0) -> tuple[Op, Arrays, Arrays]:
    """The op of a case, its inputs, and a random upstream gradient for each of its outputs."""
    op, inputs = next(islice(kind.cases(FP64, np.random.default_rng(0)), index, None))
    rng = np.random.default_rng(1)
    return op, inputs, tuple(np.asarray(rng.normal(size=y.shape), y.dtype) for y in outputs(op, inputs))


def outputs(op: Op, inputs: Arrays, stash: Stash | None = None) -> Arrays:
    y = op.forward(*inputs, stash=stash)
    return y if isinstance(y, tuple) else (y,)


def gradients(op: Op, inputs: Arrays, dy: Arrays) -> list[Array]:
    """Forward, then backward: the gradients of the float inputs. Those of parameters go into `grad`."""
    stash = Stash()
    outputs(op, inputs, stash)
    dx = op.backward(dy if len(dy) > 1 else dy[0], stash)
    return [d for d in (dx if isinstance(dx, tuple) else (dx,)) if d is not None]


def learned(op: Op) -> list[Param]:
    return [p for p in op.params() if not p.frozen]


def zero_grads(op: Op) -> None:
    for p in learned(op):
        p.grad[...] = 0


SUMS_OVER_ROWS: dict[type[Op], tuple[int, ...]] = {
    ops.TopKRouter: (2,),
    ops.MixtureOfExperts: (1, 2),
    ops.BiasedExperts: (1, 2),
}
"""Outputs without an axis of rows."""


@pytest.mark.parametrize("kind", ops.ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row(kind: type[Op], rows: int) -> None:
    """Cutting the first axis cuts the result; no rows add nothing to the parameters. Sums over rows stay as long."""
    if kind is ops.RouterLosses:
        pytest.skip("its inputs have no rows, they are sums over them")
    op, inputs, dy = build(kind)
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


def test_a_record_is_popped_once_by_the_op_that_pushed_it() -> None:
    (op, (x, *_), (dy,)), stash = build(ops.SwiGLU), Stash()
    with pytest.raises(RuntimeError, match="SwiGLU pops an empty stash"):
        op.backward(dy, stash)
    op.forward(x, stash)
    ops.Softmax(FP64, "stranger").forward(np.ones((2, 3)), stash=stash)
    with pytest.raises(RuntimeError, match="SwiGLU popped the record of stranger"):
        op.backward(dy, stash)


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
    expected = np.tile(x.sum(axis=0), (5, 1))
    expected[0] += table.value.sum(axis=0)
    expected[4] += 2 * table.value.sum(axis=0)
    np.testing.assert_allclose(table.grad, expected, rtol=1e-15)


def test_two_params_may_not_share_a_name() -> None:
    with pytest.raises(ValueError, match="share a name.*'w'"):
        ParamBuffer([Param("w", (2,)), Param("w", (2,))], FP64)


def test_a_missing_kernel_is_said_when_the_op_is_built() -> None:
    def unwritten_fwd(x: Array) -> Any:
        return x

    class Unwritten(Op):
        fwd = Kernel(unwritten_fwd)

    with pytest.raises(
        UserError, match="Unwritten: kernel unwritten_fwd has no implementation on backend meta, only on numpy; "
    ):
        Unwritten(MetaBackend("fp32"))


def test_a_list_of_kernels_works_and_says_what_to_write() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old: name each kernel .*`fwd = softmax_fwd`, called as `self.fwd"):
        old: Any = type("Old", (Op,), {"kernels": ops.Softmax.kernels})
    assert old(FP64).k.softmax_fwd(np.zeros((1, 4))).tolist() == [[0.25] * 4] and old.kernels == ops.Softmax.kernels


def test_errors_name_the_op_the_width_the_dtype_and_the_id() -> None:
    fp32 = get_backend("numpy", "fp32", workers=1)
    widths: list[tuple[Op, int]] = [
        (ops.Linear(Param("w", (5, 3)), FP64, "head"), 4),
        (ops.LinearSwiGLU(Param("w", (6, 3)), FP64, "head"), 4),
        (ops.SwiGLULinear(Param("w", (5, 3)), FP64, "head"), 4),
        (ops.GELULinear(Param("w", (5, 3)), FP64, "head"), 4),
        (ops.RMSNorm(Param("w", (3,)), FP64, 1e-5, "head"), 1),  # NumPy would broadcast it
        (ops.LayerNorm(Param("w", (3,)), None, FP64, name="head"), 1),
        (ops.LearnedPositions(Param("w", (9, 3)), FP64, "head"), 1),
        (ops.SwiGLU(FP64, "head"), 3),
    ]
    for op, width in widths:
        with pytest.raises(ValueError, match=rf"^head: an input of shape \(2, 2, {width}\), expected \(..., \d+\)$"):
            with_buffer(op, FP64, np.random.default_rng(0)).forward(np.ones((2, 2, width)))
    linear = with_buffer(ops.Linear(Param("w", (5, 3)), fp32, "head"), fp32, np.random.default_rng(0))
    with pytest.raises(
        TypeError, match="^head: an input of float64, expected an array of float32; convert it with backend.asarray"
    ):
        linear.forward(np.ones((2, 3)))
    table = with_buffer(ops.Embedding(Param("w", (5, 3)), FP64, "words"), FP64, np.random.default_rng(0))
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=rf"^words: id {wrong} at \[1, 0\], expected 0 to 4$"):
            table.forward(np.array([[0, 4], [wrong, 1]]))
    with pytest.raises(IndexError, match=r"^CrossEntropy: id 7 at \[0, 1\], expected -1 to 6$"):
        ops.CrossEntropy(FP64).forward(np.ones((1, 2, 7)), np.array([[-1, 7]]))


def test_a_parameter_without_memory_says_what_is_missing() -> None:
    op, stash = ops.Linear(Param("weight", (2, 3)), FP64), Stash()
    with pytest.raises(RuntimeError, match=r"Param weight has no value yet: .*ParamBuffer\(op.params\(\), backend\)"):
        op.forward(np.ones((1, 3)), stash)
    with pytest.raises(AttributeError, match="no attribute 'gradient'"):
        op.weight.gradient  # noqa: B018


@pytest.mark.parametrize("kind", [k for k in known_ops() if k.per_head], ids=lambda kind: kind.__name__)
def test_one_upstream_number_for_all_tokens_is_the_same_as_it_for_each(kind: type[Op]) -> None:
    """The fast path of the losses and the general one."""
    for index in range(len([*kind.cases(FP64, np.random.default_rng(0))])):
        op, inputs, (dy, *terms) = build(kind, index)  # terms: of a model that adds some to the loss
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


ANY_WIDTH = (
    *(ops.Take, ops.Fork, ops.Scale, ops.AveragePool2d, ops.MaxPool2d, ops.Upsample, ops.Attention, ops.SigmoidGate),
    *(ops.SinkAttention, ops.Mix, ops.Smear),
    *(
        ops.ReLU,
        ops.SquaredReLU,
        ops.Sigmoid,
        ops.SiLU,
        ops.GELU,
        ops.Tanh,
        ops.Softmax,
        ops.Dropout,
        ops.TopKRouter,
        ops.CrossEntropy,
    ),
)
"""Ops of one input whose last axis may be of any length."""
FP32 = get_backend("numpy", "fp32", workers=1)


@pytest.mark.parametrize("kind", ops.ALL, ids=lambda kind: kind.__name__)
def test_what_an_op_does_not_expect_is_refused_by_its_name(kind: type[Op]) -> None:
    """One input after the other too wide, and in float64 for an op in float32; Patches converts."""
    op, inputs = next(iter(kind.cases(FP32, np.random.default_rng(0))))
    inputs = tuple(FP32.asarray(x) if x.dtype.kind == "f" else x for x in inputs)
    names = "|".join(re.escape(part.name) for part in (op, *vars(op).values()) if isinstance(part, Op))
    names += r"|\d+\.\w+" if kind is ops.Sequential else ""
    for i, x in enumerate(inputs):
        if x.dtype.kind != "f":
            continue
        exact, wide = x.astype(np.float64), np.concatenate([x, x[..., :1]], axis=-1)
        if kind is ops.Patches:
            assert op.forward(exact).dtype == np.float32
        else:
            with pytest.raises((TypeError, ValueError), match=rf"^({names}): .*float64"):
                op.forward(*inputs[:i], exact, *inputs[i + 1 :], stash=Stash())
        if kind not in ANY_WIDTH:
            with pytest.raises(ValueError, match=rf"^({names}): .*[,;] expected "):
                op.forward(*inputs[:i], wide, *inputs[i + 1 :], stash=Stash())


def weight(*shape: int) -> Param:
    return Param("w", shape, std=1.0)


LIMITS: tuple[tuple[Callable[..., Op], Sequence[Any], Sequence[Any]], ...] = (
    (lambda rate: ops.Dropout(rate, FP64), (0.0, 0.99), (-0.01, 1.0)),
    (lambda rate: ops.Attention(1, 1, FP64, dropout=rate), (0.0, 0.99), (-0.01, 1.0)),
    (
        lambda rate: ops.LoRA(weight(3, 4), weight(2, 4), weight(3, 2), FP64, alpha=1.0, rate=rate),
        (0.0, 0.9),
        (-0.1, 1),
    ),
    (lambda a: ops.LoRA(weight(3, 4), weight(*a), weight(3, 2), FP64, alpha=1.0), ((2, 4),), ((1, 4), (2, 3), (2, 5))),
    (lambda b: ops.LoRA(weight(3, 4), weight(2, 4), weight(*b), FP64, alpha=1.0), ((3, 2),), ((3, 3), (4, 2))),
    (lambda window: ops.Attention(1, 1, FP64, window=window), (1, 2, None), (0, -1)),
    (lambda causal: ops.Attention(1, 1, FP64, window=1, causal=causal), (True,), (False,)),
    (lambda cap: ops.Attention(1, 1, FP64, softcap=cap), (0.0, 0.1), (-0.1,)),
    (lambda heads: ops.Attention(heads, 2, FP64), (2, 4), (1, 3)),
    (lambda stride: ops.Conv2d(weight(2, 3, 3, 1), FP64, stride=stride), (1, 2), (0, -1)),
    (lambda padding: ops.Conv2d(weight(2, 3, 3, 1), FP64, padding=padding), (0, 3), (-1,)),
    (lambda shape: ops.Conv2d(weight(*shape), FP64), ((2, 1, 1, 1),), ((2, 1, 1), (2, 1, 1, 1, 1))),
    (lambda size: ops.MaxPool2d(size, FP64), (1, 15), (0, 16)),
    (lambda stride: ops.AveragePool2d(2, FP64, stride=stride), (1, 3, None), (0, -1)),
    (lambda factor: ops.Upsample(factor, FP64), (1, 2), (0,)),
    (lambda groups: ops.GroupNorm(weight(6), weight(6), groups, FP64), (1, 2, 6), (4, 5)),
    (lambda width: ops.RoPE(6, 2, 1, FP64, width=width), (0, 2, 6), (1, 3, 8, -2)),
    (lambda dim: ops.RoPE(dim, 2, 1, FP64), (2, 4), (3,)),
    (lambda heads: ops.CappedCrossEntropy(weight(heads, 5, 3), 1.0, FP64), (1,), (2,)),
    (lambda count: ops.Sequential(*[ops.ReLU(FP64)] * count), (1, 2), (0,)),
)


@pytest.mark.parametrize(("make", "taken", "refused"), LIMITS)
def test_arguments_are_taken_up_to_their_limits(
    make: Callable[[Any], Op], taken: Sequence[Any], refused: Sequence[Any]
) -> None:
    for value in taken:
        assert make(value).params() is not None
    for value in refused:
        with pytest.raises((ValueError, UserError), match=r"expected|divide|want"):
            make(value)


def test_inputs_are_taken_up_to_their_limits() -> None:
    """The smallest image that a window fits, the last position of a table; one less, or one more, is refused."""

    def conv(size: int) -> None:
        op = with_buffer(ops.Conv2d(weight(1, 3, 2, 1), FP64), FP64, np.random.default_rng(0))
        op.forward(np.zeros((1, size + 1, size, 1)))

    def place(last: int) -> None:
        op = with_buffer(ops.LearnedPositions(weight(5, 2), FP64), FP64, np.random.default_rng(0))
        op.forward(np.zeros((1, 2, 2)), offset=last - 2)

    def attend(options: dict[str, Any]) -> None:
        causal = "lengths" not in options or options.pop("causal", False)
        ops.Attention(1, 1, FP64, causal=causal).forward(np.zeros((1, 2, 3, 2)), **options)

    taken: list[tuple[Callable[[Any], Any], Any, Any]] = [
        (conv, 2, 1),
        (lambda shape: ops.MaxPool2d(3, FP64).forward(np.zeros(shape)), (1, 3, 3, 1), (1, 2, 3, 1)),
        (lambda shape: ops.AveragePool2d(3, FP64).forward(np.zeros(shape)), (1, 3, 3, 1), (1, 3, 2, 1)),
        (lambda shape: ops.MaxPool2d(1, FP64).forward(np.zeros(shape)), (1, 2, 2, 1), (2, 2, 1)),
        (lambda side: ops.Patches(2, FP64).forward(np.zeros((1, 1, 4, side))), 4, 3),
        (lambda side: ops.Patches(2, FP64).forward(np.zeros((1, 1, side, 4))), 2, 5),
        (lambda shape: ops.MSE(FP64).forward(np.zeros((2, 3)), np.zeros(shape)), (2, 3), (2, 4)),
        (lambda dtype: ops.MSE(FP64).forward(np.zeros(3), np.zeros(3, dtype)), "f8", "f4"),
        (place, 5, 6),
        (attend, {"starts": np.zeros((1, 2), np.int32)}, {"lengths": np.array([1]), "causal": True}),
    ]
    for call, right, wrong in taken:
        call(right)
        with pytest.raises(ValueError, match=r"expected|the table|lengths with causal"):
            call(wrong)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0, 2.0], "^head: an input of list, expected an array of float32"),
        (np.ones((2, 3), np.int64), "^head: an input of int64, expected an array of float32"),
    ],
)
def test_lists_and_integers_are_no_activations(x: Any, message: str) -> None:
    """NumPy would compute with integers in float64, without a word."""
    fp32 = get_backend("numpy", "fp32", workers=1)
    head = with_buffer(ops.Linear(5, 3, fp32, "head"), fp32, np.random.default_rng(0))
    with pytest.raises(TypeError, match=message):
        head.forward(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.Linear(5, 3), "^Linear: no backend, or a size too few; expected Linear.out, inputs, backend"),
        (lambda: ops.Linear(5, FP64), "^Linear: no backend"),
        (lambda: ops.Linear(0, 3, FP64), "^Linear: sizes .0, 3., expected whole numbers"),
        (lambda: ops.Linear(Param("w", (5, 3))), "expected Linear.weight: Param, backend"),
        (lambda: ops.Conv2d(4, 3, FP64), "expected Conv2d.out, inputs, size, backend"),
        (lambda: ops.Conv2d(4, 3, -1, FP64), "^Conv2d: sizes .4, -1, -1, 3., expected whole numbers"),
        (
            lambda: ops.RMSNorm(4, FP64),
            r"^RMSNorm: weight is 4, expected a Param such as tinyforge.Param\('weight', sh",
        ),
        (
            lambda: ops.LayerNorm(4, FP64),
            r"call it as LayerNorm\(weight: Param, bias: Param | None, backend: Backend, ",
        ),
        (lambda: ops.LayerNorm(Param("w", (4,)), 4, FP64), "^LayerNorm: bias is 4, expected a Param"),
        (lambda: ops.Embedding(np.ones((5, 3)), FP64), "^Embedding: weight is of type ndarray, expected a Param"),
        (lambda: ops.GELU("erf", FP64), "^GELU: backend is 'erf', expected a Backend such as tinyforge.get_backend"),
        (lambda: ops.Sequential([ops.ReLU(FP64)]), "^Sequential: argument 0 is of list, expected an op"),
    ],
)
def test_an_op_made_from_the_wrong_arguments_names_itself(make: Callable[[], Op], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("kind", [k for k in vars(ops).values() if isinstance(k, type) and issubclass(k, Op)])
def test_no_op_is_made_from_numbers_alone(kind: type[Op]) -> None:
    """The message is of one line, and has the op's name."""
    required = [p for p in signature(kind).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: .*$"):
        kind(*[4] * max(1, len(required)))


def test_sizes_may_be_named() -> None:
    assert ops.Linear(5, inputs=3, backend=FP64).weight.shape == (5, 3)
    assert ops.Conv2d(4, 3, size=2, backend=FP64, name="first").weight.shape == (4, 2, 2, 3)


@pytest.mark.parametrize("ids", [[1, 2], np.array([1.0, 2.0]), np.array([True, False])], ids=["list", "float", "bool"])
def test_ids_are_arrays_of_integers(ids: Any) -> None:
    table = with_buffer(ops.Embedding(Param("w", (5, 3)), FP64, "words"), FP64, np.random.default_rng(0))
    with pytest.raises(TypeError, match="^words: ids of (list|float64|bool), expected an array of integers"):
        table.forward(ids)
    with pytest.raises(TypeError, match="^CrossEntropy: ids of"):
        ops.CrossEntropy(FP64).forward(np.ones((2, 7)), ids)
