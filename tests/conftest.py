"""What tests of several packages share."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import re
import signal
import ssl
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import redirect_stderr, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.backends.numpy_backend import NumpyBackend
from tinyforge.data import corpus_report
from tinyforge.data.world import documents
from tinyforge.files import written_whole
from tinyforge.formats.foreign import spec_of_model
from tinyforge.shards import SEPARATOR, Part, ShardWriter, Source, write_manifest
from tinyforge.tokenizers import Tokenizer
from tinyforge.train import metrics
from tinyforge.zoo.page import PARITY

# A script's background job ignores Ctrl-C, and so do all programs that it starts: also those whose answer is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asks the Hugging Face hub: a name that is no path fails at once. Those of the hub have a server of their own.
os.environ["HF_HUB_OFFLINE"] = "1"

# A core's peak is measured once for each type, not at the beginning of each run: it takes longer than some runs.
_matmul_peak, _peaks = NumpyBackend.matmul_peak, dict[Hashable, float]()


def _peak_of(backend: NumpyBackend, *how: int, **more: int) -> float:
    key = (backend.dtype, backend.workers)
    if how or more or key not in _peaks:
        _peaks[key] = _matmul_peak(backend, *how, **more)
    return _peaks[key]


NumpyBackend.matmul_peak = _peak_of

# No test cuts the power: what is written need not reach the disk before a test goes on. Programs that tests start sync.
os.fsync = lambda descriptor: None

# DuckDB asks for pandas hundreds of times while a corpus is made. Where it is not installed, each time all of Python's
# path is searched: an eighth of such a test.
if importlib.util.find_spec("pandas") is None:
    sys.modules["pandas"] = None  # type: ignore[assignment]

# Hundreds of clients are made, of which each would read the system's certificates, which no test uses: 18 ms.
ssl.create_default_context = cache(ssl.create_default_context)

PIECE = 0.0153  # seconds of processor time for the piece of Python in `_slowness`, on an idle AMD EPYC of 2025

Draw = Callable[..., bool | None]


def _once_a_kind(draw: Draw, kind_of: Callable[..., Hashable]) -> Draw:
    """`draw(rows, target, ...)`, which takes longer than the run of two steps that it shows, once for rows of a kind:
    others get a copy of that picture. A test that watches matplotlib gets its own."""
    pictures: dict[Hashable, bytes] = {}

    def draw_or_copy(rows: Sequence[Any], target: Path, *how: Any) -> bool | None:
        figure = sys.modules.get("matplotlib.figure")
        if figure and figure.Figure.savefig.__module__ != figure.__name__:
            return draw(rows, target, *how)
        kind = (kind_of(rows), *how)
        if kind not in pictures:
            drawn = draw(rows, target, *how)
            if drawn is not False:
                pictures[kind] = target.read_bytes()
            return drawn
        with written_whole(target) as partial:
            partial.write_bytes(pictures[kind])
        return True

    return draw_or_copy


metrics.plot = _once_a_kind(metrics.plot, lambda rows: frozenset(key for row in rows for key in row))
# One of each number of sources and of outcomes.
corpus_report.plot = _once_a_kind(
    corpus_report.plot, lambda rows: (len({r[0] for r in rows}), len({r[1] for r in rows}))
)

# Tests of what Windows does not have: forks and kills, limits on a process, terminals and pipes by name, bash.
if sys.platform == "win32":
    collect_ignore = [
        "backends/test_workers.py",
        "data/test_corpus.py",
        "data/test_download.py",
        "data/test_shards.py",
        "data/test_source.py",
        "formats/test_hub.py",
        "infer/test_chat.py",
        "parallel/test_group.py",
        "recipes/test_bad_input.py",
        "recipes/test_resume.py",
        "recipes/test_speedrun.py",
        "recipes/test_start_and_stop.py",
        "recipes/test_two_at_once.py",
        "test_files.py",
        "tokenizers/test_parallel.py",
    ]


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a new checkout pytest rewrites the assertions of all tests, half of the time of collection. Each of several
    processes would do so for itself, as all go through the files in one order: here each begins elsewhere, and loads
    what the others have written by the time it comes to theirs."""
    config = session.config
    if not hasattr(config, "workerinput") or config.args != config.getini("testpaths"):
        return
    ignored = [Path(folder).resolve() for folder in config.getoption("ignore") or ()]
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    files = [file for file in files if not any(file.is_relative_to(folder) for folder in ignored)]
    worker, workers = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    first = worker * len(files) // workers
    for file in files[first:] + files[:first]:
        # What cannot be imported, or skips itself, says so when it is collected.
        with suppress(Exception, pytest.skip.Exception), redirect_stderr(StringIO()):
            importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`python -m models record` runs the tests of parity alone."""
    if PARITY in os.environ:
        items[:] = [item for item in items if "parity" in getattr(item, "fixturenames", ())]


def pytest_collection_finish() -> None:
    """Thousands of tests and the libraries they import stay to the end: the garbage collector need not look at them
    again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def parity() -> Callable[..., None]:
    return _parity


