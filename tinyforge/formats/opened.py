"""A trained model that is not built yet: its description, and its weights one by one, from any format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.adapters import Adapted, Adapters
from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.formats.generation import NOTHING, GenerationConfig
from tinyforge.frozen_model import frozen_model
from tinyforge.op import Recompute
from tinyforge.params import ParamBuffer
from tinyforge.registry import ModelSpec, default_model, next_token_model
from tinyforge.tensors import writer_of
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.chat_templates import TEMPLATES, AnyTemplate
from tinyforge.tokenizers.vocabulary import start_ids

Tensors = Mapping[str, Callable[[], np.ndarray]]
"""A model's weights, each by our parameter's name: a function that reads it, as float32 or float64."""


@dataclass(frozen=True)
class Loaded:
    """A trained model with its tokenizer.

    meta: as saved (`kind` is "pretrain", "sft", "dpo" or "grpo"). path: of the checkpoint. template: the chat template
    of its fine-tuning, "plain" for a base model. generation: how it is sampled by default. published: the folder with
    the tokenizer's files as they were published, if it was.
    """

    model: Any
    tokenizer: TextTokenizer
    meta: dict[str, Any]
    path: Path
    template: AnyTemplate = TEMPLATES["plain"]
    generation: GenerationConfig = NOTHING
    published: Path | None = None

    def generate(self, text: str, **sampling: Any) -> str:
        """The text that follows `text`, up to its end: a token that ends a document or a reply, or max_tokens.

        The model reads the token that begins a text first, if it has one. sampling: fields of `Sampling`, such as
        temperature=0 for the most likely text, seed, max_tokens; the others as the model's generation_config.json says.
        Raises UserError for a model that continues no text.
        """
        from tinyforge.infer import generate

        next_token_model(str(self.meta.get("model", default_model())))
        ends = frozenset(self.tokenizer.specials.values()) | self.template.stop_ids(self.tokenizer)
        ids = start_ids(self.tokenizer) + self.tokenizer.encode(text)
        return self.tokenizer.decode(list(generate(self.model, ids, self.generation.sampling(**sampling), ends)))


@dataclass(frozen=True)
class Opened:
    """A trained model, read and checked but not built; see `Loaded`. unread: of another program's model, the files,
    keys and tensors that nothing here has read, by kind."""

    path: Path
    spec: ModelSpec
    config: ModelConfig
    tokenizer: TextTokenizer
    meta: dict[str, Any]
    template: AnyTemplate
    tensors: Tensors
    generation: GenerationConfig
    published: Path | None = None
    unread: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def build(
        self,
        backend: Backend,
        recompute: Recompute = "",
        adapters: Adapters | None = None,
        *,
        frozen: bool = False,
        weights: str = "",
    ) -> Loaded:
        """Build the model with its weights. With `adapters` these are frozen, and the adapters' own are still zero.

        frozen: for inference, without master weights and gradients. weights: "int8" or "fp8" for a frozen model with
        matrices in one byte per weight.
        """
        make: Callable[..., Any] = partial(self.spec.build, self.config, backend, recompute=recompute)
        model = Adapted(make, adapters) if adapters else frozen_model(make, weights) if frozen or weights else make()
        fill(model.buffer, self.tensors, self.path)
        return Loaded(
            model, self.tokenizer, self.meta, self.path, self.template, self.generation, published=self.published
        )

    def inputs(self) -> list[str]:
        """SHA-256 of each file of text that the model, or one before it, has learned from, as far as it is known."""
        runs = (self.meta, *reversed(self.meta.get("stages", ())), self.meta.get("base", {}))
        return list(dict.fromkeys(str(digest) for run in runs for digest in run.get("inputs", ())))

    def fingerprint(self) -> str:
        """SHA-256 of the weights in float32 under our names, in hexadecimal; the format does not matter."""
        parts = sorted(
            f"{name} {(value := read()).shape} {hashlib.sha256(np.ascontiguousarray(value, '<f4').data).hexdigest()}"
            for name, read in self.tensors.items()
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def fill(buffer: ParamBuffer, tensors: Tensors, source: Path) -> None:
    """Set a model's own parameters. UserError where one is missing or has another shape."""
    left = {p.name: p for p in buffer.frozen or buffer.params}
    for name, read in tensors.items():
        if (p := left.pop(name, None)) is None:
            continue
        into = None if buffer.masters_elsewhere else getattr(read, "into", None) or writer_of(read)
        if into is not None:
            into(p.stored if p.weights else buffer.view(buffer.frozen_values if p.frozen else buffer.masters, p))
            continue
        if (value := read()).shape != p.shape:
            raise UserError(f"checkpoint {source}: {name} has {value.shape}, the model expects {p.shape}")
        buffer.set_master(p, value)
    for p in left.values():
        raise UserError(f"checkpoint {source}: {p.name} has nothing, the model expects {p.shape}")
    buffer.publish()
