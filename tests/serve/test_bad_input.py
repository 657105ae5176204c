"""What a server meets: wrong bodies, huge ones, slow ones, clients that leave, pages of others. It answers in the
protocol's own form, tells nothing of the machine, and stays unharmed."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Running
from tinyforge.formats import Loaded
from tinyforge.tokenizers.chat_templates import TEMPLATES

pytest.importorskip("uvicorn", reason="needs the extra [serve]")
CHAT = {"messages": [{"role": "user", "content": "How much is 13 plus 2?"}], "temperature": 0}


def check_error(answer: tuple[int, Any, dict[str, str]], status: int, words: str = "") -> dict[str, Any]:
    """The error of an answer, which has the protocol's form and names nothing of the machine."""
    got, body, headers = answer
    assert got == status, body
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    text = json.dumps(body)
    assert words in body["error"]["message"]
    assert "Traceback" not in text and str(Path.cwd()) not in text and ".py" not in text and "site-packages" not in text
    assert headers["content-type"] == "application/json"
    return body["error"]


def alive(server: Running, settled: bool = True) -> None:
    assert not settled or server.settled()
    status, body, _ = server.post("/v1/chat/completions", CHAT)
    assert status == 200 and body["choices"][0]["message"]["content"] == "13 14 15, so 15"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b"[]", "a list, expected a JSON object"),
        (b'"x"', "a string, expected"),
        (b"null", "null, expected"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"messages": "\xc3"}', "not UTF-8"),
        (b"[" * 100000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "whole number of 5000 digits"),
        (b'{"messages": NaN}', "messages"),
        (b'{"messages": {}}', "messages"),
        (b'{"messages": [1]}', "messages.0"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages.0.content"),
        (b'{"messages": [{"role": "user"}]}', "content is null"),
        (b"{}", "messages"),
    ],
)
def test_wrong_bodies(server: Running, body: bytes, words: str) -> None:
    error = check_error(server.post("/v1/chat/completions", body), 400, words)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("top_p", []),
        ("max_tokens", 1.5),
        ("max_tokens", -2),
        ("max_tokens", "many"),
        ("n", 0),
        ("n", 10**15),
        ("seed", 1.5),
        ("seed", 2**63),
        ("stop", 5),
        ("stop", [""]),
        ("stop", [[]]),
        ("stream", "yes"),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"-1": 1}),
        ("logprobs", 3),
        ("model", 5),
        ("top_logprobs", 21),
        ("timeout", 0),
        ("timeout", -1),
        ("tinyforge", {"drafts": -1}),
        ("tinyforge", {"top": 99}),
        ("tinyforge", 5),
        ("stream_options", {"include_usage": 3}),
        ("min_p", 2),
        ("top_k", -5),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("ignore_eos", 1),
        ("min_tokens", 5),
        ("include_stop_str_in_output", True),
        ("chat_template", "{{ messages }}"),
        ("typ_p", 0.5),
    ],
)
def test_wrong_types_and_numbers_out_of_range_name_the_field(server: Running, field: str, value: Any) -> None:
    error = check_error(server.post("/v1/chat/completions", {**CHAT, field: value}), 400)
    assert error["param"] is not None and error["param"].split(".")[0] == field


def test_the_branches_of_a_union_are_no_part_of_a_fields_name(server: Running) -> None:
    assert check_error(server.post("/v1/completions", {"prompt": 5}), 400)["param"] == "prompt"
    content = {"messages": [{"role": "user", "content": 5}]}
    assert check_error(server.post("/v1/chat/completions", content), 400)["param"] == "messages.0.content"


def test_numbers_that_are_almost_zero(server: Running) -> None:
    greedy = server.post("/v1/completions", {"prompt": "The dog", "temperature": 0})[1]["choices"][0]["text"]
    for small in ({"temperature": 5e-324}, {"top_p": 0}, {"top_p": 5e-324}):
        assert server.post("/v1/completions", {"prompt": "The dog", **small})[1]["choices"][0]["text"] == greedy


