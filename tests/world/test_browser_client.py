"""OpenAI's client from npm in a page of Chromium, served from another origin than the server's."""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import running, small  # noqa: F401  fixtures
from tests.world.artefacts import Package, _download
from tinyforge.formats import Loaded

CLIENT = Package("npm", "openai", "6.49.0", "e48de0f4c5dbecebdeb864233f5ea49be07cd3e0ff3bd3e1e6745dc5e168cced")
CALLS = """async (url) => {
    const { default: OpenAI } = await import("/package/index.mjs");
    const client = new OpenAI({ baseURL: url + "/v1", apiKey: "right", dangerouslyAllowBrowser: true, maxRetries: 0 });
    const messages = [{ role: "user", content: "How much is 13 plus 2?" }];
    const whole = await client.chat.completions.create({ model: "small", messages, temperature: 0 });
    let streamed = "";
    for await (const chunk of await client.chat.completions.create(
        { model: "small", messages, temperature: 0, stream: true }))
        streamed += chunk.choices[0]?.delta?.content ?? "";
    const response = await client.responses.create({ model: "small", input: messages[0].content, temperature: 0 });
    const events = [];
    for await (const event of await client.responses.create({ model: "small", input: "Hi", stream: true }))
        events.push(event.type);
    const vector = await client.embeddings.create({ model: "small", input: "Hi" });
    let wrong = "";
    try { await client.models.retrieve("absent"); } catch (error) { wrong = error.status + " " + error.code; }
    return { whole: whole.choices[0].message.content, streamed, response: response.output_text, wrong,
             last: events.at(-1), dimensions: vector.data[0].embedding.length };
}"""

pytest.importorskip("uvicorn", reason="needs the extra [serve]")


@pytest.fixture
def page_url(tmp_path: Path) -> Iterator[str]:
    """A server of the package's files and of an empty page."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with tarfile.open(_download(CLIENT, scratch)) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "index.html").write_text("<!doctype html><title>other origin</title>", encoding="utf-8")

    class Files(SimpleHTTPRequestHandler):
        extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}

        def log_message(self, format: str, *args: Any) -> None:
            pass

    files = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(tmp_path)))
    thread = threading.Thread(target=files.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{files.server_address[1]}"
    files.shutdown()
    thread.join()
    files.server_close()


def test_the_official_client_in_a_page_of_another_origin(browser: Any, small: Loaded, page_url: str) -> None:  # noqa: F811
    with running(small, key="right", origins=[page_url]) as server:
        page = browser.new_page()
        page.goto(page_url)
        found = page.evaluate(CALLS, server.url)
        page.close()
    assert found == {
        "whole": "13 14 15, so 15",
        "streamed": "13 14 15, so 15",
        "response": "13 14 15, so 15",
        "wrong": "404 model_not_found",
        "last": "response.completed",
        "dimensions": small.model.config.dim,
    }
