"""Instructions with replies in Alpaca's format: downloading, cleaning and reading them, and encoding them as tokens.

    python -m data.alpaca --out alpaca                     # fetch the 52,002 records of Stanford Alpaca
    python -m data.alpaca --out alpaca alpaca.zip          # or a local file: .json, .jsonl or a zip of one
    python -m data.alpaca --out questions --as-text alpaca/alpaca.json     # or a source of documents to pretrain on
    python recipes/sft.py --data alpaca/alpaca.json
    records = read_records(["alpaca.json"])
    encode_example(tokenizer, records[0], seq_len=128)  ->  (ids, prompt_length)

The format is that of Stanford Alpaca (Taori et al., 2023): objects with the string fields `instruction`, `input` (often
empty) and `output`, in a JSON array, one per line (also .gz and .zst), or as the columns of a .parquet, .csv or .tsv
file. Records of other formats are read as `data.conversations` says. Alpaca's were written by a language model, with
its errors: some replies are empty, some inputs are the words "no input", and some replies run on into the next task.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tinyforge.data.conversations import Fault, chat_of, is_chat, named, shown
from tinyforge.data.download import Downloader, check_url
from tinyforge.data.files import locked, write_json, writing, zip_members
from tinyforge.data.local import decode_text, read_objects, read_text
from tinyforge.data.readers import cut_rows
from tinyforge.data.source import (
    MANIFEST,
    Document,
    InputFile,
    Refusal,
    Source,
    SourceWriter,
    first_of,
    print_refused,
    read_source,
    write_manifest,
)
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import json_value, next_json_value, read_json, sha256_of
from tinyforge.report import count_of
from tinyforge.rng import Stream
from tinyforge.terminal import one_line
from tinyforge.tokenizers.chat_templates import TEMPLATES, AnyTemplate

if TYPE_CHECKING:
    from tinyforge.tokenizers import TextTokenizer

T = TypeVar("T")

ROWS = (".parquet", ".csv", ".tsv")
"""Suffixes of files whose rows are records."""
RECORDS_A_DOCUMENT = 8
HOST = "https://raw.githubusercontent.com"
PATH = "tatsu-lab/stanford_alpaca/main/alpaca_data.json"
LICENCE = "CC BY-NC 4.0"

# What the generator wrote where there should be nothing: "<noinput>", "No input required.", "(no input)", "N/A".
_NO_INPUT = re.compile(
    r"\W*(?:no\s*inputs?e?(?: (?:required|needed|necessary|provided|given))?|none|n/a)\W*", re.IGNORECASE
)
_NO_OUTPUT = re.compile(r"\W*no\s*(?:in|out)put\W*", re.IGNORECASE)
# "7. Instruction: ..." within a reply: the generator continued with the next task of its list.
_NEXT_TASK = re.compile(r"^\s*\d+\s*\.\s*(?:Instruction|Input|Output):", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Record:
    """One instruction, its input (may be empty), and the reply to learn. history: earlier turns, pairs of an
    instruction and its reply. system: the system prompt, "" for none."""

    instruction: str
    input: str
    output: str
    history: tuple[tuple[str, str], ...] = ()
    system: str = ""


_FIELDS = ("instruction", "input", "output")


def read_records(paths: Sequence[str | Path], encoding: str = "utf-8") -> list[Record]:
    """Read records from JSON, JSON-lines or parquet files, in the order given. A chat is a record per reply.

    Records with an empty output are kept: whether to train on them is the caller's decision. Raises UserError,
    naming the file, the record (counted from 0) and its line, for malformed JSON and for a record that lacks a
    field, has a field that is not a string, or has a blank instruction.
    """
    return [record for path in paths for records in read_as(Path(path), encoding, _to_records) for record in records]


def origin_of(path: Path) -> tuple[str, str]:
    """Name and licence of a file of records, from the source.json next to it that `make_instructions` writes."""
    try:
        found = read_json(path.parent / MANIFEST, "the source")
        if found["instructions"]["file"] == path.name:
            return str(found["name"]), str(found["licence"])
    except (UserError, KeyError, TypeError):
        pass
    return "records", "not stated"


def origins_of(files: Sequence[str | Path], otherwise: tuple[str, str]) -> tuple[str, str]:
    """The names and the licences of files of records, each joined; `otherwise` where there is no file."""
    found = [origin_of(Path(file)) for file in files] or [otherwise]
    names, licences = ("; ".join(sorted(set(part))) for part in zip(*found, strict=True))
    return names, licences


def summary_of(files: Sequence[str], otherwise: str, what: str, count: int, held_out: int) -> dict[str, Any]:
    """The entry "corpus" of a checkpoint's meta: where its `what` are from, by default the built-in ones, and how many
    there are to learn from and held out."""
    names, licences = origins_of(files, (otherwise, "MIT"))
    return {"source": names, "licence": licences, what: count, f"held-out_{what}": held_out}


def hold_out(files: Sequence[Sequence[T]], one_in: int = 20) -> tuple[list[T], list[Sequence[T]]]:
    """Training records of all files, and held-out ones by file: the last 1 / `one_in` of each file, and at least one.
    The last records of the joined files would all be of one kind."""
    cuts = [max(0, len(records) - max(1, len(records) // one_in)) for records in files]
    training = [record for records, cut in zip(files, cuts, strict=True) for record in records[:cut]]
    return training, [records[cut:] for records, cut in zip(files, cuts, strict=True)]


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Up to `count` of the items, evenly spaced, in order."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def names_of(files: Sequence[str]) -> list[str]:
    """A name for each file's figures: its folder if it is an alpaca.json, as data.alpaca writes it, else the file."""
    found = [path.parent.name if path.name == "alpaca.json" else path.stem for path in map(Path, files)]
    return [name if found.count(name) == 1 else file for name, file in zip(found, files, strict=True)]


