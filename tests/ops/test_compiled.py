"""The kernels compiled by numba, compared with NumPy's bodies; and the choice between the two."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinyforge.ops.compiled  # noqa: F401
from tinyforge import checkpoint, ops
from tinyforge.backends import Backend, get_backend, machine_code
from tinyforge.contract import gradients_of, outputs_of
from tinyforge.errors import UserError
from tinyforge.gradcheck import TOLERANCE, check, check_op
from tinyforge.kernel import COMPILED, override
from tinyforge.op import Op, Stash
from tinyforge.ops.attention import attention_fwd, split
from tinyforge.ops.cross_entropy import linear_cross_entropy_fwd
from tinyforge.ops.linear import linear_add_fwd, linear_bwd, linear_fwd
from tinyforge.ops.rmsnorm import rmsnorm_bwd
from tinyforge.ops.rope import rope
from tinyforge.optim import AdamWConfig
from tinyforge.optim.adamw import adamw_
from tinyforge.rng import Stream
from tinyforge.train import compiled
from tinyforge.train.compiled import choose_kernels
from tinyforge.train.settings import PretrainSettings, open_backend, parse

missing = machine_code.missing()
needs_numba = pytest.mark.skipif(bool(missing), reason=missing)


def backend_of(precision: str, asked: str = "numpy") -> Backend:
    backend = get_backend("numpy", precision, workers=1)
    assert choose_kernels(backend, asked) == asked
    return backend


KINDS = [kind for kind in ops.ALL if any(COMPILED in k._implementations for k in kind.kernels)]


def results(kind: type[Op], backend: Backend) -> list[list[np.ndarray]]:
    """For each case the outputs, and the gradients of the inputs and the parameters."""
    found = []
    for op, inputs in kind.cases(backend, np.random.default_rng(3)):
        stash, rng = Stash(noise=Stream(7, "test")), np.random.default_rng(4)
        outputs = outputs_of(op, inputs, stash)
        ups = [rng.normal(size=y.shape).astype(y.dtype) for y in outputs]
        grads = gradients_of(inputs, op.backward(ups[0] if len(ups) == 1 else tuple(ups), stash))
        arrays = [*outputs, *(grad for grad in grads if grad is not None), *(p.grad for p in op.params())]
        found.append([np.asarray(array).copy() for array in arrays])
    return found


@needs_numba
def test_the_ops_that_have_compiled_kernels() -> None:
    names = {kind.__name__ for kind in KINDS}
    expected = "SwiGLU LinearSwiGLU SwiGLULinear RMSNorm AddRMSNorm RoPE Attention LinearCrossEntropy Embedding"
    assert names >= set(expected.split())
    op, _ = next(ops.SwiGLU.cases(backend_of("fp32", "numba"), np.random.default_rng(0)))
    assert op.fwd.__module__ == "tinyforge.ops.compiled" and backend_of("fp32").compiled is False  # type: ignore[attr-defined]


@pytest.fixture(params=["products", "passes"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cases' small weights: compiled too, or NumPy's."""
    monkeypatch.setattr("tinyforge.ops.compiled.LEAST", 0 if request.param == "products" else 1 << 19)


@needs_numba
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_kernels_are_as_exact_as_numpy_s(kind: type[Op]) -> None:
    truth, double = results(kind, backend_of("fp64")), results(kind, backend_of("fp64", "numba"))
    single, found = results(kind, backend_of("fp32")), results(kind, backend_of("fp32", "numba"))
    for case in zip(truth, double, single, found, strict=True):
        for exact, same, numpy_s, ours in zip(*case, strict=True):
            if not exact.size:
                continue
            assert ours.dtype == numpy_s.dtype and ours.shape == numpy_s.shape
            size = np.abs(exact).max() + 1e-3
            assert np.abs(same - exact).max() <= 1e-11 * size
            allowed = 2 * np.abs(numpy_s - exact).max() + 8 * np.finfo(np.float32).eps * size
            assert np.abs(ours - exact).max() <= allowed