def test_numbers_that_are_not_finite(server: Running) -> None:
    for text in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        body = b'{"messages": [{"role": "user", "content": "x"}], "temperature": ' + text + b"}"
        assert check_error(server.post("/v1/chat/completions", body), 400)["param"] == "temperature"


@pytest.mark.parametrize(
    "text", ["\x00\x01\x1b[2J\x7f", "\ud800", "\udc80 \udfff", "\u202eabc", "\ufeff", "\U0010ffff", "</s>" * 9]
)
def test_text_of_all_kinds_is_text(server: Running, small: Loaded, text: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 4}).encode()
    status, answer, _ = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    status, answer, _ = server.post("/tokenize", json.dumps({"content": text}).encode())
    assert status == 200 and not set(answer["tokens"]) & set(small.tokenizer.specials.values())
    assert server.post("/detokenize", answer)[0] == 200


def test_a_users_text_never_becomes_a_special_token(server: Running, small: Loaded) -> None:
    seen: list[Any] = []
    prepare = server.engine.scheduler.prepare
    server.engine.scheduler.prepare = lambda ids, *rest, **more: seen.append(list(ids)) or prepare(ids, *rest, **more)
    try:
        names = " ".join(small.tokenizer.specials)
        server.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": names}]})
        server.post("/v1/completions", {"prompt": names, "max_tokens": 1})
    finally:
        server.engine.scheduler.prepare = prepare
    chat, text = seen
    assert chat == TEMPLATES["alpaca"].encode(small.tokenizer, [(names, None)])
    assert not set(chat + text) & set(small.tokenizer.specials.values())


def test_addresses_and_methods_that_are_not_there(server: Running) -> None:
    import httpx

    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/images", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
        ("GET", "/%00", 404),
        ("GET", "/v1/models/../../x", 404),
        ("GET", "//etc/passwd", 404),
        ("GET", "/engine.py", 404),
        ("GET", "/%ff%fe", 404),
        ("PUT", "/v1/completions", 405),
        ("GET", "/v1/models/" + "x" * 5000, 404),
    ):
        answer = httpx.request(method, server.url + path, timeout=10)
        check_error((answer.status_code, answer.json(), dict(answer.headers)), status)


def test_a_body_that_is_too_large(server: Running) -> None:
    """Refused by what its head says, and while it comes; a gigabyte is not read."""
    import httpx

    check_error(server.post("/tokenize", b"x" * (2 << 20)), 413, "more than 1048576 bytes")

    def parts() -> Any:
        for _ in range(40):
            yield b"x" * 65536

    answer = httpx.post(server.url + "/tokenize", content=parts(), timeout=10)
    check_error((answer.status_code, answer.json(), dict(answer.headers)), 413)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n")
        sent, part, answered = 0, b"x" * (1 << 20), b""
        try:
            while sent < 1 << 30:
                client.sendall(part)
                sent += len(part)
        except OSError:
            pass
        try:
            answered = client.recv(4096)
        except OSError:  # reset: the answer had come before
            answered = b"HTTP/1.1 413"
        assert answered.startswith(b"HTTP/1.1 413") and sent < 64 << 20
    alive(server)


def test_heads_that_trickle_or_are_no_http(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyforge.serve.http import GuardedProtocol

    monkeypatch.setattr(GuardedProtocol, "head_seconds", 1.0)
    with start() as server:
        begun = time.monotonic()
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(20)]
        for client in slow[:10]:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: lo")
        slow[0].sendall(b"calhost\r\nX: ")
        for client in slow:
            assert client.recv(100) == b""
            client.close()
        assert time.monotonic() - begun < 10  # all at once: one after another they take 20 s
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            b"GET\r\n\r\n",
            b"\x00" * 1000,
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
                client.sendall(garbage)
                answer = b""
                try:
                    while part := client.recv(4096):
                        answer += part
                except OSError:
                    pass
                assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
                assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as kept:  # a second request that trickles
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert kept.recv(4096).startswith(b"HTTP/1.1 200")
            kept.sendall(b"GET /hea")
            while kept.recv(4096):
                pass
        alive(server)
        assert not server.app.engine.outstanding


