"""Launches sums.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, scalar
from tinyforge.kernel import Array
from tinyforge.parallel import sums


@sums.add_.on("cupy")
def add_(out: Array, x: Array) -> None:
    if not (out.flags.c_contiguous and x.flags.c_contiguous):
        raise ValueError("add_: expects C-contiguous arrays")
    if out.size:
        launch = load("parallel/sums.cu", "add", SCALAR=scalar(out.dtype))
        launch(blocks(out.size, 1024), (256,), (out, x, np.int64(out.size)))
