"""Adding one array to another: the node of a sum whose order is fixed."""

from __future__ import annotations

from tinyforge.kernel import Array, kernel


@kernel
def add_(out: Array, x: Array) -> None:
    """out += x; both of one shape and dtype."""
    out += x
