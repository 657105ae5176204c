"""Alpaca records: read as written, refused by name where malformed, laid out as prompt, reply and end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.alpaca import Record, encode_example, read_records, render_prompt
from tinyforge.errors import UserError

GREET = {"instruction": "Greet Mia.", "input": "", "output": "Hello, Mia."}
ADD = {"instruction": "Add.", "input": "2 and 3", "output": "5\n[five], {5}"}
EMPTY = {"instruction": "Say nothing.", "input": "", "output": ""}


class ByteTokenizer:
    """One token a byte, and `</s>` after them."""

    specials = {"</s>": 256}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def fault(path: Path) -> str:
    """The message of the UserError that reading `path` raises: one line that names the file."""
    with pytest.raises(UserError) as caught:
        read_records([path])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("indent", [None, 0, 4])
def test_an_array_gives_its_records(tmp_path: Path, indent: int | None) -> None:
    path = write(tmp_path / "a.json", "\ufeff\n" + json.dumps([GREET, ADD, EMPTY], indent=indent) + "\n")
    assert read_records([path]) == [Record(**GREET), Record(**ADD), Record(**EMPTY)]


def test_json_lines_give_their_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", f"{json.dumps(GREET)}\r\n\r\n{json.dumps(ADD)}")
    assert read_records([path]) == [Record(**GREET), Record(**ADD)]


def test_files_follow_one_another_and_other_keys_are_ignored(tmp_path: Path) -> None:
    first = write(tmp_path / "1.json", json.dumps([ADD | {"chosen": 5, "id": None}]))
    second = write(tmp_path / "2.json", json.dumps([GREET]))
    assert read_records([str(second), first]) == [Record(**GREET), Record(**ADD)]


def test_text_beyond_ascii_survives_escaped_or_not(tmp_path: Path) -> None:
    record = GREET | {"output": "Grüß dich, 小美 🦊"}
    path = write(tmp_path / "a.jsonl", json.dumps(record) + "\n" + json.dumps(record, ensure_ascii=False))
    assert read_records([path]) == [Record(**record)] * 2


GREET_JSON = json.dumps(GREET)


@pytest.mark.parametrize(
    ("text", "index", "place", "what"),
    [
        ('[\n {"instruction": "a" "b"}]', 0, "line 2, column 22", "Expecting ','"),
        (f"[{GREET_JSON},\n{GREET_JSON}\n  {GREET_JSON}]", 2, "line 3, column 3", "expected ','"),
        (f"[{GREET_JSON},\n", 1, "line 2, column 1", "Expecting value"),
        (f"[{GREET_JSON}\n", 1, "line 2, column 1", "expected ','"),
        (f"[\n{GREET_JSON},]", 1, f"line 2, column {len(GREET_JSON) + 2}", "Expecting value"),
        ("[]", 0, "line 1, column 2", "Expecting value"),
        (f"[{GREET_JSON}]\nend", 1, "line 2, column 1", "Expecting value"),
        (f'{GREET_JSON}\n{{"instruction": "cut o\n', 1, "line 2, column 23", "Invalid control"),
        ("Once upon a time", 0, "line 1, column 1", "Expecting value"),
    ],
)
def test_malformed_json_is_located(tmp_path: Path, text: str, index: int, place: str, what: str) -> None:
    message = fault(write(tmp_path / "a.json", text))
    assert message.startswith(f"record {index} (counted from 0), {place}: malformed JSON ({what}")


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"instruction": "a", "output": "b"}, """got the keys ["instruction", "output"], wanted 'input'"""),
        ({"prompt": "a", "output": "b"}, """got the keys ["prompt", "output"], wanted 'instruction'"""),
        ({"instruction": "a", "input": ""}, """got the keys ["instruction", "input"], wanted 'output'"""),
        ({"key" * 50: 1}, 'got the keys ["' + "key" * 11 + "ke..., wanted 'instruction'"),
        ({}, "got the keys [], wanted 'instruction'"),
        (GREET | {"input": None}, "'input' is null, wanted a string"),
        (GREET | {"output": 5}, "'output' is 5, wanted a string"),
        (GREET | {"instruction": ["x" * 99]}, "'instruction' is [\"" + "x" * 35 + "..., wanted a string"),
        (GREET | {"instruction": " \n"}, "'instruction' is blank"),
        (GREET | {"output": "\ud83d"}, "'output' holds half of a surrogate pair"),
        ("a string", 'got "a string", wanted an object'),
        ([GREET], 'got [{"instruction": "Greet Mia.", "input..., wanted an object'),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, record: object, what: str) -> None:
    lines = [json.dumps(item) for item in (GREET, ADD, record, GREET)]
    array = write(tmp_path / "a.json", "[\n" + ",\n".join(lines) + "\n]")
    assert fault(array).startswith(f"record 2 (counted from 0), line 4: {what}")
    array_free = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert fault(array_free).startswith(f"record 2 (counted from 0), line 3: {what}")


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    assert fault(write(tmp_path / "a.json", " \n")).startswith("is empty")
    assert fault(tmp_path / "no.json").startswith("no such file")


def test_the_encoding_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps([GREET | {"output": "café"}], ensure_ascii=False).encode("latin-1"))
    assert "--encoding latin-1" in fault(path)
    assert read_records([path], encoding="latin-1")[0].output == "café"
    with pytest.raises(UserError, match="no such text encoding"):
        read_records([path], encoding="utf-9")


def test_the_prompt_has_an_input_block_only_with_an_input() -> None:
    with_input = "### Instruction:\nAdd.\n\n### Input:\n2 and 3\n\n### Response:\n"
    assert render_prompt("Add.", "2 and 3") == with_input
    assert render_prompt("Greet Mia.") == "### Instruction:\nGreet Mia.\n\n### Response:\n"


def test_an_example_is_prompt_reply_end() -> None:
    prompt = render_prompt(ADD["instruction"], ADD["input"]).encode()
    ids, prompt_length = encode_example(ByteTokenizer(), Record(**ADD), seq_len=500)
    assert bytes(ids[:prompt_length]) == prompt
    assert bytes(ids[prompt_length:-1]).decode() == ADD["output"]
    assert ids[-1] == 256


def test_a_long_example_keeps_its_prompt_and_loses_the_end_of_its_reply() -> None:
    tokenizer, record = ByteTokenizer(), Record(**ADD)
    whole, prompt_length = encode_example(tokenizer, record, seq_len=500)
    exact = len(whole) - 1
    assert encode_example(tokenizer, record, seq_len=exact) == (whole, prompt_length)
    for seq_len in range(prompt_length, exact):
        ids = whole[: seq_len + 1]
        assert 256 not in ids
        assert encode_example(tokenizer, record, seq_len) == (ids, prompt_length)
    assert encode_example(tokenizer, record, seq_len=prompt_length - 1) is None


@pytest.mark.parametrize("reply", ["", " \n"])
def test_an_example_without_a_reply_is_none(reply: str) -> None:
    assert encode_example(ByteTokenizer(), Record("Say nothing.", "", reply), seq_len=500) is None


def test_a_tokenizer_without_an_end_of_reply_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.specials = {"<|endoftext|>": 256}
    with pytest.raises(UserError, match="no special token </s>"):
        encode_example(tokenizer, Record(**ADD), seq_len=500)
