"""The harness: turns and their clock, peers that cannot run or compute something else, flags, and the table."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import gpu_clock
from bench.harness import (
    COMPILED,
    EAGER,
    GRAPH,
    GRAPHS_NEED_A_GPU,
    OURS,
    Flags,
    by_mode,
    by_threads,
    check_parity,
    environment,
    figures,
    heading,
    in_child,
    machine,
    peak_mib,
    rows,
    soft,
    take_turns,
    threads_of,
)
from tinyforge.backends import get_backend
from tinyforge.backends.numpy_backend import KERNELS
from tinyforge.errors import UserError


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
    lines = rows("ms:.1f", {OURS: {"ms": 2.0}}, left_out=left_out)
    assert lines[2].split("  ", 1) == ["torch compiled", "left out: RuntimeError: no Triton"]


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
        check_parity({OURS: [1.0, 2.0], "peer": [1.0, second]}, 1e-4, "logits differ by")
    assert check_parity({OURS: [1.0], "peer": [1.00005]}, 1e-4, "x")["worst_difference"] > 0


def test_kernels_that_openblas_did_not_choose_itself_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS, "Haswell")
    assert "OPENBLAS_CORETYPE Haswell" in heading(environment(get_backend("numpy"), None, machine()))[2]
    monkeypatch.delenv(KERNELS)
    assert KERNELS not in environment(get_backend("numpy"), None, machine())["versions"]


class Clock:
    """A clock that the contenders advance, and a record of what happened."""

    def __init__(self) -> None:
        self.now, self.log, self.last = 0.0, list[str](), ""

    def __call__(self) -> float:
        self.log.append("clock")
        return self.now

    def contender(self, name: str, seconds: float, first: float = 0.0) -> Any:
        """Takes `seconds`, and `first` more the first time after another contender."""

        def run(index: int) -> None:
            self.log.append(f"{name} {index}")
            self.now += seconds + first * (self.last != name)
            self.last = name

        return run


def test_contenders_take_turns_and_the_first_run_of_a_turn_is_not_counted() -> None:
    clock = Clock()
    contenders = {"a": clock.contender("a", 1.0, first=50.0), "b": clock.contender("b", 2.0, first=70.0)}
    seconds = take_turns(contenders, 5, lambda: clock.log.append("wait"), turn=2, clock=clock)
    assert seconds == {"a": [1.0] * 5, "b": [2.0] * 5}
    runs = [said for said in clock.log if said[0] in "ab"]
    assert runs[:6] == ["a 0", "a 1", "a 2", "b 0", "b 1", "b 2"] and runs[-2:] == ["b 6", "b 7"]
    assert clock.log[:8] == ["a 0", "wait", "clock", "a 1", "wait", "clock", "wait", "clock"]


def test_a_turn_is_timed_as_a_whole_where_steps_follow_each_other() -> None:
    clock = Clock()
    seconds = take_turns({"a": clock.contender("a", 3.0)}, 5, turn=4, together=True, clock=clock)
    assert seconds == {"a": [3.0, 3.0]} and clock.log.count("clock") == 4


def test_waiting_for_the_device_is_timed_and_what_is_between_is_not() -> None:
    clock = Clock()

    def wait() -> None:
        clock.now += 0.25

    def between(name: str) -> None:
        clock.log.append(f"between {name}")
        clock.now += 100

    seconds = take_turns({"a": clock.contender("a", 1.0)}, 2, wait, between=between, warm_up=0, clock=clock)
    assert seconds == {"a": [1.25, 1.25]}
    assert clock.log[:6] == ["between a", "between a", "clock", "a 0", "clock", "between a"]


def test_several_clocks_are_read_together() -> None:
    clock = Clock()
    seconds = take_turns({"a": clock.contender("a", 1.0)}, 1, clock=lambda: np.array([clock.now, 2 * clock.now]))
    assert seconds["a"][0].tolist() == [1.0, 2.0]


def test_kernels_take_turns_too_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def event_us(xp: Any, launch: Any) -> tuple[float, float]:
        launch(0)
        return float(len(log)), 1.0

    monkeypatch.setattr(gpu_clock, "event_us", event_us)
    found = gpu_clock.take_turns(None, [lambda i: log.append("a"), lambda i: log.append("b")])
    assert log == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * gpu_clock.ROUNDS
    assert found == [(13.0, 1.0), (14.0, 1.0)]


def test_sets_of_arrays_rotate_and_their_results_stay_alive() -> None:
    assert gpu_clock.sets_of(gpu_clock.CACHE_BYTES) == 1 and gpu_clock.sets_of(gpu_clock.CACHE_BYTES - 1) == 2
    made: list[weakref.ref[set[int]]] = []

    def call(x: int) -> set[int]:
        result = {x}
        made.append(weakref.ref(result))
        return result

    launch = gpu_clock.rotating(call, [[0], [1], [2]])
    for i in range(5):
        launch(i)
    assert [result() for result in made] == [None, None, {2}, {0}, {1}]


def test_the_figures_are_of_medians() -> None:
    found = figures({OURS: [1.0, 2.0, 9.0], "peer": [4.0, 1.0, 4.0]}, "ms", "step", 8)
    assert found["peer"] == {
        "median_ms": 4000.0,
        "min_ms": 1000.0,
        "tokens_per_second": 2.0,
        "ours_over_this": 0.5,
        "step_ms": [4000.0, 1000.0, 4000.0],
    }
    assert "ours_over_this" not in figures({"1 GPU": [1.0]}, "us", "turn", 1)["1 GPU"]


def test_the_table_has_a_column_for_each_figure() -> None:
    named = {"a": {"median_ms": 1234.5, "gb_per_second": 2.0, "share": 0.5}, "longer": {"ours_over_this": 1}}
    assert rows("median_ms:,.1f | gb_per_second:.0f | ours_over_this:.2f | share=of all:.0%", named, "t") == [
        "t       median ms  GB/s  ours/this  of all",
        "a         1,234.5     2          -     50%",
        "longer          -     -       1.00       -",
    ]


def test_pytorch_runs_in_the_modes_and_with_the_threads_that_apply_here() -> None:
    cpu, gpu = get_backend("numpy"), SimpleNamespace(name="cupy")
    modes = by_mode(cpu, lambda mode: mode, (EAGER, COMPILED, GRAPH))
    assert [make() for make in list(modes.values())[:2]] == [None, "default"] and modes[GRAPH] == GRAPHS_NEED_A_GPU
    eager = by_threads(cpu, lambda threads, mode: (threads, mode), 3, (EAGER, GRAPH))
    assert list(eager) == ["torch eager, 1 thread", "torch eager, 3 threads", GRAPH]
    assert eager["torch eager, 3 threads"]() == (3, None)
    there = by_threads(gpu, lambda threads, mode: (threads, mode), 3, (EAGER, GRAPH))  # type: ignore[arg-type]
    assert {name: make() for name, make in there.items()} == {EAGER: (3, None), GRAPH: (3, "reduce-overhead")}
    used: list[int] = []
    peer = SimpleNamespace(decoder=SimpleNamespace(use_threads=lambda: used.append(3)))
    between = threads_of({OURS: SimpleNamespace(decoder=object()), "peer": peer, "other": 1})
    for name in (OURS, "peer", "other"):
        between(name)
    assert used == [3]


def test_memory_is_that_of_a_child() -> None:
    block = bytearray(b"x") * 300_000_000
    with peak_mib(get_backend("numpy")) as peak:
        assert peak() > 300
    del block
    assert in_child(abs, -3) == 3


def flags() -> Flags:
    p = Flags("doc")
    p.number("--steps", 3, "counted steps")
    p.number("--seconds", 1.5, "of load", 0.5)
    p.number("--prompt", [4], "tokens", 2, nargs="+")
    p.shared("peer", "workers", config={"help": "which"})
    return p


def test_flags_have_their_defaults_and_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    args = flags().parse(["--prompt", "5", "6", "--seconds", "2"])
    assert (args.steps, args.seconds, args.prompt, args.workers) == (3, 2.0, [5, 6], None)
    assert args.config == "" and args.json is None
    for argv, message in [
        (["--steps", "0"], "--steps is 0, expected 1 or more"),
        (["--seconds", "nan"], "--seconds is nan, expected 0.5 or more"),
        (["--prompt", "5", "1"], "--prompt is 1, expected 2 or more"),
        (["--workers", "0"], "--workers is 0, expected 1 or more"),
        (["--steps", "x"], "invalid int value"),
        (["--json", "no/such/folder/x"], "folder that does not exist"),
    ]:
        with pytest.raises(UserError, match=message):
            flags().parse(argv)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match="PyTorch is not installed"):
        flags().parse(["--peer", "torch"])
    text = flags().format_help()
    assert "counted steps (default: 3)" in text and "How it is measured: all contenders run in one process" in text
