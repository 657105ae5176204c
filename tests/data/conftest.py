"""A web host on loopback: real HTTP, files laid out as the real hosts have them, and every fault on request."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tinyforge.data.source import read_source
from tinyforge.errors import UserError

ROOT = Path(__file__).parents[2]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fault_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The message of the UserError that a call raises, which is one line."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message


@cache
def etag_of(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:12]}"'


Fault = Callable[["_Handler", bytes], None]


@dataclass
class Request:
    """What came in, and how many bytes of a body went out."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0


@dataclass
class Host:
    """Files by path, and for each path the faults that its next GETs meet, one each."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    log: list[Request] = field(default_factory=list)
    pace: float = 0.0  # seconds between two pieces of 16 KB
    etags: bool = True
    url: str = ""

    def publish(self, repository: str, files: dict[str, bytes]) -> None:
        """A data set as Hugging Face has it: a list with sizes and hashes, and files after a redirect."""
        folders: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for path, content in files.items():
            folder = path.rpartition("/")[0]
            digest = hashlib.sha256(content).hexdigest()
            folders[folder].append({"type": "file", "path": path, "size": len(content), "lfs": {"oid": digest}})
            self.files[f"/cdn/{digest}"] = content
            self.redirects[f"/datasets/{repository}/resolve/main/{path}"] = f"{self.url}/cdn/{digest}"
        for folder, entries in folders.items():
            entries.insert(0, {"type": "directory", "path": "somewhere", "size": 0})
            self.files[f"/api/datasets/{repository}/tree/main/{folder}".rstrip("/")] = json.dumps(entries).encode()

    def kill(self, process: subprocess.Popen[Any], after: float) -> None:
        """SIGKILL a run `after` seconds from its first request, or from when it must be past any."""
        seen, latest = len(self.log), time.monotonic() + 2.0
        while len(self.log) == seen and process.poll() is None and time.monotonic() < latest:
            time.sleep(0.01)
        time.sleep(after)
        process.kill()
        process.communicate()

    def check_kills(self, module: str, flags: Sequence[str], folder: Path, pace: float, seed: int) -> None:
        """A source that is killed four times at random moments ends with the bytes of one that was not."""
        command = [sys.executable, "-m", module, "--base-url", self.url, *flags, "--out"]
        whole, killed = folder / "whole", folder / "killed"
        run = partial(subprocess.Popen, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert run([*command, str(whole)]).wait() == 0
        moments = random.Random(seed)
        self.pace = pace
        for _ in range(4):
            process = run([*command, str(killed)])
            self.kill(process, moments.uniform(0.0, 1.0))
            if (killed / "source.json").exists():
                read_source(killed, verify=True)  # whatever can be seen is whole
        assert run([*command, str(killed)]).wait() == 0
        assert contents(killed) == contents(whole)

    def gets(self, path: str = "") -> list[Request]:
        return [request for request in self.log if request.method == "GET" and path in request.path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    host: Host
    request_log: Request

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        host, path = self.host, self.path.partition("?")[0]
        self.request_log = Request(self.command, path, dict(self.headers))
        host.log.append(self.request_log)
        if path in host.redirects:
            self.start(302, {"Location": host.redirects[path], "Content-Length": "0"})
        elif self.command == "GET" and host.faults[path]:
            host.faults[path].pop(0)(self, host.files.get(path, b""))
        elif path not in host.files:
            self.start(404, {"Content-Length": "0"})
        else:
            self.serve(host.files[path])

    def serve(self, content: bytes, ranges: bool = True, if_range: bool = True) -> None:
        """A proper answer, or one of a server that ignores Range or If-Range."""
        headers = {"Accept-Ranges": "bytes"}
        etag = etag_of(content)
        if self.host.etags:
            headers["ETag"] = etag
        expected = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not ranges or (if_range and self.headers.get("If-Range", etag) != etag):
            expected = None
        if expected and int(expected[1]) >= len(content):
            self.start(416, {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"})
            return
        begin, end = 0, len(content)
        if expected:
            begin, end = int(expected[1]), min(int(expected[2] or end) + 1, end)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self.start(206 if expected else 200, headers | {"Content-Length": str(end - begin)})
        self.body(content[begin:end])

    def start(self, status: int, headers: dict[str, str]) -> None:
        self.request_log.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def body(self, content: bytes) -> None:
        if self.command == "HEAD":
            return
        for at in range(0, len(content), 1 << 14):
            if self.host.pace:
                time.sleep(self.host.pace)
            try:
                self.wfile.write(content[at : at + (1 << 14)])
            except OSError:  # who asked is gone
                self.close_connection = True
                return
            self.request_log.sent += len(content[at : at + (1 << 14)])


def server_of(host: Host) -> ThreadingHTTPServer:
    """A server of the host's files on a port of its own, not serving yet."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"host": host}))
    server.daemon_threads = True
    host.url = f"http://127.0.0.1:{server.server_port}"
    return server


# --- faults ----------------------------------------------------------------------------------------------------------


def status(code: int, **headers: str) -> Fault:
    return lambda handler, _: handler.start(
        code, {"Content-Length": "0"} | {k.replace("_", "-"): v for k, v in headers.items()}
    )


def cut(at: int) -> Fault:
    """The connection ends after `at` bytes of the body."""

    def fault(handler: _Handler, content: bytes) -> None:
        etag = etag_of(content)
        handler.start(200, {"ETag": etag, "Content-Length": str(len(content))})
        handler.body(content[:at])
        handler.wfile.flush()
        handler.close_connection = True

    return fault


def other(content: bytes, **how: bool) -> Fault:
    """Something else under the same name; with ranges=False or if_range=False as a server that ignores these."""
    return lambda handler, right: handler.serve(content or right, **how)


def stalled(seconds: float) -> Fault:
    """Half of the body, and then nothing for a while."""

    def fault(handler: _Handler, content: bytes) -> None:
        handler.start(200, {"Content-Length": str(len(content))})
        handler.body(content[: len(content) // 2])
        time.sleep(seconds)
        handler.close_connection = True

    return fault


@dataclass(frozen=True)
class Faults:
    """The faults above, for tests that get them as a fixture."""

    status: Callable[..., Fault] = status
    cut: Callable[..., Fault] = cut
    other: Callable[..., Fault] = other
    stalled: Callable[..., Fault] = stalled


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def new_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Host]]:
    """Starts hosts, each on a port of its own."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    servers: list[ThreadingHTTPServer] = []

    def start() -> Host:
        host = Host()
        server = server_of(host)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return host

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def host(new_host: Callable[[], Host]) -> Host:
    return new_host()