def _parity(model: Any, what: str, error: float, bound: float, peer: str = "transformers") -> None:
    """A model's error next to another library's, which must be below the bound; docs/models.md shows the worst.

    what: "logits" or "gradients".
    """
    if target := os.environ.get(PARITY):
        found = {"model": spec_of_model(model).name, "what": what, "error": error, "peer": peer}
        with open(target, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    assert error < bound, f"{what}: {error:.1e}, expected below {bound:.0e}"


@pytest.fixture(scope="session")
def slowness() -> Callable[[], float]:
    return _slowness


def _slowness() -> float:
    """How many times as long as the machine that limits were set on this one takes for a piece of Python now; at least
    1. It is compared with what is too slow only: limits are for a program's faults, not for a machine's."""
    times = []
    for _ in range(3):
        began, table = time.process_time(), dict[int, int]()
        for i in range(200_000):
            table[i & 1023] = table.get(7 * i & 1023, 0) + i
        times.append(time.process_time() - began)
    return max(1.0, min(times) / PIECE)


@pytest.fixture(scope="session")
def takes_less_than() -> Callable[[float, Callable[[], object]], None]:
    return _takes_less_than


def _takes_less_than(seconds: float, work: Callable[[], object]) -> None:
    """Of processor time, in the best of three tries, and ten times as much by the clock, for what sleeps or waits; more
    where the machine is slow.

    Other processes slow a test down, and on its own processor time too: they take the caches and the core's other
    thread. A limit that is to find what became slow must not find a busy machine.
    """
    for _ in range(3):
        began, clock = time.process_time(), time.monotonic()
        work()
        taken, waited = time.process_time() - began, time.monotonic() - clock
        if taken < seconds and waited < 10 * seconds:
            return
        limit = seconds * _slowness()
        assert waited < 10 * limit
        if taken < limit:
            return
    pytest.fail(f"took {taken:.2f} s of processor time in the last of three tries, expected less than {limit:.2f}")


@pytest.fixture(scope="session")
def make_shards() -> Callable[..., None]:
    return _make_shards


def _make_shards(folder: Path, tokenizer: Tokenizer, counts: dict[str, tuple[int, int]], seed: int = 0) -> None:
    """A folder of small shards; counts: training and held-out documents by source."""
    folder.mkdir()
    tokenizer.save(folder / "tokenizer.json")
    sources = []
    for name, (train, val) in counts.items():
        parts = {}
        for split, count in (("train", train), ("val", val)):
            writer = ShardWriter(folder, name, split, tokenizer, shard_tokens=701)
            texts = list(documents(split, count, seed + len(name)))
            for text in texts:
                writer.append(np.array([*tokenizer.encode(text), tokenizer.specials[SEPARATOR]]))
            files = writer.close()
            parts[split] = Part(count, sum(f.tokens for f in files), sum(len(t.encode()) for t in texts), files)
        sources.append(Source(name, "", **parts))
    write_manifest(folder, tokenizer, sources, {})


@pytest.fixture
def write_examples() -> Callable[[Path, Path], None]:
    return _write_examples


def _write_examples(page: Path, folder: Path) -> None:
    """The files that a page of docs/ shows: blocks that begin with a comment of the file's name."""
    shown = re.findall(r"^```\w+\n((?:#|//) (\w+\.(?:py|cu))\n.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    for text, name in shown:
        (folder / name).write_text(text, encoding="utf-8")
