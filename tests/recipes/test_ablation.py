"""recipes/ablation.py: what is run, what is not run again, and what the table says is noise."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinyforge import checkpoint
from tinyforge.data.world import documents
from tinyforge.errors import UserError, run_command
from tinyforge.files import LOCK, locked
from tinyforge.formats import newest_run
from tinyforge.recipes import ablation
from tinyforge.train.metrics import save_scores
from tinyforge.train.settings import config_of

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "--set dim=16 heads=2 kv_heads=1 layers=1 hidden=8 context=32 vocab=280"
COMMON = f"{SHAPE} --data text.txt --batch-size 2 --workers 1"
SLOW, FAST = "slow: --lr 1e-6", "fast: --lr 1e-2 --set mtp_heads=2"
FIELDS = "dropout=0.1 norm_eps=1e-6 layers=2 hidden=8 context=64 vocab=300 smear=2 value_every=1 logit_softcap=9"
FIELDS += " window=3 embedding_norm=true mix_first=true zero_outputs=true"
CHANGES = [f"--set {field}" for field in FIELDS.split()]
CHANGES += [f"--{name} 0.3" for name in ("lr", "clip", "weight-decay", "warmup", "decay-fraction")]
CHANGES += [f"--{name} 2" for name in ("batch-size", "eval-every", "save-every", "keep", "grad-accum")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two arms, one seed each, of two steps."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text("\n".join(documents("train", 40)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert compare("--seeds", "1", steps=2) == 0
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("\n".join(documents("train", 40)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def compare(*flags: str, steps: int = 12) -> int:
    arms = ["--arm", SLOW, "--arm", FAST, "--json", "found.json"]
    return ablation.main([*arms, *flags, "--", *COMMON.split(), "--steps", str(steps), "--save-every", "5"])


@pytest.mark.slow
def test_runs_are_made_once_and_go_on_where_they_were(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--seeds", "2", "--jobs", "2") == 0
    shown = capsys.readouterr().out
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert found["tokens"] == 12 * 2 * 32 and "768 tokens a run, 2 seeds" in shown
    slow, fast = (found["found"][arm]["over all"] for arm in ("slow", "fast"))
    assert fast["difference"] < -12.7 * fast["standard_error"] and fast["beyond_noise"]
    assert "larger than the noise" in shown
    assert "difference" not in slow and len(set(slow["runs"])) == 2
    config = checkpoint.load(Path("ablation/fast/seed-1")).meta["config"]
    assert config["mtp_heads"] == 2 and config["dim"] == 16
    assert checkpoint.load(Path("ablation/fast/seed-1")).meta["settings"]["seed"] == 1

    # One run is left at its second checkpoint, as if it had been killed, and one is gone.
    written = {path: path.stat().st_mtime_ns for path in Path("ablation").rglob("step-00000012/hashes.json")}
    shutil.rmtree("ablation/slow/seed-0/step-00000012")
    shutil.rmtree("ablation/fast/seed-0")
    assert compare("--seeds", "2") == 0
    assert json.loads(Path("found.json").read_text(encoding="utf-8")) == found
    again = {path: path.stat().st_mtime_ns for path in Path("ablation").rglob("step-00000012/hashes.json")}
    made = {str(path.parents[1]) for path in again if again[path] != written[path]}
    assert made == {"ablation/slow/seed-0", "ablation/fast/seed-0"}
    assert "resuming at step 10" in Path("ablation/slow/seed-0/log.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_equal_minutes_on_several_gpus(
    here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs at a time, each with a device of its own; all kernels are compiled first; a run that ended stays."""
    used: list[tuple[str, ...]] = []
    train, on_cpu = ablation.train, ["--backend", "numpy"]

    def without_gpu(what: str, run: Path, flags: list[str]) -> None:
        at = flags.index("--device")
        used.append((what, flags[at + 1]))
        train(what, run, [*flags[:at], *flags[at + 2 :], *([] if "--resume" in flags else on_cpu)])

    monkeypatch.setattr(ablation, "train", without_gpu)
    monkeypatch.setattr(ablation, "gpu_count", lambda: 2)
    monkeypatch.setattr(ablation, "gpu_is_there", lambda: True)
    flags = ["--arm", SLOW, "--arm", FAST, "--gpus", "2", "--seeds", "2", "--json", "found.json", "--"]
    assert ablation.main([*flags, *COMMON.split(), "--minutes", "0.02"]) == 0
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    # Both threads start at once, so either warm-up may note itself first.
    assert {what for what, _ in used[:2]} == {"arm 'slow', warm-up,", "arm 'fast', warm-up,"}
    assert len(used) == 6 and {device for _, device in used} == {"0", "1"}
    assert found["minutes"] == 0.02 and found["tokens"] == 0 and min(found["read"].values()) > 500
    shown = capsys.readouterr().out
    assert "0.02 min a run, 2 seeds" in shown and "tokens a run: slow " in shown
    for arm in ("slow", "fast"):
        assert checkpoint.load(Path(f"ablation/{arm}/seed-1")).meta["elapsed"] >= 1.2
    assert ablation.main([*flags, *COMMON.split(), "--minutes", "0.02"]) == 0
    assert len(used) == 6 and json.loads(Path("found.json").read_text(encoding="utf-8")) == found
    for wrong, message in (
        ("3", "--gpus is 3, this machine has 2"),
        ("2 --jobs 1", "each run has a GPU, so leave out"),
    ):
        with pytest.raises(UserError, match=message):
            ablation.main(
                ["--arm", SLOW, "--arm", FAST, "--gpus", *wrong.split(), "--", *COMMON.split(), "--steps", "2"]
            )


