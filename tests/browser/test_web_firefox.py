"""The page of `tinyforge web` in Firefox, which has no WebGPU on many systems: the model runs in JavaScript."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser import firefox
from tests.browser.test_web import Host
from tests.browser.test_web import hosts as hosts
from tests.browser.test_web import sites as sites

SECONDS = 60
ASK = """
for (const [place, value] of [["[name=temperature]", "0"], ["#draft", QUESTION]]) {
  const box = document.querySelector(place);
  box.value = value;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}
document.getElementById("send").click();
"""


def wait(window: firefox.Firefox, script: str) -> Any:
    end = time.monotonic() + SECONDS
    while not (found := window.evaluate(script)):
        assert time.monotonic() < end, f"{script} after {SECONDS} seconds; the page says {window.evaluate(BODY)}"
        time.sleep(0.2)
    return found


BODY = "return document.body.innerText"
REPLY = "return document.querySelector('.message.assistant:not(.busy) .text p')?.innerText"


def test_it_answers_as_numpy_does(hosts: Callable[[str], Host], tmp_path: Path) -> None:
    program = next(filter(None, map(shutil.which, firefox.NAMES)), None)
    if program is None:
        pytest.skip("no Firefox here; apt-get install firefox-esr")
    with firefox.started(program, tmp_path, 1) as window:
        window("Navigate", url=hosts("small").url + "?webgpu=off")
        assert wait(window, "return document.documentElement.dataset.loaded") == "JavaScript"
        window.evaluate(ASK.replace("QUESTION", json.dumps("How much is 13 plus 2?")))
        assert wait(window, REPLY) == "13 14 15, so 15"
