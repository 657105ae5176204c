"""Records as others publish them, as instructions: chats, prompts with completions, Dolly's and GSM8K's names.

    chat_of({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]})
    preference({"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"})

| record | of |
|---|---|
| `{"messages": [{"role", "content"}, ...]}` | OpenAI, TRL, most of the hub |
| `{"conversations": [{"from", "value"}, ...]}` | ShareGPT |
| `{"prompt", "completion"}`, each a string or messages | TRL |
| `{"prompt", "chosen", "rejected"}`, each a string or messages; `{"chosen", "rejected"}` of messages | TRL |
| `instruction`, `context`, `response`; `question`, `answer` | Dolly; GSM8K |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyforge.tokenizers.chat_templates import REASONING

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
_ROLES = {"human": USER, "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT, "developer": SYSTEM}
_CHATS = ("messages", "conversations")
# The fields of an instruction, and what else they are called.
NAMES = {"instruction": ("prompt", "question"), "input": ("context",), "output": ("response", "completion", "answer")}


class Fault(ValueError):
    """What is wrong with a record: got, expected, fix."""


@dataclass(frozen=True)
class Chat:
    """turns: what the user says, each with its reply, the last one's None where there is none. known: the numbers of
    turns whose reply is not to be learned."""

    system: str
    turns: tuple[tuple[str, str | None], ...]
    known: frozenset[int] = frozenset()

    @property
    def answered(self) -> tuple[tuple[str, str], ...]:
        return tuple((user, reply) for user, reply in self.turns if reply is not None)


def is_chat(value: object) -> bool:
    """Whether a record holds messages rather than the fields of an instruction."""
    if not isinstance(value, dict):
        return False
    return any(name in value for name in _CHATS) or any(
        isinstance(value.get(name), list) for name in ("prompt", "completion", "chosen")
    )


def chat_of(value: Mapping[str, Any]) -> Chat:
    """The conversation of a record with `messages`, `conversations`, or a `prompt` and a `completion` of messages.

    As in TRL, replies in a prompt are not learned; as in OpenAI's files, nor are those of weight 0.

    Raises
    ------
    Fault
        For messages that do not alternate between user and assistant, after at most one of the system; content that is
        not text; tools; thoughts in a field of their own; and a conversation without a reply to learn.
    """
    _refuse_tools(value)
    name = next((name for name in _CHATS if name in value), "prompt")
    if name in _CHATS:
        messages = value[name]
    else:
        before = [{**m, "weight": 0} if isinstance(m, dict) else m for m in _list(value, "prompt")]
        messages = [*before, *_list(value, "completion")]
    chat = read_messages(messages, name, str(value.get("system") or ""))
    if len(chat.answered) == len(chat.known):
        raise Fault(f"'{name}' has no message of the assistant, expected a reply to learn; add it or remove the record")
    return chat


def preference(value: Mapping[str, Any]) -> tuple[Chat, str, str]:
    """The conversation up to the user's last message, the preferred reply and the other.

    Raises
    ------
    Fault
        As `chat_of`, and for replies to different conversations.
    """
    _refuse_tools(value)
    before = _list(value, "prompt") if "prompt" in value else []
    system = str(value.get("system") or "")
    sides = []
    for name in ("chosen", "rejected"):
        messages = _list(value, name)
        whole = messages if before and messages[: len(before)] == before else [*before, *messages]
        chat = read_messages(whole, name, system)
        if not chat.turns or chat.turns[-1][1] is None:
            raise Fault(f"'{name}' does not end with a message of the assistant; add the reply or remove the record")
        sides.append(chat)
    (system, first), (_, second) = ((chat.system, chat.turns) for chat in sides)
    asked = first[-1][0]
    if (first[:-1], asked) != (second[:-1], second[-1][0]):
        raise Fault(
            "'chosen' and 'rejected' answer different conversations, expected two replies to one; fix or remove it"
        )
    chosen, rejected = first[-1][1] or "", second[-1][1] or ""
    return Chat(system, (*first[:-1], (asked, None))), chosen, rejected


def _refuse_tools(value: Mapping[str, Any]) -> None:
    if value.get("tools") not in (None, [], "", "[]"):
        raise Fault("it has 'tools', which fine-tuning does not read; remove them or the record")


def read_messages(messages: object, name: str, system: str = "") -> Chat:
    """Messages as turns. name: the field they are from, for messages of errors. system: of a field of its own."""
    if not isinstance(messages, list) or not messages:
        raise Fault(f"'{name}' is {shown(messages)}, expected a list of messages with role and content")
    said = list(_said(messages, name))
    if said and said[0][0] == SYSTEM:
        system, said = said[0][1], said[1:]
    turns: list[tuple[str, str | None]] = []
    known = frozenset(n // 2 for n, (role, _, learned) in enumerate(said) if role == ASSISTANT and not learned)
    for number, (role, content, _) in enumerate(said):
        expected = (USER, ASSISTANT)[number % 2]
        if role != expected:
            raise Fault(f"'{name}' has a message of '{role}' where one of '{expected}' is expected: they take turns")
        if role == USER:
            if not content.strip():
                raise Fault(f"'{name}' has a blank message of the user, expected text; remove the record")
            turns.append((content, None))
        else:
            turns[-1] = (turns[-1][0], content)
    return Chat(system, tuple(turns), known)


def _said(messages: Sequence[object], name: str) -> Iterator[tuple[str, str, bool]]:
    """Role and text of each message, and whether it is to be learned."""
    for message in messages:
        if not isinstance(message, dict):
            raise Fault(f"'{name}' has {shown(message)}, expected a message with role and content")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if message.get("tool_calls") or role in ("tool", "function"):
            raise Fault(f"'{name}' calls tools, which fine-tuning does not read; remove the record")
        if thoughts := next((field for field in REASONING if message.get(field)), None):
            raise Fault(
                f"'{name}' has a message with '{thoughts}', which fine-tuning does not read; put it into the content "
                "or remove it"
            )
        if isinstance(content, list):  # OpenAI's parts
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(parts) else content
        role = _ROLES.get(str(role), role)
        if role not in (USER, ASSISTANT, SYSTEM) or not isinstance(content, str):
            raise Fault(f"'{name}' has {shown(message)}, expected a role (system, user, assistant) and content of text")
        yield role, content, message.get("weight") != 0


def named(value: Mapping[str, Any]) -> dict[str, Any]:
    """The record with Alpaca's names, `input` "" where there is none."""
    found = dict(value)
    for name, others in NAMES.items():
        if name not in found and (other := next((other for other in others if other in found), None)):
            found[name] = found.pop(other)
    if found.get("input") is None and "instruction" in found:
        found["input"] = ""
    return found


def _list(value: Mapping[str, Any], name: str) -> list[object]:
    part = value.get(name)
    if isinstance(part, str):
        role = USER if name == "prompt" else ASSISTANT
        return [{"role": role, "content": part}]
    if not isinstance(part, list):
        raise Fault(f"'{name}' is {shown(part)}, expected text or a list of messages")
    return part


def shown(value: object) -> str:
    """A value in the message of an error: JSON, at most 40 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
