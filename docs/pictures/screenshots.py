"""Pictures of the chat page and of the board, taken in Chromium: chat.png, chat-dark.png, board.png.

    python docs/pictures/screenshots.py                 the shipped model's chat
    python docs/pictures/screenshots.py --runs runs     and the board of these runs

A picture has the page's own text with it, which a test compares with the page. It needs the extras serve and browser,
and Chromium itself.
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
QUESTION = "Tell me a story about a dog named Max."
SEED, PLACE = 9, 8  # of the reply, and of the token that is chosen
# The page's own words: without those of the model, and with 0 for each number.
WORDS = """() => {
    const models = ".tokens, .cand code, .chosen b, #heat-said, #said, .ticks, option"
    for (const one of document.querySelectorAll(models)) one.remove()
    return document.body.innerText.replace(/\\d[\\d.,]*/g, "0").split(/\\s+/).join(" ")
}"""


@contextmanager
def server(*words: str) -> Iterator[str]:
    """Its address, which is a word of the first line that it prints."""
    with subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(word for word in process.stdout.readline().split() if word.startswith("http")).rstrip(";")
        finally:
            process.terminate()


def chat(browser: Any, dark: bool = False) -> tuple[bytes, str]:
    """The picture, and the page's own words."""
    with server("tinyforge.serve", "--checkpoint", "storyteller", "--port", "0") as url:
        page = browser.new_page(
            viewport={"width": 1440, "height": 1000}, color_scheme="dark" if dark else "light", device_scale_factor=1
        )
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        page.click("#settings-switch")
        page.fill("[name=seed]", str(SEED))
        page.click("#settings-close")
        page.fill("#draft", QUESTION)
        page.press("#draft", "Enter")
        page.wait_for_selector(".message.busy", state="detached", timeout=120_000)
        page.wait_for_selector("#send:not([hidden])")
        page.click("#inside-switch")
        page.locator(".tok").nth(PLACE).click()
        page.wait_for_selector("#heat-said:has-text('the head attended to')")
        page.mouse.move(700, 900)
        picture = page.screenshot()
        words = page.evaluate(WORDS)
        page.close()
        return picture, words


def board(browser: Any, runs: Path) -> tuple[bytes, str]:
    with server("tinyforge.board", str(runs.resolve()), "--port", "0") as url:
        page = browser.new_page(viewport={"width": 1360, "height": 1010})
        page.goto(url)
        page.wait_for_selector("html[data-drawn]")
        page.wait_for_selector("#state:has-text('rows')")
        return page.screenshot(), ""


def save(path: Path, picture: bytes, words: str) -> None:
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_itxt("Words", words)
    shown = Image.open(io.BytesIO(picture)).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    shown.save(path, optimize=True, pnginfo=info)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder with runs, for the picture of the board")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        save(HERE / "chat.png", *chat(browser))
        save(HERE / "chat-dark.png", *chat(browser, dark=True))
        if args.runs:
            save(HERE / "board.png", *board(browser, args.runs))
        browser.close()


if __name__ == "__main__":
    main()