@needs_numba
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_compiled_kernels(kind: type[Op]) -> None:
    rows = check_op(kind, backend_of("fp64", "numba"))
    assert rows and max(row.error for row in rows) <= TOLERANCE


@needs_numba
def test_the_gradient_check_sees_a_fault_in_a_compiled_kernel() -> None:
    backend, rng = backend_of("fp64", "numba"), np.random.default_rng(0)
    right = rmsnorm_bwd.bind(backend)

    def wrong(dweight: Any, dy: Any, weight: Any, y: Any, rstd: Any, residual: Any, plus_one: bool = False) -> Any:
        return right(dweight, dy, weight, y, rstd * 1.001, residual, plus_one)

    with override(rmsnorm_bwd, COMPILED, wrong):
        op, inputs = next(ops.RMSNorm.cases(backend, rng))
        assert max(check(op, inputs, rng).values()) > 1e-4


@needs_numba
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_adamw_gives_numpy_s_bits_wherever_it_is_cut(precision: str) -> None:
    plain, fast = (adamw_.bind(backend_of(precision, kernels)) for kernels in ("numpy", "numba"))
    dtype, rng = backend_of(precision).dtype, np.random.default_rng(0)
    whole = [rng.normal(size=1003).astype(dtype) for _ in range(4)]
    whole[2] **= 2
    cut = [array.copy() for array in whole]
    for step in (1, 2):
        rates = np.array([1e-3 * step, 1.7, 0.9], dtype)
        plain(whole[0], *whole, rates, 0.3, AdamWConfig())
        for part in (slice(0, 517), slice(517, 1003)):
            fast(cut[0][part], *(array[part] for array in cut), rates, 0.3, AdamWConfig())
        for expected, found in zip(whole, cut, strict=True):
            assert np.array_equal(found, expected)


@needs_numba
def test_a_sequence_s_bits_do_not_depend_on_the_others() -> None:
    backend, rng = backend_of("fp32", "numba"), np.random.default_rng(0)
    qkv = rng.normal(size=(5, 77, 8, 20)).astype(np.float32)
    attend = attention_fwd.bind(backend)
    how: Any = (None, None, True, 50, None, 0.0)
    together, alone = attend(*split(qkv, 4), *how), attend(*split(qkv[3:4], 4), *how)
    for all_of_them, one in zip(together, alone, strict=True):
        assert np.array_equal(all_of_them[3:4], one)


@needs_numba
def test_rope_in_place_turns_only_the_heads_it_is_given() -> None:
    qkv, angles = np.random.default_rng(0).normal(size=(2, 3, 5, 4)), np.arange(6.0).reshape(3, 2)
    same = qkv.copy()
    for turn, array in ((rope, qkv), (rope.bind(backend_of("fp64", "numba")), same)):
        heads = array[:, :, 1:4]
        assert turn(heads, heads, np.cos(angles), np.sin(angles), 2) is heads
    np.testing.assert_allclose(same, qkv, rtol=0, atol=1e-12)


@needs_numba
@pytest.mark.parametrize("adds", [False, True])
def test_products_of_more_than_one_block(adds: bool) -> None:
    backend, rng = backend_of("fp64", "numba"), np.random.default_rng(0)
    x, weight, dy = (rng.normal(size=shape) for shape in ((259, 133), (65, 133), (259, 65)))
    expected = linear_add_fwd(x, weight, None, dy) if adds else linear_fwd(x, weight, None)
    found = linear_add_fwd.bind(backend)(x, weight, None, dy) if adds else linear_fwd.bind(backend)(x, weight, None)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    grads = [np.ones_like(weight) for _ in range(2)]
    dx = linear_bwd(grads[0], None, dy, x, weight, adds)
    same = linear_bwd.bind(backend)(grads[1], None, dy, x, weight, adds)
    np.testing.assert_allclose(same, dx, rtol=0, atol=1e-12)
    np.testing.assert_allclose(grads[1], grads[0], rtol=0, atol=1e-12)


