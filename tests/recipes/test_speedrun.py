"""recipes/speedrun.sh: its stages in order, none of them twice, whatever ends it; and the real chain, end to end.

Most tests put a stand-in for Python in its place, which writes what a stage writes and can be told to hang or to fail:
they are about the script. The real chain, with every command as it is, is killed in each of its stages.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyforge import checkpoint
from tinyforge.data.world import documents
from tinyforge.shards import open_shards

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "speedrun.sh"
STAGES = "books web instructions corpus shards pretrain sft evaluate-base evaluate-sft chat report".split()

QUESTIONS = json.dumps(
    {
        "question": {
            "stem": "What barks?",
            "choices": [{"text": "a dog", "label": "A"}, {"text": "a cat", "label": "B"}],
        },
        "answerKey": "A",
    }
)

# What `python ...` does in a stage: it notes the call, does what FAULTS/stage says (once), and writes the result.
STAND_IN = r"""#!/usr/bin/env bash
[[ $1 == - ]] && exec "$REAL_PYTHON" "$@"
for ((i = 1; i < $#; i++)); do [[ ${!i} == --out || ${!i} == --json ]] && next=$((i + 1)) && to=${!next}; done
case " $* " in
*gutenberg*) stage=books result=$to/source.json ;;
*data.local* | *fineweb*) stage=web result=$to/source.json ;;
*data.alpaca*) stage=instructions result=$to/source.json ;;
*data.corpus*) stage=corpus result=$to/corpus.json ;;
*data.shards*) stage=shards result=$to/manifest.json ;;
*pretrain.py*) stage=pretrain result=$to/step-1/weights ;;
*sft.py*) stage=sft result=$to/step-1/weights ;;
*grpo.py*) stage=grpo result=$to/step-1/weights ;;
*dpo.py*) stage=dpo result=$to/step-1/weights ;;
*evaluate.py*) result=$to stage=$(basename "$result" .json) ;;
*chat*) stage=chat result=/dev/null ;;
*board*) stage=report result=/dev/null ;;
esac
make() { mkdir -p "$(dirname "$result")" && echo "$stage" >"$result"; }
fault=$(cat "faults/$stage" 2>/dev/null)
rm -f "faults/$stage"
[[ $fault == hang && $stage == pretrain ]] && make
echo "$stage $*" >>calls
case $fault in
hang) sleep 60 ;;
save) trap 'echo the last words; make; exit 130' INT; echo >waiting; for i in {1..600}; do sleep 0.1; done ;;
"make and "*) make; exit "${fault##* }" ;;
[0-9]*) exit "$fault" ;;
esac
make
echo "$stage: done"
"""


class Run:
    """A folder to work in, with the stand-in and a file for each flag that expects one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "a run"
        (folder / "faults").mkdir()
        (folder / "python").write_text(STAND_IN, encoding="utf-8")
        (folder / "python").chmod(0o755)
        for name in ("book.txt", "web.jsonl", "alpaca.json"):
            (folder / name).write_text("x", encoding="utf-8")
        self.files = ["--books", "book.txt", "--web", "web.jsonl", "--instructions", "alpaca.json"]
        self.env = os.environ | {"PYTHON": "./python", "REAL_PYTHON": sys.executable}

    def start(self, *flags: str) -> subprocess.Popen[str]:
        command = ["bash", str(SCRIPT), "--config", "small", "--backend", "numpy", "--out", self.out.name, *flags]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.env,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self, *flags: str, status: int = 0) -> tuple[str, str]:
        process = self.start(*flags)
        out, err = process.communicate(timeout=120)
        assert process.returncode == status, out + err
        return out, err

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def stages(self) -> list[str]:
        return [call.split()[0] for call in self.calls()]

    def fault(self, stage: str, what: str) -> None:
        (self.folder / "faults" / stage).write_text(what, encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def wait_for(found: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)


def kill(process: subprocess.Popen[str], number: signal.Signals = signal.SIGKILL) -> tuple[str, str]:
    """Send a signal to the script and all that it has started, as a terminal does."""
    os.killpg(process.pid, number)
    return process.communicate(timeout=60)


def test_the_stages_in_order_and_a_second_run_asks_only(run: Run) -> None:
    out, _ = run.finish(*run.files)
    assert run.stages() == STAGES
    for stage in STAGES:
        assert f"\n=== {stage}\n./python " in out and f"=== {stage}: complete after 0 min " in out
        assert f"{stage}: done" in (run.out / "logs" / f"{stage}.log").read_text(encoding="utf-8")
    assert "./python -m tinyforge.chat --checkpoint 'a run/sft'" in out
    out, _ = run.finish(*run.files)
    assert run.stages() == [*STAGES, "chat", "report"]
    assert all(f"=== {stage}: complete, skipped; a run/" in out for stage in STAGES[:-2])


ONE_OF_EACH = ("corpus", "pretrain", "chat")  # a stage that begins anew, one that resumes, and the last


@pytest.mark.parametrize("killed", [s if s in ONE_OF_EACH else pytest.param(s, marks=pytest.mark.slow) for s in STAGES])
def test_a_killed_stage_is_run_again_and_no_earlier_one(run: Run, killed: str) -> None:
    run.fault(killed, "hang")
    process = run.start(*run.files)
    wait_for(lambda: killed in run.stages(), process)
    kill(process)
    run.finish(*run.files)
    at = STAGES.index(killed)
    assert run.stages() == [*STAGES[: at + 1], *STAGES[min(at, STAGES.index("chat")) :]]  # which leaves nothing behind
    resumed = [call.split()[0] for call in run.calls() if "--resume" in call]
    assert resumed == (["pretrain"] if killed == "pretrain" else [])  # the only one that had saved something


def test_ctrl_c_lets_the_stage_save_and_says_how_to_go_on(run: Run) -> None:
    run.fault("sft", "save")
    process = run.start(*run.files)
    wait_for((run.folder / "waiting").exists, process)
    out, err = kill(process, signal.SIGINT)
    assert process.returncode == 130
    assert "the last words" in out and "the last words" in (run.out / "logs" / "sft.log").read_text(encoding="utf-8")
    again = f"PYTHON=./python {SCRIPT} --config small --backend numpy --out 'a run' " + " ".join(run.files)
    assert err == f"error: stopped in stage sft; continue with: {again}\n"
    run.finish(*run.files)
    assert run.stages() == [*STAGES[:7], *STAGES[6:]] and "--resume" in run.calls()[7]


@pytest.mark.parametrize("stage", ["books", "sft"])
def test_a_stage_that_fails_is_named(run: Run, stage: str) -> None:
    run.fault(stage, "3")
    _, err = run.finish(*run.files, status=3)
    assert err.startswith(f"error: stage {stage} failed with status 3, log: a run/logs/{stage}.log; fix the error")
    assert err.count("\n") == 1 and "continue with: PYTHON=./python" in err
    assert run.stages()[-1] == stage
    run.finish(*run.files)
    at = STAGES.index(stage)
    assert run.stages() == [*STAGES[: at + 1], *STAGES[at:]]


def test_files_left_out_are_no_failure_and_a_crash_is_one(run: Run) -> None:
    run.fault("books", "make and 1")
    out, _ = run.finish(*run.files)
    assert "some files were left out" in out
    run.fault("web", "1")
    shutil.rmtree(run.out / ".stages")
    assert "stage web failed with status 1" in run.finish(*run.files, status=1)[1]
    run.fault("corpus", "make and 1")
    assert "stage corpus failed with status 1" in run.finish(*run.files, status=1)[1]


def test_a_lost_result_is_made_again_with_all_that_follows(run: Run) -> None:
    run.finish(*run.files)
    shutil.rmtree(run.out / "corpus")
    run.fault("shards", "3")
    run.finish(*run.files, status=3)
    run.finish(*run.files)
    assert run.stages() == [*STAGES, "corpus", "shards", *STAGES[4:]]
    assert not any("--resume" in call for call in run.calls())


def test_a_lost_base_is_trained_again_and_so_is_its_chat(run: Run) -> None:
    run.finish(*run.files)
    shutil.rmtree(run.out / "pretrain")
    (run.out / "sft" / "step-9").mkdir()
    run.fault("pretrain", "hang")  # when it has saved something
    process = run.start(*run.files)
    wait_for(lambda: run.stages().count("pretrain") == 2, process)
    kill(process)
    out, _ = run.finish(*run.files)
    assert run.stages() == [*STAGES, "pretrain", *STAGES[5:]]
    assert [call.split()[0] for call in run.calls() if "--resume" in call] == ["pretrain"]
    assert "a run/sft is stale and made again; the old one is removed" in out and "a run/pretrain is stale" not in out
    assert [path.name for path in (run.out / "sft").iterdir()] == ["step-1"]


def test_training_that_was_cut_short_starts_anew_on_other_shards(run: Run) -> None:
    run.fault("pretrain", "hang")
    process = run.start(*run.files)
    wait_for(lambda: "pretrain" in run.stages(), process)
    kill(process)
    shutil.rmtree(run.out / "shards")
    out, _ = run.finish(*run.files)
    assert run.stages() == [*STAGES[:6], *STAGES[4:]]
    assert "a run/pretrain is stale and made again" in out and not any("--resume" in call for call in run.calls())


def test_alignment_and_benchmarks_where_their_files_are_given(run: Run) -> None:
    """Each stage goes on from the one before it, and the last is asked; what is added later is made, and no more."""
    (run.folder / "pairs.json").touch()
    (run.folder / "ARC-Easy-Test.jsonl").write_text(QUESTIONS, encoding="utf-8")
    flags = [*run.files, "--preferences", "pairs.json", "--dpo-flags", "--steps 3"]
    run.finish(*flags)
    assert run.stages() == [*STAGES[:-2], "dpo", "evaluate-dpo", "chat", "report"]
    flags += ["--problems", "one-step", "--grpo-flags", "--num-generations 4"]
    run.fault("grpo", "make and 3")
    run.finish(*flags, status=3)
    out, _ = run.finish(*flags)
    made = run.calls()[13:]
    assert [call.split()[0] for call in made] == ["grpo", "grpo", "evaluate-grpo", "chat", "report"]
    assert "--resume" not in made[0] and made[1].endswith(" --num-generations 4 --backend numpy --resume")
    assert "--base a run/dpo --task one-step --out a run/grpo" in made[0]
    assert "--checkpoint a run/grpo" in made[2] and "--checkpoint a run/grpo --prompt" in made[3]
    assert made[4].endswith("-m tinyforge.board a run --export a run/report.html") and "a run/report.html;" in out
    benchmarks = ["--task-data", "ARC-Easy-Test.jsonl", "--tasks", "arc_easy", "--tasks-flags", "--any-version"]
    run.finish(*flags, *benchmarks)
    made = run.calls()[18:]
    assert [call.split()[0] for call in made] == ["tasks-base", "tasks-tuned", "chat", "report"]
    assert "--checkpoint a run/pretrain --tasks arc_easy --task-data ARC-Easy-Test.jsonl --json a run" in made[0]
    assert "--checkpoint a run/grpo --tasks" in made[1] and made[1].endswith("fp32 --any-version")
    assert run.finish(*flags, *benchmarks[:-2], status=2)[1].startswith("error: ARC-Easy-Test.jsonl: another version")


def test_other_flags_for_a_complete_stage_are_refused(run: Run) -> None:
    run.finish(*run.files)
    before = run.stages()
    _, err = run.finish(*run.files, "--sft-flags", "--steps 9", status=2)
    assert err.startswith("error: sft is complete, by '") and "--steps 9'; give the same flags, or another" in err
    assert run.stages() == before


def test_what_each_flag_changes(run: Run) -> None:
    more = {"--corpus-flags": "--val-share 0.2", "--pretrain-flags": "--steps 5", "--sft-flags": "--lr 1"}
    named = {"--books": "web.jsonl", "--web-licence": "CC BY 4.0", "--vocab-size": "300"}
    run.finish(*run.files, *(word for pair in (named | more).items() for word in pair))
    books, web, instructions, corpus, shards, pretrain, sft, *_ = run.calls()
    assert books.endswith("book.txt web.jsonl") and web.endswith("--name web --licence CC BY 4.0 web.jsonl")
    assert instructions.endswith(" alpaca.json") and corpus.endswith("--val-share 0.05 --val-share 0.2")
    assert shards.endswith("--vocab-size 300") and pretrain.endswith("fp32 --card --steps 5 --backend numpy")
    assert sft.endswith("--precision fp32 --card --lr 1 --backend numpy")


@pytest.mark.parametrize(
    ("config", "of_pretrain", "of_sft"),
    [
        ("small", "--steps 5", ""),
        ("small", "", "--lr 1 --minutes=20"),
        ("base", "--seed 1 --minutes 0.5", ""),
        ("base", "", "--steps=5 --lr 1"),
    ],
)
def test_an_added_end_of_training_takes_the_place_of_the_configs(
    run: Run, config: str, of_pretrain: str, of_sft: str
) -> None:
    more = ["--pretrain-flags", of_pretrain, "--sft-flags", of_sft]
    run.finish(*run.files, "--config", config, "--precision", "fp32", *more)
    pretrain, sft = run.calls()[5:7]
    of_config = "--minutes" if config == "small" else "--steps"
    for call, added in ((pretrain, of_pretrain), (sft, of_sft)):
        ends = re.findall("--(?:steps|minutes)", added) or [of_config]
        assert re.findall("--(?:steps|minutes)", call) == ends and "--card " + f"{added} --backend".lstrip() in call
        assert all(f" {flag} " in call for flag in ("--batch-size", "--eval-every", "--save-every"))


def test_what_is_not_named_is_fetched(run: Run) -> None:
    run.finish("--data-only")
    assert run.stages() == ["books", "instructions", "corpus", "shards"]
    assert "--numbers 11 84 1342 1661" in run.calls()[0] and "--out a run/sources/instructions" in run.calls()[1]
    assert not any(name in call for call in run.calls() for name in ("book.txt", "alpaca.json"))
    run.finish("--config", "base", "--data-only", "--out", "b", "--books", "none")
    assert run.stages()[4:] == ["web", "instructions", "corpus", "shards"]
    assert "-m data.fineweb_edu --out b/sources/web --bytes " in run.calls()[4]


def test_shards_that_are_there_begin_the_chain(run: Run) -> None:
    out, _ = run.finish(*run.files, "--data-only")
    assert run.stages() == STAGES[:5] and "--shards 'a run/shards' --instructions" in out.splitlines()[-1]
    run.out = run.folder / "b"
    run.finish("--shards", "a run/shards", "--instructions", "alpaca.json")
    assert run.stages()[5:] == ["instructions", *STAGES[5:]]
    assert "--data a run/shards --out b/pretrain" in run.calls()[6]


@pytest.mark.parametrize("out", ["a run", pytest.param("runs/speedrun-small", marks=pytest.mark.slow)])  # the default
def test_the_commands_that_data_only_prints(run: Run, out: str) -> None:
    def execute(command: str, folder: Path) -> list[str]:
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=run.env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    named = [] if out.startswith("runs") else ["--out", out]
    flags = ["--config", "small", *named, "--data-only", *run.files, "--pretrain-flags", "--steps 5"]
    *_, title, here, other, there = execute(shlex.join(["bash", str(SCRIPT), *flags]), run.folder)
    assert title.endswith("To train on them here:") and other.startswith("or on another machine")
    execute(here, run.folder)
    assert run.stages() == STAGES and "--card --steps 5" in run.calls()[5]

    machine = run.folder / "another"
    for made in (f"{out}/shards", f"{out}/sources/instructions"):
        shutil.copytree(run.folder / made, machine / made)
    (machine / out / "sources/instructions/alpaca.json").touch()
    shutil.copy(run.folder / "python", machine)
    execute(there.replace("recipes/speedrun.sh", shlex.quote(str(SCRIPT))), machine)
    calls = (machine / "calls").read_text(encoding="utf-8").splitlines()
    assert [call.split()[0] for call in calls] == ["instructions", *STAGES[5:]] and "--card --steps 5" in calls[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--what"], "--what: no such flag; recipes/speedrun.sh --help lists them"),
        (["book.txt"], "book.txt: no such flag"),
        (["--books"], "--books: needs a value; see recipes/speedrun.sh --help"),
        (["--config", "huge"], "--config huge: expected small or base"),
        (["--books", "no.zip"], "no.zip: no such file or folder; check the path, relative to "),
        (["--web", "book.txt", "--web", "nothing/"], "nothing/: no such file or folder"),
        (["--instructions", "no.json"], "no.json: no such file or folder"),
        (["--preferences", "no.json"], "no.json: no such file or folder"),
        (["--problems", "two-step"], "--problems two-step: expected one-step, harder-sums, or a file that exists"),
        (["--task-data", "sets"], "sets: no such file or folder"),
        (["--task-data", "faults", "--tasks", "blimb"], "--tasks: unknown task 'blimb'"),
        (["--task-data", "faults"], "--task-data: no file for blimp; expected"),
        (["--books", "none"], "--books none and --web none leave no text; name some"),
        (["--shards", "faults"], "--shards faults: no manifest.json in it; name a folder of data.shards"),
        (["--shards", "made", "--books", "book.txt"], "--books: --shards names finished shards; drop one of the two"),
        (["--shards", "made", "--data-only"], "--data-only: --shards names finished shards; drop one of the two"),
        (["--out", "book.txt"], "--out book.txt: cannot be created; name another folder"),
        (["--backend", "abacus"], "unknown backend 'abacus'; known: auto, numpy, cupy, webgpu"),
        (["--precision", "bf16"], "precision 'bf16' is not available on backend numpy; use one of"),
    ],
)
def test_bad_input_is_one_line(run: Run, flags: list[str], message: str) -> None:
    (run.folder / "made").mkdir()
    (run.folder / "made" / "manifest.json").touch()
    _, err = run.finish(*flags, status=2)
    assert err.startswith(f"error: {message}") and err.count("\n") == 1
    assert run.calls() == []


