"""MkDocs hooks of `make docs`: the first page, formulas, links into the code, the API reference, the order of pages.

- The first page is made of README's first sentence, its picture of the chat page, its first commands and its table. The
  storyteller runs in it: `tinyforge web` writes the files. They also compute the numbers of a lesson of the course.
- Formulas become MathML when the site is built. Browsers render it without scripts, in the font of docs/site.
- Pages link to files of the repository, as on a forge. Each linked file becomes a page of the site.
- The API reference has a page per package of tinyforge, written by mkdocstrings from the docstrings.
- A page that begins with a command says from where to run it, and how to install.
- The first use of a term of the glossary on a page links to it.
- The tabs and their pages follow docs/README.md: its sections and links, in order.
"""

from __future__ import annotations

import html
import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
# A command stands before the first section.
BEGINS = re.compile(r"# (?:(?!^## ).)*?^(?: {4}|\$ )?(?:python|make|recipes/\S+\.sh) ", re.S | re.M)
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
SOURCE, API, GALLERY, HOME, GLOSSARY = "source", "api", "gallery.md", "index.md", "glossary.md"
TALK = "talk"
LESSON = "course/10-sampling.md"
LIVE = '\n<div id="live" hidden></div>\n<script src="../site/live.js" defer></script>\n'
# Elements whose text is not linked to the glossary.
PLAIN = {"a", "code", "pre", "math", "svg", "button", *(f"h{n}" for n in range(1, 7))}
LEARNED = {
    "text": "to predict the next token",
    "masked text": "to guess hidden words, and classes of texts",
    "images": "classes of images",
}
# Classes of the gallery's pictures, by the name of an op: the first that matches.
KINDS = {
    "norm": "Norm",
    "attend": "Attention|Scan|LSTM|Conv",
    "loss": "CrossEntropy|Loss",
    "small": "Dropout|Residual|Fork|Take|Position|Token",
    "linear": "Linear|Embedding|SwiGLU|Experts|Router|Patch",
}
# The tab, and the section in it, of the pages, or of a folder's pages, that no section of docs/README.md names.
PLACES = {
    "course": ("Course", ""),
    GLOSSARY: ("Course", ""),
    "ops": ("Textbook", "All ops"),
    "models": ("Models", ""),
    "results": ("Speed", ""),
    "kernels": ("Speed", "The kernels"),
    API: ("API", ""),
}
# Commands that latex2mathml does not know, in terms that it does.
SPELLED = {r"\arg\max": r"\operatorname{argmax}", r"\langle": "⟨", r"\rangle": "⟩", r"\lvert": "|", r"\rvert": "|"}


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
    text = text.replace(r"\_", "_")  # the converter keeps the backslash of \text{a\_b}
    return text.replace('display="block"', 'display="block" tabindex="0"', 1)  # a wide one scrolls


def on_page_content(text: str, page: Any, **_: Any) -> str:
    try:
        text = FORMULA.sub(mathml, text)
    except Exception as error:
        raise ValueError(f"{page.file.src_uri}: {error}") from error
    if page.file.src_uri == LESSON:
        text = re.sub(r"<p><img [^>]*></p>", lambda picture: picture[0] + LIVE, text, count=1)
    if not page.file.src_uri.startswith((f"{SOURCE}/", f"{API}/", GALLERY, HOME, GLOSSARY)):
        text = with_terms(text, os.path.relpath("glossary.html", Path(page.file.dest_uri).parent.as_posix()))
    return text.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")


def on_post_page(text: str, **_: Any) -> str:
    """The theme's dialog for the search has no name for a screen reader."""
    return text.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


# --- the glossary


