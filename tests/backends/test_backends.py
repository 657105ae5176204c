"""Choosing a backend: what is there, and one line with the fix for what is not."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import PRECISIONS, automatic, get_backend, gpu_is_there
from tinyforge.errors import UserError
from tinyforge.op import Param
from tinyforge.params import ParamBuffer


def test_without_cupy_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'CuPy is not installed; pip install "cupy-cuda13x\[ctk\]" ml_dtypes'):
        get_backend("cupy")
    assert get_backend("auto", workers=1).name == "numpy"


def test_without_a_gpu_the_error_is_one_line_and_auto_is_numpy() -> None:
    pytest.importorskip("cupy")
    if gpu_is_there():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError) as caught:
        get_backend("cupy")
    assert str(caught.value).startswith("backend cupy: ") and "\n" not in str(caught.value)
    assert "--backend numpy" in str(caught.value)
    assert get_backend("auto", workers=1).name == "numpy"


@pytest.mark.parametrize(
    ("kind", "how", "expected"),
    [
        ("DiscreteGPU", {}, ("webgpu", "WebGPU finds a GPU")),
        ("IntegratedGPU", {}, ("webgpu", "WebGPU finds a GPU")),
        ("CPU", {}, ("numpy", "neither CuPy nor WebGPU finds a GPU")),
        ("DiscreteGPU", {"precision": "bf16"}, ("numpy", "CuPy finds no GPU")),
        ("DiscreteGPU", {"model": "mamba"}, ("numpy", "CuPy finds no GPU")),
        ("DiscreteGPU", {"ranks": 2}, ("numpy", "CuPy finds no GPU")),
    ],
)
def test_what_a_run_computes_on_unless_it_is_told(
    kind: str, how: dict[str, Any], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's GPU, else one of WebGPU for a model whose kernels it has, but no adapter in software; else the CPU."""
    found = SimpleNamespace(adapters=lambda: [SimpleNamespace(info={"adapter_type": kind})])
    monkeypatch.setitem(sys.modules, "tinyforge.backends.webgpu", found)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr("tinyforge.backends.gpu_is_there", lambda: False)
    assert automatic(**{"precision": "fp32", "model": "llama", **how}) == expected
    found.adapters = None  # as a wgpu that does not load
    assert automatic("fp32", "llama") == ("numpy", "neither CuPy nor WebGPU finds a GPU")
    monkeypatch.setattr("tinyforge.backends.gpu_is_there", lambda: True)
    assert automatic(**{"precision": "fp32", "model": "llama", **how}) == ("cupy", "CuPy finds a GPU")


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_what_only_a_gpu_has_is_refused_elsewhere(precision: str) -> None:
    message = f"precision '{precision}' is not available on backend numpy; use one of: .*, or --backend cupy$"
    with pytest.raises(UserError, match=message):
        get_backend("numpy", precision, workers=1)


def test_an_old_driver_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    backend = importlib.import_module("tinyforge.backends.cupy_backend")

    def versions(driver: int, built_for: int) -> Any:
        monkeypatch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: driver)
        monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda: built_for)

    versions(0, 13000)
    with pytest.raises(UserError, match="no NVIDIA driver"):
        backend._usable_device(None)
    versions(12040, 13000)
    with pytest.raises(UserError, match=r"built for CUDA 13.0, the driver supports 12.4; .*cupy-cuda12x\[ctk\]"):
        backend._usable_device(None)


def test_master_weights_are_the_values_where_storage_is_as_exact() -> None:
    assert {p.name for p in PRECISIONS.values() if p.storage != p.master} == {"bf16", "fp8"}
    buffer = ParamBuffer([Param("w", (3,), std=1.0)], get_backend("numpy", "fp32", workers=1))
    assert buffer.masters is buffer.values


def test_master_weights_are_kept_apart_where_storage_is_coarser() -> None:
    backend = get_backend("numpy", "fp64", workers=1)
    backend.dtype = np.dtype(np.float32)  # stands for bf16, which NumPy's kernels do not have
    param = Param("w", (3,), fill=1 / 3)
    buffer = ParamBuffer([param], backend)
    buffer.set_master(param, np.full(3, 1 / 3))
    buffer.publish()
    assert buffer.masters.dtype == buffer.grads.dtype == np.float64 and param.value.dtype == np.float32
    assert (buffer.view(buffer.masters, param) == 1 / 3).all() and (param.value == np.float32(1 / 3)).all()
