"""Files: whole or not at all."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tinyforge.errors import UserError
from tinyforge.files import read_json, replace, write_whole, written_whole


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = Path(os.devnull) if kind == "device" else tmp_path / "there"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    mode = path.stat().st_mode
    with pytest.raises(OSError, match="a folder or a device is there"):
        write_whole(path, "text")
    assert path.stat().st_mode == mode and list(tmp_path.iterdir()) == ([] if kind == "device" else [path])


def test_a_file_appears_when_its_block_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old\n")
    (tmp_path / ".partial-a.txt").write_text("left by a run that was killed", encoding="utf-8")
    with written_whole(path) as beside:
        beside.write_text("new\n", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == "old\n"
    assert contents(tmp_path) == {"a.txt": "new\n"}


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_after_an_error_the_old_file_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old\n")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step != "write":
        monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"), written_whole(path) as beside:
        beside.write_text("new\n", encoding="utf-8")
        if step == "write":
            full()
    assert contents(tmp_path) == {"a.txt": "old\n"}


def test_windows_refuses_a_file_in_use_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals, real = [PermissionError(errno.EACCES, "in use")] * 2, os.replace

    def busy(source: Path, target: Path) -> None:
        if refusals:
            raise refusals.pop()
        real(source, target)

    (tmp_path / "a").write_text("new")
    monkeypatch.setattr(os, "replace", busy)
    with pytest.raises(PermissionError):
        replace(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(sys, "platform", "win32")
    replace(tmp_path / "a", tmp_path / "b")
    assert contents(tmp_path) == {"b": "new"}


# --- files of others


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_json(path, "the plan", **options)
    message = str(caught.value)
    assert message.startswith(f"cannot read the plan {path}: ") and "\n" not in message and len(message) < 300
    return message


def test_json_of_the_wanted_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, -2.5, null, "é", 18446744073709551615]}', encoding="utf-8")
    assert read_json(path, "the plan") == {"a": [1, -2.5, None, "é", 2**64 - 1]}
    path.write_text("\ufeff []", encoding="utf-8")
    assert read_json(path, "the plan", list) == []
    size = path.stat().st_size
    assert read_json(path, "the plan", list, max_bytes=size) == []
    assert f"got more than {size - 1} bytes" in refusal(path, wanted_type=list, max_bytes=size - 1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not JSON (line 1"),
        (b"{\n\n", "is not JSON (line 3"),
        (b"\xff", "is not UTF-8 at byte 0"),
        ("\ufeff\ufeff{}".encode(), "is not JSON (line 1"),
        (b"[" * 200_000, "is nested too deeply"),
        (b'{"a":' * 200_000, "is nested too deeply"),
        (b"[" * 300 + b"]" * 300, "is nested too deeply"),
        (b'{"a": 1} x', "is not JSON (line 1: Extra data)"),
        (b'{"a": ' + b"9" * 21 + b"}", "got a whole number of 21 digits, expected 20 at most"),
        (b'{"a": -' + b"9" * 10_000 + b"}", "got a whole number of 10000 digits"),
        (b"[1]", "got a list, expected an object"),
        (b'"a"', "got a string, expected an object"),
        (b"1", "got a number, expected an object"),
        (b"null", "got null, expected an object"),
    ],
    ids=lambda value: ascii(value[:12]),
)
def test_json_that_is_refused(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert expected in refusal(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none")
    assert "Is a directory" in refusal(tmp_path)
    assert "null byte" in refusal(Path(f"{tmp_path}/a\0b"))
