"""The pages in a real Chromium, driven by Playwright, over servers of this process: `make test-browser`."""

from __future__ import annotations

import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser.fake import FakeServer

FLAGS = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
"""WebGPU on a CPU."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/browser/" in item.path.as_posix()]
    for item in here:
        item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed; pip install -e '.[browser]'")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium here; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In a container the sandbox of Chromium has no namespaces to make; the pages are ours.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *FLAGS])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """open_page(url, width, height, dark, ...) to a page. At the end: no error was met, and nothing was asked of
    another server. expected: parts of messages on the console that a test provokes."""
    contexts, faults, expected = [], [], []

    def open_(
        url: str,
        width: int = 1280,
        height: int = 860,
        dark: bool = False,
        offline: bool = False,
        ready: str = "html[data-ready]",
        script: str = "",
        expect: tuple[str, ...] = (),
        context: Any = None,
    ) -> Any:
        expected.extend(expect)
        if context is None:
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", offline=offline
            )
            contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        if script:
            page.add_init_script(script)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        own = url.partition("?")[0] if url.startswith("file:") else "/".join(url.split("/")[:3])
        page.on("request", lambda asked: None if asked.url.startswith((own, "data:")) else faults.append(asked.url))
        page.goto(url)
        page.wait_for_selector(ready)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [fault for fault in faults if not any(part in fault for part in expected)] == []


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def serious() -> Callable[[Any], list[str]]:
    """What axe-core finds on a page that is serious or worse."""
    module = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not there")
    axe = module.Axe()

    def run(page: Any) -> list[str]:
        found = axe.run(page).response["violations"]
        return [f"{v['id']}: {v['nodes'][0]['html'][:120]}" for v in found if v["impact"] in ("serious", "critical")]

    return run
