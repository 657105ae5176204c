"""Ctrl-C while a command still imports its modules: a word, where Python would print a traceback.

From `run_command` on, that function sees to it. A program of one's own that uses tinyforge keeps Python's traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

_ROOT = Path(__file__).resolve().parents[1]
_python = sys.excepthook


def _is_ours() -> bool:
    """Whether the program is a command of this repository."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return sys.argv[:1] == ["-m"]  # `python -m tinyforge.chat` does not know its file yet
    return Path(main).resolve().is_relative_to(_ROOT)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt) and _is_ours():
        print("\nstopped", file=sys.stderr)
    else:
        _python(kind, error, trace)


sys.excepthook = _hook
