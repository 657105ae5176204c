"""The benchmarks of kernels, with NumPy in place of a GPU: every launch runs, and wrong results are noticed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import gemm, grouped, ops, scan
from tinyforge.backends import get_backend


class OnCpu:
    """The NumPy backend with what a GPU's has besides."""

    xp, blocks = np, 4

    def __init__(self) -> None:
        self.backend = get_backend("numpy", "fp32", workers=1)
        self.device = SimpleNamespace(attributes={"MultiProcessorCount": 1, "ClockRate": 1})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches run twice, and each is said to take 2 us."""

    def take_turns(xp: Any, launches: Any) -> list[tuple[float, float]]:
        for launch in launches:
            launch(0)
            launch(1)
        return [(2.0, 1.0)] * len(launches)

    for module in (ops, grouped, scan):
        monkeypatch.setattr(module, "take_turns", take_turns)
    monkeypatch.setattr("bench.gpu_clock.CACHE_BYTES", 1)
    for module in (ops, scan):
        monkeypatch.setattr(module, "copy_bandwidth", lambda xp: 1e12)
    return OnCpu()


def test_every_kernel_is_launched(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "PARAMETERS", 1000)
    monkeypatch.setattr(ops, "COPY_BYTES", 1)
    monkeypatch.setattr(ops, "copy_us", lambda xp, size, room: 1.0)
    monkeypatch.setattr(ops.Jobs, "loss", lambda self: None)  # its kernel has no NumPy body
    for name, size in (("DIM", 48), ("HIDDEN", 64), ("VOCAB", 100)):
        monkeypatch.setattr(ops, name, size)
    # Of two heads of 8, which the norms' and RoPE's arrays must fit.
    monkeypatch.setattr(ops, "BASE", SimpleNamespace(heads=2, kv_heads=1, head_dim=8, mtp_heads=1))
    found = ops.measure(backend, 512, residual=False)
    rows = {row["kernel"]: row for row in found["rows"]}
    assert len(rows) == 25 and all(row["us"] == 2.0 and row["of_copy_of_this_size"] == 0.5 for row in rows.values())
    assert rows["rmsnorm_fwd"]["bytes"] == 512 * (2 * 48 + 1) * 4 and rows["adamw"]["bytes"] == 7 * 1000 * 4
    assert rows["swiglu_bwd"]["gb_per_second"] == pytest.approx(512 * 5 * 64 * 4 / 2e-6 / 1e9)
    assert ops.table(found)[3].split() == "kernel us bytes GB/s of copy Python us same size".split()
    residual = ops.measure(backend, 512, residual=True)["rows"]
    assert [row["kernel"] for row in residual][:2] == ["out, by the norm", "out, by the product"]


def test_the_products_of_experts_are_compared_with_cublas(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cublas = pytest.importorskip("tinyforge.backends.cublas", reason="needs CuPy, not a GPU")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cublas, "gemm", lambda *arrays, **how: calls.append((*arrays, how)))
    small = SimpleNamespace(experts=4, active=2, dim=8, hidden=6)
    monkeypatch.setattr(grouped, "PRESETS", {"base": small})
    rows = grouped.measure(backend, 32)
    assert [row["product"] for row in rows] == [
        f"{a} {b}" for a in ("gate_up", "down") for b in ("forward", "dx", "dW")
    ]
    assert len(calls) == 6 * 2 * small.experts and rows[0]["cublas_us"] == 2.0
    assert rows[0]["tflop_per_second"] == pytest.approx(2 * 64 * 12 * 8 / 2e-6 / 1e12)


def test_the_scan_takes_turns_with_its_peer(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the peer is PyTorch")
    real = scan.Peer
    monkeypatch.setattr(scan, "Peer", lambda *args, compiled: real(*args, compiled=False, device="cpu"))
    monkeypatch.setattr(scan, "take_turns", lambda xp, launches: [(float(i), 0.0) for i in (4, 5, 6, 20, 30, 70)])
    monkeypatch.setattr(backend.backend, "describe", lambda: "none")
    found = scan.measure(scan.Shape(2, 40, 3, 4), backend, "torch")
    assert [row["peer_us"] for row in found["rows"]] == [20.0, 30.0, 40.0] and found["rows"][0]["ours_over_peer"] == 0.2
    assert max(found["differences"].values()) < 1e-4 and "peer us" in "\n".join(scan.table(found))


def product_of(kind: str, monkeypatch: pytest.MonkeyPatch, spoil: float = 0.0, other_bits: bool = False) -> float:
    """The error of a kernel, here NumPy, whose first result is off by `spoil`, or has other bits the second time."""
    from tinyforge.backends import cublas
    from tinyforge.backends import gemm as backend_gemm
    from tinyforge.ops import rope_cuda, swiglu_cuda

    def product(
        a: Any, b: Any, out: Any, transpose_a: Any = False, transpose_b: Any = False, accumulate: Any = False
    ) -> Any:
        found = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
        out[...] = out + found if accumulate else found
        return out

    def swiglu(gate_up: Any) -> Any:
        gate, up = np.split(gate_up, 2, axis=1)
        return gate * up

    runs = [0]

    def kernel(variant: Any, a: Any, b: Any, out: Any, name: str, **more: Any) -> Any:
        runs[0] += 1
        how = {"transpose_a": name == "WEIGHT", "transpose_b": name in ("FORWARD", "SWIGLU", "ROPE")}
        if name == "SWIGLU_BACKWARD":
            out[...], more["hidden"][...] = swiglu_bwd(a @ b, None, more["gu"])[0], a @ b
        else:
            product(a, b, out, accumulate=more.get("accumulate", False), **how)
        if name == "SWIGLU":
            more["hidden"][...] = swiglu(out)
        if name == "ROPE":
            out *= 2
        out[0, 0] += spoil + (1e-3 * runs[0] if other_bits else 0)
        return out

    def swiglu_bwd(dy: Any, into: Any, gu: Any) -> Any:
        return np.concatenate([dy, 2 * dy], axis=1) + gu, dy

    def rope(x: Any, out: Any, *_: Any) -> None:
        out *= 2

    monkeypatch.setattr(cublas, "gemm", product)
    monkeypatch.setattr(backend_gemm, "hopper", kernel)
    monkeypatch.setattr(swiglu_cuda, "swiglu_fwd", swiglu)
    monkeypatch.setattr(swiglu_cuda, "swiglu_bwd", lambda dy, into, gu: swiglu_bwd(dy, into, gu)[0])
    monkeypatch.setattr(rope_cuda, "rope", rope)
    made = gemm.Product(
        "x", kind, kind, 64, 128, 32, 1, accumulate=kind == "WEIGHT", instead=kind if "_" in kind else ""
    )
    kinds = {"ROPE": gemm.Roped, "SWIGLU": gemm.Gated, "SWIGLU_BACKWARD": gemm.Gated}
    bench = kinds.get(kind, gemm.Bench)(OnCpu(), made)
    for i in range(3):
        bench.by_cublas(i)
    return bench.error(None, bench.reference())


@pytest.mark.parametrize("kind", ["FORWARD", "INPUT", "WEIGHT", "SWIGLU", "SWIGLU_BACKWARD", "ROPE"])
def test_a_product_that_is_wrong_or_has_other_bits_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="needs CuPy, not a GPU")
    assert product_of(kind, monkeypatch) < 1e-6
    assert product_of(kind, monkeypatch, spoil=10.0) > gemm.TOLERANCE["bfloat16"]
    assert product_of(kind, monkeypatch, other_bits=True) == float("inf")