def test_the_difference_and_its_noise() -> None:
    """By hand; and two arms of the same numbers are within the noise."""
    key, books = ablation.OVERALL, "held-out text of books, bits per byte"
    runs = {
        "a": [{key: 1.0, books: 2.0}, {key: 1.2, books: 2.0}, {key: 1.1, books: 2.3}],
        "b": [{key: 0.8, books: 2.1}, {key: 0.9, books: 2.1}, {key: 0.7, books: 2.1}],
        "c": [{key: 1.2, books: 2.0}, {key: 1.0, books: 2.0}, {key: 1.1, books: 2.0}],
        "d": [{key: 0.99, books: 2.0}, {key: 1.18, books: 2.0}, {key: 1.09, books: 2.0}],
    }
    found = ablation.compare(runs)
    b, c, d = (found[name]["over all"] for name in "bcd")
    assert b["mean"] == pytest.approx(0.8) and b["difference"] == pytest.approx(-0.3)
    # -0.2, -0.3, -0.4; and -0.01, -0.02, -0.01, little next to the deviation of the runs.
    assert b["standard_error"] == pytest.approx(math.sqrt(0.01 / 3)) and b["beyond_noise"]
    assert d["difference"] == pytest.approx(-0.04 / 3) and d["standard_error"] == pytest.approx(0.01 / 3)
    assert not d["beyond_noise"] and d["deviation"] == pytest.approx(c["deviation"], rel=0.1)  # 4.0 errors of 4.303
    closer = {**runs, "d": [{key: run[key] - 0.002, books: 2.0} for run in runs["d"]]}
    assert ablation.compare(closer)["d"]["over all"]["verdict"] == "pays"
    assert c["difference"] == pytest.approx(0) and not c["beyond_noise"]
    assert not found["b"]["books"]["beyond_noise"] and found["b"]["books"]["difference"] == pytest.approx(0)
    runs["a"][0] |= {"held-out text of web, bits per byte": 3.0, "held-out text of books, head 1, bits per byte": 3.0}
    assert ablation.compare(runs) == found  # what evaluate.py has added to one run
    table = ablation.table_of(found, 3, "999 tokens a run")
    assert "999 tokens a run, 3 seeds" in table and "b  over all  0.8000 +- 0.1000   -0.3000 +- 0.0577  larger" in table
    assert b["verdict"] == "pays" and table.endswith("\npays: b\nwithin the noise: c, d")
    worse = {"b": runs["b"], "a": runs["a"]}
    assert ablation.compare(worse)["a"]["over all"]["verdict"] == "costs"
    two = ablation.compare({arm: made[:2] for arm, made in runs.items()})
    assert "verdict" not in two["b"]["over all"]
    assert ablation.table_of(two, 2, "999 tokens a run").endswith(
        "two seeds show too little of the noise: give --seeds 3 or more"
    )
    alone = ablation.compare({arm: made[:1] for arm, made in runs.items()})
    assert alone["b"]["over all"] == {"runs": [0.8], "mean": 0.8, "difference": pytest.approx(-0.2)}
    table = ablation.table_of(alone, 1, "999 tokens a run")
    assert "999 tokens a run, 1 seed\n" in table and "one seed shows no noise" in table


