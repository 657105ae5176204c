"""Lines over TCP, for ranks that no MPI has started: rank 0 listens, the others connect to it.

Messages are pickled, so both ends first prove that they know the run's key (HMAC, by `multiprocessing`); a launcher
passes it to the ranks that it starts. A port scanner or another program that connects delays nobody. Each rank has two
lines to rank 0: one for messages between the ranks, and one for the watch (watch.py), over which each end signals every
few seconds that it is alive.
"""

from __future__ import annotations

import errno
import socket
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from threading import Thread
from typing import Any

from tinyforge.errors import UserError

JOIN_SECONDS = 120.0  # for all ranks to start and find rank 0


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def lines_of_rank_0(
    size: int, address: tuple[str, int], key: bytes, seconds: float = JOIN_SECONDS
) -> tuple[list[Connection], list[Connection], list[str]]:
    """Wait for ranks 1 to size - 1. Returns the lines to them, the watch's lines, and the hosts of all ranks.

    Raises UserError where the port is taken, or where not all come within `seconds`.
    """
    host, port = address
    try:
        listener = Listener((host if host in ("127.0.0.1", "localhost") else "", port), backlog=2 * size)
    except OSError as error:
        fix = "set MASTER_PORT to another" if error.errno == errno.EADDRINUSE else "check MASTER_ADDR and MASTER_PORT"
        raise UserError(f"rank 0 cannot listen at {host}:{port}: {error.strerror}; {fix}") from error
    lines: dict[tuple[int, str], Connection] = {}
    hosts = {0: socket.gethostname()}
    until = time.monotonic() + seconds

    def greet(line: Connection) -> None:
        """Runs on its own thread: a stranger that connects and says nothing blocks only this thread."""
        with suppress(AuthenticationError, EOFError, OSError):  # not one of the ranks
            deliver_challenge(line, key)
            answer_challenge(line, key)
            rank, kind, hosts[rank] = line.recv()
            lines[rank, kind] = line

    with listener:
        accepting: Any = listener._listener._socket  # type: ignore[attr-defined]  # Listener itself has no timeout
        accepting.settimeout(0.05)
        while len(lines) < 2 * (size - 1):
            if time.monotonic() > until:
                missing = ", ".join(str(rank) for rank in range(1, size) if (rank, "watch") not in lines)
                raise UserError(
                    f"rank {missing} of {size} did not come to {host}:{port} within {seconds:.0f} s; start as many "
                    "ranks as WORLD_SIZE says, each with its own RANK"
                )
            with suppress(OSError):  # a timeout
                Thread(target=greet, args=(listener.accept(),), daemon=True).start()
    names = [hosts[rank] for rank in range(size)]
    for rank in range(1, size):
        lines[rank, "talk"].send(names)
    return ([lines[rank, "talk"] for rank in range(1, size)], [lines[rank, "watch"] for rank in range(1, size)], names)


def lines_to_rank_0(
    rank: int, address: tuple[str, int], key: bytes, seconds: float = JOIN_SECONDS
) -> tuple[Connection, Connection, list[str]]:
    """As `lines_of_rank_0`, for another rank."""
    made = []
    until = time.monotonic() + seconds
    for kind in ("talk", "watch"):
        while True:
            try:
                line = Client(address)
                if not line.poll(max(0.1, until - time.monotonic())):
                    raise TimeoutError(errno.ETIMEDOUT, "it accepts and says nothing")
                answer_challenge(line, key)
                deliver_challenge(line, key)
                break
            except AuthenticationError as error:
                raise UserError(
                    f"rank 0 at {address[0]}:{address[1]} has another TINYFORGE_KEY; give all ranks the same one"
                ) from error
            except (EOFError, OSError) as error:
                if time.monotonic() > until:
                    cause = getattr(error, "strerror", None) or "it hangs up"
                    raise UserError(
                        f"rank {rank}: nobody answers at {address[0]}:{address[1]} ({cause}); "
                        "check MASTER_ADDR and MASTER_PORT, and that rank 0 runs"
                    ) from error
                time.sleep(0.1)
        line.send((rank, kind, socket.gethostname()))
        made.append(line)
    if not made[0].poll(max(1.0, until - time.monotonic())):
        raise UserError(f"rank {rank}: not all ranks came within {seconds:.0f} s")
    return made[0], made[1], made[0].recv()
