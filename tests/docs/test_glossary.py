"""The first use of a term of the glossary on a page is a link to it. test_site.py has this of the built pages."""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^## (.*)$", GLOSSARY, re.MULTILINE)
TERMS = [term for heading in HEADINGS for term in heading.split(", ")]
APART = {"a", "code", "pre", "math", "svg", "button", "h1", "h2", "h3", "h4", "h5", "h6"}


class Uses(HTMLParser):
    """The words of a page's article, and which of them are links to the glossary."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[tuple[str, bool]] = []
        self.apart: list[str] = []
        self.linked = False
        self.feed(page.partition("<article")[2].partition("</article>")[0] if "<article" in page else page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and ("class", "term") in attrs and not self.apart:
            self.linked = True
        elif tag in APART:
            self.apart.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.apart and self.apart[-1] == tag:
            self.apart.pop()
        elif tag == "a":
            self.linked = False

    def handle_data(self, data: str) -> None:
        if not self.apart:
            self.words.append((data, self.linked))

    def not_linked(self) -> list[str]:
        """The terms whose first use is no link."""
        found = []
        for term in TERMS:
            stem = "Quer(?:y|ie)" if term == "Query" else re.escape(term)
            flags = re.IGNORECASE if term[1:].islower() else 0
            use = re.compile(rf"(?<![\w.-]){stem}(?:s|es)?(?![\w-])", flags)
            first = next((linked for words, linked in self.words if use.search(words)), True)
            found += [] if first else [term]
        return found


def hooks() -> Any:
    for package in ("mkdocs", "latex2mathml"):
        pytest.importorskip(package, reason=f"{package} is not installed; the extra docs has it")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_glossary_is_in_order_and_plain() -> None:
    assert sorted(HEADINGS, key=str.lower) == HEADINGS and len(TERMS) == len(set(TERMS)) > 35
    for entry in re.split(r"^## .*$", GLOSSARY, flags=re.MULTILINE)[1:]:
        assert 5 < len(entry.split()) < 45, entry


def test_the_first_use_of_a_term_is_linked() -> None:
    page = "<h2>An op</h2><p><code>op</code> An <b>op</b> has an upstream gradient; ops of a warpgroup, of "
    page += "two queries.</p>"
    made = hooks().with_terms(page, "../glossary.html")
    assert '<h2>An op</h2><p><code>op</code> An <b><a class="term" href="../glossary.html#op">op</a></b>' in made
    assert '<a class="term" href="../glossary.html#upstream-gradient">upstream gradient</a>; ops of a <a' in made
    assert '#warp-warpgroup">warpgroup</a>, of two <a class="term" href="../glossary.html#query">queries</a>.' in made
    assert Uses(made).not_linked() == []


def test_a_use_without_a_link_is_found() -> None:
    assert Uses("<p>A stash, then <a class='term' href='x'>a stash</a> and <code>op</code></p>").not_linked() == [
        "Stash"
    ]
