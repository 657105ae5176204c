"""The benchmark of the server next to llama.cpp's: what it measures of both, and what it refuses."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import serve
from bench.harness import LLAMA_CPP, OURS
from tinyforge.errors import UserError


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        time.sleep(0.02 + 0.2 * (len(asked["prompt"]) > 900))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (json.dumps({"choices": [{"text": "x"}]}), "[DONE]"):
            event = f"data: {piece}\n\n"
            self.wfile.write(f"{len(event):x}\r\n{event}\r\n".encode())
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # clients that connect at once


@pytest.mark.slow  # a second for each turn of each server
def test_both_servers_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers: list[Any] = []
    commands: list[list[str]] = []

    @contextmanager
    def serving(command: Sequence[Any], threads: int | None) -> Iterator[int]:
        assert threads == 1
        commands.append([str(word) for word in command])
        with Server(("127.0.0.1", 0), Handler) as server:
            servers.append(server)
            server.asked = []  # type: ignore[attr-defined]
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server.server_address[1]
            server.shutdown()

    monkeypatch.setattr(serve, "serving", serving)
    monkeypatch.setattr(serve, "version", lambda _: "1.2")
    monkeypatch.setattr("tinyforge.report.check_before", lambda *_: None)
    file = str(tmp_path / "m.gguf")
    flags = ["--checkpoint", file, "--peer", "llamacpp", "--threads", "1", "--rounds", "2", "--json"]
    assert serve.main(flags) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert commands[0][-2:] == ["--checkpoint", file] and commands[1][-2:] == [file, "1"]
    assert found["versions"]["xllamacpp"] == "1.2" and found["threads"] == 1
    for name, row in found["results"].items():
        assert row.keys() == {OURS, LLAMA_CPP, "turns"} and len(row["turns"][OURS]) == 2, name
        least = 0 if name == "long_per_second_meanwhile" else 1e-9  # on a busy machine none may end meanwhile
        assert min(row[OURS], row[LLAMA_CPP]) >= least
        assert name in err
    assert found["results"]["long_first_ms"][OURS] > 200 and found["results"]["short_ms"][OURS] > 20
    for server in servers:
        prompts = Counter(asked["prompt"] for asked in server.asked)
        assert max(prompts.values()) == 1, "a prompt that was cached"
        assert sum(asked["max_tokens"] == 16 for asked in server.asked) == 2 * 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", "torch"], "with --no-http the peer is torch, without it llamacpp"),
        (["--no-http", "--peer", "llamacpp"], "with --no-http the peer is torch, without it llamacpp"),
        (["--peer", "llamacpp"], "both read --checkpoint FILE.gguf"),
        (["--peer", "llamacpp", "--checkpoint", "small"], "both read --checkpoint FILE.gguf"),
    ],
)
def test_a_peer_that_is_none_is_refused(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyforge.report.check_before", lambda *_: None)
    with pytest.raises(UserError, match=message):
        serve.main(flags)


def test_llama_cpp_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(UserError, match="llama.cpp is not installed; pip install xllamacpp"):
        serve.main(["--peer", "llamacpp"])
