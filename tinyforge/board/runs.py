"""The runs in a folder, read while they grow.

A run is a folder with a metrics.jsonl. `Board.refresh` finds the runs and reads what was appended since its last call,
in bounded chunks. `Run.curve` downsamples a series to what a screen can show, however many rows there are.
"""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.files import json_value, read_json
from tinyforge.train.metrics import numbers, read_row, sample

METRICS, SAMPLES, ABOUT, SCORES, LEDGER = "metrics.jsonl", "samples.jsonl", "run.json", "scores.json", "ledger.json"
CARD, LOGS = "README.md", "logs"
MOST_TEXT, MOST_LOGS = 64 << 10, 100  # the last bytes of a text, and the newest logs, are shown
CLOCK = ("step", "tokens", "seconds")  # the x axes of curves
CHUNK = 4 << 20  # bytes read from a file at a time
BATCH = 500  # lines parsed together
TAIL = 256  # bytes before the offset, compared at the next read: is it still the same file?
MOST_RUNS, MOST_DEPTH, MOST_KEYS, MOST_TABLES, MOST_SAMPLES = 500, 4, 400, 64, 1000
SEARCH = 2.0  # seconds between looks for new runs
LIVE = 60.0  # seconds after its last line for which a run counts as live


class Appended:
    """The lines of a file that another program appends to, each once.

    A file that was replaced, truncated or rewritten since the last read is read again from its start; `anew` counts how
    often. An incomplete last line is left for the next read. root: see `lies_in`. done: the last read reached the end.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root, self.offset, self.size, self.anew, self.done = path, root, 0, 0, 0, True
        self._tail, self._inode = b"", 0

    def lines(self) -> list[bytes]:
        """The new lines, at most CHUNK bytes of them; none where the file cannot be read."""
        try:
            if not lies_in(self.root, self.path):
                raise OSError
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                self.size = stat.st_size
                if not self._goes_on(file, stat):
                    self.offset, self._tail, self.anew = 0, b"", self.anew + 1
                self._inode = stat.st_ino
                file.seek(self.offset)
                found = file.read(CHUNK)
                self.done = len(found) < CHUNK
        except OSError:
            self.done = True
            return []
        end = found.rfind(b"\n") + 1
        if not end:
            if len(found) == CHUNK:  # no row is that long: skip it
                self.offset, self._tail = self.offset + CHUNK, found[-TAIL:]
            return []
        self.offset += end
        self._tail = (self._tail + found[:end])[-TAIL:]
        return found[: end - 1].split(b"\n")

    def _goes_on(self, file: Any, stat: os.stat_result) -> bool:
        if not self.offset:
            return True
        if stat.st_ino != self._inode or stat.st_size < self.offset:
            return False
        file.seek(self.offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail


@dataclass
class Table:
    """Rows with the same keys, one after the other in one array of doubles."""

    keys: tuple[str, ...]
    flat: array[float] = field(default_factory=lambda: array("d"))
    seen: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))

    def rows(self) -> np.ndarray:
        """(rows, keys), a copy: an array with a NumPy view cannot grow."""
        if self.seen.size != len(self.flat):
            self.seen = np.array(self.flat, np.float64).reshape(-1, len(self.keys))
        return self.seen


class Run:
    """One run's figures. version: grows with every change, so that a page fetches only what has changed."""

    def __init__(self, folder: Path, name: str, root: Path | None = None) -> None:
        self.folder, self.name, self.version, self.root = folder, name, 0, root or folder
        self.file, self.samples_file = (Appended(folder / file, self.root) for file in (METRICS, SAMPLES))
        self.about: dict[str, Any] = {}
        self.scores: dict[str, Any] = {}
        self._stamps: dict[str, Any] = {}
        self.samples: list[dict[str, Any]] = []
        self._clear()

    def _clear(self) -> None:
        self.tables: dict[tuple[str, ...], Table] = {}
        self.keys: set[str] = set()
        self.last: dict[str, float] = {}
        self.count = self.damaged = self.left_out = 0
        self._curves: dict[Any, Any] = {}

    # --- reading

    def refresh(self) -> bool:
        """Read what is new; returns whether there is more to read."""
        self.about = self._small(ABOUT, self.about)
        anew, lines = self.file.anew, self.file.lines()
        if self.file.anew != anew:
            self._clear()
            self.version += 1
        if lines:
            self._take(lines)
            self.version += 1
        anew, lines = self.samples_file.anew, self.samples_file.lines()
        if self.samples_file.anew != anew:
            self.samples = []
        if lines:
            read = (read_row(line, sample) for line in lines)
            found = [{"tokens": None, **self._by_axis(row)} for row in read if row is not None]
            found = [{key: row[key] for key in ("step", "tokens", "text")} for row in found]
            self.samples = [*self.samples, *found][-MOST_SAMPLES:]
            self.version += 1
        self.scores = self._small(SCORES, self.scores)
        return not self.file.done or not self.samples_file.done

    def _small(self, name: str, known: dict[str, Any]) -> dict[str, Any]:
        """The content of a small JSON file; {} where it is missing or damaged."""
        try:
            stat = (self.folder / name).stat()
        except OSError:
            return known and {}
        if not lies_in(self.root, self.folder / name):
            return {}
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if self._stamps.get(name) == stamp:
            return known
        self._stamps[name] = stamp
        self.version += 1
        try:
            return finite(read_json(self.folder / name, f"the file {name}", max_bytes=4 << 20))
        except UserError:
            return {}

    def _take(self, lines: list[bytes]) -> None:
        for start in range(0, len(lines), BATCH):
            for row in self._rows(lines[start : start + BATCH]):
                self._add(row)
        self._curves.clear()

    def _rows(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        try:
            rows = json_value(b"[" + b",".join(lines) + b"]")  # one call for all is three times as fast
            if len(rows) != len(lines):
                raise ValueError
        except ValueError:
            rows = [read_row(line, numbers) for line in lines]
        for row in rows:
            if numbers(row):
                yield row
            else:
                self.damaged += 1

    def _by_axis(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row, with what training has read under the name of the page's axis, whatever its unit."""
        unit = str(self.about.get("unit", "tokens"))
        return {"tokens" if key == unit else key: value for key, value in row.items()}

    def _add(self, row: dict[str, Any]) -> None:
        row = self._by_axis(row)
        keys = tuple(row)
        table = self.tables.get(keys)
        if table is None:
            if len(self.tables) == MOST_TABLES or len(self.keys.union(keys)) > MOST_KEYS:
                self.left_out += 1
                return
            table = self.tables[keys] = Table(keys)
            self.keys.update(keys)
        table.flat.extend(row.values())
        self.count += 1
        self.last.update(row)

    # --- looking

    def columns(self, key: str) -> np.ndarray:
        """(4, n): step, tokens, seconds and the key's value, sorted by step, without rows whose value is not finite."""
        parts = []
        for table in list(self.tables.values()):
            if key in table.keys and "step" in table.keys:
                rows = table.rows()
                nothing = np.full(len(rows), np.nan)
                parts.append([rows[:, table.keys.index(k)] if k in table.keys else nothing for k in (*CLOCK, key)])
        if not parts:
            return np.empty((4, 0))
        found = np.concatenate([np.array(part) for part in parts], axis=1)
        found = found[:, np.isfinite(found[0]) & np.isfinite(found[3])]
        return found[:, np.argsort(found[0], kind="stable")]

    def curve(
        self, key: str, smooth: float, points: int, over: str = "step", first: float = -np.inf, last: float = np.inf
    ) -> dict[str, Any]:
        """A series as the page draws it, in about `points` points at most.

        smooth: 0, or the decay of the moving average. over, first, last: the range to return. Returns {"step",
        "tokens", "seconds", "value": lists; "count": the points before downsampling}.
        """
        asked = (key, smooth, points, over, first, last)
        if asked not in self._curves:
            if len(self._curves) > 200:  # many views of a run that does not grow
                self._curves.clear()
            found = self._curves.get(key)
            if found is None:
                found = self._curves[key] = self.columns(key)
            if smooth:
                found = np.vstack([found[:3], smoothed(found[3], smooth)])
            x = found[CLOCK.index(over)]
            if first > -np.inf or last < np.inf:  # with a point on either side, so that the line reaches the frame
                inside = np.flatnonzero((x >= first) & (x <= last))
                found = found[:, max(0, inside[0] - 1) : inside[-1] + 2] if inside.size else found[:, :0]
            kept = found[:, extremes(found[3], points)]
            names = (*CLOCK, "value")
            self._curves[asked] = {**dict(zip(names, map(_rounded, kept), strict=True)), "count": found.shape[1]}
        return self._curves[asked]

    def summary(self, now: float) -> dict[str, Any]:
        """What the list of runs shows."""
        changed = time_of(self.file.path)
        age = now - changed if changed else None
        share = 1.0 if self.file.done else self.file.offset / max(1, self.file.size)
        own = {name: getattr(self, name) for name in ("name", "version", "damaged", "left_out", "about", "scores")}
        return own | {
            "rows": self.count,
            "read": round(share, 3),
            "keys": sorted(self.keys - set(CLOCK)),
            "last": finite(self.last),
            "age": age,
            "live": age is not None and age < LIVE and not self.finished(),
            "samples": len(self.samples),
        }

    def finished(self) -> bool:
        """Whether it has taken all its steps, or used up its minutes."""
        settings = self.about.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        minutes, steps = settings.get("minutes"), settings.get("steps")
        if isinstance(minutes, (int, float)):
            return self.last.get("seconds", 0) >= 60 * minutes
        return type(steps) is int and self.last.get("step", 0) >= steps


class Board:
    """All runs under a folder. It reads only when asked. Callers of its methods, and readers of a run, hold `lock`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.runs: dict[str, Run] = {}
        self.too_many = False
        self._searched = -math.inf

    def refresh(self, seconds: float = 0.5) -> bool:
        """Find the runs and read what is new, for about so long; returns whether there is more to read."""
        start = time.monotonic()
        if start - self._searched > SEARCH:
            found, self._searched = self._find(), start
            for name in set(self.runs) - set(found):
                del self.runs[name]
            for name, folder in found.items():
                self.runs.setdefault(name, Run(folder, name, self.folder))
        more = list(self.runs.values())
        while more and time.monotonic() - start < seconds:
            more = [run for run in more if run.refresh()]
        return bool(more)

    def summary(self) -> dict[str, Any]:
        """All that the page shows except curves and texts; of the texts, their names and times."""
        now = time.time()
        return {
            "runs": [self.runs[name].summary(now) for name in sorted(self.runs)],
            "too_many": self.too_many,
            "texts": {name: time_of(path) for name, path in self.texts().items()},
        }

    def texts(self) -> dict[str, Path]:
        """The runs' cards, as "RUN: card", then the folder's logs by name, oldest first."""
        cards = {f"{name}: card": self.runs[name].folder / CARD for name in sorted(self.runs)}
        logs = sorted((self.folder / LOGS).glob("*.log"), key=time_of)[-MOST_LOGS:]
        found = {name: path for name, path in cards.items() if path.is_file()} | {path.name: path for path in logs}
        return {name: path for name, path in found.items() if lies_in(self.folder, path)}

    def _find(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        self.too_many = False
        for root, folders, files in os.walk(self.folder):
            path = Path(root)
            inside = path.relative_to(self.folder)
            deeper = folders if len(inside.parts) < MOST_DEPTH else []
            folders[:] = sorted(folder for folder in deeper if not folder.startswith((".", "step-")))
            if METRICS in files:
                if len(found) == MOST_RUNS:
                    self.too_many = True
                    break
                name = inside.as_posix() if inside.parts else self.folder.resolve().name
                found[name.encode("utf-8", "replace").decode()] = path
        return found

    def ledger(self) -> dict[str, Any] | None:
        """What `python -m tinyforge.gradcheck --json runs/ledger.json` wrote, or None."""
        if not lies_in(self.folder, self.folder / LEDGER):
            return None
        try:
            found = finite(read_json(self.folder / LEDGER, "the ledger", max_bytes=8 << 20))
        except UserError:
            return None

        def is_check(row: Any) -> bool:
            known = isinstance(row, dict) and {"op", "name", "error"} <= row.keys()
            return known and isinstance(row["error"], int | float)

        given = found.get("rows")
        rows = list(filter(is_check, given)) if isinstance(given, list) else []
        return {"tolerance": found.get("tolerance"), "rows": rows} if rows else None


def lies_in(root: Path, path: Path) -> bool:
    """Whether a path lies in a folder once all links are followed: a link in a run may not show another file."""
    return path.resolve().is_relative_to(root.resolve())


def time_of(path: Path) -> float:
    """The time of the last change; 0 for a file that is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def text_of(path: Path) -> str:
    """The end of a text file, without control characters; "" where it cannot be read."""
    try:
        with open(path, "rb") as file:
            left_out = max(0, os.fstat(file.fileno()).st_size - MOST_TEXT)
            file.seek(left_out)
            text = file.read(MOST_TEXT).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))  # a progress bar overwrites its line
    shown = "\n".join("".join(c for c in line if c.isprintable() or c == "\t") for line in lines)
    return f"({left_out:,} bytes before this are left out)\n{shown}" if left_out else shown


