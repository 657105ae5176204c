"""Alpaca records: read as written, refused by name where malformed, laid out as prompt, reply and end."""

from __future__ import annotations

import errno
import json
import os
import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import fault_of
from tinyforge.data import alpaca
from tinyforge.data.alpaca import (
    Record,
    clean,
    encode_example,
    hold_out,
    main,
    make_instructions,
    origin_of,
    read_records,
    read_split,
)
from tinyforge.data.download import Downloader, Patience
from tinyforge.data.local import read_documents
from tinyforge.data.source import read_source
from tinyforge.errors import UserError
from tinyforge.tokenizers.chat_templates import render_prompt

GREET = {"instruction": "Greet Mia.", "input": "", "output": "Hello, Mia."}
ADD = {"instruction": "Add.", "input": "2 and 3", "output": "5\n[five], {5}"}
EMPTY = {"instruction": "Say nothing.", "input": "", "output": ""}


class ByteTokenizer:
    """One token a byte, and `</s>` after them."""

    specials = {"</s>": 256}
    user_defined: dict[str, int] = {}
    bos = None

    def encode(self, text: str, after: str = "start") -> list[int]:
        return list(text.encode())


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def fault(path: Path) -> str:
    """The message of the UserError that reading `path` raises: one line that names the file."""
    message = fault_of(read_records, [path])
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
        ({"text": "a", "output": "b"}, """got the keys ["text", "output"], expected 'instruction'"""),
        ({"instruction": "a", "input": ""}, """got the keys ["instruction", "input"], expected 'output'"""),
        ({"key" * 50: 1}, 'got the keys ["' + "key" * 11 + "ke..., expected 'instruction'"),
        ({}, "got the keys [], expected 'instruction'"),
        (GREET | {"input": 5}, "'input' is 5, expected a string"),
        (GREET | {"output": 5}, "'output' is 5, expected a string"),
        (GREET | {"instruction": ["x" * 99]}, "'instruction' is [\"" + "x" * 35 + "..., expected a string"),
        (GREET | {"instruction": " \n"}, "'instruction' is blank"),
        (GREET | {"output": "\ud83d"}, "'output' contains half of a surrogate pair"),
        ("a string", 'got "a string", expected an object'),
        ([GREET], 'got [{"instruction": "Greet Mia.", "input..., expected an object'),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, record: object, what: str) -> None:
    lines = [json.dumps(item) for item in (GREET, ADD, record, GREET)]
    array = write(tmp_path / "a.json", "[\n" + ",\n".join(lines) + "\n]")
    assert fault(array).startswith(f"record 2 (counted from 0), line 4: {what}")
    array_free = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert fault(array_free).startswith(f"record 2 (counted from 0), line 3: {what}")


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    for text in (" \n", "[]", " [\n]\n"):
        assert fault(write(tmp_path / "a.json", text)).startswith("is empty, expected Alpaca records")
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
    tokenizer.specials = {"<|im_start|>": 255, "<|im_end|>": 257, "<|endoftext|>": 256}
    found = encode_example(tokenizer, Record(**ADD), seq_len=500)
    assert found is not None and found[0][-1] == 256  # a published vocabulary's own end
    tokenizer.specials = {"<|im_start|>": 255}
    with pytest.raises(UserError, match="no special token </s>"):
        encode_example(tokenizer, Record(**ADD), seq_len=500)


# --- cleaning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "<noinput>",
        "noinput",
        "No input",
        "No input required.",
        "< noinput >",
        "`<noinput>`",
        "(no input)",
        "N/A",
        "None",
    ],
)
def test_an_input_that_says_there_is_none_becomes_empty(words: str) -> None:
    assert clean(Record("Greet Mia.", words, "Hello.")) == Record("Greet Mia.", "", "Hello.")


@pytest.mark.parametrize("words", ["no input from 9 to 5", "Nona", "He was <noinput>", "no", "the noinput flag", "-"])
def test_an_input_that_only_looks_so_stays(words: str) -> None:
    record = Record("Explain.", words, "No output pin is driven.")
    assert clean(record) == record


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("", "empty output"),
        (" \n", "empty output"),
        ("<nooutput>", "says that there is none"),
        ("No output.", "says that there is none"),
        ("<noinput>", "says that there is none"),
        ("A rose.\n11. Instruction: Say more.\n11. Input:\n<noinput>", "runs on into another task"),
    ],
)
def test_a_reply_that_is_none_is_left_out(output: str, why: str) -> None:
    assert why in str(clean(Record("Say it.", "", output)))


