"""Compare settings of pretraining at equal tokens or minutes, with several seeds: is the difference more than noise?

    python recipes/ablation.py --arm "one head: --set mtp_heads=1" --arm "four heads:" -- --steps 500
    python recipes/ablation.py --arm "A: --lr 4e-3" --arm "B: --lr 8e-3" --seeds 5 -- --data shards --steps 2000
    python recipes/ablation.py --arm "Muon: --optimizer muon" --arm "NorMuon: --optimizer muon --normuon" --gpus 8 \
        --json found.json -- --data shards --config base --precision bf16 --minutes 3
    python recipes/ablation.py --screen --arm "smear: --set smear=12" --arm "one head: --set mtp_heads=1" \
        --arm "rate: --lr 16e-4" -- --data shards --config base --lr 8e-4 --minutes 2

An arm is a name, a colon, and flags of recipes/pretrain.py. Flags after -- apply to all arms; an arm's --set adds to
theirs. All arms end by the same --minutes, or by --steps of as many tokens. Runs are written to OUT/ARM/seed-N. Keep
OUT out of runs/, where chat.py and sft.py look for the newest run. A finished run is not repeated, and a stopped one is
resumed. Before runs by --minutes on a GPU each arm takes four steps, so that no clock includes compiling.

The figures are head 0's bits per byte on held-out text. Runs of one seed have the same initial weights, where those
have the same shapes, and read the text in the same order. So their differences to the first arm vary less than the
runs: d for each of n seeds, with the standard error s(d) / sqrt(n). A difference is larger than the noise if it is more
than Student's t for 95 % of these (4.3 for three seeds, 2.8 for five): an arm without effect appears so one time in
twenty. With three seeds or more such an arm pays or costs.

--screen measures up to 23 changes with few runs, of one seed: each arm is a change of the flags after --, and each run
makes about half of all changes, by a design of Plackett and Burman (1946). With N runs an effect is the mean of N/2
runs with the change less that of the N/2 without it, so every run counts for every change: 20 runs say of 19 changes as
much as 10 runs of each with 10 without it. What two changes do only together is spread over the others, so confirm what
a screen finds. The noise is Lenth's (1989): most changes are taken to have little effect, and their median says how
much is none.
"""

from __future__ import annotations

import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from queue import SimpleQueue
from statistics import mean, median, stdev
from threading import Event, Thread
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge import checkpoint
from tinyforge.backends import gpu_count, gpu_is_there
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.report import add_json_flag, check_before, count_of, publish
from tinyforge.train.metrics import read_scores
from tinyforge.train.run import claimed
from tinyforge.train.settings import EVERY_ACTION, PretrainSettings, config_of, parse

OVERALL = "held-out text, bits per byte"
_OF_SOURCE = re.compile(r"held-out text of ([^,]+), bits per byte")
TOKENS = "tokens"  # that a run has read
_OURS = ("--seed", "--out", "--resume", "--plan", "--card", "--device", "--gpus")
ENOUGH = 3  # seeds for a verdict
DESIGNS = ("++-", "+++-+--", "++-+++---+-", "++++-+-++--+---", "++--++++-+-+----++-", "+++++-+-++--++--+-+----")
"""First rows of Plackett and Burman's designs; each next row is shifted by one, and the last has no change."""
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantiles of Student's t distribution for 2, 3, ... seeds; the last stands for more seeds too."""
PRETRAIN = Path(__file__).with_name("pretrain.py")
ONE_RUN = "--one-run"  # the first word of this program as a single run


@dataclass(frozen=True)
class Arm:
    """A name, and what recipes/pretrain.py is given: as flags, and as the settings that they stand for."""

    name: str
    flags: tuple[str, ...]
    settings: PretrainSettings

    def run(self, out: Path, seed: int) -> Path:
        return out / re.sub(r"[^\w.=-]+", "-", self.name) / f"seed-{seed}"


