"""The plain loop, and the U-Net on digits in small: it learns, samples, resumes, and commands for text refuse it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.diffusion import benchmark, digits, sample, train
from examples.diffusion.unet import SPEC, Config, UNet
from tests.backends.as_graphs import AsGraphs
from tinyforge import chat, checkpoint, get_backend, inspect
from tinyforge.errors import UserError
from tinyforge.formats import load
from tinyforge.gradcheck import TOLERANCE, examine
from tinyforge.registry import models, register
from tinyforge.serve import __main__ as server
from tinyforge.train import metrics
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.plan import plan_step
from tinyforge.zoo import command

ROOT = Path(__file__).parents[2]
models().pop(SPEC.name, None)  # the import has registered it, and other tests look at all models there are


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(SPEC)
    yield
    del models()[SPEC.name]


def test_the_plain_loop_is_15_lines_and_tells_the_moons_apart() -> None:
    file = ROOT / "examples/moons.py"
    code = [line for line in file.read_text(encoding="utf-8").split('"""')[2].splitlines() if line.strip()]
    assert len(code) <= 15
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    assert float(done.stdout.split("%")[0]) >= 97
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(code[2:]) in readme.replace("\n\n", "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of idx files: a bright half at the left or at the right, 8 x 8 pixels."""
    folder, rng = tmp_path_factory.mktemp("digits"), np.random.default_rng(0)
    for stem, count in (("train", 64), ("t10k", 20)):
        labels = rng.integers(0, 2, count).astype(np.uint8)
        images = rng.integers(0, 40, (count, 8, 8)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, 4 * label : 4 * label + 4] += 200
        head = bytes([0, 0, 8, 3]) + np.array([count, 8, 8], ">u4").tobytes()
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = bytes([0, 0, 8, 1]) + np.array([count], ">u4").tobytes()
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    return folder


def flags(data: Path, out: Path, steps: int) -> list[str]:
    given = ["--data", str(data), "--out", str(out), "--steps", str(steps), "--width", "8", "--batch-size", "16"]
    return [*given, "--eval-every", "20", "--save-every", "20", "--backend", "numpy", "--workers", "1", "--lr", "0.01"]


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train.main(flags(data, out, 60)) == 0
    return out


def test_it_learns_and_its_figures_have_its_names(run: Path) -> None:
    rows = metrics.read(run / "metrics.jsonl")
    held_out = [row["val_mse"] for row in rows if "val_mse" in row]
    assert held_out[-1] < 0.5 * held_out[0]
    last = [row for row in rows if "lr" in row][-1]
    assert last["images"] == 60 * 16 and last["mse"] == last["loss"] and "images_per_second" in last
    assert not any("tokens" in key or "nll" in key for row in rows for key in row)
    assert (run / "loss.png").is_file() and (run / "samples.png").is_file()
    assert not (checkpoint.latest(run) / "tokenizer.json").exists()


def test_samples_are_bright_where_their_label_says(run: Path, tmp_path: Path) -> None:
    model = load(run, get_backend("numpy", workers=1), frozen=True).model
    labels = np.arange(10) % 2
    images = digits.sampled(model, labels, seed=3, steps=20)[..., 0].astype(float)
    sides = images.reshape(10, 8, 2, 4).mean(axis=(1, 3))
    assert np.array_equal(sides.argmax(axis=1), labels)
    assert (
        sample.main(
            [str(run), "--count", "1", "--euler-steps", "2", "--backend", "numpy", "--out", str(tmp_path / "s.png")]
        )
        == 0
    )
    assert (tmp_path / "s.png").is_file()


def test_a_resumed_run_has_the_same_weights(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    last = checkpoint.steps(copy)[-1]
    before = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    assert train.main(["--resume", "--out", str(copy)]) == 0
    assert (last / "model.safetensors").read_bytes() == before


def test_commands_for_text_say_what_the_model_is_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="UNet reads no text: it learns images from noise; use it by python examples"):
        inspect.main(["hello", "--checkpoint", str(run)])
    with pytest.raises(UserError, match="UNet learns images from noise and cannot continue text; use it by"):
        load(run, get_backend("numpy", workers=1)).generate("Once upon a time")
    for command_of_text in (chat.main, server.main):
        with pytest.raises(UserError, match="UNet (reads no|learns images from noise and cannot continue) text"):
            command_of_text(["--checkpoint", str(run), "--backend", "numpy"])
    with pytest.raises(UserError, match="--seq-len: UNet reads no sequences of tokens; leave it out"):
        command.main(["show", SPEC.name, "--seq-len", "10"])
    assert command.main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"architecture +UNet: .*", shown) and "use            python examples/diffusion/sample.py" in shown


def test_its_gradients_are_right_and_its_memory_is_planned() -> None:
    ledger = examine(UNet, get_backend("numpy", "fp64", workers=1), directions=1)
    assert not ledger.refused and max(row.error for row in ledger.rows) <= TOLERANCE
    small, large = (plan_step(SPEC, Config(), "bf16", rows, 1) for rows in (8, 64))
    assert large.weights == small.weights and 7 < large.saved / small.saved < 9


def test_the_path_and_its_velocity() -> None:
    """x_t at t = 0 is the image, at t = 1 the noise, and the target is their difference."""
    images = np.random.default_rng(0).integers(0, 256, (2, 1, 4, 4)).astype(np.uint8)
    noise = np.random.default_rng(1).normal(size=(2, 4, 4, 1))
    x, times, labels, target = digits.noised(images, np.array([1, 0]), np.array([0.0, 1.0]), noise, 6).given
    assert np.allclose(x[0], digits.as_pixels(images)[0]) and np.allclose(x[1], noise[1])
    assert np.allclose(target, noise - digits.as_pixels(images)) and times.shape == (2, 6) and labels.dtype == np.int32


def test_held_out_losses_take_no_more_rows_at_once_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = UNet(Config(image=8, width=8), get_backend("numpy", "fp64", workers=1))
    model.initialise(0)
    images, noise = np.zeros((7, 1, 8, 8), np.uint8), np.random.default_rng(0).normal(size=(7, 8, 8, 1))
    batch = digits.noised(images, np.arange(7), np.linspace(0, 1, 7), noise, 32)
    parallel, seen, forward = DataParallel(model, model.backend), [], model.forward
    monkeypatch.setattr(model, "forward", lambda *given, **how: (seen.append(len(given[0])), forward(*given, **how))[1])
    whole = parallel.losses(batch)
    parallel.rows = 3
    assert np.allclose(parallel.losses(batch), whole, rtol=1e-12) and seen == [7, 3, 3, 1]
    assert parallel.losses(batch[:0]).shape == (0,)


def test_captured_steps_are_plain_ones() -> None:
    """What a CUDA graph would repeat, here a function that is called again: floats and integers of a batch move."""
    losses = []
    for captured in (False, True):
        backend = get_backend("numpy", workers=1)
        backend.graphs = AsGraphs  # type: ignore[method-assign]
        config = Config(image=8, classes=3, width=8, features=6)
        made = benchmark.ours(config, backend, benchmark.batches_of(config, 4), captured)
        losses.append([float(made.step(i)) for i in range(6)])  # type: ignore[arg-type]
    assert losses[0] == losses[1] and len(set(losses[0])) == 6
