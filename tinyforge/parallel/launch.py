"""Starting ranks, and finding out which one this process is.

A run has one process, or one for each rank. The ranks are started by `mpirun` or `srun`, by `start` (a recipe's
`--gpus 2`), or by a launcher that sets these variables: RANK, WORLD_SIZE, LOCAL_RANK (the GPU's number), MASTER_ADDR
and MASTER_PORT (where rank 0 listens), TINYFORGE_KEY (a secret of this run).

    with joined() as ranks:             connects to the others; an error on any rank ends all of them
        group = ranks.group(backend)    MPI's on a CPU, NCCL's on GPUs
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tinyforge.backends import Backend
from tinyforge.errors import UserError, first_line
from tinyforge.parallel import nccl
from tinyforge.parallel.group import Alone, Group
from tinyforge.parallel.mpi import MPIGroup
from tinyforge.parallel.star import PREPARING, ControlChannel, Lost, Stopped
from tinyforge.parallel.tcp import free_port, lines_of_rank_0, lines_to_rank_0
from tinyforge.parallel.watch import Watch
from tinyforge.terminal import one_line

ADVICE = "the last checkpoint is good: continue with --resume, on as many ranks as are left"
AGAIN = "no checkpoint had been saved yet: start again"
OURS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TINYFORGE_KEY")
MPIS = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
GRACE = 10.0  # seconds that ranks have to exit by themselves


@dataclass
class ProcessGroupInfo:
    """This process among the ranks of a run. local_rank: its number on its host. by: what started the ranks. saved():
    whether the run has a checkpoint to go on from."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    by: str = ""
    star: ControlChannel | None = None
    watch: Watch | None = None
    saved: Callable[[], bool] = lambda: True
    _group: Group = field(default_factory=Alone)

    def name(self, rank: int) -> str:
        return self.star.names[rank] if self.star else "this process"

    def advice(self) -> str:
        """The end of a message about a rank that was lost."""
        return ADVICE if self.saved() else AGAIN

    def must_be_one(self) -> None:
        """Raise UserError if there are others."""
        if self.size > 1:
            raise UserError(f"the run has {self.size} ranks, and this recipe runs as one; drop mpirun or srun")

    def group(self, backend: Backend) -> Group:
        """The group that computes on this backend. All ranks call it, once."""
        if not (self.star and self.watch):
            return self._group
        if backend.name == "numpy" and self.by != "MPI":
            raise UserError(
                "--gpus starts a rank for each GPU, and the backend is numpy; on a CPU use mpirun -n 2, or --workers"
            )
        if backend.name == "numpy":
            self._group = MPIGroup(self.star)
        else:
            self._group = nccl.NCCLGroup(self.rank, self.size, self._engine(), self.star, self.watch)
        return self._group

    def _engine(self) -> nccl.Engine:
        """NCCL's engine, with windows if all ranks can have them. If they are expected but not possible, rank 0 prints
        why."""
        assert self.star
        hosts = len({name.rpartition(" ")[2] for name in self.star.names})
        if self._agreed("" if nccl.windows_wanted() else "not expected"):
            return nccl.CupyEngine(self.size, self.rank, self._token())
        reason = self._agreed(nccl.no_windows(hosts))
        if not reason:
            engine = nccl.CupyEngine(self.size, self.rank, self._token(), windows=True)
            window, reason = nccl.first_window(engine, self.size)
            reason = self._agreed(reason) or self._agreed(nccl.first_sum(engine, window, self.rank, self.size))
            if not reason:
                return engine
            engine.give_up()
        if self.rank == 0:
            print(f"NCCL runs without windows, which is slower: {reason}")
        return nccl.CupyEngine(self.size, self.rank, self._token())

    def _token(self) -> Any:
        assert self.star
        return self.star.rendezvous(("NCCL's id",), nccl.new_token() if self.rank == 0 else None)

    def _agreed(self, reason: str) -> str:
        """The first rank's reason that is not empty, on all ranks; empty if there is none."""
        assert self.star
        reasons = self.star.rendezvous(("reasons",), bring=reason) or [""]
        found: str = self.star.rendezvous(("the reason",), next(filter(None, reasons), ""))
        return found


def assert_equal_on_ranks(group: Group, facts: Mapping[str, Any]) -> None:
    """Raise UserError on every rank unless all have the same facts, such as {"tokenizer": hash}."""
    if group.size == 1:
        return
    wrong = ""
    for rank, theirs in enumerate(group.gather_objects(dict(facts)) or ()):
        if odd := [name for name, value in facts.items() if theirs.get(name) != value]:
            ours, got = (str(of.get(odd[0]))[:60] for of in (facts, theirs))
            wrong = (
                f"{group.name(rank)} differs from rank 0 in {odd[0].removesuffix('_hash')}: {got}, not {ours}; "
                "start all ranks in the same way, on the same files"
            )
            break
    if wrong := group.send_object(wrong):
        raise UserError(wrong)


