"""Trained models: loading one, and finding the default one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.config import ModelConfig
from tinyforge.errors import Parser, UserError
from tinyforge.files import parse_json
from tinyforge.formats import hub, lora
from tinyforge.formats.foreign import describe, is_foreign, open_weights
from tinyforge.formats.generation import NOTHING, read_generation
from tinyforge.formats.huggingface import is_adapter
from tinyforge.formats.labels import Labels
from tinyforge.formats.lost import unread
from tinyforge.formats.opened import Loaded, Opened
from tinyforge.formats.tokenizers import class_names, find_tokenizer, given_ids, template_in
from tinyforge.params import check_named
from tinyforge.quantised import KINDS
from tinyforge.registry import ModelSpec, default_model, find_model, models
from tinyforge.terminal import one_line
from tinyforge.tokenizers import TextTokenizer, load_tokenizer
from tinyforge.tokenizers.chat_templates import TEMPLATES, AnyTemplate, ChatTemplate, read_template

FINE_TUNED = ("sft", "dpo", "grpo")
"""The kinds of runs that make chat models."""


def load(
    path: Path,
    backend: Backend,
    tokenizer: Path | None = None,
    base: Path | None = None,
    *,
    frozen: bool = False,
    weights: str = "",
) -> Loaded:
    """The model that `open_model` finds; frozen, weights: see `Opened.build`."""
    return open_model(path, tokenizer, base).build(backend, frozen=frozen, weights=weights)


def open_model(path: Path, tokenizer: Path | None = None, base: Path | None = None) -> Opened:
    """The model of a checkpoint, of a run's newest checkpoint, or of another program: a Hugging Face directory, a .gguf
    file, a .bin file of llama2.c. An adapter, ours or PEFT's, is merged into its base. UserError if it is damaged.

    tokenizer: of another program's model, if it is not next to the model. base: of an adapter, if it is not where the
    adapter says.
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
            merged = open_model(base or lora.base_of(read.path, read.meta))
            return lora.merged_run(read, merged, template_of(read.meta))
        found = _open_checkpoint(read)
    if base is not None:
        raise UserError(f"{path} is not an adapter; leave out --base")
    return found


def write_adapter(run: Path, target: Path, base: Path | None = None) -> None:
    """Write the adapter of a run with --lora for PEFT. UserError for a run without one."""
    found = None if is_foreign(run) else checkpoint.load(run)
    if found is None or "lora" not in found.meta:
        raise UserError(f"{run} has no adapter to write; --adapter takes a run of recipes/sft.py --lora")
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
        "format": checkpoint.FORMAT,
        "kind": "pretrain" if template.name == "plain" else "sft",
        "step": 0,
        "model": spec.name,
        "config": config.to_dict(),
        **template_meta(template),
        **({"classes": classes} if classes else {}),
        **({"special_ids": ids} if (ids := given_ids(weights.config)) else {}),
        **({"source": name} if (name := hub.name_of(path)) else {}),
    }
    published = path if path.is_dir() and asked is None else None
    generation = read_generation(path)
    left = unread(path, weights)  # at last, when all has been read that ever is
    return Opened(path, spec, config, tokenizer, meta, template, tensors, generation, published, left)


def _open_checkpoint(found: checkpoint.Checkpoint) -> Opened:
    spec, config = model_of(found)
    if "tokenizer_hash" not in found.meta:
        return _without_tokenizer(found, spec, config)
    read: Callable[[Path], TextTokenizer] = Labels.load if spec.learns == "images" else load_tokenizer
    tokenizer = read(found.tokenizer_path)
    if tokenizer.hash() != found.meta.get("tokenizer_hash"):
        raise UserError(f"checkpoint {found.path}: tokenizer.json is not the one it was trained with; use another")
    # Fewer ids are fine: published models often have a few more than their tokenizers.
    if tokenizer.vocab_size > config.vocab:
        raise UserError(
            f"checkpoint {found.path}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab}; "
            "use another checkpoint of the run"
        )
    # A damaged config could ask for any amount of memory: compare it with the weights before allocating.
    check_named(spec.build(config, MetaBackend("fp32")).buffer.params, found.weights, found.path)
    tokenizer.reserve(config.vocab)
    tensors = found.weights.readers()
    published = found.path / checkpoint.PUBLISHED if (found.path / checkpoint.PUBLISHED).is_dir() else None
    generation = read_generation(found.path)
    if published and not generation.content:
        generation = read_generation(published)
    return Opened(
        found.path, spec, config, tokenizer, found.meta, template_of(found.meta), tensors, generation, published
    )


