"""Checkpoints: a directory per step, whole or absent.

    step-00000500/
        model.safetensors       weights by parameter name; in int8, codes and scales (`tinyforge.tensors`)
        optimizer.safetensors   the moments, `m.` and `v.` + parameter name; `carried`, a recurrent model's state
        tokenizer.json          unless the model reads no tokens
        meta.json               model (its registered name), config, step, settings, seed, tokenizer hash, elapsed time
        hashes.json             SHA-256 of each file above, written last

Ranks that shard the optimizer's state each write a file, a **shard**, that holds some of the tensors, each whole:
model-00001-of-00002.safetensors and so on. Readers look tensors up by name and see no difference.

Everything is written into a hidden directory, synced to disk, and renamed. A run that is killed or fills the disk
leaves at most that hidden directory, which the next save removes; older checkpoints are removed only after the new one
is complete. Nothing is pickled.
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
from tinyforge.files import JSON_NAMES, folder_written_whole, read_json, replace, sha256_of, shown, writing
from tinyforge.parallel.star import Lost
from tinyforge.quantised import quantise
from tinyforge.tensors import SCALE, Lazy, Tensors, chunks

FORMAT = 1
_PREFIX = "step-"
_NAME = re.compile(r"step-\d{8,}")  # other names in a run's folder, such as `step-7-good`, are not ours to remove
CARD = "README.md"
PUBLISHED = "published"
"""The folder of a checkpoint with the files of its tokenizer and its template as its base was published."""
MODEL, OPTIMIZER = "model", "optimizer"
_SHARD = re.compile(rf"({MODEL}|{OPTIMIZER})-(\d{{5}})-of-(\d{{5}})\.safetensors")
TOKENIZER = "tokenizer.json"
_USE_ANOTHER = "use another checkpoint of the run"
# The types of values in meta.json, and in its "base", that are used elsewhere without a check.
_NAMES: dict[type, str] = {
    dict: "base config settings chat_template reference",
    list: "corpus stages inputs",
    int: "step tokens",
    float: "elapsed joules",
    str: "machine source template",
}
_TYPES = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_RATE = "_per_second"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with verified hashes. Its tensors are read on access."""

    path: Path
    meta: dict[str, Any]
    weights: Tensors

    def optimizer(self) -> Tensors:
        return _tensors(self.path, OPTIMIZER)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER


Write = Callable[[Path], Mapping[str, str]]
"""Writes files of tensors into a folder, and returns the hash of each by its name."""


def save(
    out: Path,
    step: int,
    weights: Mapping[str, np.ndarray],
    optimizer: Mapping[str, np.ndarray],
    tokenizer: Any,
    meta: Mapping[str, Any],
    keep: int,
) -> Path:
    """`save_with` for arrays in memory."""

    def write(folder: Path) -> dict[str, str]:
        files = {MODEL: weights, OPTIMIZER: optimizer}
        return {
            name: digest
            for what, arrays in files.items()
            for name, digest in write_shard(folder, what, *lazy(arrays)).items()
        }

    return save_with(out, step, write, tokenizer, meta, keep)


def how_to_go_on(out: Path) -> str:
    """What to do after a run in `out` was ended by an error."""
    return "continue with --resume" if steps(out) else "run the same command again"


def save_with(
    out: Path,
    step: int,
    write: Write,
    tokenizer: Any,
    meta: Mapping[str, Any],
    keep: int,
    published: Mapping[str, bytes] | None = None,
    best: int | None = None,
) -> Path:
    """Write out/step-N, then `prune`. published: further files, for
    its folder PUBLISHED. Raises UserError if a file cannot be written, and whatever else `write` raises."""
    final = out / f"{_PREFIX}{step:08d}"
    try:
        sweep(out)
        files = {f"{PUBLISHED}/{name}": data for name, data in (published or {}).items()}
        _write_directory(final, write, tokenizer, {"format": FORMAT, **meta, "step": step}, files)
    except Lost:
        raise
    except (OSError, UserError) as error:
        # The tokenizer raises UserError; the system's error is its cause.
        cause = error.__cause__ if isinstance(error, UserError) else error
        left = steps(out)
        stays = f"the last good checkpoint, {left[-1]}, is untouched" if left else "nothing was saved before"
        raise UserError(
            f"cannot save a checkpoint in {out}: {getattr(cause, 'strerror', None) or error}; {stays}. Free some "
            f"space, then {how_to_go_on(out)}"
        ) from error
    prune(out, keep, best)
    return final