def test_a_file_is_cleaned_and_what_is_left_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = GREET | {"input": "<noinput>"}  # the same as GREET, when its stub is gone
    records = [GREET, ADD, EMPTY, stub, "words", {"instruction": "x"}, GREET | {"output": "\ud83d"}, ADD]
    path = write(tmp_path / "a.json", json.dumps(records))
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert read_records([tmp_path / "out" / "alpaca.json"]) == [Record(**GREET), Record(**ADD)]
    manifest = json.loads((tmp_path / "out" / "source.json").read_text())
    reasons = {entry["record"]: entry["reason"] for entry in manifest["refused"]}
    assert reasons["a.json:2"] == "empty output"
    assert reasons["a.json:3"] == "the same as record 0" and reasons["a.json:7"] == "the same as record 1"
    assert "expected an object" in reasons["a.json:4"] and "expected 'output' too" in reasons["a.json:5"]
    assert "half of a surrogate pair" in reasons["a.json:6"] and len(reasons) == 6
    assert manifest["files"][0]["url"] == "a.json" and str(tmp_path) not in json.dumps(manifest)
    assert manifest["instructions"]["records"] == 2
    printed = capsys.readouterr().out
    assert "2 records in" in printed and "6 left out:\n" in printed and "2  the same as record N" in printed
    assert main([str(write(tmp_path / "b.json", json.dumps([GREET]))), "--out", str(tmp_path / "whole")]) == 0
    assert capsys.readouterr().out.endswith("0 left out\n")
    with pytest.raises(UserError, match=r"contains instructions, expected documents; .*recipes/sft\.py --data"):
        read_source(tmp_path / "out")


def test_json_lines_and_zips_are_cleaned_too(tmp_path: Path) -> None:
    lines = f"{json.dumps(GREET)}\n\nno json\n{json.dumps(ADD)}\n"
    path = write(tmp_path / "a.jsonl", lines)
    cleaned = make_instructions(tmp_path / "out", path)
    assert cleaned.records == 2 and "malformed JSON" in cleaned.refused[0].reason
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("deep/a.json", json.dumps([GREET]))
        archive.writestr("readme.txt", "words")
    assert make_instructions(tmp_path / "zipped", tmp_path / "a.zip").records == 1
    one = write(tmp_path / "one.jsonl", json.dumps(GREET))
    assert make_instructions(tmp_path / "one", one).records == 1


