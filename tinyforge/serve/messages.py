"""Anthropic's Messages API over a chat: requests and answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tinyforge.serve.answers import Writer
from tinyforge.serve.engine import Answer, Choice, Piece
from tinyforge.serve.protocol import MOST_STOPS, MOST_TOOLS, ApiError, ChatRequest, FunctionName, StopString, Wish
from tinyforge.serve.tools import Tools

REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Block(Wish):
    """A part of a message: text, thinking, tool_use (id, name, input) or tool_result (tool_use_id, content)."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = Field(default="", max_length=200)
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str = Field(default="", max_length=200)
    content: str | Annotated[list[Block], Field(fail_fast=True, max_length=4096)] = ""


Content = str | Annotated[list[Block], Field(fail_fast=True, max_length=4096)]


def text_of(content: str | list[Block], place: str) -> str:
    """The text of blocks that may only be text."""
    if isinstance(content, str):
        return content
    wrong = next((block.type for block in content if block.type != "text"), None)
    if wrong is not None:
        raise ApiError(400, f"{place} has a block of type {wrong[:40]!a}; this model reads only text", param=place)
    return "".join(block.text for block in content)


class Turn(Wish):
    role: Literal["user", "assistant"]
    content: Content

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        """Add this turn to a chat: each result of a tool is a message of its own, before the text."""
        blocks = [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        special = {"user": "tool_result", "assistant": "tool_use"}[self.role]
        plain, calls = [], []
        for block in blocks:
            if block.type != special:
                plain += [block] if block.type not in ("thinking", "redacted_thinking") else []
            elif special == "tool_result":
                result = text_of(block.content, place)
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
            else:
                function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
                calls.append({"id": block.id, "type": "function", "function": function})
        if plain or calls or not blocks:
            message = {"role": self.role, "content": text_of(plain, place)}
            thoughts = "".join(block.thinking for block in blocks) if self.role == "assistant" else ""
            extra = {"tool_calls": calls or None, "reasoning_content": thoughts or None}
            messages.append({**message, **{key: value for key, value in extra.items() if value}})


class MessageTool(Wish):
    name: FunctionName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]


class MessageToolChoice(Wish):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=200)
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Wish):
    format: dict[str, Any] | None = Field(default=None, description="Of type json_schema, with its schema.")


class CountRequest(Wish):
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=4096)]
    model: str | None = Field(default=None, max_length=200)
    system: Content | None = None
    tools: Annotated[list[MessageTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None

    def chat(self, **more: Any) -> ChatRequest:
        """The same request to /v1/chat/completions."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": text_of(self.system, "system")})
        for number, turn in enumerate(self.messages):
            turn.add_to(messages, f"messages.{number}")
        tools = [
            {"function": {"name": t.name, "description": t.description, "parameters": t.input_schema}}
            for t in self.tools or ()
        ]
        given, choice = self.tool_choice, None
        if given is not None:
            choice = {"any": "required", "tool": {"type": "function", "name": given.name or ""}}.get(
                given.type, given.type
            )
        return ChatRequest.model_validate(
            {
                "messages": messages,
                "tools": tools,
                "tool_choice": choice,
                "parallel_tool_calls": False if given is not None and given.disable_parallel_tool_use else None,
                **more,
            }
        )


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, le=1 << 30)
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=1 << 30)
    stop_sequences: Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None

    def request(self) -> ChatRequest:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        given = {name: getattr(self, name) for name in names}
        format = self.output_config and self.output_config.format
        return self.chat(**given, stop=self.stop_sequences or None, response_format=format)


class MessageWriter:
    """The body or the events of a message, from those of the chat that it is."""

    top_count = 0

    def __init__(self, chat: Writer, model: str, tools: Tools) -> None:
        self.chat, self.model, self.reader = chat, model, tools.reader()
        self.blocks: list[dict[str, Any]] = []
        self.parts: list[str] = []  # of the last block's text or input
        self.reason: str | None = None
        self.head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def opening(self, index: int) -> bytes:
        usage = {"input_tokens": sum(map(len, self.chat.prompts)), "output_tokens": 0}
        begun: dict[str, Any] = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return self._event("message_start", message=begun)

    def chunk(self, index: int, piece: Piece | None, reason: str | None, choice: Choice) -> bytes:
        self.reason = reason or self.reason
        return self._take(piece.text if piece is not None else "", reason is not None)

    def closing(self, answer: Answer) -> bytes:
        usage = {"output_tokens": self.chat.usage_of(answer.choices)["completion_tokens"]}
        end = self._event("message_delta", delta=self._end(answer.choices[0]), usage=usage)
        return self._end_block() + end + self._event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return self._event("error", **error.body)

    def body(self, answer: Answer, pieces: Sequence[Piece]) -> dict[str, Any]:
        self.reason = answer.choices[0].reason
        self._take(pieces[0].text, last=True)
        self._end_block()
        usage = self.chat.usage_of(answer.choices)
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {**self.head, "content": self.blocks, **self._end(answer.choices[0]), "usage": counts}

    def _end(self, choice: Choice) -> dict[str, Any]:
        reason = REASONS.get(self.reason or "", self.reason)
        if self.reason == "stop" and self.reader.count:
            reason = "tool_use"
        elif choice.stream.matched is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stream.matched}

    def _take(self, text: str, last: bool) -> bytes:
        """Add some of the reply to the blocks; returns its events."""
        events = []
        for event in self.reader.push(text, last):
            if event.kind == "call":
                events.append(self._begin({"type": "tool_use", "id": event.id, "name": event.text, "input": {}}))
                continue
            if event.kind == "thought" and (not self.blocks or self.blocks[-1]["type"] != "thinking"):
                events.append(self._begin({"type": "thinking", "thinking": "", "signature": ""}))
            if event.kind == "text" and (not self.blocks or self.blocks[-1]["type"] != "text"):
                events.append(self._begin({"type": "text", "text": ""}))
            self.parts.append(event.text)
            delta = {"type": "input_json_delta", "partial_json": event.text}
            if event.kind == "text":
                delta = {"type": "text_delta", "text": event.text}
            elif event.kind == "thought":
                delta = {"type": "thinking_delta", "thinking": event.text}
            events.append(self._event("content_block_delta", index=len(self.blocks) - 1, delta=delta))
        return b"".join(events)

    def _begin(self, block: dict[str, Any]) -> bytes:
        ended = self._end_block()
        self.blocks.append(block)
        return ended + self._event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _end_block(self) -> bytes:
        if not self.blocks:
            return b""
        block, text = self.blocks[-1], "".join(self.parts)
        self.parts = []
        if block["type"] != "tool_use":
            block[block["type"]] = text
        else:
            try:
                block["input"] = json.loads(text)
            except ValueError:  # cut off
                block["input"] = {}
        return self._event("content_block_stop", index=len(self.blocks) - 1)

    @staticmethod
    def _event(kind: str, **content: Any) -> bytes:
        data = json.dumps({**content, "type": kind}, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()
