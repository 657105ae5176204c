"""Draw docs/results/cpu-grpo.png from runs of recipes/grpo.py with different seeds, and keep their figures.

python docs/pictures/grpo.py runs/grpo-0 runs/grpo-1 runs/grpo-2      read the runs, keep their figures, draw
python docs/pictures/grpo.py                                          draw it again from cpu-grpo.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge import checkpoint
from tinyforge.train import metrics

RESULTS = Path(__file__).resolve().parents[1] / "results"
KEPT = ("reward", "frac_reward_zero_std", "kl", "entropy", "completions/mean_length", "seconds")


def read(run: Path) -> dict[str, Any]:
    rows, meta = metrics.read(run / "metrics.jsonl"), checkpoint.read_meta(checkpoint.latest(run))
    steps = [row for row in rows if "reward" in row]
    held_out = [row for row in rows if "val_correct" in row]
    return {
        "settings": meta["settings"],
        "machine": meta["machine"],
        **{name: [round(row[name], 5) for row in steps] for name in KEPT},
        "held_out": {row["step"]: {"correct": row["val_correct"], "format": row["val_format"]} for row in held_out},
    }


def draw(found: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for number, (seed, run) in enumerate(found["seeds"].items()):
        smooth, average = [], run["reward"][0]
        for value in run["reward"]:
            average = 0.9 * average + 0.1 * value
            smooth.append(average)
        steps = range(1, len(smooth) + 1)
        left.plot(steps, run["reward"], color=f"C{number}", alpha=0.2, linewidth=0.8)
        left.plot(steps, smooth, color=f"C{number}", label=f"seed {seed}")
        held = {0: {"correct": found["before"]["correct"]}} | {int(k): v for k, v in run["held_out"].items()}
        right.plot(list(held), [100 * v["correct"] for v in held.values()], "o-", color=f"C{number}", markersize=4)
    left.set_ylabel("reward, moving average")
    right.set_ylabel("held-out exact match, %")
    right.set_ylim(0, 100)
    left.legend()
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(target, dpi=100)


if __name__ == "__main__":
    file = RESULTS / "cpu-grpo.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    if sys.argv[1:]:
        runs = [read(Path(run)) for run in sys.argv[1:]]
        found["seeds"] = {str(run["settings"]["seed"]): run for run in runs}
        file.write_text(json.dumps(found) + "\n", encoding="utf-8")
    draw(found, file.with_suffix(".png"))
