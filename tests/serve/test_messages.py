"""The Messages API without its client, which tests/world has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.serve.conftest import Running

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "How much is 13 plus 2?"}], "max_tokens": 50}


def post(server: Running, **given: Any) -> tuple[int, Any]:
    status, answer, _ = server.post("/v1/messages", {**ASKED, "temperature": 0, **given})
    return status, answer


def test_a_message_is_the_chat_of_its_turns(server: Running) -> None:
    blocks = [{"type": "text", "text": "How much is "}, {"type": "text", "text": "13 plus 2?"}]
    for given in ({}, {"messages": [{"role": "user", "content": blocks}]}):
        status, answer = post(server, **given)
        assert status == 200 and answer["content"] == [{"type": "text", "text": "13 14 15, so 15"}]
        assert answer["stop_reason"] == "end_turn" and answer["stop_sequence"] is None and answer["role"] == "assistant"
        chat = server.post("/v1/chat/completions", {"messages": ASKED["messages"], "temperature": 0})[1]["usage"]
        assert answer["usage"] == {"input_tokens": chat["prompt_tokens"], "output_tokens": chat["completion_tokens"]}
    counted = server.post("/v1/messages/count_tokens", {"messages": ASKED["messages"]})
    assert counted[1] == {"input_tokens": answer["usage"]["input_tokens"]}
    assert post(server, stop_sequences=["#", " 15"])[1]["stop_sequence"] == " 15"
    assert post(server, max_tokens=2)[1]["stop_reason"] == "max_tokens"
    begun = [*ASKED["messages"], {"role": "assistant", "content": "13 14"}]
    assert post(server, messages=begun)[1]["content"][0]["text"] == " 15, so 15"
    schema = {"format": {"type": "json_schema", "schema": {"enum": ["blue"]}}}
    assert post(server, output_config=schema)[1]["content"][0]["text"] == '"blue"'


def test_the_events_of_a_message(server: Running) -> None:
    import httpx

    body = {**ASKED, "temperature": 0, "stream": True}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=30).text
    events = [json.loads(part.partition("data: ")[2]) for part in answer.strip().split("\n\n")]
    assert [part.partition("\n")[0] for part in answer.strip().split("\n\n")] == [f"event: {e['type']}" for e in events]
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert kinds == ["message_start", "content_block_start", *ends]
    said = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert said == "13 14 15, so 15" and events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_what_a_message_may_not_ask(server: Running, start: Callable[..., Any]) -> None:
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    for given, words in (
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [image]}, "only text"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"tools": [{"name": "x" * 200, "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is required"),
        ({"tools": [{"name": "x", "input_schema": {}}], "tool_choice": {"type": "any"}}, "template has no tools"),
        ({"output_config": {"format": {"type": "xml"}}}, "expected text, json_object or json_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "has no tools"),
    ):
        status, answer = post(server, **given)
        assert status == 400 and answer["type"] == "error" and words in answer["error"]["message"], (given, answer)
    with start(key="right") as guarded:
        for key, expected in (("right", 200), ("wrong", 401)):
            status, answer, _ = guarded.post("/v1/messages", ASKED, headers={"x-api-key": key})
            assert status == expected