def test_a_python_that_is_none_and_one_without_duckdb(run: Run) -> None:
    run.env["PYTHON"] = "python0"
    assert run.finish(status=2)[1] == "error: python0: no such Python; name one: PYTHON=python3.12\n"
    run.env |= {"PYTHON": sys.executable, "PYTHONPATH": str(without_duckdb(run.folder))}
    assert f"error: {sys.executable} lacks duckdb; {sys.executable} -m pip install" in run.finish(status=2)[1]


def test_one_run_at_a_time(run: Run) -> None:
    run.fault("books", "hang")
    first = run.start(*run.files)
    wait_for(lambda: run.stages() == ["books"], first)
    _, err = run.finish(*run.files, status=2)
    assert err == "error: another run is at work in a run; wait for it or stop it, or name another --out\n"
    first.kill()  # alone: what it started is still there
    first.wait()
    assert "another run is at work" in run.finish(*run.files, status=2)[1]
    kill(first)
    run.finish(*run.files)


def test_help_names_every_flag() -> None:
    shown = subprocess.run(["bash", str(SCRIPT), "--help"], capture_output=True, text=True, check=True).stdout
    text = SCRIPT.read_text(encoding="utf-8")
    flags = re.findall(r"^    (--[a-z-]+)\) ", text, re.MULTILINE)
    assert len(flags) > 10 and all(f"\n  {flag} " in shown for flag in flags)


