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


def test_memory_that_runs_out_is_one_line_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    def too_much() -> None:
        raise MemoryError("Out of memory allocating 1,024 bytes\n(allocated so far: 7 bytes).")

    with pytest.raises(SystemExit) as left:
        run_command(too_much)
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.count("\n") == 1
    assert error.startswith("error: out of memory: Out of memory allocating 1,024 bytes (allocated so far: 7 bytes).;")
    assert "the last checkpoint is intact" in error and "--batch-size" in error