def test_an_arm_adds_to_the_fields_of_all_and_wins_over_them() -> None:
    common = ("--set", "dim=16", "heads=2", "--steps", "4")
    arm = ablation.read_arm("wide: --set dim=32 layers=1 --lr 1e-2", common)
    assert arm.flags == (*common, "--set", "dim=32", "layers=1", "--lr", "1e-2")
    config = config_of(arm.settings)
    assert (config.dim, config.heads, config.layers, arm.settings.lr) == (32, 2, 1, 1e-2)


def test_an_out_that_cannot_be_written(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit):
        run_command(lambda: compare("--seeds", "1", "--out", "file", steps=1))
    shown = capsys.readouterr().err
    assert shown.startswith("error: cannot write in file/") and "Not a directory; choose another --out" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("arms", "rest", "message"),
    [
        ([SLOW], "--steps 4", "--arm: got ['slow'], expected two or more with different names"),
        ([SLOW, SLOW], "--steps 4", "--arm: got ['slow', 'slow'], expected two or more with different names"),
        ([SLOW, "fast --lr 1"], "--steps 4", "--arm: 'fast --lr 1' expects NAME: FLAGS, e.g. --arm 'one head: --set"),
        ([SLOW, "long: --steps 9"], "--steps 4", "--arm: 'long' reads 576 tokens, 'slow' 256; change --steps so that"),
        ([SLOW, "other: --seed 3"], "--steps 4", "--seed: is set by the comparison itself"),
        ([SLOW, FAST], "--minutes 1 --device 0", "--device: is set by the comparison itself; leave it out"),
        ([SLOW, "long: --minutes 1"], "", "--arm: runs end by other --minutes ('slow' --steps, 'long' 1.0); give"),
        ([SLOW, "wrong: --set dims=3"], "--steps 4", "--arm wrong: config: unknown key 'dims'"),
        ([SLOW, "wrong: --lr nan"], "--steps 4", "--arm wrong: --lr is nan, expected a number above 0"),
        ([SLOW, "wrong: --set heads=3"], "--steps 4", "--arm wrong: config: dim 16 is not divisible by heads 3"),
        (
            [SLOW, "wrong: --stesp 3"],
            "--steps 4",
            "--arm wrong: unrecognized arguments: --stesp 3; did you mean --steps? See recipes/pretrain.py --help",
        ),
        (
            [SLOW, "wrong: --data don't.txt"],
            "--steps 4",
            '--arm: "wrong: --data don\'t.txt": No closing quotation; close what is open',
        ),
        (
            ["wrong: --encoding klingon", SLOW],
            "--steps 4",
            "arm 'wrong', seed 0, ended with status 2: --encoding klingon: no such text encoding",
        ),
    ],
)
def test_one_line(here: None, capsys: pytest.CaptureFixture[str], arms: list[str], rest: str, message: str) -> None:
    flags = [part for arm in arms for part in ("--arm", arm)]
    with pytest.raises(SystemExit) as left:
        run_command(lambda: ablation.main([*flags, "--seeds", "1", "--", *COMMON.split(), *rest.split()]))
    shown = capsys.readouterr().err
    assert left.value.code == 2 and shown.startswith(f"error: {message}") and shown.count("\n") == 1, shown
    assert not Path("ablation/slow").exists()  # nothing is begun after a fault


@pytest.mark.slow
def test_no_arm_is_taken_for_the_newest_run(folder: Path) -> None:
    """sft.py without --base and chat without --checkpoint look under runs/."""
    assert checkpoint.load(Path("ablation/slow/seed-0")).meta["step"] == 2
    assert newest_run(("sft", "pretrain")) is None


def test_the_lock_of_a_killed_run_that_had_ended_goes(folder: Path) -> None:
    (Path("ablation/fast/seed-0") / LOCK).write_bytes(b"")
    assert compare("--seeds", "1", steps=2) == 0
    assert not list(Path("ablation").rglob(LOCK))


