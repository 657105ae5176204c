"""Decoding with a static key/value cache in PyTorch: the peer of `bench/decode.py` and `bench/prefill.py`.

Written as PyTorch is best used: merged projections, fused attention with grouped queries, a cache that is written in
place, no gradients. Eager, attention reads the part of the cache that is filled. Compiled, for CUDA, every shape is
static: attention reads the whole cache under a mask, and the pass is replayed as a CUDA graph. A prompt is one causal
pass into an empty cache. Regional compilation: a layer is compiled, once for all of them, and the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.torch_peer import Block, Llama, NanoEuler, Trunk
from tinyforge.errors import UserError
from tinyforge.models.llama.config import Config as LlamaConfig
from tinyforge.models.nanoeuler.config import Config as NanoEulerConfig

PEERS: dict[type, type[Trunk]] = {NanoEulerConfig: NanoEuler, LlamaConfig: Llama}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class CachedBlock(torch.nn.Module):
    """A block of `bench.torch_peer` with keys and values in buffers, (B, Hkv, capacity, D)."""

    def __init__(self, block: Block, batch: int, capacity: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = block
        shape = (batch, block.heads[1], capacity, block.head_dim)
        self.register_buffer("keys", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("values", torch.zeros(shape, dtype=dtype), persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        last: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position: torch.Tensor,
        seen: int | None,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (B, n, C) at `position`: (n,), without the last layer's second half, so that a layer compiled alone fuses
        that addition with its norm; returns the next two. Attention reads the first `seen` keys, or all of them under
        the mask; where these are the n of this pass itself, a prompt, it is causal."""
        b, x = self.block, x + last
        qkv = b.qkv(b.norm1(x)).unflatten(-1, (-1, b.head_dim)).transpose(1, 2)
        qk, v = qkv.split([b.heads[0] + b.heads[1], b.heads[2]], dim=1)
        left, right = qk.chunk(2, dim=-1)
        qk = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        q, k = qk.split(b.heads[:2], dim=1)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        prompt = seen == x.shape[1] > 1
        keys, values = (k, v) if prompt else (self.keys[:, :, :seen], self.values[:, :, :seen])
        a = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=prompt, enable_gqa=True)
        x = x + b.out(a.transpose(1, 2).flatten(2))
        gate, up = b.gate_up(b.norm2(x)).chunk(2, dim=-1)
        return x, b.down(F.silu(gate) * up)


