"""Records as others publish them: OpenAI's, TRL's and ShareGPT's chats, Dolly's and GSM8K's names."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.data.conftest import fault_of
from tests.data.test_alpaca import ByteTokenizer
from tinyforge.data.alpaca import Record, encode_example, read_records, read_split
from tinyforge.data.preferences import Pair, read_pairs

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "One and one?"}
TWO = {"role": "assistant", "content": "Two."}
MORE = {"role": "user", "content": "And one more?"}
THREE = {"role": "assistant", "content": "Three."}
FOUR = {"role": "assistant", "content": "Four."}
CHAT = [SYSTEM, ASK, TWO, MORE, THREE]
RECORDS = [
    Record("One and one?", "", "Two.", (), "Be brief."),
    Record("And one more?", "", "Three.", (("One and one?", "Two."),), "Be brief."),
]
SHAREGPT = {"system": "System", "user": "human", "assistant": "gpt"}


def file_of(folder: Path, *values: object, name: str = "a.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(value) for value in values), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "value",
    [
        {"messages": CHAT},
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]},
        {"conversations": [{"from": SHAREGPT[m["role"]].lower(), "value": m["content"]} for m in CHAT]},
        {"conversations": CHAT[1:], "system": "Be brief."},
        {"messages": [*CHAT, ASK]},  # nothing to learn at the end
    ],
)
def test_a_chat_is_a_record_per_reply(tmp_path: Path, value: object) -> None:
    assert read_records([file_of(tmp_path, value)]) == RECORDS


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt": CHAT[:4], "completion": [THREE]}, RECORDS[1:]),  # as in TRL, nothing of a prompt is learned
        ({"prompt": CHAT[:2], "completion": CHAT[2:]}, RECORDS),
        ({"messages": [SYSTEM, ASK, {**TWO, "weight": 0}, MORE, {**THREE, "weight": 1}]}, RECORDS[1:]),
        ({"messages": CHAT, "tools": []}, RECORDS),
        ({"prompt": "Add.", "completion": "2"}, [Record("Add.", "", "2")]),
        ({"instruction": "Add.", "context": "1 and 1", "response": "2"}, [Record("Add.", "1 and 1", "2")]),
        ({"question": "Add.", "answer": "2"}, [Record("Add.", "", "2")]),
        ({"instruction": "Add.", "output": "2"}, [Record("Add.", "", "2")]),
        ({"prompt": "Add.", "completion": [FOUR], "label": True}, [Record("Add.", "", "Four.")]),
        ({"instruction": "Add.", "input": None, "output": "2"}, [Record("Add.", "", "2")]),
        ({"system": "Be brief.", "question": "Add.", "response": "2"}, [Record("Add.", "", "2", (), "Be brief.")]),
    ],
)
def test_names_of_others(tmp_path: Path, value: object, expected: list[Record]) -> None:
    assert read_records([file_of(tmp_path, value)]) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"prompt": "Add."}, "got the keys [\"prompt\"], expected 'output' too"),
        ({"messages": []}, "'messages' is [], expected a list of messages"),
        ({"messages": [SYSTEM]}, "'messages' has no message of the assistant, expected a reply"),
        ({"messages": [TWO, ASK]}, "'messages' has a message of 'assistant' where one of 'user' is expected"),
        ({"messages": [ASK, MORE, TWO]}, "'messages' has a message of 'user' where one of 'assistant' is expected"),
        ({"messages": [ASK, SYSTEM, TWO]}, "'messages' has a message of 'system' where one of 'assistant' is expected"),
        ({"messages": [ASK, {**TWO, "tool_calls": [{}]}]}, "'messages' calls tools"),
        ({"messages": [ASK, {**TWO, "thinking": "One, two."}]}, "'messages' has a message with 'thinking', which"),
        ({"messages": [ASK, TWO], "tools": [{}]}, "it has 'tools', which fine-tuning does not read"),
        ({"messages": [ASK, {**TWO, "weight": 0}]}, "'messages' has no message of the assistant, expected a reply"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, '\'messages\' has {"role": "assistant"'),
        ({"messages": ["hello"]}, "'messages' has \"hello\", expected a message"),
        ({"messages": [{"role": "user", "content": " "}, TWO]}, "'messages' has a blank message of the user"),
        ({"messages": [ASK, {"role": "assistant", "content": "\ud83d"}]}, "a message contains half of a surrogate"),
        ({"prompt": [ASK], "completion": 3}, "'completion' is 3, expected text or a list of messages"),
        ({"system": 3, "question": "Add.", "response": "2"}, "'system' is 3, expected a string"),
        ({"prompt": "Add.", "completion": "3", "label": False}, "its 'label' is false: its completion is not to be"),
    ],
)
def test_a_bad_chat_is_named(tmp_path: Path, value: object, message: str) -> None:
    path = file_of(tmp_path, {"messages": CHAT}, value)
    assert fault_of(read_records, [path]).startswith(f"{path}: record 1 (counted from 0), line 2: {message}")


def test_a_chat_is_not_cut_into_training_and_held_out(tmp_path: Path) -> None:
    training, (held_out,) = read_split([file_of(tmp_path, *[{"messages": CHAT}] * 3, {"messages": [ASK, FOUR]})])
    assert training == RECORDS * 3 and held_out == [Record("One and one?", "", "Four.")]
    training, (held_out,) = read_split([file_of(tmp_path, *[{"messages": CHAT}] * 3)])
    assert training == RECORDS * 2 and held_out == RECORDS


def test_packed_lines_and_tables(tmp_path: Path) -> None:
    plain = file_of(tmp_path, {"messages": CHAT}, {"messages": CHAT[1:3]})
    expected = read_records([plain])
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_records([packed]) == expected and len(expected) == 3
    packed.write_bytes(gzip.compress(plain.read_bytes())[:-9])
    assert "damaged or incomplete gz file" in fault_of(read_records, [packed])
    table = tmp_path / "a.parquet"
    duckdb.execute(f"COPY (SELECT * FROM read_json('{plain}')) TO '{table}' (FORMAT parquet)")
    assert read_records([table]) == expected
    duckdb.execute(f"COPY (SELECT 1 AS a) TO '{table}' (FORMAT parquet)")
    message = f"{table}: record 0 (counted from 0), row 0: got the keys [\"a\"], expected 'instruction' too"
    assert fault_of(read_records, [table]).startswith(message)
    table.write_bytes(b"PAR1")
    assert "not a readable parquet file" in fault_of(read_records, [table])
    assert "no such file" in fault_of(read_records, [tmp_path / "none.parquet"])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", 'instruction,input,output\r\n"Say ""1""",,"one,\r\ntwo"\r\n', ""),
        ("a.csv", '\ufeffid;instruction;output\n\n7;"Say ""1""";"one,\ntwo"\n', ""),
        ("a.csv", 'sep=^\nprompt^completion\n"Say ""1"""^"one,\ntwo"\n', ""),
        ("a.TSV", 'prompt\tcompletion\n"Say ""1"""\t"one,\ntwo"\n', ""),
        (
            "a.csv",
            "a,b\n1,2\n",
            """record 0 (counted from 0), row 0: got the keys ["a", "b"], expected 'instruction'""",
        ),
        ("a.csv", "instruction,output\n", "is empty, expected Alpaca records; give another file"),
        ("a.csv", "instruction,output\nx,y\nx,y,z\n", "row 1 has more cells than the head line; put texts in quotes"),
        ("a.csv", 'instruction,output\nx,"y\n', "row 0: malformed table (unexpected end of data); fix it there"),
        ("a.csv", "instruction,output\nx\n", "record 0 (counted from 0), row 0: 'output' is null, expected a string"),
    ],
)
def test_tables_of_a_spreadsheet(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    if says:
        assert fault_of(read_records, [path]).startswith(f"{path}: {says}")
    else:
        assert [(r.instruction, r.input, r.output) for r in read_records([path])] == [('Say "1"', "", "one,\ntwo")]


def test_a_cell_of_a_table_may_be_as_long_as_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"instruction,output\nSay a.,{'a' * 200_000}\n", encoding="utf-8")
    assert len(read_records([path])[0].output) == 200_000


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": CHAT[:4], "chosen": [THREE], "rejected": [FOUR]},
        {"chosen": CHAT, "rejected": [*CHAT[:4], FOUR]},
        {"prompt": CHAT[:4], "chosen": CHAT, "rejected": [*CHAT[:4], FOUR]},
        {"prompt": CHAT[:4], "chosen": "Three.", "rejected": "Four."},
    ],
)
def test_preferences_of_chats(tmp_path: Path, value: object) -> None:
    pair = Pair("And one more?", "", "Three.", "Four.", False, (("One and one?", "Two."),), "Be brief.")
    assert read_pairs([file_of(tmp_path, value)]) == [pair]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt": "Add.", "chosen": "2", "rejected": "3"}, Pair("Add.", "", "2", "3")),
        ({"instruction": "Add.", "chosen": "2", "rejected": "3", "cut": True}, Pair("Add.", "", "2", "3", True)),
        ({"prompt": "Add.", "chosen": "2", "rejected": [FOUR]}, Pair("Add.", "", "2", "Four.")),
        (
            {"prompt": "Add.", "chosen": "2", "rejected": "3", "history": [["Hi.", "Ho."]], "system": "Be brief."},
            Pair("Add.", "", "2", "3", False, (("Hi.", "Ho."),), "Be brief."),
        ),
        ({"prompt": "Add.", "chosen": "2", "rejected": "3", "history": "Hi"}, "'history' is \"Hi\", expected pairs"),
        ({"prompt": "Add.", "chosen": "2", "rejected": "3", "system": "\ud800"}, "'system' is "),
        ({"prompt": "Add.", "chosen": [ASK, TWO], "rejected": [ASK, FOUR]}, "'chosen' has a message of 'user' where"),
        ({"chosen": [ASK, TWO], "rejected": [MORE, FOUR]}, "'chosen' and 'rejected' answer different conversations"),
        ({"chosen": [ASK, TWO], "rejected": [ASK]}, "'rejected' does not end with a message of the assistant"),
        ({"chosen": [ASK, TWO], "rejected": [ASK, FOUR], "tools": "[{}]"}, "it has 'tools', which fine-tuning"),
        ({"chosen": [ASK, TWO]}, "'rejected' is null, expected text or a list of messages"),
        (
            {"prompt": "Add.", "chosen": "2"},
            "it has no 'rejected'; a preference pair has a prompt, chosen and rejected",
        ),
    ],
)
def test_preferences_of_others(tmp_path: Path, value: object, expected: Pair | str) -> None:
    path = file_of(tmp_path, value)
    if isinstance(expected, Pair):
        assert read_pairs([path]) == [expected]
    else:
        assert fault_of(read_pairs, [path]).startswith(f"{path}: record 0 (counted from 0), line 1: {expected}")


def test_trl_takes_the_same_preferences_apart(tmp_path: Path) -> None:
    utils: Any = pytest.importorskip("trl.data_utils")
    value = {"chosen": CHAT, "rejected": [*CHAT[:4], FOUR]}
    theirs = utils.extract_prompt(value)
    (pair,) = read_pairs([file_of(tmp_path, value)])
    turns = [
        (SYSTEM["role"], pair.system),
        *((r, t) for turn in pair.history for r, t in zip(("user", "assistant"), turn, strict=True)),
    ]
    assert [(m["role"], m["content"]) for m in theirs["prompt"]] == [*turns, ("user", pair.instruction)]
    assert (theirs["chosen"][0]["content"], theirs["rejected"][0]["content"]) == (pair.chosen, pair.rejected)


def test_the_system_prompt_is_part_of_the_prompt() -> None:
    found = [encode_example(ByteTokenizer(), record, 999) for record in (RECORDS[0], replace(RECORDS[0], system=""))]
    (ids, prompt), (plain, before) = (each for each in found if each is not None)
    assert bytes(ids[:prompt]).startswith(b"Be brief.") and ids[prompt:] == plain[before:]
    assert b"brief" not in bytes(plain[:before])
