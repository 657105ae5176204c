"""Kill ranks of a run at random moments, resume it each time, and compare what it leaves with a run left alone.

    python tests/parallel/kills.py --by mpirun --lives 5 --kills 4
    python tests/parallel/kills.py --by gpus --lives 1 --kills 3         on a machine with two GPUs
    python tests/parallel/kills.py --by fake --lives 2 --kills 2         the ranks of --gpus, on NumPy

A life is a run that is killed so many times, a random rank of it, and then resumed to its end. After each kill all of
its processes must be gone within 60 seconds, and the newest checkpoint must be whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge import checkpoint
from tinyforge.data.world import documents
from tinyforge.files import write_whole
from tinyforge.tokenizers import Tokenizer
from tinyforge.train import metrics

ROOT = Path(__file__).resolve().parents[2]
MOST = 60.0  # seconds until all ranks are gone
SHAPE = "dim=32 layers=2 hidden=64 heads=2 kv_heads=1 context=64 vocab=257"


def words(by: str, ranks: int) -> list[str]:
    if by == "mpirun":
        beside = Path(sys.executable).with_name("mpirun")
        found = str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [found, *root, "--oversubscribe", "-n", str(ranks), sys.executable, str(ROOT / "recipes/pretrain.py")]
    if by == "fake":
        return [sys.executable, str(ROOT / "tests/parallel/fake_nccl.py"), "pretrain", "--gpus", str(ranks)]
    return [sys.executable, str(ROOT / "recipes/pretrain.py"), "--gpus", str(ranks)]


def ranks_of(out: Path) -> dict[int, int]:
    """Process ids by rank, of the run that writes to `out`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().split(b"\0")
            items = (folder / "environ").read_bytes().split(b"\0")
            environ = dict(item.split(b"=", 1) for item in items if b"=" in item)
        except OSError:
            continue
        rank = environ.get(b"OMPI_COMM_WORLD_RANK") or environ.get(b"RANK")
        if str(out).encode() in line and rank is not None and not any(b"mpirun" in word for word in line[:1]):
            found.setdefault(int(rank), int(folder.name))
    return found


def saved(out: Path) -> int:
    steps = checkpoint.steps(out)
    return checkpoint.step_of(steps[-1]) if steps else 0


def sha(out: Path) -> str:
    last = checkpoint.latest(out)
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(last.glob("*.safetensors")))).hexdigest()


def rows(out: Path) -> list[dict[str, float]]:
    found = metrics.read(out / "metrics.jsonl")
    of_the_process = ("seconds", "tokens_per_second", "peak_memory_mib", "gpu_memory_mib")
    return [{key: value for key, value in row.items() if key not in of_the_process} for row in found]


