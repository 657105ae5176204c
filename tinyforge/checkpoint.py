"""Checkpoints: a directory per step, whole or absent.

    step-00000500/
        model.safetensors       weights by parameter name
        optimizer.safetensors   AdamW's moments, `m.` and `v.` + parameter name; `carried`, a recurrent model's state
        tokenizer.json
        meta.json               model (its registered name), config, step, settings, seed, tokenizer hash, elapsed time
        hashes.json             SHA-256 of each file above, written last

Everything is written into a hidden directory beside it, synced to disk, and renamed. A run that is killed or meets a
full disk leaves at most that hidden directory, which the next save removes; older checkpoints are not touched before
the new one stands. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.files import JSON_NAMES, read_json, replace, sha256_of, shown, sync
from tinyforge.tensors import chunks

FORMAT = 1
_PREFIX = "step-"
_NAME = re.compile(r"step-\d{8,}")  # what else lies in a run's folder, `step-7-good` say, is not ours to remove
CARD = "README.md"
_HASHED = ("model.safetensors", "tokenizer.json", "meta.json")  # at least
_USE_ANOTHER = "use another checkpoint of the run"
# Of meta.json, and of what it keeps about the base: all that is read elsewhere without a look at its type.
_TYPES: dict[str, type] = {
    "base": dict, "config": dict, "settings": dict, "step": int, "tokens": int, "corpus": list,
    "elapsed": float, "joules": float, "tokens_per_second": float, "machine": str, "template": str,
    "stages": list, "reference": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and whose hashes hold."""

    path: Path
    meta: dict[str, Any]
    weights: dict[str, np.ndarray]

    def optimizer(self) -> dict[str, np.ndarray]:
        return _tensors(self.path / "optimizer.safetensors")

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"


def save(
    out: Path,
    step: int,
    weights: dict[str, np.ndarray],
    optimizer: dict[str, np.ndarray],
    tokenizer: Any,
    meta: dict[str, Any],
    keep: int,
) -> Path:
    """Write out/step-N, then remove all but the newest `keep` checkpoints (0 keeps all)."""
    from safetensors.numpy import save as to_bytes

    final = out / f"{_PREFIX}{step:08d}"
    try:
        sweep(out)
        files = {
            "model.safetensors": to_bytes(weights),
            "optimizer.safetensors": to_bytes(optimizer),
            "meta.json": _to_json({"format": FORMAT, **meta, "step": step}),
        }
        _write_directory(final, files, tokenizer)
    except (OSError, UserError) as error:
        # The tokenizer reports its own faults; what the system said is their cause.
        cause = error.__cause__ if isinstance(error, UserError) else error
        left = steps(out)
        stays = f"the last good checkpoint, {left[-1]}, is untouched" if left else "nothing was saved before"
        raise UserError(
            f"cannot save a checkpoint in {out}: {getattr(cause, 'strerror', None) or error}; {stays}. Free some "
            "space, then continue with --resume"
        ) from error
    prune(out, keep)
    return final


