"""Trained models: loading one, and finding the one to use when nobody names it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.backends.phantom import PhantomBackend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.hub import lora
from tinyforge.hub.foreign import describe, is_foreign, open_weights
from tinyforge.hub.huggingface import is_adapter
from tinyforge.hub.opened import Loaded, Opened
from tinyforge.hub.tokenizers import class_names, find_tokenizer, template_in
from tinyforge.params import check_named
from tinyforge.quantised import FORMATS
from tinyforge.registry import ModelSpec, default_model, find_model, models
from tinyforge.terminal import one_line
from tinyforge.text import TextTokenizer, load_tokenizer
from tinyforge.text.labels import Labels

FINE_TUNED = ("sft", "dpo", "grpo")
"""The kinds of runs whose models answer."""


def load(
    path: Path, backend: Backend, tokenizer: Path | None = None, base: Path | None = None, *,
    frozen: bool = False, weights: str = "",
) -> Loaded:  # fmt: skip
    """The model that `open_model` finds; frozen, weights: see `Opened.build`."""
    return open_model(path, tokenizer, base).build(backend, frozen=frozen, weights=weights)


def open_model(path: Path, tokenizer: Path | None = None, base: Path | None = None) -> Opened:
    """The model of a checkpoint, of the newest checkpoint in a run's directory, or of another program: a Hugging Face
    directory, a .gguf file, a .bin file of llama2.c. An adapter, of a run of ours or of PEFT, is merged into its base.
    UserError for a faulty one.

    tokenizer: of another program's model, where it does not lie beside it. base: of an adapter, where it does not lie
    where the adapter says.
    """
    if is_adapter(path):
        return lora.merged_peft(path, open_model(base or lora.base_of_peft(path), tokenizer))
    if is_foreign(path):
        found = _open_foreign(path, tokenizer)
    elif tokenizer is not None:
        raise UserError(f"{path} has a tokenizer of its own; leave out --tokenizer")
    else:
        read = checkpoint.load(path)
        if "lora" in read.meta:
            return lora.merged_run(read, open_model(base or lora.base_of(read.path, read.meta)))
        found = _open_checkpoint(read)
    if base is not None:
        raise UserError(f"{path} is no adapter; leave out --base")
    return found


def write_adapter(run: Path, target: Path, base: Path | None = None) -> None:
    """Write the adapter of a run with --lora for PEFT. Raises UserError for a run that has none."""
    found = None if is_foreign(run) else checkpoint.load(run)
    if found is None or "lora" not in found.meta:
        raise UserError(f"{run} has no adapter of ours to write; --adapter takes a run of recipes/sft.py --lora")
    lora.write_peft(target, found, open_model(base or lora.base_of(found.path, found.meta)))


def _open_foreign(path: Path, asked: Path | None) -> Opened:
    weights = open_weights(path)
    spec, config, tensors = describe(weights)
    classes = class_names(weights.config, getattr(config, "classes", 0))
    if spec.learns == "images":
        tokenizer: TextTokenizer = Labels(classes)
    else:
        tokenizer = find_tokenizer(path, config.vocab, asked)
        tokenizer.reserve(config.vocab)
    template = template_in(path, tokenizer)
    meta = {
        "format": checkpoint.FORMAT, "kind": "pretrain" if template == "plain" else "sft", "step": 0,
        "model": spec.name, "config": config.to_dict(), "tokenizer_hash": tokenizer.hash(), "template": template,
        **({"classes": classes} if classes else {}),
    }  # fmt: skip
    return Opened(path, spec, config, tokenizer, meta, template, tensors)


def _open_checkpoint(found: checkpoint.Checkpoint) -> Opened:
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
    # A damaged config can ask for more memory than there is: it is compared with the weights before any is taken.
    check_named(spec.build(config, PhantomBackend("fp32")).buffer.params, found.weights, found.path)
    tokenizer.reserve(config.vocab)
    return Opened(
        found.path, spec, config, tokenizer, found.meta, template_of(found.meta), lambda: iter(found.weights.items())
    )


def template_of(meta: Mapping[str, Any]) -> str:
    """The name of the chat template that a checkpoint's meta.json tells."""
    return str(meta.get("template", "alpaca" if meta.get("kind") in FINE_TUNED else "plain"))


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
                   help="a run, one of its checkpoints, another program's model, or one that comes with the "
                   "repository: small, storyteller (default: the newest run under runs/, fine-tuned before pretrained; "
                   "else one that comes with the repository)")  # fmt: skip


def add_weights_flag(p: argparse.ArgumentParser) -> None:
    """--weights, for `Opened.build`."""
    p.add_argument("--weights", default="", choices=tuple(FORMATS),
                   help="keep the matrices in one byte a weight: less memory, and on a GPU less time for one text "
                   "(default: as --precision says)")  # fmt: skip


def trained_model(asked: str | None, *, for_chat: bool = False) -> Path:
    """The path of the model to use: what was asked for, a path or the name of a model that comes with the code; else
    the newest run (fine-tuned before pretrained); else the trained model that comes with the default one's code."""
    if asked:
        given = {path.name: path for spec in models().values() for path in (spec.bundled, spec.storyteller) if path}
        return given[asked] if asked in given and not Path(asked).exists() else Path(asked)
    spec = find_model(default_model())
    found = newest_run(("tuned", "pretrain")) or (for_chat and spec.storyteller) or spec.bundled
    if found is None:
        raise UserError("no trained model under runs/; train one with python recipes/pretrain.py, or give --checkpoint")
    return found


def newest_run(kinds: tuple[str, ...], root: Path = Path("runs")) -> Path | None:
    """The newest checkpoint under `root` of the first of `kinds` that has any: "pretrain", "sft", "dpo", "grpo", or
    "tuned", any of the last three.

    A checkpoint that is damaged is skipped, with a line on stderr.
    """
    found = sorted(_checkpoints(root), reverse=True)
    for kind in kinds:
        for _, path, of_kind in found:
            if (of_kind == kind or (kind == "tuned" and of_kind in FINE_TUNED)) and _is_whole(path):
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
    print(one_line(f"skipping {path}: {error}"), file=sys.stderr)
