"""Runs of several ranks from the command line: MPI's, and those of --gpus with NCCL on NumPy. Same bits, and faults."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyforge import checkpoint
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.parallel.tcp import lines_to_rank_0
from tinyforge.registry import find_model
from tinyforge.tokenizers import Tokenizer
from tinyforge.train import metrics

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "dim=32 layers=2 hidden=64 heads=2 kv_heads=1 context=64 vocab=257"
BESIDE = Path(sys.executable).with_name("mpirun")
MPIRUN = str(BESIDE) if BESIDE.exists() else shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py: pip install -e '.[cluster]'",
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks end with their parent by Linux's own means")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ADAMW_OPTIONS = "--cautious-decay --group-rates embeddings=3 heads=0.5 --batch-schedule 0:1 0.5:2"
MUON_OPTIONS = (
    "--normuon --newton-schulz polar-express --cautious-decay --momentum-schedule 0:0.8 0.5:0.95 "
    "--group-rates scalars=2 --rate-rule width-batch --batch-schedule 0:2 0.4:1 --mtp-schedule 0.2:1 0.9:0"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "text.txt").write_text("\n".join(documents("train", 150, 0)))
    Tokenizer([], ["<|endoftext|>"]).save(folder / "tokenizer.json")
    return folder


@pytest.fixture
def run(inputs: Path, tmp_path: Path) -> Run:
    """run("mpi", 2, "--zero 1", out="m"): a small pretraining to its end. How: "workers", "mpi" or "gpus"."""

    def start(how: str, ranks: int, flags: str = "", out: str = "run", **variables: str) -> Any:
        recipe = [sys.executable, str(ROOT / "recipes/pretrain.py")]
        if how == "mpi":
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            recipe = [str(MPIRUN), *root, "--oversubscribe", "-n", str(ranks), sys.executable]
            recipe += [str(ROOT / "tests/parallel/fake_nccl.py"), "pretrain", "--backend", "numpy"]
            variables["FAKE_GPUS"] = "0"
        elif how == "gpus":
            recipe = [sys.executable, str(ROOT / "tests/parallel/fake_nccl.py"), "pretrain", "--gpus", str(ranks)]
            variables.setdefault("FAKE_GPUS", str(ranks))
            variables["TMPDIR"] = str(tmp_path)  # of the files that stand for NCCL
        else:
            recipe += ["--backend", "numpy", "--workers", str(ranks)]
        words = f"--out {tmp_path / out} {flags}".split()
        if "--resume" not in words:
            words += [
                "--data",
                str(inputs / "text.txt"),
                "--tokenizer",
                str(inputs / "tokenizer.json"),
                "--set",
                *SHAPE.split(),
                *"--steps 12 --batch-size 8 --save-every 4 --eval-every 6".split(),
            ]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run([*recipe, *words], env=environ, capture_output=True, text=True, timeout=120)

    return start


def bytes_of(out: Path) -> str:
    """Of all tensors of the newest checkpoint, in however many files they lie."""
    found, digest = checkpoint.load(out), hashlib.sha256()
    for tensors in (found.weights, found.optimizer()):
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].tobytes())
    return digest.hexdigest()


def files_of(out: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.latest(out).glob("*.safetensors"))


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in metrics.read(out / "metrics.jsonl") if "loss" in row]


def ended_well(done: Any) -> None:
    assert done.returncode == 0, done.stderr[-2000:]


@needs_mpi
@pytest.mark.slow
def test_ranks_of_mpi_learn_what_two_workers_learn(run: Run, tmp_path: Path) -> None:
    ended_well(run("workers", 2, out="workers"))
    done = run("mpi", 2, "--zero 1", out="mpi")
    ended_well(done)
    assert losses(tmp_path / "mpi") == pytest.approx(losses(tmp_path / "workers"), abs=1e-6)
    assert done.stdout.count("plan: 12 steps") == 1 and done.stderr.count("12/12") >= 1  # rank 0 alone speaks
    assert checkpoint.load(tmp_path / "mpi").meta["ranks"] == 2


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("adamw", ""), ("muon", ""), ("adamw", ADAMW_OPTIONS), ("muon", MUON_OPTIONS)],
    ids=["adamw", "muon", "adamw options", "muon options"],
)
def test_with_shards_the_bits_do_not_depend_on_the_world(
    optimizer: str, options: str, run: Run, tmp_path: Path
) -> None:
    flags, zero = f"--reduction-shards 2 --optimizer {optimizer} {options}", 1 if optimizer == "adamw" else 0
    ended_well(run("workers", 1, flags, out="one"))
    of_mpi = run("mpi", 2, f"{flags} --zero {zero}", out="mpi")
    ended_well(of_mpi)
    assert of_mpi.stdout.count("learning rates: matrices ") == bool(options)
    ended_well(run("gpus", 2, flags, out="gpus"))
    expected = bytes_of(tmp_path / "one")
    assert bytes_of(tmp_path / "mpi") == expected and bytes_of(tmp_path / "gpus") == expected
    # Begun on two ranks, and from the middle on one.
    shutil.rmtree(tmp_path / "mpi/step-00000012")
    moved = run("workers", 1, "--resume", out="mpi")
    ended_well(moved)
    assert "resuming at step 8" in moved.stdout and bytes_of(tmp_path / "mpi") == expected


@needs_mpi
@pytest.mark.slow
def test_what_ranks_share_out_changes_no_bit(run: Run, tmp_path: Path) -> None:
    for zero in (0, 1, 2):
        ended_well(run("mpi", 2, f"--zero {zero}", out=f"zero-{zero}"))
    assert len({bytes_of(tmp_path / f"zero-{zero}") for zero in (0, 1, 2)}) == 1
    assert files_of(tmp_path / "zero-0") == ["model.safetensors", "optimizer.safetensors"]
    assert files_of(tmp_path / "zero-2") == [
        f"{what}-0000{number}-of-00002.safetensors" for what in ("model", "optimizer") for number in (1, 2)
    ]
    # With micro-batches each of them is summed over the ranks: other last bits.
    for zero in (1, 2):
        ended_well(run("mpi", 2, f"--zero {zero} --grad-accum 2", out=f"accum-{zero}"))
    assert losses(tmp_path / "accum-2") == pytest.approx(losses(tmp_path / "accum-1"), abs=1e-5)


@pytest.mark.slow
def test_windows_change_no_bit(run: Run, tmp_path: Path) -> None:
    """Of a run whole, shared out, and from its middle on."""
    ended_well(run("gpus", 2, out="plain", NCCL_WIN_ENABLE="0"))
    expected = bytes_of(tmp_path / "plain")
    for zero in (0, 2):
        ended_well(run("gpus", 2, f"--zero {zero}", out=f"zero-{zero}"))
        assert bytes_of(tmp_path / f"zero-{zero}") == expected
    shutil.rmtree(checkpoint.latest(tmp_path / "plain"))
    ended_well(run("gpus", 2, "--resume", out="plain"))
    assert bytes_of(tmp_path / "plain") == expected


@pytest.mark.slow
def test_captured_steps_change_no_bit(run: Run, tmp_path: Path) -> None:
    for zero in (0, 1):
        ended_well(run("gpus", 2, f"--zero {zero}", out=f"plain-{zero}"))
        ended_well(run("gpus", 2, f"--zero {zero} --cuda-graph", out=f"graph-{zero}"))
        assert bytes_of(tmp_path / f"graph-{zero}") == bytes_of(tmp_path / f"plain-{zero}")
        assert losses(tmp_path / f"graph-{zero}") == losses(tmp_path / f"plain-{zero}")


@needs_mpi
@pytest.mark.slow
def test_the_bits_of_shards_hold_with_zero_2(run: Run, tmp_path: Path) -> None:
    ended_well(run("workers", 1, "--reduction-shards 4 --grad-accum 2", out="one"))
    for ranks, zero in ((2, 2), (4, 2), (4, 0)):
        out = f"{ranks}-{zero}"
        done = run("mpi", ranks, f"--reduction-shards 4 --grad-accum 2 --zero {zero}", out=out)
        ended_well(done)
        assert bytes_of(tmp_path / out) == bytes_of(tmp_path / "one"), out
        assert ("--zero 2 keeps the gradients whole here" in done.stdout) == (zero == 2)
    for zero in (0, 2):  # one part of one batch a rank: the gradients are shared out
        done = run("mpi", 2, f"--reduction-shards 2 --zero {zero}", out=f"few-{zero}")
        ended_well(done)
        assert "keeps the gradients whole" not in done.stdout
    assert bytes_of(tmp_path / "few-0") == bytes_of(tmp_path / "few-2")


@needs_mpi
@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_in_any_world(run: Run, tmp_path: Path) -> None:
    """And is read like any other: by chat, export and fine-tuning."""
    ended_well(run("mpi", 2, "--zero 1 --keep 0", out="two"))
    expected, same = losses(tmp_path / "two"), bytes_of(tmp_path / "two")
    shutil.rmtree(tmp_path / "two/step-00000012")
    for number, (how, ranks, flags) in enumerate(
        (("mpi", 2, ""), ("workers", 1, "--zero 0"), ("workers", 2, ""), ("mpi", 4, ""), ("mpi", 4, "--zero 2"))
    ):
        out = f"moved-{number}"
        shutil.copytree(tmp_path / "two", tmp_path / out)
        moved = run(how, ranks, f"--resume {flags}", out=out)
        ended_well(moved)
        assert "resuming at step 8" in moved.stdout
        assert ("begun on 2 ranks, going on with" in moved.stdout) == (number in (1, 2, 3, 4))
        assert losses(tmp_path / out) == pytest.approx(expected, abs=1e-4)
        assert number or bytes_of(tmp_path / out) == same
        if how == "workers":
            assert files_of(tmp_path / out) == ["model.safetensors", "optimizer.safetensors"]
    assert len(files_of(tmp_path / "moved-4")) == 8

    records = [{"instruction": f"Say {n}", "input": "", "output": str(n)} for n in range(40)]
    (tmp_path / "records.json").write_text(json.dumps(records))
    run_here = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    step = str(tmp_path / "two")
    for words in (
        ["-m", "tinyforge.chat", "--checkpoint", step, "--prompt", "Robert", "--max-tokens", "4"],
        ["-m", "tinyforge.formats.convert", step, str(tmp_path / "hf")],
        [
            str(ROOT / "recipes/sft.py"),
            "--backend",
            "numpy",
            "--workers",
            "1",
            "--base",
            step,
            "--steps",
            "1",
            "--batch-size",
            "1",
            "--out",
            str(tmp_path / "sft"),
            "--data",
            str(tmp_path / "records.json"),
        ],
    ):
        done = subprocess.run([sys.executable, *words], env=run_here, cwd=ROOT, capture_output=True, text=True)
        ended_well(done)


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["shards", "manifest"])
def test_a_kill_between_the_shards_and_their_manifest(run: Run, tmp_path: Path, moment: str) -> None:
    """Rank 1 is killed when rank 0 alone has written, or rank 0 when all have, before hashes.json is there."""
    ended_well(run("mpi", 2, "--zero 1", out="whole"))
    done = run("mpi", 2, "--zero 1", KILL_IN_SAVE=f"{moment}:8")
    assert done.returncode != 0
    assert [path.name for path in checkpoint.steps(tmp_path / "run")] == ["step-00000004"]
    left = {path.name for path in (tmp_path / "run").glob(".partial-step-00000008/*")}
    assert "hashes.json" not in left
    if moment == "manifest":  # nobody was left to tidy up
        assert {"model-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"} <= left
    assert checkpoint.load(tmp_path / "run").meta["step"] == 4
    ended_well(run("mpi", 2, "--resume"))
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")
    assert not list((tmp_path / "run").glob(".partial*"))


@needs_mpi
@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank(run: Run, tmp_path: Path) -> None:
    done = run("mpi", 2, "--zero 1", KILL_IN_SAVE="full:8")
    assert done.returncode == 2
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"No space left on device (rank 1 on {socket.gethostname()}); the last good checkpoint" in said
    assert not list((tmp_path / "run").glob(".partial*")) and checkpoint.load(tmp_path / "run").meta["step"] == 4


@needs_mpi
@pytest.mark.slow
def test_dpo_on_ranks_learns_what_workers_learn(tmp_path: Path) -> None:
    """From the model that comes with the repository; the reference is that of rank 0."""
    pairs = [{"instruction": f"Say {n}", "input": "", "chosen": str(n), "rejected": str(n + 1)} for n in range(20)]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    recipe = [sys.executable, str(ROOT / "recipes/dpo.py"), "--backend", "numpy", "--cache", str(tmp_path / "cache")]
    fresh = [
        "--data",
        str(tmp_path / "pairs.json"),
        "--base",
        str(find_model("nanoeuler").bundled),
        *"--batch-size 4 --steps 4 --save-every 2 --eval-every 2 --keep 0".split(),
    ]
    mpirun = [str(MPIRUN), *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "-n", "2"]

    def tuned(out: str, *words: str) -> str:
        done = subprocess.run(
            [*words, "--out", str(tmp_path / out)], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        ended_well(done)
        return done.stdout

    tuned("workers", *recipe, "--workers", "2", *fresh)
    said = tuned("mpi", *mpirun, *recipe, "--zero", "2", *fresh)
    assert said.count("the reference's log-probabilities are those of") == 2  # of the training and the held-out pairs
    shutil.rmtree(tmp_path / "cache")
    assert "are those of" not in tuned("again", *mpirun, *recipe, *fresh)  # made by both ranks
    assert losses(tmp_path / "again") == losses(tmp_path / "mpi")
    assert losses(tmp_path / "mpi") == pytest.approx(losses(tmp_path / "workers"), abs=1e-6)
    shutil.rmtree(tmp_path / "mpi/step-00000004")
    assert "resuming at step 2" in tuned("mpi", *recipe, "--resume", "--workers", "1")
    assert losses(tmp_path / "mpi") == pytest.approx(losses(tmp_path / "workers"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "fault", "flags", "said"),
    [
        ("gpus", "1:6:kill", "", "rank 1 on {host} died"),
        ("gpus", "0:6:kill", "", "rank 0 on {host} was killed by SIGKILL"),
        ("gpus", "1:6:hang", "--timeout 3", "under way on rank 0 on {host} for 3 s: rank 1 on {host} hangs"),
        ("gpus", "1:6:raise", "", "rank 1 on {host}: ZeroDivisionError: of this rank"),
        ("gpus", "1:6:nan", "", "came from weight heads.weight, rank 1 on {host}; the last good checkpoint is"),
        pytest.param("mpi", "1:6:hang", "--timeout 3", "rank 1 on {host} has not answered for 3 s", marks=needs_mpi),
        pytest.param("mpi", "1:6:nan", "", "weight heads.weight, rank 1 on {host}", marks=needs_mpi),
        ("gpus", "1:6:nan", "--zero 2", "came from weight heads.weight, rank 1 on {host}"),
        ("gpus", "1:6:kill", "--cuda-graph", "rank 1 on {host} died"),
        (
            "gpus",
            "1:6:hang",
            "--cuda-graph --timeout 3",
            "under way on rank 0 on {host} for 3 s: rank 1 on {host} hangs",
        ),
        ("gpus", "1:6:raise", "--cuda-graph", "rank 1 on {host}: ZeroDivisionError: of this rank"),
        pytest.param("mpi", "1:6:kill", "", "rank 1", marks=needs_mpi),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_name(
    run: Run, tmp_path: Path, how: str, fault: str, flags: str, said: str
) -> None:
    began = time.monotonic()
    done = run(how, 2, flags, FAULT=fault)
    assert time.monotonic() - began < 60 and done.returncode != 0
    assert said.format(host=socket.gethostname()) in done.stderr
    if how == "gpus":
        assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
        lost = fault.endswith(("kill", "hang"))
        assert ("; the last checkpoint is good: continue with --resume" in done.stderr) == lost
    assert checkpoint.load(tmp_path / "run").meta["step"] == 4
    ended_well(run(how, 2, "--resume"))
    assert len(losses(tmp_path / "run")) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("1:2:kill", "rank 1 on {host} died (the kernel kills one when memory runs out)"),
        ("0:2:kill", "rank 0 on {host} was killed by SIGKILL"),
    ],
)
def test_a_rank_that_is_lost_before_the_first_checkpoint(run: Run, tmp_path: Path, fault: str, said: str) -> None:
    done = run("gpus", 2, FAULT=fault)
    said = said.format(host=socket.gethostname())
    assert f"error: {said}; no checkpoint had been saved yet: start again\n" in done.stderr
    assert done.returncode == 3 and "--resume" not in done.stderr
    ended_well(run("gpus", 2))


@pytest.mark.slow
def test_an_elastic_run_goes_on_with_the_ranks_that_are_left(run: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    done = run("gpus", 2, "--elastic --reduction-shards 2", FAULT="1:6:kill", FAULT_ONCE=out)
    ended_well(done)
    assert "rank 1 on" in done.stderr and "going on with 1 rank, on GPU 0" in done.stderr
    ended_well(run("workers", 1, "--reduction-shards 2", out="whole"))
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")


@pytest.mark.slow
def test_what_cannot_be_is_one_line(run: Run, tmp_path: Path) -> None:
    """Rank 0 says it, and nothing is left."""
    ended_well(run("gpus", 2, out="taken"))
    for flags, variables, message in (
        ("", {"FAKE_GPUS": "1"}, "--gpus is 2, this machine has 1; use at most that"),
        ("--encoding klingon", {}, "klingon"),
        ("--out {taken}", {}, "already holds a run; continue it with --resume"),
    ):
        done = run("gpus", 2, flags.format(taken=tmp_path / "taken"), **variables)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
        assert not (tmp_path / "run").exists()


@needs_mpi
@pytest.mark.slow
def test_ranks_of_mpi_without_a_gpu_refuse_gpus(run: Run, tmp_path: Path) -> None:
    for ranks in (1, 2):
        done = run("mpi", ranks, "--gpus 2")
        assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
        assert "error: --gpus is 2, and the backend is numpy; leave it out, and on a CPU use" in done.stderr
        assert not (tmp_path / "run").exists()


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "recipes/grpo",
        "recipes/evaluate --json found.json",
        "examples/storyteller/own_pairs --base small --data x --out y",
    ],
)
def test_a_recipe_that_runs_as_one_refuses_ranks(recipe: str, tmp_path: Path) -> None:
    """Else both would write the same file."""
    name, *flags = recipe.split()
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    words = [str(MPIRUN), *root, "--oversubscribe", "-n", "2", sys.executable, str(ROOT / f"{name}.py"), *flags]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert "error: the run has 2 ranks, and this recipe runs as one; drop mpirun or srun" in done.stderr
    assert not list(tmp_path.iterdir())


@needs_mpi
@pytest.mark.slow
def test_ranks_that_are_not_alike_are_refused(inputs: Path, tmp_path: Path) -> None:
    """Rank 0 says so in one line, no rank is left, and nothing is written."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    recipe = [
        sys.executable,
        str(ROOT / "tests/parallel/fake_nccl.py"),
        "pretrain",
        "--data",
        "text.txt",
        "--tokenizer",
        "tokenizer.json",
        "--set",
        *SHAPE.split(),
        "--steps",
        "2",
        "--batch-size",
        "4",
    ]
    here, there = (tmp_path / name for name in ("here", "there"))
    for place in (here, there):
        shutil.copytree(inputs, place)

    def said(more: str = "", change: str = "", ranks: int = 1, place: Path = here, **variables: str) -> str:
        """Of rank 0 in `here` with the flags `more`, and so many others in `place` with `change` too."""
        flags = more.split()
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FAKE_GPUS": "0"} | variables
        words = [
            str(MPIRUN),
            *root,
            "--oversubscribe",
            "-n",
            "1",
            "--wdir",
            str(here),
            *recipe,
            *flags,
            ":",
            "-n",
            str(ranks),
            "--wdir",
            str(place),
            *recipe,
            *flags,
            *change.split(),
        ]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert not list(tmp_path.glob("*/runs/pretrain/*")) and not running_in(tmp_path)
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return line

    cpu = "--backend numpy"
    assert "differs from rank 0 in flag --lr: 0.5, not 0.002" in said(cpu, "--lr 0.5")
    assert "--batch-size is 4, the run has 3 ranks; use a multiple" in said(cpu, ranks=2)
    assert "rank 1 on" in (line := said(cpu, ODD="code")) and "differs from rank 0 in code: " in line
    assert "differs from rank 0 in kind of processor or GPU: NVIDIA B, not NVIDIA A" in said(FAKE_GPUS="2", ODD="kind")
    line = said(FAKE_GPUS="1")
    assert "more ranks than GPUs: this is number 2 of its machine, which has 1; start fewer ranks" in line
    # Their own copies of the files, and folders that are not one and the same.
    line = said(f"{cpu} --zero 1", place=there)
    assert f"does not see {here / 'runs/pretrain'} of rank 0" in line and "or drop --zero" in line
    (there / "text.txt").write_text((here / "text.txt").read_text().replace("e", "a"))
    assert "differs from rank 0 in data: " in said(cpu, place=there)
    for place, merge in ((here, (104, 105)), (there, (104, 101))):
        Tokenizer([merge], ["<|endoftext|>"]).save(place / "tokenizer.json")
    assert "differs from rank 0 in tokenizer: " in said(f"{cpu} --set vocab=258", place=there)


def running_in(folder: Path) -> list[str]:
    """The processes that work there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(process / "cwd")).is_relative_to(folder):
                found.append(process.name)
    return found


@pytest.mark.slow
def test_a_port_in_use_and_a_rank_0_that_is_not_there(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TINYFORGE_KEY": "k",
        }
        done = run("workers", 1, **variables)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert f"rank 0 cannot listen at 127.0.0.1:{port}: Address already in use; set MASTER_PORT" in done.stderr
    del variables["TINYFORGE_KEY"]
    done = run("alone", 1, **variables)
    assert done.returncode == 2 and "TINYFORGE_KEY is not; set it to a secret, the same for all ranks" in done.stderr
    with pytest.raises(UserError, match=f"rank 1: nobody answers at 127.0.0.1:{port}.*; check MASTER_ADDR and"):
        lines_to_rank_0(1, ("127.0.0.1", port), b"k", seconds=0.3)
