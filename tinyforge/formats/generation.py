"""generation_config.json, next to a model's weights: how its text is sampled where the user does not say.

    {"do_sample": true, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.05}

The file is transformers'; vLLM reads it too. Used are the keys of FIELDS, and `do_sample`, where false is greedy; the
others are kept in conversions. A .gguf file has some of them in its metadata, under llama.cpp's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyforge.errors import UserError
from tinyforge.files import MORE_DIGITS, read_json, shown
from tinyforge.formats import gguf_file, gguf_model

if TYPE_CHECKING:  # and later in functions: `tinyforge --help` imports this package, but not tinyforge.infer
    from tinyforge.infer.sampling import Sampling

FILE = "generation_config.json"
SAMPLED = {key: key for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
FIELDS = {**SAMPLED, "max_new_tokens": "max_tokens"}
"""The file's keys, and the fields of `Sampling` that they set."""
_GGUF = {**SAMPLED, "temperature": "temp", "repetition_penalty": "penalty_repeat"}
GGUF = {key: f"general.sampling.{name}" for key, name in _GGUF.items()}
"""The file's keys as a .gguf file's metadata has them."""
OLLAMA = {**SAMPLED, "repetition_penalty": "repeat_penalty"}
"""And as Ollama's Modelfile has them."""
FIX = "correct it, or remove the file"


@dataclass(frozen=True)
class GenerationConfig:
    """content: of the whole file, {} where there is none, and of a .gguf file what the file would say. fields: the
    fields of `Sampling` that it sets."""

    content: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self, default: Sampling | None = None, **given: Any) -> Sampling:
        """The fields given; the others as the file says; those that it leaves out as in `default`, or as built in."""
        from tinyforge.infer.sampling import Sampling

        return replace(default or Sampling(), **{**self.fields, **given})


NOTHING = GenerationConfig()
"""Of a model without the file."""


def read_generation(path: Path) -> GenerationConfig:
    """The file in the directory of a model, or what a .gguf file says. UserError, naming file and key, for a value that
    cannot be."""
    if gguf_model.is_file(path):
        return _read_gguf(path)
    file = path / FILE
    if not file.is_file():
        return NOTHING
    content = read_json(file, "the generation config", fix=FIX, digits=MORE_DIGITS)
    fields = _fields(file, content)
    sample = content.get("do_sample")
    if not isinstance(sample, bool | None):
        raise UserError(f"{file}: do_sample is {shown(sample)}, expected true or false; {FIX}")
    if sample is False:
        fields["temperature"] = 0.0
    return GenerationConfig(content, fields)


def renamed(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int | float]:
    """The file's settings under other names: GGUF or OLLAMA."""
    given = {key: content[key] for key in names if content.get(key) is not None}
    if content.get("do_sample") is False:
        given["temperature"] = 0.0
    return {names[key]: value if key == "top_k" else float(value) for key, value in given.items()}


def _read_gguf(path: Path) -> GenerationConfig:
    stored = gguf_file.read(path).metadata
    # A float32 of 0.95 is 0.95 again.
    content = {
        key: float(f"{value:.7g}") if isinstance(value := stored[own], float) else value
        for key, own in GGUF.items()
        if own in stored
    }
    if not content:
        return NOTHING
    for key in {"temperature", "top_k"} & content.keys():
        if isinstance(value := content[key], int | float) and value < 0:  # to llama.cpp the same as 0
            content[key] = type(value)(0)
    fields = _fields(path, content, GGUF, "write the file anew")
    if content.get("temperature") == 0:  # transformers has no such temperature
        del content["temperature"]
        return GenerationConfig({"do_sample": False, **content}, fields)
    return GenerationConfig({"do_sample": True, **content}, fields)


def _fields(
    file: Path, content: Mapping[str, Any], names: Mapping[str, str] | None = None, fix: str = FIX
) -> dict[str, Any]:
    """The fields of `Sampling` that the content sets. names: of its keys, in messages."""
    from tinyforge.infer.sampling import RULES, Sampling

    fields: dict[str, Any] = {}
    for key, name in FIELDS.items():
        if (value := content.get(key)) is None:  # transformers takes null as not set
            continue
        kind, (allowed, expected) = type(getattr(Sampling(), name)), RULES[name]
        # Not isinstance: a bool is an int.
        if type(value) not in (int, kind) or not allowed(value) or (kind is int and value >= 1 << 31):
            expected = f"a whole number, {expected}" if kind is int else expected
            raise UserError(f"{file}: {(names or {}).get(key, key)} is {shown(value)}, expected {expected}; {fix}")
        fields[name] = kind(value)
    return fields
