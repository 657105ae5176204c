"""A server that speaks as tinyforge.serve does, with replies that a test has written down: also those that no model
gives when one expects them, such as an error in the middle."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "tinyforge/serve/page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
ABOUT = {
    "model": "nanoeuler",
    "parameters": 1053824,
    "context": 128,
    "vocab": 512,
    "template": "alpaca",
    "chat": True,
    "system_prompt": True,
    "prediction_heads": 4,
    "most_drafts": 3,
    "layers": 2,
    "heads": 3,
    "attention": True,
    "attention_tokens": 64,
    "limits": {"max_tokens": 128, "n": 8, "top_logprobs": 20},
}


class FakeServer(ThreadingHTTPServer):
    """replies: taken in turn, a list of chunks each; the last one again and again. A chunk is a text, "<gate>" to wait
    for `gate`, or what fails: an int is a status for the whole request, "<error>" an error in the middle, "<cut>" the
    end of the connection. asked: bodies of requests. gone: set when a client has left in the middle."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: list[list[Any]] = [["Hello", " there"]]
        self.asked: list[dict[str, Any]] = []
        self.about: dict[str, Any] = dict(ABOUT)
        self.gate, self.gone = threading.Event(), threading.Event()
        self.codes: dict[int, dict[str, Any]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


def token(place: int, text: str) -> dict[str, Any]:
    others = [{"id": 900 + i, "text": f" other{i}", "bytes": [], "probability": 0.2 / (i + 2)} for i in range(3)]
    refused = {"head": 2, "id": 99, "text": " tree"} if place == 1 else None
    return {
        "id": 100 + place,
        "text": text,
        "bytes": list(text.encode()),
        "logprob": -0.5,
        "probability": 0.6,
        "runners_up": others,
        "head": place % 3,
        "refused": refused,
    }


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._json(200, {"object": "list", "data": [{"id": "small", "tinyforge": self.server.about}]})
        file = PAGE / (self.path.lstrip("/") or "index.html")
        if file.parent != PAGE or not file.is_file():
            return self._json(404, {"error": {"message": "not here", "code": None}})
        self._send(200, file.read_bytes(), TYPES[file.suffix], {"Content-Security-Policy": POLICY})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/attention":
            return self._attention(body)
        self.server.asked.append(body | {"authorization": self.headers.get("Authorization")})
        if body.get("tinyforge", {}).get("score"):
            return self._score(body)
        replies = self.server.replies
        self._reply(body, replies.pop(0) if len(replies) > 1 else replies[0])

    def _attention(self, body: dict[str, Any]) -> None:
        words = [w for m in body["messages"] for w in m["content"].split()]
        ids = [1] * (len(words) - 2) + [100, 101]
        n = len(ids)
        weights = [[round(1 / (t + 1), 4) if s <= t else 0 for s in range(n)] for t in range(n)]
        self._json(
            200,
            {
                "object": "attention",
                "layer": body["layer"],
                "head": body["head"],
                "layers": 2,
                "heads": 3,
                "causal": True,
                "tokens": [{"id": i, "text": w} for i, w in zip(ids, words, strict=True)],
                "weights": weights,
            },
        )

    def _score(self, body: dict[str, Any]) -> None:
        parts = re.findall(r" ?\S+|\s+", body["messages"][-1]["content"])
        tokens = [token(place, text) | {"head": 0, "refused": None} for place, text in enumerate(parts)]
        self._json(200, {"choices": [{"index": 0, "tinyforge": {"tokens": tokens}}]})

    def _reply(self, body: dict[str, Any], chunks: list[Any]) -> None:
        if isinstance(chunks[0], int):
            error = {"message": f"failed with {chunks[0]}", "type": "server_error", "param": None, "code": None}
            extra = {"Retry-After": "7"} if chunks[0] == 429 else {}
            return self._json(chunks[0], {"error": error | self.server.codes.get(chunks[0], {})}, extra)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self._stream(body, chunks)
        except OSError:
            self.server.gone.set()
        self.close_connection = True

    def _stream(self, body: dict[str, Any], chunks: list[Any]) -> None:
        inside = body.get("tinyforge", {}).get("look_inside")
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        count = 0
        for chunk in chunks:
            if chunk == "<gate>":
                while not self.server.gate.wait(0.05):  # a client that has left is only seen by writing to it
                    self.wfile.write(b": still here\n\n")
                continue
            if chunk == "<cut>":
                return
            if chunk == "<error>":
                return self._event({"error": {"message": "the middle failed", "type": "server_error", "code": None}})
            choice: dict[str, Any] = {"index": 0, "delta": {"content": chunk}, "finish_reason": None}
            if inside:
                choice["tinyforge"] = {"tokens": [token(count, chunk)]}
            self._event({"choices": [choice]})
            count += 1
        last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        if inside:
            last["tinyforge"] = {
                "prompt_tokens": 31,
                "cached_tokens": 8,
                "tokens": count,
                "passes": 5,
                "drafted": [5, 4, 3],
                "accepted": [4, 3, 2],
                "seconds_to_first": 0.004,
                "tokens_per_second": 2100.0,
            }
        self._event(last)
        self._event({"choices": [], "usage": {"prompt_tokens": 31, "completion_tokens": count, "total_tokens": 40}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def _json(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(content).encode(), "application/json", headers or {})

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers.items()):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
