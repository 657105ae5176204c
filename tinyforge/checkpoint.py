"""Checkpoints: a directory per step, whole or absent.

    step-00000500/
        model.safetensors       weights by parameter name
        optimizer.safetensors   the moments, `m.` and `v.` + parameter name; `carried`, a recurrent model's state
        tokenizer.json
        meta.json               model (its registered name), config, step, settings, seed, tokenizer hash, elapsed time
        hashes.json             SHA-256 of each file above, written last

Ranks that share out the optimizer's state write a file each, a **shard** with some of the tensors, whole ones:
model-00001-of-00002.safetensors and so on. Whoever reads sees tensors by name, and no difference.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.files import JSON_NAMES, read_json, replace, sha256_of, shown, sync
from tinyforge.parallel.star import Lost
from tinyforge.tensors import Lazy, Tensors, chunks

FORMAT = 1
_PREFIX = "step-"
_NAME = re.compile(r"step-\d{8,}")  # what else lies in a run's folder, `step-7-good` say, is not ours to remove
CARD = "README.md"
MODEL, OPTIMIZER = "model", "optimizer"
_SHARD = re.compile(rf"({MODEL}|{OPTIMIZER})-(\d{{5}})-of-(\d{{5}})\.safetensors")
_HASHED = ("tokenizer.json", "meta.json")  # at least, and the weights
_USE_ANOTHER = "use another checkpoint of the run"
# Of meta.json, and of what it keeps about the base: all that is read elsewhere without a look at its type.
_TYPES: dict[str, type] = {
    "base": dict, "config": dict, "settings": dict, "step": int, "tokens": int, "corpus": list,
    "elapsed": float, "joules": float, "tokens_per_second": float, "machine": str, "template": str,
    "stages": list, "reference": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose hashes hold. Its tensors are read when they are asked for."""

    path: Path
    meta: dict[str, Any]
    weights: Tensors

    def optimizer(self) -> Tensors:
        return _tensors(self.path, OPTIMIZER)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"


Write = Callable[[Path], Mapping[str, str]]
"""Writes files of tensors into a folder, and returns the hash of each by its name."""


def save(
    out: Path, step: int, weights: Mapping[str, np.ndarray], optimizer: Mapping[str, np.ndarray], tokenizer: Any,
    meta: Mapping[str, Any], keep: int,
) -> Path:  # fmt: skip
    """`save_with` of arrays that are there."""

    def write(folder: Path) -> dict[str, str]:
        files = {MODEL: weights, OPTIMIZER: optimizer}
        return {name: digest for what, arrays in files.items()
                for name, digest in write_shard(folder, what, *lazy(arrays)).items()}  # fmt: skip

    return save_with(out, step, write, tokenizer, meta, keep)


def save_with(out: Path, step: int, write: Write, tokenizer: Any, meta: Mapping[str, Any], keep: int) -> Path:
    """Write out/step-N, then remove all but the newest `keep` checkpoints (0 keeps all). Raises UserError where that
    cannot be, and what `write` raises but OSError."""
    final = out / f"{_PREFIX}{step:08d}"
    try:
        sweep(out)
        _write_directory(final, write, tokenizer, {"format": FORMAT, **meta, "step": step})
    except Lost:
        raise
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


def lazy(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Arrays as `write_shard` takes them."""
    tensors: dict[str, Lazy] = {name: (value.shape, partial(np.asarray, value)) for name, value in arrays.items()}
    return tensors, {name: f"f{8 * value.itemsize}" for name, value in arrays.items()}


def write_shard(
    folder: Path, what: str, tensors: Mapping[str, Lazy], dtype: str | Mapping[str, str], number: int = 0,
    count: int = 1,
) -> dict[str, str]:  # fmt: skip
    """Write the `number`-th of `count` files with MODEL's or OPTIMIZER's tensors, one tensor in memory at a time;
    returns its hash by its name. dtype: as `tensors.chunks`. Raises OSError."""
    name = f"{what}.safetensors" if count == 1 else f"{what}-{number + 1:05d}-of-{count:05d}.safetensors"
    return {name: _write(folder / name, chunks(tensors, dtype))}


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
    out: Path, weights: Mapping[str, np.ndarray], tokenizer: Any, meta: Mapping[str, Any], card: str, dtype: str
) -> None:
    """Write a checkpoint to give away: no optimizer, weights in `dtype` (see `tensors.DTYPES`), the card as README.md.

    `load` reads it like any other; the card has no hash, so that it may be edited. Raises UserError where `out` exists
    or cannot be written.
    """
    if out.exists():
        raise UserError(f"{out} exists already; remove it, or choose another name")

    def write(folder: Path) -> dict[str, str]:
        _write(folder / CARD, [card.encode()])
        return write_shard(folder, MODEL, lazy(weights)[0], dtype)

    try:
        _write_directory(out, write, tokenizer, meta)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; free some space or choose another place") from error


def _write_directory(final: Path, write: Write, tokenizer: Any, meta: Mapping[str, Any]) -> None:
    """What `write` does, tokenizer.json, meta.json and hashes.json in a directory that appears whole or not at all."""
    partial = final.parent / f".partial-{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run has left
        partial.mkdir(parents=True)
        hashes = dict(write(partial))
        tokenizer.save(partial / "tokenizer.json")
        hashes["tokenizer.json"] = sha256_of(partial / "tokenizer.json")
        hashes["meta.json"] = _write(partial / "meta.json", [_to_json(meta)])
        _write(partial / "hashes.json", [_to_json(hashes)])
        sync(partial)
        replace(partial, final)
        sync(final.parent)
    except Exception:
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
    """A checkpoint (or the newest in a run's directory), with every file checked against its hash."""
    path = latest(path)
    verify(path)
    return Checkpoint(path, read_meta(path), _tensors(path, MODEL))


def verify(path: Path) -> None:
    """Check every file of a checkpoint against its hash; UserError if one is missing or was altered.

    What was whole once in this process, and has not been touched since, is not read again.
    """
    hashes = _hashes(path)
    for name in dict.fromkeys([*_files(hashes, MODEL), *_files(hashes, OPTIMIZER, needed=False), *_HASHED, *hashes]):
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


def _hashes(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path / "hashes.json", "the hashes", fix=_USE_ANOTHER)
    return found


def _files(hashes: Mapping[str, Any], what: str, needed: bool = True) -> list[str]:
    """The names of the files that hold MODEL's or OPTIMIZER's tensors: of one, or of all shards that belong together,
    whether they have a hash or not. needed: there must be some."""
    found = [shard for name in hashes if (shard := _SHARD.fullmatch(name)) and shard[1] == what]
    single = f"{what}.safetensors"
    if not found:
        return [single] if needed or single in hashes else []
    count = max(int(shard[3]) for shard in found)
    wanted = [f"{what}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    return wanted + [shard[0] for shard in found if shard[0] not in wanted]


def _tensors(path: Path, what: str) -> Tensors:
    """Of a checkpoint that was verified."""
    names = _files(_hashes(path), what)
    try:
        return Tensors(path / name for name in names)
    except UserError as error:
        raise UserError(f"checkpoint {path}: {error}; {_USE_ANOTHER}") from error


def _to_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _write(file: Path, parts: Iterable[bytes]) -> str:
    """Write a file to the disk for good; returns its SHA-256."""
    digest = hashlib.sha256()
    with open(file, "wb") as f:
        for part in parts:
            f.write(part)
            digest.update(part)
        f.flush()
        os.fsync(f.fileno())
    return digest.hexdigest()
