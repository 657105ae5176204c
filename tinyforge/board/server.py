"""The board's server, and its page in one file.

Python's own http.server is enough: a few people look at pages of some kilobytes. By default it listens on this machine
only. It answers GET only, and serves the page's files and, by name, the runs that `Board` has found: it never opens a
path that a client sends.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tinyforge.board.runs import CLOCK, Board, Run, text_of
from tinyforge.hosts import REFUSED, is_allowed

PAGE = Path(__file__).parent / "page"
JAVASCRIPT = "text/javascript"
TYPES = {"index.html": "text/html", "board.css": "text/css", "plot.js": JAVASCRIPT, "board.js": JAVASCRIPT}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MOST_POINTS, MOST_CURVES = 5000, 2000
LEVELS = (0.9, 0.98, 0.995)  # of smoothing, as the page offers them
POINTS = 1200  # of a curve in an exported page
MOST_CONNECTIONS = 64
SECONDS = 20  # for a request to arrive and for an answer to be taken, after which the client is disconnected


class BadRequest(Exception):
    """A request that cannot be answered; the message says why."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, host: str, port: int, board: Board, names: Sequence[str] = ()) -> None:
        self.board, self.names = board, (host, *names)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._idle: dict[socket.socket, float] = {}  # connections without a request, the oldest first, and since when
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            for oldest in list(self._idle)[:1]:  # it makes room
                self._disconnect(oldest)
            if not self._free.acquire(timeout=1):
                self.shutdown_request(request)
                return
        self.mark_idle(request)
        super().process_request(request, client_address)

    def mark_idle(self, connection: socket.socket) -> None:
        self._idle[connection] = time.monotonic()

    def mark_busy(self, connection: socket.socket) -> None:
        self._idle.pop(connection, None)

    def service_actions(self) -> None:
        """Disconnect clients whose request takes too long, however slowly its bytes trickle in."""
        for connection, since in list(self._idle.items()):
            if time.monotonic() - since > SECONDS:
                self._disconnect(connection)

    def _disconnect(self, connection: socket.socket) -> None:
        self.mark_busy(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.mark_busy(request)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: only clients that leave get here."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tinyforge", ""
    timeout = SECONDS
    wbufsize = -1  # headers and body in one packet: a second one would wait 40 ms for the first one's ACK

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.server.mark_idle(self.connection)

    def do_GET(self) -> None:
        self.server.mark_busy(self.connection)
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body is not read, and is no next request
        try:
            if not is_allowed(self.headers.get("Host", ""), self.server.names):
                return self._send_json(403, {"error": REFUSED})
            path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query, max_num_fields=2000)
            name = path.lstrip("/") or "index.html"
            if name in TYPES:
                return self._send(200, (PAGE / name).read_bytes(), TYPES[name])
            answer = ANSWERS.get(path)
            if answer is None:
                return self._send_json(404, {"error": "no such page"})
            with self.server.board.lock:
                found = answer(self.server.board, query)
            self._send_json(200, found)
        except (BadRequest, ValueError) as error:  # ValueError: from urllib, for a malformed URL
            self._send_json(400, {"error": str(error)})
        except OSError:  # the client has left
            raise
        except Exception:
            traceback.print_exc()
            self._send_json(500, {"error": "the board failed; its terminal says why"})

    def _send_json(self, status: int, content: Any) -> None:
        self._send(status, to_json(content).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: an open page polls every other second."""


# --- answers


Query = Mapping[str, Sequence[str]]


def runs_of(board: Board, query: Query) -> dict[str, Any]:
    more = board.refresh()
    return {**board.summary(), "more": more}


def curves_of(board: Board, query: Query) -> dict[str, Any]:
    """run, key, smooth_key: any number of each; smooth: for the smooth_keys; points; over, from, to: the range."""
    over = query.get("over", ["step"])[0]
    if over not in CLOCK:
        raise BadRequest(f"over expects one of {', '.join(CLOCK)}")
    points = int(min(max(_number(query, "points", 800), 2), MOST_POINTS))
    smooth = _number(query, "smooth", 0.0)
    if not (smooth == 0 or 0.001 <= smooth <= 0.9999):
        raise BadRequest("smooth expects 0, or a number from 0.001 to 0.9999")
    part = (over, _number(query, "from", float("-inf")), _number(query, "to", float("inf")))
    runs = [board.runs[name] for name in query.get("run", []) if name in board.runs]
    asked = [(key, 0.0) for key in query.get("key", [])] + [(key, smooth) for key in query.get("smooth_key", [])]
    if len(runs) * len(asked) > MOST_CURVES:
        raise BadRequest(f"{len(runs)} runs with {len(asked)} curves each are too many; choose fewer")
    known = ((run, key, level) for run in runs for key, level in asked if key in run.keys)
    return {"curves": [_curve(run, key, level, points, *part) for run, key, level in known]}


def _curve(run: Run, key: str, smooth: float, *how: Any) -> dict[str, Any]:
    return {"run": run.name, "key": key, "smooth": smooth, **run.curve(key, smooth, *how)}


def samples_of(board: Board, query: Query) -> dict[str, Any]:
    return {"samples": {name: board.runs[name].samples for name in query.get("run", []) if name in board.runs}}


def ledger_of(board: Board, query: Query) -> dict[str, Any]:
    return {"ledger": board.ledger()}


def texts_of(board: Board, query: Query) -> dict[str, Any]:
    """name: any number of those that /api/runs lists."""
    known = board.texts()
    return {"texts": {name: text_of(known[name]) for name in query.get("name", []) if name in known}}


ANSWERS = {
    "/api/runs": runs_of,
    "/api/curves": curves_of,
    "/api/samples": samples_of,
    "/api/ledger": ledger_of,
    "/api/texts": texts_of,
}


def _number(query: Query, name: str, default: float) -> float:
    try:
        found = float(query.get(name, [str(default)])[0])
    except ValueError:
        found = float("nan")
    if found != found:
        raise BadRequest(f"{name} expects a number")
    return found


def to_json(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


# --- one file


def exported(board: Board) -> str:
    """The page with its style, its scripts and all data inline. It needs no server and no network, and its policy
    enforces that: it allows only the page's own scripts and style, by hash."""
    while board.refresh(60.0):
        pass
    data = {
        **board.summary(),
        "more": False,
        "exported": True,
        "samples": {name: run.samples for name, run in board.runs.items()},
        "curves": [curve for run in board.runs.values() for curve in _all_curves(run)],
        "ledger": board.ledger(),
        "printed": {name: text_of(path) for name, path in board.texts().items()},
    }
    style, plot, script = ((PAGE / name).read_text(encoding="utf-8") for name in ("board.css", "plot.js", "board.js"))
    # A run's text must not be able to close the <script> element around it.
    block = to_json(data).replace("<", "\\u003c")
    exported_data = f'<script type="application/json" id="exported">{block}</script>'
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(plot)} {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    for old, new in (
        ("<!-- policy -->", f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ('<link rel="stylesheet" href="board.css">', f"<style>{style}</style>"),
        ('<script src="plot.js"></script>', f"<script>{plot}</script>"),
        ('<script src="board.js"></script>', f"{exported_data}\n<script>{script}</script>"),
    ):
        before, found, after = page.partition(old)
        assert found, f"index.html lacks {old}"
        page = before + new + after
    return page


def _all_curves(run: Run) -> list[dict[str, Any]]:
    """Every key as it is; keys of training steps at each level of smoothing too."""
    trained = {key for table in run.tables.values() if "lr" in table.keys for key in table.keys}
    return [
        _curve(run, key, level, POINTS)
        for key in sorted(run.keys - set(CLOCK))
        for level in ((0.0, *LEVELS) if key in trained else (0.0,))
    ]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
