"""Pictures of the chat page and of the board, taken in Chromium: chat.png, board.png.

    python docs/pictures/screenshots.py --runs runs     the shipped model's chat, and the board of these runs

It needs the extras serve and browser, and Chromium itself.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
QUESTION = "Zobert is in the yard with a red tea cup. Where is Zobert?"


@contextmanager
def server(*words: str) -> Iterator[str]:
    """Its address, which is a word of the first line that it prints."""
    with subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(word for word in process.stdout.readline().split() if word.startswith("http")).rstrip(";")
        finally:
            process.terminate()


def chat(browser: Any) -> bytes:
    with server("tinyforge.serve", "--checkpoint", "small", "--port", "0") as url:
        page = browser.new_page(viewport={"width": 1360, "height": 1010})
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        page.click("#settings-switch")
        page.fill("[name=drafts]", "3")
        page.fill("[name=seed]", "4")
        page.click("#settings-close")
        page.click("#inside-switch")
        for number, question in enumerate(("Which is larger, 1 or 12?", "How much is 13 plus 2?", QUESTION)):
            if number < 2:
                page.click("#new")
            page.fill("#draft", question)
            page.press("#draft", "Enter")
            page.wait_for_selector(".message.busy", state="detached")
            page.wait_for_selector("#send:not([hidden])")
        page.locator(".message").last.locator(".tok").nth(2).click()
        page.wait_for_selector("#heat-said:has-text('looked at')")
        return page.screenshot()


def board(browser: Any, runs: Path) -> bytes:
    with server("tinyforge.board", str(runs.resolve()), "--port", "0") as url:
        page = browser.new_page(viewport={"width": 1360, "height": 1010})
        page.goto(url)
        page.wait_for_selector("html[data-drawn]")
        page.wait_for_selector("#state:has-text('rows')")
        return page.screenshot()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="what the board shows (default: %(default)s)")
    args = parser.parse_args()
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, picture in (("chat", chat(browser)), ("board", board(browser, args.runs))):
            shown = Image.open(io.BytesIO(picture)).convert("RGB").quantize(128, dither=Image.Dither.NONE)
            shown.save(HERE / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
