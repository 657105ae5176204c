"""Calls whose arguments stand one by one between tags (`tool_calls.Fields`): read as JSON, and their grammar."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tinyforge.files import json_value
from tinyforge.infer.grammar import BLANKS, closed
from tinyforge.infer.stream import possible_start
from tinyforge.serve.protocol import ApiError
from tinyforge.tokenizers.tool_calls import Fields

MOST_KEY = 1024
"""Characters of an argument's name with what is around it."""
CDATA = "<![CDATA["
"""Where some models wrap a text that has tags in it."""
MOST_STEPS = 32
"""References that are followed one after the other, and branches of a schema that are read for its types."""
MOST_FIELDS = 1024
"""Properties of a function in a grammar."""
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
FREE = {"title", "description", "default", "examples", "deprecated", "type", "$ref", "$defs", "definitions"}
"""Keywords that restrict no text."""
OF_OBJECTS = FREE | {"properties", "required", "additionalProperties", "$schema", "$id", "propertyOrdering", "strict"}


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """A schema that is no reference into `root`; an empty one where there is none."""
    for _ in range(MOST_STEPS):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(place := schema.get("$ref"), str):
            return schema
        schema = root
        for part in place.removeprefix("#").split("/")[1:]:
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return {}


def leaves(schema: Any, root: Any) -> list[dict[str, Any]]:
    """The schemas of which one has to hold, without references and branches; one that takes all where there are more
    than MOST_STEPS."""
    found, left = list[dict[str, Any]](), [schema]
    for _ in range(MOST_STEPS):
        if not left:
            return found
        schema = resolved(left.pop(0), root)
        key = next((key for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
        if key is None or schema.keys() - FREE - {key}:
            found.append(schema)
        else:
            left += schema[key][: MOST_STEPS + 1]
    return [{}] if left else found


def types_of(leaf: Mapping[str, Any]) -> set[str]:
    """The types that a schema names; none where it takes all."""
    if isinstance(values := [leaf["const"]] if "const" in leaf else leaf.get("enum"), list):
        return {KINDS.get(type(value), "null") for value in values}
    named = leaf.get("type")
    return {t for t in (named if isinstance(named, list) else [named]) if isinstance(t, str)}


def all_types(schema: Any, root: Any) -> set[str]:
    """The types of all `leaves`; none where one takes all."""
    each = [types_of(leaf) for leaf in leaves(schema, root)]
    return set().union(*each) if all(each) else set()


def types_at(schema: Any, name: str) -> set[str]:
    """The types of a function's argument; none where it takes all."""
    properties = resolved(schema, schema).get("properties")
    return all_types(properties.get(name), schema) if isinstance(properties, dict) else set()


def value_of(text: str, types: set[str]) -> Any:
    """What a model means by a text, by the types that its schema has: many write 3 or None for an argument that may be
    a number or null, and some write other values as Python does."""
    if types == {"string"}:
        return text
    found: Any = text
    for read in (json_value, ast.literal_eval):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            json.dumps(read(text.strip()), allow_nan=False)
            found = read(text.strip())
            break
    kind = "null" if found is None else KINDS.get(type(found), "")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return found if kind and kind != "string" and (fits or "string" not in types) else text


class FieldReader:
    """The arguments of one call, from their first tag to where something else follows.

    ends: whether what follows an argument may be the next one or the end of the call, at a place of a text: whether it
    is, None where more text has to come.
    """

    def __init__(self, fields: Fields, schema: Any, ends: Callable[[str, int], bool | None]) -> None:
        self.fields, self.schema, self.ends = fields, schema, ends
        self._before = re.compile(rf"\s*{_loose(fields.before)}")
        self._kind = re.compile(f"{_loose(fields.kind[0])}(.{{0,40}}?){_loose(fields.kind[1])}")
        self._leads = _blank(fields.kind[1] or fields.kind[0])
        self._blank = fields.after[: len(fields.after) - len(fields.after.lstrip())]
        self._close = self._trails = ""  # of the argument that is read: the tag after it, and the white space before
        self._seen, self._count = 0, 0
        self._types: set[str] | None = None  # of the argument that is read
        self._streams = False

    def push(self, text: str, last: bool) -> tuple[str, str, bool]:
        """The JSON that a text completes, the rest of the text, and whether the call's arguments are over."""
        found = ""
        while True:
            more, text, done = self._value(text, last) if self._types is not None else self._key(text, last)
            found += more
            if done is not None:
                return found, text, done

    def _key(self, text: str, last: bool) -> tuple[str, str, bool | None]:
        begun = self._before.match(text)
        if begun is None:
            waits = not last and len(text) < MOST_KEY and bool(possible_start(text.lstrip(), [self.fields.before]))
            if (waits and text.lstrip() in self.fields.before) or (not last and not text.strip()):
                return "", text, False
            return ("}" if self._count else "{}"), text.lstrip(), True
        kind = self._kind.search(text, begun.end())
        begin = kind.end() if kind else 0
        begin += len(self._leads) * text.startswith(self._leads, begin)
        if kind is None or (not last and CDATA.startswith(text[begin:])):
            if kind is None and (last or len(text) > MOST_KEY):
                return ("}" if self._count else "{}"), text.lstrip(), True
            return "", text, False
        name = text[begun.end() : kind.start()].strip()
        types = types_at(self.schema, name)
        if self.fields.kinds[0] != self.fields.kinds[1]:
            types = {"string"} if kind[1] == self.fields.kinds[0] else types - {"string"}
        self._types, self._streams, self._seen = types, types == {"string"}, 0
        wrapped = text.startswith(CDATA, begin)
        self._close = ("]]>" if wrapped else "") + self.fields.after.strip()
        self._trails = "" if wrapped else self._blank
        begin += len(CDATA) * wrapped
        comma, self._count = ", " if self._count else "{", self._count + 1
        return f"{comma}{json.dumps(name)}: {chr(34) * self._streams}", text[begin:], None

    def _value(self, text: str, last: bool) -> tuple[str, str, bool | None]:
        assert self._types is not None
        at, found = text.find(self._close, self._seen), ""
        while at >= 0:
            ends = self.ends(text, at + len(self._close))
            if ends or (ends is None and last):
                value = text[:at].removesuffix(self._trails)
                made = f'{_quoted(value)}"' if self._streams else json.dumps(value_of(value, self._types))
                self._types = None
                return made, text[at + len(self._close) :], None
            if ends is None:
                break
            at = text.find(self._close, at + 1)
        sure = at if at >= 0 else len(text) - (0 if last else possible_start(text, [self._close]))
        if not last:
            sure -= (
                len(self._trails) if text[:sure].endswith(self._trails) else possible_start(text[:sure], [self._trails])
            )
        self._seen = sure
        if self._streams:
            found, text, self._seen = _quoted(text[:sure]), text[sure:], 0
        return found, text, False


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _loose(text: str) -> str:
    """A pattern of a text in which white space is free."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", text.strip()))) if text.strip() else ""


def _blank(text: str) -> str:
    """The white space at the end of a text."""
    return text[len(text.rstrip()) :]


# --- grammar


def refusal(name: str, what: str) -> ApiError:
    """The error for a function that cannot be forced."""
    return ApiError(
        400,
        f"tools: {name}: {what} cannot be enforced in this model's form of calls; leave out tool_choice or strict",
        param="tools",
    )


def properties_of(name: str, schema: Any, root: Any) -> tuple[dict[str, Any], list[str]]:
    """An object's properties, and which of them are required. ApiError for a schema that says more. name: of the
    function."""
    found = resolved(schema, root)
    if unknown := sorted(found.keys() - OF_OBJECTS):
        raise refusal(name, unknown[0][:40])
    if "type" in found and "object" not in types_of({"type": found["type"]}):
        raise refusal(name, f"type {str(found['type'])[:40]!a}")
    properties, required = found.get("properties", {}), found.get("required", [])
    named = isinstance(required, list) and all(isinstance(key, str) for key in required)
    if not isinstance(properties, dict) or not named:
        raise refusal(name, "properties that are no object, or required that is no list of names,")
    properties = {**properties, **{key: {} for key in required if key not in properties}}
    if len(properties) > MOST_FIELDS:
        raise refusal(name, f"more than {MOST_FIELDS} properties")
    return properties, required


def rules_of(
    name: str, fields: Fields, parameters: Mapping[str, Any], call: str, terms: Callable[[str], list[str]]
) -> tuple[str, list[str]]:
    """The arguments of a function in Lark, and the rules that they need, whose names begin with `call`. terms: a text
    as Lark. ApiError for a schema that only a JSON object could follow."""

    properties, required = properties_of(name, parameters, parameters)
    before, after = " ".join(terms(fields.before)), fields.after
    first, *others = terms(after.lstrip())
    if first.startswith("<["):
        text = [f"{call}_text: TEXT {' '.join([first, *others])}"]
    else:
        text = [f"{call}_text[lazy]: TEXT {json.dumps(after, ensure_ascii=False)}"]
    end = " ".join(terms(after))
    kinds = [" ".join(terms(fields.kind[0] + kind + fields.kind[1])) for kind in fields.kinds]
    parts, rules = [], []
    for number, (key, given) in enumerate(properties.items()):
        rule, values = f"{call}_{number}", list[str]()
        for place, leaf in enumerate(leaves(given, parameters)):
            types, listed = types_of(leaf), [leaf["const"]] if "const" in leaf else leaf.get("enum")
            if isinstance(listed, list):
                texts = [(kinds[not isinstance(v, str)], v if isinstance(v, str) else json.dumps(v)) for v in listed]
                values += [f"{kind} {' '.join(terms(text))} {end}" for kind, text in texts]
            elif types and "string" not in types:
                inner = {**{k: parameters[k] for k in ("$defs", "definitions") if k in parameters}, **leaf}
                rules.append(f"{rule}_{place}: %json {json.dumps({'x-guidance': BLANKS, **closed(inner)})}")
                values.append(f"{kinds[1]} {rule}_{place} {end}")
            elif unknown := sorted(leaf.keys() - FREE):
                raise refusal(name, unknown[0][:40])
            else:
                values.append(f"{kinds[0]} {call}_text")
        if (whole := f"{kinds[0]} {call}_text") in values and kinds[0] == kinds[1]:
            values = [whole]  # every other value is a text too
        rules.append(f"{rule}: {before} {' '.join(terms(key))} ({' | '.join(values)})")
        parts.append(rule if key in required else f"{rule}?")
    if not properties and resolved(parameters, parameters).get("additionalProperties", True) is not False:
        rules.append(f"{call}_any: {before} /[a-zA-Z_][a-zA-Z0-9_.-]{{0,63}}/ {kinds[0]} {call}_text")
        parts.append(f"{call}_any*")
    used = any(f"{call}_text" in rule for rule in rules)
    return " ".join(parts), [*rules, *(text if used else [])]
