"""AdamW's passes compiled by numba: see ops/compiled.py."""

from __future__ import annotations

from typing import Any

from tinyforge.backends.machine_code import Library
from tinyforge.kernel import Array
from tinyforge.optim.adamw import adamw_

library = Library(f"{__name__}_numba")


@adamw_.on("numba")
def adamw(
    values: Array, masters: Array, m: Array, v: Array, grads: Array, rates: Array, grad_scale: Any, config: Any
) -> None:
    if config.cautious:
        return adamw_(values, masters, m, v, grads, rates, grad_scale, config)
    one, two = config.beta1, config.beta2
    factors = (*map(float, rates), float(grad_scale), one, 1 - one, two, 1 - two, config.eps)
    return library.adamw(masters, m, v, grads, masters.size, *factors)