@needs_numba
def test_what_is_not_finite_stays_so() -> None:
    """A run stops at it: see train/run.py."""
    loss = linear_cross_entropy_fwd.bind(backend_of("fp32", "numba"))
    h, weight, targets = np.ones((3, 4), np.float32), np.ones((2, 5, 4), np.float32), np.ones((3, 2), np.int32)
    for value in (np.nan, np.inf):
        h[1, 2] = value
        with np.errstate(invalid="ignore"):
            nll, _ = loss(h, weight, targets, False)
        assert not np.isfinite(nll[1]).any() and np.isfinite(nll[[0, 2]]).all()


def test_without_numba_a_run_takes_numpy_s_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "missing", lambda: "numba is not installed: pip install it")
    backend = get_backend("numpy", "fp32", workers=1)
    assert choose_kernels(backend, "auto") == "numpy" and "numba" not in backend.describe()
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UserError, match="--cpu-kernels numba: numba is not installed: pip install it; or use --cpu-k"):
        choose_kernels(backend, "numba")


@pytest.mark.parametrize("text, shown", [("NumPy 9 is too new\nand more", "NumPy 9 is too new"), ("", "ImportError")])
def test_with_a_numba_that_fails_a_run_takes_numpy_s_kernels(
    text: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "missing", str)

    def fail(self: Any, real: str) -> None:
        raise ImportError(text)

    monkeypatch.setattr(machine_code.Library, "load", fail)
    assert choose_kernels(get_backend("numpy", "fp32", workers=1), "auto") == "numpy"
    assert capsys.readouterr().err == f"note: training with NumPy's kernels: numba fails: {shown}\n"


@needs_numba
def test_a_run_keeps_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, settings = open_backend(replace(PretrainSettings(), backend="numpy", workers=1))
    assert settings.cpu_kernels == "numba" and backend.describe().endswith("kernels compiled by numba")
    _, exact = open_backend(replace(PretrainSettings(), backend="numpy", workers=1, precision="fp64"))
    assert exact.cpu_kernels == "numpy"
    stored = settings.to_dict()
    meta = {"kind": "pretrain", "settings": stored, "elapsed": 0.0}
    monkeypatch.setattr(checkpoint, "steps", lambda out: [out])
    weights: Any = {}
    monkeypatch.setattr(checkpoint, "load", lambda out: checkpoint.Checkpoint(out, meta, weights))
    resume = ["--resume", "--out", str(tmp_path)]
    assert parse(PretrainSettings, "", resume).settings.cpu_kernels == "numba"
    assert parse(PretrainSettings, "", [*resume, "--cpu-kernels", "numpy"]).settings.cpu_kernels == "numpy"
    del stored["cpu_kernels"]  # a run of an earlier version
    assert parse(PretrainSettings, "", resume).settings.cpu_kernels == "numpy"


@needs_numba
def test_a_library_is_compiled_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
from __future__ import annotations
from tinyforge.backends.instructions import Reals

def kernels_of(real):
    def twice(x: Reals, n: int) -> None:
        for i in range(n):
            x[i] *= 2

    return [twice]
"""
    (tmp_path / "twice_numba.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    x = np.arange(3.0)
    for _ in range(2):
        machine_code.Library("twice_numba").twice(x, 2)
        monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} is compiled again"))
    assert capsys.readouterr().err.count("compiling twice_numba for float64, which later runs find on disk") == 1
    assert x.tolist() == [0, 4, 2] and len(list((tmp_path / "cache").rglob("twice_numba-float64-*.o"))) == 1
    sys.modules.pop("twice_numba", None)


def test_a_home_without_room_keeps_no_part_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = machine_code.folder() / "some-digest.o"

    def fail(source: Any, target: Any) -> None:
        assert machine_code._kept(source) == b"code"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(machine_code.os, "replace", fail)
        machine_code._keep(path, b"code")
    assert path.parent.is_dir() and not list(path.parent.iterdir())
    machine_code._keep(path, b"code")
    assert machine_code._kept(path) == b"code" and list(path.parent.iterdir()) == [path]


def test_a_user_without_a_home_keeps_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", fail)
    path = machine_code.folder() / "some-digest.o"
    machine_code._keep(path, b"code")
    assert machine_code._kept(path) == b""
