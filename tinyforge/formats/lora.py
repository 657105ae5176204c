"""LoRA adapters in files, of our runs and of PEFT; both are merged into their base when it is loaded.

A run of `recipes/sft.py --lora` stores only A and B in its checkpoints; `meta["lora"]` holds the path of its base and
the hash of the base's weights. A PEFT directory is adapter_config.json and adapter_model.safetensors, with a pair of
matrices for each of Hugging Face's linear layers. Where one of our matrices is several of theirs (queries, keys and
values; gate and up), they share A, and B is split by rows, as the rows of B A are what each of them adds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge import checkpoint, tensors
from tinyforge.adapters import Adapters
from tinyforge.errors import UserError, errors_in
from tinyforge.files import read_json, write_whole
from tinyforge.formats import foreign, hub, huggingface
from tinyforge.formats.generation import read_generation
from tinyforge.formats.opened import Opened
from tinyforge.layout import Entry, require, setting
from tinyforge.ops.lora import lora_merge
from tinyforge.tokenizers.chat_templates import AnyTemplate

CONFIG, WEIGHTS, BASE = huggingface.ADAPTER_CONFIG, "adapter_model.safetensors", "base.json"
PREFIX = "base_model.model."
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "megatron_config",
    "use_qalora",
    "alora_invocation_tokens",
)
"""PEFT's options that are not supported here: refused unless they are off."""

Change = Callable[[np.ndarray], np.ndarray]
"""From a weight of the base to that weight with its adapter merged in."""


# --- of our runs


def describe(settings: Adapters, base: Opened, parameters: int, out: Path) -> dict[str, Any]:
    """The entry "lora" in the meta of a run's checkpoints; base: see `hub.reference`.

    parameters: of the base.
    """
    return {
        "parameters": parameters,
        "rank": settings.rank,
        "alpha": settings.alpha,
        "dropout": settings.dropout,
        "targets": list(settings.targets),
        **({"weights": settings.weights} if settings.weights else {}),
        "base": hub.reference(base.path, out),
        "base_sha256": base.fingerprint(),
    }


