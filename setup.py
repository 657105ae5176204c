"""What pyproject.toml cannot express: how models/, data/ and recipes/ get into a wheel.

In the repository they are top-level folders, so that `python recipes/pretrain.py` and `from models.gpt2 import GPT2`
work. In site-packages such general names are not ours to take. So a wheel holds them as `tinyforge._repo`, with its
source rewritten: imports use the new names, and messages the command `tinyforge`. Nothing happens at run time.
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
# Modules that are typed differently after `python -m`.
TYPED = {
    "tinyforge.formats.convert": "tinyforge.formats convert",
    "tinyforge.formats.average": "tinyforge.formats average",
    "tinyforge.formats.calibrate": "tinyforge.formats calibrate",
    "tinyforge.tokenizers.command": "tinyforge.tokenizers",
    "tinyforge.zoo.command": "models",
}


def packed(text: str) -> str:
    """The source of a Python file in the wheel. No line is added or removed, so that tracebacks match both."""
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