def test_a_body_after_an_early_answer_has_a_deadline(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyforge.serve.http import GuardedProtocol

    monkeypatch.setattr(GuardedProtocol, "head_seconds", 1.0)
    with start() as server:
        clients = []
        for head in (b"POST /v1/completions", b"POST /nope", b"GET /health"):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=5)
            client.sendall(head + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 ")
            clients.append(client)
        begun = time.monotonic()
        for _ in range(8):
            time.sleep(0.2)
            for client in clients:
                with suppress(OSError):
                    client.send(b"x")
        for client in clients:
            with suppress(ConnectionResetError):
                while client.recv(4096):
                    pass
            client.close()
        assert time.monotonic() - begun < 4
        alive(server)


def test_a_client_that_does_not_take_its_answer_is_disconnected(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinyforge.serve import app
    from tinyforge.serve.http import GuardedProtocol

    monkeypatch.setattr(GuardedProtocol, "head_seconds", 0.5)
    monkeypatch.setattr(app, "SEND_SECONDS", 0.5)
    (tmp_path / "large.css").write_bytes(b"x" * (16 << 20))
    with start(page=tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"GET /large.css HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(2.5)
            count = 0
            with suppress(ConnectionResetError):
                while part := client.recv(1 << 20):
                    count += len(part)
        assert count < 16 << 20
        alive(server)


def test_a_new_connection_takes_the_place_of_the_oldest_idle_one(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyforge.serve import http

    monkeypatch.setattr(http, "raise_file_limit", lambda: http.OWN_FILES + 3 * 8 + 16)
    with start() as server:
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n{"
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(40)]
        for client in slow[:20]:
            with suppress(OSError):
                client.sendall(begun)
        alive(server)
        closed = 0
        for client in slow:
            client.setblocking(False)
            try:
                closed += client.recv(100) == b""
            except BlockingIOError:
                pass
            except OSError:
                closed += 1
            client.close()
        assert closed >= 24
        assert server.settled()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", 400),
        (b"Content-Length: 2\r\nContent-Length: 3\r\n", 400),
        (b"Content-Encoding: gzip\r\nContent-Length: 2\r\n", 415),
    ],
)
def test_lengths_that_conflict_and_bodies_that_are_compressed(server: Running, head: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n{}")
        answer = b""
        with suppress(ConnectionResetError):
            while b"}}" not in answer and (part := client.recv(4096)):
                answer += part
        assert answer.startswith(b"HTTP/1.1 %d" % status) and b'{"error":' in answer
        if status == 400:  # RFC 9112: whoever sent this may mean another request by what follows
            assert b"connection: close" in answer.lower()
            with suppress(ConnectionResetError):
                assert client.recv(100) == b""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt":[' + b"1," * 500_000 + b'"a"]}'),
        ("/v1/completions", b'{"prompt":[' + b"1," * 120_000 + b'"a"]}'),
        ("/v1/completions", b'{"prompt":[' + b"[]," * 30_000 + b'""]}'),
        ("/v1/completions", b'{"prompt":[' + b'"",' * 2000 + b"1]}"),
        ("/v1/chat/completions", b'{"messages":[' + b"{}," * 260_000 + b"{}]}"),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":[' + b"{}," * 120_000 + b"{}]}]}"),
        ("/v1/chat/completions", b'{"messages":[],"tools":[' + b"1," * 120_000 + b"1]}"),
        ("/v1/chat/completions", b'{"a":{' + b",".join(b'"%d":1' % i for i in range(70_000)) + b"}}"),
        ("/tokenize", b'{"content":"' + b" " * 1_000_000 + b'"}'),
    ],
)
def test_a_wrong_body_of_any_shape_is_refused_in_milliseconds(
    server: Running, path: str, body: bytes, takes_less_than: Callable[[float, Callable[[], object]], None]
) -> None:
    # Of this process, so of the server and its client.
    takes_less_than(0.3, lambda: check_error(server.post(path, body), 400))


