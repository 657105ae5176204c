"""Peers: one that cannot run is left out with its reason, one that computes something else is not timed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers import COMPILED, EAGER, GRAPH, OURS, check_parity, environment, heading, left_out_table, soft
from tinyforge.backends import get_backend
from tinyforge.backends.numpy_backend import KERNELS


def failing() -> Any:
    raise RuntimeError("no Triton\nand a long trace")


def test_what_cannot_be_made_or_started_is_left_out_with_its_reason() -> None:
    def first(contender: str) -> str:
        if contender == "starts badly":
            raise ValueError("out of graphs")
        return contender.upper()

    makers = {OURS: lambda: "ours", COMPILED: failing, GRAPH: lambda: "starts badly", "other": "does not apply: no GPU"}
    contenders, results, left_out = soft(makers, first)
    assert contenders == {OURS: "ours"} and results == {OURS: "OURS"}
    assert left_out == {
        COMPILED: "RuntimeError: no Triton",
        GRAPH: "ValueError: out of graphs",
        "other": "does not apply: no GPU",
    }
    assert left_out_table(left_out)[0].endswith("left out: RuntimeError: no Triton")


def test_cuda_graphs_that_pytorch_skipped_are_no_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"inductor": {"cudagraph_skips": 2}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))

    def skip(contender: str) -> str:
        counters["inductor"]["cudagraph_skips"] += 1
        return contender

    makers = {OURS: lambda: "ours", COMPILED: lambda: "compiled", GRAPH: lambda: "graph"}
    contenders, results, left_out = soft(makers, skip)
    assert list(contenders) == list(results) == [OURS, COMPILED]
    assert left_out == {GRAPH: "RuntimeError: PyTorch compiled it, and skipped its CUDA graphs"}
    assert list(soft({GRAPH: lambda: "graph"}, str)[0]) == [GRAPH]


@pytest.mark.parametrize("name", [OURS, EAGER])
def test_ours_and_eager_are_not_left_out(name: str) -> None:
    with pytest.raises(RuntimeError, match="no Triton"):
        soft({name: failing}, str)


@pytest.mark.parametrize("second", [2.0002, float("nan")])
def test_a_peer_that_computes_something_else_is_not_timed(second: float) -> None:
    with pytest.raises(RuntimeError, match="parity: logits differ by"):
        check_parity({"ours": [1.0, 2.0], "peer": [1.0, second]}, "ours", 1e-4, "logits differ by")
    assert check_parity({"ours": [1.0], "peer": [1.00005]}, "ours", 1e-4, "x")["worst_difference"] > 0


def test_kernels_that_openblas_did_not_choose_itself_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS, "Haswell")
    assert "OPENBLAS_CORETYPE Haswell" in dict(heading(environment(get_backend("numpy"), None, 0.0)))["versions"]
    monkeypatch.delenv(KERNELS)
    assert KERNELS not in environment(get_backend("numpy"), None, 0.0)["versions"]