def test_a_run_ends_with_the_comparison(here: None) -> None:
    """Killed, so that nothing of it can end the run, which saves and lets go of its folder."""
    program = [sys.executable, str(ROOT / "recipes/ablation.py"), "--arm", SLOW, "--arm", FAST]
    process = subprocess.Popen([*program, "--", *COMMON.split(), "--steps", "1000000", "--save-every", "5"])
    run = Path("ablation/slow/seed-0")
    until = time.monotonic() + 60
    while not checkpoint.steps(run) and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait()
    while time.monotonic() < until:
        try:
            with locked(run):
                break
        except BlockingIOError:
            time.sleep(0.05)
    assert time.monotonic() < until and "stopped at step" in (run / "log.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_scores_of_an_earlier_step_do_not_count_as_the_end(folder: Path) -> None:
    """As evaluate.py leaves them in an unfinished run that was resumed and ended, but was killed before it measured."""
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    run = Path("ablation/fast/seed-0")
    (run / "scores.json").unlink()
    save_scores(run, 1, {ablation.OVERALL: 99.0})
    assert compare("--seeds", "1", steps=2) == 0
    assert json.loads(Path("found.json").read_text(encoding="utf-8")) == found


def test_a_run_of_other_flags_is_not_taken_for_this_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(lambda: compare("--seeds", "1", steps=3))
    shown = capsys.readouterr().err
    assert "error: ablation/slow/seed-0 was made with steps 2, now it is 3; choose another --out" in shown


def test_the_designs_are_orthogonal() -> None:
    """Each column has as many runs with its change as without it, and so has every pair of columns."""
    for row in ablation.DESIGNS:
        changes = [ablation.read_arm(f"c{n}: {flags}", ("--steps", "4")) for n, flags in enumerate(CHANGES[: len(row)])]
        runs, made = ablation.screen(changes, ("--steps", "4"))
        signs = [[1 if one else -1 for one in run] for run in made]
        for a in range(len(row)):
            for b in range(len(row)):
                assert sum(run[a] * run[b] for run in signs) == (len(signs) if a == b else 0)
        assert runs[-1].flags == ("--steps", "4") and len(runs) == len(row) + 1
    with pytest.raises(UserError, match="got 24 changes, expected at most 23; leave some out"):
        ablation.screen(changes + changes[:1], ())


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("--lr 1e-3", "--lr=2e-3", "--lr"),
        ("--set smear=2 layers=3", "--set mtp_heads=1 --set=layers=2", "layers"),
        ("--group-rates embeddings=3", "--group-rates heads=2", "--group-rates"),
    ],
)
def test_a_screen_refuses_two_changes_of_one_setting(one: str, other: str, both: str) -> None:
    """A run that makes both would have only the latter."""
    changes = [ablation.read_arm(f"{name}: {flags}", ()) for name, flags in (("a", one), ("b", other))]
    with pytest.raises(UserError, match=f"'a' and 'b' both change {both}, and a run may make both"):
        ablation.screen(changes, ())


def test_a_screen_finds_what_was_planted() -> None:
    """Two effects in noise of 0.001 are found, at any seed but few; 17 without effect stay within the noise."""
    names = [f"c{n}" for n in range(19)]
    changes = [ablation.read_arm(f"{name}: {flags}", ()) for name, flags in zip(names, CHANGES, strict=False)]
    _, made = ablation.screen(changes, ())
    wrong = 0
    for seed in range(200):
        rng = random.Random(seed)
        runs = [
            {
                ablation.OVERALL: 1.1 - 0.02 * row[3] + 0.01 * row[7] + rng.gauss(0, 0.001),
                ablation.TOKENS: 1e6 * (1.25 if row[3] else 1),
            }
            for row in made
        ]
        found = ablation.screened(changes, made, runs)
        effects = found["effects"]
        assert list(effects)[0] == "c3" and effects["c3"]["verdict"] == "pays" and effects["c7"]["verdict"] == "costs"
        assert effects["c3"]["tokens"] == pytest.approx(0.25) and effects["c7"]["tokens"] == pytest.approx(0)
        assert effects["c3"]["effect"] == pytest.approx(-0.02, abs=0.003) and found["limit"] < 0.005
        wrong += sum(row["verdict"] != "within the noise" for name, row in effects.items() if name not in ("c3", "c7"))
    assert wrong < 0.05 * 200 * 17
    table = ablation.screen_table(found, 20, "2 min a run")
    assert "2 min a run, 20 runs, noise up to 0.00" in table and "tokens +25.0%   pays\n" in table


@pytest.mark.slow
def test_a_screen_runs_its_design(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--screen", "--arm", "rate: --lr 1e-2", "--arm", "heads: --set mtp_heads=2", "--json", "found.json", "--"]
    assert ablation.main([*flags, *COMMON.split(), "--steps", "12", "--lr", "1e-6"]) == 0
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    runs = list(found["runs"].values())
    assert len(runs) == 4 and runs[-1]["flags"][-2:] == ["--lr", "1e-6"]
    with_rate = [run[ablation.OVERALL] for run in runs if "1e-2" in run["flags"]]
    without = [run[ablation.OVERALL] for run in runs if "1e-2" not in run["flags"]]
    effect = found["effects"]["rate"]["effect"]
    assert effect == pytest.approx(sum(with_rate) / 2 - sum(without) / 2) and effect < -0.1
    assert "4 runs, noise up to" in capsys.readouterr().out
