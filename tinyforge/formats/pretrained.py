"""Trained models in and out, whatever the format.

    model, tokenizer = load_pretrained("HuggingFaceTB/SmolLM2-135M", get_backend())
    save_pretrained(model, tokenizer, "my-model")

Formats: "tinyforge", our own checkpoints; "hf", Hugging Face directories; "llama2c", llama2.c's .bin files; "gguf",
llama.cpp's .gguf files.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.files import write_whole
from tinyforge.formats import foreign, gguf_file, gguf_model, huggingface, llama2c, tokenizers
from tinyforge.formats.generation import FILE as GENERATION
from tinyforge.formats.generation import GGUF, OLLAMA, renamed
from tinyforge.formats.labels import Labels
from tinyforge.formats.opened import Loaded, Opened
from tinyforge.formats.runs import load, resolve_checkpoint, template_of
from tinyforge.invocation import as_typed
from tinyforge.layout import class_labels
from tinyforge.params import named
from tinyforge.registry import ModelSpec
from tinyforge.tensors import CALLED, DTYPES
from tinyforge.tokenizers.vocabulary import TextTokenizer

FORMATS = {"hf": DTYPES, "llama2c": ("f32",), "gguf": gguf_file.TYPES, "tinyforge": (*DTYPES, "int8")}
"""The types of weights that each format stores."""


def load_pretrained(
    path: str | Path, backend: Backend, tokenizer: str | Path | None = None
) -> tuple[Any, TextTokenizer]:
    """The model and the tokenizer at `path`, in any of the formats, or of that name on the hub (see `formats.hub`).

    tokenizer: its file or folder, if not next to the model. Raises UserError, naming the file, for what is damaged
    or not supported; nothing is loaded in part.
    """
    found = load(resolve_checkpoint(str(path)), backend, None if tokenizer is None else Path(tokenizer))
    return found.model, found.tokenizer


def save_pretrained(
    model: Any,
    tokenizer: TextTokenizer,
    path: str | Path,
    *,
    format: str = "",
    dtype: str = "f32",
    meta: Mapping[str, Any] | None = None,
    card: str = "",
    generation: Mapping[str, Any] | None = None,
    published: Path | None = None,
) -> None:
    """Write a model and its tokenizer for other programs and `load_pretrained`.

    format: one of FORMATS; by default llama2c for a path that ends in .bin, gguf for .gguf, else hf. dtype: one of the
    format's types. meta: of the run, for "tinyforge"; "gguf" and "hf" take the chat template from it. card: the text of
    README.md, by default a short one. generation: the content of generation_config.json, for "tinyforge" and "hf",
    which have none without it; "gguf" takes the sampling from it. published: the folder with the tokenizer's files as
    its base was published, which "hf" and "tinyforge" keep. Parts that the format cannot hold are left out, with
    a line on stderr. Raises UserError where the format cannot hold the model, where `path` exists, and where it cannot
    be written.
    """
    path, spec = Path(path), foreign.spec_of_model(model)
    format = check_target(path, format, dtype)
    template, tuned = template_of(meta or {}), "base" in (meta or {})
    ends = [] if isinstance(tokenizer, Labels) else tokenizers.ends_of(tokenizer, template, tuned)
    if format == "gguf":
        own_keys = tokenizers.for_gguf(tokenizer, model.config.vocab, template, ends) | renamed(generation or {}, GGUF)

        def beside() -> None:
            parameters = {"num_ctx": model.config.context, **renamed(generation or {}, OLLAMA)}
            tokenizers.write_modelfile(path, tokenizer, template, ends, parameters)

        gguf_model.write_file(path, foreign.weights_of(model), {"general.name": spec.title, **own_keys}, dtype, beside)
        return
    if format == "llama2c":
        if generation:
            print(f"note: left out: {GENERATION}, how the model is sampled by default", file=sys.stderr)
        place, weights = tokenizers.place_for_llama2c(path, tokenizer), foreign.weights_of(model)
        llama2c.check(path, weights.config)
        # The model last: a process killed in between must not leave a model without a tokenizer.
        tokenizers.write_for_llama2c(place, tokenizer)
        llama2c.write_file(path, weights)
        return
    content = {
        "kind": "pretrain",
        "step": 0,
        **(meta or {}),
        "format": checkpoint.FORMAT,
        "model": spec.name,
        "config": model.config.to_dict(),
        "tokenizer_hash": tokenizer.hash(),
    }
    card = card or short_card(model, format, dtype)
    if format == "tinyforge":
        tensors = named(model.buffer, model.buffer.masters, model.backend)
        texts = {checkpoint.CARD: card} | ({GENERATION: _json(generation)} if generation else {})
        files = {name: text.encode() for name, text in texts.items()}
        files |= {
            f"{checkpoint.PUBLISHED}/{name}": data for name, data in tokenizers.published_files(published).items()
        }
        checkpoint.export(path, tensors, tokenizer, content, files, dtype)
        return

    def others(directory: Path) -> None:
        write_whole(directory / "README.md", card)
        if published:
            return tokenizers.write_published(directory, published, tokenizer, template, ends, generation or {}, tuned)
        tokenizers.write_for_huggingface(directory, tokenizer, template, model.config.context, ends)
        if generation:
            # Where transformers finds the file, it looks for the ids that end a text in it alone.
            write_whole(directory / GENERATION, _json({**ids, **generation}))

    given = None if tuned else (meta or {}).get("special_ids")
    weights, ids = foreign.weights_of(model), tokenizers.special_ids(tokenizer, template, ends, given)
    weights.config.update(ids)
    if classes := content.get("classes"):
        weights.config.update(class_labels(classes))
    huggingface.write_directory(path, weights, dtype, others)


def save_opened(
    found: Opened | Loaded, model: Any, path: Path, card: str, format: str = "tinyforge", dtype: str = "f32"
) -> None:
    """`save_pretrained` of a model that was opened as `found`, with all that its files say besides the weights."""
    save_pretrained(
        model,
        found.tokenizer,
        path,
        format=format,
        dtype=dtype,
        meta=found.meta,
        card=card,
        generation=found.generation.content,
        published=found.published,
    )


def check_target(path: Path, format: str, dtype: str) -> str:
    """The format in which `save_pretrained` would write; raises UserError as it would."""
    by_name = "llama2c" if llama2c.is_file(path) else "gguf" if gguf_model.is_file(path) else "hf"
    format = format or by_name
    if format != by_name and (by_name != "hf" or format in ("gguf", "llama2c")):
        raise UserError(
            f"{path} is not a name for --format {format}: llama2c's files end in .bin, GGUF's in .gguf, "
            "and directories in neither"
        )
    if format not in FORMATS or dtype not in FORMATS[format]:
        known = "; ".join(f"{name} in {', '.join(types)}" for name, types in FORMATS.items())
        fix = "" if dtype != "int8" else "; use q8_0" if format == "gguf" else "; use --format tinyforge"
        raise UserError(f"cannot save as {format} in {dtype}{fix}; supported: {known}")
    if path.exists():
        raise UserError(f"{path} exists already; remove it, or choose another name")
    return format


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


USES = {
    "text": ("text-generation", "python -m tinyforge.chat --checkpoint"),
    "masked text": ("fill-mask", "python recipes/classify.py --base"),
    "images": ("image-classification", "python recipes/classify.py --model vit --base"),
}
"""What a model is for, by `ModelSpec.learns`: Hugging Face's pipeline tag, and one of our commands that takes it."""


def use_of(spec: ModelSpec) -> tuple[str, str]:
    """The two of USES, for a model of your own its `use`."""
    return USES.get(spec.learns, ("other", spec.use))


def next_command(spec: ModelSpec, target: Path) -> str:
    """What to type to use the model that was written to `target`."""
    return as_typed(f"{use_of(spec)[1]} {shlex.quote(str(target))}")


CARD = """---
library_name: {library}
pipeline_tag: {use}
---

# {title}, {count:,} parameters

{summary}. Written by tinyforge. Weights are {dtype}.

    {command} DIR

| {names} |
|{rule}|
| {values} |
"""


def short_card(model: Any, format: str, dtype: str) -> str:
    """A card that says what a model is, not what it learned from."""
    spec, config = foreign.spec_of_model(model), model.config.to_dict()
    use, command = use_of(spec)
    return as_typed(
        CARD.format(
            library="transformers" if format == "hf" else "tinyforge",
            title=spec.title,
            summary=spec.summary,
            dtype=CALLED[dtype],
            use=use,
            command=command,
            count=model.buffer.count,
            names=" | ".join(config),
            rule="|".join(["---"] * len(config)),
            values=" | ".join(map(str, config.values())),
        )
    )
