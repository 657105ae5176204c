"""Inference with a trained model: `logits`, `generate`, `Session`, `Conversation`, and their parts.

    from tinyforge.infer import Sampling, generate
    ids = list(generate(model, prompt, Sampling(temperature=0.8, seed=1)))

Names are imported on first use, so that a model can import this package's protocols at no cost.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyforge.infer.causal_lm import CausalLM as CausalLM
    from tinyforge.infer.causal_lm import logits as logits
    from tinyforge.infer.choose import make_decoder as make_decoder
    from tinyforge.infer.conversation import Conversation as Conversation
    from tinyforge.infer.generation import generate as generate
    from tinyforge.infer.generation import generate_batch as generate_batch
    from tinyforge.infer.sampling import Sampling as Sampling
    from tinyforge.infer.session import Session as Session
    from tinyforge.infer.stream import stream_text as stream_text

_MODULES = {
    "CausalLM": "causal_lm",
    "Conversation": "conversation",
    "Sampling": "sampling",
    "Session": "session",
    "generate": "generation",
    "generate_batch": "generation",
    "logits": "causal_lm",
    "make_decoder": "choose",
    "stream_text": "stream",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
