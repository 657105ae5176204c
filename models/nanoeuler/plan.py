"""What a training step of NanoEuler needs on a GPU, known before the first byte is taken there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.nanoeuler.config import Config
from models.nanoeuler.model import NanoEuler
from tinyforge.backends import Backend
from tinyforge.backends.phantom import METER, PhantomBackend
from tinyforge.errors import UserError
from tinyforge.op import Stash
from tinyforge.optim import AdamW

OUTSIDE = 128 << 20
"""Bytes that are not ours to count: cuBLAS's workspace, the kernels' code."""


@dataclass(frozen=True)
class Plan:
    """Bytes on the GPU. weights: with masters and gradients. moments: AdamW's. saved: what forward keeps for backward.
    peak: the most at one time, the other three included."""

    weights: int
    moments: int
    saved: int
    peak: int

    def __str__(self) -> str:
        rows = (
            ("weights, masters, gradients", self.weights), ("AdamW's moments", self.moments),
            ("saved for backward", self.saved), ("passing", self.peak - self.weights - self.moments - self.saved),
            ("peak", self.peak),
        )  # fmt: skip
        return "\n".join(f"  {what:<28} {gib(count):>10}" for what, count in rows)


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def plan_step(config: Config, precision: str, batch_size: int, seq_len: int, recompute: bool = False) -> Plan:
    """Run one step on arrays without memory and read the meter."""
    start = METER.now
    METER.peak = start
    backend = PhantomBackend(precision)
    model = NanoEuler(config, backend, recompute=recompute)
    weights = METER.now - start
    optimizer = AdamW(model.buffer, backend)
    ready = METER.now - start
    ids = np.zeros((batch_size, seq_len), np.int32)
    targets = np.zeros((batch_size, seq_len, config.mtp_heads), np.int32)
    stash = Stash()
    nll = model.forward(backend.asarray(ids), backend.asarray(targets), stash)
    saved = METER.now - start - ready
    model.backward(backend.asarray(np.zeros(nll.shape[-1:]), backend.master_dtype), stash)
    _, factor = optimizer.clip(1.0)
    optimizer.step(1e-3, factor)
    return Plan(weights, ready - weights, saved, METER.peak - start)


def sequence_length(config: Config, asked: int | None) -> int:
    """Tokens a sequence: what --seq-len asks for, or the whole context."""
    if asked is not None and asked > config.context:
        raise UserError(f"--seq-len is {asked}, the config's context is {config.context}; use at most that")
    return asked or config.context


def print_plan(config: Config, precision: str, batch_size: int, seq_len: int, recompute: bool) -> None:
    print(f"a step of {batch_size} x {seq_len} tokens in {precision} on a GPU{', recomputing' if recompute else ''}:")
    print(plan_step(config, precision, batch_size, seq_len, recompute))


def check_fits(config: Config, backend: Backend, batch_size: int, seq_len: int, recompute: bool) -> None:
    """Refuse, before anything is allocated, a run that would not fit into the device's free memory."""
    free = backend.memory().get("free")
    if free is None:
        return

    def needed(rows: int, recompute: bool = recompute) -> int:
        return plan_step(config, backend.precision.name, rows, seq_len, recompute).peak + OUTSIDE

    if needed(batch_size) <= free:
        return
    low, high = 0, batch_size  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= free else (low, middle)
    if needed(batch_size, recompute=True) <= free:
        fix = "--recompute makes it fit"
    elif low:
        fix = f"--batch-size {low} fits, with --grad-accum for as large a step"
    else:
        fix = "not even --batch-size 1 fits; use a smaller --config or --seq-len, or --precision bf16"
    raise UserError(
        f"{batch_size} x {seq_len} tokens in {backend.precision.name} need {gib(needed(batch_size))} on the GPU, "
        f"{gib(free)} are free; {fix}"
    )
