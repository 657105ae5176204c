"""Every committed measurement has its date; a page that links to one says the month, or the day in the link."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path

import pytest

from tests.docs.test_links import PAGES, ROOT

RESULTS = ROOT / "docs" / "results"
MEASURED = {path: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
DATES = {path: found["date"] for path, found in MEASURED.items() if "date" in found}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+\.json)\)")


def faults(page: Path, text: str) -> list[str]:
    found = []
    for name, target in LINK.findall(text):
        if not (day := DATES.get((page.parent / target).resolve())):
            continue
        if day[:7] not in text:
            found.append(f"{target} is of {day[:7]}, which the page does not say")
        if (said := re.findall(r"\d{4}-\d\d-\d\d", name)) and said != [day]:
            found.append(f"{target} is of {day}, the link says {said}")
    return found


def test_every_measurement_has_a_date() -> None:
    undated = {path.name for path in MEASURED.keys() - DATES.keys()}
    assert undated == {"models.json"}  # checks of all models that `zoo record` repeats: no measurement
    assert all(date(2026, 1, 1) <= date.fromisoformat(day) for day in DATES.values())


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_a_page_says_when_its_figures_were_measured(page: Path) -> None:
    assert faults(page, page.read_text(encoding="utf-8")) == []


def test_it_fails_without_the_date() -> None:
    page, target = ROOT / "docs" / "page.md", "results/cpu-corpus.json"
    day = DATES[RESULTS / "cpu-corpus.json"]
    assert faults(page, f"[JSON]({target})") == [f"{target} is of {day[:7]}, which the page does not say"]
    assert faults(page, f"[{day}]({target})") == faults(page, f"[JSON]({target}), {day[:7]}") == []
    other = f"{day[:7]}-{31 if day[8:] != '31' else 30}"
    assert faults(page, f"[{other}]({target})") == [f"{target} is of {day}, the link says ['{other}']"]
