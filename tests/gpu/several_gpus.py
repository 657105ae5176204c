"""All that is to be shown on several GPUs, in one command of at most nine minutes.

    python tests/gpu/several_gpus.py --out build/two-gpus
    python tests/gpu/several_gpus.py --gpus 4 --out build/four-gpus

What matters most comes first. Each part is a command that can be run alone, has a limit of its own and what is left of
all the time, and leaves what it printed and a JSON file in --out; summary.json says how each ended, as it goes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
CHECK = "tests/gpu/ranks_check.py --gpus {gpus} --config base"
# Name, seconds at most, command. {gpus} becomes their number, {exact} a number of steps, fewer on more GPUs, {json} the
# part's file.
PARTS = (
    # A step of one GPU, of all, with ZeRO, plain and as CUDA graphs, and of compiled DDP; memory next to forecast.
    (
        "step",
        170,
        "bench/train_step.py --gpus {gpus} --peer torch --capture --config base --precision bf16 "
        "--batch-size 32 --seq-len 512 --steps 100 --json {json}",
    ),
    # The same bits in two runs of the same world, with ZeRO, on one GPU, on all, and moved in between.
    ("bits", 140, CHECK + " --rows 64 --only collectives same bits --exact-steps {exact} --json {json}"),
    # One GPU with micro-batches next to all, where training amplifies rounding least.
    ("losses", 140, CHECK + " --rows 8 --precision fp64 --only losses --steps 300 --json {json}"),
    ("kills", 150, "tests/parallel/kills.py --by gpus --ranks {gpus} --lives 1 --kills 3 --json {json}"),
    # About 0.8 B parameters.
    (
        "xl",
        110,
        "bench/train_step.py --gpus {gpus} --config xl --precision bf16 --batch-size 16 --steps 20 --json {json}",
    ),
    # What less precision makes of the same differences.
    ("losses-fp32", 90, CHECK + " --rows 8 --precision fp32 --only losses --steps 300 --json {json}"),
)


def run(command: list[str], log: Path, seconds: float) -> str:
    """How it ended: "0", another status, or "out of time"."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=file, start_new_session=True)
        try:
            return str(process.wait(seconds))
        except subprocess.TimeoutExpired:
            # It hands the signal on to its ranks, which are sessions of their own and die with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "out of time"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpus", type=int, default=2, metavar="N")
    p.add_argument("--out", default="build/several-gpus", metavar="DIR")
    p.add_argument("--seconds", type=float, default=525.0, help="for all parts (default: 525)")
    p.add_argument("--only", nargs="+", choices=[name for name, _, _ in PARTS], metavar="PART")
    args = p.parse_args()
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    until, summary = time.monotonic() + args.seconds, dict[str, dict[str, object]]()
    for name, limit, command in PARTS:
        if args.only and name not in args.only:
            continue
        left = until - time.monotonic()
        began = time.monotonic()
        file = out / f"{name}.json"
        of_all = partial(command.format, gpus=args.gpus, exact=400 // args.gpus)
        words = [sys.executable, *of_all(json=file).split()]
        status = run(words, out / f"{name}.log", min(limit, left)) if left > 20 else "no time left"
        seconds = round(time.monotonic() - began, 1)
        summary[name] = {"status": status, "seconds": seconds, "command": of_all(json=f"{name}.json")}
        write_whole(out / "summary.json", json.dumps(summary, indent=1))
        print(f"{name}: {status}, {seconds:.0f} s", flush=True)
        if (out / f"{name}.log").is_file():
            print("  " + "\n  ".join((out / f"{name}.log").read_text(errors="replace").splitlines()[-12:]), flush=True)
    return int(any(part["status"] != "0" for part in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
