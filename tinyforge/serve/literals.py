"""Calls whose arguments are literals, `key=value` or `key:value` (`tool_calls.Literals`): read as JSON; their grammar.

Models write values as Python does, as JSON does, or with a tag around each text, and mix these: all are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from tinyforge.files import json_value
from tinyforge.infer.grammar import BLANKS, closed
from tinyforge.infer.stream import possible_start
from tinyforge.serve.fields import FREE, MOST_KEY, leaves, properties_of, refusal, resolved, types_at, types_of
from tinyforge.tokenizers.tool_calls import Literals

MOST_DEPTH = 32
"""Lists and objects within each other: a value with more is read as a text, a schema with more is refused."""
MOST_RULES = 2048
WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
BRACKETS = {"(": ")", "[": "]", "{": "}"}
_KEY = re.compile(r"[\s,]*([^\s,:=(){}\[\]]+)\s*[:=]\s*")
_PART_OF_KEY = re.compile(r"[\s,]*[^\s,:=(){}\[\]]*\s*")
_BRACKET = re.compile(r"[()\[\]{},]")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|[^u])", re.DOTALL)
_BLANK = re.compile(r"\s{0,200}")
_WORD = re.compile(r"[^,\[\](){}]+")
_NAME = re.compile(r"\s*([^\s,:=(){}\[\]]+)")


class LiteralReader:
    """The arguments of one call, up to the bracket that closes them. Each is passed on once it is complete.

    close: that bracket."""

    def __init__(self, literals: Literals, schema: Any, close: str) -> None:
        self.schema, self.close = schema, close
        self.quotes = ("'", '"') if len(literals.quote) == 1 else (literals.quote,)
        self._marks = re.compile("|".join(map(re.escape, (*self.quotes, *"()[]{},"))))
        self._count = self._depth = 0
        self._reading = False  # a value; else a key comes next
        self._begin = self._at = 0  # of the value; how far it is known
        self._name = self._quote = ""  # no name: a value without a key, which is left out

    def push(self, text: str, last: bool) -> tuple[str, str, bool]:
        """The JSON that a text completes, the rest of the text, and whether the call's arguments are over."""
        found = ""
        while True:
            if not self._reading:
                rest = text.lstrip(" \t\r\n,")
                begun = _KEY.match(text)
                if rest.startswith(self.close):
                    return found + ("}" if self._count else "{}"), rest, True
                if begun is None and _PART_OF_KEY.fullmatch(text):
                    if len(text) < MOST_KEY and not last:
                        return found, text, False
                    # An unfinished name is none of the text.
                    return found + ("}" if self._count else "{}"), "" if last else rest, True
                self._name = begun[1].strip("'\"") if begun else ""
                self._begin = self._at = begun.end() if begun else len(text) - len(rest)
                self._reading, self._depth, self._quote = True, 0, ""
            end = self._end(text, last)
            if end is None:
                if last and not self._name:
                    return found + ("}" if self._count else "{}"), "", True
                return found, text, False
            self._reading = False
            if not self._name:
                text = text[end:]
                continue
            raw = text[self._begin : end].strip()
            value = literal(raw, self.quotes)
            if types_at(self.schema, self._name) == {"string"} and not isinstance(value, str):
                value = raw
            found += f"{', ' if self._count else '{'}{json.dumps(self._name)}: {json.dumps(value, ensure_ascii=False)}"
            text, self._count = text[end:], self._count + 1

    def _end(self, text: str, last: bool) -> int | None:
        """Where the value ends, None where more has to come."""
        while True:
            if self._quote:
                self._at, closes = _closing(text, self._at, self._quote, last)
                if not closes:
                    return self._bare_end(text) if last else None
                self._quote = ""
            mark = self._marks.search(text, self._at)
            if mark is None:
                self._at = max(self._at, len(text) - possible_start(text, self.quotes))
                return None
            if not self._depth and mark[0] in (",", self.close):
                return mark.start()
            if mark[0] in self.quotes:
                before = text[max(self._begin, mark.start() - 200) : mark.start()].rstrip()
                if len(mark[0]) > 1 or before[-1:] in ("", *",([{:="):  # else within a word: it's
                    self._quote = mark[0]
            else:
                self._depth = max(0, self._depth + (mark[0] in "([{") - (mark[0] in ")]}"))
            self._at = mark.end()

    def _bare_end(self, text: str) -> int | None:
        """Where a value ends whose quotes do not close: by its brackets alone."""
        depth = 0
        for mark in _BRACKET.finditer(text, self._begin):
            if not depth and mark[0] in (",", self.close):
                return mark.start()
            depth = max(0, depth + (mark[0] in "([{") - (mark[0] in ")]}"))
        return None


