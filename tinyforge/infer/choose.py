"""The choice of a decoder."""

from __future__ import annotations

from contextlib import suppress

from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM, check_causal_lm
from tinyforge.infer.decoder import Decoder, ReferenceDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder


def make_decoder(model: CausalLM, batch: int = 1, capacity: int | None = None, spare_memory: bool = False) -> Decoder:
    """The fastest decoder for the model's backend and shape: a fused one where it fits, else the reference.

    spare_memory: on a GPU make no second copy of the weights, for use during training; slower. A model with
    `mostly_decodes` set reads its weights from the decoder's copy, on a CPU: half the memory, and slower passes of its
    own.
    """
    backend = check_causal_lm(model).backend.name
    if model.fused_weights() is not None:
        if backend == "numpy":
            return NumpyDecoder(model, batch, capacity, consume=getattr(model, "mostly_decodes", False))
        if backend == "cupy" and not spare_memory:
            from tinyforge.infer.cuda.decode_batched import BatchDecoder
            from tinyforge.infer.cuda.decode_single import RowDecoder

            with suppress(UserError):  # a shape that the kernels do not take
                return RowDecoder(model, capacity) if batch == 1 else BatchDecoder(model, batch, capacity)
    return ReferenceDecoder(model, batch, capacity)