def prune(out: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints (0 keeps all). What cannot be removed is named on stderr."""
    for old in steps(out)[:-keep] if keep else []:
        # Renamed first: a kill half-way leaves a hidden directory, never half a checkpoint.
        doomed = out / f".partial-{old.name}"
        try:
            replace(old, doomed)
            shutil.rmtree(doomed)
        except OSError as error:  # the new one is saved: that is no reason to stop
            print(f"warning: cannot remove the old checkpoint {old}: {error.strerror}; the next save tries again",
                  file=sys.stderr)  # fmt: skip


def sweep(out: Path) -> None:
    """Remove what a killed run has left of checkpoints that it wrote or removed. The caller holds the folder."""
    for stale in out.glob(f".partial-{_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)


def export(
    out: Path, weights: dict[str, np.ndarray], tokenizer: Any, meta: dict[str, Any], card: str, dtype: str
) -> None:
    """Write a checkpoint to give away: no optimizer, weights in `dtype` (see `tensors.DTYPES`), the card as README.md.

    `load` reads it like any other; the card has no hash, so that it may be edited. Raises UserError where `out` exists
    or cannot be written.
    """
    if out.exists():
        raise UserError(f"{out} exists already; remove it, or choose another name")
    lazy = {name: (value.shape, partial(np.asarray, value)) for name, value in weights.items()}
    files = {"model.safetensors": b"".join(chunks(lazy, dtype)), "meta.json": _to_json(meta), CARD: card.encode()}
    try:
        _write_directory(out, files, tokenizer)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; free some space or choose another place") from error


def _write_directory(final: Path, files: dict[str, bytes], tokenizer: Any) -> None:
    """Write the files, tokenizer.json and hashes.json into a directory that appears whole or not at all."""
    partial = final.parent / f".partial-{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run has left
        partial.mkdir(parents=True)
        tokenizer.save(partial / "tokenizer.json")
        hashes = {"tokenizer.json": sha256_of(partial / "tokenizer.json")}
        for name, data in files.items():
            _write(partial / name, data)
            if name != CARD:
                hashes[name] = _sha256(data)
        _write(partial / "hashes.json", _to_json(hashes))
        sync(partial)
        replace(partial, final)
        sync(final.parent)
    except (OSError, UserError):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def steps(out: Path) -> list[Path]:
    """The checkpoints in `out`, oldest first."""
    return sorted((p for p in out.glob(_PREFIX + "*") if _NAME.fullmatch(p.name) and p.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """The step after which a run has saved the checkpoint `path`."""
    return int(path.name.removeprefix(_PREFIX))


def latest(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the newest checkpoint in it."""
    if (path / "meta.json").is_file():
        return path
    found = steps(path)
    if not found:
        raise UserError(f"no checkpoint in {path}; train one first, e.g. python recipes/pretrain.py --out {path}")
    return found[-1]


def load(path: Path) -> Checkpoint:
    """Read a checkpoint (or the newest in a run's directory), checking every file against its hash."""
    path = latest(path)
    verify(path)
    return Checkpoint(path, read_meta(path), _tensors(path / "model.safetensors"))


def verify(path: Path) -> None:
    """Check every file of a checkpoint against its hash; UserError if one is missing or was altered.

    What was whole once in this process, and has not been touched since, is not read again.
    """
    hashes = read_json(path / "hashes.json", "the hashes", fix=_USE_ANOTHER)
    for name in dict.fromkeys([*_HASHED, *hashes]):
        wanted = hashes.get(name)
        if not isinstance(wanted, str) or name != os.path.basename(name):
            raise UserError(f"checkpoint {path}: hashes.json has no hash of a file {name!r}; {_USE_ANOTHER}")
        file = path / name
        if not os.path.isfile(file):  # False for a name that no system takes
            raise UserError(f"checkpoint {path}: {name} is missing; {_USE_ANOTHER}")
        stat = file.stat()
        state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, wanted)
        if state in _whole:
            continue
        got = sha256_of(file)
        if got == wanted:
            _whole.add(state)
        else:
            raise UserError(
                f"checkpoint {path}: {name} has SHA-256 {got[:12]}..., hashes.json says {wanted[:12]}...; "
                f"the file was altered or damaged, {_USE_ANOTHER}"
            )


_whole: set[tuple[int | str, ...]] = set()  # files whose hash was right, as they were then


def read_meta(path: Path) -> dict[str, Any]:
    """A checkpoint's meta.json. Raises UserError where it cannot be read or is of another format."""
    meta = read_json(path / "meta.json", "the meta data", fix=_USE_ANOTHER)
    if meta.get("format") != FORMAT:
        raise UserError(f"checkpoint {path}: format {shown(meta.get('format'))}, this program reads {FORMAT}")
    require(path, meta, "kind", "step", "config")
    for part in (meta, meta.get("base", {})):
        for name, wanted in _TYPES.items():
            if name in part and not isinstance(part[name], (int, float) if wanted is float else wanted):
                got = f"got {name} {shown(part[name])}, wanted {JSON_NAMES[wanted]}"
                raise UserError(f"checkpoint {path}: meta.json is damaged: {got}; {_USE_ANOTHER}")
    return meta


def require(path: Path, meta: dict[str, Any], *names: str) -> None:
    """UserError where a checkpoint's meta.json lacks one of `names`."""
    if missing := next((name for name in names if name not in meta), ""):
        raise UserError(f"checkpoint {path}: meta.json has no {missing!r}; {_USE_ANOTHER}")


def _tensors(file: Path) -> dict[str, np.ndarray]:
    """Tensors by name; bfloat16 as float32, which holds it exactly: NumPy itself has no bfloat16."""
    from safetensors import deserialize

    try:
        return {name: _array(**stored) for name, stored in deserialize(file.read_bytes())}
    except Exception as error:  # safetensors raises its own type, and OSError where the file cannot be read
        raise UserError(f"cannot read {file}: {error}; {_USE_ANOTHER}") from error


def _array(dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    if dtype == "BF16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    if dtype not in ("F32", "F64"):
        raise ValueError(f"tensors of {dtype}, wanted F32, F64 or BF16")
    return np.frombuffer(data, {"F32": "<f4", "F64": "<f8"}[dtype]).reshape(shape)


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(file: Path, data: bytes) -> None:
    with open(file, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
