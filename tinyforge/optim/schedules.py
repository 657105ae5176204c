"""Learning-rate schedules, as functions of the fraction of the run that is done."""

from __future__ import annotations

import math

SCHEDULES = ("wsd", "cosine", "constant")


def learning_rate(
    schedule: str, progress: float, peak: float, *, decay: float, warmup: float, floor: float = 0.02
) -> float:
    """The rate at `progress` in [0, 1] of the run. All rise linearly over the first `warmup` of it; then

        constant   peak
        cosine     floor peak + (1 - floor) peak (1 + cos(pi s)) / 2,  s from 0 to 1 over the rest
        wsd        peak (stable), then linearly down to floor * peak over the last `decay` of the run

    Sources: Loshchilov and Hutter, "SGDR" (2017); Hu et al., "MiniCPM" (2024), for warm-up/stable/decay.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return peak * max(progress, 0.01 * warmup) / warmup
    if schedule == "constant":
        return peak
    if schedule == "cosine":
        s = (progress - warmup) / (1 - warmup)
        return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * s)) / 2)
    if schedule == "wsd":
        return peak * (1 - (1 - floor) * max(0.0, (progress - (1 - decay)) / decay))
    raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
