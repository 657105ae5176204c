"""A reply's thoughts, told apart from its text in all three protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import Running, running
from tests.serve.test_tools import HERMES, client_of
from tinyforge.formats import Loaded
from tinyforge.infer.grammar import After, Grammars
from tinyforge.serve.tools import CallReader, Event, TextReader, ThoughtReader
from tinyforge.tokenizers.chat_templates import ChatTemplate
from tinyforge.tokenizers.thoughts import Tags, learn
from tinyforge.tokenizers.tool_calls import learn as learn_calls

openai = pytest.importorskip("openai", reason="needs the extra [dev]")
pytest.importorskip("llguidance", reason="needs the extra [serve]")

TAGS = Tags("<think>", "</think>")
TURN = "{% for m in messages %}{{ '<' + m.role + '>' }}THOUGHTS{{ m.content }}CALLS{{ '</s>' }}{% endfor %}"
SHOWN = "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
SAID = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
BEGIN = "{% if add_generation_prompt %}<assistant>{% if enable_thinking != false %}<think>\n{% endif %}{% endif %}"


def template(thoughts: str = SHOWN, begin: str = BEGIN) -> ChatTemplate:
    source = SAID + TURN.replace("THOUGHTS", thoughts).replace("CALLS", HERMES) + begin
    return ChatTemplate({"default": source}, {"eos_token": "</s>"})


@pytest.fixture(scope="module")
def server(small: Loaded) -> Iterator[Running]:
    with running(replace(small, template=template())) as found:
        yield found


def test_tags_are_what_the_template_writes(small: Loaded) -> None:
    assert learn(template(), small.tokenizer) == TAGS
    mm = SHOWN.replace("think>", "mm:think>")
    assert learn(template(mm, ""), small.tokenizer) == Tags("<mm:think>", "</mm:think>")
    assert learn(
        template(SHOWN.replace("<think>", "[THINK]").replace("</think>", "[/THINK]"), ""), small.tokenizer
    ) == (Tags("[THINK]", "[/THINK]"))
    removed = "{% set m = {'role': m.role, 'content': m.content.split('</think>')[-1]} %}"
    assert learn(template(removed), small.tokenizer) == TAGS
    assert learn(template("", ""), small.tokenizer) is None and learn(small.template, small.tokenizer) is None


CASES = [
    (False, "<think>\nHm, <b>.\n\nSo.\n</think>\n\nYes.\n", "Hm, <b>.\n\nSo.", "Yes.\n"),
    (True, "\nHm.\n</think>\nYes.", "Hm.", "Yes."),
    (True, "</think>Yes.", "", "Yes."),
    (True, "Hm </thin", "Hm </thin", ""),
    (False, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
    (False, "\n<think></think>\n\n", "", ""),
    (False, "  <thi", "", "  <thi"),
    (False, "", "", ""),
]


@pytest.mark.parametrize(("begun", "reply", "thought", "text"), CASES)
def test_thoughts_are_found_wherever_the_text_is_split(begun: bool, reply: str, thought: str, text: str) -> None:
    for size in (1, 2, 3, 5, len(reply) or 1):
        reader, events = ThoughtReader(TAGS, begun, TextReader()), list[Event]()
        for at in range(0, len(reply), size):
            events += reader.push(reply[at : at + size])
        events += reader.push("", last=True)
        said = {kind: "".join(e.text for e in events if e.kind == kind) for kind in ("thought", "text")}
        assert said == {"thought": thought, "text": text}, (size, events)
        assert all(event.text for event in events)


def test_calls_after_thoughts(small: Loaded) -> None:
    form = learn_calls(template(), small.tokenizer)
    assert form is not None
    reader = ThoughtReader(TAGS, True, CallReader(form, ["now"], True))
    events = reader.push(
        'Hm <tool_call>.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', True
    )
    assert [e[:2] for e in events] == [("thought", "Hm <tool_call>."), ("call", "now"), ("arguments", "{}")]
    assert reader.count == 1


def test_a_constraint_begins_after_the_thoughts(small: Loaded) -> None:
    tokenizer = small.tokenizer
    inner = Grammars(tokenizer, [511], 512).compile("json_schema", '{"enum": ["x"]}')
    constraint = After(inner, b"</think>", tokenizer.token_bytes, [511])
    z = np.zeros(512, np.float32)
    constraint.mask(z)
    assert np.isneginf(z[511]) and not np.isneginf(z[:500]).any()
    thoughts, reply = tokenizer.encode("Hm </ think></think>", "text"), tokenizer.encode('"x"', "text")
    along = np.zeros((1 + len(thoughts), 512), np.float32)
    constraint.copy().mask_along(along, thoughts)
    assert np.isneginf(along[:, 511]).all() and np.isneginf(along[-1]).sum() > 400
    assert all(map(constraint.accept, thoughts)) and not constraint.complete
    other = np.zeros(512, np.float32)
    constraint.mask(other)
    assert np.array_equal(other, along[-1])
    assert not constraint.copy().accept(thoughts[0]) and all(map(constraint.accept, reply)) and constraint.accept(511)


THINKING: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Why?"}], "temperature": 0}


def test_thoughts_in_a_reply(server: Running, small: Loaded) -> None:
    """The reply follows a regular expression, as the model knows no thoughts."""
    client = client_of(server)
    given = {"guided_regex": "(Hm|Ah)\\.</think> (yes|no)!", "reasoning_format": "none"}
    raw = client.chat.completions.create(**THINKING, extra_body=given).choices[0].message
    thought, _, text = raw.content.partition("</think> ")
    assert thought in ("Hm.", "Ah.") and text in ("yes!", "no!") and not hasattr(raw, "reasoning_content")
    # Where the prompt has the first tag, a grammar begins after the thoughts.
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["blue"]}}}
    bias = {str(i): 90 for i in small.tokenizer.encode("</think>", "text")[:1]}
    free = client.chat.completions.create(**THINKING, response_format=schema, max_tokens=30, logit_bias=bias).choices[0]
    assert free.message.reasoning_content and not free.message.content and free.finish_reason == "length"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    found = client.chat.completions.create(**THINKING, response_format=schema, extra_body=off).choices[0].message
    assert found.content == '"blue"' and not hasattr(found, "reasoning_content")
    # Otherwise the model may write the tag itself.
    both = {**off, "guided_regex": "<think>(Hm|Ah)\\.</think> (yes|no)!"}
    whole = client.chat.completions.create(**THINKING, extra_body=both).choices[0]
    thought, text = whole.message.reasoning_content, whole.message.content
    assert thought in ("Hm.", "Ah.") and text in ("yes!", "no!")
    deltas = [c.choices[0].delta for c in client.chat.completions.create(**THINKING, extra_body=both, stream=True)]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == thought
    assert "".join(d.content or "" for d in deltas) == text
    for format, status in (("auto", 200), ("deepseek", 200), ("deepseek-legacy", 400), (1, 400)):
        asked = {**THINKING, "max_tokens": 1, "reasoning_format": format}
        assert server.post("/v1/chat/completions", asked)[0] == status, format


def test_thoughts_of_earlier_turns_are_the_template_s(server: Running, small: Loaded) -> None:
    messages = [*THINKING["messages"], {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]
    messages.append({"role": "user", "content": "Sure?"})
    found = client_of(server).chat.completions.create(**{**THINKING, "messages": messages}, max_tokens=1)
    ids = template().encode_messages(small.tokenizer, messages)
    assert found.usage.prompt_tokens == len(ids) and "Hm." in small.tokenizer.decode(ids)


def test_thoughts_in_the_other_protocols(server: Running) -> None:
    asked: dict[str, Any] = {"model": "small", "temperature": 0}
    status, message, _ = server.post("/v1/messages", {**asked, **THINKING, "max_tokens": 5})
    assert status == 200 and [block["type"] for block in message["content"]] == ["thinking"]
    assert message["content"][0]["thinking"] and message["stop_reason"] in ("max_tokens", "end_turn")
    client = client_of(server)
    whole = client.responses.create(**asked, input="Why?", max_output_tokens=5)
    item = whole.output[0]
    assert item.type == "reasoning" and item.content[0].text == message["content"][0]["thinking"]
    with client.responses.stream(**asked, input="Why?", max_output_tokens=5) as stream:
        events = list(stream)
    kinds = [e.type for e in events]
    assert "response.reasoning_text.done" in kinds
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == item.content[0].text
    again = [{"role": "user", "content": "Why?"}, item.model_dump(), {"role": "assistant", "content": "So."}]
    resent = client.responses.create(**asked, input=[*again, {"role": "user", "content": "Hm?"}], max_output_tokens=1)
    thought = {"role": "assistant", "content": "So.", "reasoning_content": item.content[0].text}
    chat = [again[0], thought, {"role": "user", "content": "Hm?"}]
    hidden = [{"role": "user", "content": "Why?"}, {"type": "reasoning", "id": "rs_1", "summary": [], "content": None}]
    assert client.responses.create(**asked, input=[*hidden, *again[2:], chat[2]], max_output_tokens=1).output
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "So."}]
    turns = [again[0], {"role": "assistant", "content": blocks}, chat[2]]
    assert server.post("/v1/messages", {**asked, "messages": turns, "max_tokens": 1})[0] == 200
    expected = client.chat.completions.create(**{**THINKING, "messages": chat}, max_tokens=1)
    assert resent.usage.input_tokens == expected.usage.prompt_tokens


def test_forced_calls_come_after_thoughts(server: Running) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    schema = {"type": "object", "properties": {"place": {"enum": ["here"]}}, "required": ["place"]}
    look = {"type": "function", "function": {"name": "look", "parameters": {**schema, "additionalProperties": False}}}
    asked = {**THINKING, "tools": [look], "tool_choice": "required", "max_tokens": 99}
    called = client_of(server).chat.completions.create(**asked, extra_body=off).choices[0].message
    assert json.loads(called.tool_calls[0].function.arguments) == {"place": "here"}
    assert not hasattr(called, "reasoning_content")
    free = client_of(server).chat.completions.create(**{**asked, "max_tokens": 9}).choices[0].message
    assert free.reasoning_content and not free.tool_calls
