"""The models that commands and recipes work with. Each is registered once; nothing else lists models.

A model registers as a `ModelSpec`. The package `tinyforge.models` lists its own in `SPECS`; another package brings its
own by an entry point of the group `tinyforge.models`:

    [project.entry-points."tinyforge.models"]
    mymodel = "mypackage.mymodel:SPEC"
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError

GROUP = "tinyforge.models"
HOME = "tinyforge.models"


@dataclass(frozen=True)
class Defaults:
    """Settings with which a preset trains well, e.g. {"lr": 1e-3}, and where they come from, for the user to read.
    own_text: AdamW's rate with --data, where the recipe's suits the built-in corpus only. other: those with another
    optimizer than the one in `settings`."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    own_text: float | None = None
    other: Defaults | None = None

    def with_optimizer(self, name: str | None) -> Defaults:
        """Those for this optimizer; None for the preset's own."""
        return self if self.other is None or name in (None, self.settings["optimizer"]) else self.other

    def of(self, data: bool, optimizer: str | None) -> Mapping[str, Any]:
        adamw = optimizer in (None, "adamw")
        return {**self.settings, **({"lr": self.own_text} if self.own_text and data and adamw else {})}


SMALL = Defaults({}, "better on real text than 0.004", own_text=2e-3)
"""Of presets of some million parameters; measured in docs/training.md."""


def gpt3_rate(rate: float, size: str) -> Defaults:
    """The peak rate of GPT-3's model of that size.

    Source: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1; from 0.5 million tokens a batch.
    """
    return Defaults({"lr": rate, "warmup": 0.05}, f"as GPT-3's model of {size} parameters")


@dataclass(frozen=True)
class ModelSpec:
    """A model of the zoo.

    name: for --model and checkpoints. title: for people. build: the class, called as build(config, backend, *,
    values=None, recompute=""); it passes values on to its `ParamBuffer`. For adapters, an op's name is its path in the
    model: "blocks.0.qkv". config: the class of its configs. presets: configs by name, the first is the default.
    summary: one line. hf: the module that maps Hugging Face weights, as "package.module"; empty if there is none.
    architectures: the names in Hugging Face's config.json that it reads, or each with how many of the model's options
    it has, sizes apart. documents: whether the model's forward takes `documents`, for --document-mask. blocks: whether
    it can be built with recompute="blocks". fp8: whether --precision fp8 applies to it. bundled: a small trained
    checkpoint that comes with the model's code, for commands that need a model when nothing has been trained yet;
    bundled_for_chat: another, which chat takes then. learns: "text", next tokens, for recipes/pretrain.py; "masked
    text", masked tokens there, and classes of texts in recipes/classify.py; "images", classes of images there; or what
    another recipe teaches it, in words. use: for such a model, the command that uses it, which messages of other
    commands name. pretraining: by preset, the defaults of recipes/pretrain.py that differ from its own; under "" those
    of presets that are not listed.

    For docs/models.md, and required by the tests for every model in the checkout: source, the paper; backward, what is
    new in its gradients, a sentence or two. trained: training results by name, each "FILE#a/b/c", a place in a JSON
    file of docs/results.
    """

    name: str
    title: str
    build: Callable[..., Any]
    config: type[Any]
    presets: Mapping[str, Any]
    summary: str = ""
    hf: str = ""
    architectures: tuple[str, ...] | Mapping[str, int] = ()
    documents: bool = False
    blocks: bool = False
    fp8: bool = False
    bundled: Path | None = None
    bundled_for_chat: Path | None = None
    learns: str = "text"
    use: str = ""
    pretraining: Mapping[str, Defaults] = field(default_factory=dict)
    source: str = ""
    backward: str = ""
    trained: Mapping[str, str] = field(default_factory=dict)

    @property
    def advice(self) -> str:
        """For a command that this model is not for: what to do."""
        return f"use it by {self.use}" if self.use else "use recipes/classify.py, or another model"

    def pretraining_of(self, preset: str) -> Defaults:
        return self.pretraining.get(preset) or self.pretraining.get("") or Defaults()

    def check_recompute(self, how: str) -> None:
        """Raise UserError if the model cannot be built with this recomputation."""
        if how == "blocks" and not self.blocks:
            able = ", ".join(spec.name for spec in models().values() if spec.blocks)
            raise UserError(
                f"--recompute blocks: {self.title} has no blocks that can be recomputed; leave it out, "
                f"or use one of {able}"
            )

    def check_precision(self, name: str) -> None:
        """Raise UserError if the model cannot be trained in this precision."""
        if name == "fp8" and not self.fp8:
            able = ", ".join(spec.name for spec in models().values() if spec.fp8)
            raise UserError(f"--precision fp8: {self.title} has no products in FP8; use bf16 or fp32, or one of {able}")


@cache
def models() -> dict[str, ModelSpec]:
    """Every registered model by name, those of the checkout first. The first is the default of --model."""
    found: dict[str, ModelSpec] = {}
    if importlib.util.find_spec(HOME) is not None:
        found |= {spec.name: spec for spec in getattr(importlib.import_module(HOME), "SPECS", ())}
    for point in entry_points(group=GROUP):
        if point.name not in found:
            found[point.name] = point.load()
    return found


def register(spec: ModelSpec) -> None:
    """Register a model in this process: for scripts and notebooks, which have no entry points."""
    models()[spec.name] = spec


def default_model() -> str:
    return next(iter(models()))


def next_token_model(name: str) -> ModelSpec:
    """The model of that name. Raises UserError unless it predicts next tokens."""
    spec = find_model(name)
    if spec.learns != "text":
        raise UserError(f"{spec.title} learns {spec.learns} and cannot continue text; {spec.advice}")
    return spec


def default_classifier() -> str:
    """The first registered model that learns classes of texts, else of images, else the default."""
    found = {spec.learns: spec.name for spec in reversed(models().values())}
    return found.get("masked text") or found.get("images") or default_model()


def find_model(name: str) -> ModelSpec:
    """The model of that name. Raises UserError, listing the known names, if there is none."""
    found = models().get(name)
    if found is None:
        raise UserError(f"unknown model {name!r}; known: {', '.join(models())}")
    return found
