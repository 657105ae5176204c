"""Hugging Face model directories: config.json and safetensors, in one file or in shards with an index.

`tinyforge.tokenizers` reads the tokenizer's files; each model's hf.py says what the tensors mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinyforge import tensors
from tinyforge.errors import UserError
from tinyforge.files import MORE_DIGITS, folder_written_whole, read_json, shown, write_whole, writing
from tinyforge.formats import mxfp4
from tinyforge.formats.weights import Recorded, Weights

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"


def is_directory(path: Path) -> bool:
    """Whether `path` looks like a Hugging Face model: all of them have a config.json."""
    return (path / CONFIG).is_file()


def is_adapter(path: Path) -> bool:
    """Whether `path` looks like a PEFT adapter."""
    return (path / ADAPTER_CONFIG).is_file()


def open_directory(path: Path) -> Weights:
    """The config and the tensors of a directory; the tensors are not read yet.

    Raises UserError for a directory without safetensors, a damaged file, a shard that is missing or elsewhere, and
    weights that another program has quantised, but for MXFP4.
    """
    config = Recorded(read_json(path / CONFIG, "the config", digits=MORE_DIGITS))
    quantised = config.get("quantization_config")
    method = _method(quantised) if isinstance(quantised, dict) else quantised
    if quantised and method != "mxfp4":
        raise UserError(
            f"{path}: config.json has a quantization_config: the weights are in the format of {shown(method)}, which "
            "is not read; get the model that they were made from, or a .gguf file of it"
        )
    if is_sharded(path):
        found = _sharded(path)
    elif (path / SINGLE).is_file():
        found = tensors.read_header(path / SINGLE)
    else:
        pickles = sorted(p.name for p in path.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        what = f"{pickles[0]} is a pickle, which can run code when it is read" if pickles else "it holds no weights"
        raise UserError(f"{path}: {what}; supported: {SINGLE}, or shards with {INDEX}")
    if method == "mxfp4":
        return Weights(path, config, mxfp4.joined(found))
    return Weights(path, config, {name: (tensor.shape, tensor.read) for name, tensor in found.items()})


def _method(quantised: Mapping[str, Any]) -> Any:
    """The program that quantised the weights; bitsandbytes did not name itself before 2023."""
    known = any(quantised.get(key) for key in ("load_in_8bit", "load_in_4bit"))
    return quantised.get("quant_method", "bitsandbytes" if known else None)


def is_sharded(path: Path) -> bool:
    """Whether the weights are in shards. Next to one file with all of them, as transformers too reads first, an index
    says nothing."""
    return (path / INDEX).is_file() and not (path / SINGLE).is_file()


def _sharded(path: Path) -> dict[str, tensors.Tensor]:
    places = read_json(path / INDEX, "the index of shards").get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{path / INDEX} has no weight_map; get the file again")
    shards: dict[str, dict[str, tensors.Tensor]] = {}
    found = {}
    for name, shard in places.items():
        # A plain name: an index must not lead to files outside its directory.
        if not isinstance(shard, str) or shard != os.path.basename(shard) or "\\" in shard or shard in ("", ".", ".."):
            raise UserError(
                f"{path / INDEX}: {name} is in {shard!r}, expected the name of a file in the same directory"
            )
        if shard not in shards:
            shards[shard] = tensors.read_entries(path / shard)
        if name not in shards[shard]:
            raise UserError(f"{path / shard} lacks {name}, which {INDEX} says it has; get both again")
        found[name] = shards[shard][name]
    return tensors.with_scales(found)


def write_directory(path: Path, weights: Weights, dtype: str, others: Callable[[Path], Any] | None = None) -> None:
    """Write a directory, whole or not at all. others(directory) writes the tokenizer's files and a card.

    Raises UserError where `path` exists or cannot be written.
    """
    config = {**weights.config, "dtype": {"f32": "float32", "bf16": "bfloat16"}[dtype]}
    write_files(path, {CONFIG: config}, SINGLE, weights.tensors, dtype, others)


def write_files(
    path: Path,
    configs: Mapping[str, Any],
    file: str,
    lazy: Mapping[str, tensors.Lazy],
    dtype: str,
    others: Callable[[Path], Any] | None = None,
) -> None:
    """Write a directory of JSON files, by name, and one safetensors file; as `write_directory`."""
    if path.exists():
        raise UserError(f"{path} exists already; remove it, or choose another directory")
    with writing(path), folder_written_whole(path) as partial:
        for name, content in configs.items():
            write_whole(partial / name, json.dumps(content, indent=2) + "\n")
        if others:
            others(partial)
        tensors.write(partial / file, lazy, dtype)
