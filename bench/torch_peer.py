"""The models and their training step in PyTorch: the peers of `bench/train_step.py` and `bench/shakespeare_char.py`.

Written as PyTorch is best used: merged projections, fused attention, norms, loss and AdamW, a tied head that is the
embedding itself, gradients set to None. Modules carry our parameters' names, so that our weights load by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.training import CLIP, LR
from tinyforge.errors import UserError
from tinyforge.optim import AdamWConfig
from tinyforge.train.objectives import Batch


class Block(torch.nn.Module):
    """A layer of NanoEuler and Llama: grouped queries, rotary positions, RMSNorm, SwiGLU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim, hidden = config.dim, config.hidden
        self.head_dim = config.head_dim
        self.heads = (config.heads, config.kv_heads, config.kv_heads)
        self.norm1 = torch.nn.RMSNorm(dim, config.norm_eps)
        bias = getattr(config, "qkv_bias", False)
        self.qkv = torch.nn.Linear(dim, sum(self.heads) * config.head_dim, bias=bias)
        self.out = torch.nn.Linear(config.heads * config.head_dim, dim, bias=False)
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
        return self.feed(x, self.norm2(x))

    def feed(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        """x with the second half of the layer added, of its norm h."""
        gate, up = self.gate_up(h).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Trunk(torch.nn.Module):
    """What NanoEuler and Llama share: ids (B, T) to the final-normed stream (B, T, C)."""

    block: type[Block] = Block
    plain = "NanoEuler"
    options: tuple[str, ...] = ()

    def __init__(self, config: Any) -> None:
        super().__init__()
        shape = getattr(config, "trunk", config)
        other = [name for name in shape.options() if name not in self.options]
        if other := [*other, *["rope_scaling"] * (shape.rope_scaling != "none")]:
            raise UserError(f"--peer: a plain {self.plain}, got a config with {', '.join(other)}; leave out --peer")
        self.config = config
        self.embedding = torch.nn.Embedding(config.vocab, config.dim)
        self.blocks = torch.nn.ModuleList(self.block(config) for _ in range(config.layers))
        self.final_norm = torch.nn.RMSNorm(config.dim, config.norm_eps)
        frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.from_numpy(np.arange(config.context)[:, None, None] * frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.final_norm(x)


class NanoEuler(Trunk):
    """ids: (B, T), targets: (B, T, K), -1 for none, to the loss: the weighted mean over heads of their mean nll."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.heads = torch.nn.Linear(config.dim, config.mtp_heads * config.vocab, bias=False)
        weights = torch.tensor(config.mtp_weights, dtype=torch.float64)
        self.register_buffer("weights", weights / weights.sum(), persistent=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.hidden(ids), targets)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.heads(x).view(-1, self.embedding.num_embeddings)
        # All heads in one call: a call per head copies its slice of the logits, and takes longer.
        nll = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")
        counts = (targets >= 0).flatten(0, 1).sum(0).clamp(min=1)
        return (nll.view(-1, len(counts)).sum(0) * self.weights / counts).sum()


class Weight(torch.nn.Module):
    """A parameter named `weight`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape))


