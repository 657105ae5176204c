"""Calls whose arguments stand between tags: forms, what is read, what a grammar takes, and requests."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.serve.conftest import running
from tests.serve.test_tools import ASKED, a_tool, client_of, template
from tinyforge.formats import Loaded
from tinyforge.infer.grammar import Grammars
from tinyforge.serve.fields import all_types, value_of
from tinyforge.serve.protocol import ApiError
from tinyforge.serve.tools import CallReader, Tools, grammar, read_calls
from tinyforge.tokenizers.tool_calls import CallForm, Fields, learn

pytest.importorskip("openai", reason="needs the extra [dev]")
pytest.importorskip("llguidance", reason="needs the extra [serve]")

LOOP = (
    "{% for c in m.tool_calls %}BEFORE{% for k, v in c.function.arguments.items() %}FIELD{% endfor %}AFTER{% endfor %}"
)


def source(before: str, field: str, after: str) -> str:
    made = LOOP.replace("BEFORE", before).replace("FIELD", field).replace("AFTER", after)
    return made.replace("NAME", "{{ c.function.name }}").replace("VALUE", "{{ v if v is string else v | tojson }}")


SOURCES = {
    "tags": source(
        "<tool_call>\n<function=NAME>\n", "<parameter={{ k }}>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"
    ),
    "keys": source("<tool_call>NAME\n", "<arg_key>{{ k }}</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>"),
    "kinds": source(
        '<call name="NAME">',
        "<p name=\"{{ k }}\" text=\"{{ 'true' if v is string else 'false' }}\">VALUE</p>",
        "</call>",
    ),
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "days": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F"]},
        "more": {"type": "object", "properties": {"deep": {"type": "array", "items": {"type": "string"}}}},
    },
    "required": ["code"],
    "$defs": {"count": {"type": "integer", "maximum": 99}},
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("run", {"code": "  def f():\n\n    return '<b>1</b>' + \"\\n\"\n", "days": 3, "more": {"deep": ["</p", "é"]}}),
    ("run_all", {}),
    ("run", {"code": "true", "days": None, "unit": "F"}),
]


@pytest.fixture(scope="module")
def forms(small: Loaded) -> dict[str, CallForm]:
    found = {name: learn(template(source), small.tokenizer) for name, source in SOURCES.items()}
    assert None not in found.values()
    return found  # type: ignore[return-value]


def written(form: CallForm, calls: list[tuple[str, dict[str, Any]]]) -> str:
    fields, texts = form.fields, []
    assert fields is not None
    for name, arguments in calls:
        text = f"{name}{form.between}"
        for key, value in arguments.items():
            kind = fields.kinds[not isinstance(value, str)]
            value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"{fields.before}{key}{fields.kind[0]}{kind}{fields.kind[1]}{value}{fields.after}"
        texts.append(text)
    return form.before + (form.separator or "").join(texts) + form.after


def test_forms_are_what_the_templates_write(forms: dict[str, CallForm]) -> None:
    assert forms["tags"] == CallForm(
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        "</function>\n</tool_call><tool_call>\n<function=",
        fields=Fields("<parameter=", (">\n", ""), ("", ""), "\n</parameter>\n"),
    )
    assert forms["keys"].fields == Fields("<arg_key>", ("</arg_key>\n<arg_value>", ""), ("", ""), "</arg_value>\n")
    assert forms["kinds"].fields == Fields('<p name="', ('" text="', '">'), ("true", "false"), "</p>")


@pytest.mark.parametrize("name", list(SOURCES))
def test_arguments_are_read_wherever_the_text_is_split(forms: dict[str, CallForm], name: str) -> None:
    text = "Let me see.\n" + written(forms[name], CALLS)
    schemas = {"run": SCHEMA, "run_all": {}}
    for size in (1, 2, 3, 7, len(text)):
        reader, events = CallReader(forms[name], ["run", "run_all"], True, schemas), []
        for at in range(0, len(text), size):
            events += reader.push(text[at : at + size])
        said, calls = read_calls([*events, *reader.push("", last=True)])
        got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        assert said == "Let me see." and got == CALLS, (size, calls)
    if size := forms[name].before.count("\n"):  # a text is passed on while it comes
        reader = CallReader(forms[name], ["run"], True, schemas)
        events = reader.push(written(forms[name], CALLS[:1]).partition("return")[0])
        assert events[-1].text.endswith("\\n\\n    ") or events[-1].text.endswith("\\n\\n   ")


def test_what_models_write_besides(forms: dict[str, CallForm]) -> None:
    """Without the outer tag, with other white space, with a closing tag in a text, cut off, and with unknown names."""
    form = forms["tags"]

    def read(text: str) -> tuple[str, list[tuple[str, str]]]:
        reader, events = CallReader(form, ["run"], True, {"run": SCHEMA}), []
        for character in text:
            events += reader.push(character)
        said, calls = read_calls([*events, *reader.push("", last=True)])
        return said, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]

    one = [("run", '{"code": "x"}')]
    assert read("<function=run>\n<parameter=code>\nx\n</parameter>\n</function>\n</tool_call>") == ("", one)
    assert read("<tool_call> <function=run> <parameter=code>x</parameter></function></tool_call>") == ("", one)
    assert read("<tool_call>\n<function=run>\n<parameter=code>\nx\n</parameter>\n</function>") == ("", one)
    assert read("<function=run><parameter=code><![CDATA[</parameter> ]]></parameter></function>") == (
        "",
        [("run", '{"code": "</parameter> "}')],
    )
    inside = (
        "<tool_call>\n<function=run>\n<parameter=code>\na\n</parameter>\nb\n</parameter>\n</function>\n</tool_call>"
    )
    assert read(inside) == ("", [("run", '{"code": "a\\n</parameter>\\nb"}')])
    assert read("<tool_call>\n<function=run>\n<parameter=code>\nhal") == ("", [("run", '{"code": "hal')])
    assert read("<tool_call>\n<function=run>\n<parameter=more>\n{'deep': ['x', None]}\n</parameter>\n</function>") == (
        "",
        [("run", '{"more": {"deep": ["x", null]}}')],
    )
    for text in (
        "<tool_call>\n<function=other>\n</function>",
        "<tool_call>\n<function=runs>\n</function>",
        "<function",
    ):
        assert read(text) == (text, [])


def test_a_reader_is_quick(forms: dict[str, CallForm]) -> None:
    begun = written(forms["tags"], CALLS[:1]).partition("  def")[0]
    for filling in ("</parameter>" * 1000, "\n" * 10_000, "x" * 10_000, "<" * 10_000):
        reader, start = CallReader(forms["tags"], ["run"], True, {"run": SCHEMA}), time.monotonic()
        for character in begun + filling:
            reader.push(character)
        assert time.monotonic() - start < 5


def test_values_by_their_types() -> None:
    assert all_types(SCHEMA["properties"]["days"], SCHEMA) == {"integer", "null"}
    assert all_types({"$ref": "#/$defs/a"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}}) == set()
    wide = {"anyOf": [{"$ref": "#"}] * 1000}
    assert all_types(wide, wide) == all_types({"anyOf": [{"type": "string"}, {}]}, {}) == set()
    odd: Any
    for odd in ({"type": 3}, {"type": [["a"]]}, {"enum": "ab"}, {"$ref": 3}, {"anyOf": {}}, 3, None, True, []):
        assert all_types(odd, odd) == set()
    cases: list[tuple[str, set[str], Any]] = [
        ("3", {"string"}, "3"),
        ("3", {"integer"}, 3),
        ("3", {"number"}, 3),
        ("3", {"string", "null"}, "3"),
        ("null", {"string", "null"}, None),
        ("None", {"integer", "null"}, None),
        ("True", {"boolean"}, True),
        ("abc", {"integer"}, "abc"),
        ('"a"', {"string", "null"}, '"a"'),
        ("[1, {'a': 2}]", {"array"}, [1, {"a": 2}]),
        ("{1, 2}", {"object"}, "{1, 2}"),
        ("3", set(), 3),
        ("1e999", {"number"}, "1e999"),
        ("(" * 5000, {"array"}, "(" * 5000),
    ]
    for text, types, expected in cases:
        assert value_of(text, types) == expected and type(value_of(text, types)) is type(expected), text


@pytest.mark.parametrize("name", list(SOURCES))
def test_grammars_take_calls_of_the_schema(small: Loaded, forms: dict[str, CallForm], name: str) -> None:
    grammars, form = Grammars(small.tokenizer, [510, 511], 512), forms[name]
    shown = [a_tool("run", SCHEMA, strict=True), a_tool("run_all")]

    def takes(calls: list[tuple[str, dict[str, Any]]], tools: Tools, before: str = "") -> bool:
        found = grammars.compile("lark", grammar(tools, small.tokenizer))
        text = before + written(form, calls)
        return all(map(found.accept, small.tokenizer.encode(text, "text"))) and found.accept(511)

    forced, free = Tools(shown, form, True, forced=True), Tools(shown, form, None)
    for call in CALLS:
        assert takes([call], forced) and takes([call], free, "Well. ") and not takes([call], forced, "Well. ")
    assert takes(CALLS, forced) and not takes(CALLS, replace(forced, parallel=False))
    assert takes([("run_all", {"any": "thing", "more": "x"})], forced)
    for wrong in ({}, {"code": "x", "unit": "K"}, {"code": "x", "days": 100}, {"code": "x", "other": "y"}):
        assert not takes([("run", wrong)], forced), wrong
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    listed = {"anyOf": [{"const": "x"}, {"enum": [1, None, "y z"]}]}
    tool = a_tool("run", {"properties": {"a": optional, "b": listed}, "required": ["b"]}, strict=True)
    for value, right in (("x", True), (1, True), (None, True), ("y z", True), ("y", False), (2, False)):
        assert takes([("run", {"a": "t", "b": value})], Tools([tool], form, None, forced=True)) == right
    text: dict[str, Any] = {"type": "string"}
    unnamed = Tools([a_tool("run", {"properties": {}, "required": ["b"]})], form, None, forced=True)
    assert takes([("run", {"b": "x"})], unnamed) and not takes([("run", {})], unnamed)
    wrong_ones: list[tuple[dict[str, Any], str]] = [
        ({"properties": {"a": {**text, "pattern": "^a$"}}}, "pattern"),
        ({"properties": {"a": {"anyOf": [{**text, "maxLength": 3}, {"type": "null"}]}}}, "maxLength"),
        ({"properties": {"a": {"minimum": 3}}}, "minimum"),
        ({"minProperties": 1}, "minProperties"),
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"type": "array"}, "type 'array'"),
        ({"properties": []}, "properties"),
        ({"properties": {}, "required": "a"}, "required"),
        ({"properties": {}, "required": [{}]}, "required"),
        ({"properties": {f"a{i}": text for i in range(1025)}}, "1024 properties"),
    ]
    for parameters, words in wrong_ones:
        with pytest.raises(ApiError, match=f"{words}.* cannot be enforced"):
            grammar(Tools([a_tool("run", parameters)], form, None, forced=True), small.tokenizer)


def force_a_call(client: Any) -> tuple[dict[str, Any], Any]:
    """A call that is required follows its schema, streamed too. Returns the request and its choice."""
    schema = {**SCHEMA, "required": ["days", "unit"]}
    schema["properties"] = {key: SCHEMA["properties"][key] for key in ("days", "unit")}
    tools = [{"type": "function", "function": {"name": "run", "parameters": schema}}]
    asked = {**ASKED, "tools": tools, "tool_choice": "required", "temperature": 1, "seed": 5, "max_tokens": 300}
    found = client.chat.completions.create(**asked).choices[0]
    (call,) = found.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert found.finish_reason == "tool_calls" and arguments["unit"] in "CF"
    assert arguments["days"] is None or arguments["days"] <= 99
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.arguments == (
            call.function.arguments
        )
    return asked, found


@pytest.mark.parametrize("name", ["tags", "kinds"])
def test_a_call_is_forced(small: Loaded, name: str) -> None:
    with running(replace(small, template=template(SOURCES[name]))) as server:
        asked, _ = force_a_call(client_of(server))
        asked["tools"][0]["function"]["parameters"] = {"properties": {"a": {"type": "string", "pattern": "x"}}}
        status, answer, _ = server.post("/v1/chat/completions", asked)
        assert status == 400 and "pattern cannot be enforced" in answer["error"]["message"]
