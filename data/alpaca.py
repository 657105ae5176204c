"""Instructions with replies in Alpaca's form: reading them, and laying them out as tokens.

    records = read_records(["alpaca.json"])
    encode_example(tokenizer, records[0], seq_len=128)  ->  (ids, prompt_length)

The format is that of Stanford Alpaca (Taori et al., 2023): objects with the string fields `instruction`,
`input` (often empty) and `output`, in one JSON array or one a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from data.local import read_text
from tinyforge.errors import UserError

if TYPE_CHECKING:
    from tinyforge.text import Tokenizer

END_OF_REPLY = "</s>"


@dataclass(frozen=True)
class Record:
    """One instruction, what it is about (may be empty), and the reply to learn."""

    instruction: str
    input: str
    output: str


_FIELDS = tuple(field.name for field in fields(Record))


def read_records(paths: Sequence[str | Path], encoding: str = "utf-8") -> list[Record]:
    """Read Alpaca records from JSON or JSON-lines files, in the order given.

    Records with an empty output are kept: whether to train on them is not the reader's to decide. Raises
    UserError, naming the file, the record (counted from 0) and its line, for malformed JSON and for a record
    that lacks a field, has one that is no string, or has a blank instruction.
    """
    return [record for path in paths for record in _read_file(Path(path), encoding)]


def render_prompt(instruction: str, input: str = "") -> str:
    """The text that a reply follows: Alpaca's headings, the input block only where there is an input.

    Alpaca's preamble ("Below is an instruction that describes a task. ...") is left out: it is the same for
    every record, and in the small preset's vocabulary of 512 it would take over half of the context of 128.
    """
    context = f"### Input:\n{input}\n\n" if input else ""
    return f"### Instruction:\n{instruction}\n\n{context}### Response:\n"


def encode_example(tokenizer: Tokenizer, record: Record, seq_len: int) -> tuple[list[int], int] | None:
    """One example as token ids, `prompt + reply + </s>`, and the length of its prompt, which gets no loss.

    At most seq_len + 1 ids, since inputs are ids[:-1] and targets ids[1:]. An example that is too long keeps
    its whole prompt and loses the end of its reply; a cut reply gets no `</s>`, lest the model learn to stop
    there. None if the reply is blank, or the prompt leaves no room for it. UserError if there is no `</s>`.
    """
    if END_OF_REPLY not in tokenizer.specials:
        raise UserError(f"tokenizer: no special token {END_OF_REPLY}, wanted to end a reply; use another")
    prompt = tokenizer.encode(render_prompt(record.instruction, record.input))
    if not record.output.strip() or len(prompt) > seq_len:
        return None
    ids = [*prompt, *tokenizer.encode(record.output), tokenizer.specials[END_OF_REPLY]]
    return ids[: seq_len + 1], len(prompt)


def _read_file(path: Path, encoding: str) -> list[Record]:
    text = read_text(path, encoding)
    if not text.strip():
        raise UserError(f"{path}: is empty, wanted Alpaca records; give another file")
    records: list[Record] = []
    try:
        for line, value in _scan(text):
            record = _to_record(value)
            if isinstance(record, str):
                raise UserError(f"{path}: record {len(records)} (counted from 0), line {line}: {record}")
            records.append(record)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: record {len(records)} (counted from 0), line {error.lineno}, column {error.colno}: "
            f"malformed JSON ({error.msg}), wanted an array of records or one a line; mend it there"
        ) from None
    return records


def _scan(text: str) -> Iterator[tuple[int, object]]:
    """Each record of a JSON array, or of JSON lines, with the number of the line where it starts.

    They are decoded one at a time, not by one `json.loads`, so that a fault can be blamed on its record.
    """
    decode = json.JSONDecoder().raw_decode
    position = _skip_blanks(text, 0)
    in_array = text.startswith("[", position)
    if in_array:
        position = _skip_blanks(text, position + 1)
    line, counted = 1, 0
    while position < len(text) or in_array:
        value, end = decode(text, position)
        line += text.count("\n", counted, position)
        counted = position
        yield line, value
        position = _skip_blanks(text, end)
        if in_array:
            if not text.startswith((",", "]"), position):
                raise json.JSONDecodeError("expected ',' or ']' after a record", text, position)
            in_array = text.startswith(",", position)
            position = _skip_blanks(text, position + 1)


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\n\r":
        position += 1
    return position


def _to_record(value: object) -> Record | str:
    """The record that `value` spells, or what is wrong with it."""
    if not isinstance(value, dict):
        return f"got {_show(value)}, wanted an object with {', '.join(_FIELDS)}; mend or remove it"
    for name in _FIELDS:
        if name not in value:
            return f"got the keys {_show(list(value))}, wanted '{name}' too; add it, as \"\" if there is none"
        if not isinstance(value[name], str):
            return f"'{name}' is {_show(value[name])}, wanted a string; put it in quotes"
        if not _has_utf8(value[name]):
            return f"'{name}' holds half of a surrogate pair, wanted text; remove its \\ud... escape"
    if not value["instruction"].strip():
        return "'instruction' is blank, wanted a task; fill it in or remove the record"
    return Record(**{name: value[name] for name in _FIELDS})


def _has_utf8(text: str) -> bool:
    """False for a lone surrogate, which JSON's escapes can write and no tokenizer can turn into bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