def lazy(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Arrays in the form that `write_shard` takes."""
    tensors: dict[str, Lazy] = {name: (value.shape, partial(np.asarray, value)) for name, value in arrays.items()}
    return tensors, {name: f"{value.dtype.kind}{8 * value.itemsize}" for name, value in arrays.items()}


def write_shard(
    folder: Path,
    what: str,
    tensors: Mapping[str, Lazy],
    dtype: str | Mapping[str, str],
    number: int = 0,
    count: int = 1,
) -> dict[str, str]:
    """Write the `number`-th of `count` files with MODEL's or OPTIMIZER's tensors, one tensor in memory at a time;
    returns its hash by its name. dtype: as `tensors.chunks`. Raises OSError."""
    name = f"{what}.safetensors" if count == 1 else f"{what}-{number + 1:05d}-of-{count:05d}.safetensors"
    return {name: _write(folder / name, chunks(tensors, dtype))}


def prune(out: Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints (0 keeps all) and that of step `best`. Prints a warning for one that
    cannot be removed."""
    for old in steps(out)[:-keep] if keep else []:
        if step_of(old) == best:
            continue
        # Rename first: a kill in between leaves a hidden directory, never half a checkpoint.
        doomed = out / f".partial-{old.name}"
        try:
            replace(old, doomed)
            shutil.rmtree(doomed)
        except OSError as error:  # the new checkpoint is saved, so the run goes on
            print(
                f"warning: cannot remove the old checkpoint {old}: {error.strerror}; the next save tries again",
                file=sys.stderr,
            )


def sweep(out: Path) -> None:
    """Remove partial checkpoints that a killed run was writing or removing. The caller holds the folder's lock."""
    for stale in out.glob(f".partial-{_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)


def export(
    out: Path,
    weights: Mapping[str, np.ndarray],
    tokenizer: Any,
    meta: Mapping[str, Any],
    files: Mapping[str, bytes],
    dtype: str,
) -> None:
    """Write a checkpoint for others: no optimizer, weights in `dtype`, and `files` by name, such as the card.

    dtype: one of `tensors.DTYPES`, or "int8": every tensor with two or more axes as codes, with a scale for each row.

    `load` reads it like any other; the files have no hashes, so that they may be edited. Raises UserError if `out`
    exists, cannot be written, or if int8 is to hold a weight that is not finite.
    """
    if out.exists():
        raise UserError(f"{out} exists already; remove it, or choose another name")

    def write(folder: Path) -> dict[str, str]:
        if dtype == "int8":
            return write_shard(folder, MODEL, *lazy(_coded(weights)))
        return write_shard(folder, MODEL, lazy(weights)[0], dtype)

    with writing(out, "free some space or choose another place"):
        _write_directory(out, write, tokenizer, meta, files)


def _coded(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights as int8 codes and float32 scales. Vectors, such as the gains of norms, stay float32."""
    codes, others = {}, {}
    for name, value in weights.items():
        if value.ndim < 2:
            others[name] = value.astype(np.float32)
        else:
            codes[name], scales = quantise(value, "int8")
            others[name + SCALE] = scales[..., None]
    return others | codes  # the wider type first keeps every tensor aligned in the file


def _write_directory(
    final: Path, write: Write, tokenizer: Any, meta: Mapping[str, Any], files: Mapping[str, bytes]
) -> None:
    """Make a directory with the files of `write`, tokenizer.json, meta.json and hashes.json, and `files` by name, which
    have no hashes and may be edited; it appears atomically."""
    with folder_written_whole(final) as partial:
        write_files(partial, files)
        hashes = dict(write(partial))
        if tokenizer is not None:
            tokenizer.save(partial / "tokenizer.json")
            hashes["tokenizer.json"] = sha256_of(partial / "tokenizer.json")
        hashes["meta.json"] = _write(partial / "meta.json", [_to_json(meta)])
        _write(partial / "hashes.json", [_to_json(hashes)])


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by name, which may have a folder before it. Raises OSError."""
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        _write(folder / name, [data])


def steps(out: Path) -> list[Path]:
    """The checkpoints in `out`, oldest first."""
    return sorted((p for p in out.glob(_PREFIX + "*") if _NAME.fullmatch(p.name) and p.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """The step after which the checkpoint `path` was saved."""
    return int(path.name.removeprefix(_PREFIX))


def latest(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the newest checkpoint in it."""
    if (path / "meta.json").is_file():
        return path
    found = steps(path)
    if not found and path.is_file():
        raise UserError(
            f"{path} is a file, but not a model; expected a run, a Hugging Face directory, or a .gguf or .bin file"
        )
    if not found and path.is_dir() and any(path.iterdir()):
        files = sorted(path.glob("*.gguf"))
        fix = f"give its file, {files[0]}" if files else "check the path"
        raise UserError(f"no checkpoint in {path}: it has no {_PREFIX}* folder and no config.json; {fix}")
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

    A file that this process has verified before, and that has not changed since, is not read again.
    """
    hashes = _hashes(path)
    tokenizer = [TOKENIZER] if os.path.isfile(path / TOKENIZER) else []
    weights = [*_files(hashes, MODEL), *_files(hashes, OPTIMIZER, needed=False)]
    for name in dict.fromkeys([*weights, *tokenizer, "meta.json", *hashes]):
        expected = hashes.get(name)
        if not isinstance(expected, str) or name != os.path.basename(name):
            raise UserError(f"checkpoint {path}: hashes.json has no hash of a file {name!r}; {_USE_ANOTHER}")
        file = path / name
        if not os.path.isfile(file):  # also False for an invalid name
            raise UserError(f"checkpoint {path}: {name} is missing; {_USE_ANOTHER}")
        stat = file.stat()
        state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, expected)
        if state in _whole:
            continue
        got = sha256_of(file)
        if got == expected:
            _whole.add(state)
        else:
            raise UserError(
                f"checkpoint {path}: {name} has SHA-256 {got[:12]}..., hashes.json says {expected[:12]}...; "
                f"the file was altered or damaged, {_USE_ANOTHER}"
            )


_whole: set[tuple[int | str, ...]] = set()  # verified files: their stat and hash


def read_meta(path: Path) -> dict[str, Any]:
    """A checkpoint's meta.json. Raises UserError if it cannot be read or is of another format."""
    meta = read_json(path / "meta.json", "the meta data", fix=_USE_ANOTHER)
    if meta.get("format") != FORMAT:
        raise UserError(f"checkpoint {path}: format {shown(meta.get('format'))}, this program reads {FORMAT}")
    require(path, meta, "kind", "step", "config")
    for part in (meta, meta.get("base", {})):
        units = [name for name in part if name.endswith(_RATE)]  # what a run of images has read is "images"
        types = _TYPES | dict.fromkeys(units, float) | {name.removesuffix(_RATE): int for name in units}
        for name, expected in types.items():
            if name in part and not isinstance(part[name], (int, float) if expected is float else expected):
                got = f"got {name} {shown(part[name])}, expected {JSON_NAMES[expected]}"
                raise UserError(f"checkpoint {path}: meta.json is damaged: {got}; {_USE_ANOTHER}")
    return meta


def require(path: Path, meta: dict[str, Any], *names: str) -> None:
    """Raise UserError if a checkpoint's meta.json lacks one of `names`."""
    if missing := next((name for name in names if name not in meta), ""):
        raise UserError(f"checkpoint {path}: meta.json has no {missing!r}; {_USE_ANOTHER}")


def _hashes(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path / "hashes.json", "the hashes", fix=_USE_ANOTHER)
    return found


def _files(hashes: Mapping[str, Any], what: str, needed: bool = True) -> list[str]:
    """The names of the files with MODEL's or OPTIMIZER's tensors: one file, or all shards of a set, even those without
    a hash. needed: return at least one."""
    found = [shard for name in hashes if (shard := _SHARD.fullmatch(name)) and shard[1] == what]
    single = f"{what}.safetensors"
    if not found:
        return [single] if needed or single in hashes else []
    count = max(int(shard[3]) for shard in found)
    expected = [f"{what}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    return expected + [shard[0] for shard in found if shard[0] not in expected]


def _tensors(path: Path, what: str) -> Tensors:
    """The tensors of a verified checkpoint."""
    names = _files(_hashes(path), what)
    try:
        return Tensors(path / name for name in names)
    except UserError as error:
        raise UserError(f"checkpoint {path}: {error}; {_USE_ANOTHER}") from error


def _to_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _write(file: Path, parts: Iterable[bytes]) -> str:
    """Write a file and sync it to disk; returns its SHA-256."""
    digest = hashlib.sha256()
    with open(file, "wb") as f:
        for part in parts:
            f.write(part)
            digest.update(part)
        f.flush()
        os.fsync(f.fileno())
    return digest.hexdigest()
