"""What one trained model is, from its files: `python -m models show PATH`, or a name on the hub.

No weight is read. A model without a tokenizer is described too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tinyforge import checkpoint, tensors
from tinyforge.backends.meta import MetaBackend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.formats import gguf_file, gguf_model, hub, huggingface, llama2c, open_model
from tinyforge.formats.foreign import describe, is_foreign, open_weights
from tinyforge.formats.generation import FILE, GenerationConfig, read_generation
from tinyforge.formats.runs import NoTokenizer
from tinyforge.formats.tokenizers import find_tokenizer, template_in
from tinyforge.frozen_model import frozen_model
from tinyforge.infer.cache import array_bytes
from tinyforge.registry import ModelSpec
from tinyforge.report import count_of
from tinyforge.terminal import one_line
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.chat_templates import AnyTemplate, ChatTemplate
from tinyforge.tokenizers.ids import Ids
from tinyforge.tokenizers.vocabulary import texts_by_id

KINDS = {"Tokenizer": "byte-level BPE", "SentencePiece": "SentencePiece", "WordPiece": "WordPiece"}
EXCERPT = 200  # characters of a chat template


@dataclass(frozen=True)
class Described:
    """A model as its files describe it. tokenizer: None where there is none, and `missing` says why."""

    spec: ModelSpec
    config: ModelConfig
    names: str
    tokenizer: TextTokenizer | None
    template: AnyTemplate | None
    generation: GenerationConfig
    missing: str = ""
    stored: dict[str, list[int]] = field(default_factory=dict)


def show(path: Path) -> None:
    """Print the model at `path`. UserError for one that cannot be opened."""
    found = read(path)
    print(hub.called(path))
    for label, text in lines(found):
        print(f"{label:<14} {text}")


def read(path: Path) -> Described:
    if not is_foreign(path) or huggingface.is_adapter(path):
        opened = open_model(path)
        stored = stored_types(opened.path)
        return Described(
            opened.spec, opened.config, "", opened.tokenizer, opened.template, opened.generation, "", stored
        )
    weights = open_weights(path)
    spec, config, _ = describe(weights)
    names = ", ".join(weights.config.get("architectures", ()))
    tokenizer, template, missing = None, None, ""
    if spec.learns != "images":
        try:
            tokenizer = find_tokenizer(path, config.to_dict()["vocab"])
            template = template_in(path, tokenizer)
        except UserError as error:
            missing = str(error)
    return Described(spec, config, names, tokenizer, template, read_generation(path), missing, stored_types(path))


def stored_types(path: Path) -> dict[str, list[int]]:
    """Of each type of stored numbers: tensors, numbers, bytes."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for kind, shape, nbytes in _stored(path):
        for i, more in enumerate((1, math.prod(shape), nbytes)):
            found[kind][i] += more
    return dict(sorted(found.items(), key=lambda item: -item[1][2]))


def _stored(path: Path) -> Iterator[tuple[str, tuple[int, ...], int]]:
    if gguf_model.is_file(path):
        names = {int(kind): kind.name.lower() for kind in gguf_file.package().GGMLQuantizationType}
        for packed in gguf_file.read(path).tensors.values():
            yield names[packed.dtype], packed.shape, packed.nbytes
    elif llama2c.is_file(path):
        for shape, _ in open_weights(path).tensors.values():
            yield "f32", shape, 4 * math.prod(shape)
    else:
        folder = path if is_foreign(path) else checkpoint.latest(path)
        for file in sorted(folder.glob("*.safetensors")):
            if not file.name.startswith(checkpoint.OPTIMIZER):
                for tensor in tensors.read_entries(file).values():
                    yield tensor.dtype.lower(), tensor.shape, tensor.nbytes


def lines(found: Described) -> Iterator[tuple[str, str]]:
    """Labels and texts."""
    config = found.config.to_dict()
    yield "architecture", f"{found.spec.title}{f' ({found.names})' if found.names else ''}: {found.spec.summary}"
    yield "", ", ".join(f"{key} {value}" for key, value in config.items())
    build = partial(found.spec.build, found.config)
    count = frozen_model(partial(build, MetaBackend("fp32"))).buffer.count
    yield "parameters", f"{count:,}"
    total = sum(nbytes for _, _, nbytes in found.stored.values())
    for i, (kind, (number, values, nbytes)) in enumerate(found.stored.items()):
        bits = f"{8 * nbytes / values:.3g} bits a number" if values else "empty"
        yield (
            "" if i else "stored",
            f"{kind}: {count_of(number, 'tensor')}, {values:,} numbers, {nbytes:,} bytes, {bits}",
        )
    if len(found.stored) > 1:
        yield "", f"in all {total:,} bytes, {8 * total / count:.3g} bits a parameter"
    if "context" in config:
        yield "context", f"{config['context']:,} tokens"
    yield from _text_lines(found, config)
    settings = ", ".join(f"{name} {value}" for name, value in found.generation.fields.items())
    if "context" in config:
        none = f"no settings of its own ({'none in' if found.generation.content else 'no'} {FILE})"
        yield "generation", settings or none
    yield "memory", _memory(build)


def _text_lines(found: Described, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tokenizer, template = found.tokenizer, found.template
    if isinstance(tokenizer, NoTokenizer):
        yield "use", found.spec.use
        return
    if tokenizer is None or isinstance(tokenizer, Ids):
        if tokenizer or found.missing:
            yield "vocabulary", f"{config['vocab']:,} ids"
            yield "tokenizer", f"none: {one_line(found.missing) or 'the model takes ids'}"
        return
    yield "vocabulary", f"{config.get('vocab', tokenizer.vocab_size):,} ids, {tokenizer.vocab_size:,} of them tokens"
    specials = count_of(len(tokenizer.specials), "special token")
    yield "tokenizer", f"{KINDS.get(kind := type(tokenizer).__name__, kind)}, {specials}"
    if found.spec.learns != "text":
        yield "use", found.spec.use or "recipes/classify.py"
    elif template is None or template.name == "plain":
        yield "template", "none: a base model, it continues text"
    elif isinstance(template, ChatTemplate):
        for name, source in template.sources.items():
            text = " ".join(source.split())
            excerpt = text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
            yield "template", f"its own, {name}, {len(source):,} characters: {one_line(excerpt)}"
    else:
        yield "template", f"{template.name}, built in"
    if template is not None and template.name != "plain":
        texts, ends = texts_by_id(tokenizer), sorted(template.stop_ids(tokenizer))
        yield "ends of text", ", ".join(f"{texts.get(id, '')} ({id})".strip() for id in ends)


def _memory(build: partial[Any]) -> str:
    """What inference takes: weights by precision, and the cache of a text's tokens."""

    def model(precision: str, weights: str = "") -> Any:
        return frozen_model(partial(build, MetaBackend(precision)), weights)

    def megabytes(count: float) -> str:
        return f"{count / 1e6:,.1f} MB"

    plain = model("fp32")
    sizes = {
        "fp32": plain.buffer.nbytes,
        "bf16": model("bf16").buffer.nbytes,
        "--weights int8": model("fp32", "int8").buffer.nbytes,
    }
    text = f"weights {', '.join(f'{megabytes(size)} in {name}' for name, size in sizes.items())}"
    if not hasattr(plain, "make_cache"):
        return text
    context = plain.config.context
    size, longer = (array_bytes(vars(plain.make_cache(1, length))) for length in (1, 2))
    if longer == size:
        return f"{text}; a state of {megabytes(size)} in fp32, whatever the length of the text"
    each = longer - size
    return f"{text}; {each:,} bytes for each token of a text in fp32, {megabytes(each * context)} for all {context:,}"
