"""Tools through the official client, with templates of the common forms. tests/world has published templates."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from tests.serve.conftest import Running, running
from tinyforge.formats import Loaded
from tinyforge.infer.grammar import Grammars
from tinyforge.serve.answers import Writer
from tinyforge.serve.engine import Piece
from tinyforge.serve.protocol import ApiError, Extension, Tool, ToolChoice
from tinyforge.serve.tools import CallReader, Event, Tools, grammar, read_calls, select
from tinyforge.tokenizers.chat_templates import ChatTemplate
from tinyforge.tokenizers.tool_calls import CallForm, learn

openai = pytest.importorskip("openai", reason="needs the extra [dev]")
pytest.importorskip("llguidance", reason="needs the extra [serve]")

SHOWN = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
HEAD = SHOWN + "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content }}"
TAIL = "{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ONE = '{"name": "{{ c.function.name }}", "%s": {{ c.function.arguments | tojson }}'
HERMES = f"{{% for c in m.tool_calls %}}\n<tool_call>\n{ONE % 'arguments'}}}\n</tool_call>{{% endfor %}}"
LLAMA = (
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    f"{{% for c in m.tool_calls %}}{ONE % 'parameters'}}}{{% endfor %}}"
)
MISTRAL = (
    "{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    f'{ONE % "arguments"}, "id": "{{{{ c.id }}}}"}}{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}]{{% endif %}}'
)
NEWER = (
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)
TEXTUAL = (
    "{% for c in m.tool_calls %}<call>{{ c.function.name + '\n' + c.function.arguments + '\n' }}</call>{% endfor %}"
)
SOURCES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "newer": NEWER, "textual": TEXTUAL}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "How much is 13 plus 2?"}]}


def template(calls: str) -> ChatTemplate:
    return ChatTemplate({"default": HEAD + calls + TAIL}, {"eos_token": "</s>"})


@pytest.fixture(scope="module")
def forms(small: Loaded) -> dict[str, CallForm]:
    found = {name: learn(template(source), small.tokenizer) for name, source in SOURCES.items()}
    assert None not in found.values()
    return found  # type: ignore[return-value]


@pytest.fixture(scope="module")
def servers(small: Loaded) -> Iterator[dict[str, Running]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(running(replace(small, template=template(source))))
            for name, source in SOURCES.items()
        }


def client_of(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


# --- forms and readers


def test_forms_are_what_the_templates_write(small: Loaded, forms: dict[str, CallForm]) -> None:
    assert forms["hermes"] == CallForm(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", '}\n</tool_call><tool_call>\n{"name": "'
    )
    assert forms["llama"] == CallForm('{"name": "', '", "parameters": ', "}", None) and forms["llama"].is_bare
    assert forms["mistral"].head == "[TOOL_CALLS]" and '"id": "' in (forms["mistral"].separator or "")
    assert forms["newer"] == CallForm("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]")
    assert forms["textual"].as_text and not forms["hermes"].as_text
    for source in ("", "{% for c in m.tool_calls %}{{ c.function.name }}(){% endfor %}"):
        assert learn(template(source), small.tokenizer) is None
    no_tools = ChatTemplate({"default": (HEAD + HERMES + TAIL).replace("{{ t.function.name }}", "")}, {})
    assert learn(no_tools, small.tokenizer) is None and learn(small.template, small.tokenizer) is None


TWO = [("weather", {"city": 'Rome {"}]', "days": 2}), ("now", {})]
REPLIES = {
    "hermes": [
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": %s}\n</tool_call>',
        '<tool_call>{"name":"weather","arguments":%s}</tool_call><tool_call>{ "name" : "now","parameters":%s}',
    ],
    "llama": [
        '{"name": "weather", "parameters": %s}; {"name": "now", "parameters": %s}',
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": %s}\n{"name": "now", "arguments": %s}',
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "weather", "arguments": %s, "id": "x1y2z3a4b"}, {"name": "now", "arguments": %s, '
        '"id": "000000001"}]',
        '[TOOL_CALLS] [{"name": "weather", "arguments": %s, "id": "1"}, {"name": "now", "arguments": %s, "id": "2"}]',
    ],
    "newer": ["Well. [TOOL_CALLS]weather[ARGS]%s[TOOL_CALLS]now[ARGS]%s"],
    "textual": ["<call>weather\n%s\n</call><call>now\n%s\n</call>"],
}


@pytest.mark.parametrize("name", list(REPLIES))
def test_calls_are_found_wherever_the_text_is_split(forms: dict[str, CallForm], name: str) -> None:
    for reply in REPLIES[name]:
        text = reply % tuple(json.dumps(arguments) for _, arguments in TWO)
        before = text.partition("<")[0].partition("[")[0].partition("{")[0].rstrip()
        for size in (1, 2, 3, 5, 7, len(text)):
            reader, events = CallReader(forms[name], ["weather", "now"], True), []
            for at in range(0, len(text), size):
                events += reader.push(text[at : at + size])
            events += reader.push("", last=True)
            said, calls = read_calls(events)
            assert said == before, (size, events)
            got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
            assert got == TWO and len({c["id"] for c in calls}) == 2, (text, size, events)
            assert [e.number for e in events if e.kind == "call"] == [0, 1]
        single = CallReader(forms[name], ["weather", "now"], parallel=False)
        assert len(read_calls(single.push(text, last=True))[1]) == 1


def test_what_is_no_call_stays_text(forms: dict[str, CallForm]) -> None:
    texts = [
        "plain text\n",
        "a < b, {curly} [square]",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '{"name": "unknown", "parameters": {}}',
        '{"name": "weather", "parameters": "text"}',
        "<tool_call>" + " " * 5000 + "x",
        "[TOOL_CALLS]weather(1)",
        "<tool_call>",
        "  ",
    ]
    for form in forms.values():
        for text in texts:
            for size in (1, len(text)):
                reader = CallReader(form, ["weather", "now"], True)
                events = [e for at in range(0, len(text), size) for e in reader.push(text[at : at + size])]
                assert read_calls([*events, *reader.push("", last=True)]) == (text, [])


def test_a_reader_is_quick_and_holds_little(forms: dict[str, CallForm]) -> None:
    for form, text in ((forms["hermes"], "<tool_call>" * 5000), (forms["llama"], '{"name": "' * 5000)):
        reader, begun = CallReader(form, [f"name{i}" for i in range(128)], True), time.monotonic()
        for character in text + " " * 20_000:
            reader.push(character)
            assert len(reader._held) <= 1024
        assert time.monotonic() - begun < 5


def test_broken_calls_end_as_they_are(forms: dict[str, CallForm]) -> None:
    reader = CallReader(forms["hermes"], ["weather"], True)
    events = reader.push('Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ro')
    assert events == [Event("text", "Hm."), Event("call", "weather", events[1].id), Event("arguments", '{"city": "Ro')]
    assert reader.push("", last=True) == [] and reader.count == 1


# --- grammars


def a_tool(name: str, parameters: Any = None, strict: bool | None = None) -> Tool:
    return Tool.model_validate({"function": {"name": name, "parameters": parameters, "strict": strict}})


@pytest.mark.parametrize("name", list(REPLIES))
def test_grammars_take_calls_and_nothing_else(small: Loaded, forms: dict[str, CallForm], name: str) -> None:
    grammars = Grammars(small.tokenizer, [510, 511], 512)
    form, shown = forms[name], [a_tool("weather", WEATHER, strict=True), a_tool("now")]

    def takes(text: str, tools: Tools, schema: Any = None) -> bool:
        found = grammars.compile("lark", grammar(tools, small.tokenizer, schema))
        return all(map(found.accept, small.tokenizer.encode(text, "text"))) and found.accept(511)

    def call(name: str, arguments: str) -> str:
        return f"{form.before.lstrip()}{name}{form.between}{arguments}{form.after}"

    right, wrong = call("weather", '{"city": "Oslo", "days": 3}'), call("weather", '{"city": "Bonn", "days": 3}')
    many = f"{right[: len(right) - len(form.after)]}{form.separator}now{form.between}{{}}{form.after}"
    for parallel in (None, False, True):
        forced = Tools(shown, form, parallel, forced=True)
        assert takes(right, forced) and takes(call("now", '{"x": [1]}'), forced)
        assert not any(takes(text, forced) for text in (wrong, "Hello", "", f"Hello {right}", call("other", "{}")))
        assert takes(many, forced) == (parallel is True and form.separator is not None)
        free = Tools(shown, form, parallel)
        assert takes(right, free) and takes("Hello", free) and takes(f"Hello. {right}", free) and takes("", free)
        assert not takes(wrong, free) and not takes(f"Hello. {wrong}", free)
        with_schema = [takes(text, free, {"enum": ["x"]}) for text in (right, '"x"', wrong, '"y"')]
        assert with_schema == [True, True, False, False]


# --- requests


def check(message: Any) -> None:
    assert message.content is None and len(message.tool_calls) == 1
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.type == "function" and len(call.id) == 9
    if call.function.name == "weather":
        assert set(arguments) == {"city", "days"} and arguments["city"] in ("Rome", "Oslo")
    else:
        assert call.function.name == "now" and isinstance(arguments, dict)


@pytest.mark.parametrize("name", list(SOURCES))
def test_a_call_is_forced(servers: dict[str, Running], name: str) -> None:
    client = client_of(servers[name])
    more = {"temperature": 1, "seed": 3, "logit_bias": {"125": 9}, "tools": TOOLS}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        whole = client.chat.completions.create(**ASKED, **more, tool_choice=choice, n=2)
        for choice_made in whole.choices:
            assert choice_made.finish_reason == "tool_calls"
            check(choice_made.message)
        with client.chat.completions.stream(**ASKED, **more, tool_choice=choice) as stream:
            final = stream.get_final_completion()  # the client adds the deltas up
        (first,) = final.choices
        check(first.message)
        assert first.finish_reason == "tool_calls"
        expected = whole.choices[0].message.tool_calls[0].function
        assert first.message.tool_calls[0].function.arguments == expected.arguments
        deltas = list(client.chat.completions.create(**ASKED, **more, tool_choice=choice, stream=True))
        calls = [c for d in deltas for c in d.choices[0].delta.tool_calls or ()]
        assert calls[0].id and calls[0].function.name == expected.name and calls[0].function.arguments == ""
        assert "".join(c.function.arguments for c in calls[1:]) == expected.arguments and len(calls) > 1
        assert not any(c.id or c.function.name for c in calls[1:]) and {c.index for c in calls} == {0}
        assert deltas[-1].choices[0].finish_reason == "tool_calls"


def test_a_conversation_with_calls_is_rendered(servers: dict[str, Running], small: Loaded) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": '{"x":1}'}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "noon"}]},
    ]
    for name, server in servers.items():
        arguments = '{"x":1}' if name == "textual" else {"x": 1}
        shown = {**call, "function": {"name": "now", "arguments": arguments}}
        given = [
            messages[0],
            {"role": "assistant", "content": "", "tool_calls": [shown]},
            {"role": "tool", "content": "noon"},
        ]
        for tools in (None, TOOLS):
            asked = {"messages": messages, "max_tokens": 1, **({"tools": tools} if tools else {})}
            found = client_of(server).chat.completions.create(model="small", **asked)
            ids = template(SOURCES[name]).encode_messages(small.tokenizer, given, True, tools=tools)
            assert found.usage.prompt_tokens == len(ids)
    status, answer, _ = servers["hermes"].post(
        "/v1/chat/completions",
        {
            "messages": [
                {**messages[1], "tool_calls": [{**call, "function": {"name": "now", "arguments": "{"}}]},
                messages[0],
            ]
        },
    )
    assert status == 400 and "the arguments are not JSON" in answer["error"]["message"]


def test_special_tokens_in_tools_stay_text(small: Loaded) -> None:
    """In names of parameters too, and in the arguments of earlier calls."""
    end = small.tokenizer.specials["</s>"]
    source = "{{ tools | tojson }}" + HEAD + HERMES + TAIL
    shown = ChatTemplate({"default": source}, {"eos_token": "</s>"})
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a</s>": ["</s>"]}}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    schema = {"type": "object", "properties": {"</s>": {"description": "</s>"}}, "required": ["</s>"]}
    tools = [{"type": "function", "function": {"name": "f", "description": "</s>", "parameters": schema}}]
    ids = shown.encode_messages(small.tokenizer, messages, False, tools=tools)
    assert ids.count(end) == 2  # the template's own, after each message
    assert small.tokenizer.decode(ids).count("</s>") >= 6


def test_a_reply_that_comes_last_is_continued(servers: dict[str, Running], server: Running, small: Loaded) -> None:
    begun = [*ASKED["messages"], {"role": "assistant", "content": "13 14"}]
    own = client_of(server).chat.completions.create(model="small", messages=begun, temperature=0)
    assert own.choices[0].message.content == " 15, so 15"
    for name in ("hermes", "llama"):
        found = client_of(servers[name]).chat.completions.create(model="small", messages=begun, max_tokens=1)
        ids = template(SOURCES[name]).encode_begun(small.tokenizer, begun)
        assert ids[-len(small.tokenizer.encode("13 14")) :] == small.tokenizer.encode("13 14")
        assert found.usage.prompt_tokens == len(ids)


def test_templates_without_tools(server: Running) -> None:
    """As in llama.cpp: they are left out, with a header, or refused where a call is required."""
    client = client_of(server)
    plain = client.chat.completions.create(**ASKED, temperature=0)
    raw = client.chat.completions.with_raw_response.create(**ASKED, temperature=0, tools=TOOLS)
    assert raw.headers["x-tools-ignored"] and raw.parse().choices[0].message == plain.choices[0].message
    streamed = client.chat.completions.with_raw_response.create(**ASKED, tools=TOOLS, stream=True)
    assert streamed.headers["x-tools-ignored"] and list(streamed.parse())
    none = client.chat.completions.with_raw_response.create(**ASKED, temperature=0, tools=TOOLS, tool_choice="none")
    assert "x-tools-ignored" not in none.headers
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        with pytest.raises(openai.BadRequestError, match="template has no tools"):
            client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice)
    with pytest.raises(openai.BadRequestError, match="template has no tools"):
        client.chat.completions.create(model="small", messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}])


def test_strict_tools_and_response_formats(servers: dict[str, Running]) -> None:
    client = client_of(servers["hermes"])
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    found = client.chat.completions.create(**ASKED, tools=strict, temperature=0, max_tokens=40)
    assert found.choices[0].message.content or found.choices[0].message.tool_calls
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["blue"]}}}
    either = client.chat.completions.create(**ASKED, tools=TOOLS, response_format=schema, temperature=1, max_tokens=99)
    message = either.choices[0].message
    assert message.tool_calls or message.content == '"blue"'
    with pytest.raises(openai.BadRequestError, match="both constrain"):
        client.chat.completions.create(**ASKED, tools=TOOLS, extra_body={"guided_regex": "a"})


def test_bad_tools_are_refused_in_time(servers: dict[str, Running]) -> None:
    server = servers["mistral"]
    recursive: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}

    def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, **more}}

    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [tool("x" * 10_000)]}, "tools.0.function.name"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("")]}, "tools.0.function.name"),
        ({"tools": [tool(), tool()]}, "two tools"),
        ({"tools": [tool()] * 129}, "tools"),
        ({"tools": [{"type": "browser"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool(parameters=recursive)]}, "grammar"),
        ({"tools": [tool(parameters=deep)]}, ""),
        ({"tools": [tool(parameters={"type": "integer", "minimum": 3, "maximum": 2})]}, "tools: the grammar"),
        ({"tools": [tool(parameters={"allOf": [{"type": "string"}, {"type": "null"}]})]}, "tools: the grammar"),
        ({"tools": [tool(parameters={"pattern": "(" * 1000, "type": "string"})]}, "tools: the grammar"),
        ({"tools": [tool(parameters={"type": "string", "enum": ["x" * 200_000]})]}, ""),
        ({"tools": []}, "tool_choice is required, and tools has no function"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "names 'g'"),
        ({"tools": [tool()], "tool_choice": "x" * 10_000}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ]
    for given, words in cases:
        begun = time.monotonic()
        status, answer, _ = server.post("/v1/chat/completions", {**ASKED, "tool_choice": "required", **given})
        assert status == 400 and words in answer["error"]["message"], (given, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"} and len(answer["error"]["message"]) < 700
        assert time.monotonic() - begun < 2, given
    assert server.settled() and server.post("/v1/chat/completions", {**ASKED, "max_tokens": 1})[0] == 200


def test_a_choice_selects() -> None:
    form, tools = CallForm("<", "", ">", None), [a_tool("f"), a_tool("g")]
    assert select(tools, None, None, form) == Tools(tools, form) == select(tools, "auto", None, form)
    named = ToolChoice.model_validate({"type": "function", "function": {"name": "g"}})
    assert select(tools, named, None, form) == Tools(tools[1:], form, forced=True)
    assert (
        select(tools, "none", None, form) == Tools() == select([], "auto", None, form) == select(None, None, None, None)
    )
    assert select(tools, "required", False, form).is_constrained and not select(tools, None, None, form).is_constrained
    with pytest.raises(ApiError):
        select([], "required", None, form)


# --- the Responses API

FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_calls_of_the_responses_api(servers: dict[str, Running]) -> None:
    client = client_of(servers["mistral"])
    asked = {"model": "small", "input": "Hi", "tools": FLAT, "temperature": 0}
    choice = {"type": "function", "name": "weather"}
    whole = client.responses.create(**asked, tool_choice=choice)
    (item,) = whole.output
    assert item.type == "function_call" and item.name == "weather" and whole.status == "completed"
    assert json.loads(item.arguments)["city"] in ("Rome", "Oslo")
    with client.responses.stream(**asked, tool_choice=choice) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [e.type for e in events if e.type != "response.function_call_arguments.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert final.output[0].arguments == item.arguments
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == item.arguments  # a fast machine sends them at once
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "warm"}
    continued = client.responses.create(
        **{**asked, "input": [output]}, previous_response_id=whole.id, max_output_tokens=1
    )
    again = [{"role": "user", "content": asked["input"]}, item.model_dump(), output]
    resent = client.responses.create(**{**asked, "input": again}, max_output_tokens=1)
    assert continued.usage.input_tokens == resent.usage.input_tokens > whole.usage.input_tokens
    assert continued.output_text == resent.output_text


# --- chunks of a free reply


def test_chunks_of_a_reply_that_calls_by_itself(small: Loaded, forms: dict[str, CallForm]) -> None:
    """Text, then two calls, as pieces of the engine: the official client adds the deltas up."""
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    text = REPLIES["hermes"][0] % tuple(json.dumps(arguments) for _, arguments in TWO)
    tools = Tools([a_tool("weather"), a_tool("now")], forms["hermes"])
    for size in (1, 6, len(text)):
        writer = Writer(small.tokenizer, "small", "fp", True, None, Extension(), [[1]], tools=tools)
        choice: Any = None  # read only for timings and statistics
        data = writer.opening(0)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        for number, piece in enumerate(pieces, start=1):
            data += writer.chunk(0, Piece(piece, ()), "stop" if number == len(pieces) else None, choice)
        state = ChatCompletionStreamState()
        for event in data.decode().split("data: ")[1:]:
            state.handle_chunk(ChatCompletionChunk.model_validate(json.loads(event)))
        (made,) = state.get_final_completion().choices
        assert made.message.content == "Let me see." and made.finish_reason == "tool_calls"
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in made.message.tool_calls or ()]
        assert calls == TWO
