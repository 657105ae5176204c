"""The choice of a decoder."""

from __future__ import annotations

from contextlib import suppress

from models.nanoeuler.model import NanoEuler
from tinyforge.errors import UserError
from tinyforge.infer.decoder import Decoder, ReferenceDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder


def make_decoder(
    model: NanoEuler, batch: int = 1, capacity: int | None = None, spare_memory: bool = False
) -> Decoder:
    """The fastest decoder for the model's backend and shape.

    spare_memory: no second copy of the weights on a GPU, for use beside training. It is slower there.
    """
    if model.backend.name == "numpy":
        return NumpyDecoder(model, batch, capacity)
    if not spare_memory:
        from tinyforge.infer.cuda.batch import CudaBatchDecoder
        from tinyforge.infer.cuda.row import CudaDecoder

        with suppress(UserError):  # a shape that its kernel does not take
            return (CudaDecoder if batch == 1 else CudaBatchDecoder)(model, batch, capacity)
    return ReferenceDecoder(model, batch, capacity)