def test_files_that_are_no_records(tmp_path: Path) -> None:
    def fault_of(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            main([str(path), "--out", str(tmp_path / "out")])
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        return str(caught.value)

    assert "no such file" in fault_of(tmp_path / "no.json")
    assert "no usable record" in fault_of(write(tmp_path / "empty.json", " "))
    assert "as JSON, expected a list" in fault_of(
        write(tmp_path / "object.json", json.dumps({"data": [GREET]}, indent=1))
    )
    assert "record 1 (counted from 0), line 2" in fault_of(write(tmp_path / "cut.json", f"[{json.dumps(GREET)},\n"))
    assert "no usable record" in fault_of(write(tmp_path / "bad.json", json.dumps([EMPTY])))
    assert "no usable record" in fault_of(write(tmp_path / "words.json", "only words"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("words.txt", "words")
    assert "0 .json files in it, expected one" in fault_of(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", " " * 9_000_000)
    assert "do not trust this archive" in fault_of(tmp_path / "bomb.zip")
    with zipfile.ZipFile(tmp_path / "climbs.zip", "w") as archive:
        archive.writestr("../a.json", json.dumps([GREET]))
    assert "leads out of its folder" in fault_of(tmp_path / "climbs.zip")


def test_the_published_file_is_fetched(tmp_path: Path, host: Any, faults: Any) -> None:
    host.files[f"/{alpaca.PATH}"] = json.dumps([GREET, ADD]).encode()
    host.faults[f"/{alpaca.PATH}"] = [faults.status(503), faults.cut(20)]
    downloader = Downloader(Patience(2.0, attempts=4, backoff=0.01, gap=0.0))
    assert make_instructions(tmp_path, base_url=host.url, downloader=downloader).records == 2
    manifest = json.loads((tmp_path / "source.json").read_text())
    assert manifest["files"][0]["url"] == f"{host.url}/{alpaca.PATH}"


def test_a_full_disk_leaves_no_half_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = write(tmp_path / "a.json", json.dumps([GREET]))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        make_instructions(tmp_path / "out", path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("count", "held"), [(0, 0), (2, 1), (39, 1), (40, 2), (100, 5)])
def test_the_last_20th_is_held_out(count: int, held: int) -> None:
    records = [Record(str(i), "", "") for i in range(count)]
    training, (held_out,) = hold_out([records])
    assert [*training, *held_out] == records and len(held_out) == held


def test_one_record_alone_is_both(tmp_path: Path) -> None:
    assert read_split([write(tmp_path / "one.json", json.dumps([ADD]))]) == ([Record(**ADD)], [[Record(**ADD)]])


def test_the_last_20th_of_each_file_is_held_out(tmp_path: Path) -> None:
    """Of two files joined, the last 20th would be of the second alone."""

    def named(name: str, count: int) -> Path:
        return write(tmp_path / name, json.dumps([{**ADD, "instruction": f"{name} {i}"} for i in range(count)]))

    paths = [named("large", 40), named("small", 20), named("one", 1)]
    training, by_file = read_split(paths)
    assert [[r.instruction for r in held_out] for held_out in by_file] == [
        ["large 38", "large 39"],
        ["small 19"],
        ["one 0"],
    ]
    records = [*training, *(r for held_out in by_file for r in held_out)]
    assert sorted(r.instruction for r in records) == sorted(r.instruction for r in read_records(paths))


def test_documents_have_what_is_trained_on_and_nothing_that_is_held_out(tmp_path: Path) -> None:
    records = [
        {"instruction": f"Name {i}.", "input": "Please!" * (i % 2), "output": f"It is {i}." * (i != 3)}
        for i in range(40)
    ]
    paths = [write(tmp_path / name, json.dumps(part)) for name, part in (("a.json", records[:20]), ("b.json", records))]
    assert alpaca.main(["--out", str(tmp_path / "out"), "--as-text", *map(str, paths)]) == 0
    source = read_source(tmp_path / "out")
    texts = read_documents(source.parquet)
    told = "\n\n".join(texts)
    assert source.documents == len(texts) == 7 and source.licence == "not stated"
    assert [file["url"] for file in json.loads((tmp_path / "out" / "source.json").read_text())["files"]] == [
        "a.json",
        "b.json",
    ]
    assert "Question: Name 0.\nAnswer: It is 0." in told and "Question: Name 1. Please!\nAnswer: It is 1." in told
    asked = re.findall(r"Name (\d+)\.", told)
    assert asked != sorted(asked, key=int) and any(len(re.findall(r"Name 1?\d\.", text)) < 8 for text in texts[:2])
    assert told.count("Name 19.") == told.count("Name 37.") == 1  # of the second file; 19 is the first one's last
    assert not any(f"Name {i}." in told for i in (3, 38, 39))
    with pytest.raises(UserError, match="got x.json and --as-text with files of its own"):
        alpaca.main(["x.json", "--out", str(tmp_path / "out"), "--as-text", str(paths[0])])


def test_records_know_their_licence_where_they_were_made(tmp_path: Path) -> None:
    made = make_instructions(tmp_path / "out", write(tmp_path / "a.json", json.dumps([GREET]))).path
    assert origin_of(made) == ("alpaca", alpaca.LICENCE)
    assert origin_of(tmp_path / "a.json") == origin_of(made.with_name("other.json")) == ("records", "not stated")
    write(made.with_name("source.json"), "[]")
    assert origin_of(made) == ("records", "not stated")


ARCHIVE = Path(__file__).parents[3] / "shared" / "data" / "instruct" / "alpaca.zip"


@pytest.mark.skipif(not ARCHIVE.exists(), reason="20,759 real records (shared/data/instruct next to the repository)")
def test_real_records(tmp_path: Path) -> None:
    cleaned = make_instructions(tmp_path, ARCHIVE)
    reasons = Counter(refusal.reason for refusal in cleaned.refused)
    assert reasons == {
        "empty output": 10,
        "the output says that there is none": 22,
        "the output runs on into another task": 30,
    }
    assert cleaned.records == 20_759 - 62 and cleaned.emptied == 286
    records = read_records([cleaned.path])
    assert len(set(records)) == len(records) == cleaned.records


def test_what_was_said_before_is_read_and_is_no_part_of_the_reply(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{**ADD, "history": [["Greet Mia.", "Hello, Mia."]]}]), encoding="utf-8")
    (record,) = read_records([path])
    assert record.history == (("Greet Mia.", "Hello, Mia."),)
    ids, prompt = encode_example(ByteTokenizer(), record, seq_len=500)
    alone, begin = encode_example(ByteTokenizer(), Record(**ADD), seq_len=500)
    before = [*render_prompt("Greet Mia.").encode(), *b"Hello, Mia.", 256]
    assert ids == [*before, *alone] and prompt == len(before) + begin


@pytest.mark.parametrize("history", ["Hi", [["Hi"]], [["Hi", 3]], [["Hi", "\ud800"]], {"Hi": "Ho"}])
def test_a_history_of_another_form_is_refused(tmp_path: Path, history: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{**ADD, "history": history}]), encoding="utf-8")
    with pytest.raises(UserError, match=r"record 0 .*'history' is .*, expected pairs of an instruction and its reply"):
        read_records([path])
