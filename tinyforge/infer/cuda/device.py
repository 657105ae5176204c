"""What the fused CUDA decoders share: weights in the order of a plan, prefill, and overlapping launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Generic, TypeVar

import cupy
import numpy as np

from tinyforge.backends import wide
from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM, FusedLayer, FusedWeights
from tinyforge.infer.cuda.decode_batched_plan import BatchPlan
from tinyforge.infer.cuda.decode_single_plan import RowPlan
from tinyforge.infer.cuda.prompts import Prompts
from tinyforge.infer.decoder import Decoder
from tinyforge.infer.sampling import Sampling
from tinyforge.kernel import Array
from tinyforge.quantised import plain

BLOCK = 16
"""Tokens per row that `stream` yields together, after the first few."""

# Host arrays that are being copied to, each with the event that ends its copy. Reader and decoder may be gone before
# that; CuPy's pool would then hand the memory to the next caller, for example `asarray`, which fills it at once, and
# the copy would overwrite it with an earlier launch's numbers.
_in_transit: list[tuple[np.ndarray, Any]] = []
_transit = Lock()


def _keep_until(arrived: Any, host: np.ndarray) -> None:
    """Keep an array alive until an event is done."""
    with _transit:
        _in_transit[:] = [(h, e) for h, e in _in_transit if not e.done] + [(host, arrived)]


AnyPlan = TypeVar("AnyPlan", RowPlan, BatchPlan)


class DeviceWeights(Generic[AnyPlan]):
    """A model's weights as the kernel of `plan` takes them: its matrices copied, in the order of the plan.

    scales: of the codes' rows, in the same order; None where the plan has no codes. Codes of four bits have theirs next
    to them; `scales` then counts for the heads.
    """

    def __init__(self, plan: AnyPlan, weights: FusedWeights) -> None:
        self.plan: AnyPlan = plan
        self.dtype, self.wide = weights.embedding.dtype, wide(weights.embedding.dtype)
        self.scales = None
        if isinstance(plan, RowPlan) and plan.grouped:
            pairs = ((FusedLayer(*(m.codes for m in of)), FusedLayer(*(m.scales for m in of))) for of in weights.layers)
            self.matrices = plan.arrange_groups(pairs, weights.lm_heads.codes, cupy)
            unused = (FusedLayer(*(m.scales[:, :1] for m in layer)) for layer in weights.layers)
            self.scales = plan.arrange_scales(unused, weights.lm_heads.scales[..., None], cupy)
        elif isinstance(plan, RowPlan) and plan.code:
            codes = (FusedLayer(*(m.codes for m in layer)) for layer in weights.layers)
            self.matrices = plan.arrange(codes, weights.lm_heads.codes, cupy)
            scales = (FusedLayer(*(m.scales[:, None] for m in layer)) for layer in weights.layers)
            self.scales = plan.arrange_scales(scales, weights.lm_heads.scales[..., None], cupy)
        else:
            # Layer by layer: quantised weights are dequantised here.
            layers = (FusedLayer(*map(plain, layer)) for layer in weights.layers)
            self.matrices = plan.arrange(layers, plain(weights.lm_heads), cupy)
        gains = cupy.stack([gain.astype(self.wide, copy=False) for gain in weights.gains])
        self.gains, self.cos, sines = (
            cupy.ascontiguousarray(x.astype(self.wide, copy=False)) for x in (gains, weights.cos, weights.sin)
        )
        # What both kernels take of them in every launch; the gains come apart.
        tables = {"embedding": weights.embedding, "cosines": self.cos, "sines": sines}
        self.arguments = {"weights": self.matrices, **tables, "eps": self.wide.type(weights.norm_eps)}
        self.lengths = cupy.asarray(plan.lengths)


class DeviceDecoder(Decoder):
    """The base of both decoders. UserError for a model on another backend, and for a shape that no kernel takes."""

    def __init__(self, model: CausalLM, batch: int, capacity: int | None) -> None:
        super().__init__(model, batch, capacity)
        name, weights = type(self).__name__, model.fused_weights()
        if model.backend.name != "cupy":
            raise UserError(f"{name}: the model is on backend {model.backend.name}, expected cupy; use --backend cupy")
        if weights is None:
            raise UserError(f"{name}: {type(model).__name__} has no fused weights; use make_decoder")
        if weights.heads * weights.head_dim != weights.dim:
            raise UserError(
                f"{name}: {weights.heads} heads of {weights.head_dim} do not add up to the model's width, "
                f"{weights.dim}; use make_decoder"
            )
        self.fused = replace(weights, embedding=plain(weights.embedding))
        self.prompts = Prompts(model, self.capacity, in_place=batch == 1)

    def _shape(self) -> dict[str, Any]:
        """The fields of `DecodePlan` that describe the model."""
        w = self.fused
        shape = {name: getattr(w, name) for name in ("dim", "hidden", "heads", "kv_heads", "vocab")}
        return shape | {"layers": len(w.layers), "outputs": len(w.lm_heads), "itemsize": w.embedding.dtype.itemsize}

    def _prefill(self, row: int, keys: Array, values: Array, tokens: Sequence[int]) -> Array | None:
        """Append to a row by `Prompts.append`, without waiting; returns what that does.

        keys, values: the row's, (layers, kv_heads, capacity, head_dim).
        """
        stream = self.prompts.append(tokens, keys, values, self.lengths[row])
        self.lengths[row] += len(tokens)
        return stream

    def draws(self, sampling: Sampling) -> bool:
        return not (sampling.changes_logits or sampling.logprobs)

    def _two_under_way(
        self, launch: Callable[[int, int], Array], left: Callable[[], int], most: int
    ) -> Iterator[np.ndarray]:
        """The results of launches, in order, in host memory; while one is read, the next is computed.

        launch(passes, ahead) queues passes after `ahead` unread ones, and returns a device array with a row per pass.
        left(): how many passes may still be needed, unread ones included; ends at 0. The first launch has one
        pass, each later one twice as many, up to `most`, so that the first results come early.
        """
        in_flight: deque[tuple[np.ndarray, Any]] = deque()
        ahead, size = 0, 1
        while left() > 0:
            while len(in_flight) < 2 and left() > ahead:
                passes = min(size, left() - ahead)
                in_flight.append(self._copy_out(launch(passes, ahead)))
                ahead, size = ahead + passes, min(2 * size, most)
            found, arrived = in_flight.popleft()
            self._wait(arrived)
            ahead -= len(found)
            yield found

    def _copy_out(self, found: Any) -> tuple[np.ndarray, Any]:
        """Start copying to the host; returns the host array and the event that ends the copy."""
        pinned = cupy.cuda.alloc_pinned_memory(found.nbytes)
        host = np.frombuffer(pinned, found.dtype, found.size).reshape(found.shape)
        found.get(out=host, blocking=False)
        arrived = cupy.cuda.Event(block=False, disable_timing=True)
        arrived.record()
        _keep_until(arrived, host)
        return host, arrived

    def _wait(self, arrived: Any) -> None:
        arrived.synchronize()
