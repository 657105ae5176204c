"""OpenAI's Responses API over a chat: requests, the conversations that they continue, and answers."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from tinyforge.serve import protocol
from tinyforge.serve.answers import Writer
from tinyforge.serve.engine import Answer, Choice, Piece
from tinyforge.serve.protocol import ApiError
from tinyforge.serve.tools import Tools

MOST_KEPT, MOST_KEPT_CHARACTERS = 1024, 16 << 20
"""Responses that can be continued, and characters of their conversations; the oldest are forgotten first."""
LOGPROBS = "message.output_text.logprobs"
TEXTS = ("text", "input_text", "output_text", "reasoning_text")

Conversation = list[dict[str, Any]]
"""Messages, as of a chat."""
Parts = Annotated[list[protocol.Part], Field(fail_fast=True, max_length=4096)]


class InputItem(protocol.Wish):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | Parts | None = None
    call_id: str | None = Field(default=None, max_length=200)
    name: protocol.FunctionName | None = None
    arguments: str | None = None
    output: str | Parts = ""

    def add_to(self, messages: Conversation, place: str) -> None:
        """Add this item to a conversation: a call becomes a part of the reply before it."""
        text = partial(protocol.text_of, kinds=TEXTS, place=place, param="input")
        if self.type == "function_call" and self.name and self.call_id:
            function = {"name": self.name, "arguments": self.arguments or "{}"}
            call = {"id": self.call_id, "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
        elif self.type == "function_call_output" and self.call_id:
            messages.append({"role": "tool", "tool_call_id": self.call_id, "content": text(self.output)})
        elif self.type == "reasoning":
            messages.append({"role": "assistant", "content": "", "reasoning_content": text(self.content or "")})
        elif self.type == "message":
            last = messages[-1] if messages else {}
            said = {"role": self.role, "content": text(self.content or "")}
            if self.role == last.get("role") == "assistant" and last.keys() == {*said, "reasoning_content"}:
                said = {**messages.pop(), **said}  # its thoughts came first
            messages.append(said)
        else:
            message = f"{place} is of type {self.type[:40]!a}, expected a message, reasoning, function_call or "
            raise ApiError(400, f"{message}function_call_output, each with its fields", param="input")


class FlatTool(protocol.Function):
    """A tool in the Responses API has its fields at the top level."""

    type: Literal["function"]


class TextOptions(protocol.Wish):
    format: dict[str, Any] | None = None


class ResponsesRequest(protocol.Wish):
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=4096)]
    model: str | None = Field(default=None, max_length=200)
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=200)
    max_output_tokens: int | None = Field(default=None, ge=1, le=1 << 30)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=protocol.MOST_TOP)
    include: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=protocol.MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | protocol.ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None

    def messages(self, before: Conversation) -> Conversation:
        """The conversation, without the instructions."""
        if isinstance(self.input, str):
            return [*before, {"role": "user", "content": self.input}]
        messages = list(before)
        for number, item in enumerate(self.input):
            item.add_to(messages, f"input.{number}")
        return messages

    def chat(self, messages: Conversation) -> protocol.ChatRequest:
        """The same request to /v1/chat/completions."""
        for name in ("background", "conversation", "prompt"):
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported; leave it out", param=name)
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        same = ("temperature", "top_p", "stream", "tool_choice", "parallel_tool_calls")
        return protocol.ChatRequest.model_validate(
            {
                "messages": first + messages,
                "max_tokens": self.max_output_tokens,
                "response_format": self.text and self.text.format,
                "tools": [{"function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()],
                **{name: getattr(self, name) for name in same},
            }
        )

    @property
    def top(self) -> int | None:
        """How many alternatives with log-probabilities, None for no log-probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None


