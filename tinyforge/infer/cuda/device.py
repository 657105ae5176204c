"""What the fused decoders for CUDA share: weights in the order of a plan, prefill, and overlapping launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

import cupy
import numpy as np

from tinyforge.backends import wide
from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM, FusedLayer, FusedWeights
from tinyforge.infer.cuda.batch_plan import BatchPlan
from tinyforge.infer.cuda.prompts import Prompts
from tinyforge.infer.cuda.row_plan import RowPlan
from tinyforge.infer.decoder import Decoder
from tinyforge.infer.sampling import Sampling
from tinyforge.kernel import Array
from tinyforge.quantised import plain

BLOCK = 16
"""Tokens of a row that `stream` yields together once it is under way."""

# What is being copied to the host, with the event after which it is there. The reader may be gone before, and the
# decoder too: CuPy's pool would give the memory to the next who asks, `asarray` say, which fills it on the host at
# once, and the copy would then write an earlier launch's numbers over it.
_in_transit: list[tuple[np.ndarray, Any]] = []
_transit = Lock()


def _keep_until(arrived: Any, host: np.ndarray) -> None:
    """Hold on to an array until an event is over, whoever else lets go of it."""
    with _transit:
        _in_transit[:] = [(h, e) for h, e in _in_transit if not e.done] + [(host, arrived)]


AnyPlan = TypeVar("AnyPlan", RowPlan, BatchPlan)


class DeviceWeights(Generic[AnyPlan]):
    """A model's weights as the kernel of `plan` takes them: the matrices are a copy, in the order of the plan.

    scales: where the plan has codes, of their rows, in its order.
    """

    def __init__(self, plan: AnyPlan, weights: FusedWeights) -> None:
        self.plan: AnyPlan = plan
        self.dtype, self.wide = weights.embedding.dtype, wide(weights.embedding.dtype)
        self.scales = None
        if isinstance(plan, RowPlan) and plan.code:
            codes = (FusedLayer(*(m.codes for m in layer)) for layer in weights.layers)
            self.matrices = plan.arrange(codes, weights.lm_heads.codes, cupy)
            scales = (FusedLayer(*(m.scales[:, None] for m in layer)) for layer in weights.layers)
            self.scales = plan.arrange_scales(scales, weights.lm_heads.scales[..., None], cupy)
        else:
            # A layer at a time: of quantised weights the numbers are made for this.
            layers = (FusedLayer(*map(plain, layer)) for layer in weights.layers)
            self.matrices = plan.arrange(layers, plain(weights.lm_heads), cupy)
        self.embedding = weights.embedding
        gains = cupy.stack([gain.astype(self.wide, copy=False) for gain in weights.gains])
        self.gains, self.cos, self.sin = (
            cupy.ascontiguousarray(x.astype(self.wide, copy=False)) for x in (gains, weights.cos, weights.sin)
        )
        self.norm_eps = self.wide.type(weights.norm_eps)
        self.lengths = cupy.asarray(plan.lengths)


class DeviceDecoder(Decoder):
    """The base of both decoders. UserError for a model on another backend, and of a shape that no kernel takes."""

    def __init__(self, model: CausalLM, batch: int, capacity: int | None) -> None:
        super().__init__(model, batch, capacity)
        name, weights = type(self).__name__, model.fused_weights()
        if model.backend.name != "cupy":
            raise UserError(f"{name}: the model is on backend {model.backend.name}, wants cupy; use --backend cupy")
        if weights is None:
            raise UserError(f"{name}: {type(model).__name__} has no fused weights; use make_decoder")
        if weights.heads * weights.head_dim != weights.dim:
            raise UserError(
                f"{name}: {weights.heads} heads of {weights.head_dim} are not the width of the stream, {weights.dim}; "
                "use make_decoder"
            )
        self.fused = weights
        self.prompts = Prompts(model, self.capacity)

    def _shape(self) -> dict[str, Any]:
        """The fields of `DecodePlan` that are the model's."""
        w = self.fused
        return {"dim": w.dim, "hidden": w.hidden, "heads": w.heads, "kv_heads": w.kv_heads, "layers": len(w.layers),
                "vocab": w.vocab, "outputs": len(w.lm_heads), "itemsize": w.embedding.dtype.itemsize}  # fmt: skip

    def _prefill(self, row: int, keys: Array, values: Array, tokens: Sequence[int]) -> Array:
        """Append to a row by the model's own ops, without waiting for the device; returns the ids there, (T,).

        keys, values: the row's, (layers, kv_heads, capacity, head_dim).
        """
        ids = self.prompts.backend.asarray(np.asarray([tokens], np.int32))
        self.prompts.append(ids, keys, values, self.lengths[row])
        self.lengths[row] += len(tokens)
        return ids[0]

    def draws(self, sampling: Sampling) -> bool:
        return not (sampling.changes_logits or sampling.logprobs)

    def _two_under_way(
        self, launch: Callable[[int, int], Array], left: Callable[[], int], first: int, most: int
    ) -> Iterator[np.ndarray]:
        """What launches give, one after the other, in host memory: while one is read, the next is computed.

        launch(passes, ahead) queues passes behind `ahead` that are not read yet; it returns an array on the device, a
        row a pass. left(): how many passes may still be needed, those that are not read included; at 0 it ends. A
        launch has `first` passes, then twice as many each time, up to `most`: a reader sees something early.
        """
        in_flight: deque[tuple[np.ndarray, Any]] = deque()
        ahead, size = 0, first
        while left() > 0:
            while len(in_flight) < 2 and left() > ahead:
                passes = min(size, left() - ahead)
                in_flight.append(self._copy_out(launch(passes, ahead)))
                ahead, size = ahead + passes, min(2 * size, most)
            found, arrived = in_flight.popleft()
            self._wait(arrived)
            ahead -= len(found)
            yield found

    def _copy_out(self, found: Array) -> tuple[np.ndarray, Any]:
        """Start copying to the host; the host's array and the event after which it holds the numbers."""
        pinned = cupy.cuda.alloc_pinned_memory(found.nbytes)
        host = np.frombuffer(pinned, found.dtype, found.size).reshape(found.shape)
        found.get(out=host, blocking=False)
        arrived = cupy.cuda.Event(block=False, disable_timing=True)
        arrived.record()
        _keep_until(arrived, host)
        return host, arrived

    def _wait(self, arrived: Any) -> None:
        arrived.synchronize()
