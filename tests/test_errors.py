"""run_command: what a user sees when a command stops."""

from __future__ import annotations

import pytest

from tinyforge.errors import UserError, run_command


def raising(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [(UserError("no file; give one"), 2, "error: no file; give one\n"), (KeyboardInterrupt(), 130, "\nstopped\n")],
)
def test_one_line_and_a_status(
    error: BaseException, status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(lambda: raising(error))
    assert left.value.code == status
    assert capsys.readouterr().err == shown


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)
