"""Ctrl-C while a command is still importing its modules: prints one word, not a traceback.

From then on `run_command` handles it. Your own program that uses tinyforge keeps Python's traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = (_PACKAGE / "_repo").is_dir()  # from a wheel: the folders beside the package are not ours
_python = sys.excepthook


def _is_ours() -> bool:
    """Whether the program is a command of this project."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return sys.argv[:1] == ["-m"]  # `python -m tinyforge.chat` does not know its file yet
    file = Path(main).resolve()
    return file.stem == "tinyforge" or file.is_relative_to(_PACKAGE if _INSTALLED else _PACKAGE.parent)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt) and _is_ours():
        print("\nstopped", file=sys.stderr)
    else:
        _python(kind, error, trace)


sys.excepthook = _hook
