"""Trained models: loading one, and finding the one to use when nobody names it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.hub.foreign import is_foreign, load_weights, open_weights, spec_of_model
from tinyforge.hub.tokenizers import find_tokenizer, template_in
from tinyforge.params import load_named
from tinyforge.registry import ModelSpec, default_model, find_model, models
from tinyforge.terminal import printable
from tinyforge.text import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class Loaded:
    """A trained model with its tokenizer.

    meta: as saved (`kind` is "pretrain" or "sft"). path: of the checkpoint. template: the name of the chat template
    that the model was fine-tuned with, "plain" for a base model.
    """

    model: Any
    tokenizer: TextTokenizer
    meta: dict[str, Any]
    path: Path
    template: str = "plain"


def load(path: Path, backend: Backend, tokenizer: Path | None = None) -> Loaded:
    """The model of a checkpoint, of the newest checkpoint in a run's directory, or of another program: a Hugging Face
    directory, a .gguf file, a .bin file of llama2.c. UserError for a faulty one.

    tokenizer: of another program's model, where it does not lie beside it.
    """
    if is_foreign(path):
        return _load_foreign(path, backend, tokenizer)
    if tokenizer is not None:
        raise UserError(f"{path} has a tokenizer of its own; leave out --tokenizer")
    return build(checkpoint.load(path), backend)


def _load_foreign(path: Path, backend: Backend, asked: Path | None) -> Loaded:
    model = load_weights(open_weights(path), backend)
    tokenizer = find_tokenizer(path, model.config.vocab, asked)
    template = template_in(path, tokenizer)
    meta = {
        "format": checkpoint.FORMAT, "kind": "pretrain" if template == "plain" else "sft", "step": 0,
        "model": spec_of_model(model).name, "config": model.config.to_dict(), "tokenizer_hash": tokenizer.hash(),
        "template": template,
    }  # fmt: skip
    return Loaded(model, tokenizer, meta, path, template)


def build(found: checkpoint.Checkpoint, backend: Backend, recompute: bool = False) -> Loaded:
    """The model of a checkpoint that has been read."""
    spec, config = model_of(found)
    tokenizer = load_tokenizer(found.tokenizer_path)
    if tokenizer.hash() != found.meta.get("tokenizer_hash"):
        raise UserError(f"checkpoint {found.path}: tokenizer.json is not the one it was trained with; use another")
    # Fewer is fine: published models often have a few ids more than their tokenizers.
    if tokenizer.vocab_size > config.vocab:
        raise UserError(
            f"checkpoint {found.path}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab}; "
            "use another checkpoint of the run"
        )
    model = spec.build(config, backend, recompute=recompute)
    load_named(model.buffer, model.buffer.masters, found.weights, backend, found.path)
    return Loaded(model, tokenizer, found.meta, found.path, template_of(found.meta))


def template_of(meta: Mapping[str, Any]) -> str:
    """The name of the chat template that a checkpoint's meta.json tells."""
    return str(meta.get("template", "alpaca" if meta.get("kind") == "sft" else "plain"))


def model_of(found: checkpoint.Checkpoint) -> tuple[ModelSpec, ModelConfig]:
    """The registered model that a checkpoint is of, the default one where it names none, and its config."""
    name = str(found.meta.get("model", default_model()))
    if name not in models():
        raise UserError(
            f"checkpoint {found.path}: it holds a model {name!r}, which is not registered; known: "
            f"{', '.join(models())}; install the package that defines it"
        )
    spec = find_model(name)
    try:
        return spec, spec.config.from_dict(found.meta.get("config", {}))
    except UserError as error:
        said = "says that it holds" if "model" in found.meta else "names no model, which stands for"
        raise UserError(
            f"checkpoint {found.path}: meta.json {said} a {name}, but its config is another model's ({error}); known "
            f"models: {', '.join(models())}"
        ) from error


# --- which one to use -------------------------------------------------------------------------------------------------


def add_checkpoint_flag(p: argparse.ArgumentParser) -> None:
    """--checkpoint, for `trained_model`."""
    p.add_argument("--checkpoint", metavar="DIR",
                   help="a run, one of its checkpoints, or another program's model (default: the newest run under "
                   "runs/, fine-tuned before pretrained; else the model that comes with the repository)")  # fmt: skip


def trained_model(asked: str | None) -> Path:
    """The path of the model to use: what was asked for, else the newest run (fine-tuned before pretrained), else the
    trained model that comes with the default one's code."""
    found = Path(asked) if asked else newest_run(("sft", "pretrain")) or find_model(default_model()).bundled
    if found is None:
        raise UserError("no trained model under runs/; train one with python recipes/pretrain.py, or give --checkpoint")
    return found


def newest_run(kinds: tuple[str, ...], root: Path = Path("runs")) -> Path | None:
    """The newest checkpoint under `root` of the first of `kinds` that has any ("pretrain", "sft").

    A checkpoint that is damaged is skipped, with a line on stderr.
    """
    found = sorted(_checkpoints(root), reverse=True)
    for kind in kinds:
        for _, path, of_kind in found:
            if of_kind == kind and _is_whole(path):
                return path
    return None


def _checkpoints(root: Path) -> Iterator[tuple[int, Path, str]]:
    """When it was written, where it lies, and its kind, of every checkpoint whose meta.json can be read."""
    for hashes in root.glob("**/step-*/hashes.json"):
        path = hashes.parent
        try:
            yield hashes.stat().st_mtime_ns, path, str(checkpoint.read_meta(path).get("kind"))
        except (OSError, UserError) as error:
            _skip(path, error)


def _is_whole(path: Path) -> bool:
    try:
        checkpoint.verify(path)
    except UserError as error:
        _skip(path, error)
        return False
    return True


def _skip(path: Path, error: Exception) -> None:
    print(printable(f"skipping {path}: {error}"), file=sys.stderr)