def test_one_request_leaves_room_for_others(start: Callable[..., Any]) -> None:
    with start(rows=4, queue=16) as server:
        many = {"prompt": ["a"] * 11}
        check_error(server.post("/v1/completions", many), 400, "11 texts requested, a request may have 10")
        server.slow[0] = 0.02
        with ThreadPoolExecutor(1) as pool:
            most = {"prompt": ["a"] * 10, "max_tokens": 60, "ignore_eos": True}
            running = pool.submit(server.post, "/v1/completions", most)
            until = time.monotonic() + 10
            while server.engine.outstanding < 10 and time.monotonic() < until:
                time.sleep(0.01)
            check_error(server.post("/v1/completions", {"prompt": ["a"] * 6}), 429)
            alive(server, settled=False)
            assert not running.done() and running.result(30)[0] == 200


def test_attention_pictures_leave_most_of_the_time_to_texts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyforge.serve import app

    attention_of, spent, stop = app.attention_of, [0.0], False

    def slowly(*args: Any) -> Any:
        begun = time.monotonic()
        time.sleep(0.03)
        found = attention_of(*args)
        spent[0] += time.monotonic() - begun
        return found

    def ask() -> None:
        while not stop:
            assert server.post("/v1/attention", {"ids": [1] * 20})[0] == 200

    monkeypatch.setattr(app, "attention_of", slowly)
    with ThreadPoolExecutor(2) as pool:
        server.slow[0] = 0.01
        wish = {"prompt": "The dog", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        text = pool.submit(server.post, "/v1/completions", wish)
        while not server.engine.scheduler.busy:
            time.sleep(0.001)
        begun, pictures = time.monotonic(), pool.submit(ask)
        assert text.result(30)[0] == 200
        share = spent[0] / (time.monotonic() - begun)
        stop, server.slow[0] = True, 0.0
        pictures.result(30)
    assert 0.02 < share < 0.3
    assert server.settled()


def test_a_client_that_leaves_frees_its_row(start: Callable[..., Any]) -> None:
    with start(rows=2, queue=4) as server:
        server.slow[0] = 0.05
        for stream in (True, False):
            clients = []
            for _ in range(4):
                client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
                body = json.dumps(
                    {"prompt": "The dog", "max_tokens": 100, "stream": stream, "logit_bias": {"510": -100, "511": -100}}
                ).encode()
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
                    % (len(body), body)
                )
                clients.append(client)
            until = time.monotonic() + 10
            while server.engine.outstanding < 4 and time.monotonic() < until:
                time.sleep(0.01)
            assert server.engine.outstanding == 4
            for client in clients:
                client.close()
            assert server.settled()
        assert server.engine.ended == {"cancelled": 8}


def test_a_deadline_ends_a_text(start: Callable[..., Any]) -> None:
    import httpx

    with start(limits={"seconds": 1.0}) as server:
        server.slow[0] = 0.05
        long = {"prompt": "The dog", "max_tokens": 100, "logit_bias": {"510": -100, "511": -100}}
        error = check_error(server.post("/v1/completions", {**long, "timeout": 0.2}), 504)
        assert error["code"] == "timeout"
        check_error(server.post("/v1/completions", {**long, "timeout": 100}), 504)
        text = httpx.post(server.url + "/v1/completions", json={**long, "stream": True}, timeout=10).text
        assert "[DONE]" not in text and json.loads(text.strip().split("\n\n")[-1][6:])["error"]["code"] == "timeout"
        server.slow[0] = 0
        alive(server)


