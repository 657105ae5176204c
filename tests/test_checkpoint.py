"""Checkpoints: whole or absent, refused when damaged, and never lost to a save that fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import checkpoint
from tinyforge.errors import UserError
from tinyforge.files import sha256_of
from tinyforge.tokenizers import Tokenizer

TOKENIZER = Tokenizer([(104, 105)], ["<|endoftext|>"])
FILES = ("model.safetensors", "optimizer.safetensors", "tokenizer.json", "meta.json")


def save(out: Path, step: int, keep: int = 0) -> Path:
    """A checkpoint whose numbers are its step."""
    weights = {"a.weight": np.full((2, 3), step, np.float32), "b.weight": np.array([step, 0.1])}
    moments = {"m.a.weight": np.full((2, 3), -step, np.float32)}
    meta = {"kind": "pretrain", "config": {"dim": 3, "mtp_weights": (1.0, 0.5)}}
    return checkpoint.save(out, step, weights, moments, TOKENIZER, meta, keep)


def names(out: Path) -> list[str]:
    return sorted(p.name for p in out.iterdir())


def assert_loads(path: Path, step: int) -> None:
    found = checkpoint.load(path)
    assert found.path.name == f"step-{step:08d}"
    assert found.meta["step"] == step
    np.testing.assert_array_equal(found.weights["a.weight"], np.full((2, 3), step, np.float32))


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "deep" / "run", 7)
    assert names(path) == sorted([*FILES, "hashes.json"])
    found = checkpoint.load(path)
    assert found.weights["a.weight"].dtype == np.float32 and found.weights["b.weight"].dtype == np.float64
    assert found.weights["b.weight"].tolist() == [7, 0.1]
    assert found.optimizer()["m.a.weight"].tolist() == [[-7] * 3] * 2
    assert found.meta == {
        "format": checkpoint.FORMAT,
        "kind": "pretrain",
        "step": 7,
        "config": {"dim": 3, "mtp_weights": [1.0, 0.5]},
    }
    assert Tokenizer.load(found.tokenizer_path).hash() == TOKENIZER.hash()


@pytest.mark.parametrize(
    "damaged",
    [{"images": "many"}, {"images_per_second": "fast"}, {"base": {"images_per_second": [1]}}],
    ids=["read", "rate", "of the base"],
)
def test_a_meta_of_other_types_is_refused_in_any_unit(tmp_path: Path, damaged: dict[str, Any]) -> None:
    path = save(tmp_path, 7)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "images": 64, "images_per_second": 9, **damaged}))
    with pytest.raises(UserError, match="meta.json is damaged: got images.*, expected a"):
        checkpoint.read_meta(path)


def test_a_run_loads_its_newest(tmp_path: Path) -> None:
    for step in (900, 1000, 20):
        save(tmp_path, step)
    assert_loads(tmp_path, 1000)
    assert_loads(tmp_path / "step-00000020", 20)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step-00000020", "step-00000900", "step-00001000"]


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5]), (0, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]


@pytest.mark.parametrize("kept", ["step-00000003", ".partial-step-00000003"], ids=["its name", "its files"])
def test_an_old_one_that_stays_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    """First the checkpoint cannot be renamed, then its files cannot be removed; in the end both can."""
    old, replace, rmtree = save(tmp_path, 3), os.replace, shutil.rmtree

    def rename(path: Path, to: Path) -> None:
        if path.name == kept:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        replace(path, to)

    def remove(path: Path, ignore_errors: bool = False) -> None:
        if path.name != kept:
            rmtree(path, ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", rename)
        patch.setattr(shutil, "rmtree", remove)
        assert_loads(save(tmp_path, 6, keep=1), 6)
    warning = f"warning: cannot remove the old checkpoint {old}: Permission denied; the next save tries again\n"
    assert capsys.readouterr().err == warning and old.parent.joinpath(kept).is_dir()
    save(tmp_path, 9, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000009"]


@pytest.mark.parametrize("name", FILES)
def test_one_changed_bit_is_refused(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, 3) / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=f"{name} has SHA-256 .*hashes.json says .*use another checkpoint"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    (save(tmp_path, 3) / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing; use another checkpoint"):
        checkpoint.load(tmp_path)


def test_missing_or_damaged_hashes_are_refused(tmp_path: Path) -> None:
    hashes = save(tmp_path, 3) / "hashes.json"
    hashes.write_text('{"model.safe', encoding="utf-8")
    with pytest.raises(UserError, match="cannot read .*hashes.json"):
        checkpoint.load(tmp_path)
    hashes.unlink()
    with pytest.raises(UserError, match="cannot read .*hashes.json"):
        checkpoint.load(tmp_path)


def test_nothing_to_load_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=f"no checkpoint in {path}; train one first"):
            checkpoint.load(path)


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    partial = tmp_path / ".partial-step-00000006"
    partial.mkdir()
    for name in FILES:  # all but the hashes, which come last
        (partial / name).write_bytes((path / name).read_bytes())
    assert_loads(tmp_path, 3)
    save(tmp_path, 9)
    assert names(tmp_path) == ["step-00000003", "step-00000009"]


@pytest.mark.parametrize(
    "call", range(1, 8), ids=["model", "optimizer", "tokenizer", "its name", "meta", "hashes", "all"]
)
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Synced to disk are five files, the tokenizer's name, and the folder; the disk is full at the call-th."""
    save(tmp_path, 3)
    calls, sync = 0, os.fsync

    def full(descriptor: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught:
        save(tmp_path, 6, keep=1)
    message = str(caught.value)
    assert calls == call and "\n" not in message
    assert f"cannot save a checkpoint in {tmp_path}: No space left on device" in message
    assert f"{tmp_path / 'step-00000003'}, is untouched" in message and "--resume" in message
    assert names(tmp_path) == ["step-00000003"]
    assert_loads(tmp_path, 3)
    save(tmp_path, 6, keep=1)  # there is room again
    assert names(tmp_path) == ["step-00000006"]
    assert_loads(tmp_path, 6)


def test_no_room_for_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device; nothing was saved before"):
        save(tmp_path, 3)
    assert names(tmp_path) == []


# --- several files ----------------------------------------------------------------------------------------------------


def save_shards(out: Path, step: int, count: int = 3) -> Path:
    """A checkpoint of `count` ranks, each with a weight and a moment whose numbers are its own."""

    def write(folder: Path) -> dict[str, str]:
        hashes = {}
        for number in range(count):
            for what, prefix in (("model", ""), ("optimizer", "m.")):
                tensors = {f"{prefix}{number}.weight": np.full((2, number + 1), step + number, np.float32)}
                hashes |= checkpoint.write_shard(folder, what, *checkpoint.lazy(tensors), number, count)
        return hashes

    meta = {"kind": "pretrain", "config": {}}
    return checkpoint.save_with(out, step, write, TOKENIZER, meta, keep=0)


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    path = save_shards(tmp_path, 7)
    assert "model-00001-of-00003.safetensors" in names(path) and "model.safetensors" not in names(path)
    found = checkpoint.load(tmp_path)
    assert {name: tensor.tolist() for name, tensor in found.weights.items()} == {
        "0.weight": [[7]] * 2,
        "1.weight": [[8] * 2] * 2,
        "2.weight": [[9] * 3] * 2,
    }
    assert found.weights.shape("2.weight") == (2, 3) and found.weights.shape("absent") is None
    assert sorted(found.optimizer()) == ["m.0.weight", "m.1.weight", "m.2.weight"]
    save(tmp_path, 9, keep=1)  # which removes the other
    assert names(tmp_path) == ["step-00000009"]


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_shard_that_is_missing_or_foreign_is_refused(tmp_path: Path, what: str) -> None:
    path, other = save_shards(tmp_path / "run", 3), save_shards(tmp_path / "other", 4)
    name = f"{what}-00002-of-00003.safetensors"
    ours = (path / name).read_bytes()
    hashes = (path / "hashes.json").read_text()

    def refused() -> str:
        with pytest.raises(UserError) as caught:
            checkpoint.load(path)
        message = str(caught.value)
        assert "\n" not in message and message.endswith("use another checkpoint of the run")
        return message

    (path / name).unlink()
    assert f"{name} is missing" in refused()
    (path / name).write_bytes((other / name).read_bytes())
    assert f"{name} has SHA-256" in refused()
    (path / name).write_bytes(ours)
    # Its line is missing too: the others' names tell how many there are.
    kept = {key: value for key, value in json.loads(hashes).items() if key != name}
    (path / "hashes.json").write_text(json.dumps(kept))
    assert f"hashes.json has no hash of a file '{name}'" in refused()
    # A shard of a world of another size, with a hash that holds.
    foreign = save_shards(tmp_path / "larger", 3, count=4) / f"{what}-00004-of-00004.safetensors"
    shutil.copy(foreign, path)
    more = json.loads(hashes) | {foreign.name: sha256_of(foreign)}
    (path / "hashes.json").write_text(json.dumps(more))
    assert f"hashes.json has no hash of a file '{what}-00001-of-00004.safetensors'" in refused()
    (path / "hashes.json").write_text(hashes)
    assert sorted(checkpoint.load(path).weights) == ["0.weight", "1.weight", "2.weight"]


def test_two_files_with_the_same_tensor_are_refused(tmp_path: Path) -> None:
    def write(folder: Path) -> dict[str, str]:
        tensors = checkpoint.lazy({"a": np.zeros(1, np.float32)})
        return {
            **checkpoint.write_shard(folder, "model", *tensors, 0, 2),
            **checkpoint.write_shard(folder, "model", *tensors, 1, 2),
        }

    checkpoint.save_with(tmp_path, 1, write, TOKENIZER, {"kind": "pretrain", "config": {}}, 0)
    with pytest.raises(UserError, match="00002-of-00002.safetensors and .*00001-of-00002.safetensors both have a; "):
        checkpoint.load(tmp_path)


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Saving asks for a tensor when the one before is written; loading reads none."""
    alive = most = 0

    class Counted(np.ndarray):
        def __del__(self) -> None:
            nonlocal alive
            alive -= self.base is None

    def make() -> np.ndarray:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        array = Counted((1000,), np.float32)
        array[:] = 3
        return array

    def write(folder: Path) -> dict[str, str]:
        tensors = {str(n): ((1000,), make) for n in range(9)}
        return checkpoint.write_shard(folder, "model", tensors, "f32")

    checkpoint.save_with(tmp_path, 1, write, TOKENIZER, {"kind": "pretrain", "config": {}}, 0)
    assert most <= 2 and alive == 0
    found = checkpoint.load(tmp_path)
    shutil.rmtree(found.path)
    with pytest.raises(UserError, match="cannot read .*model.safetensors: No such file"):
        _ = found.weights["3"]
