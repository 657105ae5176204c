"""llama.cpp's own page, unchanged, over our server: two turns in Chromium.

The page comes from llama.cpp's server in the environment of `test_clients`; each of its other requests reaches ours.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.conftest import running
from tests.world.test_clients import PROGRAM
from tinyforge.backends import get_backend
from tinyforge.formats import load

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("uvicorn", reason="needs the extra [serve]")


@pytest.fixture
def llama_cpp(smollm2: Path) -> Iterator[str]:
    """The address of llama.cpp's server."""
    if not PROGRAM.exists() or subprocess.run([PROGRAM, "-c", "import xllamacpp"], capture_output=True).returncode:
        pytest.skip(f"xllamacpp is not installed for {PROGRAM}; see the head of test_clients.py")
    # Not as a command: that environment lacks what tinyforge needs.
    start = "import sys; sys.path.insert(0, sys.argv[1]); import llama_cpp; llama_cpp.serve(sys.argv[2])"
    command = [PROGRAM, "-c", start, ROOT / "bench", smollm2]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def test_two_turns(browser: Any, llama_cpp: str) -> None:
    storyteller = load(ROOT / "models" / "nanoeuler" / "storyteller", get_backend("numpy", "fp32", workers=1))
    sent: list[Any] = []

    def serve(route: Any) -> None:
        path, request = urlsplit(route.request.url).path, route.request
        if request.method == "GET" and (path == "/" or path.startswith("/_app/") or "." in path.rpartition("/")[2]):
            route.fulfill(
                response=route.fetch(url=llama_cpp + path, headers={**request.headers, "accept-encoding": "gzip"})
            )
            return
        if path == "/v1/chat/completions":
            sent.append(json.loads(request.post_data))
        route.continue_()

    with running(storyteller, name="storyteller") as server:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.route("**/*", serve)
        page.goto(server.url)
        for number, text in enumerate(("Tell me a story about a dog named Max.", "And a cat named Lily?")):
            box = page.locator("textarea").first
            box.fill(text)
            with page.expect_response("**/v1/chat/completions") as answered:
                box.press("Enter")
            assert answered.value.status == 200 and answered.value.finished() is None
            # Each reply is followed by the model's name and its speed, from the timings.
            page.wait_for_function("count => document.body.innerText.split(' t/s').length > count", arg=number + 1)
        shown = page.inner_text("body")
        page.close()
    assert len(sent) == 2 and all(body["tools"] and body["stream"] for body in sent)
    roles = [message["role"] for message in sent[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    reply = sent[1]["messages"][1]["content"]
    assert len(reply) > 20 and reply[:40] in shown and "Lily" in shown