def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x: (R, I), rows sorted by expert; weight: (E, O, I); ends: (E,) int32, where each expert's rows end. (R, O).

    In bf16 on a GPU by torch's grouped product, as transformers' Mixtral does by default too; autocast does
    not know it, so both factors are cast here. Elsewhere a loop over experts.
    """
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        return F.grouped_mm(x.bfloat16(), weight.bfloat16().transpose(1, 2), offs=ends)
    parts = x.split(torch.diff(ends, prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(part, w) for part, w in zip(parts, weight, strict=True)])


class MoEBlock(Block):
    """A layer of Mixtral. Its second half gives x, and the sums that the router's losses are made of."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.active = config.active
        self.gate = torch.nn.Linear(config.dim, config.experts, bias=False)
        self.gate_up = Weight(config.experts, 2 * config.hidden, config.dim)
        self.down = Weight(config.experts, config.dim, config.hidden)

    def feed(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        tokens = h.flatten(0, 1)
        logits = self.gate(tokens)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        p = logits.softmax(dim=-1)
        weights, chosen = p.topk(self.active, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        bins = torch.arange(p.shape[1], device=x.device)
        ends = torch.searchsorted(experts, bins, right=True).int()
        gate, up = grouped(tokens[order // self.active], self.gate_up.weight, ends).chunk(2, dim=-1)
        rows = grouped(F.silu(gate) * up, self.down.weight, ends) * weights.flatten()[order, None].to(gate.dtype)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        y = rows[back].unflatten(0, (-1, self.active)).sum(dim=1)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        usage = torch.stack((counts.to(p.dtype), p.sum(dim=0)))
        return x + y.view_as(h), usage, logits.logsumexp(dim=-1).square().sum()


class MoE(NanoEuler):
    """The same, with the router's two losses."""

    block, plain = MoEBlock, "Mixtral"

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, config = self.embedding(ids), self.config
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        usage: Any = 0.0
        squares: Any = 0.0
        for block in self.blocks:
            x, used, square = block(x, cos, sin)
            usage, squares = usage + used, squares + square
        rows = ids.numel() * len(self.blocks)
        balance, router_z = config.experts * (usage[0] * usage[1]).sum() / rows**2, squares / rows
        return self.loss(self.final_norm(x), targets) + config.balance * balance + config.router_z * router_z


class GPT2Block(torch.nn.Module):
    """A layer of GPT-2: LayerNorm, full attention, GELU by the tanh formula; dropout where nanoGPT has it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim, bias = config.dim, config.bias
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1 = torch.nn.LayerNorm(dim, config.norm_eps, bias=bias)
        self.qkv = torch.nn.Linear(dim, 3 * dim, bias=bias)
        self.out = torch.nn.Linear(dim, dim, bias=bias)
        self.norm2 = torch.nn.LayerNorm(dim, config.norm_eps, bias=bias)
        self.up = torch.nn.Linear(dim, 4 * dim, bias=bias)
        self.down = torch.nn.Linear(4 * dim, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = self.dropout if self.training else 0.0
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + F.dropout(self.out(a.transpose(1, 2).flatten(2)), rate)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), rate)


class GPT2(torch.nn.Module):
    """ids: (B, T), targets: (B, T, 1), -1 for none, to the mean nll. The head is the embedding.

    nanoGPT pads GPT-2's 50,257 ids to 50,304, a multiple of 64, since matrix products with an odd side are slow. So
    does this: `load` leaves the rows after the vocabulary 0, and the loss does not read their logits.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vocab, self.dropout = config.vocab, config.dropout
        self.embedding = torch.nn.Embedding(-(-config.vocab // 64) * 64, config.dim)
        self.positions = torch.nn.Embedding(config.context, config.dim)
        self.blocks = torch.nn.ModuleList(GPT2Block(config) for _ in range(config.layers))
        self.final_norm = torch.nn.LayerNorm(config.dim, config.norm_eps, bias=config.bias)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.embedding.weight).flatten(0, 1)
        return F.cross_entropy(logits[:, : self.vocab], targets.flatten(), ignore_index=-1)


class Llama(Trunk):
    """ids: (B, T), targets: (B, T, 1), -1 for none, to the mean nll. A tied head is the embedding."""

    plain, options = "Llama, or Qwen 2", ("qkv_bias",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not config.tied:
            self.heads = torch.nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.hidden(ids), targets)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, getattr(self, "heads", self.embedding).weight).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1)


MODELS: dict[str, type[torch.nn.Module]] = {"nanoeuler": NanoEuler, "gpt2": GPT2, "llama": Llama, "moe": MoE}


class TorchTraining:
    """A model and its optimizer on `device`, eager or through torch.compile.

    compiled: None for eager, else the mode of torch.compile: "default", or "reduce-overhead", which replays forward and
    backward as CUDA graphs.
    precision: "bf16" is autocast over float32 weights, with TF32 allowed for what stays in float32. threads: on a CPU.
    ddp: this process is one rank of torch.distributed, and gradients are averaged over all.
    regional: compile one layer, whose code all layers use, and the loss: bounds the time of compiling, for one more
    memory pass between layers.
    """

    def __init__(
        self,
        model: str,
        config: Any,
        precision: str,
        device: str,
        threads: int,
        compiled: str | None,
        adamw: AdamWConfig | None = None,
        ddp: bool = False,
        regional: bool = False,
    ) -> None:
        if model not in MODELS:
            raise UserError(f"--peer: {model} has no peer in PyTorch; there are {', '.join(MODELS)}. Leave out --peer")
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")
        self.device = torch.device(device)
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")
        self.model = MODELS[model](config).to(self.device, torch.float64 if precision == "fp64" else torch.float32)
        whole: Any = self.model
        if ddp:
            ranked = torch.nn.parallel.DistributedDataParallel
            whole = ranked(self.model, device_ids=[self.device], gradient_as_bucket_view=True)
        self.forward = torch.compile(whole, mode=compiled) if compiled and not regional else whole
        if compiled and regional:
            for block in self.model.blocks:
                block.compile(mode=compiled)
            vars(self.model)["loss"] = torch.compile(self.model.loss, mode=compiled)
        self.graphs = compiled == "reduce-overhead"
        ours = adamw or AdamWConfig()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": ours.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(ours.beta1, ours.beta2), eps=ours.eps, fused=True)

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Copy our weights, all of them, by name; a table that is padded here gets rows of zeros."""
        own = self.model.state_dict()
        if unknown := set(weights) ^ set(own):
            raise KeyError(f"the peer's parameters are not ours: {', '.join(sorted(unknown))}")
        with torch.no_grad():
            for name, value in weights.items():
                own[name].zero_()
                own[name].flatten()[: value.size].copy_(torch.from_numpy(value).flatten())

    def batch(self, found: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and targets on the device; a GPU takes them from pinned memory, and nothing waits for it."""
        ids, targets = torch.from_numpy(found.ids).long(), torch.from_numpy(found.targets).long()
        if self.device.type == "cpu":
            return ids, targets
        on_device = {"device": self.device, "non_blocking": True}
        return ids.pin_memory().to(**on_device), targets.pin_memory().to(**on_device)

    def step(self, ids: torch.Tensor, targets: torch.Tensor, lr: float) -> torch.Tensor:
        """One step; returns the loss before it, without waiting for a GPU."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()  # the last step's results may be overwritten
        with self.autocast:
            loss = self.forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        return loss.clone() if self.graphs else loss


class TorchPeer:
    """Training steps on `batches` in turn, which lie on the device from the start."""

    def __init__(self, training: TorchTraining, batches: Sequence[Batch]) -> None:
        self.training = training
        self.batches = [training.batch(b) for b in batches]

    def step(self, index: int) -> float | torch.Tensor:
        loss = self.training.step(*self.batches[index % len(self.batches)], LR)
        return loss.item() if self.training.device.type == "cpu" else loss
