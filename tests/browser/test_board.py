"""The board in a browser: drawn within a second, following a run, and as one file without a network."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.board.__main__ import main
from tinyforge.board.runs import Board
from tinyforge.board.server import Server

Open = Callable[..., Any]
DRAWN = "html[data-drawn]"
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror=window.broken=1>"


def rows(first: int, last: int, every: int = 250) -> str:
    rng, lines = np.random.default_rng(first), []
    for step in range(first, last + 1):
        bits = 1.1 + 1.5 * np.exp(-step / 1500) + 0.05 * rng.normal()
        row = {
            "step": step,
            "tokens": step * 4096,
            "loss": 2 * bits,
            "bits_per_byte": bits,
            "lr": 4e-3,
            "seconds": step * 0.16,
            "grad_norm": abs(0.4 + 0.1 * rng.normal()),
            "tokens_per_second": 100_000,
        }
        lines.append(json.dumps(row))
        if step % every == 0:
            row = {
                "step": step,
                "tokens": step * 4096,
                "seconds": step * 0.16,
                "val_bits_per_byte": bits + 0.02,
                "peak_memory_mib": 300.0,
                **{f"grad_norm.blocks.{i}": 0.1 * (i + 1) for i in range(4)},
            }
            lines.append(json.dumps(row))
    return "".join(line + "\n" for line in lines)


def add_run(folder: Path, name: str, text: str, **about: Any) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "metrics.jsonl").write_text(text, encoding="utf-8")
    known = {
        "kind": "pretrain",
        "model": "nanoeuler",
        "parameters": 1053824,
        "flop_per_token": 6e6,
        "config": {},
        "settings": {"steps": 11010, "lr": 4e-3, **about},
        "plan": {"weights": 4 << 20, "moments": 2 << 20, "saved": 8 << 20, "peak": 16 << 20},
    }
    (folder / name / "run.json").write_text(json.dumps(known), encoding="utf-8")
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    add_run(folder, "long", rows(1, 11_010))
    short = add_run(folder, "short", rows(1, 900), lr=1e-3)
    (short / "samples.jsonl").write_text(
        "".join(json.dumps({"step": s, "tokens": s, "text": f"{HOSTILE} {s}"}) + "\n" for s in (250, 500)),
        encoding="utf-8",
    )
    card = (
        f"---\nlicense: mit\n---\n\n# A run\n\nSee `here`, {HOSTILE}.\n\n    a command\n\n"
        "| lr | steps |\n|---|---|\n| 1 | 9 |\n"
    )
    (short / "README.md").write_text(card, encoding="utf-8")
    (folder / "logs").mkdir()
    (folder / "logs" / "sft.log").write_text(f"=== sft {HOSTILE}\n", encoding="utf-8")
    ledger = {"tolerance": 1e-8, "rows": [{"op": "SwiGLU", "name": "input 0", "cases": 4, "error": 7e-12}]}
    (folder / "ledger.json").write_text(json.dumps(ledger), encoding="utf-8")
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    started = []

    def start(folder: Path) -> str:
        server = Server("127.0.0.1", 0, Board(folder))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        started.append((server, thread))
        return server.url

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


def points(page: Any, chart: int, kind: str = "smooth") -> int:
    path = page.locator(".chart").nth(chart).locator(f"svg[role=img] path.{kind}").first.get_attribute("d")
    return 1 + path.count("L")


def test_a_run_of_11010_steps_is_drawn_within_a_second(runs: Path, open_page: Open, serve: Callable[..., str]) -> None:
    """From the first byte asked for, the file read too. The best of five: other programs
    run here as well."""
    taken = []
    for _ in range(5):
        page = open_page(serve(runs / "long"), ready=DRAWN)
        taken.append(int(page.locator("html").get_attribute("data-drawn")))
        page.close()
    busy = os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)  # then others have most of the processor
    print(f"drawn after {sorted(taken)} ms{', on a busy machine' if busy else ''}")
    assert min(taken) < (3000 if busy else 1000)


def test_curves_choices_and_zoom(runs: Path, open_page: Open, serve: Callable[..., str]) -> None:
    page = open_page(serve(runs), ready=DRAWN, width=1400, height=900)
    charts = page.locator(".chart figcaption").all_inner_texts()
    assert charts[0].startswith("Bits per byte") and any(c.startswith("Gradient norm") for c in charts)
    held = page.locator(".chart").first.locator("svg[role=img] path.held")
    assert 100 < points(page, 0, "raw") <= 1700 and held.count() == 2
    assert "long 1." in page.locator(".chart svg[role=img]").first.get_attribute("aria-label")
    assert page.locator("#compare-table td.differs").count() > 0  # the rates
    for axis in ("step", "seconds", "flop"):
        before = held.first.get_attribute("d")
        page.locator(f"[name=axis][value={axis}]").check(force=True)
        page.wait_for_timeout(300)
        assert held.first.get_attribute("d").count("L") == before.count("L")
    page.locator("[name=axis][value=step]").check(force=True)
    page.locator("[name=smooth][value='0']").check(force=True)
    page.locator(".chart path.raw").first.wait_for(state="detached")
    box = page.locator(".chart svg[role=img]").first.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.52 * box["width"], box["y"] + 100, steps=3)
    assert page.locator("#tip").is_visible()
    page.mouse.up()
    page.wait_for_timeout(500)
    near = page.locator(".chart").first.locator("path.smooth[data-run=long]").get_attribute("d")
    assert 100 < near.count("L") < 400  # every step of that part, no longer the extremes of stretches
    page.keyboard.press("Escape")
    page.wait_for_timeout(500)
    assert page.locator(".chart").first.locator("path.smooth[data-run=long]").get_attribute("d").count("L") > 700
    page.locator("#runs input").first.uncheck()
    page.locator(".chart path[data-run=long]").first.wait_for(state="detached")
    assert page.locator("#layers-map canvas.heat").is_visible() and page.locator(".plan").count() == 1
    page.wait_for_selector("#ledger-body:has-text('7.0e-12')")
    page.locator(".chart svg[role=img]").first.focus()
    page.keyboard.press("ArrowLeft")
    assert "short" in page.locator("#tip").inner_text()


def test_a_run_of_preferences(tmp_path: Path, open_page: Open, serve: Callable[..., str]) -> None:
    """The list of runs has the accuracy; the few values of its training are not drawn as held-out ones."""
    figures = {"loss": 0.6, "rewards/accuracies": 0.7, "logps/chosen": -50.0}
    steps = [{"step": n, "tokens": n, "seconds": n, **figures} for n in (1, 2, 3)]
    held_out = {"step": 3, "tokens": 3, "seconds": 3, **{f"val_{name}": value for name, value in figures.items()}}
    add_run(tmp_path, "dpo", "".join(json.dumps(row) + "\n" for row in [*steps, held_out]), steps=3)
    page = open_page(serve(tmp_path), ready=DRAWN)
    assert "held out rewards/accuracies 0.7" in page.locator("#runs").inner_text()
    for chart in page.locator(".chart").all():
        assert [chart.locator(f"svg[role=img] path.{kind}").count() for kind in ("smooth", "held")] == [1, 1]
        assert chart.locator("circle").count() == 4  # so that a curve of one value is seen


def test_a_run_of_images_speaks_of_images(tmp_path: Path, open_page: Open, serve: Callable[..., str]) -> None:
    figures = {"mse": 0.2, "loss": 0.2, "images_per_second": 900}
    steps = [{"step": n, "images": 64 * n, "seconds": n, **figures} for n in range(1, 9)]
    run = add_run(tmp_path, "digits", "".join(json.dumps(row) + "\n" for row in steps))
    about = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps(about | {"unit": "images"}), encoding="utf-8")
    (run / "samples.jsonl").write_text(
        json.dumps({"step": 8, "images": 512, "text": "a sheet"}) + "\n", encoding="utf-8"
    )
    page = open_page(serve(tmp_path), ready=DRAWN)
    assert page.locator("#controls").inner_text().split("\n")[1] == "Images"
    captions = page.locator(".chart figcaption").all_inner_texts()
    assert any("Throughput" in caption and "images/s" in caption for caption in captions), captions
    assert "512 images" in page.locator("#samples").inner_text()
    assert "images" in page.locator("#compare-table th[scope=row]").all_inner_texts()
    assert "okens" not in page.locator("body").inner_text()


def test_a_live_run_is_followed(tmp_path: Path, open_page: Open, serve: Callable[..., str]) -> None:
    run = add_run(tmp_path, "now", rows(1, 300))
    page = open_page(serve(tmp_path), ready=DRAWN)
    assert "step 300 of 11,010" in page.locator("#runs").inner_text() and page.locator(".live").count() == 1
    text = rows(301, 499)
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(text[:-40])  # the last line is not complete yet
    page.wait_for_selector("#runs:has-text('step 498 of')")
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(text[-40:])
    page.wait_for_selector("#runs:has-text('step 499 of')")
    page.wait_for_selector("#compare-table td:has-text('499')")
    add_run(tmp_path, "deeper/another", rows(1, 60))
    page.wait_for_selector("#runs:has-text('deeper/another')")
    page.wait_for_selector(".chart path[data-run='deeper/another']", state="attached")


def test_an_exported_page_needs_no_server_and_no_network(
    runs: Path, open_page: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(runs), "--export", str(tmp_path / "report.html")]) == 0
    assert "2 runs" in capsys.readouterr().out
    page = open_page((tmp_path / "report.html").as_uri(), ready=DRAWN, offline=True)
    assert 100 < points(page, 0, "raw") <= 1300 and points(page, 0) > 100
    page.locator("[name=smooth][value='0.995']").check(force=True)
    page.wait_for_timeout(200)
    page.wait_for_selector("#ledger-body:has-text('7.0e-12')")
    assert points(page, 0) > 100
    assert HOSTILE in page.locator("#samples-list").inner_text() and page.evaluate("window.broken") is None
    assert page.locator("#samples-list img, #samples-list script").count() == 0
    page.wait_for_selector("#state:has-text('exported')")
    card = page.locator("#texts-body")
    assert card.locator("h3").inner_text() == "A run" and card.locator("td").all_inner_texts() == ["9"]
    assert card.locator("p").inner_text() == f"See here, {HOSTILE}." and card.locator("pre").inner_text() == "a command"
    page.locator("#texts-name").select_option("sft.log")
    page.wait_for_selector("#texts-body:has-text('=== sft')")
    assert HOSTILE in card.inner_text() and page.evaluate("window.broken") is None
    # What was live then is not when somebody opens the file.
    assert page.locator(".run .live").count() == 0 and page.locator(".run:has-text('not finished')").count() == 1


def test_texts_of_a_run_are_shown_as_text(runs: Path, open_page: Open, serve: Callable[..., str]) -> None:
    page = open_page(serve(runs), ready=DRAWN)
    page.wait_for_selector("#samples-list pre")
    assert page.locator("#samples-list pre").first.inner_text() == f"{HOSTILE} 500"
    assert page.evaluate("window.broken") is None


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_no_serious_fault(
    dark: bool, width: int, runs: Path, open_page: Open, serve: Callable[..., str], serious: Callable[[Any], list[str]]
) -> None:
    page = open_page(serve(runs), ready=DRAWN, dark=dark, width=width)
    page.wait_for_selector("#state:has-text('rows')")
    page.locator("#ledger details summary").click()
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Both axes of a chart that has a curve have their labels.
    labels = """() => [...document.querySelectorAll(".chart svg[role=img]:has(path.curve)")].map((chart) => {
        const all = [...chart.querySelectorAll("text")], below = chart.viewBox.baseVal.height - 10
        const across = all.filter((text) => Number(text.getAttribute("y")) > below).length
        return [across, all.length - across] })"""
    found = page.evaluate(labels)
    assert len(found) > 3 and all(min(pair) >= 3 for pair in found), found
