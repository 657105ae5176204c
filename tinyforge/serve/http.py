"""uvicorn with bounds that it lacks (time for a request's head, for a body that is answered early, and for the last
bytes of an answer; connections; bytes read of a refused body), errors in the protocol's format, and a shutdown that
lets answers finish.

A connection works while its request has arrived and its answer has not ended; all others are idle. Their number is
bounded by the process's limit of open files. Where it is reached, a new connection takes the place of an idle one: the
oldest of the address that has the most.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tinyforge.serve.protocol import ApiError

HEAD_SECONDS = 10.0
"""For the head of a request, from the connection or the head's first byte; for the rest of a body whose answer has been
sent; and for a closed connection's last bytes."""
HEAD_BYTES = 32 << 10
REFUSED_BYTES = 8 << 20
"""Read of a body that is already answered, so that its sender receives the answer."""
MOST_FILES = 1 << 16
OWN_FILES = 64
"""Open files that are no connections."""


def raise_file_limit() -> int:
    """The number of files that this process may have open, raised as far as it may, up to MOST_FILES."""
    try:
        import resource
    except ImportError:  # Windows: sockets are no files there
        return 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = MOST_FILES
    if soft != resource.RLIM_INFINITY and soft < min(hard, MOST_FILES):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MOST_FILES), hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)


class Connections:
    """The idle connections by address, the oldest first. most: connections of all kinds."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._idle: dict[str, dict[GuardedProtocol, None]] = {}

    def add(self, connection: GuardedProtocol) -> None:
        self._idle.setdefault(connection.address, {})[connection] = None

    def remove(self, connection: GuardedProtocol) -> None:
        of_address = self._idle.get(connection.address, {})
        of_address.pop(connection, None)
        if not of_address:
            self._idle.pop(connection.address, None)

    def evict(self, newest: GuardedProtocol) -> bool:
        """Close the idle connection that has to go; returns False where there is none but `newest`."""
        if not self._idle:
            return False
        of_address = max(self._idle.values(), key=len)
        oldest = next(iter(of_address))
        if oldest is newest:
            return False
        self.remove(oldest)
        oldest.transport.abort()
        return True


class GuardedProtocol(H11Protocol):
    """uvicorn's h11 protocol with bounds on time, bytes and connections."""

    head_seconds = HEAD_SECONDS
    address = ""
    _timer: asyncio.TimerHandle | None = None
    _unread = 0

    def __init__(self, *args: Any, idle: Connections, **more: Any) -> None:
        super().__init__(*args, **more)
        self.idle = idle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.idle.add(self)
        if len(self.connections) > self.idle.most and not self.idle.evict(self):
            error = ApiError(503, "too many connections; try again later", "rate_limit_error")
            body = json.dumps(error.body).encode()
            transport.write(
                b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
            transport.close()
            return
        self._arm()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and self.conn.their_state is h11.SEND_BODY:
            self._unread += len(data)
            if self._unread > REFUSED_BYTES:
                self.transport.abort()
                return
        elif answered or self.cycle is None:
            self._arm()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()
            if self.conn.their_state is not h11.SEND_BODY:
                self.idle.remove(self)

    def on_response_complete(self) -> None:
        self._unread = 0
        unfinished = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        if self.transport.is_closing():
            self._arm()  # until its last bytes have been taken
            return
        if self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY:
            self.idle.add(self)  # and not the next request that had come already
        if self.cycle.response_complete and unfinished:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.idle.remove(self)
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._arm()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self.send_400_response("This server has no WebSockets.")

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(ApiError(400, msg).body).encode()
        with contextlib.suppress(h11.LocalProtocolError):
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            self.transport.write(self.conn.send(h11.Response(status_code=400, headers=headers)) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.conn.send(h11.EndOfMessage())
        self.transport.close()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            self.transport.abort()  # the client does not take the end of an answer
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()
            self._arm()


class Server(uvicorn.Server):
    """drain: called in the event loop at the first SIGTERM or Ctrl-C, after which nothing new is accepted, and the
    server ends with its last answer. A second signal ends it at once. ready: called when the server listens."""

    def __init__(self, app: Any, drain_seconds: float, ready: Callable[[], None], drain: Callable[[], None]) -> None:
        files = raise_file_limit()
        backlog = max(8, min(128, files // 16))  # of this many accepted connections none has been counted yet
        idle = Connections(max(8, files - OWN_FILES - 3 * backlog))
        config = uvicorn.Config(
            app,
            http=partial(GuardedProtocol, idle=idle),  # type: ignore[arg-type]
            backlog=backlog,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=int(drain_seconds) + 5,
        )
        super().__init__(config)
        self.ready, self.drain = ready, drain

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(2048)  # may wait; uvicorn's backlog bounds what is accepted at once
        self.ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but does not raise the signal again: a drained shutdown is a success."""
        self._loop = asyncio.get_running_loop()  # here, not in `startup`: a signal may come before that
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            self.force_exit = True
        else:
            self.should_exit = True
            self._loop.call_soon_threadsafe(self.drain)
