"""Wrong files for every reader: does each end in a result or in one line, in time, with little memory?

    python -m tests.fuzz --seconds 600                    all readers in turn, new files each time
    python -m tests.fuzz --seconds 60 --only tokenizer    those whose name has this in it
    python -m tests.fuzz --good                           the files before they are made wrong
    python -m tests.fuzz --reader "metrics.jsonl" --seed 17        one file again, with all that is printed
    python -m tests.fuzz --reader "metrics.jsonl" --file FILE      the same with a file at hand

A reader is the command that a user would run (readers.py), in a child with limits. A file fails if the command ends in
a traceback, by a signal, or with a status that it does not document; if its error is not one line; if it takes over
2 seconds (three times: one may have waited for other programs); if it holds over 1 GB; and if it prints a control
character. Files that failed are kept under --keep, each with the command that reads it again.
"""

from __future__ import annotations

import os

# One BLAS thread: a process with threads cannot be forked.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import random
import shutil
import signal
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401  (once, not in every child)
from matplotlib.figure import Figure

from tests.fuzz.child import MIB, Limits, Outcome, run_child
from tests.fuzz.mutate import mutate
from tests.fuzz.readers import READERS, Reader
from tests.fuzz.seeds import make_seeds
from tests.fuzz.turns import in_turns, name_of, parser, table
from tinyforge.train import metrics

SECONDS, MEMORY = 2.0, 1 << 30  # that a command may take
LIMITS = Limits(5 * SECONDS, MEMORY)
matplotlib.use("Agg")


@dataclass
class Figures:
    """Of one reader. refused: with an error of one line. slowest: seconds. peak: bytes."""

    files: int = 0
    refused: int = 0
    failures: int = 0
    slowest: float = 0.0
    peak: int = 0

    def add(self, other: dict[str, Any]) -> None:
        for name in ("files", "refused", "failures"):
            setattr(self, name, getattr(self, name) + other[name])
        for name in ("slowest", "peak"):
            setattr(self, name, max(getattr(self, name), other[name]))


@dataclass
class Fuzzer:
    """Reads wrong files, one after the other. work: a folder of its own. keep: where files that failed go."""

    seeds: Path
    work: Path
    keep: Path
    limits: Limits = LIMITS
    others: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        every = sorted(path for path in self.seeds.rglob("*") if path.is_file() and path.stat().st_size < 20_000)
        self.others = [path.read_bytes() for path in every if "first" not in path.parts]

    def wrong(self, reader: Reader, seed: int) -> bytes:
        rng = random.Random(f"{reader.name}:{seed}")
        return mutate((self.seeds / reader.target).read_bytes(), rng, self.others)

    def case(self, reader: Reader, data: bytes, mended: bool) -> Path:
        """A new folder with all that the command needs, and the wrong file in its place."""
        case = self.work / "case"
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir(parents=True)
        for name in dict.fromkeys((*reader.needs, reader.target)):
            source, target = self.seeds / name, case / name
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
        (case / reader.target).write_bytes(data)
        if mended and reader.mend:
            reader.mend(case)
        return case

    def read(self, reader: Reader, data: bytes, mended: bool = True) -> tuple[Outcome, str]:
        """How the command ended with the file, and what is wrong with that, or ""."""
        outcome = self._run(reader, data, mended)
        for _ in range(2):
            if outcome.seconds > SECONDS and not outcome.slow:
                outcome = min(outcome, self._run(reader, data, mended), key=lambda ended: ended.seconds)
        return outcome, fault_of(reader, outcome)

    def _run(self, reader: Reader, data: bytes, mended: bool) -> Outcome:
        case = self.case(reader, data, mended)
        return run_child(lambda: reader.main(reader.arguments()), case, self.limits, lambda: prepare(reader.draws))

    def save(self, reader: Reader, seed: int, data: bytes, outcome: Outcome, fault: str) -> str:
        """Keep a file that failed; returns the lines that say so."""
        path = (self.keep / name_of(reader.name, seed)).resolve()
        path.mkdir(parents=True, exist_ok=True)
        file = path / Path(reader.target).name
        file.write_bytes(data)
        again = f"python -m tests.fuzz --reader '{reader.name}' --file '{file}'"
        printed = f"{fault}\n{again}\n\n{outcome.stdout[-20_000:]}\n{outcome.stderr[-20_000:]}"
        (path / "outcome.txt").write_text(printed, encoding="utf-8")
        return f"FAILED {reader.name}, seed {seed}: {fault}\n  {again}"


def prepare(draws: bool) -> None:
    """In the child: no pictures unless they are meant."""
    if not draws:
        Figure.savefig = lambda self, target, **how: Path(target).write_bytes(b"a picture")
        metrics.plot = lambda rows, target, *how: False