def read_arm(text: str, common: Sequence[str]) -> Arm:
    """NAME: FLAGS."""
    name, colon, flags = text.partition(":")
    if not (name.strip() and colon):
        raise UserError(f"--arm: {text!r} expects NAME: FLAGS, e.g. --arm 'one head: --set mtp_heads=1'")
    try:
        own = shlex.split(flags)
    except ValueError as error:
        raise UserError(f"--arm: {text!r}: {error}; close what is open") from error
    taken = next((flag for flag in (*common, *own) if flag.split("=")[0] in _OURS), None)
    if taken:
        raise UserError(f"{taken}: is set by the comparison itself; leave it out")
    given = (*common, *own)
    try:
        return Arm(
            name.strip(),
            given,
            parse(PretrainSettings, "", given, actions=EVERY_ACTION, prog="recipes/pretrain.py").settings,
        )
    except UserError as error:
        raise UserError(f"--arm {name.strip()}: {error}") from error


def tokens_of(arm: Arm) -> int:
    """Tokens that a run of the arm reads, 0 if it ends by --minutes."""
    s = arm.settings
    return s.micro_batches * s.batch_size * (s.seq_len or config_of(s).context)


def changed_by(flags: Sequence[str]) -> set[str]:
    """What flags change: their names, and of --set those of the fields."""
    found, name = set(), ""
    for word in flags:
        if word.startswith("--"):
            name, _, word = word.partition("=")
        found.add(word.partition("=")[0] if name == "--set" else name)
    return found - {""}


def screen(changes: Sequence[Arm], common: Sequence[str]) -> tuple[list[Arm], list[tuple[bool, ...]]]:
    """The runs of the smallest design for these changes, and for each run which of them it makes. More columns than
    changes are left over: they have no effect but that of noise and of pairs. UserError for changes of one setting: a
    run with both would have the latter alone, and neither effect would be its own."""
    first = next((row for row in DESIGNS if len(row) >= len(changes)), None)
    if first is None:
        raise UserError(f"--screen: got {len(changes)} changes, expected at most {len(DESIGNS[-1])}; leave some out")
    rows = [tuple(sign == "+" for sign in first[-n:] + first[:-n]) for n in range(len(first))]
    rows.append((False,) * len(first))
    own = [arm.flags[len(common) :] for arm in changes]
    for one, other in combinations(range(len(changes)), 2):
        if both := sorted(changed_by(own[one]) & changed_by(own[other])):
            raise UserError(
                f"--screen: {changes[one].name!r} and {changes[other].name!r} both change {', '.join(both)}, and a run "
                "may make both; leave one out"
            )
    runs = []
    for number, row in enumerate(rows):
        flags = [flag for made, flags in zip(row, own, strict=False) if made for flag in flags]
        runs.append(read_arm(f"run {number}: {shlex.join(flags)}", common))
    return runs, rows


def effects(made: Sequence[Sequence[bool]], values: Sequence[float]) -> tuple[list[float], float]:
    """For each column the mean of the runs with the change less the mean of those without it, and Lenth's limit of the
    noise: 1.5 times the median of the effects that are less than 2.5 times 1.5 medians of all, times Student's t."""
    found = [
        mean(v for row, v in zip(made, values, strict=True) if row[column])
        - mean(v for row, v in zip(made, values, strict=True) if not row[column])
        for column in range(len(made[0]))
    ]
    sizes = [abs(effect) for effect in found]
    first = 1.5 * median(sizes)
    error = 1.5 * median([size for size in sizes if size <= 2.5 * first])
    return found, STUDENT[min(max(round(len(found) / 3), 1) - 1, len(STUDENT) - 1)] * error


def screened(changes: Sequence[Arm], made: Sequence[Sequence[bool]], runs: Sequence[Mapping[str, float]]) -> Any:
    """For each change its effects on the bits per byte and on the tokens that a run reads, and what that is worth."""
    bits, limit = effects(made, [run[OVERALL] for run in runs])
    tokens, _ = effects(made, [math.log(run[TOKENS]) for run in runs])
    found = {
        arm.name: {
            "effect": effect,
            "tokens": math.expm1(read),
            "verdict": "within the noise" if abs(effect) <= limit else "pays" if effect < 0 else "costs",
        }
        for arm, effect, read in zip(changes, bits, tokens, strict=False)
    }
    return {"limit": limit, "effects": dict(sorted(found.items(), key=lambda row: row[1]["effect"]))}


