"""Run the passes over a corpus on the machines of a Ray cluster.

    with open_nodes("10.0.0.1:6379", out, readable) as nodes:       # "local": a Ray of this machine alone
        nodes.submit(function, *arguments).result()                 # on any free machine

Ray schedules the tasks, and repeats those of a lost machine. The passes, their order and the merging of their results
are the same as without Ray, so the result has the same bytes. All machines must see the checkout, the sources and the
result under the same paths, in a shared folder, and must run the same code. Both are checked before any work is done.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge import files
from tinyforge.errors import UserError
from tinyforge.invocation import PACKAGE, code_hash
from tinyforge.requirements import needs

ANSWER = 5.0  # seconds to wait for an address
START = 90.0  # seconds for every machine to start a process and report
RETRIES = 20  # of a task whose machine or process was lost
LONELY = 60.0  # seconds to wait while no machine can run a task
_STORE = 128 << 20  # bytes of Ray's own memory with "local": what goes through it is small


class Nodes(Executor):
    """The machines of a cluster. per_node: most tasks on one machine at a time; None: one per processor."""

    def __init__(self, ray: Any, per_node: int | None = None) -> None:
        self._ray = ray
        most = max((node["Resources"].get("CPU", 0) for node in self.alive()), default=0)
        self.per_node = max(1, int(most if per_node is None else min(most, per_node)))
        self._cpus = max(1.0, most / self.per_node)
        options = {"num_cpus": self._cpus, "max_retries": RETRIES}
        self._call = ray.remote(_as_itself).options(**options)
        self._alone_since: float | None = None

    def alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    @property
    def workers(self) -> int:
        """Tasks that can run at the same time now."""
        return max(1, sum(int(node["Resources"].get("CPU", 0) // self._cpus) for node in self.alive()))

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        return self._call.remote(function, arguments, keywords).future()

    def wait(self, running: Iterable[Future[Any]]) -> set[Future[Any]]:
        """The finished ones, at least one. Raises UserError if no machine is left to run them."""
        while True:
            done = wait_for(running, timeout=5.0, return_when="FIRST_COMPLETED").done
            able = any(node["Resources"].get("CPU", 0) >= self._cpus for node in self.alive())
            self._alone_since = None if able or done else self._alone_since or time.monotonic()
            if done:
                return done
            if self._alone_since and time.monotonic() - self._alone_since > LONELY:
                raise UserError(
                    f"--ray: no machine has been left for {LONELY:.0f} s; start some and run again, "
                    "complete parts are kept"
                )

    def result(self, future: Future[Any]) -> Any:
        """The result of a task. Raises UserError, including one that the task raised."""
        try:
            return future.result()
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise
        except self._ray.exceptions.RayError as error:
            raise UserError(
                f"--ray: a task was lost {RETRIES + 1} times ({_line(error)}); run again to continue, "
                "complete parts are kept"
            ) from None

    def map_in_order(self, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """function(*task) for each, in order, with a few tasks in flight."""
        ahead: list[Future[Any]] = []
        for task in tasks:
            ahead.append(self.submit(function, *task))
            if len(ahead) > 2 * self.workers:
                yield self._first(ahead)
        while ahead:
            yield self._first(ahead)

    def _first(self, ahead: list[Future[Any]]) -> Any:
        while not ahead[0].done():
            self.wait(ahead[:1])
        return self.result(ahead.pop(0))

    def check(self, folder: Path, readable: Sequence[Path]) -> None:
        """Check that every machine sees `folder`, reads `readable` and runs this code; UserError names one that does
        not."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        probe = self._ray.remote(look)
        token = folder / f".token-{secrets.token_hex(8)}"
        word = secrets.token_hex(16)
        asked: list[tuple[str, str, Callable[[], Any], Any]] = []
        try:
            token.write_text(word, encoding="ascii")
            nodes = self.alive()
            if not any(node["Resources"].get("CPU", 0) for node in nodes):
                raise UserError("--ray: no machine of the cluster has a processor to give; start one with ray start")
            for node in nodes:
                name = f"machine {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": On(node["NodeID"], soft=False)}
                ask = partial(probe.options(**options).remote, token, list(readable))
                asked.append((name, node["NodeID"], ask, ask()))  # all of them start at the same time
            for name, number, again, reference in asked:
                if seen := self._seen(name, number, again, reference):
                    _judge(name, seen, folder, word)
        finally:
            token.unlink(missing_ok=True)

    def _seen(self, name: str, number: str, ask: Callable[[], Any], reference: Any) -> dict[str, Any] | None:
        """The report of a machine; None if it has left the cluster."""
        deadline = time.monotonic() + START
        errors = self._ray.exceptions
        while True:
            try:
                return self._ray.get(reference, timeout=max(1.0, deadline - time.monotonic()))
            except errors.GetTimeoutError:
                raise UserError(
                    f"--ray: {name} did not start a process within {START:.0f} s; check its memory and logs"
                ) from None
            except (errors.TaskUnschedulableError, errors.NodeDiedError) as error:
                if number not in {node["NodeID"] for node in self.alive()}:
                    return None
                if time.monotonic() > deadline:
                    raise UserError(f"--ray: {name} accepts no task ({_line(error)}); check its logs") from None
                time.sleep(0.5)  # it has just joined, and part of the cluster does not know it yet
                reference = ask()
            except Exception as error:  # on the other machine, usually a failed import
                raise UserError(
                    f"--ray: {name} cannot run the code of {PACKAGE.parent} ({_line(error)}); every machine needs "
                    "it under this path, and Python with the same packages"
                ) from None


