"""Kernels: found by backend, checked when registered, named when missing; and complete in this package."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tinyforge.ops
import tinyforge.optim
import tinyforge.parallel
from tinyforge import ops
from tinyforge.backends import get_backend
from tinyforge.backends.meta import METER, MetaBackend
from tinyforge.errors import UserError
from tinyforge.kernel import Array, Kernel, bind, kernel, override
from tinyforge.op import Op, Stash

FP32 = get_backend("numpy", "fp32", workers=1)
META = MetaBackend("fp32")


class Elsewhere:
    """A backend by name alone, which is all that a kernel looks at."""

    def __init__(self, name: str) -> None:
        self.name = name


def all_kernels() -> list[Kernel[..., Any]]:
    """Every kernel that a module of ops/, optim/ or parallel/ defines."""
    found: dict[int, Kernel[..., Any]] = {}
    for package in (tinyforge.ops, tinyforge.optim, tinyforge.parallel):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("_cuda", "_webgpu", "_numba")):
                for value in vars(importlib.import_module(module.name)).values():
                    if isinstance(value, Kernel):
                        found[id(value)] = value
    return sorted(found.values(), key=lambda k: k.name)


def test_a_kernel_runs_its_numpy_body() -> None:
    @kernel
    def double(x: Array) -> Array:
        """Twice x."""
        return 2 * x

    assert double(3) == double.bind(FP32)(3) == 6
    assert double.name == "double" and double.__doc__.endswith("\n\nTwice x.")
    assert repr(double) == "<kernel double on numpy>"


def test_the_names_of_kernels_are_unique() -> None:
    names = [k.name for k in all_kernels()]
    assert len(set(names)) == len(names) > 25


def test_every_op_lists_kernels_and_every_kernel_has_an_op() -> None:
    listed = {k.name for kind in (*ops.ALL, *ops.IN_FP8) for k in kind.kernels}
    assert {k.name for k in all_kernels()} - listed == {
        "adamw_",
        "add_",
        "clip_factor",
        "linear_bwd_bias",
        "muon_",
        "muon_momentum",
        "newton_schulz",
        "normuon_",
        "square_sums",
        "sum_tokens",
        "rmsnorm_scaled_fwd",
        "rmsnorm_scaled_bwd",  # of FP8AddRMSNorm
    }


@pytest.mark.parametrize("found", all_kernels(), ids=lambda k: k.name)
def test_every_kernel_is_on_numpy_and_meta(found: Kernel[..., Any]) -> None:
    bound = found.bind(FP32)
    assert getattr(bound, "func", bound) is found.body  # some take the backend
    assert found.bind(META, "test") is not found.body


@pytest.mark.parametrize("found", all_kernels(), ids=lambda k: k.name)
def test_every_kernel_is_on_cupy(found: Kernel[..., Any]) -> None:
    """From the neighbour module; importing it needs CuPy, not a GPU."""
    pytest.importorskip("cupy")
    pytest.importorskip("ml_dtypes")
    assert {"cupy", "numpy"} <= {*found.backends()}


@pytest.mark.parametrize("kind", (*ops.ALL, *ops.IN_FP8), ids=lambda kind: kind.__name__)
def test_meta_arrays_have_the_shapes_and_dtypes_of_the_arrays(kind: type[Op]) -> None:
    """Forward and backward of every case on both; nothing is left allocated, and something was allocated before."""
    arrays = kind.cases(FP32, np.random.default_rng(0))
    meta_arrays = kind.cases(META, np.random.default_rng(0))
    for (op, inputs), (same, shapes) in zip(arrays, meta_arrays, strict=True):
        stash, meta_stash = Stash(), Stash()
        y, expected = same.forward(*shapes, stash=meta_stash), op.forward(*inputs, stash=stash)
        assert described(y) == described(expected)
        dx = same.backward(y, meta_stash)
        assert described(dx) == described(op.backward(expected, stash)) and not len(meta_stash)


def described(result: Any) -> list[Any]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part if part is None else (part.shape, part.dtype) for part in parts]


def test_meta_arrays_are_counted() -> None:
    before = METER.now
    op, (x,) = next(ops.Softmax.cases(META, np.random.default_rng(0)))
    held = METER.now
    y = op.forward(x)
    assert METER.now - held == METER.now - before - 512 == 512 and y.shape == x.shape
    del x, y, op
    assert METER.now == before


def test_arguments_must_be_those_of_the_body() -> None:
    @kernel
    def add(x: Array, y: Array, scale: float = 1.0) -> Array:
        return x + scale * y

    with pytest.raises(TypeError, match=r"kernel add: on cupy it takes \(y, x, scale=1.0\), on numpy \(x, y, scale=1"):
        add.on("cupy")(lambda y, x, scale=1.0: x)
    with pytest.raises(TypeError, match="kernel add: on cupy it takes"):
        add.on("cupy")(lambda x, y, scale=2.0: x)
    with pytest.raises(TypeError, match="kernel add: on cupy it takes"):
        add.on("cupy")(lambda x, y, scale=1.0, *, stream: x)
    right = add.on("meta")(lambda x, y, scale=1.0, *, backend: (x, backend.name))
    assert add.bind(Elsewhere("meta"))(1, 2) == (1, "meta")
    assert right(5, 0, backend=Elsewhere("numpy")) == (5, "numpy")  # registering gives the plain function back


def test_a_script_s_kernel_has_no_compiled_neighbour() -> None:
    def double(x: Array) -> Array:
        return x * 2

    double.__module__ = "__main__"
    assert kernel(double).bind(SimpleNamespace(name="numpy", compiled=True))(2) == 4


def test_on_meta_a_function_may_name_only_what_it_reads() -> None:
    @kernel
    def add(x: Array, y: Array, scale: float = 1.0) -> Array:
        return x + scale * y

    assert add.on("meta")(lambda y: y + 1)(1) == 2
    assert add.bind(META)(5, 2) == add.bind(META)(5, y=2, scale=3.0) == 3
    with pytest.raises(TypeError, match=r"kernel add: on meta it takes \(z\), on numpy"):
        add.on("meta")(lambda z: z)
    with pytest.raises(TypeError, match="kernel add: on cupy it takes"):
        add.on("cupy")(lambda y: y)


def test_memory_is_derived_where_a_result_is_like_the_first_array() -> None:
    @kernel
    def silent(out: Array, x: Array) -> None:
        out += x

    @kernel
    def halves(dweight: Array | None, rate: float, dy: Array, x: Array) -> tuple[Array, Array]:
        return dy / 2, dy / 2

    @kernel
    def untyped(x, y):  # type: ignore[no-untyped-def]
        return x

    @kernel
    def other(x: Array) -> Array | None:
        return x

    dy, x = META.zeros((2, 3), np.dtype(np.float16)), META.zeros((5,))
    assert silent.bind(META)(dy, x) is None
    before = METER.now
    results = halves.bind(META)(None, 0.5, dy, x=x)
    assert described(results) == [((2, 3), np.float16)] * 2 and METER.now - before == 2 * 512
    assert described(untyped.bind(META)(x, dy)) == [((5,), np.float32)]
    with pytest.raises(UserError, match="kernel other has no implementation on backend meta"):
        other.bind(META)


def test_a_missing_kernel_names_itself_its_op_and_the_backends_that_have_it() -> None:
    @kernel
    def lonely(x: Array) -> Array:
        return x

    lonely.on("meta")(lambda x: x)
    with pytest.raises(UserError) as caught:
        bind((lonely,), Elsewhere("cupy"), "MyOp")
    assert str(caught.value) == (
        "MyOp: kernel lonely has no implementation on backend cupy, only on meta, numpy; use --backend numpy, or "
        f'write one: @lonely.on("cupy") in {__name__}_cuda'
    )


def test_the_neighbour_of_a_module_of_ones_own_is_imported_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from tinyforge.kernel import kernel\n@kernel\ndef triple(x):\n    return 3 * x\n", encoding="utf-8"
    )
    (tmp_path / "mine_cuda.py").write_text(
        "import mine\n@mine.triple.on('cupy')\ndef triple(x, *, backend):\n    return x, backend.name\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("mine")
    assert mine.triple(2) == 6 and "mine_cuda" not in sys.modules
    assert mine.triple.bind(Elsewhere("cupy"))(2) == (2, "cupy") and "mine_cuda" in sys.modules
    assert mine.triple.backends() == ["cupy", "numpy"]
    for name in ("mine", "mine_cuda"):
        monkeypatch.delitem(sys.modules, name)


def test_an_override_is_seen_by_ops_built_inside_it_only() -> None:
    @kernel
    def same(x: Array) -> Array:
        return x

    before = same.bind(FP32)
    with override(same, "numpy", lambda x: x + 1):
        assert same.bind(FP32)(1) == 2 and before(1) == 1 and same(1) == 1
    assert same.bind(FP32)(1) == 1
