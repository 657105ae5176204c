"""The U-Net and its training step in PyTorch, the peer of benchmark.py: channels last, autocast, fused AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.training import CLIP, LR
from examples.diffusion.unet import Config
from tinyforge.optim import AdamWConfig
from tinyforge.train.objectives import Arrays


class Block(torch.nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (torch.nn.GroupNorm(4, channels) for _ in range(2))
        self.conv1, self.conv2 = (torch.nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h + shift[:, :, None, None])))


class UNet(torch.nn.Module):
    """As ours, see unet.py; x and target: (B, K, S, S)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, wide = config.width, 2 * config.width

        def conv(inputs: int, out: int, stride: int = 1) -> torch.nn.Conv2d:
            return torch.nn.Conv2d(inputs, out, 3, stride, 1)

        sizes = (width, wide, wide, wide, wide, width)
        self.time = torch.nn.Linear(config.features, 4 * width)
        self.label = torch.nn.Embedding(config.classes, 4 * width)
        self.blocks = torch.nn.ModuleList(map(Block, sizes))
        self.shifts = torch.nn.Linear(4 * width, sum(sizes))
        self.sizes = sizes
        self.conv_in, self.conv_out = conv(config.channels, width), conv(width, config.channels)
        self.down1, self.down2, self.up1, self.up2 = (
            conv(width, wide, 2),
            conv(wide, wide, 2),
            conv(wide, width),
            conv(wide, wide),
        )
        self.norm_out = torch.nn.GroupNorm(4, width)

    def forward(self, x: torch.Tensor, times: torch.Tensor, labels: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        shifts = self.shifts(F.silu(self.time(times) + self.label(labels))).split(self.sizes, dim=1)
        block1, block2, block3, block4, block5, block6 = self.blocks
        a = block1(self.conv_in(x), shifts[0])
        b = block2(self.down1(a), shifts[1])
        c = block4(block3(self.down2(b), shifts[2]), shifts[3])
        b = block5(self.up2(F.interpolate(c, scale_factor=2.0)) + b, shifts[4])
        a = block6(self.up1(F.interpolate(b, scale_factor=2.0)) + a, shifts[5])
        return F.mse_loss(self.conv_out(F.silu(self.norm_out(a))).float(), target)


class Training:
    """The model and its optimizer. mode: of torch.compile, None for eager. precision: "bf16" is autocast over float32
    weights, with TF32 allowed for what stays in float32. batches lie on the device from the start."""

    def __init__(
        self, config: Config, precision: str, device: str, mode: str | None, batches: Sequence[Arrays]
    ) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")
        torch.backends.cudnn.benchmark = True  # cuDNN tries its algorithms and takes the fastest
        self.device = torch.device(device)
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")
        self.model: Any = UNet(config).to(self.device, memory_format=torch.channels_last)
        self.forward = torch.compile(self.model, mode=mode) if mode else self.model
        self.graphs = mode == "reduce-overhead"
        ours = AdamWConfig()
        matrices, vectors = ([p for p in self.model.parameters() if (p.dim() > 1) == many] for many in (True, False))
        groups = [{"params": matrices, "weight_decay": ours.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, LR, (ours.beta1, ours.beta2), ours.eps, fused=True)
        self.batches = [self.placed(batch) for batch in batches]

    def placed(self, batch: Arrays) -> list[torch.Tensor]:
        x, times, labels, target = (torch.from_numpy(np.asarray(a)).to(self.device) for a in batch.given)
        return [x.permute(0, 3, 1, 2), times, labels.long(), target.permute(0, 3, 1, 2)]

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Copy our weights, all of them."""
        own = self.model.state_dict()
        names = {name: name.replace(".gain", ".weight") + ".weight" * (name == "label") for name in weights}
        if unknown := {*names.values()} ^ set(own):
            raise KeyError(f"the peer's parameters are not ours: {', '.join(sorted(unknown))}")
        with torch.no_grad():
            for name, value in weights.items():
                value = value.transpose(0, 3, 1, 2) if value.ndim == 4 else value
                own[names[name]].copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def step(self, index: int) -> Any:
        """One step; returns the loss before it, without waiting for a GPU."""
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self.autocast:
            loss = self.forward(*self.batches[index % len(self.batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()
