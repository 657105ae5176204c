"""The course: each exercise's check fails on the unsolved form and on wrong answers, and passes on the solved one."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COURSE, SOLUTIONS = ROOT / "docs/course", Path(__file__).parent / "solutions"
# A slip in each solution that its check must find.
SLIPS = {
    "e01_softmax": ("(dy - (dy * y).sum(axis=-1, keepdims=True))", "dy"),
    "e02_linear": ("dweight +=", "dweight[...] ="),
    "e03_cross_entropy": ("np.where(seen, dnll, 0)", "dnll"),
    "e04_rmsnorm": ("r**3", "r**2"),
    "e05_rope": ("db * cos - da * sin", "db * cos + da * sin"),
    "e06_online_softmax": ("np.maximum(m1, m2)", "m1"),
    "e07_block": ("return dy + norm", "return norm"),
    "e08_adamw": ("/ (1 - config.beta2**step)", ""),
    "e09_nucleus": (" + 1\n", " + 2\n"),
    "e10_own_op": ("2 * dy", "dy"),
}


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"course_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check: Any = loaded(COURSE / "check.py")


def test_there_are_ten_of_everything() -> None:
    lessons = sorted(path.name[:2] for path in COURSE.glob("[0-9]*.md"))
    assert lessons == [f"{n:02}" for n in range(1, 11)]
    assert list(check.CHECKS) == list(SLIPS) == [p.stem for p in sorted((COURSE / "exercises").glob("*.py"))]
    for number, name in enumerate(check.CHECKS, start=1):
        (page,) = COURSE.glob(f"{number:02}-*.md")
        assert f"exercises/{name}.py" in page.read_text(encoding="utf-8"), page


@pytest.mark.parametrize("name", SLIPS)
def test_the_unsolved_form_fails(name: str) -> None:
    with pytest.raises(NotImplementedError):
        check.examine(name)


@pytest.mark.parametrize("name", SLIPS)
def test_the_solved_form_passes(name: str) -> None:
    check.examine(name, SOLUTIONS)


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_found(name: str, tmp_path: Path) -> None:
    text = (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
    right, wrong = SLIPS[name]
    assert right in text
    (tmp_path / f"{name}.py").write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises((AssertionError, FloatingPointError)):
        check.examine(name, tmp_path)


def test_the_unsolved_kernel_does_not_compile() -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    try:
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    import numpy as np

    with pytest.raises(AssertionError, match="your turn"):
        check.kernel(COURSE / "exercises/e10_own_op.cu", np.random.default_rng(0))


def test_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["1"]) == 1
    assert capsys.readouterr().out == "e01_softmax: not written yet; it is docs/course/exercises/e01_softmax.py\n"
    with pytest.raises(check.UserError, match="lessons are 1 to 10"):
        check.main(["11"])


@pytest.mark.parametrize("inside", [True, False], ids=["course", "elsewhere"])
def test_the_notebook_is_the_first_three_lessons_and_runs(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run([sys.executable, str(COURSE / "notebook.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}run python docs/course/notebook.py"
    book = json.loads((COURSE / "first-three.ipynb").read_text(encoding="utf-8"))
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; the extra docs has it")
    nbformat.validate(nbformat.from_dict(book))
    monkeypatch.chdir(COURSE if inside else tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names: dict[str, Any] = {"__name__": "notebook"}
    ran = 0
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        expected = "".join(line for output in cell["outputs"] for line in output["text"])
        if expected:
            assert printed.getvalue() == expected
        ran += 1
    assert ran >= 7