def assert_shared_filesystem(group: Group, folder: Path) -> None:
    """Raise UserError on every rank unless all of them see rank 0's `folder`."""
    token, probe = secrets.token_hex(8), folder / ".seen"
    if group.rank == 0:
        probe.write_text(token, encoding="ascii")
    try:
        token = group.send_object(token)
        try:
            sees = probe.read_text(encoding="ascii") == token
        except OSError:
            sees = False
        blind = [group.name(rank) for rank, seen in enumerate(group.gather_objects(sees) or ()) if not seen]
    finally:
        if group.rank == 0:
            probe.unlink(missing_ok=True)
    if blind := group.send_object(blind):
        raise UserError(
            f"{blind[0]} does not see {folder.absolute()} of rank 0, where each rank writes its part of a "
            "checkpoint; put --out into a folder that all hosts share, or drop --zero"
        )


def started_as_rank() -> bool:
    """Whether this process was started as one of several ranks."""
    return all(name in os.environ for name in OURS) or any(name in os.environ for name in MPIS)


@contextmanager
def init_process_group() -> Iterator[ProcessGroupInfo]:
    """Connect to the other ranks, if there are any. An exception on one of them ends all, and rank 0 prints it.

    A rank above 0 prints nothing, and exits by SystemExit when rank 0 does.
    """
    ranks = _find()
    if not (ranks.star and ranks.watch):
        yield ranks
        return
    ranks.watch.start()
    try:
        with _quiet() if ranks.rank else nullcontext():
            yield ranks
            if ranks.rank:
                ranks.star.rendezvous(("the end",))  # rank 0 may still be busy
    except Stopped as stopped:
        _leave(ranks, int(stopped.code or 0))
    except Exception as error:
        if ranks.rank:
            if isinstance(error, Lost) and ranks.rank == 1:  # rank 0 itself is lost: one of the others prints it
                print(f"\nerror: {error}", file=sys.stderr, flush=True)
            _tell(ranks, error)
            _leave(ranks, getattr(error, "status", 1))
        _fail(ranks, error)
    except BaseException as left:  # Ctrl-C, or the exit after a signal
        ranks.watch.close()
        ranks.star.stop(0 if isinstance(left, SystemExit) else 130)
        raise
    finally:
        ranks._group.forget()
    ranks.watch.close()
    ranks.star.stop(0)


def refuse_ranks() -> None:
    """For a command without ranks: raise UserError if this process is one of several, each of which would do all of
    its work. Rank 0 prints it."""
    with init_process_group() as ranks:
        ranks.must_be_one()


