"""generation_config.json, beside a model's weights: how its text is drawn where the user does not say.

    {"do_sample": true, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.05}

The file is transformers'; vLLM reads it too. Used are the keys of FIELDS, and `do_sample`, where false is greedy; the
others are kept in conversions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyforge.errors import UserError
from tinyforge.files import read_json, shown

if TYPE_CHECKING:  # and later in functions: `tinyforge --help` imports this package, but not tinyforge.infer
    from tinyforge.infer.sampling import Sampling

FILE = "generation_config.json"
FIELDS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""The file's keys, and the fields of `Sampling` that they set."""
FIX = "correct it, or remove the file"


@dataclass(frozen=True)
class GenerationConfig:
    """content: of the whole file, {} where there is none. fields: the fields of `Sampling` that it sets."""

    content: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self, default: Sampling | None = None, **given: Any) -> Sampling:
        """The fields given; the others as the file says; those that it leaves out as in `default`, or as built in."""
        from tinyforge.infer.sampling import Sampling

        return replace(default or Sampling(), **{**self.fields, **given})


NOTHING = GenerationConfig()
"""Of a model without the file."""


def read_generation(path: Path) -> GenerationConfig:
    """The file in the directory of a model. UserError, naming file and key, for a value that cannot be."""
    file = path / FILE
    if not file.is_file():
        return NOTHING
    from tinyforge.infer.sampling import RULES, Sampling

    content, fields = read_json(file, "the generation config", fix=FIX), {}
    for key, name in FIELDS.items():
        if (value := content.get(key)) is None:  # transformers takes null as not set
            continue
        kind, (allowed, wanted) = type(getattr(Sampling(), name)), RULES[name]
        if type(value) not in (int, kind) or not allowed(value):  # not isinstance: a bool is an int
            wanted = f"a whole number, {wanted}" if kind is int else wanted
            raise UserError(f"{file}: {key} is {shown(value)}, wants {wanted}; {FIX}")
        fields[name] = kind(value)
    sample = content.get("do_sample")
    if not isinstance(sample, bool | None):
        raise UserError(f"{file}: do_sample is {shown(sample)}, wants true or false; {FIX}")
    if sample is False:
        fields["temperature"] = 0.0
    return GenerationConfig(content, fields)
