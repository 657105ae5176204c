"""The configurations of proxies in docs/serving.md, run by them: streams, limits and a browser's origin go through."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import small, start  # noqa: F401  fixtures
from tinyforge.formats import Loaded

ROOT = Path(__file__).resolve().parents[2]
httpx = pytest.importorskip("httpx", reason="needs the extra [dev]")


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def nginx(program: str, block: str, port: int, folder: Path) -> list[str]:
    # Without TLS: a certificate for this test would prove nothing of the rest.
    block = re.sub(r" *ssl_certificate.*\n", "", block).replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    paths = "".join(f"{n}_temp_path {folder / n};" for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    own = f"daemon off; pid {folder}/pid; error_log {folder}/log; events {{}}\n"
    (folder / "nginx.conf").write_text(f"{own}http {{ access_log off; {paths}\n{block}}}\n", encoding="utf-8")
    return [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "log")]


def caddy(program: str, block: str, port: int, folder: Path) -> list[str]:
    block = block.replace("my.name", f"http://my.name:{port}, http://127.0.0.1:{port}, http://evil.example:{port}")
    (folder / "Caddyfile").write_text("{\n    admin off\n}\n" + block, encoding="utf-8")
    return [program, "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


@pytest.fixture(params=[("nginx", nginx, "nginx-light"), ("caddy", caddy, "caddy")], ids=["nginx", "caddy"])
def proxied(
    request: pytest.FixtureRequest,
    start: Callable[..., Any],  # noqa: F811
    small: Loaded,  # noqa: F811
    tmp_path: Path,
) -> Iterator[tuple[Any, str]]:
    """A server, and the address of a proxy in front of it, as the page configures it."""
    name, command, package = request.param
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if program is None:
        pytest.skip(f"no {name} here; apt-get install {package}")
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"```{name}\n(.*?)```", page, re.S)
    port = free_port()
    with start(hosts=["my.name"]) as server, open(tmp_path / "stderr", "wb") as log:
        block = block.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        own = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
        process = subprocess.Popen(command(program, block, port, tmp_path), stderr=log, env=own)
        try:
            until = time.monotonic() + 20
            while time.monotonic() < until and process.poll() is None:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            assert process.poll() is None, (tmp_path / "stderr").read_text()
            yield server, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


def test_the_documented_proxy(proxied: tuple[Any, str]) -> None:
    server, url = proxied
    named = {"Host": "my.name"}
    assert httpx.get(url + "/health", headers=named).json() == {"status": "ok"}
    assert httpx.get(url + "/health", headers={"Host": "evil.example"}).status_code == 403
    page = {**named, "Origin": "https://my.name"}
    body = {"messages": [{"role": "user", "content": "How much is 13 plus 2?"}], "temperature": 0}
    reply = httpx.post(url + "/v1/chat/completions", json=body, headers=page, timeout=30)
    assert reply.json()["choices"][0]["message"]["content"] == "13 14 15, so 15"
    assert httpx.post(url + "/tokenize", content=b"x" * (2 << 20), headers=named).status_code == 413
    server.slow[0] = 0.05
    wish = {"prompt": "The dog", "max_tokens": 40, "ignore_eos": True, "stream": True}
    arrived = []
    with httpx.stream("POST", url + "/v1/completions", json=wish, headers=named, timeout=30) as answer:
        for line in answer.iter_lines():
            if line:
                arrived.append(time.monotonic())
    assert arrived[-1] - arrived[0] > 1 and len(set(arrived)) > 10  # as they come, not all at the end
    server.slow[0] = 0
    assert server.settled()
