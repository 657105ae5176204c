"""The code in the pages runs as it stands and prints what the page says.

A block that begins with a file's name is that file; the blocks after it can import it. Another Python block is run, and
if a block of text follows it, that is its output.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyforge.backends.compile import compile_to_cubin
from tinyforge.registry import models

ROOT = Path(__file__).parents[2]
NAMES = ("gradcheck", "add-an-op", "train-your-own", "inference")
GUIDES = [ROOT / f"docs/{name}.md" for name in NAMES]
LESSONS = sorted((ROOT / "docs/course").glob("[0-9]*.md"))
PAGES = [*GUIDES, *LESSONS, *sorted((ROOT / "docs/ops").glob("[a-z]*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?:#|//) (\w+\.(?:py|cu))\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_print_what_it_says(
    page: Path, tmp_path: Path, write_examples: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examples(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    before, registered = set(sys.modules), dict(models())
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    try:
        for (kind, code), (follows, expected) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
            if kind != "python" or FILE.match(code):
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(page), "exec"), {"__name__": "example"})
            if follows == "text":
                assert printed.getvalue() == expected
    finally:
        for name in models().keys() - registered:
            del models()[name]
        for name in set(sys.modules) - before:
            if (tmp_path / f"{name}.py").exists():
                del sys.modules[name]


def test_every_page_has_an_example_with_its_output() -> None:
    for page in PAGES:
        kinds = [kind for kind, _ in BLOCK.findall(page.read_text(encoding="utf-8"))]
        assert ("python", "text") in zip(kinds, kinds[1:], strict=False), page


def test_an_own_recipe_is_wrong_in_one_line(tmp_path: Path, write_examples: Callable[[Path, Path], None]) -> None:
    write_examples(ROOT / "docs/train-your-own.md", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for flags, said in (
        ((), "no text; give one with --data"),
        (("--data", "absent"), "absent: no such file"),
        (("--data", "bigram.py", "--encoding", "latin-99"), "latin-99"),
    ):
        done = subprocess.run(
            [sys.executable, "train_bigram.py", "--backend", "numpy", *flags],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr


def test_the_cuda_kernel_of_add_an_op_compiles(
    tmp_path: Path, write_examples: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    try:
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    write_examples(ROOT / "docs/add-an-op.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    for scalar, file in (
        ("double", tmp_path / "squared_reglu.cu"),
        ("float", "squared_reglu.cu"),
        ("bf16", Path("squared_reglu.cu")),
    ):
        log = compile_to_cubin(file, {"SCALAR": scalar}, "sm_80")
        assert "Used" in log and not any(map(int, re.findall(r"(\d+) bytes spill", log)))
