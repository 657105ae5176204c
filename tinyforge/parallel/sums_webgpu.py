"""Adding one array to another on WebGPU."""

from __future__ import annotations

from tinyforge.kernel import Array
from tinyforge.parallel import sums


@sums.add_.on("webgpu")
def add_(out: Array, x: Array) -> None:
    out += x