def read_split(paths: Sequence[str | Path], encoding: str = "utf-8") -> tuple[list[Record], list[Sequence[Record]]]:
    """Training records, and the last 20th of each file, by file, to evaluate on: a chat is not cut in two. If no file
    has two records, all of them are both. Raises UserError, as read_records does."""
    training, held_out = hold_out([read_as(Path(path), encoding, _to_records) for path in paths])
    by_file: list[Sequence[Record]] = [[record for records in chats for record in records] for chats in held_out]
    learned = [record for records in training for record in records]
    return learned or [record for records in by_file for record in records], by_file


def encode_example(
    tokenizer: TextTokenizer, record: Record, seq_len: int, template: AnyTemplate = TEMPLATES["alpaca"]
) -> tuple[list[int], int] | None:
    """One example as token ids, the prompt, the reply and its end as the template has them, and the length of the
    prompt, which gets no loss.

    At most seq_len + 1 ids, since inputs are ids[:-1] and targets ids[1:]. An example that is too long keeps its
    whole prompt and loses the end of its reply; a truncated reply gets no end, so that the model does not learn
    to stop there. None if the reply is blank or the prompt leaves no room for it.
    """
    if not record.output.strip():
        return None
    turns = [*record.history, (template.question(record.instruction, record.input), record.output)]
    ids, prompt = template.encode_reply(tokenizer, turns, record.system)
    return (ids[: seq_len + 1], prompt) if prompt <= seq_len else None


def read_as(path: Path, encoding: str, make: Callable[[object], T], expected: str = "Alpaca records") -> list[T]:
    """What `make` makes of each object of a file. UserError that names the object for which it raises a Fault."""
    found: list[T] = []
    for place, value in each_object(path, encoding, expected):
        try:
            found.append(make(value))
        except Fault as wrong:
            raise UserError(f"{path}: record {len(found)} (counted from 0), {place}: {wrong}") from None
    return found


