"""The group of NCCL's ranks, over an engine of NumPy's: its collectives, trees, mismatches; and the watch."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.backends.as_graphs import AsGraphs
from tests.gpu.ranks_check import collectives
from tests.parallel import fake_nccl
from tests.parallel.fake_nccl import FakeEngine, LateEngine
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.op import Param
from tinyforge.optim import AdamW
from tinyforge.parallel import Alone, launch, nccl, part_of, watch
from tinyforge.parallel.buckets import Buckets
from tinyforge.parallel.nccl import CupyEngine, NCCLGroup
from tinyforge.parallel.star import ControlChannel, Lost
from tinyforge.parallel.watch import Watch
from tinyforge.rng import Stream
from tinyforge.train.batches import PackedTokens
from tinyforge.train.captured import Captured
from tinyforge.train.data_parallel import DataParallel, clip, gradients_of, update
from tinyforge.train.objectives import NextTokens

TINY = Config(
    dim=32, heads=4, kv_heads=2, layers=2, context=16, vocab=128, mtp_heads=2, hidden=64, mtp_weights=(1, 0.5)
)


def resume() -> str:
    return "resume"


def on_ranks(
    size: int, folder: Path, work: Callable[[NCCLGroup], Any], patience: float = 30.0, kind: Any = FakeEngine
) -> list[Any]:
    """work(group) on each rank, a thread; what each returns or raises."""
    folder.mkdir(exist_ok=True)
    names = [f"rank {rank} on here" for rank in range(size)]
    pipes = [Pipe() for _ in range(size - 1)]
    found: list[Any] = [None] * size

    def live(rank: int) -> None:
        lines = [ours for ours, _ in pipes] if rank == 0 else [pipes[rank - 1][1]]
        engine = kind(size, rank, str(folder).encode(), patience)
        group = NCCLGroup(
            rank,
            size,
            engine,
            ControlChannel(rank, lines, names, resume, patience),
            Watch(rank, [], names, resume, patience),
        )
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


LATE_WINDOWS = partial(LateEngine, windows=True)


def own(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=count) * 10.0**rank


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives(size: int, tmp_path: Path) -> None:
    counts = (0, 1, 32, 96, 129)

    def everything(group: NCCLGroup) -> list[np.ndarray]:
        made = []
        for count in counts:
            for method, options in (
                ("all_reduce_", {}),
                ("all_reduce_", {"tree": True}),
                ("reduce_scatter_", {}),
                ("reduce_scatter_", {"unit": 32}),
                ("all_gather_", {}),
                ("all_gather_", {"unit": 32}),
                ("broadcast_", {}),
            ):
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
                expected = np.add.reduce([own(r, whole) for r in range(size)], axis=0) if whole else np.zeros(0)
                assert np.array_equal(scattered[mine], expected[mine])
            for unit in (1, 32):
                gathered, whole = next(results), count - count % unit
                for r in range(size):
                    part = part_of(r, size, whole, unit)
                    assert np.array_equal(gathered[part], own(r, whole)[part])
            assert np.array_equal(next(results), parts[0])


def checked(group: NCCLGroup) -> int:
    """What the check on GPUs compares, in windows and outside."""
    xp = SimpleNamespace(array=np.array, empty=np.empty, asnumpy=np.array)
    return collectives(group, xp, (7, 64, 9600))


@pytest.mark.parametrize(("size", "counts"), [(2, (84, 168)), (3, (64, 128)), (4, (84, 148))])
def test_collectives_in_windows(size: int, counts: tuple[int, int], tmp_path: Path) -> None:
    for kind, compared in zip((FakeEngine, LATE_WINDOWS), counts, strict=True):
        assert on_ranks(size, tmp_path / str(compared), checked, kind=kind) == [compared] * size


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


# --- steps, with collectives that are late ----------------------------------------------------------------------------


def trained(
    group: Any, zero: int, micro_batches: int = 1, shards: int = 0, capture: bool = False
) -> dict[str, np.ndarray]:
    """Six steps of a small model; on each rank all weights and its own masters and moments. capture: by `Captured`,
    over a stand-in for graphs."""
    backend = get_backend("numpy", "fp32", workers=1)
    backend.group = group if group.size > 1 else None
    model = NanoEuler(TINY, backend)
    model.initialise(0)
    tokens = np.random.default_rng(0).integers(0, TINY.vocab, 4000).astype(np.int32)
    data = PackedTokens(tokens, TINY.context, TINY.mtp_heads, seed=0, full=True)
    batches = lambda step: [data.batch(step * micro_batches + i, 8) for i in range(micro_batches)]  # noqa: E731
    objective = NextTokens(TINY.head_weights)
    parallel = DataParallel(model, backend, objective, shards=shards, batches=batches)
    rank = parallel.rank
    rank.buckets = Buckets(model.buffer, model.ops(), elements=6000)  # several
    optimizer = rank.make_optimizer(None, zero, micro_batches)
    backend.graphs = AsGraphs  # type: ignore[method-assign]
    captured = Captured(parallel, optimizer, 1.0) if capture else None
    for step in range(6):
        if captured:
            if group.rank:
                work, arguments = group.send_object()
                work(rank, *arguments)
            else:
                captured.step(batches(step), Stream(0, "noise"), 1e-2, step if step % 2 else None)
            continue
        counts = sum(objective.count(batch) for batch in batches(step))
        gradients_of(rank, step, counts, None)
        clip(rank, 1.0)
        update(rank, 1e-2)
    loss = rank.model.forward(*batches(0)[0].inputs(backend)).sum()  # reads weights that are still on their way
    names = [p.name for p in optimizer.owned()]
    return {"loss": loss} | {
        f"{what} {name}": tensor
        for what in ("masters", "m", "v")
        for name, tensor in zip(names, optimizer.tensors(what), strict=True)
    }


def all_of(found: list[Any]) -> dict[str, np.ndarray]:
    for of_rank in found:
        assert isinstance(of_rank, dict), of_rank
    assert len({float(of_rank["loss"]) for of_rank in found}) == 1
    return {name: array for of_rank in found for name, array in of_rank.items()}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_sums_under_backward_and_weights_under_forward_wait_for_what_they_need(
    micro_batches: int, tmp_path: Path
) -> None:
    """The steps of ranks whose collectives happen at once, and as late as can be, in windows and not; whole and shared
    out."""
    found = {}
    for zero in (0, 1, 2):
        for number, kind in enumerate((FakeEngine, LateEngine, LATE_WINDOWS)):
            work = partial(trained, zero=zero, micro_batches=micro_batches)
            found[zero, kind] = all_of(on_ranks(2, tmp_path / f"{zero}{number}", work, kind=kind))
    expected = found[0, FakeEngine]
    for (zero, kind), state in found.items():
        assert state.keys() == expected.keys()
        other = found[2, FakeEngine] if zero == 2 and micro_batches > 1 else expected  # sums in another order
        assert all(np.array_equal(state[name], other[name]) for name in state), (zero, kind)
    for name, array in expected.items():
        np.testing.assert_allclose(found[2, FakeEngine][name], array, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [LateEngine, LATE_WINDOWS], ids=["plain", "windows"])
def test_the_bits_of_shards_with_collectives_that_are_late(kind: Any, size: int, tmp_path: Path) -> None:
    expected = trained(Alone(), zero=0, shards=size)
    for zero in (0, 1, 2):
        state = all_of(on_ranks(size, tmp_path / str(zero), partial(trained, zero=zero, shards=size), kind=kind))
        assert all(np.array_equal(state[name], expected[name]) for name in expected if name != "loss"), zero


@pytest.mark.parametrize(("size", "shards", "windows"), [(4, 4, False), (4, 0, True), (2, 2, True)])
def test_trees_of_more_than_two_ranks_stay_out_of_windows(
    size: int, shards: int, windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages between pairs of GPUs hang there."""
    asked, right = list[int](), LateEngine.window
    monkeypatch.setattr(LateEngine, "window", lambda self, *given: (asked.append(self.rank), right(self, *given))[1])
    all_of(on_ranks(size, tmp_path, partial(trained, zero=1, shards=shards), kind=LATE_WINDOWS))
    assert sorted(set(asked)) == (list(range(size)) if windows else [])


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_captured_steps_of_ranks_have_the_bits_of_plain_ones(zero: int, tmp_path: Path) -> None:
    expected = all_of(on_ranks(2, tmp_path / "plain", partial(trained, zero=zero)))
    for number, kind in enumerate((LateEngine, LATE_WINDOWS)):
        work = partial(trained, zero=zero, capture=True)
        state = all_of(on_ranks(2, tmp_path / str(number), work, kind=kind))
        assert all(np.array_equal(state[name], expected[name]) for name in expected), (zero, kind)