def _without_tokenizer(found: checkpoint.Checkpoint, spec: ModelSpec, config: ModelConfig) -> Opened:
    """A model that reads no tokens. UserError if it reads some: its checkpoint is damaged."""
    if spec.learns in ("text", "masked text", "images"):
        raise UserError(
            f"checkpoint {found.path}: meta.json has no 'tokenizer_hash'; use another checkpoint of the run"
        )
    check_named(spec.build(config, MetaBackend("fp32")).buffer.params, found.weights, found.path)
    tensors = found.weights.readers()
    return Opened(found.path, spec, config, NoTokenizer(spec), found.meta, TEMPLATES["plain"], tensors, NOTHING)


class NoTokenizer:
    """Stands for the tokenizer of a model that has none: every use is a UserError that says what the model does."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UserError(f"{self._spec.title} reads no text: it learns {self._spec.learns}; {self._spec.advice}")


def template_of(meta: Mapping[str, Any]) -> AnyTemplate:
    """The chat template in a checkpoint's meta.json. UserError for an unknown name."""
    if "chat_template" in meta:
        return ChatTemplate.from_dict(meta["chat_template"])
    name = str(meta.get("template", "alpaca" if meta.get("kind") in FINE_TUNED else "plain"))
    if name not in TEMPLATES:
        raise UserError(f"meta.json: its chat template is {name!r}; known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def template_meta(template: AnyTemplate) -> dict[str, Any]:
    """The entries of meta.json that `template_of` reads."""
    own = {"chat_template": template.to_dict()} if isinstance(template, ChatTemplate) else {}
    return {"template": template.name, **own}


def model_of(found: checkpoint.Checkpoint) -> tuple[ModelSpec, ModelConfig]:
    """The registered model of a checkpoint, the default one if it names none, and its config."""
    name = str(found.meta.get("model", default_model()))
    if name not in models():
        raise UserError(
            f"checkpoint {found.path} holds a model {name!r}, which is not registered; known: {', '.join(models())}; "
            "install the package that defines it"
        )
    spec = find_model(name)
    try:
        return spec, spec.config.from_dict(found.meta.get("config", {}))
    except UserError as error:
        says = f"names the model {name}" if "model" in found.meta else f"names no model, which means {name}"
        raise UserError(
            f"checkpoint {found.path}: meta.json {says}, but its config is another model's ({error}); known models: "
            f"{', '.join(models())}"
        ) from error


# --- which one to use -------------------------------------------------------------------------------------------------


def add_checkpoint_flag(p: Parser) -> None:
    """--checkpoint, for `resolve_checkpoint`."""
    p.flag(
        "--checkpoint",
        str,
        "a run, one of its checkpoints, another program's model, owner/name[@revision] on the Hugging Face hub, "
        "or a model of the repository: small, storyteller (default: the newest run under runs/, fine-tuned before "
        "pretrained; else a model of the repository)",
        metavar="MODEL",
    )


def add_computing_flags(p: Parser) -> None:
    """--backend, --precision and --weights, of what decodes."""
    p.flag("--backend", "numpy", "numpy, cupy (an NVIDIA GPU), webgpu (any GPU), or auto")
    p.flag("--precision", "fp32", "fp32, and on a GPU tf32 or bf16")
    add_weights_flag(p)


def add_weights_flag(p: Parser) -> None:
    """--weights, for `Opened.build`."""
    what = "store matrices in one byte per weight, or with int4 in four bits: less memory, and faster where a decoder "
    p.flag("--weights", str, f"{what}reads codes (default: as --precision says)", default="", choices=KINDS)


def add_template_flag(p: Parser) -> None:
    """--template and --template-variables, for `with_template`."""
    p.flag(
        "--template",
        str,
        f"chat template: {', '.join(TEMPLATES)}, or a file with a Jinja program (default: the model's own)",
        metavar="NAME|FILE",
    )
    p.flag(
        "--template-variables",
        str,
        "variables of the model's template, e.g. '{\"enable_thinking\": false}'",
        metavar="JSON",
    )


def with_template(loaded: Loaded, asked: str | None, variables: str | None = None) -> Loaded:
    """The model with the chat template that --template asks for, and with the variables of --template-variables.
    UserError if they cannot be read, or if the template takes none."""
    template = read_template(asked, loaded.template) if asked else loaded.template
    if variables:
        given = parse_json(variables.encode(), "--template-variables", "the variables", fix="write a JSON object")
        if not isinstance(template, ChatTemplate):
            raise UserError(f"--template-variables: the template {template.name} takes none; leave them out")
        template = replace(template, variables=given, _found={})
    return replace(loaded, template=template)


def shipped_models() -> dict[str, Path]:
    """The models that come with the repository, by the names that --checkpoint takes."""
    return {path.name: path for spec in models().values() for path in (spec.bundled, spec.bundled_for_chat) if path}


def resolve_checkpoint(asked: str | None, *, for_chat: bool = False) -> Path:
    """The path of the model to use: the one asked for, a path, the name of a model of the repository, or a name on the
    hub, which `hub.fetch` downloads; else the newest run (fine-tuned before pretrained); else the default model of the
    repository. UserError if there is none."""
    if asked:
        given = shipped_models()
        path, missing = Path(asked), not os.path.exists(asked)  # also for an invalid name
        if missing and asked in given:
            return given[asked]
        if missing and hub.is_name(asked):
            return hub.fetch(asked)
        if missing and given and asked == path.stem:  # not a path, nor another program's file
            raise UserError(
                f"no checkpoint in {asked}; train one first, e.g. python recipes/pretrain.py --out "
                f"{asked}, or name a model of the repository: {', '.join(given)}"
            )
        return path
    spec = find_model(default_model())
    found = newest_run(("tuned", "pretrain")) or (for_chat and spec.bundled_for_chat) or spec.bundled
    if found is None:
        raise UserError("no trained model under runs/; train one with python recipes/pretrain.py, or give --checkpoint")
    return found


def short_name(path: Path) -> str:
    """What clients and pages call a model: its name on the hub, its run's, or that of its file or folder."""
    if name := hub.name_of(path).partition("@")[0]:
        return name
    path = path.resolve()
    if path in checkpoint.steps(path.parent):
        path = path.parent
    return (path.stem if path.is_file() else path.name) or "model"


def newest_run(kinds: tuple[str, ...], root: Path = Path("runs")) -> Path | None:
    """The newest checkpoint under `root` of the first of `kinds` that has one: "pretrain", "sft", "dpo", "grpo", or
    "tuned" for any of the last three. Skips a damaged checkpoint with a line on stderr."""
    found = sorted(_checkpoints(root), reverse=True)
    for kind in kinds:
        for _, path, of_kind in found:
            if (of_kind == kind or (kind == "tuned" and of_kind in FINE_TUNED)) and _is_whole(path):
                return path
    return None


def _checkpoints(root: Path) -> Iterator[tuple[int, Path, str]]:
    """The time, the path and the kind of every checkpoint whose meta.json can be read, but for registered models that
    do not generate text."""
    for hashes in root.glob("**/step-*/hashes.json"):
        path = hashes.parent
        try:
            meta = checkpoint.read_meta(path)
            spec = models().get(str(meta.get("model", default_model())))
            if spec is None or spec.learns == "text":
                yield hashes.stat().st_mtime_ns, path, str(meta.get("kind"))
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
