"""llama.cpp as PyPI's xllamacpp ships it: what it makes of a .gguf file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


class LlamaCpp:
    """A model in llama.cpp on one core, keys and values in float32. With weights of fewer bits than 16 it rounds the
    other factor of a product to 8 bits; with f32 it rounds nothing."""

    def __init__(self, file: Path, context: int = 512) -> None:
        package: Any = pytest.importorskip("xllamacpp", reason="the peer is llama.cpp: pip install xllamacpp")
        params = package.CommonParams()
        params.model.path, params.n_ctx, params.n_gpu_layers, params.n_parallel = str(file), context, 0, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = package.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = package.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup = params.fit_params = False
        params.verbosity = -1
        self.server = package.Server(params)

    def greedy(self, prompt: list[int], count: int, best: int = 2) -> tuple[list[int], list[dict[int, float]]]:
        """`count` tokens that follow the prompt, and at each place the logprobs of the `best` tokens by id."""
        found = self.server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": count,
                "temperature": 0,
                "n_probs": best,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        choice = (found if isinstance(found, dict) else json.loads(found))["choices"][0]
        content = choice["logprobs"]["content"] if choice["logprobs"] else []  # where all is part of a character
        return [place["id"] for place in content], [
            {one["id"]: one["logprob"] for one in place["top_logprobs"]} for place in content
        ]