class CachedModel(torch.nn.Module):
    """One pass: ids (B, n) at `position` (n,) to the logits of head 0 after the last one, (B, 1, V)."""

    def __init__(self, model: Trunk, config: Any, batch: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding, self.final_norm = model.embedding, model.final_norm
        self.blocks = torch.nn.ModuleList(CachedBlock(b, batch, config.context, dtype) for b in model.blocks)
        heads = getattr(model, "heads", model.embedding).weight
        self.head = torch.nn.Parameter(heads[: config.vocab].detach(), requires_grad=False)
        self.register_buffer("cos", model.cos[:, 0].to(dtype), persistent=False)
        self.register_buffer("sin", model.sin[:, 0].to(dtype), persistent=False)

    def forward(self, ids: torch.Tensor, position: torch.Tensor, seen: int | None) -> torch.Tensor:
        x = self.embedding(ids)
        cos, sin = self.cos[position], self.sin[position]
        # Without `seen` every shape is static, and the mask hides what is not written yet.
        mask = None if seen else torch.arange(len(self.cos), device=ids.device) <= position[:, None]
        last = torch.zeros_like(x)
        for block in self.blocks:
            x, last = block(x, last, cos, sin, position, seen, mask)
        return self.logits(x, last)

    def logits(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return F.linear(self.final_norm((x + last)[:, -1:]), self.head)


class TorchDecoder:
    """One token a step for each row of a batch, and prompts, with the weights and on the device of a model of ours.

    mode: of torch.compile, None for eager. "reduce-overhead" replays the pass as a CUDA graph, as a step of one token
    requires to be fast. threads: on a CPU. capacity: positions of the cache, None for the config's context. regional:
    compile one layer, and record the graph of all layers, and of argmax, here.
    """

    def __init__(
        self, ours: Any, batch: int, threads: int, mode: str | None, capacity: int | None = None, regional: bool = False
    ) -> None:
        backend, config, self.threads, self.compiled = ours.backend, ours.config, threads, mode is not None
        precision = backend.precision.name
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")
        self.device, dtype = torch.device("cuda" if backend.name == "cupy" else "cpu"), DTYPES[precision]
        if (peer := PEERS.get(type(config))) is None:
            raise UserError("--peer: PyTorch's decoding is of NanoEuler and Llama; leave out --peer")
        config = config.override({"context": capacity or config.context})
        with self.device:
            model = peer(config).to(dtype)
        own = model.state_dict()
        with torch.no_grad():
            for p in ours.params():  # one after the other: a large model takes no memory of the host
                own[p.name].copy_(torch.from_numpy(backend.to_numpy(p.value)).reshape(own[p.name].shape))
        self.model = CachedModel(model, config, batch, dtype).to(self.device).eval()
        # Inference mode costs eager passes less; compiled ones write to buffers that were made outside of it.
        self.without_gradients = torch.no_grad if mode else torch.inference_mode
        self.forward: Any = self.model
        self.graph = torch.cuda.CUDAGraph() if regional and mode == "reduce-overhead" else None
        if mode and regional:
            for block in self.model.blocks:
                block.compile(fullgraph=True, dynamic=False)
            vars(self.model)["logits"] = torch.compile(self.model.logits, fullgraph=True, dynamic=False)
        elif mode:
            self.forward = torch.compile(self.model, mode=mode, fullgraph=True, dynamic=False)
        if self.graph:
            self._record(batch, self.graph)

    def _record(self, batch: int, graph: torch.cuda.CUDAGraph) -> None:
        """Record a pass and argmax: from `ids` at `position` to `logits`, and to `ids`."""
        self.ids, self.position = (torch.zeros(s, dtype=torch.int64, device=self.device) for s in ((batch, 1), (1,)))
        with self.without_gradients():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles, as recording may not
                for _ in range(3):
                    self.forward(self.ids, self.position, None)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                self.logits = self.forward(self.ids, self.position, None)
                self.ids.copy_(self.logits.argmax(dim=-1))

    def _step(self, ids: torch.Tensor, position: torch.Tensor, seen: int) -> torch.Tensor:
        """ids: (B, n), position: (n,), both on the device; `seen`: positions up to the last of these."""
        if self.graph:
            if ids is not self.ids:
                self.ids.copy_(ids)
            self.position.copy_(position)
            self.graph.replay()
            return self.logits
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        return self.forward(ids, position, None if self.compiled else seen)

    def fill(self, tokens: np.ndarray) -> torch.Tensor:
        """Put tokens: (B, T) into the cache, one position at a time as decoding does; returns the last one's logits."""
        self.use_threads()
        with self.without_gradients():
            for t in range(tokens.shape[1]):
                logits = self._step(self.on_device(tokens[:, t : t + 1]), self.on_device(np.array([t])), t + 1)
        return logits

    def first(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The logits after a prompt, (1, 1, V); ids: (1, n), position: (n,), from 0 on. The cache then holds it."""
        with self.without_gradients():
            if self.compiled:
                torch.compiler.cudagraph_mark_step_begin()
            return self.forward(ids, position, ids.shape[1])

    def places(self, first: int, count: int) -> list[tuple[torch.Tensor, int]]:
        """The positions of `count` steps from `first` on, for `greedy`: on the device, and what each has seen."""
        return [(self.on_device(np.array([t])), t + 1) for t in range(first, first + count)]

    def greedy(self, ids: torch.Tensor, places: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """Decode from ids: (B, 1) on; places: the position and `seen` of each step. Nothing waits for the device."""
        with self.without_gradients():
            for position, seen in places:
                logits = self._step(ids, position, seen)
                ids = self.ids if self.graph else logits.argmax(dim=-1)
        return ids

    def use_threads(self) -> None:
        """PyTorch's number of threads belongs to the process, which has several decoders."""
        torch.set_num_threads(self.threads)

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device)
