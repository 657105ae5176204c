"""The textbook as a site: built without a warning, every link leads somewhere, nothing is fetched from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.test_glossary import Uses

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """Links, anchors and what a browser would fetch by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.fetched: list[str] = []
        self.formulas = 0
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        self.formulas += tag == "math"
        self.tags.add(tag)
        assert tag != "dl" or not found, f"<{tag} {found}> is text of a docstring"
        if tag in ("script", "img", "iframe", "link") and (source := found.get("src") or found.get("href")):
            self.fetched.append(source)
        elif tag == "a" and (link := found.get("href")):
            self.links.append(link)


def build_site(out: Path) -> Path:
    """out, with the site in it. Skips the test without the packages of the extra docs."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python", "latex2mathml"):
        pytest.importorskip(package, reason=f"{package} is not installed; the extra docs has it")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": "https://example.org/us/tinyforge"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return out


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are absolute: it is shown anywhere
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                broken.append(f"{path.relative_to(site)}: {link}, no such anchor")
    assert sorted(set(broken)) == []


def test_the_first_use_of_a_term_of_the_glossary_is_linked(site: Path) -> None:
    wrong = {}
    for source in sorted((ROOT / "docs").rglob("*.md")):
        name = source.relative_to(ROOT / "docs").as_posix()
        built = site / {"README.md": "textbook.html"}.get(name, re.sub("README.md$", "index.md", name)[:-3] + ".html")
        if name != "glossary.md" and (missing := Uses(built.read_text(encoding="utf-8")).not_linked()):
            wrong[name] = missing
    assert wrong == {}
    assert 'class="term"' in (site / "ops/attention.html").read_text(encoding="utf-8")


def test_a_page_that_begins_with_a_command_says_where_to_run_it(site: Path) -> None:
    said = {p.stem for p in site.rglob("*.html") if "Run the commands from the root" in p.read_text(encoding="utf-8")}
    assert {"training", "gradcheck", "data", "base-run"} <= said and not {"softmax", "install", "glossary"} & said
    assert 'href="../install.html">installed' in (site / "results/base-run.html").read_text(encoding="utf-8")


def test_nothing_is_fetched_from_elsewhere(pages: dict[Path, Page]) -> None:
    assert {url for page in pages.values() for url in page.fetched if urlsplit(url).netloc} == set()


def test_formulas_are_drawn_by_the_browser(pages: dict[Path, Page]) -> None:
    assert sum(page.formulas for page in pages.values()) > 1000
    for path in pages:
        assert not re.search(r'class="arithmatex"', path.read_text(encoding="utf-8")), path


def test_no_text_in_angle_brackets_is_lost(pages: dict[Path, Page]) -> None:
    """The reference's docstrings are Markdown, where <think> would be a tag that nobody sees."""
    known = set.union(*(page.tags for path, page in pages.items() if path.parent.name != "api"))
    known |= {"dl", "dt", "dd", "small", "h4", "h5", "h6"}
    found = {path.name: page.tags - known for path, page in pages.items() if path.parent.name == "api"}
    assert {name: tags for name, tags in found.items() if tags} == {}


def test_search_reference_and_gallery_have_what_they_promise(site: Path) -> None:
    found = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    assert any("RMSNorm" in entry["title"] for entry in found)
    assert not any(entry["location"].startswith("source/") for entry in found)
    reference = (site / "api/tinyforge.html").read_text(encoding="utf-8")
    assert "tinyforge.op.Stash" in reference and "each consumed once, by its owner" in reference
    gallery = (site / "gallery.html").read_text(encoding="utf-8")
    assert "116,417,280" in gallery and 'href="models/mamba.html"' in gallery
    assert gallery.count('class="stack"') > 8 and ">LinearCrossEntropy<" in gallery


def test_the_tabs_begin_with_the_course_and_end_with_the_reference(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    tabs = [tab.strip() for tab in re.findall(r'class="md-tabs__link">\s*([^<]+)<', text)]
    assert tabs == ["Home", "Start", "Course", "Textbook", "Models", "Guides", "Speed", "API"]
    assert re.search(r'<a href="course/index.html"[^>]*class="md-tabs__link"', text)


def test_the_font_of_formulas_is_shipped_with_its_licence(site: Path) -> None:
    font, licence = (site / "site" / name for name in ("stix-two-math.woff2", "stix-two-math-OFL.txt"))
    assert font.stat().st_size < 1_000_000 and font.read_bytes()[:4] == b"wOF2"
    assert "SIL Open Font License, Version 1.1" in licence.read_text(encoding="utf-8")
