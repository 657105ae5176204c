"""The benchmark of attention: which shapes it takes, who is compared with whom, and its table; no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import attention as bench
from tinyforge.errors import UserError


def test_shapes_have_heads_of_their_own_or_those_of_all() -> None:
    assert bench.shapes_of("32x512,4x4096:16/8x128") == [
        bench.Shape(32, 512, 12, 4, 64),
        bench.Shape(4, 4096, 16, 8, 128),
    ]


@pytest.mark.parametrize("text", ["", "32", "32x0", "4x4096:16x128", "4x4096:16/16", "32x512,"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no shape, expected BATCHxTOKENS"):
        bench.shapes_of(text)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="16 heads do not divide among 3 kv heads"):
        bench.shapes_of("4x4096:16/3x128")


class Fake:
    """A contender whose numbers are off by `wrong`, and whose calls take `us`."""

    def __init__(self, wrong: float = 0.0, us: float = 1.0) -> None:
        self.wrong, self.us = wrong, us

    def forward(self, i: int) -> Any:
        return np.ones(4) + self.wrong

    def backward(self, i: int) -> Any:
        return [np.ones(3), np.ones(2), np.full(2, 3.0)]

    def to_numpy(self, x: Any) -> np.ndarray:
        return np.asarray(x)


def test_every_contender_is_compared_with_ours() -> None:
    same = {"ours": Fake(), "a": Fake(1e-3), "b": Fake(5e-3)}
    assert bench.check_parity(same, 1e-2) == pytest.approx(5e-3, rel=1e-2)
    for wrong in (0.5, np.nan):
        with pytest.raises(RuntimeError, match="from a's, expected at most 0.01"):
            bench.check_parity({**same, "a": Fake(wrong)}, 1e-2)


def test_all_contenders_are_in_the_figures_and_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", reason="the benchmark asks CuPy for the device")
    torch = pytest.importorskip("torch", reason="the peer is PyTorch")
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda _: {"name": b"none"})
    monkeypatch.setattr(cupy.cuda, "Device", lambda: SimpleNamespace(id=0))
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: SimpleNamespace(free_all_blocks=lambda: None))
    monkeypatch.setattr(bench, "Ours", lambda *_: Fake(us=20.0))
    monkeypatch.setattr(bench, "timed", lambda call, calls: [call.__self__.us] * len(calls))
    kernels: list[str] = []
    monkeypatch.setattr(bench, "Torch", lambda *args: kernels.append(args[-1]) or Fake(us=40.0))  # type: ignore[func-returns-value]
    backend = SimpleNamespace(precision=SimpleNamespace(name="bf16"), dtype=np.dtype(np.float16))
    sizes = [bench.Shape(1, 64, 2, 1, 64), bench.Shape(1, 64, 2, 1, 128)]
    found = bench.measure(sizes, backend, "torch", 3)  # type: ignore[arg-type]
    assert kernels == ["CUDNN_ATTENTION", "FLASH_ATTENTION"] * 2 and found["versions"]["torch"] == torch.__version__
    half = {"forward": 0.5, "backward": 0.5, "both": 0.5}
    assert all(row["ours_over"] == dict.fromkeys(bench.PEERS["bf16"], half) for row in found["results"])
    text = "\n".join(bench.table(found))
    assert text.count("torch cuDNN") == text.count("torch flash") == 2 and text.count(" 0.50") == 4 * 3
