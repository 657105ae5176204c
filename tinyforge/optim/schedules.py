"""Schedules, as functions of the fraction of the run that is done: of the learning rate, and of what else changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tinyforge.errors import UserError

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


@dataclass(frozen=True)
class Pace:
    """What the schedules say of one step.

    lr: the learning rate. momentum: Muon's; decay: the weight decay; None for those of the optimizer's config.
    head_weights: of the output heads in the loss; empty for the objective's own.
    """

    lr: float
    momentum: float | None = None
    head_weights: tuple[float, ...] = ()
    decay: float | None = None

    def shrink(self, weight_decay: float) -> float:
        """The factor of the weights in decoupled weight decay. weight_decay: the config's."""
        return 1 - self.lr * (weight_decay if self.decay is None else self.decay)


Rate = float | Pace
"""A learning rate, with or without the other numbers of a step."""


def pace_of(rate: Rate) -> Pace:
    return rate if isinstance(rate, Pace) else Pace(rate)


Points = tuple[tuple[float, float], ...]
"""(fraction of the run, value), in rising order of the fractions."""


def read_points(flag: str, items: Sequence[str], example: str, least: float, most: float = math.inf) -> Points:
    """The points of a schedule's flag, AT:VALUE each. The values lie between `least` and `most`, and are integers if
    `most` is infinite. Raises UserError."""
    found: list[tuple[float, float]] = []
    for item in items:
        at, _, text = item.partition(":")
        try:
            point = (float(at), float(text))
        except ValueError:
            point = (math.nan, math.nan)
        good = 0 <= point[0] <= 1 and least <= point[1] <= most and math.isfinite(point[1])
        if not good or (most == math.inf and point[1] % 1) or (found and point[0] <= found[-1][0]):
            value = f"a whole number of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
            raise UserError(
                f"{flag}: {item!r} expects AT:VALUE, AT a share of the run that rises from point to point and VALUE "
                f"{value}, e.g. {flag} {example}"
            )
        found.append(point)
    return tuple(found)


def held(points: Points, progress: float) -> float:
    """The value of the last point at or before `progress`; before the first point, the first value."""
    return next((value for at, value in reversed(points) if at <= progress), points[0][1])


def linear(points: Points, progress: float) -> float:
    """The value at `progress` on straight lines between the points, and level outside of them."""
    if progress <= points[0][0]:
        return points[0][1]
    for (at, value), (after, then) in zip(points, points[1:], strict=False):
        if progress < after:
            return value + (then - value) * (progress - at) / (after - at)
    return points[-1][1]