def look(token: Path, readable: Sequence[Path]) -> dict[str, Any]:
    """Report what this machine sees: a file that another machine has just written, the input, and the code."""
    import duckdb

    seen: dict[str, Any] = {"missing": [str(path) for path in readable if not path.exists()], "word": None}
    if token.is_file():
        seen["word"] = token.read_text(encoding="ascii")
    seen["versions"] = {
        "Python": "{}.{}".format(*sys.version_info),
        "DuckDB": duckdb.__version__,
        "NumPy": np.__version__,
        "code": code_hash()[:12],
    }
    return seen


def _judge(name: str, seen: dict[str, Any], folder: Path, word: str) -> None:
    if seen["word"] != word:
        raise UserError(
            f"--ray: {name} does not see what is written to {folder}; give --out in a folder that all "
            "machines share under one path"
        )
    if seen["missing"]:
        raise UserError(
            f"--ray: {name} does not see {seen['missing'][0]}; put it in a folder that all machines share "
            "under one path"
        )
    for what, mine in look(folder, ())["versions"].items():
        if (theirs := seen["versions"][what]) != mine:
            raise UserError(
                f"--ray: {name} has {what} {theirs}, this one {mine}; make them the same, or the bytes may differ"
            )


def _as_itself(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Runs on a node. A machine given up as lost may still be writing: each process uses its own temporary names."""
    files.write_as(f"{socket.gethostname()}-{os.getpid()}")
    return function(*arguments, **keywords)


@contextmanager
def open_nodes(
    address: str | None, folder: Path, readable: Sequence[Path], per_node: int | None = None
) -> Iterator[Nodes | None]:
    """The cluster at `address`, HOST:PORT or "local", checked; None without an address.

    folder: of the result. readable: what every machine reads. Raises UserError, within seconds, for an address that
    does not answer and for what `Nodes.check` finds.
    """
    if address is None:
        yield None
        return
    check_address(address)
    try:
        import ray
    except ImportError:
        raise UserError(f"{needs('--ray', 'ray', 'cluster')}, on every machine") from None
    paths = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    where: dict[str, Any] = {"address": address}
    if address == "local":
        where |= {"include_dashboard": False, "object_store_memory": _STORE}
    try:
        ray.init(
            **where,
            runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except Exception as error:  # of many kinds: another version of Ray, a machine outside of the cluster
        raise UserError(
            f"--ray {address}: cannot be joined ({_line(error)}); run this on a machine of the cluster, "
            "with the same version of Ray"
        ) from None
    try:
        nodes = Nodes(ray, per_node)
        nodes.check(folder, readable)
        yield nodes
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise UserError unless a gRPC server, as Ray's is, answers at HOST:PORT. "local" needs none."""
    if address == "local":
        return
    match = re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})", address)
    if not match or not 0 < int(match[2]) < 65536:
        raise UserError(f"--ray is {address!r}, expected HOST:PORT, as ray start prints it, or local")
    fix = "start it with ray start --head, or check the address"
    try:
        with socket.create_connection((match[1].strip("[]"), int(match[2])), ANSWER) as connection:
            connection.settimeout(ANSWER)
            # HTTP/2 begins with these bytes and an empty SETTINGS frame, and the server's first frame is one too.
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            frame = connection.recv(9)
    except TimeoutError:
        raise UserError(f"--ray {address}: does not answer within {ANSWER:.0f} s; {fix}") from None
    except OSError as error:
        raise UserError(f"--ray {address}: does not answer ({error.strerror or error}); {fix}") from None
    if len(frame) < 4 or frame[3] != 4:
        raise UserError(f"--ray {address}: something answers, but not Ray; {fix}")


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]
