"""Tensors of type MXFP4 in a Hugging Face directory, as gpt-oss is published: numbers of four bits with a common
exponent for every 32.

W has `W_blocks`, (..., O, G, 16) U8, and `W_scales`, (..., O, G) U8: of block g, w = e2m1[code] 2^(scale - 127), the
code of number 2j in the lower bits of byte j, that of 2j + 1 in the upper. The file's W is the transpose, (..., 32 G,
O), as transformers makes it.

Source: the OCP "Microscaling Formats (MX) Specification" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from tinyforge.errors import UserError
from tinyforge.tensors import Lazy, Tensor

BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_SIZES, *(-size for size in _SIZES)], np.float32)
"""The number of each code, (16,)."""
_PAIRS = np.stack([np.tile(E2M1, 16), E2M1.repeat(16)], axis=1).view(np.uint64)[:, 0]  # two float32 as one item


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(..., O, G, 16) and (..., O, G) to (..., O, 32 G), float32. The scale 255 is NaN."""
    numbers = np.take(_PAIRS, blocks).view(np.float32).reshape(*scales.shape, GROUP)
    powers = np.where(scales < 255, np.ldexp(np.float32(1), np.minimum(scales, 254).astype(np.int32) - 127), np.nan)
    return (numbers * powers.astype(np.float32)[..., None]).reshape(*scales.shape[:-1], -1)


def joined(found: Mapping[str, Tensor]) -> dict[str, Lazy]:
    """The tensors of a directory, each pair of blocks and scales as one. UserError for one without the other."""
    lazy: dict[str, Lazy] = {}
    for name, tensor in found.items():
        if name.endswith(BLOCKS):
            scales = found.get(name.removesuffix(BLOCKS) + SCALES)
            *lead, count, width = tensor.shape if len(tensor.shape) > 2 else (0, 0, 0)
            if scales is None or scales.shape != (*lead, count) or width != GROUP // 2:
                got = "missing" if scales is None else f"of shape {scales.shape}"
                raise UserError(
                    f"{tensor.file}: {name} has shape {tensor.shape}, its scales are {got}; expected blocks of 16 "
                    "bytes and a scale for each; get the files again"
                )
            shape = (*lead[:-1], count * GROUP, lead[-1])
            lazy[name.removesuffix(BLOCKS)] = shape, partial(_read, tensor, scales)
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in found):
            lazy[name] = tensor.shape, tensor.read
    return lazy


def _read(blocks: Tensor, scales: Tensor) -> np.ndarray:
    """One matrix after the other: the numbers take eight times the memory of the codes."""
    codes, powers = blocks.read_bytes(), scales.read_bytes()
    *_, rows, count = scales.shape
    found = np.empty((codes.size // (rows * count * GROUP // 2), rows, count * GROUP), np.float32)
    for matrix, c, p in zip(
        found, codes.reshape(-1, rows, count, GROUP // 2), powers.reshape(-1, rows, count), strict=True
    ):
        matrix[...] = dequantise(c, p)
    return found.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)