def screen_table(found: Mapping[str, Any], runs: int, length: str) -> str:
    rows, width = found["effects"], max(map(len, found["effects"]))
    lines = [f"head 0, bits per byte of held-out text; {length}, {runs} runs, noise up to {found['limit']:.4f}"]
    for name, row in rows.items():
        lines.append(f"  {name:<{width}}  {row['effect']:+.4f}   tokens {row['tokens']:+6.1%}   {row['verdict']}")
    return "\n".join(lines)


def finish(arm: Arm, out: Path, seed: int, device: int | None = None) -> dict[str, float]:
    """The scores of a run, and its tokens; it is started or resumed unless it is complete. device: its GPU's number."""
    run = arm.run(out, seed)
    flags, where = [*arm.flags, "--seed", str(seed)], [] if device is None else ["--device", str(device)]
    if checkpoint.steps(run):
        with claimed(replace(arm.settings, out=str(run)), resume=True):
            pass  # no other process trains there; this removes a lock that a killed run has left
        meta = checkpoint.read_meta(latest := checkpoint.latest(run))
        checkpoint.require(latest, meta, "settings")
        expected, stored = replace(arm.settings, seed=seed), PretrainSettings.from_dict(meta["settings"])
        for name in expected.differences(stored):
            raise UserError(
                f"{run} was made with {name} {getattr(stored, name)!r}, now it is {getattr(expected, name)!r}; choose "
                "another --out"
            )
        minutes = arm.settings.minutes
        ended = meta["elapsed"] >= 60 * minutes if minutes else meta["step"] == arm.settings.steps
        if ended and OVERALL in read_scores(run, meta["step"]):
            return read_scores(run, meta["step"]) | {TOKENS: meta[TOKENS]}
        flags = ["--resume"]
    train(f"arm {arm.name!r}, seed {seed},", run, [*flags, *where])
    meta = checkpoint.read_meta(checkpoint.latest(run))
    return read_scores(run, meta["step"]) | {TOKENS: meta[TOKENS]}


def warm_up(arm: Arm, out: Path, device: int | None = None) -> None:
    """Four steps of an arm that ends by --minutes: its kernels are then compiled, and found on disk."""
    run, flags = arm.run(out, 0).with_name("warm-up"), list(arm.flags)
    while by := [place for place, flag in enumerate(flags) if flag.split("=")[0] == "--minutes"]:
        del flags[by[0] : by[0] + 1 + ("=" not in flags[by[0]])]
    where = [] if device is None else ["--device", str(device)]
    if not checkpoint.steps(run):
        train(f"arm {arm.name!r}, warm-up,", run, [*flags, "--steps", "4", *where])


def train(what: str, run: Path, flags: Sequence[str]) -> None:
    """Run recipes/pretrain.py to its end, with its output in the folder of the run."""
    # -u: unbuffered, so that an error is the last line of the log.
    command = [sys.executable, "-u", str(Path(__file__).resolve()), ONE_RUN, *flags, "--out", str(run)]
    try:
        run.mkdir(parents=True, exist_ok=True)
        # Its standard input closes when this process ends, however it does.
        with (
            open(run / "log.txt", "a", encoding="utf-8") as log,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT) as process,
        ):
            status = process.wait()
    except OSError as error:
        raise UserError(
            f"cannot write in {run}: {error.strerror}; choose another --out, or see to its permissions and space"
        ) from error
    if status:
        last = (run / "log.txt").read_text(encoding="utf-8").strip().rpartition("\n")[2]
        raise UserError(f"{what} ended with status {status}: {last.removeprefix('error: ')}; see {run / 'log.txt'}")


