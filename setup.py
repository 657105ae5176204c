"""What pyproject.toml cannot say: how models/, data/ and recipes/ get into a wheel.

In the repository they are folders of their own, so that `python recipes/pretrain.py` and `from models.gpt2 import GPT2`
read as they should. In site-packages such names belong to nobody. A wheel holds them as `tinyforge._repo`, and its text
says so: imports name the new place, and messages name the command `tinyforge`. Nothing happens at run time.
"""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FOLDERS = {"models": "*", "data": "*", "recipes": "*.py"}
COMMANDS: dict[tuple[str, ...], str] = runpy.run_path(str(ROOT / "tinyforge/commands.py"))["MODULES"]
# Where the module of a command is not what one types after `python -m`.
TYPED = {"tinyforge.hub.convert": "tinyforge.hub convert", "tinyforge.text.command": "tinyforge.text",
         "tinyforge.zoo.command": "models"}  # fmt: skip


def packed(text: str) -> str:
    """The text of a Python file as the wheel has it; no line is added or removed, so that tracebacks fit both."""
    text = re.sub(r"^(\s*from )((?:models|data|recipes)\b[\w.]* import )", r"\1tinyforge._repo.\2", text, flags=re.M)
    text = re.sub(r"^sys\.path\.insert\(0, str\(Path\(__file__\).*$", "", text, flags=re.M)
    for words, module in COMMANDS.items():
        command = " ".join(("tinyforge", *words))
        if module.startswith("recipes."):
            text = re.sub(rf"(?:python )?\b{module.replace('.', '/')}\.py\b", command, text)
        else:
            text = re.sub(rf"\bpython -m {re.escape(TYPED.get(module, module))}\b(?!\.\w)", command, text)
    return text


class Build(build_py):
    def run(self) -> None:
        if self.editable_mode:
            return super().run()
        shutil.rmtree(Path(self.build_lib) / "tinyforge", ignore_errors=True)  # what an earlier build left
        super().run()
        package = Path(self.build_lib) / "tinyforge"
        for name, pattern in FOLDERS.items():
            for file in (ROOT / name).rglob(pattern):
                target = package / "_repo" / file.relative_to(ROOT)
                if file.is_file() and "__pycache__" not in file.parts:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target)
        for name in ("", "recipes"):
            (package / "_repo" / name / "__init__.py").write_text('"""See setup.py in the repository."""\n')
        for file in package.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            file.write_text(packed(text), encoding="utf-8")


if __name__ == "__main__":
    setup(cmdclass={"build_py": Build})
