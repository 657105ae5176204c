"""The course: each exercise's check fails on the unsolved form and on wrong answers, and passes on the solved one."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.backends.on_host import compiler
from tests.course.answers import KERNELS, RIGHT, WRONG

ROOT = Path(__file__).parents[2]
COURSE, SOLUTIONS = ROOT / "docs/course", Path(__file__).parent / "solutions"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"course_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check: Any = loaded(COURSE / "check.py")


def test_there_is_a_lesson_an_exercise_and_a_hint_for_each_check() -> None:
    lessons = sorted(path.name[:2] for path in COURSE.glob("[0-9]*.md"))
    assert lessons == [f"{n:02}" for n in range(1, len(check.CHECKS) + 1)]
    assert list(check.CHECKS) == [p.stem for p in sorted((COURSE / "exercises").glob("*.py"))]
    listed = (COURSE / "README.md").read_text(encoding="utf-8")
    hints = check.load_answer("hints", COURSE).HINTS
    assert list(hints) == list(check.CHECKS) and all(len(set(three)) == 3 for three in hints.values())
    for number, name in enumerate(check.CHECKS, start=1):
        (page,) = COURSE.glob(f"{number:02}-*.md")
        text = page.read_text(encoding="utf-8")
        assert f"exercises/{name}.py" in text and f"check.py {number}\n" in text, page
        title = text.partition("\n")[0].removeprefix(f"# {number}. ")
        assert f"{number}. [{title}]({page.name})\n" in listed, page


@pytest.mark.parametrize("name", check.CHECKS)
def test_the_unsolved_form_fails(name: str) -> None:
    with pytest.raises(NotImplementedError):
        check.examine(name)


@pytest.mark.parametrize("name", check.CHECKS)
def test_the_solved_form_passes(name: str) -> None:
    assert not [note for note in check.examine(name, SOLUTIONS).notes if "CPU" not in note]


def written(folder: Path, name: str, right: str = "", wrong: str = "", text: str = "", suffix: str = ".py") -> Path:
    """folder, with the solution of an exercise in which `right` is replaced, or with another text of it."""
    for file in SOLUTIONS.glob(f"{name}.*"):
        solution = file.read_text(encoding="utf-8")
        if file.suffix == suffix:
            assert right in solution
            solution = text or solution.replace(right, wrong)
        (folder / file.name).write_text(solution, encoding="utf-8")
    return folder


SLIPS = [(name, *slip) for name, slips in WRONG.items() for slip in slips]


@pytest.mark.parametrize(("name", "right", "wrong", "words"), SLIPS, ids=[f"{s[0]}-{s[3]}" for s in SLIPS])
def test_a_slip_is_named(
    name: str, right: str, wrong: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.show(name, written(tmp_path, name, right, wrong)) is False
    printed = capsys.readouterr().out
    assert words in printed and "right" not in printed.partition("\n")[0].split(), printed


@pytest.mark.parametrize(("right", "wrong", "words"), KERNELS)
def test_a_slip_of_the_kernel_is_named(right: str, wrong: str, words: str, tmp_path: Path) -> None:
    compiler()
    with pytest.raises(AssertionError, match=words):
        check.examine("e11_own_op", written(tmp_path, "e11_own_op", right, wrong, suffix=".cu"))


def test_max_on_the_cpu_takes_what_cudas_takes() -> None:
    compiler()
    text = (SOLUTIONS / "e11_own_op.cu").read_text(encoding="utf-8")
    for right in ("max(r, A(0))", "max(r, 0.0)", "max(0.0f, r)"):
        assert check.run_on_cpu(text.replace("(r < A(0) ? A(0) : r)", right), check.Report())
    with pytest.raises(AssertionError, match="ambiguous"):
        check.run_on_cpu(text.replace("(r < A(0) ? A(0) : r)", "max(r, 0)"), check.Report())


def in_style(name: str, body: str) -> str:
    if name != "e11_own_op":
        return f"import numpy as np\n\n\n{body}"
    solution = (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
    return solution.replace("    return 2 * dy * np.maximum(x, 0)\n", body)


ANSWERS = [(name, body) for name, bodies in RIGHT.items() for body in bodies]


@pytest.mark.parametrize(("name", "body"), ANSWERS, ids=[f"{a[0]}-{i}" for i, a in enumerate(ANSWERS)])
def test_a_right_answer_in_another_style_is_right(name: str, body: str, tmp_path: Path) -> None:
    check.examine(name, written(tmp_path, name, text=in_style(name, body)))


def test_every_exercise_has_six_wrong_answers_and_four_right_ones() -> None:
    assert list(WRONG) == list(RIGHT) == list(check.CHECKS)
    assert min(map(len, WRONG.values())) >= 6 and min(map(len, RIGHT.values())) >= 4


def test_writing_into_an_argument_is_said_and_does_not_spoil_the_check(tmp_path: Path) -> None:
    text = "import numpy as np\n\n\n" + RIGHT["e01_softmax"][1]
    assert check.examine("e01_softmax", written(tmp_path, "e01_softmax", text=text)).notes == [
        "it writes into `dy`, which other code may still read: work on `dy.copy()`"
    ]


def test_a_broken_rule_of_the_library_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gaps = "if y.size and y.strides[-1] != 8:\n        raise ValueError\n    return y"
    written(tmp_path, "e01_softmax", "return y", gaps)
    assert check.show("e01_softmax", tmp_path) is False
    printed = capsys.readouterr().out
    assert printed.startswith("e01_softmax: right in a first test, but") and "ContractError" not in printed
    assert re.search(r"^  (strides|untouched): ", printed, re.MULTILINE), printed


def test_the_first_wrong_entry_and_the_kind_of_error_are_said() -> None:
    report = check.Report()
    with pytest.raises(AssertionError, match=r"dx\[0, 1\]: got 3, expected 2; relative error 3.3e-01, 1 of 2"):
        report.near("dx", np.array([[1.0, 3.0]]), np.array([[1.0, 2.0]]))
    with pytest.raises(AssertionError, match=r"dx\[1\]: got 0.5, expected 0; absolute error 5.0e-01"):
        report.near("dx", np.array([0.0, 0.5]), np.zeros(2))


def test_an_exception_is_shown_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, "e07_online_softmax", "np.maximum(m1, m2)", "np.maximum(m1, m3)")
    check.show("e07_online_softmax", tmp_path)
    assert capsys.readouterr().out == (
        "e07_online_softmax, line 12, `m = np.maximum(m1, m3)`: NameError: name 'm3' is not defined\n"
        "  a hint: python docs/course/check.py 7 --hint\n"
    )
    written(tmp_path, "e02_linear", text="def linear_backward(dweight, dy, x, weight):\n    return dy @ x\n")
    check.show("e02_linear", tmp_path)
    assert "ValueError: matmul" in (said := capsys.readouterr().out)
    assert re.search(
        r"  it was given dweight \(\d, \d\), dy \(.*\), x \(.*; a hint: python .*check.py 2 --hint\n$", said
    )
    (tmp_path / "e08_block.py").write_text("def block_backward(:\n", encoding="utf-8")
    check.show("e08_block", tmp_path)
    assert capsys.readouterr().out.startswith("e08_block, line 1: SyntaxError: ")


def test_a_kernel_that_was_not_run_is_not_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "compile_all", lambda file: False)
    monkeypatch.setattr(check, "run_on_gpu", lambda file, r: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert check.show("e11_own_op", SOLUTIONS) is False
    first, compiled, ran = capsys.readouterr().out.splitlines()
    assert first == "e11_own_op: right in what was checked"
    assert compiled.startswith("  not checked: whether the kernel compiles") and "pip install" in compiled
    assert ran.startswith("  not checked: what the kernel computes") and "C++ compiler" in ran


def test_the_unsolved_kernel_is_not_written_yet() -> None:
    with pytest.raises(AssertionError, match="its kernel is not written yet"):
        check.kernel(COURSE / "exercises/e11_own_op.cu", check.Report())


def test_the_kernel_compiles_where_cupy_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    try:
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    assert check.compile_all(SOLUTIONS / "e11_own_op.cu")
    with pytest.raises(AssertionError, match="your turn"):
        check.compile_all(COURSE / "exercises/e11_own_op.cu")
    assert check.show("e11_own_op", written(tmp_path, "e11_own_op", "widen(dy[i])", "dy[i]", suffix=".cu")) is False
    printed = capsys.readouterr().out
    assert "read it with widen(x[i])" in printed and "note #" not in printed
    page = (COURSE / "11-own-op.md").read_text(encoding="utf-8")
    assert printed.partition("error: ")[2].partition("\n")[0] in page


def test_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["1"]) == 1
    assert capsys.readouterr().out == "e01_softmax: not written yet; it is docs/course/exercises/e01_softmax.py\n"
    with pytest.raises(check.UserError, match=f"lessons are 1 to {len(check.CHECKS)}"):
        check.main(["99"])
    assert check.main(["3", "--hint", "2"]) == 0
    assert "index -1 is the last token" in capsys.readouterr().out


@pytest.fixture
def own_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return loaded(COURSE / "own_model.py")


def test_the_block_of_lesson_8_has_the_numbers_of_the_real_one() -> None:
    from tinyforge import Stash, get_backend
    from tinyforge.models.nanoeuler import Config, NanoEuler
    from tinyforge.params import with_buffer
    from tinyforge.residual import ResidualStream

    backend, rng = get_backend("numpy", "fp64", workers=1), np.random.default_rng(0)
    config = Config(dim=16, heads=4, kv_heads=2, layers=2, context=8, vocab=64, hidden=24)
    model = with_buffer(NanoEuler(config, backend), backend, rng)
    block = model.blocks[1]
    weights = [op.weight for op in block.ops() if hasattr(op, "weight")]
    start = [rng.normal(size=weight.grad.shape) for weight in weights]  # gradients are added
    plain = loaded(COURSE / "plain_block.py").PlainBlock(block)
    x, dy = rng.normal(size=(2, 2, 8, 16))
    found = []
    for written_out in (False, True):
        stash, stream = Stash(), ResidualStream(x)
        for weight, grad in zip(weights, start, strict=True):
            weight.grad[...] = grad
        if written_out:
            found.append([plain.forward(x, stash), plain.backward(dy, stash)])
        else:
            block.forward(stream, stash)
            found.append([stream.x, block.backward(dy, stash)])
        found[-1] += [weight.grad.copy() for weight in weights]
        assert not len(stash)
    for real, ours in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, real)
    assert len(weights) == 6 and all((a != b).all() for a, b in zip(found[0][2:], start, strict=True))


def test_the_lines_that_lesson_8_shows_are_those_of_its_file() -> None:
    page, file = ((COURSE / name).read_text(encoding="utf-8") for name in ("08-block.md", "plain_block.py"))
    shown = page.partition("forward and then backward:")[2]
    lines = [
        line.strip()
        for line in shown.partition("The models use")[0].splitlines()
        if line.strip() and "# backward" not in line
    ]
    assert len(lines) == 6 and all(line in file for line in lines)


PRINTED = {
    "e01_softmax": ("(dy - (dy * y).sum(axis=-1, keepdims=True))", "dy", "01-softmax"),
    "e09_adamw": ("mean / (np.sqrt(square)", "m / (np.sqrt(v)", "09-adamw"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_page_shows_what_the_check_prints(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong, page = PRINTED[name]
    assert check.show(name, written(tmp_path, name, right, wrong)) is False
    printed = "\n".join(f"    {line}" for line in capsys.readouterr().out.splitlines()[:2])
    assert printed in (COURSE / f"{page}.md").read_text(encoding="utf-8"), printed


def test_lesson_11_says_what_the_check_says_of_two_kernels(tmp_path: Path) -> None:
    compiler()
    page = (COURSE / "11-own-op.md").read_text(encoding="utf-8")
    for right, wrong in (("    if (i >= total) return;\n", ""), ("blockIdx.x * 256 + threadIdx.x", "threadIdx.x")):
        written(tmp_path, "e11_own_op", right, wrong, suffix=".cu")
        with pytest.raises(AssertionError) as caught:
            check.examine("e11_own_op", tmp_path)
        assert f"| `{str(caught.value).partition(':')[0]}` |" in page, caught.value


def test_the_own_model_takes_right_answers_and_replaces_wrong_ones(own_model: Any, tmp_path: Path) -> None:
    said: list[str] = []
    for name in check.CHECKS:
        written(tmp_path, name)
    written(tmp_path, "e10_nucleus", " + 1\n", " + 2\n")
    shutil.copy(COURSE / "exercises/e11_own_op.cu", tmp_path)  # the kernel is not needed
    f = own_model.functions(tmp_path, said.append)
    assert said == ["11 of 12 functions are right; the course's take the place of nucleus"]
    assert f.merge.__code__.co_filename == str(tmp_path / "e07_online_softmax.py")
    assert f.nucleus.__code__.co_filename == str(SOLUTIONS / "e10_nucleus.py")


@pytest.mark.parametrize("style", range(4))
def test_the_own_model_learns_the_same_from_right_answers_in_any_style(
    style: int, own_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that write into their arguments too: nothing that they change is read again."""
    said: list[str] = []
    for name, bodies in RIGHT.items():
        written(tmp_path, name, text=in_style(name, bodies[style]))
    losses = []
    for folder in (SOLUTIONS, tmp_path):
        model = own_model.Model(own_model.functions(folder, said.append), 7, width=16, layers=2, heads=2)
        ids = np.random.default_rng(0).integers(0, 7, 200)
        losses.append(list(own_model.train(model, ids, lambda step: step == 4, batch=2, length=20)))
        losses[-1] += own_model.sample(model, [1, 2], 30)
    assert said == ["12 of 12 functions are right"] * 2
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_one_position_at_a_time_gives_the_logits_of_the_whole_text(own_model: Any) -> None:
    model = own_model.Model(own_model.functions(SOLUTIONS, str), 11, width=16, layers=2, heads=2)
    ids, stash = np.random.default_rng(0).integers(0, 11, (1, 40)), own_model.Stash()
    model.forward(ids, ids, stash)
    _, (logits, _) = list(stash)[-1]
    caches: list[list[Any]] = [[] for _ in model.blocks]
    steps = [model.step(token, caches, at) for at, token in enumerate(ids[0].tolist())]
    np.testing.assert_allclose(steps, logits[0], atol=1e-12)


