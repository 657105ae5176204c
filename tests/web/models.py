"""Small models with random weights, as checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.formats import Loaded, load
from tinyforge.formats.runs import template_meta
from tinyforge.params import named, with_buffer
from tinyforge.registry import find_model
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.chat_templates import AnyTemplate, ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>")


LLAMA = {"dim": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "layers": 2, "hidden": 36, "rotary_dim": 4}


def tiny(path: Path, template: AnyTemplate | None = None, name: str = "llama", **options: object) -> Loaded:
    """Write a checkpoint with random weights and a tied head to `path`; returns the model with its weights in int8."""
    backend, spec = get_backend("numpy", "fp32", workers=1), find_model(name)
    tokenizer = Tokenizer([(104, 105)], SPECIALS)
    shape = LLAMA if name == "llama" else {}
    config = spec.config.from_dict({**shape, "context": 64, "vocab": tokenizer.vocab_size, **options})
    model = with_buffer(spec.build(config, backend), backend, np.random.default_rng(5), std=0.3)
    meta = {
        "format": checkpoint.FORMAT,
        "kind": "sft",
        "step": 0,
        "model": name,
        "config": config.to_dict(),
        "tokenizer_hash": tokenizer.hash(),
        **template_meta(template or ChatTemplate({"default": CHATML}, {"eos_token": "<|im_end|>"})),
    }
    checkpoint.export(path, named(model.buffer, model.buffer.masters, backend), tokenizer, meta, {}, "f32")
    return load(path, backend, frozen=True, weights="int8")
