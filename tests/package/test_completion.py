"""Completion in real shells: bash at a terminal, as a person types; zsh and fish read and answer their scripts."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinyforge import cli
from tinyforge.completion import SHELLS

ALL = "\x1b*"  # readline inserts every completion
DONE = "complete:"


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    found = {}
    for shell in SHELLS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert cli.main(["completion", shell]) == 0
        found[shell] = printed.getvalue()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, scripts: dict[str, str]) -> Path:
    """A folder with a text and two runs."""
    where = tmp_path_factory.mktemp("work")
    (where / "my text.txt").touch()
    (where / "notes.txt").touch()
    for run in ("first", "second"):
        (where / "runs" / run).mkdir(parents=True)
    for shell, text in scripts.items():
        (where / f"script.{shell}").write_text(text, encoding="utf-8")
    return where


class Terminal:
    """bash at a pseudo-terminal."""

    def __init__(self, folder: Path) -> None:
        self.process, self.file = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.environ |= {"PS1": "", "TERM": "dumb", "INPUTRC": "/dev/null"}
            os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
        self.ask("source script.bash; bind 'set enable-bracketed-paste off'; echo ready")

    def ask(self, keys: str) -> str:
        """The line that bash prints after `keys`, Enter and a mark."""
        os.write(self.file, f"{keys}\n".encode())
        os.write(self.file, f"echo {DONE[:4]}''{DONE[4:]}\n".encode())  # as typed it is not yet the mark
        seen, end = b"", time.monotonic() + 20
        while f"\n{DONE}".encode() not in seen:
            ready, _, _ = select.select([self.file], [], [], end - time.monotonic())
            assert ready, f"bash said {seen!r}"
            seen += os.read(self.file, 65536)
        return seen.decode(errors="replace")

    def complete(self, typed: str) -> str:
        """What readline makes of the words: a function called tinyforge prints its arguments."""
        printed = self.ask(f"{typed}{ALL}\x01show \x05")
        lines = [line.strip("\r") for line in printed.split("\n")]
        return next(line.removeprefix("args:").strip() for line in lines if line.startswith("args:"))

    def close(self) -> None:
        os.close(self.file)
        os.waitpid(self.process, 0)


@pytest.fixture(scope="module")
def terminal(folder: Path) -> Iterator[Terminal]:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    found = Terminal(folder)
    found.ask('show() { shift; echo; echo args:"$*"; }')
    yield found
    found.close()


POSITIONS = [
    ("tr", "train"),
    ("data lo", "data local"),
    ("chat --pr", "chat --precision --prompt"),
    ("train --data no", "train --data notes.txt"),
    ("train --data my", "train --data my text.txt"),
    ("train --schedule ", "train --schedule constant cosine wsd"),
    ("train --schedule=co", "train --schedule=constant cosine"),
    ("chat --checkpoint st", "chat --checkpoint storyteller"),
    ("chat --checkpoint runs/", "chat --checkpoint runs/first runs/second"),
    ("text tr", "text train"),
    ("text train --vo", "text train --vocab-size"),
    ("models sh", "models show"),
    ("completion f", "completion fish"),
    ("sft --base no", "sft --base notes.txt"),
    ("train --steps 10 --see", "train --steps 10 --seed"),
    ("train --model l", "train --model llama lstm"),
    ("train --config 12", "train --config 124m"),
    ("train --backend ", "train --backend auto cupy numpy webgpu"),
    ("train --precision bf", "train --precision bf16"),
    ("evaluate --tasks arc_e", "evaluate --tasks arc_easy"),
    ("models show gp", "models show gpt2"),
    ("chat --checkpoint my", "chat --checkpoint my text.txt"),
]


@pytest.mark.parametrize(("typed", "expected"), POSITIONS)
def test_bash_completes_at_a_terminal(typed: str, expected: str, terminal: Terminal) -> None:
    assert terminal.complete(f"tinyforge {typed}") == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_read_their_script(shell: str, scripts: dict[str, str], folder: Path) -> None:
    assert "--prompt" in scripts[shell] or "-l prompt" in scripts[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(folder / f"script.{shell}")], check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("tr", {"train"}),
        ("data lo", {"local"}),
        ("train --schedule ", {"constant", "cosine", "wsd"}),
        ("chat --checkpoint st", {"storyteller"}),
        ("chat --checkpoint runs/f", {"runs/first", "runs/first/"}),
        ("train --data no", {"notes.txt"}),
        ("train --model gp", {"gpt2"}),
        ("text tr", {"train"}),
    ],
)
def test_fish_completes(typed: str, expected: set[str], folder: Path) -> None:
    program = f"source script.fish; complete -C 'tinyforge {typed}'"
    done = subprocess.run(["fish", "-N", "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    found = {line.split("\t")[0] for line in done.stdout.splitlines()}
    assert found and found <= expected