def fault_of(reader: Reader, outcome: Outcome) -> str:
    """What is wrong with how a command ended; "" for nothing."""
    if outcome.slow or outcome.seconds > SECONDS:
        return f"took {outcome.seconds:.1f} s" + (" and was killed" if outcome.slow else "")
    if outcome.status < 0:
        return f"ended by {signal.Signals(-outcome.status).name}"
    last = outcome.stderr.strip().rpartition("\n")[2]
    if "Traceback (most recent call last)" in outcome.stderr:
        return f"a traceback: {last[:200]}"
    if outcome.status not in reader.statuses:
        return f"status {outcome.status}: {last[:200]}"
    if "out of memory" in last:
        return f"expected more than {MEMORY // MIB} MiB: {last[:200]}"
    if outcome.peak > MEMORY:
        return f"held {outcome.peak // MIB} MiB"
    errors = [line for line in outcome.stderr.split("\n") if line.startswith("error: ")]
    if outcome.status == 2 and (len(errors) != 1 or last != errors[0].strip()):
        return f"{len(errors)} lines of error: {last[:200]}"
    shown = outcome.stderr if reader.raw else outcome.stdout + outcome.stderr
    steering = next((c for c in shown if unicodedata.category(c) == "Cc" and c not in "\n\t\r"), "")
    return f"printed the control character {steering!r}" if steering else ""


def fuzz(readers: Sequence[Reader], seconds: float, workers: int, first: int, keep: Path) -> int:
    """Read wrong files for so long; prints the figures. Returns the number of failures."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        seeds = Path(folder, "seeds")
        make_seeds(seeds)

        def begin(number: int) -> Callable[[Reader, int], dict[str, Any]]:
            fuzzer = Fuzzer(seeds, Path(folder, f"work-{number}"), keep)

            def trial(reader: Reader, seed: int) -> dict[str, Any]:
                data = fuzzer.wrong(reader, seed)
                outcome, fault = fuzzer.read(reader, data, mended=seed % 8 > 0)
                return {
                    "reader": reader.name,
                    "files": 1,
                    "refused": int(outcome.status == 2),
                    "failures": int(bool(fault)),
                    "slowest": outcome.seconds,
                    "peak": outcome.peak,
                    "said": fuzzer.save(reader, seed, data, outcome, fault) if fault else "",
                }

            return trial

        rows = in_turns(begin, readers, workers, seconds, count(first))
    figures = {reader.name: Figures() for reader in readers}
    for row in rows:
        figures[row["reader"]].add(row)
        if row["said"]:
            print(row["said"])
    total = Figures()
    for each in figures.values():
        total.add(vars(each))
    cells = [
        (name, each.files, each.refused, each.failures, f"{each.slowest:.2f}", each.peak // MIB)
        for name, each in (*figures.items(), (f"all in {time.monotonic() - began:.0f} s", total))
    ]
    print(table(("reader", "files", "refused", "failed", "slowest, s", "peak, MiB"), cells))
    return total.failures


def once(reader: Reader, data: bytes | None, seed: int) -> int:
    """One file, with all that the command prints. Returns 1 if it fails."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        make_seeds(Path(folder, "seeds"))
        fuzzer = Fuzzer(Path(folder, "seeds"), Path(folder, "work"), Path(folder, "keep"))
        outcome, fault = fuzzer.read(reader, fuzzer.wrong(reader, seed) if data is None else data, mended=seed % 8 > 0)
    print(outcome.stdout[-20_000:], outcome.stderr[-20_000:], sep="\n")
    print(f"status {outcome.status}, {outcome.seconds:.2f} s, {outcome.peak // MIB} MiB; {fault or 'as it should be'}")
    return int(bool(fault))


def good(readers: Sequence[Reader]) -> int:
    """Read the good files. Returns how many are refused, or fail: a reader that refuses them is tested by nothing."""
    bad = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        make_seeds(Path(folder, "seeds"))
        fuzzer = Fuzzer(Path(folder, "seeds"), Path(folder, "work"), Path(folder, "keep"))
        for reader in readers:
            outcome, fault = fuzzer.read(reader, (fuzzer.seeds / reader.target).read_bytes())
            if fault or outcome.status:
                bad += 1
                print(f"FAILED {reader.name}: {fault or outcome.stderr.strip().rpartition(chr(10))[2]}")
    print(f"{len(readers) - bad} of {len(readers)} readers read their good file")
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("fuzz", __doc__ or "", "readers", "files that failed go")
    p.add_argument(
        "--reader", choices=[reader.name for reader in READERS], metavar="NAME", help="read one file with this one"
    )
    p.add_argument("--seed", type=int, help="of the one file")
    p.add_argument("--file", type=Path, help="the one file")
    p.add_argument("--good", action="store_true", help="read the good files, which must be read")
    p.add_argument("--list", action="store_true", help="print the readers' names")
    args = p.parse_args(argv)

    if args.list:
        print(*(reader.name for reader in READERS), sep="\n")
        return 0
    if args.reader:
        reader = next(reader for reader in READERS if reader.name == args.reader)
        return once(reader, args.file.read_bytes() if args.file else None, 1 if args.seed is None else args.seed)
    readers = [reader for reader in READERS if args.only in reader.name]
    if args.good:
        return int(good(readers) > 0)
    print(f"{len(readers)} readers, {args.seconds:.0f} s, {args.workers} workers, seeds from {args.first}", flush=True)
    return int(fuzz(readers, args.seconds, args.workers, args.first, args.keep) > 0)


if __name__ == "__main__":
    sys.exit(main())