def _find() -> ProcessGroupInfo:
    if any(name in os.environ for name in MPIS) and not all(name in os.environ for name in OURS):
        return _of_mpi()
    missing = [name for name in OURS if name not in os.environ]
    if missing == ["TINYFORGE_KEY"] and os.environ["WORLD_SIZE"] != "1":  # else each rank would train by itself
        raise UserError(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and TINYFORGE_KEY is not; set it to a "
            "secret, the same for all ranks, or unset WORLD_SIZE to run one process"
        )
    if missing:
        return ProcessGroupInfo()
    try:
        rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = int(os.environ.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise UserError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT want whole numbers: {error}") from error
    if not 0 <= rank < size:
        raise UserError(f"RANK is {rank}, WORLD_SIZE {size}; ranks are 0 to {size - 1}")
    _die_with_parent()
    if size == 1:
        return ProcessGroupInfo(local_rank=local, by="variables")
    address = os.environ["MASTER_ADDR"], port
    return _connected(rank, size, local, "variables", address, os.environ["TINYFORGE_KEY"].encode())


def _of_mpi() -> ProcessGroupInfo:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, the MPI library is not
        cause = first_line(error)
        raise UserError(f"started by mpirun, but mpi4py does not load ({cause}); pip install mpi4py") from error
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return ProcessGroupInfo()
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    host = "127.0.0.1" if here.Get_size() == size else socket.gethostname()
    found = comm.bcast((host, free_port(), secrets.token_bytes(16)) if rank == 0 else None)
    return _connected(rank, size, here.Get_rank(), "MPI", found[:2], found[2])


def _connected(rank: int, size: int, local: int, by: str, address: tuple[str, int], key: bytes) -> ProcessGroupInfo:
    if rank == 0:
        lines, watched, hosts = lines_of_rank_0(size, address, key)
    else:
        line, watching, hosts = lines_to_rank_0(rank, address, key)
        lines, watched = [line], [watching]
    names = [f"rank {number} on {host}" for number, host in enumerate(hosts)]
    ranks = ProcessGroupInfo(rank, size, local, by)
    ranks.star = ControlChannel(rank, lines, names, ranks.advice)
    ranks.watch = Watch(rank, watched, names, ranks.advice, PREPARING)
    return ranks


def _tell(ranks: ProcessGroupInfo, error: BaseException) -> None:
    """On a rank above 0: have rank 0 print what happened here."""
    assert ranks.star and ranks.watch
    if isinstance(error, RuntimeError) and str(error).startswith("group: "):
        return  # every rank has it
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    fault = UserError(f"{ranks.name(ranks.rank)}: {text}")
    ranks.star.say(fault)
    with suppress(OSError):
        ranks.watch.lines[0].send(fault)


def _fail(ranks: ProcessGroupInfo, error: Exception) -> NoReturn:
    """On rank 0: print the error and end all ranks. Not by raising: at interpreter exit the device's library and MPI
    would wait for ranks that are gone."""
    assert ranks.star and ranks.watch
    ranks.watch.close()
    status = getattr(error, "status", 1)
    ranks.star.stop(status)
    if isinstance(error, UserError):
        print(f"\nerror: {one_line(str(error))}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)  # what was sent arrives
    os._exit(status)


def _leave(ranks: ProcessGroupInfo, status: int) -> None:
    """On a rank above 0: exit. After a fault without MPI's finalisation, which would wait for the others."""
    assert ranks.watch
    ranks.watch.close()
    if status:
        time.sleep(0.5)  # what was sent arrives
        os._exit(status)
    raise SystemExit(0)


@contextmanager
def _quiet() -> Iterator[None]:
    """On a rank above 0: print nothing, and leave Ctrl-C to rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def _die_with_parent() -> None:
    """End this rank when the process that started it dies."""
    if sys.platform == "linux" and os.environ.get("TINYFORGE_PARENT") == str(os.getppid()):
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


# --- starting them ----------------------------------------------------------------------------------------------------


def start(
    command: Sequence[str],
    gpus: int,
    elastic: Callable[[int], tuple[int, Sequence[str]]] | None = None,
    saved: Callable[[], bool] = lambda: True,
) -> int:
    """Run `command` as `gpus` ranks of this machine, one for each GPU; returns the exit status of rank 0.

    elastic: for --elastic; called with the number of GPUs that are left after a rank was lost, it returns how many
    ranks to go on with (0: none) and what to add to the command. saved: see `ProcessGroupInfo`.
    """
    devices = list(range(gpus))
    more: Sequence[str] = ()
    while True:
        status, lost = _run([*command, *more], devices, saved)
        if status != Lost.status or elastic is None:
            return status
        left = [device for device in devices if device not in lost] if lost else devices[:-1]
        count, more = elastic(len(left))
        if not count:
            return status
        devices = left[:count]
        print(f"going on with {count} rank{'s' * (count > 1)}, on GPU {', '.join(map(str, devices))}", file=sys.stderr)


def _run(command: Sequence[str], devices: Sequence[int], saved: Callable[[], bool]) -> tuple[int, list[int]]:
    """Run the ranks once; returns the status of rank 0, and the devices of ranks that died or hung."""
    size = len(devices)
    variables = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TINYFORGE_KEY": secrets.token_hex(16),
        "TINYFORGE_PARENT": str(os.getpid()),
    }
    # In sessions of their own: Ctrl-C reaches only this process, which passes it on to rank 0.
    children = [
        subprocess.Popen(
            command, env={**variables, "RANK": str(rank), "LOCAL_RANK": str(device)}, start_new_session=True
        )
        for rank, device in enumerate(devices)
    ]

    def hand_on(number: int, frame: Any) -> None:
        with suppress(ProcessLookupError):
            children[0].send_signal(number)

    old = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # A rank above 0 may end well before rank 0, which may still have something to write.
        while children[0].poll() is None and not any(child.poll() for child in children):
            time.sleep(0.05)
        until = time.monotonic() + GRACE
        died = [rank for rank, child in enumerate(children) if (child.poll() or 0) < 0]
        while time.monotonic() < until and any(child.poll() is None for child in children):
            time.sleep(0.05)
        hung = [rank for rank, child in enumerate(children) if child.poll() is None]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
        for child in children:
            child.wait()
        for number, handler in old.items():
            signal.signal(number, handler)
    status = children[0].returncode
    if status < 0:
        if 0 not in hung:
            name = signal.Signals(-status).name
            advice = ADVICE if saved() else AGAIN
            print(f"\nerror: rank 0 on {socket.gethostname()} was killed by {name}; {advice}", file=sys.stderr)
        status = Lost.status
    return status, [devices[rank] for rank in dict.fromkeys([*died, *(hung if status else ())])]
