"""The training step of nanochat, a peer of `bench/train_step.py`: its model and its optimizer, from its own repository.

    git clone https://github.com/karpathy/nanochat

Nothing of it is here: --nanochat names the folder. Its model has our width and number of layers. Heads of 128, the
feed-forward, value embeddings and the head are as it has them, so it has other parameters, and counts its own FLOP.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinyforge.errors import UserError
from tinyforge.train.objectives import Batch

HEAD = 128
TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}
"""What it computes in, by our precision."""


class Nanochat:
    """Compiled steps on `batches` in turn, which lie on the device from the start; its loss is of the next token only.

    model: what counts its FLOP, as ours do. Raises UserError for a folder that does not hold nanochat, and for a width
    that is not made of its heads.
    """

    def __init__(
        self,
        folder: str,
        config: Any,
        seq_len: int,
        precision: str,
        device: str,
        threads: int,
        batches: Sequence[Batch],
    ) -> None:
        if precision not in TYPES:
            raise UserError(f"--nanochat computes in {', '.join(TYPES)}, --precision is {precision}; use one of them")
        if config.dim % HEAD:
            raise UserError(f"--nanochat: its heads have {HEAD} channels, the config's dim is {config.dim}")
        if not (Path(folder) / "nanochat" / "gpt.py").is_file():
            raise UserError(
                f"--nanochat {folder}: no nanochat/gpt.py there; clone https://github.com/karpathy/nanochat"
            )
        os.environ["NANOCHAT_DTYPE"] = TYPES[precision]  # read where it is imported
        sys.path.insert(0, str(Path(folder).resolve()))
        try:
            from nanochat.gpt import GPT, GPTConfig
        except ImportError as error:
            raise UserError(f"--nanochat {folder}: {error}; install what its pyproject.toml asks for") from None
        finally:
            del sys.path[0]
        torch.set_num_threads(threads)
        heads, self.device = config.dim // HEAD, torch.device(device)
        shape = {"sequence_len": seq_len, "vocab_size": config.vocab, "n_layer": config.layers, "n_embd": config.dim}
        torch.manual_seed(0)
        with torch.device("meta"):
            self.model = GPT(GPTConfig(**shape, n_head=heads, n_kv_head=heads, window_pattern="L"))
        self.model.to_empty(device=self.device)
        with redirect_stdout(sys.stderr):  # what it reports: our own output may be JSON
            self.model.init_weights()
            self.optimizer = self.model.setup_optimizer()
        self.model.flop_per_token = lambda length: self.model.estimate_flops()
        self.forward = torch.compile(self.model, dynamic=False)
        both = ((batch.ids, np.ascontiguousarray(batch.targets[..., 0])) for batch in batches)
        self.batches = [tuple(torch.from_numpy(x).long().to(self.device) for x in pair) for pair in both]

    def step(self, index: int) -> float | torch.Tensor:
        """One step; returns the loss before it, on a GPU without waiting for it."""
        loss = self.forward(*self.batches[index % len(self.batches)])
        loss.backward()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.item() if self.device.type == "cpu" else loss.detach()
