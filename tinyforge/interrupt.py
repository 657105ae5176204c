"""Ctrl-C while a command is still importing its modules: prints one word, not a traceback.

From then on `run_command` handles it. Your own program that uses tinyforge keeps its hook and Python's traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from tinyforge.invocation import IN_CHECKOUT, PACKAGE

_python = sys.excepthook


def _is_ours() -> bool:
    """Whether the program is a command of this project."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return sys.argv[:1] == ["-m"]  # `python -m tinyforge.chat` does not know its file yet
    file = Path(main).resolve()
    if not file.is_file():  # a program on standard input
        return False
    return file.stem == "tinyforge" or file.is_relative_to(PACKAGE.parent if IN_CHECKOUT else PACKAGE)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("\nstopped", file=sys.stderr)
    else:
        _python(kind, error, trace)


if _is_ours():
    sys.excepthook = _hook
