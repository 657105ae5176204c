"""No code block of the pages is only text: Python runs, commands are real ones, and what is neither is listed here.

Pages whose examples print something are run by test_examples.py; commands and flags are held against --help by
test_links.py. Here are the other pages, in a folder with the files that they speak of, and the kinds of all blocks.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs import test_examples
from tinyforge.data import corpus, local, shards
from tinyforge.data.world import documents
from tinyforge.formats import convert

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FRAGMENTS = [p for p in PAGES if p not in test_examples.PAGES and "```python\n" in p.read_text(encoding="utf-8")]
# The programs that a shell command of the pages may begin with. python's and tinyforge's flags are checked.
PROGRAMS = {
    "python",
    "tinyforge",
    "make",
    "pip",
    "recipes/speedrun.sh",
    "source",
    "torchrun",
    "mpirun",
    "ollama",
    "docker",
    "curl",
    "open",
    "cd",
    "git",
    "echo",
    "llama-cli",
    "./run",
    "export",
    "for",
    "kill",
}
# Blocks without a language that are pictures in letters, not commands: page and first words.
PICTURES = {("data.md", "sources"), ("kernels/README.md", "ops/rmsnorm.py")}
# Python that is compiled and not run: page and first call. These read other programs' files; tests/tokenizers does.
NOT_RUN = {("tokenizer.md", "gpt2 = Tokenizer.from_gpt2("), ("tokenizer.md", "tokenizer = load_tokenizer(")}
LANGUAGES = {"python", "text", "bash", "cuda", "sql", "json", "toml", "nginx", "caddy", ""}  # tests/world runs proxies'


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def named(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


def first_call(code: str) -> str:
    """The first line up to its bracket."""
    before, bracket, _ = code.partition("\n")[0].partition("(")
    return before + bracket


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fragments")
    book = "*** START OF THE PROJECT GUTENBERG EBOOK A ***\n{}\n*** END OF THE PROJECT GUTENBERG EBOOK A ***\n"
    (path / "84.txt").write_text(book.format("\n\n".join(documents("train", 50))), encoding="utf-8")
    (path / "notes").mkdir()
    for i, text in enumerate(documents("train", 60)):
        (path / f"notes/{i}.txt").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        local.main(["notes", "--out", "sources/notes"])
        corpus.main(["sources/notes", "--out", "corpus", "--workers", "1", "--val-share", "0.2"])
        shards.main(["--corpus", "corpus", "--out", "shards", "--vocab-size", "300", "--workers", "1"])
        convert.main([str(ROOT / "models/nanoeuler/small"), "HuggingFaceTB/SmolLM2-135M"])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("page", FRAGMENTS, ids=named)
def test_the_python_of_a_page_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks after one another, with the names that the page's text introduces."""
    monkeypatch.chdir(folder)
    rng = random.Random(0)  # words enough for the vocabulary of a page
    texts = ["".join(rng.choices("abcdefghij ", k=4000)) for _ in range(10)]
    names: dict[str, Any] = {
        "__name__": "example",
        "Path": Path,
        "json": json,
        "texts": texts,
        "reply": "Sara",
        "text": "{{ messages }}",
    }
    for package in ("tokenizers", "tiktoken.load"):
        names[package.partition(".")[0]] = pytest.importorskip(package)
    names["tiktoken"] = pytest.importorskip("tiktoken")
    for kind, code in blocks(page):
        if kind == "python":
            program = compile(code, str(page), "exec")
            if (named(page), first_call(code)) not in NOT_RUN:
                exec(program, names)


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert len(FRAGMENTS) >= 6
    wrong, pictures = [], set()
    starts = {(named(page), first_call(text)) for page in PAGES for kind, text in blocks(page) if kind == "python"}
    assert starts >= NOT_RUN, "an example that is gone leaves the list"
    for page in PAGES:
        for kind, text in blocks(page):
            words = text.split()
            if kind not in LANGUAGES:
                wrong.append(f"{named(page)}: a block of {kind!r}")
            if kind == "" and (picture := (named(page), words[0])) in PICTURES:
                pictures.add(picture)
            elif kind in ("", "bash"):
                wrong += [f"{named(page)}: {line}" for line in commands(text) if line.split()[0] not in PROGRAMS]
    assert wrong == []
    assert pictures == PICTURES, "a picture that is gone leaves the list"


def commands(text: str) -> list[str]:
    """The commands of a block: its lines, continued ones joined, without comments and variables set in front."""
    lines = text.replace("\\\n", " ").split("\n")
    prompted = any(line.startswith("$ ") for line in lines)  # then the others are what was printed
    asked = [line.removeprefix("$ ") for line in lines if line.startswith("$ ") or not prompted]
    bare = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line.partition(" #")[0].strip()) for line in asked]
    return [line for line in bare if line and not line.startswith(("#", "..."))]


def test_a_command_that_is_none_is_found() -> None:
    assert commands("OMP_NUM_THREADS=1 python a.py \\\n  --x 1  # why\n\n# a comment\npyhton b.py\n") == [
        "python a.py    --x 1",
        "pyhton b.py",
    ]
    assert commands("$ python a.py\n3 rows\n") == ["python a.py"]


def test_every_table_has_a_head_and_no_gap() -> None:
    """A row after an empty line is shown as text."""
    for path in [*PAGES, ROOT / "README.md"]:
        lines = BLOCK.sub("", path.read_text(encoding="utf-8")).splitlines()
        for i, line in enumerate(lines):
            if line.startswith("|") and not (i and lines[i - 1].startswith("|")):
                assert re.fullmatch(r"\|[-:| ]+\|", lines[i + 1]), (path.name, line)
