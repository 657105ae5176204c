"""Lines over TCP: the ranks find each other though strangers come to the port, and nobody waits forever."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinyforge.errors import UserError
from tinyforge.parallel.tcp import free_port, lines_of_rank_0, lines_to_rank_0

KEY = b"of this run"


def knock(port: int) -> socket.socket:
    """Connect to the port as soon as somebody listens there."""
    until = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.01)


def hangs_up(stranger: socket.socket) -> None:
    stranger.close()


def talks(stranger: socket.socket) -> None:
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")


def says_nothing(stranger: socket.socket) -> None:
    pass


@pytest.mark.parametrize("does", [hangs_up, talks, says_nothing])
def test_a_stranger_at_the_port_keeps_nobody_waiting(does: Callable[[socket.socket], None]) -> None:
    port = free_port()
    address = ("127.0.0.1", port)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(lines_of_rank_0, 2, address, KEY, 5.0)
        with knock(port) as stranger:
            does(stranger)
            talk, watch, hosts = lines_to_rank_0(1, address, KEY, 5.0)
            lines, watched, names = first.result()
    assert hosts == names == [socket.gethostname()] * 2 and len(lines) == len(watched) == 1
    for here, there in ((talk, lines[0]), (watch, watched[0])):
        here.send("heard")
        assert there.recv() == "heard"


def test_a_rank_that_does_not_come_is_named() -> None:
    port = free_port()
    with pytest.raises(UserError, match=f"rank 1, 2 of 3 did not come to 127.0.0.1:{port} within 0 s; start as many"):
        lines_of_rank_0(3, ("127.0.0.1", port), KEY, 0.2)


def test_another_key_is_refused() -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(lines_of_rank_0, 2, ("127.0.0.1", port), b"another", 1.0)
        with pytest.raises(UserError, match="has another TINYFORGE_KEY; give all ranks the same one"):
            lines_to_rank_0(1, ("127.0.0.1", port), KEY, 1.0)
        with pytest.raises(UserError, match="rank 1 of 2 did not come"):
            first.result()


def test_a_program_at_the_address_that_is_not_rank_0_keeps_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
        with pytest.raises(UserError, match=r"rank 1: nobody answers at .*\(it accepts and says nothing\); check"):
            lines_to_rank_0(1, address, KEY, 0.3)
    with socket.create_server(("127.0.0.1", 0)) as rude, ThreadPoolExecutor() as pool:
        pool.submit(lambda: [rude.accept()[0].close() for _ in range(2)])
        with pytest.raises(UserError, match="rank 1: nobody answers at .*; check MASTER_ADDR and MASTER_PORT"):
            lines_to_rank_0(1, rude.getsockname(), KEY, 0.2)
