"""A long run in little memory: does what it holds grow?

    python -m tests.soak --seconds 3600 --memory 256

Half of the time a small model is pretrained, with evaluations and checkpoints all the while, and half of the time it is
talked to: one conversation after the other. Each is a child that may have so many MiB of data beyond what it begins
with. The memory that it and its workers hold is sampled; the median of the last quarter of the time must not be more
than that of the second by over 2 %, and the child must end well. (In the first quarter caches fill.)
"""

from __future__ import annotations

import argparse
import os

# One BLAS thread: a process with threads cannot be forked.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import matplotlib.pyplot  # noqa: F401  (the plot at the end is no growth)

from tests.fuzz.child import MIB, end_session, start_child
from tinyforge import chat
from tinyforge.formats import load
from tinyforge.recipes import pretrain

PERIOD = 0.1  # seconds between samples
GROWTH = 0.02
FLAGS = (
    "--batch-size 4 --workers 2 --backend numpy --eval-every 50 --save-every 100 --set dim=32 heads=2 kv_heads=1 "
    "layers=2 hidden=48 context=64"
)
QUESTIONS = ("How much is 13 plus 2?", "Where is Zobert?", "Which is larger, 1 or 12?")


@dataclass(frozen=True)
class Soaked:
    """How a child ended, and the bytes it held, sample by sample; work: what it did, in words."""

    name: str
    status: int
    samples: list[int]
    work: str

    @property
    def growth(self) -> float:
        """Of the last quarter's median beyond the second's, as a share."""
        quarter = max(1, len(self.samples) // 4)
        early, late = median(self.samples[quarter : 2 * quarter] or self.samples), median(self.samples[-quarter:])
        return late / early - 1

    @property
    def good(self) -> bool:
        return self.status == 0 and len(self.samples) >= 8 and self.growth <= GROWTH


def held_by(process: int) -> int:
    """The bytes that a process and its descendants hold, without those of files, which are read into memory bit by bit
    and can be dropped; what they share is counted in each."""
    total = 0
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
        for child in Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split():
            total += held_by(int(child))
    return total


def soak(name: str, main: Callable[[], object], folder: Path, memory: int, work: Callable[[], str]) -> Soaked:
    """Run a child to its end, and sample what it holds."""
    names = [folder / f"{name}.{stream}" for stream in ("out", "err")]
    child = start_child(main, folder, names, memory)
    samples = []
    while True:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if held := held_by(child):
            samples.append(held)
        time.sleep(PERIOD)
    end_session(child)
    status = os.waitstatus_to_exitcode(code)
    if status:
        print(names[1].read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
    return Soaked(name, status, samples, work())


def train(folder: Path, seconds: float, memory: int) -> Soaked:
    flags = [*FLAGS.split(), "--minutes", str(seconds / 60), "--out", "run"]

    def steps() -> str:
        rows = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").count('"lr"')
        return f"{rows:,} steps"

    return soak("pretrain", lambda: pretrain.main(flags), folder, memory, steps)


def talk(folder: Path, seconds: float, memory: int) -> Soaked:
    def main() -> None:
        until = time.monotonic() + seconds
        conversation = chat.conversation_with(load(Path("run"), chat.get_backend("numpy", "fp32", workers=1)))
        for seed in _until(until):
            if seed % 20 == 0:
                conversation.clear()
                print("one more")
            for _ in conversation.ask(QUESTIONS[seed % len(QUESTIONS)], chat.Sampling(max_tokens=40, seed=seed)):
                pass

    def conversations() -> str:
        return f"{(folder / 'chat.out').read_text(encoding='utf-8').count('one more'):,} conversations"

    return soak("chat", main, folder, memory, conversations)


def _until(moment: float) -> Iterator[int]:
    for number in count():
        if time.monotonic() > moment:
            return
        yield number


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seconds", type=float, default=600.0, help="for how long (default: %(default)s)")
    p.add_argument("--memory", type=int, default=256, metavar="MIB", help="that each may take (default: %(default)s)")
    args = p.parse_args(argv)
    matplotlib.use("Agg")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        found = [part(Path(folder), args.seconds / 2, args.memory * MIB) for part in (train, talk)]
    print(f"{'':<10}  {'status':>6}  {'first, MiB':>10}  {'last, MiB':>9}  {'peak, MiB':>9}  {'growth':>7}")
    for each in found:
        samples = each.samples or [0]
        first, last, peak = samples[len(samples) // 4] / MIB, samples[-1] / MIB, max(samples) / MIB
        print(
            f"{each.name:<10}  {each.status:>6}  {first:>10.1f}  {last:>9.1f}  {peak:>9.1f}  {each.growth:>7.2%}  "
            f"{each.work}"
        )
    return int(not all(each.good for each in found))


if __name__ == "__main__":
    sys.exit(main())
