"""The plan of a step's memory next to what the device says; and a device that has not enough."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import checkpoint
from tinyforge.adapters import Adapted, Adapters
from tinyforge.backends import get_backend
from tinyforge.models.moe import PRESETS as MOE
from tinyforge.models.moe import MoE
from tinyforge.models.nanoeuler import PRESETS, NanoEuler
from tinyforge.op import Recompute, Stash
from tinyforge.ops.attention import Documents
from tinyforge.optim import AdamW
from tinyforge.registry import find_model
from tinyforge.rng import Stream
from tinyforge.train.distil import Teachers
from tinyforge.train.plan import plan_step

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("name", "precision", "rows", "recompute", "adapters", "restart", "taught"),
    [
        ("nanoeuler", "bf16", 8, "", None, None, 0),
        ("nanoeuler", "fp32", 4, "", None, None, 0),
        ("nanoeuler", "fp8", 8, "", None, None, 0),
        ("nanoeuler", "fp8", 8, "blocks", None, None, 0),
        ("nanoeuler", "bf16", 8, "", None, True, 0),
        ("nanoeuler", "bf16", 8, "", None, True, 1),
        ("nanoeuler", "bf16", 8, "", None, True, 2),
        ("nanoeuler", "bf16", 8, "", Adapters(8, 16.0, 0.05), None, 0),
        ("nanoeuler", "fp32", 4, "", Adapters(8, 16.0, 0.0, ("qkv", "down")), None, 0),
        ("nanoeuler", "bf16", 8, "", Adapters(8, 16.0, 0.05, weights="nf4"), None, 0),
        ("nanoeuler", "bf16", 2, "blocks", Adapters(8, 16.0, 0.0, weights="nf4"), None, 0),
        ("nanoeuler", "bf16", 8, "", Adapters(8, 16.0, 0.05, weights="nf4-double"), None, 0),
        ("moe", "bf16", 8, "", None, None, 0),
        ("nanoeuler", "bf16", 8, "blocks", None, None, 0),
        ("moe", "bf16", 8, "blocks", None, None, 0),
    ],
)
def test_the_plan_is_within_five_percent_of_the_measured_peak(
    name: str,
    precision: str,
    rows: int,
    recompute: Recompute,
    adapters: Adapters | None,
    restart: bool | None,
    taught: int,
) -> None:
    import cupy

    from tinyforge.backends.cupy_backend import PeakMemory

    kind, config = {"nanoeuler": (NanoEuler, PRESETS["base"]), "moe": (MoE, MOE["base"])}[name]
    backend = get_backend("cupy", precision)
    teachers = Teachers(((find_model(name), config),) * taught, share=0.5) if taught else None
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.used_bytes()
    rng = np.random.default_rng(0)
    with PeakMemory() as peak:
        make = partial(kind, config, backend, recompute=recompute)
        model: Any = Adapted(make, adapters) if adapters else make()
        model = teachers.wrap_with_teachers(model, backend) if teachers else model
        model.buffer.initialise(Stream(0, "init"))
        optimizer = AdamW(model.buffer, backend)
        ids = rng.integers(0, config.vocab, (rows, 512), dtype=np.int32)
        targets = rng.integers(0, config.vocab, (rows, 512, config.mtp_heads), dtype=np.int32)
        for _ in range(2):
            stash, packed = Stash(Stream(0, "dropout")), {}
            if restart is not None:
                packed["documents"] = Documents(np.zeros(ids.shape, np.int32), restart).on(backend)
            result = model.forward(backend.asarray(ids), backend.asarray(targets), stash=stash, **packed)
            packed.clear()  # only the stash holds them, as in a run
            dnll = backend.asarray(np.full(config.mtp_heads, 1e-4), backend.master_dtype)
            dterms = backend.asarray(np.full(len(config.term_weights), 1e-2), backend.master_dtype)
            model.backward((dnll, dterms) if isinstance(result, tuple) else dnll, stash)
            _, factor = optimizer.clip(1.0)
            optimizer.step(1e-3, factor)
    planned = plan_step(
        find_model(name), config, precision, rows, 512, recompute, adapters, restart, teachers=teachers
    ).peak
    assert planned == pytest.approx(peak.bytes - before, rel=0.05)


def test_out_of_memory_in_a_run_leaves_its_checkpoint(tmp_path: Path) -> None:
    """CuPy is kept below what the step needs, as a neighbour on the device would do: its own error, from its pool."""
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 4000)
    command = [sys.executable, str(ROOT / "recipes" / "pretrain.py"), "--backend", "cupy", "--out", "run"]
    config = ["dim=64", "heads=2", "kv_heads=1", "layers=2", "hidden=96", "vocab=270", "context=64"]
    first = ["--data", "text.txt", "--set", *config, "--steps", "6", "--save-every", "3", "--batch-size", "64"]
    subprocess.run([*command, *first], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    run = tmp_path / "run"
    for file in (run / "step-00000006").iterdir():
        file.unlink()
    (run / "step-00000006").rmdir()
    environment = {**os.environ, "CUPY_GPU_MEMORY_LIMIT": str(4 << 20)}
    done = subprocess.run([*command, "--resume"], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("error: out of memory: ") and "a checkpoint that was saved is intact" in last
    assert checkpoint.load(run).meta["step"] == 3
