"""`import tinyforge` is light, and no module imports at its top what only one platform or some commands have."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(p for folder in ("tinyforge", "models", "recipes", "data") for p in (ROOT / folder).rglob("*.py"))
SLOW = ("duckdb", "matplotlib", "torch", "tqdm")
POSIX = ("curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")


def fresh_import(module: str, *unwanted: str) -> tuple[float, str]:
    """Import `module` in a new interpreter: its seconds of CPU time, and which of `unwanted` were loaded."""
    program = f"""
import sys, time
start = time.process_time()
import {module}
print(time.process_time() - start)
print([name for name in {unwanted} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    seconds, loaded = done.stdout.split("\n")[:2]
    return float(seconds), loaded


def test_import_loads_nothing_heavy_and_is_quick() -> None:
    fresh_import("tinyforge")  # the first one reads the files from disk and compiles them
    results = [fresh_import("tinyforge", *SLOW, "cupy") for _ in range(3)]
    assert {loaded for _, loaded in results} == {"[]"}
    assert min(seconds for seconds, _ in results) < 0.3


@pytest.mark.parametrize("module", ["tinyforge.chat", "models.nanoeuler.chat"])
def test_a_chat_loads_no_optimizer_and_no_data(module: str) -> None:
    _, loaded = fresh_import(module, *SLOW, "cupy", "tinyforge.optim", "tinyforge.train", "data")
    assert loaded == "[]"


def imported_at_top(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of each import that runs when the module is imported, typing-only ones left out."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for other in node.orelse:
                    yield from imported_at_top(other)
            case ast.Import():
                yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield node.lineno, module.split(".")[0]
            case _:
                yield from imported_at_top(node)


def importing(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(FILE:LINE, package) of the product, of these packages. Only files with such a name are parsed."""
    named = re.compile(rf"\b({'|'.join(names)})\b")
    for path in MODULES:
        if named.search(text := path.read_text(encoding="utf-8")):
            place = path.relative_to(ROOT)
            yield from ((f"{place}:{line}", name) for line, name in imported_at_top(ast.parse(text)) if name in names)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (POSIX, "Windows lacks it; import it in the function that uses it, where the platform has it"),
        (SLOW, "loading it slows every command down; import it in the function that uses it"),
    ],
)
def test_no_module_imports_these_at_its_top(names: tuple[str, ...], why: str) -> None:
    assert len(MODULES) > 80
    found = [f"{place}: {name}: {why}" for place, name in importing(names)]
    assert not found, "\n".join(found)


def test_an_import_in_a_class_or_a_try_counts_and_one_in_a_function_does_not() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import torch
try:
    import fcntl
except ImportError:
    pass
class Thing:
    import tqdm.auto
    def run(self):
        import duckdb
def draw():
    from matplotlib import pyplot
from . import resource
"""
    assert [name for _, name in imported_at_top(ast.parse(source))] == ["typing", "fcntl", "tqdm"]


def test_the_package_offers_its_parts_and_replaces_no_hook() -> None:
    program = """
import sys
hook = sys.excepthook
import tinyforge
print(sys.excepthook is hook, "tinyforge.optim" in sys.modules)
print(tinyforge.ops.ReLU.__name__, tinyforge.optim.AdamW.__name__)
print(tinyforge.backends.get_backend is tinyforge.get_backend)
print(sorted({"load", "ops", "optim", "backends", "Op", "Param", "Stash"} - {*dir(tinyforge)}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["True False", "ReLU AdamW", "True", "[]"]


def test_load_generates_with_the_token_that_begins_a_text() -> None:
    import tinyforge

    model = tinyforge.load("storyteller", "numpy")
    text = model.generate("Once upon a time", temperature=0, max_tokens=12)
    from tinyforge.infer import Sampling, generate
    from tinyforge.tokenizers.vocabulary import start_ids

    ids = start_ids(model.tokenizer) + model.tokenizer.encode("Once upon a time")
    assert text == model.tokenizer.decode(list(generate(model.model, ids, Sampling(temperature=0, max_tokens=12))))
    assert text and text == model.generate("Once upon a time", temperature=0, max_tokens=12)
