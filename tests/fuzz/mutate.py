"""Files that are wrong, made from files that are right.

    mutate(good, random.Random(7), others)      the same bytes for the same seed

Bytes are flipped, cut, doubled, overwritten and mixed with other files'. What parses as JSON, as lines of JSON or as a
safetensors header is also changed as what it means: another type, a number of a thousand digits, a hundred thousand
brackets, a key too many or too few.
"""

from __future__ import annotations

import io
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

MOST = 1 << 20  # bytes; reading more takes its time, and is no fault
INTEGERS = (0, 1, 127, 128, 255, 256, 2**15, *(2**n - less for n in (16, 31, 32, 63) for less in (0, 1)), 2**64 - 1)
TEXTS = (
    "",
    " ",
    "\n",
    "\0",
    "a" * 70_000,
    "../../etc/passwd",
    "/dev/zero",
    "/",
    ".",
    "\x1b[2J\x1b]0;title\x07",
    "\r\nerror: no",
    "\u202etxt.exe",
    "\ud800",
    "\U0010ffff",
    "e\u0301" * 500,
    "<|endoftext|>",
    "%s%n",
    "'; DROP TABLE documents; --",
    "nan",
    "true",
    "*?[",
    "x" * 255 + ".json",
    "F32",
    "BF16",
    "BOOL",
    "text",
)
# Values in JSON's own spelling: some of them no Python object could hold, or json.dumps would not write.
VALUES = (
    "null",
    "true",
    "false",
    "0",
    "-0",
    "-1",
    "1",
    "0.5",
    "1e308",
    "1e309",
    "-1e309",
    "1e-400",
    "NaN",
    "Infinity",
    "-Infinity",
    "9" * 18,
    "9" * 400,
    "9" * 5000,
    "-" + "1" * 5000,
    "1" * 40 + ".5",
    "1e" + "9" * 400,
    "[]",
    "{}",
    "[[]]",
    "[" * 500 + "]" * 500,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 100_000 + "1" + "}" * 100_000,
    '{"":{"":""}}',
    "[" + "0," * 20_000 + "0]",
    '"\\ud800"',
    '"\\u0000"',
    '"\\udcff"',
    "4294967296",
    "9223372036854775808",
    "1000000000",
    "1000000",
    "100000",
    "65536",
)


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """`data` with one to a few changes. others: files that pieces of may be put into it."""
    kinds: list[Callable[[bytes, random.Random, Sequence[bytes]], bytes]] = [_as_bytes]
    if data.lstrip()[:1] in (b"{", b"["):
        kinds += [_as_json] * 3
    if data[8:9] == b"{":
        kinds += [_as_safetensors] * 3
    if data.startswith(b"PK"):
        kinds += [_as_zip] * 2
    if b"\n" in data[:4000] and b"\0" not in data[:4000]:
        kinds += [_as_lines] * 2
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(kinds)(data, rng, others)[:MOST]
    return data


# --- bytes ------------------------------------------------------------------------------------------------------------


def _as_bytes(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    return rng.choice(_BYTES)(bytearray(data), rng, others)


def _span(data: bytes | bytearray, rng: random.Random) -> slice:
    start = rng.randrange(len(data) + 1)
    return slice(start, min(len(data), start + rng.choice((1, 2, 4, 8, 64, 1000, len(data)))))


def _flip(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8, 100)) if data else 0):
        data[_place(data, rng)] ^= 1 << rng.randrange(8)
    return bytes(data)


def _place(data: bytes | bytearray, rng: random.Random) -> int:
    """An index, as often as not near one of the ends: there the headers are."""
    near = min(len(data), 64)
    return rng.choice((rng.randrange(len(data)), rng.randrange(near), len(data) - 1 - rng.randrange(near)))


