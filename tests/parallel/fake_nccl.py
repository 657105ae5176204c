"""NCCL's calls over NumPy arrays, through files of a folder: the whole path of a run on GPUs, without one.

    python tests/parallel/fake_nccl.py pretrain --gpus 2 ...

runs a recipe as on a machine with GPUs, each a NumPy backend with one worker (`main` has the variables). What it cannot
show is the device's asynchrony: here a collective is finished when it returns.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tests.backends.as_graphs import AsGraphs
from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.backends.numpy_backend import NumpyBackend
from tinyforge.errors import run_command
from tinyforge.parallel import launch, nccl
from tinyforge.train import data_parallel, settings, state


class FakeEngine:
    """See `nccl.Engine`. token: the folder's name, known to all ranks. seconds: before a wait is given up. windows:
    there are some."""

    def __init__(self, size: int, rank: int, token: bytes, seconds: float = 600.0, windows: bool = False) -> None:
        self.has_windows = windows
        self.folder, self.size, self.rank, self.seconds = Path(token.decode()), size, rank, seconds
        self._count = 0
        self._later: list[Callable[[], None]] | None = None
        self._sent = self._received = 0

    # --- messages

    def _put(self, name: str, array: np.ndarray) -> None:
        partial = self.folder / f".{name}"
        partial.write_bytes(np.ascontiguousarray(array).tobytes())
        partial.rename(self.folder / name)

    def _get(self, name: str, like: np.ndarray) -> np.ndarray:
        until, path = time.monotonic() + self.seconds, self.folder / name
        while not path.exists():
            if time.monotonic() > until:
                raise TimeoutError(name)
            time.sleep(0.0002)
        return np.frombuffer(path.read_bytes(), like.dtype).reshape(like.shape)

    def _everybody(self, array: np.ndarray) -> list[np.ndarray]:
        self._count += 1
        self._put(f"{self._count}.{self.rank}", array)
        if self._count > 2:  # all have read it: each has put what came after
            (self.folder / f"{self._count - 2}.{self.rank}").unlink(missing_ok=True)
        return [self._get(f"{self._count}.{rank}", array) for rank in range(self.size)]

    # --- the calls

    def all_reduce(self, array: np.ndarray) -> None:
        array[...] = np.add.reduce(self._everybody(array), axis=0)

    def reduce_scatter(self, array: np.ndarray, out: np.ndarray) -> None:
        total = np.add.reduce(self._everybody(array), axis=0)
        array[...] = np.nan if array.dtype.kind == "f" else -1  # NCCL promises nothing of the rest
        out[...] = total[self.rank * out.size : (self.rank + 1) * out.size]

    def all_gather(self, part: np.ndarray, out: np.ndarray) -> None:
        out[...] = np.concatenate(self._everybody(part))

    def broadcast(self, array: np.ndarray, root: int) -> None:
        array[...] = self._everybody(array)[root]

    def reduce(self, array: np.ndarray, root: int) -> None:
        total = np.add.reduce(self._everybody(array), axis=0)
        if self.rank == root:
            array[...] = total

    def send(self, array: np.ndarray, to: int) -> None:
        assert self._later is not None, "a send outside together() waits for its receiver"
        self._put(f"p{self._count}.{self.rank}.{to}", array)

    def receive(self, out: np.ndarray, source: int) -> None:
        assert self._later is not None

        def fill() -> None:
            out[...] = self._get(f"p{self._count}.{source}.{self.rank}", out)

        self._later.append(fill)

    @contextlib.contextmanager
    def together(self) -> Any:
        self._later = []
        yield
        for work in self._later:
            work()
        self._everybody(np.zeros(1))  # so that the next names are new
        self._later = None

    def window(self, count: int, dtype: Any) -> np.ndarray:
        self._everybody(np.array([count]))
        return np.zeros(count, dtype)

    def run(self, work: Callable[[], Any]) -> None:
        work()

    def fork(self) -> None:
        pass

    def mark(self) -> Any:
        return None

    def join(self, mark: Any = None) -> None:
        pass

    def done(self) -> Callable[[], bool]:
        return lambda: True

    def add(self, out: np.ndarray, x: np.ndarray) -> None:
        out += x

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def check(self) -> None:
        pass


class LateEngine(FakeEngine):
    """What is asked of the communicator's stream is done when somebody waits for it, and not before: as late as a GPU
    may do it. Whoever forgets to wait reads what was there before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._queue: list[Callable[[], None]] = []
        self._finished = 0
        self._grouped: list[Callable[[], None]] | None = None
        names = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "send", "receive")
        for name in names:
            setattr(self, name, functools.partial(self._later_on, getattr(super(), name)))

    def _later_on(self, call: Callable[..., None], *arguments: Any) -> None:
        (self._queue if self._grouped is None else self._grouped).append(functools.partial(call, *arguments))

    @contextlib.contextmanager
    def together(self) -> Any:
        self._grouped = grouped = []
        yield
        self._grouped = None

        def all_of_them() -> None:
            with FakeEngine.together(self):
                for call in grouped:
                    call()

        self._queue.append(all_of_them)

    def run(self, work: Callable[[], Any]) -> None:
        self._queue.append(work)

    def mark(self) -> int:
        return len(self._queue)

    def join(self, mark: Any = None) -> None:
        until = self.mark() if mark is None else mark
        while self._finished < until:
            self._finished += 1
            self._queue[self._finished - 1]()