def test_the_own_model_learns_draws_its_loss_and_samples(
    own_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("the sun is warm. the sea is cold.\n" * 40, encoding="utf-8")
    assert own_model.main(["--text", str(tmp_path / "a.txt"), "--seconds", "0.1", "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "18 of them different" in printed and len(printed.partition("A sample:\n\n")[2]) > 300
    assert (tmp_path / "run/loss.png").stat().st_size > 5000
    assert own_model.main(["--out", str(tmp_path / "run"), "--prompt", "the sun "]) == 0
    written_on = capsys.readouterr().out
    assert written_on.startswith("the sun ") and len(written_on) == len("the sun ") + 301
    for prompt, said in (("Q", "the model's text had no 'Q'"), ("t", "train a model first")):
        with pytest.raises(check.UserError, match=said):
            own_model.main(["--out", str(tmp_path / ("run" if prompt == "Q" else "none")), "--prompt", prompt])
    with monkeypatch.context() as patched, pytest.raises(check.UserError, match="matplotlib.* is not installed"):
        patched.setattr(own_model, "find_spec", lambda name: None)
        patched.setattr(own_model, "train", None)  # said before the training
        own_model.main(["--seconds", "0.1", "--out", str(tmp_path / "other")])
    (tmp_path / "b.txt").write_text("too short", encoding="utf-8")
    with pytest.raises(check.UserError, match="expected a file of text in UTF-8"):
        own_model.main(["--text", str(tmp_path / "none.txt")])
    with pytest.raises(check.UserError, match="at least 1000 are needed"):
        own_model.main(["--text", str(tmp_path / "b.txt")])


@pytest.mark.parametrize("inside", [True, False], ids=["course", "elsewhere"])
def test_the_notebook_is_the_first_three_lessons_and_runs(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run([sys.executable, str(COURSE / "notebook.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}run python docs/course/notebook.py"
    monkeypatch.chdir(COURSE if inside else tmp_path)
    assert run_notebook(COURSE / "first-three.ipynb", monkeypatch) >= 7


def test_a_notebook_of_each_lesson_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, str(COURSE / "notebook.py"), "--each", str(tmp_path)], check=True)
    books = sorted(tmp_path.glob("*.ipynb"))
    assert [book.stem for book in books] == [page.stem for page in sorted(COURSE.glob("[0-9]*.md"))]
    monkeypatch.chdir(tmp_path)
    for book in books:
        assert run_notebook(book, monkeypatch) >= (2 if book.stem.startswith("11") else 4)


def run_notebook(file: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run its cells, which must print what it shows; their number."""
    book = json.loads(file.read_text(encoding="utf-8"))
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; the extra docs has it")
    nbformat.validate(nbformat.from_dict(book))
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
    return ran