def test_graphs_are_dropped_before_the_group_is_left(tmp_path: Path) -> None:
    """NCCL waits for them when it is left."""

    def work(group: NCCLGroup) -> list[bool]:
        def launch() -> None:
            pass

        alive, again = weakref.ref(launch), group.captured(lambda made=launch: made)  # type: ignore[misc]
        del launch
        again()
        there = [alive() is not None]
        group.forget()
        return [*there, alive() is None]

    assert on_ranks(1, tmp_path, work) == [[True, True]]


def test_the_norm_of_sums_that_nobody_waits_for_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of it is taken while the last bucket travels."""
    early = list[range]()
    know = AdamW.know

    def noted(self: AdamW, pieces: range) -> None:
        early.append(pieces)
        know(self, pieces)

    monkeypatch.setattr(AdamW, "know", noted)
    expected = all_of(on_ranks(2, tmp_path / "right", partial(trained, zero=0), kind=LateEngine))
    assert len([pieces for pieces in early if len(pieces) > 4]) == 12  # of six steps on each rank
    join = LateEngine.join
    monkeypatch.setattr(LateEngine, "join", lambda self, mark=None: None if mark is not None else join(self))
    found = on_ranks(2, tmp_path / "wrong", partial(trained, zero=0), kind=LateEngine)
    assert any(not np.array_equal(of_rank[name], expected[name]) for of_rank in found for name in of_rank)


def test_weights_that_nobody_waits_for_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    expected = all_of(on_ranks(2, tmp_path / "right", partial(trained, zero=1)))
    monkeypatch.setattr(Param, "value", property(lambda self: self._value, Param.value.fset))
    found = on_ranks(2, tmp_path / "wrong", partial(trained, zero=1), kind=LateEngine)
    assert any(not np.array_equal(of_rank[name], expected[name]) for of_rank in found for name in of_rank)


# --- CuPy's engine, without a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[], CupyEngine]:
    """Makes an engine on stand-ins for CuPy and NCCL."""
    kinds = ("FLOAT32", "FLOAT64", "BFLOAT16", "INT32", "INT64", "UINT8", "SUM")
    library = SimpleNamespace(**{f"NCCL_{kind}": number for number, kind in enumerate(kinds)})
    library.NcclCommunicator = lambda *_: SimpleNamespace(blocks=os.environ["NCCL_MAX_CTAS"])
    cuda, cupy = ModuleType("cupy.cuda"), ModuleType("cupy")
    vars(cuda).update(nccl=library, Device=lambda: None, Stream=SimpleNamespace)
    vars(cupy).update(cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(nccl, "add_", SimpleNamespace(bind=lambda backend: None))
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    return partial(CupyEngine, 2, 0, b"token")


def test_collectives_take_few_multiprocessors_and_come_first(
    made: Callable[[], CupyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made()
    assert engine._comm.blocks == str(nccl.BLOCKS) == "4" and engine._stream.priority < 0
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    assert made()._comm.blocks == "16" and nccl.spared() == 0
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    assert made()._comm.blocks == "8" and nccl.spared() == 8
    for wrong in ("", "0", "many", "65", "-1"):
        monkeypatch.setenv("NCCL_MAX_CTAS", wrong)
        with pytest.raises(UserError, match=f"NCCL_MAX_CTAS is '{wrong}', expected a number of blocks from 1 to 64"):
            made()


@pytest.mark.parametrize(("ranks", "shards", "spared"), [(1, 0, 0), (1, 2, 4), (2, 0, 4), (2, 2, 4)])
def test_products_leave_room_wherever_bits_are_to_be_the_same(
    ranks: int, shards: int, spared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many multiprocessors on one GPU with --reduction-shards as on several."""
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    backend = get_backend("numpy", "fp32", workers=1)
    payload = list[int]()
    monkeypatch.setattr(backend, "spare", payload.append)
    if ranks > 1:
        engine = SimpleNamespace(has_windows=False, check=lambda: None)
        backend.group = NCCLGroup(0, ranks, engine, None, SimpleNamespace())  # type: ignore[arg-type]
    model = NanoEuler(TINY, backend)
    DataParallel(model, backend, NextTokens(TINY.head_weights), shards=shards)
    assert payload == [spared]


