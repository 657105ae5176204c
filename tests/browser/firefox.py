"""Firefox over Marionette, its own protocol for automation: messages of JSON, each preceded by its length."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("firefox", "firefox-esr")
SECONDS = 60


class Firefox:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.received, self.number = connection, b"", 0
        self.receive()  # the greeting
        self("NewSession", capabilities={"alwaysMatch": {"acceptInsecureCerts": True}})

    def __call__(self, name: str, **arguments: Any) -> Any:
        """The result of a command of WebDriver. Raises: RuntimeError with Firefox's error."""
        self.number += 1
        sent = json.dumps([0, self.number, f"WebDriver:{name}", arguments]).encode()
        self.connection.sendall(str(len(sent)).encode() + b":" + sent)
        _, _, error, result = self.receive()
        if error:
            raise RuntimeError(f"{name}: {error['message']}")
        return result

    def receive(self) -> Any:
        while b":" not in self.received:
            self.received += self.connection.recv(65536) or _closed()
        length, _, rest = self.received.partition(b":")
        while len(rest) < int(length):
            rest += self.connection.recv(1 << 20) or _closed()
        self.received = rest[int(length) :]
        return json.loads(rest[: int(length)])

    def evaluate(self, script: str) -> Any:
        return self("ExecuteScript", script=script, args=[])["value"]

    def screenshot(self, selector: str) -> Any:
        """The picture of an element, beyond the window too."""
        from PIL import Image

        png = base64.b64decode(self("TakeScreenshot", full=True)["value"])
        box = self.evaluate(
            f"const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [box.left + scrollX, box.top + scrollY, box.right + scrollX, box.bottom + scrollY].map("
            "(side) => Math.round(side * devicePixelRatio))"
        )
        return Image.open(io.BytesIO(png)).crop(box)


def _closed() -> bytes:
    raise ConnectionError("Firefox has closed the connection")


@contextlib.contextmanager
def started(program: str, folder: Path, scale: float) -> Iterator[Firefox]:
    """A Firefox without a window, with a profile in `folder`, ended at the end. scale: pixels per CSS pixel."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    preferences = {"marionette.port": port, "layout.css.devPixelsPerPx": str(scale), "app.update.enabled": False}
    lines = [f'user_pref("{name}", {json.dumps(value)});\n' for name, value in preferences.items()]
    (folder / "user.js").write_text("".join(lines), encoding="utf-8")
    command = [program, "--headless", "--marionette", "--no-remote", "--profile", str(folder), "--width=1440"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + SECONDS
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
                break
            except ConnectionRefusedError:
                if process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.2)
        with connection:
            yield Firefox(connection)
    finally:
        process.terminate()
        process.wait(SECONDS)