def _closing(text: str, at: int, quote: str, last: bool) -> tuple[int, bool]:
    """Where a text in quotes ends, its quote included, and True; or how far it is known, and False. A quote of one
    character that something else follows than a bracket or a comma is part of the text: not all models escape it."""
    while True:
        end = text.find(quote, at)
        if len(quote) > 1:
            return (end + len(quote), True) if end >= 0 else (max(at, len(text) - len(quote) + 1), False)
        escape = text.find("\\", at, end if end >= 0 else len(text))
        if escape >= 0:
            if escape + 1 == len(text):
                return escape, False
            at = escape + 2
            continue
        if end < 0:
            return len(text), False
        follows = _BLANK.match(text, end + 1).end()  # type: ignore[union-attr]
        if follows == len(text) and not last:
            return end, False
        at = end + 1
        if follows == len(text) or text[follows] in ",:)]}":
            return at, True


def literal(text: str, quotes: Sequence[str]) -> Any:
    """The value of a literal; the text itself where it is none."""
    try:
        found, end = _value(text, 0, quotes, MOST_DEPTH)
    except (ValueError, IndexError):
        return text
    return found if not text[end:].strip() else text


def _value(text: str, at: int, quotes: Sequence[str], depth: int) -> tuple[Any, int]:
    at += len(text[at:]) - len(text[at:].lstrip()) if text[at : at + 1].isspace() else 0
    quote = next((quote for quote in quotes if text.startswith(quote, at)), None)
    if quote is not None:
        end, closes = _closing(text, at + len(quote), quote, True)
        if not closes:
            raise ValueError("a text does not end")
        inner = text[at + len(quote) : end - len(quote)]
        if len(quote) > 1:
            return inner, end
        plain = _ESCAPE.sub(_unescaped, inner)
        return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), end  # pairs are one character
    close = BRACKETS.get(text[at])
    if close is not None:
        if not depth:
            raise ValueError("too deep")
        return _container(text, at + 1, close, quotes, depth - 1)
    word = _WORD.match(text, at)
    if word is None:
        raise ValueError("no value")
    said = word[0].strip()
    if said in WORDS:
        return WORDS[said], word.end()
    try:
        number = json_value(said)
        return (number if isinstance(number, (int, float)) and isfinite(number) else said), word.end()
    except (ValueError, OverflowError):
        return said, word.end()


def _container(text: str, at: int, close: str, quotes: Sequence[str], depth: int) -> tuple[Any, int]:
    items, pairs = list[Any](), dict[str, Any]()
    while True:
        while text[at].isspace() or text[at] == ",":
            at += 1
        if text[at] == close:
            return (pairs if close == "}" else items), at + 1
        if close == "}":
            if text.startswith(tuple(quotes), at):
                key, at = _value(text, at, quotes, depth)
            else:
                named = _NAME.match(text, at)
                if named is None:
                    raise ValueError("no key")
                key, at = named[1].strip("'\""), named.end()
            while text[at].isspace():
                at += 1
            if text[at] not in ":=":
                raise ValueError("no value after a key")
            pairs[key], at = _value(text, at + 1, quotes, depth)
        else:
            item, at = _value(text, at, quotes, depth)
            items.append(item)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else ESCAPES.get(code, code if code in "\\'\"/" else found[0])


# --- grammar


