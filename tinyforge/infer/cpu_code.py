"""Machine code for this CPU: the pass of `CompiledDecoder`, from a cache or compiled by numba; see machine_code.py."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from tinyforge.backends.machine_code import INSTRUCTIONS, digest, link

NAME = "tinyforge_pass"
KEYS_AT_ONCE = 120
"""Keys of a tile of attention for a prompt; a multiple of any tile's outputs."""


def _digest(weight: str, real: str) -> str:
    own = [Path(__file__).with_name(f"cpu_{name}.py") for name in ("instructions", "kernels", "prompts")]
    return digest([*own, INSTRUCTIONS], weight, real)


@cache
def load(weight: str, real: str) -> Any:
    """The pass for weights and activations of these types, as a function of two addresses: see `cpu_kernels.forward`.

    Raises whatever numba or llvmlite raises where they do not work.
    """

    def build() -> bytes:
        from tinyforge.infer.cpu_kernels import build

        return build(weight, real)

    run = link(f"{weight}-{real}", _digest(weight, real), build)(NAME)
    return lambda *addresses: run(*map(ctypes.c_void_p, addresses))
