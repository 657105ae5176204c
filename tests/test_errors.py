"""run_command: what a user sees when a command stops."""

from __future__ import annotations

import errno
import io
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

import duckdb
import pytest

from tinyforge.errors import Parser, UserError, run_command

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("tinyforge", "models", "data", "recipes", "bench", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if '\nif __name__ == "__main__":\n' in path.read_text(encoding="utf-8")
    and path.name != "jinja_sandbox.py"  # a process that the tokenizers start, no command
)


def raising(error: BaseException) -> None:
    raise error


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as left:
        run_command(lambda: print("a reply"))
    assert left.value.code == 1
    assert capsys.readouterr().err == "error: no space is left on the disk that the output goes to; free some\n"


def test_closed_streams_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    found: list[object] = []
    with pytest.raises(SystemExit) as left:
        run_command(lambda: found.extend((sys.stdin.read(), sys.stdout.isatty(), sys.stderr.isatty())))
    assert left.value.code == 0 and found == ["", False, False]


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (UserError("no file; give one"), 2, "error: no file; give one\n"),
        (UserError("unknown key 'a\x1b]0;title\x07'"), 2, "error: unknown key 'a]0;title'\n"),  # of somebody's file
        (KeyboardInterrupt(), 130, "\nstopped\n"),
    ],
)
def test_one_line_and_a_status(
    error: BaseException, status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(lambda: raising(error))
    assert left.value.code == status
    assert capsys.readouterr().err == shown


def test_ctrl_c_in_a_query_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Where duckdb has the signal, it raises a RuntimeError."""
    later = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    later.start()
    with pytest.raises(SystemExit) as left:
        run_command(lambda: duckdb.execute("SELECT sum(sqrt(a.i * b.i)) FROM range(1000000) a(i), range(1000000) b(i)"))
    later.join()
    assert left.value.code == 130 and capsys.readouterr().err == "\nstopped\n"


def test_a_bug_keeps_its_traceback() -> None:
    for error in (ZeroDivisionError(), RuntimeError("a bug")):
        with pytest.raises(type(error)):
            run_command(lambda error=error: raising(error))


def test_memory_that_runs_out_is_one_line_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    def too_much() -> None:
        raise MemoryError("Out of memory allocating 1,024 bytes\n(allocated so far: 7 bytes).")

    with pytest.raises(SystemExit) as left:
        run_command(too_much)
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.count("\n") == 1
    assert error.startswith("error: out of memory: Out of memory allocating 1,024 bytes (allocated so far: 7 bytes).;")
    assert "a checkpoint that was saved is intact" in error and "--batch-size" in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "many"], "argument --steps: invalid int value: 'many'; see a.py --help"),
        ([], "the following arguments are required: --steps; see a.py --help"),
        (["--steps", "1", "--stop\nnow"], "unrecognized arguments: --stop now; did you mean --steps? See a.py --help"),
        (["--steps", "1", "--zero=1"], "unrecognized arguments: --zero=1; see a.py --help"),
        (["--steps", "1", "my", "run"], "unrecognized arguments: my run; did you mean --base my? See a.py --help"),
    ],
)
def test_wrong_flags_are_a_user_error(argv: list[str], message: str) -> None:
    parser = Parser(prog="a.py")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--base")
    with pytest.raises(UserError) as caught:
        parser.parse_args(argv)
    assert str(caught.value) == message


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_answers_an_unknown_flag_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--no-such-flag"])
    monkeypatch.syspath_prepend((ROOT / command).parent)  # as Python does for a script
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / command), run_name="__main__")
    shown = capsys.readouterr().err
    assert left.value.code == 2 and shown.count("\n") == 1, shown
    assert shown.startswith("error: ") and shown.endswith(" --help\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--some 0", "--some is 0, expected 1 to 9"),
        ("--some 10", "--some is 10, expected 1 to 9"),
        ("--share nan", "--share is nan, expected 0 or more"),
        ("--rows 3 1", "--rows is 1, expected 2 or more"),
    ],
)
def test_a_number_beyond_the_bounds_of_its_flag_is_refused(flags: str, message: str) -> None:
    parser = Parser(prog="test")
    parser.flag("--some", 5, "a number", 1, 9)
    parser.flag("--share", 0.5, "another", 0)
    parser.flag("--rows", int, "several", 2, nargs="+")
    assert vars(parser.parse_args([])) == {"some": 5, "share": 0.5, "rows": None}
    assert vars(parser.parse_args("--some 9 --share 0 --rows 2 3".split())) == {"some": 9, "share": 0.0, "rows": [2, 3]}
    with pytest.raises(UserError, match=message):
        parser.parse_args(flags.split())