def test_a_fault_in_the_model_is_an_error_and_the_next_request_is_served(
    start: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with start() as server:
        decoder = server.engine.scheduler.decoder
        step_rows = decoder.step_rows

        def broken(*arguments: Any) -> Any:
            raise FloatingPointError("secret words of the machine")

        decoder.step_rows = broken
        error = check_error(server.post("/v1/chat/completions", CHAT), 500)
        assert "secret" not in error["message"]
        decoder.step_rows = step_rows
        alive(server)
    assert "secret words of the machine" in capsys.readouterr().err


def test_a_bug_in_a_route_is_told_without_its_traceback(start: Callable[..., Any]) -> None:
    with start() as server:
        server.app._check_length = lambda *_: 1 / 0
        check_error(server.post("/v1/chat/completions", CHAT), 500, "the server failed")
        del server.app._check_length
        alive(server)


def test_pages_of_others_may_not_call(server: Running, start: Callable[..., Any]) -> None:
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{server.port}"},
    ):
        check_error(server.post("/v1/chat/completions", CHAT, headers=headers), 403)
    own = {"Origin": server.url}
    status, _, got = server.post("/v1/chat/completions", CHAT, headers=own)
    assert status == 200 and "access-control-allow-origin" not in got
    assert server.post("/v1/chat/completions", CHAT, headers={"Host": "192.0.2.7:8000"})[0] == 200
    with start(origins=["https://page.example"], hosts=["my.name"]) as other:
        allowed = {"Origin": "https://page.example", "Host": "my.name:1"}
        status, _, got = other.post("/v1/chat/completions", CHAT, headers=allowed)
        assert status == 200 and got["access-control-allow-origin"] == "https://page.example"
        check_error(other.post("/v1/chat/completions", CHAT, headers={"Origin": "https://evil.example"}), 403)


def test_a_page_of_an_allowed_origin_may_send_the_headers_of_openais_client(start: Callable[..., Any]) -> None:
    import httpx

    asked = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
    for origins in (["https://page.example"], ["*"]):
        with start(origins=origins, key="k") as server:
            preflight = {
                "Origin": "https://page.example",
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": asked,
            }
            answer = httpx.options(server.url + "/v1/chat/completions", headers=preflight)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] in origins
            allowed = answer.headers["access-control-allow-headers"].replace(" ", "").split(",")
            assert set(asked.split(",")) <= set(allowed)
            wrong = httpx.post(server.url + "/v1/completions", headers={"Origin": "https://page.example"})
            assert wrong.status_code == 401 and wrong.headers["access-control-allow-origin"] in origins


@pytest.mark.parametrize("origin", ["localhost:5173", "http://a/", "http://A", "null", "http://a b", "http://a:x", ""])
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin: str) -> None:
    from tinyforge.errors import UserError
    from tinyforge.serve.__main__ import check, flags

    check(flags().parse_args(["--cors-origin", "*", "--cors-origin", "http://[::1]:80"]))
    with pytest.raises(UserError, match="--cors-origin is .*, expected"):
        check(flags().parse_args(["--cors-origin", origin]))


def test_the_page_is_served_with_a_strict_policy(start: Callable[..., Any], tmp_path: Path) -> None:
    import httpx

    (tmp_path / "index.html").write_text("<!doctype html><p>Hi</p>")
    (tmp_path / "js").mkdir()
    (tmp_path / "js" / "chat.js").write_text("'use strict'")
    (tmp_path.parent / "secret.txt").write_text("secret")
    with start(page=tmp_path, key="k") as server:
        index = httpx.get(server.url)
        assert index.text.endswith("Hi</p>") and index.headers["content-type"].startswith("text/html")
        policy = index.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
        script = httpx.get(server.url + "/js/chat.js")
        assert script.headers["content-type"].startswith("text/javascript")
        assert script.headers["x-content-type-options"] == "nosniff"
        for path in ("/../secret.txt", "/%2e%2e/secret.txt", "/js/%2e%2e/%2e%2e/secret.txt", "/js"):
            assert "secret" not in httpx.get(server.url + path, follow_redirects=False).text
    with start(page=tmp_path / "absent") as server:
        assert httpx.get(server.url).status_code == 404
        alive(server)