def pretrain_until_alone(flags: Sequence[str]) -> int:
    """recipes/pretrain.py in its own process, which saves and exits when the comparison has ended. Otherwise a run that
    nobody waits for would occupy its folder and the machine to its last step."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        signal.raise_signal(signal.SIGTERM)

    Thread(target=watch, daemon=True).start()
    sys.argv = [str(PRETRAIN), *flags]
    runpy.run_path(str(PRETRAIN), run_name="__main__")
    return 0


def compare(scores: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """For each arm and source: the mean, the deviation over seeds, and the difference to the first arm."""
    found: dict[str, Any] = {}
    for arm, runs in scores.items():
        found[arm] = {}
        for score in runs[0]:
            source = _OF_SOURCE.fullmatch(score)
            if not (score == OVERALL or source) or any(score not in run for run in runs):
                continue  # other scores, and what was measured of one run only
            values = [run[score] for run in runs]
            row: dict[str, Any] = {"runs": values, "mean": mean(values)}
            name = source[1] if source else "over all"
            first = found[next(iter(scores))].get(name)
            if len(values) > 1:
                row["deviation"] = stdev(values)
            if first:
                row["difference"] = row["mean"] - first["mean"]
            if first and len(values) > 1:
                error = stdev(a - b for a, b in zip(values, first["runs"], strict=True)) / len(values) ** 0.5
                limit = STUDENT[min(len(values) - 2, len(STUDENT) - 1)] * error
                row |= {"standard_error": error, "beyond_noise": abs(row["difference"]) > limit}
                if len(values) >= ENOUGH:
                    beyond = "pays" if row["difference"] < 0 else "costs"
                    row["verdict"] = beyond if row["beyond_noise"] else "within the noise"
            found[arm][name] = row
    return found


def table_of(found: Mapping[str, Any], seeds: int, length: str) -> str:
    """length: of a run, in words."""
    width, wide = (max(map(len, names)) for names in (found, [s for rows in found.values() for s in rows]))
    lines = [f"head 0, bits per byte of held-out text; {length}, {count_of(seeds, 'seed')}"]
    for arm, rows in found.items():
        for source, row in rows.items():
            line = f"  {arm:<{width}}  {source:<{wide}}  {row['mean']:.4f}"
            line += f" +- {row['deviation']:.4f}" if "deviation" in row else ""
            line += f"   {row['difference']:+.4f}" if "difference" in row else ""
            if "beyond_noise" in row:
                line += f" +- {row['standard_error']:.4f}  "
                line += "larger than the noise" if row["beyond_noise"] else "within the noise"
            lines.append(line)
    for verdict in ("pays", "costs", "within the noise"):
        arms = [arm for arm, rows in found.items() if rows["over all"].get("verdict") == verdict]
        lines += [f"{verdict}: {', '.join(arms)}"] if arms else []
    few = "one seed shows no noise" if seeds == 1 else "two seeds show too little of the noise"
    return "\n".join(lines + [f"{few}: give --seeds 3 or more"] * (seeds < ENOUGH))


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == [ONE_RUN]:
        return pretrain_until_alone(argv[1:])
    cut = argv.index("--") if "--" in argv else len(argv)
    p = Parser(description=__doc__)
    what = "two or more; the first is what the others are compared to"
    p.flag("--arm", [], what, action="append", metavar="'NAME: FLAGS'")
    p.flag("--screen", False, "each arm is a change, and runs make half of all changes")
    p.flag("--seeds", int, "runs of each arm: seeds 0, 1, ... (default: 3; with --screen 1)", 1)
    p.flag("--jobs", int, "runs side by side; by --minutes they share the machine (default: 1, or --gpus)", 1)
    p.flag("--gpus", int, "GPUs of this machine, one for each run (default: as a run chooses)", 1)
    p.flag("--out", "ablation", "where the runs lie", metavar="DIR")
    add_json_flag(p)
    args = p.parse_args(argv[:cut])
    if args.gpus and args.gpus > gpu_count():
        raise UserError(f"--gpus is {args.gpus}, this machine has {gpu_count()}; use at most that")
    if args.gpus and args.jobs and args.jobs != args.gpus:
        raise UserError(f"--gpus is {args.gpus}, --jobs {args.jobs}; each run has a GPU, so leave out --jobs")
    check_before(args.json)
    changes = arms = [read_arm(text, argv[cut + 1 :]) for text in args.arm]
    if len({arm.run(Path(), 0) for arm in arms}) < max(2, len(arms)):
        raise UserError(f"--arm: got {[arm.name for arm in arms]}, expected two or more with different names")
    if args.screen:
        arms, design = screen(changes, argv[cut + 1 :])
    seeds = args.seeds or (1 if args.screen else 3)
    tokens, minutes = tokens_of(arms[0]), arms[0].settings.minutes
    if any(arm.settings.minutes != minutes for arm in arms):
        ends = ", ".join(f"{arm.name!r} {arm.settings.minutes or '--steps'}" for arm in arms)
        raise UserError(f"--arm: runs end by other --minutes ({ends}); give --minutes or --steps once, after --")
    other = next((arm for arm in arms if tokens_of(arm) != tokens), None)
    if other:
        raise UserError(
            f"--arm: {other.name!r} reads {tokens_of(other):,} tokens, {arms[0].name!r} {tokens:,}; change "
            "--steps so that they are equal"
        )
    started, failed = time.perf_counter(), Event()
    devices: SimpleQueue[int | None] = SimpleQueue()
    jobs = args.gpus or args.jobs or 1
    for number in range(jobs):
        devices.put(number if args.gpus else None)

    def on_a_device(work: Callable[..., Any], *given: Any) -> Any:
        """work(*given, device) on a device that no other run has. Nothing, if a run has failed: its error is raised."""
        if failed.is_set():
            return {}
        device = devices.get()
        try:
            return work(*given, device)
        except BaseException:
            failed.set()
            raise
        finally:
            devices.put(device)

    def measured(arm: Arm, seed: int) -> dict[str, float]:
        scores: dict[str, float] = on_a_device(finish, arm, Path(args.out), seed)
        if not scores:
            return {}
        elapsed = time.perf_counter() - started
        print(f"{elapsed:6.0f} s  {arm.name}, seed {seed}: {scores[OVERALL]:.4f}", file=sys.stderr)
        return scores

    with ThreadPoolExecutor(jobs) as pool:
        if minutes and gpu_is_there() and arms[0].settings.backend != "numpy":
            for warm in [pool.submit(on_a_device, warm_up, arm, Path(args.out)) for arm in arms]:
                warm.result()
        # Seed by seed, so that a comparison that is stopped has runs of all arms.
        asked = [pool.submit(measured, arm, seed) for seed in range(seeds) for arm in arms]
        done = [run.result() for run in asked]
    length = f"{minutes:g} min a run" if minutes else f"{tokens:,} tokens a run"
    if args.screen:
        of_seeds = [done[i :: len(arms)] for i in range(len(arms))]
        means = [{key: mean(run[key] for run in runs) for key in (OVERALL, TOKENS)} for runs in of_seeds]
        effect = screened(changes, design, means)
        runs = {arm.name: {"flags": list(arm.flags), **run} for arm, run in zip(arms, means, strict=True)}
        report = {"minutes": minutes, "seeds": seeds, "changes": {arm.name: arm.flags for arm in changes}, "runs": runs}
        publish(report | effect, screen_table(effect, len(done), length), args.json)
        return 0
    found = compare({arm.name: done[i :: len(arms)] for i, arm in enumerate(arms)})
    flags = {arm.name: list(arm.flags) for arm in arms}
    read = {arm.name: round(mean(run[TOKENS] for run in done[i :: len(arms)])) for i, arm in enumerate(arms)}
    report = {"tokens": tokens, "minutes": minutes, "read": read, "seeds": seeds, "arms": flags, "found": found}
    table = table_of(found, seeds, length)
    if minutes:
        table += "\ntokens a run: " + ", ".join(f"{name} {count:,}" for name, count in read.items())
    publish(report, table, args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