def _overwrite(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytes:
    if data:
        number = rng.choice((*INTEGERS, len(data), len(data) + 1, len(data) - 1))
        raw = struct.pack(rng.choice(("<", ">")) + "Q", number)[: rng.choice((1, 2, 4, 8))]
        at = _place(data, rng)
        at -= at % rng.choice((1, 4, 8))
        data[at : at + len(raw)] = raw
    return bytes(data)


def _cut(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytes:
    return bytes(data[: rng.choice((0, 1, 7, 8, rng.randrange(len(data) + 1), max(0, len(data) - 1)))])


def _remove(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytes:
    del data[_span(data, rng)]
    return bytes(data)


def _double(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytes:
    span = _span(data, rng)
    data[span] = data[span] * rng.choice((2, 2, 3, max(1, min(1000, 300_000 // (1 + len(data[span]))))))
    return bytes(data)


def _insert(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice(
        (
            rng.randbytes(rng.choice((1, 4, 100))),
            rng.choice(TEXTS).encode("utf-8", "surrogatepass"),
            b"\xff\xfe",
            b"\0" * 64,
            b"\xef\xbb\xbf",
            b"\x80",
            b"\n" * 50,
            b"[" * 2000,
            b"9" * 5000,
            rng.choice(VALUES).encode(),
        )
    )
    return bytes(data)


def _splice(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytes:
    if others:
        other = rng.choice(others)
        data[_span(data, rng)] = other[_span(other, rng)]
    return bytes(data)


def _replace(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytes:
    return rng.choice((b"", b"\n", b"null", b"{}", b"[]", b"\0" * 1000, rng.randbytes(500), *others))


_BYTES = (_flip, _flip, _overwrite, _overwrite, _cut, _remove, _double, _insert, _insert, _splice, _replace)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _as_json(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    try:
        return _changed(json.loads(data), rng)
    except (ValueError, RecursionError, OverflowError):  # an earlier change has spoilt it, or grown it too far
        return _as_bytes(data, rng, others)


def _changed(content: Any, rng: random.Random) -> bytes:
    """The text of a JSON value in which something, at any depth, is another."""
    places = list(_places(content))
    if not places:
        return rng.choice(VALUES).encode()
    holder, key = rng.choice(places)
    # A list of a thousand numbers must not hide the ten fields next to it.
    if rng.random() < 0.5:
        few = [place for place in places if isinstance(place[0], dict)]
        holder, key = rng.choice(few or places)
    raw, value = "", holder[key]
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = rng.choice(TEXTS)
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice((*TEXTS, str(key) * 2, "format", "name"))] = holder.pop(key)
    elif kind == 3 and isinstance(holder, list):
        room = MOST // (1 + len(json.dumps(value)))
        holder[key:key] = [value] * min(room, rng.choice((1, 2, 5000)))
    elif kind == 4:
        other, place = rng.choice(places)
        holder[key] = other[place]
        if _contains(holder[key], holder):  # a value within itself has no text
            holder[key] = value
    elif kind == 5 and type(value) in (int, float):
        others = (-value, value + 1, value - 1, value * 1000, value * 10**9, value + 0.5, str(value))
        holder[key] = rng.choice((*others, *INTEGERS))
    elif kind == 6 and isinstance(value, str) and value:
        at = rng.randrange(len(value))
        longer = value[:at] + rng.choice(TEXTS) + value[at:]
        holder[key] = rng.choice((value[:at], value[at:] + value[:at], value * 50, longer))
    else:
        raw = rng.choice(VALUES)
        holder[key] = "\x01raw\x01"
    text = json.dumps(content, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
    return text.replace('"\\u0001raw\\u0001"', raw, 1).encode("utf-8", "surrogatepass")


def _places(content: Any) -> Any:
    """Every value in a JSON value, as what holds it and its key there."""
    pending = [content]
    while pending:
        holder = pending.pop()
        keys = holder.keys() if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            if isinstance(holder[key], dict | list):
                pending.append(holder[key])


def _contains(value: Any, expected: Any) -> bool:
    return value is expected or any(holder[key] is expected for holder, key in _places(value))


def _as_lines(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        line = lines[rng.randrange(len(lines))]
        lines[at:at] = [line] * min(MOST // (1 + len(line)), rng.choice((1, 3, 2000)))
    elif kind == 2:
        rng.shuffle(lines)
    elif kind == 3:
        lines[at] = rng.choice(VALUES).encode()
    elif lines[at].lstrip()[:1] in (b"{", b"["):
        lines[at] = _as_json(lines[at], rng, others).replace(b"\n", b" ")
    else:
        lines[at] = _as_bytes(lines[at], rng, others)
    return rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"")).join(lines)


# --- other formats ----------------------------------------------------------------------------------------------------


def _as_safetensors(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Another header, its length mended as often as not, so that what it says is believed."""
    length = int.from_bytes(data[:8], "little")
    header = _as_json(data[8 : 8 + length], rng, others)
    said = len(header) if rng.random() < 0.8 else rng.choice(INTEGERS)
    return struct.pack("<Q", said) + header + data[8 + length :]


def _as_zip(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Another archive: more members, or with other names, doubled, packed otherwise, huge, or damaged within."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # an earlier change has spoilt it; zipfile raises anything then
        return _as_bytes(data, rng, others)
    name, content = rng.choice(members) if members else ("a.txt", b"text")
    kind = rng.randrange(5)
    if kind == 0:
        members.append((rng.choice((*TEXTS, "a/" * 500, "../a.txt", "C:\\a.txt", name)) or "x", content))
    elif kind == 1:
        suffix = rng.choice((".txt", ".jsonl", ".json", ".zip", ".parquet"))
        members.append((f"more{suffix}", rng.choice((*others, content))))
    elif kind == 2:
        members.append(("zeros.txt", b"\0" * rng.choice((10, 10**6, 10**7))))
    elif kind == 3:
        members += [(f"{i}-{name}", content[:100]) for i in range(rng.choice((10, 300)))]
    else:
        members = [(n, _as_bytes(c, rng, others)) for n, c in members]
    packed = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with warnings.catch_warnings(), zipfile.ZipFile(packed, "w", method) as archive:
        warnings.simplefilter("ignore")  # a name twice is what is expected
        for name, content in members:
            info = zipfile.ZipInfo(name[:9999].encode("utf-8", "replace").decode() or "x", (2020, 1, 1, 0, 0, 0))
            info.compress_type = method
            archive.writestr(info, content)
    return packed.getvalue()