def each_object(path: Path, encoding: str, expected: str = "Alpaca records") -> Iterator[tuple[str, object]]:
    """The objects of a .json, .jsonl (.gz, .zst), .parquet, .csv or .tsv file, each with its place. UserError, as
    `scan_file`, and for a file that cannot be read."""
    if path.suffix.lower() in ROWS:
        number = -1
        rows = read_objects(path) if path.suffix.lower() == ".parquet" else _table(path, encoding)
        for number, row in enumerate(rows):
            yield f"row {number}", row
        if number < 0:
            raise UserError(f"{path}: is empty, expected {expected}; give another file")
    else:
        for line, value in scan_file(path, read_text(path, encoding), expected):
            yield f"line {line}", value


def _table(path: Path, encoding: str) -> Iterator[dict[str, Any]]:
    """The rows of a table by the names in its head line. UserError if malformed."""
    number = -1
    try:
        lines = io.StringIO(read_text(path, encoding), newline="")
        for number, row in enumerate(cut_rows(lines, path.suffix.lower())):
            if None in row:
                raise UserError(f"{path}: row {number} has more cells than the head line; put texts in quotes")
            yield row
    except csv.Error as error:
        raise UserError(f"{path}: row {number + 1}: malformed table ({error}); fix it there") from None


def scan_file(path: Path, text: str, expected: str = "Alpaca records") -> Iterator[tuple[int, object]]:
    """As `_scan`, but raises UserError for a file without records and for malformed JSON."""
    number = 0
    try:
        for number, found in enumerate(_scan(text), 1):  # noqa: B007 (the record that comes next, when one is malformed)
            yield found
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: record {number} (counted from 0), line {error.lineno}, column {error.colno}: "
            f"malformed JSON ({error.msg}), expected an array of records or one per line; fix it there"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: record {number} (counted from 0): malformed JSON ({error}); fix it there") from None
    if not number:
        raise UserError(f"{path}: is empty, expected {expected}; give another file")


def _scan(text: str) -> Iterator[tuple[int, object]]:
    """Each record of a JSON array or of JSON lines, with the number of the line where it starts. Records are decoded
    one at a time, so that an error can name its record."""
    position = _skip_blanks(text, 0)
    in_array = text.startswith("[", position)
    if in_array:
        position = _skip_blanks(text, position + 1)
        if text.startswith("]", position):
            in_array, position = False, _skip_blanks(text, position + 1)
    line, counted = 1, 0
    while position < len(text) or in_array:
        value, end = next_json_value(text, position)
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


def fault(value: object, names: Sequence[str], missing: str) -> str:
    """What is wrong with a record that should have these string fields, among them `instruction`; "" if nothing is.
    missing: the message for an absent field, a template with {name} and {keys}."""
    if not isinstance(value, dict):
        return f"got {shown(value)}, expected an object with {', '.join(names)}; fix or remove it"
    keys = shown(list(value))  # as they are in the file
    value = named(value)
    for name in names:
        if name not in value:
            return missing.format(name=name, keys=keys)
        if not isinstance(value[name], str):
            return f"'{name}' is {shown(value[name])}, expected a string; put it in quotes"
        if not _has_utf8(value[name]):
            return f"'{name}' contains half of a surrogate pair, expected text; remove its \\ud... escape"
    blank = "'instruction' is blank, expected a task; fill it in or remove the record"
    return "" if value["instruction"].strip() else blank


def _to_records(value: object) -> list[Record]:
    """The records in `value`, one per reply of a chat. Raises Fault."""
    if isinstance(value, dict) and value.get("label") is False and "completion" in value:
        raise Fault("its 'label' is false: its completion is not to be learned; remove the record")
    if is_chat(value):
        assert isinstance(value, dict)
        chat = chat_of(value)
        if not all(map(_has_utf8, [chat.system, *(text for turn in chat.answered for text in turn)])):
            raise Fault("a message contains half of a surrogate pair, expected text; remove its \\ud... escape")
        answered = chat.answered
        return [
            Record(user, "", reply, answered[:i], chat.system)
            for i, (user, reply) in enumerate(answered)
            if i not in chat.known
        ]
    if wrong := fault(value, _FIELDS, "got the keys {keys}, expected '{name}' too; add it, or see data.conversations"):
        raise Fault(wrong)
    assert isinstance(value, dict)
    value = named(value)
    return [Record(**{name: value[name] for name in _FIELDS}, **before(value))]


