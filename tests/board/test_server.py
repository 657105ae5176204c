"""The board's server: GET alone, this machine alone, no path of a client's is opened."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tinyforge.board.runs import Board
from tinyforge.board.server import PAGE, Server, exported


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b & <c>"):
        (tmp_path / name).mkdir()
        rows = ({"step": step, "tokens": step, "loss": 1.0 / step, "lr": 0.1, "seconds": 1.0} for step in range(1, 51))
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(*getattr(request, "param", ("127.0.0.1", 0)), Board(folder), ["My.Name"])
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def get(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def ask(server: Server, path: str) -> Any:
    status, _, body = get(server, path)
    assert status == 200, body
    return json.loads(body)


def test_runs_and_curves(server: Server) -> None:
    found = ask(server, "/api/runs")
    assert [run["name"] for run in found["runs"]] == ["a", "b & <c>"] and not found["more"]
    assert found["runs"][0]["rows"] == 50 and found["runs"][0]["last"]["step"] == 50
    runs = f"run=a&run={quote('b & <c>')}&run=absent"
    curves = ask(server, f"/api/curves?{runs}&key=loss&key=absent&smooth_key=loss&smooth=0.9&points=10")["curves"]
    assert [(c["run"], c["smooth"]) for c in curves] == [("a", 0), ("a", 0.9), ("b & <c>", 0), ("b & <c>", 0.9)]
    assert curves[0]["value"][0] == 1.0 and curves[0]["step"][-1] == 50 and len(curves[0]["value"]) <= 12
    assert ask(server, "/api/samples?run=a") == {"samples": {"a": []}}
    assert ask(server, "/api/ledger") == {"ledger": None}


@pytest.mark.parametrize(
    "query", ["points=x", "smooth=2", "smooth=nan", "over=loss", "from=x", "run=" + "&run=a" * 3000, "smooth=-1"]
)
def test_a_wrong_question_is_said_to_be_one(query: str, server: Server) -> None:
    status, _, body = get(server, f"/api/curves?{query}")
    assert status == 400 and json.loads(body)["error"]


@pytest.mark.parametrize(
    "path", ["/../runs.py", "/..%2fruns.py", "/etc/passwd", "/a/metrics.jsonl", "/server.py", "/api/", "//board.css/x"]
)
def test_no_other_path_leads_anywhere(path: str, server: Server) -> None:
    assert get(server, path)[0] in (400, 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD"])
def test_nothing_but_get(method: str, server: Server) -> None:
    assert get(server, "/api/runs", method)[0] == 501


@pytest.mark.parametrize("server", [("127.0.0.1", 0), ("0.0.0.0", 0)], indirect=True)
def test_pages_of_other_sites_are_kept_out(server: Server) -> None:
    status, headers, _ = get(server, "/")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and "script-src 'self'" in policy and "unsafe" not in policy
    status, _, body = get(server, "/api/runs", Host="evil.example:8321")
    assert status == 403 and "--allow-host NAME" in json.loads(body)["error"]
    for host in ("localhost:1", "[::1]:1", "192.0.2.7:8321", "my.name:8321"):
        assert get(server, "/api/runs", Host=host)[0] == 200, host


def test_garbage_and_a_client_that_leaves_harm_nobody(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (b"\x00\xff\r\n\r\n", b"GET", b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n"):
        with socket.create_connection(server.server_address[:2], timeout=5) as client:
            client.sendall(text)
    assert ask(server, "/api/runs")["runs"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_answered_and_told(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server.board, "ledger", lambda: {}["a bug"])
    status, _, body = get(server, "/api/ledger")
    assert status == 500 and "its terminal says why" in json.loads(body)["error"]
    assert "KeyError: 'a bug'" in capsys.readouterr().err
    assert ask(server, "/api/runs")["runs"]


def test_the_page_asks_for_nothing_from_elsewhere_and_has_no_script_in_its_html() -> None:
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    texts = html + "".join((PAGE / name).read_text(encoding="utf-8") for name in ("board.css", "board.js", "plot.js"))
    assert " style=" not in html and "<style" not in html and " onclick" not in html
    assert "innerHTML" not in texts and "eval(" not in texts and "@import" not in texts and "url(http" not in texts
    assert texts.count("http") == texts.count("http://www.w3.org/2000/svg")


def test_an_export_names_the_hashes_of_its_own_scripts(folder: Path) -> None:
    page = exported(Board(folder))
    assert page.count("sha256-") == 3 and "unsafe" not in page and 'src="' not in page and "stylesheet" not in page
    assert len(page) < 200_000


def test_cards_and_logs(server: Server, folder: Path) -> None:
    """By name, as text, the oldest log first; a bar that was drawn over itself is shown as it ended."""
    assert ask(server, "/api/runs")["texts"] == {}
    (folder / "a" / "README.md").write_text("# A card", encoding="utf-8")
    (folder / "logs").mkdir()
    for age, (name, text) in enumerate({"sft.log": b"10%\r100%\nend \xff \x1b[31m", "b.log": b"x" * 99_999}.items()):
        (folder / "logs" / name).write_bytes(text)
        os.utime(folder / "logs" / name, (age, age))
    (folder / "logs" / "secret.txt").write_text("no log", encoding="utf-8")
    assert ask(server, "/api/runs")["texts"].keys() == {"a: card", "sft.log", "b.log"}
    assert list(ask(server, "/api/runs")["texts"])[1:] == ["sft.log", "b.log"]
    found = ask(server, f"/api/texts?name={quote('a: card')}&name=sft.log&name=b.log&name=secret.txt")["texts"]
    assert found.keys() == {"a: card", "sft.log", "b.log"} and found["a: card"] == "# A card"
    assert found["sft.log"] == "100%\nend \ufffd [31m"
    assert found["b.log"].startswith("(34,463 bytes before this are left out)\nxxx") and len(found["b.log"]) < 65_600
    assert ask(server, f"/api/texts?name={quote('../conftest.py')}")["texts"] == {}
    assert "100%\\nend" in exported(Board(folder))


def test_links_out_of_the_folder_are_not_followed(folder: Path) -> None:
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    secret = outside / "secret.log"
    secret.write_text('{"step": 1, "tokens": 1, "seconds": 1.0, "secret": 7.0}\n', encoding="utf-8")
    (folder / "logs").mkdir()
    (folder / "logs" / "own.log").write_text("own", encoding="utf-8")
    (folder / "linked").mkdir()
    for link in ("logs/x.log", "a/README.md", "a/samples.jsonl", "a/run.json", "ledger.json", "linked/metrics.jsonl"):
        (folder / link).symlink_to(secret)
    (folder / "b & <c>" / "README.md").symlink_to(folder / "logs" / "own.log")  # stays inside
    board = Board(folder)
    while board.refresh():
        pass
    assert set(board.texts()) == {"own.log", "b & <c>: card"} and board.ledger() is None
    assert "secret" not in json.dumps(board.summary()) and board.runs["linked"].count == 0
    assert not board.runs["a"].samples and not board.runs["a"].about


def test_clients_that_trickle_lock_nobody_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyforge.board import server as module

    clients = [socket.create_connection(server.server_address[:2], timeout=10) for _ in range(80)]
    for client in clients:
        client.sendall(b"GET / HT")
    assert get(server, "/")[0] == 200
    monkeypatch.setattr(module, "SECONDS", 0.3)
    for _ in range(10):
        time.sleep(0.1)
        for client in clients:
            with suppress(OSError):
                client.sendall(b"T")
    for client in clients:
        with suppress(ConnectionResetError):
            assert client.recv(100) == b""
        client.close()
    assert get(server, "/")[0] == 200


def test_a_body_is_no_next_request(server: Server) -> None:
    inner = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(server.server_address[:2], timeout=10) as client:
        head = b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % len(inner) + inner)
        answer = b""
        with suppress(ConnectionResetError):
            while part := client.recv(65536):
                answer += part
    assert answer.count(b"HTTP/1.1 200") == 1
