"""Write first-three.ipynb: the first three lessons with their exercises, as a notebook; or a notebook for each lesson.

    python docs/course/notebook.py                  write it
    python docs/course/notebook.py --check          only say whether it is what the pages give; status 1 if not
    python docs/course/notebook.py --each FOLDER    write a notebook for each lesson into FOLDER

The pages are the source: a Python block becomes a cell, and the text block after it becomes its output.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BOOK = HERE / "first-three.ipynb"
ABOUT = "# The first three lessons\n\nSoftmax, a linear map, the loss."
LESSONS = ("01-softmax", "02-linear", "03-cross-entropy")
PART = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
SETUP = """import sys
from importlib.util import find_spec
from pathlib import Path

# The clone: around this folder, or where `pip install -e .` was run.
found = find_spec("tinyforge")
places = [Path.cwd(), *Path.cwd().parents, *(Path(found.origin).parents[:2] if found else [])]
root = next((p for p in places if (p / "docs" / "course" / "check.py").exists()), None)
if root is None:
    raise SystemExit("no clone of tinyforge around this folder; run pip install -e . in one with this Python")
sys.path[:0] = [str(root), str(root / "docs" / "course")]
from check import CHECKS, EXERCISES, Report, np"""


def lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


def markdown(text: str) -> dict[str, Any]:
    # A notebook is read on its own: pictures are left out, links into the textbook become plain words.
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"!\[[^\]]*\]\([^)]*\)\n+", "", text))
    return {"cell_type": "markdown", "metadata": {}, "source": lines(plain)}


def code(text: str, printed: str = "") -> dict[str, Any]:
    shown = [{"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}] if printed else []
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": shown, "source": lines(text)}


def cells(lessons: Sequence[str], about: str) -> list[dict[str, Any]]:
    made = [
        markdown(f"{about} Run the cells in order; write your answers into the cells of the exercises."),
        code(SETUP),
    ]
    for lesson in lessons:
        page = (HERE / f"{lesson}.md").read_text(encoding="utf-8")
        text, _, text_of_exercise = page.partition("\n## Exercise")
        at = 0
        for found in PART.finditer(text):
            made.append(markdown(text[at : found.start()]))
            made.append(code(found[1], found[2] or ""))
            at = found.end()
        if text[at:].strip():
            made.append(markdown(text[at:]))
        number, _, _ = lesson.partition("-")
        if number == "11":  # its answer is two files, one of them in CUDA
            made.append(markdown(f"### Exercise{text_of_exercise}"))
            continue
        (file,) = (HERE / "exercises").glob(f"e{number}_*.py")
        answer = file.read_text(encoding="utf-8").partition("def ")
        made.append(markdown("### Exercise\n\nReplace the last line of the function, then run the check."))
        made.append(code(answer[1] + answer[2]))
        name = answer[2].partition("(")[0]
        made.append(
            code(
                f'try:\n    CHECKS[{file.stem!r}](type("Answer", (), {{{name!r}: staticmethod({name})}}), '
                "Report())\n"
                'except (NotImplementedError, AssertionError) as error:\n    print("not yet:", error)\n'
                'else:\n    print("right")',
                "not yet: your turn\n",
            )
        )
    return [cell | {"id": f"cell-{i}"} for i, cell in enumerate(made)]


def book(lessons: Sequence[str] = LESSONS, about: str = ABOUT) -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells(lessons, about), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python docs/course/notebook.py", description="Write lessons as notebooks.")
    parser.add_argument("--check", action="store_true", help="only say whether first-three.ipynb is up to date")
    parser.add_argument("--each", type=Path, metavar="FOLDER", help="write a notebook for each lesson into FOLDER")
    args = parser.parse_args()
    if args.each:
        args.each.mkdir(parents=True, exist_ok=True)
        for lesson in sorted(path.stem for path in HERE.glob("[0-9]*.md")):
            file = args.each / f"{lesson}.ipynb"
            file.write_text(book([lesson], f"# Lesson {int(lesson[:2])}\n\n"), encoding="utf-8")
    elif not args.check:
        BOOK.write_text(book(), encoding="utf-8")
    elif not BOOK.is_file() or BOOK.read_text(encoding="utf-8") != book():
        print(f"{BOOK.name} is not what the lessons give")
        sys.exit(1)