def new_token() -> bytes:
    return tempfile.mkdtemp(prefix="fake-nccl-").encode()


class FakeGPU(NumpyBackend):
    """A NumPy backend for the group of NCCL."""

    def graphs(self) -> Any:
        return AsGraphs()


def install_gpus(count: int) -> None:
    def get_backend(name: str, precision: str, workers: int | None, device: int | None = None) -> Backend:
        return FakeGPU(precision, 1)

    def group(ranks: launch.ProcessGroupInfo, backend: Backend) -> Any:
        return of_backend(ranks, SimpleNamespace(name="cupy"))  # type: ignore[arg-type]

    of_backend = launch.ProcessGroupInfo.group
    settings.gpu_count = lambda: count
    settings.gpu_is_there = lambda: count > 0
    settings.get_backend = get_backend
    launch.ProcessGroupInfo.group = group  # type: ignore[method-assign]
    nccl.CupyEngine = FakeEngine  # type: ignore[assignment, misc]
    nccl.new_token = new_token
    nccl.no_windows = lambda hosts: ""


def install_fault(rank: int, step: int, kind: str) -> None:
    """In this step, counted from the start of the process, rank `rank` does what `kind` says."""
    right, taken = data_parallel._gradients_of_part, 0

    def wrong(of: data_parallel.Worker, *arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        if of.group.rank == rank and taken == step:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                time.sleep(1000)
            if kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "raise":
                raise ZeroDivisionError("of this rank")
            if kind == "nan":
                of.model.heads.weight.value[...] = np.nan
        return right(of, *arguments)

    data_parallel._gradients_of_part = wrong


def install_fault_in_save(moment: str, step: int) -> None:
    """When this step is saved: "shards" kills rank 1 when rank 0 alone has written, "manifest" rank 0 when all have;
    with "full" rank 1's disk is full after its first tensor."""
    right, save_meta, chunks = state._write_own, checkpoint._to_json, checkpoint.chunks

    def own(rank: data_parallel.Worker, folder: Path, more: Any) -> Any:
        if rank.group.rank == 1 and folder.name.endswith(f"{step:08d}"):
            if moment == "shards":
                until = time.monotonic() + 30
                while not list(folder.glob("model-00001*")) and time.monotonic() < until:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            if moment == "full":
                checkpoint.chunks = full
        return right(rank, folder, more)

    def full(*arguments: Any) -> Any:
        parts = chunks(*arguments)
        yield from (next(parts), next(parts))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def to_json(content: Any) -> bytes:
        if moment == "manifest" and content.get("step") == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return save_meta(content)

    state._write_own, checkpoint._to_json = own, to_json


def install_difference(what: str) -> None:
    """What a rank above 0 says of itself is not what rank 0 says: its "code", or its "kind" of GPU."""
    if what == "code" and os.environ["OMPI_COMM_WORLD_RANK"] != "0":
        settings.code_hash = lambda: "another"
    if what == "kind":
        letter = "AB"[int(os.environ["OMPI_COMM_WORLD_RANK"])]
        FakeGPU.describe = lambda self: f"NVIDIA {letter} (GPU 0)"  # type: ignore[method-assign]


def main() -> int:
    """FAKE_GPUS: how many; 0 for none. ODD: of MPI's ranks, as `install_difference`. KILL_IN_SAVE: moment:step,
    as `install_fault_in_save`. FAULT: rank:step:kind, as `install_fault`; only while no checkpoint was saved where
    FAULT_ONCE names the run's folder."""
    if count := int(os.environ.get("FAKE_GPUS", "2")):
        install_gpus(count)
    once = os.environ.get("FAULT_ONCE")
    if (fault := os.environ.get("FAULT")) and not (once and list(Path(once).glob("step-*"))):
        rank, step, kind = fault.split(":")
        install_fault(int(rank), int(step), kind)
    install_difference(os.environ.get("ODD", ""))
    if in_save := os.environ.get("KILL_IN_SAVE"):
        moment, step = in_save.split(":")
        install_fault_in_save(moment, int(step))
    recipe = importlib.import_module(f"tinyforge.recipes.{sys.argv.pop(1)}")
    return recipe.main()


if __name__ == "__main__":
    run_command(main)