class _Rules:
    """The rules in Lark of one function's arguments. terms: a text as Lark."""

    def __init__(self, name: str, literals: Literals, root: Any, call: str, terms: Callable[[str], list[str]]) -> None:
        self.name, self.literals, self.root, self.call = name, literals, root, call
        self.made = list[str]()
        self._terms = terms

    def text(self, text: str) -> str:
        return " ".join(self._terms(text))

    def rule(self, body: str) -> str:
        if len(self.made) >= MOST_RULES:
            raise refusal(self.name, "a schema of this size")
        name = f"{self.call}_{len(self.made)}"
        self.made.append(f"{name}: {body}")
        return name

    def arguments(self, schema: Any, depth: int = MOST_DEPTH) -> str:
        """KEY assign VALUE for each property, in order, with commas between."""
        properties, required = properties_of(self.name, schema, self.root)
        comma, rest, first = self.text(self.literals.comma), "", list[str]()
        for key, given in reversed(properties.items()):
            one = self.rule(f"{self.text(self.key(key) + self.literals.assign)} {self.value(given, depth)}")
            first = ([] if key in required else first) + [f"{one} {rest}"]
            rest = self.rule(f"{comma} {one} {rest}" if key in required else f"({comma} {one})? {rest}")
        if not properties and resolved(schema, self.root).get("additionalProperties", True) is not False:
            one = self.rule(
                f"/[a-zA-Z_][a-zA-Z0-9_.-]{{0,63}}/ {self.text(self.literals.assign)} {self.value({}, depth)}"
            )
            return f"({one} ({comma} {one})*)?"
        found = " | ".join(first)
        return f"({found})" + ("" if any(key in required for key in properties) else "?") if found else ""

    def value(self, schema: Any, depth: int) -> str:
        if len(self.literals.quote) == 1:
            return self.json(schema)
        if not depth:
            raise refusal(self.name, f"a schema of {MOST_DEPTH} levels")
        found = list[str]()
        for leaf in leaves(schema, self.root):
            listed = [leaf["const"]] if "const" in leaf else leaf.get("enum")
            if isinstance(listed, list):
                found += [self.text(self.spelt(value)) for value in listed]
                continue
            for kind in sorted(types_of(leaf)) or ["string", "number", "boolean", "null"]:
                found.append(self.of_type(kind, leaf, depth))
        return self.rule(" | ".join(found))

    def of_type(self, kind: str, leaf: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return f'"{{" {self.arguments(leaf, depth - 1)} "}}"'
        if kind in ("string", "array") and (unknown := sorted(leaf.keys() - FREE - {"items"})):
            raise refusal(self.name, unknown[0][:40])
        if kind == "array":
            item = self.value(leaf.get("items", {}), depth - 1)
            return f'"[" ({item} ({self.text(",")} {item})*)? "]"'
        if kind != "string":
            return self.json({**leaf, "type": kind})
        first, *others = quote = self._terms(self.literals.quote)
        if first.startswith("<["):
            return f"{' '.join(quote)} TEXT {' '.join(quote)}"
        self.made.append(f"{self.call}_text{len(self.made)}[lazy]: TEXT {' '.join([first, *others])}")
        return f"{' '.join(quote)} {self.call}_text{len(self.made) - 1}"

    def json(self, schema: Any) -> str:
        given = schema if isinstance(schema, dict) else {}
        named = {k: self.root[k] for k in ("$defs", "definitions") if isinstance(self.root, dict) and k in self.root}
        return self.rule(f"%json {json.dumps({'x-guidance': BLANKS, **closed({**named, **given})})}")

    def key(self, key: str) -> str:
        if not _KEY.fullmatch(f"{key}="):
            raise refusal(self.name, f"the name {key[:40]!a}")
        return key

    def spelt(self, value: Any) -> str:
        quote = self.literals.quote
        if isinstance(value, str):
            if quote in value:
                raise refusal(self.name, f"the text {value[:40]!a}")
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{self.key(key)}:{self.spelt(each)}" for key, each in value.items()) + "}"
        return f"[{','.join(map(self.spelt, value))}]" if isinstance(value, list) else json.dumps(value)


def literal_rules(
    name: str, literals: Literals, parameters: Mapping[str, Any], call: str, terms: Callable[[str], list[str]]
) -> tuple[str, list[str]]:
    """The arguments of a function in Lark, and the rules that they need, whose names begin with `call`. terms: a text
    as Lark. ApiError for a schema that cannot be followed."""
    rules = _Rules(name, literals, parameters, call, terms)
    return rules.arguments(parameters), rules.made