def test_attention_is_that_of_the_trace(server: Running, small: Loaded) -> None:
    from tinyforge.infer.trace import trace

    ids = small.tokenizer.encode("Where is Zobert?")
    expected = trace(small.model, ids).attention
    for layer, head in ((0, 0), (3, 2)):
        status, found, _ = server.post("/v1/attention", {"text": "Where is Zobert?", "layer": layer, "head": head})
        assert status == 200 and [t["id"] for t in found["tokens"]] == ids
        assert abs(expected[layer][head] - found["weights"]).max() < 1e-4
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert server.post("/v1/attention", {"messages": messages})[0] == 200
    for body, words in (
        ({"text": "x", "layer": 4}, "layer 4, the model has 0 to 3"),
        ({"text": "x", "head": 4}, "head 4"),
        ({}, "give one of"),
        ({"text": "x", "ids": [1]}, "give one of"),
        ({"ids": []}, "0 tokens"),
        ({"ids": [1] * 129}, "129 tokens, attention is shown for 1 to 128"),
        ({"ids": [512]}, "512"),
        ({"text": "ten " * 5000}, "at least"),
        ({"text": ""}, "0 tokens"),
    ):
        check_error(server.post("/v1/attention", body), 400, words)


def test_health_and_metrics(server: Running) -> None:
    import httpx

    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    before = httpx.get(server.url + "/metrics").text
    alive(server)
    after = httpx.get(server.url + "/metrics").text

    def value(text: str, name: str) -> float:
        return float(next((line.split()[-1] for line in text.splitlines() if line.startswith(name)), 0))

    name = "tinyforge_generated_tokens_total"
    assert value(after, name) - value(before, name) == 7
    assert value(after, "tinyforge_rows_busy") == 0 and value(after, "tinyforge_rows ") == 4
    name = 'tinyforge_requests_total{path="/v1/chat/completions",status="200"}'
    assert value(after, name) - value(before, name) == 1
    assert value(after, "tinyforge_first_token_seconds_count") >= 1 and "process_resident_memory_bytes" in after


def test_a_call_that_nobody_awaits_any_more_harms_no_text(start: Callable[..., Any]) -> None:
    """The handler of a request is cancelled while the engine's thread has yet to compute its attention."""
    with start() as server:
        loop, engine = server.engine._loop, server.engine

        def work() -> Any:
            yield

        async def call_and_leave() -> None:
            task = asyncio.ensure_future(engine.background(work()))
            await asyncio.sleep(0)
            task.cancel()

        server.slow[0] = 0.2
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, "/v1/chat/completions", CHAT)
            until = time.monotonic() + 10
            while not engine.outstanding and time.monotonic() < until:
                time.sleep(0.01)
            asyncio.run_coroutine_threadsafe(call_and_leave(), loop).result(10)
            assert answer.result(30)[0] == 200
        assert server.engine.ended == {"stop": 1}


def test_a_stream_whose_opening_nobody_takes_is_cancelled(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the opening, with the echo of a prompt, finds no room on its way: the client reads nothing."""
    from tinyforge.serve import app

    monkeypatch.setattr(app, "SEND_SECONDS", 0.2)
    with start() as server:
        server.slow[0] = 0.05

        async def stuck(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        async def ask() -> None:
            body = json.dumps(
                {
                    "prompt": "The dog",
                    "stream": True,
                    "echo": True,
                    "max_tokens": 100,
                    "logit_bias": {"510": -100, "511": -100},
                }
            ).encode()
            parts = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> Any:
                if parts:
                    return parts.pop()
                await asyncio.sleep(60)

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/completions",
                "raw_path": b"/v1/completions",
                "query_string": b"",
                "headers": [(b"host", b"localhost")],
            }
            await server.app.asgi(scope, receive, stuck)

        asyncio.run_coroutine_threadsafe(ask(), server.engine._loop).result(20)
        assert server.settled() and server.engine.ended == {"cancelled": 1}


def test_attention_while_the_server_shuts_down(start: Callable[..., Any]) -> None:
    with start() as server:
        server.engine.draining = True
        check_error(server.post("/v1/attention", {"text": "x"}), 503, "shutting down")
        check_error(server.post("/v1/chat/completions", CHAT), 503, "shutting down")


def test_an_engine_that_never_started_stops(small: Loaded) -> None:
    from tinyforge.infer.scheduler import Scheduler
    from tinyforge.serve.engine import Engine

    Engine(Scheduler(small.model, 2), small.tokenizer).stop()