class Life:
    def __init__(self, args: argparse.Namespace, folder: Path, out: Path) -> None:
        self.args, self.out, self.log = args, out, folder / "log.txt"
        self.command = [*words(args.by, args.ranks), "--out", str(out)]
        backend = ["--backend", "cupy", "--precision", "bf16"] if args.by == "gpus" else []
        if args.by == "mpirun":
            backend = ["--backend", "numpy"]
        self.begin = [
            *backend,
            "--data",
            str(folder / "text.txt"),
            "--tokenizer",
            str(folder / "tokenizer.json"),
            "--set",
            *SHAPE.split(),
            "--steps",
            str(args.steps),
            "--batch-size",
            "8",
            "--save-every",
            str(args.save_every),
            "--eval-every",
            str(2 * args.save_every),
            *args.more.split(),
        ]

    def start(self) -> subprocess.Popen[bytes]:
        """A process that trains, so that its ranks have found each other, or has ended."""
        before = self._written()
        more = ["--resume"] if saved(self.out) else self.begin
        with open(self.log, "wb") as log:
            environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [*self.command, *more], stdout=log, stderr=log, env=environ, start_new_session=True
            )
        while process.poll() is None and self._written() == before:
            time.sleep(0.02)
        return process

    def _written(self) -> Any:
        """Changes when a run, resumed or not, begins to train: it makes its metrics anew."""
        path = self.out / "metrics.jsonl"
        return (found.st_ino, found.st_mtime_ns) if path.exists() and (found := path.stat()) else None

    def step(self) -> int:
        """The last one of which the run has written anything."""
        return int(max((row["step"] for row in metrics.read(self.out / "metrics.jsonl")), default=0))

    def finish(self) -> None:
        if self.start().wait() != 0:
            raise SystemExit(f"a run ended badly: {self.said()}")

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def kill(self, rng: random.Random, share: float) -> str:
        """In a step up to this share of the run."""
        process, began = self.start(), time.monotonic()
        pids = ranks_of(self.out)
        # By steps: a first run on a GPU compiles for as long as a hundred runs take.
        rank, at = rng.randrange(self.args.ranks), saved(self.out)
        at = rng.randrange(at, max(at + 1, int(share * (self.args.steps - 2 * self.args.save_every))))
        while process.poll() is None and self.step() < at:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.1))
        moment, step = time.monotonic() - began, saved(self.out)
        try:
            os.kill(pids[rank], signal.SIGSTOP if self.args.stop else signal.SIGKILL)
        except (KeyError, ProcessLookupError):
            process.wait()
            return "was done before"
        began = time.monotonic()
        status = process.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in pids.values()) and time.monotonic() - began < MOST:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        if status == 0 or seconds > MOST:
            raise SystemExit(f"rank {rank} was killed: status {status} after {seconds:.0f} s; {self.said()}")
        if saved(self.out):
            checkpoint.load(self.out)
        errors = [line for line in self.said().splitlines() if line.startswith("error: ")]
        where = f"rank {rank} after {moment:.1f} s, in step {at} or soon after, step {step} saved"
        return f"{where}: gone in {seconds:.1f} s, status {status}; {errors or 'mpirun says it'}"


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--by", choices=("mpirun", "fake", "gpus"), default="mpirun")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--lives", type=int, default=5)
    p.add_argument("--kills", type=int, default=4)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--save-every", type=int, default=10)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--stop", action="store_true", help="SIGSTOP: the rank hangs")
    p.add_argument("--more", default="", help="further flags of the run")
    p.add_argument("--json", help="file for what happened, written as it happens")
    args = p.parse_args()
    said = {"by": args.by, "more": args.more, "kills": list[str](), "shas": list[str](), "same_bytes": False}

    def note(key: str, value: Any) -> None:
        print(value, flush=True)
        said[key] = [*said[key], value] if isinstance(said[key], list) else value
        if args.json:
            write_whole(Path(args.json), json.dumps(said, indent=1))

    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("\n".join(documents("train", 300, 0)))
        Tokenizer([], ["<|endoftext|>"]).save(folder / "tokenizer.json")
        whole = Life(args, folder, folder / "whole")
        whole.finish()
        expected = sha(whole.out), rows(whole.out)
        note("shas", f"left alone: {expected[0][:16]}")
        killed = 0
        for number in range(args.lives):
            life = Life(args, folder, folder / f"life-{number}")
            for done in range(args.kills):
                happened = life.kill(rng, (done + 1) / args.kills)
                killed += "was done" not in happened
                note("kills", f"  {happened}")
            life.finish()
            if (sha(life.out), rows(life.out)) != expected:
                raise SystemExit(f"life {number}: {sha(life.out)[:16]} or its metrics differ")
            note("shas", f"life {number}: {sha(life.out)[:16]}")
            shutil.rmtree(life.out)
        if killed <= args.lives * args.kills / 2:
            raise SystemExit(
                f"{killed} kills of {args.lives * args.kills}: the runs were over too soon; give more --steps"
            )
        note("same_bytes", f"{killed} kills, {args.lives} lives, all of the same bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