def terms() -> dict[re.Pattern[str], str]:
    """The anchor of each term, by what finds it: a heading of the glossary has one or more, between commas."""
    found = {}
    for heading in re.findall(r"^## (.*)$", (DOCS / GLOSSARY).read_text(encoding="utf-8"), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for term in heading.split(", "):
            same = (
                re.escape(term) if term[1:] != term[1:].lower() else f"(?i:{re.escape(term).replace('y', '(?:y|ie)')})"
            )
            found[re.compile(rf"(?<![\w.-]){same}(?:s|es)?(?![\w-])")] = anchor
    return found


def with_terms(text: str, glossary: str) -> str:
    """A page's HTML in which the first use of each term is a link, but for headings, code, formulas and links."""
    wanted, pieces, closed = terms(), re.split(r"(<[^>]+>)", text), ""
    for i, piece in enumerate(pieces):
        if piece.startswith("<"):
            name = re.match(r"</?([\w-]*)", piece)[1]  # type: ignore[index]
            if closed and piece == closed:
                closed = ""
            elif not closed and name in PLAIN and not piece.startswith("</") and not piece.endswith("/>"):
                closed = f"</{name}>"
            continue
        if closed:
            continue
        places = {}
        for term, anchor in wanted.items():
            if use := term.search(piece):
                places[use.span()] = term, anchor
        end = 0
        done = []
        for (a, b), (term, anchor) in sorted(places.items(), key=lambda place: (place[0][0], -place[0][1])):
            if a < end:  # a longer term begins here too: the shorter one waits for its next use
                continue
            done.append(f'{piece[end:a]}<a class="term" href="{glossary}#{anchor}">{piece[a:b]}</a>')
            end = b
            del wanted[term]
        pieces[i] = "".join(done) + piece[end:]
    return "".join(pieces)


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
    if page.file.src_uri.startswith((f"{SOURCE}/", f"{API}/", GALLERY, HOME)):
        return text
    here = DOCS / page.file.src_uri
    if BEGINS.match(text):
        title, _, rest = text.partition("\n")
        install = os.path.relpath(DOCS / "install.md", here.parent)
        text = f"{title}\n\n*Run the commands from the root of the repository, [installed]({install}).*\n{rest}"
    return relinked(text, here)


def relinked(text: str, here: Path) -> str:
    """text with its links to files of the repository, from the page `here`, turned into links to their pages; those of
    README from the first page."""
    folder = DOCS if here.parent == ROOT else here.parent

    def replaced(found: re.Match[str]) -> str:
        target = target_of(here, found[1])
        if target is None:
            same = folder == here.parent
            return found[0] if same else f"]({os.path.relpath(here.parent / found[1], folder)}{found[2] or ''})"
        return f"]({os.path.relpath(DOCS / place_of(target), folder)})"

    return LINK.sub(replaced, text)


# --- the reference


def api_pages() -> dict[str, str]:
    package = ROOT / "tinyforge"
    pages = {}
    for folder in [package, *sorted(p for p in package.iterdir() if (p / "__init__.py").is_file())]:
        files = sorted(folder.glob("*.py"))
        names = [f.stem for f in files if not f.stem.startswith("_") and not f.stem.endswith(("_cuda", "_webgpu"))]
        dotted = ".".join(folder.relative_to(ROOT).parts)
        options = "    options: {show_root_heading: false}"
        blocks = "\n\n".join(f"## `{name}`\n\n::: {dotted}.{name}\n{options}" for name in names)
        summary = (folder / "__init__.py").read_text(encoding="utf-8").strip().strip('"').partition("\n")[0].rstrip('"')
        pages[f"{API}/{dotted}.md"] = f"# `{dotted}`\n\n{summary}\n\n{blocks}\n"
    listed = "\n".join(f"- [`{Path(p).stem}`]({Path(p).name})" for p in pages)
    return {f"{API}/README.md": f"# API reference\n\nFrom the docstrings of the code.\n\n{listed}\n", **pages}


def on_files(files: Files, config: Any) -> Files:
    textbook = files.src_uris["README.md"]  # the first page of a forge, the second of the site
    files.remove(textbook)
    places = (config["docs_dir"], config["site_dir"], config["use_directory_urls"])
    files.append(File("README.md", *places, dest_uri="textbook.html"))
    targets: set[Path] = set()
    for file in files.documentation_pages():
        here = DOCS / file.src_uri
        links = LINK.findall(here.read_text(encoding="utf-8"))
        targets |= {target for link, _ in links if (target := target_of(here, link))}
    made = {place_of(target): source_page(target) for target in sorted(targets)} | api_pages()
    for name, text in (made | {GALLERY: gallery(), HOME: home()}).items():
        files.append(File.generated(config, name, content=text))
    config["nav"] = navigation(files)
    return files


# --- the first page


def home() -> str:
    """README's first sentence, its picture of the chat page, its first three commands and its table of measurements.

    Raises: ValueError, if README has no such part."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = {
        "sentence": r"^\*\*(?P<title>[^:*]+): (?P<more>[^*]+)\*\*\n(?P<without>.*)\n",
        "picture": r"^!\[(?P<about>[^\]]*)\]\(docs/(?P<picture>pictures/chat\.png)\)$",
        "commands": r"^## Start\n.*?\n\n(?P<commands>(?:    [^\n]*\n){3})",
        "table": r"^(?P<measured>Speed and memory [^:]*).*?<!-- measured:[^\n]*\n(?P<table>.*?)<!-- measured, end",
    }
    found: dict[str, str] = {}
    for name, pattern in parts.items():
        match = re.search(pattern, text, re.MULTILINE | re.DOTALL if name in ("commands", "table") else re.MULTILINE)
        if match is None:
            raise ValueError(f"README.md has no {name} for the first page of the site: nothing matches {pattern}")
        found |= match.groupdict()
    commands = re.sub(r"^    | +#.*$", "", found["commands"], flags=re.MULTILINE)
    table, measured = (relinked(found[name], ROOT / "README.md") for name in ("table", "measured"))
    dark = found["picture"].replace(".png", "-dark.png")
    return f"""---
title: tinyforge
hide: [navigation, toc]
---

<div class="hero" markdown>
<div markdown>

# {found["title"]}

{found["more"][0].upper()}{found["more"][1:]} {found["without"]}

[Start the course](course/README.md){{ .md-button .md-button--primary }}
[Train on your own text](train-on-your-text.md){{ .md-button }}

```bash
{commands}```

</div>

[![{found["about"]}]({found["picture"]}#only-light){{ width=1440 height=1000 }}
![{found["about"]}]({dark}#only-dark){{ width=1440 height=1000 loading=lazy }}](chat-page.md)

</div>

<details class="talk">
<summary>Talk to it here</summary>
<p>17 million parameters in your browser, 16 MB: nothing that you type leaves it.</p>
<iframe src="{TALK}/index.html" loading="lazy" title="The chat page, with the storyteller in your browser"></iframe>
</details>

## Measured

{measured.strip()}.

{table}
"""


def on_post_build(config: Any, **_: Any) -> None:
    """The model that the first page talks to, which is too large for the repository: `tinyforge web` writes it."""
    from tinyforge.web.__main__ import main

    with redirect_stdout(io.StringIO()):
        main([str(Path(config["site_dir"]) / TALK), "--checkpoint", "storyteller"])


# --- the gallery


def gallery() -> str:
    """A card per registered model, with its layers."""
    from tinyforge.registry import models
    from tinyforge.zoo.shapes import count_parameters

    cards = []
    for spec in models().values():
        page = f"models/{spec.name}.md"
        title = f"[{spec.title}]({page})" if (DOCS / page).is_file() else spec.title
        sizes = "".join(f"\n| `{name}` | {count_parameters(spec, config):,} |" for name, config in spec.presets.items())
        about = ". ".join(text[0].upper() + text[1:] for text in (spec.summary, spec.source) if text)
        text = f"{about}.\n\nIt learns {LEARNED[spec.learns]}.\n\n| preset | parameters |\n|---|---|{sizes}"
        cards.append(
            f'## {title}\n\n<div class="model" markdown>\n{stack(spec)}\n<div markdown>\n\n{text}\n\n</div>\n</div>'
        )
    head = "# Gallery of models\n\n[What has been checked and measured of each](models.md).\n\n"
    return head + "\n\n".join(cards) + "\n"


def stack(spec: Any) -> str:
    """A picture of a model's first preset, from a real pass: a row per op from the input down, wider for a longer last
    axis of its output; equal layers once, with their number."""
    from tinyforge.zoo.shapes import trace

    preset, config = next(iter(spec.presets.items()))
    layers, _ = trace(spec, config, "fp32", 1, config.context)
    widest = max(step.output[-1] for layer in layers for step in layer.steps)
    rows, frames, y = [], [], 2
    for layer in layers:
        first = y
        for step in layer.steps:
            width = 96 + round(100 * (step.output[-1] / widest) ** 0.5)
            kind = next((kind for kind, part in KINDS.items() if re.search(part, step.kind)), "other")
            rows.append(
                f'<rect class="{kind}" x="{(200 - width) / 2:g}" y="{y}" width="{width}" height="15" rx="3"/>'
                f'<text x="100" y="{y + 11}">{html.escape(step.kind)}</text>'
            )
            y += 18
        if layer.count > 1:
            frames.append(
                f'<path class="frame" d="M206 {first}h5v{y - first - 3}h-5"/>'
                f'<text class="count" x="216" y="{(first + y) // 2 + 2}">x {layer.count}</text>'
            )
    title = f"The layers of {spec.title}, {preset}"
    return (
        f'<svg class="stack" viewBox="0 0 250 {y + 2}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(rows + frames)}</svg>"
    )


# --- navigation


def navigation(files: Files) -> list[Any]:
    """The sections of docs/README.md as tabs, their subsections and pages in them; other pages are in the tab of their
    folder. The course, to which the introduction leads, comes before the textbook, and the reference is last."""
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    text = text[text.index("\n## ") :]  # the introduction's links come again in their sections
    tabs: dict[str, list[Any]] = {"Start": [], "Course": []}
    tab: list[Any] = []
    seen, pages = {"README.md", GALLERY, HOME}, tab
    for line in text.splitlines():
        if line.startswith("## "):
            pages = tab = tabs.setdefault(line.removeprefix("## "), [])
        elif line.startswith("### "):
            pages = _added(tab, line.removeprefix("### "))
        for link, _ in LINK.findall(line):
            path = os.path.normpath(link)
            if path.endswith(".md") and path not in seen and files.get_file_from_path(path):
                seen.add(path)
                pages.append(path)
    tabs["Start"].insert(0, {"The textbook": "README.md"})
    tabs["Models"].insert(0, {"Gallery": GALLERY})
    others = {f.src_uri for f in files.documentation_pages()} - seen
    for path in sorted(others, key=lambda path: path.replace("README.md", "")):  # a folder's own page first
        folder = path.split("/")[0] if "/" in path else ""
        if folder == SOURCE:  # a page links to it
            continue
        name, section = PLACES.get(path) or PLACES.get(folder, ("Guides", "More"))
        pages = tabs.setdefault(name, [])
        if section:
            pages = next((p[section] for p in pages if section in p), None) or _added(pages, section)
        pages.append(path)
    return [{"Home": HOME}, *({name: pages} for name, pages in tabs.items() if pages)]


def _added(pages: list[Any], section: str) -> list[Any]:
    pages.append({section: (inside := [])})
    return inside