class Conversations:
    """The conversations of responses, for those that continue them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def get(self, name: str | None) -> Conversation:
        if name is None:
            return []
        with self._lock:
            found = self._kept.get(name)
        if found is None:
            raise ApiError(
                400,
                f"previous response {name[:100]!a} is not, or no longer, known; send the conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found

    def put(self, name: str, messages: Conversation) -> None:
        with self._lock:
            self._kept[name] = messages
            self._characters += _characters(messages)
            while len(self._kept) > MOST_KEPT or self._characters > MOST_KEPT_CHARACTERS:
                self._characters -= _characters(self._kept.popitem(last=False)[1])


def _characters(messages: Conversation) -> int:
    return sum(len(json.dumps(message)) for message in messages)


class ResponseWriter:
    """The body or the events of a response, from those of the chat that it is. keep: called with its id and reply."""

    def __init__(
        self,
        chat: Writer,
        wish: ResponsesRequest,
        model: str,
        keep: Callable[[str, dict[str, Any]], None],
        tools: Tools,
    ) -> None:
        self.chat, self.wish, self.model, self.keep = chat, wish, model, keep
        self.id, self.created, self.number = f"resp_{uuid.uuid4().hex}", int(time.time()), 0
        self.reader = tools.reader()
        self.items: list[dict[str, Any]] = []
        self.parts: list[str] = []  # of the last item's text or arguments
        self.logprobs: list[Any] = []
        self.reason: str | None = None

    @property
    def top_count(self) -> int:
        return self.chat.top_count

    # --- events

    def opening(self, index: int) -> bytes:
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def chunk(self, index: int, piece: Piece | None, reason: str | None, choice: Choice) -> bytes:
        self.reason = reason or self.reason
        return self._take(piece, reason is not None)

    def closing(self, answer: Answer) -> bytes:
        events = self._end()
        whole = self._whole(answer)
        return events + self._event(f"response.{whole['status']}", response=whole)

    def failure(self, error: ApiError) -> bytes:
        fault = error.body["error"]
        failed = self._response("failed", error={"code": "server_error", "message": fault["message"]})
        return self._event("response.failed", response=failed)

    # --- whole

    def body(self, answer: Answer, pieces: Sequence[Piece]) -> dict[str, Any]:
        self.reason = answer.choices[0].reason
        self._take(pieces[0], last=True)
        self._end()
        return self._whole(answer)

    def _whole(self, answer: Answer) -> dict[str, Any]:
        status = "incomplete" if self.reason == "length" else "completed"
        if self.wish.store is not False:
            calls = [
                {"id": i["call_id"], "function": {"name": i["name"], "arguments": i["arguments"]}}
                for i in self.items
                if i["type"] == "function_call"
            ]
            text = "".join(i["content"][0]["text"] for i in self.items if i["type"] == "message")
            thoughts = "".join(i["content"][0]["text"] for i in self.items if i["type"] == "reasoning")
            more = {"tool_calls": calls, "reasoning_content": thoughts}
            kept = {key: value for key, value in more.items() if value}
            self.keep(self.id, {"role": "assistant", "content": text, **kept})
        usage = self.chat.usage_of(answer.choices)
        return self._response(
            status,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        )

    # --- items: the thoughts, a message for the text, and the calls

    def _take(self, piece: Piece | None, last: bool) -> bytes:
        """Add a piece of the reply to the items; returns its events."""
        text = piece.text if piece is not None else ""
        told = self.chat.chat_logprobs(piece)["content"] if piece is not None and self.wish.top is not None else []
        self.logprobs += told
        events = []
        for event in self.reader.push(text, last):
            if event.kind == "call":
                events.append(self._begin("fc", "function_call", arguments="", call_id=event.id, name=event.text))
                continue
            if event.kind == "thought" and (not self.items or self.items[-1]["type"] != "reasoning"):
                events.append(self._begin("rs", "reasoning", summary=[], content=[]))
            if event.kind == "text" and (not self.items or self.items[-1]["type"] != "message"):
                events.append(self._begin_message())
            self.parts.append(event.text)
            kind, more = "function_call_arguments", {}
            if event.kind == "text":
                kind, more, told = "output_text", {"content_index": 0, "logprobs": told}, []
            elif event.kind == "thought":
                kind, more = "reasoning_text", {"content_index": 0}
            events.append(self._event(f"response.{kind}.delta", **self._place, **more, delta=event.text))
        return b"".join(events)

    def _begin(self, mark: str, kind: str, **fields: Any) -> bytes:
        """The events of the end of the item that is under way, and of the start of the next. mark: of its id."""
        ended = self._end_item()
        self.items.append({"id": f"{mark}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields})
        added = {"output_index": len(self.items) - 1, "item": self.items[-1]}
        return ended + self._event("response.output_item.added", **added)

    def _begin_message(self) -> bytes:
        added, part = self._begin("msg", "message", role="assistant", content=[]), self._part("", [])
        return added + self._event("response.content_part.added", **self._place, content_index=0, part=part)

    def _end_item(self) -> bytes:
        """The events of the end of the item that is under way, if there is one."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return b""
        item, text = self.items[-1], "".join(self.parts)
        item["status"] = "incomplete" if self.reason == "length" else "completed"
        self.parts = []
        if item["type"] == "message":
            item["content"] = [self._part(text, self.logprobs)]
            where = {**self._place, "content_index": 0}
            done = self._event("response.output_text.done", **where, text=text, logprobs=self.logprobs)
            done += self._event("response.content_part.done", **where, part=item["content"][0])
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            done = self._event("response.reasoning_text.done", **self._place, content_index=0, text=text)
        else:
            item["arguments"] = text
            more = {"name": item["name"], "arguments": text}
            done = self._event("response.function_call_arguments.done", **self._place, **more)
        return done + self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _end(self) -> bytes:
        """The same at the end of the reply, which has at least an empty message."""
        begun = b"" if self.items else self._begin_message()
        return begun + self._end_item()

    # --- parts

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _event(self, kind: str, **content: Any) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self.number, **content}, separators=(",", ":"))
        self.number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    @staticmethod
    def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        wish, choice = self.wish, self.wish.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": wish.instructions,
            "max_output_tokens": wish.max_output_tokens,
            "metadata": wish.metadata or {},
            "model": self.model,
            "output": self.items,
            "parallel_tool_calls": wish.parallel_tool_calls is not False,
            "previous_response_id": wish.previous_response_id,
            "store": wish.store is not False,
            "temperature": wish.temperature,
            "text": {"format": (wish.text and wish.text.format) or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice.called},
            "tools": [tool.model_dump() for tool in wish.tools or ()],
            "top_p": wish.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": wish.user,
            **more,
        }
