"""The plan of a step's memory beside what the device says."""

from __future__ import annotations

import numpy as np
import pytest

from models.nanoeuler import PRESETS, NanoEuler
from models.nanoeuler.plan import plan_step
from tinyforge.backends import get_backend
from tinyforge.op import Stash
from tinyforge.optim import AdamW

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("precision", "rows", "recompute"), [("bf16", 8, False), ("bf16", 8, True), ("fp32", 4, False)]
)
def test_the_plan_is_within_five_percent_of_the_measured_peak(precision: str, rows: int, recompute: bool) -> None:
    import cupy

    from tinyforge.backends.cupy_backend import PeakMemory

    config = PRESETS["base"]
    backend = get_backend("cupy", precision)
    backend.recomputes = recompute
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.used_bytes()
    rng = np.random.default_rng(0)
    with PeakMemory() as peak:
        model = NanoEuler(config, backend)
        model.initialise(seed=0)
        optimizer = AdamW(model.buffer, backend)
        ids = rng.integers(0, config.vocab, (rows, 512), dtype=np.int32)
        targets = rng.integers(0, config.vocab, (rows, 512, config.mtp_heads), dtype=np.int32)
        for _ in range(2):
            stash = Stash()
            nll = model.forward(backend.asarray(ids), backend.asarray(targets), stash)
            model.backward(backend.asarray(np.full(len(nll), 1e-4), backend.master_dtype), stash)
            _, factor = optimizer.clip(1.0)
            optimizer.step(1e-3, factor)
    planned = plan_step(config, precision, rows, 512, recompute).peak
    assert planned == pytest.approx(peak.bytes - before, rel=0.05)
