"""Structured output by the names that clients have for it; test_grammar.py has the grammars themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.conftest import Running

openai = pytest.importorskip("openai", reason="needs the extra [dev]")
pytest.importorskip("llguidance", reason="needs the extra [serve]")
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "How much is 13 plus 2?"}]}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as found:
        yield found


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"color", "count"} and value["color"] in ("red", "green") and 0 <= value["count"] <= 99


NAMED = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": NAMED},
        {"extra_body": {"response_format": {"type": "json_object", "schema": SCHEMA}}},  # llama.cpp
        {"extra_body": {"json_schema": SCHEMA}},
        {"extra_body": {"guided_json": SCHEMA}},  # vLLM
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    ],
    ids=range(6),
)
def test_a_schema_by_any_name(client: Any, given: dict[str, Any]) -> None:
    reply = client.chat.completions.create(**ASKED, **given, n=2, temperature=1, seed=1)
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)
    text = ""
    for chunk in client.chat.completions.create(**ASKED, **given, temperature=1, seed=1, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == reply.choices[0].message.content


def test_patterns_choices_and_grammars(client: Any) -> None:
    for given, pattern in (
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "x" "y"'}, "xy"),
        ({"grammar": 'root ::= "x" | "y"'}, "x|y"),
        ({"structured_outputs": {"regex": "c[de]"}}, "c[de]"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"grammar": 'root ::= "x" "y"', "ignore_eos": True}, "xy"),
    ):
        found = client.completions.create(model="small", prompt="The", temperature=1, extra_body=given)
        assert re.fullmatch(pattern, found.choices[0].text), (given, found.choices[0].text)
        assert found.choices[0].finish_reason == "stop"


def test_any_json_object(client: Any) -> None:
    reply = client.chat.completions.create(
        **ASKED, response_format={"type": "json_object"}, logit_bias={"34": 9, "125": 9}
    )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
    assert reply.choices[0].message.content.startswith("{")


def test_the_responses_api_and_pydantic(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Thing(pydantic.BaseModel):
        color: str = pydantic.Field(pattern="^(red|green)$")
        count: int = pydantic.Field(ge=0, le=9)

    parsed = client.chat.completions.parse(**ASKED, response_format=Thing).choices[0].message.parsed
    assert parsed.color in ("red", "green")
    response = client.responses.parse(model="small", input="Hi", text_format=Thing)
    assert response.output_parsed.count in range(10)