def finite(value: Any) -> Any:
    """The value with NaN and infinities as None: JSON has neither, and browsers refuse them."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def smoothed(values: np.ndarray, keep: float) -> np.ndarray:
    """The exponential moving average with bias correction:

        s_t = keep s_{t-1} + (1 - keep) x_t,  s_0 = 0;  y_t = s_t / (1 - keep^t)

    In blocks, each of which is a cumulative sum scaled by powers of `keep` that stay far from underflow.
    """
    block = max(1, int(-200.0 / np.log(keep)))  # keep^block = e^-200
    powers = keep ** np.arange(1, min(block, len(values)) + 1)
    out, before = np.empty(len(values)), 0.0
    for start in range(0, len(values), block):
        part = values[start : start + block]
        p = powers[: len(part)]
        out[start : start + block] = p * (before + (1 - keep) * np.cumsum(part / p))
        before = out[start + len(part) - 1]
    return out / (1 - keep ** np.arange(1, len(values) + 1))


def extremes(values: np.ndarray, points: int) -> np.ndarray:
    """Indices of the values to draw, ascending: the minimum and the maximum of each of points / 2 equal stretches, and
    both ends. No spike is lost, however many values there are."""
    n, buckets = len(values), max(1, points // 2)
    if n <= points:
        return np.arange(n)
    edges = np.linspace(0, n, buckets + 1).astype(int)
    width = int(np.diff(edges).max())
    places = edges[:-1, None] + np.arange(width)
    inside = places < edges[1:, None]
    seen = values[np.minimum(places, n - 1)]
    lowest = np.where(inside, seen, np.inf).argmin(axis=1) + edges[:-1]
    highest = np.where(inside, seen, -np.inf).argmax(axis=1) + edges[:-1]
    return np.unique(np.concatenate([[0], lowest, highest, [n - 1]]))


def _rounded(values: np.ndarray) -> list[float | None]:
    """Seven significant digits, more than a screen shows, in few characters; None for what is not finite."""
    good = np.isfinite(values)
    safe = np.where(good & (values != 0), values, 1.0)
    digits = np.clip(6 - np.floor(np.log10(np.abs(safe))), -300, 300)
    # An integer over, or times, a power of ten: the double nearest to those digits, which prints as no more of them.
    up, down = 10.0 ** np.maximum(digits, 0), 10.0 ** np.maximum(-digits, 0)
    found = np.where(values == 0, 0.0, np.round(safe * up / down) * down / up)
    if good.all() and (np.abs(found) < 2**53).all() and (found == np.round(found)).all():
        return found.astype(np.int64).tolist()
    return [value if known else None for value, known in zip(found.tolist(), good.tolist(), strict=True)]