def noted(found: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The entry that `describe` made. UserError if it is damaged."""
    about, number = meta["lora"], (int, float)
    kinds: dict[str, Any] = {"base": str, "base_sha256": str, "rank": int, "alpha": number, "dropout": number}
    right = isinstance(about, dict) and all(isinstance(about.get(name), kind) for name, kind in kinds.items())
    if not right or about["rank"] < 1 or "\0" in about["base"]:
        raise UserError(
            f"checkpoint {found}: meta.json does not say which adapters it holds, on which base; use another checkpoint"
        )
    return about


def base_of(found: Path, meta: Mapping[str, Any]) -> Path:
    """The path of the base of a run's checkpoint. UserError if nothing is there."""
    run = found.parent if found in checkpoint.steps(found.parent) else found
    base = hub.referenced(noted(found, meta)["base"], run)
    if not base.exists():
        raise UserError(
            f"{found} is an adapter, but its base {base} is missing; put it back, or merge the two with "
            f"python -m tinyforge.formats convert {found} DIR --base PATH"
        )
    return base


def check_base(adapter: Path, base: Opened, expected: str) -> None:
    """UserError for a base other than the one that the adapter was trained on."""
    if (got := base.fingerprint()) != expected:
        raise UserError(
            f"{adapter} is an adapter for another base: {base.path} has weights of SHA-256 {got[:12]}..., it was "
            f"trained on {expected[:12]}...; give its own base"
        )


def merged_run(found: checkpoint.Checkpoint, base: Opened, template: AnyTemplate) -> Opened:
    """The base with the run's adapters merged in. template: the run's."""
    about = noted(found.path, found.meta)
    check_base(found.path, base, about["base_sha256"])
    scale, changes = about["alpha"] / about["rank"], {}
    for name, (a, b) in _pairs(found).items():
        changes[f"{name}.weight"] = partial(_merge, a, b, scale)
    if lost := sorted(changes.keys() - base.tensors.keys()):
        raise UserError(f"{found.path}: the base has no {lost[0]}, which an adapter is for; train the adapters again")
    # Without "lora": otherwise the merged model would be merged again.
    meta = {key: value for key, value in found.meta.items() if key != "lora"}
    return _merged(base, changes, found.path, meta, template)


def _pairs(found: checkpoint.Checkpoint) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of a run's checkpoint by the name of the linear map. UserError if they do not fit together."""
    pairs = {}
    for name in dict.fromkeys(name.rpartition(".lora_")[0] for name in found.weights if ".lora_" in name):
        a, b = (found.weights.get(f"{name}.lora_{which}") for which in "ab")
        if a is None or b is None or not a.ndim == b.ndim == 2 or len(a) != b.shape[1]:
            shapes = " and ".join("None" if x is None else str(x.shape) for x in (a, b))
            raise UserError(
                f"checkpoint {found.path}: A and B of {name} have the shapes {shapes}, expected (rank, inputs) and "
                f"(outputs, rank); use another checkpoint"
            )
        pairs[name] = a, b
    return pairs


def _merge(a: np.ndarray, b: np.ndarray, scale: float, weight: np.ndarray) -> np.ndarray:
    """Merge in float64, so that the sum is rounded once, to the model's type. UserError if the shapes do not fit."""
    if (len(b), a.shape[1]) != weight.shape:
        raise UserError(f"an adapter of {len(b)} x {a.shape[1]} on a weight of {weight.shape}; give its own base")
    weight, a, b = (x.astype(np.float64) for x in (weight, a, b))
    return lora_merge(weight, a, b, scale)


def _merged(
    base: Opened, changes: Mapping[str, Change], path: Path, meta: dict[str, Any], template: AnyTemplate
) -> Opened:
    def changed(name: str) -> np.ndarray:
        return changes[name](base.tensors[name]())

    tensors = {name: partial(changed, name) if name in changes else read for name, read in base.tensors.items()}
    own = read_generation(path)
    return replace(
        base,
        path=path,
        meta=meta,
        template=template,
        tensors=tensors,
        generation=own if own.content else base.generation,
    )


# --- of PEFT


def base_of_peft(path: Path) -> Path:
    """The base that a PEFT adapter names, a directory or a name on the hub. UserError if there is none."""
    config = read_json(path / CONFIG, "the adapter's config")
    named = str(config.get("base_model_name_or_path") or "")
    if hub.is_name(named):
        return hub.fetch(f"{named}@{config['revision']}" if config.get("revision") else named)
    if not named or not Path(named).exists():
        raise UserError(
            f"{path} is an adapter for {named or 'a base that it does not name'}, which is not here; merge the two "
            f"with python -m tinyforge.formats convert {path} DIR --base PATH"
        )
    return Path(named)


def merged_peft(path: Path, base: Opened) -> Opened:
    """The base with a PEFT adapter merged in. UserError for unsupported options, and for an adapter that does not fit
    the base."""
    if (path / BASE).is_file():  # written by us: the base is known by its weights
        check_base(path, base, str(read_json(path / BASE, "the hash of the base").get("sha256")))
    given = read_json(path / CONFIG, "the adapter's config")
    try:
        rank, scale = _read_config(given)
    except UserError as error:
        raise UserError(f"{path / CONFIG}: {str(error).removeprefix('config.json: ')}") from error
    with errors_in(path):
        changes = _read_changes(path, base, rank, scale)
    return _merged(base, changes, path, base.meta, base.template)


def _read_config(given: dict[str, Any]) -> tuple[int, float]:
    """The rank and the scale."""
    require(given, "peft_type", "LORA")
    require(given, "bias", "none")
    # The others, such as pissa, change the base, each time that PEFT puts the adapter on it.
    require(given, "init_lora_weights", True, False, None, "gaussian", "orthogonal", "eva")
    for name in UNSUPPORTED:
        if given.get(name):
            raise UserError(f"{name} is {given[name]!r}; supported: adapters without it")
    rank = setting(given, "r", int)
    if rank < 1:
        raise UserError(f"r is {rank}, expected at least 1")
    return rank, setting(given, "lora_alpha", float) / (
        rank**0.5 if setting(given, "use_rslora", bool, False) else rank
    )


def _read_changes(path: Path, base: Opened, rank: int, scale: float) -> dict[str, Change]:
    if not (path / WEIGHTS).is_file():
        raise UserError(f"{WEIGHTS} is missing; get it again (pickles, adapter_model.bin, are not read)")
    stored = tensors.read_header(path / WEIGHTS)
    entries = {e.theirs.removesuffix(".weight"): e for e in foreign.entries(base.spec, base.config) if e.ours}
    parts: dict[str, list[tuple[Entry, np.ndarray, np.ndarray]]] = {}
    for name in stored:
        found = NAME.fullmatch(name)
        entry = entries.get(found[1]) if found else None
        if found is None or entry is None or len(entry.shape) != 2:
            raise UserError(f"tensor {name} has no place in the base {base.path}, a {base.spec.title}; give its own")
        if found[2] == "B":
            continue
        other = name.replace(".lora_A.", ".lora_B.")
        if other not in stored:
            raise UserError(f"tensor {other} is missing; get the files again")
        outputs, inputs = reversed(entry.shape) if entry.transposed else entry.shape
        for tensor, shape in ((stored[name], (rank, inputs)), (stored[other], (outputs, rank))):
            if tensor.shape != shape:
                raise UserError(f"tensor {tensor.name} has shape {tensor.shape}, the base {base.path} asks for {shape}")
        parts.setdefault(entry.ours, []).append((entry, stored[name].read(), stored[other].read()))
    if 2 * sum(map(len, parts.values())) != len(stored):
        raise UserError("a lora_B without its lora_A; get the files again")

    def change(own: list[tuple[Entry, np.ndarray, np.ndarray]]) -> Change:
        def changed(weight: np.ndarray) -> np.ndarray:
            weight = weight.astype(np.float64)
            for entry, a, b in own:
                entry.at(weight)[...] = _merge(a, entry.in_our_order(b), scale, entry.at(weight))
            return weight

        return changed

    return {ours: change(own) for ours, own in parts.items()}


def write_peft(path: Path, found: checkpoint.Checkpoint, base: Opened) -> None:
    """Write a run's adapter for PEFT, to be loaded on the base that `convert` writes. UserError where `path`
    exists, and for a model without a Hugging Face form."""
    about, pairs = noted(found.path, found.meta), _pairs(found)
    check_base(found.path, base, about["base_sha256"])
    lazy: dict[str, tensors.Lazy] = {}
    modules, transposed = set(), False
    for entry in foreign.entries(base.spec, base.config):
        if (pair := pairs.get(entry.ours.removesuffix(".weight"))) and entry.ours.endswith(".weight"):
            layer, (a, b) = entry.theirs.removesuffix(".weight"), pair
            b = entry.in_their_order(entry.at(b))
            for which, matrix in (("A", a), ("B", b)):
                lazy[f"{PREFIX}{layer}.lora_{which}.weight"] = matrix.shape, partial(np.asarray, matrix)
            modules.add(re.sub(r".*\.\d+\.", "", layer))  # the part after the layer's number
            transposed = entry.transposed
    if base.spec.name == "mamba" and not modules <= {"mixer.in_proj", "mixer.x_proj"}:
        raise UserError(
            f"{found.path}: PEFT refuses adapters of Mamba's out and skips those of step; convert without --adapter, "
            "or train with --lora-targets input,select"
        )
    name, _, revision = hub.name_of(base.path).partition("@")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name or str(base.path.resolve()),
        "revision": revision or None,
        "r": about["rank"],
        "lora_alpha": about["alpha"],
        "lora_dropout": about["dropout"],
        "bias": "none",
        "target_modules": sorted(modules),
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }

    def others(directory: Path) -> None:
        write_whole(directory / BASE, json.dumps({"sha256": about["base_sha256"]}, indent=1) + "\n")

    huggingface.write_files(path, {CONFIG: config}, WEIGHTS, lazy, "f32", others)
