"""MkDocs hooks of `make docs`: formulas, links into the code, the API reference, the order of pages.

- Formulas become MathML when the site is built. Browsers render it without scripts or fonts.
- Pages link to files of the repository, as on a forge. Each linked file becomes a page of the site.
- The API reference has a page per package of tinyforge, written by mkdocstrings from the docstrings.
- The navigation follows docs/README.md: its sections and links, in order.
"""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)
LANGUAGES = {
    ".py": "python",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".sh": "bash",
    ".sql": "sql",
    ".toml": "toml",
    ".json": "json",
}
SOURCE, API, GALLERY = "source", "api", "gallery.md"
LEARNED = {
    "text": "to predict the next token",
    "masked text": "to guess hidden words, and classes of texts",
    "images": "classes of images",
}
# Commands that latex2mathml does not know, in terms that it does.
SPELLED = {r"\arg\max": r"\operatorname{argmax}", r"\langle": "⟨", r"\rangle": "⟩"}


# --- formulas


def mathml(found: re.Match[str]) -> str:
    tex = html.unescape(found[2]).strip()
    display = tex.startswith("\\[")
    tex = re.sub(r"^\\[\[(]|\\[\])]$", "", tex).strip()
    for name, spelled in SPELLED.items():
        tex = tex.replace(name, spelled)
    text = convert(tex, display="block" if display else "inline")
    # A name that the converter does not know would stand in the page as it was typed.
    if unknown := re.search(r"<m[a-z]+>\\([A-Za-z]+)</m", text):
        raise ValueError(f"\\{unknown[1]} in the formula {tex!r} has no MathML")
    return text


def on_page_content(text: str, page: Any, **_: Any) -> str:
    try:
        return FORMULA.sub(mathml, text)
    except Exception as error:
        raise ValueError(f"{page.file.src_uri}: {error}") from error


# --- files of the repository


def target_of(page: Path, link: str) -> Path | None:
    """What a page links to that is no page: a file of the repository outside docs/, a script in it, a folder."""
    path = Path(os.path.normpath(page.parent / unquote(link)))
    foreign = not path.is_relative_to(DOCS) or path.suffix in (".py", ".cu") or path.is_dir()
    return path if foreign and path.is_relative_to(ROOT) and path.exists() else None


def place_of(target: Path) -> str:
    return f"{SOURCE}/{target.relative_to(ROOT).as_posix()}.md"


def source_page(target: Path) -> str:
    name = target.relative_to(ROOT).as_posix()
    head = f"---\nsearch: {{exclude: true}}\ntitle: {name}\n---\n\n# `{name}`\n\n"
    if target.is_dir():
        inside = sorted(p for p in target.iterdir() if not p.name.startswith((".", "__")))
        return head + "\n".join(f"- `{p.name}{'/' if p.is_dir() else ''}`" for p in inside) + "\n"
    return f"{head}````````{LANGUAGES.get(target.suffix, 'text')}\n{target.read_text(encoding='utf-8')}\n````````\n"


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith((f"{SOURCE}/", f"{API}/", GALLERY)):
        return text
    here = DOCS / page.file.src_uri

    def replaced(found: re.Match[str]) -> str:
        target = target_of(here, found[1])
        if target is None:
            return found[0]
        return f"]({os.path.relpath(DOCS / place_of(target), here.parent)})"

    return LINK.sub(replaced, text)


# --- the reference


def api_pages() -> dict[str, str]:
    package = ROOT / "tinyforge"
    pages = {}
    for folder in [package, *sorted(p for p in package.iterdir() if (p / "__init__.py").is_file())]:
        files = sorted(folder.glob("*.py"))
        names = [f.stem for f in files if not f.stem.startswith("_") and not f.stem.endswith("_cuda")]
        dotted = ".".join(folder.relative_to(ROOT).parts)
        options = "    options: {show_root_heading: false}"
        blocks = "\n\n".join(f"## `{name}`\n\n::: {dotted}.{name}\n{options}" for name in names)
        summary = (folder / "__init__.py").read_text(encoding="utf-8").strip().strip('"').partition("\n")[0].rstrip('"')
        pages[f"{API}/{dotted}.md"] = f"# `{dotted}`\n\n{summary}\n\n{blocks}\n"
    listed = "\n".join(f"- [`{Path(p).stem}`]({Path(p).name})" for p in pages)
    return {f"{API}/README.md": f"# API reference\n\nFrom the docstrings of the code.\n\n{listed}\n", **pages}


def on_files(files: Files, config: Any) -> Files:
    targets: set[Path] = set()
    for file in files.documentation_pages():
        here = DOCS / file.src_uri
        links = LINK.findall(here.read_text(encoding="utf-8"))
        targets |= {target for link, _ in links if (target := target_of(here, link))}
    made = {place_of(target): source_page(target) for target in sorted(targets)} | api_pages() | {GALLERY: gallery()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    config["nav"] = navigation(files)
    return files


# --- the gallery


def gallery() -> str:
    """A card per registered model."""
    sys.path.insert(0, str(ROOT))
    from tinyforge.registry import models
    from tinyforge.zoo.shapes import count_parameters

    cards = []
    for spec in models().values():
        page = f"models/{spec.name}.md"
        title = f"[{spec.title}]({page})" if (DOCS / page).is_file() else spec.title
        sizes = "".join(f"\n| `{name}` | {count_parameters(spec, config):,} |" for name, config in spec.presets.items())
        about = ". ".join(text[0].upper() + text[1:] for text in (spec.summary, spec.source) if text)
        learned = f"It learns {LEARNED[spec.learns]}."
        cards.append(f"## {title}\n\n{about}.\n\n{learned}\n\n| preset | parameters |\n|---|---|{sizes}")
    head = "# Gallery of models\n\n[What has been checked and measured of each](models.md).\n\n"
    return head + "\n\n".join(cards) + "\n"


# --- navigation


def navigation(files: Files) -> list[Any]:
    """The sections of docs/README.md with their pages; other pages are in the section of their folder."""
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    chapters: dict[str, list[str]] = {}
    seen, heading = {"README.md", GALLERY}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        for link, _ in LINK.findall(line):
            path = os.path.normpath(link)
            if path.endswith(".md") and path not in seen and files.get_file_from_path(path):
                seen.add(path)
                chapters.setdefault(heading, []).append(path)
    rest = [f.src_uri for f in files.documentation_pages() if f.src_uri not in seen]
    more: dict[str, list[str]] = {}
    for path in sorted(rest):
        folder = path.split("/")[0] if "/" in path else "More"
        more.setdefault(folder, []).append(path)
    more.pop(SOURCE, None)  # a page links to it
    named = {
        API: "API reference",
        "ops": "All ops",
        "kernels": "The kernels",
        "results": "Measurements",
        "models": "Models",
        "course": "Course",
    }
    others = [{named.get(name, name): paths} for name, paths in more.items()]
    book = [{name: paths} for name, paths in chapters.items()]
    return [{"Start": "README.md"}, {"Gallery": GALLERY}, *book, *others]
