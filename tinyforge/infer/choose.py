"""The choice of a decoder."""

from __future__ import annotations

import sys
from contextlib import suppress

from tinyforge.backends.machine_code import missing
from tinyforge.errors import UserError, first_line
from tinyforge.infer.causal_lm import CausalLM, check_causal_lm
from tinyforge.infer.decoder import Decoder, ReferenceDecoder
from tinyforge.infer.decoder_compiled import CompiledDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder

_noted: set[str] = set()  # printed notes: each is printed once


def make_decoder(model: CausalLM, batch: int = 1, capacity: int | None = None, spare_memory: bool = False) -> Decoder:
    """The fastest decoder for the model's backend and shape: a fused one where it fits, else the reference.

    spare_memory: on a GPU make no second copy of the weights and no graph, for use during training; slower. On a CPU
    the decoder that numba compiles reads the model's own weights. Without numba, a model with `mostly_decodes` set
    reads its weights from the decoder's copy: half the memory, and slower passes of its own.
    """
    backend = check_causal_lm(model).backend.name
    if model.fused_weights() is not None:
        if backend == "numpy":
            consume = getattr(model, "mostly_decodes", False)
            return _compiled(model, batch, capacity) or NumpyDecoder(model, batch, capacity, consume)
        if backend == "cupy" and not spare_memory:
            from tinyforge.infer.cuda.decode_batched import BatchDecoder
            from tinyforge.infer.cuda.decode_single import RowDecoder

            with suppress(UserError):  # a shape that the kernels do not take
                return RowDecoder(model, capacity) if batch == 1 else BatchDecoder(model, batch, capacity)
        if backend == "webgpu":
            from tinyforge.infer.decoder_webgpu import WebGPUDecoder

            with suppress(UserError):  # as above; it makes no copy of the weights
                return WebGPUDecoder(model, batch, capacity)
    return ReferenceDecoder(model, batch, capacity, batched=False if spare_memory else None)


def _compiled(model: CausalLM, batch: int, capacity: int | None) -> Decoder | None:
    """The decoder compiled by numba, None without numba, where that fails, and for weights that it does not read."""
    if missing():
        return None
    try:
        return CompiledDecoder(model, batch, capacity)
    except (UserError, ValueError):  # ValueError: of the capacity, which the next decoder raises as well
        return None
    except Exception as error:  # numba's and LLVM's own, for a NumPy or a CPU that they do not know
        text = f"note: decoding with NumPy: numba fails: {first_line(error)}"
        if text not in _noted:
            print(text, file=sys.stderr)
        _noted.add(text)
        return None
