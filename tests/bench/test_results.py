"""The committed results have the keys that the benchmarks write: each table can be printed from its JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import attention, decode, ops, prefill, ranks, scan, tokenizer, train_step

RESULTS = Path(__file__).parents[2] / "docs/results"
TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "cpu-train-16x128": train_step.table,
    "cpu-train-16x128-avx2": train_step.table,
    "cpu-train-16x128-intel": train_step.table,
    "gpu-train-16x1024": train_step.table,
    "gpu-train-llama-1b": train_step.table,
    "cpu-decode-small": decode.table,
    "cpu-speculation-sft": decode.speculation_table,
    "cpu-decode-llama-cpp": decode.llama_cpp_table,
    "cpu-decode-llama-cpp-storyteller": decode.llama_cpp_table,
    "cpu-prefill-base": prefill.table,
    "gpu-prefill-base": prefill.table,
    "gpu-attention": attention.table,
    "gpu-ops": ops.table,
    "gpu-scan-fp32": scan.table,
    "gpu-ranks-graphs": ranks.table,
    "cpu-tokenizer": tokenizer.table,
}


@pytest.mark.parametrize("name", TABLES)
def test_a_committed_result_is_printed(name: str) -> None:
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    lines = TABLES[name](found)
    figures = found["results"] if "results" in found else found.get("rows", found.get("lengths"))
    assert len(lines) > len(figures)
    assert not [line for line in lines if line.rstrip() != line]


def test_ranks_take_turns_and_one_gpu_is_timed_on_rank_0_alone() -> None:
    barrier, logs = threading.Barrier(2), ([], [])  # type: ignore[var-annotated]
    found: list[Any] = [None, None]

    def work(rank: int) -> None:
        def made(name: str) -> Any:
            return SimpleNamespace(step=lambda index: logs[rank].append(f"{name} {index}"))

        apart = made(ranks.DDP)
        apart.synchronize = lambda: logs[rank].append("DDP waits")
        contenders = {ranks.ONE: made(ranks.ONE), ranks.SEVERAL: made(ranks.SEVERAL), ranks.DDP: apart}
        group = SimpleNamespace(rank=rank, size=2, barrier=barrier.wait)
        backend: Any = SimpleNamespace(synchronize=lambda: None)
        found[rank] = ranks.take_turns(contenders, 2 * ranks.TURN, backend, group)

    other = threading.Thread(target=work, args=(1,), daemon=True)
    other.start()
    work(0)
    other.join(10)
    assert {name: len(seconds) for name, seconds in found[0].items()} == dict.fromkeys(found[1], 2)
    steps = 2 * (1 + ranks.TURN)
    assert [sum(said.startswith(f"{ranks.ONE} ") for said in log) for log in logs] == [steps, 0]
    assert all(sum(said.startswith(f"{ranks.DDP} ") for said in log) == steps for log in logs)
    assert logs[1].count("DDP waits") == 4  # before and after each of two turns