# --- whether there are windows ----------------------------------------------------------------------------------------


class Tried(LateEngine):
    """faults: of the first window, by rank."""

    faults: ClassVar[dict[int, str]] = {}
    given_up: ClassVar[list[int]] = []

    def window(self, count: int, dtype: Any) -> np.ndarray:
        made = super().window(count, dtype)
        if self.rank in self.faults:
            raise UserError(self.faults[self.rank])
        return made

    def give_up(self) -> None:
        self.given_up.append(self.rank)


def engines(monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...] = ("here", "here")) -> list[Any]:
    """What `ProcessGroupInfo.group` makes on each rank."""
    monkeypatch.setattr(nccl, "CupyEngine", Tried)
    monkeypatch.setattr(nccl, "new_token", fake_nccl.new_token)
    monkeypatch.setattr(Tried, "given_up", [])
    names, pipes = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)], Pipe()
    found: list[Any] = [None, None]

    def live(rank: int) -> None:
        star, watch = ControlChannel(rank, [pipes[rank]], names, resume, 20.0), Watch(rank, [], names, resume, 20.0)
        ranks = launch.ProcessGroupInfo(rank, 2, rank, "variables", star, watch)
        found[rank] = ranks.group(SimpleNamespace(name="cupy"))._engine  # type: ignore[arg-type, attr-defined]

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_windows_where_all_ranks_have_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)  # an engine of another test leaves it
    monkeypatch.setattr(nccl, "no_windows", lambda hosts: "")
    assert [engine.has_windows for engine in engines(monkeypatch)] == [True, True]
    # One rank cannot: none does, the communicators are made anew, and one line says why.
    monkeypatch.setattr(Tried, "faults", {1: "ncclMemAlloc failed: no such thing"})
    assert [engine.has_windows for engine in engines(monkeypatch)] == [False, False]
    assert sorted(Tried.given_up) == [0, 1]
    assert capsys.readouterr().out == (
        "NCCL runs without windows, which is slower: ncclMemAlloc failed: no such thing\n"
    )


