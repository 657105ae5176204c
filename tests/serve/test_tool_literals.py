"""Calls whose arguments are literals, as LFM2 and Gemma write them: forms, what is read, grammars, and requests."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.serve.conftest import running
from tests.serve.test_tool_fields import CALLS, SCHEMA, force_a_call
from tests.serve.test_tools import ASKED, a_tool, client_of, template
from tinyforge.formats import Loaded
from tinyforge.infer.grammar import Grammars
from tinyforge.serve.literals import literal
from tinyforge.serve.protocol import ApiError
from tinyforge.serve.tools import CallReader, Tools, grammar, read_calls
from tinyforge.tokenizers.tool_calls import CallForm, Literals, learn

pytest.importorskip("openai", reason="needs the extra [dev]")
pytest.importorskip("llguidance", reason="needs the extra [serve]")

TAGGED = (
    "{% macro value(v) %}{% if v is string %}{{ 'QUOTE' + v + 'QUOTE' }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, x in v | dictsort %}{{ ',' if not loop.first }}{{ k }}:{{ value(x) }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for x in v %}{{ ',' if not loop.first }}{{ value(x) }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "{% for c in m.tool_calls %}OPENcall:{{ c.function.name + '{' }}{% for k, v in c.function.arguments | dictsort %}"
    "{{ ',' if not loop.first }}{{ k }}:{{ value(v) }}{% endfor %}{{ '}CLOSE' }}{% endfor %}"
)


def tagged(quote: str, opened: str, closed: str) -> str:
    return TAGGED.replace("QUOTE", quote).replace("OPEN", opened).replace("CLOSE", closed)


def listed(before: str, value: str, after: str) -> str:
    return (
        f"{{% if m.tool_calls %}}{before}[{{% for c in m.tool_calls %}}{{{{ c.function.name }}}}("
        f"{{% for k, v in c.function.arguments.items() %}}{{{{ k }}}}={value}{{{{ ', ' if not loop.last }}}}"
        f"{{% endfor %}}){{{{ ', ' if not loop.last }}}}{{% endfor %}}]{after}{{% endif %}}"
    )


SINGLE = (
    "{% if v is string %}{{ \"'\" + (v | replace('\\\\', '\\\\\\\\') | replace(\"'\", \"\\\\'\")"
    " | replace('\\n', '\\\\n')) + \"'\" }}{% else %}{{ v | tojson }}{% endif %}"
)
SOURCES = {
    "lfm2": listed("<|tool_call_start|>", SINGLE, "<|tool_call_end|>"),
    "gemma3": listed("", "{{ v | tojson }}", ""),
    "functiongemma": tagged("<escape>", "<start_function_call>", "<end_function_call>"),
    "gemma4": tagged('<|"|>', "<|tool_call>", "<tool_call|>"),
}


@pytest.fixture(scope="module")
def forms(small: Loaded) -> dict[str, CallForm]:
    found = {name: learn(template(source), small.tokenizer) for name, source in SOURCES.items()}
    assert None not in found.values()
    return found  # type: ignore[return-value]


def written(small: Loaded, name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the template writes."""
    made = [
        {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    message = {"role": "assistant", "content": "", "tool_calls": made}
    text = template(SOURCES[name]).text(small.tokenizer, [{"role": "user", "content": "?"}, message], False)
    return text.split("<assistant>")[1].removesuffix("</s>")


def test_forms_are_what_the_templates_write(forms: dict[str, CallForm]) -> None:
    start, end = "<|tool_call_start|>[", ")]<|tool_call_end|>"
    assert forms["lfm2"] == CallForm(start, "(", end, "), ", fields=Literals("=", ", ", "'"))
    assert forms["gemma3"] == CallForm("[", "(", ")]", "), ", fields=Literals("=", ", ", '"'))
    for name, quote, start, end in (
        ("functiongemma", "<escape>", "<start_function_call>call:", "}<end_function_call>"),
        ("gemma4", '<|"|>', "<|tool_call>call:", "}<tool_call|>"),
    ):
        assert forms[name] == CallForm(start, "{", end, end + start, fields=Literals(":", ",", quote))


@pytest.mark.parametrize("name", list(SOURCES))
def test_arguments_are_read_wherever_the_text_is_split(small: Loaded, forms: dict[str, CallForm], name: str) -> None:
    text = "Let me see.\n" + written(small, name, CALLS)
    for size in (1, 2, 3, 7, len(text)):
        reader, events = CallReader(forms[name], ["run", "run_all"], True, {"run": SCHEMA, "run_all": {}}), []
        for at in range(0, len(text), size):
            events += reader.push(text[at : at + size])
        said, calls = read_calls([*events, *reader.push("", last=True)])
        got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        assert said == "Let me see." and got == CALLS, (size, calls)


def test_what_models_write_besides(forms: dict[str, CallForm]) -> None:
    """Python's words and quotes, quotes that are not escaped, blanks, what is cut off, and unknown names."""

    def read(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
        reader, events = CallReader(forms[name], ["run"], True, {"run": SCHEMA}), []
        for character in text:
            events += reader.push(character)
        said, calls = read_calls([*events, *reader.push("", last=True)])
        return said, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]

    def lfm2(arguments: str) -> tuple[str, list[tuple[str, str]]]:
        return read("lfm2", f"<|tool_call_start|>[run({arguments})]<|tool_call_end|>")

    for arguments, expected in (
        ('code="it\'s"', {"code": "it's"}),
        ("code='it's (a) \"b\", c'", {"code": 'it\'s (a) "b", c'}),
        ("code='a\\nb\\'\\\\ \\d'", {"code": "a\nb'\\ \\d"}),
        (" code = 'x' , days = None ", {"code": "x", "days": None}),
        ("code=True", {"code": "True"}),  # by its schema
        ("days=3, more={'deep': ['a', \"b\"]}", {"days": 3, "more": {"deep": ["a", "b"]}}),
        ("code=it's fine, days=2", {"code": "it's fine", "days": 2}),
        ("code=5'11\", days=2", {"code": "5'11\"", "days": 2}),
        ("code='x' days=2, more=1", {"code": "'x' days=2", "more": 1}),
        ("code=x], days=2", {"code": "x]", "days": 2}),
        ("'x', days=2", {"days": 2}),
        ("**{'a': 1}, days=2", {"days": 2}),
        ("code='\\ud83d\\ude00\\ud83d'", {"code": "😀\ufffd"}),
        ("", {}),
    ):
        said, [(_, got)] = lfm2(arguments)
        assert said == "" and json.loads(got) == expected, arguments
    cut = read("lfm2", "<|tool_call_start|>[run(days=3, code='hal")
    assert cut == ("", [("run", '{"days": 3')])
    assert read("lfm2", "<|tool_call_start|>[run(days=3, co") == ("", [("run", '{"days": 3}')])
    assert read("gemma4", "<|tool_call>call:run{co") == ("", [("run", "{}")])
    after = read("lfm2", "<|tool_call_start|>[run(days=3)]<|tool_call_end|> Done")
    assert after == (" Done", [("run", '{"days": 3}')])
    for text in ("<|tool_call_start|>[other(a=1)]", "<|tool_call_start|>[runs(a=1)]", "<|tool_call_st", "[1, 2]"):
        assert read("lfm2", text) == (text, [])
    assert read("gemma3", "[1, run] or [x]") == ("[1, run] or [x]", [])
    nested = '<|tool_call>call:run{days:4,more:{deep:[<|"|>},]<|"|>,<|"|>b<|"|>]}}<tool_call|>'
    assert read("gemma4", nested) == ("", [("run", '{"days": 4, "more": {"deep": ["},]", "b"]}}')])


def test_literals() -> None:
    quotes = ("'", '"')
    for text, expected in (
        ("-1.5e3", -1500.0),
        ("(1, 'a')", [1, "a"]),
        ("{}", {}),
        ("{'a': {'b': []}}", {"a": {"b": []}}),
        ("Rome", "Rome"),
        ("'a' 'b'", "a' 'b"),
        ("[1", "[1"),
        ("{1: }", "{1: }"),
        ("{'a' 1}", "{'a' 1}"),
        ("", ""),
        ("'\\u00e9\\", "'\\u00e9\\"),
        ("'\\u00e9'", "é"),
        ("NaN", "NaN"),
        ("9" * 5000, "9" * 5000),
        ("[" * 5000, "[" * 5000),
    ):
        assert literal(text, quotes) == expected and type(literal(text, quotes)) is type(expected), text[:40]


def test_a_reader_is_quick(forms: dict[str, CallForm]) -> None:
    starts = (("lfm2", "<|tool_call_start|>[run(code='", "'"), ("gemma4", "<|tool_call>call:run{code:", ""))
    for name, begun, close in starts:
        for filling in (close * 20_000, " " * 20_000, "x" * 20_000, "\\" * 20_001, "[" * 20_000, "<|" * 10_000):
            reader, start = CallReader(forms[name], ["run"], True, {"run": SCHEMA}), time.monotonic()
            for character in begun + filling:
                reader.push(character)
            reader.push("", last=True)
            assert time.monotonic() - start < 5, (name, filling[:2])


@pytest.mark.parametrize("name", list(SOURCES))
def test_grammars_take_calls_of_the_schema(small: Loaded, forms: dict[str, CallForm], name: str) -> None:
    grammars, form = Grammars(small.tokenizer, [510, 511], 512), forms[name]
    ordered = {"days": SCHEMA["properties"]["days"], "code": {"type": "string"}, "unit": {"enum": ["C", "F"]}}
    schema = {**SCHEMA, "properties": ordered}
    shown = [a_tool("run", schema, strict=True), a_tool("run_all")]

    def takes(calls: list[tuple[str, dict[str, Any]]], tools: Tools, before: str = "") -> bool:
        found = grammars.compile("lark", grammar(tools, small.tokenizer))
        text = written(small, name, calls)
        if name == "lfm2":
            text = text.replace("'", '"')  # a forced text is in JSON's quotes
        return all(map(found.accept, small.tokenizer.encode(before + text, "text"))) and found.accept(511)

    forced, free = Tools(shown, form, True, forced=True), Tools(shown, form, None)
    # Templates of Gemma write the arguments by name, a grammar takes them in the schema's order.
    calls: list[tuple[str, dict[str, Any]]] = [
        ("run", {"code": "a b"}),
        ("run_all", {}),
        ("run", {"code": "x", "unit": "F"}),
        ("run_all", {"any": "thing", "more": 3}),
    ]
    for call in calls:
        assert takes([call], forced) and takes([call], free, "Well. ") and not takes([call], forced, "Well. ")
    assert takes(calls, forced) and not takes(calls, replace(forced, parallel=False))
    for wrong in ({}, {"code": "x", "unit": "K"}, {"code": 3}, {"code": "x", "zother": "y"}):
        assert not takes([("run", wrong)], forced), wrong
    deep = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "integer", "maximum": 9}}}}
    tool = a_tool("run", {"properties": {"a": {"anyOf": [{"type": "null"}, deep]}, "b": {}}, "required": ["a"]})
    one = Tools([tool], form, None, forced=True)
    for value, right in ((None, True), ({"x": [1, 2]}, True), ({}, True), ({"x": [10]}, False), ("t", False)):
        assert takes([("run", {"a": value})], one) == right == takes([("run", {"a": value, "b": True})], one), value


