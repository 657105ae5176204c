"""The group of NCCL's ranks, over an engine of NumPy's: its collectives, trees, mismatches; and the watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.fake_nccl import FakeEngine
from tinyforge.errors import UserError
from tinyforge.parallel import part_of, watch
from tinyforge.parallel.nccl import NCCLGroup
from tinyforge.parallel.star import Lost, Star
from tinyforge.parallel.watch import Watch


def on_ranks(size: int, folder: Path, work: Callable[[NCCLGroup], Any], patience: float = 30.0) -> list[Any]:
    """work(group) on each rank, a thread; what each returns or raises."""
    names = [f"rank {rank} on here" for rank in range(size)]
    pipes = [Pipe() for _ in range(size - 1)]
    found: list[Any] = [None] * size

    def live(rank: int) -> None:
        lines = [ours for ours, _ in pipes] if rank == 0 else [pipes[rank - 1][1]]
        engine = FakeEngine(size, rank, str(folder).encode(), patience)
        group = NCCLGroup(rank, size, engine, Star(rank, lines, names, "resume", patience),
                          Watch(rank, [], names, "resume", patience))  # fmt: skip
        try:
            found[rank] = work(group)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def own(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=count) * 10.0**rank


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives(size: int, tmp_path: Path) -> None:
    counts = (0, 1, 32, 96, 129)

    def everything(group: NCCLGroup) -> list[np.ndarray]:
        made = []
        for count in counts:
            for method, options in (
                ("all_reduce_", {}), ("all_reduce_", {"tree": True}), ("reduce_scatter_", {}),
                ("reduce_scatter_", {"unit": 32}), ("all_gather_", {}), ("all_gather_", {"unit": 32}),
                ("broadcast_", {}),
            ):  # fmt: skip
                array = own(group.rank, count - count % options.get("unit", 1))  # type: ignore[call-overload]
                if size & (size - 1) == 0 or "tree" not in options:
                    getattr(group, method)(array, **options)
                made.append(array)
        group.barrier()
        return made

    found = on_ranks(size, tmp_path, everything)
    for rank, made in enumerate(found):
        assert isinstance(made, list), made
        results = iter(made)
        for count in counts:
            parts = [own(r, count) for r in range(size)]
            total = np.add.reduce(parts, axis=0) if count else np.zeros(0)
            assert np.array_equal(next(results), total)
            tree = next(results)
            if size == 4:
                assert np.array_equal(tree, (parts[0] + parts[1]) + (parts[2] + parts[3]))
            for unit in (1, 32):
                scattered, whole = next(results), count - count % unit
                mine = part_of(rank, size, whole, unit)
                wanted = np.add.reduce([own(r, whole) for r in range(size)], axis=0) if whole else np.zeros(0)
                assert np.array_equal(scattered[mine], wanted[mine])
            for unit in (1, 32):
                gathered, whole = next(results), count - count % unit
                for r in range(size):
                    part = part_of(r, size, whole, unit)
                    assert np.array_equal(gathered[part], own(r, whole)[part])
            assert np.array_equal(next(results), parts[0])


def test_calls_that_do_not_match_are_found_at_the_next_meeting(tmp_path: Path) -> None:
    """NCCL would wait for ever: the engine's own wait is cut short here."""

    def work(group: NCCLGroup) -> None:
        group._engine.all_reduce = lambda array: None  # type: ignore[method-assign]
        if group.rank == 0:
            group.all_reduce_(np.zeros(3))
        group.barrier()

    for error in on_ranks(2, tmp_path, work):
        assert isinstance(error, RuntimeError)
        assert "rank 0 calls barrier with after all_reduce_ (3,) float64, rank 1 barrier; all ranks" in str(error)


def test_a_late_rank_is_named(tmp_path: Path) -> None:
    def work(group: NCCLGroup) -> None:
        if group.rank == 1:
            time.sleep(1.5)
        group.be_patient(0.3)
        group.barrier()

    late, _ = on_ranks(2, tmp_path, work, patience=0.3)
    assert isinstance(late, Lost) and "rank 1 on here has not answered for 0 s: it hangs" in str(late)


def test_an_array_with_gaps_is_refused(tmp_path: Path) -> None:
    def work(group: NCCLGroup) -> None:
        group.all_reduce_(np.zeros((4, 4)).T[1:])

    for error in on_ranks(2, tmp_path, work):
        assert isinstance(error, ValueError) and "C-contiguous" in str(error)


# --- the watch --------------------------------------------------------------------------------------------------------


def watched(capsys: pytest.CaptureFixture[str], act: Callable[[Watch, Any], None], patience: float = 5.0,
            **options: Any) -> tuple[list[int], str]:  # fmt: skip
    """The statuses with which rank 0's watch has ended its process, and what it said."""
    ours, theirs = Pipe()
    left: list[int] = []
    names = ["rank 0 on here", "rank 1 on there"]
    mine = Watch(0, [ours], names, "resume", patience, leave=left.append, **options)
    mine.start()
    act(mine, theirs)
    mine._thread.join(8)
    mine.close()
    return left, capsys.readouterr().err


def test_a_line_that_closes_ends_all(capsys: pytest.CaptureFixture[str]) -> None:
    left, said = watched(capsys, lambda watch, line: line.close())
    assert left == [Lost.status]
    assert said == "\nerror: rank 1 on there died (the kernel kills one when memory runs out); resume\n"


def test_a_rank_that_falls_silent_ends_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE", 0.5)
    left, said = watched(capsys, lambda watch, line: None)
    assert left == [Lost.status] and "rank 1 on there has shown no sign of life for 0 s: it is stopped" in said


def test_what_a_rank_says_is_said_by_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    left, said = watched(capsys, lambda watch, line: line.send(UserError("rank 1 on there: no such file")))
    assert left == [UserError.status] and said == "\nerror: rank 1 on there: no such file\n"


def test_a_collective_that_does_not_end(capsys: pytest.CaptureFixture[str]) -> None:
    def act(watch: Watch, line: Any) -> None:
        watch.begin("all_reduce_").done = lambda: True
        watch.begin("all_gather_")

    left, said = watched(capsys, act, patience=0.5)
    assert left == [Lost.status]
    assert "all_gather_ has been under way on rank 0 on here for 0 s: rank 1 on there hangs" in said


def test_an_error_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> None:
        raise RuntimeError("NCCL_ERROR_REMOTE_ERROR")

    left, said = watched(capsys, lambda watch, line: None, check=check)
    assert left == [Lost.status] and "rank 0 on here: NCCL_ERROR_REMOTE_ERROR; resume" in said


def test_an_end_that_is_wanted_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    def act(watch: Watch, line: Any) -> None:
        line.close()
        time.sleep(0.4)
        watch.close()

    assert watched(capsys, act) == ([], "")