@pytest.mark.parametrize("lost", ["all_reduce", "all_gather"])
def test_windows_that_bring_nothing_are_not_taken(
    lost: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    monkeypatch.setattr(nccl, "no_windows", lambda hosts: "")
    monkeypatch.setattr(FakeEngine, lost, lambda self, *arrays: None)
    assert [engine.has_windows for engine in engines(monkeypatch)] == [False, False]
    assert "is slower: the first sum in a window is wrong" in capsys.readouterr().out


def test_no_windows_between_hosts_in_an_old_library_or_unwanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    library = SimpleNamespace(get_version=lambda: 22809)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", library)
    monkeypatch.setattr("cupy.cuda.nccl", library, raising=False)
    assert [engine.has_windows for engine in engines(monkeypatch)] == [True, True] and not capsys.readouterr().out
    assert [engine.has_windows for engine in engines(monkeypatch, ("here", "there"))] == [False, False]
    assert "the ranks are on 2 hosts" in capsys.readouterr().out
    library.get_version = lambda: 22703
    assert [engine.has_windows for engine in engines(monkeypatch)] == [False, False]
    assert "this NCCL is 2.27, 2.28 is the first that gathers by copies" in capsys.readouterr().out
    monkeypatch.setenv("NCCL_WIN_ENABLE", "0")
    assert [engine.has_windows for engine in engines(monkeypatch)] == [False, False] and not capsys.readouterr().out


# --- the watch --------------------------------------------------------------------------------------------------------


def watched(
    capsys: pytest.CaptureFixture[str], act: Callable[[Watch, Any], None], patience: float = 5.0, **options: Any
) -> tuple[list[int], str]:
    """The statuses with which rank 0's watch has ended its process, and what it said."""
    ours, theirs = Pipe()
    left: list[int] = []
    names = ["rank 0 on here", "rank 1 on there"]
    mine = Watch(0, [ours], names, resume, patience, leave=left.append, **options)
    mine.start()
    act(mine, theirs)
    mine._thread.join(8)
    mine.close()
    return left, capsys.readouterr().err


def test_a_line_that_closes_ends_all(capsys: pytest.CaptureFixture[str]) -> None:
    left, said = watched(capsys, lambda watch, line: line.close())
    assert left == [Lost.status]
    assert said == "\nerror: rank 1 on there died (the kernel kills one when memory runs out); resume\n"


def test_a_rank_that_falls_silent_ends_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_device_that_does_not_answer_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Asking the driver may wait for what the lost rank does no more."""
    hung = threading.Event()

    def act(watch: Watch, line: Any) -> None:
        watch.begin("all_reduce_").done = lambda: hung.wait(20)
        time.sleep(0.4)
        line.close()

    left, said = watched(capsys, act)
    hung.set()
    assert left == [Lost.status] and "rank 1 on there died" in said


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
