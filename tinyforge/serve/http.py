"""uvicorn with bounds that it lacks (time for a request's head, connections, bytes read of a refused body), errors in
the protocol's format, and a shutdown that lets answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""For the head of a request, from the connection or the head's first byte."""
HEAD_BYTES = 32 << 10
REFUSED_BYTES = 8 << 20
"""Read of a body that is already answered, so that its sender receives the answer."""
MOST_CONNECTIONS = 1024


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


class GuardedProtocol(H11Protocol):
    """uvicorn's h11 protocol with bounds on time, bytes and connections."""

    head_seconds = HEAD_SECONDS
    _timer: asyncio.TimerHandle | None = None
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            body = error_body("too many connections; try again later", "rate_limit_error")
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

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self.send_400_response("This server has no WebSockets.")

    def send_400_response(self, msg: str) -> None:
        body = error_body(msg)
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
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()


class Server(uvicorn.Server):
    """drain: called in the event loop at the first SIGTERM or Ctrl-C, after which nothing new is accepted, and the
    server ends with its last answer. A second signal ends it at once. ready: called when the server listens."""

    def __init__(self, app: Any, drain_seconds: float, ready: Callable[[], None], drain: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=GuardedProtocol,
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