def test_what_a_grammar_cannot_follow(small: Loaded, forms: dict[str, CallForm]) -> None:
    text: dict[str, Any] = {"type": "string"}
    endless: dict[str, Any] = {"properties": {"a": {"$ref": "#"}}}
    wide = {"type": "object", "properties": {f"a{i}": text for i in range(100)}}
    wide = {"properties": {f"b{i}": wide for i in range(50)}}
    for parameters, words in (
        ({"properties": {"a": {**text, "pattern": "^a$"}}}, "pattern"),
        ({"properties": {"a": {"type": "array", "minItems": 2}}}, "minItems"),
        ({"properties": {"a": {"type": "object", "minProperties": 2}}}, "minProperties"),
        ({"minProperties": 1}, "minProperties"),
        ({"properties": {"a,b=(c": text}}, "the name"),
        ({"properties": {"a": {"enum": ['x<|"|>']}}}, "the text"),
        ({"properties": {"a": {"const": {"b}": 1}}}}, "the name"),
        ({"properties": [], "type": "object"}, "properties"),
        ({**endless, "type": "object"}, "levels|size"),
        (wide, "size"),
    ):
        with pytest.raises(ApiError, match=f"({words}).* cannot be enforced"):
            grammar(Tools([a_tool("run", parameters)], forms["gemma4"], None, forced=True), small.tokenizer)
    with pytest.raises(ApiError, match="minProperties.* cannot be enforced"):
        grammar(Tools([a_tool("run", {"minProperties": 1})], forms["lfm2"], None, forced=True), small.tokenizer)


@pytest.mark.parametrize("name", list(SOURCES))
def test_a_call_is_forced(small: Loaded, name: str) -> None:
    with running(replace(small, template=template(SOURCES[name]))) as server:
        client = client_of(server)
        asked, found = force_a_call(client)
        said = {"role": "tool", "content": "21", "tool_call_id": found.message.tool_calls[0].id}
        again = [*ASKED["messages"], found.message.model_dump(exclude_none=True), said]
        assert client.chat.completions.create(model="small", messages=again, tools=asked["tools"], max_tokens=5).choices
