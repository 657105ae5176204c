"""Count the words that the project does not use in their unusual senses, in pages, docstrings and messages.

    python -m tests.words            the counts; status 1 above an allowance
    python -m tests.words --list     where each stands

The allowance leaves room for a word in its plain sense ("the server stands behind a proxy").
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# word or phrase: (instead, allowance)
WORDS = {
    r"beside": ("next to, compared with, alongside", 20),
    r"behind": ("after", 10),
    r"wants|wanted": ("expects, expected, requires", 0),
    r"of one's own": ("custom, your own", 0),
    r"again and again|once more": ("repeatedly, reread", 0),
    r"drawn": ("sampled", 20),
    r"the same bits": ("bitwise identical", 20),
}
FOLDERS = ("tinyforge", "models", "recipes", "data", "bench", "examples")
STORIES = (
    "data/world.py",
    "data/stories.py",
    "examples/storyteller/",
    "bench/stories.py",
)  # their text is English of its own


def texts() -> Iterator[tuple[str, int, str]]:
    """(file, line, text) of every page, docstring and string of the product."""
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith(">"):  # what a model said
                continue
            yield page.relative_to(ROOT).as_posix(), number, line
    for file in sorted(f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py") if not f.is_symlink()):
        if file.relative_to(ROOT).as_posix().startswith(STORIES):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for number, line in enumerate(node.value.splitlines(), node.lineno):
                    yield file.relative_to(ROOT).as_posix(), number, line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.words", description="Count words of the style guide.")
    parser.add_argument("--list", action="store_true", help="print where each stands")
    listed = parser.parse_args(argv).list
    known = list(texts())
    found = {word: [t for t in known if re.search(rf"\b(?:{word})\b", t[2], re.IGNORECASE)] for word in WORDS}
    status = 0
    for word, (instead, most) in WORDS.items():
        count = sum(len(re.findall(rf"\b(?:{word})\b", text, re.IGNORECASE)) for _, _, text in found[word])
        over = count > most
        status |= over
        if over or listed:
            print(f"{word}: {count}, at most {most}; write {instead}")
        if listed:
            print(*(f"    {file}:{line}: {text.strip()}" for file, line, text in found[word]), sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
