"""Write first-three.ipynb: the first three lessons with their exercises, as a notebook.

    python docs/course/notebook.py            write it
    python docs/course/notebook.py --check    only say whether it is what the pages give; status 1 if not

The pages are the source: a Python block becomes a cell, and the text block after it becomes its output.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BOOK = HERE / "first-three.ipynb"
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


def cells() -> list[dict[str, Any]]:
    made = [
        markdown(
            "# The first three lessons\n\nSoftmax, a linear map, the loss. Run the cells in order; write "
            "your answers into the cells of the exercises."
        ),
        code(SETUP),
    ]
    for lesson in LESSONS:
        text, _, _ = (HERE / f"{lesson}.md").read_text(encoding="utf-8").partition("\n## Exercise")
        at = 0
        for found in PART.finditer(text):
            made.append(markdown(text[at : found.start()]))
            made.append(code(found[1], found[2] or ""))
            at = found.end()
        if text[at:].strip():
            made.append(markdown(text[at:]))
        number, _, _ = lesson.partition("-")
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


def book() -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells(), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        BOOK.write_text(book(), encoding="utf-8")
    elif not BOOK.is_file() or BOOK.read_text(encoding="utf-8") != book():
        print(f"{BOOK.name} is not what the lessons give")
        sys.exit(1)
