"""The kernel of compiled.py, for numba: see ops/compiled_numba.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tinyforge.backends.instructions import Reals


def kernels_of(real: Any) -> list[Callable[..., None]]:
    # Without fastmath each number is rounded as NumPy rounds it: a worker's cut through the parameters changes no bits.
    def adamw(
        w: Reals, m: Reals, v: Reals, grads: Reals, n: int, rate: float, root: float, shrink: float, scale: float,
        keep_m: float, take_m: float, keep_v: float, take_v: float, eps: float,
    ) -> None:  # fmt: skip
        for i in range(n):
            g = grads[i] * scale
            m[i] = m[i] * keep_m + g * take_m
            v[i] = v[i] * keep_v + g * g * take_v
            w[i] = w[i] * shrink - m[i] / (math.sqrt(v[i]) * root + eps) * rate

    adamw.fast = False  # type: ignore[attr-defined]
    return [adamw]
