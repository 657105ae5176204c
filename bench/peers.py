"""Shared by the benchmarks beside PyTorch: peers that may not run on a machine, the check that all results agree, and
the lines about machine and versions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.numpy_backend import KERNELS
from tinyforge.backends.workers import cores, cpu_model
from tinyforge.errors import UserError

OURS, EAGER, COMPILED, GRAPH = "tinyforge", "torch eager", "torch compiled", "torch compiled, CUDA graph"
MODES = {EAGER: None, COMPILED: "default", GRAPH: "reduce-overhead"}  # of torch.compile
LOGITS_TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp8": 5e-2}
GRAPHS_NEED_A_GPU = "does not apply: it replays CUDA graphs, and this runs on a CPU"
Parity = dict[str, Any] | None
LeftOut = dict[str, str]


def soft(
    makers: Mapping[str, Callable[[], Any] | str], first: Callable[[Any], Any]
) -> tuple[dict[str, Any], dict[str, Any], LeftOut]:
    """Build every contender and run its first piece of work, which compiles it.

    makers: functions that build each by name, or the reason why it does not apply. If torch.compile fails, the
    contender is left out with the first line of the error; other errors are raised. Returns the contenders, the results
    of `first`, and the reasons.
    """
    contenders: dict[str, Any] = {}
    results: dict[str, Any] = {}
    left_out: LeftOut = {}
    for name, make in makers.items():
        if isinstance(make, str):
            left_out[name] = make
            continue
        skipped = graphs_skipped()
        try:
            contender = make()
            results[name] = first(contender)
            if name == GRAPH and graphs_skipped() > skipped:
                del results[name]
                raise RuntimeError("PyTorch compiled it, and skipped its CUDA graphs")
            contenders[name] = contender
        except Exception as error:
            if name not in (COMPILED, GRAPH) or isinstance(error, UserError):
                raise
            left_out[name] = reason(error)
    return contenders, results, left_out


def graphs_skipped() -> int:
    """CUDA graphs that torch.compile has given up so far: it only warns, and continues without them."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("inductor", {}).get("cudagraph_skips", 0))


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def check_parity(results: Mapping[str, Any], ours: str, tolerance: float, what: str) -> dict[str, Any]:
    """Raise if a contender's numbers differ from ours. what: beginning of the message, with its verb."""
    # np.max propagates a NaN, which is then not within the tolerance.
    worst = float(np.max([np.abs(np.subtract(theirs, results[ours])) for theirs in results.values()]))
    if not worst <= tolerance:
        raise RuntimeError(f"parity: {what} {worst:.2g}, wanted {tolerance:g}")
    return {"worst_difference": worst, "tolerance": tolerance}


def left_out_table(left_out: Mapping[str, str]) -> list[str]:
    """A line per contender that was left out."""
    return [f"{name:<27} left out: {why}" for name, why in left_out.items()]


def environment(backend: Backend, peer: str | None, load_average: float) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    if peer:
        versions["torch"] = sys.modules["torch"].__version__
    if kernels := os.environ.get(KERNELS):  # else OpenBLAS chooses by the CPU; AVX-512 is up to twice as fast as AVX2
        versions[KERNELS] = kernels
    return {
        "device": {"cpu": cpu_model(), "cores": cores(), "load_average_before": load_average}
        | ({"gpu": backend.describe()} if backend.name == "cupy" else {}),
        "versions": versions,
        "backend": backend.name,
        "precision": backend.precision.name,
    }


def heading(found: dict[str, Any]) -> list[tuple[str, str]]:
    device = found["device"]
    return [
        ("device", f"{device['cpu']}, {device['cores']} cores" + (f"; {device['gpu']}" if "gpu" in device else "")),
        ("load average", f"{device['load_average_before']:.2f} over the minute before the start"),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("precision", f"{found['precision']}, backend {found['backend']}"),
    ]
