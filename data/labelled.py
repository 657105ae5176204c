"""Labelled images and texts for recipes/classify.py.

    images   a folder of idx files (MNIST's format, gzipped or not: train-images-idx3-ubyte.gz, ...), a folder with a
             folder of PNG files per class, or a parquet file with the columns image and label
    texts    .parquet, .jsonl (or .jsonl.gz) or .csv with the columns text and label, and text2 for pairs of texts

A label is the number of a class, from 0, or its name. All data are checked before training: an error is one line with
the file, what is wrong, and what was expected.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.data.files import MAX_RATIO, read_file
from tinyforge.data.local import decode_text
from tinyforge.data.parquet import connect, escape_glob, reading
from tinyforge.data.readers import cut_rows
from tinyforge.data.world import instructions
from tinyforge.errors import UserError
from tinyforge.files import json_value, shown
from tinyforge.rng import Stream
from tinyforge.train.batches import fingerprint

IDX_PAIRS = {"train": ("train-images", "train-labels"), "test": ("t10k-images", "t10k-labels")}
TEXT_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".csv", ".tsv")
FEW_CLASSES = 100  # up to this many classes need not each have an example; more must not exceed the examples
MOST_UNPACKED = 1 << 30  # bytes of a gzipped file; the largest idx file, EMNIST's, has half as many
Text = tuple[str, str]
"""A text and a second one to compare it with, often ""."""


@dataclass(frozen=True)
class Labelled:
    """inputs: images, (N, K, H, W) uint8, or a list of texts. labels: (N,) int32. names: of the classes."""

    inputs: Any
    labels: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: np.ndarray) -> Labelled:
        inputs = self.inputs[rows] if isinstance(self.inputs, np.ndarray) else [self.inputs[i] for i in rows]
        return Labelled(inputs, self.labels[rows], self.names)

    def fingerprint(self) -> str:
        """SHA-256 of the inputs."""
        if isinstance(self.inputs, np.ndarray):
            return fingerprint(self.inputs)
        text = "\0".join(part for pair in self.inputs for part in pair)
        return fingerprint(np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8))


def hold_out(data: Labelled, seed: int) -> tuple[Labelled, Labelled]:
    """Training and test sets: a random tenth is the test set."""
    order = Stream(seed, "hold out").permutation(len(data))
    cut = max(1, len(data) // 10)
    if len(data) < 2:
        raise UserError(f"data: {len(data)} labelled example, expected at least 2; give more, or --test")
    return data[np.sort(order[cut:])], data[np.sort(order[:cut])]


# --- labels -----------------------------------------------------------------------------------------------------------


def numbered(raw: Sequence[Any], names: Sequence[str], place: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as class numbers, and the names of the classes: `names` if given, else from the labels. Where names are
    numbers, such as those of folders, a label of digits is a name."""
    known = tuple(names)
    by_name = known != tuple(map(str, range(len(known)))) and any(re.fullmatch("-?[0-9]+", name) for name in known)
    if not by_name and all(isinstance(label, int | np.integer) and not isinstance(label, bool) for label in raw):
        count = len(known) or min(max((0, *raw)) + 1, max(len(raw), FEW_CLASSES))
        bad = next((number for number, label in enumerate(raw) if not 0 <= label < count), None)
        if bad is not None:
            there = f"there are {count} classes" if known else "classes are numbered from 0, and each has examples"
            raise UserError(f"{place}: label {shown(raw[bad])} of example {bad}, expected 0 to {count - 1}: {there}")
        return np.array(raw, np.int32), known or tuple(map(str, range(count)))
    known = known or tuple(sorted({str(label) for label in raw}))
    numbers = {name: number for number, name in enumerate(known)}
    missing = next((i for i, label in enumerate(raw) if str(label) not in numbers), None)
    if missing is not None:
        raise UserError(
            f"{place}: label {str(raw[missing])[:40]!r} of example {missing} is none of the {len(known)} classes: "
            f"{', '.join(known)[:80]}"
        )
    return np.array([numbers[str(label)] for label in raw], np.int32), known


# --- images -----------------------------------------------------------------------------------------------------------


