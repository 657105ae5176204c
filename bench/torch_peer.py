"""NanoEuler and its training step in PyTorch: the peer of `bench/train_step.py`.

Written as PyTorch is best used: merged projections, fused attention, RMSNorm, loss and AdamW, gradients set to None.
Modules carry our parameters' names, so that our weights load by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from models.nanoeuler.config import Config
from tinyforge.optim import AdamWConfig
from tinyforge.train.objectives import Batch


class Block(torch.nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        dim, hidden = config.dim, config.hidden
        self.head_dim = config.head_dim
        self.heads = (config.heads, config.kv_heads, config.kv_heads)
        self.norm1 = torch.nn.RMSNorm(dim, config.norm_eps)
        self.qkv = torch.nn.Linear(dim, sum(self.heads) * config.head_dim, bias=False)
        self.out = torch.nn.Linear(dim, dim, bias=False)
        self.norm2 = torch.nn.RMSNorm(dim, config.norm_eps)
        self.gate_up = torch.nn.Linear(dim, 2 * hidden, bias=False)
        self.down = torch.nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: (B, T, C); cos, sin: (T, 1, D/2)."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split([self.heads[0] + self.heads[1], self.heads[2]], dim=2)
        cos, sin = cos.to(qk.dtype), sin.to(qk.dtype)
        left, right = qk.chunk(2, dim=-1)
        qk = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        q, k = qk.split(self.heads[:2], dim=2)
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + self.out(a.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class NanoEuler(torch.nn.Module):
    """ids: (B, T), targets: (B, T, K), -1 for none, to the loss: the weighted mean over heads of their mean nll."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(config.vocab, config.dim)
        self.blocks = torch.nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = torch.nn.RMSNorm(config.dim, config.norm_eps)
        self.heads = torch.nn.Linear(config.dim, config.mtp_heads * config.vocab, bias=False)
        frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.from_numpy(np.arange(config.context)[:, None, None] * frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        weights = torch.tensor(config.mtp_weights, dtype=torch.float64)
        self.register_buffer("weights", weights / weights.sum(), persistent=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.heads(self.final_norm(x)).view(-1, self.embedding.num_embeddings)
        # All heads in one call: a call per head copies its slice of the logits, and takes longer.
        nll = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")
        counts = (targets >= 0).flatten(0, 1).sum(0).clamp(min=1)
        return (nll.view(-1, len(counts)).sum(0) * self.weights / counts).sum()


class TorchPeer:
    """Training steps on `device`, eager or through torch.compile (its default mode); on a CPU with `threads` threads.

    precision: "bf16" is autocast over float32 weights, with TF32 allowed for what stays in float32.
    """

    def __init__(
        self, config: Config, batches: Sequence[Batch], *, precision: str, device: str, threads: int, lr: float,
        clip: float, compiled: bool,
    ) -> None:  # fmt: skip
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")
        self.device = torch.device(device)
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")
        self.model = NanoEuler(config).to(self.device, torch.float64 if precision == "fp64" else torch.float32)
        self.forward = torch.compile(self.model) if compiled else self.model
        self.batches = [tuple(torch.from_numpy(a).long().to(self.device) for a in (b.ids, b.targets)) for b in batches]
        self.clip = clip
        ours = AdamWConfig()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        gains = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": ours.weight_decay}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(ours.beta1, ours.beta2), eps=ours.eps, fused=True)

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Copy our weights, all of them, by name."""
        own = self.model.state_dict()
        self.model.load_state_dict({name: torch.from_numpy(w).reshape(own[name].shape) for name, w in weights.items()})

    def step(self, index: int) -> float | torch.Tensor:
        """One step on a batch; returns the loss before it, on a GPU without waiting for it."""
        with self.autocast:
            loss = self.forward(*self.batches[index % len(self.batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item() if self.device.type == "cpu" else loss.detach()
