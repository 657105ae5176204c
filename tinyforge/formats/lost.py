"""What a conversion leaves out: files, keys and tensors of the source that the result does not have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tinyforge.files import read_json
from tinyforge.formats import generation, gguf_file, gguf_model, huggingface, tokenizers
from tinyforge.formats.weights import Recorded, Weights

FILES, CONFIG, METADATA, TENSORS = "files", "keys of config.json", "keys of the metadata", "tensors"
_IDS = tuple(f"{name}_id" for name in tokenizers.TOKENS)  # written by the names of their tokens
_TOKENIZER_CONFIG = (
    *("chat_template", "tokenizer_class", "added_tokens_decoder", "add_bos_token", "additional_special_tokens"),
    *tokenizers.TOKENS,
)


_IMPLIED = ("model_type", "dtype", "torch_dtype")  # of config.json: every format says them in its own way


def unread(path: Path, weights: Weights) -> dict[str, list[str]]:
    """What nothing here has read of another program's model, once it is opened, by kind."""
    found = {TENSORS: weights.ignored}
    if gguf_model.is_file(path):
        stored = gguf_file.read(path).metadata.unread
        found[METADATA] = [key for key in stored if not key.startswith(f"{tokenizers.TEMPLATE_KEY}.")]
    elif path.is_dir():
        found[FILES] = _unread_files(path)
        config = weights.config.unread if isinstance(weights.config, Recorded) else []
        found[CONFIG] = [key for key in config if key not in _IMPLIED]
    return found


def _unread_files(path: Path) -> list[str]:
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    names -= {huggingface.CONFIG, *tokenizers.published_files(path)}
    if huggingface.is_sharded(path):
        places = read_json(path / huggingface.INDEX, "the index of shards")["weight_map"]
        return sorted(names - {huggingface.INDEX, *places.values()})
    return sorted(names - {huggingface.SINGLE})


def lost(kinds: Mapping[str, Sequence[str]], published: Path | None, target: Path, format: str) -> Iterator[str]:
    """A line for each kind of what `unread` found and `target`, in `format`, does not have either."""
    left = {kind: list(names) for kind, names in kinds.items()}
    if format == "hf" and left.get(CONFIG):
        written = read_json(target / huggingface.CONFIG, "the config", digits=tokenizers.MORE_DIGITS)
        left[CONFIG] = [key for key in left[CONFIG] if key not in written]
    if format == "gguf":
        left[METADATA] = [key for key in left.get(METADATA, ()) if key not in gguf_file.read(target).metadata]
    if published and format in ("gguf", "llama2c"):
        kept = (*_TOKENIZER_CONFIG, *generation.GGUF, *_IDS, "do_sample") if format == "gguf" else ()
        for name in (tokenizers.CONFIG, generation.FILE):
            if (published / name).is_file():
                content = read_json(published / name, "the config", digits=tokenizers.MORE_DIGITS)
                # transformers 5's other name for additional_special_tokens, where it is a list.
                also = ["extra_special_tokens"] * (isinstance(content.get("extra_special_tokens"), list) and bool(kept))
                left[f"keys of {name}"] = sorted(content.keys() - {*kept, *also})
    for kind, names in left.items():
        if names:
            yield f"left out: {kind}: {', '.join(_together(names))}"


def _together(names: Sequence[str]) -> list[str]:
    """Names that differ in a number only, as one with the count: model.layers.*.self_attn.rotary_emb.inv_freq (30)."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