def read_images(path: Path, names: Sequence[str] = (), split: str = "train") -> Labelled:
    """The images at `path`; in a folder of idx files those of `split`. Raises UserError for invalid data."""
    if path.suffix == ".parquet":
        rows = list(read_columns(path, ("image", "label")))
        pictures = [_decoded(image, f"{path}, row {i}") for i, (image, _) in enumerate(rows)]
        labels, known = numbered([label for _, label in rows], names, str(path))
        return Labelled(_stacked(pictures, [f"{path}, row {i}" for i in range(len(rows))], path), labels, known)
    if not path.is_dir():
        raise UserError(f"{path}: not a folder of images or a parquet file; check the path")
    if pair := _idx_pair(path, split):
        images, values = (_read_idx(file) for file in pair)
        if len(images) != len(values):
            raise UserError(f"{pair[1]} has {len(values)} labels, {pair[0].name} {len(images)} images; get both again")
        labels, known = numbered(values.tolist(), names, str(pair[1]))
        return Labelled(images[:, None], labels, known)
    return _read_folders(path, names)


def has_test_images(path: Path) -> bool:
    return path.is_dir() and _idx_pair(path, "test") is not None


def _idx_pair(path: Path, split: str) -> tuple[Path, Path] | None:
    found = [sorted(path.glob(f"{stem}*ubyte*")) for stem in IDX_PAIRS[split]]
    return (found[0][0], found[1][0]) if all(found) else None


def _read_idx(path: Path) -> np.ndarray:
    """http://yann.lecun.com/exdb/mnist: two zeros, the type (8: unsigned bytes), the number of axes, their sizes."""
    raw = _unzipped(path)
    axes = raw[3] if len(raw) > 4 and raw[:3] == b"\0\0\x08" else 0
    if axes not in (1, 3) or len(raw) < 4 + 4 * axes:
        raise UserError(f"{path} is not an idx file of bytes: it begins with {raw[:4].hex()}; get it again")
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    if len(raw) != 4 + 4 * axes + math.prod(shape):
        raise UserError(f"{path} has {len(raw)} bytes, its header says {shape}; it is truncated, get it again")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _unzipped(path: Path) -> bytes:
    raw = read_file(path)
    if path.suffix != ".gz":
        return raw
    most = min(MOST_UNPACKED, MAX_RATIO * max(len(raw), 1000))
    try:
        with gzip.open(io.BytesIO(raw)) as file:
            unpacked = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: {error}; it is damaged, get it again") from error
    if len(unpacked) > most:
        raise UserError(f"{path}: {len(raw):,} bytes unpack to more than {most:,}; split it, or do not trust it")
    return unpacked


def _read_folders(path: Path, names: Sequence[str]) -> Labelled:
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise UserError(f"{path}: expected idx files (train-images-idx3-ubyte.gz, ...), or a folder of PNGs per class")
    files, raw = [], []
    for folder in folders:
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".png")
        if not found:
            raise UserError(f"{folder}: a class without an image; put PNG files there, or remove the folder")
        files += found
        raw += [folder.name] * len(found)
    labels, known = numbered(raw, names, str(path))
    images = [_decoded(read_file(file), str(file)) for file in files]
    return Labelled(_stacked(images, list(map(str, files)), path), labels, known)


