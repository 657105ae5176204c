"""What README and the pages refer to is there: links and their headings, files, modules, commands and flags."""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import runpy
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest

from tinyforge import cli
from tinyforge.completion import words_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
PACKAGES = r"(?:tinyforge|models|recipes|data|bench|examples|tests|docs)"
MENTIONED = re.compile(rf"(?<![\w/.-])({PACKAGES}/[\w./-]*\w)")
COMMAND = re.compile(r"python (?:-m ([\w.]+)|((?:recipes|bench|docs|examples)/[\w./]+\.py))((?: [^\n`#|]*)?)")
INSTALLED = re.compile(r"(?:^ {4}|^\$ |`)tinyforge ((?:data )?[a-z]\w*)((?: [^\n`#|]*)?)", re.MULTILINE)


def prose(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def slug(heading: str) -> str:
    """GitHub's anchor for a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    return {slug(found) for found in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_is_there(page: Path) -> None:
    """`ops/rmsnorm.py` and its like: paths in backticks, from the root, from the package or from the page's folder."""
    missing = []
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        if re.fullmatch(r"[\w./-]+\.(?:py|cu|cuh|md|json|sh|toml)", code) and "/" in code:
            roots = (ROOT, ROOT / "tinyforge", page.parent)
            if not any((root / code).exists() for root in roots) and not code.startswith(("runs/", "out/")):
                missing.append(code)
    for path in MENTIONED.findall(LINK.sub("]", prose(page))):
        if Path(path).suffix in (".py", ".cu", ".cuh", ".md", ".sh") and not (ROOT / path).exists():
            missing.append(path)
    assert missing == []


@cache
def flags(module: str, script: str, word: str) -> set[str] | None:
    """The flags in the command's --help, or in that of its subcommand `word`; None if there is no such command."""
    if (module and not _is_module(module)) or (script and not (ROOT / script).exists()):
        return None
    for arguments in ([word], []) if word else ([],):
        printed, argv, path = io.StringIO(), sys.argv, sys.path[:]
        sys.argv = [script, *arguments, "--help"]
        try:  # in this process, where most of what it imports is imported already
            with redirect_stdout(printed), redirect_stderr(printed), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # the module was imported by a test before
                if module:
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
                else:
                    sys.path.insert(0, str((ROOT / script).parent))  # as Python does for a script
                    runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as left:
            if left.code == 0:
                return set(re.findall(r"(--[a-z][\w-]*)", printed.getvalue()))
        finally:
            sys.argv, sys.path[:] = argv, path
    raise AssertionError(printed.getvalue())


def test_every_command_and_flag_exists() -> None:
    wrong = []
    for page in PAGES:
        text = prose(page).replace("\\\n", " ")
        for module, script, rest in COMMAND.findall(text):
            if module in ("venv", "pip", "pytest", "http.server", "tokenizers"):
                continue
            first = rest.split()[0] if rest.split() else ""
            known = flags(module, script, first if re.fullmatch("[a-z]+", first) else "")
            if known is None:
                wrong.append(f"{page.relative_to(ROOT)}: {module or script}")
                continue
            own = re.sub(r'"[^"]*"', "", rest).partition(" -- ")[0]  # an ablation's others are those of pretrain.py
            unknown = set(re.findall(r"(?<!\S)--[a-z][\w-]*", own)) - known
            wrong += [f"{page.relative_to(ROOT)}: {module or script} {flag}" for flag in sorted(unknown)]
    assert wrong == []


def test_every_flag_of_the_installed_command_exists() -> None:
    wrong = []
    table = {name: words_of(name, parser)[name] for name, parser in cli.parsers()}
    for page in PAGES:
        for name, rest in INSTALLED.findall(prose(page).replace("\\\n", " ")):
            if name not in cli.SUMMARIES:
                wrong.append(f"{page.relative_to(ROOT)}: tinyforge {name}")
            elif name != "completion":
                asked = re.findall(r"(?<!\S)--[a-z][\w-]*", re.sub(r'"[^"]*"', "", rest))
                unknown = {*asked} - {*table[name].flags}
                wrong += [f"{page.relative_to(ROOT)}: tinyforge {name} {flag}" for flag in sorted(unknown)]
    assert wrong == []


def test_every_module_and_name_in_it_exists() -> None:
    """`tinyforge.gradcheck.check_op` and its like."""
    wrong = []
    for page in PAGES:
        for name in re.findall(r"`((?:tinyforge|models|data)(?:\.\w+)+)`", prose(page)):
            if Path(name).suffix in (".py", ".md"):
                continue
            module, _, attribute = name.rpartition(".")
            if _is_module(name) or (_is_module(module) and hasattr(importlib.import_module(module), attribute)):
                continue
            wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert wrong == []


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {target for page in PAGES for target in re.findall(r"(?:^    |`)make ([a-z][\w-]*)", prose(page), re.M)}
    assert named and named <= targets