def test_shellcheck_finds_nothing() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not on this machine")
    subprocess.run(["shellcheck", str(SCRIPT)], check=True)


# --- the real chain --------------------------------------------------------------------------------------------------


def without_duckdb(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes a Python one that has no DuckDB."""
    path = folder / "without"
    path.mkdir()
    (path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *rest: None if name == 'duckdb' else find(name, *rest)\n",
        encoding="utf-8",
    )
    return path


def kill_in_each(run: Run, stages: list[str], flags: list[str], seed: int) -> str:
    """Kill the run at a random moment of each stage, then let it end; what the last run printed."""
    moments = random.Random(seed)
    for stage in stages:
        process = run.start(*flags)
        wait_for((run.out / "logs" / f"{stage}.log").exists, process)
        time.sleep(moments.uniform(0.0, 0.8))
        kill(process)
    out, _ = run.finish(*flags)
    logs = {s: (run.out / "logs" / f"{s}.log").read_text(encoding="utf-8") for s in set(stages) - {"chat", "report"}}
    ends = {stage: log.count(f"=== {stage}: complete after") for stage, log in logs.items()}
    # A stage that is killed between this line and the mark that it is complete is run again.
    assert all(ends.values()) and sum(ends.values()) <= len(ends) + 1, logs
    return out


@pytest.fixture
def real(run: Run) -> Run:
    """Books, web pages and instructions, and the real Python."""
    run.env["PYTHON"] = sys.executable
    texts = list(documents("train", 1500))
    (run.folder / "books").mkdir()
    for number in range(3):
        body = "\n\n".join(texts[number * 400 : (number + 1) * 400])
        start, end = (f"*** {mark} OF THE PROJECT GUTENBERG EBOOK BOOK {number} ***" for mark in ("START", "END"))
        (run.folder / "books" / f"{number}.txt").write_text(f"{start}\n\n{body}\n\n{end}\n", encoding="utf-8")
    (run.folder / "books" / "broken.txt").write_text("no marker", encoding="utf-8")
    pages = [json.dumps({"text": "\n".join(texts[i : i + 10])}) for i in range(1200, 1500, 10)]
    (run.folder / "web.jsonl").write_text("\n".join(pages), encoding="utf-8")
    records = [{"instruction": f"Add {a}.", "input": str(b), "output": str(a + b)} for a in range(20) for b in range(9)]
    (run.folder / "alpaca.json").write_text(json.dumps(records), encoding="utf-8")
    pairs = [{"instruction": f"Add {a}.", "input": "1", "chosen": str(a + 1), "rejected": "no"} for a in range(20)]
    (run.folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    (run.folder / "ARC-Easy-Test.jsonl").write_text(QUESTIONS, encoding="utf-8")
    return run


DATA = [
    "--books",
    "books",
    "--web",
    "web.jsonl",
    "--web-licence",
    "ours",
    "--instructions",
    "alpaca.json",
    "--vocab-size",
    "300",
    "--corpus-flags",
    "--max-bytes 2048 --val-share 0.2",
    "--data-only",
]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["small", "base"])
def test_a_small_text_of_ones_own_becomes_shards(real: Run, config: str) -> None:
    """Sixty kilobytes: there is something held out, and as many ids as the text gives."""
    (real.folder / "mine.txt").write_text(" ".join(documents("train", 1600))[:60_000], encoding="utf-8")
    flags = ["--config", config, "--books", "none", "--web", "mine.txt", "--instructions", "alpaca.json", "--data-only"]
    with real.start(*flags) as process:
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    source = open_shards([real.out / "shards"], False).sources["web"]
    assert source.train.tokens > source.val.tokens > 0


@pytest.mark.slow
def test_from_text_to_a_chat_killed_in_every_stage(real: Run) -> None:
    out = kill_in_each(real, STAGES[:5], DATA, seed=3)
    assert "The data are ready: a run/shards and a run/sources/instructions/alpaca.json" in out
    made = open_shards([real.out / "shards"], False)
    assert {name: source.licence[:13] for name, source in made.sources.items()} == {
        "gutenberg": "public domain",
        "web": "ours",
    }
    shape = "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=96"
    flags = [
        "--shards",
        "a run/shards",
        "--instructions",
        "a run/sources/instructions/alpaca.json",
        "--pretrain-flags",
        f"{shape} --batch-size 4 --steps 150 --save-every 5",
        "--sft-flags",
        "--batch-size 4 --steps 150 --save-every 5",
        "--preferences",
        "pairs.json",
        "--dpo-flags",
        "--batch-size 4 --steps 40 --save-every 5",
        "--problems",
        "alpaca.json",
        "--grpo-flags",
        "--batch-size 2 --num-generations 2 --max-tokens 4 --steps 9 --save-every 2",
        "--task-data",
        "ARC-Easy-Test.jsonl",
        "--tasks",
        "arc_easy",
        "--tasks-flags",
        "--any-version",
    ]
    real.out = real.folder / "trained"
    real.env["PYTHONPATH"] = str(without_duckdb(real.folder))
    aligned = ["dpo", "evaluate-dpo", "grpo", "evaluate-grpo", "tasks-base", "tasks-tuned", "chat", "report"]
    out = kill_in_each(real, ["instructions", *STAGES[5:-2], *aligned], flags, seed=4)
    for name, steps in {"pretrain": 150, "sft": 150, "dpo": 40, "grpo": 9}.items():
        assert checkpoint.latest(real.out / name).name == f"step-{steps:08}"
    for name in ("evaluate-base", "evaluate-sft", "evaluate-dpo", "evaluate-grpo", "tasks-base", "tasks-tuned"):
        assert json.loads((real.out / f"{name}.json").read_text(encoding="utf-8"))
    assert "\n=== chat\n" in out and out.rstrip().endswith("--checkpoint trained/grpo --backend numpy")
    report = (real.out / "report.html").read_text(encoding="utf-8")
    for shown in (
        "pretrain: card",
        "grpo: card",
        "evaluate-dpo.log",
        "bits per byte of held-out text",
        "tasks-tuned.log",
        "val_rewards/accuracies",
        "### Instruction",
    ):
        assert shown in report
