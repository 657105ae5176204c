"""Ops whose launchers and kernels run on the host, from the text that the GPU gets, against their NumPy bodies."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy", reason="launchers need CuPy, not a GPU")
pytest.importorskip("ml_dtypes")

from tests.backends.on_host import HOPPER_BODIES, INLINE, compiler, hopper, host_text
from tests.backends.test_launchers import FakeCupy, Launches, OnDevice
from tests.backends.test_launchers import launches as launches  # the fixture
from tests.backends.test_on_host import STATIC
from tinyforge import ops, quantised_groups, quantised_groups_cuda
from tinyforge.backends import compile as kernels
from tinyforge.backends import get_backend
from tinyforge.op import Op, Stash
from tinyforge.ops import cross_entropy_cuda, embedding_cuda
from tinyforge.ops.cross_entropy import softmax_residual_
from tinyforge.ops.embedding import embedding_bwd

pytestmark = pytest.mark.slow

RUN = """
extern "C" void host_run(int grid_x, int grid_y, int across, int down, void **a) {
    host_launch(grid_x, grid_y, across, [&] { ENTRY(ARGUMENTS); }, 1, down);
}
"""
KINDS = (ops.Mix, ops.MixRMSNorm, ops.QKNormRoPE, ops.Smear, ops.ValueEmbedding)


class OnHost(Launches):
    """`compile.load` for the host: a kernel is a shared library, which computes on the arrays that it is given."""

    def __init__(self, folder: Path, fault: tuple[str, str] | None = None) -> None:
        super().__init__()
        self.folder, self.fault, self.built = folder, fault, {}

    def load(self, file: str, entry: str, shared_bytes: int = 0, **macros: Any) -> Callable[..., None]:
        check, parameters = super().load(file, entry, shared_bytes, **macros), self.parameters(file, entry, macros)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int = 0) -> None:
            check(grid, block, args, shared_mem)
            held = [np.array([a.ctypes.data if hasattr(a, "ctypes") and np.ndim(a) else a]) for a in args]
            places = (ctypes.c_void_p * len(args))(*(a.ctypes.data for a in held))
            run = self.library(file, entry, parameters, macros).host_run
            run(*(int(n) for n in (*grid, 1)[:2]), *(int(n) for n in (*block, 1)[:2]), places)

        return launch

    def library(self, file: str, entry: str, parameters: list[str], macros: dict[str, Any]) -> ctypes.CDLL:
        key = (file, entry, *sorted(macros.items()))
        if key not in self.built:
            casts = (
                f"*reinterpret_cast<{p[: -len(p.split()[-1].lstrip('*'))]} *>(a[{i}])" for i, p in enumerate(parameters)
            )
            main = RUN.replace("ENTRY", entry).replace("ARGUMENTS", ", ".join(casts))
            bodies = {head: HOPPER_BODIES[head] for head in HOPPER_BODIES if "narrow(" in head or "copy_commit" in head}
            bodies |= {f"{INLINE}void copy_async(u32 to, const void *from)": "host_copy(to, from, true);"}
            bodies |= {head: HOPPER_BODIES[head] for head in HOPPER_BODIES if "copy_wait" in head}
            fault = self.fault if self.fault and self.fault[0] in kernels.read(file) else None
            text = host_text(file, macros, bodies, main, before=hopper() + STATIC, fault=fault)
            source, library = (self.folder / f"{len(self.built)}.{end}" for end in ("cpp", "so"))
            source.write_text(text, encoding="utf-8")
            command = [compiler(), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", library, source]
            subprocess.run(command, check=True)
            self.built[key] = ctypes.CDLL(str(library))
        return self.built[key]


def add_columns(out: Any, second: Any, partial: Any, third: Any = None) -> None:
    sums, upto = partial.sum(axis=0), partial.shape[1] - (0 if third is None else third.size)
    out += sums[: out.size].reshape(out.shape)
    if second is not None:
        second += sums[out.size : upto].reshape(second.shape)
    if third is not None:
        third += sums[upto:].reshape(third.shape)


def worst(kind: type[Op], precision: str, monkeypatch: pytest.MonkeyPatch, on_host: OnHost) -> float:
    """The largest difference, relative to the largest value, of any result or gradient in any case."""
    for module in (
        "cupy_backend",
        kind.__module__.rpartition(".")[2] + "_cuda",
        "rope_cuda",
        "rows_cuda",
        "embedding_cuda",
        "rmsnorm_cuda",
        "mix_cuda",
    ):
        package = "tinyforge.backends" if module == "cupy_backend" else "tinyforge.ops"
        found = importlib.import_module(f"{package}.{module}")
        one = ("free_processors", lambda: 1)  # so that a warp takes several rows
        for name, stand_in in (("load", on_host.load), ("add_columns", add_columns), one):
            if hasattr(found, name):
                monkeypatch.setattr(found, name, stand_in)
    host, numpy = FakeCupy(precision), get_backend("numpy", "fp64" if precision == "fp64" else "fp32", workers=1)
    largest = 0.0
    cases = (kind.cases(backend, np.random.default_rng(3)) for backend in (host, numpy))
    for (op, inputs), (plain, plain_inputs) in zip(*cases, strict=True):
        results = []
        for which, given in ((op, inputs), (plain, plain_inputs)):
            stash = Stash()
            y = which.forward(*given, stash=stash)
            dy = (
                tuple((part + 0.5).astype(part.dtype) for part in y)
                if isinstance(y, tuple)
                else (y + 0.5).astype(y.dtype)
            )
            dx = which.backward(dy, stash)
            if kind in (ops.Mix, ops.MixRMSNorm):
                which.forward(*given, stash=stash)
                dx = which.backward(dy, stash, into=dx[1])  # type: ignore[call-arg]
            results.append([*_arrays(y), *_arrays(dx), *(p.grad for p in which.params())])
        for ours, theirs in zip(*results, strict=True):
            if theirs.size:
                apart = np.abs(np.asarray(ours, np.float64) - theirs).max() / max(np.abs(theirs).max(), 1e-30)
                largest = apart if not apart <= largest else largest
    return float(largest)


def _arrays(found: Any) -> Iterator[Any]:
    yield from (part for part in (found if isinstance(found, tuple) else (found,)) if part is not None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("precision", "most"), [("fp64", 1e-12), ("fp32", 1e-5), ("bf16", 3e-2)])
def test_kernels_compute_what_numpy_does(
    kind: type[Op], precision: str, most: float, launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert worst(kind, precision, monkeypatch, OnHost(tmp_path)) <= most


FAULTS = [
    (ops.QKNormRoPE, ("- widen(saved.left.v[k]) * mean", "")),
    (ops.QKNormRoPE, ("if (h >= queries) return A(1);", "")),
    (ops.QKNormRoPE, ("token % positions", "token")),
    (ops.Mix, ("slope * widen(q", "slope * widen(p")),
    (ops.MixRMSNorm, ("of_x * widen(p.v[j]) + of_delta", "of_x * widen(p.v[j]) + of_x")),
    (ops.MixRMSNorm, ("along_first += d * widen(first", "along_first += d * widen(x")),
    (ops.MixRMSNorm, ("mix.add ? widen", "true ? widen")),
    (ops.MixRMSNorm, ("mix.add ? widen(sum.v[j])", "mix.add ? A(0)")),
    (ops.MixRMSNorm, ("w < WARPS; w++) sum += both", "w < 1; w++) sum += both")),
    (ops.MixRMSNorm, ("copy_wait<STAGES - 1>", "copy_wait<STAGES>")),
    (ops.Smear, ("starts[r + 1] == t + 1", "starts[r] == t")),
    (ops.Smear, ("c == reads", "false")),
    (ops.ValueEmbedding, ("(A(1) - g / A(2))", "A(1)")),
    (ops.ValueEmbedding, ("v + i64(n) * pitch", "v + i64(n) * dim")),
    (ops.ValueEmbedding, ("A sum = widen(*mine)", "A sum = 1")),
]


@pytest.mark.parametrize(("kind", "fault"), FAULTS, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_faults_of_the_kernels_show(
    kind: type[Op], fault: tuple[str, str], launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_registers = kind is ops.MixRMSNorm  # which rows of float64 are not
    precision, least = ("fp32", 1e-4) if in_registers else ("fp64", 1e-9)
    assert not worst(kind, precision, monkeypatch, OnHost(tmp_path, fault)) <= least


@pytest.mark.parametrize("fault", [None, ("if (last) done[row] = 0;", ""), ("i + k < to ?", "true ?")])
def test_one_order_of_ids_serves_several_tables(
    fault: tuple[str, str] | None, launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One id has more tokens than a piece, and one table rows of more than a block."""
    monkeypatch.setattr(embedding_cuda, "load", OnHost(tmp_path, fault).load)
    rng, backend = np.random.default_rng(0), FakeCupy("fp64")
    ids = backend.asarray(np.where(rng.random(150) < 0.9, 3, rng.integers(0, 7, 150)))
    order, apart = embedding_cuda.embedding_order(ids, 7), 0.0
    for width in (3, 514, 3):
        dy, dtable = (backend.asarray(rng.normal(size=(rows, width))) for rows in (150, 7))
        expected = dtable.copy()
        embedding_bwd(expected, dy, ids)
        embedding_cuda.embedding_bwd(dtable, dy, ids, order)
        apart = max(apart, float(np.abs(dtable - expected).max()))
    assert (apart < 1e-12) == (fault is None), apart


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize(
    ("precision", "vocab", "pitch"),
    [
        ("fp64", 7, 7),
        ("fp64", 96, 96),
        ("fp32", 4096, 4096),
        ("fp32", 1001, 1024),
        ("fp32", 9000, 9000),
        ("bf16", 4096, 4096),
    ],
)
def test_residuals_of_capped_logits(
    precision: str,
    vocab: int,
    pitch: int,
    cap: float,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Rows in registers, in memory, in shared memory, and padded ones, one without a target."""
    monkeypatch.setattr(cross_entropy_cuda, "load", OnHost(tmp_path).load)
    logits, targets = 3 * np.random.default_rng(0).normal(size=(3, vocab)), np.array([vocab - 1, -1, 2])
    backend = FakeCupy(precision)
    rows, nll = backend.zeros((3, pitch)), backend.zeros((3,), backend.master_dtype)
    rows[:, :vocab], rows[:, vocab:] = logits, 77
    plain = np.ascontiguousarray(np.float64(rows[:, :vocab]).T[None])
    expected = softmax_residual_(plain, targets[:, None], cap)
    cross_entropy_cuda.softmax_residual_(nll, rows, backend.asarray(targets), True, vocab, cap)
    tolerance = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2}[precision]
    np.testing.assert_allclose(nll, expected[:, 0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(rows[:, :vocab], plain[0].T, rtol=tolerance, atol=tolerance)
    assert not rows[:, vocab:].any()


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("fault", [None, ("? 0 : 4)", "? 4 : 0)"), ("(start + i / 8) / 256", "i / 8 / 256")])
def test_numbers_of_four_bits(
    precision: str, fault: tuple[str, str] | None, launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second half of a matrix, whose groups begin within one that shares a top; scales as float32 and in 8 bits."""
    on_host, backend = OnHost(tmp_path, fault), FakeCupy(precision)
    numbers = backend.asarray(quantised_groups.DYNAMIC, np.dtype(np.float32))
    stand_ins = {"load": on_host.load, "_numbers": lambda _: numbers}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(quantised_groups_cuda, name, stand_in)
    monkeypatch.setattr(quantised_groups_cuda.cupy.cuda, "runtime", SimpleNamespace(getDevice=int), raising=False)
    rng, rows = np.random.default_rng(0), 300
    codes, scales = rng.integers(0, 256, (rows, 96), np.uint8), rng.random((rows, 3), np.float32)
    small, tops, offset = quantised_groups.quantise_scales(scales)
    half, same = slice(rows // 2, rows), []
    for kernel, given in (
        ("dequantise_nf4", (scales[half],)),
        ("dequantise_nf4_double", (small[half], tops, offset, small[: rows // 2].size)),
    ):
        arrays = [x.view(OnDevice) if isinstance(x, np.ndarray) else x for x in (codes[half].copy(), *given)]
        found = getattr(quantised_groups_cuda, kernel)(*arrays, backend.dtype)
        expected = getattr(quantised_groups, kernel).body(codes[half], *given, backend.dtype)
        same.append(np.array_equal(np.asarray(found), expected))
    of_start = fault is not None and "start" in fault[0]
    assert same == [fault is None or of_start, fault is None]