def before(value: dict[str, Any]) -> dict[str, Any]:
    """What stands before an instruction: `history`, the earlier turns, and `system`, the prompt. Raises Fault."""
    history, system = value.get("history") or [], value.get("system") or ""
    if not isinstance(history, list) or not all(_is_turn(turn) for turn in history):
        raise Fault(f"'history' is {shown(history)}, expected pairs of an instruction and its reply; fix or remove it")
    if not isinstance(system, str) or not _has_utf8(system):
        raise Fault(f"'system' is {shown(system)}, expected a string; fix or remove it")
    return {"history": tuple((turn[0], turn[1]) for turn in history), "system": system}


def _is_turn(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) and _has_utf8(v) for v in value)


def _has_utf8(text: str) -> bool:
    """False for a lone surrogate, which JSON's escapes can write and no tokenizer can turn into bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- cleaning --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cleaned:
    """The result of cleaning a file of records."""

    path: Path  # of the clean records, as one JSON array
    records: int
    emptied: int  # inputs that only said "no input"
    refused: tuple[Refusal, ...]


def clean(value: Record) -> Record | str:
    """The cleaned record, or why it is left out. An input that only says "no input" becomes empty."""
    if not value.output.strip():
        return "empty output"
    if _NO_OUTPUT.fullmatch(value.output):
        return "the output says that there is none"
    if _NEXT_TASK.search(value.output):
        return "the output runs on into another task"
    return replace(value, input="") if _NO_INPUT.fullmatch(value.input) else value


def make_instructions(
    out: Path,
    path: Path | None = None,
    base_url: str = HOST,
    encoding: str = "utf-8",
    downloader: Downloader | None = None,
) -> Cleaned:
    """Write the clean records of a file, or of the published one if `path` is None, to `out`/alpaca.json.

    A record that is malformed, has an empty reply, or equals an earlier one is listed in `refused`, with the reason.
    `out`/source.json, written last, says where the records come from. Raises UserError for a file that is missing,
    cannot be downloaded or is not a list of records, if there is no usable record, and if the disk is full or not
    writable.
    """
    with locked(out):
        url = path.name if path else check_url(f"{base_url.rstrip('/')}/{PATH}")
        if path is None:
            path = (downloader or Downloader()).fetch(url, out / "raw" / "alpaca_data.json").path
        kept: dict[Record, int] = {}
        refused: list[Refusal] = []
        emptied = 0
        for number, record in enumerate(_read_each(path, encoding)):
            cleaned = clean(record) if isinstance(record, Record) else record
            if isinstance(cleaned, Record) and cleaned in kept:
                cleaned = f"the same as record {kept[cleaned]}"
            if isinstance(cleaned, Record):
                kept[cleaned] = number
                emptied += cleaned != record
            else:
                refused.append(Refusal(f"{path.name}:{number}", cleaned))
        if not kept:
            raise UserError(f"{path}: no usable record, expected Alpaca records{first_of(refused)}")
        inputs = [InputFile.of(url, path)]
        target = write_instructions(out, list(kept), "alpaca", LICENCE, inputs, refused, emptied_inputs=emptied)
    return Cleaned(target, len(kept), emptied, tuple(refused))


def write_instructions(
    out: Path,
    records: Sequence[Record],
    name: str,
    licence: str,
    inputs: Sequence[InputFile] = (),
    refused: Sequence[Refusal] = (),
    **counts: int,
) -> Path:
    """Write `out`/alpaca.json, and source.json next to it with the records' origin. The caller holds the folder's lock.
    Raises UserError, as make_instructions does."""
    target = out / "alpaca.json"
    with writing(out):  # so that a new alpaca.json is never next to the old source.json
        (out / MANIFEST).unlink(missing_ok=True)
    write_json(target, [{name: v for name, v in asdict(r).items() if v or name != "system"} for r in records])
    instructions = {
        "file": target.name,
        "bytes": target.stat().st_size,
        "sha256": sha256_of(target),
        "records": len(records),
        **counts,
    }
    write_manifest(out, name, licence, inputs, refused, instructions=instructions)
    return target


def make_documents(out: Path, files: Sequence[Path]) -> Source:
    """The source folder `questions`: the records that recipes/sft.py would train on, without those it holds out, as
    questions with answers, RECORDS_A_DOCUMENT per document, in a fixed random order: so a document has records of all
    files. Raises UserError, as read_records does."""
    records = [record for record in read_split(files)[0] if record.output.strip()]
    records = [records[i] for i in Stream(0, "questions").permutation(len(records))]
    _, licences = origins_of(files, ("", ""))
    with locked(out), SourceWriter(out, "questions", licences) as writer:
        for first in range(0, len(records), RECORDS_A_DOCUMENT):
            part = records[first : first + RECORDS_A_DOCUMENT]
            texts = [f"Question: {f'{r.instruction} {r.input}'.strip()}\nAnswer: {r.output.strip()}" for r in part]
            writer.add(Document(str(first), "\n\n".join(texts)))
        for path in files:
            writer.add_file(path.name, path)
    return read_source(out)


def _read_each(path: Path, encoding: str) -> Iterator[Record | str]:
    """Every record of a file, or what is wrong with it. In JSON lines a malformed line does not affect later ones."""
    for value in _each_value(path, encoding):
        try:
            yield from [value] if isinstance(value, str) else _to_records(value[0])
        except Fault as wrong:
            yield str(wrong)


def _each_value(path: Path, encoding: str) -> Iterator[tuple[object] | str]:
    """Every value of a file, in a tuple, or what is wrong with its line."""
    if path.suffix.lower() in ROWS:
        yield from ((value,) for _, value in each_object(path, encoding))
        return
    text = _read_zipped(path, encoding) if path.suffix.lower() == ".zip" else read_text(path, encoding)
    try:
        whole = json_value(text)
    except ValueError:
        whole = None
    if isinstance(whole, list) or text.lstrip().startswith("["):
        yield from ((value,) for _, value in scan_file(path, text))
    elif whole is not None and "\n" in text.strip():
        raise UserError(f"{path}: got {shown(whole)} as JSON, expected a list of records, or one record per line")
    else:
        for line in filter(str.strip, text.split("\n")):
            try:
                yield (json_value(line),)
            except ValueError as error:
                yield f"malformed JSON ({error}), expected one record per line; fix it there"


def _read_zipped(path: Path, encoding: str) -> str:
    members = [member for member in zip_members(path) if member.name.lower().endswith((".json", ".jsonl"))]
    if len(members) != 1:
        raise UserError(f"{path}: {len(members)} .json files in it, expected one; unpack it and name the file")
    return decode_text(members[0].read(), encoding, f"{path}: {members[0].name}")


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m data.alpaca", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a local file (default: download them)")
    parser.flag("--out", Path, "folder for alpaca.json and source.json", required=True, metavar="DIR")
    parser.flag("--base-url", HOST, "a mirror", metavar="URL")
    parser.flag("--encoding", "utf-8", "of the file")
    what = "write a source for data.corpus instead: the training records of these files, as questions with answers"
    parser.flag("--as-text", [], what, type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    if args.as_text:
        if args.file:
            raise UserError(f"got {args.file} and --as-text with files of its own; name all files after --as-text")
        source = make_documents(args.out, args.as_text)
        print(f"{count_of(source.documents, 'document')}, {source.bytes:,} bytes in {args.out}")
        return 0
    cleaned = make_instructions(args.out, args.file, args.base_url, args.encoding)
    print(
        f"{count_of(cleaned.records, 'record')} in {cleaned.path}; {count_of(cleaned.emptied, 'input')} without "
        f"content emptied; {len(cleaned.refused):,} left out{':' * bool(cleaned.refused)}"
    )
    reasons = Counter(re.sub(r"\d+", "N", refusal.reason) for refusal in cleaned.refused)
    for reason, count in reasons.most_common():
        print(one_line(f"{count:>7,}  {reason}"))
    print_refused(cleaned.refused)
    return 0


if __name__ == "__main__":
    run_command(main)
