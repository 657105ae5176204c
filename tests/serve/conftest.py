"""Servers of the model that comes with the repository, in threads of this process, on ports of this machine alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tinyforge.backends import get_backend
from tinyforge.formats import Loaded, load
from tinyforge.infer.decoder_numpy import NumpyDecoder
from tinyforge.infer.embeddings import is_encoder
from tinyforge.infer.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "models" / "nanoeuler" / "small"


@dataclass
class Running:
    """A server that listens. slow: seconds that each step takes on top."""

    url: str
    port: int
    app: Any
    loaded: Loaded
    slow: list[float]

    @property
    def engine(self) -> Any:
        return self.app.engine

    def settled(self) -> bool:
        """Whether all rows are free again, at the latest after half a minute."""
        scheduler = self.engine.scheduler
        for _ in range(3000):
            if not self.engine.outstanding and not scheduler.busy and len(scheduler.free) == scheduler.rows:
                return True
            time.sleep(0.01)
        return False

    def post(self, path: str, content: Any, **more: Any) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON's value, headers."""
        import httpx

        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        answer = httpx.post(self.url + path, content=data, timeout=30, **more)
        return answer.status_code, answer.json(), dict(answer.headers)


@pytest.fixture(scope="session")
def small() -> Loaded:
    return load(SMALL, get_backend("numpy", "fp32", workers=1))


@contextmanager
def running(
    loaded: Loaded, rows: int = 4, queue: int = 8, limits: dict[str, Any] | None = None, name: str = "small", **app: Any
) -> Iterator[Running]:
    from tinyforge.serve.__main__ import listening
    from tinyforge.serve.app import App
    from tinyforge.serve.engine import Engine, NoTexts
    from tinyforge.serve.http import Server
    from tinyforge.serve.protocol import Limits

    slow, scheduler = [0.0], None
    if not is_encoder(loaded.model):
        scheduler = Scheduler(loaded.model, rows, queue=queue, decoder=NumpyDecoder(loaded.model, rows))
        step = scheduler.step

        def slowed() -> Any:
            time.sleep(slow[0])
            return step()

        scheduler.step = slowed  # type: ignore[method-assign]
    engine = Engine(scheduler or NoTexts(loaded.model.config.context), loaded.tokenizer)
    limited = Limits(**{"max_tokens": loaded.model.config.context, **(limits or {})})
    application = App(engine, loaded.template, name, loaded.model, "nanoeuler", limited, **app)
    bound, ready = listening("127.0.0.1", 0), threading.Event()

    def listens() -> None:
        engine.start()
        ready.set()

    server = Server(application.asgi, 5, listens, lambda: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    assert ready.wait(20)
    port = bound.getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", port, application, loaded, slow)
    finally:
        server.should_exit = True
        thread.join(10)
        engine.stop()
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def server(small: Loaded) -> Iterator[Running]:
    pytest.importorskip("uvicorn", reason="needs the extra [serve]")
    with running(small) as found:
        yield found


@pytest.fixture
def start(small: Loaded) -> Callable[..., Any]:
    pytest.importorskip("uvicorn", reason="needs the extra [serve]")
    return lambda **how: running(small, **how)
