"""Files: whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tinyforge.files import write_whole, written_whole


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