def _decoded(content: Any, place: str) -> np.ndarray:
    """(K, H, W) uint8 of a file's bytes; `image` of a parquet file may be {"bytes": ..., "path": ...}."""
    from matplotlib.image import imread

    content = content.get("bytes") if isinstance(content, dict) else content
    if not isinstance(content, bytes | bytearray):
        raise UserError(f"{place}: an image is {type(content).__name__}, expected the bytes of a PNG file")
    try:
        pixels = imread(io.BytesIO(content), format="png" if content[:4] == b"\x89PNG" else None)
    except Exception as error:  # of a dozen kinds, as the file is damaged
        raise UserError(f"{place} cannot be read as an image: {error}; remove it or get it again") from error
    if pixels.dtype.kind == "f":
        pixels = np.rint(pixels * 255)
    pixels = pixels.astype(np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels[..., :3].transpose(2, 0, 1)  # without transparency


def _stacked(images: Sequence[np.ndarray], places: Sequence[str], path: Path) -> np.ndarray:
    if not images:
        raise UserError(f"{path} holds no image; check the path")
    odd = next((i for i, image in enumerate(images) if image.shape != images[0].shape), None)
    if odd is not None:
        sizes = ["x".join(map(str, images[i].shape)) for i in (odd, 0)]
        raise UserError(
            f"{places[odd]} is {sizes[0]} (channels, height, width), {places[0]} {sizes[1]}; all must be of one size"
        )
    return np.stack(images)


# --- texts ------------------------------------------------------------------------------------------------------------


def read_texts(path: Path, names: Sequence[str] = (), encoding: str = "utf-8") -> Labelled:
    """The texts at `path`. Raises UserError for invalid data."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        rows: list[Any] = list(read_columns(path, ("text", "label"), ("text2",)))
    elif name.endswith((".jsonl", ".jsonl.gz")):
        rows = list(_json_rows(path, encoding))
    elif name.endswith((".csv", ".tsv")):
        rows = list(_table_rows(path, encoding))
    else:
        raise UserError(f"{path}: expected one of {', '.join(TEXT_SUFFIXES)}, with the columns text and label")
    if not rows:
        raise UserError(f"{path} holds no labelled text; check the path")
    for number, row in enumerate(rows):
        if not isinstance(row[0], str) or not isinstance(row[2] or "", str) or row[1] in (None, ""):
            raise UserError(f"{path}: row {number} lacks a text or a label; fix or remove it")
    labels, known = numbered([row[1] for row in rows], names, str(path))
    return Labelled([(row[0], row[2] or "") for row in rows], labels, known)


def _json_rows(path: Path, encoding: str) -> Iterator[tuple[Any, Any, Any]]:
    for number, line in enumerate(decode_text(_unzipped(path), encoding, str(path)).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json_value(line)
            yield row["text"], row["label"], row.get("text2")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}:{number}: expected an object with text and label ({error!r:.60}); fix it"
            ) from error


def _table_rows(path: Path, encoding: str) -> Iterator[tuple[Any, Any, Any]]:
    try:
        lines = io.StringIO(decode_text(read_file(path), encoding, str(path)), newline="")
        for number, row in enumerate(cut_rows(lines, path.suffix.lower())):
            found = ", ".join(filter(None, row))
            if not {"text", "label"} <= row.keys():
                raise UserError(f"{path}: its columns are {found[:80]}; expected text and label")
            if None in row:
                raise UserError(f"{path}: row {number} has more cells than {found[:80]}; put texts in quotes")
            label = row["label"]
            whole = label and re.fullmatch("[0-9]{1,9}", label)
            yield row["text"], int(label) if whole else label, row.get("text2")
    except csv.Error as error:
        raise UserError(f"{path}: {error}; expected a table") from error


def read_columns(path: Path, expected: Sequence[str], also: Sequence[str] = ()) -> list[tuple[Any, ...]]:
    """The rows of a parquet file: the columns `expected`, then those of `also`, None if they are missing."""
    source = escape_glob(path)
    with reading(path, "get it again"), connect() as connection:
        described = connection.execute("DESCRIBE SELECT * FROM read_parquet(?)", [source]).fetchall()
        found = [row[0] for row in described]
        if missing := [name for name in expected if name not in found]:
            raise UserError(
                f"{path}: no column {missing[0]!r}; its columns are {', '.join(found)[:80]}, expected "
                f"{' and '.join(expected)}"
            )
        columns = ", ".join(f'"{name}"' if name in found else "NULL" for name in (*expected, *also))
        return connection.execute(f"SELECT {columns} FROM read_parquet(?)", [source]).fetchall()


# --- built in ---------------------------------------------------------------------------------------------------------


def answers(split: str, count: int, seed: int) -> Labelled:
    """Questions of the built-in world, each with its own answer (1) or that of another question (0).

    No single word tells the two apart, so a bag of words learns next to nothing: the texts must be compared. Nearly all
    wrong answers are of another kind than the question. From wrong answers of the same kind only, a small model learns
    nothing in thousands of steps: it would have to solve the question to do better than chance.
    """
    found = list(instructions(split, count, seed))
    stream = Stream(seed, f"answers/{split}")
    right = stream.permutation(len(found)) % 2 == 0
    texts, labels = [], []
    for number, example in enumerate(found):
        answer = example.output
        if not right[number]:
            others = (found[(number + k) % len(found)].output for k in range(1, len(found)))
            answer = next((other for other in others if other != example.output), answer)
        texts.append((f"{example.instruction} {example.input}".strip(), answer))
        labels.append(int(answer == example.output))
    return Labelled(texts, np.array(labels, np.int32), ("wrong", "right"))
